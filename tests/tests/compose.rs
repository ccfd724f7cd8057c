//! compose.yaml as it is: two nodes and etcd in containers, checked from outside, killed one by one, and taken down.

#![allow(clippy::unwrap_used)] // A panic fails the test.

mod compose_declared;

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::{self, ProcessId, Signal};
use keelson_testkit::{
    BUSYBOX_IMAGE, Component, PrivateDocker, Scratch, Snapshot, built_binaries, cgroup_hierarchies,
    mounts_below,
};
use keelson_tests::{is_ready, text};
use serde_json::Value;

use compose_declared::{check_process, check_settings, main_pid};

/// Time limit of every wait: Docker waits between restarts, a lease lasts 40 s.
const LIMIT: Duration = Duration::from_secs(150);
/// The cgroups of the nodes; there is one stack per machine.
const CGROUPS: [&str; 2] = ["keelson-node-1", "keelson-node-2"];
const NODES: [&str; 2] = ["node-1", "node-2"];
/// Containers that end by themselves.
const ONCE: [&str; 3] = ["prepare", "config", "images"];

/// The stack, taken down if the test fails earlier.
struct Stack {
    home: PathBuf,
    project: String,
    port: u16,
    docker_host: String,
    is_up: bool,
    // Last, so that its processes are gone when it is dropped.
    docker: Option<PrivateDocker>,
    _scratch: Scratch,
}

impl Stack {
    fn up() -> Self {
        for component in
            [Component::Docker, Component::DockerCompose, Component::EtcdServer, Component::Containerd]
        {
            component.find().unwrap();
        }
        for cgroup in CGROUPS {
            let taken = cgroup_hierarchies().iter().any(|hierarchy| hierarchy.join(cgroup).exists());
            assert!(!taken, "the cgroup /{cgroup} is there: `cargo xtask compose down` ends what is up");
        }
        let scratch = Scratch::new().unwrap();
        let name = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
        let docker =
            PrivateDocker::start(&scratch.path().join("d"), &format!("/keelson-docker-{name}")).unwrap();
        let stack = Self {
            home: scratch.path().join("n"),
            project: name,
            port: TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port(),
            docker_host: docker.host(),
            is_up: true,
            docker: Some(docker),
            _scratch: scratch,
        };
        let output = stack.xtask("up");
        assert!(output.contains("Both nodes are up"), "{output}");
        stack
    }

    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("DOCKER_HOST", &self.docker_host);
        command
    }

    fn xtask(&self, task: &str) -> String {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let output = self
            .command(Path::new(&cargo))
            .current_dir(workspace)
            .args(["xtask", "compose", task])
            .env("KEELSON_DIR", &self.home)
            .env("KEELSON_ETCD_PORT", self.port.to_string())
            .env("KEELSON_BIN_DIR", built_binaries().unwrap())
            .env("COMPOSE_PROJECT_NAME", &self.project)
            .output()
            .unwrap();
        assert!(output.status.success(), "cargo xtask compose {task}: {}", text(&output));
        text(&output)
    }

    fn docker(&self, args: &[&str]) -> String {
        let output = self.command("docker").args(args).output().unwrap();
        assert!(output.status.success(), "docker {args:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The containers as Docker describes them, by their names in compose.yaml.
    fn containers(&self) -> BTreeMap<String, Value> {
        let project = format!("label=com.docker.compose.project={}", self.project);
        let ids = self.docker(&["ps", "--all", "--quiet", "--filter", &project]);
        let ids: Vec<&str> = ids.lines().collect();
        if ids.is_empty() {
            return BTreeMap::new();
        }
        let all: Vec<Value> =
            serde_json::from_str(&self.docker(&[&["inspect"], ids.as_slice()].concat())).unwrap();
        let named = |container: Value| {
            let name = container["Config"]["Labels"]["com.docker.compose.service"].as_str().unwrap();
            (name.to_owned(), container)
        };
        all.into_iter().map(named).collect()
    }

    /// The containers that keep running.
    fn lasting_containers(&self) -> BTreeMap<String, Value> {
        let mut all = self.containers();
        all.retain(|name, _| !ONCE.iter().any(|once| name.starts_with(once)));
        all
    }

    fn run_dir(&self, node: &str) -> PathBuf {
        self.home.join(node).join("run")
    }

    fn keelson(&self, args: &[&str]) -> Output {
        let program = built_binaries().unwrap().join("keelson");
        self.docker.as_ref().unwrap().command_in_network(&program).unwrap().args(args).output().unwrap()
    }

    fn keelson_ok(&self, args: &[&str]) -> String {
        let output = self.keelson(args);
        assert!(output.status.success(), "keelson {args:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// `keelson … --etcd …`.
    fn fleet(&self, args: &[&str]) -> Output {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        self.keelson(&[args, &["--etcd", &endpoint]].concat())
    }

    fn fleet_json(&self, args: &[&str]) -> Value {
        let output = self.fleet(&[args, &["-o", "json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// Waits until etcd has this pod of each of these nodes as Ready and never restarted, and these nodes themselves.
    fn until_ready(&self, pod: &str, nodes: &[&str]) {
        self.until(&format!("{pod} is Ready on {nodes:?}"), || {
            let here = |object: &Value, node: &str| {
                object["spec"]["nodeName"] == node && object["metadata"]["name"] == pod
            };
            let list = self.fleet_json(&["get", "pods", "-A"]);
            let pods = list["items"].as_array().cloned().unwrap_or_default();
            let well = |node: &&str| {
                pods.iter().any(|object| {
                    here(object, node)
                        && is_ready(object)
                        && object["status"]["containerStatuses"][0]["restartCount"] == 0
                })
            };
            let node_list = self.fleet_json(&["get", "node"]);
            let ready = |node: &&str| {
                let all = node_list["items"].as_array();
                all.into_iter()
                    .flatten()
                    .any(|object| object["metadata"]["name"] == *node && is_ready(object))
            };
            nodes.iter().all(|node| well(node) && ready(node))
        });
    }

    /// The states of a node's services, by name.
    fn states(&self, node: &str) -> BTreeMap<String, String> {
        let run_dir = self.run_dir(node);
        let output = self.keelson(&["get", "services", "-o", "json", "--run-dir", run_dir.to_str().unwrap()]);
        let list: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let rows = list["items"].as_array().into_iter().flatten();
        rows.map(|row| (text(&row["name"]), text(&row["state"]))).collect()
    }

    fn until_all_serve(&self, node: &str) {
        self.until(&format!("all services of {node} serve"), || {
            let states = self.states(node);
            ServiceName::supervised().all(|s| states.get(s.as_str()).is_some_and(|state| state == "running"))
        });
    }

    #[track_caller]
    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !holds() {
            if Instant::now() >= deadline {
                let running = self.docker(&["ps", "--all", "--format", "{{.Names}} {{.Status}}"]);
                let states: Vec<_> = NODES.iter().map(|node| self.states(node)).collect();
                let pods = text(&self.fleet(&["get", "pods", "-A"]));
                let logs: String = self.lasting_containers().keys().map(|name| self.log(name)).collect();
                panic!("not in {LIMIT:?}: {what}\n{running}\n{states:?}\n{pods}\n{logs}");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The end of a container's log.
    fn log(&self, name: &str) -> String {
        let all = self.containers();
        let Some(id) = all.get(name).and_then(|container| container["Id"].as_str()) else {
            return String::new();
        };
        let output = self.command("docker").args(["logs", "--tail", "15", id]).output().unwrap();
        format!("--- {name}\n{}", text(&output))
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if self.is_up {
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
            let down = self
                .command(Path::new(&cargo))
                .current_dir(workspace)
                .args(["xtask", "compose", "down"])
                .env("KEELSON_DIR", &self.home)
                .env("COMPOSE_PROJECT_NAME", &self.project)
                .output();
            if let Ok(output) = down
                && !output.status.success()
            {
                eprintln!("cargo xtask compose down: {}", text(&output));
            }
        }
    }
}

fn manifest(name: &str) -> String {
    format!(
        "apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-page
data:
  index.html: hello from {name}
---
apiVersion: v1
kind: Secret
metadata:
  name: {name}-key
stringData:
  token: of-{name}
---
apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: {BUSYBOX_IMAGE}
    imagePullPolicy: Never
    command: [httpd, -f, -p, '8080', -h, /page]
    volumeMounts:
    - {{name: page, mountPath: /page}}
    - {{name: key, mountPath: /key}}
    - {{name: scratch, mountPath: /scratch}}
    startupProbe:
      tcpSocket: {{port: 8080}}
      periodSeconds: 1
    readinessProbe:
      httpGet: {{path: /index.html, port: 8080}}
      periodSeconds: 1
      failureThreshold: 30
    livenessProbe:
      exec: {{command: [test, -s, /key/token]}}
      periodSeconds: 2
      failureThreshold: 30
  volumes:
  - name: page
    configMap: {{name: {name}-page}}
  - name: key
    secret: {{secretName: {name}-key}}
  - name: scratch
    emptyDir: {{}}
"
    )
}

/// The processes of a node's pods, from /proc alone: container id, pid and start time. Probe commands are left
/// out.
fn processes(node: &str) -> BTreeSet<(String, ProcessId)> {
    let pods = format!("/keelson-{node}/kubepods");
    let container = |process: &process::Process| {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.id.pid)).ok()?;
        let line = cgroups.lines().find(|line| line.contains(&pods))?;
        Some(line.rsplit('/').next()?.to_owned())
    };
    let lasts = |p: &process::Process| p.args.iter().any(|arg| arg == "httpd" || arg == "2147483647");
    let all = process::all();
    all.iter().filter(|p| lasts(p)).filter_map(|p| Some((container(p)?, p.id))).collect()
}

/// The pod's files as its process sees them.
fn pod_root(node: &str) -> PathBuf {
    let all = process::all();
    let (_, id) = processes(node)
        .into_iter()
        .find(|(_, id)| all.iter().any(|p| p.id == *id && p.args.iter().any(|arg| arg == "httpd")))
        .expect("the pod runs");
    PathBuf::from(format!("/proc/{}/root", id.pid))
}

/// Checks that a node's volumes are the same mounts on the machine and in the pod.
fn check_mounts(stack: &Stack, node: &str, name: &str) {
    let pods = stack.home.join(node).join("kubelet/pods");
    let uids: Vec<PathBuf> = std::fs::read_dir(&pods).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(uids.len(), 1, "{uids:?}");
    let volumes = uids[0].join("volumes");
    let (root, read) = (pod_root(node), |path: PathBuf| std::fs::read_to_string(path).unwrap());
    let key = volumes.join("kubernetes.io~secret/key");
    assert_eq!(read(key.join("token")), format!("of-{name}"));
    assert_eq!(read(root.join("key/token")), format!("of-{name}"));
    assert!(mounts_below(&stack.home).contains(&key), "{key:?} is a mount of the machine");
    assert_eq!(read(volumes.join("kubernetes.io~configmap/page/index.html")), format!("hello from {name}"));
    assert_eq!(read(root.join("page/index.html")), format!("hello from {name}"));
    std::fs::write(volumes.join("kubernetes.io~empty-dir/scratch/seen"), name).unwrap();
    assert_eq!(read(root.join("scratch/seen")), name);
}

/// Kills the only process of each of these containers. Docker restarts them, which it would not do after `docker kill`.
fn kill_and_wait(stack: &Stack, names: &[String]) {
    let all = stack.containers();
    let killed: Vec<ProcessId> =
        names.iter().map(|name| ProcessId::of(main_pid(&all[name])).unwrap()).collect();
    assert!(killed.iter().all(|process| process.signal(Signal::KILL)), "{names:?}");
    stack.until(&format!("{names:?} run again"), || {
        let all = stack.containers();
        names.iter().zip(&killed).all(|(name, process)| {
            all[name]["State"]["Running"] == true && main_pid(&all[name]) != process.pid
        })
    });
}

#[test]
#[ignore = "long: every container is killed"]
fn compose_nodes_survive_every_kill_and_leave_nothing_after_down() {
    let before = Snapshot::take();
    let mut stack = Stack::up();
    check_containers(&stack);
    check_services_without_init(&stack);
    let run_dir = stack.run_dir("node-1");
    let run_dir = run_dir.to_str().unwrap();

    // A pod on each node, through etcd.
    for (node, name) in NODES.into_iter().zip(["one", "two"]) {
        let file = stack.home.join(format!("{name}.yaml"));
        std::fs::write(&file, manifest(name)).unwrap();
        let output = stack.fleet(&["apply", "-f", file.to_str().unwrap(), "--node", node]);
        assert!(output.status.success(), "{}", text(&output));
    }
    for (node, name) in NODES.into_iter().zip(["one", "two"]) {
        stack.until_ready(name, &[node]);
        check_mounts(&stack, node, name);
    }
    stack.until("Docker finds every container healthy", || {
        stack
            .lasting_containers()
            .values()
            .all(|c| c["State"]["Health"]["Status"].as_str().is_none_or(|s| s == "healthy"))
    });

    // No init would try a node configuration here, so none is stored.
    let file = stack.home.join("config.yaml");
    let configuration = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n";
    std::fs::write(&file, configuration).unwrap();
    let output = stack.fleet(&["apply", "-f", file.to_str().unwrap(), "--node", "node-1"]);
    assert!(text(&output).contains("node-1 refuses every configuration under its key"), "{}", text(&output));
    assert!(!output.status.success());

    let was = kill_each_in_turn(&stack);
    // The restarted containerd works: a command runs in an old container, and a new pod starts.
    let output = stack.keelson_ok(&["exec", "one", "--run-dir", run_dir, "--", "cat", "/key/token"]);
    assert_eq!(output, "of-one");
    let file = stack.home.join("three.yaml");
    std::fs::write(&file, manifest("three")).unwrap();
    let output = stack.fleet(&["apply", "-f", file.to_str().unwrap(), "--node", "node-1"]);
    assert!(output.status.success(), "{}", text(&output));
    stack.until_ready("three", &["node-1"]);
    let output = stack.fleet(&["delete", "pod", "three", "--node", "node-1"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(NODES.map(processes).to_vec(), was);
    kill_and_wait(&stack, &NODES.map(str::to_owned));
    assert_eq!(NODES.map(processes).to_vec(), was);

    take_down(&mut stack);
    let marks = [stack.project.clone(), CGROUPS[0].to_owned(), CGROUPS[1].to_owned()];
    if let Some(docker) = stack.docker.take() {
        docker.stop().unwrap();
    }
    drop(stack);
    let marks: Vec<&str> = marks.iter().map(String::as_str).collect();
    assert_eq!(before.left_of(&Snapshot::take(), &marks), Vec::<String>::new());
}

/// The containers are those of compose.yaml, and their services serve.
fn check_containers(stack: &Stack) {
    let all = stack.containers();
    for (name, container) in &all {
        if ONCE.iter().any(|once| name.starts_with(once)) {
            assert_eq!(container["State"]["ExitCode"], 0, "{name}: {}", stack.log(name));
        }
    }
    let lasting_containers = stack.lasting_containers();
    assert_eq!((all.len(), lasting_containers.len()), (25, 19), "{:?}", all.keys());
    for node in NODES {
        stack.until_all_serve(node);
    }
    let all = stack.containers();
    for name in all.keys() {
        check_settings(name, &all, &stack.home);
    }
    for name in lasting_containers.keys() {
        check_process(name, &all);
    }
}

/// Without init, each service is asked itself, and restarted by Docker.
fn check_services_without_init(stack: &Stack) {
    let run_dir = stack.run_dir("node-1");
    let run_dir = run_dir.to_str().unwrap();
    let output = stack.keelson(&["get", "services", "--run-dir", run_dir]);
    assert!(text(&output).contains("each service was queried directly"), "{}", text(&output));
    assert_eq!(stack.states("node-1")["init"], "stopped");
    let process = main_pid(&stack.containers()["pod-sync-1"]);
    let output = stack.keelson_ok(&["services", "restart", "pod-sync", "--run-dir", run_dir]);
    assert_eq!(output, "service/pod-sync restarted\n");
    assert_ne!(main_pid(&stack.containers()["pod-sync-1"]), process);
}

/// Kills the containers in turn, on both nodes at once. No pod is affected. Returns the processes of the pods.
///
/// The network containers are left out: nothing restores those.
fn kill_each_in_turn(stack: &Stack) -> Vec<BTreeSet<(String, ProcessId)>> {
    let was: Vec<_> = NODES.map(processes).to_vec();
    assert!(was.iter().all(|all| all.len() == 2), "{was:?}");
    let kinds = stack.lasting_containers().into_keys().filter(|name| name != "node-1");
    let kinds: Vec<String> = kinds.filter_map(|name| name.strip_suffix("-1").map(str::to_owned)).collect();
    assert_eq!(kinds.len(), 8, "{kinds:?}");
    let pairs = kinds.iter().map(|kind| vec![format!("{kind}-1"), format!("{kind}-2")]);
    for names in [vec!["etcd".to_owned()]].into_iter().chain(pairs) {
        kill_and_wait(stack, &names);
        for (node, pod) in NODES.into_iter().zip(["one", "two"]) {
            stack.until_all_serve(node);
            stack.until_ready(pod, &[node]);
            check_mounts(stack, node, pod);
        }
        assert_eq!(NODES.map(processes).to_vec(), was, "{names:?} were killed");
    }
    was
}

fn take_down(stack: &mut Stack) {
    let output = stack.xtask("down");
    assert!(output.contains("Both nodes are gone"), "{output}");
    stack.is_up = false;
    assert_eq!(stack.containers().keys().collect::<Vec<_>>(), Vec::<&String>::new());
    for (kind, args) in [("network", ["network", "ls"]), ("volume", ["volume", "ls"])] {
        let left = stack.docker(&[&args[..], &["--format", "{{.Name}}"]].concat());
        assert!(!left.contains(&stack.project), "{kind} {left}");
    }
    assert!(!stack.home.exists());
}
