//! Compares what a kubelet has started of a static pod with its manifest (docs/adr/0022).

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use keelson_kube_model::Pod;
use keelson_pod_sync_core::adoption::{
    self, NodeFacts, RunningConfig, RunningContainer, RunningPod, RunningSandbox, RunningSandboxConfig,
};
use keelson_pod_sync_core::observation::PodObservation;
use tonic::{Code, Status};

use crate::effects::Effects;
use crate::effects::clients::bounded;
use crate::error::SyncError;
use crate::node::huge_page_sizes;
use crate::turn::node_inputs::{machine_inputs, runtime_features, security_settings};

/// The deadline of a read.
const READ: Duration = Duration::from_secs(10);
/// How long to wait for the Node object.
const NODE: Duration = Duration::from_secs(10);

/// Why a read has no result.
enum ReadError {
    /// The pod is not comparable.
    Difference(String),
    /// The runtime or runtime-shim does not answer.
    Unavailable(SyncError),
}

impl From<Status> for ReadError {
    fn from(status: Status) -> Self {
        if status.code() == Code::NotFound {
            return Self::Difference("a part of it has ended".to_owned());
        }
        let error = SyncError::from_status("cannot read the pod from the runtime", &status);
        if error.peer_unavailable { Self::Unavailable(error) } else { Self::Difference(error.message) }
    }
}

/// The first difference between a pod, with the UID under which a kubelet has started it, and what runs of it. `None`: there is none.
///
/// # Errors
/// A service or the runtime does not answer; nothing is known then.
pub async fn difference(effects: &Effects, pod: &Pod, source: &str) -> Result<Option<String>, SyncError> {
    let node = &effects.registry.node;
    node.await_machine().await?;
    let mut object = node.object.subscribe();
    if !matches!(tokio::time::timeout(NODE, object.wait_for(Option::is_some)).await, Ok(Ok(_))) {
        return Err(SyncError::unavailable("pod-config has not sent the Node"));
    }
    let running = match read(effects, pod).await {
        Ok(running) => running,
        Err(ReadError::Difference(text)) => return Ok(Some(text)),
        Err(ReadError::Unavailable(error)) => return Err(error),
    };
    let (machine, runtime) = (node.machine.borrow().clone(), node.runtime.borrow().clone());
    let (sizes, config) = (huge_page_sizes(&machine), &effects.context.config);
    let seccomp_dir = config.paths.root_dir.join("seccomp").to_string_lossy().into_owned();
    let facts = NodeFacts {
        name: &config.node_name,
        ips: &node.addresses(),
        allocatable: &node.allocatable(),
        machine: machine_inputs(effects, &machine, &sizes),
        security: security_settings(effects, &seccomp_dir),
        runtime: runtime_features(&runtime),
    };
    Ok(adoption::difference(pod, source, &running, &facts))
}

/// Reads all that the runtime has of the pod.
async fn read(effects: &Effects, pod: &Pod) -> Result<RunningPod, ReadError> {
    let observed = effects.clients.read_pod(&pod.metadata.uid).await?;
    let sandbox =
        observed.ready_sandbox().ok_or_else(|| ReadError::Difference("its sandbox has ended".into()))?;
    let request =
        cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.id.as_str().to_owned(), verbose: true };
    let answer = effects.clients.cri().pod_sandbox_status(bounded(request, READ)).await?.into_inner();
    let config = details(&answer.info, RunningSandboxConfig::of_details)?;
    let status = answer.status.unwrap_or_default();
    let sandbox = RunningSandbox {
        labels: status.labels.into_iter().collect(),
        annotations: status.annotations.into_iter().collect(),
        config,
    };
    let mut containers = BTreeMap::new();
    for (name, id) in newest(&observed) {
        containers.insert(name.to_owned(), container(effects, id).await?);
    }
    Ok(RunningPod { sandbox, ips: observed.pod_ips(), containers })
}

/// The newest record of each container, by name.
fn newest(observed: &PodObservation) -> BTreeMap<&str, &str> {
    let records = observed.containers.iter().rev();
    records.map(|container| (container.name.as_str(), container.id.as_str())).collect()
}

async fn container(effects: &Effects, id: &str) -> Result<RunningContainer, ReadError> {
    let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
    let answer = effects.clients.cri().container_status(bounded(request, READ)).await?.into_inner();
    let config = details(&answer.info, RunningConfig::of_details)?;
    let status = answer.status.unwrap_or_default();
    let image = cri::ImageSpec { image: status.image_ref, ..cri::ImageSpec::default() };
    let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
    let mut images = ImageServiceClient::new(effects.clients.runtime_channel());
    let image = images.image_status(bounded(request, READ)).await?.into_inner().image.unwrap_or_default();
    Ok(RunningContainer {
        annotations: status.annotations.into_iter().collect(),
        config,
        image_uid: image.uid.map(|uid| uid.value),
        image_username: image.username,
    })
}

fn details<T>(
    info: &std::collections::HashMap<String, String>,
    read: fn(&str) -> Option<T>,
) -> Result<T, ReadError> {
    let config = info.get("info").and_then(|details| read(details));
    config.ok_or_else(|| {
        ReadError::Difference(
            "the runtime does not show the configuration that it was created with".to_owned(),
        )
    })
}
