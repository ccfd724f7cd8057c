use keelson_config::{Config, ServiceName};

use super::super::fake::Server;
use super::*;

const START: i64 = 1_767_225_600_000_000_001;

fn event() -> Event {
    Event {
        sequence: 1,
        r#type: "Normal".into(),
        reason: "Started".into(),
        message: "m".into(),
        kind: "Pod".into(),
        namespace: "d".into(),
        name: "web".into(),
        uid: "u".into(),
        first_unix_nanos: START,
        last_unix_nanos: START + 1_000_000_000,
        count: 1,
        ..Event::default()
    }
}

/// This many events of the pod that differ in their messages.
fn different(count: u64) -> Vec<Event> {
    let one = |n: u64| {
        let at = START + i64::try_from(n).unwrap();
        Event {
            sequence: n + 1,
            message: format!("m{n}"),
            first_unix_nanos: at,
            last_unix_nanos: at,
            ..event()
        }
    };
    (0..count).map(one).collect()
}

fn events(api: KubeApi) -> Events {
    let config = Config { node_name: "n".into(), ..Config::default() };
    Events::new(&Context::detached(ServiceName::NodeStatus, config), api)
}

fn outgoing(event: &Event) -> OutgoingEvent {
    outgoing_event(event, EventAction::Single).unwrap()
}

#[test]
fn an_event_has_one_name_for_all_counts() {
    let events = events(KubeApi::new("/nowhere".into(), "test"));
    let object = events.object(&outgoing(&event()));
    assert_eq!(
        object["involvedObject"],
        json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "namespace": "d", "uid": "u"})
    );
    assert_eq!(object["firstTimestamp"], "2026-01-01T00:00:00Z");
    assert_eq!(object["source"], json!({"component": "kubelet", "host": "n"}));
    let more = Event { count: 5, last_unix_nanos: START + 100_000_000_000, message: "x".into(), ..event() };
    assert_eq!(events.object(&outgoing(&more))["metadata"]["name"], object["metadata"]["name"]);
    let other = Event { reason: "Pulled".into(), ..event() };
    assert_ne!(outgoing(&other).name, outgoing(&event()).name);
    let of_node = Event { namespace: String::new(), kind: "Node".into(), uid: String::new(), ..event() };
    let object = events.object(&outgoing(&of_node));
    assert_eq!(object["metadata"]["namespace"], "default");
    assert_eq!(object["involvedObject"], json!({"apiVersion": "v1", "kind": "Node", "name": "web"}));
}

#[tokio::test]
async fn similar_events_are_one_object_with_a_rising_count_from_the_tenth() {
    let server = Server::start(|_| None).await;
    let events = events(server.api.clone());
    events.write("pod-sync", &different(12)).await.unwrap();
    let requests = server.requests();
    let methods: Vec<&str> = requests.iter().map(|(method, _)| method.as_str()).collect();
    assert_eq!(methods, [&["POST"; 10][..], &["PATCH"; 2][..]].concat());
    assert_eq!(requests[8].1["message"], "m8");
    assert_eq!(requests[9].1["message"], "(combined from similar events): m9");
    assert_eq!(
        (&requests[11].1["message"], &requests[11].1["count"]),
        (&json!("(combined from similar events): m11"), &json!(3))
    );
}

#[tokio::test]
async fn an_event_list_repeated_after_an_error_counts_nothing_twice() {
    // The eleventh event fails, and comes again with those before it.
    let server = Server::start(|number| (number == 10).then_some(503)).await;
    let events = events(server.api.clone());
    events.write("pod-sync", &different(12)).await.unwrap_err();
    assert_eq!(server.requests().len(), 10);
    events.write("another", &[Event { name: "db".into(), ..event() }]).await.unwrap();
    events.write("pod-sync", &different(12)).await.unwrap();
    let requests = server.requests();
    assert_eq!((requests.len(), &requests[12].1["count"]), (13, &json!(3)), "{requests:?}");
    assert!(events.state().done.is_empty());
}

#[tokio::test]
async fn an_event_on_which_the_server_keeps_failing_is_dropped() {
    let server = Server::start(|number| (number < 12).then_some(500)).await;
    let events = events(server.api.clone());
    for _ in 0..11 {
        events.write("pod-sync", &different(2)).await.unwrap_err();
    }
    events.write("pod-sync", &different(2)).await.unwrap();
    let requests = server.requests();
    assert_eq!((requests.len(), &requests[0].1["message"]), (1, &json!("m1")));
}

#[tokio::test]
async fn refused_events_are_dropped_and_an_object_has_a_burst_of_25() {
    let server = Server::start(|number| (number == 0).then_some(403)).await;
    let events = events(server.api.clone());
    let mut many = different(40);
    for (n, event) in many.iter_mut().enumerate() {
        event.reason = format!("R{n}");
    }
    events.write("pod-sync", &many).await.unwrap();
    assert_eq!(server.requests().len(), 24, "the first was refused");
}

#[tokio::test]
async fn retry_after_applies_to_the_events_of_all_services() {
    let server = Server::with_retry_after("3600", |number| (number == 0).then_some(429)).await;
    let events = events(server.api.clone());
    events.write("pod-sync", &different(1)).await.unwrap_err();
    let error = events.write("another", &different(1)).await.unwrap_err();
    assert!(error.to_string().contains("asked to wait (Retry-After)"), "{error}");
    assert!(server.requests().is_empty());
    assert_eq!(events.throttled(), Duration::from_secs(60));
}
