//! A client against a server in this process.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, pem::PemObject as _};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

mod calls;
mod connection;
mod proxies;

fn encoded(pem: &str) -> String {
    keelson_kube_model::base64::encode(pem.as_ref())
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn signed(&self, usage: ExtendedKeyUsagePurpose) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![usage];
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// A server that authenticates clients by certificates of this CA.
    fn server(&self) -> ServerConfig {
        let (certificate, key) = self.signed(ExtendedKeyUsagePurpose::ServerAuth);
        let mut roots = RootCertStore::empty();
        let ca = rustls::pki_types::CertificateDer::from_pem_slice(self.pem().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let chain = rustls::pki_types::CertificateDer::pem_slice_iter(certificate.as_bytes());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(clients.build().unwrap())
            .with_single_cert(
                chain.collect::<Result<_, _>>().unwrap(),
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config
    }
}
