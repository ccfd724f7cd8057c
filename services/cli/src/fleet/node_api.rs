//! A client of the kubelet API of a remote node.
//!
//! The node publishes its address and its certificate under its keys, which only the node may write. So no certificate
//! authority is needed to authenticate the node. The node authenticates the client by its certificate.

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
use keelson_tls::PinnedServerCertificate;
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::etcd_error::from_etcd_error;
use super::nodes::Fleet;
use crate::args::EtcdArgs;
use crate::error::CliError;

/// The timeout of a connection to an address of the node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of bytes of an error response that are shown.
const MAX_ERROR_BYTES: usize = 4 << 10;

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
    /// The API of a node from its reported Node, with the client certificate in `args`.
    ///
    /// # Errors
    /// The node has reported no API, or `args` have no client certificate.
    pub(super) async fn of(fleet: &Fleet, args: &EtcdArgs, node: &str) -> Result<Self, CliError> {
        let keys = NodeKeys::new(node);
        let entry = fleet.etcd.get(&keys.node()).await.map_err(from_etcd_error)?;
        let alive = fleet.etcd.get(&keys.lease()).await.map_err(from_etcd_error)?.is_some();
        let reported: Option<Node> = entry.and_then(|entry| serde_json::from_slice(&entry.value).ok());
        let reported = reported.ok_or_else(|| CliError::NotFound {
            what: format!("the node {node} has not reported its status yet"),
            hint: "`keelson get node --etcd …` lists the nodes".into(),
        })?;
        let port = reported.status.daemon_endpoints.kubelet_endpoint.as_ref().map_or(0, |e| e.port);
        let certificate = reported.metadata.annotations.get(annotations::SERVING_CERTIFICATE);
        let certificate = certificate.and_then(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).ok());
        let (Some(certificate), Some(port)) =
            (certificate, u16::try_from(port).ok().filter(|port| *port > 0))
        else {
            return Err(CliError::Failed {
                message: format!("the API of the node {node} is closed to other machines"),
                hint: Some(
                    "set authentication.x509.clientCAFile in the KubeletConfiguration of the node to the authorities of its \
                     clients"
                        .into(),
                ),
            });
        };
        let reported_hosts =
            || reported.status.addresses.iter().map(|address| address.address.clone()).collect();
        let (hosts, port) = match &args.node_address {
            Some(text) => parse_address(text)?,
            None => (reported_hosts(), port),
        };
        Ok(Self { node: node.to_owned(), hosts, port, tls: Arc::new(tls(args, certificate)?), alive })
    }

    /// Sends a request and returns the response if it is a success.
    ///
    /// # Errors
    /// The node cannot be reached, does not authenticate the client, or answers with another status.
    pub(super) async fn request(
        &self,
        method: Method,
        path_and_query: &str,
        headers: &[(&str, &str)],
    ) -> Result<Response<Incoming>, CliError> {
        let (host, stream) = self.connect().await?;
        let broken = |error: &dyn std::fmt::Display| {
            self.unreachable_error(&host, &format!("the connection broke: {error}"))
        };
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| broken(&error))?;
        keelson_service_kit::spawn("connection", connection.with_upgrades());
        let request = Request::builder().method(method).uri(path_and_query).header("Host", &host);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| CliError::Usage {
            message: format!("the names do not form a valid request: {error}"),
            hint: "check the names of the pod and the container".into(),
        })?;
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        if answer.status().is_success() || answer.status() == hyper::StatusCode::SWITCHING_PROTOCOLS {
            return Ok(answer);
        }
        Err(self.response_error(answer).await)
    }

    async fn connect(&self) -> Result<(String, TlsStream<TcpStream>), CliError> {
        let mut last = None;
        for host in &self.hosts {
            match self.dial(host).await {
                Ok(stream) => return Ok((host.clone(), stream)),
                Err(error) => last = Some(self.unreachable_error(host, &error.to_string())),
            }
        }
        Err(last.unwrap_or_else(|| self.unreachable_error("nowhere", "the node reports no address")))
    }

    async fn dial(&self, host: &str) -> io::Result<TlsStream<TcpStream>> {
        let timeout_error = || {
            let text = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let connect = async {
            let stream = TcpStream::connect((host, self.port)).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream).await
        };
        tokio::time::timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| timeout_error())?
    }

    fn unreachable_error(&self, host: &str, why: &str) -> CliError {
        let hint = if self.alive {
            "check that this machine can reach that address, and `keelson get services` on the node"
        } else {
            "the node is down; `keelson get node --etcd …` shows when it is back"
        };
        let message = format!("the node {} does not answer at {host}, port {}: {why}", self.node, self.port);
        CliError::NodeUnreachable { message, hint: hint.into() }
    }

    async fn response_error(&self, answer: Response<Incoming>) -> CliError {
        let status = answer.status().as_u16();
        let mut body = answer.into_body();
        let mut text = Vec::new();
        while text.len() < MAX_ERROR_BYTES {
            match body.frame().await {
                Some(Ok(frame)) => text.extend_from_slice(&frame.into_data().unwrap_or_default()),
                _ => break,
            }
        }
        let text = String::from_utf8_lossy(&text[..text.len().min(MAX_ERROR_BYTES)]).trim().to_owned();
        let node = &self.node;
        match status {
            401 | 403 => CliError::NodeDenied {
                message: format!("the node {node} does not accept your certificate"),
                hint: "use --node-cert and --node-key with a certificate that an authority in the node's \
                       authentication.x509.clientCAFile has signed"
                    .into(),
            },
            404 => CliError::NotFound {
                what: format!("the node {node} did not find it: {text}"),
                hint: "`keelson get pods -A --etcd …` lists all pods with their nodes".into(),
            },
            _ => {
                CliError::Failed { message: format!("the node {node} answers {status}: {text}"), hint: None }
            }
        }
    }
}

/// `HOST:PORT`, where the host may be an IPv6 address in brackets.
fn parse_address(text: &str) -> Result<(Vec<String>, u16), CliError> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some((host, port.parse::<u16>().ok().filter(|port| *port > 0)?))
    });
    match parts {
        Some((host, port)) if !host.is_empty() => Ok((vec![host.to_owned()], port)),
        _ => Err(CliError::Usage {
            message: format!("--node-address {text:?} is not a host and a port"),
            hint: "write 10.0.0.7:10250, node.example:10250 or [fd00::7]:10250".into(),
        }),
    }
}

fn tls(args: &EtcdArgs, certificate: CertificateDer<'static>) -> Result<ClientConfig, CliError> {
    let cert = args.node_cert.as_ref().or(args.etcd_cert.as_ref());
    let key = args.node_key.as_ref().or(args.etcd_key.as_ref());
    let (Some(cert), Some(key)) = (cert, key) else {
        return Err(CliError::Usage {
            message: "the command has no client certificate for the node".into(),
            hint: "add --node-cert and --node-key with your certificate and its key".into(),
        });
    };
    let invalid = |path: &Path, why: String| CliError::Usage {
        message: format!("cannot use {}: {why}", path.display()),
        hint: "--node-cert and --node-key take PEM files".into(),
    };
    let read = |path: &Path| fs::read(path).map_err(|error| invalid(path, error.to_string()));
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&read(cert)?)
        .collect::<Result<_, _>>()
        .map_err(|error| invalid(cert, format!("not PEM: {error}")))?;
    let own = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|error| invalid(key, format!("no private key in it: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(PinnedServerCertificate::new(certificate, Arc::clone(&provider)));
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| invalid(cert, error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(chain, own)
        .map_err(|error| invalid(cert, error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_address_is_a_host_and_a_port() {
        for (text, host, port) in [
            ("10.0.0.7:10250", "10.0.0.7", 10250),
            ("node:1", "node", 1),
            ("[fd00::7]:10250", "fd00::7", 10250),
        ] {
            assert_eq!(parse_address(text).unwrap(), (vec![host.to_owned()], port), "{text}");
        }
        for odd in ["", "node", ":1", "node:", "node:0", "node:70000", "node:x"] {
            assert!(matches!(parse_address(odd), Err(CliError::Usage { .. })), "{odd}");
        }
    }
}
