//! The defaults of a KubeletConfiguration, from the table of fields, and which values request nothing more than them.

use keelson_config::{
    EmptyValue, FieldKind, KUBELET_API_VERSION, KUBELET_KIND, KubeletField, kubelet_field, kubelet_fields,
};
use serde_json::{Map, Value};

use crate::durations::{is_zero, signed_nanos};

/// The field of the hard eviction thresholds.
pub(crate) const EVICTION_HARD: &str = "evictionHard";

/// A KubeletConfiguration with every default, except the hard eviction thresholds, which apply only if there is a file that sets
/// none.
pub(crate) fn kubelet_defaults() -> Map<String, Value> {
    let mut whole = Map::new();
    whole.insert("apiVersion".to_owned(), KUBELET_API_VERSION.into());
    whole.insert("kind".to_owned(), KUBELET_KIND.into());
    for field in kubelet_fields().iter().filter(|field| field.path != EVICTION_HARD) {
        if let Some(value) = field.default.json() {
            insert_at(&mut whole, field.path, value);
        }
    }
    whole
}

/// The default of the field at a dotted path, if it has one.
pub(crate) fn default_at(path: &str) -> Option<Value> {
    let field = kubelet_field(path)?;
    if field.kind == FieldKind::Object {
        let whole = Value::Object(kubelet_defaults());
        return path.split('.').try_fold(whole, |value, name| value.get(name).cloned());
    }
    field.default.json()
}

/// Sets the value at a dotted path, in new objects if need be.
pub(crate) fn insert_at(whole: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => drop(whole.insert(path.to_owned(), value)),
        Some((object, rest)) => {
            let below = whole.entry(object).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(below) = below {
                insert_at(below, rest, value);
            }
        }
    }
}

/// Whether a value is empty, and its field has its default; `from_flag`: a flag sets it.
pub(crate) fn is_empty_default(field: &KubeletField, value: &Value, from_flag: bool) -> bool {
    let can_be = match field.empty {
        EmptyValue::Itself | EmptyValue::Unset => false,
        EmptyValue::Default => true,
        EmptyValue::DefaultInFiles => !from_flag,
    };
    can_be && if field.kind.is_text() { value == "" } else { is_zero(value) }
}

/// Whether a field requests nothing: it has its default, or the empty value that a program writes for an unset field.
pub(crate) fn requests_nothing(path: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) if text.is_empty() => true,
        Value::Array(list) if list.is_empty() => true,
        Value::Object(fields) => {
            fields.iter().all(|(name, value)| requests_nothing(&format!("{path}.{name}"), value))
        }
        _ if kubelet_field(path).is_some_and(|field| is_empty_default(field, value, false)) => true,
        _ => match default_at(path) {
            Some(default) => is_equal(value, &default),
            None => is_zero(value) || *value == Value::Bool(false),
        },
    }
}

/// Whether both are equal, or are durations of the same length.
fn is_equal(one: &Value, other: &Value) -> bool {
    let nanos = |value: &Value| value.as_str().and_then(signed_nanos);
    one == other || nanos(one).is_some_and(|length| nanos(other) == Some(length))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn default_and_empty_values_request_nothing() {
        for (path, value, expected) in [
            ("cpuManagerPolicy", json!("none"), true),
            ("cpuManagerPolicy", json!(""), true),
            ("cpuManagerPolicy", json!("static"), false),
            ("cpuManagerReconcilePeriod", json!("0s"), true),
            ("cpuManagerReconcilePeriod", json!("10s"), true),
            ("streamingConnectionIdleTimeout", json!("240m"), true),
            ("streamingConnectionIdleTimeout", json!("1m"), false),
            ("shutdownGracePeriod", json!("0s"), true),
            ("shutdownGracePeriod", json!("30s"), false),
            ("shutdownGracePeriodByPodPriority", json!([]), true),
            ("reservedMemory", json!([{"numaNode": 0}]), false),
            ("iptablesDropBit", json!(15), true),
            ("iptablesDropBit", json!(0), false),
            ("volumePluginDir", json!(""), true),
            ("volumePluginDir", json!("/flex"), false),
            ("enableContentionProfiling", json!(false), true),
            (
                "logging.options",
                json!({"json": {"infoBufferSize": "0"}, "text": {"infoBufferSize": "0"}}),
                true,
            ),
            ("logging.options", json!({"text": {"splitStream": true}}), false),
            ("logging.flushFrequency", json!(0), true),
            ("userNamespaces", json!({}), true),
            ("userNamespaces", json!({"idsPerPod": 65_536}), true),
            ("authentication.webhook", json!({"cacheTTL": "0s"}), true),
        ] {
            assert_eq!(requests_nothing(path, &value), expected, "{path}: {value}");
        }
    }
}
