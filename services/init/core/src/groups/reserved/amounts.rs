//! The reserved amounts, read from the file and added up per resource.

use std::collections::{BTreeMap, BTreeSet};

use keelson_config::DEFAULT_THRESHOLDS;
use keelson_kube_model::Quantity;

use super::cpus::reserved_cpus;
use crate::defaults::EVICTION_HARD;
use crate::document::{ConfigError, Sourced};
use crate::flags::flag_for_field;
use crate::reader::Reader;
use crate::thresholds::{threshold, thresholds_by_signal};

/// The keys of `kubeReserved` and `systemReserved`.
const RESERVABLE: &[&str] = &["cpu", "memory", "ephemeral-storage", "pid"];
/// The thresholds that reduce node allocatable, each with its resource.
const ALLOCATABLE_SIGNALS: &[(&str, &str)] =
    &[("memory.available", "memory"), ("nodefs.available", "ephemeral-storage")];

/// The capacity that percentages refer to, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capacity {
    pub(super) memory: u64,
    pub(super) nodefs: u64,
    /// Whether the hard thresholds reduce node allocatable.
    pub(super) reserves_thresholds: bool,
}

/// The reserved amounts, and where they come from.
#[derive(Debug)]
pub(super) struct Amounts {
    /// The origins of all fields that reserve something.
    pub(super) origin: String,
    /// `kubeReserved`.
    pub(super) kube: BTreeMap<String, Quantity>,
    /// `systemReserved`.
    pub(super) system: BTreeMap<String, Quantity>,
    /// The CPUs of `reservedSystemCPUs`.
    pub(super) cpus: Option<Sourced<BTreeSet<u16>>>,
    /// The hard thresholds in force.
    pub(super) hard: BTreeMap<String, String>,
    /// The default thresholds that they dropped.
    pub(super) dropped: Vec<&'static str>,
}

impl Amounts {
    /// Reads the fields.
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let mut origins = Vec::new();
        let cpus = reserved_cpus(reader, &mut origins);
        let mut kube = reservation(reader, "kubeReserved", &mut origins);
        let mut system = reservation(reader, "systemReserved", &mut origins);
        if let Some(Ok(named)) = cpus.as_ref().map(|cpus| i64::try_from(cpus.value.len())) {
            // The CPUs of `reservedSystemCPUs` replace both CPU reservations (node-and-api.md §4.5).
            kube.remove("cpu");
            system.insert("cpu".to_owned(), Quantity::from_milli(named * 1000));
        }
        let (hard, dropped) = hard_thresholds(reader, &mut origins);
        Self { origin: origins.join(", "), kube, system, cpus, hard, dropped }
    }

    /// A value with the origins of all amounts.
    pub(super) fn sourced<T>(&self, value: T) -> Sourced<T> {
        Sourced { value, origin: self.origin.clone(), field: EVICTION_HARD.to_owned() }
    }

    /// The sum per resource.
    pub(super) fn sums(&self, capacity: Capacity) -> BTreeMap<String, Quantity> {
        let mut sums: BTreeMap<String, Quantity> = BTreeMap::new();
        for (key, amount) in self.kube.iter().chain(&self.system) {
            *sums.entry(key.clone()).or_default() += *amount;
        }
        for (signal, resource) in ALLOCATABLE_SIGNALS.iter().filter(|_| capacity.reserves_thresholds) {
            let Some(text) = self.hard.get(*signal) else { continue };
            let whole = if *resource == "memory" { capacity.memory } else { capacity.nodefs };
            // Both turn the threshold off, so nothing is reserved for it.
            if matches!(text.as_str(), "0%" | "100%") {
                continue;
            }
            if let Some(amount) = threshold(text, whole) {
                *sums.entry((*resource).to_owned()).or_default() += amount;
            }
        }
        sums
    }

    /// An error for each sum above the capacity. resource-manager checks the resources whose capacity init does not know.
    pub(super) fn above(&self, sums: &BTreeMap<String, Quantity>, capacity: Capacity) -> Vec<ConfigError> {
        let mut errors = Vec::new();
        for (resource, whole) in [("memory", capacity.memory), ("ephemeral-storage", capacity.nodefs)] {
            let Some(amount) = sums.get(resource) else { continue };
            let whole = Quantity::from_bytes(whole);
            if whole.is_zero() || *amount <= whole {
                continue;
            }
            let value = Sourced {
                value: amount.to_string(),
                origin: self.origin.clone(),
                field: resource.to_owned(),
            };
            errors.push(value.error(format!(
                "invalid Node Allocatable configuration. Resource \"{resource}\" has a reservation of {amount} but \
                 capacity of {whole}. Expected capacity >= reservation."
            )));
        }
        errors
    }
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
        let one = map.entry(key, text);
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

/// The hard thresholds in force, and the defaults that the file drops.
fn hard_thresholds(
    reader: &mut Reader<'_>,
    origins: &mut Vec<String>,
) -> (BTreeMap<String, String>, Vec<&'static str>) {
    // The thresholds that it adds are in the document already.
    let _ = reader.boolean("mergeDefaultEvictionSettings");
    let defaults = DEFAULT_THRESHOLDS.iter().map(|(signal, text)| (*signal, *text));
    let Some(set) = thresholds_by_signal(reader, EVICTION_HARD) else {
        let defaults = defaults.map(|(signal, text)| (signal.to_owned(), text.to_owned()));
        return (defaults.collect(), Vec::new());
    };
    origins.push(set.origin);
    let dropped = defaults.map(|(signal, _)| signal).filter(|signal| !set.value.contains_key(*signal));
    (set.value.clone(), dropped.collect())
}
