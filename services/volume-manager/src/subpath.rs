//! Parts of volumes for containers (volumes.md §8.3): opened beneath the volume by descriptor, bound to
//! `volume-subpaths/<volume>/<container>/<index>`. Everything here blocks.
//!
//! Nothing is named by a path that a pod could change in between: what the walk beneath the volume has opened is
//! what is bound. Texts of errors are for the pod's status and name no path of the node.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use keelson_volume_manager_core::mountinfo::Mount;
use keelson_volume_manager_core::names::inside;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};

use crate::mounts::{is_mount_point, read_mounts};

/// Below a pod's folder (volumes.md §2).
const SUBPATHS: &str = "volume-subpaths";
const FOLDER_MODE: u32 = 0o750;
const FILE_MODE: u32 = 0o640;
/// A lookup that somebody's renaming has disturbed is tried so often.
const RACES: usize = 32;
/// Mounts that may lie on each other at one path.
const STACKED: usize = 8;

/// Why a part of a volume cannot be mounted, or not unmounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubPathError {
    /// The path or a link in it.
    #[error("it leads out of the volume; it must be relative, without '..', and links must stay inside")]
    Outside,
    /// Something on the way is a file, or a link to nothing.
    #[error("a part of it is no folder")]
    NotFolder,
    /// Links that lead to each other, or into /proc.
    #[error("its links cannot be followed")]
    Links,
    /// A folder, a device or a pipe where a file has to be.
    #[error("it is no regular file")]
    NotRegular,
    /// The file system is read-only.
    #[error("it does not exist and the volume allows no new folder")]
    ReadOnly,
    /// The path was renamed each time that it was looked at.
    #[error("it changes all the time; it is tried again")]
    Races,
    /// The kernel cannot open beneath a folder.
    #[error("this needs the system call openat2, which Linux has from 5.6 on")]
    Kernel,
    /// A system call has failed. Only the log names the path.
    #[error("cannot {act}")]
    Io { act: &'static str, path: PathBuf, source: io::Error },
}

impl SubPathError {
    /// The path of the node that it is about, for the log.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. } => Some(path),
            Self::Outside
            | Self::NotFolder
            | Self::Links
            | Self::NotRegular
            | Self::ReadOnly
            | Self::Races
            | Self::Kernel => None,
        }
    }
}

/// A part of a volume that a container mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Place of the mount in the container's list.
    pub(crate) index: u32,
    /// Name of the volume.
    pub(crate) volume: String,
    /// Path in the volume.
    pub(crate) path: String,
    /// No writes.
    pub(crate) read_only: bool,
}

fn failed(act: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SubPathError {
    let path = path.to_owned();
    move |source| SubPathError::Io { act, path, source }
}

/// What a failed look beneath the volume means.
fn fault(act: &'static str, path: &str, errno: Errno) -> SubPathError {
    match errno {
        Errno::XDEV => SubPathError::Outside,
        Errno::NOTDIR => SubPathError::NotFolder,
        Errno::LOOP => SubPathError::Links,
        Errno::ROFS => SubPathError::ReadOnly,
        Errno::AGAIN => SubPathError::Races,
        Errno::NOSYS => SubPathError::Kernel,
        errno => SubPathError::Io { act, path: path.into(), source: errno.into() },
    }
}

/// Opens what `path` names beneath `root`; links that stay beneath are followed.
pub(crate) fn open_beneath(root: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC;
    for _ in 0..RACES {
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
        Errno::NOTDIR => SubPathError::NotFolder,
        errno => failed("open the volume", path)(errno.into()),
    })
}

/// A path of these components; without any it is the folder itself.
fn plain(parts: &[&str]) -> String {
    if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
}

/// What `path` names in the volume, made as folders when there is nothing.
fn find_or_make(root: &OwnedFd, path: &str) -> Result<OwnedFd, SubPathError> {
    let parts = inside(path).ok_or(SubPathError::Outside)?;
    let plain = plain(&parts);
    // A folder first, since that mounts what is mounted on demand.
    let found = match open_beneath(root.as_fd(), &plain, OFlags::PATH | OFlags::DIRECTORY) {
        Err(Errno::NOTDIR) => open_beneath(root.as_fd(), &plain, OFlags::PATH),
        other => other,
    };
    match found {
        Ok(found) => Ok(found),
        Err(Errno::NOENT) => make(root, &parts),
        Err(errno) => Err(fault("open it in the volume", path, errno)),
    }
}

/// Makes what is missing of a path, one folder at a time, each with the mode of the volume's root.
fn make(root: &OwnedFd, parts: &[&str]) -> Result<OwnedFd, SubPathError> {
    const ACT: &str = "make a folder in the volume";
    let shown = parts.join("/");
    let fault = |errno| fault(ACT, &shown, errno);
    let mode = Mode::from_raw_mode(rustix::fs::fstat(root).map_err(fault)?.st_mode & 0o7777);
    let folder = OFlags::PATH | OFlags::DIRECTORY;
    let mut there = 0;
    let mut at = open_beneath(root.as_fd(), ".", folder).map_err(fault)?;
    for count in (1..parts.len()).rev() {
        match open_beneath(root.as_fd(), &parts[..count].join("/"), folder) {
            Ok(fd) => {
                (at, there) = (fd, count);
                break;
            }
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(fault(errno)),
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for part in &parts[there..] {
        let is_new = match rustix::fs::mkdirat(&at, *part, mode) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(fault(errno)),
        };
        let next = rustix::fs::openat(&at, *part, flags, Mode::empty()).map_err(fault)?;
        if is_new {
            // Whatever the umask.
            rustix::fs::fchmod(&next, mode).map_err(fault)?;
        }
        at = next;
    }
    Ok(at)
}

/// Makes a part of the volume at `root` ready for a container, or finds it ready: the path to mount.
pub(crate) fn prepare(
    pod_folder: &Path,
    container: &str,
    root: &Path,
    part: &Part,
) -> Result<PathBuf, SubPathError> {
    let lock = lock_of(root);
    let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
    let root = open_root(root)?;
    let source = find_or_make(&root, &part.path)?;
    let mut folder = pod_folder.to_owned();
    for name in [SUBPATHS, &part.volume, container] {
        folder.push(name);
        make_folder(&folder)?;
    }
    let target = folder.join(part.index.to_string());
    if is_ready(&source, &target, part.read_only)? {
        return Ok(target);
    }
    let bound = bind(&source, &target, part.read_only);
    if bound.is_err() {
        undo(pod_folder, &target);
    }
    bound.map(|()| target)
}

/// Held while something of a volume is looked up and bound, and while what has been replaced in it is removed: what is about to be
/// bound stays until it is. Each volume has its own, so that one that does not answer holds up nobody else.
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

/// Whether a part of the folder of this name is bound for a container: one that starts may not have mounted it yet. The names of
/// such folders hold the time in nanoseconds; one of the same name in another volume only keeps this one longer.
pub(crate) fn is_bound_from(mounts: &[Mount], folder: &str) -> bool {
    let has = |path: &Path, name: &str| path.iter().any(|part| part == OsStr::new(name));
    mounts.iter().any(|mount| has(&mount.point, SUBPATHS) && has(&mount.root, folder))
}

/// Whether the very thing is mounted on `target` already; what else is mounted there is unmounted.
fn is_ready(source: &OwnedFd, target: &Path, read_only: bool) -> Result<bool, SubPathError> {
    // One that does not answer any more, such as a stale one, is no reason to give up: it goes.
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
    let there =
        rustix::fs::openat(CWD, target, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let identity = |stat: Stat| (stat.st_dev, stat.st_ino);
    if identity(rustix::fs::fstat(source)?) != identity(rustix::fs::fstat(&there)?) {
        return Ok(false);
    }
    let allows_none =
        |fd: &OwnedFd| rustix::fs::fstatvfs(fd).map(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    Ok(allows_none(&there)? == (read_only || allows_none(source)?))
}

fn bind(source: &OwnedFd, target: &Path, read_only: bool) -> Result<(), SubPathError> {
    const ACT: &str = "bind it";
    let failed = |errno: Errno| failed(ACT, target)(errno.into());
    let kind = FileType::from_raw_mode(rustix::fs::fstat(source).map_err(failed)?.st_mode);
    make_target(target, kind == FileType::Directory)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(source, c"", flags).map_err(failed)?;
    move_mount(&tree, c"", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(failed)?;
    if read_only {
        // Killed before this, the next look finds it writable and begins again.
        let kept = kept_flags(source).map_err(failed)?;
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY | kept, c"").map_err(failed)?;
    }
    Ok(())
}

/// What a remount of a bind has to repeat of its source (volumes.md §7).
fn kept_flags(source: &OwnedFd) -> Result<MountFlags, Errno> {
    let has = rustix::fs::fstatvfs(source)?.f_flag;
    let pairs = [
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
    ];
    let kept = pairs.into_iter().filter(|(flag, _)| has.contains(*flag)).map(|(_, flag)| flag);
    Ok(kept.fold(MountFlags::empty(), |all, flag| all | flag))
}

fn make_folder(path: &Path) -> Result<(), SubPathError> {
    match fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("make the folder for what is mounted", path)(error))
        }
        _ => Ok(()),
    }
}

/// The folder or empty file on which the part is mounted; one of the other kind, left from before, goes.
fn make_target(target: &Path, is_folder: bool) -> Result<(), SubPathError> {
    let failed = |error| failed("make the place for what is mounted", target)(error);
    match fs::symlink_metadata(target) {
        Ok(meta) if meta.is_dir() == is_folder && !meta.is_symlink() => return Ok(()),
        Ok(meta) => remove_entry(target, meta.is_dir()).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    if is_folder {
        return make_folder(target);
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

/// Takes back what a failed preparation has left, with the folders above it that are empty.
fn undo(pod_folder: &Path, target: &Path) {
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

/// Whether anything may be mounted for containers of a pod.
pub(crate) fn has_any(pod_folder: &Path) -> bool {
    fs::symlink_metadata(pod_folder.join(SUBPATHS)).is_ok()
}

/// Unmounts and removes what has been prepared of a volume, or of all. Missing is fine; what cannot go does not
/// keep the others.
pub(crate) fn remove(pod_folder: &Path, volume: Option<&str>) -> Result<(), SubPathError> {
    let top = pod_folder.join(SUBPATHS);
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
            Err(failed("remove the folder for what is mounted", &top)(error))
        }
        _ => Ok(()),
    }
}

fn remove_volume(folder: &Path) -> Result<(), SubPathError> {
    unmount_at_and_below(folder)?;
    let remove = |path: &Path, is_folder| {
        remove_entry(path, is_folder).map_err(failed("remove the place for what was mounted", path))
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

/// The names in a folder of ours; a missing one has none.
fn entries(folder: &Path) -> Result<Vec<std::ffi::OsString>, SubPathError> {
    let failed = |error| failed("read the folder for what is mounted", folder)(error);
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|e| e.map(|e| e.file_name())).collect::<io::Result<_>>().map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}

/// Unmounts everything at `path` and below it, the last mounted first. mountinfo says what that is: what is
/// mounted may be stale, or gone where it came from.
fn unmount_at_and_below(path: &Path) -> Result<(), SubPathError> {
    const ACT: &str = "unmount it";
    // Only the folder above is looked at: the path itself may be one that does not answer.
    let above = path.parent().unwrap_or(path);
    let real = above.canonicalize().map_err(failed(ACT, path))?.join(path.file_name().unwrap_or_default());
    for _ in 0..STACKED {
        let mounts = read_mounts().map_err(|e| failed(ACT, path)(io::Error::other(e)))?;
        let points: Vec<&PathBuf> =
            mounts.iter().map(|m| &m.point).filter(|point| point.starts_with(&real)).collect();
        if points.is_empty() {
            return Ok(());
        }
        for point in &points {
            // Else what somebody has mounted inside of the volume itself would go as well, with its copy here.
            // A stale one cannot be told and has no copies.
            let _ = mount_change(*point, MountPropagationFlags::PRIVATE);
        }
        for point in points.iter().rev() {
            match unmount(*point, UnmountFlags::NOFOLLOW) {
                // Somebody else was faster; the next round sees it.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(errno) => return Err(failed(ACT, point)(errno.into())),
            }
        }
    }
    Err(failed(ACT, path)(Errno::BUSY.into()))
}

/// A regular file beneath a volume, opened for reading; none when it is not there.
pub(crate) fn open_file(root: &OwnedFd, path: &str) -> Result<Option<fs::File>, SubPathError> {
    const ACT: &str = "open it in the volume";
    let plain = plain(&inside(path).ok_or(SubPathError::Outside)?);
    let fault = |errno| fault(ACT, path, errno);
    // Without opening it first: that alone may do something to a device or wait for a pipe.
    let named = match open_beneath(root.as_fd(), &plain, OFlags::PATH) {
        Ok(named) => named,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(fault(errno)),
    };
    let stat =
        rustix::fs::statx(&named, c"", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::TYPE).map_err(fault)?;
    if FileType::from_raw_mode(u32::from(stat.stx_mode)) != FileType::RegularFile {
        return Err(SubPathError::NotRegular);
    }
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&named));
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, link, flags, Mode::empty()).map_err(fault)?;
    Ok(Some(fs::File::from(file)))
}

#[cfg(test)]
mod tests;
