//! The objects to which API pods refer. Each is followed individually while pods use it, because a node may not read others
//! (node-and-api.md §10): by a watch, or by polling, as configured.
//!
//! While the server is down the last known version stays in effect, also over a restart of the service: ConfigMaps from the
//! checkpoint, Secrets from memory.
//!
//! A RuntimeClass that was read once is followed as long as it exists: every sandbox of its pods needs it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{ControlPlane, ObjectsBy, ServiceName};
use keelson_kube_api::{Change, Follower, KubeApi, KubeError, Object, Range, Resource, WatchEvent};
use keelson_kube_model::pod_ext::API;
use keelson_service_kit::Context;
use keelson_service_kit::status::chain;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{API_KEY_PREFIX, Checkpoint};
use crate::control_plane::{ControlPlaneError, ObjectRequest};
use crate::secrets::Secrets;

/// How long an unused object is still followed: its user may be restarting.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Minimum time for which a polled object counts as fresh: the interval between two syncs of a pod in a kubelet.
const MIN_TTL: Duration = Duration::from_secs(60);
/// Delay before a failed read is retried; it doubles with each failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The kind that is followed once it was read.
const RUNTIME_CLASS: &str = "RuntimeClass";

/// The cache of followed objects.
#[derive(Clone)]
pub struct ObjectCache(Arc<Inner>);

struct Inner {
    api: KubeApi,
    checkpoint: Checkpoint,
    shutdown: CancellationToken,
    strategy: ObjectsBy,
    /// How old a polled object may be.
    ttl: Mutex<Duration>,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

struct State {
    followed: BTreeMap<ObjectRequest, Followed>,
    /// Objects restored after a restart.
    restored: BTreeMap<ObjectRequest, Vec<u8>>,
    secrets: Secrets,
}

/// An object that is in use.
struct Followed {
    /// Number of users.
    users: usize,
    state: ObjectState,
    /// Ends its watch or polling.
    end: CancellationToken,
    /// Triggers a read of a polled object.
    refresh: Arc<Notify>,
}

impl Followed {
    /// An object with one user.
    fn new(state: ObjectState, end: CancellationToken) -> Self {
        Self { users: 1, state, end, refresh: Arc::default() }
    }
}

enum ObjectState {
    /// The server has not answered yet.
    Pending,
    /// The server is unreachable or refuses.
    Error(String),
    /// The object, or `None` if it does not exist.
    Cached(Option<Vec<u8>>),
}

fn resource(kind: &str) -> Option<Resource> {
    match kind {
        "Secret" => Some(Resource::SECRET),
        "ConfigMap" => Some(Resource::CONFIG_MAP),
        RUNTIME_CLASS => Some(Resource::RUNTIME_CLASS),
        _ => None,
    }
}

fn checkpoint_key(wanted: &ObjectRequest) -> String {
    let ObjectRequest { kind, namespace, name } = wanted;
    format!("{API_KEY_PREFIX}objects/{kind}/{namespace}/{name}")
}

fn parse_checkpoint_key(key: &str) -> Option<ObjectRequest> {
    let mut parts = key.strip_prefix(API_KEY_PREFIX)?.strip_prefix("objects/")?.split('/').map(str::to_owned);
    let (Some(kind), Some(namespace), Some(name), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    Some(ObjectRequest { kind, namespace, name })
}

impl ObjectCache {
    /// An empty cache. Takes the restored objects out of `rows`.
    pub fn new(
        ctx: &Context,
        api: KubeApi,
        checkpoint: Checkpoint,
        rows: &mut BTreeMap<String, Vec<u8>>,
    ) -> Self {
        let (secrets, stored_secrets) = Secrets::open(&ctx.config.paths.socket_dir(ServiceName::PodConfig));
        let of_secret = |(namespace, name)| ObjectRequest { kind: "Secret".to_owned(), namespace, name };
        let mut restored: BTreeMap<_, _> =
            stored_secrets.into_iter().map(|(name, bytes)| (of_secret(name), bytes)).collect();
        let keys: Vec<(String, ObjectRequest)> =
            rows.keys().filter_map(|key| Some((key.clone(), parse_checkpoint_key(key)?))).collect();
        for (key, wanted) in keys {
            restored.extend(rows.remove(&key).map(|bytes| (wanted, bytes)));
        }
        let state = State { followed: BTreeMap::new(), restored, secrets };
        let strategy = match &ctx.config.control_plane {
            ControlPlane::Kubernetes(settings) => settings.objects_by,
            ControlPlane::None | ControlPlane::Etcd(_) => ObjectsBy::default(),
        };
        Self(Arc::new(Inner {
            api,
            checkpoint,
            shutdown: ctx.shutdown.clone(),
            strategy,
            ttl: Mutex::new(MIN_TTL),
            state: Mutex::new(state),
            changes: watch::Sender::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how long polled objects count as fresh, from the Node's annotation `node.alpha.kubernetes.io/ttl`.
    pub fn set_ttl_seconds(&self, seconds: Option<u64>) {
        let ttl = seconds.map_or(MIN_TTL, |seconds| MIN_TTL.max(Duration::from_secs(seconds)));
        *self.0.ttl.lock().unwrap_or_else(PoisonError::into_inner) = ttl;
    }

    fn ttl(&self) -> Duration {
        *self.0.ttl.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Incremented when [`ObjectCache::get`] may return something else.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// Returns the cached object; one that is not followed is read now.
    ///
    /// # Errors
    /// The server has not answered, and nothing is cached.
    pub async fn get(&self, wanted: ObjectRequest) -> Result<Option<Vec<u8>>, ControlPlaneError> {
        let Some(resource) = resource(&wanted.kind) else { return Ok(None) };
        let unavailable = |cause: String| ControlPlaneError::Unavailable { name: API, cause };
        {
            let state = self.state();
            let cause = match state.followed.get(&wanted).map(|followed| &followed.state) {
                // With this strategy every use reads the object.
                Some(ObjectState::Cached(_))
                    if self.0.strategy == ObjectsBy::Get && wanted.kind != RUNTIME_CLASS =>
                {
                    None
                }
                Some(ObjectState::Cached(object)) => return Ok(object.clone()),
                Some(ObjectState::Pending) => Some("it has not answered yet".to_owned()),
                Some(ObjectState::Error(cause)) => Some(cause.clone()),
                None => None,
            };
            if let Some(cause) = cause {
                return state.restored.get(&wanted).cloned().map(Some).ok_or_else(|| unavailable(cause));
            }
        }
        if let Some(json) = self.restore_runtime_class(&wanted) {
            return Ok(Some(json));
        }
        let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
        match self.0.api.get(resource, namespace, &wanted.name).await {
            Ok(object) => {
                if self.0.strategy == ObjectsBy::Get && wanted.kind != RUNTIME_CLASS {
                    self.update(&wanted, object.clone());
                }
                let json = object.map(|object| encode(&wanted, object));
                if let (Some(json), RUNTIME_CLASS) = (&json, wanted.kind.as_str()) {
                    self.0.checkpoint.put(&checkpoint_key(&wanted), json.clone());
                    self.follow_runtime_class(&wanted, json.clone());
                }
                Ok(json)
            }
            Err(error) => {
                let state = self.state();
                if let Some(ObjectState::Cached(known)) =
                    state.followed.get(&wanted).map(|followed| &followed.state)
                {
                    return Ok(known.clone());
                }
                let before = state.restored.get(&wanted).cloned();
                before.map(Some).ok_or_else(|| unavailable(chain(&error)))
            }
        }
    }

    /// Restores a RuntimeClass from the checkpoint and follows it. Its handler is immutable, so there is no need to wait for the
    /// server.
    fn restore_runtime_class(&self, wanted: &ObjectRequest) -> Option<Vec<u8>> {
        if wanted.kind != RUNTIME_CLASS {
            return None;
        }
        let json = self.state().restored.get(wanted).cloned()?;
        self.follow_runtime_class(wanted, json.clone());
        Some(json)
    }

    /// Follows a known RuntimeClass until it is deleted.
    fn follow_runtime_class(&self, wanted: &ObjectRequest, json: Vec<u8>) {
        let mut state = self.state();
        if let Slot::Vacant(slot) = state.followed.entry(wanted.clone()) {
            let end = self.0.shutdown.child_token();
            slot.insert(Followed::new(ObjectState::Cached(Some(json)), end.clone()));
            tokio::spawn(self.clone().follow(wanted.clone(), Resource::RUNTIME_CLASS, end));
        }
    }

    /// Adds or removes a user of an object.
    pub fn retain(&self, wanted: &ObjectRequest, watched: bool) {
        let Some(resource) = resource(&wanted.kind) else { return };
        let mut state = self.state();
        match (state.followed.entry(wanted.clone()), watched) {
            (Slot::Occupied(mut slot), true) => {
                slot.get_mut().users += 1;
                // A new user must not get an old version.
                slot.get().refresh.notify_one();
            }
            (Slot::Occupied(mut slot), false) => {
                let followed = slot.get_mut();
                followed.users = followed.users.saturating_sub(1);
                if followed.users == 0 {
                    tokio::spawn(self.clone().unfollow_when_idle(wanted.clone(), followed.end.clone()));
                }
            }
            (Slot::Vacant(slot), true) => {
                let end = self.0.shutdown.child_token();
                let refresh =
                    Arc::clone(&slot.insert(Followed::new(ObjectState::Pending, end.clone())).refresh);
                if self.0.strategy == ObjectsBy::Watch || wanted.kind == RUNTIME_CLASS {
                    tokio::spawn(self.clone().follow(wanted.clone(), resource, end));
                } else {
                    tokio::spawn(self.clone().poll(wanted.clone(), resource, end, refresh));
                }
            }
            (Slot::Vacant(_), false) => {}
        }
    }

    /// Stops following an object that has had no users for a while.
    async fn unfollow_when_idle(self, wanted: ObjectRequest, end: CancellationToken) {
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(IDLE_TIMEOUT) => {}
        }
        let mut state = self.state();
        if state.followed.get(&wanted).is_some_and(|followed| followed.users == 0) {
            state.followed.remove(&wanted);
            self.forget(&mut state, &wanted);
            end.cancel();
        }
    }

    async fn follow(self, wanted: ObjectRequest, resource: Resource, end: CancellationToken) {
        let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
        let mut follower = Follower::new(self.0.api.clone(), Range::one(resource, namespace, &wanted.name));
        loop {
            let event = tokio::select! {
                () = end.cancelled() => return,
                event = follower.next() => event,
            };
            match event {
                WatchEvent::Listed(objects) => self.update(&wanted, objects.into_iter().next()),
                WatchEvent::Changed(Change::Put(object)) => self.update(&wanted, Some(object)),
                WatchEvent::Changed(Change::Deleted(_)) => self.update(&wanted, None),
                WatchEvent::Contact => {}
                WatchEvent::Lost(error) => self.record_error(&wanted, &error),
            }
        }
    }

    /// Polls an object: reads it when it is too old, or when `refresh` is notified.
    async fn poll(
        self,
        wanted: ObjectRequest,
        resource: Resource,
        end: CancellationToken,
        refresh: Arc<Notify>,
    ) {
        let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
        let mut retry_delay = RETRY_DELAY;
        loop {
            // Cancel-safe: an incomplete read is dropped.
            let result = tokio::select! {
                () = end.cancelled() => return,
                result = self.0.api.get(resource, namespace, &wanted.name) => result,
            };
            // Jitter, so that objects read together are not always read together.
            let jitter = 0.9 + fastrand::f32() / 5.0;
            let delay = match result {
                Ok(object) => {
                    self.update(&wanted, object);
                    retry_delay = RETRY_DELAY;
                    self.ttl()
                }
                Err(error) => {
                    self.record_error(&wanted, &error);
                    let delay = retry_delay.max(Duration::from_secs(error.retry_after().into()));
                    retry_delay = (retry_delay * 2).min(MIN_TTL);
                    delay
                }
            };
            // Cancel-safe: neither arm holds state.
            tokio::select! {
                () = end.cancelled() => return,
                () = refresh.notified() => {}
                () = tokio::time::sleep(delay.mul_f32(jitter)) => {}
            }
        }
    }

    fn update(&self, wanted: &ObjectRequest, object: Option<Object>) {
        let now = object.map(|object| encode(wanted, object));
        let mut state = self.state();
        if !state.followed.contains_key(wanted) {
            // A late event of a watch that has ended.
            return;
        }
        match &now {
            Some(json) if wanted.kind == "Secret" => {
                state.secrets.put((wanted.namespace.clone(), wanted.name.clone()), json);
            }
            Some(json) => self.0.checkpoint.put(&checkpoint_key(wanted), json.clone()),
            None => self.forget(&mut state, wanted),
        }
        state.restored.remove(wanted);
        if now.is_none() && wanted.kind == RUNTIME_CLASS {
            // The next user reads it again.
            if let Some(followed) = state.followed.remove(wanted) {
                followed.end.cancel();
            }
        }
        let Some(followed) = state.followed.get_mut(wanted) else { return };
        if !matches!(&followed.state, ObjectState::Cached(before) if *before == now) {
            followed.state = ObjectState::Cached(now);
            self.0.changes.send_modify(|count| *count += 1);
        }
    }

    /// Records an error, unless a version is cached.
    fn record_error(&self, wanted: &ObjectRequest, error: &KubeError) {
        let mut state = self.state();
        let Some(followed) = state.followed.get_mut(wanted) else { return };
        if !matches!(followed.state, ObjectState::Cached(_)) {
            let first = matches!(followed.state, ObjectState::Pending);
            followed.state = ObjectState::Error(chain(error));
            if first {
                self.0.changes.send_modify(|count| *count += 1);
            }
        }
    }

    /// Removes the object from what is restored after a restart.
    fn forget(&self, state: &mut State, wanted: &ObjectRequest) {
        state.restored.remove(wanted);
        if wanted.kind == "Secret" {
            state.secrets.remove(&(wanted.namespace.clone(), wanted.name.clone()));
        } else {
            self.0.checkpoint.remove(&checkpoint_key(wanted));
        }
    }
}

/// Encodes an object for callers: with apiVersion and kind, without managedFields.
fn encode(wanted: &ObjectRequest, Object(mut object): Object) -> Vec<u8> {
    if let Some(map) = object.as_object_mut() {
        let version = if wanted.kind == RUNTIME_CLASS { "node.k8s.io/v1" } else { "v1" };
        map.insert("apiVersion".to_owned(), version.into());
        map.insert("kind".to_owned(), wanted.kind.clone().into());
        if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    }
    object.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use keelson_config::Config;
    use serde_json::json;

    use super::*;
    use crate::fake_api::{FakeApi, refusal};

    #[test]
    fn checkpoint_keys_of_objects_round_trip() {
        let wanted =
            ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "a.b".to_owned() };
        assert_eq!(checkpoint_key(&wanted), "api:objects/ConfigMap/d/a.b");
        assert_eq!(parse_checkpoint_key(&checkpoint_key(&wanted)), Some(wanted));
        for other in ["api:pods/d/a", "api:objects/ConfigMap/d", "/keelson/v1/nodes/n/objects/ConfigMap/d/a"]
        {
            assert_eq!(parse_checkpoint_key(other), None, "{other}");
        }
    }

    fn runtime_class() -> ObjectRequest {
        ObjectRequest { kind: RUNTIME_CLASS.to_owned(), namespace: String::new(), name: "kata".to_owned() }
    }

    /// A cache that follows the RuntimeClass of a server; the flag deletes the class at the server.
    async fn cache(folder: &std::path::Path, config: &Config) -> (FakeApi, ObjectCache, Arc<AtomicBool>) {
        let is_deleted = Arc::new(AtomicBool::new(false));
        let deleted = Arc::clone(&is_deleted);
        let server = FakeApi::start(folder, move |request| {
            let object = json!({"metadata": {"name": "kata", "resourceVersion": "5"}, "handler": "kata-qemu"});
            match (request.path.contains("watch=1"), request.path.contains('?')) {
                (true, _) => None,
                (false, true) => {
                    let items = if deleted.load(Ordering::SeqCst) { json!([]) } else { json!([object]) };
                    Some((200, json!({"kind": "RuntimeClassList", "metadata": {"resourceVersion": "5"}, "items": items})))
                }
                (false, false) if deleted.load(Ordering::SeqCst) => Some(refusal(404)),
                (false, false) => Some((200, object)),
            }
        })
        .await;
        let ctx = Context::detached(ServiceName::PodConfig, config.clone());
        let cache = ObjectCache::new(&ctx, server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
        (server, cache, is_deleted)
    }

    fn config(folder: &std::path::Path) -> Config {
        let mut config = Config::default();
        config.paths.run_dir = folder.join("run");
        config
    }

    #[tokio::test]
    async fn a_runtime_class_is_read_once_and_cached_without_the_server_and_over_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let (server, cache, _) = cache(folder.path(), &config).await;
        let first = cache.get(runtime_class()).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&first).contains("kata-qemu"));
        for _ in 0..3 {
            assert_eq!(cache.get(runtime_class()).await.unwrap().as_ref(), Some(&first));
        }
        let reads = server.requests().iter().filter(|request| !request.path.contains('?')).count();
        assert_eq!(reads, 1, "{:?}", server.requests());
        drop(server);
        assert_eq!(cache.get(runtime_class()).await.unwrap().as_ref(), Some(&first));

        assert_eq!(cache.0.checkpoint.paths(), [checkpoint_key(&runtime_class())]);
        let silent = FakeApi::start(folder.path(), |_| None).await;
        let ctx = Context::detached(ServiceName::PodConfig, config);
        let mut restored = [(checkpoint_key(&runtime_class()), first.clone())].into();
        let after = ObjectCache::new(&ctx, silent.api.clone(), Checkpoint::default(), &mut restored);
        for _ in 0..2 {
            assert_eq!(
                after.get(runtime_class()).await.unwrap().as_ref(),
                Some(&first),
                "no call waits for the server"
            );
        }
    }

    fn map() -> ObjectRequest {
        ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "words".to_owned() }
    }

    /// A cache with the given strategy; its server counts the reads and returns the count as the word.
    async fn cache_with_strategy(folder: &std::path::Path, strategy: ObjectsBy) -> (FakeApi, ObjectCache) {
        let server = FakeApi::start(folder, {
            let mut reads = 0;
            move |request| {
                assert!(!request.path.contains("watch=1") && !request.path.contains('?'), "{request:?}");
                reads += 1;
                // The second read fails.
                let object =
                    json!({"metadata": {"name": "words", "namespace": "d"}, "data": {"word": reads}});
                Some(if reads == 2 { refusal(503) } else { (200, object) })
            }
        })
        .await;
        let mut config = config(folder);
        let mut settings = keelson_config::Kubernetes::of("/none".into());
        settings.objects_by = strategy;
        config.control_plane = ControlPlane::Kubernetes(settings);
        let ctx = Context::detached(ServiceName::PodConfig, config);
        let cache = ObjectCache::new(&ctx, server.api.clone(), Checkpoint::default(), &mut BTreeMap::new());
        (server, cache)
    }

    async fn word(cache: &ObjectCache) -> i64 {
        let object: Value = serde_json::from_slice(&cache.get(map()).await.unwrap().unwrap()).unwrap();
        object["data"]["word"].as_i64().unwrap()
    }

    #[tokio::test]
    async fn with_cache_strategy_an_object_is_reread_by_age_or_for_a_new_pod_and_not_watched() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache) = cache_with_strategy(folder.path(), ObjectsBy::Cache).await;
        let mut changes = cache.changes();
        cache.retain(&map(), true);
        changes.changed().await.unwrap();
        for _ in 0..3 {
            assert_eq!(word(&cache).await, 1);
        }
        assert_eq!(server.requests().len(), 1, "users get the cached version");
        // A new user: the first read fails and the cached version is returned meanwhile.
        *cache.0.ttl.lock().unwrap() = Duration::from_millis(50);
        cache.retain(&map(), true);
        assert_eq!(word(&cache).await, 1);
        changes.changed().await.unwrap();
        assert!(word(&cache).await >= 3);
        // Then it is read again because of its age alone.
        changes.changed().await.unwrap();
        assert!(word(&cache).await >= 4);
    }

    #[tokio::test]
    async fn with_get_strategy_an_object_is_read_on_each_use_and_cached_for_outages() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache) = cache_with_strategy(folder.path(), ObjectsBy::Get).await;
        let mut changes = cache.changes();
        cache.retain(&map(), true);
        changes.changed().await.unwrap();
        assert_eq!(word(&cache).await, 1, "the second read is refused");
        assert_eq!(word(&cache).await, 3);
        changes.changed().await.unwrap();
        assert_eq!(word(&cache).await, 4);
        drop(server);
        assert_eq!(word(&cache).await, 4);
    }

    #[test]
    fn cached_objects_live_a_minute_or_as_long_as_the_nodes_ttl_annotation_says() {
        let folder = tempfile::tempdir().unwrap();
        let ctx = Context::detached(ServiceName::PodConfig, config(folder.path()));
        let api = KubeApi::new("/none".into(), "test");
        let cache = ObjectCache::new(&ctx, api, Checkpoint::default(), &mut BTreeMap::new());
        for (annotation, seconds) in [(Some(300), 300), (Some(0), 60), (None, 60)] {
            cache.set_ttl_seconds(annotation);
            assert_eq!(cache.ttl(), Duration::from_secs(seconds), "{annotation:?}");
        }
    }

    #[tokio::test]
    async fn a_deleted_runtime_class_is_forgotten_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache, deleted) = cache(folder.path(), &config(folder.path())).await;
        let known = cache.get(runtime_class()).await.unwrap().unwrap();
        deleted.store(true, Ordering::SeqCst);
        // The list of its follower may be from before the deletion.
        cache.update(&runtime_class(), None);
        assert!(cache.state().followed.is_empty());
        assert_eq!(cache.0.checkpoint.paths(), [""; 0]);
        assert_eq!(cache.get(runtime_class()).await.unwrap(), None);
        deleted.store(false, Ordering::SeqCst);
        assert_eq!(cache.get(runtime_class()).await.unwrap(), Some(known));
        drop(server);
    }
}
