//! The pod folders and volumes on disk (volumes.md §2, §10.1, §10.2, §3.17). All functions block.

mod error;
mod folders;
mod host_path;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_files::remove_if_exists;
use keelson_kube_model::kernel;
use keelson_volume_manager_core::desire::{Medium, PodDesire, Source, Volume};
use keelson_volume_manager_core::names::{EMPTY_DIR, VolumeKey, is_canonical, unescape};
use keelson_volume_manager_core::payload::{Files, SourceCache, collect};
use keelson_volume_manager_core::plan::ActualState;
use keelson_volume_manager_core::{hugepages, tmpfs};

pub(crate) use self::error::StoreError;
use self::error::io_error;
use self::folders::{
    FOLDER_MODE, create_folder, create_marker, folders_in, ignore_not_found, is_folder, remove_empty,
    remove_marker, set_mode,
};
use self::host_path::check_host_path;
use crate::atomic;
use crate::fsgroup::{self, Access, FsGroup};
use crate::listing::names_in;
use crate::mounter::Mounter;
use crate::mounts::{
    MountError, is_mount_point, mount_huge_pages, mount_tmpfs, reachable_mounts, share_root, unmount_memory,
};
use crate::plugins::{FoundFolder, Plugins};
use crate::remove::remove_tree;
use crate::shared_volumes::PluginFolder;
use crate::subpath;
use crate::user_namespaces::UserNamespaces;
use crate::walks::FsGroupWalks;

/// A volume that is set up.
#[derive(Debug)]
pub(crate) struct ReadyVolume {
    pub(crate) host_path: PathBuf,
    /// Containers may only read it.
    pub(crate) read_only: bool,
}

/// How to set up the emptyDir that a volume is built on.
#[derive(Debug, Clone, Copy)]
struct EmptyDirSpec<'a> {
    key: &'a VolumeKey,
    backing: Backing,
    size_limit: Option<u64>,
    access: Access,
    group: Option<FsGroup<'a>>,
}

/// Where the content of a volume is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Folder,
    Tmpfs,
    /// With pages of this size in bytes.
    HugePages(u64),
}

/// The agent's root folder.
#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
    /// The folder of the agent's sockets.
    run_dir: PathBuf,
    /// Memory in bytes that pods may use; limits memory-backed volumes.
    allocatable: u64,
    noswap: bool,
    mounter: Mounter,
    user_namespaces: UserNamespaces,
}

impl Store {
    /// Opens the root folder, and creates it and its fixed sub-folders if they are missing.
    pub(crate) fn open(
        root: &Path,
        run_dir: &Path,
        allocatable: u64,
        mounter: Mounter,
        user_namespaces: UserNamespaces,
    ) -> Result<Self, StoreError> {
        if !is_canonical(root) {
            return Err(StoreError::RootPath { path: root.to_owned() });
        }
        if let Some(parent) = root.parent() {
            fs::create_dir_all(parent).map_err(|source| io_error("create", parent, source))?;
        }
        for name in ["", "pods", "plugins", "plugins_registry"] {
            let path = if name.is_empty() { root.to_owned() } else { root.join(name) };
            create_folder(&path, FOLDER_MODE)?;
        }
        keelson_service_kit::spread_below(&root.join("pods"));
        let noswap = kernel::has_noswap(&rustix::system::uname().release().to_string_lossy());
        // Resolved, because hostPaths are resolved before they are compared with it.
        let run_dir = fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.to_owned());
        Ok(Self { root: root.to_owned(), run_dir, allocatable, noswap, mounter, user_namespaces })
    }

    /// Makes mounts below the root folder propagate to containers and back.
    pub(crate) fn share(&self) -> Result<(), MountError> {
        share_root(&self.root)
    }

    /// Access to mounts and foreign filesystems.
    pub(crate) const fn mounter(&self) -> &Mounter {
        &self.mounter
    }

    /// `<root>/pods/<uid>`.
    pub(crate) fn pod_folder(&self, uid: &str) -> PathBuf {
        self.root.join("pods").join(uid)
    }

    fn volume_path(&self, uid: &str, key: &VolumeKey) -> PathBuf {
        self.pod_folder(uid).join("volumes").join(&key.plugin).join(&key.name)
    }

    fn marker_folder(&self, uid: &str, marker: &str) -> PathBuf {
        self.pod_folder(uid).join("plugins").join(EMPTY_DIR).join(marker)
    }

    /// Lists every pod that has a folder, with the volumes below `volumes`. Does not access the volumes themselves,
    /// because one may hang.
    pub(crate) fn scan(&self) -> Result<Vec<(String, ActualState)>, StoreError> {
        let mut found = Vec::new();
        for uid in folders_in(&self.root.join("pods"))? {
            self.user_namespaces.found(&uid, &self.pod_folder(&uid));
            let volumes = self.pod_folder(&uid).join("volumes");
            let subpaths = subpath::has_any(&self.pod_folder(&uid));
            let mut actual = ActualState { folder: true, subpaths, ..ActualState::default() };
            for plugin in folders_in(&volumes)? {
                for name in folders_in(&volumes.join(&plugin))? {
                    actual.on_disk.insert(VolumeKey { plugin: plugin.clone(), name });
                }
            }
            found.push((uid, actual));
        }
        Ok(found)
    }

    /// Takes the volumes of these plugins out of what was found on disk, and adds their block devices.
    pub(crate) fn take_plugin_folders(
        &self,
        found: &mut [(String, ActualState)],
        plugins: &Plugins,
    ) -> Vec<PluginFolder> {
        let mut folders = Vec::new();
        let is_known = |key: &VolumeKey| plugins.named(&unescape(&key.plugin)).is_some();
        for (uid, actual) in found {
            let mut add = |key: &VolumeKey, is_block| {
                let folder = FoundFolder { pod: uid.as_str().into(), inner_name: key.name.clone(), is_block };
                folders.push(PluginFolder { plugin: key.plugin.clone(), folder });
            };
            let mut has_any = false;
            actual.on_disk.retain(|key| {
                if is_known(key) {
                    add(key, false);
                    has_any = true;
                }
                !is_known(key)
            });
            let devices = self.pod_folder(uid).join("volumeDevices");
            for plugin in folders_in(&devices).unwrap_or_default() {
                for name in names_in(&devices.join(&plugin)).unwrap_or_default() {
                    let key = VolumeKey { plugin: plugin.clone(), name };
                    if is_known(&key) {
                        add(&key, true);
                        has_any = true;
                    }
                }
            }
            actual.plugins.may_have_mounts = has_any;
        }
        folders
    }

    /// The ranges of IDs of pods with a user namespace.
    pub(crate) const fn user_namespaces(&self) -> &UserNamespaces {
        &self.user_namespaces
    }

    /// Creates the pod's folder and its sub-folders, and assigns IDs to a pod with a user namespace.
    pub(crate) fn create_pod_folders(&self, desire: &PodDesire) -> Result<(), StoreError> {
        let uid = &desire.header.pod.uid;
        let folder = self.pod_folder(uid);
        create_folder(&folder, FOLDER_MODE)?;
        for name in ["volumes", "plugins", "containers"] {
            create_folder(&folder.join(name), FOLDER_MODE)?;
        }
        if desire.user_namespace {
            self.user_namespaces.assign(uid, &folder, &self.mounter)?;
        }
        Ok(())
    }

    /// Sets up a volume, unless it is set up already. `sources` looks up its objects and tokens; `walks` tracks the fsGroup
    /// walk.
    pub(crate) fn set_up(
        &self,
        desire: &PodDesire,
        volume: &Volume,
        sources: &impl SourceCache,
        walks: &FsGroupWalks,
    ) -> Result<ReadyVolume, StoreError> {
        let group = desire.fs_group.map(|gid| FsGroup { gid, walks });
        match &volume.source {
            Source::EmptyDir { medium, size_limit } => {
                let backing = backing(medium, desire)?;
                let key = VolumeKey::empty_dir(&volume.name);
                let access = Access::ReadWrite;
                let spec = EmptyDirSpec { key: &key, backing, size_limit: *size_limit, access, group };
                let (host_path, _) = self.set_up_empty_dir(desire, spec)?;
                Ok(ReadyVolume { host_path, read_only: false })
            }
            Source::HostPath { path, kind } => {
                let check = check_host_path(&self.run_dir, path, kind);
                tokio::runtime::Handle::current().block_on(check)?;
                Ok(ReadyVolume { host_path: PathBuf::from(path), read_only: false })
            }
            Source::Files(files) => self.set_up_files(desire, &volume.name, files, group, sources),
            Source::Claim { .. } | Source::Plugin { .. } => {
                Err(StoreError::Unsupported { kind: "a plugin".to_owned() })
            }
            Source::Unsupported(kind) => Err(StoreError::Unsupported { kind: kind.clone() }),
        }
    }

    /// Sets up a volume of files (volumes.md §9.1), or updates its files. On error an existing volume stays as it was,
    /// and a new one is removed.
    fn set_up_files(
        &self,
        desire: &PodDesire,
        name: &str,
        files: &Files,
        group: Option<FsGroup<'_>>,
        sources: &impl SourceCache,
    ) -> Result<ReadyVolume, StoreError> {
        let payload = collect(files, &desire.header.pod.namespace, sources)?;
        let key = VolumeKey { plugin: files.kind.plugin().to_owned(), name: name.to_owned() };
        let backing = if files.kind.in_memory() { Backing::Tmpfs } else { Backing::Folder };
        let access = Access::ReadOnly;
        let spec = EmptyDirSpec { key: &key, backing, size_limit: None, access, group };
        let (host_path, is_new) = self.set_up_empty_dir(desire, spec)?;
        let now = keelson_service_kit::now_unix_nanos();
        match atomic::write(&host_path, &payload, group, now) {
            Ok(written) => {
                if written && !is_new {
                    let pod = &desire.header.pod;
                    tracing::info!(
                        uid = pod.uid,
                        pod = pod.name,
                        namespace = pod.namespace,
                        volume = name,
                        "updated the files of the volume"
                    );
                }
                Ok(ReadyVolume { host_path, read_only: true })
            }
            Err(error) => {
                if is_new && let Err(error) = self.tear_down(&desire.header.pod.uid, &key) {
                    tracing::warn!(uid = desire.header.pod.uid, volume = name, %error, "cannot remove the incomplete volume");
                }
                Err(error.into())
            }
        }
    }

    /// Returns the volume's folder, and whether it is new.
    fn set_up_empty_dir(
        &self,
        desire: &PodDesire,
        spec: EmptyDirSpec<'_>,
    ) -> Result<(PathBuf, bool), StoreError> {
        let EmptyDirSpec { key, backing, size_limit, access, group } = spec;
        let uid = &desire.header.pod.uid;
        let path = self.volume_path(uid, key);
        let marker = self.marker_folder(uid, key.marker().as_deref().unwrap_or(&key.name));
        if marker.join("ready").exists() {
            let is_set_up = match backing {
                Backing::Folder => is_folder(&path),
                Backing::Tmpfs => is_mount_point(&path)?,
                Backing::HugePages(size) => {
                    let is_mounted = is_mount_point(&path)?;
                    if is_mounted {
                        // Fails if the pages have another size.
                        mount_huge_pages(&path, size)?;
                    }
                    is_mounted
                }
            };
            if is_set_up {
                return Ok((path, false));
            }
            remove_marker(&marker)?;
        }
        if let Some(plugin) = path.parent() {
            create_folder(plugin, 0o755)?;
        }
        let is_new = !is_folder(&path);
        create_folder(&path, 0o777)?;
        match backing {
            Backing::Folder => set_mode(&path, 0o777)?,
            Backing::Tmpfs if is_mount_point(&path)? => {}
            Backing::Tmpfs => {
                let size = tmpfs::size(self.allocatable, desire.memory_limit, size_limit);
                mount_tmpfs(&path, size, self.noswap)?;
            }
            Backing::HugePages(size) => mount_huge_pages(&path, size)?,
        }
        if let Some(group) = group
            && let Err(error) = fsgroup::apply(&path, group, access)
        {
            tracing::warn!(uid, volume = key.name, %error, "cannot apply the pod's fsGroup to the volume");
        }
        create_marker(&marker)?;
        Ok((path, is_new))
    }

    /// Unmounts the subPaths of the pod's containers.
    pub(crate) fn remove_subpaths(&self, uid: &str) -> Result<(), StoreError> {
        self.remove_subpaths_of(uid, None)
    }

    /// Waits for the helper process, because the volume of a subPath may hang.
    fn remove_subpaths_of(&self, uid: &str, volume: Option<&str>) -> Result<(), StoreError> {
        let folder = self.pod_folder(uid);
        let removal = self.mounter.remove_subpaths(&folder, volume);
        tokio::runtime::Handle::current().block_on(removal).map_err(StoreError::SubPath)
    }

    /// Unmounts and removes a volume with its content. A missing volume is not an error.
    pub(crate) fn tear_down(&self, uid: &str, key: &VolumeKey) -> Result<(), StoreError> {
        self.remove_subpaths_of(uid, Some(&key.name))?;
        let path = self.volume_path(uid, key);
        let Some(marker) = key.marker() else { return remove_foreign(&path, key) };
        remove_marker(&self.marker_folder(uid, &marker))?;
        unmount_memory(&path)?;
        let above = path.parent().unwrap_or(&self.root);
        remove_tree(above, &key.name)?;
        Ok(())
    }

    /// Removes the rest of a pod's folder after its volumes are removed (volumes.md §3.17).
    pub(crate) fn remove_pod_folder(&self, uid: &str) -> Result<(), StoreError> {
        let folder = self.pod_folder(uid);
        let volumes = folder.join("volumes");
        for plugin in folders_in(&volumes)? {
            for name in folders_in(&volumes.join(&plugin))? {
                remove_empty(&volumes.join(&plugin).join(name))?;
            }
            remove_empty(&volumes.join(plugin))?;
        }
        remove_empty(&volumes)?;
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.user_namespaces.release(uid);
                return Ok(());
            }
            Err(source) => return Err(io_error("read", &folder, source)),
        };
        for entry in entries {
            let entry = entry.map_err(|source| io_error("read", &folder, source))?;
            let name = entry.file_name();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            match name.to_str() {
                // Created again during the removal; the removal of the pod's folder below fails and is retried.
                Some("volumes") => {}
                Some(name) if is_folder => remove_tree(&folder, name)?,
                _ => remove_if_exists(&entry.path())
                    .map_err(|source| io_error("remove", &entry.path(), source))?,
            }
        }
        remove_empty(&folder)?;
        self.user_namespaces.release(uid);
        Ok(())
    }
}

/// Where the content of an emptyDir of a pod is stored.
fn backing(medium: &Medium, desire: &PodDesire) -> Result<Backing, StoreError> {
    match medium {
        Medium::Disk => Ok(Backing::Folder),
        Medium::Memory => Ok(Backing::Tmpfs),
        Medium::HugePages(size) => Ok(Backing::HugePages(hugepages::page_size(size, &desire.huge_pages)?)),
        Medium::Unknown(medium) => Err(StoreError::UnknownMedium { medium: medium.clone() }),
    }
}

/// Removes the folder of a volume of an unsupported plugin, but only if it is empty and nothing is mounted there. Reads
/// mountinfo instead of the folder, which may hang.
fn remove_foreign(path: &Path, key: &VolumeKey) -> Result<(), StoreError> {
    let mounted = reachable_mounts()?.iter().any(|m| m.point.starts_with(path));
    if !mounted && ignore_not_found(fs::remove_dir(path)).is_ok() {
        return Ok(());
    }
    let plugin = keelson_volume_manager_core::names::unescape(&key.plugin);
    Err(StoreError::ForeignPlugin { path: path.to_owned(), plugin })
}
