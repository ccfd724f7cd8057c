//! The followed objects: their last known state, and what a restart of the service restores of them.
//!
//! ConfigMaps and RuntimeClasses are restored from the checkpoint, Secrets from memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::sync::Arc;

use keelson_kube_api::{Object, Resource};
use serde_json::Value;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::{API_KEY_PREFIX, Checkpoint};
use crate::control_plane::ObjectRequest;
use crate::secrets::{SecretName, Secrets};

/// The kind that is followed once it was read.
pub const RUNTIME_CLASS: &str = "RuntimeClass";
const SECRET: &str = "Secret";
/// A ClusterTrustBundle.
pub const TRUST_BUNDLE: &str = "ClusterTrustBundle";
/// The ClusterTrustBundles of the signer with the name of the object.
pub const TRUST_BUNDLES: &str = "ClusterTrustBundleList";
/// A request for a certificate of a pod.
pub const CERTIFICATE_REQUEST: &str = "PodCertificateRequest";

/// The objects that are in use, and those that are restored when they are used.
pub struct FollowedObjects {
    followed: BTreeMap<ObjectRequest, Followed>,
    /// Objects restored after a restart.
    restored: BTreeMap<ObjectRequest, Vec<u8>>,
    secrets: Secrets,
    checkpoint: Checkpoint,
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

/// What is known of an object.
pub enum ObjectState {
    /// The server has not answered yet.
    Pending,
    /// The server is unreachable or refuses.
    Error(String),
    /// The object, or `None` if it does not exist.
    Cached(Option<Vec<u8>>),
}

/// The resource of a kind that can be read and followed.
pub fn resource(kind: &str) -> Option<Resource> {
    match kind {
        SECRET => Some(Resource::SECRET),
        "ConfigMap" => Some(Resource::CONFIG_MAP),
        RUNTIME_CLASS => Some(Resource::RUNTIME_CLASS),
        _ => None,
    }
}

/// The checkpoint key of an object that is no Secret.
pub fn checkpoint_key(wanted: &ObjectRequest) -> String {
    let ObjectRequest { kind, namespace, name } = wanted;
    format!("{API_KEY_PREFIX}objects/{kind}/{namespace}/{name}")
}

/// The object of a [`checkpoint_key`].
pub fn parse_checkpoint_key(key: &str) -> Option<ObjectRequest> {
    let mut parts =
        key.strip_prefix(API_KEY_PREFIX)?.strip_prefix("objects/")?.splitn(3, '/').map(str::to_owned);
    // The name of a signer has a slash.
    let (Some(kind), Some(namespace), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
        return None;
    };
    Some(ObjectRequest { kind, namespace, name })
}

/// The result of following an object.
#[derive(Debug)]
pub struct Following {
    /// Ends its watch or polling.
    pub end: CancellationToken,
    /// Triggers a read of a polled object.
    pub refresh: Arc<Notify>,
}

impl FollowedObjects {
    /// No followed objects. Takes the restored ones out of `rows` of the checkpoint; `stored_secrets` are those of `secrets`.
    pub fn restore(
        checkpoint: Checkpoint,
        secrets: Secrets,
        stored_secrets: BTreeMap<SecretName, Vec<u8>>,
        rows: &mut BTreeMap<String, Vec<u8>>,
    ) -> Self {
        let of_secret = |(namespace, name)| ObjectRequest { kind: SECRET.to_owned(), namespace, name };
        let mut restored: BTreeMap<_, _> =
            stored_secrets.into_iter().map(|(name, bytes)| (of_secret(name), bytes)).collect();
        let keys: Vec<(String, ObjectRequest)> =
            rows.keys().filter_map(|key| Some((key.clone(), parse_checkpoint_key(key)?))).collect();
        for (key, wanted) in keys {
            restored.extend(rows.remove(&key).map(|bytes| (wanted, bytes)));
        }
        Self { followed: BTreeMap::new(), restored, secrets, checkpoint }
    }

    /// The state of a followed object.
    pub fn state(&self, wanted: &ObjectRequest) -> Option<&ObjectState> {
        self.followed.get(wanted).map(|followed| &followed.state)
    }

    /// The version from before the restart.
    pub fn restored(&self, wanted: &ObjectRequest) -> Option<Vec<u8>> {
        self.restored.get(wanted).cloned()
    }

    /// Follows a known object with one user until `end` is cancelled. Returns false if it is followed already.
    pub fn follow_known(&mut self, wanted: &ObjectRequest, json: Vec<u8>, end: CancellationToken) -> bool {
        match self.followed.entry(wanted.clone()) {
            Slot::Vacant(slot) => {
                slot.insert(Followed::new(ObjectState::Cached(Some(json)), end));
                true
            }
            Slot::Occupied(_) => false,
        }
    }

    /// Adds a user. If it is the first one, the object must be followed until `end` is cancelled.
    pub fn add_user(&mut self, wanted: &ObjectRequest, end: CancellationToken) -> Option<Following> {
        match self.followed.entry(wanted.clone()) {
            Slot::Occupied(mut slot) => {
                slot.get_mut().users += 1;
                // A new user must not get an old version.
                slot.get().refresh.notify_one();
                None
            }
            Slot::Vacant(slot) => {
                let followed = slot.insert(Followed::new(ObjectState::Pending, end.clone()));
                Some(Following { end, refresh: Arc::clone(&followed.refresh) })
            }
        }
    }

    /// Removes a user. If it was the last one, returns what ends the following.
    pub fn remove_user(&mut self, wanted: &ObjectRequest) -> Option<CancellationToken> {
        let followed = self.followed.get_mut(wanted)?;
        followed.users = followed.users.saturating_sub(1);
        (followed.users == 0).then(|| followed.end.clone())
    }

    /// Stops following an object that has no users.
    pub fn unfollow_unused(&mut self, wanted: &ObjectRequest) {
        if self.followed.get(wanted).is_some_and(|followed| followed.users == 0)
            && let Some(followed) = self.followed.remove(wanted)
        {
            self.forget(wanted);
            followed.end.cancel();
        }
    }

    /// Takes a version from the server; `None` if the object does not exist. Returns whether the state has changed. A late event
    /// of an object that is no longer followed is ignored.
    pub fn update(&mut self, wanted: &ObjectRequest, now: Option<Vec<u8>>) -> bool {
        if !self.followed.contains_key(wanted) {
            return false;
        }
        match &now {
            Some(json) if wanted.kind == SECRET => self.secrets.put(secret_name(wanted), json),
            // Its key is only in the memory of volume-manager, which requests a certificate anew after a restart.
            Some(_) if wanted.kind == CERTIFICATE_REQUEST => {}
            Some(json) => self.checkpoint.put(&checkpoint_key(wanted), json.clone()),
            None => self.forget(wanted),
        }
        self.restored.remove(wanted);
        if now.is_none() && wanted.kind == RUNTIME_CLASS {
            // The next user reads it again.
            if let Some(followed) = self.followed.remove(wanted) {
                followed.end.cancel();
            }
        }
        let Some(followed) = self.followed.get_mut(wanted) else { return false };
        if matches!(&followed.state, ObjectState::Cached(before) if *before == now) {
            return false;
        }
        followed.state = ObjectState::Cached(now);
        true
    }

    /// Records an error, unless a version is cached. Returns whether it is the first one.
    pub fn record_error(&mut self, wanted: &ObjectRequest, error: String) -> bool {
        let Some(followed) = self.followed.get_mut(wanted) else { return false };
        if matches!(followed.state, ObjectState::Cached(_)) {
            return false;
        }
        let is_first = matches!(followed.state, ObjectState::Pending);
        followed.state = ObjectState::Error(error);
        is_first
    }

    /// Removes the object from what is restored after a restart.
    fn forget(&mut self, wanted: &ObjectRequest) {
        self.restored.remove(wanted);
        if wanted.kind == SECRET {
            self.secrets.remove(&secret_name(wanted));
        } else {
            self.checkpoint.remove(&checkpoint_key(wanted));
        }
    }
}

fn secret_name(wanted: &ObjectRequest) -> SecretName {
    (wanted.namespace.clone(), wanted.name.clone())
}

/// Encodes an object for callers: with apiVersion and kind, without managedFields.
pub fn encode(wanted: &ObjectRequest, Object(mut object): Object) -> Vec<u8> {
    if let Some(map) = object.as_object_mut() {
        let version = match wanted.kind.as_str() {
            RUNTIME_CLASS => "node.k8s.io/v1",
            TRUST_BUNDLE | TRUST_BUNDLES | CERTIFICATE_REQUEST => "certificates.k8s.io/v1beta1",
            _ => "v1",
        };
        map.insert("apiVersion".to_owned(), version.into());
        map.insert("kind".to_owned(), wanted.kind.clone().into());
        if let Some(metadata) = map.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    }
    object.to_string().into_bytes()
}
