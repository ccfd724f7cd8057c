//! A cluster of one API server and the agent as its only node.

use std::path::Path;
use std::time::Duration;

use keelson_testkit::{Agent, KubeApiServer, KubeOptions, eventually};

use crate::progress::Progress;

/// The namespace of the measured objects.
pub const NAMESPACE: &str = "bench";
/// How long the registration of the node may take.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(300);

/// The API server and the agent. Both end when they are dropped.
pub struct Cluster {
    /// The API server.
    pub server: KubeApiServer,
    /// The node's agent with a private containerd.
    pub agent: Agent,
    /// The name of the node.
    pub node: String,
}

impl Cluster {
    /// Starts both in `folder` and waits until the node is registered.
    pub async fn start(folder: &Path, progress: &Progress) -> anyhow::Result<Self> {
        progress.print(
            "starting an API server, a private containerd and the agent; on the first run this builds the API server, which takes \
             minutes",
        );
        let node = format!("bench-{:06x}", fastrand::u32(..1 << 24));
        let below = folder.join("kube");
        let server =
            tokio::task::spawn_blocking(move || KubeApiServer::start(&below, KubeOptions::default()))
                .await??;
        server.namespace(NAMESPACE)?;
        let kubeconfig = server.node_kubeconfig(&node)?;
        let agent = Agent::builder(folder).node_name(&node).kubeconfig(kubeconfig).start().await?;
        eventually(REGISTRATION_LIMIT, "the node is registered", async || {
            server.kubectl_json(&["get", "node", &node]).is_ok()
        })
        .await?;
        Ok(Self { server, agent, node })
    }
}
