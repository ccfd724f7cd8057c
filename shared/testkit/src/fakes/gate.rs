//! A gate that holds calls back until the test opens it.

use tokio::sync::watch;

/// Holds the calls of a method back until it is opened or dropped.
#[derive(Debug)]
#[must_use = "a dropped gate is open"]
pub struct Gate(watch::Sender<bool>);

/// The side of a gate that calls wait at.
#[derive(Debug, Clone, Default)]
pub(super) struct GateWaiter(Option<watch::Receiver<bool>>);

impl Gate {
    /// A closed gate, and the side that calls wait at.
    pub(super) fn closed() -> (Self, GateWaiter) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), GateWaiter(Some(receiver)))
    }

    /// Opens the gate for waiting and for later calls.
    pub fn open(self) {
        self.0.send_replace(true);
    }
}

impl GateWaiter {
    /// Waits until the gate is open.
    pub(super) async fn pass(self) {
        if let Some(mut open) = self.0 {
            // An error means that the gate was dropped: it is open.
            let _ = open.wait_for(|open| *open).await;
        }
    }
}
