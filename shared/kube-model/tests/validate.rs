//! Validation of pods and the references of static pods.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::*;
use serde_json::{Value, json};

/// A good pod, with `fields` laid over its spec.
fn pod_with(fields: Value) -> Value {
    let mut pod = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    for (key, value) in fields.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn errors_of(mut pod: Value) -> Vec<String> {
    default_pod(&mut pod);
    let pod: Pod = serde_json::from_value(pod).unwrap();
    validate_pod(&pod).iter().map(ToString::to_string).collect()
}

/// Errors of a pod whose only container has `fields` besides name and image; one volume `v` exists.
fn container_errors(fields: Value) -> Vec<String> {
    let mut container = json!({"name": "c", "image": "i"});
    for (key, value) in fields.as_object().unwrap() {
        container[key] = value.clone();
    }
    errors_of(pod_with(json!({"containers": [container], "volumes": [{"name": "v"}]})))
}

/// Each error begins with the text beside it, and there are no more.
#[track_caller]
fn expect(errors: Vec<String>, beginnings: &[&str]) {
    let good =
        errors.len() == beginnings.len() && errors.iter().zip(beginnings).all(|(e, b)| e.starts_with(b));
    assert!(good, "expected {beginnings:#?}, found {errors:#?}");
}

#[test]
fn a_plain_pod_is_valid() {
    expect(errors_of(pod_with(json!({}))), &[]);
}

#[test]
fn a_pod_that_uses_every_feature_is_valid() {
    let pod = pod_with(json!({
        "hostNetwork": true,
        "initContainers": [
            {"name": "i", "image": "x:1"},
            {"name": "s", "image": "x:1", "restartPolicy": "Always", "startupProbe": {"tcpSocket": {"port": 1}}},
        ],
        "containers": [{
            "name": "c", "image": "x:1",
            "ports": [{"name": "web", "containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}],
            "env": [{"name": "A.b-c d", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "volumeMounts": [
                {"name": "v", "mountPath": "/a", "subPath": "..a/b"},
                {"name": "w", "mountPath": "/b", "mountPropagation": "HostToContainer"},
            ],
            "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1", "memory": "1Gi", "example.com/gpu": "1"}},
            "livenessProbe": {"httpGet": {"port": "web"}},
            "lifecycle": {"preStop": {"sleep": {"seconds": 3}}},
        }],
        "volumes": [{"name": "v"}, {"name": "w", "hostPath": {"path": "/x", "type": "Directory"}}],
    }));
    expect(errors_of(pod), &[]);
}

#[test]
fn metadata_is_checked() {
    let errors = |metadata: Value| {
        let mut pod = pod_with(json!({}));
        pod["metadata"] = metadata;
        errors_of(pod)
    };
    expect(errors(json!({})), &["metadata.name: Required value", "metadata.namespace: Required value"]);
    let bad = errors(json!({"name": "Web", "namespace": "a.b"}));
    expect(bad, &["metadata.name: Invalid value: \"Web\": ", "metadata.namespace: Invalid value: \"a.b\": "]);
    let long = "a".repeat(254);
    expect(errors(json!({"name": long, "namespace": "d"})), &["metadata.name: Invalid value: \"aaa"]);
    let keys = json!({
        "name": "a.b-c", "namespace": "d",
        "labels": {"example.com/Role": "a_b", "-x": "", "UP.case/x": "ok", "v": "no blanks"},
        "annotations": {"Example.com/Any": "any text at all", "a/b/c": ""},
    });
    expect(
        errors(keys),
        &[
            "metadata.labels: Invalid value: \"-x\"",
            "metadata.labels: Invalid value: \"UP.case/x\"",
            "metadata.labels: Invalid value: \"no blanks\"",
            "metadata.annotations: Invalid value: \"a/b/c\"",
        ],
    );
    let big = json!({"name": "a", "namespace": "d", "annotations": {"k": "x".repeat(256 * 1024)}});
    expect(errors(big), &["metadata.annotations: Too long: may not be more than 262144 bytes"]);
}

#[test]
fn the_spec_itself_is_checked() {
    let table = [
        (json!({"containers": []}), "spec.containers: Required value"),
        (
            json!({"restartPolicy": "Perhaps"}),
            "spec.restartPolicy: Unsupported value: \"Perhaps\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        (
            json!({"terminationGracePeriodSeconds": -1}),
            "spec.terminationGracePeriodSeconds: Invalid value: -1: must be greater than or equal to 0",
        ),
        (json!({"activeDeadlineSeconds": 0}), "spec.activeDeadlineSeconds: Invalid value: 0: "),
        (json!({"dnsPolicy": "Mine"}), "spec.dnsPolicy: Unsupported value: \"Mine\""),
        (json!({"dnsPolicy": "None"}), "spec.dnsConfig.nameservers: Required value"),
        (json!({"schedulingGates": [{"name": "g"}]}), "spec.schedulingGates: Forbidden: "),
        (
            json!({"ephemeralContainers": [{"name": "d", "image": "i"}]}),
            "spec.ephemeralContainers: Forbidden: ",
        ),
        (json!({"hostname": "A"}), "spec.hostname: Invalid value: \"A\""),
        (
            json!({"hostPID": true, "shareProcessNamespace": true}),
            "spec.shareProcessNamespace: Invalid value: true",
        ),
        (json!({"overhead": {"cpu": "-1"}}), "spec.overhead[cpu]: Invalid value: \"-1\""),
        (
            json!({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}),
            "spec.resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ),
    ];
    for (fields, beginning) in table {
        expect(errors_of(pod_with(fields)), &[beginning]);
    }
}

#[test]
fn container_names_are_labels_and_unique_over_all_lists() {
    let pod = pod_with(json!({
        "initContainers": [{"name": "c", "image": "i"}, {"name": "", "image": "i"}],
        "containers": [{"name": "c", "image": "i"}, {"name": "C_1", "image": "i"}],
    }));
    expect(
        errors_of(pod),
        &[
            "spec.initContainers[1].name: Required value",
            "spec.containers[0].name: Duplicate value: \"c\"",
            "spec.containers[1].name: Invalid value: \"C_1\"",
        ],
    );
}

#[test]
fn images_and_policies_are_checked() {
    let table = [
        (json!({"image": ""}), "spec.containers[0].image: Required value"),
        (
            json!({"image": " i"}),
            "spec.containers[0].image: Invalid value: \" i\": must not have leading or trailing whitespace",
        ),
        (
            json!({"imagePullPolicy": "Often"}),
            "spec.containers[0].imagePullPolicy: Unsupported value: \"Often\"",
        ),
        (json!({"restartPolicy": "Often"}), "spec.containers[0].restartPolicy: Unsupported value: \"Often\""),
        (
            json!({"terminationMessagePolicy": "Mail"}),
            "spec.containers[0].terminationMessagePolicy: Unsupported value: \"Mail\"",
        ),
    ];
    for (fields, beginning) in table {
        expect(container_errors(fields), &[beginning]);
    }
}

#[test]
fn ports_are_checked() {
    let table = [
        (json!([{}]), "spec.containers[0].ports[0].containerPort: Required value"),
        (
            json!([{"containerPort": 65536}]),
            "spec.containers[0].ports[0].containerPort: Invalid value: 65536: must be",
        ),
        (
            json!([{"containerPort": 1, "hostPort": -1}]),
            "spec.containers[0].ports[0].hostPort: Invalid value: -1: ",
        ),
        (
            json!([{"containerPort": 1, "protocol": "tcp"}]),
            "spec.containers[0].ports[0].protocol: Unsupported value: \"tcp\": supported values: \"SCTP\", \"TCP\", \"UDP\"",
        ),
        (
            json!([{"containerPort": 1, "name": "80"}]),
            "spec.containers[0].ports[0].name: Invalid value: \"80\"",
        ),
        (
            json!([{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}]),
            "spec.containers[0].ports[1].name: Duplicate value: \"a\"",
        ),
        (
            json!([{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9}]),
            "spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//9\"",
        ),
        (
            json!([{"containerPort": 1, "hostIP": "here"}]),
            "spec.containers[0].ports[0].hostIP: Invalid value: \"here\"",
        ),
    ];
    for (ports, beginning) in table {
        expect(container_errors(json!({ "ports": ports })), &[beginning]);
    }
}

#[test]
fn host_ports_conflict_across_regular_containers_but_not_with_init_containers() {
    let port = json!([{"containerPort": 1, "hostPort": 9}]);
    let pod = pod_with(json!({
        "initContainers": [{"name": "i", "image": "i", "ports": port}],
        "containers": [{"name": "a", "image": "i", "ports": port}, {"name": "b", "image": "i", "ports": port}],
    }));
    expect(errors_of(pod), &["spec.containers[1].ports[0].hostPort: Duplicate value: "]);
}

#[test]
fn host_network_ports_equal_the_containers() {
    let container = json!({"name": "c", "image": "i", "ports": [{"containerPort": 1, "hostPort": 2}]});
    let pod = pod_with(json!({"hostNetwork": true, "containers": [container]}));
    expect(errors_of(pod), &["spec.containers[0].ports[0].hostPort: Invalid value: 2: must match"]);
}

#[test]
fn environment_is_checked() {
    let field = json!({"fieldRef": {"fieldPath": "metadata.name"}});
    let table = [
        (json!({"env": [{"value": "1"}]}), "spec.containers[0].env[0].name: Required value"),
        (json!({"env": [{"name": "a=b"}]}), "spec.containers[0].env[0].name: Invalid value: \"a=b\""),
        (
            json!({"env": [{"name": "a", "value": "1", "valueFrom": field}]}),
            "spec.containers[0].env[0].valueFrom: Invalid value: \"\": may not be specified",
        ),
        (
            json!({"env": [{"name": "a", "valueFrom": {}}]}),
            "spec.containers[0].env[0].valueFrom: Invalid value: \"\"",
        ),
        (
            json!({"env": [{"name": "a", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}),
            "spec.containers[0].env[0].valueFrom.secretKeyRef.key: Required value",
        ),
        (
            json!({"envFrom": [{"configMapRef": {}}]}),
            "spec.containers[0].envFrom[0].configMapRef.name: Required value",
        ),
        (json!({"envFrom": [{}]}), "spec.containers[0].envFrom[0]: Invalid value: \"\""),
    ];
    for (fields, beginning) in table {
        expect(container_errors(fields), &[beginning]);
    }
}

#[test]
fn mounts_are_checked() {
    let table = [
        (
            json!([{"name": "w", "mountPath": "/a"}]),
            "spec.containers[0].volumeMounts[0].name: Not found: \"w\"",
        ),
        (json!([{"name": "v"}]), "spec.containers[0].volumeMounts[0].mountPath: Required value"),
        (
            json!([{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/a"}]),
            "spec.containers[0].volumeMounts[1].mountPath: Invalid value: \"/a\": must be unique",
        ),
        (
            json!([{"name": "v", "mountPath": "/a", "subPath": "a/../b"}]),
            "spec.containers[0].volumeMounts[0].subPath: Invalid value: \"a/../b\": must not contain '..'",
        ),
        (
            json!([{"name": "v", "mountPath": "/a", "subPath": "/b"}]),
            "spec.containers[0].volumeMounts[0].subPath: Invalid value: \"/b\": must be a relative path",
        ),
        (
            json!([{"name": "v", "mountPath": "/a", "mountPropagation": "Bidirectional"}]),
            "spec.containers[0].volumeMounts[0].mountPropagation: Forbidden: ",
        ),
        (
            json!([{"name": "v", "mountPath": "/a", "recursiveReadOnly": "Enabled"}]),
            "spec.containers[0].volumeMounts[0].recursiveReadOnly: Forbidden: ",
        ),
    ];
    for (mounts, beginning) in table {
        expect(container_errors(json!({ "volumeMounts": mounts })), &[beginning]);
    }
}

#[test]
fn amounts_are_not_negative_and_requests_stay_within_limits() {
    let table = [
        (
            json!({"requests": {"cpu": "-1"}}),
            "spec.containers[0].resources.requests[cpu]: Invalid value: \"-1\"",
        ),
        (
            json!({"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}),
            "spec.containers[0].resources.requests: Invalid value: \"2Gi\": must be less than or equal to memory limit of 1Gi",
        ),
        (
            json!({"requests": {"example.com/gpu": "1"}, "limits": {"example.com/gpu": "2"}}),
            "spec.containers[0].resources.requests: Invalid value: \"1\": must be equal to example.com/gpu limit of 2",
        ),
        (
            json!({"requests": {"hugepages-2Mi": "2Mi", "memory": "1Mi"}}),
            "spec.containers[0].resources.limits: Required value",
        ),
    ];
    for (resources, beginning) in table {
        expect(container_errors(json!({ "resources": resources })), &[beginning]);
    }
}

#[test]
fn probes_and_hooks_have_one_handler_with_a_good_port() {
    let table = [
        (
            json!({"livenessProbe": {}}),
            "spec.containers[0].livenessProbe: Required value: must specify a handler type",
        ),
        (
            json!({"readinessProbe": {"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}}),
            "spec.containers[0].readinessProbe: Forbidden: may not specify more than 1 handler type",
        ),
        (
            json!({"livenessProbe": {"httpGet": {"port": 0}}}),
            "spec.containers[0].livenessProbe.httpGet.port: Invalid value: 0: ",
        ),
        (
            json!({"livenessProbe": {"tcpSocket": {"port": 1}, "successThreshold": 2}}),
            "spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1",
        ),
        (
            json!({"startupProbe": {"grpc": {"port": 1}, "periodSeconds": -1}}),
            "spec.containers[0].startupProbe.periodSeconds: Invalid value: -1: ",
        ),
        (
            json!({"lifecycle": {"postStart": {"exec": {}}}}),
            "spec.containers[0].lifecycle.postStart.exec.command: Required value",
        ),
    ];
    for (fields, beginning) in table {
        expect(container_errors(fields), &[beginning]);
    }
    let init = json!({"name": "i", "image": "i", "livenessProbe": {"tcpSocket": {"port": 1}}});
    let pod = pod_with(json!({"initContainers": [init]}));
    expect(errors_of(pod), &["spec.initContainers[0].livenessProbe: Forbidden: "]);
}

#[test]
fn sleep_hook_is_at_most_the_grace_period_of_the_pod() {
    let begin = |hook: &str, list: &str| format!("spec.{list}[0].lifecycle.{hook}.sleep: Invalid value: ");
    for (grace, seconds, is_good) in [
        (json!(30), 0, true),
        (json!(30), 1, true),
        (json!(30), 30, true),
        (json!(30), 31, false),
        (json!(30), -1, false),
        (json!(0), 0, true),
        (json!(0), 1, false),
        (Value::Null, 30, true),
        (Value::Null, 31, false),
    ] {
        for hook in ["postStart", "preStop"] {
            let lifecycle = json!({hook: {"sleep": {"seconds": seconds}}});
            let regular = json!([{"name": "c", "image": "x:1", "lifecycle": lifecycle}]);
            let sidecar =
                json!([{"name": "s", "image": "x:1", "restartPolicy": "Always", "lifecycle": lifecycle}]);
            for (list, containers) in [("containers", regular), ("initContainers", sidecar)] {
                let mut fields = json!({list: containers});
                if !grace.is_null() {
                    fields["terminationGracePeriodSeconds"] = grace.clone();
                }
                let bound = grace.as_i64().unwrap_or(30);
                let text = format!(
                    "{}{seconds}: must be non-negative and less than terminationGracePeriodSeconds ({bound})",
                    begin(hook, list)
                );
                let expected = if is_good { vec![] } else { vec![text.as_str()] };
                expect(errors_of(pod_with(fields)), &expected);
            }
        }
    }
    // An invalid grace period is reported once.
    let fields = json!({
        "terminationGracePeriodSeconds": -1,
        "containers": [{"name": "c", "image": "x:1", "lifecycle": {"preStop": {"sleep": {"seconds": 3}}}}],
    });
    expect(errors_of(pod_with(fields)), &["spec.terminationGracePeriodSeconds: Invalid value: -1: "]);
}

#[test]
fn volumes_have_a_unique_name_and_one_source() {
    let table = [
        (json!([{"name": ""}]), "spec.volumes[0].name: Required value"),
        (json!([{"name": "V"}]), "spec.volumes[0].name: Invalid value: \"V\""),
        (json!([{"name": "v"}, {"name": "v"}]), "spec.volumes[1].name: Duplicate value: \"v\""),
        (
            json!([{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]),
            "spec.volumes[0].secret: Forbidden: may not specify more than 1 volume type",
        ),
        (json!([{"name": "v", "hostPath": {"path": ""}}]), "spec.volumes[0].hostPath.path: Required value"),
        (
            json!([{"name": "v", "hostPath": {"path": "/a/../b"}}]),
            "spec.volumes[0].hostPath.path: Invalid value: \"/a/../b\": must not contain '..'",
        ),
        (
            json!([{"name": "v", "hostPath": {"path": "/a", "type": "Pipe"}}]),
            "spec.volumes[0].hostPath.type: Unsupported value: \"Pipe\"",
        ),
        (
            json!([{"name": "v", "emptyDir": {"sizeLimit": "-1"}}]),
            "spec.volumes[0].emptyDir.sizeLimit: Invalid value: \"-1\"",
        ),
        (json!([{"name": "v", "secret": {}}]), "spec.volumes[0].secret.secretName: Required value"),
        (
            json!([{"name": "v", "configMap": {"name": "c", "defaultMode": 512}}]),
            "spec.volumes[0].configMap.defaultMode: Invalid value: 512",
        ),
        (
            json!([{"name": "v", "configMap": {"name": "c", "items": [{"key": "k", "path": "../x"}]}}]),
            "spec.volumes[0].configMap.items[0].path: Invalid value: \"../x\"",
        ),
        (
            json!([{"name": "v", "projected": {"sources": [
                {"serviceAccountToken": {"path": "t", "expirationSeconds": 5}},
            ]}}]),
            "spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 5",
        ),
    ];
    for (volumes, beginning) in table {
        expect(errors_of(pod_with(json!({ "volumes": volumes }))), &[beginning]);
    }
    let undefaulted: Pod = serde_json::from_value(pod_with(json!({"volumes": [{"name": "v"}]}))).unwrap();
    let errors = validate_pod(&undefaulted);
    assert_eq!(errors[0].to_string(), "spec.volumes[0]: Required value: must specify a volume type");
}

#[test]
fn pod_values_exactly_at_their_limits_are_valid() {
    let addresses = |count: usize| json!({"dnsConfig": {"nameservers": vec!["10.0.0.1"; count]}});
    let alias =
        json!({"hostAliases": [{"ip": "::1", "hostnames": ["a"]}, {"ip": "here", "hostnames": ["b"]}]});
    for (fields, beginnings) in [
        (json!({"terminationGracePeriodSeconds": 0}), &[][..]),
        (json!({"activeDeadlineSeconds": 1}), &[]),
        (json!({"activeDeadlineSeconds": i32::MAX}), &[]),
        (
            json!({"activeDeadlineSeconds": i64::from(i32::MAX) + 1}),
            &["spec.activeDeadlineSeconds: Invalid value: 2147483648"],
        ),
        (json!({"hostPID": true}), &[]),
        (json!({"shareProcessNamespace": true}), &[]),
        (addresses(3), &[]),
        (addresses(4), &["spec.dnsConfig.nameservers: Invalid value: "]),
        (addresses(5), &["spec.dnsConfig.nameservers: Invalid value: "]),
        (alias, &["spec.hostAliases[1].ip: Invalid value: \"here\""]),
        (
            json!({"hostname": "a".repeat(63), "subdomain": "a".repeat(64)}),
            &["spec.subdomain: Invalid value"],
        ),
        (json!({"hostname": "a-"}), &["spec.hostname: Invalid value: \"a-\""]),
        (json!({"hostname": "-a"}), &["spec.hostname: Invalid value: \"-a\""]),
        (json!({"nodeName": format!("a{}", ".a".repeat(126))}), &[]),
        (json!({"nodeName": format!("ab{}", ".a".repeat(126))}), &["spec.nodeName: Invalid value"]),
    ] {
        expect(errors_of(pod_with(fields)), beginnings);
    }
    let annotated = |bytes: usize| {
        let mut pod = pod_with(json!({}));
        pod["metadata"]["annotations"] = json!({"k": "x".repeat(bytes - 1)});
        errors_of(pod)
    };
    expect(annotated(256 * 1024), &[]);
    expect(annotated(256 * 1024 + 1), &["metadata.annotations: Too long"]);
}

#[test]
fn container_values_exactly_at_their_limits_are_valid() {
    let port = |length: usize| json!({"ports": [{"containerPort": 1, "name": "a".repeat(length)}]});
    let grace = |seconds: i64| json!({"livenessProbe": {"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": seconds}});
    let at = "spec.containers[0].";
    for (fields, beginning) in [
        (port(15), ""),
        (port(16), "ports[0].name: Invalid value"),
        (port(17), "ports[0].name: Invalid value"),
        (grace(1), ""),
        (grace(0), "livenessProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0"),
        (grace(-1), "livenessProbe.terminationGracePeriodSeconds: Invalid value: -1: must be greater than 0"),
        (
            json!({"env": [{"name": "a", "value": "1", "valueFrom": {}}]}),
            "env[0].valueFrom: Invalid value: \"\": must have exactly one source",
        ),
        (json!({"envFrom": [{"configMapRef": {"name": "a"}, "prefix": "A_"}]}), ""),
        (
            json!({"envFrom": [{"configMapRef": {"name": "a"}, "prefix": "A="}]}),
            "envFrom[0].prefix: Invalid value",
        ),
        (
            json!({"envFrom": [{"configMapRef": {"name": "a"}, "secretRef": {"name": "b"}}]}),
            "envFrom[0]: Invalid value: \"\": must have exactly one of",
        ),
    ] {
        let beginning = format!("{at}{beginning}");
        let beginnings = if beginning == at { vec![] } else { vec![beginning.as_str()] };
        expect(container_errors(fields), &beginnings);
    }
}

#[test]
fn sub_paths_and_recursive_read_only_mounts_are_checked() {
    let at = "spec.containers[0].volumeMounts[0].";
    for (fields, beginning) in [
        (json!({"subPathExpr": "$(A)"}), ""),
        (
            json!({"subPath": "a", "subPathExpr": "b"}),
            "subPathExpr: Invalid value: \"b\": cannot be combined",
        ),
        (json!({"recursiveReadOnly": "Enabled", "readOnly": true}), ""),
        (json!({"recursiveReadOnly": "Disabled"}), ""),
        (json!({"recursiveReadOnly": "Disabled", "readOnly": true}), ""),
        (json!({"recursiveReadOnly": "IfPossible", "readOnly": false}), "recursiveReadOnly: Forbidden: "),
        (json!({"name": ""}), "name: Required value"),
    ] {
        let mut mount = json!({"name": "v", "mountPath": "/a"});
        for (key, value) in fields.as_object().unwrap() {
            mount[key] = value.clone();
        }
        let beginning = format!("{at}{beginning}");
        let beginnings = if beginning == at { vec![] } else { vec![beginning.as_str()] };
        expect(container_errors(json!({"volumeMounts": [mount]})), &beginnings);
    }
}

#[test]
fn devices_are_checked() {
    let device = |name: &str, path: &str| json!({"name": name, "devicePath": path});
    let at = "spec.containers[0].volumeDevices";
    for (devices, beginning) in [
        (vec![device("v", "/dev/a")], String::new()),
        (vec![device("w", "/dev/a")], format!("{at}[0].name: Not found: \"w\"")),
        (vec![device("v", "")], format!("{at}[0].devicePath: Required value")),
        (
            vec![device("v", "/dev/a"), device("w", "/dev/a")],
            format!("{at}[1].devicePath: Invalid value: \"/dev/a\": must be unique"),
        ),
    ] {
        let missing = format!("{at}[1].name: Not found: \"w\"");
        let mut beginnings = if beginning.is_empty() { vec![] } else { vec![beginning.as_str()] };
        if devices.len() > 1 {
            beginnings.insert(0, &missing);
        }
        expect(container_errors(json!({"volumeDevices": devices})), &beginnings);
    }
}

#[test]
fn files_of_the_downward_api_have_a_path_and_one_source_each() {
    let field = json!({"fieldPath": "metadata.name"});
    let resource = json!({"resource": "limits.cpu", "containerName": "c"});
    let both = json!({"path": "p", "fieldRef": field, "resourceFieldRef": resource});
    for (item, beginning) in [
        (json!({"path": "p", "fieldRef": field}), ""),
        (json!({"path": "p", "resourceFieldRef": resource}), ""),
        (both, ": Invalid value: \"\": fieldRef and resourceFieldRef"),
        (json!({"path": "p"}), ": Required value: one of"),
        (json!({"fieldRef": field}), ".path: Required value"),
        (json!({"path": "../p", "fieldRef": field}), ".path: Invalid value: \"../p\""),
        (json!({"path": "p", "fieldRef": field, "mode": 0o1000}), ".mode: Invalid value: 512"),
    ] {
        let alone = json!({"name": "v", "downwardAPI": {"items": [item]}});
        let projected = json!({"name": "v", "projected": {"sources": [{"downwardAPI": {"items": [item]}}]}});
        for (volume, at) in [
            (alone, "spec.volumes[0].downwardAPI.items[0]"),
            (projected, "spec.volumes[0].projected.sources[0].downwardAPI.items[0]"),
        ] {
            let beginning = format!("{at}{beginning}");
            let beginnings = if beginning == at { vec![] } else { vec![beginning.as_str()] };
            expect(errors_of(pod_with(json!({"volumes": [volume]}))), &beginnings);
        }
    }
}

#[test]
fn a_projected_source_is_of_at_most_one_type() {
    let token = |seconds: i64| json!({"serviceAccountToken": {"path": "t", "expirationSeconds": seconds}});
    let object = json!({"name": "o"});
    let at = "spec.volumes[0].projected.sources[0]";
    for (source, beginning) in [
        (token(600), ""),
        (token(599), ".serviceAccountToken.expirationSeconds: Invalid value: 599"),
        (json!({"secret": object}), ""),
        (
            json!({"secret": object, "configMap": object}),
            ": Forbidden: may not specify more than 1 volume type",
        ),
    ] {
        let beginning = format!("{at}{beginning}");
        let beginnings = if beginning == at { vec![] } else { vec![beginning.as_str()] };
        let volume = json!({"name": "v", "projected": {"sources": [source]}});
        expect(errors_of(pod_with(json!({"volumes": [volume]}))), &beginnings);
    }
}

fn reference(spec: Value, allowed: AllowedReferences) -> Option<String> {
    let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
    static_pod_api_references(&pod, allowed)
}

fn in_container(fields: Value) -> Value {
    json!({"containers": [fields]})
}

fn in_volume(source: Value) -> Value {
    let mut volume = source;
    volume["name"] = json!("v");
    json!({"volumes": [volume]})
}

#[test]
fn static_pods_name_no_api_objects() {
    let secret_env =
        json!({"env": [{"name": "a", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]});
    let config_env =
        json!({"env": [{"name": "a", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}]});
    let projected = |source: Value| in_volume(json!({"projected": {"sources": [source]}}));
    let table = [
        (json!({"serviceAccountName": "a"}), "serviceaccounts"),
        (json!({"imagePullSecrets": [{"name": "a"}]}), "secrets"),
        (in_container(secret_env), "secrets"),
        (in_container(json!({"envFrom": [{"secretRef": {"name": "a"}}]})), "secrets"),
        (in_volume(json!({"secret": {"secretName": "a"}})), "secrets"),
        (projected(json!({"secret": {"name": "a"}})), "secrets"),
        (in_volume(json!({"cephfs": {"secretRef": {"name": "a"}}})), "secrets"),
        (in_container(config_env), "configmaps"),
        (json!({"initContainers": [{"envFrom": [{"configMapRef": {"name": "a"}}]}]}), "configmaps"),
        (in_volume(json!({"configMap": {"name": "a"}})), "configmaps"),
        (projected(json!({"configMap": {"name": "a"}})), "configmaps"),
        (json!({"resourceClaims": [{"name": "a"}]}), "resourceclaims"),
        (in_volume(json!({"csi": {"driver": "a"}})), "csidrivers (via CSI volumes)"),
        (in_volume(json!({"persistentVolumeClaim": {"claimName": "a"}})), "persistentvolumeclaims"),
        (in_volume(json!({"ephemeral": {}})), "persistentvolumeclaims (via ephemeral volumes)"),
        (in_volume(json!({"glusterfs": {}})), "endpoints (via glusterFS volumes)"),
        (in_volume(json!({"azureFile": {}})), "secrets (via azureFile volumes)"),
        (projected(json!({"serviceAccountToken": {"path": "t"}})), "serviceaccounts (via projected volumes)"),
        (projected(json!({"clusterTrustBundle": {"path": "t"}})), "clustertrustbundles"),
        (projected(json!({"podCertificate": {"signerName": "t"}})), "podcertificates"),
        (projected(json!({"novel": {}})), "objects of an unknown projected source"),
        (in_volume(json!({"novel": {}})), "objects of the unknown volume type \"novel\""),
    ];
    for (spec, expected) in table {
        assert_eq!(
            reference(spec.clone(), AllowedReferences::default()).as_deref(),
            Some(expected),
            "{spec}"
        );
    }
}

#[test]
fn static_pods_may_use_what_needs_no_api() {
    let downward = json!({"downwardAPI": {"items": []}});
    for source in [
        json!({"hostPath": {"path": "/"}}),
        json!({"emptyDir": {}}),
        downward.clone(),
        json!({"image": {"reference": "a"}}),
        json!({"nfs": {"server": "a", "path": "/"}}),
        json!({"rbd": {}}),
        json!({"projected": {"sources": [downward]}}),
    ] {
        assert_eq!(reference(in_volume(source.clone()), AllowedReferences::default()), None, "{source}");
    }
}

#[test]
fn secrets_and_config_maps_may_be_allowed_one_by_one() {
    let both = json!({"volumes": [
        {"name": "a", "secret": {"secretName": "a"}}, {"name": "b", "configMap": {"name": "a"}},
    ]});
    let allowed = |secrets, config_maps| reference(both.clone(), AllowedReferences { config_maps, secrets });
    assert_eq!(allowed(false, true).as_deref(), Some("secrets"));
    assert_eq!(allowed(true, false).as_deref(), Some("configmaps"));
    assert_eq!(allowed(true, true), None);
    let all = AllowedReferences { config_maps: true, secrets: true };
    for source in [json!({"secret": {"name": "a"}}), json!({"configMap": {"name": "a"}})] {
        assert_eq!(reference(in_volume(json!({"projected": {"sources": [source]}})), all), None);
    }
    assert_eq!(
        reference(in_container(json!({"env": [{"name": "a", "value": "1"}]})), AllowedReferences::default()),
        None
    );
    assert_eq!(reference(json!({"serviceAccountName": "a"}), all).as_deref(), Some("serviceaccounts"));
}
