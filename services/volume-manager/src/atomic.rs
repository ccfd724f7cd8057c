//! Writes the files of a volume atomically: a reader sees either all old files or all new files (volumes.md §9.2). All
//! functions block. A volume must not be written concurrently.
//!
//! The volume contains `..<time>.<number>`, a folder with the files; `..data`, a link to that folder, replaced by
//! rename; and for each name that users see a link `<name> -> ..data/<name>`.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use keelson_files::remove_if_exists;
use keelson_kube_model::time::format_seconds;
use keelson_volume_manager_core::payload::{File, Payload};
use rustix::fs::OFlags;
use zeroize::Zeroizing;

use crate::fsgroup::{self, Access, FsGroup};
use crate::mounts::{MountError, read_mounts};
use crate::remove::{RemoveError, remove_tree};
use crate::subpath::{is_bound_from, lock_of};

/// The link to the current files.
const DATA: &str = "..data";
/// The new link, before it is renamed to `..data`.
const DATA_TMP: &str = "..data_tmp";
/// The mode of folders in a volume.
const FOLDER_MODE: u32 = 0o755;
/// The number of names that are tried for a new folder.
const NAMES: i64 = 1000;

/// Why the files of a volume could not be written. The old files are still in place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// A system call has failed.
    #[error("cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    /// Old files could not be removed.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The mounts, and so the folders in use, could not be read.
    #[error(transparent)]
    Mounts(#[from] MountError),
    /// Every name for a new folder is taken.
    #[error("no free name for a new folder in {}", path.display())]
    Names { path: PathBuf },
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.to_owned();
    move |source| WriteError::Io { operation, path, source }
}

/// Replaces the files in `volume` with `payload`, unless their content is equal already. `now`, in nanoseconds since
/// 1970, names the new folder; `group` is the pod's fsGroup. Returns whether new files were written.
pub(crate) fn write(
    volume: &Path,
    payload: &Payload,
    group: Option<FsGroup<'_>>,
    now: i64,
) -> Result<bool, WriteError> {
    for folder in &payload.folders {
        make_folders(volume, folder)?;
    }
    let old = present(volume)?;
    let new = match &old {
        Some(old) if is_same(&volume.join(old), payload)? => None,
        _ => Some(replace(volume, payload, group, now)?),
    };
    let data = new.as_ref().or(old.as_ref());
    tidy(volume, payload, data.map(String::as_str))?;
    Ok(new.is_some())
}

/// The folder that `..data` points to.
fn present(volume: &Path) -> Result<Option<String>, WriteError> {
    let link = volume.join(DATA);
    let target = match fs::read_link(&link) {
        Ok(target) => target,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("read the link", &link)(source)),
    };
    Ok(target.to_str().filter(|name| is_ours(name)).map(ToOwned::to_owned))
}

/// Whether a name can be one of this module's folders with files.
fn is_ours(name: &str) -> bool {
    name.starts_with("..") && name.len() > 2 && name != DATA && name != DATA_TMP && !name.contains('/')
}

/// Whether `folder` contains exactly the files of `payload`.
fn is_same(folder: &Path, payload: &Payload) -> Result<bool, WriteError> {
    let mut found = Vec::new();
    if !folder.is_dir() {
        return Ok(false);
    }
    list(folder, String::new(), &mut found)?;
    if found.len() != payload.files.len() {
        return Ok(false);
    }
    for path in &found {
        let Some(file) = payload.files.get(path) else { return Ok(false) };
        if !has_bytes(&folder.join(path), file)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the paths of everything below `folder` except folders to `found`.
fn list(folder: &Path, above: String, found: &mut Vec<String>) -> Result<(), WriteError> {
    for entry in fs::read_dir(folder).map_err(failed("read", folder))? {
        let entry = entry.map_err(failed("read", folder))?;
        let path = format!("{above}{}", entry.file_name().to_string_lossy());
        if entry.file_type().map_err(failed("stat", &entry.path()))?.is_dir() {
            list(&entry.path(), format!("{path}/"), found)?;
        } else {
            found.push(path);
        }
    }
    Ok(())
}

fn has_bytes(path: &Path, file: &File) -> Result<bool, WriteError> {
    let meta = fs::symlink_metadata(path).map_err(failed("stat", path))?;
    if !meta.is_file() || meta.len() != file.bytes.len() as u64 {
        return Ok(false);
    }
    // It may be a private key. Its buffer has the right length at once, so that no copy of a part is left behind.
    let mut present = Zeroizing::new(Vec::with_capacity(file.bytes.len() + 1));
    let opened = fs::File::open(path).map_err(failed("open", path))?;
    opened.take(file.bytes.len() as u64 + 1).read_to_end(&mut present).map_err(failed("read", path))?;
    Ok(**present == *file.bytes)
}

/// Writes a new folder and points `..data` to it. Returns the folder's name.
fn replace(
    volume: &Path,
    payload: &Payload,
    group: Option<FsGroup<'_>>,
    now: i64,
) -> Result<String, WriteError> {
    let name = new_folder(volume, now)?;
    let result = fill(&volume.join(&name), payload).and_then(|()| {
        if let Some(group) = group {
            fsgroup::apply(volume, group, Access::ReadOnly)
                .map_err(failed("apply the pod's fsGroup to", volume))?;
        }
        let (link, data) = (volume.join(DATA_TMP), volume.join(DATA));
        remove_file(&link)?;
        symlink(&name, &link).map_err(failed("create the link", &link))?;
        fs::rename(&link, &data).map_err(failed("replace the link", &data))
    });
    if let Err(error) = result {
        // Remove the incomplete folder. If that fails, too, the next write removes it.
        let _ = remove_tree(volume, &name);
        let _ = remove_file(&volume.join(DATA_TMP));
        return Err(error);
    }
    Ok(name)
}

fn new_folder(volume: &Path, now: i64) -> Result<String, WriteError> {
    const SECOND: i64 = 1_000_000_000;
    let stamp: String = format_seconds(now.div_euclid(SECOND))
        .unwrap_or_else(|_| "1970-01-01T00:00:00Z".to_owned())
        .trim_end_matches('Z')
        .chars()
        .map(|c| if c.is_ascii_digit() { c } else { '_' })
        .collect();
    for number in 0..NAMES {
        let name = format!("..{stamp}.{}", now.rem_euclid(SECOND) + number);
        let path = volume.join(&name);
        match fs::DirBuilder::new().mode(FOLDER_MODE).create(&path) {
            Ok(()) => {
                set_mode(&path, FOLDER_MODE)?;
                return Ok(name);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed("create", &path)(source)),
        }
    }
    Err(WriteError::Names { path: volume.to_owned() })
}

fn fill(folder: &Path, payload: &Payload) -> Result<(), WriteError> {
    for (name, file) in &payload.files {
        if let Some((above, _)) = name.rsplit_once('/') {
            make_folders(folder, above)?;
        }
        let path = folder.join(name);
        let mut open = fs::OpenOptions::new();
        open.write(true).create_new(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let mut opened = open.open(&path).map_err(failed("create", &path))?;
        opened.write_all(&file.bytes).map_err(failed("write", &path))?;
        if let Some(owner) = file.owner {
            fchown(&opened, Some(owner), None).map_err(failed("set the owner of", &path))?;
        }
        opened
            .set_permissions(fs::Permissions::from_mode(file.mode))
            .map_err(failed("set the mode of", &path))?;
    }
    Ok(())
}

/// Creates the folder at a clean relative path and its parents. An existing folder keeps its mode.
fn make_folders(base: &Path, relative: &str) -> Result<(), WriteError> {
    let mut path = base.to_owned();
    for part in relative.split('/') {
        path.push(part);
        match fs::DirBuilder::new().mode(FOLDER_MODE).create(&path) {
            Ok(()) => set_mode(&path, FOLDER_MODE)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed("create", &path)(source)),
        }
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<(), WriteError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of", path))
}

fn remove_file(path: &Path) -> Result<(), WriteError> {
    remove_if_exists(path).map_err(failed("remove", path))
}

/// Creates the links that users see. Removes links of names that are gone, all folders of old files except `data`, and
/// leftovers of a killed writer. A folder stays as long as a subPath in it is bind-mounted for a container.
fn tidy(volume: &Path, payload: &Payload, data: Option<&str>) -> Result<(), WriteError> {
    let names = payload.top_names();
    for name in &names {
        let link = volume.join(name);
        match symlink(Path::new(DATA).join(name), &link) {
            Ok(()) => {}
            // An existing link, or the folder of a nested mount.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed("create the link", &link)(source)),
        }
    }
    let lock = lock_of(volume);
    let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
    let mut mounts = None;
    for entry in fs::read_dir(volume).map_err(failed("read", volume))? {
        let entry = entry.map_err(failed("read", volume))?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(failed("stat", &entry.path()))?);
        let Ok(name) = entry.file_name().into_string() else { continue };
        if kind.is_symlink() && !names.contains(name.as_str()) && name != DATA {
            let target = fs::read_link(&path).map_err(failed("read the link", &path))?;
            if name == DATA_TMP || target == Path::new(DATA).join(&name) {
                remove_file(&path)?;
            }
        } else if kind.is_dir() && is_ours(&name) && Some(name.as_str()) != data {
            let mounts = match &mut mounts {
                Some(mounts) => mounts,
                None => mounts.insert(read_mounts()?),
            };
            if !is_bound_from(mounts, &name) {
                remove_tree(volume, &name)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
