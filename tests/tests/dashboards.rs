//! The queries of the dashboard and the alerts match the metrics that the agent exports.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use keelson_config::ServiceName;
use keelson_testkit::{Agent, AgentSpec, BUSYBOX_IMAGE, Component, Scratch, eventually};
use keelson_tests::promql::{Exported, QueryNames, exported, mismatches, query_names, template_labels};
use keelson_tests::{LIMIT, http, replace_service};
use serde_json::{Value, json};

/// Serves the manifests as pods of an API server: static pods are critical, and never evicted.
const FAKE_POD_CONFIG: &str = env!("CARGO_BIN_EXE_fake-pod-config");

/// The paths that Prometheus scrapes.
const PATHS: [&str; 4] = ["/metrics", "/metrics/resource", "/metrics/cadvisor", "/metrics/probes"];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/dashboards").join(name)
}

/// An expression, its place in the file, and the labels of its legend.
struct Query {
    place: String,
    expression: String,
    shown: BTreeSet<String>,
}

fn dashboard_queries() -> Vec<Query> {
    let board: Value = serde_json::from_str(&fs::read_to_string(file("keelson.json")).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    let mut queries: Vec<Query> =
        board["templating"]["list"].as_array().unwrap().iter().filter_map(variable_query).collect();
    assert_eq!(queries.len(), 1, "the node is asked for");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title} shows nothing");
        queries.extend(targets.iter().map(|target| Query {
            place: format!("the panel {title:?}"),
            expression: target["expr"].as_str().unwrap().to_owned(),
            shown: template_labels(target["legendFormat"].as_str().unwrap()),
        }));
    }
    queries
}

/// The query of a variable: `label_values(metric, label)`.
fn variable_query(variable: &Value) -> Option<Query> {
    let query = variable["query"].as_str().filter(|_| variable["type"] == "query")?;
    let arguments = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
    let (metric, label) = arguments.rsplit_once(", ").unwrap();
    Some(Query {
        place: format!("the variable {}", variable["name"]),
        expression: metric.to_owned(),
        shown: [label.to_owned()].into(),
    })
}

fn rule_queries() -> Vec<Query> {
    let rules: Value =
        serde_saphyr::from_str(&fs::read_to_string(file("keelson-rules.yaml")).unwrap()).unwrap();
    let groups = rules["groups"].as_array().unwrap();
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
    let query = |rule: &Value| {
        let name = rule["alert"].as_str().unwrap();
        let text =
            |key: &str| rule["annotations"][key].as_str().unwrap_or_else(|| panic!("{name} has no {key}"));
        assert!(text("runbook").ends_with('.'), "{name}: a sentence on what to do");
        assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{name}");
        let shown =
            template_labels(text("summary")).union(&template_labels(text("runbook"))).cloned().collect();
        Query {
            place: format!("the alert {name}"),
            expression: rule["expr"].as_str().unwrap().to_owned(),
            shown,
        }
    };
    rules.map(query).collect()
}

fn pod(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "uid": format!("uid-of-{name}")},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "containers": [{
                "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/sh", "-c", "exec sleep 1000000"],
                "resources": {"requests": {"cpu": "1m"}, "limits": {"cpu": "500m"}},
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            }],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    });
    change(&mut pod["spec"]);
    pod.to_string()
}

/// An agent whose pods are served by a fake pod-config, and whose volumes are measured soon.
fn with_fake_pod_config(spec: &mut AgentSpec) {
    replace_service(spec, ServiceName::PodConfig, FAKE_POD_CONFIG);
    spec.kubelet.insert("volumeStatsAggPeriod".into(), "1s".into());
}

/// Scrapes the agent until `queries` find everything; what is missing when the time is up.
async fn until_found(agent: &Agent, known: &mut Exported, queries: &[(Query, QueryNames)]) -> Vec<String> {
    let mut missing = Vec::new();
    let found = eventually(LIMIT * 2, "everything that is asked for is exported", async || {
        for path in PATHS {
            let text = http::get_ok(&format!("{}{path}", agent.api_url())).await.unwrap_or_default();
            exported(&text, known).unwrap();
        }
        missing = queries
            .iter()
            .flat_map(|(query, query_names)| {
                let mismatches = mismatches(query_names, &query.shown, known);
                mismatches.into_iter().map(|fault| format!("{}: {fault}", query.place))
            })
            .collect();
        missing.is_empty()
    });
    // The list of missing names says more than a timeout.
    let _ = found.await;
    missing
}

#[tokio::test]
async fn every_metric_label_and_value_of_the_dashboard_and_the_alerts_is_exported() {
    let queries: Vec<(Query, QueryNames)> = dashboard_queries()
        .into_iter()
        .chain(rule_queries())
        .map(|query| {
            let query_names =
                query_names(&query.expression).unwrap_or_else(|e| panic!("{}: {e:#}", query.place));
            (query, query_names)
        })
        .collect();
    assert!(queries.len() > 60, "{} expressions", queries.len());
    let (evictions, others): (Vec<_>, Vec<_>) = queries.into_iter().partition(|(_, query_names)| {
        query_names.metrics.iter().any(|(name, _)| name.starts_with("kubelet_evictions"))
    });
    assert!(!evictions.is_empty());

    let mut known = Exported::new();
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let probe = json!({"exec": {"command": ["/bin/true"]}, "periodSeconds": 1});
    let manifests = [
        ("runs", pod("runs", |spec| spec["containers"][0]["readinessProbe"] = probe)),
        ("ends", pod("ends", |spec| spec["containers"][0]["command"] = json!(["/bin/false"]))),
        ("no-command", pod("no-command", |spec| spec["containers"][0]["command"] = json!(["/no/such"]))),
        ("no-image", pod("no-image", |spec| spec["containers"][0]["image"] = "127.0.0.1:1/no:1".into())),
        ("elsewhere", pod("elsewhere", |spec| spec["nodeSelector"] = json!({"no": "such"}))),
    ];
    for (name, text) in manifests {
        agent.write_manifest(&format!("{name}.json"), &text).unwrap();
    }
    agent.write_manifest("broken.yaml", "kind: Pod\nspec: {").unwrap();
    let missing = until_found(&agent, &mut known, &others).await;
    assert!(missing.is_empty(), "{missing:#?}\n{}", agent.log_tail());
    agent.end().unwrap();

    // Static pods are never evicted.
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).configure(with_fake_pod_config).start().await.unwrap();
    let full = pod("full", |spec| {
        let fill = "dd if=/dev/zero of=/scratch/file bs=1048576 count=8; exec sleep 1000000";
        spec["containers"][0]["command"] = json!(["/bin/sh", "-c", fill]);
        spec["volumes"][0]["emptyDir"] = json!({"sizeLimit": "4Mi"});
    });
    agent.write_manifest("full.json", &full).unwrap();
    let missing = until_found(&agent, &mut known, &evictions).await;
    assert!(missing.is_empty(), "{missing:#?}\n{}", agent.log_tail());
    agent.end().unwrap();
}

#[test]
fn every_alert_has_a_firing_and_a_silent_test() {
    let tests: Value =
        serde_saphyr::from_str(&fs::read_to_string(file("keelson-rules-test.yaml")).unwrap()).unwrap();
    let tests = tests["tests"].as_array().unwrap();
    let alert_tests: Vec<&Value> =
        tests.iter().flat_map(|test| test["alert_rule_test"].as_array().unwrap()).collect();
    for rule in rule_queries() {
        let name = rule.place.strip_prefix("the alert ").unwrap();
        let of_rule = alert_tests.iter().filter(|test| test["alertname"] == name);
        let fires: BTreeSet<bool> =
            of_rule.map(|test| !test["exp_alerts"].as_array().unwrap().is_empty()).collect();
        assert_eq!(fires, [false, true].into(), "{name}");
    }
}

#[test]
#[ignore = "promtool comes with the whole of Prometheus; cargo xtask test --long runs it"]
fn promtool_accepts_the_rules() {
    let promtool = Component::Prometheus.find().unwrap();
    let run = |task: &str, name: &str| {
        let output = Command::new(&promtool).args([task, "rules"]).arg(file(name)).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        stdout
    };
    let stdout = run("check", "keelson-rules.yaml");
    assert!(stdout.contains(&format!("SUCCESS: {} rules found", rule_queries().len())), "{stdout}");
    run("test", "keelson-rules-test.yaml");
}
