//! API defaulting on raw JSON.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::{Pod, default_pod};
use keelson_testkit::Reached;
use proptest::prelude::*;
use serde_json::{Value, json};

fn defaulted(spec: Value) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec});
    default_pod(&mut pod);
    pod["spec"].take()
}

fn container(fields: Value) -> Value {
    defaulted(json!({"containers": [fields]}))["containers"][0].take()
}

fn volume(fields: Value) -> Value {
    defaulted(json!({"volumes": [fields]}))["volumes"][0].take()
}

#[test]
fn an_empty_spec_gets_the_defaults_of_the_pod() {
    let expected = json!({
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "enableServiceLinks": true,
    });
    assert_eq!(defaulted(json!({})), expected);
}

#[test]
fn set_values_and_unknown_fields_survive_defaulting() {
    let spec = json!({
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "dnsPolicy": "None",
        "securityContext": {"fsGroup": 5},
        "schedulerName": "mine",
        "enableServiceLinks": false,
        "somethingNew": {"kept": [1, 2]},
    });
    assert_eq!(defaulted(spec.clone()), spec);
}

#[test]
fn null_and_empty_text_count_as_unset() {
    let spec = defaulted(json!({"restartPolicy": "", "dnsPolicy": null}));
    assert_eq!((&spec["restartPolicy"], &spec["dnsPolicy"]), (&json!("Always"), &json!("ClusterFirst")));
}

#[test]
fn a_container_gets_its_defaults_in_all_three_lists() {
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        let spec = defaulted(json!({list: [{"name": "c", "image": "i"}]}));
        let expected = json!({
            "name": "c",
            "image": "i",
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "imagePullPolicy": "Always",
        });
        assert_eq!(spec[list][0], expected, "{list}");
    }
}

#[test]
fn the_pull_policy_follows_the_tag() {
    let table = [
        ("nginx", "Always"),
        ("nginx:latest", "Always"),
        ("nginx:1.27", "IfNotPresent"),
        ("host:5000/nginx", "Always"),
        ("host:5000/nginx:1", "IfNotPresent"),
        ("nginx@sha256:0123", "IfNotPresent"),
        ("nginx:latest@sha256:0123", "Always"),
    ];
    for (image, policy) in table {
        assert_eq!(container(json!({"image": image}))["imagePullPolicy"], policy, "{image}");
    }
    assert_eq!(container(json!({"image": "a", "imagePullPolicy": "Never"}))["imagePullPolicy"], "Never");
}

#[test]
fn requests_come_from_limits_where_they_are_missing() {
    let resources = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "0"}});
    let made = container(json!({ "resources": resources }));
    assert_eq!(made["resources"]["requests"], json!({"cpu": "0", "memory": "1Gi"}));
}

#[test]
fn ports_are_tcp_and_are_the_hosts_ports_with_host_network() {
    let ports = json!([{"containerPort": 80}, {"containerPort": 53, "protocol": "UDP", "hostPort": 53}]);
    let own = defaulted(json!({"containers": [{"ports": ports}]}));
    assert_eq!(own["containers"][0]["ports"][0], json!({"containerPort": 80, "protocol": "TCP"}));
    let host = defaulted(json!({"hostNetwork": true, "containers": [{"ports": ports}]}));
    assert_eq!(host["containers"][0]["ports"][0]["hostPort"], 80);
    assert_eq!(host["containers"][0]["ports"][1]["hostPort"], 53);
}

#[test]
fn probes_and_hooks_get_their_timing_and_http_defaults() {
    let made = container(json!({
        "livenessProbe": {"httpGet": {"port": 80}, "periodSeconds": 0},
        "readinessProbe": {"grpc": {"port": 5}, "failureThreshold": 7},
        "lifecycle": {"preStop": {"httpGet": {"port": "web", "scheme": "HTTPS"}}},
    }));
    let live = json!({
        "httpGet": {"port": 80, "path": "/", "scheme": "HTTP"},
        "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
    });
    assert_eq!(made["livenessProbe"], live);
    assert_eq!(made["readinessProbe"]["grpc"], json!({"port": 5, "service": ""}));
    assert_eq!(made["readinessProbe"]["failureThreshold"], 7);
    assert_eq!(
        made["lifecycle"]["preStop"]["httpGet"],
        json!({"port": "web", "scheme": "HTTPS", "path": "/"})
    );
}

#[test]
fn field_references_are_of_version_one() {
    let made =
        container(json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}));
    assert_eq!(made["env"][0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
    let files = json!([{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}}]);
    let made = volume(json!({"name": "v", "downwardAPI": {"items": files}}));
    assert_eq!(made["downwardAPI"]["items"][0]["fieldRef"]["apiVersion"], "v1");
}

#[test]
fn volumes_get_their_defaults() {
    let table = [
        (json!({"name": "v"}), json!({"name": "v", "emptyDir": {}})),
        (json!({"name": "v", "secret": null}), json!({"name": "v", "secret": null, "emptyDir": {}})),
        (json!({"name": "v", "secret": {}}), json!({"name": "v", "secret": {"defaultMode": 420}})),
        (
            json!({"name": "v", "configMap": {"defaultMode": 0}}),
            json!({"name": "v", "configMap": {"defaultMode": 0}}),
        ),
        (
            json!({"name": "v", "hostPath": {"path": "/"}}),
            json!({"name": "v", "hostPath": {"path": "/", "type": ""}}),
        ),
        (json!({"name": "v", "novel": {"a": 1}}), json!({"name": "v", "novel": {"a": 1}})),
        (
            json!({"name": "v", "image": {"reference": "a:1"}}),
            json!({"name": "v", "image": {"reference": "a:1", "pullPolicy": "IfNotPresent"}}),
        ),
        (
            json!({"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
            json!({"name": "v", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}},
            ]}}),
        ),
    ];
    for (given, expected) in table {
        assert_eq!(volume(given.clone()), expected, "{given}");
    }
}

#[test]
fn pod_level_requests_come_from_containers_then_from_limits() {
    let spec = defaulted(json!({
        "resources": {"limits": {"cpu": "2", "memory": "1Gi", "hugepages-2Mi": "4Mi"}},
        "containers": [{"resources": {"requests": {"cpu": "100m"}}}, {"resources": {"limits": {"cpu": "200m"}}}],
    }));
    let expected = json!({"cpu": "300m", "memory": "1Gi", "hugepages-2Mi": "4Mi"});
    assert_eq!(spec["resources"]["requests"], expected);
}

#[test]
fn the_old_service_account_field_reads_as_the_new_one() {
    assert_eq!(defaulted(json!({"serviceAccount": "robot"}))["serviceAccountName"], "robot");
}

#[test]
fn values_of_a_wrong_type_are_left_for_the_decoder() {
    for odd in [
        json!(null),
        json!([]),
        json!({"spec": 5}),
        json!({"spec": {"containers": {"a": [1]}, "volumes": [7]}}),
    ] {
        let mut pod = odd.clone();
        default_pod(&mut pod);
    }
    let mut pod = json!({"spec": {"containers": "many"}});
    default_pod(&mut pod);
    assert!(serde_json::from_value::<Pod>(pod).is_err());
}

fn any_json() -> impl Strategy<Value = Value> {
    let keys =
        "spec|containers|volumes|resources|limits|cpu|httpGet|livenessProbe|projected|sources|env|name";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-z0-9]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 48, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// Of which some have a list that default values are for.
fn any_spec() -> impl Strategy<Value = Value> {
    prop_oneof![
        any_json(),
        any_json().prop_map(|container| json!({ "containers": [container] })),
        any_json().prop_map(|probe| json!({ "containers": [{ "livenessProbe": probe }] })),
        any_json().prop_map(|volume| json!({ "volumes": [volume] })),
    ]
}

#[test]
fn defaulting_twice_changes_nothing_more() {
    let reached = &Reached::default();
    proptest!(ProptestConfig::with_cases(2048), |(spec in any_spec())| {
        let given = json!({ "spec": spec });
        let mut once = given.clone();
        default_pod(&mut once);
        let mut twice = once.clone();
        default_pod(&mut twice);
        prop_assert_eq!(&once, &twice);
        let changed = |place: &str| given.pointer(place) != once.pointer(place);
        reached.case([
            ("nothing to default", given == once),
            ("the pod is defaulted", changed("/spec/restartPolicy")),
            ("a container is defaulted", changed("/spec/containers/0/terminationMessagePath")),
            ("a probe is defaulted", changed("/spec/containers/0/livenessProbe")),
            ("a volume is defaulted", changed("/spec/volumes/0")),
        ]);
    });
    // The rarest: "a volume is defaulted", in one case of 24.
    reached.assert_each();
}
