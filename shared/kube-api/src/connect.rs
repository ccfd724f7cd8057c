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

use crate::counted::RestMetrics;
use crate::dialer::Dialer;
use crate::error::KubeError;
use crate::limit::Limiter;
use crate::lines::Lines;
use crate::resource::{Object, Range, Resource};

/// How long a call may take, its answer included. A watch has as long to begin.
pub const CALL_ENDS_WITHIN: Duration = Duration::from_secs(30);
/// How long a watch may take, at least and at most; the server ends it then, so that watchers spread over its replicas.
const WATCH_SECONDS: std::ops::Range<u32> = 300..600;
/// How much later a watch that the server has not ended is ended here: nothing comes from behind it any more.
const WATCH_OVERDUE: Duration = Duration::from_secs(30);

/// How often it is looked whether a kubeconfig has changed, while there are watches and nothing is called.
const LOOK: Duration = Duration::from_secs(5);

/// How a patch is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// Lists are merged by their keys (`application/strategic-merge-patch+json`).
    Strategic,
    /// Lists are replaced (`application/merge-patch+json`).
    Merge,
}

/// The API server that a kubeconfig names. Copies of it share a connection for calls and others for watches, which are made
/// anew when the file has changed.
#[derive(Clone)]
pub struct KubeApi {
    inner: Arc<Inner>,
    limiter: Option<Limiter>,
}

struct Inner {
    kubeconfig: PathBuf,
    user_agent: String,
    /// What is waited for while there is no kubeconfig.
    awaited: Option<&'static str>,
    metrics: RestMetrics,
    current: Mutex<Option<Connected>>,
    /// The address of the server of the last connection, for messages where there is none now.
    last_server: Mutex<Option<String>>,
    /// How many connections there were; a change is one that took the place of another.
    replaced: watch::Sender<u64>,
    /// Whether somebody looks at the kubeconfig while nothing is called.
    looked_at: AtomicBool,
    /// Where a refused credential is reported, for init to renew it.
    refusals: OnceLock<PathBuf>,
}

#[derive(Clone)]
struct Connected {
    /// Which of those that there were.
    number: u64,
    stamp: Stamp,
    /// For calls; watches have connections of their own.
    client: Client,
    watches: Arc<Lines>,
    server: String,
    /// Name or address and port, for metrics.
    host: String,
    /// The generation of the credential, where a program has given it.
    credential: Option<String>,
}

/// What tells one content of a file from another.
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
    /// The server that `kubeconfig` names; nothing is read yet. `user_agent` is what the server's audit log shows.
    pub fn new(kubeconfig: PathBuf, user_agent: &str) -> Self {
        Self::made(kubeconfig, user_agent, RestMetrics::default(), None)
    }

    /// As [`KubeApi::new`], with its requests counted.
    pub fn counted(kubeconfig: PathBuf, user_agent: &str, metrics: RestMetrics) -> Self {
        Self::made(kubeconfig, user_agent, metrics, None)
    }

    /// As [`KubeApi::counted`], where the file comes later, and may go away for a while: `awaited` says what for.
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

    /// Reports in `file` when the server refuses a credential that a program of the kubeconfig has given
    /// ([`CredentialRefusal`]); copies of this connection do so, too. The first file counts.
    #[must_use]
    pub fn reporting_refusals(self, file: PathBuf) -> Self {
        let _ = self.inner.refusals.set(file);
        self
    }

    /// Reports the credential if the server has answered that it does not know it (401).
    fn report_refusal(&self, error: &KubeError, credential: Option<&str>) {
        let (Some(401), Some(generation), Some(file)) = (error.code(), credential, self.inner.refusals.get())
        else {
            return;
        };
        if let Err(error) = CredentialRefusal::report(file, generation) {
            tracing::warn!(file = %file.display(), %error, "cannot report the refused credential");
        }
    }

    /// The same connection, where each call and each watch takes its turn.
    #[must_use]
    pub fn limited(self, limiter: Limiter) -> Self {
        Self { limiter: Some(limiter), ..self }
    }

    /// The object; `None` where there is none.
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

    /// Makes an object; what the server has made of it.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] where it is there already.
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

    /// Posts to a subresource of an object; what the server answers.
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

    /// Puts an object in the place of the one whose version it names.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] where the version is another one.
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

    /// Changes an object, or with `subresource` that part of it.
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

    /// Deletes an object as `options` (a `DeleteOptions`) say; whether it was there.
    ///
    /// # Errors
    /// The server does not answer or refuses; [`KubeError::is_conflict`] where a precondition does not hold.
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

    /// Every object of a range, as the server has it in memory.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn list(&self, range: &Range) -> Result<Vec<Object>, KubeError> {
        Ok(self.page(range, &Page::NotOlderThan("0")).await?.objects)
    }

    /// An error of this connection about `what` that no call has brought to light.
    pub fn unreachable(&self, what: &str, message: String) -> KubeError {
        KubeError::unreachable(&self.server(), what, message)
    }

    /// A page of a range: the objects, the version of the list, and where the next page goes on.
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
            let wrong = || KubeError::unreachable(&server, range.resource.plural, "what it says is no list");
            return if is_list { Ok(empty) } else { Err(wrong()) };
        };
        Ok(Listed { objects: items.into_iter().map(Object).collect(), version, next })
    }

    /// Watches a range from a version on. It begins when the server has answered. Beside it, the number of the connection.
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
        let (client, seat) =
            watches.seat().map_err(|message| KubeError::unreachable(&server, &what, message))?;
        let events = match within(&server, &what, client.request_events::<Value>(request)).await {
            Ok(events) => events,
            Err(error) => {
                if error.is_unanswered() {
                    watches.give_up(&seat);
                }
                self.report_refusal(&error, credential.as_deref());
                return Err(error);
            }
        };
        let events = events.map(move |event| {
            // It is taken as long as there are events.
            let _seat = &seat;
            event.map_err(|error| KubeError::of(&server, &what, error))
        });
        let ends = Duration::from_secs(seconds.into()) + WATCH_OVERDUE;
        Ok((Box::pin(events.take_until(tokio::time::sleep(ends))), number))
    }

    /// Waits until another connection has taken the place of the one with this number.
    pub(crate) async fn replaced(&self, number: u64) {
        // The sender lives as long as this.
        let _ = self.inner.replaced.subscribe().wait_for(|now| *now != number).await;
    }

    /// Has somebody look at the kubeconfig from now on, so that a watch does not go on with credentials that were replaced
    /// while nothing else is asked.
    fn keep_looking(&self) {
        if self.inner.looked_at.swap(true, Ordering::Relaxed) {
            return;
        }
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(inner) = inner.upgrade() else { return };
                // What is wrong is told to whoever asks next.
                let _ = Self { inner, limiter: None }.connected().await;
            }
        });
    }

    /// The server's address, as far as it is known.
    pub fn server(&self) -> String {
        let last = self.inner.last_server.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.unwrap_or_else(|| format!("of {}", self.inner.kubeconfig.display()))
    }

    /// Has the next call make a new connection, for where the present one is doubted. Calls on that one go on.
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

    /// Waits until there may be one more call.
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
            KubeError::unreachable(&server, what, format!("what it says is no Kubernetes object: {error}"))
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

    /// The connection, made anew where the file is another one. Where the new file does not do, the one before goes on.
    async fn connected(&self) -> Result<Connected, KubeError> {
        let path = &self.inner.kubeconfig;
        let wrong = |message: String| KubeError::Kubeconfig { path: path.clone(), message };
        let current = self.inner.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let stamp = match (Stamp::of(path), &current) {
            (Ok(stamp), Some(current)) if current.stamp == stamp => return Ok(current.clone()),
            (Ok(stamp), _) => stamp,
            (Err(error), current) => match (self.inner.awaited, current) {
                (Some(what), current) if error.kind() == std::io::ErrorKind::NotFound => {
                    // It was taken away: what it said counts no more.
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
                let watches = Arc::new(Lines::new(dialer));
                Connected { number: self.next_number(), stamp, client, watches, server, host, credential }
            }
            Err(message) => match current {
                Some(former) => {
                    tracing::warn!(path = %path.display(), error = message, "the new kubeconfig does not do; the former one goes on");
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

/// Which part of a list is asked for.
#[derive(Debug)]
pub(crate) enum Page<'a> {
    /// All at once, not older than a version; `0`: as old as the server likes.
    NotOlderThan(&'a str),
    /// As it is now, in pages; `None`: the first one.
    Now(Option<&'a str>),
}

impl Page<'_> {
    /// Objects in a page.
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

/// A page.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) objects: Vec<Object>,
    pub(crate) version: String,
    /// Empty: this was the last one.
    pub(crate) next: String,
}

/// What a watch tells.
pub(crate) type Events = BoxStream<'static, Result<WatchEvent<Value>, KubeError>>;

type Query = form_urlencoded::Serializer<'static, String>;

impl Range {
    /// The path of the range, with what `more` adds to its query.
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

/// A client of what the file says, who makes more of them, and the generation of a credential that a program has given.
async fn connect(path: &Path, metrics: &RestMetrics) -> Result<(Client, Dialer, Option<String>), String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let dialer = Dialer::new(&text, metrics).await?;
    Ok((dialer.client()?, dialer, generation(&text)))
}

/// Only a kubeconfig that init has made, which is JSON, has one.
fn generation(text: &str) -> Option<String> {
    let document: Value = serde_json::from_str(text).ok()?;
    document[CredentialRefusal::FIELD].as_str().map(ToOwned::to_owned)
}

#[cfg(test)]
#[path = "connect_tests.rs"]
mod tests;
