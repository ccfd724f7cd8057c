//! Init containers and sidecars (§9.5).
//!
//! Containers that terminated in an earlier sandbox do not count here. Upstream removes the init records when it creates a
//! sandbox, with the same effect; here nothing depends on that removal.

use keelson_kube_model::{Container, RestartPolicy};

use super::{
    ContainerWait, Inputs, KillContainer, ProbeResult, StartCandidate, definition_changed, kill_running,
    kill_unknown, start_reason,
};
use crate::observation::{ContainerObservation, ContainerRecordState};
use crate::reason::Reason;
use crate::restart::{ContainerKind, effective_policy, should_restart};

/// The result of the walk over the init containers.
pub(super) struct InitWalk<'a> {
    /// Every init container has completed or started, so the regular ones may run.
    pub(super) initialised: bool,
    /// One of them failed and may not restart.
    pub(super) failed: Option<Reason>,
    pub(super) start: Vec<StartCandidate<'a>>,
    pub(super) kill: Vec<KillContainer>,
    pub(super) waiting: Vec<ContainerWait>,
}

/// A container of the walk with its position.
struct Place<'a> {
    index: usize,
    container: &'a Container,
    kind: ContainerKind,
    is_last: bool,
    /// The pod has progressed past this container: only sidecars still matter.
    passed: bool,
}

/// Walks from the last init container to the first. The first one with a record is how far the pod has progressed; the
/// containers before it have been passed, and their records may have been removed.
pub(super) fn walk<'a>(inputs: &Inputs<'a>) -> InitWalk<'a> {
    let list = &inputs.pod.spec.init_containers;
    let mut walk = InitWalk {
        initialised: list.is_empty() || has_live_regular_container(inputs),
        failed: None,
        start: Vec::new(),
        kill: Vec::new(),
        waiting: Vec::new(),
    };
    let mut passed = walk.initialised;
    for (index, container) in list.iter().enumerate().rev() {
        let kind = ContainerKind::of_init(container);
        let place = Place { index, container, kind, is_last: index + 1 == list.len(), passed };
        match record_of(inputs, container) {
            None if passed && kind == ContainerKind::Sidecar => {
                walk.start(&place, Reason::ContainerNotStarted)
            }
            None => {}
            Some(_) if passed && kind == ContainerKind::Init => {}
            Some(record) => {
                walk.visit(inputs, &place, record);
                if walk.failed.is_some() {
                    return walk;
                }
                passed = true;
            }
        }
    }
    if !passed && let Some(first) = list.first() {
        walk.start.push(StartCandidate {
            kind: ContainerKind::of_init(first),
            container: first,
            reason: Reason::ContainerNotStarted,
        });
    }
    let order = |candidate: &StartCandidate<'_>| {
        list.iter().position(|container| container.name == candidate.container.name)
    };
    walk.start.sort_by_key(order);
    walk.start.dedup_by_key(|candidate| candidate.container.name.as_str());
    walk
}

/// The relevant record: the newest one if it may run, in any sandbox, else the newest in this sandbox.
fn record_of<'a>(inputs: &Inputs<'a>, container: &Container) -> Option<&'a ContainerObservation> {
    let newest = inputs.observed.current(&container.name);
    newest.filter(|record| record.may_run()).or_else(|| inputs.observed.in_newest_sandbox(&container.name))
}

/// Whether some regular container was created in this sandbox and has not terminated.
fn has_live_regular_container(inputs: &Inputs<'_>) -> bool {
    let mut records = inputs.pod.spec.containers.iter().filter_map(|container| record_of(inputs, container));
    records
        .any(|record| matches!(record.state, ContainerRecordState::Created | ContainerRecordState::Running))
}

impl<'a> InitWalk<'a> {
    fn start(&mut self, place: &Place<'a>, reason: Reason) {
        self.start.push(StartCandidate { kind: place.kind, container: place.container, reason });
    }

    /// The container has completed or started: starts the next one, or completes the initialisation.
    fn advance(&mut self, inputs: &Inputs<'a>, place: &Place<'a>) {
        if place.is_last {
            self.initialised = true;
        } else if !place.passed
            && let Some(next) = inputs.pod.spec.init_containers.get(place.index + 1)
        {
            let kind = ContainerKind::of_init(next);
            self.start.push(StartCandidate { kind, container: next, reason: Reason::ContainerNotStarted });
        }
    }

    fn visit(&mut self, inputs: &Inputs<'a>, place: &Place<'a>, record: &ContainerObservation) {
        match (record.state, place.kind) {
            (ContainerRecordState::Created, _) => self.start(place, start_reason(Some(record))),
            (ContainerRecordState::Running, ContainerKind::Sidecar) => self.running(inputs, place, record),
            (ContainerRecordState::Running, _) => {}
            (ContainerRecordState::Exited, ContainerKind::Sidecar) => {
                self.start(place, Reason::ContainerExited)
            }
            (ContainerRecordState::Exited, _) => self.exited(inputs, place, record),
            (ContainerRecordState::Unknown, kind) => {
                let never = effective_policy(inputs.pod, place.container) == RestartPolicy::Never;
                if kind == ContainerKind::Init && never {
                    self.fail();
                    return;
                }
                self.kill.push(kill_unknown(inputs.pod, place.container, record, "Init container"));
                self.start(place, Reason::ContainerStateUnknown);
            }
        }
    }

    fn running(&mut self, inputs: &Inputs<'a>, place: &Place<'a>, record: &ContainerObservation) {
        if place.container.startup_probe.is_some() {
            match inputs.hints.startup(&record.id) {
                Some(ProbeResult::Success) => {}
                Some(ProbeResult::Failure) => {
                    self.replace(inputs, place, record, Reason::StartupProbeFailed);
                    return;
                }
                None | Some(ProbeResult::Unknown) => {
                    self.waiting.push(ContainerWait {
                        name: place.container.name.clone(),
                        reason: Reason::WaitingForStartupProbe,
                        message: "its startup probe has not succeeded yet".to_owned(),
                        event_message: String::new(),
                        until_unix_nanos: 0,
                    });
                    return;
                }
            }
        }
        self.advance(inputs, place);
        if definition_changed(place.container, record) {
            self.replace(inputs, place, record, Reason::ContainerDefinitionChanged);
        } else if inputs.hints.liveness_failed(&record.id) {
            self.replace(inputs, place, record, Reason::LivenessProbeFailed);
        } else if inputs.hints.resized.contains(&record.id) {
            self.replace(inputs, place, record, Reason::ResizeRequiresRestart);
        }
    }

    fn replace(
        &mut self,
        inputs: &Inputs<'a>,
        place: &Place<'a>,
        record: &ContainerObservation,
        reason: Reason,
    ) {
        self.kill.push(kill_running(inputs.pod, place.container, record, reason, true));
        self.start(place, reason);
    }

    fn exited(&mut self, inputs: &Inputs<'a>, place: &Place<'a>, record: &ContainerObservation) {
        if record.exit_code == 0 && record.reason != "OOMKilled" {
            self.advance(inputs, place);
        } else if should_restart(inputs.pod, place.container, inputs.observed) {
            self.start(place, Reason::ContainerExited);
        } else {
            self.fail();
        }
    }

    fn fail(&mut self) {
        self.failed = Some(Reason::InitContainerFailed);
        self.initialised = false;
    }
}
