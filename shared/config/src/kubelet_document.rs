//! What several readers need to know of the kubelet's own configuration file.

use serde_json::{Map, Value};

/// The API version of the kubelet's configuration.
pub const KUBELET_API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Its kind.
pub const KUBELET_KIND: &str = "KubeletConfiguration";

/// The field of `config.json` with the effective KubeletConfiguration; also the prefix of its values in the provenance.
pub const KUBELET_CONFIGURATION: &str = "kubeletConfiguration";

/// Each leaf of `map` (any value except a non-empty map) with its path.
pub fn leaves(map: &Map<String, Value>) -> Vec<(Vec<&str>, &Value)> {
    let mut all = Vec::new();
    for (name, value) in map {
        match value {
            Value::Object(below) if !below.is_empty() => {
                all.extend(leaves(below).into_iter().map(|(mut names, value)| {
                    names.insert(0, name);
                    (names, value)
                }));
            }
            value => all.push((vec![name.as_str()], value)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_found_at_any_depth_and_an_empty_map_is_one() {
        let document = serde_json::json!({"a": {"b.c": 1, "d": {"e": [1]}}, "f": {}, "g": null});
        let found: Vec<(String, String)> = leaves(document.as_object().unwrap())
            .into_iter()
            .map(|(names, value)| (names.join("/"), value.to_string()))
            .collect();
        let expected = [("a/b.c", "1"), ("a/d/e", "[1]"), ("f", "{}"), ("g", "null")];
        assert_eq!(found, expected.map(|(names, value)| (names.to_owned(), value.to_owned())));
    }
}
