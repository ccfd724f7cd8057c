//! Work on mounts and foreign filesystems, done in processes that can be abandoned: a server that does not answer holds up
//! nothing but its own volume (volumes.md §7).

use std::path::Path;
use std::time::Duration;

use keelson_volume_manager_core::desire::FsGroupPolicy;

use crate::plugins::PluginError;
use crate::walks::FsGroupWalks;

/// The deadline of a mount, an unmount, or another access to a foreign filesystem.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// What is mounted where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MountRequest<'a> {
    /// The device, the export of a server, or for a bind mount the path.
    pub(crate) source: &'a str,
    /// The mount point, which exists.
    pub(crate) target: &'a Path,
    /// The filesystem; empty: the kernel finds out, or none for a bind mount.
    pub(crate) fs_type: &'a str,
    /// The options, sorted.
    pub(crate) options: &'a [String],
    /// Options that are never shown.
    pub(crate) sensitive: &'a [String],
}

/// Access to mounts. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mounter {}

impl Mounter {
    /// Mounts with mount(8), so that helpers such as mount.nfs are found.
    pub(crate) async fn mount(&self, _: MountRequest<'_>) -> Result<(), PluginError> {
        todo!()
    }

    /// Bind-mounts `source` on `target`, then applies the options (volumes.md §7).
    pub(crate) async fn bind(
        &self,
        _source: &Path,
        _target: &Path,
        _options: &[String],
    ) -> Result<(), PluginError> {
        todo!()
    }

    /// Formats the device if it is blank, checks its filesystem, and mounts it (volumes.md §7).
    pub(crate) async fn format_and_mount(
        &self,
        _: MountRequest<'_>,
        _mkfs_options: &[String],
    ) -> Result<(), PluginError> {
        todo!()
    }

    /// Grows the filesystem on `device` that is mounted on `mount_point` to the size of the device.
    pub(crate) async fn grow(&self, _device: &Path, _mount_point: &Path) -> Result<(), PluginError> {
        todo!()
    }

    /// Whether something is mounted on `path` itself, read from mountinfo, so that a volume that hangs is not touched.
    pub(crate) fn is_mount_point(&self, _path: &Path) -> Result<bool, PluginError> {
        todo!()
    }

    /// Unmounts `path` if something is mounted there, and removes the empty folder. With `force`, an unmount that does not
    /// end within its deadline is forced.
    pub(crate) async fn clean_mount_point(&self, _path: &Path, _force: bool) -> Result<(), PluginError> {
        todo!()
    }

    /// Other mounts of what is mounted on `path` (volumes.md §7).
    pub(crate) fn mount_references(&self, _path: &Path) -> Result<Vec<std::path::PathBuf>, PluginError> {
        todo!()
    }

    /// Creates a folder and those above it, with this mode. An existing one stays as it is.
    pub(crate) async fn create_folders(&self, _path: &Path, _mode: u32) -> Result<(), PluginError> {
        todo!()
    }

    /// Applies the fsGroup to the files of a volume (volumes.md §5), in the helper process.
    pub(crate) async fn apply_fs_group(
        &self,
        _path: &Path,
        _group: u32,
        _read_only: bool,
        _policy: FsGroupPolicy,
        _walks: &FsGroupWalks,
    ) -> Result<(), PluginError> {
        todo!()
    }

    /// Runs a command of the host with a deadline and returns its output. `masked` is never shown.
    pub(crate) async fn run(
        &self,
        _program: &str,
        _arguments: &[&str],
        _deadline: Duration,
    ) -> Result<CommandOutput, PluginError> {
        todo!()
    }
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandOutput {
    /// Its exit code; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    /// What it wrote to stdout, then to stderr.
    pub(crate) stdout: String,
    /// What it wrote to stderr.
    pub(crate) stderr: String,
}
