use super::*;
use keelson_config::{KUBELET_API_VERSION, KUBELET_KIND};

fn document(fields: Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), KUBELET_API_VERSION.into());
    root.insert("kind".into(), KUBELET_KIND.into());
    Document { file: "kubelet.yaml".into(), folder: "/etc/k".into(), root, ..Document::default() }
}

fn of(fields: Value) -> Map<String, Value> {
    effective(Some(&document(fields)), true, &Config::default())
}

/// Fields in the table of the spec that have no default (node-and-api.md §2.5).
const UNSET: &[&str] = &[
    "allowedUnsafeSysctls",
    "clusterDNS",
    "clusterDomain",
    "cpuManagerPolicyOptions",
    "evictionMinimumReclaim",
    "evictionSoft",
    "evictionSoftGracePeriod",
    "featureGates",
    "imageServiceEndpoint",
    "kubeReserved",
    "kubeReservedCgroup",
    "kubeletCgroups",
    "maxParallelImagePulls",
    "podCIDR",
    "preloadedImagesVerificationAllowlist",
    "providerID",
    "qosReserved",
    "registerWithTaints",
    "reservedMemory",
    "reservedSystemCPUs",
    "showHiddenMetricsForVersion",
    "shutdownGracePeriodByPodPriority",
    "singleProcessOOMKill",
    "staticPodPath",
    "staticPodURL",
    "staticPodURLHeader",
    "systemCgroups",
    "systemReserved",
    "systemReservedCgroup",
    "tlsCertFile",
    "tlsCipherSuites",
    "tlsCurvePreferences",
    "tlsMinVersion",
    "tlsPrivateKeyFile",
    "topologyManagerPolicyOptions",
    "tracing",
];

#[test]
fn every_kubelet_configuration_field_has_its_default_or_none() {
    let whole = of(json!({}));
    for field in KUBELET_FIELDS.iter() {
        assert_ne!(whole.contains_key(*field), UNSET.contains(field), "{field}");
    }
    let known = |field: &String| {
        KUBELET_FIELDS.contains(&field.as_str()) || ["apiVersion", "kind"].contains(&field.as_str())
    };
    assert!(whole.keys().all(known), "{:?}", whole.keys().filter(|f| !known(f)).collect::<Vec<_>>());
}

#[test]
fn fields_of_a_file_override_the_defaults_within_nested_objects() {
    let whole = of(json!({
        "maxPods": 7, "syncFrequency": "90s", "featureGates": {"A": true}, "kubeReserved": {"cpu": "100m"},
        "authentication": {"anonymous": {"enabled": true}}, "clusterDNS": ["10.0.0.10"], "eventBurst": null,
        "fileCheckFrequency": "3s", "unheardOf": 1,
    }));
    assert_eq!((&whole["maxPods"], &whole["featureGates"]), (&json!(7), &json!({"A": true})));
    assert_eq!(
        (&whole["kubeReserved"], &whole["clusterDNS"]),
        (&json!({"cpu": "100m"}), &json!(["10.0.0.10"]))
    );
    assert_eq!((&whole["syncFrequency"], &whole["fileCheckFrequency"]), (&json!("1m30s"), &json!("3s")));
    assert_eq!(whole["authentication"]["anonymous"], json!({"enabled": true}));
    assert_eq!(whole["authentication"]["webhook"], json!({"enabled": true, "cacheTTL": "2m0s"}));
    assert_eq!(whole["eventBurst"], json!(100));
    assert!(!whole.contains_key("unheardOf"));
}

#[test]
fn eviction_thresholds_are_those_of_the_file_or_the_defaults() {
    let own = json!({"memory.available": "1Gi"});
    assert_eq!(of(json!({"evictionHard": own}))["evictionHard"], own);
    assert_eq!(of(json!({}))["evictionHard"].as_object().unwrap().len(), 5);
    assert!(!effective(None, false, &Config::default()).contains_key("evictionHard"));
}

#[test]
fn without_a_file_authentication_defaults_are_those_of_a_kubelet() {
    let whole = effective(None, false, &Config::default());
    assert_eq!(whole["authentication"]["anonymous"]["enabled"], true);
    assert_eq!(whole["authentication"]["webhook"], json!({"enabled": false, "cacheTTL": "2m0s"}));
    assert_eq!(whole["authorization"]["mode"], "AlwaysAllow");
    assert_eq!(of(json!({}))["authorization"]["mode"], "Webhook");
}

#[test]
fn effective_configuration_has_flags_and_the_agents_own_defaults() {
    let mut config = Config::default();
    config.sources.static_pod_path = Some("/from/flag".into());
    config.runtime.endpoint = "unix:///run/other.sock".into();
    config.logging.format = "json".into();
    let file = document(json!({"staticPodPath": "manifests", "containerRuntimeEndpoint": "unix:///a"}));
    let whole = effective(Some(&file), true, &config);
    assert_eq!((&whole["staticPodPath"], &whole["address"]), (&json!("/from/flag"), &json!("127.0.0.1")));
    assert_eq!(whole["containerRuntimeEndpoint"], "unix:///run/other.sock");
    assert_eq!(whole["logging"]["format"], "json");
}

#[test]
fn effective_configuration_has_absolute_paths() {
    let whole = of(json!({
        "podLogsDir": "logs", "volumePluginDir": "/abs", "authentication": {"x509": {"clientCAFile": "./ca.pem"}},
    }));
    assert_eq!((&whole["podLogsDir"], &whole["volumePluginDir"]), (&json!("/etc/k/logs"), &json!("/abs")));
    assert_eq!(whole["authentication"]["x509"]["clientCAFile"], "/etc/k/ca.pem");
}

#[test]
fn defaults_that_depend_on_other_fields_follow_them() {
    assert_eq!(of(json!({"nodeLeaseDurationSeconds": 0}))["nodeLeaseDurationSeconds"], 40);
    assert_eq!(of(json!({"maxParallelImagePulls": 3}))["serializeImagePulls"], false);
    assert_eq!(of(json!({"maxParallelImagePulls": 1}))["serializeImagePulls"], true);
}

#[test]
fn zero_durations_and_empty_strings_mean_the_default() {
    let whole = of(json!({
        "syncFrequency": "0s", "nodeStatusUpdateFrequency": "0s", "nodeStatusReportFrequency": "0s", "port": 0,
        "authentication": {"webhook": {"cacheTTL": "0s"}}, "imageMaximumGCAge": "0s", "hairpinMode": "", "resolvConf": "",
        "imagePullCredentialsVerificationPolicy": "",
    }));
    assert_eq!(whole["imagePullCredentialsVerificationPolicy"], "NeverVerifyPreloadedImages");
    assert_eq!((&whole["hairpinMode"], &whole["resolvConf"]), (&json!("promiscuous-bridge"), &json!("")));
    assert_eq!((&whole["syncFrequency"], &whole["port"]), (&json!("1m0s"), &json!(10250)));
    assert_eq!(whole["nodeStatusUpdateFrequency"], "10s");
    assert_eq!(whole["nodeStatusReportFrequency"], "5m0s");
    assert_eq!(whole["authentication"]["webhook"]["cacheTTL"], "2m0s");
    assert_eq!(whole["imageMaximumGCAge"], "0s", "no limit");
}

#[test]
fn manifest_url_header_values_are_masked() {
    let whole = of(json!({"staticPodURLHeader": {"Authorization": ["Bearer secret"], "X": ["secret", "b"]}}));
    assert_eq!(whole["staticPodURLHeader"], json!({"Authorization": ["<masked>"], "X": ["<masked>"]}));
    let odd = of(json!({"staticPodURLHeader": "secret"}));
    assert!(!serde_json::to_string(&odd).unwrap().contains("secret"));
}

#[test]
fn effective_configuration_resolves_to_itself() {
    let first = of(json!({
        "maxPods": 7, "evictionHard": {"memory.available": "1Gi"}, "syncFrequency": "1h1ms", "podLogsDir": "logs",
        "nodeStatusUpdateFrequency": "4s", "maxParallelImagePulls": 3,
    }));
    let again = Document { root: first.clone(), folder: "/elsewhere".into(), ..Document::default() };
    assert_eq!(effective(Some(&again), true, &Config::default()), first);
}

#[test]
fn effective_configuration_is_a_valid_file() {
    use crate::{Flags, Host, Inputs, resolve};

    let host =
        Host { hostname: "edge".into(), memory_bytes: 8 << 30, nodefs_bytes: 1 << 40, ..Host::default() };
    let run = |kubelet: Option<&Document>| {
        resolve(Inputs { flags: &Flags::default(), kubelet, drop_ins: &[], keelson: None, host: &host })
            .unwrap()
    };
    for first in [run(None), run(Some(&document(json!({"maxPods": 7, "fileCheckFrequency": "3s"}))))] {
        let file = Document { root: first.kubelet_configuration.clone(), ..Document::default() };
        let second = run(Some(&file));
        for field in ["maxPods", "fileCheckFrequency", "address", "authentication", "logging"] {
            assert_eq!(second.kubelet_configuration[field], first.kubelet_configuration[field], "{field}");
        }
        assert_eq!(second.config.resources.max_pods, first.config.resources.max_pods);
        assert_eq!(second.config.sources, first.config.sources);
    }
}

/// Whether there is an API server, the file, and the expected values of `authentication.webhook.enabled`, `authorization.mode` and
/// `authentication.anonymous.enabled`.
type AuthenticationCase = (bool, Option<Value>, bool, &'static str, bool);

fn authentication_cases() -> Vec<AuthenticationCase> {
    let x509 = json!({"clientCAFile": "/ca"});
    let open = json!({"x509": x509, "anonymous": {"enabled": true}, "webhook": {"enabled": false}});
    let tls = json!({"tlsCertFile": "a.crt", "tlsPrivateKeyFile": "a.key", "tlsMinVersion": "VersionTLS12",
        "tlsCipherSuites": ["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"], "tlsCurvePreferences": [29, 23],
        "authentication": {"anonymous": {"enabled": true}}, "authorization": {"mode": "AlwaysAllow"}});
    vec![
        (true, Some(json!({})), true, "Webhook", false),
        (
            true,
            Some(json!({"authentication": {"x509": x509}, "serverTLSBootstrap": true})),
            true,
            "Webhook",
            false,
        ),
        (true, Some(json!({"authentication": open})), false, "Webhook", true),
        (
            true,
            Some(
                json!({"authentication": {"webhook": {"cacheTTL": "7s"}}, "authorization": {"mode": "AlwaysAllow"}}),
            ),
            true,
            "AlwaysAllow",
            false,
        ),
        (true, Some(tls.clone()), true, "AlwaysAllow", true),
        (false, Some(tls), false, "AlwaysAllow", true),
        (
            false,
            Some(json!({"authentication": {"x509": x509}, "authorization": {"mode": "AlwaysAllow"}})),
            false,
            "AlwaysAllow",
            false,
        ),
        // Without a file, anonymous requests are allowed, as by a kubelet.
        (true, None, false, "AlwaysAllow", true),
    ]
}

#[test]
fn effective_authentication_and_authorization_resolve_to_themselves() {
    use crate::{Flags, Host, Inputs, resolve};

    let host = Host { hostname: "edge".into(), cwd: "/srv".into(), ..Host::default() };
    let run = |in_a_cluster: bool, kubelet: Option<&Document>| {
        let mut flags = Flags::default();
        if in_a_cluster {
            flags.others.insert("kubeconfig", "/etc/kubernetes/kubelet.conf".to_owned());
        }
        resolve(Inputs { flags: &flags, kubelet, drop_ins: &[], keelson: None, host: &host }).unwrap()
    };
    for (in_a_cluster, file, tokens, mode, anonymous) in authentication_cases() {
        let given = file.clone().map(document);
        let first = run(in_a_cluster, given.as_ref());
        let shown = &first.kubelet_configuration;
        assert_eq!(shown["authentication"]["webhook"]["enabled"], tokens, "{file:?}");
        assert_eq!(shown["authentication"]["anonymous"]["enabled"], anonymous, "{file:?}");
        assert_eq!(
            (&shown["authorization"]["mode"], &shown["address"]),
            (&json!(mode), &json!("0.0.0.0")),
            "{file:?}"
        );
        let in_force = first.config.api.tls.as_ref().unwrap();
        assert_eq!(
            (in_force.tokens, in_force.reviews, in_force.anonymous),
            (tokens, mode == "Webhook", anonymous),
            "{file:?}"
        );
        let again = Document { root: shown.clone(), folder: "/elsewhere".into(), ..Document::default() };
        let second = run(in_a_cluster, Some(&again));
        assert_eq!(second.config.api, first.config.api, "{file:?}");
        if file.is_some() {
            assert_eq!(&second.kubelet_configuration, shown, "{file:?}");
        }
    }
}
