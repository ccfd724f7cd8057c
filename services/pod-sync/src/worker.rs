//! One worker per UID: a turn at a time, woken by what comes and by the clock.

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::{Pod, PodPhase, PodStatus};
use keelson_pod_sync_core::accept::{Accepted, accept_status};
use keelson_pod_sync_core::actions::ContainerWait;
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::probe::readiness;
use keelson_pod_sync_core::start_time::start_time;
use keelson_pod_sync_core::status::{
    DEADLINE, DEADLINE_MESSAGE, StatusInputs, deadline_unix_nanos, final_status, generate_status,
};
use keelson_pod_sync_core::worker::{SyncOutcome, Work, WorkerPhase, WorkerState, current_work};
use keelson_service_kit::{Backoff, CancellationToken, now_unix_nanos};
use tokio::time::Instant;
use tonic::Status;

use crate::agent::{Agent, Entry, Wanted, object_of};
use crate::documents::Document;
use crate::news::News;
use crate::observed::Observed;
use crate::start::node_ips;
use crate::{again, stop, sync};

/// What a turn works on.
#[derive(Debug, Clone)]
pub struct Job {
    /// Pod UID.
    pub uid: String,
    /// Where the worker stands.
    pub state: WorkerState,
    /// The pod; `None` for an orphan.
    pub wanted: Option<Wanted>,
    /// What is known of the runtime.
    pub observed: Observed,
    /// Cancelled when the turn has become wrong.
    pub cancel: CancellationToken,
}

/// Why a turn did not get through.
#[derive(Debug, Clone)]
pub struct Trouble {
    /// For people.
    pub message: String,
    /// When to try again; `None`: soon, with back-off.
    pub retry_unix_nanos: Option<i64>,
    /// A neighbour is away: no fault of the pod, tried again more often.
    pub neighbour: bool,
}

impl Trouble {
    /// A fault of the pod or of what it needs.
    pub fn fault(message: impl Into<String>) -> Self {
        Self { message: message.into(), retry_unix_nanos: None, neighbour: false }
    }

    /// A failed call: whether it is the neighbour or the matter itself is in the code.
    pub fn call(what: &str, status: &Status) -> Self {
        Self {
            message: format!("{what}: {}", status.message()),
            retry_unix_nanos: None,
            neighbour: keelson_service_kit::status::is_cut(status),
        }
    }
}

/// How a turn ended, and when the next one is due without news.
#[derive(Debug)]
pub struct Turn {
    /// For the state machine.
    pub outcome: SyncOutcome,
    /// Unix nanoseconds; `None`: after the resync period.
    pub next_unix_nanos: Option<i64>,
}

impl Turn {
    /// Done, with the next look when the resync period is over.
    pub const fn of(outcome: SyncOutcome) -> Self {
        Self { outcome, next_unix_nanos: None }
    }
}

/// Works until this life of the UID is forgotten.
pub async fn run(agent: Arc<Agent>, uid: String, life: u64) {
    let Some(wake) = agent.with_life(&uid, life, |e| Arc::clone(&e.wake)) else { return };
    let mut faults = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));
    let mut absences = absences();
    // What is rarely done is on the heap while it is, so that a worker that waits, as most do, is small.
    loop {
        match agent.with_life(&uid, life, |e| e.again) {
            None => return,
            Some(true) if !Box::pin(again::wait(&agent, &uid, life, &wake)).await => return,
            Some(_) => {}
        }
        if let Err(trouble) = refresh(&agent, &uid).await {
            let delay = delay_of(resync(&agent), &uid, &trouble, &mut faults, &mut absences);
            let cause = Cause::waiting("RuntimeNotReady", &trouble.message, "runtime-shim");
            let news = note_wait(&agent, &uid, StepName::Sandbox, "", cause);
            agent.note(&uid, |ledger, at| ledger.retried_at(after(at.now_unix_nanos, delay), at));
            unreadable(&agent, &uid, &trouble, news);
            tokio::select! {
                () = agent.context.shutdown.cancelled() => return,
                () = tokio::time::sleep(delay) => continue,
            }
        }
        let told = agent.with_life(&uid, life, |e| e.news.take()).unwrap_or_default();
        let (began, began_unix_nanos) = (Instant::now(), now_unix_nanos());
        let Some(job) = job_of(&agent, &uid, life) else { return };
        let result = Box::pin(turn(&agent, &job)).await;
        agent.keep_backoff(&uid);
        let (outcome, wait) = match result {
            Ok(turn) => {
                faults.reset();
                absences.reset();
                (turn.outcome, until(resync(&agent), turn.next_unix_nanos))
            }
            Err(trouble) => {
                agent.with(&uid, |e| e.freshness.ask());
                let delay = delay_of(resync(&agent), &uid, &trouble, &mut faults, &mut absences);
                agent.note(&uid, |ledger, at| ledger.retried_at(after(at.now_unix_nanos, delay), at));
                (SyncOutcome::Failed, delay)
            }
        };
        agent.note(&uid, |ledger, _| ledger.clear(StepName::Worker, ""));
        let pod = job.wanted.as_ref().map(|w| &*w.pod);
        let begun_in = job.state.phase;
        let Some(transition) = agent.apply_outcome(&uid, (life, begun_in), outcome, pod) else { return };
        measure(&agent, &job, life, told, began);
        if transition.ended
            && let Some(wanted) = &job.wanted
        {
            agent.release_name(&wanted.pod);
        }
        // What an earlier process left is forgotten only when the sources have spoken.
        if transition.forget && agent.with_life(&uid, life, |e| e.restored) != Some(true) {
            agent.forget(&uid, life);
            return;
        }
        let moved_on = transition.state.phase != begun_in;
        if moved_on && transition.state.phase == WorkerPhase::Finished {
            agent.with_life(&uid, life, |entry| crate::desires::want(&agent, entry));
        }
        if transition.work.is_some() || moved_on || outcome == SyncOutcome::Cancelled {
            continue;
        }
        let wait = until(wait, deadline_after(&agent, &job, began_unix_nanos));
        // Cancel-safe: a notification that comes meanwhile is kept.
        tokio::select! {
            () = agent.context.shutdown.cancelled() => return,
            () = wake.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Waits while a neighbour is away: from 100 ms to 5 s (§4), as no wait is shorter than half of its back-off.
const fn absences() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(5))
}

/// Measures a turn. One that has only found out that its pod may not begin yet leaves to the next what it was told.
fn measure(agent: &Agent, job: &Job, life: u64, told: News, began: Instant) {
    if current_work(&job.state).is_none() {
        return;
    }
    let counted = agent.with_life(&job.uid, life, |entry| {
        if !entry.state.started {
            entry.news.left(told);
            return None;
        }
        Some(Operation::of_turn(told.operation(), job.state.phase, entry.start))
    });
    if let Some(Some(counted)) = counted {
        agent.metrics.pods.turn(counted, told.since(counted, began).elapsed());
    }
}

/// A read that the runtime answers with an error is an event of the pod (§6.4); a runtime that is away is none.
fn unreadable(agent: &Agent, uid: &str, trouble: &Trouble, news: bool) {
    let pod = agent.with(uid, |e| e.wanted.as_ref().map(|w| Arc::clone(&w.pod))).flatten();
    if let Some(pod) = pod.filter(|_| news && !trouble.neighbour) {
        let text = format!("error determining status: {}", trouble.message);
        agent.context.events.warning(object_of(&pod), "FailedSync", text);
    }
}

/// Reads the pod anew if what is known of it may be wrong. What makes it doubtful again meanwhile is left to
/// the next turn.
async fn refresh(agent: &Agent, uid: &str) -> Result<(), Trouble> {
    let Some(due) = agent.with(uid, |e| e.freshness.due()).flatten() else { return Ok(()) };
    Box::pin(sync::read(agent, uid)).await?;
    agent.with(uid, |e| e.freshness.answered(due));
    Ok(())
}

fn job_of(agent: &Agent, uid: &str, life: u64) -> Option<Job> {
    agent.with_life(uid, life, |entry| Job {
        uid: uid.to_owned(),
        state: entry.state.clone(),
        wanted: entry.wanted.clone(),
        observed: Arc::clone(&entry.observed),
        cancel: entry.cancel.clone(),
    })
}

/// How long a worker waits before it looks again although nothing has come: `syncFrequency`, spread.
fn resync(agent: &Agent) -> Duration {
    Duration::from_millis(agent.context.config.pods.sync_frequency_ms).mul_f64(1.0 + fastrand::f64() / 2.0)
}

fn until(resync: Duration, next_unix_nanos: Option<i64>) -> Duration {
    match next_unix_nanos {
        None => resync,
        Some(at) => {
            let left = u64::try_from(at.saturating_sub(now_unix_nanos())).unwrap_or(0);
            Duration::from_nanos(left).min(resync)
        }
    }
}

/// The end of the pod's active deadline (§17), if a turn that began then could not see it.
fn deadline_after(agent: &Agent, job: &Job, began_unix_nanos: i64) -> Option<i64> {
    let wanted = job.wanted.as_ref().filter(|_| job.state.phase == WorkerPhase::Sync)?;
    let deadline = agent.with(&job.uid, |e| deadline_unix_nanos(&wanted.pod, &e.status)).flatten();
    deadline.filter(|deadline| *deadline > began_unix_nanos)
}

fn after(now_unix_nanos: i64, delay: Duration) -> i64 {
    now_unix_nanos.saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX))
}

fn delay_of(
    resync: Duration,
    uid: &str,
    trouble: &Trouble,
    faults: &mut Backoff,
    absences: &mut Backoff,
) -> Duration {
    let delay = match trouble.retry_unix_nanos {
        Some(at) => until(resync, Some(at)).max(Duration::from_millis(10)),
        None if trouble.neighbour => absences.next_delay(),
        None => faults.next_delay(),
    };
    tracing::warn!(
        uid,
        retry_ms = delay.as_millis() as u64,
        error = trouble.message,
        "a turn failed, will retry"
    );
    delay
}

async fn turn(agent: &Arc<Agent>, job: &Job) -> Result<Turn, Trouble> {
    match current_work(&job.state) {
        None => Ok(Turn::of(SyncOutcome::Done)),
        Some(Work::Sync) => match &job.wanted {
            Some(wanted) => sync::sync(agent, job, wanted).await,
            None => Ok(Turn::of(SyncOutcome::Done)),
        },
        Some(Work::Terminate { .. } | Work::TerminateOrphan { .. }) => stop::terminate(agent, job).await,
        Some(Work::Clean) => stop::clean(agent, job).await,
    }
}

/// What a status is made from beside the entry itself.
#[derive(Debug, Default)]
pub struct Facts<'a> {
    /// No container will be started any more.
    pub pod_is_terminal: bool,
    /// What the last decision holds back.
    pub waiting: &'a [ContainerWait],
    /// The sandbox has just been made.
    pub sandbox_made: Option<bool>,
    /// Everything is released: the last status.
    pub finished: bool,
}

/// The family of the node's primary address, asked only for a pod whose addresses it puts in order.
fn v4_first(agent: &Agent, observed: &PodObservation) -> Option<bool> {
    let several = observed.pod_ips().len() > 1;
    several.then(|| node_ips(agent).first().map(|ip| !ip.contains(':'))).flatten()
}

/// Makes the status of a pod and publishes it if it says something new. Its phase is terminal: true.
pub fn publish(agent: &Agent, uid: &str, facts: &Facts<'_>) -> bool {
    let at = agent.moment();
    let (runtime, recursive_read_only) = {
        let runtime = agent.runtime.borrow();
        (runtime.name.clone(), runtime.recursive_read_only)
    };
    let made = agent.with(uid, |entry| {
        let wanted = entry.wanted.clone()?;
        entry.stopped |= facts.pod_is_terminal;
        entry.released |= facts.finished;
        if entry.rejected {
            if facts.finished {
                entry.version += 1;
                agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
            }
            return Some((true, false));
        }
        let old = (entry.version > 0 || !entry.status.phase.is_empty()).then(|| Arc::clone(&entry.status));
        let inputs = StatusInputs {
            pod_is_terminal: facts.pod_is_terminal,
            failures: entry.reasons.clone(),
            readiness: readiness(&wanted.pod, &entry.observed, old.as_deref(), &entry.probes.book),
            waiting: facts.waiting,
            pod_ready_to_start: facts.sandbox_made,
            runtime_name: if runtime.is_empty() { "containerd" } else { &runtime },
            held: entry.held.as_ref(),
            resize_refused: entry.resize_refused,
            patch: entry.state.status_patch.as_ref(),
            recursive_read_only,
            v4_first: v4_first(agent, &entry.observed),
            ..StatusInputs::default()
        };
        let mut status = generate_status(&wanted.pod, &entry.observed, old.as_deref(), &inputs, &at);
        if facts.finished {
            status = final_status(&wanted.pod, &status, &at);
        }
        let terminal = status.phase().is_terminal();
        let first = entry.version == 0;
        match accept_status(&wanted.pod, old.as_deref(), status, facts.finished || first, &at) {
            Accepted::Stored { status, newly_terminated } => {
                agent.metrics.ended(&newly_terminated);
                let has_failed = |status: &PodStatus| status.phase() == PodPhase::Failed;
                if has_failed(&status) && status.reason == DEADLINE && !old.as_deref().is_some_and(has_failed)
                {
                    agent.context.events.normal(
                        object_of(&wanted.pod),
                        DEADLINE,
                        DEADLINE_MESSAGE.to_owned(),
                    );
                }
                if entry.start.shown(status.phase()) {
                    agent.metrics.pods.runs(&wanted.pod, &at);
                    let pulls = std::mem::take(&mut entry.pulls);
                    let took = start_time(&wanted.pod, &entry.observed, &pulls, at.now_unix_nanos);
                    agent.metrics.pods.took(took, wanted.pod.is_host_network());
                    // A moment and no time: what comes before it is the start.
                    let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "pod runs");
                    keelson_telemetry::set_parent(&span, &wanted.traceparent);
                }
                entry.status = Arc::new(*status);
                entry.version += 1;
                agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
                Some((terminal, true))
            }
            Accepted::Unchanged => {
                // That it has stopped is news, too.
                if facts.pod_is_terminal && entry.state.phase == WorkerPhase::Terminating {
                    entry.version += 1;
                    agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
                }
                Some((terminal, false))
            }
            Accepted::Refused { container } => {
                tracing::debug!(uid, container, "a container would come back to life, the old status stays");
                Some((terminal, false))
            }
        }
    });
    let Some(Some((terminal, news))) = made else { return false };
    if news {
        agent.keep(uid);
    }
    terminal
}

fn document(entry: &Entry, wanted: Wanted) -> Document {
    let state = &entry.state;
    // A pod that ran to its end by itself is not being deleted.
    let leaves = state.phase != WorkerPhase::Sync && !state.desired && !entry.released;
    let ending = leaves
        .then_some(state.terminating_since_unix_nanos)
        .flatten()
        .map(|since| (since, state.grace_seconds.unwrap_or(0)));
    let finished = entry.released || (state.phase == WorkerPhase::Finished && !entry.again);
    let over = matches!(state.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
    let stopped = entry.stopped || finished || over || entry.rejected;
    Document { wanted, status: Arc::clone(&entry.status), version: entry.version, finished, stopped, ending }
}

/// Publishes the document as it is now, for a change that is not in the status: the pod begins to end.
pub fn republish(agent: &Agent, uid: &str) {
    agent.with(uid, |entry| {
        entry.version += 1;
        if let Some(wanted) = entry.wanted.clone() {
            agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
        }
    });
}

/// Puts a status in place that no observation leads to: a rejection.
pub fn publish_as_is(agent: &Agent, uid: &str, status: keelson_kube_model::PodStatus) {
    agent.with(uid, |entry| {
        entry.rejected = true;
        entry.status = Arc::new(status);
        entry.version += 1;
        if let Some(wanted) = entry.wanted.clone() {
            agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
        }
    });
    agent.keep(uid);
}

/// A pod that has just been taken in shows at once, Pending as it may be. An adopted one keeps the status
/// that it had: it is published as it was, and changes only when the runtime has been read.
pub fn publish_first(agent: &Agent, uid: &str) {
    let stored = agent.with(uid, |entry| {
        if entry.version > 0 || entry.status.phase.is_empty() {
            return entry.version > 0;
        }
        entry.version = 1;
        if let Some(wanted) = entry.wanted.clone() {
            agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
        }
        true
    });
    if stored == Some(false) {
        publish(agent, uid, &Facts::default());
    } else {
        agent.with(uid, |entry| {
            if let Some(wanted) = entry.wanted.clone() {
                agent.documents.set(uid.to_owned(), Arc::new(document(entry, wanted)));
            }
        });
    }
}

/// Notes how a step stands. Whether that is news.
pub fn note_wait(agent: &Agent, uid: &str, step: StepName, subject: &str, cause: Cause) -> bool {
    agent.note(uid, |ledger, at| ledger.set(step, subject, cause, at)) == Some(true)
}

/// The name for logs.
pub fn name_of(pod: &Pod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_neighbour_waits_100_ms_to_5_s_each_time() {
        let away = Trouble { neighbour: true, ..Trouble::fault("the runtime is away") };
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(5));
        for _ in 0..100 {
            let (mut faults, mut absences) = (Backoff::reconnect(), absences());
            let mut delay = || delay_of(Duration::MAX, "u", &away, &mut faults, &mut absences);
            let delays: Vec<Duration> = (0..12).map(|_| delay()).collect();
            assert!(delays.iter().all(|delay| (least..=most).contains(delay)), "{delays:?}");
            assert!(delays[0] <= 2 * least && delays[11] >= most / 2, "{delays:?}");
        }
    }
}
