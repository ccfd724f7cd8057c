//! `nodeSelector` and the required node affinity against the Node.

use keelson_kube_model::{Node, Pod};
use serde_json::Value;

/// Whether the pod may run on this node. Preferences only matter to the scheduler.
pub(super) fn matches(pod: &Pod, node: &Node) -> bool {
    let labels = &node.metadata.labels;
    if !pod.spec.node_selector.iter().all(|(key, value)| labels.get(key) == Some(value)) {
        return false;
    }
    let required = pod
        .spec
        .affinity
        .as_ref()
        .map(|affinity| &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]);
    let Some(required) = required.filter(|required| !required.is_null()) else { return true };
    // One matching term is enough; an empty list or an empty term matches nothing.
    list(&required["nodeSelectorTerms"]).iter().any(|term| term_matches(term, node))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn term_matches(term: &Value, node: &Node) -> bool {
    let (expressions, fields) = (list(&term["matchExpressions"]), list(&term["matchFields"]));
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label = |key: &str| node.metadata.labels.get(key).map(String::as_str);
    // The only supported field.
    let field = |key: &str| (key == "metadata.name").then_some(node.metadata.name.as_str());
    expressions.iter().all(|e| requirement(e, label)) && fields.iter().all(|e| requirement(e, field))
}

fn requirement<'a>(requirement: &Value, value_of: impl Fn(&str) -> Option<&'a str>) -> bool {
    let value = value_of(requirement["key"].as_str().unwrap_or_default());
    let values = list(&requirement["values"]);
    let named = |value: &str| values.iter().any(|v| v.as_str() == Some(value));
    let compared = |by: fn(&i64, &i64) -> bool| {
        let bound = values.first().and_then(Value::as_str).and_then(|v| v.parse::<i64>().ok());
        let value = value.and_then(|v| v.parse::<i64>().ok());
        values.len() == 1 && value.zip(bound).is_some_and(|(value, bound)| by(&value, &bound))
    };
    match requirement["operator"].as_str().unwrap_or_default() {
        "In" => value.is_some_and(named),
        "NotIn" => !value.is_some_and(named),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(i64::gt),
        "Lt" => compared(i64::lt),
        _ => false,
    }
}
