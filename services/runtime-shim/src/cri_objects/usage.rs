//! The runtime's usage of file systems and layers.

use k8s_cri::v1 as cri;

/// How much of a file system is used by the runtime's images, or by one container's layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilesystemUse {
    /// A folder on the file system, if reported.
    pub mountpoint: Option<String>,
    /// Used bytes, if reported.
    pub used_bytes: Option<u64>,
    /// Used inodes, if reported.
    pub inodes_used: Option<u64>,
    /// When it was measured, nanoseconds since 1970.
    pub taken_unix_nanos: i64,
}

impl From<cri::FilesystemUsage> for FilesystemUse {
    fn from(usage: cri::FilesystemUsage) -> Self {
        Self {
            mountpoint: usage.fs_id.map(|id| id.mountpoint),
            used_bytes: usage.used_bytes.map(|number| number.value),
            inodes_used: usage.inodes_used.map(|number| number.value),
            taken_unix_nanos: usage.timestamp,
        }
    }
}
