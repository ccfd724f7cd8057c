//! `keelson get events`.

use keelson_service_kit::{NewEvent, ObjectRef};
use serde_json::json;

use crate::fake::{Fake, World};
use crate::{keelson, world};

pub(crate) fn world_with_events() -> World {
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
