//! Staging: what is done once for all pods of the node (volumes.md §11.5, §11.7).

use std::path::{Path, PathBuf};

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::csi::paths::{BlockPaths, DriverName, PLUGIN, block_paths, stage_paths};
use keelson_volume_manager_core::csi::vol_data::{BlockData, SavedVolume, StageData};
use keelson_volume_manager_core::csi::{LifecycleMode, paths};
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel};

use super::context::{Context, Session, call_error};
use super::files::{self, Data};
use super::volume::{CsiVolume, name_error};
use crate::plugins::host::{is_mount_point, mount_references};
use crate::plugins::{DevicePlace, DeviceRequest, PluginError, VolumeSpec};

/// Where a volume is staged.
struct Stage {
    /// `staging_target_path` of the driver.
    staging: PathBuf,
    data_file: PathBuf,
    data: Vec<u8>,
    /// What the rest of the agent knows as the mount of the device.
    device_mount_path: PathBuf,
    is_block: bool,
}

/// The value of the option `context`, if there is one.
pub(super) fn context_of(label: &MountLabel) -> Option<String> {
    match label {
        MountLabel::Unlabelled => None,
        MountLabel::Context(text) => Some(text.clone()),
    }
}

/// The data file of a block volume.
pub(super) fn block_data(cx: &Context, volume: &CsiVolume<'_>) -> Vec<u8> {
    let data = BlockData {
        spec_volume_id: volume.spec.inner_name.clone(),
        volume_handle: volume.id.clone(),
        driver: volume.driver.clone(),
        node: cx.node.clone(),
        attachment_id: paths::attachment_name(&volume.id, &volume.driver, &cx.node),
    };
    data.to_json()
}

impl Stage {
    fn new(cx: &Context, volume: &CsiVolume<'_>, label: &MountLabel) -> Result<Self, PluginError> {
        match volume.spec.mode {
            VolumeMode::Filesystem => {
                let paths = stage_paths(&volume.driver, &volume.id).map_err(|error| name_error(&error))?;
                let data = StageData {
                    volume_handle: volume.id.clone(),
                    driver: volume.driver.clone(),
                    selinux_context: context_of(label),
                };
                let staging = cx.path(&paths.staging);
                Ok(Self {
                    device_mount_path: staging.clone(),
                    staging,
                    data_file: cx.path(&paths.data_file),
                    data: data.to_json(),
                    is_block: false,
                })
            }
            VolumeMode::Block => {
                let paths = block_paths(&volume.spec.inner_name).map_err(|error| name_error(&error))?;
                Ok(Self {
                    staging: cx.path(&paths.staging),
                    data_file: cx.path(&paths.data_file),
                    data: block_data(cx, volume),
                    device_mount_path: cx.path(&paths.device_folder),
                    is_block: true,
                })
            }
        }
    }

    /// Removes what a failed attempt has left. Whether nothing is left: something may be mounted there by an earlier attempt.
    async fn clean_up(&self, cx: &Context) -> bool {
        let result = async {
            if is_mount_point(&cx.mounts, &self.staging).await? {
                return Ok(false);
            }
            files::remove_target(&cx.mounts, &self.staging).await?;
            // Pods may have a block volume still, and their teardown reads the file.
            if !self.is_block {
                files::remove_data(&self.data_file).await?;
            }
            Ok::<bool, PluginError>(true)
        };
        result.await.unwrap_or_else(|error| {
            tracing::warn!(%error, path = %self.staging.display(), "cannot remove what a failed staging has left");
            false
        })
    }
}

/// Stages a volume. A driver without STAGE_UNSTAGE_VOLUME has nothing to do.
pub(super) async fn stage(
    cx: &Context,
    spec: &VolumeSpec,
    request: DeviceRequest<'_>,
) -> Result<Learned, PluginError> {
    let volume = CsiVolume::read(spec)?;
    if volume.lifecycle == LifecycleMode::Ephemeral {
        let text = format!("the inline volume {} belongs to one pod and is not staged", spec.inner_name);
        return Err(PluginError::new(text));
    }
    let stage = Stage::new(cx, &volume, request.label)?;
    let session = cx.session_for(&volume)?;
    let capabilities = session.capabilities().await?;
    let device_mount_path = Some(stage.device_mount_path.to_string_lossy().into_owned());
    let learned = Learned { device_mount_path, ..Learned::default() };
    if !capabilities.stage {
        return Ok(learned);
    }
    let secret = volume.source.node_stage_secret.as_ref();
    let message = pb::NodeStageVolumeRequest {
        volume_id: volume.id.clone(),
        publish_context: cx.publish_context(&volume).await?,
        staging_target_path: stage.staging.to_string_lossy().into_owned(),
        volume_capability: Some(volume.capability(capabilities, request.label)?),
        secrets: cx.secret(&volume, secret, "nodeStageSecretRef").await?,
        volume_context: volume.source.attributes.clone().into_iter().collect(),
    };
    match call_stage(cx, &session, &stage, message).await {
        Err(error) if error.class == FailureClass::Final && !stage.clean_up(cx).await => {
            Err(error.of_class(FailureClass::Uncertain))
        }
        result => result.map(|()| learned),
    }
}

async fn call_stage(
    cx: &Context,
    session: &Session,
    stage: &Stage,
    message: pb::NodeStageVolumeRequest,
) -> Result<(), PluginError> {
    // Files are left, and an earlier attempt may still be in progress.
    let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
    files::create_staging(&cx.mounts, &stage.staging).await.map_err(uncertain)?;
    files::write_data(&stage.data_file, stage.data.clone()).await.map_err(uncertain)?;
    session.driver.node_stage(&session.operation, message).await.map_err(|error| cx.set_up_error(&error))
}

/// Undoes [`stage`].
pub(super) async fn unstage(cx: &Context, device: &DevicePlace) -> Result<(), PluginError> {
    if device.is_block { unstage_block(cx, device).await } else { unstage_filesystem(cx, device).await }
}

/// The driver and the handle in the unique name of a volume.
pub(super) fn split_name(volume: &VolumeName) -> Result<(DriverName, &str), PluginError> {
    let name = volume.as_str();
    let split = name.strip_prefix(PLUGIN).and_then(|rest| rest.strip_prefix('/')?.split_once('^'));
    let Some((driver, handle)) = split else {
        return Err(PluginError::new(format!("{name} is not the name of a CSI volume that pods share")));
    };
    Ok((DriverName::parse(driver).map_err(|error| name_error(&error))?, handle))
}

async fn unstage_filesystem(cx: &Context, device: &DevicePlace) -> Result<(), PluginError> {
    let (driver, handle) = split_name(&device.volume)?;
    let paths = stage_paths(&driver, handle).map_err(|error| name_error(&error))?;
    let (staging, data_file) = (cx.path(&paths.staging), cx.path(&paths.data_file));
    refuse_if_referenced(cx, &staging, &paths.staging).await?;
    let saved = match files::read_data(&data_file).await? {
        Data::Saved(saved) => saved,
        // A driver without STAGE_UNSTAGE_VOLUME has no file, and may have an empty folder of an earlier version.
        Data::Missing => {
            return remove_unless_mounted(cx, &staging, &data_file, || missing_data(&data_file)).await;
        }
        Data::Unreadable(error) => {
            let error = PluginError::new(error.to_string()).for_you();
            return remove_unless_mounted(cx, &staging, &data_file, || error).await;
        }
    };
    call_unstage(cx, &saved, &staging).await?;
    files::remove_target(&cx.mounts, &staging).await?;
    files::remove_data(&data_file).await
}

/// The error of a mount without a data file.
pub(super) fn missing_data(data_file: &Path) -> PluginError {
    let text = format!(
        "{} is missing, so it is not known which driver unmounts the volume; unmount it by hand, then delete the empty \
         folders around it",
        data_file.display()
    );
    PluginError::new(text).for_you()
}

/// Removes the files of a volume that no driver has been called for: the data file is complete before the first call. If
/// something is mounted there after all, the error.
pub(super) async fn remove_unless_mounted(
    cx: &Context,
    target: &Path,
    data_file: &Path,
    error: impl FnOnce() -> PluginError,
) -> Result<(), PluginError> {
    if is_mount_point(&cx.mounts, target).await? || files::remove_target(&cx.mounts, target).await.is_err() {
        return Err(error());
    }
    files::remove_data(data_file).await
}

/// Refuses while the staged volume is mounted elsewhere. A mount whose path ends like that of the staging folder is the same
/// one, seen through another prefix (volumes.md §3.11).
async fn refuse_if_referenced(cx: &Context, staging: &Path, relative: &Path) -> Result<(), PluginError> {
    if !is_mount_point(&cx.mounts, staging).await? {
        return Ok(());
    }
    let references = mount_references(&cx.mounts, staging).await?;
    let others: Vec<String> = references
        .iter()
        .filter(|path| !path.ends_with(relative))
        .map(|path| path.display().to_string())
        .collect();
    if others.is_empty() {
        return Ok(());
    }
    let text = format!(
        "{} is not unmounted while the volume is mounted elsewhere too: {}",
        staging.display(),
        others.join(", ")
    );
    Err(PluginError::new(text))
}

/// Has the driver unstage a volume, if it stages volumes.
async fn call_unstage(cx: &Context, saved: &SavedVolume, staging: &Path) -> Result<(), PluginError> {
    let session = cx.session(&saved.driver)?;
    if !session.capabilities().await?.stage {
        return Ok(());
    }
    let message = pb::NodeUnstageVolumeRequest {
        volume_id: saved.volume_handle.clone(),
        staging_target_path: staging.to_string_lossy().into_owned(),
    };
    session.driver.node_unstage(&session.operation, message).await.map_err(|error| call_error(&error))
}

async fn unstage_block(cx: &Context, device: &DevicePlace) -> Result<(), PluginError> {
    let paths = block_paths(&device.inner_name).map_err(|error| name_error(&error))?;
    let pods = files::entries(&cx.path(&paths.device_folder)).await?;
    if !pods.is_empty() {
        let pods = pods.iter().map(|pod| pod.display().to_string()).collect::<Vec<_>>().join(", ");
        let text = format!("the block volume {} is still mapped for the pods {pods}", device.inner_name);
        return Err(PluginError::new(text));
    }
    let (staging, data_file) = (cx.path(&paths.staging), cx.path(&paths.data_file));
    let is_staged = files::exists(&staging).await?;
    match files::read_data(&data_file).await? {
        Data::Saved(saved) if is_staged => call_unstage(cx, &saved, &staging).await?,
        Data::Saved(_) => {}
        Data::Missing if !is_staged => {}
        Data::Missing => {
            remove_unless_mounted(cx, &staging, &data_file, || missing_data(&data_file)).await?;
        }
        Data::Unreadable(error) => {
            let error = PluginError::new(error.to_string()).for_you();
            remove_unless_mounted(cx, &staging, &data_file, || error).await?;
        }
    }
    remove_block_folders(cx, &paths).await;
    Ok(())
}

/// Removes the folders of a block volume. What stays is only logged (volumes.md §11.7).
async fn remove_block_folders(cx: &Context, paths: &BlockPaths) {
    for folder in [&paths.staging, &paths.publish_folder, &paths.folder] {
        if let Err(error) = files::remove_folder(&cx.path(folder)).await {
            tracing::warn!(%error, "a folder of a block volume is left over");
        }
    }
}
