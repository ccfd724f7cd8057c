//! Expansion on the node (volumes.md §4, §11.7).

use std::fmt;

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::csi::paths::{block_paths, pod_block_paths, publish_paths, stage_paths};
use keelson_volume_manager_core::expansion::ErrorClass;
use keelson_volume_manager_core::world::FailureClass;

use super::context::{Context, call_error};
use super::volume::{CsiVolume, name_error};
use crate::plugins::{PluginError, SetUpRequest, VolumeSpec};

/// Why a volume was not expanded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpandFailure {
    /// What follows for the claim.
    pub(crate) class: ErrorClass,
    /// The error.
    pub(crate) error: PluginError,
}

impl fmt::Display for ExpandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// An error from before the driver was asked to expand the volume: nothing is to be concluded about the size.
impl From<PluginError> for ExpandFailure {
    fn from(error: PluginError) -> Self {
        Self { class: ErrorClass::Unfinished, error }
    }
}

/// Expands a volume that is published to the pod of `spec`. The size that it has then, in bytes.
pub(super) async fn expand(
    cx: &Context,
    spec: &VolumeSpec,
    request: SetUpRequest<'_>,
    size: u64,
) -> Result<u64, ExpandFailure> {
    let volume = CsiVolume::read(spec)?;
    let session = cx.session_for(&volume)?;
    let capabilities = session.capabilities().await?;
    if !capabilities.expand {
        let text = format!("the CSI driver {} does not expand volumes on the node", volume.driver);
        return Err(ExpandFailure { class: ErrorClass::NotSupported, error: PluginError::new(text) });
    }
    let (uid, inner) = (&spec.pod.uid, &spec.inner_name);
    let (path, staging) = match spec.mode {
        VolumeMode::Filesystem => (
            publish_paths(uid, inner).map_err(|error| name_error(&error))?.target,
            stage_paths(&volume.driver, &volume.id).map_err(|error| name_error(&error))?.staging,
        ),
        VolumeMode::Block => (
            pod_block_paths(inner, uid).map_err(|error| name_error(&error))?.publish,
            block_paths(inner).map_err(|error| name_error(&error))?.staging,
        ),
    };
    let text = |path| cx.path(path).to_string_lossy().into_owned();
    let required_bytes = i64::try_from(size).map_err(|_| {
        PluginError::new(format!("the volume {inner} cannot have {size} bytes; ask for less")).for_you()
    })?;
    let secret = volume.source.node_expand_secret.as_ref();
    let message = pb::NodeExpandVolumeRequest {
        volume_id: volume.id.clone(),
        volume_path: text(&path),
        capacity_range: Some(pb::CapacityRange { required_bytes, limit_bytes: 0 }),
        staging_target_path: if capabilities.stage { text(&staging) } else { String::new() },
        volume_capability: Some(volume.capability(capabilities, request.label)?),
        secrets: cx.secret(&volume, secret, "nodeExpandSecretRef").await?,
    };
    match session.driver.node_expand(&session.operation, message).await {
        // Some drivers report no size, or one of before.
        Ok(reported) => Ok(u64::try_from(reported).unwrap_or(0).max(size)),
        Err(error) => {
            let code = error.code().and_then(|code| u32::try_from(code.number()).ok());
            let class = ErrorClass::of_code(code);
            let plugin_class = match class {
                ErrorClass::Unfinished => FailureClass::Uncertain,
                _ => FailureClass::Final,
            };
            Err(ExpandFailure { class, error: call_error(&error).of_class(plugin_class) })
        }
    }
}
