//! The files of a package before they are packed.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

/// A folder that becomes a package. Modes are what is said here, whatever the umask and the sources have.
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// An empty one at `root`; what an earlier run has left there goes.
    pub(super) fn new(root: PathBuf) -> anyhow::Result<Self> {
        let tree = Self { root };
        if tree.root.exists() {
            tree.remove()?;
        }
        tree.make_folder(&tree.root)?;
        Ok(tree)
    }

    /// Where it is.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Puts a copy of a file there.
    pub(super) fn copy(&self, source: &Path, place: &str, mode: u32) -> anyhow::Result<()> {
        let target = self.place(place)?;
        fs::copy(source, &target)
            .and_then(|_| fs::set_permissions(&target, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))
    }

    /// Writes a file.
    pub(super) fn write(&self, place: &str, text: &str, mode: u32) -> anyhow::Result<()> {
        let target = self.place(place)?;
        fs::write(&target, text)
            .and_then(|()| fs::set_permissions(&target, fs::Permissions::from_mode(mode)))
            .with_context(|| format!("cannot write {}", target.display()))
    }

    /// Makes a symbolic link.
    pub(super) fn link(&self, place: &str, to: &str) -> anyhow::Result<()> {
        let target = self.place(place)?;
        symlink(to, &target).with_context(|| format!("cannot link {}", target.display()))
    }

    /// Compresses a file without its name and time in the result (gzip(1), -n).
    pub(super) fn compress(&self, place: &str) -> anyhow::Result<()> {
        let file = self.place(place)?;
        let status = Command::new("gzip").arg("-9n").arg(&file).status().context("cannot run gzip")?;
        ensure!(status.success(), "gzip of {} ended with {status}", file.display());
        let packed = PathBuf::from(format!("{}.gz", file.display()));
        Ok(fs::set_permissions(packed, fs::Permissions::from_mode(0o644))?)
    }

    /// The sums of all files as dpkg keeps them (deb-md5sums(5)).
    pub(super) fn md5_sums(&self) -> anyhow::Result<String> {
        let files: Vec<String> = self.files()?.into_keys().collect();
        let mut command = Command::new("md5sum");
        command.arg("--").args(&files).current_dir(&self.root).stderr(Stdio::inherit());
        let output = command.output().context("cannot run md5sum")?;
        ensure!(output.status.success(), "md5sum ended with {}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The room that the files take, in KiB (Debian Policy, 5.6.20).
    pub(super) fn kibibytes(&self) -> anyhow::Result<u64> {
        Ok(self.files()?.values().map(|bytes| bytes.div_ceil(1024)).sum())
    }

    /// Gives everything the same time, and folders the mode of all folders.
    pub(super) fn set_times(&self, epoch: u64) -> anyhow::Result<()> {
        let time = Timespec { tv_sec: i64::try_from(epoch)?, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        let mut problem = Ok(());
        walk(&self.root, &mut |path| {
            let set = utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW);
            let set = set.with_context(|| format!("cannot set the time of {}", path.display()));
            if problem.is_ok() {
                problem = set;
            }
        })?;
        problem
    }

    /// Removes it.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.root).with_context(|| format!("cannot remove {}", self.root.display()))
    }

    /// Regular files below the root, with their sizes.
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

    /// The path of a file whose folder is there.
    fn place(&self, place: &str) -> anyhow::Result<PathBuf> {
        let path = self.root.join(place);
        self.make_folder(path.parent().unwrap_or(&self.root))?;
        Ok(path)
    }

    fn make_folder(&self, folder: &Path) -> anyhow::Result<()> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(folder);
        made.with_context(|| format!("cannot make {}", folder.display()))
    }
}

/// The names in a folder, in order.
pub(super) fn entries(folder: &Path) -> anyhow::Result<Vec<String>> {
    let list = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in list {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Visits everything below a folder and the folder itself, which comes after what it holds.
fn walk(path: &Path, visit: &mut impl FnMut(&Path)) -> anyhow::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        for name in entries(path)? {
            walk(&path.join(name), visit)?;
        }
        // Made by a program with another umask, as manual pages are.
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    visit(path);
    Ok(())
}

impl Drop for Tree {
    fn drop(&mut self) {
        // After a failure; otherwise it is gone already.
        if self.root.exists()
            && let Err(error) = self.remove()
        {
            let _ = writeln!(std::io::stderr(), "{error:#}");
        }
    }
}
