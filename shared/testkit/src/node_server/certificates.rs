//! What NodeRestriction says of requests for certificates of pods.

use serde_json::Value;

use super::objects::Objects;
use super::request::Request;

/// A node requests certificates only for its own pods that are no mirrors, with the right names and UIDs, and only from signers that
/// a volume of the pod names.
pub(super) fn admit(node: &str, request: &Request, objects: &Objects) -> Result<(), String> {
    let (namespace, wanted) = (&request.target.namespace, &request.body["spec"]);
    let text = |field: &str| wanted[field].as_str().unwrap_or_default();
    if text("nodeName") != node {
        return Err(format!("node {node:?} requests certificates only with spec.nodeName set to itself"));
    }
    let pod_name = text("podName");
    let Some(pod) = objects.core("pods", namespace, pod_name) else {
        return Err(format!("pods {pod_name:?} not found"));
    };
    if pod["spec"]["nodeName"] != node || !pod["metadata"]["annotations"][super::rules::MIRROR].is_null() {
        return Err(format!("the pod {pod_name:?} is a mirror or is not bound to node {node:?}"));
    }
    let account_name = text("serviceAccountName");
    if pod["spec"]["serviceAccountName"] != account_name {
        return Err(format!("the service account of the pod {pod_name:?} is not {account_name:?}"));
    }
    let uid = |object: Option<&Value>| object.map(|object| object["metadata"]["uid"].clone());
    let account = objects.core("serviceaccounts", namespace, account_name);
    for (field, known) in [
        ("podUID", uid(Some(pod))),
        ("serviceAccountUID", uid(account)),
        ("nodeUID", uid(objects.core("nodes", "", node))),
    ] {
        if known.as_ref() != Some(&wanted[field]) {
            return Err(format!("spec.{field} is not the UID in the record"));
        }
    }
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let mut sources =
        volumes.flat_map(|volume| volume["projected"]["sources"].as_array().into_iter().flatten());
    let signer = &wanted["signerName"];
    if sources.any(|source| source["podCertificate"]["signerName"] == *signer) {
        return Ok(());
    }
    Err(format!("no volume of the pod {pod_name:?} names the signer {signer}"))
}
