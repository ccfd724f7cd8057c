//! The resources that a pod was admitted with, or resized to (§15.4, §16). Decisions, cgroups and accounting use these, not those that
//! its source asks for.

use std::collections::BTreeMap;

use keelson_kube_model::{Container, Pod, ResourceRequirements};
use serde::{Deserialize, Serialize};

/// The resources of a pod by container, and those of the pod as a whole. Containers without any are left out.
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

    /// The resources of a container.
    pub fn of_container(&self, name: &str) -> ResourceRequirements {
        self.containers.get(name).cloned().unwrap_or_default()
    }

    /// Sets the resources of one container.
    pub fn set_container(&mut self, name: &str, resources: ResourceRequirements) {
        if resources == ResourceRequirements::default() {
            self.containers.remove(name);
        } else {
            self.containers.insert(name.to_owned(), resources);
        }
    }

    /// The resources of the pod as a whole.
    pub fn of_pod(&self) -> Option<&ResourceRequirements> {
        self.pod.as_ref()
    }

    /// Replaces the resources in the pod's spec with these. True if they differed.
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
