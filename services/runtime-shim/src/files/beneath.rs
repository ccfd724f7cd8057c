//! Opens files beneath a folder of the agent, without following links.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// Opens a regular file beneath `root`.
pub(super) fn open_file(root: &Path, path: &Path) -> io::Result<File> {
    let file = File::from(descriptor_beneath(root, path, OFlags::NONBLOCK)?);
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// Opens a folder beneath `root`.
pub(super) fn open_folder(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    descriptor_beneath(root, path, OFlags::DIRECTORY)
}

fn descriptor_beneath(root: &Path, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let relative = path.strip_prefix(root).map_err(|_| {
        io::Error::new(io::ErrorKind::PermissionDenied, "the file is not below the agent's folder")
    })?;
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    let root = File::open(root)?;
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(&root, relative, flags, Mode::empty(), resolve)?)
}
