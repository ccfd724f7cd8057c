//! Whether the server still has what it was told of a pod (pod-lifecycle.md §14.5).
//!
//! Of what was told and of what the server has only the parts are kept and decoded that say so.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Ended;
use crate::patch::{add_host_addresses, may_be_deleted, pod_status_patch};

/// What of a pod's own report makes the patch of its status.
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

/// The part of a pod's report that [`pod_status_patch`] and [`add_host_addresses`] look at, as JSON. What is no Pod stays as it
/// is.
pub fn reported(pod_json: &[u8]) -> Vec<u8> {
    let part = serde_json::from_slice::<Reported>(pod_json);
    part.and_then(|part| serde_json::to_vec(&part)).unwrap_or_else(|_| pod_json.to_vec())
}

/// What of the server's pod is looked at: `metadata` and `status`.
#[derive(Deserialize)]
struct Seen {
    #[serde(default)]
    metadata: Value,
    #[serde(default)]
    status: Value,
}

/// The part of the server's pod that [`drifts`] and [`crate::patch::judge_mirror`] look at; none of what is no Pod.
pub fn seen(pod_json: &[u8]) -> Option<Value> {
    let Seen { metadata, status } = serde_json::from_slice(pod_json).ok()?;
    Some(json!({"metadata": metadata, "status": status}))
}

/// Whether something is left to be done at the server's pod `live`, of which this was `reported`: its status is another one, or it
/// may be deleted by now. `node` has the addresses of the node.
pub fn drifts(live: &Value, reported: &[u8], node: Option<&Value>, is_static: bool, ended: Ended) -> bool {
    let Ok(mut ours) = serde_json::from_slice::<Value>(reported) else { return false };
    if let Some(node) = node {
        add_host_addresses(&mut ours, node);
    }
    pod_status_patch(live, &ours, ended.stopped).is_some()
        || (!is_static && may_be_deleted(live, ended.finished))
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

    /// The server's pod after it was told.
    fn live() -> Value {
        let mut live = pod();
        add_host_addresses(&mut live, &node());
        live
    }

    fn drifted(live: &Value, is_static: bool, finished: bool) -> bool {
        let ended = Ended { stopped: finished, finished };
        let seen = seen(live.to_string().as_bytes()).unwrap();
        drifts(&seen, &reported(pod().to_string().as_bytes()), Some(&node()), is_static, ended)
    }

    #[test]
    fn what_was_told_and_stands_is_no_drift_whatever_others_add() {
        let mut live = live();
        assert!(!drifted(&live, false, false));
        live["status"]["conditions"] =
            json!([{"type": "Ready", "status": "True"}, {"type": "x/y", "status": "False"}]);
        live["metadata"]["labels"] = json!({"a": "b"});
        assert!(!drifted(&live, false, false));
    }

    #[test]
    fn what_somebody_else_has_written_is_drift() {
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
    fn a_pod_that_may_be_deleted_by_now_is_to_be_and_a_mirror_is_not() {
        let mut live = live();
        live["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        live["status"]["phase"] = json!("Succeeded");
        assert!(drifted(&live, false, true));
        assert!(!drifted(&live, false, false) && !drifted(&live, true, true));
    }

    #[test]
    fn only_what_counts_is_kept_of_a_report() {
        let kept: Value = serde_json::from_slice(&reported(pod().to_string().as_bytes())).unwrap();
        assert_eq!(kept, json!({"spec": {"hostNetwork": true}, "status": pod()["status"]}));
        assert_eq!(reported(b"no pod"), b"no pod");
        assert_eq!(seen(b"no pod"), None);
    }
}
