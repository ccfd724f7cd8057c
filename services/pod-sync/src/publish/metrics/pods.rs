//! Metrics of the lifecycle of pods and the turns of their workers (pod-lifecycle.md §7, §8.1 and §19). None is per pod.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::census::static_label;
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::start_time::StartDuration;
use keelson_service_kit::Metrics as Registry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;

use super::SECONDS;
use crate::state::eviction_inputs::seen_unix_nanos;

/// Buckets of the seconds from the first time that a pod was seen until it runs.
const START_SECONDS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
/// Buckets of the number of containers of a pod.
const CONTAINERS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTurn {
    operation_type: &'static str,
}

/// The gauge of the node's first pod with a network of its own; there once that is known.
#[derive(Debug, Clone)]
struct FirstNetwork(Registry, Arc<AtomicBool>);

impl FirstNetwork {
    fn took(&self, seconds: f64) {
        if !self.1.swap(true, Ordering::Relaxed) {
            let name = "kubelet_first_network_pod_start_sli_duration_seconds";
            let help = "Seconds from the creation of the first pod with a network of its own until it runs, pulls and init containers left out";
            self.0.register(name, help, ConstGauge::new(seconds));
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Origin {
    r#static: &'static str,
}

/// Counters and histograms. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PodMetrics {
    turns: Family<OfTurn, Histogram, fn() -> Histogram>,
    first_turn: Histogram,
    start: Histogram,
    start_total: Histogram,
    start_of_node: Histogram,
    first_network: FirstNetwork,
    containers: Histogram,
    orphans: Counter,
    restarted: Family<Origin, Counter>,
}

impl PodMetrics {
    /// Registers all of them.
    pub(super) fn register(registry: &Registry) -> Self {
        let metrics = Self {
            turns: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            first_turn: Histogram::new(SECONDS),
            start: Histogram::new(START_SECONDS),
            start_total: Histogram::new(START_SECONDS),
            start_of_node: Histogram::new(START_SECONDS),
            first_network: FirstNetwork(registry.clone(), Arc::default()),
            containers: Histogram::new(CONTAINERS),
            orphans: Counter::default(),
            restarted: Family::default(),
        };
        let help = "Seconds from the trigger of a worker's turn to the end of the turn";
        registry.register("kubelet_pod_worker_duration_seconds", help, metrics.turns.clone());
        let help =
            "Seconds from the first sight of a new pod to the first turn of its worker that may begin it";
        registry.register("kubelet_pod_worker_start_duration_seconds", help, metrics.first_turn.clone());
        let help = "Seconds from the first sight of a pod until it is shown as Running";
        registry.register("kubelet_pod_start_duration_seconds", help, metrics.start.clone());
        let help = "Seconds from the creation of a pod of the API until it runs";
        registry.register("kubelet_pod_start_total_duration_seconds", help, metrics.start_total.clone());
        let help =
            "Seconds from the creation of a pod of the API until it runs, pulls and init containers left out";
        registry.register("kubelet_pod_start_sli_duration_seconds", help, metrics.start_of_node.clone());
        let help = "Regular containers of the pods that were begun";
        registry.register("kubelet_containers_per_pod_count", help, metrics.containers.clone());
        let help = "Pods that only the runtime knew and that were ended";
        registry.register("kubelet_orphaned_runtime_pods", help, metrics.orphans.clone());
        let help = "Pods that began anew under the UID of an earlier one, by whether they are static";
        registry.register("kubelet_restarted_pods", help, metrics.restarted.clone());
        metrics
    }

    /// A turn of a worker has ended.
    pub fn turn(&self, operation: Operation, took: Duration) {
        let labels = OfTurn { operation_type: operation.as_str() };
        self.turns.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// A worker runs the first turn that may start a new pod.
    pub fn begins(&self, pod: &Pod, at: &Moment) {
        self.containers.observe(pod.spec.containers.len() as f64);
        if let Some(seconds) = seconds_since_seen(pod, at) {
            self.first_turn.observe(seconds);
        }
    }

    /// A pod that this process has started runs.
    pub fn runs(&self, pod: &Pod, at: &Moment) {
        if let Some(seconds) = seconds_since_seen(pod, at) {
            self.start.observe(seconds);
        }
    }

    /// How long the start of that pod took, from its creation at the API.
    pub fn took(&self, took: Option<StartDuration>, host_network: bool) {
        let seconds = |nanos: i64| Duration::from_nanos(nanos.unsigned_abs()).as_secs_f64();
        let Some(took) = took else { return };
        self.start_total.observe(seconds(took.total));
        if let Some(of_node) = took.sli {
            self.start_of_node.observe(seconds(of_node));
            if !host_network {
                self.first_network.took(seconds(of_node));
            }
        }
    }

    /// An earlier process has started a pod: the first that this process starts is not the node's first.
    pub fn adopts(&self) {
        self.first_network.1.store(true, Ordering::Relaxed);
    }

    /// An orphan is being ended.
    pub fn orphan(&self) {
        self.orphans.inc();
    }

    /// A pod starts under the UID of an earlier one.
    pub fn restarted(&self, pod: &Pod) {
        self.restarted.get_or_create(&Origin { r#static: static_label(pod.is_static()) }).inc();
    }
}

/// The time since the source has first sent the pod; `None` if unknown.
fn seconds_since_seen(pod: &Pod, at: &Moment) -> Option<f64> {
    // Less than nothing is what a clock says that was set back.
    let nanos = at.now_unix_nanos.saturating_sub(seen_unix_nanos(pod)?).max(0);
    Some(Duration::from_nanos(nanos.unsigned_abs()).as_secs_f64())
}
