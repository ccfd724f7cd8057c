//! A running node of a cluster is upgraded as a kubelet is: the binaries are replaced and the unit is restarted.
//! `cargo xtask skew` runs this from the previous release; otherwise it upgrades this release to itself.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::PathBuf;

use keelson_config::ServiceName;
use keelson_testkit::{AgentSpec, Scratch, binary_names, built_binaries, copy_binaries};
use keelson_tests::cluster::{Cluster, sleeper};
use keelson_tests::running;
use serde_json::{Value, json};

/// Environment variable with the folder of the previous release's binaries.
const PREVIOUS: &str = "KEELSON_PREVIOUS_BIN_DIR";

fn start_with_previous(spec: &mut AgentSpec) {
    let former = std::env::var_os(PREVIOUS).map_or_else(|| built_binaries().unwrap(), PathBuf::from);
    let bins = spec.config_dir.with_file_name("node-bin");
    copy_binaries(&former, &bins).unwrap();
    spec.bin_dir = bins;
}

/// What the upgrade must not change: the pod's identity and its restart counts.
fn identity_and_restarts(cluster: &Cluster, name: &str) -> Value {
    let pod = cluster.pod(name).unwrap_or_default();
    let container = &pod["status"]["containerStatuses"][0];
    json!({
        "uid": pod["metadata"]["uid"],
        "restartCount": container["restartCount"],
        "containerID": container["containerID"],
        "startTime": pod["status"]["startTime"],
        "podIP": pod["status"]["podIP"],
    })
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn upgrading_the_binaries_of_a_running_node_restarts_no_container() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = Cluster::start(&scratch, start_with_previous).await;
    for name in ["one", "two"] {
        cluster.run(&sleeper(name));
    }
    cluster.agent.write_manifest("fixed.yaml", &sleeper("fixed").to_string()).unwrap();
    let mirror = format!("fixed-{}", cluster.node);
    let names = ["one", "two", &mirror];
    cluster.until("all are Ready", || names.iter().all(|name| cluster.is_ready(name))).await;
    let before = running(&cluster.agent).await.unwrap();
    let identity_before = names.map(|name| identity_and_restarts(&cluster, name));
    let node = cluster.get("node", &cluster.node).unwrap();

    // As a package does it: each file is replaced atomically under running processes.
    let (new, bins) = (built_binaries().unwrap(), cluster.agent.spec().bin_dir.clone());
    for name in binary_names() {
        let arriving = bins.join(format!("{name}.new"));
        fs::copy(new.join(name), &arriving).unwrap();
        fs::rename(&arriving, bins.join(name)).unwrap();
    }
    let of_service = |service| cluster.agent.service_pid(service).map(|pid| format!("/proc/{pid}/exe"));
    let is_former = |service| {
        let exe = of_service(service).and_then(|exe| fs::read_link(exe).ok());
        exe.is_some_and(|exe| exe.to_string_lossy().ends_with(" (deleted)"))
    };
    assert!(ServiceName::supervised().all(is_former), "the former ones run on");
    cluster.agent.restart().await.unwrap();
    for service in ServiceName::supervised() {
        let exe =
            fs::read_link(format!("/proc/{}/exe", cluster.agent.service_pid(service).unwrap())).unwrap();
        assert_eq!(exe, bins.join(service.binary()));
    }

    cluster.run(&sleeper("three"));
    cluster.until("a new pod is Ready", || cluster.is_ready("three")).await;
    cluster.until("the node is Ready", || cluster.node_is_ready()).await;
    let mut now = running(&cluster.agent).await.unwrap();
    now.retain(|key, _| !key.starts_with("three/"));
    assert_eq!(now, before);
    assert_eq!(names.map(|name| identity_and_restarts(&cluster, name)), identity_before);
    assert_eq!(cluster.get("node", &cluster.node).unwrap()["metadata"]["uid"], node["metadata"]["uid"]);
    cluster.kubectl(&["delete", "pod", "one", "two", "three", "--timeout=60s"]);
    cluster.agent.end().unwrap();
}
