//! While the runtime is unavailable, pod-sync changes nothing.

#![allow(clippy::unwrap_used)]

mod fake;

use std::time::Instant;

use fake::{PodSync, World, eventually};

/// So many more reads of a pod show that nothing is done between them.
const READS: usize = 3;

/// Waits until the pod has been read so many times more.
async fn read_again(world: &World, uid: &str) {
    let read = format!("GetPod {uid}");
    let wanted = world.shim.calls(&read) + READS;
    eventually(&read, async || (world.shim.calls(&read) >= wanted).then_some(())).await;
}

async fn waits(service: &PodSync, uid: &str, step: &str) {
    let step = service.step(uid, step, |step| step.owner == "runtime-shim").await;
    assert_eq!((step.state.as_str(), step.message.as_str()), ("waiting", "the runtime does not answer"));
}

#[tokio::test]
async fn no_pod_is_synced_while_the_runtime_is_unavailable() {
    let world = World::start();
    let service = world.pod_sync().await;
    for uid in ["leaves", "changes"] {
        world.add_pod(uid, "Always", 1);
        service.phase(uid, "Running").await;
    }
    let before = world.shim.mutating_calls();

    world.shim.set_unavailable(true);
    world.add_pod("new", "Always", 1);
    waits(&service, "new", "sandbox").await;
    // A container exit is reported late, an operator calls RetryPod, and one pod is removed.
    world.shim.exit("changes", 1);
    waits(&service, "changes", "sandbox").await;
    service.retry("changes").await;
    service.retry("new").await;
    world.pods.remove(&"leaves".to_owned());
    let read = "cannot read the pod from the runtime: the runtime does not answer";
    service.step("leaves", "termination", |step| step.message == read).await;
    let (begun, reads) = (Instant::now(), world.shim.calls("GetPod leaves"));
    read_again(&world, "leaves").await;
    assert_eq!(world.shim.mutating_calls(), before, "{:?}", world.shim.order());
    let reads = world.shim.calls("GetPod leaves") - reads;
    // They are at least 100 ms, then 200 ms, then 400 ms apart.
    let most = (begun.elapsed().as_millis() / 100 + 1).ilog2() as usize;
    assert!((READS..=most).contains(&reads), "{reads} reads within {:?}", begun.elapsed());
    let events = service.events().await;
    assert!(!events.iter().any(|event| event.starts_with("Warning")), "no pod has an error: {events:?}");

    world.shim.set_unavailable(false);
    service.phase("new", "Running").await;
    eventually("the restart", async || (world.shim.calls("StartContainer") == 4).then_some(())).await;
    eventually("the end", async || service.pod("leaves").await.is_none().then_some(())).await;
    assert_eq!(world.shim.calls("StopContainer"), 1);
    service.kill();
}

#[tokio::test]
async fn pod_sync_waits_for_the_runtime_at_startup() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.add_pod("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    let before = world.shim.mutating_calls();

    world.shim.set_unavailable(true);
    world.add_pod("new", "Always", 1);
    let second = world.pod_sync().await;
    for uid in ["web", "new"] {
        second.step(uid, "sandbox", |step| step.state == "waiting").await;
    }
    read_again(&world, "web").await;
    assert_eq!(world.shim.mutating_calls(), before, "{:?}", world.shim.order());

    world.shim.set_unavailable(false);
    second.phase("new", "Running").await;
    second.step("web", "container", |step| step.state == "done").await;
    assert_eq!((world.shim.calls("RunPodSandbox"), world.shim.calls("StopContainer")), (2, 0));
    second.kill();
}
