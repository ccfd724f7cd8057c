//! Two agents with two runtimes on one machine, and a third that shares resources with one of them.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, AgentSpec, Scratch, eventually};
use keelson_tests::{LIMIT, pods, running, sleeper, text, until_ready};
use serde_json::Value;

/// Two agents, each with its own folders, ports, cgroups, node name and containerd.
async fn two_agents(one: &Scratch, other: &Scratch) -> [Agent; 2] {
    [Agent::builder(one.path()).start().await.unwrap(), Agent::builder(other.path()).start().await.unwrap()]
}

fn keelson_in(agent: &Agent, run_dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(agent.spec().bin_dir.join("keelson"));
    command.env_remove("KEELSON_RUN_DIR").arg("--run-dir").arg(run_dir).args(args);
    command.stdin(Stdio::null()).output().unwrap()
}

async fn apply(agent: &Agent, scratch: &Scratch, name: &str) {
    let file = scratch.path().join(format!("{name}.yaml"));
    fs::write(&file, sleeper(name)).unwrap();
    let output = agent.keelson(&["apply", "-f", file.to_str().unwrap()]).await.unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[tokio::test]
async fn two_agents_with_pods_of_the_same_name_do_not_affect_each_other() {
    let (one, other) = (Scratch::new().unwrap(), Scratch::new().unwrap());
    let [left, right] = two_agents(&one, &other).await;
    for (agent, scratch) in [(&left, &one), (&right, &other)] {
        apply(agent, scratch, "web").await;
        agent.write_manifest("db.yaml", &sleeper("db")).unwrap();
        until_ready(agent, &["web", "db"]).await.unwrap();
    }
    // Everything that two agents could conflict over differs.
    let (a, b) = (left.spec(), right.spec());
    for (a, b) in [
        (&a.run_dir, &b.run_dir),
        (&a.state_dir, &b.state_dir),
        (&a.root_dir, &b.root_dir),
        (&a.pod_logs_dir, &b.pod_logs_dir),
        (&a.links_dir, &b.links_dir),
        (&Path::new(&a.node_name).to_owned(), &Path::new(&b.node_name).to_owned()),
    ] {
        assert_ne!(a, b);
    }
    assert!(a.runtime_endpoint != b.runtime_endpoint && a.cgroup_root != b.cgroup_root && a.port != b.port);

    // Only the run dir selects the agent, and each agent answers for its own node.
    for agent in [&left, &right] {
        let (run_dir, node) = (&agent.spec().run_dir, agent.spec().node_name.as_str());
        let output = keelson_in(&left, run_dir, &["get", "pod", "web", "-o", "json"]);
        let pod: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output)));
        assert_eq!(pod["spec"]["nodeName"], node);
        let output = keelson_in(&left, run_dir, &["exec", "web", "--", "hostname"]);
        assert_eq!(text(&output).trim(), format!("web-{node}"));
    }

    // A deletion in one agent does not affect the other, and a killed agent's containers stay.
    let before = running(&right).await.unwrap();
    assert_eq!(before.len(), 2);
    let output = left.keelson(&["delete", "pod", "web"]).await.unwrap();
    assert!(output.status.success(), "{}", text(&output));
    until_ready(&left, &["db"]).await.unwrap();
    assert_eq!(running(&right).await.unwrap(), before);
    for service in ServiceName::supervised() {
        left.service(service).unwrap().signal(Signal::KILL);
    }
    until_ready(&left, &["db"]).await.unwrap();
    left.remove_manifest("db.yaml").unwrap();
    eventually(LIMIT, "the left one runs nothing", async || running(&left).await.is_ok_and(|r| r.is_empty()))
        .await
        .unwrap_or_else(|e| panic!("{e:#}\n{}", left.log_tail()));
    until_ready(&right, &["web", "db"]).await.unwrap();
    assert_eq!(running(&right).await.unwrap(), before);

    // Stopping one agent does not stop the other.
    left.end().unwrap();
    assert_eq!(running(&right).await.unwrap(), before);
    assert_eq!(pods(&right).await.unwrap().len(), 2);
    right.end().unwrap();
}

#[tokio::test]
async fn a_run_dir_without_an_agent_lists_the_agents_of_the_machine() {
    let (one, other, third) = (Scratch::new().unwrap(), Scratch::new().unwrap(), Scratch::new().unwrap());
    let [left, right] = two_agents(&one, &other).await;
    let nowhere = third.path().join("run");
    let output = keelson_in(&left, &nowhere, &["get", "pods"]);
    assert_eq!(output.status.code(), Some(69), "{}", text(&output));
    let message = text(&output);
    for part in [nowhere.to_str(), left.spec().run_dir.to_str(), right.spec().run_dir.to_str()] {
        assert!(message.contains(part.unwrap()), "{part:?} is not in: {message}");
    }
    assert!(message.contains("--run-dir") && message.contains("KEELSON_RUN_DIR"), "{message}");
    left.end().unwrap();
    right.end().unwrap();
}

/// Runs an init that must exit soon.
fn expect_refusal(spec: &AgentSpec) -> (Option<i32>, String) {
    spec.write().unwrap();
    let mut command = spec.command();
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(15) {
            child.kill().unwrap();
            panic!("it does not exit: {}", text(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), text(&output))
}

#[tokio::test]
async fn an_agent_that_shares_resources_is_refused_and_the_holder_is_named() {
    let (one, other, third) = (Scratch::new().unwrap(), Scratch::new().unwrap(), Scratch::new().unwrap());
    let [left, right] = two_agents(&one, &other).await;
    for agent in [&left, &right] {
        agent.write_manifest("web.yaml", &sleeper("web")).unwrap();
        until_ready(agent, &["web"]).await.unwrap();
    }
    let before = (running(&left).await.unwrap(), running(&right).await.unwrap());
    let spec = |change: &dyn Fn(&mut AgentSpec)| {
        let endpoint = format!("unix://{}/none.sock", third.path().display());
        let bin_dir = left.spec().bin_dir.clone();
        let mut spec = AgentSpec::below(&third.path().join("a"), bin_dir, "third", endpoint);
        (spec.port, spec.healthz_port) = (0, 0);
        change(&mut spec);
        spec
    };
    type Change<'a> = Box<dyn Fn(&mut AgentSpec) + 'a>;
    for holder in [&left, &right] {
        let theirs = holder.spec();
        let cases: [(Change<'_>, String, &str); 3] = [
            (
                Box::new(|s| s.runtime_endpoint.clone_from(&theirs.runtime_endpoint)),
                theirs.runtime_endpoint.clone(),
                "--container-runtime-endpoint",
            ),
            (
                Box::new(|s| s.root_dir.clone_from(&theirs.root_dir)),
                theirs.root_dir.display().to_string(),
                "--root-dir",
            ),
            (
                Box::new(|s| s.run_dir.clone_from(&theirs.run_dir)),
                theirs.run_dir.display().to_string(),
                "--run-dir",
            ),
        ];
        for (change, what, way_out) in cases {
            let (code, message) = expect_refusal(&spec(&*change));
            assert_eq!(code, Some(78), "{what}: {message}");
            let holder_is = format!(
                "another keelson (pid {}, run dir {})",
                holder.init().unwrap().pid,
                theirs.run_dir.display()
            );
            for part in [holder_is.as_str(), what.as_str(), way_out] {
                assert!(message.contains(part), "{part:?} is not in: {message}");
            }
        }
    }
    assert_eq!((running(&left).await.unwrap(), running(&right).await.unwrap()), before);
    for agent in [left, right] {
        until_ready(&agent, &["web"]).await.unwrap();
        agent.end().unwrap();
    }
}
