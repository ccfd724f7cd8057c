//! Nodes whose control plane is etcd alone: real members, real containerds, and `keelson --etcd`.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::path::Path;

use etcd_client::Client;
use keelson_config::ServiceName;
use keelson_testkit::process::{ProcessId, Signal};
use keelson_testkit::{Agent, AgentSpec, EtcdCluster, Relay, Scratch, eventually};
use keelson_tests::{LIMIT, is_ready, running, sleeper};
use rustix::mount::{MountFlags, mount};
use serde_json::{Value, json};

struct Fleet {
    cluster: EtcdCluster,
    /// The relays between the nodes and the members.
    relays: Vec<Relay>,
    nodes: Vec<Agent>,
    scratch: Scratch,
}

impl Fleet {
    /// Starts this many members and nodes, with unique node names, so that their cgroups are unique, too.
    async fn new(members: usize, nodes: usize) -> Self {
        Self::with(members, nodes, |_| {}).await
    }

    /// As [`Fleet::new`], with a customized configuration of the nodes.
    async fn with(members: usize, nodes: usize, configure: fn(&mut AgentSpec)) -> Self {
        let scratch = Scratch::new().unwrap();
        let own = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), members).unwrap();
        let relays = cluster.relays().unwrap();
        let endpoints: Vec<String> = relays.iter().map(|r| format!("http://{}", r.address())).collect();
        let mut agents = Vec::new();
        for n in 0..nodes {
            let node = format!("{own}-{n}");
            let builder = Agent::builder(&scratch.path().join(format!("n{n}")))
                .node_name(&node)
                .etcd(json!({"endpoints": endpoints}))
                .configure(configure);
            agents.push(builder.start().await.unwrap());
        }
        let fleet = Self { cluster, relays, nodes: agents, scratch };
        fleet
            .until("every node has its lease", &["get", "node"], |list| {
                let ready = |node: &Value| is_ready(node);
                list["items"].as_array().is_some_and(|all| all.len() == nodes && all.iter().all(ready))
            })
            .await;
        fleet
    }

    /// Runs `keelson … --etcd …`; whether it succeeded, and both outputs.
    async fn keelson(&self, args: &[&str]) -> (bool, String) {
        let endpoints = self.cluster.endpoints().join(",");
        let all: Vec<&str> = args.iter().copied().chain(["--etcd", &endpoints]).collect();
        let output = self.nodes[0].keelson(&all).await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }

    async fn keelson_ok(&self, args: &[&str]) -> String {
        let (succeeded, output) = self.keelson(args).await;
        assert!(succeeded, "keelson {}: {output}", args.join(" "));
        output
    }

    async fn json(&self, args: &[&str]) -> Value {
        let output = self.keelson_ok(&[args, &["-o", "json"]].concat()).await;
        serde_json::from_str(&output).unwrap_or_else(|e| panic!("{e}: {output}"))
    }

    async fn until(&self, what: &str, args: &[&str], holds: impl Fn(&Value) -> bool) {
        let mut last = Value::Null;
        let result = eventually(LIMIT, what, async || {
            last = self.json(args).await;
            holds(&last)
        });
        let result = result.await;
        let logs: String = self.nodes.iter().map(Agent::log_tail).collect();
        result.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{logs}"));
    }

    /// Waits until the node reports the new label of the pod `web`; the command shows the desired label at once.
    async fn until_label_is_reported(&self, node: &str) {
        let key = format!("/keelson/v1/nodes/{node}/status/pods/default/web");
        let mut client = Client::connect(self.cluster.endpoints(), None).await.unwrap();
        let reported = eventually(LIMIT, "the node reports the label", async || {
            let answer = client.get(key.as_str(), None).await.unwrap();
            let pod: Option<Value> =
                answer.kvs().first().map(|kv| serde_json::from_slice(kv.value()).unwrap());
            pod.is_some_and(|pod| pod["metadata"]["labels"]["tier"] == "front")
        });
        reported.await.unwrap();
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// The names of the nodes.
    fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|agent| agent.spec().node_name.clone()).collect()
    }

    /// Waits until exactly these pods exist and are Ready.
    async fn until_ready(&self, names: &[&str]) {
        let wanted = |list: &Value| {
            let all = list["items"].as_array().unwrap();
            let mut found: Vec<&str> =
                all.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
            found.sort_unstable();
            found == names && all.iter().all(is_ready)
        };
        self.until(&format!("{names:?} are Ready"), &["get", "pods", "-A"], wanted).await;
    }
}

/// The root of the pod's filesystem, as its process sees it.
async fn pod_root(agent: &Agent, pod: &str) -> std::path::PathBuf {
    let process = running(agent).await.unwrap().remove(&format!("{pod}/main")).expect("the container runs");
    Path::new("/proc").join(process.pid.to_string()).join("root")
}

fn with_secret() -> String {
    let pod = sleeper("web")
        .replace("    emptyDir: {}\n", "    emptyDir: {}\n  - name: key\n    secret: {secretName: key}\n");
    let pod =
        pod.replace("mountPath: /scratch\n", "mountPath: /scratch\n    - {name: key, mountPath: /key}\n");
    format!("{pod}---\n{}", secret("one"))
}

fn secret(value: &str) -> String {
    format!("apiVersion: v1\nkind: Secret\nmetadata:\n  name: key\nstringData:\n  token: {value}\n")
}

#[tokio::test]
async fn an_etcd_pod_runs_is_reported_follows_its_key_and_is_deleted() {
    let mut fleet = Fleet::new(1, 1).await;
    let node = fleet.names().remove(0);
    let output = fleet.keelson_ok(&["apply", "-f", &fleet.file("web.yaml", &with_secret())]).await;
    assert_eq!(output, format!("secret/key created on {node}\npod/web created on {node}\n"));
    fleet.until_ready(&["web"]).await;
    let before = running(&fleet.nodes[0]).await.unwrap();
    assert_eq!(before.keys().collect::<Vec<_>>(), ["web/main"]);
    let root = pod_root(&fleet.nodes[0], "web").await;
    assert_eq!(std::fs::read_to_string(root.join("key/token")).unwrap(), "one");
    let table = fleet.keelson_ok(&["get", "pods"]).await;
    let row = table.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!((row[0], row[1], row[2], row[5]), ("web", "1/1", "Running", node.as_str()), "{table}");
    fleet
        .until("there is an event of its start", &["get", "events", "--for", "pod/web"], |list| {
            list["items"].as_array().unwrap().iter().any(|event| event["reason"] == "Started")
        })
        .await;

    // A changed Secret reaches the file.
    fleet.keelson_ok(&["apply", "-f", &fleet.file("key.yaml", &secret("two"))]).await;
    eventually(LIMIT, "the change is in the container", async || {
        std::fs::read_to_string(root.join("key/token")).is_ok_and(|text| text == "two")
    })
    .await
    .unwrap();

    assert_only_the_newest_edit_is_accepted(&fleet, &node).await;

    // No kill affects the container, not even of all services together with etcd.
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        fleet.nodes[0].service(service).unwrap().signal(Signal::KILL);
    }
    fleet.cluster.kill(0);
    for service in [ServiceName::PodConfig, ServiceName::NodeStatus] {
        eventually(LIMIT, format!("{service} is back"), async || fleet.nodes[0].service(service).is_some())
            .await
            .unwrap();
    }
    fleet.cluster.restart(0).unwrap();
    let late = fleet.file("late.yaml", &sleeper("late"));
    eventually(LIMIT, "etcd accepts a pod again", async || fleet.keelson(&["apply", "-f", &late]).await.0)
        .await
        .unwrap();
    fleet.until_ready(&["late", "web"]).await;
    let after = running(&fleet.nodes[0]).await.unwrap();
    assert_eq!(after["web/main"], before["web/main"], "the container kept running");

    let output = fleet.keelson_ok(&["delete", "pod", "web", "late"]).await;
    assert_eq!(output, format!("pod/web deleted on {node}\npod/late deleted on {node}\n"));
    assert!(running(&fleet.nodes[0]).await.unwrap().is_empty());
    let (succeeded, output) = fleet.keelson(&["delete", "pod", "web"]).await;
    assert!(
        !succeeded && output.contains("there is no pod/web in namespace default on any node"),
        "{output}"
    );
    for agent in fleet.nodes {
        agent.end().unwrap();
    }
}

/// The shown manifest may be edited and applied; an edit of an older version is refused.
async fn assert_only_the_newest_edit_is_accepted(fleet: &Fleet, node: &str) {
    let mut shown = fleet.json(&["get", "pod", "web"]).await;
    let older = fleet.file("older.json", &shown.to_string());
    shown["metadata"]["labels"] = json!({"tier": "front"});
    let newer = fleet.file("newer.json", &shown.to_string());
    assert_eq!(fleet.keelson_ok(&["apply", "-f", &newer]).await, format!("pod/web changed on {node}\n"));
    let (succeeded, output) = fleet.keelson(&["apply", "-f", &older]).await;
    assert!(
        !succeeded && output.contains(&format!("pod/web on {node} has changed since it was read")),
        "{output}"
    );
    fleet.until_label_is_reported(node).await;
}

/// A PersistentVolume, the claim that gets it, and a pod that writes into it.
fn database(disk: &Path) -> String {
    let pod = sleeper("db").replace("emptyDir: {}", "persistentVolumeClaim: {claimName: data}");
    let disk = disk.display();
    format!(
        "{pod}---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: data}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         volumeName: data\n  resources: {{requests: {{storage: 1Gi}}}}\n\
         ---\napiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: data}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
         capacity: {{storage: 2Gi}}\n  hostPath: {{path: {disk}, type: Directory}}\n"
    )
}

#[tokio::test]
async fn a_pod_with_a_claim_is_applied_and_deleted_with_its_volume() {
    let fleet = Fleet::new(1, 1).await;
    let node = fleet.names().remove(0);
    let disk = fleet.scratch.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    std::fs::write(disk.join("marker"), "x").unwrap();
    let all = fleet.file("all.yaml", &database(&disk));
    let output = fleet.keelson_ok(&["apply", "-f", &all]).await;
    assert_eq!(
        output,
        format!(
            "persistentvolumeclaim/data created on {node}\npersistentvolume/data created on {node}\npod/db created on {node}\n"
        )
    );
    fleet.until_ready(&["db"]).await;
    let root = pod_root(&fleet.nodes[0], "db").await;
    assert!(root.join("scratch/marker").exists(), "the pod has the volume");
    let claims = fleet.keelson_ok(&["get", "pvc"]).await;
    assert!(
        claims.lines().nth(1).is_some_and(|row| row.starts_with("data ") && row.contains("1Gi")),
        "{claims}"
    );
    let volume = fleet.json(&["get", "pv", "data"]).await;
    assert_eq!(volume["spec"]["capacity"]["storage"], "2Gi");
    // The node itself shows what is bound.
    let bound = fleet.nodes[0].keelson_json(&["get", "pvc", "data", "-o", "json"]).await.unwrap();
    assert_eq!(bound["status"]["phase"], "Bound", "{bound:#}");

    for (args, text) in [
        (["delete", "pvc", "data"], "is used by the pod db"),
        (["delete", "pv", "data"], "is bound to the claim default/data"),
    ] {
        let (succeeded, output) = fleet.keelson(&args).await;
        assert!(!succeeded && output.contains(text), "{output}");
        let output = fleet.nodes[0].keelson(&args).await.unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
    fleet.keelson_ok(&["delete", "pod", "db"]).await;
    // The agent of the node refuses what etcd defines.
    let output = fleet.nodes[0].keelson(&["delete", "pvc", "data"]).await.unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("the PersistentVolumeClaim default/data is defined in /keelson/v1/nodes/"),
        "{error}"
    );
    assert_eq!(
        fleet.keelson_ok(&["delete", "pvc", "data"]).await,
        format!("persistentvolumeclaim/data deleted on {node}\n")
    );
    let (succeeded, output) = fleet.keelson(&["delete", "pvc", "data"]).await;
    assert!(!succeeded && output.contains("there is no persistentvolumeclaim/data"), "{output}");
    fleet.keelson_ok(&["get", "pv", "data"]).await;
    assert_eq!(
        fleet.keelson_ok(&["delete", "pv", "data"]).await,
        format!("persistentvolume/data deleted on {node}\n")
    );
    assert!(disk.join("marker").exists(), "the data stay");
    for agent in fleet.nodes {
        agent.end().unwrap();
    }
}

#[tokio::test]
async fn changes_on_two_nodes_survive_the_kill_of_an_etcd_member() {
    const PODS: usize = 25;
    let mut fleet = Fleet::new(3, 2).await;
    let nodes = fleet.names();
    let name = |n: usize| format!("p{n:02}");
    let all = |n: std::ops::Range<usize>| -> String {
        n.map(|n| sleeper(&name(n))).collect::<Vec<_>>().join("---\n")
    };
    let (first, second) =
        (fleet.file("first.yaml", &all(0..PODS)), fleet.file("second.yaml", &all(PODS..PODS + 5)));
    let gone = fleet.file("gone.yaml", &all(0..5));
    for node in &nodes {
        fleet.keelson_ok(&["apply", "-f", &first, "--node", node]).await;
    }
    // A member is killed in the middle, and the changes continue without it.
    fleet.cluster.kill(0);
    for node in &nodes {
        fleet.keelson_ok(&["apply", "-f", &second, "--node", node]).await;
        fleet.keelson_ok(&["delete", "--wait=false", "-f", &gone, "--node", node]).await;
    }
    let wanted: Vec<String> = (5..PODS + 5).map(name).collect();
    for (agent, node) in fleet.nodes.iter().zip(&nodes) {
        let names = |list: &Value| -> BTreeMap<String, bool> {
            let all = list["items"].as_array().unwrap().iter();
            all.map(|pod| (pod["metadata"]["name"].as_str().unwrap().to_owned(), is_ready(pod))).collect()
        };
        fleet
            .until(&format!("{node} has its pods"), &["get", "pods", "--node", node], |list| {
                let found = names(list);
                found.keys().eq(wanted.iter()) && found.values().all(|ready| *ready)
            })
            .await;
        let containers: Vec<String> = running(agent).await.unwrap().into_keys().collect();
        assert_eq!(containers, wanted.iter().map(|name| format!("{name}/main")).collect::<Vec<_>>());
        let restarts = fleet.json(&["get", "pods", "--node", node]).await;
        for pod in restarts["items"].as_array().unwrap() {
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod}");
        }
    }
    fleet.cluster.restart(0).unwrap();
    for agent in fleet.nodes {
        agent.end().unwrap();
    }
}

/// A run dir in memory, as `/run` is.
fn run_in_memory(spec: &mut AgentSpec) {
    std::fs::create_dir_all(&spec.run_dir).unwrap();
    mount("tmpfs", &spec.run_dir, "tmpfs", MountFlags::empty(), None).unwrap();
}

/// Whether any file below the folder contains the text.
fn holds(folder: &Path, text: &str) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        let has = |bytes: Vec<u8>| bytes.windows(text.len()).any(|part| part == text.as_bytes());
        if path.is_dir() { holds(&path, text) } else { std::fs::read(&path).is_ok_and(has) }
    })
}

#[tokio::test]
async fn a_container_with_a_secret_restarts_without_etcd_after_services_were_killed() {
    let mut fleet = Fleet::with(1, 1, run_in_memory).await;
    let env =
        "    env: [{name: TOKEN, valueFrom: {secretKeyRef: {name: key, key: token}}}]\n    volumeMounts:\n";
    let manifest =
        with_secret().replacen("    volumeMounts:\n", env, 1).replace("token: one", "token: xyzzy");
    fleet.keelson_ok(&["apply", "-f", &fleet.file("web.yaml", &manifest)]).await;
    fleet.until_ready(&["web"]).await;
    let agent = &fleet.nodes[0];
    let before = running(agent).await.unwrap()["web/main"].clone();

    fleet.cluster.kill(0);
    // All processes that could have the Secret in memory.
    let services = [ServiceName::PodConfig, ServiceName::PodSync, ServiceName::VolumeManager];
    let killed: Vec<_> =
        services.iter().map(|service| (*service, agent.service(*service).unwrap())).collect();
    for (_, process) in &killed {
        assert!(process.signal(Signal::KILL));
    }
    for (service, process) in killed {
        let back = async || agent.service(service).is_some_and(|now| now != process);
        eventually(LIMIT, format!("{service} is back"), back).await.unwrap();
    }
    assert!(ProcessId::of(before.pid).unwrap().signal(Signal::KILL));
    let mut after = None;
    let started = eventually(LIMIT, "the container runs again", async || {
        // A process that ends during the read does not count.
        let now = running(agent).await.ok().and_then(|mut all| all.remove("web/main"));
        after = now.filter(|now| now.id != before.id);
        after.is_some()
    });
    started.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let process = Path::new("/proc").join(after.unwrap().pid.to_string());
    assert!(std::fs::read_to_string(process.join("environ")).unwrap().contains("TOKEN=xyzzy"));
    assert_eq!(std::fs::read_to_string(process.join("root/key/token")).unwrap(), "xyzzy");
    for text in ["xyzzy", "eHl6enk="] {
        assert!(!holds(&agent.spec().state_dir, text), "the Secret is on the disk");
    }
    for agent in fleet.nodes {
        agent.end().unwrap();
    }
}

#[tokio::test]
async fn a_partition_longer_than_the_lease_affects_no_pod_and_loses_no_change() {
    let fleet = Fleet::with(3, 1, |spec| {
        spec.kubelet.insert("nodeLeaseDurationSeconds".to_owned(), json!(10));
    })
    .await;
    let node = fleet.names().remove(0);
    let manifest = fleet.file("all.yaml", &[sleeper("web"), sleeper("gone")].join("---\n"));
    fleet.keelson_ok(&["apply", "-f", &manifest]).await;
    fleet.until_ready(&["gone", "web"]).await;
    let agent = &fleet.nodes[0];
    let before = running(agent).await.unwrap();
    let mut direct = Client::connect(fleet.cluster.endpoints(), None).await.unwrap();
    let lease = format!("/keelson/v1/nodes/{node}/status/lease");
    let mut lives = async || !direct.get(lease.as_str(), None).await.unwrap().kvs().is_empty();
    assert!(lives().await);

    fleet.relays.iter().for_each(Relay::cut);
    let cut = std::time::Instant::now();
    eventually(LIMIT, "the lease has ended", async || !lives().await).await.unwrap();
    assert!(cut.elapsed() < std::time::Duration::from_secs(30), "it is one of ten seconds");
    let table = fleet.keelson_ok(&["get", "node"]).await;
    assert!(table.lines().nth(1).unwrap().contains("NotReady"), "{table}");
    let mut labelled = fleet.json(&["get", "pod", "web"]).await;
    labelled["metadata"]["labels"] = json!({"tier": "front"});
    fleet.keelson_ok(&["apply", "-f", &fleet.file("labelled.json", &labelled.to_string())]).await;
    fleet.keelson_ok(&["apply", "-f", &fleet.file("late.yaml", &sleeper("late"))]).await;
    fleet.keelson_ok(&["delete", "pod", "gone", "--wait=false"]).await;
    // Both services that use etcd have reported the outage, and have not restarted.
    for (service, says) in
        [("pod-config", "does not answer"), ("node-status", "the node's lease will be written again")]
    {
        eventually(LIMIT, format!("{service} reports that etcd is unavailable"), async || {
            let text = agent.keelson(&["get", "services"]).await.unwrap().stdout;
            let text = String::from_utf8(text).unwrap();
            text.lines().any(|line| line.starts_with(service) && line.contains(says))
        })
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    assert_eq!(running(agent).await.unwrap(), before, "the same containers and processes");

    fleet.relays.iter().for_each(Relay::heal);
    eventually(LIMIT, "the lease is back", async || lives().await).await.unwrap();
    fleet.until_ready(&["late", "web"]).await;
    fleet.until_label_is_reported(&node).await;
    let after = running(agent).await.unwrap();
    assert_eq!(after.keys().collect::<Vec<_>>(), ["late/main", "web/main"]);
    assert_eq!(after["web/main"], before["web/main"], "the container kept running");
    for agent in fleet.nodes {
        agent.end().unwrap();
    }
}
