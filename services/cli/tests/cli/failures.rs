//! What a person is told when something is wrong.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::{Config, Paths, ServiceName};

use crate::fake::{Fake, World};
use crate::{Said, command, keelson, running_pod, world};

/// The command as a user who is neither root nor in the operators' group.
fn as_stranger(run_dir: &Path, args: &[&str]) -> Said {
    let folder = tempfile::tempdir().unwrap();
    let mut command = if rustix::process::geteuid().is_root() {
        let copy = folder.path().join("keelson");
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::copy(env!("CARGO_BIN_EXE_keelson"), &copy).unwrap();
        let mut command = Command::new(copy);
        command.uid(65_534).gid(65_534);
        command
    } else {
        Command::new(env!("CARGO_BIN_EXE_keelson"))
    };
    command.args(args).arg("--run-dir").arg(run_dir).current_dir("/").stdin(Stdio::null());
    Said::of(command.output().unwrap())
}

fn open(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn an_agent_that_does_not_run_is_named_by_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 12] = [
        &["get", "pods"],
        &["get", "services"],
        &["get", "node"],
        &["get", "events"],
        &["get", "sources"],
        &["logs", "web"],
        &["describe", "pod", "web"],
        &["describe", "node"],
        &["explain", "pod", "web"],
        &["delete", "pod", "web"],
        &["retry", "pod", "web"],
        &["services", "restart", "pod-sync"],
    ];
    for args in commands {
        let said = keelson(folder.path(), args);
        let (error, hint) = said.failed(69);
        assert!(error.starts_with("the agent is not running: nothing answers at "), "{args:?}: {error}");
        assert!(error.contains(folder.path().to_str().unwrap()), "{args:?}: {error}");
        assert!(hint.contains("sudo keelson up") && hint.contains("--run-dir"), "{args:?}: {hint}");
        assert_eq!((said.out.as_str(), said.err.lines().count()), ("", 2), "{args:?}: {}", said.err);
    }
    let said = keelson(folder.path(), &["version"]);
    said.failed(69);
    assert!(said.out.starts_with("keelson "), "{}", said.out);
}

#[test]
fn a_socket_that_its_process_left_behind_counts_as_not_running() {
    let folder = tempfile::tempdir().unwrap();
    let socket = Paths::socket_below(folder.path(), ServiceName::PodSync);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    assert!(keelson(folder.path(), &["get", "pods"]).failed(69).0.contains("is not running"));
}

#[test]
fn a_single_service_that_is_away_is_told_apart_from_the_agent() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::PodConfig], &Config::default());
    let said = keelson(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = said.failed(69);
    assert!(error.starts_with("pod-sync is not running") && error.contains("pod-sync.sock"), "{error}");
    assert!(hint.contains("keelson services restart pod-sync"), "{hint}");
}

#[test]
fn a_service_that_hangs_is_told_within_its_second() {
    let fake = Fake::start_some(world(), &[ServiceName::Init], &Config::default());
    let socket = Paths::socket_below(&fake.run_dir, ServiceName::PodSync);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _nobody = UnixListener::bind(&socket).unwrap();
    let said = keelson(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = said.failed(69);
    assert!(error.contains("pod-sync") && error.contains("hangs"), "{error}");
    assert!(hint.contains("--request-timeout"), "{hint}");
}

#[test]
fn a_socket_that_is_closed_to_the_user_names_the_group() {
    let fake = Fake::start(world());
    open(&fake.run_dir, 0o755);
    // Root passes every mode, so the stranger of a root test meets a closed folder of root's.
    for service in ServiceName::ALL {
        open(Paths::socket_below(&fake.run_dir, service).parent().unwrap(), 0o000);
    }
    let said = as_stranger(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = said.failed(69);
    assert!(error.starts_with("permission denied on the agent's socket "), "{error}");
    assert!(hint.contains("usermod -aG keelson") && hint.contains("sudo"), "{hint}");
    for service in ServiceName::ALL {
        open(Paths::socket_below(&fake.run_dir, service).parent().unwrap(), 0o755);
    }
}

#[test]
fn a_call_that_the_service_refuses_names_the_group_too() {
    let mut config = Config::default();
    config.users.operator_gid = 4_000_000_000;
    config.users.uids.insert("pod-sync".into(), 4_000_000_001);
    let fake = Fake::start_some(world(), &ServiceName::ALL, &config);
    open(&fake.run_dir, 0o755);
    for service in ServiceName::ALL {
        open(&Paths::socket_below(&fake.run_dir, service), 0o666);
    }
    let said = as_stranger(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = said.failed(1);
    assert!(error.starts_with("pod-sync refuses: ") && error.contains("may not call"), "{error}");
    assert!(hint.contains("usermod -aG keelson"), "{hint}");
}

#[test]
fn a_pod_that_is_not_there_is_not_found() {
    let fake = Fake::start(world());
    let said = keelson(&fake.run_dir, &["get", "pod", "nope", "-o", "json"]);
    assert_eq!(
        said.failed(1),
        ("there is no pod \"nope\" in namespace default", "`keelson get pods -A` lists all pods")
    );
    assert_eq!(said.out, "");
    assert!(keelson(&fake.run_dir, &["delete", "pod", "absent"]).failed(1).0.contains("absent"));
}

#[test]
fn a_name_that_fits_two_pods_lists_both() {
    let mut world = world();
    world.pods.push(running_pod("system", "web-edge", "u9"));
    let fake = Fake::start(world);
    let said = keelson(&fake.run_dir, &["get", "pod", "web", "-A"]);
    assert!(said.failed(1).0.ends_with("default/web-edge (u1), system/web-edge (u9)"), "{said:?}");
    assert!(keelson(&fake.run_dir, &["get", "pod", "u9", "-A"]).ok().contains("system"));
}

#[test]
fn a_wrong_command_line_ends_with_64() {
    let nowhere = Path::new("/nonexistent");
    let wrong: [&[&str]; 11] = [
        &[],
        &["fly"],
        &["get"],
        &["get", "deployments"],
        &["get", "pods", "-o", "xml"],
        &["get", "pods", "--request-timeout", "soon"],
        &["explain", "pod"],
        &["delete"],
        &["logs", "web", "-o", "json"],
        &["apply", "-f", "x.yaml", "-n", "other"],
        &["get", "events", "--for", "deployment/x"],
    ];
    let fake = Fake::start(World::default());
    for args in wrong {
        let dir = if args.first() == Some(&"get") { fake.run_dir.as_path() } else { nowhere };
        let said = if args.is_empty() {
            Said::of(Command::new(env!("CARGO_BIN_EXE_keelson")).output().unwrap())
        } else {
            keelson(dir, args)
        };
        assert_eq!(said.code, Some(64), "{args:?}: {said:?}");
        assert_eq!(said.out, "", "{args:?}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let fake = Fake::start(world());
    let said = keelson(&fake.run_dir, &["apply", "-f", "/nonexistent/x.yaml"]);
    assert!(said.failed(1).0.starts_with("cannot read /nonexistent/x.yaml: "), "{said:?}");
}

#[test]
fn a_reader_that_has_gone_is_no_error() {
    let fake = Fake::start(world());
    for args in [&["get", "pods", "-o", "json"][..], &["logs", "web", "-c", "app"], &["completions", "bash"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&fake.run_dir, args).stdout(writer).output().unwrap();
        let said = Said::of(output);
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn a_message_of_a_pod_cannot_command_the_terminal() {
    let world = world();
    world.events.warning(keelson_service_kit::ObjectRef::node("edge"), "Bad", "\u{1b}]0;owned\u{7}");
    let fake = Fake::start(world);
    let text = keelson(&fake.run_dir, &["get", "events"]).ok();
    assert!(!text.contains('\u{1b}') && text.contains("owned"), "{text}");
}

#[test]
fn the_run_folder_may_come_from_the_environment() {
    let fake = Fake::start(world());
    let output = Command::new(env!("CARGO_BIN_EXE_keelson"))
        .env("KEELSON_RUN_DIR", &fake.run_dir)
        .args(["get", "pods"])
        .output()
        .unwrap();
    assert!(Said::of(output).ok().contains("web-edge"));
}
