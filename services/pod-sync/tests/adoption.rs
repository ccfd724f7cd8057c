//! A static pod that a kubelet has started keeps running under the kubelet's UID, unless its manifest has changed (docs/adr/0022).

#![allow(clippy::unwrap_used)]

mod fake;

use std::collections::BTreeMap;

use keelson_kube_model::container_hash;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1 as rt;
use serde_json::{Value, json};

use fake::{World, eventually};

/// The UID that pod-config computes, and the name of the pod.
const OURS: &str = "00000000000000000000000000000001";
/// The UID that a kubelet has computed.
const KUBELETS: &str = "0000000000000000000000000000000a";

fn spec() -> Value {
    let container = json!({
        "name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "command": ["serve", "--all"],
    });
    json!({"restartPolicy": "Always", "containers": [container]})
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// The configuration of the container, with this command.
fn config(command: &[&str]) -> Value {
    let security =
        json!({"namespace_options": {"pid": 1}, "run_as_user": {}, "seccomp": {"profile_type": 1}});
    json!({"command": command, "linux": {"resources": {"cpu_shares": 2}, "security_context": security}})
}

fn set_container(world: &World, command: &[&str]) {
    let hash = container_hash("main", "i:1");
    let annotations = map(&[("io.kubernetes.container.hash", hash.as_str())]);
    world.shim.set_details("c-k", BTreeMap::new(), annotations, config(command));
}

/// A pod that a kubelet has started and that runs with this command.
fn start_as_kubelet(world: &World, command: &[&str]) {
    let hash = container_hash("main", "i:1");
    let sandbox =
        rt::Sandbox { id: "s-k".into(), ready: true, ips: vec!["10.0.0.2".into()], ..Default::default() };
    let container = rt::Container {
        id: "c-k".into(),
        name: "main".into(),
        sandbox_id: "s-k".into(),
        state: rt::ContainerState::Running.into(),
        created_unix_nanos: 1,
        started_unix_nanos: 1,
        hash,
        ..Default::default()
    };
    world.shim.change(KUBELETS, |pod| {
        (pod.name, pod.namespace) = (OURS.into(), "default".into());
        pod.sandboxes.push(sandbox);
        pod.containers.push(container);
    });
    let annotations = map(&[
        ("kubernetes.io/config.hash", KUBELETS),
        ("kubernetes.io/config.seen", "2025-01-01T00:00:00Z"),
        ("kubernetes.io/config.source", "file"),
        ("revision", "1"),
    ]);
    let labels = map(&[("io.kubernetes.pod.uid", KUBELETS)]);
    world.shim.set_details("s-k", labels, annotations, json!({"linux": {}}));
    set_container(world, command);
}

#[tokio::test]
async fn a_static_pod_of_a_kubelet_keeps_its_uid_and_container_over_restarts() {
    let world = World::start();
    start_as_kubelet(&world, &["serve", "--all"]);
    world.add_pod_with_spec(OURS, spec(), 1);
    let service = world.pod_sync().await;
    let status = service.phase(KUBELETS, "Running").await;
    assert_eq!(status["containerID"].as_str().unwrap().rsplit('/').next(), Some("c-k"), "{status}");
    let pod = service.pod(KUBELETS).await.unwrap();
    assert_eq!(pod["metadata"]["uid"], KUBELETS);
    assert_eq!(pod["metadata"]["annotations"]["kubernetes.io/config.hash"], KUBELETS);
    assert!(service.pod(OURS).await.is_none());
    assert_eq!(world.shim.mutating_calls(), 0, "{:#?}", world.shim.order());
    service.kill();

    // The decision is stored: it does not depend on what the runtime shows later.
    set_container(&world, &["other"]);
    let service = world.pod_sync().await;
    service.phase(KUBELETS, "Running").await;
    eventually("every source has reported", async || world.shim.sources_ready().then_some(())).await;
    assert!(service.pod(OURS).await.is_none());
    assert_eq!(world.shim.mutating_calls(), 0, "{:#?}", world.shim.order());

    // The source removes it by its own UID.
    world.pods.remove(&OURS.to_owned());
    eventually("the container is stopped", async || {
        (world.shim.calls("StopContainer") == 1 && world.shim.want(KUBELETS) != Some(Want::Run)).then_some(())
    })
    .await;
    service.kill();
}

#[tokio::test]
async fn a_static_pod_whose_content_has_changed_is_replaced() {
    let world = World::start();
    start_as_kubelet(&world, &["serve"]);
    world.add_pod_with_spec(OURS, spec(), 1);
    let service = world.pod_sync().await;
    service.phase(OURS, "Running").await;
    assert!(!world.shim.pod(KUBELETS).unwrap().sandboxes[0].ready, "the old pod is ended first");
    assert_eq!((world.shim.calls("RunPodSandbox"), world.shim.calls("StopContainer")), (1, 1));
    service.kill();
}

#[tokio::test]
async fn nothing_is_ended_until_the_runtime_has_shown_what_a_kubelet_started() {
    let world = World::start();
    start_as_kubelet(&world, &["serve", "--all"]);
    world.add_pod_with_spec(OURS, spec(), 1);
    world.add_pod("other", "Always", 1);
    let (read, answer) = world.shim.hold_reads();
    let service = world.pod_sync().await;
    // The comparison reads the pod.
    read.acquire().await.unwrap().forget();
    let ended = || world.shim.calls("StopContainer") + world.shim.calls("StopPodSandbox");
    assert_eq!(ended(), 0, "{:#?}", world.shim.order());
    assert!(!world.shim.sources_ready());
    world.shim.release_reads();
    answer.add_permits(100);
    service.phase(KUBELETS, "Running").await;
    service.phase("other", "Running").await;
    eventually("every source has reported", async || world.shim.sources_ready().then_some(())).await;
    assert_eq!((ended(), world.shim.calls("RunPodSandbox")), (0, 1));
    service.kill();
}

#[tokio::test]
async fn a_changed_manifest_replaces_an_adopted_pod() {
    let world = World::start();
    start_as_kubelet(&world, &["serve", "--all"]);
    world.add_pod_with_spec(OURS, spec(), 1);
    let service = world.pod_sync().await;
    service.phase(KUBELETS, "Running").await;
    // Even a change that the runtime does not show, as with a kubelet.
    world.pods.remove(&OURS.to_owned());
    let next = "00000000000000000000000000000002";
    world.add_pod_with_spec(next, spec(), 1);
    service.phase(next, "Running").await;
    assert_eq!(world.shim.calls("StopContainer"), 1);
    service.kill();
}
