//! Changes of a running pod's resources, which are refused and must not look done.

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

/// Waits until the change is refused, or taken back; the status then.
async fn shown(service: &PodSync, refused: bool) -> Value {
    eventually("the answer to the change", async || {
        let status = service.pod("web").await?["status"].take();
        (pending(&status).is_some() == refused).then_some(status)
    })
    .await
}

#[tokio::test]
async fn a_change_of_resources_is_refused_changes_nothing_and_stays_refused_after_a_kill() {
    let mut world = World::start();
    world.source = "api";
    let first = world.pod_sync().await;
    world.name_with("web", with_cpu("500m"), 1);
    first.phase("web", "Running").await;
    // What resource-manager is sent with this revision of the pod.
    let cgroup_of = async |revision| {
        let sent = async || world.machine.desire("web").filter(|desire| desire.revision == revision);
        eventually("the desire of the pod", sent).await.cgroup
    };
    let cgroup = cgroup_of(1).await;
    let acts = world.shim.acts();

    world.name_with("web", with_cpu("900m"), 2);
    let check = |status: &Value| {
        let condition = pending(status).unwrap();
        assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &json!("Infeasible")));
        let container = &status["containerStatuses"][0];
        assert_eq!(container["allocatedResources"]["cpu"], "500m", "{status:#}");
        assert_eq!(container["resources"]["limits"]["cpu"], "500m", "{status:#}");
        assert_eq!(container["restartCount"], 0, "{status:#}");
    };
    check(&shown(&first, true).await);
    first.event("Warning ResizeInfeasible: In-place resize is not supported").await;
    assert_eq!(cgroup_of(2).await, cgroup);
    first.kill();

    let second = world.pod_sync().await;
    second.phase("web", "Running").await;
    check(&shown(&second, true).await);
    assert_eq!((cgroup_of(2).await, world.shim.acts()), (cgroup, acts));

    world.name_with("web", with_cpu("500m"), 3);
    shown(&second, false).await;
    second.kill();
}
