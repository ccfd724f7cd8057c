//! The pods that pod-sync knows, by UID. Every change of a pod's state goes through [`PodRegistry::apply`] and the core's `step`.
//!
//! No lock is held over an await. Locks are taken in this order: `pods` first, then any one of the others; `unclaimed` before
//! `port_holders`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_kube_model::Pod;
use keelson_pod_sync_core::Moment;
use keelson_pod_sync_core::admission::Denial;
use keelson_pod_sync_core::backoff::Backoffs;
use keelson_pod_sync_core::explain::{Cause, PodSteps, StepName};
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::ordering::{StaticPodStarts, may_start};
use keelson_pod_sync_core::worker::{Input, SyncOutcome, Transition, UpdateKind, WorkerPhase, step};
use keelson_service_kit::{Context, now_unix_nanos};
use tokio::time::Instant;

use crate::node::NodeState;
use crate::state::desired_state::DesiredState;
use crate::state::observed::{Observed, is_older, same};
use crate::state::pod_state::{DesiredPod, PodState};
use crate::state::store::{Record, Store};

/// Every pod, and what pods share: names, ports, back-offs.
#[derive(Debug)]
pub struct PodRegistry {
    /// Configuration and progress.
    pub context: Context,
    /// Facts about the node.
    pub node: Arc<NodeState>,
    /// What the other services are to hold of each pod.
    pub desired_state: DesiredState,
    /// When this process started.
    pub started_unix_nanos: i64,
    store: Option<Store>,
    pods: Mutex<BTreeMap<String, PodState>>,
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

/// What a worker does after it has waited for the removal of an earlier incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterCleanup {
    /// It ends: the pod does not wait for a removal any more, or the service shuts down.
    Stop,
    /// The pod was removed meanwhile and has to be forgotten.
    Forget,
    /// It continues: the pod starts, or something that still runs of the earlier incarnation is ended first.
    Continue,
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
        let max_backoff =
            i64::try_from(context.config.pods.max_restart_backoff_ms / 1000).unwrap_or(i64::MAX);
        let node = Arc::new(NodeState::new(&context));
        Self {
            desired_state: DesiredState::new(context.clone(), Arc::clone(&node)),
            node,
            started_unix_nanos: now_unix_nanos(),
            store,
            pods: Mutex::default(),
            order: Mutex::default(),
            unclaimed: Mutex::default(),
            port_holders: Mutex::default(),
            backoff: Mutex::new(Backoffs::new(max_backoff)),
            context,
        }
    }

    /// Now, for the core.
    pub fn moment(&self) -> Moment {
        Moment { now_unix_nanos: now_unix_nanos(), agent_started_unix_nanos: self.started_unix_nanos }
    }

    /// Reads or changes one pod, under the lock. `None`: the UID is unknown.
    pub fn with<T>(&self, uid: &str, access: impl FnOnce(&mut PodState) -> T) -> Option<T> {
        lock(&self.pods).get_mut(uid).map(access)
    }

    /// Like [`PodRegistry::with`], if this is still the same incarnation of the UID.
    pub fn with_incarnation<T>(
        &self,
        uid: &str,
        incarnation: u64,
        access: impl FnOnce(&mut PodState) -> T,
    ) -> Option<T> {
        lock(&self.pods).get_mut(uid).filter(|e| e.incarnation == incarnation).map(access)
    }

    /// Calls `visit` with every pod, under the lock.
    pub fn for_each(&self, visit: impl FnMut(&PodState)) {
        lock(&self.pods).values().for_each(visit);
    }

    /// Puts a state in place for a test.
    #[cfg(test)]
    pub fn insert(&self, uid: &str, state: PodState) {
        lock(&self.pods).insert(uid.to_owned(), state);
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
        lock(&self.pods).insert(uid, PodState::restored(record));
    }

    /// Applies an input to a UID: the core decides, and the state is changed and stored. `None`: the input is outdated.
    pub fn apply(&self, uid: &str, input: &Input<'_>) -> Option<Applied> {
        self.apply_and(uid, input, None, |_| {})
    }

    /// A source has sent the pod. In one step, the core decides, the pod and its observation are stored, and the desired state of the other
    /// services is set.
    pub fn set_desired(
        &self,
        desired: &DesiredPod,
        kind: UpdateKind,
        observed: Option<Observed>,
    ) -> Option<Applied> {
        let pod = &desired.pod;
        let input = Input::Update { kind, pod, observed: observed.as_deref() };
        self.apply_and(pod.metadata.uid.as_str(), &input, None, |state| {
            state.set_desired(desired.clone());
            (state.restored, state.quarantined) = (false, false);
            if let Some(observed) = observed.clone() {
                // It may lack what an earlier process has started.
                state.freshness.invalidate();
                state.observed = observed;
            }
            self.desired_state.update(state);
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
                state.observed = Arc::new((*observed).clone());
                state.port_holder = lock(&self.port_holders).remove(uid);
            }
            pods.insert(uid.to_owned(), state);
        }
        let state = pods.get_mut(uid)?;
        let changed = state.worker != transition.state;
        state.worker = transition.state.clone();
        if let Some(operation) = Operation::of(input).filter(|_| transition.work.is_some()) {
            state.pending.add(operation, Instant::now());
        }
        if transition.cancel_running {
            std::mem::take(&mut state.cancel).cancel();
            state.quarantined = false;
        }
        also(state);
        if !matches!(input, Input::Outcome { .. } | Input::Started) {
            state.wake.notify_one();
        }
        let freed = changed && matches!(state.worker.phase, WorkerPhase::Terminated | WorkerPhase::Finished);
        drop(pods);
        if freed {
            self.wake_admission_holds();
        }
        if changed || is_new {
            self.save(uid);
        }
        Some(Applied { transition, is_new })
    }

    /// Removes this incarnation of a UID: the other services drop it. `also` runs in the same step. If a source has sent the UID again
    /// meanwhile, a new incarnation is put in its place, which waits until the runtime holds nothing of the old one. Returns whether
    /// there is one.
    pub fn forget(&self, uid: &str, incarnation: u64, also: impl FnOnce()) -> bool {
        let (woken, restarts) = {
            let mut pods = lock(&self.pods);
            if pods.get(uid).is_none_or(|e| e.incarnation != incarnation) {
                return false;
            }
            let Some(state) = pods.remove(uid) else { return false };
            state.cancel.cancel();
            state.wake.notify_one();
            // All under this lock: a source that sends the UID again finds the whole old incarnation or nothing of it.
            self.desired_state.sets.forget(uid);
            also();
            lock(&self.backoff).forget_pod(&uid.into());
            let woken = lock(&self.order).release_all(&uid.into());
            if state.has_leftovers() || state.freshness.stale().is_some() {
                let mut unclaimed = lock(&self.unclaimed);
                unclaimed.entry(uid.to_owned()).or_insert_with(|| Arc::clone(&state.observed));
            }
            let sent_again = state.worker.restart_requested && state.worker.desired;
            let desired = state.desired.filter(|_| sent_again);
            let restarts = desired.is_some();
            if let Some(desired) = desired {
                pods.insert(uid.to_owned(), PodState::awaiting_cleanup(uid, desired, &self.moment()));
            }
            (woken, restarts)
        };
        for uid in woken {
            self.wake(uid.as_str());
        }
        self.wake_admission_holds();
        if restarts {
            self.save(uid);
        } else if let Some(store) = &self.store {
            store.remove_unless(uid, || self.with(uid, |_| ()).is_some());
        }
        restarts
    }

    /// A source has sent a pod. If the runtime still holds something of an earlier incarnation of its UID, which would be taken for its
    /// own, the pod has to wait for the removal. Returns false if nothing is left, or if the earlier incarnation has not ended here.
    pub fn await_cleanup(&self, desired: &DesiredPod) -> bool {
        let uid = desired.pod.metadata.uid.as_str();
        {
            let mut pods = lock(&self.pods);
            match pods.get_mut(uid) {
                Some(state) if state.awaits_cleanup => state.desired = Some(desired.clone()),
                Some(_) => return false,
                None => {
                    // It stays in `unclaimed`: the pod may be removed and sent once more before the cleanup is done.
                    if lock(&self.unclaimed).get(uid).is_none_or(is_live) {
                        return false;
                    }
                    let state = PodState::awaiting_cleanup(uid, desired.clone(), &self.moment());
                    pods.insert(uid.to_owned(), state);
                }
            }
        }
        self.save(uid);
        true
    }

    /// The runtime holds nothing of the earlier incarnation any more: a pod that waited for that starts. `started` is called in the
    /// same step.
    pub fn restart_after_cleanup(
        &self,
        uid: &str,
        incarnation: u64,
        started: impl FnOnce(&Pod),
    ) -> AfterCleanup {
        let at = self.moment();
        let starts = self.with_incarnation(uid, incarnation, |state| {
            let desired = state.desired.clone().filter(|_| std::mem::take(&mut state.awaits_cleanup))?;
            let input = Input::Update { kind: UpdateKind::Create, pod: &desired.pod, observed: None };
            let transition = step(None, &input, &at);
            state.worker = transition.state;
            state.steps = PodSteps::default();
            (state.stopped, state.released) = (false, false);
            self.desired_state.update(state);
            lock(&self.unclaimed).remove(uid);
            if transition.work.is_some() {
                state.pending.add(Operation::Create, Instant::now());
                started(&desired.pod);
            }
            Some(transition.work.is_some())
        });
        match starts.flatten() {
            None => AfterCleanup::Stop,
            Some(false) => AfterCleanup::Forget,
            Some(true) => {
                self.save(uid);
                AfterCleanup::Continue
            }
        }
    }

    /// Something of the earlier incarnation has started to run after its end: it is ended as an orphan is, and then the pod waits for the
    /// removal again.
    pub fn end_remainder(&self, uid: &str, incarnation: u64, remainder: Observed) {
        let at = self.moment();
        self.with_incarnation(uid, incarnation, |state| {
            if !std::mem::take(&mut state.awaits_cleanup) {
                return;
            }
            let mut worker = step(None, &Input::ObservedOrphan { observed: &remainder }, &at).state;
            (worker.restart_requested, worker.desired) = (true, true);
            (state.worker, state.observed) = (worker, remainder);
        });
        self.save(uid);
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

    /// Judges a pod against those that hold resources of the node, and gives it none.
    pub fn check_admission(
        &self,
        uid: &str,
        check: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let pods = lock(&self.pods);
        check(&mut self.admitted_pods(&pods, uid).iter().map(|pod| &**pod))
    }

    /// Judges a pod against those that hold resources of the node, and admits it unless it is denied. Both in one step, so that of two
    /// pods that want the same only one gets it.
    pub fn admit_pod(
        &self,
        uid: &str,
        pod: &Pod,
        check: impl FnOnce(&mut dyn Iterator<Item = &Pod>) -> Option<Denial>,
    ) -> Option<Denial> {
        let mut pods = lock(&self.pods);
        let denial = check(&mut self.admitted_pods(&pods, uid).iter().map(|pod| &**pod));
        if denial.is_none()
            && let Some(state) = pods.get_mut(uid)
        {
            state.admit(pod);
            if state.resize_refused {
                // The other services were sent the resources that the source asked for during admission.
                self.desired_state.update(state);
            }
        }
        denial
    }

    /// The pods that hold resources of the node, without `uid`.
    fn admitted_pods(&self, pods: &BTreeMap<String, PodState>, uid: &str) -> Vec<Arc<Pod>> {
        let holding = pods.iter().filter(|(other, state)| *other != uid && state.holds_resources());
        let mut admitted: Vec<Arc<Pod>> = holding.filter_map(|(_, state)| state.admission_pod()).collect();
        let unclaimed = lock(&self.unclaimed);
        let live = |uid: &String| unclaimed.get(uid).is_some_and(is_live);
        let port_holders = lock(&self.port_holders);
        admitted.extend(port_holders.iter().filter(|(uid, _)| live(uid)).map(|(_, pod)| Arc::clone(pod)));
        admitted
    }

    /// The pod left its source while this process was down: what runs of it is an orphan, which will be ended. Until then it
    /// keeps its host ports. `also` as in [`PodRegistry::forget`], whose answer this returns.
    pub fn forget_as_orphan(
        &self,
        uid: &str,
        incarnation: u64,
        observed: Observed,
        also: impl FnOnce(),
    ) -> bool {
        if let Some(holder) =
            self.with_incarnation(uid, incarnation, |state| state.port_holder.take()).flatten()
        {
            lock(&self.port_holders).insert(uid.to_owned(), holder);
        }
        let restarts = self.forget(uid, incarnation, also);
        lock(&self.unclaimed).insert(uid.to_owned(), observed);
        restarts
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
        unclaimed || lock(&self.pods).values().any(|e| e.desired.is_none() && holds(&e.observed))
    }

    /// Resources have become free: every pod that waits for admission asks again.
    fn wake_admission_holds(&self) {
        let pods = lock(&self.pods);
        pods.values().filter(|e| e.admission_hold.is_some()).for_each(|e| e.wake.notify_one());
    }

    /// Wakes a worker.
    pub fn wake(&self, uid: &str) {
        self.with(uid, |state| state.wake.notify_one());
    }

    /// Records an observation of the runtime, unless a newer one is known, and wakes the worker if it shows a change. Returns
    /// whether the UID is known.
    pub fn record_observation(&self, uid: &str, observed: Observed) -> bool {
        self.with(uid, |state| {
            if state.awaits_cleanup {
                // It shows the earlier incarnation; the worker reads whether anything of that is left.
                state.wake.notify_one();
                return;
            }
            if is_older(&observed, &state.observed) {
                return;
            }
            let changed = !same(&state.observed, &observed);
            state.observed = observed;
            state.gone = false;
            if changed {
                state.wake.notify_one();
                state.probes.wake();
            }
        })
        .is_some()
    }

    /// Stores the record of a UID as it is now, if there is a store.
    pub fn save(&self, uid: &str) {
        let Some(store) = &self.store else { return };
        // The store is locked before the state is read, so that the newest record is written last.
        let result = store.put_latest(|| self.with(uid, |state| state.record(uid, &lock(&self.backoff))));
        self.context
            .progress
            .condition("state folder", result.map_err(|e| keelson_service_kit::status::chain(&e)));
    }

    /// Stores the record of a UID if one of its back-offs has advanced since it was stored last.
    pub fn save_backoff(&self, uid: &str) {
        let last = self.backoff().last_advanced_unix_nanos(&uid.into());
        if self.with(uid, |state| state.stored_backoff_advance != last) == Some(true) {
            self.save(uid);
        }
    }

    /// Ends the back-offs of a UID, because an operator asked to retry now.
    pub fn retry(&self, uid: &str) {
        self.backoff().forget_pod(&uid.into());
        self.save_backoff(uid);
        self.with(uid, |state| {
            state.quarantined = false;
            state.wake.notify_one();
        });
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
