//! Is the sandbox good, and what follows when it is not (§9.2, §9.3)?

use keelson_kube_model::{Container, Pod, RestartPolicy, SandboxId};

use super::{Inputs, Pick, PodActions, SandboxPlan, only_kill, something_to_kill};
use crate::observation::PodObservation;
use crate::reason::Reason;
use crate::restart::{ContainerKind, exit_allows_restart};

/// What becomes of the pod's sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxDecision {
    /// The newest one is good.
    Keep,
    /// A new one is needed.
    Create {
        /// CRI `metadata.attempt` of the new one.
        attempt: u32,
        /// The one it takes the place of.
        replaces: Option<SandboxId>,
        /// Why it is needed.
        reason: Reason,
    },
}

/// Decides about the sandbox; the first condition that holds wins.
///
/// The condition `PodReadyToStartContainers` is true exactly when this says [`SandboxDecision::Keep`].
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

/// What is done when a sandbox is needed: often one is made, sometimes the pod has had its run.
pub(super) fn create<'a>(inputs: &Inputs<'a>, plan: SandboxPlan) -> (PodActions, Vec<Pick<'a>>) {
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
    let picks = match pod.spec.init_containers.first() {
        Some(first) => vec![Pick { kind: ContainerKind::of_init(first), container: first, reason }],
        None => to_start
            .into_iter()
            .map(|container| Pick { kind: ContainerKind::Regular, container, reason })
            .collect(),
    };
    let actions = PodActions {
        kill_pod: something_to_kill(observed).then_some(reason),
        create_sandbox: Some(plan),
        ..PodActions::default()
    };
    (actions, picks)
}

/// The container has ended and may not start again, by its rules and policies.
///
/// Parity: upstream asks only whether it ended with 0 under `OnFailure`, so a container that is never to start again
/// in a pod that always is would run once more with each sandbox.
fn ended_for_good(inputs: &Inputs<'_>, container: &Container) -> bool {
    inputs.observed.current(&container.name).is_some_and(|record| {
        record.has_exited() && !exit_allows_restart(inputs.pod, container, record.exit_code)
    })
}
