//! The source `api`: the pods that an API server has bound to this node, and the Node itself (pod-lifecycle.md §2.4).
//!
//! What was good is in the checkpoint: while the server does not answer, pods of this boot go on over a restart of the
//! service, and after a reboot those start that the offline policy lets start. Only what the server says settles the source,
//! so that nothing is ever removed because it is away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use keelson_config::{Config, CredentialRefusal, Kubernetes as Settings, Offline, ServiceName};
use keelson_kube_api::{
    Change, Follower, KubeApi, Limiter, News, Object, Range, Resource, RestMetrics, user_agent,
};
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::ManifestError;
use keelson_pod_config_core::api_pod::api_pod;
use keelson_pod_config_core::files::{Problem, SourceSet};
use keelson_pod_config_core::merge::SourcePod;
use keelson_pod_config_core::offline::{WaitingPod, age, waits_for};
use keelson_service_kit::status::chain;
use keelson_service_kit::{Context, Metrics, Progress};
use serde_json::Value;
use tokio::sync::watch;

use crate::checkpoint::Checkpoint;
use crate::control_plane::{
    ControlPlane, ControlPlaneError, NodeState, ObjectRequest, PlanePods, standalone,
};
use crate::kubernetes_objects::ObjectCache;
use crate::last_word::{LastWord, but, now_unix_seconds};
use crate::reviews::Reviewer;
use crate::this_boot::ThisBoot;

/// What everything of the API is kept under in the checkpoint.
pub const KEPT: &str = "api:";
/// The condition that says whether the pods are heard of.
const CONDITION: &str = "control-plane";
/// The same of the Node.
const NODE_CONDITION: &str = "control-plane-node";
/// For how many seconds the Node's objects count as they were read, where they are not watched.
const TTL: &str = "node.alpha.kubernetes.io/ttl";
/// What is waited for before this node has a certificate.
const AWAITED: &str = "this node has no client certificate yet; node-status asks for one (`keelson get services` shows how that goes)";
/// The same before it has a kubeconfig that does.
const AWAITED_KUBECONFIG: &str =
    "there is no kubeconfig that does; `keelson get services` says at init what is wrong";

/// What an earlier run of the service has left.
#[derive(Debug, Default)]
pub struct Earlier {
    /// Objects as JSON, by what they are kept under; no Secrets.
    pub values: BTreeMap<String, Vec<u8>>,
    /// When the server was last heard, seconds since 1970; `None`: nobody knows.
    pub heard: Option<i64>,
}

/// The Kubernetes API as pod-config reads it.
pub struct KubernetesPlane {
    config: Arc<Config>,
    api: KubeApi,
    progress: Progress,
    checkpoint: Checkpoint,
    objects: ObjectCache,
    /// Until the pods and the Node are asked for.
    earlier: Mutex<Earlier>,
    /// Whether the Node was asked for once: pods come after it, as their admission looks at it.
    node_read: watch::Sender<bool>,
}

fn pod_key(namespace: &str, name: &str) -> String {
    format!("{}{namespace}/{name}", pods_prefix())
}

/// What every pod is kept below.
fn pods_prefix() -> String {
    format!("{KEPT}pods/")
}

fn node_key() -> String {
    format!("{KEPT}node")
}

/// The server that the configuration names.
pub fn connection(ctx: &Context, settings: &Settings) -> KubeApi {
    let kubeconfig = settings.handed_over(&ctx.config.paths.credentials(ServiceName::PodConfig));
    let metrics = RestMetrics::registered(&ctx.metrics);
    let user_agent = user_agent(ServiceName::PodConfig, &ctx.config.own_processes.kubelet_version);
    let bootstraps = settings.certificates.bootstrap_kubeconfig.is_some();
    let awaited = if bootstraps { AWAITED } else { AWAITED_KUBECONFIG };
    let refusals = CredentialRefusal::file(&ctx.config.paths, ServiceName::PodConfig);
    let api = KubeApi::awaiting(kubeconfig, &user_agent, metrics, awaited).reporting_refusals(refusals);
    api.limited(Limiter::new(settings.qps, settings.burst))
}

impl KubernetesPlane {
    /// For the node of `ctx`; `earlier` is what the checkpoint has of earlier runs.
    pub fn new(ctx: &Context, api: KubeApi, checkpoint: Checkpoint, mut earlier: Earlier) -> Self {
        let objects = ObjectCache::new(ctx, api.clone(), checkpoint.clone(), &mut earlier.values);
        Self {
            config: Arc::clone(&ctx.config),
            api,
            progress: ctx.progress.clone(),
            checkpoint,
            objects,
            earlier: Mutex::new(earlier),
            node_read: watch::Sender::new(false),
        }
    }

    /// What asks the server who somebody is and what they may do. Strangers make it ask, so it has a rate of its own, and leaves that
    /// of pods, Secrets and tokens alone.
    pub fn reviewer(&self, settings: &Settings, metrics: &Metrics) -> Reviewer {
        Reviewer::new(self.api.clone().limited(Limiter::new(settings.qps, settings.burst)), metrics)
    }

    fn earlier(&self) -> MutexGuard<'_, Earlier> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ControlPlane for KubernetesPlane {
    fn name(&self) -> &'static str {
        API
    }

    fn source(&self) -> Option<&'static str> {
        Some(API)
    }

    fn pods(&self) -> BoxStream<'static, PlanePods> {
        let (values, heard): (BTreeMap<_, _>, _) = {
            let mut earlier = self.earlier();
            let all = std::mem::take(&mut earlier.values);
            let (values, others) = all.into_iter().partition(|(key, _)| key.starts_with(&pods_prefix()));
            earlier.values = others;
            (values, earlier.heard)
        };
        let run_dir = self.config.paths.socket_dir(ServiceName::PodConfig);
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.config.node_name));
        let source = PodSource {
            follower: Follower::new(self.api.clone(), range),
            progress: self.progress.clone(),
            checkpoint: self.checkpoint.clone(),
            remembered: values,
            last_word: LastWord::new(API, heard, &self.config.offline, self.checkpoint.clone()),
            pods: BTreeMap::new(),
            problems: BTreeMap::new(),
            settled: false,
            begun: false,
            boot: ThisBoot::new(&run_dir, API, &self.config.resources.identity_files.boot_id),
            offline: self.config.offline.clone(),
            waiting: Vec::new(),
            node_read: self.node_read.subscribe(),
        };
        stream::unfold(source, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        let remembered = self.earlier().values.remove(&node_key());
        let source = NodeSource {
            follower: Follower::new(
                self.api.clone(),
                Range::one(Resource::NODE, None, &self.config.node_name),
            ),
            config: Arc::clone(&self.config),
            progress: self.progress.clone(),
            checkpoint: self.checkpoint.clone(),
            remembered,
            begun: false,
            read: self.node_read.clone(),
            objects: self.objects.clone(),
        };
        stream::unfold(source, |mut source| async move { Some((source.next().await, source)) }).boxed()
    }

    fn get_object(&self, wanted: ObjectRequest) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlPlaneError>> {
        Box::pin(self.objects.get(wanted))
    }

    fn objects_change(&self) -> Option<watch::Receiver<u64>> {
        Some(self.objects.changes())
    }

    fn retain_objects(&self, wanted: &ObjectRequest, watched: bool) {
        self.objects.retain(wanted, watched);
    }
}

/// The Node, as it is told.
struct NodeSource {
    follower: Follower,
    config: Arc<Config>,
    progress: Progress,
    checkpoint: Checkpoint,
    remembered: Option<Vec<u8>>,
    begun: bool,
    read: watch::Sender<bool>,
    objects: ObjectCache,
}

impl NodeSource {
    async fn next(&mut self) -> NodeState {
        if !std::mem::replace(&mut self.begun, true) {
            return match self.remembered.take() {
                Some(json) => NodeState { json, registered: true },
                None => unregistered(Arc::clone(&self.config)).await,
            };
        }
        loop {
            let object = match self.follower.next().await {
                News::Listed(objects) => {
                    self.in_touch();
                    self.read.send_replace(true);
                    objects.into_iter().next()
                }
                News::Changed(Change::Put(object)) => Some(object),
                News::Changed(Change::Deleted(_)) => None,
                News::InTouch => {
                    self.in_touch();
                    continue;
                }
                News::Lost(error) => {
                    self.progress.condition(NODE_CONDITION, Err(chain(&error)));
                    continue;
                }
            };
            return match object {
                Some(object) => self.registered(object),
                None => {
                    self.checkpoint.remove(&node_key());
                    unregistered(Arc::clone(&self.config)).await
                }
            };
        }
    }

    fn in_touch(&self) {
        self.progress.condition(NODE_CONDITION, Ok(()));
    }

    fn registered(&self, Object(mut node): Object) -> NodeState {
        if let Some(map) = node.as_object_mut() {
            // Objects of a list do not say what they are.
            map.insert("apiVersion".to_owned(), "v1".into());
            map.insert("kind".to_owned(), "Node".into());
            if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.remove("managedFields");
            }
        }
        let ttl = node["metadata"]["annotations"][TTL].as_str().and_then(|seconds| seconds.parse().ok());
        self.objects.keeps_for(ttl);
        let json = node.to_string().into_bytes();
        self.checkpoint.put(&node_key(), json.clone());
        NodeState { json, registered: true }
    }
}

/// One that is made up here while the server has none.
async fn unregistered(config: Arc<Config>) -> NodeState {
    match standalone(&config).next().await {
        Some(node) => node,
        None => std::future::pending().await,
    }
}

/// The pods of this node.
struct PodSource {
    follower: Follower,
    progress: Progress,
    checkpoint: Checkpoint,
    /// What an earlier run of the service left.
    remembered: BTreeMap<String, Vec<u8>>,
    last_word: LastWord,
    /// By what each is kept under.
    pods: BTreeMap<String, SourcePod>,
    /// Pods whose present version cannot be run.
    problems: BTreeMap<String, ManifestError>,
    settled: bool,
    begun: bool,
    boot: ThisBoot,
    offline: Offline,
    /// What does not start before the server answers.
    waiting: Vec<WaitingPod>,
    node_read: watch::Receiver<bool>,
}

impl PodSource {
    /// The next set.
    async fn next(&mut self) -> PlanePods {
        if !std::mem::replace(&mut self.begun, true) && self.recall_all() {
            return self.set();
        }
        if !self.settled {
            // The sender lives as long as the plane.
            let _ = self.node_read.wait_for(|read| *read).await;
        }
        loop {
            // Cancel-safe: a follower reads again what it could not tell.
            let news = tokio::select! {
                news = self.follower.next() => news,
                () = self.last_word.due() => {
                    self.last_word.write();
                    continue;
                }
            };
            match news {
                News::Listed(objects) => {
                    self.in_touch();
                    self.take_all(objects);
                    return self.set();
                }
                News::Changed(change) => {
                    self.in_touch();
                    match change {
                        Change::Put(object) => self.take(object),
                        Change::Deleted(object) => self.forget(&pod_key(object.namespace(), object.name())),
                    }
                    return self.set();
                }
                News::InTouch => self.in_touch(),
                News::Lost(error) => {
                    self.last_word.is_not_heard();
                    let text =
                        format!("{}; what is known of it goes on{}", chain(&error), but(self.waiting.len()));
                    self.progress.condition(CONDITION, Err(text));
                }
            }
        }
    }

    fn set(&self) -> PlanePods {
        let problems = self.problems.iter().map(|(key, error)| Problem {
            origin: key.trim_start_matches(KEPT).to_owned(),
            error: error.clone(),
            kept: self.pods.get(key).map(SourcePod::full_name).into_iter().collect(),
        });
        let set = SourceSet {
            pods: self.pods.values().cloned().collect(),
            problems: problems.collect(),
            waiting: self.waiting.clone(),
            ..SourceSet::default()
        };
        PlanePods { set, settled: self.settled }
    }

    fn in_touch(&mut self) {
        self.progress.condition(CONDITION, Ok(()));
        self.last_word.is_heard();
    }

    /// Takes everything that there is.
    fn take_all(&mut self, objects: Vec<Object>) {
        let there: BTreeSet<String> =
            objects.iter().map(|object| pod_key(object.namespace(), object.name())).collect();
        let known = self.pods.keys().chain(self.problems.keys());
        let gone: Vec<String> = known.filter(|key| !there.contains(*key)).cloned().collect();
        gone.iter().for_each(|key| self.forget(key));
        for object in objects {
            self.take(object);
        }
        self.waiting.clear();
        let prefix = pods_prefix();
        for key in self.checkpoint.paths() {
            if key.starts_with(&prefix) && !there.contains(&key) {
                self.checkpoint.remove(&key);
            }
        }
        if !std::mem::replace(&mut self.settled, true) {
            self.boot.sees();
        }
    }

    fn take(&mut self, object: Object) {
        let key = pod_key(object.namespace(), object.name());
        let uid = object.uid().to_owned();
        match api_pod(object.0) {
            Ok(pod) => {
                self.problems.remove(&key);
                self.checkpoint.put(&key, pod.json.to_vec());
                self.pods.insert(key, pod);
            }
            Err(error) => {
                // Another pod of the name is not the one before.
                if self.pods.get(&key).is_some_and(|pod| pod.uid != uid) {
                    self.pods.remove(&key);
                    self.checkpoint.remove(&key);
                }
                self.problems.insert(key, error);
            }
        }
    }

    fn forget(&mut self, key: &str) {
        self.pods.remove(key);
        self.problems.remove(key);
        self.checkpoint.remove(key);
    }

    /// Brings back what an earlier run knew, as far as it may start now. Whether that is anything.
    fn recall_all(&mut self) -> bool {
        let same_boot = self.boot.has_seen();
        for (key, bytes) in std::mem::take(&mut self.remembered) {
            let object = serde_json::from_slice::<Value>(&bytes).map_err(|error| error.to_string());
            match object.and_then(|object| api_pod(object).map_err(|error| error.to_string())) {
                Ok(pod) if same_boot || !self.is_held_back(&pod) => drop(self.pods.insert(key, pod)),
                Ok(_) => {}
                Err(error) => tracing::warn!(key, error, "the remembered pod is not valid any more"),
            }
        }
        if !self.pods.is_empty() {
            tracing::info!(same_boot, "what the API server said last goes on until it answers");
        }
        !self.pods.is_empty() || !self.waiting.is_empty()
    }

    /// Whether a pod does not start after a reboot without the server.
    fn is_held_back(&mut self, pod: &SourcePod) -> bool {
        let age = age(self.last_word.of_earlier_runs(), self.boot.first_look(now_unix_seconds()));
        let Some(why) = waits_for(&pod.json, &self.offline, age) else { return false };
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        tracing::info!(namespace, name, %why, "the pod does not start after the reboot before the API server answers");
        self.waiting.push(WaitingPod { namespace, name, origin: pod.origin.clone(), why });
        true
    }
}
