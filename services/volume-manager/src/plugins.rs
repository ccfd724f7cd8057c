//! Plugins: who provides the volumes that come from outside of this service, such as those of claims.
//!
//! A plugin knows one kind of volume. What it does is called by `shared_volumes`, which decides when; a plugin keeps no state
//! besides what is on disk, and each of its calls may be repeated.

pub(crate) mod csi;
pub(crate) mod disk;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod fc;
pub(crate) mod flexvolume;
pub(crate) mod host;
pub(crate) mod host_path;
pub(crate) mod iscsi;
pub(crate) mod local;
pub(crate) mod multipath;
pub(crate) mod nfs;
pub(crate) mod secrets;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::desire::{FsGroupPolicy, PodRef};
use keelson_volume_manager_core::objects::PersistentVolume;
use keelson_volume_manager_core::operations::{PodUid, VolumeName};
use keelson_volume_manager_core::world::{Learned, MountLabel, Shape};
use serde_json::Value;

pub(crate) use crate::plugin_error::PluginError;
use crate::walks::FsGroupWalks;

/// A volume as a pod or a PersistentVolume describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VolumeSpec {
    /// The pod that wants it.
    pub(crate) pod: PodRef,
    /// `spec.serviceAccountName` of the pod.
    pub(crate) service_account: String,
    /// `spec.volumes[].name` of the pod.
    pub(crate) outer_name: String,
    /// The name of the volume's folder: that of the PersistentVolume, or `outer_name`.
    pub(crate) inner_name: String,
    /// The field of the source: `nfs`, `csi`…
    pub(crate) field: String,
    /// The value of that field.
    pub(crate) source: Value,
    /// The PersistentVolume; absent for a volume without a claim.
    pub(crate) persistent: Option<Arc<PersistentVolume>>,
    /// The name of the claim in the pod's namespace.
    pub(crate) claim: Option<String>,
    /// `status.capacity.storage` of the claim in bytes.
    pub(crate) claim_size: Option<u64>,
    /// How containers use it.
    pub(crate) mode: VolumeMode,
    /// `persistentVolumeClaim.readOnly`. A source without a claim has a field of its own.
    pub(crate) read_only: bool,
    /// It has a legacy source that its CSI driver serves (volumes.md §12).
    pub(crate) is_migrated: bool,
    /// The mount options of the PersistentVolume, sorted.
    pub(crate) mount_options: Vec<String>,
    /// The pod's fsGroup.
    pub(crate) fs_group: Option<u32>,
    /// When the fsGroup is applied.
    pub(crate) fs_group_policy: FsGroupPolicy,
}

impl VolumeSpec {
    /// Who or what provides the volume, for people: the driver, the server or the path.
    pub(crate) fn origin(&self) -> String {
        let text = |name: &str| self.source[name].as_str().unwrap_or_default().to_owned();
        match self.field.as_str() {
            "csi" => format!("the CSI driver {}", text("driver")),
            "flexVolume" => format!("the flexVolume driver {}", text("driver")),
            "nfs" => format!("the NFS server {}", text("server")),
            "iscsi" => format!("the iSCSI portal {}", text("targetPortal")),
            "local" | "hostPath" => format!("the file system at {}", text("path")),
            field => field.to_owned(),
        }
    }
}

/// What a plugin says about a volume before anything is done for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The unique name on this node, if the volume is one for all pods: `kubernetes.io/csi/<driver>^<handle>`. `None`: each pod
    /// has its own.
    pub(crate) shared_name: Option<VolumeName>,
    /// What is done once for all pods.
    pub(crate) shape: Shape,
    /// It is set up again with each sync of the pod.
    pub(crate) is_set_up_each_sync: bool,
    /// It can be mounted with an SELinux label.
    pub(crate) supports_label: bool,
    /// The plugin can grow it on the node.
    pub(crate) can_expand: bool,
    /// Containers may only read it.
    pub(crate) read_only: bool,
}

/// What a plugin can do with all of its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// A PersistentVolume may have mount options.
    pub(crate) mount_options: bool,
    /// A PersistentVolume may have the mode `Block`.
    pub(crate) block: bool,
    /// A pod may name the source itself, without a claim.
    pub(crate) inline: bool,
    /// A PersistentVolume may have the source.
    pub(crate) persistent: bool,
}

/// A request to mount the device that all pods share. In the mode `Block`: to prepare it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceRequest<'a> {
    /// The path of the attached device, as the Node has it.
    pub(crate) device_path: Option<&'a str>,
    /// The SELinux label of the mount.
    pub(crate) label: &'a MountLabel,
}

/// A request to set a volume up for a pod.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SetUpRequest<'a> {
    /// The path of the attached device, as the Node has it.
    pub(crate) device_path: Option<&'a str>,
    /// Where the shared device is mounted.
    pub(crate) device_mount_path: Option<&'a str>,
    /// The SELinux label of the mount.
    pub(crate) label: &'a MountLabel,
    /// The volume is mounted, and the pod may be using it: an error must leave its data as they are.
    pub(crate) is_remount: bool,
    /// The volume was found at startup and not set up since: an error must not delete its folder.
    pub(crate) is_reconstructed: bool,
    /// Where to record walks that change ownership.
    pub(crate) walks: &'a FsGroupWalks,
}

/// A volume that is set up for a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SetUp {
    /// The folder for the runtime to mount; in the mode `Block` the path of the device.
    pub(crate) host_path: PathBuf,
    /// What the set-up has learned.
    pub(crate) learned: Learned,
}

/// A volume of a pod that is on disk, as it is known also after a restart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VolumePlace {
    /// The volume.
    pub(crate) volume: VolumeName,
    /// The pod.
    pub(crate) pod: PodUid,
    /// The plugin, `vendor/name`.
    pub(crate) plugin: String,
    /// The name of the volume's folder.
    pub(crate) inner_name: String,
    /// Below `volumes` or below `volumeDevices` of the pod's folder.
    pub(crate) is_block: bool,
}

/// A device that pods share, as it is known also after a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DevicePlace {
    /// The volume.
    pub(crate) volume: VolumeName,
    /// The name of the volume's folder in pods: that of the PersistentVolume.
    pub(crate) inner_name: String,
    /// It is used as a block device.
    pub(crate) is_block: bool,
    /// The path of the attached device.
    pub(crate) device_path: Option<String>,
    /// Where it is mounted.
    pub(crate) device_mount_path: Option<String>,
}

/// What a plugin reads from disk at startup about a volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reconstructed {
    /// The unique name, if the volume is one for all pods.
    pub(crate) shared_name: Option<VolumeName>,
    /// The plugin mounts a device for all pods.
    pub(crate) has_device: bool,
    /// Where.
    pub(crate) device_mount_path: Option<String>,
    /// The SELinux label of the mount, if it is known.
    pub(crate) label: Option<MountLabel>,
}

/// A device that a plugin has found at startup, also one that no pod has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundDevice {
    /// The volume.
    pub(crate) volume: VolumeName,
    /// The name of the volume's folder in pods; empty if it is not known.
    pub(crate) inner_name: String,
    /// It is used as a block device.
    pub(crate) is_block: bool,
    /// Where it is, or would be, mounted.
    pub(crate) device_mount_path: String,
    /// The SELinux label of the mount. `None`: nothing is mounted, or the label is not known.
    pub(crate) label: Option<MountLabel>,
}

/// Where a volume found at startup is, before its unique name is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundFolder {
    /// The pod.
    pub(crate) pod: PodUid,
    /// The name of the volume's folder.
    pub(crate) inner_name: String,
    /// Below `volumes` or below `volumeDevices` of the pod's folder.
    pub(crate) is_block: bool,
}

/// The answer of a plugin.
pub(crate) type Answer<'a, T> = BoxFuture<'a, Result<T, PluginError>>;

/// Provides one kind of volume. Every call may be repeated, also after a restart in the middle of it, and none blocks its
/// thread: what touches the volume's filesystem runs in the helper process of [`Mounter`](crate::mounter::Mounter).
pub(crate) trait Plugin: fmt::Debug + Send + Sync {
    /// `vendor/name`: `kubernetes.io/nfs`.
    fn name(&self) -> &'static str;

    /// The name of the plugin of one volume, `vendor/name`. Only flexVolume has several.
    fn plugin_name(&self, _: &VolumeSpec) -> String {
        self.name().to_owned()
    }

    /// Whether it is the plugin with this name, `vendor/name`. Only flexVolume has several names: those of its drivers, whose
    /// folders it looks up, so the call may block.
    fn serves(&self, name: &str) -> bool {
        self.name() == name
    }

    /// The field of the source: `nfs`.
    fn field(&self) -> &'static str;

    /// What it can do.
    fn abilities(&self) -> Abilities;

    /// Reads and checks the source of a volume.
    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity>;

    /// Attaches the volume, where the agent attaches volumes itself. The path of the device.
    fn attach<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Learned> {
        let message = format!("{} cannot attach the volume {} from the node", self.name(), volume.inner_name);
        Box::pin(async move { Err(PluginError::new(message)) })
    }

    /// Detaches a volume that [`Self::attach`] has, or may have, attached. A plugin that attaches nothing has nothing to detach.
    fn detach<'a>(&'a self, _: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Mounts the device that all pods share.
    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, _: DeviceRequest<'a>) -> Answer<'a, Learned> {
        let message = format!("{} has no device to mount for the volume {}", self.name(), volume.inner_name);
        Box::pin(async move { Err(PluginError::new(message)) })
    }

    /// Sets the volume up for its pod.
    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp>;

    /// Whether each file of a volume that is set up at `path`, without an SELinux label for all of them, has a label of its own,
    /// which the runtime may change for a container (volumes.md §6). It is asked only where SELinux is enabled, and not about
    /// volumes of the mode `Block`. By default not: then the files belong to somebody else.
    fn has_file_labels<'a>(&'a self, _: &'a VolumeSpec, _path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async { Ok(false) })
    }

    /// Undoes [`Self::set_up`]. A volume that is not there is no error.
    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()>;

    /// Undoes [`Self::mount_device`]. A device that is not mounted is no error.
    fn unmount_device<'a>(&'a self, _: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Grows the volume to at least `size` bytes. The size that it has then.
    fn expand<'a>(&'a self, volume: &'a VolumeSpec, _: SetUpRequest<'a>, _size: u64) -> Answer<'a, u64> {
        let message = format!("{} cannot grow the volume {}", self.name(), volume.inner_name);
        Box::pin(async move { Err(PluginError::new(message)) })
    }

    /// The folder with a bind mount of the device per pod, for a volume of the mode `Block`. `None`: it has none.
    fn global_map_path<'a>(&'a self, _: &'a str) -> Answer<'a, Option<PathBuf>> {
        Box::pin(async { Ok(None) })
    }

    /// Reads from disk which devices are, or may be, mounted for pods. A pod may have ended just before its device was unmounted.
    fn found_devices(&self) -> Answer<'_, Vec<FoundDevice>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Reads from disk what a folder of a volume is, without access to the volume itself, which may hang.
    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed>;
}

/// The plugins of this version.
#[derive(Debug, Clone)]
pub(crate) struct Plugins(Arc<[Arc<dyn Plugin>]>);

impl Plugins {
    /// These plugins.
    pub(crate) fn new(plugins: Vec<Arc<dyn Plugin>>) -> Self {
        Self(plugins.into())
    }

    /// The plugin for a field of a source.
    pub(crate) fn for_field(&self, field: &str) -> Option<&Arc<dyn Plugin>> {
        self.0.iter().find(|plugin| plugin.field() == field)
    }

    /// All plugins.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<dyn Plugin>> {
        self.0.iter()
    }

    /// The plugin with a name, `vendor/name`. A plugin's own name wins over that of a flexVolume driver. May block, as
    /// [`Plugin::serves`].
    pub(crate) fn named(&self, name: &str) -> Option<&Arc<dyn Plugin>> {
        let own = self.0.iter().find(|plugin| plugin.name() == name);
        own.or_else(|| self.0.iter().find(|plugin| plugin.serves(name)))
    }
}
