//! The desired state of a pod, as pod-sync sends it.

use std::collections::BTreeMap;

pub use keelson_desired_set::{Desire, DesireHeader, PodRef, Want};
use keelson_kube_model::Quantity;

use crate::layout::Qos;

/// Amounts per resource name: `cpu` in millicores, everything else in its unit.
pub type Amounts = BTreeMap<String, i64>;

/// Quantities per resource name, as in the pod spec.
pub type Quantities = BTreeMap<String, Quantity>;

/// Values of a pod's cgroup, in the terms of cgroup v1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodCgroup {
    /// `cpu.shares`, 2 to 262144.
    pub cpu_shares: u64,
    /// Microseconds per period; none is no quota.
    pub cpu_quota_us: Option<u64>,
    /// Microseconds of a period; none is the kernel's 100 ms.
    pub cpu_period_us: Option<u64>,
    /// Bytes; none is no limit.
    pub memory_limit: Option<u64>,
    /// Bytes per page size (`2Mi`); a size that is not named gets 0.
    pub huge_pages: BTreeMap<String, u64>,
}

/// Requests and limits of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerShare {
    /// Its name.
    pub name: String,
    /// An init container: it ends before the regular containers start.
    pub init: bool,
    /// A sidecar: an init container that keeps running next to the regular containers.
    pub sidecar: bool,
    /// `resources.requests`.
    pub requests: Quantities,
    /// `resources.limits`.
    pub limits: Quantities,
}

/// An emptyDir volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmptyDirShare {
    /// Its name.
    pub name: String,
    /// `sizeLimit`.
    pub size_limit: Option<Quantity>,
}

/// The desired state of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodDesire {
    /// The pod, whose UID is part of the name of its cgroup, and what is wanted. `Run`: the cgroup is created once the
    /// pod is admitted. `Stop`: its resources stay reserved. `Unmount`: its resources are free, the cgroup stays because
    /// volumes may be charged to it. `Forget`: the cgroup is removed.
    pub header: DesireHeader,
    /// The QoS class, which decides the parent cgroup.
    pub qos: Qos,
    /// Effective requests, overhead included.
    pub requests: Amounts,
    /// Values of the cgroup.
    pub cgroup: PodCgroup,
    /// The pod was running when pod-sync found it: it is not rejected for insufficient resources.
    pub adopted: bool,
    /// It is neither evicted nor preempted.
    pub critical: bool,
    /// `spec.priority`, 0 without one.
    pub priority: i32,
    /// It tolerates memory pressure: it may start under `MemoryPressure` even as a best-effort pod.
    pub tolerates_memory_pressure: bool,
    /// `spec.terminationGracePeriodSeconds`.
    pub grace_seconds: i64,
    /// When it was created, in nanoseconds since 1970; 0 when unknown.
    pub created: i64,
    /// Its init, regular and sidecar containers.
    pub containers: Vec<ContainerShare>,
    /// Its emptyDir volumes.
    pub empty_dirs: Vec<EmptyDirShare>,
    /// Pod-level requests.
    pub pod_level_requests: Quantities,
    /// Pod-level limits.
    pub pod_level_limits: Quantities,
}

impl Desire for PodDesire {
    fn header(&self) -> &DesireHeader {
        &self.header
    }
}

impl From<DesireHeader> for PodDesire {
    fn from(header: DesireHeader) -> Self {
        Self {
            header,
            qos: Qos::BestEffort,
            requests: Amounts::new(),
            cgroup: PodCgroup::default(),
            adopted: false,
            critical: false,
            priority: 0,
            tolerates_memory_pressure: false,
            grace_seconds: 0,
            created: 0,
            containers: Vec::new(),
            empty_dirs: Vec::new(),
            pod_level_requests: Quantities::new(),
            pod_level_limits: Quantities::new(),
        }
    }
}
