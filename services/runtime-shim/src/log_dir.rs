//! The folder of one container's log, accessed by its file descriptor.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use keelson_runtime_shim_core::rotation::LogFile;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags};

use crate::files::Files;

/// The folder of a log. Files are opened beneath it, without following links.
#[derive(Debug)]
pub struct LogDir {
    folder: OwnedFd,
    /// Name of the file that the runtime writes to.
    pub current: String,
}

impl LogDir {
    /// Opens the folder of the log at `path`, beneath the pods' log folder.
    ///
    /// # Errors
    /// It does not exist, or it is not beneath the pods' log folder.
    pub fn open(files: &Files, path: &Path) -> io::Result<Self> {
        let not_a_log = || io::Error::new(io::ErrorKind::InvalidInput, "not the path of a log");
        let current = path.file_name().and_then(|name| name.to_str()).ok_or_else(not_a_log)?.to_owned();
        let folder = files.open_log_folder(path.parent().ok_or_else(not_a_log)?)?;
        Ok(Self { folder, current })
    }

    /// The log's files: regular files whose names begin with its name.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> io::Result<Vec<LogFile>> {
        let mut list = Vec::new();
        for entry in Dir::read_from(&self.folder)? {
            let entry = entry?;
            let Some(name) = self.own_name(entry.file_name()) else { continue };
            // The file was removed in the meantime.
            let Ok(stat) = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if FileType::from_raw_mode(stat.st_mode).is_file() {
                list.push(LogFile { name: name.to_owned(), bytes: u64::try_from(stat.st_size).unwrap_or(0) });
            }
        }
        Ok(list)
    }

    fn own_name<'a>(&self, name: &'a CStr) -> Option<&'a str> {
        name.to_str().ok().filter(|name| name.starts_with(&self.current))
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// It does not exist or is not a regular file.
    pub fn read(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = File::from(rustix::fs::openat2(&self.folder, name, flags, Mode::empty(), resolve)?);
        if file.metadata()?.is_file() {
            return Ok(file);
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }

    /// Creates a file with this mode.
    ///
    /// # Errors
    /// It already exists.
    pub fn create(&self, name: &str, mode: u32) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(File::from(rustix::fs::openat(&self.folder, name, flags, Mode::from_raw_mode(mode & 0o777))?))
    }

    /// Removes a file; a missing file counts as removed.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Renames a file to a name that does not exist.
    ///
    /// # Errors
    /// The new name exists, or the file does not.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let folder = &self.folder;
        match rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE) {
            // The file system does not support the flag. Nothing else creates rotated files. Only a file that the
            // runtime opens at this moment could be overwritten, and that file is new and empty.
            Err(rustix::io::Errno::INVAL) => {}
            other => return Ok(other?),
        }
        match rustix::fs::statat(folder, to, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => Ok(rustix::fs::renameat(folder, from, folder, to)?),
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) => Err(error.into()),
        }
    }
}
