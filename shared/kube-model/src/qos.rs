//! The quality-of-service class of a pod (runtime-and-resources.md §8.2). Its cgroup is named by resource-manager (`layout`).

use std::collections::BTreeMap;
use std::fmt;

use crate::pod_ext::is_pod_level_resource;
use crate::quantity::Quantity;
use crate::types::{Pod, ResourceList, ResourceRequirements};

/// The QoS class of a pod (`status.qosClass`), ordered from the most to the least protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QosClass {
    /// Every container has CPU and memory limits, and the sums of the requests equal those of the limits.
    Guaranteed,
    /// Something is requested or limited.
    Burstable,
    /// Nothing is requested or limited.
    BestEffort,
}

impl QosClass {
    /// Reads the wire text.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "Guaranteed" => Some(Self::Guaranteed),
            "Burstable" => Some(Self::Burstable),
            "BestEffort" => Some(Self::BestEffort),
            _ => None,
        }
    }

    /// The wire text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BestEffort",
        }
    }
}

impl fmt::Display for QosClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The class of a pod: `status.qosClass`, else computed from the spec.
pub fn qos_class(pod: &Pod) -> QosClass {
    QosClass::parse(&pod.status.qos_class).unwrap_or_else(|| compute_qos(pod))
}

/// Computes the class from the spec, without the status.
///
/// Only CPU and memory of regular and init containers count, zero counts as unset, and pod-level resources replace those of
/// all containers.
///
/// Parity: like the kubelet this compares the sums of requests and limits over all containers.
pub fn compute_qos(pod: &Pod) -> QosClass {
    let mut requests = BTreeMap::new();
    let mut limits = BTreeMap::new();
    let mut limited_everywhere = true;
    let pod_level = pod.spec.resources.as_ref().filter(|resources| has_pod_level(resources));
    if let Some(resources) = pod_level {
        add_compute(&mut requests, &resources.requests);
        limited_everywhere = add_compute(&mut limits, &resources.limits) == 2;
    } else {
        for container in pod.spec.init_containers.iter().chain(&pod.spec.containers) {
            add_compute(&mut requests, &container.resources.requests);
            limited_everywhere &= add_compute(&mut limits, &container.resources.limits) == 2;
        }
    }
    if requests.is_empty() && limits.is_empty() {
        QosClass::BestEffort
    } else if limited_everywhere && requests == limits {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

fn has_pod_level(resources: &ResourceRequirements) -> bool {
    resources.requests.keys().chain(resources.limits.keys()).any(|name| is_pod_level_resource(name))
}

/// Adds CPU and memory above zero to `sums`, and returns how many of the two there were.
fn add_compute<'a>(sums: &mut BTreeMap<&'a str, Quantity>, list: &'a ResourceList) -> usize {
    let mut found = 0;
    for (name, amount) in list {
        if matches!(name.as_str(), "cpu" | "memory") && *amount > Quantity::ZERO {
            *sums.entry(name).or_default() += *amount;
            found += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn class(spec: Value) -> QosClass {
        compute_qos(&serde_json::from_value(json!({ "spec": spec })).unwrap())
    }

    fn both(cpu: &str, memory: &str) -> Value {
        let list = json!({"cpu": cpu, "memory": memory});
        json!({"resources": {"requests": list, "limits": list}})
    }

    #[test]
    fn every_class_is_read_back_and_no_other_word() {
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            assert_eq!(QosClass::parse(class.as_str()), Some(class));
        }
        assert_eq!(QosClass::parse("burstable"), None);
    }

    #[test]
    fn no_requests_and_limits_are_best_effort() {
        assert_eq!(class(json!({"containers": [{}]})), QosClass::BestEffort);
        let zero = json!({"resources": {"requests": {"cpu": "0"}}});
        assert_eq!(class(json!({"containers": [zero]})), QosClass::BestEffort);
        let storage = json!({"resources": {"requests": {"ephemeral-storage": "1Gi"}}});
        assert_eq!(class(json!({"containers": [storage]})), QosClass::BestEffort);
    }

    #[test]
    fn limits_equal_to_requests_everywhere_are_guaranteed() {
        assert_eq!(
            class(json!({"containers": [both("1", "1Gi"), both("100m", "1M")]})),
            QosClass::Guaranteed
        );
        let written_otherwise = json!({"resources": {
            "requests": {"cpu": "0.1", "memory": "1024Mi"}, "limits": {"cpu": "100m", "memory": "1Gi"},
        }});
        assert_eq!(class(json!({"containers": [written_otherwise]})), QosClass::Guaranteed);
    }

    #[test]
    fn one_container_without_limits_makes_the_pod_burstable() {
        assert_eq!(class(json!({"containers": [both("1", "1Gi"), {}]})), QosClass::Burstable);
        let init = json!({"containers": [both("1", "1Gi")], "initContainers": [{}]});
        assert_eq!(class(init), QosClass::Burstable);
        let memory_only = json!({"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}}});
        assert_eq!(class(json!({"containers": [memory_only]})), QosClass::Burstable);
    }

    #[test]
    fn ephemeral_containers_do_not_count() {
        let spec = json!({"containers": [both("1", "1Gi")], "ephemeralContainers": [{}]});
        assert_eq!(class(spec), QosClass::Guaranteed);
    }

    #[test]
    fn qos_of_pod_level_resources_replaces_that_of_containers() {
        let mut spec = both("1", "1Gi");
        spec["containers"] = json!([{}]);
        assert_eq!(class(spec), QosClass::Guaranteed);
        let half = json!({"resources": {"requests": {"cpu": "1"}}, "containers": [both("1", "1Gi")]});
        assert_eq!(class(half), QosClass::Burstable);
        for nothing in [json!({}), json!({"requests": {"ephemeral-storage": "1Gi", "example.com/gpu": "1"}})]
        {
            let spec = json!({"resources": nothing, "containers": [both("1", "1Gi")]});
            assert_eq!(class(spec), QosClass::Guaranteed, "{nothing}");
        }
    }

    #[test]
    fn qos_class_in_the_status_takes_precedence() {
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            let pod = json!({
                "spec": {"containers": [{}, {"resources": {"requests": {"cpu": "1"}}}]},
                "status": {"qosClass": class.as_str()},
            });
            assert_eq!(qos_class(&serde_json::from_value(pod).unwrap()), class);
        }
        for (class, word) in [
            (QosClass::Guaranteed, "Guaranteed"),
            (QosClass::Burstable, "Burstable"),
            (QosClass::BestEffort, "BestEffort"),
        ] {
            assert_eq!(class.to_string(), word);
        }
        assert_eq!(qos_class(&Pod::default()), QosClass::BestEffort);
    }
}
