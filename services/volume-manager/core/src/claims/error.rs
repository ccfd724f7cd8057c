//! Errors of claims, each with who has to act.

use std::fmt;

use super::mode::{AccessMode, VolumeMode};
use crate::node_selector::RequirementError;
use crate::wait_owner::WaitOwner;

/// Why a volume with a claim cannot be used, with the claim's name (volumes.md §3.4 step 7).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("error processing PVC {claim}: {cause}")]
pub struct ClaimError {
    /// `namespace/name` of the claim.
    pub claim: String,
    /// What is wrong.
    pub cause: ClaimCause,
}

impl ClaimError {
    /// Who has to act.
    pub fn wait_owner(&self) -> WaitOwner {
        self.cause.wait_owner()
    }
}

/// Where a volume's claim comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimKind {
    /// `persistentVolumeClaim`: somebody has created it.
    Named,
    /// `ephemeral`: the control plane creates it for the pod.
    Ephemeral,
}

/// What a claim without a PersistentVolume waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pending {
    /// A provisioner has been asked for a PersistentVolume.
    Provisioner(String),
    /// The claim asks for the PersistentVolume with this name.
    Volume(String),
    /// pod-config binds the claim, as there is no API server, and says why it cannot.
    Explained(String),
    /// The claim's storage class is empty, so nobody creates a PersistentVolume for it.
    NoClass,
    /// A storage class, by name, or the default one.
    Class(Option<String>),
}

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Provisioner(name) => {
                write!(f, "it waits for a PersistentVolume from the provisioner {name}")
            }
            Self::Volume(name) => write!(f, "it waits for the PersistentVolume {name}"),
            Self::Explained(reason) => f.write_str(reason),
            Self::NoClass => f.write_str("it has no storage class; create a PersistentVolume that fits it"),
            Self::Class(class) => {
                match class {
                    Some(class) => write!(f, "it waits for a PersistentVolume of the storage class {class}")?,
                    None => f.write_str("it waits for a PersistentVolume of the default storage class")?,
                }
                f.write_str(
                    " (a class with WaitForFirstConsumer gives none to a pod that sets spec.nodeName itself)",
                )
            }
        }
    }
}

/// What is wrong with a claim, with its PersistentVolume, or with their use by the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimCause {
    /// The claim does not exist.
    #[error("failed to fetch PVC from API server: persistentvolumeclaims {name:?} not found; {}", way_out(*.kind))]
    ClaimMissing {
        /// Its name.
        name: String,
        /// Where it comes from.
        kind: ClaimKind,
    },
    /// The Node authorizer does not show the claim to this node.
    #[error(
        "failed to fetch PVC from API server: persistentvolumeclaims {name:?} not found or not yet visible to this node; if it does not exist, {}",
        way_out(*.kind)
    )]
    ClaimNotVisible {
        /// Its name.
        name: String,
        /// Where it comes from.
        kind: ClaimKind,
    },
    /// The claim could not be read.
    #[error("failed to fetch PVC from API server: {why}")]
    ClaimUnreadable {
        /// The error of the read.
        why: String,
    },
    /// The claim is being deleted and no longer protected, so that its volume may go at any time.
    #[error("PVC is being deleted; once it is gone, {}", way_out(*.kind))]
    BeingDeleted {
        /// Where it comes from.
        kind: ClaimKind,
    },
    /// The claim has no PersistentVolume yet.
    #[error("PVC is not bound: {0}")]
    Pending(Pending),
    /// The claim has lost its PersistentVolume.
    #[error(
        "PVC is not bound: its phase is Lost, because the PersistentVolume {volume:?} is gone or belongs to another claim; delete the claim and create it again"
    )]
    Lost {
        /// The PersistentVolume that it had.
        volume: String,
    },
    /// The API has no such phase.
    #[error("PVC is not bound: this version does not know its phase {phase:?}")]
    UnknownPhase {
        /// The phase as written.
        phase: String,
    },
    /// The claim is bound, and to nothing.
    #[error("PVC has empty pvc.Spec.VolumeName although it is bound; delete the claim and create it again")]
    NoVolumeName,
    /// The claim of an `ephemeral` volume belongs to an earlier pod of the same name.
    #[error(
        "PVC {claim} was not created for pod {pod} (pod is not owner); it belongs to an earlier pod of the same name and is removed with it"
    )]
    EarlierPod {
        /// `namespace/name` of the claim.
        claim: String,
        /// `namespace/name` of the pod.
        pod: String,
    },
    /// Somebody else has created a claim with the name that an `ephemeral` volume needs.
    #[error(
        "PVC {claim} was not created for pod {pod} (pod is not owner); rename the pod or its volume, or delete the claim"
    )]
    NotForPod {
        /// `namespace/name` of the claim.
        claim: String,
        /// `namespace/name` of the pod.
        pod: String,
    },
    /// The PersistentVolume does not exist.
    #[error(
        "failed to fetch PV {name} from API server: persistentvolumes {name:?} not found; restore it, or delete the claim and create it again"
    )]
    VolumeMissing {
        /// Its name.
        name: String,
    },
    /// The Node authorizer does not show the PersistentVolume to this node.
    #[error(
        "failed to fetch PV {name} from API server: persistentvolumes {name:?} not found or not yet visible to this node; if it does not exist, restore it, or delete the claim and create it again"
    )]
    VolumeNotVisible {
        /// Its name.
        name: String,
    },
    /// The PersistentVolume could not be read.
    #[error("failed to fetch PV {name} from API server: {why}")]
    VolumeUnreadable {
        /// Its name.
        name: String,
        /// The error of the read.
        why: String,
    },
    /// The PersistentVolume that was read is not the one that the claim is bound to.
    #[error("the claim is bound to the PersistentVolume {expected}, but {found:?} was read")]
    OtherVolume {
        /// The name in the claim.
        expected: String,
        /// The name that was read.
        found: String,
    },
    /// The PersistentVolume does not refer to a claim yet, or not to its UID.
    #[error("PV {volume} is not bound to the claim yet: its spec.claimRef is missing or has no UID")]
    VolumeNotBound {
        /// Its name.
        volume: String,
    },
    /// The PersistentVolume belongs to another claim, which may have had the same name.
    #[error(
        "PV {volume} is bound to the claim {other} with UID {other_uid:?}, not to this one with UID {uid:?}; delete the claim and create it again, or remove spec.claimRef of the PersistentVolume if this claim may have its data"
    )]
    OtherClaim {
        /// Name of the PersistentVolume.
        volume: String,
        /// `namespace/name` of the other claim.
        other: String,
        /// The other claim's UID.
        other_uid: String,
        /// The claim's UID.
        uid: String,
    },
    /// The PersistentVolume has no volume mode.
    #[error("PV {volume} has no spec.volumeMode; create it again with Filesystem or Block")]
    NoVolumeMode {
        /// Its name.
        volume: String,
    },
    /// The API has no such volume mode.
    #[error("{object} has the unknown volumeMode {mode:?}; create it again with Filesystem or Block")]
    UnknownVolumeMode {
        /// The claim or PersistentVolume.
        object: String,
        /// The mode as written.
        mode: String,
    },
    /// The claim asks for another volume mode than that of its PersistentVolume.
    #[error(
        "PV {volume} has volumeMode {found}, but the claim asks for {requested}; create one of them again"
    )]
    OtherVolumeMode {
        /// Name of the PersistentVolume.
        volume: String,
        /// Its mode.
        found: VolumeMode,
        /// The claim's mode.
        requested: VolumeMode,
    },
    /// The API has no such access mode.
    #[error(
        "{object} has the unknown access mode {mode:?}; use ReadWriteOnce, ReadOnlyMany, ReadWriteMany or ReadWriteOncePod"
    )]
    UnknownAccessMode {
        /// The claim or PersistentVolume.
        object: String,
        /// The mode as written.
        mode: String,
    },
    /// The claim asks for access modes that its PersistentVolume lacks.
    #[error("PV {volume} lacks the access modes {} that the claim asks for; add them to the PersistentVolume, or create the claim again without them", names(.missing))]
    AccessModes {
        /// Name of the PersistentVolume.
        volume: String,
        /// The modes that it lacks, in the claim's order.
        missing: Vec<AccessMode>,
    },
    /// The claim asks for another storage class.
    #[error(
        "PV {volume} has the storage class {found:?}, but the claim asks for {requested:?}; change spec.storageClassName of the PersistentVolume, or create the claim again"
    )]
    StorageClass {
        /// Name of the PersistentVolume.
        volume: String,
        /// Its class.
        found: String,
        /// The claim's class.
        requested: String,
    },
    /// Containers use the volume in a way that its mode does not allow.
    #[error(transparent)]
    Use(#[from] UseError),
}

impl ClaimCause {
    /// Who has to act.
    pub fn wait_owner(&self) -> WaitOwner {
        match self {
            Self::ClaimMissing { kind, .. }
            | Self::ClaimNotVisible { kind, .. }
            | Self::BeingDeleted { kind } => match kind {
                ClaimKind::Named => WaitOwner::You,
                ClaimKind::Ephemeral => WaitOwner::EphemeralVolumeController,
            },
            Self::ClaimUnreadable { .. } | Self::VolumeUnreadable { .. } | Self::OtherVolume { .. } => {
                WaitOwner::ApiServer
            }
            Self::Pending(pending) => match pending {
                Pending::Provisioner(name) => WaitOwner::Provisioner(name.clone()),
                Pending::Volume(_) | Pending::Class(_) => WaitOwner::VolumeController,
                Pending::NoClass | Pending::Explained(_) => WaitOwner::You,
            },
            Self::EarlierPod { .. } => WaitOwner::GarbageCollector,
            // The controller writes the reference again while the claim names the volume.
            Self::VolumeNotBound { .. } => WaitOwner::VolumeController,
            Self::Lost { .. }
            | Self::UnknownPhase { .. }
            | Self::NoVolumeName
            | Self::NotForPod { .. }
            | Self::VolumeMissing { .. }
            | Self::VolumeNotVisible { .. }
            | Self::OtherClaim { .. }
            | Self::NoVolumeMode { .. }
            | Self::UnknownVolumeMode { .. }
            | Self::OtherVolumeMode { .. }
            | Self::UnknownAccessMode { .. }
            | Self::AccessModes { .. }
            | Self::StorageClass { .. }
            | Self::Use(_) => WaitOwner::You,
        }
    }
}

const fn way_out(kind: ClaimKind) -> &'static str {
    match kind {
        ClaimKind::Named => "create the claim",
        ClaimKind::Ephemeral => "the control plane creates the claim for the pod",
    }
}

/// Containers use a volume in a way that its mode does not allow (volumes.md §3.4 step 6). Only a changed pod, or a
/// claim with another volume, helps.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("volume {volume} has volumeMode {mode}, but is specified in {field}")]
pub struct UseError {
    /// `spec.volumes[].name`.
    pub volume: String,
    /// Its mode.
    pub mode: VolumeMode,
    /// The field of the containers: `volumeMounts` or `volumeDevices`.
    pub field: &'static str,
}

/// Why a PersistentVolume is not mounted for a pod (volumes.md §3.9 steps 2 and 4).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MountCheckError {
    /// Its node affinity does not match this node.
    #[error("no matching NodeSelectorTerms: PV {volume} cannot be used on node {node}{}; delete the pod so that it is scheduled to another node", list(.invalid))]
    NodeAffinity {
        /// Name of the PersistentVolume.
        volume: String,
        /// Name of the node.
        node: String,
        /// The requirements that are not valid.
        invalid: Vec<RequirementError>,
    },
    /// It has mount options, and its plugin cannot use any. The options may be secret, so that they are not shown.
    #[error("mount options are not supported for this volume type; remove {field} of PV {volume}")]
    MountOptions {
        /// Name of the PersistentVolume.
        volume: String,
        /// Where it has them.
        field: &'static str,
    },
}

impl MountCheckError {
    /// The step that the event names, for example in `MountVolume.SetUp failed for volume "v" : …`.
    pub const fn step(&self, mode: VolumeMode) -> &'static str {
        match (self, mode) {
            (Self::NodeAffinity { .. }, VolumeMode::Filesystem) => "MountVolume.NodeAffinity check",
            (Self::NodeAffinity { .. }, VolumeMode::Block) => "MapVolume.NodeAffinity check",
            // Options of block volumes are not checked.
            (Self::MountOptions { .. }, VolumeMode::Filesystem | VolumeMode::Block) => {
                "MountVolume.MountOptionSupport check"
            }
        }
    }

    /// Who has to act.
    pub const fn wait_owner(&self) -> WaitOwner {
        match self {
            Self::NodeAffinity { .. } | Self::MountOptions { .. } => WaitOwner::You,
        }
    }
}

fn names(modes: &[AccessMode]) -> String {
    modes.iter().map(|mode| mode.as_str()).collect::<Vec<_>>().join(", ")
}

fn list(invalid: &[RequirementError]) -> String {
    invalid.iter().map(|error| format!(", {error}")).collect()
}
