//! Volumes on a file server that stops answering and comes back. The server is a FUSE server of the test, so what hangs is
//! seen there and not by the agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_testkit::{Agent, BUSYBOX_IMAGE, FuseServer, Scratch, eventually};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, pods, sleeper, text, until_cause, until_no_cause, until_ready};
use serde_json::{Value, json};

/// An agent, and a file server whose filesystem is the local volume `served`; the local volume `healthy` is a folder.
///
/// They end in this order: a folder on a server that hangs cannot be removed.
struct World {
    agent: Agent,
    server: FuseServer,
    scratch: Scratch,
}

impl World {
    async fn start() -> Self {
        let scratch = Scratch::new().unwrap();
        for name in ["served", "healthy"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
        }
        let server = FuseServer::over(&scratch.path().join("served")).unwrap();
        fs::create_dir(scratch.path().join("served/sub")).unwrap();
        let agent = Agent::builder(scratch.path()).start().await.unwrap();
        let world = Self { agent, server, scratch };
        for name in ["served", "healthy"] {
            let documents = format!("{}\n---\n{}\n", world.volume(name), claim(name));
            world.agent.write_manifest(&format!("storage-{name}.yaml"), &documents).unwrap();
        }
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn volume(&self, name: &str) -> Value {
        let spec = self.agent.spec();
        let node = json!([{"key": "kubernetes.io/hostname", "operator": "In", "values": [spec.node_name]}]);
        json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "disks",
                "local": {"path": self.path(name)}, "claimRef": {"namespace": "default", "name": name},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": node}]}},
            },
        })
    }

    fn add(&self, name: &str, volume: &Value) {
        self.agent.write_manifest(&format!("{name}.yaml"), &pod(name, volume).to_string()).unwrap();
    }

    fn remove(&self, name: &str) {
        self.agent.remove_manifest(&format!("{name}.yaml")).unwrap();
    }

    async fn until(&self, what: &str, is_so: impl AsyncFnMut() -> bool) {
        let waited = eventually(LIMIT, what.to_owned(), is_so).await;
        waited.unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()));
    }

    async fn until_something_hangs(&self) {
        self.until("a request hangs", async || !self.server.hanging().is_empty()).await;
    }

    /// Waits until the pod ends, or has ended.
    async fn until_ending(&self, name: &str) {
        let list = async || text(&self.agent.keelson(&["get", "pods"]).await.unwrap());
        let is_ending = |list: &str| {
            let mut lines = list.lines().filter(|line| line.contains(name));
            lines.all(|line| line.contains("Terminating"))
        };
        self.until("the pod ends", async || is_ending(&list().await)).await;
    }

    async fn folder(&self, name: &str) -> PathBuf {
        let spec = self.agent.spec();
        let pods = pods(&self.agent).await.unwrap();
        let uid = pods[&format!("{name}-{}", spec.node_name)]["metadata"]["uid"].clone();
        spec.root_dir.join("pods").join(uid.as_str().unwrap())
    }

    async fn until_gone(&self, folder: &Path) {
        self.until(&format!("{} is gone", folder.display()), async || !folder.exists()).await;
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(&*folder.to_string_lossy()), "{table}");
    }

    /// A pod without volumes and one with another volume start meanwhile.
    async fn assert_others_start(&self) {
        self.agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
        self.add("other", &json!({"persistentVolumeClaim": {"claimName": "healthy"}}));
        until_one_ready(&self.agent, "web").await;
        until_one_ready(&self.agent, "other").await;
    }
}

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "disks", "volumeName": name,
            "resources": {"requests": {"storage": "100Mi"}},
        },
    })
}

/// A pod with the volume `data`, and with the folder `sub` of it.
fn pod(name: &str, volume: &Value) -> Value {
    let mut volume = volume.clone();
    volume["name"] = "data".into();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", "exec sleep 1000000"],
                "volumeMounts": [
                    {"name": "data", "mountPath": "/data"}, {"name": "data", "mountPath": "/sub", "subPath": "sub"},
                ],
            }],
            "volumes": [volume],
        },
    })
}

fn served() -> Value {
    json!({"persistentVolumeClaim": {"claimName": "served"}})
}

#[tokio::test]
async fn a_local_volume_whose_server_hangs_is_named_and_starts_when_it_answers() {
    let world = World::start().await;
    let agent = &world.agent;
    world.server.hang();
    world.add("stuck", &served());
    world.until_something_hangs().await;
    let wanted = format!("it waits for the file system at {}", world.path("served").display());
    let step = until_cause(agent, "stuck", "volumes", "volume-manager", &wanted).await.unwrap();
    assert!(step["message"].as_str().unwrap().contains("\"data\""), "{step}");
    world.assert_others_start().await;
    assert!(!world.server.hanging().is_empty());
    let still = until_cause(agent, "stuck", "volumes", "volume-manager", &wanted).await.unwrap();
    assert_eq!(still["since"], step["since"]);
    world.server.answer();
    until_ready(agent, &["stuck", "web", "other"]).await.unwrap();
    until_no_cause(agent, "stuck").await.unwrap();
    world.agent.end().unwrap();
}

#[tokio::test]
async fn pods_deleted_while_their_server_hangs_are_gone_when_it_answers() {
    let world = World::start().await;
    let path = world.path("served");
    let volumes =
        [("claimed", served()), ("direct", json!({"hostPath": {"path": path, "type": "Directory"}}))];
    world.server.hang();
    let mut folders = Vec::new();
    for (name, volume) in &volumes {
        world.add(name, volume);
        let wanted = path.display().to_string();
        until_cause(&world.agent, name, "volumes", "volume-manager", &wanted).await.unwrap();
        folders.push(world.folder(name).await);
        world.remove(name);
        world.until_ending(name).await;
    }
    world.assert_others_start().await;
    world.server.answer();
    for folder in &folders {
        world.until_gone(folder).await;
    }
    until_ready(&world.agent, &["web", "other"]).await.unwrap();
    world.agent.end().unwrap();
}

#[tokio::test]
async fn a_running_pod_is_deleted_although_its_server_hangs() {
    let world = World::start().await;
    world.add("stuck", &served());
    until_one_ready(&world.agent, "stuck").await;
    let folder = world.folder("stuck").await;
    world.server.hang();
    world.remove("stuck");
    world.until_gone(&folder).await;
    world.assert_others_start().await;
    world.agent.end().unwrap();
}
