//! Admission: rejected pods, pending admission, and host ports.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_service_kit::status::error;
use serde_json::{Value, json};
use tonic::Code;

use fake::{PodSync, World, eventually};

fn spec(more: Value) -> Value {
    let main = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    let mut spec = json!({"restartPolicy": "Always", "containers": [main]});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

fn with_port(port: i32) -> Value {
    let mut spec = spec(json!({}));
    spec["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": port, "protocol": "TCP"}]);
    spec
}

/// Waits until the pod is rejected; returns its message.
async fn rejected(service: &PodSync, uid: &str, reason: &str) -> String {
    let status = eventually(&format!("the refusal of {uid}"), async || {
        service
            .pod(uid)
            .await
            .map(|mut pod| pod["status"].take())
            .filter(|status| status["phase"] == "Failed")
    })
    .await;
    assert_eq!(status["reason"], reason, "{status:#}");
    assert!(status["conditions"].is_null() && status["containerStatuses"].is_null(), "{status:#}");
    let message = status["message"].as_str().unwrap().to_owned();
    service
        .event(&format!("Warning {reason}: {}", message.strip_prefix("Pod was rejected: ").unwrap()))
        .await;
    message
}

fn rejection_counted(service: &PodSync, reason: &str) -> bool {
    let line = format!("kubelet_admission_rejections_total{{reason=\"{reason}\"}} 1");
    service.ctx.metrics.text().lines().any(|l| l == line)
}

#[tokio::test]
async fn rejections_have_the_kubelets_reasons_and_are_counted() {
    let world = World::start();
    let service = world.pod_sync().await;
    for (uid, more, reason, counted_as, message) in [
        (
            "sysctl",
            json!({"securityContext": {"sysctls": [{"name": "vm.swappiness", "value": "1"}]}}),
            "SysctlForbidden",
            "SysctlForbidden",
            "Pod was rejected: forbidden sysctl: \"vm.swappiness\" not allowlisted",
        ),
        (
            "selector",
            json!({"nodeSelector": {"disk": "hdd"}}),
            "NodeAffinity",
            "Other",
            "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ),
        (
            "groups",
            json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}}),
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicyNotSupported",
            "Pod was rejected: SupplementalGroupsPolicy=Strict is not supported in this node",
        ),
    ] {
        world.add_pod_with_spec(uid, spec(more), 1);
        assert_eq!(rejected(&service, uid, reason).await, message);
        assert!(rejection_counted(&service, counted_as), "{}", service.ctx.metrics.text());
    }
    world.add_pod_with_spec("good", spec(json!({"nodeSelector": {"disk": "ssd"}})), 1);
    service.phase("good", "Running").await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 1);
    service.kill();
}

#[tokio::test]
async fn the_cgroup_of_a_pod_follows_the_qos_class_of_its_status_else_that_of_its_spec() {
    let mut world = World::start();
    world.source = "api";
    let _service = world.pod_sync().await;
    let resources = json!({"requests": {"cpu": "100m"}});
    let spec = json!({"containers": [{"name": "main", "image": "i:1", "resources": resources}]});
    for (uid, status, expected) in
        [("set", json!({"qosClass": "Guaranteed"}), "Guaranteed"), ("unset", json!({}), "Burstable")]
    {
        world.status = status;
        world.add_pod_with_spec(uid, spec.clone(), 1);
        let sent = eventually("the desired state of the pod", async || world.machine.desire(uid)).await;
        assert_eq!(sent.qos_class, expected, "{uid}");
    }
}

#[tokio::test]
async fn of_two_pods_with_the_same_host_port_one_runs_until_its_end() {
    let mut world = World::start();
    world.source = "api";
    let service = world.pod_sync().await;
    for uid in ["one", "two"] {
        world.add_pod_with_spec(uid, with_port(8080), 1);
    }
    let ran = eventually("one of them runs and the other is refused", async || {
        let phases = [service.pod("one").await?, service.pod("two").await?]
            .map(|pod| pod["status"]["phase"].as_str().unwrap_or_default().to_owned());
        match (phases[0].as_str(), phases[1].as_str()) {
            ("Running", "Failed") => Some(("one", "two")),
            ("Failed", "Running") => Some(("two", "one")),
            _ => None,
        }
    })
    .await;
    let text = "Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    assert_eq!(rejected(&service, ran.1, "NodePorts").await, text);
    world.add_pod_with_spec("other", with_port(8081), 1);
    service.phase("other", "Running").await;

    world.pods.remove(&ran.0.to_owned());
    eventually("the end of the first", async || service.pod(ran.0).await.is_none().then_some(())).await;
    world.add_pod_with_spec("three", with_port(8080), 1);
    service.phase("three", "Running").await;
    assert_eq!(
        service.pod(ran.1).await.unwrap()["status"]["phase"],
        "Failed",
        "a refused pod is not tried again"
    );
    service.kill();
}

#[tokio::test]
async fn an_adopted_pod_skips_admission_and_keeps_its_host_port() {
    let mut world = World::start();
    world.source = "api";
    let first = world.pod_sync().await;
    world.add_pod_with_spec("web", with_port(8080), 1);
    first.phase("web", "Running").await;
    first.kill();
    // Meanwhile the manifest selects another node; the running pod continues.
    let mut moved = with_port(8080);
    moved["nodeSelector"] = json!({"disk": "hdd"});
    world.add_pod_with_spec("web", moved, 2);

    let second = world.pod_sync().await;
    second.phase("web", "Running").await;
    world.add_pod_with_spec("late", with_port(8080), 1);
    rejected(&second, "late", "NodePorts").await;
    assert_eq!(second.pod("web").await.unwrap()["status"]["phase"], "Running");
    assert_eq!(world.shim.calls("StopContainer"), 0);
    second.kill();
}

#[tokio::test]
async fn a_rejection_by_resource_manager_is_reported_and_counted_unchanged() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.machine.reject("OutOfnvidia.com/gpu", "Node didn't have enough resource: nvidia.com/gpu");
    world.add_pod("web", "Always", 1);
    let text = rejected(&service, "web", "OutOfnvidia.com/gpu").await;
    assert_eq!(text, "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu");
    assert!(rejection_counted(&service, "OutOfExtendedResources"), "{}", service.ctx.metrics.text());
    service.kill();
}

#[tokio::test]
async fn a_pod_whose_volume_has_no_room_on_the_node_is_rejected_after_its_admission() {
    let world = World::start();
    let full = error(Code::ResourceExhausted, "VOLUME_ATTACHMENT_LIMIT_EXCEEDED", "no slot is free");
    world.volumes.mount_pod.fail(full);
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    let text = rejected(&service, "web", "VolumeAttachmentLimitExceeded").await;
    assert_eq!(text, "Pod was rejected: Unable to attach or mount volumes: no slot is free");
    assert!(rejection_counted(&service, "VolumeAttachmentLimitExceeded"), "{}", service.ctx.metrics.text());
    assert_eq!(world.shim.calls("RunPodSandbox"), 0);
    service.kill();
}

/// Waits until the admission of the pod is pending for `reason`; returns its status.
async fn pending_admission(service: &PodSync, uid: &str, reason: &str) -> Value {
    eventually(&format!("{uid} waits for admission"), async || {
        let mut pod = service.pod(uid).await?;
        let status = pod["status"].take();
        (status["phase"] == "Pending" && status["reason"] == reason).then_some(status)
    })
    .await
}

#[tokio::test]
async fn a_static_pod_waits_for_its_host_port_until_the_other_pod_has_ended() {
    let mut world = World::start();
    world.source = "file";
    let service = world.pod_sync().await;
    world.add_pod_with_spec("one", with_port(8080), 1);
    service.phase("one", "Running").await;
    world.add_pod_with_spec("two", with_port(8080), 1);
    let status = pending_admission(&service, "two", "NodePorts").await;
    let text = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    assert_eq!(status["message"], text, "{status:#}");
    service.event(&format!("Warning NodePorts: {text}")).await;
    assert!(!rejection_counted(&service, "Other"), "it is not rejected: {}", service.ctx.metrics.text());
    eventually("its room and its turn are others'", async || {
        let deferred = world.machine.deferred().all();
        (deferred.first()?.uid == "two").then_some(())
    })
    .await;

    world.pods.remove(&"one".to_owned());
    service.phase("two", "Running").await;
    let status = service.pod("two").await.unwrap()["status"].take();
    assert!(status["reason"].is_null() && status["message"].is_null(), "{status:#}");
    service.kill();
}

#[tokio::test]
async fn a_static_pod_waits_for_resources_across_a_restart_of_pod_sync() {
    let mut world = World::start();
    world.source = "etcd";
    let first = world.pod_sync().await;
    let text = "Node didn't have enough resource: cpu, requested: 1500, used: 1500, capacity: 2000";
    world.machine.reject_temporarily("OutOfcpu", text);
    world.add_pod("web", "Always", 1);
    assert_eq!(pending_admission(&first, "web", "OutOfcpu").await["message"], text);
    first.kill();

    let second = world.pod_sync().await;
    pending_admission(&second, "web", "OutOfcpu").await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 0);
    world.machine.admit();
    second.phase("web", "Running").await;
    second.kill();
}

#[tokio::test]
async fn a_permanent_rejection_by_resource_manager_is_final_for_static_pods_too() {
    let mut world = World::start();
    world.source = "file";
    let service = world.pod_sync().await;
    world.machine.reject("OutOfcpu", "Node didn't have enough resource: cpu");
    world.add_pod("web", "Always", 1);
    rejected(&service, "web", "OutOfcpu").await;
    service.kill();
}

#[tokio::test]
async fn an_orphan_from_before_a_restart_keeps_its_host_port_until_it_has_ended() {
    for source in ["file", "etcd"] {
        let mut world = World::start();
        world.source = source;
        let first = world.pod_sync().await;
        world.add_pod_with_spec("one", with_port(8080), 1);
        first.phase("one", "Running").await;
        first.kill();
        world.pods.remove(&"one".to_owned());
        world.add_pod_with_spec("two", with_port(8080), 1);

        world.shim.hold_stops();
        let second = world.pod_sync().await;
        pending_admission(&second, "two", "NodePorts").await;
        world.shim.release_stops();
        second.phase("two", "Running").await;
        second.kill();
    }
}
