//! The gRPC API and the building of the service.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::Stream;
use keelson_config::{Config, ServiceName};
use keelson_kube_model::Quantity;
use keelson_proto::keelson::common::v1 as common;
use keelson_proto::keelson::volume_manager::v1 as pb;
use keelson_proto::keelson::volume_manager::v1::volume_manager_server::{VolumeManager, VolumeManagerServer};
use keelson_service_kit::status::{chain, error};
use keelson_service_kit::{Context, ObjectRef, WatchHub, WatchItem, answer_by};
use keelson_sync_callee::{Acks, Front, NAMED_WITHIN, QUEUE, Runtime, View as _, becomes, not_named};
use keelson_volume_manager_core::desire::{PodDesire, Want};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::manager::{Env, Manager};
use crate::metrics::{Operations, Orphans};
use crate::mounts::MountError;
use crate::objects::Objects;
use crate::prepare::{PrepareError, Prepared, Wishes, prepare};
use crate::selinux;
use crate::stats::Stats;
use crate::store::Store;
use crate::tokens::Maker;
use crate::totals::Totals;
use crate::view::{Phase, Report, View};
use crate::wire::{self, plain};

/// Takes stock of the disk and builds the service.
///
/// # Errors
/// The root folder is not usable.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let config = Arc::clone(&ctx.config);
    let (store, found) = tokio::task::spawn_blocking(move || take_stock(&config)).await??;
    let store = Arc::new(store);
    let sharing = Arc::clone(&store);
    let shared = tokio::task::spawn_blocking(move || sharing.share()).await?;
    tell_of_sharing(&ctx, shared);

    let (commands, receiver) = mpsc::channel(QUEUE);
    let hub = WatchHub::new();
    let objects = Objects::default();
    let following =
        objects.clone().follow(ctx.peer(ServiceName::PodConfig), ctx.progress.clone(), ctx.shutdown.clone());
    ctx.spawn("objects", following);
    let env = Arc::new(Env {
        store,
        runtime: Runtime::new(
            ctx.peer(ServiceName::RuntimeShim),
            ctx.progress.clone(),
            "volumes stay mounted",
        ),
        objects,
        tokens: Maker::new(ctx.peer(ServiceName::PodConfig)),
        hub: hub.clone(),
        events: ctx.events.clone(),
        orphans: Orphans::register(&ctx.metrics),
        operations: Operations::register(&ctx.metrics),
        totals: Totals::register(&ctx.metrics),
        commands: commands.clone(),
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
    tracing::info!(pods = found.len(), "took stock of the pod folders");
    let manager = Manager::new(Arc::clone(&env), found);
    let front = Front::new(&ctx, commands);
    let handle = ctx.progress.register("pods");
    ctx.spawn("pods", manager.run(receiver, ctx.shutdown.clone(), handle));
    let service = Service { front, hub, env, stats };
    Ok(Routes::new(VolumeManagerServer::new(service)))
}

/// Says whether what containers mount below the root folder is seen by others. Without that this service works on.
fn tell_of_sharing(ctx: &Context, shared: Result<(), MountError>) {
    let shared = shared.map_err(|error| chain(&error));
    if let Err(why) = &shared {
        let node = ObjectRef::node(&ctx.config.node_name);
        ctx.events.warning(node, "KubeletSetupFailed", why.clone());
    }
    ctx.progress.condition("root-mount", shared);
}

type Stock = (Store, Vec<(String, keelson_volume_manager_core::plan::Actual)>);

fn take_stock(config: &Config) -> anyhow::Result<Stock> {
    let root = &config.paths.root_dir;
    let store = Store::open(root, &config.paths.run_dir, allocatable_memory(config))
        .with_context(|| format!("the root folder {} (paths.rootDir) is not usable", root.display()))?;
    selinux::label_folders(root, keelson_service_kit::selinux_is_enabled(), selinux::set_label);
    let found = store.scan().context("cannot take stock of the pod folders")?;
    Ok((store, found))
}

/// Memory in bytes that pods may use: all less what the configuration reserves.
fn allocatable_memory(config: &Config) -> u64 {
    let info = rustix::system::sysinfo();
    let total = u64::from(info.mem_unit).saturating_mul(info.totalram);
    let reserved = config.resources.reserved.get("memory").and_then(|text| Quantity::parse(text).ok());
    total.saturating_sub(reserved.map_or(0, |q| u64::try_from(q.value()).unwrap_or(0)))
}

struct Service {
    front: Front<PodDesire, View>,
    hub: WatchHub<String, Report>,
    env: Arc<Env>,
    stats: Stats,
}

impl Service {
    /// Makes ready what a container needs. The pod's volumes do not go meanwhile; what hangs is left to hang, and
    /// holds up nothing but its own pod.
    async fn prepare(&self, wishes: Wishes, until: Instant) -> Result<Prepared, Status> {
        let uid = wishes.uid.clone();
        let not_mounted = || {
            let text = format!("the volumes of pod {uid} are not mounted");
            error(Code::Unavailable, "NOT_MOUNTED", text)
        };
        let mut view = self.front.look(&uid).await?;
        if !becomes(&mut view, until, View::is_mounted).await {
            return Err(not_mounted());
        }
        let folder = Arc::clone(&view.borrow().folder);
        let hangs = |what: &str| error(Code::DeadlineExceeded, "NOT_PREPARED", format!("pod {uid}: {what}"));
        let Ok(mut folder) = timeout_at(until, folder.lock_owned()).await else {
            return Err(hangs("what was prepared for a container before does not come to an end"));
        };
        // Under the lock, since whoever takes the volumes away has said so before.
        let mounts = {
            let view = view.borrow();
            if !view.is_mounted() {
                return Err(not_mounted());
            }
            view.report.mounts.clone()
        };
        folder.has_subpaths |= !wishes.parts.is_empty();
        let pod_folder = self.env.store.pod_folder(&uid);
        let work = tokio::task::spawn_blocking(move || {
            let prepared = prepare(&pod_folder, &mounts, &wishes);
            drop(folder);
            prepared
        });
        let done = timeout_at(until, work).await;
        let done = done.map_err(|_| hangs("a volume does not answer"))?;
        let done = done.map_err(|e| error(Code::Internal, "NOT_PREPARED", format!("pod {uid}: {e}")))?;
        done.map_err(|e| refused(&e))
    }
}

fn refused(problem: &PrepareError) -> Status {
    let reason = match problem {
        PrepareError::Volume { .. } => "VOLUME_NOT_MOUNTED",
        PrepareError::Part { .. } => "SUBPATH_NOT_USABLE",
    };
    error(Code::FailedPrecondition, reason, chain(problem))
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn bad(problem: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", problem.to_string())
}

#[tonic::async_trait]
impl VolumeManager for Service {
    type SyncStream = Acks;
    type MountPodStream = Answers<pb::MountPodResponse>;
    type WatchPodVolumesStream = Answers<pb::WatchPodVolumesResponse>;
    type PodVolumeStatsStream = Answers<pb::PodVolumeStatsResponse>;

    async fn prepare_container(
        &self,
        request: Request<pb::PrepareContainerRequest>,
    ) -> Result<Response<pb::PrepareContainerResponse>, Status> {
        let until = answer_by(request.metadata());
        let wishes = wire::wishes(request.into_inner()).map_err(|e| bad(&e))?;
        let prepared = self.prepare(wishes, until).await?;
        Ok(Response::new(wire::prepared(prepared)))
    }

    async fn pod_volume_stats(
        &self,
        request: Request<pb::PodVolumeStatsRequest>,
    ) -> Result<Response<Self::PodVolumeStatsStream>, Status> {
        let uid = request.into_inner().uid;
        let pods = self.stats.known((!uid.is_empty()).then_some(uid.as_str()));
        let stream = tokio_stream::iter(pods.into_iter().map(|pod| Ok(wire::pod_stats(pod))));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        Ok(Response::new(self.front.sync(request.into_inner(), wire::item).await?))
    }

    async fn mount_pod(
        &self,
        request: Request<pb::MountPodRequest>,
    ) -> Result<Response<Self::MountPodStream>, Status> {
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = plain("uid", &request.uid).map_err(|e| bad(&e))?;
        let view = self.front.look(&uid).await?;
        let pod_dir = self.env.store.pod_folder(&uid).to_string_lossy().into_owned();
        let (answers, receiver) = mpsc::channel(4);
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for volumes", uid);
        let wait = MountWait { uid, revision: request.revision, pod_dir, view, answers, until };
        tokio::spawn(wait.run().instrument(span));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn unmount_pod(
        &self,
        request: Request<pb::UnmountPodRequest>,
    ) -> Result<Response<pb::UnmountPodResponse>, Status> {
        let until = answer_by(request.metadata());
        let uid = plain("uid", &request.into_inner().uid).map_err(|e| bad(&e))?;
        let mut view = self.front.look(&uid).await?;
        let done = |v: &View| matches!(v.report.phase, Phase::Unknown | Phase::Unmounted);
        if becomes(&mut view, until, done).await {
            return Ok(Response::new(pb::UnmountPodResponse {}));
        }
        let view = view.borrow();
        let why = match (&view.named, view.report.message.as_str()) {
            (Some((_, Want::Run | Want::Stop)), _) => "its unmounting is not wanted yet",
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
                WatchItem::Set(uid, report) => Item::Pod(wire::pod_volumes(uid, report)),
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
    view: watch::Receiver<View>,
    /// The caller's deadline: it bounds a stream's first headers only, so the end is ours to keep.
    until: Instant,
    answers: mpsc::Sender<Result<pb::MountPodResponse, Status>>,
}

/// The owner of a wait that a person can end.
const YOU: &str = "you";

fn waits_for(what: &str) -> pb::MountProgress {
    pb::MountProgress { waiting_for: what.to_owned(), next_try_unix_nanos: 0, owner: String::new() }
}

/// What a look at the pod means for a `MountPod` call.
enum Look {
    Wait(pb::MountProgress),
    Unnamed,
    Ready(pb::MountsReady),
    Refused(Status),
}

impl MountWait {
    async fn run(mut self) {
        let mut told = pb::MountProgress::default();
        let mut unnamed_since = Instant::now();
        loop {
            let look = self.look();
            if !matches!(look, Look::Unnamed) {
                unnamed_since = Instant::now();
            }
            let progress = match look {
                Look::Wait(progress) => progress,
                Look::Unnamed => waits_for("pod-sync to name the pod"),
                Look::Ready(ready) => return self.end(Ok(ready)).await,
                Look::Refused(status) => return self.end(Err(status)).await,
            };
            if progress != told {
                told.clone_from(&progress);
                let item = pb::mount_pod_response::Item::Progress(progress);
                if self.answers.send(Ok(pb::MountPodResponse { item: Some(item) })).await.is_err() {
                    return;
                }
            }
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the others hold nothing.
            tokio::select! {
                changed = self.view.changed() => if changed.is_err() {
                    return self.end(Err(not_named(&self.uid, self.revision))).await;
                },
                () = self.answers.closed() => return,
                () = tokio::time::sleep_until(self.until) => {
                    return self.end(Err(self.too_late(&told))).await;
                }
                () = tokio::time::sleep_until(unnamed_since + NAMED_WITHIN), if self.is_unnamed() => {
                    return self.end(Err(not_named(&self.uid, self.revision))).await;
                }
            }
        }
    }

    /// The caller's time is over. Only what a person can end is a fault of the pod.
    fn too_late(&self, told: &pb::MountProgress) -> Status {
        if told.owner == YOU {
            return error(Code::FailedPrecondition, "OBJECT_NOT_USABLE", told.waiting_for.clone());
        }
        let text = format!("pod {} still waits for {}", self.uid, told.waiting_for);
        error(Code::DeadlineExceeded, "NOT_MOUNTED", text)
    }

    fn is_unnamed(&self) -> bool {
        self.view.borrow().wanted(self.revision).is_none()
    }

    fn look(&mut self) -> Look {
        let view = self.view.borrow_and_update();
        let Some(want) = view.wanted(self.revision) else { return Look::Unnamed };
        if want != Want::Run {
            return Look::Refused(error(
                Code::FailedPrecondition,
                "NOT_WANTED",
                format!("pod {} is not to run, nothing is mounted for it", self.uid),
            ));
        }
        if view.revision < self.revision {
            return Look::Wait(waits_for("volumes to be set up"));
        }
        let report = &view.report;
        match report.phase {
            Phase::Mounted => Look::Ready(pb::MountsReady {
                volumes: wire::mounts(report.mounts.clone()),
                pod_dir: self.pod_dir.clone(),
            }),
            Phase::Failed if view.permanent => {
                Look::Refused(error(Code::FailedPrecondition, "VOLUME_NOT_USABLE", report.message.clone()))
            }
            Phase::Failed => Look::Wait(pb::MountProgress {
                next_try_unix_nanos: view.next_try_unix_nanos,
                owner: if view.yours { YOU.to_owned() } else { String::new() },
                ..waits_for(&report.message)
            }),
            Phase::Pending if !report.message.is_empty() => Look::Wait(waits_for(&report.message)),
            Phase::Unknown | Phase::Pending | Phase::Unmounting | Phase::Unmounted => {
                Look::Wait(waits_for("volumes to be set up"))
            }
        }
    }

    async fn end(&self, end: Result<pb::MountsReady, Status>) {
        let item =
            end.map(|ready| pb::MountPodResponse { item: Some(pb::mount_pod_response::Item::Ready(ready)) });
        let _ = self.answers.send(item).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use keelson_proto::keelson::events::v1::ListEventsRequest;
    use keelson_proto::keelson::events::v1::events_server::Events as _;

    use super::*;

    #[tokio::test]
    async fn a_root_folder_that_cannot_be_shared_is_told_of_the_node_and_one_that_is_not() {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::VolumeManager, config);
        let events = async || {
            let request = Request::new(ListEventsRequest::default());
            ctx.events.list_events(request).await.unwrap().into_inner().events
        };
        tell_of_sharing(&ctx, Ok(()));
        assert!(events().await.is_empty());
        let source = io::ErrorKind::PermissionDenied.into();
        tell_of_sharing(&ctx, Err(MountError::Share { path: "/r".into(), source }));
        let told = events().await;
        let event = &told[0];
        assert_eq!((event.kind.as_str(), event.name.as_str(), told.len()), ("Node", "n1", 1));
        assert_eq!((event.r#type.as_str(), event.reason.as_str()), ("Warning", "KubeletSetupFailed"));
        assert!(event.message.contains("cannot make the mount /r shared"), "{}", event.message);
        let report = ctx.progress.report("");
        assert!(
            report.conditions.iter().any(|c| c.name == "root-mount" && !c.ok && c.message == event.message)
        );
    }
}
