//! init as a process with fake services: users, restarts, lifeline, leftovers, locks, systemd.
#![allow(clippy::unwrap_used, reason = "tests and their helpers")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use common::{Init, Scene, eventually, find, is_alive, signal, status_field};
use keelson_config::{Paths, ServiceName};
use keelson_init_core::privileges;
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_proto::keelson::admin::v1::{SetLogLevelRequest, SetVerbosityRequest};
use keelson_proto::keelson::supervisor::v1 as pb;
use keelson_service_kit::connect_unix;
use rustix::process::Signal;
use tonic::Code;

fn assert_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test is about users and capabilities; run it as root"
    );
}

fn own_capabilities() -> u64 {
    u64::from_str_radix(&status_field(std::process::id(), "CapEff"), 16).unwrap()
}

#[tokio::test]
async fn each_service_runs_as_its_user_with_its_capabilities_only() {
    assert_root();
    let scene = Scene::new();
    scene.write_config("uidBase: 64300\noperatorGid: 64390\n");
    let _init = scene.start();
    let services = scene.all_running().await;
    for (index, name) in (0u32..).zip(ServiceName::ALL).skip(1) {
        let service = find(&services, name);
        let uid = if name.needs_root() { 0 } else { 64_300 + index };
        let field = |field| status_field(service.pid, field);
        assert_eq!(service.uid, uid, "{name}");
        assert_eq!(field("Uid"), format!("{uid} {uid} {uid} {uid}"), "{name}");
        let gid = if name.needs_root() { 0 } else { 64_390 };
        assert_eq!(field("Gid"), format!("{gid} {gid} {gid} {gid}"), "{name}");
        assert_eq!(field("Groups"), "64390", "{name}");
        assert_eq!(field("NoNewPrivs"), "1", "{name}");
        let kept = format!("{:016x}", privileges::capability_bits(name) & own_capabilities());
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            assert_eq!(field(set), kept, "{set} of {name}");
        }
        let ambient = if uid == 0 { format!("{:016x}", 0) } else { kept };
        assert_eq!(field("CapAmb"), ambient, "CapAmb of {name}");
        assert_eq!(field("SigBlk"), "0000000000000000", "{name}");
        let environment = fs::read(format!("/proc/{}/environ", service.pid)).unwrap();
        let environment = String::from_utf8(environment).unwrap();
        assert!(environment.contains("MALLOC_ARENA_MAX=1") && environment.contains("KEELSON_LIFELINE_FD="));
    }
}

#[tokio::test]
async fn oom_score_and_open_files_limit_apply_to_init_and_services() {
    let limit = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        line.split_whitespace().take(2).map(|n| n.parse().unwrap()).collect::<Vec<u64>>()
    };
    let with = |more: &str| {
        let scene = Scene::new();
        let file = fs::read_to_string(scene.path("kubelet.yaml")).unwrap();
        fs::write(scene.path("kubelet.yaml"), format!("{file}{more}")).unwrap();
        scene
    };
    // Raising the score needs no privilege.
    let scene = with("maxOpenFiles: 4321\noomScoreAdj: 987\n");
    let init = scene.start();
    let services = scene.all_running().await;
    for pid in services.iter().map(|service| service.pid).chain([init.pid()]) {
        assert_eq!(limit(pid), [4321, 4321], "{pid}");
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert_eq!(score.trim(), "987", "{pid}");
    }
    drop(init);
    // More than any kernel allows: the highest possible limit is set, with a warning.
    let scene = with("maxOpenFiles: 9223372036854775807\n");
    let mut command = scene.command();
    command.stderr(fs::File::create(scene.path("log")).unwrap());
    let init = scene.start_as(command);
    let services = scene.all_running().await;
    let most = limit(std::process::id())[1];
    for pid in services.iter().map(|service| service.pid).chain([init.pid()]) {
        assert_eq!(limit(pid), [most, most], "{pid}");
    }
    let log = || fs::read_to_string(scene.path("log")).unwrap();
    eventually("the start of all services is logged", || log().contains("Started kubelet")).await;
    let log = log();
    let warning =
        format!("cannot set the open files limit to 9223372036854775807 (maxOpenFiles), it is {most}:");
    assert!(log.contains(&warning), "{log}");
    for line in [
        "Kubelet version",
        "Standalone mode, no API client",
        "No API server defined - no node status update will be sent",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
}

#[tokio::test]
async fn folders_sockets_and_config_json_have_owners_and_modes() {
    assert_root();
    let scene = Scene::new();
    scene.write_config("uidBase: 64300\noperatorGid: 64390\n");
    let _init = scene.start();
    scene.all_running().await;
    let check = |path: &str, mode: u32, uid: u32, gid: u32| {
        let meta = fs::metadata(scene.path(path)).unwrap();
        let found = format!("{:o} {} {}", meta.mode() & 0o7777, meta.uid(), meta.gid());
        assert_eq!(found, format!("{mode:o} {uid} {gid}"), "{path}");
    };
    check("run", 0o751, 0, 64_390);
    check("run/config.json", 0o640, 0, 64_390);
    check("run/init/init.sock", 0o660, 0, 64_390);
    check("run/pod-sync", 0o750, 64_305, 64_390);
    check("run/pod-sync/pod-sync.sock", 0o660, 64_305, 64_390);
    check("run/runtime-shim", 0o750, 0, 64_390);
    check("run/runtime-shim/runtime-shim.sock", 0o660, 0, 64_390);
    check("state/pod-sync", 0o700, 64_305, 64_390);
    check("state/volume-manager", 0o700, 0, 64_390);
}

#[tokio::test]
async fn a_killed_service_is_restarted_and_the_others_keep_running() {
    let scene = Scene::new();
    let _init = scene.start();
    let before = scene.all_running().await;
    let killed = find(&before, ServiceName::VolumeManager).pid;
    signal(killed, Signal::KILL);
    let after = scene
        .wait("volume-manager runs again", |services| {
            let service = find(services, ServiceName::VolumeManager);
            service.restarts == 1 && service.state == "running"
        })
        .await;
    for old in &before {
        let new = after.iter().find(|service| service.name == old.name).unwrap();
        assert_eq!(new.pid == old.pid, old.name != "volume-manager", "{}", old.name);
    }
    let service = find(&after, ServiceName::VolumeManager);
    assert_eq!(service.message, "ended by SIGKILL");
    let list = scene.client().list_services(pb::ListServicesRequest {}).await.unwrap().into_inner().services;
    let names: Vec<&str> = list.iter().map(|service| service.name.as_str()).collect();
    assert_eq!(names, ServiceName::ALL.map(ServiceName::as_str));
    assert!(list.iter().all(|service| service.pss_kib > 0), "{list:#?}");
}

#[tokio::test]
async fn a_failed_service_setup_is_a_node_event_and_a_kill_is_not() {
    let scene = Scene::new();
    scene.behave(ServiceName::NodeApi, "exit 78");
    fs::remove_file(scene.path("bin").join(ServiceName::NodeStatus.binary())).unwrap();
    let _init = scene.start();
    let services = scene
        .wait("two have failed, the others run", |services| {
            let is = |name, state| services.iter().any(|s| s.name == name && s.state == state);
            is("node-api", "failed") && is("node-status", "backing-off") && is("pod-sync", "running")
        })
        .await;
    signal(find(&services, ServiceName::PodSync).pid, Signal::KILL);
    scene
        .wait("pod-sync runs again", |services| {
            let service = find(services, ServiceName::PodSync);
            service.restarts == 1 && service.state == "running"
        })
        .await;
    let events = scene.events().await;
    assert!(events.iter().all(|e| e.kind == "Node" && e.name == "testnode" && e.r#type == "Warning"));
    assert!(events.iter().all(|e| e.reason == "KubeletSetupFailed"), "{events:#?}");
    let mut texts: Vec<&str> = events.iter().map(|event| event.message.as_str()).collect();
    texts.sort_unstable();
    assert_eq!(texts.len(), 2, "{texts:#?}");
    assert_eq!(texts[0], "node-api: exit code 78: configuration; see its log");
    assert!(
        texts[1].starts_with("node-status: ") && texts[1].contains("keelson-node-status"),
        "{}",
        texts[1]
    );
}

#[tokio::test]
async fn a_configuration_error_is_final_until_a_requested_restart() {
    let scene = Scene::new();
    scene.behave(ServiceName::NodeApi, "exit 78");
    let _init = scene.start();
    let failed =
        |services: &[pb::Service]| services.iter().any(|s| s.name == "node-api" && s.state == "failed");
    let services = scene.wait("node-api has failed", failed).await;
    let service = find(&services, ServiceName::NodeApi);
    assert_eq!(service.message, "exit code 78: configuration; see its log");
    assert_eq!((service.pid, service.restarts), (0, 0));

    scene.behave(ServiceName::NodeApi, "");
    let request = pb::RestartServiceRequest { name: "node-api".into() };
    scene.client().restart_service(request).await.unwrap();
    let services = scene.all_running().await;
    assert_eq!(find(&services, ServiceName::NodeApi).restarts, 1);
}

#[tokio::test]
async fn a_service_that_cannot_start_is_shown_with_its_own_error() {
    let scene = Scene::new();
    scene.behave(ServiceName::NodeApi, "fail no port is free");
    let _init = scene.start();
    let failed =
        |services: &[pb::Service]| services.iter().any(|s| s.name == "node-api" && s.state == "failed");
    let services = scene.wait("node-api has failed", failed).await;
    let service = find(&services, ServiceName::NodeApi);
    assert_eq!(service.message, "exit code 78: cannot start: no port is free");
    assert!(!scene.path("run/node-api/last-words").exists());
}

#[tokio::test]
async fn a_service_that_keeps_ending_is_backed_off() {
    let scene = Scene::new();
    scene.behave(ServiceName::NodeStatus, "exit 70");
    let _init = scene.start();
    let services = scene
        .wait("node-status is backed off for the fourth time", |services| {
            services.iter().any(|s| s.name == "node-status" && s.state == "backing-off" && s.restarts >= 3)
        })
        .await;
    let service = find(&services, ServiceName::NodeStatus);
    assert_eq!(service.message, "ended with exit code 70; see its log");
    assert!(service.next_start_unix_nanos > 0);
}

#[tokio::test]
async fn a_restart_on_request_ends_one_process_and_starts_another() {
    let scene = Scene::new();
    let _init = scene.start();
    let before = scene.all_running().await;
    let mut client = scene.client();
    client.restart_service(pb::RestartServiceRequest { name: "pod-sync".into() }).await.unwrap();
    let old = find(&before, ServiceName::PodSync).pid;
    assert!(!is_alive(old));
    let after = scene.all_running().await;
    assert_ne!(find(&after, ServiceName::PodSync).pid, old);

    let unknown =
        client.restart_service(pb::RestartServiceRequest { name: "kubelet".into() }).await.unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    assert!(unknown.message().contains("pod-sync"), "{}", unknown.message());
    let own = client.restart_service(pb::RestartServiceRequest { name: "init".into() }).await.unwrap_err();
    assert_eq!(own.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn services_end_with_a_killed_init_and_the_next_one_starts_at_once() {
    let scene = Scene::new();
    let mut init = scene.start();
    let before = scene.all_running().await;
    init.signal(Signal::KILL);
    init.ended().await;
    // The new init does not wait for the old services: it takes over locks and sockets.
    let next = scene.start();
    let pids: Vec<u32> = before.iter().map(|service| service.pid).collect();
    eventually("the services of the killed init are gone", || pids.iter().all(|pid| !is_alive(*pid))).await;
    let after = scene.all_running().await;
    assert_eq!(find(&after, ServiceName::Init).pid, next.pid());
    assert!(after.iter().all(|service| !pids.contains(&service.pid)));
}

#[tokio::test]
async fn services_of_a_killed_init_end_by_the_lifeline() {
    let scene = Scene::new();
    let mut init = scene.start();
    scene.all_running().await;
    init.signal(Signal::KILL);
    init.ended().await;
    eventually("all services are gone", || scene.processes().is_empty()).await;
}

#[tokio::test]
async fn a_stopped_service_of_a_killed_init_is_killed_by_the_next_one() {
    let scene = Scene::new();
    let mut init = scene.start();
    let before = scene.all_running().await;
    let stopped = find(&before, ServiceName::PodSync).pid;
    signal(stopped, Signal::STOP);
    init.signal(Signal::KILL);
    init.ended().await;
    eventually("only the stopped service is left", || scene.processes() == [stopped]).await;
    let _next = scene.start();
    eventually("the stopped service is gone", || !is_alive(stopped)).await;
    scene.all_running().await;
}

#[tokio::test]
async fn sigterm_ends_all_services_and_init_with_exit_code_0() {
    let scene = Scene::new();
    let mut init = scene.start();
    let services = scene.all_running().await;
    // A service that does not react is killed.
    signal(find(&services, ServiceName::NodeApi).pid, Signal::STOP);
    init.signal(Signal::HUP);
    init.signal(Signal::TERM);
    assert_eq!(init.ended().await, Some(0));
    assert!(scene.processes().is_empty());
    assert!(!scene.path("root/.keelson.lock").exists());
}

#[tokio::test]
async fn a_second_signal_kills_the_services_at_once() {
    let scene = Scene::new();
    let mut init = scene.start();
    let services = scene.all_running().await;
    signal(find(&services, ServiceName::NodeApi).pid, Signal::STOP);
    init.signal(Signal::INT);
    scene_is_ending(&scene, &services).await;
    let begun = std::time::Instant::now();
    init.signal(Signal::INT);
    assert_eq!(init.ended().await, Some(0));
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
}

async fn scene_is_ending(scene: &Scene, services: &[pb::Service]) {
    let other = find(services, ServiceName::PodConfig).pid;
    eventually("the other services end", || !is_alive(other)).await;
    assert!(!scene.processes().is_empty());
}

#[tokio::test]
async fn a_second_agent_on_the_same_run_dir_root_or_runtime_is_refused() {
    let scene = Scene::new();
    let init = scene.start();
    scene.all_running().await;
    let run = ("--run-dir", scene.text("run2"));
    let root = ("--root-dir", scene.text("root2"));
    for (replaced, what) in [
        (vec![], "--run-dir"),
        (vec![run.clone()], "--root-dir"),
        (vec![run, root], "--container-runtime-endpoint"),
    ] {
        let output = second_output(&scene, &replaced).await;
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{log}");
        let holder = format!("(pid {}, run dir {})", init.pid(), scene.text("run"));
        assert!(log.contains(&holder) && log.contains(what), "{what}: {log}");
    }
}

/// Starts init with a lock file.
fn start_locked<'a>(scene: &'a Scene, more: &[&str]) -> Init<'a> {
    let mut command = scene.command();
    command.args(["--lock-file", &scene.text("lock")]).args(more);
    scene.start_as(command)
}

/// Waits until the process waits for a lock (proc(5), `/proc/locks`).
async fn waits_for_a_lock(pid: u32) {
    eventually("it waits for the lock", || {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        let mut waiting = locks.lines().filter(|line| line.contains("-> FLOCK"));
        waiting.any(|line| line.split_whitespace().any(|word| word == pid.to_string()))
    })
    .await;
}

#[tokio::test]
async fn a_waiting_init_gets_the_lock_file_of_a_killed_one() {
    let scene = Scene::new();
    let mut first = start_locked(&scene, &[]);
    let before = scene.all_running().await;
    let second = start_locked(&scene, &[]);
    waits_for_a_lock(second.pid()).await;
    assert_eq!(find(&scene.all_running().await, ServiceName::Init).pid, first.pid());
    // Its services live on for a moment, and none of them keeps the lock.
    first.signal(Signal::KILL);
    first.ended().await;
    let after = scene.all_running().await;
    assert_eq!(find(&after, ServiceName::Init).pid, second.pid());
    assert!(after.iter().all(|service| before.iter().all(|old| old.pid != service.pid)));
}

#[tokio::test]
async fn an_init_waiting_for_the_lock_file_ends_on_sigterm() {
    let scene = Scene::new();
    let first = start_locked(&scene, &[]);
    let before = scene.all_running().await;
    let mut second = start_locked(&scene, &[]);
    waits_for_a_lock(second.pid()).await;
    second.signal(Signal::TERM);
    assert_eq!(second.ended().await, Some(0));
    let after = scene.all_running().await;
    assert_eq!(find(&after, ServiceName::Init).pid, first.pid());
    assert!(before.iter().all(|old| after.iter().any(|service| service.pid == old.pid)));
}

#[tokio::test]
async fn an_init_that_ends_waiting_for_the_lock_file_writes_its_buffered_log() {
    let scene = Scene::new();
    let kubelet = fs::read_to_string(scene.path("kubelet.yaml")).unwrap();
    let split = "featureGates: {LoggingAlphaOptions: true}\n\
                 logging: {flushFrequency: 24h, options: {text: {splitStream: true, infoBufferSize: 1Mi}}}\n";
    fs::write(scene.path("kubelet.yaml"), kubelet + split).unwrap();
    let held = fs::File::create(scene.path("lock")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut command = scene.command();
    command.args(["--lock-file", &scene.text("lock")]);
    command.stdout(fs::File::create(scene.path("stdout")).unwrap());
    let mut init = scene.start_as(command);
    waits_for_a_lock(init.pid()).await;
    init.signal(Signal::TERM);
    assert_eq!(init.ended().await, Some(0));
    let log = fs::read_to_string(scene.path("stdout")).unwrap();
    assert!(log.ends_with("] \"shutdown was requested while waiting for the file lock\"\n"), "{log}");
}

#[tokio::test]
async fn init_refuses_a_log_verbosity_from_the_network_and_takes_a_log_level() {
    let scene = Scene::new();
    let _init = scene.start();
    scene.all_running().await;
    let socket = Paths::socket_below(&scene.path("run"), ServiceName::Init);
    let mut admin = AdminClient::new(connect_unix("init", &socket));
    let refused = admin.set_verbosity(SetVerbosityRequest { verbosity: 10 }).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "init keeps its log level; change it with SetLogLevel");
    let level = SetLogLevelRequest { filter: "debug".into() };
    let previous = admin.set_log_level(level).await.unwrap().into_inner().previous;
    assert_eq!(previous, "info", "it was not changed");
}

#[tokio::test]
async fn exit_on_lock_contention_ends_init_in_order() {
    let scene = Scene::new();
    let mut first = start_locked(&scene, &["--exit-on-lock-contention"]);
    scene.all_running().await;
    let mut second = start_locked(&scene, &["--exit-on-lock-contention"]);
    assert_eq!(first.ended().await, Some(0));
    assert_eq!(find(&scene.all_running().await, ServiceName::Init).pid, second.pid());
    // Opening the file is enough.
    drop(fs::File::open(scene.path("lock")).unwrap());
    assert_eq!(second.ended().await, Some(0));
    assert!(scene.processes().is_empty());
}

#[tokio::test]
async fn init_refuses_to_start_next_to_a_kubelet_on_the_same_root_or_runtime() {
    let scene = Scene::new();
    let runtime = scene.path("runtime.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&runtime).unwrap();
    std::fs::create_dir(scene.path("root")).unwrap();
    // The process of a script has the name of the script.
    let script = scene.path("kubelet");
    std::fs::write(&script, "#!/bin/sh\nread -r nothing\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let runtime_flag = ("--container-runtime-endpoint", format!("unix://{}", runtime.display()));
    for (args, what) in [
        (vec!["--root-dir".to_owned(), scene.text("root")], "--root-dir"),
        (vec![format!("--container-runtime-endpoint={}", runtime_flag.1)], "--container-runtime-endpoint"),
    ] {
        let mut command = std::process::Command::new(&script);
        let mut kubelet = command.args(args).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = kubelet.id();
        let comm = format!("/proc/{pid}/comm");
        eventually("the script runs under its name", || {
            std::fs::read_to_string(&comm).is_ok_and(|name| name == "kubelet\n")
        })
        .await;
        let output = second_output(&scene, std::slice::from_ref(&runtime_flag)).await;
        drop(kubelet.stdin.take());
        kubelet.wait().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{log}");
        assert!(log.contains(&format!("a kubelet (pid {pid}) uses")) && log.contains(what), "{what}: {log}");
        assert!(scene.processes().is_empty());
    }
}

/// Runs a second init on the same scene, with other values for some flags, until it exits.
async fn second_output(scene: &Scene, replaced: &[(&str, String)]) -> std::process::Output {
    let first = scene.command();
    let arguments: Vec<String> =
        first.get_args().map(|argument| argument.to_str().unwrap().to_owned()).collect();
    let mut command = std::process::Command::new(first.get_program());
    for pair in arguments.chunks(2) {
        let value = replaced.iter().find(|(flag, _)| *flag == pair[0]).map_or(&pair[1], |(_, value)| value);
        command.args([&pair[0], value]);
    }
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

#[tokio::test]
async fn systemd_is_notified_of_ready_watchdog_and_stopping() {
    let scene = Scene::new();
    let socket = UnixDatagram::bind(scene.path("notify")).unwrap();
    socket.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut command = scene.command();
    command.env("NOTIFY_SOCKET", scene.path("notify")).env("WATCHDOG_USEC", "600000");
    let mut init = scene.start_as(command);
    let hear = |wanted: &'static str| {
        let socket = socket.try_clone().unwrap();
        tokio::task::spawn_blocking(move || {
            let mut heard = String::new();
            while !heard.lines().any(|line| line == wanted) {
                let mut buffer = [0u8; 4096];
                let length = socket.recv(&mut buffer).unwrap();
                heard.push_str(std::str::from_utf8(&buffer[..length]).unwrap());
            }
            heard
        })
    };
    let heard = hear("READY=1").await.unwrap();
    assert!(heard.contains("STATUS=0 of 7 services running"), "{heard}");
    let list = scene.client().list_services(pb::ListServicesRequest {}).await.unwrap().into_inner().services;
    assert!(list.iter().all(|service| service.state != "starting"), "{list:#?}");
    // Twice per watchdog period: several notifications in fewer periods.
    let begun = std::time::Instant::now();
    for _ in 0..4 {
        hear("WATCHDOG=1").await.unwrap();
    }
    assert!(begun.elapsed() < std::time::Duration::from_millis(4 * 600), "{:?}", begun.elapsed());
    init.signal(Signal::TERM);
    hear("STOPPING=1").await.unwrap();
    assert_eq!(init.ended().await, Some(0));
}
