//! TLS versions, cipher suites and key exchange groups, with clients that offer some of them.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::sync::Arc;

use keelson_config::{CipherSuite, KeyExchange};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::ServerName;
use rustls::version::{TLS12, TLS13};
use rustls::{
    AlertDescription, ClientConfig, Error, NamedGroup, ProtocolVersion, RootCertStore,
    SupportedProtocolVersion,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::fake::soon;
use crate::secured_node::Secured;

/// The negotiated version and cipher suite.
type Negotiated = (ProtocolVersion, rustls::CipherSuite);

/// Connects as a client that offers these versions and suites; an empty list of suites means all. The error is that of TLS.
async fn connect(
    node: &Secured,
    versions: &[&'static SupportedProtocolVersion],
    suites: &[rustls::CipherSuite],
) -> Result<Negotiated, Error> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.retain(|suite| suites.is_empty() || suites.contains(&suite.suite()));
    connect_with(node, versions, provider).await
}

async fn connect_with(
    node: &Secured,
    versions: &[&'static SupportedProtocolVersion],
    provider: CryptoProvider,
) -> Result<Negotiated, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(node.serving_chain[1].clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(node.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    match soon(TlsConnector::from(Arc::new(config)).connect(name, stream)).await {
        Ok(stream) => {
            let connection = stream.get_ref().1;
            Ok((
                connection.protocol_version().unwrap(),
                connection.negotiated_cipher_suite().unwrap().suite(),
            ))
        }
        Err(error) => Err(error.get_ref().unwrap().downcast_ref::<Error>().unwrap().clone()),
    }
}

/// A handshake that the node ends with this alert.
fn refused(alert: AlertDescription) -> Result<ProtocolVersion, Error> {
    Err(Error::AlertReceived(alert))
}

#[tokio::test]
async fn tls_1_2_is_accepted_unless_the_minimum_version_is_1_3() {
    let (old, new) = (ProtocolVersion::TLSv1_2, ProtocolVersion::TLSv1_3);
    for (only_tls13, offered, expected) in [
        (false, &[&TLS12][..], Ok(old)),
        (false, &[&TLS13], Ok(new)),
        (false, &[&TLS12, &TLS13], Ok(new)),
        (true, &[&TLS12], refused(AlertDescription::ProtocolVersion)),
        (true, &[&TLS13], Ok(new)),
        (true, &[&TLS12, &TLS13], Ok(new)),
    ] {
        let node = Secured::start_with(|api| api.tls.as_mut().unwrap().only_tls13 = only_tls13).await;
        let found = connect(&node, offered, &[]).await.map(|(version, _)| version);
        assert_eq!(found, expected, "only 1.3: {only_tls13}, offered: {offered:?}");
    }
}

#[tokio::test]
async fn tls_1_2_cipher_suites_are_restricted_and_tls_1_3_has_all() {
    use rustls::CipherSuite as Id;
    let configured = vec![CipherSuite::EcdsaAes256Gcm, CipherSuite::RsaAes128Gcm];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().cipher_suites = configured).await;
    let (enabled, disabled) =
        (Id::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, Id::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256);
    let negotiated = (ProtocolVersion::TLSv1_2, enabled);
    assert_eq!(connect(&node, &[&TLS12], &[enabled]).await, Ok(negotiated));
    assert_eq!(connect(&node, &[&TLS12], &[disabled, enabled]).await, Ok(negotiated), "a suite of both");
    let refused = Err(Error::AlertReceived(AlertDescription::HandshakeFailure));
    assert_eq!(connect(&node, &[&TLS12], &[disabled]).await, refused);
    let rsa = Id::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256;
    assert_eq!(connect(&node, &[&TLS12], &[rsa]).await, refused, "the certificate has an ECDSA key");
    for suite in [Id::TLS13_AES_128_GCM_SHA256, Id::TLS13_CHACHA20_POLY1305_SHA256] {
        assert_eq!(connect(&node, &[&TLS13], &[suite]).await, Ok((ProtocolVersion::TLSv1_3, suite)));
    }

    let configured = vec![CipherSuite::Aes128Gcm];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().cipher_suites = configured).await;
    let refused = Err(Error::AlertReceived(AlertDescription::ProtocolVersion));
    assert_eq!(connect(&node, &[&TLS12], &[]).await, refused, "no suite of TLS 1.2 is configured");
    assert_eq!(
        connect(&node, &[&TLS13], &[]).await.map(|(version, _)| version),
        Ok(ProtocolVersion::TLSv1_3)
    );
}

#[tokio::test]
async fn key_exchange_groups_are_restricted_to_the_configured_ones() {
    let configured = vec![KeyExchange::P384, KeyExchange::X25519];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().key_exchanges = configured).await;
    for (version, name) in [(&TLS12, ProtocolVersion::TLSv1_2), (&TLS13, ProtocolVersion::TLSv1_3)] {
        for (group, expected) in [
            (NamedGroup::X25519, Ok(name)),
            (NamedGroup::secp384r1, Ok(name)),
            (NamedGroup::secp256r1, refused(AlertDescription::HandshakeFailure)),
        ] {
            let mut provider = ring::default_provider();
            provider.kx_groups.retain(|known| known.name() == group);
            let found = connect_with(&node, &[version], provider).await.map(|(version, _)| version);
            assert_eq!(found, expected, "{version:?}, {group:?}");
        }
    }
}
