//! Unmounts the device of a disk and logs out of its target when nothing else uses the sessions.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::iscsi::commands;
use keelson_volume_manager_core::iscsi::device;
use keelson_volume_manager_core::iscsi::folder::{GlobalFolder, Tree};
use keelson_volume_manager_core::iscsi::logout::{self, Listed, Logout};
use keelson_volume_manager_core::iscsi::record::{FILE, Record};
use keelson_volume_manager_core::world::FailureClass;

use super::{Iscsi, sessions, shown};
use crate::plugins::disk::{self, VolumeFile};
use crate::plugins::host::{blocking, names_in, remove};
use crate::plugins::multipath;
use crate::plugins::{DevicePlace, PluginError};

/// The files of this plugin in a folder of block maps.
const OWN_FILES: [&str; 2] = [FILE, "iscsi.json.new"];

impl Iscsi {
    pub(super) async fn unmount(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let Some(path) = self.place(device).await? else { return Ok(()) };
        let folder =
            GlobalFolder::parse(&shown(&path)).map_err(|error| PluginError::new(error.to_string()))?;
        if path != self.host.root.join(folder.path()) {
            let text = format!("{} is not the global folder of the volume {}", path.display(), device.volume);
            return Err(PluginError::new(text));
        }
        let _guard = self.targets.lock(&folder.iqn).await;
        if device.is_block {
            refuse_maps(device, &path).await?;
        } else {
            disk::unmount(&self.host, &path).await?;
        }
        let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
        let record = self.record(&folder, &path).await.map_err(uncertain)?;
        let Some(record) = record else { return Ok(()) };
        let listing = self.listing().await;
        if !is_shared(&folder, listing.as_deref()) {
            self.remove_disks(&folder, device.volume.as_str()).await.map_err(uncertain)?;
        }
        match logout::decide(&record, &folder, listing.as_deref()) {
            Logout::Stay => {}
            Logout::From(portals) => {
                self.run_all(&commands::log_out(&record, &portals)).await.map_err(uncertain)?;
            }
        }
        remove_folder(&path).await.map_err(uncertain)
    }

    /// The global folder; `None` if it is gone.
    async fn place(&self, device: &DevicePlace) -> Result<Option<PathBuf>, PluginError> {
        if let Some(path) = device.device_mount_path.as_ref().filter(|path| !path.is_empty()) {
            return Ok(Some(path.into()));
        }
        let tree = if device.is_block { Tree::BlockMaps } else { Tree::Mounts };
        let (root, volume) = (self.host.root.clone(), device.volume.clone());
        blocking("list the iscsi volumes", move || Self::find(&root, tree, volume.as_str())).await
    }

    /// What is known of the sessions; `None` if the folder is gone.
    async fn record(&self, folder: &GlobalFolder, path: &Path) -> Result<Option<Record>, PluginError> {
        let file = path.join(FILE);
        let what = format!("read {}", file.display());
        let base = path.to_owned();
        let read = blocking(&what, move || match fs::read_to_string(&file) {
            Ok(text) => Ok(Some(Some(text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(base.is_dir().then_some(None)),
            Err(error) => Err(error),
        });
        let Some(text) = read.await? else { return Ok(None) };
        let read = text.map(|text| Record::read(folder, &text));
        Ok(Some(match read {
            Some(Ok(record)) => record,
            other => {
                let why = other.map_or_else(
                    || "it is missing".to_owned(),
                    |r| r.err().map_or_else(String::new, |e| e.to_string()),
                );
                let folder_name = folder.name();
                tracing::warn!(
                    event = "iscsi_record_unusable",
                    folder = folder_name,
                    "{FILE} cannot be used, so only the first portal is logged out: {why}"
                );
                Record::from_folder(folder)
            }
        }))
    }

    /// The folders of all disks; `None` if they cannot be listed.
    async fn listing(&self) -> Option<Vec<Listed>> {
        let root = self.host.root.clone();
        let list = move || {
            let mut listing = Vec::new();
            for tree in [Tree::Mounts, Tree::BlockMaps] {
                listing.extend(Self::list(&root, tree)?.iter().map(|path| listed(tree, path)));
            }
            Ok(listing)
        };
        let listing = blocking("list the iscsi volumes", list).await;
        listing
            .inspect_err(|error| tracing::warn!(event = "iscsi_sessions_stay", %error, "sessions stay"))
            .ok()
    }

    /// Makes the kernel forget the disk. What fails is logged: the logout may help.
    async fn remove_disks(&self, folder: &GlobalFolder, volume: &str) -> Result<(), PluginError> {
        let (iqn, lun) = (folder.iqn.clone(), folder.lun);
        let read = move |machine: &crate::plugins::host::Machine| {
            Ok((sessions::disks_of(machine, &iqn, lun)?, machine.mappings()?))
        };
        let (disks, mappings) = self.host.on_machine("read the disks of the target", read).await?;
        multipath::try_all(&self.host, &device::removal(&disks, &mappings), volume).await;
        Ok(())
    }
}

fn listed(tree: Tree, path: &Path) -> Listed {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Listed { tree, interface_folder: path.parent().map(name).unwrap_or_default(), name: name(path) }
}

/// Whether another folder is one of the same disk: through another portal or interface, or in the other tree.
fn is_shared(folder: &GlobalFolder, listing: Option<&[Listed]>) -> bool {
    let Some(listing) = listing else { return true };
    let end = format!("-{}-lun-{}", folder.iqn, folder.lun);
    listing.iter().any(|other| {
        let own = (folder.tree, folder.interface_folder(), folder.name());
        (other.tree, &other.interface_folder, &other.name) != (own.0, &own.1, &own.2)
            && other.name.ends_with(&end)
    })
}

/// Refuses to go on while pods have block maps of the disk.
async fn refuse_maps(device: &DevicePlace, path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    let left = blocking("list the block maps", move || disk::maps_in(&folder, &OWN_FILES)).await?;
    if left.is_empty() {
        return Ok(());
    }
    let text =
        format!("the block volume {} is still referenced by the pods {}", device.volume, left.join(", "));
    Err(PluginError::new(text))
}

/// Removes a global folder, and that of its interface if it is the last one.
async fn remove_folder(path: &Path) -> Result<(), PluginError> {
    let what = format!("remove {}", path.display());
    let path = path.to_owned();
    let removed = blocking(&what, move || {
        for name in OWN_FILES {
            remove(fs::remove_file(path.join(name)))?;
        }
        VolumeFile::remove_with(&path)?;
        match path.parent() {
            Some(interface) if names_in(interface)?.is_empty() => remove(fs::remove_dir(interface)),
            _ => Ok(()),
        }
    });
    removed.await
}
