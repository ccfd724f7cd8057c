//! An API server in memory that lets a node do what a current cluster lets it do, and nothing else.
//!
//! Debian's API server enforces fewer restrictions on nodes than a current one, and takes minutes to build. This one has no
//! validation, no defaults and no controllers: objects that are put into it must be complete. It serves the requests of a node:
//! `rules.rs` is the Node authorizer and NodeRestriction of Kubernetes 1.34 to 1.36. `filter.rs` puts the same rules before a
//! real API server.

mod answer;
mod certificates;
#[cfg(feature = "kube")]
mod filter;
mod incoming;
mod objects;
mod patch;
mod request;
mod rules;
mod served;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request as HttpRequest, Response, header};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use answer::User;
#[cfg(feature = "kube")]
pub use filter::NodeFilter;
use incoming::{IncomingRequest, NODE_TOKEN};
use objects::{Denied, Objects, Selection};
use patch::Lists;
use request::{Request, Target};
use served::Served;

/// The largest object.
const BODY_LIMIT: usize = 4 << 20;

/// A request that the server refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Such as `get /api/v1/namespaces/default/pods/web`.
    pub request: String,
    /// 403, 404, 409 …
    pub code: u16,
    /// The message to the client.
    pub message: String,
}

impl Refusal {
    fn of(head: &axum::http::request::Parts, denied: &Denied) -> Self {
        let request = format!("{} {}", head.method.as_str().to_lowercase(), head.uri);
        Self { request, code: denied.code, message: denied.message.clone() }
    }
}

/// The server, on a free port of loopback, in a thread of its own; ended when dropped.
#[derive(Debug)]
pub struct NodeServer {
    served: Served,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    objects: Mutex<Objects>,
    refusals: Mutex<Vec<Refusal>>,
    /// The version of the objects.
    version: watch::Sender<u64>,
}

impl NodeServer {
    /// Starts one without any object.
    pub fn start() -> anyhow::Result<Self> {
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            refusals: Mutex::default(),
            version: watch::Sender::new(0),
        });
        let for_thread = Arc::clone(&shared);
        let router = Router::new().fallback(move |request: HttpRequest<Body>| {
            let shared = Arc::clone(&for_thread);
            async move { shared.serve(request).await }
        });
        Ok(Self { served: Served::start(router)?, shared })
    }

    /// Where it listens, for a [`crate::Relay`] before it.
    pub fn address(&self) -> SocketAddr {
        self.served.address
    }

    /// A kubeconfig of a node that reaches the server at `via`, written below `dir`.
    pub fn node_kubeconfig(&self, dir: &Path, node: &str, via: SocketAddr) -> anyhow::Result<PathBuf> {
        write_kubeconfig(dir, node, via)
    }

    /// Makes an object, as a user that may do everything; `collection` is a path such as `/api/v1/namespaces/default/pods`.
    pub fn create(&self, collection: &str, object: &Value) -> anyhow::Result<Value> {
        self.as_admin("create", collection, object.clone())
    }

    /// Merges `patch` into the object at `path`, as a user that may do everything.
    pub fn patch(&self, path: &str, patch: &Value) -> anyhow::Result<Value> {
        self.as_admin("patch", path, patch.clone())
    }

    /// Deletes the object at `path` as `options` (a `DeleteOptions`) say, as a user that may do everything.
    pub fn delete(&self, path: &str, options: &Value) -> anyhow::Result<Value> {
        self.as_admin("delete", path, options.clone())
    }

    /// The object at `path`; none where there is none.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.shared.objects().get(&Target::of(path)?).cloned()
    }

    /// Every object of the collection at `path`.
    pub fn list(&self, path: &str) -> Vec<Value> {
        let Some(collection) = Target::of(path) else { return Vec::new() };
        let selection = Selection { collection, fields: std::collections::BTreeMap::new() };
        self.shared.objects().selected(&selection).into_iter().cloned().collect()
    }

    fn as_admin(&self, verb: &'static str, path: &str, body: Value) -> anyhow::Result<Value> {
        let target = Target::of(path).with_context(|| format!("{path} is no path of a resource"))?;
        let request = Request { verb, target, body, ..Request::default() };
        let answered = self.shared.answer(User::Admin, &request, Lists::Merged);
        answered.map(|(_, object)| object).map_err(|denied| anyhow!("{verb} {path}: {}", denied.message))
    }

    /// The refused requests of nodes since the last call, in order.
    pub fn take_refusals(&self) -> Vec<Refusal> {
        std::mem::take(&mut *self.shared.refusals())
    }

    /// Waits until `is_so` holds for the objects; it is called again after each change.
    pub async fn until(
        &self,
        limit: Duration,
        what: &str,
        is_so: impl Fn(&Self) -> bool,
    ) -> anyhow::Result<()> {
        let mut version = self.shared.version.subscribe();
        let changed = async {
            while !is_so(self) {
                let _ = version.changed().await;
            }
        };
        tokio::time::timeout(limit, changed).await.map_err(|_| {
            let refusals = self.shared.refusals().clone();
            anyhow!("not within {limit:?}: {what}; refused meanwhile: {refusals:#?}")
        })
    }
}

impl Shared {
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refusals(&self) -> MutexGuard<'_, Vec<Refusal>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, user: User<'_>, request: &Request, lists: Lists) -> Result<(u16, Value), Denied> {
        let mut objects = self.objects();
        let answered = answer::answer(user, request, lists, &mut objects);
        let version = objects.version;
        drop(objects);
        self.version.send_replace(version);
        answered
    }

    async fn serve(self: Arc<Self>, request: HttpRequest<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        match self.serve_parts(&head, body).await {
            Ok(response) => response,
            Err(denied) => {
                self.refusals().push(Refusal::of(&head, &denied));
                refuse(denied)
            }
        }
    }

    async fn serve_parts(
        self: &Arc<Self>,
        head: &axum::http::request::Parts,
        body: Body,
    ) -> Result<Response<Body>, Denied> {
        let bytes = to_bytes(body, BODY_LIMIT).await.map_err(|e| Denied::bad_request(e.to_string()))?;
        let IncomingRequest { node, request, lists, version, seconds } = IncomingRequest::of(head, &bytes)?;
        if request.verb == "watch" {
            answer::authorize(User::Node(&node), &request, &self.objects())?;
            return Ok(self.watch(request, version.unwrap_or_default(), Duration::from_secs(seconds)));
        }
        let (code, object) = self.answer(User::Node(&node), &request, lists)?;
        Ok(respond(code, Body::from(object.to_string())))
    }

    /// Sends a collection's changes after `version` until `limit` is over or the client has gone.
    fn watch(self: &Arc<Self>, request: Request, version: u64, limit: Duration) -> Response<Body> {
        let selection = Selection { collection: request.target, fields: request.fields };
        let (sender, receiver) = mpsc::channel::<Bytes>(16);
        let shared = Arc::clone(self);
        let mut changed = self.version.subscribe();
        tokio::spawn(async move {
            let mut seen = version;
            let all = async {
                loop {
                    let (events, now) = {
                        let objects = shared.objects();
                        let events: Vec<Value> =
                            objects.since(seen).iter().filter_map(|c| selection.event(c)).collect();
                        (events, objects.version)
                    };
                    seen = now;
                    for event in events {
                        sender.send(Bytes::from(format!("{event}\n"))).await.map_err(drop)?;
                    }
                    tokio::select! {
                        () = sender.closed() => return Err::<Infallible, ()>(()),
                        changed = changed.changed() => changed.map_err(drop)?,
                    }
                }
            };
            let _ = tokio::time::timeout(limit, all).await;
        });
        respond(200, Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, Infallible>)))
    }
}

/// A kubeconfig with a token that contains the node's name.
fn write_kubeconfig(dir: &Path, node: &str, via: SocketAddr) -> anyhow::Result<PathBuf> {
    let path = dir.join(format!("{node}.kubeconfig"));
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{via}")}}],
        "users": [{"name": "test", "user": {"token": format!("{NODE_TOKEN}{node}")}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    });
    std::fs::write(&path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn refuse(denied: Denied) -> Response<Body> {
    let Denied { code, reason, message } = denied;
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": message});
    respond(code, Body::from(status.to_string()))
}

fn respond(code: u16, body: Body) -> Response<Body> {
    Response::builder()
        .status(code)
        .header(header::CONTENT_TYPE, "application/json")
        .body(body)
        .expect("a code and a header of our own")
}
