//! fc volumes (volumes.md §10.5): the node finds a disk that its host bus adapters see, mounts it once, and bind-mounts it
//! for each pod.

mod detach;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::fc::{
    Disk, FcError, Found, Link, PLUGIN, SCAN_ALL, Search, Tree, unique_name,
};
use keelson_volume_manager_core::sources::FcSource;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel, Shape};

use super::disk::{self, Locks, VolumeFile, wrong_source};
use super::host::{Host, blocking, names_in};
use super::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundFolder, Identity, Plugin, PluginError, Reconstructed,
    SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};

/// The plugin's folder, relative to the agent's root folder.
const ROOT: &str = "plugins/kubernetes.io/fc";
/// The folder of block maps in it.
const BLOCK: &str = "volumeDevices";
/// The folder of the SCSI hosts.
const SCSI_HOSTS: &str = "/sys/class/scsi_host";
/// How long a link may take to appear after a scan.
const LINK_WAIT: Duration = Duration::from_secs(10);
/// How often links are looked up meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The plugin of fc volumes.
#[derive(Debug)]
pub(crate) struct Fc {
    host: Host,
    /// By the name of the disk's folder.
    disks: Locks,
}

/// A volume with its source read.
struct Read {
    source: FcSource,
    disk: Disk,
    read_only: bool,
}

const fn tree(is_block: bool) -> Tree {
    if is_block { Tree::BlockMaps } else { Tree::Mounts }
}

impl Fc {
    pub(crate) fn new(host: Host) -> Self {
        Self { host, disks: Locks::default() }
    }

    fn read(volume: &VolumeSpec) -> Result<Read, PluginError> {
        let source: FcSource = disk::read_source(volume)?;
        let disk = Disk::new(&volume.inner_name, &source).map_err(wrong_source)?;
        let read_only = disk::is_read_only(volume, source.read_only);
        Ok(Read { source, disk, read_only })
    }

    async fn mount(&self, volume: &VolumeSpec, request: DeviceRequest<'_>) -> Result<Learned, PluginError> {
        let Read { source, disk, read_only } = Self::read(volume)?;
        let options = disk::options(volume, read_only, request.label)?;
        let is_block = volume.mode == VolumeMode::Block;
        let path = self.host.root.join(disk.path(tree(is_block)));
        let _guard = self.disks.lock(&disk.folder()).await;
        let mut learned = Learned { device_mount_path: Some(shown(&path)), ..Learned::default() };
        if !is_block && self.host.mounts.is_mount_point(&path)? {
            return Ok(learned);
        }
        let device = self.search(&volume.inner_name, &disk).await?;
        self.host.mounts.create_folders(&path).await?;
        let name = unique_name(&volume.inner_name, &source).map_err(wrong_source)?;
        let file = VolumeFile { volume: name, inner_name: volume.inner_name.clone() };
        let folder = path.clone();
        let stored = blocking("store the name of an fc volume", move || file.write(&folder)).await;
        stored.map_err(|error| error.of_class(FailureClass::Uncertain))?;
        if !is_block
            && let Err(error) =
                disk::mount_device(&self.host, &device, &path, &source.fs_type, &options).await
        {
            return Err(self.undo(&path, error).await);
        }
        learned.device_path = Some(device);
        Ok(learned)
    }

    /// Removes the folder after a mount that failed for good.
    async fn undo(&self, path: &Path, error: PluginError) -> PluginError {
        if error.class == FailureClass::Uncertain {
            return error;
        }
        let folder = path.to_owned();
        let is_mounted = self.host.mounts.is_mount_point(path).unwrap_or(true);
        let removed = async {
            if is_mounted {
                None
            } else {
                blocking("remove", move || VolumeFile::remove_with(&folder)).await.ok()
            }
        };
        if removed.await.is_some() { error } else { error.of_class(FailureClass::Uncertain) }
    }

    /// The device of a disk. Without a multipath device, all SCSI hosts are scanned once.
    async fn search(&self, volume: &str, disk: &Disk) -> Result<String, PluginError> {
        match self.look(volume, disk, Search::First).await? {
            Ok(Found::Multipath(device) | Found::Single(device)) => return Ok(device),
            Ok(Found::Rescan) => {}
            Err(error) => return Err(PluginError::new(error.to_string())),
        }
        self.host.on_machine("scan the SCSI hosts", scan).await?;
        let deadline = tokio::time::Instant::now() + LINK_WAIT;
        loop {
            match self.look(volume, disk, Search::AfterScan).await? {
                Ok(Found::Multipath(device) | Found::Single(device)) => return Ok(device),
                Err(FcError::NotFound { .. }) | Ok(Found::Rescan)
                    if tokio::time::Instant::now() < deadline =>
                {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                Err(error) => return Err(PluginError::new(error.to_string())),
                Ok(Found::Rescan) => {
                    return Err(PluginError::new(format!("the fc volume {volume} has no device")));
                }
            }
        }
    }

    async fn look(
        &self,
        volume: &str,
        disk: &Disk,
        search: Search,
    ) -> Result<Result<Found, FcError>, PluginError> {
        let (volume, disk) = (volume.to_owned(), disk.clone());
        let work = move |machine: &super::host::Machine| {
            let mut links = Vec::new();
            for name in machine.names(disk.links())? {
                if let Some(device) = machine.follow(&format!("{}/{name}", disk.links())) {
                    links.push(Link { name, device });
                }
            }
            Ok(disk.search(&volume, &links, &machine.mappings()?, search))
        };
        self.host.on_machine("read the links of disks", work).await
    }

    async fn set_up_pod(&self, volume: &VolumeSpec, request: SetUpRequest<'_>) -> Result<SetUp, PluginError> {
        let Read { disk, read_only, .. } = Self::read(volume)?;
        if volume.mode == VolumeMode::Block {
            let found = self.look(&volume.inner_name, &disk, Search::AfterScan).await?;
            return match found {
                Ok(Found::Multipath(device) | Found::Single(device)) => {
                    Ok(SetUp { host_path: device.into(), ..SetUp::default() })
                }
                Ok(Found::Rescan) => {
                    Err(PluginError::new(format!("the fc volume {} has no device", volume.inner_name)))
                }
                Err(error) => Err(PluginError::new(error.to_string())),
            };
        }
        let own = self.host.root.join(disk.path(Tree::Mounts));
        let source = request.device_mount_path.map_or(own, PathBuf::from);
        let host_path = disk::set_up(&self.host, volume, (PLUGIN, &source), read_only, request).await?;
        Ok(SetUp { host_path, ..SetUp::default() })
    }

    /// The folders of disks in a tree.
    fn list(root: &Path, tree: Tree) -> io::Result<Vec<PathBuf>> {
        let base = match tree {
            Tree::Mounts => root.join(ROOT),
            Tree::BlockMaps => root.join(ROOT).join(BLOCK),
        };
        let names = names_in(&base)?.into_iter().filter(|name| !name.starts_with('.') && name != BLOCK);
        Ok(names.map(|name| base.join(name)).collect())
    }

    /// The folder of the volume with a unique name.
    fn find(root: &Path, tree: Tree, volume: &str) -> io::Result<Option<PathBuf>> {
        let folders = Self::list(root, tree)?;
        let is_named = |folder: &&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.volume == volume);
        let may_be = |folder: &&PathBuf| {
            VolumeFile::read(folder).is_none() && name_of(folder).is_some_and(|n| n == volume)
        };
        Ok(folders.iter().find(is_named).or_else(|| folders.iter().find(may_be)).cloned())
    }

    async fn read_folder(&self, found: &FoundFolder) -> Result<Reconstructed, PluginError> {
        let (pod, inner_name) = (found.pod.clone(), found.inner_name.clone());
        let unknown = move |what: &str| {
            PluginError::new(format!("pod {pod} has no {what} of the fc volume {inner_name}"))
        };
        let (path, label) = if found.is_block {
            let (root, wanted) = (self.host.root.clone(), found.clone());
            let work = move || {
                let folders = Self::list(&root, Tree::BlockMaps)?;
                Ok(disk::folder_with_map(&folders, &root, PLUGIN, &wanted))
            };
            let path = blocking("list the block maps of fc volumes", work).await?;
            (path.ok_or_else(|| unknown("block map"))?, Some(MountLabel::Unlabelled))
        } else {
            let target = disk::pod_path(&self.host.root, PLUGIN, found.pod.as_str(), &found.inner_name);
            let references = self.host.mounts.mount_references(&target)?;
            let disks = references.iter().filter_map(|path| Disk::parse(&shown(path)).ok());
            let disk = disks.into_iter().find(|(_, tree)| *tree == Tree::Mounts);
            let (disk, tree) = disk.ok_or_else(|| unknown("mount"))?;
            (self.host.root.join(disk.path(tree)), None)
        };
        let name = disk::stored_name(&path, found, name_of(&path)).await?;
        Ok(Reconstructed {
            shared_name: Some(name.ok_or_else(|| unknown("known folder"))?.into()),
            has_device: true,
            device_mount_path: Some(shown(&path)),
            label,
        })
    }
}

/// Scans every SCSI host.
fn scan(machine: &super::host::Machine) -> io::Result<()> {
    for host in machine.names(SCSI_HOSTS)? {
        if let Err(error) = machine.write(&format!("{SCSI_HOSTS}/{host}/scan"), SCAN_ALL) {
            tracing::warn!(event = "scsi_scan_failed", host, %error, "cannot scan a SCSI host");
        }
    }
    Ok(())
}

/// The unique name that the volume in a folder has if none of its identifiers contains a space, `_` or `-`.
fn name_of(folder: &Path) -> Option<String> {
    let (disk, _) = Disk::parse(&shown(folder)).ok()?;
    let name = disk.folder();
    let source = match name.rsplit_once("-lun-") {
        Some((wwns, lun)) => FcSource {
            target_wwns: wwns.split('-').map(str::to_owned).collect(),
            lun: Some(lun.parse().ok()?),
            ..FcSource::default()
        },
        None => FcSource { wwids: name.split('-').map(str::to_owned).collect(), ..FcSource::default() },
    };
    unique_name("", &source).ok()
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Plugin for Fc {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn field(&self) -> &'static str {
        "fc"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            let Read { source, read_only, .. } = Self::read(volume)?;
            let name = unique_name(&volume.inner_name, &source).map_err(wrong_source)?;
            Ok(Identity {
                shared_name: Some(name.into()),
                shape: Shape::AttachableDevice,
                is_set_up_each_sync: false,
                supports_label: true,
                // Nodes do not grow such volumes (volumes.md §1).
                can_expand: false,
                read_only,
            })
        })
    }

    fn attach<'a>(&'a self, _: &'a VolumeSpec) -> Answer<'a, Learned> {
        Box::pin(async { Ok(Learned::default()) })
    }

    fn detach<'a>(&'a self, _: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, request: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(self.mount(volume, request))
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(self.set_up_pod(volume, request))
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(disk::tear_down(&self.host, PLUGIN, place))
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.unmount(device))
    }

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, _: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(async move { self.grow(volume).await.map(|()| size) })
    }

    fn global_map_path(&self, inner_name: &str) -> Option<PathBuf> {
        let folders = Self::list(&self.host.root, Tree::BlockMaps).ok()?;
        disk::folder_of_volume(&folders, inner_name)
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(self.read_folder(folder))
    }
}
