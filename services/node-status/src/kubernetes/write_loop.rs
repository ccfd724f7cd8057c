//! The loop that empties the queue, several jobs at a time, each of another pod, and handles failed jobs.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use keelson_kube_api::KubeError;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::{KubernetesWriter, retry_after};
use crate::queue::{self, Job, JobError};

/// The condition that says whether reports succeed.
const CONDITION: &str = "control-plane";
/// The pause after an unanswered call; doubled each time.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many jobs are in progress at a time, each of another pod.
pub(super) const MAX_IN_PROGRESS: usize = 8;
/// How often a job is tried that is refused on its own account; with the pauses in between that takes about five minutes.
pub(super) const TRIES: u32 = 10;

/// The pause while this node has no credentials: no call is made.
const NO_CREDENTIALS_PAUSE: Duration = Duration::from_secs(1);

impl KubernetesWriter {
    /// Empties the queue until the shutdown.
    pub(super) async fn run(self: Arc<Self>, ctx: Context) {
        let handle = ctx.progress.register("kubernetes-writer");
        let mut pause = RETRY_PAUSE;
        // No job is begun until then: the server answers nobody, or has asked to wait.
        let mut resume = Instant::now();
        let mut in_progress = FuturesUnordered::new();
        loop {
            handle.tick();
            let now = Instant::now();
            while in_progress.len() < MAX_IN_PROGRESS && resume <= now {
                let begun = self.queue().begin_at(now);
                let Some(pending) = begun else { break };
                in_progress.push(self.attempt(pending));
            }
            let due = self.queue().due().filter(|_| in_progress.len() < MAX_IN_PROGRESS);
            let next = if resume > now { Some(resume) } else { due };
            let heartbeat = now + LoopHandle::HEARTBEAT;
            let next = next.map_or(heartbeat, |next| next.min(heartbeat));
            // Cancel-safe: the queue keeps its jobs, and jobs in progress are polled on. A write that the shutdown cuts off may
            // have been made, and the next start finds it.
            tokio::select! {
                () = ctx.shutdown.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep_until(next) => {}
                Some((pending, result)) = in_progress.next(), if !in_progress.is_empty() => {
                    let wait = self.finish(pending, result, resume > Instant::now(), &mut pause);
                    resume = resume.max(Instant::now() + wait);
                }
            }
        }
    }

    /// Carries out a job; no other of its slot is begun meanwhile.
    async fn attempt(&self, mut pending: queue::Pending) -> (queue::Pending, Result<(), KubeError>) {
        let status = pending.job.take_status();
        let result = self.carry_out(&pending.job, status).instrument(pending.span.clone()).await;
        (pending, result)
    }

    /// Handles the result of a job; returns how long all jobs wait. With `pausing` a pause is in effect already, and several jobs
    /// that fail at the same time do not lengthen it.
    pub(super) fn finish(
        &self,
        pending: queue::Pending,
        result: Result<(), KubeError>,
        pausing: bool,
        pause: &mut Duration,
    ) -> Duration {
        self.record_answer(&result);
        self.queue().finish(&pending.job.slot());
        match result {
            Ok(()) => {
                *pause = RETRY_PAUSE;
                self.queue().record_success();
                self.record_write();
                self.ctx.progress.condition(CONDITION, Ok(()));
                if matches!(pending.job, Job::Pod(_)) {
                    self.metrics.observe_status(pending.since.elapsed());
                }
                Duration::ZERO
            }
            Err(error) => {
                if !pausing {
                    *self.throttled.lock().unwrap_or_else(PoisonError::into_inner) += retry_after(&error);
                }
                if self.should_drop(&pending, &error) {
                    return retry_after(&error);
                }
                self.ctx.progress.condition(CONDITION, Err(chain(&error)));
                let mut unchanged = *pause;
                self.retry_later(pending, &error, if pausing { &mut unchanged } else { pause })
            }
        }
    }

    /// Records that the server has accepted a report.
    pub(super) fn record_write(&self) {
        self.cache().last_write = Some(Instant::now());
    }

    /// Whether a job is dropped: it was refused [`TRIES`] times on its own account, for its content or because the server has
    /// accepted other reports since it waits. The next state of a pod is tried again, and so is this one when the server's pod
    /// changes.
    fn should_drop(&self, pending: &queue::Pending, error: &KubeError) -> bool {
        let others_are_written = self.cache().last_write.is_some_and(|at| at > pending.since);
        let is_own = classify(error) != JobError::ControlPlane || others_are_written;
        let counts = matches!(pending.job, Job::Pod(_) | Job::RemovePod { .. })
            && error.code().is_some_and(|code| code != 429)
            && (self.is_registered() || !pending.job.is_mirror());
        if !counts || !is_own || pending.refused + 1 < TRIES {
            return false;
        }
        tracing::warn!(
            event = "report_dropped",
            tries = pending.refused + 1,
            error = chain(error),
            "the API server has refused a report on every try; it is dropped until the pod changes"
        );
        true
    }

    /// Puts a failed job back for later. Returns how long all jobs wait: while the server answers nobody, a `pause` that grows,
    /// and in any case as long as the server asks.
    fn retry_later(&self, pending: queue::Pending, error: &KubeError, pause: &mut Duration) -> Duration {
        let (now, retry_after) = (Instant::now(), retry_after(error));
        let is_first = pending.refused + pending.hangs == 0;
        match error.code() {
            // A mirror pod needs its Node: until that is registered it must not delay other jobs, least of all the Node.
            _ if pending.job.is_mirror() && !self.is_registered() => {
                self.queue().defer(pending, JobError::ThisJob, now);
                return retry_after;
            }
            Some(429) => self.queue().put_back(pending),
            Some(_) => {
                if is_first {
                    tracing::warn!(error = chain(error), "the API server refuses a report; it is retried");
                }
                self.queue().defer(pending, classify(error), now);
                return retry_after;
            }
            None if error.is_awaited() => {
                self.queue().put_back(pending);
                *pause = RETRY_PAUSE;
                return NO_CREDENTIALS_PAUSE;
            }
            None => {
                if self.queue().put_back_unanswered(pending, now) {
                    if is_first {
                        tracing::warn!(
                            error = chain(error),
                            "the API server answers other reports, but not this one; the others are written first"
                        );
                    }
                    return retry_after;
                }
            }
        }
        let wait = pause.mul_f32(0.5 + fastrand::f32() / 2.0).max(retry_after);
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        wait
    }
}

/// What a refusal applies to: a server that does not know this node any more, or fails, refuses everything.
fn classify(error: &KubeError) -> JobError {
    match error.code() {
        _ if error.is_unrelated() => JobError::NotVisibleYet,
        Some(401 | 403) => JobError::ControlPlane,
        Some(code) if code >= 500 => JobError::ControlPlane,
        _ => JobError::ThisJob,
    }
}
