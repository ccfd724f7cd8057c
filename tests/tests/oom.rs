//! Containers that exceed their memory limit, on a real containerd: how they are reported and restarted,
//! and that no other container is affected (pod-lifecycle.md §9, runtime-and-resources.md §4.2).

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::bystander::BystanderPod;
use keelson_tests::{LIMIT, http, pods, running, text};
use serde_json::{Value, json};

/// The memory limit of each hungry container.
const MEMORY: u64 = 48 << 20;

/// Waits until the test lets all of them begin.
const GATE: &str = "until [ -e /data/go ]; do sleep 0.1; done";
/// Doubles a string until it exceeds the limit.
const EAT: &str = "x=x; while true; do x=$x$x; done";

fn container(name: &str, script: &str, limits: Value) -> Value {
    json!({
        "name": name, "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", script],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    })
}

fn hungry(name: &str, script: &str) -> Value {
    container(name, script, json!({"memory": MEMORY.to_string()}))
}

/// A pod whose `/data` is `dir` on the host.
fn write_pod(agent: &Agent, dir: &Path, name: &str, policy: &str, containers: &[Value]) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": policy, "terminationGracePeriodSeconds": 0, "containers": containers,
            "volumes": [{"name": "data", "hostPath": {"path": dir, "type": "Directory"}}],
        },
    });
    agent.write_manifest(&format!("{name}.json"), &pod.to_string()).unwrap();
}

/// Makes cgroup v2 kill single processes too, so that both versions behave alike.
fn one_process_at_a_time(spec: &mut AgentSpec) {
    spec.kubelet.insert("singleProcessOOMKill".into(), true.into());
}

/// Waits until a container's status, as its pod shows it, satisfies `wanted`.
async fn until_status(agent: &Agent, key: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let (pod, container) = key.split_once('/').unwrap();
    let mut last = Value::Null;
    eventually(LIMIT, format!("{key} {what}"), async || {
        last = pods(agent).await.ok().and_then(|mut all| all.remove(pod)).unwrap_or_default();
        let statuses = last["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
        last = statuses.into_iter().find(|status| status["name"] == container).unwrap_or_default();
        wanted(&last)
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {last:#}\n{}", agent.log_tail()));
    last
}

/// A container at its memory limit gets no swap instead, where the kernel accounts for swap (§4.4).
fn assert_no_swap(pid: u32) {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let below = |begin: &str| cgroups.lines().find_map(|line| line.split_once(begin).map(|(_, path)| path));
    let (file, wanted) = match below(":memory:") {
        Some(path) => {
            (format!("/sys/fs/cgroup/memory{path}/memory.memsw.limit_in_bytes"), MEMORY.to_string())
        }
        None => (format!("/sys/fs/cgroup{}/memory.swap.max", below("0::").unwrap()), "0".to_owned()),
    };
    match std::fs::read_to_string(&file) {
        Ok(limit) => assert_eq!(limit.trim(), wanted, "{file}"),
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::NotFound, "{file}: {e}"),
    }
}

/// The OOM kills of a container in `/metrics/cadvisor`.
async fn oom_events(agent: &Agent, key: &str) -> Option<f64> {
    let (pod, container) = key.split_once('/').unwrap();
    let text = http::get_ok(&format!("{}/metrics/cadvisor", agent.api_url())).await.unwrap();
    let begin = format!("container_oom_events_total{{container=\"{container}\",");
    let of_pod = format!("namespace=\"default\",pod=\"{pod}\"");
    let line = text.lines().find(|line| line.starts_with(&begin) && line.contains(&of_pod))?;
    line.split("} ").nth(1)?.split(' ').next()?.parse().ok()
}

#[tokio::test]
async fn a_container_over_its_memory_limit_is_oom_killed_and_restarted_by_policy() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(one_process_at_a_time).start().await.unwrap();
    let calm = BystanderPod::start(&agent, "calm").await;
    let (data, once) = (scratch.path().join("data"), scratch.path().join("once"));
    for folder in [&data, &once] {
        std::fs::create_dir(folder).unwrap();
    }
    let key = |pod: &str, container: &str| format!("{pod}-{}/{container}", agent.spec().node_name);
    let main =
        format!("{GATE}; if [ -e /data/again ]; then exec sleep 1000000; fi; touch /data/again; {EAT}");
    let parent = format!("{GATE}; ({EAT}); echo the child has ended with $?; exec sleep 1000000");
    let containers = [
        hungry("main", &main),
        hungry("parent", &parent),
        container("sibling", "exec sleep 1000000", json!({})),
    ];
    write_pod(&agent, &data, "web", "Always", &containers);
    write_pod(&agent, &once, "once", "Never", &[hungry("main", &format!("{GATE}; {EAT}"))]);
    eventually(LIMIT, "all of them run", async || running(&agent).await.is_ok_and(|now| now.len() == 5))
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let before = running(&agent).await.unwrap();
    assert_no_swap(before[&key("web", "parent")].pid);
    for folder in [&data, &once] {
        std::fs::write(folder.join("go"), "").unwrap();
    }

    let main = until_status(&agent, &key("web", "main"), "runs again", |status| {
        status["restartCount"] == 1 && status["state"]["running"].is_object()
    })
    .await;
    oom_killed(&main["lastState"]["terminated"]);
    let ended = until_status(&agent, &key("once", "main"), "has ended", |status| {
        status["state"]["terminated"].is_object()
    })
    .await;
    oom_killed(&ended["state"]["terminated"]);
    assert_eq!(ended["restartCount"], 0, "{ended:#}");
    assert_eq!(
        pods(&agent).await.unwrap()[&format!("once-{}", agent.spec().node_name)]["status"]["phase"],
        "Failed"
    );

    until_child_is_counted(&agent, &key("web", "parent")).await;
    assert_eq!(oom_events(&agent, &key("web", "sibling")).await, Some(0.0));

    let now = running(&agent).await.unwrap();
    for name in ["parent", "sibling"] {
        assert_eq!(now.get(&key("web", name)), before.get(&key("web", name)), "{name}");
        let status = until_status(&agent, &key("web", name), "is shown", Value::is_object).await;
        assert_eq!((&status["restartCount"], &status["lastState"]), (&json!(0), &json!({})), "{status:#}");
    }
    assert_ne!(now.get(&key("web", "main")), before.get(&key("web", "main")));
    assert_eq!(now.len(), 4, "{now:#?}");
    calm.assert_untouched(&agent).await;
    agent.end().unwrap();
}

/// Waits until the child of the container `parent` is killed and counted: it is not the container's first process, so it
/// is killed alone.
async fn until_child_is_counted(agent: &Agent, parent: &str) {
    let result = eventually(LIMIT, "the parent has seen its child's end", async || {
        let log = agent.keelson(&["logs", "web", "-c", "parent"]).await.unwrap();
        text(&log).contains("the child has ended with 137")
    });
    result.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    let mut reported = None;
    let counted = eventually(LIMIT, "the killed child is counted", async || {
        reported = oom_events(agent, parent).await;
        reported >= Some(1.0)
    });
    counted.await.unwrap_or_else(|e| panic!("{e:#}: {reported:?}\n{}", agent.log_tail()));
}

fn oom_killed(terminated: &Value) {
    assert_eq!(terminated["reason"], "OOMKilled", "{terminated:#}");
    assert_eq!(terminated["exitCode"], 137, "{terminated:#}");
}
