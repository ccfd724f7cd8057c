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

/// The desired state of one pod as a callee receives it: its identity, the want, and the callee's own fields.
pub trait Desire {
    /// The pod.
    fn pod(&self) -> &PodRef;

    /// The revision of the desire; the sender increases it with each change.
    fn revision(&self) -> u64;

    /// What is wanted.
    fn want(&self) -> Want;

    /// A desire with [`Want::Forget`], for a pod that the set does not contain.
    fn forget(pod: PodRef) -> Self;
}
