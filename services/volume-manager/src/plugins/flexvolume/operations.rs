//! What is done with a volume: by its driver, or by the default action of a command that the driver does not support.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::flexvolume::answer::{self, DefaultAction};
use keelson_volume_manager_core::flexvolume::call::{Call, Sizes};
use keelson_volume_manager_core::flexvolume::driver::Driver;
use keelson_volume_manager_core::flexvolume::options::{Options, Pod, Secret};
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel};

use super::drivers::{Done, DriverState};
use super::{FlexVolume, Read};
use crate::plugins::disk::{self, wrong_source};
use crate::plugins::host::{Ownership, blocking};
use crate::plugins::secrets;
use crate::plugins::{DevicePlace, DeviceRequest, PluginError, SetUp, SetUpRequest, VolumePlace, VolumeSpec};

impl FlexVolume {
    pub(super) async fn attach_volume(&self, volume: &VolumeSpec) -> Result<Learned, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        let state = self.0.drivers.get(&driver).await?;
        let options = Options::of_volume(&volume.inner_name, &source, read_only);
        let call = Call::Attach { options: &options, node: &self.0.node };
        let device_path = match state.call(&call).await? {
            Done::ByDriver(answer) => Some(answer.device).filter(|device| !device.is_empty()),
            Done::ByDefault(DefaultAction::Nothing) => None,
            Done::ByDefault(_) => return Err(state.no_default(call.command())),
        };
        Ok(Learned { device_path, ..Learned::default() })
    }

    pub(super) async fn detach_volume(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let (driver, volume) = Self::split_name(device)?;
        let state = self.0.drivers.get(&driver).await?;
        let call = Call::Detach { volume: &volume, node: &self.0.node };
        match state.call(&call).await? {
            Done::ByDriver(_) | Done::ByDefault(DefaultAction::Nothing) => Ok(()),
            Done::ByDefault(_) => Err(state.no_default(call.command())),
        }
    }

    pub(super) async fn mount_device_of(
        &self,
        volume: &VolumeSpec,
        request: DeviceRequest<'_>,
    ) -> Result<Learned, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        let state = self.0.drivers.get(&driver).await?;
        let path = self.global_path(&driver, &volume.inner_name)?;
        let options = Options::of_volume(&volume.inner_name, &source, read_only);
        let known = request.device_path.unwrap_or_default();
        let call = Call::WaitForAttach { device: known, options: &options };
        let device = match state.call(&call).await? {
            Done::ByDriver(answer) if answer.device.is_empty() => known.to_owned(),
            Done::ByDriver(answer) => answer.device,
            Done::ByDefault(DefaultAction::UseDevicePath) => known.to_owned(),
            Done::ByDefault(_) => return Err(state.no_default(call.command())),
        };
        let folder = path.to_string_lossy().into_owned();
        let learned = Learned {
            device_path: Some(device.clone()),
            device_mount_path: Some(folder.clone()),
            size: None,
        };
        if self.0.host.mounts.is_mount_point(&path)? {
            return Ok(learned);
        }
        self.0.host.mounts.create_folders(&path).await?;
        let call = Call::MountDevice { folder: &folder, device: &device, options: &options };
        let mounted = match state.call(&call).await {
            Ok(Done::ByDriver(_)) => Ok(()),
            Ok(Done::ByDefault(DefaultAction::FormatAndMount)) if device.is_empty() => {
                let text = format!(
                    "the flexVolume driver {} names no device of {}",
                    driver.name(),
                    volume.inner_name
                );
                Err(PluginError::new(text))
            }
            Ok(Done::ByDefault(DefaultAction::FormatAndMount)) => {
                let options = disk::options(volume, read_only, &MountLabel::Unlabelled)?;
                disk::mount_device(&self.0.host, &device, &path, &source.fs_type, &options).await
            }
            Ok(Done::ByDefault(_)) => Err(state.no_default(call.command())),
            Err(error) => Err(error),
        };
        match mounted {
            Ok(()) => Ok(learned),
            Err(error) => Err(self.undo(&path, error).await),
        }
    }

    /// Removes the folder of a mount that failed for good, unless the driver has left a mount there.
    async fn undo(&self, path: &Path, error: PluginError) -> PluginError {
        if error.class == FailureClass::Uncertain || self.0.host.mounts.is_mount_point(path).unwrap_or(true) {
            return error.of_class(FailureClass::Uncertain);
        }
        let folder = path.to_owned();
        match blocking("remove a folder", move || super::super::host::remove(fs::remove_dir(folder))).await {
            Ok(()) => error,
            Err(_) => error.of_class(FailureClass::Uncertain),
        }
    }

    pub(super) async fn mount_for_pod(
        &self,
        volume: &VolumeSpec,
        request: SetUpRequest<'_>,
    ) -> Result<SetUp, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        let state = self.0.drivers.get(&driver).await?;
        let path = disk::pod_path(&self.0.host.root, driver.name(), &volume.pod.uid, &volume.inner_name);
        if self.0.host.mounts.is_mount_point(&path)? {
            return Ok(SetUp { host_path: path, ..SetUp::default() });
        }
        let options = self.pod_options(volume, (&driver, &source), read_only).await?;
        self.0.host.mounts.create_folders(&path).await?;
        let call = Call::Mount { folder: &path.to_string_lossy(), options: &options };
        let mounted = match state.call(&call).await {
            Ok(Done::ByDriver(_)) => Ok(()),
            Ok(Done::ByDefault(DefaultAction::BindMount)) => {
                self.bind_device(volume, &driver, read_only, &path).await
            }
            Ok(Done::ByDefault(_)) => Err(state.no_default(call.command())),
            Err(error) => Err(error),
        };
        if let Err(error) = mounted {
            // The folder of a volume that was found at startup stays.
            return Err(if request.is_reconstructed { error } else { self.undo(&path, error).await });
        }
        self.own(volume, &state, (read_only, &path), request).await?;
        Ok(SetUp { host_path: path, ..SetUp::default() })
    }

    /// The options of `mount`, with the Secret.
    async fn pod_options(
        &self,
        volume: &VolumeSpec,
        (driver, source): (&Driver, &keelson_volume_manager_core::sources::FlexSource),
        read_only: bool,
    ) -> Result<Options, PluginError> {
        let reference = source.secret_ref.as_ref().filter(|secret| !secret.name.is_empty());
        let secret = match reference {
            Some(reference) => Some(secrets::read(&*self.0.secrets, reference, &volume.pod.namespace).await?),
            None => None,
        };
        let secret =
            secret.as_ref().map(|(name, secret)| Secret { name, kind: &secret.kind, data: &secret.data });
        let pod = Pod {
            name: &volume.pod.name,
            namespace: &volume.pod.namespace,
            uid: &volume.pod.uid,
            service_account: &volume.service_account,
            fs_group: volume.fs_group.map(i64::from),
        };
        Options::of_mount((&volume.inner_name, driver), source, read_only, pod, secret).map_err(wrong_source)
    }

    /// Bind-mounts the device to the pod.
    async fn bind_device(
        &self,
        volume: &VolumeSpec,
        driver: &Driver,
        read_only: bool,
        target: &Path,
    ) -> Result<(), PluginError> {
        let source = self.global_path(driver, &volume.inner_name)?;
        if !self.0.host.mounts.is_mount_point(&source)? {
            let (name, inner_name) = (driver.name(), &volume.inner_name);
            let text = format!(
                "the flexVolume driver {name} supports neither mount nor a device for {inner_name}: nothing is mounted on {}",
                source.display()
            );
            return Err(PluginError::new(text));
        }
        let options = disk::options(volume, read_only, &MountLabel::Unlabelled)?;
        self.0.host.mounts.bind(&source, target, &options).await
    }

    /// Applies the fsGroup, unless the driver does not want that. The volume is mounted, so an error leaves it.
    async fn own(
        &self,
        volume: &VolumeSpec,
        state: &DriverState,
        (read_only, path): (bool, &Path),
        request: SetUpRequest<'_>,
    ) -> Result<(), PluginError> {
        let group = answer::fs_group(state.capabilities, volume.fs_group.map(i64::from), read_only);
        let Some(group) = group.and_then(|group| u32::try_from(group).ok()) else { return Ok(()) };
        let ownership = Ownership { group, policy: volume.fs_group_policy, walks: request.walks };
        let applied = self.0.host.mounts.apply_fs_group(path, ownership).await;
        applied.map_err(|error| error.of_class(FailureClass::Uncertain))
    }

    pub(super) async fn unmount_for_pod(&self, place: &VolumePlace) -> Result<(), PluginError> {
        let driver = Driver::new(&place.plugin).map_err(|error| PluginError::new(error.to_string()))?;
        let path = disk::pod_path(&self.0.host.root, driver.name(), place.pod.as_str(), &place.inner_name);
        if !self.is_there(&path).await? {
            return Ok(());
        }
        let (_, state) = self.driver_of(&place.plugin).await?;
        let call = Call::Unmount { folder: &path.to_string_lossy() };
        match state.call(&call).await? {
            // The driver may have left the folder, and a mount.
            Done::ByDriver(_) | Done::ByDefault(DefaultAction::CleanUp) => {
                self.0.host.mounts.clean_mount_point(&path).await
            }
            Done::ByDefault(_) => Err(state.no_default(call.command())),
        }
    }

    pub(super) async fn unmount_device_of(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let (driver, volume) = Self::split_name(device)?;
        let path = self.global_path(&driver, &volume)?;
        if !self.is_there(&path).await? {
            return Ok(());
        }
        if self.0.host.mounts.is_mount_point(&path)? {
            let (_, state) = self.driver_of(driver.name()).await?;
            let call = Call::UnmountDevice { folder: &path.to_string_lossy() };
            match state.call(&call).await? {
                Done::ByDriver(_) | Done::ByDefault(DefaultAction::UnmountDevice) => {}
                Done::ByDefault(_) => return Err(state.no_default(call.command())),
            }
        }
        self.0.host.mounts.clean_mount_point(&path).await
    }

    /// Whether a folder exists. One with a mount is not touched, because the mount may hang.
    async fn is_there(&self, path: &Path) -> Result<bool, PluginError> {
        if self.0.host.mounts.is_mount_point(path)? {
            return Ok(true);
        }
        let path = path.to_owned();
        blocking("look up the folder of a flexVolume", move || path.try_exists()).await
    }

    /// Grows the filesystem. The control plane has grown the volume itself before, with `expandvolume`.
    pub(super) async fn expand_filesystem(
        &self,
        volume: &VolumeSpec,
        request: SetUpRequest<'_>,
        size: u64,
    ) -> Result<u64, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        let state = self.0.drivers.get(&driver).await?;
        let mount = match request.device_mount_path {
            Some(path) => PathBuf::from(path),
            None => disk::pod_path(&self.0.host.root, driver.name(), &volume.pod.uid, &volume.inner_name),
        };
        let options = Options::of_volume(&volume.inner_name, &source, read_only);
        let device = request.device_path.unwrap_or_default();
        let sizes = Sizes { new: size, old: volume.claim_size.unwrap_or_default() };
        let call = Call::ExpandFs { options: &options, device, mount: &mount.to_string_lossy(), sizes };
        match state.call(&call).await? {
            Done::ByDriver(_) => Ok(size),
            Done::ByDefault(DefaultAction::GrowFilesystem) => {
                self.0.host.commands.grow(Path::new(device), &mount).await.map(|()| size)
            }
            Done::ByDefault(_) => Err(state.no_default(call.command())),
        }
    }
}
