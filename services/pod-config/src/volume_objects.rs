//! The PersistentVolumes and claims of the manifests, as they are bound to each other. For nodes without an API server.
//!
//! The binding is decided by [`bind`] whenever the manifests change. It is served at once and stored by the checkpoint's loop, so
//! that a service that is killed in between decides again. The decision is the same unless the manifests have changed meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use keelson_config::Config;
use keelson_pod_config_core::binder::{
    Bindings, Claim, ClaimKey, ClaimState, Manifests, NodeFacts, Outcome, Volume, VolumeState, bind,
    claim_warning,
};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::node::standalone_node;
use keelson_pod_config_core::object::{ObjectKey, StoredObject};
use keelson_pod_config_core::volume_spec::ClaimReference;
use serde_json::{Value, json};

use crate::checkpoint::Checkpoint;

/// The result of looking up an object in the sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectLookup {
    /// The object as JSON.
    Object(Arc<[u8]>),
    /// All sources have been read, and none has the object.
    NotFound,
    /// No source has the object so far, and some have not been read yet.
    SourcesNotRead,
}

/// Messages about claims, by claim.
pub type ClaimMessages = BTreeMap<ObjectKey, String>;

/// The PersistentVolumes and claims of all sources. Cheap to clone.
#[derive(Debug, Clone)]
pub struct VolumeObjects(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node: NodeFacts,
    checkpoint: Checkpoint,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// All sources have been read.
    complete: bool,
    bindings: Bindings,
    /// The objects as they are returned.
    objects: BTreeMap<ObjectKey, Arc<[u8]>>,
}

impl VolumeObjects {
    /// Without objects; `bindings` are those of the run before the restart, and `checkpoint` stores those of this run.
    pub fn new(config: &Config, checkpoint: Checkpoint, bindings: Bindings) -> Self {
        let node = standalone_node(&config.node_name, &config.resources.node_labels, std::env::consts::ARCH);
        let labels = serde_json::from_value(node["metadata"]["labels"].clone()).unwrap_or_default();
        let node = NodeFacts { name: config.node_name.clone(), labels };
        let state = Mutex::new(State { bindings, ..State::default() });
        Self(Arc::new(Inner { node, checkpoint, state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up a PersistentVolume or claim with its UID, its phase, and the object that it is bound to. `namespace` does not count
    /// for a PersistentVolume.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> ObjectLookup {
        let state = self.state();
        let Some(kind) = Kind::parse(kind).filter(|kind| kind.is_volume_object()) else {
            return if state.complete { ObjectLookup::NotFound } else { ObjectLookup::SourcesNotRead };
        };
        let namespace = if kind.is_namespaced() { namespace.to_owned() } else { String::new() };
        match state.objects.get(&ObjectKey { kind, namespace, name: name.to_owned() }) {
            Some(json) => ObjectLookup::Object(Arc::clone(json)),
            None if state.complete => ObjectLookup::NotFound,
            None => ObjectLookup::SourcesNotRead,
        }
    }

    /// Replaces the PersistentVolumes and claims of the manifests and binds them. With `complete` all sources have been read.
    /// Returns what a person should know about the claims.
    pub fn update(&self, objects: BTreeMap<ObjectKey, Arc<StoredObject>>, complete: bool) -> ClaimMessages {
        let mut state = self.state();
        let manifests = read(&objects, complete);
        let outcome = bind(&manifests, &state.bindings, &self.0.node);
        log_changes(&state.bindings, &outcome.bindings);
        state.complete = complete;
        state.objects = objects.values().map(|object| returned(object, &manifests, &outcome)).collect();
        self.0.checkpoint.put_bindings(&outcome.bindings);
        let messages = outcome.claims.iter().filter_map(|(key, claim_state)| {
            let message = claim_warning(key, manifests.claims.get(key)?, claim_state)?;
            Some((object_key(key), message))
        });
        let messages = messages.collect();
        state.bindings = outcome.bindings;
        messages
    }
}

fn object_key(ClaimKey { namespace, name }: &ClaimKey) -> ObjectKey {
    let (namespace, name) = (namespace.clone(), name.clone());
    ObjectKey { kind: Kind::PersistentVolumeClaim, namespace, name }
}

fn read(objects: &BTreeMap<ObjectKey, Arc<StoredObject>>, complete: bool) -> Manifests {
    let mut manifests = Manifests { complete, ..Manifests::default() };
    for (ObjectKey { kind, namespace, name }, object) in objects {
        let (namespace, name) = (namespace.clone(), name.clone());
        let is_read = match kind {
            Kind::PersistentVolume => {
                Volume::read(object).map(|volume| drop(manifests.volumes.insert(name, volume)))
            }
            Kind::PersistentVolumeClaim => {
                let key = ClaimKey { namespace, name };
                Claim::read(object).map(|claim| drop(manifests.claims.insert(key, claim)))
            }
            Kind::Pod | Kind::Secret | Kind::ConfigMap => Some(()),
        };
        if is_read.is_none() {
            // It was validated when it was read, with the same types.
            tracing::error!(object = %object.key, "a validated object cannot be read; it is not bound");
        }
    }
    manifests
}

/// The object with its state.
fn returned(object: &StoredObject, manifests: &Manifests, outcome: &Outcome) -> (ObjectKey, Arc<[u8]>) {
    let key = object.key.clone();
    let Ok(mut value) = serde_json::from_slice::<Value>(&object.json) else {
        return (key, Arc::clone(&object.json));
    };
    match key.kind {
        Kind::PersistentVolume => {
            if let Some(volume_state) = outcome.volumes.get(&key.name) {
                set_volume_state(&mut value, volume_state);
            }
        }
        Kind::PersistentVolumeClaim => {
            let claim = ClaimKey { namespace: key.namespace.clone(), name: key.name.clone() };
            if let Some(claim_state) = outcome.claims.get(&claim) {
                set_claim_state(&mut value, claim_state, manifests);
            }
        }
        Kind::Pod | Kind::Secret | Kind::ConfigMap => {}
    }
    (key, value.to_string().into_bytes().into())
}

fn set_volume_state(volume: &mut Value, volume_state: &VolumeState) {
    let (phase, claim) = match volume_state {
        VolumeState::Available => ("Available", None),
        VolumeState::Bound(claim) => ("Bound", Some(claim)),
        VolumeState::Released(claim) => ("Released", Some(claim)),
    };
    volume["status"] = json!({"phase": phase});
    if let Some(ClaimReference { namespace, name, uid }) = claim {
        volume["spec"]["claimRef"] = json!({
            "apiVersion": "v1",
            "kind": Kind::PersistentVolumeClaim.as_str(),
            "namespace": namespace,
            "name": name,
            "uid": uid,
        });
    }
}

fn set_claim_state(claim: &mut Value, claim_state: &ClaimState, manifests: &Manifests) {
    match claim_state {
        // volume-manager shows the reason in the pod's wait; the API has no condition of this type.
        ClaimState::Pending { reason } => {
            let condition =
                json!({"type": "Bound", "status": "False", "reason": "Unbound", "message": reason});
            claim["status"] = json!({"phase": "Pending", "conditions": [condition]});
        }
        ClaimState::Lost { volume } => {
            claim["spec"]["volumeName"] = json!(volume);
            claim["status"] = json!({"phase": "Lost"});
        }
        ClaimState::Bound { volume: name } => {
            claim["spec"]["volumeName"] = json!(name);
            claim["status"] = json!({"phase": "Bound"});
            if let Some(volume) = manifests.volumes.get(name) {
                let modes: Vec<String> = volume.spec.access_modes.iter().map(ToString::to_string).collect();
                let capacity: BTreeMap<&String, String> = volume
                    .spec
                    .capacity
                    .iter()
                    .map(|(resource, amount)| (resource, amount.to_string()))
                    .collect();
                claim["status"]["accessModes"] = json!(modes);
                claim["status"]["capacity"] = json!(capacity);
            }
        }
    }
}

/// Logs which PersistentVolumes were bound and released.
fn log_changes(before: &Bindings, after: &Bindings) {
    for (volume, binding) in after {
        let known = before.get(volume);
        let claim = &binding.claim;
        let is_same = known.is_some_and(|known| {
            known.released == binding.released && ClaimKey::of(&known.claim) == ClaimKey::of(claim)
        });
        match (is_same, binding.released) {
            (true, _) => {}
            (false, false) => {
                tracing::info!(event = "claim_bound", volume, %claim, "claim bound to its PersistentVolume");
            }
            (false, true) => tracing::info!(
                event = "volume_released", volume, %claim,
                "the claim has gone; its PersistentVolume keeps the data"
            ),
        }
    }
    for volume in before.keys().filter(|volume| !after.contains_key(*volume)) {
        tracing::info!(
            event = "volume_freed",
            volume,
            "the manifest of a released PersistentVolume has changed"
        );
    }
}
