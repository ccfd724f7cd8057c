//! `keelson run --once`: starts an agent of its own, runs the pods of some manifests, and stops the agent.
//!
//! The manifests are copied into a folder that only this agent reads ([`workspace`]). pod-sync reports the status of the pods
//! ([`tracker`], [`outcome`]). Then the copies are deleted, so that the agent removes the pods as with any deleted
//! manifest. After that the agent is stopped.

mod outcome;
mod pod_watch;
mod preconditions;
mod tracker;
mod workspace;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keelson_proto::keelson::runtime::v1 as runtime;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::signal::unix::{self, SignalKind};

use self::outcome::{Outcome, Report};
use self::pod_watch::PodWatch;
use self::tracker::PodTracker;
use self::workspace::Workspace;
use super::up;
use crate::args::{RunArgs, UpArgs};
use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::sources;
use crate::table::Table;

/// How often the agent's process and the deadlines are checked.
const TICK: Duration = Duration::from_millis(200);
/// The pause between two attempts to reach a service of the agent.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How long the pods may take to end beyond their grace period.
const REMOVAL_SLACK: Duration = Duration::from_secs(120);
/// After this time a notice names the pods that are still terminating.
const NOTICE_DELAY: Duration = Duration::from_secs(3);
/// How long the agent may take to end after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the cleanup of the pods may take, and how long the agent may take to end.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(60);
/// The default folder of pods and volumes.
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// Runs the pods.
pub(crate) async fn run(session: &Session, args: &RunArgs) -> Result<(), CliError> {
    if session.agent.services().await.is_ok() {
        return Err(CliError::StartFailed {
            message: format!("an agent already runs in {}", session.global.run_dir.display()),
            hint: "`keelson apply` gives it pods; another agent needs its own --run-dir and runtime".into(),
        });
    }
    let init = preconditions::check(args).await?;
    let mut signals = Signals::new()?;
    let files = workspace::read(&args.files)?;
    let workspace = Workspace::new(&session.global.run_dir, &files)?;
    drop(files);
    let mut child = start(session, args, &init, &workspace)?;
    let root = args.root_dir.clone().unwrap_or_else(|| DEFAULT_ROOT.into());
    let mut once = OnceRun {
        session,
        args,
        workspace: &workspace,
        child: &mut child,
        signals: &mut signals,
        root: &root,
    };
    let outcome = once.run_pods().await;
    let stopped = stop(&mut child).await;
    let reports = match outcome {
        Ok(reports) => reports,
        Err(error) => {
            up::show_log(&workspace.log(), 0);
            return Err(error);
        }
    };
    drop(workspace);
    show(session, &reports)?;
    stopped?;
    let failed = reports.iter().filter(|report| report.result.is_failure()).count();
    if failed == 0 { Ok(()) } else { Err(CliError::SomeFailed { failed, total: reports.len() }) }
}

/// Starts keelson-init in a session of its own, so that Ctrl-C at the terminal reaches only this command, which
/// ends the pods before it stops the agent.
fn start(session: &Session, args: &RunArgs, init: &Path, workspace: &Workspace) -> Result<Child, CliError> {
    use std::os::unix::process::CommandExt as _;
    let up_args = UpArgs {
        manifests: None,
        node_name: args.node_name.clone(),
        runtime_endpoint: args.runtime_endpoint.clone(),
        root_dir: args.root_dir.clone(),
        state_dir: Some(workspace.state()),
        detach: false,
        log_file: None,
        timeout: args.timeout,
        extra: args.extra.clone(),
    };
    let arguments = up::arguments(&session.global.run_dir, &up_args, Some(&workspace.manifests()));
    let log = workspace.open_log()?;
    let mut command = Command::new(init);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(log.try_clone().map_err(|e| up::cannot_run(init, &e))?);
    command.stdout(log);
    // SAFETY: setsid(2) is async-signal-safe and the closure does nothing else.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(std::io::Error::from));
    }
    command.spawn().map_err(|source| up::cannot_run(init, &source))
}

/// SIGINT and SIGTERM.
struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
}

impl Signals {
    fn new() -> Result<Self, CliError> {
        let listen = |kind| unix::signal(kind).map_err(|source| CliError::AsyncRuntime { source });
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        // Cancel-safe: a signal that is not received stays in its receiver.
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The state of one run.
struct OnceRun<'a> {
    session: &'a Session,
    args: &'a RunArgs,
    workspace: &'a Workspace,
    child: &'a mut Child,
    signals: &'a mut Signals,
    root: &'a Path,
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitResult {
    /// The condition holds.
    Done,
    /// A signal was received.
    Interrupted,
    /// The time limit has passed.
    TimedOut,
}

impl OnceRun<'_> {
    /// Runs the pods to their end and removes them; the agent keeps running.
    async fn run_pods(&mut self) -> Result<Vec<Report>, CliError> {
        let mut watch = PodWatch::start(&self.session.agent);
        let mut tracker = PodTracker::new(self.args.timeout);
        let waited = self.until(&mut watch, &mut tracker, None, PodTracker::is_decided).await?;
        let interrupted = waited == WaitResult::Interrupted;
        if interrupted {
            output::notice("Interrupted: ending the pods. A second signal leaves them as they are.");
        }
        let mut reports = tracker.reports(Instant::now(), interrupted);
        reports.extend(self.refused_manifests().await);
        let remaining = self.remove(&mut watch, &mut tracker).await?;
        if remaining.is_empty() {
            return Ok(reports);
        }
        for report in reports.iter_mut().filter(|report| remaining.contains(&report.uid)) {
            report.result = if report.result.is_failure() { report.result } else { Outcome::Failed };
            report.message = "the pod was not fully removed: parts of it remain on this machine".to_owned();
        }
        Ok(reports)
    }

    /// Follows the pods until `is_done` holds, a signal is received, or the time limit passes.
    ///
    /// # Errors
    /// The agent has ended, or one of its services has failed.
    async fn until(
        &mut self,
        watch: &mut PodWatch,
        tracker: &mut PodTracker,
        limit: Option<Duration>,
        is_done: impl Fn(&PodTracker, Instant) -> bool,
    ) -> Result<WaitResult, CliError> {
        let started_at = Instant::now();
        loop {
            let now = Instant::now();
            if is_done(tracker, now) {
                return Ok(WaitResult::Done);
            }
            if limit.is_some_and(|limit| now.duration_since(started_at) >= limit) {
                return Ok(WaitResult::TimedOut);
            }
            // Each arm is cancel-safe: a message or signal that is not received stays in its channel.
            tokio::select! {
                () = self.signals.next() => return Ok(WaitResult::Interrupted),
                update = watch.updates.recv() => if let Some(update) = update { tracker.apply(update, Instant::now()) },
                () = tokio::time::sleep(TICK) => self.check_agent().await?,
            }
        }
    }

    /// Fails if the agent has ended or one of its services has failed.
    async fn check_agent(&mut self) -> Result<(), CliError> {
        let hint = || "correct the cause, which its last lines above name".to_owned();
        if let Ok(Some(status)) = self.child.try_wait() {
            return Err(CliError::StartFailed {
                message: format!("keelson-init has ended: {status}"),
                hint: hint(),
            });
        }
        let services = self.session.agent.services().await.unwrap_or_default();
        let failed: Vec<String> = services
            .iter()
            .filter(|service| service.state == "failed")
            .map(|service| format!("{} ({})", service.name, service.message))
            .collect();
        if failed.is_empty() {
            return Ok(());
        }
        let message = format!("these services have failed: {}", failed.join(", "));
        Err(CliError::StartFailed { message, hint: hint() })
    }

    /// A report for each refused manifest.
    async fn refused_manifests(&self) -> Vec<Report> {
        let sources = self.session.agent.sources().await.unwrap_or_default();
        let problems = sources.into_iter().flat_map(|source| source.problems);
        problems
            .map(|problem| Report {
                namespace: String::new(),
                name: self.workspace.with_original_names(&sources::location(&problem)),
                uid: String::new(),
                result: Outcome::Refused,
                phase: String::new(),
                reason: "InvalidManifest".to_owned(),
                message: self.workspace.with_original_names(&problem.message),
                failed_containers: Vec::new(),
            })
            .collect()
    }

    /// Deletes the manifests and waits until the pods are removed. Returns the UIDs of those that are not.
    async fn remove(
        &mut self,
        watch: &mut PodWatch,
        tracker: &mut PodTracker,
    ) -> Result<BTreeSet<String>, CliError> {
        let (uids, grace) = (tracker.uids(), tracker.longest_grace());
        self.workspace.delete_manifests();
        let gone = |tracker: &PodTracker, _: Instant| tracker.is_empty();
        let mut waited = self.until(watch, tracker, Some(NOTICE_DELAY), gone).await?;
        if waited == WaitResult::TimedOut {
            output::notice(&format!("Ending: {}", tracker.names().join(", ")));
            waited = self.until(watch, tracker, Some(grace + REMOVAL_SLACK), gone).await?;
        }
        if waited != WaitResult::Done {
            return Ok(tracker.uids());
        }
        let limit = Instant::now() + CLEANUP_TIMEOUT;
        loop {
            let remaining = self.remaining(&uids).await;
            if remaining.is_empty() || Instant::now() >= limit {
                return Ok(remaining);
            }
            // Cancel-safe: see `Signals::next`.
            tokio::select! {
                () = self.signals.next() => return Ok(remaining),
                () = tokio::time::sleep(RETRY_INTERVAL) => self.check_agent().await?,
            }
        }
    }

    /// The pods that still have parts in the runtime or the root folder.
    async fn remaining(&self, uids: &BTreeSet<String>) -> BTreeSet<String> {
        let mut remaining = match self.in_runtime().await {
            Ok(found) => uids.intersection(&found).cloned().collect(),
            // Unknown, so count all of them.
            Err(_) => uids.clone(),
        };
        let has_folder = |uid: &&String| self.root.join("pods").join(uid.as_str()).exists();
        remaining.extend(uids.iter().filter(has_folder).cloned());
        remaining
    }

    /// The UIDs of the pods in the runtime.
    async fn in_runtime(&self) -> Result<BTreeSet<String>, tonic::Status> {
        let agent = &self.session.agent;
        let request = agent.request(runtime::WatchPodsRequest::default());
        let mut stream = agent.runtime().watch_pods(request).await?.into_inner();
        let mut found = BTreeSet::new();
        while let Some(message) = stream.message().await? {
            match message.item {
                Some(runtime::watch_pods_response::Item::Pod(pod)) => {
                    found.insert(pod.uid);
                }
                Some(runtime::watch_pods_response::Item::Synced(_)) => return Ok(found),
                _ => {}
            }
        }
        Err(tonic::Status::unavailable("runtime-shim ended the stream"))
    }
}

/// Stops the agent with SIGTERM, then with SIGKILL.
async fn stop(child: &mut Child) -> Result<(), CliError> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    for (signal, limit) in [(Signal::TERM, CLEANUP_TIMEOUT), (Signal::KILL, KILL_TIMEOUT)] {
        if let Some(pid) = pid.filter(|_| matches!(child.try_wait(), Ok(None))) {
            // Fails only if the process has just ended.
            let _ = kill_process(pid, signal);
        }
        let started_at = Instant::now();
        while started_at.elapsed() < limit {
            if !matches!(child.try_wait(), Ok(None)) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Err(CliError::TimedOut {
        message: format!("keelson-init (process {}) does not end", child.id()),
        hint: "one of its services hangs in the kernel; `keelson get services` shows which".into(),
    })
}

fn show(session: &Session, reports: &[Report]) -> Result<(), CliError> {
    if output::is_document(session.format()) {
        return output::print_document(session.format(), &json!({"items": reports}));
    }
    let mut table = Table::new(["NAMESPACE", "POD", "RESULT", "FAILED CONTAINERS", "REASON", "MESSAGE"]);
    for report in reports {
        table.row(vec![
            report.namespace.clone(),
            report.name.clone(),
            format!("{:?}", report.result),
            report.failed_containers.join(","),
            report.reason.clone(),
            report.message.clone(),
        ]);
    }
    output::print(&table.render(0))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::args::{Cli, Command as Chosen};

    #[test]
    fn run_requires_once_and_a_manifest() {
        let parsed = |args: &[&str]| Cli::try_parse_from([&["keelson", "run"], args].concat());
        assert!(parsed(&["-f", "pod.yaml"]).is_err());
        assert!(parsed(&["--once"]).is_err());
        match parsed(&["--once", "-f", "a", "-f", "b", "--", "--v=4"]).unwrap().command {
            Chosen::Run(args) => assert_eq!((args.files.len(), args.extra.len()), (2, 1)),
            other => panic!("{other:?}"),
        }
    }
}
