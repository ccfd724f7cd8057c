//! Pods of a node that belongs to a cluster: services in their environment, and runtime classes.

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
async fn a_container_waits_until_services_are_read_and_has_their_variables() {
    let world = world();
    let service = world.pod_sync().await;
    world.name_with("web", spec(json!({"enableServiceLinks": false})), 1);
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
    let asked = world.cluster.lock().unwrap().asked[0].clone();
    assert_eq!((asked.namespace.as_str(), asked.service_links, asked.as_known), ("default", false, false));
    service.kill();
}

#[tokio::test]
async fn a_static_pod_has_what_is_known_of_services() {
    let mut world = world();
    world.source = "file";
    let service = world.pod_sync().await;
    world.name_with("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    let asked = world.cluster.lock().unwrap().asked[0].clone();
    assert!(asked.as_known && asked.service_links, "{asked:?}");
    service.kill();
}

#[tokio::test]
async fn a_runtime_class_gives_its_handler_and_an_unknown_one_holds_the_sandbox_until_it_is_there() {
    let world = world();
    world.cluster.lock().unwrap().services_read = true;
    let service = world.pod_sync().await;
    world.name_with("web", spec(json!({"runtimeClassName": "kata"})), 1);
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
    world.name_with("plain", spec(json!({})), 1);
    service.phase("plain", "Running").await;
    assert_eq!(world.shim.calls("handler \"\""), 1);
    service.kill();
}

#[tokio::test]
async fn without_a_cluster_nobody_is_asked_and_every_class_is_unknown() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.name_with("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    assert!(world.cluster.lock().unwrap().asked.is_empty());
    assert_eq!(world.shim.calls("env DB_SERVICE_HOST=10.0.0.3"), 0);
    world.cluster.lock().unwrap().classes.insert("kata".into(), "kata-qemu".into());
    world.name_with("kata", spec(json!({"runtimeClassName": "kata"})), 1);
    let step = service.step("kata", "sandbox", |step| step.message.contains("without a control plane")).await;
    assert_eq!(step.owner, "you");
    eventually("one sandbox", async || (world.shim.calls("RunPodSandbox") == 1).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn the_runtime_is_told_which_addresses_the_nodes_pods_have_once_it_answers_and_once() {
    let world = world();
    let cidrs = json!({"podCIDR": "10.4.0.0/24", "podCIDRs": ["10.4.0.0/24", "fd00:4::/64"]});
    world.cluster.lock().unwrap().node.insert("spec", cidrs);
    world.shim.set_away(true);
    let service = world.pod_sync().await;
    let condition = || {
        let conditions = service.ctx.progress.report("").conditions;
        conditions.into_iter().find(|condition| condition.name == "pod CIDR")
    };
    let told = eventually("it is said", async || condition()).await;
    assert!(!told.ok && told.message.contains("10.4.0.0/24,fd00:4::/64"), "{told:?}");
    world.shim.set_away(false);
    eventually("it is told", async || condition().filter(|condition| condition.ok)).await;
    world.cluster.lock().unwrap().services_read = true;
    world.name_with("web", spec(json!({})), 1);
    service.phase("web", "Running").await;
    assert_eq!(world.shim.calls("pod CIDR 10.4.0.0/24,fd00:4::/64"), 1);
    service.kill();
}

#[tokio::test]
async fn a_pod_on_the_nodes_network_is_probed_where_the_node_is() {
    // On an address of the loopback device that is not the usual one.
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
    world.name_with("web", spec(json!({"hostNetwork": true, "containers": [container]})), 1);
    eventually("it is ready", async || {
        let pod = service.pod("web").await?;
        (pod["status"]["containerStatuses"][0]["ready"] == true).then_some(())
    })
    .await;
    service.kill();
}
