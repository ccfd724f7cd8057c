//! `keelson up`.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1::Service;

use crate::args::{DEFAULT_RUN_DIR, UpArgs};
use crate::error::CliError;
use crate::output;
use crate::session::Session;

const LIBEXEC: &str = "/usr/libexec/keelson";
const DEFAULT_MANIFESTS: &str = "/etc/keelson/manifests";
/// The number of log lines shown when the agent ends at once.
const LOG_TAIL_LINES: usize = 8;
/// How long all services must have been running before degraded ones count as up.
const DEGRADED_GRACE: Duration = Duration::from_secs(5);

/// Starts keelson-init in place of this process, or in the background.
pub(crate) async fn run(session: &Session, args: &UpArgs) -> Result<(), CliError> {
    if let Ok(services) = session.agent.services().await {
        return already_running(session, args, &services).await;
    }
    let (init, arguments) = prepare(session, args)?;
    if args.detach {
        return detached(session, args, &init, &arguments).await;
    }
    let source = Command::new(&init).args(&arguments).exec();
    Err(cannot_run(&init, &source))
}

async fn already_running(session: &Session, args: &UpArgs, services: &[Service]) -> Result<(), CliError> {
    let run_dir = session.global.run_dir.display();
    if !args.detach {
        return Err(CliError::StartFailed {
            message: format!("an agent with {} services already runs in {run_dir}", services.len()),
            hint: "`keelson get services` shows it; another agent needs its own --run-dir, --state-dir, --root-dir and runtime"
                .into(),
        });
    }
    wait_until_up(session, args, None).await?;
    output::print(&format!("The agent already runs in {run_dir}.\n"))
}

/// Checks the preconditions. Returns the binary of init and its arguments.
fn prepare(session: &Session, args: &UpArgs) -> Result<(PathBuf, Vec<OsString>), CliError> {
    let runtime = runtime_socket(&args.runtime_endpoint)?;
    let manifests = manifests(args)?;
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot {
            message: "the agent must be started by root: it mounts volumes and creates cgroups".into(),
            hint: "`sudo keelson up`".into(),
        });
    }
    check_runtime(&runtime)?;
    Ok((find_init()?, arguments(&session.global.run_dir, args, manifests.as_deref())))
}

pub(super) fn runtime_socket(endpoint: &str) -> Result<PathBuf, CliError> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if path.starts_with('/') {
        return Ok(path.into());
    }
    Err(CliError::Usage {
        message: format!("the runtime endpoint {endpoint:?} is not a unix socket"),
        hint: "use --runtime-endpoint unix:///path/of/the.sock".into(),
    })
}

fn manifests(args: &UpArgs) -> Result<Option<PathBuf>, CliError> {
    let Some(given) = &args.manifests else {
        let default = PathBuf::from(DEFAULT_MANIFESTS);
        return Ok(default.is_dir().then_some(default));
    };
    match fs::metadata(given).and_then(|_| std::path::absolute(given)) {
        Ok(path) => Ok(Some(path)),
        Err(source) => Err(CliError::StartFailed {
            message: format!("cannot use the manifests at {}: {source}", given.display()),
            hint: format!("`mkdir -p {}`, or leave --manifests out and use `keelson apply`", given.display()),
        }),
    }
}

pub(super) fn check_runtime(socket: &Path) -> Result<(), CliError> {
    let Err(source) = UnixStream::connect(socket) else { return Ok(()) };
    let reason = match source.kind() {
        io::ErrorKind::NotFound => "the socket does not exist".to_owned(),
        io::ErrorKind::ConnectionRefused => "nothing listens there".to_owned(),
        _ => source.to_string(),
    };
    Err(CliError::RuntimeUnavailable {
        message: format!("no container runtime at {}: {reason}", socket.display()),
        hint: "install and start containerd (`apt-get install containerd`, `systemctl start containerd`), \
               or name another socket with --runtime-endpoint unix:///…"
            .into(),
    })
}

/// Finds keelson-init next to this executable, else in the folder of the packages, else on the PATH.
pub(super) fn find_init() -> Result<PathBuf, CliError> {
    let name = ServiceName::Init.binary();
    let own = std::env::current_exe().and_then(fs::canonicalize).ok();
    let own_folder = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let on_path = std::env::var_os("PATH");
    let on_path = on_path.iter().flat_map(std::env::split_paths).filter(|folder| folder.is_absolute());
    own_folder
        .into_iter()
        .chain([PathBuf::from(LIBEXEC)])
        .chain(on_path)
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| CliError::StartFailed {
            message: format!("{name} is neither next to this command nor in {LIBEXEC} nor on the PATH"),
            hint: "install all binaries of one release into one folder".into(),
        })
}

/// The command line of keelson-init: the kubelet's flags, and two of its own.
pub(super) fn arguments(run_dir: &Path, args: &UpArgs, manifests: Option<&Path>) -> Vec<OsString> {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |flag: &str, value: OsString| {
        let mut argument = OsString::from(format!("--{flag}="));
        argument.push(value);
        list.push(argument);
    };
    if run_dir != Path::new(DEFAULT_RUN_DIR) {
        add("run-dir", absolute(run_dir).into());
    }
    if let Some(dir) = &args.state_dir {
        add("state-dir", absolute(dir).into());
    }
    if let Some(dir) = &args.root_dir {
        add("root-dir", absolute(dir).into());
    }
    if let Some(path) = manifests {
        add("pod-manifest-path", path.into());
    }
    if let Some(name) = &args.node_name {
        add("hostname-override", name.into());
    }
    let path = args.runtime_endpoint.strip_prefix("unix://").unwrap_or(&args.runtime_endpoint);
    add("container-runtime-endpoint", format!("unix://{path}").into());
    list.extend(args.extra.iter().cloned());
    list
}

pub(super) fn cannot_run(init: &Path, source: &io::Error) -> CliError {
    CliError::StartFailed {
        message: format!("cannot run {}: {source}", init.display()),
        hint: "install all binaries of one release into one folder".into(),
    }
}

/// Opens a log for appending; it and its folder are created if they are missing.
fn open_log(log: &Path) -> io::Result<File> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().create(true).append(true).open(log)
}

fn unwritable_log(log: &Path, source: &io::Error) -> CliError {
    CliError::StartFailed {
        message: format!("cannot write the log {}: {source}", log.display()),
        hint: "name another file with --log-file".into(),
    }
}

async fn detached(
    session: &Session,
    args: &UpArgs,
    init: &Path,
    arguments: &[OsString],
) -> Result<(), CliError> {
    let run_dir = &session.global.run_dir;
    let log = args.log_file.clone().unwrap_or_else(|| run_dir.join("keelson.log"));
    let unwritable = |source: io::Error| unwritable_log(&log, &source);
    let out = open_log(&log).map_err(unwritable)?;
    let begin = out.metadata().map_or(0, |m| m.len());
    let mut command = Command::new(init);
    command.args(arguments).stdin(Stdio::null()).stdout(out.try_clone().map_err(unwritable)?).stderr(out);
    // SAFETY: setsid(2) is async-signal-safe and the closure does nothing else.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from));
    }
    let mut child = command.spawn().map_err(|source| cannot_run(init, &source))?;
    let pid = child.id();
    if let Err(error) = wait_until_up(session, args, Some(&mut child)).await {
        show_log(&log, begin);
        return Err(error);
    }
    output::print(&format!(
        "The agent runs in {} (process {pid}); its log is {}.\n",
        run_dir.display(),
        log.display()
    ))
}

pub(super) fn show_log(log: &Path, begin: u64) {
    let bytes = fs::read(log).unwrap_or_default();
    let new = usize::try_from(begin).ok().and_then(|begin| bytes.get(begin..)).unwrap_or(&bytes);
    let text = String::from_utf8_lossy(new);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    for line in &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..] {
        output::notice(line);
    }
}

/// The combined state of all services.
#[derive(Debug, PartialEq, Eq)]
enum AgentState {
    /// All services are running.
    Up,
    /// All services are running; these are degraded.
    Degraded(Vec<String>),
    /// These are not running yet.
    Starting(Vec<String>),
    /// These have failed and will not start by themselves.
    Failed(Vec<String>),
}

fn agent_state(services: &[Service]) -> AgentState {
    let in_state = |state: &str| -> Vec<String> {
        services.iter().filter(|s| s.state == state).map(|s| format!("{} ({})", s.name, s.message)).collect()
    };
    let failed = in_state("failed");
    if !failed.is_empty() {
        return AgentState::Failed(failed);
    }
    let runs = |name: ServiceName| {
        services.iter().any(|s| s.name == name.as_str() && matches!(s.state.as_str(), "running" | "degraded"))
    };
    let missing: Vec<String> =
        ServiceName::supervised().filter(|name| !runs(*name)).map(|n| n.to_string()).collect();
    let degraded = in_state("degraded");
    match (missing.is_empty(), degraded.is_empty()) {
        (false, _) => AgentState::Starting(missing),
        (true, true) => AgentState::Up,
        (true, false) => AgentState::Degraded(degraded),
    }
}

/// Polls init until all services are running. `child` is the keelson-init that was started; it must not end.
async fn wait_until_up(
    session: &Session,
    args: &UpArgs,
    mut child: Option<&mut Child>,
) -> Result<(), CliError> {
    let started_at = Instant::now();
    let mut running_since: Option<Instant> = None;
    loop {
        if let Some(child) = child.as_deref_mut()
            && let Ok(Some(status)) = child.try_wait()
        {
            return Err(CliError::StartFailed {
                message: format!("keelson-init has ended: {status}"),
                hint: "correct the cause, which its last lines above name".into(),
            });
        }
        let state = session.agent.services().await.map(|services| agent_state(&services));
        match state {
            Ok(AgentState::Up) => return Ok(()),
            Ok(AgentState::Failed(services)) => {
                return Err(CliError::StartFailed {
                    message: format!("these services have failed: {}", services.join(", ")),
                    hint: "correct the cause, then `keelson services restart NAME`".into(),
                });
            }
            Ok(AgentState::Degraded(services)) => {
                if running_since.get_or_insert_with(Instant::now).elapsed() >= DEGRADED_GRACE {
                    output::notice(&format!(
                        "All services are running; these are degraded: {}",
                        services.join(", ")
                    ));
                    return Ok(());
                }
            }
            Ok(AgentState::Starting(services)) if started_at.elapsed() >= args.timeout => {
                return Err(timeout_error(&services));
            }
            Err(error) if started_at.elapsed() >= args.timeout => return Err(error),
            Ok(AgentState::Starting(_)) | Err(_) => running_since = None,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn timeout_error(services: &[String]) -> CliError {
    CliError::TimedOut {
        message: format!("these services are not running in time: {}", services.join(", ")),
        hint: "`keelson get services` shows their state; the agent keeps trying".into(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command as Chosen};

    fn up(args: &[&str]) -> (PathBuf, UpArgs) {
        let cli = Cli::try_parse_from([&["keelson", "up"], args].concat()).unwrap();
        match cli.command {
            Chosen::Up(up) => (cli.global.run_dir, up),
            other => panic!("{other:?}"),
        }
    }

    fn line(args: &[&str]) -> Vec<String> {
        let (run_dir, up) = up(args);
        arguments(&run_dir, &up, up.manifests.as_deref())
            .into_iter()
            .map(|a| a.into_string().unwrap())
            .collect()
    }

    #[test]
    fn init_is_given_the_flags_of_a_kubelet() {
        assert_eq!(
            line(&["--run-dir", DEFAULT_RUN_DIR]),
            ["--container-runtime-endpoint=unix:///run/containerd/containerd.sock"]
        );
        assert_eq!(
            line(&[
                "--run-dir=/r",
                "--state-dir=/s",
                "--root-dir=/k",
                "--manifests=/m",
                "--node-name=edge",
                "--runtime-endpoint=/c.sock",
                "--",
                "--v=4"
            ]),
            [
                "--run-dir=/r",
                "--state-dir=/s",
                "--root-dir=/k",
                "--pod-manifest-path=/m",
                "--hostname-override=edge",
                "--container-runtime-endpoint=unix:///c.sock",
                "--v=4"
            ]
        );
    }

    #[test]
    fn an_endpoint_that_is_no_socket_is_a_usage_error() {
        assert_eq!(runtime_socket("tcp://localhost:1").unwrap_err().exit_code(), 64);
        assert_eq!(runtime_socket("unix:///c.sock").unwrap(), PathBuf::from("/c.sock"));
    }

    #[test]
    fn the_agent_is_up_when_every_service_runs() {
        let service = |name: &str, state: &str| Service {
            name: name.into(),
            state: state.into(),
            ..Service::default()
        };
        let mut all: Vec<Service> =
            ServiceName::supervised().map(|n| service(n.as_str(), "running")).collect();
        assert_eq!(agent_state(&all), AgentState::Up);
        all[0].state = "degraded".into();
        assert!(matches!(agent_state(&all), AgentState::Degraded(list) if list.len() == 1));
        all[1].state = "backing-off".into();
        assert_eq!(agent_state(&all), AgentState::Starting(vec!["runtime-shim".into()]));
        all[2].state = "failed".into();
        assert!(matches!(agent_state(&all), AgentState::Failed(list) if list.len() == 1));
        assert!(matches!(agent_state(&[]), AgentState::Starting(list) if list.len() == 7));
    }
}
