//! The machine: its capacity and what pods may use of it (runtime-and-resources.md §9).

use std::collections::BTreeMap;

use keelson_kube_model::Quantity;

use crate::desire::Amounts;
use crate::eviction::signal::{Observation, Observations, Signal};

/// The resources of the machine at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineReading {
    /// Online logical CPUs.
    pub cpus: u32,
    /// Memory.
    pub memory: Memory,
    /// The filesystem of the root directory.
    pub nodefs: Filesystem,
    /// Allocated huge pages by page size in KiB.
    pub huge_pages: BTreeMap<u64, u64>,
    /// Processes and threads.
    pub processes: Processes,
}

/// Processes and threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Processes {
    /// The maximum; 0 where the kernel does not report it.
    pub max: u64,
    /// The current number.
    pub running: u64,
}

/// Bytes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`.
    pub total: u64,
    /// `MemFree`.
    pub free: u64,
    /// `Inactive(file)`.
    pub inactive_file: u64,
    /// `SwapTotal`; 0 without swap and on kernels without swap support.
    pub swap: u64,
}

/// A filesystem, in bytes and inodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filesystem {
    /// Size.
    pub total: u64,
    /// Bytes available to unprivileged users.
    pub available: u64,
    /// Inodes; 0 where the filesystem has no fixed number.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

/// Parses `/proc/meminfo`; none when a line about memory is missing.
pub fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB").unwrap_or(line).trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(Memory {
        total: field("MemTotal")?,
        free: field("MemFree")?,
        inactive_file: field("Inactive(file)")?,
        swap: field("SwapTotal").unwrap_or(0),
    })
}

/// Counts the CPUs of a list such as `0-3,5` (`/sys/devices/system/cpu/online`).
pub fn parse_cpu_list(text: &str) -> Option<u32> {
    text.trim().split(',').try_fold(0_u32, |count, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// The value of `PRETTY_NAME` in an os-release text.
pub fn parse_pretty_name(text: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix("PRETTY_NAME="))?.trim();
    let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''));
    let inner = quote.and_then(|q| value.strip_prefix(q)?.strip_suffix(q)).unwrap_or(value);
    let mut plain = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => plain.extend(chars.next()),
            c => plain.push(c),
        }
    }
    Some(plain)
}

/// Converts the machine of `uname -m` to the node's `kubernetes.io/arch`.
pub fn go_arch(machine: &str) -> &str {
    match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "i386" | "i486" | "i586" | "i686" => "386",
        "armv6l" | "armv7l" | "armv8l" => "arm",
        "loongarch64" => "loong64",
        other => other,
    }
}

/// The resource name for huge pages of this size in KiB.
pub fn huge_page_resource(kib: u64) -> String {
    const UNITS: [(u64, &str); 2] = [(1 << 20, "Gi"), (1 << 10, "Mi")];
    for (unit, suffix) in UNITS {
        if kib >= unit && kib.is_multiple_of(unit) {
            return format!("hugepages-{}{suffix}", kib / unit);
        }
    }
    format!("hugepages-{kib}Ki")
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The maximum number of pods: `maxPods`, and at most `podsPerCore` per CPU if that is set.
pub fn effective_max_pods(reading: &MachineReading, max_pods: u32, per_core: u32) -> u32 {
    match per_core {
        0 => max_pods,
        per_core => max_pods.min(reading.cpus.saturating_mul(per_core)),
    }
}

/// The total of each resource.
pub fn capacity(reading: &MachineReading, max_pods: u32) -> Amounts {
    let mut all = Amounts::from([
        ("cpu".to_owned(), i64::from(reading.cpus) * 1000),
        ("memory".to_owned(), signed(reading.memory.total)),
        ("ephemeral-storage".to_owned(), signed(reading.nodefs.total)),
        ("pods".to_owned(), i64::from(max_pods)),
    ]);
    for (kib, count) in &reading.huge_pages {
        all.insert(huge_page_resource(*kib), signed(kib.saturating_mul(1024).saturating_mul(*count)));
    }
    all
}

/// An invalid reservation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the reservation of {resource}, {text:?}, is neither a quantity nor a percentage")]
pub struct ReservationError {
    resource: String,
    text: String,
}

/// Parses reservations: quantities, or percentages of the capacity.
pub fn reservations(
    texts: &BTreeMap<String, String>,
    capacity: &Amounts,
) -> Result<Amounts, ReservationError> {
    texts
        .iter()
        .map(|(resource, text)| {
            let whole = capacity.get(resource).copied().unwrap_or(0);
            let amount = parse_amount(resource, text, whole)
                .ok_or_else(|| ReservationError { resource: resource.clone(), text: text.clone() })?;
            Ok((resource.clone(), amount))
        })
        .collect()
}

fn parse_amount(resource: &str, text: &str, whole: i64) -> Option<i64> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().ok()?;
        // Exact enough: amounts are below 2^53.
        return (0.0..=100.0).contains(&percent).then(|| (whole as f64 * percent / 100.0) as i64);
    }
    let quantity = Quantity::parse(text).ok()?;
    Some(if resource == "cpu" { quantity.milli_value() } else { quantity.value() })
}

/// What pods may use: capacity less reservations, less allocated huge pages for memory; never below 0.
pub fn allocatable(capacity: &Amounts, reserved: &Amounts) -> Amounts {
    let huge: i64 = capacity
        .iter()
        .filter(|(name, _)| name.starts_with("hugepages-"))
        .fold(0, |sum, (_, amount)| sum.saturating_add(*amount));
    capacity
        .iter()
        .map(|(name, amount)| {
            let taken = reserved.get(name).copied().unwrap_or(0);
            let huge = if name == "memory" { huge } else { 0 };
            (name.clone(), amount.saturating_sub(taken).saturating_sub(huge).max(0))
        })
        .collect()
}

/// The observations of the eviction signals for the node's own resources. Available memory is the total less the working set,
/// which is used memory less inactive file pages.
pub fn observations(reading: &MachineReading, taken: i64) -> Observations {
    let MachineReading { memory, nodefs, processes, .. } = reading;
    let memory_left = memory.free.saturating_add(memory.inactive_file).min(memory.total);
    let observed = |capacity, available| Observation { capacity, available, taken };
    let mut all = Observations::from([
        (Signal::MemoryAvailable, observed(memory.total, memory_left)),
        (Signal::NodefsAvailable, observed(nodefs.total, nodefs.available)),
    ]);
    // A filesystem without a fixed number of inodes is never short of them.
    if nodefs.inodes > 0 {
        all.insert(Signal::NodefsInodesFree, observed(nodefs.inodes, nodefs.inodes_free));
    }
    if processes.max > 0 {
        let left = processes.max.saturating_sub(processes.running);
        all.insert(Signal::PidAvailable, observed(processes.max, left));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(list: &[(&str, i64)]) -> Amounts {
        list.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text =
            "MemTotal:       2048 kB\nMemFree:  1024 kB\nInactive:  9 kB\nInactive(file):      512 kB\n";
        let memory = Memory { total: 2 << 20, free: 1 << 20, inactive_file: 512 << 10, swap: 0 };
        assert_eq!(parse_meminfo(text), Some(memory));
        let with_swap = format!("{text}SwapCached: 1 kB\nSwapTotal:    256 kB\nSwapFree: 3 kB\n");
        assert_eq!(parse_meminfo(&with_swap), Some(Memory { swap: 256 << 10, ..memory }));
        assert_eq!(parse_meminfo("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn cpu_lists_are_counted() {
        for (text, count) in [
            ("0-1\n", Some(2)),
            ("0", Some(1)),
            ("0-3,5,8-9", Some(7)),
            ("", None),
            ("3-1", None),
            ("x", None),
        ] {
            assert_eq!(parse_cpu_list(text), count, "{text:?}");
        }
    }

    #[test]
    fn the_pretty_name_loses_its_quotes_and_escapes() {
        for (text, name) in [
            ("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n", "Debian GNU/Linux 12 (bookworm)"),
            ("PRETTY_NAME=Plain", "Plain"),
            ("PRETTY_NAME='Single'", "Single"),
            (r#"PRETTY_NAME="a \"b\" \$c""#, "a \"b\" $c"),
        ] {
            assert_eq!(parse_pretty_name(text).as_deref(), Some(name));
        }
        assert_eq!(parse_pretty_name("NAME=x"), None);
    }

    #[test]
    fn architectures_have_their_go_names() {
        assert_eq!(
            (go_arch("x86_64"), go_arch("aarch64"), go_arch("riscv64")),
            ("amd64", "arm64", "riscv64")
        );
    }

    #[test]
    fn huge_page_resources_are_named_by_page_size() {
        for (kib, name) in
            [(2048, "2Mi"), (1 << 20, "1Gi"), (64, "64Ki"), (1536, "1536Ki"), (16 << 20, "16Gi")]
        {
            assert_eq!(huge_page_resource(kib), format!("hugepages-{name}"));
        }
    }

    #[test]
    fn allocatable_is_capacity_less_reservations_and_never_negative() {
        let reading = MachineReading {
            cpus: 2,
            memory: Memory { total: 1000 << 20, ..Memory::default() },
            nodefs: Filesystem { total: 1000, ..Filesystem::default() },
            huge_pages: [(2048, 100)].into(),
            ..MachineReading::default()
        };
        let capacity = capacity(&reading, 110);
        assert_eq!(
            capacity,
            amounts(&[
                ("cpu", 2000),
                ("memory", 1000 << 20),
                ("ephemeral-storage", 1000),
                ("pods", 110),
                ("hugepages-2Mi", 200 << 20)
            ])
        );
        let texts = [("cpu", "2500m"), ("memory", "100Mi"), ("ephemeral-storage", "10%"), ("pid", "5")]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into();
        let reserved = reservations(&texts, &capacity).unwrap();
        assert_eq!(
            allocatable(&capacity, &reserved),
            amounts(&[
                ("cpu", 0),
                ("memory", 700 << 20),
                ("ephemeral-storage", 900),
                ("pods", 110),
                ("hugepages-2Mi", 200 << 20)
            ])
        );
    }

    #[test]
    fn an_invalid_reservation_is_named() {
        for text in ["lots", "120%", "x%"] {
            let texts = [("memory".to_owned(), text.to_owned())].into();
            let error = reservations(&texts, &amounts(&[("memory", 1)])).unwrap_err().to_string();
            assert!(error.contains("memory") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn machine_readings_become_eviction_signal_observations() {
        let reading = MachineReading {
            memory: Memory { total: 4 << 30, free: 60 << 20, inactive_file: 40 << 20, swap: 1 << 30 },
            nodefs: Filesystem { total: 1000, available: 100, inodes: 100, inodes_free: 5 },
            processes: Processes { max: 1000, running: 990 },
            ..MachineReading::default()
        };
        let observed = observations(&reading, 7);
        let found: Vec<_> =
            observed.iter().map(|(s, o)| (s.name(), o.capacity, o.available, o.taken)).collect();
        assert_eq!(
            found,
            [
                ("memory.available", 4 << 30, 100 << 20, 7),
                ("nodefs.available", 1000, 100, 7),
                ("nodefs.inodesFree", 100, 5, 7),
                ("pid.available", 1000, 10, 7)
            ]
        );
        let without = MachineReading {
            nodefs: Filesystem { inodes: 0, ..reading.nodefs },
            ..MachineReading::default()
        };
        let names: Vec<&str> = observations(&without, 7).keys().map(|signal| signal.name()).collect();
        assert_eq!(
            names,
            ["memory.available", "nodefs.available"],
            "resources without a number have no signal"
        );
    }

    #[test]
    fn max_pods_respects_pods_per_core() {
        let reading = MachineReading { cpus: 4, ..MachineReading::default() };
        for (max, per_core, most) in [(110, 0, 110), (110, 10, 40), (20, 10, 20), (0, 10, 0)] {
            assert_eq!(effective_max_pods(&reading, max, per_core), most, "{max} {per_core}");
        }
    }
}
