//! Selects the proxy for an API server (node-and-api.md §5): the one in the kubeconfig (`proxy-url`), else that of the
//! environment, by the rules of Go programs (`golang.org/x/net/http/httpproxy`).

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::proxy::{SocksV5, Tunnel};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use keelson_kube_model::base64;
use keelson_service_kit::status::chain;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tower::{BoxError, Service};

/// The proxy settings of the environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment {
    /// `HTTPS_PROXY`, else `https_proxy`.
    pub(crate) https: String,
    /// `NO_PROXY`, else `no_proxy`.
    pub(crate) none: String,
}

impl Environment {
    pub(crate) fn of_this_process() -> Self {
        let first = |names: [&str; 2]| {
            names.into_iter().filter_map(|name| std::env::var(name).ok()).find(|value| !value.is_empty())
        };
        Self {
            https: first(["HTTPS_PROXY", "https_proxy"]).unwrap_or_default(),
            none: first(["NO_PROXY", "no_proxy"]).unwrap_or_default(),
        }
    }
}

/// The protocol of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// HTTP `CONNECT`, with or without TLS.
    Http,
    /// SOCKS version 5 (RFC 1928). The proxy resolves names, as with Go, for `socks5` too.
    Socks,
}

/// A proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proxy {
    kind: Kind,
    uri: Uri,
    /// User name and password from the proxy URL.
    user: Option<(String, String)>,
}

/// The proxy for `server`; `None`: a direct connection. The kubeconfig's proxy is used for every server, that of the environment
/// only for `https://` and not for the hosts of `NO_PROXY`.
///
/// # Errors
/// The proxy URL is invalid or its scheme is not supported.
pub(crate) fn proxy_of(
    named: Option<&str>,
    environment: &Environment,
    server: &Uri,
) -> Result<Option<Proxy>, String> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return Proxy::parse(named).map(Some).map_err(|why| format!("proxy-url: {why}"));
    }
    let host = server.host().unwrap_or_default();
    let port = server.port_u16().unwrap_or(443);
    let is_meant = server.scheme_str() == Some("https") && !environment.https.is_empty();
    if !is_meant || is_excepted(&environment.none, host, port) {
        return Ok(None);
    }
    Proxy::parse(&environment.https).map(Some).map_err(|why| format!("HTTPS_PROXY: {why}"))
}

impl Proxy {
    /// Parses `http://host:port`, also without the scheme, `https://…`, `socks5://…` or `socks5h://…`, optionally with user name
    /// and password.
    fn parse(text: &str) -> Result<Self, String> {
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        // The error must not contain the password.
        let bare = whole.rsplit_once('@').map_or(whole.as_str(), |(_, rest)| rest);
        let uri: Uri = whole.parse().map_err(|error| format!("{bare} is no address of a proxy: {error}"))?;
        let kind = match uri.scheme_str() {
            Some("http" | "https") => Some(Kind::Http),
            Some("socks5" | "socks5h") => Some(Kind::Socks),
            _ => None,
        };
        let Some(kind) = kind.filter(|_| uri.host().is_some_and(|host| !host.is_empty())) else {
            return Err(format!(
                "a proxy is named as http://proxy.example:3128, or with https, socks5 or socks5h, which {bare} is not"
            ));
        };
        let user = uri.authority().and_then(|authority| authority.as_str().rsplit_once('@'));
        let user = user.map(|(user, _)| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            let text = |part| String::from_utf8(decoded(part));
            Ok::<_, std::string::FromUtf8Error>((text(name)?, text(password)?))
        });
        let user = user.transpose().map_err(|_| "its name and password are no UTF-8 text".to_owned())?;
        if kind == Kind::Socks && user.iter().any(|(name, password)| name.len() > 255 || password.len() > 255)
        {
            return Err("SOCKS takes names and passwords of 255 bytes at most".to_owned());
        }
        Ok(Self { kind, uri, user })
    }

    /// The `Proxy-Authorization` header, if the URL has a user name and a password.
    fn authorization(&self) -> Option<HeaderValue> {
        let (name, password) = self.user.as_ref()?;
        // Base64 is always a valid header value.
        HeaderValue::from_str(&format!("Basic {}", base64::encode(format!("{name}:{password}").as_bytes())))
            .ok()
    }
}

/// Decodes percent-encoding.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let (bytes, mut at, mut all) = (text.as_bytes(), 0, Vec::new());
    while at < bytes.len() {
        match (bytes[at], digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                all.push(u8::try_from(high * 16 + low).unwrap_or_default());
                at += 3;
            }
            (byte, _, _) => {
                all.push(byte);
                at += 1;
            }
        }
    }
    all
}

/// Whether a host is reached directly; the local machine always is.
fn is_excepted(list: &str, host: &str, port: u16) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let address: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    list.split(',').any(|entry| excepts(&entry.trim().to_ascii_lowercase(), &host, address, port))
}

/// Whether one entry of `NO_PROXY` matches the host.
fn excepts(entry: &str, host: &str, address: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Some((network, length)) = entry.split_once('/') {
        let (Ok(network), Ok(length)) = (network.parse(), length.parse()) else { return false };
        return address.is_some_and(|address| is_within(address, network, length));
    }
    let (name, only) = with_port(entry);
    if name.is_empty() || only.is_some_and(|only| only != port) {
        return false;
    }
    if let Ok(one) = name.parse::<IpAddr>() {
        return address == Some(one);
    }
    let below = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
    match below.strip_prefix('.') {
        // An entry that begins with a dot matches only subdomains.
        Some(_) => host.ends_with(below),
        None => host == below || host.strip_suffix(below).is_some_and(|rest| rest.ends_with('.')),
    }
}

/// A name or an address, and its port.
fn with_port(entry: &str) -> (&str, Option<u16>) {
    if let Some((address, rest)) = entry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (address, rest.strip_prefix(':').and_then(|port| port.parse().ok()));
    }
    match entry.rsplit_once(':') {
        // More than one colon means an IPv6 address.
        Some((name, port)) if !name.contains(':') => match port.parse() {
            Ok(port) => (name, Some(port)),
            Err(_) => (entry, None),
        },
        _ => (entry, None),
    }
}

/// Whether an address is in a network with a prefix of that many bits.
fn is_within(address: IpAddr, network: IpAddr, length: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) if length <= 32 => {
            let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
            address.to_bits() & mask == network.to_bits() & mask
        }
        (IpAddr::V6(address), IpAddr::V6(network)) if length <= 128 => {
            let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
            address.to_bits() & mask == network.to_bits() & mask
        }
        _ => false,
    }
}

/// The connector to the server.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// A direct connection.
    Straight(HttpConnector),
    /// Through an HTTP proxy with `CONNECT`.
    Through(Tunnel<HttpConnector>),
    /// The same, within TLS up to the proxy.
    Secured(Tunnel<HttpsConnector<HttpConnector>>),
    /// Through a SOCKS proxy.
    Socks(SocksV5<HttpConnector>),
}

impl Way {
    /// `tls` verifies the server's certificate and also that of a proxy, as with client-go.
    pub(crate) fn new(tcp: HttpConnector, proxy: Option<Proxy>, tls: &ClientConfig) -> Self {
        let Some(proxy) = proxy else { return Self::Straight(tcp) };
        let (authorization, Proxy { kind, uri, user }) = (proxy.authorization(), proxy);
        match kind {
            Kind::Socks => {
                let uri = with_default_port(uri, SOCKS_PORT);
                let socks = SocksV5::new(uri, tcp);
                Self::Socks(match user {
                    Some((name, password)) => socks.with_auth(name, password),
                    None => socks,
                })
            }
            Kind::Http if uri.scheme_str() == Some("https") => {
                let to_proxy = HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_only();
                let tunnel = Tunnel::new(uri, to_proxy.enable_http1().wrap_connector(tcp));
                Self::Secured(match authorization {
                    Some(authorization) => tunnel.with_auth(authorization),
                    None => tunnel,
                })
            }
            Kind::Http => {
                let tunnel = Tunnel::new(uri, tcp);
                Self::Through(match authorization {
                    Some(authorization) => tunnel.with_auth(authorization),
                    None => tunnel,
                })
            }
        }
    }
}

/// The default port of SOCKS.
const SOCKS_PORT: u16 = 1080;

/// Adds the default port; the connector has one only for HTTP.
fn with_default_port(uri: Uri, port: u16) -> Uri {
    let Some(host) = uri.host().filter(|_| uri.port_u16().is_none()) else { return uri };
    Uri::builder()
        .scheme(uri.scheme_str().unwrap_or_default())
        .authority(format!("{host}:{port}"))
        .path_and_query("/")
        .build()
        .unwrap_or(uri)
}

/// A connection, direct or through a proxy.
#[derive(Debug)]
pub(crate) enum Link {
    /// Without TLS up to the proxy or the server.
    Plain(TokioIo<TcpStream>),
    /// With it up to the proxy.
    Secured(Box<MaybeHttpsStream<TokioIo<TcpStream>>>),
}

impl Connection for Link {
    fn connected(&self) -> Connected {
        match self {
            Self::Plain(stream) => stream.connected(),
            Self::Secured(stream) => stream.connected(),
        }
    }
}

impl Read for Link {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, into),
            Self::Secured(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl Write for Link {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secured(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secured(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A tunnel to a server through a proxy.
fn by_proxy<S, E: Into<BoxError>>(
    connecting: impl Future<Output = Result<S, E>> + Send + 'static,
    link: impl FnOnce(S) -> Link + Send + 'static,
) -> BoxFuture<'static, Result<Link, BoxError>> {
    Box::pin(async move {
        connecting.await.map(link).map_err(|error| format!("the proxy: {}", chain(&*error.into())).into())
    })
}

impl Service<Uri> for Way {
    type Response = Link;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Link, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            Self::Straight(tcp) => Service::<Uri>::poll_ready(tcp, cx).map_err(Into::into),
            Self::Through(tunnel) => Service::<Uri>::poll_ready(tunnel, cx).map_err(Into::into),
            Self::Secured(tunnel) => Service::<Uri>::poll_ready(tunnel, cx).map_err(Into::into),
            Self::Socks(socks) => Service::<Uri>::poll_ready(socks, cx).map_err(Into::into),
        }
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        match self {
            Self::Straight(tcp) => {
                let connecting = tcp.call(server);
                Box::pin(async move { connecting.await.map(Link::Plain).map_err(Into::into) })
            }
            Self::Through(tunnel) => by_proxy(tunnel.call(server), Link::Plain),
            Self::Secured(tunnel) => by_proxy(tunnel.call(server), |stream| Link::Secured(Box::new(stream))),
            Self::Socks(socks) => by_proxy(socks.call(with_default_port(server, HTTPS_PORT)), Link::Plain),
        }
    }
}

/// The default port of a server.
const HTTPS_PORT: u16 = 443;

#[cfg(test)]
mod tests;
