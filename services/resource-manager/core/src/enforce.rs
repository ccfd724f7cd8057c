//! Node allocatable: the limits of the `kubepods` cgroup and of the reserved cgroups (runtime-and-resources.md §9).

use std::collections::{BTreeMap, BTreeSet};

use crate::desire::Amounts;
use crate::values::{CgroupSetting, shares_of_milli};

/// Which cgroup is limited, as `enforceNodeAllocatable` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EnforceTarget {
    /// The cgroup of all pods.
    Pods,
    /// The cgroup of the node's own services for Kubernetes.
    KubeReserved,
    /// The cgroup of the rest of the node.
    SystemReserved,
}

/// Which resources of a cgroup are limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnforceScope {
    /// All reserved resources.
    All,
    /// Only CPU, which is compressible.
    Compressible,
}

/// The cgroups that `enforceNodeAllocatable` names; `none` and unknown words name no cgroup.
pub fn enforce_targets(words: &[String]) -> BTreeMap<EnforceTarget, EnforceScope> {
    let mut targets = BTreeMap::new();
    for word in words {
        let (target, scope) = match word.as_str() {
            "pods" => (EnforceTarget::Pods, EnforceScope::All),
            "kube-reserved" => (EnforceTarget::KubeReserved, EnforceScope::All),
            "system-reserved" => (EnforceTarget::SystemReserved, EnforceScope::All),
            "kube-reserved-compressible" => (EnforceTarget::KubeReserved, EnforceScope::Compressible),
            "system-reserved-compressible" => (EnforceTarget::SystemReserved, EnforceScope::Compressible),
            _ => continue,
        };
        targets.insert(target, scope);
    }
    targets
}

/// The limits of one cgroup; none is no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Thousandths of a CPU, as weight.
    pub cpu_milli: Option<u64>,
    /// Bytes.
    pub memory: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Bytes by size of a page (`2Mi`).
    pub huge_pages: BTreeMap<String, u64>,
}

/// The limits of all pods together: capacity less reservations. What the eviction thresholds keep free is not subtracted.
/// `capacity` has `pid` besides the resources of the node.
pub fn pods_limits(capacity: &Amounts, reserved: &[&Amounts]) -> Limits {
    let left = |name: &str| {
        let whole = *capacity.get(name)?;
        let taken =
            reserved.iter().filter_map(|map| map.get(name)).fold(0_i64, |sum, n| sum.saturating_add(*n));
        u64::try_from(whole.saturating_sub(taken).max(0)).ok()
    };
    Limits {
        cpu_milli: left("cpu"),
        memory: left("memory").filter(|bytes| *bytes > 0),
        pids: left("pid").filter(|count| *count > 0),
        huge_pages: huge_pages(capacity),
    }
}

fn huge_pages(capacity: &Amounts) -> BTreeMap<String, u64> {
    let sizes = capacity.iter().filter_map(|(name, amount)| Some((name.strip_prefix("hugepages-")?, amount)));
    sizes.map(|(size, amount)| (size.to_owned(), u64::try_from(*amount).unwrap_or(0))).collect()
}

/// The limits of a reserved cgroup: its reservation.
pub fn reserved_limits(reserved: &Amounts, scope: EnforceScope) -> Limits {
    let amount = |name: &str| reserved.get(name).and_then(|n| u64::try_from(*n).ok()).filter(|n| *n > 0);
    let cpu_milli = amount("cpu");
    match scope {
        EnforceScope::Compressible => Limits { cpu_milli, ..Limits::default() },
        EnforceScope::All => {
            Limits { cpu_milli, memory: amount("memory"), pids: amount("pid"), huge_pages: BTreeMap::new() }
        }
    }
}

/// The settings that put these limits in effect. A limit that is none is left unchanged.
pub fn settings(limits: &Limits) -> Vec<CgroupSetting> {
    let mut settings = Vec::new();
    settings.extend(limits.cpu_milli.map(|milli| CgroupSetting::CpuShares(shares_of_milli(milli))));
    settings.extend(limits.memory.map(|bytes| CgroupSetting::Memory(Some(bytes))));
    settings.extend(limits.pids.map(|count| CgroupSetting::Pids(Some(count))));
    let pages = limits.huge_pages.iter();
    settings
        .extend(pages.map(|(size, bytes)| CgroupSetting::HugePages { size: size.clone(), bytes: *bytes }));
    settings
}

/// The error for the first reservation above the capacity, in the kubelet's words; none when all fit.
///
/// `reserved` has everything that is withheld from pods, including what the eviction thresholds keep free. A resource that
/// `capacity` does not name is skipped.
pub fn above_capacity(capacity: &Amounts, reserved: &Amounts) -> Option<String> {
    let names: BTreeSet<&String> = reserved.keys().collect();
    names.into_iter().find_map(|name| {
        let (taken, whole) = (*reserved.get(name)?, *capacity.get(name)?);
        (taken > whole).then(|| {
            format!(
                "invalid Node Allocatable configuration. Resource \"{name}\" has a reservation of {} but capacity of {}. \
                 Expected capacity >= reservation.",
                quantity(name, taken),
                quantity(name, whole)
            )
        })
    })
}

fn quantity(name: &str, amount: i64) -> String {
    use keelson_kube_model::Quantity;
    use keelson_kube_model::quantity::QuantityFormat;
    match name {
        "cpu" => Quantity::from_milli(amount).to_string(),
        "pid" | "pods" => Quantity::from_units(amount, QuantityFormat::DecimalSi).to_string(),
        _ => Quantity::from_units(amount, QuantityFormat::BinarySi).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hierarchy::Version;

    fn amounts(list: &[(&str, i64)]) -> Amounts {
        list.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
    }

    fn texts(version: Version, limits: &Limits) -> Vec<String> {
        let settings = settings(limits);
        let writes = settings.iter().flat_map(|setting| setting.writes(version));
        writes.map(|w| format!("{}={}", w.file, w.value)).collect()
    }

    #[test]
    fn enforce_node_allocatable_words_map_to_targets_and_scopes() {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(enforce_targets(&words(&["none"])), BTreeMap::new());
        assert_eq!(enforce_targets(&words(&[])), BTreeMap::new());
        assert_eq!(
            enforce_targets(&words(&["pods", "system-reserved", "kube-reserved-compressible"])),
            [
                (EnforceTarget::Pods, EnforceScope::All),
                (EnforceTarget::KubeReserved, EnforceScope::Compressible),
                (EnforceTarget::SystemReserved, EnforceScope::All)
            ]
            .into()
        );
    }

    #[test]
    fn kubepods_limits_are_capacity_less_reservations_with_pids_and_huge_pages() {
        let capacity =
            amounts(&[("cpu", 4000), ("memory", 8 << 30), ("pid", 30000), ("hugepages-2Mi", 4 << 20)]);
        let (kube, system) = (amounts(&[("cpu", 500), ("pid", 1000)]), amounts(&[("memory", 1 << 30)]));
        let limits = pods_limits(&capacity, &[&kube, &system]);
        assert_eq!(
            texts(Version::V2, &limits),
            ["cpu.weight=137", "memory.max=7516192768", "pids.max=29000", "hugetlb.2MB.max=4194304"]
        );
        assert_eq!(
            texts(Version::V1, &limits),
            [
                "cpu.shares=3584",
                "memory.limit_in_bytes=7516192768",
                "pids.max=29000",
                "hugetlb.2MB.limit_in_bytes=4194304"
            ]
        );
        // A fully reserved machine leaves the lowest weight, and no limit of 0.
        let all = amounts(&[("cpu", 9000), ("memory", 9 << 30)]);
        let limits = pods_limits(&capacity, &[&all]);
        assert_eq!((limits.cpu_milli, limits.memory), (Some(0), None));
    }

    #[test]
    fn a_reserved_cgroup_is_limited_to_its_reservation() {
        let reserved = amounts(&[("cpu", 500), ("memory", 1 << 20), ("pid", 100), ("ephemeral-storage", 5)]);
        let all = reserved_limits(&reserved, EnforceScope::All);
        assert_eq!(
            texts(Version::V1, &all),
            ["cpu.shares=512", "memory.limit_in_bytes=1048576", "pids.max=100"]
        );
        let compressible = reserved_limits(&reserved, EnforceScope::Compressible);
        assert_eq!(texts(Version::V1, &compressible), ["cpu.shares=512"]);
        assert_eq!(reserved_limits(&Amounts::new(), EnforceScope::All), Limits::default());
    }

    #[test]
    fn a_reservation_above_capacity_is_reported_in_the_kubelets_words() {
        let capacity = amounts(&[("cpu", 2000), ("memory", 1 << 30)]);
        let none = [amounts(&[]), amounts(&[("cpu", 2000), ("memory", 1 << 30)]), amounts(&[("pid", 5)])];
        for reserved in none {
            assert_eq!(above_capacity(&capacity, &reserved), None);
        }
        assert_eq!(
            above_capacity(&capacity, &amounts(&[("cpu", 1), ("memory", 2 << 30)])).unwrap(),
            "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 2Gi but capacity of 1Gi. \
             Expected capacity >= reservation."
        );
        assert!(
            above_capacity(&capacity, &amounts(&[("cpu", 2500)]))
                .unwrap()
                .contains("2500m but capacity of 2.")
        );
    }
}
