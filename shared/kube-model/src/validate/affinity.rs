//! Affinity and topology spread constraints. Most of them are for the scheduler; the required node affinity is checked at
//! admission.

use serde_json::Value;

use super::{Findings, names};
use crate::types::PodSpec;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
/// How a requirement compares: of labels of objects.
const OF_LABELS: [&str; 4] = ["DoesNotExist", "Exists", "In", "NotIn"];
/// How a requirement compares: of a Node.
const OF_NODES: [&str; 6] = ["DoesNotExist", "Exists", "Gt", "In", "Lt", "NotIn"];

pub(super) fn check_affinity(found: &mut Findings, spec: &PodSpec) {
    if let Some(affinity) = &spec.affinity {
        let node = &affinity["nodeAffinity"];
        check_node_affinity(found, "spec.affinity.nodeAffinity", node);
        for kind in ["podAffinity", "podAntiAffinity"] {
            check_pod_affinity(found, &format!("spec.affinity.{kind}"), &affinity[kind]);
        }
    }
    if let Some(constraints) = &spec.topology_spread_constraints {
        check_spread(found, constraints);
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn check_node_affinity(found: &mut Findings, field: &str, affinity: &Value) {
    let required = &affinity[REQUIRED];
    if !required.is_null() {
        let field = format!("{field}.{REQUIRED}.nodeSelectorTerms");
        let terms = list(&required["nodeSelectorTerms"]);
        if terms.is_empty() {
            found.required(&field, "must have at least one node selector term");
        }
        for (index, term) in terms.iter().enumerate() {
            check_node_term(found, &format!("{field}[{index}]"), term);
        }
    }
    for (index, entry) in list(&affinity[PREFERRED]).iter().enumerate() {
        let field = format!("{field}.{PREFERRED}[{index}]");
        check_weight(found, &field, entry);
        check_node_term(found, &format!("{field}.preference"), &entry["preference"]);
    }
}

fn check_weight(found: &mut Findings, field: &str, entry: &Value) {
    let weight = entry["weight"].as_i64().unwrap_or_default();
    if !(1..=100).contains(&weight) {
        found.invalid(format!("{field}.weight"), weight, "must be in the range 1-100");
    }
}

fn check_node_term(found: &mut Findings, field: &str, term: &Value) {
    for (index, requirement) in list(&term["matchExpressions"]).iter().enumerate() {
        let field = format!("{field}.matchExpressions[{index}]");
        found.name(format!("{field}.key"), text(&requirement["key"]), names::qualified_name);
        check_operator(found, &field, requirement, &OF_NODES);
    }
    for (index, requirement) in list(&term["matchFields"]).iter().enumerate() {
        let field = format!("{field}.matchFields[{index}]");
        let key = text(&requirement["key"]);
        if key != "metadata.name" {
            found.invalid(format!("{field}.key"), key, "not a valid field selector key");
        }
        match text(&requirement["operator"]) {
            "In" | "NotIn" if list(&requirement["values"]).len() == 1 => {}
            "In" | "NotIn" => {
                let detail =
                    "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
                found.required(format!("{field}.values"), detail);
            }
            other => {
                found.invalid(format!("{field}.operator"), other, "not a valid selector operator");
            }
        }
    }
}

fn check_operator(found: &mut Findings, field: &str, requirement: &Value, known: &[&str]) {
    let values = list(&requirement["values"]);
    let at = format!("{field}.values");
    match text(&requirement["operator"]) {
        operator if !known.contains(&operator) => {
            found.invalid(format!("{field}.operator"), operator, "not a valid selector operator");
        }
        "In" | "NotIn" if values.is_empty() => {
            found.required(at, "must be specified when `operator` is 'In' or 'NotIn'");
        }
        "Exists" | "DoesNotExist" if !values.is_empty() => {
            found.forbidden(at, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
        }
        "Gt" | "Lt" if values.len() != 1 => {
            found.required(at, "must be specified single value when `operator` is 'Lt' or 'Gt'");
        }
        _ => {}
    }
}

fn check_selector(found: &mut Findings, field: &str, selector: &Value) {
    for (key, value) in selector["matchLabels"].as_object().into_iter().flatten() {
        let field = format!("{field}.matchLabels");
        found.name(&field, key, names::qualified_name);
        found.name(field, text(value), names::label_value);
    }
    for (index, requirement) in list(&selector["matchExpressions"]).iter().enumerate() {
        let field = format!("{field}.matchExpressions[{index}]");
        found.name(format!("{field}.key"), text(&requirement["key"]), names::qualified_name);
        check_operator(found, &field, requirement, &OF_LABELS);
    }
}

fn check_pod_affinity(found: &mut Findings, field: &str, affinity: &Value) {
    for (index, term) in list(&affinity[REQUIRED]).iter().enumerate() {
        check_pod_term(found, &format!("{field}.{REQUIRED}[{index}]"), term);
    }
    for (index, entry) in list(&affinity[PREFERRED]).iter().enumerate() {
        let field = format!("{field}.{PREFERRED}[{index}]");
        check_weight(found, &field, entry);
        check_pod_term(found, &format!("{field}.podAffinityTerm"), &entry["podAffinityTerm"]);
    }
}

fn check_pod_term(found: &mut Findings, field: &str, term: &Value) {
    check_selector(found, &format!("{field}.labelSelector"), &term["labelSelector"]);
    check_selector(found, &format!("{field}.namespaceSelector"), &term["namespaceSelector"]);
    for (index, namespace) in list(&term["namespaces"]).iter().enumerate() {
        found.name(format!("{field}.namespaces[{index}]"), text(namespace), names::dns_label);
    }
    let at = format!("{field}.topologyKey");
    match text(&term["topologyKey"]) {
        "" => found.required(at, "can not be empty"),
        key => found.name(at, key, names::qualified_name),
    }
}

fn check_spread(found: &mut Findings, constraints: &Value) {
    const POLICIES: [&str; 2] = ["Honor", "Ignore"];
    const ACTIONS: [&str; 2] = ["DoNotSchedule", "ScheduleAnyway"];
    let positive = "must be greater than zero";
    let mut seen = Vec::new();
    for (index, constraint) in list(constraints).iter().enumerate() {
        let field = format!("spec.topologySpreadConstraints[{index}]");
        let skew = constraint["maxSkew"].as_i64().unwrap_or_default();
        if skew <= 0 {
            found.invalid(format!("{field}.maxSkew"), skew, positive);
        }
        let key = text(&constraint["topologyKey"]);
        match key {
            "" => found.required(format!("{field}.topologyKey"), "can not be empty"),
            key => found.name(format!("{field}.topologyKey"), key, names::qualified_name),
        }
        let action = text(&constraint["whenUnsatisfiable"]);
        if !ACTIONS.contains(&action) {
            found.unsupported(format!("{field}.whenUnsatisfiable"), action, &ACTIONS);
        }
        if seen.contains(&(key, action)) {
            found.duplicate(
                format!("{field}.{{topologyKey, whenUnsatisfiable}}"),
                format!("{{{key}, {action}}}"),
            );
        }
        seen.push((key, action));
        if let Some(least) = constraint["minDomains"].as_i64() {
            if least <= 0 {
                found.invalid(format!("{field}.minDomains"), least, positive);
            } else if action != "DoNotSchedule" {
                let detail = "can only use minDomains if whenUnsatisfiable=DoNotSchedule";
                found.invalid(format!("{field}.minDomains"), least, detail);
            }
        }
        for name in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            if let Some(policy) = constraint[name].as_str().filter(|policy| !POLICIES.contains(policy)) {
                found.unsupported(format!("{field}.{name}"), policy, &POLICIES);
            }
        }
        check_selector(found, &format!("{field}.labelSelector"), &constraint["labelSelector"]);
    }
}
