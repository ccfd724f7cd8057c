//! How others reach the worker of a pod.

use std::sync::Arc;

use keelson_pod_sync_core::measure::Operation;
use keelson_service_kit::CancellationToken;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::state::pending_trigger::PendingTrigger;

/// The inbox of one worker.
#[derive(Debug, Default)]
pub struct Inbox {
    /// A worker task exists.
    has_worker: bool,
    /// Its worker has panicked and waits for its next retry.
    quarantined: bool,
    /// What has triggered the next turn.
    trigger: PendingTrigger,
    /// Wakes the worker.
    wake: Arc<Notify>,
    /// Cancels what the worker is waiting for.
    cancel: CancellationToken,
}

impl Inbox {
    /// Claims the place of the worker task. Returns false if there is one already.
    pub fn claim_worker(&mut self) -> bool {
        !std::mem::replace(&mut self.has_worker, true)
    }

    /// Wakes the worker.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// What the worker waits on.
    pub fn waker(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Something has triggered the next turn.
    pub fn trigger(&mut self, operation: Operation) {
        self.trigger.add(operation, Instant::now());
    }

    /// Takes all triggers, for the turn that begins now.
    pub fn take_trigger(&mut self) -> PendingTrigger {
        self.trigger.take()
    }

    /// The token that cancels the turn that begins now.
    pub fn cancel_token(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Cancels the present turn. A quarantine ends too: the pod has changed or has to end.
    pub fn cancel_turn(&mut self) {
        std::mem::take(&mut self.cancel).cancel();
        self.quarantined = false;
    }

    /// The pod is removed: the worker ends.
    pub fn close(&self) {
        self.cancel.cancel();
        self.wake.notify_one();
    }

    /// The worker has panicked.
    pub fn quarantine(&mut self) {
        self.quarantined = true;
    }

    /// The worker may be restarted.
    pub fn end_quarantine(&mut self) {
        self.quarantined = false;
    }

    /// Whether the worker waits for its next retry after a panic.
    pub fn is_quarantined(&self) -> bool {
        self.quarantined
    }
}
