//! What events and metrics say about a resize (§18, §19).

use keelson_kube_model::{Container, Pod, ResourceList, ResourceRequirements};
use serde::Serialize;

use super::{RESIZABLE, containers};

#[derive(Serialize)]
struct NamedResources<'a> {
    name: &'a str,
    resources: &'a ResourceRequirements,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    resources: Option<&'a ResourceRequirements>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_containers: Vec<NamedResources<'a>>,
    containers: Vec<NamedResources<'a>>,
    generation: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    error: &'a str,
}

/// The JSON in the events of a resize: the resources of the containers, the generation, and the error if there is one.
pub fn summary(pod: &Pod, generation: Option<i64>, error: &str) -> String {
    fn named(list: &[Container]) -> Vec<NamedResources<'_>> {
        list.iter().map(|c| NamedResources { name: &c.name, resources: &c.resources }).collect()
    }
    let summary = Summary {
        resources: pod.spec.resources.as_ref(),
        init_containers: named(&pod.spec.init_containers),
        containers: named(&pod.spec.containers),
        generation: generation.unwrap_or(0),
        error,
    };
    serde_json::to_string(&summary).unwrap_or_default()
}

/// One change that a source has asked for, as `container_requested_resizes_total` counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedChange {
    /// `cpu` or `memory`.
    pub resource: &'static str,
    /// `requests` or `limits`.
    pub requirement: &'static str,
    /// `add`, `remove`, `increase` or `decrease`.
    pub operation: &'static str,
}

/// The changes of CPU and memory between two versions of a pod, container by container.
pub fn requested_changes(before: &Pod, after: &Pod) -> Vec<RequestedChange> {
    let mut changes = Vec::new();
    for new in containers(after) {
        let Some(old) = containers(before).find(|old| old.name == new.name) else { continue };
        let parts = [
            ("requests", &old.resources.requests, &new.resources.requests),
            ("limits", &old.resources.limits, &new.resources.limits),
        ];
        for (requirement, old, new) in parts {
            for resource in RESIZABLE {
                let operation = operation(old, new, resource);
                changes.extend(operation.map(|operation| RequestedChange {
                    resource,
                    requirement,
                    operation,
                }));
            }
        }
    }
    changes
}

fn operation(before: &ResourceList, after: &ResourceList, resource: &str) -> Option<&'static str> {
    match (before.get(resource), after.get(resource)) {
        (None, None) => None,
        (None, Some(_)) => Some("add"),
        (Some(_), None) => Some("remove"),
        (Some(old), Some(new)) if new > old => Some("increase"),
        (Some(old), Some(new)) if new < old => Some("decrease"),
        (Some(_), Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(resources: Value) -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [{"name": "a", "resources": resources}]}}))
            .unwrap()
    }

    #[test]
    fn the_summary_has_containers_generation_and_error() {
        let resized = pod(json!({"limits": {"cpu": "1"}, "requests": {"cpu": "500m"}}));
        assert_eq!(
            summary(&resized, Some(4), ""),
            r#"{"containers":[{"name":"a","resources":{"limits":{"cpu":"1"},"requests":{"cpu":"500m"}}}],"generation":4}"#
        );
        assert!(summary(&resized, None, "no room").ends_with(r#""generation":0,"error":"no room"}"#));
    }

    #[test]
    fn each_change_of_cpu_and_memory_is_counted_with_its_direction() {
        let before = pod(json!({"limits": {"cpu": "1"}, "requests": {"cpu": "500m", "memory": "1Mi"}}));
        let after = pod(json!({"limits": {"memory": "1Mi"}, "requests": {"cpu": "400m", "memory": "2Mi"}}));
        let texts: Vec<String> = requested_changes(&before, &after)
            .iter()
            .map(|change| format!("{} {} {}", change.resource, change.requirement, change.operation))
            .collect();
        assert_eq!(
            texts,
            ["cpu requests decrease", "memory requests increase", "cpu limits remove", "memory limits add"]
        );
        assert!(requested_changes(&before, &before).is_empty());
    }
}
