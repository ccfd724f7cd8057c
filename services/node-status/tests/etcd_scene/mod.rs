//! A node-status with a real member of etcd.

#![allow(clippy::unwrap_used)]

use keelson_config::{ControlPlane, Etcd as Settings, ServiceName};
use keelson_etcd::{Entry, Etcd, NodeKeys};
use keelson_service_kit::Context;
use keelson_testkit::{EtcdCluster, Scratch};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fake::{FakePeers, eventually, pod_document};

pub const NODE: &str = "n1";

/// A member of etcd, the services that node-status calls, and the state folders of node-status.
pub struct Scene {
    pub cluster: EtcdCluster,
    pub etcd: Etcd,
    pub keys: NodeKeys,
    pub scratch: Scratch,
    pub peers: FakePeers,
}

impl Scene {
    pub async fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
        let etcd = Etcd::new(Settings::plain(cluster.endpoints()));
        let peers = FakePeers::start().await;
        Self { cluster, etcd, keys: NodeKeys::new(NODE), scratch, peers }
    }

    /// Starts a node-status with the state folder `state`, as under init.
    pub async fn start(&self, state: &str, lease_seconds: u32) -> Context {
        let ctx = self.context(state, lease_seconds);
        keelson_node_status::build_with_init(ctx.clone(), true).await.unwrap();
        ctx
    }

    pub fn context(&self, state: &str, lease_seconds: u32) -> Context {
        self.context_with(state, Settings { lease_seconds, ..Settings::plain(self.cluster.endpoints()) })
    }

    pub fn context_with(&self, state: &str, settings: Settings) -> Context {
        let mut config = (*self.peers.context(ServiceName::NodeStatus).config).clone();
        config.node_name = NODE.into();
        config.paths.state_dir = self.scratch.path().join(state);
        config.control_plane = ControlPlane::Etcd(settings);
        Context::detached(ServiceName::NodeStatus, config)
    }

    /// The settings of `user`, with a password file.
    pub fn settings_of(&self, user: &str, password: &str) -> Settings {
        let file = self.scratch.path().join(format!("password-{user}"));
        std::fs::write(&file, password).unwrap();
        let plain = Settings::plain(self.cluster.endpoints());
        Settings { user: Some(user.into()), password_file: Some(file), ..plain }
    }

    /// Calls the member directly, as the user of `token` if there are users (etcd's gRPC gateway).
    pub async fn admin(&self, token: &str, path: &str, body: Value) -> Value {
        let endpoint = self.cluster.endpoints()[0].clone();
        let address = endpoint.strip_prefix("http://").unwrap();
        let body = body.to_string();
        let who = if token.is_empty() { String::new() } else { format!("Authorization: {token}\r\n") };
        let length = body.len();
        let request = format!("POST /v3/{path} HTTP/1.0\r\n{who}Content-Length: {length}\r\n\r\n{body}");
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{path}: {answer}");
        serde_json::from_str(body).unwrap()
    }

    pub async fn granted_seconds(&self, lease: i64) -> Value {
        self.admin("", "lease/timetolive", json!({"ID": lease})).await["grantedTTL"].clone()
    }

    pub async fn entry(&self, key: &str) -> Option<Entry> {
        self.etcd.get(key).await.unwrap()
    }

    pub async fn json(&self, key: &str) -> Option<Value> {
        serde_json::from_slice(&self.entry(key).await?.value).ok()
    }

    pub fn pod(&self, uid: &str, name: &str, phase: &str, seen: &str) {
        let mut document = pod_document(uid, phase, phase == "Running", 1);
        let mut json: Value = serde_json::from_slice(&document.pod_json).unwrap();
        json["metadata"]["name"] = name.into();
        json["metadata"]["annotations"] = serde_json::json!({"kubernetes.io/config.seen": seen});
        document.pod_json = json.to_string().into_bytes().into();
        document.name = name.into();
        self.peers.pods.set(uid.into(), document);
    }

    /// Waits until the reported status of a pod has this UID and phase.
    pub async fn until(&self, name: &str, uid: &str, phase: &str) {
        let key = self.keys.pod_status("default", name);
        eventually(async || {
            let pod = self.json(&key).await?;
            (pod["metadata"]["uid"] == uid && pod["status"]["phase"] == phase).then_some(())
        })
        .await;
    }

    /// Waits until earlier reports are written: the report of another pod is queued after them.
    pub async fn until_earlier_reports_are_written(&self, mark: &str) {
        // A removal is not urgent, and neither is the second report of a pod.
        self.pod(mark, mark, "Pending", "");
        self.until(mark, mark, "Pending").await;
        self.pod(mark, mark, "Pending", "later");
        let key = self.keys.pod_status("default", mark);
        eventually(async || {
            let pod = self.json(&key).await?;
            (pod["metadata"]["annotations"]["kubernetes.io/config.seen"] == "later").then_some(())
        })
        .await;
    }
}
