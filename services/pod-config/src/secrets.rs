//! Keeps Secrets of the control plane over a restart of the service: as files in memory (tmpfs), which do not survive a reboot.
//!
//! They are never written to a disk. If the run folder is on a disk, nothing is stored, and after a restart pods wait for their
//! Secrets until the control plane answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use keelson_files::{Replacement, create_private_folder};
use rustix::fs::{FsWord, statfs};

/// Folder in the run folder of the service.
const FOLDER: &str = "secrets";
/// Name of a file that is being written. Object names never begin with a dot.
const TEMPORARY: &str = ".new";
/// Magic numbers of file systems in memory (statfs(2)).
const TMPFS: FsWord = 0x0102_1994;
const RAMFS: FsWord = 0x8584_58f6;

/// Namespace and name of a Secret.
pub type SecretName = (String, String);

/// The stored Secrets, one file each: `secrets/<namespace>/<name>`.
#[derive(Debug)]
pub struct Secrets {
    /// `None` if nothing is stored.
    folder: Option<PathBuf>,
    names: BTreeSet<SecretName>,
}

impl Secrets {
    /// Opens the store below `run_dir` and reads the Secrets of the run before the restart. If `run_dir` is not in memory,
    /// nothing is stored, and existing files are deleted.
    pub fn open(run_dir: &Path) -> (Self, BTreeMap<SecretName, Vec<u8>>) {
        let folder = run_dir.join(FOLDER);
        match is_memory(run_dir) {
            Ok(true) => {}
            found => {
                if let Err(error) = found {
                    tracing::warn!(folder = %run_dir.display(), %error, "cannot determine whether the folder is in memory");
                }
                tracing::info!(
                    event = "secrets_not_stored",
                    folder = %run_dir.display(),
                    "the run folder is not on a tmpfs: Secrets are not stored over a restart of this service, and pods that \
                     need one then wait until the control plane answers"
                );
                let _ = fs::remove_dir_all(&folder);
                return (Self { folder: None, names: BTreeSet::new() }, BTreeMap::new());
            }
        }
        let found = read_all(&folder);
        (Self { folder: Some(folder), names: found.keys().cloned().collect() }, found)
    }

    /// Deletes all stored Secrets below `run_dir`.
    pub fn remove_all(run_dir: &Path) {
        let _ = fs::remove_dir_all(run_dir.join(FOLDER));
    }

    /// Stores a Secret. Namespace and name are valid object names, so that the path stays in its folder.
    pub fn put(&mut self, name: SecretName, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        match write(folder, &name, bytes) {
            Ok(()) => drop(self.names.insert(name)),
            Err(error) => {
                tracing::warn!(secret = %path_of(folder, &name).display(), %error, "cannot store a Secret over a restart");
                // A stale Secret is worse than none.
                self.remove(&name);
            }
        }
    }

    /// Deletes a Secret. One that is not stored is ignored: its name may be any text.
    pub fn remove(&mut self, name: &SecretName) {
        let Some(folder) = self.folder.as_ref().filter(|_| self.names.contains(name)) else { return };
        if let Err(error) = fs::remove_file(path_of(folder, name))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(secret = %path_of(folder, name).display(), %error, "cannot delete the file of a deleted Secret");
            return;
        }
        self.names.remove(name);
    }

    /// Deletes all Secrets for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&SecretName) -> bool) {
        let removed: Vec<SecretName> = self.names.iter().filter(|name| !keep(name)).cloned().collect();
        removed.iter().for_each(|name| self.remove(name));
    }
}

/// Whether the folder is on a file system in memory.
fn is_memory(folder: &Path) -> io::Result<bool> {
    let kind = statfs(folder)?.f_type;
    Ok(kind == TMPFS || kind == RAMFS)
}

fn path_of(folder: &Path, (namespace, name): &SecretName) -> PathBuf {
    folder.join(namespace).join(name)
}

fn write(folder: &Path, name: &SecretName, bytes: &[u8]) -> io::Result<()> {
    create_private_folder(&folder.join(&name.0))?;
    Replacement::new().mode(0o600).temporary_name(TEMPORARY).write(&path_of(folder, name), bytes)
}

fn read_all(folder: &Path) -> BTreeMap<SecretName, Vec<u8>> {
    let mut found = BTreeMap::new();
    for namespace in entry_names(folder) {
        for name in entry_names(&folder.join(&namespace)) {
            let secret = (namespace.clone(), name);
            match fs::read(path_of(folder, &secret)) {
                Ok(bytes) => drop(found.insert(secret, bytes)),
                Err(error) => {
                    let file = path_of(folder, &secret);
                    tracing::warn!(secret = %file.display(), %error, "cannot read a Secret stored before the restart");
                }
            }
        }
    }
    found
}

fn entry_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn name(name: &str) -> SecretName {
        ("default".to_owned(), name.to_owned())
    }

    fn memory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn secrets_on_tmpfs_are_restored_after_a_restart_until_removed() {
        let run = memory();
        let (mut secrets, found) = Secrets::open(run.path());
        assert!(found.is_empty());
        secrets.put(name("a"), b"1");
        secrets.put(name("a"), b"2");
        secrets.put(name("b"), b"3");
        secrets.put(("other".to_owned(), "a".to_owned()), b"4");
        let (mut secrets, found) = Secrets::open(run.path());
        let values: Vec<&[u8]> = found.values().map(Vec::as_slice).collect();
        assert_eq!(values, [b"2", b"3", b"4"]);
        secrets.remove(&name("b"));
        secrets.retain(|(namespace, _)| namespace == "default");
        assert_eq!(Secrets::open(run.path()).1.into_keys().collect::<Vec<_>>(), [name("a")]);
        Secrets::remove_all(run.path());
        assert!(Secrets::open(run.path()).1.is_empty());
    }

    #[test]
    fn secret_files_are_private_and_partial_files_are_ignored() {
        let run = memory();
        let (mut secrets, _) = Secrets::open(run.path());
        secrets.put(name("a"), b"1");
        let folder = run.path().join(FOLDER);
        for (path, mode) in [("", 0o700), ("default", 0o700), ("default/a", 0o600)] {
            let found = fs::metadata(folder.join(path)).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{path}");
        }
        fs::write(folder.join("default").join(TEMPORARY), b"half").unwrap();
        assert_eq!(Secrets::open(run.path()).1.len(), 1);
    }

    #[test]
    fn on_a_disk_no_secrets_are_stored_and_old_ones_are_removed() {
        let run = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let old = run.path().join(FOLDER).join("default");
        fs::create_dir_all(&old).unwrap();
        fs::write(old.join("a"), b"1").unwrap();
        let (mut secrets, found) = Secrets::open(run.path());
        secrets.put(name("b"), b"2");
        assert!(found.is_empty() && !run.path().join(FOLDER).exists());
    }

    #[test]
    fn a_secret_that_cannot_be_replaced_is_removed() {
        let run = memory();
        let (mut secrets, _) = Secrets::open(run.path());
        secrets.put(name("a"), b"1");
        // A folder has the name of the temporary file.
        fs::create_dir(run.path().join(FOLDER).join("default").join(TEMPORARY)).unwrap();
        secrets.put(name("a"), b"2");
        assert!(Secrets::open(run.path()).1.is_empty());
    }
}
