//! The node's configuration key in a real etcd, and the file that init reads.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use common::{Node, TIMEOUT};
use keelson_config::{AssignedConfiguration, ControlPlane, Etcd as Settings};
use keelson_etcd::{Etcd, NodeKeys, Operation, Written};
use keelson_testkit::{EtcdCluster, Scratch};

struct Fixture {
    cluster: EtcdCluster,
    etcd: Etcd,
    node: Node,
    _scratch: Scratch,
}

impl Fixture {
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

    /// Writes the key and returns its revision.
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

    async fn wait_until(&self, what: &str, good: impl Fn(Option<AssignedConfiguration>) -> bool) {
        let waited = tokio::time::timeout(TIMEOUT, async {
            while !good(self.assigned()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(waited.await.is_ok(), "{what}: {:?}", self.assigned());
    }
}

#[tokio::test]
async fn the_configuration_file_follows_the_key_and_stays_while_etcd_is_down() {
    let mut fixture = Fixture::new();
    let first = fixture.put("maxPods: 7\n").await;
    let service = fixture.node.start();
    fixture
        .wait_until("the value from before the start", |file| file.is_some_and(|file| file.revision == first))
        .await;
    let file = fixture.assigned().unwrap();
    assert_eq!((file.text.as_str(), file.problem), ("maxPods: 7\n", None));
    assert_eq!(fs::metadata(fixture.file()).unwrap().mode() & 0o777, 0o600);
    let second = fixture.put("maxPods: 8\n").await;
    fixture.wait_until("the change", |file| file.is_some_and(|file| file.revision == second)).await;

    service.kill();
    fixture.cluster.kill(0);
    let mut service = fixture.node.start();
    assert_eq!(fixture.assigned().unwrap().revision, second);
    fixture.cluster.restart(0).unwrap();
    // The value is not validated; init does that.
    let third = fixture.put([0xff, 0xfe]).await;
    fixture
        .wait_until("a value that is not text", |file| file.is_some_and(|file| file.revision == third))
        .await;
    let file = fixture.assigned().unwrap();
    assert!(file.text.is_empty() && file.problem.unwrap().contains("no text of UTF-8"));
    fixture.put(vec![b'#'; AssignedConfiguration::MAX_BYTES + 1]).await;
    let too_long =
        |file: AssignedConfiguration| file.problem.is_some_and(|why| why.contains("1048577 bytes"));
    fixture.wait_until("a value that is too long", |file| file.is_some_and(too_long)).await;

    fixture.etcd.write(&[], &[Operation::Delete { key: Fixture::key() }]).await.unwrap();
    fixture.wait_until("the key is deleted", |file| file.is_none()).await;
    // A deletion during a restart is found, too.
    let last = fixture.put("maxPods: 9\n").await;
    fixture.wait_until("the last one", |file| file.is_some_and(|file| file.revision == last)).await;
    assert_eq!(service.count_log("panic"), 0);
    service.kill();
    fixture.etcd.write(&[], &[Operation::Delete { key: Fixture::key() }]).await.unwrap();
    let _service = fixture.node.start();
    fixture.wait_until("the key is deleted after a start", |file| file.is_none()).await;
}
