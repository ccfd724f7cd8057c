//! Lifecycle hooks in running containers (pod-lifecycle.md §9.11 and §10), as seen in what they and the container write.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;
use std::time::{Duration, Instant};

use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::waits::waiting_reason;
use keelson_tests::{LIMIT, running, text, until_event, until_no_cause, until_ready};
use serde_json::{Value, json};

/// Logs SIGTERM and ends.
const EXITS_ON_SIGTERM: &str =
    "trap 'echo TERM >> /data/log; exit 0' TERM; echo main >> /data/log; while true; do sleep 1; done";
/// Logs SIGTERM and ignores it.
const IGNORES_SIGTERM: &str =
    "trap 'echo TERM >> /data/log' TERM; echo main >> /data/log; while true; do sleep 1; done";

/// A container that runs a script, with hooks that run scripts, and `/data` on the host.
fn container(name: &str, script: &str, hooks: &[(&str, &str)]) -> Value {
    let sh = |script: &str| json!(["/bin/sh", "-c", script]);
    let hooks: serde_json::Map<String, Value> = hooks
        .iter()
        .map(|(hook, script)| ((*hook).to_owned(), json!({"exec": {"command": sh(script)}})))
        .collect();
    json!({
        "name": name,
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": sh(script),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "lifecycle": hooks,
    })
}

/// A pod of these containers, whose `/data` is `<dir>/<name>`.
fn write_pod(agent: &Agent, dir: &Path, name: &str, grace_seconds: u32, containers: &[Value]) {
    let data = dir.join(name);
    std::fs::create_dir_all(&data).unwrap();
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": grace_seconds,
            "containers": containers,
            "volumes": [{"name": "data", "hostPath": {"path": data, "type": "Directory"}}],
        },
    });
    // JSON is valid YAML.
    agent.write_manifest(&format!("{name}.yaml"), &pod.to_string()).unwrap();
}

/// The lines that a pod's containers and hooks have written, in order.
fn written(dir: &Path, name: &str) -> Vec<String> {
    let log = std::fs::read_to_string(dir.join(name).join("log")).unwrap_or_default();
    log.lines().map(ToOwned::to_owned).collect()
}

async fn until_written(agent: &Agent, dir: &Path, name: &str, line: &str) {
    let there = eventually(LIMIT, format!("{name} has written {line:?}"), async || {
        written(dir, name).iter().any(|l| l == line)
    });
    there.await.unwrap_or_else(|e| panic!("{e:#}: {:?}\n{}", written(dir, name), agent.log_tail()));
}

/// Waits until no container of a pod runs.
async fn until_ended(agent: &Agent, name: &str) {
    let prefix = format!("{name}-{}/", agent.spec().node_name);
    let ended = eventually(LIMIT, format!("{name} has ended"), async || {
        running(agent).await.is_ok_and(|now| !now.keys().any(|n| n.starts_with(&prefix)))
    });
    ended.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

#[tokio::test]
async fn post_start_runs_before_the_next_container_and_pre_stop_before_sigterm() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let hooks = [
        ("postStart", "sleep 2; echo postStart >> /data/log"),
        ("preStop", "echo preStop >> /data/log; sleep 2; echo preStop ends >> /data/log"),
    ];
    let says = |name: &str, before: &str| {
        let script =
            format!("trap 'exit 0' TERM; {before} echo {name} >> /data/log; while true; do sleep 1; done");
        container(name, &script, &[])
    };
    // The late line is written while the hook sleeps, so before the next container starts.
    let mut second = says("second", "sleep 0.5;");
    second["lifecycle"] = json!({"postStart": {"sleep": {"seconds": 2}}});
    let containers = [container("main", EXITS_ON_SIGTERM, &hooks), second, says("third", "")];
    write_pod(&agent, scratch.path(), "web", 25, &containers);
    until_ready(&agent, &["web"]).await.unwrap();
    until_written(&agent, scratch.path(), "web", "third").await;
    assert_eq!(written(scratch.path(), "web"), ["main", "postStart", "second", "third"]);

    let removed = Instant::now();
    agent.remove_manifest("web.yaml").unwrap();
    until_ended(&agent, "web").await;
    let took = removed.elapsed();
    println!("ended within {took:?}");
    let all = ["main", "postStart", "second", "third", "preStop", "preStop ends", "TERM"];
    assert_eq!(written(scratch.path(), "web"), all);
    assert!(took < Duration::from_secs(15), "who obeys does not use up the grace: {took:?}");
    until_ready(&agent, &[]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn the_grace_period_includes_pre_stop_and_cuts_off_a_longer_one() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let within = [("preStop", "sleep 5; echo preStop ends >> /data/log")];
    let longer = [("preStop", "echo preStop >> /data/log; sleep 100; echo preStop ends >> /data/log")];
    write_pod(&agent, scratch.path(), "within", 9, &[container("main", IGNORES_SIGTERM, &within)]);
    write_pod(&agent, scratch.path(), "longer", 4, &[container("main", IGNORES_SIGTERM, &longer)]);
    until_ready(&agent, &["longer", "within"]).await.unwrap();
    until_written(&agent, scratch.path(), "within", "main").await;
    until_written(&agent, scratch.path(), "longer", "main").await;

    let removed = Instant::now();
    let end = async |name: &str| {
        agent.remove_manifest(&format!("{name}.yaml")).unwrap();
        until_ended(&agent, name).await;
        removed.elapsed()
    };
    let (within, longer) = tokio::join!(end("within"), end("longer"));
    println!("within {within:?}: {:?}", written(scratch.path(), "within"));
    println!("longer {longer:?}: {:?}", written(scratch.path(), "longer"));
    // 9 s that include the hook's 5 s, not 14.
    assert_eq!(written(scratch.path(), "within"), ["main", "preStop ends", "TERM"]);
    let seconds = within.as_secs_f64();
    assert!((8.0..13.0).contains(&seconds), "a grace of 9 s, of which the hook takes 5: {within:?}");
    // 4 s, and at most the 2 s that a kubelet leaves between SIGTERM and SIGKILL.
    assert_eq!(written(scratch.path(), "longer"), ["main", "preStop", "TERM"]);
    let seconds = longer.as_secs_f64();
    assert!((3.5..9.0).contains(&seconds), "a grace of 4 s, however long the hook: {longer:?}");
    until_ready(&agent, &[]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_failed_post_start_stops_the_container_with_pre_stop_and_restarts_it() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let hooks =
        [("postStart", "sleep 1; [ -e /data/good ] || exit 3"), ("preStop", "echo preStop >> /data/log")];
    write_pod(&agent, scratch.path(), "web", 20, &[container("main", EXITS_ON_SIGTERM, &hooks)]);
    until_event(&agent, "FailedPostStartHook", "PostStartHook failed").await.unwrap();
    // Shown from the failure to the next observation, each time that the container is started.
    let shown = eventually(LIMIT, "the failure of the hook is its reason", async || {
        waiting_reason(&agent, "web").await == "PostStartHookError"
    });
    shown.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_written(&agent, scratch.path(), "web", "TERM").await;
    assert_eq!(written(scratch.path(), "web")[..3], ["main", "preStop", "TERM"]);
    let waits = eventually(LIMIT, "it is restarted with a growing back-off", async || {
        waiting_reason(&agent, "web").await == "CrashLoopBackOff"
    });
    waits.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));

    std::fs::write(scratch.path().join("web/good"), "").unwrap();
    let retried = agent.keelson(&["retry", "pod", "web"]).await.unwrap();
    assert!(retried.status.success(), "{}", text(&retried));
    until_ready(&agent, &["web"]).await.unwrap();
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}
