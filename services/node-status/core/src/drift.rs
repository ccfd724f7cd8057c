//! Whether the server's pod differs from the last report of it (pod-lifecycle.md §14.5).
//!
//! Of the server's pod only the parts that are compared are decoded, and its status only if it is compared.

use std::borrow::Cow;

use keelson_kube_model::annotations;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::patch::{OwnStatus, add_host_addresses, may_be_deleted, pod_status_patch};
use crate::report::{PodReport, present};

/// The server's pod.
#[derive(Debug, Deserialize)]
pub struct ServerPod<'a> {
    #[serde(borrow, default)]
    metadata: Metadata<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    status: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata<'a> {
    uid: Value,
    deletion_timestamp: Value,
    #[serde(borrow)]
    resource_version: Cow<'a, str>,
    #[serde(borrow)]
    annotations: Option<Annotations<'a>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Annotations<'a> {
    #[serde(borrow, rename = "kubernetes.io/config.mirror")]
    mirror: Option<Cow<'a, str>>,
}

impl<'a> ServerPod<'a> {
    /// Decodes the metadata; `None` for a document that is not a Pod.
    pub fn decode(pod_json: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(pod_json).ok()
    }

    /// `metadata.resourceVersion`; empty if it has none.
    pub fn resource_version(&self) -> &str {
        &self.metadata.resource_version
    }

    /// The UID of the static pod of which this is the mirror pod.
    pub fn static_pod_uid(&self) -> Option<&str> {
        self.metadata.annotations.as_ref()?.mirror.as_deref()
    }

    /// The part of the pod that [`drifts`] and [`crate::patch::decide_mirror`] read.
    pub fn compared_part(&self) -> Value {
        let status: Value =
            self.status.and_then(|status| serde_json::from_str(status.get()).ok()).unwrap_or_default();
        let mut metadata =
            json!({"uid": self.metadata.uid, "deletionTimestamp": self.metadata.deletion_timestamp});
        if let Some(mirror) = self.static_pod_uid() {
            metadata["annotations"] = json!({(annotations::CONFIG_MIRROR): mirror});
        }
        json!({"metadata": metadata, "status": status})
    }
}

/// Whether the server's pod `live` needs another write after this report: its status differs, or it may be deleted now.
/// `addresses` are those of the node, as in its `status.addresses`.
pub fn drifts(live: &Value, report: &PodReport, addresses: Option<&Value>) -> bool {
    let mut ours = OwnStatus { host_network: report.pod.host_network, fields: report.status.fields() };
    if ours.fields.is_null() {
        return false;
    }
    if let Some(addresses) = addresses {
        add_host_addresses(&mut ours, addresses);
    }
    differs(live, report, &ours)
}

/// The same for a status with the addresses of the node.
pub fn differs(live: &Value, report: &PodReport, ours: &OwnStatus) -> bool {
    pod_status_patch(live, ours, report.termination.stopped).is_some()
        || (!report.is_static() && may_be_deleted(live, report.termination.finished))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use keelson_kube_model::pod_ext::API;

    use super::*;
    use crate::{PodDocument, PodUpdate, Termination};

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
        let mut ours = OwnStatus { host_network: true, fields: live["status"].take() };
        add_host_addresses(&mut ours, &node()["status"]["addresses"]);
        live["status"] = ours.fields;
        live
    }

    fn report(is_static: bool, finished: bool) -> Arc<PodReport> {
        let json = pod().to_string();
        let document = PodDocument {
            source: if is_static { "file" } else { API },
            pod_json: json.as_bytes(),
            termination: Termination { stopped: finished, finished },
            ..PodDocument::default()
        };
        PodUpdate::first(&document, false).unwrap().report
    }

    fn drifted(live: &Value, is_static: bool, finished: bool) -> bool {
        let live = live.to_string();
        let compared_part = ServerPod::decode(live.as_bytes()).unwrap().compared_part();
        drifts(&compared_part, &report(is_static, finished), Some(&node()["status"]["addresses"]))
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
        let report = report(false, false);
        assert_eq!((report.pod.host_network, report.pod.json.as_ref()), (true, None));
        assert_eq!(report.status.fields(), pod()["status"]);
        let no_pod = PodDocument { pod_json: b"no pod", ..PodDocument::default() };
        assert!(PodUpdate::first(&no_pod, false).is_err());
        assert!(ServerPod::decode(b"no pod").is_none());
    }

    #[test]
    fn of_a_server_pod_only_the_compared_parts_are_decoded() {
        let json = json!({
            "metadata": {"uid": "m", "resourceVersion": "7", "labels": {"a": "b"},
                "annotations": {(annotations::CONFIG_MIRROR): "s", "x": "y"}},
            "spec": {}, "status": {"phase": "Running"},
        })
        .to_string();
        let pod = ServerPod::decode(json.as_bytes()).unwrap();
        assert_eq!((pod.resource_version(), pod.static_pod_uid()), ("7", Some("s")));
        let expected = json!({
            "metadata": {"uid": "m", "deletionTimestamp": null, "annotations": {(annotations::CONFIG_MIRROR): "s"}},
            "status": {"phase": "Running"},
        });
        assert_eq!(pod.compared_part(), expected);
        let empty = ServerPod::decode(b"{}").unwrap();
        assert_eq!((empty.resource_version(), empty.static_pod_uid()), ("", None));
    }
}
