//! Pods: their sources, limits, DNS, volumes and security settings.

use std::time::Duration;

use super::FieldKind::{
    Bool, Choice, Headers, Int, Long, Object, Path, Period, SignedDuration, Strings, Text,
};
use super::GateCondition::{DurationOtherThan, Set};
use super::{FieldKind, KubeletField, MILLION, YEAR, field};
use crate::ServiceName::PodSync;

pub(super) const FIELDS: &[KubeletField] = &[
    field(
        "allowedUnsafeSysctls",
        Strings,
        "Unsafe sysctls that pods may set; a trailing * matches any suffix.",
    )
    .flag("allowed-unsafe-sysctls")
    .sets(&["pods.allowedUnsafeSysctls"]),
    field("clusterDNS", Strings, "The name servers of pods whose dnsPolicy is ClusterFirst.")
        .flag("cluster-dns")
        .sets(&["runtime.clusterDns"])
        .restarts(&[PodSync]),
    field("clusterDomain", Text, "The domain of the cluster, searched by pods.")
        .flag("cluster-domain")
        .sets(&["runtime.clusterDomain"])
        .restarts(&[PodSync]),
    field("cpuCFSQuota", Bool, "Enforce the CPU limits of containers.")
        .flag("cpu-cfs-quota")
        .default_bool(true)
        .sets(&["resources.cpuCfsQuota"]),
    field(
        "cpuCFSQuotaPeriod",
        FieldKind::Duration(Duration::from_millis(1), Duration::from_secs(1)),
        "The CFS period of CPU limits, from 1ms to 1s.",
    )
    .flag("cpu-cfs-quota-period")
    .default_text("100ms")
    .sets(&["resources.cpuCfsPeriodUs"])
    .gate("CustomCPUCFSQuotaPeriod", DurationOtherThan("100ms")),
    field("crashLoopBackOff", Object, "The delay before a container is restarted.").default_map(&[]),
    field(
        "crashLoopBackOff.maxContainerRestartPeriod",
        FieldKind::Duration(Duration::from_secs(1), Duration::from_secs(300)),
        "The longest delay before a container is restarted.",
    )
    .sets(&["pods.maxRestartBackoffMs"])
    .gate("KubeletCrashLoopBackOffMax", Set),
    field("fileCheckFrequency", Period, "How often the folder of static pods is read without a change.")
        .flag("file-check-frequency")
        .default_text("20s")
        .empty_is_default()
        .sets(&["sources.fileCheckMs"]),
    field(
        "hairpinMode",
        Choice(&["promiscuous-bridge", "hairpin-veth", "none"]),
        "promiscuous-bridge, hairpin-veth or none.",
    )
    .flag("hairpin-mode")
    .default_text("promiscuous-bridge")
    .empty_is_default_in_files()
    .checked_by_type(),
    field("httpCheckFrequency", Period, "How often the manifests of --manifest-url are fetched.")
        .flag("http-check-frequency")
        .default_text("20s")
        .empty_is_default()
        .sets(&["sources.httpCheckMs"]),
    field("maxPods", Int(0, MILLION), "How many pods may run here.")
        .flag("max-pods")
        .default_int(110)
        .sets(&["resources.maxPods"]),
    field("memorySwap", Object, "The use of swap by pods.").default_map(&[]),
    field(
        "memorySwap.swapBehavior",
        Choice(&["", "NoSwap", "LimitedSwap"]),
        "NoSwap, or LimitedSwap to let Burstable pods use a part of the node's swap.",
    )
    .sets(&["pods.limitedSwap"]),
    field("podCIDR", Text, "The addresses of pods, without a control plane.")
        .flag("pod-cidr")
        .checked_by_type(),
    field("podLogsDir", Path, "The folder of the pods' log files.")
        .default_text("/var/log/pods")
        .empty_is_default_in_files()
        .sets(&["paths.podLogsDir"]),
    field(
        "podPidsLimit",
        Long(i64::MIN, i64::MAX),
        "The limit of processes in a pod; negative: no limit below the node's.",
    )
    .flag("pod-max-pids")
    .default_int(-1)
    .sets(&["resources.podPidsLimit"])
    .shows_resolved(),
    field("podsPerCore", Int(0, MILLION), "The limit of pods per core; 0: only --max-pods applies.")
        .flag("pods-per-core")
        .default_int(0)
        .sets(&["resources.podsPerCore"]),
    field("resolvConf", Path, "The resolver configuration file for pods; empty: none.")
        .flag("resolv-conf")
        .default_text("/etc/resolv.conf")
        .sets(&["runtime.resolvConf"])
        .restarts(&[PodSync]),
    field("runOnce", Bool, "Refused when true: use keelson run --once instead.")
        .flag("runonce")
        .default_bool(false)
        .checked_by_type(),
    field("seccompDefault", Bool, "Use the seccomp profile RuntimeDefault for containers without one.")
        .default_bool(false)
        .sets(&["pods.seccompDefault"]),
    field(
        "singleProcessOOMKill",
        Bool,
        "Let an out-of-memory kill end only one process of a container; unset: only on cgroup v1.",
    )
    .sets(&["pods.singleProcessOomKill"]),
    field("staticPodPath", Path, "A folder or file with static pods.")
        .flag("pod-manifest-path")
        .empty_is_unset()
        .sets(&["sources.staticPodPath"])
        .shows_resolved(),
    field("staticPodURL", Text, "A URL with manifests of static pods.")
        .flag("manifest-url")
        .empty_is_unset()
        .sets(&["sources.staticPodUrl"])
        .shows_resolved(),
    field("staticPodURLHeader", Headers, "Headers of the requests to --manifest-url.")
        .flag("manifest-url-header")
        .sets(&["sources.staticPodUrlHeaders"])
        .secret(),
    field(
        "syncFrequency",
        FieldKind::Duration(Duration::ZERO, YEAR),
        "How often each pod is synced without a change.",
    )
    .flag("sync-frequency")
    .default_text("1m0s")
    .empty_is_default()
    .sets(&["pods.syncFrequencyMs"]),
    field("userNamespaces", Object, "User namespaces of pods."),
    field(
        "userNamespaces.idsPerPod",
        Int(1, 4_294_967_295),
        "The number of user IDs, and of group IDs, of a pod with a user namespace, a multiple of 65536.",
    )
    .default_int(65_536)
    .sets(&["pods.idsPerPod"]),
    field("volumePluginDir", Path, "The folder of flexvolume plugins.")
        .flag("volume-plugin-dir")
        .default_text("/usr/libexec/kubernetes/kubelet-plugins/volume/exec/")
        .empty_is_default()
        .sets(&["volumes.pluginDir"]),
    field("volumeStatsAggPeriod", SignedDuration, "How often volumes are measured; negative: never.")
        .flag("volume-stats-agg-period")
        .default_text("1m0s")
        .empty_is_default()
        .sets(&["volumes.statsPeriodMs"]),
];
