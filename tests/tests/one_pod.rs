//! One pod through every service, on a real containerd.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::process::Command;

use keelson_config::ServiceName;
use keelson_testkit::{Agent, Scratch, TraceCollector, eventually};
use keelson_tests::{LIMIT, pods, running, sleeper, until_ready};

fn text(output: &std::process::Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test]
async fn a_manifest_becomes_a_running_container_and_its_removal_leaves_nothing() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let pod = format!("web-{}", agent.spec().node_name);
    let process = running(&agent).await.unwrap().remove(&format!("{pod}/main")).expect("the container runs");
    let uid = pods(&agent).await.unwrap()[&pod]["metadata"]["uid"].as_str().unwrap().to_owned();

    eventually(LIMIT, "the log is there", async || {
        text(&agent.keelson(&["logs", "web"]).await.unwrap()).contains("hello from web")
    })
    .await
    .unwrap();
    for (args, wanted) in [
        (vec!["get", "pods"], "Running"),
        (vec!["get", "pods", "-o", "wide"], "10."),
        (vec!["describe", "pod", "web"], "scratch"),
        (vec!["explain", "pod", "web"], "waits for nothing"),
        (vec!["get", "events"], "Started"),
        (vec!["get", "node"], agent.spec().node_name.as_str()),
        (vec!["get", "services"], "pod-sync"),
        (vec!["version"], "pod-config"),
    ] {
        let output = agent.keelson(&args).await.unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output));
        assert!(text(&output).contains(wanted), "{args:?}: {}", text(&output));
    }

    let spec = agent.spec();
    let pod_dir = spec.root_dir.join("pods").join(&uid);
    assert!(pod_dir.join("volumes/kubernetes.io~empty-dir/scratch").is_dir());
    agent.remove_manifest("web.yaml").unwrap();
    eventually(LIMIT, "the pod is gone from the agent and the runtime", async || {
        let containers = agent.containerd().ctr(&["containers", "list", "-q"]).unwrap_or_default();
        pods(&agent).await.is_ok_and(|p| p.is_empty()) && containers.trim().is_empty()
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    eventually(LIMIT, "its folders, logs, links and cgroups are gone", async || {
        let empty = |dir: &std::path::Path| std::fs::read_dir(dir).map_or(true, |mut d| d.next().is_none());
        !pod_dir.exists()
            && empty(&spec.pod_logs_dir)
            && empty(&spec.links_dir)
            && cgroups_of(&uid).is_empty()
    })
    .await
    .unwrap_or_else(|e| panic!("{e:#}: {:?}\n{}", cgroups_of(&uid), agent.log_tail()));
    assert!(!std::path::Path::new(&format!("/proc/{}", process.pid)).exists());
    agent.end().unwrap();
}

/// Every cgroup folder, in any hierarchy, whose name has the UID.
fn cgroups_of(uid: &str) -> Vec<String> {
    let output = Command::new("find")
        .args(["/sys/fs/cgroup", "-type", "d", "-name", &format!("*{uid}*")])
        .output()
        .expect("find runs");
    String::from_utf8_lossy(&output.stdout).lines().map(ToOwned::to_owned).collect()
}

#[tokio::test]
async fn pods_are_applied_and_deleted_by_the_command_line() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let file = scratch.path().join("pod.yaml");
    std::fs::write(&file, sleeper("job")).unwrap();
    let file = file.to_str().unwrap();
    let applied = agent.keelson(&["apply", "-f", file]).await.unwrap();
    assert!(text(&applied).contains("created"), "{}", text(&applied));
    until_ready(&agent, &["job"]).await.unwrap();
    let again = agent.keelson(&["apply", "-f", file]).await.unwrap();
    assert!(text(&again).contains("unchanged"), "{}", text(&again));
    let deleted = agent.keelson(&["delete", "pod", "job"]).await.unwrap();
    assert!(deleted.status.success(), "{}", text(&deleted));
    assert!(pods(&agent).await.unwrap().is_empty());
    agent.end().unwrap();
}

/// Proof 1: separate files, separate processes, their users and rights.
#[tokio::test]
async fn each_service_is_its_own_process_with_only_the_rights_it_needs() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let mut executables = std::collections::BTreeSet::new();
    let mut users = std::collections::BTreeSet::new();
    for service in ServiceName::ALL {
        let pid = agent.service_pid(service).unwrap_or_else(|| panic!("{service} runs"));
        let exe = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        assert!(executables.insert(exe.clone()), "{} runs twice", exe.display());
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|l| l.starts_with(name)).unwrap_or_default();
            line.split_whitespace().nth(1).unwrap_or_default().to_owned()
        };
        let uid: u32 = field("Uid:").parse().unwrap();
        let capabilities = u64::from_str_radix(&field("CapEff:"), 16).unwrap();
        assert_eq!(uid == 0, service.needs_root(), "{service} runs as {uid}");
        if service == ServiceName::Init {
            continue;
        }
        assert_eq!(field("NoNewPrivs:"), "1", "{service}");
        if uid != 0 {
            assert!(users.insert(uid), "{service} shares its user");
            let wanted = if service == ServiceName::PodConfig { 1 << 2 } else { 0 };
            assert_eq!(capabilities, wanted, "{service} holds {capabilities:x}");
        }
    }
    agent.end().unwrap();
}

#[tokio::test]
async fn one_trace_of_a_pods_start_has_spans_of_every_service_on_the_path() {
    let scratch = Scratch::new().unwrap();
    let collector = TraceCollector::start().await.unwrap();
    let agent = Agent::builder(scratch.path()).traces_to(collector.endpoint()).start().await.unwrap();
    agent.write_manifest("traced.yaml", &sleeper("traced")).unwrap();
    until_ready(&agent, &["traced"]).await.unwrap();
    let path =
        ["pod-config", "pod-sync", "resource-manager", "volume-manager", "runtime-shim", "node-status"];
    let mut seen = Vec::new();
    let complete = eventually(LIMIT, "one trace with spans of every service on the path", async || {
        let mut traces: std::collections::BTreeMap<String, std::collections::BTreeSet<String>> =
            Default::default();
        for span in collector.spans() {
            traces.entry(span.trace_id.clone()).or_default().insert(span.service.clone());
        }
        seen = traces.values().cloned().collect();
        traces.values().any(|services| path.iter().all(|s| services.contains(&format!("keelson-{s}"))))
    });
    complete.await.unwrap_or_else(|e| panic!("{e:#}: {seen:?}\n{}", agent.log_tail()));
    agent.end().unwrap();
}
