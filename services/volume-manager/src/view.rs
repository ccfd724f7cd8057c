//! What a worker shows of its pod.

use keelson_volume_manager_core::desire::Want;

/// A volume that containers may mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mounted {
    pub(crate) name: String,
    pub(crate) host_path: String,
    /// Containers may only read it.
    pub(crate) read_only: bool,
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
    pub(crate) phase: Phase,
    pub(crate) mounts: Vec<Mounted>,
    /// What it waits for, or why it failed.
    pub(crate) message: String,
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
