//! The gauges of pods that nobody wants any more (volumes.md §3.17), and how long operations and measurements take
//! (§13).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_service_kit::Metrics;
use keelson_volume_manager_core::figures::Means;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets of operations in seconds.
const OPERATION_SECONDS: [f64; 13] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// The same of measurements: what a Prometheus histogram has by default.
const MEASUREMENT_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    volume_plugin: String,
    operation_name: &'static str,
    status: &'static str,
    migrated: &'static str,
}

/// What is done with a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// It is set up, or brought up to date.
    Mount,
    /// It is taken down.
    Unmount,
    /// Its files go to the pod's group; a part of a mount that counts by itself, too.
    ApplyAccessControl,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WholeLabels {
    plugin_name: String,
    operation_name: &'static str,
}

/// How long operations take, by plugin and outcome. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Operations {
    single: Family<OperationLabels, Histogram, fn() -> Histogram>,
    whole: Family<WholeLabels, Histogram, fn() -> Histogram>,
}

impl Operations {
    /// Registers the histograms.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let own: fn() -> Histogram = || Histogram::new(OPERATION_SECONDS);
        let (single, whole) = (Family::new_with_constructor(own), Family::new_with_constructor(own));
        let help = "Seconds that operations on volumes took, by plugin, operation and outcome";
        metrics.register("storage_operation_duration_seconds", help, single.clone());
        let help = "Seconds from when a pod wanted a volume until it was mounted, by plugin";
        metrics.register("volume_operation_total_seconds", help, whole.clone());
        Self { single, whole }
    }

    /// A volume that was waited for is there, or up to date, with every failure on the way.
    pub(crate) fn mounted(&self, plugin_name: String, waited: Duration) {
        let labels = WholeLabels { plugin_name, operation_name: "overall_volume_mount" };
        self.whole.get_or_create(&labels).observe(waited.as_secs_f64());
    }

    /// One has ended; `plugin` as Kubernetes names it, such as `kubernetes.io/empty-dir`.
    pub(crate) fn ended(&self, plugin: String, operation: Operation, good: bool, took: Duration) {
        let labels = OperationLabels {
            volume_plugin: plugin,
            operation_name: match operation {
                Operation::Mount => "volume_mount",
                Operation::Unmount => "volume_unmount",
                Operation::ApplyAccessControl => "volume_apply_access_control",
            },
            status: if good { "success" } else { "fail-unknown" },
            migrated: "false",
        };
        self.single.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MeasurementLabels {
    metric_source: &'static str,
}

/// How long measurements take, by what measures. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Measurements(Family<MeasurementLabels, Histogram, fn() -> Histogram>);

impl Measurements {
    /// Registers the histogram.
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let own: fn() -> Histogram = || Histogram::new(MEASUREMENT_SECONDS);
        let seconds = Family::new_with_constructor(own);
        let help = "Seconds that measurements of volumes took, by what measures";
        metrics.register("kubelet_volume_metric_collection_duration_seconds", help, seconds.clone());
        Self(seconds)
    }

    /// One has ended, well or not.
    pub(crate) fn ended(&self, means: Means, took: Duration) {
        let source = match means {
            Means::None => return,
            Means::FileSystem => "statfs",
            Means::Walk => "du",
        };
        self.0.get_or_create(&MeasurementLabels { metric_source: source }).observe(took.as_secs_f64());
    }
}

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
    fn operations_are_told_by_plugin_and_outcome() {
        let metrics = Metrics::new();
        let operations = Operations::register(&metrics);
        let ended = |operation, good| {
            operations.ended("kubernetes.io/empty-dir".into(), operation, good, Duration::from_millis(300));
        };
        ended(Operation::Mount, true);
        ended(Operation::Mount, true);
        ended(Operation::Mount, false);
        ended(Operation::Unmount, true);
        ended(Operation::ApplyAccessControl, true);
        let text = metrics.text();
        for (operation, status, count) in [
            ("volume_mount", "success", 2),
            ("volume_mount", "fail-unknown", 1),
            ("volume_unmount", "success", 1),
            ("volume_apply_access_control", "success", 1),
        ] {
            let line = format!(
                "storage_operation_duration_seconds_count{{volume_plugin=\"kubernetes.io/empty-dir\",\
                 operation_name=\"{operation}\",status=\"{status}\",migrated=\"false\"}} {count}"
            );
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }

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
