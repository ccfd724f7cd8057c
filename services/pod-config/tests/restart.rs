//! What a restart changes: nothing.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

mod common;

use std::fs;

use common::{Node, image, pod, rest};
use keelson_config::Tracing;
use keelson_proto::keelson::pod_config::v1::DesiredPod;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use redb::{Database, TableDefinition};

/// Two pods of files and one of the command line, with their rows in the checkpoint, as a later run of the service sends them.
async fn three_pods(node: &Node) -> Vec<DesiredPod> {
    node.write_rested("a.yaml", &pod("a", "i"));
    node.write_rested("b.yaml", &pod("b", "i"));
    let mut service = node.start();
    service.apply(&pod("c", "i")).await.unwrap();
    let mut pods = replayed(&service).await;
    assert!(pods[2].added_unix_nanos != 0, "{pods:?}");
    // A later run finds it there.
    pods[2].added_unix_nanos = 0;
    // A row for each pod, and two for each of the two files.
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
async fn after_sigkill_the_same_manifests_are_sent_as_the_same_bytes() {
    let mut node = Node::new();
    // Traces are on, so that each pod has a trace context; nobody listens.
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
async fn a_damaged_or_missing_entry_makes_its_pod_a_new_one_and_no_other() {
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
    assert_eq!(replayed(&node.start()).await, after, "and now they are known");
}

#[tokio::test]
async fn a_pod_that_left_while_the_service_was_away_is_a_new_one_when_it_comes_back() {
    let node = Node::new();
    let before = three_pods(&node).await;
    fs::remove_file(node.manifest("a.yaml")).unwrap();
    let mut service = node.start();
    assert_eq!(replayed(&service).await.len(), 2);
    service.wait_for_rows(3);
    let mut watch = service.watch().await;
    watch.replay().await;
    node.write("a.yaml", &pod("a", "i"));
    let again = watch.pod().await;
    assert_eq!(again.uid, before[0].uid);
    assert!(again.seen_unix_nanos > before[0].seen_unix_nanos);
}

#[tokio::test]
async fn a_file_that_is_rewritten_over_a_restart_runs_as_before_until_it_is_whole() {
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
    assert_eq!(watch.gone().await, before[0].uid);
    assert!(image(&watch.pod().await).contains("two"));
}

#[tokio::test]
async fn after_sigkill_the_last_good_version_of_a_broken_file_goes_on() {
    let node = Node::new();
    node.write_rested("web.yaml", &pod("web", "one"));
    node.write_rested("gone.yaml", &pod("gone", "one"));
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    assert_eq!(before.len(), 2);
    service.wait_for_rows(6);
    service.kill();

    node.write_rested("web.yaml", "apiVersion: v1\nkind: Pod\nmetadata:\n  name: [web\n");
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
async fn after_sigkill_an_unreadable_folder_takes_nothing_away_and_is_not_counted_as_read() {
    let mut node = Node::new();
    fs::create_dir_all(node.path("outer/inner")).unwrap();
    node.config.sources.static_pod_path = Some(node.path("outer/inner"));
    fs::write(node.path("outer/inner/web.yaml"), pod("web", "i")).unwrap();
    rest(&node.path("outer/inner/web.yaml"));
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    service.wait_for_rows(3);
    service.kill();
    fs::rename(node.path("outer"), node.path("away")).unwrap();
    fs::write(node.path("outer"), "").unwrap();

    let mut service = node.start();
    service.wait_for_log("pod added");
    let mut watch = service.watch().await;
    assert_eq!(watch.pod().await, before[0]);
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "manifest"));
    assert!(!service.sources().await[0].ready);
    fs::remove_file(node.path("outer")).unwrap();
    fs::rename(node.path("away"), node.path("outer")).unwrap();
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "file"));
    assert!(matches!(watch.next().await, Item::Synced(_)), "and no pod went or came");
}

#[tokio::test]
async fn a_copy_of_a_manifest_displaces_no_pod_not_even_over_a_restart() {
    let node = Node::new();
    let before = three_pods(&node).await;
    // Its path comes before that of the file that the running pod is of.
    node.write_rested("0-copy.yaml", &pod("a", "other"));
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
