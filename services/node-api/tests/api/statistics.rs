//! Statistics, running pods and the configuration.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeSet;

use keelson_config::{Config, ConfigExtras};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::store_config;
use keelson_testkit::fakes::StreamAnswer;
use serde_json::{Map, Value, json};
use tonic::Code;

use crate::fake::{World, get, peer_error, request};

const TAKEN: i64 = 1_700_000_000_000_000_000;

/// A usage with all values.
fn usage(cpu_nanos: u64) -> Option<rm::Usage> {
    let share = rm::PressureShare { total_nanos: 9, avg10: 1.5, avg60: 0.5, avg300: 0.25 };
    let pressure = Some(rm::Pressure { some: Some(share), full: Some(share) });
    Some(rm::Usage {
        taken_unix_nanos: TAKEN,
        cpu_nanos: Some(cpu_nanos),
        cpu_nano_cores: Some(250_000_000),
        memory: Some(rm::MemoryUsage {
            usage: 100,
            working_set: 80,
            rss: 60,
            page_faults: 5,
            major_page_faults: 1,
            available: Some(20),
            swap_usage: Some(3),
            swap_available: Some(4),
        }),
        cpu_pressure: pressure,
        memory_pressure: pressure,
        io_pressure: pressure,
    })
}

fn filesystem() -> Option<rm::FilesystemUsage> {
    Some(rm::FilesystemUsage {
        taken_unix_nanos: TAKEN,
        capacity: 10,
        available: 4,
        used: 5,
        inodes: 30,
        inodes_free: 20,
        inodes_used: 10,
    })
}

fn network() -> Option<rm::Network> {
    let interface = rm::Interface {
        name: "eth0".into(),
        rx_bytes: 1,
        rx_errors: 2,
        tx_bytes: 3,
        tx_errors: 4,
        ..Default::default()
    };
    Some(rm::Network { taken_unix_nanos: TAKEN, interfaces: vec![interface] })
}

/// Fakes a node and a pod with all statistics.
fn fill(world: &World) {
    world.resource_manager.node_stats.answer(rm::NodeStatsResponse {
        boot_unix_nanos: TAKEN,
        usage: usage(7_000_000_000),
        pods: usage(6_000_000_000),
        network: network(),
        root: filesystem(),
        images: filesystem(),
        processes: Some(rm::ProcessCount { taken_unix_nanos: TAKEN, max: 100, current: 50 }),
        containers: filesystem(),
        pods_started_unix_nanos: TAKEN,
        system: vec![rm::ContainerStats {
            name: "runtime".into(),
            started_unix_nanos: TAKEN,
            usage: usage(3_000_000_000),
            ..Default::default()
        }],
    });
    world.resource_manager.pod_stats.list([pod_stats()]);
    world.volume_manager.pod_volume_stats.list([volume_stats()]);
}

/// What volume-manager knows about the volumes of the pod: `data` belongs to the claim `disk`.
fn volume_stats() -> vm::PodVolumeStatsResponse {
    let scratch = vm::VolumeStats { name: "scratch".into(), ..Default::default() };
    let data = vm::VolumeStats {
        name: "data".into(),
        claim: "disk".into(),
        abnormal: Some(true),
        used_bytes: 5,
        ..Default::default()
    };
    vm::PodVolumeStatsResponse { pod: pod_stats().pod, volumes: vec![data, scratch] }
}

fn pod_stats() -> rm::PodStatsResponse {
    rm::PodStatsResponse {
        pod: Some(PodRef { uid: "u1".into(), namespace: "default".into(), name: "web".into() }),
        started_unix_nanos: TAKEN,
        usage: usage(5_000_000_000),
        containers: vec![rm::ContainerStats {
            name: "c".into(),
            started_unix_nanos: TAKEN,
            usage: usage(4_000_000_000),
            root: filesystem(),
            logs: filesystem(),
            termination_log: filesystem(),
        }],
        network: network(),
        processes: Some(3),
        volumes: vec![
            rm::VolumeUsage { name: "scratch".into(), filesystem: filesystem(), local_ephemeral: true },
            rm::VolumeUsage { name: "data".into(), filesystem: filesystem(), local_ephemeral: false },
        ],
        ephemeral_storage: filesystem(),
        hosts_file: filesystem(),
    }
}

/// Collects the dotted paths of the leaves of a value, with `[]` for list elements.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                paths(value, &if at.is_empty() { name.clone() } else { format!("{at}.{name}") }, found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| paths(value, &format!("{at}[]"), found)),
        _ => {
            found.insert(at.to_owned());
        }
    }
}

/// The paths of the usage of a cgroup below `at` (node-and-api.md §8.10).
fn usage_paths(at: &str) -> Vec<String> {
    let mut names: Vec<String> = ["cpu.time", "cpu.usageNanoCores", "cpu.usageCoreNanoSeconds"]
        .into_iter()
        .chain(["memory.time", "memory.availableBytes", "memory.usageBytes", "memory.workingSetBytes"])
        .chain(["memory.rssBytes", "memory.pageFaults", "memory.majorPageFaults", "io.time"])
        .chain(["swap.time", "swap.swapAvailableBytes", "swap.swapUsageBytes"])
        .map(|name| format!("{at}.{name}"))
        .collect();
    for resource in ["cpu", "memory", "io"] {
        for kind in ["full", "some"] {
            let shares = ["total", "avg10", "avg60", "avg300"];
            names.extend(shares.map(|share| format!("{at}.{resource}.psi.{kind}.{share}")));
        }
    }
    names
}

fn below<const N: usize>(at: &str, names: [&str; N]) -> Vec<String> {
    names.map(|name| format!("{at}.{name}")).to_vec()
}

/// node-and-api.md §8.10: all fields with a value, and no others.
fn expected_paths() -> BTreeSet<String> {
    let interface = ["name", "rxBytes", "rxErrors", "txBytes", "txErrors"];
    let filesystem =
        ["time", "availableBytes", "capacityBytes", "usedBytes", "inodesFree", "inodes", "inodesUsed"];
    let mut all = below("node", ["nodeName", "startTime"]);
    all.extend(below("node.systemContainers[]", ["name", "startTime"]));
    all.extend(below("node.rlimit", ["time", "maxpid", "curproc"]));
    all.extend(below("node.fs", filesystem));
    all.extend(below("node.runtime.imageFs", filesystem));
    all.extend(below("node.runtime.containerFs", filesystem));
    all.extend(below("pods[].volume[]", filesystem));
    all.extend(below("pods[].volume[]", ["name", "volumeHealthStats.abnormal"]));
    all.extend(below("pods[].volume[].pvcRef", ["name", "namespace"]));
    all.extend(below("pods[].ephemeral-storage", filesystem));
    all.extend(below("pods[].containers[].rootfs", filesystem));
    all.extend(below("pods[].containers[].logs", filesystem));
    all.extend(below("pods[].podRef", ["name", "namespace", "uid"]));
    all.extend(below("pods[]", ["startTime", "process_stats.process_count"]));
    all.extend(below("pods[].containers[]", ["name", "startTime"]));
    for owner in ["node", "pods[]"] {
        all.push(format!("{owner}.network.time"));
        all.extend(below(&format!("{owner}.network"), interface));
        all.extend(below(&format!("{owner}.network.interfaces[]"), interface));
    }
    for owner in ["node", "node.systemContainers[]", "pods[]", "pods[].containers[]"] {
        all.extend(usage_paths(owner));
    }
    all.into_iter().collect()
}

#[tokio::test]
async fn summary_has_exactly_the_kubelets_fields() {
    let world = World::start().await;
    fill(&world);
    let api = world.api().await;
    let reply = get(api, "/stats/summary").await;
    assert_eq!(
        (reply.status.as_u16(), &reply.headers["content-type"]),
        (200, &"application/json".parse().unwrap())
    );
    let summary: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    let mut found = BTreeSet::new();
    paths(&summary, "", &mut found);
    assert_eq!(found, expected_paths());
    assert_eq!(summary["node"]["nodeName"], "n1");
    let system = summary["node"]["systemContainers"].as_array().unwrap();
    let shown =
        |of: &Value| (of["name"].clone(), of["cpu"]["usageCoreNanoSeconds"].clone(), of["startTime"].clone());
    let start = json!("2023-11-14T22:13:20Z");
    assert_eq!(
        system.iter().map(shown).collect::<Vec<_>>(),
        [
            (json!("pods"), json!(6_000_000_000_u64), start.clone()),
            (json!("runtime"), json!(3_000_000_000_u64), start)
        ]
    );
    assert_eq!(summary["node"]["startTime"], "2023-11-14T22:13:20Z");
    assert_eq!(summary["node"]["rlimit"]["curproc"], 50);
    let pod = &summary["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": "web", "namespace": "default", "uid": "u1"}));
    assert_eq!(pod["containers"][0]["cpu"]["usageCoreNanoSeconds"], 4_000_000_000_u64);
    assert_eq!(pod["cpu"]["usageNanoCores"], 250_000_000);
    assert_eq!((&pod["volume"][0]["name"], &pod["volume"][0]["inodesUsed"]), (&json!("scratch"), &json!(10)));
    assert_eq!(
        (&pod["network"]["txErrors"], &pod["network"]["interfaces"][0]["rxBytes"]),
        (&json!(4), &json!(1))
    );
    assert_eq!(pod["volume"][1]["pvcRef"], json!({"name": "disk", "namespace": "default"}));
    assert_eq!(pod["volume"][1]["volumeHealthStats"], json!({"abnormal": true}));
    assert!(pod["volume"][0].get("pvcRef").is_none() && pod["volume"][0].get("volumeHealthStats").is_none());
    assert_eq!(world.cpu_and_memory_only(), [false, false]);
}

#[tokio::test]
async fn summary_without_volume_manager_lacks_only_the_claims() {
    let world = World::start().await;
    fill(&world);
    world.volume_manager.pod_volume_stats.fail(peer_error(Code::Unavailable, "gone"));
    let reply = get(world.api().await, "/stats/summary").await;
    assert_eq!(reply.status, 200);
    let summary: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    let volume = &summary["pods"][0]["volume"][1];
    assert_eq!(
        (&volume["name"], &volume["usedBytes"], volume.get("pvcRef")),
        (&json!("data"), &json!(5), None)
    );
}

#[tokio::test]
async fn metrics_have_the_figures_of_claims_and_survive_a_silent_volume_manager() {
    let world = World::start().await;
    fill(&world);
    let api = world.api().await;
    let used = "kubelet_volume_stats_used_bytes{namespace=\"default\",persistentvolumeclaim=\"disk\"} 5";
    for path in ["/metrics", "/metrics/probes"] {
        let text = get(api, path).await.text().await.unwrap();
        assert_eq!(
            text.lines().filter(|line| *line == used).count(),
            usize::from(path == "/metrics"),
            "{text}"
        );
    }
    // It does not answer in time.
    let _held = world.volume_manager.pod_volume_stats.hold();
    let text = get(api, "/metrics").await.text().await.unwrap();
    assert!(!text.contains("kubelet_volume_stats") && text.contains("keelson_service_up{"), "{text}");
}

#[tokio::test]
async fn summary_with_only_cpu_and_memory_requests_no_more() {
    let world = World::start().await;
    fill(&world);
    let api = world.api().await;
    let reply = request(api, "POST", "/stats/summary?only_cpu_and_memory=true").await;
    assert_eq!(reply.status, 200);
    assert_eq!(world.cpu_and_memory_only(), [true, true]);
    assert!(world.volume_manager.pod_volume_stats.requests().is_empty());
}

#[tokio::test]
async fn summary_is_complete_or_an_internal_error_with_the_cause() {
    let world = World::start().await;
    let api = world.api().await;
    let reply = get(api, "/stats/summary").await;
    assert_eq!(reply.status, 500);
    assert_eq!(reply.text().await.unwrap(), "Internal Error: resource-manager: no cgroups");
    fill(&world);
    world.resource_manager.pod_stats.answer_with(|_| {
        Ok(StreamAnswer::items([pod_stats()]).then_fail(peer_error(Code::Unavailable, "gone")))
    });
    let reply = get(api, "/stats/summary").await;
    assert_eq!((reply.status.as_u16(), reply.text().await.unwrap().contains("gone")), (500, true));

    let alone = World::without_peers();
    let reply = get(alone.api().await, "/stats/summary").await;
    assert_eq!(reply.status, 500);
    let text = reply.text().await.unwrap();
    assert!(text.starts_with("Internal Error: resource-manager is not reachable"), "{text}");
}

#[tokio::test]
async fn cadvisor_metrics_report_a_scrape_error_on_failure() {
    let world = World::start().await;
    let api = world.api().await;
    let text = get(api, "/metrics/cadvisor").await.text().await.unwrap();
    let failed = ["container_scrape_error 1", "machine_scrape_error 1"];
    assert!(text.lines().filter(|line| !line.starts_with('#')).eq(failed), "{text}");
    let usage = rm::Usage { taken_unix_nanos: TAKEN, cpu_nanos: Some(4_000_000_000), ..Default::default() };
    let cgroup =
        rm::CgroupStatsResponse { path: "/kubepods".into(), usage: Some(usage), ..Default::default() };
    world.resource_manager.cgroup_stats.list([cgroup]);
    let reply = get(api, "/metrics/cadvisor").await;
    assert_eq!(
        (reply.status.as_u16(), reply.headers["content-type"].to_str().unwrap()),
        (200, "text/plain; version=0.0.4; charset=utf-8")
    );
    let text = reply.text().await.unwrap();
    let labels = "container=\"\",id=\"/kubepods\",image=\"\",name=\"\",namespace=\"\",pod=\"\",cpu=\"total\"";
    for line in [
        format!("container_cpu_usage_seconds_total{{{labels}}} 4 1700000000000"),
        "machine_cpu_cores{boot_id=\"b1\",machine_id=\"\",system_uuid=\"\"} 2".to_owned(),
        "container_scrape_error 0".to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "no {line} in {text}");
    }
}

#[tokio::test]
async fn resource_metrics_report_a_scrape_error_on_failure() {
    let world = World::start().await;
    let api = world.api().await;
    let text = get(api, "/metrics/resource").await.text().await.unwrap();
    assert!(text.ends_with("\nresource_scrape_error 1\n") && !text.contains("node_cpu"), "{text}");
    fill(&world);
    let reply = get(api, "/metrics/resource").await;
    assert_eq!(
        (reply.status.as_u16(), reply.headers["content-type"].to_str().unwrap()),
        (200, "text/plain; version=0.0.4; charset=utf-8")
    );
    let text = reply.text().await.unwrap();
    for line in [
        "node_cpu_usage_seconds_total 7 1700000000000",
        "pod_cpu_usage_seconds_total{namespace=\"default\",pod=\"web\"} 5 1700000000000",
        "container_cpu_usage_seconds_total{container=\"c\",namespace=\"default\",pod=\"web\"} 4 1700000000000",
        "resource_scrape_error 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no {line} in {text}");
    }
    assert!(world.cpu_and_memory_only().iter().all(|value| *value));
}

#[tokio::test]
async fn runningpods_lists_the_pods_of_the_runtime() {
    let world = World::start().await;
    let api = world.api().await;
    let empty = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":null}"#;
    assert_eq!(get(api, "/runningpods/").await.text().await.unwrap(), empty);
    let container = rt::Container {
        name: "c".into(),
        image: "busybox".into(),
        state: rt::ContainerState::Running.into(),
        ..Default::default()
    };
    world.set_running([
        rt::RuntimePod {
            uid: "u1".into(),
            name: "web".into(),
            namespace: "ns".into(),
            containers: vec![container],
            ..Default::default()
        },
        rt::RuntimePod { uid: "u2".into(), ..Default::default() },
    ]);
    let reply = get(api, "/runningpods/").await;
    assert_eq!(reply.headers["content-type"], "application/json");
    let list: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    let items = list["items"].as_array().unwrap();
    assert_eq!(items.len(), 1, "{list}");
    assert_eq!(items[0]["metadata"], json!({"name": "web", "namespace": "ns", "uid": "u1"}));
    assert_eq!(items[0]["spec"]["containers"][0]["image"], "busybox");

    let alone = World::without_peers();
    let reply = get(alone.api().await, "/runningpods/").await;
    assert_eq!(reply.status, 503);
    assert!(reply.text().await.unwrap().contains("runtime-shim is not reachable"));
}

#[tokio::test]
async fn configz_is_the_document_written_by_init() {
    let world = World::without_peers();
    let api = world.api().await;
    let file = world.ctx.config.paths.config_file();
    let reply = get(api, "/configz").await;
    assert_eq!(reply.status, 500);
    assert!(reply.text().await.unwrap().contains(file.to_str().unwrap()));
    store_config(&file, &Config::default(), ConfigExtras::default()).unwrap();
    let reply = get(api, "/configz").await;
    assert_eq!((reply.status.as_u16(), reply.text().await.unwrap().contains("keelson-init")), (500, true));
    let document = Map::from_iter([
        ("kind".to_owned(), json!("KubeletConfiguration")),
        ("maxPods".to_owned(), json!(7)),
    ]);
    let extras = ConfigExtras { kubelet_configuration: Some(&document), ..ConfigExtras::default() };
    store_config(&file, &Config::default(), extras).unwrap();
    let reply = get(api, "/configz").await;
    assert_eq!(
        (reply.status.as_u16(), reply.headers["content-type"].to_str().unwrap()),
        (200, "application/json")
    );
    let shown: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(shown, json!({"kubeletconfig": document}));
}

#[tokio::test]
async fn configz_shows_the_effective_cgroup_driver() {
    let world = World::start().await;
    let file = world.ctx.config.paths.config_file();
    let document = Map::from_iter([("cgroupDriver".to_owned(), json!("cgroupfs"))]);
    let extras = ConfigExtras { kubelet_configuration: Some(&document), ..ConfigExtras::default() };
    store_config(&file, &Config::default(), extras).unwrap();
    let reply = get(world.api().await, "/configz").await;
    let shown: Value = serde_json::from_str(&reply.text().await.unwrap()).unwrap();
    assert_eq!(shown, json!({"kubeletconfig": {"cgroupDriver": "systemd"}}));
}
