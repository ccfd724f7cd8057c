//! Rules of the pod itself.

use serde_json::{Value, json};

use super::{errors_of, expect, pod_with};

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
