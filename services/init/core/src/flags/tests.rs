use keelson_config::KUBELET_FIELDS;
use serde_json::{Value, json};

use super::*;

/// The flags of a kubelet 1.36 (node-and-api.md §1.4, and the column "flag" of §2.5), then those of the agent.
const GOLDEN: &str = "
    address allowed-unsafe-sysctls anonymous-auth application-metrics-count-limit authentication-token-webhook
    authentication-token-webhook-cache-ttl authorization-mode authorization-webhook-cache-authorized-ttl
    authorization-webhook-cache-unauthorized-ttl boot-id-file bootstrap-kubeconfig cert-dir cgroup-driver cgroup-root
    cgroups-per-qos client-ca-file cloud-provider cluster-dns cluster-domain config config-dir container-hints
    container-log-max-files container-log-max-size container-runtime-endpoint containerd containerd-namespace
    contention-profiling cpu-cfs-quota cpu-cfs-quota-period cpu-manager-policy cpu-manager-policy-options
    cpu-manager-reconcile-period enable-controller-attach-detach enable-debugging-handlers enable-load-reader
    enable-server enforce-node-allocatable event-burst event-qps event-storage-age-limit event-storage-event-limit
    eviction-hard eviction-max-pod-grace-period eviction-minimum-reclaim eviction-pressure-transition-period
    eviction-soft eviction-soft-grace-period exit-on-lock-contention experimental-allocatable-ignore-eviction
    experimental-mounter-path fail-cgroupv1 fail-swap-on feature-gates file-check-frequency
    global-housekeeping-interval hairpin-mode healthz-bind-address healthz-port help hostname-override
    housekeeping-interval http-check-frequency image-credential-provider-bin-dir image-credential-provider-config
    image-gc-high-threshold image-gc-low-threshold image-service-endpoint kernel-memcg-notification
    kube-api-burst kube-api-content-type kube-api-qps kube-reserved kube-reserved-cgroup kubeconfig kubelet-cgroups
    local-storage-capacity-isolation lock-file log-cadvisor-usage log-flush-frequency log-json-info-buffer-size
    log-json-split-stream log-text-info-buffer-size log-text-split-stream logging-format machine-id-file
    make-iptables-util-chains manifest-url manifest-url-header max-housekeeping-interval max-open-files max-pods
    maximum-dead-containers maximum-dead-containers-per-container memory-manager-policy
    minimum-container-ttl-duration minimum-image-ttl-duration node-ip node-labels node-status-max-images
    node-status-update-frequency oom-score-adj pod-cidr pod-manifest-path pod-max-pids pods-per-core port
    protect-kernel-defaults provider-id qos-reserved read-only-port register-node register-with-taints registry-burst
    registry-qps reserved-cpus reserved-memory resolv-conf root-dir rotate-certificates rotate-server-certificates
    runonce runtime-cgroups runtime-request-timeout seccomp-default serialize-image-pulls
    storage-driver-buffer-duration storage-driver-db storage-driver-host storage-driver-password
    storage-driver-secure storage-driver-table storage-driver-user streaming-connection-idle-timeout sync-frequency
    system-cgroups system-reserved system-reserved-cgroup tls-cert-file tls-cipher-suites tls-min-version
    tls-private-key-file topology-manager-policy topology-manager-policy-options topology-manager-scope v version
    vmodule volume-plugin-dir volume-stats-agg-period

    pod-infra-container-image keelson-config log-format log-level prepare-host resolve-only run-dir state-dir";

/// Flags that were removed before kubelet 1.36 (§1.6).
const REMOVED: &str = "
    dynamic-config-dir host-network-sources host-pid-sources host-ipc-sources allow-privileged register-schedulable
    cloud-config container-runtime experimental-dockershim docker-endpoint network-plugin cni-bin-dir cni-conf-dir
    image-pull-progress-deadline keep-terminated-pod-volumes master-service-namespace iptables-masquerade-bit
    iptables-drop-bit non-masquerade-cidr redirect-container-streaming chaos-chance really-crash-for-testing
    experimental-bootstrap-kubeconfig logtostderr log-dir log-file alsologtostderr add-dir-header log-file-max-size
    skip-headers skip-log-headers one-output stderrthreshold log-backtrace-at docker docker-only cni-cache-dir";

fn read(arguments: &[&str]) -> Result<CommandLine, String> {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    parse(&arguments, "/srv").map_err(|error| error.to_string())
}

fn field(arguments: &[&str]) -> (String, Value) {
    let fields = read(arguments).unwrap().fields;
    assert_eq!(fields.len(), 1, "{fields:?}");
    (fields[0].path.to_owned(), fields[0].value.clone())
}

#[test]
fn the_flags_are_those_of_a_kubelet_and_the_agents_own() {
    let mut golden: Vec<&str> = GOLDEN.split_whitespace().collect();
    golden.sort_unstable();
    let ours: Vec<&str> = flags().iter().map(|flag| flag.name).collect();
    assert_eq!(ours, golden);
    for name in REMOVED.split_whitespace() {
        let error = read(&[&format!("--{name}=x")]).unwrap_err();
        assert!(error.starts_with(&format!("unknown flag: --{name}")), "{error}");
    }
}

#[test]
fn every_field_flag_sets_its_own_kubelet_configuration_field() {
    let mut paths = std::collections::BTreeSet::new();
    for flag in flags() {
        if let Effect::Field { path, .. } = flag.effect {
            let top = path.split('.').next().unwrap();
            assert!(KUBELET_FIELDS.contains(&top), "{path}");
            assert!(paths.insert(path), "{path}");
        }
        assert!(flag.help.ends_with('.'), "{}", flag.name);
    }
}

#[test]
fn every_flag_default_is_a_valid_value() {
    for flag in flags() {
        let default = flag.shown_default();
        if !default.is_empty() {
            let read = read(&[&format!("--{}={default}", flag.name)]);
            assert!(read.is_ok(), "{read:?}");
        }
    }
}

#[test]
fn flags_accept_underscores_and_values_after_space_or_equals_sign() {
    for arguments in [&["--max-pods=7"][..], &["--max-pods", "7"], &["--max_pods=7"], &["--max_pods", "7"]] {
        assert_eq!(field(arguments), ("maxPods".to_owned(), json!(7)));
    }
    for arguments in [&["-v2"][..], &["-v=2"], &["-v", "2"], &["--v=2"]] {
        assert_eq!(field(arguments), ("logging.verbosity".to_owned(), json!(2)));
    }
    // The last use wins, and a value may be empty or begin with a dash.
    assert_eq!(field(&["--max-pods=1", "--max-pods=2"]).1, json!(2));
    assert_eq!(field(&["--resolv-conf="]).1, json!(""));
    assert_eq!(field(&["--pod-max-pids", "-1"]).1, json!(-1));
    assert_eq!(read(&["--max-pods=1", "--"]).unwrap().fields.len(), 1);
}

#[test]
fn boolean_flags_take_a_value_only_after_an_equals_sign() {
    for (argument, value) in [
        ("--runonce", true),
        ("--runonce=true", true),
        ("--runonce=t", true),
        ("--runonce=1", true),
        ("--runonce=false", false),
        ("--runonce=F", false),
        ("--runonce=0", false),
    ] {
        assert_eq!(field(&[argument]).1, json!(value), "{argument}");
    }
    let error = read(&["--runonce", "false"]).unwrap_err();
    assert!(error.starts_with("unknown command false"), "{error}");
}

#[test]
fn list_and_map_flags_become_kubelet_configuration_values() {
    let cases: [(&[&str], Value); 13] = [
        (
            &["--cluster-dns=10.0.0.10,fd00::a", "--cluster-dns", "10.0.0.11"],
            json!(["10.0.0.10", "fd00::a", "10.0.0.11"]),
        ),
        (&["--enforce-node-allocatable="], json!([])),
        (
            &["--system-reserved=cpu=100m,memory=1Gi", "--system_reserved=pid=10"],
            json!({"cpu": "100m", "memory": "1Gi", "pid": "10"}),
        ),
        (&["--qos-reserved=memory=50%"], json!({"memory": "50%"})),
        (
            &["--cpu-manager-policy-options=a=b,c", "--cpu-manager-policy-options=d=e"],
            json!({"a": "b,c", "d": "e"}),
        ),
        (
            &["--eviction-hard=memory.available<1Gi, nodefs.available<10%"],
            json!({"memory.available": "1Gi", "nodefs.available": "10%"}),
        ),
        (&["--eviction-hard="], json!({})),
        (&["--eviction-soft-grace-period=memory.available=1m30s"], json!({"memory.available": "1m30s"})),
        (
            &["--manifest-url-header=a:b,a:c", "--manifest-url-header=d: e:f"],
            json!({"a": ["b", "c"], "d": ["e:f"]}),
        ),
        (
            &["--feature-gates=A=true,B=false", "--feature-gates=C=1"],
            json!({"A": true, "B": false, "C": true}),
        ),
        (
            &[
                "--reserved-memory=0:memory=1Gi,hugepages-1Gi=2Gi;1:memory=3Gi",
                "--reserved-memory=2:memory=4Gi",
            ],
            json!([
                {"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-1Gi": "2Gi"}},
                {"numaNode": 1, "limits": {"memory": "3Gi"}},
                {"numaNode": 2, "limits": {"memory": "4Gi"}},
            ]),
        ),
        (
            &["--register-with-taints=a/b=c:NoSchedule,d:NoExecute"],
            json!([{"key": "a/b", "value": "c", "effect": "NoSchedule"}, {"key": "d", "effect": "NoExecute"}]),
        ),
        (
            &["--vmodule=pods=4,image*=2"],
            json!([{"filePattern": "pods", "verbosity": 4}, {"filePattern": "image*", "verbosity": 2}]),
        ),
    ];
    for (arguments, value) in cases {
        assert_eq!(field(arguments).1, value, "{arguments:?}");
    }
}

#[test]
fn flag_values_become_kubelet_configuration_values() {
    let cases: [(&[&str], Value); 9] = [
        (&["--sync-frequency=1m30s"], json!("1m30s")),
        (&["--volume-stats-agg-period=-1s"], json!("-1s")),
        (&["--address=::"], json!("::")),
        (&["--pod-manifest-path=pods"], json!("/srv/pods")),
        (&["--pod-manifest-path=/etc/pods"], json!("/etc/pods")),
        (&["--container-runtime-endpoint=unix:///x.sock"], json!("unix:///x.sock")),
        (&["--oom-score-adj", "-999"], json!(-999)),
        (&["--max-open-files=5000000000"], json!(5_000_000_000_i64)),
        (&["--pod-max-pids=-5000000000"], json!(-5_000_000_000_i64)),
    ];
    for (arguments, value) in cases {
        assert_eq!(field(arguments).1, value, "{arguments:?}");
    }
}

#[test]
fn flag_errors_name_the_flag_and_the_remedy() {
    let cases: [(&[&str], &str); 20] = [
        (&["--foo"], "unknown flag: --foo"),
        (&["--podmanifest-path=/x"], "unknown flag: --podmanifest-path (did you mean --pod-manifest-path?)"),
        (&["-x"], "unknown shorthand flag: 'x' in -x"),
        (&["-config"], "unknown shorthand flag: 'c' in -config"),
        (&["--=x"], "bad flag syntax: --=x"),
        (&["---v"], "bad flag syntax: ---v"),
        (&["--config"], "flag needs an argument: --config"),
        (&["-v"], "flag needs an argument: -v"),
        (&["run"], "unknown command run: there are flags only"),
        (&["--", "--max-pods=1"], "unknown command --max-pods=1: there are flags only"),
        (&["--max-pods=many"], "invalid argument \"many\" for \"--max-pods\" flag: write a whole number"),
        (
            &["--max-pods=2147483648"],
            "invalid argument \"2147483648\" for \"--max-pods\" flag: write a whole number",
        ),
        (&["--runonce=yes"], "invalid argument \"yes\" for \"--runonce\" flag: write true or false"),
        (&["--address=here"], "\"here\" is not a valid IP address"),
        (&["--sync-frequency=5"], "write numbers with units"),
        (
            &["--system-reserved=cpu"],
            "invalid argument \"cpu\" for \"--system-reserved\" flag: write key=value",
        ),
        (&["--eviction-hard=memory.available=1Gi"], "memory.available<1Gi"),
        (&["--register-with-taints=a=b"], "the effect is NoSchedule"),
        (&["--reserved-memory=0:disk=1"], "write node:memory=1Gi"),
        (&["--feature-gates=A=maybe"], "write Name=true or Name=false"),
    ];
    for (arguments, expected) in cases {
        let error = read(arguments).unwrap_err();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
    let secret = read(&["--manifest-url-header=hunter2"]).unwrap_err();
    assert!(!secret.contains("hunter2"), "a header may be a token: {secret}");
    for wrong in ["maybe", "v1.36.1-x", "v1.36.20", "v1.36", "1.36.2-x", "v1.36.2x"] {
        let error = read(&[&format!("--version={wrong}")]).unwrap_err();
        assert!(error.contains("raw, or v1.36.2 with an optional suffix"), "{error}");
    }
    for good in ["v1.36.2", "v1.36.2-ours", "v1.36.2+build", "raw", "0"] {
        assert!(read(&[&format!("--version={good}")]).is_ok(), "{good}");
    }
}

#[test]
fn deprecated_flags_cause_one_warning_each() {
    let line = read(&[
        "--max-pods=1",
        "--max-pods=2",
        "--v=2",
        "--config=x",
        "--boot-id-file=/x",
        "--provider-id=x",
    ]);
    let warnings = line.unwrap().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("Flag --boot-id-file has been deprecated, "), "{warnings:?}");
    assert_eq!(
        warnings[1],
        "Flag --max-pods has been deprecated, set maxPods in the file of --config instead"
    );
}

#[test]
fn the_help_has_every_flag_with_its_default() {
    let text = help("kubelet");
    assert!(text.contains("\n\nUsage:\n  kubelet [flags]\n\nFlags:\n"));
    let lines: Vec<&str> = text.lines().collect();
    for flag in flags() {
        let name = format!("--{}", flag.name);
        let named = |line: &&&str| line.trim_start().split([' ', '[']).any(|word| word == name);
        assert!(lines.iter().any(|line| named(&line)), "{name}");
    }
    let of = |name: &str| lines.iter().find(|line| line.contains(&format!("--{name} "))).unwrap();
    assert!(of("max-pods").contains("(default 110) (DEPRECATED: set maxPods"), "{}", of("max-pods"));
    assert!(of("root-dir").contains("(default \"/var/lib/kubelet\")"), "{}", of("root-dir"));
    assert!(!of("runonce").contains("default"), "{}", of("runonce"));
}
