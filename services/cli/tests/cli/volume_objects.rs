//! PersistentVolumes and claims of one agent: `apply`, `get` and `delete`.

use std::path::Path;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::pod_sync::v1::PodDocument;
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::{CommandResult, document, keelson, world};

pub fn volume(name: &str, status: &Value, more: &Value) -> Value {
    let mut volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "20Gi"}, "accessModes": ["ReadWriteOnce", "ReadOnlyMany"],
            "local": {"path": "/srv"}, "fromTheFuture": [1],
        },
        "status": status,
    });
    volume["spec"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    volume
}

pub fn claim(namespace: &str, name: &str, status: &Value, more: &Value) -> Value {
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
        "status": status,
    });
    claim["spec"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claim
}

/// A pod that mounts the claim.
fn pod_with_claim(name: &str, uid: &str, claim: &str) -> PodDocument {
    document(
        "default",
        name,
        uid,
        json!({
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"nodeName": "edge", "containers": [{"name": "c"}],
                     "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]},
        }),
    )
}

/// An agent whose pod `web-edge` uses the claim `db`, which has the PersistentVolume `db`; `disk` is free.
pub fn world_with_claims() -> World {
    let bound = json!({"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "20Gi"}});
    let unbound = json!({"type": "Bound", "status": "False", "message": "no manifest of this node has a PersistentVolume; add one"});
    let mut world = world();
    world.pods[0] = pod_with_claim("web-edge", "u1", "db");
    world.volume_objects = Some(vec![
        volume(
            "db",
            &json!({"phase": "Bound"}),
            &json!({"claimRef": {"namespace": "default", "name": "db"}, "storageClassName": "disks"}),
        ),
        volume("disk", &json!({"phase": "Available"}), &json!({"volumeMode": "Block"})),
        claim("default", "db", &bound, &json!({"volumeName": "db", "storageClassName": "disks"})),
        claim("default", "idle", &json!({"phase": "Pending", "conditions": [unbound]}), &json!({})),
        claim("system", "cache", &json!({"phase": "Lost"}), &json!({"volumeName": "gone"})),
    ]);
    world
}

/// The lines of a table, with single spaces.
fn rows(fake: &Fake, args: &[&str]) -> Vec<String> {
    let table = keelson(&fake.run_dir, args).ok();
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// The calls that delete something.
fn deletions(fake: &Fake) -> Vec<String> {
    fake.world.calls.all().into_iter().filter(|call| call.starts_with("delete ")).collect()
}

fn delete_file(fake: &Fake, objects: &[Value]) -> CommandResult {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    let documents: Vec<String> = objects.iter().map(|object| format!("{object}\n")).collect();
    std::fs::write(&file, documents.join("---\n")).unwrap();
    keelson(&fake.run_dir, &["delete", "-f", file.to_str().unwrap()])
}

#[test]
fn claims_are_shown_with_their_volume_and_why_they_are_not_bound() {
    let fake = Fake::start(world_with_claims());
    let header = "NAME STATUS VOLUME CAPACITY ACCESS MODES STORAGECLASS AGE REASON";
    let bound = "db Bound db 20Gi RWO disks <unknown>";
    let pending = "idle Pending <unknown> no manifest of this node has a PersistentVolume; add one";
    assert_eq!(rows(&fake, &["get", "pvc"]), [header, bound, pending]);
    for name in ["pvc/db", "persistentvolumeclaim/db", "persistentvolumeclaims/db"] {
        assert_eq!(rows(&fake, &["get", name]), [header, bound], "{name}");
    }
    assert_eq!(rows(&fake, &["get", "pvc", "pvc/db", "idle"]), [header, bound, pending]);
    assert_eq!(
        rows(&fake, &["get", "pvc", "-A", "-o", "wide"]),
        [
            "NAMESPACE NAME STATUS VOLUME CAPACITY ACCESS MODES STORAGECLASS AGE VOLUMEMODE REASON",
            "default db Bound db 20Gi RWO disks <unknown> Filesystem",
            "default idle Pending <unknown> Filesystem no manifest of this node has a PersistentVolume; add one",
            "system cache Lost gone <unknown> Filesystem the PersistentVolume gone is gone",
        ]
    );
    let one = keelson(&fake.run_dir, &["get", "pvc", "db", "-o", "json"]).json();
    assert_eq!((&one["kind"], &one["spec"]["volumeName"]), (&json!("PersistentVolumeClaim"), &json!("db")));
    let list = keelson(&fake.run_dir, &["get", "pvc", "-o", "json"]).json();
    assert_eq!((&list["kind"], list["items"].as_array().map(Vec::len)), (&json!("List"), Some(2)));
}

#[test]
fn volumes_are_shown_with_the_claim_that_has_them() {
    let fake = Fake::start(world_with_claims());
    let header = "NAME CAPACITY ACCESS MODES RECLAIM POLICY STATUS CLAIM STORAGECLASS AGE";
    let bound = "db 20Gi RWO,ROX Retain Bound default/db disks <unknown>";
    assert_eq!(rows(&fake, &["get", "pv"]), [header, bound, "disk 20Gi RWO,ROX Retain Available <unknown>"]);
    assert_eq!(rows(&fake, &["get", "pv/db"]), [header, bound]);
    assert_eq!(
        rows(&fake, &["get", "persistentvolumes", "disk", "-o", "wide"])[1],
        "disk 20Gi RWO,ROX Retain Available <unknown> Block"
    );
    let yaml = keelson(&fake.run_dir, &["get", "pv", "disk", "-o", "yaml"]).ok();
    assert!(yaml.contains("kind: PersistentVolume\n") && yaml.contains("fromTheFuture"), "{yaml}");
}

#[test]
fn get_of_an_unknown_volume_or_claim_is_an_error_with_names() {
    let fake = Fake::start(world_with_claims());
    for (args, error, hint) in [
        (
            &["get", "pvc", "idel"][..],
            "there is no persistentvolumeclaim/idel in namespace default",
            "did you mean idle? ",
        ),
        (
            &["get", "pvc", "cache"],
            "there is no persistentvolumeclaim/cache in namespace default",
            "there is persistentvolumeclaim/cache in namespace system: -n system; ",
        ),
        (&["get", "pvc", "x", "-A"], "there is no persistentvolumeclaim/x in any namespace", ""),
        (&["get", "pv", "disc"], "there is no persistentvolume/disc", "did you mean disk? "),
    ] {
        let result = keelson(&fake.run_dir, args);
        let (found, try_this) = result.failed(1);
        assert_eq!(found, error);
        assert!(try_this.starts_with(hint) && try_this.contains("lists all persistentvolume"), "{result:?}");
    }
    let result = keelson(&fake.run_dir, &["get", "pv", "-n", "web"]);
    assert!(result.failed(64).0.contains("a PersistentVolume has no namespace"), "{result:?}");
    let none = Fake::start(World { volume_objects: Some(Vec::new()), ..world() });
    assert!(keelson(&none.run_dir, &["get", "pvc"]).err.contains("No persistentvolumeclaims found."));
    assert_eq!(keelson(&none.run_dir, &["get", "pv", "-o", "json"]).json()["items"], json!([]));
}

#[test]
fn a_deleted_claim_or_volume_is_named_with_its_kind() {
    let mut world = world_with_claims();
    world.pods.remove(0);
    let fake = Fake::start(world);
    for name in ["db", "pvc/db", "persistentvolumeclaim/db"] {
        let result = keelson(&fake.run_dir, &["delete", "pvc", name]);
        assert_eq!(result.ok(), "persistentvolumeclaim/db deleted\n");
    }
    let result = keelson(&fake.run_dir, &["delete", "pvc", "cache", "-n", "system"]);
    assert_eq!(result.ok(), "persistentvolumeclaim/cache deleted\n");
    assert_eq!(keelson(&fake.run_dir, &["delete", "pv/disk"]).ok(), "persistentvolume/disk deleted\n");
    let claim = "delete PersistentVolumeClaim default/db";
    assert_eq!(
        deletions(&fake),
        [claim, claim, claim, "delete PersistentVolumeClaim system/cache", "delete PersistentVolume /disk"]
    );
}

#[test]
fn objects_in_use_and_unknown_ones_are_not_deleted() {
    let fake = Fake::start(world_with_claims());
    for (args, code, error, hint) in [
        (
            &["delete", "pvc", "db"][..],
            1,
            "persistentvolumeclaim/db is used by the pod web-edge",
            "delete it first, for example `keelson delete pod web-edge`",
        ),
        (
            &["delete", "pv", "db"],
            1,
            "persistentvolume/db is bound to the claim default/db",
            "delete the claim first: `keelson delete pvc db -n default`",
        ),
        (
            &["delete", "pvc", "disk"],
            1,
            "there is no persistentvolumeclaim/disk in namespace default",
            "`keelson get persistentvolumeclaims -A` lists all persistentvolumeclaims",
        ),
        (
            &["delete", "pvc", "pv/disk"],
            1,
            "there is no persistentvolumeclaim/pv/disk in namespace default",
            "",
        ),
        (&["delete", "pvc", "cache"], 1, "there is no persistentvolumeclaim/cache in namespace default", ""),
        (&["delete", "pv", "idle"], 1, "there is no persistentvolume/idle", ""),
        (&["delete", "pvc", "db", "-A"], 64, "`keelson delete persistentvolumeclaim` takes no -A", ""),
        (
            &["delete", "pv", "disk", "-n", "web"],
            64,
            "`keelson delete persistentvolume` takes no -n: a PersistentVolume has no namespace",
            "leave -n out",
        ),
        (
            &["delete", "-f", "x", "pv", "disk"],
            64,
            "objects are named both on the command line and with -f",
            "use one of the two",
        ),
    ] {
        let result = keelson(&fake.run_dir, args);
        let (found, try_this) = result.failed(code);
        assert_eq!(found, error);
        assert!(try_this.starts_with(hint), "{result:?}");
    }
    assert_eq!(keelson(&fake.run_dir, &["delete", "service", "x"]).code, Some(64));
    assert_eq!(deletions(&fake), Vec::<String>::new());
    let several = keelson(&fake.run_dir, &["delete", "pvc", "db", "none", "idle"]);
    assert_eq!(several.failed(1).0, "2 of 3 failed");
    assert_eq!(several.out, "persistentvolumeclaim/idle deleted\n");
}

#[test]
fn delete_by_file_takes_pods_before_claims_and_claims_before_volumes() {
    let mut world = world_with_claims();
    // The claim of this PersistentVolume is gone, and its release is not shown yet.
    world.volume_objects.as_mut().unwrap()[0]["spec"]["claimRef"]["name"] = json!("gone");
    let fake = Fake::start(world);
    let none = json!({});
    let objects = [
        volume("db", &none, &none),
        claim("", "db", &none, &none),
        json!({"kind": "Pod", "metadata": {"name": "web"}}),
    ];
    assert_eq!(
        delete_file(&fake, &objects).ok(),
        "pod/web-edge deleted\npersistentvolumeclaim/db deleted\npersistentvolume/db deleted\n"
    );
    assert_eq!(
        deletions(&fake),
        [
            "delete Pod default/web-edge",
            "delete PersistentVolumeClaim default/db",
            "delete PersistentVolume /db"
        ]
    );
    // Again, without the pod: the claim is in use, and the volume is deleted all the same.
    let result = delete_file(&fake, &objects[..2]);
    assert_eq!(result.failed(1).0, "persistentvolumeclaim/db is used by the pod web-edge");
    assert_eq!(result.out, "persistentvolume/db deleted\n");
}

#[test]
fn applied_volumes_and_claims_are_printed() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    let none = json!({});
    let documents = [volume("disk", &none, &none), claim("web", "db", &none, &none)];
    std::fs::write(&file, format!("{}\n---\n{}\n", documents[0], documents[1])).unwrap();
    let path = file.to_str().unwrap();
    assert_eq!(
        keelson(&fake.run_dir, &["apply", "-f", path]).ok(),
        "pod/web-edge created\npersistentvolumeclaim/db stored\npersistentvolume/disk stored\n"
    );
    let json = keelson(&fake.run_dir, &["apply", "-f", path, "-o", "json"]).json();
    let stored = |index: usize| json["items"][index].clone();
    assert_eq!(
        (&stored(1)["kind"], &stored(1)["namespace"]),
        (&json!("PersistentVolumeClaim"), &json!("web"))
    );
    assert_eq!((&stored(2)["name"], stored(2).get("namespace")), (&json!("disk"), None));
}

#[test]
fn a_claim_is_not_deleted_while_pod_sync_does_not_say_who_uses_it() {
    let names = [ServiceName::PodConfig, ServiceName::Init];
    let fake = Fake::start_some(world_with_claims(), &names, &Config::default());
    let result = keelson(&fake.run_dir, &["delete", "pvc", "idle"]);
    assert!(result.failed(69).0.starts_with("pod-sync is not running"), "{result:?}");
    assert_eq!(deletions(&fake), Vec::<String>::new());
    // Nobody else than claims uses a PersistentVolume.
    assert_eq!(keelson(&fake.run_dir, &["delete", "pv", "disk"]).ok(), "persistentvolume/disk deleted\n");
}

#[test]
fn an_agent_of_an_older_release_is_asked_for_no_deletion_by_kind() {
    let fake = Fake::start(world());
    for args in [&["delete", "pvc", "web"][..], &["delete", "pv", "web"], &["get", "pvc"]] {
        let result = keelson(&fake.run_dir, args);
        assert!(result.failed(1).0.contains("it is older than this command"), "{result:?}");
    }
    let map = [json!({"kind": "ConfigMap", "metadata": {"name": "web"}})];
    let result = delete_file(&fake, &map);
    assert!(result.failed(1).0.contains("has the name of the pod web-edge"), "{result:?}");
    assert_eq!(deletions(&fake), Vec::<String>::new());

    let newer = Fake::start(world_with_claims());
    assert_eq!(delete_file(&newer, &map).ok(), "configmap/web deleted\n");
    assert_eq!(deletions(&newer), ["delete ConfigMap default/web"]);
}

#[test]
fn claims_without_an_agent_are_an_error_with_a_hint() {
    let result = keelson(Path::new("/nonexistent"), &["get", "pvc"]);
    assert!(result.failed(69).0.starts_with("the agent is not running"), "{result:?}");
}
