//! Why an action is taken: one word per cause, the same in logs, metrics, events and `ExplainPod`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why an action is taken or withheld. [`Reason::as_str`] never changes once released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reason {
    /// The pod has no sandbox yet.
    NoSandbox,
    /// More than one sandbox is READY.
    SeveralSandboxesReady,
    /// The newest sandbox is not READY.
    SandboxNotReady,
    /// The sandbox has the node's network and the spec a pod network, or the other way round.
    SandboxNetworkModeChanged,
    /// The sandbox should have an address and has none.
    SandboxWithoutAddress,
    /// Every container has terminated and none may restart.
    PodCompleted,
    /// The sandbox is lost and the pod's restart policy is Never.
    RestartNotAllowed,
    /// An init container failed and may not restart.
    InitContainerFailed,
    /// The pod is being deleted.
    PodDeleted,
    /// The pod was removed from its source.
    PodRemoved,
    /// The pod's phase is final.
    PodTerminal,
    /// The pod has been evicted or pre-empted.
    PodEvicted,
    /// The runtime runs a pod that no source has.
    OrphanedPod,
    /// The container was never started.
    ContainerNotStarted,
    /// The container terminated and may restart.
    ContainerExited,
    /// Image or name of the container changed.
    ContainerDefinitionChanged,
    /// The liveness probe failed.
    LivenessProbeFailed,
    /// The startup probe failed.
    StartupProbeFailed,
    /// New resources take effect by a restart only, according to the container's `resizePolicy`.
    ResizeRequiresRestart,
    /// The runtime reports the container's state as unknown.
    ContainerStateUnknown,
    /// A newer instance of the same container exists.
    DuplicateContainer,
    /// The container keeps terminating.
    CrashLoopBackOff,
    /// An earlier init container or sidecar has to complete or start first.
    WaitingForInitContainer,
    /// A sidecar's startup probe has not succeeded yet.
    WaitingForStartupProbe,
}

impl Reason {
    /// Stable text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSandbox => "NoSandbox",
            Self::SeveralSandboxesReady => "SeveralSandboxesReady",
            Self::SandboxNotReady => "SandboxNotReady",
            Self::SandboxNetworkModeChanged => "SandboxNetworkModeChanged",
            Self::SandboxWithoutAddress => "SandboxWithoutAddress",
            Self::PodCompleted => "PodCompleted",
            Self::RestartNotAllowed => "RestartNotAllowed",
            Self::InitContainerFailed => "InitContainerFailed",
            Self::PodDeleted => "PodDeleted",
            Self::PodRemoved => "PodRemoved",
            Self::PodTerminal => "PodTerminal",
            Self::PodEvicted => "PodEvicted",
            Self::OrphanedPod => "OrphanedPod",
            Self::ContainerNotStarted => "ContainerNotStarted",
            Self::ContainerExited => "ContainerExited",
            Self::ContainerDefinitionChanged => "ContainerDefinitionChanged",
            Self::LivenessProbeFailed => "LivenessProbeFailed",
            Self::StartupProbeFailed => "StartupProbeFailed",
            Self::ResizeRequiresRestart => "ResizeRequiresRestart",
            Self::ContainerStateUnknown => "ContainerStateUnknown",
            Self::DuplicateContainer => "DuplicateContainer",
            Self::CrashLoopBackOff => "CrashLoopBackOff",
            Self::WaitingForInitContainer => "WaitingForInitContainer",
            Self::WaitingForStartupProbe => "WaitingForStartupProbe",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
