//! What can go wrong with pod folders and volumes.

use std::io;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::hostpath::HostPathError;
use keelson_volume_manager_core::hugepages::HugePagesError;
use keelson_volume_manager_core::payload::PayloadError;

use crate::atomic::WriteError;
use crate::mounter::ThreadError;
use crate::mounts::MountError;
use crate::plugin_error::PluginError;
use crate::remove::RemoveError;
use crate::user_namespaces::UserNamespaceError;

/// An error of a pod folder or volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The root folder's path is not canonical.
    #[error("the root folder {} must be an absolute path without . or .. and without a slash at its end", path.display())]
    RootPath { path: PathBuf },
    /// A system call has failed.
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    /// A mount or unmount has failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A removal has failed.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The files of a volume cannot be determined.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// Writing the files of a volume has failed.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The hostPath does not match its type or may not be used.
    #[error(transparent)]
    HostPath(#[from] HostPathError),
    /// The file system of a hostPath does not answer.
    #[error("cannot check the hostPath {path}")]
    CheckHostPath { path: String, source: ThreadError },
    /// The API has no such medium.
    #[error("unknown storage medium {medium:?}; use an empty string, Memory or HugePages")]
    UnknownMedium { medium: String },
    /// The pod does not request such huge pages.
    #[error(transparent)]
    HugePages(#[from] HugePagesError),
    /// Unmounting the subPaths of containers has failed.
    #[error("a subPath of a container is still mounted: {0}")]
    SubPath(PluginError),
    /// The pod has no range of IDs for its user namespace.
    #[error(transparent)]
    UserNamespace(#[from] UserNamespaceError),
    /// This version does not support the volume kind.
    #[error("volumes of the kind {kind} are not supported by this version")]
    Unsupported { kind: String },
    /// A volume to be removed belongs to a plugin that this version does not support.
    #[error("the volume {} belongs to the plugin {plugin}, which this version cannot tear down; unmount it and remove its folder", path.display())]
    ForeignPlugin { path: PathBuf, plugin: String },
}

impl StoreError {
    /// Whether the spec causes the error; then a retry only helps if the node changes.
    pub(crate) fn is_permanent(&self) -> bool {
        match self {
            Self::HostPath(_)
            | Self::UnknownMedium { .. }
            | Self::HugePages(_)
            | Self::Unsupported { .. } => true,
            Self::Payload(PayloadError::Invalid(errors)) => {
                errors.iter().any(|error| error.is_caused_by_spec())
            }
            Self::Payload(PayloadError::Pending(_))
            | Self::Write(_)
            | Self::CheckHostPath { .. }
            | Self::RootPath { .. }
            | Self::Io { .. }
            | Self::Mount(_)
            | Self::Remove(_)
            | Self::SubPath(_)
            | Self::UserNamespace(_)
            | Self::ForeignPlugin { .. } => false,
        }
    }

    /// Whether the user has to fix an object that the pod refers to.
    pub(crate) fn is_fixable_by_user(&self) -> bool {
        matches!(self, Self::Payload(PayloadError::Invalid(_))) && !self.is_permanent()
    }
}

pub(super) fn io_error(operation: &'static str, path: &Path, source: io::Error) -> StoreError {
    StoreError::Io { operation, path: path.to_owned(), source }
}
