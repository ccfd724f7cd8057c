//! Reboots and restarts while etcd is down, with a real etcd.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;
use std::path::Path;

use common::fleet::{Fleet, object};
use common::{Node, Service, pod};
use keelson_config::{Offline, ServiceName, StartAfterReboot};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use serde_json::json;

/// Removes what a reboot removes: the run folder.
fn reboot(node: &Node) {
    fs::remove_dir_all(&node.config.paths.run_dir).unwrap();
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
}

/// `web` has no restrictions, `set-0` belongs to a StatefulSet. volumes.rs has a pod with a claim.
async fn two_pods(fleet: &Fleet) {
    fleet.put_pod("web", "i:1").await;
    let owner = "  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: set, uid: u}]\nspec:";
    let owned = pod("set-0", "i:1").replacen("spec:", owner, 1);
    fleet.put(&fleet.keys.pod("default", "set-0"), &owned).await;
}

/// A node that has received two pods before etcd went down.
async fn node_with_etcd_down(fleet: &mut Fleet, offline: Offline) -> Node {
    two_pods(fleet).await;
    let mut node = fleet.node();
    node.config.offline = offline;
    let mut service = node.start();
    assert_eq!(service.watch().await.replay().await.0.len(), 2);
    // Two values, two pods, and the last contact.
    service.wait_for_rows(5);
    service.kill();
    fleet.cluster.kill(0);
    node
}

/// Starts the service; returns it, the names of the running pods, and the waiting pods with their reasons.
async fn start_offline(node: &Node) -> (Service, Vec<String>, Vec<pb::WaitingPod>) {
    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    let source = tokio::time::timeout(common::TIMEOUT, async {
        loop {
            let source = service.sources().await.into_iter().find(|s| s.name == "etcd").unwrap();
            if source.pods as usize + source.waiting.len() == 2 {
                return source;
            }
            tokio::task::yield_now().await;
        }
    });
    let source = source.await.expect("the source lists all pods");
    assert!(!source.ready && source.problems.is_empty(), "{source:?}");
    let mut watch = service.watch().await;
    let mut names = Vec::new();
    while names.len() < source.pods as usize {
        if let Item::Pod(pod) = watch.next().await {
            names.push(pod.name);
        }
    }
    names.sort_unstable();
    (service, names, source.waiting)
}

#[tokio::test]
async fn offline_policy_decides_what_starts_after_a_reboot_and_the_rest_waits_with_reason() {
    for (start_after_reboot, starts, waits) in [
        (StartAfterReboot::All, vec!["set-0", "web"], vec![]),
        (StartAfterReboot::Stateless, vec!["web"], vec![("set-0", "a StatefulSet owns the pod")]),
        (
            StartAfterReboot::Never,
            vec![],
            vec![("set-0", "startAfterReboot is never"), ("web", "startAfterReboot is never")],
        ),
    ] {
        let mut fleet = Fleet::new();
        let policy = Offline { start_after_reboot, ..Offline::default() };
        let node = node_with_etcd_down(&mut fleet, policy).await;
        // In the same boot all pods keep running.
        let (service, names, waiting) = start_offline(&node).await;
        assert_eq!((names.len(), waiting.len()), (2, 0), "{start_after_reboot:?}");
        service.kill();

        reboot(&node);
        let (service, names, waiting) = start_offline(&node).await;
        assert_eq!(names, starts, "{start_after_reboot:?}");
        for (pod, (name, why)) in waiting.iter().zip(&waits) {
            assert!(pod.name == *name && pod.message.contains(why), "{pod:?}");
            assert_eq!(pod.origin, fleet.keys.pod("default", name));
        }
        assert_eq!(waiting.len(), waits.len());
        service.kill();

        // A restart in the same boot decides the same.
        let (service, names_after_restart, still_waiting) = start_offline(&node).await;
        assert_eq!((names_after_restart, still_waiting.len()), (names, waits.len()));

        // When etcd is back, all pods run and none waits.
        fleet.cluster.restart(0).unwrap();
        let (pods, _) = service.watch().await.replay().await;
        assert_eq!(pods.len(), 2);
        assert!(service.sources().await.iter().all(|source| source.waiting.is_empty()));
    }
}

#[tokio::test]
async fn pods_above_the_maximum_age_do_not_start_as_of_the_first_check_of_the_boot() {
    let mut fleet = Fleet::new();
    let policy = Offline { start_after_reboot: StartAfterReboot::All, max_age_ms: 3_600_000 };
    let node = node_with_etcd_down(&mut fleet, policy).await;
    reboot(&node);
    let (service, names, _) = start_offline(&node).await;
    assert_eq!(names.len(), 2, "the last contact was a moment ago");
    service.kill();
    let first_check =
        node.config.paths.socket_dir(ServiceName::PodConfig).join("etcd-first-missed-in-this-boot");
    let text = fs::read_to_string(&first_check).unwrap();
    let (checked_at, boot) = text.split_once(' ').unwrap();
    let checked_at: i64 = checked_at.parse().unwrap();

    // As if the machine had booted two hours later.
    fs::write(&first_check, format!("{} {boot}", checked_at + 7200)).unwrap();
    let (_service, names, waiting) = start_offline(&node).await;
    assert_eq!(names, Vec::<String>::new());
    for pod in &waiting {
        assert!(
            pod.message.contains("the last contact was 2h0m") && pod.message.contains("maxAge is 1h0m0s"),
            "{pod:?}"
        );
    }
}

/// Whether any file below the folder contains the text.
fn contains_text(folder: &Path, text: &[u8]) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        if path.is_dir() {
            return contains_text(&path, text);
        }
        fs::read(&path).is_ok_and(|bytes| bytes.windows(text.len()).any(|part| part == text))
    })
}

#[tokio::test]
async fn secrets_outlive_a_restart_without_etcd_but_no_reboot_and_are_never_on_disk() {
    let mut fleet = Fleet::new();
    let secret = |name: &str, value: &str| {
        let kind = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"k": value}});
        (fleet.keys.object("Secret", "default", name), kind.to_string())
    };
    let (own, text) = secret("own", "xyzzy-1");
    fleet.put(&own, &text).await;
    let (gone, text) = secret("gone", "xyzzy-2");
    fleet.put(&gone, &text).await;
    let (_, newer) = secret("own", "xyzzy-3");
    fleet.put_pod("web", "i:1").await;
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut node = fleet.node();
    node.config.paths.run_dir = memory.path().join("run");
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
    let mut service = node.start();
    let mut watch = service.watch().await;
    watch.replay().await;
    fleet.put(&own, &newer).await;
    fleet.delete(&gone).await;
    // It is received after the others, so both have been applied.
    fleet.put_pod("next", "i:1").await;
    assert_eq!(watch.pod().await.name, "next");
    service.wait_for_rows(5);
    service.kill();
    fleet.cluster.kill(0);

    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    let value = tokio::time::timeout(common::TIMEOUT, async {
        loop {
            if let Some(found) = object(&service, "Secret", "own").await {
                return found["data"]["k"].clone();
            }
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(value.await.expect("the Secret is there without etcd"), "eHl6enktMw==");
    assert_eq!(object(&service, "Secret", "gone").await, None);
    service.kill();
    let state = &node.config.paths.state_dir;
    assert!(contains_text(&node.config.paths.run_dir, b"xyzzy-3") && contains_text(state, b"i:1"));
    for text in [&b"xyzzy"[..], b"eHl6enkt"] {
        assert!(!contains_text(state, text), "a Secret is on the disk");
    }
    assert!(
        !contains_text(&node.config.paths.run_dir, b"xyzzy-2")
            && !contains_text(&node.config.paths.run_dir, b"xyzzy-1")
    );

    reboot(&node);
    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    assert!(!contains_text(&node.config.paths.run_dir, b"xyzzy"));
    assert_eq!(object(&service, "Secret", "own").await, None);
}

#[tokio::test]
async fn with_the_run_folder_on_a_disk_no_secret_is_stored_and_this_is_logged_once() {
    let fleet = Fleet::new();
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}, "stringData": {"k": "xyzzy"}});
    fleet.put(&fleet.keys.object("Secret", "default", "own"), &secret.to_string()).await;
    let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let mut node = fleet.node();
    node.config.paths.run_dir = disk.path().join("run");
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
    let mut service = node.start();
    service.watch().await.replay().await;
    assert_eq!(object(&service, "Secret", "own").await.unwrap()["data"]["k"], "eHl6enk=");
    assert_eq!(service.count_event("secrets_not_stored"), 1);
    assert!(!contains_text(disk.path(), b"xyzzy"));
}
