//! Builds the service and implements its gRPC API.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use keelson_config::ServiceName;
use keelson_pod_reconciler::{
    Acks, DESIRED_TIMEOUT, ManagerHandle, QUEUE, Runtime, View as _, not_desired_error, wait_until,
};
use keelson_proto::keelson::resource_manager::v1 as pb;
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::{
    ResourceManager, ResourceManagerServer,
};
use keelson_resource_manager_core::desire::{PodDesire, Want};
use keelson_resource_manager_core::driver::DriverChoice;
use keelson_resource_manager_core::eviction::monitor::Monitor;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_service_kit::status::error;
use keelson_service_kit::{Context, StateFile, answer_by, now_unix_nanos};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::WatchStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::admission::{NO_TREE, OLDER_PODS_FIRST, PREEMPTING, SET_NOT_COMPLETE, Verdict};
use crate::cgroup::{FoundPods, KernelNotifier};
use crate::commands::{Command, ManagerRequest};
use crate::driver::{self, DriverSelector};
use crate::eviction::{self, Checkpoint, EvictionLoop, MemoryNotifications, Observer, Settings};
use crate::host;
use crate::iptables;
use crate::machine_loop::MachineLoop;
use crate::manager::{Manager, ManagerOutputs};
use crate::metrics::{CgroupMetrics, EvictionMetrics};
use crate::oom;
use crate::placement::PlacementLoop;
use crate::statistics::Statistics;
use crate::storage::Storage;
use crate::swap;
use crate::tree_loop::{TreeLoop, set_up_tree};
use crate::tunables;
use crate::view::{MachineState, Orders, Phase, TreeState, View};
use crate::wire::{self, usable_uid};
use crate::worker::WorkerEnv;

/// How long admission waits for the cgroup tree: at the first start the service asks the container runtime for its driver
/// first.
const TREE_TIMEOUT: Duration = Duration::from_secs(1);
/// Capacity of the queue of preemptions.
const PREEMPTIONS: usize = 16;

/// Scans the cgroup tree and builds the service. A tree that cannot be set up is a condition and is retried; it does not fail
/// the start.
///
/// # Errors
/// Reservations above the capacity, invalid eviction thresholds, protected kernel tunables with other values, and a state file
/// of a newer version.
pub async fn build(ctx: Context) -> anyhow::Result<Routes> {
    let settings = Settings::new(&ctx.config)?;
    host::check_reservations(&ctx.config).await?;
    tunables::apply(&ctx).await?;
    let file = eviction::state_file(&ctx.config);
    let checkpoint = file.load().await?;
    let orders = Orders::new();
    let (reports, reported) = watch::channel(None);
    ctx.spawn("runtime", follow_runtime(ctx.clone(), reports));
    let mut drivers = DriverSelector::load(&ctx, reported).await?;
    let choice = drivers.choose().await;
    let (tree, mut found) = set_up_tree(&ctx.config, choice).await;
    tracing::info!(pods = found.own.len(), orders = checkpoint.orders.len(), "scanned the cgroup tree");
    for order in checkpoint.orders {
        // Its pod stays known until a set says that it is finished, even without a cgroup.
        found.own.entry(order.pod.uid.clone()).or_default();
        orders.set(order.pod.uid.clone(), Arc::new(order));
    }
    let mut monitor = checkpoint.monitor;
    monitor.clamp_to(u64::try_from(now_unix_nanos() / 1_000_000).unwrap_or(0));
    let tree = watch::Sender::new(tree);
    let choice = watch::Sender::new(choice);
    Ok(start(ctx, StartState { settings, file, monitor, orders, tree, found, drivers, choice }).await)
}

/// Follows the runtime's cgroup driver until the shutdown.
async fn follow_runtime(ctx: Context, reports: watch::Sender<Option<driver::ReportedDriver>>) {
    // Cancel-safe: `follow` keeps no state beyond the service.
    tokio::select! {
        () = ctx.shutdown.cancelled() => {}
        () = driver::follow(ctx.peer(ServiceName::RuntimeShim), reports) => {}
    }
}

/// The state at startup.
struct StartState {
    settings: Settings,
    file: StateFile<Checkpoint>,
    monitor: Monitor,
    orders: Orders,
    tree: watch::Sender<TreeState>,
    found: FoundPods,
    drivers: DriverSelector,
    choice: watch::Sender<DriverChoice>,
}

/// Starts the loops and returns the routes.
async fn start(ctx: Context, state: StartState) -> Routes {
    let StartState { settings, file, monitor, orders, tree, found, drivers, choice } = state;
    let conditions = watch::Sender::new(monitor.last_observed.keys().copied().collect());
    let progress = ctx.progress.clone();
    let machine = MachineLoop::start(&ctx.config, progress, tree.subscribe(), conditions.subscribe()).await;
    let (commands, receiver) = mpsc::channel(QUEUE);
    let (preempt, preemptions) = mpsc::channel(PREEMPTIONS);
    let (outputs, receivers) = manager_outputs(preempt);
    let metrics = CgroupMetrics::new(&ctx.metrics);
    let env = Arc::new(WorkerEnv {
        tree: tree.subscribe(),
        runtime: Runtime::new(ctx.peer(ServiceName::RuntimeShim), ctx.progress.clone(), "cgroups stay"),
        metrics: metrics.clone(),
        commands: commands.clone(),
    });
    let storage = Storage::new(ctx.peer(ServiceName::RuntimeShim), ctx.peer(ServiceName::VolumeManager));
    let root = ctx.config.paths.root_dir.clone();
    let system = ctx.config.resources.system_cgroups.clone();
    let statistics =
        Statistics::new(tree.subscribe(), ctx.peer(ServiceName::RuntimeShim), storage, root.clone(), system);
    let statistics = Arc::new(statistics);
    let service = Service {
        manager: ManagerHandle::new(&ctx, commands.clone()),
        reservations_known: receivers.reservations_known,
        changes: receivers.changes,
        orders: orders.clone(),
        machine: machine.state(),
        tree: tree.subscribe(),
        statistics: Arc::clone(&statistics),
    };
    let notified = ctx.config.resources.eviction.kernel_memcg_notification;
    let eviction = EvictionLoop {
        ctx: ctx.clone(),
        settings,
        observer: Observer { root, statistics, tree: tree.subscribe() },
        file,
        monitor,
        orders: orders.clone(),
        conditions,
        commands: commands.clone(),
        preemptions,
        finished: receivers.finished,
        metrics: EvictionMetrics::new(&ctx.metrics),
        notifications: notified.then(|| MemoryNotifications::new(Arc::new(KernelNotifier))),
        overdue: BTreeSet::new(),
        interval: eviction::INTERVAL,
    };
    let manager = Manager::new(env, machine.state(), outputs, orders, found);
    let placement = PlacementLoop {
        ctx: ctx.clone(),
        tree: tree.subscribe(),
        choice: choice.subscribe(),
        statistics: Arc::clone(&service.statistics),
        commands: commands.clone(),
    };
    let handle = ctx.progress.register("placement");
    ctx.spawn("placement", placement.run(ctx.shutdown.clone(), handle));
    let handle = ctx.progress.register("pods");
    ctx.spawn("pods", manager.run(receiver, ctx.shutdown.clone(), handle));
    let handle = ctx.progress.register("machine");
    ctx.spawn("machine", machine.run(ctx.shutdown.clone(), handle));
    let handle = ctx.progress.register("cgroups");
    let burstable = receivers.burstable;
    let tree_loop = TreeLoop { ctx: ctx.clone(), state: tree, burstable, commands, metrics, drivers, choice };
    ctx.spawn("cgroups", tree_loop.run(handle));
    let handle = ctx.progress.register("eviction");
    ctx.spawn("eviction", eviction.run(ctx.shutdown.clone(), handle));
    oom::watch(&ctx);
    iptables::start(&ctx);
    swap::warn_about_volumes(&ctx);
    Routes::new(ResourceManagerServer::new(service))
}

/// The receivers of [`ManagerOutputs`].
struct ManagerOutputReceivers {
    reservations_known: watch::Receiver<bool>,
    burstable: watch::Receiver<u64>,
    changes: watch::Receiver<u64>,
    finished: watch::Receiver<u64>,
}

fn manager_outputs(preempt: mpsc::Sender<Vec<Order>>) -> (ManagerOutputs, ManagerOutputReceivers) {
    let outputs = ManagerOutputs {
        reservations_known: watch::Sender::new(false),
        burstable: watch::Sender::new(0),
        changes: watch::Sender::new(0),
        finished: watch::Sender::new(0),
        preempt,
    };
    let receivers = ManagerOutputReceivers {
        reservations_known: outputs.reservations_known.subscribe(),
        burstable: outputs.burstable.subscribe(),
        changes: outputs.changes.subscribe(),
        finished: outputs.finished.subscribe(),
    };
    (outputs, receivers)
}

struct Service {
    manager: ManagerHandle<PodDesire, View, ManagerRequest>,
    reservations_known: watch::Receiver<bool>,
    changes: watch::Receiver<u64>,
    orders: Orders,
    machine: watch::Receiver<MachineState>,
    tree: watch::Receiver<TreeState>,
    statistics: Arc<Statistics>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn bad_field(cause: &wire::WireError) -> Status {
    error(Code::InvalidArgument, "BAD_FIELD", cause.to_string())
}

impl Service {
    /// Waits until the set names the pod with this revision. Fails when it does not, or when the pod should not run.
    async fn wait_until_named(
        &self,
        uid: &str,
        revision: u64,
        until: Instant,
    ) -> Result<watch::Receiver<View>, Status> {
        let mut view = self.manager.watch(uid).await?;
        let until = until.min(Instant::now() + DESIRED_TIMEOUT);
        let want = match timeout_at(until, view.wait_for(|v| v.wanted(revision).is_some())).await {
            Ok(Ok(view)) => view.wanted(revision),
            _ => return Err(not_desired_error(uid, revision)),
        };
        if want != Some(Want::Run) {
            let text = format!("pod {uid} should not run, so nothing is started for it");
            return Err(error(Code::FailedPrecondition, "NOT_WANTED", text));
        }
        Ok(view)
    }

    /// The verdict on a pod of the set. While the reservations of other pods are unknown, only pods that are admitted already
    /// get an answer; pods that wait for other pods are decided on again after each change.
    async fn verdict(&self, uid: &str, until: Instant) -> Result<Verdict, Status> {
        let (mut known, mut changes, mut tree) =
            (self.reservations_known.clone(), self.changes.clone(), self.tree.clone());
        loop {
            changes.mark_unchanged();
            tree.mark_unchanged();
            let admit = |reply| Command::Request(ManagerRequest::Admit { uid: uid.to_owned(), reply });
            let verdict = self.manager.request(admit).await?;
            let is_late = match &verdict {
                Verdict::NotYet { reason: SET_NOT_COMPLETE, .. } => {
                    timeout_at(until, known.wait_for(|known| *known)).await.is_err()
                }
                Verdict::NotYet { reason: OLDER_PODS_FIRST | PREEMPTING, .. } => {
                    timeout_at(until, changes.changed()).await.is_err()
                }
                Verdict::NotYet { reason: NO_TREE, .. } => {
                    let until = until.min(Instant::now() + TREE_TIMEOUT);
                    timeout_at(until, tree.changed()).await.is_err()
                }
                Verdict::Admitted | Verdict::Rejected(_) | Verdict::NotYet { .. } => true,
            };
            if is_late {
                return Ok(verdict);
            }
        }
    }

    async fn prepare(&self, uid: &str, revision: u64, until: Instant) -> Result<String, Status> {
        let mut view = self.wait_until_named(uid, revision, until).await?;
        let mut tree = self.tree.clone();
        loop {
            // This admits pods again that an earlier run of this service has admitted.
            match self.verdict(uid, until).await? {
                Verdict::Admitted => break,
                Verdict::Rejected(rejection) => {
                    let text = format!("pod {uid} is not admitted: {}", rejection.message);
                    return Err(error(Code::FailedPrecondition, "NOT_ADMITTED", text));
                }
                Verdict::NotYet { reason: "CgroupDriverNotSupported", message } => {
                    return Err(error(Code::FailedPrecondition, "CGROUP_DRIVER", message));
                }
                Verdict::NotYet { message, .. } => {
                    if timeout_at(until, tree.changed()).await.is_err() {
                        return Err(not_ready(uid, &message));
                    }
                }
            }
        }
        let mut last = view.clone();
        let ready = view.wait_for(|v| v.phase == Phase::Ready && v.revision >= revision);
        match timeout_at(until, ready).await {
            Ok(Ok(view)) => Ok(view.cgroup_parent.clone()),
            Ok(Err(_)) => Err(not_ready(uid, "the pod has been removed in the meantime")),
            Err(_) => Err(not_ready(uid, &last.borrow_and_update().message)),
        }
    }
}

fn not_ready(uid: &str, message: &str) -> Status {
    let message = if message.is_empty() { "its cgroup is being created" } else { message };
    error(Code::DeadlineExceeded, "NOT_READY", format!("pod {uid}: {message}"))
}

#[tonic::async_trait]
impl ResourceManager for Service {
    type SyncStream = Acks;
    type WatchMachineStream = Answers<pb::Machine>;
    type PodStatsStream = Answers<pb::PodStatsResponse>;
    type CgroupStatsStream = Answers<pb::CgroupStatsResponse>;
    type WatchEvictionsStream = Answers<pb::WatchEvictionsResponse>;

    async fn watch_evictions(
        &self,
        _: Request<pb::WatchEvictionsRequest>,
    ) -> Result<Response<Self::WatchEvictionsStream>, Status> {
        let items = self.orders.subscribe().into_stream(|item| Ok(eviction::watch_response(item)));
        Ok(Response::new(Box::pin(items)))
    }

    async fn node_stats(
        &self,
        request: Request<pb::NodeStatsRequest>,
    ) -> Result<Response<pb::NodeStatsResponse>, Status> {
        let brief = request.into_inner().cpu_and_memory_only;
        Ok(Response::new(self.statistics.node(brief).await?))
    }

    async fn cgroup_stats(
        &self,
        _: Request<pb::CgroupStatsRequest>,
    ) -> Result<Response<Self::CgroupStatsStream>, Status> {
        let cgroups = self.statistics.cgroups().await?;
        Ok(Response::new(Box::pin(stream::iter(cgroups.into_iter().map(Ok)))))
    }

    async fn pod_stats(
        &self,
        request: Request<pb::PodStatsRequest>,
    ) -> Result<Response<Self::PodStatsStream>, Status> {
        let brief = request.into_inner().cpu_and_memory_only;
        let pods = self.statistics.pods(brief).await?;
        Ok(Response::new(Box::pin(stream::iter(pods.into_iter().map(Ok)))))
    }

    async fn sync(
        &self,
        request: Request<Streaming<pb::SyncRequest>>,
    ) -> Result<Response<Self::SyncStream>, Status> {
        Ok(Response::new(self.manager.sync(request.into_inner(), wire::item).await?))
    }

    async fn admit_pod(
        &self,
        request: Request<pb::AdmitPodRequest>,
    ) -> Result<Response<pb::AdmitPodResponse>, Status> {
        use pb::admit_pod_response::Verdict as Answer;
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        self.wait_until_named(&uid, request.revision, until).await?;
        let verdict = match self.verdict(&uid, until).await? {
            Verdict::Admitted => Answer::Admitted(pb::Admitted {}),
            Verdict::Rejected(r) => {
                Answer::Rejected(pb::Rejected { reason: r.reason, message: r.message, passing: r.temporary })
            }
            Verdict::NotYet { reason, message } => {
                Answer::NotYet(pb::NotYet { reason: reason.to_owned(), message })
            }
        };
        Ok(Response::new(pb::AdmitPodResponse { verdict: Some(verdict) }))
    }

    async fn defer_pod(
        &self,
        request: Request<pb::DeferPodRequest>,
    ) -> Result<Response<pb::DeferPodResponse>, Status> {
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        self.wait_until_named(&uid, request.revision, until).await?;
        self.manager.request(|reply| Command::Request(ManagerRequest::Defer { uid, reply })).await?;
        Ok(Response::new(pb::DeferPodResponse {}))
    }

    async fn prepare_pod(
        &self,
        request: Request<pb::PreparePodRequest>,
    ) -> Result<Response<pb::PreparePodResponse>, Status> {
        let until = answer_by(request.metadata());
        let request = request.into_inner();
        let uid = usable_uid(request.uid).map_err(|e| bad_field(&e))?;
        let span = tracing::info_span!(target: keelson_telemetry::TRACE_TARGET, "wait for cgroup", uid);
        let cgroup_parent = self.prepare(&uid, request.revision, until).instrument(span).await?;
        Ok(Response::new(pb::PreparePodResponse { cgroup_parent }))
    }

    async fn release_pod(
        &self,
        request: Request<pb::ReleasePodRequest>,
    ) -> Result<Response<pb::ReleasePodResponse>, Status> {
        let until = answer_by(request.metadata());
        let uid = usable_uid(request.into_inner().uid).map_err(|e| bad_field(&e))?;
        let mut view = self.manager.watch(&uid).await?;
        if wait_until(&mut view, until, |v| matches!(v.phase, Phase::Unknown | Phase::Gone)).await {
            return Ok(Response::new(pb::ReleasePodResponse {}));
        }
        let view = view.borrow();
        let why = match (&view.named, view.message.as_str()) {
            (Some((_, want)), _) if *want != Want::Forget => "it is not to be forgotten yet",
            (_, "") => "its cgroup is being removed",
            (_, message) => message,
        };
        Err(error(Code::DeadlineExceeded, "NOT_RELEASED", format!("pod {uid}: {why}")))
    }

    async fn watch_machine(
        &self,
        _: Request<pb::WatchMachineRequest>,
    ) -> Result<Response<Self::WatchMachineStream>, Status> {
        let states = WatchStream::new(self.machine.clone());
        Ok(Response::new(Box::pin(states.map(move |state| Ok(wire::machine(state))))))
    }
}
