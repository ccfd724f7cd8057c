//! Clients of the services that pod-sync calls.

use std::time::Duration;

use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_config::v1::pod_config_client::PodConfigClient;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::{Context, PeerChannel};
use tonic::{Code, Request, Status};

use crate::state::observed::{Observed, observation};

/// Cheap to clone; each call takes a clone of the client that it needs.
#[derive(Debug, Clone)]
pub struct Clients {
    pods: PeerChannel,
    runtime: PeerChannel,
    volumes: PeerChannel,
    resources: PeerChannel,
    /// `runtimeRequestTimeout`.
    pub cri_timeout: Duration,
}

impl Clients {
    /// The services of the configuration.
    pub fn new(context: &Context) -> Self {
        Self {
            pods: context.peer(ServiceName::PodConfig).channel(),
            runtime: context.peer(ServiceName::RuntimeShim).channel(),
            volumes: context.peer(ServiceName::VolumeManager).channel(),
            resources: context.peer(ServiceName::ResourceManager).channel(),
            cri_timeout: Duration::from_millis(context.config.runtime.request_timeout_ms),
        }
    }

    /// pod-config.
    pub fn pods(&self) -> PodConfigClient<PeerChannel> {
        PodConfigClient::new(self.pods.clone()).max_decoding_message_size(64 << 20)
    }

    /// runtime-shim.
    pub fn runtime(&self) -> RuntimeClient<PeerChannel> {
        RuntimeClient::new(self.runtime.clone()).max_decoding_message_size(64 << 20)
    }

    /// CRI, through runtime-shim.
    pub fn cri(&self) -> RuntimeServiceClient<PeerChannel> {
        RuntimeServiceClient::new(self.runtime.clone())
    }

    /// The channel to runtime-shim, for calls of CRI whose messages `k8s_cri` lacks.
    pub fn runtime_channel(&self) -> PeerChannel {
        self.runtime.clone()
    }

    /// volume-manager.
    pub fn volumes(&self) -> VolumeManagerClient<PeerChannel> {
        VolumeManagerClient::new(self.volumes.clone())
    }

    /// resource-manager.
    pub fn resources(&self) -> ResourceManagerClient<PeerChannel> {
        ResourceManagerClient::new(self.resources.clone())
    }

    /// A fresh read of a pod.
    ///
    /// # Errors
    /// UNAVAILABLE while runtime-shim or the runtime does not answer.
    pub async fn read_pod(&self, uid: &str) -> Result<Observed, Status> {
        let request = runtime::GetPodRequest { uid: uid.to_owned() };
        let pod = self.runtime().get_pod(bounded(request, Duration::from_secs(15))).await?.into_inner().pod;
        Ok(observation(
            pod.unwrap_or_else(|| runtime::RuntimePod { uid: uid.to_owned(), ..Default::default() }),
        ))
    }
}

/// A request with a deadline.
pub fn bounded<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// The result of a removal: a container, sandbox or pod that the peer does not know is gone.
///
/// # Errors
/// Any other error of the call.
pub fn ok_if_gone<T>(result: Result<T, Status>) -> Result<(), Status> {
    match result {
        Err(status) if status.code() != Code::NotFound => Err(status),
        _ => Ok(()),
    }
}
