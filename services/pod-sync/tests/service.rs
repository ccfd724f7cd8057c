//! pod-sync over real unix sockets, with fakes of the services that it calls.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::Sandbox;
use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

/// A pod that has completed, was deleted and has released its resources; runtime-shim has not removed its records.
async fn deleted_job(world: &World, service: &PodSync) {
    world.add_pod("job", "Never", 1);
    service.phase("job", "Running").await;
    world.shim.exit("job", 0);
    service.phase("job", "Succeeded").await;
    world.pods.remove(&"job".to_owned());
    eventually("the end of job", async || service.pod("job").await.is_none().then_some(())).await;
    eventually("its desire to go", async || world.shim.want("job").is_none().then_some(())).await;
}

async fn waits(service: &PodSync) -> String {
    let step = service.step("job", "source", |step| step.message.contains("1 container")).await;
    assert_eq!((step.state.as_str(), step.owner.as_str()), ("waiting", "runtime-shim"));
    step.message
}

#[tokio::test]
async fn a_reused_uid_waits_until_its_dead_containers_are_removed() {
    let world = World::start();
    let service = world.pod_sync().await;
    deleted_job(&world, &service).await;

    world.add_pod("job", "Never", 2);
    service.phase("job", "Pending").await;
    assert_eq!(
        waits(&service).await,
        "what is left of the pod's earlier run is removed first: 1 container and 1 sandbox"
    );
    assert_eq!(world.shim.want("job"), None, "what is wanted is not removed");
    assert_eq!(world.shim.calls("RunPodSandbox"), 1);

    world.shim.remove("job");
    assert_eq!(service.phase("job", "Running").await["restartCount"], 0);
    assert_eq!(world.shim.pod("job").unwrap().sandboxes[0].attempt, 0);
    eventually("the desire to run", async || (world.shim.want("job") == Some(Want::Run)).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn a_reused_uid_still_waits_for_cleanup_after_pod_sync_was_killed() {
    let world = World::start();
    let first = world.pod_sync().await;
    deleted_job(&world, &first).await;
    world.add_pod("job", "Never", 2);
    waits(&first).await;
    first.kill();

    let second = world.pod_sync().await;
    waits(&second).await;
    assert_eq!(second.pod("job").await.unwrap()["status"]["phase"], "Pending");
    eventually("its desire to go", async || world.shim.want("job").is_none().then_some(())).await;
    world.shim.remove("job");
    second.phase("job", "Running").await;
    second.kill();
}

#[tokio::test]
async fn a_reused_uid_removed_during_cleanup_is_forgotten_and_may_come_back() {
    let world = World::start();
    let service = world.pod_sync().await;
    deleted_job(&world, &service).await;
    world.add_pod("job", "Never", 2);
    waits(&service).await;
    world.pods.remove(&"job".to_owned());
    eventually("the end of job", async || service.pod("job").await.is_none().then_some(())).await;

    world.add_pod("job", "Never", 3);
    waits(&service).await;
    world.add_pod("job", "Never", 4);
    let revision = |pod: &Value| pod["metadata"]["annotations"]["revision"].clone();
    eventually("revision 4", async || service.pod("job").await.filter(|pod| revision(pod) == "4")).await;
    world.shim.remove("job");
    service.phase("job", "Running").await;
    assert_eq!(revision(&service.pod("job").await.unwrap()), "4");
    service.kill();
}

#[tokio::test]
async fn crash_loop_back_off_survives_a_restart_of_pod_sync() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    world.shim.exit("web", 1);
    // The first restart is immediate and starts the back-off.
    eventually("the restart", async || (world.shim.calls("StartContainer") == 2).then_some(())).await;
    first.step("web", "container", |step| step.state == "done").await;
    world.shim.exit("web", 1);
    let wait = first.step("web", "container", |step| step.state == "waiting").await;
    first.kill();

    let second = world.pod_sync().await;
    let after = second.step("web", "container", |_| true).await;
    assert_eq!((after.state.as_str(), after.next_retry_unix_nanos), ("waiting", wait.next_retry_unix_nanos));
    let status = second.pod("web").await.unwrap()["status"]["containerStatuses"][0]["state"].clone();
    assert_eq!(status["waiting"]["reason"], "CrashLoopBackOff");
    assert!(status["waiting"]["message"].as_str().unwrap().contains("back-off 10s"), "{status}");
    assert_eq!(world.shim.calls("CreateContainer"), 2);
    second.kill();
}

#[tokio::test]
async fn the_first_restart_back_off_is_the_configured_one_after_a_kill_too() {
    let mut world = World::start();
    world.settings.initial_restart_backoff_ms = 7_000;
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    world.shim.exit("web", 1);
    eventually("the restart", async || (world.shim.calls("StartContainer") == 2).then_some(())).await;
    first.step("web", "container", |step| step.state == "done").await;
    world.shim.exit("web", 1);
    first.step("web", "container", |step| step.state == "waiting").await;
    first.kill();

    let second = world.pod_sync().await;
    second.step("web", "container", |step| step.state == "waiting").await;
    let status = second.pod("web").await.unwrap()["status"]["containerStatuses"][0]["state"].clone();
    assert!(status["waiting"]["message"].as_str().unwrap().contains("back-off 7s"), "{status}");
    second.kill();
}

#[tokio::test]
async fn pods_have_the_condition_ready_to_start_unless_its_gate_is_off() {
    for on in [true, false] {
        let mut world = World::start();
        world.settings.ready_to_start_condition = on;
        world.add_pod("web", "Always", 1);
        for _ in 0..2 {
            let service = world.pod_sync().await;
            service.phase("web", "Running").await;
            let conditions = service.pod("web").await.unwrap()["status"]["conditions"].clone();
            let has = |type_: &str| conditions.as_array().unwrap().iter().any(|c| c["type"] == type_);
            assert!(has("Ready") && has("PodReadyToStartContainers") == on, "{conditions}");
            service.kill();
        }
    }
}

#[tokio::test]
async fn a_runtime_read_error_is_an_event_and_stops_no_pod() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    // The next process reads the pod that it adopts.
    world.shim.fail_reads(true);
    let second = world.pod_sync().await;
    let event = second.event("Warning FailedSync: ").await;
    let text = "error determining status: cannot read the pod from the runtime: the record is broken";
    assert_eq!(event, format!("Warning FailedSync: {text}"));
    world.shim.fail_reads(false);
    second.step("web", "container", |step| step.state == "done").await;
    assert_eq!((world.shim.calls("StopContainer"), world.shim.calls("CreateContainer")), (0, 1));
    second.kill();
}

#[tokio::test]
async fn a_pod_whose_containers_vanish_during_a_read_is_read_again() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Never", 1);
    first.phase("web", "Running").await;
    first.kill();

    // The next process reads the pod that it adopts. Before the response arrives, its records are removed.
    let (read, answer) = world.shim.hold_reads();
    let second = world.pod_sync().await;
    read.acquire().await.unwrap().forget();
    world.shim.remove("web");
    world.shim.release_reads();
    let reads = world.shim.calls("GetPod web");
    // The stream is ordered: a process that stops this orphan has also received the removal.
    world.shim.change("orphan", |pod| {
        pod.sandboxes.push(Sandbox { id: "s-orphan".into(), ready: true, ..Sandbox::default() });
    });
    eventually("the end of the orphan", async || (world.shim.calls("StopPodSandbox") == 1).then_some(()))
        .await;
    assert_eq!(world.shim.calls("GetPod web"), reads);
    answer.add_permits(1);
    eventually("a second read", async || (world.shim.calls("GetPod web") > reads).then_some(())).await;
    second.kill();
}

#[tokio::test]
async fn active_deadline_ends_a_pod_in_image_pull_back_off() {
    let world = World::start();
    world.shim.fail_images();
    let service = world.pod_sync().await;
    let spec = json!({
        "restartPolicy": "Always",
        "activeDeadlineSeconds": 2,
        "containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"}],
    });
    world.add_pod_with_spec("late", spec, 1);
    service.step("late", "image", |step| step.state == "waiting" || step.state == "failed").await;
    service.phase("late", "Failed").await;
    let pod = service.pod("late").await.unwrap();
    assert_eq!(pod["status"]["reason"], "DeadlineExceeded", "{pod:#}");
    let event = service.event("Normal DeadlineExceeded: ").await;
    assert!(event.ends_with("longer than the specified deadline"), "{event}");
}
