//! What the task knows about volumes besides the worlds of the core: their specs, and where they are on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use keelson_volume_manager_core::claims::{self, VolumeMode};
use keelson_volume_manager_core::expansion::{Origin, is_expandable};
use keelson_volume_manager_core::operations::{PodUid, VolumeName};
use keelson_volume_manager_core::world::{MountLabel, WantedVolume};

use super::claims::Claims;
use crate::metrics::PluginLabel;
use crate::plugins::{DevicePlace, Identity, Plugin, PluginError, VolumePlace, VolumeSpec};
use crate::quantities::storage;
use crate::selinux::VolumeLabels;

/// A volume of a pod.
pub(super) type PodVolume = (VolumeName, PodUid);

/// A folder of a plugin that this version does not have, found at startup: the pod, and the name of the volume's folder. Something
/// may be mounted there.
pub(crate) type ForeignFolder = (PodUid, String);

/// A volume that a pod wants, with its plugin.
#[derive(Debug, Clone)]
pub(crate) struct ResolvedSpec {
    /// The plugin that provides it.
    pub(crate) plugin: Arc<dyn Plugin>,
    /// What the plugin says about it.
    pub(crate) identity: Identity,
    /// What it is.
    pub(crate) spec: Arc<VolumeSpec>,
    /// Its SELinux labels.
    pub(crate) labels: VolumeLabels,
}

/// A volume that a pod cannot have as long as others use it with another SELinux label.
#[derive(Debug, Clone)]
pub(super) struct Refused {
    pub(super) resolved: ResolvedSpec,
    pub(super) error: PluginError,
}

impl ResolvedSpec {
    /// The unique name on this node (volumes.md §1).
    pub(crate) fn name(&self) -> VolumeName {
        match &self.identity.shared_name {
            Some(name) => name.clone(),
            None => {
                per_pod_name(&self.plugin.plugin_name(&self.spec), &self.spec.pod.uid, &self.spec.inner_name)
            }
        }
    }

    pub(super) fn pod(&self) -> PodUid {
        self.spec.pod.uid.as_str().into()
    }

    /// Whether the node ever grows the volume.
    pub(super) fn is_expandable(&self) -> bool {
        let origin = match (&self.spec.persistent, &self.spec.claim) {
            (Some(_), Some(_)) => Origin::PersistentVolume,
            (Some(_), None) => Origin::InlineMigrated,
            (None, _) => Origin::Inline,
        };
        is_expandable(origin, self.identity.can_expand)
    }

    /// The entry of the desired world. `now`: milliseconds.
    pub(super) fn wanted(&self, now: u64) -> WantedVolume {
        let spec = &self.spec;
        let persistent = spec.persistent.as_deref();
        let size = persistent.filter(|_| !spec.read_only && self.is_expandable());
        WantedVolume {
            volume: self.name(),
            pod: self.pod(),
            outer_name: spec.outer_name.clone(),
            inner_name: spec.inner_name.clone(),
            shape: self.identity.shape,
            is_single_pod: persistent.is_some_and(claims::is_single_pod),
            label: self
                .labels
                .labels
                .mounted
                .as_ref()
                .map_or(MountLabel::Unlabelled, |label| MountLabel::Context(label.as_str().to_owned())),
            wanted_label: self.labels.labels.wanted.clone(),
            gid: persistent.and_then(|volume| claims::extra_gid(volume, &[])),
            size_limit: None,
            size: size.and_then(|volume| storage(volume.spec.capacity.get("storage")?)),
            is_set_up_each_sync: self.identity.is_set_up_each_sync,
            requested_at: now,
        }
    }

    /// The plugin, as metrics label it.
    pub(super) fn label(&self) -> PluginLabel {
        let driver = self.spec.source["driver"].as_str();
        PluginLabel::new(&self.plugin.plugin_name(&self.spec), driver, self.spec.is_migrated)
    }

    pub(super) fn place(&self) -> VolumePlace {
        VolumePlace {
            volume: self.name(),
            pod: self.pod(),
            plugin: self.plugin.plugin_name(&self.spec),
            inner_name: self.spec.inner_name.clone(),
            is_block: self.spec.mode == VolumeMode::Block,
        }
    }
}

/// The unique name of a volume that a pod does not share.
pub(super) fn per_pod_name(plugin: &str, uid: &str, inner_name: &str) -> VolumeName {
    format!("{plugin}/{uid}-{inner_name}").into()
}

/// The plugin of a volume that was found at startup, as metrics label it. Whether the volume has a legacy source is not on disk:
/// it counts as one that has none.
pub(super) fn found_label(plugin: &str, volume: &VolumeName) -> PluginLabel {
    let driver =
        volume.as_str().strip_prefix(plugin).and_then(|rest| rest.strip_prefix('/')?.split_once('^'));
    PluginLabel::new(plugin, driver.map(|(driver, _)| driver), false)
}

/// A volume of a pod that is, or may be, on disk.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub(super) plugin: Arc<dyn Plugin>,
    pub(super) place: VolumePlace,
    /// What containers get, once it is set up.
    pub(super) host_path: Option<PathBuf>,
    /// The files have SELinux labels that the runtime may change.
    pub(super) has_file_labels: bool,
    pub(super) label: PluginLabel,
}

/// A device that is, or may be, mounted for pods.
#[derive(Debug, Clone)]
pub(super) struct PlacedDevice {
    pub(super) plugin: Arc<dyn Plugin>,
    pub(super) inner_name: String,
    pub(super) is_block: bool,
    pub(super) label: PluginLabel,
}

impl PlacedDevice {
    pub(super) fn place(
        &self,
        volume: &VolumeName,
        device_path: Option<String>,
        device_mount_path: Option<String>,
    ) -> DevicePlace {
        DevicePlace {
            volume: volume.clone(),
            inner_name: self.inner_name.clone(),
            is_block: self.is_block,
            device_path,
            device_mount_path,
        }
    }
}

/// Everything that the task remembers.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// The volumes that pods want.
    pub(super) specs: BTreeMap<PodVolume, ResolvedSpec>,
    /// The names that a pod has for a volume.
    pub(super) placed: BTreeMap<PodVolume, Placed>,
    pub(super) devices: BTreeMap<VolumeName, PlacedDevice>,
    /// The last error of an operation for a volume of a pod, until one succeeds.
    pub(super) errors: BTreeMap<PodVolume, PluginError>,
    /// Pods whose volumes may be torn down.
    pub(super) released: BTreeSet<PodUid>,
    /// Pods that are being stopped: nothing more is set up for them.
    pub(super) stopping: BTreeSet<PodUid>,
    /// By the name that the pod has for it.
    pub(super) refused: BTreeMap<(PodVolume, String), Refused>,
    /// Whether containers may only read a volume, by the name that the pod has for it.
    read_only: BTreeMap<(PodVolume, String), bool>,
    /// Folders that are left alone until they are empty.
    pub(super) foreign: BTreeSet<ForeignFolder>,
    /// The claims in use.
    pub(super) claims: Claims,
}

impl Records {
    /// Records what a pod wants. A pod can have two names for one volume; it is set up read-only if both want that.
    pub(super) fn add_spec(&mut self, key: PodVolume, resolved: ResolvedSpec) {
        self.claims.remember(&key, &resolved);
        let (name, read_only) = (resolved.spec.outer_name.clone(), resolved.identity.read_only);
        self.read_only.insert((key.clone(), name.clone()), read_only);
        let keeps_writing =
            |known: &ResolvedSpec| known.spec.outer_name != name && !known.identity.read_only && read_only;
        if !self.specs.get(&key).is_some_and(keeps_writing) {
            self.specs.insert(key, resolved);
        }
    }

    /// Whether containers may only read a volume under the name that the pod has for it.
    pub(super) fn is_read_only(&self, key: &PodVolume, name: &str) -> bool {
        self.read_only.get(&(key.clone(), name.to_owned())).copied().unwrap_or(true)
    }

    /// Forgets what a pod wants.
    pub(super) fn release(&mut self, pod: &PodUid) {
        self.stopping.remove(pod);
        self.claims.withdraw(pod);
        self.read_only.retain(|((_, other), _), _| other != pod);
        self.specs.retain(|(_, other), _| other != pod);
        self.errors.retain(|(_, other), _| other != pod);
        self.refused.retain(|((_, other), _), _| other != pod);
        self.released.insert(pod.clone());
    }

    /// A spec of the volume: that of the pod, or of any other.
    pub(super) fn spec(&self, volume: &VolumeName, pod: &PodUid) -> Option<&ResolvedSpec> {
        self.specs.get(&(volume.clone(), pod.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_found_volume_is_labelled_with_the_driver_that_its_name_has() {
        for (plugin, volume, driver) in [
            ("kubernetes.io/csi", "kubernetes.io/csi/csi.example.com^vol^1", Some("csi.example.com")),
            ("kubernetes.io/csi", "kubernetes.io/csi/uid-inline", None),
            ("kubernetes.io/nfs", "kubernetes.io/nfs/uid-a^b", None),
        ] {
            assert_eq!(
                found_label(plugin, &volume.into()),
                PluginLabel::new(plugin, driver, false),
                "{volume}"
            );
        }
    }
}
