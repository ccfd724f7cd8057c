//! Which names a shell can complete an argument with.

use clap::builder::ArgExt;

/// The names that an argument takes, for `cmd::completion`, which looks them up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Candidates {
    /// The pods in the namespace and agent that the line selects.
    Pods,
    /// All services.
    Services,
    /// The services that init can restart.
    SupervisedServices,
    /// The PersistentVolumes of the agent that the line selects.
    PersistentVolumes,
    /// The claims in the namespace and agent that the line selects.
    PersistentVolumeClaims,
    /// The UIDs of the orphaned pods of the agent that the line selects.
    Orphans,
}

impl ArgExt for Candidates {}
