//! What the containers of a pod need now.

use std::sync::Arc;

use keelson_pod_sync_core::actions::{PodActions, compute_pod_actions};
use keelson_pod_sync_core::probe::hints;
use keelson_pod_sync_core::resize::{ResizePlan, plan};
use keelson_pod_sync_core::worker::WorkerPhase;

use crate::effects::Effects;
use crate::publish::StatusFacts;
use crate::state::observed::Observed;
use crate::state::pod_state::{DesiredPod, PodState};

/// What has to be done so that the running containers of a pod have their allocated resources.
fn resize_plan(effects: &Effects, desired: &DesiredPod, observed: &Observed) -> ResizePlan {
    let uid = &desired.pod.metadata.uid;
    let planned = |state: &PodState| {
        let resize = &state.admission.resize;
        resize.actuated.is_some().then(|| resize.clone())
    };
    let record = effects.registry.read(uid, planned).flatten();
    record.map(|record| plan(&desired.pod, &record, observed)).unwrap_or_default()
}

/// Asks the core what has to be done so that the containers match the spec.
pub fn decide(effects: &Effects, desired: &DesiredPod, observed: &Observed) -> PodActions {
    let (pod, registry) = (&desired.pod, &effects.registry);
    let mut hints = registry
        .read(&pod.metadata.uid, |e| hints(pod, observed, Some(&e.published.status), &e.probes.states))
        .unwrap_or_default();
    hints.resized = resize_plan(effects, desired, observed).restart;
    compute_pod_actions(pod, observed, &hints, &registry.backoff(), &registry.moment())
}

/// Publishes the changed result of a probe without waiting for a turn (pod-lifecycle.md §14.4).
pub fn publish_decision(effects: &Effects, uid: &str) {
    let known =
        effects.registry.read(uid, |e| (e.worker.phase, e.desired.clone(), Arc::clone(&e.runtime.observed)));
    match known {
        Some((WorkerPhase::Sync, Some(desired), observed)) => {
            let actions = decide(effects, &desired, &observed);
            let facts = StatusFacts { waiting: &actions.waiting, ..StatusFacts::default() };
            effects.publisher.publish(uid, &facts);
        }
        Some((WorkerPhase::Terminating, Some(_), _)) => {
            effects.publisher.publish(uid, &StatusFacts::default());
        }
        _ => {}
    }
}
