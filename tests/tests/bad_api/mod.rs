//! An API server with switchable behavior: as much of one as a node needs, on a port that can also hang, send garbage or
//! show an untrusted certificate.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// How the server behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behavior {
    /// An API server.
    Good,
    /// Accepts connections and never answers.
    Silent,
    /// Sends garbage until the client closes the connection.
    Garbage,
    /// Shows a certificate of an untrusted CA.
    UntrustedCertificate,
    /// Answers every request with the 404 page of a proxy.
    Proxy,
}

/// The server at its port. It stops when dropped.
pub struct BadApi {
    address: SocketAddr,
    ca: String,
    behavior: watch::Sender<Behavior>,
    pub store: Store,
    _tasks: JoinSet<()>,
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn acceptor(&self) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }
}

impl BadApi {
    pub async fn start(behavior: Behavior) -> Self {
        let (own, strange) = (Authority::new(), Authority::new());
        let (good, untrusted) = (own.acceptor(), strange.acceptor());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (behavior, store) = (watch::Sender::new(behavior), Store::default());
        let (mut changes, kept) = (behavior.subscribe(), store.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // They end with this task.
            let mut connections = JoinSet::new();
            loop {
                let behavior = *changes.borrow_and_update();
                // Cancel-safe: a connection that is not taken waits, and a change is a state.
                let stream = tokio::select! {
                    taken = listener.accept() => taken.unwrap().0,
                    _ = changes.changed() => {
                        connections.abort_all();
                        continue;
                    }
                };
                let (good, untrusted, store) = (good.clone(), untrusted.clone(), kept.clone());
                connections.spawn(async move {
                    // Each fails when the other side goes away.
                    match behavior {
                        Behavior::Good | Behavior::Proxy => {
                            if let Ok(stream) = good.accept(stream).await {
                                serve(stream, store, behavior).await;
                            }
                        }
                        Behavior::UntrustedCertificate => drop(untrusted.accept(stream).await),
                        Behavior::Silent => hold_open(stream).await,
                        Behavior::Garbage => send_garbage(stream).await,
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, ca: own.0.pem(), behavior, store, _tasks: tasks }
    }

    /// Changes the behavior and closes all connections.
    pub fn set_behavior(&self, behavior: Behavior) {
        self.behavior.send_replace(behavior);
    }

    /// Its address, as messages have it.
    pub fn server(&self) -> String {
        format!("https://{}", self.address)
    }

    /// A kubeconfig for it.
    pub fn kubeconfig(&self, folder: &Path) -> PathBuf {
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": self.server(),
                "certificate-authority-data": STANDARD.encode(&self.ca)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        let path = folder.join("kubelet.conf");
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }
}

async fn hold_open(mut stream: TcpStream) {
    let mut sink = [0; 4096];
    while stream.read(&mut sink).await.is_ok_and(|count| count > 0) {}
}

async fn send_garbage(mut stream: TcpStream) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    loop {
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        let block: Vec<u8> = std::iter::repeat_with(next).take(512).flatten().collect();
        if stream.write_all(&block).await.is_err() {
            return;
        }
    }
}

/// The objects and every change of them. Cheap to clone.
#[derive(Clone, Default)]
pub struct Store(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<Key, Value>,
    log: Vec<(u64, &'static str, Key, Value)>,
}

/// Path of the kind, such as `/api/v1/pods`, namespace and name.
type Key = (String, String, String);

impl Store {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates or updates an object.
    pub fn put(&self, kind: &str, mut object: Value) -> Value {
        let text =
            |object: &Value, field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = (kind.to_owned(), text(&object, "namespace"), text(&object, "name"));
        let mut state = self.state();
        let version = *self.0.version.borrow() + 1;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        if text(&object, "uid").is_empty() {
            object["metadata"]["uid"] = format!("00000000-0000-4000-8000-{version:012}").into();
        }
        let before = state.objects.insert(key.clone(), object.clone());
        let what = if before.is_some() { "MODIFIED" } else { "ADDED" };
        state.log.push((version, what, key, object.clone()));
        self.0.version.send_replace(version);
        drop(state);
        object
    }

    /// An object.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        self.state().objects.get(&(kind.to_owned(), namespace.to_owned(), name.to_owned())).cloned()
    }

    fn remove(&self, key: &Key) -> Option<Value> {
        let mut state = self.state();
        let object = state.objects.remove(key)?;
        let version = *self.0.version.borrow() + 1;
        state.log.push((version, "DELETED", key.clone(), object.clone()));
        self.0.version.send_replace(version);
        drop(state);
        Some(object)
    }
}

/// A request.
struct ApiRequest {
    method: String,
    kind: String,
    namespace: String,
    name: String,
    query: BTreeMap<String, String>,
    body: Value,
}

impl ApiRequest {
    fn parse(method: &str, target: &str, body: Value) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        // `api/v1` or `apis/<group>/<version>`.
        let rest = parts.split_off(if parts[0] == "api" { 2 } else { 3 });
        let (namespace, rest) = match rest.as_slice() {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let kind = format!("/{}/{}", parts.join("/"), rest.first().copied().unwrap_or_default());
        let decoded = |text: &str| text.replace("%3D", "=").replace("%2C", ",");
        let query = query.split('&').filter_map(|pair| pair.split_once('='));
        Self {
            method: method.to_owned(),
            kind,
            namespace: namespace.to_owned(),
            name: rest.get(1).copied().unwrap_or_default().to_owned(),
            query: query.map(|(name, value)| (name.to_owned(), decoded(value))).collect(),
            body,
        }
    }

    /// Whether an object matches the request's selectors.
    fn matches(&self, (kind, namespace, name): &Key, object: &Value) -> bool {
        let fields = self.query.get("fieldSelector").map(String::as_str).unwrap_or_default();
        let fits = |field: &str| match field.split_once('=') {
            Some(("metadata.name", wanted)) => name == wanted,
            Some(("spec.nodeName", wanted)) => object["spec"]["nodeName"] == wanted,
            _ => true,
        };
        *kind == self.kind
            && (self.namespace.is_empty() || *namespace == self.namespace)
            && fields.split(',').all(fits)
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, store: Store, behavior: Behavior) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream).await {
        let (code, body) = match behavior {
            Behavior::Proxy => (404, "<html><body>no such page</body></html>".to_owned()),
            _ if request.query.contains_key("watch") => {
                return serve_watch(&mut stream, &request, &store).await;
            }
            _ => respond(&request, &store),
        };
        let head = format!("HTTP/1.1 {code} X\r\ncontent-length: {}\r\n\r\n", body.len());
        if stream.write_all(head.as_bytes()).await.is_err()
            || stream.write_all(body.as_bytes()).await.is_err()
            || stream.flush().await.is_err()
        {
            return;
        }
    }
}

async fn read_request(stream: &mut BufReader<impl AsyncRead + Unpin>) -> Option<ApiRequest> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut length = 0;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await.ok()?;
        match header.trim().to_lowercase().split_once(':') {
            None => break,
            Some(("content-length", value)) => length = value.trim().parse().ok()?,
            Some(_) => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some(ApiRequest::parse(&method, &target, serde_json::from_slice(&body).unwrap_or_default()))
}

/// Serves a watch, which never ends by itself.
async fn serve_watch(stream: &mut (impl AsyncWrite + Unpin), request: &ApiRequest, store: &Store) {
    let mut after: u64 = request.query["resourceVersion"].parse().unwrap_or(0);
    let mut version = store.0.version.subscribe();
    let mut buffer = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_owned();
    loop {
        version.borrow_and_update();
        let events: Vec<_> = store.state().log.iter().filter(|(at, ..)| *at > after).cloned().collect();
        for (at, what, key, object) in events {
            after = at;
            if request.matches(&key, &object) {
                buffer += &format!("{}\n", json!({"type": what, "object": object}));
            }
        }
        if stream.write_all(buffer.as_bytes()).await.is_err() || stream.flush().await.is_err() {
            return;
        }
        buffer.clear();
        if version.changed().await.is_err() {
            return;
        }
    }
}

fn status(code: u16, reason: &str) -> (u16, String) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": reason});
    (code, status.to_string())
}

fn respond(request: &ApiRequest, store: &Store) -> (u16, String) {
    let key = (request.kind.clone(), request.namespace.clone(), request.name.clone());
    let live = store.state().objects.get(&key).cloned();
    match (request.method.as_str(), request.name.is_empty(), live) {
        ("GET", true, _) => {
            let version = store.0.version.borrow().to_string();
            let state = store.state();
            let items = state.objects.iter().filter(|(key, object)| request.matches(key, object));
            let items: Vec<Value> = items.map(|(_, object)| object.clone()).collect();
            (
                200,
                json!({"kind": "List", "metadata": {"resourceVersion": version}, "items": items}).to_string(),
            )
        }
        // TokenReviews, SubjectAccessReviews and tokens: nobody is authenticated.
        ("POST", true, _) if request.kind.ends_with("reviews") => (201, request.body.to_string()),
        ("POST", true, _) => {
            let mut object = request.body.clone();
            if !request.namespace.is_empty() {
                object["metadata"]["namespace"] = request.namespace.clone().into();
            }
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            match store.get(&request.kind, &request.namespace, name) {
                Some(_) => status(409, "AlreadyExists"),
                None => {
                    if let Some(metadata) = object["metadata"].as_object_mut() {
                        metadata.remove("uid");
                    }
                    (201, store.put(&request.kind, object).to_string())
                }
            }
        }
        (_, _, None) => status(404, "NotFound"),
        ("GET", false, Some(live)) => (200, live.to_string()),
        ("PUT", false, Some(live)) => {
            let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
            if version(&request.body) == version(&live) {
                (200, store.put(&request.kind, request.body.clone()).to_string())
            } else {
                status(409, "Conflict")
            }
        }
        ("PATCH", false, Some(mut live)) => {
            let uid = &request.body["metadata"]["uid"];
            if uid.is_string() && *uid != live["metadata"]["uid"] {
                return status(409, "Conflict");
            }
            merge(&mut live, &request.body);
            (200, store.put(&request.kind, live).to_string())
        }
        ("DELETE", false, Some(_)) => (200, store.remove(&key).unwrap_or_default().to_string()),
        _ => status(405, "MethodNotAllowed"),
    }
}

/// A strategic merge, as far as nodes and pods need one: conditions and addresses are merged by type.
fn merge(live: &mut Value, patch: &Value) {
    match (live, patch) {
        (Value::Object(live), Value::Object(patch)) => {
            for (name, value) in patch {
                if value.is_null() {
                    live.remove(name);
                } else if !name.starts_with('$') {
                    merge(live.entry(name).or_insert(Value::Null), value);
                }
            }
        }
        (Value::Array(live), Value::Array(patch)) if patch.iter().all(|item| item["type"].is_string()) => {
            for item in patch {
                match live.iter_mut().find(|known| known["type"] == item["type"]) {
                    Some(known) => merge(known, item),
                    None => live.push(item.clone()),
                }
            }
        }
        (live @ Value::Null, Value::Object(_)) => {
            *live = json!({});
            merge(live, patch);
        }
        (live, Value::Array(patch)) => {
            let items = patch.iter().filter(|item| item.get("$patch").is_none());
            *live = items.cloned().collect();
        }
        (live, patch) => *live = patch.clone(),
    }
}
