//! A node without a cluster that an operator drains (docs/command.md, "Draining a node").

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Stdio};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::ending::{Marks, condition, until_node, until_pod};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, running, sleeper, text, until_event, until_explained};
use serde_json::{Value, json};

async fn start(scratch: &Scratch) -> (Agent, Marks) {
    let marks = Marks::below(scratch.path());
    let agent = Agent::builder(scratch.path())
        .manifest("low.yaml", &marks.pod("low", 0))
        .manifest("critical.yaml", &marks.pod("critical", 2_000_000_000))
        .start()
        .await
        .unwrap();
    for name in ["low", "critical"] {
        until_one_ready(&agent, name).await;
    }
    (agent, marks)
}

/// Runs a command that succeeds; its output.
async fn keelson(agent: &Agent, args: &[&str]) -> String {
    let output = agent.keelson(args).await.unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Adds a pod, and waits until it waits for the end of the drain.
async fn assert_waits(agent: &Agent, name: &str) {
    agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
    let waits = |pod: &Value| pod["status"]["reason"] == "NodeDrained";
    let pod = until_pod(agent, name, "waits", waits).await;
    assert_eq!(pod["status"]["phase"], "Pending", "{pod:#}");
    until_event(agent, "NodeDrained", "`keelson uncordon`").await.unwrap();
    until_explained(agent, name, "it is explained", |explained| {
        let steps = explained["steps"].as_array();
        steps.into_iter().flatten().any(|step| {
            step["name"] == "admission"
                && step["owner"] == "you"
                && step.to_string().contains("keelson uncordon")
        })
    })
    .await
    .unwrap();
}

/// Kills a service, and waits for its next process.
async fn kill(agent: &Agent, service: ServiceName) {
    let before = agent.service(service).unwrap();
    before.signal(Signal::KILL);
    let restarted = eventually(LIMIT, format!("{service} runs again"), async || {
        agent.service(service).is_some_and(|now| now != before)
    });
    restarted.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

/// `keelson drain --stop-pods`, which waits for the end of the pods.
fn drain(agent: &Agent) -> Child {
    let mut command = agent.spec().cli();
    command.args(["drain", "--stop-pods", "--timeout", "10m"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Reads the output of a command up to a line with this text, so that the command has seen what it says. Returns the output
/// so far, and the rest.
async fn until_printed(child: &mut Child, text: String) -> (String, BufReader<ChildStdout>) {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let read = move || {
        let mut printed = String::new();
        while !printed.contains(&text) {
            assert_ne!(output.read_line(&mut printed).unwrap(), 0, "no {text:?} in {printed:?}");
        }
        (printed, output)
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

#[tokio::test]
async fn a_drained_node_ends_its_pods_in_turn_and_starts_them_after_uncordon() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, marks) = start(&scratch).await;
    let name = agent.spec().node_name.clone();
    let mut draining = drain(&agent);
    let (mut printed, mut rest) =
        until_printed(&mut draining, format!("stopping pod default/low-{name}")).await;
    marks.until_ended(&agent, &["low"]).await;
    until_node(&agent, "is unschedulable", |node| node["spec"]["unschedulable"] == true).await;
    assert!(keelson(&agent, &["get", "node"]).await.contains("Ready,SchedulingDisabled"));
    until_event(&agent, "NodeNotSchedulable", "status is now: NodeNotSchedulable").await.unwrap();
    assert_waits(&agent, "late").await;
    kill(&agent, ServiceName::ResourceManager).await;
    kill(&agent, ServiceName::PodSync).await;
    assert_eq!(marks.ended(), ["low"], "the critical pod ends last");
    marks.let_end("low");
    marks.until_ended(&agent, &["low", "critical"]).await;
    marks.let_end("critical");
    let output = tokio::task::spawn_blocking(move || draining.wait_with_output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output), agent.log_tail());
    rest.read_to_string(&mut printed).unwrap();
    assert!(printed.starts_with(&format!("node/{name} cordoned\n")), "{printed}");
    assert!(printed.contains(&format!("pod default/low-{name} stopped\n")), "{printed}");
    assert!(printed.ends_with(&format!("node/{name} drained\n")), "{printed}");
    for name in ["low", "critical"] {
        let pod = until_pod(&agent, name, "has ended", |pod| pod["status"]["phase"] == "Failed").await;
        assert_eq!(pod["status"]["reason"], "Drained", "{pod:#}");
        assert_eq!(condition(&pod, "DisruptionTarget")["status"], "True", "{pod:#}");
    }

    // Nothing starts again by itself, also not after a restart of everything.
    agent.restart().await.unwrap();
    until_node(&agent, "is unschedulable", |node| node["spec"]["unschedulable"] == true).await;
    until_pod(&agent, "late", "waits", |pod| pod["status"]["reason"] == "NodeDrained").await;
    assert_eq!(running(&agent).await.unwrap().len(), 0);
    assert_eq!(keelson(&agent, &["uncordon"]).await, format!("node/{name} uncordoned\n"));
    for name in ["low", "critical", "late"] {
        until_one_ready(&agent, name).await;
    }
    until_node(&agent, "is schedulable", |node| node["spec"]["unschedulable"] != json!(true)).await;
    assert_eq!(marks.started().len(), 4);
    assert_eq!(keelson(&agent, &["uncordon"]).await, format!("node/{name} already uncordoned\n"));
    agent.end().unwrap();
}

#[tokio::test]
async fn a_cordoned_node_keeps_its_pods_and_lets_new_ones_wait() {
    let scratch = Scratch::new().unwrap();
    let (mut agent, marks) = start(&scratch).await;
    let before = running(&agent).await.unwrap();
    let name = agent.spec().node_name.clone();
    assert_eq!(keelson(&agent, &["drain"]).await, format!("node/{name} cordoned\n"));
    assert_waits(&agent, "late").await;
    agent.restart().await.unwrap();
    until_pod(&agent, "late", "waits", |pod| pod["status"]["reason"] == "NodeDrained").await;
    for name in ["low", "critical"] {
        until_one_ready(&agent, name).await;
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    assert_eq!(marks.ended(), [""; 0]);
    keelson(&agent, &["drain", "--undo"]).await;
    until_one_ready(&agent, "late").await;
    agent.end().unwrap();
}

#[tokio::test]
async fn a_drain_that_takes_too_long_continues_and_is_undone_while_pods_end() {
    let scratch = Scratch::new().unwrap();
    let (agent, marks) = start(&scratch).await;
    let output = agent.keelson(&["drain", "--stop-pods", "--timeout", "1s"]).await.unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    marks.until_ended(&agent, &["low"]).await;
    keelson(&agent, &["uncordon"]).await;
    marks.let_end("low");
    // The pod that was ending ends, and starts again; the other one was not ended.
    let again = eventually(LIMIT, "low starts again", async || marks.started().len() == 3);
    again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_one_ready(&agent, "low").await;
    until_one_ready(&agent, "critical").await;
    assert_eq!(marks.ended(), ["low"]);
    agent.end().unwrap();
}
