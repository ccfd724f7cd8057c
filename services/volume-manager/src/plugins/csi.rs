//! Volumes of CSI drivers (volumes.md §11). The decisions are in the core's `csi`; this carries them out.
//!
//! | module | does |
//! |---|---|
//! | `volume` | reads the source of a volume |
//! | `context` | what every operation needs: the driver, Secrets, the attachment |
//! | `stage` | stages and unstages a volume for all pods |
//! | `publish` | publishes and unpublishes it for a pod |
//! | `grow` | expands it |
//! | `usage` | measures it |
//! | `attach_limit` | whether the node has no room for it |
//! | `found` | reads what is on disk after a restart |
//! | `files` | the data files and folders |
//! | `driver_objects` | CSIDrivers, cached |
//! | `tokens` | tokens of service accounts, cached |
//! | `ports` | what is needed of the control plane |

use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_volume_manager_core::csi::LifecycleMode;
use keelson_volume_manager_core::csi::paths::{PLUGIN, block_paths};
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::selinux;
use keelson_volume_manager_core::world::{Learned, Shape};

use self::context::Context;
use self::driver_objects::DriverObjects;
use self::grow::ExpandFailure;
use self::ports::TokenIssuer;
pub(crate) use self::ports::{NoApiServer, Objects};
use self::tokens::TokenCache;
pub(crate) use self::usage::{Condition, MeasureVolumes, MeasuredVolume, VolumeUsage};
use self::volume::CsiVolume;
use super::host::{Mounts, filesystem_options};
use super::secrets::Secrets;
use super::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundDevice, FoundFolder, Identity, Plugin, PluginError,
    Reconstructed, SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::csi::drivers::Drivers;

mod attach_limit;
mod context;
mod driver_objects;
mod files;
mod found;
mod grow;
mod ports;
mod publish;
mod stage;
#[cfg(test)]
mod tests;
mod tokens;
mod usage;
mod volume;

/// What the plugin works with.
#[derive(Debug)]
pub(crate) struct CsiParts {
    /// The agent's root folder.
    pub(crate) root: PathBuf,
    /// The node's name.
    pub(crate) node: String,
    /// The registered drivers.
    pub(crate) drivers: Drivers,
    /// Access to mounts.
    pub(crate) mounts: Arc<dyn Mounts>,
    /// Reads Secrets.
    pub(crate) secrets: Arc<dyn Secrets>,
    /// Reads CSIDrivers and VolumeAttachments.
    pub(crate) objects: Arc<dyn Objects>,
    /// Issues tokens.
    pub(crate) tokens: Arc<dyn TokenIssuer>,
}

/// The plugin `kubernetes.io/csi`.
#[derive(Debug)]
pub(crate) struct Csi(Context);

impl Csi {
    pub(crate) fn new(parts: CsiParts) -> Self {
        let CsiParts { root, node, drivers, mounts, secrets, objects, tokens } = parts;
        let driver_objects = DriverObjects::new(Arc::clone(&objects));
        let tokens = TokenCache::new(tokens);
        Self(Context { root, node, drivers, mounts, secrets, objects, driver_objects, tokens })
    }

    /// Why the node has no room for one of these volumes, which are not attached; `None` if nothing says so.
    pub(crate) async fn attach_limit(&self, volumes: &[VolumeName]) -> Option<String> {
        attach_limit::exceeded(&self.0, volumes).await
    }

    /// As [`Plugin::expand`], with what the error says about the expansion (volumes.md §4).
    ///
    /// # Errors
    /// The driver cannot or does not expand the volume.
    pub(crate) async fn expand_volume(
        &self,
        volume: &VolumeSpec,
        request: SetUpRequest<'_>,
        size: u64,
    ) -> Result<u64, ExpandFailure> {
        grow::expand(&self.0, volume, request, size).await
    }

    async fn identity(&self, spec: &VolumeSpec) -> Result<Identity, PluginError> {
        let volume = CsiVolume::read(spec)?;
        let (is_attachable, object) = self.0.is_attachable(&volume.driver).await?;
        let is_set = |field: fn(&keelson_volume_manager_core::csi::CsiDriverSpec) -> Option<bool>| {
            object.as_ref().and_then(|object| field(&object.spec)) == Some(true)
        };
        let is_persistent = volume.lifecycle == LifecycleMode::Persistent;
        Ok(Identity {
            read_only: volume.is_read_only(),
            // Whether the driver stages volumes is known only once it is registered: every persistent volume has a device.
            shape: match volume.lifecycle {
                LifecycleMode::Ephemeral => Shape::PerPod,
                LifecycleMode::Persistent if is_attachable => Shape::AttachableDevice,
                LifecycleMode::Persistent => Shape::Device,
            },
            is_set_up_each_sync: is_set(|spec| spec.requires_republish),
            supports_label: is_persistent && is_set(|spec| spec.selinux_mount),
            can_expand: is_persistent,
            shared_name: volume.shared_name.map(Into::into),
        })
    }
}

impl MeasureVolumes for Csi {
    fn measure<'a>(&'a self, volume: &'a MeasuredVolume) -> Answer<'a, Option<VolumeUsage>> {
        Box::pin(usage::measure(&self.0, volume))
    }
}

impl Plugin for Csi {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn field(&self) -> &'static str {
        "csi"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(self.identity(volume))
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, request: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(stage::stage(&self.0, volume, request))
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(publish::publish(&self.0, volume, request))
    }

    /// As the mount of the driver says.
    fn has_file_labels<'a>(&'a self, _: &'a VolumeSpec, path: &'a Path) -> Answer<'a, bool> {
        Box::pin(async move {
            let options = filesystem_options(&self.0.mounts, path).await?;
            Ok(selinux::shows_seclabel(&options))
        })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(publish::unpublish(&self.0, place))
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(stage::unstage(&self.0, device))
    }

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(async move {
            let expanded = self.expand_volume(volume, request, size).await;
            expanded.map_err(|failure| failure.error.of_expansion(failure.class))
        })
    }

    fn global_map_path<'a>(&'a self, inner_name: &'a str) -> Answer<'a, Option<PathBuf>> {
        let folder = block_paths(inner_name).ok().map(|paths| self.0.path(&paths.device_folder));
        Box::pin(async { Ok(folder) })
    }

    fn found_devices(&self) -> Answer<'_, Vec<FoundDevice>> {
        Box::pin(found::devices(&self.0))
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(found::reconstruct(&self.0, folder))
    }
}
