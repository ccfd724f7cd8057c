//! The Kubernetes API as the control plane that node-status writes to (node-and-api.md §9, §10; pod-lifecycle.md §14.5).
//!
//! Lease and Node, everything else, and events have a connection each, so that none waits for another. Node and pods wait in a
//! queue with one slot each; the loop `kubernetes-writer` empties it, the Node first and then changes of phase or readiness. A
//! write that the server refuses, or does not answer while it answers others, is retried after the others; while the server
//! answers nobody, all jobs keep their places.

mod certificates;
mod csi_drivers;
mod events;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake;
mod lease;
mod metrics;
mod mirror_pods;
mod mirrors;
mod node_recovery;
mod report_cache;
mod write_loop;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{CredentialRefusal, Kubernetes as Settings, ServiceName};
use keelson_kube_api::{KubeApi, KubeError, Limiter, Object, Patch, Resource, RestMetrics};
use keelson_kube_model::PodFullName;
use keelson_kube_model::pod_ext::API;
use keelson_node_status_core::drift::differs;
use keelson_node_status_core::patch::{
    OwnStatus, add_host_addresses, delete_now, may_be_deleted, new_node, node_patch, pod_status_patch,
};
use keelson_node_status_core::{NodeReport, PodReport, PodUpdate};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Context;
use keelson_service_kit::status::chain;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Span;

use crate::kubernetes::events::Events;
use crate::kubernetes::lease::Lease;
use crate::kubernetes::metrics::WriterMetrics;
use crate::kubernetes::report_cache::{LastReport, ReportCache, ServerState};
use crate::kubernetes::write_loop::MAX_IN_PROGRESS;
use crate::queue::{Job, PodJob, Queue};
use crate::writer::{ControlPlaneWriter, GonePods, ReportState, WriteError};

/// The longest `Retry-After` that is respected.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The error of calls before this node has a certificate.
const NO_CERTIFICATE: &str = "this node has no client certificate yet, and requests one";
/// The same before it has a usable kubeconfig.
const NO_KUBECONFIG: &str = "there is no usable kubeconfig; `keelson get services` shows the reason at init";

/// The `User-Agent` of this service.
fn user_agent(ctx: &Context) -> String {
    keelson_kube_api::user_agent(ServiceName::NodeStatus, &ctx.config.own_processes.kubelet_version)
}

/// A new connection to the server of the settings.
fn connection(ctx: &Context, settings: &Settings, requests: RestMetrics) -> KubeApi {
    let kubeconfig = settings.handed_over(&ctx.config.paths.credentials(ServiceName::NodeStatus));
    let bootstraps = settings.certificates.bootstrap_kubeconfig.is_some();
    let awaited = if bootstraps { NO_CERTIFICATE } else { NO_KUBECONFIG };
    let refusals = CredentialRefusal::file(&ctx.config.paths, ServiceName::NodeStatus);
    KubeApi::awaiting(kubeconfig, &user_agent(ctx), requests, awaited).reporting_refusals(refusals)
}

/// Writes to an API server.
pub(crate) struct KubernetesWriter {
    ctx: Context,
    main: KubeApi,
    /// Limits the calls of `main`.
    limiter: Limiter,
    /// How long the server has asked to wait (`Retry-After`), in total.
    throttled: Mutex<Duration>,
    /// The connection for the Node and the lease alone.
    heartbeat: KubeApi,
    /// Timeout of a write of the Node, and of a try to renew the lease: the time between two statuses, and no longer than the
    /// lease (node-and-api.md §5).
    heartbeat_timeout: Duration,
    events: Events,
    lease: Lease,
    node_name: String,
    /// A cloud controller manages the addresses.
    external_cloud: bool,
    /// The `spec` of the Node that is created if there is none; `None`: no Node is created.
    registration: Option<Value>,
    requests: RestMetrics,
    metrics: WriterMetrics,
    queue: Mutex<Queue>,
    cache: Mutex<ReportCache>,
    wake: Notify,
}

impl KubernetesWriter {
    /// A writer for the node of `ctx`, with its loops.
    pub(crate) fn start(ctx: &Context, settings: &Settings) -> Arc<Self> {
        let own = Self::new(ctx, settings);
        ctx.spawn("kubernetes-writer", Arc::clone(&own).run(ctx.clone()));
        ctx.spawn("mirrors", mirrors::run(Arc::clone(&own), ctx.clone()));
        certificates::start(ctx, settings, &own);
        own
    }

    /// The same, without starting the loops.
    fn new(ctx: &Context, settings: &Settings) -> Arc<Self> {
        let requests = RestMetrics::registered(&ctx.metrics);
        let connection = || connection(ctx, settings, requests.clone());
        let (main, heartbeat, events) = (connection(), connection(), connection());
        let node_name = ctx.config.node_name.clone();
        let update = Duration::from_millis(ctx.config.node_status.status_update_ms);
        let within = update.min(Duration::from_secs(settings.lease_seconds.into()));
        let limiter = Limiter::new(settings.qps, settings.burst);
        Arc::new(Self {
            ctx: ctx.clone(),
            main: main.limited(limiter.clone()),
            limiter,
            throttled: Mutex::default(),
            lease: Lease::new(ctx, heartbeat.clone(), settings.lease_seconds, within),
            heartbeat_timeout: within,
            heartbeat,
            events: Events::new(ctx, events),
            node_name,
            external_cloud: ctx.config.node_status.external_cloud,
            registration: settings.register_node.then(|| registration(settings)),
            requests,
            metrics: WriterMetrics::register(ctx),
            queue: Mutex::default(),
            cache: Mutex::default(),
            wake: Notify::new(),
        })
    }

    /// `status.addresses` of the server's Node; null before there is one.
    fn addresses(&self) -> Value {
        self.cache().addresses.clone()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cache(&self) -> MutexGuard<'_, ReportCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: Job, urgent: bool) {
        self.queue().put(job, urgent, Span::current(), Instant::now());
        self.wake.notify_one();
    }

    /// Whether pod-config sees a pod of the API with this UID on this node.
    fn is_on_server(&self, uid: &str) -> bool {
        self.cache().on_server.contains_key(uid)
    }

    fn is_registered(&self) -> bool {
        self.cache().node_uid.is_some()
    }

    /// The next job, the Node first.
    #[cfg(test)]
    fn next_job(&self) -> Option<crate::queue::Pending> {
        let pending = self.queue().begin_at(Instant::now())?;
        self.queue().finish(&pending.job.slot());
        Some(pending)
    }

    /// Records that the server has answered, be it with a refusal.
    fn record_answer<T>(&self, result: &Result<T, KubeError>) {
        if result.as_ref().err().is_none_or(|error| error.code().is_some()) {
            self.queue().record_answer(Instant::now());
        }
    }

    /// Stores that the server has a Node of this UID for us.
    fn set_registered(&self, uid: &str, addresses: Value) {
        let is_new = {
            let mut cache = self.cache();
            let is_new = cache.node_uid.as_deref() != Some(uid);
            if is_new && cache.node_uid.is_some() {
                // The mirror pods of the former Node are deleted with it, and reports that were refused for its sake were
                // dropped.
                cache.report_all_again();
            }
            cache.node_uid = Some(uid.to_owned());
            is_new
        };
        self.update_host(|cache| cache.addresses = addresses);
        self.lease.set_owner(uid);
        if is_new {
            self.queue().retry_all_now();
        }
    }

    /// Changes the cache; if that changes the addresses of the host, all pods are written again.
    fn update_host(&self, change: impl FnOnce(&mut ReportCache)) {
        let mut cache = self.cache();
        let before = cache.host_addresses(self.external_cloud).cloned();
        change(&mut cache);
        if cache.host_addresses(self.external_cloud) != before.as_ref() {
            cache.report_all_again();
        }
    }

    /// Writes a job; `status` has the fields of its pod's status, if they are decoded already.
    async fn carry_out(&self, job: &Job, status: Option<Value>) -> Result<(), KubeError> {
        match job {
            Job::Node(json) => {
                let work = self.write_own_node(json);
                with_timeout(&self.heartbeat, "the Node", self.heartbeat_timeout, work).await
            }
            // Only etcd has a node configuration.
            Job::Configuration(_) => Ok(()),
            Job::Pod(PodJob { report, .. }) => self.write_one_pod(report, status).await,
            Job::RemovePod { uid, name } => self.remove_mirror(name, Some(uid)).await,
            Job::Retain(uids) => self.remove_stale_mirrors(uids).await,
        }
    }

    /// Registers the Node, or updates the server's Node.
    async fn write_own_node(&self, json: &[u8]) -> Result<(), KubeError> {
        let ours: Value = serde_json::from_slice(json).unwrap_or_default();
        self.metrics.start_registration();
        let live = self.heartbeat.get(Resource::NODE, None, &self.node_name).await?;
        let found = live.is_some();
        let live = match (live, &self.registration) {
            (Some(live), _) => live,
            (None, Some(spec)) => {
                match self.heartbeat.create(Resource::NODE, None, &new_node(&ours, spec)).await {
                    Ok(made) => {
                        tracing::info!(node = self.node_name, uid = made.uid(), "the node is registered");
                        made
                    }
                    Err(error) if error.is_conflict() => return Box::pin(self.write_own_node(json)).await,
                    Err(error) => return Err(error),
                }
            }
            (None, None) => {
                let message = "it does not exist, and registerNode is false".to_owned();
                return Err(self.heartbeat.unreachable(&format!("nodes {}", self.node_name), message));
            }
        };
        let live = match node_patch(&live.0, &ours, self.external_cloud) {
            Some(patch) => {
                let patch = (Patch::Strategic, &patch);
                let now = self
                    .heartbeat
                    .patch(Resource::NODE, None, &self.node_name, Some("status"), patch)
                    .await?;
                node_recovery::record_events(&self.ctx, &live.0, &ours).await;
                now
            }
            None => live,
        };
        self.metrics.finish_registration(!found, &live.0);
        self.set_registered(live.uid(), live.0["status"]["addresses"].clone());
        self.write_csi_drivers(live).await
    }

    async fn write_one_pod(&self, report: &Arc<PodReport>, status: Option<Value>) -> Result<(), KubeError> {
        let ours = self.own_status(report, status);
        let Some(live) = self.server_pod(report).await? else { return Ok(()) };
        let Some(live) = self.patch_pod(report, live, &ours).await? else { return Ok(()) };
        if !report.is_static() && may_be_deleted(&live.0, report.termination.finished) {
            return self.delete(&live).await;
        }
        if !differs(&live.0, report, &ours) {
            let version = live.0["metadata"]["resourceVersion"].as_str().unwrap_or_default();
            self.cache().record_written(report, version);
        }
        Ok(())
    }

    /// The status to write, with the addresses of the node.
    fn own_status(&self, report: &PodReport, status: Option<Value>) -> OwnStatus {
        let fields = status.unwrap_or_else(|| report.status.fields());
        let mut ours = OwnStatus { host_network: report.pod.host_network, fields };
        if let Some(addresses) = self.cache().host_addresses(self.external_cloud) {
            add_host_addresses(&mut ours, addresses);
        }
        ours
    }

    /// The server's pod, or the mirror pod of a static pod, which is created if needed; `None`: it is gone, or another pod of the
    /// name has come.
    async fn server_pod(&self, report: &PodReport) -> Result<Option<Object>, KubeError> {
        if report.is_static() {
            return self.ensure_mirror(report).await;
        }
        let PodFullName { name, namespace } = &report.name;
        match self.main.get(Resource::POD, Some(namespace), name).await {
            Ok(live) => Ok(live.filter(|live| live.uid() == report.uid)),
            // If pod-config still sees it, the authorizer has not seen it yet.
            Err(error) if error.is_unrelated() && !self.is_on_server(&report.uid) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Patches the status of the server's pod `live`, if it differs. Returns the pod after that; `None`: it was deleted between
    /// the two calls, or replaced by another pod of the name, perhaps on another node.
    async fn patch_pod(
        &self,
        report: &PodReport,
        live: Object,
        ours: &OwnStatus,
    ) -> Result<Option<Object>, KubeError> {
        let Some(patch) = pod_status_patch(&live.0, ours, report.termination.stopped) else {
            return Ok(Some(live));
        };
        let PodFullName { name, namespace } = &report.name;
        let patch = (Patch::Strategic, &patch);
        match self.main.patch(Resource::POD, Some(namespace), name, Some("status"), patch).await {
            Err(error) if error.is_not_found() || error.is_conflict() || error.is_of_another_node() => {
                Ok(None)
            }
            patched => patched.map(Some),
        }
    }

    /// Deletes this pod of the server at once, and no other of its name.
    async fn delete(&self, live: &Object) -> Result<(), KubeError> {
        let options = delete_now(live.uid());
        match self.main.delete(Resource::POD, Some(live.namespace()), live.name(), &options).await {
            Ok(_) => {
                self.cache().on_server.remove(live.uid());
                Ok(())
            }
            // Another pod of the name.
            Err(error) if error.is_conflict() || error.is_of_another_node() => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[tonic::async_trait]
impl ControlPlaneWriter for KubernetesWriter {
    fn control_plane(&self) -> &'static str {
        "kubernetes"
    }

    async fn renew_lease(&self) -> Result<(), WriteError> {
        let renewed = self.lease.renew().await;
        self.record_answer(&renewed);
        renewed.map_err(|error| write_error("the node's lease", &error))
    }

    async fn write_node(&self, report: &NodeReport) -> Result<(), WriteError> {
        let value = report.to_json().map_err(|error| WriteError::Refused {
            what: "the Node".to_owned(),
            message: error.to_string(),
        })?;
        let (json, now) = (value.to_string().into_bytes(), ready_status(&value));
        self.lease.set_node_info(&value["status"]["nodeInfo"]);
        let mut before = None;
        self.update_host(|cache| {
            before = cache.node.replace(Arc::new(value));
            cache.csi_drivers = Arc::clone(&report.csi_drivers);
        });
        let urgent = before.and_then(|before| ready_status(&before)) != now;
        self.put(Job::Node(json), urgent);
        Ok(())
    }

    /// A mirror pod is made from its static pod.
    fn writes_pods_of(&self, source: &str) -> bool {
        source != API
    }

    async fn write_pod(&self, update: PodUpdate) -> Result<(), WriteError> {
        let urgent = update.urgent;
        let last = LastReport { report: Arc::clone(&update.report), server: ServerState::Unknown };
        self.cache().pods.insert(update.report.uid.clone(), last);
        // A report that has to wait is kept as text only.
        let waits = self.queue().len() >= MAX_IN_PROGRESS;
        let job = if waits { PodJob::from(update.report) } else { PodJob::from(update) };
        self.put(Job::Pod(job), urgent);
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        match gone {
            GonePods::One(uid) => {
                let last = self.cache().pods.remove(&uid);
                // An API pod is gone from the server, or its last report says that it may be deleted.
                if let Some(last) = last.filter(|last| last.report.is_static()) {
                    let name = last.report.name.clone();
                    self.put(Job::RemovePod { uid, name: name.clone() }, false);
                    self.requeue_static_pods(&name);
                }
            }
            GonePods::AllBut(uids) => {
                {
                    let mut cache = self.cache();
                    cache.pods.retain(|uid, _| uids.contains(uid));
                    cache.pods_complete = true;
                }
                self.put(Job::Retain(uids), false);
            }
        }
    }

    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError> {
        self.events.write(service, events).await.map_err(|error| write_error("events", &error))
    }

    fn state(&self) -> ReportState {
        let queue = self.queue();
        let oldest = queue.oldest().map_or(0, |since| since.elapsed().as_millis());
        let throttled = *self.throttled.lock().unwrap_or_else(PoisonError::into_inner);
        ReportState {
            queued: u32::try_from(queue.len()).unwrap_or(u32::MAX),
            oldest_age_ms: u64::try_from(oldest).unwrap_or(u64::MAX),
            throttled_seconds: (self.events.throttled() + self.limiter.waited() + throttled).as_secs_f64(),
        }
    }
}

/// `status` of the condition Ready of a Node.
fn ready_status(node: &Value) -> Option<Value> {
    let mut conditions = node["status"]["conditions"].as_array()?.iter();
    conditions.find(|condition| condition["type"] == "Ready").map(|ready| ready["status"].clone())
}

/// How long the server has asked to wait.
fn retry_after(error: &KubeError) -> Duration {
    Duration::from_secs(error.retry_after().into()).min(MAX_RETRY_AFTER)
}

/// The `spec` of a Node that is created here.
fn registration(settings: &Settings) -> Value {
    let mut spec = json!({});
    if !settings.taints.is_empty() {
        spec["taints"] = json!(settings.taints);
    }
    if let Some(id) = &settings.provider_id {
        spec["providerID"] = id.clone().into();
    }
    spec
}

/// Gives up a call that hangs, and its connection: the next try uses a new one.
async fn with_timeout<T>(
    api: &KubeApi,
    what: &str,
    within: Duration,
    work: impl Future<Output = Result<T, KubeError>>,
) -> Result<T, KubeError> {
    match tokio::time::timeout(within, work).await {
        Ok(done) => done,
        Err(_) => {
            api.give_up_connection();
            Err(api.unreachable(what, format!("no answer within {} s", within.as_secs())))
        }
    }
}

/// The write error for a failed call.
fn write_error(what: &str, error: &KubeError) -> WriteError {
    let (what, message) = (what.to_owned(), chain(error));
    match error.code() {
        None | Some(429) => WriteError::Unreachable { what, message },
        Some(_) => WriteError::Refused { what, message },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod node_authorizer_tests;
#[cfg(test)]
mod tests;
