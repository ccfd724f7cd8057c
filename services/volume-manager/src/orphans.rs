//! Folders of pods that no source names and of which nothing runs (`ListOrphans`, `CleanOrphan`; volumes.md §3.17).
//!
//! The service removes such folders by itself, but it never unmounts what it has not mounted and never removes what it does not
//! know. This is the way for a person to decide that. All functions block.

use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;

use crate::listing::paths_in;
use crate::mounts::{MountError, reachable_mounts};
use crate::remove::{RemoveError, remove_tree};

/// More paths of a pod are not shown.
const MAX_PATHS: usize = 1000;

/// What is left of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    /// The path, below the pod's folder.
    pub(crate) path: PathBuf,
    pub(crate) kind: LeftKind,
}

/// The kind of a path that is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeftKind {
    /// Something is mounted there.
    Mount,
    /// The folder of a volume.
    Volume,
    /// A file that belongs to no volume.
    File,
}

/// What a cleaning has done, or would do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Cleaned {
    pub(crate) removed: Vec<Left>,
    pub(crate) left: Vec<Left>,
    /// Why something is left.
    pub(crate) errors: Vec<String>,
}

/// Why the folder of a pod cannot be read or removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OrphanError {
    /// mountinfo cannot be read.
    #[error(transparent)]
    Mounts(#[from] MountError),
    /// The folder cannot be read.
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// What is left of a pod: mounts, then folders of volumes and other files. A mount is not looked into, because it may hang.
pub(crate) fn left_of(pod_folder: &Path) -> Result<Vec<Left>, OrphanError> {
    let mut mounts: Vec<PathBuf> = reachable_mounts()?
        .into_iter()
        .map(|mount| mount.point)
        .filter(|point| point.starts_with(pod_folder))
        .collect();
    mounts.sort();
    let mut left: Vec<Left> =
        mounts.iter().map(|path| Left { path: path.clone(), kind: LeftKind::Mount }).collect();
    let mut add = |path: PathBuf, kind| {
        if left.len() < MAX_PATHS && !mounts.iter().any(|mount| path.starts_with(mount)) {
            left.push(Left { path, kind });
        }
    };
    for tree in ["volumes", "volumeDevices"] {
        for plugin in children(&pod_folder.join(tree))? {
            for volume in children(&plugin)? {
                add(volume, LeftKind::Volume);
            }
        }
    }
    for child in children(pod_folder)? {
        if !child.is_dir() {
            add(child, LeftKind::File);
        }
    }
    Ok(left)
}

fn children(folder: &Path) -> Result<Vec<PathBuf>, OrphanError> {
    paths_in(folder).map_err(|source| OrphanError::Read { path: folder.to_owned(), source })
}

/// Unmounts what is mounted below a pod's folder, and then removes the folder. If a mount stays, nothing is removed.
pub(crate) fn clean(pod_folder: &Path, dry_run: bool) -> Result<Cleaned, OrphanError> {
    let before = left_of(pod_folder)?;
    if dry_run {
        return Ok(Cleaned { removed: before, ..Cleaned::default() });
    }
    let mut errors = Vec::new();
    let mounts = before.iter().filter(|left| left.kind == LeftKind::Mount).map(|left| &left.path);
    // The inner ones first.
    for point in mounts.collect::<Vec<_>>().into_iter().rev() {
        if let Err(errno) = rustix::mount::unmount(point, UnmountFlags::NOFOLLOW) {
            let why = io::Error::from(errno);
            errors.push(format!("{} is still mounted: {why}; end what uses it, and repeat", point.display()));
        }
    }
    // What says how to unmount a volume must stay as long as the volume is mounted.
    if errors.is_empty()
        && let (Some(parent), Some(name)) =
            (pod_folder.parent(), pod_folder.file_name().and_then(|n| n.to_str()))
        && let Err(error) = remove_tree(parent, name)
    {
        errors.push(text(&error));
    }
    let left = left_of(pod_folder)?;
    let removed = before.into_iter().filter(|path| !left.contains(path)).collect();
    Ok(Cleaned { removed, left, errors })
}

fn text(error: &RemoveError) -> String {
    keelson_service_kit::status::chain(error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn kinds(left: &[Left], pod: &Path) -> Vec<(String, LeftKind)> {
        let relative = |left: &Left| left.path.strip_prefix(pod).unwrap().display().to_string();
        left.iter().map(|path| (relative(path), path.kind)).collect()
    }

    fn pod(folder: &Path) -> PathBuf {
        let pod = folder.join("uid");
        fs::create_dir_all(pod.join("volumes/example.org~fake/data/deep")).unwrap();
        fs::create_dir_all(pod.join("volumeDevices/example.org~fake")).unwrap();
        fs::create_dir_all(pod.join("containers/main")).unwrap();
        fs::write(pod.join("volumes/example.org~fake/data/file"), "x").unwrap();
        symlink("/dev/null", pod.join("volumeDevices/example.org~fake/disk")).unwrap();
        fs::write(pod.join("etc-hosts"), "x").unwrap();
        pod
    }

    #[test]
    fn what_is_left_of_an_orphan_are_its_volumes_devices_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let pod = pod(folder.path());
        let expected = [
            ("volumes/example.org~fake/data".to_owned(), LeftKind::Volume),
            ("volumeDevices/example.org~fake/disk".to_owned(), LeftKind::Volume),
            ("etc-hosts".to_owned(), LeftKind::File),
        ];
        assert_eq!(kinds(&left_of(&pod).unwrap(), &pod), expected);
        assert!(left_of(&folder.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn a_dry_run_removes_nothing_and_shows_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let pod = pod(folder.path());
        let shown = clean(&pod, true).unwrap();
        assert!(pod.join("volumes/example.org~fake/data/file").exists() && shown.left.is_empty());
        let done = clean(&pod, false).unwrap();
        assert_eq!((done.removed, done.left, done.errors), (shown.removed, Vec::new(), Vec::new()));
        assert!(!pod.exists() && Path::new("/dev/null").exists(), "links are not followed");
    }
}
