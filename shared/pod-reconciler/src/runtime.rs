//! Asks runtime-shim whether anything of a pod still runs.

use std::time::Duration;

use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::{Peer, Progress};

/// Deadline of one read. The runtime may be slow, but the end of a pod should not wait long for a hung runtime.
const READ_WITHIN: Duration = Duration::from_secs(10);

/// A client of runtime-shim.
#[derive(Debug, Clone)]
pub struct Runtime {
    peer: Peer,
    progress: Progress,
    meanwhile: &'static str,
}

impl Runtime {
    /// runtime-shim as `peer`. While reads fail, the condition of its name reports the error and `meanwhile`, the
    /// consequence for this service: "volumes stay mounted".
    pub const fn new(peer: Peer, progress: Progress, meanwhile: &'static str) -> Self {
        Self { peer, progress, meanwhile }
    }

    /// Reads runtime-shim and checks that nothing of the pod runs.
    ///
    /// # Errors
    /// A text: what of the pod still runs, or why that is unknown.
    pub async fn nothing_runs(&self, uid: &str) -> Result<(), String> {
        let mut request = tonic::Request::new(pb::GetPodRequest { uid: uid.to_owned() });
        request.set_timeout(READ_WITHIN);
        let answer = RuntimeClient::new(self.peer.channel()).get_pod(request).await;
        let name = self.peer.name();
        match answer {
            Ok(response) => {
                self.progress.condition(name, Ok(()));
                let pod = response.into_inner().pod.unwrap_or_default();
                running(&pod).map_or(Ok(()), Err)
            }
            Err(status) => {
                let text = format!(
                    "no fresh read of the runtime, {} until there is one: {}",
                    self.meanwhile,
                    status.message()
                );
                self.progress.condition(name, Err(text));
                Err(format!("no fresh read of the runtime: {}", status.message()))
            }
        }
    }
}

/// The first container or sandbox of a pod that runs or may run.
fn running(pod: &pb::RuntimePod) -> Option<String> {
    let container = pod
        .containers
        .iter()
        .find(|c| matches!(c.state(), pb::ContainerState::Running | pb::ContainerState::Unknown));
    if let Some(container) = container {
        return Some(format!("the container {} ({}) still runs", container.name, container.id));
    }
    let sandbox = pod.sandboxes.iter().find(|s| s.ready)?;
    Some(format!("the sandbox {} is still ready", sandbox.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_or_unknown_container_or_ready_sandbox_counts_as_running() {
        let container = |state: pb::ContainerState| pb::RuntimePod {
            containers: vec![pb::Container { state: state.into(), name: "c".into(), ..Default::default() }],
            ..Default::default()
        };
        assert_eq!(running(&pb::RuntimePod::default()), None);
        assert_eq!(running(&container(pb::ContainerState::Exited)), None);
        assert_eq!(running(&container(pb::ContainerState::Created)), None);
        assert!(running(&container(pb::ContainerState::Running)).unwrap().contains("container c"));
        assert!(running(&container(pb::ContainerState::Unknown)).is_some());
        let sandbox = |ready| pb::RuntimePod {
            sandboxes: vec![pb::Sandbox { id: "s".into(), ready, ..Default::default() }],
            ..Default::default()
        };
        assert_eq!(running(&sandbox(false)), None);
        assert!(running(&sandbox(true)).unwrap().contains("sandbox s"));
    }
}
