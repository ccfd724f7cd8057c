//! Measures the usage of a volume. All functions block, and may hang if the file system hangs.

use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::mounts::is_mount_point;
use crate::plugin_error::PluginError;
use crate::remove::{open_child, open_folder};

/// The number of folders that are open at the same time, regardless of the depth.
const MAX_OPEN: usize = 32;
/// The number of hard-linked files that are remembered so that each counts once. Further ones count with each link.
const MAX_LINKED: usize = 1 << 20;
/// Bytes per block of stat(2), on every file system.
const BLOCK: u64 = 512;

/// Why a volume could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeasureError {
    /// The volume is not mounted or missing.
    #[error("the volume is not mounted")]
    NotMounted,
    /// The volume is being torn down.
    #[error("the measurement was cancelled")]
    Cancelled,
    /// A folder was moved while its content was summed up.
    #[error("a folder of the volume was moved during the measurement")]
    FolderMoved,
    /// The helper process has not measured the volume of a plugin.
    #[error("{0}")]
    Helper(PluginError),
    /// A system call has failed.
    #[error("cannot {operation}")]
    Io { operation: &'static str, source: io::Error },
}

fn failed(operation: &'static str) -> impl Fn(Errno) -> MeasureError {
    move |errno| MeasureError::Io { operation, source: errno.into() }
}

/// The usage of a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Usage {
    pub(crate) used_bytes: u64,
    pub(crate) capacity_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) inodes_used: u64,
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
}

/// The usage of a volume with a file system of its own, from its statistics.
pub(crate) fn by_file_system(path: &Path) -> Result<Usage, MeasureError> {
    if !is_mount_point(path).map_err(|e| failed_with("stat the volume", e))? {
        return Err(MeasureError::NotMounted);
    }
    usage_of_file_system(rustix::fs::statvfs(path))
}

fn failed_with(operation: &'static str, error: crate::mounts::MountError) -> MeasureError {
    MeasureError::Io { operation, source: io::Error::other(error) }
}

fn usage_of_file_system(stat: Result<rustix::fs::StatVfs, Errno>) -> Result<Usage, MeasureError> {
    let stat = stat.map_err(failed("read the statistics of the file system"))?;
    let size = stat.f_frsize;
    Ok(Usage {
        used_bytes: stat.f_blocks.saturating_sub(stat.f_bfree).saturating_mul(size),
        capacity_bytes: stat.f_blocks.saturating_mul(size),
        available_bytes: stat.f_bavail.saturating_mul(size),
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
        inodes: stat.f_files,
        inodes_free: stat.f_ffree,
    })
}

/// The usage of a folder: the blocks of its files, each counted once, without other file systems and mounts. Files that
/// are removed meanwhile are left out. Stops when `stop` is set.
pub(crate) fn by_walk(path: &Path, stop: &AtomicBool) -> Result<Usage, MeasureError> {
    let top = open_folder(path)
        .map_err(|e| MeasureError::Io { operation: "open the volume", source: io::Error::other(e) })?
        .ok_or(MeasureError::NotMounted)?;
    let whole = usage_of_file_system(rustix::fs::fstatvfs(&top))?;
    let own = statx(top.as_fd(), c"", AtFlags::EMPTY_PATH).map_err(failed("stat the volume"))?;
    let mut sum = Sum { device: device_of(&own), bytes: 0, inodes: 0, linked: HashSet::new() };
    sum.add(&own);
    sum_up(top, &mut sum, stop)?;
    Ok(Usage { used_bytes: sum.bytes, inodes_used: sum.inodes, ..whole })
}

struct Sum {
    device: (u32, u32),
    bytes: u64,
    inodes: u64,
    /// Inodes of hard-linked files that have been counted.
    linked: HashSet<u64>,
}

impl Sum {
    /// Counts an entry. Returns whether it is a folder to enter.
    fn add(&mut self, stat: &Statx) -> bool {
        if device_of(stat) != self.device {
            return false;
        }
        let is_folder = FileType::from_raw_mode(u32::from(stat.stx_mode)) == FileType::Directory;
        if !is_folder && stat.stx_nlink > 1 {
            if self.linked.contains(&stat.stx_ino) {
                return false;
            }
            if self.linked.len() < MAX_LINKED {
                self.linked.insert(stat.stx_ino);
            }
        }
        self.bytes = self.bytes.saturating_add(stat.stx_blocks.saturating_mul(BLOCK));
        self.inodes += 1;
        is_folder
    }
}

fn device_of(stat: &Statx) -> (u32, u32) {
    (stat.stx_dev_major, stat.stx_dev_minor)
}

fn statx(folder: BorrowedFd<'_>, name: &std::ffi::CStr, flags: AtFlags) -> Result<Statx, Errno> {
    let flags = flags | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(folder, name, flags, StatxFlags::BASIC_STATS)
}

/// A folder on the path to the current one. Of those far up only the identity is kept; they are reopened on the way back.
struct Level {
    fd: Option<OwnedFd>,
    identity: (u32, u32, u64),
    /// Sub-folders that are not visited yet.
    remaining: Vec<CString>,
}

impl Level {
    /// Reads a folder and counts its entries.
    fn read(fd: OwnedFd, sum: &mut Sum, stop: &AtomicBool) -> Result<Self, MeasureError> {
        let mut remaining = Vec::new();
        for entry in Dir::read_from(&fd).map_err(failed("read a folder"))? {
            if stop.load(Ordering::Relaxed) {
                return Err(MeasureError::Cancelled);
            }
            let entry = entry.map_err(failed("read a folder"))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            match statx(fd.as_fd(), name, AtFlags::empty()) {
                Ok(stat) if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) => {}
                Ok(stat) if sum.add(&stat) => remaining.push(name.to_owned()),
                Ok(_) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed("stat a file")(errno)),
            }
        }
        let identity = identity_of(&fd)?;
        Ok(Self { fd: Some(fd), identity, remaining })
    }
}

fn identity_of(fd: &OwnedFd) -> Result<(u32, u32, u64), MeasureError> {
    let stat = statx(fd.as_fd(), c"", AtFlags::EMPTY_PATH).map_err(failed("stat a folder"))?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino))
}

fn sum_up(top: OwnedFd, sum: &mut Sum, stop: &AtomicBool) -> Result<(), MeasureError> {
    let mut levels = vec![Level::read(top, sum, stop)?];
    while let Some(level) = levels.last_mut() {
        let Some(here) = level.fd.as_ref() else { return Err(MeasureError::FolderMoved) };
        let Some(name) = level.remaining.pop() else {
            ascend(&mut levels)?;
            continue;
        };
        match open_child(here.as_fd(), &name) {
            Ok(child) => {
                levels.push(Level::read(child, sum, stop)?);
                if let Some(far) = levels.len().checked_sub(MAX_OPEN + 1).and_then(|i| levels.get_mut(i)) {
                    far.fd = None;
                }
            }
            // It was removed or replaced, or something was mounted on it.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
            Err(errno) => return Err(failed("open a folder")(errno)),
        }
    }
    Ok(())
}

/// Leaves the current folder for its parent.
fn ascend(levels: &mut Vec<Level>) -> Result<(), MeasureError> {
    let Some(done) = levels.pop() else { return Ok(()) };
    let Some(above) = levels.last_mut() else { return Ok(()) };
    if above.fd.is_none() {
        let here = done.fd.ok_or(MeasureError::FolderMoved)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&here, c"..", flags, Mode::empty()).map_err(failed("open a folder"))?;
        if identity_of(&fd)? != above.identity {
            return Err(MeasureError::FolderMoved);
        }
        above.fd = Some(fd);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use rustix::fs::CWD;
    use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};

    use super::*;

    static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

    fn blocks(path: &Path) -> u64 {
        fs::symlink_metadata(path).unwrap().blocks() * 512
    }

    #[test]
    fn disk_usage_sums_blocks_and_counts_hard_links_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        fs::create_dir_all(path.join("a/b")).unwrap();
        fs::write(path.join("a/file"), vec![b'x'; 100_000]).unwrap();
        fs::hard_link(path.join("a/file"), path.join("a/b/again")).unwrap();
        std::os::unix::fs::symlink("/usr", path.join("a/link")).unwrap();
        // A sparse file: longer than its blocks.
        fs::File::create(path.join("hole")).unwrap().set_len(1 << 30).unwrap();
        let all = ["", "a", "a/b", "a/file", "a/link", "hole"].map(|name| blocks(&path.join(name)));
        let usage = by_walk(&path, &NOT_STOPPED).unwrap();
        assert_eq!((usage.used_bytes, usage.inodes_used), (all.iter().sum(), 6));
        assert!((100_000..1 << 29).contains(&usage.used_bytes), "{usage:?}");
        let whole = rustix::fs::statvfs(&path).unwrap();
        assert_eq!(usage.capacity_bytes, whole.f_blocks * whole.f_frsize);
        assert!(usage.available_bytes > 0 && usage.inodes > 0);
    }

    #[test]
    fn disk_usage_of_a_folder_does_not_cross_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        for name in ["tmpfs", "bind", "real"] {
            fs::create_dir_all(path.join(name)).unwrap();
        }
        fs::write(path.join("file"), "").unwrap();
        fs::write(dir.path().join("other"), vec![b'x'; 1 << 20]).unwrap();
        let before = by_walk(&path, &NOT_STOPPED).unwrap();
        mount("tmpfs", path.join("tmpfs"), "tmpfs", MountFlags::empty(), c"size=8m").unwrap();
        // Of the same file system, so that the device does not distinguish it.
        mount_bind(dir.path(), path.join("bind")).unwrap();
        mount_bind(dir.path().join("other"), path.join("file")).unwrap();
        fs::write(path.join("tmpfs/x"), vec![b'x'; 1 << 20]).unwrap();
        let usage = by_walk(&path, &NOT_STOPPED);
        let memory = by_file_system(&path.join("tmpfs"));
        for name in ["file", "bind", "tmpfs"] {
            unmount(path.join(name), UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).unwrap();
        }
        let usage = usage.unwrap();
        assert!(usage.used_bytes <= before.used_bytes && usage.inodes_used == before.inodes_used - 3);
        let memory = memory.unwrap();
        assert_eq!((memory.capacity_bytes, memory.used_bytes), (8 << 20, 1 << 20));
        assert_eq!(memory.available_bytes, 7 << 20);
        assert_eq!(memory.inodes_used, 2);
        assert!(matches!(by_file_system(&path.join("real")), Err(MeasureError::NotMounted)));
        assert!(matches!(by_walk(&path.join("none"), &NOT_STOPPED), Err(MeasureError::NotMounted)));
    }

    #[test]
    fn disk_usage_counts_folders_deeper_than_the_open_file_limit() {
        let dir = tempfile::tempdir().unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut fd = rustix::fs::openat(CWD, dir.path(), flags, Mode::empty()).unwrap();
        for _ in 0..3000 {
            for name in [c"side", c"deep"] {
                rustix::fs::mkdirat(&fd, name, Mode::RWXU).unwrap();
            }
            fd = rustix::fs::openat(&fd, c"deep", flags, Mode::empty()).unwrap();
        }
        drop(fd);
        assert_eq!(by_walk(dir.path(), &NOT_STOPPED).unwrap().inodes_used, 6001);
        crate::remove::remove_tree(dir.path(), "deep").unwrap();
    }

    #[test]
    fn a_measurement_stops_when_requested() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x"), "").unwrap();
        assert!(matches!(by_walk(dir.path(), &AtomicBool::new(true)), Err(MeasureError::Cancelled)));
    }

    #[test]
    fn disk_usage_works_while_the_folder_is_being_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let busy = {
            let stop = std::sync::Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    fs::create_dir_all(path.join("a/b/c")).unwrap();
                    fs::write(path.join("a/b/c/x"), "x").unwrap();
                    fs::remove_dir_all(path.join("a")).unwrap();
                }
            })
        };
        for _ in 0..500 {
            let usage = by_walk(dir.path(), &NOT_STOPPED).unwrap();
            assert!((1..=5).contains(&usage.inodes_used), "{usage:?}");
        }
        stop.store(true, Ordering::Relaxed);
        busy.join().unwrap();
    }
}
