//! `keelson up` with a keelson-init that only notes how it was called.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::supervisor::v1::Service;

use crate::Said;
use crate::fake::{Fake, World};

/// A folder with the command, a keelson-init beside it, and a socket in the place of containerd's.
struct Place {
    folder: tempfile::TempDir,
    _runtime: UnixListener,
}

impl Place {
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

fn run(command: &mut Command) -> Said {
    Said::of(command.output().unwrap())
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
fn up_becomes_the_init_beside_it() {
    require_root();
    let place = Place::new("echo \"$@\"; exit 42");
    fs::create_dir(place.path("manifests")).unwrap();
    let said = run(place.up().arg("--manifests").arg(place.path("manifests")).args(["--", "--v=4"]));
    assert_eq!(said.code, Some(42), "{said:?}");
    let base = place.folder.path().display();
    assert_eq!(
        said.out,
        format!(
            "--run-dir={base}/run --pod-manifest-path={base}/manifests \
             --container-runtime-endpoint=unix://{base}/c.sock --v=4\n"
        )
    );
}

#[test]
fn up_without_root_says_so() {
    let place = Place::new("exit 0");
    let mut command = place.up();
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let said = run(&mut command);
    assert_eq!(said.failed(77).1, "`sudo keelson up`", "{said:?}");
}

#[test]
fn up_without_a_runtime_names_the_socket_and_the_way_out() {
    require_root();
    let place = Place::new("exit 0");
    let missing = place.path("missing.sock");
    let said = run(Command::new(place.path("keelson"))
        .args(["up", "--run-dir"])
        .arg(place.path("run"))
        .arg("--runtime-endpoint")
        .arg(&missing));
    let (error, hint) = said.failed(69);
    assert_eq!(error, format!("no container runtime at {}: there is no such socket", missing.display()));
    assert!(hint.contains("apt-get install containerd") && hint.contains("--runtime-endpoint"), "{hint}");
}

#[test]
fn up_with_a_manifest_folder_that_is_absent_says_so() {
    let place = Place::new("exit 0");
    let said = run(place.up().args(["--manifests", "/nonexistent/manifests"]));
    assert!(said.failed(1).0.contains("/nonexistent/manifests"), "{said:?}");
}

#[test]
fn a_second_agent_in_the_same_place_is_refused() {
    let place = Place::new("exit 0");
    let _fake = Fake::start_in(&place.path("run"), all_running(), &[ServiceName::Init], &Config::default());
    let said = run(&mut place.up());
    assert!(said.failed(1).0.contains("runs already"), "{said:?}");
    assert!(run(place.up().arg("--detach")).ok().contains("runs already"));
}

#[test]
fn a_detached_agent_that_ends_at_once_shows_its_last_lines() {
    require_root();
    let place = Place::new("echo 'the flag --v is unknown' >&2; exit 64");
    let said = run(place.up().arg("--detach"));
    assert!(said.failed(1).0.contains("exit status: 64"), "{said:?}");
    assert!(said.err.starts_with("the flag --v is unknown\n"), "{}", said.err);
    let log = fs::read_to_string(place.path("run/keelson.log")).unwrap();
    assert_eq!(log, "the flag --v is unknown\n");
}

#[test]
fn a_detached_agent_is_waited_for_and_stays() {
    require_root();
    let place = Place::new("echo up > \"$0.fifo\"; exec sleep 600");
    let fifo = place.path("keelson-init.fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let run_dir = place.path("run");
    let services = std::thread::spawn(move || {
        // Opens only when the script has begun: the services come up after init.
        assert_eq!(fs::read_to_string(&fifo).unwrap(), "up\n");
        Fake::start_in(&run_dir, all_running(), &[ServiceName::Init], &Config::default())
    });
    let said = run(place.up().arg("--detach"));
    drop(services.join().unwrap());
    let out = said.ok();
    let pid: i32 = out.split_once("process ").unwrap().1.split_once(')').unwrap().0.parse().unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid, "it has a session of its own");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert!(out.contains(&log_of(&place.path("run"))), "{out}");
}

fn log_of(run_dir: &Path) -> String {
    run_dir.join("keelson.log").display().to_string()
}
