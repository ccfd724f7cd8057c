//! A row per rule of the table of fields: the value, and its error message.

use serde_json::{Value, json};

use crate::resolve::Flags;
use crate::resolve::tests::{errors_of, host, kubelet, run};

/// The refused fields, and the parts of the message with the field and value, and with the remedy.
fn refused() -> Vec<(Value, &'static str, &'static str)> {
    vec![
        (json!({"authentication": []}), "authentication = []", "a map"),
        (json!({"authentication": {"anonymous": {"enabled": "no"}}}), "enabled = \"no\"", "true or false"),
        (json!({"authentication": {"webhook": {"cacheTTL": "2"}}}), "cacheTTL = \"2\"", "not a duration"),
        (json!({"authorization": {"mode": "RBAC"}}), "authorization.mode = \"RBAC\"", "AlwaysAllow, Webhook"),
        (
            json!({"authorization": {"webhook": {"cacheAuthorizedTTL": 5}}}),
            "cacheAuthorizedTTL = 5",
            "a string",
        ),
        (json!({"authorization": {"webhook": {"cacheUnauthorizedTTL": "x"}}}), "\"x\"", "not a duration"),
        (json!({"cgroupsPerQOS": false}), "cgroupsPerQOS = false", "enforceNodeAllocatable"),
        (
            json!({"configMapAndSecretChangeDetectionStrategy": "watch"}),
            "configMapAndSecretChangeDetectionStrategy = \"watch\"",
            "one of: Get, Cache, Watch",
        ),
        (json!({"contentType": 5}), "contentType = 5", "a string"),
        (json!({"cpuManagerPolicy": "Static"}), "cpuManagerPolicy = \"Static\"", "one of: none, static"),
        (json!({"cpuManagerPolicyOptions": {"full-pcpus-only": true}}), "full-pcpus-only = true", "quotes"),
        (json!({"cpuManagerReconcilePeriod": "10"}), "cpuManagerReconcilePeriod = \"10\"", "not a duration"),
        (json!({"enableDebuggingHandlers": "on"}), "enableDebuggingHandlers = \"on\"", "true or false"),
        (
            json!({"enableSystemLogQuery": true, "enableSystemLogHandler": false}),
            "enableSystemLogQuery = true",
            "enableSystemLogHandler: true",
        ),
        (json!({"eventBurst": -1}), "eventBurst = -1", "from 0 to 2147483647"),
        (json!({"eventRecordQPS": -1}), "eventRecordQPS = -1", "from 0 to 2147483647"),
        (
            json!({"hairpinMode": "veth"}),
            "hairpinMode = \"veth\"",
            "one of: promiscuous-bridge, hairpin-veth, none",
        ),
        (json!({"httpCheckFrequency": "often"}), "httpCheckFrequency = \"often\"", "not a duration"),
        (json!({"iptablesDropBit": 32}), "iptablesDropBit = 32", "from 0 to 31"),
        (json!({"iptablesMasqueradeBit": -1}), "iptablesMasqueradeBit = -1", "from 0 to 31"),
        (json!({"kubeAPIBurst": -1}), "kubeAPIBurst = -1", "from 0"),
        (json!({"kubeAPIQPS": -1}), "kubeAPIQPS = -1", "from 0"),
        (json!({"logging": {"flushFrequency": -1}}), "logging.flushFrequency = -1", "above 0"),
        (json!({"logging": {"flushFrequency": "soon"}}), "logging.flushFrequency = \"soon\"", "above 0"),
        (json!({"logging": {"vmodule": {}}}), "logging.vmodule = {}", "a list"),
        (
            json!({"logging": {"vmodule": [{"filePattern": "a", "verbosity": 1}, {"filePattern": "b=c"}]}}),
            "logging.vmodule[1]",
            "without '=' and ','",
        ),
        (json!({"logging": {"vmodule": [{"filePattern": "a", "verbosity": -1}]}}), "vmodule[0]", "from 0 to"),
        (
            json!({"logging": {"format": "json", "vmodule": [{"filePattern": "a", "verbosity": 1}]}}),
            "logging.vmodule",
            "text only",
        ),
        (
            json!({"logging": {"options": {"text": {"infoBufferSize": "much"}}}}),
            "logging.options.text.infoBufferSize = \"much\"",
            "a quantity such as 1Mi",
        ),
        (json!({"maxOpenFiles": -1}), "maxOpenFiles = -1", "from 0"),
        (
            json!({"memoryManagerPolicy": "static"}),
            "memoryManagerPolicy = \"static\"",
            "one of: None, Static",
        ),
        (json!({"memoryReservationPolicy": "All"}), "\"All\"", "one of: None, TieredReservation"),
        (json!({"memoryThrottlingFactor": 0}), "memoryThrottlingFactor = 0", "above 0 and at most 1"),
        (json!({"memoryThrottlingFactor": 1.01}), "memoryThrottlingFactor = 1.01", "above 0 and at most 1"),
        (json!({"nodeStatusUpdateFrequency": 10}), "nodeStatusUpdateFrequency = 10", "not a duration"),
        (json!({"oomScoreAdj": -1001}), "oomScoreAdj = -1001", "from -1000 to 1000"),
        (json!({"oomScoreAdj": 1001}), "oomScoreAdj = 1001", "from -1000 to 1000"),
        (
            json!({
                "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
                "preloadedImagesVerificationAllowlist": ["r.example:5000/*", "r.example/app", "app:1"],
            }),
            "preloadedImagesVerificationAllowlist[2] = \"app:1\"",
            "without tag and digest",
        ),
        (
            json!({
                "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
                "preloadedImagesVerificationAllowlist": ["r.example/*/app"],
            }),
            "preloadedImagesVerificationAllowlist[0]",
            "ends in /*",
        ),
        (json!({"port": 65536}), "port = 65536", "from 1 to 65535"),
        (
            json!({"featureGates": {"QOSReserved": true}, "qosReserved": {"cpu": "50%"}}),
            "qosReserved.cpu = \"50%\"",
            "only memory",
        ),
        (
            json!({"featureGates": {"QOSReserved": true}, "qosReserved": {"memory": "101%"}}),
            "qosReserved.memory = \"101%\"",
            "from 0% to 100%",
        ),
        (json!({"reservedMemory": [{"limits": {"memory": "1Gi"}}]}), "reservedMemory[0]", "numaNode"),
        (json!({"reservedMemory": [{"numaNode": 0}]}), "reservedMemory[0]", "must name memory"),
        (json!({"reservedMemory": [{"numaNode": 0, "limits": {"cpu": "1"}}]}), "[0]", "cpu cannot be"),
        (json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "0"}}]}), "[0]", "above 0"),
        (
            json!({"reservedMemory": [
                {"numaNode": 0, "limits": {"memory": "1Gi"}}, {"numaNode": 1, "limits": {"memory": "1Gi"}},
                {"numaNode": 0, "limits": {"hugepages-2Mi": "2Mi", "memory": "1Gi"}},
            ]}),
            "reservedMemory[2]",
            "memory of this node is listed twice",
        ),
        (
            json!({"reservedSystemCPUs": "0", "kubeReservedCgroup": "/kube"}),
            "reservedSystemCPUs = \"0\"",
            "excludes systemReservedCgroup and kubeReservedCgroup",
        ),
        (json!({"reservedSystemCPUs": "0", "systemReservedCgroup": "/s"}), "reservedSystemCPUs", "excludes"),
        (
            json!({"runOnce": true}),
            "runOnce = true",
            "Runonce mode has been deprecated and should not be set",
        ),
        (json!({"showHiddenMetricsForVersion": "1.34"}), "\"1.34\"", "1.35"),
        (json!({"shutdownGracePeriod": "1"}), "shutdownGracePeriod = \"1\"", "not a duration"),
        (json!({"shutdownGracePeriod": "999ms"}), "shutdownGracePeriod = \"999ms\"", "0, or at least 1s"),
        (json!({"shutdownGracePeriod": "-1s"}), "shutdownGracePeriod = \"-1s\"", "0, or at least 1s"),
        (
            json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodCriticalPods": "11s"}),
            "shutdownGracePeriodCriticalPods = \"11s\"",
            "cannot be longer",
        ),
        (
            json!({
                "shutdownGracePeriod": "10s",
                "shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": 5}],
            }),
            "shutdownGracePeriodByPodPriority",
            "exclude each other",
        ),
        (
            json!({"shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": -1}]}),
            "shutdownGracePeriodByPodPriority[0]",
            "at least 0",
        ),
        (
            json!({"tlsCipherSuites": ["TLS_AES_128_GCM_SHA256", "TLS_X"]}),
            "[1] = \"TLS_X\"",
            "names are those",
        ),
        (json!({"tlsCurvePreferences": [23, 22]}), "tlsCurvePreferences[1] = 22", "4588"),
        (json!({"tlsCurvePreferences": [29, 29]}), "tlsCurvePreferences = [29,29]", "once"),
        (json!({"tlsMinVersion": "1.3"}), "tlsMinVersion = \"1.3\"", "VersionTLS13"),
        (
            json!({"topologyManagerPolicy": "best"}),
            "\"best\"",
            "none, best-effort, restricted, single-numa-node",
        ),
        (json!({"topologyManagerScope": "node"}), "topologyManagerScope = \"node\"", "container, pod"),
        (
            json!({"tracing": {"samplingRatePerMillion": -1}}),
            "samplingRatePerMillion = -1",
            "from 0 to 1000000",
        ),
        (json!({"userNamespaces": {"idsPerPod": 65537}}), "idsPerPod = 65537", "multiple of 65536"),
        (json!({"userNamespaces": {"idsPerPod": 4_294_967_296_u64}}), "idsPerPod", "from 1 to 4294967295"),
    ]
}

#[test]
fn each_field_rule_names_field_value_and_remedy() {
    for (fields, what, remedy) in refused() {
        let errors = errors_of(fields.clone());
        assert_eq!(errors.len(), 1, "{fields}: {errors:#?}");
        let error = &errors[0];
        assert!(error.starts_with("invalid configuration: "), "{error}");
        assert!(error.contains(what), "{error} lacks {what}");
        assert!(error.contains(remedy), "{error} lacks {remedy}");
    }
}

#[test]
fn gated_fields_are_refused_without_their_feature_gate() {
    let by_priority = json!([{"priority": 0, "shutdownGracePeriodSeconds": 5}]);
    let never = "NeverVerifyAllowlistedImages";
    for (gate, fields, field) in [
        ("CustomCPUCFSQuotaPeriod", json!({"cpuCFSQuotaPeriod": "50ms"}), "cpuCFSQuotaPeriod"),
        (
            "KubeletCrashLoopBackOffMax",
            json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "60s"}}),
            "crashLoopBackOff.maxContainerRestartPeriod",
        ),
        (
            "KubeletEnsureSecretPulledImages",
            json!({"imagePullCredentialsVerificationPolicy": never}),
            "imagePullCredentialsVerificationPolicy",
        ),
        (
            "LoggingAlphaOptions",
            json!({"logging": {"options": {"json": {"splitStream": true}}}}),
            "logging.options.json.splitStream",
        ),
        (
            "LoggingAlphaOptions",
            json!({"logging": {"options": {"text": {"infoBufferSize": "1Mi"}}}}),
            "logging.options.text.infoBufferSize",
        ),
        ("MemoryQoS", json!({"memoryReservationPolicy": "TieredReservation"}), "memoryReservationPolicy"),
        ("QOSReserved", json!({"qosReserved": {"memory": "50%"}}), "qosReserved"),
        (
            "RotateKubeletServerCertificate",
            json!({
                "serverTLSBootstrap": true, "authentication": {"anonymous": {"enabled": true}},
                "authorization": {"mode": "AlwaysAllow"},
            }),
            "serverTLSBootstrap",
        ),
        (
            "GracefulNodeShutdownBasedOnPodPriority",
            json!({"shutdownGracePeriodByPodPriority": by_priority}),
            "shutdownGracePeriodByPodPriority",
        ),
    ] {
        for on in [false, true] {
            let mut fields = fields.clone();
            fields["featureGates"] = json!({gate: on});
            let result = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host());
            match result {
                Ok(_) => assert!(on, "{fields}"),
                Err(errors) => {
                    assert!(!on && errors.len() == 1, "{fields}: {errors:?}");
                    assert!(
                        errors[0].starts_with(&format!("invalid configuration: {field} = ")),
                        "{errors:?}"
                    );
                    assert!(errors[0].contains(&format!("the feature gate {gate}; ")), "{errors:?}");
                }
            }
        }
    }
    let fields = json!({
        "shutdownGracePeriod": "5s", "shutdownGracePeriodCriticalPods": "1s",
        "featureGates": {"GracefulNodeShutdown": false, "GracefulNodeShutdownBasedOnPodPriority": false},
    });
    let errors = errors_of(fields);
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("the feature gate GracefulNodeShutdown; ")));
}

#[test]
fn valid_kubelet_configurations_are_accepted() {
    for fields in [
        json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": ["none"]}),
        json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": []}),
        json!({"cpuManagerPolicy": "", "hairpinMode": "", "topologyManagerScope": "", "tlsMinVersion": ""}),
        json!({"cpuManagerPolicy": "static", "memoryManagerPolicy": "Static", "hairpinMode": "none"}),
        json!({"iptablesDropBit": 0, "iptablesMasqueradeBit": 31, "oomScoreAdj": -1000, "maxOpenFiles": 0}),
        json!({"logging": {"flushFrequency": 0, "options": {
            "json": {"infoBufferSize": "0", "splitStream": false}, "text": {"infoBufferSize": "0"},
        }}}),
        json!({"logging": {"flushFrequency": 5_000_000_000_i64, "vmodule": [{"filePattern": "a*", "verbosity": 4}]}}),
        json!({"memoryThrottlingFactor": 1, "userNamespaces": {"idsPerPod": 131_072}}),
        json!({"nodeStatusUpdateFrequency": "0s", "streamingConnectionIdleTimeout": "-1s"}),
        json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-1Gi": "2Gi"}}]}),
        json!({"reservedSystemCPUs": "0", "kubeReservedCgroup": ""}),
        json!({"runOnce": false, "showHiddenMetricsForVersion": "1.35"}),
        json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "30s"}),
        json!({"tlsCipherSuites": ["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305"], "tlsCurvePreferences": [4588, 23]}),
        json!({"port": 0, "address": "", "healthzBindAddress": "", "containerRuntimeEndpoint": ""}),
        json!({"imagePullCredentialsVerificationPolicy": "", "cgroupDriver": "", "podLogsDir": "", "logging": {"format": ""}}),
        json!({"logging": {"options": {"json": {"infoBufferSize": 0}, "text": {"infoBufferSize": null}}}}),
    ] {
        let resolved = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host());
        assert!(resolved.is_ok(), "{fields}: {resolved:?}");
    }
}

#[test]
fn all_violated_field_rules_are_reported_at_once() {
    let fields = json!({
        "eventBurst": -1, "hairpinMode": "x", "runOnce": true, "oomScoreAdj": 5000, "maxPods": -1,
        "featureGates": {"NoSuch": true, "NodeSwap": false}, "tlsCipherSuites": ["X", "Y"],
    });
    let errors = errors_of(fields);
    assert_eq!(errors.len(), 9, "{errors:#?}");
}
