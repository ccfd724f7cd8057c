//! Pods of a node in a cluster: service variables, runtime classes and the pod CIDR.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_config::{ControlPlane, Kubernetes};
use serde_json::{Value, json};

use fake::{World, eventually};

fn world() -> World {
    let mut world = World::start();
    let kubeconfig = "/none".into();
    let api = Kubernetes::of(kubeconfig);
    world.control_plane = ControlPlane::Kubernetes(api);
    world.source = "api";
    world
}

fn spec(more: Value) -> Value {
    let mut spec = json!({
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
            "env": [{"name": "URL", "value": "tcp://$(DB_SERVICE_HOST)"}]}],
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

#[tokio::test]
async fn containers_wait_for_services_and_get_their_variables() {
    let world = world();
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({"enableServiceLinks": false})), 1);
    let step = service
        .step("web", "container", |step| step.message.contains("services have not yet been read"))
        .await;
    assert_eq!(step.owner, "pod-config");
    assert_eq!(world.shim.calls("CreateContainer"), 0);
    world.cluster.lock().unwrap().services_read = true;
    service.phase("web", "Running").await;
    for call in ["env DB_SERVICE_HOST=10.0.0.3", "env URL=tcp://10.0.0.3"] {
        assert_eq!(world.shim.calls(call), 1, "{call}");
    }
    let asked = world.service_env_requests().all()[0].clone();
    assert_eq!((asked.namespace.as_str(), asked.service_links, asked.as_known), ("default", false, false));
    service.kill();
}

#[tokio::test]
async fn a_static_pod_gets_the_service_variables_known_so_far() {
    let mut world = world();
    world.source = "file";
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    let asked = world.service_env_requests().all()[0].clone();
    assert!(asked.as_known && asked.service_links, "{asked:?}");
    service.kill();
}

#[tokio::test]
async fn an_unknown_runtime_class_holds_the_sandbox_until_it_exists() {
    let world = world();
    world.cluster.lock().unwrap().services_read = true;
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({"runtimeClassName": "kata"})), 1);
    let text = "RuntimeClass \"kata\" not found";
    let step = service.step("web", "sandbox", |step| step.message.contains(text)).await;
    assert_eq!(step.owner, "you");
    service.event(&format!("Warning FailedCreatePodSandBox: {text}")).await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 0);
    world.cluster.lock().unwrap().classes.insert("kata".into(), "kata-qemu".into());
    service.retry("web").await;
    service.phase("web", "Running").await;
    assert_eq!(world.shim.calls("handler \"kata-qemu\""), 1);
    // The default one.
    world.add_pod_with_spec("plain", spec(json!({})), 1);
    service.phase("plain", "Running").await;
    assert_eq!(world.shim.calls("handler \"\""), 1);
    service.kill();
}

#[tokio::test]
async fn without_a_cluster_there_are_no_services_and_no_runtime_classes() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod_with_spec("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    assert!(world.service_env_requests().is_empty());
    assert_eq!(world.shim.calls("env DB_SERVICE_HOST=10.0.0.3"), 0);
    world.cluster.lock().unwrap().classes.insert("kata".into(), "kata-qemu".into());
    world.add_pod_with_spec("kata", spec(json!({"runtimeClassName": "kata"})), 1);
    let step = service.step("kata", "sandbox", |step| step.message.contains("without a control plane")).await;
    assert_eq!(step.owner, "you");
    eventually("one sandbox", async || (world.shim.calls("RunPodSandbox") == 1).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn the_pod_cidr_is_sent_to_the_runtime_once() {
    let world = world();
    let cidrs = json!({"podCIDR": "10.4.0.0/24", "podCIDRs": ["10.4.0.0/24", "fd00:4::/64"]});
    world.cluster.lock().unwrap().node.insert("spec", cidrs);
    world.shim.set_unavailable(true);
    let service = world.pod_sync().await;
    let condition = || {
        let conditions = service.ctx.progress.report("").conditions;
        conditions.into_iter().find(|condition| condition.name == "pod CIDR")
    };
    let condition_now = eventually("the condition", async || condition()).await;
    assert!(
        !condition_now.ok && condition_now.message.contains("10.4.0.0/24,fd00:4::/64"),
        "{condition_now:?}"
    );
    world.shim.set_unavailable(false);
    eventually("a good condition", async || condition().filter(|condition| condition.ok)).await;
    world.cluster.lock().unwrap().services_read = true;
    world.add_pod_with_spec("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    assert_eq!(world.shim.calls("pod CIDR 10.4.0.0/24,fd00:4::/64"), 1);
    service.kill();
}

#[tokio::test]
async fn a_host_network_pod_is_probed_at_the_nodes_address() {
    // On another address of the loopback device.
    let listener = tokio::net::TcpListener::bind("127.0.0.77:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let world = world();
    let addresses = json!({"addresses": [{"type": "InternalIP", "address": "127.0.0.77"}]});
    world.cluster.lock().unwrap().node.insert("status", addresses);
    world.cluster.lock().unwrap().services_read = true;
    let service = world.pod_sync().await;
    let probe = json!({"tcpSocket": {"port": port}, "periodSeconds": 1});
    let container =
        json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "readinessProbe": probe});
    world.add_pod_with_spec("web", spec(json!({"hostNetwork": true, "containers": [container]})), 1);
    eventually("it is ready", async || {
        let pod = service.pod("web").await?;
        (pod["status"]["containerStatuses"][0]["ready"] == true).then_some(())
    })
    .await;
    service.kill();
}
