//! Defaults, names and validates a Pod of a manifest for this node (pod-lifecycle.md §2.1).

use keelson_kube_model::validate::{AllowedReferences, static_pod_api_references, validate_pod};
use keelson_kube_model::{
    Pod, PodOrigin, PodSpec, Toleration, annotations, default_pod, fill_nulls, static_pod_uid,
};
use serde_json::{Map, Value, json};

use crate::desired_pod::DesiredPod;
use crate::error::{ManifestError, ManifestErrorKind};
use crate::manifest::{Document, DocumentPlace};

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

    /// The rules without an API server: manifests may contain Secrets, ConfigMaps, PersistentVolumes and claims.
    pub fn standalone(node_name: &str) -> Self {
        let allowed = AllowedReferences { config_maps: true, secrets: true };
        Self { node_name: node_name.to_owned(), allowed, stored: None, url: false }
    }

    /// The same rules for manifests from a URL.
    #[must_use]
    pub fn for_url(self) -> Self {
        Self { url: true, ..self }
    }

    /// Whether an API server has the objects of this node.
    pub fn has_api_server(&self) -> bool {
        self.allowed == AllowedReferences::default()
    }

    /// The name on this node of a pod of the manifest.
    pub fn name_on_node(&self, name: &str) -> String {
        match self.stored {
            Some(_) => name.to_owned(),
            None => format!("{name}-{}", self.node_name.to_lowercase()),
        }
    }
}

/// Defaults, names, annotates and validates the Pod in `document`, which comes from the file, URL or key `origin`.
pub(crate) fn prepare(
    document: Document,
    origin: &str,
    rules: &StaticRules,
) -> Result<DesiredPod, Vec<ManifestError>> {
    let place = document.place();
    let CompletePod { value, pod, ignored } = complete(document.value, &place, origin, rules)?;
    let errors = validation_errors(&pod, &place, rules);
    if !errors.is_empty() {
        return Err(errors);
    }
    let desired = DesiredPod::new(&value, &pod, origin);
    place.check_size(&desired.json)?;
    Ok(DesiredPod { document: place.number, line: place.line, ignored, ..desired })
}

/// A Pod with everything that it has on this node.
struct CompletePod {
    value: Value,
    /// The same Pod, decoded.
    pod: Pod,
    /// Fields that were removed, see [`DesiredPod::ignored`].
    ignored: Vec<String>,
}

/// Defaults the Pod of a manifest, decodes it, and adds what it has on this node.
fn complete(
    mut value: Value,
    place: &DocumentPlace,
    origin: &str,
    rules: &StaticRules,
) -> Result<CompletePod, Vec<ManifestError>> {
    let fail = |field: &str, message: String| vec![place.error(ManifestErrorKind::Invalid, field, message)];
    add_required_fields(&mut value);
    // The UID is computed before fields are removed, so that a running pod keeps its UID.
    let computed_uid = needs_computed_uid(&value, rules).then(|| compute_uid(value.clone(), origin, rules));
    fill_nulls(&mut value);
    let ignored = remove_control_plane_fields(&mut value);
    default_pod(&mut value);
    let mut pod = decode(&value).map_err(|(field, message)| fail(&field, message))?;
    if pod.metadata.name.is_empty() {
        return Err(fail("metadata.name", "Required value: name is required".into()));
    }
    let other_node = &pod.spec.node_name;
    if rules.stored.is_some() && !other_node.is_empty() && *other_node != rules.node_name {
        let message =
            format!("Invalid value: {other_node:?}: the key belongs to the node {}", rules.node_name);
        return Err(fail("spec.nodeName", message));
    }
    let own_uid = &pod.metadata.uid;
    if computed_uid.is_none() && !is_path_safe(own_uid) {
        let message = format!(
            "Invalid value: {own_uid:?}: must consist of letters, digits, '-', '_' and '.', because it is used in paths"
        );
        return Err(fail("metadata.uid", message));
    }
    let uid = computed_uid.unwrap_or_else(|| own_uid.clone());
    set_node_fields(&mut value, &mut pod, uid, rules);
    Ok(CompletePod { value, pod, ignored })
}

/// Whether the UID does not come from the manifest.
fn needs_computed_uid(value: &Value, rules: &StaticRules) -> bool {
    let own_uid = value.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default();
    rules.stored.is_some() || own_uid.is_empty()
}

/// The UID of a pod as it was written, with the required fields.
fn compute_uid(mut written: Value, origin: &str, rules: &StaticRules) -> String {
    default_pod(&mut written);
    let origin = match rules.stored {
        Some(create_revision) => PodOrigin::Stored { key: origin, create_revision },
        None if rules.url => PodOrigin::Url(origin),
        None => PodOrigin::File(origin),
    };
    static_pod_uid(&written, &rules.node_name, origin)
}

/// What the API server, or the rules of static pods, would reject.
fn validation_errors(pod: &Pod, place: &DocumentPlace, rules: &StaticRules) -> Vec<ManifestError> {
    let fail = |field: &str, message: String| place.error(ManifestErrorKind::Invalid, field, message);
    let mut errors: Vec<_> =
        validate_pod(pod).into_iter().map(|found| fail(&found.field, found.message)).collect();
    if let Some(resource) = api_reference(pod, rules) {
        // Secrets, ConfigMaps and claims are forbidden only with an API server.
        let why = if rules.has_api_server() {
            "the API server refuses its mirror pod; use a pod of the API instead"
        } else {
            "there are none without an API server"
        };
        let message = format!("Forbidden: a static pod may not refer to {resource}; {why}");
        errors.push(fail(field_of(&resource), message));
    }
    errors
}

/// The resource of an API object to which the pod may not refer. Without an API server manifests may define claims.
fn api_reference(pod: &Pod, rules: &StaticRules) -> Option<String> {
    if rules.has_api_server() || pod.spec.volumes.iter().all(|v| v.persistent_volume_claim.is_none()) {
        return static_pod_api_references(pod, rules.allowed);
    }
    let mut without_claims = pod.clone();
    without_claims.spec.volumes.retain(|volume| volume.persistent_volume_claim.is_none());
    static_pod_api_references(&without_claims, rules.allowed)
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

/// Sets what a pod has on this node, in `value` and in `pod`, which is the same Pod decoded.
fn set_node_fields(value: &mut Value, pod: &mut Pod, uid: String, rules: &StaticRules) {
    pod.metadata.name = rules.name_on_node(&pod.metadata.name);
    if pod.metadata.namespace.is_empty() {
        pod.metadata.namespace = "default".to_owned();
    }
    pod.metadata.uid = uid;
    pod.spec.node_name.clone_from(&rules.node_name);
    pod.status.phase = "Pending".to_owned();
    if let Some(metadata) = child(value, "metadata") {
        metadata.insert("name".into(), json!(pod.metadata.name));
        metadata.insert("namespace".into(), json!(pod.metadata.namespace));
        metadata.insert("uid".into(), json!(pod.metadata.uid));
        if rules.stored.is_none()
            && let Some(annotations) = child_of_map(metadata, "annotations")
        {
            annotations.insert(annotations::CONFIG_HASH.into(), json!(pod.metadata.uid));
            pod.metadata.annotations.insert(annotations::CONFIG_HASH.into(), pod.metadata.uid.clone());
        }
    }
    if let Some(spec) = child(value, "spec") {
        spec.insert("nodeName".into(), json!(rules.node_name));
        if rules.stored.is_some() {
            add_priority(spec, &mut pod.spec);
        } else if !rules.url {
            tolerate_all_no_execute_taints(spec, &mut pod.spec);
        }
    }
    if let Some(status) = child(value, "status") {
        status.insert("phase".into(), json!("Pending"));
    }
}

/// A pod of a file tolerates all NoExecute taints (pod-lifecycle.md §2.1).
fn tolerate_all_no_execute_taints(spec: &mut Map<String, Value>, decoded: &mut PodSpec) {
    let tolerations = spec.entry("tolerations").or_insert_with(|| json!([]));
    if tolerations.is_null() {
        *tolerations = json!([]);
    }
    let everything = json!({"operator": "Exists", "effect": "NoExecute"});
    if let Some(list) = tolerations.as_array_mut()
        && !list.contains(&everything)
    {
        list.push(everything);
        let (operator, effect) = ("Exists".to_owned(), "NoExecute".to_owned());
        decoded.tolerations.push(Toleration { operator, effect, ..Toleration::default() });
    }
}

/// Sets the priority of the two system classes, as the API server would.
fn add_priority(spec: &mut Map<String, Value>, decoded: &mut PodSpec) {
    let priority = match decoded.priority_class_name.as_str() {
        "system-node-critical" => 2_000_001_000,
        "system-cluster-critical" => 2_000_000_000,
        _ => return,
    };
    spec.insert("priority".into(), json!(priority));
    decoded.priority = Some(priority);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::read_manifest;

    #[test]
    fn the_decoded_pod_gets_the_same_node_fields_as_the_json() {
        let everything = json!({"effect": "NoExecute", "operator": "Exists"});
        let spec = json!({"containers": [{"name": "c", "image": "i"}]});
        let with = |field: &str, value: Value| {
            let mut spec = spec.clone();
            spec[field] = value;
            spec
        };
        let files = StaticRules::standalone("Node");
        let stored = StaticRules { stored: Some(7), ..files.clone() };
        for spec in [
            spec.clone(),
            with("tolerations", Value::Null),
            with("tolerations", json!([everything])),
            with("tolerations", json!([{"key": "a", "operator": "Exists"}])),
            with("priorityClassName", json!("system-node-critical")),
            with("priorityClassName", json!("other")),
        ] {
            let annotations = json!({"a": "1", annotations::CONFIG_HASH: "x"});
            let metadata = json!({"name": "web", "namespace": null, "annotations": annotations, "uid": "u"});
            let status = json!({"phase": "Failed", "reason": "Evicted"});
            let text = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status});
            for rules in [files.clone(), files.clone().for_url(), stored.clone()] {
                let document = read_manifest(text.to_string().as_bytes()).unwrap().remove(0);
                let place = document.place();
                let complete = complete(document.value, &place, "/m/web.yaml", &rules);
                let CompletePod { value, pod, .. } = complete.unwrap_or_else(|errors| panic!("{errors:?}"));
                assert_eq!(decode(&value), Ok(pod), "{rules:?}: {value}");
            }
        }
    }
}
