//! Conversion of statistics to wire types.

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::detail::{Detail, DeviceNumber, Transfers};
use keelson_resource_manager_core::statistics::{Interface, Memory, Pressure, PressureShare, Usage};

/// The usage of a cgroup at `taken` (nanoseconds since 1970); `rate` computes the CPU rate from its CPU time.
pub(crate) fn usage(usage: Usage, taken: i64, rate: impl FnOnce(u64) -> Option<u64>) -> pb::Usage {
    pb::Usage {
        taken_unix_nanos: taken,
        cpu_nanos: usage.cpu_nanos,
        cpu_nano_cores: usage.cpu_nanos.and_then(rate),
        memory: usage.memory.map(memory),
        cpu_pressure: usage.cpu_pressure.map(pressure),
        memory_pressure: usage.memory_pressure.map(pressure),
        io_pressure: usage.io_pressure.map(pressure),
    }
}

const fn memory(memory: Memory) -> pb::MemoryUsage {
    pb::MemoryUsage {
        usage: memory.usage,
        working_set: memory.working_set,
        rss: memory.rss,
        page_faults: memory.page_faults,
        major_page_faults: memory.major_page_faults,
        available: memory.available,
        swap_usage: memory.swap_usage,
        swap_available: memory.swap_available,
    }
}

const fn pressure(pressure: Pressure) -> pb::Pressure {
    pb::Pressure { some: Some(share(pressure.some)), full: Some(share(pressure.full)) }
}

const fn share(share: PressureShare) -> pb::PressureShare {
    let PressureShare { total_nanos, avg10, avg60, avg300 } = share;
    pb::PressureShare { total_nanos, avg10, avg60, avg300 }
}

/// A network interface.
pub(crate) fn interface(interface: Interface) -> pb::Interface {
    pb::Interface {
        name: interface.name,
        rx_bytes: interface.rx_bytes,
        rx_packets: interface.rx_packets,
        rx_errors: interface.rx_errors,
        rx_dropped: interface.rx_dropped,
        tx_bytes: interface.tx_bytes,
        tx_packets: interface.tx_packets,
        tx_errors: interface.tx_errors,
        tx_dropped: interface.tx_dropped,
    }
}

/// The detailed usage of a cgroup; `names` returns the name of a device.
pub(crate) fn detail(detail: Detail, names: impl Fn(DeviceNumber) -> String) -> pb::CgroupDetail {
    let device = |(number, transfers): (DeviceNumber, Transfers)| pb::BlockDevice {
        name: names(number),
        major: number.major,
        minor: number.minor,
        reads: transfers.reads,
        writes: transfers.writes,
        read_bytes: transfers.read_bytes,
        write_bytes: transfers.write_bytes,
    };
    pb::CgroupDetail {
        cpu_user_nanos: detail.cpu_user_nanos,
        cpu_system_nanos: detail.cpu_system_nanos,
        cpu_periods: detail.cpu_periods,
        cpu_throttled_periods: detail.cpu_throttled_periods,
        cpu_throttled_nanos: detail.cpu_throttled_nanos,
        cpu_shares: detail.cpu_shares,
        cpu_quota_us: detail.cpu_quota_us,
        cpu_period_us: detail.cpu_period_us,
        memory_cache: detail.memory_cache,
        memory_mapped_file: detail.memory_mapped_file,
        memory_kernel: detail.memory_kernel,
        memory_max_usage: detail.memory_max_usage,
        memory_failures: detail.memory_failures,
        memory_active_file: detail.memory_active_file,
        memory_inactive_file: detail.memory_inactive_file,
        memory_limit: detail.memory_limit,
        memory_reservation: detail.memory_reservation,
        memory_swap_limit: detail.memory_swap_limit,
        oom_kills: detail.oom_kills,
        processes: detail.processes,
        threads: detail.threads,
        threads_limit: detail.threads_limit,
        devices: detail.devices.into_iter().map(device).collect(),
    }
}
