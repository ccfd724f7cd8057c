//! Finds the plugins' volumes that are on disk at startup (volumes.md §3.16).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use keelson_volume_manager_core::names::unescape;
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::world::{ActualWorld, FoundVolume};

use super::records::{ForeignFolder, Placed, PlacedDevice, Records, found_label, per_pod_name};
use super::unknown::UnknownFolders;
use crate::plugins::{FoundDevice, FoundFolder, Plugin, Plugins, VolumePlace};
use crate::totals::VolumeTotals;

/// How long a plugin may take to read what a folder is. A folder that takes longer counts as unknown.
const DEADLINE: Duration = Duration::from_secs(10);

/// A folder of a plugin's volume, as it is found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PluginFolder {
    /// The plugin, escaped.
    pub(crate) plugin: String,
    pub(crate) folder: FoundFolder,
}

/// The plugins' volumes that are on disk at startup.
#[derive(Debug, Default)]
pub(crate) struct FoundVolumes {
    known: Vec<(FoundVolume, Placed)>,
    unknown: Vec<(VolumePlace, Arc<dyn Plugin>)>,
    devices: Vec<(FoundDevice, Arc<dyn Plugin>)>,
    foreign: BTreeSet<ForeignFolder>,
}

/// Asks the plugins what the folders are. All are asked at the same time, so one that hangs delays the start by its deadline
/// at most.
pub(crate) async fn find_volumes(plugins: &Plugins, folders: Vec<PluginFolder>) -> FoundVolumes {
    let asked = named(plugins, folders).await.into_iter().map(|(name, plugin, folder)| async move {
        let answer = tokio::time::timeout(DEADLINE, plugin.reconstruct(&folder)).await;
        (name, Arc::clone(&plugin), folder, answer)
    });
    let mut result = FoundVolumes { devices: find_devices(plugins).await, ..FoundVolumes::default() };
    for (name, plugin, folder, answer) in futures_util::future::join_all(asked).await {
        let FoundFolder { pod, inner_name, is_block } = folder;
        let own_name = per_pod_name(&name, pod.as_str(), &inner_name);
        let place = |volume: VolumeName| VolumePlace {
            volume,
            pod: pod.clone(),
            plugin: name.clone(),
            inner_name: inner_name.clone(),
            is_block,
        };
        match answer {
            Ok(Ok(read)) => {
                let volume = read.shared_name.unwrap_or(own_name);
                let label = found_label(&name, &volume);
                let place = place(volume.clone());
                let placed = Placed { plugin, place, host_path: None, has_file_labels: false, label };
                let found = FoundVolume {
                    volume,
                    pod: pod.clone(),
                    has_device: read.has_device,
                    device_mount_path: read.device_mount_path,
                    label: read.label,
                };
                result.known.push((found, placed));
            }
            other => {
                let why = match other {
                    Ok(Err(error)) => error.message,
                    _ => format!("no answer within {} s", DEADLINE.as_secs()),
                };
                tracing::warn!(
                    event = "volume_not_reconstructed",
                    uid = pod.as_str(),
                    volume = inner_name,
                    plugin = name,
                    "cannot tell what a volume on disk is: {why}"
                );
                result.unknown.push((place(own_name), plugin));
            }
        }
    }
    result
}

/// The folders with the names of their plugins, and the plugins, looked up on a thread.
async fn named(plugins: &Plugins, folders: Vec<PluginFolder>) -> Vec<(String, Arc<dyn Plugin>, FoundFolder)> {
    let plugins = plugins.clone();
    let look_up = tokio::task::spawn_blocking(move || {
        let with_plugin = folders.into_iter().filter_map(|PluginFolder { plugin, folder }| {
            let name = unescape(&plugin);
            let plugin = Arc::clone(plugins.named(&name)?);
            Some((name, plugin, folder))
        });
        with_plugin.collect()
    });
    look_up.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// Asks the plugins for devices, also those that no pod has.
async fn find_devices(plugins: &Plugins) -> Vec<(FoundDevice, Arc<dyn Plugin>)> {
    let mut found = Vec::new();
    for plugin in plugins.all() {
        match tokio::time::timeout(DEADLINE, plugin.found_devices()).await {
            Ok(Ok(devices)) => found.extend(devices.into_iter().map(|device| (device, Arc::clone(plugin)))),
            Ok(Err(error)) => {
                tracing::warn!(
                    event = "devices_not_read",
                    plugin = plugin.name(),
                    "cannot find devices: {error}"
                );
            }
            Err(_) => {
                let name = plugin.name();
                tracing::warn!(event = "devices_not_read", plugin = name, "finding devices takes too long");
            }
        }
    }
    found
}

impl FoundVolumes {
    /// Adds the folders of plugins that this version does not have.
    pub(crate) fn with_foreign(self, foreign: BTreeSet<ForeignFolder>) -> Self {
        Self { foreign, ..self }
    }

    /// Records what was found.
    pub(super) fn restore(
        self,
        actual: &mut ActualWorld,
        records: &mut Records,
        unknown: &mut UnknownFolders,
        totals: &VolumeTotals,
    ) {
        totals.found_volumes(self.known.len(), self.unknown.len());
        records.foreign = self.foreign;
        for (found, placed) in self.known {
            if found.has_device {
                let device = PlacedDevice {
                    plugin: Arc::clone(&placed.plugin),
                    inner_name: placed.place.inner_name.clone(),
                    is_block: placed.place.is_block,
                    label: placed.label.clone(),
                };
                records.devices.insert(found.volume.clone(), device);
            }
            records.placed.insert((found.volume.clone(), found.pod.clone()), placed);
            actual.add_found(found);
        }
        for (device, plugin) in self.devices {
            let FoundDevice { volume, inner_name, is_block, device_mount_path, label } = device;
            let metric_label = found_label(plugin.name(), &volume);
            let placed = PlacedDevice { plugin, inner_name, is_block, label: metric_label };
            records.devices.entry(volume.clone()).or_insert(placed);
            actual.add_found_device(volume, device_mount_path, label);
        }
        for (place, plugin) in self.unknown {
            unknown.add(place, plugin);
        }
    }
}
