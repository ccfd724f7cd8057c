//! The folder with the files of a package, from which dpkg-deb builds it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

/// The folder with the files of a package. The modes of files are the given ones and do not depend on the umask or on the
/// sources. The folder is removed when this value is dropped.
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// Creates an empty folder at `root`. Files that an earlier run has left there are removed.
    pub(super) fn new(root: PathBuf) -> anyhow::Result<Self> {
        let tree = Self { root };
        if tree.root.exists() {
            tree.remove()?;
        }
        tree.create_folder(&tree.root)?;
        Ok(tree)
    }

    /// The path of the folder.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Copies the file `source` to `path`, which is relative to the root.
    pub(super) fn copy(&self, source: &Path, path: &str, mode: u32) -> anyhow::Result<()> {
        let target = self.target(path)?;
        fs::copy(source, &target)
            .and_then(|_| fs::set_permissions(&target, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))
    }

    /// Writes the file `path`, which is relative to the root.
    pub(super) fn write(&self, path: &str, text: &str, mode: u32) -> anyhow::Result<()> {
        let target = self.target(path)?;
        fs::write(&target, text)
            .and_then(|()| fs::set_permissions(&target, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot write {}", target.display()))
    }

    /// Creates the symbolic link `path`, which points to `to`.
    pub(super) fn link(&self, path: &str, to: &str) -> anyhow::Result<()> {
        let target = self.target(path)?;
        symlink(to, &target).with_context(|| format!("cannot link {}", target.display()))
    }

    /// Compresses the file `path` to `path.gz`, without its name and time in the result (gzip(1), -n).
    pub(super) fn compress(&self, path: &str) -> anyhow::Result<()> {
        let file = self.target(path)?;
        let status = Command::new("gzip").arg("-9n").arg(&file).status().context("cannot run gzip")?;
        ensure!(status.success(), "gzip of {} ended with {status}", file.display());
        let compressed = PathBuf::from(format!("{}.gz", file.display()));
        Ok(fs::set_permissions(compressed, fs::Permissions::from_mode(0o644))?)
    }

    /// The MD5 sums of all files, as text in the format of deb-md5sums(5).
    pub(super) fn md5_sums(&self) -> anyhow::Result<String> {
        let files: Vec<String> = self.files()?.into_keys().collect();
        let mut command = Command::new("md5sum");
        command.arg("--").args(&files).current_dir(&self.root).stderr(Stdio::inherit());
        let output = command.output().context("cannot run md5sum")?;
        ensure!(output.status.success(), "md5sum ended with {}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The installed size of the files in KiB (Debian Policy, 5.6.20).
    pub(super) fn size_kib(&self) -> anyhow::Result<u64> {
        Ok(self.files()?.values().map(|bytes| bytes.div_ceil(1024)).sum())
    }

    /// Sets the times of all files and folders to `epoch`, in seconds since 1970, and the mode of all folders to 0755.
    pub(super) fn set_times(&self, epoch: u64) -> anyhow::Result<()> {
        let time = Timespec { tv_sec: i64::try_from(epoch)?, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        let mut result = Ok(());
        walk(&self.root, &mut |path| {
            let set = utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW);
            let set = set.with_context(|| format!("cannot set the time of {}", path.display()));
            if result.is_ok() {
                result = set;
            }
        })?;
        result
    }

    /// Removes the folder.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.root).with_context(|| format!("cannot remove {}", self.root.display()))
    }

    /// The regular files below the root with their sizes in bytes.
    fn files(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let mut files = BTreeMap::new();
        walk(&self.root, &mut |path| {
            if let (Ok(name), Ok(metadata)) = (path.strip_prefix(&self.root), path.symlink_metadata())
                && metadata.is_file()
            {
                files.insert(name.to_string_lossy().into_owned(), metadata.len());
            }
        })?;
        Ok(files)
    }

    /// Creates the parent folders of `path` and returns its full path.
    fn target(&self, path: &str) -> anyhow::Result<PathBuf> {
        let target = self.root.join(path);
        self.create_folder(target.parent().unwrap_or(&self.root))?;
        Ok(target)
    }

    fn create_folder(&self, folder: &Path) -> anyhow::Result<()> {
        let created = fs::DirBuilder::new().recursive(true).mode(0o755).create(folder);
        created.with_context(|| format!("cannot create {}", folder.display()))
    }
}

/// The names of the entries of a folder, sorted.
pub(super) fn entries(folder: &Path) -> anyhow::Result<Vec<String>> {
    let list = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in list {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Visits `path` and everything below it, the entries of a folder before the folder itself. Sets the mode of folders to 0755.
fn walk(path: &Path, visit: &mut impl FnMut(&Path)) -> anyhow::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        for name in entries(path)? {
            walk(&path.join(name), visit)?;
        }
        // A program with another umask may have created it, as with the folder of the manual pages.
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    visit(path);
    Ok(())
}

impl Drop for Tree {
    fn drop(&mut self) {
        // It still exists only if packing failed.
        if self.root.exists()
            && let Err(error) = self.remove()
        {
            let _ = writeln!(std::io::stderr(), "{error:#}");
        }
    }
}
