//! The loop that starts, polls and restarts services.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use keelson_config::{Paths, ServiceName};
use keelson_init_core::{Exit, Poll, ServiceState};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::{
    CancellationToken, Context, EventRing, LoopHandle, ObjectRef, Peer, WatchHub, exit_reason,
    now_unix_nanos, status,
};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, wait, waitpid};
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::launch::Launcher;
use crate::systemd::Systemd;
use crate::unit::{Moment, Phase, Unit};
use crate::{leftover_processes, poller};

/// The reason of the node's event when a service cannot be started, or fails for good while the agent keeps running
/// (pod-lifecycle.md §18).
const SETUP_FAILED: &str = "KubeletSetupFailed";

/// The limits of the supervisor.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// A service without progress for this long is killed and restarted.
    pub stuck_limit: Duration,
    /// A service that was asked to end is killed after this long.
    pub stop_limit: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { stuck_limit: Duration::from_secs(60), stop_limit: Duration::from_secs(5) }
    }
}

/// A request to the supervisor.
#[derive(Debug)]
pub enum Command {
    /// Restart a service; `done` receives whether its new process was started.
    Restart {
        /// The service.
        service: ServiceName,
        /// The reason, as shown in its message: `on request`…
        why: &'static str,
        /// The sender of the result.
        done: oneshot::Sender<Result<(), String>>,
    },
}

/// The services in the API, without memory figures.
pub type Services = WatchHub<ServiceName, pb::Service>;

/// The supervisor; [`Supervisor::run`] is its loop.
#[derive(Debug)]
pub struct Supervisor {
    shutdown: CancellationToken,
    force: CancellationToken,
    handle: LoopHandle,
    launcher: Launcher,
    timing: Timing,
    services: Services,
    systemd: Systemd,
    units: Vec<Unit>,
    commands: mpsc::Receiver<Command>,
    polled: (mpsc::Sender<PollResult>, mpsc::Receiver<PollResult>),
    children: SignalStream,
    events: EventRing,
    node: ObjectRef,
    paths: Paths,
    processes_file: PathBuf,
    processes_changed: bool,
    origin: Instant,
    stopping: bool,
}

/// The result of polling the process `pid` of a service.
#[derive(Debug)]
struct PollResult {
    service: ServiceName,
    pid: u32,
    poll: Poll,
}

impl Supervisor {
    /// A supervisor of all services. `force` kills the remaining ones during a shutdown.
    ///
    /// # Errors
    /// SIGCHLD cannot be listened to.
    pub fn new(
        context: &Context,
        launcher: Launcher,
        timing: Timing,
        force: CancellationToken,
    ) -> io::Result<(Self, Services, mpsc::Sender<Command>)> {
        let run_dir = &context.config.paths.run_dir;
        let units = ServiceName::supervised()
            .map(|name| Unit::new(name, launcher.uid(name), Peer::service(run_dir, name)))
            .collect();
        let services = Services::new();
        let (sender, commands) = mpsc::channel(16);
        let supervisor = Self {
            shutdown: context.shutdown.clone(),
            force,
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
            processes_file: leftover_processes::file(run_dir),
            processes_changed: false,
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
        let (shutdown, force) = (self.shutdown.clone(), self.force.clone());
        loop {
            self.run_due();
            if self.stopping && self.units.iter().all(|unit| matches!(unit.phase, Phase::Stopped)) {
                return;
            }
            let wake = self.next_wake();
            // Cancel-safe, each of them: signals and messages stay queued, a token stays cancelled, and the sleep is computed
            // again.
            tokio::select! {
                _ = self.children.recv() => {}
                Some(Command::Restart { service, why, done }) = self.commands.recv() => {
                    self.restart(service, why, done);
                }
                Some(polled) = self.polled.1.recv() => self.observe(polled),
                () = shutdown.cancelled(), if !self.stopping => self.stop(),
                () = force.cancelled(), if self.stopping => self.kill_all(),
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    /// Does everything that is due now.
    fn run_due(&mut self) {
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
            self.poll_if_due(index, now);
        }
        self.publish();
        if std::mem::take(&mut self.processes_changed) {
            self.write_processes();
        }
    }

    fn next_wake(&self) -> Duration {
        let now = self.now();
        let due = self.units.iter().filter_map(Unit::next_due).min();
        let wait = due.map_or(Duration::MAX, |due| due.saturating_sub(now));
        // At least one millisecond: the timer is no finer, and this avoids a busy loop.
        wait.clamp(Duration::from_millis(1), self.systemd.heartbeat())
    }

    fn start(&mut self, index: usize) {
        let now = self.now();
        let unit = &mut self.units[index];
        match self.launcher.spawn(unit.name) {
            Ok(pid) => {
                unit.on_started(now, pid, now_unix_nanos());
                tracing::info!(service = %unit.name, pid, uid = unit.uid, "started");
                self.processes_changed = true;
            }
            Err(error) => {
                let why = status::chain(&error);
                tracing::error!(service = %unit.name, "{why}");
                self.events.warning(self.node.clone(), SETUP_FAILED, format!("{}: {why}", unit.name));
                unit.on_start_failed(now, why, fastrand::f64());
            }
        }
    }

    fn poll_if_due(&mut self, index: usize, now: Moment) {
        let unit = &mut self.units[index];
        let (service, peer) = (unit.name, unit.peer.clone());
        let Some(process) = unit.process_mut() else { return };
        if process.ending.is_some() || process.next_poll.is_none_or(|due| due > now) {
            return;
        }
        process.next_poll = None;
        let pid = process.pid;
        let sender = self.polled.0.clone();
        // At most one task per process, and the call has a deadline.
        keelson_service_kit::spawn("poll a service", async move {
            let poll = poller::poll(peer).await;
            // The send fails only if the supervisor has ended.
            let _ = sender.send(PollResult { service, pid, poll }).await;
        });
    }

    fn observe(&mut self, polled: PollResult) {
        let (now, limit) = (self.now(), self.timing.stuck_limit);
        let Some(unit) = self.units.iter_mut().find(|unit| unit.name == polled.service) else { return };
        let Some(process) = unit.process_mut().filter(|process| process.pid == polled.pid) else { return };
        process.health.observe(now, polled.poll);
        process.next_poll = Some(aligned(now, process.health.next_poll(now)));
        let answered = process.health.answered();
        let kill_reason = process.health.kill_reason(now, limit).filter(|_| process.ending.is_none());
        unit.ever_answered |= answered;
        if let Some(why) = kill_reason {
            unit.kill_stuck(why);
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
        tracing::info!("ending all services; containers keep running");
        self.stopping = true;
        self.systemd.stopping();
        let (now, limit) = (self.now(), self.timing.stop_limit);
        for unit in self.units.iter_mut().rev() {
            unit.stop(now, limit);
        }
    }

    fn kill_all(&mut self) {
        self.force = CancellationToken::new();
        for process in self.units.iter().filter_map(Unit::process) {
            process.signal(Signal::KILL);
        }
    }

    /// Collects the exit of every child that has ended. As process 1 this includes orphans; otherwise only its own children,
    /// so that other code's children are left alone.
    fn reap(&mut self) {
        if std::process::id() == 1 {
            while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                self.on_child_exit(pid, status);
            }
            return;
        }
        let pids: Vec<u32> = self.units.iter().filter_map(|unit| Some(unit.process()?.pid)).collect();
        for pid in pids.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            if let Ok(Some((pid, status))) = waitpid(Some(pid), WaitOptions::NOHANG) {
                self.on_child_exit(pid, status);
            }
        }
    }

    fn on_child_exit(&mut self, pid: Pid, status: WaitStatus) {
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
                let exit_reason = exit_reason::take(&self.paths, unit.name);
                let failed = unit.on_exit(now, exit, exit_reason.as_deref(), fastrand::f64());
                if self.stopping {
                    unit.phase = Phase::Stopped;
                } else if let Some(why) = failed {
                    self.events.warning(self.node.clone(), SETUP_FAILED, format!("{}: {why}", unit.name));
                }
                self.processes_changed = true;
            }
            None => tracing::debug!(pid = raw, %exit, "reaped an orphan"),
        }
    }

    /// Publishes changes to watchers and systemd.
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
                // The same time, computed again, differs by the rounding of two clocks.
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
        let status = self.systemd.is_enabled().then(|| self.status());
        self.systemd.notify(ready, status);
    }

    /// The status line for `systemctl status`.
    fn status(&self) -> String {
        let good = self.units.iter().filter(|unit| unit.state() == ServiceState::Running).count();
        let mut text = format!("{good} of {} services running", self.units.len());
        for unit in self.units.iter().filter(|unit| unit.state() != ServiceState::Running) {
            text.push_str(&format!("; {} is {}", unit.name, unit.state()));
        }
        text
    }

    fn write_processes(&self) {
        let list: Vec<leftover_processes::StartedProcess> =
            self.units.iter().filter_map(|unit| unit.process()?.identity.clone()).collect();
        if let Err(error) = leftover_processes::store(&self.processes_file, &list) {
            tracing::warn!(
                path = %self.processes_file.display(), %error,
                "cannot record the processes of services; one that is stopped when init is killed would not be cleaned up"
            );
        }
    }
}

/// The time of a poll `wait` from now. Rare polls are aligned, so that they cause one wake-up for all.
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
    fn rare_polls_are_aligned_and_frequent_ones_are_not() {
        let rare = |millis| aligned(Duration::from_millis(millis), Duration::from_secs(10)).as_millis();
        assert_eq!([rare(3), rare(9_999), rare(10_000), rare(10_020)], [10_000, 10_000, 20_000, 20_000]);
        assert_eq!(aligned(Duration::from_millis(3), Duration::from_millis(50)).as_millis(), 53);
    }
}
