//! `get … --watch`: changes are shown once, also across restarts of services.

use std::path::Path;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::pod_sync::v1::{PodDocument, WatchPodsResponse, watch_pods_response};
use keelson_proto::keelson::supervisor::v1::{Service, WatchServicesResponse, watch_services_response};
use keelson_proto::keelson::volume_manager::v1::{
    PodVolumes, VolumeMount, VolumeWait, WatchPodVolumesResponse, watch_pod_volumes_response,
};
use keelson_service_kit::ObjectRef;
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::running::Running;
use crate::{document, keelson, running_pod, world};

fn pod_is(pod: PodDocument) -> WatchPodsResponse {
    WatchPodsResponse { item: Some(watch_pods_response::Item::Pod(pod)) }
}

fn pod_gone(uid: &str) -> WatchPodsResponse {
    WatchPodsResponse { item: Some(watch_pods_response::Item::GoneUid(uid.into())) }
}

/// A world whose pods remain after their deletion.
fn world_that_keeps_pods() -> World {
    World { keeps_deleted: true, ..world() }
}

/// A pod in a phase.
fn simple(name: &str, uid: &str, phase: &str) -> PodDocument {
    let pod = json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": "edge", "containers": [{"name": "app"}]},
        "status": {"phase": phase},
    });
    document("default", name, uid, pod)
}

fn start_one(dir: &Path, world: World, service: ServiceName) -> Fake {
    Fake::start_in(dir, world, &[service], &Config::default())
}

#[test]
fn pod_watch_shows_pods_and_each_change() {
    let fake = Fake::start(world_that_keeps_pods());
    let watch = Running::start(&fake.run_dir, &["get", "pods", "-w"]);
    assert_eq!(watch.words(), "NAME READY STATUS RESTARTS AGE");
    assert_eq!(watch.words(), "db-edge 0/1 Init:0/1 0 <unknown>");
    assert_eq!(watch.words(), "web-edge 2/2 Running 1 <unknown>");
    let updates = &fake.services.pod_sync.watch_pods;
    // Nothing that the table shows has changed.
    let mut same = running_pod("default", "web-edge", "u1");
    same.version = 9;
    updates.push(pod_is(same));
    // Not of this namespace.
    updates.push(pod_is(running_pod("other", "web-edge", "u7")));
    updates.push(pod_is(simple("job-edge", "u5", "Pending")));
    assert_eq!(watch.words(), "job-edge 0/1 Pending 0 <unknown>");
    updates.push(pod_is(simple("job-edge", "u5", "Succeeded")));
    assert_eq!(watch.words(), "job-edge 0/1 Succeeded 0 <unknown>");
    updates.push(pod_gone("u5"));
    assert_eq!(watch.words(), "job-edge 0/1 Deleted 0 <unknown>");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn watch_survives_a_service_restart_and_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut pods =
        vec![simple("a", "u1", "Running"), simple("b", "u2", "Running"), simple("c", "u3", "Running")];
    let with = |pods: &[PodDocument]| World { pods: pods.to_vec(), keeps_deleted: true, ..World::default() };
    let fake = start_one(folder.path(), with(&pods), ServiceName::PodSync);
    let watch = Running::start(folder.path(), &["get", "pods", "-w"]);
    for first in ["NAME READY", "a 0/1 Running", "b 0/1 Running", "c 0/1 Running"] {
        assert!(watch.words().starts_with(first), "{first}");
    }
    drop(fake);
    let notice = watch.notice();
    assert!(notice.contains("waiting for pod-sync to come back"), "{notice}");
    // Meanwhile one pod has changed and one is gone.
    pods[1] = simple("b", "u2", "Failed");
    pods.remove(2);
    let fake = start_one(folder.path(), with(&pods), ServiceName::PodSync);
    assert_eq!(watch.notice(), "pod-sync is back");
    assert!(watch.words().starts_with("b 0/1 Failed"));
    assert!(watch.words().starts_with("c 0/1 Deleted"));
    fake.services.pod_sync.watch_pods.push(pod_is(simple("a", "u1", "Succeeded")));
    assert!(watch.words().starts_with("a 0/1 Succeeded"));
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn json_watch_prints_a_line_per_change() {
    let fake = Fake::start(world_that_keeps_pods());
    let args = ["get", "pods", "web", "-w", "-o", "json", "--output-watch-events"];
    let watch = Running::start(&fake.run_dir, &args);
    let next = || serde_json::from_str::<Value>(&watch.line()).unwrap();
    let first = next();
    assert_eq!((&first["type"], &first["object"]["metadata"]["name"]), (&json!("ADDED"), &json!("web-edge")));
    assert_eq!(first["object"]["spec"]["fromTheFuture"], json!({"z": 1, "a": [2]}));
    let updates = &fake.services.pod_sync.watch_pods;
    updates.push(pod_is(running_pod("default", "web-edge", "u1")));
    updates.push(pod_is(simple("db-edge", "u2", "Failed")));
    updates.push(pod_is(simple("web-edge", "u1", "Failed")));
    let second = next();
    assert_eq!(
        (&second["type"], &second["object"]["status"]["phase"]),
        (&json!("MODIFIED"), &json!("Failed"))
    );
    updates.push(pod_gone("u1"));
    assert_eq!(next()["type"], "DELETED");
    // A static pod that has changed has another UID and the same name.
    updates.push(pod_is(simple("web-edge", "u8", "Pending")));
    assert_eq!(next()["type"], "ADDED");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));

    let plain = Running::start(&fake.run_dir, &["get", "pods", "web", "-w", "-o", "json"]);
    let object: Value = serde_json::from_str(&plain.line()).unwrap();
    assert_eq!(object["kind"], "Pod");
    let yaml = Running::start(&fake.run_dir, &["get", "pods", "web", "-w", "-o", "yaml"]);
    assert_eq!(yaml.line(), "---");
}

#[test]
fn watch_without_an_agent_fails_like_get() {
    let folder = tempfile::tempdir().unwrap();
    for what in ["pods", "services", "events", "node", "volumes"] {
        let result = keelson(folder.path(), &["get", what, "-w"]);
        assert!(result.failed(69).0.starts_with("the agent is not running"), "{what}: {result:?}");
    }
    let fake = Fake::start(world_that_keeps_pods());
    let result = keelson(&fake.run_dir, &["get", "pods", "nope", "-w"]);
    assert!(result.failed(1).0.contains("there is no pod"), "{result:?}");
    let result = keelson(&fake.run_dir, &["get", "pods", "--output-watch-events"]);
    assert_eq!(result.code, Some(64), "{result:?}");
}

fn service(name: &str, pid: u32, state: &str) -> Service {
    Service { name: name.into(), pid, state: state.into(), ..Service::default() }
}

#[test]
fn service_watch_survives_a_restart_of_init() {
    let folder = tempfile::tempdir().unwrap();
    let with = |services: &[Service]| World { services: services.to_vec(), ..World::default() };
    let before = [service("pod-sync", 7, "running"), service("node-api", 8, "running")];
    let fake = start_one(folder.path(), with(&before), ServiceName::Init);
    let watch = Running::start(folder.path(), &["get", "services", "-w"]);
    for line in ["NAME STATE PID RESTARTS AGE MESSAGE", "pod-sync running 7 0 -", "node-api running 8 0 -"] {
        assert_eq!(watch.words(), line);
    }
    let is = |service: Service| WatchServicesResponse {
        item: Some(watch_services_response::Item::Service(service)),
    };
    let mut same = service("pod-sync", 7, "running");
    same.pss_kib = 99;
    fake.services.supervisor.watch_services.push(is(same));
    fake.services.supervisor.watch_services.push(is(service("pod-sync", 0, "backing-off")));
    assert_eq!(watch.words(), "pod-sync backing-off - 0 -");
    drop(fake);
    assert!(watch.notice().contains("waiting for init"));
    let after = [service("pod-sync", 17, "running"), service("node-api", 8, "running")];
    let fake = start_one(folder.path(), with(&after), ServiceName::Init);
    assert_eq!(watch.words(), "pod-sync running 17 0 -");
    fake.services.supervisor.watch_services.push(is(service("node-api", 8, "stuck")));
    assert_eq!(watch.words(), "node-api stuck 8 0 -");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn service_watch_without_init_polls_each_service() {
    let folder = tempfile::tempdir().unwrap();
    let _one = start_one(folder.path(), world(), ServiceName::PodSync);
    let watch = Running::start(folder.path(), &["get", "services", "pod-sync", "node-api", "-w"]);
    assert!(watch.notice().contains("each service was queried directly"));
    assert!(watch.words().starts_with("NAME STATE"));
    let first = [watch.words(), watch.words()];
    assert!(
        first[0].starts_with("pod-sync running") && first[1].starts_with("node-api stopped"),
        "{first:?}"
    );
    let _two = start_one(folder.path(), world(), ServiceName::NodeApi);
    let next = watch.words();
    assert!(next.starts_with("node-api running"), "{next}");
    assert_eq!(watch.interrupt().0, Some(2));
}

#[test]
fn event_watch_shows_repeated_events_again() {
    let folder = tempfile::tempdir().unwrap();
    let fake = start_one(folder.path(), world(), ServiceName::PodSync);
    let web = ObjectRef::pod("default", "web-edge", "u1");
    fake.world.events.normal(web.clone(), "Pulled", "image there");
    let watch = Running::start(folder.path(), &["get", "events", "-w", "--for", "pod/web-edge"]);
    let next =
        || watch.words().split_whitespace().skip(1).map(ToOwned::to_owned).collect::<Vec<_>>().join(" ");
    assert_eq!(next(), "SEEN TYPE REASON OBJECT COUNT MESSAGE");
    assert_eq!(next(), "Normal Pulled pod/web-edge 1 image there");
    fake.world.events.warning(ObjectRef::node("edge"), "NodeNotReady", "other");
    fake.world.events.warning(web.clone(), "BackOff", "waits");
    assert_eq!(next(), "Warning BackOff pod/web-edge 1 waits");
    fake.world.events.warning(web.clone(), "BackOff", "waits");
    assert_eq!(next(), "Warning BackOff pod/web-edge 2 waits");
    drop(fake);
    // The first notices are about services that were never started.
    while !watch.notice().contains("waiting for pod-sync to come back") {}
    let fake = start_one(folder.path(), world(), ServiceName::PodSync);
    while watch.notice() != "pod-sync is back" {}
    fake.world.events.normal(web, "Started", "runs");
    assert_eq!(next(), "Normal Started pod/web-edge 1 runs");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn node_watch_shows_changes_but_not_heartbeats() {
    let folder = tempfile::tempdir().unwrap();
    let node = |ready: &str, heartbeat: &str| World {
        node: json!({"metadata": {"name": "edge"}, "status": {"conditions": [
            {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}]}}),
        ..World::default()
    };
    let fake = start_one(folder.path(), node("True", "1"), ServiceName::NodeStatus);
    let watch = Running::start(folder.path(), &["get", "node", "-w", "-o", "json"]);
    let next = || {
        let node: Value = serde_json::from_str(&watch.line()).unwrap();
        node["status"]["conditions"][0]["status"].as_str().unwrap().to_owned()
    };
    assert_eq!(next(), "True");
    drop(fake);
    assert!(watch.notice().contains("waiting for node-status"));
    let fake = start_one(folder.path(), node("True", "2"), ServiceName::NodeStatus);
    assert_eq!(watch.notice(), "node-status is back");
    drop(fake);
    assert!(watch.notice().contains("waiting for node-status"));
    let _fake = start_one(folder.path(), node("False", "3"), ServiceName::NodeStatus);
    assert_eq!(next(), "False");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

/// The volumes of the pod `u1`, of which these are mounted.
fn held(state: &str, message: &str, mounted: &[&str]) -> PodVolumes {
    let mount = |name: &&str| VolumeMount {
        name: (*name).into(),
        host_path: format!("/v/{name}"),
        ..VolumeMount::default()
    };
    PodVolumes {
        uid: "u1".into(),
        state: state.into(),
        message: message.into(),
        volumes: mounted.iter().map(mount).collect(),
        ..PodVolumes::default()
    }
}

#[test]
fn volumes_and_volume_watch_show_what_they_wait_for() {
    let folder = tempfile::tempdir().unwrap();
    let pod = json!({
        "metadata": {"name": "web-edge", "namespace": "default"},
        "spec": {"nodeName": "edge", "volumes": [
            {"name": "data", "emptyDir": {}}, {"name": "key", "secret": {"secretName": "tls"}}]},
    });
    let world = || World {
        pods: vec![document("default", "web-edge", "u1", pod.clone())],
        keeps_deleted: true,
        ..World::default()
    };
    let _pods = start_one(folder.path(), world(), ServiceName::PodSync);
    let wait = VolumeWait { volume: "key".into(), message: "no secret tls".into(), owner: "you".into() };
    let waiting = || {
        let held = PodVolumes { waits: vec![wait.clone()], ..held("failed", "1 volume waits", &["data"]) };
        World { volumes: vec![held], ..World::default() }
    };
    let fake = start_one(folder.path(), waiting(), ServiceName::VolumeManager);
    assert_eq!(
        keelson(folder.path(), &["get", "volumes", "web"]).ok(),
        "POD        VOLUME   KIND       STATE     OWNER   WAITS FOR       PATH\n\
         web-edge   data     emptyDir   mounted   -       -               /v/data\n\
         web-edge   key      secret     failed    you     no secret tls   -\n"
    );
    let list = keelson(folder.path(), &["get", "vol", "-o", "json"]).json();
    assert_eq!(
        list["items"][1],
        json!({"namespace": "default", "pod": "web-edge", "uid": "u1", "volume": "key", "kind": "secret",
               "state": "failed", "message": "no secret tls", "owner": "you", "path": null, "read_only": null,
               "claim": null, "persistent_volume": null})
    );

    let watch = Running::start(folder.path(), &["get", "volumes", "-w"]);
    for line in [
        "POD VOLUME KIND STATE OWNER WAITS FOR PATH",
        "web-edge data emptyDir mounted - - /v/data",
        "web-edge key secret failed you no secret tls -",
    ] {
        assert_eq!(watch.words(), line);
    }
    drop(fake);
    assert!(watch.notice().contains("waiting for volume-manager"));
    let fake = start_one(folder.path(), waiting(), ServiceName::VolumeManager);
    assert_eq!(watch.notice(), "volume-manager is back");
    let send = |item| {
        fake.services.volume_manager.watch_pod_volumes.push(WatchPodVolumesResponse { item: Some(item) })
    };
    send(watch_pod_volumes_response::Item::Pod(held("mounted", "", &["data", "key"])));
    assert_eq!(watch.words(), "web-edge key secret mounted - - /v/key");
    send(watch_pod_volumes_response::Item::GoneUid("u1".into()));
    assert_eq!(watch.words(), "web-edge data emptyDir pending - - -");
    assert_eq!(watch.words(), "web-edge key secret pending - - -");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}
