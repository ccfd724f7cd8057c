//! Encodes a Pod as JSON once, so that the annotations of the agent can be added later without decoding it again.

use std::ops::Range;

use keelson_kube_model::{annotations, time};
use serde_json::{Map, Value};

/// A Pod as JSON, and where the annotations of the agent belong in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EncodedPod {
    /// The Pod without the annotations of the agent.
    pub(crate) json: Box<[u8]>,
    /// `None` if `metadata` or its annotations are no object: then the Pod stays as it is.
    pub(crate) places: Option<AnnotationPlaces>,
}

/// Where the annotations `kubernetes.io/config.source` and `kubernetes.io/config.seen` belong in the JSON of a Pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AnnotationPlaces {
    /// The value of an existing `kubernetes.io/config.source`, in bytes.
    source: Option<Range<usize>>,
    /// The value of an existing `kubernetes.io/config.seen`, in bytes.
    seen: Option<Range<usize>>,
    /// Where new annotations are inserted: before the closing brace of the annotations, or of the metadata if it has none.
    end: usize,
    /// Whether `metadata` has annotations.
    has_annotations: bool,
    /// Whether something precedes in the object that `end` closes.
    needs_comma: bool,
}

/// Encodes `pod`; the bytes are those of `pod.to_string()`.
pub(crate) fn encode_pod(pod: &Value) -> EncodedPod {
    let mut json = Vec::new();
    let mut places = None;
    match pod {
        Value::Object(fields) => write_object(&mut json, fields, |json, key, value| match value {
            Value::Object(metadata) if key == "metadata" => places = write_metadata(json, metadata),
            other => write_value(json, other),
        }),
        other => write_value(&mut json, other),
    }
    EncodedPod { json: json.into(), places }
}

/// Writes `metadata`. Returns the places of the annotations in the whole text.
fn write_metadata(json: &mut Vec<u8>, metadata: &Map<String, Value>) -> Option<AnnotationPlaces> {
    let mut places = AnnotationPlaces::default();
    let mut can_annotate = true;
    write_object(json, metadata, |json, key, value| match value {
        Value::Object(all) if key == "annotations" => places = write_annotations(json, all),
        other => {
            can_annotate &= key != "annotations";
            write_value(json, other);
        }
    });
    if !places.has_annotations {
        (places.end, places.needs_comma) = (json.len() - 1, !metadata.is_empty());
    }
    can_annotate.then_some(places)
}

fn write_annotations(json: &mut Vec<u8>, all: &Map<String, Value>) -> AnnotationPlaces {
    let mut places = AnnotationPlaces { has_annotations: true, ..AnnotationPlaces::default() };
    write_object(json, all, |json, key, value| {
        let begin = json.len();
        write_value(json, value);
        let written = Some(begin..json.len());
        match key {
            annotations::CONFIG_SOURCE => places.source = written,
            annotations::CONFIG_SEEN => places.seen = written,
            _ => {}
        }
    });
    AnnotationPlaces { end: json.len() - 1, needs_comma: !all.is_empty(), ..places }
}

/// Writes an object; `write` writes the value of a key.
fn write_object(
    json: &mut Vec<u8>,
    object: &Map<String, Value>,
    mut write: impl FnMut(&mut Vec<u8>, &str, &Value),
) {
    json.push(b'{');
    for (index, (key, value)) in object.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        json.extend(text(key).into_bytes());
        json.push(b':');
        write(json, key, value);
    }
    json.push(b'}');
}

fn write_value(json: &mut Vec<u8>, value: &Value) {
    serde_json::to_writer(json, value).expect("a JSON value is written into memory");
}

/// Encodes text as JSON.
fn text(text: &str) -> String {
    Value::from(text).to_string()
}

impl AnnotationPlaces {
    /// `json` with `source`, and with the time `seen` (nanoseconds since 1970) at which the pod was first seen. An existing
    /// annotation is replaced where it is; others are appended.
    pub(crate) fn annotate(&self, json: &[u8], source: &str, seen: i64) -> Vec<u8> {
        let source = Some(text(source));
        let seen = time::format_nanos(i128::from(seen)).ok().map(|seen| text(&seen));
        let mut edits = Vec::new();
        let mut appended = Vec::new();
        for (key, value, place) in
            [(annotations::CONFIG_SOURCE, source, &self.source), (annotations::CONFIG_SEEN, seen, &self.seen)]
        {
            match (value, place) {
                (Some(value), Some(place)) => edits.push((place.clone(), value)),
                (Some(value), None) => appended.push(format!("{}:{value}", text(key))),
                (None, _) => {}
            }
        }
        edits.push((self.end..self.end, self.appended(&appended)));
        edits.sort_by_key(|(place, _)| place.start);
        let mut annotated = Vec::with_capacity(json.len() + 128);
        let mut copied = 0;
        for (place, replacement) in edits {
            annotated.extend_from_slice(&json[copied..place.start]);
            annotated.extend(replacement.into_bytes());
            copied = place.end;
        }
        annotated.extend_from_slice(&json[copied..]);
        annotated
    }

    /// The text to insert at `end` for these entries.
    fn appended(&self, entries: &[String]) -> String {
        if entries.is_empty() {
            return String::new();
        }
        let entries = entries.join(",");
        let entries =
            if self.has_annotations { entries } else { format!("{}:{{{entries}}}", text("annotations")) };
        if self.needs_comma { format!(",{entries}") } else { entries }
    }
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
                annotations.insert(annotations::CONFIG_SOURCE.into(), json!("fi\"le"));
                annotations
                    .insert(annotations::CONFIG_SEEN.into(), json!(time::format_nanos(SEEN.into()).unwrap()));
            }
        }
        value.to_string()
    }

    #[test]
    fn annotations_are_added_as_if_the_pod_were_decoded_and_encoded_again() {
        let (source, seen) = (annotations::CONFIG_SOURCE, annotations::CONFIG_SEEN);
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
            let EncodedPod { json, places } = encode_pod(&pod);
            assert_eq!(String::from_utf8_lossy(&json), pod.to_string());
            let annotated =
                places.map_or_else(|| json.to_vec(), |places| places.annotate(&json, "fi\"le", SEEN));
            assert_eq!(String::from_utf8_lossy(&annotated), decoded_and_annotated(&json));
        }
    }
}
