//! Which pods are preempted for a critical pod (runtime-and-resources.md §12.7).

use crate::admit::admit;
use crate::desire::{Amounts, PodDesire};
use crate::layout::Qos;

/// Chooses the pods to preempt so that a critical pod fits: as few guaranteed pods as possible, then burstable, then
/// best-effort pods. None when no pod may be preempted or all of them together do not free enough.
///
/// A pod may be preempted when it is not critical, or when its priority is below that of the critical pod and both are not 0.
/// `ending` tells which of the other pods are ending already: their resources are freed without an order.
pub fn victims<'a>(
    allocatable: &Amounts,
    admitted: &[&'a PodDesire],
    pod: &PodDesire,
    ending: impl Fn(&PodDesire) -> bool,
) -> Option<Vec<&'a PodDesire>> {
    if !pod.critical {
        return None;
    }
    let fits = |stay: &[&PodDesire]| {
        admit(allocatable, stay.iter().map(|other| &other.requests), &pod.requests, false).is_ok()
    };
    let stay: Vec<&PodDesire> = admitted.iter().copied().filter(|other| !ending(other)).collect();
    let may_preempt = |other: &PodDesire| {
        !other.critical || (other.priority != 0 && pod.priority != 0 && other.priority < pod.priority)
    };
    // Pods that are spared first come first: guaranteed, higher priority, older.
    let mut victims: Vec<&'a PodDesire> =
        admitted.iter().copied().filter(|other| !ending(other) && may_preempt(other)).collect();
    victims.sort_by_key(|other| (rank(other.qos), -i64::from(other.priority), other.created));
    let without = |victims: &[&PodDesire]| -> Vec<&PodDesire> {
        let is_victim =
            |other: &&PodDesire| victims.iter().any(|one| one.header.pod.uid == other.header.pod.uid);
        stay.iter().copied().filter(|other| !is_victim(other)).collect()
    };
    if !fits(&without(&victims)) {
        return None;
    }
    let mut index = 0;
    while index < victims.len() {
        let mut fewer = victims.clone();
        let spared = fewer.remove(index);
        if fits(&without(&fewer)) {
            victims.retain(|one| one.header.pod.uid != spared.header.pod.uid);
        } else {
            index += 1;
        }
    }
    Some(victims)
}

const fn rank(qos: Qos) -> u8 {
    match qos {
        Qos::Guaranteed => 0,
        Qos::Burstable => 1,
        Qos::BestEffort => 2,
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;
    use crate::desire::{Desire as _, PodRef};

    fn amounts(cpu: i64) -> Amounts {
        [("cpu".to_owned(), cpu)].into()
    }

    fn pod(uid: &str, qos: Qos, cpu: i64) -> PodDesire {
        let pod = PodRef { uid: uid.to_owned(), ..PodRef::default() };
        PodDesire { qos, requests: amounts(cpu), ..PodDesire::forget(pod) }
    }

    fn critical(cpu: i64) -> PodDesire {
        PodDesire { critical: true, ..pod("critical", Qos::Burstable, cpu) }
    }

    fn chosen(limit: i64, others: &[PodDesire], pod: &PodDesire) -> Option<Vec<String>> {
        let others: Vec<&PodDesire> = others.iter().collect();
        let chosen = victims(&amounts(limit), &others, pod, |other| other.header.pod.uid == "ending")?;
        Some(chosen.iter().map(|one| one.header.pod.uid.clone()).collect())
    }

    #[test]
    fn preemption_spares_guaranteed_pods_first_then_burstable_pods() {
        let others = [
            pod("g", Qos::Guaranteed, 300),
            pod("b1", Qos::Burstable, 300),
            pod("b2", Qos::Burstable, 200),
            pod("e", Qos::BestEffort, 0),
        ];
        let names = |list: &[&str]| Some(list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        for (cpu, expected) in [
            (200, names(&[])),
            (400, names(&["b2"])),
            (500, names(&["b1"])),
            (700, names(&["b1", "b2"])),
            (1000, names(&["g", "b1", "b2"])),
            (1001, None),
        ] {
            assert_eq!(chosen(1000, &others, &critical(cpu)), expected, "{cpu}");
        }
    }

    #[test]
    fn only_critical_pods_preempt_and_not_other_critical_pods_of_equal_priority() {
        let others = [PodDesire { critical: true, ..pod("c", Qos::Burstable, 900) }];
        assert_eq!(chosen(1000, &others, &pod("p", Qos::Guaranteed, 500)), None);
        assert_eq!(chosen(1000, &others, &critical(500)), None);
        let lower = [PodDesire { priority: 5, ..others[0].clone() }];
        let higher = PodDesire { priority: 6, ..critical(500) };
        assert_eq!(chosen(1000, &lower, &higher), Some(vec!["c".to_owned()]));
        assert_eq!(chosen(1000, &lower, &PodDesire { priority: 5, ..critical(500) }), None);
    }

    #[test]
    fn preemption_counts_the_resources_of_terminating_pods_first() {
        let others = [pod("ending", Qos::Burstable, 500), pod("b", Qos::Burstable, 500)];
        assert_eq!(chosen(1000, &others, &critical(500)), Some(Vec::new()));
        assert_eq!(chosen(1000, &others, &critical(501)), Some(vec!["b".to_owned()]));
    }

    /// The victims free enough, and none of them could have been spared.
    #[test]
    fn preemption_victims_are_sufficient_and_minimal() {
        let reached = &Reached::default();
        let sizes = prop::collection::vec(1i64..400, 0..8);
        proptest!(ProptestConfig::with_cases(512), |(sizes in sizes, asked in 1i64..1000)| {
            let others: Vec<PodDesire> = sizes
                .iter()
                .enumerate()
                .map(|(i, cpu)| pod(&format!("p{i}"), Qos::ALL[i % 3], *cpu))
                .collect();
            let limit = sizes.iter().sum::<i64>().max(asked);
            let goes = chosen(limit, &others, &critical(asked)).unwrap();
            let left = |goes: &[String]| {
                let stay = others.iter().filter(|o| !goes.contains(&o.header.pod.uid));
                limit - stay.map(|o| o.requests["cpu"]).sum::<i64>()
            };
            prop_assert!(left(&goes) >= asked);
            for spared in 0..goes.len() {
                let mut fewer = goes.clone();
                fewer.remove(spared);
                prop_assert!(left(&fewer) < asked, "{goes:?}");
            }
            reached.case([
                ("no pod is preempted", goes.is_empty()),
                ("some pods are preempted", !goes.is_empty() && goes.len() < others.len()),
                ("all pods are preempted", goes.len() > 1 && goes.len() == others.len()),
                ("a guaranteed pod is spared", goes.len() > 1 && !goes.contains(&others[0].header.pod.uid)),
            ]);
        });
        // The rarest: "no pod is preempted", in one case of 8.
        reached.assert_each();
    }
}
