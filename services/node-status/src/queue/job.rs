//! The writes that wait in the queue.

use std::collections::BTreeSet;
use std::sync::Arc;

use keelson_kube_model::PodFullName;
use keelson_node_status_core::{PodReport, PodUpdate};
use serde_json::Value;

/// Write a pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PodJob {
    pub(crate) report: Arc<PodReport>,
    /// The fields of the status, for the first try only: a tree takes several times the memory of the text.
    pub(crate) status: Option<Value>,
}

impl From<Arc<PodReport>> for PodJob {
    fn from(report: Arc<PodReport>) -> Self {
        Self { report, status: None }
    }
}

impl From<PodUpdate> for PodJob {
    fn from(update: PodUpdate) -> Self {
        Self { report: update.report, status: Some(update.status) }
    }
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Job {
    /// Write the Node.
    Node(Vec<u8>),
    /// Write the status of the node configuration; `None`: there is none.
    Configuration(Option<Vec<u8>>),
    /// Write a pod.
    Pod(PodJob),
    /// Remove the status, or the mirror pod, of a pod that is gone.
    RemovePod { uid: String, name: PodFullName },
    /// Remove those of all pods other than these.
    Retain(BTreeSet<String>),
}

/// What a later job replaces, in the order of jobs of equal rank: stale entries are removed first, so that the removal does not
/// mistake later writes for another writer's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    Retain,
    Node,
    Configuration,
    Pod(String),
}

impl Job {
    /// A job that writes a report again.
    pub(crate) fn again(report: &Arc<PodReport>) -> Self {
        Self::Pod(PodJob::from(Arc::clone(report)))
    }

    /// Takes the decoded status of a pod, which later tries decode again.
    pub(crate) fn take_status(&mut self) -> Option<Value> {
        match self {
            Self::Pod(pod) => pod.status.take(),
            Self::Node(_) | Self::Configuration(_) | Self::RemovePod { .. } | Self::Retain(_) => None,
        }
    }

    /// Whether it writes the mirror pod of a static pod.
    pub(crate) fn is_mirror(&self) -> bool {
        matches!(self, Self::Pod(pod) if pod.report.is_static())
    }

    pub(crate) fn slot(&self) -> Slot {
        match self {
            Self::Node(_) => Slot::Node,
            Self::Configuration(_) => Slot::Configuration,
            Self::Pod(PodJob { report, .. }) => Slot::Pod(report.uid.clone()),
            Self::RemovePod { uid, .. } => Slot::Pod(uid.clone()),
            Self::Retain(_) => Slot::Retain,
        }
    }
}
