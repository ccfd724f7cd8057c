//! `delete` with `--etcd` and a real etcd: what it waits for, and how long.

use std::path::Path;

use keelson_etcd::NodeKeys;
use serde_json::{Value, json};

use crate::fleet::run;
use crate::fleet_watch::Fleet;
use crate::running::Running;

fn pod(node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "i"}]},
    })
}

/// Lets the node report a pod with this UID.
fn report_pod(fleet: &Fleet, node: &str, uid: &str) {
    let pod = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": uid}});
    fleet.put(NodeKeys::new(node).pod_status("default", "web"), &pod, 0);
}

/// A command that waits for the end of the pod and has printed its notice.
fn deleting(fleet: &Fleet) -> Running {
    let endpoints = fleet.cluster.endpoints().join(",");
    let running = Running::start(
        Path::new("/nowhere"),
        &["delete", "pod", "web", "--timeout", "60s", "--etcd", &endpoints],
    );
    let notice = running.notice();
    assert_eq!(
        notice,
        "pod/web is terminating on n1; `keelson explain pod/web` there shows what it waits for."
    );
    running
}

#[test]
fn fleet_delete_does_not_wait_for_a_newer_pod_of_the_name() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.set_desired("n1", "web");
    report_pod(&fleet, "n1", "u1");
    let deleting = deleting(&fleet);
    fleet.set_desired("n1", "web");
    report_pod(&fleet, "n1", "u2");
    assert_eq!(deleting.end(), (Some(0), vec!["pod/web deleted on n1".to_owned()], vec![]));
    assert!(run(&fleet, &["get", "pod", "web"]).ok().contains("web "));
}

#[test]
fn fleet_delete_stops_waiting_when_the_node_goes_down() {
    let fleet = Fleet::new(1);
    let lease = fleet.node("n1");
    fleet.set_desired("n1", "web");
    report_pod(&fleet, "n1", "u1");
    let deleting = deleting(&fleet);
    fleet.end(lease);
    let notice = "The node n1 is down; pod/web ends when the node is back.";
    assert_eq!(
        deleting.end(),
        (Some(0), vec!["pod/web is being deleted on n1".to_owned()], vec![notice.to_owned()])
    );
}

#[test]
fn fleet_delete_by_file_uses_the_node_of_the_manifest() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.node("n2");
    fleet.set_desired("n1", "web");
    fleet.set_desired("n2", "web");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let second = file("web.yaml", &pod("n2").to_string());
    let result = run(&fleet, &["delete", "-f", &second, "--node", "n1"]);
    assert_eq!(result.failed(64).0, "spec.nodeName is \"n2\" and --node is \"n1\"");
    assert_eq!(run(&fleet, &["delete", "-f", &second]).ok(), "pod/web deleted on n2\n");
    let result = run(&fleet, &["delete", "-f", &second]);
    assert!(result.failed(1).0.ends_with("in namespace default on n2"), "{result:?}");
    assert!(run(&fleet, &["get", "pods"]).ok().ends_with(" n1\n"));

    let config =
        file("config.yaml", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n");
    let result = run(&fleet, &["delete", "-f", &config]);
    assert!(result.failed(1).0.contains("`keelson delete config --etcd …`"), "{result:?}");
}
