//! fc volumes (volumes.md §10.5): the node finds a disk that its host bus adapters see, mounts it once, and bind-mounts it
//! for each pod.

mod detach;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::fc::{
    Disk, FcError, Found, Link, PLUGIN, SCAN_ALL, Search, is_folder_of, unique_name,
};
use keelson_volume_manager_core::global_folder::Tree;
use keelson_volume_manager_core::sources::FcSource;
use keelson_volume_manager_core::world::FailureClass;

use super::disk::{self, DiskFolder, DiskKind, DiskPlugin, Release, VolumeFile, Wanted, wrong_source};
use super::host::{Host, Machine, blocking};
use super::multipath;
use super::{PluginError, VolumeSpec};
use crate::listing::names_in;

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
pub(crate) type Fc = DiskPlugin<FcDisks>;

impl Fc {
    pub(crate) fn new(host: Host) -> Self {
        Self::with_kind(host.clone(), FcDisks { host })
    }
}

/// How the node gets fc disks.
#[derive(Debug)]
pub(crate) struct FcDisks {
    host: Host,
}

impl FcDisks {
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
                Ok(Found::Rescan) => return Err(no_device(volume)),
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
        let work = move |machine: &Machine| {
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
}

/// Scans every SCSI host.
fn scan(machine: &Machine) -> io::Result<()> {
    for host in machine.names(SCSI_HOSTS)? {
        if let Err(error) = machine.write(&format!("{SCSI_HOSTS}/{host}/scan"), SCAN_ALL) {
            tracing::warn!(event = "scsi_scan_failed", host, %error, "cannot scan a SCSI host");
        }
    }
    Ok(())
}

fn no_device(volume: &str) -> PluginError {
    PluginError::new(format!("the fc volume {volume} has no device"))
}

fn disk_folder(disk: &Disk, tree: Tree) -> DiskFolder {
    DiskFolder { tree, path: disk.path(tree), disk: disk.folder(), lock: disk.folder() }
}

impl DiskKind for FcDisks {
    const NAME: &'static str = PLUGIN;
    const FIELD: &'static str = "fc";
    const OWN_FILES: &'static [&'static str] = &[];
    // A disk that was found by a scan may be seen by other volumes, too.
    const OWES_RELEASE: bool = false;

    type Disk = Disk;

    fn read(volume: &VolumeSpec) -> Result<Wanted<Disk>, PluginError> {
        let source: FcSource = disk::read_source(volume)?;
        let disk = Disk::new(&volume.inner_name, &source).map_err(wrong_source)?;
        let name = unique_name(&volume.inner_name, &source).map_err(wrong_source)?;
        let read_only = disk::is_read_only(volume, source.read_only);
        Ok(Wanted { name, disk, fs_type: source.fs_type, read_only })
    }

    fn folder(disk: &Disk, tree: Tree) -> DiskFolder {
        disk_folder(disk, tree)
    }

    fn parse(path: &str) -> Result<DiskFolder, String> {
        Disk::parse(path).map(|(disk, tree)| disk_folder(&disk, tree)).map_err(|error| error.to_string())
    }

    /// The name if none of the identifiers contains a space, `_` or `-`.
    fn guess(folder: &DiskFolder) -> Option<String> {
        let name = &folder.disk;
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

    /// What separates identifiers in a folder's name may have been a part of them.
    fn may_be_named(folder: &DiskFolder, name: &str) -> bool {
        is_folder_of(&folder.disk, name)
    }

    fn list(root: &Path, tree: Tree) -> io::Result<Vec<PathBuf>> {
        let base = match tree {
            Tree::Mounts => root.join(ROOT),
            Tree::BlockMaps => root.join(ROOT).join(BLOCK),
        };
        let names = names_in(&base)?.into_iter().filter(|name| !name.starts_with('.') && name != BLOCK);
        Ok(names.map(|name| base.join(name)).collect())
    }

    async fn acquire(
        &self,
        volume: &VolumeSpec,
        (disk, path): (&Disk, &Path),
        file: &VolumeFile,
    ) -> Result<String, PluginError> {
        let device = self.search(&volume.inner_name, disk).await?;
        self.host.mounts.create_folders(path).await?;
        let (file, folder) = (file.clone(), path.to_owned());
        let stored = blocking("store the name of an fc volume", move || file.write(&folder)).await;
        stored.map_err(|error| error.of_class(FailureClass::Uncertain))?;
        Ok(device)
    }

    async fn device(&self, volume: &VolumeSpec, disk: &Disk, _: Option<&str>) -> Result<String, PluginError> {
        match self.look(&volume.inner_name, disk, Search::AfterScan).await? {
            Ok(Found::Multipath(device) | Found::Single(device)) => Ok(device),
            Ok(Found::Rescan) => Err(no_device(&volume.inner_name)),
            Err(error) => Err(PluginError::new(error.to_string())),
        }
    }

    async fn devices(&self, folder: &DiskFolder, mounted: Option<&str>) -> Result<Vec<String>, PluginError> {
        if let Some(node) = mounted.map(str::to_owned) {
            let read = move |machine: &Machine| Ok(multipath::topmost([node], &machine.mappings()?));
            return self.host.on_machine("read the multipath devices", read).await;
        }
        let (disk, _) = Disk::parse(&folder.path).map_err(|error| PluginError::new(error.to_string()))?;
        match self.look(&folder.disk, &disk, Search::AfterScan).await? {
            Ok(Found::Multipath(node) | Found::Single(node)) => Ok(vec![node]),
            Ok(Found::Rescan) | Err(FcError::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(PluginError::new(error.to_string())),
        }
    }

    async fn release(&self, release: Release<'_>) -> Result<(), PluginError> {
        if !release.is_shared {
            for node in release.devices {
                self.detach_disk(node, release.volume).await?;
            }
        }
        let folder = release.path.to_owned();
        let what = format!("remove {}", folder.display());
        blocking(&what, move || VolumeFile::remove_with(&folder)).await
    }
}
