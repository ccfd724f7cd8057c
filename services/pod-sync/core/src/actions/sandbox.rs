//! Whether the sandbox is kept, and what to do if not (§9.2, §9.3).

use keelson_kube_model::{Container, Pod, RestartPolicy, SandboxId};

use super::{Inputs, PodActions, SandboxPlan, StartCandidate, needs_kill, only_kill};
use crate::observation::PodObservation;
use crate::reason::Reason;
use crate::restart::{ContainerKind, exit_allows_restart};

/// The decision about the pod's sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxDecision {
    /// The newest one is kept.
    Keep,
    /// A new one is needed.
    Create {
        /// CRI `metadata.attempt` of the new one.
        attempt: u32,
        /// The sandbox that it replaces.
        replaces: Option<SandboxId>,
        /// Why it is needed.
        reason: Reason,
    },
}

/// Decides about the sandbox; the first condition that is met wins.
///
/// The condition `PodReadyToStartContainers` is true exactly when this returns [`SandboxDecision::Keep`].
pub fn sandbox_decision(pod: &Pod, observed: &PodObservation) -> SandboxDecision {
    let Some(newest) = observed.newest_sandbox() else {
        return SandboxDecision::Create { attempt: 0, replaces: None, reason: Reason::NoSandbox };
    };
    let ready = observed.sandboxes.iter().filter(|sandbox| sandbox.ready).count();
    let (reason, replaces) = if ready > 1 {
        (Reason::SeveralSandboxesReady, Some(newest.id.clone()))
    } else if !newest.ready {
        (Reason::SandboxNotReady, Some(newest.id.clone()))
    } else if newest.host_network != pod.is_host_network() {
        (Reason::SandboxNetworkModeChanged, None)
    } else if !newest.host_network && newest.ips.iter().all(String::is_empty) {
        (Reason::SandboxWithoutAddress, Some(newest.id.clone()))
    } else {
        return SandboxDecision::Keep;
    };
    SandboxDecision::Create { attempt: newest.attempt + 1, replaces, reason }
}

/// The actions if a new sandbox is needed: create one, or stop a pod that has completed.
pub(super) fn create<'a>(inputs: &Inputs<'a>, plan: SandboxPlan) -> (PodActions, Vec<StartCandidate<'a>>) {
    let (pod, observed) = (inputs.pod, inputs.observed);
    if pod.is_deleting() {
        return (only_kill(inputs, Reason::PodDeleted), Vec::new());
    }
    let never = pod.restart_policy() == RestartPolicy::Never;
    if never && plan.attempt != 0 && !observed.containers.is_empty() {
        return (only_kill(inputs, Reason::RestartNotAllowed), Vec::new());
    }
    let to_start: Vec<&Container> =
        pod.spec.containers.iter().filter(|container| !ended_for_good(inputs, container)).collect();
    let any_record = pod.spec.containers.iter().any(|container| observed.current(&container.name).is_some());
    if to_start.is_empty() && any_record {
        return (only_kill(inputs, Reason::PodCompleted), Vec::new());
    }
    let reason = plan.reason;
    let candidates = match pod.spec.init_containers.first() {
        Some(first) => vec![StartCandidate { kind: ContainerKind::of_init(first), container: first, reason }],
        None => to_start
            .into_iter()
            .map(|container| StartCandidate { kind: ContainerKind::Regular, container, reason })
            .collect(),
    };
    let actions = PodActions {
        kill_pod: needs_kill(observed).then_some(reason),
        create_sandbox: Some(plan),
        ..PodActions::default()
    };
    (actions, candidates)
}

/// The container has terminated and may not restart, by its rules and policies.
///
/// Parity: upstream only checks for exit code 0 under `OnFailure`, so a container with policy Never in a pod with policy
/// Always would run again in each new sandbox.
fn ended_for_good(inputs: &Inputs<'_>, container: &Container) -> bool {
    inputs.observed.current(&container.name).is_some_and(|record| {
        record.has_exited() && !exit_allows_restart(inputs.pod, container, record.exit_code)
    })
}
