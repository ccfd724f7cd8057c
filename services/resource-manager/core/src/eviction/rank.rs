//! The order in which pods are evicted (runtime-and-resources.md §12.4).

use std::cmp::Reverse;

use super::signal::{FsLayout, Resource, Signal};
use super::usage::Candidate;

/// The indices of the candidates in eviction order; critical pods are left out.
///
/// Pods that use more than they request come first, then lower priority, then higher usage above the request. For processes:
/// lower priority, then more processes. Unmeasured usage counts as 0. Among equal pods the younger comes first.
pub fn rank(signal: Signal, layout: FsLayout, candidates: &[Candidate<'_>]) -> Vec<usize> {
    let resource = signal.resource();
    let mut order: Vec<usize> = (0..candidates.len()).filter(|i| !candidates[*i].desire.critical).collect();
    order.sort_by_key(|index| {
        let candidate = &candidates[*index];
        let used = candidate.usage.of(resource, signal.filesystem(), layout);
        let requested = candidate.request(resource);
        let exceeds = resource != Resource::Pids && used > requested;
        let above = i128::from(used) - i128::from(requested);
        let desire = candidate.desire;
        (!exceeds, desire.priority, Reverse(above), Reverse(desire.created), desire.header.pod.uid.clone())
    });
    order
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::super::usage::{ContainerUsage, PodUsage, Space};
    use super::*;
    use crate::desire::{Desire as _, PodDesire, PodRef};

    fn pod(name: &str, priority: i32, asked: i64) -> PodDesire {
        let pod = PodRef { uid: name.to_owned(), ..PodRef::default() };
        let requests = ["memory", "ephemeral-storage"].map(|resource| (resource.to_owned(), asked)).into();
        PodDesire { priority, requests, ..PodDesire::forget(pod) }
    }

    fn taking(amount: u64) -> PodUsage {
        let space = Some(Space { bytes: amount, inodes: amount });
        PodUsage {
            memory: Some(amount),
            processes: Some(amount),
            containers: [("c".to_owned(), ContainerUsage { layer: space, ..ContainerUsage::default() })]
                .into(),
            ..PodUsage::default()
        }
    }

    fn ranked(signal: Signal, pods: &[(PodDesire, PodUsage)]) -> Vec<String> {
        let candidates: Vec<_> = pods.iter().map(|(desire, usage)| Candidate { desire, usage }).collect();
        let order = rank(signal, FsLayout::One, &candidates);
        order.into_iter().map(|i| pods[i].0.header.pod.uid.clone()).collect()
    }

    #[test]
    fn eviction_ranks_pods_above_their_requests_before_priority_and_usage() {
        let pods = [
            (pod("modest-large", 0, 1000), taking(900)),
            (pod("greedy-important", 10, 100), taking(200)),
            (pod("greedy", 0, 100), taking(150)),
            (pod("greedier", 0, 50), taking(140)),
            (pod("modest-unimportant", -1, 1000), taking(10)),
        ];
        let expected = ["greedier", "greedy", "greedy-important", "modest-unimportant", "modest-large"];
        for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable, Signal::NodefsAvailable] {
            assert_eq!(ranked(signal, &pods), expected, "{signal:?}");
        }
    }

    #[test]
    fn pid_eviction_ranks_by_priority_and_process_count() {
        let pods = [
            (pod("few", 0, 1), taking(3)),
            (pod("important", 1, 0), taking(100)),
            (pod("many", 0, 1000), taking(9)),
        ];
        assert_eq!(ranked(Signal::PidAvailable, &pods), ["many", "few", "important"]);
    }

    #[test]
    fn inode_eviction_ranks_without_requests() {
        let pods = [(pod("a", 0, 1000), taking(3)), (pod("b", 0, 0), taking(4))];
        assert_eq!(ranked(Signal::NodefsInodesFree, &pods), ["b", "a"]);
    }

    #[test]
    fn critical_pods_are_not_ranked_for_eviction() {
        let critical = PodDesire { critical: true, ..pod("critical", 0, 0) };
        let pods = [(critical, taking(1000)), (pod("other", 100, 1000), taking(1))];
        assert_eq!(ranked(Signal::MemoryAvailable, &pods), ["other"]);
    }

    #[test]
    fn eviction_ranks_the_younger_of_equal_pods_first() {
        let older = PodDesire { created: 1, ..pod("a-older", 0, 0) };
        let younger = PodDesire { created: 2, ..pod("b-younger", 0, 0) };
        let pods = [(older, taking(5)), (younger, taking(5))];
        assert_eq!(ranked(Signal::MemoryAvailable, &pods), ["b-younger", "a-older"]);
    }

    /// No pod within its requests is ranked before a pod above them.
    #[test]
    fn pods_within_their_requests_never_rank_before_pods_above_them() {
        let reached = &Reached::default();
        let list = prop::collection::vec((0i64..100, 0u64..100, -5i32..5), 1..12);
        proptest!(ProptestConfig::with_cases(1024), |(list in list)| {
            let pods: Vec<_> = list
                .iter()
                .enumerate()
                .map(|(i, (asked, taken, priority))| (pod(&format!("p{i:02}"), *priority, *asked), taking(*taken)))
                .collect();
            let candidates: Vec<_> = pods.iter().map(|(desire, usage)| Candidate { desire, usage }).collect();
            let order = rank(Signal::MemoryAvailable, FsLayout::One, &candidates);
            prop_assert_eq!(order.len(), pods.len());
            let greedy: Vec<bool> = order.iter().map(|i| list[*i].1 as i64 > list[*i].0).collect();
            prop_assert!(greedy.is_sorted_by(|a, b| a >= b), "{greedy:?}");
            let priorities: Vec<i32> = order.iter().map(|i| list[*i].2).collect();
            reached.case([
                ("all greedy", !greedy.contains(&false)),
                ("all modest", !greedy.contains(&true)),
                ("both", greedy.contains(&true) && greedy.contains(&false)),
                ("a greedy pod goes before a modest one of lower priority", !priorities.is_sorted()),
            ]);
        });
        // The rarest: "all modest", in one case of 11.
        reached.assert_each();
    }
}
