//! Whether a pod may begin while the node is short of something, and whose turn it is (pod-lifecycle.md §15).

use std::collections::BTreeSet;

use crate::admit::{Rejection, admit};
use crate::desire::{Amounts, PodDesire};
use crate::eviction::signal::Condition;
use crate::layout::Qos;

/// Turns a pod away that may not begin while the node has these conditions.
///
/// Critical pods may. While only memory is short, so may every pod that asks for something, and one that tolerates it.
pub fn refuse(conditions: &BTreeSet<Condition>, pod: &PodDesire) -> Result<(), Rejection> {
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
        passing: true,
    })
}

/// Whose turn it is: whether a pod that fits would not if those that were created before it and are not judged yet
/// were admitted first, each in its turn. It has to wait for them then.
pub fn must_wait<'a>(
    allocatable: &Amounts,
    admitted: &[&'a PodDesire],
    unjudged: &[&'a PodDesire],
    pod: &PodDesire,
) -> bool {
    let before = |one: &PodDesire, other: &PodDesire| {
        one.created.cmp(&other.created).then_with(|| one.pod.uid.cmp(&other.pod.uid))
    };
    let mut older: Vec<&PodDesire> =
        unjudged.iter().copied().filter(|other| before(other, pod).is_lt()).collect();
    // Nearly always there is room for all of them.
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

    fn pod(uid: &str, qos: Qos) -> PodDesire {
        PodDesire { qos, ..PodDesire::forget(PodRef { uid: uid.to_owned(), ..PodRef::default() }) }
    }

    #[test]
    fn under_pressure_only_those_begin_who_may() {
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
            let found = refuse(&conditions.iter().copied().collect(), pod).err();
            let expected = list.map(|list| Rejection {
                reason: "Evicted".to_owned(),
                message: format!("The node had condition: {list}. "),
                passing: true,
            });
            assert_eq!(found, expected, "{conditions:?} {}", pod.pod.uid);
        }
    }

    #[test]
    fn a_younger_pod_waits_only_while_an_older_one_could_take_its_room() {
        let sized = |uid: &str, created, cpu| {
            let requests = [("cpu".to_owned(), cpu)].into();
            PodDesire { created, requests, ..pod(uid, Qos::Burstable) }
        };
        let allocatable: Amounts = [("cpu".to_owned(), 1000)].into();
        let (running, me) = (sized("r", 1, 400), sized("m", 5, 300));
        let (large, small, younger, huge) =
            (sized("l", 3, 400), sized("s", 4, 300), sized("y", 6, 400), sized("h", 2, 700));
        for (unjudged, waits) in [
            (vec![], false),
            (vec![&small], false),
            (vec![&large], true),
            (vec![&younger], false),
            // What does not fit itself takes nobody's room.
            (vec![&huge], false),
            (vec![&small, &huge, &large], true),
        ] {
            assert_eq!(must_wait(&allocatable, &[&running], &unjudged, &me), waits, "{unjudged:?}");
        }
    }
}
