//! Changes the ownership of a volume to the pod's fsGroup (volumes.md §5).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags};

use crate::remove::open_folder;
use crate::walks::{FsGroupWalks, WalkRecorder};

/// The pod's fsGroup, and where to record the walks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FsGroup<'a> {
    pub(crate) gid: u32,
    pub(crate) walks: &'a FsGroupWalks,
}

/// The access that the group gets.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Access {
    /// Read and write, for owner and group.
    ReadWrite,
    /// Read, for owner and group: the volume is mounted read-only.
    ReadOnly,
}

impl Access {
    const fn mask(self) -> u32 {
        match self {
            Self::ReadWrite => 0o660,
            Self::ReadOnly => 0o440,
        }
    }
}

/// Additional mode bits of folders: new files inherit the group (setgid), and the group may enter.
const FOLDER_MASK: u32 = 0o2110;
/// Deeper folders are not changed. The volumes are new and have none.
const MAX_DEPTH: usize = 64;

/// Changes the group of everything in `folder` and then of the folder itself. Does not follow links. Files that cannot
/// be changed are logged and skipped.
pub(crate) fn apply(folder: &Path, group: FsGroup<'_>, access: Access) -> io::Result<()> {
    let recorder = group.walks.start(folder, group.gid);
    let gid = Gid::from_raw(group.gid);
    let result = open_folder(folder).map_err(io::Error::other).and_then(|fd| {
        let fd = fd.ok_or(io::ErrorKind::NotFound)?;
        walk(&fd, gid, access, MAX_DEPTH, &recorder)?;
        change_open(&fd, gid, access, folder);
        recorder.count_file();
        Ok(())
    });
    recorder.end(result.is_ok());
    result
}

fn walk(
    folder: &OwnedFd,
    gid: Gid,
    access: Access,
    depth: usize,
    recorder: &WalkRecorder<'_>,
) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if depth > 0 => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let child = rustix::fs::openat(folder, name, flags, Mode::empty())?;
                walk(&child, gid, access, depth - 1, recorder)?;
                change_open(&child, gid, access, Path::new(&*name.to_string_lossy()));
            }
            FileType::Directory => {}
            kind => change_entry(folder, name, gid, access, kind),
        }
        recorder.count_file();
    }
    Ok(())
}

fn change_open(folder: &OwnedFd, gid: Gid, access: Access, path: &Path) {
    let changed = rustix::fs::fchown(folder, None, Some(gid)).and_then(|()| {
        let mode = rustix::fs::fstat(folder)?.st_mode & 0o7777;
        rustix::fs::fchmod(folder, Mode::from_raw_mode(mode | access.mask() | FOLDER_MASK))
    });
    if let Err(error) = changed {
        tracing::warn!(path = %path.display(), %error, "cannot apply the pod's fsGroup to a folder");
    }
}

fn change_entry(folder: &OwnedFd, name: &CStr, gid: Gid, access: Access, kind: FileType) {
    let changed =
        rustix::fs::chownat(folder, name, None, Some(gid), AtFlags::SYMLINK_NOFOLLOW).and_then(|()| {
            if kind == FileType::Symlink {
                return Ok(());
            }
            // By descriptor, since chmod by name would follow a link that was created meanwhile.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
            let stat = rustix::fs::fstat(&file)?;
            if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                return Ok(());
            }
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.as_fd()));
            rustix::fs::chmod(path, Mode::from_raw_mode((stat.st_mode & 0o7777) | access.mask()))
        });
    if let Err(error) = changed {
        tracing::warn!(name = %name.to_string_lossy(), %error, "cannot apply the pod's fsGroup to a file");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn fsgroup_is_applied_to_folders_and_files_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("v");
        fs::create_dir_all(volume.join("sub")).unwrap();
        fs::set_permissions(&volume, fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(volume.join("sub/file"), "x").unwrap();
        fs::set_permissions(volume.join("sub/file"), fs::Permissions::from_mode(0o400)).unwrap();
        fs::write(dir.path().join("outside"), "x").unwrap();
        let before = fs::metadata(dir.path().join("outside")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("outside"), volume.join("link")).unwrap();
        let walks = FsGroupWalks::default();
        apply(&volume, FsGroup { gid: 4711, walks: &walks }, Access::ReadWrite).unwrap();
        let mode = |p: &str| fs::metadata(volume.join(p)).unwrap().mode() & 0o7777;
        assert_eq!((mode(""), mode("sub/file")), (0o2777, 0o660));
        assert_eq!(fs::metadata(volume.join("sub/file")).unwrap().gid(), 4711);
        assert_eq!(fs::symlink_metadata(volume.join("link")).unwrap().gid(), 4711);
        let after = fs::metadata(dir.path().join("outside")).unwrap();
        assert_eq!((before.gid(), before.mode()), (after.gid(), after.mode()));
        // sub, sub/file, link and the volume itself.
        let ended = walks.take_ended();
        assert_eq!((ended.len(), ended[0].succeeded, ended[0].files), (1, true, 4));
        assert!(walks.current().is_none());
        let group = FsGroup { gid: 4711, walks: &walks };
        apply(&dir.path().join("missing"), group, Access::ReadWrite).unwrap_err();
        assert!(!walks.take_ended()[0].succeeded);
    }

    #[test]
    fn fsgroup_of_a_read_only_volume_grants_read_but_not_write() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        for (name, mode) in [("a", 0o400), ("b", 0o644), ("sub/c", 0o600)] {
            fs::write(dir.path().join(name), "x").unwrap();
            fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(dir.path().join("sub"), fs::Permissions::from_mode(0o755)).unwrap();
        let walks = FsGroupWalks::default();
        apply(dir.path(), FsGroup { gid: 4711, walks: &walks }, Access::ReadOnly).unwrap();
        let mode = |p: &str| fs::metadata(dir.path().join(p)).unwrap().mode() & 0o7777;
        assert_eq!((mode("a"), mode("b"), mode("sub/c"), mode("sub")), (0o440, 0o644, 0o640, 0o2755));
    }
}
