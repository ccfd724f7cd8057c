//! The configuration under a node's key: a whole agent, a real etcd, and the command.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::net::{Ipv4Addr, TcpListener};

use keelson_config::{Config, ServiceName};
use keelson_testkit::{Agent, EtcdCluster, Scratch, eventually};
use keelson_tests::{LIMIT, events, running, sleeper, until_ready};
use serde_json::{Value, json};

struct Scene {
    cluster: EtcdCluster,
    agent: Agent,
    node: String,
    scratch: Scratch,
}

impl Scene {
    /// A node with one pod of its own that runs, and so long a trial.
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

    /// Runs `keelson … --etcd …`; what it says on both outputs, and whether it went well.
    async fn keelson(&self, args: &[&str]) -> (bool, String) {
        let endpoints = self.cluster.endpoints().join(",");
        let all: Vec<&str> = args.iter().copied().chain(["--etcd", &endpoints]).collect();
        let output = self.agent.keelson(&all).await.unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }

    /// Applies a configuration with these fields.
    async fn apply(&self, fields: &str) -> String {
        let text =
            format!("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{fields}\n");
        let path = self.scratch.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        let (good, said) = self.keelson(&["apply", "-f", path.to_str().unwrap()]).await;
        assert!(good, "{said}");
        said
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

    /// Waits until the Node says that so many pods may run.
    async fn until_pods(&self, pods: &str) {
        let mut last = Value::Null;
        let result = eventually(LIMIT, format!("{pods} pods may run"), async || {
            let (_, said) = self.keelson(&["get", "node", "-o", "json"]).await;
            last = serde_json::from_str(&said).unwrap_or_default();
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

fn short(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "5s"}));
}

/// Longer than a service that is well may be asked nothing.
fn longer(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "12s"}));
}

fn endless(spec: &mut keelson_testkit::AgentSpec) {
    spec.keelson.insert("nodeConfiguration".to_owned(), json!({"trialPeriod": "1h"}));
}

#[tokio::test]
async fn a_configuration_takes_effect_under_running_containers_and_goes_with_its_key() {
    let scene = Scene::new(short).await;
    let (before, services) = (running(&scene.agent).await.unwrap(), scene.services());
    assert_eq!(before.keys().collect::<Vec<_>>(), [&format!("web-{}/main", scene.node)]);
    scene.until_pods("500").await;
    assert_eq!(scene.apply("maxPods: 7").await, format!("config created on {}\n", scene.node));
    scene.until("active@").await;
    scene.until_pods("7").await;
    let provenance = &scene.config().provenance["resources.maxPods"];
    assert!(provenance.starts_with("etcd config@") && provenance.ends_with(":3"), "{provenance}");
    assert!(services.iter().zip(scene.services()).all(|(old, new)| *old != new && new.is_some()));
    assert_eq!(running(&scene.agent).await.unwrap(), before, "no container was touched");
    scene.until_event("NodeConfigApplied", "has the configuration of revision").await;
    let (_, table) = scene.keelson(&["get", "node", "-o", "wide"]).await;
    let mut lines = table.lines();
    assert!(lines.next().unwrap().ends_with("CONFIG"), "{table}");
    assert!(lines.next().unwrap().contains(" active@"), "{table}");

    // What is wrong is refused by the command where it knows it, else by the node, with field and line.
    let path = scene.scratch.path().join("wrong.yaml");
    std::fs::write(
        &path,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPod: 7\n",
    )
    .unwrap();
    let (good, said) = scene.keelson(&["apply", "-f", path.to_str().unwrap()]).await;
    assert!(!good && said.contains("maxPod: Unknown field"), "{said}");
    let services = scene.services();
    assert_eq!(
        scene.apply("maxPods: 9\ncgroupDriver: systemd").await,
        format!("config changed on {}\n", scene.node)
    );
    let said = scene.until("refused@").await;
    assert!(said.contains("cgroupDriver = \"systemd\" (etcd config@"), "{said}");
    assert!(said.contains(":4): this field cannot change while the agent runs"), "{said}");
    assert!(said.contains("# in force: revision "), "{said}");
    assert_eq!((scene.services(), scene.config().resources.max_pods), (services, 7));
    scene.until_event("NodeConfigRefused", "cgroupDriver").await;

    let (good, said) = scene.keelson(&["delete", "config"]).await;
    assert!(good && said == format!("config deleted on {}\n", scene.node), "{said}");
    scene.until_pods("500").await;
    let gone = format!("There is no configuration under the key of the node {}", scene.node);
    let (_, said) = scene.keelson(&["get", "config", "--node", &scene.node]).await;
    assert!(said.contains(&gone), "{said}");
    assert_eq!(running(&scene.agent).await.unwrap(), before, "no container was touched");
    scene.agent.end().unwrap();
}

#[tokio::test]
async fn a_configuration_with_which_a_service_is_ill_is_taken_back() {
    let scene = Scene::new(longer).await;
    let before = running(&scene.agent).await.unwrap();
    scene.apply("maxPods: 7").await;
    scene.until("active@").await;
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    scene.apply(&format!("maxPods: 8\nhealthzPort: {port}")).await;
    scene.until("trial@").await;
    let said = scene.until("refused@").await;
    assert!(
        said.contains("node-api is degraded: ") && said.contains(&format!("port {port} is taken")),
        "{said}"
    );
    let config = scene.config();
    assert_eq!((config.resources.max_pods, config.api.healthz_port), (7, scene.agent.spec().healthz_port));
    scene.until_pods("7").await;
    assert_eq!(running(&scene.agent).await.unwrap(), before, "no container was touched");
    scene.until_event("NodeConfigRefused", "node-api is degraded").await;
    scene.agent.end().unwrap();
}

#[tokio::test]
async fn an_agent_that_is_killed_while_it_tries_one_goes_on_without_etcd_and_gives_up_in_the_end() {
    let mut scene = Scene::new(endless).await;
    let before = running(&scene.agent).await.unwrap();
    scene.apply("maxPods: 7").await;
    scene.until("trial@").await;
    scene.cluster.kill(0);
    for pods in [7, 7, 500] {
        scene.agent.kill_init();
        scene.agent.start().await.unwrap();
        // What it starts has the configuration; until then the sockets may be those of the services before.
        eventually(LIMIT, "init has started its services", async || {
            scene.services().iter().all(Option::is_some)
        })
        .await
        .unwrap();
        assert_eq!(scene.config().resources.max_pods, pods);
        assert_eq!(running(&scene.agent).await.unwrap(), before, "no container was touched");
    }
    scene.cluster.restart(0).unwrap();
    let said = scene.until("refused@").await;
    assert!(said.contains("init was started 3 times during the trial"), "{said}");
    scene.until_pods("500").await;
    scene.agent.end().unwrap();
}
