//! The annotations that say where a Pod comes from and since when the agent knows it.

use serde_json::Value;

use crate::json_fields::JsonFields;
use crate::pod_ext::annotations::{CONFIG_SEEN, CONFIG_SOURCE};
use crate::time::format_nanos;

/// The JSON of a Pod with `kubernetes.io/config.source`, and with `kubernetes.io/config.seen` (nanoseconds since 1970).
///
/// An annotation that exists is replaced in its place; others are added at the end. Everything else keeps its order and its text
/// except for whitespace, so compact JSON that has these annotations with these values stays the same, byte for byte. An empty source and a time that is not positive are unknown: their
/// annotation stays as it is. If `metadata` or its annotations are no object, the Pod stays as it is.
pub fn with_source_annotations(pod_json: &[u8], source: &str, seen_unix_nanos: i64) -> Vec<u8> {
    let source = (!source.is_empty()).then(|| Value::from(source).to_string());
    let seen = (seen_unix_nanos > 0).then(|| format_nanos(seen_unix_nanos.into()).ok()).flatten();
    let seen = seen.map(|seen| Value::from(seen).to_string());
    let known: Vec<_> = [(CONFIG_SOURCE, source), (CONFIG_SEEN, seen)]
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .collect();
    annotate(pod_json, &known).unwrap_or_else(|| pod_json.to_vec())
}

/// Sets annotations, whose values are JSON; `None`: there are none to set, or the Pod cannot have any.
fn annotate(pod_json: &[u8], values: &[(&str, String)]) -> Option<Vec<u8>> {
    if values.is_empty() {
        return None;
    }
    let mut pod = JsonFields::parse(pod_json).ok()?;
    let mut metadata = JsonFields::parse(pod.get("metadata")?).ok()?;
    let mut annotations = JsonFields::parse(metadata.get("annotations").unwrap_or(b"{}")).ok()?;
    for (key, value) in values {
        annotations.set(key, value.as_bytes());
    }
    let annotations = annotations.to_json().ok()?;
    metadata.set("annotations", &annotations);
    let metadata = metadata.to_json().ok()?;
    pod.set("metadata", &metadata);
    pod.to_json().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SEEN: i64 = 1_500_000_000_000_000_001;

    /// Decodes the Pod, inserts the annotations and encodes it again.
    fn decoded_and_annotated(json: &[u8]) -> String {
        let mut value: Value = serde_json::from_slice(json).unwrap();
        if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
            if let Some(annotations) = annotations.as_object_mut() {
                annotations.insert(CONFIG_SOURCE.into(), json!("fi\"le"));
                annotations.insert(CONFIG_SEEN.into(), json!(format_nanos(SEEN.into()).unwrap()));
            }
        }
        value.to_string()
    }

    #[test]
    fn annotations_are_added_as_if_the_pod_were_decoded_and_encoded_again() {
        let (source, seen) = (CONFIG_SOURCE, CONFIG_SEEN);
        for pod in [
            json!({"kind": "Pod", "metadata": {"name": "a", "annotations": {"a": "1"}}, "spec": {"x": 1.5}}),
            json!({"metadata": {"annotations": {}, "name": "a"}}),
            json!({"metadata": {"name": "a"}, "spec": {"metadata": {"annotations": {"b": "2"}}}}),
            json!({"metadata": {}}),
            json!({"metadata": {"annotations": {"a": "1", source: "x", "b": "\u{1F600}\n", seen: "y", "c": "3"}}}),
            json!({"metadata": {"annotations": {seen: "y", "b": "2", source: {"deep": [1]}}, "name": "n"}}),
            json!({"metadata": {"annotations": {source: "x"}}}),
            json!({"metadata": {"annotations": {seen: ""}}}),
            json!({"metadata": {"annotations": null, "name": "n"}}),
            json!({"metadata": {"annotations": "text"}}),
            json!({"metadata": null}),
            json!({"spec": {"metadata": {}}}),
            json!({"meta\"data": {}, "metadata": {"a\"b": "c\\d"}}),
            json!("text"),
        ] {
            let json = pod.to_string();
            let annotated = with_source_annotations(json.as_bytes(), "fi\"le", SEEN);
            assert_eq!(String::from_utf8_lossy(&annotated), decoded_and_annotated(json.as_bytes()));
            assert_eq!(with_source_annotations(&annotated, "fi\"le", SEEN), annotated, "twice");
        }
    }

    #[test]
    fn an_unknown_source_or_time_leaves_its_annotation_as_it_is() {
        let pod = json!({"metadata": {"annotations": {CONFIG_SOURCE: "x", CONFIG_SEEN: "y"}}}).to_string();
        for (source, seen, expected) in [
            ("", 0, json!({CONFIG_SOURCE: "x", CONFIG_SEEN: "y"})),
            ("", -1, json!({CONFIG_SOURCE: "x", CONFIG_SEEN: "y"})),
            ("api", 0, json!({CONFIG_SOURCE: "api", CONFIG_SEEN: "y"})),
            ("", 5_000_000_000, json!({CONFIG_SOURCE: "x", CONFIG_SEEN: "1970-01-01T00:00:05Z"})),
        ] {
            let annotated = with_source_annotations(pod.as_bytes(), source, seen);
            let annotated: Value = serde_json::from_slice(&annotated).unwrap();
            assert_eq!(annotated["metadata"]["annotations"], expected, "{source:?} {seen}");
        }
        let plain = br#"{"metadata":{ }}"#;
        assert_eq!(with_source_annotations(plain, "", 0), plain);
        assert_eq!(with_source_annotations(b"no pod", "file", SEEN), b"no pod");
    }
}
