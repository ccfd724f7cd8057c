//! How a patch changes an object: JSON merge patches, and those that merge lists by a key of their items.

use serde_json::{Map, Value};

/// How lists are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lists {
    /// `application/merge-patch+json`.
    Replaced,
    /// `application/strategic-merge-patch+json`.
    Merged,
}

/// The field that identifies the items of a list, where a strategic merge does not replace the list.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "conditions" | "addresses" => Some("type"),
        "podIPs" | "hostIPs" => Some("ip"),
        "ownerReferences" => Some("uid"),
        "containers" | "initContainers" | "volumes" | "resourceClaimStatuses" => Some("name"),
        _ => None,
    }
}

/// Changes `object`.
pub(super) fn apply(object: &mut Value, patch: &Value, lists: Lists) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() || changes.get("$patch").is_some_and(|how| how == "replace") {
        *object = Value::Object(Map::new());
    }
    let Value::Object(fields) = object else { return };
    for (field, change) in changes.iter().filter(|(field, _)| !field.starts_with('$')) {
        match (change, merge_key(field)) {
            (Value::Null, _) => {
                fields.remove(field);
            }
            (Value::Array(items), Some(key)) if lists == Lists::Merged => {
                let list = fields.entry(field).or_insert_with(|| Value::Array(Vec::new()));
                merge_list(list, items, key);
            }
            _ => apply(fields.entry(field).or_insert(Value::Null), change, lists),
        }
    }
}

fn merge_list(list: &mut Value, items: &[Value], key: &str) {
    let mut merged = list.as_array().cloned().unwrap_or_default();
    if items.iter().any(|item| item["$patch"] == "replace" && item[key].is_null()) {
        merged.clear();
    }
    for item in items.iter().filter(|item| !item[key].is_null()) {
        let at = merged.iter().position(|old| old[key] == item[key]);
        match (at, item["$patch"] == "delete") {
            (Some(at), true) => {
                merged.remove(at);
            }
            (None, true) => {}
            (Some(at), false) => apply(&mut merged[at], item, Lists::Merged),
            (None, false) => {
                let mut new = Value::Null;
                apply(&mut new, item, Lists::Merged);
                merged.push(new);
            }
        }
    }
    *list = merged.into();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn merge_patch_sets_named_fields_and_removes_nulls() {
        let before = json!({"a": 1, "b": {"c": 2, "d": 3}, "conditions": [{"type": "A", "reason": "x"}, {"type": "B"}]});
        let cases = [
            (Lists::Merged, json!({"a": null, "b": {"c": 4}}), "/b", json!({"c": 4, "d": 3})),
            (
                Lists::Merged,
                json!({"conditions": [{"type": "A", "reason": null, "status": "True"}, {"type": "B", "$patch": "delete"}, {"type": "C"}]}),
                "/conditions",
                json!([{"type": "A", "status": "True"}, {"type": "C"}]),
            ),
            (
                Lists::Merged,
                json!({"conditions": [{"type": "C"}, {"$patch": "replace"}], "$setElementOrder/conditions": []}),
                "/conditions",
                json!([{"type": "C"}]),
            ),
            (Lists::Replaced, json!({"conditions": [{"type": "C"}]}), "/conditions", json!([{"type": "C"}])),
            (Lists::Merged, json!({"e": [1, 2]}), "/e", json!([1, 2])),
        ];
        for (lists, patch, at, expected) in cases {
            let mut object = before.clone();
            apply(&mut object, &patch, lists);
            assert_eq!(object.pointer(at), Some(&expected), "{patch}");
        }
        let mut object = before;
        apply(&mut object, &json!({"a": null}), Lists::Merged);
        assert_eq!(object.get("a"), None);
    }
}
