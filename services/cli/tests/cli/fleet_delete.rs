//! `delete` with `--etcd`, against a real member: what is waited for, and for how long.

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

/// The node has told of a pod with this UID.
fn tell(fleet: &Fleet, node: &str, uid: &str) {
    let told = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": uid}});
    fleet.put(NodeKeys::new(node).pod_status("default", "web"), &told, 0);
}

/// A command that waits for the end of the pod, and has said so.
fn deleting(fleet: &Fleet) -> Running {
    let endpoints = fleet.cluster.endpoints().join(",");
    let running = Running::start(
        Path::new("/nowhere"),
        &["delete", "pod", "web", "--timeout", "60s", "--etcd", &endpoints],
    );
    let notice = running.notice();
    assert_eq!(notice, "pod/web is ending on n1; `keelson explain pod/web` there says what it waits for.");
    running
}

#[test]
fn a_pod_of_the_name_that_was_applied_meanwhile_is_not_waited_for() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.want("n1", "web");
    tell(&fleet, "n1", "u1");
    let deleting = deleting(&fleet);
    fleet.want("n1", "web");
    tell(&fleet, "n1", "u2");
    assert_eq!(deleting.end(), (Some(0), vec!["pod/web deleted on n1".to_owned()], vec![]));
    assert!(run(&fleet, &["get", "pod", "web"]).ok().contains("web "));
}

#[test]
fn when_the_node_goes_away_meanwhile_the_wait_is_over_and_it_is_said() {
    let fleet = Fleet::new(1);
    let lease = fleet.node("n1");
    fleet.want("n1", "web");
    tell(&fleet, "n1", "u1");
    let deleting = deleting(&fleet);
    fleet.end(lease);
    let notice = "The node n1 is away; pod/web ends when it is back.";
    assert_eq!(
        deleting.end(),
        (Some(0), vec!["pod/web is being deleted on n1".to_owned()], vec![notice.to_owned()])
    );
}

#[test]
fn a_manifest_is_deleted_from_the_node_that_it_names_and_a_configuration_otherwise() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.node("n2");
    fleet.want("n1", "web");
    fleet.want("n2", "web");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let second = file("web.yaml", &pod("n2").to_string());
    let said = run(&fleet, &["delete", "-f", &second, "--node", "n1"]);
    assert_eq!(said.failed(64).0, "spec.nodeName is \"n2\" and --node is \"n1\"");
    assert_eq!(run(&fleet, &["delete", "-f", &second]).ok(), "pod/web deleted on n2\n");
    let said = run(&fleet, &["delete", "-f", &second]);
    assert!(said.failed(1).0.ends_with("in namespace default on n2"), "{said:?}");
    assert!(run(&fleet, &["get", "pods"]).ok().ends_with(" n1\n"));

    let config =
        file("config.yaml", "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n");
    let said = run(&fleet, &["delete", "-f", &config]);
    assert!(said.failed(1).0.contains("`keelson delete config --etcd …`"), "{said:?}");
}
