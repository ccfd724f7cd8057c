use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use crate::{ApiTls, CipherSuite, Config, ControlPlane, Etcd, KeyExchange, Kubernetes, Taint, Tracing};

#[test]
fn the_kubelet_fields_are_those_of_release_1_36() {
    assert_eq!(*KUBELET_FIELDS, NAMES);
    assert_eq!(NAMES.len(), 125, "a field of the spec's table is missing or too much");
    let nested: BTreeSet<&str> =
        kubelet_fields().iter().map(|field| field.path).filter(|path| path.contains('.')).collect();
    assert_eq!(nested, NESTED.iter().copied().collect());
}

#[test]
fn each_kubelet_field_has_a_sentence_and_each_nested_one_a_row_for_its_object() {
    let paths: BTreeSet<&str> = kubelet_fields().iter().map(|field| field.path).collect();
    assert_eq!(paths.len(), kubelet_fields().len(), "a field has two rows");
    for field in kubelet_fields() {
        assert!(field.doc.ends_with('.'), "{}", field.path);
        if let Some((object, _)) = field.path.rsplit_once('.') {
            assert_eq!(kubelet_field(object).map(|object| object.kind), Some(FieldKind::Object), "{object}");
        }
    }
}

#[test]
fn kubelet_fields_with_effect_set_a_value_and_others_do_not() {
    for field in kubelet_fields() {
        assert!(field.effect == FieldEffect::Full || field.sets.is_empty(), "{}", field.path);
        assert!(field.change.is_none() || !field.sets.is_empty(), "{}", field.path);
        assert!(!field.shows_resolved || !field.sets.is_empty(), "{}", field.path);
    }
}

/// Rows with an effect that set no value of the resolved configuration, with what has the effect instead.
const WITHOUT_VALUE: &[(&str, &str)] = &[
    ("failCgroupV1", "init checks it and passes nothing on"),
    ("failSwapOn", "init checks it and passes nothing on"),
    ("featureGates", "config.json lists the gates next to the values"),
    ("mergeDefaultEvictionSettings", "it decides about the value of evictionHard"),
    ("reservedSystemCPUs", "their number replaces the cpu of systemReserved and kubeReserved"),
];

#[test]
fn each_kubelet_field_with_effect_sets_a_value_or_is_a_known_exception() {
    let is_object_with_effect = |object: &KubeletField| {
        let prefix = format!("{}.", object.path);
        let mut nested = kubelet_fields().iter().filter(|field| field.path.starts_with(&prefix));
        object.kind == FieldKind::Object && nested.any(|field| field.effect == FieldEffect::Full)
    };
    let others: Vec<&str> = kubelet_fields()
        .iter()
        .filter(|field| field.effect == FieldEffect::Full && field.sets.is_empty())
        .filter(|field| !is_object_with_effect(field))
        .map(|field| field.path)
        .collect();
    assert_eq!(others, WITHOUT_VALUE.iter().map(|(path, _)| *path).collect::<Vec<_>>());
    assert!(WITHOUT_VALUE.iter().all(|(_, reason)| !reason.is_empty()));
}

/// A configuration with this control plane and every optional value that a field sets, as in `config.json`.
fn full_config(control_plane: ControlPlane) -> Value {
    let tls = ApiTls {
        cert_file: Some("/cert".into()),
        key_file: Some("/key".into()),
        cipher_suites: CipherSuite::ALL.into(),
        key_exchanges: KeyExchange::ALL.into(),
        ..ApiTls::with_client_ca("/ca".into())
    };
    let tracing = Tracing { endpoint: "http://h".into(), sampling_rate_per_million: 1 };
    let mut config = Config { control_plane, tracing: Some(tracing), ..Config::default() };
    config.api.tls = Some(tls);
    config.runtime.image_endpoint = Some("unix:///i".into());
    config.sources.static_pod_path = Some("/m".into());
    config.sources.static_pod_url = Some("http://h".into());
    serde_json::to_value(config).unwrap()
}

#[test]
fn each_value_that_a_kubelet_field_sets_is_in_the_resolved_configuration() {
    // Only init knows these; they are never in config.json.
    const SECRET: &str = "sources.staticPodUrlHeaders";
    let taint = Taint { key: "k".into(), value: String::new(), effect: "NoSchedule".into() };
    let kubernetes =
        Kubernetes { taints: vec![taint], provider_id: Some("p".into()), ..Kubernetes::of("/k".into()) };
    let configs =
        [ControlPlane::Kubernetes(kubernetes), ControlPlane::Etcd(Etcd::plain(vec!["http://e".into()]))]
            .map(full_config);
    let is_in = |config: &Value, path: &str| {
        path.split('.').try_fold(config, |value, name| value.get(name)).is_some()
    };
    for field in kubelet_fields() {
        for path in field.sets {
            let exists = configs.iter().any(|config| is_in(config, path));
            assert_eq!(exists, *path != SECRET, "{} sets {path}", field.path);
            assert!(exists || field.secret, "{}", field.path);
        }
    }
}

#[test]
fn enclosing_fields_are_listed_from_the_inside_out() {
    let paths = |path| enclosing_fields(path).map(|field| field.path).collect::<Vec<_>>();
    assert_eq!(paths("logging.vmodule[1].verbosity"), ["logging.vmodule", "logging"]);
    assert_eq!(paths("evictionHard.memory.available"), ["evictionHard"]);
    assert_eq!(paths("unheardOf"), Vec::<&str>::new());
}

/// The names of all fields at the top level, as the API of 1.36 has them; not derived from the table.
const NAMES: &[&str] = &[
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

/// The fields of objects in it; entries of lists are not part of the table.
const NESTED: &[&str] = &[
    "authentication.anonymous",
    "authentication.anonymous.enabled",
    "authentication.webhook",
    "authentication.webhook.cacheTTL",
    "authentication.webhook.enabled",
    "authentication.x509",
    "authentication.x509.clientCAFile",
    "authorization.mode",
    "authorization.webhook",
    "authorization.webhook.cacheAuthorizedTTL",
    "authorization.webhook.cacheUnauthorizedTTL",
    "crashLoopBackOff.maxContainerRestartPeriod",
    "logging.flushFrequency",
    "logging.format",
    "logging.options",
    "logging.options.json",
    "logging.options.json.infoBufferSize",
    "logging.options.json.splitStream",
    "logging.options.text",
    "logging.options.text.infoBufferSize",
    "logging.options.text.splitStream",
    "logging.verbosity",
    "logging.vmodule",
    "memorySwap.swapBehavior",
    "tracing.endpoint",
    "tracing.samplingRatePerMillion",
    "userNamespaces.idsPerPod",
];
