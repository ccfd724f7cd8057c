//! The probes of the pods: one task per container and kind of probe, beside the pod's worker (pod-lifecycle.md §13).
//!
//! A task asks the core when a probe is due, runs it, and hands the outcome to the core. A changed result is published at once; the
//! pod's worker is woken and decides about a restart. No task outlives the state of its pod.

use std::sync::{Arc, Weak};
use std::time::Duration;

use keelson_kube_model::ContainerKind;
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::probe::{
    NextProbe, OutcomeChange, PreviousStatus, ProbeInputs, ProbeKind, ProbeState, ProbeTimes, cut,
    previous_status, started,
};
use keelson_pod_sync_core::worker::WorkerPhase;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::effects::endpoint::pod_address;
use crate::effects::probe_handlers::{Call, Outcome};
use crate::effects::{Effects, probe_handlers};
use crate::publish::metrics::{ProbeOutcome, ProbeSeries};
use crate::publish::objects::{container_object, pod_name};
use crate::state::pod_state::PodState;
use crate::state::probe_tasks::ProbeTask;
use crate::turn::Job;
use crate::turn::decide::publish_decision;

/// The most bytes of an outcome in an event; the API takes no more.
const EVENT_TEXT: usize = 1000;
/// How long a held task sleeps at most. Whatever ends the hold wakes it; this is a safety net.
const HOLD_LIMIT: Duration = Duration::from_secs(60);

/// What a task probes.
#[derive(Debug, Clone)]
struct ProbeTarget {
    uid: String,
    incarnation: u64,
    key: (String, ProbeKind),
}

impl ProbeTarget {
    /// The state of the probe.
    fn state_in<'a>(&self, pod: &'a mut PodState) -> Option<&'a mut ProbeState> {
        pod.probes.states.get_mut(&self.key.0, self.key.1)
    }
}

/// What a task does next.
enum Step {
    Probe(Box<Call>),
    Wait(Duration),
    Keep,
    Hold,
}

/// Starts the tasks of a pod's probes that do not run yet (§8.1, step 13).
pub fn ensure(effects: &Arc<Effects>, job: &Job) {
    let Some(desired) = &job.desired else { return };
    let containers = desired.pod.containers().filter(|(kind, _)| {
        // Init containers and ephemeral containers have no probes.
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
    effects.registry.with(&job.uid, |state| {
        let incarnation = state.incarnation;
        for key in keys {
            if state.probes.runs(&key) || state.worker.phase != WorkerPhase::Sync {
                continue;
            }
            state.probes.states.add(&key.0, key.1);
            let wake = Arc::new(Notify::new());
            let target = ProbeTarget { uid: job.uid.clone(), incarnation, key: key.clone() };
            let series = Arc::new(effects.publisher.metrics.probe(&desired.pod, &key.0, key.1));
            let task = follow(Arc::clone(effects), target, Arc::clone(&wake), Arc::downgrade(&series));
            let handle = keelson_service_kit::spawn("probe", task).abort_handle();
            state.probes.add(key, ProbeTask { wake, handle, series });
        }
    });
}

async fn follow(effects: Arc<Effects>, target: ProbeTarget, wake: Arc<Notify>, series: Weak<ProbeSeries>) {
    let (mut due, mut held) = (Instant::now(), true);
    // When the next regular probe is due, in contrast to an early one.
    let mut regular = due;
    loop {
        let now = Instant::now();
        let step = next_step(&effects, &target, held || now >= due);
        held = false;
        match step {
            None => return,
            Some(Step::Keep) => {}
            Some(Step::Wait(wait)) => due = now + wait,
            Some(Step::Hold) => (due, held) = (now + HOLD_LIMIT, true),
            Some(Step::Probe(call)) => {
                let period = u64::try_from(call.times.period_seconds).unwrap_or(1);
                if !call.early {
                    regular = now + Duration::from_secs(period);
                }
                let note = |text: &str| show_wait(&effects, &target, &call, text);
                let outcome = Box::pin(probe_handlers::run(&effects, &call, &note)).await;
                let took = now.elapsed();
                if let Some(series) = series.upgrade() {
                    count(&series, &outcome, took);
                }
                apply(&effects, &target, &call, &outcome);
                due = plan_early(&effects, &target, &call, took, regular).unwrap_or(regular);
                continue;
            }
        }
        // Cancel-safe: a notification is kept.
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return,
            () = wake.notified() => {}
            () = tokio::time::sleep_until(due) => {}
        }
    }
}

/// When an early probe is due, if one is due before the next regular one.
fn plan_early(
    effects: &Effects,
    target: &ProbeTarget,
    call: &Call,
    took: Duration,
    regular: Instant,
) -> Option<Instant> {
    let (now, at) = (Instant::now(), effects.registry.moment());
    let nanos = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let left = nanos(regular.saturating_duration_since(now));
    let plan = |state: &mut PodState| {
        let probe = target.state_in(state)?;
        let regular = at.now_unix_nanos.saturating_add(left);
        let wait = probe.plan_early(target.key.1, nanos(took), regular, &at);
        if wait.is_none() && probe.next_unix_nanos != 0 {
            probe.next_unix_nanos = regular;
        }
        explain(state, call, &at);
        wait
    };
    let wait = effects.registry.with_incarnation(&target.uid, target.incarnation, plan).flatten()?;
    Some(now + Duration::from_nanos(u64::try_from(wait).unwrap_or(0)))
}

/// Whether probes of this kind have ended: readiness probes run while the pod terminates (§8.2).
fn has_ended(state: &PodState, kind: ProbeKind) -> bool {
    match state.worker.phase {
        WorkerPhase::Sync => false,
        WorkerPhase::Terminating => kind != ProbeKind::Readiness,
        WorkerPhase::Terminated | WorkerPhase::Finished => true,
    }
}

/// What to do next; `None`: there is nothing to probe any more.
fn next_step(effects: &Effects, target: &ProbeTarget, due: bool) -> Option<Step> {
    let at = effects.registry.moment();
    effects
        .registry
        .with_incarnation(&target.uid, target.incarnation, |state| {
            decide_step(effects, state, target, due, &at)
        })
        .flatten()
}

fn decide_step(
    effects: &Effects,
    state: &mut PodState,
    target: &ProbeTarget,
    due: bool,
    at: &Moment,
) -> Option<Step> {
    let (name, kind) = (&target.key.0, target.key.1);
    if has_ended(state, kind) {
        return None;
    }
    let pod = Arc::clone(&state.desired.as_ref()?.pod);
    let (_, container) = pod.container(name)?;
    let times = ProbeTimes::of(kind.of(container)?);
    let observed = Arc::clone(&state.runtime.observed);
    let running = observed.current(name).filter(|r| r.is_running());
    let (old, states) = (Some(&*state.published.status), &state.probes.states);
    let before = running.map_or_else(PreviousStatus::default, |record| previous_status(old, record));
    let started = running.is_some_and(|record| started(container, record, old, states));
    let address = pod_address(&effects.registry.node, &effects.context.config, state, &pod);
    let probe = target.state_in(state)?;
    let inputs = ProbeInputs { running, started, previous: before, due, spread: fastrand::f64(), at };
    Some(match probe.next_probe(kind, &times, &inputs) {
        NextProbe::Keep => Step::Keep,
        NextProbe::Hold => Step::Hold,
        NextProbe::After(nanos) => Step::Wait(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))),
        NextProbe::Probe => {
            probe.next_unix_nanos = at.now_unix_nanos.saturating_add(times.period_nanos());
            let (id, early) = (probe.container_id.clone(), probe.take_early());
            Step::Probe(Box::new(Call { container: name.clone(), pod, kind, id, times, address, early }))
        }
    })
}

/// Shows in the pod's steps why a probe waits for its turn; an empty text: it does not wait.
fn show_wait(effects: &Effects, target: &ProbeTarget, call: &Call, text: &str) {
    let at = effects.registry.moment();
    effects.registry.with_incarnation(&target.uid, target.incarnation, |state| {
        if let Some(probe) = target.state_in(state) {
            text.clone_into(&mut probe.turn_wait);
            explain(state, call, &at);
        }
    });
}

/// Counts a probe, unless it could not run because a service is unavailable.
fn count(series: &ProbeSeries, outcome: &Outcome, within: Duration) {
    let counted = match outcome {
        Outcome::Success | Outcome::Warning(_) => ProbeOutcome::Successful,
        Outcome::Failure(_) => ProbeOutcome::Failed,
        Outcome::Error(_) => ProbeOutcome::Unknown,
        Outcome::Unavailable(_) => return,
        Outcome::Cut => return series.cut(),
    };
    series.made(counted, within);
}

/// Applies an outcome: result, step for `explain`, event, and what follows from a changed result.
fn apply(effects: &Effects, target: &ProbeTarget, call: &Call, outcome: &Outcome) {
    let at = effects.registry.moment();
    let change = effects.registry.with_incarnation(&target.uid, target.incarnation, |state| {
        if has_ended(state, call.kind) {
            return None;
        }
        let probe = target.state_in(state)?;
        if probe.container_id != call.id {
            return None;
        }
        let mut record_outcome =
            |success, text: &str| probe.record_outcome(call.kind, &call.times, &call.id, success, text);
        let change = match outcome {
            Outcome::Failure(text) | Outcome::Error(text) if call.early => {
                probe.record_error(&call.id, text);
                OutcomeChange::default()
            }
            Outcome::Success | Outcome::Warning(_) => record_outcome(true, ""),
            Outcome::Failure(text) => record_outcome(false, text),
            Outcome::Error(text) => {
                probe.record_error(&call.id, text);
                OutcomeChange::default()
            }
            // These say nothing about the container.
            Outcome::Unavailable(_) | Outcome::Cut => return None,
        };
        explain(state, call, &at);
        if change.changed {
            // Liveness and readiness probes wait for the startup probe.
            state.probes.wake();
        }
        Some(change)
    });
    let Some(change) = change.flatten() else { return };
    if !call.early || matches!(outcome, Outcome::Warning(_)) {
        report(effects, call, outcome);
    }
    if !change.keep {
        return;
    }
    if change.changed {
        tracing::info!(
            pod = pod_name(&call.pod),
            container = call.container,
            probe = call.kind.as_str(),
            "the result of a probe has changed: {outcome:?}"
        );
        publish_decision(effects, &target.uid);
        if call.kind != ProbeKind::Readiness {
            effects.registry.wake(&target.uid);
        }
    }
    effects.registry.save(&target.uid);
}

/// Updates the step of a running container: ready, or why not.
fn explain(state: &mut PodState, call: &Call, at: &Moment) {
    let runs = state
        .runtime
        .observed
        .current(&call.container)
        .is_some_and(|r| r.id.as_str() == call.id && r.is_running());
    if !runs || state.worker.phase != WorkerPhase::Sync {
        return;
    }
    let cause =
        state.probes.unready(&call.pod, &state.runtime.observed, &state.published.status, &call.container);
    let cause = cause.unwrap_or_else(|| Cause::done("runtime-shim"));
    state.steps.set(StepName::Container, &call.container, cause, at);
}

fn report(effects: &Effects, call: &Call, outcome: &Outcome) {
    let kind = call.kind.as_str();
    let (reason, text) = match outcome {
        Outcome::Success | Outcome::Unavailable(_) | Outcome::Cut => return,
        Outcome::Warning(text) => ("ProbeWarning", format!("{kind} probe warning: {text}")),
        Outcome::Failure(text) => ("Unhealthy", format!("{kind} probe failed: {text}")),
        Outcome::Error(text) => {
            ("Unhealthy", format!("{kind} probe errored and resulted in unknown state: {text}"))
        }
    };
    let list = call.pod.container(&call.container).map_or(ContainerKind::Regular, |(kind, _)| kind);
    let object = container_object(&call.pod, list, &call.container);
    effects.context.events.warning(object, reason, cut(&text, EVENT_TEXT));
}
