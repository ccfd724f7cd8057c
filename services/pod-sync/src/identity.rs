//! No container begins with an id of the agent (ADR 0004): neither one that its configuration has, nor one that its image brings,
//! which only the runtime knows once it has made the container.

use k8s_cri::v1 as cri;
use keelson_pod_sync_core::config::ContainerSpec;
use keelson_pod_sync_core::created_ids::ids_of_info;
use tonic::Code;

use crate::agent::Agent;
use crate::clients::bounded;
use crate::stop::gone_is_done;
use crate::worker::Trouble;

/// Refuses ids that the pod, its volumes or the number of its image's user give the container.
pub(crate) fn refuse_planned(agent: &Agent, plan: &ContainerSpec) -> Result<(), Trouble> {
    let security = &plan.security;
    let ids = [security.run_as_user, security.run_as_group].into_iter().flatten();
    refuse(agent, ids.chain(security.supplemental_groups.iter().copied()))
}

fn refuse(agent: &Agent, ids: impl IntoIterator<Item = i64>) -> Result<(), Trouble> {
    agent.host.agent_ids.refuse(ids).map_or(Ok(()), |text| Err(Trouble::fault(text)))
}

/// Refuses a container that was made and has not begun, for ids that its image gives it by name or by its own list of groups; it is
/// removed. A runtime that does not tell is believed: the services look at who calls.
pub(crate) async fn refuse_created(agent: &Agent, id: &str) -> Result<(), Trouble> {
    let (cri, timeout) = (agent.clients.cri(), agent.clients.cri_timeout);
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
    let answer = match cri.clone().container_status(bounded(request, timeout)).await {
        Ok(answer) => answer.into_inner(),
        // What has gone meanwhile does not begin either.
        Err(status) if status.code() == Code::NotFound => return Ok(()),
        Err(status) => return Err(Trouble::call("cannot ask whom the container runs as", &status)),
    };
    let told = answer.status.and_then(|status| status.user?.linux).map(|user| {
        let groups = user.supplemental_groups.into_iter();
        [user.uid, user.gid].into_iter().chain(groups).collect::<Vec<_>>()
    });
    let of_info = || ids_of_info(answer.info.get("info")?);
    let Some(ids) = told.or_else(of_info) else { return Ok(()) };
    let refused = refuse(agent, ids);
    if refused.is_err() {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        if let Err(status) = gone_is_done(cri.clone().remove_container(bounded(request, timeout)).await) {
            tracing::warn!(id, error = status.message(), "cannot remove a container that may not begin");
        }
    }
    refused
}
