//! What one container needs inside of its pod's volumes, as volume-manager makes it ready: parts of volumes
//! (`subPath`) and values of files (`fileKeyRef`).

use std::collections::BTreeMap;
use std::time::Duration;

use keelson_kube_model::{Container, Pod};
use keelson_pod_sync_core::config::{FileLookup, needs_files, subpaths};
use keelson_proto::keelson::volume_manager::v1 as volume;
use tonic::Code;

use crate::agent::Agent;
use crate::clients::bounded;
use crate::worker::Trouble;

/// Deadline of a preparation: it opens and mounts what is there.
const PREPARE: Duration = Duration::from_secs(15);

/// Values of keys of files, by volume, path and key.
#[derive(Debug, Default)]
pub struct Files(BTreeMap<(String, String, String), Result<Option<String>, String>>);

impl FileLookup for Files {
    fn key(&self, volume: &str, path: &str, key: &str) -> Result<Option<String>, String> {
        let name = (volume.to_owned(), path.to_owned(), key.to_owned());
        self.0.get(&name).cloned().unwrap_or_else(|| Err("nobody has read it".to_owned()))
    }
}

/// Reads the values of files that the environment of a container refers to.
///
/// # Errors
/// volume-manager does not answer.
pub async fn files(agent: &Agent, pod: &Pod, container: &Container) -> Result<Files, Trouble> {
    let wanted = needs_files(container);
    if wanted.is_empty() {
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
        keys: wanted.iter().map(key).collect(),
        ..volume::PrepareContainerRequest::default()
    };
    let values = prepare(agent, request).await?.values;
    Ok(Files(wanted.into_iter().zip(values.into_iter().map(value)).collect()))
}

fn value(value: volume::FileKeyValue) -> Result<Option<String>, String> {
    use volume::file_key_value::Found;
    match value.found {
        Some(Found::Value(value)) => Ok(Some(value)),
        Some(Found::Missing(_)) => Ok(None),
        Some(Found::Error(why)) => Err(why),
        None => Err("volume-manager does not say what it holds".to_owned()),
    }
}

/// Has the parts of volumes that a container mounts made ready: host path by place of the mount. `env` is its
/// environment.
///
/// # Errors
/// A path is none in a volume, a part cannot be mounted, or volume-manager does not answer.
pub async fn parts(
    agent: &Agent,
    pod: &Pod,
    container: &Container,
    env: &[(String, String)],
) -> Result<BTreeMap<usize, String>, Trouble> {
    let wanted = subpaths(pod, container, env).map_err(|e| Trouble::fault(e.to_string()))?;
    if wanted.is_empty() {
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
        subpaths: wanted.iter().map(part).collect(),
        ..volume::PrepareContainerRequest::default()
    };
    let made = prepare(agent, request).await?.subpaths;
    Ok(wanted.into_iter().zip(made).map(|(part, made)| (part.index, made.host_path)).collect())
}

async fn prepare(
    agent: &Agent,
    request: volume::PrepareContainerRequest,
) -> Result<volume::PrepareContainerResponse, Trouble> {
    let answer = agent.clients.volumes().prepare_container(bounded(request, PREPARE)).await;
    answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
        // The text is a whole one, for the status of the container.
        Code::FailedPrecondition => Trouble::fault(status.message()),
        _ => Trouble::call("failed to prepare volumes and subPath mounts of the container", &status),
    })
}
