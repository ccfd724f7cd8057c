//! The configuration under the node's key, against a real member: the file that init reads.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use common::{Node, PATIENCE};
use keelson_config::{AssignedConfiguration, ControlPlane, Etcd as Settings};
use keelson_etcd::{Etcd, NodeKeys, Operation, Written};
use keelson_testkit::{EtcdCluster, Scratch};

struct Scene {
    cluster: EtcdCluster,
    etcd: Etcd,
    node: Node,
    _scratch: Scratch,
}

impl Scene {
    fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("etcd"), 1).unwrap();
        let etcd = Etcd::new(Settings::plain(cluster.endpoints()));
        let mut node = Node::new();
        node.config.control_plane = ControlPlane::Etcd(Settings::plain(cluster.endpoints()));
        Self { cluster, etcd, node, _scratch: scratch }
    }

    fn key() -> String {
        NodeKeys::new("n1").config()
    }

    /// Writes the key; the revision of it.
    async fn put(&self, value: impl Into<Vec<u8>>) -> i64 {
        let put = Operation::Put { key: Self::key(), value: value.into(), lease: 0 };
        match self.etcd.write(&[], &[put]).await.unwrap() {
            Written::Done(revision) => revision,
            conflict => panic!("{conflict:?}"),
        }
    }

    fn file(&self) -> PathBuf {
        self.node.config.paths.assigned_configuration()
    }

    fn assigned(&self) -> Option<AssignedConfiguration> {
        Some(serde_json::from_slice(&fs::read(self.file()).ok()?).unwrap())
    }

    async fn until(&self, what: &str, good: impl Fn(Option<AssignedConfiguration>) -> bool) {
        let waited = tokio::time::timeout(PATIENCE, async {
            while !good(self.assigned()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(waited.await.is_ok(), "{what}: {:?}", self.assigned());
    }
}

#[tokio::test]
async fn the_file_follows_the_key_and_stays_while_etcd_is_away() {
    let mut scene = Scene::new();
    let first = scene.put("maxPods: 7\n").await;
    let service = scene.node.start();
    scene.until("what stood there before", |file| file.is_some_and(|file| file.revision == first)).await;
    let file = scene.assigned().unwrap();
    assert_eq!((file.text.as_str(), file.problem), ("maxPods: 7\n", None));
    assert_eq!(fs::metadata(scene.file()).unwrap().mode() & 0o777, 0o600);
    let second = scene.put("maxPods: 8\n").await;
    scene.until("the change", |file| file.is_some_and(|file| file.revision == second)).await;

    service.kill();
    scene.cluster.kill(0);
    let mut service = scene.node.start();
    assert_eq!(scene.assigned().unwrap().revision, second);
    scene.cluster.restart(0).unwrap();
    // Not judged: that is init's.
    let third = scene.put([0xff, 0xfe]).await;
    scene.until("what is no text", |file| file.is_some_and(|file| file.revision == third)).await;
    let file = scene.assigned().unwrap();
    assert!(file.text.is_empty() && file.problem.unwrap().contains("no text of UTF-8"));
    scene.put(vec![b'#'; AssignedConfiguration::MAX_BYTES + 1]).await;
    let too_long =
        |file: AssignedConfiguration| file.problem.is_some_and(|why| why.contains("1048577 bytes"));
    scene.until("what is too long", |file| file.is_some_and(too_long)).await;

    scene.etcd.write(&[], &[Operation::Delete { key: Scene::key() }]).await.unwrap();
    scene.until("nothing stands there", |file| file.is_none()).await;
    // What was removed while nobody looked is found gone, too.
    let last = scene.put("maxPods: 9\n").await;
    scene.until("the last one", |file| file.is_some_and(|file| file.revision == last)).await;
    assert_eq!(service.count_log("panic"), 0);
    service.kill();
    scene.etcd.write(&[], &[Operation::Delete { key: Scene::key() }]).await.unwrap();
    let _service = scene.node.start();
    scene.until("nothing stands there after a start", |file| file.is_none()).await;
}
