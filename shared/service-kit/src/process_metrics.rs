//! Resource usage of this process (node-and-api.md §15.2), read from /proc at each scrape.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// The `process_…` families of client libraries, and the number of asynchronous tasks as `go_goroutines`, which
/// dashboards of Go programs ask for.
#[derive(Debug)]
pub(crate) struct ProcessMetrics;

/// Fields of `/proc/<pid>/stat` (proc(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    /// User and system time in clock ticks.
    cpu_ticks: u64,
    /// Start time since boot, in clock ticks.
    started_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    /// `None` when the text is truncated. The process name, in parentheses, may contain any character.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
        // The first of them is field 3 in proc(5).
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            started_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Number of files that this process may have open (the soft limit); `None` when it is unlimited or cannot be read.
pub fn open_files_limit() -> Option<u64> {
    fs::read_to_string("/proc/self/limits").ok().and_then(|text| most_files(&text))
}

/// The soft limit of open files from `/proc/<pid>/limits`; `None` when it is unlimited.
fn most_files(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Boot time in seconds since 1970, from `/proc/stat`.
fn boot_seconds(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut gauge = |name: &str, help: &str, value: Option<f64>| match value {
            Some(value) => {
                let gauge = ConstGauge::new(value);
                gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
            }
            None => Ok(()),
        };
        let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::parse(&text));
        let hertz = rustix::param::clock_ticks_per_second() as f64;
        let booted = fs::read_to_string("/proc/stat").ok().and_then(|text| boot_seconds(&text));
        let started =
            stat.zip(booted).map(|(stat, booted)| booted as f64 + stat.started_ticks as f64 / hertz);
        gauge("process_start_time_seconds", "When the process began, in seconds since 1970", started)?;
        let size = stat.map(|stat| stat.virtual_bytes as f64);
        gauge("process_virtual_memory_bytes", "Addresses of the process that are mapped, in bytes", size)?;
        let resident = stat.map(|stat| (stat.resident_pages * rustix::param::page_size() as u64) as f64);
        let help =
            "Memory of the process that is resident, in bytes; pages that services share count for each";
        gauge("process_resident_memory_bytes", help, resident)?;
        let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count().saturating_sub(1) as f64);
        gauge("process_open_fds", "Open file descriptors of the process", open)?;
        let most = open_files_limit();
        gauge("process_max_fds", "How many file descriptors it may have open", most.map(|most| most as f64))?;
        let tasks = tokio::runtime::Handle::try_current().ok();
        let tasks = tasks.map(|handle| handle.metrics().num_alive_tasks() as f64);
        gauge(
            "go_goroutines",
            "Asynchronous tasks of the process, under the name that Go programs use",
            tasks,
        )?;
        if let Some(stat) = stat {
            let counter = ConstCounter::new(stat.cpu_ticks as f64 / hertz);
            let help = "User and system CPU time of the process in seconds";
            let name = "process_cpu_seconds";
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_is_parsed_after_any_process_name() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 700 30 13 14 20 0 9 0 4500 8192000 321 18446744073709551615 1";
        let read =
            Stat { cpu_ticks: 730, started_ticks: 4500, virtual_bytes: 8_192_000, resident_pages: 321 };
        assert_eq!(Stat::parse(&format!("77 (a) b ( c) {rest}")), Some(read));
        assert_eq!(Stat::parse("77 (a) S 1 2 3"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn open_files_limit_and_boot_time_are_parsed_or_absent() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max processes             95879                95879                processes\n\
            Max open files            1024                 1048576              files\n";
        assert_eq!(most_files(limits), Some(1024));
        assert_eq!(
            most_files("Max open files            unlimited            unlimited            files\n"),
            None
        );
        assert_eq!(boot_seconds("cpu 1 2\nbtime 1700000000\nprocesses 3\n"), Some(1_700_000_000));
        assert_eq!(boot_seconds("cpu 1 2\n"), None);
    }

    #[tokio::test]
    async fn process_metrics_report_own_usage() {
        let text = crate::Metrics::new().text();
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("no {name}: {text}")).parse().unwrap()
        };
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let started = value("process_start_time_seconds");
        assert!(started <= now && started > now - 86_400.0, "{started} {now}");
        assert!(value("process_resident_memory_bytes") > 1e6, "{text}");
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"), "{text}");
        assert!(value("process_open_fds") >= 3.0 && value("process_open_fds") <= value("process_max_fds"));
        assert!(value("process_cpu_seconds_total") >= 0.0 && value("go_goroutines") >= 0.0, "{text}");
    }
}
