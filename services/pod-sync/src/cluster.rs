//! What only a node of a cluster has for its pods: services in the environment, and runtime classes.

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_config::{Config, ControlPlane};
use keelson_kube_model::Pod;
use keelson_kube_model::pod_ext::API;
use keelson_proto::keelson::pod_config::v1::{GetObjectRequest, GetServiceEnvRequest};
use tonic::Code;

use crate::agent::{Agent, Wanted};
use crate::clients::bounded;
use crate::worker::Trouble;

/// How long pod-config may take.
const CALL: Duration = Duration::from_secs(10);

/// Whether the node belongs to a cluster.
pub fn has_cluster(config: &Config) -> bool {
    matches!(config.control_plane, ControlPlane::Kubernetes(_))
}

/// The variables of services that the pod's containers get (runtime-and-resources.md §3.4); none without a cluster.
///
/// # Errors
/// pod-config is away, or has not read the services yet. A pod that does not come from the API gets what is known.
pub async fn service_env(agent: &Agent, wanted: &Wanted) -> Result<BTreeMap<String, String>, Trouble> {
    if !has_cluster(&agent.context.config) {
        return Ok(BTreeMap::new());
    }
    let request = GetServiceEnvRequest {
        namespace: wanted.pod.metadata.namespace.clone(),
        // The default of the API.
        service_links: wanted.pod.spec.enable_service_links != Some(false),
        as_known: wanted.source != API,
    };
    let answer = agent.clients.pods().get_service_env(bounded(request, CALL)).await;
    let answer = answer.map_err(|status| Trouble::call("cannot have the variables of services", &status))?;
    Ok(answer.into_inner().variables.into_iter().collect())
}

/// The handler of the pod's runtime class; empty: the runtime's default.
///
/// # Errors
/// There is no such class, or pod-config cannot tell. Both are tried again.
pub async fn runtime_handler(agent: &Agent, pod: &Pod) -> Result<String, Trouble> {
    let Some(name) = class(pod) else { return Ok(String::new()) };
    if !has_cluster(&agent.context.config) {
        let text = format!(
            "RuntimeClass {name:?} not found: without a control plane there are none, take runtimeClassName out"
        );
        return Err(Trouble::fault(text));
    }
    let (kind, namespace) = ("RuntimeClass".to_owned(), String::new());
    let request = GetObjectRequest { kind, namespace, name: name.to_owned() };
    match agent.clients.pods().get_object(bounded(request, CALL)).await {
        Ok(answer) => handler(&answer.into_inner().object_json)
            .ok_or_else(|| Trouble::fault(format!("RuntimeClass {name:?} has no handler"))),
        Err(status) if status.code() == Code::NotFound => {
            Err(Trouble::fault(format!("RuntimeClass {name:?} not found")))
        }
        Err(status) => Err(Trouble::call(&format!("cannot read RuntimeClass {name:?}"), &status)),
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
    fn a_class_names_its_handler() {
        assert_eq!(handler(br#"{"handler": "kata"}"#).as_deref(), Some("kata"));
        for wrong in [r#"{"handler": 1}"#, "{}", "x"] {
            assert_eq!(handler(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
