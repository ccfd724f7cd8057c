//! Replaces a file by rename.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use crate::remove_if_exists;

/// How a file is replaced: its bytes go to a temporary file in the same folder, which is then renamed.
///
/// The temporary file is always a new one. What a killed writer, or somebody else, left at its path is removed and never
/// written to, not even through a symbolic link. After an error the temporary file is removed, and the old file is unchanged.
/// Two writers must not replace the same file at the same time.
///
/// An error names the step that failed and its path, keeps the [`ErrorKind`](io::ErrorKind) of its cause, and says the cause in
/// its text.
///
/// ```no_run
/// use keelson_files::Replacement;
///
/// /// Read by the operator group.
/// const SHARED: Replacement<'_> = Replacement::new().mode(0o640);
///
/// SHARED.group(988).write("/run/keelson/flags.json".as_ref(), b"{}\n")?;
/// # std::io::Result::Ok(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Replacement<'a> {
    mode: Option<u32>,
    owner: Option<u32>,
    group: Option<u32>,
    sync: Sync,
    temporary: TemporaryName<'a>,
}

/// What is on disk when the call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    /// Nothing is guaranteed: a crash of the machine may leave an empty file.
    None,
    /// Before the rename, the content: a crash leaves the old file or the new one.
    Content,
    /// Content and name: a crash leaves the new file.
    ContentAndName,
}

/// The file name of the temporary file.
#[derive(Debug, Clone, Copy)]
enum TemporaryName<'a> {
    /// That of the file with something appended.
    Suffix(&'a str),
    /// One that does not depend on the file.
    Fixed(&'a str),
}

/// What a write did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// There was no file.
    Created,
    /// The file had another content, or could not be read.
    Replaced,
    /// The file had this content already and was not touched.
    Unchanged,
}

impl Default for Replacement<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> Replacement<'a> {
    /// A replacement without fsync. Mode and owner are those of any new file (umask(2)), and the temporary file has the suffix
    /// `.new`.
    pub const fn new() -> Self {
        Self {
            mode: None,
            owner: None,
            group: None,
            sync: Sync::None,
            temporary: TemporaryName::Suffix(".new"),
        }
    }

    /// The mode of the new file. The umask does not change it, and nobody has more access before the rename.
    #[must_use]
    pub const fn mode(self, mode: u32) -> Self {
        Self { mode: Some(mode), ..self }
    }

    /// The user ID that owns the new file; `None`: that of this process. Only root may set another one.
    #[must_use]
    pub fn owner(self, uid: impl Into<Option<u32>>) -> Self {
        Self { owner: uid.into(), ..self }
    }

    /// The group ID of the new file; `None`: that of any new file.
    #[must_use]
    pub fn group(self, gid: impl Into<Option<u32>>) -> Self {
        Self { group: gid.into(), ..self }
    }

    /// Syncs the content before the rename (fsync(2)), so that a crash of the machine leaves the old file or the new one.
    #[must_use]
    pub const fn synced(self) -> Self {
        Self { sync: Sync::Content, ..self }
    }

    /// Syncs the content, and the folder after the rename, so that the new file survives a crash of the machine.
    #[must_use]
    pub const fn durable(self) -> Self {
        Self { sync: Sync::ContentAndName, ..self }
    }

    /// The temporary file is called as the file with `suffix` appended.
    #[must_use]
    pub const fn temporary_suffix(self, suffix: &'a str) -> Self {
        Self { temporary: TemporaryName::Suffix(suffix), ..self }
    }

    /// The temporary file is called `name`, for folders in which a name with a suffix could be that of another file.
    #[must_use]
    pub const fn temporary_name(self, name: &'a str) -> Self {
        Self { temporary: TemporaryName::Fixed(name), ..self }
    }

    /// Replaces the file at `path`, or creates it. Its folder must exist. A symbolic link at `path` is replaced itself.
    ///
    /// # Errors
    /// A step failed: the error names it and the path. The old file is unchanged, unless only the sync of the folder failed.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.temporary(path)?;
        remove(&temporary)?;
        // If this fails because another writer was quicker, the temporary file is that writer's.
        let file = self.open(&temporary)?;
        let written = self.fill(file, &temporary, bytes).and_then(|()| {
            let renamed = fs::rename(&temporary, path);
            renamed.map_err(failed(&format!("rename {} to", temporary.display()), path))
        });
        if written.is_err() {
            // The first error says more; the next writer tries again.
            let _ = fs::remove_file(&temporary);
        }
        written?;
        if self.sync == Sync::ContentAndName {
            let folder = folder_of(path);
            File::open(folder)
                .and_then(|folder| folder.sync_all())
                .map_err(failed("sync the folder", folder))?;
        }
        Ok(())
    }

    /// As [`Self::write`], but leaves a file alone that has this content already, whatever its mode and owner are.
    ///
    /// # Errors
    /// As for [`Self::write`].
    pub fn write_if_changed(&self, path: &Path, bytes: &[u8]) -> io::Result<Written> {
        let written = match fs::read(path) {
            Ok(current) if current == bytes => {
                // What a killed writer has left. It is in nobody's way, so an error has to wait for the next write.
                let _ = fs::remove_file(self.temporary(path)?);
                return Ok(Written::Unchanged);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Written::Created,
            Ok(_) | Err(_) => Written::Replaced,
        };
        self.write(path, bytes)?;
        Ok(written)
    }

    /// Removes the file at `path` and the temporary file that a killed writer may have left. It is no error if they are missing.
    ///
    /// # Errors
    /// One of them cannot be removed.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        remove(&self.temporary(path)?)?;
        remove(path)
    }

    fn temporary(&self, path: &Path) -> io::Result<PathBuf> {
        let name = match self.temporary {
            TemporaryName::Fixed(name) => OsString::from(name),
            TemporaryName::Suffix(suffix) => {
                let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "it has no file name");
                let mut name =
                    path.file_name().ok_or_else(no_name).map_err(failed("write", path))?.to_owned();
                name.push(suffix);
                name
            }
        };
        Ok(path.with_file_name(name))
    }

    /// Creates the temporary file.
    fn open(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        // create_new (O_EXCL) does not follow a symbolic link.
        options.write(true).create_new(true);
        if self.mode.is_some() {
            // Closed to others until it has its owner and mode.
            options.mode(0o600);
        }
        options.open(path).map_err(failed("create", path))
    }

    /// Gives the temporary file its content, owner and mode.
    fn fill(&self, mut file: File, path: &Path, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes).map_err(failed("write", path))?;
        if self.owner.is_some() || self.group.is_some() {
            fchown(&file, self.owner, self.group).map_err(failed("set the owner of", path))?;
        }
        if let Some(mode) = self.mode {
            // After the owner, whose change clears the set-user-ID bits (chown(2)).
            file.set_permissions(Permissions::from_mode(mode)).map_err(failed("set the mode of", path))?;
        }
        if self.sync != Sync::None {
            file.sync_all().map_err(failed("sync", path))?;
        }
        Ok(())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    remove_if_exists(path).map_err(failed("remove", path))
}

/// Adds to an error what could not be done to which path.
fn failed(operation: &str, path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot {operation} {}: {error}", path.display()))
}

/// The folder of a file; `.` for a name alone.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests;
