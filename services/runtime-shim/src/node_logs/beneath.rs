//! Opens files and folders beneath the folder of the node's logs.
//!
//! Pods may write there through a `hostPath`, so nothing in it is trusted: a link or `..` that leads out is refused by the kernel
//! (`RESOLVE_BENEATH` of openat2(2)), and only regular files and folders are opened. The type is read before the file is opened,
//! since opening a device can have an effect.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, open, openat, openat2, readlinkat};
use rustix::io::Errno;

/// Links that are followed for one path; as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// What a path is.
#[derive(Debug)]
pub(super) enum Opened {
    File {
        file: File,
        size: u64,
        modified: i64,
    },
    /// The entries, sorted by name, with whether each is a folder.
    Folder(Vec<(Vec<u8>, bool)>),
}

/// Why a path was not opened.
#[derive(Debug)]
pub(super) enum OpenError {
    NotFound,
    /// With the reason.
    Refused(&'static str),
    Read(io::Error),
}

impl From<Errno> for OpenError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::INVAL => Self::NotFound,
            Errno::XDEV | Errno::LOOP => Self::Refused("a link or .. leads out of the folder of logs"),
            Errno::ACCESS | Errno::PERM => Self::Refused("this service may not read it"),
            other => Self::Read(other.into()),
        }
    }
}

/// Opens a path relative to `root`; an empty one is `root` itself.
pub(super) fn open_beneath(root: &Path, path: &[u8]) -> Result<Opened, OpenError> {
    let top = open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let found = find(&top, root, path)?;
    let stat = fstat(&found)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            // The same inode, whatever its name leads to by now.
            let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(OpenError::Read)?;
            Ok(Opened::File { file, size: size(&stat), modified: stat.st_mtime })
        }
        FileType::Directory => entries(&top, root, &found, path).map(Opened::Folder),
        _ => Err(OpenError::Refused("it is neither a regular file nor a folder")),
    }
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

fn find(top: &OwnedFd, root: &Path, path: &[u8]) -> Result<OwnedFd, Errno> {
    let mut path = if path.is_empty() { b".".to_vec() } else { path.to_vec() };
    for _ in 0..MAX_LINKS {
        match at(top, &path, OFlags::empty()) {
            // The kernel refuses each absolute link. One that leads to the folder of logs is followed here: those in
            // `containers` are of this kind.
            Err(Errno::XDEV) => path = without_first_link(top, root, &path)?.ok_or(Errno::XDEV)?,
            // Something was renamed while the kernel resolved `..`.
            Err(Errno::AGAIN) => {}
            found => return found,
        }
    }
    Err(Errno::LOOP)
}

fn at(top: &OwnedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    openat2(top, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty(), resolve)
}

/// `path` with its first link replaced by the link's target; `None` without a link, or if the target is outside of `root`.
fn without_first_link(top: &OwnedFd, root: &Path, path: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
    let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(index, _)| index);
    for end in ends.chain([path.len()]).filter(|end| *end > 0) {
        let (prefix, rest) = path.split_at(end);
        let entry = at(top, prefix, OFlags::NOFOLLOW)?;
        if !FileType::from_raw_mode(fstat(&entry)?.st_mode).is_symlink() {
            continue;
        }
        let target = readlinkat(&entry, "", Vec::new())?.into_bytes();
        let beneath = if target.starts_with(b"/") {
            let Some(beneath) = strip_root(root, &target) else { return Ok(None) };
            beneath.to_vec()
        } else {
            let parent = prefix.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
            [&prefix[..parent], &target].concat()
        };
        return Ok(Some([&beneath, rest].concat()));
    }
    Ok(None)
}

/// The part of an absolute path below `root`, as `.` for `root` itself.
fn strip_root<'a>(root: &Path, target: &'a [u8]) -> Option<&'a [u8]> {
    match target.strip_prefix(root.as_os_str().as_encoded_bytes())? {
        [] | [b'/'] => Some(b"."),
        [b'/', rest @ ..] => Some(rest),
        _ => None,
    }
}

/// The entries of a folder. A link that leads to a folder counts as a folder.
fn entries(
    top: &OwnedFd,
    root: &Path,
    folder: &OwnedFd,
    path: &[u8],
) -> Result<Vec<(Vec<u8>, bool)>, OpenError> {
    let readable = openat(folder, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut list = Vec::new();
    for entry in Dir::read_from(readable.as_fd())? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let is_folder = match entry.file_type() {
            FileType::Directory => true,
            FileType::Symlink | FileType::Unknown => {
                let whole = if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() };
                let stat = find(top, root, &whole).and_then(fstat);
                stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
            }
            _ => false,
        };
        list.push((name.to_vec(), is_folder));
    }
    list.sort_unstable();
    Ok(list)
}
