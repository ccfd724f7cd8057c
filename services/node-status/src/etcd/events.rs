//! Events, below keys that expire with a lease of their own.

use std::sync::atomic::Ordering;
use std::time::Duration;

use keelson_etcd::{Etcd, EtcdError, Expect, Operation, Written};
use keelson_kube_model::time;
use keelson_proto::keelson::events::v1::Event;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::etcd::{EtcdWriter, write_error};
use crate::writer::WriteError;

/// How long an event is kept (the API server's `--event-ttl`), and how long one etcd lease is used for new events.
const EVENT_SECONDS: u32 = 3600;
const EVENT_LEASE_EVERY: Duration = Duration::from_secs(600);
/// Events per write; etcd accepts 128 operations (`--max-txn-ops`).
const EVENTS_PER_WRITE: usize = 64;
/// The etcd lease for new events, and since when it is used.
#[derive(Default)]
pub(super) struct EventLease(Mutex<Option<(i64, Instant)>>);

impl EventLease {
    /// The ID of the lease.
    async fn id(&self, etcd: &Etcd) -> Result<i64, EtcdError> {
        let mut lease = self.0.lock().await;
        if let Some((id, since)) = *lease
            && since.elapsed() < EVENT_LEASE_EVERY
        {
            return Ok(id);
        }
        let seconds = EVENT_SECONDS + u32::try_from(EVENT_LEASE_EVERY.as_secs()).unwrap_or(0);
        let id = etcd.grant(seconds).await?;
        *lease = Some((id, Instant::now()));
        Ok(id)
    }

    /// Has the next events use a new lease.
    async fn clear(&self) {
        *self.0.lock().await = None;
    }
}

impl EtcdWriter {
    pub(super) async fn write_all_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError> {
        let Some(held) = self.lease.held() else {
            let message = format!("this agent has no lease of the node {}", self.node);
            return Err(WriteError::Unreachable { what: "events".to_owned(), message });
        };
        if !self.reachable.load(Ordering::Relaxed) {
            let message = "etcd did not answer the last request".to_owned();
            return Err(WriteError::Unreachable { what: "events".to_owned(), message });
        }
        let failed = |error: EtcdError| {
            // The events of the other services need not wait for a timeout, too.
            self.reachable.store(!error.is_transient(), Ordering::Relaxed);
            write_error("events", &error)
        };
        let lease = self.event_lease.id(&self.etcd).await.map_err(failed)?;
        for batch in events.chunks(EVENTS_PER_WRITE) {
            let operations: Vec<_> = batch.iter().map(|event| self.event(service, event, lease)).collect();
            let expected = [(self.keys.lease(), Expect::Lease(held))];
            match self.etcd.write(&expected, &operations).await {
                Ok(Written::Done(_)) => {}
                Ok(Written::Conflict(_)) => {
                    self.lease.clear_held_if(held);
                    return Err(failed(self.lease_lost()));
                }
                Err(error) => {
                    // The lease of the events may have expired during a long outage of etcd.
                    self.event_lease.clear().await;
                    return Err(failed(error));
                }
            }
        }
        Ok(())
    }

    fn event(&self, service: &str, event: &Event, lease: i64) -> Operation {
        let key = self.keys.event(event.last_unix_nanos, service, event.sequence);
        let at = |nanos: i64| time::format_seconds(nanos / 1_000_000_000).unwrap_or_default();
        let namespace = if event.namespace.is_empty() { "default" } else { &event.namespace };
        let value = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": format!("{}.{:x}", event.name, event.last_unix_nanos),
                "namespace": namespace,
                "annotations": event.annotations,
            },
            "involvedObject": {
                "kind": event.kind,
                "namespace": event.namespace,
                "name": event.name,
                "uid": event.uid,
                "fieldPath": event.field_path,
            },
            "reason": event.reason,
            "message": event.message,
            "type": event.r#type,
            "count": event.count,
            "firstTimestamp": at(event.first_unix_nanos),
            "lastTimestamp": at(event.last_unix_nanos),
            "source": {"component": service, "host": self.node},
        });
        Operation::Put { key, value: value.to_string().into_bytes(), lease }
    }
}
