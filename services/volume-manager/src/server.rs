//! The gRPC API, and the construction of the service.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use keelson_config::{Config, ControlPlane, ServiceName};
use keelson_kube_model::Quantity;
use keelson_pod_reconciler::{Acks, ManagerHandle, QUEUE, Runtime, View as _, wait_until};
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{Context, ObjectRef, WatchHub, WatchItem, answer_by};
use keelson_volume_manager_core::csi::paths::DriverName;
use keelson_volume_manager_core::desire::{PodDesire, Want};
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::plan::ActualState;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use self::mount_wait::MountWait;
use crate::claims_in_use::ClaimReports;
use crate::csi::drivers::{NodeDriver, NodeUpdate};
use crate::driver_stats::DriverStats;
use crate::live_objects::LiveObjects;
use crate::manager::Manager;
use crate::metrics::{OperationMetrics, OrphanMetrics};
use crate::mounter::Mounter;
use crate::mounts::MountError;
use crate::node_facts::watch_node;
use crate::objects::ObjectCache;
use crate::orphans::{clean, left_of};
use crate::plugin_set::{self, PluginSet};
use crate::plugins::csi::Csi;
use crate::pod_certificates::CertificateClient;
use crate::prepare::{ContainerRequest, PrepareError, PreparedContainer, prepare};
use crate::resolver::Resolver;
use crate::selinux::{self, SeLinux, SeLinuxMetrics};
use crate::shared_volumes::{Environment, ForeignFolder, SharedVolumes, SharedVolumesTask, find_volumes};
use crate::stats::Stats;
use crate::store::Store;
use crate::tokens::TokenClient;
use crate::totals::VolumeTotals;
use crate::user_namespaces::{UserNamespaceSettings, UserNamespaces};
use crate::view::{Phase, PodView, PodVolumeStatus};
use crate::wire::{self, path_component};
use crate::worker::Env;

mod mount_wait;

/// How long the folder of an orphaned pod may take to be read or removed.
const ORPHAN_DEADLINE: Duration = Duration::from_secs(20);

/// Lists the pod folders on disk and builds the service.
///
/// # Errors
/// The root folder is not usable.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    build_with(ctx, Mounter::default()).await
}

/// As [`build`], for a test: its own program cannot be the helper, so this one is.
///
/// # Errors
/// As of [`build`].
pub async fn build_with_helper(ctx: Context, program: OsString) -> anyhow::Result<Routes> {
    build_with(ctx, Mounter::with_helper(program)).await
}

async fn build_with(ctx: Context, mounter: Mounter) -> anyhow::Result<Routes> {
    let config = Arc::clone(&ctx.config);
    let (store, found) = tokio::task::spawn_blocking(move || open_store(&config, mounter)).await??;
    let store = Arc::new(store);
    share_root(&ctx, &store).await?;

    let (commands, receiver) = mpsc::channel(QUEUE);
    let hub = WatchHub::new();
    let objects = ObjectCache::default();
    let watch =
        objects.clone().follow(ctx.peer(ServiceName::PodConfig), ctx.progress.clone(), ctx.shutdown.clone());
    ctx.spawn("objects", watch);
    let operations = OperationMetrics::register(&ctx.metrics);
    let tokens = TokenClient::new(ctx.peer(ServiceName::PodConfig));
    let totals = VolumeTotals::register(&ctx.metrics);
    let metrics = (&operations, &totals);
    let (found, resolver, plugin_set) = start_plugins(&ctx, &store, found, metrics, &tokens).await?;
    let pod_config = ctx.peer(ServiceName::PodConfig);
    let certificates = CertificateClient::new(pod_config, objects.clone(), ctx.events.clone(), &ctx.metrics);
    let env = Arc::new(Env {
        store,
        runtime: Runtime::new(
            ctx.peer(ServiceName::RuntimeShim),
            ctx.progress.clone(),
            "volumes stay mounted",
        ),
        objects,
        tokens,
        certificates,
        hub: hub.clone(),
        events: ctx.events.clone(),
        orphans: OrphanMetrics::register(&ctx.metrics),
        operations,
        resolver,
        totals,
        commands: commands.clone(),
        is_set_complete: AtomicBool::new(false),
    });
    let (stats, driver_stats) = start_statistics(&ctx, &env, Arc::<Csi>::clone(&plugin_set.csi));
    tracing::info!(pods = found.len(), "listed the pod folders");
    let manager = Manager::new(Arc::clone(&env), found);
    let manager_handle = ManagerHandle::new(&ctx, commands);
    let handle = ctx.progress.register("pods");
    ctx.spawn("pods", manager.run(receiver, ctx.shutdown.clone(), handle));
    let service = Service { manager: manager_handle, hub, env, stats, driver_stats, plugin_set };
    Ok(Routes::new(VolumeManagerServer::new(service)))
}

/// Makes mounts below the root folder propagate. The service works without that, too.
async fn share_root(ctx: &Context, store: &Arc<Store>) -> anyhow::Result<()> {
    let store = Arc::clone(store);
    let shared = tokio::task::spawn_blocking(move || store.share()).await?;
    report_root_sharing(ctx, shared);
    Ok(())
}

/// Starts the measurement of volumes: by this service, and by the drivers of CSI volumes.
fn start_statistics(ctx: &Context, env: &Env, csi: Arc<Csi>) -> (Stats, DriverStats) {
    let stats = Stats::new(&ctx.metrics, env.store.mounter());
    let has_health = ctx.config.volumes.csi_volume_health;
    let driver_stats = DriverStats::new(csi, stats.durations(), ctx.events.clone(), has_health);
    let period = Duration::from_millis(ctx.config.volumes.stats_period_ms);
    if !period.is_zero() {
        let handle = ctx.progress.register("statistics of CSI volumes");
        let work = driver_stats.clone().follow(env.hub.clone(), period, ctx.shutdown.clone(), handle);
        ctx.spawn("statistics of CSI volumes", work);
        let handle = ctx.progress.register("volume statistics");
        let work = stats.clone().follow(env.hub.clone(), period, ctx.shutdown.clone(), handle);
        ctx.spawn("volume statistics", work);
    }
    (stats, driver_stats)
}

/// Starts the task that has the volumes of plugins, with those that are on disk, and returns the rest of the pods' folders.
async fn start_plugins(
    ctx: &Context,
    store: &Arc<Store>,
    mut found: Vec<(String, ActualState)>,
    (metrics, totals): (&OperationMetrics, &VolumeTotals),
    tokens: &TokenClient,
) -> anyhow::Result<(Vec<(String, ActualState)>, Resolver, PluginSet)> {
    let config = &ctx.config;
    let live = LiveObjects::new(ctx.peer(ServiceName::PodConfig));
    let mounter = store.mounter().clone();
    let plugin_set = plugin_set::start(ctx, &mounter, &live, tokens);
    let plugins = plugin_set.plugins.clone();
    let (on_disk, known) = (Arc::clone(store), plugins.clone());
    let take = move || (on_disk.take_plugin_folders(&mut found, &known), found);
    let (folders, found) = tokio::task::spawn_blocking(take).await?;
    let (shared, inbox) = SharedVolumes::new();
    let retries = shared.clone().follow_drivers(plugin_set.drivers.clone(), ctx.shutdown.clone());
    ctx.spawn("retries of CSI volumes", retries);
    let (facts, node) = watch::channel(None);
    let (connections, connected) = watch::channel(0);
    let (peer, progress) = (ctx.peer(ServiceName::PodConfig), ctx.progress.clone());
    ctx.spawn("node", watch_node(facts, connections, peer, progress, ctx.shutdown.clone()));
    let has_api_server = matches!(config.control_plane, ControlPlane::Kubernetes(_));
    let selinux_metrics = SeLinuxMetrics::register(&ctx.metrics);
    let environment = Environment {
        node_name: config.node_name.clone(),
        root: config.paths.root_dir.clone(),
        mounter,
        live: live.clone(),
        events: ctx.events.clone(),
        metrics: metrics.clone(),
        totals: totals.clone(),
        // Without an API server there is no controller that attaches.
        has_attach_controller: config.node_status.controller_attach_detach && has_api_server,
        has_api_server,
        selinux: selinux_metrics.clone(),
    };
    let on_disk = find_volumes(&plugins, folders).await.with_foreign(foreign_folders(&found));
    let task = SharedVolumesTask::new(environment, inbox, node, on_disk);
    let handle = ctx.progress.register("volumes of plugins");
    ctx.spawn("volumes of plugins", task.run(ctx.shutdown.clone(), handle));
    let reports = ClaimReports::start(ctx, shared.claims(), connected);
    let selinux = SeLinux::of_machine(config.volumes.selinux_mount, selinux_metrics);
    let events = ctx.events.clone();
    Ok((found, Resolver { live, plugins, shared, selinux, events, reports }, plugin_set))
}

/// The folders of plugins that this version does not have.
fn foreign_folders(found: &[(String, ActualState)]) -> BTreeSet<ForeignFolder> {
    let of_pod = |(uid, actual): &(String, ActualState)| {
        let foreign = actual.on_disk.iter().filter(|key| key.is_foreign());
        foreign.map(|key| (uid.as_str().into(), key.name.clone())).collect::<Vec<_>>()
    };
    found.iter().flat_map(of_pod).collect()
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

fn open_store(config: &Config, mounter: Mounter) -> anyhow::Result<FoundPods> {
    let root = &config.paths.root_dir;
    let user_namespaces = UserNamespaces::new(UserNamespaceSettings {
        ids_per_pod: config.pods.ids_per_pod,
        max_pods: config.resources.max_pods,
    });
    let store =
        Store::open(root, &config.paths.run_dir, allocatable_memory(config), mounter, user_namespaces)
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
    driver_stats: DriverStats,
    plugin_set: PluginSet,
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
        let mounter = self.env.store.mounter().clone();
        let work = tokio::task::spawn_blocking(move || {
            let prepared = prepare(&mounter, &pod_folder, &mounts, &request);
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

fn csi_drivers(update: NodeUpdate) -> pb::WatchCsiDriversResponse {
    let driver = |(name, driver): (DriverName, NodeDriver)| pb::CsiDriver {
        name: name.to_string(),
        node_id: driver.node_id,
        topology: driver.topology.into_iter().collect(),
    };
    pb::WatchCsiDriversResponse {
        registered: update.registered.into_iter().map(driver).collect(),
        unregistered: update.unregistered.iter().map(ToString::to_string).collect(),
    }
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
    type WatchCsiDriversStream = ResponseStream<pb::WatchCsiDriversResponse>;

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

    async fn watch_csi_drivers(
        &self,
        _: Request<pb::WatchCsiDriversRequest>,
    ) -> Result<Response<Self::WatchCsiDriversStream>, Status> {
        let stream =
            WatchStream::new(self.plugin_set.drivers.node_update()).map(|update| Ok(csi_drivers(update)));
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
        let uid = (!uid.is_empty()).then_some(uid.as_str());
        let mut pods = self.stats.measured(uid);
        self.driver_stats.add_to(&mut pods, uid);
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
        let store = Arc::clone(&self.env.store);
        let (responses, receiver) = mpsc::channel(4);
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for volumes", uid);
        let revision = request.revision;
        let (shared, csi) = (self.env.resolver.shared.clone(), Arc::clone(&self.plugin_set.csi));
        let wait = MountWait { uid, revision, store, view, responses, deadline, shared, csi };
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
