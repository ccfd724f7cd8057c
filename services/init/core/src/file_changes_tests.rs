use serde_json::json;

use super::*;
use crate::inputs::Flags;
use crate::testing::{host, keelson, kubelet, run};

fn resolved(fields: Value, ours: Value) -> Resolved {
    run(&Flags::default(), Some(&kubelet(fields)), Some(&keelson(ours)), &host()).unwrap()
}

fn in_force(resolved: Resolved) -> ActiveConfig {
    let Resolved { config, kubelet_configuration, feature_gates, .. } = resolved;
    ActiveConfig { config, kubelet_configuration, feature_gates }
}

fn between(before: (Value, Value), after: (Value, Value)) -> (ActiveConfig, PendingChanges) {
    let (before, after) = (in_force(resolved(before.0, before.1)), resolved(after.0, after.1));
    let live = apply_live(&before, &after);
    let pending_changes = pending_changes(&live, &after, Some("keelson.yaml"));
    (live, pending_changes)
}

#[test]
fn unchanged_files_and_live_values_are_not_pending() {
    let files = || (json!({"maxPods": 7, "logging": {"verbosity": 2}}), json!({"startParallelism": 3}));
    let (same, nothing) = between(files(), files());
    assert_eq!(same, in_force(resolved(files().0, files().1)));
    assert!(nothing.is_empty() && nothing.text().is_none(), "{nothing:?}");

    let fields = json!({
        "maxPods": 7, "logging": {"verbosity": 4}, "imageGCHighThresholdPercent": 70, "imageGCLowThresholdPercent": 60,
        "containerLogMaxFiles": 9, "containerLogMaxSize": "1Mi", "nodeStatusMaxImages": 5,
    });
    let (live, pending_changes) = between(files(), (fields.clone(), files().1));
    assert_eq!(pending_changes, PendingChanges::default());
    let mut whole = in_force(resolved(fields, files().1));
    // The provenance has line numbers.
    assert_eq!(
        live.config.provenance["containerLogs.maxFiles"],
        whole.config.provenance["containerLogs.maxFiles"]
    );
    whole.config.provenance.clear();
    let mut live = live;
    live.config.provenance.clear();
    assert_eq!(live, whole, "the files are in force completely");
}

#[test]
fn other_changes_are_pending_for_all_their_readers_and_not_in_force() {
    let before = || (json!({"maxPods": 7, "containerLogMaxFiles": 3}), json!({}));
    let after = (
        json!({"maxPods": 8, "containerLogMaxFiles": 4, "clusterDNS": ["10.0.0.10"], "evictionHard": {"memory.available": "1Gi"}}),
        json!({"startParallelism": 3}),
    );
    let (live, pending_changes) = between(before(), after);
    assert_eq!((live.config.resources.max_pods, live.config.container_logs.max_files), (7, 4));
    let document = &live.kubelet_configuration;
    assert_eq!((&document["maxPods"], &document["containerLogMaxFiles"]), (&json!(7), &json!(4)));
    assert!(document.get("clusterDNS").is_none_or(|addresses| *addresses == json!([])), "{document:?}");
    assert!(live.config.runtime.cluster_dns.is_empty());
    for field in ["maxPods", "clusterDNS", "evictionHard.memory.available", "runtime.startParallelism"] {
        assert!(pending_changes.fields.iter().any(|name| name == field), "{field}: {pending_changes:?}");
    }
    assert!(
        !pending_changes.fields.iter().any(|name| name.starts_with("resources.")),
        "reported once: {pending_changes:?}"
    );
    assert_eq!(pending_changes.values["kubeletConfiguration.maxPods"], 8);
    assert_eq!(pending_changes.values["resources.maxPods"], 8);
    assert_eq!(pending_changes.values["kubeletConfiguration.evictionHard.nodefs.available"], Value::Null);
    assert_eq!(pending_changes.values["runtime.startParallelism"], 3);
    let readers: Vec<&str> = pending_changes.services.iter().map(|service| service.as_str()).collect();
    for service in ["pod-config", "volume-manager", "resource-manager", "pod-sync", "node-status", "node-api"]
    {
        assert!(readers.contains(&service), "{readers:?}");
    }
    assert!(
        !pending_changes.applies_on_restart_of(ServiceName::RuntimeShim)
            && pending_changes.applies_on_restart_of(ServiceName::PodSync)
    );
    let text = pending_changes.text().unwrap();
    assert!(text.starts_with("changed files wait for a restart of pod-config, "), "{text}");
    assert!(text.contains("`keelson services restart pod-config`") && text.contains("maxPods"), "{text}");
}

#[test]
fn only_the_readers_of_a_changed_value_are_restarted() {
    for (fields, ours, services) in [
        (json!({}), json!({"startParallelism": 3}), &["pod-sync"][..]),
        (json!({}), json!({"strictVerbs": true}), &["node-api"]),
        (json!({"makeIPTablesUtilChains": false}), json!({}), &["resource-manager", "node-api"]),
        // No service acts on this one, but node-api shows it.
        (json!({"hairpinMode": "none"}), json!({}), &["node-api"]),
        (json!({"featureGates": {"EnvFiles": false}}), json!({}), &["node-api"]),
    ] {
        let (_, pending_changes) = between((json!({}), json!({})), (fields.clone(), ours.clone()));
        let names: Vec<&str> = pending_changes.services.iter().map(|service| service.as_str()).collect();
        assert_eq!(names, services, "{fields} {ours}");
        assert!(pending_changes.agent_fields.is_empty() && pending_changes.text().is_some());
    }
}

#[test]
fn changes_that_need_an_agent_restart_hold_back_all_other_changes() {
    let after = (json!({"podLogsDir": "/var/log/k", "maxPods": 8}), json!({"manageHost": false}));
    let (live, pending_changes) = between((json!({}), json!({})), after);
    assert_eq!(live.config.paths.pod_logs_dir, Config::default().paths.pod_logs_dir);
    assert_eq!(pending_changes.agent_fields, ["podLogsDir", "manageHost"]);
    assert!(ServiceName::ALL.into_iter().all(|service| !pending_changes.applies_on_restart_of(service)));
    let text = pending_changes.text().unwrap();
    assert_eq!(text, "changed files wait for a restart of the agent: podLogsDir, manageHost, maxPods");
}

#[test]
fn a_removed_field_returns_to_its_default() {
    let (live, pending_changes) = between(
        (json!({"containerLogMaxFiles": 9, "maxPods": 7}), json!({"startParallelism": 3})),
        (json!({}), json!({})),
    );
    assert_eq!(live.config.container_logs.max_files, 5);
    assert_eq!(live.kubelet_configuration["containerLogMaxFiles"], 5);
    assert!(!live.config.provenance.contains_key("containerLogs.maxFiles"));
    assert_eq!(pending_changes.fields, ["maxPods", "runtime.startParallelism"]);
    assert_eq!(pending_changes.values["kubeletConfiguration.maxPods"], 110);
}
