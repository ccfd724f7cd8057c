//! The two commands of the README's quickstart.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;
use std::process::{Command, Output};

use keelson_testkit::Snapshot;
use keelson_tests::text;
use serde_json::Value;

/// The folder of the quickstart; there is one per machine.
const HOME: &str = "/var/lib/keelson-quickstart";

fn xtask(task: &str) -> Output {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new(cargo).current_dir(workspace).args(["xtask", task]).output().unwrap();
    assert!(output.status.success(), "cargo xtask {task}: {}", text(&output));
    output
}

/// Runs `keelson` as after a quickstart: without flags.
fn keelson(args: &[&str]) -> Output {
    let output = Command::new(format!("{HOME}/bin/keelson")).current_dir("/").args(args).output().unwrap();
    assert!(output.status.success(), "keelson {args:?}: {}", text(&output));
    output
}

/// The id of each running container, by its pod.
fn containers() -> Vec<(String, String)> {
    let pods: Value = serde_json::from_slice(&keelson(&["get", "pods", "-o", "json"]).stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |pod: &Value| -> Vec<(String, String)> {
        let statuses = pod["status"]["containerStatuses"].as_array().unwrap();
        statuses.iter().map(|c| (text(&pod["metadata"]["name"]), text(&c["containerID"]))).collect()
    };
    let mut all: Vec<_> = pods["items"].as_array().unwrap().iter().flat_map(of).collect();
    all.sort();
    all
}

/// Takes the quickstart down if the test fails earlier.
struct Down;

impl Drop for Down {
    fn drop(&mut self) {
        if Path::new(HOME).exists() {
            xtask("down");
        }
    }
}

#[test]
#[ignore = "long: builds the whole agent"]
fn quickstart_shows_pods_and_leaves_nothing_after_down() {
    assert!(!Path::new(HOME).exists(), "a quickstart is up on this machine: `cargo xtask down` ends it");
    let before = Snapshot::take();
    let down = Down;
    let first = text(&xtask("quickstart"));
    assert!(first.contains("pods are Ready") && first.contains("cargo xtask down"), "{first}");

    let pods: Value = serde_json::from_slice(&keelson(&["get", "pods", "-o", "json"]).stdout).unwrap();
    assert_eq!(pods["kind"], "PodList");
    let ready = |pod: &Value| {
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
    };
    let items = pods["items"].as_array().unwrap();
    assert!(items.len() >= 3 && items.iter().all(ready), "{pods:#}");
    let services: Value =
        serde_json::from_slice(&keelson(&["get", "services", "-o", "json"]).stdout).unwrap();
    let services = services["items"].as_array().unwrap();
    assert_eq!(services.len(), 8, "{services:#?}");
    for service in services {
        assert_eq!(service["state"], "running", "{service}");
        assert_eq!(service["restarts"], 0, "{service}");
        assert!(
            service["pid"].as_u64().unwrap() > 0 && service["pss_kib"].as_u64().unwrap() > 0,
            "{service}"
        );
    }
    assert!(text(&keelson(&["explain", "pod", "web"])).contains("waits for nothing"));

    assert!(text(&xtask("quickstart")).contains("already running"));

    // All of the agent is killed: a second quickstart restarts it, and no container is affected.
    let started = containers();
    let init = services.iter().find(|service| service["name"] == "init").unwrap();
    let killed = Command::new("kill").args(["-9", &init["pid"].to_string()]).status().unwrap();
    assert!(killed.success());
    let again = text(&xtask("quickstart"));
    assert!(again.contains("pods are Ready") && again.contains("its pods have not"), "{again}");
    assert_eq!(containers(), started);

    let shown = text(&xtask("down"));
    assert!(shown.contains("nothing is left"), "{shown}");
    drop(down);
    assert_eq!(before.diff(&Snapshot::take()), Vec::<String>::new());
    assert!(!Path::new(HOME).exists());
    assert!(text(&xtask("down")).contains("nothing to stop"));
}
