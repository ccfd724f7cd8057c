//! What happens while the runtime is away: nothing.

#![allow(clippy::unwrap_used)]

mod fake;

use std::time::{Duration, Instant};

use fake::{PodSync, World, eventually};

/// Longer than the first few waits for a runtime that is away.
const A_WHILE: Duration = Duration::from_millis(800);

async fn waits(service: &PodSync, uid: &str, step: &str) {
    let step = service.step(uid, step, |step| step.owner == "runtime-shim").await;
    assert_eq!((step.state.as_str(), step.message.as_str()), ("waiting", "the runtime does not answer"));
}

#[tokio::test]
async fn while_the_runtime_is_away_no_pod_is_synced_and_all_go_on_once_it_is_back() {
    let world = World::start();
    let service = world.pod_sync().await;
    for uid in ["leaves", "changes"] {
        world.name(uid, "Always", 1);
        service.phase(uid, "Running").await;
    }
    let before = world.shim.acts();

    world.shim.set_away(true);
    world.name("new", "Always", 1);
    waits(&service, "new", "sandbox").await;
    // What ended just before is told only now, a person is impatient, and one pod is to go.
    world.shim.exit("changes", 1);
    waits(&service, "changes", "sandbox").await;
    service.retry("changes").await;
    service.retry("new").await;
    world.pods.remove(&"leaves".to_owned());
    let read = "cannot read the pod from the runtime: the runtime does not answer";
    service.step("leaves", "termination", |step| step.message == read).await;
    let (begun, reads) = (Instant::now(), world.shim.calls("GetPod leaves"));
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(world.shim.acts(), before, "{:?}", world.shim.order());
    let reads = world.shim.calls("GetPod leaves") - reads;
    // At least 100 ms, then 200 ms, then 400 ms lie between them.
    let most = (begun.elapsed().as_millis() / 100 + 1).ilog2() as usize;
    assert!((1..=most).contains(&reads), "{reads} reads within {:?}", begun.elapsed());
    let events = service.events().await;
    assert!(!events.iter().any(|event| event.starts_with("Warning")), "it is no fault of a pod: {events:?}");

    world.shim.set_away(false);
    service.phase("new", "Running").await;
    eventually("the restart", async || (world.shim.calls("StartContainer") == 4).then_some(())).await;
    eventually("the end", async || service.pod("leaves").await.is_none().then_some(())).await;
    assert_eq!(world.shim.calls("StopContainer"), 1);
    service.kill();
}

#[tokio::test]
async fn a_pod_sync_that_finds_no_runtime_waits_for_it_before_it_does_anything() {
    let world = World::start();
    let first = world.pod_sync().await;
    world.name("web", "Always", 1);
    first.phase("web", "Running").await;
    first.kill();
    let before = world.shim.acts();

    world.shim.set_away(true);
    world.name("new", "Always", 1);
    let second = world.pod_sync().await;
    for uid in ["web", "new"] {
        second.step(uid, "sandbox", |step| step.state == "waiting").await;
    }
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(world.shim.acts(), before, "{:?}", world.shim.order());

    world.shim.set_away(false);
    second.phase("new", "Running").await;
    second.step("web", "container", |step| step.state == "done").await;
    assert_eq!((world.shim.calls("RunPodSandbox"), world.shim.calls("StopContainer")), (2, 0));
    second.kill();
}
