//! An agent in its own cluster: a real API server, and the view of kubectl on the node and its pods.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::PathBuf;
use std::time::Duration;

use keelson_testkit::{
    Agent, AgentSpec, BUSYBOX_IMAGE, KubeApiServer, KubeOptions, NodeFilter, Relay, Scratch, eventually,
};
use serde_json::{Value, json};

/// Time limit of every wait, with room for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The namespace of the tests' pods.
pub const NAMESPACE: &str = "apps";

/// An API server and an agent that is its node.
#[derive(Debug)]
pub struct Cluster {
    /// The agent.
    pub agent: Agent,
    /// The API server.
    pub server: KubeApiServer,
    /// The node's name.
    pub node: String,
    /// Checks the node's requests, if the test uses it.
    _filter: Option<Filter>,
}

/// Fails the test at its end if the node has sent a forbidden request.
#[derive(Debug)]
struct Filter(NodeFilter);

impl Drop for Filter {
    fn drop(&mut self) {
        // Objects that do not exist, or no longer, are forbidden, too.
        let is_missing = |message: &str| message.contains("no relationship found");
        let mut refusals = self.0.take_refusals();
        refusals.retain(|refusal| refusal.code == 403 && !is_missing(&refusal.message));
        assert!(std::thread::panicking() || refusals.is_empty(), "{refusals:#?}");
    }
}

impl Cluster {
    /// Starts both and waits until the node is Ready. The node may send only what a current cluster permits, even on an
    /// older server.
    ///
    /// # Panics
    /// The node does not become Ready.
    pub async fn start(scratch: &Scratch, configure: fn(&mut AgentSpec)) -> Self {
        let (server, node) = Self::server(scratch);
        let filter = NodeFilter::start(&server, &node).unwrap();
        let kubeconfig = filter.kubeconfig(scratch.path()).unwrap();
        Self::start_with(scratch, configure, (server, node), kubeconfig, Some(Filter(filter))).await
    }

    /// Starts both with a relay between them that can be cut, and waits until the node is Ready. kubectl does not use
    /// the relay.
    ///
    /// # Panics
    /// The node does not become Ready.
    pub async fn start_behind_relay(scratch: &Scratch) -> (Self, Relay) {
        let (server, node) = Self::server(scratch);
        let relay = server.relay().unwrap();
        let user = format!("system:node:{node}");
        let kubeconfig = server.kubeconfig_via(relay.address(), &user, &["system:nodes"]).unwrap();
        (Self::start_with(scratch, |_| (), (server, node), kubeconfig, None).await, relay)
    }

    /// Wraps a server and an agent that are already running.
    pub fn of(agent: Agent, server: KubeApiServer, node: String) -> Self {
        Self { agent, server, node, _filter: None }
    }

    fn server(scratch: &Scratch) -> (KubeApiServer, String) {
        let server = KubeApiServer::start(&scratch.path().join("k"), KubeOptions::default()).unwrap();
        server.namespace(NAMESPACE).unwrap();
        (server, format!("test-{:08x}", std::process::id()))
    }

    async fn start_with(
        scratch: &Scratch,
        configure: fn(&mut AgentSpec),
        (server, node): (KubeApiServer, String),
        kubeconfig: PathBuf,
        filter: Option<Filter>,
    ) -> Self {
        let agent = Agent::builder(scratch.path())
            .node_name(&node)
            .kubeconfig(kubeconfig)
            .configure(configure)
            .start()
            .await
            .unwrap();
        let cluster = Self { agent, server, node, _filter: filter };
        cluster.until("the node is Ready", || cluster.node_is_ready()).await;
        cluster
    }

    /// Waits until a condition holds.
    ///
    /// # Panics
    /// It does not within [`LIMIT`]; the message has the agent's log.
    pub async fn until(&self, what: &str, is_true: impl Fn() -> bool) {
        let result = eventually(LIMIT, what, async || is_true());
        result.await.unwrap_or_else(|error| panic!("{error:#}\n{}", self.agent.log_tail()));
    }

    /// An object from the server; `None` if there is none.
    pub fn get(&self, kind: &str, name: &str) -> Option<Value> {
        self.server.kubectl_json(&["-n", NAMESPACE, "get", kind, name]).ok()
    }

    /// A pod.
    pub fn pod(&self, name: &str) -> Option<Value> {
        self.get("pod", name)
    }

    /// Whether the Node is Ready on the server.
    pub fn node_is_ready(&self) -> bool {
        self.get("node", &self.node).is_some_and(|node| condition(&node, "Ready") == "True")
    }

    /// Whether a pod is Ready on the server.
    pub fn is_ready(&self, name: &str) -> bool {
        self.pod(name).is_some_and(|pod| condition(&pod, "Ready") == "True")
    }

    /// Runs kubectl, which must succeed.
    ///
    /// # Panics
    /// It fails.
    pub fn kubectl(&self, args: &[&str]) -> String {
        let all: Vec<&str> = ["-n", NAMESPACE].iter().chain(args).copied().collect();
        let output = self.server.kubectl(&all).unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The restart count of a pod's only container on the server; `None` without pod or status.
    pub fn restart_count(&self, name: &str) -> Option<u64> {
        self.pod(name)?["status"]["containerStatuses"][0]["restartCount"].as_u64()
    }

    /// Creates a pod that is bound to the node.
    ///
    /// # Panics
    /// The server refuses.
    pub fn run(&self, pod: &Value) {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = self.node.clone().into();
        self.server.apply(&pod).unwrap();
    }
}

/// The status of a condition; empty if the object does not have it.
pub fn condition(object: &Value, kind: &str) -> String {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.filter(|condition| condition["type"] == kind).find_map(|c| c["status"].as_str());
    found.unwrap_or_default().to_owned()
}

/// A pod that sleeps and ends at once on SIGTERM.
pub fn sleeper(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", format!("echo hello from {name}; trap exit TERM; sleep 1000000 & wait")],
            }],
        },
    })
}
