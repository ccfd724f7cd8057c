//! The connection to the runtime's streaming server, up to the head of its HTTP response.

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::BytesMut;
use http::Uri;
use keelson_runtime_shim_core::upgrade::{Head, HeadError};
use keelson_spdy::{PROTOCOL, STREAMS, STREAMS_HEADER};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Connect timeout. A server on the same machine that takes longer has a full backlog.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much of the body of a response that is no upgrade is reported, and how long reading it may take.
const MAX_BODY_BYTES: usize = 1 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the connection to the streaming server failed.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The runtime's response has no usable URL.
    #[error("the container runtime returned no http URL for them")]
    NoAddress,
    /// The runtime serves its streams with TLS.
    #[error(
        "the container runtime serves streams with TLS, which runtime-shim does not support; turn it off, because the \
         server is for this machine only (containerd: enable_tls_streaming = false, CRI-O: stream_enable_tls = false)"
    )]
    Tls,
    /// Nothing listens at the address.
    #[error(
        "cannot connect to its streaming server at {address}; runtime-shim must be in the network namespace of the \
         runtime, and the server must listen on an address of this machine"
    )]
    Connect {
        /// Host and port.
        address: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("its streaming server at {address} has broken the connection")]
    Broken {
        /// Host and port.
        address: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The server does not speak HTTP.
    #[error("the server at {address} is not its streaming server")]
    NotHttp {
        /// Host and port.
        address: String,
        /// The cause.
        #[source]
        source: HeadError,
    },
    /// The server does not upgrade to SPDY.
    #[error("its streaming server refuses them with status {status}: {text}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The beginning of the body.
        text: String,
    },
    /// The server upgrades to another protocol.
    #[error("its streaming server answers with {found:?}, not with {PROTOCOL} and {STREAMS}")]
    OtherProtocol {
        /// The protocols in its response.
        found: String,
    },
}

/// The URL of one command's streams. It grants access to them, so its path is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct StreamUrl {
    host: String,
    port: u16,
    path: String,
}

impl fmt::Debug for StreamUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamUrl({})", self.address())
    }
}

impl StreamUrl {
    /// Parses the URL from the runtime's response.
    pub(super) fn parse(text: &str) -> Result<Self, DialError> {
        let uri: Uri = text.parse().map_err(|_| DialError::NoAddress)?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(DialError::Tls),
            _ => return Err(DialError::NoAddress),
        }
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
        if host.is_empty() {
            return Err(DialError::NoAddress);
        }
        Ok(Self { host: host.to_owned(), port: uri.port_u16().unwrap_or(80), path: path.to_owned() })
    }

    fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The head of a request with `headers` in addition to `Host`.
    fn request(&self, method: &str, headers: &[(&str, &str)]) -> String {
        let mut text = format!("{method} {} HTTP/1.1\r\nHost: {}\r\n", self.path, self.address());
        for (name, value) in headers {
            text.extend([name, ": ", value, "\r\n"]);
        }
        text.push_str("\r\n");
        text
    }
}

/// A connection with the head of the server's response.
#[derive(Debug)]
pub(super) struct HttpResponse {
    pub socket: TcpStream,
    pub head: Head,
    /// Bytes received after the head.
    pub rest: BytesMut,
}

/// Connects, sends the request and waits for the head of the response.
pub(super) async fn send_request(
    url: &StreamUrl,
    method: &str,
    headers: &[(&str, &str)],
) -> Result<HttpResponse, DialError> {
    let address = url.address();
    let broken = |source| DialError::Broken { address: address.clone(), source };
    let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect((url.host.as_str(), url.port))).await;
    let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let mut socket = connected.map_err(|source| DialError::Connect { address: address.clone(), source })?;
    // Otherwise a keystroke could wait for the next one.
    socket.set_nodelay(true).map_err(broken)?;
    socket.write_all(url.request(method, headers).as_bytes()).await.map_err(broken)?;
    let mut rest = BytesMut::with_capacity(4 << 10);
    loop {
        if socket.read_buf(&mut rest).await.map_err(broken)? == 0 {
            return Err(broken(io::ErrorKind::UnexpectedEof.into()));
        }
        match Head::parse(&rest) {
            Ok(Some((head, length))) => {
                let _ = rest.split_to(length);
                return Ok(HttpResponse { socket, head, rest });
            }
            Ok(None) => {}
            Err(source) => return Err(DialError::NotHttp { address, source }),
        }
    }
}

/// Connects and upgrades to SPDY. The buffer has the bytes received after the head.
pub(super) async fn spdy(url: &StreamUrl) -> Result<(TcpStream, BytesMut), DialError> {
    let headers = [
        ("User-Agent", "keelson-runtime-shim"),
        ("Connection", "Upgrade"),
        ("Upgrade", PROTOCOL),
        (STREAMS_HEADER, STREAMS),
        ("Content-Length", "0"),
    ];
    let HttpResponse { mut socket, head, rest } = send_request(url, "POST", &headers).await?;
    if head.status != 101 {
        let text = read_body_text(&mut socket, rest, &head).await;
        return Err(DialError::Refused { status: head.status, text });
    }
    let header = |name| head.header(name).unwrap_or_default();
    let (protocol, streams) = (header("Upgrade"), header(STREAMS_HEADER));
    if !protocol.eq_ignore_ascii_case(PROTOCOL) || streams != STREAMS {
        return Err(DialError::OtherProtocol { found: format!("{protocol} {streams}") });
    }
    Ok((socket, rest))
}

/// The beginning of the body of a response that is no upgrade.
pub(super) async fn read_body_text(socket: &mut TcpStream, mut input: BytesMut, head: &Head) -> String {
    let length = head
        .header("Content-Length")
        .and_then(|l| l.parse().ok())
        .unwrap_or(MAX_BODY_BYTES)
        .min(MAX_BODY_BYTES);
    let rest = async {
        while input.len() < length && socket.read_buf(&mut input).await.is_ok_and(|read| read > 0) {}
    };
    // After the timeout, the bytes received so far are used.
    let _ = timeout(BODY_TIMEOUT, rest).await;
    String::from_utf8_lossy(&input[..input.len().min(length)]).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_url_is_parsed_and_its_path_never_shown() {
        for (text, address, path) in [
            ("http://127.0.0.1:41001/exec/abc", "127.0.0.1:41001", "/exec/abc"),
            ("http://localhost/exec/a?b=c", "localhost:80", "/exec/a?b=c"),
            ("http://[::1]:1/exec/abc", "[::1]:1", "/exec/abc"),
        ] {
            let url = StreamUrl::parse(text).unwrap();
            assert_eq!((url.address().as_str(), url.path.as_str()), (address, path));
            assert!(!format!("{url:?}").contains("exec"), "{url:?}");
            let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nA: b\r\n\r\n");
            assert_eq!(url.request("GET", &[("A", "b")]), request);
        }
    }

    #[test]
    fn unusable_stream_url_is_refused_with_its_reason() {
        assert!(matches!(StreamUrl::parse("https://127.0.0.1:1/exec/abc"), Err(DialError::Tls)));
        for text in ["", "/exec/abc", "unix:///run/x.sock", "http://", "http:///exec/a", "ftp://a/b"] {
            assert!(matches!(StreamUrl::parse(text), Err(DialError::NoAddress)), "{text:?}");
        }
    }
}
