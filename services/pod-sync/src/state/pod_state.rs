//! The state of one pod.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use keelson_kube_model::Pod;
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::admission::{held_ports, placeholder_pod};
use keelson_pod_sync_core::backoff::Backoffs;
use keelson_pod_sync_core::explain::{Cause, PodSteps, StepName};
use keelson_pod_sync_core::measure::FirstStart;
use keelson_pod_sync_core::worker::{WorkerPhase, WorkerState};

use crate::state::admission_record::AdmissionRecord;
use crate::state::inbox::Inbox;
use crate::state::probe_tasks::Probes;
use crate::state::published::Published;
use crate::state::runtime_records::RuntimeRecords;
use crate::state::start_record::StartRecord;
use crate::state::store::{Record, StoredBackoff, StoredProbe};

/// A desired pod as pod-config sent it, with the annotations of its source and first-seen time.
#[derive(Debug, Clone)]
pub struct DesiredPod {
    /// The pod that decisions are made from: with the resources that it was admitted with.
    pub pod: Arc<Pod>,
    /// The whole object as JSON, with unknown fields, and with source and first-seen time as annotations.
    pub raw: Bytes,
    /// `file`, `manifest`, `api`…
    pub source: String,
    /// Trace of the change.
    pub traceparent: String,
    /// Grows with each change of this UID.
    pub revision: u64,
    /// When its source has added it, unix nanoseconds; 0: unknown.
    pub added_unix_nanos: i64,
}

impl DesiredPod {
    /// The pod with the resources that its source asks for, instead of those that an earlier incarnation was admitted with.
    pub fn as_sent(&self) -> Self {
        let pod = decode_pod(&self.raw).map_or_else(|_| Arc::clone(&self.pod), Arc::new);
        Self { pod, ..self.clone() }
    }
}

/// What is known of one UID and concerns more than its worker. What only the worker uses is in the worker.
#[derive(Debug)]
pub struct PodState {
    /// Distinguishes successive pods of the same UID. Unique in this process.
    pub incarnation: u64,
    /// State of the core's state machine, which the worker and several inputs step.
    pub worker: WorkerState,
    /// The pod; `None` if only the runtime knows it.
    pub desired: Option<Arc<DesiredPod>>,
    /// What has to happen before it is like any other pod.
    pub awaited: Awaited,
    /// What the runtime holds of it.
    pub runtime: RuntimeRecords,
    /// Whether it may run here, and with what.
    pub admission: AdmissionRecord,
    /// Its starts.
    pub start: StartRecord,
    /// What its documents have shown.
    pub published: Published,
    /// Its probes.
    pub probes: Probes,
    /// The steps of its life and what each waits for, for `ExplainPod`.
    pub steps: PodSteps,
    /// How others reach its worker.
    pub inbox: Inbox,
}

/// What has to happen before a pod is like any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Awaited {
    /// Nothing, or nothing any more.
    #[default]
    Nothing,
    /// Its source has to send it: it was restored from the record of an earlier process. It is not forgotten before every source
    /// has reported.
    Source,
    /// runtime-shim has to remove what is left of an earlier incarnation; until then its worker does not start it.
    Cleanup,
}

impl PodState {
    /// A pod of which only the state of its worker is known.
    pub fn new(uid: &str, worker: WorkerState) -> Self {
        static INCARNATIONS: AtomicU64 = AtomicU64::new(1);
        Self {
            incarnation: INCARNATIONS.fetch_add(1, Ordering::Relaxed),
            worker,
            desired: None,
            awaited: Awaited::default(),
            runtime: RuntimeRecords::new(uid),
            admission: AdmissionRecord::default(),
            start: StartRecord::default(),
            published: Published::default(),
            probes: Probes::default(),
            steps: PodSteps::default(),
            inbox: Inbox::default(),
        }
    }

    /// A source has sent the UID again while the runtime still holds something of an earlier incarnation. The state is stored, so a
    /// restarted service waits as well: see [`WorkerState::restart_requested`].
    pub fn awaiting_cleanup(uid: &str, desired: &DesiredPod, at: &Moment) -> Self {
        let desired = Arc::new(desired.as_sent());
        let worker = WorkerState {
            phase: WorkerPhase::Finished,
            started: true,
            desired: true,
            restart_requested: true,
            ..WorkerState::default()
        };
        let mut state = Self { desired: Some(desired), awaited: Awaited::Cleanup, ..Self::new(uid, worker) };
        let text = "what is left of the pod's earlier run is removed first";
        state.steps.set(StepName::Source, "", Cause::waiting("Leftovers", text, "runtime-shim"), at);
        state
    }

    /// The pod of a record that an earlier process stored. Whether it is still desired is up to its source, and what of it runs is up
    /// to the runtime.
    pub fn restored(record: Record) -> Self {
        let mut state = Self::new(&record.uid, record.state.restored());
        state.start.first = match record.start {
            Some(start) => start.restored(),
            None => FirstStart::adopted(record.status.phase()),
        };
        state.published.set_status(record.status);
        state.start.errors = record.failed_starts;
        state.probes.states = record.probes.into_iter().map(StoredProbe::entry).collect();
        state.admission.allocation = record.allocation;
        state.admission.resize = record.resize;
        if let Some(value) = record.pod {
            let raw = Bytes::from(value.to_string());
            if let Ok(pod) = decode_pod(&raw) {
                state.set_desired(Arc::new(DesiredPod {
                    pod: Arc::new(pod),
                    raw,
                    source: record.source,
                    traceparent: String::new(),
                    revision: 0,
                    added_unix_nanos: 0,
                }));
            }
        }
        if !record.host_ports.is_empty() {
            state.admission.port_holder = Some(Arc::new(placeholder_pod(record.host_ports)));
        }
        state.worker.desired = false;
        state.awaited = Awaited::Source;
        state.runtime.freshness.invalidate();
        state
    }

    /// The record to store. It contains the pod itself only once the pod is ending, because its source may no longer have it.
    pub fn record(&self, uid: &str, backoffs: &Backoffs) -> Record {
        let mut record = Record::new(uid, self.worker.clone(), (*self.published.status).clone());
        if self.worker.phase != WorkerPhase::Sync
            && let Some(desired) = &self.desired
        {
            record.pod = serde_json::from_slice(&desired.raw).ok();
            record.source.clone_from(&desired.source);
        }
        if let Some(desired) = &self.desired {
            record.host_ports = held_ports(&desired.pod);
        } else if let Some(holder) = &self.admission.port_holder {
            record.host_ports = held_ports(holder);
        }
        // Also one without any resources: what its source asks for later is a resize.
        record.allocation.clone_from(&self.admission.allocation);
        record.resize = self.admission.resize.clone();
        record.failed_starts = self.start.errors.clone();
        record.probes = StoredProbe::all(&self.probes.states);
        record.start = Some(self.start.first);
        let stored = |(key, state): (&_, &_)| StoredBackoff::of(key, state);
        record.backoffs = backoffs.of_pod(&uid.into()).map(stored).collect();
        record
    }

    /// Its source has sent it. It keeps the resources that it is allocated; if its source asks for others, a resize is pending. If it is
    /// sent again while it ends, what is ending keeps its resources too, and no resize is pending.
    pub fn set_desired(&mut self, mut desired: Arc<DesiredPod>) {
        let is_ending = self.worker.restart_requested;
        if let Some(pod) = self.admission.apply_allocation(&desired.pod, is_ending) {
            Arc::make_mut(&mut desired).pod = pod;
        }
        self.desired = Some(desired);
        if self.admission.wanted.is_none() && self.admission.resize.in_progress.is_none() {
            self.steps.clear(StepName::Resize, "");
        }
    }

    /// It is admitted as `pod`, even if its source has sent a newer version meanwhile.
    pub fn admit(&mut self, pod: &Pod) {
        self.admission.admit(pod);
        if let Some(desired) = self.desired.take() {
            self.set_desired(desired);
        }
    }

    /// It was admitted, or found running, and has not released its resources yet.
    pub fn holds_resources(&self) -> bool {
        let has_resources = self.admission.admitted || self.runtime.observed.any_sandbox_ready();
        has_resources
            && match self.worker.phase {
                WorkerPhase::Sync => !self.published.status.phase().is_terminal(),
                WorkerPhase::Terminating => true,
                WorkerPhase::Terminated | WorkerPhase::Finished => false,
            }
    }

    /// The pod as the admission of other pods counts it.
    pub fn admission_pod(&self) -> Option<Arc<Pod>> {
        self.desired
            .as_ref()
            .map(|desired| &desired.pod)
            .or(self.admission.port_holder.as_ref())
            .map(Arc::clone)
    }

    /// It was restored from the record of an earlier process, and no source has sent it yet.
    pub fn awaits_source(&self) -> bool {
        self.awaited == Awaited::Source
    }

    /// It starts when runtime-shim has removed what is left of an earlier incarnation.
    pub fn awaits_cleanup(&self) -> bool {
        self.awaited == Awaited::Cleanup
    }

    /// It does not wait for this any more. Returns whether it did.
    pub fn end_wait(&mut self, awaited: Awaited) -> bool {
        let waited = self.awaited == awaited;
        if waited {
            self.awaited = Awaited::Nothing;
        }
        waited
    }
}

/// Decodes a pod that is kept. It has no excess capacity.
///
/// # Errors
/// `json` is no Pod.
pub fn decode_pod(json: &[u8]) -> Result<Pod, serde_json::Error> {
    let mut pod: Pod = serde_json::from_slice(json)?;
    pod.shrink_to_fit();
    Ok(pod)
}

#[cfg(test)]
mod tests {
    use keelson_pod_sync_core::resize::PendingReason;
    use serde_json::json;

    use super::*;

    fn desired(cpu: &str, generation: i64) -> Arc<DesiredPod> {
        let pod = json!({
            "metadata": {"name": "web", "uid": "u", "generation": generation},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]},
        });
        Arc::new(DesiredPod {
            pod: Arc::new(serde_json::from_value(pod.clone()).unwrap()),
            raw: Bytes::from(pod.to_string()),
            source: "file".into(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        })
    }

    fn cpu(state: &PodState) -> String {
        state.desired.as_ref().unwrap().pod.spec.containers[0].resources.requests["cpu"].to_string()
    }

    #[test]
    fn a_pod_that_is_sent_again_while_it_ends_starts_with_its_own_resources() {
        let mut state = PodState::new("u", WorkerState::default());
        state.set_desired(desired("1", 1));
        state.admit(&desired("1", 1).pod);
        state.worker.phase = WorkerPhase::Terminating;
        state.worker.restart_requested = true;
        state.set_desired(desired("2", 2));
        assert_eq!((cpu(&state).as_str(), &state.admission.wanted), ("1", &None), "it keeps its resources");
        let at = Moment { now_unix_nanos: 1, agent_started_unix_nanos: 0 };
        let next = PodState::awaiting_cleanup("u", &state.desired.unwrap(), &at);
        assert_eq!(cpu(&next), "2");
    }

    #[test]
    fn an_ending_pod_keeps_its_allocation_across_a_restart() {
        let mut state =
            PodState::new("u", WorkerState { phase: WorkerPhase::Terminating, ..WorkerState::default() });
        state.set_desired(desired("1", 1));
        state.admit(&desired("1", 1).pod);
        state.set_desired(desired("2", 2));
        assert!(state.admission.wanted.is_some());
        let restored = PodState::restored(state.record("u", &Backoffs::default()));
        assert_eq!(cpu(&restored).as_str(), "1");
    }

    #[test]
    fn a_best_effort_pod_that_is_changed_while_the_agent_is_down_is_not_resized_unasked() {
        let none = |generation| {
            let mut desired = DesiredPod::clone(&desired("1", generation));
            let mut pod = Pod::clone(&desired.pod);
            pod.spec.containers[0].resources = Default::default();
            desired.pod = Arc::new(pod);
            Arc::new(desired)
        };
        let mut state = PodState::new("u", WorkerState::default());
        state.set_desired(none(1));
        state.admit(&none(1).pod);
        let mut restored = PodState::restored(state.record("u", &Backoffs::default()));
        restored.set_desired(desired("2", 2));
        let requests = &restored.desired.as_ref().unwrap().pod.spec.containers[0].resources.requests;
        assert!(requests.is_empty() && restored.admission.wanted.is_some(), "{requests:?}");
    }

    #[test]
    fn a_reverted_resize_is_no_step_any_more() {
        let mut state = PodState::new("u", WorkerState::default());
        state.set_desired(desired("1", 1));
        state.admit(&desired("1", 1).pod);
        state.set_desired(desired("2", 2));
        let at = Moment { now_unix_nanos: 1, agent_started_unix_nanos: 0 };
        state.steps.set(StepName::Resize, "", Cause::waiting("Deferred", "no room", "x"), &at);
        state.set_desired(desired("3", 3));
        assert!(state.steps.get(StepName::Resize, "").is_some(), "it still asks for more");
        state.set_desired(desired("1", 4));
        assert!(state.steps.get(StepName::Resize, "").is_none());
    }

    #[test]
    fn a_resize_during_admission_is_pending_until_it_is_reverted() {
        let mut state = PodState::new("u", WorkerState::default());
        state.set_desired(desired("2", 2));
        state.admit(&desired("1", 1).pod);
        assert_eq!((cpu(&state).as_str(), state.admission.wanted.is_some()), ("1", true));
        state.admission.resize.deny(&desired("2", 2).pod, PendingReason::Deferred, "no room", 1);
        state.set_desired(desired("1", 3));
        assert_eq!((&state.admission.wanted, &state.admission.resize.pending), (&None, &None));
    }
}
