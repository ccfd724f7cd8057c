//! Versions and cipher suites of TLS, with clients that offer some of them.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

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
use crate::secured::Secured;

/// What both have agreed on.
type Agreed = (ProtocolVersion, rustls::CipherSuite);

/// Connects as a client that offers these versions and suites (all without any); the error is the one that TLS tells.
async fn connect(
    node: &Secured,
    versions: &[&'static SupportedProtocolVersion],
    suites: &[rustls::CipherSuite],
) -> Result<Agreed, Error> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.retain(|suite| suites.is_empty() || suites.contains(&suite.suite()));
    connect_with(node, versions, provider).await
}

async fn connect_with(
    node: &Secured,
    versions: &[&'static SupportedProtocolVersion],
    provider: CryptoProvider,
) -> Result<Agreed, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(node.shown[1].clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(node.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    match soon(TlsConnector::from(Arc::new(config)).connect(name, stream)).await {
        Ok(stream) => {
            let told = stream.get_ref().1;
            Ok((told.protocol_version().unwrap(), told.negotiated_cipher_suite().unwrap().suite()))
        }
        Err(error) => Err(error.get_ref().unwrap().downcast_ref::<Error>().unwrap().clone()),
    }
}

/// The alert with which a node ends a handshake.
fn refused(alert: AlertDescription) -> Result<ProtocolVersion, Error> {
    Err(Error::AlertReceived(alert))
}

#[tokio::test]
async fn a_client_of_tls_1_2_is_let_in_unless_the_lowest_version_is_1_3() {
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
async fn a_client_that_has_none_of_the_chosen_suites_is_refused_and_1_3_has_all_of_its_own() {
    use rustls::CipherSuite as Id;
    let chosen = vec![CipherSuite::EcdsaAes256Gcm, CipherSuite::RsaAes128Gcm];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().cipher_suites = chosen).await;
    let (has, has_not) =
        (Id::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, Id::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256);
    let ours = (ProtocolVersion::TLSv1_2, has);
    assert_eq!(connect(&node, &[&TLS12], &[has]).await, Ok(ours));
    assert_eq!(connect(&node, &[&TLS12], &[has_not, has]).await, Ok(ours), "of those that both have");
    let refused = Err(Error::AlertReceived(AlertDescription::HandshakeFailure));
    assert_eq!(connect(&node, &[&TLS12], &[has_not]).await, refused);
    let of_rsa = Id::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256;
    assert_eq!(connect(&node, &[&TLS12], &[of_rsa]).await, refused, "the certificate has an elliptic curve");
    for suite in [Id::TLS13_AES_128_GCM_SHA256, Id::TLS13_CHACHA20_POLY1305_SHA256] {
        assert_eq!(connect(&node, &[&TLS13], &[suite]).await, Ok((ProtocolVersion::TLSv1_3, suite)));
    }

    let chosen = vec![CipherSuite::Aes128Gcm];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().cipher_suites = chosen).await;
    let refused = Err(Error::AlertReceived(AlertDescription::ProtocolVersion));
    assert_eq!(connect(&node, &[&TLS12], &[]).await, refused, "none of 1.2 was chosen");
    assert_eq!(
        connect(&node, &[&TLS13], &[]).await.map(|(version, _)| version),
        Ok(ProtocolVersion::TLSv1_3)
    );
}

#[tokio::test]
async fn a_client_agrees_on_keys_in_a_way_that_was_chosen_or_is_refused() {
    let chosen = vec![KeyExchange::P384, KeyExchange::X25519];
    let node = Secured::start_with(|api| api.tls.as_mut().unwrap().key_exchanges = chosen).await;
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
