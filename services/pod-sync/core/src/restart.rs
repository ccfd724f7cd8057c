//! Whether a terminated container may restart.

use keelson_kube_model::{Container, Pod, RestartPolicy};

pub use keelson_kube_model::pod_ext::ContainerKind;

use crate::observation::{ContainerRecordState, PodObservation};

/// Reason of a container that was removed because all containers of its pod restart.
pub const RESTARTING_REASON: &str = "RestartingAllContainers";

/// `container_type` of the kubelet's metrics.
pub fn metric_label(kind: ContainerKind) -> &'static str {
    match kind {
        ContainerKind::Init | ContainerKind::Sidecar => "init_container",
        ContainerKind::Regular => "container",
        ContainerKind::Ephemeral => "ephemeral_container",
    }
}

/// `fieldPath` of an event about a container.
pub fn field_path(kind: ContainerKind, name: &str) -> String {
    format!("spec.{}{{{name}}}", kind.spec_field())
}

/// The container's own policy, else the pod's.
pub fn effective_policy(pod: &Pod, container: &Container) -> RestartPolicy {
    own_policy(container).unwrap_or_else(|| pod.restart_policy())
}

fn own_policy(container: &Container) -> Option<RestartPolicy> {
    container.restart_policy.as_deref().filter(|text| !text.is_empty()).and_then(RestartPolicy::parse)
}

/// The action of the first rule of `restartPolicyRules` that matches the exit code. Rules apply only if the container has a
/// `restartPolicy` of its own.
pub fn matching_rule(container: &Container, exit_code: i32) -> Option<&str> {
    own_policy(container)?;
    container
        .restart_policy_rules
        .iter()
        .find(|rule| {
            rule.exit_codes.as_ref().is_some_and(|codes| {
                let listed = codes.values.contains(&exit_code);
                match codes.operator.as_str() {
                    "In" => listed,
                    "NotIn" => !listed,
                    _ => false,
                }
            })
        })
        .map(|rule| rule.action.as_str())
}

/// Whether this exit code allows a restart, by the container's rules, its policy and the pod's policy, in this order.
/// Deletion of the pod is not considered.
pub fn exit_allows_restart(pod: &Pod, container: &Container, exit_code: i32) -> bool {
    if matches!(matching_rule(container, exit_code), Some("Restart" | "RestartAllContainers")) {
        return true;
    }
    match effective_policy(pod, container) {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => exit_code != 0,
        RestartPolicy::Never => false,
    }
}

/// Whether this container should be started, given its newest record.
///
/// Parity: pod-lifecycle.md §9.6. What `RestartAllContainers` does to the others is in [`crate::actions`].
pub fn should_restart(pod: &Pod, container: &Container, observed: &PodObservation) -> bool {
    if pod.is_deleting() {
        return false;
    }
    let Some(record) = observed.current(&container.name) else { return true };
    match record.state {
        ContainerRecordState::Running => false,
        ContainerRecordState::Created | ContainerRecordState::Unknown => true,
        ContainerRecordState::Exited => exit_allows_restart(pod, container, record.exit_code),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{deleting, in_sandbox, pod};

    #[test]
    fn container_state_decides_a_restart_before_restart_policy() {
        let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
        let container = &pod.spec.containers[0];
        for (seen, restarts) in [
            (in_sandbox(), true),
            (in_sandbox().running("a"), false),
            (in_sandbox().unknown("a"), true),
            (in_sandbox().created("a"), true),
            (in_sandbox().exited("a", 1), false),
        ] {
            assert_eq!(should_restart(&pod, container, &seen.0), restarts, "{:?}", seen.0.containers);
            assert!(!should_restart(&deleting(pod.clone()), container, &seen.0));
        }
    }

    #[test]
    fn restart_rules_override_container_policy_and_that_pod_policy() {
        let rule = |operator: &str, values: &[i32]| json!({"action": "Restart", "exitCodes": {"operator": operator, "values": values}});
        for (own, rules, pods, code, restarts) in [
            (None, json!([]), "Always", 0, true),
            (None, json!([]), "OnFailure", 0, false),
            (None, json!([]), "OnFailure", 2, true),
            (None, json!([]), "Never", 2, false),
            (Some("Always"), json!([]), "Never", 0, true),
            (Some("OnFailure"), json!([]), "Never", 0, false),
            (Some("OnFailure"), json!([]), "Never", 2, true),
            (Some("Never"), json!([]), "Always", 2, false),
            (Some("Never"), json!([rule("In", &[2, 3])]), "Never", 2, true),
            (Some("Never"), json!([rule("In", &[2, 3])]), "Never", 4, false),
            (Some("Never"), json!([rule("NotIn", &[2, 3])]), "Never", 4, true),
            (Some("Never"), json!([rule("NotIn", &[2, 3])]), "Never", 2, false),
            (Some("Never"), json!([rule("Nonsense", &[2])]), "Never", 2, false),
            (None, json!([rule("In", &[2])]), "Never", 2, false),
        ] {
            let mut container = json!({"name": "a", "restartPolicyRules": rules});
            if let Some(own) = own {
                container["restartPolicy"] = json!(own);
            }
            let case = container.to_string();
            let pod = pod(json!({"restartPolicy": pods, "containers": [container]}));
            let got = exit_allows_restart(&pod, &pod.spec.containers[0], code);
            assert_eq!(got, restarts, "{case} in a pod with {pods} that ended with {code}");
        }
    }

    #[test]
    fn the_first_matching_restart_rule_wins() {
        let rule = |action: &str| json!({"action": action, "exitCodes": {"operator": "In", "values": [7]}});
        let pod = pod(json!({"containers": [{"name": "a", "restartPolicy": "Never",
            "restartPolicyRules": [rule("RestartAllContainers"), rule("Restart")]}]}));
        let container = &pod.spec.containers[0];
        assert_eq!(matching_rule(container, 7), Some("RestartAllContainers"));
        assert_eq!(matching_rule(container, 8), None);
        assert!(exit_allows_restart(&pod, container, 7));
    }

    #[test]
    fn container_kinds_have_metric_labels_and_field_paths() {
        assert_eq!(metric_label(ContainerKind::Sidecar), "init_container");
        assert_eq!(metric_label(ContainerKind::Regular), "container");
        assert_eq!(metric_label(ContainerKind::Ephemeral), "ephemeral_container");
        assert_eq!(field_path(ContainerKind::Init, "x"), "spec.initContainers{x}");
        assert_eq!(field_path(ContainerKind::Regular, "x"), "spec.containers{x}");
    }
}
