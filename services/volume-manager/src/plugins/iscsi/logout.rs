//! Removes the disk of an unmounted device from the node, and logs out of its target when nothing else uses the sessions.

use std::fs;
use std::io;
use std::path::Path;

use keelson_volume_manager_core::global_folder::Tree;
use keelson_volume_manager_core::iscsi::commands;
use keelson_volume_manager_core::iscsi::device;
use keelson_volume_manager_core::iscsi::folder::GlobalFolder;
use keelson_volume_manager_core::iscsi::logout::{self, Listed, Logout};
use keelson_volume_manager_core::iscsi::record::{FILE, Record};

use super::{IscsiDisks, global_folder, sessions};
use crate::listing::names_in;
use crate::plugins::PluginError;
use crate::plugins::disk::{DiskKind as _, Release, VolumeFile};
use crate::plugins::host::{Machine, blocking, remove};
use crate::plugins::multipath;

impl IscsiDisks {
    pub(super) async fn log_out(&self, release: Release<'_>) -> Result<(), PluginError> {
        let folder = global_folder(release.folder)?;
        let Some(record) = self.record(&folder, release.path).await? else { return Ok(()) };
        let listing = self.listing().await;
        if !release.is_shared {
            self.remove_disks(&folder, release.volume).await?;
        }
        match logout::decide(&record, &folder, listing.as_deref()) {
            Logout::Stay => {}
            Logout::From(portals) => self.run_all(&commands::log_out(&record, &portals)).await?,
        }
        remove_folder(release.path).await
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
            for tree in Tree::ALL {
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
        let read =
            move |machine: &Machine| Ok((sessions::disks_of(machine, &iqn, lun)?, machine.mappings()?));
        let (disks, mappings) = self.host.on_machine("read the disks of the target", read).await?;
        multipath::try_all(&self.host, &device::removal(&disks, &mappings), volume).await;
        Ok(())
    }
}

fn listed(tree: Tree, path: &Path) -> Listed {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Listed { tree, interface_folder: path.parent().map(name).unwrap_or_default(), name: name(path) }
}

/// Removes a global folder, and that of its interface if it is the last one.
async fn remove_folder(path: &Path) -> Result<(), PluginError> {
    let what = format!("remove {}", path.display());
    let path = path.to_owned();
    let removed = blocking(&what, move || {
        for name in IscsiDisks::OWN_FILES {
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
