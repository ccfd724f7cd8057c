//! The usage of a volume, as its driver measures it (volumes.md §11.7, §13).

use std::fmt;
use std::path::PathBuf;

use keelson_proto::csi::v1 as pb;
use keelson_volume_manager_core::csi::paths::{DriverName, block_paths, pod_block_paths, publish_paths};
use keelson_volume_manager_core::operations::PodUid;

use super::context::{Context, call_error};
use super::files::{self, Data};
use super::stage::missing_data;
use super::volume::name_error;
use crate::measure::Usage;
use crate::plugins::{Answer, PluginError};

/// A published volume of a pod, as it is known also after a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeasuredVolume {
    /// The pod.
    pub(crate) pod: PodUid,
    /// The name of the volume's folder.
    pub(crate) inner_name: String,
    /// Below `volumes` or below `volumeDevices` of the pod's folder.
    pub(crate) is_block: bool,
}

/// Measures volumes of CSI drivers.
pub(crate) trait MeasureVolumes: fmt::Debug + Send + Sync {
    /// The usage of a volume, and its health; `None` if its driver does not measure volumes.
    fn measure<'a>(&'a self, volume: &'a MeasuredVolume) -> Answer<'a, Option<VolumeUsage>>;
}

/// What a driver says about a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeUsage {
    /// The driver.
    pub(crate) driver: DriverName,
    /// What is used and free; 0 where the driver says nothing. `None`: the driver reports only the condition.
    pub(crate) usage: Option<Usage>,
    /// Whether the volume is healthy, of a driver with VOLUME_CONDITION.
    pub(crate) condition: Option<Condition>,
}

/// The health of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Condition {
    /// It is not healthy.
    pub(crate) is_abnormal: bool,
    /// Why.
    pub(crate) message: String,
}

/// Measures a volume of a pod. `None`: the driver does not measure volumes.
pub(super) async fn measure(
    cx: &Context,
    volume: &MeasuredVolume,
) -> Result<Option<VolumeUsage>, PluginError> {
    let (data_file, volume_path) = paths_of(cx, volume)?;
    let saved = match files::read_data(&data_file).await? {
        Data::Saved(saved) => saved,
        Data::Missing => return Err(missing_data(&data_file)),
        Data::Unreadable(error) => return Err(PluginError::new(error.to_string()).for_you()),
    };
    let session = cx.session(&saved.driver)?;
    let capabilities = session.capabilities().await?;
    if !capabilities.stats {
        return Ok(None);
    }
    let message = pb::NodeGetVolumeStatsRequest {
        volume_id: saved.volume_handle,
        volume_path: volume_path.to_string_lossy().into_owned(),
        staging_target_path: String::new(),
    };
    let answer = session.driver.node_get_volume_stats(&session.operation, message).await;
    let answer = answer.map_err(|error| call_error(&error))?;
    let condition = answer.volume_condition.filter(|_| capabilities.condition);
    let condition = condition.map(|found| Condition { is_abnormal: found.abnormal, message: found.message });
    if answer.usage.is_empty() && condition.is_none() {
        let text =
            format!("the CSI driver {} has reported no usage of {}", saved.driver, volume_path.display());
        return Err(PluginError::new(text));
    }
    Ok(Some(VolumeUsage { driver: saved.driver, usage: usage_of(&answer.usage), condition }))
}

fn paths_of(cx: &Context, volume: &MeasuredVolume) -> Result<(PathBuf, PathBuf), PluginError> {
    let (inner, pod) = (&volume.inner_name, volume.pod.as_str());
    if volume.is_block {
        let shared = block_paths(inner).map_err(|error| name_error(&error))?;
        let own = pod_block_paths(inner, pod).map_err(|error| name_error(&error))?;
        return Ok((cx.path(&shared.data_file), cx.path(&own.device)));
    }
    let paths = publish_paths(pod, inner).map_err(|error| name_error(&error))?;
    Ok((cx.path(&paths.data_file), cx.path(&paths.target)))
}

/// Units that CSI does not define are ignored. A negative number counts as 0.
fn usage_of(reported: &[pb::VolumeUsage]) -> Option<Usage> {
    use pb::volume_usage::Unit;
    let number = |value: i64| u64::try_from(value).unwrap_or(0);
    let mut usage = None;
    for entry in reported {
        match Unit::try_from(entry.unit) {
            Ok(Unit::Bytes) => {
                let usage: &mut Usage = usage.get_or_insert_default();
                usage.used_bytes = number(entry.used);
                usage.capacity_bytes = number(entry.total);
                usage.available_bytes = number(entry.available);
            }
            Ok(Unit::Inodes) => {
                let usage: &mut Usage = usage.get_or_insert_default();
                usage.inodes_used = number(entry.used);
                usage.inodes = number(entry.total);
                usage.inodes_free = number(entry.available);
            }
            Ok(Unit::Unknown) | Err(_) => {}
        }
    }
    usage
}
