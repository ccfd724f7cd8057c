//! What every callee of a `Sync` stream is told of a pod.

/// Names a pod for logs and events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRef {
    /// The UID. A callee makes sure that it is safe in the names that it builds of it.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// What is wanted of a pod. Each callee says in its `PodDesire` what that means for what it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The pod is to run.
    Run,
    /// The pod's processes are to end; nothing new is begun for it.
    Stop,
    /// No process is left: volumes go.
    Unmount,
    /// Nothing of the pod is to remain.
    Forget,
}

/// What a callee is told of one pod: whose it is, what is wanted, and whatever the callee needs for it.
pub trait Desire {
    /// Whose it is.
    fn pod(&self) -> &PodRef;

    /// Counts what the sender has wanted of this pod so far.
    fn revision(&self) -> u64;

    /// What is wanted.
    fn want(&self) -> Want;

    /// The wish that nothing of `pod` remains, for a pod that the set does not name.
    fn forget(pod: PodRef) -> Self;
}
