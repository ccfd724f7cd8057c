//! `--lock-file` and `--exit-on-lock-contention` (node-and-api.md §4.7).
//!
//! A supervisor that starts a new agent beside an old one has the new one wait here, and the old one give way. The lock is
//! flock(2): it goes with the process however that ends, and its descriptor is close-on-exec, so that no service keeps it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use keelson_service_kit::CancellationToken;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// What the command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LockFile {
    /// `--lock-file`.
    pub(crate) path: PathBuf,
    /// `--exit-on-lock-contention`.
    pub(crate) gives_way: bool,
}

/// Why there is no lock.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockFileError {
    /// The file cannot be made or opened.
    #[error("cannot open {} that --lock-file names", path.display())]
    Open { path: PathBuf, source: io::Error },
    /// The kernel has no lock for it.
    #[error("cannot lock {} that --lock-file names", path.display())]
    Lock { path: PathBuf, source: io::Error },
    /// Nobody would be heard who wants the lock.
    #[error("cannot watch {} that --lock-file names, for --exit-on-lock-contention", path.display())]
    Watch { path: PathBuf, source: io::Error },
}

/// A lock that is held as long as this lives.
#[derive(Debug)]
pub(crate) struct Held {
    _file: File,
    watch: Option<AsyncFd<OwnedFd>>,
}

impl LockFile {
    /// Waits for the lock as long as it takes; `None` when `shutdown` comes first.
    pub(crate) async fn take(&self, shutdown: &CancellationToken) -> Result<Option<Held>, LockFileError> {
        let path = &self.path;
        let file = open(path).map_err(|source| LockFileError::Open { path: path.clone(), source })?;
        tracing::info!(path = %path.display(), "Acquiring file lock");
        let (tell, told) = oneshot::channel();
        // A thread of its own, which nobody waits for: the call has no end when the lock is never free.
        let work = move || {
            let locked = retry_on_intr(|| flock(&file, FlockOperation::LockExclusive));
            drop(tell.send(locked.map(|()| file)));
        };
        let lock = |source: io::Error| LockFileError::Lock { path: path.clone(), source };
        std::thread::Builder::new().name("lock-file".into()).spawn(work).map_err(lock)?;
        // Cancel-safe: a lock that comes after all goes with the file that holds it.
        let file = tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            locked = told => match locked {
                Ok(locked) => locked.map_err(|error| lock(error.into()))?,
                Err(_) => return Err(lock(io::Error::other("the thread that waits for it has ended"))),
            },
        };
        let watch = self.gives_way.then(|| watch(path)).transpose();
        let watch = watch.map_err(|source| LockFileError::Watch { path: path.clone(), source })?;
        Ok(Some(Held { _file: file, watch }))
    }
}

impl Held {
    /// Waits until somebody opens the file or it is gone; for ever where nobody is given way to. Cancel-safe: an event stays
    /// with the kernel.
    pub(crate) async fn contended(&self) {
        let Some(watch) = &self.watch else { return std::future::pending().await };
        if watch.readable().await.is_err() {
            std::future::pending().await
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // What is in it is of no interest, so that nothing is lost that somebody keeps there.
    fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Watches for opens and the end of the file (inotify(7)).
fn watch(path: &Path) -> io::Result<AsyncFd<OwnedFd>> {
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    inotify::add_watch(&events, path, WatchFlags::OPEN | WatchFlags::DELETE_SELF)?;
    // SAFETY: the descriptor is open, and owned by what is registered as long as that lives.
    Ok(unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) }?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_millis(200);
    const PATIENCE: Duration = Duration::from_secs(30);

    fn lock_file(dir: &tempfile::TempDir, gives_way: bool) -> LockFile {
        LockFile { path: dir.path().join("lock"), gives_way }
    }

    #[tokio::test]
    async fn the_lock_is_waited_for_until_it_is_free_or_the_end_comes() {
        let dir = tempfile::tempdir().unwrap();
        let lock = lock_file(&dir, false);
        let shutdown = CancellationToken::new();
        let first = lock.take(&shutdown).await.unwrap().unwrap();
        let mode = fs::metadata(&lock.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let early = tokio::time::timeout(SOON, lock.take(&shutdown)).await;
        assert!(early.is_err(), "it is held: {early:?}");
        let ended = CancellationToken::new();
        ended.cancel();
        assert!(lock.take(&ended).await.unwrap().is_none());
        drop(first);
        let second = tokio::time::timeout(PATIENCE, lock.take(&shutdown)).await.unwrap();
        assert!(second.unwrap().is_some());
    }

    #[tokio::test]
    async fn who_gives_way_hears_of_an_open_and_nobody_else_does() {
        for gives_way in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let lock = lock_file(&dir, gives_way);
            let held = lock.take(&CancellationToken::new()).await.unwrap().unwrap();
            assert!(tokio::time::timeout(SOON, held.contended()).await.is_err(), "nobody has opened it");
            drop(fs::File::open(&lock.path).unwrap());
            let patience = if gives_way { PATIENCE } else { SOON };
            assert_eq!(tokio::time::timeout(patience, held.contended()).await.is_ok(), gives_way);
        }
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_made_is_named() {
        let lock = LockFile { path: "/nonexistent/lock".into(), gives_way: false };
        let error = lock.take(&CancellationToken::new()).await.unwrap_err();
        assert_eq!(error.to_string(), "cannot open /nonexistent/lock that --lock-file names");
    }
}
