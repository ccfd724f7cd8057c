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

use keelson_volume_manager_core::global_folder::Tree;
use keelson_volume_manager_core::iscsi::device::{self, Device};
use keelson_volume_manager_core::iscsi::disk::{Disk, PLUGIN, unique_name};
use keelson_volume_manager_core::iscsi::folder::GlobalFolder;
use keelson_volume_manager_core::iscsi::record::{FILE, Record};
use keelson_volume_manager_core::sources::{IscsiSource, SecretReference};
use keelson_volume_manager_core::world::{FailureClass, MountStep};

use super::disk::{self, DiskFolder, DiskKind, DiskPlugin, Release, VolumeFile, Wanted, wrong_source};
use super::host::{Host, blocking};
use super::multipath;
use super::secrets::Secrets;
use super::{PluginError, VolumeSpec};
use crate::listing::names_in;

/// The plugin's folder, relative to the agent's root folder.
const ROOT: &str = "plugins/kubernetes.io/iscsi";
/// The folder of block maps in it.
const BLOCK: &str = "volumeDevices";
/// What [`FILE`] is called while it is written.
const NEW_FILE: &str = "iscsi.json.new";

/// The plugin of iscsi volumes.
pub(crate) type Iscsi = DiskPlugin<IscsiDisks>;

impl Iscsi {
    pub(crate) fn new(host: Host, secrets: Arc<dyn Secrets>) -> Self {
        Self::with_kind(host.clone(), IscsiDisks { host, secrets })
    }
}

/// How the node gets iscsi disks.
#[derive(Debug)]
pub(crate) struct IscsiDisks {
    host: Host,
    secrets: Arc<dyn Secrets>,
}

impl IscsiDisks {
    /// Writes what the node has to know to log out, and the volume's name.
    async fn persist(&self, disk: &Disk, file: &VolumeFile, path: &Path) -> Result<(), PluginError> {
        self.host.mounts.create_folders(path).await?;
        let what = format!("store the record of the iscsi volume {}", disk.volume());
        let json = Record::of(disk).to_json().map_err(wrong_source)?;
        let (file, path) = (file.clone(), path.to_owned());
        let written = blocking(&what, move || {
            file.write(&path)?;
            let new = path.join(NEW_FILE);
            fs::write(&new, json)?;
            fs::rename(new, path.join(FILE))
        });
        written.await.map_err(|error| error.of_class(FailureClass::Uncertain))
    }
}

/// The Secret with the CHAP credentials.
fn secret_of(source: &IscsiSource) -> Option<&SecretReference> {
    source.secret_ref.as_ref().filter(|secret| !secret.name.is_empty())
}

/// The folder of [`GlobalFolder`].
fn disk_folder(folder: &GlobalFolder) -> DiskFolder {
    DiskFolder {
        tree: folder.tree,
        path: folder.path(),
        disk: format!("{}-lun-{}", folder.iqn, folder.lun),
        lock: folder.iqn.clone(),
    }
}

/// What the path of a folder says that the plugin has made or found.
fn global_folder(folder: &DiskFolder) -> Result<GlobalFolder, PluginError> {
    GlobalFolder::parse(&folder.path).map_err(|error| PluginError::new(error.to_string()))
}

impl DiskKind for IscsiDisks {
    const NAME: &'static str = PLUGIN;
    const FIELD: &'static str = "iscsi";
    const OWN_FILES: &'static [&'static str] = &[FILE, NEW_FILE];
    // Sessions may exist, which only the release ends.
    const OWES_RELEASE: bool = true;

    type Disk = Disk;

    fn read(volume: &VolumeSpec) -> Result<Wanted<Disk>, PluginError> {
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
        Ok(Wanted { name: unique_name(&source), disk, fs_type: source.fs_type, read_only })
    }

    fn folder(disk: &Disk, tree: Tree) -> DiskFolder {
        disk_folder(&GlobalFolder::of(disk, tree))
    }

    fn parse(path: &str) -> Result<DiskFolder, String> {
        GlobalFolder::parse(path).map(|folder| disk_folder(&folder)).map_err(|error| error.to_string())
    }

    fn guess(folder: &DiskFolder) -> Option<String> {
        GlobalFolder::parse(&folder.path).ok()?.unique_names().into_iter().next()
    }

    fn may_be_named(folder: &DiskFolder, name: &str) -> bool {
        GlobalFolder::parse(&folder.path)
            .is_ok_and(|folder| folder.unique_names().iter().any(|other| other == name))
    }

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

    async fn acquire(
        &self,
        volume: &VolumeSpec,
        (disk, path): (&Disk, &Path),
        file: &VolumeFile,
    ) -> Result<String, PluginError> {
        let source: IscsiSource = disk::read_source(volume)?;
        let secret = self.secret(volume, &source).await?;
        self.persist(disk, file, path).await?;
        let device = self.log_in(disk, &source, &secret).await;
        // From here on sessions may exist, which only the release ends.
        device.map_err(|error| error.of_class(FailureClass::Uncertain))
    }

    async fn device(&self, _: &VolumeSpec, disk: &Disk, known: Option<&str>) -> Result<String, PluginError> {
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

    async fn devices(&self, folder: &DiskFolder, mounted: Option<&str>) -> Result<Vec<String>, PluginError> {
        let GlobalFolder { iqn, lun, .. } = global_folder(folder)?;
        let mounted = mounted.map(str::to_owned);
        let read = move |machine: &super::host::Machine| {
            let disks = sessions::disks_of(machine, &iqn, lun)?;
            let nodes = mounted.into_iter().chain(disks.iter().map(|name| format!("/dev/{name}")));
            Ok(multipath::topmost(nodes, &machine.mappings()?))
        };
        self.host.on_machine("read the disks of the target", read).await
    }

    async fn release(&self, release: Release<'_>) -> Result<(), PluginError> {
        self.log_out(release).await
    }
}
