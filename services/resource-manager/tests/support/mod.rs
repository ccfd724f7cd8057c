//! The service over a real unix socket and on the real cgroup tree, with a runtime-shim that says what the test
//! wants. Each test has a cgroup root of its own, which goes with it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::Stream;
use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_proto::keelson::runtime::v1::runtime_server::{Runtime, RuntimeServer};
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::{CancellationToken, Context, Peer, PeerChannel};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

pub type Client = ResourceManagerClient<PeerChannel>;

/// The folders and cgroups of one test.
pub struct World {
    _dir: tempfile::TempDir,
    pub config: Config,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { node_name: "node".into(), ..Config::default() };
        config.paths.run_dir = dir.path().join("run");
        config.paths.root_dir = dir.path().to_owned();
        let unique = format!("/keelson-rm-{}-{:08x}", std::process::id(), fastrand::u32(..));
        config.runtime.cgroup_root = unique;
        for service in [ServiceName::ResourceManager, ServiceName::RuntimeShim] {
            fs::create_dir_all(config.paths.socket_dir(service)).unwrap();
        }
        Self { _dir: dir, config }
    }

    /// Starts the service on these folders and cgroups.
    pub async fn start(&self) -> Service {
        let ctx = Context::detached(ServiceName::ResourceManager, self.config.clone());
        let routes = keelson_resource_manager::build(ctx.clone()).await.unwrap();
        Service { server: self.serve(ServiceName::ResourceManager, routes, &ctx.shutdown).await, ctx }
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

    /// The cgroup below this test's root in every hierarchy.
    pub fn dirs(&self, path: &str) -> Vec<PathBuf> {
        let below = format!("{}/{path}", self.config.runtime.cgroup_root);
        hierarchies().into_iter().map(|h| h.join(below.trim_start_matches('/'))).collect()
    }

    /// Those of them that exist.
    pub fn existing(&self, path: &str) -> Vec<PathBuf> {
        self.dirs(path).into_iter().filter(|dir| dir.exists()).collect()
    }

    /// The value of a file in whichever hierarchy has it.
    pub fn value(&self, path: &str, file: &str) -> String {
        let texts = self.dirs(path).into_iter().find_map(|dir| fs::read_to_string(dir.join(file)).ok());
        texts.unwrap_or_else(|| panic!("{path} has no {file}")).trim().to_owned()
    }
}

/// Where cgroup hierarchies are mounted.
pub fn hierarchies() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_cgroup = |line: &&str| line.contains(" - cgroup ") || line.contains(" - cgroup2 ");
    text.lines().filter(is_cgroup).map(|line| line.split(' ').nth(4).unwrap().into()).collect()
}

fn remove_cgroup(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

impl Drop for World {
    fn drop(&mut self) {
        for dir in self.existing("") {
            remove_cgroup(&dir);
        }
    }
}

/// A process of a pod, put into a cgroup of its own in each of these cgroups.
pub struct Process(std::process::Child);

impl Process {
    pub fn begin(pods: &[PathBuf]) -> Self {
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        for pod in pods {
            let dir = pod.join("container");
            fs::create_dir_all(&dir).unwrap();
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read(pod.join(file)) {
                    fs::write(dir.join(file), value).unwrap();
                }
            }
            fs::write(dir.join("cgroup.procs"), child.id().to_string()).unwrap();
        }
        Self(child)
    }

    /// The signal that has ended it; none while it runs.
    pub fn ended_by(&mut self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt as _;
        self.0.try_wait().unwrap().and_then(|status| status.signal())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running service.
pub struct Service {
    pub ctx: Context,
    server: JoinHandle<()>,
}

impl Service {
    pub fn client(&self) -> Client {
        let peer = Peer::service(&self.ctx.config.paths.run_dir, ServiceName::ResourceManager);
        ResourceManagerClient::new(peer.channel())
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

pub fn desire(uid: &str, revision: u64, want: common::Want, qos: &str) -> pb::PodDesire {
    pb::PodDesire {
        pod: Some(common::PodRef {
            uid: uid.into(),
            namespace: "default".into(),
            name: format!("pod-{uid}"),
        }),
        revision,
        want: want.into(),
        qos_class: qos.into(),
        cgroup: Some(pb::PodCgroup { cpu_shares: 2, ..Default::default() }),
        ..Default::default()
    }
}

/// A call with a deadline.
pub fn within<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

pub async fn admit(client: &mut Client, uid: &str, deadline: Duration) -> pb::admit_pod_response::Verdict {
    let request = within(pb::AdmitPodRequest { uid: uid.into(), revision: 1 }, deadline);
    client.admit_pod(request).await.unwrap().into_inner().verdict.unwrap()
}

pub async fn prepare(
    client: &mut Client,
    uid: &str,
    revision: u64,
    deadline: Duration,
) -> Result<String, Status> {
    let request = within(pb::PreparePodRequest { uid: uid.into(), revision }, deadline);
    client.prepare_pod(request).await.map(|response| response.into_inner().cgroup_parent)
}

pub async fn release(client: &mut Client, uid: &str, deadline: Duration) -> Result<(), Status> {
    let request = within(pb::ReleasePodRequest { uid: uid.into() }, deadline);
    client.release_pod(request).await.map(drop)
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
