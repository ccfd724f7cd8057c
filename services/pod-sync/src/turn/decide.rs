//! What the containers of a pod need now.

use std::sync::Arc;

use keelson_pod_sync_core::actions::{PodActions, compute_pod_actions};
use keelson_pod_sync_core::probe::hints;
use keelson_pod_sync_core::worker::WorkerPhase;

use crate::effects::Effects;
use crate::publish::StatusFacts;
use crate::state::observed::Observed;
use crate::state::pod_state::DesiredPod;

/// Asks the core what has to be done so that the containers match the spec.
pub fn decide(effects: &Effects, desired: &DesiredPod, observed: &Observed) -> PodActions {
    let (pod, registry) = (&desired.pod, &effects.registry);
    let hints = registry
        .read(&pod.metadata.uid, |e| hints(pod, observed, Some(&e.published.status), &e.probes.states))
        .unwrap_or_default();
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
