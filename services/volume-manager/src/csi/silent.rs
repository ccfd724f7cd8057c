//! The volumes that a driver has not measured in time: their server may hang.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

/// The volumes of one driver. They have a share of its calls of their own, so that its other volumes are measured.
#[derive(Debug)]
pub(super) struct SilentVolumes {
    /// Where they are published.
    paths: Mutex<BTreeSet<String>>,
    measurements: Semaphore,
}

impl SilentVolumes {
    /// None yet, with a share of this number of measurements at a time.
    pub(super) fn new(share: usize) -> Self {
        Self { paths: Mutex::default(), measurements: Semaphore::new(share) }
    }

    fn paths(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The share, if the volume is one of them.
    pub(super) fn limit(&self, path: &str) -> Option<&Semaphore> {
        self.paths().contains(path).then_some(&self.measurements)
    }

    /// Adds a volume that was not measured in time.
    pub(super) fn add(&self, path: String) {
        self.paths().insert(path);
    }

    /// Removes a volume that was measured, or that is gone.
    pub(super) fn remove(&self, path: &str) {
        self.paths().remove(path);
    }
}
