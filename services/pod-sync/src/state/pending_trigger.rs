//! What has triggered the next turn of a worker, for the metrics of turns.

use keelson_pod_sync_core::measure::Operation;
use tokio::time::Instant;

/// The kind of the newest trigger and the time of the oldest that no turn has answered yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PendingTrigger(Option<(Operation, Instant)>);

impl PendingTrigger {
    /// Adds a trigger.
    pub fn add(&mut self, operation: Operation, at: Instant) {
        let first = self.0.map_or(at, |(_, first)| first);
        self.0 = Some((operation, first));
    }

    /// Takes all triggers, for the turn that begins now.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Gives back what a turn took and could not answer.
    pub fn give_back(&mut self, taken: Self) {
        let Some((operation, first)) = taken.0 else { return };
        self.0 = Some((self.0.map_or(operation, |(newer, _)| newer), first));
    }

    /// The kind of the newest trigger.
    pub fn operation(self) -> Option<Operation> {
        self.0.map(|(operation, _)| operation)
    }

    /// The time from which a turn is measured that began at `began` and counts as `counted`. A resync without a trigger, and a turn
    /// whose trigger belongs to an earlier process, are measured from their own beginning.
    pub fn since(self, counted: Operation, began: Instant) -> Instant {
        self.0.filter(|_| counted != Operation::Sync).map_or(began, |(_, first)| first)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use Operation::{Create, Kill, Sync, Update};

    #[test]
    fn a_pending_trigger_has_the_kind_of_the_newest_and_the_time_of_the_oldest() {
        let at = Instant::now();
        let later = |seconds| at + Duration::from_secs(seconds);
        let mut pending = PendingTrigger::default();
        assert_eq!((pending.operation(), pending.since(Kill, later(3))), (None, later(3)));
        pending.add(Create, at);
        pending.add(Update, later(1));
        let taken = pending.take();
        assert_eq!(pending, PendingTrigger::default());
        assert_eq!((taken.operation(), taken.since(Update, later(3))), (Some(Update), at));
        assert_eq!(taken.since(Sync, later(3)), later(3));
        // A turn that could do nothing gives its triggers back to the next one.
        pending.give_back(taken);
        assert_eq!(pending, taken);
        let taken = pending.take();
        pending.add(Kill, later(2));
        pending.give_back(taken);
        assert_eq!((pending.operation(), pending.since(Kill, later(3))), (Some(Kill), at));
    }
}
