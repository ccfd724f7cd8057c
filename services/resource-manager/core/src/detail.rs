//! The detailed usage of a cgroup, for `/metrics/cadvisor` (runtime-and-resources.md §14.4; cgroups(7), the kernel's
//! documentation of cgroup v1 and v2).

use std::collections::BTreeMap;

use crate::statistics::{fields, limit, number};
use crate::values::{MAX_SHARES, MIN_SHARES};

/// Nanoseconds per tick of v1's user and system time: 100 ticks per second on every architecture (`sysconf(_SC_CLK_TCK)`).
const NANOS_PER_TICK: u64 = 10_000_000;

/// Usage and limits of a cgroup; none where the kernel does not report a value, and for no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Detail {
    /// Nanoseconds in user mode.
    pub cpu_user_nanos: Option<u64>,
    /// Nanoseconds in the kernel.
    pub cpu_system_nanos: Option<u64>,
    /// Quota periods in which something ran.
    pub cpu_periods: Option<u64>,
    /// Quota periods in which it was throttled.
    pub cpu_throttled_periods: Option<u64>,
    /// Throttled time in nanoseconds.
    pub cpu_throttled_nanos: Option<u64>,
    /// The CPU weight, as `cpu.shares`.
    pub cpu_shares: Option<u64>,
    /// Microseconds per period.
    pub cpu_quota_us: Option<u64>,
    /// Microseconds of a period.
    pub cpu_period_us: Option<u64>,
    /// Bytes of page cache.
    pub memory_cache: Option<u64>,
    /// Bytes of mapped files.
    pub memory_mapped_file: Option<u64>,
    /// Bytes of kernel memory.
    pub memory_kernel: Option<u64>,
    /// Peak usage in bytes.
    pub memory_max_usage: Option<u64>,
    /// How often the memory limit was reached.
    pub memory_failures: Option<u64>,
    /// Bytes of recently used page cache.
    pub memory_active_file: Option<u64>,
    /// Bytes of other page cache.
    pub memory_inactive_file: Option<u64>,
    /// The memory limit in bytes.
    pub memory_limit: Option<u64>,
    /// Bytes that are protected under memory pressure.
    pub memory_reservation: Option<u64>,
    /// The swap limit in bytes; on v1 the limit of memory and swap together.
    pub memory_swap_limit: Option<u64>,
    /// Processes that the OOM killer has killed for its limit.
    pub oom_kills: Option<u64>,
    /// Its own processes, without those of child cgroups.
    pub processes: Option<u64>,
    /// Processes and threads.
    pub threads: Option<u64>,
    /// The limit of processes and threads.
    pub threads_limit: Option<u64>,
    /// I/O by device.
    pub devices: BTreeMap<DeviceNumber, Transfers>,
}

/// The numbers of a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

/// I/O of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfers {
    /// Read operations.
    pub reads: u64,
    /// Write operations.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

/// The files of a cgroup; a missing file is empty.
pub trait Files {
    /// The content of a file of the cgroup in the hierarchy of a controller.
    fn read(&self, controller: &str, file: &str) -> String;
}

/// Reads the files of v1, including the usage of child cgroups.
pub fn v1(files: &impl Files) -> Detail {
    let [user, system] = fields(&files.read("cpuacct", "cpuacct.stat"), ["user", "system"]);
    let ticks = |count: Option<u64>| count.map(|count| count.saturating_mul(NANOS_PER_TICK));
    let [periods, throttled, throttled_nanos] =
        fields(&files.read("cpu", "cpu.stat"), ["nr_periods", "nr_throttled", "throttled_time"]);
    let names = ["total_cache", "total_mapped_file", "total_active_file", "total_inactive_file"];
    let [cache, mapped, active, inactive] = fields(&files.read("memory", "memory.stat"), names);
    let [oom_kills] = fields(&files.read("memory", "memory.oom_control"), ["oom_kill"]);
    let memory = |file: &str| files.read("memory", file);
    let mut devices = BTreeMap::new();
    add_v1(&mut devices, &files.read("blkio", "blkio.throttle.io_serviced"), |t, reads, count| {
        *(if reads { &mut t.reads } else { &mut t.writes }) = count;
    });
    add_v1(&mut devices, &files.read("blkio", "blkio.throttle.io_service_bytes"), |t, reads, bytes| {
        *(if reads { &mut t.read_bytes } else { &mut t.write_bytes }) = bytes;
    });
    Detail {
        cpu_user_nanos: ticks(user),
        cpu_system_nanos: ticks(system),
        cpu_periods: periods,
        cpu_throttled_periods: throttled,
        cpu_throttled_nanos: throttled_nanos,
        cpu_shares: number(&files.read("cpu", "cpu.shares")),
        cpu_quota_us: number(&files.read("cpu", "cpu.cfs_quota_us")),
        cpu_period_us: number(&files.read("cpu", "cpu.cfs_period_us")),
        memory_cache: cache,
        memory_mapped_file: mapped,
        memory_kernel: number(&memory("memory.kmem.usage_in_bytes")),
        memory_max_usage: number(&memory("memory.max_usage_in_bytes")),
        memory_failures: number(&memory("memory.failcnt")),
        memory_active_file: active,
        memory_inactive_file: inactive,
        memory_limit: limit(&memory("memory.limit_in_bytes")),
        memory_reservation: limit(&memory("memory.soft_limit_in_bytes")),
        memory_swap_limit: limit(&memory("memory.memsw.limit_in_bytes")),
        oom_kills,
        processes: processes(files),
        threads: number(&files.read("pids", "pids.current")),
        threads_limit: number(&files.read("pids", "pids.max")),
        devices,
    }
}

/// Reads the files of v2.
pub fn v2(files: &impl Files) -> Detail {
    let names = ["user_usec", "system_usec", "nr_periods", "nr_throttled", "throttled_usec"];
    let [user, system, periods, throttled, throttled_micros] = fields(&files.read("cpu", "cpu.stat"), names);
    let micros = |count: Option<u64>| count.map(|count| count.saturating_mul(1000));
    let names = ["file", "file_mapped", "kernel", "active_file", "inactive_file"];
    let [cache, mapped, kernel, active, inactive] = fields(&files.read("memory", "memory.stat"), names);
    let [failures, oom_kills] = fields(&files.read("memory", "memory.events"), ["max", "oom_kill"]);
    let memory = |file: &str| files.read("memory", file);
    let max = files.read("cpu", "cpu.max");
    let (quota, period) = max.trim().split_once(' ').unwrap_or_default();
    Detail {
        cpu_user_nanos: micros(user),
        cpu_system_nanos: micros(system),
        cpu_periods: periods,
        cpu_throttled_periods: throttled,
        cpu_throttled_nanos: micros(throttled_micros),
        cpu_shares: number(&files.read("cpu", "cpu.weight")).map(shares_of_weight),
        cpu_quota_us: number(quota),
        cpu_period_us: number(period),
        memory_cache: cache,
        memory_mapped_file: mapped,
        memory_kernel: kernel,
        memory_max_usage: number(&memory("memory.peak")),
        memory_failures: failures,
        memory_active_file: active,
        memory_inactive_file: inactive,
        memory_limit: limit(&memory("memory.max")),
        memory_reservation: limit(&memory("memory.low")).filter(|bytes| *bytes > 0),
        memory_swap_limit: limit(&memory("memory.swap.max")),
        oom_kills,
        processes: processes(files),
        threads: number(&files.read("pids", "pids.current")),
        threads_limit: number(&files.read("pids", "pids.max")),
        devices: devices_v2(&files.read("memory", "io.stat")),
    }
}

/// The number of lines of `cgroup.procs`; none when it is empty.
fn processes(files: &impl Files) -> Option<u64> {
    u64::try_from(files.read("memory", "cgroup.procs").lines().count()).ok().filter(|count| *count > 0)
}

/// Converts `cpu.weight` to `cpu.shares` (runtime-and-resources.md §4.1).
fn shares_of_weight(weight: u64) -> u64 {
    (weight.saturating_sub(1).saturating_mul(MAX_SHARES - MIN_SHARES) / 9999).saturating_add(MIN_SHARES)
}

fn device_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// Parses lines such as `254:0 Read 12`.
fn add_v1(
    devices: &mut BTreeMap<DeviceNumber, Transfers>,
    text: &str,
    set: impl Fn(&mut Transfers, bool, u64),
) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let device = words.next().and_then(device_number);
        let reads = match words.next() {
            Some("Read") => true,
            Some("Write") => false,
            _ => continue,
        };
        if let (Some(device), Some(count)) = (device, words.next().and_then(number)) {
            set(devices.entry(device).or_default(), reads, count);
        }
    }
}

/// Parses lines such as `254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`.
fn devices_v2(text: &str) -> BTreeMap<DeviceNumber, Transfers> {
    let read = |line: &str| {
        let (device, rest) = line.split_once(' ')?;
        let value = |name: &str| {
            let found = rest.split_whitespace().find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            found.and_then(number).unwrap_or(0)
        };
        let transfers = Transfers {
            reads: value("rios"),
            writes: value("wios"),
            read_bytes: value("rbytes"),
            write_bytes: value("wbytes"),
        };
        Some((device_number(device)?, transfers))
    };
    text.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct FakeFiles(&'static [(&'static str, &'static str, &'static str)]);

    impl Files for FakeFiles {
        fn read(&self, controller: &str, file: &str) -> String {
            let found = self.0.iter().find(|(c, f, _)| *c == controller && *f == file);
            found.map_or_else(String::new, |(_, _, text)| (*text).to_owned())
        }
    }

    const DISK: DeviceNumber = DeviceNumber { major: 254, minor: 0 };

    #[test]
    fn cgroup_v1_details_are_read_from_each_hierarchy() {
        let found = v1(&FakeFiles(&[
            ("cpuacct", "cpuacct.stat", "user 150\nsystem 50\n"),
            ("cpu", "cpu.stat", "nr_periods 10\nnr_throttled 3\nthrottled_time 12345\n"),
            ("cpu", "cpu.shares", "512\n"),
            ("cpu", "cpu.cfs_quota_us", "50000\n"),
            ("cpu", "cpu.cfs_period_us", "100000\n"),
            (
                "memory",
                "memory.stat",
                "cache 1\ntotal_cache 4096\ntotal_mapped_file 5\ntotal_active_file 6\ntotal_inactive_file 7\n",
            ),
            ("memory", "memory.kmem.usage_in_bytes", "8\n"),
            ("memory", "memory.max_usage_in_bytes", "9\n"),
            ("memory", "memory.failcnt", "2\n"),
            ("memory", "memory.limit_in_bytes", "1048576\n"),
            ("memory", "memory.soft_limit_in_bytes", "9223372036854771712\n"),
            ("memory", "memory.memsw.limit_in_bytes", "2097152\n"),
            ("memory", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
            ("memory", "cgroup.procs", "12\n13\n"),
            ("pids", "pids.current", "3\n"),
            ("pids", "pids.max", "max\n"),
            ("blkio", "blkio.throttle.io_serviced", "254:0 Read 3\n254:0 Write 4\n254:0 Sync 7\nTotal 7\n"),
            ("blkio", "blkio.throttle.io_service_bytes", "254:0 Read 30\n254:0 Write 40\n7:1 Read 1\n"),
        ]));
        let of_disk = Transfers { reads: 3, writes: 4, read_bytes: 30, write_bytes: 40 };
        let of_loop = Transfers { read_bytes: 1, ..Transfers::default() };
        let expected = Detail {
            cpu_user_nanos: Some(1_500_000_000),
            cpu_system_nanos: Some(500_000_000),
            cpu_periods: Some(10),
            cpu_throttled_periods: Some(3),
            cpu_throttled_nanos: Some(12_345),
            cpu_shares: Some(512),
            cpu_quota_us: Some(50_000),
            cpu_period_us: Some(100_000),
            memory_cache: Some(4096),
            memory_mapped_file: Some(5),
            memory_kernel: Some(8),
            memory_max_usage: Some(9),
            memory_failures: Some(2),
            memory_active_file: Some(6),
            memory_inactive_file: Some(7),
            memory_limit: Some(1 << 20),
            memory_reservation: None,
            memory_swap_limit: Some(2 << 20),
            oom_kills: Some(1),
            processes: Some(2),
            threads: Some(3),
            threads_limit: None,
            devices: [(DISK, of_disk), (DeviceNumber { major: 7, minor: 1 }, of_loop)].into(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn cgroup_v2_details_are_read_from_one_directory() {
        let found = v2(&FakeFiles(&[
            (
                "cpu",
                "cpu.stat",
                "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods 10\nnr_throttled 3\nthrottled_usec 7\n",
            ),
            ("cpu", "cpu.weight", "20\n"),
            ("cpu", "cpu.max", "max 100000\n"),
            ("memory", "memory.stat", "file 4096\nkernel 8\nfile_mapped 5\nactive_file 6\ninactive_file 7\n"),
            ("memory", "memory.peak", "9\n"),
            ("memory", "memory.max", "1048576\n"),
            ("memory", "memory.low", "0\n"),
            ("memory", "memory.swap.max", "max\n"),
            ("memory", "memory.events", "low 0\nhigh 0\nmax 2\noom 1\noom_kill 1\n"),
            ("memory", "cgroup.procs", "0\n0\n"),
            ("pids", "pids.current", "3\n"),
            ("pids", "pids.max", "64\n"),
            ("memory", "io.stat", "254:0 rbytes=30 wbytes=40 rios=3 wios=4 dbytes=0 dios=0\nbroken\n"),
        ]));
        let of_disk = Transfers { reads: 3, writes: 4, read_bytes: 30, write_bytes: 40 };
        let expected = Detail {
            cpu_user_nanos: Some(5000),
            cpu_system_nanos: Some(4000),
            cpu_periods: Some(10),
            cpu_throttled_periods: Some(3),
            cpu_throttled_nanos: Some(7000),
            cpu_shares: Some(500),
            cpu_quota_us: None,
            cpu_period_us: Some(100_000),
            memory_cache: Some(4096),
            memory_mapped_file: Some(5),
            memory_kernel: Some(8),
            memory_max_usage: Some(9),
            memory_failures: Some(2),
            memory_active_file: Some(6),
            memory_inactive_file: Some(7),
            memory_limit: Some(1 << 20),
            memory_reservation: None,
            memory_swap_limit: None,
            oom_kills: Some(1),
            processes: Some(2),
            threads: Some(3),
            threads_limit: Some(64),
            devices: [(DISK, of_disk)].into(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn memory_low_of_cgroup_v2_is_reported_as_the_reservation() {
        let of = |low| v2(&FakeFiles(low)).memory_reservation;
        assert_eq!(of(&[("memory", "memory.low", "4096\n")]), Some(4096));
        assert_eq!(of(&[("memory", "memory.low", "max\n")]), None);
        assert_eq!(of(&[("memory", "memory.low", "0\n")]), None);
    }

    #[test]
    fn details_without_kernel_files_are_none() {
        assert_eq!(v1(&FakeFiles(&[])), Detail::default());
        assert_eq!(v2(&FakeFiles(&[])), Detail::default());
    }

    #[test]
    fn cpu_weights_are_converted_to_shares() {
        for (weight, shares) in [(0, 2), (1, 2), (39, 998), (10_000, 262_144)] {
            assert_eq!(shares_of_weight(weight), shares, "{weight}");
        }
    }
}
