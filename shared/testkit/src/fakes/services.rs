//! The fakes of our own services.

use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::admin::v1::admin_server::{Admin, AdminServer};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::node_status::v1 as node_status;
use keelson_proto::keelson::node_status::v1::node_status_server::{NodeStatus, NodeStatusServer};
use keelson_proto::keelson::pod_config::v1 as pod_config;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::pod_sync::v1 as pod_sync;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server::{PodSync, PodSyncServer};
use keelson_proto::keelson::resource_manager::v1 as resource_manager;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_proto::keelson::supervisor::v1 as supervisor;
use keelson_proto::keelson::supervisor::v1::supervisor_server::{Supervisor, SupervisorServer};
use keelson_proto::keelson::volume_manager::v1 as volume_manager;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};

use super::define::fake_service;

fake_service! {
    /// A fake of the API `Admin` of every service.
    FakeAdmin implements Admin, served by AdminServer:
    unary {
        get_progress(admin::GetProgressRequest) -> admin::GetProgressResponse;
        get_metrics(admin::GetMetricsRequest) -> admin::GetMetricsResponse;
        get_config(admin::GetConfigRequest) -> admin::GetConfigResponse;
        set_log_level(admin::SetLogLevelRequest) -> admin::SetLogLevelResponse;
        set_verbosity(admin::SetVerbosityRequest) -> admin::SetVerbosityResponse;
        get_usage(admin::GetUsageRequest) -> admin::GetUsageResponse;
        list_spans(admin::ListSpansRequest) -> admin::ListSpansResponse;
    }
    streams {}
    bidi {}
}

fake_service! {
    /// A fake of the API `Supervisor` of init.
    FakeSupervisor implements Supervisor, served by SupervisorServer:
    unary {
        list_services(supervisor::ListServicesRequest) -> supervisor::ListServicesResponse;
        restart_service(supervisor::RestartServiceRequest) -> supervisor::RestartServiceResponse;
    }
    streams {
        watch_services as WatchServicesStream(supervisor::WatchServicesRequest) -> supervisor::WatchServicesResponse;
    }
    bidi {}
}

fake_service! {
    /// A fake of the API `PodConfig` of pod-config.
    FakePodConfig implements PodConfig, served by PodConfigServer:
    unary {
        get_object(pod_config::GetObjectRequest) -> pod_config::GetObjectResponse;
        get_live(pod_config::GetLiveRequest) -> pod_config::GetLiveResponse;
        review_token(pod_config::ReviewTokenRequest) -> pod_config::ReviewTokenResponse;
        review_access(pod_config::ReviewAccessRequest) -> pod_config::ReviewAccessResponse;
        get_service_env(pod_config::GetServiceEnvRequest) -> pod_config::GetServiceEnvResponse;
        create_token(pod_config::CreateTokenRequest) -> pod_config::CreateTokenResponse;
        request_pod_certificate(pod_config::RequestPodCertificateRequest) -> pod_config::RequestPodCertificateResponse;
        mutate(pod_config::MutateRequest) -> pod_config::MutateResponse;
        apply_manifest(pod_config::ApplyManifestRequest) -> pod_config::ApplyManifestResponse;
        delete_manifest(pod_config::DeleteManifestRequest) -> pod_config::DeleteManifestResponse;
        list_sources(pod_config::ListSourcesRequest) -> pod_config::ListSourcesResponse;
    }
    streams {
        watch_pods as WatchPodsStream(pod_config::WatchPodsRequest) -> pod_config::WatchPodsResponse;
        watch_node as WatchNodeStream(pod_config::WatchNodeRequest) -> pod_config::WatchNodeResponse;
        list_volume_objects as ListVolumeObjectsStream(pod_config::ListVolumeObjectsRequest) -> pod_config::ListVolumeObjectsResponse;
        watch_volume_objects as WatchVolumeObjectsStream(pod_config::WatchVolumeObjectsRequest) -> pod_config::WatchVolumeObjectsResponse;
    }
    bidi {
        watch_objects as WatchObjectsStream(pod_config::WatchObjectsRequest) -> pod_config::WatchObjectsResponse;
        report_claims_in_use as ReportClaimsInUseStream(pod_config::ReportClaimsInUseRequest) -> pod_config::ReportClaimsInUseResponse;
    }
}

fake_service! {
    /// A fake of the API `PodSync` of pod-sync.
    FakePodSync implements PodSync, served by PodSyncServer:
    unary {
        explain_pod(pod_sync::ExplainPodRequest) -> pod_sync::ExplainPodResponse;
        evict_pod(pod_sync::EvictPodRequest) -> pod_sync::EvictPodResponse;
        retry_pod(pod_sync::RetryPodRequest) -> pod_sync::RetryPodResponse;
    }
    streams {
        list_pods as ListPodsStream(pod_sync::ListPodsRequest) -> pod_sync::PodDocument;
        watch_pods as WatchPodsStream(pod_sync::WatchPodsRequest) -> pod_sync::WatchPodsResponse;
    }
    bidi {}
}

fake_service! {
    /// A fake of the API `Runtime` of runtime-shim.
    FakeRuntime implements Runtime, served by RuntimeServer:
    unary {
        get_pod(runtime::GetPodRequest) -> runtime::GetPodResponse;
        write_container_files(runtime::WriteContainerFilesRequest) -> runtime::WriteContainerFilesResponse;
        filesystem_stats(runtime::FilesystemStatsRequest) -> runtime::FilesystemStatsResponse;
        list_images(runtime::ListImagesRequest) -> runtime::ListImagesResponse;
        collect_garbage(runtime::CollectGarbageRequest) -> runtime::CollectGarbageResponse;
        checkpoint_container(runtime::CheckpointContainerRequest) -> runtime::CheckpointContainerResponse;
    }
    streams {
        watch_pods as WatchPodsStream(runtime::WatchPodsRequest) -> runtime::WatchPodsResponse;
        ensure_image as EnsureImageStream(runtime::EnsureImageRequest) -> runtime::EnsureImageResponse;
        read_logs as ReadLogsStream(runtime::ReadLogsRequest) -> runtime::ReadLogsResponse;
        read_node_logs as ReadNodeLogsStream(runtime::ReadNodeLogsRequest) -> runtime::ReadNodeLogsResponse;
    }
    bidi {
        sync as SyncStream(runtime::SyncRequest) -> common::SyncAck;
        exec as ExecStream(runtime::ExecRequest) -> runtime::ExecResponse;
        stream as StreamStream(runtime::StreamRequest) -> runtime::StreamResponse;
    }
}

fake_service! {
    /// A fake of the API `VolumeManager` of volume-manager.
    FakeVolumeManager implements VolumeManager, served by VolumeManagerServer:
    unary {
        unmount_pod(volume_manager::UnmountPodRequest) -> volume_manager::UnmountPodResponse;
        prepare_container(volume_manager::PrepareContainerRequest) -> volume_manager::PrepareContainerResponse;
        list_orphans(volume_manager::ListOrphansRequest) -> volume_manager::ListOrphansResponse;
        clean_orphan(volume_manager::CleanOrphanRequest) -> volume_manager::CleanOrphanResponse;
    }
    streams {
        mount_pod as MountPodStream(volume_manager::MountPodRequest) -> volume_manager::MountPodResponse;
        pod_volume_stats as PodVolumeStatsStream(volume_manager::PodVolumeStatsRequest) -> volume_manager::PodVolumeStatsResponse;
        watch_pod_volumes as WatchPodVolumesStream(volume_manager::WatchPodVolumesRequest) -> volume_manager::WatchPodVolumesResponse;
        watch_csi_drivers as WatchCsiDriversStream(volume_manager::WatchCsiDriversRequest) -> volume_manager::WatchCsiDriversResponse;
        watch_volumes_in_use as WatchVolumesInUseStream(volume_manager::WatchVolumesInUseRequest) -> volume_manager::WatchVolumesInUseResponse;
    }
    bidi {
        sync as SyncStream(volume_manager::SyncRequest) -> common::SyncAck;
    }
}

fake_service! {
    /// A fake of the API `ResourceManager` of resource-manager.
    FakeResourceManager implements ResourceManager, served by ResourceManagerServer:
    unary {
        admit_pod(resource_manager::AdmitPodRequest) -> resource_manager::AdmitPodResponse;
        resize_pod(resource_manager::ResizePodRequest) -> resource_manager::ResizePodResponse;
        defer_pod(resource_manager::DeferPodRequest) -> resource_manager::DeferPodResponse;
        prepare_pod(resource_manager::PreparePodRequest) -> resource_manager::PreparePodResponse;
        release_pod(resource_manager::ReleasePodRequest) -> resource_manager::ReleasePodResponse;
        drain(resource_manager::DrainRequest) -> resource_manager::DrainResponse;
        uncordon(resource_manager::UncordonRequest) -> resource_manager::UncordonResponse;
        get_drain(resource_manager::GetDrainRequest) -> resource_manager::GetDrainResponse;
        node_stats(resource_manager::NodeStatsRequest) -> resource_manager::NodeStatsResponse;
    }
    streams {
        watch_machine as WatchMachineStream(resource_manager::WatchMachineRequest) -> resource_manager::Machine;
        watch_evictions as WatchEvictionsStream(resource_manager::WatchEvictionsRequest) -> resource_manager::WatchEvictionsResponse;
        cgroup_stats as CgroupStatsStream(resource_manager::CgroupStatsRequest) -> resource_manager::CgroupStatsResponse;
        pod_stats as PodStatsStream(resource_manager::PodStatsRequest) -> resource_manager::PodStatsResponse;
    }
    bidi {
        sync as SyncStream(resource_manager::SyncRequest) -> common::SyncAck;
    }
}

fake_service! {
    /// A fake of the API `NodeStatus` of node-status.
    FakeNodeStatus implements NodeStatus, served by NodeStatusServer:
    unary {
        get_report_state(node_status::GetReportStateRequest) -> node_status::GetReportStateResponse;
        get_node(node_status::GetNodeRequest) -> node_status::GetNodeResponse;
    }
    streams {}
    bidi {}
}
