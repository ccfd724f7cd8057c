//! The KubeletConfiguration in force, as `/configz` shows it (node-and-api.md §2.5, §8.11).

use keelson_config::{Config, FieldKind, KUBELET_FIELDS, kubelet_field, kubelet_fields};
use keelson_kube_model::{format_go_duration, parse_go_duration};
use serde_json::{Map, Value, json};

use crate::defaults::{EVICTION_HARD, default_at, insert_at, is_empty_default, kubelet_defaults};
use crate::document::Document;
use crate::durations::is_zero;
use crate::paths::absolute;

/// The replacement of secret values.
const MASKED: &str = "<masked>";

/// The document with relative paths made absolute, starting from `folder`.
pub(crate) fn with_paths_from(folder: &str, document: &Document) -> Document {
    let mut document = document.clone();
    for field in kubelet_fields().iter().filter(|field| field.kind == FieldKind::Path) {
        change_at(&mut document.root, field.path, |value| {
            value.as_str().map(|path| absolute(folder, path).into())
        });
    }
    document
}

/// The whole KubeletConfiguration: the defaults, overlaid by the file and flags, overlaid by the settings that this agent
/// derived from them. Resolving the result again gives the same, except for masked values. `with_file`: not made of flags
/// only.
pub(crate) fn effective(document: Option<&Document>, with_file: bool, config: &Config) -> Map<String, Value> {
    let mut whole = kubelet_defaults();
    if !with_file {
        // The defaults of a kubelet without a file (§2.2), except the read-only port, which is not served here.
        let flags_only = json!({
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        if let Value::Object(flags_only) = flags_only {
            overlay(&mut whole, &flags_only, "");
        }
    }
    if let Some(document) = document {
        overlay(&mut whole, &with_paths_from(&document.folder, document).root, "");
        for field in kubelet_fields() {
            let from_flag = document.origin(field.path).starts_with("--");
            let default = |value: &Value| {
                is_empty_default(field, value, from_flag).then(|| default_at(field.path)).flatten()
            };
            change_at(&mut whole, field.path, default);
        }
        // Thresholds in the file already include the defaults that apply in addition.
        if !document.root.get(EVICTION_HARD).is_some_and(Value::is_object)
            && let Some(thresholds) = default_at(EVICTION_HARD)
        {
            whole.insert(EVICTION_HARD.to_owned(), thresholds);
        }
        derived(&mut whole, &document.root);
        if !with_file && whole[EVICTION_HARD] == json!({}) {
            whole.remove(EVICTION_HARD);
        }
    }
    for field in kubelet_fields().iter().filter(|field| field.kind.is_duration()) {
        change_at(&mut whole, field.path, |value| {
            Some(format_go_duration(parse_go_duration(value.as_str()?)?).into())
        });
    }
    insert_values_in_force(&mut whole, config);
    mask(&mut whole);
    whole
}

/// Overlays the fields of `over` on `whole`; ignores `null` and unknown fields.
fn overlay(whole: &mut Map<String, Value>, over: &Map<String, Value>, at: &str) {
    for (name, value) in over {
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        let known = !at.is_empty() || KUBELET_FIELDS.contains(&name.as_str());
        match (whole.get_mut(name), value) {
            (_, Value::Null) => {}
            _ if !known => {}
            (Some(Value::Object(below)), Value::Object(over)) if is_object(&path) => {
                overlay(below, over, &path);
            }
            _ => {
                whole.insert(name.clone(), value.clone());
            }
        }
    }
}

/// Whether a field is an object, whose fields keep their defaults if a file does not set them.
fn is_object(path: &str) -> bool {
    kubelet_field(path).is_some_and(|field| field.kind == FieldKind::Object)
}

/// Replaces the value at a dotted path if it exists and `f` returns another.
fn change_at(whole: &mut Map<String, Value>, path: &str, f: impl FnOnce(&Value) -> Option<Value>) {
    let mut names = path.split('.');
    let mut value = names.next().and_then(|name| whole.get_mut(name));
    for name in names {
        value = value.and_then(|value| value.get_mut(name));
    }
    if let Some(value) = value
        && let Some(other) = f(value)
    {
        *value = other;
    }
}

/// Defaults that depend on other fields.
fn derived(whole: &mut Map<String, Value>, file: &Map<String, Value>) {
    let set = |name: &str| file.get(name).is_some_and(|value| !value.is_null() && !is_zero(value));
    let parallel = file.get("maxParallelImagePulls").and_then(Value::as_i64).unwrap_or(1);
    if parallel >= 2 && !set("serializeImagePulls") {
        whole.insert("serializeImagePulls".to_owned(), false.into());
    }
}

/// Inserts the values that the agent has in force from flags or its own defaults.
fn insert_values_in_force(whole: &mut Map<String, Value>, config: &Config) {
    let resolved = serde_json::to_value(config).unwrap_or_default();
    for field in kubelet_fields().iter().filter(|field| field.shows_resolved) {
        let Some(path) = field.sets.first() else { continue };
        let value = path.split('.').try_fold(&resolved, |value, name| value.get(name));
        if let Some(value) = value.filter(|value| !value.is_null()) {
            insert_at(whole, field.path, value.clone());
        }
    }
    if let Some(tls) = &config.api.tls {
        let mode = if tls.reviews { "Webhook" } else { "AlwaysAllow" };
        change_at(whole, "authentication.anonymous.enabled", |_| Some(tls.anonymous.into()));
        change_at(whole, "authentication.webhook.enabled", |_| Some(tls.tokens.into()));
        change_at(whole, "authorization.mode", |_| Some(mode.into()));
    }
}

/// Masks the values of secret fields: header values are sent with each request for manifests and are often credentials (§16).
fn mask(whole: &mut Map<String, Value>) {
    for field in kubelet_fields().iter().filter(|field| field.secret) {
        change_at(whole, field.path, |value| {
            Some(match value {
                Value::Object(headers) => {
                    headers.keys().map(|name| (name.clone(), json!([MASKED]))).collect()
                }
                _ => MASKED.into(),
            })
        });
    }
}

#[cfg(test)]
#[path = "effective_tests.rs"]
mod tests;
