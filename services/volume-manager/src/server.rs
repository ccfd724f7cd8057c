//! The gRPC API, and the construction of the service.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use keelson_config::{Config, ControlPlane, ServiceName};
use keelson_kube_model::Quantity;
use keelson_pod_reconciler::{
    Acks, DESIRED_TIMEOUT, ManagerHandle, QUEUE, Runtime, View as _, not_desired_error, wait_until,
};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{Context, ObjectRef, WatchHub, WatchItem, answer_by};
use keelson_volume_manager_core::desire::{PodDesire, Want};
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::plan::ActualState;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::live_objects::LiveObjects;
use crate::manager::Manager;
use crate::metrics::{OperationMetrics, OrphanMetrics};
use crate::mounter::Mounter;
use crate::mounts::MountError;
use crate::node_facts::watch_node;
use crate::objects::ObjectCache;
use crate::orphans::{clean, left_of};
use crate::plugin_set;
use crate::prepare::{ContainerRequest, PrepareError, PreparedContainer, prepare};
use crate::resolver::Resolver;
use crate::selinux;
use crate::shared_volumes::{Environment, SharedVolumes, SharedVolumesTask, find_volumes};
use crate::stats::Stats;
use crate::store::Store;
use crate::tokens::TokenClient;
use crate::totals::VolumeTotals;
use crate::view::{Phase, PodView, PodVolumeStatus};
use crate::wire::{self, path_component};
use crate::worker::Env;

/// How long the folder of an orphaned pod may take to be read or removed.
const ORPHAN_DEADLINE: Duration = Duration::from_secs(20);

/// Lists the pod folders on disk and builds the service.
///
/// # Errors
/// The root folder is not usable.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let config = Arc::clone(&ctx.config);
    let (store, found) = tokio::task::spawn_blocking(move || open_store(&config)).await??;
    let store = Arc::new(store);
    let store_to_share = Arc::clone(&store);
    let shared = tokio::task::spawn_blocking(move || store_to_share.share()).await?;
    report_root_sharing(&ctx, shared);

    let (commands, receiver) = mpsc::channel(QUEUE);
    let hub = WatchHub::new();
    let objects = ObjectCache::default();
    let watch =
        objects.clone().follow(ctx.peer(ServiceName::PodConfig), ctx.progress.clone(), ctx.shutdown.clone());
    ctx.spawn("objects", watch);
    let operations = OperationMetrics::register(&ctx.metrics);
    let tokens = TokenClient::new(ctx.peer(ServiceName::PodConfig));
    let (found, resolver) = start_plugins(&ctx, &store, found, &operations, &tokens).await;
    let env = Arc::new(Env {
        store,
        runtime: Runtime::new(
            ctx.peer(ServiceName::RuntimeShim),
            ctx.progress.clone(),
            "volumes stay mounted",
        ),
        objects,
        tokens,
        hub: hub.clone(),
        events: ctx.events.clone(),
        orphans: OrphanMetrics::register(&ctx.metrics),
        operations,
        resolver,
        totals: VolumeTotals::register(&ctx.metrics),
        commands: commands.clone(),
        is_set_complete: AtomicBool::new(false),
    });
    let stats = Stats::new(&ctx.metrics);
    let period = Duration::from_millis(ctx.config.volumes.stats_period_ms);
    if !period.is_zero() {
        let handle = ctx.progress.register("volume statistics");
        ctx.spawn(
            "volume statistics",
            stats.clone().follow(hub.clone(), period, ctx.shutdown.clone(), handle),
        );
    }
    tracing::info!(pods = found.len(), "listed the pod folders");
    let manager = Manager::new(Arc::clone(&env), found);
    let manager_handle = ManagerHandle::new(&ctx, commands);
    let handle = ctx.progress.register("pods");
    ctx.spawn("pods", manager.run(receiver, ctx.shutdown.clone(), handle));
    let service = Service { manager: manager_handle, hub, env, stats };
    Ok(Routes::new(VolumeManagerServer::new(service)))
}

/// Starts the task that has the volumes of plugins, with those that are on disk, and returns the rest of the pods' folders.
async fn start_plugins(
    ctx: &Context,
    store: &Store,
    mut found: Vec<(String, ActualState)>,
    metrics: &OperationMetrics,
    tokens: &TokenClient,
) -> (Vec<(String, ActualState)>, Resolver) {
    let config = &ctx.config;
    let live = LiveObjects::new(ctx.peer(ServiceName::PodConfig));
    let mounter = Mounter::default();
    let plugins = plugin_set::start(ctx, &mounter, &live, tokens);
    let folders = store.take_plugin_folders(&mut found, &plugins);
    let (shared, inbox) = SharedVolumes::new();
    let (facts, node) = watch::channel(None);
    let watch =
        watch_node(facts, ctx.peer(ServiceName::PodConfig), ctx.progress.clone(), ctx.shutdown.clone());
    ctx.spawn("node", watch);
    let has_api_server = matches!(config.control_plane, ControlPlane::Kubernetes(_));
    let environment = Environment {
        node_name: config.node_name.clone(),
        root: config.paths.root_dir.clone(),
        mounter,
        live: live.clone(),
        events: ctx.events.clone(),
        metrics: metrics.clone(),
        // Without an API server there is no controller that attaches.
        has_attach_controller: config.node_status.controller_attach_detach && has_api_server,
        has_api_server,
    };
    let on_disk = find_volumes(&plugins, folders).await;
    let task = SharedVolumesTask::new(environment, inbox, node, on_disk);
    let handle = ctx.progress.register("volumes of plugins");
    ctx.spawn("volumes of plugins", task.run(ctx.shutdown.clone(), handle));
    (found, Resolver { live, plugins, shared, events: ctx.events.clone() })
}

/// Reports in a condition, and on error in an event, whether mounts below the root folder propagate. The service works
/// without that, too.
fn report_root_sharing(ctx: &Context, shared: Result<(), MountError>) {
    let shared = shared.map_err(|error| chain(&error));
    if let Err(why) = &shared {
        let node = ObjectRef::node(&ctx.config.node_name);
        ctx.events.warning(node, "KubeletSetupFailed", why.clone());
    }
    ctx.progress.condition("root-mount", shared);
}

type FoundPods = (Store, Vec<(String, keelson_volume_manager_core::plan::ActualState)>);

fn open_store(config: &Config) -> anyhow::Result<FoundPods> {
    let root = &config.paths.root_dir;
    let store = Store::open(root, &config.paths.run_dir, allocatable_memory(config))
        .with_context(|| format!("the root folder {} (paths.rootDir) is not usable", root.display()))?;
    selinux::label_folders(root, keelson_service_kit::selinux_is_enabled(), selinux::set_label);
    let found = store.scan().context("cannot list the pod folders")?;
    Ok((store, found))
}

/// Memory in bytes that pods may use: the node's memory minus what the configuration reserves.
fn allocatable_memory(config: &Config) -> u64 {
    let info = rustix::system::sysinfo();
    let total = u64::from(info.mem_unit).saturating_mul(info.totalram);
    let reserved = config.resources.reserved.get("memory").and_then(|text| Quantity::parse(text).ok());
    total.saturating_sub(reserved.map_or(0, |q| u64::try_from(q.value()).unwrap_or(0)))
}

struct Service {
    manager: ManagerHandle<PodDesire, PodView>,
    hub: WatchHub<String, PodVolumeStatus>,
    env: Arc<Env>,
    stats: Stats,
}

impl Service {
    /// Prepares what a container needs. The pod's volumes are not torn down meanwhile. A call that hangs is abandoned
    /// and blocks only its own pod.
    async fn prepare(
        &self,
        request: ContainerRequest,
        deadline: Instant,
    ) -> Result<PreparedContainer, Status> {
        let uid = request.uid.clone();
        let not_mounted = || {
            let text = format!("the volumes of pod {uid} are not mounted");
            error(Code::Unavailable, "NOT_MOUNTED", text)
        };
        let mut view = self.manager.watch(&uid).await?;
        if !wait_until(&mut view, deadline, PodView::is_mounted).await {
            return Err(not_mounted());
        }
        let folder = Arc::clone(&view.borrow().folder);
        let deadline_exceeded =
            |what: &str| error(Code::DeadlineExceeded, "NOT_PREPARED", format!("pod {uid}: {what}"));
        let Ok(mut folder) = timeout_at(deadline, folder.lock_owned()).await else {
            return Err(deadline_exceeded("an earlier preparation for a container has not finished"));
        };
        // Checked under the lock: before a worker locks it to tear volumes down, the view shows that they are not desired.
        let mounts = {
            let view = view.borrow();
            if !view.is_mounted() {
                return Err(not_mounted());
            }
            view.status.mounts.clone()
        };
        folder.has_subpaths |= !request.subpaths.is_empty();
        let pod_folder = self.env.store.pod_folder(&uid);
        let work = tokio::task::spawn_blocking(move || {
            let prepared = prepare(&pod_folder, &mounts, &request);
            drop(folder);
            prepared
        });
        let done = timeout_at(deadline, work).await;
        let done = done.map_err(|_| deadline_exceeded("a volume does not answer"))?;
        let done = done.map_err(|e| error(Code::Internal, "NOT_PREPARED", format!("pod {uid}: {e}")))?;
        done.map_err(|e| prepare_error_status(&e))
    }
}

impl Service {
    /// The UIDs of the pods that have a folder, sorted.
    async fn pod_uids(&self) -> Result<Vec<String>, Status> {
        let store = Arc::clone(&self.env.store);
        let found = blocking("pods".to_owned(), move || store.scan()).await?;
        let mut uids: Vec<String> = found.into_iter().map(|(uid, _)| uid).collect();
        uids.sort();
        Ok(uids)
    }

    /// Why an orphaned pod is still there; `None` for a pod that a source names, or may name.
    async fn orphan_message(&self, uid: &str) -> Result<Option<String>, Status> {
        if !self.env.is_set_complete.load(Ordering::Relaxed) {
            let text = "pod-sync has not sent the pods of all sources yet; a pod may be named by one of them";
            return Err(error(Code::Unavailable, "SET_NOT_COMPLETE", text));
        }
        let view = self.manager.watch(uid).await?;
        let view = view.borrow();
        let is_orphan = !matches!(view.desired(), Some((_, Want::Run | Want::Stop | Want::Unmount)));
        Ok(is_orphan.then(|| view.status.message.clone()))
    }
}

/// Runs work that may hang, on a thread of its own. `what` names it in the error.
async fn blocking<T: Send + 'static, E: std::error::Error + Send + 'static>(
    what: String,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Status> {
    let work = timeout(ORPHAN_DEADLINE, tokio::task::spawn_blocking(work)).await;
    let text = match work {
        Ok(Ok(Ok(done))) => return Ok(done),
        Ok(Ok(Err(cause))) => chain(&cause),
        Ok(Err(cause)) => cause.to_string(),
        Err(_) => "a file system does not answer".to_owned(),
    };
    Err(error(Code::Unavailable, "ORPHANS_NOT_READ", format!("{what}: {text}")))
}

fn prepare_error_status(cause: &PrepareError) -> Status {
    let reason = match cause {
        PrepareError::VolumeNotMounted { .. } => "VOLUME_NOT_MOUNTED",
        PrepareError::SubPath { .. } | PrepareError::BlockDevice { .. } => "SUBPATH_NOT_USABLE",
    };
    error(Code::FailedPrecondition, reason, chain(cause))
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn invalid_argument(cause: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", cause.to_string())
}

#[tonic::async_trait]
impl VolumeManager for Service {
    type SyncStream = Acks;
    type MountPodStream = ResponseStream<pb::MountPodResponse>;
    type WatchPodVolumesStream = ResponseStream<pb::WatchPodVolumesResponse>;
    type PodVolumeStatsStream = ResponseStream<pb::PodVolumeStatsResponse>;
    type WatchVolumesInUseStream = ResponseStream<pb::WatchVolumesInUseResponse>;

    async fn watch_volumes_in_use(
        &self,
        _: Request<pb::WatchVolumesInUseRequest>,
    ) -> Result<Response<Self::WatchVolumesInUseStream>, Status> {
        let in_use = WatchStream::new(self.env.resolver.shared.in_use());
        let message = |names: Option<Vec<VolumeName>>| {
            let names = names?.iter().map(|name| name.as_str().to_owned()).collect();
            Some(Ok(pb::WatchVolumesInUseResponse { names }))
        };
        let stream = in_use.filter_map(move |names| std::future::ready(message(names)));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn list_orphans(
        &self,
        _: Request<pb::ListOrphansRequest>,
    ) -> Result<Response<pb::ListOrphansResponse>, Status> {
        let mut pods = Vec::new();
        for uid in self.pod_uids().await? {
            if let Some(message) = self.orphan_message(&uid).await? {
                let path = self.env.store.pod_folder(&uid);
                let left = blocking(uid.clone(), {
                    let path = path.clone();
                    move || left_of(&path)
                })
                .await?;
                let paths = wire::orphaned_paths(&path, left);
                pods.push(pb::OrphanedPod { uid, path: path.display().to_string(), paths, message });
            }
        }
        Ok(Response::new(pb::ListOrphansResponse { pods }))
    }

    async fn clean_orphan(
        &self,
        request: Request<pb::CleanOrphanRequest>,
    ) -> Result<Response<pb::CleanOrphanResponse>, Status> {
        let pb::CleanOrphanRequest { uid, dry_run } = request.into_inner();
        let uid = path_component("uid", &uid).map_err(|cause| invalid_argument(&cause))?;
        if !self.pod_uids().await?.contains(&uid) {
            let text = format!("there is no folder of a pod with the UID {uid}");
            return Err(error(Code::NotFound, "NO_ORPHAN", text));
        }
        let not_orphan = |why: &str| {
            error(Code::FailedPrecondition, "NOT_AN_ORPHAN", format!("pod {uid} is not an orphan: {why}"))
        };
        if self.orphan_message(&uid).await?.is_none() {
            return Err(not_orphan("a source of pods names it; delete the pod instead"));
        }
        self.env.runtime.nothing_runs(&uid).await.map_err(|why| not_orphan(&why))?;
        let view = self.manager.watch(&uid).await?;
        let folder = Arc::clone(&view.borrow().folder);
        let Ok(_folder) = timeout(ORPHAN_DEADLINE, folder.lock_owned()).await else {
            return Err(not_orphan("its folder is being worked on; try again later"));
        };
        let status = self.env.resolver.shared.watch_pod(&uid).borrow().clone();
        if status.may_have_mounts && status.teardown.is_empty() {
            return Err(not_orphan("its volumes are being torn down; try again later"));
        }
        let path = self.env.store.pod_folder(&uid);
        let cleaned = blocking(uid.clone(), {
            let path = path.clone();
            move || clean(&path, dry_run)
        })
        .await?;
        for why in &cleaned.errors {
            tracing::warn!(event = "orphan_left", uid, "cannot remove all of an orphaned pod: {why}");
        }
        tracing::info!(event = "orphan_cleaned", uid, dry_run, removed = cleaned.removed.len());
        Ok(Response::new(pb::CleanOrphanResponse {
            removed: wire::orphaned_paths(&path, cleaned.removed),
            left: wire::orphaned_paths(&path, cleaned.left),
        }))
    }

    async fn prepare_container(
        &self,
        request: Request<pb::PrepareContainerRequest>,
    ) -> Result<Response<pb::PrepareContainerResponse>, Status> {
        let deadline = answer_by(request.metadata());
        let request = wire::container_request(request.into_inner()).map_err(|e| invalid_argument(&e))?;
        let prepared = self.prepare(request, deadline).await?;
        Ok(Response::new(wire::prepared_container(prepared)))
    }

    async fn pod_volume_stats(
        &self,
        request: Request<pb::PodVolumeStatsRequest>,
    ) -> Result<Response<Self::PodVolumeStatsStream>, Status> {
        let uid = request.into_inner().uid;
        let pods = self.stats.measured((!uid.is_empty()).then_some(uid.as_str()));
        let stream = tokio_stream::iter(pods.into_iter().map(|pod| Ok(wire::pod_stats(pod))));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        Ok(Response::new(self.manager.sync(request.into_inner(), wire::sync_item).await?))
    }

    async fn mount_pod(
        &self,
        request: Request<pb::MountPodRequest>,
    ) -> Result<Response<Self::MountPodStream>, Status> {
        let deadline = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = path_component("uid", &request.uid).map_err(|e| invalid_argument(&e))?;
        let view = self.manager.watch(&uid).await?;
        let pod_dir = self.env.store.pod_folder(&uid).to_string_lossy().into_owned();
        let (responses, receiver) = mpsc::channel(4);
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for volumes", uid);
        let wait = MountWait { uid, revision: request.revision, pod_dir, view, responses, deadline };
        keelson_service_kit::spawn("wait for mounts", wait.run().instrument(span));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn unmount_pod(
        &self,
        request: Request<pb::UnmountPodRequest>,
    ) -> Result<Response<pb::UnmountPodResponse>, Status> {
        let deadline = answer_by(request.metadata());
        let uid = path_component("uid", &request.into_inner().uid).map_err(|e| invalid_argument(&e))?;
        let mut view = self.manager.watch(&uid).await?;
        let done = |v: &PodView| matches!(v.status.phase, Phase::Unknown | Phase::Unmounted);
        if wait_until(&mut view, deadline, done).await {
            return Ok(Response::new(pb::UnmountPodResponse {}));
        }
        let view = view.borrow();
        let why = match (&view.named, view.status.message.as_str()) {
            (Some((_, Want::Run | Want::Stop)), _) => "pod-sync has not requested the unmount yet",
            (_, "") => "its volumes are being torn down",
            (_, message) => message,
        };
        Err(error(Code::DeadlineExceeded, "NOT_UNMOUNTED", format!("pod {uid}: {why}")))
    }

    async fn watch_pod_volumes(
        &self,
        _: Request<pb::WatchPodVolumesRequest>,
    ) -> Result<Response<Self::WatchPodVolumesStream>, Status> {
        use pb::watch_pod_volumes_response::Item;
        let stream = self.hub.subscribe().into_stream(|item| {
            let item = match item {
                WatchItem::Set(uid, status) => Item::Pod(wire::pod_volumes(uid, status)),
                WatchItem::Gone(uid) => Item::GoneUid(uid),
                WatchItem::Synced => Item::Synced(common::Synced {}),
            };
            Ok(pb::WatchPodVolumesResponse { item: Some(item) })
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// One `MountPod` call.
struct MountWait {
    uid: String,
    revision: u64,
    pod_dir: String,
    view: watch::Receiver<PodView>,
    /// The caller's deadline. For a stream, tonic only applies it to the first headers, so this service enforces it.
    deadline: Instant,
    responses: mpsc::Sender<Result<pb::MountPodResponse, Status>>,
}

/// The `owner` of a wait that the user can end.
const OWNER_USER: &str = "you";

fn waiting_for(what: &str) -> pb::MountProgress {
    pb::MountProgress { waiting_for: what.to_owned(), next_try_unix_nanos: 0, owner: String::new() }
}

/// The state of a `MountPod` call.
enum MountState {
    Waiting(pb::MountProgress),
    NotNamed,
    Ready(pb::MountsReady),
    Failed(Status),
}

impl MountWait {
    async fn run(mut self) {
        let mut last = pb::MountProgress::default();
        let mut not_named_since = Instant::now();
        loop {
            let state = self.state();
            if !matches!(state, MountState::NotNamed) {
                not_named_since = Instant::now();
            }
            let progress = match state {
                MountState::Waiting(progress) => progress,
                MountState::NotNamed => waiting_for("pod-sync to name the pod"),
                MountState::Ready(ready) => return self.finish(Ok(ready)).await,
                MountState::Failed(status) => return self.finish(Err(status)).await,
            };
            if progress != last {
                last.clone_from(&progress);
                let item = pb::mount_pod_response::Item::Progress(progress);
                if self.responses.send(Ok(pb::MountPodResponse { item: Some(item) })).await.is_err() {
                    return;
                }
            }
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the other futures have no state.
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() {
                    return self.finish(Err(not_desired_error(&self.uid, self.revision))).await;
                },
                () = self.responses.closed() => return,
                () = tokio::time::sleep_until(self.deadline) => {
                    return self.finish(Err(self.deadline_status(&last))).await;
                }
                () = tokio::time::sleep_until(not_named_since + DESIRED_TIMEOUT), if self.is_not_named() => {
                    return self.finish(Err(not_desired_error(&self.uid, self.revision))).await;
                }
            }
        }
    }

    /// The status at the caller's deadline. `FAILED_PRECONDITION` only if the user has to fix an object.
    fn deadline_status(&self, last: &pb::MountProgress) -> Status {
        if last.owner == OWNER_USER {
            return error(Code::FailedPrecondition, "OBJECT_NOT_USABLE", last.waiting_for.clone());
        }
        let text = format!("pod {} still waits for {}", self.uid, last.waiting_for);
        error(Code::DeadlineExceeded, "NOT_MOUNTED", text)
    }

    fn is_not_named(&self) -> bool {
        self.view.borrow().wanted(self.revision).is_none()
    }

    fn state(&mut self) -> MountState {
        let view = self.view.borrow_and_update();
        let Some(want) = view.wanted(self.revision) else { return MountState::NotNamed };
        if want != Want::Run {
            return MountState::Failed(error(
                Code::FailedPrecondition,
                "NOT_WANTED",
                format!("pod {} is not meant to run; its volumes are not mounted", self.uid),
            ));
        }
        if view.revision < self.revision {
            return MountState::Waiting(waiting_for("volumes to be set up"));
        }
        let status = &view.status;
        match status.phase {
            Phase::Mounted => MountState::Ready(pb::MountsReady {
                volumes: wire::mounts(status.mounts.clone()),
                pod_dir: self.pod_dir.clone(),
            }),
            Phase::Failed if view.permanent => MountState::Failed(error(
                Code::FailedPrecondition,
                "VOLUME_NOT_USABLE",
                status.message.clone(),
            )),
            Phase::Failed => MountState::Waiting(pb::MountProgress {
                next_try_unix_nanos: view.next_try_unix_nanos,
                owner: if view.user_can_fix { OWNER_USER.to_owned() } else { view.owner.clone() },
                ..waiting_for(&status.message)
            }),
            Phase::Pending if !status.message.is_empty() => MountState::Waiting(pb::MountProgress {
                owner: view.owner.clone(),
                ..waiting_for(&status.message)
            }),
            Phase::Unknown | Phase::Pending | Phase::Unmounting | Phase::Unmounted => {
                MountState::Waiting(waiting_for("volumes to be set up"))
            }
        }
    }

    async fn finish(&self, result: Result<pb::MountsReady, Status>) {
        let item = result
            .map(|ready| pb::MountPodResponse { item: Some(pb::mount_pod_response::Item::Ready(ready)) });
        let _ = self.responses.send(item).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;

    use super::*;

    #[tokio::test]
    async fn a_root_folder_that_cannot_be_shared_causes_a_node_event_and_a_condition() {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::VolumeManager, config);
        let events = async || {
            let request = Request::new(ListEventsRequest::default());
            ctx.events.list_events(request).await.unwrap().into_inner().events
        };
        report_root_sharing(&ctx, Ok(()));
        assert!(events().await.is_empty());
        let source = io::ErrorKind::PermissionDenied.into();
        report_root_sharing(&ctx, Err(MountError::Share { path: "/r".into(), source }));
        let recorded = events().await;
        let event = &recorded[0];
        assert_eq!((event.kind.as_str(), event.name.as_str(), recorded.len()), ("Node", "n1", 1));
        assert_eq!((event.r#type.as_str(), event.reason.as_str()), ("Warning", "KubeletSetupFailed"));
        assert!(event.message.contains("cannot make the mount /r shared"), "{}", event.message);
        let report = ctx.progress.report("");
        assert!(
            report.conditions.iter().any(|c| c.name == "root-mount" && !c.ok && c.message == event.message)
        );
    }
}
