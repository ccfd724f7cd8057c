//! A node with an API server that hangs, sends garbage, shows an untrusted certificate or has very large objects, and with
//! another node of its name: pods run, no service ends, the problem is reported, and the node recovers.

#![allow(clippy::unwrap_used)] // A panic fails the test.

mod bad_api;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::cluster::{NAMESPACE, condition, sleeper as bound};
use keelson_tests::{
    LIMIT, Process, http, restarts, running, service_row, sleeper, until_event, until_ready, until_service,
};
use serde_json::{Value, json};

use crate::bad_api::{BadApi, Behavior};

const PODS: &str = "/api/v1/pods";
const NODES: &str = "/api/v1/nodes";
const LEASES: &str = "/apis/coordination.k8s.io/v1/leases";

/// An agent with a running static pod, in spite of the server's behavior.
async fn agent(scratch: &Scratch, api: &BadApi, fields: &Value) -> (Agent, BTreeMap<String, Process>) {
    let agent = Agent::builder(scratch.path())
        .kubeconfig(api.kubeconfig(scratch.path()))
        .fields(fields)
        .manifest("web.yaml", &sleeper("web"))
        .start()
        .await
        .unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    assert_eq!(before.len(), 1);
    (agent, before)
}

/// Waits until the server has the Ready node and the mirror of its static pod.
async fn until_node_reported(agent: &Agent, api: &BadApi) {
    let node = agent.spec().node_name.clone();
    let result = eventually(LIMIT, "the server has the node and its mirror", async || {
        let ready =
            |object: Option<Value>| object.is_some_and(|object| condition(&object, "Ready") == "True");
        ready(api.store.get(NODES, "", &node))
            && ready(api.store.get(PODS, "default", &format!("web-{node}")))
            && api.store.get(LEASES, "kube-node-lease", &node).is_some()
    });
    result.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        until_service(agent, service, &["running"], "").await.unwrap();
    }
}

/// Checks that this behavior is reported and ends nothing for as long as `bad_for`, and that the node recovers.
async fn assert_reported_and_recovers(behavior: Behavior, says: &str, bad_for: Duration) {
    let scratch = Scratch::new().unwrap();
    let api = BadApi::start(behavior).await;
    let (agent, before) = agent(&scratch, &api, &json!({})).await;
    let begun = Instant::now();
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        let row = until_service(&agent, service, &["degraded"], &api.server()).await.unwrap();
        let message = row["message"].as_str().unwrap();
        println!("{behavior:?}, {service}: {message}");
        assert!(message.contains(says), "{message}");
    }
    while begun.elapsed() < bad_for {
        assert_eq!(running(&agent).await.unwrap(), before);
        assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
        let asked = Instant::now();
        http::get_ok(&format!("{}/healthz", agent.healthz_url())).await.unwrap();
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(agent.log().len() < 1 << 20, "the log is flooded: {} bytes", agent.log().len());

    api.set_behavior(Behavior::Good);
    until_node_reported(&agent, &api).await;
    if behavior == Behavior::Garbage {
        // A good server may become bad.
        api.set_behavior(behavior);
        until_service(&agent, ServiceName::NodeStatus, &["degraded"], &api.server()).await.unwrap();
        api.set_behavior(Behavior::Good);
        until_node_reported(&agent, &api).await;
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}

#[tokio::test]
async fn garbage_from_the_api_server_is_reported_and_stops_nothing() {
    assert_reported_and_recovers(Behavior::Garbage, "does not answer", Duration::from_secs(6)).await;
}

#[tokio::test]
async fn an_api_server_with_an_untrusted_certificate_is_reported_and_stops_nothing() {
    assert_reported_and_recovers(Behavior::UntrustedCertificate, "certificate", Duration::from_secs(6)).await;
}

#[tokio::test]
async fn a_404_page_of_a_proxy_is_not_taken_for_the_api_server_and_stops_nothing() {
    assert_reported_and_recovers(
        Behavior::Proxy,
        "no word of a Kubernetes API server",
        Duration::from_secs(6),
    )
    .await;
}

#[tokio::test]
#[ignore = "the server hangs for two minutes, longer than a service may; cargo xtask test --long runs it"]
async fn a_hanging_api_server_is_reported_and_stops_nothing() {
    assert_reported_and_recovers(Behavior::Silent, " within ", Duration::from_secs(120)).await;
}

#[tokio::test]
async fn five_megabyte_objects_delay_no_pod_and_no_status_report() {
    const LARGE: usize = 5 << 20;
    let scratch = Scratch::new().unwrap();
    let api = BadApi::start(Behavior::Good).await;
    let (agent, before) = agent(&scratch, &api, &json!({})).await;
    until_node_reported(&agent, &api).await;

    let map =
        json!({"metadata": {"name": "large", "namespace": NAMESPACE}, "data": {"words": "w".repeat(LARGE)}});
    api.store.put("/api/v1/configmaps", map);
    let mut annotated = bound("annotated");
    annotated["metadata"]["annotations"] = json!({"example.com/large": "a".repeat(LARGE)});
    let mut reader = bound("reader");
    reader["spec"]["volumes"] = json!([{"name": "files", "configMap": {"name": "large"}}]);
    reader["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "files", "mountPath": "/files"}]);
    for mut pod in [annotated, reader, bound("small")] {
        pod["spec"]["nodeName"] = agent.spec().node_name.clone().into();
        pod["status"] = json!({"phase": "Pending"});
        api.store.put(PODS, pod);
    }
    let mut last = String::new();
    let result = eventually(LIMIT, "each is Ready on the node and on the server", async || {
        let pods = ["small", "reader", "annotated"].map(|name| api.store.get(PODS, NAMESPACE, name).unwrap());
        last = pods.iter().map(|pod| format!("{:#}\n", pod["status"])).collect();
        pods.iter().all(|pod| condition(pod, "Ready") == "True")
    });
    result.await.unwrap_or_else(|error| panic!("{error:#}\n{last}\n{}", agent.log_tail()));
    // A pod that is created after them is reported, too.
    let mut after = bound("after");
    after["spec"]["nodeName"] = agent.spec().node_name.clone().into();
    api.store.put(PODS, after);
    let result = eventually(LIMIT, "the next one is Ready", async || {
        condition(&api.store.get(PODS, NAMESPACE, "after").unwrap(), "Ready") == "True"
    });
    result.await.unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_tail()));
    let size =
        agent.keelson(&["exec", "-n", NAMESPACE, "reader", "--", "wc", "-c", "/files/words"]).await.unwrap();
    assert!(keelson_tests::text(&size).contains(&LARGE.to_string()), "{size:?}");
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus, ServiceName::PodSync] {
        until_service(&agent, service, &["running"], "").await.unwrap();
    }
    // The command reads the large objects as well.
    let listed = agent.keelson_json(&["get", "pods", "-A", "-o", "json"]).await.unwrap();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(5));
    let now = running(&agent).await.unwrap();
    assert!(before.iter().all(|(name, process)| now.get(name) == Some(process)), "{now:?}");
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}

#[tokio::test]
async fn a_second_node_of_the_same_name_is_reported_with_a_remedy_until_it_ends() {
    let scratch = Scratch::new().unwrap();
    let api = BadApi::start(Behavior::Good).await;
    let (agent, before) = agent(&scratch, &api, &json!({"nodeLeaseDurationSeconds": 4})).await;
    until_node_reported(&agent, &api).await;
    let name = agent.spec().node_name.clone();
    let mut turn = 0;
    let mut other_writes = || {
        turn += 1;
        let mut lease = api.store.get(LEASES, "kube-node-lease", &name).unwrap();
        lease["spec"]["renewTime"] = format!("2031-01-01T00:00:00.{turn:06}Z").into();
        api.store.put(LEASES, lease);
        let mut node = api.store.get(NODES, "", &name).unwrap();
        node["status"]["nodeInfo"]["machineID"] = "another-machine".into();
        api.store.put(NODES, node);
    };
    let mut last = Value::Null;
    let result = eventually(LIMIT, "the other node is reported", async || {
        other_writes();
        last = service_row(&agent, ServiceName::NodeStatus).await.unwrap_or_default();
        let message = last["message"].as_str().unwrap_or_default();
        last["state"] == "degraded" && message.contains("machine another-machine") && message.contains(&name)
    });
    result.await.unwrap_or_else(|error| panic!("{error:#}\n{last:#}\n{}", agent.log_tail()));
    assert!(last["message"].as_str().unwrap().contains("--hostname-override"), "{last}");
    until_event(&agent, "NodeNameTaken", &name).await.unwrap();
    // Neither node is refused: our lease is renewed, and the warning ends when the other node does.
    until_service(&agent, ServiceName::NodeStatus, &["running"], "").await.unwrap();
    let lease = api.store.get(LEASES, "kube-node-lease", &name).unwrap();
    assert!(!lease["spec"]["renewTime"].as_str().unwrap().starts_with("2031"), "{lease}");
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(restarts(&agent).await.unwrap(), BTreeMap::new());
    agent.end().unwrap();
}
