//! `reservedSystemCPUs`.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::document::Sourced;
use crate::outcome::Outcome;
use crate::reader::Reader;

const FIELD: &str = "reservedSystemCPUs";

/// The CPUs that the file reserves.
pub(super) fn reserved_cpus(
    reader: &mut Reader<'_>,
    origins: &mut Vec<String>,
) -> Option<Sourced<BTreeSet<u16>>> {
    let list = reader.string(FIELD).filter(|list| !list.value.is_empty())?;
    let Some(cpus) = cpu_set(&list.value) else {
        reader.refuse(&list, "this must be a list of CPUs such as 0-1,4");
        return None;
    };
    origins.push(list.origin.clone());
    Some(list.map(|_| cpus))
}

/// Reserved CPUs replace the CPU shares of these cgroups.
pub(super) fn check_cgroups(reader: &mut Reader<'_>) {
    let named = |path| reader.peek(path).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if named("systemReservedCgroup") || named("kubeReservedCgroup") {
        let remedy = "this field excludes systemReservedCgroup and kubeReservedCgroup";
        let is_set = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        reader.refuse_if(FIELD, is_set, remedy);
    }
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
pub(super) fn check_online(out: &mut Outcome<'_>, cpus: Option<&Sourced<BTreeSet<u16>>>) {
    let (Some(cpus), Some(online)) = (cpus, cpu_set(&out.host.online_cpus)) else { return };
    let missing: BTreeSet<u16> = cpus.value.difference(&online).copied().collect();
    if !missing.is_empty() {
        let remedy = format!(
            "the CPUs {} are not online on this machine; it has {}",
            cpu_list(&missing),
            cpu_list(&online)
        );
        out.refuse(&cpus.clone().map(|cpus| cpu_list(&cpus)), remedy);
    }
}
