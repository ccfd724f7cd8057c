//! Which CSI volume serves a legacy in-tree source, and which sources are gone (volumes.md §12).

use std::fmt;

use keelson_kube_model::volume_source::{ServedBy, served_by};
use serde_json::Value;

pub use fields::{FieldError, LegacyError};
pub use removed::{Disabled, Removed};

pub use crate::csi::source::CsiSource;
use crate::objects::{PersistentVolume, VolumeNodeAffinity};
use fields::Fields;
use topology::TopologyKeys;

mod aws;
mod azure_disk;
mod azure_file;
mod cinder;
mod fields;
mod gce;
mod portworx;
mod removed;
#[cfg(test)]
mod tests;
mod topology;
mod vsphere;

/// The access mode of a volume that one node mounts.
const READ_WRITE_ONCE: &str = "ReadWriteOnce";
/// The access mode of a volume that many nodes mount read-only.
const READ_ONLY_MANY: &str = "ReadOnlyMany";
/// The access mode of a volume that many nodes mount.
const READ_WRITE_MANY: &str = "ReadWriteMany";
/// The access mode of a volume that one pod mounts.
const READ_WRITE_ONCE_POD: &str = "ReadWriteOncePod";

/// The names of the legacy plugins whose volumes CSI drivers serve, sorted.
pub const MIGRATED_PLUGINS: [&str; 7] = [
    aws::PLUGIN.name,
    azure_disk::PLUGIN.name,
    azure_file::PLUGIN.name,
    cinder::PLUGIN.name,
    gce::PLUGIN.name,
    portworx::PLUGIN.name,
    vsphere::PLUGIN.name,
];

/// The value of the CSINode's annotation `storage.alpha.kubernetes.io/migrated-plugins` (volumes.md §11.2).
pub fn migrated_plugins_annotation() -> String {
    MIGRATED_PLUGINS.join(",")
}

/// The object that contains a source.
#[derive(Debug, Clone, Copy)]
pub enum Origin<'a> {
    /// A volume in the spec of a pod.
    Inline {
        /// The pod's namespace.
        pod_namespace: &'a str,
        /// The volume's name in the pod's spec.
        volume: &'a str,
    },
    /// A PersistentVolume.
    Persistent(&'a PersistentVolume),
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline { volume, .. } => write!(f, "the volume {volume:?}"),
            Self::Persistent(volume) => write!(f, "the PersistentVolume {:?}", volume.metadata.name),
        }
    }
}

/// What serves a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Translation {
    /// The source is not legacy: a plugin of its own serves it.
    Native,
    /// A CSI driver serves it.
    Migrated(Box<Migrated>),
    /// Nothing serves it any more.
    Removed(Removed),
    /// Its plugin never sets up a volume and only cleans up (volumes.md §10.9).
    Disabled(Disabled),
}

/// A legacy source as a volume of a CSI driver. Storage metrics count it with the label `migrated="true"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// The name of the legacy plugin, one of [`MIGRATED_PLUGINS`].
    pub plugin: &'static str,
    /// The CSI volume.
    pub csi: CsiSource,
    /// The name of the synthetic PersistentVolume of an inline volume; `None` for a PersistentVolume, which keeps its own
    /// name. It may contain slashes: escape it before it becomes a name on disk.
    pub inline_name: Option<String>,
    /// The access modes of the volume, by wire name.
    pub access_modes: Vec<String>,
    /// The nodes that can reach it, in terms of the driver's topology labels.
    pub node_affinity: Option<VolumeNodeAffinity>,
}

impl Migrated {
    /// Whether the volume can be expanded on the node: inline volumes cannot. Their volumeMode is always Filesystem.
    pub const fn is_expandable(&self) -> bool {
        self.inline_name.is_none()
    }
}

/// Translates the source with the wire name `kind` and the JSON `spec`.
///
/// Depends only on the arguments. The controllers of the control plane translate the same source by the same rules, so
/// that both arrive at one volume handle and with it at one VolumeAttachment.
pub fn translate(kind: &str, spec: &Value, origin: Origin<'_>) -> Result<Translation, LegacyError> {
    let migrate = match kind {
        "awsElasticBlockStore" => aws::migrate,
        "azureDisk" => azure_disk::migrate,
        "azureFile" => azure_file::migrate,
        "cinder" => cinder::migrate,
        "gcePersistentDisk" => gce::migrate,
        "portworxVolume" => portworx::migrate,
        "vsphereVolume" => vsphere::migrate,
        "gitRepo" => return Ok(Translation::Disabled(Disabled { object: origin.to_string() })),
        _ if is_native(kind) => return Ok(Translation::Native),
        _ => {
            return removed::find(kind, &origin)
                .map(Translation::Removed)
                .ok_or_else(|| LegacyError::new(&origin, kind, FieldError::UnknownSource));
        }
    };
    let fields = Fields::read(kind, spec, origin)?;
    migrate(&fields).map(|volume| Translation::Migrated(Box::new(volume)))
}

/// Whether the source is not legacy. Claims and generic ephemeral volumes are resolved to a PersistentVolume first.
fn is_native(kind: &str) -> bool {
    matches!(served_by(kind), Some(ServedBy::Node | ServedBy::Plugin))
}

/// A legacy plugin and the driver that has taken over its volumes.
struct Plugin {
    name: &'static str,
    driver: &'static str,
    /// `None`: the node affinity stays as it is.
    topology: Option<TopologyKeys>,
}

impl Plugin {
    /// A volume of the driver without attributes and secrets.
    fn volume(&self, volume_handle: impl Into<String>, fs_type: &str, read_only: bool) -> CsiSource {
        CsiSource {
            driver: self.driver.to_owned(),
            volume_handle: volume_handle.into(),
            fs_type: fs_type.to_owned(),
            read_only,
            ..CsiSource::default()
        }
    }

    /// The whole volume. `id` identifies the inline volume in the name of its synthetic PersistentVolume, and
    /// `inline_mode` is its access mode; a PersistentVolume has both of its own.
    fn migrated(&self, origin: Origin<'_>, csi: CsiSource, id: &str, inline_mode: &str) -> Migrated {
        let (inline_name, access_modes, node_affinity) = match origin {
            Origin::Inline { .. } => {
                (Some(format!("{}-{id}", self.driver)), vec![inline_mode.to_owned()], None)
            }
            Origin::Persistent(volume) => {
                let affinity = match &self.topology {
                    Some(keys) => keys.rewrite(volume),
                    None => volume.spec.node_affinity.clone(),
                };
                (None, volume.spec.access_modes.clone(), affinity)
            }
        };
        Migrated { plugin: self.name, csi, inline_name, access_modes, node_affinity }
    }
}
