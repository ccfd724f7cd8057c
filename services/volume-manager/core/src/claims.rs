//! Claims: which PersistentVolume a volume of a pod has (volumes.md §3.4), and whether this pod may mount it here
//! (volumes.md §3.9 steps 2 and 4).
//!
//! The order of the calls: [`check_claim`] with the claim as read from the API server, [`check_volume`] with the
//! PersistentVolume that the claim is bound to, [`ResolvedVolume::check_use`], and before each mount [`check_node`]
//! and [`check_mount_options`]. Each error says who has to act ([`WaitOwner`](crate::wait_owner::WaitOwner)).

mod error;
mod mode;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use keelson_desired_set::PodRef;

pub use self::error::{ClaimCause, ClaimError, ClaimKind, MountCheckError, Pending, UseError};
pub use self::mode::{AccessMode, VolumeMode};
use crate::mount_options::split;
use crate::node_selector::{self, NodeFacts};
use crate::objects::{ObjectReference, PersistentVolume, PersistentVolumeClaim};

/// The finalizer that keeps a claim while a pod uses it.
const PROTECTION_FINALIZER: &str = "kubernetes.io/pvc-protection";
/// Annotation of a PersistentVolume: the group that owns its files.
const GID_ANNOTATION: &str = "pv.beta.kubernetes.io/gid";
/// Annotation of a PersistentVolume: its mount options, separated by commas.
const MOUNT_OPTIONS_ANNOTATION: &str = "volume.beta.kubernetes.io/mount-options";
/// Annotation of claims and PersistentVolumes: the storage class. It takes precedence over the field.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
/// Annotations of a claim: the provisioner that has to create its PersistentVolume. The first one takes precedence.
const PROVISIONER_ANNOTATIONS: [&str; 2] =
    ["volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner"];
/// The greatest group that the API allows as a supplemental group.
const MAX_GID: i64 = i32::MAX as i64;

/// How a volume of a pod names its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimSource<'a> {
    /// `persistentVolumeClaim`.
    Named {
        /// `claimName`.
        claim_name: &'a str,
        /// `readOnly`.
        read_only: bool,
    },
    /// `ephemeral`: the control plane creates the claim for the pod.
    Ephemeral,
}

/// A volume of a pod that needs a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimRequest<'a> {
    /// The pod.
    pub pod: &'a PodRef,
    /// `spec.volumes[].name`.
    pub volume: &'a str,
    /// How it names its claim.
    pub source: ClaimSource<'a>,
}

impl ClaimRequest<'_> {
    /// The claim's name. Its namespace is the pod's.
    pub fn claim_name(&self) -> String {
        match self.source {
            ClaimSource::Named { claim_name, .. } => claim_name.to_owned(),
            ClaimSource::Ephemeral => claim_name(&self.pod.name, self.volume),
        }
    }

    const fn kind(&self) -> ClaimKind {
        match self.source {
            ClaimSource::Named { .. } => ClaimKind::Named,
            ClaimSource::Ephemeral => ClaimKind::Ephemeral,
        }
    }

    /// The volume is used read-only (volumes.md §3.4 step 5).
    const fn read_only(&self) -> bool {
        match self.source {
            ClaimSource::Named { read_only, .. } => read_only,
            ClaimSource::Ephemeral => false,
        }
    }
}

/// The name of the claim of an `ephemeral` volume (volumes.md §3.4 step 1).
pub fn claim_name(pod: &str, volume: &str) -> String {
    format!("{pod}-{volume}")
}

/// The answer to a read of an object.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched<'a, T> {
    /// The object.
    Found(&'a T),
    /// The API server says that it does not exist.
    Missing,
    /// The Node authorizer does not show it: it does not exist, or the pod that refers to it has just been bound.
    NotVisible,
    /// The read failed, or was refused, for this reason.
    Failed(&'a str),
}

/// A claim that the pod may use and that is bound to a PersistentVolume.
#[derive(Debug, Clone, PartialEq)]
pub struct BoundClaim<'a> {
    /// `namespace/name`.
    key: String,
    claim: &'a PersistentVolumeClaim,
    read_only: bool,
}

impl<'a> BoundClaim<'a> {
    /// The PersistentVolume that has to be read next.
    pub fn volume_name(&self) -> &'a str {
        &self.claim.spec.volume_name
    }

    fn error(&self, cause: ClaimCause) -> ClaimError {
        ClaimError { claim: self.key.clone(), cause }
    }
}

/// A PersistentVolume and a claim that are bound to each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedVolume<'a> {
    /// The PersistentVolume.
    pub volume: &'a PersistentVolume,
    /// Its mode.
    pub mode: VolumeMode,
    /// The pod uses it read-only.
    pub read_only: bool,
    /// `namespace/name` of the claim.
    claim: String,
}

impl ResolvedVolume<'_> {
    /// As [`check_use`], with the claim's name in the error.
    pub fn check_use(&self, volume: &str, used: VolumeUse) -> Result<(), ClaimError> {
        let error = |error| ClaimError { claim: self.claim.clone(), cause: ClaimCause::Use(error) };
        check_use(volume, self.mode, used).map_err(error)
    }
}

/// Checks the claim of a volume (volumes.md §3.4 steps 2 and 3).
///
/// A claim that is being deleted is fine as long as it is protected, so that running pods survive a restart of the
/// agent.
pub fn check_claim<'a>(
    request: &ClaimRequest<'_>,
    fetched: Fetched<'a, PersistentVolumeClaim>,
) -> Result<BoundClaim<'a>, ClaimError> {
    let key = format!("{}/{}", request.pod.namespace, request.claim_name());
    let checked = match fetched {
        Fetched::Found(claim) => claim_cause(request, &key, claim).map_or(Ok(claim), Err),
        Fetched::Missing => {
            Err(ClaimCause::ClaimMissing { name: request.claim_name(), kind: request.kind() })
        }
        Fetched::NotVisible => {
            Err(ClaimCause::ClaimNotVisible { name: request.claim_name(), kind: request.kind() })
        }
        Fetched::Failed(why) => Err(ClaimCause::ClaimUnreadable { why: why.to_owned() }),
    };
    match checked {
        Ok(claim) => Ok(BoundClaim { key, claim, read_only: request.read_only() }),
        Err(cause) => Err(ClaimError { claim: key, cause }),
    }
}

/// The first rule that a claim breaks.
fn claim_cause(request: &ClaimRequest<'_>, key: &str, claim: &PersistentVolumeClaim) -> Option<ClaimCause> {
    let is_protected = claim.metadata.finalizers.iter().any(|name| name == PROTECTION_FINALIZER);
    if claim.metadata.deletion_timestamp.is_some() && !is_protected {
        return Some(ClaimCause::BeingDeleted { kind: request.kind() });
    }
    match claim.status.phase.as_str() {
        "Bound" => {}
        // A new claim has no phase yet.
        "" | "Pending" => return Some(ClaimCause::Pending(pending(claim))),
        "Lost" => return Some(ClaimCause::Lost { volume: claim.spec.volume_name.clone() }),
        phase => return Some(ClaimCause::UnknownPhase { phase: phase.to_owned() }),
    }
    if claim.spec.volume_name.is_empty() {
        return Some(ClaimCause::NoVolumeName);
    }
    match request.source {
        ClaimSource::Named { .. } => None,
        ClaimSource::Ephemeral => owner_cause(request.pod, key, claim),
    }
}

/// Why the claim of an `ephemeral` volume was not created for the pod. Its controller has to be the pod, by UID.
fn owner_cause(pod: &PodRef, key: &str, claim: &PersistentVolumeClaim) -> Option<ClaimCause> {
    let controller = claim.metadata.owner_references.iter().find(|owner| owner.controller == Some(true));
    if controller.is_some_and(|owner| owner.uid == pod.uid && !pod.uid.is_empty()) {
        return None;
    }
    let is_earlier = controller.is_some_and(|owner| owner.kind == "Pod" && owner.name == pod.name);
    let (claim, pod) = (key.to_owned(), format!("{}/{}", pod.namespace, pod.name));
    Some(if is_earlier {
        ClaimCause::EarlierPod { claim, pod }
    } else {
        ClaimCause::NotForPod { claim, pod }
    })
}

/// Why pod-config could not bind the claim: the message of its condition `Bound`, a type that the API does not have.
fn binding_reason(claim: &PersistentVolumeClaim) -> Option<&str> {
    let condition = claim.status.conditions.iter().find(|condition| condition["type"] == "Bound")?;
    condition["message"].as_str()
}

/// What an unbound claim waits for.
fn pending(claim: &PersistentVolumeClaim) -> Pending {
    let annotations = &claim.metadata.annotations;
    let mut provisioners = PROVISIONER_ANNOTATIONS.iter().filter_map(|name| annotations.get(*name));
    if let Some(reason) = binding_reason(claim) {
        Pending::Explained(reason.to_owned())
    } else if !claim.spec.volume_name.is_empty() {
        Pending::Volume(claim.spec.volume_name.clone())
    } else if let Some(name) = provisioners.find(|name| !name.is_empty()) {
        Pending::Provisioner(name.clone())
    } else {
        match claim_class(claim) {
            Some("") => Pending::NoClass,
            class => Pending::Class(class.map(str::to_owned)),
        }
    }
}

/// Checks that the PersistentVolume is the claim's and is what the claim asks for (volumes.md §3.4 steps 4 to 6).
///
/// Parity: a kubelet checks neither access modes nor storage class nor the claim's own volume mode; it relies on the
/// controller, which skips the first two when an administrator has bound the PersistentVolume to the claim beforehand.
pub fn check_volume<'a>(
    claim: &BoundClaim<'_>,
    fetched: Fetched<'a, PersistentVolume>,
) -> Result<ResolvedVolume<'a>, ClaimError> {
    let name = claim.volume_name().to_owned();
    let checked = match fetched {
        Fetched::Found(volume) => match binding_cause(claim, volume) {
            Some(cause) => Err(cause),
            None => check_request(claim.claim, volume).map(|mode| (volume, mode)),
        },
        Fetched::Missing => Err(ClaimCause::VolumeMissing { name }),
        Fetched::NotVisible => Err(ClaimCause::VolumeNotVisible { name }),
        Fetched::Failed(why) => Err(ClaimCause::VolumeUnreadable { name, why: why.to_owned() }),
    };
    match checked {
        Ok((volume, mode)) => {
            Ok(ResolvedVolume { volume, mode, read_only: claim.read_only, claim: claim.key.clone() })
        }
        Err(cause) => Err(claim.error(cause)),
    }
}

/// Why the PersistentVolume is not bound to the claim.
fn binding_cause(claim: &BoundClaim<'_>, volume: &PersistentVolume) -> Option<ClaimCause> {
    let name = &volume.metadata.name;
    if name != claim.volume_name() {
        return Some(ClaimCause::OtherVolume {
            expected: claim.volume_name().to_owned(),
            found: name.clone(),
        });
    }
    let uid = &claim.claim.metadata.uid;
    match &volume.spec.claim_ref {
        None => Some(ClaimCause::VolumeNotBound { volume: name.clone() }),
        Some(ObjectReference { uid: bound, .. }) if bound == uid && !uid.is_empty() => None,
        Some(ObjectReference { namespace, name: other, uid: other_uid }) => {
            let other = format!("{namespace}/{other}");
            Some(if other_uid.is_empty() && other == claim.key {
                ClaimCause::VolumeNotBound { volume: name.clone() }
            } else {
                let (other_uid, uid) = (other_uid.clone(), uid.clone());
                ClaimCause::OtherClaim { volume: name.clone(), other, other_uid, uid }
            })
        }
    }
}

/// The PersistentVolume's mode, if it has what the claim asks for.
fn check_request(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Result<VolumeMode, ClaimCause> {
    let name = &volume.metadata.name;
    let object = format!("PV {name}");
    let claim_text = "the claim".to_owned();

    let Some(mode) = &volume.spec.volume_mode else {
        return Err(ClaimCause::NoVolumeMode { volume: name.clone() });
    };
    let found = volume_mode(&object, mode)?;
    let requested = match &claim.spec.volume_mode {
        Some(mode) => volume_mode(&claim_text, mode)?,
        None => VolumeMode::Filesystem,
    };
    if found != requested {
        return Err(ClaimCause::OtherVolumeMode { volume: name.clone(), found, requested });
    }

    let modes = access_modes(&object, &volume.spec.access_modes)?;
    let mut missing = access_modes(&claim_text, &claim.spec.access_modes)?;
    missing.retain(|mode| !modes.contains(mode));
    if !missing.is_empty() {
        return Err(ClaimCause::AccessModes { volume: name.clone(), missing });
    }

    let class = volume_class(volume);
    match claim_class(claim) {
        Some(requested) if requested != class => Err(ClaimCause::StorageClass {
            volume: name.clone(),
            found: class.to_owned(),
            requested: requested.to_owned(),
        }),
        // Without a class the claim takes what the controller has chosen.
        Some(_) | None => Ok(found),
    }
}

fn volume_mode(object: &str, mode: &str) -> Result<VolumeMode, ClaimCause> {
    let error = || ClaimCause::UnknownVolumeMode { object: object.to_owned(), mode: mode.to_owned() };
    VolumeMode::parse(mode).ok_or_else(error)
}

fn access_modes(object: &str, modes: &[String]) -> Result<Vec<AccessMode>, ClaimCause> {
    let parse = |mode: &String| {
        let error = || ClaimCause::UnknownAccessMode { object: object.to_owned(), mode: mode.clone() };
        AccessMode::parse(mode).ok_or_else(error)
    };
    modes.iter().map(parse).collect()
}

/// The claim's storage class: empty for none, `None` for the default one.
fn claim_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    let annotation = claim.metadata.annotations.get(CLASS_ANNOTATION);
    annotation.or(claim.spec.storage_class_name.as_ref()).map(String::as_str)
}

/// The PersistentVolume's storage class; empty for none.
fn volume_class(volume: &PersistentVolume) -> &str {
    volume.metadata.annotations.get(CLASS_ANNOTATION).unwrap_or(&volume.spec.storage_class_name)
}

/// Which fields of a pod's containers name a volume; init and ephemeral containers count (volumes.md §3.2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumeUse {
    /// `volumeMounts` of at least one container.
    pub mounts: bool,
    /// `volumeDevices` of at least one container.
    pub devices: bool,
}

/// Checks that the pod's volume `volume` has the mode that its use needs (volumes.md §3.4 step 6). A volume without a
/// claim has the mode `Filesystem`.
pub fn check_use(volume: &str, mode: VolumeMode, used: VolumeUse) -> Result<(), UseError> {
    let field = match mode {
        VolumeMode::Block if used.mounts => "volumeMounts",
        VolumeMode::Filesystem if used.devices => "volumeDevices",
        VolumeMode::Block | VolumeMode::Filesystem => return Ok(()),
    };
    Err(UseError { volume: volume.to_owned(), mode, field })
}

/// Checks that the PersistentVolume can be used on this node (volumes.md §3.9 step 2).
pub fn check_node(volume: &PersistentVolume, node: &NodeFacts<'_>) -> Result<(), MountCheckError> {
    let affinity = volume.spec.node_affinity.as_ref();
    let Some(required) = affinity.and_then(|affinity| affinity.required.as_ref()) else { return Ok(()) };
    if node_selector::matches(required, node) {
        return Ok(());
    }
    Err(MountCheckError::NodeAffinity {
        volume: volume.metadata.name.clone(),
        node: node.name.to_owned(),
        invalid: node_selector::invalid_requirements(required),
    })
}

/// The PersistentVolume's mount options, sorted and without duplicates, for a plugin that supports them; an error if
/// there are any and it does not (volumes.md §3.9 step 4). The annotation takes precedence over the field, even when it
/// is empty. Only for volumes of mode `Filesystem`; CSI uses the field alone (volumes.md §11.5).
pub fn check_mount_options(
    volume: &PersistentVolume,
    plugin_supports_them: bool,
) -> Result<Vec<String>, MountCheckError> {
    let annotation = volume.metadata.annotations.get(MOUNT_OPTIONS_ANNOTATION);
    let (field, options): (_, Vec<&str>) = match annotation {
        Some(text) => (MOUNT_OPTIONS_ANNOTATION, split(text)),
        None => ("spec.mountOptions", volume.spec.mount_options.iter().map(String::as_str).collect()),
    };
    let options: BTreeSet<&str> = options.into_iter().filter(|option| !option.is_empty()).collect();
    if !options.is_empty() && !plugin_supports_them {
        return Err(MountCheckError::MountOptions { volume: volume.metadata.name.clone(), field });
    }
    Ok(options.into_iter().map(str::to_owned).collect())
}

/// Whether only one pod may use the PersistentVolume: `ReadWriteOncePod` is its only access mode. With several modes it
/// is not known which one a pod means.
pub fn is_single_pod(volume: &PersistentVolume) -> bool {
    let modes = &volume.spec.access_modes;
    !modes.is_empty() && modes.iter().all(|mode| mode == AccessMode::ReadWriteOncePod.as_str())
}

/// The group that a mounted PersistentVolume adds to the supplemental groups of sandbox and containers, unless the pod
/// has it among its own `supplementalGroups` (volumes.md §3.4 step 8).
///
/// Parity: a kubelet also adds integers that the API allows for no group, below 0 or above 2³¹ − 1; here they add none.
pub fn extra_gid(volume: &PersistentVolume, supplemental_groups: &[i64]) -> Option<i64> {
    let gid: i64 = volume.metadata.annotations.get(GID_ANNOTATION)?.parse().ok()?;
    ((0..=MAX_GID).contains(&gid) && !supplemental_groups.contains(&gid)).then_some(gid)
}
