//! Pods from an API server (pod-lifecycle.md §2.4).
//!
//! Parity: a kubelet logs and drops a pod that it cannot decode. Here the previous version stays in effect, and the error is
//! reported as for a manifest: in `ListSources` and as an event of the pod.

use keelson_kube_model::{Pod, PodFullName, default_pod};
use serde_json::{Value, json};

use crate::desired_pod::DesiredPod;
use crate::error::{ManifestError, ManifestErrorKind};

/// Reads a Pod of the API. The server has validated it; an older server leaves out newer defaults.
///
/// # Errors
/// The pod cannot be run: it has no name or UID, or a field has the wrong type.
pub fn api_pod(mut object: Value) -> Result<DesiredPod, ManifestError> {
    let text =
        |object: &Value, field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    let (name, namespace, uid) = (text(&object, "name"), text(&object, "namespace"), text(&object, "uid"));
    let fail = |field: &str, message: String| ManifestError {
        field: field.to_owned(),
        pod: Some(PodFullName::new(&name, &namespace)),
        ..ManifestError::file(ManifestErrorKind::Invalid, message)
    };
    for (field, value) in
        [("metadata.name", &name), ("metadata.namespace", &namespace), ("metadata.uid", &uid)]
    {
        if value.is_empty() {
            return Err(fail(field, "Required value: the API server has sent a pod without it".to_owned()));
        }
    }
    let Some(map) = object.as_object_mut() else { return Err(fail("", "not an object".to_owned())) };
    // Items of a list lack apiVersion and kind.
    map.insert("apiVersion".to_owned(), json!("v1"));
    map.insert("kind".to_owned(), json!("Pod"));
    if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
        // As large as the pod itself, and of no use to a node.
        metadata.remove("managedFields");
    }
    default_pod(&mut object);
    let pod: Pod = serde_path_to_error::deserialize(&object).map_err(|error| {
        let field = error.path().to_string();
        let field = if field == "." { "" } else { &field };
        fail(field, format!("Invalid type: {}", error.inner()))
    })?;
    Ok(DesiredPod::new(&object, &pod, &format!("{namespace}/{name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object() -> Value {
        json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u-1", "resourceVersion": "7",
                "managedFields": [{"manager": "kubectl"}]},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i", "futureField": {"a": 1}}]},
            "status": {"phase": "Pending"},
        })
    }

    #[test]
    fn an_api_pod_keeps_its_name_uid_and_unknown_fields() {
        let pod = api_pod(object()).unwrap();
        assert_eq!((pod.uid.as_str(), pod.namespace.as_str(), pod.name.as_str()), ("u-1", "default", "web"));
        let value: Value = serde_json::from_slice(&pod.json).unwrap();
        assert_eq!((&value["kind"], &value["apiVersion"]), (&json!("Pod"), &json!("v1")));
        assert_eq!(value["spec"]["containers"][0]["futureField"], json!({"a": 1}));
        assert_eq!(value["spec"]["restartPolicy"], "Always", "an older server may leave defaults out");
        assert_eq!(value["metadata"].get("managedFields"), None);
        assert_eq!(value["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn managed_fields_and_resource_version_do_not_change_an_api_pod() {
        let before = api_pod(object()).unwrap().fingerprint;
        let mut other = object();
        other["metadata"]["resourceVersion"] = "8".into();
        other["metadata"]["managedFields"] = json!([]);
        assert_eq!(api_pod(other).unwrap().fingerprint, before);
        let mut other = object();
        other["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert!(api_pod(other).unwrap().fingerprint.deleting);
    }

    #[test]
    fn an_invalid_api_pod_is_rejected_with_the_field_in_error() {
        type Change = fn(&mut Value);
        let cases: [(Change, &str); 4] = [
            (|o| o["metadata"]["uid"] = Value::Null, "metadata.uid: Required value"),
            (|o| o["metadata"]["name"] = "".into(), "metadata.name: Required value"),
            (|o| o["spec"]["containers"] = "none".into(), "spec.containers: Invalid type"),
            (|o| o["spec"]["containers"][0]["image"] = json!(3), "spec.containers[0].image: Invalid type"),
        ];
        for (change, expected) in cases {
            let mut object = object();
            change(&mut object);
            let error = api_pod(object).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
