//! Rules of volumes and of mounts.

use keelson_kube_model::*;
use serde_json::json;

use super::{container_errors, errors_of, expect, pod_with};

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
        (
            vec![device("v", "/dev/a"), device("w", "/dev/../b")],
            format!("{at}[1].devicePath: Invalid value: \"/dev/../b\": can not contain backsteps"),
        ),
    ] {
        let missing = format!("{at}[1].name: Not found: \"w\"");
        let mut beginnings = if beginning.is_empty() { vec![] } else { vec![beginning.as_str()] };
        if devices.len() > 1 {
            beginnings.insert(0, &missing);
        }
        let container = json!({"name": "c", "image": "i", "volumeDevices": devices});
        let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": "v"}});
        let pod = pod_with(json!({"containers": [container], "volumes": [volume]}));
        expect(errors_of(pod), &beginnings);
    }
}

#[test]
fn the_name_of_an_ephemeral_claim_is_that_of_pod_and_volume() {
    let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    let volume = json!({"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}});
    let mut pod = pod_with(json!({"volumes": [volume]}));
    pod["metadata"]["name"] = "w".repeat(60).into();
    expect(errors_of(pod.clone()), &[]);
    pod["metadata"]["name"] = [&*"w".repeat(60); 4].join(".").into();
    expect(errors_of(pod.clone()), &[]);
    pod["metadata"]["name"] = format!("{}.wwwwwwwww", [&*"w".repeat(60); 4].join(".")).into();
    expect(errors_of(pod), &["spec.volumes[0].name: Invalid value: \"data\": PVC name \"www"]);
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
