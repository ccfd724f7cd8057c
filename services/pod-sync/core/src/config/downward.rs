//! The values of downwardAPI volumes (volumes.md §9.5).

use keelson_kube_model::{DownwardApiVolumeFile, Pod, ResourceList};

use super::fields::{FieldInputs, field_value, resource_value};
use super::inputs::NodeInputs;

/// The value of one file of a downwardAPI volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DownwardValue {
    /// The text of the field.
    Value(String),
    /// The spec refers to a field that volumes do not support; why.
    Invalid(String),
    /// The amount depends on the node's allocatable resources, which are not known yet.
    NeedsAllocatable,
}

/// The content of a file of a downwardAPI volume. `allocatable` are the node's allocatable resources, empty while they are
/// not known.
///
/// Parity: a kubelet has the same fields, and rounds up in the same way (volumes.md §9.5).
pub fn downward_value(pod: &Pod, file: &DownwardApiVolumeFile, allocatable: &ResourceList) -> DownwardValue {
    let node = NodeInputs { name: "", ips: &[], allocatable };
    let inputs = FieldInputs { pod_ips: &[], node };
    if let Some(field) = &file.field_ref {
        let path = field.field_path.as_str();
        // A volume does not support the other fields of environment variables.
        let value = field_value(pod, path, &inputs).filter(|_| path.starts_with("metadata."));
        return value.map_or_else(
            || DownwardValue::Invalid(format!("fieldPath {path:?} is not supported in a volume")),
            DownwardValue::Value,
        );
    }
    let Some(selector) = &file.resource_field_ref else {
        return DownwardValue::Invalid("neither fieldRef nor resourceFieldRef is given".into());
    };
    let Some((_, container)) = pod.container(&selector.container_name) else {
        return DownwardValue::Invalid(format!(
            "resourceFieldRef: containerName {:?} is no container of the pod",
            selector.container_name
        ));
    };
    if allocatable.is_empty() && selector.resource.starts_with("limits.") {
        return DownwardValue::NeedsAllocatable;
    }
    match resource_value(pod, container, &file.path, selector, &inputs) {
        Ok(value) => DownwardValue::Value(value),
        Err(error) => DownwardValue::Invalid(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn value(file: serde_json::Value, allocatable: serde_json::Value) -> DownwardValue {
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

    fn field(path: &str) -> DownwardValue {
        value(json!({"path": "p", "fieldRef": {"fieldPath": path}}), json!({}))
    }

    #[test]
    fn downward_api_volumes_support_metadata_fields_only() {
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
            assert_eq!(field(path), DownwardValue::Value(text.into()), "{path}");
        }
        for path in ["spec.nodeName", "status.podIP", "metadata.owner", ""] {
            assert!(matches!(field(path), DownwardValue::Invalid(why) if why.contains(path)), "{path}");
        }
    }

    #[test]
    fn downward_api_limits_wait_for_allocatable_when_they_depend_on_it() {
        let amount = |resource: &str, container: &str, allocatable: serde_json::Value| {
            let selector = json!({"containerName": container, "resource": resource, "divisor": "1m"});
            value(json!({"path": "p", "resourceFieldRef": selector}), allocatable)
        };
        assert_eq!(amount("requests.cpu", "c", json!({})), DownwardValue::Value("250".into()));
        assert_eq!(amount("limits.cpu", "c", json!({})), DownwardValue::NeedsAllocatable);
        assert_eq!(amount("limits.cpu", "c", json!({"cpu": "2"})), DownwardValue::Value("2000".into()));
        for (resource, container) in [("requests.cpu", "d"), ("requests.cpu", ""), ("requests.gpu", "c")] {
            let wrong = amount(resource, container, json!({}));
            assert!(matches!(wrong, DownwardValue::Invalid(_)), "{resource} of {container}: {wrong:?}");
        }
        assert!(matches!(value(json!({"path": "p"}), json!({})), DownwardValue::Invalid(_)));
    }
}
