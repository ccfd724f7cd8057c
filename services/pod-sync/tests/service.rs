//! pod-sync over real unix sockets, with neighbours that do as they are told.

#![allow(clippy::unwrap_used)]

mod fake;

use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::runtime::v1::Sandbox;
use serde_json::{Value, json};

use fake::{PodSync, World, eventually};

/// A pod that has run to its end, was deleted, and is completely released; runtime-shim has removed nothing.
async fn deleted_job(world: &World, service: &PodSync) {
    world.name("job", "Never", 1);
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
async fn a_uid_that_is_back_before_its_dead_containers_are_removed_waits_for_that_and_then_runs() {
    let world = World::start();
    let service = world.pod_sync().await;
    deleted_job(&world, &service).await;

    world.name("job", "Never", 2);
    service.phase("job", "Pending").await;
    assert_eq!(
        waits(&service).await,
        "what is left of the pod's earlier run is removed first: 1 container and 1 sandbox"
    );
    assert_eq!(world.shim.want("job"), None, "what is wanted is not removed");
    assert_eq!(world.shim.calls("RunPodSandbox"), 1);

    world.shim.collect("job");
    assert_eq!(service.phase("job", "Running").await["restartCount"], 0);
    assert_eq!(world.shim.pod("job").unwrap().sandboxes[0].attempt, 0);
    eventually("the desire to run", async || (world.shim.want("job") == Some(Want::Run)).then_some(())).await;
    service.kill();
}

#[tokio::test]
async fn a_uid_that_waits_for_its_earlier_life_still_waits_when_pod_sync_was_killed() {
    let world = World::start();
    let first = world.pod_sync().await;
    deleted_job(&world, &first).await;
    world.name("job", "Never", 2);
    waits(&first).await;
    first.kill();

    let second = world.pod_sync().await;
    waits(&second).await;
    assert_eq!(second.pod("job").await.unwrap()["status"]["phase"], "Pending");
    eventually("its desire to go", async || world.shim.want("job").is_none().then_some(())).await;
    world.shim.collect("job");
    second.phase("job", "Running").await;
    second.kill();
}

#[tokio::test]
async fn a_uid_that_is_removed_while_it_waits_is_gone_and_a_later_manifest_is_the_one_that_runs() {
    let world = World::start();
    let service = world.pod_sync().await;
    deleted_job(&world, &service).await;
    world.name("job", "Never", 2);
    waits(&service).await;
    world.pods.remove(&"job".to_owned());
    eventually("the end of job", async || service.pod("job").await.is_none().then_some(())).await;

    world.name("job", "Never", 3);
    waits(&service).await;
    world.name("job", "Never", 4);
    let revision = |pod: &Value| pod["metadata"]["annotations"]["revision"].clone();
    eventually("revision 4", async || service.pod("job").await.filter(|pod| revision(pod) == "4")).await;
    world.shim.collect("job");
    service.phase("job", "Running").await;
    assert_eq!(revision(&service.pod("job").await.unwrap()), "4");
    service.kill();
}

#[tokio::test]
async fn a_back_off_and_its_length_outlive_pod_sync() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.name("web", "Always", 1);
    first.phase("web", "Running").await;
    world.shim.exit("web", 1);
    // The first restart is at once and begins the back-off.
    eventually("the restart", async || (world.shim.calls("StartContainer") == 2).then_some(())).await;
    first.step("web", "container", |step| step.state == "done").await;
    world.shim.exit("web", 1);
    let told = first.step("web", "container", |step| step.state == "waiting").await;
    first.kill();

    let second = world.pod_sync().await;
    let after = second.step("web", "container", |_| true).await;
    assert_eq!((after.state.as_str(), after.next_retry_unix_nanos), ("waiting", told.next_retry_unix_nanos));
    let status = second.pod("web").await.unwrap()["status"]["containerStatuses"][0]["state"].clone();
    assert_eq!(status["waiting"]["reason"], "CrashLoopBackOff");
    assert!(status["waiting"]["message"].as_str().unwrap().contains("back-off 10s"), "{status}");
    assert_eq!(world.shim.calls("CreateContainer"), 2);
    second.kill();
}

#[tokio::test]
async fn a_read_that_the_runtime_answers_with_an_error_is_an_event_and_ends_nothing() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.name("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    // The next one reads what it adopts.
    world.shim.refuse_reads(true);
    let second = world.pod_sync().await;
    let told = second.event("Warning FailedSync: ").await;
    let text = "error determining status: cannot read the pod from the runtime: the record is broken";
    assert_eq!(told, format!("Warning FailedSync: {text}"));
    world.shim.refuse_reads(false);
    second.step("web", "container", |step| step.state == "done").await;
    assert_eq!((world.shim.calls("StopContainer"), world.shim.calls("CreateContainer")), (0, 1));
    second.kill();
}

#[tokio::test]
async fn what_becomes_gone_while_it_is_read_is_read_again() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.name("web", "Never", 1);
    first.phase("web", "Running").await;
    first.kill();

    // The next one reads the pod that it adopts. While the answer is on its way, everything of it goes.
    let (read, answer) = world.shim.hold_reads();
    let second = world.pod_sync().await;
    read.acquire().await.unwrap().forget();
    world.shim.collect("web");
    world.shim.read_freely();
    let reads = world.shim.calls("GetPod web");
    // The stream is in order: whoever ends this orphan has heard of the removal.
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
async fn the_active_deadline_ends_a_pod_whose_image_is_tried_again_much_later() {
    let world = World::start();
    world.shim.fail_images();
    let service = world.pod_sync().await;
    let spec = json!({
        "restartPolicy": "Always",
        "activeDeadlineSeconds": 2,
        "containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"}],
    });
    world.name_with("late", spec, 1);
    service.step("late", "image", |step| step.state == "waiting" || step.state == "failed").await;
    service.phase("late", "Failed").await;
    let pod = service.pod("late").await.unwrap();
    assert_eq!(pod["status"]["reason"], "DeadlineExceeded", "{pod:#}");
    let told = service.event("Normal DeadlineExceeded: ").await;
    assert!(told.ends_with("longer than the specified deadline"), "{told}");
}
