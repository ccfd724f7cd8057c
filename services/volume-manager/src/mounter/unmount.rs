//! Unmounts, and what mountinfo says about mounts.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::mount_options::MountOptions;
use keelson_volume_manager_core::world::FailureClass;

use super::mount_table::{self, Entry};
use super::output::{CommandOutput, run_error};
use super::runner::{Abandonment, Run, RunError};
use super::state::Mounter;
use super::threads::blocking;
use crate::plugin_error::PluginError;

/// The number of mounts that may be stacked at one path.
const MAX_STACKED: usize = 8;

fn read_table() -> Result<Vec<Entry>, PluginError> {
    mount_table::read()
        .map_err(|error| PluginError::new(format!("cannot read the mounts of the node: {error}")))
}

/// As [`read_table`], on a thread: mountinfo may be long.
async fn table() -> Result<Vec<Entry>, PluginError> {
    on_thread("read the mounts of the node", || Ok(read_table())).await?
}

/// As [`mount_table::resolve`], on a thread: a folder above the path may hang.
async fn resolve(path: &Path) -> Result<PathBuf, PluginError> {
    let path = path.to_owned();
    on_thread("resolve the path of a mount", move || Ok(mount_table::resolve(&path))).await
}

async fn on_thread<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PluginError> {
    blocking(work).await.map_err(|error| PluginError::new(format!("cannot {what}: {error}")))
}

impl Mounter {
    /// Whether something is mounted on `path` itself, read from mountinfo, so that a volume that hangs is not touched.
    pub(crate) fn is_mount_point(&self, path: &Path) -> Result<bool, PluginError> {
        Ok(mount_table::is_mount_point(&read_table()?, &mount_table::resolve(path)))
    }

    /// As [`Self::is_mount_point`], read on a thread.
    pub(super) async fn is_mount_point_now(&self, path: &Path) -> Result<bool, PluginError> {
        let path = resolve(path).await?;
        Ok(mount_table::is_mount_point(&table().await?, &path))
    }

    /// Whether something is mounted on `path` that is restricted as `options` want it. If the service was killed in the middle
    /// of [`Mounter::bind`], that is not so, and another `bind` completes it.
    pub(crate) fn is_bound(&self, path: &Path, options: &[String]) -> Result<bool, PluginError> {
        let wanted = MountOptions::default().with(options);
        let wanted = wanted.map_err(|error| PluginError::new(error.to_string()).for_you())?;
        let table = read_table()?;
        let present = mount_table::options_at(&table, &mount_table::resolve(path));
        Ok(present.is_some_and(|present| wanted.missing_in(present).is_empty()))
    }

    /// The options of the mount that `path` is on, and those of its filesystem, separated by commas; empty if no mount is known.
    pub(crate) fn filesystem_options(&self, path: &Path) -> Result<String, PluginError> {
        Ok(mount_table::filesystem_options(&read_table()?, &mount_table::resolve(path)))
    }

    /// The mount points strictly below `folder` whose last component is `name`.
    pub(crate) async fn mounts_with_name(
        &self,
        folder: &Path,
        name: &str,
    ) -> Result<Vec<PathBuf>, PluginError> {
        let folder = resolve(folder).await?;
        Ok(mount_table::with_name(&table().await?, &folder, name))
    }

    /// Other mounts of what is mounted on `path` (volumes.md §7).
    pub(crate) fn mount_references(&self, path: &Path) -> Result<Vec<PathBuf>, PluginError> {
        Ok(mount_table::references(&read_table()?, &mount_table::resolve(path)))
    }

    /// Unmounts `path` if something is mounted there, and removes the empty folder. With `force`, an unmount that does not
    /// end within its deadline is forced. A missing folder is no error.
    ///
    /// # Errors
    /// It is still mounted, or the folder has files in it: they are left as they are.
    pub(crate) async fn clean_mount_point(&self, path: &Path, force: bool) -> Result<(), PluginError> {
        self.unmount(path, force).await?;
        let folder = path.to_owned();
        match blocking(move || fs::remove_dir(folder)).await.map_err(io::Error::from) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = path.display();
                let message = format!("cannot remove the folder {path}, where a volume was mounted: {error}");
                Err(PluginError::new(message))
            }
            _ => Ok(()),
        }
    }

    /// Unmounts everything on `path` itself; nothing mounted is no error. The mount is found in mountinfo and not looked at,
    /// so a corrupted one is unmounted, too.
    pub(crate) async fn unmount(&self, path: &Path, force: bool) -> Result<(), PluginError> {
        let path = resolve(path).await?;
        for _ in 0..MAX_STACKED {
            if !self.is_mount_point_now(&path).await? {
                return Ok(());
            }
            self.unmount_once(&path, force).await?;
        }
        let message = format!("cannot unmount {}: more than {MAX_STACKED} mounts are on it", path.display());
        Err(PluginError::new(message).of_class(FailureClass::Uncertain))
    }

    async fn unmount_once(&self, path: &Path, force: bool) -> Result<(), PluginError> {
        if !force {
            let result = self.run_umount(path, &[], self.deadline).await;
            return check_unmount(path, "umount", result).await;
        }
        match self.run_umount(path, &[], self.force_after).await {
            Err(RunError::Deadline { .. } | RunError::Refused(_)) => {
                tracing::warn!(path = %path.display(), "the unmount of a volume hangs and is forced");
                let forced = self.run_umount(path, &["-f"], self.deadline).await;
                check_unmount(path, "umount -f", forced).await
            }
            result => check_unmount(path, "umount", result).await,
        }
    }

    /// `-c`: umount(8) must not look at the path, which may hang.
    async fn run_umount(
        &self,
        path: &Path,
        options: &[&str],
        deadline: Duration,
    ) -> Result<CommandOutput, RunError> {
        let mut arguments: Vec<OsString> = ["-c"].iter().chain(options).map(Into::into).collect();
        arguments.extend(["--".into(), path.into()]);
        let run = Run {
            program: "umount".to_owned(),
            arguments,
            key: format!("umount {options:?} {}", path.display()),
            what: format!("unmount {}", path.display()),
            deadline,
            abandonment: Abandonment::Kill,
        };
        self.runner.run(&run).await
    }
}

/// An error of umount(8) counts only if the path is still a mount point.
async fn check_unmount(
    path: &Path,
    command: &str,
    result: Result<CommandOutput, RunError>,
) -> Result<(), PluginError> {
    let what = format!("unmount {}", path.display());
    match result {
        Ok(output) if output.is_success() => Ok(()),
        Ok(output) => {
            let table = table().await?;
            if !mount_table::is_mount_point(&table, path) {
                return Ok(());
            }
            let below = mount_table::below(&table, path);
            let message = format!("cannot {what}: {}{below}", output.describe(command, &[]));
            Err(PluginError::new(message))
        }
        Err(error) => Err(run_error(&what, command, error, &[])),
    }
}

/// Unmounts `target` after a mount that failed, and removes the folder unless `keeps_folder`. If that fails, too, the error
/// is `Uncertain`.
pub(crate) async fn after_failure(
    mounter: &Mounter,
    target: &Path,
    keeps_folder: bool,
    error: PluginError,
) -> PluginError {
    let cleaned = if keeps_folder {
        mounter.unmount(target, true).await
    } else {
        mounter.clean_mount_point(target, true).await
    };
    match cleaned {
        Ok(()) => error,
        Err(left) => {
            tracing::warn!(path = %target.display(), error = %left, "a failed mount has left something");
            error.of_class(FailureClass::Uncertain)
        }
    }
}
