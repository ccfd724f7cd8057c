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
    /// Its resources are those that its source asks for; present only while they are not.
    Resize,
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
            Self::Resize => "resize",
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
mod tests;
