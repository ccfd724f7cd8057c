//! A CSI volume, read from the spec of a PersistentVolume or pod.

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::csi::LifecycleMode;
use keelson_volume_manager_core::csi::access_mode::{
    Access, NodeCapabilities, VolumeCapability, access_mode, mount_flags,
};
use keelson_volume_manager_core::csi::paths::{DriverName, NameError};
use keelson_volume_manager_core::csi::source::{CsiIdentity, CsiSource};
use keelson_volume_manager_core::selinux::FileLabel;
use keelson_volume_manager_core::sources::SecretReference;
use keelson_volume_manager_core::world::MountLabel;

use crate::plugins::{PluginError, VolumeSpec};

/// A CSI volume.
#[derive(Debug, Clone)]
pub(super) struct CsiVolume<'a> {
    /// Where it was read from.
    pub(super) spec: &'a VolumeSpec,
    /// The source.
    pub(super) source: CsiSource,
    /// The driver.
    pub(super) driver: DriverName,
    /// The driver's id of the volume.
    pub(super) id: String,
    /// How long it lives.
    pub(super) lifecycle: LifecycleMode,
    /// The unique name on this node, if all pods share it.
    pub(super) shared_name: Option<String>,
}

/// An error in a name, for a person to mend.
pub(super) fn name_error(error: &NameError) -> PluginError {
    PluginError::new(error.to_string()).for_you()
}

impl<'a> CsiVolume<'a> {
    /// Reads the source of a volume.
    ///
    /// # Errors
    /// The source is not what the API describes.
    pub(super) fn read(spec: &'a VolumeSpec) -> Result<Self, PluginError> {
        let mut source: CsiSource = serde_json::from_value(spec.source.clone()).map_err(|error| {
            let text = format!("cannot read the field csi of the volume {}: {error}", spec.inner_name);
            PluginError::new(text).for_you()
        })?;
        let identity = match spec.persistent {
            Some(_) => source.persistent(),
            None => source.inline(&spec.pod.uid, &spec.outer_name),
        };
        let identity = identity.map_err(|error| name_error(&error))?;
        if spec.persistent.is_none() {
            // A pod can only name Secrets of its own namespace.
            if let Some(reference) = &mut source.node_publish_secret {
                reference.namespace.clear();
            }
        }
        let shared_name = identity.shared_name();
        let CsiIdentity { driver, id, lifecycle } = identity;
        Ok(Self { spec, source, driver, id, lifecycle, shared_name })
    }

    /// Whether pods may only read it.
    pub(super) fn is_read_only(&self) -> bool {
        match self.lifecycle {
            LifecycleMode::Persistent => self.spec.read_only,
            LifecycleMode::Ephemeral => self.source.read_only,
        }
    }

    /// The access modes of the PersistentVolume; `None` for an inline volume.
    pub(super) fn access_modes(&self) -> Option<&'a [String]> {
        self.spec.persistent.as_ref().map(|volume| volume.spec.access_modes.as_slice())
    }

    /// The flags of its mount.
    fn mount_flags(&self, label: &MountLabel) -> Result<Vec<String>, PluginError> {
        let option = match label {
            MountLabel::Unlabelled => None,
            MountLabel::Context(text) => {
                let label = FileLabel::parse(text).map_err(|error| PluginError::new(error.to_string()))?;
                Some(label.mount_option())
            }
        };
        Ok(mount_flags(&self.spec.mount_options, option.as_deref()))
    }

    /// What the driver is asked for (volumes.md §11.3).
    pub(super) fn capability(
        &self,
        driver: NodeCapabilities,
        label: &MountLabel,
    ) -> Result<pb::VolumeCapability, PluginError> {
        let access_mode = access_mode(self.access_modes().unwrap_or_default(), driver)
            .map_err(|error| PluginError::new(error.to_string()).for_you())?;
        let access = match self.spec.mode {
            VolumeMode::Block => Access::Block,
            VolumeMode::Filesystem => Access::Mount {
                fs_type: self.source.fs_type.clone(),
                mount_flags: self.mount_flags(label)?,
                volume_mount_group: self
                    .spec
                    .fs_group
                    .filter(|_| driver.mount_group)
                    .map(|group| group.to_string()),
            },
        };
        Ok(to_wire(VolumeCapability { access_mode, access }))
    }

    /// The reference to a Secret, with the namespace that it is read from.
    pub(super) fn secret_reference(
        &self,
        reference: Option<&SecretReference>,
        field: &str,
    ) -> Result<Option<SecretReference>, PluginError> {
        let Some(reference) = reference else { return Ok(None) };
        let mut reference = reference.clone();
        if self.lifecycle == LifecycleMode::Ephemeral {
            reference.namespace = self.spec.pod.namespace.clone();
        }
        if reference.name.is_empty() || reference.namespace.is_empty() {
            let text = format!(
                "{field} of the volume {} lacks a name or a namespace; set both",
                self.spec.inner_name
            );
            return Err(PluginError::new(text).for_you());
        }
        Ok(Some(reference))
    }
}

fn to_wire(capability: VolumeCapability) -> pb::VolumeCapability {
    use pb::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
    let access_type = match capability.access {
        Access::Block => AccessType::Block(BlockVolume {}),
        Access::Mount { fs_type, mount_flags, volume_mount_group } => AccessType::Mount(MountVolume {
            fs_type,
            mount_flags,
            volume_mount_group: volume_mount_group.unwrap_or_default(),
        }),
    };
    pb::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: capability.access_mode.number() }),
    }
}
