//! CRI client of the container runtime, with a deadline on each call.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use keelson_service_kit::{Metrics, connect_foreign};
use tonic::{Code, Request, Status};

use crate::operations::{CriChannel, Operations};
use crate::response_checks;

/// Lists of a node with thousands of dead containers exceed the kubelet's limit of 16 MiB.
const MAX_MESSAGE: usize = 256 << 20;

/// An endpoint that is not valid.
#[derive(Debug, thiserror::Error)]
#[error("the endpoint {0:?} of the container runtime or its image service is not unix:///path/to/socket")]
pub struct EndpointError(pub String);

/// The socket path of `unix:///path` or `/path`.
pub fn socket_path(endpoint: &str) -> Result<PathBuf, EndpointError> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if path.starts_with('/') { Ok(path.into()) } else { Err(EndpointError(endpoint.to_owned())) }
}

/// The container runtime.
#[derive(Debug, Clone)]
pub struct Cri {
    channel: CriChannel,
    images: CriChannel,
    operations: Arc<Operations>,
    timeout: Duration,
}

impl Cri {
    /// Connects on the first call.
    pub fn new(endpoint: &str, timeout: Duration) -> Result<Self, EndpointError> {
        let operations = Arc::new(Operations::new());
        let channel = connect_foreign("the container runtime", &socket_path(endpoint)?);
        let channel = CriChannel::new(channel, Arc::clone(&operations));
        Ok(Self { images: channel.clone(), channel, operations, timeout })
    }

    /// Uses another endpoint for images (`imageServiceEndpoint`).
    ///
    /// # Errors
    /// The endpoint is not a unix socket.
    pub fn with_image_endpoint(self, endpoint: Option<&str>) -> Result<Self, EndpointError> {
        let Some(endpoint) = endpoint else { return Ok(self) };
        let images = connect_foreign("the image service", &socket_path(endpoint)?);
        let images = CriChannel::new(images, Arc::clone(&self.operations));
        Ok(Self { images, ..self })
    }

    /// Registers the metrics of the calls over this connection and all its clones.
    pub fn register(&self, metrics: &Metrics) {
        self.operations.register(metrics);
    }

    /// The connection, for calls that are passed through.
    pub fn channel(&self) -> CriChannel {
        self.channel.clone()
    }

    /// The connection to the image service.
    pub fn image_channel(&self) -> CriChannel {
        self.images.clone()
    }

    /// The runtime service.
    pub fn runtime(&self) -> RuntimeServiceClient<CriChannel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// The image service.
    pub fn images(&self) -> ImageServiceClient<CriChannel> {
        ImageServiceClient::new(self.images.clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    /// A request with the configured deadline (`runtimeRequestTimeout`).
    pub fn request<T>(&self, message: T) -> Request<T> {
        with_deadline(message, self.timeout)
    }

    /// A request for a read of state, with a deadline of 10 s: a healthy runtime answers such reads quickly.
    pub fn quick<T>(&self, message: T) -> Request<T> {
        self.within(Duration::from_secs(10), message)
    }

    /// A request with the deadline `limit`, or the configured one if that is shorter.
    pub fn within<T>(&self, limit: Duration, message: T) -> Request<T> {
        with_deadline(message, self.timeout.min(limit))
    }

    /// A request for a stream or a pull, which has no real deadline (90 days).
    pub fn unbounded<T>(&self, message: T) -> Request<T> {
        with_deadline(message, Duration::from_secs(90 * 24 * 3600))
    }

    /// Lists sandboxes and containers: all of them, or those of one pod.
    ///
    /// # Errors
    /// The runtime's error; UNAVAILABLE while it is down.
    pub async fn list(
        &self,
        uid: Option<&str>,
    ) -> Result<(Vec<cri::PodSandbox>, Vec<cri::Container>), Status> {
        let labels = uid.map(|uid| (crate::labels::UID.to_owned(), uid.to_owned()));
        self.list_labelled(labels.into_iter().collect()).await
    }

    /// Lists the sandboxes and containers that have all of these labels.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub async fn list_labelled(
        &self,
        labels: HashMap<String, String>,
    ) -> Result<(Vec<cri::PodSandbox>, Vec<cri::Container>), Status> {
        let wanted = || Some(labels.clone()).filter(|labels| !labels.is_empty());
        let sandboxes = cri::ListPodSandboxRequest {
            filter: wanted()
                .map(|label_selector| cri::PodSandboxFilter { label_selector, ..Default::default() }),
        };
        let containers = cri::ListContainersRequest {
            filter: wanted()
                .map(|label_selector| cri::ContainerFilter { label_selector, ..Default::default() }),
        };
        let (mut a, mut b) = (self.runtime(), self.runtime());
        // Sandboxes first: a container that appears between the two reads has its sandbox in the list, or the next
        // read finds it.
        let (sandboxes, containers) = tokio::try_join!(
            a.list_pod_sandbox(self.quick(sandboxes)),
            b.list_containers(self.quick(containers))
        )?;
        Ok((sandboxes.into_inner().items, containers.into_inner().containers))
    }

    /// A container's status; `None` if the runtime does not know it.
    ///
    /// # Errors
    /// The runtime's error, and `INTERNAL` for a response without mandatory fields.
    pub async fn container_status(&self, id: &str) -> Result<Option<cri::ContainerStatus>, Status> {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        match self.runtime().container_status(self.quick(request)).await {
            Ok(response) => {
                let status = response.into_inner().status.unwrap_or_default();
                response_checks::check_container(id, &status).map(|()| Some(status))
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// A sandbox's status; `None` if the runtime does not know it.
    ///
    /// # Errors
    /// As [`Self::container_status`].
    pub async fn sandbox_status(&self, id: &str) -> Result<Option<cri::PodSandboxStatus>, Status> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        match self.runtime().pod_sandbox_status(self.quick(request)).await {
            Ok(response) => {
                let status = response.into_inner().status.unwrap_or_default();
                response_checks::check_sandbox(id, &status).map(|()| Some(status))
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }
}

fn with_deadline<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Treats NOT_FOUND as success, for calls that stop or remove (runtime-and-resources.md §1.1).
pub fn ignore_not_found<T>(result: Result<T, Status>) -> Result<(), Status> {
    match result {
        Ok(_) => Ok(()),
        Err(status) if status.code() == Code::NotFound => Ok(()),
        Err(status) => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_endpoint_must_be_a_unix_socket() {
        assert_eq!(socket_path("unix:///run/c.sock").unwrap(), PathBuf::from("/run/c.sock"));
        assert_eq!(socket_path("/run/c.sock").unwrap(), PathBuf::from("/run/c.sock"));
        assert!(socket_path("tcp://1.2.3.4:5").is_err());
    }

    #[tokio::test]
    async fn image_service_endpoint_is_used_for_images() {
        let (runtime, images) =
            (crate::fake::FakeRuntime::start().await, crate::fake::FakeRuntime::start().await);
        let at = images.dir.path().join("cri.sock");
        let apart = runtime.cri.clone().with_image_endpoint(at.to_str()).unwrap();
        let request = || cri::ListImagesRequest { filter: None };
        apart.images().list_images(apart.quick(request())).await.unwrap();
        apart.list(None).await.unwrap();
        assert_eq!((images.calls("ListImages").len(), images.calls("ListContainers").len()), (1, 0));
        assert_eq!((runtime.calls("ListImages").len(), runtime.calls("ListContainers").len()), (0, 1));
        let same = runtime.cri.clone().with_image_endpoint(None).unwrap();
        same.images().list_images(same.quick(request())).await.unwrap();
        assert_eq!(runtime.calls("ListImages").len(), 1);
        assert!(runtime.cri.clone().with_image_endpoint(Some("tcp://1.2.3.4:5")).is_err());
    }
}
