use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use keelson_proto::keelson::events::v1 as pb;
use keelson_proto::keelson::events::v1::events_server::Events;
use tonic::{Request, Response, Status};

use crate::now_unix_nanos;

/// Events kept per service; older ones are lost, and counted.
const CAPACITY: usize = 512;
/// Maximum length of a message in bytes: some messages contain output of a container, a registry or a hook.
const MESSAGE: usize = 4 << 10;

/// The bounded ring of Kubernetes events that this service wants reported.
#[derive(Debug, Clone)]
pub struct EventRing(Arc<Mutex<Ring>>);

#[derive(Debug)]
struct Ring {
    id: String,
    next: u64,
    events: VecDeque<pb::Event>,
}

/// The object that an event is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectRef {
    /// `Pod`, `Node`…
    pub kind: String,
    /// Empty for a cluster-wide object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// `spec.containers{name}` or empty.
    pub field_path: String,
}

impl ObjectRef {
    /// A pod.
    pub fn pod(namespace: &str, name: &str, uid: &str) -> Self {
        Self {
            kind: "Pod".into(),
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
            field_path: String::new(),
        }
    }

    /// Refers to a container of the pod, by the spec list that contains it (`containers`, `initContainers`…).
    pub fn container(mut self, list: &str, name: &str) -> Self {
        self.field_path = format!("spec.{list}{{{name}}}");
        self
    }

    /// The node itself.
    pub fn node(name: &str) -> Self {
        Self { kind: "Node".into(), name: name.into(), uid: name.into(), ..Self::default() }
    }
}

/// An event as a service records it.
#[derive(Debug, Clone)]
pub struct NewEvent {
    /// Whether it is a `Warning`; else `Normal`.
    pub warning: bool,
    /// The kubelet's reason where the meaning is the same.
    pub reason: String,
    /// For people.
    pub message: String,
    /// What it is about.
    pub object: ObjectRef,
}

impl Default for EventRing {
    fn default() -> Self {
        let id = format!("{:x}-{:x}", now_unix_nanos(), std::process::id());
        Self(Arc::new(Mutex::new(Ring { id, next: 1, events: VecDeque::new() })))
    }
}

impl EventRing {
    /// Records an event; if it equals an earlier one in everything but time, the earlier one's count is raised instead.
    pub fn record(&self, event: NewEvent) {
        self.record_annotated(event, BTreeMap::new());
    }

    /// As [`Self::record`], with annotations of the event's own object (`metadata.annotations`). An event that differs from
    /// an earlier one only in annotations replaces it and continues its count.
    pub fn record_annotated(&self, mut event: NewEvent, annotations: BTreeMap<String, String>) {
        cut(&mut event.message);
        let now = now_unix_nanos();
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = if event.warning { "Warning" } else { "Normal" };
        let same = ring.events.iter().position(|e| {
            e.r#type == kind
                && e.reason == event.reason
                && e.message == event.message
                && e.uid == event.object.uid
                && e.name == event.object.name
                && e.field_path == event.object.field_path
        });
        let (first, count) = match same.and_then(|i| ring.events.remove(i)) {
            Some(old) => (old.first_unix_nanos, old.count + 1),
            None => (now, 1),
        };
        let sequence = ring.next;
        ring.next += 1;
        if ring.events.len() == CAPACITY {
            ring.events.pop_front();
        }
        ring.events.push_back(pb::Event {
            sequence,
            r#type: kind.into(),
            reason: event.reason,
            message: event.message,
            kind: event.object.kind,
            namespace: event.object.namespace,
            name: event.object.name,
            uid: event.object.uid,
            field_path: event.object.field_path,
            first_unix_nanos: first,
            last_unix_nanos: now,
            count,
            annotations: annotations.into_iter().collect(),
        });
    }

    /// A `Normal` event.
    pub fn normal(&self, object: ObjectRef, reason: &str, message: impl Into<String>) {
        self.record(NewEvent { warning: false, reason: reason.into(), message: message.into(), object });
    }

    /// A `Warning` event.
    pub fn warning(&self, object: ObjectRef, reason: &str, message: impl Into<String>) {
        self.record(NewEvent { warning: true, reason: reason.into(), message: message.into(), object });
    }

    fn list(&self, ring_id: &str, after: u64) -> pb::ListEventsResponse {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let after = if ring_id == ring.id { after } else { 0 };
        let events: Vec<_> = ring.events.iter().filter(|e| e.sequence > after).cloned().collect();
        let last_sequence = ring.next - 1;
        // Merged events leave gaps in the sequence; only events older than the oldest one in the ring can be lost.
        let oldest = ring.events.front().map_or(ring.next, |e| e.sequence);
        let lost = if ring.events.len() == CAPACITY { oldest.saturating_sub(after + 1) } else { 0 };
        pb::ListEventsResponse { ring_id: ring.id.clone(), events, lost, last_sequence }
    }
}

/// Truncates a message to the maximum length, with an ellipsis.
fn cut(message: &mut String) {
    const ELLIPSIS: char = '…';
    if message.len() > MESSAGE {
        let mut end = MESSAGE - ELLIPSIS.len_utf8();
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        message.push(ELLIPSIS);
        message.shrink_to_fit();
    }
}

#[tonic::async_trait]
impl Events for EventRing {
    async fn list_events(
        &self,
        request: Request<pb::ListEventsRequest>,
    ) -> Result<Response<pb::ListEventsResponse>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.list(&request.ring_id, request.after_sequence)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_event_twice_is_one_event_with_count_two_and_a_new_sequence() {
        let ring = EventRing::default();
        for _ in 0..2 {
            ring.warning(ObjectRef::pod("default", "web", "u1"), "BackOff", "waits");
        }
        let list = ring.list("", 0);
        assert_eq!(list.events.len(), 1);
        assert_eq!((list.events[0].count, list.events[0].sequence), (2, 2));
    }

    #[test]
    fn annotations_are_those_of_the_last_time_the_event_was_recorded() {
        let ring = EventRing::default();
        for usage in ["1Mi", "2Mi"] {
            let object = ObjectRef::pod("default", "web", "u1");
            let event = NewEvent { warning: true, reason: "Evicted".into(), message: "m".into(), object };
            ring.record_annotated(event, [("usage".to_owned(), usage.to_owned())].into());
        }
        let list = ring.list("", 0);
        assert_eq!((list.events.len(), list.events[0].count), (1, 2));
        assert_eq!(list.events[0].annotations, [("usage".to_owned(), "2Mi".to_owned())].into());
    }

    #[test]
    fn a_huge_message_is_cut_between_two_characters() {
        let ring = EventRing::default();
        for text in ["x".repeat(MESSAGE), "ä".repeat(1 << 20), format!("x{}", "ä".repeat(1 << 20))] {
            ring.warning(ObjectRef::node("n"), "Failed", text);
        }
        let messages: Vec<String> = ring.list("", 0).events.into_iter().map(|event| event.message).collect();
        assert_eq!(messages[0], "x".repeat(MESSAGE));
        for (message, bytes) in [(&messages[1], MESSAGE - 1), (&messages[2], MESSAGE)] {
            assert_eq!(message.len(), bytes);
            assert!(message.ends_with("ä…"));
        }
    }

    #[test]
    fn an_overtaken_reader_gets_the_count_of_lost_events() {
        let ring = EventRing::default();
        for i in 0..CAPACITY + 10 {
            ring.normal(ObjectRef::node("n"), "R", format!("{i}"));
        }
        let id = ring.list("", 0).ring_id;
        assert_eq!(ring.list(&id, 4).lost, 6);
        assert_eq!(ring.list(&id, 20).lost, 0);
    }

    #[test]
    fn a_cursor_from_an_earlier_process_restarts_the_list() {
        let ring = EventRing::default();
        ring.normal(ObjectRef::node("n"), "R", "m");
        assert_eq!(ring.list("another", 99).events.len(), 1);
    }
}
