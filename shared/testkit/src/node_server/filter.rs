//! A proxy with the rules for nodes in front of a real API server that enforces fewer of them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request as HttpRequest, Response, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use super::answer::{User, check};
use super::incoming::IncomingRequest;
use super::objects::{Denied, Objects};
use super::request::Target;
use super::served::Served;
use super::{BODY_LIMIT, Refusal, refuse, write_kubeconfig};
use crate::{KubeApiServer, KubeProxy};

/// Forwards the requests of one node to a [`KubeApiServer`], unless a current cluster would refuse them. Ended when dropped.
#[derive(Debug)]
pub struct NodeFilter {
    served: Served,
    node: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The server as the node sees it.
    own: KubeProxy,
    /// The server as it is.
    admin: KubeProxy,
    refusals: Mutex<Vec<Refusal>>,
}

impl NodeFilter {
    /// Starts one on a free port of loopback.
    pub fn start(server: &KubeApiServer, node: &str) -> anyhow::Result<Self> {
        let own = server.proxy_as(&server.node_kubeconfig(node)?)?;
        let shared = Arc::new(Shared { own, admin: server.proxy()?, refusals: Mutex::default() });
        let for_thread = Arc::clone(&shared);
        let router = Router::new().fallback(move |request: HttpRequest<Body>| {
            let shared = Arc::clone(&for_thread);
            async move { shared.serve(request).await }
        });
        Ok(Self { served: Served::start(router)?, node: node.to_owned(), shared })
    }

    /// A kubeconfig of the node, written below `dir`.
    pub fn kubeconfig(&self, dir: &Path) -> anyhow::Result<PathBuf> {
        write_kubeconfig(dir, &self.node, self.served.address)
    }

    /// The requests of the node that the rules have refused since the last call.
    pub fn take_refusals(&self) -> Vec<Refusal> {
        std::mem::take(&mut *self.shared.refusals())
    }
}

impl Shared {
    fn refusals(&self) -> MutexGuard<'_, Vec<Refusal>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(self: Arc<Self>, request: HttpRequest<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let passed = async {
            let bytes = to_bytes(body, BODY_LIMIT).await.map_err(|e| Denied::bad_request(e.to_string()))?;
            let incoming = IncomingRequest::of(&head, &bytes)?;
            let objects = self.objects(&incoming.request.target).await.map_err(unavailable)?;
            check(User::Node(&incoming.node), &incoming.request, incoming.lists, &objects)?;
            Ok(bytes)
        };
        let bytes = match passed.await {
            Ok(bytes) => bytes,
            Err(denied) => {
                self.refusals().push(Refusal::of(&head, &denied));
                return refuse(denied);
            }
        };
        let mut request = HttpRequest::builder().method(head.method).uri(head.uri);
        for name in [header::CONTENT_TYPE, header::ACCEPT, header::USER_AGENT] {
            if let Some(value) = head.headers.get(&name) {
                request = request.header(name, value);
            }
        }
        let request = request.header(header::HOST, "localhost").body(Body::from(bytes));
        match send(self.own.socket(), request.expect("a request that was one before")).await {
            Ok(response) => response,
            Err(error) => refuse(unavailable(error)),
        }
    }

    /// The objects that the rules need for a request about `about`: all pods and nodes, and those of the same kind or that lead
    /// from it to a pod.
    async fn objects(&self, about: &Target) -> anyhow::Result<Objects> {
        let mut collections = vec!["/api/v1/pods", "/api/v1/nodes"];
        match about.resource.as_str() {
            "persistentvolumeclaims" => collections.push("/api/v1/persistentvolumeclaims"),
            "persistentvolumes" | "secrets" => collections.push("/api/v1/persistentvolumes"),
            "volumeattachments" => collections.push("/apis/storage.k8s.io/v1/volumeattachments"),
            _ => {}
        }
        let mut objects = Objects::default();
        for path in collections {
            let collection = Target::of(path).context("no path of a resource")?;
            let request = HttpRequest::get(path).header(header::HOST, "localhost");
            let response = send(self.admin.socket(), request.body(Body::empty())?).await?;
            let list: Value = serde_json::from_slice(&to_bytes(response.into_body(), usize::MAX).await?)?;
            for object in list["items"].as_array().context("no list")? {
                let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
                let target =
                    Target { namespace: text("namespace"), name: text("name"), ..collection.clone() };
                objects.put(target, object.clone());
            }
        }
        Ok(objects)
    }
}

fn unavailable(error: impl std::fmt::Display) -> Denied {
    let message = format!("the API server behind the filter does not answer: {error}");
    Denied { code: 503, reason: "ServiceUnavailable", message }
}

/// Sends one request to a socket; the answer's body is passed on as it comes.
async fn send(socket: &Path, request: HttpRequest<Body>) -> anyhow::Result<Response<Body>> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the response, or when the client no longer reads it.
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?.map(Body::new))
}
