//! What is in a folder. The functions block.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The paths in a folder, sorted; none if it is missing or no folder. Nothing in it is looked at, because it may hang.
pub(crate) fn paths_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The names in a folder, in the same way. One that is not UTF-8 is none that the kernel or this agent has given.
pub(crate) fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let names =
        paths_in(folder)?.into_iter().filter_map(|path| path.file_name()?.to_str().map(str::to_owned));
    Ok(names.collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn names_are_sorted_and_a_missing_folder_or_a_file_has_none() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b", "a", ".c"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff"));
        fs::write(&odd, "").unwrap();
        assert_eq!(names_in(dir.path()).unwrap(), [".c", "a", "b"]);
        assert_eq!(paths_in(dir.path()).unwrap().len(), 4);
        for none in ["missing", "a", "a/b"] {
            assert_eq!(paths_in(&dir.path().join(none)).unwrap(), Vec::<PathBuf>::new(), "{none}");
        }
        // The link in a path that leads to itself is no folder that is missing.
        std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
        assert!(names_in(&dir.path().join("loop")).is_err());
    }
}
