//! Resource usage of this process, for `GetUsage`.

use std::fs;

use keelson_proto::keelson::admin::v1::GetUsageResponse;

use crate::{memory, now_unix_nanos};

/// Reads the usage from the kernel; a value that cannot be read is 0 or absent.
pub(crate) fn read(with_pss: bool, started_unix_nanos: i64) -> GetUsageResponse {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let rollup = if with_pss { fs::read_to_string("/proc/self/smaps_rollup").ok() } else { None };
    GetUsageResponse {
        taken_unix_nanos: now_unix_nanos(),
        cpu_nanos: memory::cpu_nanos(),
        rss_bytes: resident_pages(&statm).unwrap_or(0) * rustix::param::page_size() as u64,
        pss_bytes: rollup.as_deref().and_then(pss_bytes),
        started_unix_nanos,
        pid: std::process::id(),
    }
}

/// The second field of `/proc/<pid>/statm` (proc(5)).
fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The line `Pss:` of `/proc/<pid>/smaps_rollup`, which is in KiB.
fn pss_bytes(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_and_smaps_rollup_are_parsed() {
        assert_eq!(resident_pages("1000 250 90 1 0 300 0\n"), Some(250));
        assert_eq!(resident_pages(""), None);
        let rollup = "5581-7ffe ---p 00000000 00:00 0 [rollup]\nRss:            1820 kB\nPss:             684 kB\nPss_Dirty: 1 kB\n";
        assert_eq!(pss_bytes(rollup), Some(684 * 1024));
        assert_eq!(pss_bytes("Rss: 1 kB"), None);
    }

    #[test]
    fn own_process_usage_is_reported() {
        let own = read(true, 7);
        assert!(own.cpu_nanos > 0 && own.rss_bytes > 1 << 20, "{own:?}");
        assert!(own.pss_bytes.is_some_and(|pss| pss > 0 && pss <= own.rss_bytes), "{own:?}");
        assert_eq!((own.pid, own.started_unix_nanos), (std::process::id(), 7));
        assert_eq!(read(false, 0).pss_bytes, None);
    }
}
