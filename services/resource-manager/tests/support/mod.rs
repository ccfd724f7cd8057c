//! The service over a real unix socket and on the real cgroup tree, with a fake runtime-shim. Each test has its own cgroup
//! root, which is removed at its end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_client::ResourceManagerClient;
use keelson_service_kit::{Context, PeerChannel};
use keelson_testkit::fakes::FakeRuntimeShim;
use keelson_testkit::service::RunningService;
pub use keelson_testkit::service::{until_some, within};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

pub type Client = ResourceManagerClient<PeerChannel>;
pub type Service = RunningService<Client>;

/// The directories and cgroups of one test.
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
        config.paths.state_dir = dir.path().join("state");
        // Do not change tunables or read the kernel's log of this machine.
        config.manage_host = false;
        let unique = format!("/keelson-rm-{}-{:08x}", std::process::id(), fastrand::u32(..));
        config.runtime.cgroup_root = unique;
        for service in [ServiceName::ResourceManager, ServiceName::RuntimeShim, ServiceName::VolumeManager] {
            fs::create_dir_all(config.paths.socket_dir(service)).unwrap();
        }
        let world = Self { _dir: dir, config };
        world.store_driver(Some(""));
        world
    }

    /// Writes the checkpoint of the cgroup driver; an empty name means that the runtime named none. `None` removes it.
    pub fn store_driver(&self, driver: Option<&str>) {
        let file = self.config.paths.state(ServiceName::ResourceManager).join("runtime.json");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        match driver {
            Some(driver) => {
                let endpoint = &self.config.runtime.endpoint;
                let text =
                    format!("{{\"endpoint\":{endpoint:?},\"cgroupDriver\":{driver:?},\"schemaVersion\":1}}");
                fs::write(file, text).unwrap();
            }
            None => fs::remove_file(file).unwrap(),
        }
    }

    /// Starts the service on these directories and cgroups.
    pub async fn start(&self) -> Service {
        let ctx = Context::detached(ServiceName::ResourceManager, self.config.clone());
        let routes = keelson_resource_manager::build(ctx.clone()).await.unwrap();
        RunningService::start(ctx, routes, ResourceManagerClient::new).await
    }

    /// The error with which the service does not start.
    #[allow(dead_code, reason = "only some tests use it")]
    pub async fn start_error(&self) -> String {
        let ctx = Context::detached(ServiceName::ResourceManager, self.config.clone());
        let error = keelson_resource_manager::build(ctx).await.expect_err("the service starts");
        format!("{error:#}")
    }

    /// Starts the fake runtime-shim.
    pub async fn start_runtime(&self) -> FakeRuntimeShim {
        FakeRuntimeShim::start(&self.config).await.unwrap()
    }

    /// The cgroup below this test's root in every hierarchy.
    pub fn dirs(&self, path: &str) -> Vec<PathBuf> {
        let below = format!("{}/{path}", self.config.runtime.cgroup_root);
        hierarchies().into_iter().map(|h| h.join(below.trim_start_matches('/'))).collect()
    }

    /// The ones of [`Self::dirs`] that exist.
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
    let mounts = keelson_mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap());
    let cgroups = mounts.into_iter().filter(|mount| ["cgroup", "cgroup2"].contains(&mount.fs_type.as_str()));
    cgroups.map(|mount| mount.point).collect()
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
        // The service may be creating a cgroup on another thread right now, so check again after a moment.
        for _ in 0..50 {
            for dir in self.existing("") {
                remove_cgroup(&dir);
            }
            std::thread::sleep(Duration::from_millis(10));
            if self.existing("").is_empty() {
                return;
            }
        }
    }
}

/// A process of a pod, put into a cgroup of its own, `container`, in each of these cgroups.
pub struct Process(std::process::Child);

impl Process {
    pub fn start(pods: &[PathBuf]) -> Self {
        Self::run(pods, &["sleep", "600"])
    }

    /// A process that uses 8 MiB and a CPU. It starts working in its cgroup, so that all usage is charged there.
    #[allow(dead_code, reason = "only the tests of statistics use it")]
    pub fn burn_cpu(pods: &[PathBuf]) -> Self {
        const SCRIPT: &str = r"read go; x=$(head -c 8388608 /dev/zero | tr '\0' x); while :; do :; done";
        Self::run(pods, &["sh", "-c", SCRIPT])
    }

    /// A process that uses 16 MiB once it has worked for a moment, and then does nothing.
    #[allow(dead_code, reason = "only the tests of resizes use it")]
    pub fn use_memory(pods: &[PathBuf]) -> Self {
        const SCRIPT: &str = r"read go; x=$(head -c 16777216 /dev/zero | tr '\0' x); kill -STOP $$";
        Self::run(pods, &["sh", "-c", SCRIPT])
    }

    fn run(pods: &[PathBuf], command: &[&str]) -> Self {
        let mut command_line = std::process::Command::new(command[0]);
        command_line.args(&command[1..]).stdin(std::process::Stdio::piped());
        let mut child = command_line.spawn().unwrap();
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
        // The script starts when its stdin is closed.
        drop(child.stdin.take());
        Self(child)
    }

    /// The signal that has killed it; none while it runs.
    pub fn killed_by(&mut self) -> Option<i32> {
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
    let request = within(pb::PreparePodRequest { uid: uid.into(), revision, cgroup: None }, deadline);
    client.prepare_pod(request).await.map(|response| response.into_inner().cgroup_parent)
}

pub async fn release(client: &mut Client, uid: &str, deadline: Duration) -> Result<(), Status> {
    let request = within(pb::ReleasePodRequest { uid: uid.into() }, deadline);
    client.release_pod(request).await.map(drop)
}
