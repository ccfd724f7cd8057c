//! An agent that takes the place of a kubelet restarts no static pod whose manifest is the one that the kubelet has started
//! (docs/adr/0022). The test plays the kubelet: it creates sandbox and container through CRI.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use k8s_cri::v1 as cri;
use keelson_config::ServiceName;
use keelson_kube_model::container_hash;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::{LIMIT, pods, running, sleeper, until_ready};

/// The UID that the kubelet has computed for the pod.
const UID: &str = "5d41402abc4b2a76b9719d911017c592";

fn map<const N: usize>(pairs: [(&str, &str); N]) -> std::collections::HashMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn identity(name: &str) -> [(&str, &str); 3] {
    [
        ("io.kubernetes.pod.name", name),
        ("io.kubernetes.pod.namespace", "default"),
        ("io.kubernetes.pod.uid", UID),
    ]
}

fn full_name(agent: &Agent) -> String {
    format!("web-{}", agent.spec().node_name)
}

/// The request of a kubelet for the sandbox of [`sleeper`].
fn sandbox_config(agent: &Agent) -> cri::PodSandboxConfig {
    let (spec, name) = (agent.spec(), full_name(agent));
    let logs = spec.pod_logs_dir.join(format!("default_{name}_{UID}"));
    fs::create_dir_all(logs.join("main")).unwrap();
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.clone(),
            uid: UID.into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: name.clone(),
        log_directory: logs.to_string_lossy().into_owned(),
        labels: map(identity(&name)),
        annotations: map([
            ("kubernetes.io/config.hash", UID),
            ("kubernetes.io/config.seen", "2026-01-02T03:04:05.000000006Z"),
            ("kubernetes.io/config.source", "file"),
        ]),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/kubepods/besteffort/pod{UID}", spec.cgroup_root),
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(pod_namespaces()),
                seccomp: Some(profile(cri::security_profile::ProfileType::RuntimeDefault)),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn pod_namespaces() -> cri::NamespaceOption {
    cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() }
}

fn profile(kind: cri::security_profile::ProfileType) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind.into(), ..Default::default() }
}

/// A mount of a file or folder of the pod below `<root>/pods`, which is made.
fn own_mount(folder: &Path, path: &str, container_path: &str) -> cri::Mount {
    let host_path = folder.join(path);
    if path.starts_with("volumes") {
        fs::create_dir_all(&host_path).unwrap();
    } else {
        fs::create_dir_all(host_path.parent().unwrap()).unwrap();
        fs::write(&host_path, "").unwrap();
    }
    cri::Mount {
        container_path: container_path.into(),
        host_path: host_path.to_string_lossy().into_owned(),
        ..Default::default()
    }
}

/// The request of a kubelet for the container of [`sleeper`].
fn container_config(agent: &Agent, image: String) -> cri::ContainerConfig {
    let (name, hash) = (full_name(agent), container_hash("main", BUSYBOX_IMAGE));
    let folder: PathBuf = agent.spec().root_dir.join("pods").join(UID);
    let mut labels = map(identity(&name));
    labels.insert("io.kubernetes.container.name".into(), "main".into());
    let command = ["/bin/sh", "-c", "echo hello from web; exec sleep 1000000"];
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image, ..Default::default() }),
        command: command.map(String::from).to_vec(),
        envs: vec![cri::KeyValue { key: "KUBERNETES_SERVICE_HOST".into(), value: "10.96.0.1".into() }]
            .into_iter()
            .chain(
                [("KUBERNETES_SERVICE_PORT", "443"), ("KUBERNETES_PORT", "tcp://10.96.0.1:443")]
                    .map(|(key, value)| cri::KeyValue { key: key.into(), value: value.into() }),
            )
            .collect(),
        mounts: vec![
            own_mount(&folder, "volumes/kubernetes.io~empty-dir/scratch", "/scratch"),
            own_mount(&folder, "etc-hosts", "/etc/hosts"),
            own_mount(&folder, "containers/main/0a1b2c3d", "/dev/termination-log"),
        ],
        labels,
        annotations: map([
            ("io.kubernetes.container.hash", hash.as_str()),
            ("io.kubernetes.container.restartCount", "0"),
            ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log"),
            ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ("io.kubernetes.pod.terminationGracePeriod", "0"),
        ]),
        log_path: "main/0.log".into(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources {
                cpu_period: 100_000,
                cpu_shares: 2,
                oom_score_adj: 1000,
                ..Default::default()
            }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                namespace_options: Some(pod_namespaces()),
                run_as_user: Some(cri::Int64Value { value: 0 }),
                seccomp: Some(profile(cri::security_profile::ProfileType::Unconfined)),
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

/// Starts the pod of [`sleeper`] as a kubelet does.
async fn start_as_kubelet(agent: &Agent) {
    let image = cri::ImageSpec { image: BUSYBOX_IMAGE.into(), ..Default::default() };
    let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
    let image = agent.containerd().images().image_status(request).await.unwrap().into_inner().image.unwrap();
    let mut runtime = agent.containerd().runtime();
    let config = sandbox_config(agent);
    let request = cri::RunPodSandboxRequest { config: Some(config.clone()), ..Default::default() };
    let sandbox = runtime.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: sandbox,
        config: Some(container_config(agent, image.id)),
        sandbox_config: Some(config),
    };
    let container_id = runtime.create_container(request).await.unwrap().into_inner().container_id;
    runtime.start_container(cri::StartContainerRequest { container_id }).await.unwrap();
}

/// An agent that has been stopped, beside a pod that a kubelet has started.
async fn stopped_agent(scratch: &Scratch) -> Agent {
    let mut agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.stop().await.unwrap();
    Box::pin(start_as_kubelet(&agent)).await;
    agent
}

#[tokio::test]
async fn a_static_pod_of_a_kubelet_keeps_running_until_its_manifest_changes() {
    let scratch = Scratch::new().unwrap();
    let mut agent = Box::pin(stopped_agent(&scratch)).await;
    let before = running(&agent).await.unwrap();
    assert_eq!(before.len(), 1, "{before:?}");
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    agent.start().await.unwrap();
    until_ready(&agent, &["web"]).await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap(), before, "{}", agent.log_tail());
    let name = full_name(&agent);
    assert_eq!(pods(&agent).await.unwrap()[&name]["metadata"]["uid"], UID);

    // The decision outlives every service.
    for service in ServiceName::supervised() {
        agent.service(service).unwrap().signal(Signal::KILL);
    }
    agent.kill_init();
    agent.start().await.unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), before, "{}", agent.log_tail());
    assert_eq!(pods(&agent).await.unwrap()[&name]["metadata"]["uid"], UID);

    // From here on it is like any static pod.
    agent.write_manifest("web.yaml", &sleeper("web").replace("hello from", "goodbye from")).unwrap();
    eventually(LIMIT, "another container runs in its place", async || {
        running(&agent).await.is_ok_and(|now| now.len() == 1 && now != before)
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_ready(&agent, &["web"]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_static_pod_of_a_kubelet_with_another_manifest_is_replaced() {
    let scratch = Scratch::new().unwrap();
    let mut agent = Box::pin(stopped_agent(&scratch)).await;
    let before = running(&agent).await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web").replace("hello from", "goodbye from")).unwrap();
    agent.start().await.unwrap();
    until_ready(&agent, &["web"]).await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let now = running(&agent).await.unwrap();
    assert!(now.len() == 1 && now != before, "{now:?}");
    assert!(agent.log().contains("static_pod_not_adopted"), "{}", agent.log_tail());
    agent.end().unwrap();
}
