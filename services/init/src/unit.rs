//! One service and the lifecycle of its process.

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_init_core::{Exit, Health, RestartBackoff, ServiceState, Verdict, judge_exit};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::Peer;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::oneshot;

use crate::leftover_processes::StartedProcess;

/// A time as the duration since the start of the supervisor.
pub(crate) type Moment = Duration;

/// A supervised service.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) name: ServiceName,
    pub(crate) uid: u32,
    pub(crate) peer: Peer,
    pub(crate) phase: Phase,
    pub(crate) starts: u32,
    pub(crate) backoff: RestartBackoff,
    /// Whether any of its processes has answered.
    pub(crate) ever_answered: bool,
    /// How the last process ended.
    last_exit: String,
    waiters: Vec<oneshot::Sender<Result<(), String>>>,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Alive(Box<Process>),
    /// It is started at this time.
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
    pub(crate) identity: Option<StartedProcess>,
    pub(crate) health: Health,
    /// When it is polled next; `None` while a poll is in progress.
    pub(crate) next_poll: Option<Moment>,
    pub(crate) ending: Option<Termination>,
}

/// The requested end of a process.
#[derive(Debug)]
pub(crate) struct Termination {
    /// When it is killed; `None` after that.
    pub(crate) kill_at: Option<Moment>,
    pub(crate) after: AfterExit,
}

/// What to do after the process has ended.
#[derive(Debug)]
pub(crate) enum AfterExit {
    Stop,
    RestartNow(&'static str),
    /// Restart it after the back-off; it was killed for this reason.
    RestartAfterBackoff(String),
}

impl Unit {
    /// A service that is started at once.
    pub(crate) fn new(name: ServiceName, uid: u32, peer: Peer) -> Self {
        Self {
            name,
            uid,
            peer,
            phase: Phase::BackingOff(Moment::ZERO),
            starts: 0,
            backoff: RestartBackoff::default(),
            ever_answered: false,
            last_exit: String::new(),
            waiters: Vec::new(),
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

    /// Records that its process was started.
    pub(crate) fn on_started(&mut self, now: Moment, pid: u32, started_unix_nanos: i64) {
        self.starts += 1;
        self.phase = Phase::Alive(Box::new(Process {
            pid,
            started: now,
            started_unix_nanos,
            identity: StartedProcess::of(self.name.as_str(), pid),
            health: Health::new(now),
            next_poll: Some(now + Duration::from_millis(10)),
            ending: None,
        }));
        self.answer_waiters(&Ok(()));
    }

    /// Records that its process could not be started.
    pub(crate) fn on_start_failed(&mut self, now: Moment, why: String, random: f64) {
        self.phase = Phase::BackingOff(now + self.backoff.next_delay(Duration::ZERO, random));
        self.answer_waiters(&Err(why.clone()));
        self.last_exit = why;
    }

    fn answer_waiters(&mut self, result: &Result<(), String>) {
        for waiter in self.waiters.drain(..) {
            // The caller may be gone.
            let _ = waiter.send(result.clone());
        }
    }

    /// Records the end of its process. Returns why it is not restarted, if it failed for good unexpectedly.
    pub(crate) fn on_exit(
        &mut self,
        now: Moment,
        exit: Exit,
        reported_error: Option<&str>,
        random: f64,
    ) -> Option<String> {
        let Phase::Alive(process) = std::mem::replace(&mut self.phase, Phase::Stopped) else { return None };
        let uptime = now.saturating_sub(process.started);
        let back_off = |unit: &mut Self| {
            unit.phase = Phase::BackingOff(now + unit.backoff.next_delay(uptime, random));
        };
        let (name, pid) = (self.name, process.pid);
        match process.ending.map(|ending| ending.after) {
            Some(AfterExit::Stop) => {
                tracing::info!(service = %name, pid, %exit, "the service has ended");
                self.last_exit = String::new();
            }
            Some(AfterExit::RestartNow(why)) => {
                self.last_exit = format!("restarted {why} ({exit})");
                self.backoff.reset();
                self.phase = Phase::BackingOff(now);
            }
            Some(AfterExit::RestartAfterBackoff(why)) => {
                self.last_exit = why;
                back_off(self);
            }
            None => match judge_exit(exit, reported_error) {
                Verdict::Restart(why) => {
                    tracing::warn!(service = %name, pid, lived_ms = uptime.as_millis(), "the service {why}, restarting it");
                    self.last_exit = why;
                    back_off(self);
                }
                Verdict::Fail(why) => {
                    tracing::error!(service = %name, pid, "the service will not be restarted: {why}");
                    self.answer_waiters(&Err(why.clone()));
                    self.last_exit.clone_from(&why);
                    self.phase = Phase::Failed;
                    return Some(why);
                }
            },
        }
        None
    }

    /// Ends the process. A service without one is stopped at once.
    pub(crate) fn stop(&mut self, now: Moment, limit: Duration) {
        self.answer_waiters(&Err("init is ending".to_owned()));
        match &mut self.phase {
            Phase::Alive(process) => process.terminate(Some(now + limit), AfterExit::Stop),
            phase => *phase = Phase::Stopped,
        }
    }

    /// Ends the process and restarts it at once; `done` receives the result.
    pub(crate) fn restart(
        &mut self,
        now: Moment,
        limit: Duration,
        why: &'static str,
        done: oneshot::Sender<Result<(), String>>,
    ) {
        self.waiters.push(done);
        match &mut self.phase {
            Phase::Alive(process) => process.terminate(Some(now + limit), AfterExit::RestartNow(why)),
            phase => {
                self.backoff.reset();
                *phase = Phase::BackingOff(now);
            }
        }
    }

    /// Kills the process because it makes no progress.
    pub(crate) fn kill_stuck(&mut self, why: String) {
        tracing::error!(service = %self.name, "the service is {why}; restarting it");
        if let Phase::Alive(process) = &mut self.phase {
            process.ending = Some(Termination { kill_at: None, after: AfterExit::RestartAfterBackoff(why) });
            process.signal(Signal::KILL);
        }
    }

    /// When the next action is due, if any.
    pub(crate) fn next_due(&self) -> Option<Moment> {
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

    /// The service in the API. `to_unix` converts a time.
    pub(crate) fn describe(&self, to_unix: impl Fn(Moment) -> i64) -> pb::Service {
        let process = self.process();
        let health_message = process.map(|p| p.health.message()).filter(|message| !message.is_empty());
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
            message: health_message.unwrap_or(&self.last_exit).to_owned(),
            started_unix_nanos: process.map_or(0, |p| p.started_unix_nanos),
            next_start_unix_nanos: next,
            uid: self.uid,
            not_running_since_unix_nanos: 0,
        }
    }
}

impl Process {
    /// Sends SIGTERM now, and SIGKILL at `kill_at`. A process that is ending already keeps its limit.
    fn terminate(&mut self, kill_at: Option<Moment>, after: AfterExit) {
        match &mut self.ending {
            Some(ending) => ending.after = after,
            None => {
                self.ending = Some(Termination { kill_at, after });
                self.signal(Signal::TERM);
            }
        }
    }

    /// Kills the process when its time to end is over.
    pub(crate) fn kill_if_due(&mut self, now: Moment) {
        if let Some(ending) = &mut self.ending
            && ending.kill_at.is_some_and(|at| at <= now)
        {
            ending.kill_at = None;
            self.signal(Signal::KILL);
        }
    }

    /// Signals the process. It is a child that is not reaped yet, so the pid cannot belong to another process.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
            && let Err(error) = kill_process(pid, signal)
        {
            tracing::warn!(pid = self.pid, ?signal, %error, "cannot signal a service");
        }
    }
}
