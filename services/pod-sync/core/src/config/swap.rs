//! How much swap a container may use (runtime-and-resources.md §4.4).

use keelson_kube_model::{Container, Pod, QosClass, Quantity, ResourceList, qos_class};

use super::{CgroupVersion, MachineInputs};

/// Bytes of swap for a container in addition to its memory, if the kernel accounts swap.
///
/// With `memorySwap.swapBehavior: LimitedSwap` on cgroup v2 a container of a Burstable pod that is not critical gets a share
/// of the node's swap in proportion to its memory request, unless request and limit are equal. All others get none.
pub(super) fn swap_bytes(pod: &Pod, container: &Container, machine: &MachineInputs<'_>) -> i64 {
    let memory = |list: &ResourceList| list.get("memory").copied().unwrap_or(Quantity::ZERO);
    let request = memory(&container.resources.requests);
    let is_limited = machine.limited_swap
        && qos_class(pod) == QosClass::Burstable
        && !pod.is_critical()
        && request != memory(&container.resources.limits);
    if !is_limited || machine.memory_bytes <= 0 {
        return 0;
    }
    let part =
        i128::from(request.value()) * i128::from(machine.swap_bytes) / i128::from(machine.memory_bytes);
    // An adopted pod may request more memory than the node has now.
    i64::try_from(part).unwrap_or(i64::MAX).clamp(0, machine.swap_bytes.max(0))
}

/// Whether a container may use swap.
pub fn has_swap(pod: &Pod, container: &Container, machine: &MachineInputs<'_>) -> bool {
    let counted = machine.swap_accounting && machine.cgroup == CgroupVersion::V2;
    counted && swap_bytes(pod, container, machine) > 0
}

#[cfg(test)]
mod tests {
    use keelson_testkit::Reached;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const GIB: i64 = 1 << 30;

    fn machine() -> MachineInputs<'static> {
        MachineInputs {
            memory_bytes: 8 * GIB,
            swap_bytes: 4 * GIB,
            limited_swap: true,
            ..MachineInputs::default()
        }
    }

    fn pod(containers: Value) -> Pod {
        serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
    }

    fn of_first(containers: Value, machine: &MachineInputs<'_>) -> i64 {
        let pod = pod(containers);
        swap_bytes(&pod, &pod.spec.containers[0], machine)
    }

    #[test]
    fn swap_is_proportional_to_the_memory_request() {
        let both = json!({"cpu": "1", "memory": "1Gi"});
        for (resources, bytes) in [
            (json!({"requests": {"memory": "2Gi"}}), GIB),
            (json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}), GIB / 2),
            (json!({"requests": {"memory": "1"}}), 0),
            (json!({"requests": {"memory": "3"}}), 1),
            (json!({"requests": {"memory": "8Gi"}}), 4 * GIB),
            (json!({"requests": {"memory": "64Gi"}}), 4 * GIB),
            // Request and limit are equal, or both are missing.
            (json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "1024Mi"}}), 0),
            (json!({"requests": both, "limits": both}), 0),
            (json!({"requests": {"cpu": "1"}}), 0),
            (json!({"requests": {"memory": "0"}, "limits": {"memory": "0"}}), 0),
            (json!({}), 0),
            // A limit alone, which is also the request once defaults are filled in.
            (json!({"limits": {"memory": "1Gi"}}), 0),
        ] {
            assert_eq!(
                of_first(json!([{"name": "c", "resources": resources}]), &machine()),
                bytes,
                "{resources}"
            );
        }
    }

    #[test]
    fn only_burstable_pods_that_are_not_critical_get_swap() {
        let spec = json!([{"name": "c", "resources": {"requests": {"memory": "2Gi"}}}]);
        let plain = pod(spec);
        let of = |pod: &Pod| swap_bytes(pod, &pod.spec.containers[0], &machine());
        assert_eq!(of(&plain), GIB);
        let mut critical = plain.clone();
        critical.spec.priority = Some(2_000_000_000);
        let mut fixed = plain.clone();
        fixed.metadata.annotations.insert("kubernetes.io/config.source".into(), "file".into());
        let mut guaranteed = plain.clone();
        guaranteed.status.qos_class = "Guaranteed".into();
        for (pod, why) in [(critical, "priority"), (fixed, "static"), (guaranteed, "class")] {
            assert_eq!(of(&pod), 0, "{why}");
        }
        // In a Burstable pod each container counts by itself.
        let same = json!({"memory": "1Gi", "cpu": "1"});
        let two = json!([
            {"name": "a", "resources": {"requests": same, "limits": same}},
            {"name": "b", "resources": {"requests": {"memory": "1Gi"}}},
        ]);
        let two = pod(two);
        let parts: Vec<i64> = two.spec.containers.iter().map(|c| swap_bytes(&two, c, &machine())).collect();
        assert_eq!(parts, [0, GIB / 2]);
    }

    #[test]
    fn without_limited_swap_or_node_swap_there_is_none() {
        for machine in [
            MachineInputs { limited_swap: false, ..machine() },
            MachineInputs { swap_bytes: 0, ..machine() },
            MachineInputs { memory_bytes: 0, ..machine() },
        ] {
            let spec = json!([{"name": "c", "resources": {"requests": {"memory": "2Gi"}}}]);
            assert_eq!(of_first(spec, &machine), 0, "{machine:?}");
        }
    }

    /// Containers that fit on the node together never get more swap than it has.
    #[test]
    fn containers_that_fit_get_at_most_the_swap_of_the_node() {
        let reached = &Reached::default();
        let hundredths = prop::collection::vec(0_i64..=100, 1..20);
        proptest!(|(hundredths in hundredths, swap in prop_oneof![Just(0), 1..64 * GIB])| {
            let machine = MachineInputs { swap_bytes: swap, ..machine() };
            let most = machine.memory_bytes / i64::try_from(hundredths.len()).unwrap();
            let parts = hundredths.iter().map(|part| {
                let resources = json!({"requests": {"memory": (most * part / 100).to_string()}});
                of_first(json!([{"name": "c", "resources": resources}]), &machine)
            });
            let sum: i64 = parts.sum();
            prop_assert!(sum <= swap);
            reached.case([("some", sum > 0), ("no swap to share", swap == 0)]);
        });
        reached.assert_each();
    }
}
