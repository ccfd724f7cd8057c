//! Fakes of pod-config, volume-manager and resource-manager that accept every request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::{StreamExt as _, stream};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_service_kit::WatchHub;
use keelson_testkit::fakes::{FakePodConfig, FakeResourceManager, FakeVolumeManager, Recorder, StreamAnswer};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio_stream::wrappers::WatchStream;
use tonic::Status;

use super::{SOURCES, Shim, watch_messages};

/// The objects in the cluster.
#[derive(Default)]
pub struct FakeCluster {
    /// The services have been read.
    pub services_read: bool,
    /// Handlers by class.
    pub classes: BTreeMap<String, String>,
    /// Fields of the Node in addition to its name.
    pub node: BTreeMap<&'static str, serde_json::Value>,
}

/// A pod-config with these pods and objects, and the sources that have reported.
pub fn pod_config(
    pods: &WatchHub<String, pc::DesiredPod>,
    reported: &watch::Sender<Vec<String>>,
    cluster: &Arc<Mutex<FakeCluster>>,
) -> FakePodConfig {
    let fake = FakePodConfig::default();
    let (pods, reported) = (pods.clone(), reported.clone());
    fake.watch_pods.answer_with(move |_| Ok(watch_pods(&pods, &reported)));
    let answering = Arc::clone(cluster);
    fake.watch_node.answer_with(move |_| {
        let mut node = json!({"metadata": {"name": "n1", "labels": {"disk": "ssd"}}});
        for (part, value) in &answering.lock().unwrap().node {
            node[part] = value.clone();
        }
        let node_json = node.to_string().into_bytes();
        Ok(StreamAnswer::items([pc::WatchNodeResponse { node_json, registered: false }]).then_open())
    });
    let answering = Arc::clone(cluster);
    fake.get_object.answer_with(move |request| {
        if request.kind != "RuntimeClass" {
            return Err(Status::unimplemented("not faked"));
        }
        let cluster = answering.lock().unwrap();
        let handler = cluster.classes.get(&request.name);
        let handler = handler.ok_or_else(|| Status::not_found("there is no such class"))?;
        let object_json = json!({"kind": "RuntimeClass", "handler": handler}).to_string().into_bytes();
        Ok(pc::GetObjectResponse { object_json })
    });
    let answering = Arc::clone(cluster);
    fake.get_service_env.answer_with(move |request| {
        if !answering.lock().unwrap().services_read && !request.as_known {
            return Err(Status::unavailable("services have not yet been read at least once"));
        }
        let variables = [("DB_SERVICE_HOST".to_owned(), "10.0.0.3".to_owned())].into();
        Ok(pc::GetServiceEnvResponse { variables })
    });
    fake
}

/// The sources that have reported, then the pods, and `Synced` again when other sources have reported.
fn watch_pods(
    pods: &WatchHub<String, pc::DesiredPod>,
    reported: &watch::Sender<Vec<String>>,
) -> StreamAnswer<pc::WatchPodsResponse> {
    use pc::watch_pods_response::Item;
    let reports = |sources: Vec<String>| {
        let configured = SOURCES.map(String::from).to_vec();
        let ready = move |source| pc::SourceReady { source, configured: configured.clone() };
        sources.into_iter().map(ready).map(Item::SourceReady)
    };
    let changes = WatchStream::from_changes(reported.subscribe());
    let now = reports(reported.borrow().clone());
    let later = changes
        .flat_map(move |sources| stream::iter(reports(sources).chain([Item::Synced(common::Synced {})])));
    let pods = watch_messages(pods, Item::Pod, Item::GoneUid, Item::Synced);
    let items = stream::iter(now).chain(stream::select(pods, later));
    StreamAnswer::stream(items.map(|item| Ok(pc::WatchPodsResponse { item: Some(item) })))
}

/// A volume-manager that, like the real one, unmounts volumes only when the pod has no ready sandbox.
pub fn volume_manager(shim: &Arc<Shim>) -> FakeVolumeManager {
    let fake = FakeVolumeManager::default();
    fake.sync.acknowledge_sets();
    fake.prepare_container.answer_with(prepare_container);
    let host_path = "/volumes/data".to_owned();
    let data = vm::VolumeMount { name: "data".into(), host_path, ..vm::VolumeMount::default() };
    let ready = vm::MountsReady { volumes: vec![data], ..vm::MountsReady::default() };
    let item = Some(vm::mount_pod_response::Item::Ready(ready));
    fake.mount_pod.list([vm::MountPodResponse { item }]);
    let shim = Arc::clone(shim);
    fake.unmount_pod.answer_async(move |request| {
        let shim = Arc::clone(&shim);
        async move {
            shim.create_late_sandbox(&request.uid);
            shim.until_sandboxes_stopped(&request.uid).await;
            Ok(vm::UnmountPodResponse {})
        }
    });
    fake
}

fn prepare_container(request: vm::PrepareContainerRequest) -> Result<vm::PrepareContainerResponse, Status> {
    use vm::file_key_value::Found;
    if let Some(part) = request.subpaths.iter().find(|part| part.path == "out") {
        return Err(Status::failed_precondition(format!("subPath of {}: it leads out", part.volume)));
    }
    let part = |part: &vm::SubPath| vm::PreparedSubPath {
        index: part.index,
        host_path: format!("/prepared/{}/{}/{}", request.container, part.volume, part.path),
    };
    let value = |key: &vm::FileKey| {
        let value = format!("{} of {} in {}", key.key, key.path, key.volume);
        let found = if key.path == "none" { Found::Missing(true) } else { Found::Value(value) };
        vm::FileKeyValue { found: Some(found) }
    };
    Ok(vm::PrepareContainerResponse {
        subpaths: request.subpaths.iter().map(part).collect(),
        values: request.keys.iter().map(value).collect(),
    })
}

/// A resource-manager that admits every pod, until a test says otherwise.
pub struct FakeMachine {
    /// Eviction orders, by UID.
    pub evictions: WatchHub<String, rm::Eviction>,
    /// The machine has cgroup v2.
    pub cgroup_v2: Arc<AtomicBool>,
    /// Why other values of a cgroup are refused.
    refused_cgroups: Arc<Mutex<Option<Status>>>,
    pub(super) api: FakeResourceManager,
}

impl FakeMachine {
    pub(super) fn new() -> Self {
        let (api, evictions) = (FakeResourceManager::default(), WatchHub::new());
        let cgroup_v2 = Arc::<AtomicBool>::default();
        api.sync.acknowledge_sets();
        api.defer_pod.answer(rm::DeferPodResponse {});
        let refused_cgroups = prepare_pods(&api);
        api.release_pod.answer(rm::ReleasePodResponse {});
        let orders = evictions.clone();
        api.watch_evictions.answer_with(move |_| {
            use rm::watch_evictions_response::Item;
            let items = watch_messages(&orders, Item::Eviction, Item::GoneUid, Item::Synced);
            Ok(StreamAnswer::stream(items.map(|item| Ok(rm::WatchEvictionsResponse { item: Some(item) }))))
        });
        let v2 = Arc::clone(&cgroup_v2);
        api.watch_machine.answer_with(move |_| {
            let capacity = [("cpu", 2000), ("memory", 1 << 30), ("hugepages-2Mi", 64 << 20)];
            let machine = rm::Machine {
                capacity: capacity.map(|(name, amount)| (name.to_owned(), amount)).into(),
                cgroup_version: if v2.load(Ordering::Relaxed) { "v2" } else { "v1" }.into(),
                swap_bytes: 1 << 29,
                swap_accounting: true,
                ..rm::Machine::default()
            };
            Ok(StreamAnswer::items([machine]).then_open())
        });
        let machine = Self { evictions, cgroup_v2, refused_cgroups, api };
        machine.admit();
        machine.accept_resizes();
        machine
    }

    /// What pod-sync has requested for a pod.
    pub fn want(&self, uid: &str) -> Option<common::Want> {
        self.desire(uid).map(|desire| desire.want())
    }

    /// The last message of pod-sync about a pod, unless it has dropped the pod.
    pub fn desire(&self, uid: &str) -> Option<rm::PodDesire> {
        self.api.sync.messages().last_desire(uid)
    }

    /// The `DeferPod` calls.
    pub fn deferred(&self) -> &Recorder<rm::DeferPodRequest> {
        self.api.defer_pod.requests()
    }

    /// Rejects every pod from now on.
    pub fn reject(&self, reason: &str, message: &str) {
        self.answer_admission(rejected(reason, message, false));
    }

    /// Rejects every pod temporarily, until [`FakeMachine::admit`].
    pub fn reject_temporarily(&self, reason: &str, message: &str) {
        self.answer_admission(rejected(reason, message, true));
    }

    /// Admits every pod from now on.
    pub fn admit(&self) {
        self.answer_admission(rm::admit_pod_response::Verdict::Admitted(rm::Admitted {}));
    }

    /// Accepts every resize from now on.
    pub fn accept_resizes(&self) {
        self.answer_resizes(rm::resize_pod_response::Verdict::Accepted(rm::Admitted {}));
    }

    /// Rejects every resize from now on: for good, or because other pods use the resources.
    pub fn reject_resizes(&self, message: &str, passing: bool) {
        let (reason, message) = ("OutOfcpu".to_owned(), message.to_owned());
        let rejected = rm::Rejected { reason, message, passing };
        self.answer_resizes(rm::resize_pod_response::Verdict::Rejected(rejected));
    }

    /// No resize of this pod is decided on; others are accepted.
    pub fn leave_undecided(&self, uid: &'static str) {
        use rm::resize_pod_response::Verdict;
        self.api.resize_pod.answer_with(move |request| {
            let wait = rm::NotYet { reason: "PodNotAdmitted".into(), message: "it does not run".into() };
            let is_undecided = request.uid == uid;
            let verdict =
                if is_undecided { Verdict::NotYet(wait) } else { Verdict::Accepted(rm::Admitted {}) };
            Ok(rm::ResizePodResponse { verdict: Some(verdict) })
        });
    }

    /// Resizes are accepted, each when the semaphore has a permit for it.
    pub fn hold_resizes(&self) -> Arc<Semaphore> {
        let permits = Arc::new(Semaphore::new(0));
        let answering = Arc::clone(&permits);
        self.api.resize_pod.answer_async(move |_| {
            let permits = Arc::clone(&answering);
            async move {
                permits.acquire().await.unwrap().forget();
                let verdict = Some(rm::resize_pod_response::Verdict::Accepted(rm::Admitted {}));
                Ok(rm::ResizePodResponse { verdict })
            }
        });
        permits
    }

    /// Refuses other values of a cgroup from now on, or none any more.
    pub fn refuse_cgroups(&self, status: Option<Status>) {
        *self.refused_cgroups.lock().unwrap() = status;
    }

    fn answer_resizes(&self, verdict: rm::resize_pod_response::Verdict) {
        self.api.resize_pod.answer(rm::ResizePodResponse { verdict: Some(verdict) });
    }

    /// The `ResizePod` calls.
    pub fn resizes(&self) -> &Recorder<rm::ResizePodRequest> {
        self.api.resize_pod.requests()
    }

    /// The `PreparePod` calls.
    pub fn prepared(&self) -> &Recorder<rm::PreparePodRequest> {
        self.api.prepare_pod.requests()
    }

    fn answer_admission(&self, verdict: rm::admit_pod_response::Verdict) {
        self.api.admit_pod.answer(rm::AdmitPodResponse { verdict: Some(verdict) });
    }
}

/// Answers when the cgroup of the pod has the values in the call, which are those that pod-sync has sent.
fn prepare_pods(api: &FakeResourceManager) -> Arc<Mutex<Option<Status>>> {
    let refused = Arc::<Mutex<Option<Status>>>::default();
    let (sent, refusal) = (api.sync.messages().clone(), Arc::clone(&refused));
    api.prepare_pod.answer_async(move |request| {
        let (sent, refusal) = (sent.clone(), Arc::clone(&refusal));
        async move {
            let prepared = rm::PreparePodResponse { cgroup_parent: "/kubepods/x".into() };
            let Some(values) = request.cgroup else { return Ok(prepared) };
            if let Some(status) = refusal.lock().unwrap().clone() {
                return Err(status);
            }
            let has = |desire: rm::PodDesire| desire.cgroup.as_ref() == Some(&values);
            while !sent.last_desire(&request.uid).is_some_and(has) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            Ok(prepared)
        }
    });
    refused
}

fn rejected(reason: &str, message: &str, passing: bool) -> rm::admit_pod_response::Verdict {
    let rejected = rm::Rejected { reason: reason.into(), message: message.into(), passing };
    rm::admit_pod_response::Verdict::Rejected(rejected)
}
