//! Metrics of in-place resizes (pod-lifecycle.md §19).

use keelson_pod_sync_core::resize::PendingReason;
use keelson_pod_sync_core::resize::report::RequestedChange;
use keelson_service_kit::Metrics as Registry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::state::registry::PodRegistry;
use crate::state::resize_queue::ResizeTrigger;

/// Upper bounds of the buckets in milliseconds.
const MILLISECONDS: [f64; 12] =
    [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 60_000.0, 600_000.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Change {
    resource: &'static str,
    requirement: &'static str,
    operation: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Success {
    success: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Detail {
    reason_detail: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Retry {
    retry_trigger: &'static str,
}

/// Counters, gauges and a histogram. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ResizeMetrics {
    requested: Family<Change, Counter>,
    durations: Family<Success, Histogram, fn() -> Histogram>,
    pending: Family<Reason, Gauge>,
    in_progress: Gauge,
    infeasible: Family<Detail, Counter>,
    deferred_accepted: Family<Retry, Counter>,
}

impl ResizeMetrics {
    /// Registers all of them.
    pub(super) fn register(registry: &Registry) -> Self {
        let metrics = Self {
            requested: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(MILLISECONDS)),
            pending: Family::default(),
            in_progress: Gauge::default(),
            infeasible: Family::default(),
            deferred_accepted: Family::default(),
        };
        let (requested, durations) = (metrics.requested.clone(), metrics.durations.clone());
        let help = "Changes of CPU and memory of containers that sources have asked for";
        registry.register("kubelet_container_requested_resizes", help, requested);
        let help = "Milliseconds from the acceptance of a resize until it is completed, or fails";
        registry.register("kubelet_pod_resize_duration_milliseconds", help, durations);
        let help = "Pods whose resize is not accepted";
        registry.register("kubelet_pod_pending_resizes", help, metrics.pending.clone());
        let help = "Pods whose resize is being carried out";
        registry.register("kubelet_pod_in_progress_resizes", help, metrics.in_progress.clone());
        let help = "Resizes that this node cannot carry out";
        registry.register("kubelet_pod_infeasible_resizes", help, metrics.infeasible.clone());
        let help = "Deferred resizes that were accepted, by what has led to another decision";
        registry.register("kubelet_pod_deferred_accepted_resizes", help, metrics.deferred_accepted.clone());
        for trigger in ResizeTrigger::ALL {
            let labels = Retry { retry_trigger: trigger.as_str() };
            metrics.deferred_accepted.get_or_create(&labels).inc_by(0);
        }
        metrics
    }

    /// A source has asked for these changes.
    pub fn requested(&self, changes: &[RequestedChange]) {
        for RequestedChange { resource, requirement, operation } in changes {
            self.requested.get_or_create(&Change { resource, requirement, operation }).inc();
        }
    }

    /// A resize is completed that many nanoseconds after it was accepted.
    pub fn completed(&self, nanos: i64) {
        self.took("true", nanos);
    }

    /// An attempt to carry out a resize has failed that many nanoseconds after it was accepted.
    pub fn failed(&self, nanos: i64) {
        self.took("false", nanos);
    }

    fn took(&self, success: &'static str, nanos: i64) {
        let milliseconds = nanos.max(0) as f64 / 1e6;
        self.durations.get_or_create(&Success { success }).observe(milliseconds);
    }

    /// A resize is infeasible.
    pub fn infeasible(&self, reason_detail: &'static str) {
        self.infeasible.get_or_create(&Detail { reason_detail }).inc();
    }

    /// A deferred resize was accepted.
    pub fn deferred_accepted(&self, trigger: ResizeTrigger) {
        self.deferred_accepted.get_or_create(&Retry { retry_trigger: trigger.as_str() }).inc();
    }

    /// Counts the pods with a resize.
    pub fn count(&self, registry: &PodRegistry) {
        let (mut deferred, mut infeasible, mut in_progress) = (0, 0, 0);
        registry.for_each(|state| {
            let resize = &state.admission.resize;
            in_progress += i64::from(resize.in_progress.is_some());
            match resize.pending.as_ref().map(|pending| pending.reason) {
                Some(PendingReason::Deferred) => deferred += 1,
                Some(PendingReason::Infeasible) => infeasible += 1,
                None => {}
            }
        });
        self.pending.get_or_create(&Reason { reason: "deferred" }).set(deferred);
        self.pending.get_or_create(&Reason { reason: "infeasible" }).set(infeasible);
        self.in_progress.set(in_progress);
    }
}
