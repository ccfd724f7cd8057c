//! The loop that empties the queue: several jobs at a time, each of another pod, and what becomes of those that fail.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use keelson_kube_api::KubeError;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, LoopHandle};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::{KubernetesWriter, asked_for};
use crate::queue::{self, Fault, Job};

/// The condition that says whether reports get through.
const CONDITION: &str = "control-plane";
/// After a call that was not answered; doubled with each further one.
pub(super) const AGAIN: Duration = Duration::from_millis(250);
/// The longest pause.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How many jobs are carried out at a time, each of another pod.
const AT_A_TIME: usize = 8;
/// How often a job is tried that the server refuses for itself; with the pauses between tries that takes about five minutes.
pub(super) const TRIES: u32 = 10;

/// The pause while this node has no credentials: nobody is asked.
const AWAITED_PAUSE: Duration = Duration::from_secs(1);

impl KubernetesWriter {
    /// Empties the queue until the shutdown.
    pub(super) async fn run(self: Arc<Self>, ctx: Context) {
        let handle = ctx.progress.register("kubernetes-writer");
        let mut pause = AGAIN;
        // Until then nothing more is begun: the server answers nobody, or has asked for it.
        let mut resume = Instant::now();
        let mut under_way = FuturesUnordered::new();
        loop {
            handle.tick();
            let now = Instant::now();
            while under_way.len() < AT_A_TIME && resume <= now {
                let begun = self.queue().begin_at(now);
                let Some(pending) = begun else { break };
                under_way.push(self.attempt(pending));
            }
            let due = self.queue().due().filter(|_| under_way.len() < AT_A_TIME);
            let next = if resume > now { Some(resume) } else { due };
            let heartbeat = now + LoopHandle::HEARTBEAT;
            let next = next.map_or(heartbeat, |next| next.min(heartbeat));
            // Cancel-safe: the queue keeps what it has, and what is under way is polled on. What is given up at the end may
            // have been written, and the next start finds it so.
            tokio::select! {
                () = ctx.shutdown.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep_until(next) => {}
                Some((pending, result)) = under_way.next(), if !under_way.is_empty() => {
                    let wait = self.finish(pending, result, resume > Instant::now(), &mut pause);
                    resume = resume.max(Instant::now() + wait);
                }
            }
        }
    }

    /// Carries out a job; no other of its slot is begun meanwhile.
    async fn attempt(&self, pending: queue::Pending) -> (queue::Pending, Result<(), KubeError>) {
        let result = self.carry_out(&pending.job).instrument(pending.span.clone()).await;
        (pending, result)
    }

    /// What becomes of a job that was tried; how long all others wait. With `pausing` the pause is one already, which several
    /// jobs that fail at the same time do not lengthen.
    pub(super) fn finish(
        &self,
        pending: queue::Pending,
        result: Result<(), KubeError>,
        pausing: bool,
        pause: &mut Duration,
    ) -> Duration {
        self.hear(&result);
        self.queue().is_done(&pending.job.slot());
        match result {
            Ok(()) => {
                *pause = AGAIN;
                self.queue().went_well();
                self.wrote();
                self.ctx.progress.condition(CONDITION, Ok(()));
                if matches!(pending.job, Job::Pod(_)) {
                    self.measured.status_told(pending.since.elapsed());
                }
                Duration::ZERO
            }
            Err(error) => {
                if !pausing {
                    *self.asked_to_wait.lock().unwrap_or_else(PoisonError::into_inner) += asked_for(&error);
                }
                if self.is_hopeless(&pending, &error) {
                    return asked_for(&error);
                }
                self.ctx.progress.condition(CONDITION, Err(chain(&error)));
                let mut same = *pause;
                self.put_off(pending, &error, if pausing { &mut same } else { pause })
            }
        }
    }

    /// Remembers that the server has taken a report.
    pub(super) fn wrote(&self) {
        self.known().last_write = Some(Instant::now());
    }

    /// Whether a job is given up: it was refused [`TRIES`] times, and the refusal is its own, for what it says or because the
    /// server has taken other reports since it waits. The next state of a pod is tried again, and so is this one when the
    /// server's pod changes.
    fn is_hopeless(&self, pending: &queue::Pending, error: &KubeError) -> bool {
        let others_are_written = self.known().last_write.is_some_and(|at| at > pending.since);
        let is_own = fault_of(error) != Fault::OfControlPlane || others_are_written;
        let counts = matches!(pending.job, Job::Pod(_) | Job::Gone { .. })
            && error.code().is_some_and(|code| code != 429)
            && (self.is_registered() || !pending.job.is_mirror());
        if !counts || !is_own || pending.refused + 1 < TRIES {
            return false;
        }
        tracing::warn!(
            event = "report_dropped",
            tries = pending.refused + 1,
            error = chain(error),
            "the API server refuses a report each time; it is dropped until the pod changes"
        );
        true
    }

    /// Keeps a job that has failed for later. How long all others wait, too: where the server answers nobody, a `pause` that
    /// grows, and as long as it asks for in any case.
    fn put_off(&self, pending: queue::Pending, error: &KubeError, pause: &mut Duration) -> Duration {
        let (now, asked_for) = (Instant::now(), asked_for(error));
        let is_first = pending.refused + pending.hangs == 0;
        match error.code() {
            // A mirror belongs to the Node: while that is not there it holds up nobody, least of all the Node.
            _ if pending.job.is_mirror() && !self.is_registered() => {
                self.queue().defer(pending, Fault::OfJob, now);
                return asked_for;
            }
            Some(429) => self.queue().put_back(pending),
            Some(_) => {
                if is_first {
                    tracing::warn!(error = chain(error), "a report is refused; it is tried again");
                }
                self.queue().defer(pending, fault_of(error), now);
                return asked_for;
            }
            None if error.is_awaited() => {
                self.queue().put_back(pending);
                *pause = AGAIN;
                return AWAITED_PAUSE;
            }
            None => {
                if self.queue().put_back_unanswered(pending, now) {
                    if is_first {
                        tracing::warn!(
                            error = chain(error),
                            "a report is not answered while others are; those go first"
                        );
                    }
                    return asked_for;
                }
            }
        }
        let wait = pause.mul_f32(0.5 + fastrand::f32() / 2.0).max(asked_for);
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        wait
    }
}

/// What a refusal is of: a server that does not know this node any more, or is in trouble, refuses all.
fn fault_of(error: &KubeError) -> Fault {
    match error.code() {
        _ if error.is_unrelated() => Fault::Lag,
        Some(401 | 403) => Fault::OfControlPlane,
        Some(code) if code >= 500 => Fault::OfControlPlane,
        _ => Fault::OfJob,
    }
}
