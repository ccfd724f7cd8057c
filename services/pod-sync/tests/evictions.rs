//! Evictions, by resource-manager or by an operator.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::common::v1::{PodRef, Want};
use keelson_proto::keelson::pod_sync::v1::EvictPodRequest;
use keelson_proto::keelson::resource_manager::v1::Eviction;
use serde_json::{Value, json};
use tonic::Code;

use fake::{PodSync, World, eventually};

fn order(uid: &str, reason: &str, grace_period_seconds: Option<i64>) -> Eviction {
    Eviction {
        pod: Some(PodRef { uid: uid.into(), namespace: "default".into(), name: uid.into() }),
        reason: reason.into(),
        message: "The node was low on resource: memory. ".into(),
        grace_period_seconds,
        condition_type: "DisruptionTarget".into(),
        condition_reason: "TerminationByKubelet".into(),
        condition_message: "it takes more than it asked for".into(),
        ..Eviction::default()
    }
}

/// Asserts that the pod is Failed for this reason, is a `DisruptionTarget`, and has released its resources.
async fn assert_evicted(world: &World, service: &PodSync, uid: &str, reason: &str, text: &str) -> Value {
    let status = eventually(&format!("the end of {uid}"), async || {
        let status = service.pod(uid).await?["status"].take();
        let released = world.machine.want(uid) == Some(Want::Forget);
        (status["phase"] == "Failed" && released && world.shim.want(uid) == Some(Want::Forget))
            .then_some(status)
    })
    .await;
    assert_eq!((&status["reason"], &status["message"]), (&json!(reason), &json!(text)), "{status:#}");
    let conditions = status["conditions"].as_array().unwrap();
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").expect("the condition").clone();
    assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("TerminationByKubelet")));
    target
}

#[tokio::test]
async fn an_eviction_order_ends_its_pod_for_good_and_completion_is_reported() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    world.add_pod("other", "Always", 1);
    service.phase("web", "Running").await;
    service.phase("other", "Running").await;

    world.machine.evictions.set("web".into(), order("web", "Evicted", Some(0)));
    let text = "The node was low on resource: memory. ";
    let target = assert_evicted(&world, &service, "web", "Evicted", text).await;
    assert_eq!(target["message"], "it takes more than it asked for");
    assert_eq!(world.shim.stop_timeouts(), [0], "the order's grace, not the pod's");
    world.machine.evictions.remove(&"web".to_owned());

    // Neither a change of its manifest nor RetryPod starts it again.
    world.add_pod("web", "Always", 2);
    eventually("the change", async || {
        let pod = service.pod("web").await?;
        (pod["metadata"]["annotations"]["revision"] == "2")
            .then(|| assert_eq!(pod["status"]["phase"], "Failed"))
    })
    .await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 2);
    service.phase("other", "Running").await;
    service.kill();
}

#[tokio::test]
async fn a_pod_is_not_stopped_while_a_container_may_run() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    let seen = async |phase: &str, stopped: bool| {
        eventually(&format!("{phase}, stopped: {stopped}"), async || {
            let document = service.document("web").await?;
            let pod: Value = serde_json::from_slice(&document.pod_json).unwrap();
            (pod["status"]["phase"] == phase && document.stopped == stopped).then_some(document.finished)
        })
        .await
    };
    assert!(!seen("Running", false).await);
    world.shim.hold_stops();
    world.machine.evictions.set("web".into(), order("web", "Evicted", None));
    seen("Failed", false).await;
    world.shim.release_stops();
    seen("Failed", true).await;
    // The next process has restored it, too.
    service.kill();
    let service = world.pod_sync().await;
    eventually("the next process", async || service.document("web").await.filter(|web| web.stopped)).await;
    service.kill();
}

#[tokio::test]
async fn a_preemption_has_its_own_reason_and_the_pods_grace_period() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    world.machine.evictions.set("web".into(), order("web", "Preempting", None));
    assert_evicted(&world, &service, "web", "Preempting", "The node was low on resource: memory. ").await;
    // A grace period of one second is at least two for the runtime.
    assert_eq!(world.shim.stop_timeouts(), [2]);
    service.kill();
}

/// The order that ends a pod before a shutdown of the machine.
fn shutdown_order(uid: &str) -> Eviction {
    let text = "Pod was terminated in response to imminent node shutdown.";
    Eviction {
        message: text.into(),
        condition_message: text.into(),
        signal: "node-shutdown".into(),
        node_shutdown: true,
        ..order(uid, "Terminated", Some(1))
    }
}

#[tokio::test]
async fn after_a_shutdown_and_a_reboot_only_pods_without_a_controller_start_again() {
    let mut world = World::start();
    world.boot("b1");
    let first = world.pod_sync().await;
    world.add_pod("static", "Always", 1);
    world.source = "etcd";
    world.add_pod("local", "Always", 1);
    world.source = "api";
    world.add_pod("api", "Always", 1);
    let all = ["static", "local", "api"];
    for uid in all {
        first.phase(uid, "Running").await;
        world.machine.evictions.set(uid.into(), shutdown_order(uid));
    }
    let text = "Pod was terminated in response to imminent node shutdown.";
    for uid in all {
        let target = assert_evicted(&world, &first, uid, "Terminated", text).await;
        assert_eq!(target["message"], text);
        world.machine.evictions.remove(&uid.to_owned());
    }
    assert!(first.events().await.iter().all(|event| !event.contains("Terminated")));
    first.kill();

    // A restart within the boot, as after a shutdown that was cancelled, starts none of them.
    let second = world.pod_sync().await;
    for uid in all {
        second.phase(uid, "Failed").await;
    }
    assert_eq!(world.shim.calls("RunPodSandbox"), 3);
    second.kill();
    world.boot("b2");
    let third = world.pod_sync().await;
    third.phase("static", "Running").await;
    third.phase("local", "Running").await;
    third.phase("api", "Failed").await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 5);
    third.kill();
}

/// The order that ends a pod for a drain.
fn drain_order(uid: &str) -> Eviction {
    Eviction { node_drain: true, signal: "node-drain".into(), ..order(uid, "Drained", Some(1)) }
}

#[tokio::test]
async fn a_drained_pod_stays_ended_over_a_kill_and_starts_again_when_its_order_is_gone() {
    let world = World::start();
    let text = "The node was low on resource: memory. ";
    let first = world.pod_sync().await;
    for uid in ["web", "db"] {
        world.add_pod(uid, "Always", 1);
        first.phase(uid, "Running").await;
        world.machine.evictions.set(uid.into(), drain_order(uid));
        assert_evicted(&world, &first, uid, "Drained", text).await;
    }
    first.kill();
    let second = world.pod_sync().await;
    for uid in ["web", "db"] {
        second.phase(uid, "Failed").await;
    }
    assert_eq!(world.shim.calls("RunPodSandbox"), 2);
    world.machine.evictions.remove(&"web".to_owned());
    // runtime-shim removes what has ended.
    world.shim.remove("web");
    second.phase("web", "Running").await;
    assert_eq!(second.pod("web").await.unwrap()["status"]["reason"], Value::Null);
    second.phase("db", "Failed").await;
    second.kill();
    // The drain is undone while this service is down.
    world.machine.evictions.remove(&"db".to_owned());
    world.shim.remove("db");
    let third = world.pod_sync().await;
    third.phase("db", "Running").await;
    third.phase("web", "Running").await;
    assert_eq!(world.shim.calls("RunPodSandbox"), 4);
    third.kill();
}

#[tokio::test]
async fn a_drained_pod_starts_again_with_the_resources_that_its_source_asks_for_now() {
    let world = World::start();
    let service = world.pod_sync().await;
    let with_cpu = |cpu: &str| {
        json!({"containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
            "resources": {"requests": {"cpu": cpu}}}]})
    };
    world.add_pod_with_spec("web", with_cpu("500m"), 1);
    service.phase("web", "Running").await;
    world.machine.evictions.set("web".into(), drain_order("web"));
    assert_evicted(&world, &service, "web", "Drained", "The node was low on resource: memory. ").await;
    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    eventually("the edit", async || {
        let pod = service.pod("web").await?;
        (pod["metadata"]["annotations"]["revision"] == "2").then_some(())
    })
    .await;
    world.shim.remove("web");
    eventually("the removal", async || world.shim.pod("web").is_none().then_some(())).await;
    world.machine.evictions.remove(&"web".to_owned());
    let container = service.phase("web", "Running").await;
    assert_eq!(container["allocatedResources"]["cpu"], "900m");
    assert_eq!(world.machine.desire("web").unwrap().requests["cpu"], 900);
    service.kill();
}

#[tokio::test]
async fn a_pod_starts_again_if_a_drain_is_undone_while_the_pod_is_ending() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    world.shim.hold_stops();
    world.machine.evictions.set("web".into(), drain_order("web"));
    eventually("the stop", async || (world.shim.calls("StopContainer") > 0).then_some(())).await;
    world.machine.evictions.remove(&"web".to_owned());
    world.shim.release_stops();
    eventually("its end", async || (world.shim.calls("StopPodSandbox") > 0).then_some(())).await;
    world.shim.remove("web");
    eventually("its second sandbox", async || (world.shim.calls("RunPodSandbox") == 2).then_some(())).await;
    service.phase("web", "Running").await;
    service.kill();
}

#[tokio::test]
async fn a_new_pod_waits_on_a_drained_node_for_the_operator() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.machine.reject_temporarily("NodeDrained", "The node is drained.");
    world.add_pod("web", "Always", 1);
    let message = eventually("that it waits", async || {
        let status = service.pod("web").await?["status"].take();
        let waits = status["phase"] == "Pending" && status["reason"] == "NodeDrained";
        waits.then(|| status["message"].as_str().unwrap_or_default().to_owned())
    })
    .await;
    assert!(message.contains("The node is drained."), "{message}");
    service.event("Warning NodeDrained: The node is drained.").await;
    world.machine.admit();
    service.phase("web", "Running").await;
    service.kill();
}

#[tokio::test]
async fn a_pod_is_rejected_while_the_node_shuts_down_and_a_static_one_waits() {
    let mut world = World::start();
    let service = world.pod_sync().await;
    let text = "Pod was rejected as the node is shutting down.";
    world.machine.reject_temporarily("NodeShutdown", text);
    world.add_pod("static", "Always", 1);
    world.source = "api";
    world.add_pod("api", "Always", 1);
    let status = async |uid: &str, phase: &str| {
        eventually(&format!("{uid} is rejected"), async || {
            let status = service.pod(uid).await?["status"].take();
            (status["phase"] == phase && status["reason"] == "NodeShutdown")
                .then(|| status["message"].clone())
        })
        .await
    };
    assert_eq!(status("api", "Failed").await, format!("Pod was rejected: {text}"));
    assert!(status("static", "Pending").await.as_str().unwrap().contains(text));
    service.wait_for_metrics(&["kubelet_admission_rejections_total{reason=\"NodeShutdown\"} 1"]).await;
    // The shutdown was cancelled.
    world.machine.admit();
    service.phase("static", "Running").await;
    service.phase("api", "Failed").await;
    service.kill();
}

#[tokio::test]
async fn an_interrupted_eviction_continues_after_a_restart() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    // The runtime does not complete the stop.
    world.shim.hold_stops();
    world.machine.evictions.set("web".into(), order("web", "Evicted", None));
    eventually("the stop", async || (world.shim.calls("StopContainer") > 0).then_some(())).await;
    first.kill();
    // The next process does not receive the order again; its content is in the pod's record.
    world.machine.evictions.remove(&"web".to_owned());
    world.shim.release_stops();

    let second = world.pod_sync().await;
    let text = "The node was low on resource: memory. ";
    assert_evicted(&world, &second, "web", "Evicted", text).await;
    second.kill();
    let third = world.pod_sync().await;
    let status = eventually("the pod", async || third.pod("web").await).await["status"].take();
    assert_eq!((&status["phase"], &status["reason"]), (&json!("Failed"), &json!("Evicted")));
    assert_eq!(world.shim.calls("RunPodSandbox"), 1);
    third.kill();
}

#[tokio::test]
async fn an_eviction_order_for_an_unknown_pod_waits_for_the_pod() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.machine.evictions.set("web".into(), order("web", "Evicted", None));
    world.add_pod("marker", "Always", 1);
    service.phase("marker", "Running").await;
    world.add_pod("web", "Always", 1);
    eventually("its end", async || {
        let status = service.pod("web").await?["status"].take();
        (status["phase"] == "Failed").then(|| assert_eq!(status["reason"], "Evicted"))
    })
    .await;
    service.kill();
}

#[tokio::test]
async fn evict_pod_records_an_event_and_fails_for_pods_that_have_ended() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    let ask = |name: &str, grace| EvictPodRequest {
        namespace: "default".into(),
        name: name.into(),
        grace_period_seconds: grace,
        ..EvictPodRequest::default()
    };
    let refused = service.client().evict_pod(ask("web", Some(-1))).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let unknown = service.client().evict_pod(ask("nobody", None)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    service.client().evict_pod(ask("web", None)).await.unwrap();
    let text = "The pod was evicted by an operator of the node.";
    assert_evicted(&world, &service, "web", "Evicted", text).await;
    service.event(&format!("Warning Evicted: {text}")).await;
    eventually("that it has ended", async || {
        let again = service.client().evict_pod(ask("web", None)).await;
        again.is_err_and(|status| status.code() == Code::FailedPrecondition).then_some(())
    })
    .await;
    let count = service.events().await.into_iter().filter(|event| event.contains("Evicted")).count();
    assert_eq!(count, 1);
    service.kill();
}
