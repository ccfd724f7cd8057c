//! What the kubelet API shows of itself over TLS, and whom it takes clients for (node-and-api.md §6.1, §6.2).
//!
//! Files that change are read again; ones that cannot be used are told as a condition, and the last good ones go on. Until
//! there is anything to show, connections are closed.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use keelson_config::{ApiTls, ServiceName};
use keelson_service_kit::{Context, LoopHandle, default_route_address, now_unix_nanos, status};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme};
use tokio::sync::watch;

use crate::access::certificates::{NO_AUTHORITY, Refusal, RefusedCertificates, UNUSABLE};
use crate::own_pair::{PairError, own};
use crate::refusals::Refusals;
use crate::spoken;

/// How often it is looked whether a file has changed.
const LOOK: Duration = LoopHandle::HEARTBEAT;
/// The same until there is anything to show.
const LOOK_AWAITING: Duration = Duration::from_secs(1);
/// The setting that names the authorities of clients.
const CLIENT_CA: &str = "authentication.x509.clientCAFile";
/// The condition that says whether they can be used.
const CONDITION: &str = "certificates";

/// Why TLS is not as the files are.
#[derive(Debug, thiserror::Error)]
enum ServingError {
    /// A file cannot be read.
    #[error("cannot read {} that {field} names", path.display())]
    Read { path: PathBuf, field: &'static str, source: io::Error },
    /// A file has not what it should.
    #[error("cannot use {} that {field} names: {message}", path.display())]
    Unusable { path: PathBuf, field: &'static str, message: String },
    /// The API server has not signed one yet.
    #[error(
        "no serving certificate available for the kubelet: node-status asks the API server for one (`keelson get services` shows \
         how that goes)"
    )]
    NotYet,
    /// There is no certificate of our own.
    #[error(transparent)]
    Own(#[from] PairError),
    /// Certificate and key do not belong together, or are of a kind that is not spoken.
    #[error("certificate and key of the kubelet API cannot be used together")]
    Pair(#[source] rustls::Error),
    /// The certificates cannot be told to others.
    #[error("cannot write {}", path.display())]
    Tell { path: PathBuf, source: io::Error },
}

/// TLS as it is now.
#[derive(Debug)]
struct Now {
    config: Arc<ServerConfig>,
    /// `None`: nobody is known by a certificate.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// TLS of the kubelet API, as it is at each moment.
#[derive(Debug, Clone)]
pub struct Serving {
    now: watch::Receiver<Option<Arc<Now>>>,
    /// Certificates of clients that were refused.
    pub(crate) refused: RefusedCertificates,
    /// What is told of requests that were refused.
    pub(crate) refusals: Arc<Refusals>,
}

impl Serving {
    /// What to speak on a new connection; `None` while there is no certificate to show.
    pub(crate) fn config(&self) -> Option<Arc<ServerConfig>> {
        self.now.borrow().as_ref().map(|now| Arc::clone(&now.config))
    }

    /// Whether one of the authorities of clients stands behind a certificate that a client has shown, and why not.
    pub(crate) fn check_client(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
    ) -> Result<(), Refusal> {
        let now = self.now.borrow().clone();
        let clients = now.and_then(|now| now.clients.clone()).ok_or(NO_AUTHORITY)?;
        let checked = clients.verify_client_cert(own, between, UnixTime::now());
        checked.map(|_| ()).map_err(|error| Refusal::of(&error).unwrap_or(UNUSABLE))
    }

    /// TLS with the files of `tls`, which are read now and whenever they change.
    pub fn start(ctx: &Context, tls: &ApiTls) -> Self {
        let mut files = Files::new(ctx, tls);
        let (sender, receiver) = watch::channel(None);
        files.read_again(ctx, &sender);
        let ctx_of_task = ctx.clone();
        ctx.spawn("certificates", async move {
            let ctx = ctx_of_task;
            let turn = ctx.progress.register("certificates");
            loop {
                turn.tick();
                let look = if sender.borrow().is_some() { LOOK } else { LOOK_AWAITING };
                // Cancel-safe: nothing is taken while waiting.
                tokio::select! {
                    () = ctx.shutdown.cancelled() => return,
                    () = tokio::time::sleep(look) => {}
                }
                files.read_again(&ctx, &sender);
            }
        });
        Self {
            now: receiver,
            refused: RefusedCertificates::registered(&ctx.metrics),
            refusals: Arc::new(Refusals::new(&ctx.metrics)),
        }
    }
}

/// Where everything is, and what was there when it was read.
struct Files {
    tls: ApiTls,
    credentials: PathBuf,
    state: PathBuf,
    shown: PathBuf,
    node_name: String,
    /// Those of `--node-ip`.
    node_ips: Vec<IpAddr>,
    /// What `now` was made of.
    read: Option<Content>,
}

/// All that TLS is made of.
#[derive(Debug, PartialEq, Eq)]
struct Content {
    client_ca: Option<Vec<u8>>,
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Files {
    fn new(ctx: &Context, tls: &ApiTls) -> Self {
        let paths = &ctx.config.paths;
        Self {
            tls: tls.clone(),
            credentials: paths.credentials(ServiceName::NodeApi),
            state: paths.state(ServiceName::NodeApi),
            shown: paths.serving_certificate(),
            node_name: ctx.config.node_name.clone(),
            node_ips: ctx.config.node_status.node_ips.clone(),
            read: None,
        }
    }

    fn read_again(&mut self, ctx: &Context, sender: &watch::Sender<Option<Arc<Now>>>) {
        let told = match self.next() {
            Ok(Some(now)) => {
                sender.send_replace(Some(Arc::new(now)));
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => {
                let text = status::chain(&error);
                let goes_on = if sender.borrow().is_some() {
                    "the last good ones are used until then"
                } else {
                    "nobody can connect until then"
                };
                Err(format!("{text}; {goes_on}"))
            }
        };
        ctx.progress.condition(CONDITION, told);
    }

    /// TLS as the files are now; `None` when it is so already.
    fn next(&mut self) -> Result<Option<Now>, ServingError> {
        let tls = self.tls.handed_over(&self.credentials);
        let content = self.content(&tls)?;
        if self.read.as_ref() == Some(&content) {
            return Ok(None);
        }
        let now = assemble(&tls, &content)?;
        tell(&self.shown, &content.certificates)?;
        self.read = Some(content);
        Ok(Some(now))
    }

    fn content(&self, tls: &ApiTls) -> Result<Content, ServingError> {
        let client_ca = tls.client_ca_file.as_ref().map(|file| read(CLIENT_CA, file)).transpose()?;
        let (certificates, key) = match (&tls.cert_file, &tls.key_file) {
            (Some(cert), Some(key)) => {
                let certificates = certificates("tlsCertFile", cert, &read("tlsCertFile", cert)?)?;
                let pem = read("tlsPrivateKeyFile", key)?;
                let parsed = PrivateKeyDer::from_pem_slice(&pem);
                let none = |error: rustls::pki_types::pem::Error| {
                    unusable("tlsPrivateKeyFile", key, format!("it has no private key: {error}"))
                };
                (certificates, parsed.map_err(none)?)
            }
            _ if tls.asked_for => return Err(ServingError::NotYet),
            _ => {
                let pair = own(&self.state, &self.names(), now_unix_nanos() / 1_000_000_000)?;
                (pair.certificates, pair.key)
            }
        };
        Ok(Content { client_ca, certificates, key })
    }

    /// The names under which the node is reached.
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

fn certificates(
    field: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, ServingError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(field, path, format!("it is no PEM: {error}")))?;
    if found.is_empty() { Err(unusable(field, path, "it has no certificate".to_owned())) } else { Ok(found) }
}

fn assemble(tls: &ApiTls, content: &Content) -> Result<Now, ServingError> {
    let provider = Arc::new(spoken::provider(&tls.cipher_suites, &tls.key_exchanges));
    let clients = match (&tls.client_ca_file, &content.client_ca) {
        (Some(file), Some(pem)) => Some(authorities(file, pem, &provider)?),
        _ => None,
    };
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(spoken::versions(&provider, tls.only_tls13))
        .map_err(ServingError::Pair)?;
    let config = match &clients {
        Some(clients) => {
            let asks = Asks { clients: Arc::clone(clients), provider: Arc::clone(&provider) };
            config.with_client_cert_verifier(Arc::new(asks))
        }
        None => config.with_no_client_auth(),
    };
    let mut config = config
        .with_single_cert(content.certificates.clone(), content.key.clone_key())
        .map_err(ServingError::Pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Now { config: Arc::new(config), clients })
}

/// What certificates of clients are checked against.
fn authorities(
    file: &Path,
    pem: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, ServingError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CLIENT_CA, file, pem)? {
        roots.add(certificate).map_err(|error| unusable(CLIENT_CA, file, error.to_string()))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| unusable(CLIENT_CA, file, error.to_string()))
}

/// Writes the certificates that are shown, for those who tell others of them. Nothing in it is secret.
fn tell(path: &Path, shown: &[CertificateDer<'_>]) -> Result<(), ServingError> {
    let failed = |source| ServingError::Tell { path: path.to_owned(), source };
    let text: String = shown.iter().map(|certificate| pem_of(certificate)).collect();
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).map_err(failed)?;
    fs::rename(&temporary, path).map_err(failed)
}

/// PEM of a certificate (RFC 7468).
fn pem_of(certificate: &[u8]) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(certificate);
    let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
    for line in text.as_bytes().chunks(64) {
        pem.push_str(&String::from_utf8_lossy(line));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Asks each client for a certificate, and takes any whose key the client has: what it is worth is decided for each request
/// ([`crate::access`]).
#[derive(Debug)]
struct Asks {
    clients: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Asks {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
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

        /// A certificate and its key, PEM.
        fn pair(&self) -> (String, String) {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["n1".to_owned()]).unwrap();
            (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
        }
    }

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    /// The node-api of a node whose files are in `dir`.
    fn files(dir: &Path) -> (Context, Files) {
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
        let files = Files::new(&ctx, &tls);
        (ctx, files)
    }

    #[tokio::test]
    async fn files_that_change_count_and_unusable_ones_leave_the_last_good() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        let (sender, receiver) = watch::channel(None);
        let serving = Serving {
            now: receiver,
            refused: RefusedCertificates::registered(&ctx.metrics),
            refusals: Arc::new(Refusals::new(&ctx.metrics)),
        };
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let problem = || {
            let conditions = ctx.progress.report("").conditions;
            conditions
                .into_iter()
                .find(|c| c.name == CONDITION && !c.ok)
                .map(|c| c.message)
                .unwrap_or_default()
        };
        let told = || fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap_or_default();
        files.read_again(&ctx, &sender);
        assert!(serving.config().is_none());
        assert!(
            problem().contains("clientCAFile names") && problem().ends_with("nobody can connect until then"),
            "{}",
            problem()
        );

        let (first, second) = (Authority::new(), Authority::new());
        let (cert, key) = first.pair();
        write("ca.pem", &first.0.pem());
        write("tls.crt", &cert);
        write("tls.key", &key);
        files.read_again(&ctx, &sender);
        assert_eq!((problem().as_str(), der(&told())), ("", der(&cert)));
        let config = serving.config().unwrap();
        let client = der(&first.pair().0);
        assert!(serving.check_client(&client, &[]).is_ok());
        files.read_again(&ctx, &sender);
        assert!(Arc::ptr_eq(&config, &serving.config().unwrap()), "nothing has changed");

        // A new key without its certificate, text that is no PEM, a file that is gone.
        let (next_cert, next_key) = first.pair();
        for (name, text, why) in [
            ("tls.key", next_key.as_str(), "cannot be used together"),
            ("tls.key", "no key", "tls.key that tlsPrivateKeyFile names: it has no private key"),
            ("tls.crt", "no certificate", "tls.crt that tlsCertFile names: it has no certificate"),
            (
                "ca.pem",
                "no certificate",
                "ca.pem that authentication.x509.clientCAFile names: it has no certificate",
            ),
        ] {
            let before = fs::read_to_string(dir.path().join(name)).unwrap();
            write(name, text);
            files.read_again(&ctx, &sender);
            assert!(
                problem().contains(why) && problem().ends_with("the last good ones are used until then"),
                "{}",
                problem()
            );
            assert!(
                Arc::ptr_eq(&config, &serving.config().unwrap())
                    && serving.check_client(&client, &[]).is_ok()
            );
            write(name, &before);
        }
        write("tls.crt", &next_cert);
        write("tls.key", &next_key);
        write("ca.pem", &second.0.pem());
        files.read_again(&ctx, &sender);
        assert_eq!((problem().as_str(), der(&told())), ("", der(&next_cert)));
        let refusal = serving.check_client(&client, &[]).unwrap_err();
        assert_eq!(refusal.reason, "signature", "its authority was taken away, another has the same name");
        assert!(serving.check_client(&der(&second.pair().0), &[]).is_ok());
    }

    #[tokio::test]
    async fn until_one_that_is_asked_for_is_there_nothing_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        files.tls.asked_for = true;
        let (sender, receiver) = watch::channel(None);
        let serving = Serving {
            now: receiver,
            refused: RefusedCertificates::registered(&ctx.metrics),
            refusals: Arc::new(Refusals::new(&ctx.metrics)),
        };
        let authority = Authority::new();
        fs::write(dir.path().join("ca.pem"), authority.0.pem()).unwrap();
        files.read_again(&ctx, &sender);
        let told = ctx.progress.report("").conditions.into_iter().find(|c| c.name == CONDITION).unwrap();
        assert!(
            !told.ok && told.message.starts_with("no serving certificate available for the kubelet"),
            "{told:?}"
        );
        assert!(serving.config().is_none(), "none is signed by ourselves");
        let copies = ctx.config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&copies).unwrap();
        for _ in 0..2 {
            let (cert, key) = authority.pair();
            fs::write(copies.join("tls-cert.pem"), format!("{cert}{key}")).unwrap();
            files.read_again(&ctx, &sender);
            assert!(serving.config().is_some());
            let shown = fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap();
            assert_eq!(der(&shown), der(&cert));
        }
    }

    #[tokio::test]
    async fn a_pair_that_init_has_found_is_shown_while_it_is_there_and_else_one_of_our_own() {
        let dir = tempfile::tempdir().unwrap();
        let (ctx, mut files) = files(dir.path());
        files.tls = ApiTls::default();
        let (sender, receiver) = watch::channel(None);
        let serving = Serving {
            now: receiver,
            refused: RefusedCertificates::registered(&ctx.metrics),
            refusals: Arc::new(Refusals::new(&ctx.metrics)),
        };
        let shown = || der(&fs::read_to_string(ctx.config.paths.serving_certificate()).unwrap());
        files.read_again(&ctx, &sender);
        let own = shown();
        let authority = Authority::new();
        let (cert, key) = authority.pair();
        assert_eq!(
            serving.check_client(&der(&cert), &[]),
            Err(NO_AUTHORITY),
            "nobody is known by a certificate"
        );
        let copies = ctx.config.paths.credentials(ServiceName::NodeApi);
        fs::create_dir_all(&copies).unwrap();
        fs::write(copies.join("tls-cert.pem"), format!("{cert}{key}")).unwrap();
        files.read_again(&ctx, &sender);
        assert_eq!(shown(), der(&cert));
        fs::remove_file(copies.join("tls-cert.pem")).unwrap();
        files.read_again(&ctx, &sender);
        assert_eq!(shown(), own);
    }
}
