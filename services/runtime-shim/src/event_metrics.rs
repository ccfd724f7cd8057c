//! The kubelet's metrics of the runtime's event streams (pod-lifecycle.md §19): of CRI's events, or of containerd's
//! where those are used instead.

use keelson_service_kit::{Metrics, now_unix_nanos};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets in seconds: Prometheus' defaults.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const NANOS: f64 = 1e9;

/// Metrics of the event streams. The two counts are gauges, because a counter would get the suffix `_total`.
#[derive(Debug, Clone)]
pub(crate) struct EventMetrics {
    opened: Gauge,
    failed: Gauge,
    latency: Histogram,
}

impl EventMetrics {
    pub(crate) fn new() -> Self {
        Self { opened: Gauge::default(), failed: Gauge::default(), latency: Histogram::new(SECONDS) }
    }

    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "Streams of events that the container runtime has opened";
        metrics.register("kubelet_evented_pleg_connection_success_count", help, self.opened.clone());
        let help = "Streams of events that the container runtime has refused or broken off";
        metrics.register("kubelet_evented_pleg_connection_error_count", help, self.failed.clone());
        let help = "Seconds between an event and its arrival";
        metrics.register("kubelet_evented_pleg_connection_latency_seconds", help, self.latency.clone());
    }

    /// Counts an opened stream.
    pub(crate) fn opened(&self) {
        self.opened.inc();
    }

    /// Counts a stream that was refused or has ended.
    pub(crate) fn failed(&self) {
        self.failed.inc();
    }

    /// Records the latency of an event with this timestamp, in nanoseconds since 1970; 0: it has none.
    pub(crate) fn observe_latency(&self, unix_nanos: i64) {
        if unix_nanos > 0 {
            let delay = Ord::max(now_unix_nanos() - unix_nanos, 0);
            #[expect(clippy::cast_precision_loss, reason = "a histogram has no nanoseconds")]
            self.latency.observe(delay as f64 / NANOS);
        }
    }
}
