//! Sources that nothing serves any more, and what to use instead.

use super::Origin;

/// A source that was removed. The text is that of the pod's event `FailedMount`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no volume plugin matched {object}: its source {kind} was removed in Kubernetes {since}; {advice}")]
pub struct Removed {
    /// The volume or PersistentVolume, with its name.
    pub object: String,
    /// The wire name of the source.
    pub kind: &'static str,
    /// The first release of Kubernetes without it, such as `1.31`.
    pub since: &'static str,
    /// What to do instead.
    pub advice: &'static str,
}

/// A source whose plugin is disabled for good. The text is that of the pod's event `FailedMount`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{object} cannot be set up: the plugin of its source gitRepo has been disabled (feature gate GitRepoVolumeDriver, \
     locked off in Kubernetes 1.36); let an init container clone the repository into an emptyDir"
)]
pub struct Disabled {
    /// The volume, with its name.
    pub object: String,
}

/// What to do when no particular driver has taken over.
const ANY_DRIVER: &str = "move the data to a volume of a CSI driver";

/// Wire name, first release without the source, advice.
const TABLE: [(&str, &str, &str); 8] = [
    ("cephfs", "1.31", "use the Ceph CSI driver cephfs.csi.ceph.com"),
    ("flocker", "1.25", ANY_DRIVER),
    ("glusterfs", "1.26", ANY_DRIVER),
    ("photonPersistentDisk", "1.16", ANY_DRIVER),
    ("quobyte", "1.25", "use the Quobyte CSI driver csi.quobyte.com"),
    ("rbd", "1.31", "use the Ceph CSI driver rbd.csi.ceph.com"),
    ("scaleIO", "1.22", "use the CSI driver csi-vxflexos.dellemc.com of Dell PowerFlex"),
    ("storageos", "1.25", ANY_DRIVER),
];

/// The removed source with the wire name `kind`.
pub(super) fn find(kind: &str, origin: &Origin<'_>) -> Option<Removed> {
    let (kind, since, advice) = TABLE.into_iter().find(|(name, ..)| *name == kind)?;
    Some(Removed { object: origin.to_string(), kind, since, advice })
}
