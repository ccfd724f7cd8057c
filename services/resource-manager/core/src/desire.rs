//! What pod-sync wants of a pod.

use std::collections::BTreeMap;

pub use keelson_desired_set::{Desire, PodRef, Want};
use keelson_kube_model::Quantity;

use crate::layout::Qos;

/// Amounts per resource name: `cpu` in millicores, everything else in its unit.
pub type Amounts = BTreeMap<String, i64>;

/// Quantities per resource name, as they are written in the pod.
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
    /// Bytes by size of a page (`2Mi`); a size that is not named gets none.
    pub huge_pages: BTreeMap<String, u64>,
}

/// What a container asks for and may take at most.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerShare {
    /// Its name.
    pub name: String,
    /// It ends before the regular ones begin.
    pub init: bool,
    /// It is an init container that goes on beside the regular ones.
    pub sidecar: bool,
    /// What it asks for.
    pub requests: Quantities,
    /// What it may take at most.
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

/// The desire for one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodDesire {
    /// Whose it is; the UID is part of the name of the pod's cgroup.
    pub pod: PodRef,
    /// Counts what the sender has wanted of this pod so far.
    pub revision: u64,
    /// `Run`: the cgroup is made once the pod is admitted. `Stop`: its share stays reserved. `Unmount`: the share
    /// is free, the cgroup stays for what volumes are charged to it. `Forget`: the cgroup goes.
    pub want: Want,
    /// The class that decides where the cgroup lies.
    pub qos: Qos,
    /// Effective requests, overhead included.
    pub requests: Amounts,
    /// Values of the cgroup.
    pub cgroup: PodCgroup,
    /// The pod ran when pod-sync found it: it is not turned away for lack of room.
    pub adopted: bool,
    /// It is neither evicted nor preempted.
    pub critical: bool,
    /// `spec.priority`, 0 without one.
    pub priority: i32,
    /// It may begin while memory is short, although it asks for none.
    pub tolerates_memory_pressure: bool,
    /// `spec.terminationGracePeriodSeconds`.
    pub grace_seconds: i64,
    /// When it was created, in nanoseconds since 1970; 0 when nobody knows.
    pub created: i64,
    /// Its init, regular and sidecar containers.
    pub containers: Vec<ContainerShare>,
    /// Its emptyDir volumes.
    pub empty_dirs: Vec<EmptyDirShare>,
    /// What the pod as a whole asks for.
    pub pod_level_requests: Quantities,
    /// What the pod as a whole may take at most.
    pub pod_level_limits: Quantities,
}

impl Desire for PodDesire {
    fn pod(&self) -> &PodRef {
        &self.pod
    }

    fn revision(&self) -> u64 {
        self.revision
    }

    fn want(&self) -> Want {
        self.want
    }

    fn forget(pod: PodRef) -> Self {
        Self {
            pod,
            revision: 0,
            want: Want::Forget,
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
