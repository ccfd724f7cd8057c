//! Whether a pod may start under node pressure, and in which order pods are admitted (pod-lifecycle.md §15).

use std::collections::BTreeSet;

use crate::admit::{Rejection, admit};
use crate::desire::{Amounts, PodDesire};
use crate::eviction::signal::Condition;
use crate::layout::Qos;

/// Rejects a pod that may not start while the node has these conditions.
///
/// Critical pods may start. Under memory pressure alone, pods that are not best-effort and pods that tolerate it may, too.
pub fn check_pressure(conditions: &BTreeSet<Condition>, pod: &PodDesire) -> Result<(), Rejection> {
    if conditions.is_empty() || pod.critical || pod.adopted {
        return Ok(());
    }
    let only_memory = conditions.iter().all(|condition| *condition == Condition::Memory);
    if only_memory && (pod.qos != Qos::BestEffort || pod.tolerates_memory_pressure) {
        return Ok(());
    }
    let list: Vec<&str> = conditions.iter().map(|condition| condition.name()).collect();
    Err(Rejection {
        reason: "Evicted".to_owned(),
        message: format!("The node had condition: [{}]. ", list.join(" ")),
        temporary: true,
    })
}

/// Rejects other requests for a pod that runs, if they grow while the node has these conditions: those of a new pod would be, too. A pod
/// can always have less.
pub fn check_resize_pressure(
    conditions: &BTreeSet<Condition>,
    pod: &PodDesire,
    after: &Amounts,
) -> Result<(), Rejection> {
    let grows = |(name, amount): (&String, &i64)| *amount > pod.requests.get(name).copied().unwrap_or(0);
    if !after.iter().any(grows) {
        return Ok(());
    }
    check_pressure(conditions, &PodDesire { adopted: false, ..pod.clone() })
}

/// Whether a pod that fits must wait: it would not fit if the undecided pods that were created before it were admitted
/// first, in the order of their creation.
pub fn must_wait_for_older<'a>(
    allocatable: &Amounts,
    admitted: &[&'a PodDesire],
    undecided: &[&'a PodDesire],
    pod: &PodDesire,
) -> bool {
    let before = |one: &PodDesire, other: &PodDesire| {
        one.created.cmp(&other.created).then_with(|| one.header.pod.uid.cmp(&other.header.pod.uid))
    };
    let mut older: Vec<&PodDesire> =
        undecided.iter().copied().filter(|other| before(other, pod).is_lt()).collect();
    // The common case: all of them fit.
    let all: Vec<&PodDesire> = admitted.iter().chain(&older).copied().collect();
    if fits(allocatable, &all, pod) {
        return false;
    }
    older.sort_by(|one, other| before(one, other));
    let mut taken: Vec<&PodDesire> = admitted.to_vec();
    for other in older {
        if fits(allocatable, &taken, other) {
            taken.push(other);
        }
    }
    !fits(allocatable, &taken, pod)
}

fn fits(allocatable: &Amounts, taken: &[&PodDesire], pod: &PodDesire) -> bool {
    admit(allocatable, taken.iter().map(|other| &other.requests), &pod.requests, pod.adopted).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desire::{Desire as _, PodRef};

    #[test]
    fn pressure_defers_a_resize_of_a_running_pod_only_if_something_grows() {
        let amounts = |cpu: i64, memory: i64| -> Amounts {
            [("cpu".to_owned(), cpu), ("memory".to_owned(), memory)].into()
        };
        let running = PodDesire { adopted: true, requests: amounts(100, 100), ..pod("u", Qos::Burstable) };
        let critical = PodDesire { critical: true, ..running.clone() };
        let best_effort = PodDesire { qos: Qos::BestEffort, ..running.clone() };
        for (pod, condition, after, accepted) in [
            (&running, Condition::Disk, amounts(100, 101), false),
            (&running, Condition::Pid, amounts(101, 50), false),
            (&running, Condition::Disk, amounts(100, 100), true),
            (&running, Condition::Disk, amounts(50, 50), true),
            (&running, Condition::Memory, amounts(200, 200), true),
            (&best_effort, Condition::Memory, amounts(200, 200), false),
            (&critical, Condition::Disk, amounts(200, 200), true),
        ] {
            let verdict = check_resize_pressure(&[condition].into(), pod, &after);
            assert_eq!(verdict.is_ok(), accepted, "{condition:?} {after:?}");
            assert!(verdict.err().is_none_or(|rejection| rejection.temporary), "it is tried again");
        }
        assert!(check_resize_pressure(&BTreeSet::new(), &running, &amounts(200, 200)).is_ok());
    }

    fn pod(uid: &str, qos: Qos) -> PodDesire {
        PodDesire { qos, ..PodDesire::forget(PodRef { uid: uid.to_owned(), ..PodRef::default() }) }
    }

    #[test]
    fn admission_under_pressure_depends_on_qos_tolerations_and_criticality() {
        use Condition::{Disk, Memory, Pid};
        let tolerant = PodDesire { tolerates_memory_pressure: true, ..pod("t", Qos::BestEffort) };
        let critical = PodDesire { critical: true, ..pod("c", Qos::BestEffort) };
        let adopted = PodDesire { adopted: true, ..pod("a", Qos::BestEffort) };
        let (best_effort, burstable) = (pod("e", Qos::BestEffort), pod("b", Qos::Burstable));
        type Case<'a> = (&'a [Condition], &'a PodDesire, Option<&'a str>);
        let cases: [Case<'_>; 10] = [
            (&[], &best_effort, None),
            (&[Memory], &best_effort, Some("[MemoryPressure]")),
            (&[Memory], &tolerant, None),
            (&[Memory], &burstable, None),
            (&[Memory], &critical, None),
            (&[Disk], &burstable, Some("[DiskPressure]")),
            (&[Memory, Disk], &tolerant, Some("[MemoryPressure DiskPressure]")),
            (&[Pid], &burstable, Some("[PIDPressure]")),
            (&[Disk, Pid], &critical, None),
            (&[Disk], &adopted, None),
        ];
        for (conditions, pod, list) in cases {
            let found = check_pressure(&conditions.iter().copied().collect(), pod).err();
            let expected = list.map(|list| Rejection {
                reason: "Evicted".to_owned(),
                message: format!("The node had condition: {list}. "),
                temporary: true,
            });
            assert_eq!(found, expected, "{conditions:?} {}", pod.header.pod.uid);
        }
    }

    #[test]
    fn admission_waits_only_for_older_pods_that_could_take_the_resources() {
        let sized = |uid: &str, created, cpu| {
            let requests = [("cpu".to_owned(), cpu)].into();
            PodDesire { created, requests, ..pod(uid, Qos::Burstable) }
        };
        let allocatable: Amounts = [("cpu".to_owned(), 1000)].into();
        let (running, me) = (sized("r", 1, 400), sized("m", 5, 300));
        let (large, small, younger, huge) =
            (sized("l", 3, 400), sized("s", 4, 300), sized("y", 6, 400), sized("h", 2, 700));
        for (undecided, waits) in [
            (vec![], false),
            (vec![&small], false),
            (vec![&large], true),
            (vec![&younger], false),
            // A pod that does not fit takes no resources.
            (vec![&huge], false),
            (vec![&small, &huge, &large], true),
        ] {
            assert_eq!(
                must_wait_for_older(&allocatable, &[&running], &undecided, &me),
                waits,
                "{undecided:?}"
            );
        }
    }
}
