//! Removal that never crosses a mount, never follows a link, and needs few file descriptors, no matter how deeply a
//! pod has nested its folders.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

/// The number of folders that are open at the same time. Deeper folders are moved up first.
const MAX_OPEN: usize = 32;
/// How often a folder that turns out not to be empty is read again.
const REREADS: u32 = 8;

/// Why a folder could not be removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoveError {
    /// Something is mounted in the folder.
    #[error("{} is a mount point and is not removed; unmount it first", path.display())]
    Mount { path: PathBuf },
    /// A system call has failed.
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

fn failed(operation: &'static str, path: PathBuf, errno: Errno) -> RemoveError {
    match errno {
        // The errors of unlink(2), rmdir(2) and openat2(2) with RESOLVE_NO_XDEV at a mount point.
        Errno::BUSY | Errno::XDEV => RemoveError::Mount { path },
        errno => RemoveError::Io { operation, path, source: errno.into() },
    }
}

/// Opens a folder by its path without following a link in its last component. `None` if it is missing.
pub(crate) fn open_folder(path: &Path) -> Result<Option<OwnedFd>, RemoveError> {
    match rustix::fs::openat(CWD, path, FOLDER, Mode::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(failed("open", path.to_owned(), errno)),
    }
}

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

/// Opens the folder `name` in `parent`, unless it is a link or on another mount.
pub(crate) fn open_child(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match rustix::fs::openat2(parent, name, FOLDER, Mode::empty(), resolve) {
        // A kernel before 5.6, or a seccomp filter that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let child = rustix::fs::openat(parent, name, FOLDER, Mode::empty())?;
            if mount_of(parent)? == mount_of(child.as_fd())? { Ok(child) } else { Err(Errno::XDEV) }
        }
        other => other,
    }
}

/// Identifies a mount: by its id if the kernel provides it, else by the device.
fn mount_of(fd: BorrowedFd<'_>) -> Result<(u32, u32, u64), Errno> {
    let stat = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE | StatxFlags::MNT_ID)?;
    let id = if stat.stx_mask & StatxFlags::MNT_ID.bits() != 0 { stat.stx_mnt_id } else { 0 };
    Ok((stat.stx_dev_major, stat.stx_dev_minor, id))
}

struct Level {
    fd: OwnedFd,
    entries: Dir,
    name: CString,
    rereads: u32,
}

impl Level {
    fn new(fd: OwnedFd, name: CString) -> Result<Self, Errno> {
        let entries = Dir::read_from(&fd)?;
        Ok(Self { fd, entries, name, rereads: 0 })
    }

    fn next(&mut self) -> Option<Result<(CString, FileType), Errno>> {
        loop {
            match self.entries.read()? {
                Ok(entry) if entry.file_name() == c"." || entry.file_name() == c".." => {}
                Ok(entry) => return Some(Ok((entry.file_name().to_owned(), entry.file_type()))),
                Err(errno) => return Some(Err(errno)),
            }
        }
    }
}

/// Removes the folder `name` in `parent` with its content. A missing folder is not an error.
pub(crate) fn remove_tree(parent: &Path, name: &str) -> Result<(), RemoveError> {
    let path = parent.join(name);
    let Some(above) = open_folder(parent)? else { return Ok(()) };
    let c_name = CString::new(name).map_err(|e| RemoveError::Io {
        operation: "name",
        path: path.clone(),
        source: e.into(),
    })?;
    let fd = match open_child(above.as_fd(), &c_name) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed("open", path, errno)),
    };
    clear(fd, &path)?;
    remove_entry(above.as_fd(), &c_name, AtFlags::REMOVEDIR).map_err(|errno| failed("remove", path, errno))
}

/// Removes one entry. A missing entry is not an error.
fn remove_entry(folder: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
    match rustix::fs::unlinkat(folder, name, flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Removes everything in the folder `top`, depth first.
fn clear(top: OwnedFd, path: &Path) -> Result<(), RemoveError> {
    let mut moved = 0_u64;
    let first = Level::new(top, CString::default()).map_err(|e| failed("read", path.to_owned(), e))?;
    let mut levels = vec![first];
    while let Some(level) = levels.last_mut() {
        match level.next() {
            Some(Ok((name, kind))) => {
                enter_or_remove(&mut levels, &name, kind, &mut moved)
                    .map_err(|errno| failed("remove", path_of(path, &levels, &name), errno))?;
            }
            Some(Err(errno)) => return Err(failed("read", path_of(path, &levels, c""), errno)),
            None => leave(&mut levels, moved > 0)
                .map_err(|errno| failed("remove", path_of(path, &levels, c""), errno))?,
        }
    }
    Ok(())
}

fn path_of(top: &Path, levels: &[Level], name: &CStr) -> PathBuf {
    let mut path = top.to_owned();
    for part in levels.iter().map(|level| level.name.as_c_str()).chain([name]) {
        if !part.is_empty() {
            path.push(part.to_string_lossy().as_ref());
        }
    }
    path
}

/// Removes an entry that is not a folder. Enters a folder, or moves it up if it is too deep.
fn enter_or_remove(
    levels: &mut Vec<Level>,
    name: &CStr,
    kind: FileType,
    moved: &mut u64,
) -> Result<(), Errno> {
    let depth = levels.len();
    let (first, rest) = levels.split_first_mut().ok_or(Errno::INVAL)?;
    let here = rest.last().map_or(first.fd.as_fd(), |level| level.fd.as_fd());
    if !matches!(kind, FileType::Directory | FileType::Unknown) {
        match remove_entry(here, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            other => return other,
        }
    }
    let child = match open_child(here, name) {
        Ok(child) => child,
        Err(Errno::NOENT) => return Ok(()),
        // A file or a link, on a filesystem that does not report the type of entries.
        Err(Errno::NOTDIR | Errno::LOOP) => return remove_entry(here, name, AtFlags::empty()),
        Err(errno) => return Err(errno),
    };
    if depth < MAX_OPEN {
        let level = Level::new(child, name.to_owned())?;
        levels.push(level);
        return Ok(());
    }
    loop {
        *moved += 1;
        let target = CString::new(format!(".keelson-removing-{moved}")).map_err(|_| Errno::INVAL)?;
        match rustix::fs::renameat_with(here, name, first.fd.as_fd(), &target, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
    }
}

/// Removes the folder that was read to its end, or reads it again if it is not empty.
fn leave(levels: &mut Vec<Level>, moved: bool) -> Result<(), Errno> {
    let Some(mut done) = levels.pop() else { return Ok(()) };
    let Some(above) = levels.last() else {
        // The top folder: other folders may have been moved into it after reading started.
        done.entries.rewind();
        let left = moved && done.next().is_some();
        if left {
            done.entries.rewind();
            levels.push(done);
        }
        return Ok(());
    };
    match remove_entry(above.fd.as_fd(), &done.name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if done.rereads < REREADS => {
            done.rereads += 1;
            done.entries.rewind();
            levels.push(done);
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn removal_deletes_files_links_and_pipes_but_not_link_targets() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("keep"), "x").unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::write(tree.join("a/file"), "x").unwrap();
        symlink(dir.path(), tree.join("a/b/link")).unwrap();
        symlink(dir.path().join("keep"), tree.join("link")).unwrap();
        rustix::fs::mknodat(CWD, tree.join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        remove_tree(dir.path(), "tree").unwrap();
        assert!(!tree.exists());
        assert!(dir.path().join("keep").exists());
        remove_tree(dir.path(), "tree").unwrap();
    }

    #[test]
    fn removal_refuses_a_link_in_place_of_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("other")).unwrap();
        fs::write(dir.path().join("other/keep"), "x").unwrap();
        symlink("other", dir.path().join("tree")).unwrap();
        remove_tree(dir.path(), "tree").unwrap_err();
        assert!(dir.path().join("other/keep").exists());
    }

    #[test]
    fn removal_handles_trees_deeper_than_the_open_folder_limit() {
        let dir = tempfile::tempdir().unwrap();
        let mut fd = rustix::fs::openat(CWD, dir.path(), FOLDER, Mode::empty()).unwrap();
        for _ in 0..600 {
            rustix::fs::mkdirat(&fd, "tree", Mode::RWXU).unwrap();
            rustix::fs::mkdirat(&fd, ".keelson-removing-1", Mode::RWXU).unwrap();
            fd = rustix::fs::openat(&fd, "tree", FOLDER, Mode::empty()).unwrap();
        }
        drop(fd);
        remove_tree(dir.path(), "tree").unwrap();
        assert!(!dir.path().join("tree").exists());
    }

    #[test]
    fn removal_handles_folders_with_thousands_of_entries() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        for i in 0..3000 {
            fs::write(tree.join(format!("a-rather-long-file-name-{i}")), "").unwrap();
        }
        remove_tree(dir.path(), "tree").unwrap();
        assert!(!tree.exists());
    }
}
