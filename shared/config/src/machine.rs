//! Resources reserved for the machine, when pods are evicted to keep it healthy, and how they end before a shutdown.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Reservations and how they are enforced (runtime-and-resources.md §9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeAllocatable {
    /// `enforceNodeAllocatable`, with the values as written.
    pub enforce: Vec<String>,
    /// `kubeReserved`, as quantities per resource name.
    pub kube_reserved: BTreeMap<String, String>,
    /// `systemReserved`, as quantities per resource name; with `reservedSystemCPUs` it contains all reserved CPUs.
    pub system_reserved: BTreeMap<String, String>,
    /// `kubeReservedCgroup`; empty: none.
    pub kube_reserved_cgroup: String,
    /// `systemReservedCgroup`; empty: none.
    pub system_reserved_cgroup: String,
    /// `protectKernelDefaults`: kernel tunables that differ are an error instead of being set.
    pub protect_kernel_defaults: bool,
}

impl Default for NodeAllocatable {
    fn default() -> Self {
        Self {
            enforce: vec!["pods".to_owned()],
            kube_reserved: BTreeMap::new(),
            system_reserved: BTreeMap::new(),
            kube_reserved_cgroup: String::new(),
            system_reserved_cgroup: String::new(),
            protect_kernel_defaults: false,
        }
    }
}

/// Cgroups other than those of pods that have their own statistics, by path from the root of the hierarchy; empty: none
/// (node-and-api.md §8.10).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemCgroups {
    /// `kubeletCgroups`, that of this agent; empty: the one it runs in.
    pub kubelet: String,
    /// `--runtime-cgroups`, that of the container runtime.
    pub runtime: String,
    /// `systemCgroups`, that of all other processes.
    pub misc: String,
}

/// Files with the machine's ids: the first non-empty file of each list counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IdentityFiles {
    /// `--machine-id-file`.
    pub machine_id: Vec<PathBuf>,
    /// `--boot-id-file`.
    pub boot_id: Vec<PathBuf>,
}

impl Default for IdentityFiles {
    fn default() -> Self {
        Self {
            machine_id: vec!["/etc/machine-id".into(), "/var/lib/dbus/machine-id".into()],
            boot_id: vec!["/proc/sys/kernel/random/boot_id".into()],
        }
    }
}

/// The machine's message bus, which systemd and systemd-logind are on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemBus {
    /// Its socket (`systemBusAddress`).
    pub socket: PathBuf,
}

impl Default for SystemBus {
    fn default() -> Self {
        Self { socket: "/run/dbus/system_bus_socket".into() }
    }
}

/// When pods are evicted (runtime-and-resources.md §12). Without thresholds no pod is evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Eviction {
    /// Effective hard thresholds, per signal: quantities or percentages.
    pub hard: BTreeMap<String, String>,
    /// `evictionSoft`.
    pub soft: BTreeMap<String, String>,
    /// `evictionSoftGracePeriod` in milliseconds, one for each soft threshold.
    pub soft_grace_ms: BTreeMap<String, u64>,
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: BTreeMap<String, String>,
    /// `evictionPressureTransitionPeriod` in milliseconds.
    pub pressure_transition_ms: u64,
    /// `evictionMaxPodGracePeriod` in seconds: the maximum grace period at a soft threshold.
    pub max_pod_grace_seconds: i64,
    /// `localStorageCapacityIsolation`: limits of local storage are enforced.
    pub local_storage_limits: bool,
    /// `kernelMemcgNotification`: on cgroup v1 memory is also checked when the kernel reports that it becomes short.
    pub kernel_memcg_notification: bool,
}

impl Default for Eviction {
    fn default() -> Self {
        Self {
            hard: BTreeMap::new(),
            soft: BTreeMap::new(),
            soft_grace_ms: BTreeMap::new(),
            minimum_reclaim: BTreeMap::new(),
            pressure_transition_ms: 300_000,
            max_pod_grace_seconds: 0,
            local_storage_limits: true,
            kernel_memcg_notification: false,
        }
    }
}

/// The time that pods have to end before the machine shuts down (node-and-api.md §11). Without a grace period pods end with the
/// machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeShutdown {
    /// `shutdownGracePeriod` in nanoseconds: the time of all pods together.
    pub total_nanos: i64,
    /// `shutdownGracePeriodCriticalPods` in nanoseconds: the part of it that is for critical pods.
    pub critical_nanos: i64,
    /// `shutdownGracePeriodByPodPriority`, in the order of the file; takes precedence over the other two.
    pub by_priority: Vec<PriorityGracePeriod>,
}

/// The grace period of the pods from a priority on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PriorityGracePeriod {
    /// The lowest priority of its pods.
    pub priority: i32,
    /// Seconds, at least 0.
    pub seconds: i64,
}
