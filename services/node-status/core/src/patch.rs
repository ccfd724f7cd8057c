//! What is sent to an API server, as patches against what it has (node-and-api.md §9.8, pod-lifecycle.md §14.5).
//!
//! Strategic merge patches: lists with keys are merged by them, so that conditions of others stay, and whole lists that are
//! the node's own are replaced. Everything here takes and gives JSON as the API has it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;

use keelson_kube_model::node_ext::host_ips;
use keelson_kube_model::{NodeAddress, annotations};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::addresses::PROVIDED_NODE_IP;
use crate::amounts::{AMOUNTS, changed_amounts};
use crate::node::ATTACH_DETACH;

/// Labels that a node has by itself; on an existing node they are brought up to date (node-and-api.md §9.1).
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

/// Fields of a Node's status that somebody else may change. An older server may not know others, so that they always differ.
const CONTESTED: [&str; 4] = ["conditions", "addresses", "capacity", "allocatable"];

/// Fields of a pod's status that are the agent's; what else stands there is left alone.
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
/// Lists that are merged by their key, and of which the agent has all.
const OWN_LISTS: [&str; 2] = ["hostIPs", "podIPs"];
/// Why a pod ends before it is over: told with the final phase, and of others too.
const DISRUPTION: &str = "DisruptionTarget";
/// Conditions of a pod that are the agent's; those of others stay as the server has them.
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
/// Conditions that go when the agent does not tell them any more.
const PASSING_CONDITIONS: [&str; 3] = ["PodResizePending", "PodResizeInProgress", "AllContainersRestarting"];

/// The Node with which this one is registered; `spec` has its taints and what its cloud calls it.
pub fn new_node(ours: &Value, spec: &Value) -> Value {
    let mut node = ours.clone();
    if let Some(metadata) = node["metadata"].as_object_mut() {
        // The server gives these.
        metadata.remove("uid");
        metadata.remove("creationTimestamp");
    }
    node["apiVersion"] = "v1".into();
    node["kind"] = "Node".into();
    node["spec"] = spec.clone();
    node
}

/// What has to change at the Node that the server has, for its subresource `status`; `None`: nothing. With `of_cloud` a
/// controller of a cloud sees to the addresses, once there are some (node-and-api.md §9.2).
pub fn node_patch(live: &Value, ours: &Value, of_cloud: bool) -> Option<Value> {
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
        if AMOUNTS.contains(&field.as_str()) {
            let changed = changed_amounts(field, live, ours);
            if !changed.is_empty() {
                status.insert(field.clone(), changed.into());
            }
            continue;
        }
        let turned;
        let value = if field == "conditions" {
            turned = since_they_turned(old, value);
            &turned
        } else {
            value
        };
        match field.as_str() {
            _ if is_same(old, value) => {}
            "addresses" if !is_nothing(old) && of_cloud => {}
            "addresses" if !is_nothing(old) => {
                status.insert(field.clone(), replaced(value));
            }
            // Whole, or the server would keep the time of the last heartbeat of some.
            "conditions" => drop(status.insert(field.clone(), value.clone())),
            _ => drop(status.insert(field.clone(), merged_over(old, value))),
        }
    }
    if ours["status"]["images"].is_null() && !before["images"].is_null() {
        status.insert("images".to_owned(), Value::Null);
    }
    let mut patch = Map::new();
    for (part, changes) in [("metadata", metadata), ("status", status)] {
        if !changes.is_empty() {
            patch.insert(part.to_owned(), changes.into());
        }
    }
    (!patch.is_empty()).then(|| patch.into())
}

/// Our conditions of the Node with the time since when each is as it is for whoever reads the server (node-and-api.md §9.5): of one
/// that has not turned against the server's it is the server's, and of one that somebody else has turned meanwhile, as the node
/// controller does with a node that is silent, it is now.
fn since_they_turned(live: &Value, ours: &Value) -> Value {
    let mut ours = ours.clone();
    for condition in ours.as_array_mut().into_iter().flatten() {
        let mut all = live.as_array().into_iter().flatten();
        let Some(old) = all.find(|old| old["type"] == condition["type"]) else { continue };
        let (since, turned) = (&old["lastTransitionTime"], &condition["lastTransitionTime"]);
        if old["status"] == condition["status"] {
            if !since.is_null() {
                condition["lastTransitionTime"] = since.clone();
            }
        } else if !since.is_null() && turned.as_str() <= since.as_str() {
            // RFC 3339 in UTC sorts as it stands.
            condition["lastTransitionTime"] = condition["lastHeartbeatTime"].clone();
        }
        remove_absent(old, condition);
    }
    ours
}

/// Entries of `ours` that are other ones in `live`, where `owned` says yes to their key.
pub(crate) fn differing(live: &Value, ours: &Value, owned: impl Fn(&str) -> bool) -> Map<String, Value> {
    let ours = ours.as_object().into_iter().flatten();
    let changed = ours.filter(|(key, value)| owned(key) && live.get(key.as_str()) != Some(*value));
    changed.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// A list that takes the place of the one before, although it is one that is merged.
fn replaced(list: &Value) -> Value {
    let mut list = list.as_array().cloned().unwrap_or_default();
    list.push(json!({"$patch": "replace"}));
    list.into()
}

fn is_terminal(phase: &Value) -> bool {
    phase == "Succeeded" || phase == "Failed"
}

/// Whether something has changed at the Node that the server has which this node is to say, times of heartbeats apart.
pub fn node_drifts(live: &Value, ours: &Value, of_cloud: bool) -> bool {
    let times = |node: &Value| -> Vec<(Value, Value)> {
        let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        conditions.map(|c| (c["type"].clone(), c["lastHeartbeatTime"].clone())).collect()
    };
    let (mut ours, theirs) = (ours.clone(), times(live));
    for condition in ours["status"]["conditions"].as_array_mut().into_iter().flatten() {
        if let Some((_, time)) = theirs.iter().find(|(type_, _)| condition["type"] == *type_) {
            condition["lastHeartbeatTime"] = time.clone();
        }
    }
    if let Some(status) = ours["status"].as_object_mut() {
        status.retain(|field, _| CONTESTED.contains(&field.as_str()));
    }
    // Conditions of others are not ours to compare.
    let mut live = live.clone();
    live["status"]["images"] = Value::Null;
    let told: Vec<Value> = times(&ours).into_iter().map(|(type_, _)| type_).collect();
    if let Some(conditions) = live["status"]["conditions"].as_array_mut() {
        conditions.retain(|condition| told.contains(&condition["type"]));
        conditions.sort_by_key(|condition| told.iter().position(|type_| *type_ == condition["type"]));
    }
    node_patch(&live, &ours, of_cloud).is_some()
}

/// What has to change at the status of the pod that the server has; `None`: nothing. `uid` is that of the server's pod, which
/// makes sure that no other pod of the name is changed.
///
/// A phase that is terminal on the server stays, with its reason and message. A terminal one of ours waits until the pod has
/// `stopped`: whoever sees it may start the pod's successor. Addresses that we do not know stay, and so do those of a pod on the
/// node's network, to which one of the other family may come (pod-lifecycle.md §14.1). Mirrors follow the Node: their pods start
/// anew with it.
pub fn pod_status_patch(live: &Value, ours: &Value, stopped: bool) -> Option<Value> {
    let mut ours = Cow::Borrowed(ours);
    if ours["spec"]["hostNetwork"] == true
        && live["metadata"]["annotations"][annotations::CONFIG_MIRROR].is_null()
    {
        keep_pod_addresses(&live["status"], &mut ours);
    }
    let (before, now) = (&live["status"], &ours["status"]);
    let over = is_terminal(&before["phase"]);
    let ends = !over && is_terminal(&now["phase"]);
    let waits = ends && !stopped;
    let host_network = ours["spec"]["hostNetwork"] == true;
    let mut status = Map::new();
    for field in OWN_FIELDS {
        let (old, new) = (&before[field], &now[field]);
        let kept = (over || waits) && ["phase", "reason", "message"].contains(&field)
            || is_nothing(new) && (field == "hostIP" || host_network && field == "podIP");
        // The server sets it when the pod is made.
        let theirs = field == "qosClass" && !old.is_null();
        if !is_same(old, new) && !kept && !theirs {
            status.insert(field.to_owned(), merged_over(old, new));
        }
    }
    for field in OWN_LISTS {
        let (old, new) = (&before[field], &now[field]);
        if is_nothing(new) && (host_network || field == "hostIPs") {
            continue;
        }
        match (is_nothing(old), is_nothing(new)) {
            _ if old == new => {}
            (true, true) => {}
            (true, false) => drop(status.insert(field.to_owned(), new.clone())),
            (false, true) => drop(status.insert(field.to_owned(), Value::Null)),
            (false, false) => drop(status.insert(field.to_owned(), replaced(new))),
        }
    }
    if before["startTime"].is_null() && !now["startTime"].is_null() {
        status.insert("startTime".to_owned(), now["startTime"].clone());
    }
    let conditions = condition_changes(&before["conditions"], &now["conditions"], ends && stopped);
    if !conditions.is_empty() {
        status.insert("conditions".to_owned(), conditions.into());
    }
    (!status.is_empty()).then(|| json!({"metadata": {"uid": live["metadata"]["uid"]}, "status": status}))
}

/// Has a pod show the addresses that the server has of it, and behind a single one that of the other family which it has now.
fn keep_pod_addresses(before: &Value, ours: &mut Cow<'_, Value>) {
    let first = &before["podIP"];
    let addresses = |list: &Value| -> Vec<Value> { list.as_array().cloned().unwrap_or_default() };
    let family = |ip: &Value| ip.as_str().and_then(|text| text.parse().ok()).map(|ip: IpAddr| ip.is_ipv4());
    let Some(v4) = family(first) else { return };
    let mut kept = addresses(&before["podIPs"]);
    if kept.len() < 2 {
        kept = vec![json!({"ip": first})];
        kept.extend(
            addresses(&ours["status"]["podIPs"]).into_iter().find(|entry| family(&entry["ip"]) == Some(!v4)),
        );
    }
    if ours["status"]["podIP"] != *first || ours["status"]["podIPs"] != Value::from(kept.as_slice()) {
        let status = &mut ours.to_mut()["status"];
        status["podIP"] = first.clone();
        status["podIPs"] = kept.into();
    }
}

/// Absent, null, empty text, empty list: the same to the API.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether the API takes two values for the same one: what is nothing may be absent.
fn is_same(old: &Value, new: &Value) -> bool {
    match (old, new) {
        (Value::Object(before), Value::Object(now)) => {
            before.keys().chain(now.keys()).all(|key| is_same(&old[key], &new[key]))
        }
        (Value::Array(before), Value::Array(now)) => {
            before.len() == now.len() && before.iter().zip(now).all(|(old, new)| is_same(old, new))
        }
        _ => old == new || (is_nothing(old) && is_nothing(new)),
    }
}

/// `new` as a patch over `old`: a field of an object that `new` does not have is sent as null, since a merge keeps what is
/// absent. Lists inside replace the list before them whole.
fn merged_over(old: &Value, new: &Value) -> Value {
    let (Value::Object(before), Value::Object(now)) = (old, new) else { return new.clone() };
    let removed = before.iter().filter(|(key, value)| !now.contains_key(*key) && !is_nothing(value));
    let removed = removed.map(|(key, _)| (key.clone(), Value::Null));
    let kept = now.iter().map(|(key, value)| (key.clone(), merged_over(&old[key], value)));
    Value::Object(removed.chain(kept).collect())
}

/// `ends`: the pod goes into a terminal phase, which alone makes us say why it is disrupted.
fn condition_changes(before: &Value, now: &Value, ends: bool) -> Vec<Value> {
    fn all(list: &Value) -> impl Iterator<Item = &Value> {
        list.as_array().into_iter().flatten()
    }
    let mut changes = Vec::new();
    let is_own = |condition: &&Value| {
        let type_ = condition["type"].as_str().unwrap_or_default();
        OWN_CONDITIONS.contains(&type_) && (type_ != DISRUPTION || ends)
    };
    for condition in all(now).filter(is_own) {
        let old = all(before).find(|old| old["type"] == condition["type"]);
        let mut new = condition.clone();
        if let Some(old) = old
            && old["status"] == new["status"]
            && !old["lastTransitionTime"].is_null()
        {
            // It has not turned, whenever this agent has begun to look.
            new["lastTransitionTime"] = old["lastTransitionTime"].clone();
        }
        let same = |field: &str, old: &Value| {
            old[field] == new[field] || (is_nothing(&old[field]) && is_nothing(&new[field]))
        };
        let fields = ["status", "reason", "message", "lastTransitionTime", "observedGeneration"];
        if old.is_none_or(|old| !fields.iter().all(|field| same(field, old))) {
            if let Some(old) = old {
                remove_absent(old, &mut new);
            }
            changes.push(new);
        }
    }
    let told: BTreeSet<&str> = all(now).filter_map(|condition| condition["type"].as_str()).collect();
    for old in all(before).filter_map(|old| old["type"].as_str()) {
        if PASSING_CONDITIONS.contains(&old) && !told.contains(old) {
            changes.push(json!({"type": old, "$patch": "delete"}));
        }
    }
    changes
}

/// Removes what the server's condition `old` says and `new` does not: a field that a merge does not name keeps its value, so a
/// condition would keep the reason and message of its former status.
fn remove_absent(old: &Value, new: &mut Value) {
    for field in ["reason", "message", "observedGeneration"] {
        if !is_nothing(&old[field]) && is_nothing(&new[field]) {
            new[field] = Value::Null;
        }
    }
}

/// Whether the pod of the server is to be deleted: that was asked for, it is over, and nothing of it is left here
/// (pod-lifecycle.md §14.6).
pub fn may_be_deleted(live: &Value, finished: bool) -> bool {
    finished && !live["metadata"]["deletionTimestamp"].is_null() && is_terminal(&live["status"]["phase"])
}

/// What is said with a deletion that is not graceful, of the object with this UID alone.
pub fn delete_now(uid: &str) -> Value {
    json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
}

/// What the mirror of a static pod on the server has to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mirror {
    /// There is none, or it is to be made anew.
    Make {
        /// The one there has to go first.
        instead: bool,
    },
    /// It is this pod's.
    Stands,
    /// A pod of the name that is no mirror: it is left alone.
    Foreign,
    /// None is made for a pod that is ending.
    NotAnyMore,
}

/// What has to become of the mirror (pod-lifecycle.md §3): `live` is the pod of the name on the server.
pub fn judge_mirror(live: Option<&Value>, ours: &Value) -> Mirror {
    let ending = !ours["metadata"]["deletionTimestamp"].is_null();
    let Some(live) = live else {
        return if ending { Mirror::NotAnyMore } else { Mirror::Make { instead: false } };
    };
    let Some(mirror) = live["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str() else {
        return Mirror::Foreign;
    };
    let going = !live["metadata"]["deletionTimestamp"].is_null();
    let hash = ours["metadata"]["annotations"][annotations::CONFIG_HASH].as_str();
    match (going || Some(mirror) != hash, ending) {
        (false, _) => Mirror::Stands,
        (true, false) => Mirror::Make { instead: true },
        (true, true) => Mirror::NotAnyMore,
    }
}

/// The mirror of a static pod, which the Node owns.
pub fn mirror_of(ours: &Value, node_name: &str, node_uid: &str) -> Value {
    let mut pod = ours.clone();
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

/// Whether a status is that of a pod which was refused at admission: such a status has no conditions, and no other final status
/// is without (pod-lifecycle.md §15.3).
fn is_rejected(status: &Value) -> bool {
    status["phase"] == "Failed"
        && is_nothing(&status["conditions"])
        && is_nothing(&status["containerStatuses"])
}

/// Adds the addresses of the node to a pod's status where the agent tells none, but not to that of a rejected pod.
pub fn add_host_addresses(pod: &mut Value, node: &Value) {
    let addresses = Vec::<NodeAddress>::deserialize(&node["status"]["addresses"]).unwrap_or_default();
    let ips: Vec<Value> = host_ips(&addresses).iter().map(|ip| Value::from(ip.to_string())).collect();
    let (Some(first), true) = (ips.first(), pod["status"].is_object()) else { return };
    let host_network = pod["spec"]["hostNetwork"] == true;
    let list: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    let status = &mut pod["status"];
    if is_rejected(status) {
        return;
    }
    if is_nothing(&status["hostIP"]) {
        status["hostIP"] = first.clone();
        status["hostIPs"] = list.clone().into();
    }
    if host_network && is_nothing(&status["podIP"]) {
        status["podIP"] = first.clone();
        status["podIPs"] = list.into();
    }
}

#[cfg(test)]
#[path = "patch_tests.rs"]
mod tests;
