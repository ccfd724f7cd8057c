//! The next action for one pod.

use std::collections::BTreeSet;

use crate::desire::{PodCgroup, PodDesire, Want};
use crate::layout::CgroupPath;

/// The observed cgroups of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedCgroups {
    /// Its cgroups: one, unless an earlier agent has left more.
    pub cgroups: BTreeSet<CgroupPath>,
    /// The path and values that this process has applied.
    pub applied: Option<(CgroupPath, PodCgroup)>,
}

/// The next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Nothing to do until the desired state changes.
    Settled(Settled),
    /// Create the cgroup or update its values, then plan again.
    Apply,
    /// Check with a fresh read of the runtime that nothing of the pod runs, then plan again.
    AskRuntime,
    /// Kill leftover processes in the cgroups and remove them, then plan again.
    Remove,
}

/// The state of a pod when there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The pod is not admitted yet.
    NotAdmitted,
    /// Its cgroup exists with the desired values.
    Ready,
    /// The pod is ending; its cgroup stays unchanged.
    Ending,
    /// Its cgroups are removed.
    Gone,
}

/// Decides the next step for a pod whose cgroup belongs at `path`.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision.
/// `nothing_runs` means that a read of the runtime, made for this call, shows no running container and no ready sandbox;
/// without it nothing is removed.
pub fn plan(
    desire: &PodDesire,
    path: &CgroupPath,
    admitted: bool,
    observed: &ObservedCgroups,
    nothing_runs: bool,
) -> Plan {
    match desire.header.want {
        Want::Run if !admitted => Plan::Settled(Settled::NotAdmitted),
        Want::Run => match &observed.applied {
            Some((at, values)) if at == path && *values == desire.cgroup => Plan::Settled(Settled::Ready),
            _ => Plan::Apply,
        },
        Want::Stop | Want::Unmount => Plan::Settled(Settled::Ending),
        Want::Forget if observed.cgroups.is_empty() => Plan::Settled(Settled::Gone),
        Want::Forget if nothing_runs => Plan::Remove,
        Want::Forget => Plan::AskRuntime,
    }
}

/// Whether a pod's requests count against allocatable.
pub fn reserves(want: Want, admitted: bool) -> bool {
    admitted && matches!(want, Want::Run | Want::Stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{DesireHeader, PodRef};
    use crate::layout::{Driver, Layout, Qos};

    fn path() -> CgroupPath {
        Layout::new(Driver::Cgroupfs, "/").unwrap().pod(Qos::Burstable, "u")
    }

    fn desire(want: Want) -> PodDesire {
        DesireHeader { pod: PodRef::default(), revision: 0, want }.into()
    }

    fn made() -> ObservedCgroups {
        ObservedCgroups { cgroups: [path()].into(), applied: Some((path(), PodCgroup::default())) }
    }

    #[test]
    fn a_cgroup_is_created_only_for_an_admitted_pod() {
        let none = ObservedCgroups::default();
        assert_eq!(
            plan(&desire(Want::Run), &path(), false, &none, false),
            Plan::Settled(Settled::NotAdmitted)
        );
        assert_eq!(plan(&desire(Want::Run), &path(), true, &none, false), Plan::Apply);
        assert_eq!(plan(&desire(Want::Run), &path(), true, &made(), false), Plan::Settled(Settled::Ready));
    }

    #[test]
    fn a_cgroup_found_at_startup_or_with_other_values_is_applied_again() {
        let found = ObservedCgroups { applied: None, ..made() };
        assert_eq!(plan(&desire(Want::Run), &path(), true, &found, false), Plan::Apply);
        let mut resized = desire(Want::Run);
        resized.cgroup.cpu_shares = 512;
        assert_eq!(plan(&resized, &path(), true, &made(), false), Plan::Apply);
    }

    #[test]
    fn a_pod_cgroup_is_kept_until_the_pod_is_forgotten() {
        for want in [Want::Stop, Want::Unmount] {
            assert_eq!(plan(&desire(want), &path(), true, &made(), true), Plan::Settled(Settled::Ending));
        }
    }

    #[test]
    fn a_cgroup_is_removed_only_after_the_runtime_was_asked() {
        let forget = desire(Want::Forget);
        assert_eq!(plan(&forget, &path(), true, &made(), false), Plan::AskRuntime);
        assert_eq!(plan(&forget, &path(), true, &made(), true), Plan::Remove);
        assert_eq!(
            plan(&forget, &path(), true, &ObservedCgroups::default(), false),
            Plan::Settled(Settled::Gone)
        );
    }

    #[test]
    fn resources_are_reserved_while_pod_processes_may_run() {
        for (want, counts) in
            [(Want::Run, true), (Want::Stop, true), (Want::Unmount, false), (Want::Forget, false)]
        {
            assert_eq!(reserves(want, true), counts);
            assert!(!reserves(want, false));
        }
    }
}
