//! The state of a running service, from its answers to `Admin.GetProgress`.
//!
//! Times are durations since a fixed origin of a monotonic clock.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The state of a service, as operators see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceState {
    /// The process runs and has not answered yet.
    Starting,
    /// All loops make progress and no dependency is missing.
    Running,
    /// It works, but a dependency is missing.
    Degraded,
    /// The process runs but does not answer, or a loop makes no progress.
    Stuck,
    /// The process ended and will be restarted after the back-off.
    BackingOff,
    /// The process ended with an error that a restart would not fix.
    Failed,
    /// It is not meant to run.
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

    /// Parses the name of a state in `keelson.supervisor.v1`.
    pub fn parse_name(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// The name in `keelson.supervisor.v1`.
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
    /// The time since its last progress.
    pub stalled: Duration,
    /// The time without progress after which it counts as stuck.
    pub stuck_after: Duration,
}

/// A condition in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionReport {
    /// Its name.
    pub name: String,
    /// The error; `None` if the condition is good.
    pub error: Option<String>,
}

/// An answer to `GetProgress`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The loops of the service.
    pub loops: Vec<LoopReport>,
    /// The conditions of the service.
    pub conditions: Vec<ConditionReport>,
}

/// The result of a poll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Poll {
    /// The service answered with a report.
    Answer(Report),
    /// It answered with an error: it is alive but overloaded.
    Error(String),
    /// No answer within the deadline, or no connection.
    NoAnswer(String),
}

/// The number of failed polls before a silent process is killed, regardless of their duration: after the whole machine was
/// frozen, the services must survive.
const MIN_FAILED_POLLS: u32 = 3;
/// How long a service may start before its state says why it is not ready.
const READY_GRACE: Duration = Duration::from_secs(3);
/// The interval between polls of a healthy service.
const RUNNING_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The health of one process of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    started: Duration,
    answered: bool,
    state: ServiceState,
    message: String,
    // When all loops were last known to make progress.
    progress: Duration,
    failed_polls: u32,
    // Polls in a row with a state other than `running`.
    unhealthy_polls: u32,
}

impl Health {
    /// The health of a process that was started at `now`.
    pub fn new(now: Duration) -> Self {
        Self {
            started: now,
            answered: false,
            state: ServiceState::Starting,
            message: String::new(),
            progress: now,
            failed_polls: 0,
            unhealthy_polls: 0,
        }
    }

    /// Applies the result of a poll.
    pub fn observe(&mut self, now: Duration, poll: Poll) {
        match poll {
            Poll::Answer(report) => self.apply_report(now, &report),
            Poll::Error(text) => {
                self.answered = true;
                self.failed_polls = 0;
                self.progress = now;
                self.state = ServiceState::Degraded;
                self.message = text;
            }
            Poll::NoAnswer(text) => self.no_answer(now, text),
        }
        match self.state {
            ServiceState::Running => self.unhealthy_polls = 0,
            _ => self.unhealthy_polls = self.unhealthy_polls.saturating_add(1),
        }
    }

    fn apply_report(&mut self, now: Duration, report: &Report) {
        self.answered = true;
        if let Some(stuck) =
            report.loops.iter().filter(|l| l.stalled > l.stuck_after).max_by_key(|l| l.stalled)
        {
            self.failed_polls = self.failed_polls.saturating_add(1);
            self.progress = now.saturating_sub(stuck.stalled).max(self.started);
            self.state = ServiceState::Stuck;
            self.message =
                format!("its loop {} has made no progress for {} s", stuck.name, stuck.stalled.as_secs());
            return;
        }
        self.failed_polls = 0;
        self.progress = now;
        let errors: Vec<&str> = report.conditions.iter().filter_map(|c| c.error.as_deref()).collect();
        self.state = if errors.is_empty() { ServiceState::Running } else { ServiceState::Degraded };
        self.message = errors.join("; ");
    }

    fn no_answer(&mut self, now: Duration, text: String) {
        self.failed_polls = self.failed_polls.saturating_add(1);
        if self.answered {
            self.state = ServiceState::Stuck;
            self.message = text;
        } else if now.saturating_sub(self.started) >= READY_GRACE {
            self.message = text;
        }
    }

    /// Why the process must be killed: it made no progress for `limit`.
    pub fn kill_reason(&self, now: Duration, limit: Duration) -> Option<String> {
        let stalled = now.saturating_sub(self.progress);
        (self.failed_polls >= MIN_FAILED_POLLS && stalled >= limit).then(|| {
            let why = if self.message.is_empty() { "it has never answered" } else { &self.message };
            format!("killed after {} s without progress: {why}", stalled.as_secs())
        })
    }

    /// The interval until the next poll: short during the start and while the service is unhealthy, else ten seconds.
    pub fn next_poll(&self, now: Duration) -> Duration {
        match self.state {
            ServiceState::Running => RUNNING_POLL_INTERVAL,
            ServiceState::Starting if now.saturating_sub(self.started) < Duration::from_secs(5) => {
                Duration::from_millis(50)
            }
            ServiceState::Starting => Duration::from_secs(1),
            ServiceState::Stuck => Duration::from_secs(2),
            _ => {
                let whole = Duration::from_millis(250).saturating_mul(1 << self.unhealthy_polls.min(6));
                whole.min(RUNNING_POLL_INTERVAL)
            }
        }
    }

    /// Whether the service has answered since its start.
    pub const fn answered(&self) -> bool {
        self.answered
    }

    /// The current state.
    pub const fn state(&self) -> ServiceState {
        self.state
    }

    /// Why the state is not `running`; empty if it is.
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

    fn healthy_report() -> Poll {
        Poll::Answer(Report::default())
    }

    fn no_answer() -> Poll {
        Poll::NoAnswer("no answer".into())
    }

    fn with_loop(stalled_s: u64) -> Poll {
        let one = LoopReport { name: "relist".into(), stalled: at(stalled_s), stuck_after: at(30) };
        Poll::Answer(Report { loops: vec![one], conditions: Vec::new() })
    }

    fn with_condition(error: Option<&str>) -> Poll {
        let one = ConditionReport { name: "runtime".into(), error: error.map(Into::into) };
        Poll::Answer(Report { loops: Vec::new(), conditions: vec![one] })
    }

    #[test]
    fn a_service_is_starting_until_it_has_answered_once() {
        let mut health = Health::new(at(0));
        health.observe(at(1), no_answer());
        assert_eq!((health.state(), health.message()), (ServiceState::Starting, ""));
        health.observe(at(4), no_answer());
        assert_eq!((health.state(), health.message()), (ServiceState::Starting, "no answer"));
        assert!(!health.answered());
        health.observe(at(5), healthy_report());
        assert_eq!((health.state(), health.message()), (ServiceState::Running, ""));
        assert!(health.answered());
    }

    #[test]
    fn a_bad_condition_degrades_the_service_with_its_message() {
        let mut health = Health::new(at(0));
        health.observe(at(1), with_condition(Some("the runtime is down")));
        assert_eq!((health.state(), health.message()), (ServiceState::Degraded, "the runtime is down"));
        health.observe(at(2), with_condition(None));
        assert_eq!((health.state(), health.message()), (ServiceState::Running, ""));
    }

    #[test]
    fn an_error_answer_counts_as_alive() {
        let mut health = Health::new(at(0));
        health.observe(at(1), Poll::Error("too many calls".into()));
        assert_eq!((health.state(), health.message()), (ServiceState::Degraded, "too many calls"));
        assert!(health.kill_reason(at(1000), at(60)).is_none());
    }

    #[test]
    fn a_stalled_loop_makes_a_service_stuck_and_killed_after_a_minute() {
        let mut health = Health::new(at(0));
        health.observe(at(10), with_loop(5));
        assert_eq!(health.state(), ServiceState::Running);
        for (now, stalled_s) in [(50, 31), (60, 41), (70, 51)] {
            health.observe(at(now), with_loop(stalled_s));
            assert_eq!(health.state(), ServiceState::Stuck);
            assert!(health.kill_reason(at(now), at(60)).is_none(), "at {now}");
        }
        health.observe(at(80), with_loop(61));
        let why = health.kill_reason(at(80), at(60)).unwrap();
        assert_eq!(why, "killed after 61 s without progress: its loop relist has made no progress for 61 s");
    }

    #[test]
    fn a_loop_that_recovers_makes_the_service_running_again() {
        let mut health = Health::new(at(0));
        health.observe(at(50), with_loop(45));
        health.observe(at(55), with_loop(0));
        assert_eq!(health.state(), ServiceState::Running);
        assert!(health.kill_reason(at(55), at(1)).is_none());
    }

    #[test]
    fn a_stopped_process_is_killed_after_a_minute() {
        let mut health = Health::new(at(0));
        health.observe(at(1), healthy_report());
        for now in (12..=60).step_by(4) {
            health.observe(at(now), no_answer());
            assert_eq!(health.state(), ServiceState::Stuck);
            assert!(health.kill_reason(at(now), at(60)).is_none(), "at {now}");
        }
        health.observe(at(61), no_answer());
        assert!(health.kill_reason(at(61), at(60)).is_some());
    }

    #[test]
    fn a_process_that_never_answers_is_killed() {
        let mut health = Health::new(at(100));
        for now in [101, 130, 160] {
            health.observe(at(now), no_answer());
        }
        assert!(health.kill_reason(at(160), at(60)).is_some());
    }

    #[test]
    fn services_survive_a_freeze_of_the_machine() {
        let mut health = Health::new(at(0));
        health.observe(at(1), healthy_report());
        // An hour without a poll, then one that fails.
        health.observe(at(3600), no_answer());
        assert!(health.kill_reason(at(3600), at(60)).is_none());
        health.observe(at(3602), healthy_report());
        assert_eq!(health.state(), ServiceState::Running);
    }

    #[test]
    fn polls_are_frequent_at_the_start_and_rare_when_running() {
        let mut health = Health::new(at(0));
        assert_eq!(health.next_poll(at(1)), Duration::from_millis(50));
        assert_eq!(health.next_poll(at(9)), at(1));
        health.observe(at(9), healthy_report());
        assert_eq!(health.next_poll(at(9)), at(10));
        health.observe(at(19), no_answer());
        assert_eq!(health.next_poll(at(19)), at(2));
    }

    #[test]
    fn polls_of_a_degraded_service_back_off() {
        let mut health = Health::new(at(0));
        let mut waits = Vec::new();
        for now in 0..8 {
            health.observe(at(now), with_condition(Some("away")));
            waits.push(health.next_poll(at(now)).as_millis());
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
    }

    #[test]
    fn state_names_match_the_supervisor_api() {
        let words = ServiceState::ALL.map(ServiceState::as_str);
        assert_eq!(words, ["starting", "running", "degraded", "stuck", "backing-off", "failed", "stopped"]);
        for state in ServiceState::ALL {
            assert_eq!(ServiceState::parse_name(state.as_str()), Some(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        assert_eq!(ServiceState::parse_name("well"), None);
    }
}
