use std::sync::LazyLock;

use keelson_config::{SourceLimit, SourceLimits, Users};
use serde_json::{Value, json};

use super::*;
use crate::testing::{from_file, pod};

static NO_LIMITS: SourceLimits = SourceLimits::new();

fn users() -> Users {
    let uids = [("pod-config", 64_201), ("pod-sync", 64_205), ("node-status", 64_206), ("node-api", 64_207)];
    Users { uids: uids.map(|(name, uid)| (name.to_owned(), uid)).into(), operator_gid: 998 }
}

static AGENT_IDS: LazyLock<AgentIds> = LazyLock::new(|| AgentIds::new(&users(), 0));

fn node(labels: Value) -> Node {
    serde_json::from_value(json!({"metadata": {"name": "n1", "labels": labels}})).unwrap()
}

fn facts<'a>(node: &'a Node, allowed: &'a [String]) -> NodeFacts<'a> {
    NodeFacts {
        node,
        node_name: "n1",
        unsafe_sysctls: allowed,
        kernel: KernelVersion(6, 1),
        strict_groups: false,
        apparmor: false,
        source_limits: &NO_LIMITS,
        agent_ids: &AGENT_IDS,
        run_dir: Path::new("/run/keelson"),
    }
}

fn reason(denial: Option<Denial>) -> &'static str {
    denial.map_or("", |denial| denial.reason)
}

fn with_containers(spec: Value) -> Pod {
    let mut all = json!({"containers": [{"name": "a"}]});
    all.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    pod(all)
}

fn sysctl(name: &str, more: Value) -> Pod {
    let mut spec = json!({"securityContext": {"sysctls": [{"name": name, "value": "1"}]}});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    with_containers(spec)
}

#[test]
fn safe_sysctls_depend_on_the_kernel_and_others_need_an_allowlist() {
    let node = node(json!({}));
    let allowed = ["net.core.*".to_owned(), "kernel/msgmax".to_owned()];
    for (name, passes) in [
        ("kernel.shm_rmid_forced", true),
        ("net/ipv4/tcp_syncookies", true),
        ("net.ipv4.tcp_rmem", true),
        ("net.core.somaxconn", true),
        ("kernel.msgmax", true),
        ("kernel.msgmnb", false),
        ("vm.swappiness", false),
    ] {
        let denial = before_fit(&sysctl(name, json!({})), &facts(&node, &allowed));
        assert_eq!(denial.is_none(), passes, "{name}: {denial:?}");
    }
    let old = NodeFacts { kernel: KernelVersion(4, 14), ..facts(&node, &[]) };
    let denial = before_fit(&sysctl("net.ipv4.tcp_rmem", json!({})), &old).unwrap();
    assert_eq!(denial.reason, "SysctlForbidden");
    assert_eq!(denial.message, "forbidden sysctl: \"net.ipv4.tcp_rmem\" not allowlisted");
}

#[test]
fn a_sysctl_of_a_host_namespace_is_forbidden_even_if_safe() {
    let node = node(json!({}));
    for (name, host, namespace) in
        [("net.ipv4.tcp_syncookies", "hostNetwork", "net"), ("kernel.shm_rmid_forced", "hostIPC", "ipc")]
    {
        let denial = before_fit(&sysctl(name, json!({host: true})), &facts(&node, &[])).unwrap();
        let text = format!("forbidden sysctl: \"{name}\" not allowed with host {namespace} enabled");
        assert_eq!(denial.message, text);
    }
}

#[test]
fn kernel_versions_are_parsed_from_the_release() {
    assert_eq!(KernelVersion::parse("6.1.0-18-amd64"), KernelVersion(6, 1));
    assert_eq!(KernelVersion::parse("4.19+"), KernelVersion(4, 19));
    assert_eq!(KernelVersion::parse("strange"), KernelVersion(0, 0));
}

#[test]
fn another_operating_system_is_rejected_by_label_and_by_field() {
    let node = node(json!({}));
    let check = |pod: &Pod| reason(before_fit(pod, &facts(&node, &[])));
    let mut labelled = with_containers(json!({}));
    assert_eq!(check(&labelled), "");
    labelled.metadata.labels.insert("kubernetes.io/os".into(), "windows".into());
    assert_eq!(check(&labelled), "PodOSSelectorNodeLabelDoesNotMatch");
    assert_eq!(check(&with_containers(json!({"os": {"name": "windows"}}))), "PodOSNotSupported");
    assert_eq!(check(&with_containers(json!({"os": {"name": "linux"}}))), "");
}

#[test]
fn supplemental_groups_policy_strict_needs_runtime_support() {
    let node = node(json!({}));
    let strict = with_containers(json!({"securityContext": {"supplementalGroupsPolicy": "Strict"}}));
    let denial = before_fit(&strict, &facts(&node, &[])).unwrap();
    assert_eq!(denial.reason, "SupplementalGroupsPolicyNotSupported");
    assert_eq!(denial.message, "SupplementalGroupsPolicy=Strict is not supported in this node");
    let able = NodeFacts { strict_groups: true, ..facts(&node, &[]) };
    assert_eq!(before_fit(&strict, &able), None);
    for (name, version, able) in [
        ("containerd", "1.6.20~ds1", false),
        ("containerd", "v2.1.4", true),
        ("cri-o", "1.30.0", false),
        ("cri-o", "1.31.2", true),
        ("other", "9.9", false),
    ] {
        assert_eq!(supports_strict_groups(name, version), able, "{name} {version}");
    }
}

fn placed(spec: Value, labels: Value) -> &'static str {
    let node = node(labels);
    reason(after_fit(&with_containers(spec), &facts(&node, &[]), std::iter::empty()))
}

#[test]
fn a_node_selector_needs_all_of_its_labels() {
    let spec = json!({"nodeSelector": {"disk": "ssd", "zone": "a"}});
    assert_eq!(placed(spec.clone(), json!({"disk": "ssd", "zone": "a", "x": "y"})), "");
    assert_eq!(placed(spec.clone(), json!({"disk": "ssd"})), "NodeAffinity");
    let node = node(json!({}));
    let denial = after_fit(&with_containers(spec), &facts(&node, &[]), std::iter::empty()).unwrap();
    let text = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    assert_eq!(denial.message, text);
}

#[test]
fn node_affinity_operators_match_labels() {
    let labels = json!({"disk": "ssd", "cores": "8"});
    let case = |expression: Value| {
        let terms = json!([{"matchExpressions": [expression]}]);
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        placed(json!({"affinity": {"nodeAffinity": required}}), labels.clone()).is_empty()
    };
    for (key, operator, values, matches) in [
        ("disk", "In", json!(["hdd", "ssd"]), true),
        ("disk", "In", json!(["hdd"]), false),
        ("gone", "In", json!(["hdd"]), false),
        ("disk", "NotIn", json!(["hdd"]), true),
        ("gone", "NotIn", json!(["hdd"]), true),
        ("disk", "NotIn", json!(["ssd"]), false),
        ("disk", "Exists", json!([]), true),
        ("gone", "Exists", json!([]), false),
        ("gone", "DoesNotExist", json!([]), true),
        ("disk", "DoesNotExist", json!([]), false),
        ("cores", "Gt", json!(["7"]), true),
        ("cores", "Gt", json!(["8"]), false),
        ("cores", "Lt", json!(["9"]), true),
        ("disk", "Lt", json!(["9"]), false),
        ("disk", "Like", json!(["ssd"]), false),
    ] {
        assert_eq!(
            case(json!({"key": key, "operator": operator, "values": values})),
            matches,
            "{key} {operator}"
        );
    }
}

#[test]
fn one_node_affinity_term_is_enough_and_an_empty_one_matches_nothing() {
    let of = |terms: Value| {
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        placed(json!({"affinity": {"nodeAffinity": required}}), json!({"disk": "ssd"})).is_empty()
    };
    let disk =
        |value: &str| json!({"matchExpressions": [{"key": "disk", "operator": "In", "values": [value]}]});
    let name =
        |value: &str| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [value]}]});
    assert!(of(json!([disk("hdd"), disk("ssd")])));
    assert!(!of(json!([disk("hdd")])));
    assert!(!of(json!([{}])) && !of(json!([])));
    assert!(of(json!([name("n1")])) && !of(json!([name("n2")])));
    // Preferences and affinity to other pods do not matter to the node.
    assert_eq!(placed(json!({"affinity": {"podAffinity": {"x": 1}}}), json!({})), "");
}

#[test]
fn the_node_name_must_match() {
    assert_eq!(placed(json!({"nodeName": "n1"}), json!({})), "");
    assert_eq!(placed(json!({"nodeName": "n2"}), json!({})), "NodeName");
}

fn with_ports(ports: Value, more: Value) -> Pod {
    let mut spec = json!({"containers": [{"name": "a", "ports": ports}]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    pod(spec)
}

#[test]
fn a_host_port_is_used_by_one_pod_per_address_and_protocol() {
    let node = node(json!({}));
    let port = |port: i32, address: &str, protocol: &str| json!([{"containerPort": 80, "hostPort": port, "hostIP": address, "protocol": protocol}]);
    let held = with_ports(port(8080, "", "TCP"), json!({}));
    let at_one = with_ports(port(8081, "10.0.0.1", "TCP"), json!({}));
    let inner = with_ports(json!([{"containerPort": 8080}]), json!({}));
    for (ports, more, free) in [
        (port(8080, "", ""), json!({}), false),
        (port(8080, "10.0.0.1", "TCP"), json!({}), false),
        (port(8080, "", "UDP"), json!({}), true),
        (port(8082, "", "TCP"), json!({}), true),
        (port(8081, "10.0.0.2", "TCP"), json!({}), true),
        (port(8081, "0.0.0.0", "TCP"), json!({}), false),
        // A port on the pod network conflicts with no other.
        (json!([{"containerPort": 8080}]), json!({}), true),
        // On the host network each port is a host port.
        (json!([{"containerPort": 8080}]), json!({"hostNetwork": true}), false),
    ] {
        let pod = with_ports(ports.clone(), more);
        let denial = after_fit(&pod, &facts(&node, &[]), [&held, &at_one, &inner].into_iter());
        assert_eq!(denial.is_none(), free, "{ports} {denial:?}");
    }
    let zero = || with_ports(json!([{"containerPort": 0}]), json!({"hostNetwork": true}));
    assert_eq!(
        after_fit(&zero(), &facts(&node, &[]), [&zero()].into_iter()),
        None,
        "port 0 is not a host port"
    );
}

#[test]
fn no_execute_taints_reject_pods_without_toleration_except_static_pods() {
    let mut node = node(json!({}));
    node.spec.taints = serde_json::from_value(json!([
        {"key": "down", "value": "yes", "effect": "NoExecute"},
        {"key": "full", "effect": "NoSchedule"},
    ]))
    .unwrap();
    let check = |tolerations: Value| {
        let pod = with_containers(json!({"tolerations": tolerations}));
        reason(after_fit(&pod, &facts(&node, &[]), std::iter::empty()))
    };
    assert_eq!(check(json!([])), "TaintToleration");
    assert_eq!(check(json!([{"operator": "Exists"}])), "");
    assert_eq!(check(json!([{"key": "down", "value": "yes", "effect": "NoExecute"}])), "");
    assert_eq!(check(json!([{"key": "down", "value": "no"}])), "TaintToleration");
    assert_eq!(
        check(json!([{"key": "down", "operator": "Exists", "effect": "NoSchedule"}])),
        "TaintToleration"
    );
    let fixed = from_file(with_containers(json!({})));
    assert_eq!(after_fit(&fixed, &facts(&node, &[]), std::iter::empty()), None);
}

#[test]
fn an_apparmor_profile_needs_apparmor() {
    let node = node(json!({}));
    let check = |pod: &Pod, apparmor| {
        after_fit(pod, &NodeFacts { apparmor, ..facts(&node, &[]) }, std::iter::empty())
    };
    let profile =
        |kind: &str| with_containers(json!({"securityContext": {"appArmorProfile": {"type": kind}}}));
    assert_eq!(check(&profile("Unconfined"), false), None);
    assert_eq!(check(&profile("Localhost"), true), None);
    let denial = check(&profile("RuntimeDefault"), false).unwrap();
    let text = "Cannot enforce AppArmor: AppArmor is not enabled on the host";
    assert_eq!((denial.reason, denial.message.as_str()), ("AppArmor", text));
    let mut old = with_containers(json!({}));
    old.metadata.annotations.insert(format!("{APPARMOR_ANNOTATION}a"), "localhost/x".into());
    assert_eq!(reason(check(&old, false)), "AppArmor");
    for (none, denied) in [("unconfined", false), ("", false), ("runtime/default", true)] {
        old.metadata.annotations.insert(format!("{APPARMOR_ANNOTATION}a"), none.into());
        assert_eq!(check(&old, false).is_some(), denied, "{none}");
    }
    let mut pending = profile("RuntimeDefault");
    pending.status.phase = "Pending".into();
    assert_eq!(reason(check(&pending, false)), "AppArmor");
    let mut begun = profile("RuntimeDefault");
    begun.status.phase = "Running".into();
    assert_eq!(check(&begun, false), None);
}

#[test]
fn the_first_denial_in_the_kubelets_order_is_reported() {
    let node = node(json!({}));
    let many =
        with_containers(json!({"nodeSelector": {"x": "y"}, "nodeName": "n2", "os": {"name": "windows"},
        "securityContext": {"sysctls": [{"name": "vm.x", "value": "1"}]}}));
    assert_eq!(reason(before_fit(&many, &facts(&node, &[]))), "SysctlForbidden");
    assert_eq!(reason(after_fit(&many, &facts(&node, &[]), std::iter::empty())), "NodeAffinity");
}

#[test]
fn rejections_are_counted_with_few_reason_labels() {
    assert!(COUNTED_REASONS.is_sorted());
    for (reason, counted) in [
        ("OutOfcpu", "OutOfcpu"),
        ("OutOfnvidia.com/gpu", "OutOfExtendedResources"),
        ("NodePorts", "Other"),
        ("NodeAffinity", "Other"),
        ("SysctlForbidden", "SysctlForbidden"),
    ] {
        assert_eq!(counted_reason(reason), counted);
        assert!(counted_reasons().any(|known| known == counted), "{counted}");
    }
}

#[test]
fn source_limits_deny_host_namespaces_and_privileged_containers() {
    let node = node(json!({}));
    let none = SourceLimit {
        host_network: false,
        host_pid: false,
        host_ipc: false,
        privileged: false,
        agent_run_folder: false,
    };
    let limits = SourceLimits::from([("http".to_owned(), none), ("api".to_owned(), SourceLimit::default())]);
    let limited = NodeFacts { source_limits: &limits, ..facts(&node, &[]) };
    let privileged =
        json!({"containers": [{"name": "a"}, {"name": "b", "securityContext": {"privileged": true}}]});
    let of_init = json!({"initContainers": [{"name": "i", "securityContext": {"privileged": true}}]});
    for (spec, what) in [
        (json!({"hostNetwork": true}), "hostNetwork"),
        (json!({"hostPID": true}), "hostPID"),
        (json!({"hostIPC": true}), "hostIPC"),
        (privileged, "privileged"),
        (of_init, "privileged"),
        (json!({"hostNetwork": false, "hostPID": false}), ""),
    ] {
        let mut pod = with_containers(spec.clone());
        for source in ["http", "api", "file"] {
            pod.metadata.annotations.insert("kubernetes.io/config.source".into(), source.into());
            let denial = before_fit(&pod, &limited);
            let refused = source == "http" && !what.is_empty();
            assert_eq!(denial.is_some(), refused, "{source}: {spec}: {denial:?}");
            if let Some(denial) = denial {
                assert_eq!(denial.reason, "SourceForbidden");
                assert!(denial.message.contains(&format!("sourceLimits.http.{what}")), "{denial:?}");
            }
        }
    }
}

#[test]
fn unsafe_values_are_rejected_with_the_field() {
    let node = node(json!({}));
    for (spec, expected) in [
        (
            json!({"securityContext": {"seccompProfile": {"type": "Localhost"}}}),
            "spec.securityContext.seccompProfile.localhostProfile: Required value",
        ),
        (
            json!({"containers": [{"name": "a", "securityContext": {"procMount": "Unmasked"}}]}),
            "spec.containers[0].securityContext.procMount: Invalid value",
        ),
        (json!({"hostUsers": false, "hostPID": true}), "spec.hostPID: Forbidden"),
        (
            json!({"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a\n10.9.9.9 evil"]}]}),
            "spec.hostAliases[0].hostnames[0]: Invalid value",
        ),
        (
            json!({"containers": [{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/v", "mountPropagation": "bidirectional"}]}]}),
            "spec.containers[0].volumeMounts[0].mountPropagation: Unsupported value",
        ),
    ] {
        let denial = before_fit(&with_containers(spec.clone()), &facts(&node, &[])).unwrap();
        assert_eq!(denial.reason, "InvalidPodSpec", "{spec}");
        assert!(denial.message.starts_with(expected), "{}", denial.message);
    }
    let good = json!({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}});
    assert_eq!(before_fit(&with_containers(good), &facts(&node, &[])), None);
}

#[test]
fn a_pod_that_needs_an_undeclared_node_feature_is_rejected() {
    let node = node(json!({}));
    for (spec, refused) in [
        (json!({"hostNetwork": true, "hostUsers": false}), true),
        (json!({"hostNetwork": true}), false),
        (json!({"hostNetwork": true, "hostUsers": true}), false),
        (json!({"hostUsers": false}), false),
    ] {
        let denial = before_fit(&with_containers(spec.clone()), &facts(&node, &[]));
        assert_eq!(
            denial.as_ref().is_some_and(|d| d.reason == "PodFeatureUnsupported"),
            refused,
            "{spec}: {denial:?}"
        );
        if let Some(denial) = denial.filter(|_| refused) {
            let text = "Pod requires node features that are not available: UserNamespacesHostNetworkSupport";
            assert_eq!((denial.message.as_str(), denial.is_temporary), (text, false));
        }
    }
}

#[test]
fn a_pod_with_an_id_of_the_agent_is_rejected_in_every_field() {
    let node = node(json!({}));
    let facts = facts(&node, &[]);
    for id in [998, 64_200, 64_201, 64_202, 64_203, 64_204, 64_205, 64_206, 64_207] {
        let of_pod = |field: &str| {
            let value = if field == "supplementalGroups" { json!([1, id]) } else { json!(id) };
            json!({"securityContext": {field: value}})
        };
        let mut specs: Vec<(Value, String)> = ["runAsUser", "runAsGroup", "fsGroup"]
            .map(|field| (of_pod(field), format!("spec.securityContext.{field} is {id}")))
            .into();
        specs.push((
            of_pod("supplementalGroups"),
            format!("spec.securityContext.supplementalGroups[1] is {id}"),
        ));
        for list in ["containers", "initContainers", "ephemeralContainers"] {
            for field in ["runAsUser", "runAsGroup"] {
                let container = json!([{"name": "c", "securityContext": {field: id}}]);
                specs.push((
                    json!({list: container}),
                    format!("container c: securityContext.{field} is {id}"),
                ));
            }
        }
        for (spec, text) in specs {
            let denial = before_fit(&with_containers(spec.clone()), &facts);
            let is_refused = denial.as_ref().is_some_and(|d| {
                d.reason == "AgentIdentityForbidden" && d.message.starts_with(&text) && !d.is_temporary
            });
            assert!(is_refused, "{spec}: {denial:?}");
            // In a user namespace of its own the pod has another id on the node.
            let mut mapped = spec;
            mapped["hostUsers"] = json!(false);
            assert_eq!(before_fit(&with_containers(mapped), &facts), None);
        }
    }
    for id in [0, 997, 1000, 64_199, 64_208, 65_534] {
        let spec = json!({"securityContext": {"runAsUser": id, "fsGroup": id, "supplementalGroups": [id]}});
        assert_eq!(before_fit(&with_containers(spec), &facts), None, "{id}");
    }
}

#[test]
fn agent_ids_come_from_the_configuration_and_never_include_root() {
    let owners = |ids: &AgentIds, candidates: &[i64]| -> Vec<i64> {
        candidates.iter().copied().filter(|id| ids.owner(*id).is_some()).collect()
    };
    let all = [-1, 0, 998, 1000, 64_200, 64_205, 70_001, 70_005, 1 << 40];
    // Without configured users all services run as one user, which may not be root.
    let without = Users { uids: [].into(), operator_gid: 998 };
    assert_eq!(owners(&AgentIds::new(&without, 1000), &all), [998, 1000]);
    assert_eq!(owners(&AgentIds::new(&Users::default(), 0), &all), [0; 0]);
    // System users are not consecutive.
    let scattered =
        Users { uids: [("pod-config".into(), 998), ("pod-sync".into(), 1000)].into(), operator_gid: 70_001 };
    assert_eq!(owners(&AgentIds::new(&scattered, 0), &all), [998, 1000, 70_001]);
    let refused = AGENT_IDS.check([0, 5, 64_206]).unwrap();
    assert!(refused.contains("64206") && refused.contains("node-status"), "{refused}");
    assert_eq!(AGENT_IDS.check([0, 1000]), None);
}

#[test]
fn a_host_path_to_the_agents_sockets_needs_permission_of_the_source() {
    let node = node(json!({}));
    let with = |path: &str| with_containers(json!({"volumes": [{"name": "v", "hostPath": {"path": path}}]}));
    let may = SourceLimits::from([(
        "file".to_owned(),
        SourceLimit { agent_run_folder: true, ..SourceLimit::default() },
    )]);
    let allowing = NodeFacts { source_limits: &may, ..facts(&node, &[]) };
    for (path, is_refused) in [
        ("/run/keelson", true),
        ("/run/keelson/", true),
        ("/run//keelson/pod-sync", true),
        ("/var/run/keelson/pod-sync/pod-sync.sock", true),
        ("/run/other/../keelson", true),
        ("/run/keelson-other", false),
        ("/run", false),
        ("/", false),
        ("/var/lib", false),
    ] {
        let denial = before_fit(&from_file(with(path)), &facts(&node, &[]));
        let as_expected =
            denial.as_ref().is_some_and(|d| d.message.contains("sourceLimits.file.agentRunFolder"));
        assert_eq!(as_expected, is_refused, "{path}: {denial:?}");
        assert_eq!(before_fit(&from_file(with(path)), &allowing), None, "{path}");
    }
}
