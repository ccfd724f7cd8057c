//! Mounts of disks and their bind mounts in pods, and when they stay.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_volume_manager_core::names;
use keelson_volume_manager_core::world::{FailureClass, MountLabel, MountStep};

use super::source::options;
use crate::mounter::MountRequest;
use crate::plugins::host::{Host, Machine, Mounts, Ownership, is_mount_point, mount_references};
use crate::plugins::{PluginError, SetUpRequest, VolumePlace, VolumeSpec};

/// Where a volume is in its pod.
pub(crate) fn pod_path(root: &Path, plugin: &str, pod: &str, inner_name: &str) -> PathBuf {
    root.join("pods").join(pod).join("volumes").join(names::escape(plugin)).join(inner_name)
}

/// Formats `device` if it is blank and mounts it on `path`.
pub(crate) async fn mount_device(
    host: &Host,
    device: &str,
    path: &Path,
    fs_type: &str,
    options: &[String],
) -> Result<(), PluginError> {
    host.mounts.create_folders(path).await?;
    let request = MountRequest { source: device, target: path, fs_type, options, sensitive: &[] };
    host.mounts.format_and_mount(request).await
}

/// Bind-mounts `source`, where the device is mounted, to the pod, and applies the pod's fsGroup.
pub(super) async fn set_up(
    host: &Host,
    volume: &VolumeSpec,
    (source, target): (&Path, &Path),
    read_only: bool,
    request: SetUpRequest<'_>,
) -> Result<(), PluginError> {
    bind(host, volume, (source, target), read_only, request.is_reconstructed).await?;
    apply_fs_group(host, volume, target, read_only, request).await;
    Ok(())
}

/// Applies the pod's fsGroup. As in the kubelet, the pod starts all the same if that fails (volumes.md §10.5).
pub(super) async fn apply_fs_group(
    host: &Host,
    volume: &VolumeSpec,
    target: &Path,
    read_only: bool,
    request: SetUpRequest<'_>,
) {
    let Some(group) = volume.fs_group.filter(|_| !read_only) else { return };
    let ownership = Ownership { group, policy: volume.fs_group_policy, walks: request.walks };
    if let Err(error) = host.mounts.apply_fs_group(target, ownership).await {
        let (uid, volume) = (&volume.pod.uid, &volume.inner_name);
        tracing::warn!(event = "fs_group_failed", uid, volume, %error, "cannot apply the fsGroup");
    }
}

/// Bind-mounts `source`, on which the device has to be mounted, on the folder `target` of a pod. After an error nothing is
/// left of it.
async fn bind(
    host: &Host,
    volume: &VolumeSpec,
    (source, target): (&Path, &Path),
    read_only: bool,
    keeps_folder: bool,
) -> Result<(), PluginError> {
    // Otherwise the pod would write to the node's own disk.
    if !host.is_mount_point(source).await? {
        let text =
            format!("the device of the volume {} is not mounted on {}", volume.inner_name, source.display());
        return Err(PluginError::new(text).at(MountStep::MountDevice).of_class(FailureClass::Transient));
    }
    let options = options(volume, read_only, &MountLabel::Unlabelled)?;
    host.mounts.create_folders(target).await?;
    let Err(error) = host.mounts.bind(source, target, &options).await else { return Ok(()) };
    if keeps_folder || error.class == FailureClass::Uncertain {
        return Err(error);
    }
    match host.mounts.clean_mount_point(target).await {
        Ok(()) => Err(error),
        Err(_) => Err(error.of_class(FailureClass::Uncertain)),
    }
}

/// Unmounts a volume from its pod. A block volume has no folder of its own.
pub(super) async fn tear_down(host: &Host, plugin: &str, place: &VolumePlace) -> Result<(), PluginError> {
    if place.is_block {
        return Ok(());
    }
    let path = pod_path(&host.root, plugin, place.pod.as_str(), &place.inner_name);
    host.mounts.clean_mount_point(&path).await
}

/// Unmounts `path` and leaves the folder with what the mount has covered.
pub(crate) async fn unmount(host: &Host, path: &Path) -> Result<(), PluginError> {
    if !host.is_mount_point(path).await? {
        return Ok(());
    }
    let text = path.to_str().ok_or_else(|| PluginError::new(format!("{} is not UTF-8", path.display())))?;
    let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
    host.run_checked("umount", &[text]).await.map_err(uncertain)?;
    if host.is_mount_point(path).await? {
        let text = format!("{} is still a mount point after umount", path.display());
        return Err(uncertain(PluginError::new(text)));
    }
    Ok(())
}

/// Refuses while what is mounted on `path`, which is `relative` below the agent's root folder, is mounted elsewhere too. A
/// mount whose path ends like that is the same one, seen through another prefix (volumes.md §3.11).
pub(crate) async fn refuse_references(
    mounts: &Arc<dyn Mounts>,
    path: &Path,
    relative: &str,
) -> Result<(), PluginError> {
    if !is_mount_point(mounts, path).await? {
        return Ok(());
    }
    let references = mount_references(mounts, path).await?;
    let others: Vec<String> = references
        .iter()
        .filter(|other| !other.ends_with(relative))
        .map(|other| other.display().to_string())
        .collect();
    if others.is_empty() {
        return Ok(());
    }
    let (path, others) = (path.display(), others.join(", "));
    Err(PluginError::new(format!("the device mounted on {path} is still mounted on {others}")))
}

/// Refuses while something holds one of the devices, such as a mount in another mount namespace (volumes.md §3.11).
pub(crate) async fn refuse_busy(host: &Host, devices: &[String]) -> Result<(), PluginError> {
    for device in devices {
        if host.commands.is_busy(Path::new(device)).await? {
            let text = format!(
                "the device {device} is in use when it was no longer expected to be in use; it stays on the node until \
                 nothing has it open or mounted"
            );
            return Err(PluginError::new(text));
        }
    }
    Ok(())
}

/// The device node that is mounted on `path`.
pub(crate) async fn mounted_device(host: &Host, path: &Path) -> Result<Option<String>, PluginError> {
    let path = path.to_owned();
    let read = move |machine: &Machine| {
        let real = match (path.parent(), path.file_name()) {
            // The path itself may hang.
            (Some(parent), Some(name)) => parent.canonicalize().unwrap_or_else(|_| parent.into()).join(name),
            _ => path.clone(),
        };
        let text = machine.text("/proc/self/mountinfo");
        let is_there = |line: &&str| {
            let parsed = keelson_mountinfo::parse(line.as_bytes());
            parsed.first().is_some_and(|mount| mount.point == real)
        };
        // The third field is the number of the device; the last mount hides the others.
        let number = text.lines().rev().find(is_there).and_then(|line| line.split(' ').nth(2));
        Ok(number.and_then(|number| machine.device_of_number(number)))
    };
    host.on_machine("read the mounts", read).await
}
