//! Fake services on real sockets, and a writer that records.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used)]

mod images;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_cri::v1::image_service_server::ImageServiceServer;
use keelson_config::{Config, ServiceName};
use keelson_kube_model::Node;
use keelson_node_status::{ControlPlaneWriter, GonePods, PodUpdate, ReportState, WriteError};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::admin::v1::admin_server::{Admin, AdminServer};
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::events::v1::Event;
use keelson_proto::keelson::events::v1::events_server::EventsServer;
use keelson_proto::keelson::pod_sync::v1 as ps;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server::{PodSync, PodSyncServer};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_service_kit::server::{self, CallerPolicy, StackLayer};
use keelson_service_kit::{CancellationToken, Context, EventRing, WatchHub, WatchItem};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use images::FakeImages;

type Answer<T> = Result<Response<T>, Status>;
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Polls until there is an answer; fails the test after 20 s.
pub async fn eventually<T>(mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), asking).await.expect("no answer within 20 s")
}

/// Serves routes at the socket of the context's service until its shutdown.
pub fn serve(ctx: &Context, routes: Routes) {
    let socket = ctx.config.paths.socket(ctx.service);
    let stack = StackLayer::new(CallerPolicy::new(&ctx.config), ctx.metrics.clone());
    let shutdown = ctx.shutdown.clone();
    tokio::spawn(async move { server::serve(&socket, routes, stack, shutdown, || {}).await.unwrap() });
}

/// The services that node-status calls, in a folder of their own.
pub struct FakePeers {
    dir: tempfile::TempDir,
    pub pods: WatchHub<String, ps::PodDocument>,
    pub images: FakeImages,
    machine: WatchHub<(), rm::Machine>,
    runtime: WatchHub<(), rt::RuntimeState>,
    stuck: HashMap<ServiceName, Arc<AtomicBool>>,
    events: HashMap<ServiceName, EventRing>,
    running: Mutex<HashMap<ServiceName, CancellationToken>>,
}

impl FakePeers {
    pub async fn start() -> Self {
        let all = ServiceName::NodeStatus.callees();
        let peers = Self {
            dir: tempfile::tempdir().unwrap(),
            pods: WatchHub::new(),
            images: FakeImages::default(),
            machine: WatchHub::new(),
            runtime: WatchHub::new(),
            stuck: all.iter().map(|name| (*name, Arc::default())).collect(),
            events: all.iter().map(|name| (*name, EventRing::default())).collect(),
            running: Mutex::default(),
        };
        for name in ServiceName::ALL {
            let config = peers.context(name).config;
            std::fs::create_dir_all(config.paths.socket_dir(name)).unwrap();
        }
        for name in all {
            peers.restart(*name);
        }
        peers
    }

    pub fn context(&self, service: ServiceName) -> Context {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = self.dir.path().join("run");
        config.paths.state_dir = self.dir.path().join("state");
        Context::detached(service, config)
    }

    pub fn machine(&self) {
        let amounts = [("cpu", 2000), ("memory", 1 << 30), ("pods", 110), ("ephemeral-storage", 1 << 30)];
        let amounts: HashMap<String, i64> = amounts.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        let machine = rm::Machine {
            capacity: amounts.clone(),
            allocatable: amounts,
            architecture: "x86_64".into(),
            boot_id: "b1".into(),
            swap_bytes: 1 << 20,
            ..rm::Machine::default()
        };
        self.machine.set((), machine);
    }

    pub fn runtime(&self, ready: bool, message: &str) {
        let state = rt::RuntimeState {
            name: "containerd".into(),
            version: "1.6.20".into(),
            ready,
            network_ready: ready,
            message: message.into(),
            ..rt::RuntimeState::default()
        };
        self.runtime.set((), state);
    }

    pub fn stuck(&self, service: ServiceName, stuck: bool) {
        self.stuck[&service].store(stuck, Ordering::Relaxed);
    }

    pub fn events(&self, service: ServiceName) -> EventRing {
        self.events[&service].clone()
    }

    pub fn kill(&self, service: ServiceName) {
        let token = self.running.lock().unwrap().remove(&service).expect("it runs");
        token.cancel();
        let _ = std::fs::remove_file(self.context(service).config.paths.socket(service));
    }

    pub fn restart(&self, service: ServiceName) {
        let ctx = self.context(service);
        let routes = Routes::new(AdminServer::new(FakeAdmin(self.stuck[&service].clone())))
            .add_service(EventsServer::new(self.events[&service].clone()));
        let routes = match service {
            ServiceName::PodSync => routes.add_service(PodSyncServer::new(Fake(self.pods.clone()))),
            ServiceName::RuntimeShim => routes
                .add_service(RuntimeServer::new(Fake(self.runtime.clone())))
                .add_service(ImageServiceServer::new(self.images.clone())),
            ServiceName::ResourceManager => {
                routes.add_service(ResourceManagerServer::new(Fake(self.machine.clone())))
            }
            _ => routes,
        };
        // A dying process does not drain: its connections end with it.
        let shutdown = ctx.shutdown.clone();
        let socket = ctx.config.paths.socket(service);
        let stack = StackLayer::new(CallerPolicy::new(&ctx.config), ctx.metrics.clone());
        let token = shutdown.clone();
        tokio::spawn(async move {
            tokio::select! {
                end = server::serve(&socket, routes, stack, CancellationToken::new(), || {}) => end.unwrap(),
                () = token.cancelled() => {}
            }
        });
        self.running.lock().unwrap().insert(service, shutdown);
    }
}

/// A Pod with this status.
pub fn pod_document(uid: &str, phase: &str, ready: bool, version: u64) -> ps::PodDocument {
    let ready = if ready { "True" } else { "False" };
    let json = format!(
        r#"{{"metadata":{{"uid":"{uid}"}},"status":{{"phase":"{phase}","conditions":[{{"type":"Ready","status":"{ready}"}}]}}}}"#
    );
    ps::PodDocument {
        uid: uid.into(),
        namespace: "default".into(),
        name: "web".into(),
        pod_json: json.into_bytes().into(),
        version,
        ..ps::PodDocument::default()
    }
}

struct Fake<K, V>(WatchHub<K, V>);

struct FakeAdmin(Arc<AtomicBool>);

#[tonic::async_trait]
impl Admin for FakeAdmin {
    async fn get_progress(
        &self,
        _: Request<admin::GetProgressRequest>,
    ) -> Answer<admin::GetProgressResponse> {
        let silent_ms = if self.0.load(Ordering::Relaxed) { 60_000 } else { 0 };
        let work = admin::Loop { name: "work".into(), silent_ms, stuck_after_ms: 30_000 };
        Ok(Response::new(admin::GetProgressResponse { loops: vec![work], ..Default::default() }))
    }

    async fn get_metrics(&self, _: Request<admin::GetMetricsRequest>) -> Answer<admin::GetMetricsResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn get_config(&self, _: Request<admin::GetConfigRequest>) -> Answer<admin::GetConfigResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn set_log_level(
        &self,
        _: Request<admin::SetLogLevelRequest>,
    ) -> Answer<admin::SetLogLevelResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn get_usage(&self, _: Request<admin::GetUsageRequest>) -> Answer<admin::GetUsageResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn list_spans(&self, _: Request<admin::ListSpansRequest>) -> Answer<admin::ListSpansResponse> {
        Err(Status::unimplemented("not faked"))
    }
}

#[tonic::async_trait]
impl PodSync for Fake<String, ps::PodDocument> {
    type ListPodsStream = BoxStream<ps::PodDocument>;
    type WatchPodsStream = BoxStream<ps::WatchPodsResponse>;

    async fn list_pods(&self, _: Request<ps::ListPodsRequest>) -> Answer<Self::ListPodsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn watch_pods(&self, _: Request<ps::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        use ps::watch_pods_response::Item;
        let stream = self.0.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set(_, document) => Item::Pod(document),
                WatchItem::Gone(uid) => Item::GoneUid(uid),
                WatchItem::Synced => Item::Synced(Synced {}),
            };
            Ok(ps::WatchPodsResponse { item: Some(item) })
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn explain_pod(&self, _: Request<ps::ExplainPodRequest>) -> Answer<ps::ExplainPodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn evict_pod(&self, _: Request<ps::EvictPodRequest>) -> Answer<ps::EvictPodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn retry_pod(&self, _: Request<ps::RetryPodRequest>) -> Answer<ps::RetryPodResponse> {
        Err(Status::unimplemented("not faked"))
    }
}

#[tonic::async_trait]
impl ResourceManager for Fake<(), rm::Machine> {
    type SyncStream = BoxStream<keelson_proto::keelson::common::v1::SyncAck>;
    type WatchMachineStream = BoxStream<rm::Machine>;
    type PodStatsStream = BoxStream<rm::PodStatsResponse>;
    type CgroupStatsStream = BoxStream<rm::CgroupStatsResponse>;
    type WatchEvictionsStream = BoxStream<rm::WatchEvictionsResponse>;

    async fn node_stats(&self, _: Request<rm::NodeStatsRequest>) -> Answer<rm::NodeStatsResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn cgroup_stats(&self, _: Request<rm::CgroupStatsRequest>) -> Answer<Self::CgroupStatsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn pod_stats(&self, _: Request<rm::PodStatsRequest>) -> Answer<Self::PodStatsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn watch_evictions(
        &self,
        _: Request<rm::WatchEvictionsRequest>,
    ) -> Answer<Self::WatchEvictionsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn watch_machine(&self, _: Request<rm::WatchMachineRequest>) -> Answer<Self::WatchMachineStream> {
        let stream = self.0.subscribe().into_stream(|item| item).filter_map(async |item| match item {
            WatchItem::Set((), machine) => Some(Ok(machine)),
            _ => None,
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn sync(&self, _: Request<Streaming<rm::SyncRequest>>) -> Answer<Self::SyncStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn admit_pod(&self, _: Request<rm::AdmitPodRequest>) -> Answer<rm::AdmitPodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn defer_pod(&self, _: Request<rm::DeferPodRequest>) -> Answer<rm::DeferPodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn prepare_pod(&self, _: Request<rm::PreparePodRequest>) -> Answer<rm::PreparePodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn release_pod(&self, _: Request<rm::ReleasePodRequest>) -> Answer<rm::ReleasePodResponse> {
        Err(Status::unimplemented("not faked"))
    }
}

#[tonic::async_trait]
impl Runtime for Fake<(), rt::RuntimeState> {
    type SyncStream = BoxStream<keelson_proto::keelson::common::v1::SyncAck>;
    type WatchPodsStream = BoxStream<rt::WatchPodsResponse>;
    type EnsureImageStream = BoxStream<rt::EnsureImageResponse>;
    type ReadLogsStream = BoxStream<rt::ReadLogsResponse>;
    type ExecStream = BoxStream<rt::ExecResponse>;
    type StreamStream = BoxStream<rt::StreamResponse>;

    async fn watch_pods(&self, _: Request<rt::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        use rt::watch_pods_response::Item;
        let stream = self.0.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set((), state) => Item::State(state),
                WatchItem::Gone(()) => Item::GoneUid("unknown".into()),
                WatchItem::Synced => Item::Synced(Synced {}),
            };
            Ok(rt::WatchPodsResponse { item: Some(item) })
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn sync(&self, _: Request<Streaming<rt::SyncRequest>>) -> Answer<Self::SyncStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn get_pod(&self, _: Request<rt::GetPodRequest>) -> Answer<rt::GetPodResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn ensure_image(&self, _: Request<rt::EnsureImageRequest>) -> Answer<Self::EnsureImageStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn write_container_files(
        &self,
        _: Request<rt::WriteContainerFilesRequest>,
    ) -> Answer<rt::WriteContainerFilesResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn read_logs(&self, _: Request<rt::ReadLogsRequest>) -> Answer<Self::ReadLogsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn filesystem_stats(
        &self,
        _: Request<rt::FilesystemStatsRequest>,
    ) -> Answer<rt::FilesystemStatsResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn list_images(&self, _: Request<rt::ListImagesRequest>) -> Answer<rt::ListImagesResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn stream(
        &self,
        _: Request<Streaming<rt::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        Err(Status::unimplemented("not faked"))
    }

    async fn exec(&self, _: Request<Streaming<rt::ExecRequest>>) -> Answer<Self::ExecStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn collect_garbage(
        &self,
        _: Request<rt::CollectGarbageRequest>,
    ) -> Answer<rt::CollectGarbageResponse> {
        Err(Status::unimplemented("not faked"))
    }
}

/// Records what it is given.
#[derive(Default)]
pub struct RecordingWriter {
    pods: Mutex<Vec<(String, bool)>>,
    events: Mutex<Vec<String>>,
    gone: Mutex<Vec<GonePods>>,
}

impl RecordingWriter {
    /// The dropped pods, in order.
    pub fn gone(&self) -> Vec<GonePods> {
        self.gone.lock().unwrap().clone()
    }

    /// UID and whether phase or readiness had changed, in the order of the writes.
    pub fn pods(&self) -> Vec<(String, bool)> {
        self.pods.lock().unwrap().clone()
    }

    /// `service reason`, in the order of the writes.
    pub fn events(&self) -> Vec<String> {
        self.events.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl ControlPlaneWriter for RecordingWriter {
    fn control_plane(&self) -> &'static str {
        "recording"
    }

    async fn renew_lease(&self) -> Result<(), WriteError> {
        Ok(())
    }

    async fn write_node(&self, _: &Node) -> Result<(), WriteError> {
        Ok(())
    }

    async fn write_pod(&self, pod: PodUpdate) -> Result<(), WriteError> {
        self.pods.lock().unwrap().push((pod.report.uid.clone(), pod.urgent));
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        self.gone.lock().unwrap().push(gone);
    }

    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError> {
        let lines = events.iter().map(|event| format!("{service} {}", event.reason));
        self.events.lock().unwrap().extend(lines);
        Ok(())
    }

    fn state(&self) -> ReportState {
        ReportState::default()
    }
}
