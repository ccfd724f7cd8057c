//! The folder of the node's certificates, in a kubelet's layout (node-and-api.md §6.6).
//!
//! A pair is a file with its time in the name; the link `…-current.pem` leads to the current one. The link is replaced by a
//! rename of another link, `…-updated.pem`, so that there is always a complete pair; the next call repairs an interrupted
//! change.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use keelson_config::{CertificateKind, Certificates};
use keelson_init_core::{files_to_remove, stored_name};

use super::pair::{Pair, PairError};

/// How many names are tried for pairs that are stored within one second.
const MAX_NAME_ATTEMPTS: i64 = 60;

/// An error of the certificate folder.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error("cannot read the certificate in {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot use the certificate in {}; remove it, and a new one is requested", path.display())]
    Unusable { path: PathBuf, source: PairError },
    #[error("{} is a file and has to be a link to the current certificate; move the file away", path.display())]
    NoLink { path: PathBuf },
    #[error("cannot store a certificate in {}; set another folder with --cert-dir", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// The stored pairs of one kind.
#[derive(Debug)]
pub(crate) struct Store<'a> {
    dir: &'a Path,
    kind: CertificateKind,
    current: PathBuf,
    updated: PathBuf,
}

impl<'a> Store<'a> {
    pub(crate) fn new(settings: &'a Certificates, kind: CertificateKind) -> Self {
        let updated = settings.dir.join(format!("{}-updated.pem", kind.prefix()));
        Self { dir: &settings.dir, kind, current: settings.current(kind), updated }
    }

    /// The current pair, if there is one. Without a link it is the pair of `<prefix>.crt` and `<prefix>.key`.
    pub(crate) fn current(&self) -> Result<Option<Pair>, StoreError> {
        let path = &self.current;
        let pem = if is_link(path)? {
            fs::read(path).map_err(|source| StoreError::Read { path: path.clone(), source })?
        } else {
            let [certificates, key] =
                ["crt", "key"].map(|end| self.dir.join(format!("{}.{end}", self.kind.prefix())));
            let (Some(mut pem), Some(key)) = (read_if_exists(&certificates)?, read_if_exists(&key)?) else {
                return Ok(None);
            };
            pem.push(b'\n');
            pem.extend(key);
            pem
        };
        let pair = Pair::read(&pem).map_err(|source| StoreError::Unusable { path: path.clone(), source })?;
        Ok(Some(pair))
    }

    /// Repairs an interrupted change: a new link that was not renamed yet becomes the current one if there is none, and is
    /// removed otherwise.
    pub(crate) fn repair(&self) -> Result<(), StoreError> {
        let is_current = is_link(&self.current)?;
        if !is_link(&self.updated)? {
            return Ok(());
        }
        let is_good = fs::read(&self.updated).is_ok_and(|pem| Pair::read(&pem).is_ok());
        let done = if is_good && !is_current {
            tracing::info!(link = %self.current.display(), "completed the interrupted change of certificates");
            fs::rename(&self.updated, &self.current)
        } else {
            fs::remove_file(&self.updated)
        };
        done.map_err(|source| self.write_error(source))
    }

    /// Stores a pair and makes it the current one. Removes old files except the newest ones.
    pub(crate) fn put(&self, pair: &Pair, now: i64) -> Result<(), StoreError> {
        // The rename would replace a foreign file in the place of the link: report an error instead.
        self.repair()?;
        let stored = self.write(pair, now).map_err(|source| self.write_error(source))?;
        let switched = symlink(self.dir.join(&stored), &self.updated)
            .and_then(|()| fs::rename(&self.updated, &self.current))
            .and_then(|()| fs::File::open(self.dir)?.sync_all());
        switched.map_err(|source| self.write_error(source))?;
        tracing::info!(file = %self.dir.join(&stored).display(), "stored a new {} certificate", self.kind.word());
        self.remove_old(&stored);
        Ok(())
    }

    /// Writes a new file and returns its name once the file is on disk.
    fn write(&self, pair: &Pair, now: i64) -> io::Result<String> {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(self.dir)?;
        let mut result = Err(io::Error::from(io::ErrorKind::AlreadyExists));
        for later in 0..MAX_NAME_ATTEMPTS {
            let name = stored_name(self.kind, now + later);
            let opened =
                fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.dir.join(&name));
            match opened {
                Ok(mut file) => {
                    file.write_all(pair.pem().as_bytes())?;
                    file.sync_all()?;
                    return Ok(name);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => result = Err(error),
                Err(error) => return Err(error),
            }
        }
        result
    }

    fn remove_old(&self, in_force: &str) {
        let Ok(entries) = fs::read_dir(self.dir) else { return };
        let names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        for name in files_to_remove(self.kind, &names, in_force) {
            if let Err(error) = fs::remove_file(self.dir.join(name)) {
                tracing::warn!(%error, name, "cannot remove an old certificate");
            }
        }
    }

    fn write_error(&self, source: io::Error) -> StoreError {
        StoreError::Write { path: self.dir.to_owned(), source }
    }
}

/// Whether there is a link; a file of another type is an error.
fn is_link(path: &Path) -> Result<bool, StoreError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Ok(true),
        Ok(_) => Err(StoreError::NoLink { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(StoreError::Read { path: path.to_owned(), source }),
    }
}

fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::super::pair::tests::make_pair;
    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn pair(name: &str) -> Pair {
        let (own_pair, key) = make_pair(name, NOW - 10, NOW + 1000);
        Pair::read(format!("{own_pair}{key}").as_bytes()).unwrap()
    }

    fn settings(dir: &Path) -> Certificates {
        Certificates { dir: dir.join("pki"), ..Certificates::default() }
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_pair_becomes_current_and_the_last_three_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let store = Store::new(&settings, CertificateKind::Client);
        assert_eq!(store.current().unwrap(), None);
        for second in 0..5 {
            let pair = pair("n");
            store.put(&pair, NOW + second).unwrap();
            assert_eq!(store.current().unwrap(), Some(pair));
        }
        let link = fs::read_link(settings.dir.join("kubelet-client-current.pem")).unwrap();
        assert_eq!(link, settings.dir.join("kubelet-client-2027-01-15-08-00-04.pem"));
        assert_eq!(fs::metadata(&link).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&settings.dir).unwrap().mode() & 0o777, 0o755);
        let stored = |second: u32| format!("kubelet-client-2027-01-15-08-00-{second:02}.pem");
        assert_eq!(
            names(&settings.dir),
            [stored(2), stored(3), stored(4), "kubelet-client-current.pem".into()]
        );
        // Two pairs within one second.
        store.put(&pair("n"), NOW + 4).unwrap();
        assert!(names(&settings.dir).contains(&stored(5)));
    }

    #[test]
    fn an_interrupted_certificate_change_is_completed_or_undone() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let store = Store::new(&settings, CertificateKind::Serving);
        let (first, second) = (pair("one"), pair("two"));
        store.put(&first, NOW).unwrap();
        // Killed after the new link was created: the current pair stays, and the next one replaces it.
        let written = store.write(&second, NOW + 1).unwrap();
        symlink(settings.dir.join(&written), &store.updated).unwrap();
        store.repair().unwrap();
        assert_eq!(store.current().unwrap(), Some(first));
        assert!(!names(&settings.dir).contains(&"kubelet-server-updated.pem".to_owned()));
        // A kubelet removes the current link before it renames the other, and may be killed in between.
        fs::remove_file(&store.current).unwrap();
        symlink(settings.dir.join(&written), &store.updated).unwrap();
        store.repair().unwrap();
        assert_eq!(store.current().unwrap(), Some(second.clone()));
        // A link to an incomplete file.
        fs::remove_file(&store.current).unwrap();
        fs::write(settings.dir.join("half.pem"), &second.certificates).unwrap();
        symlink(settings.dir.join("half.pem"), &store.updated).unwrap();
        store.repair().unwrap();
        assert_eq!(store.current().unwrap(), None);
        store.put(&second, NOW + 2).unwrap();
        assert_eq!(store.current().unwrap(), Some(second));
    }

    #[test]
    fn a_file_in_place_of_the_current_link_is_kept_and_reported() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        fs::create_dir(&settings.dir).unwrap();
        let store = Store::new(&settings, CertificateKind::Client);
        for name in ["kubelet-client-current.pem", "kubelet-client-updated.pem"] {
            let path = settings.dir.join(name);
            fs::write(&path, "somebody's").unwrap();
            let error = store.put(&pair("n"), NOW).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("has to be a link"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's");
            fs::remove_file(path).unwrap();
        }
        assert_eq!(names(&settings.dir), Vec::<String>::new());
    }

    #[test]
    fn without_a_link_crt_and_key_files_are_the_current_pair() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        fs::create_dir(&settings.dir).unwrap();
        let store = Store::new(&settings, CertificateKind::Client);
        let pair = pair("n");
        fs::write(settings.dir.join("kubelet-client.crt"), &pair.certificates).unwrap();
        assert_eq!(store.current().unwrap(), None);
        fs::write(settings.dir.join("kubelet-client.key"), &pair.key).unwrap();
        assert_eq!(store.current().unwrap(), Some(pair));
    }
}
