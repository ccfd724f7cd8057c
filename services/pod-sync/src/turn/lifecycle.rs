//! The beginning and the end of a pod's worker. Whoever changes the registry in a way that may add or remove a pod does so here.

use std::sync::Arc;

use keelson_pod_sync_core::worker::{Input, Transition, UpdateKind};

use crate::effects::Effects;
use crate::state::observed::Observed;
use crate::state::pod_state::{DesiredPod, PodState};
use crate::state::registry::Applied;
use crate::turn::panic_quarantine::supervise;
use crate::turn::worker::{self, WorkerEnd};

/// Applies an input to a UID, and starts a worker if the UID is new.
pub fn apply(effects: &Arc<Effects>, uid: &str, input: &Input<'_>) -> Option<Transition> {
    let applied = effects.registry.apply(uid, input);
    begin_if_new(effects, uid, applied)
}

/// A source has sent a pod, for which the registry has no earlier incarnation to wait for: stores it, and starts a worker if the UID is
/// new.
pub fn set_desired(
    effects: &Arc<Effects>,
    desired: &Arc<DesiredPod>,
    kind: UpdateKind,
    observed: Option<Observed>,
) -> Option<Transition> {
    let applied = effects.registry.set_desired(desired, kind, observed);
    begin_if_new(effects, &desired.pod.metadata.uid, applied)
}

fn begin_if_new(effects: &Arc<Effects>, uid: &str, applied: Option<Applied>) -> Option<Transition> {
    let applied = applied?;
    if applied.is_new {
        begin_worker(effects, uid);
    }
    Some(applied.transition)
}

/// Starts the worker of a UID that is known and has none yet.
pub fn begin_worker(effects: &Arc<Effects>, uid: &str) {
    let claim = |state: &mut PodState| state.inbox.claim_worker().then_some(state.incarnation);
    if let Some(Some(incarnation)) = effects.registry.with(uid, claim) {
        keelson_service_kit::spawn(
            "worker supervisor",
            supervise(Arc::clone(effects), uid.into(), incarnation, run_once),
        );
    }
}

/// Runs the worker until it ends or panics.
async fn run_once(effects: Arc<Effects>, uid: Arc<str>, incarnation: u64) {
    if worker::run(Arc::clone(&effects), Arc::clone(&uid), incarnation).await == WorkerEnd::Forget {
        forget(&effects, &uid, incarnation);
    }
}

/// Ends a pod that no source has any more.
pub fn remove(effects: &Arc<Effects>, uid: &str) {
    let known =
        effects.registry.read(uid, |e| (e.incarnation, e.desired.as_ref().map(|w| Arc::clone(&w.pod))));
    let Some((incarnation, pod)) = known else { return };
    let transition = apply(effects, uid, &Input::Removed { pod: pod.as_deref() });
    if transition.is_some_and(|t| t.forget) {
        forget(effects, uid, incarnation);
    }
}

/// Forgets this incarnation of a UID: nothing of it is left to do. If its source has sent it again meanwhile, the next incarnation waits
/// until the runtime holds nothing of this one.
pub fn forget(effects: &Arc<Effects>, uid: &str, incarnation: u64) {
    let documents = &effects.publisher.documents;
    if effects.registry.forget(uid, incarnation, || drop(documents.remove(&uid.to_owned()))) {
        begin_waiting(effects, uid);
    }
}

/// Like [`forget`], for a pod that left its source while this process was down and whose remainder is an orphan.
pub fn forget_as_orphan(effects: &Arc<Effects>, uid: &str, incarnation: u64, observed: Observed) {
    let documents = &effects.publisher.documents;
    let remove = || drop(documents.remove(&uid.to_owned()));
    if effects.registry.forget_as_orphan(uid, incarnation, observed, remove) {
        begin_waiting(effects, uid);
    }
}

/// If the runtime still holds something of an earlier incarnation of a pod's UID, the pod is made to wait for the removal. Returns
/// whether it waits.
pub fn await_cleanup(effects: &Arc<Effects>, desired: &Arc<DesiredPod>) -> bool {
    let waits = effects.registry.await_cleanup(desired);
    if waits {
        begin_waiting(effects, &desired.pod.metadata.uid);
    }
    waits
}

fn begin_waiting(effects: &Arc<Effects>, uid: &str) {
    effects.publisher.publish_first(uid);
    begin_worker(effects, uid);
}

#[cfg(test)]
mod tests;
