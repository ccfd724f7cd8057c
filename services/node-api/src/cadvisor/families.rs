//! The families of `/metrics/cadvisor`: what each reads from the statistics of a cgroup.

use keelson_proto::keelson::resource_manager::v1 as rm;

use super::Stats;
use crate::metrics_text::{Family, escaped};

/// Reads the value of a family from the statistics of a cgroup.
pub(super) type Getter = fn(&Stats) -> Option<f64>;
/// Reads several values of a family, each with further labels such as `device="/dev/vda"`.
pub(super) type LabelledGetter = fn(&Stats) -> Vec<(String, f64)>;

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn detail(stats: &Stats, field: fn(&rm::CgroupDetail) -> Option<u64>) -> Option<f64> {
    stats.detail.as_ref().and_then(field).map(|value| value as f64)
}

fn nanos(stats: &Stats, field: fn(&rm::CgroupDetail) -> Option<u64>) -> Option<f64> {
    stats.detail.as_ref().and_then(field).map(seconds)
}

/// A value of the memory usage.
pub(super) fn memory(stats: &Stats, field: fn(&rm::MemoryUsage) -> Option<u64>) -> Option<f64> {
    stats.usage.as_ref()?.memory.as_ref().and_then(field).map(|value| value as f64)
}

fn pressure(
    stats: &Stats,
    field: fn(&rm::Usage) -> Option<&rm::Pressure>,
    share: fn(&rm::Pressure) -> Option<&rm::PressureShare>,
) -> Option<f64> {
    stats.usage.as_ref().and_then(field).and_then(share).map(|share| seconds(share.total_nanos))
}

/// A limit or count; 0 if there is none, as in cAdvisor.
fn bound(stats: &Stats, field: fn(&rm::CgroupDetail) -> Option<u64>) -> Option<f64> {
    stats.detail.as_ref().map(|detail| field(detail).unwrap_or(0) as f64)
}

/// `value`, if the cgroup has a CPU quota.
fn with_quota(stats: &Stats, value: Option<f64>) -> Option<f64> {
    value.filter(|_| stats.detail.as_ref().is_some_and(|detail| detail.cpu_quota_us.is_some()))
}

/// Families with one value per cgroup.
pub(super) const SIMPLE: &[(Family, Getter)] = &[
    (("container_cpu_cfs_periods_total", "counter", "Periods of the CPU quota in which a task ran"), |s| {
        with_quota(s, detail(s, |d| d.cpu_periods))
    }),
    (
        (
            "container_cpu_cfs_throttled_periods_total",
            "counter",
            "Periods in which the CPU quota was exhausted",
        ),
        |s| with_quota(s, detail(s, |d| d.cpu_throttled_periods)),
    ),
    (
        (
            "container_cpu_cfs_throttled_seconds_total",
            "counter",
            "Time for which tasks were throttled by the CPU quota",
        ),
        |s| with_quota(s, nanos(s, |d| d.cpu_throttled_nanos)),
    ),
    (("container_cpu_system_seconds_total", "counter", "CPU time in the kernel"), |s| {
        nanos(s, |d| d.cpu_system_nanos)
    }),
    (("container_cpu_user_seconds_total", "counter", "CPU time in user mode"), |s| {
        nanos(s, |d| d.cpu_user_nanos)
    }),
    (("container_last_seen", "gauge", "When the cgroup was read, in seconds since 1970"), |s| {
        s.usage.as_ref().map(|usage| (usage.taken_unix_nanos / 1_000_000_000) as f64)
    }),
    (("container_memory_cache", "gauge", "Memory of the page cache"), |s| detail(s, |d| d.memory_cache)),
    (("container_memory_failcnt", "counter", "How often the memory limit was reached"), |s| {
        detail(s, |d| d.memory_failures)
    }),
    (("container_memory_kernel_usage", "gauge", "Kernel memory charged to the cgroup"), |s| {
        detail(s, |d| d.memory_kernel)
    }),
    (("container_memory_mapped_file", "gauge", "Memory of mapped files"), |s| {
        detail(s, |d| d.memory_mapped_file)
    }),
    (("container_memory_max_usage_bytes", "gauge", "The highest memory usage so far"), |s| {
        detail(s, |d| d.memory_max_usage)
    }),
    (("container_memory_rss", "gauge", "Anonymous memory"), |s| memory(s, |m| Some(m.rss))),
    (("container_memory_swap", "gauge", "Swap in use"), |s| memory(s, |m| m.swap_usage)),
    (("container_memory_total_active_file_bytes", "gauge", "Memory of files on the active list"), |s| {
        detail(s, |d| d.memory_active_file)
    }),
    (("container_memory_total_inactive_file_bytes", "gauge", "Memory of files on the inactive list"), |s| {
        detail(s, |d| d.memory_inactive_file)
    }),
    (("container_memory_usage_bytes", "gauge", "All memory charged to the cgroup"), |s| {
        memory(s, |m| Some(m.usage))
    }),
    (("container_memory_working_set_bytes", "gauge", "Working set of the cgroup"), |s| {
        memory(s, |m| Some(m.working_set))
    }),
    (("container_oom_events_total", "counter", "Processes killed because of the memory limit"), |s| {
        detail(s, |d| d.oom_kills)
    }),
    (
        (
            "container_pressure_cpu_stalled_seconds_total",
            "counter",
            "Time in which all tasks waited for a CPU",
        ),
        |s| pressure(s, |u| u.cpu_pressure.as_ref(), |p| p.full.as_ref()),
    ),
    (
        ("container_pressure_cpu_waiting_seconds_total", "counter", "Time in which tasks waited for a CPU"),
        |s| pressure(s, |u| u.cpu_pressure.as_ref(), |p| p.some.as_ref()),
    ),
    (
        (
            "container_pressure_io_stalled_seconds_total",
            "counter",
            "Time in which all tasks waited for a disk",
        ),
        |s| pressure(s, |u| u.io_pressure.as_ref(), |p| p.full.as_ref()),
    ),
    (
        ("container_pressure_io_waiting_seconds_total", "counter", "Time in which tasks waited for a disk"),
        |s| pressure(s, |u| u.io_pressure.as_ref(), |p| p.some.as_ref()),
    ),
    (
        (
            "container_pressure_memory_stalled_seconds_total",
            "counter",
            "Time in which all tasks waited for memory",
        ),
        |s| pressure(s, |u| u.memory_pressure.as_ref(), |p| p.full.as_ref()),
    ),
    (
        (
            "container_pressure_memory_waiting_seconds_total",
            "counter",
            "Time in which tasks waited for memory",
        ),
        |s| pressure(s, |u| u.memory_pressure.as_ref(), |p| p.some.as_ref()),
    ),
    (("container_spec_cpu_period", "gauge", "Period of the CPU quota in microseconds"), |s| {
        detail(s, |d| d.cpu_period_us)
    }),
    (("container_spec_cpu_quota", "gauge", "CPU time per period in microseconds"), |s| {
        detail(s, |d| d.cpu_quota_us)
    }),
    (("container_spec_cpu_shares", "gauge", "CPU weight relative to other cgroups"), |s| {
        detail(s, |d| d.cpu_shares)
    }),
    (("container_spec_memory_limit_bytes", "gauge", "Memory limit; 0 if there is none"), |s| {
        bound(s, |d| d.memory_limit)
    }),
    (("container_spec_memory_reservation_limit_bytes", "gauge", "Memory reserved under pressure"), |s| {
        bound(s, |d| d.memory_reservation)
    }),
    (("container_spec_memory_swap_limit_bytes", "gauge", "Swap limit; 0 if there is none"), |s| {
        bound(s, |d| d.memory_swap_limit)
    }),
    (
        ("container_start_time_seconds", "gauge", "When the container was started, in seconds since 1970"),
        |s| (s.started_unix_nanos > 0).then_some((s.started_unix_nanos / 1_000_000_000) as f64),
    ),
    (("container_processes", "gauge", "Processes of the cgroup itself"), |s| bound(s, |d| d.processes)),
    (("container_threads", "gauge", "Processes and threads"), |s| detail(s, |d| d.threads)),
    (("container_threads_max", "gauge", "Limit of processes and threads; 0 if there is none"), |s| {
        bound(s, |d| d.threads_limit)
    }),
];

fn by_device(stats: &Stats, field: fn(&rm::BlockDevice) -> u64) -> Vec<(String, f64)> {
    let devices = stats.detail.iter().flat_map(|detail| &detail.devices);
    devices.map(|device| (format!("device=\"{}\"", escaped(&device.name)), field(device) as f64)).collect()
}

fn by_interface(stats: &Stats, field: fn(&rm::Interface) -> u64) -> Vec<(String, f64)> {
    let interfaces = stats.network.iter().flat_map(|network| &network.interfaces);
    interfaces
        .map(|interface| (format!("interface=\"{}\"", escaped(&interface.name)), field(interface) as f64))
        .collect()
}

fn page_faults(stats: &Stats) -> Vec<(String, f64)> {
    let Some(memory) = stats.usage.as_ref().and_then(|usage| usage.memory.as_ref()) else {
        return Vec::new();
    };
    // Only the cgroup of a container contains processes itself; it has no children.
    let scopes: &[&str] = if stats.id.is_empty() { &["hierarchy"] } else { &["container", "hierarchy"] };
    let kinds = [("pgfault", memory.page_faults), ("pgmajfault", memory.major_page_faults)];
    let rows = kinds.iter().flat_map(|(kind, count)| scopes.iter().map(move |scope| (kind, scope, *count)));
    rows.map(|(kind, scope, count)| (format!("failure_type=\"{kind}\",scope=\"{scope}\""), count as f64))
        .collect()
}

fn device_usage(stats: &Stats) -> Vec<(String, f64)> {
    let devices = stats.detail.iter().flat_map(|detail| &detail.devices);
    let rows = devices.flat_map(|device| {
        [("Read", device.read_bytes), ("Write", device.write_bytes)]
            .map(|(operation, bytes)| (device, operation, bytes))
    });
    rows.map(|(device, operation, bytes)| {
        let labels = format!(
            "device=\"{}\",major=\"{}\",minor=\"{}\",operation=\"{operation}\"",
            escaped(&device.name),
            device.major,
            device.minor
        );
        (labels, bytes as f64)
    })
    .collect()
}

/// Families with several values per cgroup, each with further labels.
pub(super) const LABELLED: &[(Family, LabelledGetter)] = &[
    (("container_blkio_device_usage_total", "counter", "Bytes read and written"), device_usage),
    (("container_cpu_usage_seconds_total", "counter", "CPU time used"), |s| {
        let used = s.usage.as_ref().and_then(|usage| usage.cpu_nanos);
        used.map(|nanos| ("cpu=\"total\"".to_owned(), seconds(nanos))).into_iter().collect()
    }),
    (("container_fs_reads_bytes_total", "counter", "Bytes read"), |s| by_device(s, |d| d.read_bytes)),
    (("container_fs_reads_total", "counter", "Reads"), |s| by_device(s, |d| d.reads)),
    (("container_fs_writes_bytes_total", "counter", "Bytes written"), |s| by_device(s, |d| d.write_bytes)),
    (("container_fs_writes_total", "counter", "Writes"), |s| by_device(s, |d| d.writes)),
    (("container_memory_failures_total", "counter", "Page faults"), page_faults),
    (("container_network_receive_bytes_total", "counter", "Bytes received"), |s| {
        by_interface(s, |i| i.rx_bytes)
    }),
    (("container_network_receive_errors_total", "counter", "Errors while receiving"), |s| {
        by_interface(s, |i| i.rx_errors)
    }),
    (("container_network_receive_packets_dropped_total", "counter", "Received packets dropped"), |s| {
        by_interface(s, |i| i.rx_dropped)
    }),
    (("container_network_receive_packets_total", "counter", "Packets received"), |s| {
        by_interface(s, |i| i.rx_packets)
    }),
    (("container_network_transmit_bytes_total", "counter", "Bytes sent"), |s| {
        by_interface(s, |i| i.tx_bytes)
    }),
    (("container_network_transmit_errors_total", "counter", "Errors while sending"), |s| {
        by_interface(s, |i| i.tx_errors)
    }),
    (
        (
            "container_network_transmit_packets_dropped_total",
            "counter",
            "Packets dropped before they were sent",
        ),
        |s| by_interface(s, |i| i.tx_dropped),
    ),
    (("container_network_transmit_packets_total", "counter", "Packets sent"), |s| {
        by_interface(s, |i| i.tx_packets)
    }),
];
