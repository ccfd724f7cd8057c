//! The state of one pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use keelson_kube_model::{Pod, PodStatus};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::admission::{held_ports, placeholder_pod};
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::backoff::Backoffs;
use keelson_pod_sync_core::conditions::RESIZE_PENDING;
use keelson_pod_sync_core::explain::{Cause, PodSteps, StepName};
use keelson_pod_sync_core::measure::FirstStart;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::worker::{WorkerPhase, WorkerState};
use keelson_service_kit::CancellationToken;
use tokio::sync::Notify;

use crate::state::observed::Observed;
use crate::state::pending_trigger::PendingTrigger;
use crate::state::probe_tasks::Probes;
use crate::state::store::{Record, StoredBackoff, StoredProbe};

/// A desired pod as pod-config sent it.
#[derive(Debug, Clone)]
pub struct DesiredPod {
    /// The pod that decisions are made from: with the resources that it was admitted with.
    pub pod: Arc<Pod>,
    /// The whole object as JSON, with unknown fields.
    pub raw: Bytes,
    /// `file`, `manifest`, `api`…
    pub source: String,
    /// Where the source has read it, such as a path.
    pub origin: String,
    /// Trace of the change.
    pub traceparent: String,
    /// Grows with each change of this UID.
    pub revision: u64,
    /// When its source has added it, unix nanoseconds; 0: unknown.
    pub added_unix_nanos: i64,
}

/// Everything that is known of one UID.
#[derive(Debug)]
pub struct PodState {
    /// Distinguishes successive pods of the same UID. Unique in this process.
    pub incarnation: u64,
    /// State of the worker.
    pub worker: WorkerState,
    /// The pod; `None` if only the runtime knows it.
    pub desired: Option<DesiredPod>,
    /// If the pod itself is not known: a pod that has its host ports.
    pub port_holder: Option<Arc<Pod>>,
    /// The last observation of the runtime.
    pub observed: Observed,
    /// The status that was published last.
    pub status: Arc<PodStatus>,
    /// Counts the published documents.
    pub version: u64,
    /// The steps of its life and what each waits for, for `ExplainPod`.
    pub steps: PodSteps,
    /// By container, why its last start failed: waiting reason and message.
    pub start_errors: BTreeMap<String, (String, String)>,
    /// Its probes.
    pub probes: Probes,
    /// It was admitted.
    pub admitted: bool,
    /// The resources that it was admitted with.
    pub allocation: Option<Allocation>,
    /// Its source asks for other resources than those it was admitted with, and does not get them.
    pub resize_refused: bool,
    /// No event has reported that refusal yet.
    pub resize_unreported: bool,
    /// A worker task exists.
    pub has_worker: bool,
    /// It was restored from the record of an earlier process, and no source has sent it yet.
    pub restored: bool,
    /// Whether the next turn begins with a fresh read.
    pub freshness: Freshness,
    /// runtime-shim has reported that nothing of it is left, and has reported nothing of it since.
    pub gone: bool,
    /// A document has said that none of its containers runs or will be started.
    pub stopped: bool,
    /// A document has said that everything of it is released. No later document takes that back.
    pub released: bool,
    /// It starts when runtime-shim has removed what is left of an earlier incarnation.
    pub awaits_cleanup: bool,
    /// Its worker has panicked and waits for its next retry.
    pub quarantined: bool,
    /// It was rejected at admission. Its status says why and does not change any more.
    pub rejected: bool,
    /// Why it waits for admission: reason and message.
    pub admission_hold: Option<(String, String)>,
    /// How far its first start has come, for metrics.
    pub first_start: FirstStart,
    /// When image pulls for its first start began and ended, unix nanoseconds.
    pub pulls: Vec<(i64, i64)>,
    /// Containers whose image was pulled for their next start, so that no second event reports it as present.
    pub pulled: BTreeSet<String>,
    /// The last error of its mounts, so that the same one is not reported again; `None` once they are mounted.
    pub reported_mount_error: Option<String>,
    /// What has triggered the next turn.
    pub pending: PendingTrigger,
    /// When a back-off of it was last advanced, as it is stored.
    pub stored_backoff_advance: Option<i64>,
    /// Wakes the worker.
    pub wake: Arc<Notify>,
    /// Cancels what the worker is waiting for.
    pub cancel: CancellationToken,
}

/// Whether the observation may be stale. An invalidation during a read is not answered by that read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Freshness {
    invalidated: u64,
    answered: u64,
}

impl Freshness {
    /// The observation may be stale from now on.
    pub fn invalidate(&mut self) {
        self.invalidated += 1;
    }

    /// If the observation is stale: the token to pass to [`Freshness::refreshed`] after a read that begins now.
    pub fn stale(self) -> Option<u64> {
        (self.invalidated != self.answered).then_some(self.invalidated)
    }

    /// A read that began when [`Freshness::stale`] returned this token is done.
    pub fn refreshed(&mut self, token: u64) {
        self.answered = self.answered.max(token);
    }
}

impl PodState {
    /// A pod of which only the state of its worker is known.
    pub fn new(uid: &str, worker: WorkerState) -> Self {
        static INCARNATIONS: AtomicU64 = AtomicU64::new(1);
        Self {
            incarnation: INCARNATIONS.fetch_add(1, Ordering::Relaxed),
            worker,
            desired: None,
            port_holder: None,
            observed: Arc::new(PodObservation { uid: uid.into(), ..PodObservation::default() }),
            status: Arc::default(),
            version: 0,
            steps: PodSteps::default(),
            start_errors: BTreeMap::new(),
            probes: Probes::default(),
            admitted: false,
            allocation: None,
            resize_refused: false,
            resize_unreported: false,
            has_worker: false,
            restored: false,
            freshness: Freshness::default(),
            gone: false,
            stopped: false,
            released: false,
            awaits_cleanup: false,
            quarantined: false,
            rejected: false,
            admission_hold: None,
            first_start: FirstStart::default(),
            pulls: Vec::new(),
            pulled: BTreeSet::new(),
            reported_mount_error: None,
            pending: PendingTrigger::default(),
            stored_backoff_advance: None,
            wake: Arc::default(),
            cancel: CancellationToken::new(),
        }
    }

    /// A source has sent the UID again while the runtime still holds something of an earlier incarnation. The state is stored, so a
    /// restarted service waits as well: see [`WorkerState::restart_requested`].
    pub fn awaiting_cleanup(uid: &str, mut desired: DesiredPod, at: &Moment) -> Self {
        // Its own resources, not those that the earlier incarnation was admitted with.
        if let Ok(pod) = serde_json::from_slice::<Pod>(&desired.raw) {
            desired.pod = Arc::new(pod);
        }
        let worker = WorkerState {
            phase: WorkerPhase::Finished,
            started: true,
            desired: true,
            restart_requested: true,
            ..WorkerState::default()
        };
        let mut state = Self { desired: Some(desired), awaits_cleanup: true, ..Self::new(uid, worker) };
        let text = "what is left of the pod's earlier run is removed first";
        state.steps.set(StepName::Source, "", Cause::waiting("Leftovers", text, "runtime-shim"), at);
        state
    }

    /// The pod of a record that an earlier process stored. Whether it is still desired is up to its source, and what of it runs is up
    /// to the runtime.
    pub fn restored(record: Record) -> Self {
        let mut state = Self::new(&record.uid, record.state.restored());
        state.first_start = match record.start {
            Some(start) => start.restored(),
            None => FirstStart::adopted(record.status.phase()),
        };
        state.status = Arc::new(record.status);
        state.start_errors = record.failed_starts;
        state.probes.states = record.probes.into_iter().map(StoredProbe::entry).collect();
        state.stored_backoff_advance = record.backoffs.iter().map(|b| b.entry.last_advanced_unix_nanos).max();
        state.allocation = record.allocation;
        if let Some(value) = record.pod {
            let raw = Bytes::from(value.to_string());
            if let Ok(pod) = serde_json::from_slice::<Pod>(&raw) {
                state.set_desired(DesiredPod {
                    pod: Arc::new(pod),
                    raw,
                    source: record.source,
                    origin: String::new(),
                    traceparent: String::new(),
                    revision: 0,
                    added_unix_nanos: 0,
                });
            }
        }
        if !record.host_ports.is_empty() {
            state.port_holder = Some(Arc::new(placeholder_pod(record.host_ports)));
        }
        state.worker.desired = false;
        state.restored = true;
        state.freshness.invalidate();
        state
    }

    /// The record to store. It contains the pod itself only once the pod is ending, because its source may no longer have it.
    pub fn record(&mut self, uid: &str, backoffs: &Backoffs) -> Record {
        let mut record = Record::new(uid, self.worker.clone(), (*self.status).clone());
        if self.worker.phase != WorkerPhase::Sync
            && let Some(desired) = &self.desired
        {
            record.pod = serde_json::from_slice(&desired.raw).ok();
            record.source.clone_from(&desired.source);
        }
        if let Some(desired) = &self.desired {
            record.host_ports = held_ports(&desired.pod);
        } else if let Some(holder) = &self.port_holder {
            record.host_ports = held_ports(holder);
        }
        record.allocation = self.allocation.clone().filter(|allocation| *allocation != Allocation::default());
        record.failed_starts = self.start_errors.clone();
        record.probes = StoredProbe::all(&self.probes.states);
        record.start = Some(self.first_start);
        let stored = |(key, state): (&_, &_)| StoredBackoff::of(key, state);
        record.backoffs = backoffs.of_pod(&uid.into()).map(stored).collect();
        self.stored_backoff_advance = backoffs.last_advanced_unix_nanos(&uid.into());
        record
    }

    /// Its source has sent it. It keeps the resources that it was admitted with. If it is sent again while it ends, what is ending keeps
    /// its resources too, and nothing counts as refused.
    pub fn set_desired(&mut self, mut desired: DesiredPod) {
        let mut pod = Arc::clone(&desired.pod);
        let is_other =
            self.allocation.as_ref().is_some_and(|allocation| allocation.apply(Arc::make_mut(&mut pod)));
        self.resize_refused = is_other && !self.worker.restart_requested;
        if self.resize_refused {
            let reported =
                self.status.condition(RESIZE_PENDING).map(|condition| condition.observed_generation);
            self.resize_unreported = reported != Some(pod.metadata.generation);
        }
        if is_other {
            desired.pod = pod;
        }
        self.desired = Some(desired);
    }

    /// It is admitted as `pod`, even if its source has sent a newer version meanwhile.
    pub fn admit(&mut self, pod: &Pod) {
        self.admitted = true;
        self.allocation.get_or_insert_with(|| Allocation::of(pod));
        if let Some(desired) = self.desired.take() {
            self.set_desired(desired);
        }
    }

    /// It was admitted, or found running, and has not released its resources yet.
    pub fn holds_resources(&self) -> bool {
        let has_resources = self.admitted || self.observed.any_sandbox_ready();
        has_resources
            && match self.worker.phase {
                WorkerPhase::Sync => !self.status.phase().is_terminal(),
                WorkerPhase::Terminating => true,
                WorkerPhase::Terminated | WorkerPhase::Finished => false,
            }
    }

    /// The pod as the admission of other pods counts it.
    pub fn admission_pod(&self) -> Option<Arc<Pod>> {
        self.desired.as_ref().map(|desired| &desired.pod).or(self.port_holder.as_ref()).map(Arc::clone)
    }

    /// The runtime is known to hold something of it.
    pub fn has_leftovers(&self) -> bool {
        !self.gone && (!self.observed.sandboxes.is_empty() || !self.observed.containers.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_invalidation_during_a_read_needs_another_read() {
        let mut freshness = Freshness::default();
        assert_eq!(freshness.stale(), None);
        freshness.invalidate();
        let first = freshness.stale().unwrap();
        freshness.invalidate();
        freshness.refreshed(first);
        let second = freshness.stale().expect("the second invalidation is still open");
        freshness.refreshed(second);
        assert_eq!(freshness.stale(), None);
    }

    fn desired(cpu: &str, generation: i64) -> DesiredPod {
        let pod = json!({
            "metadata": {"name": "web", "uid": "u", "generation": generation},
            "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]},
        });
        DesiredPod {
            pod: Arc::new(serde_json::from_value(pod.clone()).unwrap()),
            raw: Bytes::from(pod.to_string()),
            source: "file".into(),
            origin: String::new(),
            traceparent: String::new(),
            revision: 1,
            added_unix_nanos: 0,
        }
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
        // What is ending keeps its resources, and no refusal is reported.
        assert_eq!(
            (cpu(&state).as_str(), state.resize_refused, state.resize_unreported),
            ("1", false, false)
        );
        let at = Moment { now_unix_nanos: 1, agent_started_unix_nanos: 0 };
        let next = PodState::awaiting_cleanup("u", state.desired.unwrap(), &at);
        assert_eq!(cpu(&next), "2");
    }

    #[test]
    fn an_ending_pod_keeps_its_allocation_across_a_restart() {
        let mut state =
            PodState::new("u", WorkerState { phase: WorkerPhase::Terminating, ..WorkerState::default() });
        state.set_desired(desired("1", 1));
        state.admit(&desired("1", 1).pod);
        state.set_desired(desired("2", 2));
        assert!(state.resize_refused);
        let restored = PodState::restored(state.record("u", &Backoffs::default()));
        assert_eq!((cpu(&restored).as_str(), restored.resize_refused), ("1", true));
    }

    #[test]
    fn a_resize_during_admission_is_refused_and_reported() {
        let mut state = PodState::new("u", WorkerState::default());
        state.set_desired(desired("2", 2));
        state.admit(&desired("1", 1).pod);
        assert_eq!((cpu(&state).as_str(), state.resize_refused, state.resize_unreported), ("1", true, true));
    }
}
