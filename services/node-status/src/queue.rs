//! What waits to be written, one slot for each key.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::Ended;
use tokio::time::Instant;
use tracing::Span;

/// Between two tries of what is refused.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

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
enum Slot {
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

    fn slot(&self) -> Slot {
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
    /// Not before this moment: it was refused.
    pub(crate) not_before: Option<Instant>,
    /// How often it was refused.
    pub(crate) refused: u32,
    /// How often in a row it got no answer.
    pub(crate) unanswered: u32,
}

/// What a failure is a failure of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Of the job alone: of its content, say.
    OfJob,
    /// Perhaps of the whole control plane.
    OfControlPlane,
}

/// All that waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<Slot, Pending>,
    /// What has failed, perhaps through the control plane, since something went well.
    failing: BTreeSet<Slot>,
}

impl Queue {
    /// Adds a job; one of the same slot is replaced, and its wait goes on.
    pub(crate) fn put(&mut self, job: Job, urgent: bool, span: Span, now: Instant) {
        let slot = job.slot();
        let before = self.waiting.remove(&slot);
        let since = before.as_ref().map_or(now, |before| before.since);
        let urgent = urgent || before.is_some_and(|before| before.urgent);
        let pending = Pending { job, urgent, span, since, not_before: None, refused: 0, unanswered: 0 };
        self.waiting.insert(slot, pending);
    }

    /// Puts a job back that failed, unless there is a later one by now.
    pub(crate) fn put_back(&mut self, pending: Pending) {
        let later = self.waiting.entry(pending.job.slot()).or_insert_with(|| pending.clone());
        later.since = later.since.min(pending.since);
        later.urgent |= pending.urgent;
    }

    /// Puts a job back that was refused: others go first, and it is tried again later, after a longer while each time.
    pub(crate) fn defer(&mut self, mut pending: Pending, fault: Fault, now: Instant) {
        pending.refused += 1;
        pending.not_before = Some(now + pause(pending.refused));
        if fault == Fault::OfControlPlane {
            self.failing.insert(pending.job.slot());
        }
        self.put_back(pending);
    }

    /// Puts a job back that got no answer. It keeps its place the first time; then others go first, for it may be the one
    /// thing that hangs. The Node keeps it.
    pub(crate) fn put_back_unanswered(&mut self, mut pending: Pending, now: Instant) {
        pending.unanswered += 1;
        if pending.unanswered > 1 && pending.job.slot() != Slot::Node {
            pending.not_before = Some(now + pause(pending.unanswered - 1));
        }
        self.failing.insert(pending.job.slot());
        self.put_back(pending);
    }

    /// Something went well. Where several things had failed before, it was the control plane, and none waits any longer.
    pub(crate) fn went_well(&mut self) {
        let failed = std::mem::take(&mut self.failing);
        if failed.len() > 1 {
            self.put_off_no_more();
        }
    }

    /// Whether something failed, perhaps through the control plane, and nothing went well since.
    pub(crate) fn is_failing(&self) -> bool {
        !self.failing.is_empty()
    }

    /// When a job that was refused is to be tried again; `None` where there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.waiting.values().filter_map(|pending| pending.not_before).min()
    }

    /// The job that is next at `now`: the urgent ones first, and among equals the one that has waited longest.
    pub(crate) fn take_at(&mut self, now: Instant) -> Option<Pending> {
        let ready = self.waiting.iter().filter(|(_, p)| p.not_before.is_none_or(|at| at <= now));
        let next = ready.min_by_key(|(slot, p)| (!p.urgent, p.since, (*slot).clone()));
        let slot = next.map(|(slot, _)| slot.clone())?;
        self.waiting.remove(&slot)
    }

    /// The Node, whatever else waits; `None` where it does not, or was refused a moment ago.
    pub(crate) fn take_node_at(&mut self, now: Instant) -> Option<Pending> {
        self.waiting.get(&Slot::Node).filter(|node| node.not_before.is_none_or(|at| at <= now))?;
        self.waiting.remove(&Slot::Node)
    }

    /// What was put off is tried again at once.
    pub(crate) fn put_off_no_more(&mut self) {
        for pending in self.waiting.values_mut() {
            pending.not_before = None;
        }
    }

    /// The job that is next now.
    pub(crate) fn take(&mut self) -> Option<Pending> {
        self.take_at(Instant::now())
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Since when the oldest has waited.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.waiting.values().map(|pending| pending.since).min()
    }
}

/// Before the next try of what has failed so often.
fn pause(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.min(6)).min(LONGEST_PAUSE)
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
    fn one_pod_that_hangs_is_tried_twice_and_then_lets_the_others_go_first_for_longer_each_time() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("hangs", "1"), true, Span::none(), now);
        queue.put(pod("b", "1"), false, Span::none(), now);
        for _ in 0..2 {
            let hangs = queue.take_at(now).unwrap();
            assert_eq!(hangs.job, pod("hangs", "1"));
            queue.put_back_unanswered(hangs, now);
        }
        assert!(queue.is_failing());
        assert_eq!(queue.take_at(now).unwrap().job, pod("b", "1"));
        queue.went_well();
        assert!(!queue.is_failing() && queue.take_at(now).is_none(), "it is alone in its trouble");
        let first = queue.due().unwrap();
        let hangs = queue.take_at(first).unwrap();
        queue.put_back_unanswered(hangs, first);
        assert!(queue.due().unwrap() - first > first - now);

        let node = Job::Node(b"n".to_vec());
        queue.put(node.clone(), false, Span::none(), now);
        for _ in 0..3 {
            let taken = queue.take_at(now).unwrap();
            assert_eq!(taken.job, node, "the Node keeps its place");
            queue.put_back_unanswered(taken, now);
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
    fn what_is_stale_is_removed_before_what_came_with_it_is_written() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.put(pod("a", "1"), false, Span::none(), now);
        queue.put(Job::Retain(BTreeSet::new()), false, Span::none(), now);
        assert_eq!(drain(&mut queue), [Job::Retain(BTreeSet::new()), pod("a", "1")]);
    }
}
