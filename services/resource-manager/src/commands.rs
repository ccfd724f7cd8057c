//! The commands to the manager.

use std::collections::BTreeMap;

use keelson_resource_manager_core::desire::{Amounts, PodDesire};
use tokio::sync::oneshot;

use crate::admission::Verdict;
use crate::cgroup::FoundPods;
use crate::view::View;

/// A command to the manager.
pub(crate) type Command = keelson_pod_reconciler::Command<PodDesire, View, ManagerRequest>;

/// The requests that are specific to this manager.
#[derive(Debug)]
pub(crate) enum ManagerRequest {
    /// Decides whether a pod may run.
    Admit { uid: String, reply: oneshot::Sender<Verdict> },
    /// Decides whether an admitted pod may have other requests.
    Resize { uid: String, revision: u64, requests: Amounts, reply: oneshot::Sender<Verdict> },
    /// Defers a pod that waits for something outside this service: its resources and its turn go to other pods.
    Defer { uid: String, reply: oneshot::Sender<()> },
    /// Takes over the pods that were found when the tree was set up.
    AddFound { found: FoundPods },
    /// Lists every known pod with its desired state.
    ListPods { reply: oneshot::Sender<BTreeMap<String, KnownPod>> },
}

/// A pod that the manager knows.
#[derive(Debug, Clone)]
pub(crate) struct KnownPod {
    /// Its desired state; none when no set has named it since the start.
    pub(crate) desire: Option<PodDesire>,
    /// Whether it may run.
    pub(crate) admitted: bool,
}
