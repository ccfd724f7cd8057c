//! The serving certificate of the kubelet API and the authorities of its clients (node-and-api.md §6.1, §6.2).
//!
//! Changed files are reloaded. A condition reports unusable ones, and the last good ones stay in effect. Until there is a serving
//! certificate, connections are closed.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{ApiTls, ServiceName};
use keelson_files::Replacement;
use keelson_service_kit::{Context, LoopHandle, default_route_address, now_unix_nanos, status};
use keelson_tls::RequestedClientCertificate;
use pem::{EncodeConfig, LineEnding};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;

use crate::access::certificates::{CertificateRefusal, NO_AUTHORITY, RefusedCertificates, UNUSABLE};
use crate::refusal_log::RefusalLog;
use crate::self_signed::{SelfSignedError, load_or_create};
use crate::tls_parameters;

/// How often files are checked for changes.
const RELOAD_INTERVAL: Duration = LoopHandle::HEARTBEAT;
/// How often files are checked while there is no serving certificate.
const RELOAD_INTERVAL_WITHOUT_CERTIFICATE: Duration = Duration::from_secs(1);
/// The setting with the file of the client authorities.
const CLIENT_CA: &str = "authentication.x509.clientCAFile";
/// The condition that reports whether the files are usable.
const CONDITION: &str = "certificates";

/// Why the TLS files could not be loaded.
#[derive(Debug, thiserror::Error)]
enum ServingError {
    /// A file cannot be read.
    #[error("cannot read {} that {field} names", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    /// A file does not contain what it should.
    #[error("cannot use {} that {field} names: {message}", path.display())]
    Unusable { path: PathBuf, field: &'static str, message: String },
    /// The API server has not signed the certificate yet.
    #[error(
        "no serving certificate available for the kubelet: node-status requests one from the API server (`keelson get \
         services` shows its state)"
    )]
    NotSignedYet,
    /// The self-signed certificate cannot be loaded or created.
    #[error(transparent)]
    SelfSigned(#[from] SelfSignedError),
    /// Certificate and key do not match, or their kind is not supported.
    #[error("certificate and key of the kubelet API cannot be used together")]
    Mismatch(#[source] rustls::Error),
    /// The certificates cannot be published.
    #[error("cannot write {}", path.display())]
    Publish { path: PathBuf, source: io::Error },
}

/// The TLS configuration in effect.
#[derive(Debug)]
struct TlsState {
    config: Arc<ServerConfig>,
    /// Verifies client certificates; `None`: they are not accepted.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// The current TLS configuration of the kubelet API. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Serving {
    state: watch::Receiver<Option<Arc<TlsState>>>,
    /// Counts refused client certificates.
    pub(crate) refused_certificates: RefusedCertificates,
    /// Counts and logs refused requests.
    pub(crate) refusal_log: Arc<RefusalLog>,
}

impl Serving {
    /// The configuration for a new connection; `None` while there is no serving certificate.
    pub(crate) fn config(&self) -> Option<Arc<ServerConfig>> {
        self.state.borrow().as_ref().map(|state| Arc::clone(&state.config))
    }

    /// Verifies a client's certificate with the current authorities.
    pub(crate) fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), CertificateRefusal> {
        let state = self.state.borrow().clone();
        let clients = state.and_then(|state| state.clients.clone()).ok_or(NO_AUTHORITY)?;
        let verified = clients.verify_client_cert(leaf, intermediates, UnixTime::now());
        verified.map(|_| ()).map_err(|error| CertificateRefusal::from_tls_error(&error).unwrap_or(UNUSABLE))
    }

    /// Loads the files of `tls` and starts the task that reloads them when they change.
    pub fn start(ctx: &Context, tls: &ApiTls) -> Self {
        let mut files = TlsFiles::new(ctx, tls);
        let (sender, receiver) = watch::channel(None);
        files.reload(ctx, &sender);
        let ctx_of_task = ctx.clone();
        ctx.spawn("certificates", async move {
            let ctx = ctx_of_task;
            let handle = ctx.progress.register("certificates");
            loop {
                handle.tick();
                let interval = if sender.borrow().is_some() {
                    RELOAD_INTERVAL
                } else {
                    RELOAD_INTERVAL_WITHOUT_CERTIFICATE
                };
                // Cancel-safe: neither arm holds anything.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = tokio::time::sleep(interval) => {}
                }
                files.reload(&ctx, &sender);
            }
        });
        Self {
            state: receiver,
            refused_certificates: RefusedCertificates::register(&ctx.metrics),
            refusal_log: Arc::new(RefusalLog::new(&ctx.metrics)),
        }
    }
}

/// The paths of the TLS files, and their content when they were last loaded.
struct TlsFiles {
    tls: ApiTls,
    credentials_dir: PathBuf,
    state_dir: PathBuf,
    published: PathBuf,
    node_name: String,
    /// The addresses of `--node-ip`.
    node_ips: Vec<IpAddr>,
    /// The content in effect.
    loaded: Option<TlsContent>,
}

/// The content of all TLS files.
#[derive(Debug, PartialEq, Eq)]
struct TlsContent {
    client_ca: Option<Vec<u8>>,
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl TlsFiles {
    fn new(ctx: &Context, tls: &ApiTls) -> Self {
        let paths = &ctx.config.paths;
        Self {
            tls: tls.clone(),
            credentials_dir: paths.credentials(ServiceName::NodeApi),
            state_dir: paths.state(ServiceName::NodeApi),
            published: paths.serving_certificate(),
            node_name: ctx.config.node_name.clone(),
            node_ips: ctx.config.node_status.node_ips.clone(),
            loaded: None,
        }
    }

    /// Loads changed files and reports the result as a condition.
    fn reload(&mut self, ctx: &Context, sender: &watch::Sender<Option<Arc<TlsState>>>) {
        let condition = match self.load_changes() {
            Ok(Some(state)) => {
                sender.send_replace(Some(Arc::new(state)));
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => {
                let error = status::chain(&error);
                let consequence = if sender.borrow().is_some() {
                    "the last good certificates stay in use until this is fixed"
                } else {
                    "clients cannot connect until then"
                };
                Err(format!("{error}; {consequence}"))
            }
        };
        ctx.progress.condition(CONDITION, condition);
    }

    /// The TLS configuration of the current files; `None` if nothing has changed.
    fn load_changes(&mut self) -> Result<Option<TlsState>, ServingError> {
        let tls = self.tls.handed_over(&self.credentials_dir);
        let content = self.read_content(&tls)?;
        if self.loaded.as_ref() == Some(&content) {
            return Ok(None);
        }
        let state = build_tls(&tls, &content)?;
        publish_certificates(&self.published, &content.certificates)?;
        self.loaded = Some(content);
        Ok(Some(state))
    }

    fn read_content(&self, tls: &ApiTls) -> Result<TlsContent, ServingError> {
        let client_ca = tls.client_ca_file.as_ref().map(|file| read(CLIENT_CA, file)).transpose()?;
        let (certificates, key) = match (&tls.cert_file, &tls.key_file) {
            (Some(cert), Some(key)) => {
                let certificates = parse_certificates("tlsCertFile", cert, &read("tlsCertFile", cert)?)?;
                let pem = read("tlsPrivateKeyFile", key)?;
                let parsed = PrivateKeyDer::from_pem_slice(&pem);
                let no_key = |error: rustls::pki_types::pem::Error| {
                    unusable("tlsPrivateKeyFile", key, format!("it has no private key: {error}"))
                };
                (certificates, parsed.map_err(no_key)?)
            }
            _ if tls.asked_for => return Err(ServingError::NotSignedYet),
            _ => {
                let pair = load_or_create(&self.state_dir, &self.names(), now_unix_nanos() / 1_000_000_000)?;
                (pair.certificates, pair.key)
            }
        };
        Ok(TlsContent { client_ca, certificates, key })
    }

    /// The host names and addresses of the node.
    fn names(&self) -> Vec<String> {
        let mut names = vec![self.node_name.clone()];
        let given = self.node_ips.iter().filter(|ip| !ip.is_unspecified());
        for address in given.copied().chain(default_route_address()) {
            let address = address.to_string();
            if !names.contains(&address) {
                names.push(address);
            }
        }
        names.extend(["localhost", "127.0.0.1"].map(ToOwned::to_owned));
        names
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, ServingError> {
    fs::read(path).map_err(|source| ServingError::Read { path: path.to_owned(), field, source })
}

fn unusable(field: &'static str, path: &Path, message: String) -> ServingError {
    ServingError::Unusable { path: path.to_owned(), field, message }
}

fn parse_certificates(
    field: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, ServingError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(field, path, format!("it is not PEM: {error}")))?;
    if found.is_empty() { Err(unusable(field, path, "it has no certificate".to_owned())) } else { Ok(found) }
}

fn build_tls(tls: &ApiTls, content: &TlsContent) -> Result<TlsState, ServingError> {
    let provider = Arc::new(tls_parameters::provider(&tls.cipher_suites, &tls.key_exchanges));
    let clients = match (&tls.client_ca_file, &content.client_ca) {
        (Some(file), Some(pem)) => Some(client_verifier(file, pem, &provider)?),
        _ => None,
    };
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(tls_parameters::versions(&provider, tls.only_tls13))
        .map_err(ServingError::Mismatch)?;
    let config = match &clients {
        Some(clients) => {
            // Each request verifies the certificate ([`crate::access`]).
            let verifier = RequestedClientCertificate::new(Arc::clone(clients), Arc::clone(&provider));
            config.with_client_cert_verifier(Arc::new(verifier))
        }
        None => config.with_no_client_auth(),
    };
    let mut config = config
        .with_single_cert(content.certificates.clone(), content.key.clone_key())
        .map_err(ServingError::Mismatch)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsState { config: Arc::new(config), clients })
}

/// Verifies client certificates with the authorities in `pem`.
fn client_verifier(
    file: &Path,
    pem: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, ServingError> {
    let mut roots = RootCertStore::empty();
    for certificate in parse_certificates(CLIENT_CA, file, pem)? {
        roots.add(certificate).map_err(|error| unusable(CLIENT_CA, file, error.to_string()))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| unusable(CLIENT_CA, file, error.to_string()))
}

/// Writes the serving certificates to a file from which node-status reports them. They are not secret.
fn publish_certificates(path: &Path, certificates: &[CertificateDer<'_>]) -> Result<(), ServingError> {
    let text: String = certificates.iter().map(|certificate| pem_of(certificate)).collect();
    let written = Replacement::new().write(path, text.as_bytes());
    written.map_err(|source| ServingError::Publish { path: path.to_owned(), source })
}

/// A certificate as PEM (RFC 7468).
fn pem_of(certificate: &[u8]) -> String {
    let block = pem::Pem::new("CERTIFICATE", certificate);
    pem::encode_config(&block, EncodeConfig::new().set_line_ending(LineEnding::LF))
}

#[cfg(test)]
mod tests {
    use keelson_config::Config;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

    use super::*;

    struct Authority(CertifiedIssuer<'static, KeyPair>);

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
        }

        /// A certificate and its key as PEM.
        fn pair(&self) -> (String, String) {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["n1".to_owned()]).unwrap();
            (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
        }
    }

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    /// A node whose files are in `dir`.
    fn files(dir: &Path) -> (Context, TlsFiles) {
        let mut config = Config { node_name: "n1".into(), ..Config::default() };
        config.paths.run_dir = dir.join("run");
        config.paths.state_dir = dir.join("state");
        let paths = &config.paths;
        for folder in [paths.state(ServiceName::NodeApi), paths.socket_dir(ServiceName::NodeApi)] {
            fs::create_dir_all(folder).unwrap();
        }
        let mut tls = ApiTls::with_client_ca(dir.join("ca.pem"));
        (tls.cert_file, tls.key_file) = (Some(dir.join("tls.crt")), Some(dir.join("tls.key")));
        let ctx = Context::detached(ServiceName::NodeApi, config);
        let files = TlsFiles::new(&ctx, &tls);
        (ctx, files)
    }

    /// The error in the condition of the certificates; empty if there is none.
    fn serving_error(ctx: &Context) -> String {
        let mut conditions = ctx.progress.report("").conditions.into_iter();
        let failed = conditions.find(|condition| condition.name == CONDITION && !condition.ok);
        failed.map(|condition| condition.message).unwrap_or_default()
    }

    /// What is served with the certificates of `state`.
    fn serving(ctx: &Context, state: watch::Receiver<Option<Arc<TlsState>>>) -> Serving {
        Serving {
            state,
            refused_certificates: RefusedCertificates::register(&ctx.metrics),
            refusal_log: Arc::new(RefusalLog::new(&ctx.metrics)),
        }
    }

    #[tokio::test]
    async fn changed_tls_files_are_reloaded_and_unusable_ones_keep_the_last_good() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        let (sender, receiver) = watch::channel(None);
        let serving = serving(&ctx, receiver);
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let error = || serving_error(&ctx);
        let published = || fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap_or_default();
        files.reload(&ctx, &sender);
        assert!(serving.config().is_none());
        assert!(
            error().contains("clientCAFile names") && error().ends_with("clients cannot connect until then"),
            "{}",
            error()
        );

        let (first, second) = (Authority::new(), Authority::new());
        let (cert, key) = first.pair();
        write("ca.pem", &first.0.pem());
        write("tls.crt", &cert);
        write("tls.key", &key);
        files.reload(&ctx, &sender);
        assert_eq!((error().as_str(), der(&published())), ("", der(&cert)));
        let config = serving.config().unwrap();
        let client = der(&first.pair().0);
        assert!(serving.verify_client(&client, &[]).is_ok());
        files.reload(&ctx, &sender);
        assert!(Arc::ptr_eq(&config, &serving.config().unwrap()), "nothing has changed");

        // A new key without its certificate, and files without PEM.
        let (next_cert, next_key) = first.pair();
        for (name, text, message) in [
            ("tls.key", next_key.as_str(), "cannot be used together"),
            ("tls.key", "no key", "tls.key that tlsPrivateKeyFile names: it has no private key"),
            ("tls.crt", "no certificate", "tls.crt that tlsCertFile names: it has no certificate"),
            ("ca.pem", "none", "ca.pem that authentication.x509.clientCAFile names: it has no certificate"),
        ] {
            let before = fs::read_to_string(dir.path().join(name)).unwrap();
            write(name, text);
            files.reload(&ctx, &sender);
            let error = error();
            assert!(error.contains(message), "{error}");
            assert!(error.ends_with("the last good certificates stay in use until this is fixed"), "{error}");
            assert!(Arc::ptr_eq(&config, &serving.config().unwrap()));
            assert!(serving.verify_client(&client, &[]).is_ok());
            write(name, &before);
        }
        write("tls.crt", &next_cert);
        write("tls.key", &next_key);
        write("ca.pem", &second.0.pem());
        files.reload(&ctx, &sender);
        assert_eq!((error().as_str(), der(&published())), ("", der(&next_cert)));
        let refusal = serving.verify_client(&client, &[]).unwrap_err();
        assert_eq!(refusal.reason, "signature", "its authority was replaced by another of the same name");
        assert!(serving.verify_client(&der(&second.pair().0), &[]).is_ok());
    }

    #[tokio::test]
    async fn requested_serving_certificate_is_awaited_and_none_is_self_signed() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        files.tls.asked_for = true;
        let (sender, receiver) = watch::channel(None);
        let serving = serving(&ctx, receiver);
        let authority = Authority::new();
        fs::write(dir.path().join("ca.pem"), authority.0.pem()).unwrap();
        files.reload(&ctx, &sender);
        let condition = ctx.progress.report("").conditions.into_iter().find(|c| c.name == CONDITION).unwrap();
        assert!(
            !condition.ok
                && condition.message.starts_with("no serving certificate available for the kubelet"),
            "{condition:?}"
        );
        assert!(serving.config().is_none(), "none is self-signed");
        let credentials = ctx.config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&credentials).unwrap();
        for _ in 0..2 {
            let (cert, key) = authority.pair();
            fs::write(credentials.join("tls-cert.pem"), format!("{cert}{key}")).unwrap();
            files.reload(&ctx, &sender);
            assert!(serving.config().is_some());
            let published = fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap();
            assert_eq!(der(&published), der(&cert));
        }
    }

    #[tokio::test]
    async fn serving_certificate_from_init_is_preferred_over_the_self_signed_one() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        files.tls = ApiTls::default();
        let (sender, receiver) = watch::channel(None);
        let serving = serving(&ctx, receiver);
        let published = || der(&fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap());
        files.reload(&ctx, &sender);
        let self_signed = published();
        let authority = Authority::new();
        let (cert, key) = authority.pair();
        assert_eq!(
            serving.verify_client(&der(&cert), &[]),
            Err(NO_AUTHORITY),
            "client certificates are not accepted"
        );
        let credentials = ctx.config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&credentials).unwrap();
        fs::write(credentials.join("tls-cert.pem"), format!("{cert}{key}")).unwrap();
        files.reload(&ctx, &sender);
        assert_eq!(published(), der(&cert));
        fs::remove_file(credentials.join("tls-cert.pem")).unwrap();
        files.reload(&ctx, &sender);
        assert_eq!(published(), self_signed);
    }
}
