//! Files that belong to root and are read by services that run without it: the certificates, key and password by which the
//! node names itself to etcd, the kubeconfig with all that it names, and the certificates of TLS on the kubelet API. The headers
//! of requests for manifests are handed over in the same way.
//!
//! Each service that needs one gets a copy of its own, and a new one when the file changes.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{
    ApiFile, ApiTls, Certificates, Config, ControlPlane, EtcdFile, Kubernetes, Paths, ServiceName, UrlHeaders,
};
use keelson_init_core::{Document, KubeconfigProblem, flatten_kubeconfig, set_exec_credential};
use keelson_service_kit::{Context, LoopHandle};
use serde_json::Value;

use crate::certificates::{self, Client, NotUsed};
use crate::exec_login::{Credentials, Login};
use crate::yaml;

/// Who speaks to the control plane.
pub(crate) const TO_CONTROL_PLANE: [ServiceName; 2] = [ServiceName::PodConfig, ServiceName::NodeStatus];
/// How often it is looked whether a file has changed.
const LOOK: Duration = LoopHandle::HEARTBEAT;
/// The same while a certificate is asked for that is not there yet (node-and-api.md §6.5), or a kubeconfig does not do.
const LOOK_AWAITING: Duration = Duration::from_secs(1);
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
    /// Its user logs in by a program that has not answered yet.
    #[error("invalid kubeconfig: {}: {field}: {command} has given no credential yet", path.display())]
    Login { path: PathBuf, field: String, command: String },
    /// It is no YAML.
    #[error("invalid kubeconfig")]
    Yaml(#[source] yaml::ReadError),
    /// The kubeconfig that names a certificate to be cannot be written.
    #[error("cannot write the kubeconfig {}", path.display())]
    WriteKubeconfig { path: PathBuf, source: io::Error },
    /// A certificate that node-status has left is not taken.
    #[error(transparent)]
    Take(certificates::TakeError),
    /// The certificate of the kubelet API cannot be read.
    #[error(transparent)]
    Serving(certificates::StoreError),
    /// Of a kubelet's own certificate and its key one is missing.
    #[error(
        "certificate and key must be supplied as a pair: of {} and {} only one is there; add the other one, or remove it, and \
         the agent signs a certificate itself",
        certificate.display(), key.display()
    )]
    HalfAPair { certificate: PathBuf, key: PathBuf },
    /// A certificate that was taken cannot be removed where it lay.
    #[error("cannot remove a certificate that was taken from the state folder of node-status")]
    Forget { source: io::Error },
    /// Its copy cannot be written.
    #[error("cannot write {} below the run dir; --run-dir names another one", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl HandoverError {
    /// Whether the agent does not start with it. Without a certificate that is asked for it does, and without a kubeconfig that
    /// does: static pods need none, and it may be put right while they run.
    pub(crate) fn ends_a_start(&self) -> bool {
        !self.is_of_kubeconfig() && !matches!(self, Self::Take(_) | Self::Serving(_) | Self::Forget { .. })
    }

    /// Whether there is nothing to name this node by to the API server, and it can be put right.
    pub(crate) fn is_of_kubeconfig(&self) -> bool {
        matches!(
            self,
            Self::Kubeconfig { .. } | Self::Login { .. } | Self::Yaml(_) | Self::WriteKubeconfig { .. }
        )
    }
}

/// A copy to be made.
struct Copy {
    service: ServiceName,
    name: &'static str,
    /// `None`: there is to be none.
    content: Option<Vec<u8>>,
}

/// The copies to be made of the files as they are, and what is wrong with the others, whose last good copies stay.
#[derive(Default)]
struct Copies {
    copies: Vec<Copy>,
    errors: Vec<HandoverError>,
    /// Something is asked for that is not there yet.
    awaits: bool,
    /// There is a bootstrap kubeconfig in use.
    bootstraps: bool,
    /// Why a kubelet's own pair is there and not used.
    left_alone: Option<String>,
}

impl Copies {
    fn add(&mut self, readers: &[ServiceName], name: &'static str, content: Option<Vec<u8>>) {
        self.copies.extend(readers.iter().map(|&service| Copy { service, name, content: content.clone() }));
    }

    fn add_file(
        &mut self,
        readers: &[ServiceName],
        (field, name): (&'static str, &'static str),
        path: Option<&Path>,
    ) {
        match path.map(|path| read(field, path)).transpose() {
            Ok(content) => self.add(readers, name, content),
            Err(error) => self.errors.push(error),
        }
    }

    fn of(config: &Config, now: i64) -> Self {
        let mut own = Self::default();
        let (etcd, kubernetes) = match &config.control_plane {
            ControlPlane::None => (None, None),
            ControlPlane::Etcd(etcd) => (Some(etcd), None),
            ControlPlane::Kubernetes(api) => (None, Some(api)),
        };
        for file in EtcdFile::ALL {
            let path = etcd.and_then(|etcd| file.of(etcd));
            own.add_file(&TO_CONTROL_PLANE, (file.field(), file.copy()), path);
        }
        own.kubeconfig(config, kubernetes, now);
        let tls = config.api.tls.as_ref();
        let asked_for = kubernetes.filter(|_| tls.is_some_and(|tls| tls.asked_for));
        let of_a_kubelet = tls.filter(|tls| tls.takes_a_kubelets_pair());
        for file in ApiFile::ALL {
            if (asked_for.is_none() && of_a_kubelet.is_none()) || file == ApiFile::ClientCa {
                let path = tls.and_then(|tls| file.of(tls));
                own.add_file(&[ServiceName::NodeApi], (file.field(), file.copy()), path);
            }
        }
        own.serving(config, asked_for);
        if let Some(tls) = of_a_kubelet {
            own.kubelets_pair(tls, now);
        }
        own
    }

    /// The pair that a kubelet has signed itself on this node, in one file. One that is of no use any more is left where it is.
    fn kubelets_pair(&mut self, tls: &ApiTls, now: i64) {
        let (pair, left_alone) = match certificates::of_a_kubelet(tls, now) {
            Ok(pair) => (pair, None),
            Err(NotUsed::Half(error)) => return self.errors.push(error),
            Err(NotUsed::LeftAlone(why)) => (None, Some(why)),
        };
        self.left_alone = left_alone;
        self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), pair.map(String::into_bytes));
        self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
    }

    fn kubeconfig(&mut self, config: &Config, api: Option<&Kubernetes>, now: i64) {
        let (own, bootstrap) = match api.map(|api| certificates::client(config, api, now)).transpose() {
            Ok(Some(Client::Own(flat))) => (Some(flat), None),
            Ok(Some(Client::Bootstrap(flat))) => (None, Some(flat)),
            Ok(None) => (None, None),
            Err(error) => return self.errors.push(error),
        };
        self.bootstraps = bootstrap.is_some();
        self.awaits |= self.bootstraps;
        let bytes = |flat: Value| flat.to_string().into_bytes();
        self.add(&TO_CONTROL_PLANE, Kubernetes::COPY, own.map(bytes));
        // Whoever only reads has no use for it.
        self.add(&[ServiceName::NodeStatus], Certificates::BOOTSTRAP_COPY, bootstrap.map(bytes));
    }

    fn serving(&mut self, config: &Config, api: Option<&Kubernetes>) {
        let (pair, error) =
            api.map(|api| certificates::serving(config, &api.certificates)).unwrap_or_default();
        self.errors.extend(error.map(HandoverError::Serving));
        let in_force = pair.as_ref().filter(|(_, asked_for)| *asked_for);
        self.awaits |= api.is_some() && in_force.is_none();
        let shown = in_force.map(|(pair, _)| pair.certificates.clone().into_bytes());
        self.add(&[ServiceName::NodeStatus], Certificates::SERVING_COPY, shown);
        if api.is_some() {
            let whole = pair.map(|(pair, _)| pair.pem().into_bytes());
            self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), whole);
            self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
        }
    }

    /// Makes the copies; the errors of those that cannot be made are added.
    fn make(&mut self, config: &Config) {
        for Copy { service, name, content } in std::mem::take(&mut self.copies) {
            let path = config.paths.credentials(service).join(name);
            let done = match &content {
                Some(content) => replace(&path, content, config.uid_of(service)),
                None => super::remove_if_there(&path),
            };
            self.errors.extend(done.err().map(|source| HandoverError::Write { path, source }));
        }
    }
}

/// Whether there is any file to be handed over.
pub(crate) fn any(config: &Config) -> bool {
    let tls = config.api.tls.as_ref();
    tls.is_some()
        || match &config.control_plane {
            ControlPlane::None => false,
            ControlPlane::Etcd(etcd) => EtcdFile::ALL.into_iter().any(|file| file.of(etcd).is_some()),
            ControlPlane::Kubernetes(_) => true,
        }
}

/// What cannot be read, a line for each.
pub(crate) fn missing(config: &Config) -> Vec<String> {
    let copies = Copies::of(config, now_unix_seconds());
    let fatal = copies.errors.iter().filter(|error| error.ends_a_start());
    fatal.map(|error| keelson_service_kit::status::chain(error)).collect()
}

/// A digest of what the files hold now that are handed over, and of what is wrong with them.
pub(crate) fn digest(config: &Config) -> u64 {
    let copies = Copies::of(config, now_unix_seconds());
    let mut hasher = DefaultHasher::new();
    for Copy { service, name, content } in &copies.copies {
        (service.as_str(), name, content).hash(&mut hasher);
    }
    for error in &copies.errors {
        keelson_service_kit::status::chain(error).hash(&mut hasher);
    }
    hasher.finish()
}

fn now_unix_seconds() -> i64 {
    keelson_service_kit::now_unix_nanos() / 1_000_000_000
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, HandoverError> {
    fs::read(path).map_err(|source| HandoverError::Read { path: path.to_owned(), field, source })
}

/// A kubeconfig as it stands in the file that `flag` names.
pub(crate) fn kubeconfig_document(flag: &'static str, path: &Path) -> Result<Document, HandoverError> {
    yaml::read(flag, path).map_err(HandoverError::Yaml)
}

/// A kubeconfig with the content of every file that it names, and the program by which its user logs in.
fn flat_and_login(flag: &'static str, path: &Path) -> Result<(Value, Option<Login>), HandoverError> {
    let document = kubeconfig_document(flag, path)?;
    let mut from_disk = |path: &Path| fs::read(path).map_err(|error| error.to_string());
    let flat = flatten_kubeconfig(&document.root, Path::new(&document.folder), &mut from_disk)
        .map_err(|source| HandoverError::Kubeconfig { path: path.to_owned(), source })?;
    let login = Login::of(&flat, &document.root);
    Ok((flat.document, login))
}

/// The program by which the user of a kubeconfig logs in; `None`: there is none.
pub(crate) fn login(flag: &'static str, path: &Path) -> Result<Option<Login>, HandoverError> {
    flat_and_login(flag, path).map(|(_, login)| login)
}

/// A kubeconfig with the content of every file that it names, and with the credential of its program.
pub(crate) fn flattened(paths: &Paths, flag: &'static str, path: &Path) -> Result<Value, HandoverError> {
    let (mut flat, login) = flat_and_login(flag, path)?;
    let Some(login) = login else { return Ok(flat) };
    let Some((credential, generation)) = Credentials::read(paths).of(&login) else {
        let (field, command) = (login.exec.field, login.exec.command);
        return Err(HandoverError::Login { path: path.to_owned(), field, command });
    };
    set_exec_credential(&mut flat, &credential, &generation);
    Ok(flat)
}

/// What became of a look at the files.
#[derive(Debug)]
pub(crate) struct Looked {
    /// What is wrong; everything else is as it should be.
    pub(crate) errors: Vec<HandoverError>,
    /// Something is not there yet that may come at any moment: a certificate that is asked for, or a kubeconfig that does.
    pub(crate) awaits: bool,
    /// Why a kubelet's own pair is there and not used: nothing is wrong with that.
    pub(crate) left_alone: Option<String>,
}

impl Looked {
    /// A line for each error.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.errors.iter().map(|error| keelson_service_kit::status::chain(error)).collect()
    }

    /// Shows what is wrong as a condition.
    pub(crate) fn show(&self, context: &Context) {
        let lines = self.lines();
        let told = if lines.is_empty() {
            Ok(())
        } else {
            Err(format!("{}; the last good copy, where there is one, is used until then", lines.join("; ")))
        };
        context.progress.condition(CONDITION, told);
    }
}

/// Makes the copies what the files are, with new certificates where node-status has left some. A copy that nobody needs any
/// more is removed.
pub(crate) fn hand_over(config: &Config) -> Looked {
    let now = now_unix_seconds();
    let (mut taken, mut errors) = (Vec::new(), Vec::new());
    if let ControlPlane::Kubernetes(api) = &config.control_plane {
        let (found, refused) = certificates::take(config, api, now);
        taken = found;
        errors.extend(refused.into_iter().map(HandoverError::Take));
    }
    let mut copies = Copies::of(config, now);
    if let (ControlPlane::Kubernetes(api), true) = (&config.control_plane, copies.bootstraps) {
        match certificates::write_kubeconfig(api) {
            // It may lead to a pair that is there already.
            Ok(()) => copies = Copies::of(config, now),
            Err(error) => errors.push(error),
        }
    }
    copies.make(config);
    if copies.errors.is_empty() {
        for taken in taken {
            let gone = taken.remove().map_err(|source| HandoverError::Forget { source });
            errors.extend(gone.err());
        }
    }
    errors.append(&mut copies.errors);
    let awaits = copies.awaits || errors.iter().any(HandoverError::is_of_kubeconfig);
    Looked { errors, awaits, left_alone: copies.left_alone }
}

/// Makes what pod-config knows of headers what `config` says; without a URL there are none. They stand in no file of their own,
/// and so they change with the configuration alone.
pub(crate) fn hand_over_headers(config: &Config) -> Result<(), HandoverError> {
    let path = config.paths.credentials(ServiceName::PodConfig).join(UrlHeaders::COPY);
    let headers = &config.sources.static_pod_url_headers;
    let done = if config.sources.static_pod_url.is_none() || headers.0.is_empty() {
        super::remove_if_there(&path)
    } else {
        replace(&path, &headers.encode(), config.uid_of(ServiceName::PodConfig))
    };
    done.map_err(|source| HandoverError::Write { path, source })
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

/// Keeps the copies as the files are, until the shutdown; `looked`: what became of them at the start.
pub(crate) async fn run(context: Context, looked: Looked) {
    let Looked { mut awaits, mut left_alone, .. } = looked;
    let turn = context.progress.register("handed-files");
    loop {
        turn.tick();
        // Cancel-safe: nothing is taken while waiting.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(if awaits { LOOK_AWAITING } else { LOOK }) => {}
        }
        let config = std::sync::Arc::clone(&context.config);
        let Ok(looked) = tokio::task::spawn_blocking(move || hand_over(&config)).await else { return };
        looked.show(&context);
        awaits = looked.awaits;
        if left_alone != looked.left_alone {
            if let Some(why) = &looked.left_alone {
                tracing::warn!("{why}");
            }
            left_alone = looked.left_alone;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use keelson_config::{ApiTls, Etcd};

    use super::*;

    fn good(looked: Looked) {
        assert!(looked.errors.is_empty() && !looked.awaits, "{looked:?}");
    }

    fn error_of(mut looked: Looked) -> HandoverError {
        assert_eq!(looked.errors.len(), 1, "{looked:?}");
        looked.errors.remove(0)
    }

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
            good(hand_over(&config));
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
        good(hand_over(&config));
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
        let said = |config: &Config| {
            assert_eq!(missing(config), Vec::<String>::new(), "it ends no start");
            let looked = hand_over(config);
            assert!(looked.awaits, "it may be put right at any moment");
            keelson_service_kit::status::chain(&error_of(looked))
        };
        let line = said(&config);
        assert!(
            line.starts_with("invalid kubeconfig: cannot read") && line.contains("kubelet.conf"),
            "{line}"
        );
        let file = "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h'}}]\n\
                    users: [{name: u, user: {tokenFile: token}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
        fs::write(&path, file).unwrap();
        let line = said(&config);
        assert!(line.contains("users[0].user.tokenFile: cannot read"), "{line}");
        for content in ["one", "two"] {
            fs::write(&token, content).unwrap();
            good(hand_over(&config));
            let copy = fs::read_to_string(api.handed_over(&folder)).unwrap();
            assert!(copy.contains(&format!("\"token\":\"{content}\"")), "{copy}");
        }
        fs::write(&path, "current-context: [").unwrap();
        assert!(said(&config).starts_with("invalid kubeconfig: "));
        assert!(api.handed_over(&folder).exists(), "the last good one stays");
        config.control_plane = ControlPlane::None;
        good(hand_over(&config));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn headers_of_the_manifest_url_are_pod_configs_alone_and_go_with_the_url() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::PodConfig);
        fs::create_dir_all(&folder).unwrap();
        config.sources.static_pod_url = Some("https://h".into());
        for value in ["one", "two"] {
            config.sources.static_pod_url_headers = UrlHeaders(vec![("X".into(), value.into())]);
            hand_over_headers(&config).unwrap();
            assert_eq!(UrlHeaders::handed_over(&folder).unwrap(), config.sources.static_pod_url_headers);
            let mode = fs::metadata(folder.join(UrlHeaders::COPY)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o400);
        }
        config.sources.static_pod_url = None;
        hand_over_headers(&config).unwrap();
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
        good(hand_over(&config));
        assert_eq!(fs::read_to_string(folder.join("client-ca.pem")).unwrap(), "ca");
        config.api.tls = None;
        good(hand_over(&config));
        assert!(!folder.join("client-ca.pem").exists() && !any(&config));
    }

    #[test]
    fn a_pair_of_a_kubelet_is_handed_over_in_one_file_and_anew_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&folder).unwrap();
        let mut tls = ApiTls { cert_dir: dir.path().join("pki"), ..ApiTls::default() };
        config.api.tls = Some(tls.clone());
        let copy = || fs::read_to_string(folder.join("tls-cert.pem")).ok();
        good(hand_over(&config));
        assert_eq!(copy(), None, "there is no folder");

        fs::create_dir(&tls.cert_dir).unwrap();
        let [certificate, key] = ApiTls::OF_A_KUBELET.map(|name| tls.cert_dir.join(name));
        let now = now_unix_seconds();
        let write = |until: i64| {
            let pair = certificates::tests_pair(now - 100, until);
            fs::write(&certificate, &pair.0).unwrap();
            fs::write(&key, &pair.1).unwrap();
        };
        let mut before = None;
        for _ in 0..2 {
            write(now + 1000);
            good(hand_over(&config));
            let now_there = copy();
            assert!(now_there.as_ref().unwrap().contains("PRIVATE KEY") && now_there != before);
            let own = tls.handed_over(&folder);
            assert_eq!(
                (own.cert_file.clone(), own.key_file),
                (Some(folder.join("tls-cert.pem")), own.cert_file)
            );
            before = now_there;
        }

        fs::remove_file(&key).unwrap();
        let lines = missing(&config).join("\n");
        assert!(lines.starts_with("certificate and key must be supplied as a pair"), "{lines}");
        assert!(error_of(hand_over(&config)).ends_a_start());
        assert_eq!(copy(), before, "the last good one stays");

        for (until, other_key, why) in
            [(now - 1, false, "has ended"), (now + 1000, true, "is not that of its")]
        {
            write(until);
            if other_key {
                fs::write(&key, certificates::tests_pair(now, until).1).unwrap();
            }
            let looked = hand_over(&config);
            assert!(
                looked.errors.is_empty() && looked.left_alone.as_ref().unwrap().contains(why),
                "{looked:?}"
            );
            assert_eq!(copy(), None);
            assert!(certificate.exists() && missing(&config).is_empty(), "it is left where it is");
        }
        write(now + 1000);
        tls.asked_for = true;
        config.api.tls = Some(tls.clone());
        good(hand_over(&config));
        assert_eq!(copy(), None, "another one is asked for");
        (tls.asked_for, tls.cert_file, tls.key_file) = (false, Some(certificate.clone()), Some(key.clone()));
        fs::write(&key, "key").unwrap();
        config.api.tls = Some(tls);
        good(hand_over(&config));
        assert_eq!(fs::read_to_string(folder.join("tls-key.pem")).unwrap(), "key", "named, and as it is");
    }
}
