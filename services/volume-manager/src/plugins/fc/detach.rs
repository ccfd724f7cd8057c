//! Unmounts the device of an fc disk and removes the disk from the node.

use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::fc::{
    self, DETACH_LIMIT_SECONDS, DETACH_RETRY_SECONDS, Disk, FcError, Found, Search, Tree,
};
use keelson_volume_manager_core::multipath::{self as core_multipath, Step};
use keelson_volume_manager_core::world::FailureClass;
use tokio::time::Instant;

use super::{Fc, Read, shown, tree};
use crate::plugins::disk::{self, VolumeFile};
use crate::plugins::host::{Machine, blocking};
use crate::plugins::multipath;
use crate::plugins::{DevicePlace, PluginError, VolumeSpec};

impl Fc {
    pub(super) async fn unmount(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let Some(path) = self.place(device).await? else { return Ok(()) };
        let (disk, found) =
            Disk::parse(&shown(&path)).map_err(|error| PluginError::new(error.to_string()))?;
        if path != self.host.root.join(disk.path(tree(device.is_block))) || found != tree(device.is_block) {
            let text = format!("{} is not the global folder of the volume {}", path.display(), device.volume);
            return Err(PluginError::new(text));
        }
        let _guard = self.disks.lock(&disk.folder()).await;
        let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
        let node = if device.is_block {
            refuse_maps(device, &path).await?;
            self.device_of(device, &disk).await?
        } else {
            // While it is mounted, the mount says which device it is; later only the links do.
            let mounted = self.mounted_device(&path).await?;
            disk::unmount(&self.host, &path).await?;
            match mounted {
                Some(node) => Some(node),
                None => self.device_of(device, &disk).await.map_err(uncertain)?,
            }
        };
        if let Some(node) = node
            && !self.is_used_otherwise(device, &disk).await.map_err(uncertain)?
        {
            self.detach_disk(&node, device.volume.as_str()).await.map_err(uncertain)?;
        }
        let folder = path.clone();
        let what = format!("remove {}", path.display());
        blocking(&what, move || VolumeFile::remove_with(&folder)).await.map_err(uncertain)
    }

    /// The global folder; `None` if it is gone.
    async fn place(&self, device: &DevicePlace) -> Result<Option<PathBuf>, PluginError> {
        if let Some(path) = device.device_mount_path.as_ref().filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            if self.host.mounts.is_mount_point(&path)? {
                return Ok(Some(path));
            }
            let exists = path.clone();
            let exists = blocking("look up the folder of an fc volume", move || exists.try_exists()).await?;
            return Ok(exists.then_some(path));
        }
        let (root, volume, tree) = (self.host.root.clone(), device.volume.clone(), tree(device.is_block));
        blocking("list the fc volumes", move || Self::find(&root, tree, volume.as_str())).await
    }

    /// The device node that is mounted on `path`.
    async fn mounted_device(&self, path: &Path) -> Result<Option<String>, PluginError> {
        let path = path.to_owned();
        let read = move |machine: &Machine| {
            let text = machine.text("/proc/self/mountinfo");
            let lines: Vec<&str> = text.lines().collect();
            let is_there = |line: &&&str| {
                let parsed = keelson_mountinfo::parse(line.as_bytes());
                parsed.first().is_some_and(|mount| mount.point == path)
            };
            // The third field is the number of the device; the last mount hides the others.
            let number = lines.iter().rev().find(is_there).and_then(|line| line.split(' ').nth(2));
            Ok(number.and_then(|number| machine.device_of_number(number)))
        };
        self.host.on_machine("read the mounts", read).await
    }

    /// The device node that the links of a disk lead to; `None` if the node does not see the disk.
    async fn device_of(&self, device: &DevicePlace, disk: &Disk) -> Result<Option<String>, PluginError> {
        match self.look(&device.inner_name, disk, Search::AfterScan).await? {
            Ok(Found::Multipath(node) | Found::Single(node)) => Ok(Some(node)),
            Ok(Found::Rescan) | Err(FcError::NotFound { .. }) => Ok(None),
            Err(error) => Err(PluginError::new(error.to_string())),
        }
    }

    /// Whether the same disk is also used in the other mode.
    async fn is_used_otherwise(&self, device: &DevicePlace, disk: &Disk) -> Result<bool, PluginError> {
        let other = self.host.root.join(disk.path(tree(!device.is_block)));
        blocking("look up the folders of an fc disk", move || other.try_exists()).await
    }

    /// Removes a disk from the node. What fails is tried again for a while.
    async fn detach_disk(&self, node: &str, volume: &str) -> Result<(), PluginError> {
        let deadline = Instant::now() + Duration::from_secs(DETACH_LIMIT_SECONDS.into());
        loop {
            let Err(error) = self.try_detach(node, volume).await else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(error);
            }
            tracing::warn!(event = "fc_detach_failed", volume, %error, "cannot detach an fc disk yet");
            tokio::time::sleep(Duration::from_secs(DETACH_RETRY_SECONDS.into())).await;
        }
    }

    async fn try_detach(&self, node: &str, volume: &str) -> Result<(), PluginError> {
        let mappings =
            self.host.on_machine("read the multipath devices", |machine| machine.mappings()).await?;
        let steps = fc::detach(node, &mappings).map_err(|error| PluginError::new(error.to_string()))?;
        for step in &steps {
            let result = multipath::carry_out(&self.host, step).await;
            match (step, result) {
                (_, Ok(())) => {}
                (Step::FlushMap(_) | Step::Delete(_), Err(error)) => return Err(error),
                (Step::FlushBuffers(_), Err(error)) => {
                    tracing::warn!(event = "disk_removal_failed", volume, %error, "cannot {step}");
                }
            }
        }
        Ok(())
    }

    /// Grows a mounted volume: each path learns the size of the disk, then the filesystem grows.
    pub(super) async fn grow(&self, volume: &VolumeSpec) -> Result<(), PluginError> {
        let Read { disk, .. } = Self::read(volume)?;
        let _guard = self.disks.lock(&disk.folder()).await;
        let found = self.look(&volume.inner_name, &disk, Search::AfterScan).await?;
        let node = match found.map_err(|error| PluginError::new(error.to_string()))? {
            Found::Multipath(node) | Found::Single(node) => node,
            Found::Rescan => {
                return Err(PluginError::new(format!("the fc volume {} has no device", volume.inner_name)));
            }
        };
        let name = core_multipath::kernel_name(&node).unwrap_or_default().to_owned();
        let rescan = move |machine: &Machine| {
            let mappings = machine.mappings()?;
            let slaves = mappings.into_iter().find(|mapping| mapping.name == name).map(|m| m.slaves);
            for disk in slaves.unwrap_or_else(|| vec![name.clone()]) {
                machine.write(&format!("/sys/block/{disk}/device/rescan"), "1")?;
            }
            Ok(())
        };
        self.host.on_machine("rescan the paths of the disk", rescan).await?;
        if let Some(map) = node.strip_prefix("/dev/").filter(|name| name.starts_with("dm-")) {
            self.host.run_checked("multipathd", &["resize", "map", map]).await?;
        }
        if volume.mode == VolumeMode::Block {
            return Ok(());
        }
        let mount = self.host.root.join(disk.path(Tree::Mounts));
        self.host.commands.grow(Path::new(&node), &mount).await
    }
}

/// Refuses to go on while pods have block maps of the disk.
async fn refuse_maps(device: &DevicePlace, path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    let left = blocking("list the block maps", move || disk::maps_in(&folder, &[])).await?;
    if left.is_empty() {
        return Ok(());
    }
    let text =
        format!("the block volume {} is still referenced by the pods {}", device.volume, left.join(", "));
    Err(PluginError::new(text))
}
