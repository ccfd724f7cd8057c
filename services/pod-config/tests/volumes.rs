//! PersistentVolumes and claims from manifests, bound to each other.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;
use std::time::Duration;

use common::fleet::{Fleet, object};
use common::{Node, Service, TIMEOUT, replace};
use keelson_config::{Offline, ServiceName, StartAfterReboot};
use keelson_proto::keelson::pod_config::v1 as pb;
use serde_json::{Value, json};

const VOLUME: &str = "PersistentVolume";
const CLAIM: &str = "PersistentVolumeClaim";

fn volume(name: &str, storage: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec:\n  capacity: {{storage: {storage}}}\n  \
         accessModes: [ReadWriteOnce]\n  hostPath: {{path: /srv/{name}}}\n"
    )
}

fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         resources: {{requests: {{storage: 1Gi}}}}\n"
    )
}

/// Waits until the object of this kind and name fulfils the condition.
async fn wait_for(service: &Service, kind: &str, name: &str, is_done: impl Fn(&Value) -> bool) -> Value {
    let found = tokio::time::timeout(TIMEOUT, async {
        loop {
            if let Some(found) = object(service, kind, name).await.filter(|found| is_done(found)) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    found.await.unwrap_or_else(|_| panic!("{kind} {name} never got to the state"))
}

async fn wait_for_phase(service: &Service, kind: &str, name: &str, phase: &str) -> Value {
    wait_for(service, kind, name, |found| found["status"]["phase"] == phase).await
}

async fn warnings(service: &Service) -> Vec<pb::SourceWarning> {
    service.sources().await.into_iter().flat_map(|source| source.warnings).collect()
}

#[tokio::test]
async fn a_claim_and_a_volume_of_manifests_are_bound_both_ways() {
    let node = Node::new();
    node.write_backdated(
        "volumes.yaml",
        &format!("{}---\n{}", volume("large", "5Gi"), volume("small", "2Gi")),
    );
    node.write_backdated("claim.yaml", &claim("data"));
    let service = node.start();
    let claim = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    assert_eq!(claim["spec"]["volumeName"], "small");
    assert_eq!(claim["status"]["capacity"], json!({"storage": "2Gi"}));
    assert_eq!(claim["status"]["accessModes"], json!(["ReadWriteOnce"]));
    let small = object(&service, VOLUME, "small").await.unwrap();
    assert_eq!(
        (&small["status"]["phase"], &small["spec"]["volumeMode"]),
        (&json!("Bound"), &json!("Filesystem"))
    );
    assert_eq!(small["spec"]["claimRef"]["uid"], claim["metadata"]["uid"]);
    assert_eq!(small["spec"]["claimRef"]["name"], "data");
    let large = object(&service, VOLUME, "large").await.unwrap();
    assert_eq!((&large["status"]["phase"], &large["spec"]["claimRef"]), (&json!("Available"), &Value::Null));
    assert_eq!(object(&service, VOLUME, "none").await, None);
    assert!(warnings(&service).await.is_empty());
}

#[tokio::test]
async fn a_pending_or_lost_claim_is_a_warning_of_its_source() {
    let node = Node::new();
    node.write_backdated("claim.yaml", &claim("data"));
    let service = node.start();
    wait_for_phase(&service, CLAIM, "data", "Pending").await;
    service.watch().await.replay().await;
    let found = warnings(&service).await;
    assert!(found[0].origin.ends_with("claim.yaml") && found[0].line == 1, "{found:?}");
    assert!(found[0].message.contains("default/data is pending: no manifest of this node has"), "{found:?}");

    node.write("volume.yaml", &volume("disk", "1Gi"));
    wait_for_phase(&service, CLAIM, "data", "Bound").await;
    assert!(warnings(&service).await.is_empty());
    fs::remove_file(node.manifest("volume.yaml")).unwrap();
    let lost = wait_for_phase(&service, CLAIM, "data", "Lost").await;
    assert_eq!(lost["spec"]["volumeName"], "disk");
    let found = warnings(&service).await;
    assert!(found[0].message.contains("lost: its PersistentVolume disk"), "{found:?}");
}

#[tokio::test]
async fn applied_volumes_and_claims_are_bound_and_deleted_by_name() {
    let node = Node::new();
    let service = node.start();
    service.watch().await.replay().await;
    service.apply(&format!("{}---\n{}", volume("data", "1Gi"), claim("data"))).await.unwrap();
    wait_for_phase(&service, CLAIM, "data", "Bound").await;
    let stored = node.path("state/pod-config/manifests");
    assert!(stored.join("_data_persistentvolume.json").exists());
    assert!(stored.join("default_data_persistentvolumeclaim.json").exists());
    service.delete("data").await.unwrap();
    assert_eq!(object(&service, CLAIM, "data").await, None);
    let released = object(&service, VOLUME, "data").await.unwrap();
    assert_eq!(
        (&released["status"]["phase"], &released["spec"]["claimRef"]["name"]),
        (&json!("Released"), &json!("data"))
    );
    service.delete("data").await.unwrap();
    assert_eq!(object(&service, VOLUME, "data").await, None);
    let refused = service.apply(&volume("bad", "0")).await.unwrap_err();
    assert!(refused.message().contains("given.yaml:5:14: spec.capacity.storage"), "{}", refused.message());
}

/// A node whose claim `data` was bound to `b`, with or without its binding in the checkpoint.
async fn bound_and_killed(is_stored: bool) -> (Node, Value) {
    let node = Node::new();
    node.write_backdated("b.yaml", &volume("b", "5Gi"));
    node.write_backdated("claim.yaml", &claim("data"));
    let mut service = node.start();
    let before = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    if is_stored {
        // Two rows for each of the two files, and the binding.
        service.wait_for_rows(5);
    }
    service.kill();
    (node, before)
}

#[tokio::test]
async fn after_sigkill_a_stored_binding_is_kept_although_a_better_volume_has_come() {
    let (node, before) = bound_and_killed(true).await;
    assert_eq!(before["spec"]["volumeName"], "b");
    node.write_backdated("a.yaml", &volume("a", "1Gi"));
    for _ in 0..2 {
        let service = node.start();
        assert_eq!(wait_for_phase(&service, CLAIM, "data", "Bound").await, before);
        service.watch().await.replay().await;
        assert_eq!(object(&service, CLAIM, "data").await.unwrap(), before);
        service.kill();
    }
}

#[tokio::test]
async fn after_sigkill_before_the_binding_was_stored_it_is_decided_again() {
    let (node, before) = bound_and_killed(false).await;
    let service = node.start();
    assert_eq!(wait_for_phase(&service, CLAIM, "data", "Bound").await, before);
}

#[tokio::test]
async fn a_released_volume_keeps_its_data_over_a_restart_and_returns_to_its_claim() {
    let (node, before) = bound_and_killed(true).await;
    replace(&node.manifest("claim.yaml"), &claim("other"));
    let mut service = node.start();
    wait_for_phase(&service, VOLUME, "b", "Released").await;
    service.wait_for_event("checkpoint_written");
    service.kill();

    let service = node.start();
    let other = wait_for_phase(&service, CLAIM, "other", "Pending").await;
    assert_eq!(other["spec"]["volumeName"], Value::Null);
    service.watch().await.replay().await;
    let found = warnings(&service).await;
    assert!(found[0].message.contains("b: it holds the data of the claim default/data"), "{found:?}");
    node.write("back.yaml", &claim("data"));
    assert_eq!(wait_for_phase(&service, CLAIM, "data", "Bound").await, before);
}

#[tokio::test]
async fn a_claim_is_not_bound_before_all_sources_were_read() {
    let node = Node::new();
    node.write_backdated("b.yaml", &volume("b", "5Gi"));
    node.write_backdated("claim.yaml", &claim("data"));
    // This file is still being written, so the source is not settled.
    let open = fs::File::create(node.manifest("a.yaml")).unwrap();
    let service = node.start();
    wait_for_phase(&service, CLAIM, "data", "Pending").await;
    let found = warnings(&service).await;
    assert!(found[0].message.contains("not all sources of this node have been read"), "{found:?}");
    fs::write(node.manifest("a.yaml"), volume("a", "1Gi")).unwrap();
    drop(open);
    let bound = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    assert_eq!(bound["spec"]["volumeName"], "a");
}

async fn put_volume(fleet: &Fleet, name: &str) {
    let key = format!("{}objects/PersistentVolume/{name}", fleet.keys.prefix());
    fleet.put(&key, &volume(name, "1Gi")).await;
}

#[tokio::test]
async fn volumes_and_claims_of_etcd_are_bound_and_a_recreated_claim_has_a_new_uid() {
    let fleet = Fleet::new();
    put_volume(&fleet, "disk").await;
    let key = fleet.keys.object(CLAIM, "default", "data");
    fleet.put(&key, &claim("data")).await;
    let wrong = fleet.keys.object(VOLUME, "default", "disk");
    fleet.put(&wrong, &volume("disk", "1Gi")).await;
    let node = fleet.node();
    let service = node.start();
    let first = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    let problems = service.problems().await;
    assert!(problems[0].message.contains("its key is objects/PersistentVolume/<name>"), "{problems:?}");
    fleet.delete(&key).await;
    wait_for_phase(&service, VOLUME, "disk", "Released").await;
    fleet.put(&key, &claim("data")).await;
    let second = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    assert_ne!(second["metadata"]["uid"], first["metadata"]["uid"]);
    let disk = object(&service, VOLUME, "disk").await.unwrap();
    assert_eq!(disk["spec"]["claimRef"]["uid"], second["metadata"]["uid"]);
}

#[tokio::test]
async fn after_a_reboot_without_etcd_a_pod_with_a_claim_to_its_own_node_starts() {
    let mut fleet = Fleet::new();
    put_volume(&fleet, "disk").await;
    fleet.put(&fleet.keys.object(CLAIM, "default", "data"), &claim("data")).await;
    let spec = "spec:\n  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]";
    fleet.put(&fleet.keys.pod("default", "db"), &common::pod("db", "i").replacen("spec:", spec, 1)).await;
    let mut node = fleet.node();
    node.config.offline =
        Offline { start_after_reboot: StartAfterReboot::Stateless, ..node.config.offline.clone() };
    let mut service = node.start();
    let before = wait_for_phase(&service, CLAIM, "data", "Bound").await;
    // Three values, the pod, the binding and the last contact.
    service.wait_for_rows(6);
    service.kill();
    fleet.cluster.kill(0);
    fs::remove_dir_all(&node.config.paths.run_dir).unwrap();
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();

    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    assert_eq!(service.watch().await.pod().await.name, "db");
    assert_eq!(wait_for_phase(&service, CLAIM, "data", "Bound").await, before);
}
