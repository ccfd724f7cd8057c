//! `/metrics/resource`: CPU and memory for autoscaling (node-and-api.md §15.4).

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use keelson_proto::keelson::resource_manager::v1 as rm;

use crate::metrics_text::{Family, escaped, write_family};
use crate::{App, metrics, statistics};

/// `GET /metrics/resource`. Without statistics the response contains only `resource_scrape_error` 1.
pub(crate) async fn get(State(app): State<App>) -> Response {
    let text = match statistics::all(&app, true).await {
        Ok((node, pods)) => text(&node, &pods),
        Err(status) => {
            tracing::warn!(error = status.message(), "cannot read the statistics for /metrics/resource");
            failed()
        }
    };
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

/// Reads the value of a family from the usage of a cgroup.
type Getter = fn(&rm::Usage) -> Option<f64>;

const CPU: Getter = |usage| usage.cpu_nanos.map(seconds);
const WORKING_SET: Getter = |usage| usage.memory.as_ref().map(|memory| memory.working_set as f64);
const SWAP: Getter = |usage| usage.memory.as_ref()?.swap_usage.map(|bytes| bytes as f64);
const SWAP_LIMIT: Getter = |usage| {
    let memory = usage.memory.as_ref()?;
    Some(memory.swap_available?.saturating_add(memory.swap_usage?) as f64)
};

/// The families of containers, sorted by name.
const CONTAINER: &[(Family, Getter)] = &[
    (("container_cpu_usage_seconds_total", "counter", "CPU time used by the container"), CPU),
    (("container_memory_working_set_bytes", "gauge", "Working set of the container"), WORKING_SET),
    (("container_swap_limit_bytes", "gauge", "Swap limit of the container"), SWAP_LIMIT),
    (("container_swap_usage_bytes", "gauge", "Swap used by the container"), SWAP),
];
const START: Family =
    ("container_start_time_seconds", "gauge", "When the container was started, in seconds since 1970");
const NODE: &[(Family, Getter)] = &[
    (("node_cpu_usage_seconds_total", "counter", "CPU time used by the node"), CPU),
    (("node_memory_working_set_bytes", "gauge", "Working set of the node"), WORKING_SET),
    (("node_swap_usage_bytes", "gauge", "Swap used by the node"), SWAP),
];
const POD: &[(Family, Getter)] = &[
    (("pod_cpu_usage_seconds_total", "counter", "CPU time used by the pod"), CPU),
    (("pod_memory_working_set_bytes", "gauge", "Working set of the pod"), WORKING_SET),
    (("pod_swap_usage_bytes", "gauge", "Swap used by the pod"), SWAP),
];
const ERROR: Family = ("resource_scrape_error", "gauge", "1 if the statistics could not be read");

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// The metrics in text format 0.0.4. Each sample has a timestamp, except start times and the scrape error.
fn text(node: &rm::NodeStatsResponse, pods: &[rm::PodStatsResponse]) -> String {
    let mut text = String::new();
    let containers: Vec<(String, &rm::ContainerStats)> = pods.iter().flat_map(containers).collect();
    for (family, getter) in CONTAINER {
        let samples = containers.iter().map(|(labels, container)| (labels.as_str(), &container.usage));
        write_usage_family(&mut text, family, *getter, samples);
    }
    let started = containers.iter().filter(|(_, container)| container.started_unix_nanos > 0);
    let started = started.map(|(labels, c)| (labels.as_str(), c.started_unix_nanos as f64 / 1e9, None));
    write_family(&mut text, &START, started);
    for (family, getter) in NODE {
        write_usage_family(&mut text, family, *getter, [("", &node.usage)]);
    }
    let pods: Vec<(String, &Option<rm::Usage>)> =
        pods.iter().map(|pod| (pod_labels(pod), &pod.usage)).collect();
    for (family, getter) in POD {
        let samples = pods.iter().map(|(labels, usage)| (labels.as_str(), *usage));
        write_usage_family(&mut text, family, *getter, samples);
    }
    write_family(&mut text, &ERROR, [("", 0.0, None)]);
    text
}

fn failed() -> String {
    let mut text = String::new();
    write_family(&mut text, &ERROR, [("", 1.0, None)]);
    text
}

fn pod_labels(pod: &rm::PodStatsResponse) -> String {
    let pod_ref = pod.pod.clone().unwrap_or_default();
    format!("{{namespace=\"{}\",pod=\"{}\"}}", escaped(&pod_ref.namespace), escaped(&pod_ref.name))
}

/// The containers of a pod, with their labels.
fn containers(pod: &rm::PodStatsResponse) -> impl Iterator<Item = (String, &rm::ContainerStats)> {
    let of_pod = pod_labels(pod);
    pod.containers.iter().map(move |container| {
        let labels = format!("{{container=\"{}\",{}", escaped(&container.name), &of_pod[1..]);
        (labels, container)
    })
}

fn write_usage_family<'a>(
    text: &mut String,
    family: &Family,
    getter: Getter,
    samples: impl IntoIterator<Item = (&'a str, &'a Option<rm::Usage>)>,
) {
    let samples = samples.into_iter().filter_map(|(labels, usage)| {
        let usage = usage.as_ref()?;
        Some((labels, getter(usage)?, Some(usage.taken_unix_nanos / 1_000_000)))
    });
    write_family(text, family, samples);
}

#[cfg(test)]
mod tests {
    use keelson_proto::keelson::common::v1::PodRef;

    use super::*;

    fn usage(cpu_nanos: u64, working_set: u64, swap: Option<(u64, u64)>) -> Option<rm::Usage> {
        let memory = rm::MemoryUsage {
            working_set,
            swap_usage: swap.map(|(used, _)| used),
            swap_available: swap.map(|(_, left)| left),
            ..Default::default()
        };
        let (cpu_nanos, memory) = (Some(cpu_nanos), Some(memory));
        Some(rm::Usage {
            taken_unix_nanos: 1_700_000_000_123_456_789,
            cpu_nanos,
            memory,
            ..Default::default()
        })
    }

    fn pod() -> rm::PodStatsResponse {
        rm::PodStatsResponse {
            pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
            usage: usage(2_000_000_000, 2048, Some((8, 8))),
            containers: vec![rm::ContainerStats {
                name: "c".into(),
                started_unix_nanos: 1_600_000_000_500_000_000,
                usage: usage(1_500_000_000, 1024, Some((4, 6))),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    /// node-and-api.md §15.4, each name with its labels; no more and no less, sorted by name.
    #[test]
    fn resource_metrics_match_the_kubelets() {
        let node =
            rm::NodeStatsResponse { usage: usage(3_250_000_000, 4096, Some((1, 2))), ..Default::default() };
        let text = text(&node, &[pod()]);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let of_c = "{container=\"c\",namespace=\"default\",pod=\"web\"}";
        let of_pod = "{namespace=\"default\",pod=\"web\"}";
        let mut expected = vec![
            format!("container_cpu_usage_seconds_total{of_c} 1.5 1700000000123"),
            format!("container_memory_working_set_bytes{of_c} 1024 1700000000123"),
            format!("container_start_time_seconds{of_c} 1600000000.5"),
            format!("container_swap_limit_bytes{of_c} 10 1700000000123"),
            format!("container_swap_usage_bytes{of_c} 4 1700000000123"),
            "node_cpu_usage_seconds_total 3.25 1700000000123".to_owned(),
            "node_memory_working_set_bytes 4096 1700000000123".to_owned(),
            "node_swap_usage_bytes 1 1700000000123".to_owned(),
            format!("pod_cpu_usage_seconds_total{of_pod} 2 1700000000123"),
            format!("pod_memory_working_set_bytes{of_pod} 2048 1700000000123"),
            format!("pod_swap_usage_bytes{of_pod} 8 1700000000123"),
            "resource_scrape_error 0".to_owned(),
        ];
        let mut samples: Vec<String> = samples.into_iter().map(ToOwned::to_owned).collect();
        samples.sort();
        expected.sort();
        assert_eq!(samples, expected);
        for name in expected.iter().map(|line| line.split(['{', ' ']).next().unwrap()) {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let (help, kind) = (format!("# HELP {name} "), format!("# TYPE {name} {kind}\n"));
            assert!(text.matches(&help).count() == 1 && text.matches(&kind).count() == 1, "{name}: {text}");
        }
    }

    #[test]
    fn unknown_values_have_no_sample_and_no_family() {
        let node = rm::NodeStatsResponse { usage: usage(1, 1, None), ..Default::default() };
        let mut pod = pod();
        pod.usage = None;
        pod.containers[0].started_unix_nanos = 0;
        pod.containers[0].usage = usage(1, 1, None);
        let text = text(&node, &[pod]);
        for absent in ["swap", "pod_cpu", "pod_memory", "start_time"] {
            assert!(!text.contains(absent), "{absent} in {text}");
        }
        assert!(text.contains("container_cpu_usage_seconds_total{"));
    }

    #[test]
    fn failed_read_leaves_only_the_scrape_error() {
        let text = failed();
        assert_eq!(text.lines().last(), Some("resource_scrape_error 1"));
        assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 1);
    }
}
