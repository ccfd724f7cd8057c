//! The pod folders and volumes on disk (volumes.md §2, §10.1, §10.2, §3.17). Everything here blocks.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use keelson_kube_model::kernel;
use keelson_volume_manager_core::desire::{Medium, PodDesire, Source, Volume};
use keelson_volume_manager_core::hostpath::{self, Act, Found, HostPathError, Verdict};
use keelson_volume_manager_core::hugepages::{self, HugePagesError};
use keelson_volume_manager_core::names::{EMPTY_DIR, VolumeKey, is_one_component};
use keelson_volume_manager_core::payload::{Files, Known, PayloadError, collect};
use keelson_volume_manager_core::plan::Actual;
use keelson_volume_manager_core::tmpfs;

use crate::atomic::{self, WriteError};
use crate::fsgroup::{self, Access, Group};
use crate::mounts::{
    MountError, is_mount_point, mount_huge_pages, mount_tmpfs, read_mounts, share_root, unmount_memory,
};
use crate::remove::{RemoveError, remove_tree};
use crate::subpath::{self, SubPathError};
use crate::walks::Walks;

/// Folders of the agent and of a pod (volumes.md §2).
const FOLDER_MODE: u32 = 0o750;

/// Why something on disk could not be brought about.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The root folder's path is not plain.
    #[error("the root folder {} must be an absolute path without . or .. and without a slash at its end", path.display())]
    RootPath { path: PathBuf },
    /// A system call has failed.
    #[error("cannot {act} {}", path.display())]
    Io { act: &'static str, path: PathBuf, source: io::Error },
    /// A mount could not be made or undone.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// Something could not be removed.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The files of a volume are not known or not possible.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The files of a volume could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The hostPath is not what the volume asks for.
    #[error(transparent)]
    HostPath(#[from] HostPathError),
    /// The medium is none of the API.
    #[error("unknown storage medium {medium:?}; it is empty, Memory or HugePages")]
    Medium { medium: String },
    /// Huge pages that the pod does not request.
    #[error(transparent)]
    HugePages(#[from] HugePagesError),
    /// Parts of volumes could not be unmounted.
    #[error("a part of a volume that was mounted for a container is still there")]
    SubPath(#[from] SubPathError),
    /// The kind of volume is not mounted by this version.
    #[error("volumes of the kind {kind} are not supported by this version")]
    Unsupported { kind: String },
    /// A volume of a plugin that this version does not know is in the way.
    #[error("the volume {} belongs to the plugin {plugin}, which this version cannot tear down; unmount it and remove its folder", path.display())]
    ForeignPlugin { path: PathBuf, plugin: String },
}

impl StoreError {
    /// Whether the volume cannot be set up as its spec has it; a retry helps only when the node changes.
    pub(crate) fn is_permanent(&self) -> bool {
        match self {
            Self::HostPath(_) | Self::Medium { .. } | Self::HugePages(_) | Self::Unsupported { .. } => true,
            Self::Payload(PayloadError::Wrong(faults)) => faults.iter().any(|fault| fault.is_of_the_spec()),
            Self::Payload(PayloadError::Waits(_))
            | Self::Write(_)
            | Self::RootPath { .. }
            | Self::Io { .. }
            | Self::Mount(_)
            | Self::Remove(_)
            | Self::SubPath(_)
            | Self::ForeignPlugin { .. } => false,
        }
    }

    /// Whether only a person can end the failure, by what stands beside the pod.
    pub(crate) fn is_of_the_objects(&self) -> bool {
        matches!(self, Self::Payload(PayloadError::Wrong(_))) && !self.is_permanent()
    }
}

/// A volume that is ready: where it is, and what it holds below the pod's folder.
#[derive(Debug)]
pub(crate) struct SetUp {
    pub(crate) host_path: PathBuf,
    /// Containers may only read it.
    pub(crate) read_only: bool,
}

/// What the set-up of a volume depends on beside its own spec.
#[derive(Debug, Clone, Copy)]
struct Wrapped<'a> {
    key: &'a VolumeKey,
    backing: Backing,
    size_limit: Option<u64>,
    access: Access,
    group: Option<Group<'a>>,
}

/// What the content of a volume lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Folder,
    Tmpfs,
    /// Of this size in bytes.
    HugePages(u64),
}

/// The agent's root folder.
#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
    /// The folder of the agent's sockets.
    run_dir: PathBuf,
    /// Memory in bytes that pods may use; bounds memory-backed volumes.
    allocatable: u64,
    noswap: bool,
}

impl Store {
    /// Opens the root folder, making it and its fixed sub-folders when missing.
    pub(crate) fn open(root: &Path, run_dir: &Path, allocatable: u64) -> Result<Self, StoreError> {
        if !keelson_volume_manager_core::mountinfo::is_canonical(root) {
            return Err(StoreError::RootPath { path: root.to_owned() });
        }
        if let Some(parent) = root.parent() {
            fs::create_dir_all(parent).map_err(|source| io_error("make", parent, source))?;
        }
        for name in ["", "pods", "plugins", "plugins_registry"] {
            let path = if name.is_empty() { root.to_owned() } else { root.join(name) };
            make_folder(&path, FOLDER_MODE)?;
        }
        keelson_service_kit::spread_below(&root.join("pods"));
        let noswap = kernel::has_noswap(&rustix::system::uname().release().to_string_lossy());
        // Where it is a link itself, volumes lead to what it leads to.
        let run_dir = fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.to_owned());
        Ok(Self { root: root.to_owned(), run_dir, allocatable, noswap })
    }

    fn check_way(&self, path: &str) -> Result<(), StoreError> {
        match fs::canonicalize(path) {
            Ok(resolves) => Ok(hostpath::no_way_into(&self.run_dir, path, &resolves)?),
            // The runtime makes a folder there, or says that it cannot: it comes no further than this.
            Err(_) => Ok(()),
        }
    }

    /// Makes mounts below the root folder visible to containers and back.
    pub(crate) fn share(&self) -> Result<(), MountError> {
        share_root(&self.root)
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

    /// Every pod that has a folder, with what lies below its `volumes`. Volumes are listed, never looked at: one
    /// may hang.
    pub(crate) fn scan(&self) -> Result<Vec<(String, Actual)>, StoreError> {
        let mut found = Vec::new();
        for uid in folders_in(&self.root.join("pods"))? {
            let volumes = self.pod_folder(&uid).join("volumes");
            let subpaths = subpath::has_any(&self.pod_folder(&uid));
            let mut actual = Actual { folder: true, subpaths, ..Actual::default() };
            for plugin in folders_in(&volumes)? {
                for name in folders_in(&volumes.join(&plugin))? {
                    actual.held.insert(VolumeKey { plugin: plugin.clone(), name });
                }
            }
            found.push((uid, actual));
        }
        Ok(found)
    }

    /// Makes the pod's folder and its sub-folders.
    pub(crate) fn make_pod_folders(&self, uid: &str) -> Result<(), StoreError> {
        let folder = self.pod_folder(uid);
        make_folder(&folder, FOLDER_MODE)?;
        for name in ["volumes", "plugins", "containers"] {
            make_folder(&folder.join(name), FOLDER_MODE)?;
        }
        Ok(())
    }

    /// Sets up a volume, or finds it set up. `known` says what is known of its objects and tokens; `walks` sees its files go to the
    /// pod's group.
    pub(crate) fn set_up(
        &self,
        desire: &PodDesire,
        volume: &Volume,
        known: &impl Known,
        walks: &Walks,
    ) -> Result<SetUp, StoreError> {
        let group = desire.fs_group.map(|gid| Group { gid, walks });
        match &volume.source {
            Source::EmptyDir { medium, size_limit } => {
                let backing = backing(medium, desire)?;
                let key = VolumeKey::empty_dir(&volume.name);
                let access = Access::ReadWrite;
                let wrapped = Wrapped { key: &key, backing, size_limit: *size_limit, access, group };
                let (host_path, _) = self.set_up_empty_dir(desire, wrapped)?;
                Ok(SetUp { host_path, read_only: false })
            }
            Source::HostPath { path, kind } => {
                check_host_path(path, kind)?;
                self.check_way(path)?;
                Ok(SetUp { host_path: PathBuf::from(path), read_only: false })
            }
            Source::Files(files) => self.set_up_files(desire, &volume.name, files, group, known),
            Source::Unsupported(kind) => Err(StoreError::Unsupported { kind: kind.clone() }),
        }
    }

    /// Sets up a volume of files (volumes.md §9.1), or brings its files up to date. A failure leaves a volume
    /// that was there as it was, and nothing of one that was not.
    fn set_up_files(
        &self,
        desire: &PodDesire,
        name: &str,
        files: &Files,
        group: Option<Group<'_>>,
        known: &impl Known,
    ) -> Result<SetUp, StoreError> {
        let payload = collect(files, &desire.pod.namespace, known)?;
        let key = VolumeKey { plugin: files.kind.plugin().to_owned(), name: name.to_owned() };
        let backing = if files.kind.in_memory() { Backing::Tmpfs } else { Backing::Folder };
        let access = Access::ReadOnly;
        let wrapped = Wrapped { key: &key, backing, size_limit: None, access, group };
        let (host_path, is_new) = self.set_up_empty_dir(desire, wrapped)?;
        let now = keelson_service_kit::now_unix_nanos();
        match atomic::write(&host_path, &payload, group, now) {
            Ok(written) => {
                if written && !is_new {
                    let pod = &desire.pod;
                    tracing::info!(
                        uid = pod.uid,
                        pod = pod.name,
                        namespace = pod.namespace,
                        volume = name,
                        "the files of the volume have been replaced"
                    );
                }
                Ok(SetUp { host_path, read_only: true })
            }
            Err(error) => {
                if is_new && let Err(error) = self.tear_down(&desire.pod.uid, &key) {
                    tracing::warn!(uid = desire.pod.uid, volume = name, %error, "what was begun is still there");
                }
                Err(error.into())
            }
        }
    }

    /// Where the folder is, and whether it was not there before.
    fn set_up_empty_dir(
        &self,
        desire: &PodDesire,
        wrapped: Wrapped<'_>,
    ) -> Result<(PathBuf, bool), StoreError> {
        let Wrapped { key, backing, size_limit, access, group } = wrapped;
        let uid = &desire.pod.uid;
        let path = self.volume_path(uid, key);
        let marker = self.marker_folder(uid, key.marker().as_deref().unwrap_or(&key.name));
        if marker.join("ready").exists() {
            let there = match backing {
                Backing::Folder => is_folder(&path),
                Backing::Tmpfs => is_mount_point(&path)?,
                Backing::HugePages(size) => {
                    let is_mounted = is_mount_point(&path)?;
                    if is_mounted {
                        // Of the right size?
                        mount_huge_pages(&path, size)?;
                    }
                    is_mounted
                }
            };
            if there {
                return Ok((path, false));
            }
            remove_marker(&marker)?;
        }
        if let Some(plugin) = path.parent() {
            make_folder(plugin, 0o755)?;
        }
        let is_new = !is_folder(&path);
        make_folder(&path, 0o777)?;
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
            tracing::warn!(uid, volume = key.name, %error, "cannot give the volume to the pod's group");
        }
        make_marker(&marker)?;
        Ok((path, is_new))
    }

    /// Unmounts the parts of volumes that containers of the pod mount.
    pub(crate) fn remove_subpaths(&self, uid: &str) -> Result<(), StoreError> {
        Ok(subpath::remove(&self.pod_folder(uid), None)?)
    }

    /// Unmounts and removes a volume with its content. Missing is fine.
    pub(crate) fn tear_down(&self, uid: &str, key: &VolumeKey) -> Result<(), StoreError> {
        subpath::remove(&self.pod_folder(uid), Some(&key.name))?;
        let path = self.volume_path(uid, key);
        let Some(marker) = key.marker() else { return remove_foreign(&path, key) };
        remove_marker(&self.marker_folder(uid, &marker))?;
        unmount_memory(&path)?;
        let above = path.parent().unwrap_or(&self.root);
        remove_tree(above, &key.name)?;
        Ok(())
    }

    /// Removes what is left of a pod's folder once no volume is in it (volumes.md §3.17).
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
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(io_error("read", &folder, source)),
        };
        for entry in entries {
            let entry = entry.map_err(|source| io_error("read", &folder, source))?;
            let name = entry.file_name();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            match name.to_str() {
                // It came back: somebody mounts while we remove.
                Some("volumes") => {}
                Some(name) if is_folder => remove_tree(&folder, name)?,
                _ => gone(fs::remove_file(entry.path()))
                    .map_err(|source| io_error("remove", &entry.path(), source))?,
            }
        }
        remove_empty(&folder)
    }
}

/// What an emptyDir of a pod lies in.
fn backing(medium: &Medium, desire: &PodDesire) -> Result<Backing, StoreError> {
    match medium {
        Medium::Disk => Ok(Backing::Folder),
        Medium::Memory => Ok(Backing::Tmpfs),
        Medium::HugePages(size) => Ok(Backing::HugePages(hugepages::page_size(size, &desire.huge_pages)?)),
        Medium::Unknown(medium) => Err(StoreError::Medium { medium: medium.clone() }),
    }
}

fn io_error(act: &'static str, path: &Path, source: io::Error) -> StoreError {
    StoreError::Io { act, path: path.to_owned(), source }
}

/// Missing is as good as removed.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn remove_empty(path: &Path) -> Result<(), StoreError> {
    gone(fs::remove_dir(path)).map_err(|source| io_error("remove", path, source))
}

fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn set_mode(path: &Path, mode: u32) -> Result<(), StoreError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|source| io_error("set the mode of", path, source))
}

/// Makes one folder with exactly this mode, whatever the umask; one that exists keeps its own.
fn make_folder(path: &Path, mode: u32) -> Result<(), StoreError> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => set_mode(path, mode),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(source) => Err(io_error("make", path, source)),
    }
}

fn make_marker(folder: &Path) -> Result<(), StoreError> {
    if let Some(plugin) = folder.parent() {
        make_folder(plugin, FOLDER_MODE)?;
    }
    make_folder(folder, FOLDER_MODE)?;
    let file = folder.join("ready");
    fs::File::create(&file).map(drop).map_err(|source| io_error("make", &file, source))
}

fn remove_marker(folder: &Path) -> Result<(), StoreError> {
    let file = folder.join("ready");
    gone(fs::remove_file(&file)).map_err(|source| io_error("remove", &file, source))?;
    remove_empty(folder)
}

/// A plugin of somebody else: its folder goes only when it is empty and nothing is mounted there. mountinfo is
/// read instead of the folder, which may hang.
fn remove_foreign(path: &Path, key: &VolumeKey) -> Result<(), StoreError> {
    let mounted = read_mounts()?.iter().any(|m| m.point.starts_with(path));
    if !mounted && gone(fs::remove_dir(path)).is_ok() {
        return Ok(());
    }
    let plugin = keelson_volume_manager_core::names::unescape(&key.plugin);
    Err(StoreError::ForeignPlugin { path: path.to_owned(), plugin })
}

/// The names of the folders in `path`; a missing one has none.
fn folders_in(path: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(io_error("read", path, source)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| io_error("read", path, source))?;
        // From the directory entry itself, without touching what may be mounted there.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(name) = entry.file_name().to_str().filter(|name| is_folder && is_one_component(name)) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn check_host_path(path: &str, kind: &str) -> Result<(), StoreError> {
    if hostpath::begin(path, kind)? == Act::Take {
        return Ok(());
    }
    match hostpath::check(path, kind, look_at(Path::new(path))?)? {
        Verdict::Good => return Ok(()),
        Verdict::MakeDirectory => fs::DirBuilder::new().recursive(true).mode(0o755).create(path),
        Verdict::MakeFile => {
            match fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other.map(drop),
            }
        }
    }
    .map_err(|source| io_error("make", Path::new(path), source))?;
    hostpath::check(path, kind, look_at(Path::new(path))?)?;
    Ok(())
}

fn look_at(path: &Path) -> Result<Found, StoreError> {
    let kind = match fs::metadata(path) {
        Ok(meta) => meta.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(source) => return Err(io_error("look at", path, source)),
    };
    Ok(if kind.is_dir() {
        Found::Directory
    } else if kind.is_file() {
        Found::File
    } else if kind.is_socket() {
        Found::Socket
    } else if kind.is_char_device() {
        Found::CharDevice
    } else if kind.is_block_device() {
        Found::BlockDevice
    } else {
        Found::Other
    })
}
