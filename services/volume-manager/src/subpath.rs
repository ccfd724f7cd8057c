//! subPaths of containers (volumes.md §8.3): opened beneath the volume by descriptor, and bind-mounted on
//! `volume-subpaths/<volume>/<container>/<index>`. All functions block.
//!
//! A pod cannot change the path between check and use, because the bind mount uses the descriptor that the lookup
//! beneath the volume has opened. Error messages are for the pod's status and contain no path of the node.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use keelson_mountinfo::Mount;
use keelson_volume_manager_core::names::relative_components;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};
use serde::{Deserialize, Serialize};

use crate::mounts::{is_mount_point, reachable_mounts};

/// The folder of subPath mounts in a pod's folder (volumes.md §2).
const SUBPATHS: &str = "volume-subpaths";
const FOLDER_MODE: u32 = 0o750;
const FILE_MODE: u32 = 0o640;
/// The number of attempts of a lookup that a concurrent rename disturbs.
const MAX_ATTEMPTS: usize = 32;
/// The number of mounts that may be stacked at one path.
const MAX_STACKED: usize = 8;

/// Why a subPath cannot be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubPathError {
    /// The path, or a link in it, leads out of the volume.
    #[error(
        "the path leads out of the volume; it must be relative, without '..', and links must stay inside"
    )]
    Outside,
    /// A component of the path is a file or a dangling link.
    #[error("a component of the path is not a directory")]
    NotDirectory,
    /// Links form a loop or lead into /proc.
    #[error("the links in the path cannot be followed")]
    Links,
    /// The file is a folder, a device or a pipe.
    #[error("the path is not a regular file")]
    NotRegular,
    /// The path is missing and the file system is read-only.
    #[error("the path does not exist, and it cannot be created because the volume is read-only")]
    ReadOnly,
    /// The path was renamed during every attempt of the lookup.
    #[error("the path changes constantly; the lookup will be retried")]
    Raced,
    /// The kernel has no openat2(2).
    #[error("a subPath needs the system call openat2, available since Linux 5.6")]
    NoOpenat2,
    /// The helper process has failed, and this is the text of its error.
    #[error("{0}")]
    Helper(String),
    /// The helper process was abandoned, or an earlier one hangs. Only the log names the path.
    #[error("the volume does not answer; it is retried")]
    NoAnswer,
    /// A system call has failed. Only the log names the path.
    #[error("cannot {operation}")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

impl SubPathError {
    /// The path of the node, for the log.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. } => Some(path),
            Self::Outside
            | Self::NotDirectory
            | Self::Links
            | Self::NotRegular
            | Self::ReadOnly
            | Self::Raced
            | Self::NoOpenat2
            | Self::Helper(_)
            | Self::NoAnswer => None,
        }
    }
}

/// A subPath that a container mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SubPath {
    /// The index of the mount in the container's `volumeMounts`.
    pub(crate) index: u32,
    /// The name of the volume.
    pub(crate) volume: String,
    /// The path in the volume.
    pub(crate) path: String,
    /// Whether the container may only read it.
    pub(crate) read_only: bool,
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SubPathError {
    let path = path.to_owned();
    move |source| SubPathError::Io { operation, path, source }
}

/// The error for an errno of a lookup beneath the volume.
fn errno_error(operation: &'static str, path: &str, errno: Errno) -> SubPathError {
    match errno {
        Errno::XDEV => SubPathError::Outside,
        Errno::NOTDIR => SubPathError::NotDirectory,
        Errno::LOOP => SubPathError::Links,
        Errno::ROFS => SubPathError::ReadOnly,
        Errno::AGAIN => SubPathError::Raced,
        Errno::NOSYS => SubPathError::NoOpenat2,
        errno => SubPathError::Io { operation, path: path.into(), source: errno.into() },
    }
}

/// Opens `path` beneath `root`. Follows links that stay beneath it.
pub(crate) fn open_beneath(root: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC;
    for _ in 0..MAX_ATTEMPTS {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// Opens the root of a volume.
pub(crate) fn open_root(path: &Path) -> Result<OwnedFd, SubPathError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOTDIR => SubPathError::NotDirectory,
        errno => failed("open the volume", path)(errno.into()),
    })
}

/// Joins path components; `.` if there are none.
fn join(parts: &[&str]) -> String {
    if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
}

/// Opens `path` in the volume, and creates it as folders if it is missing.
fn open_or_create(root: &OwnedFd, path: &str) -> Result<OwnedFd, SubPathError> {
    let parts = relative_components(path).ok_or(SubPathError::Outside)?;
    let joined = join(&parts);
    // As a folder first, since that triggers automounts.
    let found = match open_beneath(root.as_fd(), &joined, OFlags::PATH | OFlags::DIRECTORY) {
        Err(Errno::NOTDIR) => open_beneath(root.as_fd(), &joined, OFlags::PATH),
        other => other,
    };
    match found {
        Ok(found) => Ok(found),
        Err(Errno::NOENT) => create_folders(root, &parts),
        Err(errno) => Err(errno_error("open the path in the volume", path, errno)),
    }
}

/// Creates the missing folders of a path one at a time, each with the mode of the volume's root.
fn create_folders(root: &OwnedFd, parts: &[&str]) -> Result<OwnedFd, SubPathError> {
    const OPERATION: &str = "create a folder in the volume";
    let path = parts.join("/");
    let to_error = |errno| errno_error(OPERATION, &path, errno);
    let mode = Mode::from_raw_mode(rustix::fs::fstat(root).map_err(to_error)?.st_mode & 0o7777);
    let folder = OFlags::PATH | OFlags::DIRECTORY;
    let mut existing = 0;
    let mut at = open_beneath(root.as_fd(), ".", folder).map_err(to_error)?;
    for count in (1..parts.len()).rev() {
        match open_beneath(root.as_fd(), &parts[..count].join("/"), folder) {
            Ok(fd) => {
                (at, existing) = (fd, count);
                break;
            }
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(to_error(errno)),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for part in &parts[existing..] {
        let is_new = match rustix::fs::mkdirat(&at, *part, mode) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(to_error(errno)),
        };
        let next = rustix::fs::openat(&at, *part, flags, Mode::empty()).map_err(to_error)?;
        if is_new {
            // Regardless of the umask.
            rustix::fs::fchmod(&next, mode).map_err(to_error)?;
        }
        at = next;
    }
    Ok(at)
}

/// Prepares a subPath of the volume at `root` for a container, unless it is already prepared. Returns the path to mount.
pub(crate) fn prepare(
    pod_folder: &Path,
    container: &str,
    root: &Path,
    subpath: &SubPath,
) -> Result<PathBuf, SubPathError> {
    let lock = lock_of(root);
    let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
    let root = open_root(root)?;
    let source = open_or_create(&root, &subpath.path)?;
    let mut folder = pod_folder.to_owned();
    for name in [SUBPATHS, &subpath.volume, container] {
        folder.push(name);
        create_folder(&folder)?;
    }
    let target = folder.join(subpath.index.to_string());
    if reuse_mount(&source, &target, subpath.read_only)? {
        return Ok(target);
    }
    let result = bind(&source, &target, subpath.read_only);
    if result.is_err() {
        roll_back(pod_folder, &target);
    }
    result.map(|()| target)
}

/// The lock of a volume. It is held while a subPath is looked up and bind-mounted, and while replaced files are removed,
/// so that files about to be bind-mounted are not removed. Each volume has its own lock, so that a hanging volume does
/// not block others.
pub(crate) fn lock_of(volume: &Path) -> Arc<Mutex<()>> {
    static LOCKS: Mutex<BTreeMap<PathBuf, Weak<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    locks.retain(|_, lock| lock.strong_count() > 0);
    if let Some(lock) = locks.get(volume).and_then(Weak::upgrade) {
        return lock;
    }
    let lock = Arc::new(Mutex::new(()));
    locks.insert(volume.to_owned(), Arc::downgrade(&lock));
    lock
}

/// Whether a subPath in a folder of this name is bind-mounted for a container. A starting container may not have mounted it
/// yet. The names contain the time in nanoseconds; a folder of the same name in another volume only delays the removal.
pub(crate) fn is_bound_from(mounts: &[Mount], folder: &str) -> bool {
    let has = |path: &Path, name: &str| path.iter().any(|part| part == OsStr::new(name));
    mounts.iter().any(|mount| has(&mount.point, SUBPATHS) && has(&mount.root, folder))
}

/// Whether `source` itself is already mounted on `target`. Unmounts anything else that is mounted there.
fn reuse_mount(source: &OwnedFd, target: &Path, read_only: bool) -> Result<bool, SubPathError> {
    // A mount that cannot be checked, such as a stale one, is unmounted, too.
    if !is_mount_point(target).unwrap_or(true) {
        return Ok(false);
    }
    if is_same(source, target, read_only).unwrap_or(false) {
        return Ok(true);
    }
    unmount_at_and_below(target)?;
    Ok(false)
}

fn is_same(source: &OwnedFd, target: &Path, read_only: bool) -> Result<bool, Errno> {
    let existing =
        rustix::fs::openat(CWD, target, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let identity = |stat: Stat| (stat.st_dev, stat.st_ino);
    if identity(rustix::fs::fstat(source)?) != identity(rustix::fs::fstat(&existing)?) {
        return Ok(false);
    }
    let is_read_only =
        |fd: &OwnedFd| rustix::fs::fstatvfs(fd).map(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    Ok(is_read_only(&existing)? == (read_only || is_read_only(source)?))
}

fn bind(source: &OwnedFd, target: &Path, read_only: bool) -> Result<(), SubPathError> {
    const OPERATION: &str = "bind-mount the subPath";
    let failed = |errno: Errno| failed(OPERATION, target)(errno.into());
    let kind = FileType::from_raw_mode(rustix::fs::fstat(source).map_err(failed)?.st_mode);
    create_mount_point(target, kind == FileType::Directory)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(source, c"", flags).map_err(failed)?;
    move_mount(&tree, c"", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(failed)?;
    if read_only {
        // If the service is killed before this, the next call finds the mount writable and starts over.
        let flags = source_flags(source).map_err(failed)?;
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY | flags, c"").map_err(failed)?;
    }
    Ok(())
}

/// The mount flags that a remount of a bind mount must repeat from its source (volumes.md §7).
fn source_flags(source: &OwnedFd) -> Result<MountFlags, Errno> {
    let has = rustix::fs::fstatvfs(source)?.f_flag;
    let pairs = [
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
    ];
    let flags = pairs.into_iter().filter(|(flag, _)| has.contains(*flag)).map(|(_, flag)| flag);
    Ok(flags.fold(MountFlags::empty(), |all, flag| all | flag))
}

fn create_folder(path: &Path) -> Result<(), SubPathError> {
    match fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("create a folder for the mount point", path)(error))
        }
        _ => Ok(()),
    }
}

/// Creates the mount point: a folder or an empty file. Replaces an existing one of the other kind.
fn create_mount_point(target: &Path, is_folder: bool) -> Result<(), SubPathError> {
    let failed = |error| failed("create the mount point", target)(error);
    match fs::symlink_metadata(target) {
        Ok(meta) if meta.is_dir() == is_folder && !meta.is_symlink() => return Ok(()),
        Ok(meta) => remove_entry(target, meta.is_dir()).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    if is_folder {
        return create_folder(target);
    }
    let made = fs::OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(target);
    made.map(drop).map_err(failed)
}

fn remove_entry(path: &Path, is_folder: bool) -> io::Result<()> {
    match if is_folder { fs::remove_dir(path) } else { fs::remove_file(path) } {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes what a failed preparation has left, including empty parent folders.
fn roll_back(pod_folder: &Path, target: &Path) {
    let is_folder = fs::symlink_metadata(target).is_ok_and(|meta| meta.is_dir());
    if unmount_at_and_below(target).is_err() || remove_entry(target, is_folder).is_err() {
        return;
    }
    for folder in target.ancestors().skip(1).take_while(|path| *path != pod_folder) {
        if fs::remove_dir(folder).is_err() {
            return;
        }
    }
}

/// The folder of the subPath mounts of a pod.
pub(crate) fn folder(pod_folder: &Path) -> PathBuf {
    pod_folder.join(SUBPATHS)
}

/// Whether a pod may have subPath mounts.
pub(crate) fn has_any(pod_folder: &Path) -> bool {
    fs::symlink_metadata(folder(pod_folder)).is_ok()
}

/// Unmounts and removes the subPaths of one volume, or of all volumes. Missing ones are not an error. An error does not
/// keep the other volumes from being processed.
pub(crate) fn remove(pod_folder: &Path, volume: Option<&str>) -> Result<(), SubPathError> {
    let top = folder(pod_folder);
    let mut first = Ok(());
    for name in entries(&top)? {
        if volume.is_none_or(|volume| name == OsStr::new(volume)) {
            let removed = remove_volume(&top.join(name));
            first = first.and(removed);
        }
    }
    first?;
    match fs::remove_dir(&top) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(failed("remove the folder of the mount points", &top)(error))
        }
        _ => Ok(()),
    }
}

fn remove_volume(folder: &Path) -> Result<(), SubPathError> {
    unmount_at_and_below(folder)?;
    let remove = |path: &Path, is_folder| {
        remove_entry(path, is_folder).map_err(failed("remove the mount point", path))
    };
    for container in entries(folder)? {
        let container = folder.join(container);
        for entry in entries(&container)? {
            let entry = container.join(entry);
            let is_folder = fs::symlink_metadata(&entry).is_ok_and(|meta| meta.is_dir());
            remove(&entry, is_folder)?;
        }
        remove(&container, true)?;
    }
    remove(folder, true)
}

/// The names in a folder of this service; none if it is missing.
fn entries(folder: &Path) -> Result<Vec<std::ffi::OsString>, SubPathError> {
    let failed = |error| failed("read the folder of the mount points", folder)(error);
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|e| e.map(|e| e.file_name())).collect::<io::Result<_>>().map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Unmounts everything at `path` and below it, the last mount first. Reads the mounts from mountinfo, because a mount
/// may be stale or its source deleted.
fn unmount_at_and_below(path: &Path) -> Result<(), SubPathError> {
    const OPERATION: &str = "unmount the subPath";
    // Accesses only the parent folder, because the path itself may hang.
    let above = path.parent().unwrap_or(path);
    let real =
        above.canonicalize().map_err(failed(OPERATION, path))?.join(path.file_name().unwrap_or_default());
    for _ in 0..MAX_STACKED {
        let mounts = reachable_mounts().map_err(|e| failed(OPERATION, path)(io::Error::other(e)))?;
        let points: Vec<&PathBuf> =
            mounts.iter().map(|m| &m.point).filter(|point| point.starts_with(&real)).collect();
        if points.is_empty() {
            return Ok(());
        }
        for point in &points {
            // Otherwise the unmount would propagate to mounts inside the volume itself.
            // This fails for a stale mount, which has no copies.
            let _ = mount_change(*point, MountPropagationFlags::PRIVATE);
        }
        for point in points.iter().rev() {
            match unmount(*point, UnmountFlags::NOFOLLOW) {
                // Another process has unmounted it; the next round checks.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(errno) => return Err(failed(OPERATION, point)(errno.into())),
            }
        }
    }
    Err(failed(OPERATION, path)(Errno::BUSY.into()))
}

/// Opens a regular file beneath a volume for reading; `None` if it is missing.
pub(crate) fn open_file(root: &OwnedFd, path: &str) -> Result<Option<fs::File>, SubPathError> {
    const OPERATION: &str = "open the path in the volume";
    let joined = join(&relative_components(path).ok_or(SubPathError::Outside)?);
    let to_error = |errno| errno_error(OPERATION, path, errno);
    // With O_PATH first: opening a device may have side effects, and opening a pipe may block.
    let named = match open_beneath(root.as_fd(), &joined, OFlags::PATH) {
        Ok(named) => named,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(to_error(errno)),
    };
    let stat = rustix::fs::statx(&named, c"", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::TYPE)
        .map_err(to_error)?;
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::RegularFile {
        return Err(SubPathError::NotRegular);
    }
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&named));
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, link, flags, Mode::empty()).map_err(to_error)?;
    Ok(Some(fs::File::from(file)))
}

#[cfg(test)]
mod tests;
