//! A turn of a pod that is to run (pod-lifecycle.md §8.1 and §9.7): decide, carry out, look again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::{ContainerKind, Pod};
use keelson_pod_sync_core::Reason;
use keelson_pod_sync_core::actions::{ContainerWait, PodActions, compute_pod_actions};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_pod_sync_core::observation::ContainerObservation;
use keelson_pod_sync_core::probe::hints;
use keelson_pod_sync_core::worker::{Input, SyncOutcome, WorkerPhase};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_proto::keelson::volume_manager::v1::mount_pod_response::Item as MountItem;
use tracing::Instrument as _;

use crate::admission::admit;
use crate::agent::{Agent, Entry, Wanted, object_of};
use crate::clients::bounded;
use crate::images::{ImageTask, fetch};
use crate::observed::Observed;
use crate::probes::{self, Probes};
use crate::start::{Start, Unfinished, start_containers};
use crate::stop::{Grace, stop_container_with_hooks};
use crate::worker::{Facts, Job, Trouble, Turn, name_of, note_wait, publish};

/// How often a turn decides again after it has done something.
const ROUNDS: usize = 4;
/// How soon a pod whose name an orphan holds looks again.
const ORPHAN_LOOK_NANOS: i64 = 300_000_000;
/// How long one call asks whether something is done before it is made again.
const ASK: Duration = Duration::from_secs(60);

/// Makes the pod run.
pub async fn sync(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<Turn, Trouble> {
    let pod = &wanted.pod;
    if !runtime_is_there(agent, job).await {
        return Ok(Turn::of(SyncOutcome::Cancelled));
    }
    if !job.state.started {
        let orphan = agent.orphan_holds_name(pod);
        if orphan || !agent.may_start(pod) {
            let text = format!("another pod named {} is still ending", name_of(pod));
            note_wait(agent, &job.uid, StepName::Source, "", Cause::waiting("NameHeld", &text, "pod-sync"));
            // Nobody wakes this one when an orphan is gone.
            let next_unix_nanos = orphan.then(|| keelson_service_kit::now_unix_nanos() + ORPHAN_LOOK_NANOS);
            return Ok(Turn { outcome: SyncOutcome::Done, next_unix_nanos });
        }
        agent.apply(&job.uid, &Input::Started);
    }
    match agent.with(&job.uid, |e| (e.start.worker_begins(e.leaves_something()), e.start.is_adopted())) {
        Some((true, _)) => agent.metrics.pods.begins(pod, &agent.moment()),
        Some((false, true)) => agent.metrics.pods.adopts(),
        Some((false, false)) | None => {}
    }
    note_wait(agent, &job.uid, StepName::Source, "", Cause::done("pod-config"));
    probes::ensure(agent, job);
    // The observation may have become newer while the runtime was awaited.
    let mut observed =
        agent.with(&job.uid, |e| Arc::clone(&e.observed)).unwrap_or_else(|| Arc::clone(&job.observed));
    for _ in 0..ROUNDS {
        let actions = decide(agent, wanted, &observed);
        tell_waits(agent, job, &actions);
        let ended = publish(agent, &job.uid, &Facts { waiting: &actions.waiting, ..Facts::default() });
        if ended || actions.terminal {
            return Ok(Turn::of(SyncOutcome::Terminal));
        }
        if actions.is_empty() {
            let next_unix_nanos = actions.next_wake_unix_nanos();
            return Ok(Turn { outcome: SyncOutcome::Done, next_unix_nanos });
        }
        if job.cancel.is_cancelled() {
            return Ok(Turn::of(SyncOutcome::Cancelled));
        }
        let span = tracing::info_span!(
            target: keelson_telemetry::TRACE_TARGET, "sync pod", pod = name_of(pod), uid = job.uid);
        keelson_telemetry::set_parent(&span, &wanted.traceparent);
        match Box::pin(carry_out(agent, job, wanted, &observed, &actions).instrument(span)).await? {
            Done::Look => {}
            Done::Stop(turn) => return Ok(turn),
        }
        observed = read(agent, &job.uid).await?;
    }
    Ok(Turn { outcome: SyncOutcome::Done, next_unix_nanos: Some(0) })
}

/// A fresh look at the pod.
pub async fn read(agent: &Agent, uid: &str) -> Result<Observed, Trouble> {
    let read = agent.clients.read_pod(uid).await;
    let observed = read.map_err(|s| Trouble::call("cannot read the pod from the runtime", &s))?;
    agent.observed(uid, Arc::clone(&observed));
    Ok(observed)
}

fn decide(agent: &Agent, wanted: &Wanted, observed: &Observed) -> PodActions {
    let pod = &wanted.pod;
    let hints = agent
        .with(&pod.metadata.uid, |e| hints(pod, observed, Some(&e.status), &e.probes.book))
        .unwrap_or_default();
    compute_pod_actions(pod, observed, &hints, &agent.backoff(), &agent.moment())
}

/// Publishes what a probe has turned, without waiting for a turn (pod-lifecycle.md §14.4).
pub fn show(agent: &Agent, uid: &str) {
    let known = agent.with(uid, |e| (e.state.phase, e.wanted.clone(), Arc::clone(&e.observed)));
    match known {
        Some((WorkerPhase::Sync, Some(wanted), observed)) => {
            let actions = decide(agent, &wanted, &observed);
            publish(agent, uid, &Facts { waiting: &actions.waiting, ..Facts::default() });
        }
        Some((WorkerPhase::Terminating, Some(_), _)) => {
            publish(agent, uid, &Facts::default());
        }
        _ => {}
    }
}

/// While the runtime is away no pod is synced. False: the turn was cancelled meanwhile.
async fn runtime_is_there(agent: &Agent, job: &Job) -> bool {
    let mut runtime = agent.runtime.subscribe();
    loop {
        let view = runtime.borrow_and_update().clone();
        if view.ready {
            agent.note(&job.uid, |ledger, _| {
                if ledger.get(StepName::Sandbox, "").is_some_and(|c| c.kind == "RuntimeNotReady") {
                    ledger.clear(StepName::Sandbox, "");
                }
            });
            return true;
        }
        let text = if view.message.is_empty() { "the runtime has not been read yet" } else { &view.message };
        note_wait(
            agent,
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

/// Notes what the decision holds back, and which containers run.
fn tell_waits(agent: &Agent, job: &Job, actions: &PodActions) {
    let Some(wanted) = &job.wanted else { return };
    let mut warned = Vec::new();
    agent.with(&job.uid, |entry| {
        let at = agent.moment();
        for (kind, container) in wanted.pod.containers() {
            let name = container.name.as_str();
            let record = entry.observed.current(name);
            if let Some(wait) = actions.waiting.iter().find(|w| w.name == name) {
                let failed_start = entry.reasons.get(name).map(|(_, message)| message.as_str());
                let unready = Probes::unready(entry, &wanted.pod, name)
                    .filter(|_| wait.reason == Reason::WaitingForStartupProbe);
                let cause = unready.unwrap_or_else(|| cause_of_wait(wait, record, failed_start));
                let news = entry.ledger.set(StepName::Container, name, cause, &at);
                if news && !wait.event_message.is_empty() {
                    warned.push((kind, name.to_owned(), wait.event_message.clone()));
                }
            } else if record.is_some_and(|r| r.is_running() || r.has_exited())
                && !actions.start.iter().any(|s| s.name == name)
            {
                let unready = Probes::unready(entry, &wanted.pod, name);
                let cause = unready.unwrap_or_else(|| Cause::done("runtime-shim"));
                entry.ledger.set(StepName::Container, name, cause, &at);
            }
        }
    });
    for (kind, name, message) in warned {
        agent.context.events.warning(container_object(&wanted.pod, kind, &name), "BackOff", message);
    }
}

/// Why a container is held back. Behind a back-off stands what it is about: a start that failed, which a person has
/// to mend, or the end of the last run.
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

/// What follows a round.
#[derive(Debug)]
enum Done {
    /// Look at the runtime and decide again.
    Look,
    /// The turn is over.
    Stop(Turn),
}

async fn carry_out(
    agent: &Arc<Agent>,
    job: &Job,
    wanted: &Wanted,
    observed: &Observed,
    actions: &PodActions,
) -> Result<Done, Trouble> {
    let admission = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "admit pod");
    if let Some(turn) = admit(agent, job, wanted).instrument(admission).await? {
        return Ok(Done::Stop(turn));
    }
    let pod = &wanted.pod;
    if !actions.reset.is_empty() {
        tracing::info!(pod = name_of(pod), uid = job.uid, "all containers of a pod begin anew");
        crate::stop::reset_containers(agent, pod, actions).await?;
        return Ok(Done::Look);
    }
    if !agent.runtime.borrow().network_ready && !pod.is_host_network() {
        let text = format!("network is not ready: {}", agent.runtime.borrow().message);
        if note_wait(agent, &job.uid, StepName::Sandbox, "", Cause::waiting("NetworkNotReady", &text, YOU)) {
            agent.context.events.warning(object_of(pod), "NetworkNotReady", text.clone());
        }
        return Err(Trouble { neighbour: true, ..Trouble::fault(text) });
    }
    let images: BTreeMap<String, ImageTask> = actions
        .start
        .iter()
        .filter_map(|s| pod.container(&s.name).map(|(kind, c)| (s.name.clone(), fetch(agent, pod, kind, c))))
        .collect();
    // Side by side: volumes and cgroup.
    let prepared = async { tokio::try_join!(mount(agent, job, wanted), cgroup(agent, job, wanted)) };
    // Cancel-safe: both only ask whether something is done.
    let (mounts, cgroup_parent) = tokio::select! {
        () = job.cancel.cancelled() => return Ok(Done::Stop(Turn::of(SyncOutcome::Cancelled))),
        prepared = prepared => prepared?,
    };
    stop_unwanted(agent, job, pod, observed, actions).await?;
    let start = Start { agent, job, wanted, observed, mounts, cgroup_parent };
    after_start(Box::pin(start_containers(&start, actions, images)).await)
}

/// What follows a start.
fn after_start(ended: Result<(), Unfinished>) -> Result<Done, Trouble> {
    match ended {
        Ok(()) => Ok(Done::Look),
        // What comes next is the end of the pod, which begins with a fresh read.
        Err(Unfinished::Superseded) => Ok(Done::Stop(Turn::of(SyncOutcome::Cancelled))),
        Err(Unfinished::Trouble(trouble)) => Err(trouble),
    }
}

/// Stops what must not go on: single containers, or everything because the sandbox is replaced.
async fn stop_unwanted(
    agent: &Arc<Agent>,
    job: &Job,
    pod: &Arc<Pod>,
    observed: &Observed,
    actions: &PodActions,
) -> Result<(), Trouble> {
    if let Some(reason) = actions.kill_pod {
        if let Some(plan) = &actions.create_sandbox
            && plan.replaces.is_some()
        {
            agent.context.events.normal(
                object_of(pod),
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
        tracing::info!(pod = name_of(pod), uid = job.uid, %reason, "stopping the containers of a pod");
        let grace = Grace::whole(pod.termination_grace());
        crate::stop::stop_pod(agent, job, Some(pod), observed, grace).await?;
    }
    if actions.kill.is_empty() {
        return Ok(());
    }
    let stops = actions.kill.iter().map(|kill| {
        tracing::info!(pod = name_of(pod), container = kill.name, reason = %kill.reason, "stopping a container");
        stop_container_with_hooks(agent, job, pod, kill.id.as_str(), &kill.name, kill.grace_seconds, &kill.message)
    });
    futures_util::future::try_join_all(stops).await.map(|_| ())
}

/// Where each volume lies on the host, by name.
pub type Mounts = BTreeMap<String, volume::VolumeMount>;

async fn mount(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<Mounts, Trouble> {
    let request = volume::MountPodRequest { uid: job.uid.clone(), revision: wanted.revision };
    let fail = |status: &tonic::Status| {
        let trouble = Trouble::call("Unable to attach or mount volumes", status);
        let owner = if trouble.neighbour { "volume-manager" } else { YOU };
        let cause = Cause::failed("FailedMount", &trouble.message, owner);
        note_wait(agent, &job.uid, StepName::Volumes, "", cause);
        let told = |e: &mut Entry| e.mount_told.replace(trouble.message.clone());
        let news = agent.with(&job.uid, told).flatten().as_ref() != Some(&trouble.message);
        // A service that is away is no fault of the volumes (volumes.md §3.14). Each try of a volume has its own event.
        if news && !trouble.neighbour {
            agent.context.events.warning(object_of(&wanted.pod), "FailedMount", trouble.message.clone());
        }
        trouble
    };
    let mut client = agent.clients.volumes();
    let mut answers = client.mount_pod(bounded(request, ASK)).await.map_err(|s| fail(&s))?.into_inner();
    loop {
        let answer = answers.message().await.map_err(|s| fail(&s))?;
        match answer.and_then(|a| a.item) {
            Some(MountItem::Progress(progress)) => {
                let cause = match progress.next_try_unix_nanos {
                    0 => Cause::waiting("Mounting", &progress.waiting_for, "volume-manager"),
                    next => {
                        let owner = if progress.owner == YOU { YOU } else { "volume-manager" };
                        Cause::failed("FailedMount", &progress.waiting_for, owner).retried_at(next)
                    }
                };
                note_wait(agent, &job.uid, StepName::Volumes, "", cause);
            }
            Some(MountItem::Ready(ready)) => {
                note_wait(agent, &job.uid, StepName::Volumes, "", Cause::done("volume-manager"));
                agent.with(&job.uid, |e| e.mount_told = None);
                return Ok(ready.volumes.into_iter().map(|v| (v.name.clone(), v)).collect());
            }
            None => return Err(fail(&tonic::Status::unavailable("volume-manager ended the answer"))),
        }
    }
}

/// What goes into a container is there: the sizes of the machine, for its OOM score, and which cgroup version its
/// limits are written for, which is told after the sizes when the container runtime had to be waited for.
fn is_whole(machine: &resource::Machine) -> bool {
    machine.capacity.contains_key("memory") && !machine.cgroup_version.is_empty()
}

/// Right after a start what resource-manager tells of the machine may still be on its way.
async fn machine_is_known(agent: &Agent) -> Result<(), Trouble> {
    let mut machine = agent.machine.subscribe();
    let known = machine.wait_for(|machine| is_whole(machine));
    match tokio::time::timeout(Duration::from_secs(10), known).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(Trouble {
            neighbour: true,
            ..Trouble::fault("resource-manager has not told the machine's sizes")
        }),
    }
}

async fn cgroup(agent: &Arc<Agent>, job: &Job, wanted: &Wanted) -> Result<String, Trouble> {
    let request = resource::PreparePodRequest { uid: job.uid.clone(), revision: wanted.revision };
    match agent.clients.resources().prepare_pod(bounded(request, ASK)).await {
        Ok(response) => {
            machine_is_known(agent).await?;
            note_wait(agent, &job.uid, StepName::Cgroup, "", Cause::done("resource-manager"));
            Ok(response.into_inner().cgroup_parent)
        }
        Err(status) => {
            let trouble = Trouble::call("unable to ensure pod container exists", &status);
            let cause = Cause::failed("FailedCreatePodContainer", &trouble.message, "resource-manager");
            note_wait(agent, &job.uid, StepName::Cgroup, "", cause);
            if !trouble.neighbour {
                let object = object_of(&wanted.pod);
                agent.context.events.warning(object, "FailedCreatePodContainer", trouble.message.clone());
            }
            Err(trouble)
        }
    }
}

/// `spec.containers{name}` of a container, as the events of its start name it.
pub fn container_object(pod: &Pod, kind: ContainerKind, name: &str) -> keelson_service_kit::ObjectRef {
    object_of(pod).container(kind.spec_field(), name)
}

/// The same of a container whose kind the pod tells; one that is not in the spec counts as a regular one.
pub fn named_container_object(pod: &Pod, name: &str) -> keelson_service_kit::ObjectRef {
    container_object(pod, pod.container(name).map_or(ContainerKind::Regular, |(kind, _)| kind), name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_is_superseded_ends_its_turn_as_cancelled_and_not_as_failed() {
        let ended = after_start(Err(Unfinished::Superseded)).unwrap();
        assert!(matches!(&ended, Done::Stop(turn) if turn.outcome == SyncOutcome::Cancelled), "{ended:?}");
        let failed = after_start(Err(Trouble::fault("no such image").into())).unwrap_err();
        assert_eq!(failed.message, "no such image");
    }

    #[test]
    fn a_machine_is_whole_with_its_memory_and_its_cgroup_version() {
        for (resource, cgroup_version, whole) in
            [("memory", "v2", true), ("memory", "v1", true), ("memory", "", false), ("cpu", "v2", false)]
        {
            let capacity = [(resource.to_owned(), 1)].into();
            let cgroup_version = cgroup_version.to_owned();
            let machine = resource::Machine { capacity, cgroup_version, ..Default::default() };
            assert_eq!(is_whole(&machine), whole, "{machine:?}");
        }
    }
}
