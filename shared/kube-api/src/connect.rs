//! A connection to the API server, made of a kubeconfig.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use http::header::{ACCEPT, CONTENT_TYPE, USER_AGENT};
use http::{Method, Request};
use keelson_config::CredentialRefusal;
use kube::Client;
use kube::core::WatchEvent;
use serde_json::Value;
use tokio::sync::watch;

use crate::dialer::Dialer;
use crate::error::KubeError;
use crate::limit::Limiter;
use crate::metrics::RestMetrics;
use crate::resource::{Object, Range, Resource};
use crate::watch_pool::WatchPool;

/// How long a call may take, including its answer. A watch must start within the same time.
pub const CALL_ENDS_WITHIN: Duration = Duration::from_secs(30);
/// Bounds of the timeout of a watch. The server ends the watch then, so that watchers spread over its replicas.
const WATCH_SECONDS: std::ops::Range<u32> = 300..600;
/// Extra time after which the client ends a watch that the server has not ended.
const WATCH_OVERDUE: Duration = Duration::from_secs(30);

/// How often the kubeconfig is checked for changes while there are watches but no calls.
const LOOK: Duration = Duration::from_secs(5);

/// The type of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// Lists are merged by their keys (`application/strategic-merge-patch+json`).
    Strategic,
    /// Lists are replaced (`application/merge-patch+json`).
    Merge,
}

/// A client of the API server in a kubeconfig. Clones share one connection for calls and others for watches; all of them are
/// replaced when the file changes.
#[derive(Clone)]
pub struct KubeApi {
    inner: Arc<Inner>,
    limiter: Option<Limiter>,
}

struct Inner {
    kubeconfig: PathBuf,
    user_agent: String,
    /// What the service waits for while there is no kubeconfig.
    awaited: Option<&'static str>,
    metrics: RestMetrics,
    current: Mutex<Option<Connected>>,
    /// The server address of the last connection, for messages while there is none.
    last_server: Mutex<Option<String>>,
    /// The number of connections so far; it changes when a connection is replaced.
    replaced: watch::Sender<u64>,
    /// Whether a task polls the kubeconfig.
    looked_at: AtomicBool,
    /// The file in which a refused credential is reported, so that init renews it.
    refusals: OnceLock<PathBuf>,
}

#[derive(Clone)]
struct Connected {
    /// The number of this connection.
    number: u64,
    stamp: Stamp,
    /// The client for calls; watches have connections of their own.
    client: Client,
    watches: Arc<WatchPool>,
    server: String,
    /// Host and port, for metrics.
    host: String,
    /// The generation of the credential, if an exec plugin has issued it.
    credential: Option<String>,
}

/// Identifies one content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> std::io::Result<Self> {
        let meta = fs::metadata(path)?;
        Ok(Self { inode: meta.ino(), size: meta.size(), changed: (meta.ctime(), meta.ctime_nsec()) })
    }
}

impl fmt::Debug for KubeApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeApi").field("kubeconfig", &self.inner.kubeconfig).finish_non_exhaustive()
    }
}

impl KubeApi {
    /// A client of the server in `kubeconfig`, which is read by the first call. The server's audit log shows `user_agent`.
    pub fn new(kubeconfig: PathBuf, user_agent: &str) -> Self {
        Self::made(kubeconfig, user_agent, RestMetrics::default(), None)
    }

    /// Like [`KubeApi::new`], with request metrics.
    pub fn counted(kubeconfig: PathBuf, user_agent: &str, metrics: RestMetrics) -> Self {
        Self::made(kubeconfig, user_agent, metrics, None)
    }

    /// Like [`KubeApi::counted`], but the file may be absent for a while. `awaited` names what the service waits for.
    pub fn awaiting(
        kubeconfig: PathBuf,
        user_agent: &str,
        metrics: RestMetrics,
        awaited: &'static str,
    ) -> Self {
        Self::made(kubeconfig, user_agent, metrics, Some(awaited))
    }

    fn made(
        kubeconfig: PathBuf,
        user_agent: &str,
        metrics: RestMetrics,
        awaited: Option<&'static str>,
    ) -> Self {
        let inner = Inner {
            kubeconfig,
            user_agent: user_agent.to_owned(),
            awaited,
            metrics,
            current: Mutex::new(None),
            last_server: Mutex::new(None),
            replaced: watch::Sender::new(0),
            looked_at: AtomicBool::new(false),
            refusals: OnceLock::new(),
        };
        Self { inner: Arc::new(inner), limiter: None }
    }

    /// Reports in `file` when the server refuses a credential of the kubeconfig's exec plugin ([`CredentialRefusal`]); clones
    /// do so, too. Only the first file that is set is used.
    #[must_use]
    pub fn reporting_refusals(self, file: PathBuf) -> Self {
        let _ = self.inner.refusals.set(file);
        self
    }

    /// Reports the credential if the server has refused it (401).
    fn report_refusal(&self, error: &KubeError, credential: Option<&str>) {
        let (Some(401), Some(generation), Some(file)) = (error.code(), credential, self.inner.refusals.get())
        else {
            return;
        };
        if let Err(error) = CredentialRefusal::report(file, generation) {
            tracing::warn!(file = %file.display(), %error, "cannot report the refused credential");
        }
    }

    /// The same connection with a rate limit on calls and watches.
    #[must_use]
    pub fn limited(self, limiter: Limiter) -> Self {
        Self { limiter: Some(limiter), ..self }
    }

    /// Gets an object; `None` if it does not exist.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn get(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Object>, KubeError> {
        let path = format!("{}/{name}", resource.path(namespace));
        let what = resource.named(namespace, name);
        match self.call(Method::GET, &path, &what, None).await {
            Ok(value) => Ok(Some(Object(value))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object. Returns it as the server has stored it.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if the object exists.
    pub async fn create(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<Object, KubeError> {
        let what = match object["metadata"]["name"].as_str() {
            Some(name) => resource.named(namespace, name),
            None => format!("one of its {}", resource.plural),
        };
        let body = Some(("application/json", object));
        Ok(Object(self.call(Method::POST, &resource.path(namespace), &what, body).await?))
    }

    /// Posts to a subresource of an object. Returns the answer.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn create_below(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        (name, subresource): (&str, &str),
        body: &Value,
    ) -> Result<Object, KubeError> {
        let path = format!("{}/{name}/{subresource}", resource.path(namespace));
        let what = format!("{}/{subresource}", resource.named(namespace, name));
        Ok(Object(self.call(Method::POST, &path, &what, Some(("application/json", body))).await?))
    }

    /// Replaces the object whose version it names.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if the version differs.
    pub async fn replace(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<Object, KubeError> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let path = format!("{}/{name}", resource.path(namespace));
        let body = Some(("application/json", object));
        Ok(Object(self.call(Method::PUT, &path, &resource.named(namespace, name), body).await?))
    }

    /// Patches an object or its `subresource`.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn patch(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        (kind, patch): (Patch, &Value),
    ) -> Result<Object, KubeError> {
        let below = subresource.map(|part| format!("/{part}")).unwrap_or_default();
        let path = format!("{}/{name}{below}", resource.path(namespace));
        let what = format!("{}{below}", resource.named(namespace, name));
        let content_type = match kind {
            Patch::Strategic => "application/strategic-merge-patch+json",
            Patch::Merge => "application/merge-patch+json",
        };
        Ok(Object(self.call(Method::PATCH, &path, &what, Some((content_type, patch))).await?))
    }

    /// Deletes an object with `options` (a `DeleteOptions`). Returns whether it existed.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] if a precondition fails.
    pub async fn delete(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        name: &str,
        options: &Value,
    ) -> Result<bool, KubeError> {
        let path = format!("{}/{name}", resource.path(namespace));
        let body = Some(("application/json", options));
        match self.call(Method::DELETE, &path, &resource.named(namespace, name), body).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lists a range from the server's watch cache.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn list(&self, range: &Range) -> Result<Vec<Object>, KubeError> {
        Ok(self.page(range, &Page::NotOlderThan("0")).await?.objects)
    }

    /// An error about `what` on this connection that does not come from a call.
    pub fn unreachable(&self, what: &str, message: String) -> KubeError {
        KubeError::unreachable(&self.server(), what, message)
    }

    /// A page of a range: the objects, the version of the list, and the token of the next page.
    pub(crate) async fn page(&self, range: &Range, page: &Page<'_>) -> Result<Listed, KubeError> {
        let path = range.path(|query| page.add_to(query));
        let mut list = self.call(Method::GET, &path, range.resource.plural, None).await?;
        let (server, metadata) = (self.server(), list["metadata"].take());
        let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
        let (version, next) = (text("resourceVersion"), text("continue"));
        let Value::Array(items) = list["items"].take() else {
            // A list without items is sent as null.
            let is_list = list["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
            let empty = Listed { objects: Vec::new(), version, next };
            let wrong = || KubeError::unreachable(&server, range.resource.plural, "the answer is no list");
            return if is_list { Ok(empty) } else { Err(wrong()) };
        };
        Ok(Listed { objects: items.into_iter().map(Object).collect(), version, next })
    }

    /// Watches a range from a version on; returns when the server has answered. The second value is the connection's number.
    pub(crate) async fn watch(&self, range: &Range, version: &str) -> Result<(Events, u64), KubeError> {
        let seconds = fastrand::u32(WATCH_SECONDS);
        let path = range.path(|query| {
            query.append_pair("watch", "1");
            query.append_pair("allowWatchBookmarks", "true");
            query.append_pair("resourceVersion", version);
            query.append_pair("timeoutSeconds", &seconds.to_string());
        });
        self.keep_looking();
        let Connected { watches, server, number, host, credential, .. } = self.connected().await?;
        self.take_turn("GET", &host).await;
        let what = format!("a watch of {}", range.resource.plural);
        let request = self.request(Method::GET, &path, &server, &what, None)?;
        let (client, slot) =
            watches.acquire().map_err(|message| KubeError::unreachable(&server, &what, message))?;
        let events = match within(&server, &what, client.request_events::<Value>(request)).await {
            Ok(events) => events,
            Err(error) => {
                if error.is_unanswered() {
                    watches.mark_full(&slot);
                }
                self.report_refusal(&error, credential.as_deref());
                return Err(error);
            }
        };
        let events = events.map(move |event| {
            // The place is held as long as the stream exists.
            let _slot = &slot;
            event.map_err(|error| KubeError::of(&server, &what, error))
        });
        let ends = Duration::from_secs(seconds.into()) + WATCH_OVERDUE;
        Ok((Box::pin(events.take_until(tokio::time::sleep(ends))), number))
    }

    /// Waits until the connection with this number is replaced.
    pub(crate) async fn replaced(&self, number: u64) {
        // The sender lives as long as this.
        let _ = self.inner.replaced.subscribe().wait_for(|now| *now != number).await;
    }

    /// Starts polling the kubeconfig, so that a watch does not keep using replaced credentials while there are no calls.
    fn keep_looking(&self) {
        if self.inner.looked_at.swap(true, Ordering::Relaxed) {
            return;
        }
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(inner) = inner.upgrade() else { return };
                // The next call reports an error.
                let _ = Self { inner, limiter: None }.connected().await;
            }
        });
    }

    /// The server's address, if it is known.
    pub fn server(&self) -> String {
        let last = self.inner.last_server.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.unwrap_or_else(|| format!("of {}", self.inner.kubeconfig.display()))
    }

    /// Makes the next call open a new connection, if the current one may be broken. Calls in flight continue.
    pub fn give_up_connection(&self) {
        *self.inner.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn next_number(&self) -> u64 {
        let mut number = 0;
        self.inner.replaced.send_modify(|now| {
            *now += 1;
            number = *now;
        });
        number
    }

    /// Waits for the rate limiter.
    async fn take_turn(&self, verb: &str, host: &str) {
        if let Some(limiter) = &self.limiter {
            let waited = limiter.pass().await;
            self.inner.metrics.limited(verb, host, waited);
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        what: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Value, KubeError> {
        let Connected { client, server, host, credential, .. } = self.connected().await?;
        self.take_turn(method.as_str(), &host).await;
        let request = self.request(method.clone(), path, &server, what, body)?;
        let (began, sent) = (Instant::now(), request.body().len());
        let answer = within(&server, what, client.request_text(request)).await;
        let received = answer.as_ref().ok().map(String::len);
        self.inner.metrics.ended(method.as_str(), &host, began.elapsed(), sent, received);
        let text = answer.inspect_err(|error| self.report_refusal(error, credential.as_deref()))?;
        serde_json::from_str(&text).map_err(|error| {
            KubeError::unreachable(&server, what, format!("the answer is no Kubernetes object: {error}"))
        })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        server: &str,
        what: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Request<Vec<u8>>, KubeError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, &self.inner.user_agent);
        if let Some((content_type, _)) = body {
            request = request.header(CONTENT_TYPE, content_type);
        }
        let body = body.map(|(_, value)| value.to_string().into_bytes()).unwrap_or_default();
        request.body(body).map_err(|error| KubeError::unreachable(server, what, error.to_string()))
    }

    /// The connection, replaced if the file has changed. If the new file is invalid, the old connection stays in use.
    async fn connected(&self) -> Result<Connected, KubeError> {
        let path = &self.inner.kubeconfig;
        let wrong = |message: String| KubeError::Kubeconfig { path: path.clone(), message };
        let current = self.inner.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let stamp = match (Stamp::of(path), &current) {
            (Ok(stamp), Some(current)) if current.stamp == stamp => return Ok(current.clone()),
            (Ok(stamp), _) => stamp,
            (Err(error), current) => match (self.inner.awaited, current) {
                (Some(what), current) if error.kind() == std::io::ErrorKind::NotFound => {
                    // The file was removed: its credentials are no longer used.
                    if current.is_some() {
                        self.give_up_connection();
                        self.next_number();
                    }
                    return Err(KubeError::Awaited { what });
                }
                (_, Some(current)) => return Ok(current.clone()),
                (_, None) => return Err(wrong(error.to_string())),
            },
        };
        let made = match connect(path, &self.inner.metrics).await {
            Ok((client, dialer, credential)) => {
                let (server, host) = (dialer.server(), dialer.host());
                let watches = Arc::new(WatchPool::new(dialer));
                Connected { number: self.next_number(), stamp, client, watches, server, host, credential }
            }
            Err(message) => match current {
                Some(former) => {
                    tracing::warn!(path = %path.display(), error = message, "the new kubeconfig is invalid; still using the previous one");
                    Connected { stamp, ..former }
                }
                None => return Err(wrong(message)),
            },
        };
        *self.inner.last_server.lock().unwrap_or_else(PoisonError::into_inner) = Some(made.server.clone());
        *self.inner.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(made.clone());
        Ok(made)
    }
}

/// The part of a list to request.
#[derive(Debug)]
pub(crate) enum Page<'a> {
    /// The whole list, not older than a version; `0`: any version in the server's cache.
    NotOlderThan(&'a str),
    /// A page of a consistent list, by its token; `None`: the first page.
    Now(Option<&'a str>),
}

impl Page<'_> {
    /// The number of objects in a page.
    const LIMIT: &'static str = "500";

    fn add_to(&self, query: &mut Query) {
        match self {
            Self::NotOlderThan(version) => {
                query.append_pair("resourceVersion", version);
            }
            Self::Now(next) => {
                query.append_pair("limit", Self::LIMIT);
                if let Some(next) = next {
                    query.append_pair("continue", next);
                }
            }
        }
    }
}

/// A page of a list.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) objects: Vec<Object>,
    pub(crate) version: String,
    /// The token of the next page; empty after the last one.
    pub(crate) next: String,
}

/// The events of a watch.
pub(crate) type Events = BoxStream<'static, Result<WatchEvent<Value>, KubeError>>;

type Query = form_urlencoded::Serializer<'static, String>;

impl Range {
    /// The path of the range; `more` is added to the query.
    fn path(&self, more: impl FnOnce(&mut Query)) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        if let Some(fields) = &self.fields {
            query.append_pair("fieldSelector", fields);
        }
        more(&mut query);
        format!("{}?{}", self.resource.path(self.namespace.as_deref()), query.finish())
    }
}

async fn within<T>(
    server: &str,
    what: &str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, KubeError> {
    match tokio::time::timeout(CALL_ENDS_WITHIN, call).await {
        Ok(done) => done.map_err(|error| KubeError::of(server, what, error)),
        Err(_) => {
            let message = format!("not within {} s", CALL_ENDS_WITHIN.as_secs());
            Err(KubeError::unreachable(server, what, message))
        }
    }
}

/// A client by the kubeconfig, the dialer for more of them, and the generation of an exec plugin's credential.
async fn connect(path: &Path, metrics: &RestMetrics) -> Result<(Client, Dialer, Option<String>), String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let dialer = Dialer::new(&text, metrics).await?;
    Ok((dialer.client()?, dialer, generation(&text)))
}

/// The credential generation. Only a kubeconfig written by init, which is JSON, has one.
fn generation(text: &str) -> Option<String> {
    let document: Value = serde_json::from_str(text).ok()?;
    document[CredentialRefusal::FIELD].as_str().map(ToOwned::to_owned)
}

#[cfg(test)]
#[path = "connect_tests.rs"]
mod tests;
