//! The global folders of disks: the two trees that the plugins of disks have, and the names of files next to a folder
//! (volumes.md §2).

use sha2::{Digest as _, Sha256};

use crate::names::MAX_COMPONENT;

/// Which tree a folder is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tree {
    /// The disk is mounted on the folder.
    Mounts,
    /// The folder contains block maps.
    BlockMaps,
}

impl Tree {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Mounts, Self::BlockMaps];

    /// The tree of block volumes, or of the others.
    pub const fn of(is_block: bool) -> Self {
        if is_block { Self::BlockMaps } else { Self::Mounts }
    }
}

/// The name of a hidden file next to the folder `folder` that belongs to it: `.<folder>.<suffix>`. If that is too long for a
/// file name, the name of the folder is replaced by its SHA-256.
pub fn side_file(folder: &str, suffix: &str) -> String {
    let name = format!(".{folder}.{suffix}");
    if name.len() <= MAX_COMPONENT {
        return name;
    }
    let hash = Sha256::digest(folder.as_bytes());
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(".{hex}.{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::is_path_component;

    #[test]
    fn a_side_file_has_the_name_of_its_folder_unless_that_is_too_long() {
        assert_eq!(side_file("a-lun-1", "volume"), ".a-lun-1.volume");
        for length in [1, 246, 247, 248, 255] {
            let folder = "x".repeat(length);
            let name = side_file(&folder, "volume");
            assert!(is_path_component(&name), "{length}: {name}");
            assert_eq!(name.contains(&folder), length <= 247, "{length}");
            assert_ne!(name, side_file(&folder, "volume.new"));
        }
        assert_ne!(side_file(&"x".repeat(255), "v"), side_file(&"y".repeat(255), "v"));
    }

    #[test]
    fn each_mode_has_its_tree() {
        assert_eq!(Tree::ALL.map(|tree| tree == Tree::of(true)), [false, true]);
    }
}
