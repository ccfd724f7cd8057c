//! Writes the events of all services to the API (node-and-api.md §10).
//!
//! A ring has combined equal events already, with their count. Here similar events are combined as well, an object with too many
//! events loses some, and each event becomes an Event whose name identifies it, so that a retry creates no second one.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Limiter, Patch, Resource};
use keelson_kube_model::time;
use keelson_node_status_core::correlation::{COMBINED, ComparedEvent, Correlation, EventAction};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Context;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::retry_after;

/// The namespace of events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";
/// How often an event is tried on which the server fails; after that the event itself is taken for the cause.
const TRIES: u32 = 12;

/// Writes events.
pub(super) struct Events {
    api: KubeApi,
    node: String,
    limiter: Limiter,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    correlation: Correlation,
    /// The written events of a list that is not complete, by service: the whole list comes again.
    done: BTreeMap<String, BTreeSet<Occurrence>>,
    /// The event on which the server failed last, and how often.
    failing: Option<(Occurrence, u32)>,
    throttled: Duration,
    /// Until then the server has asked not to get requests (`Retry-After`).
    throttled_until: Option<Instant>,
}

/// One entry of a service's ring.
type Occurrence = (u64, i64, i64);

fn occurrence(event: &Event) -> Occurrence {
    (event.sequence, event.first_unix_nanos, event.last_unix_nanos)
}

impl Events {
    pub(super) fn new(ctx: &Context, api: KubeApi) -> Self {
        let own = &ctx.config.node_status;
        Self {
            api,
            node: ctx.config.node_name.clone(),
            limiter: Limiter::new(own.event_qps, own.event_burst),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long events have waited for the rate limit and for `Retry-After`, in total.
    pub(super) fn throttled(&self) -> Duration {
        self.state().throttled
    }

    /// Writes the events of a service in order. After an error the same events may come again: those that were written are
    /// skipped then.
    ///
    /// # Errors
    /// The server does not answer, fails, or has asked to wait.
    pub(super) async fn write(&self, service: &str, events: &[Event]) -> Result<(), KubeError> {
        if self.state().throttled_until.is_some_and(|until| until > Instant::now()) {
            let message = "it has asked to wait (Retry-After)".to_owned();
            return Err(self.api.unreachable("events", message));
        }
        for event in events {
            let id = occurrence(event);
            if self.state().done.get(service).is_some_and(|done| done.contains(&id)) {
                continue;
            }
            let decision = self.state().correlation.decide(&compared(event));
            if let Some(outgoing) = outgoing_event(event, decision.action) {
                match self.write_throttled(&outgoing).await {
                    Ok(()) => {}
                    Err(error) if error.is_retryable() && !self.is_given_up(id, &error) => return Err(error),
                    // Its namespace is gone, for example: a retry would not help.
                    Err(error) => {
                        tracing::debug!(%error, reason = event.reason, "the API server refuses an event; it is dropped");
                    }
                }
            }
            let mut state = self.state();
            state.correlation.commit(decision);
            state.done.entry(service.to_owned()).or_default().insert(id);
        }
        self.state().done.remove(service);
        Ok(())
    }

    /// Whether the server has failed on this event so often that the event itself is the cause.
    fn is_given_up(&self, id: Occurrence, error: &KubeError) -> bool {
        if error.code().is_none_or(|code| code == 429) {
            return false;
        }
        let mut state = self.state();
        let before = state.failing.filter(|(failing, _)| *failing == id).map_or(0, |(_, tries)| tries);
        state.failing = Some((id, before + 1));
        before + 1 >= TRIES
    }

    async fn write_throttled(&self, outgoing: &OutgoingEvent) -> Result<(), KubeError> {
        let wait = self.limiter.take();
        self.state().throttled += wait;
        tokio::time::sleep(wait).await;
        let written = self.write_one(outgoing).await;
        if let Err(error) = &written {
            let (retry_after, mut state) = (retry_after(error), self.state());
            state.throttled += retry_after;
            state.throttled_until = Some(Instant::now() + retry_after);
        }
        written
    }

    async fn write_one(&self, outgoing: &OutgoingEvent) -> Result<(), KubeError> {
        let object = self.object(outgoing);
        let namespace = object["metadata"]["namespace"].as_str();
        if outgoing.event.count > 1 {
            let mut patch = json!({});
            for field in ["count", "lastTimestamp", "message"] {
                patch[field] = object[field].clone();
            }
            let patch = (Patch::Merge, &patch);
            match self.api.patch(Resource::EVENT, namespace, &outgoing.name, None, patch).await {
                Ok(_) => return Ok(()),
                // The server keeps events for an hour.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        match self.api.create(Resource::EVENT, namespace, &object).await {
            Err(error) if error.is_conflict() => Ok(()),
            done => done.map(drop),
        }
    }

    fn object(&self, outgoing: &OutgoingEvent) -> Value {
        let event = &outgoing.event;
        let at = |nanos: i64| time::format_seconds(nanos / 1_000_000_000).unwrap_or_default();
        let namespace = if event.namespace.is_empty() { DEFAULT_NAMESPACE } else { &event.namespace };
        let mut involved = json!({"apiVersion": "v1", "kind": event.kind, "name": event.name});
        for (field, text) in
            [("namespace", &event.namespace), ("uid", &event.uid), ("fieldPath", &event.field_path)]
        {
            if !text.is_empty() {
                involved[field] = text.clone().into();
            }
        }
        json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": outgoing.name, "namespace": namespace, "annotations": event.annotations},
            "involvedObject": involved,
            "reason": event.reason,
            "message": event.message,
            "type": event.r#type,
            "count": event.count,
            "firstTimestamp": at(event.first_unix_nanos),
            "lastTimestamp": at(event.last_unix_nanos),
            "source": {"component": "kubelet", "host": self.node},
            "reportingComponent": "kubelet",
            "reportingInstance": self.node,
        })
    }
}

/// An event as it is written.
struct OutgoingEvent {
    /// The same for every try and every count of an event, and for all similar events that are combined.
    name: String,
    event: Event,
}

/// The event to write; `None` if it is dropped.
fn outgoing_event(event: &Event, action: EventAction) -> Option<OutgoingEvent> {
    match action {
        EventAction::Single => {
            Some(OutgoingEvent { name: name(event, &event.field_path), event: event.clone() })
        }
        EventAction::Combined { first, count } => {
            let message = format!("{COMBINED}{}", event.message);
            let event = Event { message, first_unix_nanos: first, count, ..event.clone() };
            Some(OutgoingEvent { name: name(&event, COMBINED), event })
        }
        EventAction::Drop => {
            let (name, reason) = (&event.name, &event.reason);
            tracing::debug!(name, reason, "an event is dropped: its object has too many events");
            None
        }
    }
}

fn name(event: &Event, part: &str) -> String {
    let mut hasher = DefaultHasher::new();
    (&event.reason, &event.uid, part, &event.r#type).hash(&mut hasher);
    format!("{}.{:x}{:04x}", event.name, event.first_unix_nanos, hasher.finish() & 0xffff)
}

fn compared(event: &Event) -> ComparedEvent<'_> {
    ComparedEvent {
        object: [&event.kind, &event.namespace, &event.name, &event.uid],
        kind: &event.r#type,
        reason: &event.reason,
        message: &event.message,
        at: event.last_unix_nanos,
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
