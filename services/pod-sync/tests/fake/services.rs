//! Fakes of pod-config, volume-manager and resource-manager that accept every request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::pod_config::v1 as pc;
use keelson_proto::keelson::pod_config::v1::pod_config_server::{PodConfig, PodConfigServer};
use keelson_proto::keelson::resource_manager::v1 as rm;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_proto::keelson::volume_manager::v1 as vm;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::{WatchHub, WatchItem};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::shim::{Answers, Shim};

type Answer<T> = Result<Response<T>, Status>;

fn one<T: Send + 'static>(item: T) -> Answers<T> {
    Box::pin(stream::iter([Ok(item)]))
}

fn absent<T>() -> Answer<T> {
    Err(Status::unimplemented("not faked"))
}

/// Acknowledges the end of each set.
macro_rules! acks {
    ($module:ident, $request:expr) => {
        Ok(Response::new(Box::pin($request.into_inner().filter_map(
            async |message| match message.ok()?.item? {
                $module::sync_request::Item::Complete(end) => Some(Ok(common::SyncAck { epoch: end.epoch })),
                _ => None,
            },
        )) as Answers<common::SyncAck>))
    };
}

pub fn pod_config(
    pods: WatchHub<String, pc::DesiredPod>,
    ready: watch::Receiver<Vec<String>>,
    cluster: &Arc<Mutex<FakeCluster>>,
) -> Routes {
    Routes::new(PodConfigServer::new(Source { pods, ready, cluster: Arc::clone(cluster) }))
}

pub fn volume_manager(shim: &Arc<Shim>) -> Routes {
    Routes::new(VolumeManagerServer::new(Volumes(Arc::clone(shim))))
}

pub fn resource_manager(machine: &Arc<FakeMachine>) -> Routes {
    Routes::new(ResourceManagerServer::new(Resources(Arc::clone(machine))))
}

/// The state of the fake resource-manager.
pub struct FakeMachine {
    /// Eviction orders, by UID.
    pub evictions: WatchHub<String, rm::Eviction>,
    wants: Mutex<BTreeMap<String, common::Want>>,
    desires: Mutex<BTreeMap<String, rm::PodDesire>>,
    verdict: Mutex<Option<rm::Rejected>>,
    /// UIDs of the `DeferPod` calls.
    pub deferred: Mutex<Vec<String>>,
    /// The machine has cgroup v2.
    pub cgroup_v2: std::sync::atomic::AtomicBool,
}

impl Default for FakeMachine {
    fn default() -> Self {
        Self {
            evictions: WatchHub::new(),
            wants: Mutex::default(),
            desires: Mutex::default(),
            verdict: Mutex::default(),
            deferred: Mutex::default(),
            cgroup_v2: Default::default(),
        }
    }
}

impl FakeMachine {
    /// What pod-sync has requested for a pod.
    pub fn want(&self, uid: &str) -> Option<common::Want> {
        self.wants.lock().unwrap().get(uid).copied()
    }

    /// The last message of pod-sync about a pod.
    pub fn desire(&self, uid: &str) -> Option<rm::PodDesire> {
        self.desires.lock().unwrap().get(uid).cloned()
    }

    /// Rejects every pod from now on.
    pub fn reject(&self, reason: &str, message: &str) {
        let rejected = rm::Rejected { reason: reason.into(), message: message.into(), passing: false };
        *self.verdict.lock().unwrap() = Some(rejected);
    }

    /// Rejects every pod temporarily, until [`FakeMachine::admit`].
    pub fn reject_temporarily(&self, reason: &str, message: &str) {
        let rejected = rm::Rejected { reason: reason.into(), message: message.into(), passing: true };
        *self.verdict.lock().unwrap() = Some(rejected);
    }

    /// Admits every pod from now on.
    pub fn admit(&self) {
        *self.verdict.lock().unwrap() = None;
    }
}

struct Source {
    pods: WatchHub<String, pc::DesiredPod>,
    /// The sources that have reported.
    ready: watch::Receiver<Vec<String>>,
    cluster: Arc<Mutex<FakeCluster>>,
}

/// The objects in the cluster.
#[derive(Default)]
pub struct FakeCluster {
    /// The services have been read.
    pub services_read: bool,
    /// Handlers by class.
    pub classes: BTreeMap<String, String>,
    /// Fields of the Node besides its name.
    pub node: BTreeMap<&'static str, serde_json::Value>,
    /// The requests for service variables.
    pub asked: Vec<pc::GetServiceEnvRequest>,
}

/// The messages about sources that have reported.
fn source_reports(sources: &[String]) -> Vec<Result<pc::WatchPodsResponse, Status>> {
    use pc::watch_pods_response::Item;
    let configured = super::SOURCES.map(String::from).to_vec();
    let one = |source: &String| pc::SourceReady { source: source.clone(), configured: configured.clone() };
    let item = |ready| Ok(pc::WatchPodsResponse { item: Some(Item::SourceReady(ready)) });
    sources.iter().map(one).map(item).collect()
}

#[tonic::async_trait]
impl PodConfig for Source {
    type WatchPodsStream = Answers<pc::WatchPodsResponse>;
    type WatchNodeStream = Answers<pc::WatchNodeResponse>;
    type WatchObjectsStream = Answers<pc::WatchObjectsResponse>;

    async fn watch_pods(&self, _: Request<pc::WatchPodsRequest>) -> Answer<Self::WatchPodsStream> {
        use pc::watch_pods_response::Item;
        let answer = |item| Ok(pc::WatchPodsResponse { item: Some(item) });
        let synced = move || answer(Item::Synced(common::Synced {}));
        let pods = self.pods.subscribe().into_stream(move |item| match item {
            WatchItem::Set(_, pod) => answer(Item::Pod(pod)),
            WatchItem::Gone(uid) => answer(Item::GoneUid(uid)),
            WatchItem::Synced => synced(),
        });
        let mut ready = self.ready.clone();
        let now = source_reports(&ready.borrow_and_update());
        let later = stream::unfold(ready, move |mut ready| async move {
            ready.changed().await.ok()?;
            let mut items = source_reports(&ready.borrow_and_update());
            items.push(synced());
            Some((stream::iter(items), ready))
        });
        Ok(Response::new(Box::pin(stream::iter(now).chain(stream::select(pods, later.flatten())))))
    }

    async fn watch_node(&self, _: Request<pc::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        let mut node = serde_json::json!({"metadata": {"name": "n1", "labels": {"disk": "ssd"}}});
        for (part, value) in &self.cluster.lock().unwrap().node {
            node[part] = value.clone();
        }
        let response = pc::WatchNodeResponse { node_json: node.to_string().into_bytes(), registered: false };
        Ok(Response::new(Box::pin(one(response).chain(stream::pending()))))
    }

    async fn watch_objects(
        &self,
        _: Request<Streaming<pc::WatchObjectsRequest>>,
    ) -> Answer<Self::WatchObjectsStream> {
        absent()
    }

    async fn get_object(&self, request: Request<pc::GetObjectRequest>) -> Answer<pc::GetObjectResponse> {
        let request = request.into_inner();
        if request.kind != "RuntimeClass" {
            return absent();
        }
        match self.cluster.lock().unwrap().classes.get(&request.name) {
            Some(handler) => {
                let object = serde_json::json!({"kind": "RuntimeClass", "handler": handler});
                Ok(Response::new(pc::GetObjectResponse { object_json: object.to_string().into_bytes() }))
            }
            None => Err(Status::not_found("there is no such class")),
        }
    }

    async fn get_service_env(
        &self,
        request: Request<pc::GetServiceEnvRequest>,
    ) -> Answer<pc::GetServiceEnvResponse> {
        let request = request.into_inner();
        let mut cluster = self.cluster.lock().unwrap();
        cluster.asked.push(request.clone());
        if !cluster.services_read && !request.as_known {
            return Err(Status::unavailable("services have not yet been read at least once"));
        }
        let variables = [("DB_SERVICE_HOST".to_owned(), "10.0.0.3".to_owned())].into();
        Ok(Response::new(pc::GetServiceEnvResponse { variables }))
    }

    async fn mutate(&self, _: Request<pc::MutateRequest>) -> Answer<pc::MutateResponse> {
        absent()
    }

    async fn create_token(&self, _: Request<pc::CreateTokenRequest>) -> Answer<pc::CreateTokenResponse> {
        absent()
    }

    async fn apply_manifest(
        &self,
        _: Request<pc::ApplyManifestRequest>,
    ) -> Answer<pc::ApplyManifestResponse> {
        absent()
    }

    async fn delete_manifest(
        &self,
        _: Request<pc::DeleteManifestRequest>,
    ) -> Answer<pc::DeleteManifestResponse> {
        absent()
    }

    async fn review_token(&self, _: Request<pc::ReviewTokenRequest>) -> Answer<pc::ReviewTokenResponse> {
        absent()
    }

    async fn review_access(&self, _: Request<pc::ReviewAccessRequest>) -> Answer<pc::ReviewAccessResponse> {
        absent()
    }

    async fn list_sources(&self, _: Request<pc::ListSourcesRequest>) -> Answer<pc::ListSourcesResponse> {
        absent()
    }
}

/// Like the real one, unmounts volumes only when the pod has no ready sandbox.
struct Volumes(Arc<Shim>);

struct Resources(Arc<FakeMachine>);

#[tonic::async_trait]
impl VolumeManager for Volumes {
    type SyncStream = Answers<common::SyncAck>;
    type MountPodStream = Answers<vm::MountPodResponse>;
    type WatchPodVolumesStream = Answers<vm::WatchPodVolumesResponse>;
    type PodVolumeStatsStream = Answers<vm::PodVolumeStatsResponse>;

    async fn prepare_container(
        &self,
        request: Request<vm::PrepareContainerRequest>,
    ) -> Answer<vm::PrepareContainerResponse> {
        use vm::file_key_value::Found;
        let request = request.into_inner();
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
        Ok(Response::new(vm::PrepareContainerResponse {
            subpaths: request.subpaths.iter().map(part).collect(),
            values: request.keys.iter().map(value).collect(),
        }))
    }

    async fn pod_volume_stats(
        &self,
        _: Request<vm::PodVolumeStatsRequest>,
    ) -> Answer<Self::PodVolumeStatsStream> {
        absent()
    }

    async fn sync(&self, request: Request<Streaming<vm::SyncRequest>>) -> Answer<Self::SyncStream> {
        acks!(vm, request)
    }

    async fn mount_pod(&self, _: Request<vm::MountPodRequest>) -> Answer<Self::MountPodStream> {
        let host_path = "/volumes/data".to_owned();
        let data = vm::VolumeMount { name: "data".into(), host_path, read_only: false };
        let ready = vm::MountsReady { volumes: vec![data], ..vm::MountsReady::default() };
        let ready = vm::mount_pod_response::Item::Ready(ready);
        Ok(Response::new(one(vm::MountPodResponse { item: Some(ready) })))
    }

    async fn unmount_pod(&self, request: Request<vm::UnmountPodRequest>) -> Answer<vm::UnmountPodResponse> {
        let uid = request.into_inner().uid;
        self.0.create_late_sandbox(&uid);
        while self.0.pod(&uid).is_some_and(|pod| pod.sandboxes.iter().any(|sandbox| sandbox.ready)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(Response::new(vm::UnmountPodResponse {}))
    }

    async fn watch_pod_volumes(
        &self,
        _: Request<vm::WatchPodVolumesRequest>,
    ) -> Answer<Self::WatchPodVolumesStream> {
        absent()
    }
}

#[tonic::async_trait]
impl ResourceManager for Resources {
    type SyncStream = Answers<common::SyncAck>;
    type WatchMachineStream = Answers<rm::Machine>;
    type PodStatsStream = Answers<rm::PodStatsResponse>;
    type CgroupStatsStream = Answers<rm::CgroupStatsResponse>;
    type WatchEvictionsStream = Answers<rm::WatchEvictionsResponse>;

    async fn node_stats(&self, _: Request<rm::NodeStatsRequest>) -> Answer<rm::NodeStatsResponse> {
        absent()
    }

    async fn cgroup_stats(&self, _: Request<rm::CgroupStatsRequest>) -> Answer<Self::CgroupStatsStream> {
        absent()
    }

    async fn pod_stats(&self, _: Request<rm::PodStatsRequest>) -> Answer<Self::PodStatsStream> {
        absent()
    }

    async fn sync(&self, request: Request<Streaming<rm::SyncRequest>>) -> Answer<Self::SyncStream> {
        use rm::sync_request::Item;
        let room = Arc::clone(&self.0);
        Ok(Response::new(Box::pin(request.into_inner().filter_map(move |message| {
            let mut wants = room.wants.lock().unwrap();
            let ack = match message.ok().and_then(|m| m.item) {
                Some(Item::Pod(desire)) => {
                    let want = desire.want();
                    let uid = desire.pod.as_ref().unwrap().uid.clone();
                    room.desires.lock().unwrap().insert(uid, desire.clone());
                    wants.insert(desire.pod.unwrap().uid, want);
                    None
                }
                Some(Item::DroppedUid(uid)) => {
                    wants.remove(&uid);
                    None
                }
                Some(Item::Complete(end)) => Some(Ok(common::SyncAck { epoch: end.epoch })),
                None => None,
            };
            std::future::ready(ack)
        }))))
    }

    async fn admit_pod(&self, _: Request<rm::AdmitPodRequest>) -> Answer<rm::AdmitPodResponse> {
        use rm::admit_pod_response::Verdict;
        let rejected = self.0.verdict.lock().unwrap().clone();
        let verdict = Some(rejected.map_or(Verdict::Admitted(rm::Admitted {}), Verdict::Rejected));
        Ok(Response::new(rm::AdmitPodResponse { verdict }))
    }

    async fn defer_pod(&self, request: Request<rm::DeferPodRequest>) -> Answer<rm::DeferPodResponse> {
        self.0.deferred.lock().unwrap().push(request.into_inner().uid);
        Ok(Response::new(rm::DeferPodResponse {}))
    }

    async fn prepare_pod(&self, _: Request<rm::PreparePodRequest>) -> Answer<rm::PreparePodResponse> {
        Ok(Response::new(rm::PreparePodResponse { cgroup_parent: "/kubepods/x".into() }))
    }

    async fn release_pod(&self, _: Request<rm::ReleasePodRequest>) -> Answer<rm::ReleasePodResponse> {
        Ok(Response::new(rm::ReleasePodResponse {}))
    }

    async fn watch_evictions(
        &self,
        _: Request<rm::WatchEvictionsRequest>,
    ) -> Answer<Self::WatchEvictionsStream> {
        use rm::watch_evictions_response::Item;
        let orders = self.0.evictions.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set(_, eviction) => Item::Eviction(eviction),
                WatchItem::Gone(uid) => Item::GoneUid(uid),
                WatchItem::Synced => Item::Synced(common::Synced {}),
            };
            Ok(rm::WatchEvictionsResponse { item: Some(item) })
        });
        Ok(Response::new(Box::pin(orders)))
    }

    async fn watch_machine(&self, _: Request<rm::WatchMachineRequest>) -> Answer<Self::WatchMachineStream> {
        let capacity = [("cpu", 2000), ("memory", 1 << 30), ("hugepages-2Mi", 64 << 20)];
        let v2 = self.0.cgroup_v2.load(std::sync::atomic::Ordering::Relaxed);
        let machine = rm::Machine {
            capacity: capacity.map(|(name, amount)| (name.to_owned(), amount)).into(),
            cgroup_version: if v2 { "v2" } else { "v1" }.into(),
            swap_bytes: 1 << 29,
            swap_accounting: true,
            ..rm::Machine::default()
        };
        Ok(Response::new(Box::pin(one(machine).chain(stream::pending()))))
    }
}
