//! Changes the ownership of a volume to the pod's fsGroup (volumes.md §5).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use keelson_volume_manager_core::desire::FsGroupPolicy;
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
/// Deeper folders of a volume of this service are not changed. Such volumes are new and have none.
const MAX_DEPTH_OF_OWN: usize = 64;
/// A volume with deeper folders is refused. Each level keeps descriptors open and a part of the stack.
const MAX_DEPTH: usize = 2000;
/// The stack of a walk with that depth, in bytes.
const STACK: usize = 64 << 20;

/// Learns how a walk advances.
pub(crate) trait Progress: Sync {
    /// One more file or folder was visited.
    fn visited(&self);

    /// A file or folder could not be changed. The walk continues.
    fn failed(&self, name: &Path, error: io::Error);
}

/// Records a walk through a volume of this service.
struct Recorder<'a>(WalkRecorder<'a>);

impl Progress for Recorder<'_> {
    fn visited(&self) {
        self.0.count_file();
    }

    fn failed(&self, name: &Path, error: io::Error) {
        tracing::warn!(name = %name.display(), %error, "cannot apply the pod's fsGroup to a file");
    }
}

/// What a walk does.
struct Walk<'a> {
    gid: Gid,
    access: Access,
    /// Folders below [`MAX_DEPTH_OF_OWN`] are skipped instead of refused.
    is_own: bool,
    progress: &'a dyn Progress,
}

/// Changes the group of everything in `folder` and then of the folder itself. Does not follow links. Files that cannot
/// be changed are logged and skipped.
pub(crate) fn apply(folder: &Path, group: FsGroup<'_>, access: Access) -> io::Result<()> {
    let recorder = Recorder(group.walks.start(folder, group.gid));
    let walk = Walk { gid: Gid::from_raw(group.gid), access, is_own: true, progress: &recorder };
    let result = walk.run(folder);
    recorder.0.end(result.is_ok());
    result
}

/// Changes a volume of a plugin in the same way. With the policy `OnRootMismatch` nothing is done if the volume's root
/// belongs to the group already: it is changed last, so then the rest is done.
///
/// # Errors
/// A folder could not be read, or the folders are too deep.
pub(crate) fn apply_to_tree(
    folder: &Path,
    gid: u32,
    access: Access,
    policy: FsGroupPolicy,
    progress: &dyn Progress,
) -> io::Result<()> {
    if policy == FsGroupPolicy::OnRootMismatch && root_matches(folder, gid, access) {
        return Ok(());
    }
    let walk = Walk { gid: Gid::from_raw(gid), access, is_own: false, progress };
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || walk.run(folder))?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the walk ended unexpectedly")))
    })
}

/// Whether the root of a volume has the group, its setgid bit and the permissions that a walk would give it.
fn root_matches(folder: &Path, gid: u32, access: Access) -> bool {
    let wanted = access.mask() | FOLDER_MASK;
    rustix::fs::lstat(folder).is_ok_and(|stat| {
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        is_folder && stat.st_gid == gid && stat.st_mode & wanted == wanted
    })
}

impl Walk<'_> {
    fn run(&self, folder: &Path) -> io::Result<()> {
        let fd = open_folder(folder).map_err(io::Error::other)?.ok_or(io::ErrorKind::NotFound)?;
        self.descend(&fd, 0)?;
        self.change_open(&fd, folder);
        self.progress.visited();
        Ok(())
    }

    fn descend(&self, folder: &OwnedFd, depth: usize) -> io::Result<()> {
        for entry in Dir::read_from(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory if self.is_own && depth >= MAX_DEPTH_OF_OWN => {}
                FileType::Directory if depth >= MAX_DEPTH => {
                    let message = format!("the folders of the volume are more than {MAX_DEPTH} deep");
                    return Err(io::Error::other(message));
                }
                FileType::Directory => {
                    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    let child = rustix::fs::openat(folder, name, flags, Mode::empty())?;
                    self.descend(&child, depth + 1)?;
                    self.change_open(&child, Path::new(&*name.to_string_lossy()));
                }
                kind => self.change_entry(folder, name, kind),
            }
            self.progress.visited();
        }
        Ok(())
    }

    fn change_open(&self, folder: &OwnedFd, path: &Path) {
        let changed = rustix::fs::fchown(folder, None, Some(self.gid)).and_then(|()| {
            let mode = rustix::fs::fstat(folder)?.st_mode & 0o7777;
            rustix::fs::fchmod(folder, Mode::from_raw_mode(mode | self.access.mask() | FOLDER_MASK))
        });
        if let Err(errno) = changed {
            self.progress.failed(path, errno.into());
        }
    }

    fn change_entry(&self, folder: &OwnedFd, name: &CStr, kind: FileType) {
        // Read before the change of the group, with which the kernel drops setuid and setgid.
        let before = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
        let changed = rustix::fs::chownat(folder, name, None, Some(self.gid), AtFlags::SYMLINK_NOFOLLOW)
            .and_then(|()| {
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
                let is_same =
                    |before: &rustix::fs::Stat| (before.st_dev, before.st_ino) == (stat.st_dev, stat.st_ino);
                let mode = before.ok().filter(is_same).map_or(stat.st_mode, |before| before.st_mode);
                let mode = (mode & 0o7777) | self.access.mask();
                rustix::fs::chmod(path, Mode::from_raw_mode(mode))
            });
        if let Err(errno) = changed {
            self.progress.failed(Path::new(&*name.to_string_lossy()), errno.into());
        }
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
    fn fsgroup_keeps_the_setuid_bit_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sudo");
        fs::write(&file, "x").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        let walks = FsGroupWalks::default();
        apply(dir.path(), FsGroup { gid: 4711, walks: &walks }, Access::ReadWrite).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o4775);
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

    /// Counts what a walk visits.
    #[derive(Default)]
    struct Visits(std::sync::atomic::AtomicUsize);

    impl Progress for Visits {
        fn visited(&self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }

        fn failed(&self, name: &Path, error: io::Error) {
            panic!("{}: {error}", name.display());
        }
    }

    /// How many files a walk with this policy visits.
    fn visits(folder: &Path, access: Access, policy: FsGroupPolicy) -> usize {
        let visits = Visits::default();
        apply_to_tree(folder, 4711, access, policy, &visits).unwrap();
        visits.0.into_inner()
    }

    #[test]
    fn on_root_mismatch_walks_only_if_the_root_lacks_group_setgid_or_permissions() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "x").unwrap();
        let mismatch = FsGroupPolicy::OnRootMismatch;
        let set_mode = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o2777);
        assert_eq!(visits(dir.path(), Access::ReadWrite, mismatch), 2, "the group differs");
        assert_eq!(visits(dir.path(), Access::ReadWrite, mismatch), 0);
        assert_eq!(visits(dir.path(), Access::ReadWrite, FsGroupPolicy::Always), 2);
        for (mode, access, expected) in [
            (0o0770, Access::ReadWrite, 2),
            (0o2770, Access::ReadWrite, 0),
            (0o2750, Access::ReadWrite, 2),
            (0o2550, Access::ReadOnly, 0),
            (0o2540, Access::ReadOnly, 2),
        ] {
            set_mode(mode);
            assert_eq!(visits(dir.path(), access, mismatch), expected, "{mode:o}");
        }
    }

    #[test]
    fn a_walk_through_a_plugins_volume_reaches_deep_folders() {
        let dir = tempfile::tempdir().unwrap();
        let deep: std::path::PathBuf = std::iter::repeat_n("d", MAX_DEPTH_OF_OWN + 10).collect();
        fs::create_dir_all(dir.path().join(&deep)).unwrap();
        fs::write(dir.path().join(&deep).join("file"), "x").unwrap();
        visits(dir.path(), Access::ReadWrite, FsGroupPolicy::Always);
        assert_eq!(fs::metadata(dir.path().join(&deep).join("file")).unwrap().gid(), 4711);
    }
}
