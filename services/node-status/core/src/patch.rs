//! What is sent to an API server, as patches against its objects (node-and-api.md §9.8, pod-lifecycle.md §14.5).
//!
//! Strategic merge patches: lists with merge keys are merged, so that conditions of others remain; lists that the node owns are
//! replaced whole. All functions take and return JSON as the API has it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;

use keelson_kube_model::node_ext::host_ips;
use keelson_kube_model::{NodeAddress, annotations};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::addresses::PROVIDED_NODE_IP;
use crate::capacity::{RESOURCE_FIELDS, changed_resources};
use crate::merge_patch::{differing, is_empty, is_equivalent, merge_patch, remove_absent, replace_list};
use crate::node::ATTACH_DETACH;

/// Labels that a node sets itself; on an existing node they are updated (node-and-api.md §9.1).
const OWN_LABELS: [&str; 11] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
];

/// Fields of a Node's status that another client may change. Others are not compared: an older server may not know them, so that
/// they would always differ.
const CONTESTED: [&str; 5] = ["conditions", "addresses", "capacity", "allocatable", VOLUMES_IN_USE];
/// Lists of a Node's status that are left out when they are empty, and then removed from the server's Node.
const OMITTED_IF_EMPTY: [&str; 2] = ["images", "declaredFeatures"];
/// The volumes that the controller must not detach. The server keeps its list while ours is not known.
const VOLUMES_IN_USE: &str = "volumesInUse";

/// Fields of a pod's status that the agent owns; other fields are left alone.
const OWN_FIELDS: [&str; 13] = [
    "phase",
    "reason",
    "message",
    "hostIP",
    "podIP",
    "qosClass",
    "observedGeneration",
    "initContainerStatuses",
    "containerStatuses",
    "ephemeralContainerStatuses",
    "resize",
    "allocatedResources",
    "resources",
];
/// Lists that are merged by key, and that the agent owns as a whole.
const OWN_LISTS: [&str; 2] = ["hostIPs", "podIPs"];
/// Why a pod is disrupted: sent only with the final phase, and set by other clients, too.
const DISRUPTION: &str = "DisruptionTarget";
/// Conditions of a pod that the agent owns; those of others stay as the server has them.
const OWN_CONDITIONS: [&str; 9] = [
    "PodScheduled",
    "Initialized",
    "ContainersReady",
    "Ready",
    "PodReadyToStartContainers",
    "PodResizePending",
    "PodResizeInProgress",
    "AllContainersRestarting",
    DISRUPTION,
];
/// Conditions that are removed when the agent does not report them any more.
const TRANSIENT_CONDITIONS: [&str; 3] =
    ["PodResizePending", "PodResizeInProgress", "AllContainersRestarting"];

/// The Node with which this node is registered; `spec` has its taints and provider ID.
pub fn new_node(ours: &Value, spec: &Value) -> Value {
    let mut node = ours.clone();
    if let Some(metadata) = node["metadata"].as_object_mut() {
        // The server sets these.
        metadata.remove("uid");
        metadata.remove("creationTimestamp");
    }
    node["apiVersion"] = "v1".into();
    node["kind"] = "Node".into();
    node["spec"] = spec.clone();
    node
}

/// What has to change in the status subresource of the server's Node; `None`: nothing. With `external_cloud` a cloud controller
/// manages the addresses, once there are some (node-and-api.md §9.2).
pub fn node_patch(live: &Value, ours: &Value, external_cloud: bool) -> Option<Value> {
    let mut metadata = Map::new();
    let labels =
        differing(&live["metadata"]["labels"], &ours["metadata"]["labels"], |key| OWN_LABELS.contains(&key));
    let mut annotations =
        differing(&live["metadata"]["annotations"], &ours["metadata"]["annotations"], |_| true);
    for own in [PROVIDED_NODE_IP, ATTACH_DETACH] {
        let has = |node: &Value| node["metadata"]["annotations"].get(own).is_some();
        if has(live) && !has(ours) {
            annotations.insert(own.to_owned(), Value::Null);
        }
    }
    for (field, changes) in [("labels", labels), ("annotations", annotations)] {
        if !changes.is_empty() {
            metadata.insert(field.to_owned(), changes.into());
        }
    }
    let (before, empty) = (&live["status"], Map::new());
    let mut status = Map::new();
    for (field, value) in ours["status"].as_object().unwrap_or(&empty) {
        let old = &before[field];
        if RESOURCE_FIELDS.contains(&field.as_str()) {
            let changed = changed_resources(field, live, ours);
            if !changed.is_empty() {
                status.insert(field.clone(), changed.into());
            }
            continue;
        }
        let conditions;
        let value = if field == "conditions" {
            conditions = with_transition_times(old, value);
            &conditions
        } else {
            value
        };
        match field.as_str() {
            _ if is_equivalent(old, value) => {}
            "addresses" if !is_empty(old) && external_cloud => {}
            "addresses" if !is_empty(old) => {
                status.insert(field.clone(), replace_list(value));
            }
            // Sent whole: otherwise the server would keep the heartbeat times of some.
            "conditions" => drop(status.insert(field.clone(), value.clone())),
            VOLUMES_IN_USE if is_empty(value) => drop(status.insert(field.clone(), Value::Null)),
            _ => drop(status.insert(field.clone(), merge_patch(old, value))),
        }
    }
    for field in OMITTED_IF_EMPTY {
        if ours["status"][field].is_null() && !before[field].is_null() {
            status.insert(field.to_owned(), Value::Null);
        }
    }
    let mut patch = Map::new();
    for (part, changes) in [("metadata", metadata), ("status", status)] {
        if !changes.is_empty() {
            patch.insert(part.to_owned(), changes.into());
        }
    }
    (!patch.is_empty()).then(|| patch.into())
}

/// Our conditions of the Node with the `lastTransitionTime` that the API shows (node-and-api.md §9.5). A condition with the
/// server's status keeps the server's time. One that another client has changed meanwhile, as the node controller does with a
/// silent node, changes now.
fn with_transition_times(live: &Value, ours: &Value) -> Value {
    let mut ours = ours.clone();
    for condition in ours.as_array_mut().into_iter().flatten() {
        let mut all = live.as_array().into_iter().flatten();
        let Some(old) = all.find(|old| old["type"] == condition["type"]) else { continue };
        let (since, changed) = (&old["lastTransitionTime"], &condition["lastTransitionTime"]);
        if old["status"] == condition["status"] {
            if !since.is_null() {
                condition["lastTransitionTime"] = since.clone();
            }
        } else if !since.is_null() && changed.as_str() <= since.as_str() {
            // RFC 3339 times in UTC sort as text.
            condition["lastTransitionTime"] = condition["lastHeartbeatTime"].clone();
        }
        remove_absent(old, condition);
    }
    ours
}

fn is_terminal(phase: &Value) -> bool {
    phase == "Succeeded" || phase == "Failed"
}

/// Whether the server's Node differs from ours in a field that this node owns, heartbeat times apart.
pub fn node_drifts(live: &Value, ours: &Value, external_cloud: bool) -> bool {
    let times = |node: &Value| -> Vec<(Value, Value)> {
        let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        conditions.map(|c| (c["type"].clone(), c["lastHeartbeatTime"].clone())).collect()
    };
    let (mut ours, live_times) = (ours.clone(), times(live));
    for condition in ours["status"]["conditions"].as_array_mut().into_iter().flatten() {
        if let Some((_, time)) = live_times.iter().find(|(type_, _)| condition["type"] == *type_) {
            condition["lastHeartbeatTime"] = time.clone();
        }
    }
    if let Some(status) = ours["status"].as_object_mut() {
        status.retain(|field, _| CONTESTED.contains(&field.as_str()));
    }
    // Conditions of others are not compared.
    let mut live = live.clone();
    for field in OMITTED_IF_EMPTY {
        live["status"][field] = Value::Null;
    }
    let own_types: Vec<Value> = times(&ours).into_iter().map(|(type_, _)| type_).collect();
    if let Some(conditions) = live["status"]["conditions"].as_array_mut() {
        conditions.retain(|condition| own_types.contains(&condition["type"]));
        conditions.sort_by_key(|condition| own_types.iter().position(|type_| *type_ == condition["type"]));
    }
    node_patch(&live, &ours, external_cloud).is_some()
}

/// The status of a pod of this node, as it is compared with the server's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OwnStatus {
    /// `spec.hostNetwork` of the pod.
    pub host_network: bool,
    /// The fields of the status.
    pub fields: Value,
}

/// What has to change in the status of the server's pod; `None`: nothing. The patch has the UID of the server's pod, so that no
/// other pod of the same name is changed.
///
/// A terminal phase on the server is kept, with its reason and message. A terminal phase of ours is held back until the pod has
/// `stopped`, since a controller may start its successor as soon as it sees that phase. Addresses that we do not know are kept,
/// and so are those of a pod on the host network, to which an address of the other family may be added (pod-lifecycle.md §14.1).
/// Mirror pods follow the Node's addresses: their pods restart with it.
pub fn pod_status_patch(live: &Value, ours: &OwnStatus, stopped: bool) -> Option<Value> {
    let (before, host_network) = (&live["status"], ours.host_network);
    let mut now = Cow::Borrowed(&ours.fields);
    if host_network && live["metadata"]["annotations"][annotations::CONFIG_MIRROR].is_null() {
        keep_pod_addresses(before, &mut now);
    }
    let was_terminal = is_terminal(&before["phase"]);
    let becomes_terminal = !was_terminal && is_terminal(&now["phase"]);
    let held_back = becomes_terminal && !stopped;
    let mut status = Map::new();
    for field in OWN_FIELDS {
        let (old, new) = (&before[field], &now[field]);
        let kept = (was_terminal || held_back) && ["phase", "reason", "message"].contains(&field)
            || is_empty(new) && (field == "hostIP" || host_network && field == "podIP");
        // The server sets it when the pod is created.
        let set_by_server = field == "qosClass" && !old.is_null();
        if !is_equivalent(old, new) && !kept && !set_by_server {
            status.insert(field.to_owned(), merge_patch(old, new));
        }
    }
    for field in OWN_LISTS {
        let (old, new) = (&before[field], &now[field]);
        if is_empty(new) && (host_network || field == "hostIPs") {
            continue;
        }
        match (is_empty(old), is_empty(new)) {
            _ if old == new => {}
            (true, true) => {}
            (true, false) => drop(status.insert(field.to_owned(), new.clone())),
            (false, true) => drop(status.insert(field.to_owned(), Value::Null)),
            (false, false) => drop(status.insert(field.to_owned(), replace_list(new))),
        }
    }
    if before["startTime"].is_null() && !now["startTime"].is_null() {
        status.insert("startTime".to_owned(), now["startTime"].clone());
    }
    let conditions =
        condition_changes(&before["conditions"], &now["conditions"], becomes_terminal && stopped);
    if !conditions.is_empty() {
        status.insert("conditions".to_owned(), conditions.into());
    }
    (!status.is_empty()).then(|| json!({"metadata": {"uid": live["metadata"]["uid"]}, "status": status}))
}

/// Keeps the pod addresses that the server has, and adds a current address of the other family to a single one.
fn keep_pod_addresses(before: &Value, now: &mut Cow<'_, Value>) {
    let first = &before["podIP"];
    let addresses = |list: &Value| -> Vec<Value> { list.as_array().cloned().unwrap_or_default() };
    let family = |ip: &Value| ip.as_str().and_then(|text| text.parse().ok()).map(|ip: IpAddr| ip.is_ipv4());
    let Some(v4) = family(first) else { return };
    let mut kept = addresses(&before["podIPs"]);
    if kept.len() < 2 {
        kept = vec![json!({"ip": first})];
        kept.extend(addresses(&now["podIPs"]).into_iter().find(|entry| family(&entry["ip"]) == Some(!v4)));
    }
    if now["podIP"] != *first || now["podIPs"] != Value::from(kept.as_slice()) {
        let status = now.to_mut();
        status["podIP"] = first.clone();
        status["podIPs"] = kept.into();
    }
}

/// The conditions to send. The disruption condition is among them only if the pod `becomes_terminal` in a terminal phase.
fn condition_changes(before: &Value, now: &Value, becomes_terminal: bool) -> Vec<Value> {
    fn all(list: &Value) -> impl Iterator<Item = &Value> {
        list.as_array().into_iter().flatten()
    }
    let mut changes = Vec::new();
    let is_own = |condition: &&Value| {
        let type_ = condition["type"].as_str().unwrap_or_default();
        OWN_CONDITIONS.contains(&type_) && (type_ != DISRUPTION || becomes_terminal)
    };
    for condition in all(now).filter(is_own) {
        let old = all(before).find(|old| old["type"] == condition["type"]);
        let mut new = condition.clone();
        if let Some(old) = old
            && old["status"] == new["status"]
            && !old["lastTransitionTime"].is_null()
        {
            // The status has not changed, even if this agent has restarted meanwhile.
            new["lastTransitionTime"] = old["lastTransitionTime"].clone();
        }
        let same = |field: &str, old: &Value| {
            old[field] == new[field] || (is_empty(&old[field]) && is_empty(&new[field]))
        };
        let fields = ["status", "reason", "message", "lastTransitionTime", "observedGeneration"];
        if old.is_none_or(|old| !fields.iter().all(|field| same(field, old))) {
            if let Some(old) = old {
                remove_absent(old, &mut new);
            }
            changes.push(new);
        }
    }
    let own_types: BTreeSet<&str> = all(now).filter_map(|condition| condition["type"].as_str()).collect();
    for old in all(before).filter_map(|old| old["type"].as_str()) {
        if TRANSIENT_CONDITIONS.contains(&old) && !own_types.contains(old) {
            changes.push(json!({"type": old, "$patch": "delete"}));
        }
    }
    changes
}

/// Whether the server's pod is to be deleted: its deletion was requested, its phase is terminal, and nothing of it is left on
/// this node (pod-lifecycle.md §14.6).
pub fn may_be_deleted(live: &Value, finished: bool) -> bool {
    finished && !live["metadata"]["deletionTimestamp"].is_null() && is_terminal(&live["status"]["phase"])
}

/// The options of a deletion without grace period, of the object with this UID only.
pub fn delete_now(uid: &str) -> Value {
    json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
}

/// What the mirror pod of a static pod needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mirror {
    /// It must be created.
    Create {
        /// The existing mirror pod must be deleted first.
        replace: bool,
    },
    /// The existing mirror pod is the right one.
    UpToDate,
    /// A pod that is not a mirror pod has the name: it is left alone.
    Foreign,
    /// The static pod is ending, so no mirror pod is created.
    NotNeeded,
}

/// Decides what the mirror pod needs (pod-lifecycle.md §3); `live` is the server's pod of this name, `hash` the annotation
/// `kubernetes.io/config.hash` of the static pod, and `ending` whether the static pod is being deleted.
pub fn decide_mirror(live: Option<&Value>, hash: Option<&str>, ending: bool) -> Mirror {
    let Some(live) = live else {
        return if ending { Mirror::NotNeeded } else { Mirror::Create { replace: false } };
    };
    let Some(mirror) = live["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str() else {
        return Mirror::Foreign;
    };
    let going = !live["metadata"]["deletionTimestamp"].is_null();
    match (going || Some(mirror) != hash, ending) {
        (false, _) => Mirror::UpToDate,
        (true, false) => Mirror::Create { replace: true },
        (true, true) => Mirror::NotNeeded,
    }
}

/// The mirror pod of the static pod `pod`, owned by the Node.
pub fn mirror_of(mut pod: Value, node_name: &str, node_uid: &str) -> Value {
    if let Some(map) = pod.as_object_mut() {
        map.remove("status");
    }
    let metadata = &mut pod["metadata"];
    let hash = metadata["annotations"][annotations::CONFIG_HASH].clone();
    metadata["annotations"][annotations::CONFIG_MIRROR] = hash;
    metadata["ownerReferences"] = json!([
        {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid, "controller": true},
    ]);
    pod
}

/// Whether a status is that of a pod rejected at admission: only such a final status has no conditions (pod-lifecycle.md §15.3).
fn is_rejected(status: &Value) -> bool {
    status["phase"] == "Failed" && is_empty(&status["conditions"]) && is_empty(&status["containerStatuses"])
}

/// Adds the addresses of the node, a list as in `status.addresses` of a Node, to a pod's status where the agent reports none,
/// except to that of a rejected pod.
pub fn add_host_addresses(ours: &mut OwnStatus, addresses: &Value) {
    let addresses = Vec::<NodeAddress>::deserialize(addresses).unwrap_or_default();
    let ips: Vec<Value> = host_ips(&addresses).iter().map(|ip| Value::from(ip.to_string())).collect();
    let (Some(first), true) = (ips.first(), ours.fields.is_object()) else { return };
    let list: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    let status = &mut ours.fields;
    if is_rejected(status) {
        return;
    }
    if is_empty(&status["hostIP"]) {
        status["hostIP"] = first.clone();
        status["hostIPs"] = list.clone().into();
    }
    if ours.host_network && is_empty(&status["podIP"]) {
        status["podIP"] = first.clone();
        status["podIPs"] = list.into();
    }
}

#[cfg(test)]
#[path = "patch_tests.rs"]
mod tests;
