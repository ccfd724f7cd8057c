//! `keelson exec` against containers whose commands are a script of the test.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use keelson_config::{Config, Paths, ServiceName};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::json;

use crate::fake::{Fake, World};
use crate::running::Running;
use crate::{Said, command, document, keelson, running_pod, world};

#[test]
fn the_exit_code_of_the_command_is_passed_on() {
    let fake = Fake::start(world());
    let said = keelson(&fake.run_dir, &["exec", "web", "-c", "proxy", "--", "echo", "-n", "hello"]);
    assert_eq!(said.err, "");
    assert_eq!(said.ok(), "-n hello\n");
    for (code, expected) in [("3", 3), ("64", 64), ("137", 137), ("255", 255), ("256", 1), ("-1", 1)] {
        let said = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "exit", code]);
        assert_eq!(said.code, Some(expected), "{said:?}");
        assert_eq!(said.out, "");
        assert_eq!(said.err, format!("bye\nThe command ended with exit code {code}.\n"));
    }
    let said = keelson(&fake.run_dir, &["exec", "dns", "-n", "system", "--", "echo"]);
    assert!(said.err.contains("Container app, the first of: app, proxy"), "{said:?}");
    let told = fake.world.told.all();
    assert_eq!(told[0], "exec /u1/proxy tty=false stdin=false echo -n hello");
    assert!(told.contains(&"exec /u3/app tty=false stdin=false echo".to_owned()), "{told:?}");
}

#[test]
fn standard_input_is_handed_on_and_its_end_is_told() {
    let fake = Fake::start(world());
    let mut running = Running::start(&fake.run_dir, &["exec", "-i", "web", "-c", "app", "--", "cat"]);
    let mut stdin = running.stdin.take().unwrap();
    stdin.write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    stdin.write_all(b"two\n").unwrap();
    assert_eq!(running.line(), "two");
    drop(stdin);
    // The output goes on after the end of the input.
    assert_eq!(running.end(), (Some(0), vec!["[end]".to_owned()], Vec::new()));
}

#[test]
fn a_large_input_comes_back_whole() {
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
    let said = Said::of(child.wait_with_output().unwrap());
    writer.join().unwrap();
    assert_eq!(said.ok(), format!("{text}[end]\n"));
}

#[test]
fn a_reader_of_the_output_that_goes_is_no_error() {
    let fake = Fake::start(world());
    let mut child = command(&fake.run_dir, &["exec", "web", "-c", "app", "--", "many", "10000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let said = Said::of(child.wait_with_output().unwrap());
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_ends_the_command_here_and_closes_its_input_there() {
    let fake = Fake::start(world());
    let mut running = Running::start(&fake.run_dir, &["exec", "-i", "web", "-c", "app", "--", "cat"]);
    running.stdin.as_mut().unwrap().write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    assert_eq!(running.interrupt(), (Some(2), Vec::new()));
    let begun = Instant::now();
    while !fake.world.told.all().contains(&"the command is over".to_owned()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the command goes on");
        std::thread::yield_now();
    }
}

#[test]
fn a_container_that_does_not_run_says_how_it_is() {
    let waiting = |state: serde_json::Value| {
        document(
            "default",
            "web-edge",
            "u1",
            json!({"metadata": {"name": "web-edge"}, "spec": {"nodeName": "edge", "containers": [{"name": "app"}]},
                   "status": {"containerStatuses": [{"name": "app", "state": state}]}}),
        )
    };
    let told = |pod| {
        let fake = Fake::start(World { pods: vec![pod], ..World::default() });
        let said = keelson(&fake.run_dir, &["exec", "web", "--", "nowhere"]);
        let (error, hint) = said.failed(1);
        (error.to_owned(), hint.to_owned())
    };
    let (error, hint) = told(waiting(json!({"terminated": {"exitCode": 3, "reason": "Error"}})));
    assert_eq!(
        error,
        "the container app of the pod web-edge is not running: it has ended with exit code 3 (Error)"
    );
    assert_eq!(hint, "`keelson logs web-edge -c app` shows its last words");
    let (error, hint) = told(waiting(json!({"waiting": {"reason": "ImagePullBackOff"}})));
    assert!(error.ends_with("it waits (ImagePullBackOff)"), "{error}");
    assert_eq!(hint, "`keelson explain pod web-edge` says what it waits for");
}

#[test]
fn what_keeps_a_command_from_running_is_told_with_the_way_out() {
    let fake = Fake::start(world());
    let said = |command: &str| keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", command]);
    let absent = said("absent");
    assert!(absent.failed(1).0.contains("executable file not found"), "{absent:?}");
    let no_runtime = said("no-runtime");
    let (error, hint) = no_runtime.failed(69);
    assert!(error.contains("runtime does not answer") && hint.contains("keelson get node"), "{no_runtime:?}");
    let idle = said("idle");
    assert!(idle.failed(75).1.contains("streamingConnectionIdleTimeout"), "{idle:?}");
    let lost = said("lost");
    let (error, hint) = lost.failed(1);
    assert!(error.contains("broke while the command ran") && hint.contains("may still run"), "{lost:?}");
    assert_eq!(lost.out, "half", "what was said before is not lost");
    let stranger = keelson(&fake.run_dir, &["exec", "web", "-c", "none", "--", "echo"]);
    assert!(stranger.failed(1).1.contains("app, proxy"), "{stranger:?}");
    assert_eq!(keelson(&fake.run_dir, &["exec", "web", "echo"]).code, Some(64));
}

#[test]
fn a_service_that_is_away_is_named() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::PodSync], &Config::default());
    let said = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "echo"]);
    assert!(said.failed(69).0.starts_with("runtime-shim is not running"), "{said:?}");
    let socket = Paths::socket_below(&fake.run_dir, ServiceName::RuntimeShim);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _hangs = UnixListener::bind(&socket).unwrap();
    let said = keelson(&fake.run_dir, &["exec", "web", "-c", "app", "--", "echo"]);
    assert!(said.failed(69).0.contains("hangs"), "{said:?}");
}

#[test]
fn without_pod_sync_the_full_name_and_the_container_do() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::RuntimeShim], &Config::default());
    let said = keelson(&fake.run_dir, &["exec", "web-edge", "-c", "app", "--", "echo", "x"]);
    assert!(said.err.contains("pod-sync is not running"), "{said:?}");
    assert_eq!(said.ok(), "x\n");
    assert_eq!(fake.world.told.all()[0], "exec default/web-edge/app tty=false stdin=false echo x");
    let said = keelson(&fake.run_dir, &["exec", "web-edge", "--", "echo", "x"]);
    assert!(said.failed(69).0.starts_with("pod-sync is not running"), "{said:?}");
}

#[test]
fn a_connection_that_breaks_leaves_the_end_open() {
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
fn a_terminal_is_only_for_somebody_who_types() {
    let fake = Fake::start(world());
    for (args, notice) in [
        (["exec", "-t", "web", "-c", "app", "--", "echo"], "No terminal for the command: -t needs -i.\n"),
        (
            ["exec", "-it", "web", "-c", "app", "--", "echo"],
            "No terminal for the command: standard input is none.\n",
        ),
    ] {
        let said = keelson(&fake.run_dir, &args);
        assert_eq!((said.code, said.err.as_str()), (Some(0), notice));
    }
    assert!(fake.world.told.all().iter().all(|told| !told.contains("tty=true")));
}

/// A terminal: the side of the person, and the side of the command.
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

    /// Whether keys are lines, are echoed, and Ctrl-C is a signal.
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
fn in_a_terminal_every_key_goes_to_the_command_and_so_does_each_size() {
    let fake = Fake::start(world());
    let mut terminal = Terminal::new();
    terminal.resize(80, 24);
    assert!(terminal.is_cooked());
    let mut child = in_terminal(&terminal, &fake, &["exec", "-it", "web", "-c", "app", "--", "keys"]);
    terminal.until("[80x24]");
    assert!(!terminal.is_cooked());
    // Ctrl-C, Ctrl-D and Ctrl-Z are keys.
    terminal.type_in(b"a\x03\x04\x1a");
    terminal.until("<1a>");
    terminal.resize(132, 50);
    kill_process(pid(&child), Signal::WINCH).unwrap();
    terminal.until("[132x50]");
    terminal.type_in(b"q");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(terminal.is_cooked(), "the terminal is as it was before");
    assert_eq!(fake.world.told.all()[0], "exec /u1/app tty=true stdin=true keys");
}

#[test]
fn a_signal_that_ends_it_leaves_the_terminal_as_it_was() {
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
fn a_failure_is_told_on_a_terminal_that_is_itself_again() {
    let fake =
        Fake::start(World { pods: vec![running_pod("default", "web-edge", "u1")], ..World::default() });
    let mut terminal = Terminal::new();
    let mut child = in_terminal(&terminal, &fake, &["exec", "-it", "web", "-c", "app", "--", "absent"]);
    // A terminal that is itself puts the carriage return there that a line needs.
    terminal.until("executable file not found in $PATH\r\n");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
