//! Folders with exact modes, and the markers of volumes that are set up.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;

use keelson_files::remove_if_exists;
use keelson_volume_manager_core::names::is_path_component;

use super::error::{StoreError, io_error};

/// The mode of the agent's and the pods' folders (volumes.md §2).
pub(super) const FOLDER_MODE: u32 = 0o750;

/// Treats a missing file as removed.
pub(super) fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes a folder if it exists; one that is not empty is an error.
pub(super) fn remove_empty(path: &Path) -> Result<(), StoreError> {
    ignore_not_found(fs::remove_dir(path)).map_err(|source| io_error("remove", path, source))
}

/// Whether there is a folder; a link to one does not count.
pub(super) fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

pub(super) fn set_mode(path: &Path, mode: u32) -> Result<(), StoreError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|source| io_error("set the mode of", path, source))
}

/// Creates one folder with exactly this mode, regardless of the umask. An existing folder keeps its mode; another kind of file at
/// its path is an error.
pub(super) fn create_folder(path: &Path, mode: u32) -> Result<(), StoreError> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => set_mode(path, mode),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(source) => Err(io_error("create", path, source)),
    }
}

/// The names of the folders in `path`; none if `path` is missing.
pub(super) fn folders_in(path: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(io_error("read", path, source)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| io_error("read", path, source))?;
        // From the directory entry, without access to a file system that may be mounted there.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(name) = entry.file_name().to_str().filter(|name| is_folder && is_path_component(name)) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Creates the marker that says that a volume is completely set up (volumes.md §10.1): an empty file in `folder`.
pub(super) fn create_marker(folder: &Path) -> Result<(), StoreError> {
    if let Some(plugin) = folder.parent() {
        create_folder(plugin, FOLDER_MODE)?;
    }
    create_folder(folder, FOLDER_MODE)?;
    let file = folder.join("ready");
    fs::File::create(&file).map(drop).map_err(|source| io_error("create", &file, source))
}

/// Removes the marker and its folder.
pub(super) fn remove_marker(folder: &Path) -> Result<(), StoreError> {
    let file = folder.join("ready");
    remove_if_exists(&file).map_err(|source| io_error("remove", &file, source))?;
    remove_empty(folder)
}
