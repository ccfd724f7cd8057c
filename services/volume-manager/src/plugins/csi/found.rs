//! What a folder on disk says about a volume, after a restart (volumes.md §3.16).

use std::path::{Path, PathBuf};

use keelson_volume_manager_core::csi::LifecycleMode;
use keelson_volume_manager_core::csi::paths::{
    block_paths, is_stage_folder, publish_paths, stage_paths, unique_volume_name,
};
use keelson_volume_manager_core::world::MountLabel;

use super::context::Context;
use super::files::{self, Data};
use super::stage::missing_data;
use super::volume::name_error;
use crate::listing::paths_in;
use crate::plugins::host::{blocking, is_mount_point};
use crate::plugins::{FoundDevice, FoundFolder, PluginError, Reconstructed};

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

/// The folder of block volumes, beside those of the drivers.
const BLOCK_VOLUMES: &str = "volumeDevices";
/// The folder of the mount of a staged volume.
const STAGING: &str = "globalmount";

/// A folder with the data file of a device.
struct DeviceFolder {
    folder: PathBuf,
    data_file: PathBuf,
    /// The name of a block volume.
    block_name: Option<String>,
}

/// The devices that were, or may have been, staged. A data file that cannot be read is logged and left. What a service that was
/// killed before the first call of a driver has left is removed: no pod may want the volume any more.
pub(super) async fn devices(cx: &Context) -> Result<Vec<FoundDevice>, PluginError> {
    let base = cx.path(Path::new("plugins/kubernetes.io/csi"));
    let listed = blocking("list the staged volumes", move || Ok(device_folders(&base))).await?;
    let mut found = Vec::new();
    for DeviceFolder { folder, data_file, block_name } in listed {
        let saved = match files::read_data(&data_file).await {
            Ok(Data::Saved(saved)) => saved,
            Ok(Data::Missing) => {
                if block_name.is_none() {
                    remove_unstaged(cx, &folder, &data_file).await;
                }
                continue;
            }
            Ok(Data::Unreadable(error)) => {
                tracing::warn!(event = "device_not_reconstructed", "cannot tell what was staged: {error}");
                continue;
            }
            Err(error) => {
                tracing::warn!(event = "device_not_reconstructed", "cannot tell what was staged: {error}");
                continue;
            }
        };
        let label = saved.selinux_context.map_or(MountLabel::Unlabelled, MountLabel::Context);
        let mount = if block_name.is_some() { folder } else { folder.join(STAGING) };
        found.push(FoundDevice {
            volume: unique_volume_name(&saved.driver, &saved.volume_handle).into(),
            is_block: block_name.is_some(),
            inner_name: block_name.unwrap_or_default(),
            device_mount_path: mount.to_string_lossy().into_owned(),
            label: Some(label),
        });
    }
    Ok(found)
}

/// Removes the folder of a volume that no driver was called for, if it has the name of one. What stays is logged.
async fn remove_unstaged(cx: &Context, folder: &Path, data_file: &Path) {
    if !folder.file_name().and_then(|name| name.to_str()).is_some_and(is_stage_folder) {
        return;
    }
    let staging = folder.join(STAGING);
    let removed = match is_mount_point(&cx.mounts, &staging).await {
        Ok(false) => files::remove_unstaged(data_file, &staging).await,
        Ok(true) => Err(missing_data(data_file)),
        Err(error) => Err(error),
    };
    let path = folder.display();
    match removed {
        Ok(true) => tracing::info!(%path, "removed the empty folder of a volume that was never staged"),
        Ok(false) => tracing::warn!(
            event = "device_not_reconstructed",
            "{path} has no data file but other content; delete it if no CSI driver uses it"
        ),
        Err(error) => tracing::warn!(event = "device_not_reconstructed", "cannot remove {path}: {error}"),
    }
}

fn device_folders(base: &Path) -> Vec<DeviceFolder> {
    let mut found = Vec::new();
    for driver in paths_in(base).unwrap_or_default() {
        let is_block = driver.file_name().is_some_and(|name| name == BLOCK_VOLUMES);
        for folder in paths_in(&driver).unwrap_or_default() {
            let block_name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
            let block_name = block_name.filter(|_| is_block);
            let data_file =
                if is_block { folder.join("data/vol_data.json") } else { folder.join("vol_data.json") };
            let folder = if is_block { folder.join("dev") } else { folder };
            found.push(DeviceFolder { folder, data_file, block_name });
        }
    }
    found
}
