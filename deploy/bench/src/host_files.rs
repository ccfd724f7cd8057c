//! The host files that containers mount. The agent creates them for its pods. The floor gets copies of them in another folder
//! before its time is measured.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// The largest file that is copied. The files that the agent creates for a pod (etc-hosts, a termination message) are small.
const MAX_BYTES: u64 = 1 << 20;

/// Maps paths in some folders to paths in other folders.
#[derive(Debug, Clone)]
pub struct PathMap {
    /// Pairs of source and target.
    folders: Vec<(PathBuf, PathBuf)>,
}

impl PathMap {
    /// Maps the first folder of each pair to the second.
    pub fn new(folders: Vec<(PathBuf, PathBuf)>) -> Self {
        Self { folders }
    }

    /// The path that `path` is mapped to; `None` if it is in none of the source folders.
    pub fn map(&self, path: &Path) -> Option<PathBuf> {
        self.folders.iter().find_map(|(from, to)| Some(to.join(path.strip_prefix(from).ok()?)))
    }

    /// The target folders.
    pub fn targets(&self) -> impl Iterator<Item = &Path> {
        self.folders.iter().map(|(_, to)| to.as_path())
    }
}

/// The content, owner and mode of a file or folder, and the path of its copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFile {
    path: PathBuf,
    mode: u32,
    uid: u32,
    gid: u32,
    /// `None` for a folder.
    content: Option<Vec<u8>>,
}

impl HostFile {
    /// Reads the file or folder at `path`. [`Self::create`] creates the copy at `target`.
    pub fn read(path: &Path, target: PathBuf) -> anyhow::Result<Self> {
        let meta = fs::symlink_metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        let content = if meta.is_dir() {
            None
        } else if meta.is_file() && meta.len() <= MAX_BYTES {
            Some(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?)
        } else {
            bail!("{} is neither a folder nor a small file", path.display());
        };
        Ok(Self { path: target, mode: meta.mode() & 0o7777, uid: meta.uid(), gid: meta.gid(), content })
    }

    /// A folder with mode 0755 that root owns.
    pub fn folder(path: PathBuf) -> Self {
        Self { path, mode: 0o755, uid: 0, gid: 0, content: None }
    }

    /// Creates the copy and its parent folders.
    pub fn create(&self) -> anyhow::Result<()> {
        self.try_create().with_context(|| format!("cannot create {}", self.path.display()))
    }

    fn try_create(&self) -> std::io::Result<()> {
        if let Some(content) = &self.content {
            fs::create_dir_all(self.path.parent().unwrap_or(&self.path))?;
            fs::write(&self.path, content)?;
        } else {
            fs::create_dir_all(&self.path)?;
        }
        chown(&self.path, Some(self.uid), Some(self.gid))?;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(self.mode))
    }
}

/// Removes a folder with its content, if it exists.
pub fn remove_folder(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_in_source_folders_are_mapped() {
        let path_map = PathMap::new(vec![("/a/kubelet".into(), "/f/kubelet".into())]);
        assert_eq!(path_map.map(Path::new("/a/kubelet/pods/x")), Some("/f/kubelet/pods/x".into()));
        assert_eq!(path_map.map(Path::new("/a/kubelets")), None);
        assert_eq!(path_map.map(Path::new("/etc/hosts")), None);
    }

    #[test]
    fn copies_have_the_content_and_the_mode_of_the_original() {
        let scratch = keelson_testkit::Scratch::new().unwrap();
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        fs::create_dir_all(from.join("volume")).unwrap();
        fs::set_permissions(from.join("volume"), fs::Permissions::from_mode(0o2777)).unwrap();
        fs::write(from.join("hosts"), "127.0.0.1 x\n").unwrap();
        fs::set_permissions(from.join("hosts"), fs::Permissions::from_mode(0o640)).unwrap();
        for name in ["volume", "hosts"] {
            let file = HostFile::read(&from.join(name), to.join("deep").join(name)).unwrap();
            file.create().unwrap();
            file.create().unwrap();
        }
        let mode = |path: &str| fs::metadata(to.join("deep").join(path)).unwrap().mode() & 0o7777;
        assert_eq!((mode("volume"), mode("hosts")), (0o2777, 0o640));
        assert_eq!(fs::read_to_string(to.join("deep/hosts")).unwrap(), "127.0.0.1 x\n");
        remove_folder(&to).unwrap();
        remove_folder(&to).unwrap();
        assert!(!to.exists());
    }
}
