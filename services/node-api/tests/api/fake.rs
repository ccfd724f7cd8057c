//! Fakes of the other services over real sockets, and a small HTTP client.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, Request as HttpRequest, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use keelson_config::{Config, ServiceName};
use keelson_node_api::connection_limits::{ConnectionLimiter, ConnectionLimits};
use keelson_node_api::{Access, RequestMetrics, Slis};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::admin::v1::admin_server::{Admin, AdminServer};
use keelson_proto::keelson::pod_sync::v1 as ps;
use keelson_proto::keelson::pod_sync::v1::pod_sync_server::{PodSync, PodSyncServer};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_service_kit::server::{self, CallerPolicy, StackLayer};
use keelson_service_kit::status::error;
use keelson_service_kit::{CancellationToken, Context};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::command::Command;

type Answer<T> = Result<Response<T>, Status>;
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A node whose other services are fakes.
pub struct World {
    dir: tempfile::TempDir,
    pub shared: Arc<Shared>,
    pub ctx: Context,
    pub slis: Slis,
}

/// What the fakes answer, and the requests that they received.
#[derive(Default)]
pub struct Shared {
    pub pods: Mutex<Vec<ps::PodDocument>>,
    /// The error that ends the list after the pods.
    pub list_error: Mutex<Option<Status>>,
    pub log: Mutex<Vec<&'static str>>,
    pub log_error: Mutex<Option<Status>>,
    pub log_requests: Mutex<Vec<rt::ReadLogsRequest>>,
    /// The writing end of the followed log; closed when its reader has disconnected.
    pub following: Mutex<Option<mpsc::Sender<Result<rt::ReadLogsResponse, Status>>>>,
    pub silent_ms: Mutex<u64>,
    pub metrics: Mutex<String>,
    /// The statistics of the node; `None`: the call fails.
    pub node_stats: Mutex<Option<rm::NodeStatsResponse>>,
    pub pod_stats: Mutex<Vec<rm::PodStatsResponse>>,
    /// The error that ends the statistics after the pods.
    pub pod_stats_error: Mutex<Option<Status>>,
    /// The cgroups; `None`: the call fails.
    pub cgroups: Mutex<Option<Vec<rm::CgroupStatsResponse>>>,
    /// The value of `cpu_and_memory_only` in each request.
    pub cpu_and_memory_only: Mutex<Vec<bool>>,
    /// The requested streams.
    pub stream_starts: Mutex<Vec<rt::StreamStart>>,
    pub stream_error: Mutex<Option<Status>>,
    pub stream_head: Mutex<rt::StreamHead>,
    /// Streams are SPDY, served by this command.
    pub command: Mutex<Option<Arc<Command>>>,
    /// The pods in the container runtime.
    pub running: Mutex<Vec<rt::RuntimePod>>,
}

impl World {
    /// Starts fakes of pod-sync, runtime-shim and resource-manager; other services are unreachable.
    pub fn start() -> Self {
        let world = Self::without_peers();
        for service in [ServiceName::PodSync, ServiceName::RuntimeShim, ServiceName::ResourceManager] {
            let ctx = world.context(service);
            std::fs::create_dir_all(ctx.config.paths.socket_dir(service)).unwrap();
            let fake = Fake(world.shared.clone());
            let routes = Routes::new(AdminServer::new(fake.clone()));
            let routes = match service {
                ServiceName::PodSync => routes.add_service(PodSyncServer::new(fake)),
                ServiceName::ResourceManager => routes.add_service(ResourceManagerServer::new(fake)),
                _ => routes.add_service(RuntimeServer::new(fake)),
            };
            let socket = ctx.config.paths.socket(service);
            let stack = StackLayer::new(CallerPolicy::new(&ctx.config), ctx.metrics.clone());
            tokio::spawn(async move {
                server::serve(&socket, routes, stack, CancellationToken::new(), || {}).await.unwrap();
            });
        }
        world
    }

    /// A node without other services.
    pub fn without_peers() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ctx = context_in(&dir, ServiceName::NodeApi);
        Self { dir, shared: Arc::default(), ctx, slis: Slis::default() }
    }

    pub fn context(&self, service: ServiceName) -> Context {
        context_in(&self.dir, service)
    }

    /// Serves the kubelet API on a port chosen by the kernel.
    pub async fn api(&self) -> SocketAddr {
        let requests = RequestMetrics::register(&self.ctx.metrics);
        self.listen(keelson_node_api::api_router(&self.ctx, &self.slis, &requests, Access::Unauthenticated))
            .await
    }

    /// Serves the read-only port on a port chosen by the kernel.
    pub async fn read_only(&self) -> SocketAddr {
        let requests = RequestMetrics::register(&self.ctx.metrics);
        self.listen(keelson_node_api::read_only_router(&self.ctx, &self.slis, &requests)).await
    }

    /// Serves a router on a port chosen by the kernel.
    pub async fn listen(&self, router: axum::Router) -> SocketAddr {
        self.listen_within(router, ConnectionLimits::for_this_process()).await
    }

    /// The same with these connection limits.
    pub async fn listen_within(&self, router: axum::Router, limits: ConnectionLimits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ctx = self.ctx.clone();
        tokio::spawn(async move {
            let handle = ctx.progress.register("test");
            let limiter = ConnectionLimiter::new("test port", limits);
            keelson_node_api::listen::serve(&ctx, &handle, listener, router, None, &limiter).await;
        });
        address
    }

    pub fn pod(&self, namespace: &str, name: &str, json: &str) {
        let document = ps::PodDocument {
            uid: format!("uid-of-{name}"),
            namespace: namespace.into(),
            name: name.into(),
            pod_json: Bytes::copy_from_slice(json.as_bytes()),
            ..ps::PodDocument::default()
        };
        self.shared.pods.lock().unwrap().push(document);
    }

    /// Adds a pod with a running container `c` and a waiting container `d`.
    pub fn running_pod(&self, name: &str) {
        let json = r#"{"spec":{"containers":[{"name":"c"},{"name":"d"}]},"status":{"containerStatuses":[
            {"name":"c","state":{"running":{}}},{"name":"d","state":{"waiting":{"reason":"ErrImagePull"}}}]}}"#;
        self.pod("default", name, json);
    }
}

fn context_in(dir: &tempfile::TempDir, service: ServiceName) -> Context {
    let mut config = Config { node_name: "n1".into(), ..Config::default() };
    config.paths.run_dir = dir.path().to_owned();
    Context::detached(service, config)
}

/// A response whose body has not been read yet.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Incoming,
}

pub async fn request(address: SocketAddr, method: &str, path: &str) -> Reply {
    try_request(address, method, path, &[]).await.unwrap()
}

/// Sends a `GET` request with headers.
pub async fn get_with(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Reply {
    try_request(address, "GET", path, headers).await.unwrap()
}

/// Sends a request; an error if the connection breaks before the head of the response.
pub async fn try_request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> Result<Reply, hyper::Error> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = HttpRequest::builder().method(method).uri(path).header("host", "node");
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let request = request.body(Empty::<Bytes>::new()).unwrap();
    let (parts, body) = sender.send_request(request).await?.into_parts();
    Ok(Reply { status: parts.status, headers: parts.headers, body })
}

pub async fn get(address: SocketAddr, path: &str) -> Reply {
    request(address, "GET", path).await
}

impl Reply {
    /// The complete body; an error if the connection breaks.
    pub async fn text(self) -> Result<String, hyper::Error> {
        Ok(String::from_utf8(self.bytes().await?.to_vec()).unwrap())
    }

    pub async fn bytes(self) -> Result<Bytes, hyper::Error> {
        Ok(self.body.collect().await?.to_bytes())
    }

    /// The next piece of the body.
    pub async fn piece(&mut self) -> Option<String> {
        let frame = self.body.frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }
}

/// Waits for a future, at most 20 s.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("the future takes more than 20 s")
}

#[derive(Clone)]
struct Fake(Arc<Shared>);

#[tonic::async_trait]
impl Admin for Fake {
    async fn get_progress(
        &self,
        _: Request<admin::GetProgressRequest>,
    ) -> Answer<admin::GetProgressResponse> {
        let silent_ms = *self.0.silent_ms.lock().unwrap();
        let work = admin::Loop { name: "workers".into(), silent_ms, stuck_after_ms: 30_000 };
        Ok(Response::new(admin::GetProgressResponse { loops: vec![work], ..Default::default() }))
    }

    async fn get_metrics(&self, _: Request<admin::GetMetricsRequest>) -> Answer<admin::GetMetricsResponse> {
        Ok(Response::new(admin::GetMetricsResponse { text: self.0.metrics.lock().unwrap().clone() }))
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
impl PodSync for Fake {
    type ListPodsStream = BoxStream<ps::PodDocument>;
    type WatchPodsStream = BoxStream<ps::WatchPodsResponse>;

    async fn list_pods(&self, _: Request<ps::ListPodsRequest>) -> Answer<Self::ListPodsStream> {
        let mut items: Vec<_> = self.0.pods.lock().unwrap().iter().cloned().map(Ok).collect();
        items.extend(self.0.list_error.lock().unwrap().clone().map(Err));
        Ok(Response::new(Box::pin(stream::iter(items))))
    }

    async fn watch_pods(&self, _: Request<ps::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        Err(Status::unimplemented("not faked"))
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
impl Runtime for Fake {
    type SyncStream = BoxStream<keelson_proto::keelson::common::v1::SyncAck>;
    type WatchPodsStream = BoxStream<rt::WatchPodsResponse>;
    type EnsureImageStream = BoxStream<rt::EnsureImageResponse>;
    type ReadLogsStream = BoxStream<rt::ReadLogsResponse>;
    type ExecStream = BoxStream<rt::ExecResponse>;
    type StreamStream = BoxStream<rt::StreamResponse>;

    async fn read_logs(&self, request: Request<rt::ReadLogsRequest>) -> Answer<Self::ReadLogsStream> {
        let request = request.into_inner();
        self.0.log_requests.lock().unwrap().push(request.clone());
        if let Some(status) = self.0.log_error.lock().unwrap().clone() {
            return Err(status);
        }
        let lines = self.0.log.lock().unwrap().clone();
        let skipped =
            request.tail_lines.map_or(0, |n| lines.len().saturating_sub(usize::try_from(n).unwrap()));
        let written =
            lines.into_iter().skip(skipped).map(|line| Ok(rt::ReadLogsResponse { data: line.into() }));
        if !request.follow {
            return Ok(Response::new(Box::pin(stream::iter(written))));
        }
        let (sender, receiver) = mpsc::channel(16);
        *self.0.following.lock().unwrap() = Some(sender);
        let more = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        Ok(Response::new(Box::pin(futures_util::StreamExt::chain(stream::iter(written), more))))
    }

    async fn stream(&self, request: Request<Streaming<rt::StreamRequest>>) -> Answer<Self::StreamStream> {
        use rt::stream_request::Item as RequestItem;
        use rt::stream_response::Item as ResponseItem;
        let mut requests = request.into_inner();
        let Some(rt::StreamRequest { item: Some(RequestItem::Start(start)) }) = requests.message().await?
        else {
            return Err(Status::invalid_argument("`start` has to come first"));
        };
        self.0.stream_starts.lock().unwrap().push(start);
        if let Some(status) = self.0.stream_error.lock().unwrap().clone() {
            return Err(status);
        }
        let head = self.0.stream_head.lock().unwrap().clone();
        let response = |item| Ok(rt::StreamResponse { item: Some(item) });
        if head.status != 101 {
            let responses = [
                response(ResponseItem::Head(head)),
                response(ResponseItem::Data(b"no, ".to_vec())),
                response(ResponseItem::Data(b"not now".to_vec())),
            ];
            return Ok(Response::new(Box::pin(stream::iter(responses))));
        }
        if let Some(command) = self.0.command.lock().unwrap().clone() {
            let (sender, receiver) = mpsc::channel(16);
            sender.try_send(response(ResponseItem::Head(head))).unwrap();
            tokio::spawn(command.run(requests, sender));
            let more =
                stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
            return Ok(Response::new(Box::pin(more)));
        }
        // Echoes its input, and ends after "end".
        let echo = stream::unfold(
            (requests, false),
            move |(mut requests, ended): (Streaming<rt::StreamRequest>, bool)| async move {
                if ended {
                    return None;
                }
                let item = requests.message().await.ok()??.item;
                let Some(RequestItem::Data(bytes)) = item else { return None };
                let last = bytes.ends_with(b"end");
                Some((response(ResponseItem::Data(bytes)), (requests, last)))
            },
        );
        Ok(Response::new(Box::pin(futures_util::StreamExt::chain(
            stream::iter([response(ResponseItem::Head(head))]),
            echo,
        ))))
    }

    async fn watch_pods(&self, _: Request<rt::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        use rt::watch_pods_response::Item;
        let pods = self.0.running.lock().unwrap().clone();
        let items = [Item::State(rt::RuntimeState::default())].into_iter();
        let items = items.chain(pods.into_iter().map(Item::Pod)).chain([Item::Synced(Default::default())]);
        let messages: Vec<_> = items.map(|item| Ok(rt::WatchPodsResponse { item: Some(item) })).collect();
        // As in runtime-shim, the stream stays open after the replay.
        Ok(Response::new(Box::pin(futures_util::StreamExt::chain(stream::iter(messages), stream::pending()))))
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

    async fn filesystem_stats(
        &self,
        _: Request<rt::FilesystemStatsRequest>,
    ) -> Answer<rt::FilesystemStatsResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn list_images(&self, _: Request<rt::ListImagesRequest>) -> Answer<rt::ListImagesResponse> {
        Err(Status::unimplemented("not faked"))
    }

    async fn exec(&self, request: Request<Streaming<rt::ExecRequest>>) -> Answer<Self::ExecStream> {
        use rt::exec_response::Item;
        let Some(rt::ExecRequest { item: Some(rt::exec_request::Item::Start(start)) }) =
            request.into_inner().message().await?
        else {
            return Err(Status::invalid_argument("`start` has to come first"));
        };
        let code = if start.command == ["id", "-u"] { 0 } else { 3 };
        let items = [
            Item::Started(rt::ExecStarted::default()),
            Item::Stdout(b"out\n".to_vec()),
            Item::Stderr(b"err\n".to_vec()),
            Item::ExitCode(code),
        ];
        Ok(Response::new(Box::pin(stream::iter(items.map(|item| Ok(rt::ExecResponse { item: Some(item) }))))))
    }

    async fn collect_garbage(
        &self,
        _: Request<rt::CollectGarbageRequest>,
    ) -> Answer<rt::CollectGarbageResponse> {
        Err(Status::unimplemented("not faked"))
    }
}

#[tonic::async_trait]
impl ResourceManager for Fake {
    type SyncStream = BoxStream<keelson_proto::keelson::common::v1::SyncAck>;
    type WatchMachineStream = BoxStream<rm::Machine>;
    type PodStatsStream = BoxStream<rm::PodStatsResponse>;
    type CgroupStatsStream = BoxStream<rm::CgroupStatsResponse>;
    type WatchEvictionsStream = BoxStream<rm::WatchEvictionsResponse>;

    async fn node_stats(&self, request: Request<rm::NodeStatsRequest>) -> Answer<rm::NodeStatsResponse> {
        self.0.cpu_and_memory_only.lock().unwrap().push(request.into_inner().cpu_and_memory_only);
        let stats = self.0.node_stats.lock().unwrap().clone();
        stats.map(Response::new).ok_or_else(|| peer_error(Code::FailedPrecondition, "no cgroups"))
    }

    async fn cgroup_stats(&self, _: Request<rm::CgroupStatsRequest>) -> Answer<Self::CgroupStatsStream> {
        let found = self.0.cgroups.lock().unwrap().clone();
        let found = found.ok_or_else(|| peer_error(Code::FailedPrecondition, "no cgroups"))?;
        Ok(Response::new(Box::pin(stream::iter(found.into_iter().map(Ok)))))
    }

    async fn pod_stats(&self, request: Request<rm::PodStatsRequest>) -> Answer<Self::PodStatsStream> {
        self.0.cpu_and_memory_only.lock().unwrap().push(request.into_inner().cpu_and_memory_only);
        let mut items: Vec<_> = self.0.pod_stats.lock().unwrap().iter().cloned().map(Ok).collect();
        items.extend(self.0.pod_stats_error.lock().unwrap().clone().map(Err));
        Ok(Response::new(Box::pin(stream::iter(items))))
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

    async fn watch_evictions(
        &self,
        _: Request<rm::WatchEvictionsRequest>,
    ) -> Answer<Self::WatchEvictionsStream> {
        Err(Status::unimplemented("not faked"))
    }

    async fn watch_machine(&self, _: Request<rm::WatchMachineRequest>) -> Answer<Self::WatchMachineStream> {
        let capacity = [("cpu".to_owned(), 2000)].into();
        let machine = rm::Machine {
            capacity,
            boot_id: "b1".into(),
            cgroup_driver: "systemd".into(),
            ..Default::default()
        };
        Ok(Response::new(Box::pin(stream::iter([Ok(machine)]))))
    }
}

/// An error as the services return it.
pub fn peer_error(code: Code, text: &str) -> Status {
    error(code, "TEST", text)
}
