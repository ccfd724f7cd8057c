//! The API server and the node keep a consistent status when others write, too: a controller's conditions, a Node that was marked
//! unreachable, a pod that ends early, an ephemeral container.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, condition, sleeper};
use keelson_tests::{running, text};
use serde_json::{Value, json};

const STRATEGIC: &str = "application/strategic-merge-patch+json";

fn path(pod: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
}

fn reason(object: &Value, kind: &str) -> String {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.filter(|c| c["type"] == kind).find_map(|c| c["reason"].as_str());
    found.unwrap_or_default().to_owned()
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn foreign_conditions_stay_and_the_nodes_own_fields_are_restored() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let proxy = cluster.server.proxy().unwrap();

    // A Node that was marked unreachable is Ready again at the next check, not at the next report five minutes later.
    let node = format!("/api/v1/nodes/{}/status", cluster.node);
    let lost = json!({"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"});
    proxy.send("PATCH", &node, STRATEGIC, &json!({"status": {"conditions": [lost]}})).unwrap();
    let seen = cluster.get("node", &cluster.node).unwrap();
    assert_eq!(reason(&seen, "Ready"), "NodeStatusUnknown");
    cluster.until("the node is Ready again", || cluster.node_is_ready()).await;

    // A foreign controller's condition holds the pod back each time it is set.
    let mut gated = sleeper("gated");
    gated["spec"]["readinessGates"] = json!([{"conditionType": "example.com/gate"}]);
    cluster.run(&gated);
    cluster
        .until("the container is ready", || {
            cluster.pod("gated").is_some_and(|pod| condition(&pod, "ContainersReady") == "True")
        })
        .await;
    let status = format!("{}/status", path("gated"));
    for turned in ["True", "False", "True", "False"] {
        let gate = json!({"type": "example.com/gate", "status": turned});
        proxy.send("PATCH", &status, STRATEGIC, &json!({"status": {"conditions": [gate]}})).unwrap();
        cluster
            .until("the pod follows", || {
                cluster.pod("gated").is_some_and(|pod| condition(&pod, "Ready") == turned)
            })
            .await;
        assert_eq!(
            condition(&cluster.pod("gated").unwrap(), "example.com/gate"),
            turned,
            "nobody turns it back"
        );
    }

    // The addresses of the host stay across restarts of services.
    let mut host = sleeper("host");
    host["spec"]["hostNetwork"] = true.into();
    cluster.run(&host);
    cluster.until("the pod is Ready", || cluster.is_ready("host")).await;
    let addresses = |pod: &str| {
        let status = cluster.pod(pod).unwrap()["status"].clone();
        ["hostIP", "podIP", "podIPs"].map(|field| status[field].clone())
    };
    let all_told = || {
        let [host_ip, pod_ip, pod_ips] = addresses("host");
        host_ip.is_string() && pod_ip == host_ip && pod_ips[0]["ip"] == host_ip
    };
    cluster.until("it has the node's addresses", all_told).await;
    let before = ["host", "gated"].map(addresses);
    for _ in 0..3 {
        let node_status = cluster.agent.service(ServiceName::NodeStatus).unwrap();
        node_status.signal(Signal::KILL);
        eventually(LIMIT, "node-status runs again", async || {
            cluster.agent.service(ServiceName::NodeStatus).is_some_and(|now| now != node_status)
        })
        .await
        .unwrap();
        // The restarted service reports a new pod after the pending reports.
        cluster.run(&sleeper("mark"));
        cluster.until("the restarted service reports pods", || cluster.is_ready("mark")).await;
        assert_eq!(["host", "gated"].map(addresses), before);
        cluster.kubectl(&["delete", "pod", "mark", "--timeout=60s"]);
    }
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_pod_is_not_reported_failed_before_its_containers_stop() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let mut slow = sleeper("slow");
    slow["spec"]["activeDeadlineSeconds"] = 4.into();
    slow["spec"]["terminationGracePeriodSeconds"] = 6.into();
    // Ignores SIGTERM, so that it runs for the whole grace period.
    slow["spec"]["containers"][0]["command"] =
        json!(["/bin/sh", "-c", "trap '' TERM; while true; do sleep 1; done"]);
    cluster.run(&slow);
    cluster.until("the pod is Ready", || cluster.is_ready("slow")).await;
    // After its deadline the pod has failed for the node, and not for the server while its container runs.
    let mut seen_ending = 0;
    loop {
        let own = cluster.agent.keelson_json(&["get", "pods", "-n", NAMESPACE, "-o", "json"]).await.unwrap();
        let has_failed = own.to_string().contains("\"phase\":\"Failed\"");
        let phase = cluster.pod("slow").unwrap()["status"]["phase"].clone();
        // Read after the server: a container that runs now ran then.
        if running(&cluster.agent).await.unwrap().is_empty() {
            break;
        }
        assert_eq!(phase, "Running");
        seen_ending += usize::from(has_failed);
    }
    assert!(seen_ending > 0, "its end was too fast to be seen");
    cluster
        .until("the server has its end", || {
            cluster.pod("slow").is_some_and(|pod| {
                pod["status"]["phase"] == "Failed" && pod["status"]["reason"] == "DeadlineExceeded"
            })
        })
        .await;
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn an_ephemeral_container_sees_the_processes_of_its_target() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    let before = running(&cluster.agent).await.unwrap();

    let debug = json!({
        "name": "debug", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent", "targetContainerName": "main",
        "command": ["/bin/sh", "-c", "cat /proc/1/cmdline; echo; sleep 1000000"],
        "terminationMessagePolicy": "File",
    });
    let proxy = cluster.server.proxy().unwrap();
    let (method, content_type, body) = if cluster.server.version() < (1, 22) {
        let body = json!({
            "apiVersion": "v1", "kind": "EphemeralContainers", "metadata": {"name": "web"},
            "ephemeralContainers": [debug],
        });
        ("PUT", "application/json", body)
    } else {
        ("PATCH", STRATEGIC, json!({"spec": {"ephemeralContainers": [debug]}}))
    };
    proxy.send(method, &format!("{}/ephemeralcontainers", path("web")), content_type, &body).unwrap();
    cluster
        .until("it runs, and the server has it so", || {
            cluster.pod("web").is_some_and(|pod| {
                pod["status"]["ephemeralContainerStatuses"][0]["state"]["running"].is_object()
            })
        })
        .await;
    eventually(LIMIT, "its first process is that of main", async || {
        let output = cluster.agent.keelson(&["logs", "-n", NAMESPACE, "web", "-c", "debug"]).await.unwrap();
        text(&output).contains("hello from web")
    })
    .await
    .unwrap();
    let after = running(&cluster.agent).await.unwrap();
    assert_eq!(after.len(), before.len() + 1);
    assert!(
        before.iter().all(|(name, container)| after.get(name) == Some(container)),
        "nothing was restarted"
    );
    cluster.kubectl(&["delete", "pod", "web", "--timeout=60s"]);
    assert!(running(&cluster.agent).await.unwrap().is_empty());
    cluster.agent.end().unwrap();
}
