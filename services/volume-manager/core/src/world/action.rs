//! The actions on the volumes of a node.

use crate::operations::{OperationKey, OperationKind, PodUid, VolumeName};
use crate::world::desired::MountLabel;

/// One thing to do. All but [`Action::MarkAttached`] and [`Action::Forget`] are operations, which run asynchronously.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Record a volume that needs no attachment. Nothing runs.
    MarkAttached {
        /// The volume.
        volume: VolumeName,
    },
    /// Check with a live read of the Node that the volume is attached, and learn its device path.
    VerifyAttached {
        /// The volume.
        volume: VolumeName,
        /// The pod that waits for it.
        pod: PodUid,
    },
    /// Attach the volume to this node.
    Attach {
        /// The volume.
        volume: VolumeName,
        /// The pod that waits for it.
        pod: PodUid,
    },
    /// Mount the device that all pods share.
    MountDevice {
        /// The volume.
        volume: VolumeName,
        /// The pod whose spec is used.
        pod: PodUid,
        /// The SELinux label of the mount.
        label: MountLabel,
    },
    /// Set the volume up for a pod.
    SetUp {
        /// The volume.
        volume: VolumeName,
        /// The pod.
        pod: PodUid,
        /// The SELinux label of the mount.
        label: MountLabel,
        /// The volume is mounted, and the pod may be using it: an error must leave its data as they are.
        is_remount: bool,
        /// The volume was found at startup and not set up since: an error must not delete its directory.
        is_reconstructed: bool,
        /// Set-ups of this volume never run at the same time, whatever the pod.
        is_serialised: bool,
    },
    /// Grow the volume.
    Resize {
        /// The volume.
        volume: VolumeName,
        /// The pod through whose mount it grows.
        pod: PodUid,
        /// The desired size in bytes.
        size: u64,
    },
    /// Remove the subPaths of the volume from a pod, then the volume.
    TearDown {
        /// The volume.
        volume: VolumeName,
        /// The pod.
        pod: PodUid,
    },
    /// Unmount the shared device. No pod has the volume.
    UnmountDevice {
        /// The volume.
        volume: VolumeName,
    },
    /// Forget a volume of which nothing is mounted. Nothing runs.
    Forget {
        /// The volume.
        volume: VolumeName,
    },
    /// Detach a volume of which nothing is mounted, and forget it.
    Detach {
        /// The volume.
        volume: VolumeName,
    },
}

/// What an operation that succeeded has learned. An absent field leaves the recorded value as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Learned {
    /// The path of the attached device.
    pub device_path: Option<String>,
    /// Where the shared device is mounted.
    pub device_mount_path: Option<String>,
    /// The current size in bytes: `status.capacity.storage` of the claim. 0 is no size.
    pub size: Option<u64>,
    /// The driver cannot grow the volume while it is in use.
    pub is_expansion_refused: bool,
    /// Whether an expansion has ended with an error after which nothing is in progress; `None`: none was tried.
    pub had_final_expansion_error: Option<bool>,
}

impl Action {
    /// The volume.
    pub const fn volume(&self) -> &VolumeName {
        match self {
            Self::MarkAttached { volume }
            | Self::VerifyAttached { volume, .. }
            | Self::Attach { volume, .. }
            | Self::MountDevice { volume, .. }
            | Self::SetUp { volume, .. }
            | Self::Resize { volume, .. }
            | Self::TearDown { volume, .. }
            | Self::UnmountDevice { volume }
            | Self::Forget { volume }
            | Self::Detach { volume } => volume,
        }
    }

    /// The pod for which it is done.
    pub const fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::VerifyAttached { pod, .. }
            | Self::Attach { pod, .. }
            | Self::MountDevice { pod, .. }
            | Self::SetUp { pod, .. }
            | Self::Resize { pod, .. }
            | Self::TearDown { pod, .. } => Some(pod),
            Self::MarkAttached { .. }
            | Self::UnmountDevice { .. }
            | Self::Forget { .. }
            | Self::Detach { .. } => None,
        }
    }

    /// The kind of its operation; `None` when nothing runs.
    pub const fn kind(&self) -> Option<OperationKind> {
        Some(match self {
            Self::MarkAttached { .. } | Self::Forget { .. } => return None,
            Self::VerifyAttached { .. } => OperationKind::VerifyAttached,
            Self::Attach { .. } => OperationKind::Attach,
            Self::MountDevice { .. } => OperationKind::MountDevice,
            Self::SetUp { .. } => OperationKind::SetUp,
            Self::Resize { .. } => OperationKind::Resize,
            Self::TearDown { .. } => OperationKind::TearDown,
            Self::UnmountDevice { .. } => OperationKind::UnmountDevice,
            Self::Detach { .. } => OperationKind::Detach,
        })
    }

    /// What it excludes while it runs (volumes.md §3.7): a teardown and the set-up of a volume of one pod have the
    /// pod's key, all others that of the whole volume.
    pub fn key(&self) -> OperationKey {
        match self {
            Self::TearDown { volume, pod } | Self::SetUp { volume, pod, is_serialised: false, .. } => {
                OperationKey::of_pod(volume.clone(), pod.clone())
            }
            _ => OperationKey::whole(self.volume().clone(), self.pod().cloned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_up(is_serialised: bool) -> Action {
        Action::SetUp {
            volume: "v".into(),
            pod: "a".into(),
            label: MountLabel::Unlabelled,
            is_remount: false,
            is_reconstructed: false,
            is_serialised,
        }
    }

    #[test]
    fn teardowns_and_set_ups_of_unshared_volumes_exclude_only_their_pod() {
        let (volume, pod) = (VolumeName::from("v"), PodUid::from("a"));
        let (other, label) = (OperationKey::of_pod("v".into(), "b".into()), MountLabel::Unlabelled);
        for (action, excludes_others) in [
            (Action::TearDown { volume: volume.clone(), pod: pod.clone() }, false),
            (set_up(false), false),
            (set_up(true), true),
            (Action::MountDevice { volume: volume.clone(), pod: pod.clone(), label }, true),
            (Action::VerifyAttached { volume: volume.clone(), pod: pod.clone() }, true),
            (Action::Attach { volume: volume.clone(), pod: pod.clone() }, true),
            (Action::Resize { volume: volume.clone(), pod: pod.clone(), size: 1 }, true),
            (Action::UnmountDevice { volume: volume.clone() }, true),
            (Action::Detach { volume: volume.clone() }, true),
            (Action::Forget { volume: volume.clone() }, true),
            (Action::MarkAttached { volume }, true),
        ] {
            assert_eq!(action.key().matches(&other), excludes_others, "{action:?}");
            assert!(action.key().matches(&OperationKey::of_pod("v".into(), "a".into())), "{action:?}");
        }
    }
}
