use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, SupportedProtocolVersion,
};

use super::*;

const VERSIONS: [&SupportedProtocolVersion; 2] = [&rustls::version::TLS12, &rustls::version::TLS13];

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A self-signed certificate and its key.
fn certificate_and_key() -> (CertificateDer<'static>, KeyPair) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["node".to_owned()]).unwrap();
    (params.self_signed(&key).unwrap().der().clone(), key)
}

/// What a peer presents; the key need not be that of the certificate.
fn presented(certificate: &CertificateDer<'static>, key: &KeyPair) -> Arc<SingleCertAndKey> {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let key = provider().key_provider.load_private_key(key).unwrap();
    Arc::new(SingleCertAndKey::from(CertifiedKey::new(vec![certificate.clone()], key)))
}

/// Makes a handshake in memory. Returns the certificates of the client that the server has got.
fn handshake(client: ClientConfig, server: ServerConfig) -> Result<usize, Error> {
    let name = ServerName::try_from("10.0.0.7").unwrap();
    let mut client = ClientConnection::new(Arc::new(client), name)?;
    let mut server = ServerConnection::new(Arc::new(server))?;
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() {
        let mut sent = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut sent).unwrap();
        }
        let mut unread = sent.as_slice();
        while !unread.is_empty() {
            server.read_tls(&mut unread).unwrap();
            server.process_new_packets()?;
        }
        let mut answered = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut answered).unwrap();
        }
        let mut unread = answered.as_slice();
        while !unread.is_empty() {
            client.read_tls(&mut unread).unwrap();
            client.process_new_packets()?;
        }
    }
    Ok(server.peer_certificates().map_or(0, <[_]>::len))
}

/// Connects a client with this verifier to a server that presents this.
fn connect_to(
    version: &'static SupportedProtocolVersion,
    verifier: Arc<dyn ServerCertVerifier>,
    server: Arc<SingleCertAndKey>,
) -> Result<usize, Error> {
    let client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])?
        .with_no_client_auth()
        .with_cert_resolver(server);
    handshake(client, server)
}

#[test]
fn pinned_certificate_is_accepted_from_the_holder_of_its_key_only() {
    let ((certificate, key), (other, other_key)) = (certificate_and_key(), certificate_and_key());
    for version in VERSIONS {
        let connect = |presented| {
            let verifier = PinnedServerCertificate::new(certificate.clone(), provider());
            connect_to(version, Arc::new(verifier), presented)
        };
        connect(presented(&certificate, &key)).unwrap();
        let error = connect(presented(&other, &other_key)).unwrap_err().to_string();
        assert!(error.contains("another certificate than the node has reported"), "{error}");
        assert!(connect(presented(&certificate, &other_key)).is_err(), "a stolen certificate: {version:?}");
    }
}

#[test]
fn unverified_server_may_present_any_certificate_with_any_key() {
    let ((certificate, key), (_, other_key)) = (certificate_and_key(), certificate_and_key());
    for version in VERSIONS {
        for key in [&key, &other_key] {
            let verifier = Arc::new(UnverifiedServer::new(provider()));
            connect_to(version, verifier, presented(&certificate, key)).unwrap();
        }
    }
}

#[test]
fn requested_client_certificate_is_optional_and_needs_its_key() {
    let (authority, _) = certificate_and_key();
    let ((certificate, key), (_, other_key)) = (certificate_and_key(), certificate_and_key());
    let mut roots = RootCertStore::empty();
    roots.add(authority).unwrap();
    let authorities =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build().unwrap();
    for version in VERSIONS {
        let connect = |client: Option<Arc<SingleCertAndKey>>| {
            let verifier = RequestedClientCertificate::new(Arc::clone(&authorities), provider());
            assert_eq!(verifier.root_hint_subjects().len(), 1);
            let server = ServerConfig::builder_with_provider(provider())
                .with_protocol_versions(&[version])?
                .with_client_cert_verifier(Arc::new(verifier))
                .with_cert_resolver(presented(&certificate, &key));
            let config = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(&[version])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(UnverifiedServer::new(provider())));
            let config = match client {
                Some(client) => config.with_client_cert_resolver(client),
                None => config.with_no_client_auth(),
            };
            handshake(config, server)
        };
        assert_eq!(connect(None), Ok(0));
        assert_eq!(connect(Some(presented(&certificate, &key))), Ok(1), "of no authority: {version:?}");
        assert!(connect(Some(presented(&certificate, &other_key))).is_err(), "{version:?}");
    }
}
