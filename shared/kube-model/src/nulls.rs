//! Nulls in manifests, handled as by the kubelet's decoder.
//!
//! A field that is null is absent, which every reader here handles. A value of a map or a list cannot be absent: Go's
//! decoder replaces it by its zero value, which is the empty text, 0 or an empty object (encoding/json; for amounts
//! `Quantity.UnmarshalJSON`).

use serde_json::{Value, json};

/// Maps whose values are text.
const TEXTS: [&str; 9] = [
    "annotations",
    "binaryData",
    "data",
    "labels",
    "matchLabels",
    "nodeSelector",
    "options",
    "stringData",
    "volumeAttributes",
];
/// Maps whose values are amounts.
const AMOUNTS: [&str; 3] = ["limits", "overhead", "requests"];
/// Lists of text.
const TEXT_LISTS: [&str; 20] = [
    "accessModes",
    "add",
    "args",
    "command",
    "drop",
    "finalizers",
    "hostnames",
    "matchLabelKeys",
    "mismatchLabelKeys",
    "monitors",
    "namespaces",
    "nameservers",
    "portals",
    "searches",
    "targetWWNs",
    "values",
    "wwids",
    "audiences",
    "mountOptions",
    "resourceNames",
];
/// Lists of numbers.
const NUMBER_LISTS: [&str; 1] = ["supplementalGroups"];

/// Replaces each null in a map or a list of a Pod, a Secret or a ConfigMap by the zero value.
pub fn fill_nulls(object: &mut Value) {
    fill(object, "", "");
}

/// `name` is the field that contains the value, `above` the field around that.
fn fill(value: &mut Value, name: &str, above: &str) {
    match value {
        Value::Object(map) => {
            let zero = if TEXTS.contains(&name) {
                Some(json!(""))
            } else if AMOUNTS.contains(&name) {
                Some(json!("0"))
            } else {
                None
            };
            for (key, value) in map.iter_mut() {
                match &zero {
                    Some(zero) if value.is_null() => value.clone_from(zero),
                    _ => fill(value, key, name),
                }
            }
        }
        Value::Array(items) => {
            let zero = if name == "values" && above == "exitCodes" || NUMBER_LISTS.contains(&name) {
                json!(0)
            } else if TEXT_LISTS.contains(&name) {
                json!("")
            } else {
                json!({})
            };
            for item in items {
                if item.is_null() {
                    item.clone_from(&zero);
                } else {
                    fill(item, "", name);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_in_a_map_or_list_becomes_the_zero_value_and_a_null_field_stays_absent() {
        let mut pod = json!({
            "metadata": {"labels": {"a": null, "b": "c"}, "annotations": {"d": null}, "generateName": null},
            "spec": {
                "nodeSelector": {"e": null},
                "securityContext": {"supplementalGroups": [5, null]},
                "overhead": {"cpu": null},
                "volumes": [null, {"name": "f", "emptyDir": null}],
                "containers": [{
                    "command": ["sh", null],
                    "resources": {"limits": {"memory": null}, "requests": null},
                    "securityContext": {"capabilities": {"add": [null]}},
                    "restartPolicyRules": [{"exitCodes": {"values": [null]}}],
                    "env": [null],
                }, null],
            },
        });
        fill_nulls(&mut pod);
        assert_eq!(
            pod,
            json!({
                "metadata": {"labels": {"a": "", "b": "c"}, "annotations": {"d": ""}, "generateName": null},
                "spec": {
                    "nodeSelector": {"e": ""},
                    "securityContext": {"supplementalGroups": [5, 0]},
                    "overhead": {"cpu": "0"},
                    "volumes": [{}, {"name": "f", "emptyDir": null}],
                    "containers": [{
                        "command": ["sh", ""],
                        "resources": {"limits": {"memory": "0"}, "requests": null},
                        "securityContext": {"capabilities": {"add": [""]}},
                        "restartPolicyRules": [{"exitCodes": {"values": [0]}}],
                        "env": [{}],
                    }, {}],
                },
            })
        );
        let mut config_map = json!({"kind": "ConfigMap", "data": {"a": null}, "binaryData": null});
        fill_nulls(&mut config_map);
        assert_eq!(config_map, json!({"kind": "ConfigMap", "data": {"a": ""}, "binaryData": null}));
    }
}
