//! What the files take on the disk that a container may write to and that are in neither a layer nor a volume: its log, its
//! termination logs, and the hosts file of its pod.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, OFlags, statat};

use crate::files::{CONTAINERS, Files, HOSTS_FILE, check_name, descriptor_beneath};
use crate::filesystem::Share;

impl Files {
    /// What the regular files of a log's folder take on the disk.
    ///
    /// # Errors
    /// The folder is not there, or not below that of all logs.
    pub(crate) fn log_share(&self, folder: &Path) -> io::Result<Share> {
        share_of_files(&self.open_log_folder(folder)?)
    }

    /// What the hosts file of a pod takes; nothing where it has none.
    ///
    /// # Errors
    /// The pod has no folder.
    pub(crate) fn hosts_file_share(&self, uid: &str) -> io::Result<Share> {
        check_name(uid).map_err(io::Error::other)?;
        let folder = self.open_pod_folder(&self.paths.pod_dir(uid))?;
        let mut share = Share::default();
        add_file(&mut share, &folder, HOSTS_FILE);
        Ok(share)
    }

    /// What the termination logs of all attempts of a container take.
    ///
    /// # Errors
    /// The container has none.
    pub(crate) fn termination_log_share(&self, uid: &str, container: &str) -> io::Result<Share> {
        check_name(uid).and_then(|()| check_name(container)).map_err(io::Error::other)?;
        share_of_files(&self.open_pod_folder(&self.paths.pod_dir(uid).join(CONTAINERS).join(container))?)
    }

    fn open_pod_folder(&self, folder: &Path) -> io::Result<OwnedFd> {
        descriptor_beneath(&self.paths.root_dir, folder, OFlags::DIRECTORY)
    }
}

fn share_of_files(folder: &OwnedFd) -> io::Result<Share> {
    let mut share = Share::default();
    for entry in Dir::read_from(folder)? {
        add_file(&mut share, folder, entry?.file_name());
    }
    Ok(share)
}

/// Adds what a regular file takes. One that goes meanwhile takes nothing.
fn add_file(share: &mut Share, folder: &OwnedFd, name: impl rustix::path::Arg) {
    let Ok(stat) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    if FileType::from_raw_mode(stat.st_mode).is_file() {
        // Blocks have 512 bytes whatever the file system's have (stat(2)).
        share.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        share.inodes += 1;
    }
}
