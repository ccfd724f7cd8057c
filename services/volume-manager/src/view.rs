//! The status of a pod's volumes, as its worker publishes it.

use std::sync::Arc;

use keelson_volume_manager_core::desire::{PodRef, Want};
use keelson_volume_manager_core::measurement::MeasureSpec;
use keelson_volume_manager_core::names::{VolumeKey, escape};
use keelson_volume_manager_core::wait_owner::WaitOwner;
use tokio::sync::Mutex;

/// A volume that is ready to be mounted into containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MountedVolume {
    pub(crate) name: String,
    pub(crate) host_path: String,
    /// Containers may only read it.
    pub(crate) read_only: bool,
    /// The name of the volume's folder in the pod's folder, under which subPaths are mounted.
    pub(crate) inner_name: String,
    /// The plugin, `vendor/name`.
    pub(crate) plugin: String,
    /// Name of the claim in the pod's namespace; empty without one.
    pub(crate) claim: String,
    /// Name of the PersistentVolume; empty without one.
    pub(crate) persistent_volume: String,
    /// `host_path` is a link to a block device.
    pub(crate) is_block_device: bool,
    /// The group that the PersistentVolume adds to the pod's supplemental groups.
    pub(crate) supplemental_group: Option<i64>,
    /// The runtime has to label its files where SELinux is enabled; of volumes of plugins only.
    pub(crate) selinux_relabel: bool,
    /// Whether it is an emptyDir.
    pub(crate) is_empty_dir: bool,
    /// How its usage is measured.
    pub(crate) measure: MeasureSpec,
}

impl MountedVolume {
    /// Whether its filesystem may hang: it is not one of this service.
    pub(crate) fn is_foreign(&self) -> bool {
        VolumeKey { plugin: escape(&self.plugin), name: self.inner_name.clone() }.is_foreign()
    }
}

/// The phase of a pod's volumes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The pod is unknown and nothing of it is on disk.
    #[default]
    Unknown,
    /// The volumes are being set up.
    Pending,
    /// Every desired volume is ready.
    Mounted,
    /// At least one volume cannot be set up; it will be retried.
    Failed,
    /// The volumes are being torn down.
    Unmounting,
    /// No volume is left.
    Unmounted,
}

impl Phase {
    /// The name of the phase in `WatchPodVolumes`.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown | Self::Pending => "pending",
            Self::Mounted => "mounted",
            Self::Failed => "failed",
            Self::Unmounting => "unmounting",
            Self::Unmounted => "unmounted",
        }
    }
}

/// The published status of a pod's volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PodVolumeStatus {
    /// The pod; without a name if it was found on disk and pod-sync has not named it yet.
    pub(crate) pod: PodRef,
    pub(crate) phase: Phase,
    pub(crate) mounts: Vec<MountedVolume>,
    /// What the volumes wait for, or why they failed.
    pub(crate) message: String,
    /// The volumes of plugins that are not mounted, and why.
    pub(crate) waits: Vec<VolumeWait>,
}

/// Why a volume of a plugin is not mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeWait {
    /// `spec.volumes[].name`.
    pub(crate) volume: String,
    /// What it waits for.
    pub(crate) message: String,
    /// Who has to act.
    pub(crate) owner: WaitOwner,
}

/// The state of a pod's folder. It is locked while something is prepared for a container and while volumes are torn
/// down, so that the two never overlap.
#[derive(Debug, Default)]
pub(crate) struct PodFolder {
    /// subPaths may be mounted for containers.
    pub(crate) has_subpaths: bool,
}

/// The state of a pod that callers wait on.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodView {
    /// The revision and desired state last sent on the latest stream.
    pub(crate) named: Option<(u64, Want)>,
    /// The revision that `status` refers to.
    pub(crate) revision: u64,
    pub(crate) status: PodVolumeStatus,
    /// The pod's spec itself causes the error.
    pub(crate) permanent: bool,
    /// The error ends when somebody creates or fixes the objects that the pod refers to.
    pub(crate) user_can_fix: bool,
    /// Who has to act, if it is neither this service nor the user.
    pub(crate) owner: String,
    /// When the next retry is due, in unix nanoseconds; 0 without an error.
    pub(crate) next_try_unix_nanos: i64,
    /// The lock of the pod's folder.
    pub(crate) folder: Arc<Mutex<PodFolder>>,
}

impl PodView {
    /// Whether the pod is to run and every volume of its latest revision is mounted.
    pub(crate) fn is_mounted(&self) -> bool {
        let is_named = matches!(self.named, Some((named, Want::Run)) if self.revision >= named);
        is_named && self.status.phase == Phase::Mounted
    }
}

impl keelson_pod_reconciler::View for PodView {
    fn set_desired(&mut self, desired: Option<(u64, Want)>) {
        self.named = desired;
        if desired.is_some() && self.status.phase == Phase::Unknown {
            self.status.phase = Phase::Pending;
        }
    }

    fn desired(&self) -> Option<(u64, Want)> {
        self.named
    }
}
