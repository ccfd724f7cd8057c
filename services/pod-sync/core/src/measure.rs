//! What is measured of the beginning of a pod and of the turns of its worker, and that it is measured once
//! (§6.3, §8.1 and §19).
//!
//! Parity: as the kubelet, except that a pod that an earlier process has begun counts neither as created nor as started
//! when this one takes it in, and that [`FirstStart::shown`] tells of a start once, when the pod really runs.

use keelson_kube_model::PodPhase;
use serde::{Deserialize, Serialize};

use crate::worker::{Input, UpdateKind, WorkerPhase};

/// How far one life of a pod has come, as far as its beginning is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstStart {
    stage: Stage,
    #[serde(skip)]
    adopted: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stage {
    /// Its worker has not come to it.
    #[default]
    Named,
    /// Nothing of it has been shown to run.
    Awaited,
    /// This process has begun one of its containers.
    Begun,
    /// It has run, or never will.
    Over,
}

impl FirstStart {
    /// As an earlier process has stored it. A pod whose worker had not come to it is as new as it was.
    #[must_use]
    pub fn restored(self) -> Self {
        Self { adopted: self.stage != Stage::Named, ..self }
    }

    /// Of a pod that an earlier process has taken in without storing this; the phase is that of its last status.
    pub fn adopted(phase: PodPhase) -> Self {
        let stage = if phase == PodPhase::Pending { Stage::Awaited } else { Stage::Over };
        Self { stage, adopted: true }
    }

    /// An earlier process has begun the pod.
    pub fn is_adopted(self) -> bool {
        self.adopted
    }

    /// The worker may begin, and knows whether the runtime holds anything of the pod. True, once: it is a new pod.
    pub fn worker_begins(&mut self, anything_held: bool) -> bool {
        if self.stage != Stage::Named {
            return false;
        }
        *self = Self { stage: Stage::Awaited, adopted: anything_held };
        !anything_held
    }

    /// This process begins a container of the pod.
    pub fn container_begins(&mut self) {
        if self.stage == Stage::Awaited {
            self.stage = Stage::Begun;
        }
    }

    /// The status of the pod has this phase now. True, once: it has gone from Pending to Running, and this process has
    /// begun what made it so.
    pub fn shown(&mut self, phase: PodPhase) -> bool {
        if phase == PodPhase::Pending || self.stage == Stage::Over {
            return false;
        }
        // What ran before the worker has come to it is not of this process.
        self.adopted |= self.stage == Stage::Named;
        let begun = self.stage == Stage::Begun;
        self.stage = Stage::Over;
        begun && phase == PodPhase::Running
    }

    /// It has been shown, or never will be.
    pub fn is_over(self) -> bool {
        self.stage == Stage::Over
    }
}

/// What a turn of a worker is about, as its duration is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A source names a new pod.
    Create,
    /// A source has changed the pod.
    Update,
    /// A look without news of the source: an observation, a probe, a moment that has come.
    Sync,
    /// The pod is to end, or is being ended.
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

    /// What the worker is told by this; `None` for what it tells itself.
    pub fn of(input: &Input<'_>) -> Option<Self> {
        match input {
            Input::Update { kind: UpdateKind::Create, .. } => Some(Self::Create),
            Input::Update { kind: UpdateKind::Update, .. } => Some(Self::Update),
            Input::Update { kind: UpdateKind::Sync, .. } => Some(Self::Sync),
            Input::Removed { .. } | Input::Killed { .. } | Input::ObservedOrphan { .. } => Some(Self::Kill),
            Input::Started | Input::Outcome { .. } => None,
        }
    }

    /// What a turn counts as that was begun in this phase. `told` is what the worker was told since the turn before.
    pub fn of_turn(told: Option<Self>, phase: WorkerPhase, start: FirstStart) -> Self {
        // That a source names it again says nothing new.
        match told.filter(|told| *told != Self::Create || !start.adopted) {
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
    fn a_new_pod_begins_once_and_has_started_once() {
        let mut start = FirstStart::default();
        assert!(!start.shown(Pending));
        assert!(start.worker_begins(false));
        assert!(!start.worker_begins(false), "the next turn");
        start.container_begins();
        assert!(!start.shown(Pending));
        assert!(start.shown(Running));
        // Everything is restarted in a new sandbox.
        start.container_begins();
        assert!(!start.shown(Pending) && !start.shown(Running));
        assert!(!start.is_adopted());
    }

    #[test]
    fn what_was_stored_goes_on_where_it_was() {
        let after_a_restart = |start: FirstStart| -> FirstStart {
            let stored: FirstStart = serde_json::from_value(json!(start)).unwrap();
            stored.restored()
        };
        // It waited for its name, or for the runtime.
        let mut waits = after_a_restart(FirstStart::default());
        assert!(!waits.is_adopted() && waits.worker_begins(false));
        // It has run, and its init containers run once more: its phase is Pending again.
        let mut ran = FirstStart::default();
        ran.worker_begins(false);
        ran.container_begins();
        assert!(ran.shown(Running) && !ran.shown(Pending));
        let mut again = after_a_restart(ran);
        assert!(again.is_adopted() && !again.worker_begins(false));
        again.container_begins();
        assert!(!again.shown(Running));
        // Its containers were begun, and nobody has seen it run.
        let mut begun = FirstStart::default();
        begun.worker_begins(false);
        begun.container_begins();
        let mut begun = after_a_restart(begun);
        assert!(begun.is_adopted() && begun.shown(Running));
    }

    #[test]
    fn what_an_earlier_process_has_begun_is_not_new_whoever_remembers_it() {
        // Its record says so.
        let mut recorded = FirstStart::adopted(Running);
        // Its record is lost, and the runtime has it before the worker comes to it.
        let mut shown = FirstStart::default();
        assert!(!shown.shown(Running));
        // The same, and the runtime tells it late.
        let mut late = FirstStart::default();
        for start in [&mut recorded, &mut shown, &mut late] {
            assert!(!start.worker_begins(true));
            assert!(!start.shown(Running));
            start.container_begins();
            assert!(!start.shown(Pending) && !start.shown(Running), "{start:?}");
            assert!(start.is_adopted());
        }
    }

    #[test]
    fn a_start_that_an_earlier_process_has_left_half_done_is_counted_by_who_finishes_it() {
        let mut start = FirstStart::adopted(Pending);
        assert!(!start.worker_begins(false), "it was begun before");
        start.container_begins();
        assert!(start.shown(Running));
        // All of its containers had been begun before.
        assert!(!FirstStart::adopted(Pending).shown(Running));
    }

    #[test]
    fn a_pod_that_ends_without_having_been_seen_to_run_has_not_started() {
        for phase in [Succeeded, Failed] {
            let mut start = FirstStart::default();
            start.worker_begins(false);
            start.container_begins();
            assert!(!start.shown(phase) && !start.shown(Running), "{phase:?}");
        }
    }

    #[test]
    fn a_worker_is_told_by_sources_and_orders_and_not_by_itself() {
        let (pod, seen) = (pod(json!({})), PodObservation::default());
        let update = |kind| Input::Update { kind, pod: &pod, observed: None };
        for (input, told) in [
            (update(UpdateKind::Create), Some("create")),
            (update(UpdateKind::Update), Some("update")),
            (update(UpdateKind::Sync), Some("sync")),
            (Input::Removed { pod: None }, Some("kill")),
            (Input::Killed { pod: &pod, grace_seconds: None, patch: None }, Some("kill")),
            (Input::ObservedOrphan { observed: &seen }, Some("kill")),
            (Input::Started, None),
            (Input::Outcome { outcome: SyncOutcome::Done, pod: None }, None),
        ] {
            assert_eq!(Operation::of(&input).map(Operation::as_str), told, "{input:?}");
        }
    }

    #[test]
    fn a_turn_is_what_the_worker_was_told_else_what_its_phase_says() {
        use Operation::{Create, Kill, Sync, Update};
        let (new, adopted) = (FirstStart::default(), FirstStart::adopted(Running));
        for (told, phase, start, counted) in [
            (Some(Create), WorkerPhase::Sync, new, Create),
            (Some(Create), WorkerPhase::Sync, adopted, Sync),
            (Some(Create), WorkerPhase::Terminating, adopted, Kill),
            (Some(Update), WorkerPhase::Sync, adopted, Update),
            (Some(Kill), WorkerPhase::Terminating, adopted, Kill),
            (None, WorkerPhase::Sync, new, Sync),
            (None, WorkerPhase::Terminating, new, Kill),
            (None, WorkerPhase::Terminated, new, Kill),
        ] {
            assert_eq!(Operation::of_turn(told, phase, start), counted, "{told:?} in {phase:?}");
        }
    }
}
