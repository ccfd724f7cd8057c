//! Files that are replaced atomically: a reader sees the old content or the new one, and never a part.
//!
//! - [`Replacement`]: replaces one file, with mode, owner and fsync as its caller needs them.
//! - [`create_private_folder`]: the folder for files that only their owner may read.
//! - [`remove_if_exists`]: removes a file that may be missing.
//!
//! A writer that is killed between its write and its rename leaves a temporary file: `state.json.new`, or the name that
//! [`Replacement`] was given. The old file stays in effect, and nobody reads the temporary one. The next
//! [`write`](Replacement::write), [`write_if_changed`](Replacement::write_if_changed) or [`remove`](Replacement::remove) for the
//! same file removes it; its content, owner and mode are never reused. If no such call follows, it stays as long as its folder.
//!
//! All functions block; a caller on an async runtime uses `spawn_blocking`.

mod replacement;

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

pub use replacement::{Replacement, Written};

/// Creates a folder and its missing parents, each with mode 0700. An existing folder keeps its mode.
///
/// # Errors
/// A folder cannot be created, or something else exists at its path.
pub fn create_private_folder(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Removes a file or a symbolic link. It is no error if there is none.
///
/// # Errors
/// It cannot be removed, or it is a folder.
pub fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_private_folder_and_its_parents_are_for_the_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        create_private_folder(&folder).unwrap();
        assert_eq!([mode_of(&dir.path().join("a")), mode_of(&folder)], [0o700; 2]);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        create_private_folder(&folder).unwrap();
        assert_eq!(mode_of(&folder), 0o755, "an existing folder keeps its mode");
        fs::write(folder.join("file"), "").unwrap();
        create_private_folder(&folder.join("file")).unwrap_err();
    }

    #[test]
    fn removing_a_missing_file_is_no_error_and_removing_a_folder_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        remove_if_exists(&path).unwrap();
        fs::write(&path, "").unwrap();
        remove_if_exists(&path).unwrap();
        assert!(!path.exists());
        assert_eq!(remove_if_exists(dir.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }
}
