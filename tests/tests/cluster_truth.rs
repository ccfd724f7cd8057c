//! What the API server has and what the node has stay one truth when others write, too: a controller's conditions, a Node that was
//! given up, a pod that ends before its time, a container that is added to a running pod.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

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
async fn what_others_write_stays_theirs_and_what_is_the_nodes_is_mended() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let proxy = cluster.server.proxy().unwrap();

    // A Node that was given up for lost: within a look or two it is Ready again, not at the next report five minutes later.
    let node = format!("/api/v1/nodes/{}/status", cluster.node);
    let lost = json!({"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"});
    proxy.send("PATCH", &node, STRATEGIC, &json!({"status": {"conditions": [lost]}})).unwrap();
    let seen = cluster.get("node", &cluster.node).unwrap();
    assert_eq!(reason(&seen, "Ready"), "NodeStatusUnknown");
    cluster.until("the node is Ready again", || cluster.node_is_ready()).await;

    // A condition of somebody else's controller holds the pod, however often it turns.
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

    // The addresses of the host stay, whoever begins anew.
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
        // A pod that comes now is told by the new one, after all that was there.
        cluster.run(&sleeper("mark"));
        cluster.until("the new one tells of pods", || cluster.is_ready("mark")).await;
        assert_eq!(["host", "gated"].map(addresses), before);
        cluster.kubectl(&["delete", "pod", "mark", "--timeout=60s"]);
    }
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_pod_is_not_failed_for_the_server_before_its_containers_have_stopped() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let mut slow = sleeper("slow");
    slow["spec"]["activeDeadlineSeconds"] = 4.into();
    slow["spec"]["terminationGracePeriodSeconds"] = 6.into();
    // Deaf to SIGTERM, so that it runs on for the whole grace.
    slow["spec"]["containers"][0]["command"] =
        json!(["/bin/sh", "-c", "trap '' TERM; while true; do sleep 1; done"]);
    cluster.run(&slow);
    cluster.until("the pod is Ready", || cluster.is_ready("slow")).await;
    // For the node it has failed when its time is up; for the server it has not while its container runs on.
    let mut seen_ending = 0;
    loop {
        let own = cluster.agent.keelson_json(&["get", "pods", "-n", NAMESPACE, "-o", "json"]).await.unwrap();
        let has_failed = own.to_string().contains("\"phase\":\"Failed\"");
        let phase = cluster.pod("slow").unwrap()["status"]["phase"].clone();
        // Asked last: what runs now ran when the server was asked.
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
async fn a_container_that_is_added_to_a_running_pod_sees_the_processes_of_its_target() {
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
    eventually(LIMIT, "it says that the first process that it sees is main's", async || {
        let said = cluster.agent.keelson(&["logs", "-n", NAMESPACE, "web", "-c", "debug"]).await.unwrap();
        text(&said).contains("hello from web")
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
