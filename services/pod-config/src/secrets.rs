//! Secrets of the control plane over a restart of the service: files in memory (tmpfs), gone with the boot.
//!
//! They are never on a disk. Where the run folder is on one, nothing is kept, and what needs a Secret waits after a restart
//! until the control plane answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, statfs};

/// Below the run folder of the service.
const FOLDER: &str = "secrets";
/// A file that is being written.
const UNFINISHED: &str = ".new";
/// File systems that are memory alone (statfs(2)).
const TMPFS: FsWord = 0x0102_1994;
const RAMFS: FsWord = 0x8584_58f6;

/// Namespace and name of a Secret.
pub type SecretName = (String, String);

/// The files, one per Secret: `secrets/<namespace>/<name>`.
#[derive(Debug)]
pub struct Secrets {
    /// `None`: nothing is kept.
    folder: Option<PathBuf>,
    kept: BTreeSet<SecretName>,
}

impl Secrets {
    /// Below `run_dir`, with what an earlier run of the service has left there. Without memory there, nothing is kept, and
    /// what may lie there is removed.
    pub fn open(run_dir: &Path) -> (Self, BTreeMap<SecretName, Vec<u8>>) {
        let folder = run_dir.join(FOLDER);
        match is_memory(run_dir) {
            Ok(true) => {}
            found => {
                if let Err(error) = found {
                    tracing::warn!(folder = %run_dir.display(), %error, "it is not known whether this is memory");
                }
                tracing::info!(
                    folder = %run_dir.display(),
                    "the run folder is no tmpfs: Secrets are not kept over a restart of this service; what needs one \
                     waits then until the control plane answers"
                );
                let _ = fs::remove_dir_all(&folder);
                return (Self { folder: None, kept: BTreeSet::new() }, BTreeMap::new());
            }
        }
        let found = read_all(&folder);
        (Self { folder: Some(folder), kept: found.keys().cloned().collect() }, found)
    }

    /// Removes all that an earlier run has left below `run_dir`.
    pub fn remove_all(run_dir: &Path) {
        let _ = fs::remove_dir_all(run_dir.join(FOLDER));
    }

    /// Keeps a Secret as it is now. Both names are those of objects, which no path can leave its folder with.
    pub fn put(&mut self, name: SecretName, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        match write(folder, &name, bytes) {
            Ok(()) => drop(self.kept.insert(name)),
            Err(error) => {
                tracing::warn!(secret = %path_of(folder, &name).display(), %error, "a Secret is not kept over a restart");
                // A stale one is worse than none.
                self.remove(&name);
            }
        }
    }

    /// A Secret is gone. One that is not kept is left alone: its name may be any text.
    pub fn remove(&mut self, name: &SecretName) {
        let Some(folder) = self.folder.as_ref().filter(|_| self.kept.contains(name)) else { return };
        if let Err(error) = fs::remove_file(path_of(folder, name))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(secret = %path_of(folder, name).display(), %error, "a Secret that is gone stays in memory");
            return;
        }
        self.kept.remove(name);
    }

    /// Removes all but those of which `stays` says yes.
    pub fn retain(&mut self, stays: impl Fn(&SecretName) -> bool) {
        let gone: Vec<SecretName> = self.kept.iter().filter(|name| !stays(name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name));
    }
}

/// Whether what is written below the folder stays in memory.
fn is_memory(folder: &Path) -> io::Result<bool> {
    let kind = statfs(folder)?.f_type;
    Ok(kind == TMPFS || kind == RAMFS)
}

fn path_of(folder: &Path, (namespace, name): &SecretName) -> PathBuf {
    folder.join(namespace).join(name)
}

fn write(folder: &Path, name: &SecretName, bytes: &[u8]) -> io::Result<()> {
    let path = path_of(folder, name);
    let parent = folder.join(&name.0);
    DirBuilder::new().recursive(true).mode(0o700).create(&parent)?;
    // No name of an object begins with a dot.
    let unfinished = parent.join(UNFINISHED);
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    file.write_all(bytes)?;
    fs::rename(&unfinished, &path)
}

fn read_all(folder: &Path) -> BTreeMap<SecretName, Vec<u8>> {
    let mut found = BTreeMap::new();
    for namespace in names(folder) {
        for name in names(&folder.join(&namespace)) {
            let secret = (namespace.clone(), name);
            match fs::read(path_of(folder, &secret)) {
                Ok(bytes) => drop(found.insert(secret, bytes)),
                Err(error) => {
                    let file = path_of(folder, &secret);
                    tracing::warn!(secret = %file.display(), %error, "a Secret of before the restart cannot be read");
                }
            }
        }
    }
    found
}

fn names(folder: &Path) -> Vec<String> {
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
    fn what_is_kept_in_memory_is_there_after_a_restart_until_it_is_gone() {
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
    fn nobody_else_can_read_them_and_half_a_file_is_none() {
        let run = memory();
        let (mut secrets, _) = Secrets::open(run.path());
        secrets.put(name("a"), b"1");
        let folder = run.path().join(FOLDER);
        for (path, mode) in [("", 0o700), ("default", 0o700), ("default/a", 0o600)] {
            let found = fs::metadata(folder.join(path)).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{path}");
        }
        fs::write(folder.join("default").join(UNFINISHED), b"half").unwrap();
        assert_eq!(Secrets::open(run.path()).1.len(), 1);
    }

    #[test]
    fn on_a_disk_nothing_is_kept_and_what_lies_there_is_removed() {
        let run = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let old = run.path().join(FOLDER).join("default");
        fs::create_dir_all(&old).unwrap();
        fs::write(old.join("a"), b"1").unwrap();
        let (mut secrets, found) = Secrets::open(run.path());
        secrets.put(name("b"), b"2");
        assert!(found.is_empty() && !run.path().join(FOLDER).exists());
    }

    #[test]
    fn what_cannot_be_replaced_is_not_left_as_it_was() {
        let run = memory();
        let (mut secrets, _) = Secrets::open(run.path());
        secrets.put(name("a"), b"1");
        // A folder stands where the new file would be written.
        fs::create_dir(run.path().join(FOLDER).join("default").join(UNFINISHED)).unwrap();
        secrets.put(name("a"), b"2");
        assert!(Secrets::open(run.path()).1.is_empty());
    }
}
