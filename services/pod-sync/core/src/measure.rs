//! What is measured of a pod's start and of the turns of its worker, each once (§6.3, §8.1 and §19).
//!
//! Parity: as the kubelet, except that a pod that this process adopts from an earlier one counts neither as created nor as
//! started, and that [`FirstStart::record_phase`] reports a start once, when the pod really runs.

use keelson_kube_model::PodPhase;
use serde::{Deserialize, Serialize};

use crate::worker::{Input, UpdateKind, WorkerPhase};

/// Progress of a pod's first start, so that metrics count it once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstStart {
    stage: Stage,
    #[serde(skip)]
    adopted: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stage {
    /// Its worker has not begun its first turn.
    #[default]
    #[serde(rename = "named")]
    Received,
    /// Its status has not been past Pending.
    #[serde(rename = "awaited")]
    Starting,
    /// This process has started one of its containers.
    #[serde(rename = "begun")]
    Started,
    /// It has run, or never will.
    #[serde(rename = "over")]
    Done,
}

impl FirstStart {
    /// Restores a stored state. A pod whose worker had not begun its first turn is still new.
    #[must_use]
    pub fn restored(self) -> Self {
        Self { adopted: self.stage != Stage::Received, ..self }
    }

    /// The state of an adopted pod for which nothing is stored, from the phase of its last status.
    pub fn adopted(phase: PodPhase) -> Self {
        let stage = if phase == PodPhase::Pending { Stage::Starting } else { Stage::Done };
        Self { stage, adopted: true }
    }

    /// An earlier process has started the pod.
    pub fn is_adopted(self) -> bool {
        self.adopted
    }

    /// The worker begins its first turn. Returns true, once, if the pod is new: the runtime has no records of it.
    pub fn worker_started(&mut self, runtime_has_records: bool) -> bool {
        if self.stage != Stage::Received {
            return false;
        }
        *self = Self { stage: Stage::Starting, adopted: runtime_has_records };
        !runtime_has_records
    }

    /// This process starts a container of the pod.
    pub fn container_started(&mut self) {
        if self.stage == Stage::Starting {
            self.stage = Stage::Started;
        }
    }

    /// Records the phase of the pod's status. Returns true, once, if the pod went from Pending to Running because of a
    /// container that this process started.
    pub fn record_phase(&mut self, phase: PodPhase) -> bool {
        if phase == PodPhase::Pending || self.stage == Stage::Done {
            return false;
        }
        // A pod that ran before the worker's first turn was started by an earlier process.
        self.adopted |= self.stage == Stage::Received;
        let started = self.stage == Stage::Started;
        self.stage = Stage::Done;
        started && phase == PodPhase::Running
    }

    /// The start was measured, or never will be.
    pub fn is_over(self) -> bool {
        self.stage == Stage::Done
    }
}

/// The operation that a worker's turn counts as in the duration metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A source has sent a new pod.
    Create,
    /// A source has changed the pod.
    Update,
    /// A turn without a change from the source: for an observation, a probe or a timer.
    Sync,
    /// The pod is terminated.
    Kill,
}

impl Operation {
    /// The value of the label `operation_type`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Sync => "sync",
            Self::Kill => "kill",
        }
    }

    /// The operation that this input triggers; `None` for an input that the worker itself causes.
    pub fn of(input: &Input<'_>) -> Option<Self> {
        match input {
            Input::Update { kind: UpdateKind::Create, .. } => Some(Self::Create),
            Input::Update { kind: UpdateKind::Update, .. } => Some(Self::Update),
            Input::Update { kind: UpdateKind::Sync, .. } => Some(Self::Sync),
            Input::Removed { .. } | Input::Killed { .. } | Input::ObservedOrphan { .. } => Some(Self::Kill),
            Input::Started | Input::Outcome { .. } => None,
        }
    }

    /// The operation of a turn that began in this phase. `trigger` is the operation triggered since the last turn.
    pub fn of_turn(trigger: Option<Self>, phase: WorkerPhase, start: FirstStart) -> Self {
        // For an adopted pod a source's first update is a replay.
        match trigger.filter(|trigger| *trigger != Self::Create || !start.adopted) {
            Some(operation) => operation,
            None if phase == WorkerPhase::Sync => Self::Sync,
            None => Self::Kill,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::observation::PodObservation;
    use crate::testing::pod;
    use crate::worker::SyncOutcome;
    use PodPhase::{Failed, Pending, Running, Succeeded};

    #[test]
    fn a_new_pod_is_counted_as_created_and_started_once() {
        let mut start = FirstStart::default();
        assert!(!start.record_phase(Pending));
        assert!(start.worker_started(false));
        assert!(!start.worker_started(false), "the next turn");
        start.container_started();
        assert!(!start.record_phase(Pending));
        assert!(start.record_phase(Running));
        // All containers restart in a new sandbox.
        start.container_started();
        assert!(!start.record_phase(Pending) && !start.record_phase(Running));
        assert!(!start.is_adopted());
    }

    #[test]
    fn a_restored_first_start_continues() {
        let after_a_restart = |start: FirstStart| -> FirstStart {
            let stored: FirstStart = serde_json::from_value(json!(start)).unwrap();
            stored.restored()
        };
        // It waited for its full name, or for the runtime.
        let mut waits = after_a_restart(FirstStart::default());
        assert!(!waits.is_adopted() && waits.worker_started(false));
        // It has run, and its init containers rerun: its phase is Pending again.
        let mut ran = FirstStart::default();
        ran.worker_started(false);
        ran.container_started();
        assert!(ran.record_phase(Running) && !ran.record_phase(Pending));
        let mut again = after_a_restart(ran);
        assert!(again.is_adopted() && !again.worker_started(false));
        again.container_started();
        assert!(!again.record_phase(Running));
        // Its containers were started, and it was not observed running.
        let mut started = FirstStart::default();
        started.worker_started(false);
        started.container_started();
        let mut started = after_a_restart(started);
        assert!(started.is_adopted() && started.record_phase(Running));
    }

    #[test]
    fn a_pod_started_by_an_earlier_process_is_not_new() {
        // The stored record has it.
        let mut recorded = FirstStart::adopted(Running);
        // The record is lost, and the runtime has the pod before the worker's first turn.
        let mut shown = FirstStart::default();
        assert!(!shown.record_phase(Running));
        // The same, and the runtime reports it late.
        let mut late = FirstStart::default();
        for start in [&mut recorded, &mut shown, &mut late] {
            assert!(!start.worker_started(true));
            assert!(!start.record_phase(Running));
            start.container_started();
            assert!(!start.record_phase(Pending) && !start.record_phase(Running), "{start:?}");
            assert!(start.is_adopted());
        }
    }

    #[test]
    fn a_half_done_start_is_counted_by_the_process_that_completes_it() {
        let mut start = FirstStart::adopted(Pending);
        assert!(!start.worker_started(false), "it was started before");
        start.container_started();
        assert!(start.record_phase(Running));
        // All of its containers had been started before.
        assert!(!FirstStart::adopted(Pending).record_phase(Running));
    }

    #[test]
    fn a_pod_that_never_ran_is_not_counted_as_started() {
        for phase in [Succeeded, Failed] {
            let mut start = FirstStart::default();
            start.worker_started(false);
            start.container_started();
            assert!(!start.record_phase(phase) && !start.record_phase(Running), "{phase:?}");
        }
    }

    #[test]
    fn sources_and_orders_trigger_operations_and_the_worker_itself_none() {
        let (pod, seen) = (pod(json!({})), PodObservation::default());
        let update = |kind| Input::Update { kind, pod: &pod, observed: None };
        for (input, trigger) in [
            (update(UpdateKind::Create), Some("create")),
            (update(UpdateKind::Update), Some("update")),
            (update(UpdateKind::Sync), Some("sync")),
            (Input::Removed { pod: None }, Some("kill")),
            (Input::Killed { pod: &pod, grace_seconds: None, patch: None }, Some("kill")),
            (Input::ObservedOrphan { observed: &seen }, Some("kill")),
            (Input::Started, None),
            (Input::Outcome { outcome: SyncOutcome::Done, pod: None }, None),
        ] {
            assert_eq!(Operation::of(&input).map(Operation::as_str), trigger, "{input:?}");
        }
    }

    #[test]
    fn a_turn_counts_as_its_trigger_else_by_its_phase() {
        use Operation::{Create, Kill, Sync, Update};
        let (new, adopted) = (FirstStart::default(), FirstStart::adopted(Running));
        for (trigger, phase, start, counted) in [
            (Some(Create), WorkerPhase::Sync, new, Create),
            (Some(Create), WorkerPhase::Sync, adopted, Sync),
            (Some(Create), WorkerPhase::Terminating, adopted, Kill),
            (Some(Update), WorkerPhase::Sync, adopted, Update),
            (Some(Kill), WorkerPhase::Terminating, adopted, Kill),
            (None, WorkerPhase::Sync, new, Sync),
            (None, WorkerPhase::Terminating, new, Kill),
            (None, WorkerPhase::Terminated, new, Kill),
        ] {
            assert_eq!(Operation::of_turn(trigger, phase, start), counted, "{trigger:?} in {phase:?}");
        }
    }
}
