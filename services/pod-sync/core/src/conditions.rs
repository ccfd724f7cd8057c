//! The conditions of a pod (§14.4).

use keelson_kube_model::{ContainerStatus, Pod, PodCondition, PodPhase, PodStatus};

use crate::actions::has_restart_all;
use crate::resize::ResizeRecord;
use crate::worker::StatusPatch;

/// The sandbox is ready: containers may be started.
pub const READY_TO_START: &str = "PodReadyToStartContainers";
/// Every init container has completed, and every sidecar has started.
pub const INITIALIZED: &str = "Initialized";
/// Every container is ready.
pub const CONTAINERS_READY: &str = "ContainersReady";
/// Every container is ready and every readiness gate is true.
pub const READY: &str = "Ready";
/// A node was found for the pod.
pub const SCHEDULED: &str = "PodScheduled";
/// The node terminates the pod.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// All containers of the pod restart.
pub const RESTARTING_ALL: &str = "AllContainersRestarting";

/// A resize of the pod has not been accepted.
pub const RESIZE_PENDING: &str = "PodResizePending";
/// A resize of the pod has been accepted and is not completed.
pub const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";

/// Conditions that the node agent alone writes.
pub const OWNED: [&str; 8] = [
    SCHEDULED,
    INITIALIZED,
    CONTAINERS_READY,
    READY,
    READY_TO_START,
    RESIZE_PENDING,
    RESIZE_IN_PROGRESS,
    RESTARTING_ALL,
];

/// What the conditions depend on.
pub struct ConditionInputs<'a> {
    /// The pod; its status is that of the API object.
    pub pod: &'a Pod,
    /// The new status with phase, container statuses and readiness.
    pub status: &'a PodStatus,
    /// The last status stored.
    pub old: &'a PodStatus,
    /// No new sandbox is needed; `None`: `PodReadyToStartContainers` is not reported.
    pub ready_to_start: Option<bool>,
    /// A container has triggered `RestartAllContainers`, and not all records are removed yet.
    pub restarting: bool,
    /// The resize of the pod.
    pub resize: Option<&'a ResizeRecord>,
    /// An order that makes the pod a `DisruptionTarget`.
    pub disruption: Option<&'a StatusPatch>,
    /// The time as a timestamp.
    pub now: Option<String>,
}

/// True, or false with a reason and a message.
struct Verdict {
    is_true: bool,
    reason: String,
    message: String,
}

impl Verdict {
    fn yes(reason: &str) -> Self {
        Self { is_true: true, reason: reason.to_owned(), message: String::new() }
    }

    fn no(reason: &str, message: String) -> Self {
        Self { is_true: false, reason: reason.to_owned(), message }
    }
}

/// All conditions: the owned ones, then those of others as in the API object.
pub fn generate(inputs: &ConditionInputs<'_>) -> Vec<PodCondition> {
    let ready_to_start = inputs
        .ready_to_start
        .map(|is_true| (READY_TO_START, Verdict { is_true, reason: String::new(), message: String::new() }));
    let verdicts = [
        (INITIALIZED, initialised(inputs)),
        (READY, ready(inputs)),
        (CONTAINERS_READY, containers_ready(inputs)),
        (SCHEDULED, Verdict::yes("")),
    ];
    let mut conditions: Vec<PodCondition> = ready_to_start
        .into_iter()
        .chain(verdicts)
        .map(|(type_, verdict)| condition(inputs, type_, verdict))
        .collect();
    if has_restart_all(inputs.pod) {
        // It describes the present state, not the spec: no observed generation.
        let restarting = condition(inputs, RESTARTING_ALL, restarting(inputs));
        conditions.push(PodCondition { observed_generation: None, ..restarting });
    }
    if let Some(record) = inputs.resize.filter(|_| !phase(inputs).is_terminal()) {
        conditions.extend(resize_conditions(inputs, record));
    }
    if let Some(patch) = inputs.disruption {
        let own = Some(&patch.condition_message).filter(|message| !message.is_empty());
        let message = own.unwrap_or(&patch.message);
        let verdict =
            Verdict { is_true: true, reason: "TerminationByKubelet".to_owned(), message: message.clone() };
        conditions.push(condition(inputs, DISRUPTION_TARGET, verdict));
    } else if let Some(carried) = inputs.old.condition(DISRUPTION_TARGET) {
        conditions.push(carried.clone());
    }
    for foreign in &inputs.pod.status.conditions {
        let mine = OWNED.contains(&foreign.type_.as_str());
        if !mine && !conditions.iter().any(|known| known.type_ == foreign.type_) {
            conditions.push(foreign.clone());
        }
    }
    conditions
}

/// The time of the last transition changes only with the status.
fn condition(inputs: &ConditionInputs<'_>, type_: &str, verdict: Verdict) -> PodCondition {
    let status = if verdict.is_true { "True" } else { "False" };
    let before = inputs.old.condition(type_).filter(|old| old.status == status);
    PodCondition {
        type_: type_.to_owned(),
        observed_generation: inputs.pod.metadata.generation,
        status: status.to_owned(),
        last_probe_time: before.and_then(|old| old.last_probe_time.clone()),
        last_transition_time: before
            .and_then(|old| old.last_transition_time.clone())
            .or_else(|| inputs.now.clone()),
        reason: verdict.reason,
        message: verdict.message,
    }
}

/// The conditions of a resize (§16). They are True or absent, have generations of their own, and the time of their last transition changes
/// with the reason.
fn resize_conditions(inputs: &ConditionInputs<'_>, record: &ResizeRecord) -> Vec<PodCondition> {
    let make = |type_, reason: &str, message: &str, generation| {
        let verdict = Verdict { is_true: true, ..Verdict::no(reason, message.to_owned()) };
        let made = PodCondition { observed_generation: generation, ..condition(inputs, type_, verdict) };
        let has_changed = inputs.old.condition(type_).is_some_and(|old| old.reason != made.reason);
        let last_transition_time =
            if has_changed { inputs.now.clone() } else { made.last_transition_time.clone() };
        PodCondition { last_transition_time, ..made }
    };
    let pending = record
        .pending
        .as_ref()
        .map(|pending| make(RESIZE_PENDING, pending.reason.as_str(), &pending.message, pending.generation));
    let in_progress = record.in_progress.as_ref().map(|progress| {
        let reason = if progress.error.is_empty() { "" } else { "Error" };
        make(RESIZE_IN_PROGRESS, reason, &progress.error, progress.generation)
    });
    pending.into_iter().chain(in_progress).collect()
}

fn phase(inputs: &ConditionInputs<'_>) -> PodPhase {
    inputs.status.phase()
}

fn find<'a>(list: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    list.iter().find(|entry| entry.name == name)
}

/// `containers with <what> status: [a b]`, the way Go prints a list.
fn listed(what: &str, names: &[&str]) -> Option<String> {
    (!names.is_empty()).then(|| format!("containers with {what} status: [{}]", names.join(" ")))
}

fn clauses(unknown: &[&str], kind: &str, others: &[&str]) -> String {
    let parts: Vec<String> = listed("unknown", unknown).into_iter().chain(listed(kind, others)).collect();
    parts.join(", ")
}

fn restarting(inputs: &ConditionInputs<'_>) -> Verdict {
    if inputs.restarting {
        return Verdict::yes("RestartAllContainersStarted");
    }
    let reason = match phase(inputs) {
        PodPhase::Succeeded => "PodCompleted",
        PodPhase::Failed => "PodFailed",
        _ => "",
    };
    Verdict::no(reason, String::new())
}

fn initialised(inputs: &ConditionInputs<'_>) -> Verdict {
    let list = &inputs.status.init_container_statuses;
    let (mut unknown, mut incomplete) = (Vec::new(), Vec::new());
    for container in &inputs.pod.spec.init_containers {
        match find(list, &container.name) {
            None => unknown.push(container.name.as_str()),
            Some(entry) => {
                let done =
                    if container.is_restartable_init() { entry.started == Some(true) } else { entry.ready };
                if !done {
                    incomplete.push(container.name.as_str());
                }
            }
        }
    }
    let regular_began = inputs
        .status
        .container_statuses
        .iter()
        .any(|entry| entry.state.running.is_some() || entry.state.terminated.is_some());
    if phase(inputs) == PodPhase::Succeeded && unknown.is_empty() {
        Verdict::yes("PodCompleted")
    } else if regular_began
        || (unknown.is_empty() && incomplete.is_empty())
        || (has_restart_all(inputs.pod) && inputs.old.condition(INITIALIZED).is_some_and(|c| c.is_true()))
    {
        Verdict::yes("")
    } else if list.is_empty() {
        Verdict::no("UnknownContainerStatuses", String::new())
    } else {
        Verdict::no("ContainersNotInitialized", clauses(&unknown, "incomplete", &incomplete))
    }
}

fn containers_ready(inputs: &ConditionInputs<'_>) -> Verdict {
    let (mut unknown, mut unready) = (Vec::new(), Vec::new());
    let sidecars = inputs.pod.spec.init_containers.iter().filter(|container| container.is_restartable_init());
    let counted = sidecars
        .map(|container| (container, find(&inputs.status.init_container_statuses, &container.name)))
        .chain(
            inputs
                .pod
                .spec
                .containers
                .iter()
                .map(|container| (container, find(&inputs.status.container_statuses, &container.name))),
        );
    for (container, entry) in counted {
        match entry {
            None => unknown.push(container.name.as_str()),
            Some(entry) if !entry.ready => unready.push(container.name.as_str()),
            Some(_) => {}
        }
    }
    match phase(inputs) {
        _ if inputs.status.container_statuses.is_empty() => {
            Verdict::no("UnknownContainerStatuses", String::new())
        }
        PodPhase::Succeeded if unknown.is_empty() => Verdict::no("PodCompleted", String::new()),
        PodPhase::Failed => Verdict::no("PodFailed", String::new()),
        _ if unknown.is_empty() && unready.is_empty() => Verdict::yes(""),
        _ => Verdict::no("ContainersNotReady", clauses(&unknown, "unready", &unready)),
    }
}

fn ready(inputs: &ConditionInputs<'_>) -> Verdict {
    let containers = containers_ready(inputs);
    if !containers.is_true {
        return containers;
    }
    let mut missing = Vec::new();
    for gate in &inputs.pod.spec.readiness_gates {
        let name = &gate.condition_type;
        match inputs.pod.status.condition(name) {
            None => missing
                .push(format!("corresponding condition of pod readiness gate \"{name}\" does not exist.")),
            Some(condition) if !condition.is_true() => missing.push(format!(
                "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                condition.status
            )),
            Some(_) => {}
        }
    }
    if missing.is_empty() {
        Verdict::yes("")
    } else {
        Verdict::no("ReadinessGatesNotReady", missing.join(", "))
    }
}

/// Sets the conditions Ready and ContainersReady of a pod in a final phase to false.
pub fn make_unready(status: &mut PodStatus, now: Option<String>) {
    let reason = if status.phase() == PodPhase::Succeeded { "PodCompleted" } else { "PodFailed" };
    for condition in &mut status.conditions {
        if [READY, CONTAINERS_READY].contains(&condition.type_.as_str()) {
            if condition.is_true() {
                condition.status = "False".to_owned();
                condition.last_transition_time.clone_from(&now);
            }
            condition.reason = reason.to_owned();
            condition.message.clear();
        }
    }
}
