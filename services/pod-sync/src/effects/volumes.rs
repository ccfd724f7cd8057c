//! The volumes of a pod, which volume-manager mounts and unmounts, and what one container needs inside of them: `subPath` mounts and
//! values from files (`fileKeyRef`).

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::{Container, Pod};
use keelson_pod_sync_core::config::{FileLookup, UserNamespace, referenced_files, subpaths};
use keelson_pod_sync_core::explain::{Cause, StepName, YOU};
use keelson_proto::keelson::volume_manager::v1 as volume;
use keelson_proto::keelson::volume_manager::v1::mount_pod_response::Item as MountItem;
use tonic::Code;

use crate::effects::Effects;
use crate::effects::clients::{bounded, ok_if_gone};
use crate::error::SyncError;
use crate::publish::objects::pod_object;
use crate::state::pod_state::DesiredPod;

/// The deadline of one call; it is made again while the answer is outstanding.
const CALL: Duration = Duration::from_secs(60);

/// The owner of a wait that names no other.
const VOLUME_MANAGER: &str = "volume-manager";
/// The reason of volume-manager's status when a call ends and the volumes still wait for something.
const NOT_MOUNTED: &str = "NOT_MOUNTED";
/// The reason of that status when a volume cannot be attached, because the node has no room for it.
const ATTACHMENT_LIMIT: &str = "VOLUME_ATTACHMENT_LIMIT_EXCEEDED";
/// The reason of the pod then (volumes.md §3.14).
const ATTACHMENT_LIMIT_EXCEEDED: &str = "VolumeAttachmentLimitExceeded";

/// What volume-manager has prepared for a pod.
#[derive(Debug, Clone, Default)]
pub struct Mounts {
    /// The mounted volumes by name, each with its path on the host.
    pub volumes: BTreeMap<String, volume::VolumeMount>,
    /// The IDs of the pod's user namespace.
    pub user_namespace: Option<UserNamespace>,
}

impl From<volume::MountsReady> for Mounts {
    fn from(ready: volume::MountsReady) -> Self {
        let users = |range: volume::IdRange| UserNamespace { host_id: range.host_id, length: range.length };
        Self {
            volumes: ready.volumes.into_iter().map(|v| (v.name.clone(), v)).collect(),
            user_namespace: ready.user_namespace.map(users),
        }
    }
}

/// Has the volumes of a pod mounted and waits until they are. While they are not, the pod's steps show why. `reported`: the last error
/// of its mounts, so that the same one is not reported again; `None` once they are mounted.
///
/// # Errors
/// A volume cannot be mounted, or volume-manager does not answer.
pub async fn mount(
    effects: &Effects,
    desired: &DesiredPod,
    reported: &mut Option<String>,
) -> Result<Mounts, SyncError> {
    match await_mounts(effects, desired).await {
        Ok(mounts) => {
            let uid = desired.pod.metadata.uid.as_str();
            effects.registry.set_step(uid, StepName::Volumes, "", Cause::done(VOLUME_MANAGER));
            *reported = None;
            Ok(mounts)
        }
        Err(status) => Err(report_mount_error(effects, desired, reported, &status)),
    }
}

async fn await_mounts(effects: &Effects, desired: &DesiredPod) -> Result<Mounts, tonic::Status> {
    let uid = desired.pod.metadata.uid.as_str();
    let request = volume::MountPodRequest { uid: uid.to_owned(), revision: desired.revision };
    let mut client = effects.clients.volumes();
    let mut answers = client.mount_pod(bounded(request, CALL)).await?.into_inner();
    loop {
        match answers.message().await?.and_then(|answer| answer.item) {
            Some(MountItem::Progress(progress)) => {
                effects.registry.set_step(uid, StepName::Volumes, "", cause_of(&progress));
            }
            Some(MountItem::Ready(ready)) => {
                return Ok(ready.into());
            }
            None => return Err(tonic::Status::unavailable("volume-manager ended the answer")),
        }
    }
}

/// Why volumes are not mounted yet, and who has to act: a person, a service, or a controller of the control plane.
fn cause_of(progress: &volume::MountProgress) -> Cause {
    let owner = if progress.owner.is_empty() { VOLUME_MANAGER.to_owned() } else { progress.owner.clone() };
    match progress.next_try_unix_nanos {
        0 => Cause::waiting("Mounting", &progress.waiting_for, owner),
        next => Cause::failed("FailedMount", &progress.waiting_for, owner).retried_at(next),
    }
}

/// Has the volumes of a pod unmounted and waits until they are.
///
/// # Errors
/// Something of the pod is still mounted, or volume-manager does not answer.
pub async fn unmount(effects: &Effects, desired: &DesiredPod) -> Result<(), SyncError> {
    effects.registry.desired_state.unmount(desired);
    let request = volume::UnmountPodRequest { uid: desired.pod.metadata.uid.clone() };
    ok_if_gone(effects.clients.volumes().unmount_pod(bounded(request, CALL)).await)
        .map_err(|s| SyncError::from_status("volumes are not unmounted yet", &s))
}

/// Shows an error of volume-manager in the pod's steps and, when it is a new one, as an event.
///
/// Parity: a kubelet only logs what the volumes still wait for when its wait has timed out (volumes.md §3.14).
fn report_mount_error(
    effects: &Effects,
    desired: &DesiredPod,
    reported: &mut Option<String>,
    status: &tonic::Status,
) -> SyncError {
    let error = SyncError::from_status("Unable to attach or mount volumes", status);
    let reason = keelson_service_kit::status::reason(status);
    if reason.as_deref() == Some(ATTACHMENT_LIMIT) {
        return SyncError { rejection: Some(ATTACHMENT_LIMIT_EXCEEDED), peer_unavailable: false, ..error };
    }
    // Then the step shows what the volumes wait for, and who has to act, also after the call that reported it has ended.
    let is_waiting = reason.as_deref() == Some(NOT_MOUNTED);
    if !is_waiting {
        let owner = if error.peer_unavailable { VOLUME_MANAGER } else { YOU };
        let cause = Cause::failed("FailedMount", &error.message, owner);
        effects.registry.set_step(&desired.pod.metadata.uid, StepName::Volumes, "", cause);
    }
    let is_new = reported.replace(error.message.clone()).as_ref() != Some(&error.message);
    // An unavailable service is not an error of the volumes (volumes.md §3.14). Each attempt at a volume has its own event.
    if is_new && (is_waiting || !error.peer_unavailable) {
        effects.context.events.warning(pod_object(&desired.pod), "FailedMount", error.message.clone());
    }
    error
}

/// Deadline of a preparation, which opens and mounts what is in the volumes.
const PREPARE: Duration = Duration::from_secs(15);

/// Values from files, by volume, path and key.
#[derive(Debug, Default)]
pub struct Files(BTreeMap<(String, String, String), Result<Option<String>, String>>);

impl FileLookup for Files {
    fn key(&self, volume: &str, path: &str, key: &str) -> Result<Option<String>, String> {
        let name = (volume.to_owned(), path.to_owned(), key.to_owned());
        self.0.get(&name).cloned().unwrap_or_else(|| Err("it was not read".to_owned()))
    }
}

/// Reads the values from files that the environment of a container refers to.
///
/// # Errors
/// volume-manager does not answer.
pub async fn read_files(effects: &Effects, pod: &Pod, container: &Container) -> Result<Files, SyncError> {
    let keys = referenced_files(container);
    if keys.is_empty() {
        return Ok(Files::default());
    }
    let key = |(volume, path, key): &(String, String, String)| volume::FileKey {
        volume: volume.clone(),
        path: path.clone(),
        key: key.clone(),
    };
    let request = volume::PrepareContainerRequest {
        uid: pod.metadata.uid.clone(),
        container: container.name.clone(),
        keys: keys.iter().map(key).collect(),
        ..volume::PrepareContainerRequest::default()
    };
    let values = prepare(effects, request).await?.values;
    Ok(Files(keys.into_iter().zip(values.into_iter().map(value)).collect()))
}

fn value(value: volume::FileKeyValue) -> Result<Option<String>, String> {
    use volume::file_key_value::Found;
    match value.found {
        Some(Found::Value(value)) => Ok(Some(value)),
        Some(Found::Missing(_)) => Ok(None),
        Some(Found::Error(why)) => Err(why),
        None => Err("volume-manager returned neither a value nor an error".to_owned()),
    }
}

/// Prepares the `subPath` mounts of a container. Returns the host path of each, by its index in `volumeMounts`. `env`: the environment of the
/// container, for `subPathExpr`.
///
/// # Errors
/// A path leaves its volume or cannot be mounted, or volume-manager does not answer.
pub async fn prepare_subpaths(
    effects: &Effects,
    pod: &Pod,
    container: &Container,
    env: &[(String, String)],
) -> Result<BTreeMap<usize, String>, SyncError> {
    let parts = subpaths(pod, container, env).map_err(|e| SyncError::new(e.to_string()))?;
    if parts.is_empty() {
        return Ok(BTreeMap::new());
    }
    let part = |part: &keelson_pod_sync_core::config::SubPath| volume::SubPath {
        index: u32::try_from(part.index).unwrap_or(u32::MAX),
        volume: part.volume.clone(),
        path: part.path.clone(),
        read_only: part.read_only,
    };
    let request = volume::PrepareContainerRequest {
        uid: pod.metadata.uid.clone(),
        container: container.name.clone(),
        subpaths: parts.iter().map(part).collect(),
        ..volume::PrepareContainerRequest::default()
    };
    let made = prepare(effects, request).await?.subpaths;
    Ok(parts.into_iter().zip(made).map(|(part, made)| (part.index, made.host_path)).collect())
}

async fn prepare(
    effects: &Effects,
    request: volume::PrepareContainerRequest,
) -> Result<volume::PrepareContainerResponse, SyncError> {
    let answer = effects.clients.volumes().prepare_container(bounded(request, PREPARE)).await;
    answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
        // The text is complete as it is, for the status of the container.
        Code::FailedPrecondition => SyncError::new(status.message()),
        _ => SyncError::from_status("failed to prepare volumes and subPath mounts of the container", &status),
    })
}
