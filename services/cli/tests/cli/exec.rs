//! `keelson exec` with the commands of the fake containers.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use keelson_config::{Config, Paths, ServiceName};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::json;

use crate::fake::{Fake, World};
use crate::running::Running;
use crate::{CommandResult, command, document, keelson, running_pod, world};

#[test]
fn exec_returns_the_exit_code_of_the_command() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["exec", "web", "-c", "proxy", "--", "echo", "-n", "hello"]);
    assert_eq!(result.err, "");
    assert_eq!(result.ok(), "-n hello\n");
    for (code, expected) in [("3", 3), ("64", 64), ("137", 137), ("255", 255), ("256", 1), ("-1", 1)] {
        let result = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "exit", code]);
        assert_eq!(result.code, Some(expected), "{result:?}");
        assert_eq!(result.out, "");
        assert_eq!(result.err, format!("bye\nThe command ended with exit code {code}.\n"));
    }
    let result = keelson(&fake.run_dir, &["exec", "dns", "-n", "system", "--", "echo"]);
    assert!(result.err.contains("Using container app, the first of: app, proxy"), "{result:?}");
    let calls = fake.world.calls.all();
    assert_eq!(calls[0], "exec /u1/proxy tty=false stdin=false echo -n hello");
    assert!(calls.contains(&"exec /u3/app tty=false stdin=false echo".to_owned()), "{calls:?}");
}

#[test]
fn exec_passes_standard_input_and_its_end() {
    let fake = Fake::start(world());
    let mut running = Running::start(&fake.run_dir, &["exec", "-i", "web", "-c", "app", "--", "cat"]);
    let mut stdin = running.stdin.take().unwrap();
    stdin.write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    stdin.write_all(b"two\n").unwrap();
    assert_eq!(running.line(), "two");
    drop(stdin);
    // The output continues after the end of the input.
    assert_eq!(running.end(), (Some(0), vec!["[end]".to_owned()], Vec::new()));
}

#[test]
fn exec_passes_a_large_input() {
    let fake = Fake::start(world());
    let text: String = (0..200_000).map(|i| format!("{i}\n")).collect();
    let mut child = command(&fake.run_dir, &["exec", "-i", "web", "-c", "app", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = text.clone();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()).unwrap());
    let result = CommandResult::of(child.wait_with_output().unwrap());
    writer.join().unwrap();
    assert_eq!(result.ok(), format!("{text}[end]\n"));
}

#[test]
fn exec_with_a_closed_output_is_no_error() {
    let fake = Fake::start(world());
    let mut child = command(&fake.run_dir, &["exec", "web", "-c", "app", "--", "many", "10000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let result = CommandResult::of(child.wait_with_output().unwrap());
    assert_eq!((result.code, result.err.as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_ends_exec_and_closes_the_input_of_the_command() {
    let fake = Fake::start(world());
    let mut running = Running::start(&fake.run_dir, &["exec", "-i", "web", "-c", "app", "--", "cat"]);
    running.stdin.as_mut().unwrap().write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    assert_eq!(running.interrupt(), (Some(2), Vec::new()));
    fake.world.calls.until_blocking(|calls| calls.contains(&"the command is over".to_owned()));
}

#[test]
fn exec_error_shows_the_state_of_the_container() {
    let waiting = |state: serde_json::Value| {
        document(
            "default",
            "web-edge",
            "u1",
            json!({"metadata": {"name": "web-edge"}, "spec": {"nodeName": "edge", "containers": [{"name": "app"}]},
                   "status": {"containerStatuses": [{"name": "app", "state": state}]}}),
        )
    };
    let exec_error = |pod| {
        let fake = Fake::start(World { pods: vec![pod], ..World::default() });
        let result = keelson(&fake.run_dir, &["exec", "web", "--", "nowhere"]);
        let (error, hint) = result.failed(1);
        (error.to_owned(), hint.to_owned())
    };
    let (error, hint) = exec_error(waiting(json!({"terminated": {"exitCode": 3, "reason": "Error"}})));
    assert_eq!(
        error,
        "the container app of the pod web-edge is not running: it has ended with exit code 3 (Error)"
    );
    assert_eq!(hint, "`keelson logs web-edge -c app` shows its last lines");
    let (error, hint) = exec_error(waiting(json!({"waiting": {"reason": "ImagePullBackOff"}})));
    assert!(error.ends_with("it waits (ImagePullBackOff)"), "{error}");
    assert_eq!(hint, "`keelson explain pod web-edge` shows what it waits for");
}

#[test]
fn exec_errors_have_hints() {
    let fake = Fake::start(world());
    let result = |command: &str| keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", command]);
    let absent = result("absent");
    assert!(absent.failed(1).0.contains("executable file not found"), "{absent:?}");
    let no_runtime = result("no-runtime");
    let (error, hint) = no_runtime.failed(69);
    assert!(error.contains("runtime does not answer") && hint.contains("keelson get node"), "{no_runtime:?}");
    let idle = result("idle");
    assert!(idle.failed(75).1.contains("streamingConnectionIdleTimeout"), "{idle:?}");
    let lost = result("lost");
    let (error, hint) = lost.failed(1);
    assert!(error.contains("broke while the command ran") && hint.contains("may still run"), "{lost:?}");
    assert_eq!(lost.out, "half", "output before the error is not lost");
    let stranger = keelson(&fake.run_dir, &["exec", "web", "-c", "none", "--", "echo"]);
    assert!(stranger.failed(1).1.contains("app, proxy"), "{stranger:?}");
    assert_eq!(keelson(&fake.run_dir, &["exec", "web", "echo"]).code, Some(64));
}

#[test]
fn exec_error_names_a_service_that_is_down() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::PodSync], &Config::default());
    let result = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "echo"]);
    assert!(result.failed(69).0.starts_with("runtime-shim is not running"), "{result:?}");
    let socket = Paths::socket_below(&fake.run_dir, ServiceName::RuntimeShim);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _hangs = UnixListener::bind(&socket).unwrap();
    let result = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "echo"]);
    assert!(result.failed(69).0.contains("hangs"), "{result:?}");
}

#[test]
fn exec_without_pod_sync_works_with_full_names() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::RuntimeShim], &Config::default());
    let result = keelson(&fake.run_dir, &["exec", "web-edge", "-c", "app", "--", "echo", "x"]);
    assert!(result.err.contains("pod-sync is not running"), "{result:?}");
    assert_eq!(result.ok(), "x\n");
    assert_eq!(fake.world.calls.all()[0], "exec default/web-edge/app tty=false stdin=false echo x");
    let result = keelson(&fake.run_dir, &["exec", "web-edge", "--", "echo", "x"]);
    assert!(result.failed(69).0.starts_with("pod-sync is not running"), "{result:?}");
}

#[test]
fn exec_with_a_broken_connection_says_the_command_may_still_run() {
    let folder = tempfile::tempdir().unwrap();
    let start = |service| Fake::start_in(folder.path(), world(), &[service], &Config::default());
    let _pods = start(ServiceName::PodSync);
    let shim = start(ServiceName::RuntimeShim);
    let mut running = Running::start(folder.path(), &["exec", "-i", "web", "-c", "app", "--", "cat"]);
    running.stdin.as_mut().unwrap().write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    drop(shim);
    let (code, out, err) = running.end();
    assert_eq!((code, out), (Some(1), Vec::new()), "{err:?}");
    assert!(err[0].starts_with("error: the connection broke while the command ran"), "{err:?}");
    assert!(err[1].contains("may still run"), "{err:?}");
}

#[test]
fn exec_gives_a_terminal_only_for_interactive_input() {
    let fake = Fake::start(world());
    for (args, notice) in [
        (["exec", "-t", "web", "-c", "app", "--", "echo"], "No terminal for the command: -t needs -i.\n"),
        (
            ["exec", "-it", "web", "-c", "app", "--", "echo"],
            "No terminal for the command: standard input is not a terminal.\n",
        ),
    ] {
        let result = keelson(&fake.run_dir, &args);
        assert_eq!((result.code, result.err.as_str()), (Some(0), notice));
    }
    assert!(fake.world.calls.all().iter().all(|call| !call.contains("tty=true")));
}

/// A pseudo-terminal: the person's side and the command's side.
struct Terminal {
    person: File,
    command: OwnedFd,
}

impl Terminal {
    fn new() -> Self {
        let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        let name = ptsname(&person, Vec::new()).unwrap();
        let command = rustix::fs::open(
            name.as_c_str(),
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        Self { person: person.into(), command }
    }

    fn resize(&self, width: u16, height: u16) {
        let size = Winsize { ws_col: width, ws_row: height, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.command, size).unwrap();
    }

    fn side(&self) -> Stdio {
        self.command.try_clone().unwrap().into()
    }

    /// Whether the terminal reads lines, echoes keys, and turns Ctrl-C into a signal.
    fn is_cooked(&self) -> bool {
        let modes = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        tcgetattr(&self.command).unwrap().local_modes.contains(modes)
    }

    /// Reads until the screen shows `text`.
    fn until(&mut self, text: &str) {
        let mut shown = String::new();
        let mut some = [0; 256];
        while !shown.contains(text) {
            let count = self.person.read(&mut some).unwrap();
            shown.push_str(std::str::from_utf8(&some[..count]).unwrap());
        }
    }

    fn type_in(&mut self, keys: &[u8]) {
        self.person.write_all(keys).unwrap();
    }
}

fn in_terminal(terminal: &Terminal, fake: &Fake, args: &[&str]) -> std::process::Child {
    let mut command: Command = command(&fake.run_dir, args);
    command.stdin(terminal.side()).stdout(terminal.side()).stderr(terminal.side()).spawn().unwrap()
}

fn pid(child: &std::process::Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

#[test]
fn exec_passes_keys_and_sizes_of_the_terminal() {
    let fake = Fake::start(world());
    let mut terminal = Terminal::new();
    terminal.resize(80, 24);
    assert!(terminal.is_cooked());
    let mut child = in_terminal(&terminal, &fake, &["exec", "-it", "web", "-c", "app", "--", "keys"]);
    terminal.until("[80x24]");
    assert!(!terminal.is_cooked());
    // Ctrl-C, Ctrl-D and Ctrl-Z are ordinary keys.
    terminal.type_in(b"a\x03\x04\x1a");
    terminal.until("<1a>");
    terminal.resize(132, 50);
    kill_process(pid(&child), Signal::WINCH).unwrap();
    terminal.until("[132x50]");
    terminal.type_in(b"q");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(terminal.is_cooked(), "the terminal is restored");
    assert_eq!(fake.world.calls.all()[0], "exec /u1/app tty=true stdin=true keys");
}

#[test]
fn exec_restores_the_terminal_when_a_signal_ends_it() {
    let fake = Fake::start(world());
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut terminal = Terminal::new();
        let mut child = in_terminal(&terminal, &fake, &["exec", "-it", "web", "-c", "app", "--", "keys"]);
        terminal.until("[no size]");
        assert!(!terminal.is_cooked());
        kill_process(pid(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!(terminal.is_cooked());
    }
}

#[test]
fn exec_restores_the_terminal_before_it_prints_an_error() {
    let fake =
        Fake::start(World { pods: vec![running_pod("default", "web-edge", "u1")], ..World::default() });
    let mut terminal = Terminal::new();
    let mut child = in_terminal(&terminal, &fake, &["exec", "-it", "web", "-c", "app", "--", "absent"]);
    // A restored terminal adds the carriage return.
    terminal.until("executable file not found in $PATH\r\n");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
