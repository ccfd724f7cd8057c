use keelson_kube_model::ResourceList;
use serde_json::{Value, json};

use super::*;
use crate::config::inputs::NodeInputs;
use crate::testing::pod;

/// ConfigMaps `cfg`, Secret `key`, and one object of each kind that cannot be read.
struct Objects;

fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

impl ObjectLookup for Objects {
    fn config_map(&self, name: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        match name {
            "cfg" => Ok(Some(map(&[("A", "cfg-a"), ("not-a-c-name", "x")]))),
            "broken" => Err("timeout".to_owned()),
            _ => Ok(None),
        }
    }

    fn secret(&self, name: &str) -> Result<Option<BTreeMap<String, String>>, String> {
        match name {
            "key" => Ok(Some(map(&[("A", "key-a"), ("token", "t")]))),
            _ => Ok(None),
        }
    }
}

impl FileLookup for Objects {
    fn key(&self, _volume: &str, path: &str, key: &str) -> Result<Option<String>, String> {
        match (path, key) {
            ("app.env", "FILE") => Ok(Some("from-file".to_owned())),
            ("bad.env", _) => Err("line 1: no value".to_owned()),
            _ => Ok(None),
        }
    }
}

fn build_env(container: Value) -> Result<Vec<(String, String)>, ConfigError> {
    let mut container = container;
    container["name"] = json!("a");
    let pod = pod(json!({ "containers": [container] }));
    let ips = ["10.1.0.2".to_owned()];
    let allocatable = ResourceList::new();
    let services = map(&[("DB_SERVICE_HOST", "10.0.0.5"), ("A", "service-a")]);
    let inputs = EnvInputs {
        sources: EnvSources { objects: &Objects, files: &Objects, services: &services },
        fields: FieldInputs {
            pod_ips: &ips,
            node: NodeInputs { name: "n", ips: &ips, allocatable: &allocatable },
        },
        devices: &[("DEVICE".to_owned(), "0".to_owned()), ("A".to_owned(), "device-a".to_owned())],
    };
    build(&pod, &pod.spec.containers[0], &inputs)
}

fn value<'a>(env: &'a [(String, String)], name: &str) -> Option<&'a str> {
    env.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

#[test]
fn device_variables_come_before_the_spec_and_services_after_it() {
    let env = build_env(json!({"env": [{"name": "B", "value": "1"}]})).unwrap();
    let names: Vec<&str> = env.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["DEVICE", "A", "B", "DB_SERVICE_HOST"]);
    assert_eq!(value(&env, "A"), Some("device-a"), "a service never replaces another variable");
}

#[test]
fn later_env_from_sources_override_earlier_ones() {
    let from = json!([{"configMapRef": {"name": "cfg"}}, {"secretRef": {"name": "key"}}]);
    let env = build_env(json!({ "envFrom": from })).unwrap();
    assert_eq!((value(&env, "A"), value(&env, "token")), (Some("key-a"), Some("t")));
    assert_eq!(value(&env, "not-a-c-name"), Some("x"), "keys are not validated");
    let env = build_env(json!({"envFrom": from, "env": [{"name": "A", "value": "own"}]})).unwrap();
    assert_eq!(value(&env, "A"), Some("own"));
}

#[test]
fn env_from_prefix_is_put_before_each_key() {
    let env = build_env(json!({"envFrom": [{"prefix": "P_", "configMapRef": {"name": "cfg"}}]})).unwrap();
    assert_eq!(value(&env, "P_A"), Some("cfg-a"));
}

#[test]
fn env_values_expand_earlier_variables_and_then_services() {
    let env = build_env(json!({"env": [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "x"},
        {"name": "BOTH", "value": "$(LATE)-$(DB_SERVICE_HOST)-$$(LATE)-$(DEVICE)"},
    ]}))
    .unwrap();
    assert_eq!(value(&env, "EARLY"), Some("$(LATE)"));
    assert_eq!(value(&env, "BOTH"), Some("x-10.0.0.5-$(LATE)-$(DEVICE)"));
}

#[test]
fn each_kind_of_env_reference_is_resolved() {
    let env = build_env(json!({"env": [
        {"name": "F", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "R", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "cfg", "key": "A"}}},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "key", "key": "token"}}},
        {"name": "K", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "app.env", "key": "FILE"}}},
    ]}))
    .unwrap();
    for (name, expected) in [("F", "web"), ("R", "0"), ("C", "cfg-a"), ("S", "t"), ("K", "from-file")] {
        assert_eq!(value(&env, name), Some(expected), "{name}");
    }
}

#[test]
fn a_missing_env_source_is_an_error_unless_optional() {
    let cases = [
        (json!({"envFrom": [{"configMapRef": {"name": "none"}}]}), "configmap \"none\" not found"),
        (json!({"envFrom": [{"secretRef": {"name": "none"}}]}), "secret \"none\" not found"),
        (
            json!({"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}]}),
            "configmap \"none\" not found",
        ),
        (
            json!({"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "cfg", "key": "k"}}}]}),
            "couldn't find key k in ConfigMap shop/cfg",
        ),
        (
            json!({"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]}),
            "couldn't find key k in Secret shop/key",
        ),
        (
            json!({"env": [{"name": "X", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]}),
            "environment variable key \"k\" not found in file \"p\" of volume \"v\"",
        ),
    ];
    for (container, message) in cases {
        assert_eq!(build_env(container.clone()).unwrap_err().to_string(), message);
        let text = container.to_string().replace("\"name\":\"none\"", "\"name\":\"none\",\"optional\":true");
        let text = text.replace("\"key\":\"k\"", "\"key\":\"k\",\"optional\":true");
        let env = build_env(serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(value(&env, "X"), None, "{text}");
    }
}

#[test]
fn an_unreadable_env_source_is_an_error_even_if_optional() {
    let map = json!({"envFrom": [{"configMapRef": {"name": "broken", "optional": true}}]});
    assert!(build_env(map).unwrap_err().to_string().contains("timeout"));
    let file = json!({"volumeName": "v", "path": "bad.env", "key": "k", "optional": true});
    let file = json!({"env": [{"name": "X", "valueFrom": {"fileKeyRef": file}}]});
    assert!(build_env(file).unwrap_err().to_string().contains("line 1: no value"));
}

#[test]
fn an_unknown_field_path_is_an_error_that_names_the_variable() {
    let env = json!({"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]});
    assert_eq!(
        build_env(env).unwrap_err().to_string(),
        "env X: field path \"status.phase\" is not supported"
    );
}

#[test]
fn referenced_objects_are_listed_once() {
    let pod = pod(json!({"containers": [{"name": "a",
        "envFrom": [{"configMapRef": {"name": "cfg"}}, {"secretRef": {"name": "key"}}],
        "env": [
            {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "cfg", "key": "k"}}},
            {"name": "Y", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]}]}));
    let (maps, secrets) = referenced_objects(&pod.spec.containers[0]);
    assert_eq!((maps, secrets), (vec!["cfg".to_owned()], vec!["key".to_owned(), "other".to_owned()]));
    assert_eq!(NoObjects.config_map("x"), Ok(None));
    assert_eq!(NoObjects.secret("x"), Ok(None));
    assert_eq!(NoObjects.key("v", "p", "k"), Ok(None));
}

#[test]
fn referenced_files_are_listed_once() {
    let file = |key: &str| json!({"name": key, "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": key}}});
    let pod = pod(
        json!({ "containers": [{"name": "a", "env": [file("A"), file("B"), file("A"), {"name": "X"}]}] }),
    );
    let wanted = |key: &str| ("v".to_owned(), "p".to_owned(), key.to_owned());
    assert_eq!(referenced_files(&pod.spec.containers[0]), [wanted("A"), wanted("B")]);
}
