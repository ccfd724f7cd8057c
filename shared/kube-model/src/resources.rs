//! Effective requests and limits of a pod, and the kernel values that follow from them.

use std::collections::BTreeMap;

use crate::pod_ext::is_pod_level_resource;
use crate::qos::{QosClass, qos_class};
use crate::quantity::Quantity;
use crate::types::{Container, Pod, ResourceList, ResourceRequirements};

/// Minimum of CPU shares in the kernel.
pub const MIN_SHARES: u64 = 2;
/// Maximum of CPU shares in the kernel.
pub const MAX_SHARES: u64 = 262_144;
/// Minimum CFS quota in the kernel, in microseconds.
pub const MIN_QUOTA_US: i64 = 1_000;
/// The usual CFS period, in microseconds.
pub const DEFAULT_PERIOD_US: u64 = 100_000;

/// `oom_score_adj` of Guaranteed and node-critical pods.
pub const GUARANTEED_OOM_SCORE_ADJ: i32 = -997;
/// `oom_score_adj` of BestEffort pods.
pub const BEST_EFFORT_OOM_SCORE_ADJ: i32 = 1000;

/// CPU shares for a request in thousandths of a CPU; 0 gives the minimum.
pub fn milli_cpu_to_shares(milli_cpu: i64) -> u64 {
    if milli_cpu <= 0 {
        return MIN_SHARES;
    }
    (milli_cpu.unsigned_abs().saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// CFS quota in microseconds for a limit in thousandths of a CPU and a period in microseconds. 0 means no limit.
pub fn milli_cpu_to_quota(milli_cpu: i64, period_us: u64) -> i64 {
    if milli_cpu <= 0 {
        return 0;
    }
    let quota = i128::from(milli_cpu) * i128::from(period_us) / 1000;
    quota.clamp(i128::from(MIN_QUOTA_US), i128::from(i64::MAX)) as i64
}

/// cgroup v2 `cpu.weight` (1 to 10000) for CPU shares, by the linear rule for cgroups the agent itself writes.
pub fn shares_to_weight(shares: u64) -> u64 {
    1 + ((shares.clamp(MIN_SHARES, MAX_SHARES) - MIN_SHARES) * 9999) / (MAX_SHARES - MIN_SHARES)
}

/// CPU shares for a cgroup v2 `cpu.weight`; the reverse of [`shares_to_weight`] up to rounding.
pub fn weight_to_shares(weight: u64) -> u64 {
    ((weight.clamp(1, 10_000) - 1) * (MAX_SHARES - MIN_SHARES)) / 9999 + MIN_SHARES
}

/// The amount of a resource in whole units, 0 when absent.
pub fn amount(list: &ResourceList, name: &str) -> i64 {
    list.get(name).map_or(0, Quantity::value)
}

/// The CPU amount in thousandths, 0 when absent.
pub fn milli_cpu(list: &ResourceList) -> i64 {
    list.get("cpu").map_or(0, Quantity::milli_value)
}

fn add(into: &mut ResourceList, more: &ResourceList) {
    for (name, amount) in more {
        *into.entry(name.clone()).or_default() += *amount;
    }
}

fn raise(into: &mut ResourceList, at_least: &ResourceList) {
    for (name, amount) in at_least {
        let entry = into.entry(name.clone()).or_default();
        if *amount > *entry {
            *entry = *amount;
        }
    }
}

/// The peak need of all containers, per resource: the sum of regular containers and sidecars, or the peak of the init
/// phase, where each init container runs next to the sidecars before it.
fn aggregate<'a>(pod: &'a Pod, of: impl Fn(&'a Container) -> &'a ResourceList) -> ResourceList {
    let mut running = ResourceList::new();
    let mut sidecars = ResourceList::new();
    let mut peak = ResourceList::new();
    for container in &pod.spec.containers {
        add(&mut running, of(container));
    }
    for container in &pod.spec.init_containers {
        let own = of(container);
        if container.is_restartable_init() {
            add(&mut running, own);
            add(&mut sidecars, own);
            raise(&mut peak, &sidecars);
        } else {
            let mut during = sidecars.clone();
            add(&mut during, own);
            raise(&mut peak, &during);
        }
    }
    raise(&mut running, &peak);
    running
}

fn replace_by_pod_level(list: &mut ResourceList, pod_level: Option<&ResourceList>) {
    for (name, amount) in pod_level.into_iter().flatten() {
        if is_pod_level_resource(name) {
            list.insert(name.clone(), *amount);
        }
    }
}

/// Requests of all containers together, without pod-level resources and overhead.
pub fn container_requests(pod: &Pod) -> ResourceList {
    aggregate(pod, |container| &container.resources.requests)
}

/// Effective requests of a pod: containers, replaced by pod-level resources where these are set, plus overhead.
pub fn pod_requests(pod: &Pod) -> ResourceList {
    let mut requests = container_requests(pod);
    replace_by_pod_level(&mut requests, pod.spec.resources.as_ref().map(|r| &r.requests));
    add(&mut requests, &pod.spec.overhead);
    requests
}

/// Effective limits of a pod, computed like the requests. Overhead is added only to limits that exist and are not
/// zero: an unlimited resource stays unlimited.
pub fn pod_limits(pod: &Pod) -> ResourceList {
    let mut limits = aggregate(pod, |container| &container.resources.limits);
    replace_by_pod_level(&mut limits, pod.spec.resources.as_ref().map(|r| &r.limits));
    for (name, overhead) in &pod.spec.overhead {
        if let Some(limit) = limits.get_mut(name).filter(|limit| !limit.is_zero()) {
            *limit += *overhead;
        }
    }
    limits
}

/// The effective limit of a container: its own, else the pod-level one for CPU and memory.
pub fn effective_limit(pod: &Pod, container: &Container, name: &str) -> Option<Quantity> {
    let own = container.resources.limits.get(name).filter(|limit| !limit.is_zero());
    let pod_level = || pod.spec.resources.as_ref().and_then(|r| r.limits.get(name));
    match name {
        "cpu" | "memory" => own.or_else(pod_level),
        _ => own,
    }
    .copied()
}

/// The values that the agent writes into the cgroup of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodCgroupValues {
    /// CPU shares, 2 to 262144; for cgroup v2 see [`shares_to_weight`].
    pub shares: u64,
    /// CFS quota in microseconds; `None` leaves CPU time unlimited.
    pub quota_us: Option<i64>,
    /// CFS period in microseconds.
    pub period_us: u64,
    /// Memory limit in bytes; `None` leaves memory unlimited.
    pub memory_limit: Option<i64>,
    /// Huge page limits in bytes by page size as in the resource's name (`2Mi`). Sizes not named here get 0.
    pub hugepage_limits: BTreeMap<String, i64>,
}

/// Computes the values of a pod's cgroup from its effective requests and limits.
///
/// `cpu_cfs_quota` is the configuration field `cpuCFSQuota`: without it there is no quota anywhere.
/// A Burstable pod is limited only where each of its containers (or the pod level) is.
pub fn pod_cgroup_values(pod: &Pod, period_us: u64, cpu_cfs_quota: bool) -> PodCgroupValues {
    let limits = pod_limits(pod);
    let class = qos_class(pod);
    let limited = |name: &str| match class {
        QosClass::Guaranteed => true,
        QosClass::Burstable => is_limited_throughout(pod, name),
        QosClass::BestEffort => false,
    };
    let quota = milli_cpu_to_quota(milli_cpu(&limits), period_us);
    let memory = amount(&limits, "memory");
    let shares = match class {
        QosClass::BestEffort => MIN_SHARES,
        _ => milli_cpu_to_shares(milli_cpu(&pod_requests(pod))),
    };
    PodCgroupValues {
        shares,
        quota_us: (cpu_cfs_quota && quota > 0 && limited("cpu")).then_some(quota),
        period_us,
        memory_limit: (memory > 0 && limited("memory")).then_some(memory),
        hugepage_limits: limits
            .iter()
            .filter_map(|(name, limit)| Some((name.strip_prefix("hugepages-")?.to_owned(), limit.value())))
            .collect(),
    }
}

fn is_limited_throughout(pod: &Pod, name: &str) -> bool {
    let set = |resources: &ResourceRequirements| amount(&resources.limits, name) > 0;
    pod.spec.resources.as_ref().is_some_and(set)
        || pod.spec.init_containers.iter().chain(&pod.spec.containers).all(|c| set(&c.resources))
}

/// `oom_score_adj` of a container, -997 to 1000. `node_memory` is the node's memory capacity in bytes.
///
/// Burstable containers get a lower score the more of the node's memory they request; memory that a pod-level
/// request leaves over is split evenly. A sidecar is never killed before the regular container that requests least.
pub fn oom_score_adj(pod: &Pod, container: &Container, node_memory: i64) -> i32 {
    if pod.is_node_critical() {
        return GUARANTEED_OOM_SCORE_ADJ;
    }
    match qos_class(pod) {
        QosClass::Guaranteed => return GUARANTEED_OOM_SCORE_ADJ,
        QosClass::BestEffort => return BEST_EFFORT_OOM_SCORE_ADJ,
        QosClass::Burstable => {}
    }
    let memory = |container: &Container| amount(&container.resources.requests, "memory");
    let spare = spare_memory_per_container(pod);
    let score = |request: i64| {
        let share = 1000 * (i128::from(request) + i128::from(spare)) / i128::from(node_memory.max(1));
        (1000 - share).clamp(3, 999) as i32
    };
    let own = score(memory(container));
    let is_sidecar = container.is_restartable_init()
        && pod.spec.init_containers.iter().any(|init| init.name == container.name);
    match pod.spec.containers.iter().map(memory).min() {
        Some(least) if is_sidecar => own.min(score(least)),
        _ => own,
    }
}

/// Bytes of the pod-level memory request that no container claims, per init or regular container.
fn spare_memory_per_container(pod: &Pod) -> i64 {
    let Some(total) = pod.spec.resources.as_ref().and_then(|r| r.requests.get("memory")) else { return 0 };
    let count = pod.spec.init_containers.len() + pod.spec.containers.len();
    let claimed = amount(&container_requests(pod), "memory");
    (total.value() - claimed) / (count.max(1) as i64)
}
