//! The answers of each service.

use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1 as admin;
use keelson_proto::keelson::common::v1::Synced;
use keelson_proto::keelson::events::v1::events_server::EventsServer;
use keelson_proto::keelson::node_status::v1 as node_status;
use keelson_proto::keelson::pod_config::v1 as pod_config;
use keelson_proto::keelson::pod_sync::v1 as pod_sync;
use keelson_proto::keelson::runtime::v1 as runtime;
use keelson_proto::keelson::supervisor::v1 as supervisor;
use keelson_proto::keelson::volume_manager::v1 as volumes;
use keelson_service_kit::EventRing;
use keelson_service_kit::status::error;
use keelson_testkit::fakes::{
    FakeAdmin, FakeNodeStatus, FakePodConfig, FakePodSync, FakeResourceManager, FakeRuntime, FakeSupervisor,
    FakeVolumeManager, StreamAnswer,
};
use tonic::Code;
use tonic::service::Routes;

use super::{World, shell};

/// The fake services of one agent.
pub struct Services {
    admin: FakeAdmin,
    pub supervisor: FakeSupervisor,
    pub pod_config: FakePodConfig,
    pub pod_sync: FakePodSync,
    runtime: FakeRuntime,
    node_status: FakeNodeStatus,
    /// Each test sets its answers.
    pub resource_manager: FakeResourceManager,
    pub volume_manager: FakeVolumeManager,
}

impl Services {
    /// The services, which answer from `world`. They have no answer for a call that the command does not use.
    pub fn answer_from(world: &Arc<World>) -> Self {
        Self {
            admin: admin(world),
            supervisor: supervisor(world),
            pod_config: pod_config(world),
            pod_sync: pod_sync(world),
            runtime: runtime(world),
            node_status: node_status(world),
            resource_manager: FakeResourceManager::default(),
            volume_manager: volume_manager(world),
        }
    }

    /// What `service` serves.
    pub fn routes(&self, service: ServiceName, world: &World) -> Routes {
        // Only pod-sync has events.
        let events =
            if service == ServiceName::PodSync { world.events.clone() } else { EventRing::default() };
        let routes = Routes::new(self.admin.server()).add_service(EventsServer::new(events));
        match service {
            ServiceName::Init => routes.add_service(self.supervisor.server()),
            ServiceName::PodConfig => routes.add_service(self.pod_config.server()),
            ServiceName::PodSync => routes.add_service(self.pod_sync.server()),
            ServiceName::RuntimeShim => routes.add_service(self.runtime.server()),
            ServiceName::NodeStatus => routes.add_service(self.node_status.server()),
            ServiceName::VolumeManager => routes.add_service(self.volume_manager.server()),
            ServiceName::ResourceManager => routes.add_service(self.resource_manager.server()),
            ServiceName::NodeApi => routes,
        }
    }
}

fn admin(world: &World) -> FakeAdmin {
    let fake = FakeAdmin::default();
    fake.get_progress.answer(world.progress.clone());
    fake.get_usage.answer(world.usage);
    fake.list_spans.answer(admin::ListSpansResponse::default());
    fake
}

fn supervisor(world: &Arc<World>) -> FakeSupervisor {
    use supervisor::watch_services_response::Item;
    let fake = FakeSupervisor::default();
    let (answering, restarts) = (Arc::clone(world), fake.restart_service.requests().clone());
    fake.list_services.answer_with(move |_| {
        let mut services = answering.services.clone();
        for service in &mut services {
            let restarts = restarts.all().iter().filter(|restart| restart.name == service.name).count();
            // Each restart changes the process id.
            service.pid += u32::try_from(restarts).unwrap();
        }
        Ok(supervisor::ListServicesResponse { services })
    });
    let items = world.services.iter().cloned().map(Item::Service).chain([Item::Synced(true)]);
    fake.watch_services.replay(items.map(|item| supervisor::WatchServicesResponse { item: Some(item) }));
    let answering = Arc::clone(world);
    fake.restart_service.answer_with(move |request| {
        answering.calls.record(format!("restart {}", request.name));
        Ok(supervisor::RestartServiceResponse {})
    });
    fake
}

fn pod_sync(world: &Arc<World>) -> FakePodSync {
    use pod_sync::watch_pods_response::Item;
    let fake = FakePodSync::default();
    fake.list_pods.list(world.pods.clone());
    let mut items: Vec<Item> = world.pods.iter().cloned().map(Item::Pod).collect();
    items.push(Item::Synced(Synced {}));
    if !world.keeps_deleted {
        items.extend(world.pods.iter().map(|pod| Item::GoneUid(pod.uid.clone())));
    }
    fake.watch_pods.replay(items.into_iter().map(|item| pod_sync::WatchPodsResponse { item: Some(item) }));
    let answering = Arc::clone(world);
    fake.explain_pod.answer_with(move |request| {
        answering.calls.record(format!("explain {}", request.uid));
        Ok(answering.explanation.clone())
    });
    let answering = Arc::clone(world);
    fake.evict_pod.answer_with(move |request| {
        let (uid, grace, message) = (request.uid, request.grace_period_seconds, request.message);
        answering.calls.record(format!("evict {uid} {grace:?} {message:?}"));
        Ok(pod_sync::EvictPodResponse {})
    });
    let answering = Arc::clone(world);
    fake.retry_pod.answer_with(move |request| {
        answering.calls.record(format!("retry {}/{}", request.namespace, request.name));
        Ok(pod_sync::RetryPodResponse {})
    });
    fake
}

fn pod_config(world: &Arc<World>) -> FakePodConfig {
    let fake = FakePodConfig::default();
    let answering = Arc::clone(world);
    fake.apply_manifest.answer_with(move |request| {
        let text = String::from_utf8_lossy(&request.manifest).into_owned();
        let hint = &request.name_hint;
        answering.calls.record(format!("apply {hint}: {text}"));
        if text.contains("broken") {
            let message =
                format!("{hint}:1: metadata.name: Required value\n{hint}:4: spec.containers: Required value");
            return Err(error(Code::InvalidArgument, "MANIFEST", message));
        }
        let pod = pod_config::AppliedPod {
            uid: "u1".into(),
            namespace: "default".into(),
            name: "web-edge".into(),
            result: "created".into(),
            warnings: Vec::new(),
        };
        Ok(pod_config::ApplyManifestResponse { pods: vec![pod] })
    });
    let answering = Arc::clone(world);
    fake.delete_manifest.answer_with(move |request| {
        answering.calls.record(format!("delete {} {}/{}", request.kind, request.namespace, request.name));
        if request.name.starts_with("static") {
            let message = "default/static-edge comes from /m/static.yaml; remove that file";
            return Err(error(Code::FailedPrecondition, "NOT_STORED", message));
        }
        if request.name.starts_with("absent") {
            return Err(error(Code::NotFound, "NOT_STORED", format!("no pod {}", request.name)));
        }
        Ok(pod_config::DeleteManifestResponse { uid: "u1".into() })
    });
    if let Some(objects) = world.volume_objects.clone() {
        fake.list_volume_objects.answer_with(move |request| {
            let wanted = objects.iter().filter(|object| object["kind"] == request.kind.as_str());
            let answers = wanted.map(|object| pod_config::ListVolumeObjectsResponse {
                object_json: object.to_string().into(),
            });
            Ok(StreamAnswer::items(answers.collect::<Vec<_>>()))
        });
        let objects = world.volume_objects.clone().unwrap_or_default();
        fake.watch_volume_objects.answer_with(move |request| {
            let wanted = objects.iter().filter(|object| object["kind"] == request.kind.as_str());
            let items = wanted.map(volume_object_is).chain([volume_objects_synced()]);
            Ok(StreamAnswer::items(items.collect::<Vec<_>>()).then_open())
        });
    }
    fake.list_sources.answer(pod_config::ListSourcesResponse { sources: world.sources.clone() });
    fake
}

/// A message of `WatchVolumeObjects`: the object is new or has changed.
pub fn volume_object_is(object: &serde_json::Value) -> pod_config::WatchVolumeObjectsResponse {
    let item = pod_config::watch_volume_objects_response::Item::ObjectJson(object.to_string().into());
    pod_config::WatchVolumeObjectsResponse { item: Some(item) }
}

/// A message of `WatchVolumeObjects`: the replay is complete.
pub fn volume_objects_synced() -> pod_config::WatchVolumeObjectsResponse {
    let item = pod_config::watch_volume_objects_response::Item::Synced(Synced {});
    pod_config::WatchVolumeObjectsResponse { item: Some(item) }
}

fn node_status(world: &World) -> FakeNodeStatus {
    let fake = FakeNodeStatus::default();
    let control_plane = "none".into();
    fake.get_report_state.answer(node_status::GetReportStateResponse { control_plane, ..Default::default() });
    fake.get_node.answer(node_status::GetNodeResponse { node_json: world.node.to_string().into() });
    fake
}

fn runtime(world: &Arc<World>) -> FakeRuntime {
    let fake = FakeRuntime::default();
    let answering = Arc::clone(world);
    fake.read_logs.answer_with(move |r| {
        answering.calls.record(format!(
            "logs {}/{} follow={} previous={} timestamps={} tail={:?} bytes={:?} since={}",
            r.pod_uid,
            r.container,
            r.follow,
            r.previous,
            r.timestamps,
            r.tail_lines,
            r.limit_bytes,
            r.since_unix_nanos != 0
        ));
        let chunks = answering.log.iter().map(|text| runtime::ReadLogsResponse { data: (*text).into() });
        Ok(StreamAnswer::items(chunks))
    });
    fake.list_images.answer(runtime::ListImagesResponse { images: world.images.clone() });
    let calls = world.calls.clone();
    fake.exec.handle(move |conversation| shell::run(calls.clone(), conversation));
    fake
}

fn volume_manager(world: &Arc<World>) -> FakeVolumeManager {
    use volumes::watch_pod_volumes_response::Item;
    let fake = FakeVolumeManager::default();
    let items = world.volumes.iter().cloned().map(Item::Pod).chain([Item::Synced(Synced {})]);
    fake.watch_pod_volumes.replay(items.map(|item| volumes::WatchPodVolumesResponse { item: Some(item) }));
    fake.list_orphans.answer(volumes::ListOrphansResponse { pods: world.orphans.clone() });
    let answering = Arc::clone(world);
    fake.clean_orphan.answer_with(move |request| {
        let volumes::CleanOrphanRequest { uid, dry_run } = request;
        answering.calls.record(format!("clean {uid} dry_run={dry_run}"));
        let orphan = answering.orphans.iter().find(|orphan| orphan.uid == uid);
        match orphan {
            Some(orphan) if orphan.uid.starts_with("gone") => {
                Err(error(Code::NotFound, "NO_ORPHAN", format!("the pod {uid} has no directory")))
            }
            Some(orphan) => {
                let is_mount =
                    |path: &volumes::OrphanedPath| path.kind() == volumes::orphaned_path::Kind::Mount;
                let (left, removed) = orphan.paths.iter().cloned().partition(is_mount);
                Ok(volumes::CleanOrphanResponse { removed, left })
            }
            None if uid == "u1" => {
                let message = "the pod u1 is not orphaned: the source file names it";
                Err(error(Code::FailedPrecondition, "NOT_AN_ORPHAN", message))
            }
            None => Err(error(Code::NotFound, "NO_ORPHAN", format!("the pod {uid} has no directory"))),
        }
    });
    fake
}
