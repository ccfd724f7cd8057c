//! Sets the cgroup tree up, and then keeps the weight of the burstable class.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::layout::{Layout, Qos};
use keelson_resource_manager_core::machine;
use keelson_resource_manager_core::values::shares_of_milli;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Backoff, Context, LoopHandle, ObjectRef};
use tokio::sync::{mpsc, watch};

use crate::cgroup::{KernelCgroups, RootValues, Tree};
use crate::host;
use crate::manager::{Ask, Command, Found};
use crate::metrics::CgroupMetrics;
use crate::view::TreeState;

/// Where the kernel shows the hierarchies.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The name of the condition.
const CONDITION: &str = "cgroups";

/// Tries once to set the tree up; what is in it, when that went well.
pub(crate) async fn attempt(config: &Arc<Config>) -> (TreeState, Found) {
    if config.runtime.cgroup_driver != "cgroupfs" {
        return (TreeState::Never(driver_text(&config.runtime.cgroup_driver)), Found::new());
    }
    let config = Arc::clone(config);
    let work = tokio::task::spawn_blocking(move || set_up(&config)).await;
    match work.map_err(anyhow::Error::from).and_then(|result| result) {
        Ok((tree, found)) => (TreeState::Ready(Arc::new(tree)), found),
        Err(error) => (TreeState::NotYet(format!("pods get no cgroups: {error:#}")), Found::new()),
    }
}

fn driver_text(driver: &str) -> String {
    match driver {
        "systemd" => {
            "the systemd cgroup driver needs systemd's D-Bus interface, which this version does not \
                      speak yet; set cgroupDriver to cgroupfs here and in the container runtime"
                .to_owned()
        }
        other => format!("the cgroup driver {other:?} is unknown; it is cgroupfs or systemd"),
    }
}

fn set_up(config: &Config) -> anyhow::Result<(Tree, Found)> {
    let layout = Layout::new(&config.runtime.cgroup_root)?;
    let mountinfo = std::fs::read("/proc/self/mountinfo")?;
    let pids = u64::try_from(config.resources.pod_pids_limit).ok().filter(|limit| *limit > 0);
    let text = String::from_utf8_lossy(&mountinfo);
    let tree = Tree::open(Arc::new(KernelCgroups), &text, Path::new(CGROUP_ROOT), layout, pids)?;
    tree.set_up(root_values(config))?;
    let found = tree.scan()?;
    Ok((tree, found))
}

/// All pods together weigh what the node does not reserve, and are bound in memory only when it reserves some.
fn root_values(config: &Config) -> RootValues {
    let reserved = &config.resources.reserved;
    let capacity = host::look(&config.paths.root_dir)
        .map(|reading| machine::capacity(&reading, config.resources.max_pods))
        .unwrap_or_default();
    let allocatable = host::allocatable(&capacity, reserved).unwrap_or_else(|_| capacity.clone());
    let amount = |name: &str| allocatable.get(name).and_then(|amount| u64::try_from(*amount).ok());
    let reduced = allocatable.get("memory") != capacity.get("memory");
    RootValues {
        cpu_shares: shares_of_milli(amount("cpu").unwrap_or(0)),
        memory_limit: amount("memory").filter(|limit| reduced && *limit > 0),
    }
}

/// The loop that owns the state of the tree.
pub(crate) struct TreeLoop {
    pub(crate) ctx: Context,
    pub(crate) state: watch::Sender<TreeState>,
    /// CPU requests of the admitted burstable pods, in millicores.
    pub(crate) burstable: watch::Receiver<u64>,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) metrics: CgroupMetrics,
}

impl TreeLoop {
    /// Turns until the shutdown.
    pub(crate) async fn run(mut self, handle: LoopHandle) {
        let mut retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
        self.tell();
        loop {
            handle.tick();
            let state = self.state.borrow().clone();
            let pause = match &state {
                TreeState::NotYet(_) => retry.next_delay(),
                TreeState::Ready(_) | TreeState::Never(_) => LoopHandle::HEARTBEAT,
            };
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the others hold nothing.
            tokio::select! {
                () = self.ctx.shutdown.cancelled() => return,
                changed = self.burstable.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(pause) => {
                    if matches!(state, TreeState::NotYet(_)) {
                        self.try_again().await;
                    }
                    continue;
                }
            }
            if let TreeState::Ready(tree) = state {
                self.weigh(tree).await;
            }
        }
    }

    async fn try_again(&mut self) {
        let (state, found) = attempt(&self.ctx.config).await;
        let ready = matches!(state, TreeState::Ready(_));
        self.state.send_replace(state);
        self.tell();
        if ready {
            let _ = self.commands.send(Command::Ask(Ask::TakeStock { found })).await;
            self.burstable.mark_changed();
        }
    }

    fn tell(&self) {
        let text = match &*self.state.borrow() {
            TreeState::Ready(tree) => {
                let version = tree.version();
                self.metrics.version(crate::machine_loop::version_number(version));
                tracing::info!(version = version.as_str(), pods = %tree.layout().pods(), "the cgroup tree is set up");
                let node = ObjectRef::node(&self.ctx.config.node_name);
                let text = "Updated Node Allocatable limit across pods";
                self.ctx.events.normal(node, "NodeAllocatableEnforced", text);
                None
            }
            TreeState::NotYet(text) | TreeState::Never(text) => Some(text.clone()),
        };
        self.ctx.progress.condition(CONDITION, text.map_or(Ok(()), Err));
    }

    /// Gives the burstable class the weight of its pods (§8.3).
    async fn weigh(&mut self, tree: Arc<Tree>) {
        let shares = shares_of_milli(*self.burstable.borrow_and_update());
        let work = tokio::task::spawn_blocking(move || tree.set_class_shares(Qos::Burstable, shares)).await;
        if let Ok(result) = work {
            self.ctx.progress.condition("qos-cgroups", result.map_err(|e| chain(&e)));
        }
    }
}
