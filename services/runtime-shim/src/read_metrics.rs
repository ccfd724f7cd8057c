//! The kubelet's metrics of the reads from the runtime (pod-lifecycle.md §12).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use keelson_service_kit::Metrics;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

/// Upper bounds of the buckets in seconds: Prometheus' defaults.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Durations of reads, and the time of the last complete relist.
#[derive(Debug, Clone)]
pub(crate) struct ReadMetrics {
    relist_seconds: Histogram,
    relist_interval: Histogram,
    pod_seconds: Histogram,
    pub(crate) last_seen: Gauge,
    last_start: Arc<Mutex<Option<Instant>>>,
}

impl ReadMetrics {
    pub(crate) fn new() -> Self {
        Self {
            relist_seconds: Histogram::new(SECONDS),
            relist_interval: Histogram::new(SECONDS),
            pod_seconds: Histogram::new(SECONDS),
            last_seen: Gauge::default(),
            last_start: Arc::default(),
        }
    }

    pub(crate) fn register(&self, metrics: &Metrics) {
        let help = "Seconds that a read of all pods from the runtime took";
        metrics.register("kubelet_pleg_relist_duration_seconds", help, self.relist_seconds.clone());
        let help = "Seconds between the beginnings of two reads of all pods";
        metrics.register("kubelet_pleg_relist_interval_seconds", help, self.relist_interval.clone());
        let help = "Seconds that a read of one pod from the runtime took";
        metrics.register("kubelet_pleg_pod_relist_duration_seconds", help, self.pod_seconds.clone());
        let help = "When all pods were last read, in seconds since 1970";
        metrics.register("kubelet_pleg_last_seen_seconds", help, self.last_seen.clone());
    }

    /// Records the start of a relist.
    pub(crate) fn relist_started(&self) -> Instant {
        let now = Instant::now();
        let before = self.last_start.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
        if let Some(before) = before {
            self.relist_interval.observe((now - before).as_secs_f64());
        }
        now
    }

    /// Records the end of a relist and whether it was complete.
    pub(crate) fn relist_ended(&self, took: Duration, complete: bool) {
        self.relist_seconds.observe(took.as_secs_f64());
        if complete {
            self.last_seen.set(keelson_service_kit::now_unix_nanos() / 1_000_000_000);
        }
    }

    /// Records a read of one pod.
    pub(crate) fn pod_read(&self, took: Duration) {
        self.pod_seconds.observe(took.as_secs_f64());
    }
}
