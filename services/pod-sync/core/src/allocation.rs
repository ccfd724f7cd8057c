//! The resources that a pod was admitted with (§15.4). In-place resize is not supported yet (§16): a change of resources is
//! refused, and decisions and status continue to use the admitted resources.

use std::collections::BTreeMap;

use keelson_kube_model::{Container, Pod, ResourceRequirements};
use serde::{Deserialize, Serialize};

/// Why a resize is refused: message of the condition `PodResizePending` and of the event.
pub const RESIZE_UNSUPPORTED: &str = "In-place resize is not supported by this node; the containers keep the resources that they were started with";

/// The resources of a pod when it was admitted. Containers without any are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, ResourceRequirements>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<ResourceRequirements>,
}

impl Allocation {
    /// The resources in the pod's spec.
    pub fn of(pod: &Pod) -> Self {
        let some = |container: &&Container| container.resources != ResourceRequirements::default();
        let one = |container: &Container| (container.name.clone(), container.resources.clone());
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        Self { containers: containers.filter(some).map(one).collect(), pod: pod.spec.resources.clone() }
    }

    /// Replaces the resources in the pod's spec with the admitted ones. True if they differed.
    pub fn apply(&self, pod: &mut Pod) -> bool {
        if Self::of(pod) == *self {
            return false;
        }
        for container in pod.spec.init_containers.iter_mut().chain(&mut pod.spec.containers) {
            container.resources = self.containers.get(&container.name).cloned().unwrap_or_default();
        }
        pod.spec.resources.clone_from(&self.pod);
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(cpu: &str, pod_level: Value) -> Pod {
        let resources = json!({"requests": {"cpu": cpu}, "limits": {"memory": "64Mi"}});
        let containers = json!([{"name": "a", "resources": resources}, {"name": "b"}]);
        serde_json::from_value(json!({"spec": {"containers": containers, "resources": pod_level}})).unwrap()
    }

    #[test]
    fn admitted_resources_replace_later_changes() {
        let admitted = pod("1", Value::Null);
        let allocation = Allocation::of(&admitted);
        for mut changed in [pod("2", Value::Null), pod("1", json!({"limits": {"cpu": "3"}}))] {
            assert!(allocation.apply(&mut changed));
            assert_eq!(changed, admitted);
        }
        let mut added = admitted.clone();
        added.spec.containers[1].resources.requests.insert("cpu".to_owned(), "1".parse().unwrap());
        assert!(allocation.apply(&mut added));
        assert_eq!(added, admitted);
    }

    #[test]
    fn equal_quantities_are_no_resize_and_other_fields_are_updated() {
        let allocation = Allocation::of(&pod("1", Value::Null));
        let mut same = pod("1000m", Value::Null);
        same.spec.active_deadline_seconds = Some(5);
        let before = same.clone();
        assert!(!allocation.apply(&mut same));
        assert_eq!(same, before);
    }

    #[test]
    fn an_allocation_survives_serialization() {
        for pod in [pod("1", json!({"limits": {"cpu": "3"}})), Pod::default()] {
            let allocation = Allocation::of(&pod);
            let text = serde_json::to_string(&allocation).unwrap();
            assert_eq!(serde_json::from_str::<Allocation>(&text).unwrap(), allocation, "{text}");
        }
    }
}
