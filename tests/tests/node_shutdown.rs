//! A graceful shutdown of the node (node-and-api.md §11): systemd-logind is a fake on a message bus of the test's own.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::fs;

use keelson_config::ServiceName;
use keelson_testkit::logind::{Behaviour, FakeLogind, Machine, PATIENT, soon};
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually};
use keelson_tests::ending::{Marks, condition, until_node, until_pod};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, running, sleeper, until_event};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::process::Child;

/// An agent that delays a shutdown, with a pod of low and one of high priority.
struct Node {
    agent: Agent,
    logind: FakeLogind,
    marks: Marks,
    /// The inhibitor of the agent.
    inhibitor: pipe::Receiver,
    _bus: Child,
}

impl Node {
    async fn start(scratch: &Scratch) -> Self {
        let machine = Machine::new(scratch.path());
        let bus = machine.start_bus().await;
        let mut logind = FakeLogind::start(&machine, Behaviour { limit_seconds: 1200, ..PATIENT }).await;
        let marks = Marks::below(scratch.path());
        let group = |priority| json!({"priority": priority, "shutdownGracePeriodSeconds": 600});
        let address = format!("unix:path={}", machine.socket().display());
        let agent = Agent::builder(scratch.path())
            .fields(&json!({"shutdownGracePeriodByPodPriority": [group(0), group(1000)]}))
            .keelson_field("systemBusAddress", address.into())
            .manifest("low.yaml", &marks.pod("low", 0))
            .manifest("high.yaml", &marks.pod("high", 1000))
            .start()
            .await
            .unwrap();
        for name in ["low", "high"] {
            until_one_ready(&agent, name).await;
        }
        let inhibitor = soon(logind.inhibitors.recv()).await.unwrap();
        Self { agent, logind, marks, inhibitor, _bus: bus }
    }

    fn holds_inhibitor(&self) -> bool {
        self.inhibitor.try_read(&mut [0]).is_err()
    }

    async fn until_released(&mut self) {
        assert_eq!(soon(self.inhibitor.read(&mut [0])).await.unwrap(), 0);
    }

    async fn until_not_ready(&self) {
        let node =
            until_node(&self.agent, "is not ready", |node| condition(node, "Ready")["status"] == "False");
        let ready = condition(&node.await, "Ready").clone();
        assert_eq!(ready["reason"], "KubeletNotReady", "{ready:#}");
        assert!(ready["message"].as_str().unwrap().contains("node is shutting down"), "{ready:#}");
    }

    async fn until_ready(&self) {
        until_node(&self.agent, "is ready", |node| condition(node, "Ready")["status"] == "True").await;
    }

    /// Waits until a pod was ended by the shutdown.
    async fn until_failed(&self, name: &str) {
        const TEXT: &str = "Pod was terminated in response to imminent node shutdown.";
        let pod = until_pod(&self.agent, name, "has failed", |pod| pod["status"]["phase"] == "Failed").await;
        let status = &pod["status"];
        assert_eq!((&status["reason"], &status["message"]), (&json!("Terminated"), &json!(TEXT)), "{pod:#}");
        let target = condition(&pod, "DisruptionTarget");
        assert_eq!(
            [&target["status"], &target["reason"], &target["message"]],
            [&json!("True"), &json!("TerminationByKubelet"), &json!(TEXT)],
            "{pod:#}"
        );
    }

    /// Adds a pod, and waits until it is refused.
    async fn until_refused(&self, name: &str) {
        self.agent.write_manifest(&format!("{name}.yaml"), &sleeper(name)).unwrap();
        let refused = |pod: &Value| pod["status"]["reason"] == "NodeShutdown";
        let pod = until_pod(&self.agent, name, "is refused", refused).await;
        assert_eq!(pod["status"]["phase"], "Pending", "a static pod waits: {pod:#}");
        until_event(&self.agent, "NodeShutdown", "Pod was rejected as the node is shutting down.")
            .await
            .unwrap();
    }

    async fn runs(&self, name: &str) -> bool {
        let key = format!("{name}-{}/main", self.agent.spec().node_name);
        running(&self.agent).await.unwrap().contains_key(&key)
    }

    fn state_file(&self) -> Value {
        let file = self.agent.spec().root_dir.join("graceful_node_shutdown_state");
        fs::read(file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }
}

#[tokio::test]
async fn pods_end_by_priority_and_the_inhibitor_is_released_after_the_last() {
    let scratch = Scratch::new().unwrap();
    let mut node = Node::start(&scratch).await;
    node.logind.signal(true).await;
    node.marks.until_ended(&node.agent, &["low"]).await;
    until_event(&node.agent, "Shutdown", "Shutdown manager detected shutdown event").await.unwrap();
    node.until_not_ready().await;
    node.until_refused("late").await;
    assert!(node.runs("high").await && node.holds_inhibitor());

    node.marks.let_end("low");
    node.until_failed("low").await;
    node.marks.until_ended(&node.agent, &["low", "high"]).await;
    assert!(node.holds_inhibitor());
    node.marks.let_end("high");
    node.until_failed("high").await;
    node.until_released().await;
    assert!(node.state_file()["endTime"].as_str().unwrap() > "2020", "{}", node.state_file());
    assert!(!node.runs("late").await);

    // The machine did not stop: pods that have ended stay so, and others start.
    node.logind.signal(false).await;
    node.inhibitor = soon(node.logind.inhibitors.recv()).await.unwrap();
    until_event(&node.agent, "Shutdown", "Shutdown manager detected shutdown cancellation").await.unwrap();
    node.until_ready().await;
    until_one_ready(&node.agent, "late").await;
    assert!(node.holds_inhibitor());
    for name in ["low", "high"] {
        node.until_failed(name).await;
    }
    node.agent.end().unwrap();
}

#[tokio::test]
async fn a_cancelled_shutdown_spares_the_next_group_and_admits_pods_again() {
    let scratch = Scratch::new().unwrap();
    let mut node = Node::start(&scratch).await;
    node.logind.signal(true).await;
    node.marks.until_ended(&node.agent, &["low"]).await;
    node.until_refused("late").await;
    node.logind.signal(false).await;
    node.inhibitor = soon(node.logind.inhibitors.recv()).await.unwrap();
    node.until_ready().await;
    until_one_ready(&node.agent, "late").await;
    node.marks.let_end("low");
    node.until_failed("low").await;
    assert!(node.runs("high").await);
    assert_eq!(node.marks.ended(), ["low"]);

    // The next shutdown ends what still runs.
    node.logind.signal(true).await;
    node.marks.let_end("high");
    node.marks.until_ended(&node.agent, &["low", "high"]).await;
    node.until_released().await;
    node.until_failed("late").await;
    node.agent.end().unwrap();
}

#[tokio::test]
async fn a_kill_of_resource_manager_in_the_middle_of_a_shutdown_changes_no_order() {
    let scratch = Scratch::new().unwrap();
    let mut node = Node::start(&scratch).await;
    node.logind.signal(true).await;
    node.marks.until_ended(&node.agent, &["low"]).await;
    let before = node.agent.service(ServiceName::ResourceManager).unwrap();
    before.signal(Signal::KILL);
    node.until_released().await;
    let restarted = eventually(LIMIT, "resource-manager runs again", async || {
        node.agent.service(ServiceName::ResourceManager).is_some_and(|now| now != before)
    });
    restarted.await.unwrap_or_else(|e| panic!("{e:#}\n{}", node.agent.log_tail()));
    node.until_refused("late").await;
    node.until_not_ready().await;
    assert!(node.runs("high").await);
    assert_eq!(node.marks.ended(), ["low"]);

    node.marks.let_end("low");
    node.until_failed("low").await;
    node.marks.until_ended(&node.agent, &["low", "high"]).await;
    node.marks.let_end("high");
    node.until_failed("high").await;
    let ended = || node.state_file()["endTime"].as_str().is_some_and(|end| end > "2020");
    eventually(LIMIT, "the end is stored", async || ended()).await.unwrap();
    assert_eq!(node.marks.started().len(), 2, "nothing started again");
    node.logind.signal(false).await;
    soon(node.logind.inhibitors.recv()).await.unwrap();
    node.until_ready().await;
    until_one_ready(&node.agent, "late").await;
    node.agent.end().unwrap();
}
