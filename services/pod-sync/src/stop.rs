//! Ending a pod (architecture §4, "To gone"): hooks, StopContainer, StopPodSandbox, a fresh look, unmount,
//! cgroup. Every step is idempotent; a restarted service goes on at the first unfinished one.

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
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_service_kit::{ObjectRef, now_unix_nanos};
use tokio::sync::watch;
use tonic::{Code, Status};
use tracing::Instrument as _;

use crate::agent::{Agent, Wanted, object_of};
use crate::clients::bounded;
use crate::desires;
use crate::hooks::{self, Subject};
use crate::observed::Observed;
use crate::sync::{named_container_object, read};
use crate::worker::{Facts, Job, Trouble, Turn, name_of, note_wait, publish, republish};

/// How long one call asks whether something is released before it is made again.
const ASK: Duration = Duration::from_secs(60);
/// How long volumes may be in the way before it is looked at what the runtime has.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// Ends the processes of a pod, or of what only the runtime knows.
pub async fn terminate(agent: &Arc<Agent>, job: &Job) -> Result<Turn, Trouble> {
    let pod = job.wanted.as_ref().map(|w| Arc::clone(&w.pod));
    if job.wanted.is_some() {
        // The runtime is to begin nothing more for the pod.
        agent.with(&job.uid, |entry| desires::want(agent, entry));
        republish(agent, &job.uid);
        // What would restart a container is over; readiness goes on.
        agent.with(&job.uid, |entry| entry.probes.wake());
    }
    let why = job.state.cause.map_or("ending", |c| c.as_str());
    note_wait(agent, &job.uid, StepName::Termination, "", Cause::working("pod-sync", why));
    let observed = match read(agent, &job.uid).await {
        Ok(observed) => observed,
        Err(trouble) => {
            let cause = Cause::waiting("RuntimeNotReady", &trouble.message, "runtime-shim");
            note_wait(agent, &job.uid, StepName::Termination, "", cause);
            return Err(trouble);
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
    publish(agent, &job.uid, &Facts::default());
    let deadline = deadline_of(job, pod.as_deref(), &observed);
    // More than the whole grace is left only where the clock was set back.
    let left = seconds_until(deadline).min(job.state.grace_seconds.unwrap_or(i64::MAX));
    let traceparent = job.wanted.as_ref().map(|w| w.traceparent.clone()).unwrap_or_default();
    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "stop pod", uid = job.uid);
    keelson_telemetry::set_parent(&span, &traceparent);
    let granted = job.state.grace_seconds.unwrap_or_else(|| granted_by_spec(pod.as_deref(), &observed));
    let grace = Grace { granted, left };
    let stopping = stop_pod(agent, job, pod.as_ref(), &observed, grace).instrument(span);
    // Cancel-safe: a stop that is begun again with less grace finds what is still running.
    tokio::select! {
        () = job.cancel.cancelled() => return Ok(Turn::of(SyncOutcome::Cancelled)),
        stopped = stopping => stopped?,
    }
    let observed = read(agent, &job.uid).await?;
    if observed.anything_running() || observed.any_sandbox_ready() {
        return Err(Trouble {
            neighbour: true,
            ..Trouble::fault("the runtime still shows running processes")
        });
    }
    agent.with(&job.uid, |entry| entry.probes.end());
    publish(agent, &job.uid, &Facts { pod_is_terminal: true, ..Facts::default() });
    Ok(Turn::of(SyncOutcome::Done))
}

/// The grace of what ends, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    /// As it was at the beginning; zero kills at once.
    pub granted: i64,
    /// What is left of it.
    pub left: i64,
}

impl Grace {
    /// All of it is left.
    pub const fn whole(seconds: i64) -> Self {
        Self { granted: seconds, left: seconds }
    }
}

fn granted_by_spec(pod: Option<&Pod>, observed: &PodObservation) -> i64 {
    pod.map_or_else(|| orphan_grace_seconds(observed), Pod::termination_grace)
}

/// When the grace is used up. A pod that ended by itself has the grace of its spec for what is left of it.
fn deadline_of(job: &Job, pod: Option<&Pod>, observed: &PodObservation) -> i64 {
    job.state.kill_deadline_unix_nanos.unwrap_or_else(|| {
        let grace = granted_by_spec(pod, observed);
        let since = job.state.terminating_since_unix_nanos.unwrap_or_else(now_unix_nanos);
        since.saturating_add(grace.saturating_mul(SECOND))
    })
}

/// Whole seconds until a moment, rounded up; 0 when it has passed.
fn seconds_until(deadline_unix_nanos: i64) -> i64 {
    let left = deadline_unix_nanos.saturating_sub(now_unix_nanos());
    if left <= 0 { 0 } else { (left + SECOND - 1) / SECOND }
}

/// Stops every running container in its order, then every sandbox.
pub async fn stop_pod(
    agent: &Arc<Agent>,
    job: &Job,
    pod: Option<&Arc<Pod>>,
    observed: &Observed,
    grace: Grace,
) -> Result<(), Trouble> {
    let deadline = now_unix_nanos().saturating_add(grace.left.saturating_mul(SECOND));
    let steps = stop_plan(pod.map(Arc::as_ref), observed);
    // One flag per container name: whoever comes after it waits for that.
    let ended: BTreeMap<String, watch::Sender<bool>> =
        steps.iter().map(|s| (s.name.clone(), watch::Sender::new(false))).collect();
    let stops = steps.iter().map(|step| stop_step(agent, job, pod, step, (grace.granted, deadline), &ended));
    let failed: Vec<Trouble> = join_all(stops).await.into_iter().filter_map(Result::err).collect();
    if let Some(trouble) = failed.into_iter().next() {
        if let Some(pod) = pod {
            let text = format!("error killing pod: {}", trouble.message);
            agent.context.events.warning(object_of(pod), "FailedKillPod", text);
        }
        return Err(trouble);
    }
    // Also one that is not READY any more: its network may still be there.
    let sandboxes = observed.sandboxes.iter().map(|s| stop_sandbox(agent, s.id.as_str()));
    try_join_all(sandboxes).await.map(|_| ())
}

async fn stop_step(
    agent: &Arc<Agent>,
    job: &Job,
    pod: Option<&Arc<Pod>>,
    step: &StopStep,
    (granted, deadline): (i64, i64),
    ended: &BTreeMap<String, watch::Sender<bool>>,
) -> Result<(), Trouble> {
    if let Some(pod) = pod {
        let object = object_of(pod).container(step.kind.map_or("containers", |k| k.spec_field()), &step.name);
        agent.context.events.normal(object.clone(), "Killing", format!("Stopping container {}", step.name));
        pre_stop(agent, pod, (step.id.as_str(), &step.name), object, deadline).await;
    }
    for name in &step.after {
        let Some(flag) = ended.get(name) else { continue };
        let left = Duration::from_secs(u64::try_from(seconds_until(deadline)).unwrap_or(0));
        let mut flag = flag.subscribe();
        let _ = tokio::time::timeout(left, flag.wait_for(|ended| *ended)).await;
    }
    let timeout = stop_timeout_seconds(granted, seconds_until(deadline));
    let result = stop_container(agent, step.id.as_str(), timeout).await;
    if let Some(flag) = ended.get(&step.name) {
        flag.send_replace(true);
    }
    if result.is_ok() {
        tracing::info!(uid = job.uid, container = step.name, id = %step.id, timeout_s = timeout, "stopped");
    }
    result
}

/// The container's preStop hook, within what is left of the grace.
async fn pre_stop(agent: &Agent, pod: &Pod, (id, name): (&str, &str), object: ObjectRef, deadline: i64) {
    let left = seconds_until(deadline);
    let Some((_, container)) = pod.container(name) else { return };
    let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()).filter(|_| left > 0)
    else {
        return;
    };
    let bound = Duration::from_secs(u64::try_from(left).unwrap_or(0));
    let subject = Subject { pod, container, id };
    let outcome = tokio::time::timeout(bound, hooks::run(agent, &subject, hook, bound)).await;
    if let Ok(Err(text)) = outcome {
        tracing::warn!(pod = name_of(pod), container = name, "preStop failed: {text}");
        // What a hook has said is nobody else's business (pod-lifecycle.md §9.10).
        agent.context.events.warning(object, "FailedPreStopHook", "PreStopHook failed");
    }
}

/// Stops one container while its pod goes on: event, preStop, StopContainer.
pub async fn stop_container_with_hooks(
    agent: &Arc<Agent>,
    job: &Job,
    pod: &Pod,
    id: &str,
    name: &str,
    grace_seconds: i64,
    message: &str,
) -> Result<(), Trouble> {
    let object = named_container_object(pod, name);
    agent.context.events.normal(object.clone(), "Killing", message.to_owned());
    let deadline = now_unix_nanos().saturating_add(grace_seconds.saturating_mul(SECOND));
    pre_stop(agent, pod, (id, name), object, deadline).await;
    stop_container(agent, id, stop_timeout_seconds(grace_seconds, seconds_until(deadline))).await?;
    tracing::info!(uid = job.uid, container = name, id, "stopped");
    Ok(())
}

/// Removes the records of a pod whose containers all begin anew (pod-lifecycle.md §9.9): those that run are stopped
/// first, without their hooks, and those that asked for it go last.
pub async fn reset_containers(agent: &Arc<Agent>, pod: &Pod, actions: &PodActions) -> Result<(), Trouble> {
    for last in [false, true] {
        let group = actions.reset.iter().filter(|one| one.last == last);
        try_join_all(group.map(|one| remove_container(agent, pod, one))).await?;
    }
    for (key, finished) in &actions.reset_backoff {
        agent.backoff().advance(key, *finished, &agent.moment());
    }
    Ok(())
}

async fn remove_container(agent: &Arc<Agent>, pod: &Pod, one: &ResetContainer) -> Result<(), Trouble> {
    if one.kill {
        let object = named_container_object(pod, &one.name);
        agent.context.events.normal(object, "Killing", format!("Stopping container {}", one.name));
        stop_container(agent, one.id.as_str(), MIN_STOP_TIMEOUT_SECONDS).await?;
    }
    let request = cri::RemoveContainerRequest { container_id: one.id.as_str().to_owned() };
    gone_is_done(agent.clients.cri().remove_container(bounded(request, agent.clients.cri_timeout)).await)
        .map_err(|s| Trouble::call("cannot remove a container", &s))
}

async fn stop_container(agent: &Agent, id: &str, timeout_seconds: i64) -> Result<(), Trouble> {
    let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout: timeout_seconds };
    let bound = agent.clients.cri_timeout + Duration::from_secs(u64::try_from(timeout_seconds).unwrap_or(0));
    gone_is_done(agent.clients.cri().stop_container(bounded(request, bound)).await)
        .map_err(|s| Trouble::call("cannot stop a container", &s))
}

async fn stop_sandbox(agent: &Agent, id: &str) -> Result<(), Trouble> {
    let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
    gone_is_done(agent.clients.cri().stop_pod_sandbox(bounded(request, agent.clients.cri_timeout)).await)
        .map_err(|s| Trouble::call("cannot stop the sandbox", &s))
}

/// Who does not know a container, a sandbox or a pod holds nothing of it.
pub(crate) fn gone_is_done<T>(result: Result<T, Status>) -> Result<(), Status> {
    match result {
        Err(status) if status.code() != Code::NotFound => Err(status),
        _ => Ok(()),
    }
}

/// Nothing of the pod runs any more: volumes, then the cgroup, then the last status.
pub async fn clean(agent: &Arc<Agent>, job: &Job) -> Result<Turn, Trouble> {
    let Some(wanted) = &job.wanted else { return Ok(Turn::of(SyncOutcome::Done)) };
    let ask = |what: &'static str, owner: &'static str| {
        note_wait(agent, &job.uid, StepName::Termination, "", Cause::waiting(what, what, owner));
    };
    ask("volumes are being unmounted", "volume-manager");
    unmount(agent, job, wanted).await?;
    ask("the cgroup is being removed", "resource-manager");
    release(agent, job, wanted).await?;
    publish(agent, &job.uid, &Facts { pod_is_terminal: true, finished: true, ..Facts::default() });
    note_wait(agent, &job.uid, StepName::Termination, "", Cause::done("pod-sync"));
    tracing::info!(pod = name_of(&wanted.pod), uid = job.uid, "everything of a pod is released");
    Ok(Turn::of(SyncOutcome::Done))
}

async fn unmount(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<(), Trouble> {
    desires::unmount(agent, wanted);
    let request = volume::UnmountPodRequest { uid: job.uid.clone() };
    let mut volumes = agent.clients.volumes();
    let asked = volumes.unmount_pod(bounded(request, ASK));
    tokio::pin!(asked);
    loop {
        // Cancel-safe: `asked` is pinned outside and goes on at the next turn.
        tokio::select! {
            answer = &mut asked => {
                return gone_is_done(answer).map_err(|s| Trouble::call("volumes are not unmounted yet", &s));
            }
            () = tokio::time::sleep(LOOK_AGAIN) => end_latecomers(agent, job, wanted).await?,
        }
    }
}

/// Ends what comes to light only now: the runtime may finish a sandbox after the call that wanted it was cut, by the end of
/// an earlier pod-sync (architecture §4, "Calls that were cut"). volume-manager waits for it, and nobody else would end it.
async fn end_latecomers(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<(), Trouble> {
    // A runtime that does not answer is what volume-manager waits for, too.
    let Ok(observed) = read(agent, &job.uid).await else { return Ok(()) };
    if !observed.anything_running() && !observed.any_sandbox_ready() {
        return Ok(());
    }
    tracing::warn!(
        pod = name_of(&wanted.pod),
        uid = job.uid,
        "something of the pod has come to light after its end; ending that, too"
    );
    stop_pod(agent, job, Some(&wanted.pod), &observed, Grace::whole(0)).await
}

async fn release(agent: &Agent, job: &Job, wanted: &Wanted) -> Result<(), Trouble> {
    desires::release(agent, wanted);
    let request = resource::ReleasePodRequest { uid: job.uid.clone() };
    gone_is_done(agent.clients.resources().release_pod(bounded(request, ASK)).await)
        .map_err(|s| Trouble::call("the cgroup is not removed yet", &s))
}
