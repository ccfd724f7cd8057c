//! A node whose other services are fakes over real sockets, and a small HTTP client.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request as HttpRequest, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use keelson_config::{Config, ServiceName};
use keelson_node_api::connection_limits::{ConnectionLimiter, ConnectionLimits};
use keelson_node_api::{Access, RequestMetrics, Slis};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::pod_sync::v1 as ps;
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::Context;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{
    FakeAdmin, FakePodSync, FakeResourceManager, FakeRuntime, FakeServer, FakeVolumeManager, Recorder,
    StreamAnswer,
};
use rt::stream_request::Item as RequestItem;
use rt::stream_response::Item as ResponseItem;
use tokio::net::{TcpListener, TcpStream};
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Request, Status};

use crate::command::{Command, StreamConversation, send};

/// A node whose other services are fakes.
pub struct World {
    pub ctx: Context,
    pub slis: Slis,
    /// What pod-sync lists.
    pub pods: Arc<Mutex<Vec<ps::PodDocument>>>,
    /// The admin API of every fake service.
    pub admin: FakeAdmin,
    pub pod_sync: FakePodSync,
    pub runtime: FakeRuntime,
    pub resource_manager: FakeResourceManager,
    pub volume_manager: FakeVolumeManager,
    /// The deadlines of the calls to runtime-shim (`grpc-timeout`).
    pub runtime_deadlines: Recorder<String>,
    servers: Vec<FakeServer>,
    _dir: tempfile::TempDir,
}

impl World {
    /// Starts fakes of pod-sync, runtime-shim, resource-manager and volume-manager; other services are unreachable.
    pub async fn start() -> Self {
        let mut world = Self::without_peers();
        let admin = || Routes::new(world.admin.server());
        let deadlines = world.runtime_deadlines.clone();
        let runtime = InterceptedService::new(world.runtime.server(), move |call: Request<()>| {
            let deadline = call.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
            deadlines.record(deadline.unwrap_or_default().to_owned());
            Ok(call)
        });
        let peers = [
            (ServiceName::PodSync, admin().add_service(world.pod_sync.server())),
            (ServiceName::RuntimeShim, admin().add_service(runtime)),
            (ServiceName::ResourceManager, admin().add_service(world.resource_manager.server())),
            (ServiceName::VolumeManager, admin().add_service(world.volume_manager.server())),
        ];
        for (service, routes) in peers {
            world.servers.push(world.serve(service, routes).await);
        }
        world
    }

    /// A node without other services.
    pub fn without_peers() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = dir.path().to_owned();
        let world = Self {
            ctx: Context::detached(ServiceName::NodeApi, config),
            slis: Slis::default(),
            pods: Arc::default(),
            admin: FakeAdmin::default(),
            pod_sync: FakePodSync::default(),
            runtime: FakeRuntime::default(),
            resource_manager: FakeResourceManager::default(),
            volume_manager: FakeVolumeManager::default(),
            runtime_deadlines: Recorder::default(),
            servers: Vec::new(),
            _dir: dir,
        };
        world.answer_by_default();
        world
    }

    /// Serves fakes at the socket of `service`.
    pub async fn serve(&self, service: ServiceName, routes: Routes) -> FakeServer {
        FakeServer::start(&self.ctx.config, service, routes).await.unwrap()
    }

    /// Serves the admin API of another service.
    pub async fn serve_admin(&mut self, service: ServiceName) {
        let server = self.serve(service, Routes::new(self.admin.server())).await;
        self.servers.push(server);
    }

    /// Nothing is stuck, nothing runs, and there are no statistics.
    fn answer_by_default(&self) {
        self.set_silent_ms(0);
        self.set_metrics("");
        let pods = Arc::clone(&self.pods);
        self.pod_sync.list_pods.answer_with(move |_| Ok(StreamAnswer::items(pods.lock().unwrap().clone())));
        self.write_log(&[]);
        self.set_running([]);
        self.fail_streams(None);
        self.answer_streams(rt::StreamHead::default());
        self.run_commands();
        let no_cgroups = peer_error(Code::FailedPrecondition, "no cgroups");
        self.resource_manager.node_stats.fail(no_cgroups.clone());
        self.resource_manager.cgroup_stats.fail(no_cgroups);
        self.resource_manager.pod_stats.list([]);
        self.volume_manager.pod_volume_stats.list([]);
        self.resource_manager.watch_machine.list([rm::Machine {
            capacity: [("cpu".to_owned(), 2000)].into(),
            boot_id: "b1".into(),
            cgroup_driver: "systemd".into(),
            ..Default::default()
        }]);
    }

    /// Sets how long the only loop of each service has made no progress.
    pub fn set_silent_ms(&self, silent_ms: u64) {
        let work = admin::Loop { name: "workers".into(), silent_ms, stuck_after_ms: 30_000 };
        self.admin
            .get_progress
            .answer(admin::GetProgressResponse { loops: vec![work], ..Default::default() });
    }

    /// Sets the metrics of each service.
    pub fn set_metrics(&self, text: impl Into<String>) {
        self.admin.get_metrics.answer(admin::GetMetricsResponse { text: text.into() });
    }

    /// Sets the log of every container. A followed log stays open for what the test pushes.
    pub fn write_log(&self, lines: &[&'static str]) {
        let lines = lines.to_vec();
        self.runtime.read_logs.answer_with(move |request| {
            let tail = request.tail_lines.map_or(lines.len(), |n| usize::try_from(n).unwrap());
            let tail = &lines[lines.len().saturating_sub(tail)..];
            let answer = StreamAnswer::items(tail.iter().map(|line| log_line(line)));
            Ok(if request.follow { answer.then_open() } else { answer })
        });
    }

    /// Sets the pods in the container runtime.
    pub fn set_running(&self, pods: impl IntoIterator<Item = rt::RuntimePod>) {
        use rt::watch_pods_response::Item;
        let state = [Item::State(rt::RuntimeState::default())].into_iter();
        let items = state.chain(pods.into_iter().map(Item::Pod)).chain([Item::Synced(Default::default())]);
        // As in runtime-shim, the stream stays open after the replay.
        self.runtime.watch_pods.replay(items.map(|item| rt::WatchPodsResponse { item: Some(item) }));
    }

    /// Fails requests for a stream with this error; `None`: accepts them.
    pub fn fail_streams(&self, error: Option<Status>) {
        self.runtime.stream.check_first(move |first| match (&first.item, &error) {
            (Some(RequestItem::Start(_)), None) => Ok(()),
            (Some(RequestItem::Start(_)), Some(error)) => Err(error.clone()),
            _ => Err(Status::invalid_argument("`start` has to come first")),
        });
    }

    /// Answers requests for a stream with this head. With status 101 the stream echoes its input.
    pub fn answer_streams(&self, head: rt::StreamHead) {
        self.runtime.stream.handle(move |stream| answer_stream(stream, head.clone()));
    }

    /// Answers requests for a stream with this head, and serves SPDY by `command`.
    pub fn serve_streams(&self, head: &rt::StreamHead, command: &Arc<Command>) {
        let (head, command) = (head.clone(), Arc::clone(command));
        self.runtime.stream.handle(move |stream| Arc::clone(&command).run(stream, head.clone()));
    }

    /// The requested streams.
    pub fn stream_starts(&self) -> Vec<rt::StreamStart> {
        let messages = self.runtime.stream.messages().all().into_iter();
        let starts = messages.filter_map(|message| match message.item {
            Some(RequestItem::Start(start)) => Some(start),
            _ => None,
        });
        starts.collect()
    }

    /// Runs commands: `id -u` succeeds, others exit with code 3.
    fn run_commands(&self) {
        use rt::exec_response::Item;
        self.runtime.exec.handle(|mut command| async move {
            let Some(rt::ExecRequest { item: Some(rt::exec_request::Item::Start(start)) }) =
                command.next().await
            else {
                return Err(Status::invalid_argument("`start` has to come first"));
            };
            let code = if start.command == ["id", "-u"] { 0 } else { 3 };
            for item in [
                Item::Started(rt::ExecStarted::default()),
                Item::Stdout(b"out\n".to_vec()),
                Item::Stderr(b"err\n".to_vec()),
                Item::ExitCode(code),
            ] {
                command.send(rt::ExecResponse { item: Some(item) }).await;
            }
            Ok(())
        });
    }

    /// The value of `cpu_and_memory_only` in each request for statistics: those of the node, then those of the pods.
    pub fn cpu_and_memory_only(&self) -> Vec<bool> {
        let node = self.resource_manager.node_stats.requests().all();
        let pods = self.resource_manager.pod_stats.requests().all();
        let of_node = node.iter().map(|request| request.cpu_and_memory_only);
        of_node.chain(pods.iter().map(|request| request.cpu_and_memory_only)).collect()
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
        self.pods.lock().unwrap().push(document);
    }

    /// Adds a pod with a running container `c` and a waiting container `d`.
    pub fn running_pod(&self, name: &str) {
        let json = r#"{"spec":{"containers":[{"name":"c"},{"name":"d"}]},"status":{"containerStatuses":[
            {"name":"c","state":{"running":{}}},{"name":"d","state":{"waiting":{"reason":"ErrImagePull"}}}]}}"#;
        self.pod("default", name, json);
    }
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

/// Answers with the head and a refusal, or echoes the input up to one that ends with "end".
async fn answer_stream(mut stream: StreamConversation, head: rt::StreamHead) -> Result<(), Status> {
    // The start, which was checked.
    stream.next().await;
    let is_upgraded = head.status == 101;
    send(&stream, ResponseItem::Head(head)).await;
    if !is_upgraded {
        for text in ["no, ", "not now"] {
            send(&stream, ResponseItem::Data(text.into())).await;
        }
        return Ok(());
    }
    while let Some(rt::StreamRequest { item: Some(RequestItem::Data(bytes)) }) = stream.next().await {
        let is_last = bytes.ends_with(b"end");
        send(&stream, ResponseItem::Data(bytes)).await;
        if is_last {
            break;
        }
    }
    Ok(())
}

/// A piece of a log.
pub fn log_line(text: &str) -> rt::ReadLogsResponse {
    rt::ReadLogsResponse { data: text.into() }
}

/// An error as the services return it.
pub fn peer_error(code: Code, text: &str) -> Status {
    error(code, "TEST", text)
}
