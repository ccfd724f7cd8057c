//! Runs the service over a real unix socket, with a fake runtime-shim.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod api;

use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Config, ServiceName};
use keelson_mountinfo::Mount;
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_client::VolumeManagerClient;
use keelson_service_kit::{Context, PeerChannel};
use keelson_testkit::fakes::FakeRuntimeShim;
use keelson_testkit::service::RunningService;
pub use keelson_testkit::service::{until_some, within};
use rustix::mount::UnmountFlags;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// A deadline that is long enough on a busy machine.
pub const LONG: Duration = Duration::from_secs(20);

pub type Client = VolumeManagerClient<PeerChannel>;
pub type Service = RunningService<Client>;

/// The folders of one test. Mounts and folders are removed with it.
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
        for service in [ServiceName::VolumeManager, ServiceName::RuntimeShim, ServiceName::PodConfig] {
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

    /// The folder of a volume; `plugin` is the last part of the plugin's name.
    pub fn volume(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod(uid).join(format!("volumes/kubernetes.io~{plugin}")).join(name)
    }

    /// Starts the service on these folders.
    pub async fn start(&self) -> Service {
        let ctx = Context::detached(ServiceName::VolumeManager, self.config.clone());
        let helper = env!("CARGO_BIN_EXE_keelson-volume-manager");
        let routes = keelson_volume_manager::build_with_helper(ctx.clone(), helper.into()).await.unwrap();
        RunningService::start(ctx, routes, VolumeManagerClient::new).await
    }

    /// Starts the fake runtime-shim.
    pub async fn start_runtime(&self) -> FakeRuntimeShim {
        FakeRuntimeShim::start(&self.config).await.unwrap()
    }
}

/// The mounts of this process.
pub fn mounts() -> Vec<Mount> {
    keelson_mountinfo::parse(&std::fs::read("/proc/self/mountinfo").unwrap())
}

/// The mount points at and below `folder`.
pub fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let points = mounts().into_iter().map(|mount| mount.point);
    points.filter(|point| point.starts_with(folder)).collect()
}

impl Drop for World {
    fn drop(&mut self) {
        for point in mounts_below(self.dir.path()).into_iter().rev() {
            let _ = rustix::mount::unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

/// A `Sync` stream, as pod-sync opens it.
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
        huge_page_sizes: Vec::new(),
        storage_limited: false,
        ..pb::PodDesire::default()
    }
}

pub fn volume(name: &str, source: pb::volume::Source) -> pb::Volume {
    pb::Volume { name: name.into(), source: Some(source), ..pb::Volume::default() }
}

pub fn empty_dir(name: &str, medium: &str, size_limit_bytes: i64) -> pb::Volume {
    volume(name, pb::volume::Source::EmptyDir(pb::EmptyDir { medium: medium.into(), size_limit_bytes }))
}

/// Calls `MountPod` until it ends. Returns what it waited for, and the result.
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
            None => panic!("the MountPod stream ended without a result"),
        }
    }
}

pub async fn unmount(client: &mut Client, uid: &str, deadline: Duration) -> Result<(), Status> {
    let request = within(pb::UnmountPodRequest { uid: uid.into() }, deadline);
    client.unmount_pod(request).await.map(drop)
}
