//! Secrets and ConfigMaps from manifests (architecture §6).

use std::fmt;
use std::sync::Arc;

use keelson_kube_model::persistent_volume::is_dns_name;
use keelson_kube_model::{base64, fill_nulls};
use serde_json::{Map, Value, json};

use crate::error::{ManifestError, ManifestErrorKind};
use crate::manifest::{Document, Kind};
use crate::object_rules;

/// Identifies an object of a manifest other than a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Any kind except Pod.
    pub kind: Kind,
    /// `metadata.namespace`; empty for a PersistentVolume.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    /// `<kind> <namespace>/<name>`, or `<kind> <name>` if it has no namespace.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self;
        let kind = kind.as_str();
        if namespace.is_empty() { write!(f, "{kind} {name}") } else { write!(f, "{kind} {namespace}/{name}") }
    }
}

/// An object of a manifest other than a pod, as the API would return it; a PersistentVolume or claim before it is bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its kind, namespace and name.
    pub key: ObjectKey,
    /// The object as JSON.
    pub json: Arc<[u8]>,
    /// Document in its file, 1-based.
    pub document: u32,
    /// Line where its document begins, 1-based.
    pub line: u32,
    /// The file or key.
    pub origin: String,
}

/// Defaults and validates a Secret or ConfigMap as the API server does on creation: the namespace `default`, `stringData` merged
/// into `data`, the type `Opaque`. `origin` is its file or key.
pub(crate) fn prepare(document: Document, origin: &str) -> Result<StoredObject, Vec<ManifestError>> {
    let place = document.place();
    let Document { kind, mut value, .. } = document;
    let mut errors = Vec::new();
    let mut fail =
        |field: &str, message: &str| errors.push(place.error(ManifestErrorKind::Invalid, field, message));
    fill_nulls(&mut value);
    let Some(object) = value.as_object_mut() else {
        fail("", "not an object");
        return Err(errors);
    };
    object.insert("apiVersion".into(), json!("v1"));
    object.insert("kind".into(), json!(kind.as_str()));
    let (name, namespace) = identity(object, &mut fail);
    match kind {
        Kind::Secret => {
            check_map(object, "data", &mut fail, is_base64, "must be base64");
            check_map(object, "stringData", &mut fail, Value::is_string, "must be text; quote it");
            object_rules::check(object, true, &mut fail);
            normalise(object, "data");
            merge_string_data(object);
            if object.get("type").is_none_or(Value::is_null) {
                object.insert("type".into(), json!("Opaque"));
            }
        }
        Kind::ConfigMap => {
            check_map(object, "data", &mut fail, Value::is_string, "must be text; quote it");
            check_map(object, "binaryData", &mut fail, is_base64, "must be base64");
            object_rules::check(object, false, &mut fail);
            normalise(object, "binaryData");
        }
        Kind::Pod | Kind::PersistentVolume | Kind::PersistentVolumeClaim => {
            fail("kind", "neither a Secret nor a ConfigMap");
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let json = value.to_string().into_bytes();
    place.check_size(&json)?;
    Ok(StoredObject {
        key: ObjectKey { kind, namespace, name },
        json: json.into(),
        document: place.number,
        line: place.line,
        origin: origin.to_owned(),
    })
}

/// Name and namespace of an object. The namespace is `default` if there is none.
pub(crate) fn identity(
    object: &mut Map<String, Value>,
    fail: &mut impl FnMut(&str, &str),
) -> (String, String) {
    let metadata = object.entry("metadata").or_insert_with(|| json!({}));
    let Some(metadata) = metadata.as_object_mut() else {
        fail("metadata", "not an object");
        return Default::default();
    };
    let text = |v: Option<&Value>| v.and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = text(metadata.get("name"));
    if name.is_empty() {
        fail("metadata.name", "Required value");
    } else if !is_dns_name(&name) {
        fail("metadata.name", "must be lower case letters, digits, '-' and '.', as in a DNS name");
    }
    let mut namespace = text(metadata.get("namespace"));
    if namespace.is_empty() {
        namespace = "default".to_owned();
        metadata.insert("namespace".into(), json!(namespace));
    } else if !is_dns_name(&namespace) || namespace.contains('.') {
        fail("metadata.namespace", "must be lower case letters, digits and '-', as in a DNS label");
    }
    (name, namespace)
}

fn check_map(
    object: &Map<String, Value>,
    field: &str,
    fail: &mut impl FnMut(&str, &str),
    is_valid: impl Fn(&Value) -> bool,
    rule: &str,
) {
    match object.get(field) {
        None | Some(Value::Null) => {}
        Some(Value::Object(map)) => {
            for (key, _) in map.iter().filter(|(_, value)| !is_valid(value)) {
                fail(&format!("{field}[{key}]"), rule);
            }
        }
        Some(_) => fail(field, "must be an object of key and value"),
    }
}

fn is_base64(value: &Value) -> bool {
    value.as_str().is_some_and(|text| base64::decode(text).is_some())
}

/// Re-encodes base64 as the API server returns it, so that readers always get one form.
fn normalise(object: &mut Map<String, Value>, field: &str) {
    for value in object.get_mut(field).and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
        if let Some(bytes) = value.as_str().and_then(base64::decode) {
            *value = json!(base64::encode(&bytes));
        }
    }
}

fn merge_string_data(object: &mut Map<String, Value>) {
    let Some(Value::Object(plain)) = object.shift_remove("stringData") else { return };
    let data = object.entry("data").or_insert_with(|| json!({}));
    if data.is_null() {
        *data = json!({});
    }
    if let Some(data) = data.as_object_mut() {
        for (key, value) in plain {
            data.insert(key, json!(base64::encode(value.as_str().unwrap_or_default().as_bytes())));
        }
    }
}
