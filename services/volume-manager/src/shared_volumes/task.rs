//! The task that owns the desired and the actual world.

mod finish;
mod publish;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use keelson_service_kit::{Backoff, CancellationToken, EventRing, LoopHandle, now_unix_nanos};
use keelson_volume_manager_core::csi::paths::may_be_of_driver;
use keelson_volume_manager_core::operations::{Operations, PodUid};
use keelson_volume_manager_core::world::{
    Action, ActualWorld, AttachedBy, DesiredWorld, Learned, Situation, WorldPlan, plan_world,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::labels;
use super::operation::{Attached, Done, Inputs, carry_out, read_node, tear_down};
use super::records::{Placed, PlacedDevice, PodVolume, Records, Refused, ResolvedSpec};
use super::restore::FoundVolumes;
use super::status::Clock;
use super::unknown::UnknownFolders;
use super::{Command, Inbox};
use crate::live_objects::LiveObjects;
use crate::metrics::OperationMetrics;
use crate::mounter::Mounter;
use crate::node_facts::NodeFacts;
use crate::plugins::{DevicePlace, PluginError, VolumePlace};
use crate::selinux::SeLinuxMetrics;
use crate::totals::{PluginTotals, VolumeTotals};
use crate::walks::FsGroupWalks;

/// The back-off of a Node that cannot be read after a restart.
const NODE_RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));

/// What operations work with. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Environment {
    /// The name of this node.
    pub(crate) node_name: String,
    /// The agent's root folder.
    pub(crate) root: PathBuf,
    pub(crate) mounter: Mounter,
    pub(crate) live: LiveObjects,
    pub(crate) events: EventRing,
    pub(crate) metrics: OperationMetrics,
    pub(crate) totals: VolumeTotals,
    /// The control plane attaches volumes.
    pub(crate) has_attach_controller: bool,
    /// There is an API server that knows which volumes are attached.
    pub(crate) has_api_server: bool,
    pub(crate) selinux: SeLinuxMetrics,
}

/// How something that runs beside the task ended.
enum Ended {
    Operation { action: Action, result: Result<Done, PluginError>, elapsed: Duration },
    Forced { place: VolumePlace, result: Result<(), PluginError> },
    NodeRead(Result<Attached, PluginError>),
}

/// What was started of a plan.
#[derive(Default)]
struct Started {
    /// An action has changed what is known already.
    has_changed: bool,
    /// The operations that run now.
    actions: Vec<Action>,
}

/// The task.
pub(crate) struct SharedVolumesTask {
    env: Environment,
    inbox: Inbox,
    node: watch::Receiver<Option<NodeFacts>>,
    desired: DesiredWorld,
    actual: ActualWorld,
    operations: Operations,
    records: Records,
    is_populated: bool,
    started: Instant,
    clock: Clock,
    running: JoinSet<Ended>,
    node_retry: Backoff,
    is_node_read_running: bool,
    /// Who waits until a release is published.
    release_requests: Vec<oneshot::Sender<()>>,
    unknown: UnknownFolders,
    counts: PluginTotals,
}

impl SharedVolumesTask {
    /// The task, with the volumes that were found at startup.
    pub(crate) fn new(
        env: Environment,
        inbox: Inbox,
        node: watch::Receiver<Option<NodeFacts>>,
        found: FoundVolumes,
    ) -> Self {
        let counts = env.totals.count_plugins();
        let mut task = Self {
            env,
            inbox,
            node,
            desired: DesiredWorld::default(),
            actual: ActualWorld::default(),
            operations: Operations::default(),
            records: Records::default(),
            is_populated: false,
            started: Instant::now(),
            clock: Clock { started_unix_nanos: now_unix_nanos() },
            running: JoinSet::new(),
            node_retry: NODE_RETRY,
            is_node_read_running: false,
            release_requests: Vec::new(),
            unknown: UnknownFolders::default(),
            counts,
        };
        found.restore(&mut task.actual, &mut task.records, &mut task.unknown, &task.env.totals);
        task.actual.finish_reading();
        // Nobody else knows what the agent itself has attached.
        if !task.env.has_api_server || !task.env.has_attach_controller {
            task.actual.skip_node_status();
        }
        // Before a pod's worker looks: what is on disk may be in use.
        let plan = task.plan();
        task.publish(&plan);
        task
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Runs until `shutdown`.
    pub(crate) async fn run(mut self, shutdown: CancellationToken, handle: LoopHandle) {
        loop {
            handle.tick();
            let wake_at = self.advance().map(|at| self.started + Duration::from_millis(at));
            let heartbeat = Instant::now() + LoopHandle::HEARTBEAT;
            let deadline = wake_at.map_or(heartbeat, |at| at.min(heartbeat));
            // Cancel-safe: each branch receives one thing completely, or nothing.
            tokio::select! {
                () = shutdown.cancelled() => return,
                command = self.inbox.commands.recv() => match command {
                    Some(command) => self.handle(command),
                    None => return,
                },
                Some(ended) = self.running.join_next() => self.finish(ended.ok()),
                Ok(()) = self.node.changed() => self.note_node(),
                () = tokio::time::sleep_until(deadline) => {}
            }
            // One plan for all that has come together.
            while let Ok(command) = self.inbox.commands.try_recv() {
                self.handle(command);
            }
            while let Some(ended) = self.running.try_join_next() {
                self.finish(ended.ok());
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Want(resolved) => self.want(*resolved),
            Command::WantClaims { pod, names, reply } => self.records.claims.want(pod, names, reply),
            Command::Stop(uid) => {
                self.stop(&uid.into());
                self.retry_refused();
            }
            Command::Release { uid, done } => {
                let pod = PodUid::from(uid);
                self.desired.remove_pod(&pod);
                self.records.release(&pod);
                self.env.selinux.forget(pod.as_str());
                self.retry_refused();
                self.release_requests.push(done);
            }
            Command::RequireRemounts(uid) => self.actual.require_remounts(&self.desired, &uid.into()),
            Command::Populated => self.is_populated = true,
            Command::ForeignRemoved(folder) => drop(self.records.foreign.remove(&folder)),
            Command::DriverRegistered(driver) => {
                self.operations.retain(|volume| !may_be_of_driver(volume.as_str(), &driver));
            }
        }
    }

    fn want(&mut self, resolved: ResolvedSpec) {
        let key = (resolved.name(), resolved.pod());
        self.records.released.remove(&key.1);
        self.records.stopping.remove(&key.1);
        self.add(key, resolved);
    }

    /// Adds a volume to the desired ones, or remembers why the pod cannot have it while others use it.
    fn add(&mut self, key: PodVolume, resolved: ResolvedSpec) {
        let name = (key.clone(), resolved.spec.outer_name.clone());
        let added = labels::check(&self.desired, &resolved, &self.env.selinux).and_then(|()| {
            let added = self.desired.add(resolved.wanted(self.now()));
            added.map_err(|conflict| PluginError::new(conflict.to_string()).for_you())
        });
        match added {
            Ok(()) => {
                self.records.refused.remove(&name);
                if let Some(size) = resolved.spec.claim_size {
                    self.actual.initialise_size(&key.0, size);
                }
                self.actual.reconsider_expansion(&key.0);
                self.records.add_spec(key, resolved);
                self.note_node();
            }
            Err(error) => {
                self.records.refused.insert(name, Refused { resolved, error });
            }
        }
    }

    /// Adds the volumes that pods could not have while others used them.
    fn retry_refused(&mut self) {
        for ((key, _), Refused { resolved, .. }) in std::mem::take(&mut self.records.refused) {
            self.add(key, resolved);
        }
    }

    /// Drops the volumes of a pod of which nothing can be mounted, and sets the others up no more.
    fn stop(&mut self, pod: &PodUid) {
        self.records.stopping.insert(pod.clone());
        self.records.claims.withdraw(pod);
        self.records.refused.retain(|((_, other), _), _| other != pod);
        let Records { specs, placed, errors, .. } = &mut self.records;
        specs.retain(|key, _| {
            let stays = key.1 != *pod || placed.contains_key(key);
            if !stays {
                self.desired.remove(&key.0, &key.1);
                errors.remove(key);
            }
            stays
        });
    }

    /// Feeds the Node's `volumesInUse` back (volumes.md §3.15).
    fn note_node(&mut self) {
        if let Some(node) = &*self.node.borrow_and_update() {
            self.desired.mark_reported(&node.in_use);
        }
    }

    /// Starts what is to be done now and publishes. When something is due, in milliseconds.
    fn advance(&mut self) -> Option<u64> {
        self.read_node_if_needed();
        self.unmount_unknown();
        let mut plan = self.plan();
        // Some actions only change what is known, so what they make possible is planned at once.
        for _ in 0..8 {
            let started = self.start(&plan);
            if !started.has_changed {
                plan.note_started(&self.desired, &started.actions);
                break;
            }
            plan = self.plan();
        }
        self.forget_released();
        self.publish(&plan);
        for done in self.release_requests.drain(..) {
            // The pod's worker may have ended.
            let _ = done.send(());
        }
        let unknown = self.unknown.folders.wake_at(&self.records.released, self.now());
        plan.wake_at.into_iter().chain(unknown).min()
    }

    /// Forgets the pods of which nothing is left.
    fn forget_released(&mut self) {
        let Records { released, stopping, specs, placed, .. } = &mut self.records;
        let has = |pod: &PodUid| placed.keys().any(|(_, other)| other == pod);
        released.retain(|pod| has(pod) || self.unknown.folders.has_pod(pod));
        stopping.retain(|pod| specs.keys().any(|(_, other)| other == pod));
        self.operations
            .retain(|volume| self.desired.volume(volume).is_some() || self.actual.volume(volume).is_some());
    }

    /// Whether an action must not start, whatever the plan says.
    fn is_held(&self, action: &Action) -> bool {
        let Records { released, stopping, .. } = &self.records;
        match action {
            // A volume of a pod that was not released may be in use, whatever is known of the pod's claims now.
            Action::TearDown { pod, .. } => !released.contains(pod),
            // The device may be that of a pod whose folder was not understood.
            Action::UnmountDevice { volume } | Action::Detach { volume } | Action::Forget { volume } => {
                self.unknown.folders.may_use(volume, released)
            }
            Action::VerifyAttached { pod, .. }
            | Action::Attach { pod, .. }
            | Action::MountDevice { pod, .. }
            | Action::SetUp { pod, .. }
            | Action::Resize { pod, .. } => stopping.contains(pod),
            Action::MarkAttached { .. } => false,
        }
    }

    fn plan(&self) -> WorldPlan {
        let node = self.node.borrow();
        let attached = node.as_ref().map(|node| node.attached.keys().cloned().collect()).unwrap_or_default();
        let attached_by = if self.env.has_attach_controller {
            AttachedBy::Controller { attached: &attached }
        } else {
            AttachedBy::Agent
        };
        plan_world(&Situation {
            desired: &self.desired,
            actual: &self.actual,
            operations: &self.operations,
            is_populated: self.is_populated,
            attached_by,
            now: self.now(),
        })
    }

    /// Starts the actions of a plan.
    fn start(&mut self, plan: &WorldPlan) -> Started {
        let mut started = Started::default();
        for action in &plan.actions {
            if self.is_held(action) {
                continue;
            }
            let Some(kind) = action.kind() else {
                self.actual.record_success(action, Learned::default());
                if let Action::Forget { volume } = action {
                    self.records.devices.remove(volume);
                }
                started.has_changed = true;
                continue;
            };
            let now = self.now();
            if self.operations.start(&action.key(), kind, now).is_ok() {
                self.actual.record_start(action);
                self.spawn(action.clone());
                started.actions.push(action.clone());
            }
        }
        started
    }

    fn spawn(&mut self, action: Action) {
        let inputs = self.inputs(&action);
        self.remember_place(&action);
        let env = self.env.clone();
        self.running.spawn(async move {
            let started = Instant::now();
            let work = AssertUnwindSafe(carry_out(&env, &action, &inputs)).catch_unwind().await;
            let result = work.unwrap_or_else(|_| Err(panicked()));
            Ended::Operation { action, result, elapsed: started.elapsed() }
        });
    }

    fn inputs(&self, action: &Action) -> Inputs {
        let volume = action.volume();
        let key = action.pod().map(|pod| (volume.clone(), pod.clone()));
        let actual = self.actual.volume(volume);
        let device_path = actual.and_then(|actual| actual.device_path.clone());
        let device_mount_path = actual.and_then(|actual| actual.device_mount_path.clone());
        let placed = key.as_ref().and_then(|key| self.records.placed.get(key));
        let device = self.records.devices.get(volume).map(|device| {
            let place: DevicePlace = device.place(volume, device_path.clone(), device_mount_path.clone());
            (Arc::clone(&device.plugin), place)
        });
        Inputs {
            resolved: key.as_ref().and_then(|key| self.records.specs.get(key)).cloned(),
            place: placed.map(|placed| (Arc::clone(&placed.plugin), placed.place.clone())),
            device,
            device_path,
            device_mount_path,
            size: actual.and_then(|actual| actual.size),
            had_final_expansion_error: actual.is_some_and(|actual| actual.had_final_expansion_error),
            node: self.node.borrow().clone(),
            walks: Arc::new(FsGroupWalks::default()),
        }
    }

    /// Remembers where an action may leave something, before it starts.
    fn remember_place(&mut self, action: &Action) {
        let Some(pod) = action.pod() else { return };
        let key = (action.volume().clone(), pod.clone());
        let Some(resolved) = self.records.specs.get(&key) else { return };
        let (plugin, place, label) = (Arc::clone(&resolved.plugin), resolved.place(), resolved.label());
        match action {
            Action::SetUp { .. } => {
                let placed =
                    Placed { plugin, place, host_path: None, has_file_labels: false, label: label.clone() };
                // What was found at startup does not say whether the volume has a legacy source.
                self.records.placed.entry(key).or_insert(placed).label = label;
            }
            Action::MountDevice { volume, .. } | Action::Attach { volume, .. } => {
                let (inner_name, is_block) = (place.inner_name, place.is_block);
                let device = PlacedDevice { plugin, inner_name, is_block, label };
                self.records.devices.insert(volume.clone(), device);
            }
            _ => {}
        }
    }

    /// Reads the Node once after a restart, for the volumes that were found (volumes.md §3.6 step 5).
    fn read_node_if_needed(&mut self) {
        if !self.actual.awaits_node_status() || self.is_node_read_running {
            return;
        }
        self.is_node_read_running = true;
        let (env, delay) = (self.env.clone(), self.node_retry.next_delay());
        let is_first = delay <= Duration::from_millis(100);
        self.running.spawn(async move {
            if !is_first {
                tokio::time::sleep(delay).await;
            }
            let read = AssertUnwindSafe(read_node(&env)).catch_unwind().await;
            Ended::NodeRead(read.unwrap_or_else(|_| Err(panicked())).map(|node| node.attached))
        });
    }

    /// Unmounts what was found at startup and is not known (volumes.md §3.16 step 5).
    fn unmount_unknown(&mut self) {
        if !self.is_populated || !self.actual.is_synced() {
            return;
        }
        let now = self.now();
        for (place, plugin) in self.unknown.start(&self.records.released, &self.records.placed, now) {
            let env = self.env.clone();
            self.running.spawn(async move {
                let work = AssertUnwindSafe(tear_down(&env, &*plugin, &place)).catch_unwind().await;
                Ended::Forced { result: work.unwrap_or_else(|_| Err(panicked())), place }
            });
        }
    }
}

/// The error of work that has panicked.
fn panicked() -> PluginError {
    tracing::error!(event = "task_panicked", task = "volume operation", "a task has panicked");
    PluginError::new("the operation ended unexpectedly; the service's log has the cause")
}
