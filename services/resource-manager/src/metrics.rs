//! The kubelet's metrics of cgroups (runtime-and-resources.md §8.1) and evictions (§12.2).

use std::time::Duration;

use keelson_resource_manager_core::eviction::order::{Order, OrderKind, PREEMPTION, eviction_signals};
use keelson_resource_manager_core::node_shutdown::times::ShutdownTimes;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets in seconds: an operation takes 0.1 ms to 10 ms, longer when it kills processes.
const BUCKETS: [f64; 10] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    operation_type: &'static str,
}

/// The metrics of the cgroup tree.
#[derive(Debug, Clone)]
pub(crate) struct CgroupMetrics {
    durations: Family<Operation, Histogram, fn() -> Histogram>,
    version: Gauge,
}

impl CgroupMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let durations: Family<Operation, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let version = Gauge::default();
        metrics.register(
            "kubelet_cgroup_manager_duration_seconds",
            "Duration of operations on pods' cgroups, by operation",
            durations.clone(),
        );
        metrics.register(
            "kubelet_cgroup_version",
            "The cgroup version that is used for pods",
            version.clone(),
        );
        Self { durations, version }
    }

    /// Records the duration of an operation (`create`, `update` or `destroy`).
    pub(crate) fn observe(&self, operation_type: &'static str, took: Duration) {
        self.durations.get_or_create(&Operation { operation_type }).observe(took.as_secs_f64());
    }

    /// Sets the cgroup version.
    pub(crate) fn version(&self, version: i64) {
        self.version.set(version);
    }
}

/// Upper bounds of the ages of measurements in seconds: filesystem statistics are the oldest.
const AGES: [f64; 8] = [0.001, 0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 120.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvictionSignal {
    eviction_signal: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PreemptionSignal {
    preemption_signal: String,
}

/// The kubelet's metrics of evictions (runtime-and-resources.md §12.2). The two counters are gauges here, because the text
/// format would add `_total` to the names of counters. All series exist from the start: a series that appears with its first
/// eviction would show no increase.
#[derive(Debug, Clone)]
pub(crate) struct EvictionMetrics {
    evictions: Family<EvictionSignal, Gauge>,
    preemptions: Family<PreemptionSignal, Gauge>,
    ages: Histogram,
}

impl EvictionMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let evictions: Family<EvictionSignal, Gauge> = Family::default();
        let preemptions: Family<PreemptionSignal, Gauge> = Family::default();
        for signal in eviction_signals() {
            evictions.get_or_create(&EvictionSignal { eviction_signal: signal.to_owned() }).set(0);
        }
        preemptions.get_or_create(&PreemptionSignal { preemption_signal: PREEMPTION.to_owned() }).set(0);
        let ages = Histogram::new(AGES);
        metrics.register("kubelet_evictions", "Pods that were evicted, by signal", evictions.clone());
        metrics.register(
            "kubelet_preemptions",
            "Pods that were preempted for critical pods",
            preemptions.clone(),
        );
        metrics.register(
            "kubelet_eviction_stats_age_seconds",
            "Age of the statistics that led to an eviction",
            ages.clone(),
        );
        Self { evictions, preemptions, ages }
    }

    /// Counts an eviction or a preemption.
    pub(crate) fn count(&self, order: &Order) {
        match order.kind() {
            OrderKind::Eviction => {
                let label = EvictionSignal { eviction_signal: order.signal.clone() };
                self.evictions.get_or_create(&label).inc();
            }
            OrderKind::Preemption => {
                let label = PreemptionSignal { preemption_signal: order.signal.clone() };
                self.preemptions.get_or_create(&label).inc();
            }
            OrderKind::NodeShutdown | OrderKind::NodeDrain => {}
        }
    }

    /// Records the age of the measurements that led to an eviction.
    pub(crate) fn age(&self, age: Duration) {
        self.ages.observe(age.as_secs_f64());
    }
}

/// The kubelet's metrics of the last graceful shutdown (node-and-api.md §11), which outlast the reboot.
#[derive(Debug, Clone)]
pub(crate) struct ShutdownMetrics {
    start: Gauge,
    end: Gauge,
}

impl ShutdownMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let (start, end) = (Gauge::default(), Gauge::default());
        metrics.register(
            "kubelet_graceful_shutdown_start_time_seconds",
            "When pods were last begun to be ended before a shutdown, in seconds since 1970; 0: never",
            start.clone(),
        );
        metrics.register(
            "kubelet_graceful_shutdown_end_time_seconds",
            "When that was completed, in seconds since 1970; 0: not yet, or it was interrupted",
            end.clone(),
        );
        Self { start, end }
    }

    /// Shows these times.
    pub(crate) fn show(&self, times: ShutdownTimes) {
        let (start, end) = times.seconds();
        self.start.set(start);
        self.end.set(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_and_preemption_metrics_start_at_zero_for_every_signal() {
        let registry = Metrics::new();
        let metrics = EvictionMetrics::new(&registry);
        let has = |line: &str| registry.text().lines().any(|found| found == line);
        for signal in [
            "memory.available",
            "allocatableMemory.available",
            "nodefs.available",
            "nodefs.inodesFree",
            "imagefs.available",
            "imagefs.inodesFree",
            "containerfs.available",
            "containerfs.inodesFree",
            "pid.available",
            "emptydirfs.limit",
            "ephemeralpodfs.limit",
            "ephemeralcontainerfs.limit",
        ] {
            let line = format!("kubelet_evictions{{eviction_signal=\"{signal}\"}} 0");
            assert!(has(&line), "{line}\n{}", registry.text());
        }
        let preemptions = "kubelet_preemptions{preemption_signal=\"preemption\"}";
        assert!(has(&format!("{preemptions} 0")), "{}", registry.text());

        let series = registry.text().lines().count();
        let order = |reason: &str, signal: &str| Order {
            reason: reason.to_owned(),
            signal: signal.to_owned(),
            ..Order::default()
        };
        metrics.count(&order("Evicted", "emptydirfs.limit"));
        metrics.count(&order("Preempting", "preemption"));
        metrics.count(&order("Terminated", "node-shutdown"));
        assert!(has("kubelet_evictions{eviction_signal=\"emptydirfs.limit\"} 1"), "{}", registry.text());
        assert!(has(&format!("{preemptions} 1")), "{}", registry.text());
        assert_eq!(registry.text().lines().count(), series, "no new series appears");
    }
}
