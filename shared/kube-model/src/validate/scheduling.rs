//! Where a pod may run, and how important it is.

use super::{Findings, names};
use crate::types::{PodSpec, Toleration};

pub(super) fn check_scheduling(found: &mut Findings, spec: &PodSpec) {
    for (key, value) in &spec.node_selector {
        found.name("spec.nodeSelector", key, names::qualified_name);
        found.name("spec.nodeSelector", value, names::label_value);
    }
    for (index, toleration) in spec.tolerations.iter().enumerate() {
        check_toleration(found, &format!("spec.tolerations[{index}]"), toleration);
    }
    let runtime_class = spec.runtime_class_name.as_deref().unwrap_or_default();
    for (field, name) in
        [("spec.runtimeClassName", runtime_class), ("spec.priorityClassName", &spec.priority_class_name)]
    {
        if !name.is_empty() {
            found.name(field, name, names::dns_subdomain);
        }
    }
    if let Some(policy) = spec.preemption_policy.as_deref() {
        const POLICIES: [&str; 2] = ["Never", "PreemptLowerPriority"];
        if !POLICIES.contains(&policy) {
            found.unsupported("spec.preemptionPolicy", policy, &POLICIES);
        }
    }
}

fn check_toleration(found: &mut Findings, field: &str, toleration: &Toleration) {
    let at = |name: &str| format!("{field}.{name}");
    if !toleration.key.is_empty() {
        found.name(at("key"), &toleration.key, names::qualified_name);
    } else if toleration.operator != "Exists" {
        let detail =
            "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
        found.invalid(at("operator"), &toleration.operator, detail);
    }
    if toleration.toleration_seconds.is_some() && toleration.effect != "NoExecute" {
        let detail = "effect must be 'NoExecute' when `tolerationSeconds` is set";
        found.invalid(at("effect"), &toleration.effect, detail);
    }
    match toleration.operator.as_str() {
        "" | "Equal" => found.name(at("value"), &toleration.value, names::label_value),
        "Exists" if toleration.value.is_empty() => {}
        "Exists" => {
            let detail = "value must be empty when `operator` is 'Exists'";
            found.invalid(at("operator"), &toleration.value, detail);
        }
        other => found.unsupported(at("operator"), other, &["Equal", "Exists"]),
    }
    found.one_of(&at("effect"), &toleration.effect, &["NoSchedule", "PreferNoSchedule", "NoExecute"]);
}
