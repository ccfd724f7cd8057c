//! `keelson up`.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_proto::keelson::supervisor::v1::Service;

use super::Session;
use crate::args::{DEFAULT_RUN_DIR, UpArgs};
use crate::error::Failure;
use crate::output;

const LIBEXEC: &str = "/usr/libexec/keelson";
const DEFAULT_MANIFESTS: &str = "/etc/keelson/manifests";
/// Lines of the log that are shown when the agent ends at once.
const LOG_TAIL: usize = 8;
/// How long all services must hold out before those that only miss something count as up.
const SETTLED: Duration = Duration::from_secs(5);

/// Starts keelson-init in place of this process, or in the background.
pub(crate) async fn run(session: &Session, args: &UpArgs) -> Result<(), Failure> {
    if let Ok(services) = session.agent.services().await {
        return already(session, args, &services).await;
    }
    let (init, arguments) = prepare(session, args)?;
    if args.detach {
        return detached(session, args, &init, &arguments).await;
    }
    let source = Command::new(&init).args(&arguments).exec();
    Err(cannot_run(&init, &source))
}

async fn already(session: &Session, args: &UpArgs, services: &[Service]) -> Result<(), Failure> {
    let place = session.global.run_dir.display();
    if !args.detach {
        return Err(Failure::Start {
            message: format!("an agent with {} services runs already in {place}", services.len()),
            hint: "`keelson get services`; another agent needs its own --run-dir, --state-dir, --root-dir and runtime"
                .into(),
        });
    }
    wait_until_up(session, args, None).await?;
    output::print(&format!("The agent runs already in {place}.\n"))
}

/// Checks what can be checked before the start, and says what to run.
fn prepare(session: &Session, args: &UpArgs) -> Result<(PathBuf, Vec<OsString>), Failure> {
    let runtime = runtime_socket(&args.runtime_endpoint)?;
    let manifests = manifests(args)?;
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::NotRoot {
            message: "the agent must be started by root: it mounts volumes and makes cgroups".into(),
            hint: "`sudo keelson up`".into(),
        });
    }
    check_runtime(&runtime)?;
    Ok((find_init()?, arguments(&session.global.run_dir, args, manifests.as_deref())))
}

pub(super) fn runtime_socket(endpoint: &str) -> Result<PathBuf, Failure> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if path.starts_with('/') {
        return Ok(path.into());
    }
    Err(Failure::Usage {
        message: format!("the runtime endpoint {endpoint:?} is no unix socket"),
        hint: "--runtime-endpoint unix:///path/of/the.sock".into(),
    })
}

fn manifests(args: &UpArgs) -> Result<Option<PathBuf>, Failure> {
    let Some(given) = &args.manifests else {
        let default = PathBuf::from(DEFAULT_MANIFESTS);
        return Ok(default.is_dir().then_some(default));
    };
    match fs::metadata(given).and_then(|_| std::path::absolute(given)) {
        Ok(path) => Ok(Some(path)),
        Err(source) => Err(Failure::Start {
            message: format!("cannot use the manifests {}: {source}", given.display()),
            hint: format!("`mkdir -p {}`, or leave --manifests out and use `keelson apply`", given.display()),
        }),
    }
}

pub(super) fn check_runtime(socket: &Path) -> Result<(), Failure> {
    let Err(source) = UnixStream::connect(socket) else { return Ok(()) };
    let what = match source.kind() {
        io::ErrorKind::NotFound => "there is no such socket".to_owned(),
        io::ErrorKind::ConnectionRefused => "nobody listens there".to_owned(),
        _ => source.to_string(),
    };
    Err(Failure::NoRuntime {
        message: format!("no container runtime at {}: {what}", socket.display()),
        hint: "install and start containerd (`apt-get install containerd`, `systemctl start containerd`), \
               or name another socket with --runtime-endpoint unix:///…"
            .into(),
    })
}

/// Beside this executable, else in the folder of the packages, else on the PATH.
pub(super) fn find_init() -> Result<PathBuf, Failure> {
    let name = ServiceName::Init.binary();
    let own = std::env::current_exe().and_then(fs::canonicalize).ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let on_path = std::env::var_os("PATH");
    let on_path = on_path.iter().flat_map(std::env::split_paths).filter(|folder| folder.is_absolute());
    beside
        .into_iter()
        .chain([PathBuf::from(LIBEXEC)])
        .chain(on_path)
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Failure::Start {
            message: format!("{name} is neither beside this command nor in {LIBEXEC} nor on the PATH"),
            hint: "install all binaries of one release into one folder".into(),
        })
}

/// The command line of keelson-init: the kubelet's flags, and two of its own for folders.
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

pub(super) fn cannot_run(init: &Path, source: &io::Error) -> Failure {
    Failure::Start {
        message: format!("cannot run {}: {source}", init.display()),
        hint: "install all binaries of one release into one folder".into(),
    }
}

async fn detached(
    session: &Session,
    args: &UpArgs,
    init: &Path,
    arguments: &[OsString],
) -> Result<(), Failure> {
    let run_dir = &session.global.run_dir;
    let log = args.log_file.clone().unwrap_or_else(|| run_dir.join("keelson.log"));
    let unwritable = |source: io::Error| Failure::Start {
        message: format!("cannot write the log {}: {source}", log.display()),
        hint: "--log-file names another".into(),
    };
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder).map_err(unwritable)?;
    }
    let out = OpenOptions::new().create(true).append(true).open(&log).map_err(unwritable)?;
    let begin = out.metadata().map_or(0, |m| m.len());
    let mut command = Command::new(init);
    command.args(arguments).stdin(Stdio::null()).stdout(out.try_clone().map_err(unwritable)?).stderr(out);
    // SAFETY: setsid(2) is async-signal-safe and the closure does nothing else.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from));
    }
    let mut child = command.spawn().map_err(|source| cannot_run(init, &source))?;
    let pid = child.id();
    if let Err(failure) = wait_until_up(session, args, Some(&mut child)).await {
        show_log(&log, begin);
        return Err(failure);
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
    for line in &lines[lines.len().saturating_sub(LOG_TAIL)..] {
        output::notice(line);
    }
}

/// What the services together amount to.
#[derive(Debug, PartialEq, Eq)]
enum Together {
    /// Every one runs.
    Up,
    /// Every one runs, these miss something.
    Degraded(Vec<String>),
    /// These are not there yet.
    Coming(Vec<String>),
    /// These will not come up by themselves.
    Failed(Vec<String>),
}

fn judge(services: &[Service]) -> Together {
    let told = |state: &str| -> Vec<String> {
        services.iter().filter(|s| s.state == state).map(|s| format!("{} ({})", s.name, s.message)).collect()
    };
    let failed = told("failed");
    if !failed.is_empty() {
        return Together::Failed(failed);
    }
    let runs = |name: ServiceName| {
        services.iter().any(|s| s.name == name.as_str() && matches!(s.state.as_str(), "running" | "degraded"))
    };
    let missing: Vec<String> =
        ServiceName::supervised().filter(|name| !runs(*name)).map(|n| n.to_string()).collect();
    let degraded = told("degraded");
    match (missing.is_empty(), degraded.is_empty()) {
        (false, _) => Together::Coming(missing),
        (true, true) => Together::Up,
        (true, false) => Together::Degraded(degraded),
    }
}

/// Asks init until all services run. `child` is a keelson-init that must not end meanwhile.
async fn wait_until_up(
    session: &Session,
    args: &UpArgs,
    mut child: Option<&mut Child>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut settled: Option<Instant> = None;
    loop {
        if let Some(child) = child.as_deref_mut()
            && let Ok(Some(status)) = child.try_wait()
        {
            return Err(Failure::Start {
                message: format!("keelson-init has ended: {status}"),
                hint: "mend what its last lines above name".into(),
            });
        }
        let state = session.agent.services().await.map(|services| judge(&services));
        match state {
            Ok(Together::Up) => return Ok(()),
            Ok(Together::Failed(services)) => {
                return Err(Failure::Start {
                    message: format!("these services have failed: {}", services.join(", ")),
                    hint: "mend what they name, then `keelson services restart NAME`".into(),
                });
            }
            Ok(Together::Degraded(services)) => {
                if settled.get_or_insert_with(Instant::now).elapsed() >= SETTLED {
                    output::notice(&format!(
                        "All services run; these miss something: {}",
                        services.join(", ")
                    ));
                    return Ok(());
                }
            }
            Ok(Together::Coming(services)) if begun.elapsed() >= args.timeout => {
                return Err(not_up("these services are not up in time", &services));
            }
            Err(failure) if begun.elapsed() >= args.timeout => return Err(failure),
            Ok(Together::Coming(_)) | Err(_) => settled = None,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn not_up(what: &str, services: &[String]) -> Failure {
    Failure::TimedOut {
        message: format!("{what}: {}", services.join(", ")),
        hint: "`keelson get services`; the agent goes on trying".into(),
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
        assert_eq!(judge(&all), Together::Up);
        all[0].state = "degraded".into();
        assert!(matches!(judge(&all), Together::Degraded(list) if list.len() == 1));
        all[1].state = "backing-off".into();
        assert_eq!(judge(&all), Together::Coming(vec!["runtime-shim".into()]));
        all[2].state = "failed".into();
        assert!(matches!(judge(&all), Together::Failed(list) if list.len() == 1));
        assert!(matches!(judge(&[]), Together::Coming(list) if list.len() == 7));
    }
}
