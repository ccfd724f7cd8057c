//! What a worker shows of its pod.

use std::sync::Arc;

use keelson_volume_manager_core::desire::{PodRef, Want};
use keelson_volume_manager_core::figures::Measure;
use tokio::sync::Mutex;

/// A volume that containers may mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Mounted {
    pub(crate) name: String,
    pub(crate) host_path: String,
    /// Containers may only read it.
    pub(crate) read_only: bool,
    /// It is an emptyDir.
    pub(crate) empty_dir: bool,
    /// What is measured of it.
    pub(crate) measure: Measure,
}

/// How a pod's volumes are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing is known of the pod, and nothing of it is here.
    #[default]
    Unknown,
    /// They are being set up.
    Pending,
    /// Every wanted volume is ready.
    Mounted,
    /// At least one cannot be set up; it is tried again.
    Failed,
    /// They are being torn down.
    Unmounting,
    /// None is left.
    Unmounted,
}

impl Phase {
    /// The word in `WatchPodVolumes`.
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

/// What everybody may know of a pod's volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Whose they are; without a name when the pod was found and has not been named since.
    pub(crate) pod: PodRef,
    pub(crate) phase: Phase,
    pub(crate) mounts: Vec<Mounted>,
    /// What it waits for, or why it failed.
    pub(crate) message: String,
}

/// What those share who work below a pod's folder. Who makes something for a container, and who takes volumes away,
/// holds it meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Folder {
    /// Parts of volumes may be mounted for containers.
    pub(crate) has_subpaths: bool,
}

/// What those see who wait for a pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// Revision and wish as the latest stream has named them.
    pub(crate) named: Option<(u64, Want)>,
    /// The revision that `report` speaks about.
    pub(crate) revision: u64,
    pub(crate) report: Report,
    /// A failure is due to the spec itself.
    pub(crate) permanent: bool,
    /// A failure ends when somebody puts the right objects beside the pod.
    pub(crate) yours: bool,
    /// When a failure is tried again, unix nanoseconds; 0 without a failure.
    pub(crate) next_try_unix_nanos: i64,
    /// See [`Folder`].
    pub(crate) folder: Arc<Mutex<Folder>>,
}

impl View {
    /// Every volume of the running pod is mounted as it was named last.
    pub(crate) fn is_mounted(&self) -> bool {
        let is_named = matches!(self.named, Some((named, Want::Run)) if self.revision >= named);
        is_named && self.report.phase == Phase::Mounted
    }
}

impl keelson_sync_callee::View for View {
    fn set_named(&mut self, named: Option<(u64, Want)>) {
        self.named = named;
        if named.is_some() && self.report.phase == Phase::Unknown {
            self.report.phase = Phase::Pending;
        }
    }

    fn named(&self) -> Option<(u64, Want)> {
        self.named
    }
}
