//! The probes of the pods: one task per container and kind, beside the pod's worker (pod-lifecycle.md §13).
//!
//! A task asks the core when a probe is due, makes it, and hands the outcome to the core. What turns is shown at
//! once; a restart is decided by the pod's worker, which is woken. No task outlives its entry.

pub mod handlers;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use keelson_kube_model::{ContainerKind, Pod};
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::observation::PodObservation;
use keelson_pod_sync_core::probe::{
    Judged, Look, Next, ProbeBook, ProbeKind, ProbeState, ProbeTimes, Was, cut, started, unready_cause, was,
};
use keelson_pod_sync_core::worker::WorkerPhase;
use keelson_service_kit::{Fairness, Turns};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::agent::{Agent, Entry};
use crate::cluster::has_cluster;
use crate::metrics::{ProbeOutcome, ProbeSeries};
use crate::probes::handlers::{Call, Outcome};
use crate::start::node_ips;
use crate::sync::{container_object, show};
use crate::worker::Job;

/// Commands that run in containers at the same time, for probes.
const EXEC_PROBES: usize = 16;
/// Connections that probes have at the same time.
const NETWORK_PROBES: usize = 64;
/// Who has one probe more than a pod that waits loses one after a second; where all have the same, each keeps its turn for 5 s.
const FAIRNESS: Fairness = Fairness { patience: Duration::from_secs(1), kept: Duration::from_secs(5) };
/// Bytes of an outcome that an event carries: what the API takes.
const EVENT_TEXT: usize = 1000;
/// How long a task that waits for something else sleeps at most, for what nobody thought of.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// How many probes are made at the same time, of all pods.
#[derive(Debug)]
pub struct Probing {
    /// Commands.
    pub exec: Arc<Turns>,
    /// Connections.
    pub network: Arc<Turns>,
}

impl Default for Probing {
    fn default() -> Self {
        Self { exec: Turns::new(EXEC_PROBES, FAIRNESS), network: Turns::new(NETWORK_PROBES, FAIRNESS) }
    }
}

/// The probes of one UID.
#[derive(Debug, Default)]
pub struct Probes {
    /// Where each stands.
    pub book: ProbeBook,
    tasks: BTreeMap<(String, ProbeKind), Task>,
}

impl Probes {
    /// What they depend on has changed.
    pub fn wake(&self) {
        self.tasks.values().for_each(|task| task.wake.notify_one());
    }

    /// Nothing of the pod runs any more.
    pub fn end(&mut self) {
        self.tasks.clear();
    }

    /// Why a container that runs is not ready.
    pub fn unready(entry: &Entry, pod: &Pod, name: &str) -> Option<Cause> {
        let record = entry.observed.current(name).filter(|r| r.is_running())?;
        let (kind, container) = pod.container(name)?;
        let probed = matches!(kind, ContainerKind::Regular | ContainerKind::Sidecar);
        probed.then(|| unready_cause(container, record, Some(&entry.status), &entry.probes.book)).flatten()
    }
}

#[derive(Debug)]
struct Task {
    wake: Arc<Notify>,
    handle: AbortHandle,
    /// What is counted goes with the task.
    _series: Arc<ProbeSeries>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// Whom a task probes.
#[derive(Debug, Clone)]
struct Who {
    uid: String,
    life: u64,
    key: (String, ProbeKind),
}

/// What a task does next.
enum Step {
    Probe(Box<Call>),
    Wait(Duration),
    Keep,
    Hold,
}

/// Begins the probes of a pod that are not there yet (§8.1, step 13).
pub fn ensure(agent: &Arc<Agent>, job: &Job) {
    let Some(wanted) = &job.wanted else { return };
    let containers = wanted.pod.containers().filter(|(kind, _)| {
        // Ephemeral containers and those that end have none.
        matches!(kind, ContainerKind::Regular | ContainerKind::Sidecar)
    });
    let keys: Vec<(String, ProbeKind)> = containers
        .flat_map(|(_, c)| {
            ProbeKind::ALL.into_iter().filter(move |k| k.of(c).is_some()).map(move |k| (c.name.clone(), k))
        })
        .collect();
    if keys.is_empty() {
        return;
    }
    agent.with(&job.uid, |entry| {
        let life = entry.life;
        for key in keys {
            let there = entry.probes.tasks.get(&key).is_some_and(|task| !task.handle.is_finished());
            if there || entry.state.phase != WorkerPhase::Sync {
                continue;
            }
            entry.probes.book.entry(key.clone()).or_insert_with(|| ProbeState::new(key.1));
            let wake = Arc::new(Notify::new());
            let who = Who { uid: job.uid.clone(), life, key: key.clone() };
            let series = Arc::new(agent.metrics.probe(&wanted.pod, &key.0, key.1));
            let task = follow(Arc::clone(agent), who, Arc::clone(&wake), Arc::downgrade(&series));
            let handle = tokio::spawn(task).abort_handle();
            entry.probes.tasks.insert(key, Task { wake, handle, _series: series });
        }
    });
}

async fn follow(agent: Arc<Agent>, who: Who, wake: Arc<Notify>, series: Weak<ProbeSeries>) {
    let (mut due, mut held) = (Instant::now(), true);
    // When the next probe is due that is not an early one.
    let mut regular = due;
    loop {
        let now = Instant::now();
        let step = next_step(&agent, &who, held || now >= due);
        held = false;
        match step {
            None => return,
            Some(Step::Keep) => {}
            Some(Step::Wait(wait)) => due = now + wait,
            // Whatever ends the hold wakes the task; the time is only for what nobody thought of.
            Some(Step::Hold) => (due, held) = (now + LOOK_AGAIN, true),
            Some(Step::Probe(call)) => {
                let period = u64::try_from(call.times.period_seconds).unwrap_or(1);
                if !call.early {
                    regular = now + Duration::from_secs(period);
                }
                let note = |text: &str| note_crowd(&agent, &who, &call, text);
                let outcome = Box::pin(handlers::run(&agent, &call, &note)).await;
                let took = now.elapsed();
                if let Some(series) = series.upgrade() {
                    count(&series, &outcome, took);
                }
                take(&agent, &who, &call, &outcome);
                due = plan_early(&agent, &who, &call, took, regular).unwrap_or(regular);
                continue;
            }
        }
        // Cancel-safe: a notification that comes meanwhile is kept.
        tokio::select! {
            () = agent.context.shutdown.cancelled() => return,
            () = wake.notified() => {}
            () = tokio::time::sleep_until(due) => {}
        }
    }
}

/// When an early probe is due, if one is due before the next regular one.
fn plan_early(agent: &Agent, who: &Who, call: &Call, took: Duration, regular: Instant) -> Option<Instant> {
    let (now, at) = (Instant::now(), agent.moment());
    let nanos = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let left = nanos(regular.saturating_duration_since(now));
    let plan = |entry: &mut Entry| {
        let state = entry.probes.book.get_mut(&who.key)?;
        let regular = at.now_unix_nanos.saturating_add(left);
        let wait = state.plan_early(who.key.1, nanos(took), regular, &at);
        if wait.is_none() && state.next_unix_nanos != 0 {
            state.next_unix_nanos = regular;
        }
        explain(entry, call, &at);
        wait
    };
    let wait = agent.with_life(&who.uid, who.life, plan).flatten()?;
    Some(now + Duration::from_nanos(u64::try_from(wait).unwrap_or(0)))
}

/// Whether a probe of this kind has anything to say while the pod ends: readiness is told to the last (§8.2).
fn has_ended(entry: &Entry, kind: ProbeKind) -> bool {
    match entry.state.phase {
        WorkerPhase::Sync => false,
        WorkerPhase::Terminating => kind != ProbeKind::Readiness,
        WorkerPhase::Terminated | WorkerPhase::Finished => true,
    }
}

/// `None`: there is nothing to probe any more.
fn next_step(agent: &Agent, who: &Who, due: bool) -> Option<Step> {
    let at = agent.moment();
    agent.with_life(&who.uid, who.life, |entry| look(agent, entry, who, due, &at)).flatten()
}

fn look(agent: &Agent, entry: &mut Entry, who: &Who, due: bool, at: &Moment) -> Option<Step> {
    let (name, kind) = (&who.key.0, who.key.1);
    if has_ended(entry, kind) {
        return None;
    }
    let pod = Arc::clone(&entry.wanted.as_ref()?.pod);
    let (_, container) = pod.container(name)?;
    let times = ProbeTimes::of(kind.of(container)?);
    let observed = Arc::clone(&entry.observed);
    let running = observed.current(name).filter(|r| r.is_running());
    let (old, book) = (Some(&*entry.status), &entry.probes.book);
    let before = running.map_or_else(Was::default, |record| was(old, record));
    let started = running.is_some_and(|record| started(container, record, old, book));
    let address = address(agent, entry, &pod, &observed);
    let state = entry.probes.book.get_mut(&who.key)?;
    let look = Look { running, started, was: before, due, spread: fastrand::f64(), at };
    Some(match state.look(kind, &times, &look) {
        Next::Keep => Step::Keep,
        Next::Hold => Step::Hold,
        Next::After(nanos) => Step::Wait(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))),
        Next::Probe => {
            state.next_unix_nanos = at.now_unix_nanos.saturating_add(times.period_nanos());
            let (id, early) = (state.container_id.clone(), state.take_early());
            Step::Probe(Box::new(Call { container: name.clone(), pod, kind, id, times, address, early }))
        }
    })
}

/// Where a pod answers: its own address, or for a pod on the node's network the node's in its cluster, loopback without one.
pub fn address(agent: &Agent, entry: &Entry, pod: &Pod, observed: &PodObservation) -> String {
    if let Some(own) = observed.pod_ips().into_iter().next() {
        return own;
    }
    let of_node = || node_ips(agent).into_iter().next().filter(|_| has_cluster(&agent.context.config));
    match (pod.is_host_network(), entry.status.pod_ip.as_str()) {
        (true, "") => of_node().unwrap_or_else(|| "127.0.0.1".to_owned()),
        (true, known) => known.to_owned(),
        (false, _) => String::new(),
    }
}

/// Shows who keeps a probe waiting for its turn; nobody with an empty text.
fn note_crowd(agent: &Agent, who: &Who, call: &Call, text: &str) {
    let at = agent.moment();
    agent.with_life(&who.uid, who.life, |entry| {
        if let Some(state) = entry.probes.book.get_mut(&who.key) {
            text.clone_into(&mut state.crowded);
            explain(entry, call, &at);
        }
    });
}

/// A probe that nobody could make, because a neighbour is away, is none.
fn count(series: &ProbeSeries, outcome: &Outcome, within: Duration) {
    let counted = match outcome {
        Outcome::Success | Outcome::Warning(_) => ProbeOutcome::Successful,
        Outcome::Failure(_) => ProbeOutcome::Failed,
        Outcome::Error(_) => ProbeOutcome::Unknown,
        Outcome::Away(_) => return,
        Outcome::Cut => return series.cut(),
    };
    series.made(counted, within);
}

/// What an outcome leads to: counters, a line in `explain`, an event, and what turned.
fn take(agent: &Agent, who: &Who, call: &Call, outcome: &Outcome) {
    let at = agent.moment();
    let judged = agent.with_life(&who.uid, who.life, |entry| {
        if has_ended(entry, call.kind) {
            return None;
        }
        let state = entry.probes.book.get_mut(&who.key)?;
        if state.container_id != call.id {
            return None;
        }
        let mut judge = |success, text: &str| state.judge(call.kind, &call.times, &call.id, success, text);
        let judged = match outcome {
            Outcome::Failure(text) | Outcome::Error(text) if call.early => {
                state.errored(&call.id, text);
                Judged::default()
            }
            Outcome::Success | Outcome::Warning(_) => judge(true, ""),
            Outcome::Failure(text) => judge(false, text),
            Outcome::Error(text) => {
                state.errored(&call.id, text);
                Judged::default()
            }
            // It says nothing of the container.
            Outcome::Away(_) | Outcome::Cut => return None,
        };
        explain(entry, call, &at);
        if judged.changed {
            // The others wait for the end of the startup.
            entry.probes.wake();
        }
        Some(judged)
    });
    let Some(judged) = judged.flatten() else { return };
    if !call.early || matches!(outcome, Outcome::Warning(_)) {
        tell(agent, call, outcome);
    }
    if !judged.keep {
        return;
    }
    if judged.changed {
        tracing::info!(
            pod = crate::worker::name_of(&call.pod),
            container = call.container,
            probe = call.kind.as_str(),
            "a probe's result turned: {outcome:?}"
        );
        show(agent, &who.uid);
        if call.kind != ProbeKind::Readiness {
            agent.wake(&who.uid);
        }
    }
    agent.keep(&who.uid);
}

/// Says in the ledger whether the container that runs is ready, and if not why.
fn explain(entry: &mut Entry, call: &Call, at: &Moment) {
    let runs =
        entry.observed.current(&call.container).is_some_and(|r| r.id.as_str() == call.id && r.is_running());
    if !runs || entry.state.phase != WorkerPhase::Sync {
        return;
    }
    let cause = Probes::unready(entry, &call.pod, &call.container);
    let cause = cause.unwrap_or_else(|| Cause::done("runtime-shim"));
    entry.ledger.set(StepName::Container, &call.container, cause, at);
}

fn tell(agent: &Agent, call: &Call, outcome: &Outcome) {
    let kind = call.kind.as_str();
    let (reason, text) = match outcome {
        Outcome::Success | Outcome::Away(_) | Outcome::Cut => return,
        Outcome::Warning(text) => ("ProbeWarning", format!("{kind} probe warning: {text}")),
        Outcome::Failure(text) => ("Unhealthy", format!("{kind} probe failed: {text}")),
        Outcome::Error(text) => {
            ("Unhealthy", format!("{kind} probe errored and resulted in unknown state: {text}"))
        }
    };
    let list = call.pod.container(&call.container).map_or(ContainerKind::Regular, |(kind, _)| kind);
    let object = container_object(&call.pod, list, &call.container);
    agent.context.events.warning(object, reason, cut(&text, EVENT_TEXT));
}
