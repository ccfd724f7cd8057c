//! What resource-manager gets to know of a pod in order to rank it for eviction.

use std::collections::HashMap;

use keelson_kube_model::annotations::CONFIG_SEEN;
use keelson_kube_model::time::parse_nanos;
use keelson_kube_model::{ContainerKind, Pod, ResourceList};
use keelson_proto::keelson::resource_manager::v1 as resource;

/// The taint of a node under memory pressure.
const MEMORY_PRESSURE: &str = "node.kubernetes.io/memory-pressure";

/// Whether a BestEffort pod may start on a node under memory pressure.
pub fn tolerates_memory_pressure(pod: &Pod) -> bool {
    pod.spec.tolerations.iter().any(|toleration| {
        let exists = toleration.operator == "Exists";
        let key = toleration.key == MEMORY_PRESSURE || (toleration.key.is_empty() && exists);
        // The taint has no value.
        let value = exists || toleration.value.is_empty();
        key && value && matches!(toleration.effect.as_str(), "" | "NoSchedule")
    })
}

/// When the pod was created, else when its source has first sent it; 0 if neither is known.
pub fn created_unix_nanos(pod: &Pod) -> i64 {
    let created = pod.metadata.creation_timestamp.as_deref();
    created.or_else(|| pod.annotation(CONFIG_SEEN)).and_then(nanos).unwrap_or(0)
}

/// When its source has first sent the pod, if that is known.
pub fn seen_unix_nanos(pod: &Pod) -> Option<i64> {
    pod.annotation(CONFIG_SEEN).and_then(nanos)
}

fn nanos(text: &str) -> Option<i64> {
    parse_nanos(text).ok().and_then(|nanos| i64::try_from(nanos).ok())
}

/// Requests and limits of the containers, without ephemeral containers, which have none.
pub fn containers(pod: &Pod) -> Vec<resource::ContainerShare> {
    let counts = |kind: ContainerKind| kind != ContainerKind::Ephemeral;
    pod.containers()
        .filter(|(kind, _)| counts(*kind))
        .map(|(kind, container)| resource::ContainerShare {
            name: container.name.clone(),
            init: kind == ContainerKind::Init,
            sidecar: kind == ContainerKind::Sidecar,
            requests: texts(&container.resources.requests),
            limits: texts(&container.resources.limits),
        })
        .collect()
}

/// The pod's emptyDir volumes.
pub fn empty_dirs(pod: &Pod) -> Vec<resource::EmptyDirShare> {
    let empty = pod.spec.volumes.iter().filter_map(|volume| Some((volume, volume.empty_dir.as_ref()?)));
    empty
        .map(|(volume, empty)| resource::EmptyDirShare {
            name: volume.name.clone(),
            medium: empty.medium.clone(),
            size_limit: empty.size_limit.as_ref().map(ToString::to_string).unwrap_or_default(),
        })
        .collect()
}

/// A resource list with amounts as Kubernetes writes them.
pub fn texts(list: &ResourceList) -> HashMap<String, String> {
    list.iter().map(|(name, amount)| (name.clone(), amount.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    #[test]
    fn memory_pressure_is_tolerated_without_a_value_or_by_a_toleration_of_everything() {
        for (toleration, tolerates) in [
            (json!({"key": MEMORY_PRESSURE, "operator": "Exists"}), true),
            (json!({"key": MEMORY_PRESSURE, "effect": "NoSchedule"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": MEMORY_PRESSURE, "operator": "Exists", "effect": "NoExecute"}), false),
            (json!({"key": MEMORY_PRESSURE, "value": "x"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (json!({"key": ""}), false),
        ] {
            let pod = pod(json!({"tolerations": [toleration]}));
            assert_eq!(tolerates_memory_pressure(&pod), tolerates, "{toleration}");
        }
    }

    #[test]
    fn eviction_inputs_are_canonical_quantities_without_ephemeral_containers() {
        let pod = pod(json!({
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [{"name": "m", "resources": {"limits": {"ephemeral-storage": "1024Mi"}}}],
            "ephemeralContainers": [{"name": "e"}],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "10Mi"}}, {"name": "h", "hostPath": {"path": "/"}}],
        }));
        let shares = containers(&pod);
        let names: Vec<_> = shares.iter().map(|c| (c.name.as_str(), c.init, c.sidecar)).collect();
        assert_eq!(names, [("i", true, false), ("s", false, true), ("m", false, false)]);
        assert_eq!(shares[2].limits["ephemeral-storage"], "1Gi");
        let volumes = empty_dirs(&pod);
        assert_eq!((volumes.len(), volumes[0].size_limit.as_str()), (1, "10Mi"));
    }
}
