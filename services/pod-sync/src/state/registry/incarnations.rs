//! Successive pods of the same UID: the removal of one, and the next that waits until the runtime holds nothing of it.

use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::explain::PodSteps;
use keelson_pod_sync_core::measure::Operation;
use keelson_pod_sync_core::worker::{Input, UpdateKind, step};

use super::{PodRegistry, is_live, lock};
use crate::state::observed::Observed;
use crate::state::pod_state::{Awaited, DesiredPod, PodState};

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

impl PodRegistry {
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
            state.inbox.close();
            // All under this lock: a source that sends the UID again finds the whole old incarnation or nothing of it.
            self.desired_state.sets.forget(uid);
            also();
            lock(&self.backoff).forget_pod(&uid.into());
            let woken = lock(&self.order).release_all(&uid.into());
            if state.runtime.may_have_leftovers() {
                let mut unclaimed = lock(&self.unclaimed);
                unclaimed.entry(uid.to_owned()).or_insert_with(|| Arc::clone(&state.runtime.observed));
            }
            let sent_again = state.worker.restart_requested && state.worker.desired;
            let desired = state.desired.filter(|_| sent_again);
            let restarts = desired.is_some();
            if let Some(desired) = desired {
                let next = PodState::awaiting_cleanup(uid, &desired, &self.moment());
                pods.insert(uid.to_owned(), Box::new(next));
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
            store.remove_unless(uid, || self.read(uid, |_| ()).is_some());
        }
        restarts
    }

    /// A source has sent a pod. If the runtime still holds something of an earlier incarnation of its UID, which would be taken for its
    /// own, the pod has to wait for the removal. Returns false if nothing is left, or if the earlier incarnation has not ended here.
    pub fn await_cleanup(&self, desired: &Arc<DesiredPod>) -> bool {
        let uid = desired.pod.metadata.uid.as_str();
        {
            let mut pods = lock(&self.pods);
            match pods.get_mut(uid) {
                Some(state) if state.awaits_cleanup() => state.desired = Some(Arc::clone(desired)),
                Some(_) => return false,
                None => {
                    // It stays in `unclaimed`: the pod may be removed and sent once more before the cleanup is done.
                    if lock(&self.unclaimed).get(uid).is_none_or(is_live) {
                        return false;
                    }
                    let state = PodState::awaiting_cleanup(uid, desired, &self.moment());
                    pods.insert(uid.to_owned(), Box::new(state));
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
            let desired = state.desired.clone().filter(|_| state.end_wait(Awaited::Cleanup))?;
            let input = Input::Update { kind: UpdateKind::Create, pod: &desired.pod, observed: None };
            let transition = step(None, &input, &at);
            state.worker = transition.state;
            state.steps = PodSteps::default();
            state.published.begin_again();
            self.desired_state.update(state);
            lock(&self.unclaimed).remove(uid);
            if transition.work.is_some() {
                state.inbox.trigger(Operation::Create);
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
            if !state.end_wait(Awaited::Cleanup) {
                return;
            }
            let mut worker = step(None, &Input::ObservedOrphan { observed: &remainder }, &at).state;
            (worker.restart_requested, worker.desired) = (true, true);
            (state.worker, state.runtime.observed) = (worker, remainder);
        });
        self.save(uid);
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
            self.with_incarnation(uid, incarnation, |state| state.admission.port_holder.take()).flatten()
        {
            lock(&self.port_holders).insert(uid.to_owned(), holder);
        }
        let restarts = self.forget(uid, incarnation, also);
        lock(&self.unclaimed).insert(uid.to_owned(), observed);
        restarts
    }
}
