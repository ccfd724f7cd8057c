//! The calls that a resize makes: resource-manager decides and changes the cgroup of the pod, the runtime updates containers
//! (runtime-and-resources.md §13.2).

use std::time::Duration;

use k8s_cri::v1 as cri;
use keelson_pod_sync_core::config::{LinuxResources, MachineInputs, container_resources, sandbox_resources};
use keelson_pod_sync_core::resize::{BELOW_USAGE, ContainerResize};
use keelson_proto::keelson::resource_manager::v1 as resource;
use keelson_proto::keelson::resource_manager::v1::resize_pod_response::Verdict;
use keelson_service_kit::status::reason;
use prost::Message;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::effects::convert::resources;
use crate::error::SyncError;
use crate::state::desired_state::requests_of;
use crate::state::pod_state::DesiredPod;

/// The deadline of one call to resource-manager; it is made again while the answer is outstanding.
const CALL: Duration = Duration::from_secs(15);
const SANDBOX_PATH: &str = "/runtime.v1.RuntimeService/UpdatePodSandboxResources";

/// CRI `UpdatePodSandboxResourcesRequest`, which `k8s_cri` lacks.
#[derive(Clone, PartialEq, Message)]
struct SandboxResources {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    overhead: Option<cri::LinuxContainerResources>,
    #[prost(message, optional, tag = "3")]
    resources: Option<cri::LinuxContainerResources>,
}

/// CRI `UpdatePodSandboxResourcesResponse`, which is empty.
#[derive(Clone, PartialEq, Message)]
struct Nothing {}

/// What resource-manager says about a resize.
pub enum Answer {
    /// The pod holds the resources.
    Accepted,
    /// The node has no room.
    Rejected(resource::Rejected),
    /// This pod is not decided on yet, for this reason.
    NotYet(String),
}

/// Asks whether the node has room for `wanted`, which then holds the resources.
///
/// # Errors
/// resource-manager does not answer: there is no point in asking about another pod.
pub async fn ask(
    effects: &Effects,
    desired: &DesiredPod,
    wanted: &keelson_kube_model::Pod,
) -> Result<Answer, SyncError> {
    let request = resource::ResizePodRequest {
        uid: wanted.metadata.uid.clone(),
        revision: desired.revision,
        requests: requests_of(wanted),
    };
    match effects.clients.resources().resize_pod(bounded(request, CALL)).await {
        Ok(answer) => Ok(match answer.into_inner().verdict {
            Some(Verdict::Accepted(_)) => Answer::Accepted,
            Some(Verdict::Rejected(rejected)) => Answer::Rejected(rejected),
            Some(Verdict::NotYet(wait)) => Answer::NotYet(wait.message),
            None => Answer::NotYet("resource-manager returned no verdict".to_owned()),
        }),
        Err(status) => {
            let error = SyncError::from_status("cannot ask for a resize", &status);
            // Only resource-manager itself gives a reason.
            let is_answer = !error.peer_unavailable || reason(&status).is_some();
            if is_answer { Ok(Answer::NotYet(error.message)) } else { Err(error) }
        }
    }
}

/// Waits until the cgroup of the pod has these values.
///
/// # Errors
/// resource-manager does not answer, cannot write them, or refuses a memory limit that is not above what the pod uses.
pub async fn cgroup(
    effects: &Effects,
    desired: &DesiredPod,
    values: resource::PodCgroup,
) -> Result<(), SyncError> {
    let request = resource::PreparePodRequest {
        uid: desired.pod.metadata.uid.clone(),
        revision: desired.revision,
        cgroup: Some(values),
    };
    let answer = effects.clients.resources().prepare_pod(bounded(request, CALL)).await;
    answer.map(|_| ()).map_err(|status| match (status.code(), reason(&status).as_deref()) {
        (Code::FailedPrecondition, Some("LIMIT_BELOW_USAGE")) => SyncError::new(status.message()),
        // Not the fault of the resize: the pod is not admitted yet, or the tree of cgroups is not usable.
        (Code::FailedPrecondition, _) => SyncError::unavailable(status.message()),
        _ => SyncError::from_status("the cgroup of the pod is not updated yet", &status),
    })
}

/// Announces the resources of the whole pod to the runtime, for those that give them to a virtual machine. A runtime without this call
/// is fine, and one that refuses it does not keep the containers from being updated (runtime-and-resources.md §13.2).
///
/// # Errors
/// The runtime does not answer.
pub async fn announce(
    effects: &Effects,
    sandbox_id: &str,
    pod: &keelson_kube_model::Pod,
    machine: &MachineInputs<'_>,
) -> Result<(), SyncError> {
    let (overhead, sum) = sandbox_resources(pod, machine);
    let message = SandboxResources {
        pod_sandbox_id: sandbox_id.to_owned(),
        overhead: overhead.map(resources),
        resources: Some(resources(sum)),
    };
    let Err(status) = call_sandbox(effects, message).await else { return Ok(()) };
    if is_unimplemented(&status) {
        return Ok(());
    }
    let what = "cannot announce the resources of the pod to the runtime";
    let error = SyncError::from_status(what, &status);
    if error.peer_unavailable {
        return Err(error);
    }
    tracing::warn!(uid = pod.metadata.uid, "{}; its containers are resized nevertheless", error.message);
    Ok(())
}

async fn call_sandbox(effects: &Effects, message: SandboxResources) -> Result<(), Status> {
    let mut call = Request::new(message);
    call.set_timeout(effects.clients.cri_timeout);
    let mut client = tonic::client::Grpc::new(effects.clients.runtime_channel());
    client.ready().await?;
    let codec = ProstCodec::<SandboxResources, Nothing>::default();
    client.unary(call, http::uri::PathAndQuery::from_static(SANDBOX_PATH), codec).await.map(|_| ())
}

/// containerd 2.1 knows the call and answers Unknown (runtime-and-resources.md §2.2).
fn is_unimplemented(status: &Status) -> bool {
    status.code() == Code::Unimplemented
        || (status.code() == Code::Unknown && status.message().contains("not implemented"))
}

/// Updates a running container.
///
/// # Errors
/// Its new memory limit is not above what it uses, the runtime refuses the update, or does not answer.
pub async fn update_container(
    effects: &Effects,
    update: &ContainerResize,
    machine: &MachineInputs<'_>,
) -> Result<(), SyncError> {
    let Some((_, container)) = update.pod.container(&update.name) else { return Ok(()) };
    if let Some(limit) = update.lowers_memory_to {
        check_usage(effects, update, limit).await?;
    }
    let linux: LinuxResources = container_resources(&update.pod, container, false, machine);
    let request = cri::UpdateContainerResourcesRequest {
        container_id: update.id.as_str().to_owned(),
        linux: Some(resources(linux)),
        ..Default::default()
    };
    let timeout = effects.clients.cri_timeout;
    let updated = effects.clients.cri().update_container_resources(bounded(request, timeout)).await;
    updated.map(|_| ()).map_err(|status| {
        let what = format!("cannot update the {} of container {}", update.resource, update.name);
        SyncError::from_status(&what, &status)
    })
}

/// A limit that is not above the usage would end the container.
async fn check_usage(effects: &Effects, update: &ContainerResize, limit: i64) -> Result<(), SyncError> {
    let request = cri::ContainerStatsRequest { container_id: update.id.as_str().to_owned() };
    let timeout = effects.clients.cri_timeout;
    let stats = effects.clients.cri().container_stats(bounded(request, timeout)).await;
    let what = format!("cannot read the memory usage of container {}", update.name);
    let stats = stats.map_err(|status| SyncError::from_status(&what, &status))?.into_inner().stats;
    let memory = stats.and_then(|stats| stats.memory);
    let Some(usage) = memory.and_then(|memory| memory.usage_bytes.or(memory.working_set_bytes)) else {
        return Err(SyncError::new(format!("{what}: the runtime does not report it")));
    };
    if i64::try_from(usage.value).is_ok_and(|usage| usage < limit) {
        return Ok(());
    }
    Err(SyncError::new(format!(
        "attempting to set container {:?} memory limit ({limit}){BELOW_USAGE}{})",
        update.name, usage.value
    )))
}
