//! What the source of a volume says.

use std::fmt::Display;

use keelson_volume_manager_core::mount_options::{self, MountOptions};
use keelson_volume_manager_core::world::MountLabel;
use serde::de::DeserializeOwned;

use crate::plugins::{PluginError, VolumeSpec};

/// An error of a field that a person has to correct.
pub(crate) fn wrong_source(error: impl Display) -> PluginError {
    PluginError::new(error.to_string()).for_you()
}

/// Reads the source of a volume.
pub(crate) fn read_source<T: DeserializeOwned>(volume: &VolumeSpec) -> Result<T, PluginError> {
    serde_json::from_value(volume.source.clone()).map_err(|error| {
        wrong_source(format!("cannot read {} of the volume {}: {error}", volume.field, volume.inner_name))
    })
}

/// Whether containers may only read a volume: through a claim as the pod says, else as the source says.
pub(crate) fn is_read_only(volume: &VolumeSpec, source: bool) -> bool {
    if volume.persistent.is_some() { volume.read_only } else { source }
}

/// The mount options of a volume, sorted.
pub(crate) fn options(
    volume: &VolumeSpec,
    read_only: bool,
    label: &MountLabel,
) -> Result<Vec<String>, PluginError> {
    let label = match label {
        MountLabel::Unlabelled => None,
        MountLabel::Context(label) => Some(format!("context=\"{label}\"")),
    };
    let options = MountOptions::default()
        .with(&volume.mount_options)
        .and_then(|options| options.with(label))
        .map_err(wrong_source)?
        .with_flags(read_only.then_some("ro"));
    Ok(mount_options::split(&options.argument()).into_iter().map(str::to_owned).collect())
}
