//! The source `api`: the pods that an API server has bound to this node, and the Node itself (pod-lifecycle.md §2.4).
//!
//! The last good state is in the checkpoint. While the server is down, pods of this boot keep running over a restart of the
//! service; after a reboot those start that the offline policy allows. Only a response of the server settles the source, so that
//! an outage never removes pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, CredentialRefusal, Kubernetes as Settings, Offline, ServiceName};
use keelson_kube_api::{
    Change, Follower, KubeApi, Limiter, Object, Range, Resource, RestMetrics, WatchEvent, user_agent,
};
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::ManifestError;
use keelson_pod_config_core::api_pod::api_pod;
use keelson_pod_config_core::files::{SourceError, SourceSet};
use keelson_pod_config_core::merge::SourcePod;
use keelson_pod_config_core::offline::{WaitingPod, contact_age, wait_reason};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, Metrics, Progress};
use serde_json::Value;
use tokio::sync::watch;

use crate::boot_state::BootState;
use crate::checkpoint::{API_KEY_PREFIX, Checkpoint};
use crate::control_plane::{
    ControlPlane, ControlPlaneError, ControlPlanePods, NodeState, ObjectRequest, standalone,
};
use crate::kubernetes_objects::ObjectCache;
use crate::last_contact::{LastContact, now_unix_seconds, waiting_suffix};
use crate::reviews::Reviewer;

/// The condition for the connection to pods.
const CONDITION: &str = "control-plane";
/// The condition for the connection to the Node.
const NODE_CONDITION: &str = "control-plane-node";
/// Annotation of the Node: for how many seconds polled objects count as fresh.
const TTL_ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";
/// Message while this node has no certificate.
const NO_CERTIFICATE: &str = "this node has no client certificate yet; node-status is requesting one (`keelson get services` shows the progress)";
/// Message while this node has no kubeconfig with a certificate.
const NO_KUBECONFIG: &str =
    "this node has no usable kubeconfig yet; `keelson get services` shows the error at init";

/// State restored from the checkpoint.
#[derive(Debug, Default)]
pub struct RestoredState {
    /// Objects as JSON, by checkpoint key; no Secrets.
    pub values: BTreeMap<String, Vec<u8>>,
    /// The last contact with the server, in seconds since 1970; `None` if unknown.
    pub last_contact: Option<i64>,
}

/// The control plane `api`.
pub struct KubernetesControlPlane {
    config: Arc<Config>,
    api: KubeApi,
    progress: Progress,
    checkpoint: Checkpoint,
    objects: ObjectCache,
    /// Taken when the pods and the Node are first requested.
    restored: Mutex<RestoredState>,
    /// Whether the Node has been read: pods wait for it, because their admission needs it.
    node_read: watch::Sender<bool>,
}

fn pod_key(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", pods_prefix())
}

/// Prefix of the checkpoint keys of pods.
fn pods_prefix() -> String {
    format!("{API_KEY_PREFIX}pods/")
}

fn node_key() -> String {
    format!("{API_KEY_PREFIX}node")
}

/// A client for the configured server.
pub fn connection(ctx: &Context, settings: &Settings) -> KubeApi {
    let kubeconfig = settings.handed_over(&ctx.config.paths.credentials(ServiceName::PodConfig));
    let metrics = RestMetrics::registered(&ctx.metrics);
    let user_agent = user_agent(ServiceName::PodConfig, &ctx.config.own_processes.kubelet_version);
    let bootstraps = settings.certificates.bootstrap_kubeconfig.is_some();
    let pending_message = if bootstraps { NO_CERTIFICATE } else { NO_KUBECONFIG };
    let refusals = CredentialRefusal::file(&ctx.config.paths, ServiceName::PodConfig);
    let api =
        KubeApi::awaiting(kubeconfig, &user_agent, metrics, pending_message).reporting_refusals(refusals);
    api.limited(Limiter::new(settings.qps, settings.burst))
}

impl KubernetesControlPlane {
    /// For the node of `ctx`; `restored` is from the checkpoint.
    pub fn new(ctx: &Context, api: KubeApi, checkpoint: Checkpoint, mut restored: RestoredState) -> Self {
        let objects = ObjectCache::new(ctx, api.clone(), checkpoint.clone(), &mut restored.values);
        Self {
            config: Arc::clone(&ctx.config),
            api,
            progress: ctx.progress.clone(),
            checkpoint,
            objects,
            restored: Mutex::new(restored),
            node_read: watch::Sender::new(false),
        }
    }

    /// Creates a reviewer of tokens and access. Unauthenticated clients can trigger reviews, so it has a rate limit of its own,
    /// apart from that of pods, Secrets and tokens.
    pub fn reviewer(&self, settings: &Settings, metrics: &Metrics) -> Reviewer {
        Reviewer::new(self.api.clone().limited(Limiter::new(settings.qps, settings.burst)), metrics)
    }

    fn restored(&self) -> MutexGuard<'_, RestoredState> {
        self.restored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ControlPlane for KubernetesControlPlane {
    fn name(&self) -> &'static str {
        API
    }

    fn source(&self) -> Option<&'static str> {
        Some(API)
    }

    fn pods(&self) -> BoxStream<'static, ControlPlanePods> {
        let (values, last_contact): (BTreeMap<_, _>, _) = {
            let mut restored = self.restored();
            let all = std::mem::take(&mut restored.values);
            let (values, others) = all.into_iter().partition(|(key, _)| key.starts_with(&pods_prefix()));
            restored.values = others;
            (values, restored.last_contact)
        };
        let run_dir = self.config.paths.socket_dir(ServiceName::PodConfig);
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.config.node_name));
        let source = PodSource {
            follower: Follower::new(self.api.clone(), range),
            progress: self.progress.clone(),
            checkpoint: self.checkpoint.clone(),
            restored: values,
            last_contact: LastContact::new(API, last_contact, &self.config.offline, self.checkpoint.clone()),
            pods: BTreeMap::new(),
            errors: BTreeMap::new(),
            settled: false,
            started: false,
            boot: BootState::new(&run_dir, API, &self.config.resources.identity_files.boot_id),
            offline: self.config.offline.clone(),
            waiting: Vec::new(),
            node_read: self.node_read.subscribe(),
        };
        stream::unfold(source, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        let restored = self.restored().values.remove(&node_key());
        let source = NodeSource {
            follower: Follower::new(
                self.api.clone(),
                Range::one(Resource::NODE, None, &self.config.node_name),
            ),
            config: Arc::clone(&self.config),
            progress: self.progress.clone(),
            checkpoint: self.checkpoint.clone(),
            restored,
            started: false,
            read: self.node_read.clone(),
            objects: self.objects.clone(),
        };
        stream::unfold(source, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    fn get_object(&self, wanted: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>> {
        Box::pin(self.objects.get(wanted))
    }

    fn subscribe_objects(&self) -> Option<watch::Receiver<u64>> {
        Some(self.objects.changes())
    }

    fn retain_objects(&self, wanted: &ObjectRequest, watched: bool) {
        self.objects.retain(wanted, watched);
    }
}

/// The stream of the Node.
struct NodeSource {
    follower: Follower,
    config: Arc<Config>,
    progress: Progress,
    checkpoint: Checkpoint,
    restored: Option<Vec<u8>>,
    started: bool,
    read: watch::Sender<bool>,
    objects: ObjectCache,
}

impl NodeSource {
    async fn next(&mut self) -> NodeState {
        if !std::mem::replace(&mut self.started, true) {
            return match self.restored.take() {
                Some(json) => NodeState { json, registered: true },
                None => standalone_node_state(Arc::clone(&self.config)).await,
            };
        }
        loop {
            let object = match self.follower.next().await {
                WatchEvent::Listed(objects) => {
                    self.record_contact();
                    self.read.send_replace(true);
                    objects.into_iter().next()
                }
                WatchEvent::Changed(Change::Put(object)) => Some(object),
                WatchEvent::Changed(Change::Deleted(_)) => None,
                WatchEvent::Contact => {
                    self.record_contact();
                    continue;
                }
                WatchEvent::Lost(error) => {
                    self.progress.condition(NODE_CONDITION, Err(chain(&error)));
                    continue;
                }
            };
            return match object {
                Some(object) => self.apply_registered(object),
                None => {
                    self.checkpoint.remove(&node_key());
                    standalone_node_state(Arc::clone(&self.config)).await
                }
            };
        }
    }

    fn record_contact(&self) {
        self.progress.condition(NODE_CONDITION, Ok(()));
    }

    fn apply_registered(&self, Object(mut node): Object) -> NodeState {
        if let Some(map) = node.as_object_mut() {
            // Items of a list lack apiVersion and kind.
            map.insert("apiVersion".to_owned(), "v1".into());
            map.insert("kind".to_owned(), "Node".into());
            if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.remove("managedFields");
            }
        }
        let ttl =
            node["metadata"]["annotations"][TTL_ANNOTATION].as_str().and_then(|seconds| seconds.parse().ok());
        self.objects.set_ttl_seconds(ttl);
        let json = node.to_string().into_bytes();
        self.checkpoint.put(&node_key(), json.clone());
        NodeState { json, registered: true }
    }
}

/// The standalone Node, while the server has none.
async fn standalone_node_state(config: Arc<Config>) -> NodeState {
    match standalone(&config).next().await {
        Some(node) => node,
        None => std::future::pending().await,
    }
}

/// The stream of this node's pods.
struct PodSource {
    follower: Follower,
    progress: Progress,
    checkpoint: Checkpoint,
    /// Pods restored from the checkpoint.
    restored: BTreeMap<String, Vec<u8>>,
    last_contact: LastContact,
    /// By checkpoint key.
    pods: BTreeMap<String, SourcePod>,
    /// Errors of pods whose current version cannot be run, by checkpoint key.
    errors: BTreeMap<String, ManifestError>,
    settled: bool,
    started: bool,
    boot: BootState,
    offline: Offline,
    /// Pods that do not start before the server answers.
    waiting: Vec<WaitingPod>,
    node_read: watch::Receiver<bool>,
}

impl PodSource {
    /// Waits for the next complete set.
    async fn next(&mut self) -> ControlPlanePods {
        if !std::mem::replace(&mut self.started, true) && self.restore_all() {
            return self.set();
        }
        if !self.settled {
            // The sender lives as long as the control plane.
            let _ = self.node_read.wait_for(|read| *read).await;
        }
        loop {
            // Cancel-safe: a follower reads again what it did not return.
            let event = tokio::select! {
                event = self.follower.next() => event,
                () = self.last_contact.write_due() => {
                    self.last_contact.write_if_due();
                    continue;
                }
            };
            match event {
                WatchEvent::Listed(objects) => {
                    self.record_contact();
                    self.apply_list(objects);
                    return self.set();
                }
                WatchEvent::Changed(change) => {
                    self.record_contact();
                    match change {
                        Change::Put(object) => self.apply_object(object),
                        Change::Deleted(object) => self.forget(&pod_key(object.namespace(), object.name())),
                    }
                    return self.set();
                }
                WatchEvent::Contact => self.record_contact(),
                WatchEvent::Lost(error) => {
                    self.last_contact.record_loss();
                    let text = format!(
                        "{}; the last known state stays in effect{}",
                        chain(&error),
                        waiting_suffix(self.waiting.len())
                    );
                    self.progress.condition(CONDITION, Err(text));
                }
            }
        }
    }

    fn set(&self) -> ControlPlanePods {
        let errors = self.errors.iter().map(|(key, error)| SourceError {
            origin: key.trim_start_matches(API_KEY_PREFIX).to_owned(),
            error: error.clone(),
            kept_pods: self.pods.get(key).map(SourcePod::full_name).into_iter().collect(),
        });
        let set = SourceSet {
            pods: self.pods.values().cloned().collect(),
            errors: errors.collect(),
            waiting: self.waiting.clone(),
            ..SourceSet::default()
        };
        ControlPlanePods { set, settled: self.settled }
    }

    fn record_contact(&mut self) {
        self.progress.condition(CONDITION, Ok(()));
        self.last_contact.record_contact();
    }

    /// Applies a complete list.
    fn apply_list(&mut self, objects: Vec<Object>) {
        let listed: BTreeSet<String> =
            objects.iter().map(|object| pod_key(object.namespace(), object.name())).collect();
        let known = self.pods.keys().chain(self.errors.keys());
        let removed: Vec<String> = known.filter(|key| !listed.contains(*key)).cloned().collect();
        removed.iter().for_each(|key| self.forget(key));
        for object in objects {
            self.apply_object(object);
        }
        self.waiting.clear();
        let prefix = pods_prefix();
        for key in self.checkpoint.paths() {
            if key.starts_with(&prefix) && !listed.contains(&key) {
                self.checkpoint.remove(&key);
            }
        }
        if !std::mem::replace(&mut self.settled, true) {
            self.boot.record_contact();
        }
    }

    fn apply_object(&mut self, object: Object) {
        let key = pod_key(object.namespace(), object.name());
        let uid = object.uid().to_owned();
        match api_pod(object.0) {
            Ok(pod) => {
                self.errors.remove(&key);
                self.checkpoint.put(&key, pod.json.to_vec());
                self.pods.insert(key, pod);
            }
            Err(error) => {
                // A new pod of the same name does not keep the old version.
                if self.pods.get(&key).is_some_and(|pod| pod.uid != uid) {
                    self.pods.remove(&key);
                    self.checkpoint.remove(&key);
                }
                self.errors.insert(key, error);
            }
        }
    }

    fn forget(&mut self, key: &str) {
        self.pods.remove(key);
        self.errors.remove(key);
        self.checkpoint.remove(key);
    }

    /// Restores the pods that may start now. Returns whether there are any, running or waiting.
    fn restore_all(&mut self) -> bool {
        let same_boot = self.boot.has_contact();
        for (key, bytes) in std::mem::take(&mut self.restored) {
            let object = serde_json::from_slice::<Value>(&bytes).map_err(|error| error.to_string());
            match object.and_then(|object| api_pod(object).map_err(|error| error.to_string())) {
                Ok(pod) if same_boot || !self.hold_back(&pod) => drop(self.pods.insert(key, pod)),
                Ok(_) => {}
                Err(error) => tracing::warn!(key, error, "the pod in the checkpoint is no longer valid"),
            }
        }
        if !self.pods.is_empty() {
            tracing::info!(
                event = "offline_state_restored",
                same_boot,
                "the last known pods of the API server stay in effect until it answers"
            );
        }
        !self.pods.is_empty() || !self.waiting.is_empty()
    }

    /// Whether a pod must wait for the server after a reboot; records it as waiting.
    fn hold_back(&mut self, pod: &SourcePod) -> bool {
        let age = contact_age(
            self.last_contact.before_restart(),
            self.boot.first_offline_check(now_unix_seconds()),
        );
        let Some(reason) = wait_reason(&pod.json, &self.offline, age) else { return false };
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        tracing::info!(event = "pod_waits_offline", namespace, name, %reason, "after the reboot the pod waits for the API server");
        self.waiting.push(WaitingPod { namespace, name, origin: pod.origin.clone(), reason });
        true
    }
}
