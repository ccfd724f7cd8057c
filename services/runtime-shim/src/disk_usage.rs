//! Disk usage of the files that a container may write to and that are in neither a layer nor a volume: its log, its
//! termination logs, and the hosts file of its pod.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, statat};

use crate::files::{CONTAINERS, Files, HOSTS_FILE, check_name};
use crate::filesystem::DiskUsage;

impl Files {
    /// Disk usage of the regular files in a log's folder.
    ///
    /// # Errors
    /// The folder does not exist, or is not beneath the pods' log folder.
    pub(crate) fn log_disk_usage(&self, folder: &Path) -> io::Result<DiskUsage> {
        usage_of_files(&self.open_log_folder(folder)?)
    }

    /// Disk usage of a pod's hosts file; 0 if it has none.
    ///
    /// # Errors
    /// The pod has no folder.
    pub(crate) fn hosts_file_disk_usage(&self, uid: &str) -> io::Result<DiskUsage> {
        check_name(uid).map_err(io::Error::other)?;
        let folder = self.open_root_folder(&self.paths.pod_dir(uid))?;
        let mut usage = DiskUsage::default();
        add_file(&mut usage, &folder, HOSTS_FILE);
        Ok(usage)
    }

    /// Disk usage of the termination logs of all attempts of a container.
    ///
    /// # Errors
    /// The container has none.
    pub(crate) fn termination_log_disk_usage(&self, uid: &str, container: &str) -> io::Result<DiskUsage> {
        check_name(uid).and_then(|()| check_name(container)).map_err(io::Error::other)?;
        usage_of_files(&self.open_root_folder(&self.paths.pod_dir(uid).join(CONTAINERS).join(container))?)
    }
}

fn usage_of_files(folder: &OwnedFd) -> io::Result<DiskUsage> {
    let mut usage = DiskUsage::default();
    for entry in Dir::read_from(folder)? {
        add_file(&mut usage, folder, entry?.file_name());
    }
    Ok(usage)
}

/// Adds the usage of a regular file. A file removed in the meantime adds nothing.
fn add_file(usage: &mut DiskUsage, folder: &OwnedFd, name: impl rustix::path::Arg) {
    let Ok(stat) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    if FileType::from_raw_mode(stat.st_mode).is_file() {
        // `st_blocks` counts 512-byte blocks on every file system (stat(2)).
        usage.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        usage.inodes += 1;
    }
}
