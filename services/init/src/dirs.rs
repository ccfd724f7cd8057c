//! Creates the folders of the agent with owners and modes, and shares the mount of the root folder.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use keelson_init_core::{Folder, Owner};
use keelson_mountinfo::RootNeeds;
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Uid, chownat, open, openat, statat};
use rustix::mount::{MountPropagationFlags, mount_bind_recursive, mount_change};

/// State folders are not that deep.
const MAX_DEPTH: u32 = 16;

/// Why a folder could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The folder cannot be created.
    #[error("cannot create the folder {}; free space, allow access to it, or set another one by a flag (--run-dir, --state-dir, --root-dir)", path.display())]
    Make {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Something else exists at this path.
    #[error("{} is not a dedicated folder (it is a file, a link, or shared by all users like /tmp); set another one by a flag", path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
    },
    /// Owner or mode cannot be set.
    #[error("cannot set owner and mode of {}; init must own it or run as root", path.display())]
    Own {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The mounts below the root folder cannot be shared.
    #[error("cannot share the mounts below {} (CAP_SYS_ADMIN is needed)", path.display())]
    Share {
        /// The root folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Creates the missing folders, and sets owners and modes.
pub fn prepare(folders: &[Folder]) -> Result<(), DirError> {
    folders.iter().try_for_each(prepare_one)
}

fn prepare_one(folder: &Folder) -> Result<(), DirError> {
    let path = &folder.path;
    let made = make(path, folder.mode).map_err(|source| DirError::Make { path: path.clone(), source })?;
    let fail = |source: io::Error| DirError::Own { path: path.clone(), source };
    if !made && !folder.enforced {
        return Ok(());
    }
    let meta = fs::symlink_metadata(path).map_err(fail)?;
    // A new tmpfs is world-writable too, but empty; it gets its mode below.
    let of_all_users =
        |path: &Path| meta.mode() & 0o1000 != 0 && fs::read_dir(path).is_ok_and(|mut d| d.next().is_some());
    if !meta.is_dir() || of_all_users(path) {
        return Err(DirError::Foreign { path: path.clone() });
    }
    let dir = open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| fail(error.into()))?;
    if let Some(owner) = folder.owner
        && (meta.uid(), meta.gid()) != (owner.uid, owner.gid)
    {
        if folder.contents && !made {
            own_contents(dir.as_fd(), owner, MAX_DEPTH).map_err(fail)?;
        }
        let (uid, gid) = ids(owner);
        rustix::fs::fchown(&dir, Some(uid), Some(gid)).map_err(|error| fail(error.into()))?;
    }
    if meta.mode() & 0o7777 != folder.mode {
        fs::set_permissions(path, fs::Permissions::from_mode(folder.mode)).map_err(fail)?;
    }
    Ok(())
}

/// Creates `path` and its parents; returns whether it was missing.
fn make(path: &Path, mode: u32) -> io::Result<bool> {
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn ids(owner: Owner) -> (Uid, Gid) {
    (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid))
}

/// Sets the owner of everything below `dir`. Links are not followed, and files with several hard links are skipped: the
/// former owner of the folder may have linked a foreign file into it.
fn own_contents(dir: BorrowedFd<'_>, owner: Owner, depth: u32) -> io::Result<()> {
    let (uid, gid) = ids(owner);
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_bytes() == b"." || name.to_bytes() == b".." {
            continue;
        }
        let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if depth > 0 => {
                let below =
                    openat(dir, name, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
                own_contents(below.as_fd(), owner, depth - 1)?;
            }
            FileType::RegularFile if stat.st_nlink > 1 => continue,
            _ => {}
        }
        chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// The first parent of `path` that other users cannot traverse.
pub fn closed_parent(path: &Path) -> Option<PathBuf> {
    let parents: Vec<&Path> = path.ancestors().skip(1).collect();
    parents
        .into_iter()
        .rev()
        .find(|parent| fs::metadata(parent).is_ok_and(|meta| meta.mode() & 0o001 == 0))
        .map(Path::to_owned)
}

/// Makes `root` a shared mount, as the kubelet expects: mounts that a pod makes below it are visible on the host and vice
/// versa. A root within a shared mount needs no change.
pub fn share(root: &Path) -> Result<(), DirError> {
    let fail = |source: io::Error| DirError::Share { path: root.to_owned(), source };
    let real = fs::canonicalize(root).map_err(fail)?;
    let mounts = keelson_mountinfo::parse(&fs::read("/proc/self/mountinfo").map_err(fail)?);
    match keelson_mountinfo::root_needs(&mounts, &real) {
        RootNeeds::Nothing => return Ok(()),
        RootNeeds::Sharing => {}
        RootNeeds::BindAndSharing => {
            mount_bind_recursive(&real, &real).map_err(|error| fail(error.into()))?;
        }
    }
    mount_change(&real, MountPropagationFlags::SHARED | MountPropagationFlags::REC)
        .map_err(|error| fail(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(path: PathBuf, mode: u32) -> Folder {
        Folder { path, mode, owner: None, enforced: true, contents: false }
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn folders_are_created_with_their_mode_and_corrected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        prepare(&[folder(path.clone(), 0o751)]).unwrap();
        assert_eq!(mode_of(&path), 0o751);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        prepare(&[folder(path.clone(), 0o751)]).unwrap();
        assert_eq!(mode_of(&path), 0o751);
    }

    #[test]
    fn a_folder_that_is_not_enforced_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("root");
        let lax = Folder { enforced: false, ..folder(path.clone(), 0o750) };
        prepare(std::slice::from_ref(&lax)).unwrap();
        assert_eq!(mode_of(&path), 0o750);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        prepare(&[lax]).unwrap();
        assert_eq!(mode_of(&path), 0o700);
    }

    #[test]
    fn a_file_a_link_and_a_world_writable_folder_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, shared) =
            (dir.path().join("file"), dir.path().join("link"), dir.path().join("shared"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
        prepare(&[folder(shared.clone(), 0o751)]).unwrap();
        assert_eq!(mode_of(&shared), 0o751, "an empty one is accepted");
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
        fs::write(shared.join("somebody's"), "").unwrap();
        for path in [file, link, shared] {
            let error = prepare(&[folder(path.clone(), 0o751)]).unwrap_err();
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_new_owner_gets_the_contents_but_no_hard_linked_file() {
        assert!(rustix::process::geteuid().is_root(), "this test changes owners; run it as root");
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        fs::create_dir_all(state.join("deep")).unwrap();
        fs::write(state.join("deep/db"), "").unwrap();
        fs::write(dir.path().join("foreign"), "").unwrap();
        fs::hard_link(dir.path().join("foreign"), state.join("linked")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("foreign"), state.join("link")).unwrap();
        let owner = Some(Owner { uid: 64_299, gid: 64_298 });
        prepare(&[Folder { owner, contents: true, ..folder(state.clone(), 0o700) }]).unwrap();
        for inside in ["", "deep", "deep/db"] {
            let meta = fs::metadata(state.join(inside)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (64_299, 64_298), "{inside}");
        }
        assert_eq!(fs::metadata(dir.path().join("foreign")).unwrap().uid(), 0);
    }

    #[test]
    fn a_parent_folder_that_others_cannot_traverse_is_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let closed = dir.path().join("closed");
        fs::create_dir_all(closed.join("run")).unwrap();
        assert_eq!(closed_parent(&closed.join("run")), None);
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(closed_parent(&closed.join("run")), Some(closed));
    }
}
