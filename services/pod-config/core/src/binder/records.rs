//! What the binder keeps over restarts, and how much of a decision may be seen before it is stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Bindings, ClaimKey, ClaimState, FirstSeen, Manifests, Outcome, VolumeState};

/// The version of the encoding.
const VERSION: u64 = 1;

/// Why a claim is pending whose binding was decided and is not stored yet.
pub const WAITS_FOR_STORAGE: &str = "its binding is being stored";

/// What the binder keeps over restarts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Records {
    /// The claim of each PersistentVolume.
    pub bindings: Bindings,
    /// Earlier records were lost, so that it is not known which PersistentVolume has whose data. Stays until a person ends it.
    #[serde(default)]
    pub lost: bool,
    /// The deleted claims that pods still use.
    #[serde(default)]
    pub deleted: Vec<DeletedClaim>,
    /// volume-manager has reported the claims in use: after a restart, its next report is awaited before a claim is released.
    #[serde(default)]
    pub reported: bool,
    /// When each object was first seen.
    #[serde(default)]
    pub first_seen: FirstSeen,
}

/// A claim that is in no manifest any more, and that is still in use on this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeletedClaim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `metadata.deletionTimestamp`.
    pub since: String,
    /// The claim as it was written last, with its defaults.
    pub object: Value,
}

/// Why records cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordsError {
    /// They are damaged.
    #[error("damaged: {0}")]
    Damaged(String),
    /// A newer release wrote them.
    #[error("version {found}, and this release knows {VERSION}; use the newer release")]
    TooNew {
        /// Their version.
        found: u64,
    },
}

impl DeletedClaim {
    /// Its namespace and name.
    pub fn key(&self) -> ClaimKey {
        ClaimKey { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

impl Records {
    /// The records of a node that has lost its own.
    pub fn lost() -> Self {
        Self { lost: true, ..Self::default() }
    }

    /// Encodes the records, for people to read.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = json!({"version": VERSION});
        if let (Some(value), Ok(Value::Object(fields))) = (value.as_object_mut(), serde_json::to_value(self))
        {
            value.extend(fields);
        }
        let mut text = format!("{value:#}");
        text.push('\n');
        text.into_bytes()
    }

    /// Decodes what [`Self::encode`] returned.
    ///
    /// # Errors
    /// They are damaged or too new.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordsError> {
        let damaged = |error: serde_json::Error| RecordsError::Damaged(error.to_string());
        let value: Value = serde_json::from_slice(bytes).map_err(damaged)?;
        match value["version"].as_u64() {
            Some(VERSION) => serde_json::from_value(value).map_err(damaged),
            Some(found) if found > VERSION => Err(RecordsError::TooNew { found }),
            _ => Err(RecordsError::Damaged("no version".into())),
        }
    }
}

/// The state of all objects while the records are not known, for this `reason`.
pub fn unknown(manifests: &Manifests, reason: &str) -> Outcome {
    let pending = || ClaimState::Pending { reason: reason.to_owned() };
    Outcome {
        bindings: Bindings::new(),
        claims: manifests.claims.keys().map(|key| (key.clone(), pending())).collect(),
        volumes: manifests.volumes.keys().map(|name| (name.clone(), VolumeState::Available)).collect(),
    }
}

/// What others may see of a decision while only `stored` survives a crash: a claim is bound once its binding is stored. `reason`
/// says why it is not yet.
pub fn published(outcome: &Outcome, stored: &Bindings, reason: &str) -> Outcome {
    let is_stored = |volume: &str, claim: &ClaimKey| {
        stored.get(volume).is_some_and(|found| !found.released && ClaimKey::of(&found.claim) == *claim)
    };
    let claim = |(key, state): (&ClaimKey, &ClaimState)| {
        let state = match state {
            ClaimState::Bound { volume } | ClaimState::Lost { volume } if !is_stored(volume, key) => {
                ClaimState::Pending { reason: reason.to_owned() }
            }
            state => state.clone(),
        };
        (key.clone(), state)
    };
    let volume = |(name, state): (&String, &VolumeState)| {
        let state = match state {
            VolumeState::Bound(claim) if !is_stored(name, &ClaimKey::of(claim)) => VolumeState::Available,
            state => state.clone(),
        };
        (name.clone(), state)
    };
    Outcome {
        bindings: outcome.bindings.clone(),
        claims: outcome.claims.iter().map(claim).collect(),
        volumes: outcome.volumes.iter().map(volume).collect::<BTreeMap<_, _>>(),
    }
}
