//! The kubelet's metrics of the cgroup tree (runtime-and-resources.md §8.1).

use std::time::Duration;

use keelson_resource_manager_core::eviction::order::Order;
use keelson_service_kit::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the buckets in seconds: a cgroup takes 0.1 ms to 10 ms, a killing one longer.
const BUCKETS: [f64; 10] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    operation_type: &'static str,
}

/// The metrics of this service.
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
        metrics.register("kubelet_cgroup_version", "The cgroup version that governs pods", version.clone());
        Self { durations, version }
    }

    /// An operation (`create`, `update` or `destroy`) has taken so long.
    pub(crate) fn observe(&self, operation_type: &'static str, took: Duration) {
        self.durations.get_or_create(&Operation { operation_type }).observe(took.as_secs_f64());
    }

    /// The version that governs.
    pub(crate) fn version(&self, version: i64) {
        self.version.set(version);
    }
}

/// Upper bounds of the ages of figures in seconds: a look is as old as the file systems' figures are.
const AGES: [f64; 8] = [0.001, 0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 120.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvictionSignal {
    eviction_signal: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PreemptionSignal {
    preemption_signal: String,
}

/// The kubelet's metrics of evictions (runtime-and-resources.md §12.2). The two that count are gauges here, for the text
/// format would add `_total` to the names of counters.
#[derive(Debug, Clone)]
pub(crate) struct EvictionMetrics {
    evictions: Family<EvictionSignal, Gauge>,
    preemptions: Family<PreemptionSignal, Gauge>,
    ages: Histogram,
}

impl EvictionMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let (evictions, preemptions) = (Family::default(), Family::default());
        let ages = Histogram::new(AGES);
        metrics.register("kubelet_evictions", "Pods that were ended, by signal", evictions.clone());
        metrics.register("kubelet_preemptions", "Pods that made room for critical pods", preemptions.clone());
        metrics.register(
            "kubelet_eviction_stats_age_seconds",
            "How old the figures were for which a pod was ended",
            ages.clone(),
        );
        Self { evictions, preemptions, ages }
    }

    /// An order was given.
    pub(crate) fn count(&self, order: &Order) {
        if order.reason == "Preempting" {
            let label = PreemptionSignal { preemption_signal: order.signal.clone() };
            self.preemptions.get_or_create(&label).inc();
        } else {
            let label = EvictionSignal { eviction_signal: order.signal.clone() };
            self.evictions.get_or_create(&label).inc();
        }
    }

    /// A pod was ended for figures of this age.
    pub(crate) fn age(&self, age: Duration) {
        self.ages.observe(age.as_secs_f64());
    }
}
