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
use keelson_pod_sync_core::worker::WorkerPhase;

use crate::effects::resize::Answer;
use crate::effects::{Effects, resize};
use crate::error::SyncError;
use crate::node::huge_page_sizes;
use crate::publish::objects::{pod_name, pod_object};
use crate::state::observed::Observed;
use crate::state::pod_state::{DesiredPod, PodState};
use crate::state::registry::Pending;
use crate::state::resize_queue::ResizeTrigger;
use crate::turn::Job;
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
            Ok(Judged::Accepted) => {
                if !accept(effects, &pending, trigger) {
                    wait = wait.min(UNAVAILABLE_RETRY);
                }
            }
            Ok(Judged::Denied(denial)) => {
                if denial.reason == PendingReason::Deferred {
                    wait = wait.min(DEFERRED_RETRY);
                }
                deny(effects, &pending, &denial);
            }
            Ok(Judged::NotYet(message)) => {
                wait = wait.min(UNAVAILABLE_RETRY);
                show_undecided(effects, &pending, &message);
            }
            Err(error) => {
                show_undecided(effects, &pending, &error.message);
                return UNAVAILABLE_RETRY;
            }
        }
    }
    wait
}

fn show_undecided(effects: &Effects, (pod, _): &Pending, message: &str) {
    let cause = Cause::waiting("NoAnswer", message, "resource-manager");
    show(effects, &pod.uid, cause);
}

/// Sets the step of a resize, unless the resize is over meanwhile or its pod ends.
fn show(effects: &Effects, uid: &str, cause: Cause) {
    let at = effects.registry.moment();
    effects.registry.with(uid, |state| {
        let record = &state.admission;
        let is_wanted = record.wanted.is_some() || record.resize.in_progress.is_some();
        if is_wanted && state.worker.phase == WorkerPhase::Sync {
            state.steps.set(StepName::Resize, "", cause, &at);
        }
    });
}

/// What is known of a pending resize.
#[derive(Debug)]
enum Judged {
    /// The pod can have the resources.
    Accepted,
    /// It cannot, now or ever.
    Denied(ResizeDenial),
    /// This pod is not decided on yet, for this reason.
    NotYet(String),
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
///
/// # Errors
/// resource-manager does not answer.
async fn judge(
    effects: &Effects,
    pod: &PendingPod<Arc<keelson_kube_model::Pod>>,
    sent: &DesiredPod,
) -> Result<Judged, SyncError> {
    effects.registry.node.await_machine().await?;
    let machine = effects.registry.node.machine.borrow().clone();
    let sizes = huge_page_sizes(&machine);
    let inputs = machine_inputs(effects, &machine, &sizes);
    if let Some(message) = infeasible(&pod.allocated, &pod.wanted, &inputs) {
        let detail = "unsupported_change";
        return Ok(Judged::Denied(ResizeDenial { reason: PendingReason::Infeasible, message, detail }));
    }
    Ok(match resize::ask(effects, sent, &pod.wanted).await? {
        Answer::Accepted => Judged::Accepted,
        Answer::Rejected(rejected) => {
            let reason = if rejected.passing { PendingReason::Deferred } else { PendingReason::Infeasible };
            let (message, detail) = (rejected.message, "insufficient_node_allocatable");
            Judged::Denied(ResizeDenial { reason, message, detail })
        }
        Answer::NotYet(message) => Judged::NotYet(message),
    })
}

/// Returns whether the pod is still the one that was decided on.
fn accept(effects: &Arc<Effects>, (pod, sent): &Pending, trigger: ResizeTrigger) -> bool {
    let accepted = effects.registry.accept_resize(&pod.uid, &pod.wanted, sent.revision);
    let Some(was_deferred) = accepted else { return false };
    tracing::info!(pod = pod_name(&pod.wanted), uid = pod.uid, "resizing a pod");
    if was_deferred {
        effects.publisher.metrics.resizes.deferred_accepted(trigger);
    }
    let text = summary(&pod.wanted, pod.wanted.metadata.generation, "");
    let object = pod_object(&pod.wanted);
    effects.context.events.normal(object, "ResizeStarted", format!("Pod resize started: {text}"));
    let working = Cause::working("pod-sync", "the new resources are being written");
    show(effects, &pod.uid, working);
    publish_decision(effects, &pod.uid);
    true
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
    show(effects, &pod.uid, cause);
}

/// What came of an attempt to carry out a resize.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Carried {
    /// There is none, or it waits for containers that restart.
    Nothing,
    /// Something has changed: the pod has to be read again.
    Changed,
}

/// Carries out the accepted resize of a pod, if there is one. It can be repeated: what was written is recorded after each step. It ends
/// early when the turn is cancelled, or when the pod is resized again.
///
/// # Errors
/// The first step that failed. The status, an event and the steps of the pod say why.
pub(super) async fn carry_out(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
    observed: &Observed,
) -> Result<Carried, SyncError> {
    let uid = &desired.pod.metadata.uid;
    // A pod that waits for its admission has neither cgroup nor containers.
    let in_progress = |state: &PodState| {
        let runs = state.admission.admitted || observed.any_sandbox_ready();
        runs.then(|| state.admission.resize.clone()).filter(|record| record.in_progress.is_some())
    };
    let Some(record) = effects.registry.read(uid, in_progress).flatten() else {
        return Ok(Carried::Nothing);
    };
    // Cancel-safe: each call can be repeated, and what was begun is recorded.
    let result = tokio::select! {
        biased;
        () = job.cancel.cancelled() => return Ok(Carried::Nothing),
        () = until_resized_again(effects, desired) => return Ok(Carried::Changed),
        result = write_resources(effects, desired, observed, &record) => result,
    };
    if let Err(error) = &result {
        report_error(effects, desired, error);
    }
    result
}

/// Waits until the pod is allocated other resources: what is being written for it will not come about any more. Cancel-safe.
async fn until_resized_again(effects: &Effects, desired: &DesiredPod) {
    let (uid, allocated) = (&desired.pod.metadata.uid, Allocation::of(&desired.pod));
    let mut accepted = effects.registry.resizes.watch_accepted();
    loop {
        accepted.mark_unchanged();
        let is_same = |state: &PodState| state.admission.allocation.as_ref() == Some(&allocated);
        if effects.registry.read(uid, is_same) != Some(true) {
            return;
        }
        if accepted.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
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
    show(effects, uid, cause);
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
