use keelson_config::ControlPlane;
use serde_json::json;

use super::*;
use crate::document::merge;
use crate::inputs::{Flags, Host};
use crate::resolve::resolve;

fn document(file: &str, fields: Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), KUBELET_API_VERSION.into());
    root.insert("kind".into(), KUBELET_KIND.into());
    let mut leaves = BTreeMap::new();
    leaf_values(String::new(), &root.clone().into(), &mut leaves);
    let fields = root.keys().chain(leaves.keys()).map(Clone::clone);
    let lines = fields.zip(3..).collect();
    Document { file: file.into(), folder: "/etc/k".into(), root, lines, ..Document::default() }
}

/// The configuration with `over` merged over `base`, or its errors.
fn over(flags: &Flags, base: Option<Value>, over: Value) -> Result<Resolved, Vec<String>> {
    let host = Host {
        hostname: "edge-1".into(),
        exe_dir: "/opt/keelson/bin".into(),
        cwd: "/srv".into(),
        memory_bytes: 8 << 30,
        nodefs_bytes: 100 << 30,
        ..Host::default()
    };
    let base = base.map(|fields| document("kubelet.yaml", fields));
    let inputs = Inputs { flags, kubelet: base.as_ref(), drop_ins: &[], keelson: None, host: &host };
    let files = resolve(inputs).unwrap();
    resolve_assigned(inputs, &files.config, &document("etcd config@7", over))
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

fn good(base: Value, above: Value) -> Config {
    over(&Flags::default(), Some(base), above).unwrap().config
}

#[test]
fn assigned_config_merges_maps_replaces_values_and_null_removes() {
    let base = json!({
        "maxPods": 50,
        "clusterDNS": ["10.0.0.10", "10.0.0.11"],
        "systemReserved": {"cpu": "100m", "memory": "100Mi"},
        "evictionHard": {"memory.available": "200Mi"},
        "imageGCHighThresholdPercent": 90,
    });
    let above = json!({
        "clusterDNS": ["10.0.0.12"],
        "systemReserved": {"memory": "300Mi", "ephemeral-storage": "1Gi"},
        "evictionHard": null,
        "podPidsLimit": 99,
    });
    let config = good(base.clone(), above.clone());
    let same = good(
        json!({
            "maxPods": 50,
            "clusterDNS": ["10.0.0.12"],
            "systemReserved": {"cpu": "100m", "memory": "300Mi", "ephemeral-storage": "1Gi"},
            "imageGCHighThresholdPercent": 90,
            "podPidsLimit": 99,
        }),
        json!({}),
    );
    assert!(is_equivalent(&config, &same), "{config:#?}\n{same:#?}");
    assert!(!is_equivalent(&config, &good(base, json!({}))));
    assert_eq!((config.resources.max_pods, config.resources.pod_pids_limit), (50, 99));
    assert!(config.provenance["resources.podPidsLimit"].starts_with("etcd config@7:"));
    assert!(config.provenance["resources.maxPods"].starts_with("kubelet.yaml:"));
    assert!(config.provenance["runtime.clusterDns"].starts_with("etcd config@7:"));
}

#[test]
fn merge_replaces_other_values_with_maps_and_vice_versa() {
    let mut whole = json!({"a": 1, "b": {"c": 2}, "d": {"e": {"f": 3, "g": 4}}});
    let over = json!({"a": {"x": 1, "y": null}, "b": [1], "d": {"e": {"f": null}}});
    merge(whole.as_object_mut().unwrap(), over.as_object().unwrap());
    assert_eq!(whole, json!({"a": {"x": 1}, "b": [1], "d": {"e": {"g": 4}}}));
}

#[test]
fn flags_override_an_assigned_config_and_it_needs_no_file() {
    let flags = Flags { log_format: Some("json".into()), ..Flags::default() };
    let config = over(&flags, None, json!({"maxPods": 9, "logging": {"format": "text"}})).unwrap().config;
    assert_eq!((config.resources.max_pods, config.logging.format.as_str()), (9, "json"));
    let relative = json!({"resolvConf": "resolv.conf"});
    let config = over(&flags, None, relative.clone()).unwrap().config;
    assert_eq!(config.runtime.resolv_conf, "/resolv.conf");
    assert_eq!(good(json!({}), relative).runtime.resolv_conf, "/etc/k/resolv.conf");
}

/// The rules of drop-ins apply (node-and-api.md §2.2, §2.3).
#[test]
fn assigned_config_keeps_unset_thresholds_and_report_frequency() {
    let above = json!({"evictionHard": {"memory.available": "200Mi"}, "nodeStatusUpdateFrequency": "4s"});
    for (base, thresholds, report) in [
        (Some(json!({})), 5, 300_000),
        (Some(json!({"nodeStatusUpdateFrequency": "7s"})), 5, 7_000),
        (Some(json!({"evictionHard": {"pid.available": "5%"}})), 2, 300_000),
        // On a node without a file, the assigned configuration is the file.
        (None, 1, 4_000),
    ] {
        let config = over(&Flags::default(), base.clone(), above.clone()).unwrap().config;
        assert_eq!(config.resources.eviction.hard.len(), thresholds, "{base:?}");
        assert_eq!(config.resources.eviction.hard["memory.available"], "200Mi", "{base:?}");
        assert_eq!(config.node_status.status_report_ms, report, "{base:?}");
    }
}

#[test]
fn errors_of_an_assigned_config_have_field_and_line() {
    let errors = over(
        &Flags::default(),
        Some(json!({"maxPods": 50})),
        json!({"maxPods": -1, "maxPod": 7, "podPidsLimit": "many"}),
    )
    .unwrap_err();
    for (field, line) in [("maxPod = 7", 6), ("maxPods = -1", 7), ("podPidsLimit = \"many\"", 8)] {
        let expected = format!("invalid configuration: {field} (etcd config@7:");
        let found = errors.iter().find(|error| error.starts_with(&expected));
        assert!(found.is_some(), "{expected} at some line such as {line}: {errors:#?}");
    }
    let host = Host { hostname: "n".into(), ..Host::default() };
    let flags = Flags::default();
    let inputs = Inputs { flags: &flags, kubelet: None, drop_ins: &[], keelson: None, host: &host };
    let none = Document { file: "etcd config@8".into(), ..Document::default() };
    let errors = resolve_assigned(inputs, &Config::default(), &none).unwrap_err();
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(texts[0].contains("apiVersion = nothing (etcd config@8)"), "{texts:#?}");
    assert!(texts[1].contains("kind = nothing"), "{texts:#?}");
}

#[test]
fn immutable_changes_are_reported_with_the_value_of_the_files() {
    let errors = over(
        &Flags::default(),
        Some(json!({"cgroupRoot": "/pods"})),
        json!({
            "podLogsDir": "/logs",
            "cgroupDriver": "systemd",
            "cgroupRoot": "/other",
            "containerRuntimeEndpoint": "unix:///run/other.sock",
            "imageServiceEndpoint": "unix:///run/images.sock",
            "maxPods": 8,
        }),
    )
    .unwrap_err();
    let starts = [
        "invalid configuration: podLogsDir = \"/logs\" (etcd config@7:",
        "invalid configuration: cgroupDriver = \"systemd\" (etcd config@7:",
        "invalid configuration: cgroupRoot = \"/other\" (etcd config@7:",
        "invalid configuration: containerRuntimeEndpoint = \"unix:///run/other.sock\" (etcd config@7:",
        "invalid configuration: imageServiceEndpoint = \"unix:///run/images.sock\" (etcd config@7:",
    ];
    assert_eq!(errors.len(), starts.len(), "{errors:#?}");
    for (error, start) in errors.iter().zip(starts) {
        assert!(error.starts_with(start), "{error}");
    }
    assert!(errors[2].contains("by the files of the node it is \"/pods\""), "{}", errors[2]);
    assert!(errors[4].contains("by the files of the node it is nothing"), "{}", errors[4]);
}

#[test]
fn immutable_values_without_a_field_are_named_by_their_path() {
    let files = Config { node_name: "edge".into(), ..Config::default() };
    let mut other = files.clone();
    other.node_name = "other".into();
    other.manage_host = false;
    other.users.uids.insert("pod-sync".into(), 7);
    other.control_plane = ControlPlane::Etcd(keelson_config::Etcd::plain(vec!["http://h:1".into()]));
    other.resources.max_pods = 3;
    other.runtime.request_timeout_ms = 1;
    other.api.port = 1;
    other.api.tls = Some(keelson_config::ApiTls::with_client_ca("/ca".into()));
    let errors = immutable_changes(&files, &other, "etcd config@7");
    let fields: Vec<&str> = errors.iter().map(|error| error.field.as_str()).collect();
    assert!(fields.iter().all(|field| {
        let places = ["api.tls", "controlPlane", "manageHost", "nodeName", "users.uids.pod-sync"];
        // `controlPlane.etcd.leaseSeconds` has a field.
        places.iter().any(|f| field.starts_with(f)) || *field == "nodeLeaseDurationSeconds"
    }));
    for field in ["api.tls.clientCaFile", "manageHost", "nodeName", "users.uids.pod-sync"] {
        assert!(fields.contains(&field), "{fields:?}");
    }
    assert!(fields.iter().any(|field| field.starts_with("controlPlane")), "{fields:?}");
    assert!(errors.iter().all(|error| error.origin == "etcd config@7"));
}

#[test]
fn an_immutable_lease_duration_is_named_by_its_field() {
    let etcd = keelson_config::Etcd::plain(vec!["http://h:1".into()]);
    let of = |lease_seconds| Config {
        control_plane: ControlPlane::Etcd(keelson_config::Etcd { lease_seconds, ..etcd.clone() }),
        ..Config::default()
    };
    let errors = immutable_changes(&of(40), &of(10), "etcd config@7");
    let found: Vec<_> = errors.iter().map(|error| (&*error.field, &*error.value)).collect();
    assert_eq!(found, [("nodeLeaseDurationSeconds", "10")]);
}
