//! What pods get only on a node of a cluster: the variables of services, and runtime classes.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::Pod;
use keelson_kube_model::pod_ext::API;
use keelson_proto::keelson::pod_config::v1::{GetObjectRequest, GetServiceEnvRequest};
use tonic::Code;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::error::SyncError;
use crate::node::has_cluster;
use crate::state::pod_state::DesiredPod;

/// The deadline of a call to pod-config.
const CALL: Duration = Duration::from_secs(10);

/// The variables of services that the pod's containers get (runtime-and-resources.md §3.4); none without a cluster.
///
/// # Errors
/// pod-config is unavailable or has not read the services yet. A pod that does not come from the API gets the services that are known.
pub async fn service_env(
    effects: &Effects,
    desired: &DesiredPod,
) -> Result<BTreeMap<String, String>, SyncError> {
    if !has_cluster(&effects.context.config) {
        return Ok(BTreeMap::new());
    }
    let request = GetServiceEnvRequest {
        namespace: desired.pod.metadata.namespace.clone(),
        // The default of the API.
        service_links: desired.pod.spec.enable_service_links != Some(false),
        as_known: desired.source != API,
    };
    let answer = effects.clients.pods().get_service_env(bounded(request, CALL)).await;
    let answer =
        answer.map_err(|status| SyncError::from_status("cannot read the variables of services", &status))?;
    Ok(answer.into_inner().variables.into_iter().collect())
}

/// The handler of the pod's runtime class; empty: the runtime's default.
///
/// # Errors
/// The class does not exist, or pod-config cannot read it. Both are retried.
pub async fn runtime_handler(effects: &Effects, pod: &Pod) -> Result<String, SyncError> {
    let Some(name) = class(pod) else { return Ok(String::new()) };
    if !has_cluster(&effects.context.config) {
        let text = format!(
            "RuntimeClass {name:?} not found: without a control plane there are none, take runtimeClassName out"
        );
        return Err(SyncError::new(text));
    }
    let (kind, namespace) = ("RuntimeClass".to_owned(), String::new());
    let request = GetObjectRequest { kind, namespace, name: name.to_owned() };
    match effects.clients.pods().get_object(bounded(request, CALL)).await {
        Ok(answer) => handler(&answer.into_inner().object_json)
            .ok_or_else(|| SyncError::new(format!("RuntimeClass {name:?} has no handler"))),
        Err(status) if status.code() == Code::NotFound => {
            Err(SyncError::new(format!("RuntimeClass {name:?} not found")))
        }
        Err(status) => Err(SyncError::from_status(&format!("cannot read RuntimeClass {name:?}"), &status)),
    }
}

fn class(pod: &Pod) -> Option<&str> {
    pod.spec.runtime_class_name.as_deref().filter(|name| !name.is_empty())
}

fn handler(json: &[u8]) -> Option<String> {
    let object: serde_json::Value = serde_json::from_slice(json).ok()?;
    Some(object["handler"].as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_class_handler_is_read_or_missing() {
        assert_eq!(handler(br#"{"handler": "kata"}"#).as_deref(), Some("kata"));
        for wrong in [r#"{"handler": 1}"#, "{}", "x"] {
            assert_eq!(handler(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
