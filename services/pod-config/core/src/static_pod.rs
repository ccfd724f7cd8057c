//! What a Pod of a manifest becomes on this node (pod-lifecycle.md §2.1).

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher};
use std::sync::Arc;

use keelson_kube_model::validate::{AllowedReferences, static_pod_api_references, validate_pod};
use keelson_kube_model::{Pod, PodFullName, PodOrigin, annotations, default_pod, fill_nulls, static_pod_uid};
use serde_json::{Map, Value, json};

use crate::error::{ManifestError, Why};
use crate::manifest::{Document, encoded};

/// What the rules depend on beside the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticRules {
    /// Name of this node.
    pub node_name: String,
    /// API objects that a pod may name: those that may stand beside it. With an API server there are none.
    pub allowed: AllowedReferences,
    /// Where the pod is a key of a store rather than a part of a file: the revision that made the key. Such a pod is no
    /// static one: it keeps the name that it has, and tolerates what it says.
    pub stored: Option<i64>,
    /// The manifest is of a URL: its UIDs depend on that and not on the node, and its pods tolerate what they say.
    pub url: bool,
}

impl StaticRules {
    /// The rules of files where an API server is the control plane, if it is: it refuses the mirrors of pods that refer to its
    /// objects (the gate `PreventStaticPodAPIReferences`).
    pub fn new(node_name: &str, has_api_server: bool) -> Self {
        let rules = Self::standalone(node_name);
        if has_api_server { Self { allowed: AllowedReferences::default(), ..rules } } else { rules }
    }

    /// The rules without an API server: Secrets and ConfigMaps come from manifests too.
    pub fn standalone(node_name: &str) -> Self {
        let allowed = AllowedReferences { config_maps: true, secrets: true };
        Self { node_name: node_name.to_owned(), allowed, stored: None, url: false }
    }

    /// The same rules for manifests that come from a URL.
    #[must_use]
    pub fn of_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// The name that a pod of the manifest gets on this node.
    pub fn name_on_node(&self, name: &str) -> String {
        match self.stored {
            Some(_) => name.to_owned(),
            None => format!("{name}-{}", self.node_name.to_lowercase()),
        }
    }
}

/// A pod of a manifest, defaulted and valid.
#[derive(Debug, Clone, PartialEq)]
pub struct StaticPod {
    /// `metadata.uid`, from the manifest or computed.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name` with the node's name behind it.
    pub name: String,
    /// The Pod as JSON, without the annotations of the merge step.
    pub json: Arc<[u8]>,
    /// Of the parts whose change is an update of the pod.
    pub fingerprint: Fingerprint,
    /// Document in its file, 1-based.
    pub document: u32,
    /// Line where its document begins, 1-based.
    pub line: u32,
    /// Fields of the manifest that were left out: they belong to the control plane that it was copied from.
    pub ignored: Vec<String>,
}

impl StaticPod {
    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        PodFullName::new(&self.name, &self.namespace)
    }
}

/// What two versions of a pod are compared by (pod-lifecycle.md §2.5). Only comparable within one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// Spec, labels, deletion fields and annotations but the local three.
    pub semantic: u64,
    /// The status.
    pub status: u64,
    /// Whether deletion was asked for.
    pub deleting: bool,
}

impl Fingerprint {
    /// The fingerprint of a Pod.
    pub fn of(pod: &Value) -> Self {
        let null = Value::Null;
        let at = |pointer| pod.pointer(pointer).unwrap_or(&null);
        let mut hasher = DefaultHasher::new();
        for pointer in [
            "/spec",
            "/metadata/labels",
            "/metadata/deletionTimestamp",
            "/metadata/deletionGracePeriodSeconds",
        ] {
            hash_value(at(pointer), &mut hasher);
        }
        let own: BTreeMap<_, _> = at("/metadata/annotations")
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
            .collect();
        for (key, value) in own {
            key.hash(&mut hasher);
            hash_value(value, &mut hasher);
        }
        let semantic = hasher.finish();
        let mut hasher = DefaultHasher::new();
        hash_value(at("/status"), &mut hasher);
        let deleting = !at("/metadata/deletionTimestamp").is_null();
        Self { semantic, status: hasher.finish(), deleting }
    }
}

/// Annotations that the agent writes for itself; they are no part of what a pod is.
pub const LOCAL_ANNOTATIONS: [&str; 3] =
    [annotations::CONFIG_SOURCE, annotations::CONFIG_MIRROR, annotations::CONFIG_SEEN];

/// Feeds a value into a hash, whatever the order of its keys.
fn hash_value(value: &Value, hasher: &mut impl Hasher) {
    match value {
        Value::Null => 0u8.hash(hasher),
        Value::Bool(b) => (1u8, b).hash(hasher),
        Value::Number(n) => (2u8, n.to_string()).hash(hasher),
        Value::String(s) => (3u8, s).hash(hasher),
        Value::Array(items) => {
            (4u8, items.len()).hash(hasher);
            items.iter().for_each(|item| hash_value(item, hasher));
        }
        Value::Object(map) => {
            (5u8, map.len()).hash(hasher);
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            for (key, value) in entries {
                key.hash(hasher);
                hash_value(value, hasher);
            }
        }
    }
}

/// Defaults, names, marks and checks the Pod in `document`, which stands in the file or at the URL `path`.
pub(crate) fn prepare(
    document: &Document,
    path: &str,
    rules: &StaticRules,
) -> Result<StaticPod, Vec<ManifestError>> {
    let fail = |field: &str, message: String| document.error(Why::Invalid, field, message);
    let mut value = document.value.clone();
    complete(&mut value);
    // The UID is one of what was written: a pod that runs keeps it, whatever is left out of its manifest since.
    let mut written = value.clone();
    default_pod(&mut written);
    fill_nulls(&mut value);
    let ignored = strip_foreign(&mut value);
    default_pod(&mut value);
    let mut typed = decode(&value).map_err(|(field, message)| vec![fail(&field, message)])?;
    if typed.metadata.name.is_empty() {
        return Err(vec![fail("metadata.name", "Required value: name is required".into())]);
    }
    let elsewhere = &typed.spec.node_name;
    if rules.stored.is_some() && !elsewhere.is_empty() && *elsewhere != rules.node_name {
        let message = format!("Invalid value: {elsewhere:?}: the key is one of the node {}", rules.node_name);
        return Err(vec![fail("spec.nodeName", message)]);
    }
    let uid = match (typed.metadata.uid.as_str(), rules.stored) {
        (_, Some(create_revision)) => {
            static_pod_uid(&written, &rules.node_name, PodOrigin::Stored { key: path, create_revision })
        }
        ("", None) if rules.url => static_pod_uid(&written, &rules.node_name, PodOrigin::Url(path)),
        ("", None) => static_pod_uid(&written, &rules.node_name, PodOrigin::File(path)),
        (own, None) if is_plain(own) => own.to_owned(),
        (own, None) => {
            let message = format!(
                "Invalid value: {own:?}: must be letters, digits, '-', '_' and '.', as it names folders"
            );
            return Err(vec![fail("metadata.uid", message)]);
        }
    };
    place_on_node(&mut value, &uid, rules);
    typed = decode(&value).map_err(|(field, message)| vec![fail(&field, message)])?;
    let mut errors: Vec<_> =
        validate_pod(&typed).into_iter().map(|found| fail(&found.field, found.message)).collect();
    if let Some(resource) = static_pod_api_references(&typed, rules.allowed) {
        // Where Secrets and ConfigMaps are refused there is an API server.
        let why = if rules.allowed == AllowedReferences::default() {
            "the API server refuses its mirror; have a pod of the API name them"
        } else {
            "without an API server there are none"
        };
        let message = format!("Forbidden: a static pod may not refer to {resource}; {why}");
        errors.push(fail(field_of(&resource), message));
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(StaticPod {
        uid,
        namespace: typed.metadata.namespace,
        name: typed.metadata.name,
        fingerprint: Fingerprint::of(&value),
        json: encoded(document, &value)?,
        document: document.number,
        line: document.line,
        ignored,
    })
}

/// Annotations that an agent writes for itself. In a manifest they would make the pod another source's, or a mirror that never
/// runs.
const STEERING_ANNOTATIONS: [&str; 4] = [
    annotations::CONFIG_HASH,
    annotations::CONFIG_MIRROR,
    annotations::CONFIG_SEEN,
    annotations::CONFIG_SOURCE,
];
/// What of `metadata` only a control plane writes. A pod that is being deleted there would never start here.
const STEERING_METADATA: [&str; 7] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generation",
    "managedFields",
    "resourceVersion",
];
/// Of these an export always has something that steers nothing, and nobody misses it.
const SILENT: [&str; 4] = ["creationTimestamp", "generation", "managedFields", "resourceVersion"];

/// Removes what a pod carries that was exported from a control plane, and names what could have mattered.
fn strip_foreign(pod: &mut Value) -> Vec<String> {
    let mut ignored = Vec::new();
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in STEERING_METADATA {
            let removed = metadata.shift_remove(field).filter(|value| !value.is_null());
            if removed.is_some() && !SILENT.contains(&field) {
                ignored.push(format!("metadata.{field}"));
            }
        }
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            for key in STEERING_ANNOTATIONS {
                if annotations.shift_remove(key).is_some() {
                    ignored.push(format!("metadata.annotations[{key}]"));
                }
            }
        }
    }
    let status = pod.as_object_mut().and_then(|pod| pod.shift_remove("status"));
    let is_empty = |status: &Value| status.is_null() || status.as_object().is_some_and(Map::is_empty);
    if status.is_some_and(|status| !is_empty(&status)) {
        ignored.push("status".to_owned());
    }
    ignored
}

/// The Pod as typed fields, or the path of the field whose type is wrong.
fn decode(value: &Value) -> Result<Pod, (String, String)> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let field = if field == "." { String::new() } else { field };
        (field, format!("Invalid type: {}", error.inner()))
    })
}

/// Null or absent parts that every pod has, so that the rules have where to write.
fn complete(value: &mut Value) {
    let Some(object) = value.as_object_mut() else { return };
    object.insert("apiVersion".into(), json!("v1"));
    object.insert("kind".into(), json!("Pod"));
    for part in ["metadata", "spec"] {
        if object.get(part).is_none_or(Value::is_null) {
            object.insert(part.into(), json!({}));
        }
    }
}

fn place_on_node(value: &mut Value, uid: &str, rules: &StaticRules) {
    if let Some(metadata) = child(value, "metadata") {
        let text = |m: &Map<String, Value>, key: &str| {
            m.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let name = rules.name_on_node(&text(metadata, "name"));
        let namespace = text(metadata, "namespace");
        metadata.insert("name".into(), json!(name));
        metadata.insert("namespace".into(), json!(if namespace.is_empty() { "default" } else { &namespace }));
        metadata.insert("uid".into(), json!(uid));
        if rules.stored.is_none()
            && let Some(annotations) = metadata_child(metadata, "annotations")
        {
            annotations.insert(annotations::CONFIG_HASH.into(), json!(uid));
        }
    }
    if let Some(spec) = child(value, "spec") {
        spec.insert("nodeName".into(), json!(rules.node_name));
        if rules.stored.is_some() {
            add_priority(spec);
            value.as_object_mut().map(|pod| pod.insert("status".into(), json!({"phase": "Pending"})));
            return;
        }
        if !rules.url {
            tolerate_everything(spec);
        }
    }
    if let Some(status) = child(value, "status") {
        status.insert("phase".into(), json!("Pending"));
    }
}

/// No taint ends a pod of a file (pod-lifecycle.md §2.1).
fn tolerate_everything(spec: &mut Map<String, Value>) {
    let tolerations = spec.entry("tolerations").or_insert_with(|| json!([]));
    if tolerations.is_null() {
        *tolerations = json!([]);
    }
    let everything = json!({"operator": "Exists", "effect": "NoExecute"});
    if let Some(list) = tolerations.as_array_mut()
        && !list.contains(&everything)
    {
        list.push(everything);
    }
}

/// What the API server makes of the two classes that are always there, where there is no API server.
fn add_priority(spec: &mut Map<String, Value>) {
    let priority = match spec.get("priorityClassName").and_then(Value::as_str) {
        Some("system-node-critical") => 2_000_001_000,
        Some("system-cluster-critical") => 2_000_000_000,
        _ => return,
    };
    spec.insert("priority".into(), json!(priority));
}

fn child<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Map<String, Value>> {
    metadata_child(value.as_object_mut()?, key)
}

fn metadata_child<'a>(map: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Map<String, Value>> {
    let value = map.entry(key).or_insert_with(|| json!({}));
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

/// Whether a UID can stand in a path and in a cgroup's name.
fn is_plain(uid: &str) -> bool {
    uid.len() <= 128
        && !uid.starts_with('.')
        && uid.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// The field to which an API reference belongs, for its line.
fn field_of(resource: &str) -> &'static str {
    match resource {
        "serviceaccounts" => "spec.serviceAccountName",
        "resourceclaims" => "spec.resourceClaims",
        "secrets" | "configmaps" => "spec",
        _ => "spec.volumes",
    }
}
