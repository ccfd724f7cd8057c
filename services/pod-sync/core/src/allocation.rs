//! What a pod was admitted with (§15.4). In-place resize is not there yet (§16): a change of resources is refused, and everything
//! that is decided and shown goes on from what the pod was admitted with.

use std::collections::BTreeMap;

use keelson_kube_model::{Container, Pod, ResourceRequirements};
use serde::{Deserialize, Serialize};

/// Why a change of a pod's resources is not made: message of `PodResizePending` and of the event.
pub const NO_RESIZE: &str = "In-place resize is not supported by this node; the containers keep the resources that they were started with";

/// The resources of a pod when it was admitted. Those of containers that have none are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    containers: BTreeMap<String, ResourceRequirements>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pod: Option<ResourceRequirements>,
}

impl Allocation {
    /// What the pod asks for now.
    pub fn of(pod: &Pod) -> Self {
        let some = |container: &&Container| container.resources != ResourceRequirements::default();
        let one = |container: &Container| (container.name.clone(), container.resources.clone());
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        Self { containers: containers.filter(some).map(one).collect(), pod: pod.spec.resources.clone() }
    }

    /// Puts what was admitted in the place of what the pod asks for now. Whether that is something else.
    pub fn hold(&self, pod: &mut Pod) -> bool {
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
    fn what_was_admitted_stays_in_place_of_what_is_asked_for_later() {
        let admitted = pod("1", Value::Null);
        let allocation = Allocation::of(&admitted);
        for mut changed in [pod("2", Value::Null), pod("1", json!({"limits": {"cpu": "3"}}))] {
            assert!(allocation.hold(&mut changed));
            assert_eq!(changed, admitted);
        }
        let mut added = admitted.clone();
        added.spec.containers[1].resources.requests.insert("cpu".to_owned(), "1".parse().unwrap());
        assert!(allocation.hold(&mut added));
        assert_eq!(added, admitted);
    }

    #[test]
    fn other_amounts_in_other_words_are_no_change_and_all_else_is_taken() {
        let allocation = Allocation::of(&pod("1", Value::Null));
        let mut same = pod("1000m", Value::Null);
        same.spec.active_deadline_seconds = Some(5);
        let before = same.clone();
        assert!(!allocation.hold(&mut same));
        assert_eq!(same, before);
    }

    #[test]
    fn it_is_stored_and_read_back() {
        for pod in [pod("1", json!({"limits": {"cpu": "3"}})), Pod::default()] {
            let allocation = Allocation::of(&pod);
            let text = serde_json::to_string(&allocation).unwrap();
            assert_eq!(serde_json::from_str::<Allocation>(&text).unwrap(), allocation, "{text}");
        }
    }
}
