//! `--lock-file` and `--exit-on-lock-contention` (node-and-api.md §4.7).
//!
//! With these flags a new agent waits for the lock, and the old one exits when the new one opens the file. The lock is
//! flock(2): the kernel releases it when the process ends, and the descriptor is close-on-exec, so services do not inherit
//! it.

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

/// The lock that the command line requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LockFile {
    /// `--lock-file`.
    pub(crate) path: PathBuf,
    /// `--exit-on-lock-contention`.
    pub(crate) exit_on_contention: bool,
}

/// Why there is no lock.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockFileError {
    /// The file cannot be created or opened.
    #[error("cannot open {} that --lock-file names", path.display())]
    Open { path: PathBuf, source: io::Error },
    /// The kernel cannot lock it.
    #[error("cannot lock {} that --lock-file names", path.display())]
    Lock { path: PathBuf, source: io::Error },
    /// The file cannot be watched for contention.
    #[error("cannot watch {} that --lock-file names, for --exit-on-lock-contention", path.display())]
    Watch { path: PathBuf, source: io::Error },
}

/// An acquired lock; dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct FileLock {
    _file: File,
    watch: Option<AsyncFd<OwnedFd>>,
}

impl LockFile {
    /// Waits for the lock without a timeout; `None` if `shutdown` comes first.
    pub(crate) async fn acquire(
        &self,
        shutdown: &CancellationToken,
    ) -> Result<Option<FileLock>, LockFileError> {
        let path = &self.path;
        let file = open(path).map_err(|source| LockFileError::Open { path: path.clone(), source })?;
        tracing::info!(path = %path.display(), "Acquiring file lock");
        let (sender, receiver) = oneshot::channel();
        // A detached thread: the call blocks forever if the lock is never released.
        let work = move || {
            let locked = retry_on_intr(|| flock(&file, FlockOperation::LockExclusive));
            drop(sender.send(locked.map(|()| file)));
        };
        let lock = |source: io::Error| LockFileError::Lock { path: path.clone(), source };
        std::thread::Builder::new().name("lock-file".into()).spawn(work).map_err(lock)?;
        // Cancel-safe: a lock that is acquired later is released when its file is dropped.
        let file = tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            locked = receiver => match locked {
                Ok(locked) => locked.map_err(|error| lock(error.into()))?,
                Err(_) => return Err(lock(io::Error::other("the thread that waits for the lock has ended"))),
            },
        };
        let watch = self.exit_on_contention.then(|| watch(path)).transpose();
        let watch = watch.map_err(|source| LockFileError::Watch { path: path.clone(), source })?;
        Ok(Some(FileLock { _file: file, watch }))
    }
}

impl FileLock {
    /// Waits until another process opens or removes the file; forever without `--exit-on-lock-contention`. Cancel-safe: the
    /// event stays pending in the kernel.
    pub(crate) async fn contended(&self) {
        let Some(watch) = &self.watch else { return std::future::pending().await };
        if watch.readable().await.is_err() {
            std::future::pending().await
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // The content is not used, so it must not be truncated.
    fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Watches for opens and the removal of the file (inotify(7)).
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
    const TIMEOUT: Duration = Duration::from_secs(30);

    fn lock_file(dir: &tempfile::TempDir, exit_on_contention: bool) -> LockFile {
        LockFile { path: dir.path().join("lock"), exit_on_contention }
    }

    #[tokio::test]
    async fn lock_file_waits_for_release_or_shutdown() {
        let dir = tempfile::tempdir().unwrap();
        let lock = lock_file(&dir, false);
        let shutdown = CancellationToken::new();
        let first = lock.acquire(&shutdown).await.unwrap().unwrap();
        let mode = fs::metadata(&lock.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let early = tokio::time::timeout(SOON, lock.acquire(&shutdown)).await;
        assert!(early.is_err(), "it is held: {early:?}");
        let ended = CancellationToken::new();
        ended.cancel();
        assert!(lock.acquire(&ended).await.unwrap().is_none());
        drop(first);
        let second = tokio::time::timeout(TIMEOUT, lock.acquire(&shutdown)).await.unwrap();
        assert!(second.unwrap().is_some());
    }

    #[tokio::test]
    async fn lock_contention_is_detected_only_with_exit_on_lock_contention() {
        for exit_on_contention in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let lock = lock_file(&dir, exit_on_contention);
            let held = lock.acquire(&CancellationToken::new()).await.unwrap().unwrap();
            assert!(tokio::time::timeout(SOON, held.contended()).await.is_err(), "no process has opened it");
            drop(fs::File::open(&lock.path).unwrap());
            let timeout = if exit_on_contention { TIMEOUT } else { SOON };
            assert_eq!(tokio::time::timeout(timeout, held.contended()).await.is_ok(), exit_on_contention);
        }
    }

    #[tokio::test]
    async fn a_lock_file_that_cannot_be_created_is_reported() {
        let lock = LockFile { path: "/nonexistent/lock".into(), exit_on_contention: false };
        let error = lock.acquire(&CancellationToken::new()).await.unwrap_err();
        assert_eq!(error.to_string(), "cannot open /nonexistent/lock that --lock-file names");
    }
}
