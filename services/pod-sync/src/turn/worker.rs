//! One worker per UID. It runs one turn at a time and is woken by changes and by time.

use std::sync::Arc;
use std::time::Duration;

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::status::deadline_unix_nanos;
use keelson_pod_sync_core::worker::{SyncOutcome, Work, WorkerPhase, current_work};
use keelson_service_kit::{Backoff, now_unix_nanos};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::effects::Effects;
use crate::error::SyncError;
use crate::publish::objects::pod_object;
use crate::state::pending_trigger::PendingTrigger;
use crate::state::pod_state::PodState;
use crate::state::registry::AfterCleanup;
use crate::turn::{Job, Memory, TurnEnd, leftover_cleanup, stop, sync};

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

/// The worker of one incarnation of a UID.
struct Worker {
    effects: Arc<Effects>,
    uid: Arc<str>,
    incarnation: u64,
    /// Wakes it.
    wake: Arc<Notify>,
    retries: Retries,
    memory: Memory,
    /// Triggers that the last turn took and could not answer.
    unanswered: PendingTrigger,
}

/// What the worker does after a turn.
enum After {
    End(WorkerEnd),
    /// The next turn begins at once.
    Again,
    Wait(Duration),
}

/// How a turn that was measured began.
struct Began {
    at: Instant,
    unix_nanos: i64,
    trigger: PendingTrigger,
}

/// Runs the turns of this incarnation of a UID until it ends.
pub async fn run(effects: Arc<Effects>, uid: Arc<str>, incarnation: u64) -> WorkerEnd {
    let Some(wake) = effects.registry.with_incarnation(&uid, incarnation, |e| e.inbox.waker()) else {
        return WorkerEnd::Stopped;
    };
    let mut worker = Worker::new(effects, uid, incarnation, wake);
    worker.run().await
}

impl Worker {
    fn new(effects: Arc<Effects>, uid: Arc<str>, incarnation: u64, wake: Arc<Notify>) -> Self {
        let (retries, memory, unanswered) = (Retries::new(), Memory::default(), PendingTrigger::default());
        Self { effects, uid, incarnation, wake, retries, memory, unanswered }
    }

    // The futures of its steps are boxed, so that a worker that waits, as most do, is small.
    async fn run(&mut self) -> WorkerEnd {
        loop {
            match self.state(|state| state.awaits_cleanup()) {
                None => return WorkerEnd::Stopped,
                Some(true) => match self.await_cleanup().await {
                    AfterCleanup::Stop => return WorkerEnd::Stopped,
                    AfterCleanup::Forget => return WorkerEnd::Forget,
                    AfterCleanup::Continue => {}
                },
                Some(false) => {}
            }
            if let Err(error) = self.refresh().await {
                let delay = self.retries.delay(resync(&self.effects), &self.uid, &error);
                self.report_unreadable(&error, delay);
                // Cancel-safe: the pod is read again.
                tokio::select! {
                    () = self.effects.context.shutdown.cancelled() => return WorkerEnd::Stopped,
                    () = tokio::time::sleep(delay) => continue,
                }
            }
            let wait = match Box::pin(self.turn()).await {
                After::End(end) => return end,
                After::Again => continue,
                After::Wait(wait) => wait,
            };
            // Cancel-safe: a notification is kept.
            tokio::select! {
                () = self.effects.context.shutdown.cancelled() => return WorkerEnd::Stopped,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Reads or changes the state of this incarnation; `None`: it was removed.
    fn state<T>(&self, access: impl FnOnce(&mut PodState) -> T) -> Option<T> {
        self.effects.registry.with_incarnation(&self.uid, self.incarnation, access)
    }

    async fn await_cleanup(&self) -> AfterCleanup {
        Box::pin(leftover_cleanup::wait(&self.effects, &self.uid, self.incarnation, &self.wake)).await
    }

    /// Reads the pod from the runtime if its observation may be stale. An invalidation during the read is left to the next turn.
    async fn refresh(&self) -> Result<(), SyncError> {
        let stale = self.state(|state| state.runtime.freshness.stale());
        let Some(token) = stale.flatten() else { return Ok(()) };
        Box::pin(self.effects.read_pod(&self.uid)).await?;
        self.state(|state| state.runtime.freshness.refreshed(token));
        Ok(())
    }

    /// Runs one turn and applies its outcome.
    async fn turn(&mut self) -> After {
        let mut trigger = self.state(|state| state.inbox.take_trigger()).unwrap_or_default();
        trigger.give_back(self.unanswered.take());
        let began = Began { at: Instant::now(), unix_nanos: now_unix_nanos(), trigger };
        let Some(job) = self.job() else { return After::End(WorkerEnd::Stopped) };
        let result = work(&self.effects, &job, &mut self.memory).await;
        self.effects.registry.save_backoff(&self.uid);
        let (outcome, wait) = match result {
            Ok(end) => {
                self.retries.reset();
                (end.outcome, until(resync(&self.effects), end.next_unix_nanos))
            }
            Err(error) => (SyncOutcome::Failed, self.retry_after(&error)),
        };
        self.state(|state| state.steps.clear(StepName::Worker, ""));
        self.apply(&job, outcome, wait, began)
    }

    /// When the next turn begins after this error.
    fn retry_after(&mut self, error: &SyncError) -> Duration {
        self.state(|state| state.runtime.freshness.invalidate());
        let delay = self.retries.delay(resync(&self.effects), &self.uid, error);
        self.show_retry(delay);
        delay
    }

    /// The steps of the pod show when they are retried.
    fn show_retry(&self, delay: Duration) {
        let at = self.effects.registry.moment();
        self.state(|state| state.steps.retried_at(after(at.now_unix_nanos, delay), &at));
    }

    /// Applies the outcome of a turn. `wait`: until the next turn, if nothing else decides when that begins.
    fn apply(&mut self, job: &Job, outcome: SyncOutcome, wait: Duration, began: Began) -> After {
        let effects = Arc::clone(&self.effects);
        let (registry, turn_phase) = (&effects.registry, job.worker.phase);
        let pod = job.desired.as_ref().map(|desired| &*desired.pod);
        let Some(transition) =
            registry.apply_outcome(&self.uid, (self.incarnation, turn_phase), outcome, pod)
        else {
            return After::End(WorkerEnd::Stopped);
        };
        let began_unix_nanos = began.unix_nanos;
        self.measure(job, began);
        if let Some(pod) = pod.filter(|_| transition.ended) {
            registry.release_name(pod);
        }
        // A restored pod is forgotten only when its source has reported.
        if transition.forget && self.state(|state| state.awaits_source()) != Some(true) {
            return After::End(WorkerEnd::Forget);
        }
        let has_moved_on = transition.state.phase != turn_phase;
        if has_moved_on && transition.state.phase == WorkerPhase::Finished {
            registry.update_desired_state_of(&self.uid, self.incarnation);
        }
        if transition.work.is_some() || has_moved_on || outcome == SyncOutcome::Cancelled {
            return After::Again;
        }
        After::Wait(until(wait, deadline_after(&effects, job, began_unix_nanos)))
    }

    /// Measures a turn. One that has only found out that its pod may not start yet leaves its trigger to the next turn.
    fn measure(&mut self, job: &Job, began: Began) {
        if current_work(&job.worker).is_none() {
            return;
        }
        let operation = began.trigger.operation();
        let counted = self.state(|state| {
            let counted = || Operation::of_turn(operation, job.worker.phase, state.start.first);
            state.worker.started.then(counted)
        });
        match counted {
            Some(Some(counted)) => {
                let took = began.trigger.since(counted, began.at).elapsed();
                self.effects.publisher.metrics.pods.turn(counted, took);
            }
            Some(None) => self.unanswered = began.trigger,
            None => {}
        }
    }

    /// The pod cannot be read from the runtime: its steps say so, and an event does too when the runtime has answered with an error
    /// (§6.4). A runtime that does not answer is no event of the pod.
    fn report_unreadable(&self, error: &SyncError, delay: Duration) {
        let at = self.effects.registry.moment();
        let cause = Cause::waiting("RuntimeNotReady", &error.message, "runtime-shim");
        let known = self.state(|state| {
            let is_new = state.steps.set(StepName::Sandbox, "", cause, &at);
            state.desired.clone().filter(|_| is_new)
        });
        self.show_retry(delay);
        if let Some(desired) = known.flatten().filter(|_| !error.peer_unavailable) {
            let text = format!("error determining status: {}", error.message);
            self.effects.context.events.warning(pod_object(&desired.pod), "FailedSync", text);
        }
    }

    fn job(&self) -> Option<Job> {
        self.state(|state| Job {
            uid: self.uid.to_string(),
            worker: state.worker.clone(),
            desired: state.desired.clone(),
            observed: Arc::clone(&state.runtime.observed),
            cancel: state.inbox.cancel_token(),
        })
    }
}

/// The back-off while another service is unavailable: from 100 ms to 5 s (§4), since no wait is shorter than half of its back-off.
const fn unavailable_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(5))
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
        effects.registry.read(&job.uid, |e| deadline_unix_nanos(&desired.pod, &e.published.status)).flatten();
    deadline.filter(|deadline| *deadline > began_unix_nanos)
}

fn after(now_unix_nanos: i64, delay: Duration) -> i64 {
    now_unix_nanos.saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX))
}

async fn work(effects: &Arc<Effects>, job: &Job, memory: &mut Memory) -> Result<TurnEnd, SyncError> {
    match current_work(&job.worker) {
        None => Ok(TurnEnd::of(SyncOutcome::Done)),
        Some(Work::Sync) => match &job.desired {
            Some(desired) => sync::sync(effects, job, desired, memory).await,
            None => Ok(TurnEnd::of(SyncOutcome::Done)),
        },
        Some(Work::Terminate { .. } | Work::TerminateOrphan { .. }) => stop::terminate(effects, job).await,
        Some(Work::Clean) => stop::clean(effects, job).await,
    }
}

#[cfg(test)]
mod tests {
    use keelson_config::{Config, ServiceName};
    use keelson_pod_sync_core::worker::WorkerState;
    use keelson_service_kit::Context;

    use super::*;

    #[tokio::test]
    async fn an_error_of_an_earlier_incarnation_does_not_concern_the_next() {
        let effects = Effects::new(Context::detached(ServiceName::PodSync, Config::default()), None);
        let insert = || {
            effects.registry.insert("u", PodState::new("u", WorkerState::default()));
            effects.registry.read("u", |state| (state.incarnation, state.inbox.waker())).unwrap()
        };
        let (incarnation, wake) = insert();
        insert();
        let mut worker = Worker::new(Arc::clone(&effects), "u".into(), incarnation, wake);
        worker.retry_after(&SyncError::new("the runtime does not answer"));
        assert_eq!(effects.registry.read("u", |state| state.runtime.freshness.stale()), Some(None));
    }

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
