//! A node that an operator drains, across kills of the service.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

#[allow(dead_code, reason = "shared with tests that use more of it")]
mod process;
#[allow(dead_code, unused_imports, reason = "shared with tests that use more of it")]
mod support;

use std::fs;
use std::time::Duration;

use keelson_config::{ControlPlane, Kubernetes};
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_proto::keelson::resource_manager::v1::watch_evictions_response::Item;
use keelson_testkit::logind::soon;
use process::{Process, next_order};
use support::{Client, Sync, World, admit, desire, until_some};
use tonic::Code;

const LONG: Duration = Duration::from_secs(60);

fn pod(uid: &str, revision: u64, want: Want, priority: i32) -> pb::PodDesire {
    pb::PodDesire { priority, termination_grace_seconds: 600, ..desire(uid, revision, want, "BestEffort") }
}

async fn drain(client: &mut Client, stop_pods: bool) -> pb::DrainResponse {
    client.drain(pb::DrainRequest { stop_pods }).await.unwrap().into_inner()
}

/// Waits until the set of pods is known; the state.
async fn state(client: &Client) -> pb::GetDrainResponse {
    until_some("the state of the drain", || {
        let mut client = client.clone();
        async move { client.get_drain(pb::GetDrainRequest {}).await.ok() }
    })
    .await
    .into_inner()
}

async fn until_drained(client: &mut Client, drained: bool) {
    let mut stream = client.watch_machine(pb::WatchMachineRequest {}).await.unwrap().into_inner();
    while soon(stream.message()).await.unwrap().unwrap().drained != drained {}
}

async fn assert_refused(client: &mut Client, uid: &str) {
    let verdict = admit(client, uid, LONG).await;
    let Verdict::Rejected(rejected) = verdict else { panic!("{verdict:?}") };
    assert_eq!((rejected.reason.as_str(), rejected.passing), ("NodeDrained", true));
    assert!(rejected.message.contains("`keelson uncordon`"), "{}", rejected.message);
}

const CRITICAL: i32 = 2_000_000_000;

/// A process that has admitted a pod of low priority and a critical one.
async fn with_pods(world: &World) -> (Process, Sync) {
    let mut process = Process::start(world).await;
    let mut sync = Sync::open(&mut process.client).await;
    sync.pod(pod("low", 1, Want::Run, 0)).await;
    sync.pod(pod("high", 1, Want::Run, CRITICAL)).await;
    sync.complete(1, true).await;
    for uid in ["low", "high"] {
        assert_eq!(admit(&mut process.client, uid, LONG).await, Verdict::Admitted(pb::Admitted {}));
    }
    (process, sync)
}

async fn until_all_ended(client: &Client) {
    until_some("the end of all pods", || async { state(client).await.pods.is_empty().then_some(()) }).await;
}

#[tokio::test]
async fn a_drained_node_ends_pods_in_turn_and_a_kill_changes_nothing() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let (mut first, sync) = with_pods(&world).await;
    assert!(!state(&first.client).await.drained);
    let answer = drain(&mut first.client, true).await;
    assert_eq!((answer.node_name.as_str(), answer.was_drained, answer.stop_pods), ("node", false, true));
    until_drained(&mut first.client, true).await;
    let mut orders = first.orders().await;
    let order = next_order(&mut orders).await;
    assert_eq!((order.pod.as_ref().unwrap().uid.as_str(), order.reason.as_str()), ("low", "Drained"));
    assert_eq!((order.grace_period_seconds, order.node_drain, order.node_shutdown), (Some(600), true, false));
    sync.pod(pod("late", 1, Want::Run, 0)).await;
    assert_refused(&mut first.client, "late").await;
    let now = state(&first.client).await;
    let pods: Vec<_> = now.pods.iter().map(|p| (p.pod.as_ref().unwrap().uid.as_str(), p.ending)).collect();
    assert_eq!(pods, [("low", true), ("high", false)]);

    drop(sync);
    first.kill();
    let mut second = Process::start(&world).await;
    until_drained(&mut second.client, true).await;
    let error = second.client.drain(pb::DrainRequest { stop_pods: true }).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "it does not know the pods yet: {error}");
    let mut orders = second.orders().await;
    assert_eq!(next_order(&mut orders).await, order);
    let mut sync = Sync::open(&mut second.client).await;
    sync.pod(pod("low", 1, Want::Stop, 0)).await;
    sync.pod(pod("high", 1, Want::Run, CRITICAL)).await;
    sync.pod(pod("late", 1, Want::Run, 0)).await;
    sync.complete(1, true).await;
    assert_refused(&mut second.client, "late").await;
    state(&second.client).await;
    let again = drain(&mut second.client, false).await;
    assert_eq!((again.was_drained, again.stop_pods), (true, true), "it still ends pods");
    sync.pod(pod("low", 2, Want::Forget, 0)).await;
    assert_eq!(next_order(&mut orders).await.pod.unwrap().uid, "high");
    sync.pod(pod("high", 2, Want::Forget, CRITICAL)).await;
    until_all_ended(&second.client).await;
}

#[tokio::test]
async fn orders_of_a_drain_outlast_their_pods_and_a_kill_until_it_is_undone() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let (mut first, sync) = with_pods(&world).await;
    drain(&mut first.client, true).await;
    let mut orders = first.orders().await;
    for (uid, priority) in [("low", 0), ("high", CRITICAL)] {
        assert_eq!(next_order(&mut orders).await.pod.unwrap().uid, uid);
        sync.pod(pod(uid, 2, Want::Forget, priority)).await;
    }
    until_all_ended(&first.client).await;
    drop(sync);
    first.kill();

    let mut second = Process::start(&world).await;
    let mut orders = second.orders().await;
    let left = [next_order(&mut orders).await, next_order(&mut orders).await];
    assert!(left.iter().all(|order| order.node_drain), "{left:?}");
    let answer = second.client.uncordon(pb::UncordonRequest {}).await.unwrap().into_inner();
    assert!(answer.was_drained, "it is undone also before the pods are known");
    let mut gone = 0;
    while gone < 2 {
        match soon(orders.message()).await.unwrap().unwrap().item.unwrap() {
            Item::GoneUid(_) => gone += 1,
            Item::Synced(_) => {}
            Item::Eviction(order) => panic!("{order:?}"),
        }
    }
    let mut sync = Sync::open(&mut second.client).await;
    for uid in ["low", "high", "late"] {
        sync.pod(pod(uid, 3, Want::Run, 0)).await;
    }
    sync.complete(1, true).await;
    for uid in ["low", "high", "late"] {
        assert_eq!(admit(&mut second.client, uid, LONG).await, Verdict::Admitted(pb::Admitted {}), "{uid}");
    }
    let answer = second.client.uncordon(pb::UncordonRequest {}).await.unwrap().into_inner();
    assert!(!answer.was_drained);
}

#[tokio::test]
async fn a_cordoned_node_keeps_the_pods_that_ran_also_after_a_reboot() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let mut first = Process::start(&world).await;
    let mut sync = Sync::open(&mut first.client).await;
    sync.pod(pod("old", 1, Want::Run, 0)).await;
    sync.complete(1, true).await;
    assert_eq!(admit(&mut first.client, "old", LONG).await, Verdict::Admitted(pb::Admitted {}));
    assert!(!drain(&mut first.client, false).await.stop_pods);
    sync.pod(pod("new", 1, Want::Run, 0)).await;
    assert_refused(&mut first.client, "new").await;
    // Neither pod has a cgroup after a reboot.
    sync.pod(pod("old", 2, Want::Forget, 0)).await;
    until_all_ended(&first.client).await;
    drop(sync);
    first.kill();

    let mut second = Process::start(&world).await;
    let mut sync = Sync::open(&mut second.client).await;
    sync.pod(pod("old", 3, Want::Run, 0)).await;
    sync.pod(pod("new", 3, Want::Run, 0)).await;
    sync.complete(1, true).await;
    assert_eq!(admit(&mut second.client, "old", LONG).await, Verdict::Admitted(pb::Admitted {}));
    assert_refused(&mut second.client, "new").await;
}

#[tokio::test]
async fn a_drain_that_cannot_be_stored_changes_nothing() {
    let world = World::new();
    let _runtime = world.start_runtime().await;
    let mut process = Process::start(&world).await;
    let mut sync = Sync::open(&mut process.client).await;
    sync.pod(pod("old", 1, Want::Run, 0)).await;
    sync.complete(1, true).await;
    assert_eq!(admit(&mut process.client, "old", LONG).await, Verdict::Admitted(pb::Admitted {}));
    // A folder has the name of the file.
    let file = world.config.paths.state(keelson_config::ServiceName::ResourceManager).join("drain.json");
    fs::create_dir_all(file.join("folder")).unwrap();
    let error = process.client.drain(pb::DrainRequest { stop_pods: true }).await.unwrap_err();
    assert!(error.message().contains("drain.json"), "{error}");
    assert!(error.message().contains("nothing was changed"), "{error}");
    assert!(!state(&process.client).await.drained);
    sync.pod(pod("new", 1, Want::Run, 0)).await;
    assert_eq!(admit(&mut process.client, "new", LONG).await, Verdict::Admitted(pb::Admitted {}));
}

#[tokio::test]
async fn a_node_of_a_cluster_is_drained_at_its_api_server() {
    let mut world = World::new();
    world.config.control_plane = ControlPlane::Kubernetes(Kubernetes::of("/kubeconfig".into()));
    let _runtime = world.start_runtime().await;
    let mut process = Process::start(&world).await;
    let error = process.client.drain(pb::DrainRequest { stop_pods: false }).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("kubectl drain node"), "{error}");
    let answer = process.client.uncordon(pb::UncordonRequest {}).await.unwrap().into_inner();
    assert!(!answer.was_drained);
}
