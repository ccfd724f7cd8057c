//! Each command with a healthy agent.

use std::io::Write as _;
use std::process::Stdio;

use keelson_config::{Config, ServiceName};
use keelson_proto::keelson::admin::v1::{GetProgressResponse, GetUsageResponse};
use keelson_proto::keelson::common::v1::PodRef;
use keelson_proto::keelson::pod_config::v1::{Source, SourceProblem};
use keelson_proto::keelson::pod_sync::v1::{ExplainPodResponse, Step};
use keelson_proto::keelson::runtime::v1::{ContainerState, ImageUser, RuntimeImage};
use keelson_proto::keelson::supervisor::v1::Service;
use keelson_proto::keelson::volume_manager::v1::{PodVolumes, VolumeMount};
use keelson_service_kit::{NewEvent, ObjectRef};
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::{CommandResult, SECOND, command, document, keelson, now, world};

#[test]
fn get_pods_prints_a_table_of_the_namespace() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "pods"]).ok(),
        "NAME       READY   STATUS     RESTARTS   AGE\n\
         db-edge    0/1     Init:0/1   0          <unknown>\n\
         web-edge   2/2     Running    1          <unknown>\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["get", "po", "web", "-o", "wide"]).ok(),
        "NAME       READY   STATUS    RESTARTS   AGE         IP          NODE   SOURCE\n\
         web-edge   2/2     Running   1          <unknown>   10.88.0.4   edge   file\n"
    );
    let all = keelson(&fake.run_dir, &["get", "pods", "-A"]).ok();
    assert!(all.starts_with("NAMESPACE   NAME"), "{all}");
    assert!(all.contains("system      dns-edge   2/2"), "{all}");
}

#[test]
fn get_pods_as_json_is_a_pod_list_of_unchanged_documents() {
    let fake = Fake::start(world());
    let list = keelson(&fake.run_dir, &["get", "pods", "-o", "json"]).json();
    assert_eq!(
        (&list["apiVersion"], &list["kind"], &list["metadata"]),
        (&json!("v1"), &json!("PodList"), &json!({}))
    );
    assert_eq!(list["items"].as_array().unwrap().len(), 2);
    let one = keelson(&fake.run_dir, &["get", "pod/web", "-o", "json"]).json();
    assert_eq!(one["kind"], "Pod");
    assert_eq!(one, serde_json::from_slice::<serde_json::Value>(&fake.world.pods[0].pod_json).unwrap());
    assert_eq!(one["spec"]["fromTheFuture"], json!({"z": 1, "a": [2]}));
    let two = keelson(&fake.run_dir, &["get", "pods", "web", "db-edge", "-o", "json"]).json();
    assert_eq!(two["items"][0]["metadata"]["name"], "web-edge");
}

#[test]
fn get_pods_as_yaml_equals_json() {
    let fake = Fake::start(world());
    let yaml = keelson(&fake.run_dir, &["get", "pods", "-A", "-o", "yaml"]).ok();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(from_yaml, keelson(&fake.run_dir, &["get", "pods", "-A", "-o", "json"]).json());
}

#[test]
fn get_pods_without_pods_prints_a_notice_or_an_empty_list() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["get", "pods", "-n", "other"]);
    assert_eq!((result.code, result.out.as_str()), (Some(0), ""));
    assert_eq!(result.err, "No pods found in namespace other; -A shows 3 in other namespaces.\n");
    let list = keelson(&fake.run_dir, &["get", "pods", "-n", "other", "-o", "json"]).json();
    assert_eq!(list["items"], json!([]));
}

#[test]
fn get_services_shows_the_services_of_init() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "services"]).ok(),
        "NAME       STATE         PID    RESTARTS   MEMORY   AGE   MESSAGE\n\
         pod-sync   running       4242   2          5.2Mi    30m\n\
         node-api   backing-off   -      5          -        -     ended with exit code 70\n"
    );
    let list = keelson(&fake.run_dir, &["get", "svc", "-o", "json"]).json();
    assert_eq!(list.as_object().unwrap().keys().collect::<Vec<_>>(), ["items"]);
    let item = &list["items"][0];
    assert_eq!(
        (&item["name"], &item["pid"], &item["state"]),
        (&json!("pod-sync"), &json!(4242), &json!("running"))
    );
    assert_eq!((&item["restarts"], &item["pss_kib"]), (&json!(2), &json!(5427)));
    let one = keelson(&fake.run_dir, &["get", "services", "node-api", "-o", "json"]).json();
    assert_eq!(one["items"].as_array().unwrap().len(), 1);
    assert!(one["items"][0]["pid"].is_null());
}

#[test]
fn top_without_a_terminal_shows_services_once() {
    let usage = GetUsageResponse { rss_bytes: 8 << 20, pid: 7, ..Default::default() };
    let fake = Fake::start(World { usage, ..world() });
    let result = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms"]).ok();
    assert_eq!(
        result,
        "NAME       STATE         PID    CPU(%)   PSS     RSS     RESTARTS   UPTIME   MESSAGE\n\
         node-api   backing-off   -      -        -       -       5          -        ended with exit code 70\n\
         pod-sync   running       4242   -        5.2Mi   8.0Mi   2          30m\n"
    );
    let bare = keelson(
        &fake.run_dir,
        &["top", "svc", "--once", "--no-headers", "--interval", "100ms", "--sort", "memory"],
    );
    assert!(bare.ok().starts_with("pod-sync"), "who uses most comes first");
    let items = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms", "-o", "json"]).json();
    assert_eq!((&items["items"][1]["rssBytes"], &items["items"][0]["pid"]), (&json!(8 << 20), &Value::Null));
}

#[test]
fn top_services_works_without_init() {
    let usage =
        GetUsageResponse { rss_bytes: 8 << 20, pss_bytes: Some(4 << 20), pid: 7, ..Default::default() };
    let world = World {
        usage,
        progress: GetProgressResponse { started_unix_nanos: now(), ..Default::default() },
        ..world()
    };
    let services: Vec<ServiceName> =
        ServiceName::supervised().filter(|s| *s != ServiceName::NodeApi).collect();
    let fake = Fake::start_some(world, &services, &Default::default());
    let items = keelson(&fake.run_dir, &["top", "services", "--interval", "100ms", "-o", "json"]).json();
    let find =
        |name: &str| items["items"].as_array().unwrap().iter().find(|i| i["name"] == name).unwrap().clone();
    let (running, stopped) = (find("pod-sync"), find("node-api"));
    assert_eq!(
        (&running["pid"], &running["pssBytes"], &running["restarts"]),
        (&json!(7), &json!(4 << 20), &Value::Null)
    );
    assert_eq!((&stopped["state"], &stopped["pid"]), (&json!("stopped"), &Value::Null));
}

#[test]
fn trace_without_spans_is_an_error_with_a_hint() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["trace", "pod/web"]);
    assert_eq!(result.code, Some(1), "{}", result.err);
    assert!(result.err.contains("has kept spans of the start of default/web-edge"), "{}", result.err);
    assert!(result.err.contains("keelson explain pod web-edge"), "{}", result.err);
}

#[test]
fn get_services_without_init_queries_each_service() {
    let services: Vec<ServiceName> =
        ServiceName::supervised().filter(|s| *s != ServiceName::NodeApi).collect();
    let world = World {
        progress: GetProgressResponse { started_unix_nanos: now(), ..Default::default() },
        ..world()
    };
    let fake = Fake::start_some(world, &services, &Default::default());
    let result = keelson(&fake.run_dir, &["get", "services", "-o", "json"]);
    assert!(result.err.contains("init is not running") && result.err.contains("unknown"), "{}", result.err);
    let list = result.json();
    let find =
        |name: &str| list["items"].as_array().unwrap().iter().find(|i| i["name"] == name).unwrap().clone();
    let (running, stopped) = (find("pod-sync"), find("node-api"));
    assert_eq!(running["state"], "running");
    assert!(running["pid"].is_null() && running["pss_kib"].is_null() && running["restarts"].is_null());
    assert_eq!(stopped["state"], "stopped");
    assert!(stopped["message"].as_str().unwrap().contains("node-api.sock"), "{stopped}");

    let table = keelson(&fake.run_dir, &["get", "services"]).out;
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 1 + ServiceName::ALL.len(), "{table}");
    let init: Vec<&str> = rows[1].split_whitespace().collect();
    assert_eq!(init[..6], ["init", "stopped", "-", "<unknown>", "-", "-"], "{table}");
    assert!(rows[1].contains("nothing answers at ") && rows[1].ends_with("init.sock"), "{table}");
    let pod_sync = rows.iter().find(|row| row.starts_with("pod-sync")).unwrap();
    assert!(pod_sync.contains("running"), "{table}");
    let init = keelson(&fake.run_dir, &["get", "services", "init"]);
    assert_eq!((init.code, init.out.lines().count()), (Some(0), 2), "{}", init.out);
}

#[test]
fn get_node_shows_a_row_or_the_node_as_json() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "node"]).ok(),
        "NAME   STATUS   ROLES    AGE         VERSION\nedge   Ready    <none>   <unknown>   v1.36.0+keelson\n"
    );
    let mut old = world();
    old.node["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    let table = keelson(&Fake::start(old).run_dir, &["get", "node"]).ok();
    let age = table.lines().nth(1).unwrap().split_whitespace().nth(3).unwrap();
    let years: u32 = age.strip_suffix('y').unwrap().parse().unwrap();
    assert!(years > 20, "{table}");
    let node = keelson(&fake.run_dir, &["get", "nodes", "edge", "-o", "json"]).json();
    assert_eq!((&node["kind"], &node["metadata"]["name"]), (&json!("Node"), &json!("edge")));
    assert!(keelson(&fake.run_dir, &["get", "node", "other"]).failed(1).1.contains("\"edge\""));
}

fn world_with_events() -> World {
    let world = world();
    let web = ObjectRef::pod("default", "web-edge", "u1").container("containers", "app");
    world.events.normal(web.clone(), "Pulled", "image there");
    for _ in 0..3 {
        world.events.warning(web.clone(), "BackOff", "waits\nlonger");
    }
    world.events.normal(ObjectRef::pod("system", "dns-edge", "u3"), "Started", "runs");
    world.events.warning(ObjectRef::node("edge"), "NodeNotReady", "no runtime");
    world
}

#[test]
fn get_events_merges_the_events_of_all_services() {
    let fake = Fake::start(world_with_events());
    let table = keelson(&fake.run_dir, &["get", "events"]).ok();
    // The first column is the age, which depends on how fast the test runs.
    let table: Vec<&str> = table.lines().map(|line| &line["LAST SEEN   ".len()..]).collect();
    assert_eq!(
        table,
        [
            "TYPE      REASON         OBJECT         COUNT   MESSAGE",
            "Normal    Pulled         pod/web-edge   1       image there",
            "Warning   BackOff        pod/web-edge   3       waits longer",
            "Warning   NodeNotReady   node/edge      1       no runtime",
        ]
    );
    let about = keelson(&fake.run_dir, &["get", "events", "--for", "pod/web"]).ok();
    assert_eq!(about.lines().count(), 3, "{about}");
    let node = keelson(&fake.run_dir, &["get", "ev", "--for", "node/edge", "-o", "wide"]).ok();
    assert!(node.lines().nth(1).unwrap().contains("pod-sync"), "{node}");
    assert!(keelson(&fake.run_dir, &["get", "events", "-n", "system"]).ok().contains("dns-edge"));
}

#[test]
fn get_events_as_json_is_an_event_list() {
    let fake = Fake::start(world_with_events());
    let list = keelson(&fake.run_dir, &["get", "events", "-A", "-o", "json"]).json();
    assert_eq!((&list["apiVersion"], &list["kind"]), (&json!("v1"), &json!("EventList")));
    let event = &list["items"][1];
    assert_eq!(
        (&event["kind"], &event["reason"], &event["count"]),
        (&json!("Event"), &json!("BackOff"), &json!(3))
    );
    assert_eq!(
        event["involvedObject"],
        json!({"apiVersion": "v1", "kind": "Pod", "name": "web-edge", "uid": "u1", "namespace": "default",
               "fieldPath": "spec.containers{app}"})
    );
    assert!(event["firstTimestamp"].as_str().unwrap().ends_with('Z'));
    assert_eq!(list["items"].as_array().unwrap().len(), 4);
}

#[test]
fn event_json_has_annotations_sorted_by_key() {
    let world = world();
    let object = ObjectRef::pod("default", "web-edge", "u1");
    world.events.normal(object.clone(), "Pulled", "image there");
    let annotations = [("starved_resource", "memory"), ("b", ""), ("offending_containers", "app,side")];
    let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let event = NewEvent { warning: true, reason: "Evicted".into(), message: "low".into(), object };
    world.events.record_annotated(event, annotations.into());
    let fake = Fake::start(world);
    let list = keelson(&fake.run_dir, &["get", "events", "-o", "json"]).json();
    assert_eq!(list["items"][0]["metadata"].get("annotations"), None, "{list}");
    assert_eq!(
        list["items"][1]["metadata"]["annotations"].to_string(),
        r#"{"b":"","offending_containers":"app,side","starved_resource":"memory"}"#
    );
}

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
fn logs_passes_all_options_to_the_service() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["logs", "web"]);
    assert_eq!((result.out.as_str(), result.code), ("first\nsecond\n", Some(0)));
    assert!(result.err.contains("app, proxy"), "{}", result.err);
    let all =
        ["logs", "pod/web-edge", "-c", "proxy", "-f", "-p", "--tail", "0", "--since", "5m", "--timestamps"];
    let result = keelson(&fake.run_dir, &[&all[..], &["--limit-bytes", "9"]].concat());
    assert_eq!(result.err, "");
    assert_eq!(result.ok(), "first\nsecond\n");
    assert_eq!(
        fake.world.calls.all(),
        [
            "logs u1/app follow=false previous=false timestamps=false tail=None bytes=None since=false",
            "logs u1/proxy follow=true previous=true timestamps=true tail=Some(0) bytes=Some(9) since=true",
        ]
    );
    let result = keelson(&fake.run_dir, &["logs", "web", "-c", "none"]);
    assert!(result.failed(1).1.contains("app, proxy"));
}

#[test]
fn apply_reads_files_folders_and_standard_input() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web.yaml");
    std::fs::write(&file, "kind: Pod").unwrap();
    let path = file.to_str().unwrap();
    assert_eq!(keelson(&fake.run_dir, &["apply", "-f", path]).ok(), "pod/web-edge created\n");
    assert_eq!(
        keelson(&fake.run_dir, &["apply", "-f", folder.path().to_str().unwrap()]).ok(),
        "pod/web-edge created\n"
    );
    let mut child = command(&fake.run_dir, &["apply", "-f", "-", "-o", "json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"piped").unwrap();
    let json = CommandResult::of(child.wait_with_output().unwrap()).json();
    assert_eq!(json["items"][0]["result"], "created");
    let calls = fake.world.calls.all();
    assert_eq!(calls[0], format!("apply {path}: kind: Pod"));
    assert_eq!(calls[2], "apply standard input: piped");
}

#[test]
fn apply_continues_after_a_refused_manifest() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), "broken").unwrap();
    std::fs::write(folder.path().join("b.yaml"), "fine").unwrap();
    let result = keelson(&fake.run_dir, &["apply", "-f", folder.path().to_str().unwrap()]);
    assert!(result.failed(1).0.ends_with("a.yaml:4: spec.containers: Required value"), "{result:?}");
    assert!(
        result.err.starts_with("error: ") && result.err.contains("a.yaml:1: metadata.name"),
        "{}",
        result.err
    );
    assert_eq!(result.err.lines().count(), 2, "{}", result.err);
    assert_eq!(result.out, "pod/web-edge created\n");
}

#[test]
fn delete_waits_until_the_pod_is_gone() {
    let fake = Fake::start(world());
    assert_eq!(keelson(&fake.run_dir, &["delete", "pod", "web"]).ok(), "pod/web-edge deleted\n");
    assert_eq!(fake.world.calls.all(), ["delete default/web-edge"]);
}

#[test]
fn delete_by_file_deletes_the_pods_of_the_manifest() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    std::fs::write(
        &file,
        "kind: Pod\nmetadata: {name: web}\n---\nmetadata: {name: dns, namespace: system}\n",
    )
    .unwrap();
    let result = keelson(&fake.run_dir, &["delete", "-f", file.to_str().unwrap()]).ok();
    assert_eq!(result, "pod/web-edge deleted\npod/dns-edge deleted\n");
    assert_eq!(fake.world.calls.all(), ["delete default/web-edge", "delete system/dns-edge"]);
}

#[test]
fn apply_and_delete_handle_secrets_and_config_maps() {
    let fake = Fake::start(world());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "kind: Secret\nmetadata: {name: key}\n---\nkind: Pod\nmetadata: {name: web}\n")
        .unwrap();
    assert_eq!(
        keelson(&fake.run_dir, &["apply", "-f", path]).ok(),
        "pod/web-edge created\nsecret/key stored\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["delete", "-f", path]).ok(),
        "pod/web-edge deleted\nsecret/key deleted\n"
    );
    std::fs::write(&file, "kind: ConfigMap\nmetadata: {name: web}\n").unwrap();
    let result = keelson(&fake.run_dir, &["delete", "-f", path]);
    assert!(result.failed(1).0.contains("has the name of the pod web-edge"), "{result:?}");
    assert_eq!(fake.world.calls.all()[1..], ["delete default/web-edge", "delete default/key"]);
}

#[test]
fn delete_respects_wait_and_timeout() {
    let fake = Fake::start(World { keeps_deleted: true, ..world() });
    let result = keelson(&fake.run_dir, &["delete", "pod", "web", "--wait=false"]);
    assert_eq!(result.ok(), "pod/web-edge is being deleted\n");
    let result = keelson(&fake.run_dir, &["delete", "pod", "web", "--timeout", "50ms"]);
    assert!(result.failed(75).0.contains("not gone yet"), "{result:?}");
}

#[test]
fn delete_of_a_static_pod_names_its_file() {
    let fake = Fake::start(world());
    let result = keelson(&fake.run_dir, &["delete", "pod", "static"]);
    assert!(result.failed(1).0.contains("/m/static.yaml"), "{result:?}");
}

#[test]
fn retry_and_services_restart_call_the_services() {
    let fake = Fake::start(world());
    assert_eq!(
        keelson(&fake.run_dir, &["retry", "pod", "dns", "-n", "system"]).ok(),
        "pod/dns-edge is retried now\n"
    );
    assert_eq!(
        keelson(&fake.run_dir, &["services", "restart", "pod-sync"]).ok(),
        "service/pod-sync restarted\n"
    );
    assert_eq!(fake.world.calls.all(), ["retry system/dns-edge", "restart pod-sync"]);
    let result = keelson(&fake.run_dir, &["services", "restart", "kubelet"]);
    assert!(result.failed(1).0.contains("there is no service \"kubelet\""));
}

fn serving(name: ServiceName, state: &str) -> Service {
    Service {
        name: name.to_string(),
        pid: 100,
        state: state.into(),
        message: "why".into(),
        ..Service::default()
    }
}

#[test]
fn services_restart_all_restarts_one_after_the_other() {
    let services = ServiceName::supervised().map(|name| serving(name, "running")).collect();
    let fake = Fake::start(World { services, ..world() });
    let result = keelson(&fake.run_dir, &["services", "restart", "--all"]).ok();
    let names: Vec<String> = ServiceName::supervised().map(|name| name.to_string()).collect();
    let lines =
        |prefix: &str, suffix: &str| names.iter().map(|n| format!("{prefix}{n}{suffix}")).collect::<Vec<_>>();
    assert_eq!(result.lines().collect::<Vec<_>>(), lines("service/", " restarted"));
    assert_eq!(fake.world.calls.all(), lines("restart ", ""));
}

#[test]
fn services_restart_reports_a_service_that_does_not_serve() {
    let name = ServiceName::PodSync;
    let restart = |state: &str| {
        let fake = Fake::start(World { services: vec![serving(name, state)], ..world() });
        keelson(&fake.run_dir, &["services", "restart", "pod-sync", "--timeout", "50ms"])
    };
    let result = restart("starting");
    let (error, hint) = result.failed(75);
    assert!(error.contains("it is starting, why") && hint.contains("init keeps trying"), "{result:?}");
    let result = restart("failed");
    assert!(result.failed(1).0.contains("has failed: why"), "{result:?}");
    let result = restart("degraded");
    assert_eq!(result.err, "pod-sync is degraded: why\n");
    assert_eq!(result.ok(), "service/pod-sync restarted\n");
}

pub(crate) fn world_with_images() -> World {
    let user = |namespace: &str, name: &str, container: &str| ImageUser {
        pod: Some(PodRef { uid: "u1".into(), namespace: namespace.into(), name: name.into() }),
        container: container.into(),
        container_id: "0123456789abcdef".into(),
        state: ContainerState::Running.into(),
    };
    let images = vec![
        RuntimeImage {
            id: "sha256:4c5f6a7b8c9d0e1f2a3b".into(),
            repo_tags: vec![
                "docker.io/library/busybox:1.36".into(),
                "docker.io/library/busybox:latest".into(),
            ],
            repo_digests: vec!["docker.io/library/busybox@sha256:aa".into()],
            size_bytes: 4_500_000,
            pinned: false,
            used_by: vec![user("default", "web-edge", "app"), user("default", "web-edge", "proxy")],
        },
        RuntimeImage {
            id: "sha256:99aabbccddeeff001122".into(),
            repo_digests: vec!["registry.example/old@sha256:bb".into()],
            size_bytes: 700,
            pinned: true,
            ..RuntimeImage::default()
        },
    ];
    World { images, ..world() }
}

#[test]
fn grpc_call_accepts_a_long_answer() {
    let pod = json!({"kind": "Pod", "metadata": {"annotations": {"long": "x".repeat(5 << 20)}}});
    let fake = Fake::start(World { pods: vec![document("default", "web", "u", pod)], ..world() });
    let answer = keelson(&fake.run_dir, &["grpc", "call", "pod-sync", "ListPods"]).json();
    assert_eq!(answer["uid"], "u");
}

#[test]
fn get_images_shows_the_pods_that_use_them() {
    let fake = Fake::start(world_with_images());
    assert_eq!(
        keelson(&fake.run_dir, &["get", "images"]).ok(),
        "IMAGE                       TAG      ID             SIZE    PINNED   USED BY\n\
         docker.io/library/busybox   1.36     4c5f6a7b8c9d   4.2Mi   false    web-edge\n\
         docker.io/library/busybox   latest   4c5f6a7b8c9d   4.2Mi   false    web-edge\n\
         registry.example/old        <none>   99aabbccddee   1Ki     true     -\n"
    );
    let one = keelson(&fake.run_dir, &["get", "image", "busybox", "-o", "json"]).json();
    assert_eq!(
        one["items"],
        json!([{
            "id": "sha256:4c5f6a7b8c9d0e1f2a3b",
            "tags": ["docker.io/library/busybox:1.36", "docker.io/library/busybox:latest"],
            "digests": ["docker.io/library/busybox@sha256:aa"],
            "size_bytes": 4_500_000,
            "pinned": false,
            "used_by": [
                {"namespace": "default", "pod": "web-edge", "uid": "u1", "container": "app",
                 "container_id": "0123456789abcdef", "state": "running"},
                {"namespace": "default", "pod": "web-edge", "uid": "u1", "container": "proxy",
                 "container_id": "0123456789abcdef", "state": "running"},
            ],
        }])
    );
    let wide = keelson(&fake.run_dir, &["get", "images", "99aabb", "-o", "wide"]).ok();
    assert!(wide.lines().nth(1).unwrap().ends_with("registry.example/old@sha256:bb"), "{wide}");
    let yaml = keelson(&fake.run_dir, &["get", "images", "-o", "yaml"]).ok();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(from_yaml, keelson(&fake.run_dir, &["get", "images", "-o", "json"]).json());
    let result = keelson(&fake.run_dir, &["get", "images", "nginx"]);
    assert!(result.failed(1).0.contains("no image \"nginx\""), "{result:?}");
}

#[test]
fn get_volumes_shows_volumes_of_unknown_pods_with_all_namespaces() {
    let orphan = PodVolumes { uid: "u99".into(), state: "unmounting".into(), ..PodVolumes::default() };
    let mount = VolumeMount { name: "data".into(), host_path: "/v/data".into(), read_only: true };
    let orphan = PodVolumes { volumes: vec![mount], ..orphan };
    let fake = Fake::start(World { volumes: vec![orphan], ..world() });
    let mine = keelson(&fake.run_dir, &["get", "volumes"]).ok();
    assert!(mine.contains("web-edge   data") && !mine.contains("u99"), "{mine}");
    let all = keelson(&fake.run_dir, &["get", "volumes", "-A", "-o", "wide"]).ok();
    let last: Vec<&str> = all.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(last, ["<unknown>", "u99", "data", "<unknown>", "unmounting", "-", "/v/data", "true", "u99"]);
    let result = keelson(&fake.run_dir, &["get", "volumes", "-n", "nowhere"]);
    assert_eq!((result.out.as_str(), result.err.as_str(), result.code), ("", "No volumes found.\n", Some(0)));
    assert!(keelson(&fake.run_dir, &["get", "volumes", "nope"]).failed(1).0.contains("no pod"));
}

#[test]
fn version_shows_client_and_services() {
    let world =
        World { progress: GetProgressResponse { version: "9.9.9".into(), ..Default::default() }, ..world() };
    let fake = Fake::start(world);
    let text = keelson(&fake.run_dir, &["version"]).ok();
    assert!(text.starts_with(concat!("keelson ", env!("CARGO_PKG_VERSION"), "\n")), "{text}");
    assert!(text.contains("pod-sync           9.9.9\n"), "{text}");
    let json = keelson(&fake.run_dir, &["version", "-o", "json"]).json();
    assert_eq!(json["client"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["services"].as_array().unwrap().len(), ServiceName::ALL.len());
    assert_eq!(json["services"][0], json!({"name": "init", "version": "9.9.9"}));
}

#[test]
fn completion_and_help_need_no_agent() {
    let nowhere = std::path::Path::new("/nonexistent");
    for shell in ["bash", "zsh", "fish"] {
        assert!(keelson(nowhere, &["completions", shell]).ok().contains("keelson"), "{shell}");
    }
    let help = keelson(nowhere, &["--help"]).ok();
    assert!(help.contains("Exit codes:") && help.contains("69"), "{help}");
    assert!(keelson(nowhere, &["version", "--client"]).ok().starts_with("keelson "));
}
