//! Reboots and restarts while etcd is away, against a real member.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

mod common;

use std::fs;
use std::path::Path;

use common::fleet::{Fleet, object};
use common::{Node, Service, pod};
use keelson_config::{Offline, ServiceName, StartAfterReboot};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use serde_json::json;

/// What a machine loses without power, and nothing else.
fn reboot(node: &Node) {
    fs::remove_dir_all(&node.config.paths.run_dir).unwrap();
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();
}

/// `web` needs nothing, `set-0` is a StatefulSet's. A claim is no pod of this node's yet.
async fn two_pods(fleet: &Fleet) {
    fleet.put_pod("web", "i:1").await;
    let owner = "  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: set, uid: u}]\nspec:";
    let owned = pod("set-0", "i:1").replacen("spec:", owner, 1);
    fleet.put(&fleet.keys.pod("default", "set-0"), &owned).await;
}

/// A node that has had two pods of etcd before etcd went away.
async fn known_then_away(fleet: &mut Fleet, offline: Offline) -> Node {
    two_pods(fleet).await;
    let mut node = fleet.node();
    node.config.offline = offline;
    let mut service = node.start();
    assert_eq!(service.watch().await.replay().await.0.len(), 2);
    // Two values, two pods, and the moment.
    service.wait_for_rows(5);
    service.kill();
    fleet.cluster.kill(0);
    node
}

/// Starts the service, and tells of the names of the pods that go on and of those that wait, with the reasons.
async fn offline(node: &Node) -> (Service, Vec<String>, Vec<pb::WaitingPod>) {
    let mut service = node.start();
    service.wait_for_log("what etcd said last goes on");
    let source = tokio::time::timeout(common::PATIENCE, async {
        loop {
            let source = service.sources().await.into_iter().find(|s| s.name == "etcd").unwrap();
            if source.pods as usize + source.waiting.len() == 2 {
                return source;
            }
            tokio::task::yield_now().await;
        }
    });
    let source = source.await.expect("the source tells of all pods");
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
async fn the_policy_says_what_starts_after_a_reboot_and_what_waits_is_told_with_its_reason() {
    for (start_after_reboot, goes_on, waits) in [
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
        let node = known_then_away(&mut fleet, policy).await;
        // In the same boot everything goes on.
        let (service, names, waiting) = offline(&node).await;
        assert_eq!((names.len(), waiting.len()), (2, 0), "{start_after_reboot:?}");
        service.kill();

        reboot(&node);
        let (service, names, waiting) = offline(&node).await;
        assert_eq!(names, goes_on, "{start_after_reboot:?}");
        for (pod, (name, why)) in waiting.iter().zip(&waits) {
            assert!(pod.name == *name && pod.message.contains(why), "{pod:?}");
            assert_eq!(pod.origin, fleet.keys.pod("default", name));
        }
        assert_eq!(waiting.len(), waits.len());
        service.kill();

        // A restart of the service in this boot decides the same.
        let (service, again, still) = offline(&node).await;
        assert_eq!((again, still.len()), (names, waits.len()));

        // When etcd is back, all are there, and nothing waits.
        fleet.cluster.restart(0).unwrap();
        let (pods, _) = service.watch().await.replay().await;
        assert_eq!(pods.len(), 2);
        assert!(service.sources().await.iter().all(|source| source.waiting.is_empty()));
    }
}

#[tokio::test]
async fn what_is_older_than_the_maximum_age_does_not_start_and_the_first_look_of_a_boot_decides() {
    let mut fleet = Fleet::new();
    let policy = Offline { start_after_reboot: StartAfterReboot::All, max_age_ms: 3_600_000 };
    let node = known_then_away(&mut fleet, policy).await;
    reboot(&node);
    let (service, names, _) = offline(&node).await;
    assert_eq!(names.len(), 2, "etcd was heard a moment ago");
    service.kill();
    let first_look =
        node.config.paths.socket_dir(ServiceName::PodConfig).join("etcd-first-missed-in-this-boot");
    let text = fs::read_to_string(&first_look).unwrap();
    let (looked, boot) = text.split_once(' ').unwrap();
    let looked: i64 = looked.parse().unwrap();

    // As if the machine had started two hours later.
    fs::write(&first_look, format!("{} {boot}", looked + 7200)).unwrap();
    let (_service, names, waiting) = offline(&node).await;
    assert_eq!(names, Vec::<String>::new());
    for pod in &waiting {
        assert!(
            pod.message.contains("it was last heard 2h0m") && pod.message.contains("maxAge is 1h0m0s"),
            "{pod:?}"
        );
    }
}

/// Whether any file below the folder holds the text.
fn holds(folder: &Path, text: &[u8]) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        if path.is_dir() {
            return holds(&path, text);
        }
        fs::read(&path).is_ok_and(|bytes| bytes.windows(text.len()).any(|part| part == text))
    })
}

#[tokio::test]
async fn secrets_outlive_a_restart_without_etcd_and_no_reboot_and_are_never_on_disk() {
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
    // What comes after it has been told of, so both have been taken.
    fleet.put_pod("next", "i:1").await;
    assert_eq!(watch.pod().await.name, "next");
    service.wait_for_rows(5);
    service.kill();
    fleet.cluster.kill(0);

    let mut service = node.start();
    service.wait_for_log("what etcd said last goes on");
    let value = tokio::time::timeout(common::PATIENCE, async {
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
    assert!(holds(&node.config.paths.run_dir, b"xyzzy-3") && holds(state, b"i:1"));
    for text in [&b"xyzzy"[..], b"eHl6enkt"] {
        assert!(!holds(state, text), "a Secret is on the disk");
    }
    assert!(!holds(&node.config.paths.run_dir, b"xyzzy-2") && !holds(&node.config.paths.run_dir, b"xyzzy-1"));

    reboot(&node);
    let mut service = node.start();
    service.wait_for_log("what etcd said last goes on");
    assert!(!holds(&node.config.paths.run_dir, b"xyzzy"));
    assert_eq!(object(&service, "Secret", "own").await, None);
}

#[tokio::test]
async fn where_the_run_folder_is_a_disk_no_secret_is_kept_and_that_is_said_once() {
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
    assert_eq!(service.count_log("the run folder is no tmpfs"), 1);
    assert!(!holds(disk.path(), b"xyzzy"));
}
