use keelson_config::{ControlPlane, Etcd, KUBELET_API_VERSION, KUBELET_KIND};
use serde_json::{Value, json};

use super::*;

pub(crate) fn host() -> Host {
    Host {
        hostname: "Edge-1".into(),
        exe_dir: "/opt/keelson/bin".into(),
        cwd: "/srv".into(),
        memory_bytes: 8 << 30,
        nodefs_bytes: 100 << 30,
        ..Host::default()
    }
}

fn document(file: &str, version: &str, kind: &str, fields: Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), version.into());
    root.insert("kind".into(), kind.into());
    let lines = root.keys().zip(3..).map(|(key, line)| (key.clone(), line)).collect();
    Document { file: file.into(), folder: "/etc/k".into(), root, lines, ..Document::default() }
}

pub(crate) fn kubelet(fields: Value) -> Document {
    document("kubelet.yaml", "kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", fields)
}

pub(crate) fn keelson(fields: Value) -> Document {
    document("keelson.yaml", "keelson/v1", "KeelsonConfiguration", fields)
}

pub(crate) fn run(
    flags: &Flags,
    kubelet: Option<&Document>,
    keelson: Option<&Document>,
    host: &Host,
) -> Result<Resolved, Vec<String>> {
    resolve(Inputs { flags, kubelet, drop_ins: &[], keelson, host })
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

/// The flags for fields of the KubeletConfiguration on a command line.
fn fields(arguments: &[&str]) -> Vec<FieldFlag> {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    crate::flags::parse(&arguments, "/srv").unwrap().fields
}

fn with_kubelet(fields: Value) -> Config {
    run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap().config
}

fn with_keelson(fields: Value) -> Config {
    run(&Flags::default(), None, Some(&keelson(fields)), &host()).unwrap().config
}

pub(crate) fn errors_of(fields: Value) -> Vec<String> {
    run(&Flags::default(), Some(&kubelet(fields)), None, &host()).unwrap_err()
}

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

pub(crate) fn etcd(fields: Value) -> Value {
    json!({"controlPlane": "etcd", "etcd": fields})
}

#[test]
fn etcd_endpoints_and_credentials_are_applied() {
    let fields = json!({
        "endpoints": ["https://10.0.0.1:2379", "https://10.0.0.2:2379"],
        "caFile": "pki/ca.crt", "certFile": "/pki/n.crt", "keyFile": "/pki/n.key",
        "user": "edge-1", "passwordFile": "/pki/password",
    });
    let file = keelson(etcd(fields));
    let config = run(&Flags::default(), None, Some(&file), &host()).unwrap().config;
    let folder = std::path::Path::new(&file.folder);
    let expected = Etcd {
        ca_file: Some(folder.join("pki/ca.crt")),
        cert_file: Some("/pki/n.crt".into()),
        key_file: Some("/pki/n.key".into()),
        user: Some("edge-1".into()),
        password_file: Some("/pki/password".into()),
        ..Etcd::plain(vec!["https://10.0.0.1:2379".into(), "https://10.0.0.2:2379".into()])
    };
    assert_eq!(config.control_plane, ControlPlane::Etcd(expected));
    assert!(config.provenance.contains_key("controlPlane.etcd.keyFile"), "{:?}", config.provenance);
    let named_alone = keelson(json!({"etcd": {"endpoints": ["http://h:1"]}}));
    let config = run(&Flags::default(), None, Some(&named_alone), &host()).unwrap().config;
    assert_eq!(config.control_plane, ControlPlane::None, "controlPlane is not etcd");
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
        "logging": {"flushFrequency": "6s"}, "hairpinMode": "promiscuous-bridge", "shutdownGracePeriod": "0s",
    }));
    let notes = run(&Flags::default(), Some(&file), None, &host()).unwrap().notes;
    let infos: Vec<&Note> = notes.iter().filter(|n| n.level == Level::Info).collect();
    assert_eq!(infos.len(), 1, "{notes:?}");
    assert!(
        infos[0].text.ends_with(" yet: cpuManagerPolicy, logging.flushFrequency, authentication"),
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
fn cgroup_v1_is_refused_with_fail_cgroup_v1_and_a_warning_by_default() {
    let v1 = Host { cgroup_v1: true, ..host() };
    let warns = |fields, host: &Host| {
        let resolved = run(&Flags::default(), Some(&kubelet(fields)), None, host);
        resolved.map(|it| it.notes.iter().any(|n| n.level == Level::Warn && n.text.contains("cgroup v1")))
    };
    assert!(warns(json!({}), &v1).unwrap());
    assert!(!warns(json!({"failCgroupV1": false}), &v1).unwrap());
    assert!(!warns(json!({"failCgroupV1": true}), &host()).unwrap());
    let refused = format!("{:?}", warns(json!({"failCgroupV1": true}), &v1).unwrap_err());
    assert!(refused.contains("kubelet is configured to not run on a host using cgroup v1"), "{refused}");
    assert!(refused.contains("failCgroupV1"), "{refused}");
}

#[test]
fn swap_is_refused_unless_fail_swap_on_is_false() {
    let swap = Host { swap: vec!["/dev/sda2".to_owned(), "/swap".to_owned()], ..host() };
    for (fields, origin) in [(json!({}), "default"), (json!({"failSwapOn": true}), "kubelet.yaml")] {
        let errors = run(&Flags::default(), Some(&kubelet(fields)), None, &swap).unwrap_err();
        let [error] = &errors[..] else { panic!("{errors:?}") };
        for part in [origin, "failSwapOn", "(/dev/sda2, /swap)", "swapoff -a", "failSwapOn: false"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    assert_eq!(run(&Flags::default(), None, None, &swap).unwrap_err().len(), 1);
    assert!(run(&Flags::default(), Some(&kubelet(json!({"failSwapOn": false}))), None, &swap).is_ok());
    assert!(run(&Flags::default(), Some(&kubelet(json!({"failSwapOn": true}))), None, &host()).is_ok());
}

#[test]
fn single_process_oom_kill_false_needs_cgroup_v2() {
    let fields = kubelet(json!({"failCgroupV1": false, "singleProcessOOMKill": false}));
    let v1 = Host { cgroup_v1: true, ..host() };
    let errors = run(&Flags::default(), Some(&fields), None, &v1).unwrap_err();
    assert!(errors.len() == 1 && errors[0].contains("singleProcessOOMKill"), "{errors:?}");
    let v2 = run(&Flags::default(), Some(&fields), None, &host()).unwrap();
    assert_eq!(v2.config.pods.single_process_oom_kill, Some(false));
}

#[test]
fn limited_swap_is_applied_and_needs_cgroup_v2() {
    for (fields, limited) in [
        (json!({}), false),
        (json!({"memorySwap": {}}), false),
        (json!({"memorySwap": {"swapBehavior": ""}}), false),
        (json!({"memorySwap": {"swapBehavior": "NoSwap"}}), false),
        (json!({"memorySwap": {"swapBehavior": "LimitedSwap"}}), true),
    ] {
        let resolved = run(&Flags::default(), Some(&kubelet(fields.clone())), None, &host()).unwrap();
        assert_eq!(resolved.config.pods.limited_swap, limited, "{fields}");
        assert!(
            resolved.notes.iter().all(|note| !note.text.contains("no effect yet")),
            "{:?}",
            resolved.notes
        );
        let v1 = Host { cgroup_v1: true, ..host() };
        match run(&Flags::default(), Some(&kubelet(fields.clone())), None, &v1) {
            Ok(_) => assert!(!limited, "{fields}"),
            Err(errors) => {
                let [error] = &errors[..] else { panic!("{errors:?}") };
                assert!(limited && error.contains("memorySwap.swapBehavior = \"LimitedSwap\""), "{error}");
                assert!(error.contains("cgroup v2"), "{error}");
            }
        }
    }
    let errors = errors_of(json!({"memorySwap": {"swapBehavior": "UnlimitedSwap"}}));
    assert!(errors.len() == 1 && errors[0].contains("NoSwap, LimitedSwap"), "{errors:?}");
}

#[test]
fn invalid_cluster_dns_servers_are_ignored_with_a_warning() {
    let file = kubelet(json!({"clusterDNS": ["10.0.0.10", "dns", "fd00::a"]}));
    let resolved = run(&Flags::default(), Some(&file), None, &host()).unwrap();
    assert_eq!(resolved.config.runtime.cluster_dns, ["10.0.0.10", "fd00::a"]);
    assert!(resolved.notes.iter().any(|n| n.text.contains("\"dns\" (kubelet.yaml:3)")));
}

#[test]
fn image_pulls_are_serialized_unless_configured_otherwise() {
    for (fields, pulls) in [
        (json!({}), 1),
        (json!({"serializeImagePulls": true}), 1),
        (json!({"serializeImagePulls": false}), 1000),
        (json!({"serializeImagePulls": false, "maxParallelImagePulls": 3}), 3),
        (json!({"maxParallelImagePulls": 2}), 2),
    ] {
        assert_eq!(with_kubelet(fields.clone()).runtime.max_parallel_pulls, pulls, "{fields}");
    }
}

#[test]
fn existing_system_users_and_the_group_keelson_are_used() {
    let mut machine = host();
    machine.service_users.insert(ServiceName::PodSync, 998);
    // Services that need root ignore a user of this name.
    machine.service_users.insert(ServiceName::RuntimeShim, 997);
    machine.operator_group = Some(996);
    let config = run(&Flags::default(), None, None, &machine).unwrap().config;
    assert_eq!((config.users.uids["pod-sync"], config.users.uids["pod-config"]), (998, 64_201));
    assert!(!config.users.uids.contains_key("runtime-shim") && !config.users.uids.contains_key("init"));
    assert_eq!(config.users.operator_gid, 996);
    assert_eq!(config.provenance["users.uids.pod-sync"], "user keelson-pod-sync");
    assert_eq!(config.provenance["users.operatorGid"], "group keelson");
}

#[test]
fn without_root_all_services_run_as_the_user_of_init() {
    let machine = Host { uid: 1000, gid: 1001, ..host() };
    let resolved = run(&Flags::default(), None, None, &machine).unwrap();
    assert!(resolved.config.users.uids.is_empty());
    assert_eq!(resolved.config.users.operator_gid, 1001);
    let errors: Vec<&Note> = resolved.notes.iter().filter(|n| n.level == Level::Error).collect();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].text.contains("kubelet needs to run as uid 0, it is being run as 1000"), "{errors:?}");
    let as_root = run(&Flags::default(), None, None, &host()).unwrap();
    assert!(as_root.notes.iter().all(|note| note.level != Level::Error), "{:?}", as_root.notes);
}

#[test]
fn bare_runtime_endpoint_and_empty_paths_are_read_like_a_kubelets() {
    let config = with_kubelet(
        json!({"containerRuntimeEndpoint": "/run/c.sock", "staticPodPath": "", "cgroupRoot": "", "resolvConf": ""}),
    );
    assert_eq!(config.runtime.endpoint, "unix:///run/c.sock");
    assert_eq!(config.sources.static_pod_path, None);
    assert_eq!((config.runtime.cgroup_root.as_str(), config.runtime.resolv_conf.as_str()), ("/", ""));
}

#[test]
fn enable_server_false_sets_port_zero() {
    assert_eq!(with_kubelet(json!({"enableServer": false, "port": 10250})).api.port, 0);
    assert_eq!(with_kubelet(json!({"enableServer": true})).api.port, 10250);
}

#[test]
fn container_log_and_image_gc_settings_are_applied_with_their_origin() {
    let config = with_kubelet(json!({
        "containerLogMaxSize": "1Mi", "containerLogMaxFiles": 3, "containerLogMaxWorkers": 2,
        "containerLogMonitorInterval": "3s", "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 0,
        "imageMinimumGCAge": "1m", "imageMaximumGCAge": "24h",
    }));
    let logs = &config.container_logs;
    assert_eq!((logs.max_size_bytes, logs.max_files, logs.max_workers), (Some(1 << 20), 3, 2));
    assert_eq!(logs.monitor_interval_ms, 3_000);
    let images = &config.image_collection;
    assert_eq!((images.high_threshold_percent, images.low_threshold_percent), (100, 0));
    assert_eq!((images.minimum_age_ms, images.maximum_age_ms), (60_000, 86_400_000));
    for (path, line) in [
        ("containerLogs.maxSizeBytes", 3),
        ("containerLogs.maxFiles", 4),
        ("containerLogs.maxWorkers", 5),
        ("containerLogs.monitorIntervalMs", 6),
        ("imageCollection.highThresholdPercent", 7),
        ("imageCollection.lowThresholdPercent", 8),
        ("imageCollection.minimumAgeMs", 9),
        ("imageCollection.maximumAgeMs", 10),
    ] {
        assert_eq!(config.provenance[path], format!("kubelet.yaml:{line}"), "{path}");
    }
    let fields = kubelet(json!({"containerLogMaxSize": "1Mi", "imageMaximumGCAge": "24h"}));
    let notes = run(&Flags::default(), Some(&fields), None, &host()).unwrap().notes;
    assert!(notes.iter().all(|note| !note.text.contains("no effect yet")), "{notes:?}");
}

#[test]
fn pod_sync_backoff_sysctl_seccomp_and_oom_settings_are_applied() {
    let fields = kubelet(json!({
        "syncFrequency": "90s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "20s"},
        "allowedUnsafeSysctls": ["net.core.*", "kernel/msgmax"],
        "seccompDefault": true, "singleProcessOOMKill": true,
    }));
    let resolved = run(&Flags::default(), Some(&fields), None, &host()).unwrap();
    let pods = &resolved.config.pods;
    assert_eq!((pods.sync_frequency_ms, pods.max_restart_backoff_ms), (90_000, 20_000));
    assert_eq!(pods.allowed_unsafe_sysctls, ["net.core.*", "kernel/msgmax"]);
    assert_eq!((pods.seccomp_default, pods.single_process_oom_kill), (true, Some(true)));
    assert!(resolved.notes.iter().all(|note| !note.text.contains("no effect yet")), "{:?}", resolved.notes);
    let zero = kubelet(json!({"syncFrequency": "0s", "crashLoopBackOff": {}}));
    let pods = run(&Flags::default(), Some(&zero), None, &host()).unwrap().config.pods;
    assert_eq!(pods, keelson_config::Pods::default());
    for (wrong, field) in [
        (json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "301s"}}), "maxContainerRestartPeriod"),
        (json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "999ms"}}), "maxContainerRestartPeriod"),
        (json!({"syncFrequency": "-1s"}), "syncFrequency"),
        (json!({"allowedUnsafeSysctls": ["net.*", "vm.swappiness"]}), "vm.swappiness"),
        (json!({"seccompDefault": "yes"}), "seccompDefault"),
    ] {
        let errors = run(&Flags::default(), Some(&kubelet(wrong)), None, &host()).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(field), "{errors:?}");
    }
}

#[test]
fn container_log_and_image_gc_defaults_are_those_of_a_kubelet() {
    for fields in [
        json!({}),
        json!({"containerLogMaxSize": "", "imageMinimumGCAge": "0s", "imageMaximumGCAge": "0s"}),
        json!({"containerLogMaxFiles": null, "imageGCHighThresholdPercent": null}),
    ] {
        let config = with_kubelet(fields);
        let logs = &config.container_logs;
        assert_eq!((logs.max_size_bytes, logs.max_files, logs.max_workers), (Some(10 << 20), 5, 1));
        assert_eq!(logs.monitor_interval_ms, 10_000);
        let images = &config.image_collection;
        assert_eq!((images.high_threshold_percent, images.low_threshold_percent), (85, 80));
        assert_eq!((images.minimum_age_ms, images.maximum_age_ms), (120_000, 0));
    }
    assert_eq!(with_kubelet(json!({"containerLogMaxSize": "-1"})).container_logs.max_size_bytes, None);
    assert_eq!(with_kubelet(json!({"containerLogMaxSize": "0"})).container_logs.max_size_bytes, Some(0));
}

#[test]
fn invalid_container_log_and_image_gc_settings_are_refused() {
    for (fields, part) in [
        (json!({"containerLogMaxSize": "ten"}), "containerLogMaxSize = \"ten\""),
        (json!({"containerLogMaxSize": "1500m"}), "a whole number of bytes"),
        (json!({"containerLogMaxFiles": 1}), "containerLogMaxFiles = 1"),
        (json!({"containerLogMaxWorkers": 0}), "containerLogMaxWorkers = 0"),
        (json!({"containerLogMonitorInterval": "2s"}), "containerLogMonitorInterval"),
        (json!({"imageGCHighThresholdPercent": 101}), "imageGCHighThresholdPercent = 101"),
        (json!({"imageGCLowThresholdPercent": -1}), "imageGCLowThresholdPercent = -1"),
        (
            json!({"imageGCHighThresholdPercent": 80}),
            "must be below imageGCHighThresholdPercent, which is 80",
        ),
        (json!({"imageGCLowThresholdPercent": 85}), "imageGCLowThresholdPercent, which is 85"),
        (json!({"imageMinimumGCAge": "-1s"}), "imageMinimumGCAge"),
        (json!({"imageMaximumGCAge": "2m"}), "must be longer than imageMinimumGCAge, which is 120s"),
        (json!({"imageMaximumGCAge": "5m", "imageMinimumGCAge": "6m"}), "which is 360s"),
    ] {
        let errors = errors_of(fields);
        assert_eq!(errors.len(), 1, "{part}: {errors:?}");
        assert!(errors[0].contains(part), "{part}: {errors:?}");
    }
}

#[test]
fn node_status_max_images_is_applied_and_minus_one_means_all() {
    assert_eq!(with_kubelet(json!({})).node_status.max_images, 50);
    for most in [-1, 0, 1, 50, i64::from(i32::MAX)] {
        let config = with_kubelet(json!({"nodeStatusMaxImages": most}));
        assert_eq!(config.node_status.max_images, most);
        assert!(config.provenance.contains_key("nodeStatus.maxImages"), "{most}");
    }
    for wrong in [json!(-2), json!("all"), json!(1_u64 << 31)] {
        let errors = errors_of(json!({"nodeStatusMaxImages": wrong}));
        assert!(errors.len() == 1 && errors[0].contains("nodeStatusMaxImages"), "{wrong}: {errors:?}");
    }
}

#[test]
fn negative_volume_stats_period_means_off_and_zero_the_default() {
    for (text, millis) in [("10s", 10_000), ("-1s", 0), ("-1m30s", 0), ("0s", 60_000), ("0", 60_000)] {
        let config = with_kubelet(json!({"volumeStatsAggPeriod": text}));
        assert_eq!(config.volumes.stats_period_ms, millis, "{text}");
    }
    assert_eq!(with_kubelet(json!({})).volumes.stats_period_ms, 60_000);
    for text in ["soon", "", "--1s", "9000h"] {
        let errors = errors_of(json!({"volumeStatsAggPeriod": text}));
        assert!(errors.len() == 1 && errors[0].contains("volumeStatsAggPeriod"), "{text}: {errors:?}");
    }
}

#[test]
fn image_pull_and_dead_container_settings_are_applied() {
    let flags = Flags {
        minimum_container_ttl: Some("90s".into()),
        max_dead_per_container: Some(2),
        max_dead_containers: Some(-1),
        ..Flags::default()
    };
    let fields = kubelet(json!({
        "registryPullQPS": 0, "registryBurst": 3, "imageServiceEndpoint": "unix:///run/images.sock",
        "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
        "preloadedImagesVerificationAllowlist": ["r.example/*"],
    }));
    let own = keelson(json!({"imagePullProgressTimeout": "90s"}));
    let config = run(&flags, Some(&fields), Some(&own), &host()).unwrap().config;
    let pulls = &config.image_pulls;
    assert_eq!((pulls.registry_qps, pulls.registry_burst, pulls.progress_timeout_ms), (0, 3, 90_000));
    assert_eq!(pulls.credentials_verification, "NeverVerifyAllowlistedImages");
    assert_eq!(pulls.preloaded_allowlist, ["r.example/*"]);
    assert_eq!(config.runtime.image_endpoint.as_deref(), Some("unix:///run/images.sock"));
    let dead = &config.container_collection;
    assert_eq!((dead.minimum_age_ms, dead.max_per_container, dead.max_total), (90_000, 2, -1));
    assert_eq!(config.provenance["containerCollection.minimumAgeMs"], "--minimum-container-ttl-duration");
    // The runtime's own endpoint counts as unset.
    let same = with_kubelet(json!({"imageServiceEndpoint": "unix:///run/containerd/containerd.sock"}));
    assert_eq!(same.runtime.image_endpoint, None);
    let bare = with_kubelet(json!({"imageServiceEndpoint": "/run/images.sock"}));
    assert_eq!(bare.runtime.image_endpoint.as_deref(), Some("unix:///run/images.sock"));
    for (fields, part) in [
        (json!({"registryPullQPS": -1}), "registryPullQPS"),
        (json!({"imageServiceEndpoint": "tcp://1.2.3.4:5"}), "absolute path of a socket"),
        (json!({"imagePullCredentialsVerificationPolicy": "Sometimes"}), "Sometimes"),
        (json!({"preloadedImagesVerificationAllowlist": ["a"]}), "NeverVerifyAllowlistedImages"),
    ] {
        let errors = errors_of(fields);
        assert!(errors.len() == 1 && errors[0].contains(part), "{part}: {errors:?}");
    }
    let bad = Flags { minimum_container_ttl: Some("soon".into()), ..Flags::default() };
    let errors = run(&bad, None, None, &host()).unwrap_err();
    assert!(errors[0].to_string().contains("--minimum-container-ttl-duration"), "{errors:?}");
}

#[test]
fn a_flag_replaces_the_whole_map_of_the_file() {
    let flags = Flags {
        fields: fields(&[
            "--eviction-hard=memory.available<1Gi",
            "--max-pods=7",
            "--v=4",
            "--kube-reserved=cpu=1",
        ]),
        ..Flags::default()
    };
    let file = kubelet(json!({
        "evictionHard": {"nodefs.available": "5%"}, "maxPods": 50, "port": 1234, "kubeReserved": {"memory": "1Gi"},
    }));
    let resolved = run(&flags, Some(&file), None, &host()).unwrap();
    let (config, whole) = (&resolved.config, &resolved.kubelet_configuration);
    assert_eq!((config.resources.max_pods, config.logging.level.as_str()), (7, "debug"));
    assert_eq!(whole["evictionHard"], json!({"memory.available": "1Gi"}));
    assert_eq!(whole["kubeReserved"], json!({"cpu": "1"}));
    assert_eq!((&whole["maxPods"], &whole["port"]), (&json!(7), &json!(1234)));
    assert_eq!(config.provenance["resources.maxPods"], "--max-pods");
    assert_eq!(config.provenance["api.port"], "kubelet.yaml:5");
}

#[test]
fn feature_gates_of_flags_are_added_to_those_of_the_file() {
    let flags = Flags {
        fields: fields(&["--feature-gates=MemoryQoS=true,NodeLogQuery=true,EnvFiles=true"]),
        ..Flags::default()
    };
    let file =
        kubelet(json!({"featureGates": {"EnvFiles": false, "NodeLogQuery": false, "QOSReserved": true}}));
    let whole = run(&flags, Some(&file), None, &host()).unwrap().kubelet_configuration;
    // The flag replaces the value in the file, which would be refused.
    let all = json!({"EnvFiles": true, "MemoryQoS": true, "NodeLogQuery": true, "QOSReserved": true});
    assert_eq!(whole["featureGates"], all);
}

#[test]
fn flags_without_a_file_have_no_default_thresholds() {
    let alone = |arguments: &[&str]| {
        run(&Flags { fields: fields(arguments), ..Flags::default() }, None, None, &host())
    };
    let resolved = alone(&["--max-pods=7"]).unwrap();
    assert!(!resolved.kubelet_configuration.contains_key("evictionHard"));
    assert_eq!(resolved.kubelet_configuration["authorization"]["mode"], "AlwaysAllow");
    assert!(resolved.config.resources.eviction.hard.is_empty());
    assert!(!resolved.notes.iter().any(|note| note.text.contains("dropped")), "{:?}", resolved.notes);
    let some = alone(&["--eviction-hard=memory.available<1Gi"]).unwrap();
    assert_eq!(some.kubelet_configuration["evictionHard"], json!({"memory.available": "1Gi"}));
    assert_eq!(some.config.resources.eviction.hard.len(), 1);
    let errors = alone(&["--max-pods=-1", "--cgroup-driver=other"]).unwrap_err();
    assert!(errors.iter().any(|error| error.contains("maxPods = -1 (--max-pods)")), "{errors:?}");
    assert!(
        errors.iter().any(|error| error.contains("cgroupDriver = \"other\" (--cgroup-driver)")),
        "{errors:?}"
    );
}

#[test]
fn drop_ins_override_the_file_in_order_and_flags_override_them() {
    let lined = |file: &str, fields: Value| Document {
        file: file.to_owned(),
        ..document(file, KUBELET_API_VERSION, KUBELET_KIND, fields)
    };
    let drop_ins = [
        lined("10.conf", json!({"maxPods": 60, "clusterDNS": ["10.0.0.1"], "kubeReserved": {"cpu": "1"}})),
        lined(
            "20.conf",
            json!({"maxPods": 70, "clusterDNS": ["10.0.0.2"], "port": null, "staticPodPath": "pods"}),
        ),
    ];
    let file =
        kubelet(json!({"maxPods": 50, "port": 1234, "kubeReserved": {"memory": "1Gi"}, "healthzPort": 0}));
    let flags = Flags { fields: fields(&["--healthz-port=99"]), ..Flags::default() };
    let resolved = resolve(Inputs {
        flags: &flags,
        kubelet: Some(&file),
        drop_ins: &drop_ins,
        keelson: None,
        host: &host(),
    });
    let Resolved { config, kubelet_configuration: whole, .. } = resolved.unwrap();
    assert_eq!(whole["kubeReserved"], json!({"cpu": "1", "memory": "1Gi"}));
    assert_eq!((&whole["clusterDNS"], &whole["maxPods"]), (&json!(["10.0.0.2"]), &json!(70)));
    assert_eq!((&whole["port"], &whole["healthzPort"]), (&json!(10250), &json!(99)), "null removes a field");
    assert_eq!(config.provenance["resources.maxPods"], "20.conf:3");
    assert_eq!(config.provenance["api.healthzPort"], "--healthz-port");
    assert_eq!(whole["staticPodPath"], "/srv/pods", "relative paths start from the working directory");
}

#[test]
fn a_drop_in_of_another_kind_is_refused_and_unknown_fields_cause_a_warning() {
    let with = |drop_in: Document| {
        let inputs = Inputs {
            flags: &Flags::default(),
            kubelet: None,
            drop_ins: &[drop_in],
            keelson: None,
            host: &host(),
        };
        resolve(inputs)
    };
    let wrong = document("x.conf", "v1", KUBELET_KIND, json!({"maxPods": -1}));
    let errors = with(wrong.clone()).unwrap_err();
    assert!(errors.len() == 1 && errors[0].to_string().contains("x.conf"), "{errors:?}");
    // All errors are reported at once, including those next to a file of another kind.
    let other = document("y.conf", KUBELET_API_VERSION, KUBELET_KIND, json!({"maxPods": -2}));
    let flags = Flags { log_level: Some("loud".into()), ..Flags::default() };
    let errors = resolve(Inputs {
        flags: &flags,
        kubelet: Some(&document("k.yaml", "v1", "Other", json!({"maxPods": -3}))),
        drop_ins: &[wrong, other],
        keelson: Some(&keelson(json!({"uidBase": 0}))),
        host: &host(),
    });
    let errors: Vec<String> = errors.unwrap_err().iter().map(ToString::to_string).collect();
    let parts = ["k.yaml", "k.yaml", "x.conf", "maxPods = -2", "uidBase = 0", "--log-level"];
    assert_eq!(errors.len(), parts.len(), "{errors:#?}");
    assert!(errors.iter().zip(parts).all(|(error, part)| error.contains(part)), "{errors:#?}");
    let notes =
        with(document("x.conf", KUBELET_API_VERSION, KUBELET_KIND, json!({"maxPod": 1}))).unwrap().notes;
    assert!(
        notes
            .iter()
            .any(|note| note.text.contains(": x.conf:3: ") && note.text.contains("has no field maxPod")),
        "{notes:?}"
    );
}

#[test]
fn drop_ins_without_a_file_allow_anonymous_and_have_no_thresholds() {
    let with = |kubelet: Option<&Document>, drop_in: Value| {
        let drop_in = document("10.conf", KUBELET_API_VERSION, KUBELET_KIND, drop_in);
        resolve(Inputs {
            flags: &Flags::default(),
            kubelet,
            drop_ins: &[drop_in],
            keelson: None,
            host: &host(),
        })
    };
    let authorities = json!({"authentication": {"x509": {"clientCAFile": "/ca"}}});
    let Resolved { config, kubelet_configuration: whole, .. } = with(None, authorities.clone()).unwrap();
    let tls = config.api.tls.unwrap();
    assert_eq!((tls.anonymous, tls.tokens, tls.reviews), (true, false, false));
    assert_eq!(whole["authentication"]["anonymous"]["enabled"], true);
    assert_eq!(whole["authorization"]["mode"], "AlwaysAllow");
    assert!(config.resources.eviction.hard.is_empty() && !whole.contains_key("evictionHard"));
    let own = json!({
        "authentication": {"anonymous": {"enabled": false}, "x509": {"clientCAFile": "/ca"}},
        "evictionHard": {"memory.available": "1Gi"},
    });
    let explicit = with(None, own).unwrap().config;
    assert!(!explicit.api.tls.unwrap().anonymous);
    assert_eq!(explicit.resources.eviction.hard.len(), 1);
    // With a file, anonymous requests are refused, and the default thresholds apply.
    let file = kubelet(
        json!({"authentication": {"webhook": {"enabled": false}}, "authorization": {"mode": "AlwaysAllow"}}),
    );
    let safe = with(Some(&file), authorities).unwrap().config;
    assert!(!safe.api.tls.unwrap().anonymous);
    assert_eq!(safe.resources.eviction.hard.len(), 5);
}

#[test]
fn a_drop_in_keeps_unset_thresholds_and_report_frequency_of_the_file() {
    let with = |file: Value, drop_ins: &[Value]| {
        let drop_ins: Vec<Document> = drop_ins
            .iter()
            .map(|fields| document("10.conf", KUBELET_API_VERSION, KUBELET_KIND, fields.clone()))
            .collect();
        resolve(Inputs {
            flags: &Flags::default(),
            kubelet: Some(&kubelet(file)),
            drop_ins: &drop_ins,
            keelson: None,
            host: &host(),
        })
        .unwrap()
        .config
    };
    let hard = |config: &Config| -> Vec<String> {
        config.resources.eviction.hard.iter().map(|(signal, amount)| format!("{signal}<{amount}")).collect()
    };
    let one = json!({"evictionHard": {"memory.available": "200Mi"}});
    let two = json!({"evictionHard": {"pid.available": "5%", "nodefs.available": null}});
    assert_eq!(
        hard(&with(json!({}), &[one.clone(), two.clone()])),
        [
            "imagefs.available<15%",
            "imagefs.inodesFree<5%",
            "memory.available<200Mi",
            "nodefs.inodesFree<5%",
            "pid.available<5%"
        ]
    );
    let named = json!({"evictionHard": {"nodefs.available": "1%"}});
    assert_eq!(hard(&with(named, &[one])), ["memory.available<200Mi", "nodefs.available<1%"]);

    let update = json!({"nodeStatusUpdateFrequency": "4s"});
    let report = |config: Config| config.node_status.status_report_ms;
    assert_eq!(report(with(json!({}), std::slice::from_ref(&update))), 300_000);
    assert_eq!(
        report(with(json!({"nodeStatusUpdateFrequency": "7s"}), std::slice::from_ref(&update))),
        7_000
    );
    let explicit = json!({"nodeStatusReportFrequency": "9s"});
    assert_eq!(report(with(json!({"nodeStatusUpdateFrequency": "7s"}), &[update, explicit])), 9_000);
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
