//! GET over HTTP/1.1, with or without TLS, on a connection of its own, for probes and hooks (pod-lifecycle.md §10,
//! §13.3).

mod bounded;
mod tls;

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use keelson_kube_model::HttpHeader;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use bounded::Bounded;

/// The most bytes of a body that are read.
pub const BODY_LIMIT: usize = 10 << 10;
/// The most bytes of a response head that are accepted.
const HEAD_LIMIT: usize = 64 << 10;
/// The most bytes of a response: its head, ten kilobytes of its body in chunks of any size, and interim responses (RFC 9110, 15.2), of which a
/// server may send any number.
const ANSWER_LIMIT: usize = 256 << 10;
/// The most redirects that are followed.
const REDIRECTS: usize = 10;

/// A GET request.
#[derive(Debug, Clone)]
pub struct Get<'a> {
    /// Over TLS, without checking the certificate.
    pub tls: bool,
    /// DNS name or address.
    pub host: &'a str,
    /// TCP port.
    pub port: u16,
    /// Path, with a query if there is one.
    pub path: &'a str,
    /// The headers of the manifest.
    pub headers: &'a [HttpHeader],
    /// The `User-Agent`, unless `headers` contains one.
    pub user_agent: &'a str,
}

/// The response after the last redirect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// At most [`BODY_LIMIT`] bytes.
    pub body: String,
    location: Option<String>,
}

/// Why there is no response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpError {
    /// For people.
    pub text: String,
    /// The request used TLS, and the server answered in plain HTTP.
    pub plain: bool,
}

impl From<String> for HttpError {
    fn from(text: String) -> Self {
        Self { text, plain: false }
    }
}

/// The target of one request of a chain of redirects.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    tls: bool,
    host: String,
    port: u16,
    target: String,
    /// The `Host` of the manifest still applies: every redirect so far was relative.
    own_host: bool,
}

impl Place {
    fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Sends the request and follows redirects on the same host. A redirect to another host is returned as the response.
///
/// # Errors
/// There was no response within `bound`.
pub async fn get(request: &Get<'_>, bound: Duration) -> Result<Answer, HttpError> {
    let host = request.host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let (tls, port) = (request.tls, request.port);
    let place = Place { tls, host, port, target: target_of(request.path), own_host: true };
    let url = format!("{}://{}{}", place.scheme(), place.authority(), place.target);
    let answer = match tokio::time::timeout(bound, Box::pin(follow(request, place))).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {} s", bound.as_secs()).into()),
    };
    answer.map_err(|failed| HttpError { text: format!("Get {url:?}: {}", failed.text), ..failed })
}

async fn follow(request: &Get<'_>, mut place: Place) -> Result<Answer, HttpError> {
    for _ in 0..=REDIRECTS {
        let answer = once(request, &place).await?;
        match moved(&answer, &place)? {
            None => return Ok(answer),
            Some(next) => place = next,
        }
    }
    Err(format!("stopped after {REDIRECTS} redirects").into())
}

async fn once(request: &Get<'_>, place: &Place) -> Result<Answer, HttpError> {
    let message = message(request, place)?;
    let stream = TcpStream::connect((place.host.as_str(), place.port))
        .await
        .map_err(|e| format!("cannot connect to {}: {e}", place.authority()))?;
    if place.tls {
        let stream = Box::pin(tls::begin(stream, &place.host)).await?;
        return Ok(Box::pin(exchange(stream, message)).await?);
    }
    Ok(exchange(stream, message).await?)
}

/// One request and its response on a connection.
async fn exchange<S>(stream: S, message: Request<Empty<Bytes>>) -> Result<Answer, String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let stream = Bounded::new(stream, ANSWER_LIMIT);
    let mut client = http1::Builder::new();
    client.title_case_headers(true).max_buf_size(HEAD_LIMIT);
    let (mut sender, connection) =
        client.handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let exchange = Box::pin(async move {
        let response = sender.send_request(message).await.map_err(|e| chain(&e))?;
        answer(response).await
    });
    // The connection moves the bytes; a server that closes early may still have answered before.
    match select(exchange, Box::pin(connection)).await {
        Either::Left((answer, _)) => answer,
        Either::Right((_, exchange)) => exchange.await,
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let cause = error.source().map(|source| format!(": {source}"));
    format!("{error}{}", cause.unwrap_or_default())
}

async fn answer(response: http::Response<Incoming>) -> Result<Answer, String> {
    let (head, mut incoming) = response.into_parts();
    let location = head.headers.get(header::LOCATION).and_then(|v| v.to_str().ok()).map(ToOwned::to_owned);
    let mut body = Vec::new();
    while body.len() < BODY_LIMIT {
        let Some(frame) = incoming.frame().await else { break };
        if let Ok(data) = frame.map_err(|e| chain(&e))?.into_data() {
            body.extend_from_slice(&data[..data.len().min(BODY_LIMIT - body.len())]);
        }
    }
    let body = String::from_utf8_lossy(&body).into_owned();
    Ok(Answer { status: head.status.as_u16(), body, location })
}

fn message(request: &Get<'_>, place: &Place) -> Result<Request<Empty<Bytes>>, String> {
    let uri: Uri = place.target.parse().map_err(|e| format!("the path is no path of a URL: {e}"))?;
    let mut message = Request::new(Empty::new());
    *message.uri_mut() = uri;
    *message.headers_mut() = headers(request, place)?;
    Ok(message)
}

/// The headers of the manifest, and the default ones that it does not contain. A default header that the manifest sets to an empty value is not
/// sent.
fn headers(request: &Get<'_>, place: &Place) -> Result<HeaderMap, String> {
    let value = |text: &str| {
        HeaderValue::from_str(text).map_err(|_| format!("{text:?} cannot be the value of a header"))
    };
    let mut headers = HeaderMap::new();
    for given in request.headers {
        let name: HeaderName =
            given.name.parse().map_err(|_| format!("{:?} cannot be the name of a header", given.name))?;
        headers.append(name, value(&given.value)?);
    }
    let own = headers.remove(header::HOST).filter(|own| place.own_host && !own.is_empty());
    headers.insert(header::HOST, own.map_or_else(|| value(&place.authority()), Ok)?);
    for (name, usual) in [(header::USER_AGENT, request.user_agent), (header::ACCEPT, "*/*")] {
        match headers.get(&name).map(HeaderValue::is_empty) {
            None => {
                headers.insert(name, value(usual)?);
            }
            Some(true) => {
                headers.remove(name);
            }
            Some(false) => {}
        }
    }
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(headers)
}

/// The target of a redirect on the same host; `None` if the response is the last one.
fn moved(answer: &Answer, from: &Place) -> Result<Option<Place>, String> {
    let follows = matches!(
        StatusCode::from_u16(answer.status),
        Ok(StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT)
    );
    let Some(location) = answer.location.as_deref().filter(|l| follows && !l.is_empty()) else {
        return Ok(None);
    };
    let whole = match location.strip_prefix("//") {
        Some(rest) => format!("{}://{rest}", from.scheme()),
        None => location.to_owned(),
    };
    let absolute = whole.split(['/', '?', '#']).next().is_some_and(|scheme| scheme.ends_with(':'));
    if !absolute {
        let target = target_of(&joined(&from.target, location));
        return Ok(Some(Place { target, ..from.clone() }));
    }
    let uri: Uri = whole.parse().map_err(|e| format!("the redirect to {location:?} is no URL: {e}"))?;
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    if !host.eq_ignore_ascii_case(&from.host) {
        return Ok(None);
    }
    let (tls, usual_port) = match uri.scheme_str() {
        Some("http") => (false, 80),
        Some("https") => (true, 443),
        _ => return Err(format!("the redirect to {location:?} is neither http nor https")),
    };
    let target = target_of(uri.path_and_query().map_or("/", |p| p.as_str()));
    let port = uri.port_u16().unwrap_or(usual_port);
    Ok(Some(Place { tls, host: host.to_owned(), port, target, own_host: false }))
}

/// A relative reference on a path (RFC 3986, 5.2).
fn joined(base: &str, reference: &str) -> String {
    let path = base.split('?').next().unwrap_or_default();
    if reference.starts_with('?') {
        return format!("{path}{reference}");
    }
    let (reference, query) =
        reference.split_once('?').map_or((reference, None), |(path, query)| (path, Some(query)));
    let mut segments: Vec<&str> = match reference.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => path.rsplit_once('/').map_or("", |(folder, _)| folder).split('/').skip(1).collect(),
    };
    let mut parts = reference.trim_start_matches('/').split('/').peekable();
    while let Some(part) = parts.next() {
        match part {
            "." | ".." => {
                if part == ".." {
                    segments.pop();
                }
                if parts.peek().is_none() {
                    segments.push("");
                }
            }
            part => segments.push(part),
        }
    }
    let query = query.map_or_else(String::new, |query| format!("?{query}"));
    format!("/{}{query}", segments.join("/"))
}

/// A path as it is sent: with a leading slash, without a fragment, with characters escaped that a URL must not contain.
fn target_of(path: &str) -> String {
    use std::fmt::Write as _;
    let path = path.split('#').next().unwrap_or_default();
    let mut target = String::with_capacity(path.len() + 1);
    if !path.starts_with('/') {
        target.push('/');
    }
    for byte in path.bytes() {
        let foreign = byte <= b' ' || byte >= 0x7f || b"\"<>\\^`{|}".contains(&byte);
        if foreign {
            let _ = write!(target, "%{byte:02X}");
        } else {
            target.push(char::from(byte));
        }
    }
    target
}

#[cfg(test)]
mod tests;
