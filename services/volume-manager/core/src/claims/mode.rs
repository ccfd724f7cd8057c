//! How a volume is presented to containers, and who may use it at once.

use std::fmt;

/// `volumeMode` of a claim or PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeMode {
    /// A mounted filesystem. Volumes without a claim count as such.
    Filesystem,
    /// A block device.
    Block,
}

impl VolumeMode {
    /// The mode with this name in the API.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Filesystem, Self::Block].into_iter().find(|mode| mode.as_str() == text)
    }

    /// Its name in the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        }
    }
}

impl fmt::Display for VolumeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One of the `accessModes` of a claim or PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessMode {
    /// Read and written by the pods of one node.
    ReadWriteOnce,
    /// Read by the pods of any node.
    ReadOnlyMany,
    /// Read and written by the pods of any node.
    ReadWriteMany,
    /// Read and written by one pod.
    ReadWriteOncePod,
}

impl AccessMode {
    /// The mode with this name in the API.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::ReadWriteOnce, Self::ReadOnlyMany, Self::ReadWriteMany, Self::ReadWriteOncePod]
            .into_iter()
            .find(|mode| mode.as_str() == text)
    }

    /// Its name in the API.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "ReadWriteOnce",
            Self::ReadOnlyMany => "ReadOnlyMany",
            Self::ReadWriteMany => "ReadWriteMany",
            Self::ReadWriteOncePod => "ReadWriteOncePod",
        }
    }
}
