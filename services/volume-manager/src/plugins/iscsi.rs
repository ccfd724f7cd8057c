//! iscsi volumes (volumes.md §10.4): the node logs in to a target, mounts its disk once, and bind-mounts it for each pod.
//!
//! Before the first login the disk's global folder gets `iscsi.json`, so that every session has a record by which it is
//! ended. All calls about one target are made under a lock of that target; targets do not wait for each other.

mod login;
mod logout;
mod sessions;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::iscsi::device::{self, Device};
use keelson_volume_manager_core::iscsi::disk::{Disk, PLUGIN, unique_name};
use keelson_volume_manager_core::iscsi::folder::{self, GlobalFolder, Tree};
use keelson_volume_manager_core::iscsi::record::{FILE, Record};
use keelson_volume_manager_core::sources::IscsiSource;
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel, MountStep, Shape};

use super::disk::{self, Locks, VolumeFile, wrong_source};
use super::host::{Host, blocking, names_in};
use super::secrets::Secrets;
use super::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundFolder, Identity, Plugin, PluginError, Reconstructed,
    SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};

/// The plugin's folder, relative to the agent's root folder.
const ROOT: &str = "plugins/kubernetes.io/iscsi";
/// The folder of block maps in it.
const BLOCK: &str = "volumeDevices";

/// The plugin of iscsi volumes.
#[derive(Debug)]
pub(crate) struct Iscsi {
    host: Host,
    secrets: Arc<dyn Secrets>,
    /// By the name of the target.
    targets: Locks,
}

/// A volume with its source read.
struct Read {
    source: IscsiSource,
    disk: Disk,
    read_only: bool,
}

impl Iscsi {
    pub(crate) fn new(host: Host, secrets: Arc<dyn Secrets>) -> Self {
        Self { host, secrets, targets: Locks::default() }
    }

    fn read(volume: &VolumeSpec) -> Result<Read, PluginError> {
        let source: IscsiSource = disk::read_source(volume)?;
        let disk = Disk::new(&volume.inner_name, &source).map_err(wrong_source)?;
        if (source.chap_auth_discovery || source.chap_auth_session) && secret_of(&source).is_none() {
            return Err(wrong_source(format!(
                "iscsi volume {}: chapAuthDiscovery or chapAuthSession is set, but no secretRef; \
                 name the Secret with the CHAP credentials",
                volume.inner_name
            )));
        }
        let read_only = disk::is_read_only(volume, source.read_only);
        Ok(Read { source, disk, read_only })
    }

    /// The global folder of a disk.
    fn folder(&self, disk: &Disk, mode: VolumeMode) -> PathBuf {
        let tree = match mode {
            VolumeMode::Filesystem => Tree::Mounts,
            VolumeMode::Block => Tree::BlockMaps,
        };
        self.host.root.join(GlobalFolder::of(disk, tree).path())
    }

    async fn mount(&self, volume: &VolumeSpec, request: DeviceRequest<'_>) -> Result<Learned, PluginError> {
        let Read { source, disk, read_only } = Self::read(volume)?;
        let options = disk::options(volume, read_only, request.label)?;
        let path = self.folder(&disk, volume.mode);
        let is_block = volume.mode == VolumeMode::Block;
        let _guard = self.targets.lock(disk.iqn()).await;
        let mut learned = Learned { device_mount_path: Some(shown(&path)), ..Learned::default() };
        if !is_block && self.host.mounts.is_mount_point(&path)? {
            return Ok(learned);
        }
        let secret = self.secret(volume, &source).await?;
        self.persist(&disk, &source, &path).await?;
        // From here on sessions may exist, which only unmounting the device ends.
        let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
        let device = self.log_in(&disk, &source, &secret).await.map_err(uncertain)?;
        if !is_block {
            let mounted = disk::mount_device(&self.host, &device, &path, &source.fs_type, &options).await;
            mounted.map_err(uncertain)?;
        }
        learned.device_path = Some(device);
        Ok(learned)
    }

    /// Writes what the node has to know to log out, and the volume's name.
    async fn persist(&self, disk: &Disk, source: &IscsiSource, path: &Path) -> Result<(), PluginError> {
        self.host.mounts.create_folders(path).await?;
        let what = format!("store the record of the iscsi volume {}", disk.volume());
        let json = Record::of(disk).to_json().map_err(wrong_source)?;
        let file = VolumeFile { volume: unique_name(source), inner_name: disk.volume().to_owned() };
        let path = path.to_owned();
        let written = blocking(&what, move || {
            file.write(&path)?;
            let new = path.join("iscsi.json.new");
            fs::write(&new, json)?;
            fs::rename(new, path.join(FILE))
        });
        written.await.map_err(|error| error.of_class(FailureClass::Uncertain))
    }

    async fn set_up_pod(&self, volume: &VolumeSpec, request: SetUpRequest<'_>) -> Result<SetUp, PluginError> {
        let Read { disk, read_only, .. } = Self::read(volume)?;
        if volume.mode == VolumeMode::Block {
            let host_path = self.device(&disk, request.device_path).await?.into();
            return Ok(SetUp { host_path, ..SetUp::default() });
        }
        let own = self.folder(&disk, VolumeMode::Filesystem);
        let source = request.device_mount_path.map_or(own, PathBuf::from);
        let host_path = disk::set_up(&self.host, volume, (PLUGIN, &source), read_only, request).await?;
        Ok(SetUp { host_path, ..SetUp::default() })
    }

    /// The device of a disk that the node has logged in to.
    async fn device(&self, disk: &Disk, known: Option<&str>) -> Result<String, PluginError> {
        let paths = self.paths(disk).await?;
        let mappings =
            self.host.on_machine("read the multipath devices", |machine| machine.mappings()).await?;
        match (device::choose(&paths, &mappings), known.filter(|path| !path.is_empty())) {
            (Some(Device::Multipath(device) | Device::Single(device)), _) => Ok(device),
            (None, Some(known)) => Ok(known.to_owned()),
            (None, None) => {
                let text = format!("the node has no path to the iscsi volume {}", disk.volume());
                Err(PluginError::new(text).at(MountStep::MountDevice).of_class(FailureClass::Transient))
            }
        }
    }

    /// Grows a mounted volume: each path learns the size of the disk, then the filesystem grows.
    async fn grow(&self, volume: &VolumeSpec, request: SetUpRequest<'_>) -> Result<(), PluginError> {
        let Read { disk, .. } = Self::read(volume)?;
        let _guard = self.targets.lock(disk.iqn()).await;
        let (iqn, lun) = (disk.iqn().to_owned(), disk.lun());
        self.host
            .on_machine("rescan the paths of the disk", move |machine| {
                for name in sessions::disks_of(machine, &iqn, lun)? {
                    machine.write(&format!("/sys/block/{name}/device/rescan"), "1")?;
                }
                Ok(())
            })
            .await?;
        let device = self.device(&disk, request.device_path).await?;
        if let Some(map) = device.strip_prefix("/dev/").filter(|name| name.starts_with("dm-")) {
            self.host.run_checked("multipathd", &["resize", "map", map]).await?;
        }
        if volume.mode == VolumeMode::Block {
            return Ok(());
        }
        let mount = self.folder(&disk, VolumeMode::Filesystem);
        self.host.commands.grow(Path::new(&device), &mount).await
    }

    /// The global folders in a tree: of those whose name cannot be read only the path is known.
    fn list(root: &Path, tree: Tree) -> io::Result<Vec<PathBuf>> {
        let base = match tree {
            Tree::Mounts => root.join(ROOT),
            Tree::BlockMaps => root.join(ROOT).join(BLOCK),
        };
        let mut folders = Vec::new();
        for interface in names_in(&base)?.into_iter().filter(|name| name.starts_with("iface-")) {
            let interface = base.join(interface);
            let names = names_in(&interface)?.into_iter().filter(|name| !name.starts_with('.'));
            folders.extend(names.map(|name| interface.join(name)));
        }
        Ok(folders)
    }

    /// The global folder of the volume with a unique name.
    fn find(root: &Path, tree: Tree, volume: &str) -> io::Result<Option<PathBuf>> {
        let folders = Self::list(root, tree)?;
        let is_named = |folder: &&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.volume == volume);
        let may_be = |folder: &&PathBuf| {
            VolumeFile::read(folder).is_none()
                && GlobalFolder::parse(&shown(folder))
                    .is_ok_and(|f| f.unique_names().iter().any(|n| n == volume))
        };
        Ok(folders.iter().find(is_named).or_else(|| folders.iter().find(may_be)).cloned())
    }

    async fn reconstruct_mount(&self, found: &FoundFolder) -> Result<Reconstructed, PluginError> {
        let path = disk::pod_path(&self.host.root, PLUGIN, found.pod.as_str(), &found.inner_name);
        let references = self.host.mounts.mount_references(&path)?;
        let texts: Vec<String> = references.iter().map(|path| shown(path)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let global =
            folder::global_mount(&found.inner_name, &texts).map_err(|e| PluginError::new(e.to_string()))?;
        let path = self.host.root.join(global.path());
        self.reconstructed(path, &global, (found, None)).await
    }

    async fn reconstruct_block(&self, found: &FoundFolder) -> Result<Reconstructed, PluginError> {
        let (root, wanted) = (self.host.root.clone(), found.clone());
        let work = move || {
            let folders = Self::list(&root, Tree::BlockMaps)?;
            Ok(disk::folder_with_map(&folders, &root, PLUGIN, &wanted))
        };
        let path = blocking("list the block maps of iscsi volumes", work).await?.ok_or_else(|| {
            let (pod, inner_name) = (&found.pod, &found.inner_name);
            PluginError::new(format!("pod {pod} has no block map of the iscsi volume {inner_name}"))
        })?;
        let global =
            GlobalFolder::parse(&shown(&path)).map_err(|error| PluginError::new(error.to_string()))?;
        self.reconstructed(path, &global, (found, Some(MountLabel::Unlabelled))).await
    }

    async fn reconstructed(
        &self,
        path: PathBuf,
        global: &GlobalFolder,
        (found, label): (&FoundFolder, Option<MountLabel>),
    ) -> Result<Reconstructed, PluginError> {
        let names = global.unique_names();
        let stored = disk::stored_name(&path, found, names.first().cloned()).await?;
        let name = stored.filter(|name| names.contains(name));
        Ok(Reconstructed {
            shared_name: name.or_else(|| names.into_iter().next()).map(Into::into),
            has_device: true,
            device_mount_path: Some(shown(&path)),
            label,
        })
    }
}

/// The Secret with the CHAP credentials.
fn secret_of(source: &IscsiSource) -> Option<&keelson_volume_manager_core::sources::SecretReference> {
    source.secret_ref.as_ref().filter(|secret| !secret.name.is_empty())
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Plugin for Iscsi {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn field(&self) -> &'static str {
        "iscsi"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            let Read { source, read_only, .. } = Self::read(volume)?;
            Ok(Identity {
                shared_name: Some(unique_name(&source).into()),
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

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(async move { self.grow(volume, request).await.map(|()| size) })
    }

    fn global_map_path(&self, inner_name: &str) -> Option<PathBuf> {
        let folders = Self::list(&self.host.root, Tree::BlockMaps).ok()?;
        disk::folder_of_volume(&folders, inner_name)
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(async move {
            if folder.is_block {
                self.reconstruct_block(folder).await
            } else {
                self.reconstruct_mount(folder).await
            }
        })
    }
}
