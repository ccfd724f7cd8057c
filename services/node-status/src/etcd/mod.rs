//! etcd as the control plane that node-status writes to (architecture §6).
//!
//! Node and pods wait in a queue with one slot each, so that a slow or absent etcd costs bounded memory and the latest state
//! wins; the loop `etcd-writer` empties it, changes of phase or readiness first. Every write requires the revision that it
//! replaces and this agent's lease: an agent whose node another one has taken over writes nothing any more.
//!
//! A write that etcd refuses is retried after the others; only a report larger than etcd accepts is left out. With a new lease,
//! and after etcd was restored, all reports are queued again, and written where etcd has another value.

mod configuration;
mod identity;
mod lease;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{Etcd as Settings, ServiceName};
use keelson_etcd::{Entry, Etcd, EtcdError, Expect, NodeKeys, Operation, Written};
use keelson_kube_model::{Node, PodFullName, time};
use keelson_node_status_core::configuration_event;
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, EventRing, LoopHandle, NewEvent, ObjectRef};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use crate::etcd::identity::identity;
use crate::etcd::lease::Lease;
use crate::queue::{self, Job, Pending, Queue, Slot};
use crate::writer::{ControlPlaneWriter, GonePods, PodReport, ReportState, WriteError};

/// The condition that says whether reports succeed.
const CONDITION: &str = "control-plane";
/// How long an event is kept (the API server's `--event-ttl`), and how long one etcd lease is used for new events.
const EVENT_SECONDS: u32 = 3600;
const EVENT_LEASE_EVERY: Duration = Duration::from_secs(600);
/// Events per write; etcd accepts 128 operations (`--max-txn-ops`).
const EVENTS_PER_WRITE: usize = 64;
/// The pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The pause after a refused write, since etcd checks the user for each.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// Writes to etcd.
pub(crate) struct EtcdWriter {
    etcd: Etcd,
    keys: NodeKeys,
    node: String,
    lease: Lease,
    queue: Mutex<Queue>,
    reports: Mutex<Reports>,
    wake: Notify,
    /// Whether etcd has answered the last renewal of the lease and all writes of events since.
    reachable: AtomicBool,
    events: tokio::sync::Mutex<Option<(i64, Instant)>>,
    /// The event ring of this service.
    ring: EventRing,
}

/// The latest reports, from which they are queued again.
#[derive(Default)]
struct Reports {
    node: Option<Vec<u8>>,
    /// The status of the node configuration; the inner `None`: there is none.
    configuration: Option<Option<Vec<u8>>>,
    /// By UID.
    pods: BTreeMap<String, queue::Pod>,
    /// All pods have been reported: any other pod status in etcd is stale.
    is_complete: bool,
}

/// The errors of jobs that wait or were left out, by slot.
type ErrorsBySlot = BTreeMap<Slot, String>;

/// The last known state of a key that this agent writes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CachedKey {
    /// The revision of its last change; 0: the key does not exist.
    revision: i64,
    /// The pod in its value.
    pod: Option<ReportedPod>,
}

impl CachedKey {
    fn of(entry: Option<&Entry>) -> Self {
        let revision = entry.map_or(0, |entry| entry.mod_revision);
        Self { revision, pod: entry.and_then(|entry| ReportedPod::of(&entry.value)) }
    }
}

impl EtcdWriter {
    /// A writer for the node of `ctx`, with its loops. The configuration under the node's key `config` is applied only where init
    /// keeps the services.
    ///
    /// # Errors
    /// The file with the identity of this agent cannot be written.
    pub(crate) fn start(ctx: &Context, settings: &Settings, has_init: bool) -> anyhow::Result<Arc<Self>> {
        let etcd = Etcd::new(settings.handed_over(&ctx.config.paths.credentials(ServiceName::NodeStatus)));
        let keys = NodeKeys::new(&ctx.config.node_name);
        let identity = identity(&ctx.config)?;
        let lease = Lease::new(etcd.clone(), &keys, &ctx.config.node_name, identity, settings.lease_seconds);
        let own = Arc::new(Self {
            etcd,
            keys,
            node: ctx.config.node_name.clone(),
            lease,
            queue: Mutex::default(),
            reports: Mutex::default(),
            wake: Notify::new(),
            reachable: AtomicBool::new(false),
            events: tokio::sync::Mutex::default(),
            ring: ctx.events.clone(),
        });
        ctx.spawn("etcd-writer", Arc::clone(&own).run(ctx.clone()));
        let configuration = configuration::run(Arc::clone(&own), ctx.clone(), has_init);
        ctx.spawn("node-configuration", configuration);
        Ok(own)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked before the queue where both are.
    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: Job, urgent: bool) {
        self.queue().put(job, urgent, Span::current(), Instant::now());
        self.wake.notify_one();
    }

    fn put_configuration(&self, json: Option<Vec<u8>>) {
        let mut reports = self.reports();
        reports.configuration = Some(json.clone());
        self.put(Job::Configuration(json), false);
    }

    /// Puts everything into the queue again.
    fn requeue_all(&self) {
        let reports = self.reports();
        let node = reports.node.clone().map(Job::Node);
        let configuration = reports.configuration.clone().map(Job::Configuration);
        let others = reports.is_complete.then(|| Job::Retain(reports.pods.keys().cloned().collect()));
        let pods = reports.pods.values().cloned().map(Job::Pod);
        for job in others.into_iter().chain(node).chain(configuration).chain(pods) {
            self.put(job, false);
        }
    }

    async fn run(self: Arc<Self>, ctx: Context) {
        let handle = ctx.progress.register("etcd-writer");
        let mut cache: BTreeMap<String, CachedKey> = BTreeMap::new();
        let (mut errors, mut term) = (ErrorsBySlot::new(), 0);
        loop {
            handle.tick();
            let before = std::mem::replace(&mut term, self.lease.term());
            if before != term {
                cache.clear();
                // Before the first term everything is queued already.
                if before != 0 {
                    self.requeue_all();
                }
            }
            let is_held = self.lease.held().is_some();
            let (job, due) = if is_held { self.next_job() } else { (None, None) };
            let Some(pending) = job else {
                let heartbeat = Instant::now() + LoopHandle::HEARTBEAT;
                let next = due.map_or(heartbeat, |due| due.min(heartbeat));
                // Cancel-safe: both keep their notification.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = self.wake.notified() => continue,
                    () = self.lease.acquired() => continue,
                    () = tokio::time::sleep_until(next) => continue,
                }
            };
            let result = {
                let work = self.carry_out(&pending.job, &mut cache).instrument(pending.span.clone());
                // Cancel-safe: a write that the shutdown cuts off may have been made; the next start reads the key.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    result = handle.while_at(work) => result,
                }
            };
            let wait = self.handle_result(pending, result, &mut errors);
            let error = errors.values().next().cloned();
            ctx.progress.condition(CONDITION, error.map_or(Ok(()), Err));
            if let Some(wait) = wait {
                // Cancel-safe: neither arm holds anything.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
            }
        }
    }

    /// The next job now, and when the next deferred one is due.
    fn next_job(&self) -> (Option<Pending>, Option<Instant>) {
        let mut queue = self.queue();
        let job = queue.take();
        (job, queue.due())
    }

    /// Handles the result of a job: puts a failed one back, and stores its error in `errors`. Returns how long all jobs wait.
    fn handle_result(
        &self,
        pending: Pending,
        result: Result<(), EtcdError>,
        errors: &mut ErrorsBySlot,
    ) -> Option<Duration> {
        let (now, slot) = (Instant::now(), pending.job.slot());
        let before = match &result {
            Ok(()) => errors.remove(&slot),
            Err(error) => errors.insert(slot, chain(error)),
        };
        let wait = match result {
            Ok(()) => {
                self.queue().record_answer(now);
                None
            }
            Err(error @ EtcdError::TooLarge { .. }) => {
                self.queue().record_answer(now);
                if before != Some(chain(&error)) {
                    self.record_too_large(&pending.job, &error);
                }
                None
            }
            // Perhaps only this key, or until its permission is granted or the password is correct.
            Err(error @ EtcdError::Refused { .. }) => {
                if pending.refused == 0 {
                    tracing::warn!(error = chain(&error), "etcd refuses a report; it is retried");
                }
                let mut queue = self.queue();
                queue.record_answer(now);
                queue.put_last(pending, now);
                Some(REFUSAL_PAUSE)
            }
            Err(EtcdError::Unreachable { .. }) => {
                let hangs = self.queue().put_back_unanswered(pending, now);
                (!hangs).then_some(RETRY_PAUSE)
            }
            // No call is possible without it: all jobs keep their places.
            Err(EtcdError::Credential { .. } | EtcdError::Missing { .. } | EtcdError::Endpoint { .. }) => {
                self.queue().put_back(pending);
                Some(RETRY_PAUSE)
            }
        };
        let reports = self.reports();
        let queue = self.queue();
        errors.retain(|slot, _| match slot {
            Slot::Pod(uid) => reports.pods.contains_key(uid) || queue.has(slot),
            Slot::Node | Slot::Configuration | Slot::Retain => true,
        });
        wait
    }

    /// Records the event about a report that is too large: it would be refused again, so only its next state is tried.
    fn record_too_large(&self, job: &Job, error: &EtcdError) {
        let error = chain(error);
        tracing::warn!(
            error,
            "a report is larger than etcd accepts and is left out until it changes; raise etcd's --max-request-bytes"
        );
        let object = match job {
            Job::Pod(pod) => ObjectRef::pod(&pod.name.namespace, &pod.name.name, &pod.uid),
            Job::Node(_) | Job::Configuration(_) | Job::RemovePod { .. } | Job::Retain(_) => {
                ObjectRef::node(&self.node)
            }
        };
        let message = format!("{error}; it is left out until it changes; raise etcd's --max-request-bytes");
        self.ring.warning(object, "ReportTooLarge", message);
    }

    async fn carry_out(&self, job: &Job, cache: &mut BTreeMap<String, CachedKey>) -> Result<(), EtcdError> {
        match job {
            Job::Node(json) => self.write(&self.keys.node(), Some(json), cache, |_| true).await.map(drop),
            Job::Configuration(json) => {
                let key = self.keys.config_status();
                if self.write(&key, json.as_ref(), cache, |_| true).await? {
                    self.record_configuration(json.as_ref());
                }
                Ok(())
            }
            Job::Pod(pod) => {
                // The pod has gone since, and its key was removed as stale.
                if !self.reports().pods.contains_key(&pod.uid) {
                    return Ok(());
                }
                let key = self.keys.pod_status(&pod.name.namespace, &pod.name.name);
                // Of two pods of one name the later one is reported.
                self.write(&key, Some(&pod.json), cache, |before| {
                    before.is_none_or(|before| before.uid == pod.uid || before.seen <= pod.seen)
                })
                .await
                .map(drop)
            }
            Job::RemovePod { uid, name } => {
                let key = self.keys.pod_status(&name.namespace, &name.name);
                let is_same_pod =
                    |before: Option<&ReportedPod>| before.is_some_and(|before| before.uid == *uid);
                self.write(&key, None, cache, is_same_pod).await.map(drop)
            }
            Job::Retain(uids) => {
                // A pod that came since may have been written already: its job is more urgent.
                let is_here = |uid: &str| uids.contains(uid) || self.reports().pods.contains_key(uid);
                let stale = |before: Option<&ReportedPod>| before.is_none_or(|before| !is_here(&before.uid));
                let mut result = Ok(());
                for entry in self.etcd.list(&self.keys.pod_statuses()).await?.entries {
                    let now = CachedKey::of(Some(&entry));
                    if !stale(now.pod.as_ref()) {
                        continue;
                    }
                    cache.insert(entry.key.clone(), now);
                    match self.write(&entry.key, None, cache, stale).await {
                        Ok(_) => {}
                        // Perhaps only this key.
                        Err(error @ EtcdError::Refused { .. }) => result = Err(error),
                        Err(error) => return Err(error),
                    }
                }
                result
            }
        }
    }

    /// Records the event of a new status. It is called only if the key had another value, so that each change is recorded once,
    /// over restarts, too.
    fn record_configuration(&self, json: Option<&Vec<u8>>) {
        let status = configuration::decode(json);
        let Some(event) = configuration_event(&self.node, status.as_ref()) else { return };
        self.ring.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(&self.node),
        });
    }

    /// Sets `key` to `value`, if `may` accepts the pod in its current value. Returns whether it was changed.
    async fn write(
        &self,
        key: &str,
        value: Option<&Vec<u8>>,
        cache: &mut BTreeMap<String, CachedKey>,
        may: impl Fn(Option<&ReportedPod>) -> bool,
    ) -> Result<bool, EtcdError> {
        // Once more for each change by another writer in between; there should be none.
        for _ in 0..8 {
            let Some(lease) = self.lease.held() else { return Err(self.lease_lost()) };
            let before = match cache.get(key) {
                Some(before) => before.clone(),
                None => {
                    let entry = self.etcd.get(key).await?;
                    let before = CachedKey::of(entry.as_ref());
                    cache.insert(key.to_owned(), before.clone());
                    // After a start of this service, unchanged keys are not written.
                    if entry.is_some_and(|entry| Some(&entry.value) == value) {
                        return Ok(false);
                    }
                    before
                }
            };
            if !may(before.pod.as_ref()) || (value.is_none() && before.revision == 0) {
                return Ok(false);
            }
            let expect =
                if before.revision == 0 { Expect::Absent } else { Expect::Revision(before.revision) };
            let operation = match value {
                Some(value) => Operation::Put { key: key.to_owned(), value: value.clone(), lease: 0 },
                None => Operation::Delete { key: key.to_owned() },
            };
            let expected = [(key.to_owned(), expect), (self.keys.lease(), Expect::Lease(lease))];
            match self.etcd.write(&expected, &[operation]).await? {
                Written::Done(revision) => {
                    match value {
                        Some(value) => {
                            cache.insert(key.to_owned(), CachedKey { revision, pod: ReportedPod::of(value) });
                        }
                        None => drop(cache.remove(key)),
                    }
                    return Ok(true);
                }
                Written::Conflict(found) => {
                    cache.remove(key);
                    let holder = found.get(1).and_then(Option::as_ref).map_or(0, |entry| entry.lease);
                    if holder != lease {
                        // Another lease may have been acquired meanwhile.
                        self.lease.clear_held_if(lease);
                        continue;
                    }
                    tracing::warn!(
                        key,
                        "another writer has changed a key that this node reports; reading it again"
                    );
                }
            }
        }
        let message = format!(
            "{key} changes faster than this agent can write it; find out which other client writes it"
        );
        Err(EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message })
    }

    fn lease_lost(&self) -> EtcdError {
        let message = format!("this agent has lost the lease of the node {}", self.node);
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message }
    }

    /// The etcd lease for new events.
    async fn event_lease(&self) -> Result<i64, EtcdError> {
        let mut lease = self.events.lock().await;
        if let Some((id, since)) = *lease
            && since.elapsed() < EVENT_LEASE_EVERY
        {
            return Ok(id);
        }
        let seconds = EVENT_SECONDS + u32::try_from(EVENT_LEASE_EVERY.as_secs()).unwrap_or(0);
        let id = self.etcd.grant(seconds).await?;
        *lease = Some((id, Instant::now()));
        Ok(id)
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

#[tonic::async_trait]
impl ControlPlaneWriter for EtcdWriter {
    fn control_plane(&self) -> &'static str {
        "etcd"
    }

    async fn renew_lease(&self) -> Result<(), WriteError> {
        let renewed = self.lease.renew().await;
        self.reachable.store(renewed.is_ok(), Ordering::Relaxed);
        renewed
    }

    async fn write_node(&self, node: &Node) -> Result<(), WriteError> {
        let json = serde_json::to_vec(node).map_err(|error| WriteError::Refused {
            what: "the Node".to_owned(),
            message: error.to_string(),
        })?;
        let mut reports = self.reports();
        reports.node = Some(json.clone());
        self.put(Job::Node(json), false);
        Ok(())
    }

    async fn write_pod(&self, pod: &PodReport) -> Result<(), WriteError> {
        let seen = ReportedPod::of(&pod.pod_json).map_or_else(String::new, |reported| reported.seen);
        let name = PodFullName::new(&pod.name, &pod.namespace);
        let job = queue::Pod {
            uid: pod.uid.clone(),
            name,
            seen,
            json: pod.pod_json.to_vec(),
            is_static: false,
            termination: pod.termination,
        };
        let mut reports = self.reports();
        reports.pods.insert(pod.uid.clone(), job.clone());
        self.put(Job::Pod(job), pod.urgent);
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        let mut reports = self.reports();
        match gone {
            GonePods::One(uid) => {
                if let Some(pod) = reports.pods.remove(&uid) {
                    self.put(Job::RemovePod { uid, name: pod.name }, false);
                }
            }
            GonePods::AllBut(uids) => {
                reports.pods.retain(|uid, _| uids.contains(uid));
                reports.is_complete = true;
                self.put(Job::Retain(uids), false);
            }
        }
    }

    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError> {
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
        let lease = self.event_lease().await.map_err(failed)?;
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
                    *self.events.lock().await = None;
                    return Err(failed(error));
                }
            }
        }
        Ok(())
    }

    fn state(&self) -> ReportState {
        let queue = self.queue();
        let oldest = queue.oldest().map_or(0, |since| since.elapsed().as_millis());
        ReportState {
            queued: u32::try_from(queue.len()).unwrap_or(u32::MAX),
            oldest_age_ms: u64::try_from(oldest).unwrap_or(u64::MAX),
            throttled_seconds: 0.0,
        }
    }
}

/// The write error for a failed call.
pub(crate) fn write_error(what: &str, error: &EtcdError) -> WriteError {
    let (what, message) = (what.to_owned(), chain(error));
    if error.is_transient() {
        WriteError::Unreachable { what, message }
    } else {
        WriteError::Refused { what, message }
    }
}

/// The pod that a reported status is of.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReportedPod {
    uid: String,
    /// When the agent first saw it, RFC 3339.
    seen: String,
}

impl ReportedPod {
    /// `None` for a value that is not a pod.
    fn of(json: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Pod {
            metadata: Metadata,
        }
        #[derive(Deserialize)]
        struct Metadata {
            uid: String,
            #[serde(default)]
            annotations: BTreeMap<String, String>,
        }
        let mut pod: Pod = serde_json::from_slice(json).ok()?;
        let seen = pod.metadata.annotations.remove(keelson_kube_model::annotations::CONFIG_SEEN);
        Some(Self { uid: pod.metadata.uid, seen: seen.unwrap_or_default() })
    }
}
