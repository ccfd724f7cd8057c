//! etcd as the control plane that node-status writes to (architecture §6).
//!
//! Node and pods wait in a queue with one slot each, so that a slow or absent etcd costs bounded memory and the latest state
//! wins; the loop `etcd-writer` empties it, changes of phase or readiness first. Every write requires the revision that it
//! replaces and this agent's lease: an agent whose node another one has taken over writes nothing any more.
//!
//! A write that etcd refuses is retried after the others; only a report larger than etcd accepts is left out. With a new lease,
//! and after etcd was restored, all reports are queued again, and written where etcd has another value.

mod configuration;
mod events;
mod identity;
mod keys;
mod lease;
mod write_loop;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_config::{Etcd as Settings, ServiceName};
use keelson_etcd::{Etcd, EtcdError, NodeKeys};
use keelson_node_status_core::{NodeReport, PodReport, PodUpdate};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, EventRing};
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Span;

use crate::etcd::events::EventLease;
use crate::etcd::identity::identity;
use crate::etcd::lease::Lease;
use crate::queue::{Job, Queue};
use crate::writer::{ControlPlaneWriter, GonePods, ReportState, WriteError};

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
    event_lease: EventLease,
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
    pods: BTreeMap<String, Arc<PodReport>>,
    /// All pods have been reported: any other pod status in etcd is stale.
    is_complete: bool,
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
            event_lease: EventLease::default(),
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
        let pods = reports.pods.values().map(Job::again);
        for job in others.into_iter().chain(node).chain(configuration).chain(pods) {
            self.put(job, false);
        }
    }

    fn lease_lost(&self) -> EtcdError {
        let message = format!("this agent has lost the lease of the node {}", self.node);
        EtcdError::Unreachable { endpoints: self.etcd.endpoints(), message }
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

    async fn write_node(&self, report: &NodeReport) -> Result<(), WriteError> {
        let json = serde_json::to_vec(&*report.node).map_err(|error| WriteError::Refused {
            what: "the Node".to_owned(),
            message: error.to_string(),
        })?;
        let mut reports = self.reports();
        reports.node = Some(json.clone());
        self.put(Job::Node(json), false);
        Ok(())
    }

    fn writes_pods_of(&self, _: &str) -> bool {
        true
    }

    async fn write_pod(&self, update: PodUpdate) -> Result<(), WriteError> {
        let job = Job::again(&update.report);
        let mut reports = self.reports();
        reports.pods.insert(update.report.uid.clone(), update.report);
        self.put(job, update.urgent);
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        let mut reports = self.reports();
        match gone {
            GonePods::One(uid) => {
                if let Some(report) = reports.pods.remove(&uid) {
                    self.put(Job::RemovePod { uid, name: report.name.clone() }, false);
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
        self.write_all_events(service, events).await
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
