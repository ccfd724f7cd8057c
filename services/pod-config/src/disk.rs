//! Lists and reads manifest files. All functions here may block; call them on a blocking thread.

use std::collections::BTreeMap;
use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use keelson_config::MANIFEST_LIMIT;
use keelson_pod_config_core::scan::{Listing, Stamp, is_ignored};
use keelson_service_kit::writable_by_others;

/// Maximum number of bytes that [`read_batch`] holds, plus one file.
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;

/// The result of reading a file.
#[derive(Debug)]
pub enum Reading {
    /// The bytes, up to the size limit, and the version of the file.
    Bytes(Vec<u8>, Stamp),
    /// The file does not exist, or is not a regular file.
    Missing,
    /// The file exists but cannot be read.
    Failed(io::Error),
}

/// Lists the path of a source: a folder or one file.
pub fn list(path: &Path) -> Listing {
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Listing::Missing,
        Err(error) => Listing::Unreadable(path_error(path, &error)),
        Ok(found) if found.is_dir() => list_folder(path).unwrap_or_else(|error| {
            if error.kind() == ErrorKind::NotFound {
                Listing::Missing
            } else {
                Listing::Unreadable(path_error(path, &error))
            }
        }),
        Ok(found) if found.is_file() => match path.to_str() {
            Some(text) => Listing::Files(BTreeMap::from([(text.to_owned(), stamp(&found))])),
            None => Listing::Unreadable(format!("{} is not UTF-8; rename it", path.display())),
        },
        Ok(_) => Listing::Unreadable(format!(
            "{} is neither a folder nor a regular file; correct staticPodPath",
            path.display()
        )),
    }
}

fn path_error(path: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        ErrorKind::PermissionDenied => {
            "; grant read access to the user of keelson-pod-config, or CAP_DAC_READ_SEARCH to the service"
        }
        ErrorKind::NotADirectory => "; a parent of the path is a file, correct staticPodPath",
        _ => "",
    };
    format!("cannot read {}: {error}{remedy}; its pods keep running", path.display())
}

fn list_folder(path: &Path) -> io::Result<Listing> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let full = entry.path();
        let (Some(text), Some(name)) = (full.to_str(), full.file_name().and_then(|n| n.to_str())) else {
            tracing::debug!(event = "file_skipped", file = %full.display(), "skipped: the name is not UTF-8");
            continue;
        };
        if is_ignored(name) {
            tracing::debug!(
                event = "file_skipped",
                file = text,
                "skipped: a hidden file or an editor's file"
            );
            continue;
        }
        match fs::metadata(&full) {
            Ok(found) if found.is_file() => {
                files.insert(text.to_owned(), stamp(&found));
            }
            Ok(_) => tracing::debug!(event = "file_skipped", file = text, "skipped: not a regular file"),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // The error is reported when the file is read.
            Err(_) => {
                files.insert(text.to_owned(), Stamp::default());
            }
        }
    }
    Ok(Listing::Files(files))
}

/// Describes the path, and the files in its `listing`, that others than root and this process may write: anyone who can write a
/// manifest is root on the node, through a pod.
pub fn paths_writable_by_others(path: &Path, listing: &Listing) -> Vec<String> {
    let files = match listing {
        Listing::Files(files) => Some(files.keys()),
        Listing::Missing | Listing::Unreadable(_) => None,
    };
    let files = files.into_iter().flatten().map(Path::new).filter(|file| *file != path);
    [path].into_iter().chain(files).filter_map(writable_by_others).collect()
}

/// Reads one file.
pub fn read(path: &Path) -> Reading {
    match read_regular(path) {
        Ok(Some((bytes, stamp))) => Reading::Bytes(bytes, stamp),
        Ok(None) => Reading::Missing,
        Err(error) if error.kind() == ErrorKind::NotFound => Reading::Missing,
        Err(error) => Reading::Failed(error),
    }
}

fn read_regular(path: &Path) -> io::Result<Option<(Vec<u8>, Stamp)>> {
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(found.len()).unwrap_or(0).min(MANIFEST_LIMIT));
    file.take(MANIFEST_LIMIT as u64).read_to_end(&mut bytes)?;
    Ok(Some((bytes, stamp(&found))))
}

/// Reads files in order up to the batch limit. Returns the results and the paths that are left.
pub fn read_batch(mut paths: Vec<String>) -> (Vec<(String, Reading)>, Vec<String>) {
    let mut total = 0;
    let mut done = Vec::new();
    paths.reverse();
    while total < MAX_BATCH_BYTES
        && let Some(path) = paths.pop()
    {
        let reading = read(Path::new(&path));
        if let Reading::Bytes(bytes, _) = &reading {
            total += bytes.len();
        }
        done.push((path, reading));
    }
    paths.reverse();
    (done, paths)
}

/// Whether a new file is a symbolic or hard link. A link is complete at once, and no close event follows.
pub fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink() || (m.is_file() && m.nlink() > 1))
}

/// The version of the regular file at the path; `None` if there is none or it cannot be read.
pub fn stamp_of(path: &Path) -> Option<Stamp> {
    fs::metadata(path).ok().filter(Metadata::is_file).map(|found| stamp(&found))
}

fn stamp(found: &Metadata) -> Stamp {
    let nanos = |seconds: i64, nanos: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
    Stamp {
        device: found.dev(),
        inode: found.ino(),
        size: found.size(),
        modified: nanos(found.mtime(), found.mtime_nsec()),
        changed: nanos(found.ctime(), found.ctime_nsec()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn folder_and_manifests_are_checked_for_writers_and_ignored_files_are_not() {
        let paths_writable_by_others = |path: &Path| paths_writable_by_others(path, &list(path));
        let dir = tempfile::tempdir().unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let file = |name: &str, mode| {
            let path = dir.path().join(name);
            fs::write(&path, "x").unwrap();
            set(&path, mode);
            path
        };
        let good = file("good.yaml", 0o644);
        file(".hidden", 0o666);
        assert_eq!(paths_writable_by_others(dir.path()), Vec::<String>::new());
        assert_eq!(paths_writable_by_others(&good), Vec::<String>::new());
        assert_eq!(paths_writable_by_others(&dir.path().join("none")), Vec::<String>::new());
        let open = file("open.yaml", 0o666);
        set(dir.path(), 0o777);
        let found = paths_writable_by_others(dir.path());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("mode 0777") && found[1].contains("open.yaml"), "{found:?}");
        assert_eq!(paths_writable_by_others(&open).len(), 1, "a single manifest is named once");
    }
}
