//! Prepares what one container needs from its pod's volumes (`PrepareContainer`): subPaths, and values of environment
//! files. All functions block.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use keelson_service_kit::status::chain;
use keelson_volume_manager_core::envfile::{EnvFileError, value_of};
use tokio::runtime::Handle;

use crate::mounter::Mounter;
use crate::subpath::{self, SubPath, SubPathError};
use crate::view::MountedVolume;

/// The size limit of an environment file in bytes; larger than any environment.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// A requested key of an environment file (`fileKeyRef`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileKey {
    /// The name of the volume.
    pub(crate) volume: String,
    /// The path in the volume.
    pub(crate) path: String,
    /// The key in the file.
    pub(crate) key: String,
}

/// What a container needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerRequest {
    pub(crate) uid: String,
    pub(crate) container: String,
    pub(crate) subpaths: Vec<SubPath>,
    pub(crate) keys: Vec<FileKey>,
}

/// The result of a requested key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileKeyValue {
    Found(String),
    Missing,
    Error(String),
}

/// What was prepared, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreparedContainer {
    pub(crate) subpaths: Vec<(u32, PathBuf)>,
    pub(crate) values: Vec<FileKeyValue>,
}

/// Why a container cannot be prepared. The messages are for the pod's status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    /// The pod has no such volume mounted.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    VolumeNotMounted { container: String, volume: String },
    /// The volume is a block device.
    #[error(
        "volume {volume:?} is a block device, which has no subPath; container {container:?} can use all of it in volumeDevices"
    )]
    BlockDevice { container: String, volume: String },
    /// A subPath cannot be mounted.
    #[error("failed to prepare subPath for volumeMount {mount:?} of container {container:?}")]
    SubPath { container: String, mount: String, source: SubPathError },
}

/// Why the value of a key cannot be read.
#[derive(Debug, thiserror::Error)]
enum ValueError {
    #[error("the pod has no such volume mounted")]
    VolumeNotMounted,
    #[error("environment files are only read from emptyDir volumes")]
    NotEmptyDir,
    #[error(transparent)]
    Open(#[from] SubPathError),
    #[error("the file cannot be read")]
    Read(#[source] std::io::Error),
    #[error("the file is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge,
    #[error("the file is not valid UTF-8")]
    NotUtf8,
    #[error(transparent)]
    Syntax(#[from] EnvFileError),
}

/// Prepares everything that is not prepared yet. `mounts` are the mounted volumes of the pod. A subPath of a volume that may
/// hang is prepared by a helper process of `mounter`.
pub(crate) fn prepare(
    mounter: &Mounter,
    pod_folder: &Path,
    mounts: &[MountedVolume],
    request: &ContainerRequest,
) -> Result<PreparedContainer, PrepareError> {
    let volume = |name: &str| mounts.iter().find(|mounted| mounted.name == name);
    let mut subpaths = Vec::with_capacity(request.subpaths.len());
    for subpath in &request.subpaths {
        let container = request.container.clone();
        let Some(mounted) = volume(&subpath.volume) else {
            return Err(PrepareError::VolumeNotMounted { container, volume: subpath.volume.clone() });
        };
        if mounted.is_block_device {
            return Err(PrepareError::BlockDevice { container, volume: subpath.volume.clone() });
        }
        let root = Path::new(&mounted.host_path);
        // Below the name of the volume's folder, which is not the pod's name for a PersistentVolume (volumes.md §2).
        let in_folder = SubPath { volume: mounted.inner_name.clone(), ..subpath.clone() };
        let prepared = if mounted.is_foreign() {
            let prepared = mounter.prepare_subpath(pod_folder, &request.container, root, &in_folder);
            Handle::current().block_on(prepared)
        } else {
            subpath::prepare(pod_folder, &request.container, root, &in_folder)
        };
        match prepared {
            Ok(path) => subpaths.push((subpath.index, path)),
            Err(source) => {
                let path = source.path().map(|path| path.display().to_string());
                let (uid, mount) = (&request.uid, subpath.volume.clone());
                tracing::warn!(
                    uid,
                    container,
                    volume = mount,
                    sub_path = subpath.path,
                    path,
                    "cannot prepare a subPath: {}",
                    chain(&source)
                );
                return Err(PrepareError::SubPath { container, mount, source });
            }
        }
    }
    let value = |key: &FileKey| match read_value(volume(&key.volume), key) {
        Ok(Some(value)) => FileKeyValue::Found(value),
        Ok(None) => FileKeyValue::Missing,
        Err(error) => FileKeyValue::Error(chain(&error)),
    };
    Ok(PreparedContainer { subpaths, values: request.keys.iter().map(value).collect() })
}

fn read_value(mounted: Option<&MountedVolume>, key: &FileKey) -> Result<Option<String>, ValueError> {
    let mounted = mounted.ok_or(ValueError::VolumeNotMounted)?;
    if !mounted.is_empty_dir {
        return Err(ValueError::NotEmptyDir);
    }
    let root = subpath::open_root(Path::new(&mounted.host_path))?;
    let Some(file) = subpath::open_file(&root, &key.path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(ValueError::Read)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_FILE_BYTES {
        return Err(ValueError::TooLarge);
    }
    let text = String::from_utf8(bytes).map_err(|_| ValueError::NotUtf8)?;
    Ok(value_of(&text, &key.key)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn value_of_key(mounted: &MountedVolume, path: &str, key: &str) -> FileKeyValue {
        let key = FileKey { volume: mounted.name.clone(), path: path.into(), key: key.into() };
        let request = ContainerRequest {
            uid: "u".into(),
            container: "main".into(),
            subpaths: Vec::new(),
            keys: vec![key],
        };
        let prepared =
            prepare(&Mounter::default(), Path::new("/nowhere"), std::slice::from_ref(mounted), &request)
                .unwrap();
        prepared.values.into_iter().next().unwrap()
    }

    #[test]
    fn a_file_key_value_is_found_missing_or_an_error_without_node_paths() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("v");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("env"), "A='1'\nB='two\nlines'\n").unwrap();
        fs::write(volume.join("bad"), "hunter2").unwrap();
        fs::write(volume.join("bytes"), [0xff]).unwrap();
        fs::write(volume.join("large"), vec![b'#'; 1 + (1 << 20)]).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", volume.join("out")).unwrap();
        let host_path = volume.to_string_lossy().into_owned();
        let mounted = MountedVolume {
            name: "v".into(),
            inner_name: "v".into(),
            host_path,
            is_empty_dir: true,
            ..MountedVolume::default()
        };
        assert_eq!(value_of_key(&mounted, "env", "B"), FileKeyValue::Found("two\nlines".into()));
        assert_eq!(value_of_key(&mounted, "env", "C"), FileKeyValue::Missing);
        assert_eq!(value_of_key(&mounted, "none/env", "A"), FileKeyValue::Missing);
        for (path, text) in [
            ("bad", "line 1: no '=' found"),
            ("bytes", "not valid UTF-8"),
            ("large", "larger than 1048576 bytes"),
            ("out", "out of the volume"),
            ("../v/env", "out of the volume"),
            (".", "not a regular file"),
        ] {
            let FileKeyValue::Error(why) = value_of_key(&mounted, path, "A") else { panic!("{path}") };
            assert!(why.contains(text), "{path}: {why}");
            assert!(!why.contains("hunter2") && !why.contains(&mounted.host_path), "{path}: {why}");
        }
        let foreign = MountedVolume { is_empty_dir: false, ..mounted };
        assert!(
            matches!(value_of_key(&foreign, "env", "A"), FileKeyValue::Error(why) if why.contains("emptyDir"))
        );
    }

    #[test]
    fn a_volume_that_is_not_mounted_is_named() {
        let subpath = SubPath { index: 0, volume: "none".into(), path: "a".into(), read_only: false };
        let request = ContainerRequest {
            uid: "u".into(),
            container: "main".into(),
            subpaths: vec![subpath],
            keys: vec![FileKey { volume: "none".into(), path: "env".into(), key: "A".into() }],
        };
        let error =
            prepare(&Mounter::default(), Path::new("/nowhere"), &[], &request).unwrap_err().to_string();
        assert_eq!(error, "cannot find volume \"none\" to mount into container \"main\"");
        let keys = ContainerRequest { subpaths: Vec::new(), ..request };
        let prepared = prepare(&Mounter::default(), Path::new("/nowhere"), &[], &keys).unwrap();
        assert!(matches!(&prepared.values[0], FileKeyValue::Error(why) if why.contains("no such volume")));
    }
}
