//! Pods with claims on a node without an API server: PersistentVolumes and claims are manifests beside the pods, and pod-config
//! binds them. Mounts are read from mountinfo and the container's view through /proc, neither from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, pods, running, until_cause, until_event, until_ready};
use serde_json::{Value, json};

/// A local PersistentVolume of this node.
fn local_volume(agent: &Agent, name: &str, path: &Path, more: &Value) -> Value {
    let node =
        json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [agent.spec().node_name]}]);
    let mut volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "disks",
            "local": {"path": path},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": node}]}},
        },
    });
    let spec = volume["spec"].as_object_mut().unwrap();
    spec.extend(more.as_object().unwrap().clone());
    volume
}

fn claim(name: &str, more: &Value) -> Value {
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "disks",
            "resources": {"requests": {"storage": "100Mi"}},
        },
    });
    claim["spec"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claim
}

/// A pod that appends its name to a file in the claim's volume, and then sleeps.
fn pod(name: &str, claim: &str, more_mounts: &Value) -> Value {
    let mut mounts = vec![json!({"name": "data", "mountPath": "/data"})];
    mounts.extend(more_mounts.as_array().unwrap().clone());
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", format!("echo {name} >> /data/log; exec sleep 1000000")],
                "volumeMounts": mounts,
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        },
    })
}

fn documents(objects: &[Value]) -> String {
    objects.iter().map(|object| format!("{object}\n---\n")).collect()
}

/// The mount points of plugins' volumes and of sub paths below the agent's root.
fn plugin_mounts(agent: &Agent) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let below = agent.spec().root_dir.to_string_lossy().into_owned();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
    let is_ours = |point: &String| {
        point.starts_with(&below) && (point.contains("local-volume") || point.contains("/volume-subpaths/"))
    };
    points.filter(is_ours).collect()
}

async fn pod_folder(agent: &Agent, name: &str) -> PathBuf {
    let pods = pods(agent).await.unwrap();
    let uid = pods[&format!("{name}-{}", agent.spec().node_name)]["metadata"]["uid"].clone();
    agent.spec().root_dir.join("pods").join(uid.as_str().unwrap())
}

async fn until_gone(agent: &Agent, folder: &Path) {
    eventually(LIMIT, format!("{} is gone", folder.display()), async || !folder.exists())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// Kills volume-manager at whatever it does now.
async fn kill_volume_manager(agent: &Agent) {
    eventually(LIMIT, "volume-manager runs", async || {
        agent.service(ServiceName::VolumeManager).is_some_and(|service| {
            service.signal(Signal::KILL);
            true
        })
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_database_keeps_its_local_volume_over_kills_and_over_a_new_pod() {
    let scratch = Scratch::new().unwrap();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let objects = [local_volume(&agent, "disk", &disk, &json!({})), claim("database", &json!({}))];
    agent.write_manifest("storage.yaml", &documents(&objects)).unwrap();
    let sub_path = json!([{"name": "data", "mountPath": "/part", "subPath": "part"}]);
    agent.write_manifest("one.yaml", &pod("one", "database", &sub_path).to_string()).unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n");
    let folder = pod_folder(&agent, "one").await;
    assert!(folder.join("volumes/kubernetes.io~local-volume/disk").is_dir());
    assert!(folder.join("volume-subpaths/disk/main/1").is_dir(), "below the PersistentVolume's name");
    let mounts = plugin_mounts(&agent);
    assert_eq!(mounts.len(), 2, "{mounts:?}");

    let running_before = running(&agent).await.unwrap();
    for service in [ServiceName::VolumeManager, ServiceName::PodConfig, ServiceName::PodSync] {
        let before = agent.service(service).unwrap();
        before.signal(Signal::KILL);
        eventually(LIMIT, "the service runs again", async || {
            agent.service(service).is_some_and(|now| now != before)
        })
        .await
        .unwrap();
    }
    until_ready(&agent, &["one"]).await.unwrap();
    assert_eq!(running(&agent).await.unwrap(), running_before, "no container has noticed");
    assert_eq!(plugin_mounts(&agent), mounts);

    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    assert_eq!(plugin_mounts(&agent), Vec::<String>::new());
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n", "the data stay");
    agent.write_manifest("two.yaml", &pod("two", "database", &json!([])).to_string()).unwrap();
    until_ready(&agent, &["two"]).await.unwrap();
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\ntwo\n");
    let folder = pod_folder(&agent, "two").await;
    agent.remove_manifest("two.yaml").unwrap();
    until_gone(&agent, &folder).await;
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_waits_for_its_claim_and_volume_and_says_who_has_to_act() {
    let scratch = Scratch::new().unwrap();
    let disk = scratch.path().join("disk");
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("one.yaml", &pod("one", "database", &json!([])).to_string()).unwrap();
    let text = "persistentvolumeclaims \"database\" not found";
    until_cause(&agent, "one", "volumes", "you", text).await.unwrap();
    until_event(&agent, "FailedMount", text).await.unwrap();

    agent.write_manifest("claim.yaml", &claim("database", &json!({})).to_string()).unwrap();
    until_cause(&agent, "one", "volumes", "you", "PVC is not bound").await.unwrap();

    // The folder does not exist yet, so the mount fails although the claim is bound.
    let volume = local_volume(&agent, "disk", &disk, &json!({}));
    agent.write_manifest("volume.yaml", &volume.to_string()).unwrap();
    until_event(&agent, "FailedMount", "for volume \"disk\"").await.unwrap();
    fs::create_dir(&disk).unwrap();
    until_one_ready(&agent, "one").await;
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n");
    let folder = pod_folder(&agent, "one").await;
    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    agent.end().unwrap();
}

fn disk(scratch: &Scratch, name: &str) -> PathBuf {
    scratch.path().join(format!("disk-{name}"))
}

#[tokio::test]
async fn volume_manager_is_killed_again_and_again_while_pods_with_claims_come_and_go() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let names = ["a", "b", "c"];
    let mut objects = Vec::new();
    for name in names {
        let disk = disk(&scratch, name);
        fs::create_dir(&disk).unwrap();
        let reserved = json!({"claimRef": {"namespace": "default", "name": name}});
        objects.push(local_volume(&agent, name, &disk, &reserved));
        objects.push(claim(name, &json!({"volumeName": name})));
    }
    agent.write_manifest("storage.yaml", &documents(&objects)).unwrap();
    for round in 1..=3 {
        for name in names {
            agent.write_manifest(&format!("{name}.yaml"), &pod(name, name, &json!([])).to_string()).unwrap();
        }
        kill_volume_manager(&agent).await;
        until_ready(&agent, &names).await.unwrap();
        let mut folders = Vec::new();
        for name in names {
            let log = fs::read_to_string(disk(&scratch, name).join("log")).unwrap();
            assert_eq!(log.lines().count(), round, "each container has started once a round: {log}");
            folders.push(pod_folder(&agent, name).await);
            agent.remove_manifest(&format!("{name}.yaml")).unwrap();
        }
        kill_volume_manager(&agent).await;
        for folder in &folders {
            until_gone(&agent, folder).await;
        }
        assert_eq!(plugin_mounts(&agent), Vec::<String>::new());
    }
    agent.end().unwrap();
}

/// Runs the command; its exit code and both outputs.
async fn keelson(agent: &Agent, args: &[&str]) -> (Option<i32>, String) {
    let output = agent.keelson(args).await.unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

/// Runs a command that has to fail with this text.
async fn keelson_refuses(agent: &Agent, args: &[&str], text: &str) {
    let (code, output) = keelson(agent, args).await;
    assert!(code == Some(1) && output.contains(text), "{args:?}: {code:?} {output}");
}

/// The rows of a table, with single spaces.
fn rows(table: &str) -> Vec<String> {
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Applies a file with a pod, its claim `data` and its PersistentVolume `data`, and deletes them by the file, in an order that nothing
/// refuses.
async fn apply_and_delete_by_file(agent: &Agent, file: &str, pod: &str) {
    assert_eq!(keelson(agent, &["apply", "-f", file]).await.0, Some(0));
    until_one_ready(agent, "one").await;
    let (code, output) = keelson(agent, &["delete", "-f", file]).await;
    let deleted =
        format!("pod/{pod} deleted\npersistentvolumeclaim/data deleted\npersistentvolume/data deleted\n");
    assert_eq!((code, output), (Some(0), deleted));
}

#[tokio::test]
async fn volumes_and_claims_are_applied_shown_and_deleted_by_the_command() {
    let scratch = Scratch::new().unwrap();
    let disk = disk(&scratch, "data");
    fs::create_dir(&disk).unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let all = scratch.path().join("all.yaml");
    let (volume, claim) = (local_volume(&agent, "data", &disk, &json!({})), claim("data", &json!({})));
    fs::write(&all, documents(&[volume, claim, pod("one", "data", &json!([]))])).unwrap();
    let (all, one) = (all.to_str().unwrap(), format!("one-{}", agent.spec().node_name));
    let applied =
        format!("pod/{one} created\npersistentvolumeclaim/data stored\npersistentvolume/data stored\n");
    assert_eq!(keelson(&agent, &["apply", "-f", all]).await, (Some(0), applied));
    until_one_ready(&agent, "one").await;
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n");

    for (what, expected) in [
        ("pvc", "data Bound data 1Gi RWO disks"),
        ("pv/data", "data 1Gi RWO Retain Bound default/data disks"),
    ] {
        let (code, table) = keelson(&agent, &["get", what]).await;
        let rows = rows(&table);
        let (row, age) = rows[1].rsplit_once(' ').unwrap();
        assert_eq!((code, row), (Some(0), expected), "{table}");
        assert!(age.starts_with(|first: char| first.is_ascii_digit()), "{table}");
    }

    keelson_refuses(&agent, &["delete", "pvc", "data"], &format!("is used by the pod {one}")).await;
    keelson_refuses(&agent, &["delete", "pv", "data"], "is bound to the claim default/data").await;
    keelson_refuses(&agent, &["delete", "pod", "data"], "no manifest of the pod default/data is stored")
        .await;
    // As a command of the release before sends it.
    let without_kind = ["grpc", "call", "pod-config", "DeleteManifest", r#"{"name": "data"}"#];
    let ambiguous = "the PersistentVolumeClaim default/data and the PersistentVolume data";
    keelson_refuses(&agent, &without_kind, ambiguous).await;
    assert_eq!(keelson(&agent, &["delete", "pod", "one"]).await, (Some(0), format!("pod/{one} deleted\n")));

    assert_eq!(
        keelson(&agent, &["delete", "pvc/data"]).await,
        (Some(0), "persistentvolumeclaim/data deleted\n".to_owned())
    );
    let claim = r#"{"name": "data", "kind": "PersistentVolumeClaim"}"#;
    let repeated = ["grpc", "call", "pod-config", "DeleteManifest", claim];
    keelson_refuses(&agent, &repeated, "no manifest of the PersistentVolumeClaim default/data is stored")
        .await;
    eventually(LIMIT, "the volume is released and exists still", async || {
        let volume = agent.keelson_json(&["get", "pv", "data", "-o", "json"]).await.unwrap();
        volume["status"]["phase"] == "Released"
    })
    .await
    .unwrap();
    keelson_refuses(&agent, &["delete", "pvc", "data"], "there is no persistentvolumeclaim/data").await;
    assert_eq!(
        keelson(&agent, &["delete", "pv", "data"]).await,
        (Some(0), "persistentvolume/data deleted\n".to_owned())
    );
    keelson_refuses(&agent, &["get", "pv", "data"], "there is no persistentvolume/data").await;
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n", "the data stay");

    apply_and_delete_by_file(&agent, all, &one).await;
    agent.end().unwrap();
}

/// A pod as of [`pod`] whose container ends only when the file `stop` is in the volume.
fn slow_pod(name: &str, claim: &str) -> Value {
    let mut pod = pod(name, claim, &json!([]));
    let script =
        format!("trap '' TERM; echo {name} >> /data/log; until [ -e /data/stop ]; do sleep 0.1; done");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(600);
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", script]);
    pod
}

/// The object, unless pod-config is down or does not have it.
async fn object(agent: &Agent, kind: &str, name: &str) -> Option<Value> {
    agent.keelson_json(&["get", kind, name, "-o", "json"]).await.ok()
}

async fn until_phase(agent: &Agent, kind: &str, name: &str, phase: &str) {
    eventually(LIMIT, format!("{kind}/{name} is {phase}"), async || {
        object(agent, kind, name).await.is_some_and(|object| object["status"]["phase"] == phase)
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// Waits until the claim `database`, which is deleted, is held by this, and its PersistentVolume is bound to it.
async fn until_held(agent: &Agent, holder: &str) {
    eventually(LIMIT, format!("the claim is held by {holder}"), async || {
        let Some(claim) = object(agent, "pvc", "database").await else { return false };
        let metadata = &claim["metadata"];
        metadata["annotations"]["keelson.dev/held-by"] == holder
            && metadata["deletionTimestamp"].is_string()
            && claim["status"]["phase"] == "Bound"
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(object(agent, "pv", "disk").await.unwrap()["status"]["phase"], "Bound");
    assert_eq!(object(agent, "pvc", "other").await.unwrap()["status"]["phase"], "Pending");
}

/// Kills services at the same time, and waits until they run again.
async fn kill(agent: &Agent, services: &[ServiceName]) {
    let before: Vec<_> = services.iter().map(|service| agent.service(*service).unwrap()).collect();
    for service in &before {
        service.signal(Signal::KILL);
    }
    for (service, before) in services.iter().zip(before) {
        eventually(LIMIT, format!("{service} runs again"), async || {
            agent.service(*service).is_some_and(|now| now != before)
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn a_deleted_claim_stays_bound_over_kills_until_its_volume_is_unmounted() {
    let scratch = Scratch::new().unwrap();
    let disk = disk(&scratch, "data");
    fs::create_dir(&disk).unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("disk.yaml", &local_volume(&agent, "disk", &disk, &json!({})).to_string()).unwrap();
    agent.write_manifest("claim.yaml", &claim("database", &json!({})).to_string()).unwrap();
    agent.write_manifest("one.yaml", &slow_pod("one", "database").to_string()).unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    agent.write_manifest("other.yaml", &claim("other", &json!({})).to_string()).unwrap();
    let folder = pod_folder(&agent, "one").await;
    agent.remove_manifest("one.yaml").unwrap();
    agent.remove_manifest("claim.yaml").unwrap();
    let user = format!("the pod default/one-{}", agent.spec().node_name);
    until_held(&agent, &user).await;

    // The pod has left its source: pod-config knows only by the reports that its container still writes.
    for services in [
        &[ServiceName::VolumeManager][..],
        &[ServiceName::PodConfig],
        &[ServiceName::PodConfig, ServiceName::VolumeManager],
    ] {
        kill(&agent, services).await;
        until_held(&agent, &user).await;
    }
    assert_eq!(plugin_mounts(&agent).len(), 1);

    fs::write(disk.join("stop"), "").unwrap();
    until_phase(&agent, "pv", "disk", "Released").await;
    assert_eq!(plugin_mounts(&agent), Vec::<String>::new(), "it was unmounted before");
    assert_eq!(object(&agent, "pvc", "database").await, None);
    assert_eq!(object(&agent, "pvc", "other").await.unwrap()["status"]["phase"], "Pending");
    until_gone(&agent, &folder).await;
    assert_eq!(fs::read_to_string(disk.join("log")).unwrap(), "one\n", "the data stay");
    agent.end().unwrap();
}
