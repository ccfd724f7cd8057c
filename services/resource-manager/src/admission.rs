//! The admission of a pod: its state and the decision.

use keelson_resource_manager_core::admit::Rejection;

/// The reason when a pod cannot be decided on because no set was complete yet.
pub(crate) const SET_NOT_COMPLETE: &str = "SetNotComplete";
/// The reason when a pod waits because an older undecided pod could take its resources.
pub(crate) const OLDER_PODS_FIRST: &str = "OlderPodsFirst";
/// The reason when a critical pod waits for preempted pods to end.
pub(crate) const PREEMPTING: &str = "Preempting";
/// The reason when a pod cannot be decided on because the cgroup tree is not set up.
pub(crate) const NO_TREE: &str = "CgroupsNotReady";

/// The admission decision on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Admitted; its resources are reserved.
    Admitted,
    /// Rejected.
    Rejected(Rejection),
    /// Not decided yet.
    NotYet { reason: &'static str, message: String },
}

/// The admission state of a pod.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PodAdmission {
    /// The pod may run.
    pub(crate) admitted: bool,
    /// Its cgroup existed at startup: an earlier run of this service has admitted it.
    pub(crate) found_at_start: bool,
    /// It was rejected or deferred.
    pub(crate) rejected: bool,
    /// Pods are being preempted for it; the resources they free are reserved for it.
    pub(crate) preempting: bool,
}
