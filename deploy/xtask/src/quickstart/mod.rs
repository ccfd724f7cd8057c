//! `cargo xtask quickstart`: from a clean machine to running pods.

pub mod layout;
mod pods;
pub mod record;

use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context as _, bail, ensure};
use keelson_config::{Paths, ServiceName};
use keelson_testkit::process::ProcessId;
use keelson_testkit::{AgentSpec, Options, PrivateContainerd, copy_binaries, detach, mounts_below};

use crate::progress::Step;
use crate::{cargo, cargo_stdout, packages, require_root, run_command};
use layout::{CGROUP_ROOT, NETWORK_ID, SHARED_FOLDERS};
use record::Record;

/// The build profile of the quickstart's binaries: not optimised, so that the first build is short.
const PROFILE: &str = "quick";

/// Installs missing packages, builds and starts the agent, waits for the example pods and prints a summary. If the quickstart
/// is running already, only prints the summary.
pub fn run() -> anyhow::Result<()> {
    require_root("quickstart")?;
    if let Some(record) = Record::load(&layout::record_file()) {
        match state_of(&record) {
            State::Up => {
                println!("The quickstart is already running.\n");
                return print_summary(&spec_of(&record));
            }
            State::AgentStopped => {
                eprintln!(
                    "The agent of an earlier quickstart has ended, its pods have not; starting it again."
                );
                return print_summary(&start_agent(record)?);
            }
            State::Incomplete(why) => {
                eprintln!("An earlier quickstart is incomplete ({why}); removing what is left of it.");
            }
        }
    }
    crate::down::remove_all()?;
    refuse_other_agents()?;
    packages::install_to_run()?;
    let built = build(PROFILE)?;
    let started = start(&built);
    if started.is_err() {
        eprintln!(
            "The processes that were started keep running, so that you can inspect them; `cargo xtask down` removes them."
        );
    }
    print_summary(&started?)
}

/// The state of a recorded quickstart.
enum State {
    Up,
    /// The agent has ended, but the runtime runs, and the agent's binaries and manifests exist.
    AgentStopped,
    /// Another part is missing; the text says which.
    Incomplete(String),
}

fn state_of(record: &Record) -> State {
    let alive = |process: Option<ProcessId>| process.is_some_and(ProcessId::is_alive);
    if !alive(record.containerd) {
        return State::Incomplete("its containerd has ended".to_owned());
    }
    let spec = spec_of(record);
    if !alive(record.init) {
        // Without an entry for init, the quickstart failed before it started the agent.
        let has_run = record.init.is_some() && spec.bin_dir.is_dir() && spec.manifest_dir.is_dir();
        return if has_run {
            State::AgentStopped
        } else {
            State::Incomplete("its agent never ran".to_owned())
        };
    }
    match pods::list(&spec) {
        Ok(_) => State::Up,
        Err(error) => State::Incomplete(format!("its agent does not answer: {error:#}")),
    }
}

fn spec_of(record: &Record) -> AgentSpec {
    let socket = layout::containerd_dir().join("c.sock");
    let endpoint = format!("unix://{}", socket.display());
    layout::agent_spec(endpoint, record.port, record.healthz_port)
}

/// Fails if another agent uses the default run folder: the quickstart would replace its sockets.
fn refuse_other_agents() -> anyhow::Result<()> {
    let run_dir = Paths::default().run_dir;
    let answers = |service: &ServiceName| {
        std::os::unix::net::UnixStream::connect(Paths::socket_below(&run_dir, *service)).is_ok()
    };
    if let Some(service) = ServiceName::ALL.iter().find(|service| answers(service)) {
        bail!(
            "another agent uses {} (its {service} answers there); stop that agent first",
            run_dir.display()
        );
    }
    Ok(())
}

/// Builds the binaries with a profile of Cargo.toml and returns their folder. Cargo prints its own progress.
///
/// # Errors
/// The build fails.
pub fn build(profile: &str) -> anyhow::Result<PathBuf> {
    eprintln!("Building the agent (a first build takes some minutes) …");
    let mut command = cargo();
    command.args(["build", "--profile", profile, "--locked", "--package", "keelson-cli"]);
    for service in ServiceName::ALL {
        command.args(["--package", service.binary()]);
    }
    run_command(&mut command)?;
    let metadata = cargo_stdout(&["metadata", "--format-version", "1", "--no-deps", "--locked"])?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let target = metadata["target_directory"].as_str().context("cargo names no target folder")?;
    Ok(Path::new(target).join(profile))
}

/// Starts containerd, then the agent, and waits for the example pods.
fn start(built: &Path) -> anyhow::Result<AgentSpec> {
    let made: Vec<PathBuf> = SHARED_FOLDERS.iter().map(PathBuf::from).filter(|path| !path.exists()).collect();
    let (port, healthz_port) = (free_port(10250)?, free_port(10248)?);
    let mut record = Record { init: None, containerd: None, port, healthz_port, made };
    make_home()?;
    record.store(&layout::record_file())?;

    let step = Step::start("Starting a private containerd");
    let options = Options {
        id: Some(NETWORK_ID.to_owned()),
        cgroup_roots: vec![CGROUP_ROOT.to_owned()],
        detached: true,
        ..Options::default()
    };
    let mut containerd = PrivateContainerd::launch(&layout::containerd_dir(), options)?;
    record.containerd = containerd.process();
    record.store(&layout::record_file())?;
    let imported = containerd.import_standard_images();
    containerd.leave_running();
    imported?;
    step.done("running, with a locally built image");

    copy_binaries(built, &layout::bin_dir())?;
    let spec = spec_of(&record);
    spec.write()?;
    pods::copy_examples(&spec)?;
    start_agent(record)
}

/// Starts the agent on the running containerd and waits for the example pods.
fn start_agent(mut record: Record) -> anyhow::Result<AgentSpec> {
    let spec = spec_of(&record);
    let mut child = spawn_agent(&spec)?;
    let init = ProcessId::of(child.id());
    record.init = init;
    record.store(&layout::record_file())?;
    let Some(init) = init else {
        let status = child.wait()?;
        bail!("the agent ended at once with {status}; its log is {}", layout::agent_log().display());
    };
    pods::wait_ready(&spec, init)?;
    Ok(spec)
}

/// Creates the home folder with a mode that lets the services' users enter it.
fn make_home() -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let home = layout::home();
    ensure!(mounts_below(&home).is_empty(), "there are mounts below {}; unmount them first", home.display());
    fs::create_dir_all(&home)
        .and_then(|()| fs::set_permissions(&home, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot make {}", home.display()))
}

/// The mode of the agent's log. It names pods, paths and callers, so only root and its group may read it.
const LOG_MODE: u32 = 0o640;

fn spawn_agent(spec: &AgentSpec) -> anyhow::Result<Child> {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    let path = layout::agent_log();
    let open = fs::File::options().append(true).create(true).mode(LOG_MODE).open(&path).and_then(|log| {
        // A log of an earlier version may have another mode.
        log.set_permissions(fs::Permissions::from_mode(LOG_MODE))?;
        Ok(log)
    });
    let log = open.with_context(|| format!("cannot make {}", path.display()))?;
    let mut command = spec.command();
    command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    detach(&mut command);
    command.spawn().with_context(|| format!("cannot run {command:?}"))
}

/// Returns `wanted`, or another free port if that one is in use.
fn free_port(wanted: u16) -> anyhow::Result<u16> {
    let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = bind(wanted).or_else(|_| bind(0)).context("no free port on loopback")?;
    Ok(listener.local_addr()?.port())
}

/// Prints the pods and services, and commands to inspect and stop them.
fn print_summary(spec: &AgentSpec) -> anyhow::Result<()> {
    let keelson = spec.bin_dir.join("keelson");
    let keelson = keelson.display();
    let node = &spec.node_name;
    let text = format!(
        "{pods}
{services}
Inspect it:
  {keelson} get pods
  {keelson} logs -f counter-{node}
  {keelson} explain pod web-{node}
  {keelson} describe pod shared-volume-{node}
  curl http://127.0.0.1:{port}/pods
Run a pod of your own: put its manifest into {manifests}
The agent's log: {log}
Stop it and remove everything: cargo xtask down
",
        pods = pods::cli(spec, &["get", "pods", "-o", "wide"])?,
        services = pods::cli(spec, &["get", "services"])?,
        port = spec.port,
        manifests = spec.manifest_dir.display(),
        log = layout::agent_log().display(),
    );
    // A reader that closes the pipe early, such as head(1), is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}
