//! The walks that give the files of a pod's volumes to its group, as who watches them from outside sees them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The walks of one pod's steps, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Walks(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    present: Option<Walk>,
    ended: Vec<Ended>,
}

/// A walk that is under way.
#[derive(Debug, Clone)]
pub(crate) struct Walk {
    /// The volume.
    pub(crate) path: PathBuf,
    pub(crate) gid: u32,
    pub(crate) begun: Instant,
    files: Arc<AtomicU64>,
}

/// A walk that has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    pub(crate) good: bool,
    pub(crate) took: Duration,
    /// Files and folders that were seen.
    pub(crate) files: u64,
}

/// The side of who walks.
#[derive(Debug)]
pub(crate) struct Walking<'a> {
    walks: &'a Walks,
    walk: Walk,
}

impl Walks {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A walk through `path` begins.
    pub(crate) fn begin(&self, path: &Path, gid: u32) -> Walking<'_> {
        let walk = Walk { path: path.to_owned(), gid, begun: Instant::now(), files: Arc::default() };
        self.lock().present = Some(walk.clone());
        Walking { walks: self, walk }
    }

    /// The one that is under way.
    pub(crate) fn present(&self) -> Option<Walk> {
        self.lock().present.clone()
    }

    /// Those that have ended since the last call.
    pub(crate) fn take_ended(&self) -> Vec<Ended> {
        std::mem::take(&mut self.lock().ended)
    }
}

impl Walk {
    /// Files and folders that are done so far.
    pub(crate) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }
}

impl Walking<'_> {
    /// One more file or folder is done.
    pub(crate) fn done(&self) {
        self.walk.files.fetch_add(1, Ordering::Relaxed);
    }

    /// The walk has ended.
    pub(crate) fn end(self, good: bool) {
        let ended = Ended { good, took: self.walk.begun.elapsed(), files: self.walk.files() };
        tracing::debug!(
            path = %self.walk.path.display(),
            files = ended.files,
            elapsed_ms = u64::try_from(ended.took.as_millis()).unwrap_or(u64::MAX),
            good,
            "a walk to give files to a pod's group has ended"
        );
        let mut walks = self.walks.lock();
        walks.present = None;
        walks.ended.push(ended);
    }
}
