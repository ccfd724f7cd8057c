//! How pods are kept running, and what they may set.

use serde::{Deserialize, Serialize};

use crate::SourceLimits;

/// How pods are kept running, and what they may set (pod-lifecycle.md §1, §15).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// Milliseconds after which a pod is synced again without a change, extended at random by up to half
    /// (`syncFrequency`).
    pub sync_frequency_ms: u64,
    /// Maximum delay in milliseconds before a container is restarted
    /// (`crashLoopBackOff.maxContainerRestartPeriod`); 1 s to 300 s.
    pub max_restart_backoff_ms: u64,
    /// First delay in milliseconds before a container is restarted (gate `ReduceDefaultCrashLoopBackOffDecay`); a lower
    /// maximum lowers it too.
    #[serde(default = "default_initial_backoff")]
    pub initial_restart_backoff_ms: u64,
    /// Whether the status of a pod has the condition `PodReadyToStartContainers` (gate
    /// `PodReadyToStartContainersCondition`).
    #[serde(default = "default_true")]
    pub ready_to_start_condition: bool,
    /// Sysctls that pods may set in addition to the safe ones: names, or prefixes with a trailing `*`
    /// (`allowedUnsafeSysctls`).
    #[serde(default)]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Containers without a seccomp profile get the runtime's default profile instead of none (`seccompDefault`).
    #[serde(default)]
    pub seccomp_default: bool,
    /// An out-of-memory kill ends only one process and not the whole container (`singleProcessOOMKill`); `None`: only on
    /// cgroup v1.
    #[serde(default)]
    pub single_process_oom_kill: Option<bool>,
    /// Containers of Burstable pods may use a part of the node's swap (`memorySwap.swapBehavior: LimitedSwap`); cgroup v2
    /// only.
    #[serde(default)]
    pub limited_swap: bool,
    /// The number of user IDs and of group IDs of a pod with a user namespace, a multiple of 65,536
    /// (`userNamespaces.idsPerPod`).
    #[serde(default = "default_ids_per_pod")]
    pub ids_per_pod: u32,
    /// What pods may use of the host, by source (`sourceLimits`, an extension of Keelson).
    #[serde(default, skip_serializing_if = "SourceLimits::is_empty")]
    pub source_limits: SourceLimits,
}

impl Pods {
    /// The first delay with the gate `ReduceDefaultCrashLoopBackOffDecay`.
    pub const REDUCED_INITIAL_RESTART_BACKOFF_MS: u64 = 1_000;
    /// The maximum delay with the gate `ReduceDefaultCrashLoopBackOffDecay`, unless a file sets it.
    pub const REDUCED_MAX_RESTART_BACKOFF_MS: u64 = 60_000;
}

/// A configuration of an earlier release has none.
const fn default_initial_backoff() -> u64 {
    10_000
}

/// The gate is on by default.
const fn default_true() -> bool {
    true
}

/// A kubelet's number; a configuration of an earlier release has none.
const fn default_ids_per_pod() -> u32 {
    65_536
}

impl Default for Pods {
    fn default() -> Self {
        Self {
            sync_frequency_ms: 60_000,
            max_restart_backoff_ms: 300_000,
            initial_restart_backoff_ms: default_initial_backoff(),
            ready_to_start_condition: true,
            allowed_unsafe_sysctls: Vec::new(),
            seccomp_default: false,
            single_process_oom_kill: None,
            limited_swap: false,
            ids_per_pod: default_ids_per_pod(),
            source_limits: SourceLimits::new(),
        }
    }
}
