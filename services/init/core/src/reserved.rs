//! What of the machine is kept from pods: `kubeReserved` + `systemReserved` + the hard eviction thresholds.

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use crate::document::{Reader, Sourced};

/// The keys of `kubeReserved` and `systemReserved`.
const RESERVABLE: &[&str] = &["cpu", "memory", "ephemeral-storage", "pid"];
/// The signals of `evictionHard`.
const SIGNALS: &[&str] = &[
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
    "allocatableMemory.available",
];
/// What a KubeletConfiguration that sets no threshold stands for, as far as it is reserved.
const DEFAULT_THRESHOLDS: &[(&str, &str)] = &[("memory.available", "100Mi"), ("nodefs.available", "10%")];
/// The thresholds that are taken from what pods may use, with the resource that they are taken from.
const TAKEN: &[(&str, &str)] = &[("memory.available", "memory"), ("nodefs.available", "ephemeral-storage")];

/// What percentages are of, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    pub(crate) memory: u64,
    pub(crate) nodefs: u64,
}

/// Reads the three fields and adds them up per resource.
pub(crate) fn read_reserved(
    reader: &mut Reader<'_>,
    capacity: Capacity,
) -> Sourced<BTreeMap<String, String>> {
    let mut sums: BTreeMap<String, Quantity> = BTreeMap::new();
    let mut origins = Vec::new();
    for field in ["kubeReserved", "systemReserved"] {
        let Some(map) = reader.map(field) else { continue };
        origins.push(map.origin.clone());
        for (key, text) in &map.value {
            let one = entry(&map, key, text);
            match Quantity::parse(text) {
                _ if !RESERVABLE.contains(&key.as_str()) => {
                    reader.refuse(
                        &one,
                        format!("this cannot be reserved; the keys are {}", RESERVABLE.join(", ")),
                    );
                }
                Ok(amount) if !amount.is_negative() => *sums.entry(key.clone()).or_default() += amount,
                _ => reader.refuse(&one, "this must be a quantity of at least 0, such as 500m or 1Gi"),
            }
        }
    }
    let thresholds = thresholds(reader, &mut origins);
    for (signal, resource) in TAKEN {
        let Some(one) = thresholds.iter().find(|one| one.field.ends_with(&format!(".{signal}"))) else {
            continue;
        };
        let whole = if *resource == "memory" { capacity.memory } else { capacity.nodefs };
        if let Some(amount) = threshold(&one.value, whole) {
            *sums.entry((*resource).to_owned()).or_default() += amount;
        }
    }
    let value = sums.into_iter().map(|(key, amount)| (key, amount.to_string())).collect();
    Sourced { value, origin: origins.join(", "), field: "evictionHard".to_owned() }
}

/// The thresholds in force, one per signal, checked.
fn thresholds(reader: &mut Reader<'_>, origins: &mut Vec<String>) -> Vec<Sourced<String>> {
    let merge = reader.boolean("mergeDefaultEvictionSettings").is_some_and(|m| m.value);
    let set = reader.map("evictionHard");
    let mut list = Vec::new();
    if let Some(map) = &set {
        origins.push(map.origin.clone());
        for (signal, text) in &map.value {
            let one = entry(map, signal, text);
            if !SIGNALS.contains(&signal.as_str()) {
                reader
                    .refuse(&one, format!("there is no such signal; the signals are {}", SIGNALS.join(", ")));
            } else if threshold(text, 0).is_none() {
                reader.refuse(&one, "this must be a quantity such as 100Mi or a percentage from 0% to 100%");
            } else {
                list.push(one);
            }
        }
    }
    if set.is_none() || merge {
        for (signal, text) in DEFAULT_THRESHOLDS {
            let field = format!("evictionHard.{signal}");
            if !list.iter().any(|one| one.field == field) {
                list.push(Sourced { value: (*text).to_owned(), origin: String::new(), field });
            }
        }
    }
    list
}

fn entry(map: &Sourced<BTreeMap<String, String>>, key: &str, text: &str) -> Sourced<String> {
    Sourced { value: text.to_owned(), origin: map.origin.clone(), field: format!("{}.{key}", map.field) }
}

/// A threshold as an amount; a percentage is of `whole` bytes.
fn threshold(text: &str, whole: u64) -> Option<Quantity> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().ok().filter(|p| (0.0..=100.0).contains(p))?;
        // Truncated as the kubelet does: the loss of digits above 2^53 bytes does not matter here.
        return Some(Quantity::from_bytes((whole as f64 * percent / 100.0) as u64));
    }
    Quantity::parse(text).ok().filter(|amount| !amount.is_negative())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;
    use serde_json::json;

    const CAPACITY: Capacity = Capacity { memory: 8 << 30, nodefs: 100 << 30 };

    fn read(root: serde_json::Value) -> (BTreeMap<String, String>, Vec<String>) {
        let document = Document { root: root.as_object().unwrap().clone(), ..Document::default() };
        let mut problems = Vec::new();
        let sums = read_reserved(&mut Reader::new(&document, &mut problems), CAPACITY).value;
        (sums, problems.iter().map(ToString::to_string).collect())
    }

    fn sums(root: serde_json::Value) -> Vec<String> {
        let (sums, problems) = read(root);
        assert!(problems.is_empty(), "{problems:?}");
        sums.iter().map(|(k, v)| format!("{k}={v}")).collect()
    }

    #[test]
    fn the_default_thresholds_are_reserved() {
        assert_eq!(sums(json!({})), ["ephemeral-storage=10Gi", "memory=100Mi"]);
    }

    #[test]
    fn reservations_and_thresholds_add_up() {
        let root = json!({
            "kubeReserved": {"cpu": "100m", "memory": "200Mi", "pid": "1000"},
            "systemReserved": {"cpu": "1", "memory": "100Mi", "ephemeral-storage": "1Gi"},
            "evictionHard": {"memory.available": "5%", "nodefs.available": "2Gi"},
        });
        // 300 MiB and 5 % of 8 GiB, in bytes.
        assert_eq!(sums(root), ["cpu=1100m", "ephemeral-storage=3Gi", "memory=744069529", "pid=1k"]);
    }

    #[test]
    fn one_threshold_drops_the_other_defaults_unless_they_are_merged() {
        let root = json!({"evictionHard": {"memory.available": "1Gi"}});
        assert_eq!(sums(root), ["memory=1Gi"]);
        let root = json!({"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": true});
        assert_eq!(sums(root), ["ephemeral-storage=10Gi", "memory=1Gi"]);
    }

    #[test]
    fn what_cannot_be_reserved_is_named() {
        let (_, problems) = read(json!({
            "kubeReserved": {"gpu": "1", "cpu": "-1", "memory": "lots"},
            "evictionHard": {"memory.free": "1Gi", "nodefs.available": "110%"},
        }));
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for text in ["kubeReserved.gpu", "kubeReserved.cpu = \"-1\"", "\"lots\"", "memory.free", "\"110%\""] {
            assert!(problems.iter().any(|p| p.contains(text)), "{text}: {problems:#?}");
        }
    }
}
