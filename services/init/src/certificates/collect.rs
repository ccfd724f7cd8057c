//! Collects the pairs that node-status left in its state folder.
//!
//! The folder belongs to a service without root, which may be compromised. A pair is only read from a regular file of that
//! service's user, without a link or a second hard link: otherwise init could be made to read files that only root may read.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use keelson_config::{CertificateKind, Certificates, Config, ServiceName};
use keelson_init_core::replaces;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2, statat, unlinkat};

use super::pair::{Pair, PairError};
use super::store::{Store, StoreError};

/// A longer file cannot be a pair, in bytes.
const MAX_BYTES: u64 = 256 << 10;

/// Why a pair is not collected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CollectError {
    #[error("cannot read the new certificate in {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the new certificate in {} is not accepted: {message}; remove it", path.display())]
    Refused { path: PathBuf, message: &'static str },
    #[error("the new certificate in {} is not accepted; remove it", path.display())]
    Unusable { path: PathBuf, source: PairError },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A pair that init has stored. Its file can be removed once all services have their copies.
#[derive(Debug)]
pub(crate) struct CollectedPair {
    folder: OwnedFd,
    name: &'static str,
    inode: u64,
}

impl CollectedPair {
    /// Removes the file, unless it has been replaced.
    pub(crate) fn remove(self) -> io::Result<()> {
        let now = match statat(&self.folder, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(now) => now,
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if now.st_ino == self.inode {
            Ok(unlinkat(&self.folder, self.name, AtFlags::empty())?)
        } else {
            Ok(())
        }
    }
}

/// Stores the pair that node-status left if it replaces the current one.
pub(crate) fn collect(
    config: &Config,
    settings: &Certificates,
    kind: CertificateKind,
    now: i64,
) -> Result<Option<CollectedPair>, CollectError> {
    let path = config.paths.issued_certificates().join(kind.issued());
    let read = |source: io::Error| CollectError::Read { path: path.clone(), source };
    let refused = |message| CollectError::Refused { path: path.clone(), message };
    let Some((folder, file)) =
        open_issued(&config.paths.state(ServiceName::NodeStatus), kind).map_err(read)?
    else {
        return Ok(None);
    };
    let meta = fstat(&file).map_err(|error| read(error.into()))?;
    let owner = config.uid_of(ServiceName::NodeStatus).unwrap_or_else(|| rustix::process::geteuid().as_raw());
    if FileType::from_raw_mode(meta.st_mode) != FileType::RegularFile {
        return Err(refused("it is not a regular file"));
    }
    if meta.st_uid != owner {
        return Err(refused("it does not belong to node-status"));
    }
    if meta.st_nlink != 1 {
        return Err(refused("it has a second hard link"));
    }
    let mut pem = Vec::new();
    File::from(file).take(MAX_BYTES + 1).read_to_end(&mut pem).map_err(read)?;
    if pem.len() as u64 > MAX_BYTES {
        return Err(refused("it is too long"));
    }
    let pair = Pair::read(&pem).map_err(|source| CollectError::Unusable { path: path.clone(), source })?;
    if !pair.validity.is_valid_at(now) {
        return Err(refused("it has expired"));
    }
    let store = Store::new(settings, kind);
    // A current pair that cannot be read is replaced; a file in the place of the link is still an error.
    let in_force = match store.current() {
        Err(StoreError::Read { .. } | StoreError::Unusable { .. }) => None,
        current => current?,
    };
    if replaces(pair.validity, in_force.map(|pair| pair.validity), now) {
        store.put(&pair, now)?;
    }
    Ok(Some(CollectedPair { folder, name: kind.issued(), inode: meta.st_ino }))
}

/// The folder and the file; `None` if there is none.
fn open_issued(state: &Path, kind: CertificateKind) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
    let folder = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open_all = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let state = open(state, folder, Mode::empty())?;
        let folder = openat2(&state, "certificates", folder, Mode::empty(), beneath)?;
        let file = openat2(&folder, kind.issued(), file, Mode::empty(), beneath)?;
        Ok((folder, file))
    };
    match open_all() {
        Ok(both) => Ok(Some(both)),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::super::pair::tests::make_pair;
    use super::*;

    const NOW: i64 = 1_800_000_000;

    struct Scene {
        dir: tempfile::TempDir,
        config: Config,
        settings: Certificates,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let mut config = Config::default();
            config.paths.state_dir = dir.path().join("state");
            fs::create_dir_all(config.paths.issued_certificates()).unwrap();
            let settings = Certificates { dir: dir.path().join("pki"), ..Certificates::default() };
            Self { dir, config, settings }
        }

        fn path(&self) -> PathBuf {
            self.config.paths.issued_certificates().join("client.pem")
        }

        /// Leaves a pair that is `age` seconds old; returns its certificates.
        fn leave_pair(&self, age: i64, length: i64) -> String {
            let (own_pair, key) = make_pair("n", NOW - age, NOW - age + length);
            fs::write(self.path(), format!("{own_pair}{key}")).unwrap();
            Pair::read(format!("{own_pair}{key}").as_bytes()).unwrap().certificates
        }

        fn collect(&self) -> Result<Option<CollectedPair>, CollectError> {
            collect(&self.config, &self.settings, CertificateKind::Client, NOW)
        }

        fn in_force(&self) -> Option<String> {
            let store = Store::new(&self.settings, CertificateKind::Client);
            store.current().unwrap().map(|pair| pair.certificates)
        }
    }

    #[test]
    fn a_newer_issued_pair_is_stored_and_its_file_removed_on_request() {
        let scene = Scene::new();
        assert!(scene.collect().unwrap().is_none());
        let first = scene.leave_pair(10, 1000);
        let collected = scene.collect().unwrap().unwrap();
        assert_eq!(scene.in_force(), Some(first.clone()));
        assert!(scene.path().exists(), "it is not copied yet");
        collected.remove().unwrap();
        assert!(!scene.path().exists());
        // A file that replaced it meanwhile stays.
        scene.leave_pair(5, 1000);
        let collected = scene.collect().unwrap().unwrap();
        let third = scene.leave_pair(1, 1000);
        let replaced = scene.path().with_extension("new");
        fs::copy(scene.path(), &replaced).unwrap();
        fs::rename(replaced, scene.path()).unwrap();
        collected.remove().unwrap();
        assert!(scene.path().exists());
        scene.collect().unwrap();
        assert_eq!(scene.in_force(), Some(third.clone()));
        scene.leave_pair(500, 1000);
        scene.collect().unwrap().unwrap().remove().unwrap();
        assert_eq!(scene.in_force(), Some(third), "an older pair is not stored");
    }

    #[test]
    fn links_and_special_files_from_node_status_are_not_read() {
        let scene = Scene::new();
        let (own_pair, key) = make_pair("secret of root", NOW - 1, NOW + 1000);
        let secret = scene.dir.path().join("secret.pem");
        fs::write(&secret, format!("{own_pair}{key}")).unwrap();
        let path = scene.path();
        let refused = |text: &str| {
            let error = keelson_service_kit::status::chain(&scene.collect().unwrap_err());
            assert!(error.contains("certificates/client.pem") && error.contains(text), "{error}");
            assert_eq!(scene.in_force(), None);
        };
        symlink(&secret, &path).unwrap();
        refused("symbolic link");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&secret, &path).unwrap();
        refused("second hard link");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("not a regular file");
        fs::remove_dir(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        refused("not a regular file");
        fs::remove_file(&path).unwrap();
        // The folder itself is a link.
        let folder = path.parent().unwrap();
        fs::remove_dir(folder).unwrap();
        let other = scene.dir.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::copy(&secret, other.join("client.pem")).unwrap();
        symlink(&other, folder).unwrap();
        refused("Not a directory");
    }

    #[test]
    fn an_issued_pair_of_another_user_is_not_read() {
        assert!(rustix::process::geteuid().is_root(), "this test changes owners; run it as root");
        let mut scene = Scene::new();
        scene.config.users.uids.insert("node-status".into(), 64_206);
        let certificates = scene.leave_pair(1, 1000);
        let error = scene.collect().unwrap_err().to_string();
        assert!(error.contains("does not belong to node-status"), "{error}");
        chown(scene.path(), Some(64_206), None).unwrap();
        scene.collect().unwrap().unwrap();
        assert_eq!(scene.in_force(), Some(certificates));
    }

    #[test]
    fn an_invalid_issued_pair_is_reported_and_kept() {
        let scene = Scene::new();
        for (content, text) in [
            ("no pair".to_owned(), "it has no certificate"),
            (
                format!("{}{}", make_pair("a", 0, NOW + 9).0, make_pair("b", 0, NOW + 9).1),
                "its key does not match its certificate",
            ),
            (
                {
                    let (own_pair, key) = make_pair("a", 0, NOW - 1);
                    format!("{own_pair}{key}")
                },
                "it has expired",
            ),
            ("x".repeat(300 << 10), "it is too long"),
        ] {
            fs::write(scene.path(), content).unwrap();
            let error = keelson_service_kit::status::chain(&scene.collect().unwrap_err());
            assert!(error.contains(text), "{error}");
            assert!(scene.in_force().is_none() && scene.path().exists());
        }
    }
}
