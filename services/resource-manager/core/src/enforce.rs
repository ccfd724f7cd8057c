//! What the root of all pods and the reserved cgroups are bound to (runtime-and-resources.md §9).

use std::collections::{BTreeMap, BTreeSet};

use crate::desire::Amounts;
use crate::values::{Bound, shares_of_milli};

/// What is bound, by the words of `enforceNodeAllocatable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// All pods together.
    Pods,
    /// The cgroup of the node's own services for Kubernetes.
    KubeReserved,
    /// The cgroup of the rest of the node.
    SystemReserved,
}

/// What a part is bound in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Everything that is reserved.
    All,
    /// Only CPU, which can be taken back at any time.
    Compressible,
}

/// What `enforceNodeAllocatable` asks for; `none` and words that nobody knows ask for nothing.
pub fn parts(words: &[String]) -> BTreeMap<Part, Extent> {
    let mut parts = BTreeMap::new();
    for word in words {
        let (part, extent) = match word.as_str() {
            "pods" => (Part::Pods, Extent::All),
            "kube-reserved" => (Part::KubeReserved, Extent::All),
            "system-reserved" => (Part::SystemReserved, Extent::All),
            "kube-reserved-compressible" => (Part::KubeReserved, Extent::Compressible),
            "system-reserved-compressible" => (Part::SystemReserved, Extent::Compressible),
            _ => continue,
        };
        parts.insert(part, extent);
    }
    parts
}

/// The limits of one cgroup. What is none is not bound.
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

/// What all pods together may use: what there is less what is reserved, without what eviction keeps free. `capacity`
/// has `pid` beside the resources of the node.
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

/// What the cgroup of a reservation is bound to: what is reserved for it.
pub fn reserved_limits(reserved: &Amounts, extent: Extent) -> Limits {
    let amount = |name: &str| reserved.get(name).and_then(|n| u64::try_from(*n).ok()).filter(|n| *n > 0);
    let cpu_milli = amount("cpu");
    match extent {
        Extent::Compressible => Limits { cpu_milli, ..Limits::default() },
        Extent::All => {
            Limits { cpu_milli, memory: amount("memory"), pids: amount("pid"), huge_pages: BTreeMap::new() }
        }
    }
}

/// What a cgroup with these limits is bound by. A limit that is none is left as it is.
pub fn bounds(limits: &Limits) -> Vec<Bound> {
    let mut bounds = Vec::new();
    bounds.extend(limits.cpu_milli.map(|milli| Bound::CpuShares(shares_of_milli(milli))));
    bounds.extend(limits.memory.map(|bytes| Bound::Memory(Some(bytes))));
    bounds.extend(limits.pids.map(|count| Bound::Pids(Some(count))));
    let pages = limits.huge_pages.iter();
    bounds.extend(pages.map(|(size, bytes)| Bound::HugePages { size: size.clone(), bytes: *bytes }));
    bounds
}

/// A reservation that there is not enough for, in the kubelet's words.
///
/// `reserved` has everything that is kept from pods, what eviction keeps free included. A resource that the machine
/// has nothing of to tell is passed over.
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
        let bounds = bounds(limits);
        let writes = bounds.iter().flat_map(|bound| bound.writes(version));
        writes.map(|w| format!("{}={}", w.file, w.value)).collect()
    }

    #[test]
    fn the_words_of_the_configuration_name_parts_and_how_far_they_are_bound() {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(parts(&words(&["none"])), BTreeMap::new());
        assert_eq!(parts(&words(&[])), BTreeMap::new());
        assert_eq!(
            parts(&words(&["pods", "system-reserved", "kube-reserved-compressible"])),
            [
                (Part::Pods, Extent::All),
                (Part::KubeReserved, Extent::Compressible),
                (Part::SystemReserved, Extent::All)
            ]
            .into()
        );
    }

    #[test]
    fn all_pods_together_get_what_is_not_reserved_with_processes_and_huge_pages() {
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
        // A machine that is reserved as a whole leaves the least weight, and no limit of 0 that nothing fits in.
        let all = amounts(&[("cpu", 9000), ("memory", 9 << 30)]);
        let limits = pods_limits(&capacity, &[&all]);
        assert_eq!((limits.cpu_milli, limits.memory), (Some(0), None));
    }

    #[test]
    fn a_reserved_cgroup_gets_what_is_reserved_for_it() {
        let reserved = amounts(&[("cpu", 500), ("memory", 1 << 20), ("pid", 100), ("ephemeral-storage", 5)]);
        let all = reserved_limits(&reserved, Extent::All);
        assert_eq!(
            texts(Version::V1, &all),
            ["cpu.shares=512", "memory.limit_in_bytes=1048576", "pids.max=100"]
        );
        let little = reserved_limits(&reserved, Extent::Compressible);
        assert_eq!(texts(Version::V1, &little), ["cpu.shares=512"]);
        assert_eq!(reserved_limits(&Amounts::new(), Extent::All), Limits::default());
    }

    #[test]
    fn a_reservation_that_there_is_not_enough_for_is_told_in_the_kubelets_words() {
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
