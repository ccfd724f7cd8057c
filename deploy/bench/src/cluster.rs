//! An API server with the agent as its only node.

use std::path::Path;
use std::time::Duration;

use keelson_testkit::{Agent, KubeApiServer, KubeOptions, eventually};

use crate::progress::Progress;

/// The namespace of everything that is measured.
pub const NAMESPACE: &str = "bench";
/// How long the node may take to be registered.
const REGISTERED_WITHIN: Duration = Duration::from_secs(300);

/// Both of them; they end when they are dropped.
pub struct Cluster {
    /// The server.
    pub server: KubeApiServer,
    /// The node's agent, with a containerd of its own.
    pub agent: Agent,
    /// Name of the node.
    pub node: String,
}

impl Cluster {
    /// Starts both in `folder` and waits until the node is registered.
    pub async fn start(folder: &Path, progress: &Progress) -> anyhow::Result<Self> {
        progress.say(
            "starting an API server, a private containerd and the agent; the first API server is built, which takes minutes",
        );
        let node = format!("bench-{:06x}", fastrand::u32(..1 << 24));
        let below = folder.join("kube");
        let server =
            tokio::task::spawn_blocking(move || KubeApiServer::start(&below, KubeOptions::default()))
                .await??;
        server.namespace(NAMESPACE)?;
        let kubeconfig = server.node_kubeconfig(&node)?;
        let agent = Agent::builder(folder).node_name(&node).kubeconfig(kubeconfig).start().await?;
        eventually(REGISTERED_WITHIN, "the node is there", async || {
            server.kubectl_json(&["get", "node", &node]).is_ok()
        })
        .await?;
        Ok(Self { server, agent, node })
    }
}
