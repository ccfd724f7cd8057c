//! The node IDs and the topology of CSI drivers at the Node of an API server (volumes.md §11.1).

#![allow(clippy::unwrap_used)] // A panic fails the test.

mod fake;
mod process;

use std::sync::Arc;
use std::time::Duration;

use keelson_config::{ControlPlane, Kubernetes, ServiceName};
use keelson_node_status::build_with_init;
use keelson_proto::keelson::volume_manager::v1::{CsiDriver, WatchCsiDriversResponse};
use keelson_service_kit::Context;
use keelson_testkit::NodeServer;
use serde_json::{Value, json};
use tonic::Status;

use fake::FakePeers;
use process::Process;

const NODE: &str = "/api/v1/nodes/n1";
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
const LIMIT: Duration = Duration::from_secs(60);

/// The services that node-status calls, and an API server whose Node has a driver of earlier and a label.
struct Scene {
    peers: FakePeers,
    server: NodeServer,
    folder: tempfile::TempDir,
}

impl Scene {
    async fn new() -> Self {
        let server = NodeServer::start().unwrap();
        let metadata = json!({
            "name": "n1", "labels": {"example.org/zone": "a"}, "annotations": {(NODE_IDS): r#"{"early":"e"}"#},
        });
        server.create("/api/v1/nodes", &json!({"metadata": metadata})).unwrap();
        let peers = FakePeers::start().await;
        peers.machine();
        peers.runtime(true, "");
        Self { peers, server, folder: tempfile::tempdir().unwrap() }
    }

    fn context(&self) -> Context {
        let mut ctx = self.peers.context(ServiceName::NodeStatus);
        let mut config = (*ctx.config).clone();
        let kubeconfig = self.server.node_kubeconfig(self.folder.path(), "n1", self.server.address());
        config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(kubeconfig.unwrap()));
        ctx.config = Arc::new(config);
        ctx
    }

    fn metadata(&self) -> Value {
        self.server.get(NODE).unwrap()["metadata"].clone()
    }

    fn label(&self, key: &str) -> Value {
        self.metadata()["labels"][key].clone()
    }

    /// Waits until the annotation has these node IDs; null: until it is gone.
    async fn until_node_ids(&self, expected: Value) {
        let what = format!("the node IDs are {expected}");
        let shows = |_: &NodeServer| {
            let text = self.metadata()["annotations"][NODE_IDS].clone();
            text.as_str().map_or(Value::Null, |text| serde_json::from_str(text).unwrap()) == expected
        };
        self.server.until(LIMIT, &what, shows).await.unwrap();
    }

    /// Has the Node written with a new message, and waits until it is.
    async fn write_node(&self, message: &str) {
        self.peers.runtime(false, message);
        let shows = |server: &NodeServer| server.get(NODE).unwrap()["status"].to_string().contains(message);
        self.server.until(LIMIT, message, shows).await.unwrap();
    }

    fn report(&self, registered: &[CsiDriver], unregistered: &[&str]) {
        self.peers.volumes.watch_csi_drivers.push(WatchCsiDriversResponse {
            registered: registered.to_vec(),
            unregistered: unregistered.iter().map(ToString::to_string).collect(),
        });
    }

    async fn until_followed(&self) {
        self.peers.volumes.watch_csi_drivers.until_open(|open| open == 1).await;
    }
}

fn driver(name: &str, node_id: &str, topology: &[(&str, &str)]) -> CsiDriver {
    CsiDriver {
        name: name.to_owned(),
        node_id: node_id.to_owned(),
        topology: topology.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
    }
}

fn csi_condition(ctx: &Context) -> String {
    let conditions = ctx.progress.report("").conditions;
    conditions.into_iter().find(|one| one.name == "csi-drivers").map(|one| one.message).unwrap_or_default()
}

#[tokio::test]
async fn the_node_shows_drivers_that_come_and_go_and_their_labels_stay() {
    let scene = Scene::new().await;
    let ctx = scene.context();
    // The routes are not served.
    let _routes = build_with_init(ctx.clone(), true).await.unwrap();
    scene.until_followed().await;
    let disks = driver("disks", "d-1", &[("example.org/rack", "7"), ("example.org/zone", "a")]);
    scene.report(std::slice::from_ref(&disks), &[]);
    scene.until_node_ids(json!({"early": "e", "disks": "d-1"})).await;
    assert_eq!(scene.label("example.org/rack"), "7");

    // volume-manager restarts: nothing is known of the driver until it registers again.
    scene.peers.kill(ServiceName::VolumeManager);
    scene.peers.restart(ServiceName::VolumeManager).await;
    scene.until_followed().await;
    scene.report(&[], &[]);
    scene.write_node("restarted").await;
    scene.until_node_ids(json!({"early": "e", "disks": "d-1"})).await;

    scene.report(&[disks], &["early"]);
    scene.until_node_ids(json!({"disks": "d-1"})).await;
    scene.report(&[], &["disks", "early"]);
    scene.until_node_ids(Value::Null).await;
    assert_eq!(scene.label("example.org/rack"), "7", "labels of a driver stay when it goes");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_driver_that_the_node_cannot_show_keeps_back_neither_others_nor_the_status() {
    let scene = Scene::new().await;
    let ctx = scene.context();
    let _routes = build_with_init(ctx.clone(), true).await.unwrap();
    scene.until_followed().await;
    let drivers = [
        driver("contradicts", "c", &[("example.org/zone", "b")]),
        driver("forbidden", "f", &[("other.kubernetes.io/zone", "b")]),
        driver("good", "g", &[("example.org/rack", "7")]),
    ];
    scene.report(&drivers, &[]);
    scene.until_node_ids(json!({"early": "e", "good": "g"})).await;
    scene.write_node("the status is written").await;
    let condition = csi_condition(&ctx);
    assert!(
        condition.contains("example.org/zone=b, but the Node has the label example.org/zone=a"),
        "{condition}"
    );
    assert!(condition.contains("show the CSI driver forbidden"), "{condition}");
    assert_eq!(scene.label("example.org/zone"), "a");

    // An operator corrects the label, and the other driver is configured again.
    scene.server.patch(NODE, &json!({"metadata": {"labels": {"example.org/zone": "b"}}})).unwrap();
    let mut corrected = drivers;
    corrected[1].topology.clear();
    scene.report(&corrected, &[]);
    scene.until_node_ids(json!({"contradicts": "c", "early": "e", "forbidden": "f", "good": "g"})).await;
    scene.write_node("written again").await;
    assert_eq!(csi_condition(&ctx), "");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_node_that_is_registered_again_shows_the_drivers_again() {
    let scene = Scene::new().await;
    let ctx = scene.context();
    let _routes = build_with_init(ctx.clone(), true).await.unwrap();
    scene.until_followed().await;
    scene.report(&[driver("disks", "d-1", &[("example.org/rack", "7")])], &[]);
    scene.until_node_ids(json!({"early": "e", "disks": "d-1"})).await;
    scene.server.delete(NODE, &json!({})).unwrap();
    // The next write registers the Node.
    scene.peers.runtime(false, "a new node");
    let exists = |server: &NodeServer| server.get(NODE).is_some();
    scene.server.until(LIMIT, "the Node is there again", exists).await.unwrap();
    scene.until_node_ids(json!({"disks": "d-1"})).await;
    assert_eq!(scene.label("example.org/rack"), "7");
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_volume_manager_without_the_call_is_asked_again_and_the_rest_continues() {
    let scene = Scene::new().await;
    scene.peers.volumes.watch_csi_drivers.fail(Status::unimplemented("unknown method"));
    let ctx = scene.context();
    let _routes = build_with_init(ctx.clone(), true).await.unwrap();
    scene.peers.volumes.watch_csi_drivers.requests().until_len(1).await;
    scene.write_node("of today").await;
    let report = ctx.progress.report("");
    assert!(
        report.conditions.iter().all(|one| one.ok || !one.message.contains("unknown method")),
        "{report:?}"
    );
    // It was upgraded.
    scene.peers.volumes.watch_csi_drivers.replay([WatchCsiDriversResponse {
        registered: vec![driver("disks", "d-1", &[])],
        unregistered: vec![],
    }]);
    scene.until_node_ids(json!({"early": "e", "disks": "d-1"})).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_killed_node_status_writes_what_has_changed_meanwhile() {
    let scene = Scene::new().await;
    let first = Process::start(scene.folder.path(), &scene.context().config);
    scene.until_followed().await;
    scene.report(&[driver("disks", "d-1", &[])], &[]);
    scene.until_node_ids(json!({"early": "e", "disks": "d-1"})).await;
    drop(first);
    // The driver of earlier leaves, and another one comes, while nobody writes the Node.
    scene.peers.volumes.watch_csi_drivers.replay([WatchCsiDriversResponse {
        registered: vec![driver("disks", "d-2", &[("example.org/rack", "7")])],
        unregistered: vec!["early".to_owned()],
    }]);
    let _second = Process::start(scene.folder.path(), &scene.context().config);
    scene.until_node_ids(json!({"disks": "d-2"})).await;
    assert_eq!(scene.label("example.org/rack"), "7");
}
