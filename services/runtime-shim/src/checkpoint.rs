//! CheckpointContainer: asks the runtime for an archive of a running container (node-and-api.md §8.2).

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use k8s_cri::v1 as cri;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_runtime_shim_core::exec::{Instance, TargetError, choose_container};
use tonic::Status;

use crate::cri::Cri;
use crate::cri_objects::{ContainerEntry, labels};

/// The folder of the archives, below the root folder.
const FOLDER: &str = "checkpoints";
/// Maximum time for a checkpoint. It is far from what a gRPC deadline cannot express.
const LONGEST: Duration = Duration::from_secs(90 * 24 * 3600);

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The timeout is negative.
    #[error("CheckpointContainer requires the timeout value to be > 0")]
    Timeout,
    /// A name would lead out of the folder of the archives.
    #[error("{0:?} is no name of a pod, namespace or container")]
    Name(String),
    /// There is no such running container.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The folder of the archives cannot be created.
    #[error("cannot create {}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The runtime has refused or cannot do it.
    #[error("rpc error: code = {:?} desc = {}", .0.code(), .0.message())]
    Runtime(Status),
}

/// Writes the checkpoint: the path of the archive, which the runtime has written.
///
/// # Errors
/// See [`CheckpointError`].
pub async fn checkpoint(
    cri: &Cri,
    root: &Path,
    request: &pb::CheckpointContainerRequest,
) -> Result<String, CheckpointError> {
    let timeout = u64::try_from(request.timeout_seconds).map_err(|_| CheckpointError::Timeout)?;
    let name = archive_name(request, Timestamp::now())?;
    let labels = labels::selector(&request.pod_uid, &request.namespace, &request.name);
    let listed = cri.list_labelled(labels).await.map_err(CheckpointError::Runtime)?;
    let instances: Vec<Instance<'_>> = listed.containers.iter().map(ContainerEntry::instance).collect();
    let id = choose_container(!listed.sandboxes.is_empty(), &instances, &request.container)?.to_owned();
    let folder = root.join(FOLDER);
    create_folder(folder.clone())
        .await
        .map_err(|source| CheckpointError::Folder { path: folder.clone(), source })?;
    let location = folder.join(name).to_string_lossy().into_owned();
    let timeout = Duration::from_secs(timeout).min(LONGEST).max(cri.timeout());
    let message = cri::CheckpointContainerRequest {
        container_id: id,
        location: location.clone(),
        timeout: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
    };
    let answer = cri.runtime().checkpoint_container(cri.at_least(timeout, message)).await;
    answer.map(|_| location).map_err(CheckpointError::Runtime)
}

/// The name of an archive, as a kubelet forms it, with the time in UTC.
fn archive_name(request: &pb::CheckpointContainerRequest, at: Timestamp) -> Result<String, CheckpointError> {
    let names = [&request.name, &request.namespace, &request.container];
    if let Some(bad) = names.into_iter().find(|name| name.is_empty() || name.contains(['/', '\0'])) {
        return Err(CheckpointError::Name(bad.clone()));
    }
    let [pod, namespace, container] = names;
    let at = at.strftime("%Y-%m-%dT%H:%M:%SZ");
    Ok(format!("checkpoint-{pod}_{namespace}-{container}-{at}.tar"))
}

/// Creates the folder for root alone: an archive has the memory of processes.
async fn create_folder(folder: PathBuf) -> io::Result<()> {
    let created = tokio::task::spawn_blocking(move || match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    });
    created.await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_runtime::FakeRuntime;

    fn request(name: &str, container: &str) -> pb::CheckpointContainerRequest {
        pb::CheckpointContainerRequest {
            name: name.into(),
            namespace: "default".into(),
            container: container.into(),
            ..Default::default()
        }
    }

    #[test]
    fn checkpoint_archive_is_named_after_pod_namespace_container_and_time() {
        let at = "2026-11-29T16:20:33Z".parse().unwrap();
        let name = archive_name(&request("web", "main"), at).unwrap();
        assert_eq!(name, "checkpoint-web_default-main-2026-11-29T16:20:33Z.tar");
        for (pod, container) in [("../x", "main"), ("web", "a/b"), ("", "main"), ("web", "a\0")] {
            assert!(matches!(archive_name(&request(pod, container), at), Err(CheckpointError::Name(_))));
        }
    }

    #[test]
    fn checkpoint_error_of_the_runtime_has_the_text_of_a_go_client() {
        let status = Status::unimplemented("unknown method CheckpointContainer");
        let text = CheckpointError::Runtime(status).to_string();
        assert_eq!(text, "rpc error: code = Unimplemented desc = unknown method CheckpointContainer");
    }

    #[tokio::test]
    async fn folder_of_checkpoints_is_roots_alone_and_may_exist() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(FOLDER);
        create_folder(folder.clone()).await.unwrap();
        create_folder(folder.clone()).await.unwrap();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        assert!(create_folder(dir.path().join("none/x")).await.is_err());
    }

    #[tokio::test]
    async fn checkpoint_of_a_running_container_is_written_below_the_root_folder() {
        let fake = FakeRuntime::start().await;
        fake.sandbox("s-u", "u", true);
        fake.container("c", "u", k8s_cri::v1::ContainerState::ContainerRunning);
        let root = fake.dir.path();
        let ask = |container: &str, timeout_seconds| pb::CheckpointContainerRequest {
            name: "u".into(),
            namespace: "default".into(),
            container: container.into(),
            timeout_seconds,
            ..Default::default()
        };
        fake.runtime.checkpoint_container.answer(Default::default());
        let path = checkpoint(&fake.cri, root, &ask("c", 0)).await.unwrap();
        let begin = root.join("checkpoints/checkpoint-u_default-c-").display().to_string();
        assert!(path.starts_with(&begin) && path.ends_with("Z.tar"), "{path}");
        for timeout in [77, i64::MAX] {
            checkpoint(&fake.cri, root, &ask("c", timeout)).await.unwrap();
        }
        let asked = fake.runtime.checkpoint_container.requests().all();
        let timeouts: Vec<i64> = asked.iter().map(|request| request.timeout).collect();
        assert_eq!(timeouts, [20, 77, 7_776_000], "from the configured timeout to 90 days");
        assert_eq!((asked[0].container_id.as_str(), &asked[0].location), ("c", &path));

        for (container, timeout) in [("other", 0), ("c", -1)] {
            checkpoint(&fake.cri, root, &ask(container, timeout)).await.unwrap_err();
        }
        assert_eq!(fake.runtime.checkpoint_container.requests().len(), 3, "the runtime was not asked");
        fake.runtime.checkpoint_container.fail(Status::unimplemented("unknown method"));
        let error = checkpoint(&fake.cri, root, &ask("c", 0)).await.unwrap_err();
        assert_eq!(error.to_string(), "rpc error: code = Unimplemented desc = unknown method");
    }
}
