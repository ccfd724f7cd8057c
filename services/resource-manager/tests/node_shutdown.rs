//! A graceful shutdown of the machine, across a kill of the service, with a fake logind on a private message bus.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

#[allow(dead_code, reason = "shared with tests that use more of it")]
mod process;
#[allow(dead_code, unused_imports, reason = "shared with tests that use more of it")]
mod support;

use std::fs;
use std::time::Duration;

use keelson_config::PriorityGracePeriod;
use keelson_proto::keelson::common::v1::Want;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::admit_pod_response::Verdict;
use keelson_testkit::logind::{Behaviour, FakeLogind, Machine, PATIENT, soon};
use process::{Process, next_order};
use support::{Client, Sync, World, admit, desire, until_some, within};
use tokio::io::AsyncReadExt as _;

const LONG: Duration = Duration::from_secs(60);

fn pod(uid: &str, revision: u64, want: Want, priority: i32) -> pb::PodDesire {
    pb::PodDesire { priority, termination_grace_seconds: 30, ..desire(uid, revision, want, "BestEffort") }
}

/// A pod that runs does not get other resources while the machine shuts down.
async fn assert_not_resized(client: &mut Client, uid: &str) {
    use pb::resize_pod_response::Verdict;
    let requests = [("cpu".to_owned(), 1)].into();
    let request = pb::ResizePodRequest { uid: uid.into(), revision: 1, requests };
    let verdict = client.resize_pod(within(request, LONG)).await.unwrap().into_inner().verdict;
    let Some(Verdict::Rejected(rejected)) = verdict else { panic!("{verdict:?}") };
    assert_eq!((rejected.reason.as_str(), rejected.passing), ("NodeShutdown", true));
}

#[tokio::test]
async fn a_kill_in_the_middle_of_a_shutdown_loses_no_order_and_the_next_groups_follow() {
    let mut world = World::new();
    let machine = Machine::new(&world.config.paths.root_dir);
    world.config.resources.system_bus.socket = machine.socket();
    let _bus = machine.start_bus().await;
    let mut logind = FakeLogind::start(&machine, Behaviour { limit_seconds: 1200, ..PATIENT }).await;
    let _runtime = world.start_runtime().await;
    world.config.resources.node_shutdown.by_priority =
        [0, 1000].map(|priority| PriorityGracePeriod { priority, seconds: 600 }).into();

    let mut first = Process::start(&world).await;
    let mut sync = Sync::open(&mut first.client).await;
    sync.pod(pod("low", 1, Want::Run, 0)).await;
    sync.pod(pod("high", 1, Want::Run, 1000)).await;
    sync.complete(1, true).await;
    for uid in ["low", "high"] {
        assert_eq!(admit(&mut first.client, uid, LONG).await, Verdict::Admitted(pb::Admitted {}));
    }
    let mut held = soon(logind.inhibitors.recv()).await.unwrap();
    logind.signal(true).await;
    first.until_shutting_down().await;
    let mut orders = first.orders().await;
    let order = next_order(&mut orders).await;
    assert_eq!(order.pod.as_ref().unwrap().uid, "low");
    assert_eq!(order.reason, "Terminated");
    assert_eq!(order.message, "Pod was terminated in response to imminent node shutdown.");
    assert_eq!(
        (order.condition_type.as_str(), order.condition_reason.as_str()),
        ("DisruptionTarget", "TerminationByKubelet")
    );
    assert_eq!((order.grace_period_seconds, order.node_shutdown), (Some(30), true));
    // Also a static pod, which is critical, is not admitted any more.
    sync.pod(pb::PodDesire { critical: true, ..pod("late", 1, Want::Run, 2_000_001_000) }).await;
    let verdict = admit(&mut first.client, "late", LONG).await;
    let Verdict::Rejected(rejected) = verdict else { panic!("{verdict:?}") };
    assert_eq!((rejected.reason.as_str(), rejected.passing), ("NodeShutdown", true));
    assert_eq!(rejected.message, "Pod was rejected as the node is shutting down.");
    assert_not_resized(&mut first.client, "high").await;

    drop(sync);
    first.kill();
    assert_eq!(soon(held.read(&mut [0])).await.unwrap(), 0, "the kernel has closed the inhibitor");
    let mut second = Process::start(&world).await;
    let mut orders = second.orders().await;
    let restored = next_order(&mut orders).await;
    assert_eq!(restored, order);
    let mut sync = Sync::open(&mut second.client).await;
    sync.pod(pod("low", 1, Want::Stop, 0)).await;
    sync.pod(pod("high", 1, Want::Run, 1000)).await;
    sync.complete(1, true).await;
    second.until_shutting_down().await;
    sync.pod(pod("low", 2, Want::Forget, 0)).await;
    assert_eq!(next_order(&mut orders).await.pod.unwrap().uid, "high");
    sync.pod(pod("high", 2, Want::Forget, 1000)).await;
    let file = world.config.paths.root_dir.join("graceful_node_shutdown_state");
    until_some("the end of the shutdown", || {
        let content = fs::read_to_string(&file).unwrap_or_default();
        let ended = content.contains("startTime") && !content.contains("\"0001-01-01T00:00:00Z\"");
        std::future::ready(ended.then_some(()))
    })
    .await;
}
