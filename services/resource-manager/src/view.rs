//! The state that the workers, the tree loop and the eviction task publish.

use std::collections::BTreeSet;
use std::sync::Arc;

use keelson_resource_manager_core::desire::{Amounts, PodCgroup, Want};
use keelson_resource_manager_core::eviction::order::Order;
use keelson_resource_manager_core::eviction::signal::Condition;
use keelson_service_kit::WatchHub;

use crate::cgroup::Tree;
use crate::host::Identity;

/// The state of a pod's cgroup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The pod is not in the set and has no cgroup.
    #[default]
    Unknown,
    /// Its cgroup does not exist yet, or it was found at startup and no set has named the pod since.
    Pending,
    /// Its cgroup exists.
    Ready,
    /// The pod is ending; its cgroup stays until the pod is forgotten.
    Ending,
    /// Its cgroup is being removed.
    Removing,
    /// Its cgroup is removed.
    Gone,
}

/// What callers that wait for a pod see.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// Revision and desired state in the latest stream.
    pub(crate) named: Option<(u64, Want)>,
    /// The revision that the other fields belong to.
    pub(crate) revision: u64,
    pub(crate) phase: Phase,
    /// What the pod waits for, or why its last action failed.
    pub(crate) message: String,
    /// The cgroup path in the driver's form; empty before the cgroup exists.
    pub(crate) cgroup_parent: String,
    /// The values of the cgroup; none before it exists.
    pub(crate) applied: Option<PodCgroup>,
    /// Values that the cgroup cannot have now, because the pod uses more memory, and the error.
    pub(crate) refused: Option<(PodCgroup, String)>,
}

impl keelson_pod_reconciler::View for View {
    fn set_desired(&mut self, desired: Option<(u64, Want)>) {
        self.named = desired;
        if desired.is_some() && self.phase == Phase::Unknown {
            self.phase = Phase::Pending;
        }
    }

    fn desired(&self) -> Option<(u64, Want)> {
        self.named
    }
}

/// The eviction orders in effect, by the UIDs of their pods.
pub(crate) type Orders = WatchHub<String, Arc<Order>>;

/// The state of the cgroup tree.
#[derive(Debug, Clone)]
pub(crate) enum TreeState {
    /// The tree is set up.
    Ready(Arc<Tree>),
    /// It cannot be set up now; the service retries.
    Pending(String),
    /// It cannot be set up by this version.
    Unsupported(String),
}

/// The state of the machine that is sent to callers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MachineState {
    pub(crate) capacity: Amounts,
    pub(crate) allocatable: Amounts,
    /// Bytes of all swap areas.
    pub(crate) swap: u64,
    /// The kernel accounts swap per cgroup.
    pub(crate) swap_accounting: bool,
    /// The pressure conditions of the node.
    pub(crate) conditions: BTreeSet<Condition>,
    /// The machine shuts down, and pods are being ended or have been.
    pub(crate) shutting_down: bool,
    /// An operator has drained the node.
    pub(crate) drained: bool,
    pub(crate) cgroup_version: &'static str,
    /// Empty while the tree is not set up.
    pub(crate) cgroup_driver: &'static str,
    pub(crate) identity: Arc<Identity>,
}
