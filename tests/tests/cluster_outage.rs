//! The API server is down or unreachable for long: pods run, end, start and are deleted meanwhile; afterwards the server has the
//! true status, and only containers that ended have restarted.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, sleeper};
use keelson_tests::power::{cut_power, replace_boot_id};
use keelson_tests::{Process, pods, running};
use serde_json::{Value, json};

/// The length of the outage.
const OUTAGE: Duration = Duration::from_secs(120);
/// Time between two changes of the static pods meanwhile.
const CHANGE_INTERVAL: Duration = Duration::from_secs(2);
/// Number of static pods at a time.
const STATIC_PODS: usize = 4;

fn with_command(name: &str, policy: &str, script: &str) -> Value {
    let mut pod = sleeper(name);
    pod["spec"]["restartPolicy"] = policy.into();
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", script]);
    pod
}

fn static_pod(name: &str) -> String {
    let mut pod = sleeper(name);
    pod["spec"]["terminationGracePeriodSeconds"] = 1.into();
    pod.to_string()
}

/// Static pods that are created and deleted.
struct Churn<'a> {
    cluster: &'a Cluster,
    turn: usize,
    present: BTreeSet<String>,
}

impl Churn<'_> {
    fn step(&mut self) {
        let name = format!("fixed{}", self.turn);
        self.cluster.agent.write_manifest(&format!("{name}.yaml"), &static_pod(&name)).unwrap();
        self.present.insert(name);
        if let Some(old) = self.turn.checked_sub(STATIC_PODS) {
            let old = format!("fixed{old}");
            self.cluster.agent.remove_manifest(&format!("{old}.yaml")).unwrap();
            self.present.remove(&old);
        }
        self.turn += 1;
    }

    /// The mirror pods that the server must have.
    fn mirrors(&self) -> BTreeSet<String> {
        self.present.iter().map(|name| format!("{name}-{}", self.cluster.node)).collect()
    }
}

/// The server's pods: phase and restart count by name.
fn server_pods(cluster: &Cluster) -> BTreeMap<String, (String, u64)> {
    let list = cluster.server.kubectl_json(&["-n", NAMESPACE, "get", "pods"]).unwrap();
    phases_and_restarts(list["items"].as_array().unwrap().iter())
}

/// The node's pods in the same form.
async fn node_pods(cluster: &Cluster) -> BTreeMap<String, (String, u64)> {
    phases_and_restarts(pods(&cluster.agent).await.unwrap_or_default().values())
}

fn phases_and_restarts<'a>(pods: impl Iterator<Item = &'a Value>) -> BTreeMap<String, (String, u64)> {
    pods.map(|pod| {
        let phase = pod["status"]["phase"].as_str().unwrap_or_default().to_owned();
        let count = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or_default();
        (pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(), (phase, count))
    })
    .collect()
}

fn steady(all: &BTreeMap<String, Process>) -> BTreeMap<String, Process> {
    all.iter().filter(|(key, _)| key.starts_with("steady")).map(|(k, v)| (k.clone(), v.clone())).collect()
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn pods_start_and_end_during_a_two_minute_api_server_outage() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = Cluster::start(&scratch, |_| ()).await;
    let names: Vec<String> = (0..6).map(|n| format!("steady{n}")).collect();
    for name in &names {
        cluster.run(&sleeper(name));
    }
    run_pods_that_end(&cluster);
    cluster
        .until("the pods run", || {
            server_pods(&cluster).values().filter(|(phase, _)| phase == "Running").count() == names.len() + 4
        })
        .await;
    let before = steady(&running(&cluster.agent).await.unwrap());
    assert_eq!(before.len(), names.len());
    cluster.kubectl(&["delete", "pod", "leaving", "--wait=false"]);
    cluster
        .until("the pod is being deleted", || {
            cluster.pod("leaving").is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
        })
        .await;
    cluster.server.kill();

    let (mirrors, came) = churn_during_outage(&cluster, &before).await;
    let now = node_pods(&cluster).await;
    assert_eq!(now.get("good").map(|(phase, _)| phase.as_str()), Some("Succeeded"), "{now:?}");
    assert!(now["again"].1 >= 2 && now["bad"].1 >= 1, "{now:?}");
    assert!(!now.contains_key("leaving") || now["leaving"].0 != "Running", "{now:?}");

    cluster.server.restart().unwrap();
    let back = Instant::now();
    let mut last = String::new();
    let same = eventually(LIMIT, "the server has the node's status", async || {
        let (server_pods, node_pods) = (server_pods(&cluster), node_pods(&cluster).await);
        let here: BTreeSet<String> =
            server_pods.keys().filter(|name| name.starts_with("fixed")).cloned().collect();
        last = format!("on the server {server_pods:?}\non the node {node_pods:?}");
        server_pods == node_pods
            && here == mirrors
            && !server_pods.contains_key("leaving")
            && cluster.node_is_ready()
    });
    same.await.unwrap_or_else(|error| panic!("{error:#}\n{last}\n{}", cluster.agent.log_tail()));
    println!(
        "{came} static pods were created meanwhile; the server is up to date {:.1} s after it is back",
        back.elapsed().as_secs_f64()
    );
    for name in &names {
        assert_eq!(cluster.restart_count(name), Some(0), "{name}");
    }
    assert_eq!(steady(&running(&cluster.agent).await.unwrap()), before);
    // The node runs pods that are created afterwards.
    cluster.run(&sleeper("after"));
    cluster.until("a pod comes after it all", || cluster.is_ready("after")).await;
    cluster.agent.end().unwrap();
}

/// Runs pods that restart, succeed, fail, or take long to end.
fn run_pods_that_end(cluster: &Cluster) {
    cluster.run(&with_command("again", "Always", "sleep 15; exit 1"));
    cluster.run(&with_command("good", "Never", "sleep 30; exit 0"));
    cluster.run(&with_command("bad", "OnFailure", "sleep 30; test -e /tmp/never"));
    // Its deletion starts just before the outage and takes longer than that.
    cluster.run(&with_command(
        "leaving",
        "Always",
        "trap 'sleep 4; exit 0' TERM; while :; do sleep 0.1; done",
    ));
}

/// Creates and deletes static pods and kills services for the length of the outage, while the steady pods run on. Returns
/// the mirror pods that the server must have, and how many static pods were created.
async fn churn_during_outage(
    cluster: &Cluster,
    before: &BTreeMap<String, Process>,
) -> (BTreeSet<String>, usize) {
    let begun = Instant::now();
    let mut churn = Churn { cluster, turn: 0, present: BTreeSet::new() };
    let mut victims =
        [ServiceName::PodConfig, ServiceName::NodeStatus, ServiceName::PodSync, ServiceName::VolumeManager]
            .into_iter();
    while begun.elapsed() < OUTAGE {
        churn.step();
        if churn.turn.is_multiple_of(12)
            && let Some(service) = victims.next()
        {
            assert!(cluster.agent.service(service).unwrap().signal(Signal::KILL));
        }
        tokio::time::sleep(CHANGE_INTERVAL).await;
        assert_eq!(steady(&running(&cluster.agent).await.unwrap()), *before, "turn {}", churn.turn);
    }
    assert_eq!(victims.next(), None, "each of them was killed");
    (churn.mirrors(), churn.turn)
}

fn with_volume(name: &str, volume: &Value) -> Value {
    let mut pod = sleeper(name);
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "files", "mountPath": "/files"}]);
    pod
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_node_that_reboots_during_a_partition_applies_changes_on_reconnect() {
    let scratch = Scratch::new().unwrap();
    let (mut cluster, relay) = Cluster::start_behind_relay(&scratch).await;
    run_pods_with_files(&cluster);
    cluster.agent.write_manifest("fixed.yaml", &static_pod("fixed")).unwrap();
    let mirror = format!("fixed-{}", cluster.node);
    let all = ["web", "keyed", "set-0", "ended", "gone", &mirror];
    cluster.until("all are Ready", || all.iter().all(|name| cluster.is_ready(name))).await;
    let before = running(&cluster.agent).await.unwrap();
    let uid = cluster.get("node", &cluster.node).unwrap()["metadata"]["uid"].clone();

    // During the partition the desired state changes, unseen by the node.
    relay.cut();
    cluster.kubectl(&["delete", "pod", "ended", "--wait=false"]);
    cluster.kubectl(&["delete", "pod", "gone", "--force", "--grace-period=0"]);
    cluster.run(&sleeper("new"));
    cluster.server.apply(&config_map("two")).unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(
        running(&cluster.agent).await.unwrap(),
        before,
        "nothing ends because the server cannot be reached"
    );

    cut_power(&mut cluster.agent);
    replace_boot_id(&cluster.agent);
    cluster.agent.containerd_mut().restart().unwrap();
    cluster.agent.start().await.unwrap();
    // The Secret was in memory only, and a StatefulSet's pod may have been replaced by now.
    let alone: BTreeSet<String> = ["web", "ended", "gone", &mirror].map(str::to_owned).into();
    let started =
        eventually(LIMIT, "what may start alone runs", async || running_pods(&cluster).await == alone);
    started.await.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    assert_waits_are_explained(&cluster).await;

    relay.heal();
    let wanted: BTreeSet<String> = ["web", "keyed", "set-0", "new", &mirror].map(str::to_owned).into();
    let mut last = String::new();
    let right = eventually(LIMIT, "the desired pods run, and the server has their status", async || {
        let now = running_pods(&cluster).await;
        last = format!("{now:?} {:?}", server_pods(&cluster));
        now == wanted
            && wanted.iter().all(|name| cluster.is_ready(name))
            && cluster.pod("ended").is_none()
            && cluster.pod("gone").is_none()
            && cluster.node_is_ready()
    });
    right.await.unwrap_or_else(|error| panic!("{error:#}\n{last}\n{}", cluster.agent.log_tail()));
    assert_eq!(cluster.restart_count("web"), Some(1), "it ran before the boot");
    assert_eq!(
        cluster.get("node", &cluster.node).unwrap()["metadata"]["uid"],
        uid,
        "it is the Node that it was"
    );
    let word = ["exec", "-n", NAMESPACE, "web", "--", "cat", "/files/word"];
    eventually(LIMIT, "the changed ConfigMap is in the pod", async || {
        let output = cluster.agent.keelson(&word).await.unwrap();
        keelson_tests::text(&output).trim() == "two"
    })
    .await
    .unwrap();
    cluster.agent.end().unwrap();
}

/// The ConfigMap `text` with this word.
fn config_map(word: &str) -> Value {
    let metadata = json!({"name": "text", "namespace": NAMESPACE});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"word": word}})
}

/// Runs pods with files of a ConfigMap and a Secret, a pod of a StatefulSet, and two that are deleted later.
fn run_pods_with_files(cluster: &Cluster) {
    let metadata = json!({"name": "key", "namespace": NAMESPACE});
    for object in [
        config_map("one"),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"word": "hidden"}}),
    ] {
        cluster.server.apply(&object).unwrap();
    }
    let mut of_set = sleeper("set-0");
    of_set["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "set", "uid": "b7e9c6b0-0001"}]);
    let web = with_volume("web", &json!({"name": "files", "configMap": {"name": "text"}}));
    let keyed = with_volume("keyed", &json!({"name": "files", "secret": {"secretName": "key"}}));
    for pod in [&web, &keyed, &of_set, &sleeper("ended"), &sleeper("gone")] {
        cluster.run(pod);
    }
}

/// The names of the pods that run on the node.
async fn running_pods(cluster: &Cluster) -> BTreeSet<String> {
    let now = running(&cluster.agent).await.unwrap_or_default();
    now.keys().filter_map(|key| Some(key.split_once('/')?.0.to_owned())).collect()
}

/// The command says why the other pods wait for the server.
async fn assert_waits_are_explained(cluster: &Cluster) {
    let sources = cluster.agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap().to_string();
    assert!(sources.contains("a StatefulSet owns the pod"), "{sources}");
    let explained = cluster.agent.keelson(&["explain", "pod", "-n", NAMESPACE, "keyed"]).await.unwrap();
    let explained = keelson_tests::text(&explained);
    assert!(explained.contains("key"), "it names the Secret: {explained}");
}
