//! New pairs, from where node-status leaves them.
//!
//! The folder is that of a service without root, which may have been taken over. What lies there is taken only as a regular
//! file of that user's own, behind no link and under no second name: else init would read, for whoever made it, what only
//! root may read.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use keelson_config::{CertificateKind, Certificates, Config, ServiceName};
use keelson_init_core::goes_before;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2, statat, unlinkat};

use super::pair::{Pair, PairProblem};
use super::store::{Store, StoreError};

/// A longer file is no pair.
const LONGEST: u64 = 256 << 10;

/// Why a pair is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeError {
    #[error("cannot read the new certificate in {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the new certificate in {} is not taken: {message}; remove it", path.display())]
    Refused { path: PathBuf, message: &'static str },
    #[error("the new certificate in {} is not taken; remove it", path.display())]
    Unusable { path: PathBuf, source: PairProblem },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A pair that was found and is kept now: its file may go once whoever needs it has it.
#[derive(Debug)]
pub(crate) struct Taken {
    folder: OwnedFd,
    name: &'static str,
    inode: u64,
}

impl Taken {
    /// Removes the file, unless it is another one by now.
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

/// Keeps the pair that node-status has left, where there is one that goes before the one in force.
pub(crate) fn take(
    config: &Config,
    settings: &Certificates,
    kind: CertificateKind,
    now: i64,
) -> Result<Option<Taken>, TakeError> {
    let path = config.paths.issued_certificates().join(kind.issued());
    let read = |source: io::Error| TakeError::Read { path: path.clone(), source };
    let refused = |message| TakeError::Refused { path: path.clone(), message };
    let Some((folder, file)) = opened(&config.paths.state(ServiceName::NodeStatus), kind).map_err(read)?
    else {
        return Ok(None);
    };
    let meta = fstat(&file).map_err(|error| read(error.into()))?;
    let owner = config.uid_of(ServiceName::NodeStatus).unwrap_or_else(|| rustix::process::geteuid().as_raw());
    if FileType::from_raw_mode(meta.st_mode) != FileType::RegularFile {
        return Err(refused("it is no regular file"));
    }
    if meta.st_uid != owner {
        return Err(refused("it is not node-status's own"));
    }
    if meta.st_nlink != 1 {
        return Err(refused("it has a second name"));
    }
    let mut pem = Vec::new();
    File::from(file).take(LONGEST + 1).read_to_end(&mut pem).map_err(read)?;
    if pem.len() as u64 > LONGEST {
        return Err(refused("it is too long"));
    }
    let pair = Pair::read(&pem).map_err(|source| TakeError::Unusable { path: path.clone(), source })?;
    if !pair.validity.holds(now) {
        return Err(refused("it has ended"));
    }
    let store = Store::of(settings, kind);
    // One in force that cannot be read is nobody's certificate any more; what is no link stays an error.
    let in_force = match store.current() {
        Err(StoreError::Read { .. } | StoreError::Unusable { .. }) => None,
        current => current?,
    };
    if goes_before(pair.validity, in_force.map(|pair| pair.validity), now) {
        store.put(&pair, now)?;
    }
    Ok(Some(Taken { folder, name: kind.issued(), inode: meta.st_ino }))
}

/// The folder and the file; `None` where there is none.
fn opened(state: &Path, kind: CertificateKind) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
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

    use super::super::pair::tests::made;
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

        /// Leaves a pair that began so many seconds ago; its certificates.
        fn leave(&self, age: i64, length: i64) -> String {
            let (own, key) = made("n", NOW - age, NOW - age + length);
            fs::write(self.path(), format!("{own}{key}")).unwrap();
            Pair::read(format!("{own}{key}").as_bytes()).unwrap().certificates
        }

        fn take(&self) -> Result<Option<Taken>, TakeError> {
            take(&self.config, &self.settings, CertificateKind::Client, NOW)
        }

        fn in_force(&self) -> Option<String> {
            let store = Store::of(&self.settings, CertificateKind::Client);
            store.current().unwrap().map(|pair| pair.certificates)
        }
    }

    #[test]
    fn a_newer_pair_is_kept_and_its_file_goes_when_it_is_told_to() {
        let scene = Scene::new();
        assert!(scene.take().unwrap().is_none());
        let first = scene.leave(10, 1000);
        let taken = scene.take().unwrap().unwrap();
        assert_eq!(scene.in_force(), Some(first.clone()));
        assert!(scene.path().exists(), "nobody else has it yet");
        taken.remove().unwrap();
        assert!(!scene.path().exists());
        // One that somebody has put there meanwhile stays.
        scene.leave(5, 1000);
        let taken = scene.take().unwrap().unwrap();
        let third = scene.leave(1, 1000);
        let replaced = scene.path().with_extension("new");
        fs::copy(scene.path(), &replaced).unwrap();
        fs::rename(replaced, scene.path()).unwrap();
        taken.remove().unwrap();
        assert!(scene.path().exists());
        scene.take().unwrap();
        assert_eq!(scene.in_force(), Some(third.clone()));
        scene.leave(500, 1000);
        scene.take().unwrap().unwrap().remove().unwrap();
        assert_eq!(scene.in_force(), Some(third), "an older one is not wanted");
    }

    #[test]
    fn what_is_no_plain_file_of_node_status_is_not_read() {
        let scene = Scene::new();
        let (own, key) = made("secret of root", NOW - 1, NOW + 1000);
        let secret = scene.dir.path().join("secret.pem");
        fs::write(&secret, format!("{own}{key}")).unwrap();
        let path = scene.path();
        let refused = |text: &str| {
            let error = keelson_service_kit::status::chain(&scene.take().unwrap_err());
            assert!(error.contains("certificates/client.pem") && error.contains(text), "{error}");
            assert_eq!(scene.in_force(), None);
        };
        symlink(&secret, &path).unwrap();
        refused("symbolic link");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&secret, &path).unwrap();
        refused("second name");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("no regular file");
        fs::remove_dir(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        refused("no regular file");
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
    fn a_file_of_another_user_is_not_read() {
        assert!(rustix::process::geteuid().is_root(), "this test changes owners; run it as root");
        let mut scene = Scene::new();
        scene.config.users.uids.insert("node-status".into(), 64_206);
        let certificates = scene.leave(1, 1000);
        let error = scene.take().unwrap_err().to_string();
        assert!(error.contains("not node-status's own"), "{error}");
        chown(scene.path(), Some(64_206), None).unwrap();
        scene.take().unwrap().unwrap();
        assert_eq!(scene.in_force(), Some(certificates));
    }

    #[test]
    fn a_bad_pair_is_told_and_left_where_it_is() {
        let scene = Scene::new();
        for (content, text) in [
            ("no pair".to_owned(), "it has no certificate"),
            (
                format!("{}{}", made("a", 0, NOW + 9).0, made("b", 0, NOW + 9).1),
                "its key is not that of its certificate",
            ),
            (
                {
                    let (own, key) = made("a", 0, NOW - 1);
                    format!("{own}{key}")
                },
                "it has ended",
            ),
            ("x".repeat(300 << 10), "it is too long"),
        ] {
            fs::write(scene.path(), content).unwrap();
            let error = keelson_service_kit::status::chain(&scene.take().unwrap_err());
            assert!(error.contains(text), "{error}");
            assert!(scene.in_force().is_none() && scene.path().exists());
        }
    }
}
