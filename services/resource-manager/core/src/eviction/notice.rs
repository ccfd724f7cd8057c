//! At which usage the kernel is asked to tell that memory becomes short (runtime-and-resources.md §12.2).

use super::signal::{Observation, Signal};
use super::threshold::Threshold;

/// Which cgroup's usage of memory a signal follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// That of the whole machine, the top of the tree.
    Machine,
    /// That of all pods together.
    Pods,
}

/// The cgroup whose usage a signal follows; none for one that does not speak of memory.
pub const fn watched(signal: Signal) -> Option<Watched> {
    match signal {
        Signal::MemoryAvailable => Some(Watched::Machine),
        Signal::AllocatableMemoryAvailable => Some(Watched::Pods),
        Signal::NodefsAvailable
        | Signal::NodefsInodesFree
        | Signal::ImagefsAvailable
        | Signal::ImagefsInodesFree
        | Signal::ContainerfsAvailable
        | Signal::ContainerfsInodesFree
        | Signal::PidAvailable => None,
    }
}

/// The usage in bytes at which no more is left than the threshold asks for, when `usage` was used as `seen` was taken.
///
/// It moves with the pages of files that nobody uses, which count as used and as left, so it is to be computed anew now
/// and then. Where less than that is left already it lies below the usage.
///
/// Parity: the kubelet's is capacity less threshold plus inactive files, which is the same sum.
pub fn usage_at(threshold: &Threshold, seen: &Observation, usage: u64) -> u64 {
    let least = u64::try_from(threshold.amount.of(seen.capacity).value()).unwrap_or(0);
    usage.saturating_add(seen.available).saturating_sub(least)
}

#[cfg(test)]
mod tests {
    use super::super::signal::Resource;
    use super::super::threshold::Amount;
    use super::*;

    #[test]
    fn every_signal_of_memory_follows_a_cgroup_and_no_other_does() {
        for signal in Signal::ALL {
            assert_eq!(watched(signal).is_some(), signal.resource() == Resource::Memory, "{signal:?}");
        }
    }

    #[test]
    fn the_kernel_tells_when_usage_has_grown_by_what_is_left_above_the_threshold() {
        const MIB: u64 = 1 << 20;
        let seen = |available| Observation { capacity: 1000 * MIB, available, taken: 1 };
        for (amount, available, usage, at) in [
            // 1000 less 100, and 50 of files that nobody uses: 300 used, 250 of it in the working set.
            ("100Mi", 750 * MIB, 300 * MIB, 950 * MIB),
            ("10%", 750 * MIB, 300 * MIB, 950 * MIB),
            ("100Mi", 100 * MIB, 300 * MIB, 300 * MIB),
            ("100Mi", 60 * MIB, 300 * MIB, 260 * MIB),
            ("100Mi", 0, 50 * MIB, 0),
            ("100Gi", 750 * MIB, 300 * MIB, 0),
        ] {
            let amount = Amount::parse(amount).unwrap();
            let threshold =
                Threshold { signal: Signal::MemoryAvailable, amount, grace_ms: None, reclaim: None };
            assert_eq!(usage_at(&threshold, &seen(available), usage), at, "{amount:?} {available} {usage}");
        }
    }
}
