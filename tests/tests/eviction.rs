//! Evictions: the pod that uses too much ends with a reason, and other pods are unaffected.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::disk::SmallDisk;
use keelson_tests::{LIMIT, is_ready, pods, replace_service, running, until_event, until_explained};
use serde_json::{Value, json};

/// Serves the manifests as pods of an API server: static pods are critical, and never evicted.
const FAKE_POD_CONFIG: &str = env!("CARGO_BIN_EXE_fake-pod-config");

/// An agent whose pods are served by a fake pod-config.
fn with_fake_pod_config(spec: &mut AgentSpec) {
    replace_service(spec, ServiceName::PodConfig, FAKE_POD_CONFIG);
    spec.kubelet.insert("volumeStatsAggPeriod".into(), "1s".into());
}

/// A pod with an emptyDir at /scratch that runs a shell script.
fn pod(name: &str, script: &str, limits: &Value, size_limit: &Value) -> String {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": format!("uid-of-{name}")},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", format!("{script}; exec sleep 1000000")],
                "resources": {"limits": limits},
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            }],
            "volumes": [{"name": "scratch", "emptyDir": size_limit}],
        },
    });
    pod.to_string()
}

const FILL: &str = "dd if=/dev/zero of=/scratch/file bs=1048576 count=8";

/// Waits until a pod was evicted; its status.
async fn until_evicted(agent: &Agent, name: &str) -> Value {
    let mut last = Value::Null;
    let evicted = eventually(LIMIT * 2, format!("{name} is evicted"), async || {
        last = pods(agent).await.ok().and_then(|mut pods| pods.remove(name)).unwrap_or_default();
        last["status"]["phase"] == "Failed"
    });
    evicted.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    let status = last["status"].clone();
    assert_eq!(status["reason"], "Evicted", "{status:#}");
    let conditions = status["conditions"].as_array().unwrap();
    let target = conditions.iter().find(|condition| condition["type"] == "DisruptionTarget").unwrap();
    assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("TerminationByKubelet")));
    assert_eq!(target["message"], status["message"], "{status:#}");
    status
}

async fn until_calm_is_ready(agent: &Agent) {
    let ready = eventually(LIMIT, "calm is Ready", async || {
        pods(agent).await.is_ok_and(|pods| pods.get("calm").is_some_and(is_ready))
    });
    ready.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

#[tokio::test]
async fn local_storage_limits_evict_pods_although_resource_manager_is_killed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(with_fake_pod_config).start().await.unwrap();
    let none = json!({});
    agent.write_manifest("calm.json", &pod("calm", "true", &none, &json!({"sizeLimit": "1Gi"}))).unwrap();
    until_calm_is_ready(&agent).await;
    let calm = running(&agent).await.unwrap()["calm/main"].clone();

    agent.write_manifest("full.json", &pod("full", FILL, &none, &json!({"sizeLimit": "4Mi"}))).unwrap();
    let storage = json!({"ephemeral-storage": "4Mi"});
    agent.write_manifest("large.json", &pod("large", FILL, &storage, &none)).unwrap();
    let begun = eventually(LIMIT, "both have begun", async || {
        running(&agent).await.is_ok_and(|now| now.contains_key("full/main") && now.contains_key("large/main"))
    });
    begun.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.service(ServiceName::ResourceManager).unwrap().signal(Signal::KILL);

    let full = until_evicted(&agent, "full").await;
    assert_eq!(full["message"], "Usage of EmptyDir volume \"scratch\" exceeds the limit \"4Mi\". ");
    let large = until_evicted(&agent, "large").await;
    assert_eq!(
        large["message"],
        "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. "
    );
    until_event(&agent, "Evicted", "exceeds the limit").await.unwrap();
    until_explained(&agent, "full", "the eviction is explained", |explained| {
        explained.to_string().contains("Usage of EmptyDir volume")
    })
    .await
    .unwrap();
    let alone = eventually(LIMIT, "only calm runs, unchanged", async || {
        running(&agent).await.is_ok_and(|now| now.len() == 1 && now.get("calm/main") == Some(&calm))
    });
    alone.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));

    agent.service(ServiceName::ResourceManager).unwrap().signal(Signal::KILL);
    agent.remove_manifest("full.json").unwrap();
    let gone = eventually(LIMIT, "full has gone", async || {
        pods(&agent).await.is_ok_and(|pods| !pods.contains_key("full"))
    });
    gone.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(running(&agent).await.unwrap().get("calm/main"), Some(&calm));
    agent.end().unwrap();
}

#[tokio::test]
async fn disk_pressure_evicts_the_pod_that_fills_the_disk_and_rejects_new_pods() {
    let scratch = Scratch::new().unwrap();
    let disk = SmallDisk::at(scratch.path().join("a/kubelet"), 64 << 20).unwrap();
    let builder = Agent::builder(scratch.path()).configure(with_fake_pod_config).configure(|spec| {
        // Only the small disk can be short.
        spec.kubelet.insert("evictionHard".into(), json!({"nodefs.available": "32Mi"}));
    });
    let agent = builder.start().await.unwrap();
    let none = json!({});
    agent.write_manifest("calm.json", &pod("calm", "true", &none, &none)).unwrap();
    until_calm_is_ready(&agent).await;
    let calm = running(&agent).await.unwrap()["calm/main"].clone();
    let fill = "dd if=/dev/zero of=/scratch/file bs=1048576 count=40";
    agent.write_manifest("filler.json", &pod("filler", fill, &none, &none)).unwrap();

    let filler = until_evicted(&agent, "filler").await;
    let message = filler["message"].as_str().unwrap();
    let low = "The node was low on resource: ephemeral-storage. Threshold quantity: 32Mi, available: ";
    assert!(message.starts_with(low), "{message}");
    until_event(&agent, "EvictionThresholdMet", "Attempting to reclaim ephemeral-storage").await.unwrap();
    until_event(&agent, "NodeHasDiskPressure", "").await.unwrap();
    agent.service(ServiceName::ResourceManager).unwrap().signal(Signal::KILL);

    agent.write_manifest("late.json", &pod("late", "true", &none, &none)).unwrap();
    let mut last = Value::Null;
    let refused = eventually(LIMIT, "late is turned away", async || {
        last = pods(&agent).await.ok().and_then(|mut pods| pods.remove("late")).unwrap_or_default();
        last["status"]["phase"] == "Failed"
    });
    refused.await.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", agent.log_tail()));
    assert_eq!(last["status"]["reason"], "Evicted", "{last:#}");
    let message = last["status"]["message"].as_str().unwrap();
    assert!(message.ends_with("The node had condition: [DiskPressure]. "), "{message}");
    assert_eq!(running(&agent).await.unwrap().get("calm/main"), Some(&calm));
    agent.end().unwrap();
    drop(disk);
}
