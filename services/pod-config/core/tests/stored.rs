//! Parsing the value of an etcd key.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::stored::{ExpectedObject, parse_stored};
use keelson_pod_config_core::{FileContent, ManifestError};
use serde_json::{Value, json};

const KEY: &str = "/keelson/v1/nodes/n1/pods/default/web";

fn pod() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "main", "image": "busybox:1.36"}]},
    })
}

fn stored(value: &Value, kind: Kind, revision: i64) -> Result<FileContent, Vec<ManifestError>> {
    let expected = ExpectedObject { kind, namespace: "default", name: "web" };
    parse_stored(value.to_string().as_bytes(), KEY, expected, revision, &StaticRules::standalone("n1"))
}

fn read(value: &Value) -> Value {
    let content = stored(value, Kind::Pod, 7).unwrap_or_else(|errors| panic!("{errors:?}"));
    serde_json::from_slice(&content.pods[0].json).unwrap()
}

#[test]
fn a_stored_pod_keeps_its_name_and_gets_no_static_pod_fields() {
    let read = read(&pod());
    assert_eq!(read["metadata"]["name"], "web");
    assert_eq!(read["metadata"]["namespace"], "default");
    assert_eq!(read["spec"]["nodeName"], "n1");
    assert_eq!(read["spec"].get("tolerations"), None);
    assert_eq!(read["metadata"].get("annotations"), None);
    assert_eq!(read["status"]["phase"], "Pending");
}

#[test]
fn uid_and_status_of_a_stored_pod_are_computed_and_not_read() {
    let mut exported = read(&pod());
    let own = exported["metadata"]["uid"].clone();
    exported["status"] = json!({"phase": "Failed", "reason": "Evicted"});
    exported["metadata"]["uid"] = json!("somebody-elses");
    let again = read(&exported);
    assert_eq!(again["metadata"]["uid"], own);
    assert_eq!(again["status"], json!({"phase": "Pending"}));
}

#[test]
fn a_recreated_key_is_another_pod_and_a_new_image_is_the_same_pod() {
    let uid = |value: &Value, revision| stored(value, Kind::Pod, revision).unwrap().pods[0].uid.clone();
    let mut newer = pod();
    newer["spec"]["containers"][0]["image"] = json!("busybox:1.37");
    assert_eq!(uid(&pod(), 7), uid(&newer, 7));
    assert_ne!(uid(&pod(), 7), uid(&pod(), 8));
    newer["spec"]["containers"][0]["command"] = json!(["sh"]);
    assert_ne!(uid(&pod(), 7), uid(&newer, 7));
}

#[test]
fn system_priority_classes_set_the_priority_of_a_stored_pod() {
    for (class, priority) in [
        ("system-node-critical", json!(2_000_001_000)),
        ("system-cluster-critical", json!(2_000_000_000)),
        ("mine", Value::Null),
    ] {
        let mut value = pod();
        value["spec"]["priorityClassName"] = json!(class);
        assert_eq!(read(&value)["spec"]["priority"], priority, "{class}");
    }
}

#[test]
fn an_object_that_does_not_match_its_key_is_rejected_by_field() {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "web"}});
    let mut renamed = pod();
    renamed["metadata"]["name"] = json!("db");
    let mut moved = pod();
    moved["metadata"]["namespace"] = json!("other");
    let mut placed = pod();
    placed["spec"]["nodeName"] = json!("n2");
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [pod(), renamed]});
    for (value, kind, field, text) in [
        (&renamed, Kind::Pod, "metadata.name", "the object is the Pod default/db"),
        (&moved, Kind::Pod, "metadata.namespace", "the object is the Pod other/web"),
        (&secret, Kind::Pod, "kind", "the object is the Secret default/web"),
        (&secret, Kind::ConfigMap, "kind", "the key is for the ConfigMap default/web"),
        (&placed, Kind::Pod, "spec.nodeName", "the key belongs to the node n1"),
        (&list, Kind::Pod, "", "a key must contain one object, but there are 2"),
    ] {
        let errors = stored(value, kind, 7).unwrap_err();
        assert_eq!(errors[0].field, field, "{errors:?}");
        assert!(errors[0].message.contains(text), "{errors:?}");
    }
    assert!(stored(&secret, Kind::Secret, 7).is_ok());
    assert!(stored(&pod(), Kind::Pod, 7).is_ok());
}
