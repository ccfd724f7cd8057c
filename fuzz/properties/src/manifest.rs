//! The file of a manifest: YAML or JSON, one or several documents.

use std::sync::Arc;

use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::manifest::{Document, Kind, MAX_BYTES, read_manifest};
use keelson_pod_config_core::object::StoredObject;
use keelson_pod_config_core::static_pod::StaticRules;
use keelson_pod_config_core::{FileContent, ManifestError, parse_file};
use serde_json::Value;

use crate::{Met, pod};

/// Where the file is said to be.
const PATH: &str = "/manifests/fuzz.yaml";
/// Errors that one file reports.
const MAX_ERRORS: usize = 20;
/// More JSON than this cannot come of a file, whatever its aliases say: 20 MiB of text, of which JSON makes six times
/// as much where all of it has to be escaped, and the signs around 250 000 values.
const MAX_JSON: usize = 6 * (20 << 20) + 8 * 250_000;
/// A key of a YAML flow mapping is shorter than 1024 characters, quotes and escapes included (YAML 1.2 §7.4).
const SAFE_KEY: usize = 150;

/// Checks the manifest `bytes`.
///
/// # Panics
/// Something does not hold.
pub fn check(bytes: &[u8]) -> Met {
    let rules = StaticRules::standalone("node");
    let documents = read_manifest(bytes);
    if let Ok(documents) = &documents {
        documents_are_written_and_read_again(documents);
    }
    match parse_file(bytes, PATH, &rules) {
        Ok(content) => {
            assert!(documents.is_ok(), "checked, but not read");
            content_is_whole(&content);
            assert_eq!(parse_file(bytes, PATH, &rules).as_ref(), Ok(&content), "read twice");
            checkpoint_says_the_same(&content, &rules);
            Met::Good
        }
        Err(errors) => {
            errors_say_where(bytes, &errors);
            Met::Refused
        }
    }
}

fn content_is_whole(content: &FileContent) {
    assert!(!content.pods.is_empty() || !content.objects.is_empty(), "good, and nothing in it");
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
        pod::can_be_asked_for(&serde_json::from_value(json).expect("a validated pod is a Pod"));
    }
    for object in &content.objects {
        let json: Value = serde_json::from_slice(&object.json).expect("an object is JSON");
        assert_eq!(json["kind"], object.key.kind.as_str());
        assert_eq!(json["metadata"]["name"], *object.key.name);
        assert_eq!(json["metadata"]["namespace"].as_str().unwrap_or_default(), object.key.namespace);
    }
}

/// What a restart reads gives the same pods, with the same UIDs, and no Secret.
fn checkpoint_says_the_same(content: &FileContent, rules: &StaticRules) {
    let open = |o: &&Arc<StoredObject>| o.key.kind != Kind::Secret;
    if content.pods.is_empty() && !content.objects.iter().any(|o| open(&o)) {
        return;
    }
    let again =
        parse_file(&content.checkpoint, PATH, rules).unwrap_or_else(|e| panic!("the checkpoint: {e:?}"));
    let pod = |p: &Arc<DesiredPod>| (p.uid.clone(), p.full_name(), p.json.clone(), p.fingerprint);
    let pods = |content: &FileContent| content.pods.iter().map(pod).collect::<Vec<_>>();
    assert_eq!(pods(content), pods(&again), "pods of the checkpoint");
    let objects = |content: &FileContent| -> Vec<_> {
        content.objects.iter().filter(open).map(|o| (o.key.clone(), o.json.clone())).collect()
    };
    assert_eq!(objects(content), objects(&again), "objects of the checkpoint");
    assert!(again.objects.iter().all(|o| open(&o)), "a Secret is in the checkpoint");
}

/// Each document, written as JSON, reads as the same document, also when it is read as YAML.
fn documents_are_written_and_read_again(documents: &[Document]) {
    assert!(!documents.is_empty(), "read, and nothing in it");
    let mut text = 0;
    for document in documents {
        assert!(document.line > 0 && document.number > 0, "{document:?}");
        let json = document.value.to_string();
        text += json.len();
        // An item of a PodList need not say what it is.
        if document.value.get("kind").is_none_or(|kind| !kind.is_string()) {
            continue;
        }
        if json.len() >= MAX_BYTES {
            continue;
        }
        let again = read_manifest(json.as_bytes()).unwrap_or_else(|e| panic!("{e} of our own {json}"));
        assert!(again.len() == 1 && is_same(&again[0].value, &document.value), "{json} became {again:?}");
        match read_manifest(format!("---\n{json}").as_bytes()) {
            Ok(again) => {
                assert!(
                    again.len() == 1 && is_same(&again[0].value, &document.value),
                    "{json} became {again:?}"
                );
            }
            Err(error) => assert!(!is_plain(&document.value), "{error} of our own {json}"),
        }
    }
    assert!(text <= MAX_JSON, "{text} bytes came of a manifest");
}

/// Whether two values are the same; a number may be written `1.0` or `1`, and a float may differ in its last bit.
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

/// Whether the JSON of a value is also YAML for certain: printable ASCII and short keys, none of which merges.
fn is_plain(value: &Value) -> bool {
    let printable = |text: &str| text.bytes().all(|b| (b' '..=b'~').contains(&b));
    match value {
        Value::String(text) => printable(text),
        Value::Array(items) => items.iter().all(is_plain),
        Value::Object(map) => {
            map.iter().all(|(key, value)| printable(key) && key.len() < SAFE_KEY && is_plain(value))
        }
        _ => true,
    }
}

fn errors_say_where(bytes: &[u8], errors: &[ManifestError]) {
    assert!(!errors.is_empty() && errors.len() <= MAX_ERRORS, "{} errors", errors.len());
    let lines = bytes.iter().filter(|b| matches!(b, b'\n' | b'\r')).count();
    for error in errors {
        assert!(error.line as usize <= lines + 2, "{error:?}");
        assert!(!error.message.is_empty(), "{error:?}");
        assert!(error.at(PATH).starts_with(PATH), "{error:?}");
    }
}
