//! The Kubernetes API as the control plane that node-status writes to (node-and-api.md §9, §10; pod-lifecycle.md §14.5).
//!
//! Lease and Node, everything else, and events have a connection each, so that none waits for another. Node and pods are put
//! into a queue with one slot each; the loop `kubernetes-writer` empties it, the Node first and then what has turned. What the
//! server refuses, or does not answer while it answers others, lets those go first and is tried again; where it answers nobody,
//! all wait in their places.

mod certificates;
mod events;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod fake;
mod lease;
mod measured;
mod mirrors;
mod returned;
mod writing;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{CredentialRefusal, Kubernetes as Settings, ServiceName};
use keelson_kube_api::{KubeApi, KubeError, Limiter, Object, Patch, Resource, RestMetrics};
use keelson_kube_model::pod_ext::API;
use keelson_kube_model::{Node, PodFullName};
use keelson_node_status_core::drift::reported;
use keelson_node_status_core::patch::{
    add_host_addresses, delete_now, may_be_deleted, new_node, node_patch, pod_status_patch,
};
use keelson_proto::keelson::events::v1::Event;
use keelson_service_kit::Context;
use keelson_service_kit::status::chain;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Span;

use crate::kubernetes::events::Events;
use crate::kubernetes::lease::Lease;
use crate::kubernetes::measured::Measured;
use crate::queue::{self, Job, Queue};
use crate::writer::{ControlPlaneWriter, GonePods, PodReport, ReportState, WriteError};

/// The longest that the server is left alone because it has asked for it.
const MOST_ASKED: Duration = Duration::from_secs(60);

/// What is waited for before this node has a certificate.
const AWAITED: &str = "this node has no client certificate yet, and asks for one";
/// The same before it has a kubeconfig that does.
const AWAITED_KUBECONFIG: &str =
    "there is no kubeconfig that does; `keelson get services` says at init what is wrong";

/// How this service names itself to the server.
fn user_agent(ctx: &Context) -> String {
    keelson_kube_api::user_agent(ServiceName::NodeStatus, &ctx.config.own_processes.kubelet_version)
}

/// A connection of its own to the server that the settings name.
fn connection(ctx: &Context, settings: &Settings, requests: RestMetrics) -> KubeApi {
    let kubeconfig = settings.handed_over(&ctx.config.paths.credentials(ServiceName::NodeStatus));
    let bootstraps = settings.certificates.bootstrap_kubeconfig.is_some();
    let awaited = if bootstraps { AWAITED } else { AWAITED_KUBECONFIG };
    let refusals = CredentialRefusal::file(&ctx.config.paths, ServiceName::NodeStatus);
    KubeApi::awaiting(kubeconfig, &user_agent(ctx), requests, awaited).reporting_refusals(refusals)
}

/// Writes to an API server.
pub(crate) struct KubernetesWriter {
    ctx: Context,
    main: KubeApi,
    /// Of the calls of `main`.
    limiter: Limiter,
    /// How long the server has asked to be left alone.
    asked_to_wait: Mutex<Duration>,
    /// The Node and the lease alone.
    heartbeat: KubeApi,
    /// How long a write of the Node, or a try to renew the lease, may take: as long as between two statuses, and no longer than
    /// the lease (node-and-api.md §5).
    heartbeat_ends_within: Duration,
    events: Events,
    lease: Lease,
    node_name: String,
    /// A controller of a cloud sees to the addresses.
    of_cloud: bool,
    /// The `spec` of the Node that is made where there is none; none: no Node is made.
    registration: Option<Value>,
    requests: RestMetrics,
    measured: Measured,
    queue: Mutex<Queue>,
    known: Mutex<Known>,
    wake: Notify,
}

/// What is remembered of what was told.
#[derive(Default)]
struct Known {
    /// The pods, by UID.
    pods: BTreeMap<String, Told>,
    /// `pods` has been complete once: a pod that is not in it is not here.
    all_pods: bool,
    /// The Node as it was told last.
    node: Option<Arc<Value>>,
    /// The UID of the server's Node.
    node_uid: Option<String>,
    /// `status.addresses` of the server's Node, which may have some of a cloud's.
    addresses: Value,
    /// The server's Node is not what it was told.
    node_drifts: bool,
    /// The names of the server's pods on this node by UID, mirrors included, as pod-config has shown them.
    on_server: BTreeMap<String, PodFullName>,
    /// When the server has last taken a report.
    last_write: Option<Instant>,
}

impl Known {
    /// The Node that has the addresses that pods show as their host's: where a cloud sees to them, as the server has them.
    fn host(&self, of_cloud: bool) -> Option<Value> {
        let node = self.node.as_deref()?;
        let has_one = |list: &Value| list.as_array().is_some_and(|list| !list.is_empty());
        let addresses =
            if of_cloud && has_one(&self.addresses) { &self.addresses } else { &node["status"]["addresses"] };
        Some(json!({"status": {"addresses": addresses}}))
    }
}

struct Told {
    /// The last report, of a pod of the API without what is not needed to tell it again.
    report: queue::Pod,
    /// The server has something else by now.
    drifts: bool,
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

    /// The same without its loops.
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
            asked_to_wait: Mutex::default(),
            lease: Lease::new(ctx, heartbeat.clone(), settings.lease_seconds, within),
            heartbeat_ends_within: within,
            heartbeat,
            events: Events::new(ctx, events),
            node_name,
            of_cloud: ctx.config.node_status.external_cloud,
            registration: settings.register_node.then(|| registration(settings)),
            requests,
            measured: Measured::register(ctx),
            queue: Mutex::default(),
            known: Mutex::default(),
            wake: Notify::new(),
        })
    }

    /// `status.addresses` of the server's Node; null before there is one.
    fn addresses(&self) -> Value {
        self.known().addresses.clone()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: Job, urgent: bool) {
        self.queue().put(job, urgent, Span::current(), Instant::now());
        self.wake.notify_one();
    }

    /// Whether pod-config sees a pod of the API with this UID on this node.
    fn is_on_server(&self, uid: &str) -> bool {
        self.known().on_server.contains_key(uid)
    }

    fn is_registered(&self) -> bool {
        self.known().node_uid.is_some()
    }

    /// The job that is next: before all others the Node.
    #[cfg(test)]
    fn next_job(&self) -> Option<queue::Pending> {
        let pending = self.queue().begin_at(Instant::now())?;
        self.queue().is_done(&pending.job.slot());
        Some(pending)
    }

    /// Remembers that the server has answered, be it by a refusal.
    fn hear<T>(&self, result: &Result<T, KubeError>) {
        if result.as_ref().err().is_none_or(|error| error.code().is_some()) {
            self.queue().answered(Instant::now());
        }
    }

    /// The server has a Node of this UID for us.
    fn registered(&self, uid: &str, addresses: Value) {
        let is_new = {
            let mut known = self.known();
            let is_new = known.node_uid.as_deref() != Some(uid);
            if is_new && known.node_uid.is_some() {
                // Mirrors of the former Node go with it, and reports that were refused for its sake were dropped.
                known.pods.values_mut().for_each(|told| told.drifts = true);
            }
            known.node_uid = Some(uid.to_owned());
            is_new
        };
        self.change_host(|known| known.addresses = addresses);
        self.lease.belongs_to(uid);
        if is_new {
            self.queue().put_off_no_more();
        }
    }

    /// Changes what is known; where the addresses of the host are other ones afterwards, all pods are told again.
    fn change_host(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known();
        let before = known.host(self.of_cloud);
        change(&mut known);
        if known.host(self.of_cloud) != before {
            known.pods.values_mut().for_each(|told| told.drifts = true);
        }
    }

    async fn carry_out(&self, job: &Job) -> Result<(), KubeError> {
        match job {
            Job::Node(json) => {
                let work = self.write_own_node(json);
                in_time(&self.heartbeat, "the Node", self.heartbeat_ends_within, work).await
            }
            // Comes from etcd alone.
            Job::Configuration(_) => Ok(()),
            Job::Pod(pod) => self.write_one_pod(pod).await,
            Job::Gone { uid, name } => self.remove_mirror(name, Some(uid)).await,
            Job::Retain(uids) => self.remove_stale_mirrors(uids).await,
        }
    }

    /// Registers the Node, or makes the server's what this one is.
    async fn write_own_node(&self, json: &[u8]) -> Result<(), KubeError> {
        let ours: Value = serde_json::from_slice(json).unwrap_or_default();
        self.measured.registers();
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
                let message = "there is none, and registerNode is false".to_owned();
                return Err(self.heartbeat.unreachable(&format!("nodes {}", self.node_name), message));
            }
        };
        let live = match node_patch(&live.0, &ours, self.of_cloud) {
            Some(patch) => {
                let patch = (Patch::Strategic, &patch);
                let now = self
                    .heartbeat
                    .patch(Resource::NODE, None, &self.node_name, Some("status"), patch)
                    .await?;
                returned::tell(&self.ctx, &live.0, &ours).await;
                now
            }
            None => live,
        };
        self.measured.registered(!found, &live.0);
        self.registered(live.uid(), live.0["status"]["addresses"].clone());
        Ok(())
    }

    async fn write_one_pod(&self, pod: &queue::Pod) -> Result<(), KubeError> {
        let mut ours: Value = serde_json::from_slice(&pod.json).unwrap_or_default();
        let host = self.known().host(self.of_cloud);
        if let Some(host) = host {
            add_host_addresses(&mut ours, &host);
        }
        let PodFullName { name, namespace } = &pod.name;
        let live = if pod.is_static {
            self.mirror(pod, &ours).await?
        } else {
            match self.main.get(Resource::POD, Some(namespace), name).await {
                Ok(live) => live.filter(|live| live.uid() == pod.uid),
                // Unless pod-config still sees it: then the authorizer has not seen it yet.
                Err(error) if error.is_unrelated() && !self.is_on_server(&pod.uid) => None,
                Err(error) => return Err(error),
            }
        };
        // It is gone, or another one of the name has come.
        let Some(mut live) = live else { return Ok(()) };
        if let Some(patch) = pod_status_patch(&live.0, &ours, pod.ended.stopped) {
            let patch = (Patch::Strategic, &patch);
            live = match self.main.patch(Resource::POD, Some(namespace), name, Some("status"), patch).await {
                Ok(live) => live,
                // Deleted between the two, or replaced by another one of the name, be it on another node.
                Err(error) if error.is_not_found() || error.is_conflict() || error.is_of_another_node() => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
        }
        if !pod.is_static && may_be_deleted(&live.0, pod.ended.finished) {
            self.delete(&live).await?;
        }
        Ok(())
    }

    /// Deletes a pod of the server at once, this one and no other of its name.
    async fn delete(&self, live: &Object) -> Result<(), KubeError> {
        let options = delete_now(live.uid());
        match self.main.delete(Resource::POD, Some(live.namespace()), live.name(), &options).await {
            Ok(_) => {
                self.known().on_server.remove(live.uid());
                Ok(())
            }
            // Another one of the name.
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
        self.hear(&renewed);
        renewed.map_err(|error| in_words("the node's lease", &error))
    }

    async fn write_node(&self, node: &Node) -> Result<(), WriteError> {
        let told = serde_json::to_value(node).map_err(|error| WriteError::Refused {
            what: "the Node".to_owned(),
            message: error.to_string(),
        })?;
        let (json, now) = (told.to_string().into_bytes(), ready_status(&told));
        self.lease.is_of_machine(&told["status"]["nodeInfo"]);
        let mut before = None;
        self.change_host(|known| before = known.node.replace(Arc::new(told)));
        let turned = before.and_then(|before| ready_status(&before)) != now;
        self.put(Job::Node(json), turned);
        Ok(())
    }

    async fn write_pod(&self, pod: &PodReport) -> Result<(), WriteError> {
        let is_static = pod.source != API;
        let name = PodFullName::new(&pod.name, &pod.namespace);
        let report = queue::Pod {
            uid: pod.uid.clone(),
            name,
            seen: String::new(),
            json: if is_static { pod.pod_json.to_vec() } else { reported(&pod.pod_json) },
            is_static,
            ended: pod.ended,
        };
        let told = Told { report: report.clone(), drifts: false };
        self.known().pods.insert(pod.uid.clone(), told);
        self.put(Job::Pod(report), pod.turned);
        Ok(())
    }

    async fn drop_pods(&self, gone: GonePods) {
        match gone {
            GonePods::One(uid) => {
                let told = self.known().pods.remove(&uid);
                // The server's own pod is gone there, or its last report says that it may be.
                if let Some(told) = told.filter(|told| told.report.is_static) {
                    let name = told.report.name;
                    self.put(Job::Gone { uid, name: name.clone() }, false);
                    self.tell_next_of(&name);
                }
            }
            GonePods::AllBut(uids) => {
                {
                    let mut known = self.known();
                    known.pods.retain(|uid, _| uids.contains(uid));
                    known.all_pods = true;
                }
                self.put(Job::Retain(uids), false);
            }
        }
    }

    async fn write_events(&self, service: &str, events: &[Event]) -> Result<(), WriteError> {
        self.events.write(service, events).await.map_err(|error| in_words("events", &error))
    }

    fn state(&self) -> ReportState {
        let queue = self.queue();
        let oldest = queue.oldest().map_or(0, |since| since.elapsed().as_millis());
        let asked = *self.asked_to_wait.lock().unwrap_or_else(PoisonError::into_inner);
        ReportState {
            queued: u32::try_from(queue.len()).unwrap_or(u32::MAX),
            oldest_age_ms: u64::try_from(oldest).unwrap_or(u64::MAX),
            throttled_seconds: (self.events.throttled() + self.limiter.waited() + asked).as_secs_f64(),
        }
    }
}

/// `status` of the condition Ready of a Node.
fn ready_status(node: &Value) -> Option<Value> {
    let mut conditions = node["status"]["conditions"].as_array()?.iter();
    conditions.find(|condition| condition["type"] == "Ready").map(|ready| ready["status"].clone())
}

/// How long the server has asked to be left alone.
fn asked_for(error: &KubeError) -> Duration {
    Duration::from_secs(error.retry_after().into()).min(MOST_ASKED)
}

/// The `spec` of a Node that is made here.
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

/// Gives up what hangs, and the connection with it: the next try has another one.
async fn in_time<T>(
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

/// What a failed call means for a report.
fn in_words(what: &str, error: &KubeError) -> WriteError {
    let (what, message) = (what.to_owned(), chain(error));
    match error.code() {
        None | Some(429) => WriteError::Unreachable { what, message },
        Some(_) => WriteError::Refused { what, message },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod authorized_tests;
#[cfg(test)]
mod tests;
