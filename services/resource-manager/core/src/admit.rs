//! Resource admission: does a pod fit (runtime-and-resources.md §9, pod-lifecycle.md §15 handler 10)?

use crate::desire::Amounts;

/// The order in which insufficient resources are reported; other resources follow in the order of their names.
const ORDER: &[&str] = &["cpu", "memory", "ephemeral-storage"];

/// Why a pod is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// `OutOf` and the resource.
    pub reason: String,
    /// The kubelet's text.
    pub message: String,
    /// The pod may fit later: other pods use the resources, or the node is under pressure. `false`: the machine is too small.
    pub temporary: bool,
}

/// Decides whether a pod that requests `requests` fits next to the admitted pods.
///
/// `allocatable` is what pods may use, with `pods` as a count. Resources that it does not name, and resources that the pod
/// does not request, are not checked. An `adopted` pod is never rejected: it runs already.
pub fn admit<'a>(
    allocatable: &Amounts,
    admitted: impl Iterator<Item = &'a Amounts> + Clone,
    requests: &Amounts,
    adopted: bool,
) -> Result<(), Rejection> {
    if adopted {
        return Ok(());
    }
    let pods = i64::try_from(admitted.clone().count()).unwrap_or(i64::MAX);
    if let Some(limit) = allocatable.get("pods")
        && pods >= *limit
    {
        return Err(rejection("pods", 1, pods, *limit));
    }
    let rest = requests.keys().map(String::as_str).filter(|name| !ORDER.contains(name) && *name != "pods");
    for name in ORDER.iter().copied().chain(rest) {
        let requested = requests.get(name).copied().unwrap_or(0);
        let Some(limit) = allocatable.get(name).copied().filter(|_| requested > 0) else { continue };
        let used = admitted
            .clone()
            .filter_map(|pod| pod.get(name))
            .fold(0_i64, |sum, amount| sum.saturating_add(*amount));
        if requested > limit.saturating_sub(used) {
            return Err(rejection(name, requested, used, limit));
        }
    }
    Ok(())
}

/// Decides whether a running pod that requests `before` may request `after` instead. Only what grows is checked: a pod can always
/// have less, even on a node that has become too small for its pods.
pub fn resize<'a>(
    allocatable: &Amounts,
    others: impl Iterator<Item = &'a Amounts> + Clone,
    before: &Amounts,
    after: &Amounts,
) -> Result<(), Rejection> {
    let grows = |(name, amount): &(&String, &i64)| **amount > before.get(*name).copied().unwrap_or(0);
    let growing: Amounts = after.iter().filter(grows).map(|(name, amount)| (name.clone(), *amount)).collect();
    let without_count = allocatable.iter().filter(|(name, _)| *name != "pods");
    let allocatable = without_count.map(|(name, amount)| (name.clone(), *amount)).collect();
    admit(&allocatable, others, &growing, false)
}

fn rejection(resource: &str, requested: i64, used: i64, capacity: i64) -> Rejection {
    Rejection {
        reason: format!("OutOf{resource}"),
        message: format!(
            "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
        ),
        temporary: requested <= capacity,
    }
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;

    use super::*;

    fn amounts(list: &[(&str, i64)]) -> Amounts {
        list.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
    }

    fn machine() -> Amounts {
        amounts(&[("cpu", 2000), ("memory", 1000), ("ephemeral-storage", 500), ("pods", 3), ("a.b/gpu", 1)])
    }

    #[test]
    fn admission_rejects_with_the_kubelets_message_for_the_first_insufficient_resource() {
        let running = [amounts(&[("cpu", 1500), ("memory", 900)]), amounts(&[("a.b/gpu", 1)])];
        type Case<'a> = (&'a [(&'a str, i64)], Option<(&'a str, &'a str)>);
        let cases: [Case<'_>; 8] = [
            (&[("cpu", 500), ("memory", 100)], None),
            (&[], None),
            (
                &[("cpu", 501), ("memory", 101)],
                Some(("OutOfcpu", "cpu, requested: 501, used: 1500, capacity: 2000")),
            ),
            (&[("memory", 101)], Some(("OutOfmemory", "memory, requested: 101, used: 900, capacity: 1000"))),
            (
                &[("ephemeral-storage", 501)],
                Some(("OutOfephemeral-storage", "ephemeral-storage, requested: 501, used: 0, capacity: 500")),
            ),
            (&[("a.b/gpu", 1)], Some(("OutOfa.b/gpu", "a.b/gpu, requested: 1, used: 1, capacity: 1"))),
            (&[("unknown/thing", 9)], None),
            (&[("cpu", 0), ("memory", 0)], None),
        ];
        for (requests, expected) in cases {
            let result = admit(&machine(), running.iter(), &amounts(requests), false).err();
            let expected = expected.map(|(reason, rest)| Rejection {
                reason: reason.to_owned(),
                message: format!("Node didn't have enough resource: {rest}"),
                temporary: reason != "OutOfephemeral-storage",
            });
            assert_eq!(result, expected, "{requests:?}");
        }
    }

    #[test]
    fn admission_rejects_pods_above_the_pod_limit_regardless_of_requests() {
        let running = vec![Amounts::new(); 3];
        let rejection = admit(&machine(), running.iter(), &Amounts::new(), false).unwrap_err();
        assert_eq!((rejection.reason.as_str(), rejection.temporary), ("OutOfpods", true));
        assert!(rejection.message.ends_with("pods, requested: 1, used: 3, capacity: 3"));
    }

    #[test]
    fn a_resize_is_checked_for_what_grows_and_not_for_the_number_of_pods() {
        // More is in use than allocatable, and the node has all its pods.
        let others = [amounts(&[("cpu", 1500), ("memory", 1100)]), Amounts::new(), Amounts::new()];
        let before = amounts(&[("cpu", 300), ("memory", 200)]);
        let resized = |after: &[(&str, i64)]| resize(&machine(), others.iter(), &before, &amounts(after));
        assert_eq!(resized(&[("cpu", 500), ("memory", 100)]), Ok(()));
        let rejection = resized(&[("cpu", 501), ("memory", 100)]).unwrap_err();
        assert_eq!((rejection.reason.as_str(), rejection.temporary), ("OutOfcpu", true));
        assert!(rejection.message.ends_with("cpu, requested: 501, used: 1500, capacity: 2000"));
        assert!(!resized(&[("cpu", 2001)]).unwrap_err().temporary, "above the node");
        assert_eq!(resized(&[("memory", 201)]).unwrap_err().reason, "OutOfmemory");
    }

    #[test]
    fn adopted_pods_are_always_admitted() {
        let running = vec![amounts(&[("cpu", 9000)]); 9];
        assert_eq!(admit(&machine(), running.iter(), &amounts(&[("cpu", 9000)]), true), Ok(()));
    }

    #[test]
    fn resources_that_are_not_requested_are_not_checked_at_admission() {
        // More is in use than allocatable, as after a change of the reservation.
        let running = [amounts(&[("memory", 1100)])];
        assert_eq!(admit(&machine(), running.iter(), &amounts(&[("memory", 0)]), false), Ok(()));
        // The pod count is the node's; a pod cannot request it.
        assert_eq!(admit(&machine(), running.iter(), &amounts(&[("pods", 9)]), false), Ok(()));
    }

    /// Pods that are admitted one after the other never exceed allocatable.
    #[test]
    fn admitted_pods_never_exceed_allocatable() {
        let reached = &Reached::default();
        let pods = prop::collection::vec((0i64..1500, 0i64..800), 0..12);
        proptest!(ProptestConfig::with_cases(512), |(pods in pods)| {
            let mut admitted: Vec<Amounts> = Vec::new();
            let mut refused = Vec::new();
            for (cpu, memory) in pods {
                let requests = amounts(&[("cpu", cpu), ("memory", memory)]);
                match admit(&machine(), admitted.iter(), &requests, false) {
                    Ok(()) => admitted.push(requests),
                    Err(rejection) => refused.push(rejection.reason),
                }
            }
            prop_assert!(admitted.len() <= 3);
            for (name, limit) in [("cpu", 2000), ("memory", 1000)] {
                prop_assert!(admitted.iter().map(|p| p[name]).sum::<i64>() <= limit);
            }
            let is_short = |reason: &str| refused.iter().any(|refused| refused == reason);
            reached.case([
                ("all are admitted", !admitted.is_empty() && refused.is_empty()),
                ("too many pods", is_short("OutOfpods")),
                ("short of CPU", is_short("OutOfcpu")),
                ("short of memory", is_short("OutOfmemory")),
            ]);
        });
        // The rarest: "all are admitted", in one case of 7.
        reached.assert_each();
    }
}
