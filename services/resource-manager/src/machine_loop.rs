//! Reads the machine periodically and publishes changes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use keelson_config::Config;
use keelson_resource_manager_core::eviction::signal::Condition;
use keelson_resource_manager_core::hierarchy::Version;
use keelson_resource_manager_core::machine::{self, MachineReading};
use keelson_service_kit::status::chain;
use keelson_service_kit::{CancellationToken, LoopHandle, Progress};
use tokio::sync::watch;

use crate::drain::DrainState;
use crate::host::{self, HostError, Identity};
use crate::view::{MachineState, TreeState};

/// Timeout of a read, which takes microseconds; a filesystem that hangs must not block the loop.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// The task that owns the published state of the machine.
pub(crate) struct MachineLoop {
    root: PathBuf,
    max_pods: u32,
    pods_per_core: u32,
    reserved: BTreeMap<String, String>,
    progress: Progress,
    inputs: MachineInputs,
    state: watch::Sender<MachineState>,
}

/// What other tasks contribute to the published state.
pub(crate) struct MachineInputs {
    pub(crate) tree: watch::Receiver<TreeState>,
    /// The pressure conditions of the node.
    pub(crate) conditions: watch::Receiver<BTreeSet<Condition>>,
    /// Whether the machine shuts down.
    pub(crate) shutting_down: watch::Receiver<bool>,
    /// Whether the node is drained.
    pub(crate) drain: watch::Receiver<DrainState>,
}

impl MachineLoop {
    /// Reads the machine once, so that its state is available before the first request.
    pub(crate) async fn start(
        config: &Config,
        progress: Progress,
        inputs: MachineInputs,
        identity: Identity,
    ) -> Self {
        let first = MachineState { identity: Arc::new(identity), ..MachineState::default() };
        let mut this = Self {
            root: config.paths.root_dir.clone(),
            max_pods: config.resources.max_pods,
            pods_per_core: config.resources.pods_per_core,
            reserved: config.resources.reserved.clone(),
            progress,
            inputs,
            state: watch::Sender::new(first),
        };
        this.refresh().await;
        this
    }

    /// The published state.
    pub(crate) fn state(&self) -> watch::Receiver<MachineState> {
        self.state.subscribe()
    }

    /// Runs until the shutdown: refreshes on each change of the tree, of the conditions, of a shutdown or of a drain, else
    /// every heartbeat.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        loop {
            handle.tick();
            // Cancel-safe: `changed` marks nothing as seen unless it returns; the others hold nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = self.inputs.tree.changed() => if changed.is_err() { return },
                changed = self.inputs.conditions.changed() => if changed.is_err() { return },
                // Nobody sends it without a grace period.
                Ok(()) = self.inputs.shutting_down.changed() => {}
                changed = self.inputs.drain.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(LoopHandle::HEARTBEAT) => {}
            }
            self.refresh().await;
        }
    }

    async fn refresh(&mut self) {
        let root = self.root.clone();
        let read = tokio::task::spawn_blocking(move || host::read_machine(&root));
        let reading = match tokio::time::timeout(READ_TIMEOUT, read).await {
            Ok(Ok(reading)) => reading,
            Ok(Err(_)) => return,
            Err(_) => {
                let text =
                    format!("reading the machine's resources takes longer than {} s", READ_TIMEOUT.as_secs());
                return self.progress.condition("machine", Err(text));
            }
        };
        self.progress.condition("machine", reading.as_ref().map(|_| ()).map_err(|e: &HostError| chain(e)));
        if let Ok(reading) = reading {
            self.publish(&reading);
        }
    }

    fn publish(&mut self, reading: &MachineReading) {
        let max_pods = machine::effective_max_pods(reading, self.max_pods, self.pods_per_core);
        let capacity = machine::capacity(reading, max_pods);
        let allocatable = host::allocatable(&capacity, &self.reserved);
        self.progress.condition("reservations", allocatable.as_ref().map(|_| ()).map_err(|e| chain(e)));
        let (cgroup_version, cgroup_driver, swap_accounting) = match &*self.inputs.tree.borrow_and_update() {
            TreeState::Ready(tree) => {
                (tree.version().as_str(), tree.layout().driver().name(), tree.has_swap_accounting())
            }
            TreeState::Pending(_) | TreeState::Unsupported(_) => ("", "", false),
        };
        let next = MachineState {
            // Without valid reservations nothing is subtracted.
            allocatable: allocatable.unwrap_or_else(|_| capacity.clone()),
            capacity,
            swap: reading.memory.swap,
            conditions: self.inputs.conditions.borrow_and_update().clone(),
            shutting_down: *self.inputs.shutting_down.borrow_and_update(),
            drained: self.inputs.drain.borrow_and_update().is_some(),
            cgroup_version,
            cgroup_driver,
            swap_accounting,
            identity: Arc::clone(&self.state.borrow().identity),
        };
        self.state.send_if_modified(|state| {
            let changed = *state != next;
            if changed {
                *state = next;
            }
            changed
        });
    }
}

/// The value of `kubelet_cgroup_version`.
pub(crate) const fn version_number(version: Version) -> i64 {
    match version {
        Version::V1 => 1,
        Version::V2 => 2,
    }
}
