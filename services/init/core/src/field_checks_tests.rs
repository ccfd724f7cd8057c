use keelson_config::{FieldEffect, FieldKind, KubeletField, kubelet_fields};
use serde_json::{Map, Value, json};

use crate::gates;
use crate::inputs::Flags;
use crate::testing::{assert_refused, errors_of, host, kubelet, run};

#[test]
fn each_field_rule_names_field_value_and_remedy() {
    assert_refused(&[
        (json!({"contentType": 5}), "contentType = 5", "a string"),
        (json!({"cpuManagerPolicy": "Static"}), "cpuManagerPolicy = \"Static\"", "one of: none, static"),
        (json!({"cpuManagerPolicyOptions": {"full-pcpus-only": true}}), "full-pcpus-only = true", "quotes"),
        (json!({"cpuManagerReconcilePeriod": "10"}), "cpuManagerReconcilePeriod = \"10\"", "not a duration"),
        (
            json!({"hairpinMode": "veth"}),
            "hairpinMode = \"veth\"",
            "one of: promiscuous-bridge, hairpin-veth, none",
        ),
        (json!({"iptablesDropBit": 32}), "iptablesDropBit = 32", "from 0 to 31"),
        (json!({"iptablesMasqueradeBit": -1}), "iptablesMasqueradeBit = -1", "from 0 to 31"),
        (
            json!({"memoryManagerPolicy": "static"}),
            "memoryManagerPolicy = \"static\"",
            "one of: None, Static",
        ),
        (json!({"memoryReservationPolicy": "All"}), "\"All\"", "one of: None, TieredReservation"),
        (
            json!({"topologyManagerPolicy": "best"}),
            "\"best\"",
            "none, best-effort, restricted, single-numa-node",
        ),
        (json!({"topologyManagerScope": "node"}), "topologyManagerScope = \"node\"", "container, pod"),
    ]);
}

/// A KubeletConfiguration with this value at a dotted path.
fn with_value_at(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |inner, name| json!({name: inner}))
}

#[test]
fn every_field_without_effect_is_checked_by_its_type() {
    for field in kubelet_fields().iter().filter(|field| field.effect == FieldEffect::CheckedByType) {
        let errors = errors_of(with_value_at(field.path, json!({"x": 1})));
        assert!(errors.len() == 1 && errors[0].contains(field.path), "{}: {errors:?}", field.path);
    }
}

/// Values that have the wrong JSON type for a field, or whose entries have it.
fn wrong_values(field: &KubeletField) -> Vec<Value> {
    let is_right = |value: &Value| match field.kind {
        FieldKind::Bool => value.is_boolean(),
        FieldKind::Int(..) | FieldKind::Long(..) => value.is_i64(),
        FieldKind::Factor => value.is_number(),
        FieldKind::Text
        | FieldKind::Choice(_)
        | FieldKind::Path
        | FieldKind::Ip
        | FieldKind::Duration(..)
        | FieldKind::Period
        | FieldKind::SignedDuration => value.is_string(),
        // A quantity of the API, which may be a number, too.
        FieldKind::Quantity if field.path.ends_with(".infoBufferSize") => {
            value.is_string() || value.is_number()
        }
        FieldKind::Quantity => value.is_string(),
        FieldKind::DurationOrNanos => value.is_string() || value.is_i64(),
        FieldKind::Object => value.is_object(),
        // The entries of the lists and maps below are wrong for each of these types.
        FieldKind::Strings
        | FieldKind::Numbers
        | FieldKind::StringMap
        | FieldKind::Options
        | FieldKind::Thresholds
        | FieldKind::Gates
        | FieldKind::Headers
        | FieldKind::Taints
        | FieldKind::ReservedMemory
        | FieldKind::VModule
        | FieldKind::ShutdownPeriods => false,
    };
    let values =
        [json!(true), json!(7), json!(1.5), json!("7"), json!([true]), json!([[7]]), json!({"x": [7]})];
    values.into_iter().filter(|value| !is_right(value)).collect()
}

#[test]
fn every_field_refuses_each_wrong_json_type_with_an_error_that_names_it() {
    let gates: Map<String, Value> = kubelet_fields()
        .iter()
        .filter_map(|field| Some((field.gate?.name.to_owned(), true.into())))
        .collect();
    let mut accepted = Vec::new();
    for field in kubelet_fields() {
        let values = wrong_values(field);
        assert!(values.len() >= 4, "{}: {values:?}", field.path);
        for value in values {
            let mut fields = with_value_at(field.path, value.clone());
            if field.path != gates::FIELD {
                fields[gates::FIELD] = gates.clone().into();
            }
            let errors =
                run(&Flags::default(), Some(&kubelet(fields)), None, &host()).err().unwrap_or_default();
            let is_named = |error: &String| {
                let rest = error
                    .strip_prefix("invalid configuration: ")
                    .and_then(|rest| rest.strip_prefix(field.path));
                rest.is_some_and(|rest| rest.starts_with([' ', '.', '[']))
            };
            if !errors.iter().any(is_named) {
                accepted.push(format!("{} = {value}: {errors:?}", field.path));
            }
        }
    }
    assert!(accepted.is_empty(), "{accepted:#?}");
}

/// The feature gate, the fields that need it, and the one of them that the error names.
fn gated_fields() -> Vec<(&'static str, Value, &'static str)> {
    let by_priority = json!([{"priority": 0, "shutdownGracePeriodSeconds": 5}]);
    let never = "NeverVerifyAllowlistedImages";
    vec![
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
        ("LoggingBetaOptions", json!({"logging": {"format": "json"}}), "logging.format"),
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
    ]
}

#[test]
fn gated_fields_are_refused_without_their_feature_gate() {
    for (gate, fields, field) in gated_fields() {
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
fn fields_of_refused_feature_gates_are_refused_also_with_all_alpha() {
    for (gate, fields, field) in [
        ("MemoryQoS", json!({"memoryReservationPolicy": "TieredReservation"}), "memoryReservationPolicy"),
        ("QOSReserved", json!({"qosReserved": {"memory": "50%"}}), "qosReserved"),
    ] {
        for gates in [json!({}), json!({"AllAlpha": true}), json!({gate: true})] {
            let mut fields = fields.clone();
            fields["featureGates"] = gates.clone();
            let errors = errors_of(fields);
            let refused = |error: &&String| {
                error.starts_with(&format!("invalid configuration: {field} = "))
                    && error.contains(&format!("the feature gate {gate}, which cannot be on: "))
                    && error.ends_with("; remove this field")
            };
            assert_eq!(errors.iter().filter(refused).count(), 1, "{errors:?}");
            let by_name = format!("featureGates.{gate} = true");
            let others = usize::from(gates[gate] == true);
            assert_eq!(errors.iter().filter(|error| error.contains(&by_name)).count(), others, "{errors:?}");
            assert_eq!(errors.len(), 1 + others, "{errors:?}");
        }
    }
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
