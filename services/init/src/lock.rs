//! One agent per run dir, per root folder and per container runtime.
//!
//! A lock is flock(2) on a file: it goes with the process, however that ends, and a new init takes it over at
//! once. The descriptors are close-on-exec, so no service keeps a lock of its init; a child that was about to become one
//! when init was killed keeps it for that moment, which is waited for.

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

/// How long a lock may stay with a child of a holder that is gone.
const LEFT_BEHIND: Duration = Duration::from_secs(5);
/// How often it is tried meanwhile.
const AGAIN: Duration = Duration::from_millis(10);
/// Where locks lie that belong to no folder of one agent.
const LOCKS: &str = "/run/lock";

/// Why a lock is not ours.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent has it.
    #[error("another keelson{holder} {what}; {way_out}")]
    Taken {
        /// Who it is, as far as it tells.
        holder: Holder,
        /// What it uses.
        what: String,
        /// What to do about it.
        way_out: &'static str,
    },
    /// The file cannot be made or opened.
    #[error("cannot lock {}; its folder must be writable and have room", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The agent that has a lock, as it says itself in the locked file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// Its process.
    pid: Option<u32>,
    /// Its run dir, by which people ask it what it is.
    run_dir: Option<String>,
}

impl Holder {
    /// A line with the pid and one with the run dir; an earlier release wrote only the first.
    fn read(text: &str) -> Self {
        let mut lines = text.lines();
        let pid = lines.next().and_then(|line| line.trim().parse().ok());
        Self { pid, run_dir: lines.next().filter(|dir| !dir.is_empty()).map(ToOwned::to_owned) }
    }
}

impl Holder {
    /// Whether its process has ended. What holds the lock then is a child that it had not yet turned into a service when it
    /// was killed: the lock goes with the last descriptor, and the child's are closed as it runs another program.
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

/// The locks that init holds as long as it lives.
#[derive(Debug)]
pub struct Locks {
    _held: Vec<Held>,
}

/// A locked file. An init that ends in order leaves none.
#[derive(Debug)]
struct Held {
    file: File,
    path: PathBuf,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Still locked: whoever has opened it meanwhile sees that its name is gone, and opens a new one.
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether the open file is the one that has the name.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Takes the lock of the run dir alone: nobody else writes there.
pub fn run_dir(config: &Config) -> Result<Locks, LockError> {
    Ok(Locks { _held: vec![lock_run_dir(config)?] })
}

/// Takes every lock of an agent.
pub fn agent(config: &Config) -> Result<Locks, LockError> {
    let mut held = vec![lock_run_dir(config)?];
    let root = &config.paths.root_dir;
    let run = &config.paths.run_dir;
    held.push(take(
        &root.join(".keelson.lock"),
        run,
        || format!("uses the root folder {}", root.display()),
        "stop it, or give this one another folder with --root-dir",
    )?);
    let endpoint = real_endpoint(&config.runtime.endpoint);
    let path = Path::new(LOCKS).join(endpoint_lock_name(&endpoint));
    let what = || format!("uses the container runtime at {}", config.runtime.endpoint);
    match take(
        &path,
        run,
        what,
        "stop it, or give this one another runtime with --container-runtime-endpoint",
    ) {
        Ok(file) => held.push(file),
        Err(error @ LockError::Taken { .. }) => return Err(error),
        Err(LockError::Open { source, .. }) => {
            tracing::warn!(path = %path.display(), error = %source, "no lock on the container runtime: two agents on one runtime will not be noticed");
        }
    }
    Ok(Locks { _held: held })
}

fn lock_run_dir(config: &Config) -> Result<Held, LockError> {
    let run = &config.paths.run_dir;
    take(
        &run.join("init.lock"),
        run,
        || format!("runs in {}", run.display()),
        "stop it, or give this one another folder with --run-dir",
    )
}

/// The endpoint with the links of its folder resolved: /var/run is /run.
fn real_endpoint(endpoint: &str) -> String {
    let path = Path::new(endpoint.strip_prefix("unix://").unwrap_or(endpoint));
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return endpoint.to_owned() };
    let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
    folder.join(name).to_string_lossy().into_owned()
}

fn take(
    path: &Path,
    run_dir: &Path,
    what: impl Fn() -> String,
    way_out: &'static str,
) -> Result<Held, LockError> {
    let fail = |source| LockError::Open { path: path.to_owned(), source };
    let patience = Instant::now() + LEFT_BEHIND;
    loop {
        let mut file = open(path).map_err(fail)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Its holder has ended in order between our open and our lock.
            Ok(()) if !is_at(&file, path) => continue,
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                let holder = Holder::read(&text);
                if Instant::now() < patience && holder.is_gone() {
                    std::thread::sleep(AGAIN);
                    continue;
                }
                return Err(LockError::Taken { holder, what: what(), way_out });
            }
            Err(error) => return Err(fail(error.into())),
        }
        // Both are for people; the lock holds without them.
        let told = format!("{}\n{}\n", std::process::id(), run_dir.display());
        let _ = file.set_len(0).and_then(|()| file.write_all(told.as_bytes()));
        return Ok(Held { file, path: path.to_owned() });
    }
}

/// Opens or makes a lock file. Somebody else's file in a folder of all users is not taken: whoever made it
/// could hold it for ever.
fn open(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).mode(0o644);
    options.custom_flags(i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0));
    let file = match options.open(path) {
        // Without O_CREAT first: fs.protected_regular refuses it for files of others in sticky folders.
        Err(error) if error.kind() == io::ErrorKind::NotFound => options.create(true).open(path)?,
        other => other?,
    };
    let meta = file.metadata()?;
    if meta.uid() != geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file belongs to another user"));
    }
    // init has the operators' group; in the folders of a kubelet and of the machine all is root's.
    if geteuid().is_root() && meta.gid() != 0 {
        fchown(&file, None, Some(0))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_taker_is_told_who_the_first_is_and_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        let take = |run: &str| take(&path, Path::new(run), || "runs here".into(), "stop it");
        let first = take("/run/a").unwrap();
        let error = take("/run/b").unwrap_err();
        let pid = std::process::id();
        assert_eq!(
            error.to_string(),
            format!("another keelson (pid {pid}, run dir /run/a) runs here; stop it")
        );
        drop(first);
        assert!(!path.exists(), "an orderly end leaves no file");
        take("/run/b").unwrap();
    }

    #[test]
    fn a_holder_is_named_by_what_it_tells() {
        for (text, told) in [
            ("", ""),
            ("nonsense\n/run/a\n", ""),
            ("7\n", " (pid 7)"),
            ("7\n\n", " (pid 7)"),
            ("7\n/run/a\n", " (pid 7, run dir /run/a)"),
        ] {
            assert_eq!(Holder::read(text).to_string(), told, "{text:?}");
        }
    }

    #[test]
    fn a_file_that_a_killed_init_has_left_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        fs::write(&path, "12345678\n").unwrap();
        let held = take(&path, Path::new("/run/a"), || "runs here".into(), "stop it").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n/run/a\n", std::process::id()));
        drop(held);
    }

    #[test]
    fn a_lock_that_a_child_of_a_killed_init_still_has_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("init.lock");
        let held = fs::File::create(&path).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        // More than any process can have: it is gone.
        fs::write(&path, "12345678\n/run/a\n").unwrap();
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let path = &path;
            scope.spawn(move || tell.send(take(path, Path::new("/run/b"), || "x".into(), "y").map(drop)));
            let early = told.recv_timeout(AGAIN * 20);
            assert!(early.is_err(), "it is not ours yet: {early:?}");
            drop(held);
            told.recv().unwrap().unwrap();
        });
    }

    #[test]
    fn a_lock_is_not_taken_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("target"), &link).unwrap();
        let error = take(&link, Path::new("/run/a"), || "x".into(), "y").unwrap_err();
        assert!(matches!(error, LockError::Open { .. }));
        assert!(!dir.path().join("target").exists());
    }

    #[test]
    fn links_in_the_folder_of_a_socket_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        let endpoint = format!("unix://{}/link/c.sock", real.display());
        assert_eq!(real_endpoint(&endpoint), format!("{}/c.sock", real.display()));
    }
}
