//! local volumes (volumes.md §10.6): a directory or a block device of the node.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use keelson_service_kit::{EventRing, ObjectRef};
use keelson_volume_manager_core::claims::VolumeMode;
use keelson_volume_manager_core::hostpath::FileKind;
use keelson_volume_manager_core::local_volume::{
    self, ALREADY_MOUNTED_VOLUME, LocalVolumeError, Mode, Ownership, Use,
};
use keelson_volume_manager_core::operations::VolumeName;
use keelson_volume_manager_core::sources::LocalSource;
use keelson_volume_manager_core::world::{Learned, MountLabel, MountStep, Shape};
use tokio::sync::Mutex as AsyncMutex;

use super::disk::{options, pod_path, read_source, refuse_references, wrong_source};
use super::host::{FOLDER_MODE, Mounts, blocking, is_bound, is_mount_point, mount_references};
use super::{
    Abilities, Answer, DevicePlace, DeviceRequest, FoundDevice, FoundFolder, Identity, Plugin, PluginError,
    Reconstructed, SetUp, SetUpRequest, VolumePlace, VolumeSpec,
};
use crate::block;
use crate::listing::names_in;
use crate::mounter::{FileFacts, MountRequest, Mounter, after_failure};

/// The name of the plugin.
const NAME: &str = "kubernetes.io/local-volume";

/// The plugin.
#[derive(Debug)]
pub(crate) struct Local {
    root: PathBuf,
    run_dir: PathBuf,
    mounter: Mounter,
    /// The same mounter.
    mounts: Arc<dyn Mounts>,
    events: EventRing,
    /// A lock per path, so that only one pod is the first that mounts a volume.
    locks: Mutex<HashMap<PathBuf, Weak<AsyncMutex<()>>>>,
}

/// A volume and what is at its path.
struct Found {
    usage: Use,
    path: String,
    facts: FileFacts,
}

impl Local {
    /// The plugin. `root` is the agent's root folder. `run_dir` is the folder of the agent's sockets, resolved: no volume is
    /// below it.
    pub(crate) fn new(root: PathBuf, run_dir: PathBuf, mounter: Mounter, events: EventRing) -> Self {
        let mounts = Arc::new(mounter.clone());
        Self { root, run_dir, mounter, mounts, events, locks: Mutex::default() }
    }

    fn shared_name(inner_name: &str) -> VolumeName {
        format!("{NAME}/{inner_name}").into()
    }

    fn lock_of(&self, path: &Path) -> Arc<AsyncMutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(path).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(path.to_owned(), Arc::downgrade(&lock));
        lock
    }

    async fn find(&self, volume: &VolumeSpec) -> Result<Found, PluginError> {
        let source: LocalSource = read_source(volume)?;
        let name = &volume.inner_name;
        local_volume::check_path(name, &source.path).map_err(wrong_source)?;
        let mode = match volume.mode {
            VolumeMode::Filesystem => Mode::Filesystem,
            VolumeMode::Block => Mode::Block,
        };
        let facts = self.mounter.inspect(Path::new(&source.path)).await?;
        let kind = facts.as_ref().map_or(FileKind::Missing, FileFacts::kind);
        let usage =
            local_volume::usage(name, &source.path, mode, kind, &source.fs_type).map_err(wrong_source)?;
        let missing = || {
            let (volume, path) = (name.clone(), source.path.clone());
            wrong_source(LocalVolumeError::Missing { volume, path })
        };
        let facts = facts.ok_or_else(missing)?;
        // Admission, which decides on such paths, sees only those that a pod names itself (ADR 0004).
        if facts.path.starts_with(&self.run_dir) || Path::new(&source.path).starts_with(&self.run_dir) {
            return Err(wrong_source(format!(
                "local volume {name}: the path {:?} is in the folder of the agent's sockets; correct spec.local of the \
                 PersistentVolume",
                source.path
            )));
        }
        Ok(Found { usage, facts, path: source.path.clone() })
    }

    async fn mount_device(&self, volume: &VolumeSpec) -> Result<Learned, PluginError> {
        let Found { usage, path, .. } = self.find(volume).await?;
        let (fs_type, global) = match usage {
            Use::Directory => {
                return Ok(Learned { device_mount_path: Some(path), ..Learned::default() });
            }
            Use::Map { .. } => return Ok(Learned { device_path: Some(path), ..Learned::default() }),
            Use::Device { fs_type, global } => (fs_type, self.root.join(global)),
        };
        if !is_mount_point(&self.mounts, &global).await? {
            self.mounter.create_folders(&global, FOLDER_MODE).await?;
            let options = options(volume, volume.read_only, &MountLabel::Unlabelled)?;
            let request = MountRequest {
                source: &path,
                target: &global,
                fs_type: &fs_type,
                options: &options,
                sensitive: &[],
            };
            if let Err(error) = self.mounter.format_and_mount(request, &[]).await {
                return Err(after_failure(&self.mounter, &global, false, error).await);
            }
        }
        let device_mount_path = Some(global.display().to_string());
        Ok(Learned { device_path: Some(path), device_mount_path, ..Learned::default() })
    }

    async fn set_up(&self, volume: &VolumeSpec, request: SetUpRequest<'_>) -> Result<PathBuf, PluginError> {
        let Found { usage, facts, .. } = self.find(volume).await?;
        let is_device = matches!(usage, Use::Device { .. });
        let source = match (usage, request.device_mount_path) {
            (Use::Map { .. }, _) => return Ok(facts.path),
            (Use::Directory, _) => facts.path,
            (Use::Device { .. }, Some(path)) => PathBuf::from(path),
            (Use::Device { global, .. }, None) => self.root.join(global),
        };
        let target = pod_path(&self.root, NAME, &volume.pod.uid, &volume.inner_name);
        let lock = self.lock_of(&source);
        let _guard = lock.lock().await;
        let options = options(volume, volume.read_only, &MountLabel::Unlabelled)?;
        if is_bound(&self.mounts, &target, &options).await? {
            return Ok(target);
        }
        if is_device && !is_mount_point(&self.mounts, &source).await? {
            // Someone has unmounted it. Without it, the pod would write to the node's own disk.
            self.mount_device(volume).await?;
            if !is_mount_point(&self.mounts, &source).await? {
                let (name, source) = (&volume.inner_name, source.display());
                let text = format!("the device of the local volume {name} is not mounted on {source}");
                return Err(PluginError::new(text).at(MountStep::MountDevice));
            }
        }
        self.apply_fs_group(volume, &source, request).await?;
        self.mounter.create_folders(&target, FOLDER_MODE).await?;
        match self.mounter.bind(&source, &target, &options).await {
            Ok(()) => Ok(target),
            Err(error) => {
                let keeps_folder = request.is_reconstructed;
                Err(after_failure(&self.mounter, &target, keeps_folder, error).await)
            }
        }
    }

    /// Changes the ownership of the files for the first pod, before the volume is mounted for it. So a volume that is mounted
    /// has the right ownership, even after a walk that was interrupted.
    async fn apply_fs_group(
        &self,
        volume: &VolumeSpec,
        source: &Path,
        request: SetUpRequest<'_>,
    ) -> Result<(), PluginError> {
        let references = mount_references(&self.mounts, source).await?;
        let references = references.iter().filter_map(|path| path.to_str());
        let pods = self.root.join("pods");
        // mountinfo has the path without links.
        let real = self.mounter.inspect(&pods).await?.map_or(pods, |facts| facts.path);
        let is_mounted = local_volume::is_mounted_by_a_pod(references, &real);
        let Some(fs_group) = volume.fs_group else { return Ok(()) };
        let group = self.mounter.inspect(source).await?.map_or(0, |facts| facts.group);
        let wanted = Some(i64::from(fs_group));
        match local_volume::ownership(&volume.inner_name, wanted, volume.read_only, is_mounted, group) {
            Ownership::Unchanged => Ok(()),
            Ownership::Change(_) => {
                let policy = volume.fs_group_policy;
                self.mounter.apply_fs_group(source, fs_group, false, policy, request.walks).await
            }
            Ownership::Conflict(message) => {
                let pod = ObjectRef::pod(&volume.pod.namespace, &volume.pod.name, &volume.pod.uid);
                self.events.warning(pod, ALREADY_MOUNTED_VOLUME, message);
                Ok(())
            }
        }
    }

    async fn unmount_device(&self, device: &DevicePlace) -> Result<(), PluginError> {
        if device.is_block {
            let folder = local_volume::block_maps(&device.inner_name).map_err(wrong_source)?;
            return block::remove_global_map(&self.root.join(folder)).await;
        }
        // A directory is the user's own and stays as it is.
        let global = local_volume::global_mount(&device.inner_name).map_err(wrong_source)?;
        let path = self.root.join(&global);
        refuse_references(&self.mounts, &path, &global).await?;
        self.mounter.clean_mount_point(&path, false).await
    }

    /// The devices with a folder in `folder`, which is relative to the agent's root folder.
    async fn found_in(&self, folder: &str, is_block: bool) -> Result<Vec<FoundDevice>, PluginError> {
        let folder = self.root.join(folder);
        let listed = folder.clone();
        let names = blocking("list the devices of local volumes", move || names_in(&listed)).await?;
        let device = |inner_name: String| FoundDevice {
            volume: Self::shared_name(&inner_name),
            is_block,
            device_mount_path: folder.join(&inner_name).display().to_string(),
            label: None,
            inner_name,
        };
        Ok(names.into_iter().map(device).collect())
    }

    async fn expand(&self, volume: &VolumeSpec, size: u64) -> Result<u64, PluginError> {
        let Found { usage, path, .. } = self.find(volume).await?;
        if let Use::Device { global, .. } = usage {
            self.mounter.grow(Path::new(&path), &self.root.join(global)).await?;
        }
        Ok(size)
    }
}

impl Plugin for Local {
    fn name(&self) -> &'static str {
        NAME
    }

    fn field(&self) -> &'static str {
        "local"
    }

    fn abilities(&self) -> Abilities {
        Abilities { mount_options: true, block: true, inline: false, persistent: true }
    }

    fn identify<'a>(&'a self, volume: &'a VolumeSpec) -> Answer<'a, Identity> {
        Box::pin(async move {
            let source: LocalSource = read_source(volume)?;
            local_volume::check_path(&volume.inner_name, &source.path).map_err(wrong_source)?;
            local_volume::global_mount(&volume.inner_name).map_err(wrong_source)?;
            Ok(Identity {
                shared_name: Some(Self::shared_name(&volume.inner_name)),
                shape: Shape::Device,
                is_set_up_each_sync: false,
                supports_label: false,
                can_expand: true,
                read_only: volume.read_only,
            })
        })
    }

    fn mount_device<'a>(&'a self, volume: &'a VolumeSpec, _: DeviceRequest<'a>) -> Answer<'a, Learned> {
        Box::pin(self.mount_device(volume))
    }

    fn set_up<'a>(&'a self, volume: &'a VolumeSpec, request: SetUpRequest<'a>) -> Answer<'a, SetUp> {
        Box::pin(async move {
            let host_path = self.set_up(volume, request).await?;
            Ok(SetUp { host_path, learned: Learned::default() })
        })
    }

    fn has_file_labels<'a>(&'a self, _: &'a VolumeSpec, _: &'a Path) -> Answer<'a, bool> {
        Box::pin(async { Ok(true) })
    }

    fn tear_down<'a>(&'a self, place: &'a VolumePlace) -> Answer<'a, ()> {
        Box::pin(async move {
            if place.is_block {
                return Ok(());
            }
            let target = pod_path(&self.root, NAME, place.pod.as_str(), &place.inner_name);
            self.mounter.clean_mount_point(&target, false).await
        })
    }

    fn unmount_device<'a>(&'a self, device: &'a DevicePlace) -> Answer<'a, ()> {
        Box::pin(self.unmount_device(device))
    }

    fn expand<'a>(&'a self, volume: &'a VolumeSpec, _: SetUpRequest<'a>, size: u64) -> Answer<'a, u64> {
        Box::pin(self.expand(volume, size))
    }

    fn global_map_path<'a>(&'a self, inner_name: &'a str) -> Answer<'a, Option<PathBuf>> {
        let folder = local_volume::block_maps(inner_name).ok().map(|folder| self.root.join(folder));
        Box::pin(async { Ok(folder) })
    }

    fn found_devices(&self) -> Answer<'_, Vec<FoundDevice>> {
        Box::pin(async {
            let mut found = self.found_in(local_volume::GLOBAL_MOUNTS, false).await?;
            found.extend(self.found_in(local_volume::BLOCK_MAPS, true).await?);
            Ok(found)
        })
    }

    fn reconstruct<'a>(&'a self, folder: &'a FoundFolder) -> Answer<'a, Reconstructed> {
        Box::pin(async move {
            let global = local_volume::global_mount(&folder.inner_name).map_err(wrong_source)?;
            let path = self.root.join(global);
            let is_mounted = !folder.is_block && is_mount_point(&self.mounts, &path).await?;
            Ok(Reconstructed {
                shared_name: Some(Self::shared_name(&folder.inner_name)),
                has_device: true,
                device_mount_path: is_mounted.then(|| path.display().to_string()),
                label: Some(MountLabel::Unlabelled),
            })
        })
    }
}

#[cfg(test)]
mod tests;
