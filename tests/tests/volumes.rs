//! Sub paths of volumes and variables from files in running containers, on a real containerd. The container's view is
//! read through /proc, mounts from mountinfo, and neither from the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::waits::{until_one_ready, waiting_reason};
use keelson_tests::{LIMIT, Process, pods, running, until_cause, until_event, until_ready};
use serde_json::{Value, json};

/// A busybox container that runs this command and then sleeps.
fn container(name: &str, script: &str, more: Value) -> Value {
    let mut container = json!({
        "name": name, "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", format!("{script}; exec sleep 1000000")],
    });
    container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    container
}

fn setup(script: &str) -> Value {
    json!({
        "name": "setup", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    })
}

fn pod(setup: Value, containers: Vec<Value>) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "initContainers": [setup],
            "containers": containers,
            "volumes": [
                {"name": "conf", "configMap": {"name": "conf"}},
                {"name": "data", "emptyDir": {}},
                {"name": "unused", "nfs": {"server": "none.invalid", "path": "/"}},
            ],
        },
    })
    .to_string()
}

/// A file of a ConfigMap, a folder that two containers share, a folder named after the pod, a variable from a file.
fn sub_path_containers() -> String {
    let shared = json!({"name": "data", "mountPath": "/shared", "subPath": "deep/shared"});
    let main = container(
        "main",
        "echo $FILE > /own/variable",
        json!({
            "env": [
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "FILE", "valueFrom": {
                    "fileKeyRef": {"volumeName": "data", "path": "app.env", "key": "NAME"}}},
            ],
            "volumeMounts": [
                {"name": "conf", "mountPath": "/etc/app.conf", "subPath": "app.conf"},
                &shared,
                {"name": "data", "mountPath": "/own", "subPathExpr": "of-$(POD_NAME)"},
                {"name": "data", "mountPath": "/fixed", "subPath": "fixed", "readOnly": true},
            ],
        }),
    );
    let side = container("side", "true", json!({"volumeMounts": [&shared]}));
    pod(setup("echo \"NAME='keel son'\" > /data/app.env"), vec![main, side])
}

async fn process(agent: &Agent, container: &str) -> Process {
    let full = format!("web-{}/{container}", agent.spec().node_name);
    running(agent).await.unwrap().remove(&full).expect("the container runs")
}

fn root(process: &Process) -> PathBuf {
    Path::new("/proc").join(process.pid.to_string()).join("root")
}

/// The mount points of sub paths below the agent's root.
fn part_mounts(agent: &Agent) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let below = agent.spec().root_dir.to_string_lossy().into_owned();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
    points.filter(|point| point.starts_with(&below) && point.contains("/volume-subpaths/")).collect()
}

async fn until_text(path: &Path, text: &str) {
    eventually(LIMIT, format!("{text:?} in {}", path.display()), async || {
        std::fs::read_to_string(path).is_ok_and(|found| found == text)
    })
    .await
    .unwrap();
}

fn check_volumes(main: &Path, side: &Path, round: &str) {
    assert_eq!(std::fs::read_to_string(main.join("etc/app.conf")).unwrap(), "colour=red");
    std::fs::write(main.join("shared/word"), round).unwrap();
    assert_eq!(std::fs::read_to_string(side.join("shared/word")).unwrap(), round);
    assert!(!main.join("shared/app.env").exists(), "it is a part and not the whole");
    assert!(std::fs::write(main.join("fixed/word"), round).is_err());
    // As world-writable as its volume.
    assert_eq!(std::fs::metadata(main.join("shared")).unwrap().mode() & 0o7777, 0o777);
}

#[tokio::test]
async fn sub_paths_survive_restarts_and_volume_manager_kills_and_leave_no_mount() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let conf = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: conf\ndata:\n  app.conf: colour=red\n";
    agent.write_manifest("conf.yaml", conf).unwrap();
    agent.write_manifest("web.yaml", &sub_path_containers()).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let (main, side) = (process(&agent, "main").await, process(&agent, "side").await);
    check_volumes(&root(&main), &root(&side), "one");
    until_text(&root(&main).join("own/variable"), "keel son\n").await;
    let mounted = part_mounts(&agent);
    assert_eq!(mounted.len(), 5, "{mounted:?}");

    // The container ends while volume-manager cannot prepare the next one.
    let before = agent.service(ServiceName::VolumeManager).unwrap();
    before.signal(Signal::KILL);
    let pid = rustix::process::Pid::from_raw(i32::try_from(main.pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let full = format!("web-{}/main", agent.spec().node_name);
    let restarted = eventually(LIMIT, "main runs again", async || {
        running(&agent).await.is_ok_and(|now| now.get(&full).is_some_and(|now| now.id != main.id))
    });
    restarted.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_ready(&agent, &["web"]).await.unwrap();
    assert!(agent.service(ServiceName::VolumeManager).is_some_and(|now| now != before));
    let again = process(&agent, "main").await;
    assert_eq!(process(&agent, "side").await, side, "the other container has noticed nothing");
    check_volumes(&root(&again), &root(&side), "two");
    let mut now = part_mounts(&agent);
    let mut then = mounted;
    now.sort();
    then.sort();
    assert_eq!(now, then, "the same parts, each once");

    let uid =
        pods(&agent).await.unwrap()[&format!("web-{}", agent.spec().node_name)]["metadata"]["uid"].clone();
    let folder = agent.spec().root_dir.join("pods").join(uid.as_str().unwrap());
    assert!(folder.join("volume-subpaths").exists());
    agent.remove_manifest("web.yaml").unwrap();
    eventually(LIMIT, "the pod's folder is gone", async || !folder.exists())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(part_mounts(&agent), Vec::<String>::new());
    agent.end().unwrap();
}

#[tokio::test]
async fn a_sub_path_symlink_out_of_the_volume_is_refused_until_the_pod_is_fixed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let conf = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: conf\ndata: {}\n";
    agent.write_manifest("conf.yaml", conf).unwrap();
    let main = |path: &str| {
        container(
            "main",
            "true",
            json!({"volumeMounts": [{"name": "data", "mountPath": "/v", "subPath": path}]}),
        )
    };
    let setup = || setup("ln -s /etc /data/out; ln -s in /data/link; mkdir /data/in; touch /data/in/it");
    agent.write_manifest("web.yaml", &pod(setup(), vec![main("out")])).unwrap();
    let text = "failed to prepare subPath for volumeMount \"data\" of container \"main\": the path leads out of the volume";
    until_cause(&agent, "web", "container", "you", text).await.unwrap();
    until_event(&agent, "Failed", text).await.unwrap();
    assert_eq!(waiting_reason(&agent, "web").await, "CreateContainerConfigError");
    assert_eq!(part_mounts(&agent), Vec::<String>::new());

    // A symlink that stays inside the volume is followed.
    agent.write_manifest("web.yaml", &pod(setup(), vec![main("link")])).unwrap();
    until_one_ready(&agent, "web").await;
    assert!(root(&process(&agent, "main").await).join("v/it").exists());
    agent.end().unwrap();
}
