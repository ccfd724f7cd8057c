//! The plugin of disks, for any kind.

use std::path::{Path, PathBuf};

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::global_folder::Tree;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel, Shape};

use super::folder::DiskFolder;
use super::kind::{DiskKind, Release};
use super::locks::Locks;
use super::mounts::{
    apply_fs_group, mount_device, mounted_device, pod_path, refuse_busy, refuse_references, set_up,
    tear_down, unmount,
};
use super::source::options;
use super::volume_file::{VolumeFile, folder_of_volume, folder_with_map};
use crate::listing::names_in;
use crate::plugins::host::{Host, blocking, is_bound, label_of_mount};
use crate::plugins::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundDevice, FoundFolder, Identity, Plugin, PluginError,
    Reconstructed, SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};

/// The plugin of one kind of disks.
#[derive(Debug)]
pub(crate) struct DiskPlugin<K> {
    host: Host,
    kind: K,
    /// By [`DiskFolder::lock`].
    pub(crate) locks: Locks,
}

fn is_block(volume: &VolumeSpec) -> bool {
    volume.mode == VolumeMode::Block
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn uncertain(error: PluginError) -> PluginError {
    error.of_class(FailureClass::Uncertain)
}

impl<K: DiskKind> DiskPlugin<K> {
    pub(crate) fn with_kind(host: Host, kind: K) -> Self {
        Self { host, kind, locks: Locks::default() }
    }

    async fn mount(&self, volume: &VolumeSpec, request: DeviceRequest<'_>) -> Result<Learned, PluginError> {
        let wanted = K::read(volume)?;
        let options = options(volume, wanted.read_only, request.label)?;
        let folder = K::folder(&wanted.disk, Tree::of(is_block(volume)));
        let path = self.host.root.join(&folder.path);
        let file = VolumeFile { volume: wanted.name, inner_name: volume.inner_name.clone() };
        let _guard = self.locks.lock(&folder.lock).await;
        let mut learned = Learned { device_mount_path: Some(shown(&path)), ..Learned::default() };
        if !is_block(volume) && self.host.is_mount_point(&path).await? {
            // At startup it may have been found under another spelling of its name, which is given up by this.
            self.store(&path, file).await?;
            return Ok(learned);
        }
        let device = self.kind.acquire(volume, (&wanted.disk, &path), &file).await?;
        if !is_block(volume)
            && let Err(error) = mount_device(&self.host, &device, &path, &wanted.fs_type, &options).await
        {
            return Err(if K::OWES_RELEASE { uncertain(error) } else { self.undo(&path, error).await });
        }
        learned.device_path = Some(device);
        Ok(learned)
    }

    async fn store(&self, folder: &Path, file: VolumeFile) -> Result<(), PluginError> {
        let folder = folder.to_owned();
        let work = move || {
            if VolumeFile::read(&folder) == Some(file.clone()) { Ok(()) } else { file.write(&folder) }
        };
        blocking("store the name of a volume", work).await
    }

    /// Removes the folder after a mount that failed for good.
    async fn undo(&self, path: &Path, error: PluginError) -> PluginError {
        if error.class == FailureClass::Uncertain || self.host.is_mount_point(path).await.unwrap_or(true) {
            return uncertain(error);
        }
        let folder = path.to_owned();
        let removed = blocking("remove the folder of a disk", move || VolumeFile::remove_with(&folder)).await;
        if removed.is_ok() { error } else { uncertain(error) }
    }

    async fn set_up_pod(&self, volume: &VolumeSpec, request: SetUpRequest<'_>) -> Result<SetUp, PluginError> {
        let wanted = K::read(volume)?;
        if is_block(volume) {
            let device = self.kind.device(volume, &wanted.disk, request.device_path).await?;
            return Ok(SetUp { host_path: device.into(), ..SetUp::default() });
        }
        let target = pod_path(&self.host.root, K::NAME, &volume.pod.uid, &volume.inner_name);
        let done = SetUp { host_path: target.clone(), ..SetUp::default() };
        let bound = options(volume, wanted.read_only, &MountLabel::Unlabelled)?;
        if is_bound(&self.host.mounts, &target, &bound).await? {
            if request.is_reconstructed {
                // The service may have been killed after the bind mount.
                apply_fs_group(&self.host, volume, &target, wanted.read_only, request).await;
            }
            return Ok(done);
        }
        let source = self.host.root.join(K::folder(&wanted.disk, Tree::Mounts).path);
        if !self.host.is_mount_point(&source).await? {
            // Someone has unmounted it.
            let request = DeviceRequest { device_path: request.device_path, label: request.label };
            self.mount(volume, request).await?;
        }
        set_up(&self.host, volume, (&source, &target), wanted.read_only, request).await?;
        Ok(done)
    }

    async fn unmount(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let Some((path, folder)) = self.place(device).await? else { return Ok(()) };
        let _guard = self.locks.lock(&folder.lock).await;
        if !self.exists(&path).await? || self.is_anothers(&path, &folder, device.volume.as_str()).await? {
            return Ok(());
        }
        let mut mounted = None;
        if device.is_block {
            refuse_maps::<K>(device, &path).await?;
        } else {
            refuse_references(&self.host.mounts, &path, &folder.path).await?;
            // The mount says which device it is, even if udev has removed the links.
            mounted = mounted_device(&self.host, &path).await?;
            unmount(&self.host, &path).await?;
        }
        self.release(device, (&path, &folder), mounted.as_deref()).await.map_err(uncertain)
    }

    /// Gives a disk back that is not mounted any more. Until that is done its folder stays, by which it is found again.
    async fn release(
        &self,
        device: &DevicePlace,
        (path, folder): (&Path, &DiskFolder),
        mounted: Option<&str>,
    ) -> Result<(), PluginError> {
        let is_shared = self.is_shared(folder).await;
        let devices = self.kind.devices(folder, mounted).await?;
        if !is_shared {
            refuse_busy(&self.host, &devices).await?;
        }
        let volume = device.volume.as_str();
        self.kind.release(Release { volume, folder, path, devices: &devices, is_shared }).await
    }

    /// The global folder of a device; `None` if there is none.
    async fn place(&self, device: &DevicePlace) -> Result<Option<(PathBuf, DiskFolder)>, PluginError> {
        let tree = Tree::of(device.is_block);
        let known = device.device_mount_path.as_ref().filter(|path| !path.is_empty()).map(PathBuf::from);
        let path = match known {
            Some(path) => path,
            None => {
                let (root, volume) = (self.host.root.clone(), device.volume.clone());
                let work = move || find::<K>(&root, tree, volume.as_str());
                match blocking("list the disks", work).await? {
                    Some(path) => path,
                    None => return Ok(None),
                }
            }
        };
        let folder = K::parse(&shown(&path)).map_err(PluginError::new)?;
        if path != self.host.root.join(&folder.path) || folder.tree != tree {
            let text = format!("{} is not the global folder of the volume {}", path.display(), device.volume);
            return Err(PluginError::new(text));
        }
        Ok(Some((path, folder)))
    }

    /// Whether a global folder exists. One with a mount is not touched, because the mount may hang.
    async fn exists(&self, path: &Path) -> Result<bool, PluginError> {
        if self.host.is_mount_point(path).await? {
            return Ok(true);
        }
        if self.host.mounts.exists(path).await? {
            return Ok(true);
        }
        let path = path.to_owned();
        // The service was killed after it had removed the folder.
        blocking("remove the name of a disk", move || VolumeFile::remove_with(&path)).await?;
        Ok(false)
    }

    /// Whether a folder belongs to another volume meanwhile.
    async fn is_anothers(&self, path: &Path, folder: &DiskFolder, name: &str) -> Result<bool, PluginError> {
        let (path, folder) = (path.to_owned(), folder.clone());
        let stored =
            blocking("read the name of a volume", move || Ok(stored_name::<K>(&path, &folder))).await?;
        Ok(stored.is_some_and(|stored| stored != name))
    }

    /// Whether another folder is of the same disk: through another portal or interface, or in the other tree. If that cannot
    /// be read, it may be so.
    async fn is_shared(&self, folder: &DiskFolder) -> bool {
        let (root, own) = (self.host.root.clone(), folder.clone());
        let list = move || {
            let is_other = |path: &PathBuf| {
                let other = K::parse(&shown(path));
                other.is_ok_and(|other| other.disk == own.disk && other.path != own.path)
            };
            for tree in Tree::ALL {
                if K::list(&root, tree)?.iter().any(is_other) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        blocking("list the disks", list).await.unwrap_or_else(|error| {
            tracing::warn!(event = "disk_stays", plugin = K::NAME, %error, "a disk stays on the node");
            true
        })
    }

    async fn read_folder(&self, found: &FoundFolder) -> Result<Reconstructed, PluginError> {
        let path = self.folder_of(found).await?;
        let unknown = |path: &Path| PluginError::new(format!("{} names no known disk", path.display()));
        let folder = K::parse(&shown(&path)).map_err(PluginError::new)?;
        let (stored_at, found) = (path.clone(), found.clone());
        let work = move || {
            let name = stored_name::<K>(&stored_at, &folder);
            let guess = name.is_none().then(|| K::guess(&folder)).flatten();
            if let Some(volume) = guess.clone().filter(|_| found.is_block) {
                // A block map is later found by the inner name.
                VolumeFile { volume, inner_name: found.inner_name.clone() }.write(&stored_at)?;
            }
            Ok((name.or(guess), found.is_block))
        };
        let (name, is_block) = blocking("read the name of a volume", work).await?;
        let label = if is_block {
            Some(MountLabel::Unlabelled)
        } else {
            label_of_mount(&self.host.mounts, &path).await?
        };
        Ok(Reconstructed {
            shared_name: Some(name.ok_or_else(|| unknown(&path))?.into()),
            has_device: true,
            device_mount_path: Some(shown(&path)),
            label,
        })
    }

    /// The global folder of the device that a volume of a pod has.
    async fn folder_of(&self, found: &FoundFolder) -> Result<PathBuf, PluginError> {
        let (pod, inner_name) = (&found.pod, &found.inner_name);
        let missing = |what: &str| {
            PluginError::new(format!("pod {pod} has no {what} of the {} volume {inner_name}", K::FIELD))
        };
        if found.is_block {
            let (root, wanted) = (self.host.root.clone(), found.clone());
            let work = move || {
                let folders = K::list(&root, Tree::BlockMaps)?;
                Ok(folder_with_map(&folders, &root, K::NAME, &wanted))
            };
            return blocking("list the block maps", work).await?.ok_or_else(|| missing("block map"));
        }
        let target = pod_path(&self.host.root, K::NAME, pod.as_str(), inner_name);
        let references = self.host.mount_references(&target).await?;
        let folders = references.iter().filter_map(|path| K::parse(&shown(path)).ok());
        let mut folders = folders.filter(|folder| folder.tree == Tree::Mounts);
        let folder = folders.next().ok_or_else(|| missing("global mount"))?;
        Ok(self.host.root.join(folder.path))
    }

    /// Every global folder whose name can be read: the disk is, or may be, mounted or attached.
    async fn find_devices(&self) -> Result<Vec<FoundDevice>, PluginError> {
        let root = self.host.root.clone();
        let work = move || {
            let mut found = Vec::new();
            for tree in Tree::ALL {
                found.extend(K::list(&root, tree)?.iter().filter_map(|path| found_device::<K>(path)));
            }
            Ok(found)
        };
        let mut found = blocking("list the disks", work).await?;
        for device in found.iter_mut().filter(|device| !device.is_block) {
            device.label = label_of_mount(&self.host.mounts, Path::new(&device.device_mount_path)).await?;
        }
        Ok(found)
    }
}

/// The device in a global folder.
fn found_device<K: DiskKind>(path: &Path) -> Option<FoundDevice> {
    let known = K::parse(&shown(path)).ok().and_then(|folder| {
        let name = stored_name::<K>(path, &folder).or_else(|| K::guess(&folder))?;
        Some((folder, name))
    });
    let Some((folder, name)) = known else {
        let path = path.display();
        tracing::warn!(event = "device_not_reconstructed", %path, "a folder names no disk and is left");
        return None;
    };
    Some(FoundDevice {
        volume: name.into(),
        inner_name: VolumeFile::read(path).map(|file| file.inner_name).unwrap_or_default(),
        is_block: folder.tree == Tree::BlockMaps,
        device_mount_path: shown(path),
        label: None,
    })
}

/// The name that is stored for a folder.
fn stored_name<K: DiskKind>(path: &Path, folder: &DiskFolder) -> Option<String> {
    VolumeFile::read(path).map(|file| file.volume).filter(|name| K::may_be_named(folder, name))
}

/// The global folder of the volume with a unique name.
fn find<K: DiskKind>(root: &Path, tree: Tree, volume: &str) -> std::io::Result<Option<PathBuf>> {
    let folders = K::list(root, tree)?;
    let is_named = |path: &&PathBuf| VolumeFile::read(path).is_some_and(|file| file.volume == volume);
    let may_be = |path: &&PathBuf| {
        VolumeFile::read(path).is_none()
            && K::parse(&shown(path)).is_ok_and(|folder| K::may_be_named(&folder, volume))
    };
    Ok(folders.iter().find(is_named).or_else(|| folders.iter().find(may_be)).cloned())
}

/// Refuses while pods have block maps of the disk.
async fn refuse_maps<K: DiskKind>(device: &DevicePlace, path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    let mut left = blocking("list the block maps", move || names_in(&folder)).await?;
    left.retain(|name| !K::OWN_FILES.contains(&name.as_str()));
    if left.is_empty() {
        return Ok(());
    }
    let text =
        format!("the block volume {} is still referenced by the pods {}", device.volume, left.join(", "));
    Err(PluginError::new(text))
}

impl<K: DiskKind> Plugin for DiskPlugin<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn field(&self) -> &'static str {
        K::FIELD
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            let wanted = K::read(volume)?;
            Ok(Identity {
                shared_name: Some(wanted.name.into()),
                shape: Shape::AttachableDevice,
                is_set_up_each_sync: false,
                supports_label: true,
                // Nodes do not grow such volumes (volumes.md §1).
                can_expand: false,
                read_only: wanted.read_only,
            })
        })
    }

    fn attach<'a>(&'a self, _: &'a VolumeSpec) -> Answer<'a, Learned> {
        Box::pin(async { Ok(Learned::default()) })
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, request: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(self.mount(volume, request))
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(self.set_up_pod(volume, request))
    }

    fn has_file_labels<'a>(&'a self, _: &'a VolumeSpec, _: &'a Path) -> Answer<'a, bool> {
        Box::pin(async { Ok(true) })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(tear_down(&self.host, K::NAME, place))
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.unmount(device))
    }

    fn global_map_path<'a>(&'a self, inner_name: &'a str) -> Answer<'a, Option<PathBuf>> {
        let (root, inner_name) = (self.host.root.clone(), inner_name.to_owned());
        let find = move || Ok(folder_of_volume(&K::list(&root, Tree::BlockMaps)?, &inner_name));
        Box::pin(blocking("list the block maps", find))
    }

    fn found_devices(&self) -> Answer<'_, Vec<FoundDevice>> {
        Box::pin(self.find_devices())
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(self.read_folder(folder))
    }
}
