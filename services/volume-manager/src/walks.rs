//! Tracks the progress of fsGroup walks, which change the ownership of a volume's files to the pod's group.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The walks of one pod's actions, one after the other.
#[derive(Debug, Default)]
pub(crate) struct FsGroupWalks(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    current: Option<Walk>,
    ended: Vec<EndedWalk>,
}

/// A walk that is running.
#[derive(Debug, Clone)]
pub(crate) struct Walk {
    /// The volume.
    pub(crate) path: PathBuf,
    pub(crate) gid: u32,
    pub(crate) started: Instant,
    files: Arc<AtomicU64>,
}

/// A walk that has ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndedWalk {
    pub(crate) succeeded: bool,
    pub(crate) duration: Duration,
    /// The number of files and folders visited.
    pub(crate) files: u64,
}

/// Records the progress of a running walk.
#[derive(Debug)]
pub(crate) struct WalkRecorder<'a> {
    walks: &'a FsGroupWalks,
    walk: Walk,
}

impl FsGroupWalks {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a walk through `path` starts.
    pub(crate) fn start(&self, path: &Path, gid: u32) -> WalkRecorder<'_> {
        let walk = Walk { path: path.to_owned(), gid, started: Instant::now(), files: Arc::default() };
        self.lock().current = Some(walk.clone());
        WalkRecorder { walks: self, walk }
    }

    /// The walk that is running now.
    pub(crate) fn current(&self) -> Option<Walk> {
        self.lock().current.clone()
    }

    /// Takes the walks that have ended since the last call.
    pub(crate) fn take_ended(&self) -> Vec<EndedWalk> {
        std::mem::take(&mut self.lock().ended)
    }
}

impl Walk {
    /// The number of files and folders visited so far.
    pub(crate) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }
}

impl WalkRecorder<'_> {
    /// Counts one more file or folder.
    pub(crate) fn count_file(&self) {
        self.walk.files.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the end of the walk.
    pub(crate) fn end(self, succeeded: bool) {
        let ended = EndedWalk { succeeded, duration: self.walk.started.elapsed(), files: self.walk.files() };
        tracing::debug!(
            path = %self.walk.path.display(),
            files = ended.files,
            elapsed_ms = u64::try_from(ended.duration.as_millis()).unwrap_or(u64::MAX),
            succeeded,
            "an fsGroup walk has ended"
        );
        let mut walks = self.walks.lock();
        walks.current = None;
        walks.ended.push(ended);
    }
}
