//! The task that owns the desired and the actual world.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use keelson_service_kit::{Backoff, CancellationToken, EventRing, LoopHandle, ObjectRef, now_unix_nanos};
use keelson_volume_manager_core::operations::{Operations, PodUid};
use keelson_volume_manager_core::world::{
    Action, ActualWorld, AttachedBy, DesiredWorld, Learned, MountStep, Situation, WorldPlan, plan_world,
    volumes_in_use,
};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::operation::{Attached, Done, Inputs, carry_out, read_attached};
use super::records::{Placed, PlacedDevice, Records, ResolvedSpec};
use super::restore::FoundVolumes;
use super::status::{Clock, PodStatus, statuses};
use super::{Command, Inbox};
use crate::live_objects::LiveObjects;
use crate::metrics::{Operation, OperationMetrics};
use crate::mounter::Mounter;
use crate::node_facts::NodeFacts;
use crate::plugins::{DevicePlace, Plugin, PluginError, VolumePlace};
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
    /// The control plane attaches volumes.
    pub(crate) has_attach_controller: bool,
    /// There is an API server that knows which volumes are attached.
    pub(crate) has_api_server: bool,
}

/// How something that runs beside the task ended.
enum Ended {
    Operation { action: Action, result: Result<Done, PluginError>, elapsed: Duration },
    Forced { place: VolumePlace, result: Result<(), PluginError> },
    NodeRead(Result<Attached, PluginError>),
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
    /// Pods with a forced unmount that has not succeeded.
    forced: BTreeMap<VolumePlace, Arc<dyn Plugin>>,
}

impl SharedVolumesTask {
    /// The task, with the volumes that were found at startup.
    pub(crate) fn new(
        env: Environment,
        inbox: Inbox,
        node: watch::Receiver<Option<NodeFacts>>,
        found: FoundVolumes,
    ) -> Self {
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
            forced: BTreeMap::new(),
        };
        found.restore(&mut task.actual, &mut task.records, &mut task.forced);
        task.actual.finish_reading();
        if !task.env.has_api_server {
            task.actual.skip_node_status();
        }
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
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Want(resolved) => self.want(*resolved),
            Command::Stop(uid) => self.stop(&uid.into()),
            Command::Release { uid, done } => {
                let pod = PodUid::from(uid);
                self.desired.remove_pod(&pod);
                self.records.release(&pod);
                self.release_requests.push(done);
            }
            Command::RequireRemounts(uid) => self.actual.require_remounts(&self.desired, &uid.into()),
            Command::Populated => self.is_populated = true,
        }
    }

    fn want(&mut self, resolved: ResolvedSpec) {
        let key = (resolved.name(), resolved.pod());
        self.records.released.remove(&key.1);
        match self.desired.add(resolved.wanted(self.now())) {
            Ok(()) => {
                if let Some(size) = resolved.spec.claim_size {
                    self.actual.initialise_size(&key.0, size);
                }
                self.records.specs.insert(key, resolved);
                self.note_node();
            }
            Err(conflict) => {
                let error = PluginError::new(conflict.to_string()).for_you();
                self.records.specs.insert(key.clone(), resolved);
                self.records.errors.insert(key, error);
            }
        }
    }

    /// Drops the volumes of a pod of which nothing can be mounted.
    fn stop(&mut self, pod: &PodUid) {
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
        self.force_unknown();
        let mut plan = self.plan();
        // Some actions only change what is known, so what they make possible is planned at once.
        for _ in 0..8 {
            let instant = self.start(&plan);
            plan = self.plan();
            if !instant {
                break;
            }
        }
        self.forget_released();
        self.publish(&plan);
        for done in self.release_requests.drain(..) {
            // The pod's worker may have ended.
            let _ = done.send(());
        }
        plan.wake_at
    }

    /// Forgets the pods of which nothing is left.
    fn forget_released(&mut self) {
        let Records { released, placed, .. } = &mut self.records;
        let forced = &self.forced;
        released.retain(|pod| {
            placed.keys().any(|(_, other)| other == pod) || forced.keys().any(|place| place.pod == *pod)
        });
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

    /// Starts the actions of a plan. Whether one of them has changed what is known already.
    fn start(&mut self, plan: &WorldPlan) -> bool {
        let mut has_changed = false;
        for action in &plan.actions {
            // A volume of a pod that was not released may be in use, whatever is known of the pod's claims now.
            if let Action::TearDown { pod, .. } = action
                && !self.records.released.contains(pod)
            {
                continue;
            }
            let Some(kind) = action.kind() else {
                self.actual.record_success(action, Learned::default());
                if let Action::Forget { volume } = action {
                    self.records.devices.remove(volume);
                }
                has_changed = true;
                continue;
            };
            let now = self.now();
            if self.operations.start(&action.key(), kind, now).is_ok() {
                self.actual.record_start(action);
                self.spawn(action.clone());
            }
        }
        has_changed
    }

    fn spawn(&mut self, action: Action) {
        let inputs = self.inputs(&action);
        self.remember_place(&action);
        let env = self.env.clone();
        self.running.spawn(async move {
            let started = Instant::now();
            let work = AssertUnwindSafe(carry_out(&env, &action, &inputs)).catch_unwind().await;
            let result = work.unwrap_or_else(|_| {
                tracing::error!(event = "task_panicked", task = "volume operation", "a task has panicked");
                Err(PluginError::new("the operation ended unexpectedly; the service's log has the cause"))
            });
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
            node: self.node.borrow().clone(),
            walks: Arc::new(FsGroupWalks::default()),
        }
    }

    /// Remembers where an action may leave something, before it starts.
    fn remember_place(&mut self, action: &Action) {
        let Some(pod) = action.pod() else { return };
        let key = (action.volume().clone(), pod.clone());
        let Some(resolved) = self.records.specs.get(&key) else { return };
        let (plugin, place) = (Arc::clone(&resolved.plugin), resolved.place());
        match action {
            Action::SetUp { .. } => {
                let placed = Placed { plugin, place, host_path: None };
                self.records.placed.entry(key).or_insert(placed);
            }
            Action::MountDevice { volume, .. } | Action::Attach { volume, .. } => {
                let (inner_name, is_block) = (place.inner_name, place.is_block);
                let device = PlacedDevice { plugin, inner_name, is_block };
                self.records.devices.insert(volume.clone(), device);
            }
            _ => {}
        }
    }

    fn finish(&mut self, ended: Option<Ended>) {
        match ended {
            Some(Ended::Operation { action, result, elapsed }) => {
                self.finish_operation(&action, result, elapsed)
            }
            Some(Ended::Forced { place, result }) => self.finish_forced(&place, result),
            Some(Ended::NodeRead(result)) => self.finish_node_read(result),
            None => {}
        }
    }

    fn finish_operation(&mut self, action: &Action, result: Result<Done, PluginError>, elapsed: Duration) {
        self.count(action, result.is_ok(), elapsed);
        let now = self.now();
        let key = action.pod().map(|pod| (action.volume().clone(), pod.clone()));
        match result {
            Ok(Done { learned, host_path }) => {
                self.operations.finish(&action.key(), Ok(()), now);
                self.actual.record_success(action, learned);
                let Some(key) = key else { return };
                self.records.errors.remove(&key);
                match action {
                    Action::SetUp { .. } => {
                        if let Some(placed) = self.records.placed.get_mut(&key) {
                            placed.host_path = host_path;
                        }
                    }
                    Action::TearDown { .. } => {
                        self.records.placed.remove(&key);
                    }
                    _ => {}
                }
            }
            Err(error) => {
                self.report(action, &error);
                self.operations.finish(&action.key(), Err(error.message.clone()), now);
                self.actual.record_failure(action, error.class);
                let Some(key) = key else { return };
                let is_left =
                    self.actual.volume(&key.0).is_some_and(|volume| volume.pods.contains_key(&key.1));
                if matches!(action, Action::SetUp { .. }) && !is_left {
                    self.records.placed.remove(&key);
                }
                if self.records.specs.contains_key(&key) {
                    self.records.errors.insert(key, error);
                }
            }
        }
    }

    /// Logs an error, and records one of a mount as an event of the pod (volumes.md §3.9).
    fn report(&self, action: &Action, error: &PluginError) {
        let (volume, pod) = (action.volume(), action.pod());
        let uid = pod.map(PodUid::as_str).unwrap_or_default();
        tracing::warn!(
            event = "volume_operation_failed",
            volume = volume.as_str(),
            uid,
            "{} of a volume failed: {error}",
            action.kind().map(|kind| kind.to_string()).unwrap_or_default()
        );
        let step = match action {
            Action::MountDevice { .. } => error.step.unwrap_or(MountStep::MountDevice),
            Action::SetUp { .. } => error.step.unwrap_or(MountStep::SetUp),
            _ => return,
        };
        let Some(resolved) = pod.and_then(|pod| self.records.spec(volume, pod)) else { return };
        let spec = &resolved.spec;
        let object = ObjectRef::pod(&spec.pod.namespace, &spec.pod.name, &spec.pod.uid);
        let text = format!("MountVolume.{step} for volume \"{}\" : {error}", spec.inner_name);
        self.env.events.warning(object, "FailedMount", text);
    }

    fn count(&self, action: &Action, succeeded: bool, elapsed: Duration) {
        let operation = match action {
            Action::SetUp { .. } | Action::MountDevice { .. } => Operation::Mount,
            Action::TearDown { .. } => Operation::Unmount,
            _ => return,
        };
        let key = action.pod().map(|pod| (action.volume().clone(), pod.clone()));
        let plugin = key
            .as_ref()
            .and_then(|key| self.records.placed.get(key))
            .map(|placed| placed.place.plugin.clone())
            .unwrap_or_else(|| self.plugin_name(action));
        self.env.metrics.ended(plugin, operation, succeeded, elapsed);
    }

    fn plugin_name(&self, action: &Action) -> String {
        let device = self.records.devices.get(action.volume());
        device.map(|device| device.plugin.name().to_owned()).unwrap_or_default()
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
            Ended::NodeRead(read_attached(&env).await)
        });
    }

    fn finish_node_read(&mut self, result: Result<Attached, PluginError>) {
        self.is_node_read_running = false;
        match result {
            Ok(attached) => {
                self.node_retry.reset();
                self.actual.apply_node_status(&attached);
            }
            Err(error) => tracing::info!("the volumes found at startup wait for the Node: {error}"),
        }
    }

    /// Unmounts once what was found at startup and is not known, if no pod wants it (volumes.md §3.16 step 5).
    fn force_unknown(&mut self) {
        for failed in self.actual.take_failed(&self.desired, self.is_populated) {
            let found = self.forced.iter().find(|(place, _)| {
                place.pod == failed.pod
                    && place.inner_name == failed.inner_name
                    && place.plugin == failed.plugin
            });
            let Some((place, plugin)) = found.map(|(place, plugin)| (place.clone(), Arc::clone(plugin)))
            else {
                continue;
            };
            if !self.records.released.contains(&place.pod) {
                self.actual.add_failed(failed);
                continue;
            }
            let env = self.env.clone();
            self.running.spawn(async move {
                let result = super::operation::tear_down(&env, &*plugin, &place).await;
                Ended::Forced { place, result }
            });
        }
    }

    fn finish_forced(&mut self, place: &VolumePlace, result: Result<(), PluginError>) {
        match result {
            Ok(()) => {
                self.forced.remove(place);
            }
            Err(error) => tracing::warn!(
                event = "forced_unmount_failed",
                uid = place.pod.as_str(),
                volume = place.inner_name,
                plugin = place.plugin,
                "cannot remove a volume that was found at startup: {error}"
            ),
        }
    }

    fn publish(&self, plan: &WorldPlan) {
        let mut new = statuses(&self.desired, &self.actual, &self.records, plan, self.clock);
        for place in self.forced.keys() {
            new.entry(place.pod.clone()).or_default().may_have_mounts = true;
        }
        let mut pods = self.inbox.pods.lock();
        for pod in new.keys() {
            pods.entry(pod.as_str().to_owned()).or_default();
        }
        pods.retain(|uid, sender| {
            let status = new.remove(&PodUid::from(uid.as_str())).unwrap_or_default();
            let is_used = status != PodStatus::default() || sender.receiver_count() > 0;
            sender.send_if_modified(|old| {
                let is_new = *old != status;
                *old = status;
                is_new
            });
            is_used
        });
        drop(pods);
        let in_use = volumes_in_use(&self.desired, &self.actual, &self.operations);
        self.inbox.in_use.send_if_modified(|old| {
            let is_new = *old != in_use;
            *old = in_use;
            is_new
        });
    }
}
