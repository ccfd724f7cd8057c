//! Sets the cgroup tree up, enforces node allocatable, and updates the weight of the burstable class.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::driver::DriverChoice;
use keelson_resource_manager_core::enforce::{EnforceTarget, enforce_targets, pods_limits, reserved_limits};
use keelson_resource_manager_core::layout::{Driver, Layout, Qos};
use keelson_resource_manager_core::machine;
use keelson_resource_manager_core::values::{NodeLimits, shares_of_milli};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle, ObjectRef};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::cgroup::{DriverConfig, FoundPods, KernelCgroups, Slices, Systemd, Tree};
use crate::commands::{Command, ManagerRequest};
use crate::driver::DriverSelector;
use crate::host;
use crate::metrics::CgroupMetrics;
use crate::view::TreeState;

/// Where the cgroup hierarchies are mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The name of the condition.
const CONDITION: &str = "cgroups";
/// The name of the condition of the limits of all pods.
const ALLOCATABLE_CONDITION: &str = "node-allocatable";
/// Between two attempts to limit all pods (§9).
const ENFORCE_RETRY: Duration = Duration::from_secs(60);

/// Tries once to set the tree up for the chosen driver; returns its state and the pods that are in it.
pub(crate) async fn set_up_tree(config: &Arc<Config>, choice: DriverChoice) -> (TreeState, FoundPods) {
    let driver = match choice {
        DriverChoice::Use(driver, _) => driver,
        DriverChoice::Wait => {
            let text = "the container runtime has not reported its cgroup driver yet; if it does not within seconds, \
                        cgroupDriver is used";
            return (TreeState::Pending(text.to_owned()), FoundPods::default());
        }
        DriverChoice::Unknown => {
            let text = format!(
                "the cgroup driver {:?} is unknown; set cgroupDriver to cgroupfs or systemd",
                config.runtime.cgroup_driver
            );
            return (TreeState::Unsupported(text), FoundPods::default());
        }
    };
    let config = Arc::clone(config);
    let work = tokio::task::spawn_blocking(move || open_tree(&config, driver)).await;
    match work.map_err(anyhow::Error::from).and_then(|result| result) {
        Ok((tree, found)) => (TreeState::Ready(Arc::new(tree)), found),
        Err(error) => {
            (TreeState::Pending(format!("the cgroup tree cannot be set up: {error:#}")), FoundPods::default())
        }
    }
}

fn open_tree(config: &Config, driver: Driver) -> anyhow::Result<(Tree, FoundPods)> {
    let driver_config = DriverConfig {
        layout: Layout::new(driver, &config.runtime.cgroup_root)?,
        slices: (driver == Driver::Systemd)
            .then(|| Arc::new(Systemd::at(&config.resources.system_bus.socket)) as Arc<dyn Slices>),
        owner: config.paths.root_dir.to_string_lossy().into_owned(),
    };
    let mounts = keelson_mountinfo::parse(&std::fs::read("/proc/self/mountinfo")?);
    let pids = u64::try_from(config.resources.pod_pids_limit).ok().filter(|limit| *limit > 0);
    let node = NodeLimits { pids, page_sizes: host::page_sizes() };
    let tree = Tree::open(Arc::new(KernelCgroups), &mounts, Path::new(CGROUP_ROOT), driver_config, node)?;
    tree.set_up()?;
    let found = tree.scan_by_owner()?;
    Ok((tree, found))
}

/// The result of enforcing node allocatable.
#[derive(Debug, Default)]
struct Enforcement {
    /// Of all pods together; none when that is not configured.
    pods: Option<Result<(), String>>,
    /// Of each reserved cgroup: `kube` or `system`, its path, and the result.
    reserved: Vec<(&'static str, String, Result<(), String>)>,
}

/// Sets the limits of the cgroups that `enforceNodeAllocatable` names.
fn enforce(config: &Config, tree: &Tree) -> Enforcement {
    let settings = &config.resources.node_allocatable;
    let mut capacity = host::read_machine(&config.paths.root_dir)
        .map(|reading| {
            let mut capacity = machine::capacity(&reading, config.resources.max_pods);
            capacity.insert("pid".to_owned(), i64::try_from(reading.processes.max).unwrap_or(i64::MAX));
            capacity
        })
        .unwrap_or_default();
    // A kernel that does not report a maximum of processes has no limit to divide.
    capacity.retain(|name, amount| name != "pid" || *amount > 0);
    let amounts = |texts| machine::reservations(texts, &capacity).map_err(|e| chain(&e));
    let (kube, system) = (amounts(&settings.kube_reserved), amounts(&settings.system_reserved));
    let mut enforcement = Enforcement::default();
    for (target, scope) in enforce_targets(&settings.enforce) {
        let (what, cgroup, reserved) = match target {
            EnforceTarget::Pods => {
                let both = kube.clone().and_then(|kube| Ok((kube, system.clone()?)));
                enforcement.pods = Some(both.and_then(|(kube, system)| {
                    tree.limit_pods(&pods_limits(&capacity, &[&kube, &system])).map_err(|e| chain(&e))
                }));
                continue;
            }
            EnforceTarget::KubeReserved => ("kube", &settings.kube_reserved_cgroup, &kube),
            EnforceTarget::SystemReserved => ("system", &settings.system_reserved_cgroup, &system),
        };
        let result = reserved.clone().and_then(|reserved| {
            let limits = reserved_limits(&reserved, scope);
            tree.limit_reserved(cgroup, &limits).map_err(|e| chain(&e))
        });
        enforcement.reserved.push((what, cgroup.clone(), result));
    }
    enforcement
}

/// The loop that owns the state of the tree.
pub(crate) struct TreeLoop {
    pub(crate) ctx: Context,
    pub(crate) state: watch::Sender<TreeState>,
    /// CPU requests of the admitted burstable pods, in millicores.
    pub(crate) burstable: watch::Receiver<u64>,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) metrics: CgroupMetrics,
    pub(crate) drivers: DriverSelector,
    /// The driver of the tree.
    pub(crate) choice: watch::Sender<DriverChoice>,
}

impl TreeLoop {
    /// Runs until the shutdown.
    pub(crate) async fn run(mut self, handle: LoopHandle) {
        let mut retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
        // Waiting for the runtime at startup is not an error.
        if *self.choice.borrow() != DriverChoice::Wait {
            self.report();
        }
        let mut enforce_at = self.enforce().await;
        let mut weight_is_set = true;
        loop {
            handle.tick();
            if self.update_driver().await {
                retry.reset();
                enforce_at = self.enforce().await;
            }
            if enforce_at.is_some_and(|at| at <= Instant::now()) {
                enforce_at = self.enforce().await;
            }
            let state = self.state.borrow().clone();
            let choice = *self.choice.borrow();
            let fails = matches!(state, TreeState::Pending(_)) && choice != DriverChoice::Wait;
            let pause = if fails { retry.next_delay() } else { LoopHandle::HEARTBEAT };
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the others hold nothing.
            tokio::select! {
                () = self.ctx.shutdown.cancelled() => return,
                () = self.drivers.changed(choice) => continue,
                changed = self.burstable.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(pause) => {
                    if fails {
                        self.set_up_again().await;
                        enforce_at = self.enforce().await;
                    }
                    if weight_is_set {
                        continue;
                    }
                }
            }
            if let TreeState::Ready(tree) = state {
                weight_is_set = self.set_burstable_weight(tree).await;
            }
        }
    }

    /// Sets the tree up again when another driver is chosen; returns whether it did. Running pods keep their old cgroups until
    /// they are removed.
    async fn update_driver(&mut self) -> bool {
        let choice = self.drivers.choose().await;
        let before = self.choice.send_replace(choice);
        if choice == before || (before.driver().is_some() && choice.driver() == before.driver()) {
            return false;
        }
        if let (Some(old), Some(new)) = (before.driver(), choice.driver()) {
            tracing::warn!(
                before = old.name(),
                now = new.name(),
                "the container runtime has changed its cgroup driver: new containers get cgroups of the new driver"
            );
        }
        self.set_up_again().await;
        true
    }

    async fn set_up_again(&mut self) {
        let choice = *self.choice.borrow();
        let (state, found) = set_up_tree(&self.ctx.config, choice).await;
        let ready = matches!(state, TreeState::Ready(_));
        self.state.send_replace(state);
        self.report();
        if ready {
            let _ = self.commands.send(Command::Request(ManagerRequest::AddFound { found })).await;
            self.burstable.mark_changed();
        }
    }

    /// Logs the state of the tree and sets its condition.
    fn report(&self) {
        let text = match &*self.state.borrow() {
            TreeState::Ready(tree) => {
                let version = tree.version();
                self.metrics.version(crate::machine_loop::version_number(version));
                crate::cgroup_version::warn_on_v1(&self.ctx, version);
                let driver = tree.layout().driver().name();
                let pods = tree.layout().pods();
                tracing::info!(version = version.as_str(), driver, %pods, "the cgroup tree is set up");
                None
            }
            TreeState::Pending(text) | TreeState::Unsupported(text) => Some(text.clone()),
        };
        self.ctx.progress.condition(CONDITION, text.map_or(Ok(()), Err));
    }

    /// Enforces node allocatable; returns when to retry. A reserved cgroup that cannot be limited ends the service: the
    /// configuration names a cgroup that does not exist.
    async fn enforce(&self) -> Option<Instant> {
        let TreeState::Ready(tree) = self.state.borrow().clone() else { return None };
        let config = Arc::clone(&self.ctx.config);
        let enforcement =
            tokio::task::spawn_blocking(move || enforce(&config, &tree)).await.unwrap_or_default();
        let node = || ObjectRef::node(&self.ctx.config.node_name);
        for (what, cgroup, result) in enforcement.reserved {
            match result {
                Ok(()) => {
                    let text = format!("Updated limits on {what} reserved cgroup {cgroup}");
                    self.ctx.events.normal(node(), "NodeAllocatableEnforced", text);
                }
                Err(why) => {
                    let text =
                        format!("cannot set the limits of {cgroup}, which {what}ReservedCgroup names: {why}");
                    self.ctx.events.warning(node(), "FailedNodeAllocatableEnforcement", text.clone());
                    self.ctx.fail(text);
                }
            }
        }
        match enforcement.pods {
            None => self.ctx.progress.condition(ALLOCATABLE_CONDITION, Ok(())),
            Some(Ok(())) => {
                self.ctx.progress.condition(ALLOCATABLE_CONDITION, Ok(()));
                let text = "Updated Node Allocatable limit across pods";
                self.ctx.events.normal(node(), "NodeAllocatableEnforced", text);
            }
            Some(Err(why)) => {
                let text = format!("cannot limit all pods to node allocatable: {why}");
                self.ctx.events.warning(node(), "FailedNodeAllocatableEnforcement", text.clone());
                self.ctx.progress.condition(ALLOCATABLE_CONDITION, Err(text));
                return Some(Instant::now() + ENFORCE_RETRY);
            }
        }
        None
    }

    /// Sets the CPU weight of the burstable class to that of its pods (§8.3). False: retry.
    async fn set_burstable_weight(&mut self, tree: Arc<Tree>) -> bool {
        let shares = shares_of_milli(*self.burstable.borrow_and_update());
        let work = tokio::task::spawn_blocking(move || tree.set_class_shares(Qos::Burstable, shares)).await;
        let result = work.map_err(|e| e.to_string()).and_then(|result| result.map_err(|e| chain(&e)));
        let is_set = result.is_ok();
        self.ctx.progress.condition("qos-cgroups", result);
        is_set
    }
}
