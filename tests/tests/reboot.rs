//! A machine that loses its power: processes, mounts, cgroups, network namespaces and everything below /run are gone, the
//! disk is unchanged. Pods are restarted (pod-lifecycle.md §20).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use k8s_cri::v1 as cri;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::power::{boot_id, cut_power, replace_boot_id, stored_boot};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, Process, pods, running, sleeper, until_event, until_ready};
use serde_json::Value;

/// A pod whose containers record when they ran, and what their volumes held.
///
/// The second init container waits while a file `hold` exists.
fn ordered_pod(name: &str, marks: &Path) -> String {
    let mounts = "    volumeMounts:\n    - {name: marks, mountPath: /marks}\n    - {name: disk, mountPath: /disk}\n    \
                  - {name: memory, mountPath: /memory}\n    - {name: files, mountPath: /files}\n    \
                  - {name: secret, mountPath: /secret}\n";
    let container = |name: &str, script: &str| {
        let script = Value::from(script);
        format!(
            "  - name: {name}\n    image: {BUSYBOX_IMAGE}\n    imagePullPolicy: IfNotPresent\n    \
             command: [\"/bin/sh\", \"-c\", {script}]\n{mounts}"
        )
    };
    let first =
        container("first", "echo first >> /marks/order; echo x >> /disk/count; echo x >> /memory/count");
    let second =
        container("second", "while [ -e /marks/hold ]; do sleep 0.1; done; echo second >> /marks/order");
    let main = container(
        "main",
        "echo main >> /marks/order; cat /disk/count > /marks/disk; cat /memory/count > /marks/memory; \
         cat /files/key /secret/word > /marks/files; exec sleep 1000000",
    );
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  terminationGracePeriodSeconds: 0\n  \
         initContainers:\n{first}{second}  containers:\n{main}  volumes:\n  - name: disk\n    emptyDir: {{}}\n  \
         - name: memory\n    emptyDir: {{medium: Memory}}\n  - name: files\n    configMap: {{name: {name}}}\n  \
         - name: secret\n    secret: {{secretName: {name}}}\n  - name: marks\n    hostPath: {{path: {marks}}}\n\
         ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata: {{key: \"a value\\n\"}}\n\
         ---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData: {{word: \"a secret\\n\"}}\n",
        marks = marks.display()
    )
}

/// A pod that records each of its runs and then runs a command, with another restart policy.
fn recording_pod(name: &str, policy: &str, then: &str, marks: &Path) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  restartPolicy: {policy}\n  \
         terminationGracePeriodSeconds: 0\n  containers:\n  - name: main\n    image: {BUSYBOX_IMAGE}\n    \
         imagePullPolicy: IfNotPresent\n    command: [\"/bin/sh\", \"-c\", \"echo run >> /marks/{name}; {then}\"]\n    \
         volumeMounts: [{{name: marks, mountPath: /marks}}]\n  volumes:\n  - name: marks\n    \
         hostPath: {{path: {}}}\n",
        marks.display()
    )
}

/// The sandboxes of each pod: attempt, and whether it is ready.
async fn sandboxes(agent: &Agent) -> BTreeMap<String, Vec<(u32, bool)>> {
    let all = cri::ListPodSandboxRequest { filter: None };
    let list = agent.containerd().runtime().list_pod_sandbox(all).await.unwrap().into_inner().items;
    let mut found: BTreeMap<String, Vec<(u32, bool)>> = BTreeMap::new();
    for sandbox in list {
        let ready = sandbox.state == cri::PodSandboxState::SandboxReady as i32;
        let meta = sandbox.metadata.unwrap_or_default();
        found.entry(meta.name).or_default().push((meta.attempt, ready));
    }
    found
}

fn leases(agent: &Agent) -> usize {
    let containerd = agent.containerd();
    let folder = containerd.dir().join("cni/leases").join(&containerd.network().name);
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.file_name());
    names.filter(|n| n.to_str().is_some_and(|n| n.parse::<std::net::Ipv4Addr>().is_ok())).count()
}

fn status<'a>(pod: &'a Value, list: &str, container: &str) -> &'a Value {
    let statuses = pod["status"][list].as_array().unwrap();
    statuses.iter().find(|s| s["name"] == container).unwrap_or(&Value::Null)
}

struct Machine {
    agent: Agent,
    marks: PathBuf,
    before: BTreeMap<String, Process>,
}

impl Machine {
    async fn start(scratch: &Scratch) -> Self {
        let marks = scratch.path().join("marks");
        fs::create_dir(&marks).unwrap();
        let agent = Agent::builder(scratch.path()).start().await.unwrap();
        let manifests = [
            ("ordered", ordered_pod("ordered", &marks)),
            ("plain", sleeper("plain")),
            ("leaving", sleeper("leaving")),
            ("never", recording_pod("never", "Never", "exec sleep 1000000", &marks)),
            ("done", recording_pod("done", "OnFailure", "exit 0", &marks)),
        ];
        for (name, manifest) in manifests {
            agent.write_manifest(&format!("{name}.yaml"), &manifest).unwrap();
        }
        for name in ["ordered", "plain", "leaving", "never"] {
            until_one_ready(&agent, name).await;
        }
        let machine = Self { agent, marks, before: BTreeMap::new() };
        machine.until_phase("done", "Succeeded").await;
        let before = running(&machine.agent).await.unwrap();
        assert_eq!(before.len(), 4, "{before:#?}");
        let ran = async || machine.mark("order") == "first\nsecond\nmain\n";
        eventually(LIMIT, "the containers have run in order", ran).await.unwrap();
        let known = async || stored_boot(&machine.agent)["bootId"] == boot_id();
        eventually(LIMIT, "the agent has written down the boot", known).await.unwrap();
        Self { before, ..machine }
    }

    fn full(&self, name: &str) -> String {
        format!("{name}-{}", self.agent.spec().node_name)
    }

    fn mark(&self, name: &str) -> String {
        fs::read_to_string(self.marks.join(name)).unwrap_or_default()
    }

    async fn pod(&self, name: &str) -> Value {
        pods(&self.agent).await.unwrap_or_default().remove(&self.full(name)).unwrap_or_default()
    }

    async fn until(&self, what: &str, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let reached = eventually(LIMIT, format!("{name} {what}"), async || {
            last = self.pod(name).await;
            wanted(&last)
        });
        reached.await.unwrap_or_else(|e| panic!("{e:#}: {last:#}\n{}", self.agent.log_tail()));
        last
    }

    async fn until_phase(&self, name: &str, phase: &str) -> Value {
        self.until(&format!("is {phase}"), name, |pod| pod["status"]["phase"] == phase).await
    }

    /// Waits until a pod's only container runs again, as a new one and for the second time.
    async fn until_restarted(&self, name: &str) {
        let key = format!("{}/main", self.full(name));
        let old = self.before[&key].clone();
        let mut new = String::new();
        let back = eventually(LIMIT, format!("{name} runs again"), async || {
            let now = running(&self.agent).await.unwrap_or_default();
            new = now.get(&key).map(|p| p.id.clone()).unwrap_or_default();
            !new.is_empty() && new != old.id
        });
        back.await.unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()));
        let pod = self
            .until("is Ready with its new container", name, |pod| {
                let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap_or_default();
                id.ends_with(&new) && keelson_tests::is_ready(pod)
            })
            .await;
        let main = status(&pod, "containerStatuses", "main");
        assert_eq!(main["restartCount"], 1, "{main:#}");
        let last = &main["lastState"]["terminated"];
        assert!(last["containerID"].as_str().is_some_and(|id| id.ends_with(&old.id)), "{main:#}");
        assert_ne!(last["exitCode"], 0, "{main:#}");
    }
}

#[tokio::test]
async fn after_a_reboot_pods_restart_and_init_containers_rerun_in_order() {
    let scratch = Scratch::new().unwrap();
    let mut machine = Machine::start(&scratch).await;
    let leaving = machine.pod("leaving").await["metadata"]["uid"].as_str().unwrap().to_owned();
    cut_power(&mut machine.agent);
    replace_boot_id(&machine.agent);
    machine.agent.remove_manifest("leaving.yaml").unwrap();
    fs::write(machine.marks.join("hold"), "").unwrap();
    machine.agent.containerd_mut().restart().unwrap();
    machine.agent.start().await.unwrap();

    // While the second init container waits, the pod has not started its containers.
    let pod = machine
        .until("is held by its second init container", "ordered", |pod| {
            let init = &pod["status"]["initContainerStatuses"];
            init[1]["state"]["running"].is_object() && init[0]["state"]["terminated"]["exitCode"] == 0
        })
        .await;
    assert_eq!(pod["status"]["phase"], "Pending", "{pod:#}");
    assert!(!keelson_tests::is_ready(&pod), "{pod:#}");
    assert_eq!(machine.mark("order"), "first\nsecond\nmain\nfirst\n");
    fs::remove_file(machine.marks.join("hold")).unwrap();
    machine.until_restarted("ordered").await;
    machine.until_restarted("plain").await;
    assert_eq!(machine.mark("order"), "first\nsecond\nmain\n".repeat(2));
    let pod = machine.pod("ordered").await;
    for name in ["first", "second"] {
        let init = status(&pod, "initContainerStatuses", name);
        assert_eq!(init["restartCount"], 1, "{init:#}");
        assert_eq!(init["state"]["terminated"]["reason"], "Completed", "{init:#}");
        assert_eq!(init["ready"], true, "{init:#}");
    }

    // Files on disk are kept, files in memory are gone, and ConfigMaps and Secrets are as before.
    assert_eq!(machine.mark("disk"), "x\nx\n");
    assert_eq!(machine.mark("memory"), "x\n");
    assert_eq!(machine.mark("files"), "a value\na secret\n");
    until_event(&machine.agent, "Rebooted", &boot_id()).await.unwrap();
    until_event(&machine.agent, "SandboxChanged", "").await.unwrap();
    assert_no_duplicates(&machine, &leaving).await;
    machine.agent.end().unwrap();
}

async fn assert_no_duplicates(machine: &Machine, leaving: &str) {
    let agent = &machine.agent;
    // Pods that may not restart do not.
    machine.until_phase("never", "Failed").await;
    machine.until_phase("done", "Succeeded").await;
    assert_eq!(machine.mark("never"), "run\n");
    assert_eq!(machine.mark("done"), "run\n");
    let folder = agent.spec().root_dir.join("pods").join(leaving);
    let gone = eventually(LIMIT, "the pod that left meanwhile leaves nothing", async || {
        machine.pod("leaving").await.is_null() && !folder.exists()
    });
    gone.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));

    // The old sandbox stays as long as it has the record of the previous container (runtime-and-resources.md §7.3).
    let sandboxes = sandboxes(agent).await;
    for (name, found) in &sandboxes {
        let wanted = if ready_names(machine).contains(name) { (1, true) } else { (0, false) };
        assert!(found.contains(&wanted), "{sandboxes:#?}");
        assert!(found.iter().all(|one| *one == wanted || *one == (0, false)), "{sandboxes:#?}");
        assert!(
            found.len() <= 2 && found.iter().collect::<BTreeSet<_>>().len() == found.len(),
            "{sandboxes:#?}"
        );
    }
    let leased = eventually(LIMIT, "each running pod has one address", async || leases(agent) == 2);
    leased.await.unwrap_or_else(|e| panic!("{e:#}: {}\n{}", leases(agent), agent.log_tail()));
    let now = running(agent).await.unwrap();
    assert_eq!(now.len(), 2, "{now:#?}");
    assert!(now.values().all(|new| machine.before.values().all(|old| old.id != new.id)), "{now:#?}");
}

fn ready_names(machine: &Machine) -> [String; 2] {
    ["ordered", "plain"].map(|name| machine.full(name))
}

/// The power fails again before any pod is back.
#[tokio::test]
async fn a_second_reboot_during_the_first_start_changes_nothing() {
    let scratch = Scratch::new().unwrap();
    let mut machine = Machine::start(&scratch).await;
    fs::write(machine.marks.join("hold"), "").unwrap();
    cut_power(&mut machine.agent);
    machine.agent.containerd_mut().restart().unwrap();
    machine.agent.start().await.unwrap();
    machine
        .until("is held by its second init container", "ordered", |pod| {
            pod["status"]["initContainerStatuses"][1]["state"]["running"].is_object()
        })
        .await;
    cut_power(&mut machine.agent);
    fs::remove_file(machine.marks.join("hold")).unwrap();
    machine.agent.containerd_mut().restart().unwrap();
    machine.agent.start().await.unwrap();
    eventually(LIMIT, "the init containers have run once more, in order", async || {
        machine.mark("order") == "first\nsecond\nmain\nfirst\nfirst\nsecond\nmain\n"
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {}\n{}", machine.mark("order"), machine.agent.log_tail()));
    until_one_ready(&machine.agent, "ordered").await;
    for name in ["never", "done", "leaving", "plain"] {
        machine.agent.remove_manifest(&format!("{name}.yaml")).unwrap();
    }
    until_ready(&machine.agent, &["ordered"]).await.unwrap();
    assert_eq!(machine.mark("memory"), "x\n");
    assert_eq!(machine.mark("disk"), "x\n".repeat(3));
    assert_eq!(machine.mark("never"), "run\n");
    machine.agent.end().unwrap();
}
