//! Whether a pod may run here (pod-lifecycle.md §15). The core judges by spec and Node, resource-manager by the free resources of the machine.
//! A pod that runs already is admitted: its resources and ports are in use anyway.

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::Node;
use keelson_pod_sync_core::admission::{
    Denial, NodeFacts, after_fit, before_fit, supports_strict_groups, waits_for_admission,
};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::status::rejected_status;
use keelson_pod_sync_core::worker::SyncOutcome;
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::error::SyncError;
use crate::node::RuntimeView;
use crate::publish::StatusFacts;
use crate::publish::objects::{pod_name, pod_object};
use crate::state::pod_state::DesiredPod;
use crate::turn::{Job, TurnEnd};

/// The deadline of one call; it is made again while the answer is outstanding.
const CALL: Duration = Duration::from_secs(60);
/// How long a turn waits for the Node, which may still be on its way right after this service has started.
const NODE_TIMEOUT: Duration = Duration::from_secs(10);

fn facts<'a>(effects: &'a Effects, node: &'a Node) -> NodeFacts<'a> {
    let runtime: RuntimeView = effects.registry.node.runtime.borrow().clone();
    let reported = node.status.features.as_ref().and_then(|features| features.supplemental_groups_policy);
    NodeFacts {
        node,
        node_name: &effects.context.config.node_name,
        unsafe_sysctls: &effects.context.config.pods.allowed_unsafe_sysctls,
        kernel: effects.registry.node.host.kernel,
        strict_groups: reported.unwrap_or_else(|| supports_strict_groups(&runtime.name, &runtime.version)),
        apparmor: effects.registry.node.host.apparmor,
        source_limits: &effects.context.config.pods.source_limits,
        agent_ids: &effects.registry.node.host.agent_ids,
        run_dir: &effects.context.config.paths.run_dir,
    }
}

async fn await_node(effects: &Effects, uid: &str) -> Result<Arc<Node>, SyncError> {
    let mut node = effects.registry.node.object.subscribe();
    let known = tokio::time::timeout(NODE_TIMEOUT, node.wait_for(Option::is_some)).await;
    if let Ok(Ok(node)) = known
        && let Some(node) = &*node
    {
        return Ok(Arc::clone(node));
    }
    let text = "pod-config has not sent the Node yet";
    effects.registry.set_step(uid, StepName::Admission, "", Cause::waiting("NoNode", text, "pod-config"));
    Err(SyncError { peer_unavailable: true, ..SyncError::new(text) })
}

/// When a pod that waits for admission is judged again although no other pod has ended, in nanoseconds.
const HOLD_RETRY_NANOS: i64 = 5_000_000_000;

/// Asks whether the pod may run. If it may not, returns how the turn ends.
///
/// # Errors
/// The Node is not known, or resource-manager does not answer yet.
pub async fn admit(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
) -> Result<Option<TurnEnd>, SyncError> {
    let known =
        effects.registry.read(&job.uid, |e| (e.admission.admitted, e.runtime.observed.any_sandbox_ready()));
    let adopted = match known {
        Some((true, _)) => return Ok(None),
        Some((false, adopted)) => adopted,
        None => false,
    };
    let node = if adopted { None } else { Some(await_node(effects, &job.uid).await?) };
    if let Some(denial) = node.as_ref().and_then(|node| before_fit(&desired.pod, &facts(effects, node))) {
        return Ok(Some(reject(effects, job, desired, denial.reason, &denial.message)));
    }
    // A pod that has to wait for a port must not take resources of the machine meanwhile.
    if waits_for_admission(&desired.pod)
        && let Some(node) = &node
        && let Some(denial) = effects
            .registry
            .check_admission(&job.uid, |others| after_fit(&desired.pod, &facts(effects, node), others))
        && denial.is_temporary
    {
        return Ok(Some(hold_for_another(effects, job, desired, &denial).await));
    }
    match verdict(effects, job, desired).await? {
        Verdict::Admitted(_) => {
            let denial = effects.registry.admit_pod(&job.uid, &desired.pod, |others| -> Option<Denial> {
                node.as_ref().and_then(|node| after_fit(&desired.pod, &facts(effects, node), others))
            });
            if let Some(denial) = denial {
                if denial.is_temporary && waits_for_admission(&desired.pod) {
                    return Ok(Some(hold_for_another(effects, job, desired, &denial).await));
                }
                return Ok(Some(reject(effects, job, desired, denial.reason, &denial.message)));
            }
            effects.registry.set_step(&job.uid, StepName::Admission, "", Cause::done("resource-manager"));
            if effects.registry.with(&job.uid, |state| state.admission.hold.take()).flatten().is_some() {
                effects.publisher.publish(&job.uid, &StatusFacts::default());
            }
            Ok(None)
        }
        Verdict::Rejected(rejected) if rejected.passing && waits_for_admission(&desired.pod) => {
            Ok(Some(hold(effects, job, desired, &rejected.reason, &rejected.message)))
        }
        Verdict::Rejected(rejected) => {
            Ok(Some(reject(effects, job, desired, &rejected.reason, &rejected.message)))
        }
        Verdict::NotYet(wait) => {
            let cause = Cause::waiting(wait.reason.clone(), &wait.message, "resource-manager");
            effects.registry.set_step(&job.uid, StepName::Admission, "", cause);
            Err(SyncError { peer_unavailable: true, ..SyncError::new(wait.message) })
        }
    }
}

async fn verdict(effects: &Effects, job: &Job, desired: &DesiredPod) -> Result<Verdict, SyncError> {
    let request = resource::AdmitPodRequest { uid: job.uid.clone(), revision: desired.revision };
    match effects.clients.resources().admit_pod(bounded(request, CALL)).await {
        Ok(response) => {
            let verdict = response.into_inner().verdict;
            verdict.ok_or_else(|| SyncError::new("resource-manager returned no verdict"))
        }
        Err(status) => {
            let error = SyncError::from_status("cannot ask for admission", &status);
            let cause = Cause::waiting("NoAnswer", &error.message, "resource-manager");
            effects.registry.set_step(&job.uid, StepName::Admission, "", cause);
            Err(error)
        }
    }
}

/// Like [`hold`], for a reason that resource-manager does not know. The call lets it free the resources that it keeps for the pod.
async fn hold_for_another(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
    denial: &Denial,
) -> TurnEnd {
    let turn = hold(effects, job, desired, denial.reason, &denial.message);
    let request = resource::DeferPodRequest { uid: job.uid.clone(), revision: desired.revision };
    if let Err(status) = effects.clients.resources().defer_pod(bounded(request, CALL)).await {
        let error = status.message();
        tracing::debug!(
            uid = job.uid,
            error,
            "cannot tell resource-manager that the pod waits; the next turn tells it"
        );
    }
    turn
}

/// The pod stays Pending, and its status says why. It is judged again when another pod has ended, and from time to time, since the free
/// resources of the machine change for other reasons, too.
fn hold(effects: &Arc<Effects>, job: &Job, desired: &DesiredPod, reason: &str, message: &str) -> TurnEnd {
    let pod = &desired.pod;
    let owner = match reason {
        "NodePorts" => "pod-sync",
        // A drain is undone by an operator.
        "NodeDrained" => YOU,
        _ => "resource-manager",
    };
    let cause = Cause::waiting(reason.to_owned(), message, owner);
    let is_new = effects.registry.with(&job.uid, |state| state.admission.wait(reason, message));
    let next = keelson_service_kit::now_unix_nanos() + HOLD_RETRY_NANOS;
    effects.registry.set_step(&job.uid, StepName::Admission, "", cause.retried_at(next));
    if is_new == Some(true) {
        tracing::warn!(pod = pod_name(pod), reason, "the pod waits for admission: {message}");
        effects.context.events.warning(pod_object(pod), reason, message.to_owned());
    }
    effects.publisher.publish(&job.uid, &StatusFacts::default());
    TurnEnd { outcome: SyncOutcome::Done, next_unix_nanos: Some(next) }
}

/// Rejects a pod for good: its phase is `Failed`.
pub(super) fn reject(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
    reason: &str,
    message: &str,
) -> TurnEnd {
    let pod = &desired.pod;
    tracing::warn!(pod = pod_name(pod), reason, "the pod is rejected: {message}");
    effects.publisher.metrics.rejected(reason);
    effects.context.events.warning(pod_object(pod), reason, message.to_owned());
    effects.registry.set_step(
        &job.uid,
        StepName::Admission,
        "",
        Cause::failed(reason.to_owned(), message, YOU),
    );
    effects
        .publisher
        .publish_rejection(&job.uid, rejected_status(pod, reason, message, &effects.registry.moment()));
    TurnEnd::of(SyncOutcome::Terminal)
}
