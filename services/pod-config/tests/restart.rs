//! A restart changes nothing.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;

use common::{Node, backdate, image, pod};
use keelson_config::Tracing;
use keelson_proto::keelson::pod_config::v1::DesiredPod;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use redb::{Database, TableDefinition};

/// Two pods of files and one applied pod, with their rows in the checkpoint, as a later run of the service sends them.
async fn three_pods(node: &Node) -> Vec<DesiredPod> {
    node.write_backdated("a.yaml", &pod("a", "i"));
    node.write_backdated("b.yaml", &pod("b", "i"));
    let mut service = node.start();
    service.apply(&pod("c", "i")).await.unwrap();
    let mut pods = replayed(&service).await;
    assert!(pods[2].added_unix_nanos != 0, "{pods:?}");
    // After a restart it counts as present from the start.
    pods[2].added_unix_nanos = 0;
    // One row per pod, and two for each of the two files.
    service.wait_for_rows(7);
    service.kill();
    pods
}

async fn replayed(service: &common::Service) -> Vec<DesiredPod> {
    let mut pods = service.watch().await.replay().await.0;
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    pods
}

#[tokio::test]
async fn after_sigkill_unchanged_manifests_are_sent_as_identical_bytes() {
    let mut node = Node::new();
    // Tracing is on, so that each pod has a trace context; nothing listens on the endpoint.
    node.config.tracing =
        Some(Tracing { endpoint: "http://127.0.0.1:9".into(), sampling_rate_per_million: 1_000_000 });
    let before = three_pods(&node).await;
    assert_eq!(before.len(), 3);
    assert!(before.iter().all(|pod| pod.traceparent.starts_with("00-")), "{before:?}");
    for _ in 0..2 {
        let service = node.start();
        assert_eq!(replayed(&service).await, before);
        service.kill();
    }
}

#[tokio::test]
async fn a_damaged_or_missing_checkpoint_row_makes_only_its_pod_new() {
    let node = Node::new();
    let before = three_pods(&node).await;
    {
        let store = Database::open(node.checkpoint()).unwrap();
        let change = store.begin_write().unwrap();
        let mut pods = change.open_table(TableDefinition::<&str, &[u8]>::new("pods")).unwrap();
        pods.insert(before[0].uid.as_str(), b"{\"seen".as_slice()).unwrap();
        pods.remove(before[2].uid.as_str()).unwrap();
        drop(pods);
        change.commit().unwrap();
    }
    let mut service = node.start();
    let after = replayed(&service).await;
    for one in [0, 2] {
        assert!(after[one].seen_unix_nanos > before[one].seen_unix_nanos, "{after:?}");
        assert!(after[one].revision > before[one].revision, "{after:?}");
    }
    assert_eq!(after[1], before[1]);
    service.wait_for_rows(2);
    service.kill();
    assert_eq!(replayed(&node.start()).await, after, "and now they are restored");
}

#[tokio::test]
async fn a_pod_removed_while_the_service_was_down_is_new_when_it_returns() {
    let node = Node::new();
    let before = three_pods(&node).await;
    fs::remove_file(node.manifest("a.yaml")).unwrap();
    let mut service = node.start();
    assert_eq!(replayed(&service).await.len(), 2);
    service.wait_for_rows(3);
    let mut watch = service.watch().await;
    watch.replay().await;
    node.write("a.yaml", &pod("a", "i"));
    let added = watch.pod().await;
    assert_eq!(added.uid, before[0].uid);
    assert!(added.seen_unix_nanos > before[0].seen_unix_nanos);
}

#[tokio::test]
async fn a_file_rewritten_during_a_restart_keeps_its_pod_until_it_is_complete() {
    let node = Node::new();
    let before = three_pods(&node).await;
    let writer = fs::File::create(node.manifest("a.yaml")).unwrap();
    fs::write(node.manifest("a.yaml.tmp"), pod("a", "two")).unwrap();
    let service = node.start();
    let mut watch = service.watch().await;
    let (mut pods, _) = watch.replay().await;
    pods.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(pods, before);
    drop(writer);
    fs::rename(node.manifest("a.yaml.tmp"), node.manifest("a.yaml")).unwrap();
    assert_eq!(watch.removed_uid().await, before[0].uid);
    assert!(image(&watch.pod().await).contains("two"));
}

#[tokio::test]
async fn after_sigkill_the_last_good_version_of_a_broken_file_stays() {
    let node = Node::new();
    node.write_backdated("web.yaml", &pod("web", "one"));
    node.write_backdated("gone.yaml", &pod("gone", "one"));
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    assert_eq!(before.len(), 2);
    service.wait_for_rows(6);
    service.kill();

    node.write_backdated("web.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: [web\n");
    fs::remove_file(node.manifest("gone.yaml")).unwrap();
    for _ in 0..2 {
        let service = node.start();
        let (after, _) = service.watch().await.replay().await;
        assert_eq!(after.len(), 1, "{after:?}");
        let old = before.iter().find(|pod| pod.name == "web-n1").unwrap();
        assert_eq!(after[0], *old);
        let problems = service.problems().await;
        assert_eq!(problems[0].kept_pods, ["default/web-n1"]);
        service.kill();
    }
}

#[tokio::test]
async fn after_sigkill_an_unreadable_folder_removes_no_pods_and_is_not_ready() {
    let mut node = Node::new();
    fs::create_dir_all(node.path("outer/inner")).unwrap();
    node.config.sources.static_pod_path = Some(node.path("outer/inner"));
    fs::write(node.path("outer/inner/web.yaml"), pod("web", "i")).unwrap();
    backdate(&node.path("outer/inner/web.yaml"));
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    service.wait_for_rows(3);
    service.kill();
    fs::rename(node.path("outer"), node.path("away")).unwrap();
    fs::write(node.path("outer"), "").unwrap();

    let mut service = node.start();
    service.wait_for_event("pod_added");
    let mut watch = service.watch().await;
    assert_eq!(watch.pod().await, before[0]);
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "manifest"));
    assert!(!service.sources().await[0].ready);
    fs::remove_file(node.path("outer")).unwrap();
    fs::rename(node.path("away"), node.path("outer")).unwrap();
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "file"));
    assert!(matches!(watch.next().await, Item::Synced(_)), "and no pod was removed or added");
}

#[tokio::test]
async fn a_copied_manifest_displaces_no_pod_even_over_a_restart() {
    let node = Node::new();
    let before = three_pods(&node).await;
    // Its path sorts before that of the running pod's file.
    node.write_backdated("0-copy.yaml", &pod("a", "other"));
    for _ in 0..2 {
        let service = node.start();
        assert_eq!(replayed(&service).await, before);
        let problems = service.problems().await;
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].origin.ends_with("0-copy.yaml"), "{problems:?}");
        service.kill();
    }
    fs::remove_file(node.manifest("a.yaml")).unwrap();
    let pods = replayed(&node.start()).await;
    assert!(image(pods.iter().find(|pod| pod.name == "a-n1").unwrap()).contains("other"), "{pods:?}");
}
