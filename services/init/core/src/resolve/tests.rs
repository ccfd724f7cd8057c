use std::collections::BTreeMap;

use keelson_config::ControlPlane;
use serde_json::{Value, json};

use super::*;
use crate::inputs::Flags;
use crate::testing::{
    document, errors_of, etcd, fields, host, keelson, kubelet, run, with_keelson, with_kubelet,
};

#[test]
fn without_settings_the_configuration_is_the_default() {
    let resolved = run(&Flags::default(), None, None, &host()).unwrap();
    let mut expected = Config { node_name: "edge-1".into(), ..Config::default() };
    expected.paths.bin_dir = "/opt/keelson/bin".into();
    expected.users.operator_gid = 64_200;
    let uids = [("pod-config", 64_201), ("pod-sync", 64_205), ("node-status", 64_206), ("node-api", 64_207)];
    expected.users.uids = uids.into_iter().map(|(name, uid)| (name.to_owned(), uid)).collect();
    assert_eq!(resolved.config, expected);
    assert!(resolved.config.provenance.is_empty());
}

#[test]
fn every_supported_kubelet_configuration_field_is_applied() {
    let config = with_kubelet(json!({
        "staticPodPath": "manifests", "containerRuntimeEndpoint": "unix:///run/c.sock",
        "fileCheckFrequency": "1m30s", "address": "::1", "port": 11250, "readOnlyPort": 11255, "healthzBindAddress": "0.0.0.0",
        "healthzPort": 0, "maxPods": 250, "cgroupDriver": "systemd", "cgroupRoot": "/pods.slice",
        "podLogsDir": "/var/log/k", "clusterDNS": ["10.0.0.10"], "clusterDomain": "cluster.local",
        "resolvConf": "/run/resolv.conf", "runtimeRequestTimeout": "30s", "podPidsLimit": 4096,
        "cpuCFSQuota": false, "cpuCFSQuotaPeriod": "50ms", "maxParallelImagePulls": 4,
        "serializeImagePulls": false, "kubeReserved": {"cpu": "100m"}, "systemReserved": {"cpu": "200m"},
        "evictionHard": {"memory.available": "200Mi"}, "failCgroupV1": false, "logging": {"format": "json"},
        "makeIPTablesUtilChains": false,
    }));
    assert!(!config.iptables_util_chains);
    assert_eq!(config.sources.static_pod_path.unwrap().to_str(), Some("/etc/k/manifests"));
    assert_eq!(config.sources.file_check_ms, 90_000);
    let runtime = &config.runtime;
    assert_eq!((runtime.endpoint.as_str(), runtime.request_timeout_ms), ("unix:///run/c.sock", 30_000));
    assert_eq!((runtime.cgroup_driver.as_str(), runtime.cgroup_root.as_str()), ("systemd", "/pods.slice"));
    assert_eq!((runtime.max_parallel_pulls, runtime.resolv_conf.as_str()), (4, "/run/resolv.conf"));
    assert_eq!(
        (runtime.cluster_dns.as_slice(), runtime.cluster_domain.as_str()),
        (&["10.0.0.10".to_owned()][..], "cluster.local")
    );
    let api = &config.api;
    assert_eq!((api.address.as_str(), api.ports()), ("::1", [11250, 11255]));
    assert_eq!((api.healthz_address.as_str(), api.healthz_port), ("0.0.0.0", 0));
    let resources = &config.resources;
    assert_eq!((resources.max_pods, resources.pod_pids_limit), (250, 4096));
    assert_eq!((resources.cpu_cfs_quota, resources.cpu_cfs_period_us), (false, 50_000));
    let reserved: Vec<String> = resources.reserved.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(reserved, ["cpu=300m", "memory=200Mi"]);
    assert_eq!(config.paths.pod_logs_dir.to_str(), Some("/var/log/k"));
    assert_eq!(config.logging.format, "json");
}

#[test]
fn every_keelson_configuration_field_is_applied() {
    let config = with_keelson(json!({
        "runDir": "/run/k2", "stateDir": "/var/lib/k2", "containerLinksDir": "/var/log/k2", "binDir": "/opt/k2",
        "controlPlane": "none", "uidBase": 70000, "operatorGid": 71000, "sandboxImage": "pause:3",
        "startParallelism": 16, "relistPeriod": "5m", "manageHost": false, "strictVerbs": true,
        "systemBusAddress": "unix:path=/run/bus",
        "logging": {"format": "json", "level": "warn,keelson_pod_sync=debug"},
        "tracing": {"endpoint": "http://127.0.0.1:4317", "samplingRatePerMillion": 1000},
    }));
    let paths = &config.paths;
    let folders = [&paths.run_dir, &paths.state_dir, &paths.container_links_dir, &paths.bin_dir];
    assert_eq!(folders.map(|p| p.to_str().unwrap()), ["/run/k2", "/var/lib/k2", "/var/log/k2", "/opt/k2"]);
    assert_eq!((config.users.operator_gid, config.users.uids["pod-config"]), (71000, 70001));
    assert_eq!(config.runtime.sandbox_image.as_deref(), Some("pause:3"));
    assert_eq!((config.runtime.start_parallelism, config.runtime.relist_period_ms), (16, 300_000));
    assert!(!config.manage_host && config.api.strict_verbs);
    assert_eq!(config.resources.system_bus.socket.to_str(), Some("/run/bus"));
    assert_eq!(
        (config.logging.format.as_str(), config.logging.level.as_str()),
        ("json", "warn,keelson_pod_sync=debug")
    );
    let tracing = config.tracing.unwrap();
    assert_eq!(
        (tracing.endpoint.as_str(), tracing.sampling_rate_per_million),
        ("http://127.0.0.1:4317", 1000)
    );
}

#[test]
fn flags_override_kubelet_config_which_overrides_keelson_config() {
    let flags = Flags {
        fields: fields(&["--pod-manifest-path", "pods"]),
        run_dir: Some("/run/flag".into()),
        hostname_override: Some(" Node-A ".into()),
        node_labels: vec!["zone=a".into()],
        ..Flags::default()
    };
    let kubelet = kubelet(json!({"staticPodPath": "/etc/pods", "logging": {"format": "json"}}));
    let keelson =
        keelson(json!({"runDir": "/run/file", "stateDir": "/var/lib/file", "logging": {"format": "text"}}));
    let config = run(&flags, Some(&kubelet), Some(&keelson), &host()).unwrap().config;
    assert_eq!(config.sources.static_pod_path.unwrap().to_str(), Some("/srv/pods"));
    assert_eq!(config.paths.run_dir.to_str(), Some("/run/flag"));
    assert_eq!(config.logging.format, "json");
    assert_eq!(config.node_name, "node-a");
    let of = |path: &str| config.provenance.get(path).map(String::as_str);
    assert_eq!(of("sources.staticPodPath"), Some("--pod-manifest-path"));
    assert_eq!(of("paths.runDir"), Some("--run-dir"));
    assert_eq!(of("nodeName"), Some("--hostname-override"));
    assert_eq!(of("resources.nodeLabels"), Some("--node-labels"));
    assert_eq!(of("paths.stateDir"), Some("keelson.yaml:4"));
    assert_eq!(of("logging.format"), Some("kubelet.yaml"));
    assert_eq!(of("runtime.endpoint"), None, "a default has no provenance");
}

#[test]
fn invalid_kubelet_fields_are_reported_with_value_origin_and_remedy() {
    let cases = [
        (
            json!({"fileCheckFrequency": "20"}),
            r#"fileCheckFrequency = "20" (kubelet.yaml:3; --file-check-frequency)"#,
            "20s or 1m30s",
        ),
        (json!({"fileCheckFrequency": 20}), "fileCheckFrequency = 20", "20s or 1m30s"),
        (json!({"cpuCFSQuotaPeriod": "2s"}), r#"cpuCFSQuotaPeriod = "2s""#, "from 1ms to 1s"),
        (json!({"port": 70000}), "port = 70000", "from 1 to 65535"),
        (json!({"port": "10250"}), r#"port = "10250""#, "whole number"),
        (json!({"maxPods": -1}), "maxPods = -1", "from 0"),
        (
            json!({"address": "0.0.0.0"}),
            r#"address = "0.0.0.0""#,
            "without TLS clients cannot be authenticated",
        ),
        (json!({"address": "here"}), r#"address = "here""#, "not a valid IP address"),
        (json!({"healthzBindAddress": "x"}), r#"healthzBindAddress = "x""#, "not a valid IP address"),
        (json!({"healthzPort": 10250}), "healthzPort = 10250", "another one"),
        (json!({"readOnlyPort": 10250}), "readOnlyPort = 10250", "another one"),
        (json!({"readOnlyPort": 10255, "healthzPort": 10255}), "healthzPort = 10255", "another one"),
        (json!({"cgroupDriver": "cgroups"}), r#"cgroupDriver = "cgroups""#, "cgroupfs, systemd"),
        (json!({"cgroupRoot": "pods"}), r#"cgroupRoot = "pods""#, "absolute path"),
        (json!({"containerRuntimeEndpoint": "tcp://1.2.3.4:5"}), "tcp://1.2.3.4:5", "unix://"),
        (json!({"containerRuntimeEndpoint": "run/c.sock"}), "containerRuntimeEndpoint", "unix://"),
        (json!({"podLogsDir": "/var/../log"}), "podLogsDir", "absolute path"),
        (json!({"podLogsDir": "/var/lög"}), "podLogsDir", "ASCII"),
        (json!({"clusterDNS": "10.0.0.10"}), "clusterDNS", "list of strings"),
        (json!({"cpuCFSQuota": "yes"}), r#"cpuCFSQuota = "yes""#, "true or false"),
        (
            json!({"maxParallelImagePulls": 5, "serializeImagePulls": true}),
            "maxParallelImagePulls = 5",
            "serializeImagePulls: false",
        ),
        (json!({"kubeReserved": {"cpu": "fast"}}), r#"kubeReserved.cpu = "fast""#, "500m"),
        (
            json!({"evictionHard": {"memory.available": "10"}, "kubeReserved": []}),
            "kubeReserved = []",
            "a map",
        ),
        (json!({"logging": {"format": "xml"}}), r#"logging.format = "xml""#, "text, json"),
        (json!({"logging": "json"}), r#"logging = "json""#, "a map"),
        (json!({"staticPodPath": 5}), "staticPodPath = 5", "quotes"),
    ];
    for (fields, what, remedy) in cases {
        let errors = errors_of(fields.clone());
        assert_eq!(errors.len(), 1, "{fields}: {errors:?}");
        assert!(errors[0].starts_with("invalid configuration: "), "{}", errors[0]);
        assert!(errors[0].contains(what), "{} lacks {what}", errors[0]);
        assert!(errors[0].contains(remedy), "{} lacks {remedy}", errors[0]);
    }
}

#[test]
fn invalid_keelson_fields_are_reported_with_value_and_remedy() {
    let long = format!("/{}", "r/".repeat(33).trim_end_matches('/').to_owned() + "r");
    let cases = [
        (json!({"runDirs": "/x/y"}), "runDirs", "there is no such field; the fields are runDir"),
        (json!({"logging": {"levle": "info"}}), "logging.levle", "there is no such field"),
        (json!({"runDir": "/run"}), r#"runDir = "/run""#, "use a folder below it"),
        (json!({"stateDir": "/"}), r#"stateDir = "/""#, "use a folder below it"),
        (json!({"runDir": long}), "runDir", "65"),
        (json!({"binDir": "/opt//x"}), r#"binDir = "/opt//x""#, "absolute path"),
        (json!({"controlPlane": "api"}), r#"controlPlane = "api""#, "one of: none, kubernetes, etcd"),
        (json!({"controlPlane": "etcd"}), r#"controlPlane = "etcd""#, "etcd.endpoints lists the members"),
        (etcd(json!({"endpoints": []})), "etcd.endpoints = []", "at least one member"),
        (etcd(json!({"endpoints": ["10.0.0.1:2379"]})), "10.0.0.1:2379", "must be http:// or https://"),
        (etcd(json!({"endpoints": ["https://h:1"]})), "https://h:1", "need etcd.caFile"),
        (etcd(json!({"endpoints": ["http://h:1"], "certFile": "c"})), "certFile", "only with etcd.keyFile"),
        (etcd(json!({"endpoints": ["http://h:1"], "keyFile": "k"})), "keyFile", "only with etcd.certFile"),
        (etcd(json!({"endpoints": ["http://h:1"], "user": "u"})), "user", "only with etcd.passwordFile"),
        (
            etcd(json!({"endpoints": ["http://h:1"], "passwordFile": "p"})),
            "passwordFile",
            "only with etcd.user",
        ),
        (json!({"uidBase": 0}), "uidBase = 0", "from 1"),
        (json!({"startParallelism": 0}), "startParallelism = 0", "from 1 to 1024"),
        (json!({"relistPeriod": "10ms"}), r#"relistPeriod = "10ms""#, "from 1s"),
        (json!({"logging": {"level": "loud"}}), r#"logging.level = "loud""#, "off, error, warn"),
        (json!({"tracing": {"samplingRatePerMillion": 5}}), "samplingRatePerMillion = 5", "tracing.endpoint"),
        (json!({"tracing": {"endpoint": "localhost:4317"}}), "localhost:4317", "http://host:port"),
    ];
    for (fields, what, remedy) in cases {
        let errors = run(&Flags::default(), None, Some(&keelson(fields.clone())), &host()).unwrap_err();
        assert!(errors.iter().any(|p| p.contains(what) && p.contains(remedy)), "{fields}: {errors:?}");
    }
}

#[test]
fn invalid_flags_are_reported_with_remedy() {
    let cases = [
        (
            Flags { hostname_override: Some("bad_name".into()), ..Flags::default() },
            "--hostname-override",
            "--hostname-override",
        ),
        (
            Flags { hostname_override: Some(" ".into()), ..Flags::default() },
            "--hostname-override",
            "lower-case",
        ),
        (
            Flags { root_dir: Some("/var/lib/kubelet/".into()), ..Flags::default() },
            "--root-dir",
            "absolute path",
        ),
        (Flags { run_dir: Some(String::new()), ..Flags::default() }, "--run-dir", "absolute path"),
        (
            Flags { fields: fields(&["--container-runtime-endpoint="]), ..Flags::default() },
            "--container-runtime-endpoint",
            "unix://",
        ),
        (Flags { fields: fields(&["--port=0"]), ..Flags::default() }, "port = 0 (--port)", "from 1 to 65535"),
        (
            Flags { fields: fields(&["--cpu-manager-policy="]), ..Flags::default() },
            "--cpu-manager-policy",
            "none, static",
        ),
        (
            Flags { fields: fields(&["--container-runtime-endpoint=x"]), ..Flags::default() },
            "--container-runtime-endpoint",
            "unix://",
        ),
        (
            Flags { node_labels: vec!["kubernetes.io/role=x".into()], ..Flags::default() },
            "--node-labels",
            "control plane",
        ),
        (Flags { log_level: Some("inof".into()), ..Flags::default() }, "--log-level", "info"),
        (Flags { log_format: Some("xml".into()), ..Flags::default() }, "--log-format", "text, json"),
    ];
    for (flags, what, remedy) in cases {
        let errors = run(&flags, None, None, &host()).unwrap_err();
        assert!(errors.iter().any(|p| p.contains(what) && p.contains(remedy)), "{flags:?}: {errors:?}");
    }
}

#[test]
fn all_configuration_errors_are_reported_at_once() {
    let flags = Flags { log_format: Some("xml".into()), ..Flags::default() };
    let kubelet = kubelet(json!({"port": -1, "maxPods": "many"}));
    let keelson = keelson(json!({"controlPlane": "etcd", "nope": 1}));
    assert_eq!(run(&flags, Some(&kubelet), Some(&keelson), &host()).unwrap_err().len(), 5);
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let wrong = document("pod.yaml", "v1", "Pod", json!({"metadata": {}}));
    let errors = run(&Flags::default(), Some(&wrong), None, &host()).unwrap_err();
    assert_eq!(errors.len(), 2);
    assert!(errors[0].contains(r#"apiVersion = "v1" (pod.yaml"#), "{errors:?}");
    assert!(errors[1].contains("KubeletConfiguration"), "{errors:?}");
    let errors = run(&Flags::default(), None, Some(&wrong), &host()).unwrap_err();
    assert!(errors[0].contains("keelson/v1"), "{errors:?}");
    let empty = Document { file: "empty.yaml".into(), ..Document::default() };
    let errors = run(&Flags::default(), Some(&empty), None, &host()).unwrap_err();
    assert!(errors[0].contains("apiVersion = nothing (empty.yaml)"), "{errors:?}");
}

#[test]
fn unsupported_fields_are_one_note_and_unknown_fields_one_warning_each() {
    let file = kubelet(json!({
        "cpuManagerPolicy": "static", "authentication": {"anonymous": {"enabled": false}}, "staticPodPth": "/x",
        "iptablesDropBit": 3, "hairpinMode": "promiscuous-bridge", "shutdownGracePeriod": "0s",
    }));
    let notes = run(&Flags::default(), Some(&file), None, &host()).unwrap().notes;
    let infos: Vec<&Note> = notes.iter().filter(|n| n.level == Level::Info).collect();
    assert_eq!(infos.len(), 1, "{notes:?}");
    assert!(
        infos[0].text.ends_with(" yet: cpuManagerPolicy, iptablesDropBit, authentication"),
        "fields with default values are not reported: {notes:?}"
    );
    let warnings: Vec<&Note> = notes.iter().filter(|n| n.level == Level::Warn).collect();
    assert_eq!(warnings.len(), 1, "{notes:?}");
    assert!(
        warnings[0].text.starts_with("Using lenient decoding as strict decoding failed: kubelet.yaml:")
            && warnings[0].text.contains("staticPodPth"),
        "{notes:?}"
    );
}

#[test]
fn every_value_that_is_not_the_default_has_an_origin() {
    let file = kubelet(json!({
        "authentication": {"x509": {"clientCAFile": "/ca"}}, "kubeReserved": {"cpu": "1"}, "systemReserved": {"memory": "1Gi"},
        "evictionSoft": {"memory.available": "2Gi"}, "evictionSoftGracePeriod": {"memory.available": "1m"},
        "registerWithTaints": [{"key": "a", "effect": "NoExecute"}], "nodeStatusUpdateFrequency": "4s", "kubeAPIQPS": 7,
        "oomScoreAdj": -5, "clusterDNS": ["10.0.0.10"], "staticPodURL": "http://h/pods", "tracing": {},
        "containerLogMaxFiles": 9, "imageGCLowThresholdPercent": 70,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "9s"},
    }));
    let ours = keelson(json!({"uidBase": 70000, "startParallelism": 3, "manageHost": false}));
    let others = [
        ("kubeconfig", "/k"),
        ("cloud-provider", "external"),
        ("node-ip", "10.0.0.1"),
        ("cert-dir", "/pki"),
        ("version", "v1.36.2-x"),
        ("machine-id-file", "/m"),
    ];
    let flags = Flags {
        fields: fields(&["--max-pods=7", "--rotate-certificates"]),
        others: others.into_iter().map(|(name, text)| (name, text.to_owned())).collect(),
        runtime_cgroups: Some("/runtime".into()),
        max_dead_containers: Some(5),
        ..Flags::default()
    };
    let leaves = |config: &Config| {
        let mut leaves = BTreeMap::new();
        crate::assigned_config::leaf_values(
            String::new(),
            &serde_json::to_value(config).unwrap(),
            &mut leaves,
        );
        leaves
    };
    let config = run(&flags, Some(&file), Some(&ours), &host()).unwrap().config;
    let mut plain = run(&Flags::default(), None, None, &host()).unwrap().config;
    plain.control_plane = ControlPlane::Kubernetes(keelson_config::Kubernetes::of("/plain".into()));
    let default = leaves(&plain);
    let has_origin = |path: &str| {
        let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
        ends.into_iter().any(|end| config.provenance.contains_key(&path[..end]))
    };
    // Authentication and the listening address follow from the control plane.
    let follows =
        |path: &str| path == "api.address" || path.starts_with("api.tls.") || path.starts_with("provenance.");
    let changed: Vec<String> = leaves(&config)
        .into_iter()
        .filter(|(path, value)| default.get(path) != Some(value) && !follows(path))
        .map(|(path, _)| path)
        .collect();
    assert!(changed.len() > 30, "{changed:?}");
    let silent: Vec<&String> = changed.iter().filter(|path| !has_origin(path)).collect();
    assert_eq!(silent, Vec::<&String>::new());
    assert!(has_origin("nodeStatus.externalCloud") && has_origin("controlPlane.kubernetes.taints"));
}

#[test]
fn kubelet_field_defaults_are_those_of_the_resolved_configuration() {
    let flags = Flags { others: [("kubeconfig", "/k".to_owned())].into(), ..Flags::default() };
    let resolved = |fields: Value| {
        let config = run(&flags, Some(&kubelet(fields)), None, &host()).unwrap().config;
        Config { provenance: BTreeMap::new(), ..config }
    };
    assert_eq!(resolved(Value::Object(crate::defaults::kubelet_defaults())), resolved(json!({})));
}
