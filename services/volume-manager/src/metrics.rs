//! The gauges of pods that nobody wants any more (volumes.md §3.17).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_service_kit::Metrics;
use prometheus_client::metrics::gauge::Gauge;

/// Counts pods whose folders go. A round begins with each complete set of wanted pods. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Orphans(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    cleaned: Gauge,
    errors: Gauge,
    /// Those whose folders could not be removed so far.
    failing: Mutex<BTreeSet<String>>,
}

impl Orphans {
    /// Registers the gauges.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(
            "kubelet_orphan_pod_cleaned_volumes",
            "Pods whose folders have gone since the latest complete set of wanted pods",
            own.0.cleaned.clone(),
        );
        metrics.register(
            "kubelet_orphan_pod_cleaned_volumes_errors",
            "Pods whose folders are to go and could not be removed",
            own.0.errors.clone(),
        );
        own
    }

    fn failing(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, failing: usize) {
        self.0.errors.set(i64::try_from(failing).unwrap_or(i64::MAX));
    }

    /// A round begins.
    pub(crate) fn begin(&self) {
        self.0.cleaned.set(0);
    }

    /// Nothing is left of a pod.
    pub(crate) fn gone(&self, uid: &str) {
        self.0.cleaned.inc();
        let mut failing = self.failing();
        failing.remove(uid);
        self.show(failing.len());
    }

    /// Something of a pod could not be removed; it is tried again.
    pub(crate) fn failed(&self, uid: &str) {
        let mut failing = self.failing();
        failing.insert(uid.to_owned());
        self.show(failing.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_counts_what_went_and_what_could_not_go() {
        let metrics = Metrics::new();
        let orphans = Orphans::register(&metrics);
        let shows = |cleaned: &str, errors: &str| {
            let text = metrics.text();
            let line = |name: &str, value: &str| text.lines().any(|line| line == format!("{name} {value}"));
            line("kubelet_orphan_pod_cleaned_volumes", cleaned)
                && line("kubelet_orphan_pod_cleaned_volumes_errors", errors)
        };
        orphans.failed("a");
        orphans.failed("a");
        orphans.gone("b");
        assert!(shows("1", "1"), "{}", metrics.text());
        orphans.begin();
        assert!(shows("0", "1"), "{}", metrics.text());
        orphans.gone("a");
        assert!(shows("1", "0"), "{}", metrics.text());
    }
}
