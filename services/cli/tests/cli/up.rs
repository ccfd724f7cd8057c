//! `keelson up` with a fake keelson-init that records its arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::supervisor::v1::Service;

use crate::CommandResult;
use crate::fake::{Fake, World};

/// A folder with the command, a keelson-init next to it, and a socket instead of containerd's.
struct Installation {
    folder: tempfile::TempDir,
    _runtime: UnixListener,
}

impl Installation {
    fn new(init: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let runtime = UnixListener::bind(folder.path().join("c.sock")).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_keelson"), folder.path().join("keelson")).unwrap();
        let script = folder.path().join("keelson-init");
        fs::write(&script, format!("#!/bin/sh\n{init}\n")).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder, _runtime: runtime }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn up(&self) -> Command {
        let mut command = Command::new(self.path("keelson"));
        command.arg("up").arg("--run-dir").arg(self.path("run"));
        command.arg("--runtime-endpoint").arg(format!("unix://{}", self.path("c.sock").display()));
        command
    }
}

fn run(command: &mut Command) -> CommandResult {
    CommandResult::of(command.output().unwrap())
}

fn require_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test starts `keelson up`, which needs root: run it with sudo"
    );
}

fn all_running() -> World {
    let service =
        |name: ServiceName| Service { name: name.to_string(), state: "running".into(), ..Service::default() };
    World { services: ServiceName::supervised().map(service).collect(), ..World::default() }
}

#[test]
fn up_becomes_the_init_next_to_it() {
    require_root();
    let installation = Installation::new("echo \"$@\"; exit 42");
    fs::create_dir(installation.path("manifests")).unwrap();
    let result =
        run(installation.up().arg("--manifests").arg(installation.path("manifests")).args(["--", "--v=4"]));
    assert_eq!(result.code, Some(42), "{result:?}");
    let base = installation.folder.path().display();
    assert_eq!(
        result.out,
        format!(
            "--run-dir={base}/run --pod-manifest-path={base}/manifests \
             --container-runtime-endpoint=unix://{base}/c.sock --v=4\n"
        )
    );
}

#[test]
fn up_without_root_fails() {
    let installation = Installation::new("exit 0");
    let mut command = installation.up();
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let result = run(&mut command);
    assert_eq!(result.failed(77).1, "`sudo keelson up`", "{result:?}");
}

#[test]
fn up_without_a_runtime_names_the_socket_and_a_remedy() {
    require_root();
    let installation = Installation::new("exit 0");
    let missing = installation.path("missing.sock");
    let result = run(Command::new(installation.path("keelson"))
        .args(["up", "--run-dir"])
        .arg(installation.path("run"))
        .arg("--runtime-endpoint")
        .arg(&missing));
    let (error, hint) = result.failed(69);
    assert_eq!(error, format!("no container runtime at {}: the socket does not exist", missing.display()));
    assert!(hint.contains("apt-get install containerd") && hint.contains("--runtime-endpoint"), "{hint}");
}

#[test]
fn up_with_a_missing_manifest_folder_fails() {
    let installation = Installation::new("exit 0");
    let result = run(installation.up().args(["--manifests", "/nonexistent/manifests"]));
    assert!(result.failed(1).0.contains("/nonexistent/manifests"), "{result:?}");
}

#[test]
fn up_refuses_a_second_agent_in_the_run_folder() {
    let installation = Installation::new("exit 0");
    let _fake =
        Fake::start_in(&installation.path("run"), all_running(), &[ServiceName::Init], &Config::default());
    let result = run(&mut installation.up());
    assert!(result.failed(1).0.contains("already runs"), "{result:?}");
    assert!(run(installation.up().arg("--detach")).ok().contains("already runs"));
}

#[test]
fn up_detach_shows_the_last_lines_of_an_agent_that_ends() {
    require_root();
    let installation = Installation::new("echo 'the flag --v is unknown' >&2; exit 64");
    let result = run(installation.up().arg("--detach"));
    assert!(result.failed(1).0.contains("exit status: 64"), "{result:?}");
    assert!(result.err.starts_with("the flag --v is unknown\n"), "{}", result.err);
    let log = fs::read_to_string(installation.path("run/keelson.log")).unwrap();
    assert_eq!(log, "the flag --v is unknown\n");
}

#[test]
fn up_detach_waits_for_the_agent_and_leaves_it_running() {
    require_root();
    let installation = Installation::new("echo up > \"$0.fifo\"; exec sleep 600");
    let fifo = installation.path("keelson-init.fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let run_dir = installation.path("run");
    let services = std::thread::spawn(move || {
        // Blocks until the script has started, so that the services start after init.
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "up\n");
        Fake::start_in(&run_dir, all_running(), &[ServiceName::Init], &Config::default())
    });
    let result = run(installation.up().arg("--detach"));
    drop(services.join().unwrap());
    let out = result.ok();
    let pid: i32 = out.split_once("process ").unwrap().1.split_once(')').unwrap().0.parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid, "it has a session of its own");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert!(out.contains(&log_of(&installation.path("run"))), "{out}");
}

fn log_of(run_dir: &Path) -> String {
    run_dir.join("keelson.log").display().to_string()
}
