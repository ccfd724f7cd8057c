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
    command.arg("--run-dir").arg(run_dir).args(args).current_dir("/").stdin(Stdio::null());
    Said::of(command.output().unwrap())
}

fn open(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn an_agent_that_does_not_run_is_named_by_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 15] = [
        &["get", "pods"],
        &["get", "node"],
        &["get", "events"],
        &["get", "sources"],
        &["get", "volumes"],
        &["get", "images"],
        &["logs", "web"],
        &["exec", "web", "--", "ls"],
        &["describe", "pod", "web"],
        &["describe", "node"],
        &["explain", "pod", "web"],
        &["delete", "pod", "web"],
        &["retry", "pod", "web"],
        &["services", "restart", "pod-sync"],
        &["services", "restart", "--all"],
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
fn where_no_service_runs_all_are_stopped_and_that_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let said = keelson(folder.path(), &["get", "services"]);
    let (error, hint) = said.failed(69);
    assert!(error.starts_with("the agent is not running: nothing answers at "), "{error}");
    assert!(hint.contains("sudo keelson up"), "{hint}");
    let rows: Vec<Vec<&str>> = said.out.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), ServiceName::ALL.len(), "{}", said.out);
    for (row, service) in rows.iter().zip(ServiceName::ALL) {
        assert_eq!(row[..4], [service.as_str(), "stopped", "-", "<unknown>"], "{}", said.out);
        assert!(row[row.len() - 1].ends_with(&format!("{service}.sock")), "{}", said.out);
    }
    let said = keelson(folder.path(), &["get", "services", "init", "-o", "json"]);
    said.failed(69);
    let list: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((list["items"].as_array().unwrap().len(), &list["items"][0]["state"]), (1, &"stopped".into()));
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
    let (error, hint) = said.failed(77);
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
    let (error, hint) = said.failed(77);
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
    let wrong: [&[&str]; 16] = [
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
        &["get", "images", "-w"],
        &["exec", "web"],
        &["exec", "web", "-o", "json", "--", "ls"],
        &["services", "restart"],
        &["services", "restart", "pod-sync", "--all"],
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
fn the_group_of_the_socket_is_named_and_where_it_has_no_name_its_number() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let named = groups.lines().find(|line| line.starts_with("daemon:")).unwrap();
    let gid: u32 = named.split(':').nth(2).unwrap().parse().unwrap();
    let fake = Fake::start(world());
    open(&fake.run_dir, 0o755);
    for (gid, part) in [(gid, "usermod -aG daemon"), (3_999_999_999, "groupadd --gid 3999999999 keelson")] {
        let folder = Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap().to_owned();
        std::os::unix::fs::chown(&folder, None, Some(gid)).unwrap();
        open(&folder, 0o750);
        let said = as_stranger(&fake.run_dir, &["get", "pods"]);
        let (_, hint) = said.failed(77);
        assert!(hint.contains(part) && hint.contains("sudo"), "{hint}");
        open(&folder, 0o755);
    }
}

/// A process that looks like a service of the agent in a folder, and ends with the value.
struct Lookalike(std::process::Child);

impl Lookalike {
    fn start(run_dir: &Path) -> Self {
        let mut command = Command::new("sh");
        // The shell takes what follows its script for the script's arguments.
        command.arg0("keelson-pod-sync").args(["-c", "read line", "x", "--config"]);
        command.arg(run_dir.join("config.json")).stdin(Stdio::piped());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Lookalike {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_agents_that_do_run_on_the_machine_are_named_when_the_one_that_is_meant_does_not() {
    let (one, two, none) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _processes = [Lookalike::start(one.path()), Lookalike::start(two.path())];
    // A process has its name and arguments a moment after it was made.
    let begun = std::time::Instant::now();
    loop {
        let said = keelson(none.path(), &["get", "pods"]);
        let (error, hint) = said.failed(69);
        assert!(error.contains(none.path().to_str().unwrap()), "{error}");
        let named = |dir: &tempfile::TempDir| hint.contains(dir.path().to_str().unwrap());
        if named(&one) && named(&two) {
            assert!(hint.contains("--run-dir") && hint.contains("KEELSON_RUN_DIR"), "{hint}");
            return;
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{hint}");
    }
}

#[test]
fn names_that_are_nearly_those_of_pods_and_services_are_offered() {
    let fake = Fake::start(world());
    let hint = |args: &[&str]| keelson(&fake.run_dir, args).failed(1).1.to_owned();
    assert!(hint(&["get", "pod", "wbe"]).starts_with("did you mean web? "));
    assert!(hint(&["logs", "web-egde"]).starts_with("did you mean web-edge? "));
    assert!(
        hint(&["exec", "dns", "--", "ls"]).starts_with("there is dns-edge in namespace system: -n system")
    );
    assert_eq!(hint(&["services", "restart", "podsync"]), "did you mean pod-sync?");
}

#[test]
fn who_keeps_services_without_init_and_is_not_known_is_named_by_both_means() {
    let fake = Fake::start_some(world(), &[ServiceName::PodSync], &Config::default());
    let said = keelson(&fake.run_dir, &["services", "restart", "pod-sync", "node-api"]);
    let (error, hint) = said.failed(69);
    assert!(error.starts_with("init is not running here") && error.contains("init.sock"), "{error}");
    assert!(hint.contains("systemctl restart keelson-pod-sync keelson-node-api"), "{hint}");
    assert!(hint.contains("docker compose restart pod-sync-1 node-api-1"), "{hint}");
}

/// The table of the README, a row each.
#[test]
fn every_exit_code_of_the_table_is_met() {
    let fake = Fake::start(World { keeps_deleted: true, ..world() });
    let run = |args: &[&str]| keelson(&fake.run_dir, args).code;
    assert_eq!(run(&["get", "pods"]), Some(0));
    assert_eq!(run(&["get", "pods", "nope"]), Some(1));
    assert_eq!(run(&["get", "podz"]), Some(64));
    let nowhere = tempfile::tempdir().unwrap();
    assert_eq!(keelson(nowhere.path(), &["get", "pods"]).code, Some(69));
    // Too few descriptors for anything; none is inherited, so that the program itself can be loaded.
    let few = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit -n 4; exec \"$0\" get pods --run-dir \"$1\"";
    let starved = Command::new("sh")
        .args(["-c", few, env!("CARGO_BIN_EXE_keelson")])
        .arg(&fake.run_dir)
        .output()
        .unwrap();
    let starved = Said::of(starved);
    assert!(starved.failed(70).0.contains("cannot start the async runtime"), "{starved:?}");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let full = Said::of(command(&fake.run_dir, &["get", "pods"]).stdout(full).output().unwrap());
    assert!(full.failed(74).0.contains("cannot write the output"), "{full:?}");
    assert_eq!(run(&["delete", "pod", "web", "--timeout", "50ms"]), Some(75));
    open(&fake.run_dir, 0o755);
    open(Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap(), 0o000);
    assert_eq!(as_stranger(&fake.run_dir, &["get", "pods"]).code, Some(77));
    open(Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap(), 0o755);
    assert_eq!(run(&["exec", "web", "-c", "app", "--", "exit", "9"]), Some(9));
    // What is said in two places is the same.
    let help = keelson(nowhere.path(), &["--help"]).ok();
    let readme = include_str!("../../README.md");
    for code in ["0", "1", "64", "69", "70", "74", "75", "77"] {
        assert!(help.contains(&format!("\n  {code:<4}")), "{code} is not in: {help}");
        assert!(readme.contains(&format!("\n| {code} |")), "{code} is not in the README");
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
