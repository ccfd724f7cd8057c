//! A turn of a pod that is to run (pod-lifecycle.md §8.1 and §9.7): decide, carry out, read again.

use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::Reason;
use keelson_pod_sync_core::actions::{ContainerWait, PodActions};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::observation::ContainerObservation;
use keelson_pod_sync_core::worker::{Input, SyncOutcome};
use tracing::Instrument as _;

use crate::effects::{Effects, cgroup, images, volumes};
use crate::error::SyncError;
use crate::publish::StatusFacts;
use crate::publish::objects::{container_object, pod_name, pod_object};
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;
use crate::turn::admission::{admit, reject};
use crate::turn::decide::decide;
use crate::turn::resize::{self, Carried};
use crate::turn::start::{Start, StartError, start_containers};
use crate::turn::stop::{Grace, stop_container_with_hooks};
use crate::turn::{Job, Memory, TurnEnd, probes, stop};

/// How often a turn decides again after it has carried something out.
const ROUNDS: usize = 4;
/// The next turn of a pod that waits for an orphan of its name, in nanoseconds.
const ORPHAN_RETRY_NANOS: i64 = 300_000_000;

/// Runs one turn of a pod that is to run.
///
/// # Errors
/// Something could not be carried out; the steps of the pod say what.
pub async fn sync(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
    memory: &mut Memory,
) -> Result<TurnEnd, SyncError> {
    let pod = &desired.pod;
    if !await_runtime(effects, job).await {
        return Ok(TurnEnd::of(SyncOutcome::Cancelled));
    }
    if !job.worker.started {
        if let Some(turn) = wait_for_name(effects, job, pod) {
            return Ok(turn);
        }
        effects.registry.apply(&job.uid, &Input::Started);
    }
    count_start(effects, job, pod);
    effects.registry.set_step(&job.uid, StepName::Source, "", Cause::done("pod-config"));
    probes::ensure(effects, job);
    effects.registry.adopt_allocation(&job.uid, pod);
    // There may be a newer observation than that of the job: waiting for the runtime takes time.
    let mut observed = effects.registry.observed(&job.uid).unwrap_or_else(|| Arc::clone(&job.observed));
    for _ in 0..ROUNDS {
        let mut actions = decide(effects, desired, &observed);
        report_waits(effects, job, &actions);
        let ended = effects
            .publisher
            .publish(&job.uid, &StatusFacts { waiting: &actions.waiting, ..StatusFacts::default() });
        if ended || actions.terminal {
            return Ok(TurnEnd::of(SyncOutcome::Terminal));
        }
        // A resize that fails does not keep other containers from starting.
        let resized = resize::carry_out(effects, job, desired, &observed).await;
        if job.cancel.is_cancelled() {
            return Ok(TurnEnd::of(SyncOutcome::Cancelled));
        }
        if !matches!(resized, Ok(Carried::Nothing)) {
            actions.without_resize_restarts();
        }
        if actions.is_empty() {
            if resized? == Carried::Nothing {
                let next_unix_nanos = actions.next_wake_unix_nanos();
                return Ok(TurnEnd { outcome: SyncOutcome::Done, next_unix_nanos });
            }
            observed = effects.read_pod(&job.uid).await?;
            continue;
        }
        let span = tracing::info_span!(
            target: keelson_telemetry::TRACE_TARGET, "sync pod", pod = pod_name(pod), uid = job.uid);
        keelson_telemetry::set_parent(&span, &desired.traceparent);
        match Box::pin(carry_out(effects, job, desired, &observed, &actions, memory).instrument(span)).await?
        {
            Next::ReadAgain => {}
            Next::End(turn) => return Ok(turn),
        }
        observed = effects.read_pod(&job.uid).await?;
    }
    Ok(TurnEnd { outcome: SyncOutcome::Done, next_unix_nanos: Some(0) })
}

/// If another pod of the name has not ended yet, the turn ends.
fn wait_for_name(effects: &Effects, job: &Job, pod: &Pod) -> Option<TurnEnd> {
    let orphan = effects.registry.orphan_holds_name(pod);
    if !orphan && effects.registry.may_start(pod) {
        return None;
    }
    let text = format!("another pod named {} is still ending", pod_name(pod));
    let cause = Cause::waiting("NameHeld", &text, "pod-sync");
    effects.registry.set_step(&job.uid, StepName::Source, "", cause);
    // The end of an orphan wakes no worker.
    let next_unix_nanos = orphan.then(|| keelson_service_kit::now_unix_nanos() + ORPHAN_RETRY_NANOS);
    Some(TurnEnd { outcome: SyncOutcome::Done, next_unix_nanos })
}

/// Counts the first turn of a pod: as the begin of a new one, or as an adoption.
fn count_start(effects: &Effects, job: &Job, pod: &Pod) {
    let metrics = &effects.publisher.metrics.pods;
    let first = effects.registry.with(&job.uid, |state| {
        let is_new = state.start.first.worker_started(state.runtime.has_leftovers());
        (is_new, state.start.first.is_adopted())
    });
    match first {
        Some((true, _)) => metrics.begins(pod, &effects.registry.moment()),
        Some((false, true)) => metrics.adopts(),
        Some((false, false)) | None => {}
    }
}

/// Waits until the runtime is ready. Returns false if the turn was cancelled meanwhile.
async fn await_runtime(effects: &Effects, job: &Job) -> bool {
    let mut runtime = effects.registry.node.runtime.subscribe();
    loop {
        let view = runtime.borrow_and_update().clone();
        if view.ready {
            effects.registry.update_steps(&job.uid, |steps, _| {
                if steps.get(StepName::Sandbox, "").is_some_and(|c| c.kind == "RuntimeNotReady") {
                    steps.clear(StepName::Sandbox, "");
                }
            });
            return true;
        }
        let text = if view.message.is_empty() { "the runtime has not been read yet" } else { &view.message };
        effects.registry.set_step(
            &job.uid,
            StepName::Sandbox,
            "",
            Cause::waiting("RuntimeNotReady", text, "runtime-shim"),
        );
        // Cancel-safe: the state is read anew.
        tokio::select! {
            () = job.cancel.cancelled() => return false,
            changed = runtime.changed() => if changed.is_err() { return false },
        }
    }
}

/// Updates the steps of the containers: which wait for what, and which run.
fn report_waits(effects: &Effects, job: &Job, actions: &PodActions) {
    let Some(desired) = &job.desired else { return };
    let mut warned = Vec::new();
    effects.registry.with(&job.uid, |state| {
        let at = effects.registry.moment();
        for (kind, container) in desired.pod.containers() {
            let name = container.name.as_str();
            let record = state.runtime.observed.current(name);
            if let Some(wait) = actions.waiting.iter().find(|w| w.name == name) {
                let failed_start = state.start.errors.get(name).map(|(_, message)| message.as_str());
                let unready = state
                    .probes
                    .unready(&desired.pod, &state.runtime.observed, &state.published.status, name)
                    .filter(|_| wait.reason == Reason::WaitingForStartupProbe);
                let cause = unready.unwrap_or_else(|| cause_of_wait(wait, record, failed_start));
                let is_new = state.steps.set(StepName::Container, name, cause, &at);
                if is_new && !wait.event_message.is_empty() {
                    warned.push((kind, name.to_owned(), wait.event_message.clone()));
                }
            } else if record.is_some_and(|r| r.is_running() || r.has_exited())
                && !actions.start.iter().any(|s| s.name == name)
            {
                let unready = state.probes.unready(
                    &desired.pod,
                    &state.runtime.observed,
                    &state.published.status,
                    name,
                );
                let cause = unready.unwrap_or_else(|| Cause::done("runtime-shim"));
                state.steps.set(StepName::Container, name, cause, &at);
            }
        }
    });
    for (kind, name, message) in warned {
        effects.context.events.warning(container_object(&desired.pod, kind, &name), "BackOff", message);
    }
}

/// Why a container waits. A back-off says what has caused it: a start that failed, which an operator has to fix, or the exit of the last
/// instance.
fn cause_of_wait(
    wait: &ContainerWait,
    record: Option<&ContainerObservation>,
    failed_start: Option<&str>,
) -> Cause {
    let text = |why: &str| format!("{}: {why}", wait.message);
    let (owner, message) = match (wait.reason, failed_start, record) {
        (Reason::CrashLoopBackOff, Some(why), _) => (YOU, text(why)),
        (Reason::CrashLoopBackOff, None, Some(last)) if last.has_exited() => {
            ("pod-sync", text(&format!("it ended with exit code {} ({})", last.exit_code, last.reason)))
        }
        _ => ("pod-sync", wait.message.clone()),
    };
    Cause::waiting(wait.reason.as_str(), &message, owner).retried_at(wait.until_unix_nanos)
}

/// What follows after an attempt to carry out a decision.
#[derive(Debug)]
enum Next {
    /// Read the pod from the runtime and decide again.
    ReadAgain,
    /// The turn is over.
    End(TurnEnd),
}

async fn carry_out(
    effects: &Arc<Effects>,
    job: &Job,
    desired: &DesiredPod,
    observed: &Observed,
    actions: &PodActions,
    memory: &mut Memory,
) -> Result<Next, SyncError> {
    let admission = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "admit pod");
    if let Some(turn) = admit(effects, job, desired).instrument(admission).await? {
        return Ok(Next::End(turn));
    }
    let pod = &desired.pod;
    if !actions.reset.is_empty() {
        tracing::info!(pod = pod_name(pod), uid = job.uid, "restarting all containers of a pod");
        stop::reset_containers(effects, pod, actions).await?;
        return Ok(Next::ReadAgain);
    }
    if !effects.registry.node.runtime.borrow().network_ready && !pod.is_host_network() {
        let text = format!("network is not ready: {}", effects.registry.node.runtime.borrow().message);
        if effects.registry.set_step(
            &job.uid,
            StepName::Sandbox,
            "",
            Cause::waiting("NetworkNotReady", &text, YOU),
        ) {
            effects.context.events.warning(pod_object(pod), "NetworkNotReady", text.clone());
        }
        return Err(SyncError { peer_unavailable: true, ..SyncError::new(text) });
    }
    let names = actions.start.iter().map(|container| container.name.as_str());
    let images = images::fetch_all(effects, &memory.pulled, pod, names);
    if actions.create_sandbox.is_some() {
        memory.unused_images = images::fetch_unused(effects, pod);
    }
    // Volumes and cgroup at the same time.
    let mounting = volumes::mount(effects, desired, &mut memory.mount_error);
    let prepared = async { tokio::try_join!(mounting, cgroup::prepare(effects, desired)) };
    // Cancel-safe: both calls only wait for something that the other service does anyway.
    let (mounts, cgroup_parent) = tokio::select! {
        () = job.cancel.cancelled() => return Ok(Next::End(TurnEnd::of(SyncOutcome::Cancelled))),
        prepared = prepared => match prepared {
            Err(SyncError { rejection: Some(reason), message, .. }) => {
                return Ok(Next::End(reject(effects, job, desired, reason, &message)));
            }
            prepared => prepared?,
        },
    };
    stop_unwanted(effects, job, pod, observed, actions).await?;
    let start = Start { effects, job, desired, observed, mounts, cgroup_parent, pulled: &memory.pulled };
    after_start(Box::pin(start_containers(&start, actions, images)).await)
}

/// What follows a start.
fn after_start(ended: Result<(), StartError>) -> Result<Next, SyncError> {
    match ended {
        Ok(()) => Ok(Next::ReadAgain),
        // The next turn ends the pod and begins with a fresh read.
        Err(StartError::Superseded) => Ok(Next::End(TurnEnd::of(SyncOutcome::Cancelled))),
        Err(StartError::Failed(error)) => Err(error),
    }
}

/// Stops the containers that the decision names, or all of them because the sandbox is replaced.
async fn stop_unwanted(
    effects: &Arc<Effects>,
    job: &Job,
    pod: &Arc<Pod>,
    observed: &Observed,
    actions: &PodActions,
) -> Result<(), SyncError> {
    if let Some(reason) = actions.kill_pod {
        if let Some(plan) = &actions.create_sandbox
            && plan.replaces.is_some()
        {
            effects.context.events.normal(
                pod_object(pod),
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
        tracing::info!(pod = pod_name(pod), uid = job.uid, %reason, "stopping the containers of a pod");
        let grace = Grace::full(pod.termination_grace());
        stop::stop_pod(effects, job, Some(pod), observed, grace).await?;
    }
    if actions.kill.is_empty() {
        return Ok(());
    }
    let stops = actions.kill.iter().map(|kill| {
        tracing::info!(pod = pod_name(pod), container = kill.name, reason = %kill.reason, "stopping a container");
        stop_container_with_hooks(effects, job, pod, kill.id.as_str(), &kill.name, kill.grace_seconds, &kill.message)
    });
    futures_util::future::try_join_all(stops).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superseded_start_ends_its_turn_as_cancelled_not_failed() {
        let ended = after_start(Err(StartError::Superseded)).unwrap();
        assert!(matches!(&ended, Next::End(turn) if turn.outcome == SyncOutcome::Cancelled), "{ended:?}");
        let failed = after_start(Err(SyncError::new("no such image").into())).unwrap_err();
        assert_eq!(failed.message, "no such image");
    }
}
