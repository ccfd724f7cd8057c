//! What several readers need to know of the kubelet's own configuration file.

use serde_json::{Map, Value};

/// The API version of the kubelet's configuration.
pub const KUBELET_API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// Its kind.
pub const KUBELET_KIND: &str = "KubeletConfiguration";

/// The field of `config.json` with the effective KubeletConfiguration; also the prefix of its values in the provenance.
pub const KUBELET_CONFIGURATION: &str = "kubeletConfiguration";

/// Each leaf of `map` (any value except a non-empty map) with its path.
pub fn leaves(map: &Map<String, Value>) -> Vec<(Vec<&str>, &Value)> {
    let mut all = Vec::new();
    for (name, value) in map {
        match value {
            Value::Object(below) if !below.is_empty() => {
                all.extend(leaves(below).into_iter().map(|(mut names, value)| {
                    names.insert(0, name);
                    (names, value)
                }));
            }
            value => all.push((vec![name.as_str()], value)),
        }
    }
    all
}

/// Every field of a KubeletConfiguration of 1.36 at its top level.
pub const KUBELET_FIELDS: &[&str] = &[
    "address",
    "allowedUnsafeSysctls",
    "authentication",
    "authorization",
    "cgroupDriver",
    "cgroupRoot",
    "cgroupsPerQOS",
    "clusterDNS",
    "clusterDomain",
    "configMapAndSecretChangeDetectionStrategy",
    "containerLogMaxFiles",
    "containerLogMaxSize",
    "containerLogMaxWorkers",
    "containerLogMonitorInterval",
    "containerRuntimeEndpoint",
    "contentType",
    "cpuCFSQuota",
    "cpuCFSQuotaPeriod",
    "cpuManagerPolicy",
    "cpuManagerPolicyOptions",
    "cpuManagerReconcilePeriod",
    "crashLoopBackOff",
    "enableContentionProfiling",
    "enableControllerAttachDetach",
    "enableDebugFlagsHandler",
    "enableDebuggingHandlers",
    "enableProfilingHandler",
    "enableServer",
    "enableSystemLogHandler",
    "enableSystemLogQuery",
    "enforceNodeAllocatable",
    "eventBurst",
    "eventRecordQPS",
    "evictionHard",
    "evictionMaxPodGracePeriod",
    "evictionMinimumReclaim",
    "evictionPressureTransitionPeriod",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "failCgroupV1",
    "failSwapOn",
    "featureGates",
    "fileCheckFrequency",
    "hairpinMode",
    "healthzBindAddress",
    "healthzPort",
    "httpCheckFrequency",
    "imageGCHighThresholdPercent",
    "imageGCLowThresholdPercent",
    "imageMaximumGCAge",
    "imageMinimumGCAge",
    "imagePullCredentialsVerificationPolicy",
    "imageServiceEndpoint",
    "iptablesDropBit",
    "iptablesMasqueradeBit",
    "kernelMemcgNotification",
    "kubeAPIBurst",
    "kubeAPIQPS",
    "kubeReserved",
    "kubeReservedCgroup",
    "kubeletCgroups",
    "localStorageCapacityIsolation",
    "logging",
    "makeIPTablesUtilChains",
    "maxOpenFiles",
    "maxParallelImagePulls",
    "maxPods",
    "memoryManagerPolicy",
    "memoryReservationPolicy",
    "memorySwap",
    "memoryThrottlingFactor",
    "mergeDefaultEvictionSettings",
    "nodeLeaseDurationSeconds",
    "nodeStatusMaxImages",
    "nodeStatusReportFrequency",
    "nodeStatusUpdateFrequency",
    "oomScoreAdj",
    "podCIDR",
    "podLogsDir",
    "podPidsLimit",
    "podsPerCore",
    "port",
    "preloadedImagesVerificationAllowlist",
    "protectKernelDefaults",
    "providerID",
    "qosReserved",
    "readOnlyPort",
    "registerNode",
    "registerWithTaints",
    "registryBurst",
    "registryPullQPS",
    "reservedMemory",
    "reservedSystemCPUs",
    "resolvConf",
    "rotateCertificates",
    "runOnce",
    "runtimeRequestTimeout",
    "seccompDefault",
    "serializeImagePulls",
    "serverTLSBootstrap",
    "showHiddenMetricsForVersion",
    "shutdownGracePeriod",
    "shutdownGracePeriodByPodPriority",
    "shutdownGracePeriodCriticalPods",
    "singleProcessOOMKill",
    "staticPodPath",
    "staticPodURL",
    "staticPodURLHeader",
    "streamingConnectionIdleTimeout",
    "syncFrequency",
    "systemCgroups",
    "systemReserved",
    "systemReservedCgroup",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
    "topologyManagerPolicy",
    "topologyManagerPolicyOptions",
    "topologyManagerScope",
    "tracing",
    "userNamespaces",
    "volumePluginDir",
    "volumeStatsAggPeriod",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_found_at_any_depth_and_an_empty_map_is_one() {
        let document = serde_json::json!({"a": {"b.c": 1, "d": {"e": [1]}}, "f": {}, "g": null});
        let found: Vec<(String, String)> = leaves(document.as_object().unwrap())
            .into_iter()
            .map(|(names, value)| (names.join("/"), value.to_string()))
            .collect();
        let expected = [("a/b.c", "1"), ("a/d/e", "[1]"), ("f", "{}"), ("g", "null")];
        assert_eq!(found, expected.map(|(names, value)| (names.to_owned(), value.to_owned())));
    }

    #[test]
    fn the_known_fields_are_sorted_and_unique() {
        assert!(KUBELET_FIELDS.is_sorted_by(|a, b| a < b));
        assert_eq!(KUBELET_FIELDS.len(), 125, "a field of the spec's table is missing or too much");
    }
}
