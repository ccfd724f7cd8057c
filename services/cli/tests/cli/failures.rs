//! Errors, hints and exit codes.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use keelson_config::{Config, Paths, ServiceName};

use crate::fake::{Fake, World};
use crate::{CommandResult, command, keelson, running_pod, world};

/// Runs the command as a user who is neither root nor in the operators' group.
fn as_other_user(run_dir: &Path, args: &[&str]) -> CommandResult {
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
    CommandResult::of(command.output().unwrap())
}

fn open(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn error_without_an_agent_names_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 21] = [
        &["get", "pods"],
        &["get", "node"],
        &["get", "events"],
        &["get", "sources"],
        &["get", "volumes"],
        &["get", "images"],
        &["orphans", "list"],
        &["orphans", "clean", "u9"],
        &["orphans", "clean", "--all"],
        &["logs", "web"],
        &["exec", "web", "--", "ls"],
        &["attach", "web"],
        &["cp", "web:/etc/hostname", "."],
        &["describe", "pod", "web"],
        &["describe", "node"],
        &["explain", "pod", "web"],
        &["delete", "pod", "web"],
        &["evict", "pod", "web"],
        &["retry", "pod", "web"],
        &["services", "restart", "pod-sync"],
        &["services", "restart", "--all"],
    ];
    for args in commands {
        let result = keelson(folder.path(), args);
        let (error, hint) = result.failed(69);
        assert!(error.starts_with("the agent is not running: nothing answers at "), "{args:?}: {error}");
        assert!(error.contains(folder.path().to_str().unwrap()), "{args:?}: {error}");
        assert!(hint.contains("sudo keelson up") && hint.contains("--run-dir"), "{args:?}: {hint}");
        assert_eq!((result.out.as_str(), result.err.lines().count()), ("", 2), "{args:?}: {}", result.err);
    }
    let result = keelson(folder.path(), &["version"]);
    result.failed(69);
    assert!(result.out.starts_with("keelson "), "{}", result.out);
}

#[test]
fn get_services_without_an_agent_shows_all_stopped_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let result = keelson(folder.path(), &["get", "services"]);
    let (error, hint) = result.failed(69);
    assert!(error.starts_with("the agent is not running: nothing answers at "), "{error}");
    assert!(hint.contains("sudo keelson up"), "{hint}");
    let rows: Vec<Vec<&str>> =
        result.out.lines().skip(1).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), ServiceName::ALL.len(), "{}", result.out);
    for (row, service) in rows.iter().zip(ServiceName::ALL) {
        assert_eq!(row[..4], [service.as_str(), "stopped", "-", "<unknown>"], "{}", result.out);
        assert!(row[row.len() - 1].ends_with(&format!("{service}.sock")), "{}", result.out);
    }
    let result = keelson(folder.path(), &["get", "services", "init", "-o", "json"]);
    result.failed(69);
    let list: serde_json::Value = serde_json::from_str(&result.out).unwrap();
    assert_eq!((list["items"].as_array().unwrap().len(), &list["items"][0]["state"]), (1, &"stopped".into()));
}

#[test]
fn stale_socket_counts_as_not_running() {
    let folder = tempfile::tempdir().unwrap();
    let socket = Paths::socket_below(folder.path(), ServiceName::PodSync);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    assert!(keelson(folder.path(), &["get", "pods"]).failed(69).0.contains("is not running"));
}

#[test]
fn error_for_one_service_down_differs_from_no_agent() {
    let fake = Fake::start_some(world(), &[ServiceName::Init, ServiceName::PodConfig], &Config::default());
    let result = keelson(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = result.failed(69);
    assert!(error.starts_with("pod-sync is not running") && error.contains("pod-sync.sock"), "{error}");
    assert!(hint.contains("keelson services restart pod-sync"), "{hint}");
}

#[test]
fn hanging_service_is_reported_after_the_timeout() {
    let fake = Fake::start_some(world(), &[ServiceName::Init], &Config::default());
    let socket = Paths::socket_below(&fake.run_dir, ServiceName::PodSync);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _nobody = UnixListener::bind(&socket).unwrap();
    let result = keelson(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = result.failed(69);
    assert!(error.contains("pod-sync") && error.contains("hangs"), "{error}");
    assert!(hint.contains("--request-timeout"), "{hint}");
}

#[test]
fn permission_denied_on_a_socket_names_the_group() {
    let fake = Fake::start(world());
    open(&fake.run_dir, 0o755);
    // Root ignores modes, so a test as root gives the other user a closed folder of root.
    for service in ServiceName::ALL {
        open(Paths::socket_below(&fake.run_dir, service).parent().unwrap(), 0o000);
    }
    let result = as_other_user(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = result.failed(77);
    assert!(error.starts_with("permission denied on the agent's socket "), "{error}");
    assert!(hint.contains("usermod -aG keelson") && hint.contains("sudo"), "{hint}");
    for service in ServiceName::ALL {
        open(Paths::socket_below(&fake.run_dir, service).parent().unwrap(), 0o755);
    }
}

#[test]
fn refused_call_names_the_group() {
    let mut config = Config::default();
    config.users.operator_gid = 4_000_000_000;
    config.users.uids.insert("pod-sync".into(), 4_000_000_001);
    let fake = Fake::start_some(world(), &ServiceName::ALL, &config);
    open(&fake.run_dir, 0o755);
    for service in ServiceName::ALL {
        open(&Paths::socket_below(&fake.run_dir, service), 0o666);
    }
    let result = as_other_user(&fake.run_dir, &["get", "pods"]);
    let (error, hint) = result.failed(77);
    assert!(error.starts_with("pod-sync refuses: ") && error.contains("may not call"), "{error}");
    assert!(hint.contains("usermod -aG keelson"), "{hint}");
}

#[test]
fn unknown_pod_is_not_found() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["get", "pod", "nope", "-o", "json"]);
    assert_eq!(
        result.failed(1),
        ("there is no pod \"nope\" in namespace default", "`keelson get pods -A` lists all pods")
    );
    assert_eq!(result.out, "");
    assert!(keelson(&fake.run_dir, &["delete", "pod", "absent"]).failed(1).0.contains("absent"));
}

#[test]
fn ambiguous_pod_name_lists_both_pods() {
    let mut world = world();
    world.pods.push(running_pod("system", "web-edge", "u9"));
    let fake = Fake::start(world);
    let result = keelson(&fake.run_dir, &["get", "pod", "web", "-A"]);
    assert!(result.failed(1).0.ends_with("default/web-edge (u1), system/web-edge (u9)"), "{result:?}");
    assert!(keelson(&fake.run_dir, &["get", "pod", "u9", "-A"]).ok().contains("system"));
}

#[test]
fn wrong_command_line_exits_with_64() {
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
        let result = if args.is_empty() {
            CommandResult::of(Command::new(env!("CARGO_BIN_EXE_keelson")).output().unwrap())
        } else {
            keelson(dir, args)
        };
        assert_eq!(result.code, Some(64), "{args:?}: {result:?}");
        assert_eq!(result.out, "", "{args:?}");
    }
}

#[test]
fn hint_names_the_group_of_the_socket_or_its_id() {
    assert!(rustix::process::geteuid().is_root(), "this test changes owners; run it as root");
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let named = groups.lines().find(|line| line.starts_with("daemon:")).unwrap();
    let gid: u32 = named.split(':').nth(2).unwrap().parse().unwrap();
    let fake = Fake::start(world());
    open(&fake.run_dir, 0o755);
    for (gid, part) in [(gid, "usermod -aG daemon"), (3_999_999_999, "groupadd --gid 3999999999 keelson")] {
        let folder = Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap().to_owned();
        std::os::unix::fs::chown(&folder, None, Some(gid)).unwrap();
        open(&folder, 0o750);
        let result = as_other_user(&fake.run_dir, &["get", "pods"]);
        let (_, hint) = result.failed(77);
        assert!(hint.contains(part) && hint.contains("sudo"), "{hint}");
        open(&folder, 0o755);
    }
}

/// A process with the command line of a service in a run folder, killed when dropped.
struct Lookalike(std::process::Child);

impl Lookalike {
    fn start(run_dir: &Path) -> Self {
        let mut command = Command::new("sh");
        // Arguments after the script are the arguments of the script.
        command.arg0("keelson-pod-sync").args(["-c", "read line", "x", "--config"]);
        command.arg(run_dir.join("config.json")).stdin(Stdio::piped());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Lookalike {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn error_without_an_agent_names_other_agents_of_the_machine() {
    let (one, two, none) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _processes = [Lookalike::start(one.path()), Lookalike::start(two.path())];
    // A new process has its name and arguments only after its exec.
    let started_at = std::time::Instant::now();
    loop {
        let result = keelson(none.path(), &["get", "pods"]);
        let (error, hint) = result.failed(69);
        assert!(error.contains(none.path().to_str().unwrap()), "{error}");
        let named = |dir: &tempfile::TempDir| hint.contains(dir.path().to_str().unwrap());
        if named(&one) && named(&two) {
            assert!(hint.contains("--run-dir") && hint.contains("KEELSON_RUN_DIR"), "{hint}");
            return;
        }
        assert!(started_at.elapsed() < std::time::Duration::from_secs(60), "{hint}");
    }
}

#[test]
fn unknown_names_of_pods_and_services_get_suggestions() {
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
fn services_restart_without_init_names_systemd_and_compose() {
    let fake = Fake::start_some(world(), &[ServiceName::PodSync], &Config::default());
    let result = keelson(&fake.run_dir, &["services", "restart", "pod-sync", "node-api"]);
    let (error, hint) = result.failed(69);
    assert!(error.starts_with("init is not running, so") && error.contains("init.sock"), "{error}");
    assert!(hint.contains("systemctl restart keelson-pod-sync keelson-node-api"), "{hint}");
    assert!(hint.contains("docker compose restart pod-sync-1 node-api-1"), "{hint}");
}

/// Covers each row of the table in docs/command.md.
#[test]
fn each_documented_exit_code_is_used() {
    let fake = Fake::start(World { keeps_deleted: true, ..world() });
    let run = |args: &[&str]| keelson(&fake.run_dir, args).code;
    assert_eq!(run(&["get", "pods"]), Some(0));
    assert_eq!(run(&["get", "pods", "nope"]), Some(1));
    assert_eq!(run(&["get", "podz"]), Some(64));
    let nowhere = tempfile::tempdir().unwrap();
    assert_eq!(keelson(nowhere.path(), &["get", "pods"]).code, Some(69));
    // Too few descriptors for the async runtime; none is inherited, so that the program itself can be loaded.
    let few = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit -n 4; exec \"$0\" get pods --run-dir \"$1\"";
    let starved = Command::new("sh")
        .args(["-c", few, env!("CARGO_BIN_EXE_keelson")])
        .arg(&fake.run_dir)
        .output()
        .unwrap();
    let starved = CommandResult::of(starved);
    assert!(starved.failed(70).0.contains("cannot start the async runtime"), "{starved:?}");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let full = CommandResult::of(command(&fake.run_dir, &["get", "pods"]).stdout(full).output().unwrap());
    assert!(full.failed(74).0.contains("cannot write the output"), "{full:?}");
    assert_eq!(run(&["delete", "pod", "web", "--timeout", "50ms"]), Some(75));
    open(&fake.run_dir, 0o755);
    open(Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap(), 0o000);
    assert_eq!(as_other_user(&fake.run_dir, &["get", "pods"]).code, Some(77));
    open(Paths::socket_below(&fake.run_dir, ServiceName::PodSync).parent().unwrap(), 0o755);
    assert_eq!(run(&["exec", "web", "-c", "app", "--", "exit", "9"]), Some(9));
    // The help and the page list the same codes.
    let help = keelson(nowhere.path(), &["--help"]).ok();
    let page = include_str!("../../../../docs/command.md");
    for code in ["0", "1", "64", "69", "70", "74", "75", "77"] {
        assert!(help.contains(&format!("\n  {code:<4}")), "{code} is not in: {help}");
        assert!(page.contains(&format!("\n| {code} |")), "{code} is not in docs/command.md");
    }
}

#[test]
fn unreadable_file_is_named() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["apply", "-f", "/nonexistent/x.yaml"]);
    assert!(result.failed(1).0.starts_with("cannot read /nonexistent/x.yaml: "), "{result:?}");
}

#[test]
fn closed_output_is_no_error() {
    let fake = Fake::start(world());
    for args in [&["get", "pods", "-o", "json"][..], &["logs", "web", "-c", "app"], &["completions", "bash"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command(&fake.run_dir, args).stdout(writer).output().unwrap();
        let result = CommandResult::of(output);
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn pod_message_cannot_control_the_terminal() {
    let world = world();
    world.events.warning(keelson_service_kit::ObjectRef::node("edge"), "Bad", "\u{1b}]0;owned\u{7}");
    let fake = Fake::start(world);
    let text = keelson(&fake.run_dir, &["get", "events"]).ok();
    assert!(!text.contains('\u{1b}') && text.contains("owned"), "{text}");
}

#[test]
fn run_folder_is_read_from_the_environment() {
    let fake = Fake::start(world());
    let output = Command::new(env!("CARGO_BIN_EXE_keelson"))
        .env("KEELSON_RUN_DIR", &fake.run_dir)
        .args(["get", "pods"])
        .output()
        .unwrap();
    assert!(CommandResult::of(output).ok().contains("web-edge"));
}
