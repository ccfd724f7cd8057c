use keelson_config::ControlPlane;
use serde_json::json;

use super::*;
use crate::document::merge;
use crate::resolve::{Flags, Host, resolve};

fn document(file: &str, fields: Value) -> Document {
    let mut root = fields.as_object().unwrap().clone();
    root.insert("apiVersion".into(), KUBELET_API_VERSION.into());
    root.insert("kind".into(), KUBELET_KIND.into());
    let mut leaves = BTreeMap::new();
    flatten(String::new(), &root.clone().into(), &mut leaves);
    let fields = root.keys().chain(leaves.keys()).map(Clone::clone);
    let lines = fields.zip(3..).collect();
    Document { file: file.into(), folder: "/etc/k".into(), root, lines, ..Document::default() }
}

/// The configuration with `over` above `base`, or what is wrong with it.
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
    resolve_over(inputs, &files.config, &document("etcd config@7", over))
        .map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

fn good(base: Value, above: Value) -> Config {
    over(&Flags::default(), Some(base), above).unwrap().config
}

#[test]
fn maps_are_merged_lists_and_values_replaced_and_null_removes() {
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
    assert!(means_the_same(&config, &same), "{config:#?}\n{same:#?}");
    assert!(!means_the_same(&config, &good(base, json!({}))));
    assert_eq!((config.resources.max_pods, config.resources.pod_pids_limit), (50, 99));
    assert!(config.provenance["resources.podPidsLimit"].starts_with("etcd config@7:"));
    assert!(config.provenance["resources.maxPods"].starts_with("kubelet.yaml:"));
    assert!(config.provenance["runtime.clusterDns"].starts_with("etcd config@7:"));
}

#[test]
fn a_map_takes_the_place_of_what_is_none_and_what_is_none_that_of_a_map() {
    let mut whole = json!({"a": 1, "b": {"c": 2}, "d": {"e": {"f": 3, "g": 4}}});
    let over = json!({"a": {"x": 1, "y": null}, "b": [1], "d": {"e": {"f": null}}});
    merge(whole.as_object_mut().unwrap(), over.as_object().unwrap());
    assert_eq!(whole, json!({"a": {"x": 1}, "b": [1], "d": {"e": {"g": 4}}}));
}

#[test]
fn flags_win_and_a_node_without_a_file_takes_it_too() {
    let flags = Flags { log_format: Some("json".into()), ..Flags::default() };
    let config = over(&flags, None, json!({"maxPods": 9, "logging": {"format": "text"}})).unwrap().config;
    assert_eq!((config.resources.max_pods, config.logging.format.as_str()), (9, "json"));
    let relative = json!({"resolvConf": "resolv.conf"});
    let config = over(&flags, None, relative.clone()).unwrap().config;
    assert_eq!(config.runtime.resolv_conf, "/resolv.conf");
    assert_eq!(good(json!({}), relative).runtime.resolv_conf, "/etc/k/resolv.conf");
}

/// As a drop-in does (node-and-api.md §2.2, §2.3).
#[test]
fn one_threshold_or_the_update_leaves_the_others_and_the_report_as_the_file_has_them() {
    let above = json!({"evictionHard": {"memory.available": "200Mi"}, "nodeStatusUpdateFrequency": "4s"});
    for (base, thresholds, report) in [
        (Some(json!({})), 5, 300_000),
        (Some(json!({"nodeStatusUpdateFrequency": "7s"})), 5, 7_000),
        (Some(json!({"evictionHard": {"pid.available": "5%"}})), 2, 300_000),
        // It is the file of a node that has none.
        (None, 1, 4_000),
    ] {
        let config = over(&Flags::default(), base.clone(), above.clone()).unwrap().config;
        assert_eq!(config.resources.eviction.hard.len(), thresholds, "{base:?}");
        assert_eq!(config.resources.eviction.hard["memory.available"], "200Mi", "{base:?}");
        assert_eq!(config.node_status.status_report_ms, report, "{base:?}");
    }
}

#[test]
fn what_is_wrong_with_it_is_told_with_its_field_and_line() {
    let problems = over(
        &Flags::default(),
        Some(json!({"maxPods": 50})),
        json!({"maxPods": -1, "maxPod": 7, "podPidsLimit": "many"}),
    )
    .unwrap_err();
    for (field, line) in [("maxPod = 7", 6), ("maxPods = -1", 7), ("podPidsLimit = \"many\"", 8)] {
        let expected = format!("invalid configuration: {field} (etcd config@7:");
        let found = problems.iter().find(|problem| problem.starts_with(&expected));
        assert!(found.is_some(), "{expected} at some line such as {line}: {problems:#?}");
    }
    let host = Host { hostname: "n".into(), ..Host::default() };
    let flags = Flags::default();
    let inputs = Inputs { flags: &flags, kubelet: None, drop_ins: &[], keelson: None, host: &host };
    let none = Document { file: "etcd config@8".into(), ..Document::default() };
    let problems = resolve_over(inputs, &Config::default(), &none).unwrap_err();
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(texts[0].contains("apiVersion = nothing (etcd config@8)"), "{texts:#?}");
    assert!(texts[1].contains("kind = nothing"), "{texts:#?}");
}

#[test]
fn each_change_of_what_cannot_change_is_named_with_the_value_of_the_files() {
    let problems = over(
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
    assert_eq!(problems.len(), starts.len(), "{problems:#?}");
    for (problem, start) in problems.iter().zip(starts) {
        assert!(problem.starts_with(start), "{problem}");
    }
    assert!(problems[2].contains("by the files of the node it is \"/pods\""), "{}", problems[2]);
    assert!(problems[4].contains("by the files of the node it is nothing"), "{}", problems[4]);
}

#[test]
fn what_no_field_sets_is_named_by_its_place_and_what_may_change_is_not_named() {
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
    let problems = changes_of_the_fixed(&files, &other, "etcd config@7");
    let fields: Vec<&str> = problems.iter().map(|problem| problem.field.as_str()).collect();
    assert!(fields.iter().all(|field| {
        let places = ["api.tls", "controlPlane", "manageHost", "nodeName", "users.uids.pod-sync"];
        // That part of `controlPlane` has a field.
        places.iter().any(|f| field.starts_with(f)) || *field == "nodeLeaseDurationSeconds"
    }));
    for field in ["api.tls.clientCaFile", "manageHost", "nodeName", "users.uids.pod-sync"] {
        assert!(fields.contains(&field), "{fields:?}");
    }
    assert!(fields.iter().any(|field| field.starts_with("controlPlane")), "{fields:?}");
    assert!(problems.iter().all(|problem| problem.origin == "etcd config@7"));
}

#[test]
fn the_length_of_the_lease_is_named_as_its_author_wrote_it() {
    let etcd = keelson_config::Etcd::plain(vec!["http://h:1".into()]);
    let of = |lease_seconds| Config {
        control_plane: ControlPlane::Etcd(keelson_config::Etcd { lease_seconds, ..etcd.clone() }),
        ..Config::default()
    };
    let problems = changes_of_the_fixed(&of(40), &of(10), "etcd config@7");
    let told: Vec<_> = problems.iter().map(|problem| (&*problem.field, &*problem.value)).collect();
    assert_eq!(told, [("nodeLeaseDurationSeconds", "10")]);
}
