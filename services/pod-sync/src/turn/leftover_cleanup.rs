//! A source has sent a UID again while the runtime still holds records of an earlier incarnation. The new pod would take them for its own: a
//! pod that runs once would count as done. So it starts when runtime-shim, which alone removes records, has removed them.

use std::sync::Arc;
use std::time::Duration;

use keelson_kube_model::Pod;
use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::observation::PodObservation;
use keelson_service_kit::Backoff;
use tokio::sync::Notify;
use tonic::Status;

use crate::effects::Effects;
use crate::state::observed::Observed;
use crate::state::registry::AfterCleanup;

/// Waits until the pod does not have to wait for the removal any more.
pub async fn wait(effects: &Arc<Effects>, uid: &str, incarnation: u64, wake: &Notify) -> AfterCleanup {
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        let read = effects.clients.read_pod(uid).await;
        match &read {
            Ok(left) if left.sandboxes.is_empty() && left.containers.is_empty() => {
                return restart(effects, uid, incarnation);
            }
            Ok(left) if left.anything_running() || left.any_sandbox_ready() => {
                effects.registry.end_remainder(uid, incarnation, Arc::clone(left));
                return AfterCleanup::Continue;
            }
            _ => {}
        }
        let at = effects.registry.moment();
        let cause = Cause::waiting("Leftovers", &waiting_text(&read), "runtime-shim");
        if effects
            .registry
            .with_incarnation(uid, incarnation, |e| e.steps.set(StepName::Source, "", cause, &at))
            .is_none()
        {
            return AfterCleanup::Stop;
        }
        // Cancel-safe: a notification is kept, and everything is read again.
        tokio::select! {
            () = effects.context.shutdown.cancelled() => return AfterCleanup::Stop,
            () = wake.notified() => {}
            () = tokio::time::sleep(backoff.next_delay()) => {}
        }
    }
}

/// Starts the pod: the runtime holds nothing of its UID any more.
pub(super) fn restart(effects: &Effects, uid: &str, incarnation: u64) -> AfterCleanup {
    let started = |pod: &Pod| effects.publisher.metrics.pods.restarted(pod);
    let after = effects.registry.restart_after_cleanup(uid, incarnation, started);
    if after == AfterCleanup::Continue {
        effects.publisher.publish_first(uid);
    }
    after
}

fn waiting_text(read: &Result<Observed, Status>) -> String {
    match read {
        Ok(left) => format!("what is left of the pod's earlier run is removed first: {}", counts(left)),
        Err(status) => {
            format!("it is not known whether anything is left of the pod's earlier run: {}", status.message())
        }
    }
}

fn counts(left: &PodObservation) -> String {
    let of = |count: usize, word: &str| match count {
        0 => None,
        1 => Some(format!("1 {word}")),
        more => Some(format!("{more} {word}{}", if word.ends_with('x') { "es" } else { "s" })),
    };
    let parts = [of(left.containers.len(), "container"), of(left.sandboxes.len(), "sandbox")];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use keelson_pod_sync_core::observation::{ContainerObservation, SandboxObservation};

    #[test]
    fn leftovers_of_an_earlier_incarnation_are_counted() {
        let left = |containers, sandboxes| {
            counts(&PodObservation {
                containers: vec![ContainerObservation::default(); containers],
                sandboxes: vec![SandboxObservation::default(); sandboxes],
                ..PodObservation::default()
            })
        };
        assert_eq!(left(2, 1), "2 containers and 1 sandbox");
        assert_eq!(left(0, 2), "2 sandboxes");
    }
}
