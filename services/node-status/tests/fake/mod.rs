//! The services that node-status calls, as fakes on real sockets, and a writer that records.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod images;

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt as _;
use keelson_config::{Config, ServiceName};
use keelson_node_status::{ControlPlaneWriter, GonePods, NodeReport, PodUpdate, ReportState, WriteError};
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::events::v1::Event;
use keelson_proto::keelson::events::v1::events_server::EventsServer;
use keelson_proto::keelson::pod_sync::v1 as ps;
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::server::{self, CallerPolicy, StackLayer};
use keelson_service_kit::{Context, EventRing, WatchHub, WatchItem};
use keelson_testkit::fakes::{
    FakeAdmin, FakePodSync, FakeResourceManager, FakeRuntime, FakeServer, FakeVolumeManager, StreamAnswer,
};
use tonic::service::Routes;

use images::FakeImages;

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
    /// It has reported neither the volumes in use nor the CSI drivers.
    pub volumes: FakeVolumeManager,
    machine: WatchHub<(), rm::Machine>,
    runtime: WatchHub<(), rt::RuntimeState>,
    admins: HashMap<ServiceName, FakeAdmin>,
    events: HashMap<ServiceName, EventRing>,
    running: Mutex<HashMap<ServiceName, FakeServer>>,
}

impl FakePeers {
    pub async fn start() -> Self {
        let all = ServiceName::NodeStatus.callees();
        let peers = Self {
            dir: tempfile::tempdir().unwrap(),
            pods: WatchHub::new(),
            images: FakeImages::default(),
            volumes: FakeVolumeManager::default(),
            machine: WatchHub::new(),
            runtime: WatchHub::new(),
            admins: all.iter().map(|name| (*name, FakeAdmin::default())).collect(),
            events: all.iter().map(|name| (*name, EventRing::default())).collect(),
            running: Mutex::default(),
        };
        let own = peers.context(ServiceName::NodeStatus).config;
        std::fs::create_dir_all(own.paths.socket_dir(ServiceName::NodeStatus)).unwrap();
        peers.volumes.watch_volumes_in_use.replay([]);
        peers.volumes.watch_csi_drivers.replay([]);
        for name in all {
            peers.stuck(*name, false);
            peers.restart(*name).await;
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
        self.machine.set((), Self::good_machine());
    }

    /// The machine shuts down.
    #[allow(dead_code, reason = "only some tests use it")]
    pub fn shutting_down(&self) {
        self.machine.set((), rm::Machine { shutting_down: true, ..Self::good_machine() });
    }

    fn good_machine() -> rm::Machine {
        let amounts = [("cpu", 2000), ("memory", 1 << 30), ("pods", 110), ("ephemeral-storage", 1 << 30)];
        let amounts: HashMap<String, i64> = amounts.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        rm::Machine {
            capacity: amounts.clone(),
            allocatable: amounts,
            architecture: "x86_64".into(),
            boot_id: "b1".into(),
            swap_bytes: 1 << 20,
            ..rm::Machine::default()
        }
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

    /// Sets whether the only loop of a service makes no progress.
    pub fn stuck(&self, service: ServiceName, stuck: bool) {
        let silent_ms = if stuck { 60_000 } else { 0 };
        let work = admin::Loop { name: "work".into(), silent_ms, stuck_after_ms: 30_000 };
        let progress = admin::GetProgressResponse { loops: vec![work], ..Default::default() };
        self.admins[&service].get_progress.answer(progress);
    }

    pub fn events(&self, service: ServiceName) -> EventRing {
        self.events[&service].clone()
    }

    pub fn kill(&self, service: ServiceName) {
        let server = self.running.lock().unwrap().remove(&service).expect("it runs");
        server.kill();
    }

    pub async fn restart(&self, service: ServiceName) {
        let routes = Routes::new(self.admins[&service].server())
            .add_service(EventsServer::new(self.events[&service].clone()));
        let routes = match service {
            ServiceName::PodSync => routes.add_service(pod_sync(&self.pods).server()),
            ServiceName::RuntimeShim => routes
                .add_service(runtime_shim(&self.runtime).server())
                .add_service(self.images.service.server()),
            ServiceName::ResourceManager => routes.add_service(resource_manager(&self.machine).server()),
            ServiceName::VolumeManager => routes.add_service(self.volumes.server()),
            _ => routes,
        };
        let config = self.context(service).config;
        let server = FakeServer::start(&config, service, routes).await.unwrap();
        self.running.lock().unwrap().insert(service, server);
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

/// A pod-sync that sends the pods of `hub`.
fn pod_sync(hub: &WatchHub<String, ps::PodDocument>) -> FakePodSync {
    use ps::watch_pods_response::Item;
    let (fake, hub) = (FakePodSync::default(), hub.clone());
    fake.watch_pods.answer_with(move |_| {
        let stream = hub.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set(_, document) => Item::Pod(document),
                WatchItem::Gone(uid) => Item::GoneUid(uid),
                WatchItem::Synced => Item::Synced(Synced {}),
            };
            Ok(ps::WatchPodsResponse { item: Some(item) })
        });
        Ok(StreamAnswer::stream(stream))
    });
    fake
}

/// A runtime-shim that sends the state of the runtime in `hub`.
fn runtime_shim(hub: &WatchHub<(), rt::RuntimeState>) -> FakeRuntime {
    use rt::watch_pods_response::Item;
    let (fake, hub) = (FakeRuntime::default(), hub.clone());
    fake.watch_pods.answer_with(move |_| {
        let stream = hub.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set((), state) => Item::State(state),
                WatchItem::Gone(()) => Item::GoneUid("unknown".into()),
                WatchItem::Synced => Item::Synced(Synced {}),
            };
            Ok(rt::WatchPodsResponse { item: Some(item) })
        });
        Ok(StreamAnswer::stream(stream))
    });
    fake
}

/// A resource-manager that sends the machine in `hub`.
fn resource_manager(hub: &WatchHub<(), rm::Machine>) -> FakeResourceManager {
    let (fake, hub) = (FakeResourceManager::default(), hub.clone());
    fake.watch_machine.answer_with(move |_| {
        let stream = hub.subscribe().into_stream(|item| item).filter_map(async |item| match item {
            WatchItem::Set((), machine) => Some(Ok(machine)),
            _ => None,
        });
        Ok(StreamAnswer::stream(stream))
    });
    fake
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

    async fn write_node(&self, _: &NodeReport) -> Result<(), WriteError> {
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
