//! What the node and its pods use, as resource-manager reads it.

use std::time::Duration;

use futures_util::TryStreamExt as _;
use futures_util::future::try_join;
use keelson_config::ServiceName;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::resource_manager::v1::{
    CgroupStatsRequest, CgroupStatsResponse, Machine, NodeStatsRequest, NodeStatsResponse, PodStatsRequest,
    PodStatsResponse, WatchMachineRequest,
};
use tonic::{Request, Status};

use crate::App;

/// Bound of both answers together.
const WITHIN: Duration = Duration::from_secs(15);
/// Bound of what can be done without.
const SOON: Duration = Duration::from_secs(1);

/// The node and every pod that runs; with `brief` only CPU and memory. Both or neither: what is missing would be
/// taken for what is not there.
pub(crate) async fn all(
    app: &App,
    brief: bool,
) -> Result<(NodeStatsResponse, Vec<PodStatsResponse>), Status> {
    let peer = app.peer(ServiceName::ResourceManager);
    let node = async {
        let mut request = Request::new(NodeStatsRequest { cpu_and_memory_only: brief });
        request.set_timeout(WITHIN);
        Ok::<_, Status>(ResourceManagerClient::new(peer.channel()).node_stats(request).await?.into_inner())
    };
    let pods = async {
        let mut request = Request::new(PodStatsRequest { cpu_and_memory_only: brief });
        request.set_timeout(WITHIN);
        let stream = ResourceManagerClient::new(peer.channel()).pod_stats(request).await?.into_inner();
        stream.try_collect().await
    };
    both(node, pods).await
}

/// The machine, and the cgroups of the node and of every pod that runs. Both or neither.
pub(crate) async fn cgroups(app: &App) -> Result<(Machine, Vec<CgroupStatsResponse>), Status> {
    let peer = app.peer(ServiceName::ResourceManager);
    let machine = machine(app);
    let cgroups = async {
        let mut request = Request::new(CgroupStatsRequest {});
        request.set_timeout(WITHIN);
        let stream = ResourceManagerClient::new(peer.channel()).cgroup_stats(request).await?.into_inner();
        stream.try_collect().await
    };
    both(machine, cgroups).await
}

/// The machine as it is now.
async fn machine(app: &App) -> Result<Machine, Status> {
    let mut client = ResourceManagerClient::new(app.peer(ServiceName::ResourceManager).channel());
    let first = client.watch_machine(WatchMachineRequest {}).await?.into_inner().message().await?;
    first.ok_or_else(|| Status::unavailable("resource-manager has told nothing of the machine"))
}

/// The cgroup driver that is in force; none when nobody says so at once.
pub(crate) async fn cgroup_driver(app: &App) -> Option<String> {
    let machine = tokio::time::timeout(SOON, machine(app)).await.ok()?.ok()?;
    Some(machine.cgroup_driver).filter(|driver| !driver.is_empty())
}

async fn both<A, B>(
    first: impl Future<Output = Result<A, Status>>,
    second: impl Future<Output = Result<B, Status>>,
) -> Result<(A, B), Status> {
    let late = |_| {
        let text = format!("resource-manager has not told the statistics within {} s", WITHIN.as_secs());
        Err(Status::deadline_exceeded(text))
    };
    tokio::time::timeout(WITHIN, try_join(first, second)).await.unwrap_or_else(late)
}
