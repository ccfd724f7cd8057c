//! Whether the server's pod differs from the last report of it (pod-lifecycle.md §14.5).
//!
//! Of both only the parts that are compared are kept and decoded.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Termination;
use crate::patch::{add_host_addresses, may_be_deleted, pod_status_patch};

/// The parts of a pod's report from which its status patch is made.
#[derive(Serialize, Deserialize)]
struct Reported {
    #[serde(default)]
    spec: ReportedSpec,
    #[serde(default)]
    status: Value,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ReportedSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    host_network: Option<bool>,
}

/// The part of a pod's report that [`pod_status_patch`] and [`add_host_addresses`] read, as JSON. A document that is not a Pod is
/// returned unchanged.
pub fn reported(pod_json: &[u8]) -> Vec<u8> {
    let part = serde_json::from_slice::<Reported>(pod_json);
    part.and_then(|part| serde_json::to_vec(&part)).unwrap_or_else(|_| pod_json.to_vec())
}

/// The parts of the server's pod that are compared.
#[derive(Deserialize)]
struct ServerPod {
    #[serde(default)]
    metadata: Value,
    #[serde(default)]
    status: Value,
}

/// The part of the server's pod that [`drifts`] and [`crate::patch::decide_mirror`] read; `None` for a document that is not a
/// Pod.
pub fn compared_part(pod_json: &[u8]) -> Option<Value> {
    let ServerPod { metadata, status } = serde_json::from_slice(pod_json).ok()?;
    Some(json!({"metadata": metadata, "status": status}))
}

/// Whether the server's pod `live` needs another write after this `reported`: its status differs, or it may be deleted now.
/// `node` has the addresses of the node.
pub fn drifts(
    live: &Value,
    reported: &[u8],
    node: Option<&Value>,
    is_static: bool,
    termination: Termination,
) -> bool {
    let Ok(mut ours) = serde_json::from_slice::<Value>(reported) else { return false };
    if let Some(node) = node {
        add_host_addresses(&mut ours, node);
    }
    pod_status_patch(live, &ours, termination.stopped).is_some()
        || (!is_static && may_be_deleted(live, termination.finished))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Value {
        json!({
            "metadata": {"name": "web", "uid": "u"},
            "spec": {"hostNetwork": true, "containers": [{"name": "main"}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        })
    }

    fn node() -> Value {
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}})
    }

    /// The server's pod after the report.
    fn live() -> Value {
        let mut live = pod();
        add_host_addresses(&mut live, &node());
        live
    }

    fn drifted(live: &Value, is_static: bool, finished: bool) -> bool {
        let termination = Termination { stopped: finished, finished };
        let compared_part = compared_part(live.to_string().as_bytes()).unwrap();
        drifts(&compared_part, &reported(pod().to_string().as_bytes()), Some(&node()), is_static, termination)
    }

    #[test]
    fn additions_of_other_clients_are_no_drift() {
        let mut live = live();
        assert!(!drifted(&live, false, false));
        live["status"]["conditions"] =
            json!([{"type": "Ready", "status": "True"}, {"type": "x/y", "status": "False"}]);
        live["metadata"]["labels"] = json!({"a": "b"});
        assert!(!drifted(&live, false, false));
    }

    #[test]
    fn a_change_by_another_client_is_drift() {
        for (pointer, value) in [
            ("/status/phase", json!("Pending")),
            ("/status/conditions/0/status", json!("False")),
            ("/status/podIP", json!("10.0.0.9")),
            ("/status/hostIPs", json!([])),
        ] {
            let mut live = live();
            *live.pointer_mut(pointer).unwrap() = value;
            assert!(drifted(&live, false, false), "{pointer}");
        }
        let mut over = live();
        over["status"]["phase"] = json!("Failed");
        assert!(!drifted(&over, false, false), "a phase that is over stays");
    }

    #[test]
    fn a_pod_that_may_be_deleted_drifts_and_a_mirror_pod_does_not() {
        let mut live = live();
        live["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        live["status"]["phase"] = json!("Succeeded");
        assert!(drifted(&live, false, true));
        assert!(!drifted(&live, false, false) && !drifted(&live, true, true));
    }

    #[test]
    fn only_the_compared_parts_of_a_report_are_kept() {
        let part: Value = serde_json::from_slice(&reported(pod().to_string().as_bytes())).unwrap();
        assert_eq!(part, json!({"spec": {"hostNetwork": true}, "status": pod()["status"]}));
        assert_eq!(reported(b"no pod"), b"no pod");
        assert_eq!(compared_part(b"no pod"), None);
    }
}
