//! One service: its process, and what becomes of it.

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_init_core::{Exit, Health, Restarts, ServiceState, Verdict, judge_exit};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::Peer;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::stale::Started;

/// Moments are durations since the start of the supervisor.
pub(crate) type Moment = Duration;

/// A service under supervision.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) name: ServiceName,
    pub(crate) uid: u32,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) starts: u32,
    pub(crate) backoff: Restarts,
    /// Whether any of its processes has ever answered.
    pub(crate) ever_answered: bool,
    /// How its last process ended.
    last_end: String,
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Alive(Box<Process>),
    /// It is started at this moment.
    BackingOff(Moment),
    /// A restart would not help.
    Failed,
    Stopped,
}

/// A running process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) started: Moment,
    pub(crate) started_unix_nanos: i64,
    pub(crate) identity: Option<Started>,
    pub(crate) health: Health,
    /// When it is asked next; `None` while a question is open.
    pub(crate) next_poll: Option<Moment>,
    pub(crate) ending: Option<Ending>,
}

/// A process that was told to end.
#[derive(Debug)]
pub(crate) struct Ending {
    /// When it is killed; `None` once it was.
    pub(crate) kill_at: Option<Moment>,
    pub(crate) then: Then,
}

/// What follows.
#[derive(Debug)]
pub(crate) enum Then {
    Stop,
    RestartNow(&'static str),
    /// It was killed for this reason.
    RestartLater(String),
}

impl Unit {
    /// A service that is to be started at once.
    pub(crate) fn new(name: ServiceName, uid: u32, peer: Peer) -> Self {
        Self {
            name,
            uid,
            peer,
            phase: Phase::BackingOff(Moment::ZERO),
            starts: 0,
            backoff: Restarts::default(),
            ever_answered: false,
            last_end: String::new(),
            waiting: Vec::new(),
        }
    }

    pub(crate) fn process(&self) -> Option<&Process> {
        match &self.phase {
            Phase::Alive(process) => Some(process),
            _ => None,
        }
    }

    pub(crate) fn process_mut(&mut self) -> Option<&mut Process> {
        match &mut self.phase {
            Phase::Alive(process) => Some(process),
            _ => None,
        }
    }

    /// Its process has been started.
    pub(crate) fn has_started(&mut self, now: Moment, pid: u32, started_unix_nanos: i64) {
        self.starts += 1;
        self.phase = Phase::Alive(Box::new(Process {
            pid,
            started: now,
            started_unix_nanos,
            identity: Started::of(self.name.as_str(), pid),
            health: Health::new(now),
            next_poll: Some(now + Duration::from_millis(10)),
            ending: None,
        }));
        self.answer_waiting(&Ok(()));
    }

    /// Its process could not be started.
    pub(crate) fn has_not_started(&mut self, now: Moment, why: String, random: f64) {
        self.phase = Phase::BackingOff(now + self.backoff.next_delay(Duration::ZERO, random));
        self.answer_waiting(&Err(why.clone()));
        self.last_end = why;
    }

    fn answer_waiting(&mut self, result: &Result<(), String>) {
        for waiting in self.waiting.drain(..) {
            // A caller that has gone does not want the answer.
            let _ = waiting.send(result.clone());
        }
    }

    /// Its process has ended. Why it is not started again, where that is so and nobody has asked for it.
    pub(crate) fn has_ended(
        &mut self,
        now: Moment,
        exit: Exit,
        last_words: Option<&str>,
        random: f64,
    ) -> Option<String> {
        let Phase::Alive(process) = std::mem::replace(&mut self.phase, Phase::Stopped) else { return None };
        let lived = now.saturating_sub(process.started);
        let back_off = |unit: &mut Self| {
            unit.phase = Phase::BackingOff(now + unit.backoff.next_delay(lived, random));
        };
        let (name, pid) = (self.name, process.pid);
        match process.ending.map(|ending| ending.then) {
            Some(Then::Stop) => {
                tracing::info!(service = %name, pid, %exit, "the service has ended");
                self.last_end = String::new();
            }
            Some(Then::RestartNow(why)) => {
                self.last_end = format!("restarted {why} ({exit})");
                self.backoff.reset();
                self.phase = Phase::BackingOff(now);
            }
            Some(Then::RestartLater(why)) => {
                self.last_end = why;
                back_off(self);
            }
            None => match judge_exit(exit, last_words) {
                Verdict::Restart(why) => {
                    tracing::warn!(service = %name, pid, lived_ms = lived.as_millis(), "the service {why}, starting it again");
                    self.last_end = why;
                    back_off(self);
                }
                Verdict::Fail(why) => {
                    tracing::error!(service = %name, pid, "the service is not started again: {why}");
                    self.answer_waiting(&Err(why.clone()));
                    self.last_end.clone_from(&why);
                    self.phase = Phase::Failed;
                    return Some(why);
                }
            },
        }
        None
    }

    /// Tells the process to end. A service without one is stopped at once.
    pub(crate) fn stop(&mut self, now: Moment, limit: Duration) {
        self.answer_waiting(&Err("init is ending".to_owned()));
        match &mut self.phase {
            Phase::Alive(process) => process.end(Some(now + limit), Then::Stop),
            phase => *phase = Phase::Stopped,
        }
    }

    /// Ends the process and starts it again at once; `done` hears when that has happened.
    pub(crate) fn restart(
        &mut self,
        now: Moment,
        limit: Duration,
        why: &'static str,
        done: oneshot::Sender<Result<(), String>>,
    ) {
        self.waiting.push(done);
        match &mut self.phase {
            Phase::Alive(process) => process.end(Some(now + limit), Then::RestartNow(why)),
            phase => {
                self.backoff.reset();
                *phase = Phase::BackingOff(now);
            }
        }
    }

    /// Kills the process because it makes no progress.
    pub(crate) fn give_up(&mut self, why: String) {
        tracing::error!(service = %self.name, "the service is {why}; starting it again");
        if let Phase::Alive(process) = &mut self.phase {
            process.ending = Some(Ending { kill_at: None, then: Then::RestartLater(why) });
            process.signal(Signal::KILL);
        }
    }

    /// The next moment at which something is to be done, if any.
    pub(crate) fn next_moment(&self) -> Option<Moment> {
        match &self.phase {
            Phase::BackingOff(until) => Some(*until),
            Phase::Alive(process) => {
                let kill = process.ending.as_ref().and_then(|ending| ending.kill_at);
                let poll = process.next_poll.filter(|_| process.ending.is_none());
                kill.into_iter().chain(poll).min()
            }
            Phase::Failed | Phase::Stopped => None,
        }
    }

    pub(crate) fn state(&self) -> ServiceState {
        match &self.phase {
            Phase::Alive(process) => process.health.state(),
            Phase::BackingOff(_) => ServiceState::BackingOff,
            Phase::Failed => ServiceState::Failed,
            Phase::Stopped => ServiceState::Stopped,
        }
    }

    /// As the API shows it. `to_unix` converts a moment.
    pub(crate) fn describe(&self, to_unix: impl Fn(Moment) -> i64) -> pb::Service {
        let process = self.process();
        let own = process.map(|p| p.health.message()).filter(|message| !message.is_empty());
        let next = match &self.phase {
            Phase::BackingOff(until) => to_unix(*until),
            _ => 0,
        };
        pb::Service {
            name: self.name.to_string(),
            pid: process.map_or(0, |p| p.pid),
            state: self.state().to_string(),
            restarts: self.starts.saturating_sub(1),
            pss_kib: 0,
            message: own.unwrap_or(&self.last_end).to_owned(),
            started_unix_nanos: process.map_or(0, |p| p.started_unix_nanos),
            next_start_unix_nanos: next,
            uid: self.uid,
            not_running_since_unix_nanos: 0,
        }
    }
}

impl Process {
    /// SIGTERM now, SIGKILL at `kill_at`. A process that is ending already keeps its limit.
    fn end(&mut self, kill_at: Option<Moment>, then: Then) {
        match &mut self.ending {
            Some(ending) => ending.then = then,
            None => {
                self.ending = Some(Ending { kill_at, then });
                self.signal(Signal::TERM);
            }
        }
    }

    /// Kills it if its time to end by itself is over.
    pub(crate) fn kill_if_due(&mut self, now: Moment) {
        if let Some(ending) = &mut self.ending
            && ending.kill_at.is_some_and(|at| at <= now)
        {
            ending.kill_at = None;
            self.signal(Signal::KILL);
        }
    }

    /// Signals the process. It is our child and not reaped yet, so the pid is still its own.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
            && let Err(error) = kill_process(pid, signal)
        {
            tracing::warn!(pid = self.pid, ?signal, %error, "cannot signal a service");
        }
    }
}
