//! The queue of writes, with one slot for each key.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::Termination;
use tokio::time::Instant;
use tracing::Span;

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

/// A pod to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) name: PodFullName,
    /// When the agent first saw it, RFC 3339.
    pub(crate) seen: String,
    /// The Pod with its status.
    pub(crate) json: Vec<u8>,
    /// It is a static pod: the control plane has at most its mirror pod.
    pub(crate) is_static: bool,
    /// How far its termination is.
    pub(crate) termination: Termination,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Job {
    /// Write the Node.
    Node(Vec<u8>),
    /// Write the status of the node configuration; `None`: there is none.
    Configuration(Option<Vec<u8>>),
    /// Write a pod.
    Pod(Pod),
    /// Remove the status, or the mirror pod, of a pod that is gone.
    RemovePod { uid: String, name: PodFullName },
    /// Remove those of all pods other than these.
    Retain(BTreeSet<String>),
}

/// What a later job replaces, in the order of jobs of equal rank: stale entries are removed first, so that the removal does not
/// mistake later writes for another writer's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    Retain,
    Node,
    Configuration,
    Pod(String),
}

impl Job {
    /// Whether it writes the mirror pod of a static pod.
    pub(crate) fn is_mirror(&self) -> bool {
        matches!(self, Self::Pod(pod) if pod.is_static)
    }

    pub(crate) fn slot(&self) -> Slot {
        match self {
            Self::Node(_) => Slot::Node,
            Self::Configuration(_) => Slot::Configuration,
            Self::Pod(Pod { uid, .. }) | Self::RemovePod { uid, .. } => Slot::Pod(uid.clone()),
            Self::Retain(_) => Slot::Retain,
        }
    }
}

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
mod tests {
    use super::*;

    fn pod(uid: &str, json: &str) -> Job {
        let name = PodFullName::new("web", "default");
        Job::Pod(Pod {
            uid: uid.into(),
            name,
            seen: String::new(),
            json: json.into(),
            is_static: false,
            termination: Termination::default(),
        })
    }

    fn drain(queue: &mut Queue) -> Vec<Job> {
        std::iter::from_fn(|| queue.take()).map(|pending| pending.job).collect()
    }

    #[test]
    fn the_latest_pod_status_replaces_earlier_ones_and_urgent_ones_go_first() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |ms| now + Duration::from_millis(ms);
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(Job::Node(b"n".to_vec()), false, Span::none(), after(1));
        queue.put(pod("b", "1"), false, Span::none(), after(2));
        queue.put(pod("c", "1"), true, Span::none(), after(3));
        // No longer urgent by itself, but the change before it is not written yet.
        queue.put(pod("a", "2"), false, Span::none(), after(4));
        assert_eq!((queue.len(), queue.oldest()), (4, Some(now)));
        let expected = vec![pod("a", "2"), pod("c", "1"), Job::Node(b"n".to_vec()), pod("b", "1")];
        assert_eq!(drain(&mut queue), expected);
        assert_eq!(queue.oldest(), None);
    }

    #[test]
    fn a_failed_job_is_queued_again_unless_a_later_one_waits() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let (a, b) = (queue.take().unwrap(), queue.take().unwrap());
        let remove = Job::RemovePod { uid: "a".into(), name: PodFullName::new("web", "default") };
        queue.put(remove.clone(), false, Span::none(), now + Duration::from_secs(1));
        queue.put_back(a);
        queue.put_back(b);
        assert_eq!(queue.oldest(), Some(now));
        assert_eq!(drain(&mut queue), [remove, pod("b", "1")]);
    }

    #[test]
    fn a_refused_job_is_retried_after_others_with_back_off() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        let refused = queue.take_at(now).unwrap();
        queue.defer(refused, JobError::ThisJob, now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
        assert!(queue.take_at(now).is_none());
        let first = queue.due().unwrap();
        let retry = queue.take_at(first).unwrap();
        queue.defer(retry, JobError::ThisJob, first);
        assert!(queue.due().unwrap() - first > first - now);
        // A newer state need not wait for it.
        queue.put(pod("a", "2"), false, Span::none(), now);
        assert_eq!(queue.take_at(now).unwrap().job, pod("a", "2"));
    }

    #[test]
    fn the_node_precedes_older_and_urgent_jobs_unless_it_was_refused() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let node = Job::Node(b"n".to_vec());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(node.clone(), false, Span::none(), now + Duration::from_secs(1));
        let taken = queue.take_node_at(now).unwrap();
        assert_eq!(taken.job, node);
        assert!(queue.take_node_at(now).is_none());
        queue.defer(taken, JobError::ThisJob, now);
        assert!(queue.take_node_at(now).is_none() && queue.take_at(now).unwrap().job == pod("a", "1"));
        assert!(queue.take_at(now).is_none());
        queue.retry_all_now();
        assert_eq!(queue.take_at(now).unwrap().job, node);
    }

    #[test]
    fn a_hanging_job_and_its_next_state_are_taken_after_others() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(pod("hangs", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let hangs = queue.take_at(now).unwrap();
        assert!(!queue.put_back_unanswered(hangs, after(30)), "no job was answered");
        let hangs = queue.take_at(after(30)).unwrap();
        assert_eq!(hangs.job, pod("hangs", "1"), "it has kept its place");
        queue.record_answer(after(40));
        queue.put(pod("hangs", "2"), true, Span::none(), after(50));
        assert!(queue.put_back_unanswered(hangs, after(60)));
        assert_eq!(queue.take_at(after(60)).unwrap().job, pod("b", "1"));
        queue.record_success();
        assert!(queue.take_at(after(60)).is_none(), "the success of others does not release it");
        queue.put(pod("hangs", "3"), true, Span::none(), after(61));
        assert!(queue.take_at(after(61)).is_none());
        queue.put(pod("c", "1"), false, Span::none(), after(90));
        assert_eq!(queue.take_at(after(90)).unwrap().job, pod("c", "1"), "although it is not urgent");
        assert_eq!(queue.take_at(after(90)).unwrap().job, pod("hangs", "3"));
    }

    #[test]
    fn a_slowly_refused_job_is_taken_after_others() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(pod("slow", "1"), true, Span::none(), now);
        let slow = queue.take_at(now).unwrap();
        queue.defer(slow, JobError::ControlPlane, after(10));
        for job in [pod("b", "1"), Job::Node(b"n".to_vec())] {
            queue.put(job, false, Span::none(), after(20));
        }
        assert!(queue.take_node_at(after(20)).is_some());
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("b", "1"));
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("slow", "1"));
    }

    #[test]
    fn back_off_grows_to_a_minute_per_job_and_to_ten_seconds_for_the_server() {
        type PutBack = fn(&mut Queue, Pending, Instant);
        let unanswered: PutBack = |queue, pending, now| {
            queue.put_back_unanswered(pending, now);
        };
        let refused: PutBack = |queue, pending, now| queue.defer(pending, JobError::ThisJob, now);
        let control_plane_fails: PutBack =
            |queue, pending, now| queue.defer(pending, JobError::ControlPlane, now);
        let node = Job::Node(b"n".to_vec());
        for (job, try_seconds, put_back, longest) in [
            (pod("a", "1"), 0, refused, 60),
            (pod("a", "1"), 0, control_plane_fails, 10),
            (pod("a", "1"), 30, control_plane_fails, 10),
            (pod("a", "1"), 30, unanswered, 60),
            (pod("a", "1"), 0, unanswered, 10),
            (node, 10, unanswered, 10),
        ] {
            let (mut queue, mut now) = (Queue::default(), Instant::now());
            queue.put(job.clone(), false, Span::none(), now);
            for number in 1..=9 {
                let taken = queue.take_at(now).unwrap();
                queue.record_answer(now + Duration::from_nanos(1));
                now += Duration::from_secs(try_seconds);
                put_back(&mut queue, taken, now);
                let pause = queue.due().unwrap() - now;
                assert_eq!(pause.as_secs(), longest.min(1 << number), "{job:?}, {number}");
                now += pause;
            }
        }
    }

    #[test]
    fn a_hanging_node_write_is_taken_after_pods() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(Job::Node(b"n".to_vec()), true, Span::none(), now);
        let node = queue.take_node_at(now).unwrap();
        queue.record_answer(after(5));
        assert!(queue.put_back_unanswered(node, after(10)));
        queue.put(pod("a", "1"), false, Span::none(), after(20));
        assert!(queue.take_node_at(after(20)).is_none());
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("a", "1"));
        assert_eq!(queue.take_at(after(20)).unwrap().job, Job::Node(b"n".to_vec()));
    }

    #[test]
    fn a_job_put_last_follows_all_others_and_is_retried_within_ten_seconds() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        for refused in 1..9 {
            let a = queue.take_at(now).unwrap();
            assert_eq!(a.job, pod("a", "1"));
            queue.put_last(a, now);
            assert!(queue.has(&pod("a", "1").slot()) && queue.take_at(now).is_none());
            let due = queue.due().unwrap();
            assert_eq!(due - now, Duration::from_secs(1 << refused).min(Duration::from_secs(10)));
            now = due;
            queue.put(pod("b", "1"), false, Span::none(), now);
            assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
        }
    }

    #[test]
    fn the_first_success_retries_all_jobs_refused_by_a_failing_control_plane() {
        let now = Instant::now();
        let after = |error: JobError| {
            let mut queue = Queue::default();
            for uid in ["a", "b", "c"] {
                queue.put(pod(uid, "1"), false, Span::none(), now);
                let taken = queue.take_at(now).unwrap();
                queue.defer(taken, error, now);
            }
            let c = queue.take_at(queue.due().unwrap()).unwrap();
            queue.record_success();
            drop(c);
            std::iter::from_fn(|| queue.take_at(now)).count()
        };
        assert_eq!((after(JobError::ControlPlane), after(JobError::ThisJob)), (2, 0));
    }

    #[test]
    fn a_job_refused_while_others_succeed_is_not_retried_with_each_success() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        for uid in ["gone-1", "gone-2", "gone-3"] {
            queue.put(pod(uid, "1"), false, Span::none(), now);
        }
        let mut tries = 0;
        for _ in 0..60 {
            queue.put(pod("good", "1"), false, Span::none(), now);
            while let Some(taken) = queue.take_at(now) {
                if taken.job == pod("good", "1") {
                    queue.record_success();
                } else {
                    tries += 1;
                    queue.defer(taken, JobError::ControlPlane, now);
                }
            }
            now += Duration::from_secs(1);
        }
        // The first try, the one after another job's success, and those after 4, 8, 16 and 32 s.
        assert!((9..=21).contains(&tries), "{tries}");
    }

    #[test]
    fn a_pod_report_in_progress_is_not_begun_twice_and_delays_no_other() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let first = queue.begin_at(now).unwrap();
        queue.put(pod("a", "2"), true, Span::none(), now);
        assert_eq!(queue.begin_at(now).unwrap().job, pod("b", "1"));
        assert!(queue.begin_at(now).is_none(), "both are being written");
        queue.finish(&first.job.slot());
        assert_eq!(queue.begin_at(now).unwrap().job, pod("a", "2"));
    }

    #[test]
    fn many_refused_jobs_delay_no_new_one_and_are_retried_at_a_bounded_rate() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for number in 0..255 {
            queue.put(pod(&format!("bad-{number}"), "1"), true, Span::none(), now);
            let bad = queue.take_at(now).unwrap();
            queue.defer(bad, JobError::ThisJob, now);
        }
        let later = now + Duration::from_secs(120);
        queue.put(pod("good", "1"), false, Span::none(), later);
        assert_eq!(queue.take_at(later).unwrap().job, pod("good", "1"));
        let (mut retries, mut at) = (0, later);
        while at < later + Duration::from_secs(10) {
            while let Some(bad) = queue.take_at(at) {
                retries += 1;
                queue.defer(bad, JobError::ThisJob, at);
            }
            at = queue.due().unwrap();
        }
        assert_eq!(retries, 100);
    }

    #[test]
    fn stale_pods_are_removed_before_new_ones_are_written() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), false, Span::none(), now);
        queue.put(Job::Retain(BTreeSet::new()), false, Span::none(), now);
        assert_eq!(drain(&mut queue), [Job::Retain(BTreeSet::new()), pod("a", "1")]);
    }
}
