//! The connection to the runtime's streaming server: from a URL to a socket on which it has answered.

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

/// A server on the same machine that does not take the connection by then has a full backlog.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// So much is told of an answer that is no upgrade, after at most so long.
const TELL: usize = 1 << 10;
const TELL_WITHIN: Duration = Duration::from_secs(2);

/// Why there is no connection that speaks SPDY.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The runtime's answer to `Exec` is of no use.
    #[error("the container runtime names no http address for them")]
    NoAddress,
    /// The runtime serves its streams with TLS.
    #[error(
        "the container runtime serves streams with TLS, which runtime-shim does not speak; turn it off, for the server \
         is meant for this machine alone (containerd: enable_tls_streaming = false, CRI-O: stream_enable_tls = false)"
    )]
    Tls,
    /// Nobody listens, or not here.
    #[error(
        "cannot connect to its streaming server at {address}; runtime-shim has to be in the network namespace of the \
         runtime, and the server on an address of this machine"
    )]
    Connect {
        /// Host and port.
        address: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The connection broke.
    #[error("its streaming server at {address} has broken the connection")]
    Broken {
        /// Host and port.
        address: String,
        /// How.
        #[source]
        source: io::Error,
    },
    /// What listens there is no HTTP server.
    #[error("what listens at {address} is not its streaming server")]
    NotHttp {
        /// Host and port.
        address: String,
        /// What is odd about it.
        #[source]
        source: HeadError,
    },
    /// It does not change to SPDY.
    #[error("its streaming server refuses them with status {status}: {text}")]
    Refused {
        /// Of HTTP.
        status: u16,
        /// What it says.
        text: String,
    },
    /// It speaks other protocols.
    #[error("its streaming server answers with {found:?}, not with {PROTOCOL} and {STREAMS}")]
    OtherProtocol {
        /// What it says to speak.
        found: String,
    },
}

/// Where the streams of one command are to be had. Whoever knows it has them, so it is never shown.
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
    /// Reads what the runtime has answered.
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

    /// The head of a request with `headers` beside the host.
    fn request(&self, method: &str, headers: &[(&str, &str)]) -> String {
        let mut text = format!("{method} {} HTTP/1.1\r\nHost: {}\r\n", self.path, self.address());
        for (name, value) in headers {
            text.extend([name, ": ", value, "\r\n"]);
        }
        text.push_str("\r\n");
        text
    }
}

/// A connection on which the server has answered.
#[derive(Debug)]
pub(super) struct Answered {
    pub socket: TcpStream,
    pub head: Head,
    /// What has come after the head.
    pub rest: BytesMut,
}

/// Connects, asks, and waits for the head of the answer.
pub(super) async fn ask(
    url: &StreamUrl,
    method: &str,
    headers: &[(&str, &str)],
) -> Result<Answered, DialError> {
    let address = url.address();
    let broken = |source| DialError::Broken { address: address.clone(), source };
    let connected = timeout(CONNECT_WITHIN, TcpStream::connect((url.host.as_str(), url.port))).await;
    let connected = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let mut socket = connected.map_err(|source| DialError::Connect { address: address.clone(), source })?;
    // A keystroke is not to wait for the next one.
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
                return Ok(Answered { socket, head, rest });
            }
            Ok(None) => {}
            Err(source) => return Err(DialError::NotHttp { address, source }),
        }
    }
}

/// Connects and changes to SPDY. What the server has said since is in the buffer.
pub(super) async fn spdy(url: &StreamUrl) -> Result<(TcpStream, BytesMut), DialError> {
    let headers = [
        ("User-Agent", "keelson-runtime-shim"),
        ("Connection", "Upgrade"),
        ("Upgrade", PROTOCOL),
        (STREAMS_HEADER, STREAMS),
        ("Content-Length", "0"),
    ];
    let Answered { mut socket, head, rest } = ask(url, "POST", &headers).await?;
    if head.status != 101 {
        let text = what_it_says(&mut socket, rest, &head).await;
        return Err(DialError::Refused { status: head.status, text });
    }
    let said = |name| head.header(name).unwrap_or_default();
    let (protocol, streams) = (said("Upgrade"), said(STREAMS_HEADER));
    if !protocol.eq_ignore_ascii_case(PROTOCOL) || streams != STREAMS {
        return Err(DialError::OtherProtocol { found: format!("{protocol} {streams}") });
    }
    Ok((socket, rest))
}

/// The beginning of the body of an answer that is no upgrade.
pub(super) async fn what_it_says(socket: &mut TcpStream, mut input: BytesMut, head: &Head) -> String {
    let length = head.header("Content-Length").and_then(|l| l.parse().ok()).unwrap_or(TELL).min(TELL);
    let rest = async {
        while input.len() < length && socket.read_buf(&mut input).await.is_ok_and(|read| read > 0) {}
    };
    // What has come by then will do.
    let _ = timeout(TELL_WITHIN, rest).await;
    String::from_utf8_lossy(&input[..input.len().min(length)]).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_its_path_is_not_shown() {
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
    fn what_cannot_be_dialled_says_why() {
        assert!(matches!(StreamUrl::parse("https://127.0.0.1:1/exec/abc"), Err(DialError::Tls)));
        for text in ["", "/exec/abc", "unix:///run/x.sock", "http://", "http:///exec/a", "ftp://a/b"] {
            assert!(matches!(StreamUrl::parse(text), Err(DialError::NoAddress)), "{text:?}");
        }
    }
}
