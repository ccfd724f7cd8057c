//! A node whose control plane is an etcd of its own.

use keelson_config::{ControlPlane, Etcd as Settings};
use keelson_etcd::{Etcd, Expect, NodeKeys, Operation, Written};
use keelson_proto::keelson::pod_config::v1 as pb;
use keelson_testkit::{EtcdCluster, Scratch};

use super::{Node, Service, pod};

/// An etcd with one member, and the node `n1` that uses it.
pub struct Fleet {
    pub cluster: EtcdCluster,
    pub etcd: Etcd,
    pub keys: NodeKeys,
    _scratch: Scratch,
}

impl Fleet {
    pub fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
        let etcd = Etcd::new(Settings::plain(cluster.endpoints()));
        Self { cluster, etcd, keys: NodeKeys::new("n1"), _scratch: scratch }
    }

    /// A node without manifests of its own.
    pub fn node(&self) -> Node {
        let mut node = Node::new();
        node.config.sources.static_pod_path = None;
        node.config.control_plane = ControlPlane::Etcd(Settings::plain(self.cluster.endpoints()));
        node
    }

    pub async fn put(&self, key: &str, value: &str) {
        let expect = match self.etcd.get(key).await.unwrap() {
            Some(entry) => Expect::Revision(entry.mod_revision),
            None => Expect::Absent,
        };
        let put = Operation::Put { key: key.into(), value: value.into(), lease: 0 };
        assert!(matches!(self.etcd.write(&[(key.into(), expect)], &[put]).await.unwrap(), Written::Done(_)));
    }

    pub async fn delete(&self, key: &str) {
        self.etcd.write(&[], &[Operation::Delete { key: key.into() }]).await.unwrap();
    }

    pub async fn put_pod(&self, name: &str, image: &str) {
        self.put(&self.keys.pod("default", name), &pod(name, image)).await;
    }
}

/// The object that the service returns.
pub async fn object(service: &Service, kind: &str, name: &str) -> Option<serde_json::Value> {
    let request = pb::GetObjectRequest { kind: kind.into(), namespace: "default".into(), name: name.into() };
    let answer = service.client().get_object(request).await.ok()?.into_inner();
    serde_json::from_slice(&answer.object_json).ok()
}

/// Waits until a PersistentVolume or claim is as it should be, looking again whenever the service has decided about bindings.
pub async fn wait_until(
    service: &mut Service,
    kind: &str,
    name: &str,
    is_done: impl Fn(Option<&serde_json::Value>) -> bool,
) -> Option<serde_json::Value> {
    loop {
        let found = object(service, kind, name).await;
        if is_done(found.as_ref()) {
            return found;
        }
        service.wait_for_event("volume_objects_updated");
    }
}

/// Waits until the file of the bindings has a deleted claim. The claim is shown as deleted before that.
pub fn wait_until_deletion_is_stored(node: &Node, service: &mut Service) {
    let is_stored = || {
        let file = std::fs::read(node.path("state/pod-config/bindings.json")).unwrap();
        let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
        file["deleted"].as_array().is_some_and(|claims| !claims.is_empty())
    };
    while !is_stored() {
        service.wait_for_event("bindings_written");
    }
}

/// Waits until a PersistentVolume or claim has this phase.
pub async fn wait_for_phase(service: &mut Service, kind: &str, name: &str, phase: &str) -> serde_json::Value {
    let found =
        wait_until(service, kind, name, |found| found.is_some_and(|it| it["status"]["phase"] == phase));
    found.await.unwrap()
}
