//! Rules of containers.

use serde_json::{Value, json};

use super::{container_errors, errors_of, expect, pod_with};

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
