//! Direct CRI calls to containerd: its sandboxes and containers, and their removal.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{
    ListContainersRequest, ListPodSandboxRequest, PodSandboxState, RemovePodSandboxRequest,
    StopPodSandboxRequest, VersionRequest,
};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Response, Status};

/// The deadline of a call. containerd under load needs seconds for one.
const CALL_LIMIT: Duration = Duration::from_secs(120);

/// The number of concurrent calls.
pub const WORKERS: usize = 8;

/// A client of containerd's CRI.
pub type Cri = RuntimeServiceClient<Channel>;

/// Awaits a call with a deadline. `name` is the name of the call in errors.
pub async fn call<T>(
    name: &str,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> anyhow::Result<T> {
    let answer = tokio::time::timeout(CALL_LIMIT, call).await;
    let answer = answer.with_context(|| format!("{name} has no answer after {} s", CALL_LIMIT.as_secs()))?;
    Ok(answer.map_err(|status| anyhow::anyhow!("{name}: {}", status.message()))?.into_inner())
}

/// Makes a first call, so that later timed calls find an open connection.
pub async fn connect(cri: &mut Cri) -> anyhow::Result<()> {
    call("Version", cri.version(VersionRequest::default())).await.map(drop)
}

/// The ids of all sandboxes and containers in any state.
pub async fn ids(cri: &mut Cri) -> anyhow::Result<BTreeSet<String>> {
    let sandboxes = call("ListPodSandbox", cri.list_pod_sandbox(ListPodSandboxRequest::default())).await?;
    let containers = call("ListContainers", cri.list_containers(ListContainersRequest::default())).await?;
    let sandboxes = sandboxes.items.into_iter().map(|sandbox| sandbox.id);
    Ok(sandboxes.chain(containers.containers.into_iter().map(|container| container.id)).collect())
}

/// The number of running sandboxes.
pub async fn ready_sandboxes(cri: &mut Cri) -> anyhow::Result<usize> {
    let list = call("ListPodSandbox", cri.list_pod_sandbox(ListPodSandboxRequest::default())).await?;
    let ready = |state| state == PodSandboxState::SandboxReady as i32;
    Ok(list.items.iter().filter(|sandbox| ready(sandbox.state)).count())
}

/// Stops and removes every sandbox with its containers.
///
/// # Errors
/// A call fails, or containerd still has sandboxes or containers afterwards.
pub async fn remove_all(cri: &mut Cri) -> anyhow::Result<()> {
    let list = call("ListPodSandbox", cri.list_pod_sandbox(ListPodSandboxRequest::default())).await?;
    let mut ids = list.items.into_iter().map(|sandbox| sandbox.id);
    let mut removing = JoinSet::new();
    loop {
        while removing.len() < WORKERS
            && let Some(id) = ids.next()
        {
            removing.spawn(remove(cri.clone(), id));
        }
        let Some(removed) = removing.join_next().await else { break };
        removed.context("removing a sandbox panicked")??;
    }
    let left = self::ids(cri).await?;
    ensure!(left.is_empty(), "containerd still has {} sandboxes and containers", left.len());
    Ok(())
}

async fn remove(mut cri: Cri, id: String) -> anyhow::Result<()> {
    let request = StopPodSandboxRequest { pod_sandbox_id: id.clone() };
    call("StopPodSandbox", cri.stop_pod_sandbox(request)).await?;
    let request = RemovePodSandboxRequest { pod_sandbox_id: id };
    call("RemovePodSandbox", cri.remove_pod_sandbox(request)).await.map(drop)
}
