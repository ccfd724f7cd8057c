//! A connection to one member of etcd.

use std::fs;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions};
use http::Uri;
use hyper_util::rt::TokioIo;
use keelson_config::{Etcd as Settings, EtcdEndpoint as Target};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::Endpoint;

use crate::error::{self, EtcdError};

/// How long a member may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(2);
/// The interval of HTTP/2 keepalive pings while a call is active. etcd closes connections that ping more often than every
/// 5 s (`--grpc-keepalive-min-time`).
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The timeout of a keepalive ping.
pub(crate) const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A client of the member `endpoint`. The first call connects; with a user, that is the authentication here.
///
/// # Errors
/// A credential file cannot be used, the endpoint is invalid, or the user is refused.
pub(crate) async fn client(settings: &Settings, endpoint: &str) -> Result<Client, EtcdError> {
    let wrong = || EtcdError::Endpoint { endpoint: endpoint.to_owned() };
    let target = Target::parse(endpoint).ok_or_else(wrong)?;
    let tls = if target.secure { Some(tls(settings)?) } else { None };
    let user = match (&settings.user, &settings.password_file) {
        (Some(user), Some(file)) => Some((user.clone(), text_of("passwordFile", file)?)),
        _ => None,
    };
    // The scheme is always http: the connector adds TLS.
    let channel = Endpoint::from_shared(format!("http://{}", target.authority()))
        .map_err(|_| wrong())?
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(false)
        .connect_with_connector_lazy(tower::service_fn(move |_: Uri| dial(target.clone(), tls.clone())));
    let mut options = ConnectOptions::new().with_require_leader(true);
    if let Some((user, password)) = user {
        options = options.with_user(user, password).with_auto_token_refresh(true);
    }
    let failed = |error| error::failed(&settings.endpoints, "the user", error);
    Client::from_channel(Channel::Tonic(channel), Some(options)).await.map_err(failed)
}

fn tls(settings: &Settings) -> Result<Arc<ClientConfig>, EtcdError> {
    let unusable =
        |field, path: &Path, message: String| EtcdError::Credential { field, path: path.to_owned(), message };
    let Some(ca) = &settings.ca_file else {
        let message = "an endpoint with https needs it".to_owned();
        return Err(EtcdError::Missing { field: "caFile", message });
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("caFile", ca)? {
        roots.add(certificate).map_err(|error| unusable("caFile", ca, error.to_string()))?;
    }
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable("caFile", ca, error.to_string()))?
        .with_root_certificates(roots);
    let mut config = match (&settings.cert_file, &settings.key_file) {
        (Some(cert), Some(key)) => {
            let pem = bytes_of("keyFile", key)?;
            let parsed = PrivateKeyDer::from_pem_slice(&pem)
                .map_err(|error| unusable("keyFile", key, format!("it has no private key: {error}")))?;
            builder
                .with_client_auth_cert(certificates("certFile", cert)?, parsed)
                .map_err(|error| unusable("certFile", cert, error.to_string()))?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, EtcdError> {
    let unusable = |message: String| EtcdError::Credential { field, path: path.to_owned(), message };
    let pem = bytes_of(field, path)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(format!("it is no PEM: {error}")))?;
    if found.is_empty() { Err(unusable("it has no certificate".to_owned())) } else { Ok(found) }
}

fn bytes_of(field: &'static str, path: &Path) -> Result<Vec<u8>, EtcdError> {
    let unusable =
        |error: io::Error| EtcdError::Credential { field, path: path.to_owned(), message: error.to_string() };
    fs::read(path).map_err(unusable)
}

fn text_of(field: &'static str, path: &Path) -> Result<String, EtcdError> {
    let no_text = |_| EtcdError::Credential {
        field,
        path: path.to_owned(),
        message: "it is not UTF-8 text".to_owned(),
    };
    let text = String::from_utf8(bytes_of(field, path)?).map_err(no_text)?;
    Ok(text.trim().to_owned())
}

async fn dial(target: Target, tls: Option<Arc<ClientConfig>>) -> io::Result<TokioIo<Stream>> {
    let late =
        || io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {} s", CONNECT.as_secs()));
    let connect = async {
        let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = tls else { return Ok(Stream::Plain(stream)) };
        let name = ServerName::try_from(target.host.clone()).map_err(io::Error::other)?;
        Ok(Stream::Tls(Box::new(TlsConnector::from(tls).connect(name, stream).await?)))
    };
    tokio::time::timeout(CONNECT, connect).await.map_err(|_| late())?.map(TokioIo::new)
}

/// A connection, with TLS or without.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_credential_file_error_names_the_setting() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::plain(vec!["https://h:1".to_owned()]);
        assert_eq!(
            tls(&settings).unwrap_err().to_string(),
            "caFile is not given: an endpoint with https needs it"
        );
        let path = dir.path().join("ca.pem");
        settings.ca_file = Some(path.clone());
        let message = |settings: &Settings| tls(settings).unwrap_err().to_string();
        assert!(
            message(&settings).contains("ca.pem that caFile names: No such file"),
            "{}",
            message(&settings)
        );
        fs::write(&path, "no certificate\n").unwrap();
        assert!(message(&settings).ends_with("it has no certificate"), "{}", message(&settings));
    }
}
