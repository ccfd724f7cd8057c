//! Errors of strict decoding that lenient decoding ignores: unknown fields, and fields that occur more than once in a file of
//! a KubeletConfiguration (node-and-api.md §2.1).

use keelson_config::{FieldKind, KUBELET_FIELDS, KubeletField, kubelet_field, kubelet_fields};
use serde_json::{Map, Value};
use strsim::levenshtein;

use crate::document::{ConfigError, Document, Sourced};

/// The beginning of the kubelet's log line, which tools look for.
const LENIENT: &str = "Using lenient decoding as strict decoding failed";
/// The fields of the document's header.
const HEADER_FIELDS: &[&str] = &["apiVersion", "kind"];
/// The fields of the object at a dotted path, with `[]` for list entries; `None` for a map with arbitrary keys.
fn fields_of(pattern: &str) -> Option<Vec<&'static str>> {
    if pattern.is_empty() {
        return Some([HEADER_FIELDS, &KUBELET_FIELDS[..]].concat());
    }
    if let Some(list) = pattern.strip_suffix("[]") {
        let fields = kubelet_field(list)?.kind.entry_fields();
        return (!fields.is_empty()).then(|| fields.to_vec());
    }
    if kubelet_field(pattern)?.kind != FieldKind::Object {
        return None;
    }
    let name_below = |field: &KubeletField| {
        let name = field.path.strip_prefix(pattern)?.strip_prefix('.')?;
        (!name.contains('.')).then_some(name)
    };
    Some(kubelet_fields().iter().filter_map(name_below).collect())
}

/// The unknown fields of a KubeletConfiguration, at any depth.
pub(crate) fn unknown(document: &Document) -> Vec<Sourced<UnknownField>> {
    let mut found = Vec::new();
    walk_map(document, "", "", &document.root, &mut found);
    found
}

/// An unknown field.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UnknownField {
    value: Value,
    /// The known field that was probably meant.
    meant: Option<&'static str>,
}

fn walk(
    document: &Document,
    path: &str,
    pattern: &str,
    value: &Value,
    found: &mut Vec<Sourced<UnknownField>>,
) {
    match value {
        Value::Object(map) => walk_map(document, path, pattern, map, found),
        Value::Array(list) => {
            let pattern = format!("{pattern}[]");
            for (index, value) in list.iter().enumerate() {
                walk(document, &format!("{path}[{index}]"), &pattern, value, found);
            }
        }
        _ => {}
    }
}

fn walk_map(
    document: &Document,
    path: &str,
    pattern: &str,
    map: &Map<String, Value>,
    found: &mut Vec<Sourced<UnknownField>>,
) {
    let Some(fields) = fields_of(pattern) else { return };
    let below = |parent: &str, name: &str| {
        if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") }
    };
    for (name, value) in map {
        let field = below(path, name);
        if fields.contains(&name.as_str()) {
            walk(document, &field, &below(pattern, name), value, found);
        } else {
            let near = fields.iter().map(|other| (levenshtein(name, other), *other)).min();
            let meant = near.filter(|(letters, _)| *letters <= 2 && name.len() > 3).map(|(_, meant)| meant);
            let value = UnknownField { value: value.clone(), meant };
            found.push(Sourced { value, origin: document.origin(&field), field });
        }
    }
}

impl Sourced<UnknownField> {
    fn hint(&self) -> String {
        self.value.meant.map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"))
    }

    /// The warning for a field that is ignored.
    pub(crate) fn warning(&self) -> String {
        let (origin, field, hint) = (&self.origin, &self.field, self.hint());
        format!("{LENIENT}: {origin}: a KubeletConfiguration has no field {field}{hint}; it is ignored")
    }

    /// The error for a field that is refused.
    pub(crate) fn into_error(self) -> ConfigError {
        let remedy = format!(
            "a KubeletConfiguration has no such field{}; correct its name, or remove it",
            self.hint()
        );
        let value = self.value.value.to_string();
        ConfigError { value, ..Sourced { value: (), origin: self.origin, field: self.field }.error(remedy) }
    }
}

/// The warning for a field that occurs more than once in a file.
pub(crate) fn duplicate_warning(duplicate: &Sourced<()>) -> String {
    let Sourced { origin, field, .. } = duplicate;
    format!("{LENIENT}: {origin}: {field} occurs more than once in the file; the last one is used")
}

/// The error for a duplicate field in a file that does not allow it.
pub(crate) fn duplicate_error(duplicate: &Sourced<()>) -> ConfigError {
    let twice = duplicate.clone().map(|()| "…");
    twice.error("this field occurs more than once in the file; keep one of them")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inputs::Flags;
    use crate::outcome::{Level, WITHOUT_EFFECT};
    use crate::testing::{host, keelson, kubelet, run};

    /// The warnings about ignored fields.
    fn ignored(document: &Document) -> Vec<String> {
        let resolved = run(&Flags::default(), Some(document), None, &host()).unwrap();
        let warnings = resolved.notes.into_iter().filter(|note| note.level == Level::Warn);
        warnings.map(|note| note.text).filter(|text| text.starts_with(LENIENT)).collect()
    }

    #[test]
    fn an_unknown_field_at_any_depth_causes_a_warning_with_line_and_path() {
        for (fields, path, hint) in [
            (json!({"maxPod": 7}), "maxPod", " (did you mean maxPods?)"),
            (
                json!({"authentication": {"webhook": {"cachTTL": "1m"}}}),
                "authentication.webhook.cachTTL",
                " (did you mean cacheTTL?)",
            ),
            (json!({"authentication": {"oidc": {}}}), "authentication.oidc", ""),
            (
                json!({"logging": {"options": {"text": {"splitStreams": true}}}}),
                "logging.options.text.splitStreams",
                " (did you mean splitStream?)",
            ),
            (
                json!({"logging": {"vmodule": [{"filePattern": "a"}, {"filePattern": "b", "verbose": 1}]}}),
                "logging.vmodule[1].verbose",
                "",
            ),
            (
                json!({"registerWithTaints": [{"key": "a", "efect": "NoExecute"}]}),
                "registerWithTaints[0].efect",
                " (did you mean effect?)",
            ),
            (
                json!({"shutdownGracePeriodByPodPriority": [{"priority": 1, "seconds": 5}]}),
                "shutdownGracePeriodByPodPriority[0].seconds",
                "",
            ),
            (
                json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}, "limit": {}}]}),
                "reservedMemory[0].limit",
                " (did you mean limits?)",
            ),
            (json!({"memorySwap": {"behavior": "NoSwap"}}), "memorySwap.behavior", ""),
        ] {
            let document = Document { lines: [(path.to_owned(), 12)].into(), ..kubelet(fields.clone()) };
            let expected = format!(
                "{LENIENT}: kubelet.yaml:12: a KubeletConfiguration has no field {path}{hint}; it is ignored"
            );
            assert_eq!(ignored(&document), [expected], "{fields}");
        }
    }

    #[test]
    fn an_unknown_field_is_not_reported_as_unsupported_too() {
        let document = kubelet(json!({"maxPod": 7, "logging": {"verbosty": 1}}));
        let notes = run(&Flags::default(), Some(&document), None, &host()).unwrap().notes;
        assert!(notes.iter().all(|note| note.event != Some(WITHOUT_EFFECT)), "{notes:?}");
    }

    #[test]
    fn map_keys_and_existing_fields_are_known() {
        let document = kubelet(json!({
            "evictionHard": {"memory.available": "1Gi"}, "featureGates": {"CSIVolumeHealth": true},
            "kubeReserved": {"cpu": "1"}, "staticPodURLHeader": {"X": ["y"]}, "cpuManagerPolicyOptions": {"a": "b"},
            "reservedMemory": [{"numaNode": 0, "limits": {"hugepages-1Gi": "1Gi"}}],
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false, "cacheTTL": "0s"}, "x509": {}},
            "authorization": {"mode": "AlwaysAllow", "webhook": {"cacheAuthorizedTTL": "0s", "cacheUnauthorizedTTL": "0s"}},
            "logging": {"format": "text", "flushFrequency": 0, "verbosity": 0, "vmodule": [], "options": {"json": {}}},
            "crashLoopBackOff": {}, "memorySwap": {"swapBehavior": ""}, "userNamespaces": {"idsPerPod": 65536},
        }));
        assert_eq!(ignored(&document), Vec::<String>::new());
        for pattern in kubelet_fields().iter().map(|field| field.path) {
            let top = pattern.split(['.', '[']).next().unwrap();
            assert!(KUBELET_FIELDS.contains(&top), "{pattern}");
        }
    }

    #[test]
    fn a_duplicate_field_is_a_warning_and_in_keelson_config_an_error() {
        let twice = |field: &str, file: &str| Sourced {
            value: (),
            origin: format!("{file}:7"),
            field: field.to_owned(),
        };
        let document = Document {
            duplicates: vec![twice("logging.verbosity", "kubelet.yaml")],
            ..kubelet(json!({"logging": {"verbosity": 2}}))
        };
        let expected = format!(
            "{LENIENT}: kubelet.yaml:7: logging.verbosity occurs more than once in the file; the last one is used"
        );
        assert_eq!(ignored(&document), [expected]);
        let ours = Document {
            duplicates: vec![twice("runDir", "keelson.yaml")],
            ..keelson(json!({"runDir": "/run/k"}))
        };
        let errors = run(&Flags::default(), None, Some(&ours), &host()).unwrap_err();
        assert_eq!(errors.len(), 1);
        assert!(errors[0].contains("runDir") && errors[0].contains("keelson.yaml:7"), "{errors:?}");
    }
}
