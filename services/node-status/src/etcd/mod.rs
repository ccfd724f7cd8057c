//! etcd as the control plane that node-status writes to (architecture §6).
//!
//! Node and pods are put into a queue with one slot each, so that a slow or absent etcd costs bounded memory and the
//! latest state wins; the loop `etcd-writer` empties it, what has turned first. Every write names the revision that it
//! replaces and this agent's lease: an agent whose node another one has taken over writes nothing any more.
//!
//! What etcd refuses lets the others go first and is tried again; only what is larger than etcd takes is left out. With a new
//! lease, and where etcd was restored, all is told again, and written where something else stands.

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

/// The condition that says whether reports get through.
const CONDITION: &str = "control-plane";
/// How long an event stays (the API server's `--event-ttl`), and how long one lease is given to new ones.
const EVENT_SECONDS: u32 = 3600;
const EVENT_LEASE_EVERY: Duration = Duration::from_secs(600);
/// Events of one write; etcd takes 128 (`--max-txn-ops`).
const EVENTS_AT_ONCE: usize = 64;
/// After a write that failed.
const AGAIN: Duration = Duration::from_secs(1);
/// After a write that was refused: each costs etcd a look at the user.
const AFTER_REFUSAL: Duration = Duration::from_millis(100);

/// Writes to etcd.
pub(crate) struct EtcdWriter {
    etcd: Etcd,
    keys: NodeKeys,
    node: String,
    lease: Lease,
    queue: Mutex<Queue>,
    reports: Mutex<Reports>,
    wake: Notify,
    /// Whether etcd has answered the last renewal of the lease, and since.
    reachable: AtomicBool,
    events: tokio::sync::Mutex<Option<(i64, Instant)>>,
    /// What this service itself tells.
    ring: EventRing,
}

/// What is to stand in etcd, to be told again.
#[derive(Default)]
struct Reports {
    node: Option<Vec<u8>>,
    /// What became of the node configuration; the inner `None`: there is none.
    configuration: Option<Option<Vec<u8>>>,
    /// By UID.
    pods: BTreeMap<String, queue::Pod>,
    /// All pods have been told of: the others are none of this node's.
    is_complete: bool,
}

/// What is wrong with what waits or was left out, by the slot of it.
type Troubles = BTreeMap<Slot, String>;

/// What is known of a key that this agent writes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    /// The revision of its last change; 0: it is not there.
    revision: i64,
    /// The pod that stands there.
    told: Option<Told>,
}

impl Known {
    fn of(entry: Option<&Entry>) -> Self {
        let revision = entry.map_or(0, |entry| entry.mod_revision);
        Self { revision, told: entry.and_then(|entry| Told::of(&entry.value)) }
    }
}

impl EtcdWriter {
    /// A writer for the node of `ctx`, with its loop. What stands under `config` of the node is acted on where init keeps
    /// the services alone.
    ///
    /// # Errors
    /// The file that tells this agent from another one with the node's name cannot be made.
    pub(crate) fn start(
        ctx: &Context,
        settings: &Settings,
        is_kept_by_init: bool,
    ) -> anyhow::Result<Arc<Self>> {
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
        let configuration = configuration::run(Arc::clone(&own), ctx.clone(), is_kept_by_init);
        ctx.spawn("node-configuration", configuration);
        Ok(own)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Taken before the queue where both are.
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
    fn tell_all_again(&self) {
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
        let mut known: BTreeMap<String, Known> = BTreeMap::new();
        let (mut troubles, mut term) = (Troubles::new(), 0);
        loop {
            handle.tick();
            let before = std::mem::replace(&mut term, self.lease.term());
            if before != term {
                known.clear();
                // Before the first term all waits anyway.
                if before != 0 {
                    self.tell_all_again();
                }
            }
            let is_held = self.lease.held().is_some();
            let (job, due) = if is_held { self.next_job() } else { (None, None) };
            let Some(pending) = job else {
                let heartbeat = Instant::now() + LoopHandle::HEARTBEAT;
                let next = due.map_or(heartbeat, |due| due.min(heartbeat));
                // Cancel-safe: both keep what they tell.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = self.wake.notified() => continue,
                    () = self.lease.taken() => continue,
                    () = tokio::time::sleep_until(next) => continue,
                }
            };
            let result = {
                let work = self.carry_out(&pending.job, &mut known).instrument(pending.span.clone());
                // Cancel-safe: given up at the end, it may have been made, and the next start finds it so.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    result = handle.while_at(work) => result,
                }
            };
            let wait = self.settle(pending, result, &mut troubles);
            let stands = troubles.values().next().cloned();
            ctx.progress.condition(CONDITION, stands.map_or(Ok(()), Err));
            if let Some(wait) = wait {
                // Cancel-safe: neither arm holds anything.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
            }
        }
    }

    /// The job that is next now, and when one that was put off is.
    fn next_job(&self) -> (Option<Pending>, Option<Instant>) {
        let mut queue = self.queue();
        let job = queue.take();
        (job, queue.due())
    }

    /// Keeps a job that has failed for later, and what is wrong in `troubles`. How long all others wait.
    fn settle(
        &self,
        pending: Pending,
        result: Result<(), EtcdError>,
        troubles: &mut Troubles,
    ) -> Option<Duration> {
        let (now, slot) = (Instant::now(), pending.job.slot());
        let before = match &result {
            Ok(()) => troubles.remove(&slot),
            Err(error) => troubles.insert(slot, chain(error)),
        };
        let wait = match result {
            Ok(()) => {
                self.queue().answered(now);
                None
            }
            Err(error @ EtcdError::TooLarge { .. }) => {
                self.queue().answered(now);
                if before != Some(chain(&error)) {
                    self.tell_too_large(&pending.job, &error);
                }
                None
            }
            // Perhaps of this key alone, or until somebody grants it or the password is right again.
            Err(error @ EtcdError::Refused { .. }) => {
                if pending.refused == 0 {
                    tracing::warn!(error = chain(&error), "a report is refused; it is tried again");
                }
                let mut queue = self.queue();
                queue.answered(now);
                queue.put_behind(pending, now);
                Some(AFTER_REFUSAL)
            }
            Err(EtcdError::Unreachable { .. }) => {
                let hangs_alone = self.queue().put_back_unanswered(pending, now);
                (!hangs_alone).then_some(AGAIN)
            }
            // No call is made without it: all wait in their places.
            Err(EtcdError::Credential { .. } | EtcdError::Missing { .. } | EtcdError::Endpoint { .. }) => {
                self.queue().put_back(pending);
                Some(AGAIN)
            }
        };
        let reports = self.reports();
        let queue = self.queue();
        troubles.retain(|slot, _| match slot {
            Slot::Pod(uid) => reports.pods.contains_key(uid) || queue.has(slot),
            Slot::Node | Slot::Configuration | Slot::Retain => true,
        });
        wait
    }

    /// It would be refused again as it is: its next state is tried.
    fn tell_too_large(&self, job: &Job, error: &EtcdError) {
        let error = chain(error);
        tracing::warn!(
            error,
            "a report is larger than etcd takes and is left out until it changes; raise etcd's --max-request-bytes"
        );
        let object = match job {
            Job::Pod(pod) => ObjectRef::pod(&pod.name.namespace, &pod.name.name, &pod.uid),
            Job::Node(_) | Job::Configuration(_) | Job::Gone { .. } | Job::Retain(_) => {
                ObjectRef::node(&self.node)
            }
        };
        let message = format!("{error}; it is left out until it changes, raise etcd's --max-request-bytes");
        self.ring.warning(object, "ReportTooLarge", message);
    }

    async fn carry_out(&self, job: &Job, known: &mut BTreeMap<String, Known>) -> Result<(), EtcdError> {
        match job {
            Job::Node(json) => self.write(&self.keys.node(), Some(json), known, |_| true).await.map(drop),
            Job::Configuration(json) => {
                let key = self.keys.config_status();
                if self.write(&key, json.as_ref(), known, |_| true).await? {
                    self.tell_configuration(json.as_ref());
                }
                Ok(())
            }
            Job::Pod(pod) => {
                // It went while this waited, and what is stale was removed before.
                if !self.reports().pods.contains_key(&pod.uid) {
                    return Ok(());
                }
                let key = self.keys.pod_status(&pod.name.namespace, &pod.name.name);
                // Of two pods of one name the one that came later is told of.
                self.write(&key, Some(&pod.json), known, |before| {
                    before.is_none_or(|before| before.uid == pod.uid || before.seen <= pod.seen)
                })
                .await
                .map(drop)
            }
            Job::Gone { uid, name } => {
                let key = self.keys.pod_status(&name.namespace, &name.name);
                let theirs = |before: Option<&Told>| before.is_some_and(|before| before.uid == *uid);
                self.write(&key, None, known, theirs).await.map(drop)
            }
            Job::Retain(uids) => {
                // A pod that came while this waited may have been written before it: its turn is more urgent.
                let is_here = |uid: &str| uids.contains(uid) || self.reports().pods.contains_key(uid);
                let stale = |before: Option<&Told>| before.is_none_or(|told| !is_here(&told.uid));
                let mut result = Ok(());
                for entry in self.etcd.list(&self.keys.pod_statuses()).await?.entries {
                    let now = Known::of(Some(&entry));
                    if !stale(now.told.as_ref()) {
                        continue;
                    }
                    known.insert(entry.key.clone(), now);
                    match self.write(&entry.key, None, known, stale).await {
                        Ok(_) => {}
                        // Perhaps of this key alone.
                        Err(error @ EtcdError::Refused { .. }) => result = Err(error),
                        Err(error) => return Err(error),
                    }
                }
                result
            }
        }
    }

    /// What stands there now was another thing before, so each change of it is told once, over restarts, too.
    fn tell_configuration(&self, json: Option<&Vec<u8>>) {
        let status = configuration::decoded(json);
        let Some(event) = configuration_event(&self.node, status.as_ref()) else { return };
        self.ring.record(NewEvent {
            warning: event.warning,
            reason: event.reason.to_owned(),
            message: event.message,
            object: ObjectRef::node(&self.node),
        });
    }

    /// Makes `key` what it should be, where `may` says yes to the pod that stands there now. Whether it was another.
    async fn write(
        &self,
        key: &str,
        value: Option<&Vec<u8>>,
        known: &mut BTreeMap<String, Known>,
        may: impl Fn(Option<&Told>) -> bool,
    ) -> Result<bool, EtcdError> {
        // Once more for each other writer that was faster; there should be none.
        for _ in 0..8 {
            let Some(lease) = self.lease.held() else { return Err(self.no_lease()) };
            let before = match known.get(key) {
                Some(before) => before.clone(),
                None => {
                    let entry = self.etcd.get(key).await?;
                    let before = Known::of(entry.as_ref());
                    known.insert(key.to_owned(), before.clone());
                    // A start of this service writes nothing that stands there already.
                    if entry.is_some_and(|entry| Some(&entry.value) == value) {
                        return Ok(false);
                    }
                    before
                }
            };
            if !may(before.told.as_ref()) || (value.is_none() && before.revision == 0) {
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
                            known.insert(key.to_owned(), Known { revision, told: Told::of(value) });
                        }
                        None => drop(known.remove(key)),
                    }
                    return Ok(true);
                }
                Written::Conflict(found) => {
                    known.remove(key);
                    let holder = found.get(1).and_then(Option::as_ref).map_or(0, |entry| entry.lease);
                    if holder != lease {
                        // Another one may have been taken meanwhile.
                        self.lease.lost_if(lease);
                        continue;
                    }
                    tracing::warn!(key, "another writer has changed what this node reports; looking again");
                }
            }
        }
        let message = format!("{key} changes faster than it can be written; who else writes it?");
        Err(EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message })
    }

    fn no_lease(&self) -> EtcdError {
        let message = format!("this agent has lost the lease of the node {}", self.node);
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message }
    }

    /// A lease for events of now.
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
        let seen = Told::of(&pod.pod_json).map_or_else(String::new, |told| told.seen);
        let name = PodFullName::new(&pod.name, &pod.namespace);
        let job = queue::Pod {
            uid: pod.uid.clone(),
            name,
            seen,
            json: pod.pod_json.to_vec(),
            is_static: false,
            ended: pod.ended,
        };
        let mut reports = self.reports();
        reports.pods.insert(pod.uid.clone(), job.clone());
        self.put(Job::Pod(job), pod.turned);
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        let mut reports = self.reports();
        match gone {
            GonePods::One(uid) => {
                if let Some(pod) = reports.pods.remove(&uid) {
                    self.put(Job::Gone { uid, name: pod.name }, false);
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
            let message = "etcd did not answer a moment ago".to_owned();
            return Err(WriteError::Unreachable { what: "events".to_owned(), message });
        }
        let failed = |error: EtcdError| {
            // The rings of the other services need not wait for it, too.
            self.reachable.store(!error.is_transient(), Ordering::Relaxed);
            in_words("events", &error)
        };
        let lease = self.event_lease().await.map_err(failed)?;
        for some in events.chunks(EVENTS_AT_ONCE) {
            let operations: Vec<_> = some.iter().map(|event| self.event(service, event, lease)).collect();
            let expected = [(self.keys.lease(), Expect::Lease(held))];
            match self.etcd.write(&expected, &operations).await {
                Ok(Written::Done(_)) => {}
                Ok(Written::Conflict(_)) => {
                    self.lease.lost_if(held);
                    return Err(failed(self.no_lease()));
                }
                Err(error) => {
                    // The lease of events may have ended while etcd was away for long.
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

/// What a failed call means for a report.
pub(crate) fn in_words(what: &str, error: &EtcdError) -> WriteError {
    let (what, message) = (what.to_owned(), chain(error));
    if error.is_transient() {
        WriteError::Unreachable { what, message }
    } else {
        WriteError::Refused { what, message }
    }
}

/// Which pod stands in a status.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    uid: String,
    /// When the agent first saw it, RFC 3339.
    seen: String,
}

impl Told {
    /// `None` for what is no pod.
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
