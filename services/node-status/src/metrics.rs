//! Gauges of the report queue and the age of the lease, computed when metrics are read.

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
pub(crate) struct LastRenewal(Arc<AtomicI64>);

impl LastRenewal {
    /// Counts from the start of the process until the first renewal.
    fn new() -> Self {
        Self(Arc::new(AtomicI64::new(now_unix_nanos())))
    }

    /// Records a renewal.
    pub(crate) fn record(&self) {
        self.0.store(now_unix_nanos(), Ordering::Relaxed);
    }

    /// Whether the last renewal is at most this long ago.
    pub(crate) fn is_within(&self, time: Duration) -> bool {
        self.age_seconds() <= time.as_secs_f64()
    }

    /// Sets the last renewal to this long ago.
    #[cfg(test)]
    pub(crate) fn set_age(&self, time: Duration) {
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
enum StateFigure {
    Queued,
    Oldest,
    Throttled,
    Lease,
}

struct StateMetric {
    writer: Arc<dyn ControlPlaneWriter>,
    last_renewal: LastRenewal,
    figure: StateFigure,
}

impl fmt::Debug for StateMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StateMetric").field(&self.figure).finish()
    }
}

impl EncodeMetric for StateMetric {
    fn encode(&self, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let state = self.writer.state();
        match self.figure {
            StateFigure::Queued => ConstGauge::new(i64::from(state.queued)).encode(encoder),
            StateFigure::Oldest => ConstGauge::new(state.oldest_age_ms as f64 / 1000.0).encode(encoder),
            StateFigure::Throttled => ConstCounter::new(state.throttled_seconds).encode(encoder),
            StateFigure::Lease => ConstGauge::new(self.last_renewal.age_seconds()).encode(encoder),
        }
    }

    fn metric_type(&self) -> MetricType {
        if matches!(self.figure, StateFigure::Throttled) { MetricType::Counter } else { MetricType::Gauge }
    }
}

/// Registers the metrics; the returned handle records renewals.
pub(crate) fn register(metrics: &Metrics, writer: &Arc<dyn ControlPlaneWriter>) -> LastRenewal {
    let last_renewal = LastRenewal::new();
    for (name, help, figure) in [
        (
            "keelson_node_status_queued_reports",
            "Writes of the Node and of pods that wait for the control plane",
            StateFigure::Queued,
        ),
        (
            "keelson_node_status_oldest_report_seconds",
            "How long the oldest write has waited for the control plane",
            StateFigure::Oldest,
        ),
        (
            "keelson_node_status_throttled_seconds",
            "Time that writes have waited for rate limits and for Retry-After of the control plane",
            StateFigure::Throttled,
        ),
        (
            "keelson_node_status_lease_age_seconds",
            "Time since the lease of the node was last renewed",
            StateFigure::Lease,
        ),
    ] {
        metrics.register(
            name,
            help,
            StateMetric { writer: Arc::clone(writer), last_renewal: last_renewal.clone(), figure },
        );
    }
    last_renewal
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::NoControlPlane;

    #[test]
    fn metrics_have_queued_reports_and_the_age_of_the_lease() {
        let metrics = Metrics::new();
        let writer: Arc<dyn ControlPlaneWriter> = Arc::new(NoControlPlane::new(&metrics));
        let last_renewal = register(&metrics, &writer);
        last_renewal.set_age(Duration::from_secs(90));
        let age = || {
            let text = metrics.text();
            let line = text.lines().find_map(|l| l.strip_prefix("keelson_node_status_lease_age_seconds "));
            line.unwrap().parse::<f64>().unwrap()
        };
        assert!(age() >= 90.0);
        last_renewal.record();
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
