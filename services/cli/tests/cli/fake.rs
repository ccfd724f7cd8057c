//! A fake agent: every service answers on a real socket from one [`World`].

mod shell;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_util::Stream;
use keelson_config::{Config, Paths, ServiceName};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::admin::v1::admin_server::{Admin, AdminServer};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::events::v1::events_server::EventsServer;
use keelson_proto::keelson::node_status::v1 as node_status;
use keelson_proto::keelson::node_status::v1::node_status_server::{NodeStatus, NodeStatusServer};
use keelson_proto::keelson::pod_config::v1 as pod_config;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::pod_sync::v1 as pod_sync;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server::{PodSync, PodSyncServer};
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_proto::keelson::supervisor::v1 as supervisor;
use keelson_proto::keelson::supervisor::v1::supervisor_server::{Supervisor, SupervisorServer};
use keelson_proto::keelson::volume_manager::v1 as volumes;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::status::error;
use keelson_service_kit::{CancellationToken, EventRing, Metrics};
use tokio::sync::broadcast;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::BroadcastStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the services answer, and the calls that they received.
#[derive(Debug, Default)]
pub struct World {
    pub pods: Vec<pod_sync::PodDocument>,
    pub services: Vec<supervisor::Service>,
    pub node: serde_json::Value,
    pub explanation: pod_sync::ExplainPodResponse,
    pub sources: Vec<pod_config::Source>,
    pub progress: admin::GetProgressResponse,
    pub usage: admin::GetUsageResponse,
    /// Chunks of the only log.
    pub log: Vec<&'static str>,
    pub images: Vec<runtime::RuntimeImage>,
    pub volumes: Vec<volumes::PodVolumes>,
    /// Updates for watches, sent after the replay.
    pub pod_updates: Updates<pod_sync::WatchPodsResponse>,
    pub service_updates: Updates<supervisor::WatchServicesResponse>,
    pub volume_updates: Updates<volumes::WatchPodVolumesResponse>,
    /// Whether pods remain after their deletion.
    pub keeps_deleted: bool,
    pub events: EventRing,
    pub calls: CallLog,
}

/// Every call that changes something or carries arguments, as text, in order.
#[derive(Debug, Default)]
pub struct CallLog(Mutex<Vec<String>>);

impl CallLog {
    fn record(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// A broadcast of updates to all watches.
#[derive(Debug, Clone)]
pub struct Updates<T>(broadcast::Sender<T>);

impl<T: Clone> Default for Updates<T> {
    fn default() -> Self {
        Self(broadcast::channel(64).0)
    }
}

impl<T: Clone + Send + 'static> Updates<T> {
    /// Sends an update to all watches; there must be one.
    pub fn send(&self, item: T) {
        assert!(self.0.send(item).is_ok(), "there is no watch");
    }

    /// A stream of the replay and all later updates.
    fn stream_after(&self, replay: Vec<T>) -> Response<Boxed<T>> {
        let updates = BroadcastStream::new(self.0.subscribe())
            .map(|item| item.map_err(|e| Status::data_loss(e.to_string())));
        Response::new(Box::pin(tokio_stream::iter(replay.into_iter().map(Ok)).chain(updates)))
    }
}

/// A running fake agent, stopped when dropped.
pub struct Fake {
    pub run_dir: PathBuf,
    pub world: Arc<World>,
    _folder: Option<tempfile::TempDir>,
    shutdown: CancellationToken,
    _runtime: tokio::runtime::Runtime,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Fake {
    /// Starts all services.
    pub fn start(world: World) -> Self {
        Self::start_some(world, &ServiceName::ALL, &Config::default())
    }

    /// Starts some of the services, with the users of `config`.
    pub fn start_some(world: World, services: &[ServiceName], config: &Config) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut fake = Self::start_in(folder.path(), world, services, config);
        fake._folder = Some(folder);
        fake
    }

    /// Starts some of the services in an existing folder.
    pub fn start_in(run_dir: &Path, world: World, services: &[ServiceName], config: &Config) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let world = Arc::new(world);
        let shutdown = CancellationToken::new();
        let (bound, bound_seen) = std::sync::mpsc::channel();
        for service in services {
            let socket = Paths::socket_below(run_dir, *service);
            std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
            let stack = StackLayer::new(CallerPolicy::new(config), Metrics::new());
            let (routes, shutdown, bound) = (routes(*service, &world), shutdown.clone(), bound.clone());
            runtime.spawn(async move {
                serve(&socket, routes, stack, shutdown, || bound.send(()).unwrap()).await
            });
        }
        for _ in services {
            bound_seen.recv().unwrap();
        }
        Self { run_dir: run_dir.to_owned(), world, _folder: None, shutdown, _runtime: runtime }
    }
}

fn routes(service: ServiceName, world: &Arc<World>) -> Routes {
    let api = Api { world: Arc::clone(world) };
    // Only pod-sync has events.
    let events = if service == ServiceName::PodSync { world.events.clone() } else { EventRing::default() };
    let routes = Routes::new(AdminServer::new(api.clone())).add_service(EventsServer::new(events));
    match service {
        ServiceName::Init => routes.add_service(SupervisorServer::new(api)),
        ServiceName::PodConfig => routes.add_service(PodConfigServer::new(api)),
        ServiceName::PodSync => routes.add_service(PodSyncServer::new(api)),
        ServiceName::RuntimeShim => routes.add_service(RuntimeServer::new(api)),
        ServiceName::NodeStatus => routes.add_service(NodeStatusServer::new(api)),
        ServiceName::VolumeManager => routes.add_service(VolumeManagerServer::new(api)),
        ServiceName::ResourceManager | ServiceName::NodeApi => routes,
    }
}

#[derive(Clone)]
struct Api {
    world: Arc<World>,
}

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("the command does not use this call"))
}

fn stream<T: Send + 'static>(items: Vec<T>) -> Response<Boxed<T>> {
    Response::new(Box::pin(tokio_stream::iter(items.into_iter().map(Ok))))
}

#[tonic::async_trait]
impl Admin for Api {
    async fn get_progress(
        &self,
        _: Request<admin::GetProgressRequest>,
    ) -> Result<Response<admin::GetProgressResponse>, Status> {
        Ok(Response::new(self.world.progress.clone()))
    }

    async fn get_metrics(
        &self,
        _: Request<admin::GetMetricsRequest>,
    ) -> Result<Response<admin::GetMetricsResponse>, Status> {
        unused()
    }

    async fn get_config(
        &self,
        _: Request<admin::GetConfigRequest>,
    ) -> Result<Response<admin::GetConfigResponse>, Status> {
        unused()
    }

    async fn set_log_level(
        &self,
        _: Request<admin::SetLogLevelRequest>,
    ) -> Result<Response<admin::SetLogLevelResponse>, Status> {
        unused()
    }

    async fn get_usage(
        &self,
        _: Request<admin::GetUsageRequest>,
    ) -> Result<Response<admin::GetUsageResponse>, Status> {
        Ok(Response::new(self.world.usage))
    }

    async fn list_spans(
        &self,
        _: Request<admin::ListSpansRequest>,
    ) -> Result<Response<admin::ListSpansResponse>, Status> {
        Ok(Response::new(admin::ListSpansResponse::default()))
    }
}

#[tonic::async_trait]
impl Supervisor for Api {
    type WatchServicesStream = Boxed<supervisor::WatchServicesResponse>;

    async fn list_services(
        &self,
        _: Request<supervisor::ListServicesRequest>,
    ) -> Result<Response<supervisor::ListServicesResponse>, Status> {
        let calls = self.world.calls.all();
        let mut services = self.world.services.clone();
        for service in &mut services {
            let restarts = calls.iter().filter(|call| **call == format!("restart {}", service.name)).count();
            // Each restart changes the process id.
            service.pid += u32::try_from(restarts).unwrap();
        }
        Ok(Response::new(supervisor::ListServicesResponse { services }))
    }

    async fn watch_services(
        &self,
        _: Request<supervisor::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        use supervisor::watch_services_response::Item;
        let mut items: Vec<Item> = self.world.services.iter().cloned().map(Item::Service).collect();
        items.push(Item::Synced(true));
        let items =
            items.into_iter().map(|item| supervisor::WatchServicesResponse { item: Some(item) }).collect();
        Ok(self.world.service_updates.stream_after(items))
    }

    async fn restart_service(
        &self,
        request: Request<supervisor::RestartServiceRequest>,
    ) -> Result<Response<supervisor::RestartServiceResponse>, Status> {
        self.world.calls.record(format!("restart {}", request.into_inner().name));
        Ok(Response::new(supervisor::RestartServiceResponse {}))
    }
}

#[tonic::async_trait]
impl PodSync for Api {
    type ListPodsStream = Boxed<pod_sync::PodDocument>;
    type WatchPodsStream = Boxed<pod_sync::WatchPodsResponse>;

    async fn list_pods(
        &self,
        _: Request<pod_sync::ListPodsRequest>,
    ) -> Result<Response<Self::ListPodsStream>, Status> {
        Ok(stream(self.world.pods.clone()))
    }

    async fn watch_pods(
        &self,
        _: Request<pod_sync::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use pod_sync::watch_pods_response::Item;
        let mut items: Vec<Item> = self.world.pods.iter().cloned().map(Item::Pod).collect();
        items.push(Item::Synced(common::Synced {}));
        if !self.world.keeps_deleted {
            items.extend(self.world.pods.iter().map(|p| Item::GoneUid(p.uid.clone())));
        }
        let items = items.into_iter().map(|item| pod_sync::WatchPodsResponse { item: Some(item) }).collect();
        Ok(self.world.pod_updates.stream_after(items))
    }

    async fn explain_pod(
        &self,
        request: Request<pod_sync::ExplainPodRequest>,
    ) -> Result<Response<pod_sync::ExplainPodResponse>, Status> {
        self.world.calls.record(format!("explain {}", request.into_inner().uid));
        Ok(Response::new(self.world.explanation.clone()))
    }

    async fn evict_pod(
        &self,
        _: Request<pod_sync::EvictPodRequest>,
    ) -> Result<Response<pod_sync::EvictPodResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn retry_pod(
        &self,
        request: Request<pod_sync::RetryPodRequest>,
    ) -> Result<Response<pod_sync::RetryPodResponse>, Status> {
        let request = request.into_inner();
        self.world.calls.record(format!("retry {}/{}", request.namespace, request.name));
        Ok(Response::new(pod_sync::RetryPodResponse {}))
    }
}

#[tonic::async_trait]
impl PodConfig for Api {
    type WatchPodsStream = Boxed<pod_config::WatchPodsResponse>;
    type WatchNodeStream = Boxed<pod_config::WatchNodeResponse>;
    type WatchObjectsStream = Boxed<pod_config::WatchObjectsResponse>;

    async fn watch_pods(
        &self,
        _: Request<pod_config::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        unused()
    }

    async fn watch_node(
        &self,
        _: Request<pod_config::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        unused()
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pod_config::WatchObjectsRequest>>,
    ) -> Result<Response<Self::WatchObjectsStream>, Status> {
        unused()
    }

    async fn get_object(
        &self,
        _: Request<pod_config::GetObjectRequest>,
    ) -> Result<Response<pod_config::GetObjectResponse>, Status> {
        unused()
    }

    async fn get_service_env(
        &self,
        _: Request<pod_config::GetServiceEnvRequest>,
    ) -> Result<Response<pod_config::GetServiceEnvResponse>, Status> {
        unused()
    }

    async fn mutate(
        &self,
        _: Request<pod_config::MutateRequest>,
    ) -> Result<Response<pod_config::MutateResponse>, Status> {
        unused()
    }

    async fn create_token(
        &self,
        _: Request<pod_config::CreateTokenRequest>,
    ) -> Result<Response<pod_config::CreateTokenResponse>, Status> {
        unused()
    }

    async fn apply_manifest(
        &self,
        request: Request<pod_config::ApplyManifestRequest>,
    ) -> Result<Response<pod_config::ApplyManifestResponse>, Status> {
        let request = request.into_inner();
        let text = String::from_utf8_lossy(&request.manifest).into_owned();
        self.world.calls.record(format!("apply {}: {text}", request.name_hint));
        if text.contains("broken") {
            let hint = &request.name_hint;
            let message =
                format!("{hint}:1: metadata.name: Required value\n{hint}:4: spec.containers: Required value");
            return Err(error(Code::InvalidArgument, "MANIFEST", message));
        }
        let pod = pod_config::AppliedPod {
            uid: "u1".into(),
            namespace: "default".into(),
            name: "web-edge".into(),
            result: "created".into(),
            warnings: Vec::new(),
        };
        Ok(Response::new(pod_config::ApplyManifestResponse { pods: vec![pod] }))
    }

    async fn delete_manifest(
        &self,
        request: Request<pod_config::DeleteManifestRequest>,
    ) -> Result<Response<pod_config::DeleteManifestResponse>, Status> {
        let request = request.into_inner();
        self.world.calls.record(format!("delete {}/{}", request.namespace, request.name));
        if request.name.starts_with("static") {
            let message = "default/static-edge comes from /m/static.yaml; remove that file";
            return Err(error(Code::FailedPrecondition, "NOT_STORED", message));
        }
        if request.name.starts_with("absent") {
            return Err(error(Code::NotFound, "NOT_STORED", format!("no pod {}", request.name)));
        }
        Ok(Response::new(pod_config::DeleteManifestResponse { uid: "u1".into() }))
    }

    async fn review_token(
        &self,
        _: Request<pod_config::ReviewTokenRequest>,
    ) -> Result<Response<pod_config::ReviewTokenResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn review_access(
        &self,
        _: Request<pod_config::ReviewAccessRequest>,
    ) -> Result<Response<pod_config::ReviewAccessResponse>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn list_sources(
        &self,
        _: Request<pod_config::ListSourcesRequest>,
    ) -> Result<Response<pod_config::ListSourcesResponse>, Status> {
        Ok(Response::new(pod_config::ListSourcesResponse { sources: self.world.sources.clone() }))
    }
}

#[tonic::async_trait]
impl NodeStatus for Api {
    async fn get_report_state(
        &self,
        _: Request<node_status::GetReportStateRequest>,
    ) -> Result<Response<node_status::GetReportStateResponse>, Status> {
        let control_plane = "none".into();
        Ok(Response::new(node_status::GetReportStateResponse { control_plane, ..Default::default() }))
    }

    async fn get_node(
        &self,
        _: Request<node_status::GetNodeRequest>,
    ) -> Result<Response<node_status::GetNodeResponse>, Status> {
        let node_json = self.world.node.to_string().into();
        Ok(Response::new(node_status::GetNodeResponse { node_json }))
    }
}

#[tonic::async_trait]
impl Runtime for Api {
    type SyncStream = Boxed<common::SyncAck>;
    type WatchPodsStream = Boxed<runtime::WatchPodsResponse>;
    type EnsureImageStream = Boxed<runtime::EnsureImageResponse>;
    type ReadLogsStream = Boxed<runtime::ReadLogsResponse>;
    type ExecStream = Boxed<runtime::ExecResponse>;
    type StreamStream = Boxed<runtime::StreamResponse>;

    async fn sync(
        &self,
        _: Request<Streaming<runtime::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        unused()
    }

    async fn watch_pods(
        &self,
        _: Request<runtime::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        unused()
    }

    async fn get_pod(
        &self,
        _: Request<runtime::GetPodRequest>,
    ) -> Result<Response<runtime::GetPodResponse>, Status> {
        unused()
    }

    async fn ensure_image(
        &self,
        _: Request<runtime::EnsureImageRequest>,
    ) -> Result<Response<Self::EnsureImageStream>, Status> {
        unused()
    }

    async fn write_container_files(
        &self,
        _: Request<runtime::WriteContainerFilesRequest>,
    ) -> Result<Response<runtime::WriteContainerFilesResponse>, Status> {
        unused()
    }

    async fn read_logs(
        &self,
        request: Request<runtime::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        let r = request.into_inner();
        self.world.calls.record(format!(
            "logs {}/{} follow={} previous={} timestamps={} tail={:?} bytes={:?} since={}",
            r.pod_uid,
            r.container,
            r.follow,
            r.previous,
            r.timestamps,
            r.tail_lines,
            r.limit_bytes,
            r.since_unix_nanos != 0
        ));
        let chunks = self.world.log.iter().map(|text| runtime::ReadLogsResponse { data: (*text).into() });
        Ok(stream(chunks.collect()))
    }

    async fn filesystem_stats(
        &self,
        _: Request<runtime::FilesystemStatsRequest>,
    ) -> Result<Response<runtime::FilesystemStatsResponse>, Status> {
        unused()
    }

    async fn list_images(
        &self,
        _: Request<runtime::ListImagesRequest>,
    ) -> Result<Response<runtime::ListImagesResponse>, Status> {
        Ok(Response::new(runtime::ListImagesResponse { images: self.world.images.clone() }))
    }

    async fn stream(
        &self,
        _: Request<Streaming<runtime::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn exec(
        &self,
        request: Request<Streaming<runtime::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        Ok(Response::new(shell::run(Arc::clone(&self.world), request.into_inner())))
    }

    async fn collect_garbage(
        &self,
        _: Request<runtime::CollectGarbageRequest>,
    ) -> Result<Response<runtime::CollectGarbageResponse>, Status> {
        unused()
    }
}

#[tonic::async_trait]
impl VolumeManager for Api {
    type SyncStream = Boxed<common::SyncAck>;
    type MountPodStream = Boxed<volumes::MountPodResponse>;
    type WatchPodVolumesStream = Boxed<volumes::WatchPodVolumesResponse>;
    type PodVolumeStatsStream = Boxed<volumes::PodVolumeStatsResponse>;

    async fn sync(
        &self,
        _: Request<Streaming<volumes::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        unused()
    }

    async fn mount_pod(
        &self,
        _: Request<volumes::MountPodRequest>,
    ) -> Result<Response<Self::MountPodStream>, Status> {
        unused()
    }

    async fn unmount_pod(
        &self,
        _: Request<volumes::UnmountPodRequest>,
    ) -> Result<Response<volumes::UnmountPodResponse>, Status> {
        unused()
    }

    async fn prepare_container(
        &self,
        _: Request<volumes::PrepareContainerRequest>,
    ) -> Result<Response<volumes::PrepareContainerResponse>, Status> {
        unused()
    }

    async fn pod_volume_stats(
        &self,
        _: Request<volumes::PodVolumeStatsRequest>,
    ) -> Result<Response<Self::PodVolumeStatsStream>, Status> {
        unused()
    }

    async fn watch_pod_volumes(
        &self,
        _: Request<volumes::WatchPodVolumesRequest>,
    ) -> Result<Response<Self::WatchPodVolumesStream>, Status> {
        use volumes::watch_pod_volumes_response::Item;
        let mut items: Vec<Item> = self.world.volumes.iter().cloned().map(Item::Pod).collect();
        items.push(Item::Synced(common::Synced {}));
        let items =
            items.into_iter().map(|item| volumes::WatchPodVolumesResponse { item: Some(item) }).collect();
        Ok(self.world.volume_updates.stream_after(items))
    }
}
