//! What stands at a URL, as the kubelet asks for it: a GET with the configured headers, within ten seconds.
//!
//! Parity: no proxy is used; headers stay with the scheme, host and port that they were configured for; nothing leads from https
//! to http.

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
use keelson_config::UrlHeaders;
use keelson_pod_config_core::manifest::MAX_BYTES;
use keelson_pod_config_core::redirect::{self, NotFollowed};

/// A whole answer, with all redirections, takes at most this long (pod-lifecycle.md §1).
const WITHIN: Duration = Duration::from_secs(10);
/// What a request says of itself, whatever the configuration has; Go's client leaves these out as well.
static OURS: [HeaderName; 5] =
    [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER, header::CONNECTION];
const USER_AGENT: &str = concat!("keelson-pod-config/", env!("CARGO_PKG_VERSION"));

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why there is no answer that could be a manifest.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL, or one that it leads to, is none.
    #[error("this is no URL; correct staticPodURL")]
    Url(#[source] http::uri::InvalidUri),
    /// The headers that init has handed over are not to be had.
    #[error("the headers of the request cannot be read")]
    Headers(#[source] io::Error),
    /// A header that HTTP does not have.
    #[error("the header {name} of staticPodURLHeader cannot be sent")]
    Header {
        /// Its name.
        name: String,
    },
    /// Nobody could be trusted.
    #[error("no certificates of authorities can be read; install ca-certificates")]
    Roots(#[source] io::Error),
    /// No connection, or none that lasts.
    #[error("there is no answer")]
    NoAnswer(#[source] Cause),
    /// It takes too long.
    #[error("there is no whole answer within {} s", WITHIN.as_secs())]
    Silent,
    /// Another status than 200.
    #[error("the answer is {0}, and manifests come with 200 OK")]
    Status(StatusCode),
    /// The connection ended before the answer did.
    #[error("the answer breaks off")]
    Broken(#[source] Cause),
    /// More than a manifest may be.
    #[error("the answer reaches the limit of {} MiB; a manifest holds a few pods", MAX_BYTES >> 20)]
    TooLong,
    /// One redirection after another.
    #[error("the answer leads elsewhere more than {} times", redirect::MOST)]
    TooFar,
    /// A redirection to where no manifest is taken from.
    #[error("the answer leads elsewhere, {0}")]
    NotFollowed(NotFollowed),
    /// The work was given up.
    #[error("the request was given up")]
    GivenUp,
}

/// Asks for what stands at a URL. The connection is kept while answers come.
#[derive(Debug)]
pub struct Fetch {
    url: String,
    credentials: PathBuf,
    made: Option<Asker>,
}

#[derive(Debug)]
struct Asker {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    headers: HeaderMap,
}

impl Fetch {
    /// For `url`, with the headers in the folder `credentials`.
    pub fn new(url: String, credentials: PathBuf) -> Self {
        Self { url, credentials, made: None }
    }

    /// The body of the answer, shorter than [`MAX_BYTES`]. Each call reads the headers anew, and after an error the next one
    /// reads the authorities, too.
    ///
    /// # Errors
    /// There is no such answer in time.
    pub async fn get(&mut self) -> Result<Vec<u8>, FetchError> {
        let (before, credentials) = (self.made.take(), self.credentials.clone());
        let secure = self.url.starts_with("https://");
        let made = tokio::task::spawn_blocking(move || Asker::with_headers(before, &credentials, secure));
        let asker = made.await.map_err(|_| FetchError::GivenUp)??;
        let answer = tokio::time::timeout(WITHIN, asker.get(&self.url)).await;
        let answer = answer.unwrap_or(Err(FetchError::Silent));
        self.made = answer.is_ok().then_some(asker);
        answer
    }
}

impl Asker {
    /// The one `before` with the headers as they are handed over now, or a new one; blocks.
    fn with_headers(before: Option<Self>, credentials: &Path, secure: bool) -> Result<Self, FetchError> {
        let handed_over = UrlHeaders::handed_over(credentials).map_err(FetchError::Headers)?;
        let headers = headers(&handed_over)?;
        match before {
            Some(before) => Ok(Self { headers, ..before }),
            None => Self::new(headers, secure),
        }
    }

    /// Reads what a connection needs; blocks. Without TLS at first there may still be some behind a redirection.
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
        for _ in 0..=redirect::MOST {
            let mut request = Request::new(Empty::new());
            *request.uri_mut() = url.parse::<Uri>().map_err(FetchError::Url)?;
            if with_headers {
                *request.headers_mut() = self.headers.clone();
            }
            let agent = HeaderValue::from_static(USER_AGENT);
            request.headers_mut().entry(header::USER_AGENT).or_insert(agent);
            let answer = self.client.request(request).await.map_err(|e| FetchError::NoAnswer(e.into()))?;
            let location = answer.headers().get(header::LOCATION);
            let location = location.and_then(|to| to.to_str().ok()).map(str::to_owned);
            match (answer.status(), location) {
                (StatusCode::OK, _) => return body(answer.into_body()).await,
                (status, Some(to)) if leads_elsewhere(status) => {
                    let next = redirect::follow(&url, &to).map_err(FetchError::NotFollowed)?;
                    // What has once left its host is not said again, wherever it leads.
                    with_headers &= next.same_origin;
                    url = next.url;
                }
                (status, _) => return Err(FetchError::Status(status)),
            }
        }
        Err(FetchError::TooFar)
    }
}

fn leads_elsewhere(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

async fn body(mut body: hyper::body::Incoming) -> Result<Vec<u8>, FetchError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| FetchError::Broken(error.into()))?;
        if let Some(data) = frame.data_ref() {
            if bytes.len() + data.len() >= MAX_BYTES {
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
        let wrong = || FetchError::Header { name: name.clone() };
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        if !OURS.contains(&name) {
            headers.append(name, value);
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_not_waited_for() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", silent.local_addr().unwrap());
        let folder = tempfile::tempdir().unwrap();
        let begin = tokio::time::Instant::now();
        let error = Fetch::new(url, folder.path().to_owned()).get().await.unwrap_err();
        assert!(matches!(error, FetchError::Silent), "{error:?}");
        assert_eq!(begin.elapsed().as_secs(), WITHIN.as_secs());
    }

    #[test]
    fn headers_are_sent_as_they_are_but_those_of_the_connection() {
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
