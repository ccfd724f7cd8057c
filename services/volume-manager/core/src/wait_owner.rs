//! Who has to act before a volume can advance.

use std::fmt;

/// Who has to act.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitOwner {
    /// A person.
    You,
    /// This service.
    VolumeManager,
    /// The service that reports the node's status.
    NodeStatus,
    /// The service that reads the sources of pods.
    PodConfig,
    /// The API server, which has to answer a read. It may refuse one for a while after the pod has arrived.
    ApiServer,
    /// The control plane's controller that attaches volumes to nodes.
    AttachDetachController,
    /// The control plane's controller that binds claims to PersistentVolumes.
    VolumeController,
    /// The provisioner with this name, which has to create a PersistentVolume.
    Provisioner(String),
    /// The control plane's controller that creates the claims of `ephemeral` volumes.
    EphemeralVolumeController,
    /// The control plane's garbage collector, which has to remove the claim of an earlier pod.
    GarbageCollector,
    /// The signer with this name, which has to issue a certificate.
    Signer(String),
}

impl WaitOwner {
    /// Whether the wait can end without a person.
    pub const fn can_resolve_itself(&self) -> bool {
        !matches!(self, Self::You)
    }
}

impl fmt::Display for WaitOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::You => "you",
            Self::VolumeManager => "volume-manager",
            Self::NodeStatus => "node-status",
            Self::PodConfig => "pod-config",
            Self::ApiServer => "API server",
            Self::AttachDetachController => "attach-detach controller",
            Self::VolumeController => "persistent volume controller",
            Self::Provisioner(name) => return write!(f, "provisioner {name}"),
            Self::EphemeralVolumeController => "ephemeral volume controller",
            Self::GarbageCollector => "garbage collector",
            Self::Signer(name) => return write!(f, "signer {name}"),
        };
        f.write_str(name)
    }
}
