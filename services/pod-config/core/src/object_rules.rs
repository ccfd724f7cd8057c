//! The validation of Secrets and ConfigMaps by the API server on creation.

use keelson_kube_model::base64;
use serde_json::{Map, Value};

/// Maximum length of a key, in characters.
const MAX_KEY: usize = 253;
/// Maximum size of all values together, in bytes.
const MAX_BYTES: usize = 1024 * 1024;
/// The annotation of a token Secret that names its service account.
const ACCOUNT: &str = "kubernetes.io/service-account.name";

/// Checks keys, sizes, `immutable` and the keys that the type of a Secret requires. `fail` takes a field and a message. The
/// caller has checked that the values are text, or base64 where required.
pub(crate) fn check(object: &Map<String, Value>, is_secret: bool, fail: &mut impl FnMut(&str, &str)) {
    let entries = |field: &str| object.get(field).and_then(Value::as_object).into_iter().flatten();
    let mut bytes = 0;
    for field in ["data", "stringData", "binaryData"] {
        for (key, value) in entries(field) {
            if let Some(message) = key_error(key) {
                fail(&format!("{field}[{key}]"), &format!("Invalid value: {key:?}: {message}"));
            }
            let text = value.as_str().unwrap_or_default();
            let is_encoded = field == "binaryData" || (is_secret && field == "data");
            bytes +=
                if is_encoded { base64::decode(text).map_or(0, |bytes| bytes.len()) } else { text.len() };
        }
    }
    if !is_secret {
        let both = entries("data").filter(|(key, _)| entries("binaryData").any(|(other, _)| other == *key));
        for (key, _) in both {
            let message = format!("Invalid value: {key:?}: duplicate of key present in binaryData");
            fail(&format!("data[{key}]"), &message);
        }
    }
    if bytes > MAX_BYTES {
        fail("data", &format!("Too long: may not be more than {MAX_BYTES} bytes"));
    }
    if object.get("immutable").is_some_and(|value| !value.is_null() && !value.is_boolean()) {
        fail("immutable", "must be true or false");
    }
    if is_secret {
        check_type(object, fail);
    }
}

/// Why a key is not a valid file name.
fn key_error(key: &str) -> Option<&'static str> {
    if key.len() > MAX_KEY {
        return Some("must be no more than 253 characters");
    }
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        return Some("a valid config key must consist of alphanumeric characters, '-', '_' or '.'");
    }
    match key {
        "." => Some("must not be '.'"),
        ".." => Some("must not be '..'"),
        _ => key.starts_with("..").then_some("must not start with '..'"),
    }
}

fn check_type(object: &Map<String, Value>, fail: &mut impl FnMut(&str, &str)) {
    let has = |key: &str| {
        ["data", "stringData"]
            .iter()
            .any(|field| object.get(*field).is_some_and(|map| map.get(key).is_some()))
    };
    let mut need = |keys: &[&str]| {
        for key in keys.iter().filter(|key| !has(key)) {
            fail(&format!("data[{key}]"), "Required value");
        }
    };
    match object.get("type").and_then(Value::as_str).unwrap_or_default() {
        "kubernetes.io/dockercfg" => need(&[".dockercfg"]),
        "kubernetes.io/dockerconfigjson" => need(&[".dockerconfigjson"]),
        "kubernetes.io/ssh-auth" => need(&["ssh-privatekey"]),
        "kubernetes.io/tls" => need(&["tls.crt", "tls.key"]),
        "kubernetes.io/basic-auth" if !has("username") && !has("password") => need(&["username", "password"]),
        "kubernetes.io/service-account-token" => {
            let account = object.get("metadata").map(|metadata| &metadata["annotations"][ACCOUNT]);
            if account.and_then(Value::as_str).is_none_or(str::is_empty) {
                fail(&format!("metadata.annotations[{ACCOUNT}]"), "Required value");
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn errors(object: &Value, is_secret: bool) -> Vec<String> {
        let mut found = Vec::new();
        let mut fail = |field: &str, message: &str| found.push(format!("{field}: {message}"));
        check(object.as_object().unwrap(), is_secret, &mut fail);
        found
    }

    #[test]
    fn keys_of_secrets_and_config_maps_must_be_valid_file_names() {
        let long = "k".repeat(254);
        for (key, expected) in [
            ("a/b", Some("a valid config key must consist of")),
            ("", Some("a valid config key must consist of")),
            ("a b", Some("a valid config key must consist of")),
            (".", Some("must not be '.'")),
            ("..", Some("must not be '..'")),
            ("..a", Some("must not start with '..'")),
            (long.as_str(), Some("must be no more than 253 characters")),
            (".a", None),
            ("A_b-c.9", None),
        ] {
            let found = errors(&json!({"data": {key: ""}}), false);
            match expected {
                Some(message) => {
                    assert_eq!(found.len(), 1, "{key}: {found:?}");
                    assert!(
                        found[0].starts_with(&format!("data[{key}]: ")) && found[0].contains(message),
                        "{found:?}"
                    );
                }
                None => assert_eq!(found, [""; 0], "{key}"),
            }
        }
        assert_eq!(errors(&json!({"stringData": {"a/b": ""}}), true).len(), 1);
        assert_eq!(errors(&json!({"binaryData": {"a/b": ""}}), false).len(), 1);
    }

    #[test]
    fn keys_are_unique_over_data_and_binary_data_and_values_are_at_most_1_mib() {
        let both = json!({"data": {"a": "x", "b": ""}, "binaryData": {"a": "eA=="}});
        assert_eq!(
            errors(&both, false),
            ["data[a]: Invalid value: \"a\": duplicate of key present in binaryData"]
        );
        let whole = json!({"data": {"a": "x".repeat(MAX_BYTES)}});
        assert_eq!(errors(&whole, false), [""; 0]);
        let more = json!({"data": {"a": "x".repeat(MAX_BYTES), "b": "y"}});
        assert_eq!(errors(&more, false), ["data: Too long: may not be more than 1048576 bytes"]);
        // The size of a Secret is counted in decoded bytes.
        let secret = json!({"data": {"a": base64::encode(&vec![0; MAX_BYTES])}});
        assert_eq!(errors(&secret, true), [""; 0]);
        assert_eq!(errors(&json!({"immutable": "yes"}), false), ["immutable: must be true or false"]);
        assert_eq!(errors(&json!({"immutable": true}), false), [""; 0]);
    }

    #[test]
    fn a_secret_must_have_the_keys_that_its_type_requires() {
        for (type_, data, missing) in [
            ("Opaque", json!({}), &[][..]),
            ("example.com/own", json!({}), &[]),
            ("kubernetes.io/dockercfg", json!({}), &["data[.dockercfg]"]),
            ("kubernetes.io/dockerconfigjson", json!({"other": ""}), &["data[.dockerconfigjson]"]),
            ("kubernetes.io/dockerconfigjson", json!({".dockerconfigjson": "e30="}), &[]),
            ("kubernetes.io/ssh-auth", json!({}), &["data[ssh-privatekey]"]),
            ("kubernetes.io/tls", json!({"tls.crt": ""}), &["data[tls.key]"]),
            ("kubernetes.io/basic-auth", json!({}), &["data[username]", "data[password]"]),
            ("kubernetes.io/basic-auth", json!({"password": ""}), &[]),
            (
                "kubernetes.io/service-account-token",
                json!({}),
                &["metadata.annotations[kubernetes.io/service-account.name]"],
            ),
        ] {
            let found = errors(&json!({"type": type_, "data": data, "metadata": {}}), true);
            let expected: Vec<String> =
                missing.iter().map(|field| format!("{field}: Required value")).collect();
            assert_eq!(found, expected, "{type_}");
        }
        let plain = json!({"type": "kubernetes.io/tls", "stringData": {"tls.crt": "", "tls.key": ""}});
        assert_eq!(errors(&plain, true), [""; 0]);
    }
}
