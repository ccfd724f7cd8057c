//! Statistics as neighbours see them.

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::statistics::{Interface, Memory, Pressure, PressureShare, Usage};

/// What a cgroup used at `taken` (nanoseconds since 1970); `rate` tells the rate that goes with its CPU time.
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

/// An interface.
pub(crate) fn interface(interface: Interface) -> pb::Interface {
    let Interface { name, rx_bytes, rx_errors, tx_bytes, tx_errors } = interface;
    pb::Interface { name, rx_bytes, rx_errors, tx_bytes, tx_errors }
}
