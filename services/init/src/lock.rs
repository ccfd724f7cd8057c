//! One agent per run dir, per root folder and per container runtime.
//!
//! A lock is flock(2) on a file: the kernel releases it when the process ends, so a new init gets it at once. The descriptors
//! are close-on-exec, so services do not inherit the locks. A child that was forked but had not called exec when init was
//! killed still holds them for a moment; the next init waits for that.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use keelson_config::Config;
use keelson_init_core::endpoint_lock_name;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};

/// How long a lock may be held by a child of a dead holder.
const ORPHANED_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the lock is retried meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// The folder of locks that do not belong to a folder of one agent.
const LOCK_DIR: &str = "/run/lock";

/// Why a lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent holds it.
    #[error("another keelson{holder} {what}; {remedy}")]
    Held {
        /// The holder, as far as it is known.
        holder: Holder,
        /// What the holder uses.
        what: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The file cannot be created or opened.
    #[error("cannot lock {}; its folder must be writable and have free space", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The agent that holds a lock, as written in the locked file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// Its process ID.
    pid: Option<u32>,
    /// Its run dir, with which operators can query it.
    run_dir: Option<String>,
}

impl Holder {
    /// Reads a line with the pid and a line with the run dir; an earlier release wrote only the first.
    fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let pid = lines.next().and_then(|line| line.trim().parse().ok());
        Self { pid, run_dir: lines.next().filter(|dir| !dir.is_empty()).map(ToOwned::to_owned) }
    }
}

impl Holder {
    /// Whether the process has ended. The lock is then held by a child that had not called exec when its init was killed; it
    /// is released when the child runs another program.
    fn is_gone(&self) -> bool {
        let pid = self.pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.run_dir) {
            (None, _) => Ok(()),
            (Some(pid), None) => write!(f, " (pid {pid})"),
            (Some(pid), Some(dir)) => write!(f, " (pid {pid}, run dir {dir})"),
        }
    }
}

/// The locks that init holds until it ends.
#[derive(Debug)]
pub struct Locks {
    _held: Vec<LockedFile>,
}

/// A locked file. It is removed when init ends in order.
#[derive(Debug)]
struct LockedFile {
    file: File,
    path: PathBuf,
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // Still locked: a process that has opened the file meanwhile sees that it was removed, and creates a new one.
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether the open file is still the one at this path.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Acquires the lock of the run dir alone, which protects writes there.
pub fn run_dir(config: &Config) -> Result<Locks, LockError> {
    Ok(Locks { _held: vec![lock_run_dir(config)?] })
}

/// Acquires all locks of an agent.
pub fn agent(config: &Config) -> Result<Locks, LockError> {
    let mut held = vec![lock_run_dir(config)?];
    let root = &config.paths.root_dir;
    let run = &config.paths.run_dir;
    held.push(acquire(
        &root.join(".keelson.lock"),
        run,
        || format!("uses the root folder {}", root.display()),
        "stop it, or give this one another folder with --root-dir",
    )?);
    let endpoint = real_endpoint(&config.runtime.endpoint);
    let path = Path::new(LOCK_DIR).join(endpoint_lock_name(&endpoint));
    let what = || format!("uses the container runtime at {}", config.runtime.endpoint);
    match acquire(
        &path,
        run,
        what,
        "stop it, or give this one another runtime with --container-runtime-endpoint",
    ) {
        Ok(file) => held.push(file),
        Err(error @ LockError::Held { .. }) => return Err(error),
        Err(LockError::Open { source, .. }) => {
            tracing::warn!(path = %path.display(), error = %source, "cannot lock the container runtime: a second agent on it will not be detected");
        }
    }
    Ok(Locks { _held: held })
}

fn lock_run_dir(config: &Config) -> Result<LockedFile, LockError> {
    let run = &config.paths.run_dir;
    acquire(
        &run.join("init.lock"),
        run,
        || format!("runs in {}", run.display()),
        "stop it, or give this one another folder with --run-dir",
    )
}

/// The endpoint with the links in its folder resolved: /var/run is /run.
fn real_endpoint(endpoint: &str) -> String {
    let path = Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint));
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return endpoint.to_owned() };
    let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    folder.join(name).to_string_lossy().into_owned()
}

fn acquire(
    path: &Path,
    run_dir: &Path,
    what: impl Fn() -> String,
    remedy: &'static str,
) -> Result<LockedFile, LockError> {
    let fail = |source| LockError::Open { path: path.to_owned(), source };
    let deadline = Instant::now() + ORPHANED_LOCK_TIMEOUT;
    loop {
        let mut file = open(path).map_err(fail)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // The holder ended in order between open and flock.
            Ok(()) if !is_at(&file, path) => continue,
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                let holder = Holder::read(&text);
                if Instant::now() < deadline && holder.is_gone() {
                    std::thread::sleep(RETRY_INTERVAL);
                    continue;
                }
                return Err(LockError::Held { holder, what: what(), remedy });
            }
            Err(error) => return Err(fail(error.into())),
        }
        // The text is for operators; the lock does not depend on it.
        let text = format!("{}\n{}\n", std::process::id(), run_dir.display());
        let _ = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
        return Ok(LockedFile { file, path: path.to_owned() });
    }
}

/// Opens or creates a lock file. Refuses a file of another user in a world-writable folder: its owner could hold the lock
/// forever.
fn open(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).mode(0o644);
    options.custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0));
    let file = match options.open(path) {
        // First without O_CREAT: fs.protected_regular refuses it for files of other users in sticky folders.
        Err(error) if error.kind() == io::ErrorKind::NotFound => options.create(true).open(path)?,
        other => other?,
    };
    let meta = file.metadata()?;
    if meta.uid() != geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file belongs to another user"));
    }
    // init's group is the operator group; files in folders of a kubelet and of the machine must have root's.
    if geteuid().is_root() && meta.gid() != 0 {
        fchown(&file, None, Some(0))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_reports_its_holder_and_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        let acquire = |run: &str| acquire(&path, Path::new(run), || "runs here".into(), "stop it");
        let first = acquire("/run/a").unwrap();
        let error = acquire("/run/b").unwrap_err();
        let pid = std::process::id();
        assert_eq!(
            error.to_string(),
            format!("another keelson (pid {pid}, run dir /run/a) runs here; stop it")
        );
        drop(first);
        assert!(!path.exists(), "the file is removed at the end");
        acquire("/run/b").unwrap();
    }

    #[test]
    fn a_lock_holder_is_described_by_the_locked_file() {
        for (text, expected) in [
            ("", ""),
            ("nonsense\n/run/a\n", ""),
            ("7\n", " (pid 7)"),
            ("7\n\n", " (pid 7)"),
            ("7\n/run/a\n", " (pid 7, run dir /run/a)"),
        ] {
            assert_eq!(Holder::read(text).to_string(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_lock_file_of_a_killed_init_is_reused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        fs::write(&path, "12345678\n").unwrap();
        let held = acquire(&path, Path::new("/run/a"), || "runs here".into(), "stop it").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n/run/a\n", std::process::id()));
        drop(held);
    }

    #[test]
    fn a_lock_held_by_a_child_of_a_killed_init_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        let held = fs::File::create(&path).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        // More than the highest pid: this process does not exist.
        fs::write(&path, "12345678\n/run/a\n").unwrap();
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let path = &path;
            scope
                .spawn(move || sender.send(acquire(path, Path::new("/run/b"), || "x".into(), "y").map(drop)));
            let early = receiver.recv_timeout(RETRY_INTERVAL * 20);
            assert!(early.is_err(), "the lock is still held: {early:?}");
            drop(held);
            receiver.recv().unwrap().unwrap();
        });
    }

    #[test]
    fn a_lock_file_is_not_opened_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("target"), &link).unwrap();
        let error = acquire(&link, Path::new("/run/a"), || "x".into(), "y").unwrap_err();
        assert!(matches!(error, LockError::Open { .. }));
        assert!(!dir.path().join("target").exists());
    }

    #[test]
    fn links_in_the_runtime_endpoint_folder_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        let endpoint = format!("unix://{}/link/c.sock", real.display());
        assert_eq!(real_endpoint(&endpoint), format!("{}/c.sock", real.display()));
    }
}
