//! What the volumes of the node wait for, and who has to act.

use std::fmt;

use crate::operations::{OperationKind, PodUid, VolumeName};
use crate::wait_owner::WaitOwner;
use crate::world::desired::MountLabel;

/// A volume that does not advance now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The volume.
    pub volume: VolumeName,
    /// The pod's names for it; empty if it is to be unmounted.
    pub names: Vec<String>,
    /// The pod; absent for the shared device of a volume without pods.
    pub pod: Option<PodUid>,
    /// It is to be mounted; otherwise to be unmounted.
    pub is_wanted: bool,
    /// Why.
    pub reason: WaitReason,
}

/// Why a volume does not advance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitReason {
    /// The controller has to know first that the volume is in use.
    NotReportedInUse,
    /// The node's status does not list it as attached.
    NotAttached,
    /// Other pods have it mounted with another SELinux label.
    OtherLabel {
        /// The label of the mount.
        mounted: MountLabel,
        /// The label that the pod needs.
        wanted: MountLabel,
    },
    /// Only one pod may use it.
    UsedByAnotherPod {
        /// The pod that has, or may have, it mounted.
        other: PodUid,
    },
    /// An operation on it runs.
    Busy {
        /// What runs.
        kind: OperationKind,
    },
    /// An operation on it has failed and backs off.
    BackOff {
        /// What has failed.
        kind: OperationKind,
        /// When it is retried, in milliseconds.
        until: u64,
        /// The error.
        error: String,
    },
    /// Not all sources of pods have reported: a pod that uses the volume may still be unknown.
    SourcesNotReady,
    /// The node's status was not read since the start.
    NodeStatusNotRead,
}

impl WaitReason {
    /// Who has to act.
    pub const fn owner(&self) -> WaitOwner {
        match self {
            Self::OtherLabel { .. } | Self::UsedByAnotherPod { .. } => WaitOwner::You,
            Self::Busy { .. } | Self::BackOff { .. } => WaitOwner::VolumeManager,
            Self::NotReportedInUse => WaitOwner::NodeStatus,
            Self::SourcesNotReady => WaitOwner::PodConfig,
            Self::NotAttached => WaitOwner::AttachDetachController,
            Self::NodeStatusNotRead => WaitOwner::ApiServer,
        }
    }

    /// Whether the pod gets this as an error: it will not resolve while the volume is used as it is now.
    pub const fn is_error(&self) -> bool {
        matches!(self, Self::OtherLabel { .. } | Self::UsedByAnotherPod { .. })
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReportedInUse => {
                f.write_str("node-status has not reported it in the node's volumesInUse yet")
            }
            Self::NotAttached => {
                f.write_str("it is not attached: the node's status.volumesAttached does not list it")
            }
            Self::OtherLabel { mounted, wanted } => write!(
                f,
                "waiting for unmount of the volume, because it is already mounted to a different pod with a different \
                 SELinux label: it is mounted with {mounted}, and this pod needs {wanted}; end the pods that use it, or \
                 give this pod their seLinuxOptions"
            ),
            Self::UsedByAnotherPod { other } => write!(
                f,
                "volume uses the ReadWriteOncePod access mode and is already in use by another pod (UID {other}); end \
                 that pod, or use a claim with another access mode"
            ),
            Self::Busy { kind } => write!(f, "{kind} is running"),
            Self::BackOff { kind, error, .. } => write!(f, "{kind} failed and will be retried: {error}"),
            Self::SourcesNotReady => {
                f.write_str("it stays mounted until every source of pods has reported its pods")
            }
            Self::NodeStatusNotRead => {
                f.write_str("it stays mounted until the status of this node was read from the API server")
            }
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.names.is_empty() {
            write!(f, "volume {}", self.volume)?;
        } else {
            write!(f, "volume {:?}", self.names.join(", "))?;
        }
        write!(f, ": {}", self.reason)
    }
}
