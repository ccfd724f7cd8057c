//! The parts of a desire that every callee of a `Sync` stream receives.

/// Identifies a pod in logs and events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRef {
    /// The UID. A callee must check that it is safe before it builds file or cgroup names from it.
    pub uid: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// The desired lifecycle stage of a pod. Each callee documents in its `PodDesire` what the stage means for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The pod should run.
    Run,
    /// The pod's processes should end; nothing new is started.
    Stop,
    /// No process is left: volumes are unmounted.
    Unmount,
    /// Everything of the pod is removed.
    Forget,
}

/// The part of a desire that is the same for every callee.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesireHeader {
    /// The pod.
    pub pod: PodRef,
    /// The revision of the desire; the sender increases it with each change.
    pub revision: u64,
    /// What is wanted.
    pub want: Want,
}

/// The desired state of one pod as a callee receives it: the header, and the callee's own fields.
///
/// `From<DesireHeader>` makes a desire in which these have no content.
pub trait Desire: From<DesireHeader> {
    /// The header.
    fn header(&self) -> &DesireHeader;

    /// A desire with [`Want::Forget`], for a pod that the set does not contain.
    fn forget(pod: PodRef) -> Self {
        Self::from(DesireHeader { pod, revision: 0, want: Want::Forget })
    }
}
