//! The usage of a cgroup, a network namespace and the machine, parsed from the kernel's files
//! (runtime-and-resources.md §14.1; cgroups(7), proc(5)).

/// Limits of at least this many bytes count as no limit.
const UNLIMITED: u64 = 1 << 62;
/// The minimum distance of two samples before the newer replaces the older: the kubelet's collection interval (§14.1).
const INTERVAL_NANOS: u64 = 10_000_000_000;
/// A rate over less time than this reflects the scheduler more than the processes.
const MIN_RATE_NANOS: u64 = 1_000_000_000;
/// Prefixes of the names of interfaces that do not lead out of their namespace.
const IGNORED_INTERFACES: &[&str] = &["lo", "veth", "docker", "nerdctl"];
/// The interface that represents its namespace.
pub const DEFAULT_INTERFACE: &str = "eth0";

/// The usage of a cgroup; none where the kernel does not report it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// CPU time of all CPUs since the cgroup was created, in nanoseconds.
    pub cpu_nanos: Option<u64>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Waiting for a CPU.
    pub cpu_pressure: Option<Pressure>,
    /// Waiting for memory.
    pub memory_pressure: Option<Pressure>,
    /// Waiting for block devices.
    pub io_pressure: Option<Pressure>,
}

/// Memory of a cgroup in bytes, and its page faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// All charged memory.
    pub usage: u64,
    /// Usage less inactive file pages.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Page faults.
    pub page_faults: u64,
    /// Page faults that had to read from disk.
    pub major_page_faults: u64,
    /// Limit less working set; none without a limit.
    pub available: Option<u64>,
    /// Swap; none where the kernel does not account for it.
    pub swap_usage: Option<u64>,
    /// Swap limit less swap; none without a limit.
    pub swap_available: Option<u64>,
}

/// Pressure stall information of one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pressure {
    /// At least one task was stalled.
    pub some: PressureShare,
    /// All tasks were stalled.
    pub full: PressureShare,
}

/// Stall times.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PressureShare {
    /// Total stall time in nanoseconds.
    pub total_nanos: u64,
    /// Percent of the last 10 s.
    pub avg10: f64,
    /// Percent of the last 60 s.
    pub avg60: f64,
    /// Percent of the last 300 s.
    pub avg300: f64,
}

/// Counters of a network interface since it was created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Errors while receiving.
    pub rx_errors: u64,
    /// Received packets that were dropped.
    pub rx_dropped: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Errors while sending.
    pub tx_errors: u64,
    /// Sent packets that were dropped.
    pub tx_dropped: u64,
}

/// The contents of a cgroup's memory files; a missing file is empty.
#[derive(Debug, Clone, Copy, Default)]
pub struct MemoryTexts<'a> {
    /// `memory.usage_in_bytes`, `memory.current`.
    pub usage: &'a str,
    /// `memory.stat`.
    pub stat: &'a str,
    /// `memory.limit_in_bytes`, `memory.max`.
    pub limit: &'a str,
    /// v2 only: `memory.swap.current`.
    pub swap: &'a str,
    /// v1: `memory.memsw.limit_in_bytes`, which counts memory and swap; v2: `memory.swap.max`.
    pub swap_limit: &'a str,
}

/// CPU time in nanoseconds, from `cpuacct.usage` of v1.
pub fn cpu_v1(usage: &str) -> Option<u64> {
    number(usage)
}

/// CPU time in nanoseconds, from `cpu.stat` of v2, which counts microseconds.
pub fn cpu_v2(stat: &str) -> Option<u64> {
    let [micros] = fields(stat, ["usage_usec"]);
    micros.map(|micros| micros.saturating_mul(1000))
}

/// Memory usage from the files of v1, including child cgroups.
pub fn memory_v1(texts: MemoryTexts<'_>) -> Option<Memory> {
    let names = ["total_inactive_file", "total_rss", "total_pgfault", "total_pgmajfault", "total_swap"];
    let [inactive, rss, faults, major, swap] = fields(texts.stat, names);
    let limit = limit(texts.limit);
    // The memsw limit covers memory and swap: the swap limit is the difference to the memory limit.
    let swap_limit = limit.and_then(|memory| Some(self::limit(texts.swap_limit)?.saturating_sub(memory)));
    memory(number(texts.usage)?, inactive, limit, |memory| Memory {
        rss: rss.unwrap_or(0),
        page_faults: faults.unwrap_or(0),
        major_page_faults: major.unwrap_or(0),
        swap_usage: swap,
        swap_available: swap_limit.map(|limit| limit.saturating_sub(swap.unwrap_or(0))),
        ..memory
    })
}

/// Memory usage from the files of v2.
pub fn memory_v2(texts: MemoryTexts<'_>) -> Option<Memory> {
    let [inactive, rss, faults, major] =
        fields(texts.stat, ["inactive_file", "anon", "pgfault", "pgmajfault"]);
    let swap = number(texts.swap);
    memory(number(texts.usage)?, inactive, limit(texts.limit), |memory| Memory {
        rss: rss.unwrap_or(0),
        page_faults: faults.unwrap_or(0),
        major_page_faults: major.unwrap_or(0),
        swap_usage: swap,
        swap_available: limit(texts.swap_limit).map(|limit| limit.saturating_sub(swap.unwrap_or(0))),
        ..memory
    })
}

fn memory(
    usage: u64,
    inactive_file: Option<u64>,
    limit: Option<u64>,
    rest: impl FnOnce(Memory) -> Memory,
) -> Option<Memory> {
    let working_set = usage.saturating_sub(inactive_file?);
    let available = limit.map(|limit| limit.saturating_sub(working_set));
    Some(rest(Memory { usage, working_set, available, ..Memory::default() }))
}

/// The machine's memory: that of the root cgroup `top`, with the sizes of `/proc/meminfo`. On v2 the root cgroup has no
/// `memory.current`, so usage comes from `meminfo` as well. None when `meminfo` lacks the sizes.
pub fn node_memory(top: Option<Memory>, stat: &str, meminfo: &str) -> Option<Memory> {
    let size = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        number(line.trim().strip_suffix("kB")?).map(|kib| kib.saturating_mul(1024))
    };
    let (total, free) = (size("MemTotal")?, size("MemFree")?);
    let used = total.saturating_sub(free).to_string();
    let memory = top.or_else(|| memory_v2(MemoryTexts { usage: &used, stat, ..MemoryTexts::default() }))?;
    let (swap, swap_free) = (size("SwapTotal").unwrap_or(0), size("SwapFree").unwrap_or(0));
    Some(Memory {
        available: Some(total.saturating_sub(memory.working_set)),
        swap_usage: Some(swap.saturating_sub(swap_free)),
        swap_available: Some(swap_free),
        ..memory
    })
}

/// Parses a `*.pressure` file, whose totals are microseconds.
pub fn pressure(text: &str) -> Option<Pressure> {
    let share = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let value = |name: &str| line.split(' ').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        let average = |name: &str| value(name)?.parse().ok();
        Some(PressureShare {
            total_nanos: number(value("total")?)?.saturating_mul(1000),
            avg10: average("avg10")?,
            avg60: average("avg60")?,
            avg300: average("avg300")?,
        })
    };
    // Older kernels have no `full` line for the CPU.
    share("some").map(|some| Pressure { some, full: share("full").unwrap_or_default() })
}

/// The interfaces of `/proc/<pid>/net/dev` that lead out of the namespace, the default one first.
pub fn interfaces(text: &str) -> Vec<Interface> {
    let read = |line: &str| {
        let (name, counters) = line.split_once(':')?;
        let name = name.trim();
        if IGNORED_INTERFACES.iter().any(|prefix| name.starts_with(prefix)) {
            return None;
        }
        let counters: Vec<u64> = counters.split_whitespace().map_while(|c| c.parse().ok()).collect();
        Some(Interface {
            name: name.to_owned(),
            rx_bytes: *counters.first()?,
            rx_packets: *counters.get(1)?,
            rx_errors: *counters.get(2)?,
            rx_dropped: *counters.get(3)?,
            tx_bytes: *counters.get(8)?,
            tx_packets: *counters.get(9)?,
            tx_errors: *counters.get(10)?,
            tx_dropped: *counters.get(11)?,
        })
    };
    let mut found: Vec<Interface> = text.lines().filter_map(read).collect();
    found.sort_by_key(|interface| interface.name != DEFAULT_INTERFACE);
    found
}

/// The number of threads of the machine, from `/proc/loadavg`.
pub fn threads(loadavg: &str) -> Option<u64> {
    let (_, all) = loadavg.split_whitespace().nth(3)?.split_once('/')?;
    number(all)
}

/// The boot time in seconds since 1970, from `/proc/stat`.
pub fn boot_seconds(stat: &str) -> Option<u64> {
    let [seconds] = fields(stat, ["btime"]);
    seconds
}

pub(crate) fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Parses a limit; `max` and values beyond any machine are none.
pub(crate) fn limit(text: &str) -> Option<u64> {
    number(text).filter(|limit| *limit < UNLIMITED)
}

/// The values of lines such as `name 12`, in the order of `names`.
pub(crate) fn fields<const N: usize>(text: &str, names: [&str; N]) -> [Option<u64>; N] {
    let mut values = [None; N];
    for (name, value) in text.lines().filter_map(|line| line.split_once(' ')) {
        if let Some(at) = names.iter().position(|wanted| *wanted == name) {
            values[at] = number(value);
        }
    }
    values
}

/// CPU time at a time of a monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The time in nanoseconds.
    pub at_nanos: u64,
    /// CPU time used until then, in nanoseconds.
    pub cpu_nanos: u64,
}

/// Computes the CPU rate of a cgroup from samples.
///
/// Reads happen on demand and may come from several clients at once, so the rate does not refer to the previous read: it goes
/// back to a sample that is at least [`INTERVAL_NANOS`] older, once there is one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rate {
    older: Option<Sample>,
    newer: Option<Sample>,
}

impl Rate {
    /// Adds a sample and returns the rate in nanoseconds of CPU per second. None for the first sample and within a second of it.
    pub fn observe(&mut self, now: Sample) -> Option<u64> {
        if self.newer.is_some_and(|newer| now.cpu_nanos < newer.cpu_nanos || now.at_nanos < newer.at_nanos) {
            // The cgroup was recreated with the same name.
            *self = Self::default();
        }
        match self.newer {
            None => self.newer = Some(now),
            Some(newer) if now.at_nanos - newer.at_nanos >= INTERVAL_NANOS => {
                self.older = Some(newer);
                self.newer = Some(now);
            }
            Some(_) => {}
        }
        let base = self.older.or(self.newer)?;
        let elapsed = now.at_nanos - base.at_nanos;
        if elapsed < MIN_RATE_NANOS {
            return None;
        }
        let used = u128::from(now.cpu_nanos - base.cpu_nanos);
        u64::try_from(used * 1_000_000_000 / u128::from(elapsed)).ok()
    }
}

#[cfg(test)]
#[path = "statistics_tests.rs"]
mod tests;
