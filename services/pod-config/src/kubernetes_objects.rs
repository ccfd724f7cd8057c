//! The objects to which API pods refer. Each is followed individually while pods use it, because a node may not read others
//! (node-and-api.md §10): by a watch, or by polling, as configured.
//!
//! While the server is down the last known version stays in effect, also over a restart of the service: ConfigMaps from the
//! checkpoint, Secrets from memory.
//!
//! A RuntimeClass that was read once is followed as long as it exists: every sandbox of its pods needs it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keelson_config::{ControlPlane, ObjectsBy, ServiceName};
use keelson_kube_api::{Change, Follower, KubeApi, KubeError, Object, Range, Resource, WatchEvent};
use keelson_kube_model::pod_ext::API;
use keelson_service_kit::Context;
use keelson_service_kit::status::chain;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Checkpoint;
use crate::control_plane::{ControlPlaneError, ObjectRequest};
use crate::followed_objects::{
    CERTIFICATE_REQUEST, FollowedObjects, Following, ObjectState, RUNTIME_CLASS, checkpoint_key, encode,
    resource,
};
use crate::pod_certificates::REQUESTS;
use crate::secrets::Secrets;

mod trust_bundles;

use trust_bundles::{TrustBundles, is_trust_bundle};

/// How long an unused object is still followed: its user may be restarting.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Minimum time for which a polled object counts as fresh: the interval between two syncs of a pod in a kubelet.
const MIN_TTL: Duration = Duration::from_secs(60);
/// Delay before a failed read is retried; it doubles with each failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The cache of followed objects.
#[derive(Clone)]
pub struct ObjectCache(Arc<Inner>);

struct Inner {
    api: KubeApi,
    checkpoint: Checkpoint,
    shutdown: CancellationToken,
    strategy: ObjectsBy,
    node_name: String,
    /// How old a polled object may be.
    ttl: Mutex<Duration>,
    state: Mutex<FollowedObjects>,
    changes: watch::Sender<u64>,
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
        let state = FollowedObjects::restore(checkpoint.clone(), secrets, stored_secrets, rows);
        let strategy = match &ctx.config.control_plane {
            ControlPlane::Kubernetes(settings) => settings.objects_by,
            ControlPlane::None | ControlPlane::Etcd(_) => ObjectsBy::default(),
        };
        Self(Arc::new(Inner {
            api,
            checkpoint,
            shutdown: ctx.shutdown.clone(),
            strategy,
            node_name: ctx.config.node_name.clone(),
            ttl: Mutex::new(MIN_TTL),
            state: Mutex::new(state),
            changes: watch::Sender::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, FollowedObjects> {
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
        let resource = resource(&wanted.kind);
        if resource.is_none() && !is_only_followed(&wanted.kind) {
            return Ok(None);
        }
        let unavailable = |cause: String| ControlPlaneError::Unavailable { name: API, cause };
        {
            let state = self.state();
            let cause = match state.state(&wanted) {
                // With this strategy every use reads the object.
                Some(ObjectState::Cached(_))
                    if self.0.strategy == ObjectsBy::Get && !is_always_followed(&wanted.kind) =>
                {
                    None
                }
                Some(ObjectState::Cached(object)) => return Ok(object.clone()),
                Some(ObjectState::Pending) => Some("it has not answered yet".to_owned()),
                Some(ObjectState::Error(cause)) => Some(cause.clone()),
                None => None,
            };
            if let Some(cause) = cause {
                return state.restored(&wanted).map(Some).ok_or_else(|| unavailable(cause));
            }
        }
        let Some(resource) = resource else {
            return Err(unavailable(format!("a {} is known only while it is watched", wanted.kind)));
        };
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
                if let Some(ObjectState::Cached(known)) = state.state(&wanted) {
                    return Ok(known.clone());
                }
                state.restored(&wanted).map(Some).ok_or_else(|| unavailable(chain(&error)))
            }
        }
    }

    /// Restores a RuntimeClass from the checkpoint and follows it. Its handler is immutable, so there is no need to wait for the
    /// server.
    fn restore_runtime_class(&self, wanted: &ObjectRequest) -> Option<Vec<u8>> {
        if wanted.kind != RUNTIME_CLASS {
            return None;
        }
        let json = self.state().restored(wanted)?;
        self.follow_runtime_class(wanted, json.clone());
        Some(json)
    }

    /// Follows a known RuntimeClass until it is deleted.
    fn follow_runtime_class(&self, wanted: &ObjectRequest, json: Vec<u8>) {
        let end = self.0.shutdown.child_token();
        if self.state().follow_known(wanted, json, end.clone()) {
            keelson_service_kit::spawn(
                "follow an object",
                self.clone().follow(
                    wanted.clone(),
                    Range::one(Resource::RUNTIME_CLASS, None, &wanted.name),
                    end,
                ),
            );
        }
    }

    /// Adds or removes a user of an object.
    pub fn retain(&self, wanted: &ObjectRequest, watched: bool) {
        let resource = resource(&wanted.kind);
        if resource.is_none() && !is_only_followed(&wanted.kind) {
            return;
        }
        if !watched {
            if let Some(end) = self.state().remove_user(wanted) {
                keelson_service_kit::spawn(
                    "unfollow an object",
                    self.clone().unfollow_when_idle(wanted.clone(), end),
                );
            }
            return;
        }
        let following = self.state().add_user(wanted, self.0.shutdown.child_token());
        let Some(Following { end, refresh }) = following else { return };
        if wanted.kind == CERTIFICATE_REQUEST {
            let range = self.certificate_request(wanted);
            let task = self.clone().follow(wanted.clone(), range, end);
            keelson_service_kit::spawn("follow a certificate request", task);
            return;
        }
        let Some(resource) = resource else {
            let task = self.clone().follow_trust_bundles(wanted.clone(), end);
            keelson_service_kit::spawn("follow trust bundles", task);
            return;
        };
        if self.0.strategy == ObjectsBy::Watch || is_always_followed(&wanted.kind) {
            let namespace = (!wanted.namespace.is_empty()).then_some(wanted.namespace.as_str());
            let range = Range::one(resource, namespace, &wanted.name);
            keelson_service_kit::spawn("follow an object", self.clone().follow(wanted.clone(), range, end));
        } else {
            keelson_service_kit::spawn(
                "poll an object",
                self.clone().poll(wanted.clone(), resource, end, refresh),
            );
        }
    }

    /// Stops following an object that has had no users for a while.
    async fn unfollow_when_idle(self, wanted: ObjectRequest, end: CancellationToken) {
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(IDLE_TIMEOUT) => {}
        }
        self.state().unfollow_unused(&wanted);
    }

    /// A node may list and watch only the certificate requests of its own pods (docs/node-requests.md).
    fn certificate_request(&self, wanted: &ObjectRequest) -> Range {
        let mut range = Range::one(REQUESTS, Some(&wanted.namespace), &wanted.name);
        range.fields = range.fields.map(|name| format!("{name},spec.nodeName={}", self.0.node_name));
        range
    }

    async fn follow(self, wanted: ObjectRequest, range: Range, end: CancellationToken) {
        let mut follower = Follower::new(self.0.api.clone(), range);
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

    async fn follow_trust_bundles(self, wanted: ObjectRequest, end: CancellationToken) {
        let mut bundles = TrustBundles::new(self.0.api.clone(), &wanted);
        loop {
            let state = tokio::select! {
                () = end.cancelled() => return,
                state = bundles.next() => state,
            };
            match state {
                Ok(object) => self.update(&wanted, object),
                Err(error) => self.record_error(&wanted, &error),
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
        if self.state().update(wanted, now) {
            self.notify();
        }
    }

    /// Records an error, unless a version is cached.
    fn record_error(&self, wanted: &ObjectRequest, error: &KubeError) {
        if self.state().record_error(wanted, chain(error)) {
            self.notify();
        }
    }

    fn notify(&self) {
        self.0.changes.send_modify(|count| *count += 1);
    }
}

/// Whether objects of this kind are watched whatever the configured way is.
fn is_always_followed(kind: &str) -> bool {
    kind == RUNTIME_CLASS || is_only_followed(kind)
}

/// Whether objects of this kind are known only while they are watched.
fn is_only_followed(kind: &str) -> bool {
    kind == CERTIFICATE_REQUEST || is_trust_bundle(kind)
}

#[cfg(test)]
mod tests;
