//! `status.volumesInUse` of the Node at an API server (volumes.md §3.15).

#![allow(clippy::unwrap_used)] // A panic fails the test.

mod fake;
mod process;

use std::sync::Arc;
use std::time::Duration;

use keelson_config::{ControlPlane, Kubernetes, ServiceName};
use keelson_node_status::build_with_init;
use keelson_proto::keelson::volume_manager::v1::WatchVolumesInUseResponse;
use keelson_service_kit::Context;
use keelson_testkit::NodeServer;
use serde_json::{Value, json};

use fake::FakePeers;
use process::Process;

const NODE: &str = "/api/v1/nodes/n1";
const LIMIT: Duration = Duration::from_secs(60);

/// The services that node-status calls, and an API server.
struct Scene {
    peers: FakePeers,
    server: NodeServer,
    folder: tempfile::TempDir,
}

impl Scene {
    /// The Node at the server has the volume `old` in use. volume-manager has not reported yet.
    async fn new() -> Self {
        let server = NodeServer::start().unwrap();
        let node = json!({"metadata": {"name": "n1"}, "status": {"volumesInUse": ["old"]}});
        server.create("/api/v1/nodes", &node).unwrap();
        let peers = FakePeers::start().await;
        peers.machine();
        peers.runtime(true, "");
        let scene = Self { peers, server, folder: tempfile::tempdir().unwrap() };
        assert_eq!(scene.volumes(), json!(["old"]));
        scene
    }

    fn context(&self) -> Context {
        let mut ctx = self.peers.context(ServiceName::NodeStatus);
        let mut config = (*ctx.config).clone();
        let kubeconfig = self.server.node_kubeconfig(self.folder.path(), "n1", self.server.address());
        config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(kubeconfig.unwrap()));
        ctx.config = Arc::new(config);
        ctx
    }

    fn volumes(&self) -> Value {
        self.server.get(NODE).unwrap()["status"]["volumesInUse"].clone()
    }

    async fn until_volumes(&self, expected: Value) {
        let what = format!("the volumes in use are {expected}");
        self.server.until(LIMIT, &what, |_| self.volumes() == expected).await.unwrap();
    }

    /// Has the Node written with a new message, and waits until it is.
    async fn write_node(&self, message: &str) {
        self.peers.runtime(false, message);
        let shows = |server: &NodeServer| server.get(NODE).unwrap()["status"].to_string().contains(message);
        self.server.until(LIMIT, message, shows).await.unwrap();
    }

    fn report(&self, names: &[&str]) {
        self.peers.volumes.watch_volumes_in_use.push(list(names));
    }

    async fn until_followed(&self) {
        self.peers.volumes.watch_volumes_in_use.until_open(|open| open == 1).await;
    }
}

fn list(names: &[&str]) -> WatchVolumesInUseResponse {
    WatchVolumesInUseResponse { names: names.iter().map(ToString::to_string).collect() }
}

#[tokio::test]
async fn the_volumes_in_use_stay_until_volume_manager_reports_and_follow_it_then() {
    let scene = Scene::new().await;
    let ctx = scene.context();
    // The routes are not served.
    let _routes = build_with_init(ctx.clone(), true).await.unwrap();
    scene.write_node("first").await;
    assert_eq!(scene.volumes(), json!(["old"]), "volume-manager has not reported yet");

    scene.until_followed().await;
    scene.report(&["b", "a", "b"]);
    scene.until_volumes(json!(["a", "b"])).await;
    scene.report(&["b"]);
    scene.until_volumes(json!(["b"])).await;

    scene.peers.kill(ServiceName::VolumeManager);
    scene.write_node("second").await;
    assert_eq!(scene.volumes(), json!(["b"]), "volume-manager is down");
    scene.peers.restart(ServiceName::VolumeManager).await;
    scene.until_followed().await;
    scene.write_node("third").await;
    assert_eq!(scene.volumes(), json!(["b"]), "volume-manager still looks for volumes");

    scene.report(&[]);
    scene.until_volumes(Value::Null).await;
    ctx.shutdown.cancel();
}

#[tokio::test]
async fn a_killed_node_status_keeps_the_volumes_in_use_at_the_server() {
    let scene = Scene::new().await;
    let first = Process::start(scene.folder.path(), &scene.context().config);
    scene.until_followed().await;
    scene.report(&["a", "b"]);
    scene.until_volumes(json!(["a", "b"])).await;
    drop(first);
    // volume-manager is restarted as well, and has not found all volumes again.
    scene.peers.kill(ServiceName::VolumeManager);
    let _second = Process::start(scene.folder.path(), &scene.context().config);
    scene.write_node("second").await;
    assert_eq!(scene.volumes(), json!(["a", "b"]));
}
