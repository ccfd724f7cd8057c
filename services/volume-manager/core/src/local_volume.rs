//! local volumes (volumes.md §10.6): which paths are allowed, how they are used, and who owns their files.

use std::path::Path;

use crate::hostpath::FileKind;
use crate::names;

/// The filesystem of a blank block device, unless the volume names one.
pub const DEFAULT_FS_TYPE: &str = "ext4";
/// The folder of device mounts, relative to the agent's root folder.
pub const GLOBAL_MOUNTS: &str = "plugins/kubernetes.io/local-volume/mounts";
/// The folder of block maps, relative to the agent's root folder. The tilde is the kubelet's (volumes.md §2).
pub const BLOCK_MAPS: &str = "plugins/kubernetes.io~local-volume/volumeDevices";

/// The reason of the event about a volume whose files already belong to another group.
pub const ALREADY_MOUNTED_VOLUME: &str = "AlreadyMountedVolume";

/// Why a local volume cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocalVolumeError {
    /// The path cannot be the path of any local volume.
    #[error(
        "local volume {volume}: invalid path {path:?}: {problem}; correct spec.local.path of the PersistentVolume"
    )]
    InvalidPath {
        /// The PersistentVolume.
        volume: String,
        /// The path.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Nothing is at the path.
    #[error(
        "local volume {volume}: path {path} does not exist on this node; \
         create it, or correct the volume's node affinity"
    )]
    Missing {
        /// The PersistentVolume.
        volume: String,
        /// The path.
        path: String,
    },
    /// The file at the path cannot be used in the volume's mode.
    #[error("local volume {volume}: {path} is not {wanted}")]
    WrongKind {
        /// The PersistentVolume.
        volume: String,
        /// The path.
        path: String,
        /// What it has to be, with its article.
        wanted: &'static str,
    },
    /// The volume's name cannot name a folder.
    #[error("local volume {volume:?}: the name cannot be the name of a folder")]
    UnsafeName {
        /// The PersistentVolume.
        volume: String,
    },
}

/// How a volume is consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As a tree of files.
    Filesystem,
    /// As a block device.
    Block,
}

/// How the path of a local volume is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// Bind-mount the directory to the pod.
    Directory,
    /// Format if blank, mount at `global`, then bind-mount that to the pod.
    Device {
        /// The filesystem of a blank device.
        fs_type: String,
        /// The device mount, relative to the agent's root folder.
        global: String,
    },
    /// Map the device to the pod.
    Map {
        /// The folder of its block maps, relative to the agent's root folder.
        global: String,
    },
}

/// Checks the path of `volume` before anything looks at it.
pub fn check_path(volume: &str, path: &str) -> Result<(), LocalVolumeError> {
    let problem = if path.is_empty() {
        "is empty"
    } else if path.split('/').any(|part| part == "..") {
        "must not contain '..'"
    } else if !path.starts_with('/') {
        "must be absolute"
    } else if path.contains('\0') {
        "contains a zero byte"
    } else {
        return Ok(());
    };
    Err(LocalVolumeError::InvalidPath { volume: volume.to_owned(), path: path.to_owned(), problem })
}

/// How `volume` uses its path, at which a file of kind `found` is after symlinks are followed. An empty `fs_type` is
/// [`DEFAULT_FS_TYPE`].
pub fn usage(
    volume: &str,
    path: &str,
    mode: Mode,
    found: FileKind,
    fs_type: &str,
) -> Result<Use, LocalVolumeError> {
    check_path(volume, path)?;
    let wrong =
        |wanted| LocalVolumeError::WrongKind { volume: volume.to_owned(), path: path.to_owned(), wanted };
    match (mode, found) {
        (_, FileKind::Missing) => {
            Err(LocalVolumeError::Missing { volume: volume.to_owned(), path: path.to_owned() })
        }
        (Mode::Filesystem, FileKind::Directory) => Ok(Use::Directory),
        (Mode::Filesystem, FileKind::BlockDevice) => {
            let fs_type = if fs_type.is_empty() { DEFAULT_FS_TYPE } else { fs_type }.to_owned();
            Ok(Use::Device { fs_type, global: global_mount(volume)? })
        }
        (Mode::Block, FileKind::BlockDevice) => Ok(Use::Map { global: block_maps(volume)? }),
        (Mode::Filesystem, FileKind::File | FileKind::Socket | FileKind::CharDevice | FileKind::Other) => {
            Err(wrong("a directory or a block device"))
        }
        (
            Mode::Block,
            FileKind::Directory | FileKind::File | FileKind::Socket | FileKind::CharDevice | FileKind::Other,
        ) => Err(wrong("a block device, which volumeMode Block requires")),
    }
}

/// Where the block device of `volume` is mounted, relative to the agent's root folder.
pub fn global_mount(volume: &str) -> Result<String, LocalVolumeError> {
    in_folder(GLOBAL_MOUNTS, volume)
}

/// The folder of the block maps of `volume`, relative to the agent's root folder.
pub fn block_maps(volume: &str) -> Result<String, LocalVolumeError> {
    in_folder(BLOCK_MAPS, volume)
}

fn in_folder(folder: &str, volume: &str) -> Result<String, LocalVolumeError> {
    if names::is_path_component(volume) {
        Ok(format!("{folder}/{volume}"))
    } else {
        Err(LocalVolumeError::UnsafeName { volume: volume.to_owned() })
    }
}

/// Whether one of the mount references of a volume is in a pod's folder below `pods`, the absolute path of the folder
/// of all pods.
pub fn is_mounted_by_a_pod<'p>(references: impl IntoIterator<Item = &'p str>, pods: &Path) -> bool {
    references.into_iter().any(|path| Path::new(path) != pods && Path::new(path).starts_with(pods))
}

/// What happens to the ownership of a volume's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ownership {
    /// It stays as it is.
    Unchanged,
    /// The files get the pod's fsGroup.
    Change(i64),
    /// It stays as it is although the pod wants another group; an event [`ALREADY_MOUNTED_VOLUME`] with this message is
    /// due on the pod.
    Conflict(String),
}

/// Whether the files of `volume` get the group `fs_group` of a pod that mounts it next. `is_mounted`: another pod
/// mounts it already. `gid`: the group of the volume's root.
pub fn ownership(
    volume: &str,
    fs_group: Option<i64>,
    read_only: bool,
    is_mounted: bool,
    gid: u32,
) -> Ownership {
    match fs_group {
        Some(wanted) if is_mounted && wanted != i64::from(gid) => Ownership::Conflict(format!(
            "The requested fsGroup is {wanted}, but the volume {volume} has GID {gid}. The volume may not be shareable."
        )),
        Some(wanted) if !is_mounted && !read_only => Ownership::Change(wanted),
        Some(_) | None => Ownership::Unchanged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_path_is_absolute_and_has_no_parent_reference() {
        for (path, problem) in [
            ("", Some("is empty")),
            ("/mnt/../etc", Some("must not contain '..'")),
            ("..", Some("must not contain '..'")),
            ("mnt/disk", Some("must be absolute")),
            ("/mnt/\0", Some("contains a zero byte")),
            ("/mnt/..disk/d...", None),
            ("/dev/sdb", None),
        ] {
            let result = check_path("pv", path);
            match problem {
                None => assert_eq!(result, Ok(()), "{path}"),
                Some(problem) => {
                    let text = result.unwrap_err().to_string();
                    assert!(
                        text.contains(problem) && text.contains("local volume pv: invalid path"),
                        "{text}"
                    );
                }
            }
        }
    }

    #[test]
    fn only_a_directory_or_a_block_device_is_a_local_volume() {
        for found in FileKind::ALL {
            let files = usage("pv", "/d", Mode::Filesystem, found, "");
            let block = usage("pv", "/d", Mode::Block, found, "");
            match found {
                FileKind::Directory => {
                    assert_eq!(files, Ok(Use::Directory));
                    let text = block.unwrap_err().to_string();
                    assert!(text.contains("/d is not a block device"), "{text}");
                }
                FileKind::BlockDevice => {
                    let global = "plugins/kubernetes.io/local-volume/mounts/pv".to_owned();
                    assert_eq!(files, Ok(Use::Device { fs_type: "ext4".into(), global }));
                    let global = "plugins/kubernetes.io~local-volume/volumeDevices/pv".to_owned();
                    assert_eq!(block, Ok(Use::Map { global }));
                }
                FileKind::Missing => {
                    let texts = [files.unwrap_err().to_string(), block.unwrap_err().to_string()];
                    assert!(
                        texts.iter().all(|t| t.contains("path /d does not exist on this node")),
                        "{texts:?}"
                    );
                }
                _ => {
                    let text = files.unwrap_err().to_string();
                    assert!(text.contains("/d is not a directory or a block device"), "{found:?}: {text}");
                    assert!(block.is_err(), "{found:?}");
                }
            }
        }
    }

    #[test]
    fn the_volume_chooses_the_filesystem_of_a_blank_device() {
        let result = usage("pv", "/dev/sdb", Mode::Filesystem, FileKind::BlockDevice, "xfs").unwrap();
        assert!(matches!(result, Use::Device { fs_type, .. } if fs_type == "xfs"));
    }

    #[test]
    fn a_path_is_checked_before_the_kind_of_its_file() {
        let result = usage("pv", "/a/../b", Mode::Filesystem, FileKind::Directory, "");
        assert!(matches!(result, Err(LocalVolumeError::InvalidPath { .. })), "{result:?}");
    }

    #[test]
    fn a_volume_name_that_leads_out_of_its_folder_is_refused() {
        for name in ["", ".", "..", "a/b", "a\0"] {
            assert!(matches!(global_mount(name), Err(LocalVolumeError::UnsafeName { .. })), "{name:?}");
            assert!(matches!(block_maps(name), Err(LocalVolumeError::UnsafeName { .. })), "{name:?}");
        }
    }

    #[test]
    fn only_references_below_the_pods_folder_are_mounts_of_pods() {
        let pods = Path::new("/var/lib/kubelet/pods");
        let is_mounted = |paths: &[&str]| is_mounted_by_a_pod(paths.iter().copied(), pods);
        assert!(is_mounted(&["/mnt/disk", "/var/lib/kubelet/pods/u/volumes/kubernetes.io~local-volume/pv"]));
        assert!(!is_mounted(&["/mnt/disk", "/var/lib/kubelet/pods-old/u", "/var/lib/kubelet/pods"]));
        assert!(!is_mounted(&[]));
    }

    #[test]
    fn fs_group_is_applied_only_by_the_first_pod_and_never_read_only() {
        for (fs_group, read_only, is_mounted, gid, expected) in [
            (None, false, false, 5, Ownership::Unchanged),
            (None, false, true, 5, Ownership::Unchanged),
            (Some(5), false, false, 0, Ownership::Change(5)),
            (Some(5), false, false, 5, Ownership::Change(5)),
            (Some(5), true, false, 0, Ownership::Unchanged),
            (Some(5), false, true, 5, Ownership::Unchanged),
            (Some(5), true, true, 5, Ownership::Unchanged),
        ] {
            assert_eq!(ownership("pv", fs_group, read_only, is_mounted, gid), expected);
        }
    }

    #[test]
    fn another_group_of_a_mounted_volume_gives_the_kubelets_event() {
        for read_only in [false, true] {
            let expected = "The requested fsGroup is 4321, but the volume pv has GID 1234. \
                The volume may not be shareable.";
            let decision = ownership("pv", Some(4321), read_only, true, 1234);
            assert_eq!(decision, Ownership::Conflict(expected.into()));
        }
        assert_eq!(ALREADY_MOUNTED_VOLUME, "AlreadyMountedVolume");
    }
}
