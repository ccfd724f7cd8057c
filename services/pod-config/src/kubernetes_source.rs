//! The control plane `api`: the pods that an API server has bound to this node (pod-lifecycle.md §2.4), its Node, and the objects
//! to which its pods refer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use keelson_config::{Config, CredentialRefusal, Kubernetes as Settings, ServiceName};
use keelson_kube_api::{
    Change, Follower, KubeApi, KubeListWatch, Limiter, Object, Range, Resource, RestMetrics, user_agent,
};
use keelson_kube_model::pod_ext::API;
use keelson_pod_config_core::ManifestError;
use keelson_pod_config_core::api_pod::api_pod;
use keelson_pod_config_core::desired_pod::DesiredPod;
use keelson_pod_config_core::files::{SourceError, SourceSet};
use keelson_service_kit::{Context, Metrics, Progress};
use serde_json::Value;
use tokio::sync::watch;

use crate::checkpoint::{API_KEY_PREFIX, Checkpoint};
use crate::control_plane::{ControlPlane, ControlPlaneError, ControlPlanePods, NodeState, ObjectRequest};
use crate::followed_pods::{FollowedPods, OfflineStart, PodStore, RestoredState};
use crate::kubernetes_node::{NODE_KEY, NodeReports, NodeSource};
use crate::kubernetes_objects::ObjectCache;
use crate::reviews::Reviewer;

/// Prefix of the checkpoint keys of pods.
const POD_KEY_PREFIX: &str = "api:pods/";
/// Message while this node has no certificate.
const NO_CERTIFICATE: &str = "this node has no client certificate yet; node-status is requesting one (`keelson get services` shows the progress)";
/// Message while this node has no kubeconfig with a certificate.
const NO_KUBECONFIG: &str =
    "this node has no usable kubeconfig yet; `keelson get services` shows the error at init";

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
    format!("{POD_KEY_PREFIX}{namespace}/{name}")
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
        let (restored, last_contact) = {
            let mut state = self.restored();
            let all = std::mem::take(&mut state.values);
            let (pods, others) = all.into_iter().partition(|(key, _)| key.starts_with(POD_KEY_PREFIX));
            state.values = others;
            (pods, state.last_contact)
        };
        let range = Range::of_fields(Resource::POD, format!("spec.nodeName={}", self.config.node_name));
        let store = ApiPods {
            checkpoint: self.checkpoint.clone(),
            restored,
            pods: BTreeMap::new(),
            errors: BTreeMap::new(),
            node_read: self.node_read.subscribe(),
        };
        FollowedPods::new(
            &self.config,
            self.progress.clone(),
            self.checkpoint.clone(),
            last_contact,
            Follower::new(self.api.clone(), range),
            store,
        )
        .into_stream()
    }

    fn node(&self) -> BoxStream<'static, NodeState> {
        let restored = self.restored().values.remove(NODE_KEY);
        let reports = NodeReports { read: self.node_read.clone(), objects: self.objects.clone() };
        let (config, checkpoint) = (Arc::clone(&self.config), self.checkpoint.clone());
        NodeSource::new(self.api.clone(), config, self.progress.clone(), checkpoint, reports, restored)
            .into_stream()
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

/// The pods of the API server on this node.
struct ApiPods {
    checkpoint: Checkpoint,
    /// Pods restored from the checkpoint.
    restored: BTreeMap<String, Vec<u8>>,
    /// By checkpoint key.
    pods: BTreeMap<String, ApiPod>,
    /// Errors of pods whose current version cannot be run, by checkpoint key.
    errors: BTreeMap<String, ManifestError>,
    node_read: watch::Receiver<bool>,
}

/// A pod, with the version of the object that it was decoded from.
struct ApiPod {
    /// Empty for a restored pod.
    version: String,
    pod: Arc<DesiredPod>,
}

impl ApiPod {
    /// Whether `object` is what the pod was decoded from: an object never changes without a new version.
    fn is_of(&self, object: &Object) -> bool {
        !self.version.is_empty() && self.version == object.version() && self.pod.uid == object.uid()
    }
}

impl PodStore for ApiPods {
    type Watch = KubeListWatch;

    const SOURCE: &'static str = API;
    const CONTROL_PLANE: &'static str = "the API server";

    async fn wait_until_listable(&mut self) {
        // The sender lives as long as the control plane.
        let _ = self.node_read.wait_for(|read| *read).await;
    }

    fn restore(&mut self, start: &mut OfflineStart<'_>) -> bool {
        for (key, bytes) in std::mem::take(&mut self.restored) {
            let object = serde_json::from_slice::<Value>(&bytes).map_err(|error| error.to_string());
            match object.and_then(|object| api_pod(object).map_err(|error| error.to_string())) {
                Ok(pod) => match start.hold_back(&pod) {
                    Some(reason) => {
                        let DesiredPod { namespace, name, .. } = &pod;
                        tracing::info!(event = "pod_waits_offline", namespace, name, %reason, "after the reboot the pod waits for the API server");
                    }
                    None => {
                        let pod = Arc::new(pod);
                        self.pods.insert(key, ApiPod { version: String::new(), pod });
                    }
                },
                Err(error) => tracing::warn!(
                    event = "checkpoint_row_invalid",
                    key,
                    error,
                    "the pod in the checkpoint is not valid: it is missing until the API server answers"
                ),
            }
        }
        !self.pods.is_empty()
    }

    fn apply_list(&mut self, objects: Vec<Object>) {
        let listed: BTreeSet<String> =
            objects.iter().map(|object| pod_key(object.namespace(), object.name())).collect();
        let known = self.pods.keys().chain(self.errors.keys());
        let removed: Vec<String> = known.filter(|key| !listed.contains(*key)).cloned().collect();
        removed.iter().for_each(|key| self.forget(key));
        for object in objects {
            self.apply_object(object);
        }
        self.checkpoint.retain(|key| !key.starts_with(POD_KEY_PREFIX) || listed.contains(key));
    }

    fn apply_changes(&mut self, change: Change) {
        match change {
            Change::Put(object) => self.apply_object(object),
            Change::Deleted(object) => self.forget(&pod_key(object.namespace(), object.name())),
        }
    }

    fn set(&mut self) -> SourceSet {
        let errors = self.errors.iter().map(|(key, error)| SourceError {
            origin: key.trim_start_matches(API_KEY_PREFIX).to_owned(),
            error: error.clone(),
            kept_pods: self.pods.get(key).map(|known| known.pod.full_name()).into_iter().collect(),
        });
        SourceSet {
            pods: self.pods.values().map(|known| Arc::clone(&known.pod)).collect(),
            errors: errors.collect(),
            ..SourceSet::default()
        }
    }
}

impl ApiPods {
    fn apply_object(&mut self, object: Object) {
        let key = pod_key(object.namespace(), object.name());
        if !self.errors.contains_key(&key) && self.pods.get(&key).is_some_and(|known| known.is_of(&object)) {
            return;
        }
        let (uid, version) = (object.uid().to_owned(), object.version().to_owned());
        match api_pod(object.0) {
            Ok(pod) => {
                self.errors.remove(&key);
                self.checkpoint.put(&key, pod.json.to_vec());
                self.pods.insert(key, ApiPod { version, pod: Arc::new(pod) });
            }
            Err(error) => {
                // A new pod of the same name does not keep the old version.
                if self.pods.get(&key).is_some_and(|known| known.pod.uid != uid) {
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
}

#[cfg(test)]
mod tests {
    use keelson_config::Offline;
    use keelson_testkit::lines_with_event;
    use serde_json::json;

    use super::*;
    use crate::boot_state::BootState;

    fn object(name: &str, version: &str, image: &str) -> Object {
        let metadata = json!({"name": name, "namespace": "d", "uid": name, "resourceVersion": version});
        Object(json!({"metadata": metadata, "spec": {"containers": [{"name": "c", "image": image}]}}))
    }

    /// No pods yet, and these rows of the checkpoint.
    fn store(restored: BTreeMap<String, Vec<u8>>) -> ApiPods {
        ApiPods {
            checkpoint: Checkpoint::default(),
            restored,
            pods: BTreeMap::new(),
            errors: BTreeMap::new(),
            node_read: watch::Sender::new(true).subscribe(),
        }
    }

    fn names(store: &mut ApiPods) -> Vec<String> {
        store.set().pods.iter().map(|pod| pod.name.clone()).collect()
    }

    #[test]
    fn a_checkpoint_row_that_cannot_be_decoded_is_logged_and_costs_only_its_own_pod() {
        let row = |name: &str| object(name, "1", "one").0.to_string().into_bytes();
        let cut_off = row("b")[..40].to_vec();
        let no_uid = json!({"metadata": {"name": "c", "namespace": "d"}}).to_string().into_bytes();
        let mistyped = br#"{"metadata": {"name": "e", "namespace": "d", "uid": "e"}, "spec": 7}"#.to_vec();
        let rows = [
            ("a", row("a")),
            ("b", cut_off),
            ("c", no_uid),
            ("e", mistyped),
            ("f", b"null".to_vec()),
            ("g", b"\xff".to_vec()),
            ("h", Vec::new()),
            ("z", row("z")),
        ];
        let mut store = store(rows.map(|(name, row)| (pod_key("d", name), row)).into());
        let folder = tempfile::tempdir().unwrap();
        let (offline, boot) = (Offline::default(), BootState::new(folder.path(), API, &[]));
        let log = folder.path().join("log");
        let writer = Mutex::new(std::fs::File::create(&log).unwrap());
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        let is_restored = tracing::subscriber::with_default(subscriber, || {
            store.restore(&mut OfflineStart::new(true, &offline, None, &boot))
        });
        assert!(is_restored);
        assert_eq!(names(&mut store), ["a", "z"]);
        let log = std::fs::read_to_string(&log).unwrap();
        let lines = lines_with_event(&log, "checkpoint_row_invalid");
        assert_eq!(lines.len(), 6, "{lines:?}");
        for (name, line) in ["b", "c", "e", "f", "g", "h"].iter().zip(&lines) {
            assert!(
                line.contains(&format!("key=\"{}\"", pod_key("d", name))) && line.contains("error="),
                "{line}"
            );
        }

        // The server has them all in a good version.
        store.apply_list(["a", "b", "c"].map(|name| object(name, "2", "one")).into());
        assert_eq!(names(&mut store), ["a", "b", "c"]);
    }

    #[test]
    fn pods_that_are_listed_again_in_the_same_version_are_not_decoded_again() {
        let mut store = store(BTreeMap::new());
        store.apply_list(vec![object("a", "1", "one"), object("b", "2", "one"), object("c", "", "one")]);
        let before = store.set().pods;
        store.apply_list(vec![object("a", "1", "one"), object("b", "3", "two"), object("c", "", "one")]);
        let after = store.set().pods;
        let reused: Vec<_> = before.iter().zip(&after).map(|(a, b)| Arc::ptr_eq(a, b)).collect();
        assert_eq!(reused, [true, false, false], "an object without a version may have changed");
    }
}
