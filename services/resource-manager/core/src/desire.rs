//! What pod-sync wants of a pod.

use std::collections::BTreeMap;

pub use keelson_desired_set::{Desire, PodRef, Want};

use crate::layout::Qos;

/// Amounts per resource name: `cpu` in millicores, everything else in its unit.
pub type Amounts = BTreeMap<String, i64>;

/// Values of a pod's cgroup, in the terms of cgroup v1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PodCgroup {
    /// `cpu.shares`, 2 to 262144.
    pub cpu_shares: u64,
    /// Microseconds per period; none is no quota.
    pub cpu_quota_us: Option<u64>,
    /// Microseconds of a period; none is the kernel's 100 ms.
    pub cpu_period_us: Option<u64>,
    /// Bytes; none is no limit.
    pub memory_limit: Option<u64>,
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
        }
    }
}
