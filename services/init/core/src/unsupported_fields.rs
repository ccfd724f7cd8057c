//! Fields without effect: which of them the start reports.

use serde_json::Value;

use crate::effective::{ZERO_IS_DEFAULT, default_at, is_zero};

/// Whether a field requests nothing: it has its default, or the empty value that a program writes for an unset field.
pub(crate) fn requests_nothing(path: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) if text.is_empty() => true,
        Value::Array(list) if list.is_empty() => true,
        Value::Object(fields) => {
            fields.iter().all(|(name, value)| requests_nothing(&format!("{path}.{name}"), value))
        }
        _ if is_zero(value) && ZERO_IS_DEFAULT.contains(&path) => true,
        _ => match default_at(path) {
            Some(default) => is_equal(value, &default),
            None => is_zero(value) || *value == Value::Bool(false),
        },
    }
}

/// Whether both are equal, or are durations of the same length.
fn is_equal(one: &Value, other: &Value) -> bool {
    let nanos = |value: &Value| value.as_str().and_then(crate::rules::signed);
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
