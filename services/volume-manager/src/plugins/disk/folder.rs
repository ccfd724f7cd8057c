//! What the path of a global folder says.

use keelson_volume_manager_core::global_folder::Tree;

/// The global folder of a disk, as its path or its disk says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskFolder {
    /// Its tree.
    pub(crate) tree: Tree,
    /// The path, relative to the agent's root folder.
    pub(crate) path: String,
    /// What names the disk: two folders with the same key are of one disk.
    pub(crate) disk: String,
    /// The name of the lock under which the disk is attached and released.
    pub(crate) lock: String,
}
