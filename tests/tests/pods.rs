//! The life of pods on a real containerd: order of their containers, restart policies, back-off, replaced manifests
//! (pod-lifecycle.md §5 to §9). Checked in the runtime and in what containers write.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use k8s_cri::v1 as cri;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Image, Scratch, eventually, lines_with_event};
use keelson_tests::{LIMIT, is_ready, pods, running, until_event, until_ready};
use serde_json::{Value, json};

/// Logs its start and SIGTERM, and ends.
fn logging_script(name: &str) -> String {
    format!(
        "trap 'echo {name} ends >> /data/log; exit 0' TERM; echo {name} begins >> /data/log; \
         while true; do sleep 0.1; done"
    )
}

fn container(name: &str, script: &str) -> Value {
    json!({
        "name": name,
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    })
}

fn sidecar(name: &str, script: &str) -> Value {
    let mut sidecar = container(name, script);
    sidecar["restartPolicy"] = "Always".into();
    sidecar
}

/// A pod whose `/data` is `<dir>/<name>`.
fn pod(dir: &Path, name: &str, policy: &str, init: &[Value], containers: &[Value]) -> Value {
    let data = dir.join(name);
    std::fs::create_dir_all(&data).unwrap();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": policy,
            "terminationGracePeriodSeconds": 20,
            "initContainers": init,
            "containers": containers,
            "volumes": [{"name": "data", "hostPath": {"path": data, "type": "Directory"}}],
        },
    })
}

/// JSON is valid YAML.
fn write(agent: &Agent, pod: &Value) {
    agent.write_manifest(&file_of(pod), &pod.to_string()).unwrap();
}

fn file_of(pod: &Value) -> String {
    format!("{}.yaml", pod["metadata"]["name"].as_str().unwrap())
}

/// The lines that the containers of a pod have written, in order.
fn written(dir: &Path, name: &str) -> Vec<String> {
    let log = std::fs::read_to_string(dir.join(name).join("log")).unwrap_or_default();
    log.lines().map(ToOwned::to_owned).collect()
}

/// Waits until the pod's status satisfies `wanted`.
async fn until(agent: &Agent, name: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let full = format!("{name}-{}", agent.spec().node_name);
    let mut last = Value::Null;
    eventually(LIMIT, format!("{name} {what}"), async || {
        last = pods(agent).await.ok().and_then(|mut all| all.remove(&full)).unwrap_or_default();
        wanted(&last["status"])
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {:#}\n{}", last["status"], agent.log_tail()));
    last["status"].take()
}

async fn until_phase(agent: &Agent, name: &str, phase: &str) -> Value {
    until(agent, name, phase, |status| status["phase"] == phase).await
}

/// The start times of every container of a pod in the runtime, including ended ones, by name.
async fn starts(agent: &Agent, name: &str) -> Vec<(i64, String)> {
    let full = format!("{name}-{}", agent.spec().node_name);
    let mut runtime = agent.containerd().runtime();
    let all = cri::ListContainersRequest { filter: None };
    let mut found = Vec::new();
    for container in runtime.list_containers(all).await.unwrap().into_inner().containers {
        if container.labels.get("io.kubernetes.pod.name") != Some(&full) {
            continue;
        }
        let request = cri::ContainerStatusRequest { container_id: container.id, verbose: false };
        let status = match runtime.container_status(request).await {
            // Removed since it was listed.
            Err(status) if status.code() == tonic::Code::NotFound => continue,
            answer => answer.unwrap().into_inner().status.unwrap(),
        };
        found.push((status.started_at, status.metadata.unwrap().name));
    }
    found.sort();
    found
}

/// Number of running containers; `None` if one of them has just ended.
///
/// # Panics
/// If two containers of one name run at the same time.
async fn count_of_running(agent: &Agent) -> Option<usize> {
    match running(agent).await {
        Ok(now) => Some(now.len()),
        Err(error) => {
            let text = format!("{error:#}");
            assert!(!text.contains("two running containers"), "{text}");
            None
        }
    }
}

fn names(starts: &[(i64, String)]) -> Vec<&str> {
    starts.iter().map(|(_, name)| name.as_str()).collect()
}

#[tokio::test]
async fn init_containers_and_sidecars_start_in_order_and_sidecars_end_last() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let init = [
        container("first", "echo first >> /data/log"),
        sidecar("outer", &logging_script("outer")),
        container("second", "sleep 1; echo second >> /data/log"),
        sidecar("inner", &logging_script("inner")),
    ];
    let web = pod(scratch.path(), "web", "Always", &init, &[container("main", &logging_script("main"))]);
    write(&agent, &web);
    until_ready(&agent, &["web"]).await.unwrap();
    assert_eq!(names(&starts(&agent, "web").await), ["first", "outer", "second", "inner", "main"]);
    let status = until_phase(&agent, "web", "Running").await;
    let inits = status["initContainerStatuses"].as_array().unwrap();
    let ready: Vec<_> = inits.iter().map(|s| (s["name"].as_str().unwrap(), s["ready"] == true)).collect();
    assert_eq!(ready, [("first", true), ("outer", true), ("second", true), ("inner", true)]);
    assert_eq!(inits[0]["state"]["terminated"]["exitCode"], 0);
    eventually(LIMIT, "all have begun", async || written(scratch.path(), "web").len() == 5).await.unwrap();

    agent.remove_manifest("web.yaml").unwrap();
    until_ready(&agent, &[]).await.unwrap();
    let ends: Vec<String> =
        written(scratch.path(), "web").into_iter().filter(|line| line.ends_with(" ends")).collect();
    assert_eq!(ends, ["main ends", "inner ends", "outer ends"]);
    agent.end().unwrap();
}

#[tokio::test]
async fn a_failing_init_container_fails_the_pod_or_is_retried_by_restart_policy() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    // The second run of the second one succeeds.
    let init = [
        container("good", "echo good >> /data/log"),
        container("bad", "echo bad >> /data/log; [ -e /data/again ] || { touch /data/again; exit 3; }"),
        container("last", "echo last >> /data/log"),
    ];
    let main = [container("main", &logging_script("main"))];
    for (name, policy) in [("never", "Never"), ("onfailure", "OnFailure"), ("always", "Always")] {
        write(&agent, &pod(scratch.path(), name, policy, &init, &main));
    }
    let failed = until_phase(&agent, "never", "Failed").await;
    assert_eq!(failed["initContainerStatuses"][1]["state"]["terminated"]["exitCode"], 3, "{failed:#}");
    for (at, list) in [(2, "initContainerStatuses"), (0, "containerStatuses")] {
        assert_eq!(failed[list][at]["state"]["waiting"]["reason"], "PodInitializing", "{failed:#}");
    }
    assert_eq!(names(&starts(&agent, "never").await), ["good", "bad"]);
    for name in ["onfailure", "always"] {
        let status = until(&agent, name, "is Running", |s| s["phase"] == "Running").await;
        assert_eq!(status["initContainerStatuses"][1]["restartCount"], 1, "{status:#}");
        assert_eq!(status["initContainerStatuses"][0]["restartCount"], 0, "{status:#}");
        let log = eventually(LIMIT, "main has begun", async || written(scratch.path(), name).len() == 5);
        log.await.unwrap();
        assert_eq!(written(scratch.path(), name), ["good", "bad", "bad", "last", "main begins"]);
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn pod_and_container_restart_policies_are_followed() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let one = |name: &str, policy: &str, code: u32| {
        write(&agent, &pod(scratch.path(), name, policy, &[], &[container("main", &format!("exit {code}"))]));
    };
    for (name, policy, code) in [
        ("always-good", "Always", 0),
        ("always-bad", "Always", 2),
        ("failure-good", "OnFailure", 0),
        ("failure-bad", "OnFailure", 2),
        ("never-good", "Never", 0),
        ("never-bad", "Never", 2),
    ] {
        one(name, policy, code);
    }
    let mut own = container("stubborn", "exit 4");
    own["restartPolicy"] = "Never".into();
    write(
        &agent,
        &pod(scratch.path(), "own", "Always", &[], &[own, container("main", &logging_script("main"))]),
    );

    for (name, phase, code) in
        [("failure-good", "Succeeded", 0), ("never-good", "Succeeded", 0), ("never-bad", "Failed", 2)]
    {
        let status = until_phase(&agent, name, phase).await;
        let main = &status["containerStatuses"][0];
        assert_eq!(
            (&main["restartCount"], &main["state"]["terminated"]["exitCode"]),
            (&json!(0), &json!(code))
        );
        let ready = status["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Ready").unwrap();
        let reason = if code == 0 { "PodCompleted" } else { "PodFailed" };
        assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!(reason)));
    }
    // The first restart is immediate; the later ones back off.
    for (name, code) in [("always-good", 0), ("always-bad", 2), ("failure-bad", 2)] {
        let status = until(&agent, name, "is in back-off", |s| {
            s["containerStatuses"][0]["state"]["waiting"]["reason"] == "CrashLoopBackOff"
        })
        .await;
        let main = &status["containerStatuses"][0];
        assert_eq!(status["phase"], "Running", "{status:#}");
        assert_eq!(main["lastState"]["terminated"]["exitCode"], code, "{status:#}");
        assert!(main["restartCount"].as_u64().unwrap() >= 1, "{status:#}");
        let text = main["state"]["waiting"]["message"].as_str().unwrap();
        let full = format!("{name}-{}", agent.spec().node_name);
        let wanted = format!(" restarting failed container=main pod={full}_default(");
        assert!(text.starts_with("back-off ") && text.contains(&wanted), "{text}");
        until_event(&agent, "BackOff", &format!("Back-off restarting failed container main in pod {full}"))
            .await
            .unwrap();
    }
    let status = until(&agent, "own", "has ended in part", |s| {
        s["containerStatuses"][1]["state"]["terminated"]["exitCode"] == 4
    })
    .await;
    assert_eq!(
        (&status["phase"], &status["containerStatuses"][1]["restartCount"]),
        (&json!("Running"), &json!(0))
    );
    agent.end().unwrap();
}

#[tokio::test]
async fn the_crash_loop_back_off_is_capped_by_the_configuration() {
    let scratch = Scratch::new().unwrap();
    let short = |spec: &mut keelson_testkit::AgentSpec| {
        spec.kubelet.insert("crashLoopBackOff".into(), json!({"maxContainerRestartPeriod": "1s"}));
    };
    let agent = Agent::builder(scratch.path()).configure(short).start().await.unwrap();
    let begun = Instant::now();
    write(&agent, &pod(scratch.path(), "web", "Always", &[], &[container("main", "exit 1")]));
    // With the kubelet's defaults the fifth restart comes after 150 s.
    until(&agent, "web", "was restarted five times", |s| {
        s["containerStatuses"][0]["restartCount"].as_u64() >= Some(5)
    })
    .await;
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(3), "four of the five waited for a second: {took:?}");
    let log = agent.log();
    let without_effect = lines_with_event(&log, "settings_without_effect");
    let ignored = without_effect.iter().find(|line| line.contains("crashLoopBackOff"));
    assert_eq!(ignored, None);
    agent.end().unwrap();
}

#[tokio::test]
async fn an_image_change_restarts_only_its_container() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let other_image = "keelson.local/busybox:2";
    // Not only another name: a runtime may know equal images by either of their names.
    let image = Image { env: vec!["VERSION=2".to_owned()], ..Image::new(other_image, &["/bin/sh"]) };
    agent.containerd().import_images(&[image]).unwrap();
    let mut web = pod(
        scratch.path(),
        "web",
        "Always",
        &[],
        &[container("main", &logging_script("main")), container("other", &logging_script("other"))],
    );
    // With a fixed UID a change of its manifest does not replace the pod.
    web["metadata"]["uid"] = "11111111-2222-3333-4444-555555555555".into();
    write(&agent, &web);
    until_ready(&agent, &["web"]).await.unwrap();
    let key = |name: &str| format!("web-{}/{name}", agent.spec().node_name);
    let before = running(&agent).await.unwrap();
    let sandboxes = agent.containerd().ctr(&["containers", "list", "-q"]).unwrap();

    web["spec"]["containers"][0]["image"] = other_image.into();
    write(&agent, &web);
    until_event(&agent, "Killing", "Container main definition changed, will be restarted").await.unwrap();
    let mut now = BTreeMap::new();
    eventually(LIMIT, "main runs again", async || {
        now = running(&agent).await.unwrap_or_default();
        now.len() == 2 && now.get(&key("main")) != before.get(&key("main"))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {now:?}\n{}", agent.log_tail()));
    assert_eq!(now[&key("other")], before[&key("other")]);
    let status = until(&agent, "web", "shows the new image", |s| {
        s["containerStatuses"][0]["image"] == other_image && s["containerStatuses"][0]["ready"] == true
    })
    .await;
    let counts = [0, 1].map(|at| status["containerStatuses"][at]["restartCount"].clone());
    assert_eq!(counts, [json!(1), json!(0)]);
    let kept: Vec<&str> = sandboxes.lines().filter(|id| !id.is_empty()).collect();
    let left = agent.containerd().ctr(&["containers", "list", "-q"]).unwrap();
    // The sandbox, the other container and the new one; the record of the old one may still exist.
    let same = kept.iter().filter(|id| left.contains(*id)).count();
    assert!(same >= 2, "the sandbox was replaced: {kept:?} {left}");
    agent.end().unwrap();
}

#[tokio::test]
async fn a_manifest_replaced_five_times_in_a_second_runs_its_last_version() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let version = |number: u32| {
        let script =
            format!("trap 'exit 0' TERM; echo {number} >> /data/log; while true; do sleep 0.1; done");
        let mut web = pod(scratch.path(), "web", "Always", &[], &[container("main", &script)]);
        web["metadata"]["labels"] = json!({"version": number.to_string()});
        web["spec"]["terminationGracePeriodSeconds"] = 5.into();
        web
    };
    write(&agent, &version(0));
    until_ready(&agent, &["web"]).await.unwrap();
    let begun = Instant::now();
    for number in 1..=5 {
        write(&agent, &version(number));
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    println!("replaced five times within {:?}", begun.elapsed());
    let full = format!("web-{}", agent.spec().node_name);
    // Never two of one name at the same time.
    eventually(LIMIT, "the last version runs alone", async || {
        let now = count_of_running(&agent).await;
        let shown = pods(&agent).await.unwrap_or_default();
        let last = shown.get(&full).is_some_and(|p| p["metadata"]["labels"]["version"] == "5" && is_ready(p));
        now == Some(1) && shown.len() == 1 && last
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {:?}\n{}", written(scratch.path(), "web"), agent.log_tail()));
    let ran = written(scratch.path(), "web");
    assert_eq!(ran.last().map(String::as_str), Some("5"), "{ran:?}");
    assert!(ran.is_sorted(), "an older version began after a newer one: {ran:?}");

    // Removed and added again repeatedly, it runs once in the end.
    for _ in 0..3 {
        agent.remove_manifest("web.yaml").unwrap();
        tokio::time::sleep(Duration::from_millis(120)).await;
        write(&agent, &version(6));
        tokio::time::sleep(Duration::from_millis(120)).await;
    }
    eventually(LIMIT, "it runs once", async || {
        let shown = pods(&agent).await.unwrap_or_default();
        let ready =
            shown.get(&full).is_some_and(|p| p["metadata"]["labels"]["version"] == "6" && is_ready(p));
        count_of_running(&agent).await == Some(1) && shown.len() == 1 && ready
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_removed_while_the_agent_was_down_ends_with_its_own_grace_and_order() {
    let scratch = Scratch::new().unwrap();
    let mut agent = Agent::builder(scratch.path()).start().await.unwrap();
    let slow = "trap 'sleep 2; echo main ends >> /data/log; exit 0' TERM; while true; do sleep 0.1; done";
    let stays = pod(scratch.path(), "stays", "Always", &[], &[container("main", &logging_script("stays"))]);
    for one in [&pod(scratch.path(), "leaves", "Always", &[], &[container("main", slow)]), &stays] {
        write(&agent, one);
    }
    until_ready(&agent, &["leaves", "stays"]).await.unwrap();
    let key = format!("stays-{}/main", agent.spec().node_name);
    let before = running(&agent).await.unwrap()[&key].clone();
    let uids = |all: BTreeMap<String, Value>| -> Vec<Value> {
        all.into_values().map(|pod| pod["metadata"]["uid"].clone()).collect()
    };
    let uid = uids(pods(&agent).await.unwrap())[1].clone();
    agent.stop().await.unwrap();
    agent.remove_manifest("leaves.yaml").unwrap();
    agent.start().await.unwrap();
    until_ready(&agent, &["stays"]).await.unwrap();
    eventually(LIMIT, "the orphan has ended", async || {
        running(&agent).await.is_ok_and(|now| now.keys().eq([&key]))
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    assert_eq!(written(scratch.path(), "leaves"), ["main ends"], "it had its grace");
    assert_eq!(running(&agent).await.unwrap()[&key], before);
    assert_eq!(uids(pods(&agent).await.unwrap()), [uid], "one manifest is one UID, whoever reads it");
    eventually(LIMIT, "nothing of the orphan is left", async || starts(&agent, "leaves").await.is_empty())
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_pod_for_another_node_is_refused_and_one_for_this_node_runs() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let selecting = |name: &str, selector: Value| {
        let mut pod = pod(scratch.path(), name, "Always", &[], &[container("main", &logging_script(name))]);
        pod["spec"]["nodeSelector"] = selector;
        write(&agent, &pod);
    };
    selecting("here", json!({"kubernetes.io/os": "linux", "kubernetes.io/hostname": agent.spec().node_name}));
    selecting("elsewhere", json!({"disk": "ssd"}));
    let status = until_phase(&agent, "elsewhere", "Failed").await;
    assert_eq!(status["reason"], "NodeAffinity");
    let text = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    assert_eq!(status["message"], format!("Pod was rejected: {text}"));
    until_event(&agent, "NodeAffinity", text).await.unwrap();
    until_phase(&agent, "here", "Running").await;
    assert!(status["containerStatuses"].is_null() && starts(&agent, "elsewhere").await.is_empty());
    agent.end().unwrap();
}
