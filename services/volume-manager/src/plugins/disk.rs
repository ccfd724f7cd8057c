//! What the plugins iscsi and fc have in common: a disk is mounted once at a global path and bind-mounted for each pod
//! (volumes.md §10.4, §10.5).

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use keelson_volume_manager_core::mount_options::{self, MountOptions};
use keelson_volume_manager_core::names;
use keelson_volume_manager_core::world::{FailureClass, MountLabel, MountStep};
use serde::de::DeserializeOwned;
use tokio::sync::OwnedMutexGuard;

use super::host::{Host, Ownership, names_in, remove};
use super::{FoundFolder, PluginError, SetUpRequest, VolumePlace, VolumeSpec};
use crate::mounter::MountRequest;

/// An error of a field that a person has to correct.
pub(super) fn wrong_source(error: impl Display) -> PluginError {
    PluginError::new(error.to_string()).for_you()
}

/// Reads the source of a volume.
pub(super) fn read_source<T: DeserializeOwned>(volume: &VolumeSpec) -> Result<T, PluginError> {
    serde_json::from_value(volume.source.clone()).map_err(|error| {
        wrong_source(format!("cannot read {} of the volume {}: {error}", volume.field, volume.inner_name))
    })
}

/// Whether containers may only read a volume: through a claim as the pod says, else as the source says.
pub(super) fn is_read_only(volume: &VolumeSpec, source: bool) -> bool {
    if volume.persistent.is_some() { volume.read_only } else { source }
}

/// Where a volume is in its pod.
pub(super) fn pod_path(root: &Path, plugin: &str, pod: &str, inner_name: &str) -> PathBuf {
    root.join("pods").join(pod).join("volumes").join(names::escape(plugin)).join(inner_name)
}

/// The mount options of a volume, sorted.
pub(super) fn options(
    volume: &VolumeSpec,
    read_only: bool,
    label: &MountLabel,
) -> Result<Vec<String>, PluginError> {
    let label = match label {
        MountLabel::Unlabelled => None,
        MountLabel::Context(label) => Some(format!("context=\"{label}\"")),
    };
    let options = MountOptions::default()
        .with(&volume.mount_options)
        .and_then(|options| options.with(label))
        .map_err(wrong_source)?
        .with_flags(read_only.then_some("ro"));
    Ok(mount_options::split(&options.argument()).into_iter().map(str::to_owned).collect())
}

/// Formats `device` if it is blank and mounts it on `path`. After an error the folder is removed, unless something may be
/// mounted there.
pub(super) async fn mount_device(
    host: &Host,
    device: &str,
    path: &Path,
    fs_type: &str,
    options: &[String],
) -> Result<(), PluginError> {
    host.mounts.create_folders(path).await?;
    let request = MountRequest { source: device, target: path, fs_type, options, sensitive: &[] };
    host.mounts.format_and_mount(request).await
}

/// Bind-mounts `source`, where the device is mounted, to the pod, and applies the pod's fsGroup.
pub(super) async fn set_up(
    host: &Host,
    volume: &VolumeSpec,
    (plugin, source): (&str, &Path),
    read_only: bool,
    request: SetUpRequest<'_>,
) -> Result<PathBuf, PluginError> {
    let target = pod_path(&host.root, plugin, &volume.pod.uid, &volume.inner_name);
    if host.mounts.is_mount_point(&target)? {
        return Ok(target);
    }
    // Otherwise the pod would write to the node's own disk.
    if !host.mounts.is_mount_point(source)? {
        let text =
            format!("the device of the volume {} is not mounted on {}", volume.inner_name, source.display());
        return Err(PluginError::new(text).at(MountStep::MountDevice).of_class(FailureClass::Transient));
    }
    bind(host, source, &target, &options(volume, read_only, &MountLabel::Unlabelled)?, request).await?;
    if let Some(group) = volume.fs_group.filter(|_| !read_only) {
        let ownership = Ownership { group, policy: volume.fs_group_policy, walks: request.walks };
        if let Err(error) = host.mounts.apply_fs_group(&target, ownership).await {
            // As in the kubelet, the pod starts all the same (volumes.md §10.5).
            let (uid, volume) = (&volume.pod.uid, &volume.inner_name);
            tracing::warn!(event = "fs_group_failed", uid, volume, %error, "cannot apply the fsGroup");
        }
    }
    Ok(target)
}

/// Bind-mounts `source` on the folder `target` of a pod. After an error nothing is left of it.
pub(super) async fn bind(
    host: &Host,
    source: &Path,
    target: &Path,
    options: &[String],
    request: SetUpRequest<'_>,
) -> Result<(), PluginError> {
    host.mounts.create_folders(target).await?;
    let Err(error) = host.mounts.bind(source, target, options).await else { return Ok(()) };
    if request.is_reconstructed || error.class == FailureClass::Uncertain {
        return Err(error);
    }
    match host.mounts.clean_mount_point(target).await {
        Ok(()) => Err(error),
        Err(_) => Err(error.of_class(FailureClass::Uncertain)),
    }
}

/// Unmounts a volume from its pod. A block volume has no folder of its own.
pub(super) async fn tear_down(host: &Host, plugin: &str, place: &VolumePlace) -> Result<(), PluginError> {
    if place.is_block {
        return Ok(());
    }
    let path = pod_path(&host.root, plugin, place.pod.as_str(), &place.inner_name);
    host.mounts.clean_mount_point(&path).await
}

/// Unmounts `path` and leaves the folder with what the mount has covered.
pub(super) async fn unmount(host: &Host, path: &Path) -> Result<(), PluginError> {
    if !host.mounts.is_mount_point(path)? {
        return Ok(());
    }
    let text = path.to_str().ok_or_else(|| PluginError::new(format!("{} is not UTF-8", path.display())))?;
    let uncertain = |error: PluginError| error.of_class(FailureClass::Uncertain);
    host.run_checked("umount", &[text]).await.map_err(uncertain)?;
    if host.mounts.is_mount_point(path)? {
        let text = format!("{} is still a mount point after umount", path.display());
        return Err(uncertain(PluginError::new(text)));
    }
    Ok(())
}

/// The file beside the global folder of a disk that says which volume it belongs to, as the API names it. The name of the
/// folder alone does not: a portal may be written with or without its port, and identifiers may contain what separates them.
/// The kubelet has no such file and ignores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeFile {
    /// The unique volume name.
    pub(super) volume: String,
    /// The volume's inner name.
    pub(super) inner_name: String,
}

impl VolumeFile {
    pub(super) fn file(folder: &Path) -> PathBuf {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        folder.with_file_name(format!(".{name}.volume"))
    }

    /// Writes the file of a folder.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let file = Self::file(folder);
        let new = file.with_extension("new");
        fs::write(&new, format!("{}\n{}\n", self.volume, self.inner_name))?;
        fs::rename(new, file)
    }

    /// The file of a folder, if there is one and it is complete.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::file(folder)).ok()?;
        let (volume, rest) = text.split_once('\n')?;
        let inner_name = rest.strip_suffix('\n')?;
        Some(Self { volume: volume.to_owned(), inner_name: inner_name.to_owned() })
    }

    /// Removes the file of a folder, and the folder, which has to be empty.
    pub(super) fn remove_with(folder: &Path) -> io::Result<()> {
        remove(fs::remove_dir(folder))?;
        remove(fs::remove_file(Self::file(folder)))
    }
}

/// Which of `folders`, which contain block maps, has the block map of a pod's volume: the one whose file names the volume,
/// else the one whose map is the device that the pod's link leads to.
pub(super) fn folder_with_map(
    folders: &[PathBuf],
    root: &Path,
    plugin: &str,
    found: &FoundFolder,
) -> Option<PathBuf> {
    let pod = found.pod.as_str();
    let maps: Vec<&PathBuf> = folders.iter().filter(|folder| folder.join(pod).exists()).collect();
    let is_named =
        |folder: &&&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.inner_name == found.inner_name);
    if let Some(folder) = maps.iter().find(is_named) {
        return Some((*folder).clone());
    }
    let link =
        root.join("pods").join(pod).join("volumeDevices").join(names::escape(plugin)).join(&found.inner_name);
    let number = |path: &Path| fs::metadata(path).ok().map(|meta| meta.rdev()).filter(|rdev| *rdev != 0);
    let wanted = number(&link)?;
    maps.into_iter().find(|folder| number(&folder.join(pod)) == Some(wanted)).cloned()
}

/// The folder with the block maps of the volume with this inner name.
pub(super) fn folder_of_volume(folders: &[PathBuf], inner_name: &str) -> Option<PathBuf> {
    let is_named =
        |folder: &&PathBuf| VolumeFile::read(folder).is_some_and(|file| file.inner_name == inner_name);
    folders.iter().find(is_named).cloned()
}

/// The name that is stored for a folder. If none is stored, `guess` is returned, and stored for a folder of block maps,
/// which later has to be found by the inner name.
pub(super) async fn stored_name(
    folder: &Path,
    found: &FoundFolder,
    guess: Option<String>,
) -> Result<Option<String>, PluginError> {
    let (folder, inner_name, is_block) = (folder.to_owned(), found.inner_name.clone(), found.is_block);
    let work = move || match (VolumeFile::read(&folder), guess) {
        (Some(file), _) => Ok(Some(file.volume)),
        (None, Some(volume)) => {
            if is_block {
                VolumeFile { volume: volume.clone(), inner_name }.write(&folder)?;
            }
            Ok(Some(volume))
        }
        (None, None) => Ok(None),
    };
    super::host::blocking("read the name of a volume", work).await
}

/// Block maps that are left in a folder; `own` are the plugin's own files.
pub(super) fn maps_in(folder: &Path, own: &[&str]) -> io::Result<Vec<String>> {
    let mut left = names_in(folder)?;
    left.retain(|name| !own.contains(&name.as_str()));
    Ok(left)
}

/// Locks by name, such as one per target. Names that nobody uses take no space.
#[derive(Debug, Default)]
pub(super) struct Locks(Mutex<BTreeMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Locks {
    /// Waits for the lock of `name`.
    pub(super) async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            match locks.get(name).and_then(Weak::upgrade) {
                Some(lock) => lock,
                None => {
                    let lock = Arc::default();
                    locks.insert(name.to_owned(), Arc::downgrade(&lock));
                    lock
                }
            }
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/dev/null` and `/dev/zero` stand for devices: they have numbers.
    #[tokio::test]
    async fn a_block_map_of_another_agent_is_found_by_its_device_and_then_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let folders = ["a", "b"].map(|name| root.join("maps").join(name));
        let links = root.join("pods/u1/volumeDevices/kubernetes.io~fc");
        fs::create_dir_all(&links).unwrap();
        for (folder, device) in folders.iter().zip(["/dev/null", "/dev/zero"]) {
            fs::create_dir_all(folder).unwrap();
            std::os::unix::fs::symlink(device, folder.join("u1")).unwrap();
        }
        std::os::unix::fs::symlink("/dev/zero", links.join("pv1")).unwrap();
        let found = |inner: &str| FoundFolder { pod: "u1".into(), inner_name: inner.into(), is_block: true };
        let find = |inner: &str| folder_with_map(&folders, root, "kubernetes.io/fc", &found(inner));
        assert_eq!(find("pv1"), Some(folders[1].clone()));
        assert_eq!(find("pv2"), None, "its link is missing");
        assert_eq!(folder_of_volume(&folders, "pv1"), None);
        let name = stored_name(&folders[1], &found("pv1"), Some("guess".into())).await.unwrap();
        assert_eq!(name.as_deref(), Some("guess"));
        assert_eq!(folder_of_volume(&folders, "pv1"), Some(folders[1].clone()));
        fs::remove_file(links.join("pv1")).unwrap();
        assert_eq!(find("pv1"), Some(folders[1].clone()), "by the stored name");
    }

    #[test]
    fn a_half_written_volume_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("disk");
        for (text, is_read) in
            [("", false), ("name\n", false), ("name\ninner", false), ("name\ninner\n", true)]
        {
            fs::write(VolumeFile::file(&folder), text).unwrap();
            assert_eq!(VolumeFile::read(&folder).is_some(), is_read, "{text:?}");
        }
    }

    #[tokio::test]
    async fn a_lock_is_held_by_name_and_forgotten_when_nobody_uses_it() {
        let locks = Locks::default();
        let held = locks.lock("a").await;
        let other = locks.lock("b").await;
        assert!(futures_util::FutureExt::now_or_never(locks.lock("a")).is_none());
        drop((held, other));
        drop(locks.lock("a").await);
        locks.lock("c").await;
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}
