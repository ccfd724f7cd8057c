use keelson_kube_model::Pod;
use serde_json::{Value, json};

use super::*;

const UID: &str = "0123456789abcdef0123456789abcdef";

/// A control-plane pod as kubeadm writes it, with the UID of the sandbox.
fn manifest() -> Value {
    json!({
        "metadata": {
            "name": "etcd-n1", "namespace": "kube-system", "uid": UID, "labels": {"tier": "control-plane"},
            "annotations": {
                "kubernetes.io/config.hash": UID, "kubernetes.io/config.source": "file",
                "kubernetes.io/config.seen": "2026-01-02T03:04:05.000000006Z", "etcd.io/urls": "https://10.0.0.1:2379",
            },
        },
        "spec": {
            "hostNetwork": true, "priority": 2_000_001_000, "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "etcd", "image": "etcd:3", "command": ["etcd", "--name=$(NODE)"],
                "env": [
                    {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "100Mi"}},
                "ports": [{"name": "metrics", "containerPort": 2381, "hostPort": 2381, "protocol": "TCP"}],
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "volumeMounts": [{"name": "data", "mountPath": "/var/lib/etcd"}, {"name": "tmp", "mountPath": "/tmp", "readOnly": true}],
            }],
            "volumes": [{"name": "data", "hostPath": {"path": "/var/lib/etcd/", "type": ""}}, {"name": "tmp", "emptyDir": {}}],
            "nodeName": "n1",
        },
    })
}

/// The details of the container's status, as containerd 1.6 shows them for a container of a kubelet.
fn details() -> Value {
    let own = format!("/var/lib/kubelet/pods/{UID}");
    json!({
        "sandboxID": "s", "pid": 42, "runtimeType": "io.containerd.runc.v2",
        "config": {
            "metadata": {"name": "etcd"}, "image": {"image": "sha256:1"},
            "command": ["etcd", "--name=n1"],
            "envs": [
                {"key": "NODE", "value": "n1"}, {"key": "IP", "value": "10.0.0.1"},
                {"key": "KUBERNETES_SERVICE_HOST", "value": "10.96.0.1"},
                {"key": "KUBERNETES_SERVICE_PORT", "value": "443"},
                {"key": "KUBERNETES_SERVICE_PORT_HTTPS", "value": "443"}, {"key": "KUBERNETES_PORT"},
                {"key": "KUBERNETES_PORT_443_TCP_ADDR", "value": "10.96.0.1"},
            ],
            "mounts": [
                {"container_path": "/var/lib/etcd", "host_path": "/var/lib/etcd"},
                {"container_path": "/tmp", "host_path": format!("{own}/volumes/kubernetes.io~empty-dir/tmp"), "readonly": true},
                {"container_path": "/etc/hosts", "host_path": format!("{own}/etc-hosts")},
                {"container_path": "/dev/termination-log", "host_path": format!("{own}/containers/etcd/0a1b2c3d")},
            ],
            "linux": {
                "resources": {
                    "cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 102, "memory_limit_in_bytes": 104_857_600,
                    "oom_score_adj": 999,
                },
                "security_context": {"namespace_options": {"network": 2, "pid": 1}, "run_as_user": {}, "seccomp": {}},
            },
        },
    })
}

fn running(details: &Value) -> RunningPod {
    let text = |value: &str| value.to_owned();
    let annotations = BTreeMap::from([
        (text("io.kubernetes.container.hash"), container_hash(&typed(manifest()).spec.containers[0])),
        (text("io.kubernetes.container.restartCount"), text("0")),
        (text("io.kubernetes.container.terminationMessagePath"), text("/dev/termination-log")),
        (text("io.kubernetes.container.terminationMessagePolicy"), text("File")),
        (
            text("io.kubernetes.container.ports"),
            text(r#"[{"name":"metrics","hostPort":2381,"containerPort":2381,"protocol":"TCP"}]"#),
        ),
    ]);
    let container = RunningContainer {
        annotations,
        config: RunningConfig::of_details(&details.to_string()).unwrap(),
        ..RunningContainer::default()
    };
    let labels =
        [("tier", "control-plane"), ("io.kubernetes.pod.uid", UID), ("io.kubernetes.pod.name", "etcd-n1")];
    let annotations = [
        ("kubernetes.io/config.hash", UID),
        ("kubernetes.io/config.seen", "2025-01-01T00:00:00Z"),
        ("kubernetes.io/config.source", "file"),
        ("etcd.io/urls", "https://10.0.0.1:2379"),
    ];
    let map =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (text(k), text(v))).collect::<BTreeMap<_, _>>();
    RunningPod {
        sandbox: RunningSandbox {
            labels: map(&labels),
            annotations: map(&annotations),
            config: RunningSandboxConfig::of_details(r#"{"config": {"linux": {}}}"#).unwrap(),
        },
        ips: vec!["10.0.0.1".into()],
        containers: [("etcd".to_owned(), container)].into(),
    }
}

fn typed(pod: Value) -> Pod {
    serde_json::from_value(pod).unwrap()
}

fn compare(pod: Value, running: &RunningPod) -> Option<String> {
    let node = NodeFacts {
        name: "n1",
        ips: &["10.0.0.1".to_owned()],
        allocatable: &ResourceList::default(),
        machine: MachineInputs {
            cpu_cfs_quota: true,
            cpu_cfs_period_us: 100_000,
            ..MachineInputs::default()
        },
        security: SecuritySettings::default(),
        runtime: RuntimeFeatures::default(),
    };
    difference(&typed(pod), "file", running, &node)
}

/// Sets the value at a JSON pointer, whose parent exists.
fn with(mut value: Value, pointer: &str, new: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = value.pointer_mut(parent).unwrap();
    match parent {
        Value::Array(list) if key == "-" => list.push(new),
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = new,
        _ => parent[key] = new,
    }
    value
}

#[test]
fn a_static_pod_of_a_kubelet_with_the_same_content_has_no_difference() {
    assert_eq!(compare(manifest(), &running(&details())), None);
}

#[test]
fn what_only_the_agent_carries_out_is_no_difference() {
    for (pointer, value) in [
        ("/spec/containers/0/livenessProbe", json!({"tcpSocket": {"port": 1}})),
        ("/spec/containers/0/lifecycle", json!({"preStop": {"exec": {"command": ["true"]}}})),
        ("/spec/terminationGracePeriodSeconds", json!(5)),
        ("/spec/restartPolicy", json!("OnFailure")),
        ("/spec/priority", json!(1)),
    ] {
        assert_eq!(compare(with(manifest(), pointer, value), &running(&details())), None, "{pointer}");
    }
}

#[test]
fn every_change_of_a_manifest_that_the_runtime_shows_is_a_difference() {
    let container = |field: &str| format!("/spec/containers/0/{field}");
    for (pointer, value, text) in [
        ("/metadata/labels/tier".to_owned(), json!("other"), "labels"),
        ("/metadata/annotations/new".to_owned(), json!(""), "annotations"),
        (
            "/spec/securityContext/sysctls".to_owned(),
            json!([{"name": "kernel.shm_rmid_forced", "value": "1"}]),
            "sysctls",
        ),
        ("/spec/hostNetwork".to_owned(), json!(false), "securityContext of container etcd"),
        ("/spec/hostPID".to_owned(), json!(true), "securityContext"),
        ("/spec/securityContext/runAsUser".to_owned(), json!(1000), "securityContext"),
        ("/spec/securityContext/fsGroup".to_owned(), json!(1000), "securityContext"),
        ("/spec/securityContext/seccompProfile/type".to_owned(), json!("Unconfined"), "securityContext"),
        ("/spec/volumes/0/hostPath/path".to_owned(), json!("/srv"), "volumeMounts"),
        ("/spec/volumes/1".to_owned(), json!({"name": "tmp", "projected": {"sources": []}}), "volumeMounts"),
        (
            "/spec/volumes/1".to_owned(),
            json!({"name": "tmp", "nfs": {"server": "s", "path": "/"}}),
            "cannot be compared",
        ),
        ("/spec/containers/-".to_owned(), json!({"name": "new", "image": "i"}), "container new does not run"),
        (
            "/spec/initContainers".to_owned(),
            json!([{"name": "init", "image": "i"}]),
            "container init does not run",
        ),
        (container("name"), json!("other"), "container etcd is not in the manifest"),
        (container("image"), json!("etcd:4"), "an annotation"),
        (container("ports"), json!([]), "an annotation"),
        (container("terminationMessagePolicy"), json!("FallbackToLogsOnError"), "an annotation"),
        (container("command/1"), json!("--name=other"), "command"),
        (container("args"), json!(["--debug"]), "args"),
        (container("workingDir"), json!("/srv"), "workingDir"),
        (container("env/-"), json!({"name": "A", "value": "1"}), "env"),
        (container("env/1"), json!({"name": "IP", "value": "10.0.0.9"}), "env"),
        (container("env"), json!([{"name": "NODE", "value": "n1"}]), "env"),
        (container("envFrom"), json!([{"configMapRef": {"name": "c"}}]), "a value that cannot be compared"),
        (container("volumeMounts/0/readOnly"), json!(true), "volumeMounts"),
        (container("volumeMounts/0/mountPropagation"), json!("HostToContainer"), "volumeMounts"),
        (container("volumeMounts/0/subPath"), json!("a"), "a volume that cannot be compared"),
        (container("volumeMounts"), json!([]), "volumeMounts"),
        (container("resources/limits/memory"), json!("200Mi"), "resources"),
        (container("resources/limits/cpu"), json!("2"), "resources"),
        (container("resources/requests/cpu"), json!("200m"), "resources"),
        (container("stdin"), json!(true), "stdin"),
        (container("tty"), json!(true), "tty"),
        (container("securityContext"), json!({"privileged": true}), "securityContext"),
        (container("securityContext"), json!({"readOnlyRootFilesystem": true}), "securityContext"),
        (container("securityContext"), json!({"allowPrivilegeEscalation": false}), "securityContext"),
        (container("securityContext"), json!({"capabilities": {"add": ["NET_ADMIN"]}}), "securityContext"),
    ] {
        let changed = with(manifest(), &pointer, value);
        let difference = compare(changed, &running(&details())).unwrap_or_default();
        assert!(difference.contains(text), "{pointer}: {difference:?}");
    }
}

#[test]
fn what_runs_beyond_the_manifest_is_a_difference() {
    let config = |field: &str| format!("/config/{field}");
    for (pointer, value, text) in [
        (config("args"), json!(["--debug"]), "args"),
        (config("envs/-"), json!({"key": "DEBUG", "value": "1"}), "env"),
        (config("envs/-"), json!({"key": "HTTP_PORT", "value": "1"}), "env"),
        (config("mounts/-"), json!({"container_path": "/srv", "host_path": "/srv"}), "volumeMounts"),
        (config("mounts/2/host_path"), json!("/srv/hosts"), "volumeMounts"),
        (config("devices"), json!([{"host_path": "/dev/fuse"}]), "volumeDevices"),
        (config("linux/security_context/privileged"), json!(true), "securityContext"),
        (config("linux/security_context/run_as_user"), json!({"value": 5}), "securityContext"),
    ] {
        let changed = with(details(), &pointer, value);
        let difference = compare(manifest(), &running(&changed)).unwrap_or_default();
        assert!(difference.contains(text), "{pointer}: {difference:?}");
    }
}

#[test]
fn only_sandboxes_of_static_pods_of_the_same_source_are_compared() {
    for (key, value) in [
        ("kubernetes.io/config.source", "api"),
        ("kubernetes.io/config.source", "http"),
        ("kubernetes.io/config.hash", "other"),
    ] {
        let mut running = running(&details());
        running.sandbox.annotations.insert(key.to_owned(), value.to_owned());
        let difference = compare(manifest(), &running).unwrap_or_default();
        assert!(difference.contains("not that of a static pod of the source file"), "{difference}");
    }
}

#[test]
fn details_without_a_configuration_are_not_compared() {
    assert_eq!(RunningConfig::of_details(r#"{"pid": 1, "runtimeSpec": {}}"#), None, "as CRI-O shows them");
    assert_eq!(RunningConfig::of_details("x"), None);
    assert_eq!(RunningConfig::of_details(r#"{"config": {"command": 1}}"#), None);
}
