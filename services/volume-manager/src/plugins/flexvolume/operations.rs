//! What is done with a volume: by its driver, or by the default action of a command that the driver does not support.

use std::fs;
use std::path::{Path, PathBuf};

use keelson_volume_manager_core::flexvolume::answer::{self, DefaultAction};
use keelson_volume_manager_core::flexvolume::call::{Call, Sizes};
use keelson_volume_manager_core::flexvolume::driver::Driver;
use keelson_volume_manager_core::flexvolume::options::{Options, Pod, Secret};
use keelson_volume_manager_core::world::{FailureClass, Learned, MountLabel};

use super::drivers::{Done, DriverState};
use super::record::Record;
use super::{FlexVolume, Read};
use crate::plugins::disk::{self, refuse_busy, refuse_references, wrong_source};
use crate::plugins::host::{Ownership, blocking};
use crate::plugins::secrets;
use crate::plugins::{DevicePlace, DeviceRequest, PluginError, SetUp, SetUpRequest, VolumePlace, VolumeSpec};

impl FlexVolume {
    pub(super) async fn attach_volume(&self, volume: &VolumeSpec) -> Result<Learned, PluginError> {
        let Read { source, driver, read_only } = Self::read(volume)?;
        let state = self.0.drivers.get(&driver).await?;
        let options = Options::of_volume(&volume.inner_name, &source, read_only);
        let path = self.global_path(&driver, &volume.inner_name)?;
        let before = self.record(&path).await?;
        let mut record = Record { volume: volume.inner_name.clone(), is_attached: true, ..before.clone() };
        // From here on it may be attached, also if the service is killed.
        self.store(&path, &record).await?;
        let call = Call::Attach { options: &options, node: &self.0.node };
        let device_path = match state.call(&call).await {
            Ok(Done::ByDriver(answer)) => Some(answer.device).filter(|device| !device.is_empty()),
            Ok(Done::ByDefault(DefaultAction::Nothing)) => None,
            Ok(Done::ByDefault(_)) => return Err(state.no_default(call.command())),
            Err(error) => {
                if error.class == FailureClass::Final {
                    self.store(&path, &before).await?;
                }
                return Err(error);
            }
        };
        if let Some(device) = &device_path {
            record.device.clone_from(device);
            self.store(&path, &record).await?;
        }
        Ok(Learned { device_path, ..Learned::default() })
    }

    /// What is stored next to the global folder of a volume.
    async fn record(&self, folder: &Path) -> Result<Record, PluginError> {
        let folder = folder.to_owned();
        let read = move || Record::read(&folder).map(Option::unwrap_or_default);
        blocking("read the record of a flexVolume", read).await
    }

    /// Stores a record; one that says nothing is removed.
    async fn store(&self, folder: &Path, record: &Record) -> Result<(), PluginError> {
        let is_needed = record.is_attached || !record.device.is_empty();
        if let Some(parent) = folder.parent().filter(|_| is_needed) {
            self.0.host.mounts.create_folders(parent).await?;
        }
        let (folder, record) = (folder.to_owned(), record.clone());
        let write = move || if is_needed { record.write(&folder) } else { Record::remove(&folder) };
        blocking("store the record of a flexVolume", write).await
    }

    pub(super) async fn detach_volume(&self, device: &DevicePlace) -> Result<(), PluginError> {
        let (driver, volume) = Self::split_name(device)?;
        let state = self.0.drivers.get(&driver).await?;
        let path = self.global_path(&driver, &volume)?;
        let record = self.record(&path).await?;
        refuse_busy(&self.0.host, &nodes([Some(&record.device), device.device_path.as_ref()])).await?;
        let call = Call::Detach { volume: &volume, node: &self.0.node };
        match state.call(&call).await? {
            Done::ByDriver(_) | Done::ByDefault(DefaultAction::Nothing) => {}
            Done::ByDefault(_) => return Err(state.no_default(call.command())),
        }
        self.store(&path, &Record::default()).await
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
        let mut record = self.record(&path).await?;
        let known = request.device_path.unwrap_or(&record.device).to_owned();
        let call = Call::WaitForAttach { device: &known, options: &options };
        let device = match state.call(&call).await? {
            Done::ByDriver(answer) if answer.device.is_empty() => known.clone(),
            Done::ByDriver(answer) => answer.device,
            Done::ByDefault(DefaultAction::UseDevicePath) => known.clone(),
            Done::ByDefault(_) => return Err(state.no_default(call.command())),
        };
        let folder = path.to_string_lossy().into_owned();
        let learned = Learned {
            device_path: Some(device.clone()),
            device_mount_path: Some(folder.clone()),
            ..Learned::default()
        };
        if self.0.host.is_mount_point(&path).await? {
            return Ok(learned);
        }
        self.0.host.mounts.create_folders(&path).await?;
        record.volume.clone_from(&volume.inner_name);
        record.device.clone_from(&device);
        self.store(&path, &record).await?;
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
            Err(error) => Err(self.undo_device(&path, record, error).await),
        }
    }

    /// Removes what was stored for the mount of a device that failed for good.
    async fn undo_device(&self, path: &Path, record: Record, error: PluginError) -> PluginError {
        let error = self.undo(path, error).await;
        if error.class == FailureClass::Uncertain || record.is_attached {
            return error;
        }
        match self.store(path, &Record::default()).await {
            Ok(()) => error,
            Err(_) => error.of_class(FailureClass::Uncertain),
        }
    }

    /// Removes the folder of a mount that failed for good, unless the driver has left a mount there.
    async fn undo(&self, path: &Path, error: PluginError) -> PluginError {
        let is_uncertain = error.class == FailureClass::Uncertain;
        if is_uncertain || self.0.host.is_mount_point(path).await.unwrap_or(true) {
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
        if self.0.host.is_mount_point(&path).await? {
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

    /// As the driver says (volumes.md §10.8).
    pub(super) async fn driver_has_file_labels(&self, volume: &VolumeSpec) -> Result<bool, PluginError> {
        let state = self.0.drivers.get(&Self::read(volume)?.driver).await?;
        Ok(state.capabilities.selinux_relabel)
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
        if !self.0.host.is_mount_point(&source).await? {
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
        let mut record = self.record(&path).await?;
        if record == Record::default() && !self.is_there(&path).await? {
            return Ok(());
        }
        if self.0.host.is_mount_point(&path).await? {
            let relative = driver.global_mount(&volume).map_err(wrong_source)?;
            refuse_references(&self.0.host.mounts, &path, &relative).await?;
            if let Some(mounted) = disk::mounted_device(&self.0.host, &path).await? {
                // When it is unmounted only the record says which device it was.
                record = Record { volume: volume.clone(), device: mounted, ..record };
                self.store(&path, &record).await?;
            }
            self.unmount_by_driver(&driver, &path).await?;
        }
        let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
        let nodes = nodes([Some(&record.device), device.device_path.as_ref()]);
        refuse_busy(&self.0.host, &nodes).await.map_err(uncertain)?;
        self.0.host.mounts.clean_mount_point(&path).await?;
        if record.is_attached {
            return Ok(());
        }
        self.store(&path, &Record::default()).await
    }

    /// Unmounts a device. The driver may leave the mount and the folder.
    async fn unmount_by_driver(&self, driver: &Driver, path: &Path) -> Result<(), PluginError> {
        let (_, state) = self.driver_of(driver.name()).await?;
        let call = Call::UnmountDevice { folder: &path.to_string_lossy() };
        match state.call(&call).await? {
            Done::ByDriver(_) | Done::ByDefault(DefaultAction::UnmountDevice) => {
                disk::unmount(&self.0.host, path).await
            }
            Done::ByDefault(_) => Err(state.no_default(call.command())),
        }
    }

    /// Whether a folder exists. One with a mount is not touched, because the mount may hang.
    async fn is_there(&self, path: &Path) -> Result<bool, PluginError> {
        if self.0.host.is_mount_point(path).await? {
            return Ok(true);
        }
        // Also what is not mounted may hang: a folder above it, or what a link leads to.
        self.0.host.mounts.exists(path).await
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

/// The paths that may be device nodes, each once.
fn nodes(paths: [Option<&String>; 2]) -> Vec<String> {
    let mut nodes: Vec<String> =
        paths.into_iter().flatten().filter(|p| p.starts_with("/dev/")).cloned().collect();
    nodes.dedup();
    nodes
}
