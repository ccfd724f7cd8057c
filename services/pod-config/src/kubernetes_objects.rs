//! The objects that pods of the API refer to: each is followed by itself while somebody asks for it, as a node may read no
//! others (node-and-api.md §10): by a watch, or read again and again where the configuration says so.
//!
//! The last known version goes on while the server is away, over a restart of the service too: ConfigMaps by the checkpoint,
//! Secrets in memory alone.
//!
//! A RuntimeClass that was read once is followed from then on, as long as it is there: every sandbox of its pods asks for it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{ControlPlane, ObjectsBy, ServiceName};
use keelson_kube_api::{Change, Follower, KubeApi, KubeError, News, Object, Range, Resource};
use keelson_kube_model::pod_ext::API;
use keelson_service_kit::Context;
use keelson_service_kit::status::chain;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Checkpoint;
use crate::control_plane::{ControlPlaneError, ObjectRequest};
use crate::kubernetes_source::KEPT;
use crate::secrets::Secrets;

/// For so long an object is followed that nobody asks for: who asks may be starting again.
const LINGER: Duration = Duration::from_secs(300);

/// How long an object that is not watched counts as it was read, at least: as long as between two looks of a kubelet at a pod.
const AGE: Duration = Duration::from_secs(60);
/// What a node reads again where the server has not answered: after this pause first, and then after twice as long each time.
const AGAIN: Duration = Duration::from_secs(1);

/// The kind that is followed once it was read.
const RUNTIME_CLASS: &str = "RuntimeClass";

/// The objects that are followed.
#[derive(Clone)]
pub struct ObjectCache(Arc<Inner>);

struct Inner {
    api: KubeApi,
    checkpoint: Checkpoint,
    shutdown: CancellationToken,
    by: ObjectsBy,
    /// How old an object may be that is not watched.
    age: Mutex<Duration>,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

struct State {
    followed: BTreeMap<ObjectRequest, Followed>,
    /// What an earlier run of the service knew.
    remembered: BTreeMap<ObjectRequest, Vec<u8>>,
    secrets: Secrets,
}

/// An object that somebody asks for.
struct Followed {
    /// How many do.
    users: usize,
    known: Known,
    /// Ends its watch.
    end: CancellationToken,
    /// Has it read again where it is not watched.
    again: Arc<Notify>,
}

impl Followed {
    /// One that somebody asks for.
    fn new(known: Known, end: CancellationToken) -> Self {
        Self { users: 1, known, end, again: Arc::default() }
    }
}

enum Known {
    /// The server has not answered.
    NotYet,
    /// The server does not answer, or refuses.
    Failed(String),
    /// As it is; none: there is none.
    As(Option<Vec<u8>>),
}

fn resource(kind: &str) -> Option<Resource> {
    match kind {
        "Secret" => Some(Resource::SECRET),
        "ConfigMap" => Some(Resource::CONFIG_MAP),
        RUNTIME_CLASS => Some(Resource::RUNTIME_CLASS),
        _ => None,
    }
}

fn key(wanted: &ObjectRequest) -> String {
    let ObjectRequest { kind, namespace, name } = wanted;
    format!("{KEPT}objects/{kind}/{namespace}/{name}")
}

fn named(key: &str) -> Option<ObjectRequest> {
    let mut parts = key.strip_prefix(KEPT)?.strip_prefix("objects/")?.split('/').map(str::to_owned);
    let (Some(kind), Some(namespace), Some(name), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    Some(ObjectRequest { kind, namespace, name })
}

impl ObjectCache {
    /// Nothing is followed yet. What an earlier run knew is taken out of `earlier`.
    pub fn new(
        ctx: &Context,
        api: KubeApi,
        checkpoint: Checkpoint,
        earlier: &mut BTreeMap<String, Vec<u8>>,
    ) -> Self {
        let (secrets, kept) = Secrets::open(&ctx.config.paths.socket_dir(ServiceName::PodConfig));
        let of_secret = |(namespace, name)| ObjectRequest { kind: "Secret".to_owned(), namespace, name };
        let mut remembered: BTreeMap<_, _> =
            kept.into_iter().map(|(name, bytes)| (of_secret(name), bytes)).collect();
        let keys: Vec<(String, ObjectRequest)> =
            earlier.keys().filter_map(|key| Some((key.clone(), named(key)?))).collect();
        for (key, wanted) in keys {
            remembered.extend(earlier.remove(&key).map(|bytes| (wanted, bytes)));
        }
        let state = State { followed: BTreeMap::new(), remembered, secrets };
        let by = match &ctx.config.control_plane {
            ControlPlane::Kubernetes(settings) => settings.objects_by,
            ControlPlane::None | ControlPlane::Etcd(_) => ObjectsBy::default(),
        };
        Self(Arc::new(Inner {
            api,
            checkpoint,
            shutdown: ctx.shutdown.clone(),
            by,
            age: Mutex::new(AGE),
            state: Mutex::new(state),
            changes: watch::Sender::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Node says for how many seconds an object counts as it was read (`node.alpha.kubernetes.io/ttl`).
    pub fn keeps_for(&self, seconds: Option<u64>) {
        let age = seconds.map_or(AGE, |seconds| AGE.max(Duration::from_secs(seconds)));
        *self.0.age.lock().unwrap_or_else(PoisonError::into_inner) = age;
    }

    fn age(&self) -> Duration {
        *self.0.age.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts how often what [`ObjectCache::get`] answers may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// An object as it is known; one that nobody follows is read now.
    ///
    /// # Errors
    /// The server has not told, and nothing is known from before.
    pub async fn get(&self, wanted: ObjectRequest) -> Result<Option<Vec<u8>>, ControlPlaneError> {
        let Some(resource) = resource(&wanted.kind) else { return Ok(None) };
        let unavailable = |cause: String| ControlPlaneError::Unavailable { name: API, cause };
        {
            let state = self.state();
            let cause = match state.followed.get(&wanted).map(|followed| &followed.known) {
                // Whoever needs it has it read.
                Some(Known::As(_)) if self.0.by == ObjectsBy::Get && wanted.kind != RUNTIME_CLASS => None,
                Some(Known::As(object)) => return Ok(object.clone()),
                Some(Known::NotYet) => Some("it has not been asked yet".to_owned()),
                Some(Known::Failed(cause)) => Some(cause.clone()),
                None => None,
            };
            if let Some(cause) = cause {
                return state.remembered.get(&wanted).cloned().map(Some).ok_or_else(|| unavailable(cause));
            }
        }
        if let Some(json) = self.recall_class(&wanted) {
            return Ok(Some(json));
        }
        let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
        match self.0.api.get(resource, namespace, &wanted.name).await {
            Ok(object) => {
                if self.0.by == ObjectsBy::Get && wanted.kind != RUNTIME_CLASS {
                    self.take(&wanted, object.clone());
                }
                let json = object.map(|object| bytes(&wanted, object));
                if let (Some(json), RUNTIME_CLASS) = (&json, wanted.kind.as_str()) {
                    self.0.checkpoint.put(&key(&wanted), json.clone());
                    self.follow_class(&wanted, json.clone());
                }
                Ok(json)
            }
            Err(error) => {
                let state = self.state();
                if let Some(Known::As(known)) = state.followed.get(&wanted).map(|followed| &followed.known) {
                    return Ok(known.clone());
                }
                let before = state.remembered.get(&wanted).cloned();
                before.map(Some).ok_or_else(|| unavailable(chain(&error)))
            }
        }
    }

    /// What an earlier run knew of a RuntimeClass, which is followed from here on. Its handler never changes, so nobody waits for
    /// the server.
    fn recall_class(&self, wanted: &ObjectRequest) -> Option<Vec<u8>> {
        if wanted.kind != RUNTIME_CLASS {
            return None;
        }
        let json = self.state().remembered.get(wanted).cloned()?;
        self.follow_class(wanted, json.clone());
        Some(json)
    }

    /// Follows a RuntimeClass, which is known, until it is gone.
    fn follow_class(&self, wanted: &ObjectRequest, json: Vec<u8>) {
        let mut state = self.state();
        if let Slot::Vacant(slot) = state.followed.entry(wanted.clone()) {
            let end = self.0.shutdown.child_token();
            slot.insert(Followed::new(Known::As(Some(json)), end.clone()));
            tokio::spawn(self.clone().follow(wanted.clone(), Resource::RUNTIME_CLASS, end));
        }
    }

    /// One more asks for an object, or one less.
    pub fn retain(&self, wanted: &ObjectRequest, watched: bool) {
        let Some(resource) = resource(&wanted.kind) else { return };
        let mut state = self.state();
        match (state.followed.entry(wanted.clone()), watched) {
            (Slot::Occupied(mut slot), true) => {
                slot.get_mut().users += 1;
                // What somebody new needs is not to be as old as it may be.
                slot.get().again.notify_one();
            }
            (Slot::Occupied(mut slot), false) => {
                let followed = slot.get_mut();
                followed.users = followed.users.saturating_sub(1);
                if followed.users == 0 {
                    tokio::spawn(self.clone().let_go(wanted.clone(), followed.end.clone()));
                }
            }
            (Slot::Vacant(slot), true) => {
                let end = self.0.shutdown.child_token();
                let again = Arc::clone(&slot.insert(Followed::new(Known::NotYet, end.clone())).again);
                if self.0.by == ObjectsBy::Watch || wanted.kind == RUNTIME_CLASS {
                    tokio::spawn(self.clone().follow(wanted.clone(), resource, end));
                } else {
                    tokio::spawn(self.clone().read_on(wanted.clone(), resource, end, again));
                }
            }
            (Slot::Vacant(_), false) => {}
        }
    }

    /// Ends the watch of an object that nobody has asked for in a while.
    async fn let_go(self, wanted: ObjectRequest, end: CancellationToken) {
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(LINGER) => {}
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
            let news = tokio::select! {
                () = end.cancelled() => return,
                news = follower.next() => news,
            };
            match news {
                News::Listed(objects) => self.take(&wanted, objects.into_iter().next()),
                News::Changed(Change::Put(object)) => self.take(&wanted, Some(object)),
                News::Changed(Change::Deleted(_)) => self.take(&wanted, None),
                News::InTouch => {}
                News::Lost(error) => self.miss(&wanted, &error),
            }
        }
    }

    /// Reads an object again whenever it is too old, or `again` says so.
    async fn read_on(
        self,
        wanted: ObjectRequest,
        resource: Resource,
        end: CancellationToken,
        again: Arc<Notify>,
    ) {
        let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
        let mut pause = AGAIN;
        loop {
            // Cancel-safe: what was not read to its end is nobody's any more.
            let read = tokio::select! {
                () = end.cancelled() => return,
                read = self.0.api.get(resource, namespace, &wanted.name) => read,
            };
            // Not all that were read together are read together again.
            let spread = 0.9 + fastrand::f32() / 5.0;
            let rest = match read {
                Ok(object) => {
                    self.take(&wanted, object);
                    pause = AGAIN;
                    self.age()
                }
                Err(error) => {
                    self.miss(&wanted, &error);
                    let rest = pause.max(Duration::from_secs(error.retry_after().into()));
                    pause = (pause * 2).min(AGE);
                    rest
                }
            };
            // Cancel-safe: neither arm holds anything.
            tokio::select! {
                () = end.cancelled() => return,
                () = again.notified() => {}
                () = tokio::time::sleep(rest.mul_f32(spread)) => {}
            }
        }
    }

    fn take(&self, wanted: &ObjectRequest, object: Option<Object>) {
        let now = object.map(|object| bytes(wanted, object));
        let mut state = self.state();
        if !state.followed.contains_key(wanted) {
            // Its watch has ended, and tells what it had heard before.
            return;
        }
        match &now {
            Some(json) if wanted.kind == "Secret" => {
                state.secrets.put((wanted.namespace.clone(), wanted.name.clone()), json);
            }
            Some(json) => self.0.checkpoint.put(&key(wanted), json.clone()),
            None => self.forget(&mut state, wanted),
        }
        state.remembered.remove(wanted);
        if now.is_none() && wanted.kind == RUNTIME_CLASS {
            // Who asks for it again has it read again.
            if let Some(followed) = state.followed.remove(wanted) {
                followed.end.cancel();
            }
        }
        let Some(followed) = state.followed.get_mut(wanted) else { return };
        if !matches!(&followed.known, Known::As(before) if *before == now) {
            followed.known = Known::As(now);
            self.0.changes.send_modify(|count| *count += 1);
        }
    }

    /// What is known goes on; where nothing is, it is said why.
    fn miss(&self, wanted: &ObjectRequest, error: &KubeError) {
        let mut state = self.state();
        let Some(followed) = state.followed.get_mut(wanted) else { return };
        if !matches!(followed.known, Known::As(_)) {
            let first = matches!(followed.known, Known::NotYet);
            followed.known = Known::Failed(chain(error));
            if first {
                self.0.changes.send_modify(|count| *count += 1);
            }
        }
    }

    /// Nothing of it is left for the time after a restart.
    fn forget(&self, state: &mut State, wanted: &ObjectRequest) {
        state.remembered.remove(wanted);
        if wanted.kind == "Secret" {
            state.secrets.remove(&(wanted.namespace.clone(), wanted.name.clone()));
        } else {
            self.0.checkpoint.remove(&key(wanted));
        }
    }
}

/// An object as it is handed out: it says what it is, and not who has written which field.
fn bytes(wanted: &ObjectRequest, Object(mut object): Object) -> Vec<u8> {
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
    fn what_an_object_is_kept_under_names_it() {
        let wanted =
            ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "a.b".to_owned() };
        assert_eq!(key(&wanted), "api:objects/ConfigMap/d/a.b");
        assert_eq!(named(&key(&wanted)), Some(wanted));
        for other in ["api:pods/d/a", "api:objects/ConfigMap/d", "/keelson/v1/nodes/n/objects/ConfigMap/d/a"]
        {
            assert_eq!(named(other), None, "{other}");
        }
    }

    fn class() -> ObjectRequest {
        ObjectRequest { kind: RUNTIME_CLASS.to_owned(), namespace: String::new(), name: "kata".to_owned() }
    }

    /// A cache that has read the class from a server; the server, and a sign that it has deleted the class.
    async fn cache(folder: &std::path::Path, config: &Config) -> (FakeApi, ObjectCache, Arc<AtomicBool>) {
        let gone = Arc::new(AtomicBool::new(false));
        let deleted = Arc::clone(&gone);
        let server = FakeApi::start(folder, move |asked| {
            let object = json!({"metadata": {"name": "kata", "resourceVersion": "5"}, "handler": "kata-qemu"});
            match (asked.path.contains("watch=1"), asked.path.contains('?')) {
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
        (server, cache, gone)
    }

    fn config(folder: &std::path::Path) -> Config {
        let mut config = Config::default();
        config.paths.run_dir = folder.join("run");
        config
    }

    #[tokio::test]
    async fn a_runtime_class_is_read_once_and_known_from_then_on_also_without_the_server_and_over_a_restart()
    {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let (server, cache, _) = cache(folder.path(), &config).await;
        let first = cache.get(class()).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&first).contains("kata-qemu"));
        for _ in 0..3 {
            assert_eq!(cache.get(class()).await.unwrap().as_ref(), Some(&first));
        }
        let reads = server.asked().iter().filter(|asked| !asked.path.contains('?')).count();
        assert_eq!(reads, 1, "{:?}", server.asked());
        drop(server);
        assert_eq!(cache.get(class()).await.unwrap().as_ref(), Some(&first));

        assert_eq!(cache.0.checkpoint.paths(), [key(&class())]);
        let silent = FakeApi::start(folder.path(), |_| None).await;
        let ctx = Context::detached(ServiceName::PodConfig, config);
        let mut earlier = [(key(&class()), first.clone())].into();
        let after = ObjectCache::new(&ctx, silent.api.clone(), Checkpoint::default(), &mut earlier);
        for _ in 0..2 {
            assert_eq!(
                after.get(class()).await.unwrap().as_ref(),
                Some(&first),
                "nobody waits for the server"
            );
        }
    }

    fn map() -> ObjectRequest {
        ObjectRequest { kind: "ConfigMap".to_owned(), namespace: "d".to_owned(), name: "words".to_owned() }
    }

    /// A cache that hears of changes as it is told; its server counts the reads, and each finds another word.
    async fn cache_by(folder: &std::path::Path, by: ObjectsBy) -> (FakeApi, ObjectCache) {
        let server = FakeApi::start(folder, {
            let mut reads = 0;
            move |asked| {
                assert!(!asked.path.contains("watch=1") && !asked.path.contains('?'), "{asked:?}");
                reads += 1;
                // The second read is refused.
                let object =
                    json!({"metadata": {"name": "words", "namespace": "d"}, "data": {"word": reads}});
                Some(if reads == 2 { refusal(503) } else { (200, object) })
            }
        })
        .await;
        let mut config = config(folder);
        let mut settings = keelson_config::Kubernetes::of("/none".into());
        settings.objects_by = by;
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
    async fn an_object_that_is_cached_is_read_again_when_it_is_old_or_somebody_new_asks_and_never_watched() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache) = cache_by(folder.path(), ObjectsBy::Cache).await;
        let mut changes = cache.changes();
        cache.retain(&map(), true);
        changes.changed().await.unwrap();
        for _ in 0..3 {
            assert_eq!(word(&cache).await, 1);
        }
        assert_eq!(server.asked().len(), 1, "who asks is told what is known");
        // Somebody new: it is read again, which is refused first, and what is known goes on meanwhile.
        *cache.0.age.lock().unwrap() = Duration::from_millis(50);
        cache.retain(&map(), true);
        assert_eq!(word(&cache).await, 1);
        changes.changed().await.unwrap();
        assert!(word(&cache).await >= 3);
        // And then by its age alone.
        changes.changed().await.unwrap();
        assert!(word(&cache).await >= 4);
    }

    #[tokio::test]
    async fn an_object_that_is_got_is_read_by_whoever_needs_it_and_known_while_the_server_is_away() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache) = cache_by(folder.path(), ObjectsBy::Get).await;
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
    fn an_object_may_be_a_minute_old_or_older_where_the_node_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let ctx = Context::detached(ServiceName::PodConfig, config(folder.path()));
        let api = KubeApi::new("/none".into(), "test");
        let cache = ObjectCache::new(&ctx, api, Checkpoint::default(), &mut BTreeMap::new());
        for (said, seconds) in [(Some(300), 300), (Some(0), 60), (None, 60)] {
            cache.keeps_for(said);
            assert_eq!(cache.age(), Duration::from_secs(seconds), "{said:?}");
        }
    }

    #[tokio::test]
    async fn a_runtime_class_that_is_gone_is_forgotten_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let (server, cache, gone) = cache(folder.path(), &config(folder.path())).await;
        let known = cache.get(class()).await.unwrap().unwrap();
        gone.store(true, Ordering::SeqCst);
        // The list with which it is followed may have come before it went.
        cache.take(&class(), None);
        assert!(cache.state().followed.is_empty());
        assert_eq!(cache.0.checkpoint.paths(), [""; 0]);
        assert_eq!(cache.get(class()).await.unwrap(), None);
        gone.store(false, Ordering::SeqCst);
        assert_eq!(cache.get(class()).await.unwrap(), Some(known));
        drop(server);
    }
}
