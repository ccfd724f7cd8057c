//! What a folder on disk says about a volume, after a restart (volumes.md §3.16).

use keelson_volume_manager_core::csi::LifecycleMode;
use keelson_volume_manager_core::csi::paths::{block_paths, publish_paths, stage_paths, unique_volume_name};
use keelson_volume_manager_core::world::MountLabel;

use super::context::Context;
use super::files::{self, Data};
use super::stage::missing_data;
use super::volume::name_error;
use crate::plugins::{FoundFolder, PluginError, Reconstructed};

/// Reads the data file of a folder. It needs neither the driver nor the CSIDriver.
pub(super) async fn reconstruct(cx: &Context, folder: &FoundFolder) -> Result<Reconstructed, PluginError> {
    let data_file = if folder.is_block {
        block_paths(&folder.inner_name).map_err(|error| name_error(&error))?.data_file
    } else {
        publish_paths(folder.pod.as_str(), &folder.inner_name).map_err(|error| name_error(&error))?.data_file
    };
    let data_file = cx.path(&data_file);
    let saved = match files::read_data(&data_file).await? {
        Data::Saved(saved) => saved,
        Data::Missing => return Err(missing_data(&data_file)),
        Data::Unreadable(error) => return Err(PluginError::new(error.to_string()).for_you()),
    };
    let label = saved.selinux_context.map_or(MountLabel::Unlabelled, MountLabel::Context);
    if saved.lifecycle == LifecycleMode::Ephemeral {
        return Ok(Reconstructed {
            shared_name: None,
            has_device: false,
            device_mount_path: None,
            label: Some(label),
        });
    }
    let device = if folder.is_block {
        block_paths(&folder.inner_name).map_err(|error| name_error(&error))?.device_folder
    } else {
        stage_paths(&saved.driver, &saved.volume_handle).map_err(|error| name_error(&error))?.staging
    };
    Ok(Reconstructed {
        shared_name: Some(unique_volume_name(&saved.driver, &saved.volume_handle).into()),
        has_device: true,
        device_mount_path: Some(cx.path(&device).to_string_lossy().into_owned()),
        label: Some(label),
    })
}
