//! The configuration below a node's key in etcd: a whole agent, a real etcd, and the command.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::net::{Ipv4Addr, TcpListener};

use keelson_config::{Config, ServiceName};
use keelson_testkit::{Agent, EtcdCluster, Scratch, eventually};
use keelson_tests::{LIMIT, events, running, sleeper, until_ready};
use serde_json::{Value, json};

struct TestNode {
    cluster: EtcdCluster,
    agent: Agent,
    node: String,
    scratch: Scratch,
}

impl TestNode {
    /// Starts a node with one static pod and a trial of this length.
    async fn new(trial: fn(&mut keelson_testkit::AgentSpec)) -> Self {
        let scratch = Scratch::new().unwrap();
        let node = scratch.path().file_name().unwrap().to_str().unwrap().to_owned();
        let cluster = EtcdCluster::start(&scratch.path().join("e"), 1).unwrap();
        let agent = Agent::builder(&scratch.path().join("n"))
            .node_name(&node)
            .etcd(json!({"endpoints": cluster.endpoints()}))
            .configure(trial)
            .manifest("web.yaml", &sleeper("web"))
            .start()
            .await
            .unwrap();
        until_ready(&agent, &["web"]).await.unwrap();
        Self { cluster, agent, node, scratch }
    }

    /// Runs `keelson … --etcd …`; whether it succeeded, and both outputs.
    async fn keelson(&self, args: &[&str]) -> (bool, String) {
        let endpoints = self.cluster.endpoints().join(",");
        let all: Vec<&str> = args.iter().copied().chain(["--etcd", &endpoints]).collect();
        let output = self.agent.keelson(&all).await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }

    /// Applies a configuration with these fields.
    async fn apply(&self, fields: &str) -> String {
        let text =
            format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{fields}\n");
        let path = self.scratch.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        let (succeeded, output) = self.keelson(&["apply", "-f", path.to_str().unwrap()]).await;
        assert!(succeeded, "{output}");
        output
    }

    /// Waits until the command shows this state of the configuration, without the revision.
    async fn until(&self, state: &str) -> String {
        let mut last = String::new();
        let result = eventually(LIMIT, format!("the configuration is {state}"), async || {
            last = self.keelson(&["get", "config"]).await.1;
            last.starts_with(&format!("# {}: {state}", self.node))
        });
        let result = result.await;
        result.unwrap_or_else(|e| panic!("{e:#}\n{last}\n{}", self.agent.log_tail()));
        last
    }

    /// Waits until the Node allows this number of pods.
    async fn until_pods(&self, pods: &str) {
        let mut last = Value::Null;
        let result = eventually(LIMIT, format!("{pods} pods may run"), async || {
            let (_, output) = self.keelson(&["get", "node", "-o", "json"]).await;
            last = serde_json::from_str(&output).unwrap_or_default();
            last["items"][0]["status"]["allocatable"]["pods"] == pods
        });
        let result = result.await;
        result.unwrap_or_else(|e| panic!("{e:#}\n{last:#}\n{}", self.agent.log_tail()));
    }

    fn config(&self) -> Config {
        Config::load(&self.agent.spec().run_dir.join("config.json")).unwrap()
    }

    fn services(&self) -> Vec<Option<u32>> {
        ServiceName::supervised().map(|service| self.agent.service_pid(service)).collect()
    }

    async fn until_event(&self, reason: &str, text: &str) {
        let mut last = Vec::new();
        let result = eventually(LIMIT, format!("the event {reason} with {text:?}"), async || {
            last = events(&self.agent).await.unwrap_or_default();
            let is = |event: &Value| {
                event["reason"] == reason && event["message"].as_str().is_some_and(|m| m.contains(text))
            };
            last.iter().any(is)
        });
        let result = result.await;
        result.unwrap_or_else(|e| panic!("{e:#}\n{last:#?}"));
    }
}

fn short_trial(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "5s"}));
}

/// Longer than the interval of the health checks of a healthy service.
fn longer_trial(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "12s"}));
}

fn endless_trial(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "1h"}));
}

#[tokio::test]
async fn a_node_configuration_is_applied_and_removed_without_restarting_containers() {
    let test_node = TestNode::new(short_trial).await;
    let (before, services) = (running(&test_node.agent).await.unwrap(), test_node.services());
    assert_eq!(before.keys().collect::<Vec<_>>(), [&format!("web-{}/main", test_node.node)]);
    test_node.until_pods("500").await;
    assert_eq!(test_node.apply("maxPods: 7").await, format!("config created on {}\n", test_node.node));
    test_node.until("active@").await;
    test_node.until_pods("7").await;
    let provenance = &test_node.config().provenance["resources.maxPods"];
    assert!(provenance.starts_with("etcd config@") && provenance.ends_with(":3"), "{provenance}");
    assert!(services.iter().zip(test_node.services()).all(|(old, new)| *old != new && new.is_some()));
    assert_eq!(running(&test_node.agent).await.unwrap(), before, "no container was touched");
    test_node.until_event("NodeConfigApplied", "has the configuration of revision").await;
    let (_, table) = test_node.keelson(&["get", "node", "-o", "wide"]).await;
    let mut lines = table.lines();
    assert!(lines.next().unwrap().ends_with("CONFIG"), "{table}");
    assert!(lines.next().unwrap().contains(" active@"), "{table}");

    // Errors that the command knows are refused by it, others by the node, with field and line.
    let path = test_node.scratch.path().join("wrong.yaml");
    std::fs::write(
        &path,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPod: 7\n",
    )
    .unwrap();
    let (succeeded, output) = test_node.keelson(&["apply", "-f", path.to_str().unwrap()]).await;
    assert!(!succeeded && output.contains("maxPod: Unknown field"), "{output}");
    let services = test_node.services();
    assert_eq!(
        test_node.apply("maxPods: 9\ncgroupDriver: systemd").await,
        format!("config changed on {}\n", test_node.node)
    );
    let output = test_node.until("refused@").await;
    assert!(output.contains("cgroupDriver = \"systemd\" (etcd config@"), "{output}");
    assert!(output.contains(":4): this field cannot change while the agent runs"), "{output}");
    assert!(output.contains("# in force: revision "), "{output}");
    assert_eq!((test_node.services(), test_node.config().resources.max_pods), (services, 7));
    test_node.until_event("NodeConfigRefused", "cgroupDriver").await;

    let (succeeded, output) = test_node.keelson(&["delete", "config"]).await;
    assert!(succeeded && output == format!("config deleted on {}\n", test_node.node), "{output}");
    test_node.until_pods("500").await;
    let gone = format!("There is no configuration under the key of the node {}", test_node.node);
    let (_, output) = test_node.keelson(&["get", "config", "--node", &test_node.node]).await;
    assert!(output.contains(&gone), "{output}");
    assert_eq!(running(&test_node.agent).await.unwrap(), before, "no container was touched");
    test_node.agent.end().unwrap();
}

#[tokio::test]
async fn a_configuration_that_makes_a_service_unhealthy_is_rolled_back() {
    let test_node = TestNode::new(longer_trial).await;
    let before = running(&test_node.agent).await.unwrap();
    test_node.apply("maxPods: 7").await;
    test_node.until("active@").await;
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    test_node.apply(&format!("maxPods: 8\nhealthzPort: {port}")).await;
    test_node.until("trial@").await;
    let output = test_node.until("refused@").await;
    assert!(
        output.contains("node-api is degraded: ") && output.contains(&format!("port {port} is taken")),
        "{output}"
    );
    let config = test_node.config();
    assert_eq!(
        (config.resources.max_pods, config.api.healthz_port),
        (7, test_node.agent.spec().healthz_port)
    );
    test_node.until_pods("7").await;
    assert_eq!(running(&test_node.agent).await.unwrap(), before, "no container was touched");
    test_node.until_event("NodeConfigRefused", "node-api is degraded").await;
    test_node.agent.end().unwrap();
}

#[tokio::test]
async fn an_agent_killed_during_a_trial_continues_it_without_etcd_and_rolls_back() {
    let mut test_node = TestNode::new(endless_trial).await;
    let before = running(&test_node.agent).await.unwrap();
    test_node.apply("maxPods: 7").await;
    test_node.until("trial@").await;
    test_node.cluster.kill(0);
    for pods in [7, 7, 500] {
        test_node.agent.kill_init();
        test_node.agent.start().await.unwrap();
        // Services that it starts have the configuration; until then the sockets may be those of the previous services.
        eventually(LIMIT, "init has started its services", async || {
            test_node.services().iter().all(Option::is_some)
        })
        .await
        .unwrap();
        assert_eq!(test_node.config().resources.max_pods, pods);
        assert_eq!(running(&test_node.agent).await.unwrap(), before, "no container was touched");
    }
    test_node.cluster.restart(0).unwrap();
    let output = test_node.until("refused@").await;
    assert!(output.contains("init was started 3 times during the trial"), "{output}");
    test_node.until_pods("500").await;
    test_node.agent.end().unwrap();
}
