//! Looking at and reading manifest files. Everything here may block and belongs on a thread that may wait.

use std::collections::BTreeMap;
use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use keelson_pod_config_core::manifest::MAX_BYTES;
use keelson_pod_config_core::scan::{Listing, Stamp, is_ignored};
use keelson_service_kit::writable_by_others;

/// Bytes that one call of [`read_all`] holds at most, a file more or less.
const READ_AT_ONCE: usize = 8 * 1024 * 1024;

/// What reading a file came to.
#[derive(Debug)]
pub enum Reading {
    /// The bytes, up to the limit, and the version that they are of.
    Bytes(Vec<u8>, Stamp),
    /// There is no file any more, or it is no regular one.
    Gone,
    /// The file is there but cannot be read.
    Failed(io::Error),
}

/// Looks at the path of a source: a folder or one file.
pub fn list(path: &Path) -> Listing {
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Listing::Missing,
        Err(error) => Listing::Unreadable(trouble(path, &error)),
        Ok(found) if found.is_dir() => list_folder(path).unwrap_or_else(|error| {
            if error.kind() == ErrorKind::NotFound {
                Listing::Missing
            } else {
                Listing::Unreadable(trouble(path, &error))
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

fn trouble(path: &Path, error: &io::Error) -> String {
    let way_out = match error.kind() {
        ErrorKind::PermissionDenied => {
            "; let the user of keelson-pod-config read it, or give the service CAP_DAC_READ_SEARCH"
        }
        ErrorKind::NotADirectory => "; a part of the path is a file, correct staticPodPath",
        _ => "",
    };
    format!("cannot read {}: {error}{way_out}; its pods stay as they are", path.display())
}

fn list_folder(path: &Path) -> io::Result<Listing> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let full = entry.path();
        let (Some(text), Some(name)) = (full.to_str(), full.file_name().and_then(|n| n.to_str())) else {
            tracing::debug!(file = %full.display(), "skipped: the name is not UTF-8");
            continue;
        };
        if is_ignored(name) {
            tracing::debug!(file = text, "skipped: an editor's file or a hidden one");
            continue;
        }
        match fs::metadata(&full) {
            Ok(found) if found.is_file() => {
                files.insert(text.to_owned(), stamp(&found));
            }
            Ok(_) => tracing::debug!(file = text, "skipped: not a regular file"),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // Reading it will say what is wrong.
            Err(_) => {
                files.insert(text.to_owned(), Stamp::default());
            }
        }
    }
    Ok(Listing::Files(files))
}

/// What of the path and of what [`list`] has found there others than root and this process may write: whoever can is root on the
/// node, by way of a pod.
pub fn of_others(path: &Path, listing: &Listing) -> Vec<String> {
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
        Ok(None) => Reading::Gone,
        Err(error) if error.kind() == ErrorKind::NotFound => Reading::Gone,
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
    let mut bytes = Vec::with_capacity(usize::try_from(found.len()).unwrap_or(0).min(MAX_BYTES));
    file.take(MAX_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(Some((bytes, stamp(&found))))
}

/// Reads files one after the other until enough is held; the rest of the list comes back.
pub fn read_all(mut paths: Vec<String>) -> (Vec<(String, Reading)>, Vec<String>) {
    let mut held = 0;
    let mut done = Vec::new();
    paths.reverse();
    while held < READ_AT_ONCE
        && let Some(path) = paths.pop()
    {
        let reading = read(Path::new(&path));
        if let Reading::Bytes(bytes, _) = &reading {
            held += bytes.len();
        }
        done.push((path, reading));
    }
    paths.reverse();
    (done, paths)
}

/// Whether a file that has just come into being is whole already: a link, of which nobody will say that it was
/// closed.
pub fn came_whole(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.is_symlink() || (m.is_file() && m.nlink() > 1))
}

/// The version of the regular file at the path; `None` when there is none or nobody can say.
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
    fn the_folder_and_each_manifest_are_looked_at_and_nothing_else() {
        let of_others = |path: &Path| of_others(path, &list(path));
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
        assert_eq!(of_others(dir.path()), Vec::<String>::new());
        assert_eq!(of_others(&good), Vec::<String>::new());
        assert_eq!(of_others(&dir.path().join("none")), Vec::<String>::new());
        let open = file("open.yaml", 0o666);
        set(dir.path(), 0o777);
        let found = of_others(dir.path());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("mode 0777") && found[1].contains("open.yaml"), "{found:?}");
        assert_eq!(of_others(&open).len(), 1, "a single manifest is named once");
    }
}
