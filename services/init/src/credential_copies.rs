//! Copies files that only root can read for services that run without root: the CA, certificate, key and password for etcd,
//! the kubeconfig with the files that it names, and the TLS certificates of the kubelet API. The request headers for
//! manifests are copied in the same way.
//!
//! Each service gets its own copy, and a new one when the file changes.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use keelson_config::{
    ApiFile, ApiTls, Certificates, Config, ControlPlane, EtcdFile, Kubernetes, ServiceName, UrlHeaders,
};
use keelson_service_kit::{Context, LoopHandle};
use serde_json::Value;

use crate::certificates::{self, ClientKubeconfig, UnusedPair};
use crate::kubeconfig::KubeconfigFileError;

/// The services that connect to the control plane.
pub(crate) const CONTROL_PLANE_CLIENTS: [ServiceName; 2] = [ServiceName::PodConfig, ServiceName::NodeStatus];
/// How often the files are checked for changes.
const CHECK_INTERVAL: Duration = LoopHandle::HEARTBEAT;
/// The interval while a requested certificate is missing (node-and-api.md §6.5), or a kubeconfig is invalid.
const PENDING_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The condition that says whether the copies are up to date.
const CONDITION: &str = "credential copies";

/// A file that cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// It cannot be read.
    #[error("cannot read {} that {field} names", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    /// The kubeconfig cannot be used or written.
    #[error(transparent)]
    Kubeconfig(#[from] KubeconfigFileError),
    /// A certificate from node-status is not accepted.
    #[error(transparent)]
    Collect(certificates::CollectError),
    /// The certificate of the kubelet API cannot be read.
    #[error(transparent)]
    Serving(certificates::StoreError),
    /// Only one file of a kubelet's own certificate and key exists.
    #[error(
        "certificate and key must be supplied as a pair: only one of {} and {} exists; add the other one, or remove it, and \
         the agent signs a certificate itself",
        certificate.display(), key.display()
    )]
    IncompletePair { certificate: PathBuf, key: PathBuf },
    /// A collected certificate cannot be removed from its original folder.
    #[error("cannot remove a collected certificate from the state folder of node-status")]
    RemoveCollected { source: io::Error },
    /// The copy cannot be written.
    #[error("cannot write {} below the run dir; set another one with --run-dir", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl CopyError {
    /// Whether the agent must not start with this error. It starts without a requested certificate and without a valid
    /// kubeconfig: static pods need neither, and both may be fixed while they run.
    pub(crate) fn prevents_start(&self) -> bool {
        !self.is_kubeconfig_error()
            && !matches!(self, Self::Collect(_) | Self::Serving(_) | Self::RemoveCollected { .. })
    }

    /// Whether the kubeconfig is invalid or incomplete, which can be fixed at any time.
    pub(crate) fn is_kubeconfig_error(&self) -> bool {
        matches!(self, Self::Kubeconfig(_))
    }
}

/// A copy to write.
struct CredentialCopy {
    service: ServiceName,
    name: &'static str,
    /// `None`: the copy must not exist.
    content: Option<Vec<u8>>,
}

/// The copies to write for the current files, and the errors of the others, whose last valid copies are kept.
#[derive(Default)]
struct CopySet {
    copies: Vec<CredentialCopy>,
    errors: Vec<CopyError>,
    /// Whether a requested certificate is missing.
    is_pending: bool,
    /// Whether the bootstrap kubeconfig is in use.
    uses_bootstrap: bool,
    /// Why a kubelet's own pair is not used.
    unused_pair: Option<String>,
}

impl CopySet {
    fn add(&mut self, readers: &[ServiceName], name: &'static str, content: Option<Vec<u8>>) {
        self.copies.extend(readers.iter().map(|&service| CredentialCopy {
            service,
            name,
            content: content.clone(),
        }));
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
        let mut set = Self::default();
        let (etcd, kubernetes) = match &config.control_plane {
            ControlPlane::None => (None, None),
            ControlPlane::Etcd(etcd) => (Some(etcd), None),
            ControlPlane::Kubernetes(api) => (None, Some(api)),
        };
        for file in EtcdFile::ALL {
            let path = etcd.and_then(|etcd| file.of(etcd));
            set.add_file(&CONTROL_PLANE_CLIENTS, (file.field(), file.copy()), path);
        }
        set.add_kubeconfig(config, kubernetes, now);
        let tls = config.api.tls.as_ref();
        let asked_for = kubernetes.filter(|_| tls.is_some_and(|tls| tls.asked_for));
        let self_signed_pair = tls.filter(|tls| tls.takes_a_kubelets_pair());
        for file in ApiFile::ALL {
            if (asked_for.is_none() && self_signed_pair.is_none()) || file == ApiFile::ClientCa {
                let path = tls.and_then(|tls| file.of(tls));
                set.add_file(&[ServiceName::NodeApi], (file.field(), file.copy()), path);
            }
        }
        set.add_serving(config, asked_for);
        if let Some(tls) = self_signed_pair {
            set.add_kubelets_pair(tls, now);
        }
        set
    }

    /// Adds the pair that a kubelet signed itself on this node, as one file. An unusable pair is ignored.
    fn add_kubelets_pair(&mut self, tls: &ApiTls, now: i64) {
        let (pair, unused_pair) = match certificates::self_signed_pair(tls, now) {
            Ok(pair) => (pair, None),
            Err(UnusedPair::Incomplete { certificate, key }) => {
                return self.errors.push(CopyError::IncompletePair { certificate, key });
            }
            Err(UnusedPair::Unusable(why)) => (None, Some(why)),
        };
        self.unused_pair = unused_pair;
        self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), pair.map(String::into_bytes));
        self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
    }

    fn add_kubeconfig(&mut self, config: &Config, api: Option<&Kubernetes>, now: i64) {
        let (own, bootstrap) =
            match api.map(|api| certificates::client_kubeconfig(config, api, now)).transpose() {
                Ok(Some(ClientKubeconfig::Own(flat))) => (Some(flat), None),
                Ok(Some(ClientKubeconfig::Bootstrap(flat))) => (None, Some(flat)),
                Ok(None) => (None, None),
                Err(error) => return self.errors.push(error.into()),
            };
        self.uses_bootstrap = bootstrap.is_some();
        self.is_pending |= self.uses_bootstrap;
        let bytes = |flat: Value| flat.to_string().into_bytes();
        self.add(&CONTROL_PLANE_CLIENTS, Kubernetes::COPY, own.map(bytes));
        // Only node-status needs it.
        self.add(&[ServiceName::NodeStatus], Certificates::BOOTSTRAP_COPY, bootstrap.map(bytes));
    }

    fn add_serving(&mut self, config: &Config, api: Option<&Kubernetes>) {
        let (pair, error) =
            api.map(|api| certificates::serving(config, &api.certificates)).unwrap_or_default();
        self.errors.extend(error.map(CopyError::Serving));
        let issued = pair.as_ref().filter(|(_, asked_for)| *asked_for);
        self.is_pending |= api.is_some() && issued.is_none();
        let certificates_only = issued.map(|(pair, _)| pair.certificates.clone().into_bytes());
        self.add(&[ServiceName::NodeStatus], Certificates::SERVING_COPY, certificates_only);
        if api.is_some() {
            let whole = pair.map(|(pair, _)| pair.pem().into_bytes());
            self.add(&[ServiceName::NodeApi], ApiFile::Cert.copy(), whole);
            self.add(&[ServiceName::NodeApi], ApiFile::Key.copy(), None);
        }
    }

    /// Writes the copies and adds the errors.
    fn write(&mut self, config: &Config) {
        for CredentialCopy { service, name, content } in std::mem::take(&mut self.copies) {
            let path = config.paths.credentials(service).join(name);
            let done = match &content {
                Some(content) => replace(&path, content, config.uid_of(service)),
                None => super::remove_if_exists(&path),
            };
            self.errors.extend(done.err().map(|source| CopyError::Write { path, source }));
        }
    }
}

/// Whether any file has to be copied.
pub(crate) fn any_needed(config: &Config) -> bool {
    let tls = config.api.tls.as_ref();
    tls.is_some()
        || match &config.control_plane {
            ControlPlane::None => false,
            ControlPlane::Etcd(etcd) => EtcdFile::ALL.into_iter().any(|file| file.of(etcd).is_some()),
            ControlPlane::Kubernetes(_) => true,
        }
}

/// The errors that prevent a start, as lines.
pub(crate) fn startup_errors(config: &Config) -> Vec<String> {
    let copies = CopySet::of(config, now_unix_seconds());
    let fatal = copies.errors.iter().filter(|error| error.prevents_start());
    fatal.map(|error| keelson_service_kit::status::chain(error)).collect()
}

/// A digest of the current content of the files to copy, and of their errors.
pub(crate) fn digest(config: &Config) -> u64 {
    let copies = CopySet::of(config, now_unix_seconds());
    let mut hasher = DefaultHasher::new();
    for CredentialCopy { service, name, content } in &copies.copies {
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

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, CopyError> {
    fs::read(path).map_err(|source| CopyError::Read { path: path.to_owned(), field, source })
}

/// The result of an update of the copies.
#[derive(Debug)]
pub(crate) struct CopyReport {
    /// The errors; all other copies are up to date.
    pub(crate) errors: Vec<CopyError>,
    /// Whether something may become available at any time: a requested certificate, or a valid kubeconfig.
    pub(crate) is_pending: bool,
    /// Why a kubelet's own pair is not used; this is not an error.
    pub(crate) unused_pair: Option<String>,
}

impl CopyReport {
    /// A line for each error.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.errors.iter().map(|error| keelson_service_kit::status::chain(error)).collect()
    }

    /// Reports the errors as a condition.
    pub(crate) fn publish(&self, context: &Context) {
        let lines = self.lines();
        let condition = if lines.is_empty() {
            Ok(())
        } else {
            Err(format!("{}; the last valid copy, if there is one, stays in use", lines.join("; ")))
        };
        context.progress.condition(CONDITION, condition);
    }
}

/// Updates the copies, with new certificates if node-status left some, and removes unneeded copies.
pub(crate) fn update_copies(config: &Config) -> CopyReport {
    let now = now_unix_seconds();
    let (mut collected, mut errors) = (Vec::new(), Vec::new());
    if let ControlPlane::Kubernetes(api) = &config.control_plane {
        let (found, refused) = certificates::collect(config, api, now);
        collected = found;
        errors.extend(refused.into_iter().map(CopyError::Collect));
    }
    let mut copies = CopySet::of(config, now);
    if let (ControlPlane::Kubernetes(api), true) = (&config.control_plane, copies.uses_bootstrap) {
        match certificates::write_kubeconfig(api) {
            // It may refer to a pair that is stored already.
            Ok(()) => copies = CopySet::of(config, now),
            Err(error) => errors.push(error.into()),
        }
    }
    copies.write(config);
    if copies.errors.is_empty() {
        for collected in collected {
            let gone = collected.remove().map_err(|source| CopyError::RemoveCollected { source });
            errors.extend(gone.err());
        }
    }
    errors.append(&mut copies.errors);
    let is_pending = copies.is_pending || errors.iter().any(CopyError::is_kubeconfig_error);
    CopyReport { errors, is_pending, unused_pair: copies.unused_pair }
}

/// Updates pod-config's copy of the manifest URL's headers; without a URL there is none. Headers are not in a file of their
/// own, so they only change with the configuration.
pub(crate) fn copy_manifest_headers(config: &Config) -> Result<(), CopyError> {
    let path = config.paths.credentials(ServiceName::PodConfig).join(UrlHeaders::COPY);
    let headers = &config.sources.static_pod_url_headers;
    let done = if config.sources.static_pod_url.is_none() || headers.0.is_empty() {
        super::remove_if_exists(&path)
    } else {
        replace(&path, &headers.encode(), config.uid_of(ServiceName::PodConfig))
    };
    done.map_err(|source| CopyError::Write { path, source })
}

/// Replaces a file by rename, mode 0400, unless it has this content.
fn replace(path: &Path, content: &[u8], uid: Option<u32>) -> io::Result<()> {
    if fs::read(path).is_ok_and(|now| now == content) {
        return Ok(());
    }
    let temporary = path.with_extension("new");
    super::remove_if_exists(&temporary)?;
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(&temporary)?;
    file.write_all(content)?;
    if let Some(uid) = uid {
        chown(&temporary, Some(uid), None)?;
    }
    fs::rename(temporary, path)
}

/// Keeps the copies up to date until the shutdown; `report` is the result of the update at the start.
pub(crate) async fn run(context: Context, report: CopyReport) {
    let CopyReport { mut is_pending, mut unused_pair, .. } = report;
    let heartbeat = context.progress.register("credential-copies");
    loop {
        heartbeat.tick();
        // Cancel-safe: it only sleeps.
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = tokio::time::sleep(if is_pending { PENDING_CHECK_INTERVAL } else { CHECK_INTERVAL }) => {}
        }
        let config = std::sync::Arc::clone(&context.config);
        let Ok(report) = tokio::task::spawn_blocking(move || update_copies(&config)).await else { return };
        report.publish(&context);
        is_pending = report.is_pending;
        if unused_pair != report.unused_pair {
            if let Some(why) = &report.unused_pair {
                tracing::warn!("{why}");
            }
            unused_pair = report.unused_pair;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use keelson_config::{ApiTls, Etcd};

    use super::*;

    fn assert_up_to_date(report: CopyReport) {
        assert!(report.errors.is_empty() && !report.is_pending, "{report:?}");
    }

    fn error_of(mut report: CopyReport) -> CopyError {
        assert_eq!(report.errors.len(), 1, "{report:?}");
        report.errors.remove(0)
    }

    #[test]
    fn each_service_gets_its_own_copy_and_a_new_one_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("node.key");
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let mut settings = Etcd::plain(vec!["http://h:1".into()]);
        settings.key_file = Some(key.clone());
        config.control_plane = ControlPlane::Etcd(settings.clone());
        for service in CONTROL_PLANE_CLIENTS {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
        }
        let missing = startup_errors(&config);
        assert!(missing[0].contains("node.key that etcd.keyFile names: No such file"), "{missing:?}");

        for content in ["one", "two"] {
            fs::write(&key, content).unwrap();
            assert_up_to_date(update_copies(&config));
            assert!(any_needed(&config));
            for service in CONTROL_PLANE_CLIENTS {
                let folder = config.paths.credentials(service);
                let copy = settings.handed_over(&folder).key_file.unwrap();
                assert_eq!(copy, folder.join("etcd-key.pem"));
                assert_eq!(fs::read_to_string(&copy).unwrap(), content);
                assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o777, 0o400);
            }
        }
        config.control_plane = ControlPlane::None;
        assert_up_to_date(update_copies(&config));
        let folder = config.paths.credentials(ServiceName::PodConfig);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(
            settings.handed_over(&folder).key_file.unwrap(),
            key,
            "without init, the file itself is used"
        );
    }

    #[test]
    fn a_kubeconfig_is_copied_with_its_files_and_again_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::PodConfig);
        for service in CONTROL_PLANE_CLIENTS {
            fs::create_dir_all(config.paths.credentials(service)).unwrap();
        }
        let (path, token) = (dir.path().join("kubelet.conf"), dir.path().join("token"));
        let api = Kubernetes::of(path.clone());
        config.control_plane = ControlPlane::Kubernetes(api.clone());
        let error_line = |config: &Config| {
            assert_eq!(startup_errors(config), Vec::<String>::new(), "the agent starts with it");
            let report = update_copies(config);
            assert!(report.is_pending, "it may be fixed at any time");
            keelson_service_kit::status::chain(&error_of(report))
        };
        let line = error_line(&config);
        assert!(
            line.starts_with("invalid kubeconfig: cannot read") && line.contains("kubelet.conf"),
            "{line}"
        );
        let file = "current-context: c\nclusters: [{name: k, cluster: {server: 'https://h'}}]\n\
                    users: [{name: u, user: {tokenFile: token}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
        fs::write(&path, file).unwrap();
        let line = error_line(&config);
        assert!(line.contains("users[0].user.tokenFile: cannot read"), "{line}");
        for content in ["one", "two"] {
            fs::write(&token, content).unwrap();
            assert_up_to_date(update_copies(&config));
            let copy = fs::read_to_string(api.handed_over(&folder)).unwrap();
            assert!(copy.contains(&format!("\"token\":\"{content}\"")), "{copy}");
        }
        fs::write(&path, "current-context: [").unwrap();
        assert!(error_line(&config).starts_with("invalid kubeconfig: "));
        assert!(api.handed_over(&folder).exists(), "the last valid copy stays");
        config.control_plane = ControlPlane::None;
        assert_up_to_date(update_copies(&config));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn manifest_url_headers_are_copied_for_pod_config_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::PodConfig);
        fs::create_dir_all(&folder).unwrap();
        config.sources.static_pod_url = Some("https://h".into());
        for value in ["one", "two"] {
            config.sources.static_pod_url_headers = UrlHeaders(vec![("X".into(), value.into())]);
            copy_manifest_headers(&config).unwrap();
            assert_eq!(UrlHeaders::handed_over(&folder).unwrap(), config.sources.static_pod_url_headers);
            let mode = fs::metadata(folder.join(UrlHeaders::COPY)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o400);
        }
        config.sources.static_pod_url = None;
        copy_manifest_headers(&config).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn api_certificates_are_copied_for_node_api_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&folder).unwrap();
        let ca = dir.path().join("ca.crt");
        config.api.tls = Some(ApiTls::with_client_ca(ca.clone()));
        let missing = startup_errors(&config);
        assert!(
            missing[0].contains("that authentication.x509.clientCAFile names: No such file"),
            "{missing:?}"
        );
        fs::write(&ca, "ca").unwrap();
        assert_up_to_date(update_copies(&config));
        assert_eq!(fs::read_to_string(folder.join("client-ca.pem")).unwrap(), "ca");
        config.api.tls = None;
        assert_up_to_date(update_copies(&config));
        assert!(!folder.join("client-ca.pem").exists() && !any_needed(&config));
    }

    #[test]
    fn a_kubelets_own_pair_is_copied_as_one_file_and_again_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.paths.run_dir = dir.path().join("run");
        let folder = config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&folder).unwrap();
        let mut tls = ApiTls { cert_dir: dir.path().join("pki"), ..ApiTls::default() };
        config.api.tls = Some(tls.clone());
        let copy = || fs::read_to_string(folder.join("tls-cert.pem")).ok();
        assert_up_to_date(update_copies(&config));
        assert_eq!(copy(), None, "the folder does not exist");

        fs::create_dir(&tls.cert_dir).unwrap();
        let [certificate, key] = ApiTls::OF_A_KUBELET.map(|name| tls.cert_dir.join(name));
        let now = now_unix_seconds();
        let write = |until: i64| {
            let pair = certificates::test_pair(now - 100, until);
            fs::write(&certificate, &pair.0).unwrap();
            fs::write(&key, &pair.1).unwrap();
        };
        let mut before = None;
        for _ in 0..2 {
            write(now + 1000);
            assert_up_to_date(update_copies(&config));
            let now_there = copy();
            assert!(now_there.as_ref().unwrap().contains("PRIVATE KEY") && now_there != before);
            let handed_over = tls.handed_over(&folder);
            assert_eq!(
                (handed_over.cert_file.clone(), handed_over.key_file),
                (Some(folder.join("tls-cert.pem")), handed_over.cert_file)
            );
            before = now_there;
        }

        fs::remove_file(&key).unwrap();
        let lines = startup_errors(&config).join("\n");
        assert!(lines.starts_with("certificate and key must be supplied as a pair"), "{lines}");
        assert!(error_of(update_copies(&config)).prevents_start());
        assert_eq!(copy(), before, "the last valid copy stays");

        for (until, other_key, why) in
            [(now - 1, false, "has expired"), (now + 1000, true, "does not match its")]
        {
            write(until);
            if other_key {
                fs::write(&key, certificates::test_pair(now, until).1).unwrap();
            }
            let report = update_copies(&config);
            assert!(
                report.errors.is_empty() && report.unused_pair.as_ref().unwrap().contains(why),
                "{report:?}"
            );
            assert_eq!(copy(), None);
            assert!(certificate.exists() && startup_errors(&config).is_empty(), "the file is kept");
        }
        write(now + 1000);
        tls.asked_for = true;
        config.api.tls = Some(tls.clone());
        assert_up_to_date(update_copies(&config));
        assert_eq!(copy(), None, "a certificate is requested instead");
        (tls.asked_for, tls.cert_file, tls.key_file) = (false, Some(certificate.clone()), Some(key.clone()));
        fs::write(&key, "key").unwrap();
        config.api.tls = Some(tls);
        assert_up_to_date(update_copies(&config));
        assert_eq!(
            fs::read_to_string(folder.join("tls-key.pem")).unwrap(),
            "key",
            "a configured file is copied unchanged"
        );
    }
}
