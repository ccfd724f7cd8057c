//! In-place resize of running pods, which is refused and must not appear as done.

#![allow(clippy::unwrap_used)]

mod fake;

use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

fn with_cpu(cpu: &str) -> Value {
    let resources = json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
    json!({"restartPolicy": "Always", "containers": [
        {"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent", "resources": resources},
    ]})
}

fn pending(status: &Value) -> Option<&Value> {
    status["conditions"].as_array()?.iter().find(|condition| condition["type"] == "PodResizePending")
}

/// Waits until the resize is refused, or no longer pending; returns the status.
async fn wait_for_resize(service: &PodSync, refused: bool) -> Value {
    eventually("the answer to the change", async || {
        let status = service.pod("web").await?["status"].take();
        (pending(&status).is_some() == refused).then_some(status)
    })
    .await
}

#[tokio::test]
async fn in_place_resize_is_refused_also_after_a_restart() {
    let mut world = World::start();
    world.source = "api";
    let first = world.pod_sync().await;
    world.add_pod_with_spec("web", with_cpu("500m"), 1);
    first.phase("web", "Running").await;
    // The resources that resource-manager is sent for this revision of the pod.
    let cgroup_of = async |revision| {
        let sent = async || world.machine.desire("web").filter(|desire| desire.revision == revision);
        eventually("the desire of the pod", sent).await.cgroup
    };
    let cgroup = cgroup_of(1).await;
    let acts = world.shim.mutating_calls();

    world.add_pod_with_spec("web", with_cpu("900m"), 2);
    let check = |status: &Value| {
        let condition = pending(status).unwrap();
        assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &json!("Infeasible")));
        let container = &status["containerStatuses"][0];
        assert_eq!(container["allocatedResources"]["cpu"], "500m", "{status:#}");
        assert_eq!(container["resources"]["limits"]["cpu"], "500m", "{status:#}");
        assert_eq!(container["restartCount"], 0, "{status:#}");
    };
    check(&wait_for_resize(&first, true).await);
    first.event("Warning ResizeInfeasible: In-place resize is not supported").await;
    assert_eq!(cgroup_of(2).await, cgroup);
    first.kill();

    let second = world.pod_sync().await;
    second.phase("web", "Running").await;
    check(&wait_for_resize(&second, true).await);
    assert_eq!((cgroup_of(2).await, world.shim.mutating_calls()), (cgroup, acts));

    world.add_pod_with_spec("web", with_cpu("500m"), 3);
    wait_for_resize(&second, false).await;
    second.kill();
}
