//! PersistentVolumes and claims of a fleet, with a real etcd.

use keelson_etcd::NodeKeys;
use serde_json::{Value, json};

use crate::CommandResult;
use crate::fleet::run;
use crate::fleet_watch::Fleet;

const VOLUME: &str = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: disk}\nspec:\n  capacity: {storage: 20Gi}\n  \
                      accessModes: [ReadWriteOnce]\n  storageClassName: disks\n  hostPath: {path: /srv}\n";
const CLAIM: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: db}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
                     storageClassName: disks\n  volumeName: disk\n  resources: {requests: {storage: 10Gi}}\n";

fn with_file(fleet: &Fleet, verb: &str, text: &str, args: &[&str]) -> CommandResult {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.yaml");
    std::fs::write(&file, text).unwrap();
    run(fleet, &[&[verb, "-f", file.to_str().unwrap()], args].concat())
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "i"}],
                 "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "db"}}]},
    })
}

fn rows(fleet: &Fleet, args: &[&str]) -> Vec<String> {
    let table = run(fleet, args).ok();
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// A fleet of two nodes; the first has a PersistentVolume and a claim.
fn fleet() -> Fleet {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.node("n2");
    assert_eq!(
        with_file(&fleet, "apply", &format!("{CLAIM}---\n{VOLUME}"), &["--node", "n1"]).ok(),
        "persistentvolumeclaim/db created on n1\npersistentvolume/disk created on n1\n"
    );
    fleet
}

#[test]
fn fleet_volumes_and_claims_are_listed_edited_and_deleted() {
    let fleet = fleet();
    assert_eq!(
        rows(&fleet, &["get", "pv"]),
        [
            "NAME CAPACITY ACCESS MODES RECLAIM POLICY CLAIM STORAGECLASS NODE",
            "disk 20Gi RWO Retain disks n1"
        ]
    );
    assert_eq!(
        rows(&fleet, &["get", "pvc/db", "-A"]),
        ["NAMESPACE NAME VOLUME REQUEST ACCESS MODES STORAGECLASS NODE", "default db disk 10Gi RWO disks n1"]
    );
    assert!(
        run(&fleet, &["get", "pv", "--node", "n2"])
            .err
            .contains("No persistentvolumes found on the node n2.")
    );
    let read = run(&fleet, &["get", "pv", "disk", "-o", "yaml"]).ok();
    let edited = read.replace("20Gi", "30Gi");
    assert!(read != edited && read.contains("resourceVersion: ") && !read.contains("namespace"), "{read}");
    assert_eq!(
        with_file(&fleet, "apply", &edited, &["--node", "n1"]).ok(),
        "persistentvolume/disk changed on n1\n"
    );
    let late = with_file(&fleet, "apply", &read, &["--node", "n1"]);
    assert!(
        late.failed(1).0.contains("persistentvolume/disk on n1 has changed since it was read"),
        "{late:?}"
    );

    assert_eq!(run(&fleet, &["delete", "pvc/db"]).ok(), "persistentvolumeclaim/db deleted on n1\n");
    assert_eq!(run(&fleet, &["delete", "pv", "pv/disk"]).ok(), "persistentvolume/disk deleted on n1\n");
    assert!(run(&fleet, &["get", "pvc", "-A"]).err.contains("No persistentvolumeclaims found on any node."));
}

#[test]
fn fleet_volume_watch_shows_what_is_stored_and_each_change_as_an_event() {
    let fleet = fleet();
    let watch = fleet.watch(&["get", "pv"]);
    assert_eq!(watch.words(), "EVENT NAME CAPACITY ACCESS MODES RECLAIM POLICY CLAIM STORAGECLASS NODE");
    assert_eq!(watch.words(), "ADDED disk 20Gi RWO Retain disks n1");
    let documents = fleet.watch(&["get", "pv", "disk", "-o", "json"]);
    let next = || serde_json::from_str::<Value>(&documents.line()).unwrap();
    assert_eq!(next()["spec"]["capacity"]["storage"], "20Gi");
    // Of another kind, and a change that the table does not show.
    let claims = NodeKeys::new("n1").object("PersistentVolumeClaim", "default", "new");
    fleet.put(claims, &json!({"kind": "PersistentVolumeClaim"}), 0);
    let key = |node: &str, name: &str| NodeKeys::new(node).cluster_object("PersistentVolume", name);
    let volume = |size: &str, class: &str| {
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"},
               "spec": {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                        "hostPath": {"path": "/srv"}}})
    };
    let mut labelled = volume("20Gi", "disks");
    labelled["metadata"]["labels"] = json!({"a": "b"});
    fleet.put(key("n1", "disk"), &labelled, 0);
    assert_eq!(next()["metadata"]["labels"]["a"], "b");
    fleet.put(key("n1", "disk"), &volume("30Gi", "disks"), 0);
    assert_eq!(watch.words(), "MODIFIED disk 30Gi RWO Retain disks n1");
    fleet.put(key("n2", "disk"), &volume("5Gi", "fast"), 0);
    assert_eq!(watch.words(), "ADDED disk 5Gi RWO Retain fast n2");
    fleet.delete(key("n1", "disk"));
    assert_eq!(watch.words(), "DELETED disk 30Gi RWO Retain disks n1");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
    assert_eq!(next()["spec"]["capacity"]["storage"], "30Gi");
}

#[test]
fn fleet_claim_watch_is_of_the_namespace_and_refuses_unknown_names() {
    let fleet = fleet();
    let watch = fleet.watch(&["get", "pvc", "-A", "--node", "n1"]);
    assert_eq!(watch.words(), "EVENT NAMESPACE NAME VOLUME REQUEST ACCESS MODES STORAGECLASS NODE");
    assert_eq!(watch.words(), "ADDED default db disk 10Gi RWO disks n1");
    let events = fleet.watch(&["get", "pvc", "db", "-o", "json", "--output-watch-events"]);
    let next = || serde_json::from_str::<Value>(&events.line()).unwrap();
    assert_eq!(next()["type"], "ADDED");
    let put = |node: &str, namespace: &str| {
        let key = NodeKeys::new(node).object("PersistentVolumeClaim", namespace, "db");
        fleet.put(key, &json!({"kind": "PersistentVolumeClaim", "spec": {"volumeName": "new"}}), 0);
    };
    // Of another node, and of another namespace.
    put("n2", "default");
    assert_eq!(next()["type"], "ADDED");
    put("n1", "web");
    assert_eq!(watch.words(), "ADDED web db new n1");
    fleet.delete(NodeKeys::new("n1").object("PersistentVolumeClaim", "default", "db"));
    let deleted = next();
    assert_eq!(
        (&deleted["type"], &deleted["object"]["spec"]["volumeName"]),
        (&json!("DELETED"), &json!("disk"))
    );
    assert_eq!(watch.words(), "DELETED default db disk 10Gi RWO disks n1");

    let endpoints = fleet.cluster.endpoints().join(",");
    let refused = |args: &[&str]| {
        let args = [&["get"], args, &["-w", "--etcd", &endpoints]].concat();
        crate::keelson(std::path::Path::new("/nowhere"), &args)
    };
    let result = refused(&["pvc", "nope"]);
    assert_eq!(result.failed(1).0, "there is no persistentvolumeclaim/nope on any node");
    let result = refused(&["pv", "-n", "web"]);
    assert!(result.failed(64).0.contains("a PersistentVolume has no namespace"), "{result:?}");
    // Secrets are not watched.
    assert_eq!(refused(&["secrets"]).code, Some(64));
}

#[test]
fn fleet_delete_refuses_claims_and_volumes_in_use() {
    let fleet = fleet();
    with_file(&fleet, "apply", &pod("web").to_string(), &["--node", "n1"]).ok();
    // A pod that only terminates uses its claim still.
    fleet.put(NodeKeys::new("n1").pod_status("default", "old"), &pod("old"), 0);
    // A pod of another namespace or node, or one that uses another claim, does not count.
    fleet.put(NodeKeys::new("n1").pod("web", "other"), &pod("other"), 0);
    fleet.put(NodeKeys::new("n2").pod("default", "far"), &pod("far"), 0);
    let result = run(&fleet, &["delete", "pvc", "db"]);
    let hint = "delete them first, for example `keelson delete pod old`";
    assert_eq!(
        result.failed(1),
        ("persistentvolumeclaim/db on n1 is used by the pods old, web", hint),
        "{result:?}"
    );
    let result = run(&fleet, &["delete", "pv", "disk"]);
    assert_eq!(
        result.failed(1),
        (
            "persistentvolume/disk on n1 is bound to the claim default/db",
            "delete the claim first: `keelson delete pvc db -n default`"
        )
    );
    fleet.delete(NodeKeys::new("n1").pod_status("default", "old"));
    let all = format!("{VOLUME}---\n{CLAIM}---\n{}", pod("web"));
    assert_eq!(
        with_file(&fleet, "delete", &all, &["--node", "n1"]).ok(),
        "pod/web deleted on n1\npersistentvolumeclaim/db deleted on n1\npersistentvolume/disk deleted on n1\n"
    );
}

#[test]
fn fleet_delete_never_takes_an_object_of_another_kind() {
    let fleet = fleet();
    for (args, error) in [
        (
            &["delete", "pvc", "disk"][..],
            "there is no persistentvolumeclaim/disk in namespace default on any node",
        ),
        (&["delete", "pv", "db"], "there is no persistentvolume/db on any node"),
        (&["delete", "pod", "db"], "there is no pod/db in namespace default on any node"),
        (
            &["delete", "pvc", "db", "-n", "web"],
            "there is no persistentvolumeclaim/db in namespace web on any node",
        ),
        (&["delete", "pv", "disk", "--node", "n2"], "there is no persistentvolume/disk on n2"),
        (&["get", "pvc", "disk"], "there is no persistentvolumeclaim/disk on any node"),
    ] {
        let result = run(&fleet, args);
        assert_eq!(result.failed(1).0, error, "{args:?}");
    }
    for (args, error) in [
        (&["delete", "pv", "disk", "-n", "web"][..], "takes no -n: a PersistentVolume has no namespace"),
        (&["get", "pv", "-n", "web"], "takes no -n: a PersistentVolume has no namespace"),
        (&["delete", "pvc", "db", "-A"], "`keelson delete` takes no -A"),
    ] {
        let result = run(&fleet, args);
        assert!(result.failed(64).0.contains(error), "{result:?}");
    }
    assert_eq!(rows(&fleet, &["get", "pv"]).len() + rows(&fleet, &["get", "pvc"]).len(), 4);
}

#[test]
fn fleet_apply_refuses_what_the_node_would_refuse() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    for (text, error) in [
        (CLAIM.replace("  accessModes: [ReadWriteOnce]\n", ""), "spec.accessModes: Required value"),
        (VOLUME.replace("20Gi", "0"), "spec.capacity.storage: Invalid value: "),
        (VOLUME.replace("{name: disk}", "{name: disk, namespace: web}"), "metadata.namespace: Forbidden"),
        (
            VOLUME.replace("kind: PersistentVolume", "kind: StorageClass"),
            "\"StorageClass\" of \"v1\" is not a Pod",
        ),
    ] {
        let result = with_file(&fleet, "apply", &text, &[]);
        assert!(result.failed(1).0.contains(error), "{result:?}");
    }
    assert!(run(&fleet, &["get", "pv"]).err.contains("No persistentvolumes found on any node."));
}
