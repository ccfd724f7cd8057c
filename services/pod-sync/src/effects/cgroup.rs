//! The cgroup of a pod, which resource-manager makes and removes.

use std::time::Duration;

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_proto::keelson::resource_manager::v1 as resource;

use crate::effects::Effects;
use crate::effects::clients::{bounded, ok_if_gone};
use crate::error::SyncError;
use crate::publish::objects::pod_object;
use crate::state::pod_state::DesiredPod;

/// The deadline of one call; it is made again while the answer is outstanding.
const CALL: Duration = Duration::from_secs(60);

/// Has the cgroup of a pod made and returns its path, the parent of the containers' cgroups.
///
/// # Errors
/// resource-manager does not answer, or cannot make it.
pub async fn prepare(effects: &Effects, desired: &DesiredPod) -> Result<String, SyncError> {
    let (registry, uid) = (&effects.registry, &desired.pod.metadata.uid);
    let request = resource::PreparePodRequest { uid: uid.clone(), revision: desired.revision, cgroup: None };
    match effects.clients.resources().prepare_pod(bounded(request, CALL)).await {
        Ok(response) => {
            registry.node.await_machine().await?;
            registry.set_step(uid, StepName::Cgroup, "", Cause::done("resource-manager"));
            Ok(response.into_inner().cgroup_parent)
        }
        Err(status) => {
            let error = SyncError::from_status("unable to ensure pod container exists", &status);
            let cause = Cause::failed("FailedCreatePodContainer", &error.message, "resource-manager");
            registry.set_step(uid, StepName::Cgroup, "", cause);
            if !error.peer_unavailable {
                let object = pod_object(&desired.pod);
                effects.context.events.warning(object, "FailedCreatePodContainer", error.message.clone());
            }
            Err(error)
        }
    }
}

/// Has the cgroup of a pod removed and its resources freed.
///
/// # Errors
/// resource-manager does not answer, or the cgroup is still there.
pub async fn release(effects: &Effects, desired: &DesiredPod) -> Result<(), SyncError> {
    let (registry, uid) = (&effects.registry, desired.pod.metadata.uid.as_str());
    let adopted = registry.observed(uid).is_some_and(|observed| observed.any_sandbox_ready());
    registry.desired_state.release(desired, adopted);
    let request = resource::ReleasePodRequest { uid: desired.pod.metadata.uid.clone() };
    ok_if_gone(effects.clients.resources().release_pod(bounded(request, CALL)).await)
        .map_err(|s| SyncError::from_status("the cgroup is not removed yet", &s))
}
