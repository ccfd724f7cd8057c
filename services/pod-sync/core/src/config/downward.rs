//! The values of downwardAPI volumes (volumes.md §9.5).

use keelson_kube_model::{DownwardApiVolumeFile, Pod, ResourceList};

use super::fields::{FieldInputs, field_value, resource_value};

/// The value of one file of a downwardAPI volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Downward {
    /// The text of the field.
    Value(String),
    /// The spec names no field that a volume can have; why.
    Wrong(String),
    /// The amount depends on what pods may use of the machine, which is not known yet.
    NeedsAllocatable,
}

/// What a file of a downwardAPI volume says of its pod. `allocatable` is what pods may use of this node, empty
/// while nobody has said it.
///
/// Parity: a kubelet has the same fields, and rounds up in the same way (volumes.md §9.5).
pub fn downward_value(pod: &Pod, file: &DownwardApiVolumeFile, allocatable: &ResourceList) -> Downward {
    let inputs = FieldInputs { pod_ips: &[], node_ips: &[], node_name: "", allocatable };
    if let Some(field) = &file.field_ref {
        let path = field.field_path.as_str();
        // The other fields of environment variables are not known to a volume.
        let value = field_value(pod, path, &inputs).filter(|_| path.starts_with("metadata."));
        return value.map_or_else(
            || Downward::Wrong(format!("fieldPath {path:?} is no field that a volume can have")),
            Downward::Value,
        );
    }
    let Some(selector) = &file.resource_field_ref else {
        return Downward::Wrong("neither fieldRef nor resourceFieldRef is given".into());
    };
    let Some((_, container)) = pod.container(&selector.container_name) else {
        return Downward::Wrong(format!(
            "resourceFieldRef: containerName {:?} is no container of the pod",
            selector.container_name
        ));
    };
    if allocatable.is_empty() && selector.resource.starts_with("limits.") {
        return Downward::NeedsAllocatable;
    }
    match resource_value(pod, container, &file.path, selector, &inputs) {
        Ok(value) => Downward::Value(value),
        Err(error) => Downward::Wrong(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn value(file: serde_json::Value, allocatable: serde_json::Value) -> Downward {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"b": "2", "a": "1"},
                "annotations": {"x.io/y": "z"}},
            "spec": {"nodeName": "n", "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "250m"}, "limits": {"memory": "128Mi"}}},
            ]}
        }));
        let file = serde_json::from_value(file).unwrap();
        downward_value(&pod.unwrap(), &file, &serde_json::from_value(allocatable).unwrap())
    }

    fn field(path: &str) -> Downward {
        value(json!({"path": "p", "fieldRef": {"fieldPath": path}}), json!({}))
    }

    #[test]
    fn a_volume_shows_the_metadata_of_its_pod_and_nothing_else() {
        for (path, text) in [
            ("metadata.name", "web"),
            ("metadata.namespace", "shop"),
            ("metadata.uid", "u1"),
            ("metadata.labels", "a=\"1\"\nb=\"2\""),
            ("metadata.labels['b']", "2"),
            ("metadata.labels['none']", ""),
            ("metadata.annotations", "x.io/y=\"z\""),
            ("metadata.annotations['x.io/y']", "z"),
        ] {
            assert_eq!(field(path), Downward::Value(text.into()), "{path}");
        }
        for path in ["spec.nodeName", "status.podIP", "metadata.owner", ""] {
            assert!(matches!(field(path), Downward::Wrong(why) if why.contains(path)), "{path}");
        }
    }

    #[test]
    fn amounts_are_those_of_the_named_container_and_wait_for_the_machine_when_they_depend_on_it() {
        let amount = |resource: &str, container: &str, allocatable: serde_json::Value| {
            let selector = json!({"containerName": container, "resource": resource, "divisor": "1m"});
            value(json!({"path": "p", "resourceFieldRef": selector}), allocatable)
        };
        assert_eq!(amount("requests.cpu", "c", json!({})), Downward::Value("250".into()));
        assert_eq!(amount("limits.cpu", "c", json!({})), Downward::NeedsAllocatable);
        assert_eq!(amount("limits.cpu", "c", json!({"cpu": "2"})), Downward::Value("2000".into()));
        for (resource, container) in [("requests.cpu", "d"), ("requests.cpu", ""), ("requests.gpu", "c")] {
            let wrong = amount(resource, container, json!({}));
            assert!(matches!(wrong, Downward::Wrong(_)), "{resource} of {container}: {wrong:?}");
        }
        assert!(matches!(value(json!({"path": "p"}), json!({})), Downward::Wrong(_)));
    }
}
