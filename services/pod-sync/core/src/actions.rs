//! What must change so that the containers of a pod match its spec.
//!
//! Parity: kubelet 1.36 decides the same (pod-lifecycle.md §9.2 to §9.6, §9.8), except that
//! - the back-off is part of the decision: a container in back-off is in `waiting`, not in `start`;
//! - a record without a hash is kept, not replaced;
//! - a container that may not restart does not start in a new sandbox either, by any policy;
//! - init containers that terminated in an earlier sandbox do not count, so their records need not be removed first;
//! - of several running instances of one container only the newest is kept;
//! - no sandbox is created for a pod that is being deleted.

mod init;
mod restart_all;
mod sandbox;

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::{Container, ContainerId, Pod, RestartPolicy, SandboxId};
use serde::{Deserialize, Serialize};

use crate::backoff::{self, BackoffKey, Backoffs};
use crate::moment::Moment;
use crate::observation::{ContainerObservation, ContainerRecordState, PodObservation};
use crate::reason::Reason;
use crate::restart::{ContainerKind, effective_policy, should_restart};
use crate::termination::container_grace_seconds;

pub use restart_all::{RESTART_ALL, ResetContainer, has_restart_all, is_restarting};
pub use sandbox::{SandboxDecision, sandbox_decision};

/// The result of a probe of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProbeResult {
    /// The threshold of successes was reached.
    Success,
    /// The threshold of failures was reached.
    Failure,
    /// Neither threshold was reached yet.
    Unknown,
}

/// What a running container restarts for: its liveness and startup results, or new resources. Readiness never starts or stops a
/// container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbeHints {
    /// There are no startup probes: a running sidecar counts as started. See [`ProbeHints::without_probes`].
    pub assume_started: bool,
    /// Results of liveness probes.
    pub liveness: BTreeMap<ContainerId, ProbeResult>,
    /// Results of startup probes.
    pub startup: BTreeMap<ContainerId, ProbeResult>,
    /// Running containers that restart to get new resources; see [`crate::resize::ResizePlan::restart`].
    pub resized: BTreeSet<ContainerId>,
}

impl ProbeHints {
    /// Hints of an agent without probes: no probe fails, and running containers are started.
    pub fn without_probes() -> Self {
        Self { assume_started: true, ..Self::default() }
    }

    fn liveness_failed(&self, id: &ContainerId) -> bool {
        self.liveness.get(id) == Some(&ProbeResult::Failure)
    }

    fn startup(&self, id: &ContainerId) -> Option<ProbeResult> {
        let known = self.startup.get(id).copied();
        known.or(self.assume_started.then_some(ProbeResult::Success))
    }
}

/// A sandbox to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxPlan {
    /// CRI `metadata.attempt`.
    pub attempt: u32,
    /// The sandbox that it replaces; set exactly if the event `SandboxChanged` is due.
    pub replaces: Option<SandboxId>,
    /// Why a sandbox is needed.
    pub reason: Reason,
}

/// A running instance to stop. Kills come before starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillContainer {
    /// The instance.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// Why.
    pub reason: Reason,
    /// Message of the `Killing` event.
    pub message: String,
    /// Seconds for preStop and SIGTERM; see [`crate::termination::stop_timeout_seconds`].
    pub grace_seconds: i64,
}

/// A container of the spec to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartContainer {
    /// Its name in the spec.
    pub name: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// CRI `metadata.attempt` and restart count: one more than that of the newest record, 0 without a record, and that of the
    /// record that it `replaces`.
    pub attempt: u32,
    /// A record that was created and never started, because the call was interrupted: it is removed first, and the new start
    /// has the same restart count.
    pub replaces: Option<ContainerId>,
    /// There is no record, so the log directory may have a higher attempt (`next_attempt_by_logs`): take the larger.
    pub attempt_from_logs: bool,
    /// Why it starts.
    pub reason: Reason,
    /// Arguments for [`Backoffs::advance`] when the start begins: the key, and when the last run terminated.
    pub backoff: Option<(BackoffKey, i64)>,
}

/// A container that should start, but not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerWait {
    /// Its name in the spec.
    pub name: String,
    /// What it waits for.
    pub reason: Reason,
    /// The waiting message in the status.
    pub message: String,
    /// Message of the Warning event; empty if none is due.
    pub event_message: String,
    /// When it may start, unix nanoseconds; 0 if no time is set.
    pub until_unix_nanos: i64,
}

/// What must change. Order of execution: `reset` alone, or `kill_pod` or `kill`, `create_sandbox`, `start` in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodActions {
    /// Stop every container and every sandbox.
    pub kill_pod: Option<Reason>,
    /// Then make this sandbox.
    pub create_sandbox: Option<SandboxPlan>,
    /// Running instances to stop; empty when the whole pod is killed.
    pub kill: Vec<KillContainer>,
    /// Entries of the spec to start, in this order: ephemeral, init in spec order, regular in spec order. A failed
    /// start of a container of kind `Init` ends the list; any other failure does not.
    pub start: Vec<StartContainer>,
    /// Entries of the spec that wait.
    pub waiting: Vec<ContainerWait>,
    /// Records to remove because all containers restart; nothing else is done meanwhile.
    pub reset: Vec<ResetContainer>,
    /// Arguments for [`Backoffs::advance`] when all of `reset` are removed.
    pub reset_backoff: Vec<(BackoffKey, i64)>,
    /// None of the pod's containers will start again.
    pub terminal: bool,
}

impl PodActions {
    /// No change is necessary now.
    pub fn is_empty(&self) -> bool {
        self.kill_pod.is_none()
            && self.create_sandbox.is_none()
            && self.kill.is_empty()
            && self.start.is_empty()
            && self.reset.is_empty()
    }

    /// Leaves alone the containers that restart to get new resources: their pod cannot have these yet.
    pub fn without_resize_restarts(&mut self) {
        self.kill.retain(|kill| kill.reason != Reason::ResizeRequiresRestart);
        self.start.retain(|start| start.reason != Reason::ResizeRequiresRestart);
    }

    /// The earliest time at which a waiting container may start.
    pub fn next_wake_unix_nanos(&self) -> Option<i64> {
        self.waiting.iter().map(|wait| wait.until_unix_nanos).filter(|until| *until != 0).min()
    }
}

/// The inputs of the decision.
struct Inputs<'a> {
    pod: &'a Pod,
    observed: &'a PodObservation,
    hints: &'a ProbeHints,
}

/// A container that should start unless it is in back-off.
#[derive(Clone, Copy)]
struct StartCandidate<'a> {
    kind: ContainerKind,
    container: &'a Container,
    reason: Reason,
}

/// Decides what must change so that the containers of `pod` match its spec.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision. `kill` names
/// running instances, `start` names spec entries; one container may be in both, and kills run first.
pub fn compute_pod_actions(
    pod: &Pod,
    observed: &PodObservation,
    hints: &ProbeHints,
    backoff: &Backoffs,
    at: &Moment,
) -> PodActions {
    let inputs = Inputs { pod, observed, hints };
    let decision = sandbox_decision(pod, observed);
    let (mut actions, candidates) = match decision {
        SandboxDecision::Keep => match restart_all::reset(&inputs, backoff, at) {
            Some(actions) => return actions,
            None => keep_sandbox(&inputs),
        },
        SandboxDecision::Create { attempt, replaces, reason } => {
            sandbox::create(&inputs, SandboxPlan { attempt, replaces, reason })
        }
    };
    apply_backoff(&inputs, &mut actions, &candidates, backoff, at);
    actions
}

/// Stops the pod for good.
fn only_kill(inputs: &Inputs<'_>, reason: Reason) -> PodActions {
    PodActions {
        kill_pod: needs_kill(inputs.observed).then_some(reason),
        terminal: true,
        ..PodActions::default()
    }
}

fn needs_kill(observed: &PodObservation) -> bool {
    !observed.sandboxes.is_empty() || observed.containers.iter().any(|container| !container.has_exited())
}

/// Decides about the containers if the sandbox is kept (§9.4).
fn keep_sandbox<'a>(inputs: &Inputs<'a>) -> (PodActions, Vec<StartCandidate<'a>>) {
    let mut actions = PodActions::default();
    let mut candidates = ephemeral(inputs);
    let init = init::walk(inputs);
    if let Some(reason) = init.failed {
        return (only_kill(inputs, reason), Vec::new());
    }
    actions.kill = duplicates(inputs);
    actions.kill.extend(init.kill);
    actions.waiting = init.waiting;
    if !init.initialised {
        candidates.extend(init.start);
        return (actions, candidates);
    }
    let (kept, started) = regular(inputs, &mut actions);
    if kept == 0 && started.is_empty() {
        return (only_kill(inputs, Reason::PodCompleted), Vec::new());
    }
    candidates.extend(init.start);
    candidates.extend(started);
    (actions, candidates)
}

fn ephemeral<'a>(inputs: &Inputs<'a>) -> Vec<StartCandidate<'a>> {
    if inputs.pod.is_deleting() {
        return Vec::new();
    }
    let unseen = |container: &&Container| inputs.observed.current(&container.name).is_none();
    let candidate = |container| StartCandidate {
        kind: ContainerKind::Ephemeral,
        container,
        reason: Reason::ContainerNotStarted,
    };
    inputs.pod.spec.ephemeral_containers.iter().filter(unseen).map(candidate).collect()
}

/// Older instances of a name that may still run in addition to the newest one, left over from an interrupted stop.
fn duplicates(inputs: &Inputs<'_>) -> Vec<KillContainer> {
    let mut kill = Vec::new();
    for (_, container) in inputs.pod.containers() {
        for record in inputs.observed.records(&container.name).skip(1).filter(|record| record.may_run()) {
            kill.push(KillContainer {
                id: record.id.clone(),
                name: container.name.clone(),
                reason: Reason::DuplicateContainer,
                message: format!(
                    "Container {} was restarted; this older instance is stopped",
                    container.name
                ),
                grace_seconds: container_grace_seconds(
                    inputs.pod,
                    Some(container),
                    Reason::DuplicateContainer,
                ),
            });
        }
    }
    kill
}

/// Decides about the regular containers in spec order. Returns how many are kept and which ones start.
fn regular<'a>(inputs: &Inputs<'a>, actions: &mut PodActions) -> (usize, Vec<StartCandidate<'a>>) {
    let (mut kept, mut started) = (0, Vec::new());
    for container in &inputs.pod.spec.containers {
        let record = inputs.observed.current(&container.name);
        let candidate = |reason| StartCandidate { kind: ContainerKind::Regular, container, reason };
        match record.filter(|record| record.is_running()) {
            None => {
                if !should_restart(inputs.pod, container, inputs.observed) {
                    continue;
                }
                started.push(candidate(start_reason(record)));
                if let Some(record) = record.filter(|r| r.state == ContainerRecordState::Unknown) {
                    actions.kill.push(kill_unknown(inputs.pod, container, record, "Container"));
                }
            }
            Some(record) => match kill_reason(inputs, container, record) {
                None => kept += 1,
                Some(reason) => {
                    let changed = [Reason::ContainerDefinitionChanged, Reason::ResizeRequiresRestart];
                    let restart = changed.contains(&reason)
                        || effective_policy(inputs.pod, container) != RestartPolicy::Never;
                    actions.kill.push(kill_running(inputs.pod, container, record, reason, restart));
                    if restart {
                        started.push(candidate(reason));
                    }
                }
            },
        }
    }
    (kept, started)
}

fn start_reason(record: Option<&ContainerObservation>) -> Reason {
    match record.map(|record| record.state) {
        None | Some(ContainerRecordState::Created) => Reason::ContainerNotStarted,
        Some(ContainerRecordState::Unknown) => Reason::ContainerStateUnknown,
        Some(ContainerRecordState::Exited | ContainerRecordState::Running) => Reason::ContainerExited,
    }
}

/// Why a running container must be killed; `None` if it is kept.
fn kill_reason(inputs: &Inputs<'_>, container: &Container, record: &ContainerObservation) -> Option<Reason> {
    if definition_changed(container, record) {
        Some(Reason::ContainerDefinitionChanged)
    } else if inputs.hints.liveness_failed(&record.id) {
        Some(Reason::LivenessProbeFailed)
    } else if inputs.hints.startup.get(&record.id) == Some(&ProbeResult::Failure) {
        Some(Reason::StartupProbeFailed)
    } else if inputs.hints.resized.contains(&record.id) {
        Some(Reason::ResizeRequiresRestart)
    } else {
        None
    }
}

/// The image in the spec is not the one that the record was created from.
pub fn definition_changed(container: &Container, record: &ContainerObservation) -> bool {
    !record.hash.is_empty() && record.hash != crate::container_hash(container)
}

fn kill_running(
    pod: &Pod,
    container: &Container,
    record: &ContainerObservation,
    reason: Reason,
    restart: bool,
) -> KillContainer {
    let cause = match reason {
        Reason::ContainerDefinitionChanged => "definition changed",
        Reason::LivenessProbeFailed => "failed liveness probe",
        Reason::ResizeRequiresRestart => "resize requires restart",
        _ => "failed startup probe",
    };
    let rest = if restart && reason != Reason::ResizeRequiresRestart { ", will be restarted" } else { "" };
    KillContainer {
        id: record.id.clone(),
        name: container.name.clone(),
        reason,
        message: format!("Container {} {cause}{rest}", container.name),
        grace_seconds: container_grace_seconds(pod, Some(container), reason),
    }
}

fn kill_unknown(
    pod: &Pod,
    container: &Container,
    record: &ContainerObservation,
    what: &str,
) -> KillContainer {
    KillContainer {
        id: record.id.clone(),
        name: container.name.clone(),
        reason: Reason::ContainerStateUnknown,
        message: format!("{what} is in \"{}\" state, try killing it before restart", record.state.as_str()),
        grace_seconds: container_grace_seconds(pod, Some(container), Reason::ContainerStateUnknown),
    }
}

/// Divides the picked containers into those that start and those that are in back-off (§9.8).
fn apply_backoff(
    inputs: &Inputs<'_>,
    actions: &mut PodActions,
    candidates: &[StartCandidate<'_>],
    backoffs: &Backoffs,
    at: &Moment,
) {
    let mut blocked_by: Option<&str> = None;
    for StartCandidate { kind, container, reason } in candidates {
        if let Some(earlier) = blocked_by {
            actions.waiting.push(wait_for_init(&container.name, earlier));
            continue;
        }
        let last = inputs.observed.last_exited(&container.name).map(|record| record.finished_unix_nanos);
        let backoff = last.map(|finished| (BackoffKey::of(inputs.pod, container), finished));
        let wait = backoff.as_ref().and_then(|(key, finished)| backoffs.waits_until(key, *finished, at));
        if let Some((until_unix_nanos, delay_seconds)) = wait {
            actions.waiting.push(ContainerWait {
                name: container.name.clone(),
                reason: Reason::CrashLoopBackOff,
                message: backoff::waiting_message(inputs.pod, &container.name, delay_seconds),
                event_message: backoff::event_message(inputs.pod, &container.name),
                until_unix_nanos,
            });
            if *kind == ContainerKind::Init {
                blocked_by = Some(&container.name);
            }
            continue;
        }
        let record = inputs.observed.current(&container.name);
        let unstarted = record.filter(|record| record.state == ContainerRecordState::Created);
        actions.start.push(StartContainer {
            name: container.name.clone(),
            kind: *kind,
            attempt: match (unstarted, record) {
                (Some(record), _) => record.restart_count,
                (None, record) => record.map_or(0, |record| record.restart_count + 1),
            },
            replaces: unstarted.map(|record| record.id.clone()),
            attempt_from_logs: record.is_none(),
            reason: *reason,
            backoff,
        });
    }
}

fn wait_for_init(name: &str, earlier: &str) -> ContainerWait {
    ContainerWait {
        name: name.to_owned(),
        reason: Reason::WaitingForInitContainer,
        message: format!("waiting for init container {earlier}"),
        event_message: String::new(),
        until_unix_nanos: 0,
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
