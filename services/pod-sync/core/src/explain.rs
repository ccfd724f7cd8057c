//! What a pod waits for: the steps of its start and its end, each with its state, its owner and its next attempt.
//!
//! [`PodSteps`] has the present state. Code that finds a cause sets it, and code that finds the cause resolved clears it.
//! Setting the same cause again keeps `since`, so `since` shows how long the pod has really been waiting.

use std::borrow::Cow;
use std::fmt;

use crate::moment::{Moment, SECOND, duration_text};

/// The owner of a cause that only a person can resolve.
pub const YOU: &str = "you";

/// The steps, in the order of a pod's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepName {
    /// A source has sent the pod.
    Source,
    /// The worker that carries out the other steps; present only while the pod is quarantined after a panic.
    Worker,
    /// The node admits it.
    Admission,
    /// Its volumes are mounted.
    Volumes,
    /// Its cgroup exists.
    Cgroup,
    /// An image is present; one entry per container.
    Image,
    /// Its sandbox runs.
    Sandbox,
    /// A container runs; one entry per container.
    Container,
    /// It terminates.
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

/// The state of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepState {
    /// Done.
    Done,
    /// In progress.
    Working,
    /// Something else must happen first.
    Waiting,
    /// It failed. It is retried, or cannot succeed without a change.
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

/// Why a step is in its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The state of the step.
    pub state: StepState,
    /// A stable word for the kind of cause (`ErrImagePull`, `CrashLoopBackOff`, `not mounted`…). If only the message
    /// changes, it is still the same wait.
    pub kind: Cow<'static, str>,
    /// What it waits for or why it failed.
    pub message: String,
    /// The service that has to act, or [`YOU`].
    pub owner: Cow<'static, str>,
    /// When it is retried, unix nanoseconds; 0 when nothing is scheduled.
    pub next_retry_unix_nanos: i64,
}

impl Cause {
    /// A step that is done.
    pub fn done(owner: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StepState::Done, "done", "", owner)
    }

    /// A step in progress.
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

    /// Sets the time of the next attempt.
    pub fn retried_at(mut self, unix_nanos: i64) -> Self {
        self.next_retry_unix_nanos = unix_nanos;
        self
    }
}

/// One step as `ExplainPod` reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which step.
    pub name: StepName,
    /// The container, image or volume that it is about; else empty.
    pub subject: String,
    /// Why it is in its state.
    pub cause: Cause,
    /// Since when, unix nanoseconds.
    pub since_unix_nanos: i64,
}

/// One entry of [`PodSteps`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: StepName,
    subject: String,
    cause: Cause,
    since_unix_nanos: i64,
    /// Kind and start time of the error that the present attempt may resolve.
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
        let repeated =
            failing.as_deref().filter(|(kind, _)| cause.state == StepState::Failed && *kind == cause.kind);
        self.since_unix_nanos = match repeated {
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
pub struct PodSteps {
    /// By step and subject. A vector, because there are few and each pod has one: a map would keep room for more.
    entries: Vec<Entry>,
}

impl PodSteps {
    fn find(&self, name: StepName, subject: &str) -> Result<usize, usize> {
        self.entries.binary_search_by(|entry| entry.key().cmp(&(name, subject)))
    }

    /// Sets the cause of a step; true if anything changed. `since` is kept while state and kind are the same. An error
    /// keeps its `since` across retries, until one succeeds or fails with another kind.
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

    /// Sets the time of the next attempt on each step that waits or has failed and has no later one of its own.
    pub fn retried_at(&mut self, unix_nanos: i64, at: &Moment) {
        for Entry { cause, .. } in &mut self.entries {
            let open = matches!(cause.state, StepState::Waiting | StepState::Failed);
            if open && cause.next_retry_unix_nanos <= at.now_unix_nanos {
                cause.next_retry_unix_nanos = unix_nanos;
            }
        }
    }

    /// Removes a step; true if it was present.
    pub fn clear(&mut self, name: StepName, subject: &str) -> bool {
        self.find(name, subject).map(|index| self.entries.remove(index)).is_ok()
    }

    /// Removes the entries of a step whose subject the filter rejects, such as containers or volumes that no longer exist.
    pub fn retain(&mut self, name: StepName, keep: impl Fn(&str) -> bool) {
        self.entries.retain(|entry| entry.name != name || keep(&entry.subject));
    }

    /// The cause of a step.
    pub fn get(&self, name: StepName, subject: &str) -> Option<&Cause> {
        self.find(name, subject).ok().map(|index| &self.entries[index].cause)
    }

    /// The steps in the order of a pod's life, and a summary sentence: what the pod waits for, or that it waits for nothing.
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

/// Picks the step to report: a quarantined worker first, because nothing happens without it; then termination, failed,
/// waiting and working steps, in this order. Among equals the earlier step, because the later ones wait for it.
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
        let mut steps = PodSteps::default();
        assert!(steps.set(StepName::Image, "web", pull("no such host"), &at(10)));
        assert!(!steps.set(StepName::Image, "web", pull("no such host"), &at(15)), "nothing new");
        assert!(steps.set(StepName::Image, "web", pull("timeout"), &at(20)));
        let (steps, _) = steps.explain(&at(30));
        assert_eq!(steps[0].since_unix_nanos, 10 * SECOND);
        assert_eq!(steps[0].cause.message, "timeout");
    }

    #[test]
    fn since_is_reset_when_kind_or_state_changes() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Image, "web", pull("x"), &at(10));
        steps.set(StepName::Image, "web", Cause::failed("ImagePullBackOff", "x", YOU), &at(20));
        assert_eq!(steps.explain(&at(30)).0[0].since_unix_nanos, 20 * SECOND);
        steps.set(StepName::Image, "web", Cause::working("runtime-shim", "pulling"), &at(25));
        assert_eq!(steps.explain(&at(30)).0[0].since_unix_nanos, 25 * SECOND);
    }

    #[test]
    fn an_error_keeps_its_since_across_retries_until_one_succeeds() {
        let mut steps = PodSteps::default();
        let since = |steps: &PodSteps| steps.explain(&at(99)).0[0].since_unix_nanos / SECOND;
        let working = || Cause::working("runtime-shim", "pulling");
        steps.set(StepName::Image, "web", pull("x"), &at(10));
        for (attempt, failed) in [(20, 21), (30, 31)] {
            steps.set(StepName::Image, "web", working(), &at(attempt));
            assert_eq!(since(&steps), attempt);
            steps.set(StepName::Image, "web", pull("y"), &at(failed));
            assert_eq!(since(&steps), 10);
        }
        steps.set(StepName::Image, "web", working(), &at(40));
        steps.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(41));
        assert_eq!(since(&steps), 41);
        steps.set(StepName::Image, "web", Cause::done("runtime-shim"), &at(50));
        steps.set(StepName::Image, "web", Cause::failed("InvalidImageName", "z", YOU), &at(60));
        assert_eq!(since(&steps), 60);
    }

    #[test]
    fn next_attempt_is_set_on_pending_steps_without_a_later_one() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
        steps.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(1));
        steps.set(StepName::Image, "later", pull("x"), &at(1));
        steps.set(StepName::Image, "over", pull("x").retried_at(5 * SECOND), &at(1));
        steps.retried_at(20 * SECOND, &at(10));
        let next = |name, subject| steps.get(name, subject).unwrap().next_retry_unix_nanos / SECOND;
        assert_eq!(next(StepName::Source, ""), 0);
        assert_eq!(next(StepName::Volumes, ""), 20);
        assert_eq!(next(StepName::Image, "later"), 40);
        assert_eq!(next(StepName::Image, "over"), 20);
    }

    #[test]
    fn a_cleared_cause_is_no_longer_explained() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Image, "web", pull("x"), &at(10));
        assert!(steps.clear(StepName::Image, "web"));
        assert!(!steps.clear(StepName::Image, "web"));
        let (steps, summary) = steps.explain(&at(30));
        assert!(steps.is_empty());
        assert_eq!(summary, "The pod waits for nothing.");
    }

    #[test]
    fn steps_are_listed_in_the_order_of_a_pods_life() {
        let mut steps = PodSteps::default();
        for name in
            [StepName::Termination, StepName::Container, StepName::Source, StepName::Sandbox, StepName::Image]
        {
            steps.set(name, "", Cause::done("pod-sync"), &at(1));
        }
        let names: Vec<&str> = steps.explain(&at(2)).0.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names, ["source", "image", "sandbox", "container", "termination"]);
    }

    #[test]
    fn the_summary_names_the_most_urgent_step_its_owner_and_next_attempt() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Source, "", Cause::done("pod-config"), &at(1));
        steps.set(
            StepName::Volumes,
            "data",
            Cause::waiting("not mounted", "claim data is unbound", YOU),
            &at(5),
        );
        assert_eq!(
            steps.explain(&at(20)).1,
            "Volumes data has been waiting for 15s: claim data is unbound (you have to act)."
        );
        steps.set(StepName::Image, "web", pull("no such host"), &at(10));
        assert_eq!(
            steps.explain(&at(20)).1,
            "Image web has been failing for 10s: no such host (you have to act, next attempt in 20s)."
        );
        steps.set(StepName::Termination, "", Cause::working("pod-sync", "waiting for web to stop"), &at(19));
        assert!(steps.explain(&at(20)).1.starts_with("Termination has been in progress for 1s"));
    }

    #[test]
    fn a_quarantined_worker_is_reported_before_the_termination() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Termination, "", Cause::working("pod-sync", "removed"), &at(1));
        let cause = Cause::failed("Panicked", "the worker panicked", "pod-sync").retried_at(12 * SECOND);
        steps.set(StepName::Worker, "", cause, &at(2));
        assert_eq!(
            steps.explain(&at(5)).1,
            "Worker has been failing for 3s: the worker panicked (pod-sync is to act, next attempt in 7s)."
        );
        steps.clear(StepName::Worker, "");
        assert!(steps.explain(&at(5)).1.starts_with("Termination has been in progress"));
    }

    #[test]
    fn a_pod_with_all_steps_done_waits_for_nothing() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Container, "web", Cause::done("runtime-shim"), &at(1));
        assert_eq!(steps.explain(&at(2)).1, "The pod waits for nothing.");
    }

    #[test]
    fn entries_of_containers_that_no_longer_exist_are_dropped() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Image, "old", pull("x"), &at(1));
        steps.set(StepName::Container, "old", pull("x"), &at(1));
        steps.retain(StepName::Image, |subject| subject == "web");
        assert!(steps.get(StepName::Image, "old").is_none());
        assert!(steps.get(StepName::Container, "old").is_some());
    }

    #[test]
    fn step_names_and_states_have_stable_wire_names() {
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
    fn since_is_reset_by_another_kind_but_not_by_another_message() {
        let since = |steps: &PodSteps| steps.explain(&at(0)).0[0].since_unix_nanos;
        let mut steps = PodSteps::default();
        steps.set(StepName::Volumes, "", Cause::waiting("Mounting", "one", YOU), &at(1));
        steps.set(StepName::Volumes, "", Cause::waiting("Mounting", "two", YOU), &at(2));
        assert_eq!(since(&steps), SECOND);
        steps.set(StepName::Volumes, "", Cause::waiting("NoAnswer", "two", YOU), &at(3));
        assert_eq!(since(&steps), 3 * SECOND);
        // An error of another kind is another wait, even with an attempt in between.
        steps.set(StepName::Volumes, "", Cause::failed("FailedMount", "x", YOU), &at(4));
        steps.set(StepName::Volumes, "", Cause::working("x", ""), &at(5));
        steps.set(StepName::Volumes, "", Cause::failed("Other", "x", YOU), &at(6));
        assert_eq!(since(&steps), 6 * SECOND);
    }

    #[test]
    fn an_overdue_attempt_is_reported_as_due_now() {
        let mut steps = PodSteps::default();
        steps.set(StepName::Image, "main", pull("no such host"), &at(10));
        let summary = |second| steps.explain(&at(second)).1;
        assert!(summary(39).contains("next attempt in 1s"), "{}", summary(39));
        assert!(summary(40).contains("next attempt now"), "{}", summary(40));
    }
}
