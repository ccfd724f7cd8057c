//! The API server is away, or out of reach, for long: pods go on, end, come and go meanwhile; afterwards the server has the
//! truth, and nothing has restarted that did not end.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, sleeper};
use keelson_tests::power::{cut_power, forget_the_boot};
use keelson_tests::{Process, pods, running};
use serde_json::{Value, json};

/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(120);
/// Between two changes of the static pods meanwhile.
const TURN: Duration = Duration::from_secs(2);
/// So many static pods are there at a time.
const WINDOW: usize = 4;

fn with_command(name: &str, policy: &str, script: &str) -> Value {
    let mut pod = sleeper(name);
    pod["spec"]["restartPolicy"] = policy.into();
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", script]);
    pod
}

fn fixed(name: &str) -> String {
    let mut pod = sleeper(name);
    pod["spec"]["terminationGracePeriodSeconds"] = 1.into();
    pod.to_string()
}

/// Static pods that come and go.
struct Churn<'a> {
    cluster: &'a Cluster,
    turn: usize,
    present: BTreeSet<String>,
}

impl Churn<'_> {
    fn step(&mut self) {
        let name = format!("fixed{}", self.turn);
        self.cluster.agent.write_manifest(&format!("{name}.yaml"), &fixed(&name)).unwrap();
        self.present.insert(name);
        if let Some(old) = self.turn.checked_sub(WINDOW) {
            let old = format!("fixed{old}");
            self.cluster.agent.remove_manifest(&format!("{old}.yaml")).unwrap();
            self.present.remove(&old);
        }
        self.turn += 1;
    }

    /// The mirrors that the server is to have.
    fn mirrors(&self) -> BTreeSet<String> {
        self.present.iter().map(|name| format!("{name}-{}", self.cluster.node)).collect()
    }
}

/// What the server has: pod to phase and restart count.
fn told(cluster: &Cluster) -> BTreeMap<String, (String, u64)> {
    let list = cluster.server.kubectl_json(&["-n", NAMESPACE, "get", "pods"]).unwrap();
    short(list["items"].as_array().unwrap().iter())
}

/// What the node knows, the same way.
async fn known(cluster: &Cluster) -> BTreeMap<String, (String, u64)> {
    short(pods(&cluster.agent).await.unwrap_or_default().values())
}

fn short<'a>(pods: impl Iterator<Item = &'a Value>) -> BTreeMap<String, (String, u64)> {
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
async fn two_minutes_without_the_server_while_pods_end_come_and_go() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = Cluster::start(&scratch, |_| ()).await;
    let names: Vec<String> = (0..6).map(|n| format!("steady{n}")).collect();
    for name in &names {
        cluster.run(&sleeper(name));
    }
    cluster.run(&with_command("again", "Always", "sleep 15; exit 1"));
    cluster.run(&with_command("good", "Never", "sleep 30; exit 0"));
    cluster.run(&with_command("bad", "OnFailure", "sleep 30; test -e /tmp/never"));
    // It is told to end just before the server goes, and takes longer than that.
    cluster.run(&with_command(
        "leaving",
        "Always",
        "trap 'sleep 4; exit 0' TERM; while :; do sleep 0.1; done",
    ));
    cluster
        .until("the pods run", || {
            told(&cluster).values().filter(|(phase, _)| phase == "Running").count() == names.len() + 4
        })
        .await;
    let before = steady(&running(&cluster.agent).await.unwrap());
    assert_eq!(before.len(), names.len());
    cluster.kubectl(&["delete", "pod", "leaving", "--wait=false"]);
    cluster
        .until("the pod is told to end", || {
            cluster.pod("leaving").is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
        })
        .await;
    cluster.server.kill();

    let begun = Instant::now();
    let mut churn = Churn { cluster: &cluster, turn: 0, present: BTreeSet::new() };
    let mut victims =
        [ServiceName::PodConfig, ServiceName::NodeStatus, ServiceName::PodSync, ServiceName::VolumeManager]
            .into_iter();
    while begun.elapsed() < AWAY {
        churn.step();
        if churn.turn.is_multiple_of(12)
            && let Some(service) = victims.next()
        {
            assert!(cluster.agent.service(service).unwrap().signal(Signal::KILL));
        }
        tokio::time::sleep(TURN).await;
        assert_eq!(steady(&running(&cluster.agent).await.unwrap()), before, "turn {}", churn.turn);
    }
    assert_eq!(victims.next(), None, "each of them was killed");
    let mirrors = churn.mirrors();
    let came = churn.turn;
    let now = known(&cluster).await;
    assert_eq!(now.get("good").map(|(phase, _)| phase.as_str()), Some("Succeeded"), "{now:?}");
    assert!(now["again"].1 >= 2 && now["bad"].1 >= 1, "{now:?}");
    assert!(!now.contains_key("leaving") || now["leaving"].0 != "Running", "{now:?}");

    cluster.server.restart().unwrap();
    let back = Instant::now();
    let mut last = String::new();
    let same = eventually(LIMIT, "the server has what the node knows", async || {
        let (told, known) = (told(&cluster), known(&cluster).await);
        let here: BTreeSet<String> = told.keys().filter(|name| name.starts_with("fixed")).cloned().collect();
        last = format!("told {told:?}\nknown {known:?}");
        told == known && here == mirrors && !told.contains_key("leaving") && cluster.node_is_ready()
    });
    same.await.unwrap_or_else(|error| panic!("{error:#}\n{last}\n{}", cluster.agent.log_tail()));
    println!(
        "{came} static pods came meanwhile; all is told {:.1} s after the server is back",
        back.elapsed().as_secs_f64()
    );
    for name in &names {
        assert_eq!(cluster.restart_count(name), Some(0), "{name}");
    }
    assert_eq!(steady(&running(&cluster.agent).await.unwrap()), before);
    // And the node takes what comes next.
    cluster.run(&sleeper("after"));
    cluster.until("a pod comes after it all", || cluster.is_ready("after")).await;
    cluster.agent.end().unwrap();
}

fn with_volume(name: &str, volume: &Value) -> Value {
    let mut pod = sleeper(name);
    pod["spec"]["volumes"] = json!([volume]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "files", "mountPath": "/files"}]);
    pod
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_node_that_is_cut_off_and_boots_meanwhile_does_what_was_wanted_when_it_is_back() {
    let scratch = Scratch::new().unwrap();
    let (mut cluster, relay) = Cluster::start_behind_relay(&scratch).await;
    let metadata = |name: &str| json!({"name": name, "namespace": NAMESPACE});
    for object in [
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata("text"), "data": {"word": "one"}}),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata("key"), "stringData": {"word": "hidden"}}),
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
    cluster.agent.write_manifest("fixed.yaml", &fixed("fixed")).unwrap();
    let mirror = format!("fixed-{}", cluster.node);
    let all = ["web", "keyed", "set-0", "ended", "gone", &mirror];
    cluster.until("all are Ready", || all.iter().all(|name| cluster.is_ready(name))).await;
    let before = running(&cluster.agent).await.unwrap();
    let uid = cluster.get("node", &cluster.node).unwrap()["metadata"]["uid"].clone();

    // Cut off: what is wanted changes, and the node does not hear of it.
    relay.cut();
    cluster.kubectl(&["delete", "pod", "ended", "--wait=false"]);
    cluster.kubectl(&["delete", "pod", "gone", "--force", "--grace-period=0"]);
    cluster.run(&sleeper("new"));
    cluster.server.apply(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata("text"), "data": {"word": "two"}}))
        .unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(
        running(&cluster.agent).await.unwrap(),
        before,
        "nothing ends because the server cannot be reached"
    );

    cut_power(&mut cluster.agent);
    forget_the_boot(&cluster.agent);
    cluster.agent.containerd_mut().restart().unwrap();
    cluster.agent.start().await.unwrap();
    let here = async || -> BTreeSet<String> {
        let now = running(&cluster.agent).await.unwrap_or_default();
        now.keys().filter_map(|key| Some(key.split_once('/')?.0.to_owned())).collect()
    };
    // A Secret was only in memory, and of a StatefulSet's pod there may be another one by now.
    let alone: BTreeSet<String> = ["web", "ended", "gone", &mirror].map(str::to_owned).into();
    let started = eventually(LIMIT, "what may start alone runs", async || here().await == alone);
    started.await.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    let sources = cluster.agent.keelson_json(&["get", "sources", "-o", "json"]).await.unwrap().to_string();
    assert!(sources.contains("a StatefulSet owns the pod"), "{sources}");
    let explained = cluster.agent.keelson(&["explain", "pod", "-n", NAMESPACE, "keyed"]).await.unwrap();
    let explained = keelson_tests::text(&explained);
    assert!(explained.contains("key"), "it names the Secret: {explained}");

    relay.heal();
    let wanted: BTreeSet<String> = ["web", "keyed", "set-0", "new", &mirror].map(str::to_owned).into();
    let mut last = String::new();
    let right = eventually(LIMIT, "what is wanted runs, and the server knows", async || {
        let now = here().await;
        last = format!("{now:?} {:?}", told(&cluster));
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
        let said = cluster.agent.keelson(&word).await.unwrap();
        keelson_tests::text(&said).trim() == "two"
    })
    .await
    .unwrap();
    cluster.agent.end().unwrap();
}
