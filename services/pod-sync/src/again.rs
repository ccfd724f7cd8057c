//! A UID that is named anew while the runtime still holds what an earlier life of it has left. Those records would
//! be taken for its own: a pod that is to run once would have run already. Its life begins when runtime-shim, the
//! only one who removes them, is through.

use std::sync::Arc;
use std::time::Duration;

use keelson_pod_sync_core::explain::{Cause, StepName};
use keelson_pod_sync_core::observation::PodObservation;
use keelson_service_kit::Backoff;
use tokio::sync::Notify;
use tonic::Status;

use crate::agent::Agent;
use crate::observed::Observed;

/// Waits until the entry no longer waits for the removal. False: it is gone, or the service ends.
pub async fn wait(agent: &Arc<Agent>, uid: &str, life: u64, wake: &Notify) -> bool {
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        let read = agent.clients.read_pod(uid).await;
        match &read {
            Ok(left) if left.sandboxes.is_empty() && left.containers.is_empty() => {
                return agent.begin_again(uid, life);
            }
            Ok(left) if left.anything_running() || left.any_sandbox_ready() => {
                agent.end_first(uid, life, Arc::clone(left));
                return true;
            }
            _ => {}
        }
        let at = agent.moment();
        let cause = Cause::waiting("Leftovers", &waiting_for(&read), "runtime-shim");
        if agent.with_life(uid, life, |e| e.ledger.set(StepName::Source, "", cause, &at)).is_none() {
            return false;
        }
        // Cancel-safe: a notification that comes meanwhile is kept, and everything is read anew.
        tokio::select! {
            () = agent.context.shutdown.cancelled() => return false,
            () = wake.notified() => {}
            () = tokio::time::sleep(backoff.next_delay()) => {}
        }
    }
}

fn waiting_for(read: &Result<Observed, Status>) -> String {
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
    fn what_is_left_is_counted() {
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
