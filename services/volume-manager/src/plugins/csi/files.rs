//! The files and folders of CSI volumes on disk, apart from what drivers mount there.
//!
//! Nothing here enters a filesystem that a driver has mounted: folders are listed from outside, and a mount point is only
//! ever compared with mountinfo.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use keelson_files::{Replacement, remove_if_exists};
use keelson_volume_manager_core::csi::vol_data::{self, SavedVolume};
use keelson_volume_manager_core::world::FailureClass;

use crate::plugins::PluginError;
use crate::plugins::host::{self, Mounts, is_mount_point};
use crate::remove::remove_tree;

/// The mode of folders (volumes.md §2).
const FOLDER_MODE: u32 = 0o750;
/// The mode of a data file, which contains no secrets.
const DATA_MODE: u32 = 0o640;
/// No data file is longer; more bytes count as a file that is not JSON.
const MAX_DATA_BYTES: u64 = 1 << 20;

/// What a data file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Data {
    /// It does not exist.
    Missing,
    /// It does not say which driver unmounts which volume.
    Unreadable(vol_data::DataError),
    /// It is complete.
    Saved(SavedVolume),
}

/// Runs work that may block, on the entry of a folder or on the folder at `path`. While earlier work for the same volume hangs,
/// it is refused. `what` completes the sentence "cannot …".
async fn blocking<T: Send + 'static>(
    path: &Path,
    what: String,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PluginError> {
    host::blocking_for(volume_folder(path), &what, work).await
}

/// The folder of the volume that a path belongs to, in a pod or in the folder of a driver; any other path itself.
fn volume_folder(path: &Path) -> &Path {
    let is_named =
        |path: Option<&Path>, name: &str| path.and_then(Path::file_name).is_some_and(|last| last == name);
    let is_volume = |folder: &&Path| {
        let above = |levels| folder.ancestors().nth(levels);
        let is_of_driver =
            |levels| is_named(above(levels), "csi") && is_named(above(levels + 1), "kubernetes.io");
        let is_block_part = is_named(above(1), "staging") || is_named(above(1), "publish");
        is_named(above(1), "kubernetes.io~csi")
            || is_of_driver(3) && is_named(above(2), "volumeDevices") && is_block_part
            || is_of_driver(2)
    };
    path.ancestors().find(is_volume).unwrap_or(path)
}

/// Creates a folder and those above it, each with the mode 0750. Existing ones stay as they are.
pub(super) async fn create_folder(path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    blocking(path, format!("create the folder {}", path.display()), move || create_folders(&folder)).await
}

fn create_folders(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        // Regardless of the umask.
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(FOLDER_MODE)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().ok_or(error)?;
            create_folders(parent)?;
            create_folders(path)
        }
        Err(error) => Err(error),
    }
}

/// Creates the folder that a driver stages a volume in. Something else at its path is an error.
pub(super) async fn create_staging(mounts: &Arc<dyn Mounts>, path: &Path) -> Result<(), PluginError> {
    create_folder(path).await?;
    // What is mounted there is a folder, and may hang.
    if is_mount_point(mounts, path).await? {
        return Ok(());
    }
    let folder = path.to_owned();
    let what = format!("look at {}", path.display());
    if blocking(path, what, move || fs::symlink_metadata(&folder)).await?.is_dir() {
        return Ok(());
    }
    Err(PluginError::new(format!("{} is not a folder; remove it", path.display())).for_you())
}

/// Writes a data file and creates its folder. A file with the same content is left alone.
pub(super) async fn write_data(path: &Path, bytes: Vec<u8>) -> Result<(), PluginError> {
    let file = path.to_owned();
    blocking(path, format!("write {}", path.display()), move || {
        let folder = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
        create_folders(folder)?;
        Replacement::new().mode(DATA_MODE).durable().write_if_changed(&file, &bytes).map(drop)
    })
    .await
}

/// Reads a data file.
pub(super) async fn read_data(path: &Path) -> Result<Data, PluginError> {
    let file = path.to_owned();
    let bytes = blocking(path, format!("read {}", path.display()), move || {
        let opened = match fs::File::open(&file) {
            // The name of a folder above it may be a file.
            Err(error) if is_missing(&error) => return Ok(None),
            other => other?,
        };
        let mut bytes = Vec::new();
        opened.take(MAX_DATA_BYTES).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    })
    .await?;
    Ok(match bytes {
        None => Data::Missing,
        Some(bytes) => match vol_data::read(&path.display().to_string(), &bytes) {
            Ok(saved) => Data::Saved(saved),
            Err(error) => Data::Unreadable(error),
        },
    })
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Whether a folder has an entry with this path. What is mounted on the entry is not touched.
pub(super) async fn exists(path: &Path) -> Result<bool, PluginError> {
    let entry = path.to_owned();
    blocking(path, format!("look for {}", path.display()), move || {
        let (Some(folder), Some(name)) = (entry.parent(), entry.file_name()) else { return Ok(false) };
        Ok(list(folder)?.iter().any(|found| found.as_os_str() == name))
    })
    .await
}

/// The names of the entries of a folder, sorted; none if it does not exist.
pub(super) async fn entries(folder: &Path) -> Result<Vec<PathBuf>, PluginError> {
    let path = folder.to_owned();
    blocking(folder, format!("list {}", folder.display()), move || list(&path)).await
}

fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if is_missing(&error) => return Ok(Vec::new()),
        other => other?,
    };
    let mut names: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.file_name().into())).collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// Removes an empty folder, or a file. A missing one is no error. What is mounted on it is not touched: the kernel refuses.
fn remove_entry(path: &Path) -> io::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => remove_if_exists(path),
        other => other,
    }
}

/// Removes the empty folder or the file that a driver has used as a mount point. An error if it is still one.
pub(super) async fn remove_target(mounts: &Arc<dyn Mounts>, path: &Path) -> Result<(), PluginError> {
    if is_mount_point(mounts, path).await? {
        let text = format!(
            "the driver has reported success, but {} is still mounted; check the driver's log, or unmount it by hand",
            path.display()
        );
        return Err(PluginError::new(text).of_class(FailureClass::Uncertain));
    }
    let target = path.to_owned();
    blocking(path, format!("remove {}", path.display()), move || remove_entry(&target)).await
}

/// Removes a data file and its empty folder.
pub(super) async fn remove_data(data_file: &Path) -> Result<(), PluginError> {
    let file = data_file.to_owned();
    blocking(data_file, format!("remove {} with its folder", data_file.display()), move || {
        // With what a killed writer has left: the folder has to be empty.
        Replacement::new().remove(&file)?;
        file.parent().map_or(Ok(()), remove_entry)
    })
    .await
}

/// Removes what a service that was killed before it had written the data file has left of a staged volume: the folder, in it
/// the empty `staging` folder and the temporary file of the data file. No driver was called, so nothing is in use. Anything
/// else stays: only empty folders are removed, and the kernel refuses one on which something is mounted. Whether the folder
/// is gone.
///
/// # Errors
/// A folder cannot be listed or removed.
pub(super) async fn remove_unstaged(data_file: &Path, staging: &Path) -> Result<bool, PluginError> {
    let (file, staging) = (data_file.to_owned(), staging.to_owned());
    let what = format!("remove what is left around {}", staging.display());
    blocking(data_file, what, move || {
        let folder = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let temporary = file.with_extension("json.new");
        if list(folder)?.iter().map(|name| folder.join(name)).any(|path| path != staging && path != temporary)
        {
            return Ok(false);
        }
        match fs::remove_dir(&staging) {
            // Foreign content, a mount, or a file in place of the folder.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty
                        | io::ErrorKind::ResourceBusy
                        | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(false);
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        remove_if_exists(&temporary)?;
        remove_entry(folder).map(|()| true)
    })
    .await
}

/// Removes an empty folder; one with content stays.
pub(super) async fn remove_if_empty(path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    blocking(path, format!("remove {}", path.display()), move || match remove_entry(&folder) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        other => other,
    })
    .await
}

/// Removes a folder with its content, but nothing of another filesystem.
pub(super) async fn remove_folder(path: &Path) -> Result<(), PluginError> {
    let folder = path.to_owned();
    blocking(path, format!("remove {}", path.display()), move || {
        let (Some(parent), Some(name)) = (folder.parent(), folder.file_name().and_then(|name| name.to_str()))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        remove_tree(parent, name)
            .map_err(|error| io::Error::other(keelson_service_kit::status::chain(&error)))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::mounter::DEADLINE;

    #[test]
    fn the_folder_of_a_volume_is_that_in_the_pod_or_of_the_driver() {
        for (path, folder) in [
            ("/r/pods/u/volumes/kubernetes.io~csi/pv/mount", "/r/pods/u/volumes/kubernetes.io~csi/pv"),
            (
                "/r/pods/u/volumes/kubernetes.io~csi/pv/vol_data.json",
                "/r/pods/u/volumes/kubernetes.io~csi/pv",
            ),
            ("/r/pods/u/volumeDevices/kubernetes.io~csi/pv", "/r/pods/u/volumeDevices/kubernetes.io~csi/pv"),
            ("/r/plugins/kubernetes.io/csi/d/hash/globalmount", "/r/plugins/kubernetes.io/csi/d/hash"),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/pv/data/vol_data.json",
                "/r/plugins/kubernetes.io/csi/volumeDevices/pv",
            ),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/staging/pv",
                "/r/plugins/kubernetes.io/csi/volumeDevices/staging/pv",
            ),
            (
                "/r/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u",
                "/r/plugins/kubernetes.io/csi/volumeDevices/publish/pv",
            ),
            ("/r/plugins/kubernetes.io/csi/d", "/r/plugins/kubernetes.io/csi/d"),
            ("/r/other", "/r/other"),
        ] {
            assert_eq!(volume_folder(Path::new(path)), Path::new(folder), "{path}");
        }
    }

    /// The result of work that waits until the deadline. The clock does not run by itself while a thread works.
    async fn after<T>(work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        assert!(futures_util::poll!(&mut work).is_pending());
        tokio::time::advance(DEADLINE).await;
        work.await
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_whose_files_hang_is_refused_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| dir.path().join("kubernetes.io~csi").join(name);
        let (hanging, healthy) = (of("a"), of("b"));
        let (_end, ended) = channel::<()>();
        let work = move || ended.recv().map_err(io::Error::other);
        let mount = hanging.join("mount");
        let hung = after(blocking(&mount, "look at it".to_owned(), work)).await.unwrap_err();
        assert_eq!(hung.class, FailureClass::Uncertain);
        assert_eq!(hung.to_string(), "cannot look at it: the node has not answered within 120 s");
        let text = after(read_data(&hanging.join("vol_data.json"))).await.unwrap_err().to_string();
        assert!(text.contains("the earlier attempt to look at it has not ended for"), "{text}");
        assert!(create_folder(&healthy).await.is_ok());
    }
}
