//! A private containerd runs containers, survives being killed, and leaves nothing behind.

// Helpers of tests are not seen as tests by the lint.
#![allow(clippy::unwrap_used, clippy::large_futures)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ExecSyncRequest, ImageSpec,
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceOption, PodSandboxConfig,
    PodSandboxMetadata, PodSandboxStatusRequest, RunPodSandboxRequest, StartContainerRequest,
    StopPodSandboxRequest,
};
use keelson_testkit::process::{self, ProcessId};
use keelson_testkit::{
    BUSYBOX_IMAGE, Image, Options, PrivateContainerd, Remains, Scratch, Snapshot, eventually,
};

const LIMIT: Duration = Duration::from_secs(30);

/// A sandbox with one container that runs `command`; returns their ids.
async fn run_pod(containerd: &PrivateContainerd, root: &str, name: &str, command: &str) -> (String, String) {
    let mut runtime = containerd.runtime();
    let sandbox = sandbox_config(containerd.dir(), root, name);
    let request = RunPodSandboxRequest { config: Some(sandbox.clone()), ..Default::default() };
    let sandbox_id = runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(ImageSpec { image: BUSYBOX_IMAGE.into(), ..Default::default() }),
        command: vec!["/bin/sh".into(), "-c".into(), command.into()],
        log_path: "main/0.log".into(),
        ..Default::default()
    };
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox_id.clone(),
        config: Some(config),
        sandbox_config: Some(sandbox),
    };
    let id = runtime.create_container(request).await.unwrap().into_inner().container_id;
    runtime.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
    (sandbox_id, id)
}

fn sandbox_config(dir: &Path, root: &str, name: &str) -> PodSandboxConfig {
    let logs = dir.join("logs").join(name);
    fs::create_dir_all(logs.join("main")).unwrap();
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            uid: name.into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: name.into(),
        log_directory: logs.to_string_lossy().into_owned(),
        labels: HashMap::new(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{root}/{name}"),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(NamespaceOption::default()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The processes in the cgroups of the run, by their arguments.
fn processes_with(argument: &str) -> Vec<ProcessId> {
    let has = |p: &&process::Process| p.args.iter().any(|arg| arg == argument);
    process::all().iter().filter(has).map(|p| p.id).collect()
}

/// The marks by which anything left of the run is found.
fn marks(scratch: &Scratch, containerd: &PrivateContainerd, root: &str) -> Vec<String> {
    let name = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
    let network = containerd.network();
    vec![format!("/{name}"), network.bridge.clone(), network.name.clone(), root.to_owned()]
}

#[tokio::test]
async fn a_pod_runs_on_its_own_network_and_everything_is_cleaned_up() {
    let before = Snapshot::take();
    let scratch = Scratch::new().unwrap();
    let root = format!("/keelson-kit-{:08x}", random_id());
    let options = Options { cgroup_roots: vec![root.clone()], ..Options::default() };
    let mut containerd = PrivateContainerd::start(&scratch.path().join("c"), options).await.unwrap();
    let mut marks = marks(&scratch, &containerd, &root);
    let words = format!("echo hello from keelson; exec sleep {}", 10_000 + random_id() % 10_000);
    let (sandbox_id, id) = run_pod(&containerd, &root, "one", &words).await;
    let (_, _) = run_pod(&containerd, &root, "two", "trap '' TERM; while true; do sleep 1; done").await;
    marks.push(sandbox_id.clone());

    let log = containerd.dir().join("logs/one/main/0.log");
    let read = || fs::read_to_string(&log).unwrap_or_default();
    eventually(LIMIT, "the container's words are in its log", || {
        std::future::ready(read().contains("stdout F hello from keelson"))
    })
    .await
    .unwrap();

    let mut runtime = containerd.runtime();
    let request = PodSandboxStatusRequest { pod_sandbox_id: sandbox_id.clone(), verbose: false };
    let status = runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    let address = status.network.unwrap().ip;
    assert!(address.starts_with("10."), "{address}");
    let ping = std::process::Command::new("ip").args(["route", "get", &address]).output().unwrap();
    let route = String::from_utf8_lossy(&ping.stdout).into_owned();
    assert!(route.contains(&containerd.network().bridge), "{route}");

    assert_eq!(exec(&containerd, &id, "id -un").await, "root");
    assert_eq!(exec(&containerd, &id, "hostname").await, "one");
    assert!(exec(&containerd, &id, "cat /proc/1/cgroup").await.contains(&root));

    let sleeper = words.rsplit(' ').next().unwrap().to_owned();
    let running = processes_with(&sleeper);
    assert_eq!(running.len(), 1, "{sleeper}");
    containerd.restart().unwrap();
    containerd.wait_ready().await.unwrap();
    assert_eq!(processes_with(&sleeper), running, "the container did not notice");
    assert_eq!(exec(&containerd, &id, "echo again").await, "again");
    assert!(
        !before.left_of(&Snapshot::take(), &marks.iter().map(String::as_str).collect::<Vec<_>>()).is_empty()
    );

    containerd.stop().unwrap();
    drop(scratch);
    assert_clean(&before, &marks);
}

#[tokio::test]
async fn leftovers_of_a_killed_run_are_removed_by_its_record() {
    let before = Snapshot::take();
    let scratch = Scratch::new().unwrap();
    let root = format!("/keelson-kit-{:08x}", random_id());
    let options = Options { cgroup_roots: vec![root.clone()], ..Options::default() };
    let mut containerd = PrivateContainerd::start(&scratch.path().join("c"), options).await.unwrap();
    let mut marks = marks(&scratch, &containerd, &root);
    // What is hardest to find: a container whose shim is dead, in a cgroup that nobody has named.
    let elsewhere = format!("/keelson-kit-{:08x}", random_id());
    let argument = (10_000 + random_id() % 1_000_000).to_string();
    let (sandbox_id, _) = run_pod(&containerd, &root, "one", "sleep 5000").await;
    run_pod(&containerd, &elsewhere, "two", &format!("sleep {argument}")).await;
    marks.push(sandbox_id);
    containerd.kill();
    for shim in process::all().iter().filter(|p| p.mentions(containerd.socket()) && p.name.contains("shim")) {
        shim.id.signal(process::Signal::KILL);
    }
    assert!(!processes_with(&argument).is_empty(), "the container runs without its shim");
    let record = serde_json::to_string(&containerd.remains()).unwrap();
    containerd.leave_running();

    let remains: Remains = serde_json::from_str(&record).unwrap();
    assert_eq!(remains.remove(), Vec::<String>::new());
    assert_eq!(remains.remove(), Vec::<String>::new(), "removing twice is no problem");
    drop(scratch);
    assert!(processes_with(&argument).is_empty());
    assert_clean(&before, &marks);
    let cgroups = Remains { cgroup_roots: vec![elsewhere], ..Remains::default() };
    assert_eq!(cgroups.remove(), Vec::<String>::new());
}

#[tokio::test]
async fn an_image_runs_with_its_user_and_entrypoint() {
    let scratch = Scratch::new().unwrap();
    let root = format!("/keelson-kit-{:08x}", random_id());
    let options = Options { cgroup_roots: vec![root.clone()], ..Options::default() };
    let containerd = PrivateContainerd::start(&scratch.path().join("c"), options).await.unwrap();
    let image = Image { user: "app".into(), ..Image::new("keelson.local/extra:2", &["/bin/sh"]) };
    containerd.import_images(&[image]).unwrap();
    let request = k8s_cri::v1::ImageStatusRequest {
        image: Some(ImageSpec { image: "keelson.local/extra:2".into(), ..Default::default() }),
        verbose: false,
    };
    let status = containerd.images().image_status(request).await.unwrap().into_inner().image.unwrap();
    assert_eq!(status.username, "app");
    let (sandbox_id, _) = run_pod(&containerd, &root, "one", "sleep 5000").await;
    let started = std::time::Instant::now();
    let request = StopPodSandboxRequest { pod_sandbox_id: sandbox_id };
    containerd.runtime().stop_pod_sandbox(request).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "the pause image ends at once");
    containerd.stop().unwrap();
}

#[tokio::test]
async fn a_socket_path_that_is_too_long_is_refused() {
    let scratch = Scratch::new().unwrap();
    let dir = scratch.path().join("x".repeat(100));
    let error = PrivateContainerd::launch(&dir, Options::default()).unwrap_err();
    assert!(error.to_string().contains("shorter folder"), "{error:#}");
}

async fn exec(containerd: &PrivateContainerd, id: &str, command: &str) -> String {
    let request = ExecSyncRequest {
        container_id: id.to_owned(),
        cmd: vec!["/bin/sh".into(), "-c".into(), command.into()],
        timeout: 20,
    };
    let answer = containerd.runtime().exec_sync(request).await.unwrap().into_inner();
    assert_eq!(answer.exit_code, 0, "{}", String::from_utf8_lossy(&answer.stderr));
    String::from_utf8(answer.stdout).unwrap().trim().to_owned()
}

fn assert_clean(before: &Snapshot, marks: &[String]) {
    let marks: Vec<&str> = marks.iter().map(String::as_str).collect();
    assert_eq!(before.left_of(&Snapshot::take(), &marks), Vec::<String>::new());
}

fn random_id() -> u32 {
    use std::hash::{BuildHasher as _, Hasher as _};
    let hash = std::collections::hash_map::RandomState::new().build_hasher().finish();
    u32::try_from(hash >> 32).unwrap()
}
