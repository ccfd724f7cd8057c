//! Which PersistentVolume each claim is bound to on a node without an API server.
//!
//! The rules are those of the upstream controller for static binding: a claim gets the PersistentVolume that it names, else the
//! smallest one that fits, preferring one that is reserved for it. A binding is kept until the claim has gone and no pod of this
//! node uses it. Then the PersistentVolume is released: it holds the data of that claim, and no other claim gets it until the
//! PersistentVolume is deleted and created again, or names another claim in `spec.claimRef`.
//!
//! What is bound is in the [`Records`], which are stored before anybody sees a binding ([`published`]). If records are lost, nobody
//! knows which PersistentVolume has whose data: then only those are bound that name each other.
//!
//! Parity: upstream,
//! - a claim that is created again under its old name does not get its PersistentVolume again. Here the manifest is the truth, and
//!   a claim that comes back gets its data back;
//! - a PersistentVolume with exactly the requested access modes is preferred to a smaller one with more;
//! - class and access modes are not compared for a PersistentVolume that is reserved for the claim. Here they always are, because
//!   volume-manager compares them too (volumes.md §3.4);
//! - a claim with `dataSource` or `dataSourceRef` is bound to any PersistentVolume that fits. Here nobody would fill it, and it gets
//!   only one that it names or that is reserved for it;
//! - the node is compared only when the pod is scheduled. Here there is one node, and a PersistentVolume of another node never fits.

mod deleted;
mod first_seen;
mod fit;
mod in_use;
mod named;
mod records;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use keelson_kube_model::persistent_volume::{ClaimReference, ClaimSpec, Strings, VolumeSpec, decode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::deleted::deleted_claims;
pub use self::first_seen::{FirstSeen, first_seen};
use self::fit::choose;
pub use self::in_use::{Holder, Report, Reports, holders};
pub use self::records::{DeletedClaim, Records, RecordsError, WAITS_FOR_STORAGE, published, unknown};
use crate::object::StoredObject;
use crate::volume_object::CLASS_ANNOTATION;

/// Why a claim is pending at the start.
const SOURCES_NOT_READ: &str =
    "not all sources of this node have been read yet; `keelson get sources` shows those that are not ready";

/// Namespace and name of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl ClaimKey {
    /// The claim that a reference names.
    pub fn of(reference: &ClaimReference) -> Self {
        Self { namespace: reference.namespace.clone(), name: reference.name.clone() }
    }
}

/// What is read of a PersistentVolume or claim besides its `spec`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Metadata {
    uid: String,
    labels: Strings,
    annotations: Strings,
}

/// A PersistentVolume of the manifests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Volume {
    /// Its UID.
    pub uid: String,
    /// Its labels.
    pub labels: Strings,
    /// Its storage class; empty: none.
    pub class: String,
    /// Its `spec`.
    pub spec: VolumeSpec,
}

/// A claim of the manifests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Claim {
    /// Its UID.
    pub uid: String,
    /// The requested storage class; empty: none.
    pub class: String,
    /// Its `spec`.
    pub spec: ClaimSpec,
    /// It is deleted, and pods still use it: it keeps its binding and gets no new one.
    pub deleted: bool,
}

impl Volume {
    /// Reads a valid PersistentVolume; `None` if it is none.
    pub fn read(object: &StoredObject) -> Option<Self> {
        let object = serde_json::from_slice(&object.json).ok()?;
        let (Metadata { uid, labels, annotations }, spec): (_, VolumeSpec) = read(&object)?;
        let class = annotations.get(CLASS_ANNOTATION).unwrap_or(&spec.storage_class_name).clone();
        Some(Self { uid, labels, class, spec })
    }

    /// Whether its data is on this node alone.
    fn is_node_local(&self) -> bool {
        self.spec.local.is_some() || self.spec.host_path.is_some()
    }
}

impl Claim {
    /// Reads a valid claim; `None` if it is none.
    pub fn read(object: &StoredObject) -> Option<Self> {
        Self::of(&serde_json::from_slice(&object.json).ok()?)
    }

    /// As [`Self::read`], of the object itself.
    pub fn of(object: &Value) -> Option<Self> {
        let (Metadata { uid, annotations, .. }, spec): (_, ClaimSpec) = read(object)?;
        let class = annotations.get(CLASS_ANNOTATION).unwrap_or(&spec.storage_class_name).clone();
        Some(Self { uid, class, spec, deleted: false })
    }
}

fn read<T: for<'de> Deserialize<'de>>(object: &Value) -> Option<(Metadata, T)> {
    let metadata = serde_json::from_value(object.get("metadata")?.clone()).ok()?;
    Some((metadata, decode(object.get("spec")?).ok()?))
}

/// The claim whose data a PersistentVolume holds. Stored over restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// The claim.
    pub claim: ClaimReference,
    /// The claim has gone, and the PersistentVolume is not bound to it any more.
    pub released: bool,
    /// UID of the PersistentVolume when it was seen last.
    pub volume_uid: String,
    /// The PersistentVolume was there when or after it was released. If it is missing later, it was deleted.
    #[serde(default)]
    pub seen_released: bool,
    /// The data is on this node alone.
    pub node_local: bool,
}

impl Binding {
    /// Decodes a binding as the checkpoint of an earlier release has it; `None` if `bytes` are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    fn new(key: &ClaimKey, claim: &Claim, volume: &Volume) -> Self {
        let ClaimKey { namespace, name } = key.clone();
        Self {
            claim: ClaimReference { namespace, name, uid: claim.uid.clone() },
            released: false,
            volume_uid: volume.uid.clone(),
            seen_released: false,
            node_local: volume.is_node_local(),
        }
    }

    /// Records the volume as it is now.
    fn record(&mut self, volume: &Volume) {
        self.volume_uid.clone_from(&volume.uid);
        self.node_local = volume.is_node_local();
    }

    /// Whether the released PersistentVolume was deleted, and perhaps created again. `volume` is the one of its name. In etcd a
    /// key that is created again has another UID; in a manifest it has the same one.
    fn is_of_deleted(&self, volume: Option<&Volume>) -> bool {
        match volume {
            Some(volume) => volume.uid != self.volume_uid,
            None => self.seen_released,
        }
    }
}

/// The bindings by the names of the PersistentVolumes. At most one binding of a claim is not released.
pub type Bindings = BTreeMap<String, Binding>;

/// This node, for the node affinity of PersistentVolumes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: Strings,
}

/// The PersistentVolumes and claims of the manifests at one moment.
#[derive(Debug, Default)]
pub struct Manifests {
    /// PersistentVolumes by name.
    pub volumes: BTreeMap<String, Volume>,
    /// Claims.
    pub claims: BTreeMap<ClaimKey, Claim>,
    /// The claims in use on this node, whether a manifest has them or not.
    pub used: BTreeSet<ClaimKey>,
    /// All sources have been read. Until then nothing is bound, lost or released.
    pub complete: bool,
}

/// Which objects are bound to each other.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What has to be stored for the next decision.
    pub bindings: Bindings,
    /// The state of each claim of the manifests.
    pub claims: BTreeMap<ClaimKey, ClaimState>,
    /// The state of each PersistentVolume of the manifests.
    pub volumes: BTreeMap<String, VolumeState>,
}

/// The state of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimState {
    /// Bound to a PersistentVolume.
    Bound {
        /// Its name.
        volume: String,
    },
    /// The PersistentVolume to which it is bound has gone.
    Lost {
        /// Its name.
        volume: String,
    },
    /// Not bound yet.
    Pending {
        /// Why, for people.
        reason: String,
    },
}

/// The state of a PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeState {
    /// No claim has it.
    Available,
    /// Bound to this claim.
    Bound(ClaimReference),
    /// It holds the data of this claim, which has gone.
    Released(ClaimReference),
}

/// Decides which claims and PersistentVolumes are bound to each other. `known` has the bindings that the last decision returned.
///
/// Depends only on the arguments: after a restart with the stored records the decision is the same.
pub fn bind(manifests: &Manifests, known: &Records, node: &NodeFacts) -> Outcome {
    let mut bindings = advance(manifests, &known.bindings);
    let mut claims = BTreeMap::new();
    for (name, binding) in bindings.iter().filter(|(_, binding)| !binding.released) {
        let key = ClaimKey::of(&binding.claim);
        if !manifests.claims.contains_key(&key) {
            continue;
        }
        let volume = name.clone();
        let state = match (manifests.volumes.contains_key(name), manifests.complete) {
            (true, _) => ClaimState::Bound { volume },
            (false, true) => ClaimState::Lost { volume },
            (false, false) => ClaimState::Pending { reason: SOURCES_NOT_READ.to_owned() },
        };
        claims.insert(key, state);
    }
    // A claim that names its PersistentVolume goes first, so that no other claim takes it.
    let (named, unnamed): (Vec<_>, Vec<_>) = manifests
        .claims
        .iter()
        .filter(|(key, claim)| !claims.contains_key(*key) && !claim.deleted)
        .partition(|(_, claim)| !claim.spec.volume_name.is_empty());
    let mut pending = Vec::new();
    for (key, claim) in named.into_iter().chain(unnamed) {
        match choose(key, claim, manifests, &bindings, known.lost, node) {
            Ok((volume, found)) if manifests.complete => {
                bindings.insert(volume.clone(), Binding::new(key, claim, found));
                claims.insert(key.clone(), ClaimState::Bound { volume });
            }
            Ok(_) | Err(_) => pending.push((key, claim)),
        }
    }
    for (key, claim) in pending {
        // The reasons name what the other claims have got in the end.
        let reason = choose(key, claim, manifests, &bindings, known.lost, node).err();
        let reason = reason.filter(|_| manifests.complete).unwrap_or_else(|| SOURCES_NOT_READ.to_owned());
        claims.insert(key.clone(), ClaimState::Pending { reason });
    }
    let state = |(name, volume): (&String, &Volume)| (name.clone(), volume_state(volume, bindings.get(name)));
    Outcome { volumes: manifests.volumes.iter().map(state).collect(), claims, bindings }
}

/// The known bindings, changed by what has come and gone.
fn advance(manifests: &Manifests, known: &Bindings) -> Bindings {
    let mut next = Bindings::new();
    let mut bound = BTreeSet::new();
    for (name, binding) in known {
        let mut binding = binding.clone();
        let volume = manifests.volumes.get(name);
        let key = ClaimKey::of(&binding.claim);
        let claim = manifests.claims.get(&key);
        match (binding.released, claim, volume) {
            (true, _, volume) if manifests.complete && binding.is_of_deleted(volume) => continue,
            (true, _, volume) => binding.seen_released |= manifests.complete && volume.is_some(),
            (false, Some(claim), volume) => {
                // Two bindings of one claim come only from a damaged checkpoint.
                binding.released = !bound.insert(key);
                if let Some(volume) = volume {
                    binding.record(volume);
                    binding.claim.uid.clone_from(&claim.uid);
                }
            }
            (false, None, volume) if manifests.complete && !manifests.used.contains(&key) => {
                binding.released = true;
                binding.seen_released = volume.is_some();
                if let Some(volume) = volume {
                    binding.record(volume);
                }
            }
            (false, None, _) => {}
        }
        next.insert(name.clone(), binding);
    }
    next
}

fn volume_state(volume: &Volume, binding: Option<&Binding>) -> VolumeState {
    match (binding, &volume.spec.claim_ref) {
        (Some(binding), _) if binding.released => VolumeState::Released(binding.claim.clone()),
        (Some(binding), _) => VolumeState::Bound(binding.claim.clone()),
        // As upstream: the claim with this UID has bound it, and is not here.
        (None, Some(reference)) if !reference.uid.is_empty() => VolumeState::Released(reference.clone()),
        (None, _) => VolumeState::Available,
    }
}

/// The claims whose data is on this node alone, according to stored bindings.
pub fn node_local_claims(bindings: &Bindings) -> BTreeSet<ClaimKey> {
    let local = bindings.values().filter(|binding| binding.node_local && !binding.released);
    local.map(|binding| ClaimKey::of(&binding.claim)).collect()
}

/// What a person should know about a claim and can change; `None` if there is nothing.
pub fn claim_warning(key: &ClaimKey, claim: &Claim, state: &ClaimState) -> Option<String> {
    match state {
        ClaimState::Bound { volume } => {
            let wanted = &claim.spec.volume_name;
            (!wanted.is_empty() && wanted != volume).then(|| {
                format!(
                    "the claim {key} stays bound to the PersistentVolume {volume}, although spec.volumeName is now {wanted}; to \
                     bind it to {wanted}, remove the claim from the manifests and add it again"
                )
            })
        }
        ClaimState::Lost { volume } => Some(format!(
            "the claim {key} is lost: its PersistentVolume {volume} is no longer in any manifest; add it again to get the data \
             back, or remove the claim and add it again to bind it to another PersistentVolume"
        )),
        ClaimState::Pending { reason } => Some(format!("the claim {key} is pending: {reason}")),
    }
}
