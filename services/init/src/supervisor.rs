//! The loop that starts services, watches them and starts them again.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use keelson_config::{Paths, ServiceName};
use keelson_init_core::{Exit, Poll, ServiceState};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::{
    CancellationToken, Context, EventRing, LoopHandle, ObjectRef, Peer, WatchHub, last_words, now_unix_nanos,
    status,
};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, wait, waitpid};
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::launch::Launcher;
use crate::systemd::Systemd;
use crate::unit::{Moment, Phase, Unit};
use crate::{poller, stale};

/// The event of the node when a service cannot be started, or ends for good while the agent goes on
/// (pod-lifecycle.md §18).
const SETUP_FAILED: &str = "KubeletSetupFailed";

/// The limits of the supervisor.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// A service without progress for this long is killed and started again.
    pub stuck_limit: Duration,
    /// A service that was told to end is killed after this long.
    pub stop_limit: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { stuck_limit: Duration::from_secs(60), stop_limit: Duration::from_secs(5) }
    }
}

/// What others ask of the supervisor.
#[derive(Debug)]
pub enum Command {
    /// Restart a service; `done` hears when its new process was started, or why it was not.
    Restart {
        /// Which.
        service: ServiceName,
        /// Why, as its message shows it: `on request`…
        why: &'static str,
        /// Who waits.
        done: oneshot::Sender<Result<(), String>>,
    },
}

/// The services as the API shows them, without memory figures.
pub type Services = WatchHub<ServiceName, pb::Service>;

/// The supervisor; [`Supervisor::run`] is its loop.
#[derive(Debug)]
pub struct Supervisor {
    shutdown: CancellationToken,
    hurry: CancellationToken,
    handle: LoopHandle,
    launcher: Launcher,
    timing: Timing,
    services: Services,
    systemd: Systemd,
    units: Vec<Unit>,
    commands: mpsc::Receiver<Command>,
    polled: (mpsc::Sender<Polled>, mpsc::Receiver<Polled>),
    children: SignalStream,
    events: EventRing,
    node: ObjectRef,
    paths: Paths,
    started_file: PathBuf,
    started_changed: bool,
    origin: Instant,
    stopping: bool,
}

/// The outcome of asking the process `pid` of a service.
#[derive(Debug)]
struct Polled {
    service: ServiceName,
    pid: u32,
    poll: Poll,
}

impl Supervisor {
    /// A supervisor of all services. `hurry` kills what is left while it ends.
    ///
    /// # Errors
    /// The signal of children cannot be listened to.
    pub fn new(
        context: &Context,
        launcher: Launcher,
        timing: Timing,
        hurry: CancellationToken,
    ) -> io::Result<(Self, Services, mpsc::Sender<Command>)> {
        let run_dir = &context.config.paths.run_dir;
        let units = ServiceName::supervised()
            .map(|name| Unit::new(name, launcher.uid(name), Peer::service(run_dir, name)))
            .collect();
        let services = Services::new();
        let (sender, commands) = mpsc::channel(16);
        let supervisor = Self {
            shutdown: context.shutdown.clone(),
            hurry,
            handle: context.progress.register("supervisor"),
            launcher,
            timing,
            services: services.clone(),
            systemd: Systemd::new(),
            units,
            commands,
            polled: mpsc::channel(16),
            children: signal(SignalKind::child())?,
            events: context.events.clone(),
            node: ObjectRef::node(&context.config.node_name),
            paths: context.config.paths.clone(),
            started_file: stale::file(run_dir),
            started_changed: false,
            origin: Instant::now(),
            stopping: false,
        };
        Ok((supervisor, services, sender))
    }

    fn now(&self) -> Moment {
        self.origin.elapsed()
    }

    /// Runs until the shutdown, then ends all services. Returns when none is left.
    pub async fn run(mut self) {
        let (shutdown, hurry) = (self.shutdown.clone(), self.hurry.clone());
        loop {
            self.turn();
            if self.stopping && self.units.iter().all(|unit| matches!(unit.phase, Phase::Stopped)) {
                return;
            }
            let wake = self.next_wake();
            // Cancel-safe, each of them: signals and messages stay in their queues, a token stays cancelled,
            // and the sleep is computed anew.
            tokio::select! {
                _ = self.children.recv() => {}
                Some(Command::Restart { service, why, done }) = self.commands.recv() => {
                    self.restart(service, why, done);
                }
                Some(polled) = self.polled.1.recv() => self.observe(polled),
                () = shutdown.cancelled(), if !self.stopping => self.stop(),
                () = hurry.cancelled(), if self.stopping => self.kill_all(),
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    /// Everything that is due now.
    fn turn(&mut self) {
        self.handle.tick();
        self.reap();
        let now = self.now();
        for index in 0..self.units.len() {
            if matches!(self.units[index].phase, Phase::BackingOff(until) if until <= now) {
                self.start(index);
            }
            if let Some(process) = self.units[index].process_mut() {
                process.kill_if_due(now);
            }
            self.ask_if_due(index, now);
        }
        self.publish();
        if std::mem::take(&mut self.started_changed) {
            self.write_started();
        }
    }

    fn next_wake(&self) -> Duration {
        let now = self.now();
        let due = self.units.iter().filter_map(Unit::next_moment).min();
        let wait = due.map_or(Duration::MAX, |due| due.saturating_sub(now));
        // One millisecond at least: the timer is no finer, and a busy loop is worse than a late turn.
        wait.clamp(Duration::from_millis(1), self.systemd.heartbeat())
    }

    fn start(&mut self, index: usize) {
        let now = self.now();
        let unit = &mut self.units[index];
        match self.launcher.spawn(unit.name) {
            Ok(pid) => {
                unit.has_started(now, pid, now_unix_nanos());
                tracing::info!(service = %unit.name, pid, uid = unit.uid, "started");
                self.started_changed = true;
            }
            Err(error) => {
                let why = status::chain(&error);
                tracing::error!(service = %unit.name, "{why}");
                self.events.warning(self.node.clone(), SETUP_FAILED, format!("{}: {why}", unit.name));
                unit.has_not_started(now, why, fastrand::f64());
            }
        }
    }

    fn ask_if_due(&mut self, index: usize, now: Moment) {
        let unit = &mut self.units[index];
        let (service, peer) = (unit.name, unit.peer.clone());
        let Some(process) = unit.process_mut() else { return };
        if process.ending.is_some() || process.next_poll.is_none_or(|due| due > now) {
            return;
        }
        process.next_poll = None;
        let pid = process.pid;
        let sender = self.polled.0.clone();
        // At most one per process, and each ends within the deadline of the call.
        tokio::spawn(async move {
            let poll = poller::ask(peer).await;
            // The supervisor has ended when nobody receives.
            let _ = sender.send(Polled { service, pid, poll }).await;
        });
    }

    fn observe(&mut self, polled: Polled) {
        let (now, limit) = (self.now(), self.timing.stuck_limit);
        let Some(unit) = self.units.iter_mut().find(|unit| unit.name == polled.service) else { return };
        let Some(process) = unit.process_mut().filter(|process| process.pid == polled.pid) else { return };
        process.health.observe(now, polled.poll);
        process.next_poll = Some(aligned(now, process.health.next_poll(now)));
        let answered = process.health.answered();
        let hopeless = process.health.give_up(now, limit).filter(|_| process.ending.is_none());
        unit.ever_answered |= answered;
        if let Some(why) = hopeless {
            unit.give_up(why);
        }
    }

    fn restart(
        &mut self,
        service: ServiceName,
        why: &'static str,
        done: oneshot::Sender<Result<(), String>>,
    ) {
        let (now, limit) = (self.now(), self.timing.stop_limit);
        if self.stopping {
            let _ = done.send(Err("init is ending".to_owned()));
        } else if let Some(unit) = self.units.iter_mut().find(|unit| unit.name == service) {
            tracing::info!(%service, "restarting {why}");
            unit.restart(now, limit, why, done);
        }
    }

    fn stop(&mut self) {
        tracing::info!("ending all services; containers run on");
        self.stopping = true;
        self.systemd.stopping();
        let (now, limit) = (self.now(), self.timing.stop_limit);
        for unit in self.units.iter_mut().rev() {
            unit.stop(now, limit);
        }
    }

    fn kill_all(&mut self) {
        self.hurry = CancellationToken::new();
        for process in self.units.iter().filter_map(Unit::process) {
            process.signal(Signal::KILL);
        }
    }

    /// Takes the exit of every child that has ended. As process 1 also of those that were left to us; else
    /// only of our own, so that nobody else's child is taken away.
    fn reap(&mut self) {
        if std::process::id() == 1 {
            while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                self.ended(pid, status);
            }
            return;
        }
        let pids: Vec<u32> = self.units.iter().filter_map(|unit| Some(unit.process()?.pid)).collect();
        for pid in pids.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            if let Ok(Some((pid, status))) = waitpid(Some(pid), WaitOptions::NOHANG) {
                self.ended(pid, status);
            }
        }
    }

    fn ended(&mut self, pid: Pid, status: WaitStatus) {
        let exit = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(number)) => Exit::Signal(number),
            (None, None) => return,
        };
        let now = self.now();
        let raw = pid.as_raw_nonzero().get().unsigned_abs();
        let unit =
            self.units.iter_mut().find(|unit| unit.process().is_some_and(|process| process.pid == raw));
        match unit {
            Some(unit) => {
                let last_words = last_words::take(&self.paths, unit.name);
                let failed = unit.has_ended(now, exit, last_words.as_deref(), fastrand::f64());
                if self.stopping {
                    unit.phase = Phase::Stopped;
                } else if let Some(why) = failed {
                    self.events.warning(self.node.clone(), SETUP_FAILED, format!("{}: {why}", unit.name));
                }
                self.started_changed = true;
            }
            None => tracing::debug!(pid = raw, %exit, "reaped an orphan"),
        }
    }

    /// Tells watchers and systemd what has changed.
    fn publish(&mut self) {
        let (now, unix) = (self.now(), now_unix_nanos());
        let to_unix = |at: Moment| unix + nanos(at) - nanos(now);
        for unit in &self.units {
            let mut service = unit.describe(to_unix);
            let old = self.services.get(&unit.name);
            if unit.state() != ServiceState::Running {
                let since =
                    old.as_ref().map(|old| old.not_running_since_unix_nanos).filter(|since| *since != 0);
                service.not_running_since_unix_nanos = since.unwrap_or(unix);
            }
            if let Some(old) = old {
                let degraded_otherwise = service.state == "degraded" && old.message != service.message;
                if old.state != service.state || degraded_otherwise {
                    log_change(&old.state, &service);
                }
                // The same moment, computed anew, differs by the rounding of two clocks.
                if old.state == service.state
                    && old.restarts == service.restarts
                    && old.next_start_unix_nanos != 0
                {
                    service.next_start_unix_nanos = old.next_start_unix_nanos;
                }
            }
            self.services.set_if_changed(unit.name, service);
        }
        let ready = self.units.iter().all(|unit| unit.ever_answered);
        let status = self.systemd.listens().then(|| self.status());
        self.systemd.tell(ready, status);
    }

    /// One line for `systemctl status`.
    fn status(&self) -> String {
        let good = self.units.iter().filter(|unit| unit.state() == ServiceState::Running).count();
        let mut text = format!("{good} of {} services running", self.units.len());
        for unit in self.units.iter().filter(|unit| unit.state() != ServiceState::Running) {
            text.push_str(&format!("; {} is {}", unit.name, unit.state()));
        }
        text
    }

    fn write_started(&self) {
        let list: Vec<stale::Started> =
            self.units.iter().filter_map(|unit| unit.process()?.identity.clone()).collect();
        if let Err(error) = stale::store(&self.started_file, &list) {
            tracing::warn!(
                path = %self.started_file.display(), %error,
                "cannot write down the processes of services; one that is stopped when init is killed would be left"
            );
        }
    }
}

/// The moment of a poll `wait` from now. Rare ones fall together, so that they cost one wake-up for all.
fn aligned(now: Moment, wait: Duration) -> Moment {
    let due = now + wait;
    if wait < LoopHandle::HEARTBEAT {
        return due;
    }
    Duration::from_secs(due.as_secs() / LoopHandle::HEARTBEAT.as_secs() * LoopHandle::HEARTBEAT.as_secs())
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

fn log_change(before: &str, service: &pb::Service) {
    let (name, message) = (&service.name, &service.message);
    match service.state.as_str() {
        "stuck" => tracing::warn!(service = name, before, "the service is stuck: {message}"),
        "degraded" => tracing::info!(service = name, before, "the service is degraded: {message}"),
        "running" => tracing::info!(service = name, before, "the service is running"),
        state => tracing::debug!(service = name, before, state, "{message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_polls_of_all_services_fall_together_and_eager_ones_are_not_moved() {
        let rare = |millis| aligned(Duration::from_millis(millis), Duration::from_secs(10)).as_millis();
        assert_eq!([rare(3), rare(9_999), rare(10_000), rare(10_020)], [10_000, 10_000, 20_000, 20_000]);
        assert_eq!(aligned(Duration::from_millis(3), Duration::from_millis(50)).as_millis(), 53);
    }
}
