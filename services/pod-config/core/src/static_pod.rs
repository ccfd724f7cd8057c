//! Defaults, names and validates a Pod of a manifest for this node (pod-lifecycle.md §2.1).

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher};
use std::sync::Arc;

use keelson_kube_model::validate::{AllowedReferences, static_pod_api_references, validate_pod};
use keelson_kube_model::{Pod, PodFullName, PodOrigin, annotations, default_pod, fill_nulls, static_pod_uid};
use serde_json::{Map, Value, json};

use crate::error::{ManifestError, ManifestErrorKind};
use crate::manifest::{Document, encode_object};

/// What the rules depend on besides the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticRules {
    /// Name of this node.
    pub node_name: String,
    /// API objects to which a pod may refer: those that manifests may contain. With an API server there are none.
    pub allowed: AllowedReferences,
    /// For a pod stored in etcd: the revision at which its key was created. Such a pod is not a static pod: it keeps its name and
    /// only its own tolerations.
    pub stored: Option<i64>,
    /// The manifest is from a URL: UIDs depend on the URL and not on the node, and pods keep only their own tolerations.
    pub url: bool,
}

impl StaticRules {
    /// The rules for files. An API server rejects the mirror pods of pods that refer to its objects (the gate
    /// `PreventStaticPodAPIReferences`).
    pub fn new(node_name: &str, has_api_server: bool) -> Self {
        let rules = Self::standalone(node_name);
        if has_api_server { Self { allowed: AllowedReferences::default(), ..rules } } else { rules }
    }

    /// The rules without an API server: manifests may contain Secrets and ConfigMaps.
    pub fn standalone(node_name: &str) -> Self {
        let allowed = AllowedReferences { config_maps: true, secrets: true };
        Self { node_name: node_name.to_owned(), allowed, stored: None, url: false }
    }

    /// The same rules for manifests from a URL.
    #[must_use]
    pub fn for_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// The name on this node of a pod of the manifest.
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
    /// `metadata.name` with the node's name appended.
    pub name: String,
    /// The Pod as JSON, without the annotations that the merge adds.
    pub json: Arc<[u8]>,
    /// Fingerprint of the fields whose change updates the pod.
    pub fingerprint: Fingerprint,
    /// Document in its file, 1-based.
    pub document: u32,
    /// Line where its document begins, 1-based.
    pub line: u32,
    /// Fields that were removed: they belong to the control plane from which the manifest was exported.
    pub ignored: Vec<String>,
}

impl StaticPod {
    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        PodFullName::new(&self.name, &self.namespace)
    }
}

/// By which two versions of a pod are compared (pod-lifecycle.md §2.5). Valid only within one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// Spec, labels, deletion fields and annotations except [`LOCAL_ANNOTATIONS`].
    pub semantic: u64,
    /// The status.
    pub status: u64,
    /// Whether deletion was requested.
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

/// Annotations that the agent writes for itself; they do not count as changes of a pod.
pub const LOCAL_ANNOTATIONS: [&str; 3] =
    [annotations::CONFIG_SOURCE, annotations::CONFIG_MIRROR, annotations::CONFIG_SEEN];

/// Hashes a value independently of the order of its keys.
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

/// Defaults, names, annotates and validates the Pod in `document`, which comes from the file or URL `path`.
pub(crate) fn prepare(
    document: &Document,
    path: &str,
    rules: &StaticRules,
) -> Result<StaticPod, Vec<ManifestError>> {
    let fail = |field: &str, message: String| document.error(ManifestErrorKind::Invalid, field, message);
    let mut value = document.value.clone();
    add_required_fields(&mut value);
    // The UID is computed before fields are removed, so that a running pod keeps its UID.
    let mut written = value.clone();
    default_pod(&mut written);
    fill_nulls(&mut value);
    let ignored = remove_control_plane_fields(&mut value);
    default_pod(&mut value);
    let mut typed = decode(&value).map_err(|(field, message)| vec![fail(&field, message)])?;
    if typed.metadata.name.is_empty() {
        return Err(vec![fail("metadata.name", "Required value: name is required".into())]);
    }
    let other_node = &typed.spec.node_name;
    if rules.stored.is_some() && !other_node.is_empty() && *other_node != rules.node_name {
        let message =
            format!("Invalid value: {other_node:?}: the key belongs to the node {}", rules.node_name);
        return Err(vec![fail("spec.nodeName", message)]);
    }
    let uid = match (typed.metadata.uid.as_str(), rules.stored) {
        (_, Some(create_revision)) => {
            static_pod_uid(&written, &rules.node_name, PodOrigin::Stored { key: path, create_revision })
        }
        ("", None) if rules.url => static_pod_uid(&written, &rules.node_name, PodOrigin::Url(path)),
        ("", None) => static_pod_uid(&written, &rules.node_name, PodOrigin::File(path)),
        (own, None) if is_path_safe(own) => own.to_owned(),
        (own, None) => {
            let message = format!(
                "Invalid value: {own:?}: must consist of letters, digits, '-', '_' and '.', because it is used in paths"
            );
            return Err(vec![fail("metadata.uid", message)]);
        }
    };
    set_node_fields(&mut value, &uid, rules);
    typed = decode(&value).map_err(|(field, message)| vec![fail(&field, message)])?;
    let mut errors: Vec<_> =
        validate_pod(&typed).into_iter().map(|found| fail(&found.field, found.message)).collect();
    if let Some(resource) = static_pod_api_references(&typed, rules.allowed) {
        // Secrets and ConfigMaps are forbidden only with an API server.
        let why = if rules.allowed == AllowedReferences::default() {
            "the API server refuses its mirror pod; use a pod of the API instead"
        } else {
            "there are none without an API server"
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
        json: encode_object(document, &value)?,
        document: document.number,
        line: document.line,
        ignored,
    })
}

/// Annotations that the agent writes for itself. In a manifest they would assign the pod to another source, or make it a mirror
/// pod that never runs.
const AGENT_ANNOTATIONS: [&str; 4] = [
    annotations::CONFIG_HASH,
    annotations::CONFIG_MIRROR,
    annotations::CONFIG_SEEN,
    annotations::CONFIG_SOURCE,
];
/// Fields of `metadata` that only a control plane writes. A pod with a deletion timestamp would never start here.
const CONTROL_PLANE_METADATA: [&str; 7] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generation",
    "managedFields",
    "resourceVersion",
];
/// Fields that every export has and that change nothing; their removal is not reported.
const REMOVED_SILENTLY: [&str; 4] = ["creationTimestamp", "generation", "managedFields", "resourceVersion"];

/// Removes fields that a pod exported from a control plane has. Returns those that could have mattered.
fn remove_control_plane_fields(pod: &mut Value) -> Vec<String> {
    let mut ignored = Vec::new();
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in CONTROL_PLANE_METADATA {
            let removed = metadata.shift_remove(field).filter(|value| !value.is_null());
            if removed.is_some() && !REMOVED_SILENTLY.contains(&field) {
                ignored.push(format!("metadata.{field}"));
            }
        }
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            for key in AGENT_ANNOTATIONS {
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

/// Decodes the Pod; on a wrong type, the path of the field and a message.
fn decode(value: &Value) -> Result<Pod, (String, String)> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let field = if field == "." { String::new() } else { field };
        (field, format!("Invalid type: {}", error.inner()))
    })
}

/// Adds the parts that every pod has, if they are null or missing.
fn add_required_fields(value: &mut Value) {
    let Some(object) = value.as_object_mut() else { return };
    object.insert("apiVersion".into(), json!("v1"));
    object.insert("kind".into(), json!("Pod"));
    for part in ["metadata", "spec"] {
        if object.get(part).is_none_or(Value::is_null) {
            object.insert(part.into(), json!({}));
        }
    }
}

fn set_node_fields(value: &mut Value, uid: &str, rules: &StaticRules) {
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
            && let Some(annotations) = child_of_map(metadata, "annotations")
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
            tolerate_all_no_execute_taints(spec);
        }
    }
    if let Some(status) = child(value, "status") {
        status.insert("phase".into(), json!("Pending"));
    }
}

/// A pod of a file tolerates all NoExecute taints (pod-lifecycle.md §2.1).
fn tolerate_all_no_execute_taints(spec: &mut Map<String, Value>) {
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

/// Sets the priority of the two system classes, as the API server would.
fn add_priority(spec: &mut Map<String, Value>) {
    let priority = match spec.get("priorityClassName").and_then(Value::as_str) {
        Some("system-node-critical") => 2_000_001_000,
        Some("system-cluster-critical") => 2_000_000_000,
        _ => return,
    };
    spec.insert("priority".into(), json!(priority));
}

fn child<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Map<String, Value>> {
    child_of_map(value.as_object_mut()?, key)
}

fn child_of_map<'a>(map: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Map<String, Value>> {
    let value = map.entry(key).or_insert_with(|| json!({}));
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

/// Whether a UID is safe in a path and in a cgroup name.
fn is_path_safe(uid: &str) -> bool {
    uid.len() <= 128
        && !uid.starts_with('.')
        && uid.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// The field of an API reference, to find its line.
fn field_of(resource: &str) -> &'static str {
    match resource {
        "serviceaccounts" => "spec.serviceAccountName",
        "resourceclaims" => "spec.resourceClaims",
        "secrets" | "configmaps" => "spec",
        _ => "spec.volumes",
    }
}
