//! The worker's side: what it is to bring about, and when it turns next.

use std::sync::Arc;
use std::time::Duration;

use keelson_service_kit::Backoff;
use tokio::sync::watch;

/// What a worker is to bring about.
#[derive(Debug)]
pub struct Assignment<D, N = ()> {
    /// Tells one assignment of a pod from another.
    pub number: u64,
    /// What is wanted.
    pub desire: Arc<D>,
    /// What the service itself has noted about the pod.
    pub note: N,
}

impl<D, N: Copy> Clone for Assignment<D, N> {
    fn clone(&self) -> Self {
        Self { number: self.number, desire: Arc::clone(&self.desire), note: self.note }
    }
}

/// When a worker turns next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// At once.
    Now {
        /// A read of the runtime has just shown that nothing of the pod runs.
        is_quiet: bool,
    },
    /// After this pause, or with another assignment.
    After(Duration),
    /// With another assignment.
    WhenChanged,
}

/// One turn of a worker.
#[derive(Debug)]
pub struct Turn<D, N = ()> {
    /// What to bring about.
    pub assignment: Assignment<D, N>,
    /// It is another assignment than in the turn before.
    pub is_new: bool,
    /// A read of the runtime, made in the turn before, has shown that nothing of the pod runs.
    pub is_quiet: bool,
}

/// How often a worker asks again while something of its pod still runs.
pub const fn still_runs() -> Backoff {
    Backoff::new(Duration::from_millis(20), Duration::from_secs(1))
}

/// What a worker has of its pod's slot.
#[derive(Debug)]
pub struct Orders<D, V, N = ()> {
    /// The pod's UID.
    pub uid: String,
    /// Where the worker shows how far it is.
    pub view: watch::Sender<V>,
    assignment: watch::Receiver<Option<Assignment<D, N>>>,
    number: u64,
    is_quiet: bool,
}

impl<D, V, N: Copy> Orders<D, V, N> {
    pub(crate) const fn new(
        uid: String,
        assignment: watch::Receiver<Option<Assignment<D, N>>>,
        view: watch::Sender<V>,
    ) -> Self {
        Self { uid, view, assignment, number: 0, is_quiet: false }
    }

    /// A turn for the present assignment. Waits for the first one; none when there will be none.
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

    /// Waits for the next turn: as `next` says, at most until `also`, another reason for a turn, ends. False when
    /// there will be no other assignment, or `also` says that it is over. `also` has to be cancel-safe.
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
            goes_on = also => goes_on,
            () = timer => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    type Sender = watch::Sender<Option<Assignment<u8>>>;

    fn orders() -> (Sender, Orders<u8, ()>) {
        let assignment = watch::Sender::new(None);
        let orders = Orders::new("u".into(), assignment.subscribe(), watch::Sender::new(()));
        (assignment, orders)
    }

    fn assign(sender: &Sender, number: u64) {
        sender.send_replace(Some(Assignment { number, desire: Arc::new(0), note: () }));
    }

    #[tokio::test]
    async fn a_quiet_read_counts_for_the_turn_that_follows_it_at_once_and_no_other() {
        let (sender, mut orders) = orders();
        assign(&sender, 1);
        assert!(!orders.present().await.unwrap().is_quiet);
        assert!(orders.wait(Next::Now { is_quiet: true }, ready(false)).await);
        assert!(orders.present().await.unwrap().is_quiet);
        assert!(!orders.present().await.unwrap().is_quiet);
    }

    #[tokio::test]
    async fn a_turn_comes_with_another_assignment_a_pause_or_another_reason() {
        let (sender, mut orders) = orders();
        assign(&sender, 1);
        assert!(orders.present().await.unwrap().is_new);
        assert!(orders.wait(Next::After(Duration::ZERO), pending()).await);
        assert!(!orders.present().await.unwrap().is_new);
        assert!(orders.wait(Next::WhenChanged, ready(true)).await);
        assert!(!orders.wait(Next::WhenChanged, ready(false)).await);
        assign(&sender, 2);
        assert!(orders.wait(Next::WhenChanged, pending()).await);
        let turn = orders.present().await.unwrap();
        assert_eq!((turn.assignment.number, turn.is_new), (2, true));
    }

    #[tokio::test]
    async fn a_worker_whose_slot_is_gone_ends() {
        let (sender, mut waiting) = orders();
        drop(sender);
        assert!(waiting.present().await.is_none());
        let (sender, mut working) = orders();
        assign(&sender, 1);
        drop(sender);
        assert!(working.present().await.is_some());
        assert!(!working.wait(Next::WhenChanged, pending()).await);
    }
}
