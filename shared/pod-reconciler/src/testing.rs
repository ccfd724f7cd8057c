//! Helpers for tests of callees over real unix sockets.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::{CancellationToken, Context, Peer, PeerChannel};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

/// Polls `look` until it returns a value; for state without an event of its own.
///
/// # Panics
/// Nothing was returned within 20 s; the message names `what`.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let wait = async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("{what} never came"))
}

/// A running service, with the client type `C`.
#[derive(Debug)]
pub struct Service<C> {
    /// The context that it was built from.
    pub ctx: Context,
    server: JoinHandle<()>,
    client: fn(PeerChannel) -> C,
}

impl<C> Service<C> {
    /// Serves `routes` at the service's socket, whose folder must exist.
    ///
    /// # Panics
    /// It cannot be bound.
    pub async fn start(ctx: Context, routes: Routes, client: fn(PeerChannel) -> C) -> Self {
        let server = serve_at_socket(&ctx.config, ctx.service, routes, &ctx.shutdown).await;
        Self { ctx, server, client }
    }

    /// A client with a connection of its own.
    pub fn client(&self) -> C {
        (self.client)(Peer::service(&self.ctx.config.paths.run_dir, self.ctx.service).channel())
    }

    /// Stops it without any cleanup of its pods.
    ///
    /// # Panics
    /// Its server has failed.
    pub async fn stop(self) {
        self.ctx.shutdown.cancel();
        self.server.await.unwrap();
    }

    /// Waits until the condition `name` has the status `ok`. Returns its text.
    ///
    /// # Panics
    /// The condition does not reach that status within 20 s.
    pub async fn condition(&self, name: &str, ok: bool) -> String {
        eventually(name, || {
            let report = self.ctx.progress.report("");
            let found = report.conditions.into_iter().find(|c| c.name == name && c.ok == ok);
            std::future::ready(found.map(|c| c.message))
        })
        .await
    }
}

/// Serves `routes` at the socket of `name`, whose folder must exist, until `stop`. Returns when it is bound.
async fn serve_at_socket(
    config: &Config,
    name: ServiceName,
    routes: Routes,
    stop: &CancellationToken,
) -> JoinHandle<()> {
    let stack = StackLayer::new(CallerPolicy::new(config), Default::default());
    let socket = config.paths.socket(name);
    let (bound, is_bound) = oneshot::channel();
    let stop = stop.clone();
    let server = tokio::spawn(async move {
        let on_bound = || {
            let _ = bound.send(());
        };
        serve(&socket, routes, stack, stop, on_bound).await.unwrap();
    });
    is_bound.await.unwrap();
    server
}

/// A request with a deadline.
pub fn within<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// A fake runtime-shim that answers `GetPod` and `WatchPods` with the state that the test has set.
#[derive(Debug, Clone, Default)]
pub struct FakeRuntime {
    pods: Arc<Mutex<HashMap<String, pb::RuntimePod>>>,
    /// The reported runtime; `None` before the runtime's first answer.
    state: Arc<Mutex<Option<pb::RuntimeState>>>,
    reads: Arc<watch::Sender<u32>>,
}

impl FakeRuntime {
    /// Serves a fake at the socket of runtime-shim, whose folder must exist.
    ///
    /// # Panics
    /// It cannot be bound.
    pub async fn start(config: &Config) -> Self {
        let fake = Self::default();
        let routes = Routes::new(RuntimeServer::new(fake.clone()));
        serve_at_socket(config, ServiceName::RuntimeShim, routes, &CancellationToken::new()).await;
        fake
    }

    /// Sets the pod to one container in this state.
    ///
    /// # Panics
    /// An earlier call has panicked.
    pub fn container(&self, uid: &str, state: pb::ContainerState) {
        let container =
            pb::Container { id: "c1".into(), name: "main".into(), state: state.into(), ..Default::default() };
        let pod = pb::RuntimePod { uid: uid.into(), containers: vec![container], ..Default::default() };
        self.pods.lock().unwrap().insert(uid.into(), pod);
    }

    /// Sets the pod.
    ///
    /// # Panics
    /// An earlier call has panicked.
    pub fn pod(&self, pod: pb::RuntimePod) {
        self.pods.lock().unwrap().insert(pod.uid.clone(), pod);
    }

    /// Sets the cgroup driver that the runtime reports: empty when it reports none, `None` when it has not answered.
    ///
    /// # Panics
    /// An earlier call has panicked.
    pub fn drives_cgroups(&self, driver: Option<&str>) {
        let state = |driver: &str| pb::RuntimeState {
            name: "fake".into(),
            cgroup_driver: driver.into(),
            ..Default::default()
        };
        *self.state.lock().unwrap() = driver.map(state);
    }

    /// Waits until the runtime has been read `times` times in all.
    ///
    /// # Panics
    /// Never: it holds the sender itself.
    pub async fn read_at_least(&self, times: u32) {
        self.reads.subscribe().wait_for(|reads| *reads >= times).await.unwrap();
    }

    /// How often the runtime has been read.
    pub fn reads(&self) -> u32 {
        *self.reads.borrow()
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn not_here<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not in this fake"))
}

#[tonic::async_trait]
impl Runtime for FakeRuntime {
    type SyncStream = Answers<common::SyncAck>;
    type WatchPodsStream = Answers<pb::WatchPodsResponse>;
    type EnsureImageStream = Answers<pb::EnsureImageResponse>;
    type ReadLogsStream = Answers<pb::ReadLogsResponse>;
    type ExecStream = Answers<pb::ExecResponse>;
    type StreamStream = Answers<pb::StreamResponse>;

    async fn get_pod(
        &self,
        request: Request<pb::GetPodRequest>,
    ) -> Result<Response<pb::GetPodResponse>, Status> {
        let uid = request.into_inner().uid;
        self.reads.send_modify(|reads| *reads += 1);
        let pod = self.pods.lock().unwrap().get(&uid).cloned();
        Ok(Response::new(pb::GetPodResponse { pod: Some(pod.unwrap_or_default()) }))
    }

    async fn sync(
        &self,
        _: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        not_here()
    }

    async fn watch_pods(
        &self,
        request: Request<pb::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        use pb::watch_pods_response::Item;
        let mut pods: Vec<_> = self.pods.lock().unwrap().values().cloned().map(Item::Pod).collect();
        if request.into_inner().state_only {
            pods.clear();
        }
        let state = self.state.lock().unwrap().clone().map(Item::State);
        let items = pods.into_iter().chain([Item::Synced(common::Synced {})]).chain(state);
        let answers = items.map(|item| Ok(pb::WatchPodsResponse { item: Some(item) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(answers.collect::<Vec<_>>()))))
    }

    async fn ensure_image(
        &self,
        _: Request<pb::EnsureImageRequest>,
    ) -> Result<Response<Self::EnsureImageStream>, Status> {
        not_here()
    }

    async fn write_container_files(
        &self,
        _: Request<pb::WriteContainerFilesRequest>,
    ) -> Result<Response<pb::WriteContainerFilesResponse>, Status> {
        not_here()
    }

    async fn read_logs(
        &self,
        _: Request<pb::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        not_here()
    }

    async fn filesystem_stats(
        &self,
        _: Request<pb::FilesystemStatsRequest>,
    ) -> Result<Response<pb::FilesystemStatsResponse>, Status> {
        not_here()
    }

    async fn list_images(
        &self,
        _: Request<pb::ListImagesRequest>,
    ) -> Result<Response<pb::ListImagesResponse>, Status> {
        not_here()
    }

    async fn stream(
        &self,
        _: Request<Streaming<pb::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        not_here()
    }

    async fn exec(
        &self,
        _: Request<Streaming<pb::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        not_here()
    }

    async fn collect_garbage(
        &self,
        _: Request<pb::CollectGarbageRequest>,
    ) -> Result<Response<pb::CollectGarbageResponse>, Status> {
        not_here()
    }
}
