//! The rule action `RestartAllContainers`.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::runtime::v1::ContainerState;
use keelson_service_kit::now_unix_nanos;
use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

fn add_pod(world: &World) {
    let image = |name: &str| json!({"name": name, "image": "i:1", "imagePullPolicy": "IfNotPresent"});
    let mut asks = image("asks");
    asks["restartPolicy"] = "Never".into();
    asks["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let spec = json!({"restartPolicy": "Always", "containers": [asks, image("other")]});
    world.add_pod_with_spec("web", spec, 1);
}

/// The container with the rule exits with this code.
fn trigger(world: &World, code: i32) {
    world.shim.change("web", |pod| {
        let running = |c: &&mut _| {
            let c: &&mut keelson_proto::keelson::runtime::v1::Container = c;
            c.name == "asks" && c.state() == ContainerState::Running
        };
        let container = pod.containers.iter_mut().find(running).unwrap();
        container.set_state(ContainerState::Exited);
        container.exit_code = code;
        container.finished_unix_nanos = now_unix_nanos();
    });
}

/// Waits until both containers run and have been restarted this many times.
async fn both_run(service: &PodSync, restarts: u64) -> Value {
    eventually(&format!("both run, restarted {restarts} times"), async || {
        let status = service.pod("web").await?["status"].take();
        let list = status["containerStatuses"].as_array()?;
        let good = |s: &Value| s["state"]["running"].is_object() && s["restartCount"] == restarts;
        (list.len() == 2 && list.iter().all(good)).then_some(status)
    })
    .await
}

fn condition(status: &Value) -> Value {
    let conditions = status["conditions"].as_array().unwrap();
    conditions.iter().find(|c| c["type"] == "AllContainersRestarting").unwrap()["status"].clone()
}

#[tokio::test]
async fn restart_all_containers_restarts_the_pod_in_the_same_sandbox() {
    let world = World::start();
    let service = world.pod_sync().await;
    add_pod(&world);
    assert_eq!(condition(&both_run(&service, 0).await), "False");
    trigger(&world, 42);
    let status = both_run(&service, 1).await;
    assert_eq!(condition(&status), "False");
    let calls = |name: &str| world.shim.calls(name);
    assert_eq!((calls("StopContainer"), calls("RemoveContainer"), calls("RunPodSandbox")), (1, 2, 1));
    assert_eq!(world.shim.stop_timeouts(), [2], "no grace, as the kubelet has none here");

    // Another exit code terminates only that container, for good.
    trigger(&world, 1);
    eventually("its end", async || {
        let status = service.pod("web").await?["status"].take();
        (status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1).then_some(())
    })
    .await;
    assert_eq!(calls("RemoveContainer"), 2);
    service.kill();
}

#[tokio::test]
async fn an_interrupted_restart_of_all_containers_continues_after_a_restart() {
    let world = World::start();
    let first = world.pod_sync().await;
    add_pod(&world);
    both_run(&first, 0).await;
    world.shim.hold_stops();
    trigger(&world, 42);
    eventually("the stop of the other", async || (world.shim.calls("StopContainer") > 0).then_some(())).await;
    assert_eq!(condition(&first.pod("web").await.unwrap()["status"]), "True");
    first.kill();
    world.shim.release_stops();

    let second = world.pod_sync().await;
    both_run(&second, 1).await;
    assert_eq!((world.shim.calls("RemoveContainer"), world.shim.calls("RunPodSandbox")), (2, 1));
    second.kill();
}
