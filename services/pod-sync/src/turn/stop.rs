//! Ending a pod (architecture §4, "To gone"): hooks, StopContainer, StopPodSandbox, a fresh read, volumes, cgroup. Every step is
//! idempotent; a restarted service continues at the first unfinished one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use k8s_cri::v1 as cri;
use keelson_kube_model::Pod;
use keelson_pod_sync_core::actions::{PodActions, ResetContainer};
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::moment::SECOND;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::termination::{
    MIN_STOP_TIMEOUT_SECONDS, StopStep, orphan_grace_seconds, stop_plan, stop_timeout_seconds,
};
use keelson_pod_sync_core::worker::SyncOutcome;
use keelson_service_kit::{ObjectRef, now_unix_nanos};
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::effects::clients::{bounded, ok_if_gone};
use crate::effects::hooks::Subject;
use crate::effects::{Effects, cgroup, hooks, volumes};
use crate::error::SyncError;
use crate::publish::StatusFacts;
use crate::publish::objects::{named_container_object, pod_name, pod_object};
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;
use crate::turn::permit::run_in_turn;
use crate::turn::{Job, TurnEnd};

/// How long the unmount may take before the pod is read from the runtime again.
const READ_AGAIN: Duration = Duration::from_secs(2);
/// How long the stop of a sandbox holds its permit. A network plugin that hangs delays the others by no more than that.
const SANDBOX_HOLD_LIMIT: Duration = Duration::from_secs(1);

/// Stops the containers and sandboxes of a pod, or of an orphan.
///
/// # Errors
/// Something could not be stopped, or still runs.
pub async fn terminate(effects: &Arc<Effects>, job: &Job) -> Result<TurnEnd, SyncError> {
    let pod = job.desired.as_ref().map(|w| Arc::clone(&w.pod));
    if job.desired.is_some() {
        // The runtime must not start anything for the pod any more.
        effects.registry.update_desired_state(&job.uid);
        effects.publisher.republish(&job.uid);
        // Liveness and startup probes end; readiness probes continue.
        effects.registry.with(&job.uid, |state| state.probes.wake());
    }
    let why = job.worker.cause.map_or("ending", |c| c.as_str());
    effects.registry.set_step(&job.uid, StepName::Termination, "", Cause::working("pod-sync", why));
    let observed = match effects.read_pod(&job.uid).await {
        Ok(observed) => observed,
        Err(error) => {
            let cause = Cause::waiting("RuntimeNotReady", &error.message, "runtime-shim");
            effects.registry.set_step(&job.uid, StepName::Termination, "", cause);
            return Err(error);
        }
    };
    tracing::debug!(
        uid = job.uid,
        why,
        sandboxes = observed.sandboxes.len(),
        containers = observed.containers.len(),
        running = observed.anything_running(),
        "ending a pod"
    );
    effects.publisher.publish(&job.uid, &StatusFacts::default());
    let deadline = deadline_of(job, pod.as_deref(), &observed);
    // More than the granted time can be left only if the clock was set back.
    let left = seconds_until(deadline).min(job.worker.grace_seconds.unwrap_or(i64::MAX));
    let traceparent = job.desired.as_ref().map(|w| w.traceparent.clone()).unwrap_or_default();
    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "stop pod", uid = job.uid);
    keelson_telemetry::set_parent(&span, &traceparent);
    let granted = job.worker.grace_seconds.unwrap_or_else(|| granted_by_spec(pod.as_deref(), &observed));
    let grace = Grace { granted, left };
    let stopping = stop_pod(effects, job, pod.as_ref(), &observed, grace).instrument(span);
    // Cancel-safe: the next stop, with less grace, finds what still runs.
    tokio::select! {
        () = job.cancel.cancelled() => return Ok(TurnEnd::of(SyncOutcome::Cancelled)),
        stopped = stopping => stopped?,
    }
    let observed = effects.read_pod(&job.uid).await?;
    if observed.anything_running() || observed.any_sandbox_ready() {
        return Err(SyncError {
            peer_unavailable: true,
            ..SyncError::new("the runtime still shows running processes")
        });
    }
    effects.registry.with(&job.uid, |state| state.probes.end());
    effects.publisher.publish(&job.uid, &StatusFacts { pod_is_terminal: true, ..StatusFacts::default() });
    Ok(TurnEnd::of(SyncOutcome::Done))
}

/// The grace period of a pod that ends, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    /// The whole period; 0 kills at once.
    pub granted: i64,
    /// The rest of it.
    pub left: i64,
}

impl Grace {
    /// A period that begins now.
    pub const fn full(seconds: i64) -> Self {
        Self { granted: seconds, left: seconds }
    }
}

fn granted_by_spec(pod: Option<&Pod>, observed: &PodObservation) -> i64 {
    pod.map_or_else(|| orphan_grace_seconds(observed), Pod::termination_grace)
}

/// When the grace period ends, unix nanoseconds. What is left of a pod that ended by itself gets the period of its spec.
fn deadline_of(job: &Job, pod: Option<&Pod>, observed: &PodObservation) -> i64 {
    job.worker.kill_deadline_unix_nanos.unwrap_or_else(|| {
        let grace = granted_by_spec(pod, observed);
        let since = job.worker.terminating_since_unix_nanos.unwrap_or_else(now_unix_nanos);
        since.saturating_add(grace.saturating_mul(SECOND))
    })
}

/// Whole seconds until a moment, rounded up; 0 when it has passed.
fn seconds_until(deadline_unix_nanos: i64) -> i64 {
    let left = deadline_unix_nanos.saturating_sub(now_unix_nanos());
    if left <= 0 { 0 } else { (left + SECOND - 1) / SECOND }
}

/// Stops every running container in order, then every sandbox.
pub async fn stop_pod(
    effects: &Arc<Effects>,
    job: &Job,
    pod: Option<&Arc<Pod>>,
    observed: &Observed,
    grace: Grace,
) -> Result<(), SyncError> {
    let deadline = now_unix_nanos().saturating_add(grace.left.saturating_mul(SECOND));
    let steps = stop_plan(pod.map(Arc::as_ref), observed);
    // One flag per container: those that stop after it wait for the flag.
    let ended: BTreeMap<String, watch::Sender<bool>> =
        steps.iter().map(|s| (s.name.clone(), watch::Sender::new(false))).collect();
    let stops =
        steps.iter().map(|step| stop_step(effects, job, pod, step, (grace.granted, deadline), &ended));
    let failed: Vec<SyncError> = join_all(stops).await.into_iter().filter_map(Result::err).collect();
    if let Some(error) = failed.into_iter().next() {
        if let Some(pod) = pod {
            let text = format!("error killing pod: {}", error.message);
            effects.context.events.warning(pod_object(pod), "FailedKillPod", text);
        }
        return Err(error);
    }
    // Sandboxes that are not ready too: their network may still exist.
    let sandboxes = observed.sandboxes.iter().map(|s| stop_sandbox(effects, s.id.as_str()));
    try_join_all(sandboxes).await.map(|_| ())
}

async fn stop_step(
    effects: &Arc<Effects>,
    job: &Job,
    pod: Option<&Arc<Pod>>,
    step: &StopStep,
    (granted, deadline): (i64, i64),
    ended: &BTreeMap<String, watch::Sender<bool>>,
) -> Result<(), SyncError> {
    if let Some(pod) = pod {
        let object =
            pod_object(pod).container(step.kind.map_or("containers", |k| k.spec_field()), &step.name);
        effects.context.events.normal(object.clone(), "Killing", format!("Stopping container {}", step.name));
        pre_stop(effects, pod, (step.id.as_str(), &step.name), object, deadline).await;
    }
    for name in &step.after {
        let Some(flag) = ended.get(name) else { continue };
        let left = Duration::from_secs(u64::try_from(seconds_until(deadline)).unwrap_or(0));
        let mut flag = flag.subscribe();
        let _ = tokio::time::timeout(left, flag.wait_for(|ended| *ended)).await;
    }
    let timeout = stop_timeout_seconds(granted, seconds_until(deadline));
    let result = stop_container(effects, step.id.as_str(), timeout).await;
    if let Some(flag) = ended.get(&step.name) {
        flag.send_replace(true);
    }
    if result.is_ok() {
        tracing::info!(uid = job.uid, container = step.name, id = %step.id, timeout_s = timeout, "stopped");
    }
    result
}

/// The container's preStop hook, within what is left of the grace.
async fn pre_stop(effects: &Effects, pod: &Pod, (id, name): (&str, &str), object: ObjectRef, deadline: i64) {
    let left = seconds_until(deadline);
    let Some((_, container)) = pod.container(name) else { return };
    let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()).filter(|_| left > 0)
    else {
        return;
    };
    let bound = Duration::from_secs(u64::try_from(left).unwrap_or(0));
    let subject = Subject { pod, container, id };
    let outcome = tokio::time::timeout(bound, hooks::run(effects, &subject, hook, bound)).await;
    if let Ok(Err(text)) = outcome {
        tracing::warn!(
            pod = pod_name(pod),
            container = name,
            error = text,
            "the preStop hook of a container failed"
        );
        // The event does not contain the hook's output (pod-lifecycle.md §9.10).
        effects.context.events.warning(object, "FailedPreStopHook", "PreStopHook failed");
    }
}

/// Stops one container of a pod that continues: event, preStop hook, StopContainer.
pub async fn stop_container_with_hooks(
    effects: &Arc<Effects>,
    job: &Job,
    pod: &Pod,
    id: &str,
    name: &str,
    grace_seconds: i64,
    message: &str,
) -> Result<(), SyncError> {
    let object = named_container_object(pod, name);
    effects.context.events.normal(object.clone(), "Killing", message.to_owned());
    let deadline = now_unix_nanos().saturating_add(grace_seconds.saturating_mul(SECOND));
    pre_stop(effects, pod, (id, name), object, deadline).await;
    stop_container(effects, id, stop_timeout_seconds(grace_seconds, seconds_until(deadline))).await?;
    tracing::info!(uid = job.uid, container = name, id, "stopped");
    Ok(())
}

/// Removes the containers of a pod whose containers all restart (pod-lifecycle.md §9.9): those that run are stopped first, without their
/// hooks, and those that have asked for the restart are removed last.
pub async fn reset_containers(
    effects: &Arc<Effects>,
    pod: &Pod,
    actions: &PodActions,
) -> Result<(), SyncError> {
    for last in [false, true] {
        let group = actions.reset.iter().filter(|one| one.last == last);
        try_join_all(group.map(|one| remove_container(effects, pod, one))).await?;
    }
    for (key, finished) in &actions.reset_backoff {
        effects.registry.backoff().advance(key, *finished, &effects.registry.moment());
    }
    Ok(())
}

async fn remove_container(effects: &Arc<Effects>, pod: &Pod, one: &ResetContainer) -> Result<(), SyncError> {
    if one.kill {
        let object = named_container_object(pod, &one.name);
        effects.context.events.normal(object, "Killing", format!("Stopping container {}", one.name));
        stop_container(effects, one.id.as_str(), MIN_STOP_TIMEOUT_SECONDS).await?;
    }
    let request = cri::RemoveContainerRequest { container_id: one.id.as_str().to_owned() };
    ok_if_gone(effects.clients.cri().remove_container(bounded(request, effects.clients.cri_timeout)).await)
        .map_err(|s| SyncError::from_status("cannot remove a container", &s))
}

async fn stop_container(effects: &Effects, id: &str, timeout_seconds: i64) -> Result<(), SyncError> {
    let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout: timeout_seconds };
    let bound =
        effects.clients.cri_timeout + Duration::from_secs(u64::try_from(timeout_seconds).unwrap_or(0));
    ok_if_gone(effects.clients.cri().stop_container(bounded(request, bound)).await)
        .map_err(|s| SyncError::from_status("cannot stop a container", &s))
}

/// Stops a sandbox when it is its turn. Without turns the runtime would work on all sandboxes at once, and the volumes of many pods that
/// end together would all be released only near the end.
async fn stop_sandbox(effects: &Effects, id: &str) -> Result<(), SyncError> {
    let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
    let mut runtime = effects.clients.cri();
    let stopping = runtime.stop_pod_sandbox(bounded(request, effects.clients.cri_timeout));
    ok_if_gone(run_in_turn(&effects.sandbox_stop_permits, SANDBOX_HOLD_LIMIT, stopping).await)
        .map_err(|s| SyncError::from_status("cannot stop the sandbox", &s))
}

/// Releases a pod of which nothing runs any more: volumes, then the cgroup, then the last status.
pub async fn clean(effects: &Arc<Effects>, job: &Job) -> Result<TurnEnd, SyncError> {
    let Some(desired) = &job.desired else { return Ok(TurnEnd::of(SyncOutcome::Done)) };
    let show = |what: &'static str, owner: &'static str| {
        effects.registry.set_step(&job.uid, StepName::Termination, "", Cause::waiting(what, what, owner));
    };
    show("volumes are being unmounted", "volume-manager");
    unmount(effects, job, desired).await?;
    show("the cgroup is being removed", "resource-manager");
    cgroup::release(effects, desired).await?;
    effects
        .publisher
        .publish(&job.uid, &StatusFacts { pod_is_terminal: true, finished: true, ..StatusFacts::default() });
    effects.registry.set_step(&job.uid, StepName::Termination, "", Cause::done("pod-sync"));
    tracing::info!(pod = pod_name(&desired.pod), uid = job.uid, "everything of a pod is released");
    Ok(TurnEnd::of(SyncOutcome::Done))
}

async fn unmount(effects: &Arc<Effects>, job: &Job, desired: &DesiredPod) -> Result<(), SyncError> {
    let unmounting = volumes::unmount(effects, desired);
    tokio::pin!(unmounting);
    loop {
        // Cancel-safe: `unmounting` is pinned outside and continues in the next round.
        tokio::select! {
            unmounted = &mut unmounting => return unmounted,
            () = tokio::time::sleep(READ_AGAIN) => end_latecomers(effects, job, desired).await?,
        }
    }
}

/// Ends what appears only now. The runtime may finish a sandbox although the call that asked for it was cut, as by the end of an earlier
/// pod-sync (architecture §4, "Calls that were cut"). volume-manager waits for its end, and nothing else would end it.
async fn end_latecomers(effects: &Arc<Effects>, job: &Job, desired: &DesiredPod) -> Result<(), SyncError> {
    // volume-manager waits for a runtime that does not answer, too.
    let Ok(observed) = effects.read_pod(&job.uid).await else { return Ok(()) };
    if !observed.anything_running() && !observed.any_sandbox_ready() {
        return Ok(());
    }
    tracing::warn!(
        pod = pod_name(&desired.pod),
        uid = job.uid,
        "something of the pod has appeared after its end; stopping it, too"
    );
    stop_pod(effects, job, Some(&desired.pod), &observed, Grace::full(0)).await
}
