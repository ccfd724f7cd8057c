//! The resources reserved from pods: `kubeReserved` + `systemReserved` + the hard eviction thresholds.

use std::collections::{BTreeMap, BTreeSet};

use keelson_kube_model::Quantity;

use crate::document::{Reader, Sourced};
use crate::flags::flag_for_field;
use crate::resolve::Resolver;

/// The keys of `kubeReserved` and `systemReserved`.
const RESERVABLE: &[&str] = &["cpu", "memory", "ephemeral-storage", "pid"];
/// The signals of eviction thresholds.
pub(crate) const SIGNALS: &[&str] = &[
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
/// The thresholds of a KubeletConfiguration that sets none.
pub(crate) const DEFAULT_THRESHOLDS: &[(&str, &str)] = &[
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];
/// The thresholds that reduce node allocatable, each with its resource.
const ALLOCATABLE_SIGNALS: &[(&str, &str)] =
    &[("memory.available", "memory"), ("nodefs.available", "ephemeral-storage")];

/// The capacity that percentages refer to, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    pub(crate) memory: u64,
    pub(crate) nodefs: u64,
    /// Whether the hard thresholds reduce node allocatable.
    pub(crate) reserves_thresholds: bool,
}

/// The reserved resources, and where they come from.
#[derive(Debug)]
pub(crate) struct Reservations {
    /// The sum per resource.
    pub(crate) all: Sourced<BTreeMap<String, String>>,
    /// `kubeReserved`.
    pub(crate) kube: BTreeMap<String, String>,
    /// `systemReserved`.
    pub(crate) system: BTreeMap<String, String>,
    /// The CPUs of `reservedSystemCPUs`.
    pub(crate) cpus: Option<Sourced<BTreeSet<u16>>>,
    /// The hard thresholds in force with their origin, and the defaults that they dropped.
    pub(crate) hard: Sourced<BTreeMap<String, String>>,
    pub(crate) dropped: Vec<&'static str>,
}

/// Reads the fields and adds them up per resource.
pub(crate) fn read_reserved(reader: &mut Reader<'_>, capacity: Capacity) -> Reservations {
    let mut origins = Vec::new();
    let cpus = reserved_cpus(reader, &mut origins);
    let named = cpus.as_ref().map_or(0, |cpus| cpus.value.len());
    let mut kube = reservation(reader, "kubeReserved", &mut origins);
    let mut system = reservation(reader, "systemReserved", &mut origins);
    if let (Some(_), Ok(named)) = (&cpus, i64::try_from(named)) {
        // The CPUs of `reservedSystemCPUs` replace both CPU reservations (node-and-api.md §4.5).
        kube.remove("cpu");
        system.insert("cpu".to_owned(), Quantity::from_milli(named * 1000));
    }
    let mut sums: BTreeMap<String, Quantity> = BTreeMap::new();
    for (key, amount) in kube.iter().chain(&system) {
        *sums.entry(key.clone()).or_default() += *amount;
    }
    let (thresholds, dropped) = thresholds(reader, &mut origins);
    for (signal, resource) in ALLOCATABLE_SIGNALS.iter().filter(|_| capacity.reserves_thresholds) {
        let Some(one) = thresholds.iter().find(|one| one.field.ends_with(&format!(".{signal}"))) else {
            continue;
        };
        let whole = if *resource == "memory" { capacity.memory } else { capacity.nodefs };
        // Both turn the threshold off, so nothing is reserved for it.
        if matches!(one.value.as_str(), "0%" | "100%") {
            continue;
        }
        if let Some(amount) = threshold(&one.value, whole) {
            *sums.entry((*resource).to_owned()).or_default() += amount;
        }
    }
    let all =
        Sourced { value: to_strings(sums), origin: origins.join(", "), field: "evictionHard".to_owned() };
    check_capacity(reader, &all, capacity);
    let hard = thresholds.iter().filter_map(|one| {
        let (_, signal) = one.field.split_once('.')?;
        Some((signal.to_owned(), one.value.clone()))
    });
    let hard =
        Sourced { value: hard.collect(), origin: all.origin.clone(), field: "evictionHard".to_owned() };
    Reservations { all, kube: to_strings(kube), system: to_strings(system), cpus, hard, dropped }
}

fn to_strings(amounts: BTreeMap<String, Quantity>) -> BTreeMap<String, String> {
    amounts.into_iter().map(|(key, amount)| (key, amount.to_string())).collect()
}

fn reservation(
    reader: &mut Reader<'_>,
    field: &str,
    origins: &mut Vec<String>,
) -> BTreeMap<String, Quantity> {
    let mut amounts = BTreeMap::new();
    let Some(map) = reader.map(field) else { return amounts };
    origins.push(map.origin.clone());
    for (key, text) in &map.value {
        let one = entry(&map, key, text);
        match Quantity::parse(text) {
            _ if !RESERVABLE.contains(&key.as_str()) => {
                let keys = RESERVABLE.join(", ");
                reader.refuse(&one, format!("cannot reserve {key:?} resource; the keys are {keys}"));
            }
            Ok(amount) if !amount.is_negative() => {
                amounts.insert(key.clone(), amount);
            }
            _ => {
                let flag = flag_for_field(field).unwrap_or(field);
                let remedy = format!(
                    "--{flag} value failed to parse: this must be a quantity of at least 0, such as 500m or 1Gi"
                );
                reader.refuse(&one, remedy);
            }
        }
    }
    amounts
}

/// The CPUs of `reservedSystemCPUs`.
fn reserved_cpus(reader: &mut Reader<'_>, origins: &mut Vec<String>) -> Option<Sourced<BTreeSet<u16>>> {
    let list = reader.string("reservedSystemCPUs").filter(|list| !list.value.is_empty())?;
    let Some(cpus) = cpu_set(&list.value) else {
        reader.refuse(&list, "this must be a list of CPUs such as 0-1,4");
        return None;
    };
    origins.push(list.origin.clone());
    Some(list.map(|_| cpus))
}

/// Parses a list of numbers such as `0-1,4`, which is also the kernel's format (cpuset(7)).
fn cpu_set(text: &str) -> Option<BTreeSet<u16>> {
    let mut cpus = BTreeSet::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse::<u16>().ok()?, last.trim().parse::<u16>().ok()?);
        if first > last {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Formats numbers as such a list.
fn cpu_list(cpus: &BTreeSet<u16>) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => ranges.push((*cpu, *cpu)),
        }
    }
    let range = |(first, last): (u16, u16)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    ranges.into_iter().map(range).collect::<Vec<_>>().join(",")
}

/// Refuses CPUs that are not online, if the online CPUs are known.
pub(crate) fn check_online(resolver: &mut Resolver<'_>, cpus: Option<&Sourced<BTreeSet<u16>>>) {
    let (Some(cpus), Some(online)) = (cpus, cpu_set(&resolver.host.online_cpus)) else { return };
    let missing: BTreeSet<u16> = cpus.value.difference(&online).copied().collect();
    if !missing.is_empty() {
        let remedy = format!(
            "the CPUs {} are not online on this machine; it has {}",
            cpu_list(&missing),
            cpu_list(&online)
        );
        resolver.refuse(&cpus.clone().map(|cpus| cpu_list(&cpus)), remedy);
    }
}

/// Refuses reservations above the capacity. resource-manager checks the resources whose capacity init does not know.
fn check_capacity(reader: &mut Reader<'_>, all: &Sourced<BTreeMap<String, String>>, capacity: Capacity) {
    for (resource, whole) in [("memory", capacity.memory), ("ephemeral-storage", capacity.nodefs)] {
        let Some(amount) = all.value.get(resource).and_then(|text| Quantity::parse(text).ok()) else {
            continue;
        };
        let whole = Quantity::from_bytes(whole);
        if !whole.is_zero() && amount > whole {
            let value =
                Sourced { value: amount.to_string(), origin: all.origin.clone(), field: resource.to_owned() };
            reader.refuse(
                &value,
                format!(
                    "invalid Node Allocatable configuration. Resource \"{resource}\" has a reservation of {amount} but \
                     capacity of {whole}. Expected capacity >= reservation."
                ),
            );
        }
    }
}

/// The hard thresholds in force, one per signal, validated.
fn thresholds(
    reader: &mut Reader<'_>,
    origins: &mut Vec<String>,
) -> (Vec<Sourced<String>>, Vec<&'static str>) {
    // The thresholds that it adds are in the document already.
    let _ = reader.boolean("mergeDefaultEvictionSettings");
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
    let mut dropped = Vec::new();
    for (signal, text) in DEFAULT_THRESHOLDS {
        let field = format!("evictionHard.{signal}");
        if list.iter().any(|one| one.field == field) {
            continue;
        }
        if set.is_none() {
            list.push(Sourced { value: (*text).to_owned(), origin: String::new(), field });
        } else {
            dropped.push(*signal);
        }
    }
    (list, dropped)
}

pub(crate) fn entry(map: &Sourced<BTreeMap<String, String>>, key: &str, text: &str) -> Sourced<String> {
    Sourced { value: text.to_owned(), origin: map.origin.clone(), field: format!("{}.{key}", map.field) }
}

/// A threshold as a quantity; a percentage refers to `whole` bytes.
pub(crate) fn threshold(text: &str, whole: u64) -> Option<Quantity> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().ok().filter(|p| (0.0..=100.0).contains(p))?;
        // Truncated, as by the kubelet; the lost digits above 2^53 bytes do not matter here.
        return Some(Quantity::from_bytes((whole as f64 * percent / 100.0) as u64));
    }
    Quantity::parse(text).ok().filter(|amount| !amount.is_negative())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;
    use crate::resolve::tests::{host, kubelet, run};
    use crate::resolve::{Flags, Host};
    use serde_json::json;

    const CAPACITY: Capacity = Capacity { memory: 8 << 30, nodefs: 100 << 30, reserves_thresholds: true };

    fn read(root: serde_json::Value) -> (BTreeMap<String, String>, Vec<String>) {
        let document = Document { root: root.as_object().unwrap().clone(), ..Document::default() };
        let mut errors = Vec::new();
        let sums = read_reserved(&mut Reader::new(&document, &mut errors), CAPACITY).all.value;
        (sums, errors.iter().map(ToString::to_string).collect())
    }

    fn sums(root: serde_json::Value) -> Vec<String> {
        let (sums, errors) = read(root);
        assert!(errors.is_empty(), "{errors:?}");
        sums.iter().map(|(k, v)| format!("{k}={v}")).collect()
    }

    #[test]
    fn default_hard_eviction_thresholds_are_reserved() {
        assert_eq!(sums(json!({})), ["ephemeral-storage=10Gi", "memory=100Mi"]);
    }

    #[test]
    fn reservations_and_hard_eviction_thresholds_add_up() {
        let root = json!({
            "kubeReserved": {"cpu": "100m", "memory": "200Mi", "pid": "1000"},
            "systemReserved": {"cpu": "1", "memory": "100Mi", "ephemeral-storage": "1Gi"},
            "evictionHard": {"memory.available": "5%", "nodefs.available": "2Gi"},
        });
        // 300 MiB and 5 % of 8 GiB, in bytes.
        assert_eq!(sums(root), ["cpu=1100m", "ephemeral-storage=3Gi", "memory=744069529", "pid=1k"]);
    }

    #[test]
    fn one_hard_eviction_threshold_drops_the_other_defaults() {
        let root = json!({"evictionHard": {"memory.available": "1Gi"}});
        assert_eq!(sums(root), ["memory=1Gi"]);
    }

    #[test]
    fn dropped_default_thresholds_are_recorded() {
        let read = |root: serde_json::Value| {
            let document = Document { root: root.as_object().unwrap().clone(), ..Document::default() };
            let reservations = read_reserved(&mut Reader::new(&document, &mut Vec::new()), CAPACITY);
            (reservations.hard.value.len(), reservations.dropped)
        };
        assert_eq!(read(json!({})), (5, vec![]));
        let (hard, dropped) = read(json!({"evictionHard": {"memory.available": "1Gi"}}));
        assert_eq!((hard, dropped.len()), (1, 4));
        assert!(dropped.contains(&"nodefs.inodesFree"), "{dropped:?}");
    }

    #[test]
    fn reserved_system_cpus_replace_the_cpu_reservations() {
        let root = json!({
            "kubeReserved": {"cpu": "3", "memory": "1Gi"}, "systemReserved": {"cpu": "1"},
            "reservedSystemCPUs": "0-1,4,1", "evictionHard": {"memory.available": "0%"},
        });
        assert_eq!(sums(root), ["cpu=3", "memory=1Gi"]);
        let (_, errors) = read(json!({"reservedSystemCPUs": "3-1"}));
        assert!(errors[0].contains("reservedSystemCPUs"), "{errors:?}");
    }

    #[test]
    fn offline_cpus_cannot_be_reserved() {
        for (named, online, missing) in [
            ("0-1,4", "0-7\n", None),
            (
                "0-1,4",
                "0-3",
                Some(
                    "\"0-1,4\" (kubelet.yaml:3; --reserved-cpus): the CPUs 4 are not online on this machine; it has 0-3",
                ),
            ),
            ("7-65535,1", "0,2-7\n", Some("the CPUs 1,8-65535 are not online on this machine; it has 0,2-7")),
            ("8-9", "", None),
        ] {
            let host = Host { online_cpus: online.to_owned(), ..host() };
            let file = kubelet(json!({"reservedSystemCPUs": named}));
            match (run(&Flags::default(), Some(&file), None, &host), missing) {
                (Ok(_), None) => {}
                (Err(errors), Some(part)) => {
                    assert!(errors.len() == 1 && errors[0].contains(part), "{named}: {errors:?}");
                }
                (result, _) => panic!("{named} of {online}: {result:?}"),
            }
        }
    }

    #[test]
    fn allocatable_ignore_eviction_flag_excludes_thresholds() {
        let file = kubelet(json!({"kubeReserved": {"memory": "1Gi"}}));
        for (uses, reserved) in
            [("true", &["memory=1Gi"][..]), ("true,false", &["ephemeral-storage=10Gi", "memory=1124Mi"])]
        {
            let others = [("experimental-allocatable-ignore-eviction", uses.to_owned())].into();
            let resolved = run(&Flags { others, ..Flags::default() }, Some(&file), None, &host()).unwrap();
            let found: Vec<String> =
                resolved.config.resources.reserved.iter().map(|(k, v)| format!("{k}={v}")).collect();
            assert_eq!(found, reserved, "{uses}");
            assert_eq!(
                resolved.config.resources.eviction.hard.len(),
                5,
                "they are still eviction thresholds"
            );
        }
    }

    #[test]
    fn reservations_above_the_capacity_are_refused() {
        let (_, errors) = read(json!({"systemReserved": {"memory": "9Gi", "cpu": "900"}}));
        assert_eq!(errors.len(), 1, "{errors:?}");
        let text = "Resource \"memory\" has a reservation of 9316Mi but capacity of 8Gi. Expected capacity >= reservation.";
        assert!(errors[0].contains(text), "{errors:?}");
    }

    #[test]
    fn invalid_reservations_are_reported() {
        let (_, errors) = read(json!({
            "kubeReserved": {"gpu": "1", "cpu": "-1", "memory": "lots"},
            "evictionHard": {"memory.free": "1Gi", "nodefs.available": "110%"},
        }));
        assert_eq!(errors.len(), 5, "{errors:#?}");
        for text in ["kubeReserved.gpu", "kubeReserved.cpu = \"-1\"", "\"lots\"", "memory.free", "\"110%\""] {
            assert!(errors.iter().any(|p| p.contains(text)), "{text}: {errors:#?}");
        }
    }
}
