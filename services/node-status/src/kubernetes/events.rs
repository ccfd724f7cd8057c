//! Events of all services as the API has them (node-and-api.md §10).
//!
//! A ring has made one of what is alike already, with its count; here each becomes an Event under a name that says which one
//! it is, so that a second try makes no second one.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use keelson_kube_api::{KubeApi, KubeError, Patch, Resource};
use keelson_kube_model::time;
use keelson_proto::keelson::events::v1::Event;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Events per second (`eventRecordQPS`).
const PER_SECOND: f64 = 50.0;
/// Events at once (`eventBurst`).
const BURST: f64 = 100.0;
/// Where events of things without a namespace are.
const DEFAULT_NAMESPACE: &str = "default";

/// Writes events.
pub(super) struct Events {
    api: KubeApi,
    node: String,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    tokens: f64,
    at: Instant,
    throttled: Duration,
}

impl Bucket {
    fn full(now: Instant) -> Self {
        Self { tokens: BURST, at: now, throttled: Duration::ZERO }
    }

    /// Takes one, and says for how long to wait before it is used.
    fn take(&mut self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + since * PER_SECOND).min(BURST) - 1.0;
        self.at = now;
        let wait = Duration::from_secs_f64((-self.tokens).max(0.0) / PER_SECOND);
        self.throttled += wait;
        wait
    }
}

impl Events {
    pub(super) fn new(api: KubeApi, node: &str) -> Self {
        Self { api, node: node.to_owned(), bucket: Mutex::new(Bucket::full(Instant::now())) }
    }

    /// How long events have waited for each other, all told.
    pub(super) fn throttled(&self) -> Duration {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).throttled
    }

    /// Writes them in their order. What was written before a failure is written a second time without harm.
    ///
    /// # Errors
    /// The server does not answer.
    pub(super) async fn write(&self, events: &[Event]) -> Result<(), KubeError> {
        for event in events {
            let wait = self.bucket.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
            tokio::time::sleep(wait).await;
            match self.write_one(event).await {
                Ok(()) => {}
                Err(error) if error.code().is_none() || error.code() == Some(429) => return Err(error),
                // Of a namespace that is gone, for one: nothing that a second try would mend.
                Err(error) => {
                    tracing::debug!(%error, reason = event.reason, "an event is refused and left out")
                }
            }
        }
        Ok(())
    }

    async fn write_one(&self, event: &Event) -> Result<(), KubeError> {
        let object = self.object(event);
        let namespace = object["metadata"]["namespace"].as_str();
        if event.count > 1 {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            let mut patch = json!({});
            for field in ["count", "lastTimestamp", "message"] {
                patch[field] = object[field].clone();
            }
            match self.api.patch(Resource::EVENT, namespace, name, None, (Patch::Merge, &patch)).await {
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

    fn object(&self, event: &Event) -> Value {
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
            "metadata": {"name": name(event), "namespace": namespace, "annotations": event.annotations},
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

/// The same for every try and every count of an event.
fn name(event: &Event) -> String {
    let mut hasher = DefaultHasher::new();
    (&event.reason, &event.uid, &event.field_path, &event.r#type).hash(&mut hasher);
    format!("{}.{:x}{:04x}", event.name, event.first_unix_nanos, hasher.finish() & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event {
            r#type: "Normal".into(),
            reason: "Started".into(),
            message: "m".into(),
            kind: "Pod".into(),
            namespace: "d".into(),
            name: "web".into(),
            uid: "u".into(),
            first_unix_nanos: 1_767_225_600_000_000_001,
            last_unix_nanos: 1_767_225_601_000_000_001,
            count: 1,
            ..Event::default()
        }
    }

    #[test]
    fn an_event_is_one_object_whatever_its_count() {
        let events = Events::new(KubeApi::new("/nowhere".into(), "test"), "n");
        let object = events.object(&event());
        assert_eq!(
            object["involvedObject"],
            json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "namespace": "d", "uid": "u"})
        );
        assert_eq!(object["firstTimestamp"], "2026-01-01T00:00:00Z");
        assert_eq!(object["source"], json!({"component": "kubelet", "host": "n"}));
        let more =
            Event { count: 5, last_unix_nanos: 1_767_225_700_000_000_001, message: "x".into(), ..event() };
        assert_eq!(events.object(&more)["metadata"]["name"], object["metadata"]["name"]);
        let other = Event { reason: "Pulled".into(), ..event() };
        assert_ne!(name(&other), name(&event()));
        let of_node = Event { namespace: String::new(), kind: "Node".into(), uid: String::new(), ..event() };
        let object = events.object(&of_node);
        assert_eq!(object["metadata"]["namespace"], "default");
        assert_eq!(object["involvedObject"], json!({"apiVersion": "v1", "kind": "Node", "name": "web"}));
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_the_rest_fifty_in_a_second() {
        let mut bucket = Bucket::full(Instant::now());
        let waits: Vec<Duration> = (0..150).map(|_| bucket.take(Instant::now())).collect();
        assert!(waits[..100].iter().all(Duration::is_zero));
        assert_eq!(waits[149], Duration::from_secs(1));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(bucket.take(Instant::now()).is_zero());
        assert!(bucket.throttled > Duration::from_secs(20));
    }
}
