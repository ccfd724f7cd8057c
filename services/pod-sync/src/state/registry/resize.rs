//! The resizes of pods. Each change is made and stored in one step, unless the pod has changed meanwhile.

use std::sync::Arc;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::allocation::Allocation;
use keelson_pod_sync_core::resize::{PendingPod, PendingReason, ResizeInProgress};
use keelson_pod_sync_core::worker::WorkerPhase;

use super::{PodRegistry, lock};
use crate::state::pod_state::{DesiredPod, PodState};

/// A pending resize, and the pod as its source has sent it.
pub type Pending = (PendingPod<Arc<Pod>>, Arc<DesiredPod>);

impl PodRegistry {
    /// The pods whose sources ask for other resources than they are allocated, and whether there are more of which it is not known
    /// whether they run. Pods that end, or have ended, are not among them.
    pub fn pending_resizes(&self) -> (Vec<Pending>, bool) {
        let now = self.moment().now_unix_nanos;
        let pods = lock(&self.pods);
        let wanting = pods.iter().filter(|(_, state)| state.admission.wanted.is_some() && is_active(state));
        let (running, unread): (Vec<_>, Vec<_>) = wanting.partition(|(_, state)| state.holds_resources());
        let pending = running.into_iter().filter_map(|(uid, state)| pending(uid, state, now)).collect();
        (pending, !unread.is_empty())
    }

    /// Allocates the resources that a pod's source asks for, if it is the pod that was decided on, at this revision. Returns whether a
    /// deferred resize is accepted by that; `None`: the pod ends, or it has changed and its resources are sent again.
    pub fn accept_resize(&self, uid: &str, wanted: &Pod, revision: u64) -> Option<bool> {
        let now = self.moment().now_unix_nanos;
        let accepted = self.with(uid, |state| {
            let allocation = Allocation::of(wanted);
            let is_decided_on = state.desired.as_ref().is_some_and(|desired| desired.revision == revision);
            let still_wants = state.admission.wanted.as_ref() == Some(&allocation);
            if !is_decided_on || !still_wants || !is_active(state) {
                return None;
            }
            let record = &mut state.admission;
            let deferred =
                record.resize.pending.as_ref().is_some_and(|p| p.reason == PendingReason::Deferred);
            record.wanted = None;
            let before = record.allocation.replace(allocation.clone()).unwrap_or_default();
            record.resize.accept(wanted, before, now);
            if let Some(desired) = &mut state.desired {
                allocation.apply(Arc::make_mut(&mut Arc::make_mut(desired).pod));
            }
            self.desired_state.update(state);
            state.inbox.wake();
            Some(deferred)
        });
        let accepted = accepted.flatten();
        if accepted.is_some() {
            self.save(uid);
            self.resizes.accepted();
        }
        accepted
    }

    /// Records why the resources that a pod's source asks for are not allocated. Returns whether that needs an event; `None`: it
    /// asks for others now.
    pub fn deny_resize(&self, uid: &str, wanted: &Pod, reason: PendingReason, message: &str) -> Option<bool> {
        let now = self.moment().now_unix_nanos;
        let denied = self.with(uid, |state| {
            let same = state.admission.wanted.as_ref() == Some(&Allocation::of(wanted));
            (same && is_active(state)).then(|| state.admission.resize.deny(wanted, reason, message, now))
        });
        let denied = denied.flatten();
        if denied == Some(true) {
            self.save(uid);
        }
        denied
    }

    /// The update of a running container begins.
    pub fn begin_update(&self, uid: &str, name: &str) {
        self.with(uid, |state| state.admission.resize.begin_update(name));
        self.save(uid);
    }

    /// A container is about to be created with, or was updated to, the resources in `pod`. Returns false if the pod was resized again
    /// since `allocated`.
    pub fn record_actuated(&self, uid: &str, allocated: &Allocation, name: &str, pod: &Pod) -> bool {
        let recorded = self.with(uid, |state| {
            let known = state.admission.allocation.as_ref() == Some(allocated);
            let has_changed = state.admission.resize.actuated.is_some();
            if has_changed {
                state.admission.resize.container_has(name, pod);
                self.desired_state.update(state);
            }
            (known, has_changed)
        });
        let (known, has_changed) = recorded.unwrap_or_default();
        if has_changed {
            self.save(uid);
        }
        known
    }

    /// Every running container has its resources: the cgroup of the pod gets its final values. Returns false if the pod was resized
    /// again since `allocated`.
    pub fn settle_resize(&self, uid: &str, allocated: &Allocation) -> bool {
        let settled = self.with(uid, |state| {
            let known = state.admission.allocation.as_ref() == Some(allocated);
            if known && state.admission.resize.actuated.is_some() {
                state.admission.resize.actuated = Some(allocated.clone());
                self.desired_state.update(state);
            }
            known
        });
        settled == Some(true)
    }

    /// The pod has its resources. Returns its resize, unless the pod was resized again since `allocated`.
    pub fn complete_resize(&self, uid: &str, allocated: &Allocation) -> Option<ResizeInProgress> {
        let completed = self.with(uid, |state| {
            let known = state.admission.allocation.as_ref() == Some(allocated);
            known.then(|| state.admission.resize.complete()).flatten()
        });
        self.save(uid);
        completed.flatten()
    }

    /// An attempt to carry out a resize has failed. Returns the resize if that needs an event.
    pub fn fail_resize(&self, uid: &str, error: &str) -> Option<ResizeInProgress> {
        let told = self.with(uid, |state| {
            let resize = &mut state.admission.resize;
            resize.fail(error).then(|| resize.in_progress.clone()).flatten()
        });
        let told = told.flatten();
        if told.is_some() {
            self.save(uid);
        }
        told
    }

    /// A pod that was found running, and of which nothing is known, has the resources in its spec.
    pub fn adopt_allocation(&self, uid: &str, pod: &Pod) {
        let adopted = self.with(uid, |state| {
            let is_unknown = state.admission.allocation.is_none() && !state.admission.admitted;
            let adopts = is_unknown && state.runtime.observed.any_sandbox_ready();
            if adopts {
                state.admission.allocation = Some(Allocation::of(pod));
            }
            adopts
        });
        if adopted == Some(true) {
            self.save(uid);
        }
    }
}

/// Whether a pod runs, and neither ends nor has ended.
fn is_active(state: &PodState) -> bool {
    let is_deleting = state.desired.as_ref().is_some_and(|desired| desired.pod.is_deleting());
    let is_over = is_deleting || state.published.status.phase().is_terminal();
    state.worker.phase == WorkerPhase::Sync && !is_over
}

fn pending(uid: &str, state: &PodState, now_unix_nanos: i64) -> Option<Pending> {
    let wanted = state.admission.wanted.as_ref()?;
    let desired = state.desired.as_ref()?;
    let mut pod = Arc::clone(&desired.pod);
    wanted.apply(Arc::make_mut(&mut pod));
    let known = state.admission.resize.pending.as_ref();
    let pending = PendingPod {
        uid: uid.to_owned(),
        allocated: Arc::clone(&desired.pod),
        wanted: pod,
        since_unix_nanos: known.map_or(now_unix_nanos, |pending| pending.since_unix_nanos),
    };
    Some((pending, Arc::clone(desired)))
}
