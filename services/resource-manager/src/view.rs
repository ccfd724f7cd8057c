//! What a worker shows of its pod.

use std::collections::BTreeSet;
use std::sync::Arc;

use keelson_resource_manager_core::desire::{Amounts, Want};
use keelson_resource_manager_core::eviction::signal::Condition;

use crate::cgroup::Tree;
use crate::host::Identity;

/// How a pod's share is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing is known of the pod, and nothing of it is here.
    #[default]
    Unknown,
    /// Its cgroup is not there yet, or it was found at the start and not named since.
    Pending,
    /// Its cgroup is there.
    Ready,
    /// It ends; its cgroup stays until it is forgotten.
    Ending,
    /// Its cgroup is being removed.
    Removing,
    /// Nothing is left.
    Gone,
}

/// What those see who wait for a pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// Revision and wish as the latest stream has named them.
    pub(crate) named: Option<(u64, Want)>,
    /// The revision that the rest speaks about.
    pub(crate) revision: u64,
    pub(crate) phase: Phase,
    /// What it waits for, or why it failed.
    pub(crate) message: String,
    /// Where the cgroup is, in the driver's form; empty before it is there.
    pub(crate) cgroup_parent: String,
}

impl keelson_sync_callee::View for View {
    fn set_named(&mut self, named: Option<(u64, Want)>) {
        self.named = named;
        if named.is_some() && self.phase == Phase::Unknown {
            self.phase = Phase::Pending;
        }
    }

    fn named(&self) -> Option<(u64, Want)> {
        self.named
    }
}

/// The cgroup tree as the service has it.
#[derive(Debug, Clone)]
pub(crate) enum TreeState {
    /// It is set up.
    Ready(Arc<Tree>),
    /// It cannot be set up now; it is tried again.
    NotYet(String),
    /// It cannot be set up by this version.
    Never(String),
}

/// What is told about the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MachineState {
    pub(crate) capacity: Amounts,
    pub(crate) allocatable: Amounts,
    /// Bytes of all swap areas.
    pub(crate) swap: u64,
    /// The kernel counts the swap of each cgroup.
    pub(crate) swap_accounting: bool,
    /// What the node is short of.
    pub(crate) conditions: BTreeSet<Condition>,
    pub(crate) cgroup_version: &'static str,
    /// Empty while there is no tree.
    pub(crate) cgroup_driver: &'static str,
    pub(crate) identity: Arc<Identity>,
}
