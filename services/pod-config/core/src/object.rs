//! Secrets and ConfigMaps that stand as manifests beside the pods (architecture §6).

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::error::{ManifestError, Why};
use crate::manifest::{Document, Kind, encoded};

/// What names an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Secret or ConfigMap.
    pub kind: Kind,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// A Secret or ConfigMap as the API would return it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredObject {
    /// Its name.
    pub key: ObjectKey,
    /// The object as JSON.
    pub json: Arc<[u8]>,
    /// Document in its file, 1-based.
    pub document: u32,
    /// Line where it begins, 1-based.
    pub line: u32,
}

/// Makes of a Secret or ConfigMap what the API server makes of it when it is created: the namespace `default`,
/// `stringData` joined into `data`, the type `Opaque`.
pub(crate) fn prepare(document: &Document) -> Result<StoredObject, Vec<ManifestError>> {
    let mut errors = Vec::new();
    let mut fail = |field: &str, message: &str| errors.push(document.error(Why::Invalid, field, message));
    let mut value = document.value.clone();
    let Some(object) = value.as_object_mut() else {
        fail("", "this is no object");
        return Err(errors);
    };
    object.insert("apiVersion".into(), json!("v1"));
    object.insert("kind".into(), json!(document.kind.as_str()));
    let (name, namespace) = identity(object, &mut fail);
    match document.kind {
        Kind::Secret => {
            check_map(object, "data", &mut fail, |v| v.as_str().is_some_and(is_base64), "must be base64");
            check_map(object, "stringData", &mut fail, Value::is_string, "must be text; quote it");
            merge_string_data(object);
            if object.get("type").is_none_or(Value::is_null) {
                object.insert("type".into(), json!("Opaque"));
            }
        }
        Kind::ConfigMap => {
            check_map(object, "data", &mut fail, Value::is_string, "must be text; quote it");
            check_map(
                object,
                "binaryData",
                &mut fail,
                |v| v.as_str().is_some_and(is_base64),
                "must be base64",
            );
        }
        Kind::Pod => fail("kind", "a Pod is not kept as an object"),
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(StoredObject {
        key: ObjectKey { kind: document.kind, namespace, name },
        json: encoded(document, &value)?,
        document: document.number,
        line: document.line,
    })
}

fn identity(object: &mut Map<String, Value>, fail: &mut impl FnMut(&str, &str)) -> (String, String) {
    let metadata = object.entry("metadata").or_insert_with(|| json!({}));
    let Some(metadata) = metadata.as_object_mut() else {
        fail("metadata", "this is no object");
        return Default::default();
    };
    let text = |v: Option<&Value>| v.and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = text(metadata.get("name"));
    if name.is_empty() {
        fail("metadata.name", "Required value");
    } else if !is_name(&name) {
        fail("metadata.name", "must be lower case letters, digits, '-' and '.', as in a DNS name");
    }
    let mut namespace = text(metadata.get("namespace"));
    if namespace.is_empty() {
        namespace = "default".to_owned();
        metadata.insert("namespace".into(), json!(namespace));
    } else if !is_name(&namespace) || namespace.contains('.') {
        fail("metadata.namespace", "must be lower case letters, digits and '-', as in a DNS label");
    }
    (name, namespace)
}

fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= 253
        && text.split('.').all(|label| {
            let bytes = label.as_bytes();
            !bytes.is_empty()
                && inner(bytes[0])
                && inner(bytes[bytes.len() - 1])
                && bytes.iter().all(|b| inner(*b) || *b == b'-')
        })
}

fn check_map(
    object: &Map<String, Value>,
    field: &str,
    fail: &mut impl FnMut(&str, &str),
    good: impl Fn(&Value) -> bool,
    rule: &str,
) {
    match object.get(field) {
        None | Some(Value::Null) => {}
        Some(Value::Object(map)) => {
            for (key, _) in map.iter().filter(|(_, value)| !good(value)) {
                fail(&format!("{field}[{key}]"), rule);
            }
        }
        Some(_) => fail(field, "must be an object of key and value"),
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
            data.insert(key, json!(base64(value.as_str().unwrap_or_default().as_bytes())));
        }
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().fold(0u32, |g, b| g << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            if i <= chunk.len() {
                text.push(char::from(ALPHABET[(group >> (18 - 6 * i)) as usize & 63]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

/// Standard base64 with padding; line ends inside are allowed, as with the API server.
fn is_base64(text: &str) -> bool {
    let bytes: Vec<u8> = text.bytes().filter(|b| !matches!(b, b'\n' | b'\r')).collect();
    let padding = bytes.iter().rev().take_while(|b| **b == b'=').count();
    bytes.len().is_multiple_of(4)
        && padding <= 2
        && bytes[..bytes.len() - padding].iter().all(|b| ALPHABET.contains(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
            assert!(is_base64(coded));
        }
        assert!(is_base64("Zm9v\nYmFy\n"));
        for bad in ["Zg=", "Zg", "Z===", "Zm9v!mFy", "=Zm9"] {
            assert!(!is_base64(bad), "{bad}");
        }
    }
}
