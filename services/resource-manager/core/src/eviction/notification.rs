//! At which memory usage the kernel notifies the eviction loop (runtime-and-resources.md §12.2).

use super::signal::{Observation, Signal};
use super::threshold::Threshold;

/// The cgroup whose memory usage a signal follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryCgroup {
    /// The root cgroup: the whole machine.
    Machine,
    /// The cgroup of all pods.
    Pods,
}

/// The cgroup whose memory usage a signal follows; none for signals of other resources.
pub const fn memory_cgroup(signal: Signal) -> Option<MemoryCgroup> {
    match signal {
        Signal::MemoryAvailable => Some(MemoryCgroup::Machine),
        Signal::AllocatableMemoryAvailable => Some(MemoryCgroup::Pods),
        Signal::NodefsAvailable
        | Signal::NodefsInodesFree
        | Signal::ImagefsAvailable
        | Signal::ImagefsInodesFree
        | Signal::ContainerfsAvailable
        | Signal::ContainerfsInodesFree
        | Signal::PidAvailable => None,
    }
}

/// The usage in bytes at which the threshold is reached; `usage` is the usage at the time of `observed`.
///
/// It depends on inactive file pages, which count as used and as available, so it must be computed again from time to time.
/// When the threshold is met already, the result is below the current usage.
///
/// Parity: the kubelet's is capacity less threshold plus inactive files, which is the same sum.
pub fn notification_usage(threshold: &Threshold, observed: &Observation, usage: u64) -> u64 {
    let least = u64::try_from(threshold.amount.of(observed.capacity).value()).unwrap_or(0);
    usage.saturating_add(observed.available).saturating_sub(least)
}

#[cfg(test)]
mod tests {
    use super::super::signal::Resource;
    use super::super::threshold::Amount;
    use super::*;

    #[test]
    fn only_memory_signals_have_a_cgroup_to_watch() {
        for signal in Signal::ALL {
            assert_eq!(memory_cgroup(signal).is_some(), signal.resource() == Resource::Memory, "{signal:?}");
        }
    }

    #[test]
    fn the_kernel_notifies_when_usage_reaches_the_memory_threshold() {
        const MIB: u64 = 1 << 20;
        let observed = |available| Observation { capacity: 1000 * MIB, available, taken: 1 };
        for (amount, available, usage, at) in [
            // 1000 less 100, and 50 of inactive file pages: 300 used, 250 of it in the working set.
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
            assert_eq!(
                notification_usage(&threshold, &observed(available), usage),
                at,
                "{amount:?} {available} {usage}"
            );
        }
    }
}
