//! A folder for one run, and the end of runs that could not clean up themselves.

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};

use crate::Remains;

/// Short, because a unix socket's path has 108 bytes at most (unix(7)).
const PREFIX: &str = "k-";

/// Held locked by the run as long as it lives; the kernel lets go when the process dies.
const LOCK_FILE: &str = "owner.lock";

/// The file that lists everything that the run removes at its end, in case the run is killed before.
const REMAINS_FILE: &str = "remains.json";

/// A folder `/tmp/k-XXXXXX` of mode 0755, removed with everything in it when dropped.
///
/// Unlike a private temporary folder it can be entered by the users that the services run as.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Makes the folder, and removes what killed runs have left behind.
    pub fn new() -> anyhow::Result<Self> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        for _ in 0..64 {
            let name: String = std::iter::repeat_with(|| fastrand::char('a'..='z')).take(6).collect();
            let path = parent.join(format!("{PREFIX}{name}"));
            match fs::DirBuilder::new().mode(0o755).create(&path) {
                Ok(()) => return Self::own(path),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot make {}", path.display()));
                }
            }
        }
        anyhow::bail!("{} is full of folders named {PREFIX}…", parent.display())
    }

    fn own(path: PathBuf) -> anyhow::Result<Self> {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        // Locked before it has its name, so that no sweep ever finds it unlocked.
        let (unnamed, lock_path) = (path.join("owner.new"), path.join(LOCK_FILE));
        let lock = File::create(&unnamed).with_context(|| format!("cannot make {}", unnamed.display()))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .and_then(|()| rustix::fs::rename(&unnamed, &lock_path))
            .with_context(|| format!("cannot lock {}", lock_path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let remains = Remains { dirs: vec![self.path.clone()], ..Remains::default() };
        report(&self.path, &remains.remove());
    }
}

/// Writes down what is to be removed should this process be killed, when `dir` is in a [`Scratch`].
pub(crate) fn remember(dir: &Path, remains: &Remains) -> anyhow::Result<()> {
    let Some(owner) = dir.ancestors().find(|folder| folder.join(LOCK_FILE).is_file()) else {
        return Ok(());
    };
    let path = owner.join(REMAINS_FILE);
    let mut all = read_remains(owner);
    all.merge(remains);
    fs::write(&path, serde_json::to_vec(&all)?).with_context(|| format!("cannot write {}", path.display()))
}

/// Says on standard error what could not be removed; a drop has no other way.
pub(crate) fn report(what: &Path, problems: &[String]) {
    for problem in problems {
        eprintln!("clean-up of {}: {problem}", what.display());
    }
}

fn read_remains(folder: &Path) -> Remains {
    fs::read(folder.join(REMAINS_FILE))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Removes the runs below `parent` whose process is dead.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for folder in entries.flatten().map(|entry| entry.path()) {
        let named = folder.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(PREFIX));
        let lock_path = folder.join(LOCK_FILE);
        // Without the lock file it is not ours, or its owner is just making it.
        let Some(lock) = File::open(&lock_path).ok().filter(|_| named) else { continue };
        let dead = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        // Another sweep may have had it first.
        if dead && lock_path.is_file() {
            let mut remains = read_remains(&folder);
            remains.dirs.push(folder.clone());
            report(&folder, &remains.remove());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_dead_runs_are_removed_and_of_live_runs_kept() {
        let parent = Scratch::new().unwrap();
        let (dead, alive) = (parent.path().join("k-dead"), parent.path().join("k-alive"));
        for folder in [&dead, &alive] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(LOCK_FILE), "").unwrap();
        }
        let lock = File::open(alive.join(LOCK_FILE)).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        sweep(parent.path());
        assert!(!dead.exists());
        assert!(alive.exists());
    }

    #[test]
    fn duplicate_records_are_merged() {
        let scratch = Scratch::new().unwrap();
        for bridge in ["kb1", "kb2"] {
            let remains = Remains { bridges: vec![bridge.to_owned()], ..Remains::default() };
            remember(&scratch.path().join("a/b"), &remains).unwrap();
        }
        assert_eq!(read_remains(scratch.path()).bridges, ["kb1", "kb2"]);
    }
}
