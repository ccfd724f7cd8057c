//! `keelson run --once`: an agent of its own runs the pods of some manifests, and ends.
//!
//! The manifests are copied into a folder that only this agent reads ([`place`]). pod-sync tells how the pods fare
//! ([`board`], [`verdict`]). Then the copies go, and with them everything of the pods, as with any manifest that is
//! taken away; only then is the agent ended.

mod board;
mod place;
mod verdict;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keelson_proto::keelson::pod_sync::v1::{WatchPodsRequest, watch_pods_response::Item};
use keelson_proto::keelson::runtime::v1 as runtime;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::signal::unix::{self, SignalKind};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use self::board::{Board, Heard};
use self::place::Place;
use self::verdict::{Outcome, Report};
use super::{Session, up};
use crate::agent::Agent;
use crate::args::{RunArgs, UpArgs};
use crate::error::Failure;
use crate::output;
use crate::table::Table;

/// How often the process of the agent and the clock are looked at.
const TICK: Duration = Duration::from_millis(200);
/// Between two attempts to reach a service of the agent.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the pods may take to go beyond their grace.
const BEYOND_GRACE: Duration = Duration::from_secs(120);
/// After this long a person is told that the pods are still ending.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long what the pods have left may take to be removed, and how long the agent may take to end.
const REMOVAL: Duration = Duration::from_secs(60);
/// Where pods and volumes lie when nothing else is said.
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// Runs the pods.
pub(crate) async fn run(session: &Session, args: &RunArgs) -> Result<(), Failure> {
    if session.agent.services().await.is_ok() {
        return Err(Failure::Start {
            message: format!("an agent runs already in {}", session.global.run_dir.display()),
            hint: "`keelson apply` gives it pods; another agent needs its own --run-dir and runtime".into(),
        });
    }
    let init = check(args).await?;
    let mut signals = Signals::new()?;
    let files = place::read(&args.files)?;
    let place = Place::new(&session.global.run_dir, &files)?;
    drop(files);
    let mut child = start(session, args, &init, &place)?;
    let root = args.root_dir.clone().unwrap_or_else(|| DEFAULT_ROOT.into());
    let mut once =
        Once { session, args, place: &place, child: &mut child, signals: &mut signals, root: &root };
    let outcome = once.each_to_its_end().await;
    let ended = end(&mut child).await;
    let reports = match outcome {
        Ok(reports) => reports,
        Err(failure) => {
            up::show_log(&place.log(), 0);
            return Err(failure);
        }
    };
    drop(place);
    show(session, &reports)?;
    ended?;
    let failed = reports.iter().filter(|report| report.result.is_failure()).count();
    if failed == 0 { Ok(()) } else { Err(Failure::Some { failed, total: reports.len() }) }
}

/// Checks what can be checked before the start; the binary of init.
async fn check(args: &RunArgs) -> Result<PathBuf, Failure> {
    let socket = up::runtime_socket(&args.runtime_endpoint)?;
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::NotRoot {
            message: "the agent must be started by root: it mounts volumes and makes cgroups".into(),
            hint: "`sudo keelson run --once -f …`".into(),
        });
    }
    up::check_runtime(&socket)?;
    refuse_others(&socket).await?;
    up::find_init()
}

/// An agent ends what its runtime runs and no manifest names. That is not what somebody means who runs a pod once.
async fn refuse_others(socket: &Path) -> Result<(), Failure> {
    use k8s_cri::v1 as cri;
    let channel = keelson_service_kit::connect_foreign("the container runtime", socket);
    let mut client = cri::runtime_service_client::RuntimeServiceClient::new(channel);
    let state = cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady as i32 };
    let filter = cri::PodSandboxFilter { state: Some(state), ..cri::PodSandboxFilter::default() };
    let mut request = tonic::Request::new(cri::ListPodSandboxRequest { filter: Some(filter) });
    request.set_timeout(Duration::from_secs(10));
    let answer = client.list_pod_sandbox(request).await.map_err(|status| Failure::NoRuntime {
        message: format!(
            "the container runtime at {} does not tell its pods: {}",
            socket.display(),
            status.message()
        ),
        hint: "`systemctl status containerd`, or name another socket with --runtime-endpoint unix:///…"
            .into(),
    })?;
    let names: Vec<String> = answer
        .into_inner()
        .items
        .into_iter()
        .map(|sandbox| {
            sandbox.metadata.map(|meta| format!("{}/{}", meta.namespace, meta.name)).unwrap_or_default()
        })
        .collect();
    if names.is_empty() {
        return Ok(());
    }
    let shown = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    let more = if names.len() > 3 { ", …" } else { "" };
    Err(Failure::Start {
        message: format!(
            "the container runtime at {} runs {} already, which this agent would end: {shown}{more}",
            socket.display(),
            if names.len() == 1 { "a pod".to_owned() } else { format!("{} pods", names.len()) }
        ),
        hint: "end them first, or name another runtime with --runtime-endpoint".into(),
    })
}

/// Starts keelson-init in a session of its own: an interruption at the terminal is for this command alone, which
/// ends the pods before it ends the agent.
fn start(session: &Session, args: &RunArgs, init: &Path, place: &Place) -> Result<Child, Failure> {
    use std::os::unix::process::CommandExt as _;
    let up_args = UpArgs {
        manifests: None,
        node_name: args.node_name.clone(),
        runtime_endpoint: args.runtime_endpoint.clone(),
        root_dir: args.root_dir.clone(),
        state_dir: Some(place.state()),
        detach: false,
        log_file: None,
        timeout: args.timeout,
        extra: args.extra.clone(),
    };
    let arguments = up::arguments(&session.global.run_dir, &up_args, Some(&place.manifests()));
    let log = place.open_log()?;
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
    fn new() -> Result<Self, Failure> {
        let hear = |kind| unix::signal(kind).map_err(|source| Failure::Runtime { source });
        Ok(Self { interrupt: hear(SignalKind::interrupt())?, terminate: hear(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        // Cancel-safe: a signal that is not taken here stays in its stream.
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// pod-sync's stream, read by a task of its own; it goes when this is dropped.
struct Feed {
    heard: mpsc::Receiver<Heard>,
    task: AbortHandle,
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Feed {
    fn begin(agent: &Agent) -> Self {
        let (sender, heard) = mpsc::channel(64);
        let task = tokio::spawn(feed(agent.clone(), sender)).abort_handle();
        Self { heard, task }
    }
}

/// Reads pod-sync's stream, again and again.
async fn feed(agent: Agent, sender: mpsc::Sender<Heard>) {
    loop {
        if let Ok(answer) = agent.pod_sync().watch_pods(agent.request(WatchPodsRequest {})).await {
            let mut stream = answer.into_inner();
            let mut next = Some(Heard::Opened);
            while let Some(heard) = next {
                if sender.send(heard).await.is_err() {
                    return;
                }
                next = match stream.message().await {
                    Ok(Some(message)) => match message.item {
                        Some(Item::Pod(pod)) => Some(Heard::Pod(Box::new(pod))),
                        Some(Item::GoneUid(uid)) => Some(Heard::Gone(uid)),
                        Some(Item::Synced(_)) => Some(Heard::Synced),
                        None => None,
                    },
                    Ok(None) | Err(_) => None,
                };
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// One run.
struct Once<'a> {
    session: &'a Session,
    args: &'a RunArgs,
    place: &'a Place,
    child: &'a mut Child,
    signals: &'a mut Signals,
    root: &'a Path,
}

/// Why a wait is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    /// What was waited for is so.
    Done,
    /// A signal has come.
    Interrupted,
    /// The time is up.
    TimedOut,
}

impl Once<'_> {
    /// From the first manifest to the last container; the agent goes on running.
    async fn each_to_its_end(&mut self) -> Result<Vec<Report>, Failure> {
        let mut feed = Feed::begin(&self.session.agent);
        let mut board = Board::new(self.args.timeout);
        let waited = self.until(&mut feed, &mut board, None, Board::is_decided).await?;
        let interrupted = waited == Wait::Interrupted;
        if interrupted {
            output::notice("Interrupted: the pods are being ended; once more leaves them where they are.");
        }
        let mut reports = board.reports(Instant::now(), interrupted);
        reports.extend(self.refused().await);
        let left = self.remove(&mut feed, &mut board).await?;
        if left.is_empty() {
            return Ok(reports);
        }
        for report in reports.iter_mut().filter(|report| left.contains(&report.uid)) {
            report.result = if report.result.is_failure() { report.result } else { Outcome::Failed };
            report.message = "it is not gone: what it has left stays on this machine".to_owned();
        }
        Ok(reports)
    }

    /// Follows the pods until `over` holds, a signal comes, the time is up, or the agent is gone.
    async fn until(
        &mut self,
        feed: &mut Feed,
        board: &mut Board,
        limit: Option<Duration>,
        over: impl Fn(&Board, Instant) -> bool,
    ) -> Result<Wait, Failure> {
        let begun = Instant::now();
        loop {
            let now = Instant::now();
            if over(board, now) {
                return Ok(Wait::Done);
            }
            if limit.is_some_and(|limit| now.duration_since(begun) >= limit) {
                return Ok(Wait::TimedOut);
            }
            // Each arm is cancel-safe: a message or signal that is not taken stays where it is.
            tokio::select! {
                () = self.signals.next() => return Ok(Wait::Interrupted),
                heard = feed.heard.recv() => if let Some(heard) = heard { board.hear(heard, Instant::now()) },
                () = tokio::time::sleep(TICK) => self.still_there().await?,
            }
        }
    }

    /// The agent's own trouble ends the run.
    async fn still_there(&mut self) -> Result<(), Failure> {
        let hint = || "mend what its last lines above name".to_owned();
        if let Ok(Some(status)) = self.child.try_wait() {
            return Err(Failure::Start {
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
        Err(Failure::Start { message, hint: hint() })
    }

    /// The manifests that are not used.
    async fn refused(&self) -> Vec<Report> {
        let sources = self.session.agent.sources().await.unwrap_or_default();
        let problems = sources.into_iter().flat_map(|source| source.problems);
        problems
            .map(|problem| Report {
                namespace: String::new(),
                name: self.place.named(&super::get_sources::place(&problem)),
                uid: String::new(),
                result: Outcome::Refused,
                phase: String::new(),
                reason: "InvalidManifest".to_owned(),
                message: self.place.named(&problem.message),
                failed_containers: Vec::new(),
            })
            .collect()
    }

    /// Takes the manifests away and waits until nothing of the pods is left. What is left all the same, by UID.
    async fn remove(&mut self, feed: &mut Feed, board: &mut Board) -> Result<BTreeSet<String>, Failure> {
        let (uids, grace) = (board.uids(), board.longest_grace());
        self.place.withdraw();
        let gone = |board: &Board, _: Instant| board.is_empty();
        let mut waited = self.until(feed, board, Some(PATIENCE), gone).await?;
        if waited == Wait::TimedOut {
            output::notice(&format!("Ending: {}", board.names().join(", ")));
            waited = self.until(feed, board, Some(grace + BEYOND_GRACE), gone).await?;
        }
        if waited != Wait::Done {
            return Ok(board.uids());
        }
        let limit = Instant::now() + REMOVAL;
        loop {
            let left = self.left(&uids).await;
            if left.is_empty() || Instant::now() >= limit {
                return Ok(left);
            }
            // Cancel-safe: see `Signals::next`.
            tokio::select! {
                () = self.signals.next() => return Ok(left),
                () = tokio::time::sleep(PAUSE) => self.still_there().await?,
            }
        }
    }

    /// The pods of which the runtime or the root folder has something.
    async fn left(&self, uids: &BTreeSet<String>) -> BTreeSet<String> {
        let mut left = match self.in_runtime().await {
            Ok(held) => uids.intersection(&held).cloned().collect(),
            // Nobody knows.
            Err(_) => uids.clone(),
        };
        let has_folder = |uid: &&String| self.root.join("pods").join(uid.as_str()).exists();
        left.extend(uids.iter().filter(has_folder).cloned());
        left
    }

    /// The pods of which the runtime holds something.
    async fn in_runtime(&self) -> Result<BTreeSet<String>, tonic::Status> {
        let agent = &self.session.agent;
        let request = agent.request(runtime::WatchPodsRequest::default());
        let mut stream = agent.runtime().watch_pods(request).await?.into_inner();
        let mut held = BTreeSet::new();
        while let Some(message) = stream.message().await? {
            match message.item {
                Some(runtime::watch_pods_response::Item::Pod(pod)) => {
                    held.insert(pod.uid);
                }
                Some(runtime::watch_pods_response::Item::Synced(_)) => return Ok(held),
                _ => {}
            }
        }
        Err(tonic::Status::unavailable("runtime-shim has ended the stream"))
    }
}

/// Ends the agent, however it fares.
async fn end(child: &mut Child) -> Result<(), Failure> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    for (signal, limit) in [(Signal::TERM, REMOVAL), (Signal::KILL, PATIENCE)] {
        if let Some(pid) = pid.filter(|_| matches!(child.try_wait(), Ok(None))) {
            // It fails only for a process that has just ended.
            let _ = kill_process(pid, signal);
        }
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if !matches!(child.try_wait(), Ok(None)) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Err(Failure::TimedOut {
        message: format!("keelson-init (process {}) does not end", child.id()),
        hint: "its services hang in the kernel; `keelson get services` names them".into(),
    })
}

fn show(session: &Session, reports: &[Report]) -> Result<(), Failure> {
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
    fn once_and_a_manifest_are_asked_for() {
        let parsed = |args: &[&str]| Cli::try_parse_from([&["keelson", "run"], args].concat());
        assert!(parsed(&["-f", "pod.yaml"]).is_err());
        assert!(parsed(&["--once"]).is_err());
        match parsed(&["--once", "-f", "a", "-f", "b", "--", "--v=4"]).unwrap().command {
            Chosen::Run(args) => assert_eq!((args.files.len(), args.extra.len()), (2, 1)),
            other => panic!("{other:?}"),
        }
    }
}
