//! What a pod waits for: the steps of its life, each with its state, its owner and its next attempt.
//!
//! The ledger holds what is true now. Whoever finds a cause sets it, whoever sees it gone clears it; `since` survives
//! repeated settings of the same cause, so it says how long the pod has really been waiting.

use std::borrow::Cow;
use std::fmt;

use crate::moment::{Moment, SECOND, duration_text};

/// The owner of what only a person can change.
pub const YOU: &str = "you";

/// The steps in the order of a pod's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepName {
    /// A source names the pod.
    Source,
    /// The worker that carries the other steps out; told of only while it is set aside.
    Worker,
    /// The node takes it.
    Admission,
    /// Its volumes are mounted.
    Volumes,
    /// Its cgroup is there.
    Cgroup,
    /// An image is there; one entry per container.
    Image,
    /// Its sandbox runs.
    Sandbox,
    /// A container runs; one entry per container.
    Container,
    /// It ends.
    Termination,
}

impl StepName {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Worker => "worker",
            Self::Admission => "admission",
            Self::Volumes => "volumes",
            Self::Cgroup => "cgroup",
            Self::Image => "image",
            Self::Sandbox => "sandbox",
            Self::Container => "container",
            Self::Termination => "termination",
        }
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepState {
    /// Done, nothing more to say.
    Done,
    /// Somebody is at it.
    Working,
    /// Something else must happen first.
    Waiting,
    /// It failed and is tried again, or will never succeed as it is.
    Failed,
    /// Earlier steps are not done.
    NotReached,
}

impl StepState {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Working => "working",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
            Self::NotReached => "not reached",
        }
    }
}

/// What is said of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// How it stands.
    pub state: StepState,
    /// A stable word for the kind of cause (`ErrImagePull`, `CrashLoopBackOff`, `not mounted`…). The text may change
    /// while state and kind stay; the wait is then still the same one.
    pub kind: Cow<'static, str>,
    /// What it waits for or why it failed.
    pub message: String,
    /// The service that has to act, or [`YOU`].
    pub owner: Cow<'static, str>,
    /// When it is tried again, unix nanoseconds; 0 when nothing is scheduled.
    pub next_retry_unix_nanos: i64,
}

impl Cause {
    /// A step that is done.
    pub fn done(owner: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StepState::Done, "done", "", owner)
    }

    /// A step that somebody is at.
    pub fn working(owner: impl Into<Cow<'static, str>>, message: &str) -> Self {
        Self::new(StepState::Working, "working", message, owner)
    }

    /// A step that waits, with nothing scheduled.
    pub fn waiting(
        kind: impl Into<Cow<'static, str>>,
        message: &str,
        owner: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(StepState::Waiting, kind, message, owner)
    }

    /// A step that failed, with nothing scheduled.
    pub fn failed(
        kind: impl Into<Cow<'static, str>>,
        message: &str,
        owner: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(StepState::Failed, kind, message, owner)
    }

    fn new(
        state: StepState,
        kind: impl Into<Cow<'static, str>>,
        message: &str,
        owner: impl Into<Cow<'static, str>>,
    ) -> Self {
        let message = message.to_owned();
        Self { state, kind: kind.into(), message, owner: owner.into(), next_retry_unix_nanos: 0 }
    }

    /// The same, tried again then.
    pub fn retried_at(mut self, unix_nanos: i64) -> Self {
        self.next_retry_unix_nanos = unix_nanos;
        self
    }
}

/// One step as it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which step.
    pub name: StepName,
    /// The container, image or volume that it is about; else empty.
    pub subject: String,
    /// What is said of it.
    pub cause: Cause,
    /// Since when, unix nanoseconds.
    pub since_unix_nanos: i64,
}

/// What the ledger holds of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: StepName,
    subject: String,
    cause: Cause,
    since_unix_nanos: i64,
    /// Kind and beginning of the failure that the present attempt may end.
    failing: Option<Box<(Cow<'static, str>, i64)>>,
}

impl Entry {
    fn key(&self) -> (StepName, &str) {
        (self.name, &self.subject)
    }

    fn set(&mut self, cause: Cause, at: &Moment) {
        let failing = match self.cause.state {
            StepState::Failed => Some(Box::new((self.cause.kind.clone(), self.since_unix_nanos))),
            _ => self.failing.take(),
        };
        let same = self.cause.state == cause.state && self.cause.kind == cause.kind;
        let again =
            failing.as_deref().filter(|(kind, _)| cause.state == StepState::Failed && *kind == cause.kind);
        self.since_unix_nanos = match again {
            Some((_, since)) => *since,
            None if same => self.since_unix_nanos,
            None => at.now_unix_nanos,
        };
        let ended = matches!(cause.state, StepState::Done | StepState::NotReached);
        self.failing = failing.filter(|_| !ended);
        self.cause = cause;
    }
}

/// The steps of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// By step and subject. A vector, because there are few and each pod has one: a map would keep room for more.
    entries: Vec<Entry>,
}

impl Ledger {
    fn find(&self, name: StepName, subject: &str) -> Result<usize, usize> {
        self.entries.binary_search_by(|entry| entry.key().cmp(&(name, subject)))
    }

    /// Says how a step stands now. `since` is kept while state and kind stay; a failure also keeps it over the
    /// attempts between, until one succeeds or fails in another way. True when anything changed.
    pub fn set(&mut self, name: StepName, subject: &str, cause: Cause, at: &Moment) -> bool {
        match self.find(name, subject) {
            Ok(index) if self.entries[index].cause == cause => return false,
            Ok(index) => self.entries[index].set(cause, at),
            Err(index) => {
                let (subject, since_unix_nanos) = (subject.to_owned(), at.now_unix_nanos);
                self.entries.reserve_exact(1);
                self.entries.insert(index, Entry { name, subject, cause, since_unix_nanos, failing: None });
            }
        }
        true
    }

    /// Everything is tried again then: told of each step that waits or fails and names no later attempt itself.
    pub fn retried_at(&mut self, unix_nanos: i64, at: &Moment) {
        for Entry { cause, .. } in &mut self.entries {
            let open = matches!(cause.state, StepState::Waiting | StepState::Failed);
            if open && cause.next_retry_unix_nanos <= at.now_unix_nanos {
                cause.next_retry_unix_nanos = unix_nanos;
            }
        }
    }

    /// The cause is gone. True when there was one.
    pub fn clear(&mut self, name: StepName, subject: &str) -> bool {
        self.find(name, subject).map(|index| self.entries.remove(index)).is_ok()
    }

    /// Drops the entries of a step whose subject the filter does not want: containers or volumes that no longer exist.
    pub fn retain(&mut self, name: StepName, keep: impl Fn(&str) -> bool) {
        self.entries.retain(|entry| entry.name != name || keep(&entry.subject));
    }

    /// What is said of a step.
    pub fn get(&self, name: StepName, subject: &str) -> Option<&Cause> {
        self.find(name, subject).ok().map(|index| &self.entries[index].cause)
    }

    /// The steps in the order of a pod's life, and one sentence: what the pod waits for, or that it waits for nothing.
    pub fn explain(&self, at: &Moment) -> (Vec<Step>, String) {
        let step = |entry: &Entry| Step {
            name: entry.name,
            subject: entry.subject.clone(),
            cause: entry.cause.clone(),
            since_unix_nanos: entry.since_unix_nanos,
        };
        let steps: Vec<Step> = self.entries.iter().map(step).collect();
        let summary = summarise(&steps, at);
        (steps, summary)
    }
}

/// A worker that is set aside goes before everything, because nothing happens without it. Then what ends goes before
/// what fails, what fails before what waits, what waits before what is worked at; of equals the earlier step, because
/// the later ones wait for it.
fn summarise(steps: &[Step], at: &Moment) -> String {
    let rank = |step: &&Step| match (step.name, step.cause.state) {
        (_, StepState::Done | StepState::NotReached) => None,
        (StepName::Worker, StepState::Failed) => Some(0),
        (StepName::Termination, _) => Some(1),
        (_, StepState::Failed) => Some(2),
        (_, StepState::Waiting) => Some(3),
        (_, StepState::Working) => Some(4),
    };
    match steps.iter().filter_map(|step| Some((rank(&step)?, step))).min_by_key(|(rank, _)| *rank) {
        None => "The pod waits for nothing.".to_owned(),
        Some((_, step)) => sentence(step, at),
    }
}

fn sentence(step: &Step, at: &Moment) -> String {
    let seconds = |nanos: i64| duration_text(nanos.max(0) / SECOND);
    let cause = &step.cause;
    let subject = if step.subject.is_empty() { String::new() } else { format!(" {}", step.subject) };
    let message = if cause.message.is_empty() { &*cause.kind } else { cause.message.as_str() };
    let age = seconds(at.now_unix_nanos - step.since_unix_nanos);
    let act =
        if cause.owner == YOU { "you have to act".to_owned() } else { format!("{} is to act", cause.owner) };
    let retry = match cause.next_retry_unix_nanos {
        0 => String::new(),
        then if then <= at.now_unix_nanos => ", next attempt now".to_owned(),
        then => format!(", next attempt in {}", seconds(then - at.now_unix_nanos + SECOND - 1)),
    };
    format!("{}{subject} {} for {age}: {message} ({act}{retry}).", title(step.name), state_words(cause.state))
}

fn title(name: StepName) -> String {
    let word = name.as_str();
    word[..1].to_uppercase() + &word[1..]
}

fn state_words(state: StepState) -> &'static str {
    match state {
        StepState::Failed => "has been failing",
        StepState::Waiting => "has been waiting",
        StepState::Working => "has been in progress",
        StepState::Done => "has been done",
        StepState::NotReached => "has not been reached",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Moment {
        Moment { now_unix_nanos: seconds * SECOND, agent_started_unix_nanos: 0 }
    }

    fn pull(message: &str) -> Cause {
        Cause::failed("ErrImagePull", message, YOU).retried_at(40 * SECOND)
    }

    #[test]
    fn since_is_kept_while_state_and_kind_stay() {
        let mut ledger = Ledger::default();
        assert!(ledger.set(StepName::Image, "web", pull("no such host"), &at(10)));
        assert!(!ledger.set(StepName::Image, "web", pull("no such host"), &at(15)), "nothing new");
        assert!(ledger.set(StepName::Image, "web", pull("timeout"), &at(20)));
        let (steps, _) = ledger.explain(&at(30));
        assert_eq!(steps[0].since_unix_nanos, 10 * SECOND);
        assert_eq!(steps[0].cause.message, "timeout");
    }

    #[test]
    fn since_begins_anew_with_another_kind_or_state() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Image, "web", pull("x"), &at(10));
        ledger.set(StepName::Image, "web", Cause::failed("ImagePullBackOff", "x", YOU), &at(20));
        assert_eq!(ledger.explain(&at(30)).0[0].since_unix_nanos, 20 * SECOND);
        ledger.set(StepName::Image, "web", Cause::working("runtime-shim", "pulling"), &at(25));
        assert_eq!(ledger.explain(&at(30)).0[0].since_unix_nanos, 25 * SECOND);
    }

    #[test]
    fn a_failure_keeps_its_since_over_the_attempts_between_until_one_succeeds() {
        let mut ledger = Ledger::default();
        let since = |ledger: &Ledger| ledger.explain(&at(99)).0[0].since_unix_nanos / SECOND;
        let working = || Cause::working("runtime-shim", "pulling");
        ledger.set(StepName::Image, "web", pull("x"), &at(10));
        for (attempt, failed) in [(20, 21), (30, 31)] {
            ledger.set(StepName::Image, "web", working(), &at(attempt));
            assert_eq!(since(&ledger), attempt);
            ledger.set(StepName::Image, "web", pull("y"), &at(failed));
            assert_eq!(since(&ledger), 10);
        }
        ledger.set(StepName::Image, "web", working(), &at(40));
        ledger.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(41));
        assert_eq!(since(&ledger), 41);
        ledger.set(StepName::Image, "web", Cause::done("runtime-shim"), &at(50));
        ledger.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(60));
        assert_eq!(since(&ledger), 60);
    }

    #[test]
    fn the_next_attempt_is_told_of_what_is_open_and_has_no_later_one() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
        ledger.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(1));
        ledger.set(StepName::Image, "later", pull("x"), &at(1));
        ledger.set(StepName::Image, "over", pull("x").retried_at(5 * SECOND), &at(1));
        ledger.retried_at(20 * SECOND, &at(10));
        let next = |name, subject| ledger.get(name, subject).unwrap().next_retry_unix_nanos / SECOND;
        assert_eq!(next(StepName::Source, ""), 0);
        assert_eq!(next(StepName::Volumes, ""), 20);
        assert_eq!(next(StepName::Image, "later"), 40);
        assert_eq!(next(StepName::Image, "over"), 20);
    }

    #[test]
    fn a_cause_that_is_gone_is_no_longer_told() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Image, "web", pull("x"), &at(10));
        assert!(ledger.clear(StepName::Image, "web"));
        assert!(!ledger.clear(StepName::Image, "web"));
        let (steps, summary) = ledger.explain(&at(30));
        assert!(steps.is_empty());
        assert_eq!(summary, "The pod waits for nothing.");
    }

    #[test]
    fn steps_come_in_the_order_of_a_pods_life() {
        let mut ledger = Ledger::default();
        for name in
            [StepName::Termination, StepName::Container, StepName::Source, StepName::Sandbox, StepName::Image]
        {
            ledger.set(name, "", Cause::done("pod-sync"), &at(1));
        }
        let names: Vec<&str> = ledger.explain(&at(2)).0.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names, ["source", "image", "sandbox", "container", "termination"]);
    }

    #[test]
    fn the_summary_names_what_must_happen_first_who_acts_and_when() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
        ledger.set(
            StepName::Volumes,
            "data",
            Cause::waiting("not mounted", "claim data is unbound", YOU),
            &at(5),
        );
        assert_eq!(
            ledger.explain(&at(20)).1,
            "Volumes data has been waiting for 15s: claim data is unbound (you have to act)."
        );
        ledger.set(StepName::Image, "web", pull("no such host"), &at(10));
        assert_eq!(
            ledger.explain(&at(20)).1,
            "Image web has been failing for 10s: no such host (you have to act, next attempt in 20s)."
        );
        ledger.set(StepName::Termination, "", Cause::working("pod-sync", "waiting for web to stop"), &at(19));
        assert!(ledger.explain(&at(20)).1.starts_with("Termination has been in progress for 1s"));
    }

    #[test]
    fn a_worker_that_is_set_aside_goes_before_the_end_that_it_was_to_bring() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Termination, "", Cause::working("pod-sync", "removed"), &at(1));
        let cause = Cause::failed("Panicked", "the worker panicked", "pod-sync").retried_at(12 * SECOND);
        ledger.set(StepName::Worker, "", cause, &at(2));
        assert_eq!(
            ledger.explain(&at(5)).1,
            "Worker has been failing for 3s: the worker panicked (pod-sync is to act, next attempt in 7s)."
        );
        ledger.clear(StepName::Worker, "");
        assert!(ledger.explain(&at(5)).1.starts_with("Termination has been in progress"));
    }

    #[test]
    fn a_pod_whose_steps_are_done_waits_for_nothing() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Container, "web", Cause::done("runtime-shim"), &at(1));
        assert_eq!(ledger.explain(&at(2)).1, "The pod waits for nothing.");
    }

    #[test]
    fn entries_of_containers_that_no_longer_exist_are_dropped() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Image, "old", pull("x"), &at(1));
        ledger.set(StepName::Container, "old", pull("x"), &at(1));
        ledger.retain(StepName::Image, |subject| subject == "web");
        assert!(ledger.get(StepName::Image, "old").is_none());
        assert!(ledger.get(StepName::Container, "old").is_some());
    }

    #[test]
    fn the_words_on_the_wire_are_these() {
        let states = [
            (StepState::Done, "done"),
            (StepState::Working, "working"),
            (StepState::Waiting, "waiting"),
            (StepState::Failed, "failed"),
            (StepState::NotReached, "not reached"),
        ];
        for (state, word) in states {
            assert_eq!(state.as_str(), word);
        }
        let names = [
            (StepName::Source, "source"),
            (StepName::Admission, "admission"),
            (StepName::Volumes, "volumes"),
            (StepName::Cgroup, "cgroup"),
            (StepName::Image, "image"),
            (StepName::Sandbox, "sandbox"),
            (StepName::Container, "container"),
            (StepName::Termination, "termination"),
        ];
        for (name, word) in names {
            assert_eq!((name.as_str(), name.to_string().as_str()), (word, word));
        }
    }

    #[test]
    fn another_kind_of_wait_began_when_it_began_and_another_text_of_the_same_kind_did_not() {
        let since = |ledger: &Ledger| ledger.explain(&at(0)).0[0].since_unix_nanos;
        let mut ledger = Ledger::default();
        ledger.set(StepName::Volumes, "", Cause::waiting("Mounting", "one", YOU), &at(1));
        ledger.set(StepName::Volumes, "", Cause::waiting("Mounting", "two", YOU), &at(2));
        assert_eq!(since(&ledger), SECOND);
        ledger.set(StepName::Volumes, "", Cause::waiting("NoAnswer", "two", YOU), &at(3));
        assert_eq!(since(&ledger), 3 * SECOND);
        // A failure of another kind is another wait, also when an attempt lay between them.
        ledger.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(4));
        ledger.set(StepName::Volumes, "", Cause::working("x", ""), &at(5));
        ledger.set(StepName::Volumes, "", Cause::failed("Other", "x", YOU), &at(6));
        assert_eq!(since(&ledger), 6 * SECOND);
    }

    #[test]
    fn an_attempt_that_is_due_comes_now() {
        let mut ledger = Ledger::default();
        ledger.set(StepName::Image, "main", pull("no such host"), &at(10));
        let summary = |second| ledger.explain(&at(second)).1;
        assert!(summary(39).contains("next attempt in 1s"), "{}", summary(39));
        assert!(summary(40).contains("next attempt now"), "{}", summary(40));
    }
}
