//! Whether a volume is not attached because the node has no room for it (volumes.md §3.14).

use keelson_volume_manager_core::csi::attachment::{AttachedVolume, publish_context};
use keelson_volume_manager_core::csi::paths;
use keelson_volume_manager_core::operations::VolumeName;

use super::context::Context;
use super::stage::split_name;

/// Why the node has no room for one of these volumes, which are not attached. `None`: nothing says so, or the driver's limit is
/// not one that changes (`nodeAllocatableUpdatePeriodSeconds` of its CSIDriver), or the objects cannot be read.
pub(super) async fn exceeded(cx: &Context, volumes: &[VolumeName]) -> Option<String> {
    let exceeded = volumes.iter().map(|volume| of_volume(cx, volume));
    futures_util::future::join_all(exceeded).await.into_iter().flatten().next()
}

async fn of_volume(cx: &Context, volume: &VolumeName) -> Option<String> {
    let (driver, handle) = split_name(volume).ok()?;
    let object = cx.driver_objects.get(&driver).await.ok()??;
    object.spec.node_allocatable_update_period_seconds?;
    let attachment = paths::attachment_name(handle, &driver, &cx.node);
    let found = cx.objects.attachment(&attachment).await.ok()?;
    let attached = AttachedVolume { handle, attachment: &attachment, node: &cx.node };
    let error = publish_context(attached, found.as_ref()).err().filter(|error| error.is_limit())?;
    cx.drivers.note_exhausted(&driver);
    Some(error.to_string())
}
