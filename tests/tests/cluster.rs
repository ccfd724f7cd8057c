//! A node of a Kubernetes cluster: a real API server, kubectl, and the agent instead of a kubelet.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::time::Duration;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, condition, sleeper};
use keelson_tests::{running, text};
use serde_json::{Value, json};

fn object(kind: &str, name: &str, data: &Value) -> Value {
    let metadata = json!({"name": name, "namespace": NAMESPACE});
    let field = if kind == "Secret" { "stringData" } else { "data" };
    json!({"apiVersion": "v1", "kind": kind, "metadata": metadata, field: data})
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_node_registers_and_runs_the_pods_bound_to_it() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |spec| {
        spec.kubelet.insert("nodeLeaseDurationSeconds".to_owned(), 8.into());
    })
    .await;
    let node = cluster.get("node", &cluster.node).unwrap();
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], cluster.node.as_str());
    assert_eq!(node["status"]["nodeInfo"]["kubeletVersion"].as_str().unwrap().split('.').next(), Some("v1"));
    assert!(
        node["status"]["capacity"]["cpu"].is_string() && node["status"]["allocatable"]["pods"].is_string()
    );
    assert_lease_is_renewed(&cluster, &node).await;

    cluster.server.apply(&object("ConfigMap", "greeting", &json!({"text": "one"}))).unwrap();
    cluster.server.apply(&object("Secret", "key", &json!({"word": "hidden"}))).unwrap();
    let mut web = sleeper("web");
    let main = &mut web["spec"]["containers"][0];
    main["env"] = json!([{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "key", "key": "word"}}}]);
    main["volumeMounts"] = json!([{"name": "conf", "mountPath": "/conf"}]);
    main["readinessProbe"] =
        json!({"exec": {"command": ["cat", "/conf/text"]}, "periodSeconds": 1, "timeoutSeconds": 20});
    web["spec"]["volumes"] = json!([{"name": "conf", "configMap": {"name": "greeting"}}]);
    cluster.run(&web);
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    let pod = cluster.pod("web").unwrap();
    let addresses = node["status"]["addresses"].as_array().unwrap();
    assert!(addresses.iter().any(|address| address["address"] == pod["status"]["hostIP"]), "{pod:#}");
    assert!(pod["status"]["podIP"].is_string(), "{pod:#}");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(condition(&pod, "PodScheduled"), "True", "what the server has set stays");

    let output = cluster
        .agent
        .keelson(&["exec", "-n", NAMESPACE, "web", "--", "sh", "-c", "echo $WORD $(cat /conf/text)"])
        .await
        .unwrap();
    assert_eq!(text(&output).trim(), "hidden one");
    cluster.server.apply(&object("ConfigMap", "greeting", &json!({"text": "two"}))).unwrap();
    eventually(LIMIT, "the file in the pod is the new one", async || {
        let output = cluster
            .agent
            .keelson(&["exec", "-n", NAMESPACE, "web", "--", "cat", "/conf/text"])
            .await
            .unwrap();
        text(&output).trim() == "two"
    })
    .await
    .unwrap();
    cluster
        .until("events are reported", || {
            let events = cluster.kubectl(&["get", "events", "-o", "json"]);
            ["Pulled", "Created", "Started"].iter().all(|reason| events.contains(reason))
        })
        .await;

    assert_pods_end(&cluster).await;
    cluster.agent.end().unwrap();
}

/// The node has a lease of 8 s that belongs to its Node and is renewed.
async fn assert_lease_is_renewed(cluster: &Cluster, node: &Value) {
    let lease = || cluster.server.kubectl_json(&["-n", "kube-node-lease", "get", "lease", &cluster.node]);
    cluster.until("there is a lease", || lease().is_ok()).await;
    let first = lease().unwrap();
    assert_eq!(first["spec"]["leaseDurationSeconds"], 8);
    assert_eq!(first["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"]);
    cluster
        .until("it is renewed", || {
            lease().is_ok_and(|now| now["spec"]["renewTime"] != first["spec"]["renewTime"])
        })
        .await;
}

/// The pod `web` and further ones end: by a graceful and a forced deletion, and by themselves.
async fn assert_pods_end(cluster: &Cluster) {
    // Graceful: the object is deleted when nothing of the pod is left on the node.
    cluster.kubectl(&["delete", "pod", "web", "--timeout=60s"]);
    assert_eq!(running(&cluster.agent).await.unwrap().len(), 0);
    // Forced: the object is deleted at once, the pod after it.
    cluster.run(&sleeper("forced"));
    cluster.until("the pod is Ready", || cluster.is_ready("forced")).await;
    cluster.kubectl(&["delete", "pod", "forced", "--force", "--grace-period=0"]);
    eventually(LIMIT, "nothing runs", async || running(&cluster.agent).await.is_ok_and(|all| all.is_empty()))
        .await
        .unwrap();
    let mut once = sleeper("once");
    once["spec"]["restartPolicy"] = "Never".into();
    once["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", "exit 3"]);
    cluster.run(&once);
    cluster
        .until("it has failed", || cluster.pod("once").is_some_and(|pod| pod["status"]["phase"] == "Failed"))
        .await;
    let status =
        cluster.pod("once").unwrap()["status"]["containerStatuses"][0]["state"]["terminated"].clone();
    assert_eq!(status["exitCode"], 3);
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn a_mirror_pod_is_recreated_and_is_deleted_with_its_static_pod() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, |_| ()).await;
    let mut pod = sleeper("fixed");
    pod["spec"].as_object_mut().unwrap().remove("nodeName");
    cluster.agent.write_manifest("fixed.yaml", &pod.to_string()).unwrap();
    let name = format!("fixed-{}", cluster.node);
    cluster.until("its mirror is Ready", || cluster.is_ready(&name)).await;
    let mirror = cluster.pod(&name).unwrap();
    let before = running(&cluster.agent).await.unwrap();
    assert_eq!(before.len(), 1);
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");
    let annotations = &mirror["metadata"]["annotations"];
    assert_eq!(annotations["kubernetes.io/config.mirror"], annotations["kubernetes.io/config.hash"]);

    cluster.kubectl(&["delete", "pod", &name, "--force", "--grace-period=0"]);
    cluster
        .until("the mirror is recreated", || {
            cluster.is_ready(&name)
                && cluster.pod(&name).is_some_and(|now| now["metadata"]["uid"] != mirror["metadata"]["uid"])
        })
        .await;
    assert_eq!(running(&cluster.agent).await.unwrap(), before, "the pod has noticed nothing");

    cluster.agent.remove_manifest("fixed.yaml").unwrap();
    cluster.until("the mirror is gone", || cluster.pod(&name).is_none()).await;
    cluster.agent.end().unwrap();
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn killing_services_or_the_api_server_restarts_no_pod_and_status_converges() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = Cluster::start(&scratch, |_| ()).await;
    let names: Vec<String> = (0..5).map(|n| format!("p{n}")).collect();
    for name in &names {
        cluster.run(&sleeper(name));
    }
    cluster.until("all are Ready", || names.iter().all(|name| cluster.is_ready(name))).await;
    let before = running(&cluster.agent).await.unwrap();
    for service in ServiceName::supervised() {
        let process = cluster.agent.service(service).unwrap();
        process.signal(Signal::KILL);
        eventually(LIMIT, format!("{service} runs again"), async || {
            cluster.agent.service(service).is_some_and(|now| now != process)
        })
        .await
        .unwrap();
    }
    cluster.run(&sleeper("after"));
    cluster.until("a pod comes after it all", || cluster.is_ready("after")).await;
    cluster.kubectl(&["delete", "pod", "after", "--timeout=60s"]);
    assert_eq!(running(&cluster.agent).await.unwrap(), before);

    // The server is down: pods run, and changes are reported afterwards.
    cluster.server.kill();
    let victim = before.keys().next().unwrap().clone();
    keelson_testkit::process::ProcessId::of(before[&victim].pid).unwrap().signal(Signal::KILL);
    let pod_config = cluster.agent.service(ServiceName::PodConfig).unwrap();
    pod_config.signal(Signal::KILL);
    eventually(LIMIT, "the container that ended is started again", async || {
        running(&cluster.agent).await.is_ok_and(|now| {
            now.len() == before.len()
                && now.iter().filter(|(key, value)| before.get(*key) != Some(*value)).count() == 1
        })
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    tokio::time::sleep(Duration::from_secs(10)).await;
    cluster.server.restart().unwrap();
    let pod = victim.split_once('/').unwrap().0.to_owned();
    cluster
        .until("the restart is reported", || {
            cluster.pod(&pod).is_some_and(|pod| pod["status"]["containerStatuses"][0]["restartCount"] == 1)
        })
        .await;
    for name in names.iter().filter(|name| **name != pod) {
        assert_eq!(cluster.pod(name).unwrap()["status"]["containerStatuses"][0]["restartCount"], 0, "{name}");
    }

    // A deleted Node is registered again, and its pods with it.
    let uid = cluster.get("node", &cluster.node).unwrap()["metadata"]["uid"].clone();
    cluster.kubectl(&["delete", "node", &cluster.node.clone()]);
    cluster
        .until("the node is registered again", || {
            cluster.node_is_ready()
                && cluster.get("node", &cluster.node).is_some_and(|node| node["metadata"]["uid"] != uid)
        })
        .await;
    cluster.agent.end().unwrap();
}
