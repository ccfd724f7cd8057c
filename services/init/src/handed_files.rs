//! Files that belong to root and are read by services that run without it: the certificates, key and password by which the
//! node names itself to etcd, the kubeconfig with all that it names, and the certificates of TLS on the kubelet API.
//!
//! Each service that needs one gets a copy of its own, and a new one when the file changes.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{ApiFile, Config, ControlPlane, EtcdFile, Kubernetes, ServiceName};
use keelson_init_core::{KubeconfigProblem, flatten_kubeconfig};
use keelson_service_kit::{Context, LoopHandle};

use crate::yaml;

/// Who speaks to the control plane.
const TO_CONTROL_PLANE: [ServiceName; 2] = [ServiceName::PodConfig, ServiceName::NodeStatus];
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
    /// It is no kubeconfig, or names what cannot be had.
    #[error("invalid kubeconfig: {}", path.display())]
    Kubeconfig { path: PathBuf, source: KubeconfigProblem },
    /// It is no YAML.
    #[error("invalid kubeconfig")]
    Yaml(#[source] yaml::ReadError),
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
    /// What is handed over of it.
    read: fn(&'static str, &Path) -> Result<Vec<u8>, HandoverError>,
}

fn handed(config: &Config) -> Vec<Handed<'_>> {
    let (etcd, kubeconfig) = match &config.control_plane {
        ControlPlane::None => (None, None),
        ControlPlane::Etcd(etcd) => (Some(etcd), None),
        ControlPlane::Kubernetes(api) => (None, Some(api.kubeconfig.as_path())),
    };
    let of_etcd = EtcdFile::ALL.map(|file| Handed {
        readers: &TO_CONTROL_PLANE,
        field: file.field(),
        copy: file.copy(),
        path: etcd.and_then(|etcd| file.of(etcd)),
        read,
    });
    let of_kubernetes = Handed {
        readers: &TO_CONTROL_PLANE,
        field: "--kubeconfig",
        copy: Kubernetes::COPY,
        path: kubeconfig,
        read: kubeconfig_whole,
    };
    let of_api = ApiFile::ALL.map(|file| Handed {
        readers: &[ServiceName::NodeApi],
        field: file.field(),
        copy: file.copy(),
        path: config.api.tls.as_ref().and_then(|tls| file.of(tls)),
        read,
    });
    of_etcd.into_iter().chain([of_kubernetes]).chain(of_api).collect()
}

/// Whether there is any file to be handed over.
pub(crate) fn any(config: &Config) -> bool {
    handed(config).iter().any(|file| file.path.is_some())
}

/// What cannot be read, a line for each.
pub(crate) fn missing(config: &Config) -> Vec<String> {
    let errors = handed(config).into_iter().filter_map(|file| (file.read)(file.field, file.path?).err());
    errors.map(|error| keelson_service_kit::status::chain(&error)).collect()
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, HandoverError> {
    fs::read(path).map_err(|source| HandoverError::Read { path: path.to_owned(), field, source })
}

/// The kubeconfig with the content of every file that it names, as JSON.
fn kubeconfig_whole(flag: &'static str, path: &Path) -> Result<Vec<u8>, HandoverError> {
    let document = yaml::read(flag, path).map_err(HandoverError::Yaml)?;
    let mut from_disk = |path: &Path| fs::read(path).map_err(|error| error.to_string());
    let whole = flatten_kubeconfig(&document.root, Path::new(&document.folder), &mut from_disk)
        .map_err(|source| HandoverError::Kubeconfig { path: path.to_owned(), source })?;
    Ok(whole.to_string().into_bytes())
}

/// Makes the copies what the files are. A copy that nobody needs any more is removed.
pub(crate) fn hand_over(config: &Config) -> Result<(), HandoverError> {
    for file in handed(config) {
        let content = file.path.map(|path| (file.read)(file.field, path)).transpose()?;
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
        for service in TO_CONTROL_PLANE {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
        }
        let missing = missing(&config);
        assert!(missing[0].contains("node.key that etcd.keyFile names: No such file"), "{missing:?}");

        for content in ["one", "two"] {
            fs::write(&key, content).unwrap();
            hand_over(&config).unwrap();
            assert!(any(&config));
            for service in TO_CONTROL_PLANE {
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
    fn a_kubeconfig_is_handed_over_with_what_it_names_and_anew_when_that_changes() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::PodConfig);
        for service in TO_CONTROL_PLANE {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
        }
        let (path, token) = (dir.path().join("kubelet.conf"), dir.path().join("token"));
        let api = Kubernetes::of(path.clone());
        config.control_plane = ControlPlane::Kubernetes(api.clone());
        let lines = missing(&config).join("\n");
        assert!(
            lines.starts_with("invalid kubeconfig: cannot read") && lines.contains("kubelet.conf"),
            "{lines}"
        );
        let file = "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h'}}]\n\
                    users: [{name: u, user: {tokenFile: token}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
        fs::write(&path, file).unwrap();
        let lines = missing(&config).join("\n");
        assert!(lines.contains("users[0].user.tokenFile: cannot read"), "{lines}");
        for content in ["one", "two"] {
            fs::write(&token, content).unwrap();
            hand_over(&config).unwrap();
            let copy = fs::read_to_string(api.handed_over(&folder)).unwrap();
            assert!(copy.contains(&format!("\"token\":\"{content}\"")), "{copy}");
        }
        fs::write(&path, "current-context: [").unwrap();
        let error = hand_over(&config).unwrap_err();
        assert!(keelson_service_kit::status::chain(&error).starts_with("invalid kubeconfig: "), "{error}");
        assert!(api.handed_over(&folder).exists(), "the last good one stays");
        config.control_plane = ControlPlane::None;
        hand_over(&config).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
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
