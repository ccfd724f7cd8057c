//! The service over a real unix socket, with a runtime-shim that says what the test wants.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::Stream;
use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::{CancellationToken, Context, Peer, PeerChannel};
use rustix::mount::UnmountFlags;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

pub type Client = VolumeManagerClient<PeerChannel>;

/// Everything on disk of one test; mounts and folders go with it.
pub struct World {
    dir: tempfile::TempDir,
    pub config: Config,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "node".into(), ..Config::default() };
        config.paths.run_dir = dir.path().join("run");
        config.paths.root_dir = dir.path().join("root");
        for service in [ServiceName::VolumeManager, ServiceName::RuntimeShim] {
            std::fs::create_dir_all(config.paths.socket_dir(service)).unwrap();
        }
        Self { dir, config }
    }

    pub fn pod(&self, uid: &str) -> PathBuf {
        self.config.paths.pod_dir(uid)
    }

    pub fn empty_dir(&self, uid: &str, name: &str) -> PathBuf {
        self.pod(uid).join("volumes/kubernetes.io~empty-dir").join(name)
    }

    /// Starts the service on these folders.
    pub async fn start(&self) -> Service {
        let ctx = Context::detached(ServiceName::VolumeManager, self.config.clone());
        let routes = keelson_volume_manager::build(ctx.clone()).await.unwrap();
        Service { server: self.serve(ServiceName::VolumeManager, routes, &ctx.shutdown).await, ctx }
    }

    /// Starts the neighbour.
    pub async fn start_runtime(&self) -> FakeRuntime {
        let fake = FakeRuntime::default();
        let routes = Routes::new(RuntimeServer::new(fake.clone()));
        self.serve(ServiceName::RuntimeShim, routes, &CancellationToken::new()).await;
        fake
    }

    async fn serve(&self, name: ServiceName, routes: Routes, stop: &CancellationToken) -> JoinHandle<()> {
        let stack = StackLayer::new(CallerPolicy::new(&self.config), Default::default());
        let socket = self.config.paths.socket(name);
        let (bound, is_bound) = oneshot::channel();
        let stop = stop.clone();
        let server = tokio::spawn(async move {
            let tell = || {
                let _ = bound.send(());
            };
            serve(&socket, routes, stack, stop, tell).await.unwrap();
        });
        is_bound.await.unwrap();
        server
    }
}

pub fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(folder)).collect()
}

impl Drop for World {
    fn drop(&mut self) {
        for point in mounts_below(self.dir.path()).into_iter().rev() {
            let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

/// A running service.
pub struct Service {
    pub ctx: Context,
    server: JoinHandle<()>,
}

impl Service {
    pub fn client(&self) -> Client {
        let peer = Peer::service(&self.ctx.config.paths.run_dir, ServiceName::VolumeManager);
        VolumeManagerClient::new(peer.channel())
    }

    /// Ends it without any farewell to its pods.
    pub async fn stop(self) {
        self.ctx.shutdown.cancel();
        self.server.await.unwrap();
    }

    /// Waits until the condition `name` is as `ok` says; its text.
    pub async fn condition(&self, name: &str, ok: bool) -> String {
        eventually(name, || {
            let report = self.ctx.progress.report("");
            let found = report.conditions.into_iter().find(|c| c.name == name && c.ok == ok);
            std::future::ready(found.map(|c| c.message))
        })
        .await
    }
}

/// Waits for something that has no event of its own.
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

/// A `Sync` stream as pod-sync holds it.
pub struct Sync {
    requests: mpsc::Sender<pb::SyncRequest>,
    pub acks: Streaming<common::SyncAck>,
}

impl Sync {
    pub async fn open(client: &mut Client) -> Self {
        let (requests, receiver) = mpsc::channel(64);
        let acks = client.sync(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        Self { requests, acks }
    }

    pub async fn send(&self, item: pb::sync_request::Item) {
        self.requests.send(pb::SyncRequest { item: Some(item) }).await.unwrap();
    }

    pub async fn pod(&self, desire: pb::PodDesire) {
        self.send(pb::sync_request::Item::Pod(desire)).await;
    }

    pub async fn complete(&mut self, epoch: u64, sources_ready: bool) {
        let complete = common::SetComplete { epoch, sources_ready };
        self.send(pb::sync_request::Item::Complete(complete)).await;
        assert_eq!(self.acks.message().await.unwrap().unwrap().epoch, epoch);
    }
}

pub fn desire(uid: &str, revision: u64, want: common::Want, volumes: Vec<pb::Volume>) -> pb::PodDesire {
    pb::PodDesire {
        pod: Some(common::PodRef {
            uid: uid.into(),
            namespace: "default".into(),
            name: format!("pod-{uid}"),
        }),
        revision,
        want: want.into(),
        volumes,
        fs_group: None,
        memory_limit_bytes: 0,
    }
}

pub fn volume(name: &str, source: pb::volume::Source) -> pb::Volume {
    pb::Volume { name: name.into(), source: Some(source) }
}

pub fn empty_dir(name: &str, medium: &str, size_limit_bytes: i64) -> pb::Volume {
    volume(name, pb::volume::Source::EmptyDir(pb::EmptyDir { medium: medium.into(), size_limit_bytes }))
}

/// Calls `MountPod` to its end: what it waited for, and how it ended.
pub async fn mount(
    client: &mut Client,
    uid: &str,
    revision: u64,
) -> (Vec<String>, Result<pb::MountsReady, Status>) {
    use pb::mount_pod_response::Item;
    let request = pb::MountPodRequest { uid: uid.into(), revision };
    let mut stream = client.mount_pod(request).await.unwrap().into_inner();
    let mut waits = Vec::new();
    loop {
        match stream.next().await {
            Some(Ok(response)) => match response.item.unwrap() {
                Item::Progress(progress) => waits.push(progress.waiting_for),
                Item::Ready(ready) => return (waits, Ok(ready)),
            },
            Some(Err(status)) => return (waits, Err(status)),
            None => panic!("MountPod ended without an end"),
        }
    }
}

pub async fn unmount(client: &mut Client, uid: &str, within: Duration) -> Result<(), Status> {
    let mut request = Request::new(pb::UnmountPodRequest { uid: uid.into() });
    request.set_timeout(within);
    client.unmount_pod(request).await.map(drop)
}

/// A runtime-shim that answers `GetPod` with what it was told.
#[derive(Clone, Default)]
pub struct FakeRuntime {
    pods: Arc<Mutex<HashMap<String, rt::RuntimePod>>>,
    reads: Arc<watch::Sender<u32>>,
}

impl FakeRuntime {
    /// From now on the pod has one container in this state.
    pub fn container(&self, uid: &str, state: rt::ContainerState) {
        let container =
            rt::Container { id: "c1".into(), name: "main".into(), state: state.into(), ..Default::default() };
        let pod = rt::RuntimePod { uid: uid.into(), containers: vec![container], ..Default::default() };
        self.pods.lock().unwrap().insert(uid.into(), pod);
    }

    /// Waits until the runtime has been read so often in all.
    pub async fn read_at_least(&self, times: u32) {
        self.reads.subscribe().wait_for(|reads| *reads >= times).await.unwrap();
    }

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
    type WatchPodsStream = Answers<rt::WatchPodsResponse>;
    type EnsureImageStream = Answers<rt::EnsureImageResponse>;
    type ReadLogsStream = Answers<rt::ReadLogsResponse>;

    async fn get_pod(
        &self,
        request: Request<rt::GetPodRequest>,
    ) -> Result<Response<rt::GetPodResponse>, Status> {
        let uid = request.into_inner().uid;
        self.reads.send_modify(|reads| *reads += 1);
        let pod = self.pods.lock().unwrap().get(&uid).cloned();
        Ok(Response::new(rt::GetPodResponse { pod: Some(pod.unwrap_or_default()) }))
    }

    async fn sync(
        &self,
        _: Request<Streaming<rt::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        not_here()
    }

    async fn watch_pods(
        &self,
        _: Request<rt::WatchPodsRequest>,
    ) -> Result<Response<Self::WatchPodsStream>, Status> {
        not_here()
    }

    async fn ensure_image(
        &self,
        _: Request<rt::EnsureImageRequest>,
    ) -> Result<Response<Self::EnsureImageStream>, Status> {
        not_here()
    }

    async fn write_container_files(
        &self,
        _: Request<rt::WriteContainerFilesRequest>,
    ) -> Result<Response<rt::WriteContainerFilesResponse>, Status> {
        not_here()
    }

    async fn read_logs(
        &self,
        _: Request<rt::ReadLogsRequest>,
    ) -> Result<Response<Self::ReadLogsStream>, Status> {
        not_here()
    }

    async fn collect_garbage(
        &self,
        _: Request<rt::CollectGarbageRequest>,
    ) -> Result<Response<rt::CollectGarbageResponse>, Status> {
        not_here()
    }
}
