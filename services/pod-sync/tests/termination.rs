//! Termination: grace periods, late sandboxes, and the metrics of starts and terminations.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::common::v1::Want;
use serde_json::json;

use fake::{World, eventually};

#[tokio::test]
async fn a_pre_stop_hook_that_exhausts_the_grace_period_leaves_two_seconds() {
    let world = World::start();
    let service = world.pod_sync().await;
    // The grace period is one second.
    let container = json!({"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent",
        "lifecycle": {"preStop": {"sleep": {"seconds": 60}}}});
    world.add_pod_with_spec("web", json!({"restartPolicy": "Always", "containers": [container]}), 1);
    service.phase("web", "Running").await;
    world.pods.remove(&"web".to_owned());
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    assert_eq!(world.shim.stop_timeouts(), [2]);
    service.kill();
}

#[tokio::test]
async fn container_starts_and_terminations_are_counted_once() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("job", "Never", 1);
    service.phase("job", "Running").await;
    world.shim.exit("job", 3);
    service.phase("job", "Failed").await;
    eventually("its release", async || {
        world.shim.want("job").is_some_and(|w| w == Want::Unmount).then_some(())
    })
    .await;
    let text = service.ctx.metrics.text();
    for line in [
        "kubelet_started_pods_total 1",
        "kubelet_started_containers_total{container_type=\"container\"} 1",
        "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"3\",reason=\"\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    service.kill();
}

#[tokio::test]
async fn a_sandbox_that_appears_after_termination_is_stopped_too() {
    let world = World::start();
    let service = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    service.phase("web", "Running").await;
    world.shim.add_late_sandbox("web");
    world.pods.remove(&"web".to_owned());
    eventually("the end", async || service.pod("web").await.is_none().then_some(())).await;
    let late = world.shim.pod("web").unwrap().sandboxes.pop().unwrap();
    assert_eq!((late.id.as_str(), late.ready), ("web-late", false));
    service.kill();
}
