//! Sets the cgroup tree up, binds it, and then keeps the weight of the burstable class.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::driver::Choice;
use keelson_resource_manager_core::enforce::{Part, parts, pods_limits, reserved_limits};
use keelson_resource_manager_core::layout::{Driver, Layout, Qos};
use keelson_resource_manager_core::machine;
use keelson_resource_manager_core::values::{NodeBounds, shares_of_milli};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle, ObjectRef};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::cgroup::{Driving, KernelCgroups, Slices, Stock, Systemd, Tree};
use crate::driver::Drivers;
use crate::host;
use crate::manager::{Ask, Command};
use crate::metrics::CgroupMetrics;
use crate::view::TreeState;

/// Where the kernel shows the hierarchies.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The name of the condition.
const CONDITION: &str = "cgroups";
/// The name of the condition of what binds all pods together.
const BOUND: &str = "node-allocatable";
/// Between two attempts to bind all pods together (§9).
const BIND_AGAIN: Duration = Duration::from_secs(60);

/// Tries once to set the tree up as the driver in force has it; what is in it, when that went well.
pub(crate) async fn attempt(config: &Arc<Config>, choice: Choice) -> (TreeState, Stock) {
    let driver = match choice {
        Choice::Use(driver, _) => driver,
        Choice::Wait => {
            let text = "the container runtime has not said yet which cgroup driver it has; if it says nothing within \
                        seconds, cgroupDriver counts";
            return (TreeState::NotYet(text.to_owned()), Stock::default());
        }
        Choice::Unknown => {
            let text = format!(
                "the cgroup driver {:?} is unknown; it is cgroupfs or systemd",
                config.runtime.cgroup_driver
            );
            return (TreeState::Never(text), Stock::default());
        }
    };
    let config = Arc::clone(config);
    let work = tokio::task::spawn_blocking(move || set_up(&config, driver)).await;
    match work.map_err(anyhow::Error::from).and_then(|result| result) {
        Ok((tree, stock)) => (TreeState::Ready(Arc::new(tree)), stock),
        Err(error) => (TreeState::NotYet(format!("pods get no cgroups: {error:#}")), Stock::default()),
    }
}

fn set_up(config: &Config, driver: Driver) -> anyhow::Result<(Tree, Stock)> {
    let driving = Driving {
        layout: Layout::new(driver, &config.runtime.cgroup_root)?,
        slices: (driver == Driver::Systemd).then(|| Arc::new(Systemd::of_this_machine()) as Arc<dyn Slices>),
        owner: config.paths.root_dir.to_string_lossy().into_owned(),
    };
    let mountinfo = std::fs::read("/proc/self/mountinfo")?;
    let pids = u64::try_from(config.resources.pod_pids_limit).ok().filter(|limit| *limit > 0);
    let node = NodeBounds { pids, page_sizes: host::page_sizes() };
    let text = String::from_utf8_lossy(&mountinfo);
    let tree = Tree::open(Arc::new(KernelCgroups), &text, Path::new(CGROUP_ROOT), driving, node)?;
    tree.set_up()?;
    let stock = tree.take_stock()?;
    Ok((tree, stock))
}

/// What the cgroups are bound to, and why one could not be.
#[derive(Debug, Default)]
struct Bound {
    /// All pods together; none when they are not to be bound.
    pods: Option<Result<(), String>>,
    /// Somebody else's cgroups: what they are for, where they are, and how it went.
    reserved: Vec<(&'static str, String, Result<(), String>)>,
}

/// Binds what `enforceNodeAllocatable` names.
fn bind(config: &Config, tree: &Tree) -> Bound {
    let settings = &config.resources.node_allocatable;
    let mut capacity = host::look(&config.paths.root_dir)
        .map(|reading| {
            let mut capacity = machine::capacity(&reading, config.resources.max_pods);
            capacity.insert("pid".to_owned(), i64::try_from(reading.processes.most).unwrap_or(i64::MAX));
            capacity
        })
        .unwrap_or_default();
    // A kernel that does not say how many processes there may be has no limit to share.
    capacity.retain(|name, amount| name != "pid" || *amount > 0);
    let amounts = |texts| machine::reservations(texts, &capacity).map_err(|e| chain(&e));
    let (kube, system) = (amounts(&settings.kube_reserved), amounts(&settings.system_reserved));
    let mut bound = Bound::default();
    for (part, extent) in parts(&settings.enforce) {
        let (what, cgroup, reserved) = match part {
            Part::Pods => {
                let both = kube.clone().and_then(|kube| Ok((kube, system.clone()?)));
                bound.pods = Some(both.and_then(|(kube, system)| {
                    tree.bind_pods(&pods_limits(&capacity, &[&kube, &system])).map_err(|e| chain(&e))
                }));
                continue;
            }
            Part::KubeReserved => ("kube", &settings.kube_reserved_cgroup, &kube),
            Part::SystemReserved => ("system", &settings.system_reserved_cgroup, &system),
        };
        let result = reserved.clone().and_then(|reserved| {
            let limits = reserved_limits(&reserved, extent);
            tree.bind_reserved(cgroup, &limits).map_err(|e| chain(&e))
        });
        bound.reserved.push((what, cgroup.clone(), result));
    }
    bound
}

/// The loop that owns the state of the tree.
pub(crate) struct TreeLoop {
    pub(crate) ctx: Context,
    pub(crate) state: watch::Sender<TreeState>,
    /// CPU requests of the admitted burstable pods, in millicores.
    pub(crate) burstable: watch::Receiver<u64>,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) metrics: CgroupMetrics,
    pub(crate) drivers: Drivers,
    /// The driver that the tree is of.
    pub(crate) choice: watch::Sender<Choice>,
}

impl TreeLoop {
    /// Turns until the shutdown.
    pub(crate) async fn run(mut self, handle: LoopHandle) {
        let mut retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
        // A runtime that is on its way is no trouble.
        if *self.choice.borrow() != Choice::Wait {
            self.tell();
        }
        let mut bind_at = self.bind().await;
        let mut weighs = true;
        loop {
            handle.tick();
            if self.settle().await {
                retry.reset();
                bind_at = self.bind().await;
            }
            if bind_at.is_some_and(|at| at <= Instant::now()) {
                bind_at = self.bind().await;
            }
            let state = self.state.borrow().clone();
            let choice = *self.choice.borrow();
            let fails = matches!(state, TreeState::NotYet(_)) && choice != Choice::Wait;
            let pause = if fails { retry.next_delay() } else { LoopHandle::HEARTBEAT };
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the others hold nothing.
            tokio::select! {
                () = self.ctx.shutdown.cancelled() => return,
                () = self.drivers.changed(choice) => continue,
                changed = self.burstable.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(pause) => {
                    if fails {
                        self.try_again().await;
                        bind_at = self.bind().await;
                    }
                    if weighs {
                        continue;
                    }
                }
            }
            if let TreeState::Ready(tree) = state {
                weighs = self.weigh(tree).await;
            }
        }
    }

    /// Sets the tree up anew when another driver is in force. Pods that run stay where they are; their cgroups of
    /// before go with them. Whether that was so.
    async fn settle(&mut self) -> bool {
        let choice = self.drivers.choose().await;
        let before = self.choice.send_replace(choice);
        if choice == before || (before.driver().is_some() && choice.driver() == before.driver()) {
            return false;
        }
        if let (Some(old), Some(new)) = (before.driver(), choice.driver()) {
            tracing::warn!(
                before = old.name(),
                now = new.name(),
                "the container runtime has another cgroup driver than before: new containers are put where that one \
                 puts them"
            );
        }
        self.try_again().await;
        true
    }

    async fn try_again(&mut self) {
        let choice = *self.choice.borrow();
        let (state, stock) = attempt(&self.ctx.config, choice).await;
        let ready = matches!(state, TreeState::Ready(_));
        self.state.send_replace(state);
        self.tell();
        if ready {
            let _ = self.commands.send(Command::Ask(Ask::TakeStock { stock })).await;
            self.burstable.mark_changed();
        }
    }

    fn tell(&self) {
        let text = match &*self.state.borrow() {
            TreeState::Ready(tree) => {
                let version = tree.version();
                self.metrics.version(crate::machine_loop::version_number(version));
                crate::cgroup_version::tell(&self.ctx, version);
                let driver = tree.layout().driver().name();
                let pods = tree.layout().pods();
                tracing::info!(version = version.as_str(), driver, %pods, "the cgroup tree is set up");
                None
            }
            TreeState::NotYet(text) | TreeState::Never(text) => Some(text.clone()),
        };
        self.ctx.progress.condition(CONDITION, text.map_or(Ok(()), Err));
    }

    /// Binds what is to be bound; when that is to be tried again. A reserved cgroup that cannot be bound ends the
    /// service: the configuration names one that is not there.
    async fn bind(&self) -> Option<Instant> {
        let TreeState::Ready(tree) = self.state.borrow().clone() else { return None };
        let config = Arc::clone(&self.ctx.config);
        let bound = tokio::task::spawn_blocking(move || bind(&config, &tree)).await.unwrap_or_default();
        let node = || ObjectRef::node(&self.ctx.config.node_name);
        for (what, cgroup, result) in bound.reserved {
            match result {
                Ok(()) => {
                    let text = format!("Updated limits on {what} reserved cgroup {cgroup}");
                    self.ctx.events.normal(node(), "NodeAllocatableEnforced", text);
                }
                Err(why) => {
                    let text =
                        format!("cannot bind the cgroup {cgroup} that {what}ReservedCgroup names: {why}");
                    self.ctx.events.warning(node(), "FailedNodeAllocatableEnforcement", text.clone());
                    self.ctx.fail(text);
                }
            }
        }
        match bound.pods {
            None => self.ctx.progress.condition(BOUND, Ok(())),
            Some(Ok(())) => {
                self.ctx.progress.condition(BOUND, Ok(()));
                let text = "Updated Node Allocatable limit across pods";
                self.ctx.events.normal(node(), "NodeAllocatableEnforced", text);
            }
            Some(Err(why)) => {
                let text = format!("all pods together are not bound to what the node has for them: {why}");
                self.ctx.events.warning(node(), "FailedNodeAllocatableEnforcement", text.clone());
                self.ctx.progress.condition(BOUND, Err(text));
                return Some(Instant::now() + BIND_AGAIN);
            }
        }
        None
    }

    /// Gives the burstable class the weight of its pods (§8.3). False: it is to be tried again.
    async fn weigh(&mut self, tree: Arc<Tree>) -> bool {
        let shares = shares_of_milli(*self.burstable.borrow_and_update());
        let work = tokio::task::spawn_blocking(move || tree.set_class_shares(Qos::Burstable, shares)).await;
        let result = work.map_err(|e| e.to_string()).and_then(|result| result.map_err(|e| chain(&e)));
        let weighs = result.is_ok();
        self.ctx.progress.condition("qos-cgroups", result);
        weighs
    }
}
