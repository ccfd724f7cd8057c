//! What pod-sync wants of a pod.

use std::collections::BTreeMap;

use crate::layout::Qos;

/// Amounts per resource name: `cpu` in millicores, everything else in its unit.
pub type Amounts = BTreeMap<String, i64>;

/// Names a pod for logs and events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRef {
    /// The UID; part of the name of the pod's cgroup.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// What is wanted of a pod's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The pod is to run: its cgroup is made once it is admitted.
    Run,
    /// The pod's processes are to end; its share stays reserved.
    Stop,
    /// No process is left: the share is free, the cgroup stays for what volumes are charged to it.
    Unmount,
    /// Nothing of the pod is to remain.
    Forget,
}

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
    /// Whose it is.
    pub pod: PodRef,
    /// Counts what the sender has wanted of this pod so far.
    pub revision: u64,
    /// What is wanted.
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

impl PodDesire {
    /// The wish that nothing of `pod` remains, for a pod that the set does not name.
    pub fn forget(pod: PodRef) -> Self {
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
