//! Events of all services as the API has them (node-and-api.md §10).
//!
//! A ring has made one of what is equal already, with its count. Here similar ones become one as well, an object with too many
//! loses some, and each becomes an Event under a name that says which one it is, so that a second try makes no second one.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Limiter, Patch, Resource};
use keelson_kube_model::time;
use keelson_node_status_core::correlation::{COMBINED, Correlation, Seen, Verdict};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Context;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::asked_for;

/// Where events of things without a namespace are.
const DEFAULT_NAMESPACE: &str = "default";
/// So often an event is tried over which the server fails; then it is taken for the event's fault.
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
    /// Those of a list that is not written to its end, by the service that they are of: it comes again as a whole.
    done: BTreeMap<String, BTreeSet<Occurrence>>,
    /// The event over which the server failed last, and how often.
    failing: Option<(Occurrence, u32)>,
    throttled: Duration,
    /// Until then the server has asked to be left alone.
    asked_until: Option<Instant>,
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

    /// How long events have waited for each other, and the server has asked to wait with them, all told.
    pub(super) fn throttled(&self) -> Duration {
        self.state().throttled
    }

    /// Writes those of a service in their order. After a failure the same ones may come again: what was done is left out then.
    ///
    /// # Errors
    /// The server does not answer, is in trouble, or has asked to be left alone.
    pub(super) async fn write(&self, service: &str, events: &[Event]) -> Result<(), KubeError> {
        if self.state().asked_until.is_some_and(|until| until > Instant::now()) {
            let message = "it has asked to be left alone for a while".to_owned();
            return Err(self.api.unreachable("events", message));
        }
        for event in events {
            let id = occurrence(event);
            if self.state().done.get(service).is_some_and(|done| done.contains(&id)) {
                continue;
            }
            let judgement = self.state().correlation.judge(&seen(event));
            if let Some(told) = told_as(event, judgement.verdict) {
                match self.write_in_turn(&told).await {
                    Ok(()) => {}
                    Err(error) if error.may_pass() && !self.is_given_up(id, &error) => return Err(error),
                    // Of a namespace that is gone, for one: nothing that a second try would mend.
                    Err(error) => {
                        tracing::debug!(%error, reason = event.reason, "an event is refused and left out");
                    }
                }
            }
            let mut state = self.state();
            state.correlation.keep(judgement);
            state.done.entry(service.to_owned()).or_default().insert(id);
        }
        self.state().done.remove(service);
        Ok(())
    }

    /// Whether the server has failed over this event so often that it is rather the event.
    fn is_given_up(&self, id: Occurrence, error: &KubeError) -> bool {
        if error.code().is_none_or(|code| code == 429) {
            return false;
        }
        let mut state = self.state();
        let before = state.failing.filter(|(failing, _)| *failing == id).map_or(0, |(_, tries)| tries);
        state.failing = Some((id, before + 1));
        before + 1 >= TRIES
    }

    async fn write_in_turn(&self, told: &Told) -> Result<(), KubeError> {
        let wait = self.limiter.take();
        self.state().throttled += wait;
        tokio::time::sleep(wait).await;
        let written = self.write_one(told).await;
        if let Err(error) = &written {
            let (asked_for, mut state) = (asked_for(error), self.state());
            state.throttled += asked_for;
            state.asked_until = Some(Instant::now() + asked_for);
        }
        written
    }

    async fn write_one(&self, told: &Told) -> Result<(), KubeError> {
        let object = self.object(told);
        let namespace = object["metadata"]["namespace"].as_str();
        if told.event.count > 1 {
            let mut patch = json!({});
            for field in ["count", "lastTimestamp", "message"] {
                patch[field] = object[field].clone();
            }
            let patch = (Patch::Merge, &patch);
            match self.api.patch(Resource::EVENT, namespace, &told.name, None, patch).await {
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

    fn object(&self, told: &Told) -> Value {
        let event = &told.event;
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
            "metadata": {"name": told.name, "namespace": namespace, "annotations": event.annotations},
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

/// An event as it is told.
struct Told {
    /// The same for every try and every count of an event, and for all that are told as one.
    name: String,
    event: Event,
}

/// What is told; none: nothing.
fn told_as(event: &Event, verdict: Verdict) -> Option<Told> {
    match verdict {
        Verdict::Own => Some(Told { name: name(event, &event.field_path), event: event.clone() }),
        Verdict::Combined { first, count } => {
            let message = format!("{COMBINED}{}", event.message);
            let event = Event { message, first_unix_nanos: first, count, ..event.clone() };
            Some(Told { name: name(&event, COMBINED), event })
        }
        Verdict::LeftOut => {
            let (name, reason) = (&event.name, &event.reason);
            tracing::debug!(name, reason, "an event is left out: its object has too many");
            None
        }
    }
}

fn name(event: &Event, part: &str) -> String {
    let mut hasher = DefaultHasher::new();
    (&event.reason, &event.uid, part, &event.r#type).hash(&mut hasher);
    format!("{}.{:x}{:04x}", event.name, event.first_unix_nanos, hasher.finish() & 0xffff)
}

fn seen(event: &Event) -> Seen<'_> {
    Seen {
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
