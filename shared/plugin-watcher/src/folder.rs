//! The folder that plugins register in.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use inotify::{WatchMask, Watches};

/// How deep subfolders are searched.
const DEPTH: u32 = 8;
/// How many entries are looked at. A folder with more has other contents than sockets.
const ENTRIES: usize = 10_000;

/// What tells a socket from the one that replaces it at the same path: device, inode and time of creation. The number of an
/// inode alone may be reused at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketId {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl SocketId {
    fn of(metadata: &fs::Metadata) -> Self {
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Self { device: metadata.dev(), inode: metadata.ino(), modified }
    }
}

/// Lists the sockets in the folder and its subfolders, and watches each folder. Names that begin with a dot are ignored, and
/// links to folders are not followed. The folder is created if it does not exist.
///
/// # Errors
/// The folder cannot be created, watched or read, or has too many entries. A subfolder that cannot be is left out.
pub(crate) fn scan(folder: &Path, watches: Option<Watches>) -> io::Result<BTreeMap<PathBuf, SocketId>> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
    let mut scan = Scan { watches, sockets: BTreeMap::new(), entries: 0 };
    scan.folder(folder, 0)?;
    Ok(scan.sockets)
}

struct Scan {
    watches: Option<Watches>,
    sockets: BTreeMap<PathBuf, SocketId>,
    entries: usize,
}

impl Scan {
    fn folder(&mut self, folder: &Path, depth: u32) -> io::Result<()> {
        // Watched before it is read, so that nothing that appears meanwhile is missed.
        let mask = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        if let Some(watches) = &mut self.watches {
            watches.add(folder, mask)?;
        }
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            self.entries += 1;
            if self.entries > ENTRIES {
                let text =
                    format!("{} has more than {ENTRIES} entries; remove what is no socket", folder.display());
                return Err(io::Error::other(text));
            }
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.subfolder(&path, depth + 1)?,
                // It may be gone already.
                Ok(_) => self.sockets.extend(socket(&path).map(|id| (path, id))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn subfolder(&mut self, folder: &Path, depth: u32) -> io::Result<()> {
        if depth > DEPTH {
            return Ok(());
        }
        match self.folder(folder, depth) {
            Err(error) if self.entries <= ENTRIES => {
                tracing::debug!(folder = %folder.display(), %error, "cannot watch a folder of plugins");
                Ok(())
            }
            result => result,
        }
    }
}

/// The identity of a socket, or of the one that a link leads to; `None` for anything else.
fn socket(path: &Path) -> Option<SocketId> {
    let metadata = fs::metadata(path).ok()?;
    metadata.file_type().is_socket().then(|| SocketId::of(&metadata))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use inotify::Inotify;

    use super::*;

    fn names(folder: &Path) -> io::Result<Vec<String>> {
        let found = scan(folder, Some(Inotify::init().unwrap().watches()))?;
        Ok(found.keys().map(|path| path.strip_prefix(folder).unwrap().display().to_string()).collect())
    }

    #[test]
    fn sockets_are_found_in_subfolders_and_dotfiles_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("plugins_registry");
        assert_eq!(names(&root).unwrap(), [""; 0]);
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o7777, 0o750);
        for folder in ["sub/deep", ".hidden", "1/2/3/4/5/6/7/8/9"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let sockets = [
            "a.sock",
            ".b.sock",
            "sub/c",
            "sub/deep/d",
            ".hidden/e",
            "1/2/3/4/5/6/7/8/f",
            "1/2/3/4/5/6/7/8/9/g",
        ];
        let _listeners = sockets.map(|name| UnixListener::bind(root.join(name)).unwrap());
        fs::write(root.join("file"), "").unwrap();
        std::os::unix::fs::symlink(root.join("a.sock"), root.join("link")).unwrap();
        std::os::unix::fs::symlink(root.join("sub"), root.join("linked-folder")).unwrap();
        std::os::unix::fs::symlink(root.join("nothing"), root.join("dangling")).unwrap();
        assert_eq!(names(&root).unwrap(), ["1/2/3/4/5/6/7/8/f", "a.sock", "link", "sub/c", "sub/deep/d"]);
    }

    #[test]
    fn a_socket_that_is_replaced_has_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = UnixListener::bind(&path).unwrap();
        let id = socket(&path).unwrap();
        assert_eq!(socket(&path), Some(id));
        let second = UnixListener::bind(dir.path().join("t")).unwrap();
        fs::rename(dir.path().join("t"), &path).unwrap();
        assert_ne!(socket(&path), Some(id));
        drop((first, second));
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(names(&dir.path().join("file")).is_err());
    }
}
