//! Metrics that a kubelet or cAdvisor also has, and common ones, have the same type as there.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;

use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::{LIMIT, http, sleeper, until_ready};

/// The paths that Prometheus scrapes.
const PATHS: [&str; 4] = ["/metrics", "/metrics/resource", "/metrics/cadvisor", "/metrics/probes"];
/// The families upstream and their types, by upstream's documentation of its metrics (node-and-api.md §15) and cAdvisor's.
const KNOWN: &str = include_str!("../golden/metric-types.txt");
/// Families that exist as soon as a pod with a probe runs, some for each path and each type.
const SHOWN: [&str; 8] = [
    "kubelet_running_pods",
    "kubelet_evictions",
    "kubelet_runtime_operations_total",
    "kubelet_pod_start_duration_seconds",
    "container_cpu_usage_seconds_total",
    "container_memory_working_set_bytes",
    "node_cpu_usage_seconds_total",
    "prober_probe_total",
];

/// The families of a text in the exposition format, with their types.
fn types(text: &str) -> impl Iterator<Item = (String, String)> + '_ {
    text.lines().filter_map(|line| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        Some((name.to_owned(), kind.to_owned()))
    })
}

#[tokio::test]
async fn kubelet_metrics_have_the_kubelets_types() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let probed = sleeper("web").replace(
        "    volumeMounts:",
        "    readinessProbe: {exec: {command: [\"true\"]}, periodSeconds: 1}\n    volumeMounts:",
    );
    agent.write_manifest("web.yaml", &probed).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let mut found = BTreeMap::new();
    eventually(LIMIT, "everything is shown", async || {
        for path in PATHS {
            let text = http::get_ok(&format!("{}{path}", agent.api_url())).await.unwrap_or_default();
            found.extend(types(&text));
        }
        SHOWN.iter().all(|name| found.contains_key(*name))
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}: {found:#?}"));
    let known: BTreeMap<&str, &str> = KNOWN.lines().filter_map(|line| line.split_once(' ')).collect();
    let wrong: Vec<String> = found
        .iter()
        .filter(|(name, _)| !name.starts_with("keelson_"))
        .filter(|(name, kind)| known.get(name.as_str()) != Some(&kind.as_str()))
        .map(|(name, kind)| format!("{name} {kind}"))
        .collect();
    assert!(wrong.is_empty(), "not upstream's:\n{}", wrong.join("\n"));
    agent.end().unwrap();
}
