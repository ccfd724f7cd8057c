//! compose.yaml as it stands: two nodes and etcd in containers, looked at from outside, killed one by one, and taken down.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::{self, ProcessId, Signal};
use keelson_testkit::{
    BUSYBOX_IMAGE, Component, PrivateDocker, Scratch, Snapshot, built_binaries, cgroup_hierarchies,
    has_cap_sys_resource, mounts_below,
};
use keelson_tests::{is_ready, text};
use serde_json::Value;

/// How long anything that has to happen may take: Docker waits between restarts, a lease lasts 40 s.
const LIMIT: Duration = Duration::from_secs(150);
/// The cgroups of the nodes; one stack a machine.
const CGROUPS: [&str; 2] = ["keelson-node-1", "keelson-node-2"];
const NODES: [&str; 2] = ["node-1", "node-2"];
/// What Docker starts and what ends by itself.
const ONCE: [&str; 3] = ["prepare", "config", "images"];

/// What a container's first process must be: program, user, group, capabilities, whether it may gain more.
struct Declared {
    program: &'static str,
    uid: u32,
    gid: u32,
    capabilities: &'static [(&'static str, u32)],
    may_gain: bool,
    sees_all_processes: bool,
}

const OPERATORS: u32 = 64_200;
/// Numbers of linux/capability.h.
const CHOWN: (&str, u32) = ("CHOWN", 0);
const DAC_OVERRIDE: (&str, u32) = ("DAC_OVERRIDE", 1);
const DAC_READ_SEARCH: (&str, u32) = ("DAC_READ_SEARCH", 2);
const FOWNER: (&str, u32) = ("FOWNER", 3);
const FSETID: (&str, u32) = ("FSETID", 4);
const KILL: (&str, u32) = ("KILL", 5);
const SETGID: (&str, u32) = ("SETGID", 6);
const SETUID: (&str, u32) = ("SETUID", 7);
const SETPCAP: (&str, u32) = ("SETPCAP", 8);
const NET_BIND_SERVICE: (&str, u32) = ("NET_BIND_SERVICE", 10);
const NET_ADMIN: (&str, u32) = ("NET_ADMIN", 12);
const NET_RAW: (&str, u32) = ("NET_RAW", 13);
const SYS_CHROOT: (&str, u32) = ("SYS_CHROOT", 18);
const SYS_PTRACE: (&str, u32) = ("SYS_PTRACE", 19);
const SYS_ADMIN: (&str, u32) = ("SYS_ADMIN", 21);
const SYS_RESOURCE: (&str, u32) = ("SYS_RESOURCE", 24);
const MKNOD: (&str, u32) = ("MKNOD", 27);
const AUDIT_WRITE: (&str, u32) = ("AUDIT_WRITE", 29);
const SETFCAP: (&str, u32) = ("SETFCAP", 31);
const SYSLOG: (&str, u32) = ("SYSLOG", 34);

/// The containers of a node that stay, by what compose.yaml calls them before the number, and etcd.
fn declared(container: &str) -> Declared {
    let kind = container.strip_suffix("-1").or_else(|| container.strip_suffix("-2")).unwrap_or(container);
    let service = |program, uid, capabilities, sees_all_processes| Declared {
        program,
        uid,
        gid: OPERATORS,
        capabilities,
        may_gain: false,
        sees_all_processes,
    };
    let other = |program, id| Declared { gid: id, ..service(program, id, &[], false) };
    match kind {
        "etcd" => other("etcd", 64_250),
        "node" => other("sleep", 65_534),
        "pod-config" => service("keelson-pod-config", 64_201, &[], false),
        "pod-sync" => service("keelson-pod-sync", 64_205, &[], false),
        "node-status" => service("keelson-node-status", 64_206, &[], false),
        "node-api" => service("keelson-node-api", 64_207, &[], false),
        "runtime-shim" => {
            service("keelson-runtime-shim", 0, &[CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID], true)
        }
        "volume-manager" => service(
            "keelson-volume-manager",
            0,
            &[CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SYS_ADMIN, SYS_RESOURCE, MKNOD],
            true,
        ),
        "resource-manager" => service(
            "keelson-resource-manager",
            0,
            &[
                CHOWN,
                DAC_OVERRIDE,
                DAC_READ_SEARCH,
                FOWNER,
                KILL,
                SYS_PTRACE,
                SYS_RESOURCE,
                NET_ADMIN,
                SYSLOG,
            ],
            true,
        ),
        "containerd" => Declared {
            may_gain: true,
            gid: 0,
            ..service(
                "containerd",
                0,
                &[
                    CHOWN,
                    DAC_OVERRIDE,
                    DAC_READ_SEARCH,
                    FOWNER,
                    FSETID,
                    KILL,
                    SETGID,
                    SETUID,
                    SETPCAP,
                    SETFCAP,
                    NET_BIND_SERVICE,
                    NET_RAW,
                    NET_ADMIN,
                    SYS_CHROOT,
                    SYS_PTRACE,
                    SYS_ADMIN,
                    SYS_RESOURCE,
                    MKNOD,
                    AUDIT_WRITE,
                ],
                true,
            )
        },
        other => panic!("compose.yaml has a container that nobody declared: {other}"),
    }
}

impl Declared {
    /// The capabilities as this machine can give them.
    fn capabilities(&self) -> impl Iterator<Item = &'static (&'static str, u32)> {
        self.capabilities.iter().filter(|capability| **capability != SYS_RESOURCE || has_cap_sys_resource())
    }

    fn bits(&self) -> u64 {
        self.capabilities().fold(0, |bits, (_, number)| bits | 1 << number)
    }
}

/// The stack, taken down when the test fails before it has done so.
struct Stack {
    home: PathBuf,
    project: String,
    port: u16,
    docker_host: String,
    is_up: bool,
    // Last, so that what it runs is gone when it ends.
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
        let said = stack.xtask("up");
        assert!(said.contains("Both nodes are up"), "{said}");
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

    /// The containers as Docker describes them, by what compose.yaml calls them.
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

    /// Those that stay.
    fn lasting(&self) -> BTreeMap<String, Value> {
        let mut all = self.containers();
        all.retain(|name, _| !ONCE.iter().any(|once| name.starts_with(once)));
        all
    }

    fn run_dir(&self, node: &str) -> PathBuf {
        self.home.join(node).join("run")
    }

    fn keelson(&self, args: &[&str]) -> Output {
        let program = built_binaries().unwrap().join("keelson");
        self.docker.as_ref().unwrap().beside(&program).unwrap().args(args).output().unwrap()
    }

    fn good(&self, args: &[&str]) -> String {
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
            let told = self.fleet_json(&["get", "node"]);
            let ready = |node: &&str| {
                let all = told["items"].as_array();
                all.into_iter()
                    .flatten()
                    .any(|object| object["metadata"]["name"] == *node && is_ready(object))
            };
            nodes.iter().all(|node| well(node) && ready(node))
        });
    }

    /// What a node's services say, by name.
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
                let logs: String = self.lasting().keys().map(|name| self.log(name)).collect();
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

fn main_pid(container: &Value) -> u32 {
    container["State"]["Pid"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap()
}

/// A line of `/proc/<pid>/status`.
fn status_line(pid: u32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim().to_owned()
}

fn inspect(name: &str, container: &Value) {
    let declared = declared(name);
    let host = &container["HostConfig"];
    assert_eq!(host["Privileged"], false, "{name}");
    assert_eq!(host["ReadonlyRootfs"], true, "{name}");
    assert_eq!(host["CapDrop"].to_string(), "[\"ALL\"]", "{name}");
    assert_eq!(host["PidMode"] == "host", declared.sees_all_processes, "{name}");
    let asked: BTreeSet<&str> =
        host["CapAdd"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let asked: BTreeSet<&str> = asked.into_iter().map(|name| name.trim_start_matches("CAP_")).collect();
    assert_eq!(asked, declared.capabilities().map(|(name, _)| *name).collect(), "{name}");

    let pid = main_pid(container);
    let process = process::read(pid).unwrap();
    assert_eq!(process.exe_name().as_deref(), Some(declared.program), "{name}");
    for ids in [("Uid", declared.uid), ("Gid", declared.gid)] {
        let id = ids.1.to_string();
        let line = status_line(pid, ids.0);
        assert!(line.split_whitespace().all(|found| found == id), "{name}: {} {line}", ids.0);
    }
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        let found = u64::from_str_radix(&status_line(pid, set), 16).unwrap();
        assert_eq!(found, declared.bits(), "{name}: {set} {found:x}");
    }
    assert_eq!(status_line(pid, "NoNewPrivs"), if declared.may_gain { "0" } else { "1" }, "{name}");
    if !declared.sees_all_processes {
        assert_eq!(status_line(pid, "NSpid").split_whitespace().last(), Some("1"), "{name}");
    }
    // Nobody else lives there; who asks for health comes and goes, as a child of Docker's and not of the first process.
    let id = container["Id"].as_str().unwrap();
    let inside = |process: &process::Process| {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.id.pid));
        cgroups.is_ok_and(|text| text.contains(id))
    };
    let all = process::all();
    let children = process::descendants(&all, &[pid]);
    let living: Vec<_> = all.iter().filter(|p| inside(p) && children.contains(&p.id)).collect();
    assert!(living.is_empty(), "{name}: {living:?}");
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

/// The processes that pods of a node consist of, from /proc alone: container id, pid and start time. Commands of probes come
/// and go and are left out.
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
fn inside(node: &str) -> PathBuf {
    let all = process::all();
    let (_, id) = processes(node)
        .into_iter()
        .find(|(_, id)| all.iter().any(|p| p.id == *id && p.args.iter().any(|arg| arg == "httpd")))
        .expect("the pod runs");
    PathBuf::from(format!("/proc/{}/root", id.pid))
}

/// Volumes of the pod of a node are the same thing on the machine and in the pod.
fn look_at_mounts(stack: &Stack, node: &str, name: &str) {
    let pods = stack.home.join(node).join("kubelet/pods");
    let uids: Vec<PathBuf> = std::fs::read_dir(&pods).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(uids.len(), 1, "{uids:?}");
    let volumes = uids[0].join("volumes");
    let (root, read) = (inside(node), |path: PathBuf| std::fs::read_to_string(path).unwrap());
    let key = volumes.join("kubernetes.io~secret/key");
    assert_eq!(read(key.join("token")), format!("of-{name}"));
    assert_eq!(read(root.join("key/token")), format!("of-{name}"));
    assert!(mounts_below(&stack.home).contains(&key), "{key:?} is a mount of the machine");
    assert_eq!(read(volumes.join("kubernetes.io~configmap/page/index.html")), format!("hello from {name}"));
    assert_eq!(read(root.join("page/index.html")), format!("hello from {name}"));
    std::fs::write(volumes.join("kubernetes.io~empty-dir/scratch/seen"), name).unwrap();
    assert_eq!(read(root.join("scratch/seen")), name);
}

/// Kills the only process of a container. Docker starts it again, which it would not do after `docker kill`.
fn kill_and_wait(stack: &Stack, name: &str) {
    let process = ProcessId::of(main_pid(&stack.containers()[name])).unwrap();
    assert!(process.signal(Signal::KILL), "{name}");
    stack.until(&format!("{name} runs again"), || {
        let container = &stack.containers()[name];
        container["State"]["Running"] == true && main_pid(container) != process.pid
    });
}

#[test]
#[ignore = "long: every container of a node is killed"]
fn two_nodes_in_containers_run_pods_which_notice_no_death_and_go_without_a_trace() {
    let before = Snapshot::take();
    let mut stack = Stack::up();
    // The containers are what compose.yaml says and no more.
    let all = stack.containers();
    for (name, container) in &all {
        if ONCE.iter().any(|once| name.starts_with(once)) {
            assert_eq!(container["State"]["ExitCode"], 0, "{name}: {}", stack.log(name));
        }
    }
    let lasting = stack.lasting();
    assert_eq!((all.len(), lasting.len()), (25, 19), "{:?}", all.keys());
    for node in NODES {
        stack.until_all_serve(node);
    }
    for (name, container) in &stack.lasting() {
        inspect(name, container);
    }

    // Without init, each service is asked itself, and restarted by Docker.
    let run_dir = stack.run_dir("node-1");
    let run_dir = run_dir.to_str().unwrap();
    let output = stack.keelson(&["get", "services", "--run-dir", run_dir]);
    assert!(text(&output).contains("each service was asked itself"), "{}", text(&output));
    assert_eq!(stack.states("node-1")["init"], "stopped");
    let process = main_pid(&stack.containers()["pod-sync-1"]);
    let said = stack.good(&["services", "restart", "pod-sync", "--run-dir", run_dir]);
    assert_eq!(said, "service/pod-sync restarted\n");
    assert_ne!(main_pid(&stack.containers()["pod-sync-1"]), process);

    // A pod on either node, through etcd.
    for (node, name) in NODES.into_iter().zip(["one", "two"]) {
        let file = stack.home.join(format!("{name}.yaml"));
        std::fs::write(&file, manifest(name)).unwrap();
        let output = stack.fleet(&["apply", "-f", file.to_str().unwrap(), "--node", node]);
        assert!(output.status.success(), "{}", text(&output));
    }
    for (node, name) in NODES.into_iter().zip(["one", "two"]) {
        stack.until_ready(name, &[node]);
        look_at_mounts(&stack, node, name);
    }
    stack.until("Docker finds every container well", || {
        stack
            .lasting()
            .values()
            .all(|c| c["State"]["Health"]["Status"].as_str().is_none_or(|s| s == "healthy"))
    });

    // Each dies in turn, and no pod notices. Of node-1 its network last: nobody gets that back.
    let was: Vec<_> = NODES.map(processes).to_vec();
    assert!(was.iter().all(|all| all.len() == 2), "{was:?}");
    let names = stack.lasting().into_keys().filter(|name| !name.ends_with("-2") && name != "node-1");
    for name in names.collect::<Vec<_>>() {
        kill_and_wait(&stack, &name);
        stack.until_all_serve("node-1");
        stack.until_ready("one", &["node-1"]);
        assert_eq!(NODES.map(processes).to_vec(), was, "{name} was killed");
        look_at_mounts(&stack, "node-1", "one");
    }
    // The containerd that came back is one: a command runs in an old container, and a new pod starts.
    let said = stack.good(&["exec", "one", "--run-dir", run_dir, "--", "cat", "/key/token"]);
    assert_eq!(said, "of-one");
    let file = stack.home.join("three.yaml");
    std::fs::write(&file, manifest("three")).unwrap();
    let output = stack.fleet(&["apply", "-f", file.to_str().unwrap(), "--node", "node-1"]);
    assert!(output.status.success(), "{}", text(&output));
    stack.until_ready("three", &["node-1"]);
    let output = stack.fleet(&["delete", "pod", "three", "--node", "node-1"]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(NODES.map(processes).to_vec(), was);
    kill_and_wait(&stack, "node-1");
    assert_eq!(NODES.map(processes).to_vec(), was);

    let said = stack.xtask("down");
    assert!(said.contains("Both nodes are gone"), "{said}");
    stack.is_up = false;
    assert_eq!(stack.containers().keys().collect::<Vec<_>>(), Vec::<&String>::new());
    for (kind, args) in [("network", ["network", "ls"]), ("volume", ["volume", "ls"])] {
        let left = stack.docker(&[&args[..], &["--format", "{{.Name}}"]].concat());
        assert!(!left.contains(&stack.project), "{kind} {left}");
    }
    assert!(!stack.home.exists());
    let marks = [stack.project.clone(), CGROUPS[0].to_owned(), CGROUPS[1].to_owned()];
    if let Some(docker) = stack.docker.take() {
        docker.stop().unwrap();
    }
    drop(stack);
    let marks: Vec<&str> = marks.iter().map(String::as_str).collect();
    assert_eq!(before.left_of(&Snapshot::take(), &marks), Vec::<String>::new());
}
