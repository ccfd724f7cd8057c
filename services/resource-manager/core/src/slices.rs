//! What systemd is told of a slice (systemd.resource-control(5), runtime-and-resources.md §4.1, §8.1, §9).
//!
//! systemd writes the files of the controllers that it manages, and writes them anew when it reloads: what it was not
//! told would be lost then. Huge pages are not among them.

use crate::hierarchy::Version;
use crate::values::{Bound, MAX_SHARES, MIN_SHARES, weight_of_shares};

/// What a property says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PropertyValue {
    /// D-Bus type `b`.
    Bool(bool),
    /// D-Bus type `t`.
    U64(u64),
    /// D-Bus type `s`.
    Text(String),
    /// D-Bus type `as`.
    Texts(Vec<String>),
    /// D-Bus type `ay`.
    Bytes(Vec<u8>),
}

/// A property of a unit, by its name in D-Bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Property {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub value: PropertyValue,
}

const fn property(name: &'static str, value: PropertyValue) -> Property {
    Property { name, value }
}

const fn number(name: &'static str, value: u64) -> Property {
    property(name, PropertyValue::U64(value))
}

/// No limit.
const INFINITY: u64 = u64::MAX;
/// Microseconds in a second: quotas are told per second, whatever the period.
const SECOND_US: u64 = 1_000_000;
/// systemd rounds a quota to hundredths of a CPU; told as such, the figure is never rounded to less than was asked for.
const QUOTA_STEP_US: u64 = 10_000;

/// What a slice of the agent is when it is made, besides what it is bound by: one whose controllers are enabled, that
/// holds its parent, and that does not end with the first step of a shutdown.
pub fn new_slice(version: Version, name: &str) -> Vec<Property> {
    let mut properties = vec![
        property("Description", PropertyValue::Text(format!("Kubernetes pods, {name}"))),
        property("DefaultDependencies", PropertyValue::Bool(false)),
    ];
    let accounting: &[&'static str] = match version {
        Version::V1 => &["CPUAccounting", "MemoryAccounting", "BlockIOAccounting", "TasksAccounting"],
        Version::V2 => &["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"],
    };
    properties.extend(accounting.iter().map(|name| property(name, PropertyValue::Bool(true))));
    let stem = name.strip_suffix(".slice").unwrap_or(name);
    if let Some((above, _)) = stem.rsplit_once('-').filter(|(above, _)| !above.is_empty()) {
        properties.push(property("Wants", PropertyValue::Texts(vec![format!("{above}.slice")])));
    }
    properties
}

/// What systemd is told of a bound; nothing of one that it does not manage.
pub fn properties(version: Version, bounds: &[Bound]) -> Vec<Property> {
    bounds.iter().flat_map(|bound| of_bound(version, bound)).collect()
}

fn of_bound(version: Version, bound: &Bound) -> Vec<Property> {
    match (bound, version) {
        (Bound::CpuShares(shares), Version::V1) => {
            vec![number("CPUShares", (*shares).clamp(MIN_SHARES, MAX_SHARES))]
        }
        (Bound::CpuShares(shares), Version::V2) => vec![number("CPUWeight", weight_of_shares(*shares))],
        (Bound::CpuQuota { quota_us, period_us }, _) => {
            let period = (*period_us).max(1);
            let per_second = quota_us.map_or(INFINITY, |quota| {
                let exact = quota.saturating_mul(SECOND_US).div_ceil(period);
                // The last step is no quota.
                exact.max(1).checked_next_multiple_of(QUOTA_STEP_US).unwrap_or(INFINITY)
            });
            vec![number("CPUQuotaPerSecUSec", per_second), number("CPUQuotaPeriodUSec", period)]
        }
        (Bound::Memory(limit), Version::V1) => vec![number("MemoryLimit", limit.unwrap_or(INFINITY))],
        (Bound::Memory(limit), Version::V2) => vec![number("MemoryMax", limit.unwrap_or(INFINITY))],
        (Bound::Pids(limit), _) => vec![number("TasksMax", limit.unwrap_or(INFINITY))],
        (Bound::HugePages { .. }, _) => Vec::new(),
    }
}

/// `AllowedCPUs` of the CPUs of a list such as `0-3,8`: with it the controller cpuset stays enabled when systemd reloads.
/// None when the list names no CPU.
pub fn allowed_cpus(list: &str) -> Option<Property> {
    let mut mask: Vec<u8> = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        for cpu in first..=last {
            let (byte, bit) = (usize::from(cpu / 8), cpu % 8);
            if mask.len() <= byte {
                mask.resize(byte + 1, 0);
            }
            mask[byte] |= 1 << bit;
        }
    }
    (!mask.is_empty()).then(|| property("AllowedCPUs", PropertyValue::Bytes(mask)))
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn texts(properties: &[Property]) -> Vec<String> {
        properties.iter().map(|p| format!("{}={:?}", p.name, p.value)).collect()
    }

    #[test]
    fn bounds_are_told_in_the_terms_of_each_version() {
        let bounds = [
            Bound::CpuShares(1024),
            Bound::CpuQuota { quota_us: Some(25_000), period_us: 50_000 },
            Bound::Memory(Some(4096)),
            Bound::Pids(Some(64)),
            Bound::HugePages { size: "2Mi".into(), bytes: 1 },
        ];
        let quota = ["CPUQuotaPerSecUSec=U64(500000)", "CPUQuotaPeriodUSec=U64(50000)"];
        assert_eq!(
            texts(&properties(Version::V1, &bounds)),
            ["CPUShares=U64(1024)", quota[0], quota[1], "MemoryLimit=U64(4096)", "TasksMax=U64(64)"]
        );
        assert_eq!(
            texts(&properties(Version::V2, &bounds)),
            ["CPUWeight=U64(39)", quota[0], quota[1], "MemoryMax=U64(4096)", "TasksMax=U64(64)"]
        );
    }

    #[test]
    fn a_limit_that_is_none_is_undone() {
        let bounds = [
            Bound::CpuShares(0),
            Bound::CpuQuota { quota_us: None, period_us: 100_000 },
            Bound::Memory(None),
            Bound::Pids(None),
        ];
        let none = format!("U64({})", u64::MAX);
        let told = [
            "CPUShares=U64(2)".to_owned(),
            format!("CPUQuotaPerSecUSec={none}"),
            "CPUQuotaPeriodUSec=U64(100000)".to_owned(),
            format!("MemoryLimit={none}"),
            format!("TasksMax={none}"),
        ];
        assert_eq!(texts(&properties(Version::V1, &bounds)), told);
    }

    #[test]
    fn a_quota_is_rounded_up_to_what_systemd_keeps() {
        for (quota, period, per_second) in [
            (5_000, 100_000, 50_000),
            (5_001, 100_000, 60_000),
            (1_000, 100_000, 10_000),
            (1, 1_000_000, 10_000),
            (u64::MAX / 2, 1, u64::MAX),
        ] {
            let quota = Bound::CpuQuota { quota_us: Some(quota), period_us: period };
            let told = properties(Version::V2, &[quota]);
            assert_eq!(told[0].value, PropertyValue::U64(per_second), "{per_second}");
        }
    }

    #[test]
    fn a_new_slice_holds_the_one_that_it_lies_in() {
        let wants = |name: &str| {
            let made = new_slice(Version::V2, name);
            made.into_iter().find(|p| p.name == "Wants").map(|p| p.value)
        };
        assert_eq!(wants("kubepods.slice"), None);
        assert_eq!(
            wants("kubepods-burstable-pod1_2.slice"),
            Some(PropertyValue::Texts(vec!["kubepods-burstable.slice".into()]))
        );
        for (version, io) in [(Version::V1, "BlockIOAccounting"), (Version::V2, "IOAccounting")] {
            let told = texts(&new_slice(version, "kubepods.slice"));
            for line in [format!("{io}=Bool(true)"), "DefaultDependencies=Bool(false)".to_owned()] {
                assert!(told.contains(&line), "{version:?} {line} {told:?}");
            }
        }
    }

    #[test]
    fn cpus_are_a_mask_of_bits() {
        for (list, mask) in [
            ("0", Some(vec![1])),
            ("0-3\n", Some(vec![15])),
            ("0-1,8,15", Some(vec![3, 0x81])),
            ("16", Some(vec![0, 0, 1])),
            ("", None),
            ("a-b", None),
        ] {
            let told = allowed_cpus(list).map(|p| p.value);
            assert_eq!(told, mask.map(PropertyValue::Bytes), "{list:?}");
        }
    }

    #[test]
    fn a_quota_is_never_told_as_less() {
        let reached = &Reached::default();
        let quota = prop_oneof![1u64..10_000_000, 1u64..10_000];
        let (period, whole) = (1_000u64..1_000_001, any::<bool>());
        proptest!(ProptestConfig::with_cases(512), |(quota in quota, period in period, whole in whole)| {
            // Hundredths of a CPU are hardly ever met by chance.
            let hundredth = period / 100;
            let (quota, period) =
                if whole { ((quota % 500 + 1) * hundredth, hundredth * 100) } else { (quota, period) };
            let bound = Bound::CpuQuota { quota_us: Some(quota), period_us: period };
            let told = properties(Version::V2, &[bound]);
            let PropertyValue::U64(per_second) = told[0].value else { panic!() };
            prop_assert!(u128::from(per_second) * u128::from(period) >= u128::from(quota) * 1_000_000);
            prop_assert_eq!(per_second % 10_000, 0);
            let exact = u128::from(per_second) * u128::from(period) == u128::from(quota) * 1_000_000;
            reached.case([
                ("as it is", exact),
                ("rounded up", !exact),
                ("less than a hundredth of a CPU", quota < hundredth),
                ("more than a CPU", quota > period),
            ]);
        });
        // The rarest: "less than a hundredth of a CPU", in one case of 10.
        reached.assert_each();
    }
}
