//! No command passes on characters that move the cursor, rename the window or reverse text, from any pod, manifest, server or
//! service: puts escapes into every text of the services' answers, and runs every command that shows them.

use keelson_etcd::NodeKeys;
use keelson_proto::descriptors;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, ReflectMessage as _, Value as Field};
use serde_json::{Value, json};

use crate::fake::{Fake, World};
use crate::fleet::run;
use crate::fleet_watch::{self, Fleet};
use crate::{CommandResult, keelson};

/// Moves the cursor, renames the window, with 7-bit and 8-bit controls, and reverses the text.
const HOSTILE: &str = "\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}1A\r\u{202e}\u{2066}\u{7f}";

/// Fields that name objects for commands, or that hold a number, a time or an enumerated word as text.
const KEPT: [&str; 22] = [
    "uid",
    "name",
    "namespace",
    "state",
    "kind",
    "apiVersion",
    "phase",
    "capacity",
    "allocatable",
    "nodeName",
    "pod_uid",
    "pod_name",
    "object",
    "type",
    "status",
    "source",
    "version",
    "step",
    "traceparent",
    "labels",
    "qosClass",
    "restartPolicy",
];

fn is_kept(field: &str) -> bool {
    KEPT.contains(&field) || field.ends_with("Time") || field.ends_with("At") || field.ends_with("Timestamp")
}

fn inject_json(value: &mut Value) {
    match value {
        Value::String(text) => text.push_str(HOSTILE),
        Value::Array(items) => items.iter_mut().for_each(inject_json),
        Value::Object(fields) => {
            for (field, value) in fields {
                if value.is_string() && is_kept(field)
                    || field == "capacity"
                    || field == "allocatable"
                    || field == "requests"
                {
                    continue;
                }
                inject_json(value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn inject_field(name: &str, value: &mut Field) {
    match value {
        Field::String(text) if !is_kept(name) => text.push_str(HOSTILE),
        Field::Bytes(bytes) if name.ends_with("_json") => {
            let mut json: Value = serde_json::from_slice(bytes).unwrap();
            inject_json(&mut json);
            *bytes = json.to_string().into();
        }
        Field::Message(message) => inject_message(message),
        Field::List(items) => items.iter_mut().for_each(|item| inject_field(name, item)),
        _ => {}
    }
}

fn inject_message(message: &mut DynamicMessage) {
    let fields: Vec<_> = message.descriptor().fields().filter(|field| message.has_field(field)).collect();
    for field in fields {
        inject_field(field.name(), message.get_field_mut(&field));
    }
}

/// A message with escapes in all its texts.
fn with_escapes<M: Message + Default>(pool: &DescriptorPool, name: &str, message: &M) -> M {
    let descriptor = pool.get_message_by_name(name).unwrap();
    let mut dynamic = DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice()).unwrap();
    inject_message(&mut dynamic);
    M::decode(dynamic.encode_to_vec().as_slice()).unwrap()
}

fn pool() -> DescriptorPool {
    let mut pool = DescriptorPool::new();
    for set in [
        descriptors::EVENTS,
        descriptors::SUPERVISOR,
        descriptors::POD_CONFIG,
        descriptors::RUNTIME,
        descriptors::VOLUME_MANAGER,
        descriptors::POD_SYNC,
    ] {
        pool.decode_file_descriptor_set(set).unwrap();
    }
    pool
}

fn hostile_world() -> World {
    let pool = pool();
    let mut world = crate::world();
    world.explanation = crate::explain::explanation();
    world.sources = crate::explain::world_with_a_refused_manifest().sources;
    world.images = crate::get::world_with_images().images;
    world.orphans = crate::orphans::world_with_orphans().orphans;
    let all = |name: &str| format!("keelson.{name}");
    for pod in &mut world.pods {
        *pod = with_escapes(&pool, &all("pod_sync.v1.PodDocument"), pod);
    }
    for service in &mut world.services {
        *service = with_escapes(&pool, &all("supervisor.v1.Service"), service);
    }
    for source in &mut world.sources {
        *source = with_escapes(&pool, &all("pod_config.v1.Source"), source);
    }
    for orphan in &mut world.orphans {
        *orphan = with_escapes(&pool, &all("volume_manager.v1.OrphanedPod"), orphan);
    }
    for image in &mut world.images {
        *image = with_escapes(&pool, &all("runtime.v1.RuntimeImage"), image);
    }
    world.explanation = with_escapes(&pool, &all("pod_sync.v1.ExplainPodResponse"), &world.explanation);
    inject_json(&mut world.node);
    let object = keelson_service_kit::ObjectRef::pod("default", &format!("web-edge{HOSTILE}"), "u1");
    world.events.warning(object, "Failed", format!("the message of a pod{HOSTILE}"));
    world.log = vec!["log\u{1b}[2J\u{9b}1A", "\u{202e}\n"];
    world
}

const FORMATS: [&[&str]; 4] = [&[], &["-o", "wide"], &["-o", "json"], &["-o", "yaml"]];

/// Whether the output of a command contains an escaped control character; it must contain no control character itself.
fn has_escaped_text(what: &str, result: &CommandResult) -> bool {
    let acts = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    for text in [&result.out, &result.err] {
        assert!(!text.chars().any(acts), "{what}: {text:?}");
    }
    [&result.out, &result.err].iter().any(|text| text.contains("\\u{1b}") || text.contains("\\u001b"))
}

#[test]
fn no_command_prints_control_characters() {
    let fake = Fake::start(hostile_world());
    let mut escaped_outputs = 0;
    for what in [
        &["get", "pods", "-A"][..],
        &["get", "pods", "web-edge"],
        &["get", "services"],
        &["get", "node"],
        &["get", "images"],
        &["get", "volumes", "-A"],
        &["get", "events", "-A"],
        &["get", "sources"],
        &["orphans", "list"],
        &["orphans", "clean", "--all"],
        &["explain", "pod", "web-edge"],
        &["describe", "pod", "web-edge"],
        &["describe", "node"],
        &["top", "services"],
        &["version"],
        &["logs", "web-edge", "-c", "app", "--safe"],
        &["logs", "web-edge", "-c", "none"],
        &["explain", "pod", "none\u{1b}[2J"],
        &["grpc", "call", "pod-sync", "ListPods", "{}"],
    ] {
        for format in FORMATS {
            let result = keelson(&fake.run_dir, &[what, format].concat());
            escaped_outputs += usize::from(has_escaped_text(&format!("{what:?} {format:?}"), &result));
        }
    }
    assert!(escaped_outputs >= 20, "the escapes came through the commands only {escaped_outputs} times");
}

/// A fleet with hostile entries, as anyone with write access to its etcd, such as a node, can write them.
fn hostile_fleet() -> Fleet {
    let fleet = Fleet::new(1);
    fleet.node("n1");
    let keys = NodeKeys::new("n1");
    let with_escapes = |mut value: Value| {
        inject_json(&mut value);
        value
    };
    let mut node = fleet_watch::node("n1", "True", "1");
    node["status"]["nodeInfo"]["osImage"] = "an OS".into();
    node["status"]["conditions"][0]["message"] = "well".into();
    fleet.put(keys.node(), &with_escapes(node), 0);
    let mut pod = fleet_watch::pod("web", "Running");
    pod["status"]["message"] = "it runs".into();
    pod["status"]["reason"] = "So".into();
    pod["status"]["containerStatuses"] = json!([{
        "name": "main", "ready": false, "restartCount": 1, "image": "i", "imageID": "",
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "it waits"}},
    }]);
    fleet.put(keys.pod("default", "web"), &with_escapes(pod.clone()), 0);
    fleet.put(keys.pod_status("default", "web"), &with_escapes(pod), 0);
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": "default"},
        "data": {"key": "value"},
    });
    fleet.put(keys.object("ConfigMap", "default", "settings"), &with_escapes(object), 0);
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "web.1", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "web", "uid": "", "fieldPath": "a"},
        "reason": "Failed", "message": "it has failed", "type": "Warning", "count": 1,
        "firstTimestamp": "1970-01-01T00:00:01Z", "lastTimestamp": "1970-01-01T00:00:01Z",
        "source": {"component": "pod-sync", "host": "n1"},
    });
    fleet.put(keys.event(1_000_000_000, "pod-sync", 1), &with_escapes(event), 0);
    let refusal = keelson_config::ConfigurationStatus::refusing_all(format!("no init{HOSTILE}"));
    fleet.put(keys.config_status(), &serde_json::to_value(&refusal).unwrap(), 0);
    fleet.put(keys.config(), &with_escapes(json!({"maxPods": 7, "clusterDomain": "d"})), 0);
    fleet
}

#[test]
fn no_fleet_command_prints_control_characters() {
    let fleet = hostile_fleet();
    let mut silent = Vec::new();
    for what in [
        &["get", "pods", "-A"][..],
        &["get", "pods", "web"],
        &["get", "node"],
        &["get", "events"],
        &["get", "config"],
        &["get", "configmaps"],
        &["get", "configmaps", "settings"],
        &["get", "pods", "none\u{1b}[2J"],
    ] {
        let result = FORMATS.map(|format| {
            let result = run(&fleet, &[what, format].concat());
            has_escaped_text(&format!("{what:?} {format:?}"), &result)
        });
        if !result.contains(&true) {
            silent.push(what);
        }
    }
    assert!(silent.is_empty(), "no escape came through {silent:?}");
}
