//! No container starts with a user or group id of the agent (ADR 0004): neither with one from its configuration nor with one from its image,
//! which only the runtime knows, after it has created the container.

use k8s_cri::v1 as cri;
use keelson_pod_sync_core::config::ContainerSpec;
use keelson_pod_sync_core::created_ids::ids_of_info;
use tonic::Code;

use crate::effects::Effects;
use crate::effects::clients::{bounded, ok_if_gone};
use crate::error::SyncError;

/// Refuses ids that a container gets from the pod, from its volumes, or from a numeric user of its image.
pub(crate) fn refuse_planned(effects: &Effects, plan: &ContainerSpec) -> Result<(), SyncError> {
    let security = &plan.security;
    let ids = [security.run_as_user, security.run_as_group].into_iter().flatten();
    refuse(effects, ids.chain(security.supplemental_groups.iter().copied()))
}

fn refuse(effects: &Effects, ids: impl IntoIterator<Item = i64>) -> Result<(), SyncError> {
    effects.registry.node.host.agent_ids.check(ids).map_or(Ok(()), |text| Err(SyncError::new(text)))
}

/// Refuses and removes a container that was created and not started, for ids that its image gives it by name or by its list of groups. If the
/// runtime does not report ids, the container starts: the services check the user of every caller.
pub(crate) async fn refuse_created(effects: &Effects, id: &str) -> Result<(), SyncError> {
    let (cri, timeout) = (effects.clients.cri(), effects.clients.cri_timeout);
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
    let answer = match cri.clone().container_status(bounded(request, timeout)).await {
        Ok(answer) => answer.into_inner(),
        // A container that is gone does not start.
        Err(status) if status.code() == Code::NotFound => return Ok(()),
        Err(status) => return Err(SyncError::from_status("cannot read the user of the container", &status)),
    };
    let reported = answer.status.and_then(|status| status.user?.linux).map(|user| {
        let groups = user.supplemental_groups.into_iter();
        [user.uid, user.gid].into_iter().chain(groups).collect::<Vec<_>>()
    });
    let of_info = || ids_of_info(answer.info.get("info")?);
    let Some(ids) = reported.or_else(of_info) else { return Ok(()) };
    let refused = refuse(effects, ids);
    if refused.is_err() {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        if let Err(status) = ok_if_gone(cri.clone().remove_container(bounded(request, timeout)).await) {
            tracing::warn!(id, error = status.message(), "cannot remove a container that must not start");
        }
    }
    refused
}
