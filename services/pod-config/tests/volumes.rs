//! PersistentVolumes and claims from manifests, bound to each other.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;

use common::fleet::{Fleet, object, wait_for_phase, wait_until, wait_until_deletion_is_stored};
use common::{Node, Service, replace};
use keelson_config::{Offline, ServiceName, StartAfterReboot};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_service_kit::status::reason;
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
    let mut service = node.start();
    let claim = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
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
    let mut service = node.start();
    wait_for_phase(&mut service, CLAIM, "data", "Pending").await;
    service.watch().await.replay().await;
    let found = warnings(&service).await;
    assert!(found[0].origin.ends_with("claim.yaml") && found[0].line == 1, "{found:?}");
    assert!(found[0].message.contains("default/data is pending: no manifest of this node has"), "{found:?}");

    node.write("volume.yaml", &volume("disk", "1Gi"));
    wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    assert!(warnings(&service).await.is_empty());
    fs::remove_file(node.manifest("volume.yaml")).unwrap();
    let lost = wait_for_phase(&mut service, CLAIM, "data", "Lost").await;
    assert_eq!(lost["spec"]["volumeName"], "disk");
    let found = warnings(&service).await;
    assert!(found[0].message.contains("lost: its PersistentVolume disk"), "{found:?}");
}

#[tokio::test]
async fn applied_volumes_and_claims_are_bound_and_deleted_by_name() {
    let node = Node::new();
    let mut service = node.start();
    service.watch().await.replay().await;
    service.apply(&format!("{}---\n{}", volume("data", "1Gi"), claim("data"))).await.unwrap();
    wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    let stored = node.path("state/pod-config/manifests");
    assert!(stored.join("_data_persistentvolume.json").exists());
    assert!(stored.join("default_data_persistentvolumeclaim.json").exists());
    let ambiguous = service.delete("data").await.unwrap_err();
    assert_eq!(
        (reason(&ambiguous).as_deref(), ambiguous.message()),
        (
            Some("KIND_AMBIGUOUS"),
            "data is the name of the PersistentVolumeClaim default/data and the PersistentVolume data; name the kind of \
             the one to delete"
        )
    );
    service.delete_kind(CLAIM, "data").await.unwrap();
    assert_eq!(object(&service, CLAIM, "data").await, None);
    // A repeated deletion of the claim leaves the PersistentVolume alone.
    let gone = service.delete_kind(CLAIM, "data").await.unwrap_err();
    assert_eq!(reason(&gone).as_deref(), Some("OBJECT_UNKNOWN"), "{gone:?}");
    assert!(
        gone.message().starts_with("no manifest of the PersistentVolumeClaim default/data is stored; "),
        "{gone:?}"
    );
    let released = object(&service, VOLUME, "data").await.unwrap();
    assert_eq!(
        (&released["status"]["phase"], &released["spec"]["claimRef"]["name"]),
        (&json!("Released"), &json!("data"))
    );
    service.delete_kind(VOLUME, "data").await.unwrap();
    assert_eq!(object(&service, VOLUME, "data").await, None);
    let refused = service.apply(&volume("bad", "0")).await.unwrap_err();
    assert!(refused.message().contains("given.yaml:5:14: spec.capacity.storage"), "{}", refused.message());
}

/// A node whose claim `data` was bound to `b`, and whose service was killed as soon as somebody had seen that.
async fn bound_and_killed() -> (Node, Value) {
    let node = Node::new();
    node.write_backdated("b.yaml", &volume("b", "5Gi"));
    node.write_backdated("claim.yaml", &claim("data"));
    let mut service = node.start();
    let before = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    service.kill();
    assert_eq!(before["spec"]["volumeName"], "b");
    (node, before)
}

#[tokio::test]
async fn after_sigkill_a_binding_is_kept_although_a_better_volume_has_come() {
    let (node, before) = bound_and_killed().await;
    node.write_backdated("a.yaml", &volume("a", "1Gi"));
    for _ in 0..2 {
        let mut service = node.start();
        assert_eq!(wait_for_phase(&mut service, CLAIM, "data", "Bound").await, before);
        service.watch().await.replay().await;
        assert_eq!(object(&service, CLAIM, "data").await.unwrap(), before);
        service.kill();
    }
}

#[tokio::test]
async fn a_claim_is_pending_as_long_as_its_binding_cannot_be_stored() {
    let node = Node::new();
    node.write_backdated("volume.yaml", &volume("disk", "1Gi"));
    node.write_backdated("claim.yaml", &claim("data"));
    // The temporary file cannot be written.
    let obstacle = node.path("state/pod-config/bindings.json.new");
    fs::create_dir_all(&obstacle).unwrap();
    let mut service = node.start();
    let message =
        |claim: &Value| claim["status"]["conditions"][0]["message"].as_str().unwrap_or_default().to_owned();
    let found = wait_until(&mut service, CLAIM, "data", |found| {
        found.is_some_and(|claim| message(claim).contains("bindings.json.new"))
    });
    let found = found.await.unwrap();
    assert_eq!((&found["status"]["phase"], &found["spec"]["volumeName"]), (&json!("Pending"), &Value::Null));
    let disk = object(&service, VOLUME, "disk").await.unwrap();
    assert_eq!((&disk["status"]["phase"], &disk["spec"]["claimRef"]), (&json!("Available"), &Value::Null));
    let condition = service.condition("bindings").await.unwrap();
    assert!(!condition.ok && condition.message.contains("cannot write"), "{condition:?}");
    let found = warnings(&service).await;
    assert!(found[0].message.contains("default/data is pending: cannot write"), "{found:?}");

    fs::remove_dir(&obstacle).unwrap();
    node.write("other.yaml", &volume("other", "2Gi"));
    let bound = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    assert_eq!(bound["spec"]["volumeName"], "disk");
    assert!(warnings(&service).await.is_empty());
}

#[tokio::test]
async fn a_lost_checkpoint_changes_no_binding() {
    let (node, before) = bound_and_killed().await;
    node.write_backdated("a.yaml", &volume("a", "1Gi"));
    for lose in [
        |node: &Node| fs::write(node.checkpoint(), "garbage that is no database"),
        |node: &Node| fs::remove_file(node.checkpoint()),
    ] {
        lose(&node).unwrap();
        let mut service = node.start();
        assert_eq!(wait_for_phase(&mut service, CLAIM, "data", "Bound").await, before);
        service.watch().await.replay().await;
        service.wait_for_event("checkpoint_written");
        service.kill();
    }
}

#[tokio::test]
async fn after_a_loss_of_the_bindings_a_claim_waits_until_its_volume_is_named() {
    let (node, before) = bound_and_killed().await;
    node.write_backdated("a.yaml", &volume("a", "1Gi"));
    let file = node.path("state/pod-config/bindings.json");
    fs::write(&file, "garbage").unwrap();
    for _ in 0..2 {
        let mut service = node.start();
        service.watch().await.replay().await;
        let found = wait_for_phase(&mut service, CLAIM, "data", "Pending").await;
        let message = found["status"]["conditions"][0]["message"].as_str().unwrap().to_owned();
        assert!(
            message.contains("the data of the claim default/data; write its name in spec.volumeName"),
            "{message}"
        );
        service.kill();
    }
    assert_eq!(fs::read_to_string(node.path("state/pod-config/bindings.broken")).unwrap(), "garbage");
    let named = claim("data") + "  volumeName: b\n";
    replace(&node.manifest("claim.yaml"), &named);
    let mut service = node.start();
    let bound = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    assert_eq!(bound["metadata"]["uid"], before["metadata"]["uid"]);
    // A claim that is added after the loss waits as well, until a person has ended it.
    node.write("new.yaml", &claim("new"));
    wait_for_phase(&mut service, CLAIM, "new", "Pending").await;
    service.kill();
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("\"lost\": true", "\"lost\": false")).unwrap();
    let mut service = node.start();
    assert_eq!(wait_for_phase(&mut service, CLAIM, "new", "Bound").await["spec"]["volumeName"], "a");
}

#[tokio::test]
async fn a_deleted_claim_stays_bound_until_no_pod_uses_it() {
    let (node, before) = bound_and_killed().await;
    let volumes = "spec:\n  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]";
    node.write_backdated("pod.yaml", &common::pod("db", "i").replacen("spec:", volumes, 1));
    let mut service = node.start();
    service.watch().await.replay().await;
    wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    let is_deleted =
        |found: Option<&Value>| found.is_some_and(|it| it["metadata"]["deletionTimestamp"].is_string());
    let deleted = wait_until(&mut service, CLAIM, "data", is_deleted).await.unwrap();
    assert_eq!(deleted["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]));
    assert_eq!((&deleted["spec"], &deleted["status"]), (&before["spec"], &before["status"]));
    wait_until_deletion_is_stored(&node, &mut service);
    service.kill();

    let mut service = node.start();
    service.watch().await.replay().await;
    let after = wait_until(&mut service, CLAIM, "data", |found| {
        is_deleted(found) && found.is_some_and(|it| it["status"]["phase"] == "Bound")
    });
    assert_eq!(after.await.unwrap(), deleted);
    let disk = object(&service, VOLUME, "b").await.unwrap();
    assert_eq!(
        (&disk["status"]["phase"], &disk["spec"]["claimRef"]["name"]),
        (&json!("Bound"), &json!("data"))
    );
    fs::remove_file(node.manifest("pod.yaml")).unwrap();
    wait_for_phase(&mut service, VOLUME, "b", "Released").await;
    assert_eq!(object(&service, CLAIM, "data").await, None);
}

#[tokio::test]
async fn a_released_volume_is_free_after_its_manifest_was_removed_and_added_again() {
    let (node, _) = bound_and_killed().await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    let mut service = node.start();
    wait_for_phase(&mut service, VOLUME, "b", "Released").await;
    let edited = volume("b", "5Gi").replacen("name: b", "name: b, annotations: {edited: today}", 1);
    replace(&node.manifest("b.yaml"), &edited);
    let is_edited =
        |found: Option<&Value>| found.is_some_and(|it| it["metadata"]["annotations"]["edited"] == "today");
    let found = wait_until(&mut service, VOLUME, "b", is_edited).await.unwrap();
    assert_eq!(found["status"]["phase"], "Released");
    fs::remove_file(node.manifest("b.yaml")).unwrap();
    wait_until(&mut service, VOLUME, "b", |found| found.is_none()).await;
    node.write("b.yaml", &edited);
    wait_for_phase(&mut service, VOLUME, "b", "Available").await;
}

#[tokio::test]
async fn a_released_volume_keeps_its_data_over_a_restart_and_returns_to_its_claim() {
    let (node, before) = bound_and_killed().await;
    replace(&node.manifest("claim.yaml"), &claim("other"));
    let mut service = node.start();
    wait_for_phase(&mut service, VOLUME, "b", "Released").await;
    service.kill();

    let mut service = node.start();
    let other = wait_for_phase(&mut service, CLAIM, "other", "Pending").await;
    assert_eq!(other["spec"]["volumeName"], Value::Null);
    service.watch().await.replay().await;
    let found = warnings(&service).await;
    assert!(found[0].message.contains("b: it holds the data of the claim default/data"), "{found:?}");
    node.write("back.yaml", &claim("data"));
    let back = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    assert_eq!((&back["spec"], &back["status"]), (&before["spec"], &before["status"]));
    assert_eq!(back["metadata"]["uid"], before["metadata"]["uid"]);
}

#[tokio::test]
async fn the_age_of_volumes_and_claims_survives_sigkill_and_ends_with_the_object() {
    let (node, before) = bound_and_killed().await;
    let first = "2020-01-01T00:00:00Z";
    assert!(before["metadata"]["creationTimestamp"].as_str().unwrap() > first, "{before}");
    // As if it were long ago.
    let file = node.path("state/pod-config/bindings.json");
    let mut records: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let times = records["first_seen"].as_object_mut().unwrap();
    assert_eq!(times.len(), 2, "{times:?}");
    times.values_mut().for_each(|time| *time = json!(first));
    fs::write(&file, records.to_string()).unwrap();
    for _ in 0..2 {
        let mut service = node.start();
        let found = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
        assert_eq!(found["metadata"]["creationTimestamp"], first);
        let disk = object(&service, VOLUME, "b").await.unwrap();
        assert_eq!(disk["metadata"]["creationTimestamp"], first);
        service.kill();
    }
    let mut service = node.start();
    service.watch().await.replay().await;
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    wait_for_phase(&mut service, VOLUME, "b", "Released").await;
    service.wait_for_event("bindings_written");
    node.write("claim.yaml", &claim("data"));
    let again = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    assert!(again["metadata"]["creationTimestamp"].as_str().unwrap() > first, "{again}");
}

/// The next message about a PersistentVolume or claim, as `name phase`, `name gone` or `synced`.
async fn next_object(stream: &mut tonic::Streaming<pb::WatchVolumeObjectsResponse>) -> String {
    use pb::watch_volume_objects_response::Item;
    match stream.message().await.unwrap().unwrap().item.unwrap() {
        Item::ObjectJson(json) => {
            let object: Value = serde_json::from_slice(&json).unwrap();
            let text = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            format!("{} {}", text("/metadata/name"), text("/status/phase"))
        }
        Item::Gone(pb::ObjectReference { name, .. }) => format!("{name} gone"),
        Item::Synced(_) => "synced".into(),
    }
}

#[tokio::test]
async fn volumes_and_claims_are_followed_by_kind_until_the_service_ends() {
    let (node, _) = bound_and_killed().await;
    let service = node.start();
    let follow = async |kind: &str| {
        let request = pb::WatchVolumeObjectsRequest { kind: kind.into() };
        service.client().watch_volume_objects(request).await.map(tonic::Response::into_inner)
    };
    let mut claims = follow(CLAIM).await.unwrap();
    let mut volumes = follow(VOLUME).await.unwrap();
    for (stream, expected) in [(&mut claims, "data Bound"), (&mut volumes, "b Bound")] {
        // Before all sources were read, it may be shown in passing.
        let mut last = String::new();
        loop {
            match next_object(stream).await.as_str() {
                "synced" => break,
                item => item.clone_into(&mut last),
            }
        }
        assert_eq!(last, expected);
    }
    fs::remove_file(node.manifest("claim.yaml")).unwrap();
    assert_eq!(next_object(&mut claims).await, "data gone");
    assert_eq!(next_object(&mut volumes).await, "b Released");
    node.write("new.yaml", &claim("new"));
    assert_eq!(next_object(&mut claims).await, "new Pending");
    for kind in ["", "Secret", "persistentvolume"] {
        let refused = follow(kind).await.unwrap_err();
        let found = (refused.code(), reason(&refused));
        assert_eq!(found, (tonic::Code::InvalidArgument, Some("KIND_NOT_LISTED".to_owned())), "{kind}");
    }
    assert_eq!(service.end(), Some(0));
    while claims.message().await.unwrap().is_some() {}
}

#[tokio::test]
async fn a_claim_is_not_bound_before_all_sources_were_read() {
    let node = Node::new();
    node.write_backdated("b.yaml", &volume("b", "5Gi"));
    node.write_backdated("claim.yaml", &claim("data"));
    // This file is still being written, so the source is not settled.
    let open = fs::File::create(node.manifest("a.yaml")).unwrap();
    let mut service = node.start();
    wait_for_phase(&mut service, CLAIM, "data", "Pending").await;
    let found = warnings(&service).await;
    assert!(found[0].message.contains("not all sources of this node have been read"), "{found:?}");
    fs::write(node.manifest("a.yaml"), volume("a", "1Gi")).unwrap();
    drop(open);
    let bound = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
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
    let mut service = node.start();
    let first = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    let problems = service.problems().await;
    assert!(problems[0].message.contains("its key is objects/PersistentVolume/<name>"), "{problems:?}");
    fleet.delete(&key).await;
    wait_for_phase(&mut service, VOLUME, "disk", "Released").await;
    fleet.put(&key, &claim("data")).await;
    let second = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
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
    // Three values, the pod and the last contact.
    service.wait_for_rows(5);
    let before = wait_for_phase(&mut service, CLAIM, "data", "Bound").await;
    service.kill();
    fleet.cluster.kill(0);
    fs::remove_dir_all(&node.config.paths.run_dir).unwrap();
    fs::create_dir_all(node.config.paths.socket_dir(ServiceName::PodConfig)).unwrap();

    let mut service = node.start();
    service.wait_for_event("offline_state_restored");
    assert_eq!(service.watch().await.pod().await.name, "db");
    assert_eq!(wait_for_phase(&mut service, CLAIM, "data", "Bound").await, before);
}
