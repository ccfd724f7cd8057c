//! The kubelet API of a node that is another machine.
//!
//! Where it is and which certificate it shows, the node itself tells under its keys, which nobody else may write; so no
//! authority is needed to know that it is the node. It knows who asks by their certificate.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use keelson_etcd::NodeKeys;
use keelson_kube_model::{Node, annotations};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{Fleet, failure};
use crate::args::EtcdArgs;
use crate::error::Failure;

/// How long an address of the node may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// So much is told of an answer that is not the one that was asked for.
const TELL: usize = 4 << 10;

/// The kubelet API of one node.
#[derive(Debug)]
pub(super) struct NodeApi {
    node: String,
    hosts: Vec<String>,
    port: u16,
    tls: Arc<ClientConfig>,
    alive: bool,
}

impl NodeApi {
    /// As the node tells of itself; `args` say who asks.
    ///
    /// # Errors
    /// The node tells of none, or nothing says who asks.
    pub(super) async fn of(fleet: &Fleet, args: &EtcdArgs, node: &str) -> Result<Self, Failure> {
        let keys = NodeKeys::new(node);
        let entry = fleet.etcd.get(&keys.node()).await.map_err(failure)?;
        let alive = fleet.etcd.get(&keys.lease()).await.map_err(failure)?.is_some();
        let told: Option<Node> = entry.and_then(|entry| serde_json::from_slice(&entry.value).ok());
        let told = told.ok_or_else(|| Failure::NotFound {
            what: format!("the node {node} has told nothing of itself yet"),
            hint: "`keelson get node --etcd …` lists the nodes".into(),
        })?;
        let port = told.status.daemon_endpoints.kubelet_endpoint.as_ref().map_or(0, |e| e.port);
        let shown = told.metadata.annotations.get(annotations::SERVING_CERTIFICATE);
        let shown = shown.and_then(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).ok());
        let (Some(shown), Some(port)) = (shown, u16::try_from(port).ok().filter(|port| *port > 0)) else {
            return Err(Failure::Answer {
                message: format!("the node {node} lets nobody in from outside"),
                hint: Some(
                    "authentication.x509.clientCAFile in the KubeletConfiguration of the node names the authorities of those \
                     whom it lets in"
                        .into(),
                ),
            });
        };
        let told_hosts = || told.status.addresses.iter().map(|address| address.address.clone()).collect();
        let (hosts, port) = match &args.node_address {
            Some(text) => place(text)?,
            None => (told_hosts(), port),
        };
        Ok(Self { node: node.to_owned(), hosts, port, tls: Arc::new(tls(args, shown)?), alive })
    }

    /// Asks, and gives the answer if it is a good one.
    ///
    /// # Errors
    /// The node cannot be reached, does not know who asks, or answers something else.
    pub(super) async fn ask(
        &self,
        method: Method,
        path_and_query: &str,
        headers: &[(&str, &str)],
    ) -> Result<Response<Incoming>, Failure> {
        let (host, stream) = self.connect().await?;
        let broken =
            |error: &dyn std::fmt::Display| self.away(&host, &format!("the connection broke: {error}"));
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| broken(&error))?;
        tokio::spawn(connection.with_upgrades());
        let request = Request::builder().method(method).uri(path_and_query).header("Host", &host);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| Failure::Usage {
            message: format!("this cannot be asked of a node: {error}"),
            hint: "look at the names".into(),
        })?;
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        if answer.status().is_success() || answer.status() == hyper::StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        Err(self.refused(answer).await)
    }

    async fn connect(&self) -> Result<(String, TlsStream<TcpStream>), Failure> {
        let mut last = None;
        for host in &self.hosts {
            match self.dial(host).await {
                Ok(stream) => return Ok((host.clone(), stream)),
                Err(error) => last = Some(self.away(host, &error.to_string())),
            }
        }
        Err(last.unwrap_or_else(|| self.away("nowhere", "the node tells no address")))
    }

    async fn dial(&self, host: &str) -> io::Result<TlsStream<TcpStream>> {
        let late = || {
            let text = format!("no connection within {} s", CONNECT.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let connect = async {
            let stream = TcpStream::connect((host, self.port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream).await
        };
        tokio::time::timeout(CONNECT, connect).await.map_err(|_| late())?
    }

    fn away(&self, host: &str, why: &str) -> Failure {
        let hint = if self.alive {
            "look whether this machine reaches the node there, and `keelson get services` on the node"
        } else {
            "the node shows no sign of life; `keelson get node --etcd …` says when it is back"
        };
        let message = format!("the node {} does not answer at {host}, port {}: {why}", self.node, self.port);
        Failure::NodeAway { message, hint: hint.into() }
    }

    async fn refused(&self, answer: Response<Incoming>) -> Failure {
        let status = answer.status().as_u16();
        let mut body = answer.into_body();
        let mut text = Vec::new();
        while text.len() < TELL {
            match body.frame().await {
                Some(Ok(frame)) => text.extend_from_slice(&frame.into_data().unwrap_or_default()),
                _ => break,
            }
        }
        let text = String::from_utf8_lossy(&text[..text.len().min(TELL)]).trim().to_owned();
        let node = &self.node;
        match status {
            401 | 403 => Failure::NotLetIn {
                message: format!("the node {node} does not know who you are"),
                hint: "--node-cert and --node-key with a certificate that an authority in the node's \
                       authentication.x509.clientCAFile has signed"
                    .into(),
            },
            404 => Failure::NotFound {
                what: format!("the node {node} has it not: {text}"),
                hint: "`keelson get pods -A --etcd …` shows what runs where".into(),
            },
            _ => Failure::Answer { message: format!("the node {node} answers {status}: {text}"), hint: None },
        }
    }
}

/// `HOST:PORT`, where the host may be an IPv6 address in brackets.
fn place(text: &str) -> Result<(Vec<String>, u16), Failure> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some((host, port.parse::<u16>().ok().filter(|port| *port > 0)?))
    });
    match parts {
        Some((host, port)) if !host.is_empty() => Ok((vec![host.to_owned()], port)),
        _ => Err(Failure::Usage {
            message: format!("--node-address {text:?} is no host and port"),
            hint: "write 10.0.0.7:10250, node.example:10250 or [fd00::7]:10250".into(),
        }),
    }
}

fn tls(args: &EtcdArgs, shown: CertificateDer<'static>) -> Result<ClientConfig, Failure> {
    let cert = args.node_cert.as_ref().or(args.etcd_cert.as_ref());
    let key = args.node_key.as_ref().or(args.etcd_key.as_ref());
    let (Some(cert), Some(key)) = (cert, key) else {
        return Err(Failure::Usage {
            message: "nothing says who you are to the node".into(),
            hint: "--node-cert and --node-key name your certificate and its key".into(),
        });
    };
    let wrong = |path: &Path, why: String| Failure::Usage {
        message: format!("cannot use {}: {why}", path.display()),
        hint: "--node-cert and --node-key name PEM files".into(),
    };
    let read = |path: &Path| fs::read(path).map_err(|error| wrong(path, error.to_string()));
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&read(cert)?)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(cert, format!("it is no PEM: {error}")))?;
    let own = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|error| wrong(key, format!("it has no private key: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let expected = Arc::new(Expected { shown, provider: Arc::clone(&provider) });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(cert, error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(expected)
        .with_client_auth_cert(chain, own)
        .map_err(|error| wrong(cert, error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Takes the certificate that the node has told, and no other.
#[derive(Debug)]
struct Expected {
    shown: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Expected {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if *own == self.shown {
            return Ok(ServerCertVerified::assertion());
        }
        Err(rustls::Error::General(
            "what answers there shows another certificate than the node has told".into(),
        ))
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
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (text, host, port) in [
            ("10.0.0.7:10250", "10.0.0.7", 10250),
            ("node:1", "node", 1),
            ("[fd00::7]:10250", "fd00::7", 10250),
        ] {
            assert_eq!(place(text).unwrap(), (vec![host.to_owned()], port), "{text}");
        }
        for odd in ["", "node", ":1", "node:", "node:0", "node:70000", "node:x"] {
            assert!(matches!(place(odd), Err(Failure::Usage { .. })), "{odd}");
        }
    }
}
