//! `/metrics/cadvisor`: the usage of each cgroup, under cAdvisor's metric names (node-and-api.md §15.3).
//!
//! resource-manager reads a few files of each cgroup for every request. The cgroups of the node and of the QoS classes have
//! samples, too, with empty names.

mod families;

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use keelson_proto::keelson::resource_manager::v1 as rm;

use crate::cadvisor::families::{LABELLED, SIMPLE, memory};
use crate::metrics_text::{Family, escaped, write_family};
use crate::{App, metrics, statistics};

/// `GET /metrics/cadvisor`. Without statistics the response contains only the scrape errors, with value 1.
pub(crate) async fn get(State(app): State<App>) -> Response {
    let text = match statistics::cgroups(&app).await {
        Ok((machine, cgroups)) => text(&machine, &cgroups),
        Err(status) => {
            tracing::warn!(error = status.message(), "cannot read the statistics for /metrics/cadvisor");
            failed()
        }
    };
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

type Stats = rm::CgroupStatsResponse;

const ERROR: Family = ("container_scrape_error", "gauge", "1 if containers could not be read");
const VERSION: Family = ("cadvisor_version_info", "gauge", "Versions; always 1");
const CORES: Family = ("machine_cpu_cores", "gauge", "CPUs of the machine");
const MEMORY: Family = ("machine_memory_bytes", "gauge", "Memory of the machine");
const PHYSICAL_CORES: Family = ("machine_cpu_physical_cores", "gauge", "Cores of the machine");
const SOCKETS: Family = ("machine_cpu_sockets", "gauge", "CPU sockets of the machine");
const NODE_MEMORY: Family = ("machine_node_memory_capacity_bytes", "gauge", "Memory of each NUMA node");
const MACHINE_ERROR: Family = ("machine_scrape_error", "gauge", "1 if the machine could not be read");
const SWAP: Family = ("machine_swap_bytes", "gauge", "Swap of the machine");

/// The labels of a cgroup, without braces.
fn labels(stats: &Stats) -> String {
    let pod = stats.pod.clone().unwrap_or_default();
    let pairs = [
        ("container", stats.container.as_str()),
        ("id", stats.path.as_str()),
        ("image", stats.image.as_str()),
        ("name", stats.id.as_str()),
        ("namespace", pod.namespace.as_str()),
        ("pod", pod.name.as_str()),
    ];
    let all: Vec<String> =
        pairs.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    all.join(",")
}

/// The metrics in text format 0.0.4. Each sample of a cgroup has a timestamp.
fn text(machine: &rm::Machine, cgroups: &[Stats]) -> String {
    let labelled: Vec<(String, &Stats, Option<i64>)> = cgroups
        .iter()
        .map(|stats| {
            let taken = stats.usage.as_ref().map(|usage| usage.taken_unix_nanos / 1_000_000);
            (labels(stats), stats, taken)
        })
        .collect();
    let mut text = String::new();
    for (family, getter) in SIMPLE {
        let samples = labelled.iter().filter_map(|(labels, stats, taken)| {
            getter(stats).map(|value| (format!("{{{labels}}}"), value, *taken))
        });
        write_family(&mut text, family, samples);
    }
    for (family, getter) in LABELLED {
        let samples = labelled.iter().flat_map(|(labels, stats, taken)| {
            let rows = getter(stats).into_iter();
            rows.map(move |(own, value)| (format!("{{{labels},{own}}}"), value, *taken))
        });
        write_family(&mut text, family, samples);
    }
    write_machine(&mut text, machine, cgroups.first());
    write_family(&mut text, &ERROR, [(String::new(), 0.0, None)]);
    text
}

/// Writes the machine metrics. The size of the swap comes from `top`, the root cgroup.
fn write_machine(text: &mut String, machine: &rm::Machine, top: Option<&Stats>) {
    let ids = format!(
        "{{boot_id=\"{}\",machine_id=\"{}\",system_uuid=\"{}\"}}",
        escaped(&machine.boot_id),
        escaped(&machine.machine_id),
        escaped(&machine.system_uuid)
    );
    let versions = format!(
        "{{cadvisorRevision=\"\",cadvisorVersion=\"\",dockerVersion=\"\",kernelVersion=\"{}\",osVersion=\"{}\"}}",
        escaped(&machine.kernel_version),
        escaped(&machine.os_image)
    );
    write_family(text, &VERSION, [(versions, 1.0, None)]);
    let amount = |name: &str| machine.capacity.get(name).map(|amount| *amount as f64);
    let row = |value: Option<f64>| value.map(|value| (ids.clone(), value, None));
    write_family(text, &CORES, row(amount("cpu").map(|milli| milli / 1000.0)));
    let count = |count: u32| (count > 0).then_some(f64::from(count));
    write_family(text, &PHYSICAL_CORES, row(count(machine.physical_cores)));
    write_family(text, &SOCKETS, row(count(machine.sockets)));
    write_family(text, &MEMORY, row(amount("memory")));
    let nodes: BTreeMap<u32, u64> = machine.node_memory.iter().map(|(node, bytes)| (*node, *bytes)).collect();
    let of_node = |(node, bytes): (u32, u64)| {
        let labels = format!("{},node_id=\"{node}\"}}", ids.trim_end_matches('}'));
        (labels, bytes as f64, None)
    };
    write_family(text, &NODE_MEMORY, nodes.into_iter().map(of_node));
    let swap = top.and_then(|top| memory(top, |m| Some(m.swap_usage? + m.swap_available?)));
    write_family(text, &SWAP, row(swap));
    write_family(text, &MACHINE_ERROR, [(String::new(), 0.0, None)]);
}

fn failed() -> String {
    let mut text = String::new();
    for family in [&ERROR, &MACHINE_ERROR] {
        write_family(&mut text, family, [(String::new(), 1.0, None)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use keelson_proto::keelson::common::v1::PodRef;

    use super::*;

    fn share(total_nanos: u64) -> Option<rm::PressureShare> {
        Some(rm::PressureShare { total_nanos, ..Default::default() })
    }

    /// A container, or a sandbox if `container` is empty; each field has a different value.
    fn cgroup(container: &str) -> Stats {
        let interface = rm::Interface {
            name: "eth0".into(),
            rx_bytes: 1,
            rx_errors: 2,
            tx_bytes: 3,
            tx_errors: 4,
            rx_packets: 5,
            rx_dropped: 6,
            tx_packets: 7,
            tx_dropped: 8,
        };
        Stats {
            path: format!("/kubepods/podu/{container}x"),
            pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
            id: format!("{container}x"),
            container: container.into(),
            image: "i:1".into(),
            started_unix_nanos: 1_600_000_000_900_000_000,
            usage: Some(usage()),
            detail: Some(detail()),
            network: container
                .is_empty()
                .then(|| rm::Network { taken_unix_nanos: 0, interfaces: vec![interface] }),
        }
    }

    fn usage() -> rm::Usage {
        let pressure = |some, full| Some(rm::Pressure { some: share(some), full: share(full) });
        rm::Usage {
            taken_unix_nanos: 1_700_000_000_123_456_789,
            cpu_nanos: Some(2_500_000_000),
            memory: Some(rm::MemoryUsage {
                usage: 20,
                working_set: 21,
                rss: 22,
                page_faults: 23,
                major_page_faults: 24,
                swap_usage: Some(25),
                swap_available: Some(75),
                ..Default::default()
            }),
            cpu_pressure: pressure(1_000_000_000, 2_000_000_000),
            memory_pressure: pressure(3_000_000_000, 4_000_000_000),
            io_pressure: pressure(5_000_000_000, 6_000_000_000),
            ..Default::default()
        }
    }

    fn detail() -> rm::CgroupDetail {
        rm::CgroupDetail {
            cpu_user_nanos: Some(1_500_000_000),
            cpu_system_nanos: Some(500_000_000),
            cpu_periods: Some(30),
            cpu_throttled_periods: Some(31),
            cpu_throttled_nanos: Some(250_000_000),
            cpu_shares: Some(32),
            cpu_quota_us: Some(33),
            cpu_period_us: Some(34),
            memory_cache: Some(35),
            memory_mapped_file: Some(36),
            memory_kernel: Some(37),
            memory_max_usage: Some(38),
            memory_failures: Some(39),
            memory_active_file: Some(40),
            memory_inactive_file: Some(41),
            memory_limit: Some(42),
            memory_reservation: None,
            memory_swap_limit: Some(43),
            oom_kills: Some(44),
            processes: Some(46),
            threads: Some(45),
            threads_limit: None,
            devices: vec![rm::BlockDevice {
                name: "/dev/vda".into(),
                major: 254,
                minor: 1,
                reads: 50,
                writes: 51,
                read_bytes: 52,
                write_bytes: 53,
            }],
        }
    }

    fn machine() -> rm::Machine {
        rm::Machine {
            capacity: [("cpu".to_owned(), 2000), ("memory".to_owned(), 4096)].into(),
            boot_id: "b".into(),
            machine_id: "m".into(),
            system_uuid: "s".into(),
            kernel_version: "6.1".into(),
            os_image: "Debian".into(),
            physical_cores: 3,
            sockets: 1,
            node_memory: [(0, 4000), (1, 96)].into(),
            ..Default::default()
        }
    }

    /// The sample lines, without common labels and timestamps.
    fn samples(text: &str, common: &str) -> BTreeSet<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.replace(common, "").replace(" 1700000000123", "")).collect()
    }

    /// The samples of [`cgroup`] with one label of their own at most.
    const SIMPLE_SAMPLES: &[&str] = &[
        "container_cpu_cfs_periods_total{} 30",
        "container_cpu_cfs_throttled_periods_total{} 31",
        "container_cpu_cfs_throttled_seconds_total{} 0.25",
        "container_cpu_system_seconds_total{} 0.5",
        "container_cpu_user_seconds_total{} 1.5",
        "container_cpu_usage_seconds_total{,cpu=\"total\"} 2.5",
        "container_last_seen{} 1700000000",
        "container_memory_cache{} 35",
        "container_memory_failcnt{} 39",
        "container_memory_kernel_usage{} 37",
        "container_memory_mapped_file{} 36",
        "container_memory_max_usage_bytes{} 38",
        "container_memory_rss{} 22",
        "container_memory_swap{} 25",
        "container_memory_total_active_file_bytes{} 40",
        "container_memory_total_inactive_file_bytes{} 41",
        "container_memory_usage_bytes{} 20",
        "container_memory_working_set_bytes{} 21",
        "container_oom_events_total{} 44",
        "container_pressure_cpu_waiting_seconds_total{} 1",
        "container_pressure_cpu_stalled_seconds_total{} 2",
        "container_pressure_memory_waiting_seconds_total{} 3",
        "container_pressure_memory_stalled_seconds_total{} 4",
        "container_pressure_io_waiting_seconds_total{} 5",
        "container_pressure_io_stalled_seconds_total{} 6",
        "container_spec_cpu_period{} 34",
        "container_spec_cpu_quota{} 33",
        "container_spec_cpu_shares{} 32",
        "container_spec_memory_limit_bytes{} 42",
        "container_spec_memory_reservation_limit_bytes{} 0",
        "container_spec_memory_swap_limit_bytes{} 43",
        "container_start_time_seconds{} 1600000000",
        "container_processes{} 46",
        "container_threads{} 45",
        "container_threads_max{} 0",
        "container_fs_reads_total{,device=\"/dev/vda\"} 50",
        "container_fs_writes_total{,device=\"/dev/vda\"} 51",
        "container_fs_reads_bytes_total{,device=\"/dev/vda\"} 52",
        "container_fs_writes_bytes_total{,device=\"/dev/vda\"} 53",
    ];

    /// The samples of [`cgroup`] with labels of their own.
    fn labelled_samples() -> Vec<String> {
        let mut samples = Vec::new();
        for (operation, bytes) in [("Read", 52), ("Write", 53)] {
            let labels = format!(",device=\"/dev/vda\",major=\"254\",minor=\"1\",operation=\"{operation}\"");
            samples.push(format!("container_blkio_device_usage_total{{{labels}}} {bytes}"));
        }
        for (kind, count) in [("pgfault", 23), ("pgmajfault", 24)] {
            for scope in ["container", "hierarchy"] {
                let labels = format!(",failure_type=\"{kind}\",scope=\"{scope}\"");
                samples.push(format!("container_memory_failures_total{{{labels}}} {count}"));
            }
        }
        samples
    }

    /// The samples of [`machine`], and those of a scrape without errors.
    fn machine_samples() -> Vec<String> {
        let mut samples = vec!["container_scrape_error 0".to_owned(), "machine_scrape_error 0".to_owned()];
        let ids = "{boot_id=\"b\",machine_id=\"m\",system_uuid=\"s\"}";
        for (name, value) in [
            ("cpu_cores", 2),
            ("cpu_physical_cores", 3),
            ("cpu_sockets", 1),
            ("memory_bytes", 4096),
            ("swap_bytes", 100),
        ] {
            samples.push(format!("machine_{name}{ids} {value}"));
        }
        for (node, bytes) in [(0, 4000), (1, 96)] {
            let labels = format!("boot_id=\"b\",machine_id=\"m\",system_uuid=\"s\",node_id=\"{node}\"");
            samples.push(format!("machine_node_memory_capacity_bytes{{{labels}}} {bytes}"));
        }
        samples.push(
            "cadvisor_version_info{cadvisorRevision=\"\",cadvisorVersion=\"\",dockerVersion=\"\",\
             kernelVersion=\"6.1\",osVersion=\"Debian\"} 1"
                .to_owned(),
        );
        samples
    }

    /// node-and-api.md §15.3.
    #[test]
    fn container_metrics_have_cadvisors_names_and_values() {
        let text = text(&machine(), &[cgroup("main")]);
        let common = "container=\"main\",id=\"/kubepods/podu/mainx\",image=\"i:1\",name=\"mainx\",namespace=\"default\",pod=\"web\"";
        let simple = SIMPLE_SAMPLES.iter().map(|sample| (*sample).to_owned());
        let expected: BTreeSet<String> = simple.chain(labelled_samples()).chain(machine_samples()).collect();
        assert_eq!(samples(&text, common), expected);
    }

    #[test]
    fn network_metrics_are_those_of_the_sandbox() {
        let text = text(&machine(), &[cgroup(""), cgroup("main")]);
        for (name, value) in [
            ("receive_bytes", 1),
            ("receive_errors", 2),
            ("transmit_bytes", 3),
            ("transmit_errors", 4),
            ("receive_packets", 5),
            ("receive_packets_dropped", 6),
            ("transmit_packets", 7),
            ("transmit_packets_dropped", 8),
        ] {
            let lines: Vec<&str> = text
                .lines()
                .filter(|l| l.starts_with(&format!("container_network_{name}_total{{")))
                .collect();
            assert_eq!(lines.len(), 1, "{lines:?}");
            let ends = format!("interface=\"eth0\"}} {value} 1700000000123");
            assert!(
                lines[0].contains("{container=\"\",id=\"/kubepods/podu/x\"") && lines[0].ends_with(&ends)
            );
        }
    }

    #[test]
    fn metric_families_are_announced_once_and_omitted_without_samples() {
        let text = text(&machine(), &[cgroup("a"), cgroup("b")]);
        let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let different: BTreeSet<&&str> = names.iter().collect();
        assert_eq!(names.len(), different.len());
        for line in names {
            let (name, kind) = line.split_once(' ').unwrap();
            let counts = name.ends_with("_total") || name == "container_memory_failcnt";
            assert_eq!(kind, if counts { "counter" } else { "gauge" }, "{name}");
        }
        let text = super::text(&rm::Machine::default(), &[Stats { path: "/".into(), ..Stats::default() }]);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples.len(), 3, "{samples:?}");
    }

    #[test]
    fn cfs_periods_are_omitted_without_a_cpu_quota() {
        let mut unlimited = cgroup("main");
        unlimited.detail.as_mut().unwrap().cpu_quota_us = None;
        let text = text(&machine(), &[unlimited]);
        assert!(!text.contains("container_cpu_cfs_") && !text.contains("container_spec_cpu_quota"), "{text}");
        assert!(text.contains("container_spec_cpu_shares"));
    }
}
