//! An API server with CertificateSigningRequests and the Node.

#![allow(clippy::unwrap_used)] // A test may panic.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
};
use serde_json::{Value, json};
use tokio::sync::watch;

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().cast_signed()
}

/// Makes a certificate valid from and until so many seconds from now.
fn set_validity(params: &mut CertificateParams, from: i64, wait_for: i64) {
    let moment =
        |seconds: i64| date_time_ymd(1970, 1, 1) + Duration::from_secs((now() + seconds).unsigned_abs());
    (params.not_before, params.not_after) = (moment(from), moment(wait_for));
}

#[derive(Default)]
pub struct State {
    pub requests: BTreeMap<String, Value>,
    /// The `authorization` headers of the clients that created them.
    pub makers: Vec<String>,
    /// Those of the clients that read a single one.
    pub readers: Vec<String>,
    pub version: u64,
    pub addresses: Value,
    /// The server refuses new requests.
    pub refuses: bool,
}

/// An API server with CertificateSigningRequests and the Node.
pub struct Api {
    pub url: String,
    pub state: Arc<Mutex<State>>,
    pub changed: watch::Sender<u64>,
    pub authority: CertifiedIssuer<'static, KeyPair>,
}

fn answer(code: StatusCode, value: &Value) -> Response<Body> {
    Response::builder().status(code).body(Body::from(value.to_string())).unwrap()
}

fn refusal(code: u16, reason: &str) -> Response<Body> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": reason});
    answer(StatusCode::from_u16(code).unwrap(), &status)
}

impl Api {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let changed = watch::Sender::new(0);
        let (of_handler, notify) = (Arc::clone(&state), changed.clone());
        let router = Router::new().fallback(move |request: Request<Body>| {
            let (state, notify) = (Arc::clone(&of_handler), notify.clone());
            async move {
                let (parts, body) = request.into_parts();
                let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
                let by = parts.headers.get("authorization").map(|by| by.to_str().unwrap().to_owned());
                respond(
                    &state,
                    &notify,
                    &parts.method,
                    &parts.uri.to_string(),
                    &by.unwrap_or_default(),
                    &body,
                )
            }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        Self { url, state, changed, authority }
    }

    /// A kubeconfig user with a client certificate of the node that is valid from and until so many seconds from now.
    pub fn pair(&self, from: i64, wait_for: i64) -> Value {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, "system:node:n1");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        set_validity(&mut params, from, wait_for);
        let pem = params.signed_by(&key, &self.authority).unwrap().pem();
        json!({"client-certificate-data": STANDARD.encode(pem), "client-key-data": STANDARD.encode(key.serialize_pem())})
    }

    /// A flat kubeconfig for a user.
    pub fn kubeconfig(&self, user: &Value, is_stored: bool) -> String {
        json!({"apiVersion": "v1", "kind": "Config", "current-context": "k", "keelsonStored": is_stored,
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "k", "user": user}],
            "contexts": [{"name": "k", "context": {"cluster": "k", "user": "k"}}]})
        .to_string()
    }

    pub fn requests(&self) -> Vec<Value> {
        self.state.lock().unwrap().requests.values().cloned().collect()
    }

    pub fn makers(&self) -> Vec<String> {
        self.state.lock().unwrap().makers.clone()
    }

    pub fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let version = state.version;
        let request = state.requests.get_mut(name).unwrap();
        change(request);
        request["metadata"]["resourceVersion"] = version.to_string().into();
        self.changed.send_replace(version);
    }

    pub fn deny(&self, name: &str) {
        self.change(name, |request| {
            request["status"] = json!({"conditions": [{"type": "Denied", "status": "True", "reason": "No", "message": "not yours"}]});
        });
    }

    pub fn read(request: &Value) -> CertificateSigningRequestParams {
        let pem = STANDARD.decode(request["spec"]["request"].as_str().unwrap()).unwrap();
        CertificateSigningRequestParams::from_pem(&String::from_utf8(pem).unwrap()).unwrap()
    }

    /// Approves and signs a request; the certificate is valid from and until so many seconds from now.
    pub fn sign(&self, name: &str, from: i64, wait_for: i64) {
        self.change(name, |request| {
            let mut params = Self::read(request);
            let use_of = request["spec"]["usages"][1].as_str().unwrap().to_owned();
            set_validity(&mut params.params, from, wait_for);
            params.params.extended_key_usages = vec![match use_of.as_str() {
                "client auth" => ExtendedKeyUsagePurpose::ClientAuth,
                _ => ExtendedKeyUsagePurpose::ServerAuth,
            }];
            let pem = params.signed_by(&self.authority).unwrap().pem();
            request["status"] = json!({"conditions": [{"type": "Approved", "status": "True"}],
                "certificate": STANDARD.encode(pem)});
        });
    }
}

fn respond(
    state: &Arc<Mutex<State>>,
    changed: &watch::Sender<u64>,
    method: &Method,
    uri: &str,
    by: &str,
    body: &Bytes,
) -> Response<Body> {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let mut locked = state.lock().unwrap();
    if path.starts_with("/api/v1/nodes/n1") {
        return answer(
            StatusCode::OK,
            &json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n1", "uid": "u",
            "resourceVersion": "1"}, "status": {"addresses": locked.addresses}}),
        );
    }
    let Some(name) = path.strip_prefix("/apis/certificates.k8s.io/v1/certificatesigningrequests") else {
        return refusal(404, "NotFound");
    };
    match (method.as_str(), name.trim_start_matches('/')) {
        ("POST", "") if locked.refuses => refusal(403, "Forbidden"),
        ("POST", "") => create(&mut locked, changed, by, body),
        ("GET", "") if !query.contains("watch=1") => {
            let items: Vec<&Value> = locked.requests.get(wanted(query)).into_iter().collect();
            let list = json!({"kind": "CertificateSigningRequestList", "metadata":
                {"resourceVersion": locked.version.to_string()}, "items": items});
            answer(StatusCode::OK, &list)
        }
        ("GET", "") => watch_request(Arc::clone(state), changed.subscribe(), query),
        ("GET", name) => {
            locked.readers.push(by.to_owned());
            match locked.requests.get(name) {
                Some(request) => answer(StatusCode::OK, request),
                None => refusal(404, "NotFound"),
            }
        }
        _ => refusal(405, "MethodNotAllowed"),
    }
}

/// The name that a list or a watch selects.
fn wanted(query: &str) -> &str {
    query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D")).unwrap()
}

/// Creates a request of the client `by`.
fn create(state: &mut State, changed: &watch::Sender<u64>, by: &str, body: &Bytes) -> Response<Body> {
    let mut request: Value = serde_json::from_slice(body).unwrap();
    let name = request["metadata"]["name"].as_str().unwrap().to_owned();
    if state.requests.contains_key(&name) {
        return refusal(409, "AlreadyExists");
    }
    state.version += 1;
    request["metadata"]["resourceVersion"] = state.version.to_string().into();
    state.requests.insert(name, request.clone());
    state.makers.push(by.to_owned());
    changed.send_replace(state.version);
    answer(StatusCode::CREATED, &request)
}

/// The changes of one request, until the client goes.
fn watch_request(state: Arc<Mutex<State>>, changed: watch::Receiver<u64>, query: &str) -> Response<Body> {
    let wanted = wanted(query).to_owned();
    let from = query.split('&').find_map(|part| part.strip_prefix("resourceVersion=")).unwrap();
    let seen: u64 = from.parse().unwrap();
    let changes = stream::unfold((state, changed, seen), move |(state, mut changed, seen)| {
        let wanted = wanted.clone();
        async move {
            let now = *changed.wait_for(|version| *version > seen).await.ok()?;
            let object = state.lock().unwrap().requests.get(&wanted).cloned().unwrap_or(Value::Null);
            let line = format!("{}\n", json!({"type": "MODIFIED", "object": object}));
            Some((Ok::<_, Infallible>(line), (state, changed, now)))
        }
    });
    Response::new(Body::from_stream(changes))
}
