//! PersistentVolumes and PersistentVolumeClaims from manifests, for nodes without an API server.
//!
//! Parity: a kubelet reads them from the API alone. Here the manifests of a node may define them, and the
//! [binder](crate::binder) binds them to each other.

use keelson_kube_model::persistent_volume::{
    ClaimSpec, Fail, Strings, VolumeSpec, check_claim, check_labels, check_volume, decode, is_dns_name,
    remove_null_fields, volume_warnings, write_canonical_amounts,
};
use keelson_kube_model::{PodOrigin, fill_nulls, static_pod_uid};
use serde_json::{Map, Value, json};

use crate::error::{ManifestError, ManifestErrorKind};
use crate::manifest::{Document, Kind};
use crate::object::{ObjectKey, StoredObject, identity};
use crate::static_pod::StaticRules;

/// Annotation of both kinds: the storage class. It takes precedence over the field (volumes.md §3.4).
pub(crate) const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
/// Fields of `metadata` that only a control plane writes. The last three could have mattered; their removal is reported.
const CONTROL_PLANE_METADATA: [&str; 10] = [
    "creationTimestamp",
    "finalizers",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "ownerReferences",
    "uid",
];
const REMOVED_SILENTLY: usize = 7;

/// A valid PersistentVolume or claim, with what is not used as it was written.
#[derive(Debug)]
pub(crate) struct PreparedVolumeObject {
    pub(crate) object: StoredObject,
    pub(crate) warnings: Vec<String>,
}

/// Defaults and validates a PersistentVolume or claim as the API server does on creation, and gives it its UID. `origin` is its
/// file or key.
///
/// # Errors
/// Everything that is wrong with it; on a node with an API server, that it is there at all.
pub(crate) fn prepare(
    document: Document,
    origin: &str,
    rules: &StaticRules,
) -> Result<PreparedVolumeObject, Vec<ManifestError>> {
    let place = document.place();
    let Document { kind, mut value, .. } = document;
    let mut errors = Vec::new();
    let mut fail =
        |field: &str, message: String| errors.push(place.error(ManifestErrorKind::Invalid, field, message));
    if rules.has_api_server() {
        let message = format!(
            "Forbidden: this node has the {}s of its API server; create it there, as with `kubectl apply`",
            kind.as_str()
        );
        fail("kind", message);
        return Err(errors);
    }
    fill_nulls(&mut value);
    remove_null_fields(&mut value);
    let mut warnings = Vec::new();
    let Some(object) = value.as_object_mut() else {
        fail("", "not an object".into());
        return Err(errors);
    };
    object.insert("apiVersion".into(), json!("v1"));
    object.insert("kind".into(), json!(kind.as_str()));
    object.shift_remove("status");
    let (name, namespace) = match kind {
        Kind::PersistentVolume => (cluster_name(object, &mut warnings, &mut fail), String::new()),
        Kind::Pod | Kind::Secret | Kind::ConfigMap | Kind::PersistentVolumeClaim => {
            identity(object, &mut |field: &str, message: &str| fail(field, message.to_owned()))
        }
    };
    let ignored = complete_metadata(object, uid(kind, &namespace, &name, rules), &mut fail);
    if !ignored.is_empty() {
        let fields = ignored.join(", ");
        warnings
            .push(format!("these fields are ignored, because only a control plane writes them: {fields}"));
    }
    complete_spec(object, kind, &rules.node_name, &mut warnings, &mut fail);
    if !errors.is_empty() {
        return Err(errors);
    }
    let json = value.to_string().into_bytes();
    place.check_size(&json)?;
    let object = StoredObject {
        key: ObjectKey { kind, namespace, name },
        json: json.into(),
        document: place.number,
        line: place.line,
        origin: origin.to_owned(),
    };
    Ok(PreparedVolumeObject { object, warnings })
}

/// The UID of an object. It depends on the node, the kind, the namespace and the name, so that a changed or moved manifest is the
/// same object; in etcd also on the revision at which the key was created, so that a recreated key is another object.
fn uid(kind: Kind, namespace: &str, name: &str, rules: &StaticRules) -> String {
    let identity = json!({
        "createRevision": rules.stored,
        "kind": kind.as_str(),
        "name": name,
        "namespace": namespace,
        "node": rules.node_name,
    });
    static_pod_uid(&identity, "", PodOrigin::Url(""))
}

/// The name of an object without a namespace. A namespace is removed, as the API server does.
fn cluster_name(object: &mut Map<String, Value>, warnings: &mut Vec<String>, fail: &mut Fail<'_>) -> String {
    let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
    let Some(metadata) = metadata else {
        fail("metadata.name", "Required value".into());
        return String::new();
    };
    if metadata.shift_remove("namespace").is_some_and(|namespace| namespace != "") {
        warnings.push("metadata.namespace is ignored: a PersistentVolume has no namespace".to_owned());
    }
    let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    if name.is_empty() {
        fail("metadata.name", "Required value".into());
    } else if !is_dns_name(&name) {
        fail("metadata.name", "must be lower case letters, digits, '-' and '.', as in a DNS name".into());
    }
    name
}

/// Removes what only a control plane writes, and sets the UID. Returns the removed fields that could have mattered.
fn complete_metadata(object: &mut Map<String, Value>, uid: String, fail: &mut Fail<'_>) -> Vec<String> {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return Vec::new() };
    let mut ignored = Vec::new();
    for (index, field) in CONTROL_PLANE_METADATA.iter().enumerate() {
        if metadata.shift_remove(*field).is_some() && index >= REMOVED_SILENTLY {
            ignored.push(format!("metadata.{field}"));
        }
    }
    for field in ["labels", "annotations"] {
        match serde_json::from_value::<Strings>(metadata.get(field).cloned().unwrap_or_else(|| json!({}))) {
            Ok(labels) if field == "labels" => check_labels(&labels, fail),
            Ok(_) => {}
            Err(_) => {
                fail(&format!("metadata.{field}"), "must be an object of texts; quote the values".into())
            }
        }
    }
    metadata.insert("uid".into(), json!(uid));
    ignored
}

/// Checks `spec`, and adds what the API server would add.
fn complete_spec(
    object: &mut Map<String, Value>,
    kind: Kind,
    node_name: &str,
    warnings: &mut Vec<String>,
    fail: &mut Fail<'_>,
) {
    let spec = object.entry("spec").or_insert_with(|| json!({}));
    if !spec.is_object() {
        return fail("spec", "not an object".into());
    }
    if kind == Kind::PersistentVolume {
        match decode::<VolumeSpec>(spec) {
            Ok(volume) => {
                check_volume(&volume, spec, node_name, fail);
                warnings.extend(volume_warnings(&volume));
            }
            Err((field, message)) => return fail(&field, message),
        }
        write_canonical_amounts(spec, "/capacity");
        set_default(spec, "persistentVolumeReclaimPolicy", "Retain");
    } else {
        match decode::<ClaimSpec>(spec) {
            Ok(claim) => check_claim(&claim, fail),
            Err((field, message)) => return fail(&field, message),
        }
        write_canonical_amounts(spec, "/resources/requests");
        write_canonical_amounts(spec, "/resources/limits");
        // There is no default class here.
        set_default(spec, "storageClassName", "");
    }
    set_default(spec, "volumeMode", "Filesystem");
}

fn set_default(spec: &mut Value, field: &str, value: &str) {
    if let Some(spec) = spec.as_object_mut() {
        spec.entry(field).or_insert_with(|| json!(value));
    }
}
