//! Every source of a volume that Kubernetes has or had: where it may be, and what serves it on a node (volumes.md §12).
//!
//! This is the only list of sources. Code that decides by the kind of a source asks here.

/// What serves a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServedBy {
    /// The agent itself, or its runtime: files, folders of the node, images, and the claims that lead to another source.
    Node,
    /// A plugin of volume-manager.
    Plugin,
    /// The CSI driver that has taken over from the plugin of old.
    CsiMigration,
    /// Nothing: Kubernetes has removed the source, or disabled it for good. volume-manager says since when, and what to use instead.
    Nothing,
}

/// Where a source may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Pod,
    PersistentVolume,
    Both,
}

use Place::{Both, PersistentVolume, Pod};
use ServedBy::{CsiMigration, Node, Nothing, Plugin};

/// A source by its wire name, where it may be, and what serves it; sorted by name.
const SOURCES: [(&str, Place, ServedBy); 31] = [
    ("awsElasticBlockStore", Both, CsiMigration),
    ("azureDisk", Both, CsiMigration),
    ("azureFile", Both, CsiMigration),
    ("cephfs", Both, Nothing),
    ("cinder", Both, CsiMigration),
    ("configMap", Pod, Node),
    ("csi", Both, Plugin),
    ("downwardAPI", Pod, Node),
    ("emptyDir", Pod, Node),
    ("ephemeral", Pod, Node),
    ("fc", Both, Plugin),
    ("flexVolume", Both, Plugin),
    ("flocker", Both, Nothing),
    ("gcePersistentDisk", Both, CsiMigration),
    ("gitRepo", Pod, Nothing),
    ("glusterfs", Both, Nothing),
    ("hostPath", Both, Node),
    ("image", Pod, Node),
    ("iscsi", Both, Plugin),
    ("local", PersistentVolume, Plugin),
    ("nfs", Both, Plugin),
    ("persistentVolumeClaim", Pod, Node),
    ("photonPersistentDisk", Both, Nothing),
    ("portworxVolume", Both, CsiMigration),
    ("projected", Pod, Node),
    ("quobyte", Both, Nothing),
    ("rbd", Both, Nothing),
    ("scaleIO", Both, Nothing),
    ("secret", Pod, Node),
    ("storageos", Both, Nothing),
    ("vsphereVolume", Both, CsiMigration),
];

/// What serves the source with the wire name `kind`, in a pod or a PersistentVolume; `None` if there is no such source.
pub fn served_by(kind: &str) -> Option<ServedBy> {
    SOURCES.iter().find(|(name, ..)| *name == kind).map(|(.., by)| *by)
}

/// The sources that a volume in the spec of a pod may have, by wire name.
pub fn pod_sources() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().filter(|(_, place, _)| *place != PersistentVolume).map(|(name, ..)| *name)
}

/// The sources that a PersistentVolume may have, by wire name.
pub fn persistent_volume_sources() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().filter(|(_, place, _)| *place != Pod).map(|(name, ..)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_sorted_and_unique() {
        assert!(SOURCES.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn an_unknown_source_is_served_by_nothing_known() {
        assert_eq!(served_by("floppy"), None);
        assert_eq!(served_by("NFS"), None);
        assert_eq!(served_by("rbd"), Some(Nothing));
    }

    #[test]
    fn local_volumes_are_persistent_only_and_claims_are_in_pods_only() {
        assert!(persistent_volume_sources().any(|source| source == "local"));
        assert!(!pod_sources().any(|source| source == "local"));
        assert!(pod_sources().any(|source| source == "persistentVolumeClaim"));
        assert!(!persistent_volume_sources().any(|source| source == "persistentVolumeClaim"));
        assert_eq!((pod_sources().count(), persistent_volume_sources().count()), (30, 22));
    }
}
