//! Whether a pod can have other resources at all, regardless of what other pods use (§16.3).

use std::collections::BTreeSet;

use keelson_kube_model::{Pod, ResourceList, ResourceRequirements, RestartPolicy, compute_qos};

use super::{RESIZABLE, containers, restarts};
use crate::config::{MachineInputs, has_swap};
use crate::restart::effective_policy;

/// Why `allocated` can never become `wanted` while it runs, for people; `None` if it can.
///
/// The API server refuses most of these changes itself. Files and etcd have nobody before the node who does.
pub fn infeasible(allocated: &Pod, wanted: &Pod, machine: &MachineInputs<'_>) -> Option<String> {
    changed_parts(allocated, wanted)
        .find_map(|(what, before, after)| forbidden_change(&what, before, after))
        .or_else(|| other_class(allocated, wanted))
        .or_else(|| would_not_start_again(allocated, wanted))
        .or_else(|| swap_in_use(allocated, wanted, machine))
}

/// The pod and its containers, each with a name for people and its resources before and after.
fn changed_parts<'a>(
    allocated: &'a Pod,
    wanted: &'a Pod,
) -> impl Iterator<Item = (String, &'a ResourceRequirements, &'a ResourceRequirements)> {
    static NONE: std::sync::LazyLock<ResourceRequirements> =
        std::sync::LazyLock::new(ResourceRequirements::default);
    let of_pod = |pod: &'a Pod| pod.spec.resources.as_ref().unwrap_or(&NONE);
    let whole = std::iter::once(("the pod".to_owned(), of_pod(allocated), of_pod(wanted)));
    let each = containers(wanted).map(|after| {
        let before = containers(allocated).find(|before| before.name == after.name);
        let before = before.map_or(&*NONE, |before| &before.resources);
        (format!("container {}", after.name), before, &after.resources)
    });
    whole.chain(each).filter(|(_, before, after)| before != after)
}

fn forbidden_change(
    what: &str,
    before: &ResourceRequirements,
    after: &ResourceRequirements,
) -> Option<String> {
    if before.claims != after.claims {
        return Some(format!("The resource claims of {what} cannot change while the pod runs"));
    }
    let parts = [("limit", &before.limits, &after.limits), ("request", &before.requests, &after.requests)];
    parts.into_iter().find_map(|(part, before, after)| {
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        names.into_iter().find_map(|name| {
            let change = (before.get(name), after.get(name));
            match change {
                (before, after) if before == after => None,
                _ if !RESIZABLE.contains(&name.as_str()) => Some(format!(
                    "The {name} {part} of {what} cannot change while the pod runs; only cpu and memory can"
                )),
                (Some(_), None) => {
                    Some(format!("The {name} {part} of {what} cannot be removed while the pod runs"))
                }
                _ => None,
            }
        })
    })
}

fn other_class(allocated: &Pod, wanted: &Pod) -> Option<String> {
    let (before, after) = (compute_qos(allocated), compute_qos(wanted));
    (before != after).then(|| {
        let (before, after) = (before.as_str(), after.as_str());
        format!("Pod QOS Class may not change as a result of resizing: it is {before} and would be {after}")
    })
}

/// A restart for a resize that is interrupted after the stop leaves a container that has exited, and this one might not start again.
fn would_not_start_again(allocated: &Pod, wanted: &Pod) -> Option<String> {
    containers(wanted).find_map(|after| {
        let policy = effective_policy(wanted, after);
        let before = containers(allocated).find(|before| before.name == after.name)?;
        let changes = |resource: &&&str| {
            let of = |list: &ResourceList| list.get(**resource).copied();
            let (before, after) = (&before.resources, &after.resources);
            of(&before.requests) != of(&after.requests) || of(&before.limits) != of(&after.limits)
        };
        let resource = RESIZABLE
            .iter()
            .filter(|_| policy != RestartPolicy::Always)
            .filter(changes)
            .find(|resource| restarts(wanted, after, resource))?;
        let (name, policy) = (&after.name, policy.as_str());
        Some(format!(
            "The resizePolicy of container {name} demands a restart for other {resource}, but it might not start again: its restartPolicy is {policy}. Use NotRequired, or the restartPolicy Always"
        ))
    })
}

/// A container that may use swap, and whose memory request changes, would need another share of the swap.
fn swap_in_use(allocated: &Pod, wanted: &Pod, machine: &MachineInputs<'_>) -> Option<String> {
    let memory = |requests: &ResourceList| requests.get("memory").copied().unwrap_or_default();
    let affected = containers(wanted).any(|after| {
        containers(allocated).filter(|before| before.name == after.name).any(|before| {
            memory(&before.resources.requests) != memory(&after.resources.requests)
                && !restarts(wanted, after, "memory")
                && has_swap(allocated, before, machine)
        })
    });
    affected.then(|| "In-place resize of containers with swap is not supported.".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::CgroupVersion;

    fn pod(resources: Value) -> Pod {
        pod_of(json!({"containers": [{"name": "a", "resources": resources}]}))
    }

    fn pod_of(spec: Value) -> Pod {
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    fn burstable(cpu: &str, memory: &str) -> Value {
        json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": "2", "memory": "2Gi"}})
    }

    #[test]
    fn cpu_and_memory_can_change_both_ways_and_limits_can_be_added() {
        let machine = MachineInputs::default();
        for (before, after) in [
            (burstable("500m", "64Mi"), burstable("1", "64Mi")),
            (burstable("500m", "64Mi"), burstable("500m", "32Mi")),
            (json!({"requests": {"cpu": "1"}}), json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}})),
        ] {
            assert_eq!(infeasible(&pod(before), &pod(after.clone()), &machine), None, "{after}");
        }
    }

    #[test]
    fn a_change_that_no_running_pod_can_have_is_named() {
        let machine = MachineInputs::default();
        let both = json!({"cpu": "1", "memory": "1Gi"});
        for (before, after, text) in [
            (
                json!({"requests": {"cpu": "1", "ephemeral-storage": "1Gi"}}),
                json!({"requests": {"cpu": "1", "ephemeral-storage": "2Gi"}}),
                "The ephemeral-storage request of container a cannot change while the pod runs; only cpu and memory can",
            ),
            (
                json!({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}),
                json!({"requests": {"cpu": "1"}}),
                "The memory limit of container a cannot be removed while the pod runs",
            ),
            (
                json!({"requests": both, "limits": both}),
                json!({"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": both}),
                "Pod QOS Class may not change as a result of resizing: it is Guaranteed and would be Burstable",
            ),
            (
                json!({}),
                json!({"requests": {"cpu": "1"}}),
                "Pod QOS Class may not change as a result of resizing: it is BestEffort and would be Burstable",
            ),
            (
                json!({"requests": {"cpu": "1"}}),
                json!({"requests": {"cpu": "1"}, "claims": [{"name": "gpu"}]}),
                "The resource claims of container a cannot change while the pod runs",
            ),
        ] {
            assert_eq!(infeasible(&pod(before), &pod(after), &machine).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_container_that_might_not_start_again_is_not_restarted_for_a_resize() {
        let machine = MachineInputs::default();
        let with = |cpu: &str, policy: &str, own: Value| {
            let restart = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
            let mut container =
                json!({"name": "a", "resources": burstable(cpu, "1Gi"), "resizePolicy": restart});
            if own != Value::Null {
                container["restartPolicy"] = own;
            }
            pod_of(json!({"restartPolicy": policy, "containers": [container]}))
        };
        for (policy, own, refused) in [
            ("Always", Value::Null, false),
            ("OnFailure", Value::Null, true),
            ("Never", Value::Null, true),
            ("Never", json!("Always"), false),
            ("Always", json!("OnFailure"), true),
        ] {
            let text = infeasible(&with("1", policy, own.clone()), &with("2", policy, own.clone()), &machine);
            let names = "The resizePolicy of container a demands a restart for other cpu";
            assert_eq!(text.is_some_and(|text| text.starts_with(names)), refused, "{policy} {own}");
        }
        let mut memory = with("1", "Never", Value::Null);
        memory.spec.containers[0].resources = pod(burstable("1", "2Gi")).spec.containers[0].resources.clone();
        let same_cpu = infeasible(&with("1", "Never", Value::Null), &memory, &machine);
        assert_eq!(same_cpu, None, "its memory changes without a restart");
    }

    #[test]
    fn pod_level_resources_can_change_but_not_be_removed() {
        let with = |resources: Value| pod_of(json!({"containers": [{"name": "a"}], "resources": resources}));
        let machine = MachineInputs::default();
        let before = with(json!({"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}));
        let more = with(json!({"requests": {"cpu": "1"}, "limits": {"cpu": "3"}}));
        assert_eq!(infeasible(&before, &more, &machine), None);
        let none = with(json!({"requests": {"cpu": "1"}}));
        let text = infeasible(&before, &none, &machine).unwrap();
        assert_eq!(text, "The cpu limit of the pod cannot be removed while the pod runs");
    }

    #[test]
    fn memory_of_a_container_with_swap_changes_only_by_a_restart() {
        let machine = MachineInputs {
            limited_swap: true,
            swap_accounting: true,
            swap_bytes: 2 << 30,
            memory_bytes: 4 << 30,
            cgroup: CgroupVersion::V2,
            ..MachineInputs::default()
        };
        let with = |memory: &str, policy: Value| {
            pod_of(json!({"containers": [
                {"name": "a", "resources": burstable("500m", memory), "resizePolicy": policy}]}))
        };
        let restart = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
        let text = infeasible(&with("1Gi", json!([])), &with("512Mi", json!([])), &machine);
        assert_eq!(text.as_deref(), Some("In-place resize of containers with swap is not supported."));
        assert_eq!(infeasible(&with("1Gi", restart.clone()), &with("512Mi", restart), &machine), None);
        let without = MachineInputs { limited_swap: false, ..machine };
        assert_eq!(infeasible(&with("1Gi", json!([])), &with("512Mi", json!([])), &without), None);
        let cpu = pod(burstable("1", "1Gi"));
        assert_eq!(infeasible(&pod(burstable("500m", "1Gi")), &cpu, &machine), None);
    }
}
