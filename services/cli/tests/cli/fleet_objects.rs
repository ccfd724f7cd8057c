//! Objects of a fleet that are read, changed and applied again, with a real etcd: no change is lost.

use std::path::Path;

use keelson_etcd::NodeKeys;
use serde_json::{Value, json};

use crate::fleet::run;
use crate::fleet_watch::Fleet;

/// Applies a text from a file.
fn apply(fleet: &Fleet, text: &str, args: &[&str]) -> crate::CommandResult {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.yaml");
    std::fs::write(&file, text).unwrap();
    run(fleet, &[&["apply", "-f", file.to_str().unwrap()], args].concat())
}

fn pod(image: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "main", "image": image}]},
    })
}

#[test]
fn fleet_pod_document_can_be_applied_again_without_reverting() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    fleet.node("n2");
    apply(&fleet, &pod("i:v1").to_string(), &["--node", "n1"]).ok();
    // The node has reported the first version and never reads the second.
    let mut reported = pod("i:v1");
    reported["metadata"] = json!({
        "name": "web", "namespace": "default", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {"kubernetes.io/config.source": "etcd"},
    });
    reported["status"] = json!({"phase": "Running"});
    fleet.put(NodeKeys::new("n1").pod_status("default", "web"), &reported, 0);
    apply(&fleet, &pod("i:v2").to_string(), &["--node", "n1"]).ok();

    for shown in [
        run(&fleet, &["get", "pod", "web", "-o", "json"]).json(),
        run(&fleet, &["get", "pods", "-o", "json"]).json()["items"][0].take(),
    ] {
        assert_eq!(shown["spec"]["containers"][0]["image"], "i:v2", "{shown:#}");
        assert_eq!(shown["status"]["phase"], "Running", "{shown:#}");
        let metadata = &shown["metadata"];
        assert_eq!(
            (&metadata["uid"], &metadata["creationTimestamp"], metadata.get("annotations")),
            (&"u1".into(), &"2026-01-01T00:00:00Z".into(), None)
        );
    }
    let yaml = run(&fleet, &["get", "pod", "web", "-o", "yaml"]).ok();
    let labelled = yaml.replacen("metadata:\n", "metadata:\n  labels: {tier: front}\n", 1);
    // The document names its node.
    assert_eq!(apply(&fleet, &labelled, &[]).ok(), "pod/web changed on n1\n");
    let after = run(&fleet, &["get", "pod", "web", "-o", "json"]).json();
    assert_eq!(after["spec"]["containers"][0]["image"], "i:v2");
    assert_eq!(after["metadata"]["labels"]["tier"], "front");
    let older = apply(&fleet, &yaml, &[]);
    assert!(older.failed(1).0.contains("pod/web on n1 has changed since it was read"), "{older:?}");

    // The table shows the reported pod, also for a pod that is not in etcd.
    let table = run(&fleet, &["get", "pods"]).ok();
    assert!(table.contains(" Running "), "{table}");
    fleet.put(NodeKeys::new("n2").pod_status("default", "static-n2"), &reported, 0);
    let shown = run(&fleet, &["get", "pod", "static-n2", "-o", "json"]).json();
    assert_eq!(shown, reported);
}

#[test]
fn fleet_secrets_are_listed_without_values_and_can_be_edited() {
    let fleet = Fleet::new(1);
    assert!(run(&fleet, &["get", "secrets"]).err.contains("No secrets found on any node."));
    fleet.node("n1");
    fleet.node("n2");
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: key}\ndata: {token: eHl6enk=}\nstringData: {token: xyzzy, user: me}\n";
    let map =
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: web}\ndata: {port: '80'}\n";
    apply(&fleet, &format!("{secret}---\n{map}"), &["--node", "n1"]).ok();
    // As another tool may write it.
    fleet.put(NodeKeys::new("n2").object("Secret", "default", "other"), &json!({"data": {}}), 0);

    let rows = |args: &[&str]| -> Vec<String> {
        let table = run(&fleet, args).ok();
        assert!(!table.contains("xyzzy") && !table.contains("eHl6enk"), "{table}");
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(rows(&["get", "secrets"]), ["NAME DATA NODE", "key 2 n1", "other 0 n2"]);
    assert_eq!(rows(&["get", "secret/key"]), ["NAME DATA NODE", "key 2 n1"]);
    assert_eq!(rows(&["get", "secrets", "--node", "n2"]), ["NAME DATA NODE", "other 0 n2"]);
    assert_eq!(rows(&["get", "cm", "-A"]), ["NAMESPACE NAME DATA NODE", "web settings 1 n1"]);
    let result = run(&fleet, &["get", "configmap", "settings"]);
    assert_eq!(
        result.failed(1),
        (
            "there is no configmap/settings on any node",
            "`keelson get configmaps -A --etcd …` lists all configmaps"
        )
    );

    let read = run(&fleet, &["get", "secret", "key", "-o", "yaml"]).ok();
    let first = read.replace("eHl6enk=", "Zmlyc3Q=");
    assert!(first != read && first.contains("resourceVersion: "), "{read}");
    assert_eq!(apply(&fleet, &first, &["--node", "n1"]).ok(), "secret/key changed on n1\n");
    let second = apply(&fleet, &read.replace("eHl6enk=", "c2Vjb25k"), &["--node", "n1"]);
    let (error, hint) = second.failed(1);
    assert!(error.contains("secret/key on n1 has changed since it was read"), "{error}");
    assert!(hint.contains("`keelson get secret key -o yaml --etcd …` again"), "{hint}");
    let now = run(&fleet, &["get", "secrets", "-o", "json"]).json();
    assert_eq!((&now["kind"], &now["items"][0]["data"]["token"]), (&"List".into(), &"Zmlyc3Q=".into()));
    assert_eq!(
        apply(&fleet, &now["items"][0].to_string(), &["--node", "n1"]).ok(),
        "secret/key unchanged on n1\n"
    );

    // A document of an object on two nodes would be ambiguous.
    apply(&fleet, secret, &["--node", "n2"]).ok();
    let result = run(&fleet, &["get", "secret", "key", "-o", "yaml"]);
    assert_eq!(result.failed(64), ("secret/key is on several nodes: n1, n2", "choose one with --node"));
    run(&fleet, &["get", "secret", "key", "-o", "yaml", "--node", "n2"]).ok();
}

#[test]
fn get_secrets_without_etcd_is_an_error_with_a_hint() {
    for what in ["secret", "secrets", "configmap", "configmaps", "cm"] {
        let result = crate::keelson(Path::new("/nowhere"), &["get", what]);
        let (error, hint) = result.failed(64);
        assert!(error.contains("is about keys of etcd"), "{error}");
        assert!(hint.contains("add --etcd ENDPOINTS"), "{hint}");
    }
}

#[test]
fn apply_of_an_outdated_configuration_is_refused() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    let text = "# ours\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n";
    assert_eq!(apply(&fleet, text, &[]).ok(), "config created on n1\n");
    let read = run(&fleet, &["get", "config"]).ok();
    assert!(read.starts_with("# n1: pending@") && read.ends_with(text), "{read}");
    assert_eq!(apply(&fleet, &read, &[]).ok(), "config unchanged on n1\n");
    assert_eq!(apply(&fleet, &read.replace("maxPods: 7", "maxPods: 8"), &[]).ok(), "config changed on n1\n");
    let late = apply(&fleet, &read.replace("maxPods: 7", "maxPods: 9"), &[]);
    let (error, hint) = late.failed(1);
    assert!(error.starts_with("config on n1 has changed since it was read: its revision was "), "{error}");
    assert!(
        hint.contains("`keelson get config --etcd …` again") && hint.contains("\"# resourceVersion:\""),
        "{hint}"
    );
    let now = run(&fleet, &["get", "config"]).ok();
    assert!(
        now.ends_with(&text.replace('7', "8")) && now.matches("# resourceVersion: ").count() == 1,
        "{now}"
    );
    assert_eq!(apply(&fleet, &text.replace('7', "9"), &[]).ok(), "config changed on n1\n");
}

#[test]
fn fleet_apply_errors_have_hints() {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: key}\ndata: {good: Zm9v, token: 'xyzzy!'}\n";
    let result = apply(&fleet, secret, &[]);
    let (error, _) = result.failed(1);
    assert!(error.contains("secret/key: data[token]: Invalid value: must be base64"), "{error}");
    assert!(!result.err.contains("xyzzy"), "{}", result.err);
    // More than a member accepts, and more than its server reads.
    for length in [1_700_000, 3 << 20] {
        let large = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "large"},
            "data": {"blob": "x".repeat(length)},
        });
        let result = apply(&fleet, &large.to_string(), &[]);
        let (error, hint) = result.failed(1);
        assert!(error.starts_with("etcd refuses to write "), "{error}");
        assert!(hint.contains("make the object smaller") && hint.contains("--max-request-bytes"), "{hint}");
    }
    for args in [&["-n", "web"][..], &["-A"]] {
        let result = apply(&fleet, &pod("i").to_string(), args);
        assert_eq!(result.failed(64).1, "write `metadata.namespace` into the manifest");
    }
    assert!(run(&fleet, &["get", "pods", "-A"]).err.contains("No pods found"));
}
