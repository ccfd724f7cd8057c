//! What a pod waits for: `explain`, `describe`, `get sources` and `trace`.

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::pod_config::v1::{Source, SourceProblem};
use keelson_proto::keelson::pod_sync::v1::{ExplainPodResponse, Step};
use serde_json::{Value, json};

use crate::events::world_with_events;
use crate::fake::{Fake, World};
use crate::{SECOND, keelson, now, world};

pub(crate) fn world_with_a_refused_manifest() -> World {
    let problem = SourceProblem {
        origin: "/m/web.yaml".into(),
        line: 7,
        column: 3,
        message: "spec.containers[0].image: Required value".into(),
        since_unix_nanos: now() - (30 * 60 + 5) * SECOND,
        kept_pods: vec!["default/web-edge".into()],
    };
    let source = Source {
        name: "file".into(),
        location: "/m".into(),
        ready: true,
        pods: 2,
        problems: vec![problem],
        ..Source::default()
    };
    World { sources: vec![source], explanation: explanation(), ..world_with_events() }
}

pub(crate) fn explanation() -> ExplainPodResponse {
    let step = |name: &str, state: &str, owner: &str| Step {
        name: name.into(),
        state: state.into(),
        owner: owner.into(),
        ..Step::default()
    };
    ExplainPodResponse {
        pod: Some(PodRef { uid: "u1".into(), namespace: "default".into(), name: "web-edge".into() }),
        phase: "Pending".into(),
        summary: "Waits for the image busybox.".into(),
        steps: vec![
            step("admission", "done", "resource-manager"),
            Step {
                subject: "app".into(),
                message: "ErrImagePull: no such host".into(),
                since_unix_nanos: now() - (30 * 60 + 5) * SECOND,
                next_retry_unix_nanos: now() + 3630 * SECOND,
                ..step("image", "waiting", "runtime-shim")
            },
        ],
    }
}

#[test]
fn get_sources_shows_refused_manifests_with_file_and_line() {
    let fake = Fake::start(world_with_a_refused_manifest());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "sources"]).ok(),
        "NAME   READY   PODS   PROBLEMS   LOCATION\n\
         file   true    2      1          /m\n\
         \n\
         /m/web.yaml:7:3: spec.containers[0].image: Required value\n\
         \u{20} for 30m; the last good version keeps running: default/web-edge\n"
    );
    let list = keelson(&fake.run_dir, &["get", "sources", "-o", "json"]).json();
    assert_eq!(list["items"][0]["problems"][0]["line"], 7);
}

#[test]
fn explain_lists_the_steps_with_owner_and_next_retry() {
    let fake = Fake::start(world_with_a_refused_manifest());
    let text = keelson(&fake.run_dir, &["explain", "pod", "web"]).ok();
    assert!(text.starts_with("pod/web-edge in default (Pending): Waits for the image busybox.\n"), "{text}");
    assert!(text.contains("✗   source") && text.contains("/m/web.yaml:7:3"), "{text}");
    assert!(text.contains("…   image       app       waiting   30m     runtime-shim       in 60m"), "{text}");
    assert_eq!(fake.world.calls.all(), ["explain u1"]);
    let json = keelson(&fake.run_dir, &["explain", "pod/web-edge", "-o", "json"]).json();
    assert_eq!(json["pod"], json!({"uid": "u1", "namespace": "default", "name": "web-edge"}));
    assert_eq!(json["steps"][0]["owner"], "you");
    assert_eq!((&json["steps"][2]["name"], &json["steps"][2]["state"]), (&json!("image"), &json!("waiting")));
    assert!(json["steps"][2]["next_retry"].is_string() && json["steps"][1]["next_retry"].is_null());
}

#[test]
fn explain_of_an_unknown_pod_shows_its_refused_manifest() {
    let fake = Fake::start(world_with_a_refused_manifest());
    let result = keelson(&fake.run_dir, &["explain", "pod", "shop"]);
    assert!(result.failed(1).0.contains("there is no pod \"shop\""), "{result:?}");
    assert!(result.out.contains("/m/web.yaml:7:3: spec.containers[0].image"), "{}", result.out);
    let result = keelson(&fake.run_dir, &["describe", "pod", "shop"]);
    assert!(result.failed(1).1.contains("/m/web.yaml:7:3"), "{result:?}");
}

#[test]
fn explain_says_that_pod_config_is_down() {
    let there = [ServiceName::Init, ServiceName::PodSync];
    let fake = Fake::start_some(world_with_a_refused_manifest(), &there, &Config::default());
    let result = keelson(&fake.run_dir, &["explain", "pod", "shop", "-o", "json"]);
    let (error, hint) = result.failed(69);
    assert!(
        error.starts_with("pod-config is not running") && hint.contains("restart pod-config"),
        "{result:?}"
    );
    let explained: Value = serde_json::from_str(&result.out).unwrap();
    let step = &explained["steps"][0];
    assert_eq!((&step["owner"], &step["state"]), (&"pod-config".into(), &"waiting".into()), "{explained:#}");
    // A running pod is explained as well; the first step says that manifests are not read.
    let text = keelson(&fake.run_dir, &["explain", "pod", "web"]).ok();
    let line = text.lines().find(|line| line.contains("source")).unwrap_or_default();
    assert!(line.contains("pod-config is not running") && line.contains("manifest"), "{text}");
    assert!(text.contains("runtime-shim"), "{text}");
}

#[test]
fn describe_pod_shows_everything_and_why_it_waits() {
    let fake = Fake::start(world_with_a_refused_manifest());
    let text = keelson(&fake.run_dir, &["describe", "pod", "web"]).ok();
    for part in [
        "Name:            web-edge\n",
        "Containers:\n  app:\n",
        "    Restart Count:  1\n",
        "Conditions:\n  Type    Status",
        "Volumes:\n  data:\n    Type:    emptyDir\n    medium:  Memory\n",
        "Events:\n  Type      Reason",
        "(x3 over ",
        "Why it waits:\n  Waits for the image busybox.\n",
        "runtime-shim",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains("dns-edge") && !text.contains("admission"), "{text}");
}

#[test]
fn describe_node_shows_sizes_and_pods() {
    let fake = Fake::start(world_with_events());
    let text = keelson(&fake.run_dir, &["describe", "node"]).ok();
    for part in [
        "Control Plane:  none (standalone)\n",
        "Allocatable:\n  cpu:     4\n  memory:  7Gi\n",
        "Pods that have not ended (3):\n",
        "Allocated:\n",
        "NodeNotReady",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn trace_without_spans_is_an_error_with_a_hint() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["trace", "pod/web"]);
    assert_eq!(result.code, Some(1), "{}", result.err);
    assert!(result.err.contains("has kept spans of the start of default/web-edge"), "{}", result.err);
    assert!(result.err.contains("keelson explain pod web-edge"), "{}", result.err);
}
