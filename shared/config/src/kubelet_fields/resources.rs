//! Reserved resources, eviction, and the CPU, memory and topology managers.

use std::time::Duration;

use super::FieldKind::{
    Bool, Choice, Factor, Int, Options, ReservedMemory, SignedDuration, StringMap, Strings, Text, Thresholds,
};
use super::GateCondition::{NotEmpty, TextIs};
use super::{DEFAULT_THRESHOLDS, FieldKind, KubeletField, YEAR, field};

pub(super) const FIELDS: &[KubeletField] = &[
    field("cpuManagerPolicy", Choice(&["none", "static"]), "Exclusive CPUs: none or static.")
        .flag("cpu-manager-policy")
        .default_text("none")
        .empty_is_default_in_files()
        .checked_by_type(),
    field("cpuManagerPolicyOptions", Options, "An option of the CPU manager policy; repeat the flag for each.")
        .flag("cpu-manager-policy-options")
        .checked_by_type(),
    field("cpuManagerReconcilePeriod", SignedDuration, "How often the CPU sets of containers are reconciled.")
        .flag("cpu-manager-reconcile-period")
        .default_text("10s")
        .empty_is_default()
        .checked_by_type(),
    field("enforceNodeAllocatable", Strings, "Where node allocatable is enforced: pods, system-reserved, kube-reserved, their -compressible variants, or none.")
        .flag("enforce-node-allocatable")
        .default_list(&["pods"])
        .sets(&["resources.nodeAllocatable.enforce"]),
    field("evictionHard", Thresholds, "Thresholds that evict pods without a grace period.")
        .flag("eviction-hard")
        .default_map(DEFAULT_THRESHOLDS)
        .sets(&["resources.eviction.hard"]),
    field("evictionMaxPodGracePeriod", Int(0, 4_294_967_295), "The grace period, in seconds, of a pod evicted by a soft threshold.")
        .flag("eviction-max-pod-grace-period")
        .default_int(0)
        .sets(&["resources.eviction.maxPodGraceSeconds"]),
    field("evictionMinimumReclaim", StringMap, "The amount to reclaim beyond a threshold when an eviction is triggered.")
        .flag("eviction-minimum-reclaim")
        .sets(&["resources.eviction.minimumReclaim"]),
    field("evictionPressureTransitionPeriod", FieldKind::Duration(Duration::ZERO, YEAR), "How long a pressure condition lasts after the pressure has ended.")
        .flag("eviction-pressure-transition-period")
        .default_text("5m0s")
        .empty_is_default()
        .sets(&["resources.eviction.pressureTransitionMs"]),
    field("evictionSoft", Thresholds, "Thresholds that evict pods after a grace period.")
        .flag("eviction-soft")
        .sets(&["resources.eviction.soft"]),
    field("evictionSoftGracePeriod", StringMap, "The grace period of each threshold of --eviction-soft.")
        .flag("eviction-soft-grace-period")
        .sets(&["resources.eviction.softGraceMs"]),
    field("kernelMemcgNotification", Bool, "Use kernel notifications of memory thresholds.")
        .flag("kernel-memcg-notification")
        .default_bool(false)
        .sets(&["resources.eviction.kernelMemcgNotification"]),
    field("kubeReserved", StringMap, "Resources reserved for the agent and the runtime.")
        .flag("kube-reserved")
        .sets(&["resources.nodeAllocatable.kubeReserved"]),
    field("kubeReservedCgroup", Text, "The cgroup that --kube-reserved is enforced on.")
        .flag("kube-reserved-cgroup")
        .sets(&["resources.nodeAllocatable.kubeReservedCgroup"]),
    field("localStorageCapacityIsolation", Bool, "Enforce the local storage limits of pods.")
        .flag("local-storage-capacity-isolation")
        .default_bool(true)
        .sets(&["resources.eviction.localStorageLimits"]),
    field("memoryManagerPolicy", Choice(&["None", "Static"]), "Memory pinning to NUMA nodes: None or Static.")
        .flag("memory-manager-policy")
        .default_text("None")
        .empty_is_default_in_files()
        .checked_by_type(),
    field("memoryReservationPolicy", Choice(&["None", "TieredReservation"]), "How memory requests are protected by the kernel: None or TieredReservation.")
        .default_text("None")
        .empty_is_default_in_files()
        .checked_by_type()
        .gate("MemoryQoS", TextIs("TieredReservation")),
    field("memoryThrottlingFactor", Factor, "The share of a container's memory limit at which the kernel throttles it.")
        .default_float(0.9)
        .checked_by_group(),
    field("mergeDefaultEvictionSettings", Bool, "Add the default eviction thresholds to those of the same file.")
        .default_bool(false),
    field("qosReserved", StringMap, "Percentages of requests that are reserved against lower QoS classes.")
        .flag("qos-reserved")
        .gate("QOSReserved", NotEmpty)
        .checked_by_group(),
    field("reservedMemory", ReservedMemory, "Memory reserved per NUMA node.")
        .flag("reserved-memory")
        .checked_by_group(),
    field("reservedSystemCPUs", Text, "CPUs reserved for the system, such as 0-1,4.")
        .flag("reserved-cpus"),
    field("systemReserved", StringMap, "Resources reserved for the system.")
        .flag("system-reserved")
        .sets(&["resources.nodeAllocatable.systemReserved"]),
    field("systemReservedCgroup", Text, "The cgroup that --system-reserved is enforced on.")
        .flag("system-reserved-cgroup")
        .sets(&["resources.nodeAllocatable.systemReservedCgroup"]),
    field("topologyManagerPolicy", Choice(&["none", "best-effort", "restricted", "single-numa-node"]), "none, best-effort, restricted or single-numa-node.")
        .flag("topology-manager-policy")
        .default_text("none")
        .empty_is_default_in_files()
        .checked_by_type(),
    field("topologyManagerPolicyOptions", StringMap, "Options of the topology manager policy.")
        .flag("topology-manager-policy-options")
        .checked_by_type(),
    field("topologyManagerScope", Choice(&["container", "pod"]), "container or pod.")
        .flag("topology-manager-scope")
        .default_text("container")
        .empty_is_default_in_files()
        .checked_by_type(),
];
