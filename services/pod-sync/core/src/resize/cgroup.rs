//! The cgroup of a pod during a resize (§16.5): as large as both the old and the new resources need, until every container is updated.

use keelson_kube_model::Pod;
use keelson_kube_model::resources::{PodCgroupValues, pod_cgroup_values};

use crate::allocation::Allocation;

/// The values of the cgroup of a pod whose containers still have the resources `actuated`; `None`: they have those of `pod`.
///
/// `period_us` and `cpu_cfs_quota` are as for [`pod_cgroup_values`].
pub fn cgroup_values(
    pod: &Pod,
    actuated: Option<&Allocation>,
    period_us: u64,
    cpu_cfs_quota: bool,
) -> PodCgroupValues {
    let after = pod_cgroup_values(pod, period_us, cpu_cfs_quota);
    let Some(actuated) = actuated else { return after };
    let mut before = pod.clone();
    if !actuated.apply(&mut before) {
        return after;
    }
    let before = pod_cgroup_values(&before, period_us, cpu_cfs_quota);
    // Without a limit is more than any limit.
    let larger = |a: Option<i64>, b: Option<i64>| a.zip(b).map(|(a, b)| a.max(b));
    let mut hugepage_limits = before.hugepage_limits;
    for (size, bytes) in after.hugepage_limits {
        let entry = hugepage_limits.entry(size).or_default();
        *entry = bytes.max(*entry);
    }
    PodCgroupValues {
        shares: before.shares.max(after.shares),
        quota_us: larger(before.quota_us, after.quota_us),
        memory_limit: larger(before.memory_limit, after.memory_limit),
        hugepage_limits,
        period_us,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_cgroup_has_the_larger_values_until_the_containers_are_updated() {
        let pod = |limits: Value| -> Pod {
            let resources = json!({"requests": {"cpu": "100m"}, "limits": limits});
            let containers = json!([{"name": "a", "resources": resources}]);
            serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
        };
        let values = |before: Value, after: Value| {
            let before = Allocation::of(&pod(before));
            let values = cgroup_values(&pod(after), Some(&before), 100_000, true);
            (values.quota_us, values.memory_limit)
        };
        let more_cpu = (json!({"cpu": "1", "memory": "64Mi"}), json!({"cpu": "2", "memory": "32Mi"}));
        assert_eq!(values(more_cpu.0.clone(), more_cpu.1.clone()), (Some(200_000), Some(64 << 20)));
        assert_eq!(values(more_cpu.1.clone(), more_cpu.1), (Some(200_000), Some(32 << 20)));
        assert_eq!(values(json!({"memory": "64Mi"}), json!({"cpu": "1", "memory": "64Mi"})).0, None);
    }
}
