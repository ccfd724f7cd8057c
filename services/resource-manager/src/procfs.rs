//! Statistics from `/proc`: the boot time and network interfaces.

use std::fs;

use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_resource_manager_core::statistics::{boot_seconds, interfaces};
use keelson_service_kit::now_unix_nanos;

use crate::wire_stats as wire;

/// The interfaces of a `/proc/<pid>/net/dev`; none when the file does not exist.
pub(crate) fn network(file: &str) -> Option<pb::Network> {
    let interfaces = interfaces(&fs::read_to_string(file).ok()?);
    Some(pb::Network {
        taken_unix_nanos: now_unix_nanos(),
        interfaces: interfaces.into_iter().map(wire::interface).collect(),
    })
}

/// The boot time in nanoseconds since 1970; 0 when unknown.
pub(crate) fn boot_unix_nanos() -> i64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let seconds = boot_seconds(&stat).and_then(|seconds| i64::try_from(seconds).ok());
    seconds.unwrap_or(0).saturating_mul(1_000_000_000)
}
