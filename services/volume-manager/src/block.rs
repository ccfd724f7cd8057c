//! Volumes of the mode `Block`: the part of their mapping that all plugins have in common (volumes.md §3.10).
//!
//! | path | is |
//! |---|---|
//! | `<global map path>/<pod UID>` | a bind mount of the device |
//! | `pods/<uid>/volumeDevices/<escaped plugin>/<inner name>` | a link to the device, which containers get |
//! | `/dev/loop<n>` | a loop device over the bind mount. It locks the device: the kernel does not give its name to another one |

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_volume_manager_core::hostpath::FileKind;
use keelson_volume_manager_core::names;
use keelson_volume_manager_core::world::FailureClass;

use crate::mounter::{self, FileFacts, Mounter};
use crate::plugins::{PluginError, VolumePlace};

/// The mode of folders (volumes.md §2).
const FOLDER_MODE: u32 = 0o750;
/// The mode of the file on which the device is bind-mounted.
const FILE_MODE: u32 = 0o640;
/// The deadline of losetup(8).
const LOSETUP_DEADLINE: Duration = Duration::from_secs(30);
/// How often to look whether a loop device is detached, and the time between.
const DETACH_ATTEMPTS: usize = 40;
const DETACH_PAUSE: Duration = Duration::from_millis(50);
/// Where the kernel shows loop devices.
const SYS_BLOCK: &str = "/sys/block";
/// Creates loop devices.
const LOOP_CONTROL: &str = "/dev/loop-control";
/// What the kernel appends to the path of a backing file that was removed.
const DELETED: &str = " (deleted)";

/// Where a device is mapped for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockPlace {
    /// The bind mount of the device: `<global map path>/<pod UID>`.
    pub(crate) global: PathBuf,
    /// The link that containers get.
    pub(crate) link: PathBuf,
}

impl BlockPlace {
    /// The place of a volume. `root` is the agent's root folder, `global_map_path` the plugin's folder of the volume.
    pub(crate) fn new(root: &Path, global_map_path: &Path, place: &VolumePlace) -> Self {
        Self { global: global_map_path.join(place.pod.as_str()), link: link_of(root, place) }
    }

    /// The place of a volume whose plugin does not know the folder any more: found by the pod's link and the mounts of the
    /// node. `None`: the volume is not mapped for the pod.
    pub(crate) async fn find(
        mounter: &Mounter,
        root: &Path,
        place: &VolumePlace,
    ) -> Result<Option<Self>, PluginError> {
        let link = link_of(root, place);
        let shown = link.display();
        let path = link.clone();
        let exists = blocking(move || match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.map(|_| true),
        });
        if !exists.await.map_err(|error| PluginError::new(format!("cannot look at {shown}: {error}")))? {
            return Ok(None);
        }
        let device = mounter.inspect(&link).await?;
        for global in mounter.mounts_with_name(&root.join("plugins"), place.pod.as_str()).await? {
            let mapped = mounter.inspect(&global).await?;
            let is_block = |facts: &FileFacts| facts.kind() == FileKind::BlockDevice;
            let pair = device.as_ref().zip(mapped.as_ref().filter(|mapped| is_block(mapped)));
            if pair.is_some_and(|(device, mapped)| device.device == mapped.device) {
                return Ok(Some(Self { global, link }));
            }
        }
        let message = format!(
            "cannot find where the device of the block volume {} is mapped for the pod {}; unmount its device below {}, \
             then remove the link {shown}",
            place.inner_name,
            place.pod,
            root.join("plugins").display(),
        );
        Err(PluginError::new(message).for_you())
    }
}

/// The link that containers of a pod get.
fn link_of(root: &Path, place: &VolumePlace) -> PathBuf {
    let folder = root.join("pods").join(place.pod.as_str()).join("volumeDevices");
    folder.join(names::escape(&place.plugin)).join(&place.inner_name)
}

/// Maps `device` for a pod. Returns the link that containers get. May be repeated.
///
/// # Errors
/// The device is missing or no block device, or the node has no loop devices. Something may be mapped after each error.
pub(crate) async fn map(
    mounter: &Mounter,
    place: &BlockPlace,
    device: &Path,
) -> Result<PathBuf, PluginError> {
    map_steps(mounter, place, device).await.map_err(|error| error.of_class(FailureClass::Uncertain))?;
    Ok(place.link.clone())
}

async fn map_steps(mounter: &Mounter, place: &BlockPlace, device: &Path) -> Result<(), PluginError> {
    let shown = device.display();
    let facts = mounter.inspect(device).await?;
    let Some(facts) = facts else {
        return Err(PluginError::new(format!(
            "the device {shown} of the volume does not exist on this node"
        )));
    };
    if facts.kind() != FileKind::BlockDevice {
        return Err(
            PluginError::new(format!("{shown} is not a block device, so it cannot be mapped")).for_you()
        );
    }
    bind_device(mounter, &place.global, &facts.path, facts.device).await?;
    let (link, target) = (place.link.clone(), facts.path);
    blocking(move || point_link(&link, &target)).await.map_err(|error| {
        PluginError::new(format!("cannot create the link {}: {error}", place.link.display()))
    })?;
    lock_device(mounter, &place.global).await.map(drop)
}

/// Bind-mounts the device on a file, unless it is there already.
async fn bind_device(
    mounter: &Mounter,
    target: &Path,
    device: &Path,
    number: u64,
) -> Result<(), PluginError> {
    let existing = mounter.inspect(target).await?;
    match existing {
        Some(existing) if existing.kind() == FileKind::BlockDevice && existing.device == number => {
            return Ok(());
        }
        Some(existing) if existing.kind() == FileKind::BlockDevice => {
            // The volume was attached again under another number.
            unlock_device(mounter, target).await?;
            mounter.unmount(target, false).await?;
        }
        Some(_) | None => {}
    }
    if let Some(folder) = target.parent() {
        mounter.create_folders(folder, FOLDER_MODE).await?;
    }
    mounter.create_file(target, FILE_MODE).await?;
    mounter.bind(device, target, &[]).await
}

/// Creates or replaces the link.
fn point_link(link: &Path, target: &Path) -> io::Result<()> {
    match fs::read_link(link) {
        Ok(old) if old == target => return Ok(()),
        Ok(_) => fs::remove_file(link)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // Another kind of file is not ours to remove.
        Err(error) => return Err(error),
    }
    if let Some(folder) = link.parent() {
        fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)?;
    }
    std::os::unix::fs::symlink(target, link)
}

/// Attaches a loop device to the bind mount, unless one is there already.
async fn lock_device(mounter: &Mounter, global: &Path) -> Result<PathBuf, PluginError> {
    if let Some(existing) = find_lock(global).await? {
        return Ok(existing);
    }
    let has_loop = blocking(|| Ok(Path::new(LOOP_CONTROL).exists())).await.unwrap_or(false);
    if !has_loop {
        let message = format!(
            "cannot lock the device of a block volume: this node has no {LOOP_CONTROL}; load the kernel module loop"
        );
        return Err(PluginError::new(message).for_you());
    }
    let arguments = ["-f", "--show", text(global)?];
    let output = mounter.run("losetup", &arguments, LOSETUP_DEADLINE).await?;
    let made = output.stdout.trim();
    if output.is_success() && !made.is_empty() {
        return Ok(PathBuf::from(made));
    }
    let (path, why) = (global.display(), output.text());
    Err(PluginError::new(format!("cannot lock the device {path} with a loop device: losetup: {why}")))
}

/// Detaches the loop device, if there is one.
async fn unlock_device(mounter: &Mounter, global: &Path) -> Result<(), PluginError> {
    let Some(device) = find_lock(global).await? else { return Ok(()) };
    let output = mounter.run("losetup", &["-d", text(&device)?], LOSETUP_DEADLINE).await?;
    // While another process has the loop device open, it is detached only when that closes it.
    for _ in 0..DETACH_ATTEMPTS {
        if find_lock(global).await?.is_none() {
            return Ok(());
        }
        tokio::time::sleep(DETACH_PAUSE).await;
    }
    let (path, why) = (device.display(), output.text());
    Err(PluginError::new(format!("cannot detach the loop device {path}: losetup: {why}")))
}

/// The loop device over `global`.
async fn find_lock(global: &Path) -> Result<Option<PathBuf>, PluginError> {
    // The kernel shows the path without links.
    let global = global.to_owned();
    let found = blocking(move || {
        let real = match (global.parent(), global.file_name()) {
            (Some(parent), Some(name)) => {
                parent.canonicalize().map_or_else(|_| global.clone(), |parent| parent.join(name))
            }
            _ => global,
        };
        find_loop(Path::new(SYS_BLOCK), &real)
    });
    found
        .await
        .map_err(|error| PluginError::new(format!("cannot read the loop devices of the node: {error}")))
}

fn find_loop(sys_block: &Path, backing: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(sys_block)? {
        let name = entry?.file_name();
        if !name.as_bytes().starts_with(b"loop") {
            continue;
        }
        // A loop device without a backing file, or one that is detached just now, has no such file.
        let Ok(shown) = fs::read(sys_block.join(&name).join("loop/backing_file")) else { continue };
        let shown = shown.strip_suffix(b"\n").unwrap_or(&shown);
        let shown = shown.strip_suffix(DELETED.as_bytes()).unwrap_or(shown);
        if shown == backing.as_os_str().as_bytes() {
            return Ok(Some(Path::new("/dev").join(name)));
        }
    }
    Ok(None)
}

/// Undoes [`map`]. What is missing is no error.
pub(crate) async fn unmap(mounter: &Mounter, place: &BlockPlace) -> Result<(), PluginError> {
    unlock_device(mounter, &place.global).await?;
    remove_file(&place.link).await?;
    // The kernel lets go of the device a moment after the loop device is detached.
    if mounter.unmount(&place.global, false).await.is_err() {
        tokio::time::sleep(DETACH_PAUSE).await;
        mounter.unmount(&place.global, false).await?;
    }
    remove_file(&place.global).await
}

/// Removes the folder with the bind mounts of a volume, after its last pod. A missing folder is no error.
///
/// # Errors
/// A pod still has the device.
pub(crate) async fn remove_global_map(global_map_path: &Path) -> Result<(), PluginError> {
    let folder = global_map_path.to_owned();
    let shown = global_map_path.display();
    let removed = blocking(move || {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            // Of the path: the folder itself shows the type of the file below the mount.
            let meta = fs::symlink_metadata(entry.path())?;
            if meta.file_type().is_block_device() {
                return Ok(Some(entry.file_name()));
            }
            // A file of a mapping that was interrupted. Anything else keeps the folder from being removed.
            if meta.is_file() && meta.len() == 0 {
                fs::remove_file(entry.path())?;
            }
        }
        fs::remove_dir(&folder).map(|()| None)
    });
    match removed.await {
        Ok(None) => Ok(()),
        Ok(Some(pod)) => {
            let pod = pod.to_string_lossy();
            let message =
                format!("the device in {shown} is still referenced by the pod {pod}; it is unmapped first");
            Err(PluginError::new(message))
        }
        Err(error) => Err(PluginError::new(format!("cannot remove the folder {shown}: {error}"))),
    }
}

async fn remove_file(path: &Path) -> Result<(), PluginError> {
    let file = path.to_owned();
    match blocking(move || fs::remove_file(file)).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(PluginError::new(format!("cannot remove {}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    mounter::blocking(work).await.map_err(io::Error::from)
}

fn text(path: &Path) -> Result<&str, PluginError> {
    path.to_str()
        .ok_or_else(|| PluginError::new(format!("the path {} is not UTF-8", path.display())).for_you())
}

#[cfg(test)]
mod tests;
