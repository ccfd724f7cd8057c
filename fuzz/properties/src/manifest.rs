//! Manifest files: YAML or JSON with one or several documents.

use std::sync::Arc;

use keelson_config::MANIFEST_LIMIT;
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::manifest::{Document, Kind, read_manifest};
use keelson_pod_config_core::object::StoredObject;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{FileContent, ManifestError, parse_file};
use serde_json::Value;

use crate::{Outcome, pod};

/// The path of the file in errors.
const PATH: &str = "/manifests/fuzz.yaml";
/// The largest number of errors that are reported for a file.
const MAX_ERRORS: usize = 20;
/// The largest amount of JSON that a file can produce, aliases included: 20 MiB of text, six times as long if JSON escapes every
/// character, and the punctuation of 250 000 values.
const MAX_JSON_BYTES: usize = 6 * (20 << 20) + 8 * 250_000;
/// A key of this length is valid in a YAML flow mapping, even with all characters escaped: the limit is 1024 characters, quotes
/// and escapes included (YAML 1.2 §7.4).
const SAFE_KEY_LENGTH: usize = 150;

/// Checks `bytes` as a manifest file.
///
/// # Panics
/// A property is violated.
pub fn check(bytes: &[u8]) -> Outcome {
    let rules = StaticRules::standalone("node");
    let documents = read_manifest(bytes);
    if let Ok(documents) = &documents {
        assert_documents_survive_writing(documents);
    }
    match parse_file(bytes, PATH, &rules) {
        Ok(content) => {
            assert!(documents.is_ok(), "parse_file accepts what read_manifest rejects");
            assert_content_is_complete(&content);
            assert_eq!(
                parse_file(bytes, PATH, &rules).as_ref(),
                Ok(&content),
                "the file is parsed differently a second time"
            );
            assert_checkpoint_restores_the_content(&content, &rules);
            Outcome::Accepted
        }
        Err(errors) => {
            assert_errors_have_a_line(bytes, &errors);
            Outcome::Rejected
        }
    }
}

fn assert_content_is_complete(content: &FileContent) {
    assert!(
        !content.pods.is_empty() || !content.objects.is_empty(),
        "the file is accepted and has no objects"
    );
    for pod in &content.pods {
        assert!(!pod.uid.is_empty() && pod.line > 0 && pod.document > 0, "{pod:?}");
        assert!(pod.name.ends_with("-node") && pod.name.len() > "-node".len(), "{}", pod.name);
        let json: Value = serde_json::from_slice(&pod.json).expect("a pod is JSON");
        for (pointer, wanted) in [
            ("/metadata/uid", &pod.uid),
            ("/metadata/name", &pod.name),
            ("/metadata/namespace", &pod.namespace),
        ] {
            assert_eq!(json.pointer(pointer).and_then(Value::as_str), Some(wanted.as_str()), "{pointer}");
        }
        pod::assert_requests_are_well_formed(
            &serde_json::from_value(json).expect("a validated pod is a Pod"),
        );
    }
    for object in &content.objects {
        let json: Value = serde_json::from_slice(&object.json).expect("an object is JSON");
        assert_eq!(json["kind"], object.key.kind.as_str());
        assert_eq!(json["metadata"]["name"], *object.key.name);
        assert_eq!(json["metadata"]["namespace"].as_str().unwrap_or_default(), object.key.namespace);
    }
}

/// Asserts that a restart restores the same pods with the same UIDs from the checkpoint, which has no Secrets.
fn assert_checkpoint_restores_the_content(content: &FileContent, rules: &StaticRules) {
    let is_kept = |o: &&Arc<StoredObject>| o.key.kind != Kind::Secret;
    if content.pods.is_empty() && !content.objects.iter().any(|o| is_kept(&o)) {
        return;
    }
    let again =
        parse_file(&content.checkpoint, PATH, rules).unwrap_or_else(|e| panic!("the checkpoint: {e:?}"));
    let pod = |p: &Arc<DesiredPod>| (p.uid.clone(), p.full_name(), p.json.clone(), p.fingerprint);
    let pods = |content: &FileContent| content.pods.iter().map(pod).collect::<Vec<_>>();
    assert_eq!(pods(content), pods(&again), "pods of the checkpoint");
    let objects = |content: &FileContent| -> Vec<_> {
        content.objects.iter().filter(is_kept).map(|o| (o.key.clone(), o.json.clone())).collect()
    };
    assert_eq!(objects(content), objects(&again), "objects of the checkpoint");
    assert!(again.objects.iter().all(|o| is_kept(&o)), "a Secret is in the checkpoint");
}

/// Asserts that each document, written as JSON, parses as the same document, as JSON and as YAML.
fn assert_documents_survive_writing(documents: &[Document]) {
    assert!(!documents.is_empty(), "the file is accepted and has no documents");
    let mut json_bytes = 0;
    for document in documents {
        assert!(document.line > 0 && document.number > 0, "{document:?}");
        let json = document.value.to_string();
        json_bytes += json.len();
        // An item of a PodList may have no kind.
        if document.value.get("kind").is_none_or(|kind| !kind.is_string()) {
            continue;
        }
        if json.len() >= MANIFEST_LIMIT {
            continue;
        }
        let again = read_manifest(json.as_bytes())
            .unwrap_or_else(|e| panic!("our own JSON is rejected: {e}: {json}"));
        assert!(again.len() == 1 && is_same(&again[0].value, &document.value), "{json} became {again:?}");
        match read_manifest(format!("---\n{json}").as_bytes()) {
            Ok(again) => {
                assert!(
                    again.len() == 1 && is_same(&again[0].value, &document.value),
                    "{json} became {again:?}"
                );
            }
            Err(error) => {
                assert!(!is_plain(&document.value), "our own JSON is rejected as YAML: {error}: {json}")
            }
        }
    }
    assert!(json_bytes <= MAX_JSON_BYTES, "the manifest has {json_bytes} bytes of JSON");
}

/// Whether two values are equal. `1.0` equals `1`, and floats may differ in their last bits.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(a), Value::Number(b)) => {
            let near = |a: f64, b: f64| (a - b).abs() <= a.abs() * 1e-14;
            a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| near(a, b))
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| is_same(a, b)))
        }
        _ => one == other,
    }
}

/// Whether the JSON of a value is certainly valid YAML: printable ASCII and short keys.
fn is_plain(value: &Value) -> bool {
    let printable = |text: &str| text.bytes().all(|b| (b' '..=b'~').contains(&b));
    match value {
        Value::String(text) => printable(text),
        Value::Array(items) => items.iter().all(is_plain),
        Value::Object(map) => {
            map.iter().all(|(key, value)| printable(key) && key.len() < SAFE_KEY_LENGTH && is_plain(value))
        }
        _ => true,
    }
}

fn assert_errors_have_a_line(bytes: &[u8], errors: &[ManifestError]) {
    assert!(!errors.is_empty() && errors.len() <= MAX_ERRORS, "{} errors", errors.len());
    let lines = bytes.iter().filter(|b| matches!(b, b'\n' | b'\r')).count();
    for error in errors {
        assert!(error.line as usize <= lines + 2, "{error:?}");
        assert!(!error.message.is_empty(), "{error:?}");
        assert!(error.at(PATH).starts_with(PATH), "{error:?}");
    }
}
