//! The objects under the keys: as their author wrote them, without fields that a control plane writes.

use keelson_etcd::{Entry, NodeKeys};
use keelson_kube_model::validate::{AllowedReferences, static_pod_api_references, validate_pod};
use keelson_kube_model::{Pod, annotations, base64, default_pod, fill_nulls};
use serde_json::{Map, Value, json};

use super::volume_objects;
use crate::cmd::manifests::{KINDS, ObjectKind};

/// Fields of `metadata` that a control plane writes.
const CONTROL_PLANE_FIELDS: [&str; 7] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "uid",
];

/// Those of them that `keelson get` and an API server show only of a pod that is being deleted; a warning names them.
const WARNED_FIELDS: [&str; 2] = ["deletionGracePeriodSeconds", "deletionTimestamp"];

/// An object to store.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DesiredObject {
    pub(super) kind: ObjectKind,
    pub(super) namespace: String,
    pub(super) name: String,
    /// `spec.nodeName`; empty if not set.
    pub(super) node: String,
    /// `metadata.resourceVersion`: the revision that the author has read.
    pub(super) revision: Option<i64>,
    pub(super) value: Value,
    /// The paths of fields that are not stored.
    pub(super) ignored: Vec<String>,
}

impl DesiredObject {
    /// Reads an object of a manifest. An error has a line for each problem.
    pub(super) fn of(document: &Value) -> Result<Self, String> {
        let kind = kind_of(document)?;
        let mut value = document.clone();
        let metadata = value["metadata"].as_object_mut().ok_or("metadata: Required value")?;
        let name = text_of(metadata, "name").to_owned();
        let revision = revision_of(metadata)?;
        let namespace = namespace_of(kind, metadata)?;
        for (field, part) in [("metadata.name", &name), ("metadata.namespace", &namespace)] {
            if part.is_empty() && (kind.is_namespaced() || field == "metadata.name")
                || !part.bytes().all(is_name_byte)
            {
                return Err(format!(
                    "{field}: Invalid value: {part:?}: must be lower case letters, digits, '-' and '.'"
                ));
            }
        }
        let ignored = remove_control_plane_fields(metadata);
        if kind.is_namespaced() {
            metadata.insert("namespace".into(), json!(namespace));
        }
        if let Some(object) = value.as_object_mut() {
            object.remove("status");
        }
        let node = value.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default().to_owned();
        if node.contains('/') {
            return Err(format!("spec.nodeName: Invalid value: {node:?}: must be the name of a node"));
        }
        match kind {
            ObjectKind::Pod => check(&value)?,
            ObjectKind::Secret | ObjectKind::ConfigMap => check_data(kind, &name, &value)?,
            ObjectKind::PersistentVolume | ObjectKind::PersistentVolumeClaim => {
                volume_objects::check(kind, &value)?;
            }
        }
        Ok(Self { kind, namespace, name, node, revision, value, ignored })
    }

    /// The object's key for a node.
    pub(super) fn key(&self, node: &str) -> String {
        key(node, self.kind, &self.namespace, &self.name)
    }
}

/// The kind of a document, one of those that can be stored.
fn kind_of(document: &Value) -> Result<ObjectKind, String> {
    let text = |field: &str| document[field].as_str().unwrap_or_default();
    let (group, kind) = (text("apiVersion"), text("kind"));
    let known = ObjectKind::parse(kind).filter(|_| group == "v1");
    known.ok_or_else(|| format!("{kind:?} of {group:?} is not a {KINDS} of v1"))
}

/// The namespace of an object, `default` if it has none; empty for a PersistentVolume.
fn namespace_of(kind: ObjectKind, metadata: &Map<String, Value>) -> Result<String, String> {
    match (text_of(metadata, "namespace"), kind.is_namespaced()) {
        ("", true) => Ok("default".to_owned()),
        (own, true) => Ok(own.to_owned()),
        ("", false) => Ok(String::new()),
        (_, false) => {
            Err("metadata.namespace: Forbidden: a PersistentVolume has no namespace; remove the field".into())
        }
    }
}

/// A field of `metadata`; empty if it is not a text.
fn text_of<'a>(metadata: &'a Map<String, Value>, key: &str) -> &'a str {
    metadata.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// `metadata.resourceVersion` as a number; `None` if it is not set.
fn revision_of(metadata: &Map<String, Value>) -> Result<Option<i64>, String> {
    match text_of(metadata, "resourceVersion") {
        "" => Ok(None),
        written => written.parse().map(Some).map_err(|_| {
            format!("metadata.resourceVersion: Invalid value: {written:?}: leave it out, or keep the value of `keelson get`")
        }),
    }
}

/// Removes what a control plane writes. Returns the paths of those fields that a warning names.
fn remove_control_plane_fields(metadata: &mut Map<String, Value>) -> Vec<String> {
    let mut ignored = Vec::new();
    for key in CONTROL_PLANE_FIELDS {
        let written = metadata.remove(key).filter(|value| !value.is_null());
        if written.is_some() && WARNED_FIELDS.contains(&key) {
            ignored.push(format!("metadata.{key}"));
        }
    }
    if let Some(written) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        for key in [annotations::CONFIG_SOURCE, annotations::CONFIG_SEEN, annotations::CONFIG_HASH] {
            written.remove(key);
        }
        if written.remove(annotations::CONFIG_MIRROR).is_some() {
            ignored.push(format!("metadata.annotations[{}]", annotations::CONFIG_MIRROR));
        }
        if written.is_empty() {
            metadata.remove("annotations");
        }
    }
    ignored
}

/// The key of an object of a node.
pub(super) fn key(node: &str, kind: ObjectKind, namespace: &str, name: &str) -> String {
    let keys = NodeKeys::new(node);
    match kind {
        ObjectKind::Pod => keys.pod(namespace, name),
        kind if kind.is_namespaced() => keys.object(kind.as_str(), namespace, name),
        kind => keys.cluster_object(kind.as_str(), name),
    }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.')
}

/// Checks what the node would refuse, so that the author gets the error.
fn check(pod: &Value) -> Result<(), String> {
    let mut defaulted = pod.clone();
    fill_nulls(&mut defaulted);
    default_pod(&mut defaulted);
    let mut typed: Pod = serde_json::from_value(defaulted).map_err(|error| error.to_string())?;
    let mut errors: Vec<String> =
        validate_pod(&typed).into_iter().map(|found| format!("{}: {}", found.field, found.message)).collect();
    let allowed = AllowedReferences { config_maps: true, secrets: true };
    // The keys of the node may define claims.
    typed.spec.volumes.retain(|volume| volume.persistent_volume_claim.is_none());
    if let Some(resource) = static_pod_api_references(&typed, allowed) {
        errors.push(format!("spec: Forbidden: the pod refers to {resource}, which need an API server"));
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// Checks what the node would refuse of a Secret or a ConfigMap. Errors name keys and never values.
fn check_data(kind: ObjectKind, name: &str, object: &Value) -> Result<(), String> {
    let is_base64 = |value: &Value| value.as_str().is_some_and(|text| base64::decode(text).is_some());
    let base64: (fn(&Value) -> bool, _) = (is_base64, "must be base64");
    let text: (fn(&Value) -> bool, _) = (Value::is_string, "must be text; quote it");
    let mut object = object.clone();
    fill_nulls(&mut object);
    let fields = if kind == ObjectKind::Secret {
        [("data", base64, "; use stringData for plain text"), ("stringData", text, "")]
    } else {
        [("data", text, ""), ("binaryData", base64, "")]
    };
    let mut errors = Vec::new();
    for (field, (is_good, rule), hint) in fields {
        match &object[field] {
            Value::Null => {}
            Value::Object(map) => {
                let bad = map.iter().filter(|(_, value)| !is_good(value));
                errors.extend(bad.map(|(key, _)| {
                    format!("{}: {field}[{key}]: Invalid value: {rule}{hint}", kind.label(name))
                }));
            }
            _ => errors.push(format!("{}: {field}: Invalid value: must be a map", kind.label(name))),
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// The objects of a manifest, lists expanded, all others before the pods that may need them.
pub(super) fn desired_objects(documents: &[Value]) -> Result<Vec<DesiredObject>, String> {
    let mut all = Vec::new();
    for document in documents {
        match document["kind"].as_str() {
            None if document.is_null() => {}
            Some("List" | "PodList") => {
                for item in document["items"].as_array().into_iter().flatten() {
                    let mut item = item.clone();
                    if document["kind"] == "PodList"
                        && let Some(pod) = item.as_object_mut()
                    {
                        pod.entry("apiVersion").or_insert_with(|| json!("v1"));
                        pod.entry("kind").or_insert_with(|| json!("Pod"));
                    }
                    all.push(DesiredObject::of(&item)?);
                }
            }
            _ => all.push(DesiredObject::of(document)?),
        }
    }
    all.sort_by_key(|object| object.kind == ObjectKind::Pod);
    Ok(all)
}

/// Reads the JSON or YAML object under a key; `None` if it is not one.
pub(super) fn read(entry: &Entry) -> Option<Value> {
    let text = std::str::from_utf8(&entry.value).ok()?;
    let value: Value = serde_json::from_str(text).ok().or_else(|| serde_saphyr::from_str(text).ok())?;
    value.is_object().then_some(value)
}

/// The object of a key as its author wrote it, with its revision for a later `apply`. Of one that cannot be read
/// only its name.
pub(super) fn to_document(entry: &Entry, kind: ObjectKind, namespace: &str, name: &str) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": kind.as_str(), "metadata": {}});
    if let (Some(to), Some(Value::Object(from))) = (object.as_object_mut(), read(entry)) {
        to.extend(from);
    }
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    let metadata = &mut object["metadata"];
    metadata["name"] = json!(name);
    if kind.is_namespaced() {
        metadata["namespace"] = json!(namespace);
    }
    metadata["resourceVersion"] = json!(entry.mod_revision.to_string());
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "web"},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        })
    }

    #[test]
    fn output_of_get_can_be_applied_again() {
        let first = DesiredObject::of(&pod()).unwrap();
        let value = first.value.to_string().into_bytes();
        let entry = Entry { key: first.key("n1"), value, create_revision: 3, mod_revision: 7, lease: 0 };
        let mut exported = to_document(&entry, ObjectKind::Pod, "default", "web");
        exported["status"] = json!({"phase": "Running"});
        exported["metadata"]["uid"] = json!("u");
        exported["metadata"]["annotations"] = json!({"kubernetes.io/config.source": "etcd"});
        let again = DesiredObject::of(&exported).unwrap();
        assert_eq!((again.revision, first.revision), (Some(7), None));
        assert_eq!(again.value, first.value);
        assert_eq!(again.key("n1"), "/keelson/v1/nodes/n1/pods/default/web");
        assert_eq!(again.ignored, [""; 0]);
        exported["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        exported["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "h"});
        let ending = DesiredObject::of(&exported).unwrap();
        assert_eq!(ending.value, first.value);
        let ignored = ["metadata.deletionTimestamp", "metadata.annotations[kubernetes.io/config.mirror]"];
        assert_eq!(ending.ignored, ignored);
    }

    #[test]
    fn object_under_a_key_is_read_as_json_or_yaml() {
        let to_document = |text: &str| {
            let value = text.as_bytes().to_vec();
            let entry = Entry { key: "k".into(), value, create_revision: 3, mod_revision: 7, lease: 0 };
            to_document(&entry, ObjectKind::Secret, "web", "key")
        };
        let expected = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "key", "namespace": "web", "resourceVersion": "7"}, "type": "Opaque",
        });
        assert_eq!(to_document(r#"{"apiVersion": "v1", "kind": "Secret", "type": "Opaque"}"#), expected);
        assert_eq!(to_document("metadata: {name: key, resourceVersion: '3'}\ntype: Opaque\n"), expected);
        let mut unreadable = expected.clone();
        unreadable.as_object_mut().unwrap().remove("type");
        for text in ["", "[1]", "a: [", "metadata: 7"] {
            assert_eq!(to_document(text), unreadable, "{text}");
        }
    }

    #[test]
    fn invalid_secret_data_error_names_keys_without_values() {
        let error = |kind: &str, field: &str, value: Value| {
            let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "s"}});
            object[field] = value;
            DesiredObject::of(&object).err()
        };
        for (kind, field, value, expected) in [
            (
                "Secret",
                "data",
                json!({"a": "Zm9v", "token": "xyzzy!"}),
                "secret/s: data[token]: Invalid value: must be base64",
            ),
            ("Secret", "data", json!({"token": 7}), "data[token]"),
            ("Secret", "data", json!({"token": "Zg"}), "data[token]"),
            ("Secret", "data", json!(["Zm9v"]), "data: Invalid value"),
            ("Secret", "stringData", json!({"token": 7}), "stringData[token]: Invalid value: must be text"),
            (
                "ConfigMap",
                "data",
                json!({"port": 80}),
                "configmap/s: data[port]: Invalid value: must be text",
            ),
            ("ConfigMap", "binaryData", json!({"blob": "xyzzy!"}), "binaryData[blob]"),
        ] {
            let error = error(kind, field, value).unwrap();
            assert!(error.contains(expected) && !error.contains("xyzzy"), "{error}");
        }
        for (kind, field, value) in [
            ("Secret", "data", json!({"a": "Zm9v\nYmFy\n", "b": "", "c": "Zh=="})),
            ("Secret", "stringData", json!({"a": "xyzzy!"})),
            ("Secret", "data", Value::Null),
            ("ConfigMap", "data", json!({"a": "xyzzy!"})),
            ("ConfigMap", "binaryData", json!({"a": "Zg=="})),
        ] {
            assert_eq!(error(kind, field, value), None);
        }
    }

    #[test]
    fn invalid_objects_are_refused_before_they_are_stored() {
        let with = |pointer: &str, value: Value| {
            let mut other = pod();
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            other.pointer_mut(parent).unwrap()[field] = value;
            DesiredObject::of(&other).unwrap_err()
        };
        for (pointer, value, text) in [
            ("/kind", json!("Service"), "\"Service\" of \"v1\" is not a Pod"),
            ("/apiVersion", json!("v2"), "\"Pod\" of \"v2\" is not a Pod"),
            ("/kind", json!("PersistentVolumeClaim"), "spec.accessModes: Required value"),
            ("/metadata/name", json!("a/b"), "metadata.name: Invalid value"),
            ("/metadata/namespace", json!("A"), "metadata.namespace: Invalid value"),
            ("/metadata/resourceVersion", json!("new"), "metadata.resourceVersion: Invalid value"),
            ("/spec/containers", json!([]), "spec.containers"),
            ("/spec/serviceAccountName", json!("x"), "refers to serviceaccounts"),
            ("/spec/nodeName", json!("a/b"), "spec.nodeName: Invalid value"),
        ] {
            let error = with(pointer, value);
            assert!(error.contains(text), "{pointer}: {error}");
        }
    }

    #[test]
    fn pods_may_refer_to_claims_and_to_nothing_that_needs_an_api_server() {
        let with = |volume: Value| {
            let mut pod = pod();
            pod["spec"]["volumes"] =
                json!([{"name": "a", "persistentVolumeClaim": {"claimName": "db"}}, volume]);
            DesiredObject::of(&pod).map(|_| ())
        };
        with(json!({"name": "b", "emptyDir": {}})).unwrap();
        let error =
            with(json!({"name": "b", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}})).unwrap_err();
        assert!(error.contains("(via ephemeral volumes), which need an API server"), "{error}");
        let error = with(json!({"name": "a", "emptyDir": {}})).unwrap_err();
        assert!(error.contains("spec.volumes[1].name"), "{error}");
    }

    #[test]
    fn a_persistent_volume_has_no_namespace_in_its_key_and_document() {
        let mut volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/srv"}},
            "status": {"phase": "Bound"},
        });
        let stored = DesiredObject::of(&volume).unwrap();
        assert_eq!(stored.key("n1"), "/keelson/v1/nodes/n1/objects/PersistentVolume/disk");
        let mut expected = volume.clone();
        expected.as_object_mut().unwrap().remove("status");
        assert_eq!((&*stored.namespace, &stored.value), ("", &expected));
        let value = stored.value.to_string().into_bytes();
        let entry = Entry { key: stored.key("n1"), value, create_revision: 3, mod_revision: 7, lease: 0 };
        let shown = to_document(&entry, stored.kind, "", "disk");
        assert_eq!(shown["metadata"], json!({"name": "disk", "resourceVersion": "7"}));
        volume["metadata"]["namespace"] = json!("web");
        let error = DesiredObject::of(&volume).unwrap_err();
        assert!(error.contains("metadata.namespace: Forbidden"), "{error}");
        volume["metadata"] = json!({});
        assert!(DesiredObject::of(&volume).unwrap_err().contains("metadata.name: Invalid value"));
    }

    #[test]
    fn secrets_and_config_maps_are_stored_before_pods() {
        let secret =
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "web"}});
        let list = json!({"apiVersion": "v1", "kind": "PodList", "items": [{"metadata": {"name": "a"}, "spec": pod()["spec"]}]});
        let kinds: Vec<_> = desired_objects(&[pod(), list, Value::Null, secret]).unwrap();
        let names: Vec<_> =
            kinds.iter().map(|o| (o.kind.as_str(), o.namespace.as_str(), o.name.as_str())).collect();
        assert_eq!(names, [("Secret", "web", "s"), ("Pod", "default", "web"), ("Pod", "default", "a")]);
    }
}
