//! The pods that pod-sync knows, by UID. Every change of a pod's state goes through [`PodRegistry::apply`] and the core's `step`.
//!
//! No lock is held over an await. Locks are taken in this order: `pods` first, then any one of the others; `unclaimed` before
//! `port_holders`.

mod admission;
mod incarnations;
mod resize;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::Pod;
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::backoff::Backoffs;
use keelson_pod_sync_core::explain::{Cause, PodSteps, Step, StepName};
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::ordering::{StaticPodStarts, may_start};
use keelson_pod_sync_core::worker::{Input, SyncOutcome, Transition, UpdateKind, WorkerPhase, step};
use keelson_service_kit::{Context, now_unix_nanos};

use crate::node::NodeState;
use crate::state::adopted_uids::AdoptedUids;
use crate::state::desired_state::DesiredState;
use crate::state::observed::Observed;
use crate::state::pod_state::{Awaited, DesiredPod, PodState};
use crate::state::resize_queue::{ResizeQueue, ResizeTrigger};
use crate::state::store::{Record, Store};

pub use incarnations::AfterCleanup;
pub use resize::Pending;

/// Every pod, and what pods share: names, ports, back-offs.
#[derive(Debug)]
pub struct PodRegistry {
    /// Configuration and progress.
    pub context: Context,
    /// Facts about the node.
    pub node: Arc<NodeState>,
    /// What the other services are to hold of each pod.
    pub desired_state: DesiredState,
    /// The UIDs of static pods that a kubelet had started.
    pub adopted: AdoptedUids,
    /// When this process started.
    pub started_unix_nanos: i64,
    /// Wakes the loop that decides on resizes.
    pub resizes: ResizeQueue,
    store: Option<Store>,
    // Boxed: a map keeps room for more entries than it has, and a `PodState` is large.
    pods: Mutex<BTreeMap<String, Box<PodState>>>,
    order: Mutex<StaticPodStarts>,
    /// What the runtime holds of UIDs that are not in `pods`.
    unclaimed: Mutex<BTreeMap<String, Observed>>,
    /// For UIDs in `unclaimed`: a pod with the host ports that were recorded for the UID.
    port_holders: Mutex<BTreeMap<String, Arc<Pod>>>,
    backoff: Mutex<Backoffs>,
}

/// What [`PodRegistry::apply`] has changed.
#[derive(Debug, PartialEq, Eq)]
pub struct Applied {
    /// The core's decision.
    pub transition: Transition,
    /// The UID was not known before; it needs a worker.
    pub is_new: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_live(observed: &Observed) -> bool {
    observed.anything_running() || observed.any_sandbox_ready()
}

impl PodRegistry {
    /// Without a pod yet.
    pub fn new(context: Context, store: Option<Store>) -> Self {
        let seconds = |ms: u64| i64::try_from(ms / 1000).unwrap_or(i64::MAX);
        let pods = &context.config.pods;
        let backoffs =
            Backoffs::new(seconds(pods.initial_restart_backoff_ms), seconds(pods.max_restart_backoff_ms));
        let node = Arc::new(NodeState::new(&context));
        Self {
            desired_state: DesiredState::new(context.clone(), Arc::clone(&node)),
            node,
            adopted: AdoptedUids::default(),
            started_unix_nanos: now_unix_nanos(),
            resizes: ResizeQueue::default(),
            store,
            pods: Mutex::default(),
            order: Mutex::default(),
            unclaimed: Mutex::default(),
            port_holders: Mutex::default(),
            backoff: Mutex::new(backoffs),
            context,
        }
    }

    /// Now, for the core.
    pub fn moment(&self) -> Moment {
        Moment { now_unix_nanos: now_unix_nanos(), agent_started_unix_nanos: self.started_unix_nanos }
    }

    /// Reads one pod, under the lock. `None`: the UID is unknown.
    pub fn read<T>(&self, uid: &str, access: impl FnOnce(&PodState) -> T) -> Option<T> {
        lock(&self.pods).get(uid).map(|state| access(state))
    }

    /// Reads or changes one pod, under the lock. `None`: the UID is unknown.
    pub fn with<T>(&self, uid: &str, access: impl FnOnce(&mut PodState) -> T) -> Option<T> {
        lock(&self.pods).get_mut(uid).map(|state| access(state))
    }

    /// Like [`PodRegistry::with`], if this is still the same incarnation of the UID.
    pub fn with_incarnation<T>(
        &self,
        uid: &str,
        incarnation: u64,
        access: impl FnOnce(&mut PodState) -> T,
    ) -> Option<T> {
        let mut pods = lock(&self.pods);
        pods.get_mut(uid).filter(|e| e.incarnation == incarnation).map(|state| access(state))
    }

    /// Calls `visit` with every pod, under the lock.
    pub fn for_each(&self, mut visit: impl FnMut(&PodState)) {
        lock(&self.pods).values().for_each(|state| visit(state));
    }

    /// Puts a state in place for a test.
    #[cfg(test)]
    pub fn insert(&self, uid: &str, state: PodState) {
        lock(&self.pods).insert(uid.to_owned(), Box::new(state));
    }

    /// Sets what the other services are to hold of a pod in its present state.
    pub fn update_desired_state(&self, uid: &str) {
        self.read(uid, |state| self.desired_state.update(state));
    }

    /// Like [`PodRegistry::update_desired_state`], if this is still the same incarnation of the UID.
    pub fn update_desired_state_of(&self, uid: &str, incarnation: u64) {
        self.with_incarnation(uid, incarnation, |state| self.desired_state.update(state));
    }

    /// The last observation of a pod.
    pub fn observed(&self, uid: &str) -> Option<Observed> {
        self.read(uid, |state| Arc::clone(&state.runtime.observed))
    }

    /// The crash-loop back-offs.
    pub fn backoff(&self) -> MutexGuard<'_, Backoffs> {
        lock(&self.backoff)
    }

    /// Every known UID.
    pub fn uids(&self) -> Vec<String> {
        lock(&self.pods).keys().cloned().collect()
    }

    /// How many workers are in each phase.
    pub fn phases(&self) -> BTreeMap<&'static str, i64> {
        let mut counts = BTreeMap::new();
        for state in lock(&self.pods).values() {
            *counts.entry(state.worker.phase.as_str()).or_insert(0) += 1;
        }
        counts
    }

    /// Restores a pod from the record of an earlier process.
    pub fn restore(&self, record: Record) {
        let (uid, at) = (record.uid.clone(), self.moment());
        for stored in &record.backoffs {
            self.backoff().restore(stored.key(&uid), stored.entry, &at);
        }
        if let Some(source_uid) = &record.source_uid {
            self.adopted.insert(source_uid.clone(), uid.clone());
        }
        lock(&self.pods).insert(uid, Box::new(PodState::restored(record)));
    }

    /// Applies an input to a UID: the core decides, and the state is changed and stored. `None`: the input is outdated.
    pub fn apply(&self, uid: &str, input: &Input<'_>) -> Option<Applied> {
        self.apply_and(uid, input, None, |_| {})
    }

    /// A source has sent the pod. In one step, the core decides, the pod and its observation are stored, and the desired state of the other
    /// services is set.
    pub fn set_desired(
        &self,
        desired: &Arc<DesiredPod>,
        kind: UpdateKind,
        observed: Option<Observed>,
    ) -> Option<Applied> {
        let pod = &desired.pod;
        let input = Input::Update { kind, pod, observed: observed.as_deref() };
        self.apply_and(pod.metadata.uid.as_str(), &input, None, |state| {
            state.set_desired(Arc::clone(desired));
            state.end_wait(Awaited::Source);
            state.inbox.end_quarantine();
            if let Some(observed) = observed.clone() {
                // It may lack what an earlier process has started.
                state.runtime.freshness.invalidate();
                state.runtime.observed = observed;
            }
            self.desired_state.update(state);
            if state.admission.wanted.is_some() {
                self.resizes.trigger(ResizeTrigger::PodUpdated);
            }
        })
    }

    /// Applies the outcome of a turn of this incarnation. If the phase has changed since the turn began, the outcome counts as cancelled:
    /// it says nothing about the new phase.
    pub fn apply_outcome(
        &self,
        uid: &str,
        (incarnation, turn_phase): (u64, WorkerPhase),
        outcome: SyncOutcome,
        pod: Option<&Pod>,
    ) -> Option<Transition> {
        let input = Input::Outcome { outcome, pod };
        self.apply_and(uid, &input, Some((incarnation, turn_phase)), |_| {}).map(|applied| applied.transition)
    }

    fn apply_and(
        &self,
        uid: &str,
        input: &Input<'_>,
        turn: Option<(u64, WorkerPhase)>,
        also: impl FnOnce(&mut PodState),
    ) -> Option<Applied> {
        let at = self.moment();
        let mut pods = lock(&self.pods);
        let before = pods.get(uid).map(|e| e.worker.clone());
        if turn.is_some_and(|(incarnation, _)| pods.get(uid).is_none_or(|e| e.incarnation != incarnation)) {
            return None;
        }
        let cancelled = Input::Outcome { outcome: SyncOutcome::Cancelled, pod: None };
        let outdated = turn.is_some_and(|(_, phase)| before.as_ref().is_some_and(|b| b.phase != phase));
        let input = if outdated { &cancelled } else { input };
        let is_new = before.is_none();
        let transition = step(before.as_ref(), input, &at);
        if is_new && (transition.forget || transition.work.is_none()) {
            return Some(Applied { transition, is_new: false });
        }
        if is_new {
            let mut state = PodState::new(uid, transition.state.clone());
            if let Input::ObservedOrphan { observed } = input {
                state.runtime.observed = Arc::new((*observed).clone());
                state.admission.port_holder = lock(&self.port_holders).remove(uid);
            }
            pods.insert(uid.to_owned(), Box::new(state));
        }
        let state = pods.get_mut(uid)?;
        let changed = state.worker != transition.state;
        state.worker = transition.state.clone();
        if let Some(operation) = Operation::of(input).filter(|_| transition.work.is_some()) {
            state.inbox.trigger(operation);
        }
        if transition.cancel_running {
            state.inbox.cancel_turn();
        }
        also(state);
        if state.worker.phase != WorkerPhase::Sync {
            // What ends is not resized.
            state.steps.clear(StepName::Resize, "");
        }
        if !matches!(input, Input::Outcome { .. } | Input::Started) {
            state.inbox.wake();
        }
        let freed = changed && matches!(state.worker.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        drop(pods);
        if freed {
            self.wake_admission_holds();
            self.resizes.trigger(ResizeTrigger::PodTerminated);
        }
        if changed || is_new {
            self.save(uid);
        }
        Some(Applied { transition, is_new })
    }

    /// Whether this pod may start now: one per full name, where the source does not see to that.
    pub fn may_start(&self, pod: &Pod) -> bool {
        !pod.starts_in_turn() || may_start(&pod.full_name(), &pod.uid(), &mut lock(&self.order))
    }

    /// A pod that runs already, at the start of this process, holds its name.
    pub fn adopt_name(&self, pod: &Pod) -> bool {
        !pod.starts_in_turn() || lock(&self.order).adopt(&pod.full_name(), &pod.uid())
    }

    /// The pod has ended: the next one that waits for its name is woken.
    pub fn release_name(&self, pod: &Pod) {
        let next = lock(&self.order).release(&pod.full_name(), &pod.uid());
        if let Some(uid) = next {
            self.wake(uid.as_str());
        }
    }

    /// What the runtime holds of UIDs that are not known here.
    pub fn unclaimed(&self) -> MutexGuard<'_, BTreeMap<String, Observed>> {
        lock(&self.unclaimed)
    }

    /// Whether something that no source names, or names any more, still runs under the name of this pod.
    pub fn orphan_holds_name(&self, pod: &Pod) -> bool {
        let meta = &pod.metadata;
        let holds = |o: &Observed| {
            o.name == meta.name && o.namespace == meta.namespace && o.uid.as_str() != meta.uid && is_live(o)
        };
        if !pod.starts_in_turn() {
            return false;
        }
        let unclaimed = self.unclaimed().values().any(holds);
        unclaimed || lock(&self.pods).values().any(|e| e.desired.is_none() && holds(&e.runtime.observed))
    }

    /// Wakes a worker.
    pub fn wake(&self, uid: &str) {
        self.with(uid, |state| state.inbox.wake());
    }

    /// Records an observation of the runtime, unless a newer one is known, and wakes the worker if it shows a change. Returns
    /// whether the UID is known.
    pub fn record_observation(&self, uid: &str, observed: Observed) -> bool {
        self.with(uid, |state| {
            if state.awaits_cleanup() {
                // It shows the earlier incarnation; the worker reads whether anything of that is left.
                state.inbox.wake();
                return;
            }
            if state.runtime.record(observed) {
                state.inbox.wake();
                state.probes.wake();
            }
        })
        .is_some()
    }

    /// Stores the record of a UID as it is now, if there is a store.
    pub fn save(&self, uid: &str) {
        let Some(store) = &self.store else { return };
        // The store is locked before the state is read, so that the newest record is written last.
        let result = store.put_latest(|| {
            let mut record = self.read(uid, |state| state.record(uid, &lock(&self.backoff)))?;
            record.source_uid = self.adopted.source_of(uid);
            Some(record)
        });
        self.context
            .progress
            .condition("state folder", result.map_err(|e| keelson_service_kit::status::chain(&e)));
    }

    /// Stores the record of a UID if one of its back-offs has advanced since it was stored last.
    pub fn save_backoff(&self, uid: &str) {
        let Some(store) = &self.store else { return };
        let last = self.backoff().last_advanced_unix_nanos(&uid.into());
        if last.is_some_and(|last| !store.has_backoff_advance(uid, last)) {
            self.save(uid);
        }
    }

    /// Ends the back-offs of a UID, because an operator asked to retry now.
    pub fn retry(&self, uid: &str) {
        let ended = self.backoff().forget_pod(&uid.into());
        if ended {
            self.save(uid);
        }
        self.with(uid, |state| {
            state.inbox.end_quarantine();
            state.inbox.wake();
        });
    }

    /// The steps of a pod's life and their summary, for `ExplainPod`. `None`: the UID is unknown.
    pub fn explain(&self, uid: &str) -> Option<(Vec<Step>, String)> {
        let at = self.moment();
        self.read(uid, |state| state.steps.explain(&at))
    }

    /// Updates the steps of the pod's life that `ExplainPod` shows.
    pub fn update_steps<T>(&self, uid: &str, update: impl FnOnce(&mut PodSteps, &Moment) -> T) -> Option<T> {
        let at = self.moment();
        self.with(uid, |state| update(&mut state.steps, &at))
    }

    /// Sets the state of one step. Returns whether it has changed.
    pub fn set_step(&self, uid: &str, step: StepName, subject: &str, cause: Cause) -> bool {
        self.update_steps(uid, |steps, at| steps.set(step, subject, cause, at)) == Some(true)
    }
}
