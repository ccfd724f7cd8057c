//! What to do next for one pod.

use std::collections::BTreeSet;

use crate::desire::{PodCgroup, PodDesire, Want};
use crate::layout::CgroupPath;

/// What is there of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actual {
    /// Its cgroups: one, unless an earlier agent has left another.
    pub held: BTreeSet<CgroupPath>,
    /// Where and with which values this process has made it.
    pub applied: Option<(CgroupPath, PodCgroup)>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Nothing, until the desire changes.
    Settled(Settled),
    /// Make the cgroup, or bring its values up to date, then plan again.
    Make,
    /// Make sure by a fresh read of the runtime that nothing of the pod runs, then plan again.
    AskRuntime,
    /// End what is left in the cgroups and remove them, then plan again.
    Remove,
}

/// How a pod is when nothing is to be done for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// It is not admitted yet.
    NotAdmitted,
    /// Its cgroup is there.
    Ready,
    /// It ends; its cgroup stays as it is.
    Ending,
    /// Nothing is left.
    Gone,
}

/// Decides the next step for a pod whose cgroup belongs at `path`.
///
/// Level-triggered: depends only on the arguments, so a restarted service reaches the same decision.
/// `quiet` says that a read of the runtime, made for this call, shows no running container and no ready sandbox;
/// nothing is removed without it.
pub fn plan(desire: &PodDesire, path: &CgroupPath, admitted: bool, actual: &Actual, quiet: bool) -> Plan {
    match desire.want {
        Want::Run if !admitted => Plan::Settled(Settled::NotAdmitted),
        Want::Run => match &actual.applied {
            Some((at, values)) if at == path && *values == desire.cgroup => Plan::Settled(Settled::Ready),
            _ => Plan::Make,
        },
        Want::Stop | Want::Unmount => Plan::Settled(Settled::Ending),
        Want::Forget if actual.held.is_empty() => Plan::Settled(Settled::Gone),
        Want::Forget if quiet => Plan::Remove,
        Want::Forget => Plan::AskRuntime,
    }
}

/// Whether a pod counts against the machine's room.
pub fn reserves(want: Want, admitted: bool) -> bool {
    admitted && matches!(want, Want::Run | Want::Stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{Desire as _, PodRef};
    use crate::layout::{Driver, Layout, Qos};

    fn path() -> CgroupPath {
        Layout::new(Driver::Cgroupfs, "/").unwrap().pod(Qos::Burstable, "u")
    }

    fn desire(want: Want) -> PodDesire {
        PodDesire { want, ..PodDesire::forget(PodRef::default()) }
    }

    fn made() -> Actual {
        Actual { held: [path()].into(), applied: Some((path(), PodCgroup::default())) }
    }

    #[test]
    fn a_cgroup_is_made_only_for_an_admitted_pod() {
        let none = Actual::default();
        assert_eq!(
            plan(&desire(Want::Run), &path(), false, &none, false),
            Plan::Settled(Settled::NotAdmitted)
        );
        assert_eq!(plan(&desire(Want::Run), &path(), true, &none, false), Plan::Make);
        assert_eq!(plan(&desire(Want::Run), &path(), true, &made(), false), Plan::Settled(Settled::Ready));
    }

    #[test]
    fn a_cgroup_found_at_the_start_or_with_other_values_is_made_again() {
        let found = Actual { applied: None, ..made() };
        assert_eq!(plan(&desire(Want::Run), &path(), true, &found, false), Plan::Make);
        let mut resized = desire(Want::Run);
        resized.cgroup.cpu_shares = 512;
        assert_eq!(plan(&resized, &path(), true, &made(), false), Plan::Make);
    }

    #[test]
    fn a_cgroup_outlives_the_processes_and_the_volumes() {
        for want in [Want::Stop, Want::Unmount] {
            assert_eq!(plan(&desire(want), &path(), true, &made(), true), Plan::Settled(Settled::Ending));
        }
    }

    #[test]
    fn nothing_is_removed_before_the_runtime_was_asked() {
        let forget = desire(Want::Forget);
        assert_eq!(plan(&forget, &path(), true, &made(), false), Plan::AskRuntime);
        assert_eq!(plan(&forget, &path(), true, &made(), true), Plan::Remove);
        assert_eq!(plan(&forget, &path(), true, &Actual::default(), false), Plan::Settled(Settled::Gone));
    }

    #[test]
    fn room_is_reserved_while_processes_may_run() {
        for (want, counts) in
            [(Want::Run, true), (Want::Stop, true), (Want::Unmount, false), (Want::Forget, false)]
        {
            assert_eq!(reserves(want, true), counts);
            assert!(!reserves(want, false));
        }
    }
}
