//! CRI client of the container runtime, with a deadline on each call.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::{Metrics, connect_foreign};
use tonic::{Code, Request, Response, Status};

use crate::cri_objects::{
    ContainerEntry, ContainerStatus, FilesystemUse, Image, Listing, RuntimeStatus, RuntimeVersion,
    SandboxEntry, labels, parse_sandbox, sandbox_image,
};
use crate::operations::{CriChannel, Operations};

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

    /// A request with the deadline `limit`, even if the configured one is shorter.
    pub fn at_least<T>(&self, limit: Duration, message: T) -> Request<T> {
        with_deadline(message, self.timeout.max(limit))
    }

    /// The configured deadline (`runtimeRequestTimeout`).
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A request for a stream or a pull, which has no real deadline (90 days).
    pub fn unbounded<T>(&self, message: T) -> Request<T> {
        with_deadline(message, Duration::from_secs(90 * 24 * 3600))
    }

    /// Lists sandboxes and containers: all of them, or those of one pod.
    ///
    /// # Errors
    /// The runtime's error; UNAVAILABLE while it is down.
    pub async fn list(&self, uid: Option<&str>) -> Result<Listing, Status> {
        let labels = uid.map(|uid| (labels::UID.to_owned(), uid.to_owned()));
        self.list_labelled(labels.into_iter().collect()).await
    }

    /// Lists the sandboxes and containers that have all of these labels.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub async fn list_labelled(&self, labels: HashMap<String, String>) -> Result<Listing, Status> {
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
        Ok(Listing {
            sandboxes: sandboxes.into_inner().items.into_iter().map(Into::into).collect(),
            containers: containers.into_inner().containers.into_iter().map(Into::into).collect(),
        })
    }

    /// A listed container's status; `None` if the runtime no longer knows it.
    ///
    /// # Errors
    /// The runtime's error, and `INTERNAL` for a response without mandatory fields.
    pub async fn container_status(&self, listed: &ContainerEntry) -> Result<Option<ContainerStatus>, Status> {
        let request = cri::ContainerStatusRequest { container_id: listed.id.clone(), verbose: false };
        let response = self.runtime().container_status(self.quick(request)).await;
        let Some(response) = found(response)? else { return Ok(None) };
        ContainerStatus::parse(listed, response.status.unwrap_or_default()).map(Some)
    }

    /// A listed sandbox with its status; `None` if the runtime no longer knows it.
    ///
    /// # Errors
    /// As [`Self::container_status`].
    pub async fn sandbox_status(&self, listed: &SandboxEntry) -> Result<Option<pb::Sandbox>, Status> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: listed.id.clone(), verbose: false };
        let response = self.runtime().pod_sandbox_status(self.quick(request)).await;
        let Some(response) = found(response)? else { return Ok(None) };
        parse_sandbox(listed, response.status.unwrap_or_default()).map(Some)
    }

    /// Removes a container. It is no error if there is none.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        ignore_not_found(self.runtime().remove_container(self.request(request)).await)
    }

    /// Stops and removes a sandbox. It is no error if there is none.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn remove_sandbox(&self, id: &str) -> Result<(), Status> {
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        ignore_not_found(self.runtime().stop_pod_sandbox(self.request(stop)).await)?;
        let remove = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        ignore_not_found(self.runtime().remove_pod_sandbox(self.request(remove)).await)
    }

    /// Asks the runtime to open the log file of a container again.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn reopen_log(&self, container_id: &str) -> Result<(), Status> {
        let request = cri::ReopenContainerLogRequest { container_id: container_id.to_owned() };
        self.runtime().reopen_container_log(self.quick(request)).await.map(drop)
    }

    /// Lists the images.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn list_images(&self) -> Result<Vec<Image>, Status> {
        let request = self.quick(cri::ListImagesRequest { filter: None });
        let images = self.images().list_images(request).await?.into_inner().images;
        Ok(images.into_iter().map(Image::from).collect())
    }

    /// An image; `None` if it is not present.
    ///
    /// # Errors
    /// As [`Self::container_status`].
    pub async fn image_status(&self, reference: &str) -> Result<Option<Image>, Status> {
        let request = cri::ImageStatusRequest { image: image_spec(reference), verbose: false };
        let response = self.images().image_status(self.quick(request)).await;
        let image = found(response)?.and_then(|response| response.image);
        image.map(|image| Image::parse(reference, image)).transpose()
    }

    /// Removes an image. It is no error if there is none.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn remove_image(&self, reference: &str) -> Result<(), Status> {
        let request = cri::RemoveImageRequest { image: image_spec(reference) };
        ignore_not_found(self.images().remove_image(self.request(request)).await)
    }

    /// The file systems of images, and those of layers if they are different ones.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn filesystems(&self) -> Result<(Vec<FilesystemUse>, Vec<FilesystemUse>), Status> {
        let request = self.quick(cri::ImageFsInfoRequest {});
        let response = self.images().image_fs_info(request).await?.into_inner();
        let translate =
            |usages: Vec<cri::FilesystemUsage>| usages.into_iter().map(FilesystemUse::from).collect();
        Ok((translate(response.image_filesystems), translate(response.container_filesystems)))
    }

    /// The usage of each container's layer, by container id. The runtime may take up to `limit`.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn layers(&self, limit: Duration) -> Result<HashMap<String, FilesystemUse>, Status> {
        let request = self.within(limit, cri::ListContainerStatsRequest { filter: None });
        let stats = self.runtime().list_container_stats(request).await?.into_inner().stats;
        Ok(stats.into_iter().filter_map(|s| Some((s.attributes?.id, s.writable_layer?.into()))).collect())
    }

    /// The runtime's name and version.
    ///
    /// # Errors
    /// As [`Self::container_status`].
    pub async fn version(&self) -> Result<RuntimeVersion, Status> {
        let request = self.quick(cri::VersionRequest { version: "0.1.0".into() });
        RuntimeVersion::parse(self.runtime().version(request).await?.into_inner())
    }

    /// The runtime's conditions and features.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn status(&self) -> Result<RuntimeStatus, Status> {
        let request = self.quick(cri::StatusRequest { verbose: false });
        Ok(self.runtime().status(request).await?.into_inner().into())
    }

    /// The sandbox image in the runtime's own configuration, if the runtime shows it.
    ///
    /// # Errors
    /// The runtime's error.
    pub async fn sandbox_image(&self) -> Result<Option<String>, Status> {
        let request = self.quick(cri::StatusRequest { verbose: true });
        Ok(sandbox_image(&self.runtime().status(request).await?.into_inner()))
    }
}

/// The name of an image in a request.
pub(crate) fn image_spec(reference: &str) -> Option<cri::ImageSpec> {
    Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() })
}

/// The response; `None` if the runtime does not know the object.
fn found<T>(response: Result<Response<T>, Status>) -> Result<Option<T>, Status> {
    match response {
        Ok(response) => Ok(Some(response.into_inner())),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

fn with_deadline<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Treats NOT_FOUND as success, for calls that stop or remove (runtime-and-resources.md §1.1).
fn ignore_not_found<T>(result: Result<T, Status>) -> Result<(), Status> {
    match result {
        Ok(_) => Ok(()),
        Err(status) if status.code() == Code::NotFound => Ok(()),
        Err(status) => Err(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_runtime::FakeRuntime;

    #[test]
    fn runtime_endpoint_must_be_a_unix_socket() {
        assert_eq!(socket_path("unix:///run/c.sock").unwrap(), PathBuf::from("/run/c.sock"));
        assert_eq!(socket_path("/run/c.sock").unwrap(), PathBuf::from("/run/c.sock"));
        assert!(socket_path("tcp://1.2.3.4:5").is_err());
    }

    #[tokio::test]
    async fn image_service_endpoint_is_used_for_images() {
        let (runtime, images) = (FakeRuntime::start().await, FakeRuntime::start().await);
        let apart = runtime.cri.clone().with_image_endpoint(images.socket().to_str()).unwrap();
        let request = || cri::ListImagesRequest { filter: None };
        apart.images().list_images(apart.quick(request())).await.unwrap();
        apart.list(None).await.unwrap();
        let lists = |fake: &FakeRuntime| {
            (fake.images.list_images.requests().len(), fake.runtime.list_containers.requests().len())
        };
        assert_eq!(lists(&images), (1, 0));
        assert_eq!(lists(&runtime), (0, 1));
        let same = runtime.cri.clone().with_image_endpoint(None).unwrap();
        same.images().list_images(same.quick(request())).await.unwrap();
        assert_eq!(runtime.images.list_images.requests().len(), 1);
        assert!(runtime.cri.clone().with_image_endpoint(Some("tcp://1.2.3.4:5")).is_err());
    }
}
