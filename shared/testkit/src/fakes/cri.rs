//! The fakes of a container runtime.

use k8s_cri::v1 as cri;
use k8s_cri::v1::image_service_server::{ImageService, ImageServiceServer};
use k8s_cri::v1::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use keelson_proto::containerd::services::content::v1 as content;
use keelson_proto::containerd::services::content::v1::content_server::{Content, ContentServer};

use super::define::fake_service;

fake_service! {
    /// A fake of the CRI runtime service: sandboxes and containers.
    FakeCriRuntime implements RuntimeService, served by RuntimeServiceServer:
    unary {
        version(cri::VersionRequest) -> cri::VersionResponse;
        run_pod_sandbox(cri::RunPodSandboxRequest) -> cri::RunPodSandboxResponse;
        stop_pod_sandbox(cri::StopPodSandboxRequest) -> cri::StopPodSandboxResponse;
        remove_pod_sandbox(cri::RemovePodSandboxRequest) -> cri::RemovePodSandboxResponse;
        pod_sandbox_status(cri::PodSandboxStatusRequest) -> cri::PodSandboxStatusResponse;
        list_pod_sandbox(cri::ListPodSandboxRequest) -> cri::ListPodSandboxResponse;
        create_container(cri::CreateContainerRequest) -> cri::CreateContainerResponse;
        start_container(cri::StartContainerRequest) -> cri::StartContainerResponse;
        stop_container(cri::StopContainerRequest) -> cri::StopContainerResponse;
        remove_container(cri::RemoveContainerRequest) -> cri::RemoveContainerResponse;
        list_containers(cri::ListContainersRequest) -> cri::ListContainersResponse;
        container_status(cri::ContainerStatusRequest) -> cri::ContainerStatusResponse;
        update_container_resources(cri::UpdateContainerResourcesRequest) -> cri::UpdateContainerResourcesResponse;
        reopen_container_log(cri::ReopenContainerLogRequest) -> cri::ReopenContainerLogResponse;
        exec_sync(cri::ExecSyncRequest) -> cri::ExecSyncResponse;
        exec(cri::ExecRequest) -> cri::ExecResponse;
        attach(cri::AttachRequest) -> cri::AttachResponse;
        port_forward(cri::PortForwardRequest) -> cri::PortForwardResponse;
        container_stats(cri::ContainerStatsRequest) -> cri::ContainerStatsResponse;
        list_container_stats(cri::ListContainerStatsRequest) -> cri::ListContainerStatsResponse;
        pod_sandbox_stats(cri::PodSandboxStatsRequest) -> cri::PodSandboxStatsResponse;
        list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest) -> cri::ListPodSandboxStatsResponse;
        update_runtime_config(cri::UpdateRuntimeConfigRequest) -> cri::UpdateRuntimeConfigResponse;
        status(cri::StatusRequest) -> cri::StatusResponse;
        checkpoint_container(cri::CheckpointContainerRequest) -> cri::CheckpointContainerResponse;
        list_metric_descriptors(cri::ListMetricDescriptorsRequest) -> cri::ListMetricDescriptorsResponse;
        list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest) -> cri::ListPodSandboxMetricsResponse;
        runtime_config(cri::RuntimeConfigRequest) -> cri::RuntimeConfigResponse;
    }
    streams {
        get_container_events as GetContainerEventsStream(cri::GetEventsRequest) -> cri::ContainerEventResponse;
    }
    bidi {}
}

fake_service! {
    /// A fake of the CRI image service.
    FakeCriImages implements ImageService, served by ImageServiceServer:
    unary {
        list_images(cri::ListImagesRequest) -> cri::ListImagesResponse;
        image_status(cri::ImageStatusRequest) -> cri::ImageStatusResponse;
        pull_image(cri::PullImageRequest) -> cri::PullImageResponse;
        remove_image(cri::RemoveImageRequest) -> cri::RemoveImageResponse;
        image_fs_info(cri::ImageFsInfoRequest) -> cri::ImageFsInfoResponse;
    }
    streams {}
    bidi {}
}

fake_service! {
    /// A fake of containerd's content service.
    FakeContainerdContent implements Content, served by ContentServer:
    unary {
        list_statuses(content::ListStatusesRequest) -> content::ListStatusesResponse;
    }
    streams {}
    bidi {}
}
