//! The four services that pod-sync calls, as fakes over real unix sockets. They carry out every request at once, except that
//! runtime-shim removes the records of a pod only when a test says so.

#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod cri;
mod services;
mod shim;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::Stream;
use keelson_config::{Config, ControlPlane, ServiceName};
use keelson_kube_model::time::format_nanos;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::events::v1::ListEventsRequest;
use keelson_proto::keelson::events::v1::events_server::Events as _;
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::pod_sync::v1 as ps;
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_service_kit::server::{self, CallerPolicy, StackLayer};
use keelson_service_kit::{
    CancellationToken, Context, Peer, PeerChannel, WatchHub, WatchItem, now_unix_nanos,
};
use keelson_testkit::fakes::{FakePodConfig, FakeVolumeManager, Recorder};
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::service::Routes;

pub use services::{FakeCluster, FakeMachine};
pub use shim::Shim;

/// The configured pod sources.
pub const SOURCES: [&str; 2] = ["file", "manifest"];

/// Polls until there is a value; panics after 20 s.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), asking)
        .await
        .unwrap_or_else(|_| panic!("{what} never came"))
}

/// The messages of a watch: all entries, that these were all, and later changes.
fn watch_messages<V: Clone + Send + Sync, M: Send>(
    hub: &WatchHub<String, V>,
    set: fn(V) -> M,
    gone: fn(String) -> M,
    synced: fn(Synced) -> M,
) -> impl Stream<Item = M> + Send + use<V, M> {
    hub.subscribe().into_stream(move |item| match item {
        WatchItem::Set(_, value) => set(value),
        WatchItem::Gone(uid) => gone(uid),
        WatchItem::Synced => synced(Synced {}),
    })
}

fn serve(config: &Config, name: ServiceName, routes: Routes, stop: &CancellationToken) {
    let socket = config.paths.socket(name);
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let stack = StackLayer::new(CallerPolicy::new(config), Default::default());
    let stop = stop.clone();
    tokio::spawn(async move { server::serve(&socket, routes, stack, stop, || {}).await.unwrap() });
}

/// The fake services, in a temporary directory.
pub struct World {
    dir: tempfile::TempDir,
    pub pods: WatchHub<String, pc::DesiredPod>,
    pub shim: Arc<Shim>,
    pub machine: FakeMachine,
    pub volumes: FakeVolumeManager,
    /// The pod settings in the configuration of pod-sync when it starts.
    pub settings: keelson_config::Pods,
    /// Its `resolvConf`.
    pub resolv_conf: String,
    /// How long ago the source has first seen the pods that are added next.
    pub seen_ago: Duration,
    /// The source of the pods that are added next: all but those of `api` are static, and so critical.
    pub source: &'static str,
    /// The status that the source sends with the pods that are added next.
    pub status: Value,
    /// The control plane in the configuration of pod-sync when it starts.
    pub control_plane: ControlPlane,
    /// The objects of that control plane.
    pub cluster: Arc<Mutex<FakeCluster>>,
    reported: watch::Sender<Vec<String>>,
    pod_config: FakePodConfig,
}

impl World {
    pub fn start() -> Self {
        let (pods, cluster) = (WatchHub::new(), Arc::default());
        let reported = watch::Sender::new(SOURCES.map(String::from).to_vec());
        let (shim, runtime_shim) = Shim::start();
        let world = Self {
            dir: tempfile::tempdir().unwrap(),
            pod_config: services::pod_config(&pods, &reported, &cluster),
            volumes: services::volume_manager(&shim),
            pods,
            shim,
            machine: FakeMachine::new(),
            settings: keelson_config::Pods::default(),
            resolv_conf: String::new(),
            seen_ago: Duration::ZERO,
            source: "file",
            status: json!({}),
            control_plane: ControlPlane::None,
            cluster,
            reported,
        };
        let (config, never) = (world.config(), CancellationToken::new());
        for (name, routes) in [
            (ServiceName::PodConfig, Routes::new(world.pod_config.server())),
            (ServiceName::RuntimeShim, runtime_shim),
            (ServiceName::VolumeManager, Routes::new(world.volumes.server())),
            (ServiceName::ResourceManager, Routes::new(world.machine.api.server())),
        ] {
            serve(&config, name, routes, &never);
        }
        world
    }

    fn config(&self) -> Config {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = self.dir.path().join("run");
        config.paths.state_dir = self.dir.path().join("state");
        config.runtime.resolv_conf = self.resolv_conf.clone();
        config.pods = self.settings.clone();
        config.control_plane = self.control_plane.clone();
        config.resources.identity_files.boot_id = vec![self.boot_file()];
        config
    }

    fn boot_file(&self) -> std::path::PathBuf {
        self.dir.path().join("boot_id")
    }

    /// The machine has booted: the next pod-sync reads another boot id.
    pub fn boot(&self, id: &str) {
        std::fs::write(self.boot_file(), id).unwrap();
    }

    /// Starts pod-sync on the records of the previous one.
    pub async fn pod_sync(&self) -> PodSync {
        let ctx = Context::detached(ServiceName::PodSync, self.config());
        let routes = keelson_pod_sync::build(ctx.clone()).await.unwrap();
        serve(&ctx.config, ServiceName::PodSync, routes, &ctx.shutdown);
        PodSync { ctx }
    }

    /// From now on only these of [`SOURCES`] have reported.
    pub fn reported(&self, sources: &[&str]) {
        self.reported.send_replace(sources.iter().map(|source| (*source).to_owned()).collect());
    }

    /// The requests for service variables.
    pub fn service_env_requests(&self) -> &Recorder<pc::GetServiceEnvRequest> {
        self.pod_config.get_service_env.requests()
    }

    /// Deletes everything that pod-sync has stored.
    pub fn delete_records(&self) {
        std::fs::remove_dir_all(self.config().paths.state_dir).unwrap();
    }

    /// Adds the static pod `default/<uid>` with one container, `main`.
    pub fn add_pod(&self, uid: &str, restart_policy: &str, revision: u64) {
        let spec = json!({
            "restartPolicy": restart_policy,
            "containers": [{"name": "main", "image": "i:1", "imagePullPolicy": "IfNotPresent"}],
        });
        self.add_pod_with_spec(uid, spec, revision);
    }

    /// Adds the static pod `default/<uid>` with this spec and some defaults.
    pub fn add_pod_with_spec(&self, uid: &str, spec: Value, revision: u64) {
        self.add_pod_at(uid, spec, revision, 0);
    }

    /// Like [`World::add_pod_with_spec`], with the time at which its source has added it.
    pub fn add_pod_at(&self, uid: &str, mut spec: Value, revision: u64, added_unix_nanos: i64) {
        spec["dnsPolicy"] = "Default".into();
        spec["terminationGracePeriodSeconds"] = 1.into();
        let seen = i128::from(now_unix_nanos()) - i128::try_from(self.seen_ago.as_nanos()).unwrap();
        let pod = json!({
            "metadata": {
                "name": uid, "namespace": "default", "uid": uid,
                "creationTimestamp": format_nanos(seen).unwrap(),
                "annotations": {"revision": revision.to_string()},
            },
            "spec": spec,
            "status": self.status,
        });
        let desired = pc::DesiredPod {
            uid: uid.into(),
            namespace: "default".into(),
            name: uid.into(),
            source: self.source.into(),
            pod_json: pod.to_string().into_bytes().into(),
            revision,
            added_unix_nanos,
            seen_unix_nanos: i64::try_from(seen).unwrap(),
            ..pc::DesiredPod::default()
        };
        self.pods.set(uid.to_owned(), desired);
    }
}

/// A running pod-sync.
pub struct PodSync {
    pub ctx: Context,
}

impl PodSync {
    pub fn client(&self) -> PodSyncClient<PeerChannel> {
        PodSyncClient::new(Peer::service(&self.ctx.config.paths.run_dir, ServiceName::PodSync).channel())
    }

    /// The pod in `ListPods`.
    pub async fn pod(&self, uid: &str) -> Option<Value> {
        let document = self.document(uid).await?;
        Some(serde_json::from_slice(&document.pod_json).unwrap())
    }

    /// The document of the pod in `ListPods`.
    pub async fn document(&self, uid: &str) -> Option<ps::PodDocument> {
        let mut list = self.client().list_pods(ps::ListPodsRequest {}).await.ok()?.into_inner();
        while let Some(pod) = list.message().await.unwrap() {
            if pod.uid == uid {
                return Some(pod);
            }
        }
        None
    }

    /// Waits until `ListPods` has the pod in this phase; returns its first container's status.
    pub async fn phase(&self, uid: &str, phase: &str) -> Value {
        eventually(&format!("{uid} {phase}"), async || {
            let status = self.pod(uid).await?["status"].take();
            (status["phase"] == phase).then(|| status["containerStatuses"][0].clone())
        })
        .await
    }

    /// Waits until a step of the pod matches.
    pub async fn step(&self, uid: &str, name: &str, matches: impl Fn(&ps::Step) -> bool) -> ps::Step {
        eventually(&format!("step {name} of {uid}"), async || {
            let request = ps::ExplainPodRequest { uid: uid.into(), ..Default::default() };
            let steps = self.client().explain_pod(request).await.ok()?.into_inner().steps;
            steps.into_iter().find(|step| step.name == name && matches(step))
        })
        .await
    }

    /// The summary of `ExplainPod`.
    pub async fn summary(&self, uid: &str) -> String {
        let request = ps::ExplainPodRequest { uid: uid.into(), ..Default::default() };
        self.client().explain_pod(request).await.unwrap().into_inner().summary
    }

    /// Calls `RetryPod`.
    pub async fn retry(&self, name: &str) {
        let request = ps::RetryPodRequest { namespace: "default".into(), name: name.into() };
        self.client().retry_pod(request).await.unwrap();
    }

    /// Its events so far: `<type> <reason>: <message>`, in order.
    pub async fn events(&self) -> Vec<String> {
        let request = tonic::Request::new(ListEventsRequest::default());
        let events = self.ctx.events.list_events(request).await.unwrap().into_inner().events;
        events.into_iter().map(|e| format!("{} {}: {}", e.r#type, e.reason, e.message)).collect()
    }

    /// Waits for an event with this prefix.
    pub async fn event(&self, begins: &str) -> String {
        eventually(begins, async || self.events().await.into_iter().find(|e| e.starts_with(begins))).await
    }

    /// Whether its metrics have this line now.
    pub fn has_metric(&self, line: &str) -> bool {
        self.ctx.metrics.text().lines().any(|l| l == line)
    }

    /// Waits until its metrics have all of these lines.
    pub async fn wait_for_metrics(&self, lines: &[&str]) {
        for line in lines {
            eventually(line, async || self.has_metric(line).then_some(())).await;
        }
    }

    /// Ends it without stopping its pods.
    pub fn kill(&self) {
        self.ctx.shutdown.cancel();
    }
}
