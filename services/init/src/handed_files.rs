//! Files that belong to root and are read by services that run without it: the certificates, key and password by which the
//! node names itself to etcd, and those of TLS on the kubelet API.
//!
//! Each service that needs one gets a copy of its own, and a new one when the file changes.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{ApiFile, Config, ControlPlane, EtcdFile, ServiceName};
use keelson_service_kit::{Context, LoopHandle};

/// Who speaks to etcd.
const READERS_OF_ETCD: [ServiceName; 2] = [ServiceName::PodConfig, ServiceName::NodeStatus];
/// How often it is looked whether a file has changed.
const LOOK: Duration = LoopHandle::HEARTBEAT;
/// The condition that says whether the copies are as the files.
const CONDITION: &str = "handed files";

/// A file that cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandoverError {
    /// It cannot be read.
    #[error("cannot read {} that {field} names", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    /// Its copy cannot be written.
    #[error("cannot write {} below the run dir; --run-dir names another one", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// A file, and who gets a copy of it.
struct Handed<'a> {
    readers: &'static [ServiceName],
    /// The setting that names it.
    field: &'static str,
    /// The name of the copy.
    copy: &'static str,
    /// Where it is; `None`: nowhere, and no copy is to be.
    path: Option<&'a Path>,
}

fn handed(config: &Config) -> Vec<Handed<'_>> {
    let etcd = match &config.control_plane {
        ControlPlane::None => None,
        ControlPlane::Etcd(etcd) => Some(etcd),
    };
    let of_etcd = EtcdFile::ALL.map(|file| Handed {
        readers: &READERS_OF_ETCD,
        field: file.field(),
        copy: file.copy(),
        path: etcd.and_then(|etcd| file.of(etcd)),
    });
    let of_api = ApiFile::ALL.map(|file| Handed {
        readers: &[ServiceName::NodeApi],
        field: file.field(),
        copy: file.copy(),
        path: config.api.tls.as_ref().and_then(|tls| file.of(tls)),
    });
    of_etcd.into_iter().chain(of_api).collect()
}

/// Whether there is any file to be handed over.
pub(crate) fn any(config: &Config) -> bool {
    handed(config).iter().any(|file| file.path.is_some())
}

/// What cannot be read, a line for each.
pub(crate) fn missing(config: &Config) -> Vec<String> {
    let errors = handed(config).into_iter().filter_map(|file| read(file.field, file.path?).err());
    errors.map(|error| keelson_service_kit::status::chain(&error)).collect()
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, HandoverError> {
    fs::read(path).map_err(|source| HandoverError::Read { path: path.to_owned(), field, source })
}

/// Makes the copies what the files are. A copy that nobody needs any more is removed.
pub(crate) fn hand_over(config: &Config) -> Result<(), HandoverError> {
    for file in handed(config) {
        let content = file.path.map(|path| read(file.field, path)).transpose()?;
        for &service in file.readers {
            let path = config.paths.credentials(service).join(file.copy);
            let done = match &content {
                Some(content) => replace(&path, content, config.uid_of(service)),
                None => super::remove_if_there(&path),
            };
            done.map_err(|source| HandoverError::Write { path, source })?;
        }
    }
    Ok(())
}

/// Replaces a file by rename, mode 0400, unless it is so already.
fn replace(path: &Path, content: &[u8], uid: Option<u32>) -> io::Result<()> {
    if fs::read(path).is_ok_and(|now| now == content) {
        return Ok(());
    }
    let temporary = path.with_extension("new");
    super::remove_if_there(&temporary)?;
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(&temporary)?;
    file.write_all(content)?;
    if let Some(uid) = uid {
        chown(&temporary, Some(uid), None)?;
    }
    fs::rename(temporary, path)
}

/// Keeps the copies as the files are, until the shutdown.
pub(crate) async fn run(context: Context) {
    let turn = context.progress.register("handed-files");
    loop {
        turn.tick();
        // Cancel-safe: nothing is taken while waiting.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let config = std::sync::Arc::clone(&context.config);
        let done = tokio::task::spawn_blocking(move || hand_over(&config)).await;
        let told = match done {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                let text = keelson_service_kit::status::chain(&error);
                Err(format!("{text}; the last good copy is used until it can be read"))
            }
            Err(_) => return,
        };
        context.progress.condition(CONDITION, told);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use keelson_config::{ApiTls, Etcd};

    use super::*;

    #[test]
    fn each_reader_gets_a_copy_of_its_own_and_a_new_one_when_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("node.key");
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let mut settings = Etcd::plain(vec!["http://h:1".into()]);
        settings.key_file = Some(key.clone());
        config.control_plane = ControlPlane::Etcd(settings.clone());
        for service in READERS_OF_ETCD {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
        }
        let missing = missing(&config);
        assert!(missing[0].contains("node.key that etcd.keyFile names: No such file"), "{missing:?}");

        for content in ["one", "two"] {
            fs::write(&key, content).unwrap();
            hand_over(&config).unwrap();
            assert!(any(&config));
            for service in READERS_OF_ETCD {
                let folder = config.paths.credentials(service);
                let copy = settings.handed_over(&folder).key_file.unwrap();
                assert_eq!(copy, folder.join("etcd-key.pem"));
                assert_eq!(fs::read_to_string(&copy).unwrap(), content);
                assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o400);
            }
        }
        config.control_plane = ControlPlane::None;
        hand_over(&config).unwrap();
        let folder = config.paths.credentials(ServiceName::PodConfig);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(settings.handed_over(&folder).key_file.unwrap(), key, "without init the file itself");
    }

    #[test]
    fn the_certificates_of_the_api_are_node_apis_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&folder).unwrap();
        let ca = dir.path().join("ca.crt");
        config.api.tls = Some(ApiTls::with_client_ca(ca.clone()));
        let missing = missing(&config);
        assert!(
            missing[0].contains("that authentication.x509.clientCAFile names: No such file"),
            "{missing:?}"
        );
        fs::write(&ca, "ca").unwrap();
        hand_over(&config).unwrap();
        assert_eq!(fs::read_to_string(folder.join("client-ca.pem")).unwrap(), "ca");
        config.api.tls = None;
        hand_over(&config).unwrap();
        assert!(!folder.join("client-ca.pem").exists() && !any(&config));
    }
}
