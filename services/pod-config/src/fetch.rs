//! Requests the manifests at a URL as the kubelet does: a GET with the configured headers and a timeout of ten seconds.
//!
//! Parity: no proxy is used; headers are sent only to the scheme, host and port for which they were configured; redirects from
//! https to http are not followed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use keelson_config::{MANIFEST_LIMIT, UrlHeaders};
use keelson_pod_config_core::redirect::{self, RedirectError};

/// Timeout of a request, including all redirects (pod-lifecycle.md §1).
const TIMEOUT: Duration = Duration::from_secs(10);
/// Headers that the client sets itself and that the configuration cannot override; Go's client ignores them, too.
static RESERVED_HEADERS: [HeaderName; 5] =
    [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER, header::CONNECTION];
const USER_AGENT: &str = concat!("keelson-pod-config/", env!("CARGO_PKG_VERSION"));

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a request returned no manifests.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL, or the target of a redirect, is invalid.
    #[error("the URL is invalid; correct staticPodURL")]
    Url(#[source] http::uri::InvalidUri),
    /// The headers that init handed over cannot be read.
    #[error("cannot read the request headers")]
    Headers(#[source] io::Error),
    /// A header is not valid in HTTP.
    #[error("the header {name} in staticPodURLHeader is not valid in HTTP")]
    Header {
        /// Its name.
        name: String,
    },
    /// No certificate authorities are available.
    #[error("cannot read any certificate authorities; install ca-certificates")]
    Roots(#[source] io::Error),
    /// The connection failed.
    #[error("the request failed")]
    Request(#[source] BoxError),
    /// The request timed out.
    #[error("there was no complete response within {} s", TIMEOUT.as_secs())]
    Timeout,
    /// The status is not 200.
    #[error("the response has the status {0} instead of 200 OK")]
    Status(StatusCode),
    /// The connection ended before the response was complete.
    #[error("the connection ended before the response was complete")]
    Body(#[source] BoxError),
    /// The response exceeds the size limit of a manifest.
    #[error("the response reaches the limit of {} MiB; a manifest contains a few pods", MANIFEST_LIMIT >> 20)]
    TooLong,
    /// Too many redirects.
    #[error("the server redirects more than {} times", redirect::MAX_REDIRECTS)]
    TooManyRedirects,
    /// A redirect that is not followed.
    #[error("the server redirects {0}")]
    Redirect(RedirectError),
    /// The task was cancelled.
    #[error("the request was cancelled")]
    Cancelled,
}

/// Requests the manifests at a URL. The connection is kept open while requests succeed.
#[derive(Debug)]
pub struct Fetcher {
    url: String,
    credentials: PathBuf,
    client: Option<HttpClient>,
}

#[derive(Debug)]
struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    headers: HeaderMap,
}

impl Fetcher {
    /// Requests `url`, with the headers in the folder `credentials`.
    pub fn new(url: String, credentials: PathBuf) -> Self {
        Self { url, credentials, client: None }
    }

    /// Returns the body of the response, shorter than [`MANIFEST_LIMIT`]. Each call reads the headers again; after an error the next
    /// call also reads the certificate authorities again.
    ///
    /// # Errors
    /// There is no valid response in time.
    pub async fn get(&mut self) -> Result<Vec<u8>, FetchError> {
        let (previous, credentials) = (self.client.take(), self.credentials.clone());
        let secure = self.url.starts_with("https://");
        let opened =
            tokio::task::spawn_blocking(move || HttpClient::with_headers(previous, &credentials, secure));
        let client = opened.await.map_err(|_| FetchError::Cancelled)??;
        let result = tokio::time::timeout(TIMEOUT, client.get(&self.url)).await;
        let result = result.unwrap_or(Err(FetchError::Timeout));
        self.client = result.is_ok().then_some(client);
        result
    }
}

impl HttpClient {
    /// Returns the previous client, or a new one, with the current headers. Blocks.
    fn with_headers(previous: Option<Self>, credentials: &Path, secure: bool) -> Result<Self, FetchError> {
        let handed_over = UrlHeaders::handed_over(credentials).map_err(FetchError::Headers)?;
        let headers = headers(&handed_over)?;
        match previous {
            Some(previous) => Ok(Self { headers, ..previous }),
            None => Self::new(headers, secure),
        }
    }

    /// Creates a client. Blocks. Certificate authorities are optional for an http URL, but a redirect may lead to https.
    fn new(headers: HeaderMap, secure: bool) -> Result<Self, FetchError> {
        let provider = || rustls::crypto::ring::default_provider();
        let builder = match HttpsConnectorBuilder::new().with_provider_and_native_roots(provider()) {
            Ok(builder) => builder,
            Err(error) if secure => return Err(FetchError::Roots(error)),
            Err(_) => {
                let config = rustls::ClientConfig::builder_with_provider(provider().into())
                    .with_safe_default_protocol_versions()
                    .map_err(|error| FetchError::Roots(io::Error::other(error)))?
                    .with_root_certificates(rustls::RootCertStore::empty())
                    .with_no_client_auth();
                HttpsConnectorBuilder::new().with_tls_config(config)
            }
        };
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(builder.https_or_http().enable_all_versions().wrap_connector(tcp));
        Ok(Self { client, headers })
    }

    async fn get(&self, url: &str) -> Result<Vec<u8>, FetchError> {
        let (mut url, mut with_headers) = (url.to_owned(), true);
        for _ in 0..=redirect::MAX_REDIRECTS {
            let mut request = Request::new(Empty::new());
            *request.uri_mut() = url.parse::<Uri>().map_err(FetchError::Url)?;
            if with_headers {
                *request.headers_mut() = self.headers.clone();
            }
            let agent = HeaderValue::from_static(USER_AGENT);
            request.headers_mut().entry(header::USER_AGENT).or_insert(agent);
            let response = self.client.request(request).await.map_err(|e| FetchError::Request(e.into()))?;
            let location = response.headers().get(header::LOCATION);
            let location = location.and_then(|to| to.to_str().ok()).map(str::to_owned);
            match (response.status(), location) {
                (StatusCode::OK, _) => return body(response.into_body()).await,
                (status, Some(to)) if is_redirect(status) => {
                    let next = redirect::follow(&url, &to).map_err(FetchError::Redirect)?;
                    // Once a redirect has left the origin, the headers are not sent again.
                    with_headers &= next.same_origin;
                    url = next.url;
                }
                (status, _) => return Err(FetchError::Status(status)),
            }
        }
        Err(FetchError::TooManyRedirects)
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

async fn body(mut body: hyper::body::Incoming) -> Result<Vec<u8>, FetchError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| FetchError::Body(error.into()))?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() >= MANIFEST_LIMIT {
                return Err(FetchError::TooLong);
            }
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes)
}

fn headers(handed_over: &UrlHeaders) -> Result<HeaderMap, FetchError> {
    let mut headers = HeaderMap::new();
    for (name, value) in &handed_over.0 {
        let invalid = || FetchError::Header { name: name.clone() };
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| invalid())?;
        let mut value = HeaderValue::from_str(value).map_err(|_| invalid())?;
        value.set_sensitive(true);
        if !RESERVED_HEADERS.contains(&name) {
            headers.append(name, value);
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_respond_times_out() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", silent.local_addr().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let begin = tokio::time::Instant::now();
        let error = Fetcher::new(url, folder.path().to_owned()).get().await.unwrap_err();
        assert!(matches!(error, FetchError::Timeout), "{error:?}");
        assert_eq!(begin.elapsed().as_secs(), TIMEOUT.as_secs());
    }

    #[test]
    fn configured_headers_are_sent_except_connection_headers() {
        let given =
            [("X-A", "1"), ("x-a", "2"), ("Host", "h"), ("content-length", "9"), ("Authorization", "t")];
        let given = given.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let sent = headers(&UrlHeaders(given.to_vec())).unwrap();
        let values: Vec<_> = sent.get_all("x-a").iter().collect();
        assert_eq!(values, ["1", "2"]);
        assert_eq!(sent.len(), 3);
        assert!(!format!("{sent:?}").contains("\"t\""), "a value is not shown: {sent:?}");
        let error = headers(&UrlHeaders(vec![("a b".into(), "hidden-word".into())])).unwrap_err();
        assert!(error.to_string().contains("a b") && !error.to_string().contains("hidden-word"), "{error}");
    }
}
