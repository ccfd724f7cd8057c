//! One worker per UID. It runs one turn at a time and is woken by changes and by time.

use std::sync::Arc;
use std::time::Duration;

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::status::deadline_unix_nanos;
use keelson_pod_sync_core::worker::{SyncOutcome, Work, WorkerPhase, current_work};
use keelson_service_kit::{Backoff, now_unix_nanos};
use tokio::time::Instant;

use crate::effects::Effects;
use crate::error::SyncError;
use crate::publish::objects::pod_object;
use crate::state::pending_trigger::PendingTrigger;
use crate::state::registry::AfterCleanup;
use crate::turn::{Job, TurnEnd, leftover_cleanup, stop, sync};

/// Why a worker has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerEnd {
    /// The service shuts down, or the incarnation was removed by somebody else.
    Stopped,
    /// Nothing of this incarnation is left to do: it has to be forgotten.
    Forget,
}

/// The retries of one worker.
struct Retries {
    /// After an error of the pod or of what it needs.
    errors: Backoff,
    /// While another service is unavailable.
    unavailable: Backoff,
}

impl Retries {
    fn new() -> Self {
        Self {
            errors: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)),
            unavailable: unavailable_backoff(),
        }
    }

    fn reset(&mut self) {
        self.errors.reset();
        self.unavailable.reset();
    }

    /// How long to wait after this error.
    fn delay(&mut self, resync: Duration, uid: &str, error: &SyncError) -> Duration {
        let delay = match error.retry_unix_nanos {
            Some(at) => until(resync, Some(at)).max(Duration::from_millis(10)),
            None if error.peer_unavailable => self.unavailable.next_delay(),
            None => self.errors.next_delay(),
        };
        tracing::warn!(
            uid,
            retry_ms = delay.as_millis() as u64,
            error = error.message,
            "the turn of a pod failed, will retry"
        );
        delay
    }
}

/// Runs the turns of this incarnation of a UID until it ends.
pub async fn run(effects: Arc<Effects>, uid: String, incarnation: u64) -> WorkerEnd {
    let registry = &effects.registry;
    let Some(wake) = registry.with_incarnation(&uid, incarnation, |e| Arc::clone(&e.wake)) else {
        return WorkerEnd::Stopped;
    };
    let mut retries = Retries::new();
    // The futures of rare steps are boxed, so that a worker that waits, as most do, is small.
    loop {
        match registry.with_incarnation(&uid, incarnation, |e| e.awaits_cleanup) {
            None => return WorkerEnd::Stopped,
            Some(true) => match Box::pin(leftover_cleanup::wait(&effects, &uid, incarnation, &wake)).await {
                AfterCleanup::Stop => return WorkerEnd::Stopped,
                AfterCleanup::Forget => return WorkerEnd::Forget,
                AfterCleanup::Continue => {}
            },
            Some(false) => {}
        }
        if let Err(error) = refresh(&effects, &uid).await {
            let delay = retries.delay(resync(&effects), &uid, &error);
            report_unreadable(&effects, &uid, &error, delay);
            // Cancel-safe: the pod is read again.
            tokio::select! {
                () = effects.context.shutdown.cancelled() => return WorkerEnd::Stopped,
                () = tokio::time::sleep(delay) => continue,
            }
        }
        let wait = match turn(&effects, &uid, incarnation, &mut retries).await {
            After::End(end) => return end,
            After::Again => continue,
            After::Wait(wait) => wait,
        };
        // Cancel-safe: a notification is kept.
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return WorkerEnd::Stopped,
            () = wake.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// What the worker does after a turn.
enum After {
    End(WorkerEnd),
    /// The next turn begins at once.
    Again,
    Wait(Duration),
}

/// Runs one turn and applies its outcome.
async fn turn(effects: &Arc<Effects>, uid: &str, incarnation: u64, retries: &mut Retries) -> After {
    let registry = &effects.registry;
    let trigger = registry.with_incarnation(uid, incarnation, |e| e.pending.take()).unwrap_or_default();
    let (began, began_unix_nanos) = (Instant::now(), now_unix_nanos());
    let Some(job) = job_of(effects, uid, incarnation) else { return After::End(WorkerEnd::Stopped) };
    let result = Box::pin(work(effects, &job)).await;
    registry.save_backoff(uid);
    let (outcome, wait) = match result {
        Ok(end) => {
            retries.reset();
            (end.outcome, until(resync(effects), end.next_unix_nanos))
        }
        Err(error) => {
            registry.with(uid, |e| e.freshness.invalidate());
            let delay = retries.delay(resync(effects), uid, &error);
            registry.update_steps(uid, |steps, at| steps.retried_at(after(at.now_unix_nanos, delay), at));
            (SyncOutcome::Failed, delay)
        }
    };
    registry.update_steps(uid, |steps, _| steps.clear(StepName::Worker, ""));
    let pod = job.desired.as_ref().map(|w| &*w.pod);
    let turn_phase = job.worker.phase;
    let Some(transition) = registry.apply_outcome(uid, (incarnation, turn_phase), outcome, pod) else {
        return After::End(WorkerEnd::Stopped);
    };
    measure(effects, &job, incarnation, trigger, began);
    if transition.ended
        && let Some(desired) = &job.desired
    {
        registry.release_name(&desired.pod);
    }
    // A restored pod is forgotten only when its source has reported.
    if transition.forget && registry.with_incarnation(uid, incarnation, |e| e.restored) != Some(true) {
        return After::End(WorkerEnd::Forget);
    }
    let has_moved_on = transition.state.phase != turn_phase;
    if has_moved_on && transition.state.phase == WorkerPhase::Finished {
        registry.with_incarnation(uid, incarnation, |state| registry.desired_state.update(state));
    }
    if transition.work.is_some() || has_moved_on || outcome == SyncOutcome::Cancelled {
        return After::Again;
    }
    After::Wait(until(wait, deadline_after(effects, &job, began_unix_nanos)))
}

/// The back-off while another service is unavailable: from 100 ms to 5 s (§4), since no wait is shorter than half of its back-off.
const fn unavailable_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(5))
}

/// Measures a turn. One that has only found out that its pod may not start yet gives its trigger back to the next turn.
fn measure(effects: &Effects, job: &Job, incarnation: u64, trigger: PendingTrigger, began: Instant) {
    if current_work(&job.worker).is_none() {
        return;
    }
    let counted = effects.registry.with_incarnation(&job.uid, incarnation, |state| {
        if !state.worker.started {
            state.pending.give_back(trigger);
            return None;
        }
        Some(Operation::of_turn(trigger.operation(), job.worker.phase, state.first_start))
    });
    if let Some(Some(counted)) = counted {
        effects.publisher.metrics.pods.turn(counted, trigger.since(counted, began).elapsed());
    }
}

/// The pod cannot be read from the runtime: its steps say so, and an event does too when the runtime has answered with an error
/// (§6.4). A runtime that does not answer is no event of the pod.
fn report_unreadable(effects: &Effects, uid: &str, error: &SyncError, delay: Duration) {
    let registry = &effects.registry;
    let cause = Cause::waiting("RuntimeNotReady", &error.message, "runtime-shim");
    let is_new = registry.set_step(uid, StepName::Sandbox, "", cause);
    registry.update_steps(uid, |steps, at| steps.retried_at(after(at.now_unix_nanos, delay), at));
    let pod = registry.with(uid, |e| e.desired.as_ref().map(|w| Arc::clone(&w.pod))).flatten();
    if let Some(pod) = pod.filter(|_| is_new && !error.peer_unavailable) {
        let text = format!("error determining status: {}", error.message);
        effects.context.events.warning(pod_object(&pod), "FailedSync", text);
    }
}

/// Reads the pod from the runtime if its observation may be stale. An invalidation during the read is left to the next turn.
async fn refresh(effects: &Effects, uid: &str) -> Result<(), SyncError> {
    let Some(token) = effects.registry.with(uid, |e| e.freshness.stale()).flatten() else { return Ok(()) };
    Box::pin(effects.read_pod(uid)).await?;
    effects.registry.with(uid, |e| e.freshness.refreshed(token));
    Ok(())
}

fn job_of(effects: &Effects, uid: &str, incarnation: u64) -> Option<Job> {
    effects.registry.with_incarnation(uid, incarnation, |state| Job {
        uid: uid.to_owned(),
        worker: state.worker.clone(),
        desired: state.desired.clone(),
        observed: Arc::clone(&state.observed),
        cancel: state.cancel.clone(),
    })
}

/// How long a worker waits for a trigger before it syncs its pod again: `syncFrequency` with jitter.
fn resync(effects: &Effects) -> Duration {
    Duration::from_millis(effects.context.config.pods.sync_frequency_ms).mul_f64(1.0 + fastrand::f64() / 2.0)
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

/// The end of the pod's active deadline (§17), unless it had passed when the turn began.
fn deadline_after(effects: &Effects, job: &Job, began_unix_nanos: i64) -> Option<i64> {
    let desired = job.desired.as_ref().filter(|_| job.worker.phase == WorkerPhase::Sync)?;
    let deadline =
        effects.registry.with(&job.uid, |e| deadline_unix_nanos(&desired.pod, &e.status)).flatten();
    deadline.filter(|deadline| *deadline > began_unix_nanos)
}

fn after(now_unix_nanos: i64, delay: Duration) -> i64 {
    now_unix_nanos.saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX))
}

async fn work(effects: &Arc<Effects>, job: &Job) -> Result<TurnEnd, SyncError> {
    match current_work(&job.worker) {
        None => Ok(TurnEnd::of(SyncOutcome::Done)),
        Some(Work::Sync) => match &job.desired {
            Some(desired) => sync::sync(effects, job, desired).await,
            None => Ok(TurnEnd::of(SyncOutcome::Done)),
        },
        Some(Work::Terminate { .. } | Work::TerminateOrphan { .. }) => stop::terminate(effects, job).await,
        Some(Work::Clean) => stop::clean(effects, job).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_while_a_service_is_unavailable_take_100_ms_to_5_s() {
        let error = SyncError::unavailable("the runtime does not answer");
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(5));
        for _ in 0..100 {
            let mut retries = Retries::new();
            let delays: Vec<Duration> = (0..12).map(|_| retries.delay(Duration::MAX, "u", &error)).collect();
            assert!(delays.iter().all(|delay| (least..=most).contains(delay)), "{delays:?}");
            assert!(delays[0] <= 2 * least && delays[11] >= most / 2, "{delays:?}");
        }
    }
}
