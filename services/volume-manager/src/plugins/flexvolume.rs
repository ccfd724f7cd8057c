//! flexVolume (volumes.md §10.8): executables on the node that attach and mount volumes. What an executable does not support
//! is done by default actions.
//!
//! A driver is called with `init` when its executable is new or has changed. Each call has a deadline; a driver that hangs is
//! abandoned and holds up its own volumes only.

mod drivers;
mod operations;
mod record;
#[cfg(test)]
mod tests;
mod watch;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_volume_manager_core::flexvolume::call::Call;
use keelson_volume_manager_core::flexvolume::driver::{self, Driver};
use keelson_volume_manager_core::flexvolume::options::Options;
use keelson_volume_manager_core::sources::FlexSource;
use keelson_volume_manager_core::world::{Learned, MountLabel, Shape};

use self::drivers::{DriverState, Drivers};
use self::record::Record;
use super::disk::{self, wrong_source};
use super::host::{Host, blocking};
use super::secrets::Secrets;
use super::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundDevice, FoundFolder, Identity, Plugin, PluginError,
    Reconstructed, SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::listing::names_in;
use crate::mounter::DEADLINE;

/// The plugin of all flexVolume drivers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct FlexVolume(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: Host,
    secrets: Arc<dyn Secrets>,
    node: String,
    drivers: Drivers,
}

/// What the plugin works with.
#[derive(Debug)]
pub(crate) struct FlexSettings {
    /// The folder of drivers (`volumePluginDir`).
    pub(crate) folder: PathBuf,
    /// The node's name.
    pub(crate) node: String,
    /// The deadline of a call whose command has none of its own.
    pub(crate) deadline: Duration,
}

impl FlexSettings {
    /// With the usual deadline.
    pub(crate) fn new(folder: PathBuf, node: String) -> Self {
        Self { folder, node, deadline: DEADLINE }
    }
}

/// A volume with its source read.
struct Read {
    source: FlexSource,
    driver: Driver,
    read_only: bool,
}

impl FlexVolume {
    pub(crate) fn new(host: Host, secrets: Arc<dyn Secrets>, settings: FlexSettings) -> Self {
        let FlexSettings { folder, node, deadline } = settings;
        let drivers = Drivers::new(folder, Arc::clone(&host.commands), deadline);
        Self(Arc::new(Inner { host, secrets, node, drivers }))
    }

    fn read(volume: &VolumeSpec) -> Result<Read, PluginError> {
        let source: FlexSource = disk::read_source(volume)?;
        let driver = Driver::new(&source.driver).map_err(wrong_source)?;
        let read_only = disk::is_read_only(volume, source.read_only);
        Ok(Read { source, driver, read_only })
    }

    async fn identify_volume(&self, volume: &VolumeSpec) -> Result<Identity, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        // Also the name of a folder.
        driver.global_mount(&volume.inner_name).map_err(wrong_source)?;
        let state = self.0.drivers.get(&driver).await?;
        let capabilities = state.capabilities;
        if capabilities.attach {
            let options = Options::of_volume(&volume.inner_name, &source, read_only);
            // What the driver answers is not used (volumes.md §10.8).
            state.call(&Call::GetVolumeName(&options)).await?;
        }
        Ok(Identity {
            shared_name: capabilities.attach.then(|| driver.unique_name(&volume.inner_name).into()),
            shape: if capabilities.attach { Shape::AttachableDevice } else { Shape::PerPod },
            is_set_up_each_sync: false,
            supports_label: false,
            can_expand: capabilities.requires_fs_resize,
            read_only,
        })
    }

    /// The driver and the inner name in a unique volume name, `<driver>/<inner name>`.
    fn split_name(device: &DevicePlace) -> Result<(Driver, String), PluginError> {
        let refuse = || PluginError::new(format!("{} is not the name of a flexVolume", device.volume));
        let (driver, inner_name) = device.volume.as_str().rsplit_once('/').ok_or_else(refuse)?;
        let driver = Driver::new(driver).map_err(|error| PluginError::new(error.to_string()))?;
        Ok((driver, inner_name.to_owned()))
    }

    /// The driver of a volume that is on disk, and its state.
    async fn driver_of(&self, name: &str) -> Result<(Driver, Arc<DriverState>), PluginError> {
        let driver = Driver::new(name).map_err(|error| PluginError::new(error.to_string()))?;
        let state = self.0.drivers.get(&driver).await?;
        Ok((driver, state))
    }

    /// Where the device of a volume is mounted.
    fn global_path(&self, driver: &Driver, inner_name: &str) -> Result<PathBuf, PluginError> {
        let path = driver.global_mount(inner_name).map_err(wrong_source)?;
        Ok(self.0.host.root.join(path))
    }

    /// The driver of a volume's folder in a pod: the folder is below one with the name of a driver.
    async fn driver_of_folder(&self, found: &FoundFolder) -> Result<Driver, PluginError> {
        let volumes = self.0.host.root.join("pods").join(found.pod.as_str()).join("volumes");
        let listed = blocking("list the volumes of a pod", move || names_in(&volumes)).await?;
        let mut drivers: Vec<Driver> = Vec::new();
        for driver in listed.iter().filter_map(|name| Driver::in_folder(name)) {
            let volumes = self.0.host.root.join("pods").join(found.pod.as_str()).join("volumes");
            let folder = volumes.join(driver.folder());
            let names = blocking("list the volumes of a driver", move || names_in(&folder)).await?;
            if names.contains(&found.inner_name) && self.0.drivers.is_installed(&driver).await? {
                drivers.push(driver);
            }
        }
        match <[Driver; 1]>::try_from(drivers) {
            Ok([driver]) => Ok(driver),
            Err(drivers) => {
                let (pod, name) = (&found.pod, &found.inner_name);
                let text =
                    format!("{} drivers may have set up the volume {name} of pod {pod}", drivers.len());
                Err(PluginError::new(text))
            }
        }
    }

    async fn read_folder(&self, found: &FoundFolder) -> Result<Reconstructed, PluginError> {
        let driver = self.driver_of_folder(found).await?;
        let path = self.global_path(&driver, &found.inner_name)?;
        let has_device = match self.0.drivers.get(&driver).await {
            Ok(state) => state.capabilities.attach,
            // A driver that does not answer now has a device if there is a mount of it.
            Err(_) => self.0.host.is_mount_point(&path).await?,
        };
        Ok(Reconstructed {
            shared_name: has_device.then(|| driver.unique_name(&found.inner_name).into()),
            has_device,
            device_mount_path: has_device.then(|| path.to_string_lossy().into_owned()),
            label: Some(MountLabel::Unlabelled),
        })
    }
}

/// The devices that are, or may be, mounted or attached: of each driver's folder, also without the driver itself.
fn found_devices(root: &Path) -> io::Result<Vec<FoundDevice>> {
    let base = root.join(driver::ROOT);
    let mut found = Vec::new();
    for vendor in names_in(&base)? {
        let drivers = names_in(&base.join(&vendor))?.into_iter().map(|name| {
            // A driver without a vendor has its mounts right here.
            if name == driver::MOUNTS { vendor.clone() } else { format!("{vendor}/{name}") }
        });
        for driver in drivers.filter_map(|name| Driver::new(&name).ok()) {
            let mounts = base.join(driver.name()).join(driver::MOUNTS);
            found.extend(Record::volumes_in(&mounts)?.into_iter().map(|volume| FoundDevice {
                volume: driver.unique_name(&volume).into(),
                is_block: false,
                device_mount_path: mounts.join(&volume).to_string_lossy().into_owned(),
                label: None,
                inner_name: volume,
            }));
        }
    }
    Ok(found)
}

impl Plugin for FlexVolume {
    fn name(&self) -> &'static str {
        "flexvolume"
    }

    fn plugin_name(&self, volume: &VolumeSpec) -> String {
        volume.source["driver"].as_str().unwrap_or_default().to_owned()
    }

    fn serves(&self, name: &str) -> bool {
        Driver::new(name).is_ok_and(|driver| self.0.drivers.has_folder(&driver))
    }

    fn field(&self) -> &'static str {
        "flexVolume"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: false, block: false, inline: true, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(self.identify_volume(volume))
    }

    fn attach<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Learned> {
        Box::pin(self.attach_volume(volume))
    }

    fn detach<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.detach_volume(device))
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, request: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(self.mount_device_of(volume, request))
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(self.mount_for_pod(volume, request))
    }

    fn has_file_labels<'a>(&'a self, volume: &'a VolumeSpec, _: &'a Path) -> Answer<'a, bool> {
        Box::pin(self.driver_has_file_labels(volume))
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(self.unmount_for_pod(place))
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.unmount_device_of(device))
    }

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(self.expand_filesystem(volume, request, size))
    }

    fn found_devices(&self) -> Answer<'_, Vec<FoundDevice>> {
        let root = self.0.host.root.clone();
        Box::pin(blocking("list the devices of flexVolume drivers", move || found_devices(&root)))
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(self.read_folder(folder))
    }
}
