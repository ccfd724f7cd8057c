//! Volumes of a CSI driver on a node without an API server. The driver is a program of its own over real folders and mounts, which
//! records its calls and has faults on demand. Mounts are read from mountinfo, never from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::csi_driver::{CsiDriver, CsiDriverSpec, mount_points};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, pods, running, sleeper, until_cause, until_event, until_ready};
use serde_json::{Value, json};

const DRIVER: &str = "disks.example.org";

/// A PersistentVolume of the driver, a claim that is bound to it, and a pod that appends its name to a file in it.
fn objects(name: &str) -> String {
    let objects = [
        json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": format!("pv-{name}")},
            "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": "default", "name": name},
                "csi": {"driver": DRIVER, "volumeHandle": format!("handle-{name}")},
            },
        }),
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }),
    ];
    objects.iter().map(|object| format!("{object}\n---\n")).collect()
}

fn pod(name: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", format!("echo {name} >> /data/log; exec sleep 1000000")],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name}}],
        },
    })
    .to_string()
}

fn driver_spec(agent: &Agent, scratch: &Scratch) -> CsiDriverSpec {
    let folder = scratch.path().join("driver");
    fs::create_dir_all(&folder).unwrap();
    let registry = agent.spec().root_dir.join("plugins_registry");
    CsiDriverSpec::new(env!("CARGO_BIN_EXE_csi-test-driver"), DRIVER, &folder, &registry).with(&["--stage"])
}

/// The mounts of CSI volumes below the agent's root.
fn csi_mounts(agent: &Agent) -> Vec<PathBuf> {
    let below = &agent.spec().root_dir;
    let is_csi = |point: &PathBuf| {
        point.starts_with(below) && point.to_string_lossy().contains("kubernetes.io") && {
            let text = point.to_string_lossy();
            text.contains("/csi/") || text.contains("~csi/")
        }
    };
    mount_points().unwrap().into_iter().filter(is_csi).collect()
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

/// The device that pods share goes after the pod, so the end of the driver's call is waited for.
async fn until_unstaged(agent: &Agent, driver: &CsiDriver) {
    driver
        .until_call("NodeUnstageVolume", "OK")
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(csi_mounts(agent), Vec::<PathBuf>::new());
}

/// The methods of the volume calls that succeeded, in order.
fn volume_calls(driver: &CsiDriver) -> Vec<String> {
    let calls = driver.calls().unwrap();
    let is_volume = |call: &&Value| {
        call["result"] == "OK" && call["method"].as_str().is_some_and(|method| method.ends_with("Volume"))
    };
    calls.iter().filter(is_volume).map(|call| call["method"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_csi_volume_is_staged_published_and_released_and_survives_a_kill() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let driver = CsiDriver::start(driver_spec(&agent, &scratch)).await.unwrap();
    agent.write_manifest("storage.yaml", &objects("one")).unwrap();
    agent.write_manifest("one.yaml", &pod("one")).unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    let folder = pod_folder(&agent, "one").await;
    let volume = folder.join("volumes/kubernetes.io~csi/pv-one");
    assert_eq!(fs::read_to_string(volume.join("mount/log")).unwrap(), "one\n");
    let data: Value = serde_json::from_slice(&fs::read(volume.join("vol_data.json")).unwrap()).unwrap();
    assert_eq!((&data["driverName"], &data["volumeHandle"]), (&json!(DRIVER), &json!("handle-one")));
    assert_eq!(csi_mounts(&agent).len(), 2, "{:?}", csi_mounts(&agent));
    assert_eq!(volume_calls(&driver), ["NodeStageVolume", "NodePublishVolume"]);
    let measured = driver.until_call("NodeGetVolumeStats", "OK").await.unwrap();
    assert_eq!(measured["request"]["volume_path"], volume.join("mount").to_str().unwrap());

    let before = running(&agent).await.unwrap();
    let service = agent.service(ServiceName::VolumeManager).unwrap();
    service.signal(Signal::KILL);
    eventually(LIMIT, "volume-manager runs again", async || {
        agent.service(ServiceName::VolumeManager).is_some_and(|now| now != service)
    })
    .await
    .unwrap();
    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    assert_eq!(before.len(), 1);
    driver.until_call("NodeUnpublishVolume", "OK").await.unwrap();
    until_unstaged(&agent, &driver).await;

    agent.write_manifest("one.yaml", &pod("one")).unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    let folder = pod_folder(&agent, "one").await;
    let log = fs::read_to_string(folder.join("volumes/kubernetes.io~csi/pv-one/mount/log")).unwrap();
    assert_eq!(log, "one\none\n", "the data of the volume stay with the driver");
    // The service dies while the driver is to unstage the volume, when no pod has it any more.
    driver.set_faults(&json!({"NodeUnstageVolume": {"hang": true}})).unwrap();
    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    driver.until_call("NodeUnstageVolume", "hang").await.unwrap();
    agent.service(ServiceName::VolumeManager).unwrap().signal(Signal::KILL);
    driver.set_faults(&json!({})).unwrap();
    let unstaged = eventually(LIMIT, "the volume is unstaged again", async || {
        let calls = driver.calls().unwrap_or_default();
        calls.iter().filter(|call| call["method"] == "NodeUnstageVolume" && call["result"] == "OK").count()
            >= 2
            && csi_mounts(&agent).is_empty()
    });
    unstaged.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_csi_driver_that_is_missing_or_hangs_is_named_and_delays_no_other_pod() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("storage.yaml", &objects("one")).unwrap();
    agent.write_manifest("one.yaml", &pod("one")).unwrap();
    let text = format!("driver name {DRIVER} not found in the list of registered CSI drivers");
    until_event(&agent, "FailedMount", &text).await.unwrap();

    let spec = driver_spec(&agent, &scratch);
    fs::write(spec.folder.join("faults.json"), json!({"NodePublishVolume": {"hang": true}}).to_string())
        .unwrap();
    let driver = CsiDriver::start(spec).await.unwrap();
    driver.until_call("NodePublishVolume", "hang").await.unwrap();
    let waits = format!("the CSI driver {DRIVER}");
    until_cause(&agent, "one", "volumes", "volume-manager", &waits).await.unwrap();
    agent.write_manifest("other.yaml", &sleeper("other")).unwrap();
    until_one_ready(&agent, "other").await;

    driver.set_faults(&json!({})).unwrap();
    until_ready(&agent, &["one", "other"]).await.unwrap();
    let folder = pod_folder(&agent, "one").await;
    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    until_unstaged(&agent, &driver).await;
    agent.end().unwrap();
}

#[tokio::test]
async fn a_csi_driver_that_fails_lies_or_answers_garbage_costs_only_time() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let driver = CsiDriver::start(driver_spec(&agent, &scratch)).await.unwrap();
    driver
        .set_faults(&json!({
            "NodeStageVolume": {"fail": {"code": 13, "times": 1, "message": "the disk is on fire"}},
            "NodePublishVolume": {"garbage": "broken"},
        }))
        .unwrap();
    agent.write_manifest("storage.yaml", &objects("one")).unwrap();
    agent.write_manifest("one.yaml", &pod("one")).unwrap();
    until_event(&agent, "FailedMount", "the disk is on fire").await.unwrap();
    driver.until_call("NodePublishVolume", "garbage").await.unwrap();
    until_event(&agent, "FailedMount", "NodePublishVolume").await.unwrap();
    driver.set_faults(&json!({})).unwrap();
    until_ready(&agent, &["one"]).await.unwrap();
    let folder = pod_folder(&agent, "one").await;
    driver
        .set_faults(&json!({"NodeUnpublishVolume": {"fail": {"code": 14, "times": 2, "message": "busy"}}}))
        .unwrap();
    agent.remove_manifest("one.yaml").unwrap();
    until_gone(&agent, &folder).await;
    until_unstaged(&agent, &driver).await;
    agent.end().unwrap();
}
