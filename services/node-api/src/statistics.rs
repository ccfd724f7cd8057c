//! Usage statistics of the node and its pods, from resource-manager.

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

/// How long two calls together may take.
const DEADLINE: Duration = Duration::from_secs(15);
/// How long an optional call may take.
const SHORT_DEADLINE: Duration = Duration::from_secs(1);

/// The statistics of the node and of all running pods. If one of the two calls fails, both do: a client could not tell missing
/// statistics from missing pods.
pub(crate) async fn all(
    app: &App,
    cpu_and_memory_only: bool,
) -> Result<(NodeStatsResponse, Vec<PodStatsResponse>), Status> {
    let peer = app.peer(ServiceName::ResourceManager);
    let node = async {
        let mut request = Request::new(NodeStatsRequest { cpu_and_memory_only });
        request.set_timeout(DEADLINE);
        Ok::<_, Status>(ResourceManagerClient::new(peer.channel()).node_stats(request).await?.into_inner())
    };
    let pods = async {
        let mut request = Request::new(PodStatsRequest { cpu_and_memory_only });
        request.set_timeout(DEADLINE);
        let stream = ResourceManagerClient::new(peer.channel()).pod_stats(request).await?.into_inner();
        stream.try_collect().await
    };
    both(node, pods).await
}

/// The machine, and the cgroups of the node and of all running pods. If one of the two calls fails, both do.
pub(crate) async fn cgroups(app: &App) -> Result<(Machine, Vec<CgroupStatsResponse>), Status> {
    let peer = app.peer(ServiceName::ResourceManager);
    let machine = machine(app);
    let cgroups = async {
        let mut request = Request::new(CgroupStatsRequest {});
        request.set_timeout(DEADLINE);
        let stream = ResourceManagerClient::new(peer.channel()).cgroup_stats(request).await?.into_inner();
        stream.try_collect().await
    };
    both(machine, cgroups).await
}

/// The current description of the machine.
async fn machine(app: &App) -> Result<Machine, Status> {
    let mut client = ResourceManagerClient::new(app.peer(ServiceName::ResourceManager).channel());
    let first = client.watch_machine(WatchMachineRequest {}).await?.into_inner().message().await?;
    first.ok_or_else(|| {
        Status::unavailable("resource-manager ended its stream without describing the machine")
    })
}

/// The effective cgroup driver; `None` if resource-manager does not answer in time.
pub(crate) async fn cgroup_driver(app: &App) -> Option<String> {
    let machine = tokio::time::timeout(SHORT_DEADLINE, machine(app)).await.ok()?.ok()?;
    Some(machine.cgroup_driver).filter(|driver| !driver.is_empty())
}

async fn both<A, B>(
    first: impl Future<Output = Result<A, Status>>,
    second: impl Future<Output = Result<B, Status>>,
) -> Result<(A, B), Status> {
    let timeout_error = |_| {
        let text = format!("resource-manager did not send the statistics within {} s", DEADLINE.as_secs());
        Err(Status::deadline_exceeded(text))
    };
    tokio::time::timeout(DEADLINE, try_join(first, second)).await.unwrap_or_else(timeout_error)
}
