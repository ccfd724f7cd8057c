//! What differs between iscsi and fc.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::global_folder::Tree;

use super::folder::DiskFolder;
use super::volume_file::VolumeFile;
use crate::plugins::{PluginError, VolumeSpec};

/// A volume with its source read.
#[derive(Debug)]
pub(crate) struct Wanted<D> {
    /// The unique volume name.
    pub(crate) name: String,
    pub(crate) disk: D,
    /// The filesystem of a blank disk.
    pub(crate) fs_type: String,
    pub(crate) read_only: bool,
}

/// A disk to release, of which nothing is mounted at its global folder any more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Release<'a> {
    /// The unique volume name.
    pub(crate) volume: &'a str,
    /// The global folder.
    pub(crate) folder: &'a DiskFolder,
    /// Its path.
    pub(crate) path: &'a Path,
    /// The device nodes of the disk; empty if the node does not see it.
    pub(crate) devices: &'a [String],
    /// Another global folder is of the same disk.
    pub(crate) is_shared: bool,
}

/// A kind of disks: how the node gets a disk and gives it back. Each call may be repeated, also after the service was killed
/// in the middle of it.
pub(crate) trait DiskKind: fmt::Debug + Send + Sync + 'static {
    /// The plugin's name.
    const NAME: &'static str;
    /// The field of the source.
    const FIELD: &'static str;
    /// The plugin's own files in a folder of block maps.
    const OWN_FILES: &'static [&'static str];
    /// What [`Self::acquire`] has done is undone by [`Self::release`] only. Otherwise, after a mount that has failed for
    /// good, the folder is removed and nothing is left.
    const OWES_RELEASE: bool;
    /// The disk that a source means.
    type Disk: Send + Sync;

    /// Reads and checks the source of a volume.
    fn read(volume: &VolumeSpec) -> Result<Wanted<Self::Disk>, PluginError>;

    /// The global folder of a disk.
    fn folder(disk: &Self::Disk, tree: Tree) -> DiskFolder;

    /// Reads the path of a global folder.
    fn parse(path: &str) -> Result<DiskFolder, String>;

    /// The name that the volume in a folder has if nothing else is known, and whether `name` may be its name.
    fn guess(folder: &DiskFolder) -> Option<String>;
    fn may_be_named(folder: &DiskFolder, name: &str) -> bool;

    /// The global folders in a tree of the agent's root folder. Blocks.
    fn list(root: &Path, tree: Tree) -> io::Result<Vec<PathBuf>>;

    /// Makes the node see a disk, and returns its device. `place`: the disk and its global folder. `file` is stored next to the
    /// folder before anything is done that has to be undone.
    fn acquire(
        &self,
        volume: &VolumeSpec,
        place: (&Self::Disk, &Path),
        file: &VolumeFile,
    ) -> impl Future<Output = Result<String, PluginError>> + Send;

    /// The device of a disk that the node sees. `known`: its path, as the Node has it.
    fn device(
        &self,
        volume: &VolumeSpec,
        disk: &Self::Disk,
        known: Option<&str>,
    ) -> impl Future<Output = Result<String, PluginError>> + Send;

    /// The device nodes of the disk of a folder: the multipath device if there is one, else its disks. `mounted`: the device
    /// that was mounted on the folder.
    fn devices(
        &self,
        folder: &DiskFolder,
        mounted: Option<&str>,
    ) -> impl Future<Output = Result<Vec<String>, PluginError>> + Send;

    /// Undoes [`Self::acquire`], and removes the folder with its files.
    fn release(&self, release: Release<'_>) -> impl Future<Output = Result<(), PluginError>> + Send;
}
