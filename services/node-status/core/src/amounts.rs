//! What an API server has to be told of `capacity` and `allocatable` of the Node (node-and-api.md §9.1, §9.3).
//!
//! Both are merged by name: what others have added stays. A resource that a person adds to the capacity by hand, one with a domain
//! that is not Kubernetes' own, is allocatable too, as long as it is there. What the device plugins of another agent have left
//! is 0, since nobody here manages it.

use serde_json::{Map, Value};

use crate::patch::differing;

/// The fields of a Node's status that have amounts by name.
pub(crate) const AMOUNTS: [&str; 2] = ["capacity", "allocatable"];

/// Stands in the version of each agent of this kind that was not told to give itself out for another one.
const OWN_VERSION: &str = "+keelson.";

/// What of `field`, one of [`AMOUNTS`], has to change at the Node that the server has.
pub(crate) fn changed_amounts(field: &str, live: &Value, ours: &Value) -> Map<String, Value> {
    let (before, now) = (&live["status"][field], &ours["status"][field]);
    let mut changed = differing(before, now, |_| true);
    if knows_machine(ours) {
        // Sizes that the machine does not have are nobody else's.
        let gone = names(before).filter(|name| name.starts_with("hugepages-") && now.get(name).is_none());
        changed.extend(gone.map(|name| (name.to_owned(), Value::Null)));
    }
    let theirs = of_others(live, ours).filter(|(name, amount)| before[name] != *amount);
    changed.extend(theirs.map(|(name, amount)| (name.to_owned(), amount)));
    changed
}

/// The extended resources of the server's Node that are not ours to count, with the amount that both fields have of each; null where
/// there is none any more.
fn of_others<'a>(live: &'a Value, ours: &'a Value) -> impl Iterator<Item = (&'a str, Value)> {
    let capacity = &live["status"]["capacity"];
    let are_left = was_of_another_agent(live, ours);
    let all = names(capacity).chain(names(&live["status"]["allocatable"]));
    let theirs = all.filter(move |name| {
        is_extended(name) && AMOUNTS.iter().all(|field| ours["status"][field][name].is_null())
    });
    theirs.map(move |name| match &capacity[name] {
        Value::Null => (name, Value::Null),
        _ if are_left => (name, "0".into()),
        amount => (name, amount.clone()),
    })
}

/// Whether another agent has told of the Node last: a kubelet whose place this one takes, and whose device plugins are not here.
/// Our own word makes it ours, so that this is so once.
fn was_of_another_agent(live: &Value, ours: &Value) -> bool {
    let version =
        |node: &Value| node["status"]["nodeInfo"]["kubeletVersion"].as_str().unwrap_or_default().to_owned();
    let (theirs, own) = (version(live), version(ours));
    !theirs.is_empty() && !own.is_empty() && theirs != own && !theirs.contains(OWN_VERSION)
}

/// An unknown machine has no memory, and says nothing of its pages.
fn knows_machine(ours: &Value) -> bool {
    let memory = &ours["status"]["capacity"]["memory"];
    !memory.is_null() && memory != "0"
}

/// Whether a resource is of somebody's own kind.
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

    /// What the server's Node has beside our own amounts, and what is sent of both fields.
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
    fn what_the_device_plugins_of_a_kubelet_have_left_is_zero_once() {
        let (eight, zero) = (json!({"example.com/gpu": "8"}), json!({"example.com/gpu": "0"}));
        for (version, expected) in [
            ("v1.36.2", (zero.clone(), zero.clone())),
            ("v1.35.1+k3s1", (zero.clone(), zero.clone())),
            // It is ours since, so that somebody has patched it by hand.
            (OURS, (Value::Null, Value::Null)),
            ("v1.36.1+keelson.0.0.9", (Value::Null, Value::Null)),
            // Nobody has told of it yet: whoever made it has.
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
    fn what_is_ours_or_of_kubernetes_is_not_zeroed() {
        let (mut own, native) =
            (ours(), json!({"attachable-volumes-x": "9", "example.kubernetes.io/x": "9"}));
        assert_eq!(sent("v1.36.2", &native, &native, &own), (Value::Null, Value::Null));
        for field in AMOUNTS {
            own["status"][field]["example.com/gpu"] = "2".into();
        }
        let eight = json!({"example.com/gpu": "8"});
        let two = json!({"example.com/gpu": "2"});
        assert_eq!(sent("v1.36.2", &eight, &eight, &own), (two.clone(), two));
    }

    #[test]
    fn what_a_person_adds_to_the_capacity_is_allocatable_as_long_as_it_is_there() {
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
    fn an_unknown_machine_takes_no_size_of_huge_pages_away() {
        let pages = json!({"hugepages-1Gi": "2Gi"});
        let gone = json!({"hugepages-1Gi": null});
        assert_eq!(sent(OURS, &pages, &pages, &ours()), (gone.clone(), gone));
        let unknown = json!({"cpu": "0", "memory": "0"});
        let unknown = node(OURS, unknown.clone(), unknown);
        assert_eq!(sent(OURS, &pages, &pages, &unknown), (Value::Null, Value::Null));
    }
}
