//! Linux resources of sandbox and container (§4).

use keelson_kube_model::resources::{
    amount, effective_limit, milli_cpu, milli_cpu_to_quota, milli_cpu_to_shares, oom_score_adj, pod_limits,
    pod_requests,
};
use keelson_kube_model::{Container, Pod, Quantity, ResourceList};

use super::LinuxResources;
use super::swap::swap_bytes;

/// The cgroup version of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller.
    V1,
    /// One hierarchy.
    #[default]
    V2,
}

/// Resources of the machine and its configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct MachineInputs<'a> {
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`, microseconds.
    pub cpu_cfs_period_us: u64,
    /// Memory of the node, bytes.
    pub memory_bytes: i64,
    /// cgroup version.
    pub cgroup: CgroupVersion,
    /// The kernel accounts swap per cgroup: a container gets none, or with `limited_swap` a share of it.
    pub swap_accounting: bool,
    /// `memorySwap.swapBehavior` is `LimitedSwap`.
    pub limited_swap: bool,
    /// Swap of the node, bytes.
    pub swap_bytes: i64,
    /// The OOM killer kills a single process, not the whole container (`singleProcessOOMKill`).
    pub single_process_oom_kill: bool,
    /// Huge page sizes of the kernel as in resource names: `2Mi`, `1Gi`.
    pub hugepage_sizes: &'a [String],
}

/// CPU shares, quota, period and memory for requests and limits. The limit is used if there is no request.
fn compute(
    requests: &ResourceList,
    cpu_limit: i64,
    memory_limit: i64,
    machine: &MachineInputs<'_>,
) -> LinuxResources {
    let shares = if requests.contains_key("cpu") { milli_cpu(requests) } else { cpu_limit };
    let mut resources = LinuxResources {
        cpu_shares: i64::try_from(milli_cpu_to_shares(shares)).unwrap_or(i64::MAX),
        memory_limit_in_bytes: memory_limit,
        ..LinuxResources::default()
    };
    if machine.cpu_cfs_quota {
        resources.cpu_period = i64::try_from(machine.cpu_cfs_period_us).unwrap_or(i64::MAX);
        resources.cpu_quota = milli_cpu_to_quota(cpu_limit, machine.cpu_cfs_period_us);
    }
    resources
}

/// The sum over the pod's containers, without overhead.
pub(super) fn of_sandbox(pod: &Pod, exclusive_cpus: bool, machine: &MachineInputs<'_>) -> LinuxResources {
    let mut bare = pod.clone();
    bare.spec.overhead.clear();
    let limits = pod_limits(&bare);
    let mut resources = compute(&pod_requests(&bare), milli_cpu(&limits), amount(&limits, "memory"), machine);
    if exclusive_cpus {
        resources.cpu_quota = -1;
    }
    resources
}

/// The resources of a pod, as they are announced to a runtime: its overhead, if it has one, and the sum over its containers.
pub fn sandbox_resources(pod: &Pod, machine: &MachineInputs<'_>) -> (Option<LinuxResources>, LinuxResources) {
    (of_overhead(pod, machine), of_sandbox(pod, false, machine))
}

/// The pod's overhead, as request and limit.
pub(super) fn of_overhead(pod: &Pod, machine: &MachineInputs<'_>) -> Option<LinuxResources> {
    let overhead = &pod.spec.overhead;
    (!overhead.is_empty())
        .then(|| compute(overhead, milli_cpu(overhead), amount(overhead, "memory"), machine))
}

/// The resources of a container.
pub fn of_container(
    pod: &Pod,
    container: &Container,
    exclusive_cpus: bool,
    machine: &MachineInputs<'_>,
) -> LinuxResources {
    let limit = |name: &str| effective_limit(pod, container, name);
    let cpu = limit("cpu").map_or(0, |limit| limit.milli_value());
    let memory = limit("memory").map_or(0, |limit| limit.value());
    let mut resources = compute(&container.resources.requests, cpu, memory, machine);
    if exclusive_cpus {
        resources.cpu_quota = -1;
    }
    resources.oom_score_adj = i64::from(oom_score_adj(pod, container, machine.memory_bytes));
    for size in machine.hugepage_sizes {
        let name = format!("hugepages-{size}");
        let pod_level = || pod.spec.resources.as_ref().and_then(|r| r.limits.get(&name));
        let bytes = container.resources.limits.get(&name).or_else(pod_level).map_or(0, Quantity::value);
        resources.hugepage_limits.push((kernel_size(size), bytes.max(0).unsigned_abs()));
    }
    let v2 = machine.cgroup == CgroupVersion::V2;
    if v2 && !machine.single_process_oom_kill {
        resources.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    if machine.swap_accounting && v2 {
        let swap = swap_bytes(pod, container, machine);
        resources.unified.insert("memory.swap.max".to_owned(), swap.to_string());
    } else if machine.swap_accounting {
        resources.memory_swap_limit_in_bytes = memory;
    }
    resources
}

/// `2Mi` as the kernel and CRI write it: `2MB`.
fn kernel_size(size: &str) -> String {
    format!("{}B", size.strip_suffix('i').unwrap_or(size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn machine() -> MachineInputs<'static> {
        MachineInputs {
            cpu_cfs_quota: true,
            cpu_cfs_period_us: 100_000,
            memory_bytes: 4 << 30,
            ..MachineInputs::default()
        }
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({ "spec": spec })).unwrap()
    }

    fn container(resources: Value, machine: &MachineInputs<'_>) -> LinuxResources {
        let pod = pod(json!({"containers": [{"name": "c", "resources": resources}]}));
        of_container(&pod, &pod.spec.containers[0], false, machine)
    }

    #[test]
    fn cpu_shares_come_from_the_request_or_without_one_from_the_limit() {
        for (resources, shares) in [
            (json!({}), 2),
            (json!({"requests": {"cpu": "500m"}}), 512),
            (json!({"requests": {"cpu": "0"}, "limits": {"cpu": "1"}}), 2),
            (json!({"limits": {"cpu": "1"}}), 1024),
            (json!({"requests": {"cpu": "1m"}}), 2),
            (json!({"requests": {"cpu": "1000"}}), 262_144),
        ] {
            assert_eq!(container(resources.clone(), &machine()).cpu_shares, shares, "{resources}");
        }
    }

    #[test]
    fn cpu_quota_follows_the_limit_and_cpu_cfs_quota() {
        let limited = json!({"limits": {"cpu": "250m", "memory": "64Mi"}});
        let got = container(limited.clone(), &machine());
        assert_eq!((got.cpu_quota, got.cpu_period, got.memory_limit_in_bytes), (25_000, 100_000, 64 << 20));
        assert_eq!(container(json!({"limits": {"cpu": "1m"}}), &machine()).cpu_quota, 1000);
        assert_eq!(container(json!({}), &machine()).cpu_quota, 0);
        let off = MachineInputs { cpu_cfs_quota: false, ..machine() };
        assert_eq!(container(limited, &off).cpu_quota, 0);
    }

    #[test]
    fn exclusive_cpus_have_no_cpu_quota() {
        let pod = pod(json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]}));
        assert_eq!(of_container(&pod, &pod.spec.containers[0], true, &machine()).cpu_quota, -1);
        assert_eq!(of_sandbox(&pod, true, &machine()).cpu_quota, -1);
    }

    #[test]
    fn a_container_without_limits_gets_those_of_the_pod() {
        let pod = pod(
            json!({"containers": [{"name": "c"}], "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}),
        );
        let got = of_container(&pod, &pod.spec.containers[0], false, &machine());
        assert_eq!((got.cpu_quota, got.memory_limit_in_bytes), (100_000, 1 << 30));
    }

    #[test]
    fn oom_score_adj_follows_the_qos_class() {
        assert_eq!(container(json!({}), &machine()).oom_score_adj, 1000);
        let both = json!({"cpu": "1", "memory": "1Gi"});
        assert_eq!(container(json!({"limits": both, "requests": both}), &machine()).oom_score_adj, -997);
        assert_eq!(container(json!({"requests": {"memory": "1Gi"}}), &machine()).oom_score_adj, 750);
    }

    #[test]
    fn every_huge_page_size_has_a_limit() {
        let sizes = ["2Mi".to_owned(), "1Gi".to_owned()];
        let machine = MachineInputs { hugepage_sizes: &sizes, ..machine() };
        let got = container(json!({"limits": {"hugepages-2Mi": "4Mi"}}), &machine);
        assert_eq!(got.hugepage_limits, [("2MB".to_owned(), 4 << 20), ("1GB".to_owned(), 0)]);
    }

    #[test]
    fn oom_kills_the_whole_container_unless_single_process_oom_kill() {
        assert_eq!(
            container(json!({}), &machine()).unified.get("memory.oom.group").map(String::as_str),
            Some("1")
        );
        let single = MachineInputs { single_process_oom_kill: true, ..machine() };
        assert!(container(json!({}), &single).unified.is_empty());
        let v1 = MachineInputs { cgroup: CgroupVersion::V1, ..machine() };
        assert!(container(json!({}), &v1).unified.is_empty());
    }

    #[test]
    fn no_container_gets_swap_with_swap_accounting() {
        let limit = json!({"limits": {"memory": "64Mi"}});
        let v2 = MachineInputs { swap_accounting: true, ..machine() };
        assert_eq!(
            container(limit.clone(), &v2).unified.get("memory.swap.max").map(String::as_str),
            Some("0")
        );
        let v1 = MachineInputs { swap_accounting: true, cgroup: CgroupVersion::V1, ..machine() };
        assert_eq!(container(limit, &v1).memory_swap_limit_in_bytes, 64 << 20);
    }

    #[test]
    fn limited_swap_needs_cgroup_v2_with_swap_accounting() {
        let burstable = || json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}});
        let limited = MachineInputs { limited_swap: true, swap_bytes: 2 << 30, ..machine() };
        let counted = MachineInputs { swap_accounting: true, ..limited };
        let max = |machine| container(burstable(), machine).unified.get("memory.swap.max").cloned();
        assert_eq!((max(&limited), max(&counted)), (None, Some((512 << 20).to_string())));
        let v1 = container(burstable(), &MachineInputs { cgroup: CgroupVersion::V1, ..counted });
        assert_eq!((v1.memory_swap_limit_in_bytes, v1.unified.get("memory.swap.max")), (2 << 30, None));
    }

    #[test]
    fn the_sandbox_has_the_sum_of_containers_without_overhead() {
        let pod = pod(json!({"overhead": {"cpu": "100m", "memory": "10Mi"}, "containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "1Gi"}}},
            {"name": "b", "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "1Gi"}}},
        ]}));
        let got = of_sandbox(&pod, false, &machine());
        assert_eq!((got.cpu_shares, got.cpu_quota, got.memory_limit_in_bytes), (1024, 200_000, 2 << 30));
        let overhead = of_overhead(&pod, &machine()).unwrap();
        assert_eq!(
            (overhead.cpu_shares, overhead.cpu_quota, overhead.memory_limit_in_bytes),
            (102, 10_000, 10 << 20)
        );
        assert_eq!(of_overhead(&Pod::default(), &machine()), None);
    }
}
