//! `apply` of a configuration and `get events` with `--etcd` and a real etcd.

use std::path::Path;

use keelson_config::ConfigurationStatus;
use keelson_etcd::NodeKeys;
use serde_json::{Value, json};

use crate::fleet_watch::Fleet;
use crate::{CommandResult, keelson};

/// Runs a command with `--etcd`.
pub fn run(fleet: &Fleet, args: &[&str]) -> CommandResult {
    let endpoints = fleet.cluster.endpoints().join(",");
    keelson(Path::new("/nowhere"), &[args, &["--etcd", &endpoints]].concat())
}

#[test]
fn apply_to_a_node_that_refuses_all_configurations_fails() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    let keys = NodeKeys::new("n1");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n";
    std::fs::write(&file, text).unwrap();
    let apply = ["apply", "-f", file.to_str().unwrap()];
    let refusal = ConfigurationStatus::refusing_all("no init\nchange its files".into());
    fleet.put(keys.config_status(), &serde_json::to_value(&refusal).unwrap(), 0);
    let result = run(&fleet, &apply);
    assert_eq!(
        result.failed(1),
        ("n1 refuses every configuration under its key: no init", "change its files"),
        "{result:?}"
    );
    assert!(run(&fleet, &["get", "config"]).err.contains("There is no configuration under the key"));

    // A configuration that another tool has written is shown as refused, with any revision.
    fleet.put(keys.config(), &json!({"maxPods": 7}), 0);
    let shown = run(&fleet, &["get", "config"]).ok();
    assert!(shown.starts_with("# n1: refused@") && shown.contains(": no init\n"), "{shown}");
    let table = run(&fleet, &["get", "node", "-o", "wide"]).ok();
    assert!(table.contains("refused@") && table.contains(": no init"), "{table}");
    assert_eq!(run(&fleet, &["delete", "config"]).ok(), "config deleted on n1\n");

    // Without the refusal the configuration is stored.
    fleet.delete(keys.config_status());
    assert_eq!(run(&fleet, &apply).ok(), "config created on n1\n");
}

/// Writes an event as node-status does; `seconds` is the time since 1970.
fn write_event(
    fleet: &Fleet,
    node: &str,
    seconds: i64,
    (kind, name): (&str, &str),
    reason: &str,
    count: u32,
) {
    let namespace = if kind == "Node" { "" } else { "default" };
    let value = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": format!("{name}.{seconds:x}"), "namespace": "default"},
        "involvedObject": {"kind": kind, "namespace": namespace, "name": name, "uid": "", "fieldPath": ""},
        "reason": reason, "message": "so it is", "type": "Normal", "count": count,
        "firstTimestamp": "1970-01-01T00:00:01Z", "lastTimestamp": "1970-01-01T00:00:01Z",
        "source": {"component": "pod-sync", "host": node},
    });
    let sequence = u64::try_from(seconds).unwrap();
    fleet.put(NodeKeys::new(node).event(seconds * 1_000_000_000, "pod-sync", sequence), &value, 0);
}

/// The last words of each row: object, count, node and message.
fn rows(table: &str) -> Vec<String> {
    let words = |line: &str| line.split_whitespace().skip(3).collect::<Vec<_>>().join(" ");
    table.lines().skip(1).map(words).collect()
}

#[test]
fn fleet_events_are_sorted_by_time_and_watched() {
    let fleet = Fleet::new(1);
    assert!(run(&fleet, &["get", "events"]).err.contains("No events found on any node."));
    fleet.node("n1");
    fleet.node("n2");
    write_event(&fleet, "n1", 1, ("Pod", "web"), "Started", 1);
    write_event(&fleet, "n2", 2, ("Node", "n2"), "Rebooted", 1);
    write_event(&fleet, "n1", 3, ("Pod", "web"), "Started", 2);
    let table = run(&fleet, &["get", "events"]).ok();
    assert!(table.starts_with("LAST SEEN   TYPE"), "{table}");
    assert_eq!(rows(&table), ["node/n2 1 n2 so it is", "pod/web 2 n1 so it is"], "{table}");
    for args in [&["--node", "n1"][..], &["--for", "pod/web"]] {
        let table = run(&fleet, &[&["get", "events"], args].concat()).ok();
        assert_eq!(rows(&table), ["pod/web 2 n1 so it is"], "{args:?}: {table}");
    }
    run(&fleet, &["get", "events", "--for", "deployment/x"]).failed(64);
    let list: Value = run(&fleet, &["get", "events", "-o", "json"]).json();
    assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&"EventList".into(), 2));
    assert_eq!(list["items"][1]["count"], 2);

    let watch = fleet.watch(&["get", "events", "--node", "n1"]);
    let next = || watch.words().split(' ').skip(2).collect::<Vec<_>>().join(" ");
    assert_eq!(watch.words(), "LAST SEEN TYPE REASON OBJECT COUNT NODE MESSAGE");
    assert_eq!(next(), "Started pod/web 2 n1 so it is");
    // Neither an expired event nor a reported pod is shown as a change.
    fleet.delete(NodeKeys::new("n1").event(1_000_000_000, "pod-sync", 1));
    fleet.delete(NodeKeys::new("n1").event(3_000_000_000, "pod-sync", 3));
    fleet.put(NodeKeys::new("n1").pod_status("default", "web"), &json!({"kind": "Pod"}), 0);
    write_event(&fleet, "n1", 4, ("Pod", "web"), "Killing", 1);
    assert_eq!(next(), "Killing pod/web 1 n1 so it is");
    write_event(&fleet, "n1", 5, ("Pod", "web"), "Killing", 2);
    assert_eq!(next(), "Killing pod/web 2 n1 so it is");
    assert_eq!(watch.interrupt(), (Some(2), Vec::new()));
}
