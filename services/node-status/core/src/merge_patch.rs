//! Compares values of the API and makes merge patches of their differences.

use serde_json::{Map, Value, json};

/// Whether a value is absent, null, or an empty text, list or object, which the API treats alike.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether the API treats two values as equal: an empty value may be absent.
pub(crate) fn is_equivalent(old: &Value, new: &Value) -> bool {
    match (old, new) {
        (Value::Object(before), Value::Object(now)) => {
            before.keys().chain(now.keys()).all(|key| is_equivalent(&old[key], &new[key]))
        }
        (Value::Array(before), Value::Array(now)) => {
            before.len() == now.len() && before.iter().zip(now).all(|(old, new)| is_equivalent(old, new))
        }
        _ => old == new || (is_empty(old) && is_empty(new)),
    }
}

/// Entries of `ours` that differ in `live`, of the keys for which `owned` is true.
pub(crate) fn differing(live: &Value, ours: &Value, owned: impl Fn(&str) -> bool) -> Map<String, Value> {
    let ours = ours.as_object().into_iter().flatten();
    let changed = ours.filter(|(key, value)| owned(key) && live.get(key.as_str()) != Some(*value));
    changed.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// `new` as a merge patch over `old`: a field of an object that `new` lacks is sent as null, since a merge keeps absent fields.
/// Nested lists replace the old list whole.
pub(crate) fn merge_patch(old: &Value, new: &Value) -> Value {
    let (Value::Object(before), Value::Object(now)) = (old, new) else { return new.clone() };
    let removed = before.iter().filter(|(key, value)| !now.contains_key(*key) && !is_empty(value));
    let removed = removed.map(|(key, _)| (key.clone(), Value::Null));
    let kept = now.iter().map(|(key, value)| (key.clone(), merge_patch(&old[key], value)));
    Value::Object(removed.chain(kept).collect())
}

/// A list that replaces the server's list instead of being merged with it.
pub(crate) fn replace_list(list: &Value) -> Value {
    let mut list = list.as_array().cloned().unwrap_or_default();
    list.push(json!({"$patch": "replace"}));
    list.into()
}

/// Sends null for each field that the server's condition `old` has and `new` lacks: a merge keeps fields that it does not name,
/// so a condition would keep the reason and message of its former status.
pub(crate) fn remove_absent(old: &Value, new: &mut Value) {
    for field in ["reason", "message", "observedGeneration"] {
        if !is_empty(&old[field]) && is_empty(&new[field]) {
            new[field] = Value::Null;
        }
    }
}
