//! What one container needs of its pod's volumes (`PrepareContainer`): parts of them, and values of files in them.
//! Everything here blocks.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use keelson_service_kit::status::chain;
use keelson_volume_manager_core::envfile::{EnvFileError, value_of};

use crate::subpath::{self, Part, SubPathError};
use crate::view::Mounted;

/// A file of variables may be so large in bytes: more than any environment holds.
const MOST_BYTES: u64 = 1 << 20;

/// A value that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    /// Name of the volume.
    pub(crate) volume: String,
    /// Path in the volume.
    pub(crate) path: String,
    /// Its name in the file.
    pub(crate) key: String,
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) uid: String,
    pub(crate) container: String,
    pub(crate) parts: Vec<Part>,
    pub(crate) keys: Vec<Key>,
}

/// What has become of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Found(String),
    Missing,
    Error(String),
}

/// What has been made ready, in the order of the wishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prepared {
    pub(crate) parts: Vec<(u32, PathBuf)>,
    pub(crate) values: Vec<Value>,
}

/// Why a container cannot be made. The texts are for the pod's status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    /// The volume is none of those that are mounted.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    Volume { container: String, volume: String },
    /// A part of a volume cannot be mounted.
    #[error("failed to prepare subPath for volumeMount {mount:?} of container {container:?}")]
    Part { container: String, mount: String, source: SubPathError },
}

/// Why a value cannot be read.
#[derive(Debug, thiserror::Error)]
enum ValueError {
    #[error("the pod has no such volume mounted")]
    Volume,
    #[error("variables are read from an emptyDir only")]
    Kind,
    #[error(transparent)]
    Open(#[from] SubPathError),
    #[error("it cannot be read")]
    Read(#[source] std::io::Error),
    #[error("it is larger than {MOST_BYTES} bytes")]
    Size,
    #[error("it is no UTF-8 text")]
    Text,
    #[error(transparent)]
    Syntax(#[from] EnvFileError),
}

/// Makes everything ready, or finds it ready. `mounts` are the volumes of the pod that are mounted.
pub(crate) fn prepare(
    pod_folder: &Path,
    mounts: &[Mounted],
    wishes: &Wishes,
) -> Result<Prepared, PrepareError> {
    let volume = |name: &str| mounts.iter().find(|mounted| mounted.name == name);
    let mut parts = Vec::with_capacity(wishes.parts.len());
    for part in &wishes.parts {
        let container = wishes.container.clone();
        let Some(mounted) = volume(&part.volume) else {
            return Err(PrepareError::Volume { container, volume: part.volume.clone() });
        };
        let root = Path::new(&mounted.host_path);
        match subpath::prepare(pod_folder, &wishes.container, root, part) {
            Ok(path) => parts.push((part.index, path)),
            Err(source) => {
                let path = source.path().map(|path| path.display().to_string());
                let (uid, mount) = (&wishes.uid, part.volume.clone());
                tracing::warn!(
                    uid,
                    container,
                    volume = mount,
                    sub_path = part.path,
                    path,
                    "a subPath cannot be prepared: {}",
                    chain(&source)
                );
                return Err(PrepareError::Part { container, mount, source });
            }
        }
    }
    let value = |key: &Key| match value(volume(&key.volume), key) {
        Ok(Some(value)) => Value::Found(value),
        Ok(None) => Value::Missing,
        Err(error) => Value::Error(chain(&error)),
    };
    Ok(Prepared { parts, values: wishes.keys.iter().map(value).collect() })
}

fn value(mounted: Option<&Mounted>, key: &Key) -> Result<Option<String>, ValueError> {
    let mounted = mounted.ok_or(ValueError::Volume)?;
    if !mounted.empty_dir {
        return Err(ValueError::Kind);
    }
    let root = subpath::open_root(Path::new(&mounted.host_path))?;
    let Some(file) = subpath::open_file(&root, &key.path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(ValueError::Read)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MOST_BYTES {
        return Err(ValueError::Size);
    }
    let text = String::from_utf8(bytes).map_err(|_| ValueError::Text)?;
    Ok(value_of(&text, &key.key)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn asked(mounted: &Mounted, path: &str, key: &str) -> Value {
        let key = Key { volume: mounted.name.clone(), path: path.into(), key: key.into() };
        let wishes = Wishes { uid: "u".into(), container: "main".into(), parts: Vec::new(), keys: vec![key] };
        let prepared = prepare(Path::new("/nowhere"), std::slice::from_ref(mounted), &wishes).unwrap();
        prepared.values.into_iter().next().unwrap()
    }

    #[test]
    fn a_value_is_found_missing_or_an_error_without_a_path_of_the_node() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("v");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("env"), "A='1'\nB='two\nlines'\n").unwrap();
        fs::write(volume.join("bad"), "hunter2").unwrap();
        fs::write(volume.join("bytes"), [0xff]).unwrap();
        fs::write(volume.join("large"), vec![b'#'; 1 + (1 << 20)]).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", volume.join("out")).unwrap();
        let host_path = volume.to_string_lossy().into_owned();
        let mounted = Mounted { name: "v".into(), host_path, empty_dir: true, ..Mounted::default() };
        assert_eq!(asked(&mounted, "env", "B"), Value::Found("two\nlines".into()));
        assert_eq!(asked(&mounted, "env", "C"), Value::Missing);
        assert_eq!(asked(&mounted, "none/env", "A"), Value::Missing);
        for (path, text) in [
            ("bad", "line 1: it has no '='"),
            ("bytes", "no UTF-8"),
            ("large", "larger than 1048576 bytes"),
            ("out", "out of the volume"),
            ("../v/env", "out of the volume"),
            (".", "no regular file"),
        ] {
            let Value::Error(why) = asked(&mounted, path, "A") else { panic!("{path}") };
            assert!(why.contains(text), "{path}: {why}");
            assert!(!why.contains("hunter2") && !why.contains(&mounted.host_path), "{path}: {why}");
        }
        let foreign = Mounted { empty_dir: false, ..mounted };
        assert!(matches!(asked(&foreign, "env", "A"), Value::Error(why) if why.contains("emptyDir")));
    }

    #[test]
    fn a_volume_that_is_not_mounted_is_named() {
        let part = Part { index: 0, volume: "none".into(), path: "a".into(), read_only: false };
        let wishes = Wishes {
            uid: "u".into(),
            container: "main".into(),
            parts: vec![part],
            keys: vec![Key { volume: "none".into(), path: "env".into(), key: "A".into() }],
        };
        let error = prepare(Path::new("/nowhere"), &[], &wishes).unwrap_err().to_string();
        assert_eq!(error, "cannot find volume \"none\" to mount into container \"main\"");
        let keys = Wishes { parts: Vec::new(), ..wishes };
        let prepared = prepare(Path::new("/nowhere"), &[], &keys).unwrap();
        assert!(matches!(&prepared.values[0], Value::Error(why) if why.contains("no such volume")));
    }
}
