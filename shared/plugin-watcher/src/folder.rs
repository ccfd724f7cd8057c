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

/// A link that leads to itself (errno(3)).
const ELOOP: i32 = 40;

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

/// What a read of the folder has found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) sockets: BTreeMap<PathBuf, SocketId>,
    /// The paths that could not be read, with the error. Nothing is known about the sockets there.
    pub(crate) unreadable: BTreeMap<PathBuf, String>,
    /// Why inotify(7) does not report every change; `None`: it does.
    pub(crate) unwatched: Option<String>,
}

impl Found {
    /// Whether the socket at `path` may exist although it was not found.
    pub(crate) fn may_have(&self, path: &Path) -> bool {
        self.unreadable.keys().any(|unreadable| path.starts_with(unreadable))
    }
}

/// Lists the sockets in the folder and its subfolders, and watches each folder. Names that begin with a dot are ignored, and
/// links to folders are not followed. The folder is created if it does not exist.
///
/// # Errors
/// The folder cannot be created or read, or has too many entries.
pub(crate) fn scan(folder: &Path, watches: Option<Watches>) -> io::Result<Found> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
    let unwatched = watches.is_none().then(|| "inotify(7) is not available".to_owned());
    let mut scan = Scan { watches, found: Found { unwatched, ..Found::default() }, entries: 0 };
    scan.folder(folder, 0)?;
    Ok(scan.found)
}

struct Scan {
    watches: Option<Watches>,
    found: Found,
    entries: usize,
}

/// Whether an error says that there is nothing at the path any more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

impl Scan {
    /// Has changes of a folder reported.
    fn watch(&mut self, folder: &Path) {
        let mask = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let Some(watches) = &mut self.watches else { return };
        if let Err(error) = watches.add(folder, mask)
            && !is_gone(&error)
        {
            let text = format!("cannot watch {}: {error}", folder.display());
            self.found.unwatched.get_or_insert(text);
        }
    }

    fn folder(&mut self, folder: &Path, depth: u32) -> io::Result<()> {
        // Watched before it is read, so that nothing that appears meanwhile is missed.
        self.watch(folder);
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
                Ok(_) => self.socket(path),
                Err(error) if is_gone(&error) => {}
                Err(error) => self.note_unreadable(path, &error),
            }
        }
        Ok(())
    }

    fn socket(&mut self, path: PathBuf) {
        match socket(&path) {
            Ok(Some(id)) => drop(self.found.sockets.insert(path, id)),
            Ok(None) => {}
            Err(error) => self.note_unreadable(path, &error),
        }
    }

    fn note_unreadable(&mut self, path: PathBuf, error: &io::Error) {
        self.found.unreadable.insert(path, error.to_string());
    }

    fn subfolder(&mut self, folder: &Path, depth: u32) -> io::Result<()> {
        if depth > DEPTH {
            return Ok(());
        }
        match self.folder(folder, depth) {
            Err(error) if self.entries <= ENTRIES => {
                if !is_gone(&error) {
                    self.note_unreadable(folder.to_owned(), &error);
                }
                Ok(())
            }
            result => result,
        }
    }
}

/// The identity of a socket, or of the one that a link leads to; `None` for anything else, and if it is gone.
fn socket(path: &Path) -> io::Result<Option<SocketId>> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(metadata.file_type().is_socket().then(|| SocketId::of(&metadata))),
        Err(error) if is_gone(&error) || error.raw_os_error() == Some(ELOOP) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use inotify::Inotify;

    use super::*;

    fn names(folder: &Path) -> io::Result<Vec<String>> {
        let found = scan(folder, Some(Inotify::init().unwrap().watches()))?;
        Ok(found
            .sockets
            .keys()
            .map(|path| path.strip_prefix(folder).unwrap().display().to_string())
            .collect())
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
        assert!(id.is_some());
        assert_eq!(socket(&path).unwrap(), id);
        let second = UnixListener::bind(dir.path().join("t")).unwrap();
        fs::rename(dir.path().join("t"), &path).unwrap();
        assert_ne!(socket(&path).unwrap(), id);
        drop((first, second));
    }

    #[test]
    fn a_folder_that_cannot_be_used_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(names(&dir.path().join("file")).is_err());
    }

    /// A folder whose path is so long that the system cannot open a folder in it, with one in it.
    fn folder_with_unreadable_subfolder(dir: &Path) -> PathBuf {
        use std::os::fd::AsRawFd as _;
        let mut path = dir.to_owned();
        let name = "n".repeat(200);
        while path.as_os_str().len() + name.len() < 3900 {
            path.push(&name);
        }
        path.push("n".repeat(4000 - path.as_os_str().len()));
        fs::create_dir_all(&path).unwrap();
        let open = fs::File::open(&path).unwrap();
        fs::create_dir(format!("/proc/self/fd/{}/{name}", open.as_raw_fd())).unwrap();
        path
    }

    #[test]
    fn a_subfolder_that_cannot_be_read_is_named_and_leaves_open_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = folder_with_unreadable_subfolder(dir.path());
        let _listener = {
            let short = dir.path().join("s");
            let listener = UnixListener::bind(&short).unwrap();
            fs::rename(short, folder.join("s")).unwrap();
            listener
        };
        let found = scan(&folder, Some(Inotify::init().unwrap().watches())).unwrap();
        assert_eq!(found.sockets.keys().collect::<Vec<_>>(), [&folder.join("s")]);
        let subfolder = folder.join("n".repeat(200));
        assert_eq!(found.unreadable.keys().collect::<Vec<_>>(), [&subfolder]);
        assert!(found.may_have(&subfolder.join("plugin.sock")));
        assert!(!found.may_have(&folder.join("other.sock")));
        assert!(found.unwatched.unwrap().starts_with("cannot watch "));
    }

    #[test]
    fn a_folder_that_is_not_watched_is_read_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(dir.path().join("a.sock")).unwrap();
        let found = scan(dir.path(), None).unwrap();
        assert_eq!(found.sockets.len(), 1);
        assert!(found.unwatched.is_some() && found.unreadable.is_empty(), "{found:?}");
        let found = scan(dir.path(), Some(Inotify::init().unwrap().watches())).unwrap();
        assert!(found.unwatched.is_none(), "{found:?}");
    }
}
