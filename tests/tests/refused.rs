//! Refusals have a message that names the cause and a remedy; running pods continue.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use keelson_config::{Config, Paths, ServiceName};
use keelson_testkit::process::Signal;
use keelson_testkit::{
    Agent, AgentSpec, Scratch, built_binaries, eventually, lines_with_event, reachable_binaries,
};
use keelson_tests::{
    LIMIT, is_ready, pods, restarts, running, service_row, sleeper, text, until_ready, until_service,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A user id without an account.
const UNKNOWN_USER: u32 = 12_345;

/// Runs a program that must exit soon.
fn run_to_end(command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(15) {
            child.kill().unwrap();
            panic!("{command:?} does not exit: {}", text(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn assert_refused(command: &mut Command, code: i32, parts: &[&str]) {
    let output = run_to_end(command);
    let message = text(&output);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{command:?} does not name {part:?}: {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

/// The spec of an agent that is never started.
fn spec_in(scratch: &Scratch) -> AgentSpec {
    let built = built_binaries().unwrap();
    let binaries = reachable_binaries(&built, &scratch.path().join("bin")).unwrap();
    let endpoint = format!("unix://{}/none.sock", scratch.path().display());
    let mut spec = AgentSpec::below(&scratch.path().join("a"), binaries, "refused", endpoint);
    (spec.port, spec.healthz_port) = (0, 0);
    spec
}

async fn agent_with_web(scratch: &Scratch) -> Agent {
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    agent
}

#[test]
fn a_wrong_flag_is_a_usage_error_of_every_binary() {
    let binaries = built_binaries().unwrap();
    for service in ServiceName::ALL {
        let mut command = Command::new(binaries.join(service.binary()));
        assert_refused(command.arg("--no-such-flag"), 64, &["--no-such-flag"]);
    }
    assert_refused(Command::new(binaries.join("keelson")).arg("--no-such-flag"), 64, &["--no-such-flag"]);
    let mut command = Command::new(binaries.join("keelson"));
    assert_refused(command.args(["get", "pods", "--no-such-flag"]), 64, &["--no-such-flag"]);
    let mut command = Command::new(binaries.join("keelson"));
    assert_refused(command.args(["get", "podz"]), 64, &["podz"]);
}

#[test]
fn the_error_of_a_missing_or_garbled_configuration_names_the_file() {
    let scratch = Scratch::new().unwrap();
    let spec = spec_in(&scratch);
    let file = scratch.path().join("config.json");
    let name = file.to_str().unwrap();
    for (text, part) in
        [(None, "No such file"), (Some("{\"schemaVersion\": 1, \"nod"), "line 1"), (Some("\0\u{1}"), "")]
    {
        if let Some(text) = text {
            fs::write(&file, text).unwrap();
        }
        for service in ServiceName::supervised() {
            let mut command = Command::new(spec.bin_dir.join(service.binary()));
            assert_refused(command.arg("--config").arg(&file), 78, &[name, part]);
        }
    }
    spec.write().unwrap();
    for file in [spec.kubelet_file(), spec.keelson_file()] {
        let good = fs::read(&file).unwrap();
        fs::write(&file, "kind: [unfinished\n").unwrap();
        assert_refused(&mut spec.command(), 78, &[file.to_str().unwrap()]);
        fs::remove_file(&file).unwrap();
        assert_refused(&mut spec.command(), 78, &[file.to_str().unwrap(), "No such file"]);
        fs::write(&file, good).unwrap();
    }
}

#[test]
fn all_invalid_configuration_values_are_reported_together() {
    let scratch = Scratch::new().unwrap();
    let mut spec = spec_in(&scratch);
    for (field, value) in [
        ("maxPods", "many".into()),
        ("cgroupDriver", "magic".into()),
        ("containerRuntimeEndpoint", "tcp://1.2.3.4:5".into()),
        ("address", "nowhere".into()),
    ] {
        spec.kubelet.insert(field.to_owned(), value);
    }
    spec.keelson.insert("startParallelism".to_owned(), (-1).into());
    spec.write().unwrap();
    let (kubelet, keelson) = (spec.kubelet_file(), spec.keelson_file());
    let parts = [
        "maxPods",
        "cgroupDriver",
        "containerRuntimeEndpoint",
        "address",
        "startParallelism",
        "magic",
        "tcp://1.2.3.4:5",
        "nowhere",
        kubelet.to_str().unwrap(),
        keelson.to_str().unwrap(),
    ];
    assert_refused(&mut spec.command(), 78, &parts);
    assert!(!spec.run_dir.exists(), "nothing is created before the configuration is valid");
}

/// Each cause of an unreadable manifest folder is reported, the agent keeps running, and it recovers.
#[tokio::test]
async fn an_unreadable_manifest_folder_is_reported_and_ends_no_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    let folder = agent.manifest_dir().to_owned();
    let (aside, name) = (folder.with_file_name("aside"), folder.to_str().unwrap());
    for trouble in ["loop", "socket"] {
        fs::rename(&folder, &aside).unwrap();
        let listener = match trouble {
            "loop" => symlink(&folder, &folder).map(|()| None).unwrap(),
            _ => Some(std::os::unix::net::UnixListener::bind(&folder).unwrap()),
        };
        let row = until_service(&agent, ServiceName::PodConfig, &["degraded"], name).await.unwrap();
        println!("{trouble}: {}", row["message"]);
        let sources = agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap().to_string();
        assert!(sources.contains(name), "{sources}");
        assert_eq!(running(&agent).await.unwrap(), before, "{trouble}");
        assert!(pods(&agent).await.unwrap().values().all(is_ready));

        drop(listener);
        fs::remove_file(&folder).unwrap();
        fs::rename(&aside, &folder).unwrap();
        until_service(&agent, ServiceName::PodConfig, &["running"], "").await.unwrap();
        agent.write_manifest("more.yaml", &sleeper("more")).unwrap();
        until_ready(&agent, &["more", "web"]).await.unwrap();
        agent.remove_manifest("more.yaml").unwrap();
        until_ready(&agent, &["web"]).await.unwrap();
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}

/// Also at the first start, when nothing has been read yet.
#[tokio::test]
async fn the_agent_starts_with_an_unreadable_manifest_folder_and_reports_it() {
    let scratch = Scratch::new().unwrap();
    let mut agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    agent.kill_init();
    let folder = agent.manifest_dir().to_owned();
    let aside = folder.with_file_name("aside");
    fs::rename(&folder, &aside).unwrap();
    symlink(&folder, &folder).unwrap();
    agent.start().await.unwrap();
    until_service(&agent, ServiceName::PodConfig, &["degraded"], folder.to_str().unwrap()).await.unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before, "running containers are unaffected");
    fs::remove_file(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    until_service(&agent, ServiceName::PodConfig, &["running"], "").await.unwrap();
    agent.remove_manifest("web.yaml").unwrap();
    until_ready(&agent, &[]).await.unwrap();
    agent.end().unwrap();
}

/// A small file system at `folder` that can be filled; unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(folder: &Path, options: &str) -> Self {
        fs::create_dir_all(folder).unwrap();
        let options = std::ffi::CString::new(options).unwrap();
        mount("keelson-test", folder, "tmpfs", MountFlags::empty(), options.as_c_str()).unwrap();
        Self(folder.to_owned())
    }

    /// Takes every byte.
    fn fill(&self) {
        let mut file = fs::File::options().create(true).append(true).open(self.0.join("fill")).unwrap();
        let block = vec![1; 4096];
        while std::io::Write::write_all(&mut file, &block).is_ok() {}
    }

    /// Takes every inode.
    fn fill_inodes(&self) {
        let folder = self.0.join("fill");
        fs::create_dir(&folder).unwrap();
        let mut count = 0;
        while fs::File::create(folder.join(count.to_string())).is_ok() {
            count += 1;
        }
    }

    fn empty(&self) {
        let fill = self.0.join("fill");
        fs::remove_file(&fill).or_else(|_| fs::remove_dir_all(&fill)).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Fails if the agent's clean-up was faster.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn a_run_dir_on_a_full_disk_is_reported_with_a_remedy() {
    let scratch = Scratch::new().unwrap();
    let spec = spec_in(&scratch);
    spec.write().unwrap();
    let run = spec.run_dir.to_str().unwrap();
    let disk = SmallDisk::at(&spec.run_dir, "size=64k,mode=755");
    disk.fill();
    assert_refused(&mut spec.command(), 78, &[run, "--run-dir", "No space left"]);
    drop(disk);
    let disk = SmallDisk::at(&spec.run_dir, "nr_inodes=4,mode=755");
    disk.fill_inodes();
    assert_refused(&mut spec.command(), 78, &[run, "--run-dir", "No space left"]);
    drop(disk);
}

#[tokio::test]
async fn a_full_run_dir_stops_only_what_needs_it_and_is_reported() {
    let scratch = Scratch::new().unwrap();
    let disk = SmallDisk::at(&scratch.path().join("a/run"), "size=8m,nr_inodes=200,mode=755");
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    disk.fill_inodes();
    // Nothing needs space while nothing starts.
    agent.write_manifest("more.yaml", &sleeper("more")).unwrap();
    until_ready(&agent, &["more", "web"]).await.unwrap();
    // A starting service needs an inode for its socket.
    agent.service(ServiceName::PodConfig).unwrap().signal(Signal::KILL);
    let run = agent.spec().run_dir.to_str().unwrap();
    let row = until_service(&agent, ServiceName::PodConfig, &["backing-off"], "").await.unwrap();
    println!("{row}");
    let result = eventually(LIMIT, "the log names the full disk", async || {
        let log = agent.log();
        let errors = lines_with_event(&log, "serve_failed");
        errors.iter().any(|line| line.contains(run) && line.contains("No space left"))
    });
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let again = service_row(&agent, ServiceName::PodConfig).await.unwrap();
    assert!(again["restarts"].as_u64().unwrap() < 20, "a crash loop without a brake: {again}");
    assert!(agent.keelson(&["get", "pods"]).await.unwrap().status.success());
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{before:#?} {now:#?}");

    disk.empty();
    until_service(&agent, ServiceName::PodConfig, &["running"], "").await.unwrap();
    agent.remove_manifest("more.yaml").unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_full_state_dir_ends_no_pod_and_new_pods_still_start() {
    let scratch = Scratch::new().unwrap();
    let disk = SmallDisk::at(&scratch.path().join("a/state"), "size=24m,mode=755");
    let agent = agent_with_web(&scratch).await;
    let before = running(&agent).await.unwrap();
    disk.fill();
    let all_that_was = async |what: &str| {
        let now = running(&agent).await.unwrap();
        assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{what}: {now:#?}");
    };
    // The services' own state is a cache: without it pods start and end all the same.
    agent.write_manifest("more.yaml", &sleeper("more")).unwrap();
    until_ready(&agent, &["more", "web"]).await.unwrap();
    agent.remove_manifest("more.yaml").unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    all_that_was("full").await;
    for service in ServiceName::supervised() {
        let process = agent.service(service).unwrap();
        process.signal(Signal::KILL);
        let back = eventually(LIMIT, format!("{service} runs again"), async || {
            agent.service(service).is_some_and(|p| p != process)
        });
        back.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        until_service(&agent, service, &["running", "degraded"], "").await.unwrap();
        until_ready(&agent, &["web"]).await.unwrap();
        all_that_was(service.as_str()).await;
    }
    let many = restarts(&agent).await.unwrap();
    assert!(many.values().all(|count| *count == 1), "each was started again once, by us: {many:?}");
    // A manifest that cannot be stored is refused with the reason. A service may have freed space in between.
    disk.fill();
    let file = scratch.path().join("job.yaml");
    let job = format!("{}# {}\n", sleeper("job"), "x".repeat(1 << 16));
    fs::write(&file, &job).unwrap();
    let applied = agent.keelson(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    let message = text(&applied);
    println!("apply on a full disk: {message}");
    assert!(!applied.status.success() && message.contains("No space left"), "{message}");

    disk.empty();
    let applied = agent.keelson(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    assert!(applied.status.success(), "{}", text(&applied));
    until_ready(&agent, &["job", "web"]).await.unwrap();
    for service in ServiceName::supervised() {
        until_service(&agent, service, &["running"], "").await.unwrap();
    }
    all_that_was("mended").await;
    agent.end().unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).permissions().mode()
        & 0o7777
}

/// The resolved configuration of a running agent.
fn config(agent: &Agent) -> Config {
    Config::load(&agent.spec().run_dir.join("config.json")).unwrap()
}

#[tokio::test]
async fn sockets_folders_and_configuration_are_open_only_to_their_group() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let (spec, config) = (agent.spec(), config(&agent));
    let group = config.users.operator_gid;
    for service in ServiceName::ALL {
        let socket = Paths::socket_below(&spec.run_dir, service);
        let folder = socket.parent().unwrap();
        assert_eq!(mode(&socket), 0o660, "{}", socket.display());
        assert_eq!(mode(folder), 0o750, "{}", folder.display());
        let uid = config.uid_of(service).unwrap_or(0);
        for path in [&socket, folder] {
            let meta = fs::metadata(path).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (uid, group), "{}", path.display());
        }
        if service != ServiceName::Init {
            let state = spec.state_dir.join(service.as_str());
            assert_eq!(mode(&state), 0o700, "{}", state.display());
            assert_eq!(fs::metadata(&state).unwrap().uid(), uid, "{}", state.display());
        }
    }
    let file = spec.run_dir.join("config.json");
    assert_eq!(mode(&file), 0o640);
    assert_eq!(fs::metadata(&file).unwrap().gid(), group);
    agent.end().unwrap();
}

/// Runs `keelson` as another user, without supplementary groups.
fn keelson_as(agent: &Agent, uid: u32, gid: u32, args: &[&str]) -> Output {
    let mut command = agent.spec().cli();
    command.uid(uid).gid(gid).current_dir("/").args(args);
    let output = run_to_end(&mut command);
    println!("uid {uid} gid {gid} {args:?}: {:?} {}", output.status.code(), text(&output).trim());
    output
}

#[tokio::test]
async fn only_root_and_the_operator_group_may_use_the_agent() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let group = config(&agent).users.operator_gid;
    assert_ne!(group, UNKNOWN_USER);
    for args in [&["get", "pods"][..], &["get", "services"], &["logs", "web"], &["retry", "pod", "web"]] {
        let output = keelson_as(&agent, UNKNOWN_USER, UNKNOWN_USER, args);
        assert_eq!(output.status.code(), Some(77), "{args:?}");
        let message = text(&output);
        assert!(
            message.to_lowercase().contains("permission denied") && message.contains("usermod"),
            "{message}"
        );
    }

    let member = |args: &[&str]| {
        let output = keelson_as(&agent, UNKNOWN_USER, group, args);
        assert!(output.status.success(), "{args:?}: {}", text(&output));
        text(&output)
    };
    assert!(member(&["get", "pods"]).contains("web"));
    assert!(member(&["get", "services"]).contains("pod-sync"));
    assert!(member(&["get", "node"]).contains("Ready"));
    member(&["get", "events"]);
    member(&["get", "sources"]);
    assert!(member(&["describe", "pod", "web"]).contains("scratch"));
    assert!(member(&["explain", "pod", "web"]).contains("waits for nothing"));
    member(&["retry", "pod", "web"]);
    let logged = eventually(LIMIT, "the log is there", async || {
        text(&keelson_as(&agent, UNKNOWN_USER, group, &["logs", "web"])).contains("hello from web")
    });
    logged.await.unwrap();
    let file = scratch.path().join("job.yaml");
    fs::write(&file, sleeper("job")).unwrap();
    assert!(member(&["apply", "-f", file.to_str().unwrap()]).contains("created"));
    until_ready(&agent, &["job", "web"]).await.unwrap();
    member(&["delete", "pod", "job"]);
    until_ready(&agent, &["web"]).await.unwrap();
    member(&["services", "restart", "node-api"]);
    agent.end().unwrap();
}

/// A compromised service can call only what it needs.
#[tokio::test]
async fn a_service_may_call_only_the_methods_it_needs() {
    let scratch = Scratch::new().unwrap();
    let agent = agent_with_web(&scratch).await;
    let config = config(&agent);
    let group = config.users.operator_gid;
    let before = running(&agent).await.unwrap();
    let file = scratch.path().join("job.yaml");
    fs::write(&file, sleeper("job")).unwrap();
    for service in
        [ServiceName::NodeApi, ServiceName::NodeStatus, ServiceName::PodSync, ServiceName::PodConfig]
    {
        let uid = config.uid_of(service).unwrap();
        for args in [
            &["apply", "-f", file.to_str().unwrap()][..],
            &["services", "restart", "pod-sync"],
            &["retry", "pod", "web"],
        ] {
            let output = keelson_as(&agent, uid, group, args);
            let message = text(&output);
            assert!(!output.status.success(), "{service} {args:?}: {message}");
            assert!(
                message.contains("may not call") && message.contains(service.as_str()),
                "{service} {args:?}: {message}"
            );
        }
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    until_ready(&agent, &["web"]).await.unwrap();
    agent.end().unwrap();
}

/// A pod of a source without host network or privileged containers fails, and the message names the line that forbids it;
/// another source may have them.
#[tokio::test]
async fn source_limits_deny_host_network_and_privileged_pods() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path())
        .configure(|spec| {
            let limits = serde_json::json!({"manifest": {"hostNetwork": false, "privileged": false}});
            spec.keelson.insert("sourceLimits".to_owned(), limits);
        })
        .start()
        .await
        .unwrap();
    let of_host = |name: &str| sleeper(name).replace("spec:\n", "spec:\n  hostNetwork: true\n");
    let privileged = sleeper("strong")
        .replace("    volumeMounts:\n", "    securityContext: {privileged: true}\n    volumeMounts:\n");
    agent.write_manifest("allowed.yaml", &of_host("allowed")).unwrap();
    for (name, manifest) in [("wide", of_host("wide")), ("strong", privileged), ("plain", sleeper("plain"))] {
        let file = scratch.path().join(format!("{name}.yaml"));
        fs::write(&file, manifest).unwrap();
        let output = agent.keelson(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
    let node = agent.spec().node_name.clone();
    let mut last = BTreeMap::new();
    let judged = eventually(LIMIT, "two are refused and two run", async || {
        last = pods(&agent).await.unwrap_or_default();
        let refused = |name: &str| {
            let status = &last[&format!("{name}-{node}")]["status"];
            status["phase"] == "Failed" && status["reason"] == "SourceForbidden"
        };
        last.len() == 4
            && refused("wide")
            && refused("strong")
            && ["allowed", "plain"].iter().all(|name| is_ready(&last[&format!("{name}-{node}")]))
    });
    judged.await.unwrap_or_else(|error| panic!("{error:#}: {last:#?}\n{}", agent.log_tail()));
    let message = last[&format!("wide-{node}")]["status"]["message"].as_str().unwrap();
    assert!(message.contains("sourceLimits.manifest.hostNetwork"), "{message}");
    let ran: Vec<String> = running(&agent).await.unwrap().into_keys().collect();
    assert_eq!(ran, ["allowed", "plain"].map(|name| format!("{name}-{node}/main")));
    agent.end().unwrap();
}
