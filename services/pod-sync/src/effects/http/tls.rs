//! TLS for probes and hooks (pod-lifecycle.md §10, §13.3).
//!
//! The server certificate is not verified: it is the container's own, and the response grants nothing. No session is cached.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use keelson_tls::UnverifiedServer;
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, Error};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::HttpError;

/// The first bytes of a response without TLS.
const PLAIN: &[u8; 5] = b"HTTP/";

/// An encrypted connection.
pub struct Stream(tokio_rustls::client::TlsStream<Heard>);

/// Starts TLS on a connection. `host` is sent as the server name (SNI) if it is a DNS name.
///
/// # Errors
/// The handshake failed; [`HttpError::plain`] if the server answered in plain HTTP.
pub async fn begin(stream: TcpStream, host: &str) -> Result<Stream, HttpError> {
    let config = config().map_err(|e| HttpError::from(format!("TLS cannot be set up: {e}")))?;
    // A host that is neither a DNS name nor an address is not sent: no server name is sent for an address.
    let unnamed = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
    let name = ServerName::try_from(host.to_owned()).unwrap_or(unnamed);
    let heard = Heard { stream, head: Vec::new() };
    match TlsConnector::from(config).connect(name, heard).into_fallible().await {
        Ok(stream) => Ok(Stream(stream)),
        Err((_, heard)) if heard.head == PLAIN => {
            Err(HttpError { text: "the server speaks HTTP without TLS".to_owned(), plain: true })
        }
        Err((error, _)) => Err(format!("no TLS with the server: {error}").into()),
    }
}

fn config() -> Result<Arc<ClientConfig>, Error> {
    static CONFIG: OnceLock<Result<Arc<ClientConfig>, Error>> = OnceLock::new();
    let make = || {
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(UnverifiedServer::new(Arc::clone(&provider)));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    };
    CONFIG.get_or_init(make).clone()
}

/// A connection that records the first bytes received.
struct Heard {
    stream: TcpStream,
    head: Vec<u8>,
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let wanted = PLAIN.len() - self.head.len();
        let came = &buffer.filled()[before..];
        self.head.extend_from_slice(&came[..came.len().min(wanted)]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Heard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match ready!(Pin::new(&mut self.0).poll_read(context, buffer)) {
            // Many servers hang up without a farewell. Whether something is missing, HTTP tells.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
