//! The state of a running service, from its answers to `Admin.GetProgress`.
//!
//! Moments are durations since any fixed origin of a clock that never goes back.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What people see of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceState {
    /// Its process runs and has not answered yet.
    Starting,
    /// All its loops turn and nothing that it depends on is missing.
    Running,
    /// It works, but something that it depends on does not.
    Degraded,
    /// Its process runs and does not answer, or a loop of it does not turn.
    Stuck,
    /// Its process has ended; it is started again in a moment.
    BackingOff,
    /// Its process has ended in a way that a restart would not mend.
    Failed,
    /// It is not to run.
    Stopped,
}

impl ServiceState {
    const ALL: [Self; 7] = [
        Self::Starting,
        Self::Running,
        Self::Degraded,
        Self::Stuck,
        Self::BackingOff,
        Self::Failed,
        Self::Stopped,
    ];

    /// The state of a word of `keelson.supervisor.v1`.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// The word in `keelson.supervisor.v1`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Degraded => "degraded",
            Self::Stuck => "stuck",
            Self::BackingOff => "backing-off",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for ServiceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A loop in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopReport {
    /// Its name.
    pub name: String,
    /// How long it has not turned.
    pub silent: Duration,
    /// From here on it counts as stuck.
    pub stuck_after: Duration,
}

/// A condition in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionReport {
    /// Its name.
    pub name: String,
    /// What is wrong; `None` when nothing is.
    pub problem: Option<String>,
}

/// An answer to `GetProgress`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The loops of the service.
    pub loops: Vec<LoopReport>,
    /// What it depends on.
    pub conditions: Vec<ConditionReport>,
}

/// What came of asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Poll {
    /// The service told about itself.
    Answer(Report),
    /// It answered, but with an error: alive and overloaded.
    Refused(String),
    /// No answer within the deadline, or no connection.
    Silent(String),
}

/// Polls without an answer before a silent process is killed, however long it has been silent: a machine
/// that was frozen as a whole must not lose its services when it wakes.
const SILENT_POLLS: u32 = 3;
/// How long a service may start before its state says why it is not ready.
const PATIENCE: Duration = Duration::from_secs(3);
/// Wait between two polls of a service that is well.
const CALM: Duration = Duration::from_secs(10);

/// The health of one process of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    started: Duration,
    answered: bool,
    state: ServiceState,
    message: String,
    // The last moment of which we know that all its loops turned.
    progress: Duration,
    bad_polls: u32,
    // Polls in a row in which the state was not `running`.
    unwell_polls: u32,
}

impl Health {
    /// A process that was started at `now`.
    pub fn new(now: Duration) -> Self {
        Self {
            started: now,
            answered: false,
            state: ServiceState::Starting,
            message: String::new(),
            progress: now,
            bad_polls: 0,
            unwell_polls: 0,
        }
    }

    /// Takes the outcome of a poll.
    pub fn observe(&mut self, now: Duration, poll: Poll) {
        match poll {
            Poll::Answer(report) => self.answer(now, &report),
            Poll::Refused(text) => {
                self.answered = true;
                self.bad_polls = 0;
                self.progress = now;
                self.state = ServiceState::Degraded;
                self.message = text;
            }
            Poll::Silent(text) => self.silent(now, text),
        }
        match self.state {
            ServiceState::Running => self.unwell_polls = 0,
            _ => self.unwell_polls = self.unwell_polls.saturating_add(1),
        }
    }

    fn answer(&mut self, now: Duration, report: &Report) {
        self.answered = true;
        if let Some(stuck) = report.loops.iter().filter(|l| l.silent > l.stuck_after).max_by_key(|l| l.silent)
        {
            self.bad_polls = self.bad_polls.saturating_add(1);
            self.progress = now.saturating_sub(stuck.silent).max(self.started);
            self.state = ServiceState::Stuck;
            self.message = format!("its loop {} has not turned for {} s", stuck.name, stuck.silent.as_secs());
            return;
        }
        self.bad_polls = 0;
        self.progress = now;
        let problems: Vec<&str> = report.conditions.iter().filter_map(|c| c.problem.as_deref()).collect();
        self.state = if problems.is_empty() { ServiceState::Running } else { ServiceState::Degraded };
        self.message = problems.join("; ");
    }

    fn silent(&mut self, now: Duration, text: String) {
        self.bad_polls = self.bad_polls.saturating_add(1);
        if self.answered {
            self.state = ServiceState::Stuck;
            self.message = text;
        } else if now.saturating_sub(self.started) >= PATIENCE {
            self.message = text;
        }
    }

    /// Why the process is to be killed: it has shown no progress for `limit`.
    pub fn give_up(&self, now: Duration, limit: Duration) -> Option<String> {
        let silent = now.saturating_sub(self.progress);
        (self.bad_polls >= SILENT_POLLS && silent >= limit).then(|| {
            let why = if self.message.is_empty() { "it has never answered" } else { &self.message };
            format!("killed after {} s without progress: {why}", silent.as_secs())
        })
    }

    /// How long to wait before asking again: eagerly while it starts, often while it is unwell, else every
    /// ten seconds.
    pub fn next_poll(&self, now: Duration) -> Duration {
        match self.state {
            ServiceState::Running => CALM,
            ServiceState::Starting if now.saturating_sub(self.started) < Duration::from_secs(5) => {
                Duration::from_millis(50)
            }
            ServiceState::Starting => Duration::from_secs(1),
            ServiceState::Stuck => Duration::from_secs(2),
            _ => {
                let whole = Duration::from_millis(250).saturating_mul(1 << self.unwell_polls.min(6));
                whole.min(CALM)
            }
        }
    }

    /// Whether it has ever answered.
    pub const fn answered(&self) -> bool {
        self.answered
    }

    /// What people see.
    pub const fn state(&self) -> ServiceState {
        self.state
    }

    /// Why the state is not `running`; empty when it is.
    pub fn message(&self) -> &str {
        &self.message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn good() -> Poll {
        Poll::Answer(Report::default())
    }

    fn silent() -> Poll {
        Poll::Silent("no answer".into())
    }

    fn with_loop(silent_s: u64) -> Poll {
        let one = LoopReport { name: "relist".into(), silent: at(silent_s), stuck_after: at(30) };
        Poll::Answer(Report { loops: vec![one], conditions: Vec::new() })
    }

    fn with_condition(problem: Option<&str>) -> Poll {
        let one = ConditionReport { name: "runtime".into(), problem: problem.map(Into::into) };
        Poll::Answer(Report { loops: Vec::new(), conditions: vec![one] })
    }

    #[test]
    fn a_service_is_starting_until_it_has_answered_once() {
        let mut health = Health::new(at(0));
        health.observe(at(1), silent());
        assert_eq!((health.state(), health.message()), (ServiceState::Starting, ""));
        health.observe(at(4), silent());
        assert_eq!((health.state(), health.message()), (ServiceState::Starting, "no answer"));
        assert!(!health.answered());
        health.observe(at(5), good());
        assert_eq!((health.state(), health.message()), (ServiceState::Running, ""));
        assert!(health.answered());
    }

    #[test]
    fn a_condition_that_is_not_ok_degrades_with_its_text() {
        let mut health = Health::new(at(0));
        health.observe(at(1), with_condition(Some("the runtime is away")));
        assert_eq!((health.state(), health.message()), (ServiceState::Degraded, "the runtime is away"));
        health.observe(at(2), with_condition(None));
        assert_eq!((health.state(), health.message()), (ServiceState::Running, ""));
    }

    #[test]
    fn an_answer_with_an_error_shows_life() {
        let mut health = Health::new(at(0));
        health.observe(at(1), Poll::Refused("too many calls".into()));
        assert_eq!((health.state(), health.message()), (ServiceState::Degraded, "too many calls"));
        assert!(health.give_up(at(1000), at(60)).is_none());
    }

    #[test]
    fn a_silent_loop_makes_a_service_stuck_and_after_a_minute_given_up() {
        let mut health = Health::new(at(0));
        health.observe(at(10), with_loop(5));
        assert_eq!(health.state(), ServiceState::Running);
        for (now, silent_s) in [(50, 31), (60, 41), (70, 51)] {
            health.observe(at(now), with_loop(silent_s));
            assert_eq!(health.state(), ServiceState::Stuck);
            assert!(health.give_up(at(now), at(60)).is_none(), "at {now}");
        }
        health.observe(at(80), with_loop(61));
        let why = health.give_up(at(80), at(60)).unwrap();
        assert_eq!(why, "killed after 61 s without progress: its loop relist has not turned for 61 s");
    }

    #[test]
    fn a_loop_that_turns_again_is_forgiven() {
        let mut health = Health::new(at(0));
        health.observe(at(50), with_loop(45));
        health.observe(at(55), with_loop(0));
        assert_eq!(health.state(), ServiceState::Running);
        assert!(health.give_up(at(55), at(1)).is_none());
    }

    #[test]
    fn a_stopped_process_is_given_up_after_a_minute() {
        let mut health = Health::new(at(0));
        health.observe(at(1), good());
        for now in (12..=60).step_by(4) {
            health.observe(at(now), silent());
            assert_eq!(health.state(), ServiceState::Stuck);
            assert!(health.give_up(at(now), at(60)).is_none(), "at {now}");
        }
        health.observe(at(61), silent());
        assert!(health.give_up(at(61), at(60)).is_some());
    }

    #[test]
    fn a_process_that_never_answers_is_given_up_too() {
        let mut health = Health::new(at(100));
        for now in [101, 130, 160] {
            health.observe(at(now), silent());
        }
        assert!(health.give_up(at(160), at(60)).is_some());
    }

    #[test]
    fn a_machine_that_was_frozen_does_not_lose_its_services() {
        let mut health = Health::new(at(0));
        health.observe(at(1), good());
        // An hour without a poll, then one that comes too early.
        health.observe(at(3600), silent());
        assert!(health.give_up(at(3600), at(60)).is_none());
        health.observe(at(3602), good());
        assert_eq!(health.state(), ServiceState::Running);
    }

    #[test]
    fn polls_are_eager_at_the_start_and_rare_when_all_is_well() {
        let mut health = Health::new(at(0));
        assert_eq!(health.next_poll(at(1)), Duration::from_millis(50));
        assert_eq!(health.next_poll(at(9)), at(1));
        health.observe(at(9), good());
        assert_eq!(health.next_poll(at(9)), at(10));
        health.observe(at(19), silent());
        assert_eq!(health.next_poll(at(19)), at(2));
    }

    #[test]
    fn a_lasting_degradation_is_asked_about_ever_less_often() {
        let mut health = Health::new(at(0));
        let mut waits = Vec::new();
        for now in 0..8 {
            health.observe(at(now), with_condition(Some("away")));
            waits.push(health.next_poll(at(now)).as_millis());
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
    }

    #[test]
    fn the_states_have_the_words_of_the_proto() {
        let words = ServiceState::ALL.map(ServiceState::as_str);
        assert_eq!(words, ["starting", "running", "degraded", "stuck", "backing-off", "failed", "stopped"]);
        for state in ServiceState::ALL {
            assert_eq!(ServiceState::of_word(state.as_str()), Some(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        assert_eq!(ServiceState::of_word("well"), None);
    }
}
