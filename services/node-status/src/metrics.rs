//! What waits for the control plane and how old the lease is, counted when somebody asks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use keelson_service_kit::{Metrics, now_unix_nanos};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::writer::ControlPlaneWriter;

/// When the lease was last renewed. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Renewed(Arc<AtomicI64>);

impl Renewed {
    /// It counts from the beginning of the process until it is renewed for the first time.
    fn new() -> Self {
        Self(Arc::new(AtomicI64::new(now_unix_nanos())))
    }

    /// It has been renewed.
    pub(crate) fn now(&self) {
        self.0.store(now_unix_nanos(), Ordering::Relaxed);
    }

    /// It was renewed no longer than that ago.
    pub(crate) fn is_within(&self, time: Duration) -> bool {
        self.age_seconds() <= time.as_secs_f64()
    }

    /// It was renewed so long ago.
    #[cfg(test)]
    pub(crate) fn ago(&self, time: Duration) {
        let nanos = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        self.0.store(now_unix_nanos() - nanos, Ordering::Relaxed);
    }

    fn age_seconds(&self) -> f64 {
        seconds(now_unix_nanos().saturating_sub(self.0.load(Ordering::Relaxed)).max(0))
    }
}

fn seconds(nanos: i64) -> f64 {
    nanos as f64 / 1e9
}

#[derive(Debug, Clone, Copy)]
enum What {
    Queued,
    Oldest,
    Throttled,
    Lease,
}

struct Asked {
    writer: Arc<dyn ControlPlaneWriter>,
    renewed: Renewed,
    what: What,
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Asked").field(&self.what).finish()
    }
}

impl EncodeMetric for Asked {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let state = self.writer.state();
        match self.what {
            What::Queued => ConstGauge::new(i64::from(state.queued)).encode(encoder),
            What::Oldest => ConstGauge::new(state.oldest_age_ms as f64 / 1000.0).encode(encoder),
            What::Throttled => ConstCounter::new(state.throttled_seconds).encode(encoder),
            What::Lease => ConstGauge::new(self.renewed.age_seconds()).encode(encoder),
        }
    }

    fn metric_type(&self) -> MetricType {
        if matches!(self.what, What::Throttled) { MetricType::Counter } else { MetricType::Gauge }
    }
}

/// Registers all of them; the answer is to be told of each renewal.
pub(crate) fn register(metrics: &Metrics, writer: &Arc<dyn ControlPlaneWriter>) -> Renewed {
    let renewed = Renewed::new();
    for (name, help, what) in [
        (
            "keelson_node_status_queued_reports",
            "Writes of the Node and of pods that wait for the control plane",
            What::Queued,
        ),
        (
            "keelson_node_status_oldest_report_seconds",
            "For how long the oldest write has waited for the control plane",
            What::Oldest,
        ),
        (
            "keelson_node_status_throttled_seconds",
            "For how long writes have waited for their turn, and the control plane has asked to wait, all told",
            What::Throttled,
        ),
        (
            "keelson_node_status_lease_age_seconds",
            "Since the lease of the node was last renewed",
            What::Lease,
        ),
    ] {
        metrics.register(name, help, Asked { writer: Arc::clone(writer), renewed: renewed.clone(), what });
    }
    renewed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::NoControlPlane;

    #[test]
    fn what_waits_and_the_age_of_the_lease_are_told_when_asked() {
        let metrics = Metrics::new();
        let writer: Arc<dyn ControlPlaneWriter> = Arc::new(NoControlPlane::new(&metrics));
        let renewed = register(&metrics, &writer);
        renewed.ago(Duration::from_secs(90));
        let age = || {
            let text = metrics.text();
            let line = text.lines().find_map(|l| l.strip_prefix("keelson_node_status_lease_age_seconds "));
            line.unwrap().parse::<f64>().unwrap()
        };
        assert!(age() >= 90.0);
        renewed.now();
        assert!(age() < 60.0);
        for line in [
            "keelson_node_status_queued_reports 0",
            "keelson_node_status_oldest_report_seconds 0.0",
            "keelson_node_status_throttled_seconds_total 0.0",
        ] {
            assert!(metrics.text().lines().any(|l| l == line), "{line}\n{}", metrics.text());
        }
    }
}
