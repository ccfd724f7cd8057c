//! Builds the service and starts its loops.

use std::collections::BTreeSet;
use std::sync::Arc;

use keelson_config::ServiceName;
use keelson_pod_reconciler::{ManagerHandle, QUEUE, Runtime};
use keelson_proto::keelson::resource_manager::v1::resource_manager_server::ResourceManagerServer;
use keelson_resource_manager_core::driver::DriverChoice;
use keelson_resource_manager_core::eviction::monitor::Monitor;
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::signal::Condition;
use keelson_resource_manager_core::node_shutdown::periods::GracePeriods;
use keelson_service_kit::{Context, StateFile, now_unix_nanos};
use tokio::sync::{mpsc, watch};
use tonic::service::Routes;

use crate::cgroup::{FoundPods, KernelNotifier};
use crate::commands::Command;
use crate::drain::{self, DrainHandle, DrainLoop, DrainState};
use crate::driver::{self, DriverSelector};
use crate::eviction::{self, Checkpoint, EvictionLoop, MemoryNotifications, Observer, Settings};
use crate::host::{self, Identity};
use crate::iptables;
use crate::machine_loop::{MachineInputs, MachineLoop};
use crate::manager::{Closed, Manager, ManagerOutputs};
use crate::metrics::{CgroupMetrics, EvictionMetrics, ShutdownMetrics};
use crate::node_shutdown::{self, Ending, Record, ShutdownLoop};
use crate::oom;
use crate::placement::PlacementLoop;
use crate::server::Service;
use crate::statistics::Statistics;
use crate::storage::Storage;
use crate::swap;
use crate::tree_loop::{TreeLoop, set_up_tree};
use crate::tunables;
use crate::view::{Orders, TreeState};
use crate::worker::WorkerEnv;

/// Capacity of the queue of orders of other tasks than eviction.
const ORDERED: usize = 16;

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
    let files = ctx.config.resources.identity_files.clone();
    let identity = tokio::task::spawn_blocking(move || Identity::read(&files)).await.unwrap_or_default();
    let drain = DrainState::from(drain::state_file(&ctx.config).load().await?);
    let checkpoint = file.load().await?.in_boot(&identity.boot_id).under_drain(drain.as_deref());
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
    let eviction = EvictionState { settings, file, monitor };
    Ok(start(ctx, StartState { eviction, orders, drain, identity, tree, found, drivers, choice }).await)
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
    eviction: EvictionState,
    orders: Orders,
    drain: DrainState,
    identity: Identity,
    tree: watch::Sender<TreeState>,
    found: FoundPods,
    drivers: DriverSelector,
    choice: watch::Sender<DriverChoice>,
}

/// What eviction starts with.
struct EvictionState {
    settings: Settings,
    file: StateFile<Checkpoint>,
    monitor: Monitor,
}

/// Starts the loops and returns the routes.
async fn start(ctx: Context, state: StartState) -> Routes {
    let StartState { eviction, orders, drain, identity, tree, found, drivers, choice } = state;
    let conditions = watch::Sender::new(eviction.monitor.last_observed.keys().copied().collect());
    let (shutting_down, is_shutting_down) = watch::channel(false);
    let drain = watch::Sender::new(drain);
    let boot_id = identity.boot_id.clone();
    let machine = MachineInputs {
        tree: tree.subscribe(),
        conditions: conditions.subscribe(),
        shutting_down: is_shutting_down.clone(),
        drain: drain.subscribe(),
    };
    let machine = MachineLoop::start(&ctx.config, ctx.progress.clone(), machine, identity).await;
    let (commands, receiver) = mpsc::channel(QUEUE);
    let (issue, ordered) = mpsc::channel(ORDERED);
    let (outputs, receivers) = manager_outputs(issue.clone());
    let ending = EndingInputs { issue, orders: orders.clone(), commands: commands.clone() };
    let closed = Closed { shutting_down: is_shutting_down, drain: drain.subscribe() };
    start_node_shutdown(&ctx, ending.clone(), &receivers, shutting_down).await;
    let drain = start_drain(&ctx, ending, &receivers, drain);
    let metrics = CgroupMetrics::new(&ctx.metrics);
    let env = worker_env(&ctx, tree.subscribe(), metrics.clone(), commands.clone());
    let statistics = Arc::new(statistics(&ctx, tree.subscribe()));
    let service = Service {
        manager: ManagerHandle::new(&ctx, commands.clone()),
        reservations_known: receivers.reservations_known,
        changes: receivers.changes,
        orders: orders.clone(),
        machine: machine.state(),
        tree: tree.subscribe(),
        statistics: Arc::clone(&statistics),
        drain,
    };
    let observer = Observer { root: ctx.config.paths.root_dir.clone(), statistics, tree: tree.subscribe() };
    let drain = closed.drain.clone();
    let inputs = EvictionInputs { ordered, finished: receivers.finished, drain, boot_id };
    let eviction =
        eviction_loop(&ctx, eviction, observer, inputs, conditions, orders.clone(), commands.clone());
    let loops = Loops {
        placement: placement_loop(&ctx, &tree, &choice, &service.statistics, &commands),
        manager: Manager::new(env, machine.state(), closed, outputs, orders, found),
        received: receiver,
        machine,
        tree: TreeLoop {
            ctx: ctx.clone(),
            state: tree,
            burstable: receivers.burstable,
            commands,
            metrics,
            drivers,
            choice,
        },
        eviction,
    };
    loops.spawn(&ctx);
    oom::watch(&ctx);
    iptables::start(&ctx);
    swap::warn_about_volumes(&ctx);
    Routes::new(ResourceManagerServer::new(service))
}

fn worker_env(
    ctx: &Context,
    tree: watch::Receiver<TreeState>,
    metrics: CgroupMetrics,
    commands: mpsc::Sender<Command>,
) -> Arc<WorkerEnv> {
    let (peer, progress) = (ctx.peer(ServiceName::RuntimeShim), ctx.progress.clone());
    Arc::new(WorkerEnv { tree, runtime: Runtime::new(peer, progress, "cgroups stay"), metrics, commands })
}

/// What the eviction loop receives.
struct EvictionInputs {
    ordered: mpsc::Receiver<Vec<Order>>,
    finished: watch::Receiver<u64>,
    drain: watch::Receiver<DrainState>,
    boot_id: String,
}

/// What is needed to end pods before a shutdown of the machine or for a drain.
#[derive(Clone)]
struct EndingInputs {
    issue: mpsc::Sender<Vec<Order>>,
    orders: Orders,
    commands: mpsc::Sender<Command>,
}

impl EndingInputs {
    fn ending(self, periods: GracePeriods, manager: &ManagerOutputReceivers) -> Ending {
        Ending {
            periods,
            commands: self.commands,
            changes: manager.changes.clone(),
            pods_known: manager.reservations_known.clone(),
            issue: self.issue,
            orders: self.orders,
        }
    }
}

/// Starts the task that drains the node.
fn start_drain(
    ctx: &Context,
    inputs: EndingInputs,
    manager: &ManagerOutputReceivers,
    state: watch::Sender<DrainState>,
) -> DrainHandle {
    let ending = inputs.ending(drain::periods(&ctx.config.resources.node_shutdown), manager);
    let (task, handle) = DrainLoop::new(ctx, state, ending);
    ctx.spawn("drain", task.run(ctx.shutdown.clone(), ctx.progress.register("drain")));
    handle
}

/// Starts the task that ends pods before a shutdown of the machine, if a grace period is configured.
async fn start_node_shutdown(
    ctx: &Context,
    inputs: EndingInputs,
    manager: &ManagerOutputReceivers,
    shutting_down: watch::Sender<bool>,
) {
    let metrics = ShutdownMetrics::new(&ctx.metrics);
    let Some(periods) = node_shutdown::grace_periods(&ctx.config.resources.node_shutdown) else { return };
    let logind = node_shutdown::logind_settings(&periods, &ctx.config);
    let ending = inputs.ending(periods, manager);
    let record = Record::load(ctx, metrics).await;
    let task = ShutdownLoop::new(ctx.clone(), logind, ending, record, shutting_down);
    ctx.spawn("node-shutdown", task.run(ctx.shutdown.clone(), ctx.progress.register("node-shutdown")));
}

fn eviction_loop(
    ctx: &Context,
    state: EvictionState,
    observer: Observer,
    inputs: EvictionInputs,
    conditions: watch::Sender<BTreeSet<Condition>>,
    orders: Orders,
    commands: mpsc::Sender<Command>,
) -> EvictionLoop {
    let notified = ctx.config.resources.eviction.kernel_memcg_notification;
    EvictionLoop {
        ctx: ctx.clone(),
        settings: state.settings,
        observer,
        file: state.file,
        monitor: state.monitor,
        orders,
        conditions,
        commands,
        ordered: inputs.ordered,
        drain: inputs.drain,
        boot_id: inputs.boot_id,
        finished: inputs.finished,
        metrics: EvictionMetrics::new(&ctx.metrics),
        notifications: notified.then(|| MemoryNotifications::new(Arc::new(KernelNotifier))),
        overdue: BTreeSet::new(),
        interval: eviction::INTERVAL,
    }
}

fn placement_loop(
    ctx: &Context,
    tree: &watch::Sender<TreeState>,
    choice: &watch::Sender<DriverChoice>,
    statistics: &Arc<Statistics>,
    commands: &mpsc::Sender<Command>,
) -> PlacementLoop {
    PlacementLoop {
        ctx: ctx.clone(),
        tree: tree.subscribe(),
        choice: choice.subscribe(),
        statistics: Arc::clone(statistics),
        commands: commands.clone(),
    }
}

fn statistics(ctx: &Context, tree: watch::Receiver<TreeState>) -> Statistics {
    let storage = Storage::new(ctx.peer(ServiceName::RuntimeShim), ctx.peer(ServiceName::VolumeManager));
    let root = ctx.config.paths.root_dir.clone();
    let system = ctx.config.resources.system_cgroups.clone();
    Statistics::new(tree, ctx.peer(ServiceName::RuntimeShim), storage, root, system)
}

/// The loops of the service.
struct Loops {
    placement: PlacementLoop,
    manager: Manager,
    /// The commands to the manager.
    received: mpsc::Receiver<Command>,
    machine: MachineLoop,
    tree: TreeLoop,
    eviction: EvictionLoop,
}

impl Loops {
    /// Starts them. Each ends at the shutdown.
    fn spawn(self, ctx: &Context) {
        let handle = ctx.progress.register("placement");
        ctx.spawn("placement", self.placement.run(ctx.shutdown.clone(), handle));
        let handle = ctx.progress.register("pods");
        ctx.spawn("pods", self.manager.run(self.received, ctx.shutdown.clone(), handle));
        let handle = ctx.progress.register("machine");
        ctx.spawn("machine", self.machine.run(ctx.shutdown.clone(), handle));
        let handle = ctx.progress.register("cgroups");
        ctx.spawn("cgroups", self.tree.run(handle));
        let handle = ctx.progress.register("eviction");
        ctx.spawn("eviction", self.eviction.run(ctx.shutdown.clone(), handle));
    }
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
