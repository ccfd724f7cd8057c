//! What the runtime holds of a pod, as it was read last.

use std::sync::Arc;

use keelson_pod_sync_core::observation::PodObservation;

use crate::state::observed::{Observed, is_older, same};

/// The last observation of a pod, and whether it may be stale.
#[derive(Debug)]
pub struct RuntimeRecords {
    /// The last observation of the runtime.
    pub observed: Observed,
    /// Whether the next turn begins with a fresh read.
    pub freshness: Freshness,
    /// runtime-shim has reported that nothing of it is left, and has reported nothing of it since.
    pub gone: bool,
}

impl RuntimeRecords {
    /// Nothing was observed yet.
    pub fn new(uid: &str) -> Self {
        Self {
            observed: Arc::new(PodObservation { uid: uid.into(), ..PodObservation::default() }),
            freshness: Freshness::default(),
            gone: false,
        }
    }

    /// Records an observation, unless a newer one is known. Returns whether it shows a change.
    pub fn record(&mut self, observed: Observed) -> bool {
        if is_older(&observed, &self.observed) {
            return false;
        }
        let changed = !same(&self.observed, &observed);
        self.observed = observed;
        self.gone = false;
        changed
    }

    /// The runtime is known to hold something of it.
    pub fn has_leftovers(&self) -> bool {
        !self.gone && (!self.observed.sandboxes.is_empty() || !self.observed.containers.is_empty())
    }

    /// The runtime may hold something of it: it is known to, or a read is due that would tell.
    pub fn may_have_leftovers(&self) -> bool {
        self.has_leftovers() || self.freshness.stale().is_some()
    }
}

/// Whether the observation may be stale. An invalidation during a read is not answered by that read. It is not in the worker,
/// because the streams invalidate it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Freshness {
    invalidated: u64,
    answered: u64,
}

impl Freshness {
    /// The observation may be stale from now on.
    pub fn invalidate(&mut self) {
        self.invalidated += 1;
    }

    /// If the observation is stale: the token to pass to [`Freshness::refreshed`] after a read that begins now.
    pub fn stale(self) -> Option<u64> {
        (self.invalidated != self.answered).then_some(self.invalidated)
    }

    /// A read that began when [`Freshness::stale`] returned this token is done.
    pub fn refreshed(&mut self, token: u64) {
        self.answered = self.answered.max(token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalidation_during_a_read_needs_another_read() {
        let mut freshness = Freshness::default();
        assert_eq!(freshness.stale(), None);
        freshness.invalidate();
        let first = freshness.stale().unwrap();
        freshness.invalidate();
        freshness.refreshed(first);
        let second = freshness.stale().expect("the second invalidation is still open");
        freshness.refreshed(second);
        assert_eq!(freshness.stale(), None);
    }
}
