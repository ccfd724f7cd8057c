//! A fake agent: every service answers on a real socket from one [`World`].

pub mod answers;
mod shell;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::pod_config::v1 as pod_config;
use keelson_proto::keelson::pod_sync::v1 as pod_sync;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::supervisor::v1 as supervisor;
use keelson_proto::keelson::volume_manager::v1 as volumes;
use keelson_service_kit::EventRing;
use keelson_testkit::fakes::{FakeServer, Recorder};

use self::answers::Services;

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
    pub orphans: Vec<volumes::OrphanedPod>,
    /// The PersistentVolumes and claims; `None`: pod-config is of a release that lists none.
    pub volume_objects: Option<Vec<serde_json::Value>>,
    /// Whether pods remain after their deletion.
    pub keeps_deleted: bool,
    pub events: EventRing,
    /// Every call that changes something or carries arguments, as text, in order.
    pub calls: Recorder<String>,
}

/// A running fake agent, stopped when dropped.
pub struct Fake {
    pub run_dir: PathBuf,
    pub world: Arc<World>,
    /// For changes that watches show.
    pub services: Services,
    _servers: Vec<FakeServer>,
    _folder: Option<tempfile::TempDir>,
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
    pub fn start_in(run_dir: &Path, world: World, names: &[ServiceName], config: &Config) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let world = Arc::new(world);
        let services = Services::answer_from(&world);
        let mut config = config.clone();
        config.paths.run_dir = run_dir.to_owned();
        let start = |name: &ServiceName| {
            runtime.block_on(FakeServer::start(&config, *name, services.routes(*name, &world))).unwrap()
        };
        let servers = names.iter().map(start).collect();
        let run_dir = run_dir.to_owned();
        Self { run_dir, world, services, _servers: servers, _folder: None }
    }
}
