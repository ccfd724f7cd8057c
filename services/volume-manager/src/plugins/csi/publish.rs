//! Publishing: what is done for each pod (volumes.md §11.6, §11.7).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::csi::access_mode::NodeCapabilities;
use keelson_volume_manager_core::csi::error_class::{FailedStep, error_class};
use keelson_volume_manager_core::csi::fs_group::{FsGroupAction, PublishedVolume, fs_group_action};
use keelson_volume_manager_core::csi::paths::{
    self, block_paths, pod_block_paths, publish_paths, stage_paths,
};
use keelson_volume_manager_core::csi::vol_data::PublishData;
use keelson_volume_manager_core::csi::volume_context::{
    IssuedToken, PodInfo, PublishMaps, publish_maps, wanted_tokens,
};
use keelson_volume_manager_core::csi::{CsiDriver, LifecycleMode, check_lifecycle};
use keelson_volume_manager_core::token::TokenName;
use keelson_volume_manager_core::world::{FailureClass, Learned};

use super::context::{Context, Session, call_error};
use super::files::{self, Data};
use super::stage::{block_data, context_of, missing_data, remove_unless_mounted};
use super::volume::{CsiVolume, name_error};
use crate::plugins::host::Ownership;
use crate::plugins::{PluginError, SetUp, SetUpRequest, VolumePlace, VolumeSpec};

/// Where a volume is published to a pod.
struct Target {
    /// `target_path` of the driver, which creates it.
    path: PathBuf,
    data_file: PathBuf,
    data: Vec<u8>,
    /// `staging_target_path` of a driver that stages volumes.
    staging: Option<PathBuf>,
    is_block: bool,
}

impl Target {
    fn new(
        cx: &Context,
        volume: &CsiVolume<'_>,
        request: SetUpRequest<'_>,
        driver: NodeCapabilities,
    ) -> Result<Self, PluginError> {
        let (uid, inner) = (&volume.spec.pod.uid, &volume.spec.inner_name);
        if volume.spec.mode == VolumeMode::Block {
            let shared = block_paths(inner).map_err(|error| name_error(&error))?;
            let own = pod_block_paths(inner, uid).map_err(|error| name_error(&error))?;
            return Ok(Self {
                path: cx.path(&own.publish),
                data_file: cx.path(&shared.data_file),
                data: block_data(cx, volume),
                staging: driver.stage.then(|| cx.path(&shared.staging)),
                is_block: true,
            });
        }
        let paths = publish_paths(uid, inner).map_err(|error| name_error(&error))?;
        let staging = match volume.lifecycle {
            LifecycleMode::Persistent if driver.stage => {
                let stage = stage_paths(&volume.driver, &volume.id).map_err(|error| name_error(&error))?;
                Some(cx.path(&stage.staging))
            }
            LifecycleMode::Persistent | LifecycleMode::Ephemeral => None,
        };
        let data = PublishData {
            spec_volume_id: inner.clone(),
            volume_handle: volume.id.clone(),
            driver: volume.driver.clone(),
            node: cx.node.clone(),
            attachment_id: paths::attachment_name(&volume.id, &volume.driver, &cx.node),
            lifecycle: volume.lifecycle,
            selinux_context: context_of(request.label),
        };
        Ok(Self {
            path: cx.path(&paths.target),
            data_file: cx.path(&paths.data_file),
            data: data.to_json(),
            staging,
            is_block: false,
        })
    }

    /// Creates the folder of the target, and writes the data file.
    async fn prepare(&self) -> Result<(), PluginError> {
        if let Some(parent) = self.path.parent() {
            files::create_folder(parent).await?;
        }
        files::write_data(&self.data_file, self.data.clone()).await
    }

    /// Removes what a failed attempt has left. Whether nothing is left: something may be mounted there by an earlier attempt.
    async fn clean_up(&self, cx: &Context) -> bool {
        match self.remove(cx).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, path = %self.path.display(), "cannot remove what a failed set-up has left");
                false
            }
        }
    }

    async fn remove(&self, cx: &Context) -> Result<(), PluginError> {
        files::remove_target(&cx.mounts, &self.path).await?;
        if !self.is_block {
            return files::remove_data(&self.data_file).await;
        }
        // Other pods may have the volume: the data file stays until the device is unstaged.
        match self.path.parent() {
            Some(parent) => files::remove_if_empty(parent).await,
            None => Ok(()),
        }
    }
}

/// Publishes a volume to a pod.
pub(super) async fn publish(
    cx: &Context,
    spec: &VolumeSpec,
    request: SetUpRequest<'_>,
) -> Result<SetUp, PluginError> {
    let volume = CsiVolume::read(spec)?;
    let session = cx.session_for(&volume)?;
    let object = cx.driver_objects.get(&volume.driver).await?;
    if let Err(error) = check_lifecycle(volume.driver.as_str(), object.as_deref(), volume.lifecycle) {
        cx.driver_objects.expire(&volume.driver);
        return Err(PluginError::new(error.to_string())
            .for_you()
            .of_class(error_class(FailedStep::ApiObject)));
    }
    let capabilities = session.capabilities().await?;
    let target = Target::new(cx, &volume, request, capabilities)?;
    let group = fs_group(&volume, object.as_deref(), capabilities)?;
    let (maps, tokens) = maps(cx, &volume, object.as_deref()).await?;
    let message = pb::NodePublishVolumeRequest {
        volume_id: volume.id.clone(),
        publish_context: cx.publish_context(&volume).await?,
        staging_target_path: target
            .staging
            .as_ref()
            .map_or_else(String::new, |path| path.to_string_lossy().into_owned()),
        target_path: target.path.to_string_lossy().into_owned(),
        volume_capability: Some(volume.capability(capabilities, request.label)?),
        readonly: volume.is_read_only(),
        secrets: maps.secrets.into_iter().collect(),
        volume_context: maps.volume_context.into_iter().collect(),
    };
    if let Err(error) = call_publish(cx, &session, &target, message, &tokens).await {
        let may_clean_up = !request.is_remount && !request.is_reconstructed;
        if error.class == FailureClass::Final && may_clean_up && !target.clean_up(cx).await {
            return Err(error.of_class(FailureClass::Uncertain));
        }
        return Err(error);
    }
    if let FsGroupAction::Walk(group) = group {
        let ownership = Ownership { group, policy: spec.fs_group_policy, walks: request.walks };
        let walked = cx.mounts.apply_fs_group(&target.path, ownership).await;
        walked.map_err(|error| error.of_class(error_class(FailedStep::FsGroupWalk)))?;
    }
    Ok(SetUp { host_path: target.path, learned: Learned::default() })
}

async fn call_publish(
    cx: &Context,
    session: &Session,
    target: &Target,
    message: pb::NodePublishVolumeRequest,
    tokens: &[String],
) -> Result<(), PluginError> {
    // Files are left, and an earlier attempt may still be in progress.
    let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
    target.prepare().await.map_err(uncertain)?;
    let published = session.driver.node_publish(&session.operation, message, tokens).await;
    published.map_err(|error| cx.set_up_error(&error))?;
    if files::exists(&target.path).await.map_err(uncertain)? {
        return Ok(());
    }
    let text = format!(
        "the CSI driver {} has reported that the volume is published, but {} does not exist; check the driver's log",
        session.driver.name(),
        target.path.display()
    );
    Err(PluginError::new(text).of_class(FailureClass::Uncertain))
}

/// Who applies the pod's fsGroup. Block volumes have no files.
fn fs_group(
    volume: &CsiVolume<'_>,
    object: Option<&CsiDriver>,
    driver: NodeCapabilities,
) -> Result<FsGroupAction, PluginError> {
    let fs_group = volume.spec.fs_group.filter(|_| volume.spec.mode == VolumeMode::Filesystem);
    let published = PublishedVolume {
        fs_type: &volume.source.fs_type,
        read_only: volume.is_read_only(),
        access_modes: volume.access_modes(),
    };
    fs_group_action(fs_group, driver.mount_group, object, published).map_err(|error| {
        PluginError::new(error.to_string()).for_you().of_class(error_class(FailedStep::ApiObject))
    })
}

/// The volume context and the secrets, with what the driver wants to know about the pod, and the tokens in them. Block volumes
/// get the same, unlike in the kubelet, which never sends them tokens (volumes.md §11.7).
async fn maps(
    cx: &Context,
    volume: &CsiVolume<'_>,
    object: Option<&CsiDriver>,
) -> Result<(PublishMaps, Vec<String>), PluginError> {
    let spec = volume.spec;
    let secret = volume.source.node_publish_secret.as_ref();
    let own = PublishMaps {
        volume_context: volume.source.attributes.clone(),
        secrets: cx.secret(volume, secret, "nodePublishSecretRef").await?.into_iter().collect(),
    };
    let mut tokens: BTreeMap<TokenName, IssuedToken> = BTreeMap::new();
    for name in wanted_tokens(object, &spec.service_account) {
        let token = cx.tokens.get(&spec.pod, &name).await?;
        tokens.insert(name, token);
    }
    let pod = PodInfo {
        name: spec.pod.name.clone(),
        namespace: spec.pod.namespace.clone(),
        uid: spec.pod.uid.clone(),
        service_account: spec.service_account.clone(),
    };
    let maps = publish_maps(own, object, &pod, volume.lifecycle, |name| tokens.get(name).cloned())
        .map_err(|error| PluginError::new(error.to_string()).of_class(error_class(FailedStep::ApiObject)))?;
    Ok((maps, tokens.into_values().map(|token| token.token).collect()))
}

/// Undoes [`publish`]. Everything that it needs is on disk.
pub(super) async fn unpublish(cx: &Context, place: &VolumePlace) -> Result<(), PluginError> {
    if place.is_block { unpublish_block(cx, place).await } else { unpublish_filesystem(cx, place).await }?;
    cx.tokens.forget(place.pod.as_str());
    Ok(())
}

async fn unpublish_filesystem(cx: &Context, place: &VolumePlace) -> Result<(), PluginError> {
    let paths = publish_paths(place.pod.as_str(), &place.inner_name).map_err(|error| name_error(&error))?;
    let (target, data_file) = (cx.path(&paths.target), cx.path(&paths.data_file));
    let saved = match files::read_data(&data_file).await? {
        Data::Saved(saved) => saved,
        Data::Missing => {
            return remove_unless_mounted(cx, &target, &data_file, || missing_data(&data_file)).await;
        }
        Data::Unreadable(error) => {
            let error = PluginError::new(error.to_string()).for_you();
            return remove_unless_mounted(cx, &target, &data_file, || error).await;
        }
    };
    let session = cx.session(&saved.driver)?;
    call_unpublish(&session, saved.volume_handle, &target).await?;
    files::remove_target(&cx.mounts, &target).await?;
    files::remove_data(&data_file).await
}

async fn call_unpublish(session: &Session, volume_id: String, target: &Path) -> Result<(), PluginError> {
    let target_path = target.to_string_lossy().into_owned();
    let message = pb::NodeUnpublishVolumeRequest { volume_id, target_path };
    session.driver.node_unpublish(&session.operation, message).await.map_err(|error| call_error(&error))
}

async fn unpublish_block(cx: &Context, place: &VolumePlace) -> Result<(), PluginError> {
    let shared = block_paths(&place.inner_name).map_err(|error| name_error(&error))?;
    let own = pod_block_paths(&place.inner_name, place.pod.as_str()).map_err(|error| name_error(&error))?;
    let (target, data_file) = (cx.path(&own.publish), cx.path(&shared.data_file));
    let error = match files::read_data(&data_file).await? {
        Data::Saved(saved) => {
            // Also if the target does not exist: the driver may keep a record of it.
            let session = cx.session(&saved.driver)?;
            call_unpublish(&session, saved.volume_handle, &target).await?;
            None
        }
        Data::Missing => Some(missing_data(&data_file)),
        Data::Unreadable(error) => Some(PluginError::new(error.to_string()).for_you()),
    };
    if let Some(error) = error
        && files::exists(&target).await?
    {
        return Err(error);
    }
    files::remove_target(&cx.mounts, &target).await?;
    files::remove_if_empty(&cx.path(&shared.publish_folder)).await
}
