//! What others see of the pods: their documents with status, their events, and the metrics.

pub mod document;
pub mod metrics;
pub mod objects;

use std::sync::Arc;

use keelson_kube_model::{PodPhase, PodStatus};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::accept::{Accepted, accept_status};
use keelson_pod_sync_core::actions::ContainerWait;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::probe::readiness;
use keelson_pod_sync_core::start_time::start_time;
use keelson_pod_sync_core::status::{
    DEADLINE, DEADLINE_MESSAGE, StatusInputs, final_status, generate_status,
};
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_service_kit::{Context, WatchHub};

use crate::publish::document::Document;
use crate::publish::metrics::Metrics;
use crate::publish::objects::pod_object;
use crate::state::pod_state::{DesiredPod, PodState};
use crate::state::registry::PodRegistry;

/// Publishes the state of the pods.
#[derive(Debug)]
pub struct Publisher {
    context: Context,
    registry: Arc<PodRegistry>,
    /// The documents that `WatchPods` and `ListPods` send, by UID.
    pub documents: WatchHub<String, Arc<Document>>,
    /// Counters and histograms.
    pub metrics: Metrics,
}

/// What a status is made from, beside the state of the pod.
#[derive(Debug, Default)]
pub struct StatusFacts<'a> {
    /// No container will be started any more.
    pub pod_is_terminal: bool,
    /// The containers that the last decision did not start yet.
    pub waiting: &'a [ContainerWait],
    /// The sandbox has just been made.
    pub sandbox_made: Option<bool>,
    /// Everything is released: this is the last status.
    pub finished: bool,
}

/// What became of a status.
struct Published {
    phase_is_terminal: bool,
    changed: bool,
}

impl Publisher {
    /// Without a document yet.
    pub fn new(context: Context, registry: Arc<PodRegistry>) -> Self {
        let metrics = Metrics::register(&context.metrics);
        Self { documents: WatchHub::incomplete(), metrics, registry, context }
    }

    /// Makes the status of a pod and publishes it if it has changed. Returns whether its phase is terminal.
    pub fn publish(&self, uid: &str, facts: &StatusFacts<'_>) -> bool {
        let published = self.registry.with(uid, |state| {
            let desired = state.desired.clone()?;
            let published = &mut state.published;
            published.stopped |= facts.pod_is_terminal;
            published.released |= facts.finished;
            if !published.rejected {
                return Some(self.publish_status(uid, state, desired, facts));
            }
            if facts.finished {
                self.send(uid, state, desired);
            }
            Some(Published { phase_is_terminal: true, changed: false })
        });
        let Some(Some(published)) = published else { return false };
        if published.changed {
            self.registry.save(uid);
        }
        published.phase_is_terminal
    }

    fn publish_status(
        &self,
        uid: &str,
        state: &mut PodState,
        desired: Arc<DesiredPod>,
        facts: &StatusFacts<'_>,
    ) -> Published {
        let at = self.registry.moment();
        let previous = state.published.previous();
        let old = previous.as_deref();
        let status = self.status_of(state, &desired, old, facts, &at);
        let phase_is_terminal = status.phase().is_terminal();
        let is_first = state.published.version == 0;
        match accept_status(&desired.pod, old, status, facts.finished || is_first, &at) {
            Accepted::Stored { status, newly_terminated } => {
                self.metrics.ended(&newly_terminated);
                self.report_deadline(&desired, old, &status);
                self.measure_start(state, &desired, &status, &at);
                state.published.set_status(*status);
                self.send(uid, state, desired);
                Published { phase_is_terminal, changed: true }
            }
            Accepted::Unchanged => {
                // The document changes without the status: it says now that the pod has stopped.
                if facts.pod_is_terminal && state.worker.phase == WorkerPhase::Terminating {
                    self.send(uid, state, desired);
                }
                Published { phase_is_terminal, changed: false }
            }
            Accepted::Refused { container } => {
                tracing::debug!(
                    uid,
                    container,
                    "a terminated container would run again; keeping the old status"
                );
                Published { phase_is_terminal, changed: false }
            }
        }
    }

    fn status_of(
        &self,
        state: &PodState,
        desired: &DesiredPod,
        old: Option<&PodStatus>,
        facts: &StatusFacts<'_>,
        at: &Moment,
    ) -> PodStatus {
        let (runtime, recursive_read_only) = {
            let runtime = self.registry.node.runtime.borrow();
            (runtime.name.clone(), runtime.recursive_read_only)
        };
        let inputs = StatusInputs {
            pod_is_terminal: facts.pod_is_terminal,
            start_errors: state.start.errors.clone(),
            readiness: readiness(&desired.pod, &state.runtime.observed, old, &state.probes.states),
            waiting: facts.waiting,
            pod_ready_to_start: facts.sandbox_made,
            without_ready_to_start: !self.context.config.pods.ready_to_start_condition,
            runtime_name: if runtime.is_empty() { "containerd" } else { &runtime },
            admission_wait: state.admission.hold.as_ref(),
            resize: Some(&state.admission.resize),
            patch: state.worker.status_patch.as_ref(),
            recursive_read_only,
            v4_first: self.v4_first(&state.runtime.observed),
            ..StatusInputs::default()
        };
        let status = generate_status(&desired.pod, &state.runtime.observed, old, &inputs, at);
        if facts.finished { final_status(&desired.pod, &status, at) } else { status }
    }

    /// Whether the node's primary address is IPv4. It is asked only for a pod whose own addresses it puts in order.
    fn v4_first(&self, observed: &PodObservation) -> Option<bool> {
        let has_several = observed.pod_ips().len() > 1;
        has_several.then(|| self.registry.node.addresses().first().map(|ip| !ip.contains(':'))).flatten()
    }

    /// An event for a pod that has just failed because its active deadline has passed (pod-lifecycle.md §17).
    fn report_deadline(&self, desired: &DesiredPod, old: Option<&PodStatus>, status: &PodStatus) {
        let has_failed = |status: &PodStatus| status.phase() == PodPhase::Failed;
        if has_failed(status) && status.reason == DEADLINE && !old.is_some_and(has_failed) {
            self.context.events.normal(pod_object(&desired.pod), DEADLINE, DEADLINE_MESSAGE.to_owned());
        }
    }

    /// Measures the first start of a pod when its status shows for the first time that it runs.
    fn measure_start(&self, state: &mut PodState, desired: &DesiredPod, status: &PodStatus, at: &Moment) {
        if !state.start.first.record_phase(status.phase()) {
            return;
        }
        self.metrics.pods.runs(&desired.pod, at);
        let pulls = std::mem::take(&mut state.start.pulls);
        let took = start_time(&desired.pod, &state.runtime.observed, &pulls, at.now_unix_nanos);
        self.metrics.pods.took(took, desired.pod.is_host_network());
        // A span without duration, which marks the end of the start in the trace.
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "pod runs");
        keelson_telemetry::set_parent(&span, &desired.traceparent);
    }

    /// Sends the next version of a pod's document.
    fn send(&self, uid: &str, state: &mut PodState, desired: Arc<DesiredPod>) {
        state.published.version += 1;
        self.documents.set(uid.to_owned(), Arc::new(Document::of(state, desired)));
    }

    /// Sends the present document of a pod under the version that the caller has set. A pod that only the runtime knows has none.
    fn resend(&self, uid: &str, state: &PodState) {
        if let Some(desired) = state.desired.clone() {
            self.documents.set(uid.to_owned(), Arc::new(Document::of(state, desired)));
        }
    }

    /// Publishes the document although the status is the same: the pod has begun to end.
    pub fn republish(&self, uid: &str) {
        self.registry.with(uid, |state| {
            state.published.version += 1;
            self.resend(uid, state);
        });
    }

    /// Publishes the status of a pod that was rejected at admission, which no observation leads to.
    pub fn publish_rejection(&self, uid: &str, status: PodStatus) {
        self.registry.with(uid, |state| {
            state.published.rejected = true;
            state.published.set_status(status);
            state.published.version += 1;
            self.resend(uid, state);
        });
        self.registry.save(uid);
    }

    /// Publishes a pod that has just arrived, as Pending. An adopted pod keeps the status that it had: it is published as it was and
    /// changes only when the runtime has been read.
    pub fn publish_first(&self, uid: &str) {
        let has_status = self.registry.with(uid, |state| {
            if state.published.version == 0 && !state.published.status.phase.is_empty() {
                state.published.version = 1;
            }
            state.published.version > 0
        });
        if has_status == Some(false) {
            self.publish(uid, &StatusFacts::default());
        } else {
            self.registry.with(uid, |state| self.resend(uid, state));
        }
    }
}
