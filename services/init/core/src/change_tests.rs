use serde_json::json;

use super::*;
use crate::resolve::Flags;
use crate::resolve::tests::{host, keelson, kubelet, run};

fn resolved(fields: Value, ours: Value) -> Resolved {
    run(&Flags::default(), Some(&kubelet(fields)), Some(&keelson(ours)), &host()).unwrap()
}

fn in_force(resolved: Resolved) -> InForce {
    let Resolved { config, kubelet_configuration, feature_gates, .. } = resolved;
    InForce { config, kubelet_configuration, feature_gates }
}

fn between(before: (Value, Value), after: (Value, Value)) -> (InForce, Waiting) {
    let (before, after) = (in_force(resolved(before.0, before.1)), resolved(after.0, after.1));
    let live = with_live(&before, &after);
    let waiting = waiting(&live, &after, Some("keelson.yaml"));
    (live, waiting)
}

#[test]
fn the_same_files_wait_for_nothing_and_neither_does_what_is_taken_live() {
    let files = || (json!({"maxPods": 7, "logging": {"verbosity": 2}}), json!({"startParallelism": 3}));
    let (same, nothing) = between(files(), files());
    assert_eq!(same, in_force(resolved(files().0, files().1)));
    assert!(nothing.is_empty() && nothing.text().is_none(), "{nothing:?}");

    let fields = json!({
        "maxPods": 7, "logging": {"verbosity": 4}, "imageGCHighThresholdPercent": 70, "imageGCLowThresholdPercent": 60,
        "containerLogMaxFiles": 9, "containerLogMaxSize": "1Mi", "nodeStatusMaxImages": 5,
    });
    let (live, waiting) = between(files(), (fields.clone(), files().1));
    assert_eq!(waiting, Waiting::default());
    let mut whole = in_force(resolved(fields, files().1));
    // Lines count from the top of the file.
    assert_eq!(
        live.config.provenance["containerLogs.maxFiles"],
        whole.config.provenance["containerLogs.maxFiles"]
    );
    whole.config.provenance.clear();
    let mut live = live;
    live.config.provenance.clear();
    assert_eq!(live, whole, "all of the files is in force");
}

#[test]
fn what_is_not_taken_live_waits_for_all_that_read_it_and_stays_as_it_was() {
    let before = || (json!({"maxPods": 7, "containerLogMaxFiles": 3}), json!({}));
    let after = (
        json!({"maxPods": 8, "containerLogMaxFiles": 4, "clusterDNS": ["10.0.0.10"], "evictionHard": {"memory.available": "1Gi"}}),
        json!({"startParallelism": 3}),
    );
    let (live, waiting) = between(before(), after);
    assert_eq!((live.config.resources.max_pods, live.config.container_logs.max_files), (7, 4));
    let document = &live.kubelet_configuration;
    assert_eq!((&document["maxPods"], &document["containerLogMaxFiles"]), (&json!(7), &json!(4)));
    assert!(document.get("clusterDNS").is_none_or(|addresses| *addresses == json!([])), "{document:?}");
    assert!(live.config.runtime.cluster_dns.is_empty());
    for field in ["maxPods", "clusterDNS", "evictionHard.memory.available", "runtime.startParallelism"] {
        assert!(waiting.fields.iter().any(|name| name == field), "{field}: {waiting:?}");
    }
    assert!(!waiting.fields.iter().any(|name| name.starts_with("resources.")), "once: {waiting:?}");
    assert_eq!(waiting.values["kubeletConfiguration.maxPods"], 8);
    assert_eq!(waiting.values["resources.maxPods"], 8);
    assert_eq!(waiting.values["kubeletConfiguration.evictionHard.nodefs.available"], Value::Null);
    assert_eq!(waiting.values["runtime.startParallelism"], 3);
    let readers: Vec<&str> = waiting.services.iter().map(|service| service.as_str()).collect();
    for service in ["pod-config", "volume-manager", "resource-manager", "pod-sync", "node-status", "node-api"]
    {
        assert!(readers.contains(&service), "{readers:?}");
    }
    assert!(!waiting.goes_with(ServiceName::RuntimeShim) && waiting.goes_with(ServiceName::PodSync));
    let text = waiting.text().unwrap();
    assert!(text.starts_with("changed files wait for a restart of pod-config, "), "{text}");
    assert!(text.contains("`keelson services restart pod-config`") && text.contains("maxPods"), "{text}");
}

#[test]
fn who_reads_one_value_alone_is_started_alone() {
    for (fields, ours, services) in [
        (json!({}), json!({"startParallelism": 3}), &["pod-sync"][..]),
        (json!({}), json!({"strictVerbs": true}), &["node-api"]),
        (json!({"makeIPTablesUtilChains": false}), json!({}), &["resource-manager", "node-api"]),
        // Nobody acts on it; it is shown.
        (json!({"hairpinMode": "none"}), json!({}), &["node-api"]),
        (json!({"featureGates": {"EnvFiles": false}}), json!({}), &["node-api"]),
    ] {
        let (_, waiting) = between((json!({}), json!({})), (fields.clone(), ours.clone()));
        let names: Vec<&str> = waiting.services.iter().map(|service| service.as_str()).collect();
        assert_eq!(names, services, "{fields} {ours}");
        assert!(waiting.of_agent.is_empty() && waiting.text().is_some());
    }
}

#[test]
fn what_hangs_on_init_waits_for_the_agent_and_so_does_all_that_was_written_with_it() {
    let after = (json!({"podLogsDir": "/var/log/k", "maxPods": 8}), json!({"manageHost": false}));
    let (live, waiting) = between((json!({}), json!({})), after);
    assert_eq!(live.config.paths.pod_logs_dir, Config::default().paths.pod_logs_dir);
    assert_eq!(waiting.of_agent, ["podLogsDir", "manageHost"]);
    assert!(ServiceName::ALL.into_iter().all(|service| !waiting.goes_with(service)));
    let text = waiting.text().unwrap();
    assert_eq!(text, "changed files wait for a restart of the agent: podLogsDir, manageHost, maxPods");
}

#[test]
fn a_field_that_is_taken_out_goes_back_to_its_default() {
    let (live, waiting) = between(
        (json!({"containerLogMaxFiles": 9, "maxPods": 7}), json!({"startParallelism": 3})),
        (json!({}), json!({})),
    );
    assert_eq!(live.config.container_logs.max_files, 5);
    assert_eq!(live.kubelet_configuration["containerLogMaxFiles"], 5);
    assert!(!live.config.provenance.contains_key("containerLogs.maxFiles"));
    assert_eq!(waiting.fields, ["maxPods", "runtime.startParallelism"]);
    assert_eq!(waiting.values["kubeletConfiguration.maxPods"], 110);
}
