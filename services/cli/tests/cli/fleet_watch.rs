//! `get … --watch --etcd …` with a real etcd: reports of nodes, also across the death of members and compactions.

use std::path::Path;

use etcd_client::Client;
use keelson_config::Etcd as Settings;
use keelson_etcd::{Etcd, NodeKeys, Operation};
use keelson_testkit::{EtcdCluster, Relay, Scratch};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::keelson;
use crate::running::Running;

pub struct Fleet {
    pub cluster: EtcdCluster,
    etcd: Etcd,
    runtime: Runtime,
    _scratch: Scratch,
}

impl Fleet {
    pub fn new(members: usize) -> Self {
        let scratch = Scratch::new().unwrap();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), members).unwrap();
        let etcd = Etcd::new(Settings::plain(cluster.endpoints()));
        Self { cluster, etcd, runtime: Runtime::new().unwrap(), _scratch: scratch }
    }

    fn write(&self, operation: Operation) {
        self.runtime.block_on(self.etcd.write(&[], &[operation])).unwrap();
    }

    pub fn put(&self, key: String, value: &Value, lease: i64) {
        self.write(Operation::Put { key, value: value.to_string().into_bytes(), lease });
    }

    pub fn delete(&self, key: String) {
        self.write(Operation::Delete { key });
    }

    /// Adds a node with a lease. Returns the lease.
    pub fn node(&self, name: &str) -> i64 {
        let (keys, lease) = (NodeKeys::new(name), self.runtime.block_on(self.etcd.grant(600)).unwrap());
        self.put(keys.node(), &node(name, "True", "1"), 0);
        self.put(keys.lease(), &json!({}), lease);
        lease
    }

    pub fn end(&self, lease: i64) {
        self.runtime.block_on(self.etcd.revoke(lease)).unwrap();
    }

    pub fn set_desired(&self, node: &str, name: &str) {
        self.put(NodeKeys::new(node).pod("default", name), &pod(name, "Pending"), 0);
    }

    fn report(&self, node: &str, name: &str, phase: &str) {
        self.put(NodeKeys::new(node).pod_status("default", name), &pod(name, phase), 0);
    }

    pub fn watch(&self, args: &[&str]) -> Running {
        watch(&self.cluster.endpoints(), args)
    }
}

fn watch(endpoints: &[String], args: &[&str]) -> Running {
    let endpoints = endpoints.join(",");
    Running::start(Path::new("/nowhere"), &[args, &["-w", "--etcd", &endpoints]].concat())
}

pub fn node(name: &str, ready: &str, heartbeat: &str) -> Value {
    let ready = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"conditions": [ready], "nodeInfo": {"kubeletVersion": "v1"}},
    })
}

pub fn pod(name: &str, phase: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "main", "image": "i"}]}, "status": {"phase": phase},
    })
}

#[test]
fn fleet_pod_watch_shows_pods_of_all_nodes_and_each_change() {
    let fleet = Fleet::new(1);
    let lease = fleet.node("n1");
    fleet.node("n2");
    fleet.set_desired("n2", "web");
    fleet.set_desired("n1", "db");
    fleet.report("n1", "db", "Running");
    let watch = fleet.watch(&["get", "pods"]);
    assert_eq!(watch.words(), "NAME READY STATUS RESTARTS AGE NODE");
    let mut first = [watch.words(), watch.words()];
    first.sort();
    assert_eq!(first, ["db 0/1 Running 0 <unknown> n1", "web 0/1 Pending 0 <unknown> n2"]);

    // The table does not show an event, a pod of another namespace, or an unchanged pod.
    fleet.put(NodeKeys::new("n2").event(7, "pod-sync", 1), &json!({"kind": "Event"}), 0);
    fleet.put(NodeKeys::new("n2").pod("other", "web"), &pod("web", "Pending"), 0);
    fleet.report("n2", "web", "Pending");
    fleet.report("n2", "web", "Running");
    assert_eq!(watch.words(), "web 0/1 Running 0 <unknown> n2");
    // The pods of a dead node are unknown.
    fleet.end(lease);
    assert_eq!(watch.words(), "db 0/1 Unknown 0 <unknown> n1");
    // A deleted pod is shown until its node has ended it.
    fleet.delete(NodeKeys::new("n2").pod("default", "web"));
    fleet.report("n2", "web", "Succeeded");
    assert_eq!(watch.words(), "web 0/1 Succeeded 0 <unknown> n2");
    fleet.delete(NodeKeys::new("n2").pod_status("default", "web"));
    assert_eq!(watch.words(), "web 0/1 Deleted 0 <unknown> n2");
    // A node that is added later.
    fleet.set_desired("n3", "late");
    assert_eq!(watch.words(), "late 0/1 Unknown 0 <unknown> n3");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn fleet_pod_watch_of_named_pods_prints_watch_events() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.set_desired("n1", "web");
    fleet.set_desired("n1", "db");
    let watch = fleet.watch(&["get", "pods", "web", "--node", "n1", "-o", "json", "--output-watch-events"]);
    let next = || -> (String, String) {
        let line: Value = serde_json::from_str(&watch.line()).unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        assert_eq!(line["object"]["metadata"]["name"], "web", "{line}");
        (text(&line["type"]), text(&line["object"]["status"]["phase"]))
    };
    assert_eq!(next().0, "ADDED");
    fleet.report("n1", "db", "Running");
    fleet.report("n1", "web", "Running");
    assert_eq!(next(), ("MODIFIED".to_owned(), "Running".to_owned()));
    fleet.delete(NodeKeys::new("n1").pod_status("default", "web"));
    assert_eq!(next().0, "MODIFIED");
    fleet.delete(NodeKeys::new("n1").pod("default", "web"));
    assert_eq!(next().0, "DELETED");
    assert_eq!(watch.interrupt().0, Some(2));

    let endpoints = fleet.cluster.endpoints().join(",");
    let result = keelson(Path::new("/nowhere"), &["get", "pods", "nope", "-w", "--etcd", &endpoints]);
    assert!(result.failed(1).0.contains("there is no pod \"nope\" on any node"), "{result:?}");
    let result = keelson(Path::new("/nowhere"), &["get", "node", "nope", "-w", "--etcd", &endpoints]);
    assert!(result.failed(1).0.contains("there is no node \"nope\""), "{result:?}");
}

#[test]
fn fleet_node_watch_survives_the_death_of_a_member() {
    let mut fleet = Fleet::new(3);
    let lease = fleet.node("n1");
    let watch = fleet.watch(&["get", "node"]);
    assert_eq!(watch.words(), "NAME STATUS ROLES AGE VERSION");
    assert_eq!(watch.words(), "n1 Ready <none> <unknown> v1");
    for member in 0..3 {
        fleet.cluster.kill(member);
        // A heartbeat does not count as a change.
        fleet.put(NodeKeys::new("n1").node(), &node("n1", "True", "2"), 0);
        fleet.put(NodeKeys::new("n1").node(), &node("n1", "False", "3"), 0);
        assert_eq!(watch.words(), "n1 NotReady <none> <unknown> v1", "without member {member}");
        fleet.put(NodeKeys::new("n1").node(), &node("n1", "True", "4"), 0);
        assert_eq!(watch.words(), "n1 Ready <none> <unknown> v1", "without member {member}");
        fleet.cluster.restart(member).unwrap();
    }
    fleet.node("n2");
    assert_eq!(watch.words(), "n2 Ready <none> <unknown> v1");
    fleet.end(lease);
    assert_eq!(watch.words(), "n1 NotReady <none> <unknown> v1");
    fleet.delete(NodeKeys::new("n1").node());
    assert!(watch.words().starts_with("n1 NotReady"), "without a Node it may still have pods");
    assert_eq!(watch.words(), "n1 Deleted <none> <unknown> <none>");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}

#[test]
fn fleet_watch_survives_a_compaction_during_a_network_outage() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    for name in ["goes", "stays"] {
        fleet.set_desired("n1", name);
        fleet.report("n1", name, "Running");
    }
    let relay: Relay = fleet.cluster.relays().unwrap().remove(0);
    let watch = watch(&[format!("http://{}", relay.address())], &["get", "pods"]);
    assert!(watch.words().starts_with("NAME READY STATUS"));
    assert!(watch.words().starts_with("goes 0/1 Running"));
    assert!(watch.words().starts_with("stays 0/1 Running"));
    // The watch is established before the connection is cut.
    fleet.report("n1", "stays", "Pending");
    assert!(watch.words().starts_with("stays 0/1 Pending"));

    relay.cut();
    relay.reset();
    let notice = watch.notice();
    assert!(
        notice.contains("does not answer") && notice.contains("waiting for etcd to come back"),
        "{notice}"
    );
    fleet.delete(NodeKeys::new("n1").pod("default", "goes"));
    fleet.delete(NodeKeys::new("n1").pod_status("default", "goes"));
    fleet.report("n1", "stays", "Running");
    fleet.set_desired("n1", "comes");
    fleet.runtime.block_on(async {
        let mut client = Client::connect(fleet.cluster.endpoints(), None).await.unwrap();
        let now = client.get("/", None).await.unwrap().header().unwrap().revision();
        client.compact(now, None).await.unwrap();
    });
    relay.heal();
    assert_eq!(watch.notice(), "etcd is back");
    let mut after = [watch.words(), watch.words(), watch.words()];
    after.sort();
    assert_eq!(
        after,
        [
            "comes 0/1 Pending 0 <unknown> n1",
            "goes 0/1 Deleted 0 <unknown> n1",
            "stays 0/1 Running 0 <unknown> n1"
        ]
    );
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}
