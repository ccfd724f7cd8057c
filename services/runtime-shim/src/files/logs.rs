//! The log folders of pods: who created them, and the removal of those that no pod needs.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use keelson_runtime_shim_core::file_lock::flock_holder;
use keelson_runtime_shim_core::log_names::uid_of_log_folder;
use keelson_service_kit::status::chain;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{FileError, Files, make_dir, write_file};

/// File in a pod's log folder that holds the root folder of the agent that created it; no two agents share one.
pub(super) const OWNER_MARK: &str = ".keelson";

/// Why logs could not be swept.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The folder of the pods' logs cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error("{} is being swept by {by}; set another podLogsDir for one of the two agents", path.display())]
    Held {
        /// The folder.
        path: PathBuf,
        /// The process, if known.
        by: String,
    },
}

impl Files {
    /// Creates a pod's log folder, the `log_directory` of a sandbox. Does nothing outside the folder of the pods' logs.
    pub fn make_log_dir(&self, dir: &Path) -> Result<(), FileError> {
        if !dir.starts_with(&self.paths.pod_logs_dir) || dir.components().any(|c| c.as_os_str() == "..") {
            return Ok(());
        }
        make_dir(dir, 0o755)?;
        self.mark(dir)
    }

    /// Marks a pod's log folder as created by this agent. Other agents on the machine may have folders next to it.
    fn mark(&self, dir: &Path) -> Result<(), FileError> {
        let mark = dir.join(OWNER_MARK);
        let own = self.paths.root_dir.as_os_str().as_encoded_bytes();
        if dir.parent() != Some(&*self.paths.pod_logs_dir) || fs::read(&mark).is_ok_and(|text| text == own) {
            return Ok(());
        }
        write_file(&mark, own, 0o644)
    }

    /// Whether this agent created a pod's log folder.
    pub(super) fn is_own(&self, dir: &Path) -> bool {
        fs::read(dir.join(OWNER_MARK))
            .is_ok_and(|text| text == self.paths.root_dir.as_os_str().as_encoded_bytes())
    }

    /// Marks a log folder without a mark that belongs to a pod of this agent. It was created by an older agent version, or
    /// by the kubelet that this agent replaced.
    fn adopt(&self, dir: &Path) {
        if fs::symlink_metadata(dir.join(OWNER_MARK)).is_ok_and(|mark| mark.is_file()) {
            return;
        }
        if let Err(error) = self.mark(dir) {
            tracing::warn!(folder = %dir.display(), error = chain(&error), "cannot mark a pod's log folder as this agent's");
        }
    }

    /// Whether `dir` was a pod's log folder and no longer exists.
    fn was_removed(&self, dir: &Path) -> bool {
        dir.parent() == Some(&*self.paths.pod_logs_dir)
            && fs::symlink_metadata(dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Removes a pod's log folder. The links into it are removed first, so that a kill in between leaves no dangling link.
    pub(super) fn remove_logs(&self, dir: &Path) -> bool {
        for entry in fs::read_dir(&self.paths.container_links_dir).into_iter().flatten().flatten() {
            if fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(dir)) {
                let _ = fs::remove_file(entry.path());
            }
        }
        // The mark is removed last: after a kill or an error the folder is still known as this agent's.
        for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.file_name() != OWNER_MARK)
        {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let path = entry.path();
            let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            if removed.is_err() {
                return false;
            }
        }
        fs::remove_dir_all(dir).is_ok()
    }

    /// Removes this agent's log folders `<namespace>_<name>_<uid>` with a UID that is not `known`, and its links to logs
    /// that no longer exist. Returns the number of removed folders. Folders of other agents on this machine are kept.
    ///
    /// # Errors
    /// The folder of the pods' logs cannot be opened, or another agent is sweeping it.
    pub fn sweep_logs(&self, known: impl Fn(&str) -> bool) -> Result<usize, SweepError> {
        let _lock = self.lock_logs()?;
        let mut removed = 0;
        for entry in fs::read_dir(&self.paths.pod_logs_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(uid) = name.to_str().and_then(uid_of_log_folder) else { continue };
            if known(uid) {
                self.adopt(&entry.path());
            } else if self.is_own(&entry.path()) && self.remove_logs(&entry.path()) {
                removed += 1;
            }
        }
        for entry in fs::read_dir(&self.paths.container_links_dir).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let folder = target.parent().and_then(Path::parent);
            let own = folder.is_some_and(|dir| self.is_own(dir) || self.was_removed(dir));
            if own && fs::metadata(&target).is_err() {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(removed)
    }

    /// Locks the folder of the pods' logs for a sweep.
    fn lock_logs(&self) -> Result<File, SweepError> {
        let path = &self.paths.pod_logs_dir;
        let open = |source| SweepError::Open { path: path.clone(), source };
        let folder = File::open(path).map_err(open)?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(folder),
            Err(Errno::WOULDBLOCK) => {
                let by = lock_holder_text(&folder.metadata().map_err(open)?);
                Err(SweepError::Held { path: path.clone(), by })
            }
            Err(errno) => Err(open(errno.into())),
        }
    }
}

/// A text for the process that has locked a folder.
fn lock_holder_text(folder: &fs::Metadata) -> String {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let device = (rustix::fs::major(folder.dev()), rustix::fs::minor(folder.dev()));
    let Some(pid) = flock_holder(&locks, device, folder.ino()) else {
        return "another process".to_owned();
    };
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("process {pid} ({})", name.trim())
}
