//! The systemd properties of a slice (systemd.resource-control(5), runtime-and-resources.md §4.1, §8.1, §9).
//!
//! systemd writes the files of the controllers that it manages, and writes them again when it reloads: settings without a
//! property would be lost then. It does not manage huge pages.

use crate::hierarchy::Version;
use crate::values::{CgroupSetting, MAX_SHARES, MIN_SHARES, weight_of_shares};

/// The value of a property.
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

/// A property of a unit, by its D-Bus name.
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
/// Microseconds in a second: systemd takes quotas per second, independent of the period.
const SECOND_US: u64 = 1_000_000;
/// systemd rounds quotas to hundredths of a CPU. Quotas are rounded up to that here, so that they never become smaller.
const QUOTA_STEP_US: u64 = 10_000;

/// The properties of a new slice of the agent, besides its limits: its controllers are enabled, it wants its parent slice, and
/// it is not stopped at the first step of a shutdown.
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

/// The properties for these settings; none for a setting that systemd does not manage.
pub fn properties(version: Version, settings: &[CgroupSetting]) -> Vec<Property> {
    settings.iter().flat_map(|setting| setting_properties(version, setting)).collect()
}

fn setting_properties(version: Version, setting: &CgroupSetting) -> Vec<Property> {
    match (setting, version) {
        (CgroupSetting::CpuShares(shares), Version::V1) => {
            vec![number("CPUShares", (*shares).clamp(MIN_SHARES, MAX_SHARES))]
        }
        (CgroupSetting::CpuShares(shares), Version::V2) => {
            vec![number("CPUWeight", weight_of_shares(*shares))]
        }
        (CgroupSetting::CpuQuota { quota_us, period_us }, _) => {
            let period = (*period_us).max(1);
            let per_second = quota_us.map_or(INFINITY, |quota| {
                let exact = quota.saturating_mul(SECOND_US).div_ceil(period);
                // Above the last step it means no quota.
                exact.max(1).checked_next_multiple_of(QUOTA_STEP_US).unwrap_or(INFINITY)
            });
            vec![number("CPUQuotaPerSecUSec", per_second), number("CPUQuotaPeriodUSec", period)]
        }
        (CgroupSetting::Memory(limit), Version::V1) => vec![number("MemoryLimit", limit.unwrap_or(INFINITY))],
        (CgroupSetting::Memory(limit), Version::V2) => vec![number("MemoryMax", limit.unwrap_or(INFINITY))],
        (CgroupSetting::Pids(limit), _) => vec![number("TasksMax", limit.unwrap_or(INFINITY))],
        (CgroupSetting::HugePages { .. }, _) => Vec::new(),
    }
}

/// `AllowedCPUs` for a CPU list such as `0-3,8`: it keeps the cpuset controller enabled when systemd reloads. None when the
/// list names no CPU.
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
    fn systemd_properties_follow_the_cgroup_version() {
        let settings = [
            CgroupSetting::CpuShares(1024),
            CgroupSetting::CpuQuota { quota_us: Some(25_000), period_us: 50_000 },
            CgroupSetting::Memory(Some(4096)),
            CgroupSetting::Pids(Some(64)),
            CgroupSetting::HugePages { size: "2Mi".into(), bytes: 1 },
        ];
        let quota = ["CPUQuotaPerSecUSec=U64(500000)", "CPUQuotaPeriodUSec=U64(50000)"];
        assert_eq!(
            texts(&properties(Version::V1, &settings)),
            ["CPUShares=U64(1024)", quota[0], quota[1], "MemoryLimit=U64(4096)", "TasksMax=U64(64)"]
        );
        assert_eq!(
            texts(&properties(Version::V2, &settings)),
            ["CPUWeight=U64(39)", quota[0], quota[1], "MemoryMax=U64(4096)", "TasksMax=U64(64)"]
        );
    }

    #[test]
    fn absent_limits_become_infinity_in_systemd() {
        let settings = [
            CgroupSetting::CpuShares(0),
            CgroupSetting::CpuQuota { quota_us: None, period_us: 100_000 },
            CgroupSetting::Memory(None),
            CgroupSetting::Pids(None),
        ];
        let none = format!("U64({})", u64::MAX);
        let expected = [
            "CPUShares=U64(2)".to_owned(),
            format!("CPUQuotaPerSecUSec={none}"),
            "CPUQuotaPeriodUSec=U64(100000)".to_owned(),
            format!("MemoryLimit={none}"),
            format!("TasksMax={none}"),
        ];
        assert_eq!(texts(&properties(Version::V1, &settings)), expected);
    }

    #[test]
    fn cpu_quotas_are_rounded_up_to_systemds_granularity() {
        for (quota, period, per_second) in [
            (5_000, 100_000, 50_000),
            (5_001, 100_000, 60_000),
            (1_000, 100_000, 10_000),
            (1, 1_000_000, 10_000),
            (u64::MAX / 2, 1, u64::MAX),
        ] {
            let quota = CgroupSetting::CpuQuota { quota_us: Some(quota), period_us: period };
            let properties = properties(Version::V2, &[quota]);
            assert_eq!(properties[0].value, PropertyValue::U64(per_second), "{per_second}");
        }
    }

    #[test]
    fn a_new_slice_wants_its_parent_slice() {
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
            let found = texts(&new_slice(version, "kubepods.slice"));
            for line in [format!("{io}=Bool(true)"), "DefaultDependencies=Bool(false)".to_owned()] {
                assert!(found.contains(&line), "{version:?} {line} {found:?}");
            }
        }
    }

    #[test]
    fn allowed_cpus_is_a_bit_mask() {
        for (list, mask) in [
            ("0", Some(vec![1])),
            ("0-3\n", Some(vec![15])),
            ("0-1,8,15", Some(vec![3, 0x81])),
            ("16", Some(vec![0, 0, 1])),
            ("", None),
            ("a-b", None),
        ] {
            let value = allowed_cpus(list).map(|p| p.value);
            assert_eq!(value, mask.map(PropertyValue::Bytes), "{list:?}");
        }
    }

    #[test]
    fn systemd_cpu_quotas_are_never_below_the_requested_quota() {
        let reached = &Reached::default();
        let quota = prop_oneof![1u64..10_000_000, 1u64..10_000];
        let (period, whole) = (1_000u64..1_000_001, any::<bool>());
        proptest!(ProptestConfig::with_cases(512), |(quota in quota, period in period, whole in whole)| {
            // Random values hardly ever hit whole hundredths of a CPU.
            let hundredth = period / 100;
            let (quota, period) =
                if whole { ((quota % 500 + 1) * hundredth, hundredth * 100) } else { (quota, period) };
            let setting = CgroupSetting::CpuQuota { quota_us: Some(quota), period_us: period };
            let properties = properties(Version::V2, &[setting]);
            let PropertyValue::U64(per_second) = properties[0].value else { panic!() };
            prop_assert!(u128::from(per_second) * u128::from(period) >= u128::from(quota) * 1_000_000);
            prop_assert_eq!(per_second % 10_000, 0);
            let exact = u128::from(per_second) * u128::from(period) == u128::from(quota) * 1_000_000;
            reached.case([
                ("exact", exact),
                ("rounded up", !exact),
                ("less than a hundredth of a CPU", quota < hundredth),
                ("more than a CPU", quota > period),
            ]);
        });
        // The rarest: "less than a hundredth of a CPU", in one case of 10.
        reached.assert_each();
    }
}
