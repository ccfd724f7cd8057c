//! In-place resize of pods (pod-lifecycle.md §16): a loop decides on pending resizes, one after the other; the worker of a pod carries an
//! accepted one out.

use std::sync::Arc;
use std::time::Duration;

use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::resize::report::summary;
use keelson_pod_sync_core::resize::{
    PendingPod, PendingReason, ResizeRecord, infeasible, plan, sort_pending,
};

use crate::effects::{Effects, resize};
use crate::error::SyncError;
use crate::node::huge_page_sizes;
use crate::publish::objects::{pod_name, pod_object};
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;
use crate::state::registry::Pending;
use crate::state::resize_queue::ResizeTrigger;
use crate::turn::decide::publish_decision;
use crate::turn::node_inputs::machine_inputs;

/// When pending resizes are first decided on again without a trigger.
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// When they are decided on again if nothing is deferred.
const RETRY: Duration = Duration::from_secs(180);
/// When they are decided on again if one is deferred: resources of the node become free for reasons that nobody tells of.
const DEFERRED_RETRY: Duration = Duration::from_secs(5);
/// When they are decided on again if resource-manager does not answer, or the runtime has not been read.
const UNAVAILABLE_RETRY: Duration = Duration::from_secs(1);

/// Decides on pending resizes until the shutdown.
pub async fn follow(effects: Arc<Effects>) {
    let queue = &effects.registry.resizes;
    let mut wait = FIRST_RETRY;
    loop {
        // Cancel-safe: a change is kept.
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return,
            () = queue.changed() => {}
            () = tokio::time::sleep(wait) => queue.trigger(ResizeTrigger::Periodic),
        }
        if let Some(trigger) = queue.take() {
            wait = decide_pending(&effects, trigger).await;
        }
    }
}

/// Decides on every pending resize in order. Returns when to do it again.
async fn decide_pending(effects: &Arc<Effects>, trigger: ResizeTrigger) -> Duration {
    let mut desired = std::collections::BTreeMap::new();
    let mut pending: Vec<PendingPod<_>> = Vec::new();
    let (undecided, some_are_unread) = effects.registry.pending_resizes();
    for (pod, sent) in undecided {
        desired.insert(pod.uid.clone(), sent);
        pending.push(pod);
    }
    sort_pending(&mut pending);
    let mut wait = if some_are_unread { UNAVAILABLE_RETRY } else { RETRY };
    for pod in pending {
        let Some(sent) = desired.remove(&pod.uid) else { continue };
        let pending = (pod, sent);
        match judge(effects, &pending.0, &pending.1).await {
            Ok(Ok(())) => accept(effects, &pending, trigger),
            Ok(Err(denial)) => {
                if denial.reason == PendingReason::Deferred {
                    wait = wait.min(DEFERRED_RETRY);
                }
                deny(effects, &pending, &denial);
            }
            Err(error) => {
                let cause = Cause::waiting("NoAnswer", &error.message, "resource-manager");
                effects.registry.set_step(&pending.0.uid, StepName::Resize, "", cause);
                return UNAVAILABLE_RETRY;
            }
        }
    }
    wait
}

/// Why a resize is not accepted.
#[derive(Debug)]
struct ResizeDenial {
    reason: PendingReason,
    message: String,
    /// The label of the metric, for one that is infeasible.
    detail: &'static str,
}

/// Whether a pod can have the resources that its source asks for.
async fn judge(
    effects: &Effects,
    pod: &PendingPod<Arc<keelson_kube_model::Pod>>,
    sent: &DesiredPod,
) -> Result<Result<(), ResizeDenial>, SyncError> {
    effects.registry.node.await_machine().await?;
    let machine = effects.registry.node.machine.borrow().clone();
    let sizes = huge_page_sizes(&machine);
    let inputs = machine_inputs(effects, &machine, &sizes);
    if let Some(message) = infeasible(&pod.allocated, &pod.wanted, &inputs) {
        let detail = "unsupported_change";
        return Ok(Err(ResizeDenial { reason: PendingReason::Infeasible, message, detail }));
    }
    Ok(resize::ask(effects, sent, &pod.wanted).await?.map_err(|rejected| {
        let reason = if rejected.passing { PendingReason::Deferred } else { PendingReason::Infeasible };
        ResizeDenial { reason, message: rejected.message, detail: "insufficient_node_allocatable" }
    }))
}

fn accept(effects: &Arc<Effects>, (pod, _): &Pending, trigger: ResizeTrigger) {
    let Some(was_deferred) = effects.registry.accept_resize(&pod.uid, &pod.wanted) else { return };
    tracing::info!(pod = pod_name(&pod.wanted), uid = pod.uid, "resizing a pod");
    if was_deferred {
        effects.publisher.metrics.resizes.deferred_accepted(trigger);
    }
    let text = summary(&pod.wanted, pod.wanted.metadata.generation, "");
    let object = pod_object(&pod.wanted);
    effects.context.events.normal(object, "ResizeStarted", format!("Pod resize started: {text}"));
    let working = Cause::working("pod-sync", "the new resources are being written");
    effects.registry.set_step(&pod.uid, StepName::Resize, "", working);
    publish_decision(effects, &pod.uid);
}

fn deny(effects: &Arc<Effects>, (pod, _): &Pending, denial: &ResizeDenial) {
    let ResizeDenial { reason, message, detail } = denial;
    let is_new = effects.registry.deny_resize(&pod.uid, &pod.wanted, *reason, message);
    let Some(is_new) = is_new else { return };
    let (event, word, cause) = match reason {
        PendingReason::Deferred => {
            ("ResizeDeferred", "deferred", Cause::waiting("Deferred", message, "resource-manager"))
        }
        PendingReason::Infeasible => {
            ("ResizeInfeasible", "infeasible", Cause::failed("Infeasible", message, YOU))
        }
    };
    effects.registry.set_step(&pod.uid, StepName::Resize, "", cause);
    if is_new {
        tracing::warn!(
            pod = pod_name(&pod.wanted),
            uid = pod.uid,
            "the resize of a pod is {word}: {message}"
        );
        if *reason == PendingReason::Infeasible {
            effects.publisher.metrics.resizes.infeasible(detail);
        }
        let text = summary(&pod.wanted, pod.wanted.metadata.generation, message);
        effects.context.events.warning(pod_object(&pod.wanted), event, format!("Pod resize {word}: {text}"));
    }
    publish_decision(effects, &pod.uid);
}

/// What came of an attempt to carry out a resize.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Carried {
    /// There is none, or it waits for containers that restart.
    Nothing,
    /// Something has changed: the pod has to be read again.
    Changed,
}

/// Carries out the accepted resize of a pod, if there is one. It can be repeated: what was written is recorded after each step.
///
/// # Errors
/// The first step that failed. The status, an event and the steps of the pod say why.
pub(super) async fn carry_out(
    effects: &Arc<Effects>,
    desired: &DesiredPod,
    observed: &Observed,
) -> Result<Carried, SyncError> {
    let uid = &desired.pod.metadata.uid;
    let record = effects.registry.read(uid, |state| state.admission.resize.clone()).unwrap_or_default();
    if record.in_progress.is_none() {
        return Ok(Carried::Nothing);
    }
    let result = write_resources(effects, desired, observed, &record).await;
    if let Err(error) = &result {
        report_error(effects, desired, error);
    }
    result
}

/// Writes the resources in the safe order: what grows in the cgroup of the pod, the containers, what shrinks in the cgroup.
async fn write_resources(
    effects: &Arc<Effects>,
    desired: &DesiredPod,
    observed: &Observed,
    record: &ResizeRecord,
) -> Result<Carried, SyncError> {
    let (registry, pod) = (&effects.registry, &desired.pod);
    let (uid, allocated) = (&pod.metadata.uid, Allocation::of(pod));
    registry.node.await_machine().await?;
    let machine = registry.node.machine.borrow().clone();
    let sizes = huge_page_sizes(&machine);
    let inputs = machine_inputs(effects, &machine, &sizes);
    let cgroup = |actuated| registry.desired_state.cgroup_of(pod, actuated);
    let plan = plan(pod, record, observed);
    if !plan.is_empty() {
        if let Some(sandbox) = observed.ready_sandbox() {
            resize::announce(effects, sandbox.id.as_str(), pod, &inputs).await?;
        }
        resize::cgroup(effects, desired, cgroup(record.actuated.as_ref())).await?;
    }
    for update in &plan.updates {
        registry.begin_update(uid, &update.name);
        resize::update_container(effects, update, &inputs).await?;
        tracing::info!(
            pod = pod_name(pod),
            container = update.name,
            resource = update.resource,
            "updated the resources of a container"
        );
        if !registry.record_actuated(uid, &allocated, &update.name, &update.pod) {
            return Ok(Carried::Changed);
        }
    }
    if !plan.restart.is_empty() {
        return Ok(Carried::Nothing);
    }
    if !registry.settle_resize(uid, &allocated) {
        return Ok(Carried::Changed);
    }
    resize::cgroup(effects, desired, cgroup(None)).await?;
    if let Some(done) = registry.complete_resize(uid, &allocated) {
        let took = registry.moment().now_unix_nanos.saturating_sub(done.since_unix_nanos);
        effects.publisher.metrics.resizes.completed(took);
        let text = summary(pod, done.generation, "");
        let text = format!("Pod resize completed: {text}");
        effects.context.events.normal(pod_object(pod), "ResizeCompleted", text);
        tracing::info!(pod = pod_name(pod), uid, "resized a pod");
        registry.update_steps(uid, |steps, _| steps.clear(StepName::Resize, ""));
        registry.resizes.trigger(ResizeTrigger::PodResized);
    }
    Ok(Carried::Changed)
}

/// A resize that fails is retried. A service that does not answer is no error of the pod.
fn report_error(effects: &Arc<Effects>, desired: &DesiredPod, error: &SyncError) {
    let uid = &desired.pod.metadata.uid;
    let cause = if error.peer_unavailable {
        Cause::waiting("NoAnswer", &error.message, "pod-sync")
    } else {
        Cause::failed("Error", &error.message, YOU)
    };
    effects.registry.set_step(uid, StepName::Resize, "", cause);
    if error.peer_unavailable {
        return;
    }
    if let Some(resize) = effects.registry.fail_resize(uid, &error.message) {
        let took = effects.registry.moment().now_unix_nanos.saturating_sub(resize.since_unix_nanos);
        effects.publisher.metrics.resizes.failed(took);
        let text = summary(&desired.pod, resize.generation, &error.message);
        let text = format!("Pod resize error: {text}");
        effects.context.events.warning(pod_object(&desired.pod), "ResizeError", text);
        publish_decision(effects, uid);
    }
}
