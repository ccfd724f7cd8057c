//! Which changes of the Node's `capacity` and `allocatable` an API server is sent (node-and-api.md §9.1, §9.3).
//!
//! Both are merged by name: resources that others have added are kept. A resource that a person adds to the capacity by hand, one
//! with a domain that is not Kubernetes' own, is allocatable too, as long as it is there. Resources that the device plugins of
//! another agent have left are set to 0, since this agent does not manage them.

use serde_json::{Map, Value};

use crate::merge_patch::differing;

/// The fields of a Node's status with resource amounts by name.
pub(crate) const RESOURCE_FIELDS: [&str; 2] = ["capacity", "allocatable"];

/// Part of the version of every Keelson agent whose version is not overridden by the configuration.
const OWN_VERSION_MARK: &str = "+keelson.";

/// What has to change in `field`, one of [`RESOURCE_FIELDS`], of the server's Node.
pub(crate) fn changed_resources(field: &str, live: &Value, ours: &Value) -> Map<String, Value> {
    let (before, now) = (&live["status"][field], &ours["status"][field]);
    let mut changed = differing(before, now, |_| true);
    if knows_machine(ours) {
        // No other agent owns huge page sizes, so those that the machine does not have are removed.
        let gone = names(before).filter(|name| name.starts_with("hugepages-") && now.get(name).is_none());
        changed.extend(gone.map(|name| (name.to_owned(), Value::Null)));
    }
    let foreign = foreign_resources(live, ours).filter(|(name, amount)| before[name] != *amount);
    changed.extend(foreign.map(|(name, amount)| (name.to_owned(), amount)));
    changed
}

/// The extended resources of the server's Node that this agent does not manage, with the amount that both fields should
/// have; null for one that is not in the capacity any more.
fn foreign_resources<'a>(live: &'a Value, ours: &'a Value) -> impl Iterator<Item = (&'a str, Value)> {
    let capacity = &live["status"]["capacity"];
    let are_leftover = last_reported_by_other_agent(live, ours);
    let all = names(capacity).chain(names(&live["status"]["allocatable"]));
    let foreign = all.filter(move |name| {
        is_extended(name) && RESOURCE_FIELDS.iter().all(|field| ours["status"][field][name].is_null())
    });
    foreign.map(move |name| match &capacity[name] {
        Value::Null => (name, Value::Null),
        _ if are_leftover => (name, "0".into()),
        amount => (name, amount.clone()),
    })
}

/// Whether another agent has reported the Node last: a kubelet that this agent replaces, and whose device plugins are not here.
/// Our own report changes the version, so that this is true only once.
fn last_reported_by_other_agent(live: &Value, ours: &Value) -> bool {
    let version =
        |node: &Value| node["status"]["nodeInfo"]["kubeletVersion"].as_str().unwrap_or_default().to_owned();
    let (foreign, own) = (version(live), version(ours));
    !foreign.is_empty() && !own.is_empty() && foreign != own && !foreign.contains(OWN_VERSION_MARK)
}

/// Whether the machine is known: an unknown one has no memory, so its huge page sizes are unknown, too.
fn knows_machine(ours: &Value) -> bool {
    let memory = &ours["status"]["capacity"]["memory"];
    !memory.is_null() && memory != "0"
}

/// Whether a resource is an extended one, with a domain that is not Kubernetes' own.
fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

fn names(amounts: &Value) -> impl Iterator<Item = &str> {
    amounts.as_object().into_iter().flatten().map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::patch::{node_drifts, node_patch};

    const OURS: &str = "v1.36.2+keelson.0.1.0";

    fn node(version: &str, capacity: Value, allocatable: Value) -> Value {
        json!({"metadata": {}, "status": {
            "capacity": capacity, "allocatable": allocatable, "nodeInfo": {"kubeletVersion": version},
        }})
    }

    fn ours() -> Value {
        let amounts = json!({"cpu": "4", "memory": "8Ki"});
        node(OURS, amounts.clone(), amounts)
    }

    /// Adds amounts to our own in the server's Node, and returns what is sent of both fields.
    fn sent(version: &str, capacity: &Value, allocatable: &Value, ours: &Value) -> (Value, Value) {
        let with = |field: &str, more: &Value| {
            let mut all = ours["status"][field].as_object().cloned().unwrap_or_default();
            all.extend(more.as_object().cloned().unwrap_or_default());
            Value::from(all)
        };
        let live = node(version, with("capacity", capacity), with("allocatable", allocatable));
        let patch = node_patch(&live, ours, false).unwrap_or_default();
        (patch["status"]["capacity"].clone(), patch["status"]["allocatable"].clone())
    }

    #[test]
    fn extended_resources_left_by_a_kubelet_are_zeroed_once() {
        let (eight, zero) = (json!({"example.com/gpu": "8"}), json!({"example.com/gpu": "0"}));
        for (version, expected) in [
            ("v1.36.2", (zero.clone(), zero.clone())),
            ("v1.35.1+k3s1", (zero.clone(), zero.clone())),
            // The Node is ours already, so a person has patched it by hand.
            (OURS, (Value::Null, Value::Null)),
            ("v1.36.1+keelson.0.0.9", (Value::Null, Value::Null)),
            // No agent has reported it yet: the creator has set the amounts.
            ("", (Value::Null, Value::Null)),
        ] {
            assert_eq!(sent(version, &eight, &eight, &ours()), expected, "{version:?}");
        }
        let healthy = json!({"example.com/gpu": "7"});
        assert_eq!(sent("v1.36.2", &eight, &healthy, &ours()), (zero.clone(), zero.clone()));
        assert_eq!(sent("v1.36.2", &zero, &zero, &ours()), (Value::Null, Value::Null));
        let disguised = node("v1.36.2", json!({"memory": "8Ki"}), json!({"memory": "8Ki"}));
        assert_eq!(sent("v1.36.2", &eight, &eight, &disguised), (Value::Null, Value::Null));
    }

    #[test]
    fn own_and_native_resources_are_not_zeroed() {
        let (mut own, native) =
            (ours(), json!({"attachable-volumes-x": "9", "example.kubernetes.io/x": "9"}));
        assert_eq!(sent("v1.36.2", &native, &native, &own), (Value::Null, Value::Null));
        for field in RESOURCE_FIELDS {
            own["status"][field]["example.com/gpu"] = "2".into();
        }
        let eight = json!({"example.com/gpu": "8"});
        let two = json!({"example.com/gpu": "2"});
        assert_eq!(sent("v1.36.2", &eight, &eight, &own), (two.clone(), two));
    }

    #[test]
    fn an_extended_resource_added_by_hand_is_allocatable_while_it_exists() {
        let (five, none) = (json!({"example.com/dongle": "5"}), json!({}));
        assert_eq!(sent(OURS, &five, &none, &ours()), (Value::Null, five.clone()));
        assert_eq!(
            sent(OURS, &five, &json!({"example.com/dongle": "3"}), &ours()),
            (Value::Null, five.clone())
        );
        assert_eq!(sent(OURS, &none, &five, &ours()), (Value::Null, json!({"example.com/dongle": null})));
        let with = |capacity: Value, allocatable: Value| {
            let mut live = ours();
            live["status"]["capacity"]["example.com/dongle"] = capacity;
            live["status"]["allocatable"]["example.com/dongle"] = allocatable;
            live
        };
        assert!(node_drifts(&with("5".into(), "0".into()), &ours(), false));
        assert!(!node_drifts(&with("5".into(), "5".into()), &ours(), false));
    }

    #[test]
    fn an_unknown_machine_removes_no_hugepages_size() {
        let pages = json!({"hugepages-1Gi": "2Gi"});
        let gone = json!({"hugepages-1Gi": null});
        assert_eq!(sent(OURS, &pages, &pages, &ours()), (gone.clone(), gone));
        let unknown = json!({"cpu": "0", "memory": "0"});
        let unknown = node(OURS, unknown.clone(), unknown);
        assert_eq!(sent(OURS, &pages, &pages, &unknown), (Value::Null, Value::Null));
    }
}
