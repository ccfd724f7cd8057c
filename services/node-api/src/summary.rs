//! `/stats/summary`: the usage of the node and its pods as a Summary (node-and-api.md §8.10).

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::join;
use jiff::Timestamp;
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::volume_manager::v1::VolumeStats;
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::volume_statistics::VolumesByPod;
use crate::{App, statistics};

/// The interface whose counters are also in the fields besides `interfaces`.
const DEFAULT_INTERFACE: &str = "eth0";

/// `GET` or `POST /stats/summary`; `only_cpu_and_memory=true` omits the rest. The summary is complete or, as in a kubelet, the
/// response is 500. Only the claims of volumes are missing while volume-manager does not answer.
pub(crate) async fn get(
    State(app): State<App>,
    Query(query): Query<Vec<(String, String)>>,
    form: Bytes,
) -> Result<Response, ApiError> {
    let cpu_and_memory_only = only_cpu_and_memory(&query, &form);
    let volumes =
        async { if cpu_and_memory_only { VolumesByPod::default() } else { VolumesByPod::read(&app).await } };
    let (answer, volumes) = join(statistics::all(&app, cpu_and_memory_only), volumes).await;
    let (node, pods) = answer.map_err(|status| {
        let is_named = status.message().contains("resource-manager");
        let service = if is_named { "" } else { "resource-manager: " };
        let text = format!("Internal Error: {service}{}", status.message());
        tracing::warn!(error = status.message(), "cannot read the statistics for /stats/summary");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text)
    })?;
    let body = summary(&app.ctx.config.node_name, &node, pods, &volumes);
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Whether `only_cpu_and_memory` is `true`; it must be given exactly once, in the query or in the form of a POST.
fn only_cpu_and_memory(query: &[(String, String)], form: &[u8]) -> bool {
    const NAME: &str = "only_cpu_and_memory";
    let form = std::str::from_utf8(form).unwrap_or_default();
    let pairs = form.split('&').filter_map(|pair| pair.split_once('='));
    let pairs = pairs.chain(query.iter().map(|(key, value)| (key.as_str(), value.as_str())));
    let mut values = pairs.filter(|(key, _)| *key == NAME).map(|(_, value)| value);
    values.next() == Some("true") && values.next().is_none()
}

/// The JSON text of a Summary. Pods are serialized one by one, so that only one is in memory as a tree.
fn summary(
    node_name: &str,
    node: &rm::NodeStatsResponse,
    pods: Vec<rm::PodStatsResponse>,
    volumes: &VolumesByPod,
) -> String {
    let mut text = format!("{{\"node\":{},\"pods\":[", self::node(node_name, node));
    for (index, pod) in pods.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        text.push_str(&self::pod(pod, volumes).to_string());
    }
    text.push_str("]}");
    text
}

fn node(name: &str, node: &rm::NodeStatsResponse) -> Value {
    let mut fields = Map::new();
    fields.insert("nodeName".into(), name.into());
    let pods = node.pods.map(|usage| rm::ContainerStats {
        name: "pods".into(),
        started_unix_nanos: node.pods_started_unix_nanos,
        usage: Some(usage),
        ..Default::default()
    });
    let system: Vec<Value> = pods.iter().chain(&node.system).map(container).collect();
    if !system.is_empty() {
        fields.insert("systemContainers".into(), system.into());
    }
    fields.insert("startTime".into(), time(node.boot_unix_nanos));
    if let Some(usage) = &node.usage {
        fields.extend(self::usage(usage));
    }
    let runtime = object([
        ("imageFs", node.images.as_ref().map(filesystem)),
        ("containerFs", node.containers.as_ref().map(filesystem)),
    ]);
    let runtime = (!runtime.is_empty()).then(|| Value::from(runtime));
    fields.extend(object([
        ("network", node.network.as_ref().map(network)),
        ("fs", node.root.as_ref().map(filesystem)),
        ("runtime", runtime),
        ("rlimit", node.processes.as_ref().map(processes)),
    ]));
    fields.into()
}

fn pod(pod: rm::PodStatsResponse, volumes: &VolumesByPod) -> Value {
    let pod_ref = pod.pod.unwrap_or_default();
    let volumes: Vec<Value> = pod
        .volumes
        .iter()
        .map(|usage| volume(usage, &pod_ref.namespace, volumes.find(&pod_ref.uid, &usage.name)))
        .collect();
    let containers: Vec<Value> = pod.containers.iter().map(container).collect();
    let mut fields = Map::new();
    fields.insert(
        "podRef".into(),
        json!({"name": pod_ref.name, "namespace": pod_ref.namespace, "uid": pod_ref.uid}),
    );
    fields.insert("startTime".into(), time(pod.started_unix_nanos));
    fields.insert("containers".into(), containers.into());
    if let Some(usage) = &pod.usage {
        fields.extend(self::usage(usage));
    }
    fields.extend(object([
        ("network", pod.network.as_ref().map(network)),
        ("volume", (!volumes.is_empty()).then(|| volumes.into())),
        ("ephemeral-storage", pod.ephemeral_storage.as_ref().map(filesystem)),
        ("process_stats", pod.processes.map(|count| json!({"process_count": count}))),
    ]));
    fields.into()
}

fn container(container: &rm::ContainerStats) -> Value {
    let mut fields = object([
        ("name", Some(container.name.as_str().into())),
        ("startTime", Some(time(container.started_unix_nanos))),
    ]);
    if let Some(usage) = &container.usage {
        fields.extend(self::usage(usage));
    }
    fields.extend(object([
        ("rootfs", container.root.as_ref().map(filesystem)),
        ("logs", container.logs.as_ref().map(filesystem)),
    ]));
    fields.into()
}

/// The filesystem usage of a volume, its name, its claim in the `namespace` of the pod, and its health. `stats` is what
/// volume-manager knows about it.
fn volume(usage: &rm::VolumeUsage, namespace: &str, stats: Option<&VolumeStats>) -> Value {
    let mut fields = usage.filesystem.as_ref().map(filesystem).unwrap_or_else(|| json!({}));
    fields["name"] = usage.name.as_str().into();
    if let Some(claim) = stats.map(|stats| stats.claim.as_str()).filter(|claim| !claim.is_empty()) {
        fields["pvcRef"] = json!({"name": claim, "namespace": namespace});
    }
    if let Some(abnormal) = stats.and_then(|stats| stats.abnormal) {
        fields["volumeHealthStats"] = json!({"abnormal": abnormal});
    }
    fields
}

/// The fields `cpu`, `memory`, `io` and `swap`, as far as their values are known.
fn usage(usage: &rm::Usage) -> Map<String, Value> {
    let taken = time(usage.taken_unix_nanos);
    let cpu = usage.cpu_nanos.map(|nanos| {
        object([
            ("time", Some(taken.clone())),
            ("usageNanoCores", usage.cpu_nano_cores.map(Value::from)),
            ("usageCoreNanoSeconds", Some(nanos.into())),
            ("psi", usage.cpu_pressure.as_ref().map(pressure)),
        ])
        .into()
    });
    let memory = usage.memory.as_ref().map(|memory| {
        object([
            ("time", Some(taken.clone())),
            ("availableBytes", memory.available.map(Value::from)),
            ("usageBytes", Some(memory.usage.into())),
            ("workingSetBytes", Some(memory.working_set.into())),
            ("rssBytes", Some(memory.rss.into())),
            ("pageFaults", Some(memory.page_faults.into())),
            ("majorPageFaults", Some(memory.major_page_faults.into())),
            ("psi", usage.memory_pressure.as_ref().map(pressure)),
        ])
        .into()
    });
    let io = usage.io_pressure.as_ref().map(|io| json!({"time": taken, "psi": pressure(io)}));
    let swap = usage.memory.as_ref().filter(|memory| memory.swap_usage.is_some()).map(|memory| {
        object([
            ("time", Some(taken.clone())),
            ("swapAvailableBytes", memory.swap_available.map(Value::from)),
            ("swapUsageBytes", memory.swap_usage.map(Value::from)),
        ])
        .into()
    });
    object([("cpu", cpu), ("memory", memory), ("io", io), ("swap", swap)])
}

fn pressure(pressure: &rm::Pressure) -> Value {
    let share = |share: &rm::PressureShare| json!({"total": share.total_nanos, "avg10": share.avg10, "avg60": share.avg60, "avg300": share.avg300});
    object([("full", pressure.full.as_ref().map(share)), ("some", pressure.some.as_ref().map(share))]).into()
}

fn network(network: &rm::Network) -> Value {
    let counters = |interface: &rm::Interface| {
        object([
            ("name", Some(interface.name.as_str().into())),
            ("rxBytes", Some(interface.rx_bytes.into())),
            ("rxErrors", Some(interface.rx_errors.into())),
            ("txBytes", Some(interface.tx_bytes.into())),
            ("txErrors", Some(interface.tx_errors.into())),
        ])
    };
    let mut fields = object([("time", Some(time(network.taken_unix_nanos)))]);
    let default = network.interfaces.iter().find(|interface| interface.name == DEFAULT_INTERFACE);
    fields.extend(default.map_or_else(|| object([("name", Some("".into()))]), counters));
    let all: Vec<Value> = network.interfaces.iter().map(|interface| counters(interface).into()).collect();
    fields.insert("interfaces".into(), all.into());
    fields.into()
}

fn filesystem(usage: &rm::FilesystemUsage) -> Value {
    json!({
        "time": time(usage.taken_unix_nanos), "availableBytes": usage.available, "capacityBytes": usage.capacity,
        "usedBytes": usage.used, "inodesFree": usage.inodes_free, "inodes": usage.inodes,
        "inodesUsed": usage.inodes_used,
    })
}

fn processes(count: &rm::ProcessCount) -> Value {
    json!({"time": time(count.taken_unix_nanos), "maxpid": count.max, "curproc": count.current})
}

/// An object of the fields that have a value.
fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Map<String, Value> {
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A timestamp in whole seconds, as in the Kubernetes API; `null` for 0.
fn time(unix_nanos: i64) -> Value {
    match Timestamp::from_second(unix_nanos.div_euclid(1_000_000_000)) {
        Ok(moment) if unix_nanos > 0 => moment.to_string().into(),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(query: &str) -> Vec<(String, String)> {
        query.split('&').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
    }

    #[test]
    fn only_cpu_and_memory_requires_a_single_true() {
        for (query, form, expected) in [
            ("", "", false),
            ("only_cpu_and_memory=true", "", true),
            ("", "only_cpu_and_memory=true", true),
            ("a=b&only_cpu_and_memory=true", "x=y", true),
            ("only_cpu_and_memory=1", "", false),
            ("only_cpu_and_memory=true&only_cpu_and_memory=true", "", false),
        ] {
            assert_eq!(only_cpu_and_memory(&pairs(query), form.as_bytes()), expected, "{query} {form}");
        }
    }

    #[test]
    fn timestamps_are_whole_seconds_and_zero_is_null() {
        assert_eq!(time(1_700_000_000_999_999_999), json!("2023-11-14T22:13:20Z"));
        assert_eq!(time(0), Value::Null);
    }

    #[test]
    fn network_without_a_default_interface_has_only_the_list() {
        let net1 = rm::Interface { name: "net1".into(), rx_bytes: 1, ..Default::default() };
        let shown = network(&rm::Network { taken_unix_nanos: 0, interfaces: vec![net1] });
        assert_eq!((&shown["name"], shown.get("rxBytes")), (&json!(""), None));
        assert_eq!(shown["interfaces"][0]["rxBytes"], 1);
    }

    #[test]
    fn missing_statistics_are_omitted() {
        let text = summary("n1", &rm::NodeStatsResponse::default(), Vec::new(), &VolumesByPod::default());
        assert_eq!(text, r#"{"node":{"nodeName":"n1","startTime":null},"pods":[]}"#);
        let usage = rm::Usage { cpu_nanos: Some(5), ..Default::default() };
        let shown = Value::from(self::usage(&usage));
        assert_eq!(shown, json!({"cpu": {"time": null, "usageCoreNanoSeconds": 5}}));
    }
}
