//! The limits of a cgroup, and what is written to which of its files (runtime-and-resources.md §4.1, §8.3, §8.4).

use crate::desire::PodCgroup;
use crate::hierarchy::Version;

/// The minimum of `cpu.shares`.
pub const MIN_SHARES: u64 = 2;
/// The maximum of `cpu.shares`.
pub const MAX_SHARES: u64 = 262_144;
/// The kernel's default CFS period, in microseconds.
const KERNEL_PERIOD_US: u64 = 100_000;

/// One write to a file of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The controller that the file belongs to.
    pub controller: &'static str,
    /// The file.
    pub file: String,
    /// The text.
    pub value: String,
    /// A new cgroup has this value by default: it is written only to reset another one, and a missing file is no error.
    pub initial: bool,
}

fn write(controller: &'static str, file: impl Into<String>, value: impl ToString, initial: bool) -> Write {
    Write { controller, file: file.into(), value: value.to_string(), initial }
}

/// `cpu.shares` for a CPU request in millicores.
pub fn shares_of_milli(milli: u64) -> u64 {
    (milli.saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// `cpu.weight` for `cpu.shares`.
pub fn weight_of_shares(shares: u64) -> u64 {
    let shares = shares.clamp(MIN_SHARES, MAX_SHARES);
    1 + ((shares - 2) * 9999) / 262_142
}

/// One setting of a cgroup, written by the agent to files or set by systemd as a property of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupSetting {
    /// The CPU weight relative to its siblings, as `cpu.shares` of v1.
    CpuShares(u64),
    /// Microseconds of CPU time per period of so many microseconds; none is no quota.
    CpuQuota {
        /// `cpu.cfs_quota_us`.
        quota_us: Option<u64>,
        /// `cpu.cfs_period_us`.
        period_us: u64,
    },
    /// Bytes; none is no limit.
    Memory(Option<u64>),
    /// Processes and threads; none is no limit.
    Pids(Option<u64>),
    /// Bytes of huge pages of a size as in the name of the resource (`2Mi`).
    HugePages {
        /// The size.
        size: String,
        /// The limit.
        bytes: u64,
    },
}

impl CgroupSetting {
    /// The writes to files, in this order.
    pub fn writes(&self, version: Version) -> Vec<Write> {
        match self {
            Self::CpuShares(shares) => vec![cpu_weight(version, *shares)],
            Self::CpuQuota { quota_us, period_us } => cpu_quota(version, *quota_us, *period_us),
            Self::Memory(limit) => vec![memory_limit(version, *limit)],
            Self::Pids(limit) => {
                let text = limit.map_or_else(|| "max".to_owned(), |count| count.to_string());
                vec![write("pids", "pids.max", text, limit.is_none())]
            }
            Self::HugePages { size, bytes } => vec![huge_page_limit(version, size, *bytes)],
        }
    }
}

fn cpu_weight(version: Version, shares: u64) -> Write {
    match version {
        Version::V1 => write("cpu", "cpu.shares", shares.clamp(MIN_SHARES, MAX_SHARES), false),
        Version::V2 => write("cpu", "cpu.weight", weight_of_shares(shares), false),
    }
}

fn cpu_quota(version: Version, quota: Option<u64>, period: u64) -> Vec<Write> {
    match version {
        Version::V1 => {
            // The kernel refuses a period that does not fit the current quota.
            let mut writes = vec![write("cpu", "cpu.cfs_quota_us", -1, true)];
            let is_initial = period == KERNEL_PERIOD_US || quota.is_none();
            writes.push(write("cpu", "cpu.cfs_period_us", period, is_initial));
            writes.extend(quota.map(|quota| write("cpu", "cpu.cfs_quota_us", quota, false)));
            writes
        }
        Version::V2 => vec![match quota {
            Some(quota) => write("cpu", "cpu.max", format!("{quota} {period}"), false),
            None => write("cpu", "cpu.max", format!("max {period}"), true),
        }],
    }
}

fn memory_limit(version: Version, limit: Option<u64>) -> Write {
    let (file, unlimited) = match version {
        Version::V1 => ("memory.limit_in_bytes", "-1"),
        Version::V2 => ("memory.max", "max"),
    };
    let text = limit.map_or_else(|| unlimited.to_owned(), |bytes| bytes.to_string());
    write("memory", file, text, limit.is_none())
}

fn huge_page_limit(version: Version, size: &str, bytes: u64) -> Write {
    // The kernel writes 2MB where Kubernetes writes 2Mi.
    let size = size.replace('i', "B");
    let file = match version {
        Version::V1 => format!("hugetlb.{size}.limit_in_bytes"),
        Version::V2 => format!("hugetlb.{size}.max"),
    };
    write("hugetlb", file, bytes, false)
}

/// Limits of a pod's cgroup that come from the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeLimits {
    /// `podPidsLimit`, if set.
    pub pids: Option<u64>,
    /// The huge page sizes of this kernel, as in the resource names.
    pub page_sizes: Vec<String>,
}

/// The settings of a pod's cgroup.
pub fn pod_settings(values: &PodCgroup, node: &NodeLimits) -> Vec<CgroupSetting> {
    let mut settings = vec![
        CgroupSetting::CpuShares(values.cpu_shares),
        CgroupSetting::CpuQuota {
            quota_us: values.cpu_quota_us,
            period_us: values.cpu_period_us.unwrap_or(KERNEL_PERIOD_US),
        },
        CgroupSetting::Memory(values.memory_limit),
        CgroupSetting::Pids(node.pids),
    ];
    settings.extend(node.page_sizes.iter().map(|size| CgroupSetting::HugePages {
        size: size.clone(),
        bytes: values.huge_pages.get(size).copied().unwrap_or(0),
    }));
    settings
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn texts(version: Version, settings: &[CgroupSetting], all: bool) -> Vec<String> {
        let writes = settings.iter().flat_map(|setting| setting.writes(version));
        writes.filter(|w| all || !w.initial).map(|w| format!("{}={}", w.file, w.value)).collect()
    }

    fn pids(limit: Option<u64>) -> NodeLimits {
        NodeLimits { pids: limit, ..NodeLimits::default() }
    }

    #[test]
    fn every_huge_page_size_is_limited_and_unnamed_sizes_to_zero() {
        let node = NodeLimits { pids: None, page_sizes: vec!["1Gi".into(), "2Mi".into(), "64Ki".into()] };
        let huge_pages = [("2Mi".to_owned(), 4 << 20)].into();
        let values = PodCgroup { cpu_shares: 2, huge_pages, ..PodCgroup::default() };
        assert_eq!(
            texts(Version::V1, &pod_settings(&values, &node), false)[1..],
            [
                "hugetlb.1GB.limit_in_bytes=0",
                "hugetlb.2MB.limit_in_bytes=4194304",
                "hugetlb.64KB.limit_in_bytes=0"
            ]
        );
        assert_eq!(
            texts(Version::V2, &pod_settings(&values, &node), false)[1..],
            ["hugetlb.1GB.max=0", "hugetlb.2MB.max=4194304", "hugetlb.64KB.max=0"]
        );
    }

    #[test]
    fn cpu_shares_are_the_clamped_request() {
        for (milli, shares) in
            [(0, 2), (1, 2), (100, 102), (1000, 1024), (256_000, 262_144), (u64::MAX, 262_144)]
        {
            assert_eq!(shares_of_milli(milli), shares, "{milli}");
        }
    }

    #[test]
    fn cpu_weight_is_linear_in_cpu_shares() {
        for (shares, weight) in [(0, 1), (2, 1), (1024, 39), (262_144, 10_000), (u64::MAX, 10_000)] {
            assert_eq!(weight_of_shares(shares), weight, "{shares}");
        }
    }

    #[test]
    fn a_new_best_effort_cgroup_needs_one_write() {
        let values = PodCgroup { cpu_shares: 2, ..PodCgroup::default() };
        assert_eq!(texts(Version::V1, &pod_settings(&values, &pids(None)), false), ["cpu.shares=2"]);
        assert_eq!(texts(Version::V2, &pod_settings(&values, &pids(None)), false), ["cpu.weight=1"]);
    }

    #[test]
    fn cgroup_limits_are_written_to_the_files_of_each_version() {
        let values = PodCgroup {
            cpu_shares: 1024,
            cpu_quota_us: Some(25_000),
            cpu_period_us: Some(50_000),
            memory_limit: Some(1 << 20),
            ..PodCgroup::default()
        };
        assert_eq!(
            texts(Version::V1, &pod_settings(&values, &pids(Some(64))), false),
            [
                "cpu.shares=1024",
                "cpu.cfs_period_us=50000",
                "cpu.cfs_quota_us=25000",
                "memory.limit_in_bytes=1048576",
                "pids.max=64"
            ]
        );
        assert_eq!(
            texts(Version::V2, &pod_settings(&values, &pids(Some(64))), false),
            ["cpu.weight=39", "cpu.max=25000 50000", "memory.max=1048576", "pids.max=64"]
        );
    }

    #[test]
    fn removed_cgroup_limits_are_reset() {
        let values = PodCgroup { cpu_shares: 2, ..PodCgroup::default() };
        assert_eq!(
            texts(Version::V1, &pod_settings(&values, &pids(None)), true),
            [
                "cpu.shares=2",
                "cpu.cfs_quota_us=-1",
                "cpu.cfs_period_us=100000",
                "memory.limit_in_bytes=-1",
                "pids.max=max"
            ]
        );
        assert_eq!(
            texts(Version::V2, &pod_settings(&values, &pids(None)), true),
            ["cpu.weight=1", "cpu.max=max 100000", "memory.max=max", "pids.max=max"]
        );
    }

    #[test]
    fn the_default_cfs_period_is_not_written_to_new_cgroups() {
        let values = |quota, period| PodCgroup {
            cpu_shares: 2,
            cpu_quota_us: quota,
            cpu_period_us: period,
            ..PodCgroup::default()
        };
        for (quota, period, written) in [
            (Some(5_000), None, vec!["cpu.shares=2", "cpu.cfs_quota_us=5000"]),
            (Some(5_000), Some(100_000), vec!["cpu.shares=2", "cpu.cfs_quota_us=5000"]),
            (None, Some(50_000), vec!["cpu.shares=2"]),
        ] {
            let settings = pod_settings(&values(quota, period), &pids(None));
            assert_eq!(texts(Version::V1, &settings, false), written, "{quota:?} {period:?}");
        }
    }

    #[test]
    fn cpu_weight_is_monotonic_in_cpu_shares() {
        let reached = &Reached::default();
        let less = prop_oneof![0u64..8, 0u64..300_000];
        let apart = prop_oneof![0u64..40, 0u64..300_000];
        proptest!(ProptestConfig::with_cases(512), |(less in less, apart in apart)| {
            let more = less + apart;
            let (of_less, of_more) = (weight_of_shares(less), weight_of_shares(more));
            prop_assert!(of_less <= of_more);
            prop_assert!((1..=10_000).contains(&of_less) && (1..=10_000).contains(&of_more));
            reached.case([
                ("fewer shares than the least", less < MIN_SHARES),
                ("more shares than the most", more > MAX_SHARES),
                ("the same weight for more shares", apart > 0 && of_less == of_more),
                ("another weight", of_less < of_more),
            ]);
        });
        // The rarest: "fewer shares than the least", in one case of 8.
        reached.assert_each();
    }
}
