//! How a change of a value takes effect.

use crate::ServiceName;
use ServiceName::{NodeApi, NodeStatus, PodConfig, PodSync, ResourceManager, RuntimeShim, VolumeManager};

/// How a change of a value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Takes {
    /// Services apply it while they run ([`crate::Config::take_live`]).
    Live,
    /// Every service that reads it is restarted.
    Services,
    /// The agent is restarted: init itself, its locks or the folders of all services depend on it.
    Agent,
}

/// All services that read the configuration.
pub(crate) const EVERYBODY: &[ServiceName] =
    &[PodConfig, RuntimeShim, VolumeManager, ResourceManager, PodSync, NodeStatus, NodeApi];
