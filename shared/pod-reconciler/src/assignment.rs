//! The worker's side: its current assignment and when its next turn starts.

use std::sync::Arc;
use std::time::Duration;

use keelson_service_kit::Backoff;
use tokio::sync::watch;

/// The desired state that a worker must reach.
#[derive(Debug)]
pub struct Assignment<D, N = ()> {
    /// Numbers the assignments of a pod; a later one has a greater number.
    pub number: u64,
    /// The desired state of the pod.
    pub desire: Arc<D>,
    /// The service's own note about the pod.
    pub note: N,
}

impl<D, N: Copy> Clone for Assignment<D, N> {
    fn clone(&self) -> Self {
        Self { number: self.number, desire: Arc::clone(&self.desire), note: self.note }
    }
}

/// When the next turn of a worker starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// At once.
    Now {
        /// The last read of the runtime showed that nothing of the pod runs.
        is_quiet: bool,
    },
    /// After this delay, or with a new assignment.
    After(Duration),
    /// With a new assignment.
    WhenChanged,
}

/// One turn of a worker.
#[derive(Debug)]
pub struct Turn<D, N = ()> {
    /// The current assignment.
    pub assignment: Assignment<D, N>,
    /// The assignment differs from that of the previous turn.
    pub is_new: bool,
    /// A read of the runtime in the previous turn showed that nothing of the pod runs.
    pub is_quiet: bool,
}

/// The back-off between reads of the runtime while something of the pod still runs.
pub const fn running_pod_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(20), Duration::from_secs(1))
}

/// A worker's end of its pod's slot: it receives assignments and publishes the view.
#[derive(Debug)]
pub struct Assignments<D, V, N = ()> {
    /// The pod's UID.
    pub uid: String,
    /// Where the worker publishes its progress.
    pub view: watch::Sender<V>,
    assignment: watch::Receiver<Option<Assignment<D, N>>>,
    number: u64,
    is_quiet: bool,
}

impl<D, V, N: Copy> Assignments<D, V, N> {
    pub(crate) const fn new(
        uid: String,
        assignment: watch::Receiver<Option<Assignment<D, N>>>,
        view: watch::Sender<V>,
    ) -> Self {
        Self { uid, view, assignment, number: 0, is_quiet: false }
    }

    /// A turn for the current assignment. Waits for the first one; `None` when the slot is removed.
    pub async fn present(&mut self) -> Option<Turn<D, N>> {
        loop {
            let present = self.assignment.borrow_and_update().clone();
            if let Some(assignment) = present {
                let is_new = assignment.number != self.number;
                self.number = assignment.number;
                return Some(Turn { assignment, is_new, is_quiet: std::mem::take(&mut self.is_quiet) });
            }
            self.assignment.changed().await.ok()?;
        }
    }

    /// Waits for the next turn as `next` asks, or until `also`, another trigger, completes. Returns false when the slot
    /// is removed or `also` returns false: the worker must end. `also` must be cancel-safe.
    pub async fn wait(&mut self, next: Next, also: impl Future<Output = bool>) -> bool {
        let pause = match next {
            Next::Now { is_quiet } => {
                self.is_quiet = is_quiet;
                return true;
            }
            Next::After(pause) => Some(pause),
            Next::WhenChanged => None,
        };
        let timer = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        // Cancel-safe: `changed` marks nothing as seen unless it returns.
        tokio::select! {
            changed = self.assignment.changed() => changed.is_ok(),
            proceed = also => proceed,
            () = timer => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    type Sender = watch::Sender<Option<Assignment<u8>>>;

    fn assignments() -> (Sender, Assignments<u8, ()>) {
        let assignment = watch::Sender::new(None);
        let assignments = Assignments::new("u".into(), assignment.subscribe(), watch::Sender::new(()));
        (assignment, assignments)
    }

    fn assign(sender: &Sender, number: u64) {
        sender.send_replace(Some(Assignment { number, desire: Arc::new(0), note: () }));
    }

    #[tokio::test]
    async fn quiet_runtime_read_is_valid_for_the_next_immediate_turn_only() {
        let (sender, mut assignments) = assignments();
        assign(&sender, 1);
        assert!(!assignments.present().await.unwrap().is_quiet);
        assert!(assignments.wait(Next::Now { is_quiet: true }, ready(false)).await);
        assert!(assignments.present().await.unwrap().is_quiet);
        assert!(!assignments.present().await.unwrap().is_quiet);
    }

    #[tokio::test]
    async fn turn_starts_on_new_assignment_timer_or_other_trigger() {
        let (sender, mut assignments) = assignments();
        assign(&sender, 1);
        assert!(assignments.present().await.unwrap().is_new);
        assert!(assignments.wait(Next::After(Duration::ZERO), pending()).await);
        assert!(!assignments.present().await.unwrap().is_new);
        assert!(assignments.wait(Next::WhenChanged, ready(true)).await);
        assert!(!assignments.wait(Next::WhenChanged, ready(false)).await);
        assign(&sender, 2);
        assert!(assignments.wait(Next::WhenChanged, pending()).await);
        let turn = assignments.present().await.unwrap();
        assert_eq!((turn.assignment.number, turn.is_new), (2, true));
    }

    #[tokio::test]
    async fn worker_ends_when_its_slot_is_removed() {
        let (sender, mut waiting) = assignments();
        drop(sender);
        assert!(waiting.present().await.is_none());
        let (sender, mut working) = assignments();
        assign(&sender, 1);
        drop(sender);
        assert!(working.present().await.is_some());
        assert!(!working.wait(Next::WhenChanged, pending()).await);
    }
}
