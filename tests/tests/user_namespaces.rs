//! Pods with a user namespace (`hostUsers: false`), on a containerd that supports them. Their IDs are read from the kernel.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Options, Scratch, newer_containerd};
use keelson_tests::{Process, running, until_cause, until_ready};
use serde_json::{Value, json};

const BLOCK: u32 = 65_536;

/// A pod that writes a file into each of its volumes, with a probe of one of them.
fn pod(name: &str) -> String {
    let script =
        "touch /data/own; cat /conf/key /etc/hosts > /dev/null && chown 5:5 /data/own && exec sleep 1000000";
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "hostUsers": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", script],
                "readinessProbe": {"exec": {"command": ["test", "-O", "/conf"]}, "periodSeconds": 1},
                "volumeMounts": [
                    {"name": "data", "mountPath": "/data"},
                    {"name": "conf", "mountPath": "/conf"},
                ],
            }],
            "volumes": [
                {"name": "data", "emptyDir": {}},
                {"name": "conf", "downwardAPI": {
                    "items": [{"path": "key", "fieldRef": {"fieldPath": "metadata.name"}}]}},
            ],
        },
    })
    .to_string()
}

async fn process(agent: &Agent, pod: &str) -> Process {
    let name = format!("{pod}-{}/main", agent.spec().node_name);
    running(agent).await.unwrap().remove(&name).expect("the container runs")
}

/// The first ID on the node of a container's users, and their number, as the kernel has them.
async fn kernel_range(agent: &Agent, pod: &str) -> (u32, u32) {
    let pid = process(agent, pod).await.pid;
    let ranges = ["uid_map", "gid_map"].map(|map| {
        let text = fs::read_to_string(format!("/proc/{pid}/{map}")).unwrap();
        let numbers: Vec<u32> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let [0, first, length] = numbers[..] else { panic!("{map}: {text}") };
        (first, length)
    });
    assert_eq!(ranges[0], ranges[1]);
    ranges[0]
}

/// The folder of a pod of the agent, by the name of its pod.
async fn folder(agent: &Agent, pod: &str) -> std::path::PathBuf {
    let pods = keelson_tests::pods(agent).await.unwrap();
    let object = &pods[&format!("{pod}-{}", agent.spec().node_name)];
    agent.spec().root_dir.join("pods").join(object["metadata"]["uid"].as_str().unwrap())
}

#[tokio::test]
#[ignore = "needs a newer containerd than Debian 12's, which is downloaded; cargo xtask test --long runs it"]
async fn pods_with_user_namespaces_have_ranges_of_their_own_over_restarts() {
    let scratch = Scratch::new().unwrap();
    let options = Options { bin_dir: Some(newer_containerd().unwrap()), ..Options::default() };
    let builder = Agent::builder(scratch.path()).containerd(options);
    let agent = builder.manifest("one.json", &pod("one")).start().await.unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    let one = kernel_range(&agent, "one").await;
    assert_eq!(one, (BLOCK, BLOCK));
    // The file of the container belongs to its user 5, as on any node: the mount is mapped, not the volume.
    let own = folder(&agent, "one").await.join("volumes/kubernetes.io~empty-dir/data/own");
    assert_eq!((fs::metadata(&own).unwrap().uid(), fs::metadata(&own).unwrap().gid()), (5, 5));
    let record = fs::read_to_string(folder(&agent, "one").await.join("userns")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    let mapping = json!([{"hostId": BLOCK, "containerId": 0, "length": BLOCK}]);
    assert_eq!(record, json!({"uidMappings": mapping, "gidMappings": mapping}));

    let before = process(&agent, "one").await;
    agent.service(ServiceName::VolumeManager).unwrap().signal(Signal::KILL);
    agent.write_manifest("two.json", &pod("two")).unwrap();
    until_ready(&agent, &["one", "two"]).await.unwrap();
    assert_eq!(kernel_range(&agent, "two").await, (2 * BLOCK, BLOCK));
    assert_eq!(process(&agent, "one").await.pid, before.pid);
    assert_eq!(kernel_range(&agent, "one").await, one);
}

#[tokio::test]
async fn host_users_false_is_refused_by_name_where_the_runtime_has_no_user_namespaces() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).manifest("one.json", &pod("one")).start().await.unwrap();
    let refusal = "can't set `spec.hostUsers: false`, runtime does not support user namespaces";
    until_cause(&agent, "one", "sandbox", "you", refusal).await.unwrap();
    assert!(running(&agent).await.unwrap().is_empty());
}
