//! The queue of writes, with one slot for each key.

mod job;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;

pub(crate) use job::{Job, PodJob, Slot};

/// The longest pause between two tries of a job that fails on its own account: its content is refused, or it delays others.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The longest pause between two tries of a job that fails because of the control plane: as often as a kubelet reconciles all
/// statuses (pod-lifecycle.md §14.5).
const SHORT_PAUSE: Duration = Duration::from_secs(10);
/// The pause before the second try of a job whose object the control plane does not show yet; doubled each time.
const FIRST_LAG_PAUSE: Duration = Duration::from_millis(100);
/// The shortest time between two retries of refused jobs, so that many of them use only a small part of the request rate.
const RETRY_SPACING: Duration = Duration::from_millis(100);
/// A try that fails within this time does not delay others.
const QUICK: Duration = Duration::from_secs(1);

/// A job that waits.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) job: Job,
    /// Taken before jobs that are not urgent.
    pub(crate) urgent: bool,
    /// The span in the pod's trace.
    pub(crate) span: Span,
    /// Since when the oldest state that it replaces has waited.
    pub(crate) since: Instant,
    /// Not before this time: it was refused, or hangs.
    not_before: Option<Instant>,
    /// How often it was refused.
    pub(crate) refused: u32,
    /// When it was last taken.
    taken_at: Instant,
    /// When the first of the latest consecutive unanswered tries began.
    unanswered_since: Option<Instant>,
    /// How many tries got no answer although other jobs did; 0: it waits for the control plane, as all do.
    pub(crate) hangs: u32,
    /// It has delayed others, so they are taken first.
    after_others: bool,
    /// It was retried because another job succeeded. If it is refused even so, the refusal is its own.
    released: bool,
    /// It was refused on its own account: its retries are spaced with those of others.
    spaced: bool,
}

impl Pending {
    /// Takes over the waiting time and rank of the job that it replaces. A new state of a job that delays others would delay
    /// them, too.
    fn inherit(&mut self, before: &Self) {
        self.since = self.since.min(before.since);
        self.urgent |= before.urgent;
        self.unanswered_since = self.unanswered_since.or(before.unanswered_since);
        self.after_others |= before.after_others;
        self.released |= before.released;
        if before.hangs > 0 {
            (self.hangs, self.not_before) = (before.hangs, before.not_before);
        }
    }

    /// Whether the try that ends now has delayed others.
    fn is_slow(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.taken_at) >= QUICK
    }
}

/// What the failure of a job applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobError {
    /// This job alone: its content, for example.
    ThisJob,
    /// Perhaps the whole control plane.
    ControlPlane,
    /// The control plane does not show the job's object yet, which takes moments.
    NotVisibleYet,
}

/// All waiting jobs.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<Slot, Pending>,
    /// Slots of jobs that were refused, perhaps because of the control plane, since the last success.
    failing: BTreeSet<Slot>,
    /// When the control plane last answered.
    last_answer: Option<Instant>,
    /// The slots whose jobs are in progress.
    busy: BTreeSet<Slot>,
    /// No spaced job is retried before this time.
    next_retry: Option<Instant>,
}

impl Queue {
    /// Adds a job. It replaces a job of the same slot and inherits its waiting time.
    pub(crate) fn put(&mut self, job: Job, urgent: bool, span: Span, now: Instant) {
        let slot = job.slot();
        let mut pending = Pending {
            job,
            urgent,
            span,
            since: now,
            not_before: None,
            refused: 0,
            taken_at: now,
            unanswered_since: None,
            hangs: 0,
            after_others: false,
            released: false,
            spaced: false,
        };
        if let Some(before) = self.waiting.remove(&slot) {
            pending.inherit(&before);
        }
        self.waiting.insert(slot, pending);
    }

    /// Puts a failed job back, unless a later one waits by now.
    pub(crate) fn put_back(&mut self, pending: Pending) {
        let slot = pending.job.slot();
        match self.waiting.get_mut(&slot) {
            Some(later) => later.inherit(&pending),
            None => drop(self.waiting.insert(slot, pending)),
        }
    }

    /// Puts a refused job back: others are taken first, and it is retried with growing pauses.
    pub(crate) fn defer(&mut self, mut pending: Pending, error: JobError, now: Instant) {
        pending.refused += 1;
        (pending.unanswered_since, pending.hangs) = (None, 0);
        // A call that the server makes before it writes, to a webhook for example, may be slow and end as a refusal.
        pending.after_others = pending.is_slow(now);
        let error = if pending.released { JobError::ThisJob } else { error };
        let longest = match error {
            JobError::ThisJob | JobError::NotVisibleYet => LONGEST_PAUSE,
            JobError::ControlPlane => SHORT_PAUSE,
        };
        let pause = match error {
            JobError::NotVisibleYet => {
                FIRST_LAG_PAUSE.saturating_mul(1 << (pending.refused - 1).min(12)).min(longest)
            }
            JobError::ThisJob | JobError::ControlPlane => pause(pending.refused, longest),
        };
        pending.not_before = Some(now + pause);
        pending.spaced = error != JobError::NotVisibleYet && pending.job.slot() != Slot::Node;
        if error == JobError::ControlPlane {
            self.failing.insert(pending.job.slot());
        }
        self.put_back(pending);
    }

    /// Puts a refused job back, where each job is refused on its own account, perhaps until a person changes its permission: all
    /// others are taken first, and it is retried with growing pauses, 10 s at most.
    pub(crate) fn put_last(&mut self, mut pending: Pending, now: Instant) {
        pending.refused += 1;
        (pending.unanswered_since, pending.hangs) = (None, 0);
        pending.after_others = true;
        pending.not_before = Some(now + pause(pending.refused, SHORT_PAUSE));
        self.put_back(pending);
    }

    /// Puts an unanswered job back. It keeps its place as long as no other job gets an answer. Otherwise this job hangs: the
    /// others are taken first from then on, and it is retried with growing pauses. Returns whether it hangs.
    pub(crate) fn put_back_unanswered(&mut self, mut pending: Pending, now: Instant) -> bool {
        let since = *pending.unanswered_since.get_or_insert(pending.taken_at);
        let hangs = pending.hangs > 0 || self.last_answer.is_some_and(|at| at > since);
        if hangs {
            pending.hangs += 1;
            pending.after_others = true;
            // Tries of the Node have a shorter timeout.
            let is_long = pending.is_slow(now) && pending.job.slot() != Slot::Node;
            let longest = if is_long { LONGEST_PAUSE } else { SHORT_PAUSE };
            pending.not_before = Some(now + pause(pending.hangs, longest));
        }
        self.put_back(pending);
        hangs
    }

    /// Records that the control plane has answered, be it with a refusal.
    pub(crate) fn record_answer(&mut self, now: Instant) {
        self.last_answer = Some(now);
    }

    /// Records a success. If several jobs had been refused before, the cause was perhaps the control plane: each of them is
    /// retried at once, but only the first time. A job that is refused even then waits on its own account, so that reports which
    /// can never be written do not come back with every successful one.
    pub(crate) fn record_success(&mut self) {
        let failed = std::mem::take(&mut self.failing);
        if failed.len() < 2 {
            return;
        }
        for slot in failed {
            if let Some(pending) = self.waiting.get_mut(&slot).filter(|pending| pending.hangs == 0) {
                pending.not_before = None;
                pending.released = true;
            }
        }
    }

    /// The job of `slot` that was taken is not in progress any more: the next one of the slot may be taken.
    pub(crate) fn finish(&mut self, slot: &Slot) {
        self.busy.remove(slot);
    }

    /// When the next deferred job is due; `None` if there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        let idle = self.waiting.iter().filter(|(slot, _)| !self.busy.contains(slot));
        idle.filter_map(|(_, pending)| self.not_before(pending)).min()
    }

    /// The time before which a job is not taken.
    fn not_before(&self, pending: &Pending) -> Option<Instant> {
        let turn = self.next_retry.filter(|_| pending.spaced);
        pending.not_before.map(|at| turn.map_or(at, |turn| at.max(turn)))
    }

    fn is_due(&self, pending: &Pending, now: Instant) -> bool {
        self.not_before(pending).is_none_or(|at| at <= now)
    }

    /// Takes a job as [`Queue::take_node_at`] and [`Queue::take_at`] do, the Node first, where several jobs are in progress: no
    /// other job of the same slot is taken until [`Queue::finish`].
    pub(crate) fn begin_at(&mut self, now: Instant) -> Option<Pending> {
        let pending = self.take_node_at(now).or_else(|| self.take_at(now))?;
        self.busy.insert(pending.job.slot());
        Some(pending)
    }

    /// The next job at `now`: urgent ones first, and among equals the one that has waited longest. Jobs that have delayed others
    /// come last, the Node first of them.
    pub(crate) fn take_at(&mut self, now: Instant) -> Option<Pending> {
        let ready = self.waiting.iter().filter(|(slot, p)| self.is_due(p, now) && !self.busy.contains(slot));
        let next = ready.min_by_key(|(slot, p)| {
            let is_last = p.after_others && **slot != Slot::Node;
            (p.after_others, is_last, p.spaced, !p.urgent, p.since, (*slot).clone())
        });
        let slot = next.map(|(slot, _)| slot.clone())?;
        self.take_slot(&slot, now)
    }

    /// The Node, before all other jobs; `None` if it does not wait, is deferred, or has delayed others.
    pub(crate) fn take_node_at(&mut self, now: Instant) -> Option<Pending> {
        let is_idle = !self.busy.contains(&Slot::Node);
        self.waiting
            .get(&Slot::Node)
            .filter(|node| self.is_due(node, now) && !node.after_others && is_idle)?;
        self.take_slot(&Slot::Node, now)
    }

    fn take_slot(&mut self, slot: &Slot, now: Instant) -> Option<Pending> {
        let mut pending = self.waiting.remove(slot)?;
        pending.taken_at = now;
        if pending.spaced && pending.not_before.is_some() {
            self.next_retry = Some(now + RETRY_SPACING);
        }
        Some(pending)
    }

    /// Makes deferred jobs due now, except those that hang.
    pub(crate) fn retry_all_now(&mut self) {
        for pending in self.waiting.values_mut().filter(|pending| pending.hangs == 0) {
            pending.not_before = None;
        }
    }

    /// The next job now.
    pub(crate) fn take(&mut self) -> Option<Pending> {
        self.take_at(Instant::now())
    }

    /// Whether something waits in `slot`.
    pub(crate) fn has(&self, slot: &Slot) -> bool {
        self.waiting.contains_key(slot)
    }

    /// How many jobs are not done: those that wait, and those in progress without a successor.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.busy.iter().filter(|slot| !self.waiting.contains_key(slot)).count()
    }

    /// Since when the oldest has waited.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.waiting.values().map(|pending| pending.since).min()
    }
}

/// The pause after this many failures.
fn pause(failures: u32, longest: Duration) -> Duration {
    Duration::from_secs(1 << failures.min(6)).min(longest)
}

#[cfg(test)]
mod tests;
