//! PersistentVolumes and claims as an API server would return them, with their phases.

use std::collections::BTreeMap;
use std::sync::Arc;

use keelson_kube_model::persistent_volume::ClaimReference;
use keelson_kube_model::pod_ext::annotations;
use keelson_pod_config_core::binder::{
    ClaimKey, ClaimState, DeletedClaim, FirstSeen, Holder, Manifests, Outcome, VolumeState,
};
use keelson_pod_config_core::manifest::Kind;
use keelson_pod_config_core::object::{ObjectKey, StoredObject};
use serde_json::{Value, json};

/// The object with its state; `None` if it is no JSON, which a validated one always is.
pub(super) fn returned(
    object: &StoredObject,
    manifests: &Manifests,
    outcome: &Outcome,
) -> Option<(ObjectKey, Value)> {
    let key = object.key.clone();
    let mut value: Value = serde_json::from_slice(&object.json).ok()?;
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
    Some((key, value))
}

/// A deleted claim with its state: as an API server shows a claim that the protection of claims in use keeps.
pub(super) fn deleted(
    claim: &DeletedClaim,
    manifests: &Manifests,
    outcome: &Outcome,
    holders: &BTreeMap<ClaimKey, Holder>,
) -> (ObjectKey, Value) {
    let mut value = claim.object.clone();
    value["metadata"]["deletionTimestamp"] = json!(claim.since);
    value["metadata"]["deletionGracePeriodSeconds"] = json!(0);
    value["metadata"]["finalizers"] = json!(["kubernetes.io/pvc-protection"]);
    if let Some(holder) = holders.get(&claim.key()) {
        value["metadata"]["annotations"][annotations::HELD_BY] = json!(holder.to_string());
    }
    if let Some(claim_state) = outcome.claims.get(&claim.key()) {
        set_claim_state(&mut value, claim_state, manifests);
    }
    let (namespace, name) = (claim.namespace.clone(), claim.name.clone());
    let key = ObjectKey { kind: Kind::PersistentVolumeClaim, namespace, name };
    (key, value)
}

/// The object as JSON with its `metadata.creationTimestamp`: when it was first seen.
pub(super) fn with_creation_time(mut object: Value, first_seen: &FirstSeen) -> Arc<[u8]> {
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
    if let Some(time) = uid.and_then(|uid| first_seen.get(uid)) {
        object["metadata"]["creationTimestamp"] = json!(time);
    }
    object.to_string().into_bytes().into()
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
