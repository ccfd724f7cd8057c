use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A service of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceName {
    /// Starts and supervises the other services.
    Init,
    /// Provides the desired pods.
    PodConfig,
    /// Runs the pods: reconciles the containers with the desired state.
    PodSync,
    /// Talks to the container runtime.
    RuntimeShim,
    /// Mounts the volumes of pods.
    VolumeManager,
    /// Manages admission, cgroups and eviction.
    ResourceManager,
    /// Reports to the control plane.
    NodeStatus,
    /// Serves the kubelet API.
    NodeApi,
}

/// An unknown service name.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no service {0:?}; the services are init, pod-config, pod-sync, runtime-shim, volume-manager, resource-manager, node-status and node-api"
)]
pub struct UnknownService(pub String);

impl ServiceName {
    /// Every service, callees before their callers: the start order.
    pub const ALL: [Self; 8] = [
        Self::Init,
        Self::PodConfig,
        Self::RuntimeShim,
        Self::VolumeManager,
        Self::ResourceManager,
        Self::PodSync,
        Self::NodeStatus,
        Self::NodeApi,
    ];

    /// The services that init starts, in order.
    pub fn supervised() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|s| *s != Self::Init)
    }

    /// The name in folders, sockets, users and units.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::PodConfig => "pod-config",
            Self::PodSync => "pod-sync",
            Self::RuntimeShim => "runtime-shim",
            Self::VolumeManager => "volume-manager",
            Self::ResourceManager => "resource-manager",
            Self::NodeStatus => "node-status",
            Self::NodeApi => "node-api",
        }
    }

    /// The file name of its binary.
    pub const fn binary(self) -> &'static str {
        match self {
            Self::Init => "keelson-init",
            Self::PodConfig => "keelson-pod-config",
            Self::PodSync => "keelson-pod-sync",
            Self::RuntimeShim => "keelson-runtime-shim",
            Self::VolumeManager => "keelson-volume-manager",
            Self::ResourceManager => "keelson-resource-manager",
            Self::NodeStatus => "keelson-node-status",
            Self::NodeApi => "keelson-node-api",
        }
    }

    /// Whether it needs root (architecture §1).
    pub const fn needs_root(self) -> bool {
        matches!(self, Self::Init | Self::RuntimeShim | Self::VolumeManager | Self::ResourceManager)
    }

    /// The services that it may call (architecture §2).
    pub const fn callees(self) -> &'static [Self] {
        use ServiceName::{NodeStatus, PodConfig, PodSync, ResourceManager, RuntimeShim, VolumeManager};
        match self {
            Self::PodConfig => &[],
            Self::RuntimeShim => &[PodConfig],
            Self::VolumeManager => &[PodConfig, RuntimeShim],
            Self::ResourceManager => &[RuntimeShim, VolumeManager, PodConfig],
            Self::PodSync => &[PodConfig, RuntimeShim, VolumeManager, ResourceManager],
            Self::NodeStatus => &[PodConfig, RuntimeShim, VolumeManager, ResourceManager, PodSync],
            Self::NodeApi | Self::Init => {
                &[PodConfig, RuntimeShim, VolumeManager, ResourceManager, PodSync, NodeStatus]
            }
        }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ServiceName {
    type Err = UnknownService;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|n| n.as_str() == s).ok_or_else(|| UnknownService(s.to_owned()))
    }
}
