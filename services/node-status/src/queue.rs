//! What waits to be written, one slot for each key.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::Ended;
use tokio::time::Instant;
use tracing::Span;

/// Between two tries of what fails by itself: it is refused for what it says, or holds up the others.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Between two tries of what fails through the control plane: as often as a kubelet goes over all statuses
/// (pod-lifecycle.md §14.5).
const SHORT_PAUSE: Duration = Duration::from_secs(10);
/// Before the second try of what the control plane has not noticed yet; doubled with each further one.
const LAG: Duration = Duration::from_millis(100);
/// The shortest time between two retries of refused jobs, so that many of them take a small part of the request rate.
const RETRY_SPACING: Duration = Duration::from_millis(100);
/// A try that fails within this time holds up nobody.
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
    /// It is a static pod: the control plane has at most a picture of it.
    pub(crate) is_static: bool,
    /// How far it has come to its end.
    pub(crate) ended: Ended,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Job {
    /// Write the Node.
    Node(Vec<u8>),
    /// Write what became of the node configuration; `None`: there is none.
    Configuration(Option<Vec<u8>>),
    /// Write a pod.
    Pod(Pod),
    /// Remove what stands of a pod.
    Gone { uid: String, name: PodFullName },
    /// Remove what stands of pods other than these.
    Retain(BTreeSet<String>),
}

/// What a later job replaces. In the order in which they are done among equals: what is stale goes first, so that it does
/// not take what comes afterwards for another writer's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    Retain,
    Node,
    Configuration,
    Pod(String),
}

impl Job {
    /// Whether it writes the picture of a static pod.
    pub(crate) fn is_mirror(&self) -> bool {
        matches!(self, Self::Pod(pod) if pod.is_static)
    }

    pub(crate) fn slot(&self) -> Slot {
        match self {
            Self::Node(_) => Slot::Node,
            Self::Configuration(_) => Slot::Configuration,
            Self::Pod(Pod { uid, .. }) | Self::Gone { uid, .. } => Slot::Pod(uid.clone()),
            Self::Retain(_) => Slot::Retain,
        }
    }
}

/// A job that waits.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) job: Job,
    /// Goes before what is not.
    pub(crate) urgent: bool,
    /// The step of the pod's trace.
    pub(crate) span: Span,
    /// Since when the oldest state that it replaces has waited.
    pub(crate) since: Instant,
    /// Not before this moment: it was refused, or hangs.
    not_before: Option<Instant>,
    /// How often it was refused.
    pub(crate) refused: u32,
    /// When it was taken last.
    taken: Instant,
    /// When the first of the tries in a row began that got no answer.
    unanswered_since: Option<Instant>,
    /// How often it got none although others did; 0: it waits for the control plane, as they do.
    pub(crate) hangs: u32,
    /// It has held up the others: they go first.
    behind: bool,
    /// It was tried again because something else went well. Refused even so, it is refused for itself.
    released: bool,
    /// It was refused on its own account: its retries take turns with those of others.
    takes_turns: bool,
}

impl Pending {
    /// Goes on in the place of what waited in the same slot. Another state of what holds up the others would do so, too.
    fn replaces(&mut self, before: &Self) {
        self.since = self.since.min(before.since);
        self.urgent |= before.urgent;
        self.unanswered_since = self.unanswered_since.or(before.unanswered_since);
        self.behind |= before.behind;
        self.released |= before.released;
        if before.hangs > 0 {
            (self.hangs, self.not_before) = (before.hangs, before.not_before);
        }
    }

    /// Whether the try that ends now has held up the others.
    fn holds_up(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.taken) >= QUICK
    }
}

/// What a failure is a failure of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Of the job alone: of its content, say.
    OfJob,
    /// Perhaps of the whole control plane.
    OfControlPlane,
    /// The control plane has not noticed yet what the job depends on, which is a matter of moments.
    Lag,
}

/// All that waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<Slot, Pending>,
    /// What was refused, perhaps through the control plane, since something went well.
    failing: BTreeSet<Slot>,
    /// When the control plane has answered something last.
    answered: Option<Instant>,
    /// The slots whose jobs are carried out at the moment.
    busy: BTreeSet<Slot>,
    /// No job that takes turns is tried again before this moment.
    next_retry: Option<Instant>,
}

impl Queue {
    /// Adds a job; one of the same slot is replaced, and its wait goes on.
    pub(crate) fn put(&mut self, job: Job, urgent: bool, span: Span, now: Instant) {
        let slot = job.slot();
        let mut pending = Pending {
            job,
            urgent,
            span,
            since: now,
            not_before: None,
            refused: 0,
            taken: now,
            unanswered_since: None,
            hangs: 0,
            behind: false,
            released: false,
            takes_turns: false,
        };
        if let Some(before) = self.waiting.remove(&slot) {
            pending.replaces(&before);
        }
        self.waiting.insert(slot, pending);
    }

    /// Puts a job back that failed, unless there is a later one by now.
    pub(crate) fn put_back(&mut self, pending: Pending) {
        let slot = pending.job.slot();
        match self.waiting.get_mut(&slot) {
            Some(later) => later.replaces(&pending),
            None => drop(self.waiting.insert(slot, pending)),
        }
    }

    /// Puts a job back that was refused: others go first, and it is tried again later, after a longer while each time.
    pub(crate) fn defer(&mut self, mut pending: Pending, fault: Fault, now: Instant) {
        pending.refused += 1;
        (pending.unanswered_since, pending.hangs) = (None, 0);
        // What the server asks before it writes may let it wait, and end as a refusal.
        pending.behind = pending.holds_up(now);
        let fault = if pending.released { Fault::OfJob } else { fault };
        let longest = match fault {
            Fault::OfJob | Fault::Lag => LONGEST_PAUSE,
            Fault::OfControlPlane => SHORT_PAUSE,
        };
        let pause = match fault {
            Fault::Lag => LAG.saturating_mul(1 << (pending.refused - 1).min(12)).min(longest),
            Fault::OfJob | Fault::OfControlPlane => pause(pending.refused, longest),
        };
        pending.not_before = Some(now + pause);
        pending.takes_turns = fault != Fault::Lag && pending.job.slot() != Slot::Node;
        if fault == Fault::OfControlPlane {
            self.failing.insert(pending.job.slot());
        }
        self.put_back(pending);
    }

    /// Puts a job back that was refused where each job is refused for itself, perhaps for what somebody is about to change: all
    /// others go first, and it is tried again after a longer while each time, 10 s at most.
    pub(crate) fn put_behind(&mut self, mut pending: Pending, now: Instant) {
        pending.refused += 1;
        (pending.unanswered_since, pending.hangs) = (None, 0);
        pending.behind = true;
        pending.not_before = Some(now + pause(pending.refused, SHORT_PAUSE));
        self.put_back(pending);
    }

    /// Puts a job back that got no answer. It keeps its place as long as nothing else gets one. Else it is the job that hangs:
    /// the others go first from then on, and it is tried again after a longer while each time. Whether it is so.
    pub(crate) fn put_back_unanswered(&mut self, mut pending: Pending, now: Instant) -> bool {
        let since = *pending.unanswered_since.get_or_insert(pending.taken);
        let hangs = pending.hangs > 0 || self.answered.is_some_and(|at| at > since);
        if hangs {
            pending.hangs += 1;
            pending.behind = true;
            // The Node has a shorter time for its tries.
            let is_long = pending.holds_up(now) && pending.job.slot() != Slot::Node;
            let longest = if is_long { LONGEST_PAUSE } else { SHORT_PAUSE };
            pending.not_before = Some(now + pause(pending.hangs, longest));
        }
        self.put_back(pending);
        hangs
    }

    /// The control plane has answered something, whatever it was.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.answered = Some(now);
    }

    /// Something went well. Where several things had been refused before, it was perhaps the control plane: each of them is
    /// tried again at once, but only the first time. What is refused even then waits for itself, so that reports which can
    /// never be written do not come back with every report that is.
    pub(crate) fn went_well(&mut self) {
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

    /// The job of `slot` that was taken is not carried out any more: its next one may be taken.
    pub(crate) fn is_done(&mut self, slot: &Slot) {
        self.busy.remove(slot);
    }

    /// When a job that was put off is to be tried again; `None` where there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        let idle = self.waiting.iter().filter(|(slot, _)| !self.busy.contains(slot));
        idle.filter_map(|(_, pending)| self.not_before(pending)).min()
    }

    /// The moment before which a job is not taken.
    fn not_before(&self, pending: &Pending) -> Option<Instant> {
        let turn = self.next_retry.filter(|_| pending.takes_turns);
        pending.not_before.map(|at| turn.map_or(at, |turn| at.max(turn)))
    }

    fn is_due(&self, pending: &Pending, now: Instant) -> bool {
        self.not_before(pending).is_none_or(|at| at <= now)
    }

    /// The same as [`Queue::take_at`] and [`Queue::take_node_at`], the Node first, for several jobs at a time: no other job of
    /// the same slot is taken until [`Queue::is_done`].
    pub(crate) fn begin_at(&mut self, now: Instant) -> Option<Pending> {
        let pending = self.take_node_at(now).or_else(|| self.take_at(now))?;
        self.busy.insert(pending.job.slot());
        Some(pending)
    }

    /// The job that is next at `now`: the urgent ones first, and among equals the one that has waited longest. Those that have
    /// held up the others come last, the Node first of them.
    pub(crate) fn take_at(&mut self, now: Instant) -> Option<Pending> {
        let ready = self.waiting.iter().filter(|(slot, p)| self.is_due(p, now) && !self.busy.contains(slot));
        let next = ready.min_by_key(|(slot, p)| {
            let is_last = p.behind && **slot != Slot::Node;
            (p.behind, is_last, p.takes_turns, !p.urgent, p.since, (*slot).clone())
        });
        let slot = next.map(|(slot, _)| slot.clone())?;
        self.take_slot(&slot, now)
    }

    /// The Node, whatever else waits; `None` where it does not, was put off a moment ago, or has held up the others.
    pub(crate) fn take_node_at(&mut self, now: Instant) -> Option<Pending> {
        let is_idle = !self.busy.contains(&Slot::Node);
        self.waiting.get(&Slot::Node).filter(|node| self.is_due(node, now) && !node.behind && is_idle)?;
        self.take_slot(&Slot::Node, now)
    }

    fn take_slot(&mut self, slot: &Slot, now: Instant) -> Option<Pending> {
        let mut pending = self.waiting.remove(slot)?;
        pending.taken = now;
        if pending.takes_turns && pending.not_before.is_some() {
            self.next_retry = Some(now + RETRY_SPACING);
        }
        Some(pending)
    }

    /// What was put off is tried again at once, but for what hangs.
    pub(crate) fn put_off_no_more(&mut self) {
        for pending in self.waiting.values_mut().filter(|pending| pending.hangs == 0) {
            pending.not_before = None;
        }
    }

    /// The job that is next now.
    pub(crate) fn take(&mut self) -> Option<Pending> {
        self.take_at(Instant::now())
    }

    /// Whether something waits in `slot`.
    pub(crate) fn has(&self, slot: &Slot) -> bool {
        self.waiting.contains_key(slot)
    }

    /// How many jobs are not done: those that wait, and those that are being carried out and have no successor.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.busy.iter().filter(|slot| !self.waiting.contains_key(slot)).count()
    }

    /// Since when the oldest has waited.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.waiting.values().map(|pending| pending.since).min()
    }
}

/// Before the next try of what has failed so often.
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
            ended: Ended::default(),
        })
    }

    fn drain(queue: &mut Queue) -> Vec<Job> {
        std::iter::from_fn(|| queue.take()).map(|pending| pending.job).collect()
    }

    #[test]
    fn the_latest_state_of_a_pod_takes_the_place_of_the_one_before_and_what_turned_goes_first() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |ms| now + Duration::from_millis(ms);
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(Job::Node(b"n".to_vec()), false, Span::none(), after(1));
        queue.put(pod("b", "1"), false, Span::none(), after(2));
        queue.put(pod("c", "1"), true, Span::none(), after(3));
        // Not urgent any more by itself, but nobody has told the turn yet.
        queue.put(pod("a", "2"), false, Span::none(), after(4));
        assert_eq!((queue.len(), queue.oldest()), (4, Some(now)));
        let expected = vec![pod("a", "2"), pod("c", "1"), Job::Node(b"n".to_vec()), pod("b", "1")];
        assert_eq!(drain(&mut queue), expected);
        assert_eq!(queue.oldest(), None);
    }

    #[test]
    fn what_failed_comes_back_unless_something_later_has_come() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let (a, b) = (queue.take().unwrap(), queue.take().unwrap());
        let gone = Job::Gone { uid: "a".into(), name: PodFullName::new("web", "default") };
        queue.put(gone.clone(), false, Span::none(), now + Duration::from_secs(1));
        queue.put_back(a);
        queue.put_back(b);
        assert_eq!(queue.oldest(), Some(now));
        assert_eq!(drain(&mut queue), [gone, pod("b", "1")]);
    }

    #[test]
    fn what_is_refused_lets_others_go_first_and_comes_again_after_a_longer_while_each_time() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        let refused = queue.take_at(now).unwrap();
        queue.defer(refused, Fault::OfJob, now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
        assert!(queue.take_at(now).is_none());
        let first = queue.due().unwrap();
        let again = queue.take_at(first).unwrap();
        queue.defer(again, Fault::OfJob, first);
        assert!(queue.due().unwrap() - first > first - now);
        // Something newer need not wait for it.
        queue.put(pod("a", "2"), false, Span::none(), now);
        assert_eq!(queue.take_at(now).unwrap().job, pod("a", "2"));
    }

    #[test]
    fn the_node_can_be_taken_before_what_is_older_and_more_urgent_unless_it_was_refused() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let node = Job::Node(b"n".to_vec());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(node.clone(), false, Span::none(), now + Duration::from_secs(1));
        let taken = queue.take_node_at(now).unwrap();
        assert_eq!(taken.job, node);
        assert!(queue.take_node_at(now).is_none());
        queue.defer(taken, Fault::OfJob, now);
        assert!(queue.take_node_at(now).is_none() && queue.take_at(now).unwrap().job == pod("a", "1"));
        assert!(queue.take_at(now).is_none());
        queue.put_off_no_more();
        assert_eq!(queue.take_at(now).unwrap().job, node);
    }

    #[test]
    fn what_hangs_while_others_are_answered_lets_them_go_first_and_its_next_state_does_too() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(pod("hangs", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let hangs = queue.take_at(now).unwrap();
        assert!(!queue.put_back_unanswered(hangs, after(30)), "nobody was answered");
        let hangs = queue.take_at(after(30)).unwrap();
        assert_eq!(hangs.job, pod("hangs", "1"), "it has kept its place");
        queue.answered(after(40));
        queue.put(pod("hangs", "2"), true, Span::none(), after(50));
        assert!(queue.put_back_unanswered(hangs, after(60)));
        assert_eq!(queue.take_at(after(60)).unwrap().job, pod("b", "1"));
        queue.went_well();
        assert!(queue.take_at(after(60)).is_none(), "the luck of others is none of it");
        queue.put(pod("hangs", "3"), true, Span::none(), after(61));
        assert!(queue.take_at(after(61)).is_none());
        queue.put(pod("c", "1"), false, Span::none(), after(90));
        assert_eq!(queue.take_at(after(90)).unwrap().job, pod("c", "1"), "although it is not urgent");
        assert_eq!(queue.take_at(after(90)).unwrap().job, pod("hangs", "3"));
    }

    #[test]
    fn a_refusal_that_was_long_in_coming_lets_the_others_go_first() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(pod("slow", "1"), true, Span::none(), now);
        let slow = queue.take_at(now).unwrap();
        queue.defer(slow, Fault::OfControlPlane, after(10));
        for job in [pod("b", "1"), Job::Node(b"n".to_vec())] {
            queue.put(job, false, Span::none(), after(20));
        }
        assert!(queue.take_node_at(after(20)).is_some());
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("b", "1"));
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("slow", "1"));
    }

    #[test]
    fn a_pause_grows_to_a_minute_for_the_faults_of_a_job_and_to_ten_seconds_for_those_of_the_server() {
        type PutBack = fn(&mut Queue, Pending, Instant);
        let unanswered: PutBack = |queue, pending, now| {
            queue.put_back_unanswered(pending, now);
        };
        let refused: PutBack = |queue, pending, now| queue.defer(pending, Fault::OfJob, now);
        let in_trouble: PutBack = |queue, pending, now| queue.defer(pending, Fault::OfControlPlane, now);
        let node = Job::Node(b"n".to_vec());
        for (job, try_seconds, put_back, longest) in [
            (pod("a", "1"), 0, refused, 60),
            (pod("a", "1"), 0, in_trouble, 10),
            (pod("a", "1"), 30, in_trouble, 10),
            (pod("a", "1"), 30, unanswered, 60),
            (pod("a", "1"), 0, unanswered, 10),
            (node, 10, unanswered, 10),
        ] {
            let (mut queue, mut now) = (Queue::default(), Instant::now());
            queue.put(job.clone(), false, Span::none(), now);
            for number in 1..=9 {
                let taken = queue.take_at(now).unwrap();
                queue.answered(now + Duration::from_nanos(1));
                now += Duration::from_secs(try_seconds);
                put_back(&mut queue, taken, now);
                let pause = queue.due().unwrap() - now;
                assert_eq!(pause.as_secs(), longest.min(1 << number), "{job:?}, {number}");
                now += pause;
            }
        }
    }

    #[test]
    fn a_node_that_hangs_lets_the_pods_go_first() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        queue.put(Job::Node(b"n".to_vec()), true, Span::none(), now);
        let node = queue.take_node_at(now).unwrap();
        queue.answered(after(5));
        assert!(queue.put_back_unanswered(node, after(10)));
        queue.put(pod("a", "1"), false, Span::none(), after(20));
        assert!(queue.take_node_at(after(20)).is_none());
        assert_eq!(queue.take_at(after(20)).unwrap().job, pod("a", "1"));
        assert_eq!(queue.take_at(after(20)).unwrap().job, Job::Node(b"n".to_vec()));
    }

    #[test]
    fn what_is_put_behind_comes_after_all_others_within_ten_seconds_each_time() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        for refused in 1..9 {
            let a = queue.take_at(now).unwrap();
            assert_eq!(a.job, pod("a", "1"));
            queue.put_behind(a, now);
            assert!(queue.has(&pod("a", "1").slot()) && queue.take_at(now).is_none());
            let due = queue.due().unwrap();
            assert_eq!(due - now, Duration::from_secs(1 << refused).min(Duration::from_secs(10)));
            now = due;
            queue.put(pod("b", "1"), false, Span::none(), now);
            assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
        }
    }

    #[test]
    fn what_several_were_put_off_for_is_over_with_the_first_that_goes_well() {
        let now = Instant::now();
        let after = |fault: Fault| {
            let mut queue = Queue::default();
            for uid in ["a", "b", "c"] {
                queue.put(pod(uid, "1"), false, Span::none(), now);
                let taken = queue.take_at(now).unwrap();
                queue.defer(taken, fault, now);
            }
            let c = queue.take_at(queue.due().unwrap()).unwrap();
            queue.went_well();
            drop(c);
            std::iter::from_fn(|| queue.take_at(now)).count()
        };
        assert_eq!((after(Fault::OfControlPlane), after(Fault::OfJob)), (2, 0));
    }

    #[test]
    fn what_is_refused_although_others_are_written_is_not_tried_with_each_of_them() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        for uid in ["gone-1", "gone-2", "gone-3"] {
            queue.put(pod(uid, "1"), false, Span::none(), now);
        }
        let mut tries = 0;
        for _ in 0..60 {
            queue.put(pod("good", "1"), false, Span::none(), now);
            while let Some(taken) = queue.take_at(now) {
                if taken.job == pod("good", "1") {
                    queue.went_well();
                } else {
                    tries += 1;
                    queue.defer(taken, Fault::OfControlPlane, now);
                }
            }
            now += Duration::from_secs(1);
        }
        // The first try, the one when something else went well, and those after 4, 8, 16 and 32 s.
        assert!((9..=21).contains(&tries), "{tries}");
    }

    #[test]
    fn a_pod_whose_report_is_being_written_is_not_begun_twice_and_holds_up_no_other() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        let first = queue.begin_at(now).unwrap();
        queue.put(pod("a", "2"), true, Span::none(), now);
        assert_eq!(queue.begin_at(now).unwrap().job, pod("b", "1"));
        assert!(queue.begin_at(now).is_none(), "both are being written");
        queue.is_done(&first.job.slot());
        assert_eq!(queue.begin_at(now).unwrap().job, pod("a", "2"));
    }

    #[test]
    fn many_refused_jobs_delay_no_new_one_and_are_retried_at_a_bounded_rate() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for number in 0..255 {
            queue.put(pod(&format!("bad-{number}"), "1"), true, Span::none(), now);
            let bad = queue.take_at(now).unwrap();
            queue.defer(bad, Fault::OfJob, now);
        }
        let later = now + Duration::from_secs(120);
        queue.put(pod("good", "1"), false, Span::none(), later);
        assert_eq!(queue.take_at(later).unwrap().job, pod("good", "1"));
        let (mut retries, mut at) = (0, later);
        while at < later + Duration::from_secs(10) {
            while let Some(bad) = queue.take_at(at) {
                retries += 1;
                queue.defer(bad, Fault::OfJob, at);
            }
            at = queue.due().unwrap();
        }
        assert_eq!(retries, 100);
    }

    #[test]
    fn what_is_stale_is_removed_before_what_came_with_it_is_written() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), false, Span::none(), now);
        queue.put(Job::Retain(BTreeSet::new()), false, Span::none(), now);
        assert_eq!(drain(&mut queue), [Job::Retain(BTreeSet::new()), pod("a", "1")]);
    }
}
