//! Whatever a pod, a manifest, a server or a service says, no command passes on what moves a cursor, names a window or turns text
//! around: escapes in every text that the services answer with, through every command that shows some.

use keelson_proto::descriptors;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, ReflectMessage as _, Value as Field};
use serde_json::Value;

use crate::fake::{Fake, World};
use crate::keelson;

/// Moves the cursor, names the window, in one character and in two, and turns the text around.
const HOSTILE: &str = "\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}1A\r\u{202e}\u{2066}\u{7f}";

/// What names things to commands, or is a number, a moment or a word from a list in the form of a text.
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

fn spoil_json(value: &mut Value) {
    match value {
        Value::String(text) => text.push_str(HOSTILE),
        Value::Array(items) => items.iter_mut().for_each(spoil_json),
        Value::Object(fields) => {
            for (field, value) in fields {
                if value.is_string() && is_kept(field)
                    || field == "capacity"
                    || field == "allocatable"
                    || field == "requests"
                {
                    continue;
                }
                spoil_json(value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn spoil_field(name: &str, value: &mut Field) {
    match value {
        Field::String(text) if !is_kept(name) => text.push_str(HOSTILE),
        Field::Bytes(bytes) if name.ends_with("_json") => {
            let mut json: Value = serde_json::from_slice(bytes).unwrap();
            spoil_json(&mut json);
            *bytes = json.to_string().into();
        }
        Field::Message(message) => spoil_message(message),
        Field::List(items) => items.iter_mut().for_each(|item| spoil_field(name, item)),
        _ => {}
    }
}

fn spoil_message(message: &mut DynamicMessage) {
    let fields: Vec<_> = message.descriptor().fields().filter(|field| message.has_field(field)).collect();
    for field in fields {
        spoil_field(field.name(), message.get_field_mut(&field));
    }
}

/// A message with escapes in all of its texts.
fn spoilt<M: Message + Default>(pool: &DescriptorPool, name: &str, message: &M) -> M {
    let descriptor = pool.get_message_by_name(name).unwrap();
    let mut dynamic = DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice()).unwrap();
    spoil_message(&mut dynamic);
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
    world.explanation = crate::commands::explanation();
    world.sources = crate::commands::world_with_a_refused_manifest().sources;
    world.images = crate::commands::world_with_images().images;
    let all = |name: &str| format!("keelson.{name}");
    for pod in &mut world.pods {
        *pod = spoilt(&pool, &all("pod_sync.v1.PodDocument"), pod);
    }
    for service in &mut world.services {
        *service = spoilt(&pool, &all("supervisor.v1.Service"), service);
    }
    for source in &mut world.sources {
        *source = spoilt(&pool, &all("pod_config.v1.Source"), source);
    }
    for image in &mut world.images {
        *image = spoilt(&pool, &all("runtime.v1.RuntimeImage"), image);
    }
    world.explanation = spoilt(&pool, &all("pod_sync.v1.ExplainPodResponse"), &world.explanation);
    spoil_json(&mut world.node);
    let object = keelson_service_kit::ObjectRef::pod("default", &format!("web-edge{HOSTILE}"), "u1");
    world.events.warning(object, "Failed", format!("the message of a pod{HOSTILE}"));
    world.log = vec!["log\u{1b}[2J\u{9b}1A", "\u{202e}\n"];
    world
}

#[test]
fn no_command_passes_on_what_acts_on_a_terminal() {
    let fake = Fake::start(hostile_world());
    let acts = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut spelled_out = 0;
    let formats: [&[&str]; 4] = [&[], &["-o", "wide"], &["-o", "json"], &["-o", "yaml"]];
    for what in [
        &["get", "pods", "-A"][..],
        &["get", "pods", "web-edge"],
        &["get", "services"],
        &["get", "node"],
        &["get", "images"],
        &["get", "volumes", "-A"],
        &["get", "events", "-A"],
        &["get", "sources"],
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
        for format in formats {
            let said = keelson(&fake.run_dir, &[what, format].concat());
            for text in [&said.out, &said.err] {
                assert!(!text.chars().any(acts), "{what:?} {format:?}: {text:?}");
                spelled_out += usize::from(text.contains("\\u{1b}") || text.contains("\\u001b"));
            }
        }
    }
    assert!(spelled_out >= 30, "the escapes came through the commands {spelled_out} times only");
}
