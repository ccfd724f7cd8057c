//! `get pv` and `get pvc` with `--watch`: changes are shown once, also across restarts of pod-config.

use std::os::unix::net::UnixListener;
use std::path::Path;

use keelson_config::{Config, Paths, ServiceName};
use keelson_proto::keelson::pod_config::v1::{
    ObjectReference, WatchVolumeObjectsResponse, watch_volume_objects_response::Item,
};
use keelson_testkit::fakes::StreamAnswer;
use serde_json::{Value, json};
use tonic::Status;

use crate::fake::answers::{volume_object_is, volume_objects_synced};
use crate::fake::{Fake, World};
use crate::running::Running;
use crate::volume_objects::{claim, volume, world_with_claims};
use crate::{keelson, world};

const HEADER: &str = "NAME STATUS VOLUME CAPACITY ACCESS MODES STORAGECLASS AGE REASON";
const DB: &str = "db Bound db 20Gi RWO disks <unknown>";
const IDLE: &str = "idle Pending <unknown> no manifest of this node has a PersistentVolume; add one";

fn gone(kind: &str, namespace: &str, name: &str) -> WatchVolumeObjectsResponse {
    let reference = ObjectReference { kind: kind.into(), namespace: namespace.into(), name: name.into() };
    WatchVolumeObjectsResponse { item: Some(Item::Gone(reference)) }
}

fn claim_gone(name: &str) -> WatchVolumeObjectsResponse {
    gone("PersistentVolumeClaim", "default", name)
}

fn bound(name: &str, volume: &str) -> Value {
    let status = json!({"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "20Gi"}});
    claim("default", name, &status, &json!({"volumeName": volume}))
}

fn pending(name: &str) -> Value {
    claim("default", name, &json!({"phase": "Pending"}), &json!({}))
}

/// Waits until the command follows the objects.
fn wait_for_stream(fake: &Fake) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(fake.services.pod_config.watch_volume_objects.until_open(|open| open > 0));
}

/// Starts the command and waits for these first lines.
fn start(fake: &Fake, args: &[&str], first: &[&str]) -> Running {
    let watch = Running::start(&fake.run_dir, args);
    for line in first {
        assert_eq!(watch.words(), *line);
    }
    wait_for_stream(fake);
    watch
}

#[test]
fn claim_watch_shows_claims_and_each_change() {
    let fake = Fake::start(world_with_claims());
    let watch = start(&fake, &["get", "pvc", "-w"], &[HEADER, DB, IDLE]);
    let updates = &fake.services.pod_config.watch_volume_objects;
    // Of another namespace, and a change that the table does not show.
    updates.push(volume_object_is(&claim("system", "cache", &json!({"phase": "Bound"}), &json!({}))));
    let mut labelled = bound("db", "db");
    labelled["spec"]["storageClassName"] = json!("disks");
    labelled["metadata"]["labels"] = json!({"a": "b"});
    updates.push(volume_object_is(&labelled));
    updates.push(volume_object_is(&bound("idle", "disk")));
    assert_eq!(watch.words(), "idle Bound disk 20Gi RWO <unknown>");
    let mut deleted = bound("idle", "disk");
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    updates.push(volume_object_is(&deleted));
    assert_eq!(watch.words(), "idle Terminating disk 20Gi RWO <unknown>");
    updates.push(claim_gone("idle"));
    assert_eq!(watch.words(), "idle Deleted disk 20Gi RWO <unknown>");
    // Never shown.
    updates.push(gone("PersistentVolumeClaim", "system", "cache"));
    updates.push(volume_object_is(&pending("new")));
    assert_eq!(watch.words(), "new Pending <unknown>");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn volume_watch_in_each_format_shows_each_change_in_it() {
    let fake = Fake::start(world_with_claims());
    let header = "EVENT NAME CAPACITY ACCESS MODES RECLAIM POLICY STATUS CLAIM STORAGECLASS AGE VOLUMEMODE";
    let wide = ["get", "pv", "disk", "-w", "-o", "wide", "--output-watch-events"];
    let wide = start(&fake, &wide, &[header, "ADDED disk 20Gi RWO,ROX Retain Available <unknown> Block"]);
    let json = Running::start(&fake.run_dir, &["get", "pv", "disk", "-w", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&json.line()).unwrap()["status"]["phase"], "Available");
    let events = Running::start(&fake.run_dir, &["get", "pv", "-w", "-o", "json", "--output-watch-events"]);
    let next = || serde_json::from_str::<Value>(&events.line()).unwrap();
    for name in ["db", "disk"] {
        let first = next();
        assert_eq!((&first["type"], &first["object"]["metadata"]["name"]), (&json!("ADDED"), &json!(name)));
    }
    let yaml = Running::start(&fake.run_dir, &["get", "pv", "disk", "-w", "-o", "yaml"]);
    assert_eq!(yaml.line(), "---");
    let updates = &fake.services.pod_config.watch_volume_objects;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(updates.until_open(|open| open == 4));

    let mut taken = volume("disk", &json!({"phase": "Bound"}), &json!({"volumeMode": "Block"}));
    taken["spec"]["claimRef"] = json!({"namespace": "web", "name": "db"});
    updates.push(volume_object_is(&taken));
    assert_eq!(wide.words(), "MODIFIED disk 20Gi RWO,ROX Retain Bound web/db <unknown> Block");
    assert_eq!(serde_json::from_str::<Value>(&json.line()).unwrap()["status"]["phase"], "Bound");
    let modified = next();
    assert_eq!((&modified["type"], &modified["object"]), (&json!("MODIFIED"), &taken));
    updates.push(gone("PersistentVolume", "", "disk"));
    assert_eq!(wide.words(), "DELETED disk 20Gi RWO,ROX Retain Deleted web/db <unknown> Block");
    assert_eq!(next()["type"], "DELETED");
    let mut documents = 1;
    while documents < 3 {
        documents += usize::from(yaml.line() == "---");
    }
}

#[test]
fn claims_of_all_namespaces_are_watched_with_their_namespace_and_age() {
    let mut world = world_with_claims();
    let created = keelson_service_kit::now_unix_nanos() / 1_000_000_000 - 10 * 86_400 - 43_200;
    for object in world.volume_objects.iter_mut().flatten() {
        let time = keelson_kube_model::time::format_seconds(created).unwrap();
        object["metadata"]["creationTimestamp"] = json!(time);
    }
    let fake = Fake::start(world);
    let first =
        [&format!("NAMESPACE {HEADER}"), "system cache Lost gone 10d the PersistentVolume gone is gone"];
    let watch = start(&fake, &["get", "pvc", "cache", "-A", "-w"], &first);
    let updates = &fake.services.pod_config.watch_volume_objects;
    updates.push(gone("PersistentVolumeClaim", "system", "cache"));
    assert!(watch.words().starts_with("system cache Deleted gone 10d"));
    // A claim of that name in another namespace, which comes later.
    updates.push(volume_object_is(&pending("cache")));
    assert_eq!(watch.words(), "default cache Pending <unknown>");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

fn start_pod_config(folder: &Path, objects: &[Value]) -> Fake {
    let world = World { volume_objects: Some(objects.to_vec()), ..world() };
    Fake::start_in(folder, world, &[ServiceName::PodConfig], &Config::default())
}

#[test]
fn claim_watch_survives_a_restart_of_pod_config_and_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let before = [bound("a", "one"), pending("b"), bound("c", "two")];
    let fake = start_pod_config(folder.path(), &before);
    let first =
        [HEADER, "a Bound one 20Gi RWO <unknown>", "b Pending <unknown>", "c Bound two 20Gi RWO <unknown>"];
    let watch = start(&fake, &["get", "pvc", "-w"], &first);
    drop(fake);
    let notice = watch.notice();
    assert!(notice.contains("waiting for pod-config to come back"), "{notice}");
    // Meanwhile one claim was bound and one has gone. As pod-config reads its sources, a claim is pending at first.
    let fake = start_pod_config(folder.path(), &[pending("a"), bound("a", "one"), bound("b", "three")]);
    assert_eq!(watch.notice(), "pod-config is back");
    assert_eq!(watch.words(), "b Bound three 20Gi RWO <unknown>");
    assert_eq!(watch.words(), "c Deleted two 20Gi RWO <unknown>");
    fake.services.pod_config.watch_volume_objects.push(claim_gone("a"));
    assert_eq!(watch.words(), "a Deleted one 20Gi RWO <unknown>");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn claim_that_goes_before_the_stream_begins_is_shown_as_deleted() {
    let fake = Fake::start(world_with_claims());
    let synced = StreamAnswer::items([volume_objects_synced()]).then_open();
    fake.services.pod_config.watch_volume_objects.answer_once(Ok(synced));
    let watch =
        start(&fake, &["get", "pvc", "db", "-w"], &[HEADER, DB, "db Deleted db 20Gi RWO disks <unknown>"]);
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn the_watch_ends_after_the_table_if_pod_config_cannot_watch_volume_objects() {
    let fake = Fake::start(world_with_claims());
    fake.services.pod_config.watch_volume_objects.fail(Status::unimplemented(""));
    let (code, out, notices) = Running::start(&fake.run_dir, &["get", "pvc", "-w"]).end();
    assert_eq!((code, out.len()), (Some(1), 3), "{out:?}");
    assert!(notices[0].contains("it is older than this command"), "{notices:?}");
    // A release that does not list them either.
    let older = Fake::start(world());
    let result = keelson(&older.run_dir, &["get", "pv", "-w"]);
    assert!(result.failed(1).0.contains("it is older than this command"), "{result:?}");
}

#[test]
fn object_that_is_not_json_ends_the_watch_with_an_error() {
    let fake = Fake::start(world_with_claims());
    let watch = start(&fake, &["get", "pvc", "-w"], &[HEADER, DB, IDLE]);
    let item = Some(Item::ObjectJson(b"{".to_vec()));
    fake.services.pod_config.watch_volume_objects.push(WatchVolumeObjectsResponse { item });
    let (code, _, notices) = watch.end();
    assert_eq!(code, Some(1));
    assert!(notices[0].contains("pod-config sent a PersistentVolumeClaim that is not JSON"), "{notices:?}");
}

#[test]
fn watch_of_volume_objects_is_refused_as_get_is() {
    let fake = Fake::start(world_with_claims());
    for (args, code, error) in [
        (&["get", "pvc", "idel", "-w"][..], 1, "there is no persistentvolumeclaim/idel in namespace default"),
        (&["get", "pv", "disc", "-w"], 1, "there is no persistentvolume/disc"),
        (
            &["get", "pv", "-n", "web", "-w"],
            64,
            "`keelson get persistentvolumes` takes no -n: a PersistentVolume has no namespace",
        ),
    ] {
        let result = keelson(&fake.run_dir, args);
        assert_eq!(result.failed(code).0, error);
    }
    for what in ["pv", "pvc"] {
        let result = keelson(&fake.run_dir, &["get", what, "--output-watch-events"]);
        assert_eq!(result.code, Some(64), "{result:?}");
        let result = keelson(Path::new("/nonexistent"), &["get", what, "-w"]);
        assert!(result.failed(69).0.starts_with("the agent is not running"), "{result:?}");
    }
}

#[test]
fn watch_of_volume_objects_reports_a_pod_config_that_does_not_answer() {
    let fake = Fake::start_some(world(), &[ServiceName::Init], &Config::default());
    let socket = Paths::socket_below(&fake.run_dir, ServiceName::PodConfig);
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let _nobody = UnixListener::bind(&socket).unwrap();
    let result = keelson(&fake.run_dir, &["get", "pvc", "-w"]);
    let (error, hint) = result.failed(69);
    assert!(error.contains("pod-config") && error.contains("hangs"), "{error}");
    assert!(hint.contains("--request-timeout"), "{hint}");
}

/// As [`world_with_claims`], where the claim `db` is deleted and still mounted, and no pod names it.
fn world_with_held_claim() -> World {
    let mut world = world_with_claims();
    world.pods.remove(0);
    let objects = world.volume_objects.as_mut().unwrap();
    let db =
        objects.iter_mut().find(|o| o["kind"] == "PersistentVolumeClaim" && o["metadata"]["name"] == "db");
    let metadata = &mut db.unwrap()["metadata"];
    metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    metadata["annotations"] = json!({"keelson.dev/held-by": "the pod default/web"});
    world
}

#[test]
fn delete_waits_until_a_claim_that_is_in_use_is_gone() {
    let fake = Fake::start(world_with_held_claim());
    let delete = Running::start(&fake.run_dir, &["delete", "pvc", "db"]);
    wait_for_stream(&fake);
    let updates = &fake.services.pod_config.watch_volume_objects;
    updates.push(claim_gone("idle"));
    updates.push(gone("PersistentVolumeClaim", "system", "db"));
    updates.push(claim_gone("db"));
    assert_eq!(delete.words(), "persistentvolumeclaim/db deleted");
    assert_eq!(delete.end().0, Some(0));
}

#[test]
fn delete_names_what_holds_a_claim_or_its_volume_when_it_does_not_wait() {
    let fake = Fake::start(world_with_held_claim());
    let at_once = keelson(&fake.run_dir, &["delete", "pvc", "db", "--wait=false"]);
    assert_eq!(at_once.ok(), "persistentvolumeclaim/db is being deleted\n");
    let late = keelson(&fake.run_dir, &["delete", "pvc", "db", "--timeout=1ms"]);
    assert!(late.err.contains("persistentvolumeclaim/db is not gone yet; it is held by the pod default/web"));
    let volume = keelson(&fake.run_dir, &["delete", "pv", "db"]);
    let (error, hint) = volume.failed(1);
    let text = "persistentvolume/db is bound to the claim default/db, which is deleted and held by the pod default/web";
    assert_eq!(error, text);
    assert!(hint.starts_with("try again when its volume is unmounted"), "{hint}");
}
