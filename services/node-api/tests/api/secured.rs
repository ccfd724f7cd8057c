//! The kubelet API over TLS: whom it lets in, and the ways into a container.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use keelson_config::{Api, ApiTls, ServiceName};
use keelson_node_api::places::{Limits, Places};
use keelson_node_api::{Access, Requests, Serving, api_router, listen};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::status::error;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    date_time_ymd,
};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tonic::Code;

use crate::fake::{World, soon};

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key.
pub type Pair = (CertificateDer<'static>, PrivateKeyDer<'static>);

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn of(&self, name: &str) -> Pair {
        self.of_groups(name, &[])
    }

    pub fn of_groups(&self, name: &str, groups: &[&str]) -> Pair {
        self.of_kind(name, groups, |_| {})
    }

    /// The same with something else changed.
    fn of_kind(&self, name: &str, groups: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let mut params = CertificateParams::default();
        change(&mut params);
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.der().clone(), PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }
}

/// A node that knows the clients of one authority.
pub struct Secured {
    pub world: World,
    pub clients: Authority,
    pub address: SocketAddr,
    /// Its certificate, and the authority behind it.
    pub shown: Vec<CertificateDer<'static>>,
    _files: tempfile::TempDir,
}

impl Secured {
    pub async fn start(anonymous: bool) -> Self {
        Self::start_with(|api| api.tls.as_mut().unwrap().anonymous = anonymous).await
    }

    /// The same with other settings.
    pub async fn start_with(change: impl FnOnce(&mut Api)) -> Self {
        Self::start_within(Limits::of_this_process(), change).await
    }

    /// The same with so many places for connections.
    pub async fn start_within(limits: Limits, change: impl FnOnce(&mut Api)) -> Self {
        let (mut world, files, clients) =
            (World::start(), tempfile::tempdir().unwrap(), Authority::new("clients"));
        let ca = files.path().join("ca.pem");
        std::fs::write(&ca, clients.0.pem()).unwrap();
        let mut config = (*world.ctx.config).clone();
        config.api.tls = Some(ApiTls::with_client_ca(ca));
        change(&mut config.api);
        config.paths.state_dir = files.path().join("state");
        for folder in
            [config.paths.state(ServiceName::NodeApi), config.paths.socket_dir(ServiceName::NodeApi)]
        {
            std::fs::create_dir_all(folder).unwrap();
        }
        let told = config.paths.serving_certificate();
        let tls = config.api.tls.clone();
        world.ctx.config = config.into();
        let serving = Serving::start(&world.ctx, tls.as_ref().unwrap());
        let access = Access::of(&world.ctx, Some(&serving), tls.as_ref());
        let requests = Requests::register(&world.ctx.metrics);
        let router = api_router(&world.ctx, &world.slis, &requests, access);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ctx = world.ctx.clone();
        tokio::spawn(async move {
            let handle = ctx.progress.register("test");
            let places = Places::new("test port", limits);
            listen::serve(&ctx, &handle, listener, router, Some(serving), &places).await;
        });
        let shown = CertificateDer::pem_file_iter(told).unwrap().collect::<Result<_, _>>().unwrap();
        Self { world, clients, address, shown, _files: files }
    }

    /// A connection of a client that knows what the node shows, as `name`.
    async fn connect(&self, name: &str, own: Option<Pair>) -> std::io::Result<SendRequest<Empty<Bytes>>> {
        self.connect_from(Ipv4Addr::LOCALHOST, name, own).await
    }

    /// As a client with this address.
    async fn connect_from(
        &self,
        from: Ipv4Addr,
        name: &str,
        own: Option<Pair>,
    ) -> std::io::Result<SendRequest<Empty<Bytes>>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.shown[1].clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match own {
            Some((certificate, key)) => {
                // Not checked here: that is for the node to do.
                let key = ring::default_provider().key_provider.load_private_key(key).unwrap();
                let pair = CertifiedKey::new(vec![certificate], key);
                config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair)))
            }
            None => config.with_no_client_auth(),
        };
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let stream = socket.connect(self.address).await.unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        Ok(sender)
    }

    pub async fn ask(
        &self,
        own: Option<Pair>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Response<Incoming> {
        self.ask_from(Ipv4Addr::LOCALHOST, own, method, path, headers).await
    }

    /// As a client with this address.
    pub async fn ask_from(
        &self,
        from: Ipv4Addr,
        own: Option<Pair>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Response<Incoming> {
        let mut sender = self.connect_from(from, "127.0.0.1", own).await.unwrap();
        let request = Request::builder().method(method).uri(path).header("host", "node");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        soon(sender.send_request(request.body(Empty::new()).unwrap())).await.unwrap()
    }

    pub async fn get(&self, own: Option<Pair>, path: &str) -> u16 {
        self.ask(own, "GET", path, &[]).await.status().as_u16()
    }

    /// What somebody whom the node knows is answered.
    pub async fn known(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
    ) -> (u16, HeaderMap, String) {
        let (head, body) = self.ask(Some(self.clients.of("jane")), method, path, headers).await.into_parts();
        let text = soon(body.collect()).await.unwrap().to_bytes();
        (head.status.as_u16(), head.headers, String::from_utf8(text.to_vec()).unwrap())
    }
}

const UPGRADE: [(&str, &str); 2] = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
const EXEC: &str = "/exec/default/web/c?command=cat&command=a%20b&input=1&output=1&error=1";

pub fn head(status: u32, headers: &[(&str, &str)]) -> rt::StreamHead {
    let headers = headers
        .iter()
        .map(|(name, value)| rt::HttpHeader { name: (*name).into(), value: (*value).into() })
        .collect();
    rt::StreamHead { status, headers }
}

#[tokio::test]
async fn whom_an_authority_stands_behind_is_let_in_and_nobody_else() {
    let node = Secured::start(false).await;
    for path in ["/healthz/ping", "/pods", "/metrics", "/exec/default/web/c", "/nothing"] {
        assert_eq!(node.get(None, path).await, 401, "{path}: without a certificate");
        let stranger = Authority::new("clients").of("jane");
        assert_eq!(node.get(Some(stranger), path).await, 401, "{path}: of another authority");
    }
    assert_eq!(node.get(Some(node.clients.of("jane")), "/healthz/ping").await, 200);
    assert_eq!(node.get(Some(node.clients.of("jane")), "/nothing").await, 404);
    assert_eq!(
        node.get(Some(node.clients.of("")), "/healthz/ping").await,
        401,
        "a certificate without a name"
    );
    assert!(
        node.world.ctx.metrics.text().contains("path=\"healthz\""),
        "those that are refused are counted, too"
    );
}

/// What `openssl x509 -req` without extensions makes: of X.509 version 1. The key is for this test alone.
const VERSION_1: &str = "\
-----BEGIN CERTIFICATE-----
MIIBGjCBwQIUBVyGpnksEy+U0jS1046GXBXBUxowCgYIKoZIzj0EAwIwDzENMAsG
A1UEAwwEamFuZTAgFw0yNjExMjUxNjAxNTJaGA8yMTI2MTEwMTE2MDE1MlowDzEN
MAsGA1UEAwwEamFuZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABH2+ZRHxl2Fd
0N6eT4/eM7FgDYgdAqvbRaM/mOZ1SEZFGAUY6ZuotQd1ILq6EjKb5fRH22mNBkj5
+haVRGb4k6kwCgYIKoZIzj0EAwIDSAAwRQIgQrC4SyyJ2B3oro3e9X/MRV6q7fCm
ry3ZkJRVDlgznJ4CIQDTgniOR12W3Eoe3jUHl6hi6V6iweTrqp/7N/P5v9Peug==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgBqMjTt+i+TAMiDkt
B6Fb6UDN540g/wliQSy86aX3p5GhRANCAAR9vmUR8ZdhXdDenk+P3jOxYA2IHQKr
20WjP5jmdUhGRRgFGOmbqLUHdSC6uhIym+X0R9tpjQZI+foWlURm+JOp
-----END PRIVATE KEY-----
";

#[tokio::test]
async fn each_certificate_that_is_refused_is_counted_by_why() {
    let node = Secured::start(false).await;
    let version_1 = || {
        let certificate = CertificateDer::from_pem_slice(VERSION_1.as_bytes()).unwrap();
        (certificate, PrivateKeyDer::from_pem_slice(VERSION_1.as_bytes()).unwrap())
    };
    let kinds = [
        ("unknown_issuer", Authority::new("others").of("jane")),
        ("signature", Authority::new("clients").of("jane")),
        ("no_name", node.clients.of("")),
        ("expired", node.clients.of_kind("jane", &[], |params| params.not_after = date_time_ymd(2001, 1, 1))),
        (
            "not_valid_yet",
            node.clients.of_kind("jane", &[], |params| params.not_before = date_time_ymd(2999, 1, 1)),
        ),
        (
            "purpose",
            node.clients.of_kind("jane", &[], |params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            }),
        ),
    ];
    let counted = |reason: &str| {
        let line = format!("keelson_api_refused_client_certificates_total{{reason=\"{reason}\"}} 1");
        node.world.ctx.metrics.text().lines().any(|l| l == line)
    };
    for (reason, pair) in kinds {
        assert_eq!(node.get(Some(pair), "/pods").await, 401, "{reason}");
        assert!(counted(reason), "{reason}: {}", node.world.ctx.metrics.text());
    }
    assert_eq!(node.get(Some(node.clients.of("jane")), "/healthz/ping").await, 200);

    // That one does not get through the handshake, which the client learns with its first request.
    let mut sender = node.connect("127.0.0.1", Some(version_1())).await.unwrap();
    let request = Request::builder().uri("/pods").header("host", "node").body(Empty::new()).unwrap();
    assert!(soon(sender.send_request(request)).await.is_err());
    soon(async {
        while !counted("x509_version") {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn without_authorities_of_clients_no_certificate_is_asked_for_and_anonymous_is_as_it_is_said() {
    for anonymous in [false, true] {
        let node = Secured::start_with(|api| {
            let tls = api.tls.as_mut().unwrap();
            (tls.client_ca_file, tls.anonymous) = (None, anonymous);
        });
        let node = node.await;
        let expected = if anonymous { 200 } else { 401 };
        assert_eq!(node.get(None, "/healthz/ping").await, expected);
        assert_eq!(
            node.get(Some(node.clients.of("jane")), "/healthz/ping").await,
            expected,
            "it is not looked at"
        );
    }
}

#[tokio::test]
async fn the_certificate_names_the_node_and_its_addresses() {
    let node = Secured::start(false).await;
    for name in ["n1", "localhost", "127.0.0.1"] {
        assert!(node.connect(name, None).await.is_ok(), "{name}");
    }
    assert!(node.connect("elsewhere", None).await.is_err());
    let file = node.world.ctx.config.paths.state(ServiceName::NodeApi).join("serving.pem");
    assert!(Path::new(&file).exists());
}

#[tokio::test]
async fn anonymous_is_let_in_where_it_is_said_and_a_wrong_certificate_is_not_anonymous() {
    let node = Secured::start(true).await;
    assert_eq!(node.get(None, "/healthz/ping").await, 200);
    assert_eq!(node.get(Some(Authority::new("x").of("jane")), "/healthz/ping").await, 401);
}

#[tokio::test]
async fn bytes_go_both_ways_as_they_are_once_the_runtime_has_changed() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let said = [
        ("Connection", "Upgrade"),
        ("Upgrade", "SPDY/3.1"),
        ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
    ];
    *node.world.shared.stream_head.lock().unwrap() = head(101, &said);
    let headers =
        [&UPGRADE[..], &[("X-Stream-Protocol-Version", "v4.channel.k8s.io"), ("Authorization", "Bearer x")]]
            .concat();
    let answer = node.ask(Some(node.clients.of("jane")), "POST", EXEC, &headers).await;
    assert_eq!(answer.status(), 101);
    assert_eq!(answer.headers()["x-stream-protocol-version"], "v4.channel.k8s.io");
    let mut streams = TokioIo::new(soon(hyper::upgrade::on(answer)).await.unwrap());
    for text in ["one", &"x".repeat(100_000)] {
        soon(streams.write_all(text.as_bytes())).await.unwrap();
        soon(streams.flush()).await.unwrap();
        let mut back = vec![0; text.len()];
        soon(streams.read_exact(&mut back)).await.unwrap();
        assert_eq!(back, text.as_bytes());
    }
    soon(streams.write_all(b"the end")).await.unwrap();
    soon(streams.flush()).await.unwrap();
    let mut rest = Vec::new();
    soon(streams.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"the end");

    let asked = node.world.shared.connected.lock().unwrap().remove(0);
    assert_eq!(
        (asked.pod_uid.as_str(), asked.namespace.as_str(), asked.method.as_str()),
        ("uid-of-web", "default", "POST")
    );
    let exec = rt::StreamExec {
        container: "c".into(),
        command: vec!["cat".into(), "a b".into()],
        stdin: true,
        stdout: true,
        stderr: true,
        tty: false,
    };
    assert_eq!(asked.what, Some(rt::stream_start::What::Exec(exec)));
    assert!(
        asked.headers.iter().any(|h| h.name == "upgrade" && h.value == "SPDY/3.1"),
        "{:?}",
        asked.headers
    );
}

/// Waits until somebody whom the node knows has a place there again.
async fn has_a_place(node: &Secured) {
    let asking = async {
        while node.get(Some(node.clients.of("jane")), "/healthz/ping").await != 200 {
            tokio::task::yield_now().await;
        }
    };
    soon(asking).await;
}

#[tokio::test]
async fn logs_that_are_followed_keep_no_stranger_out_and_one_too_many_is_answered_and_told() {
    let node = Secured::start_within(Limits { strangers: 1, known: 2 }, |_| {}).await;
    node.world.running_pod("web");
    let mut written = Vec::new();
    let mut followed = Vec::new();
    for _ in 0..2 {
        let path = "/containerLogs/default/web/c?follow=true";
        let answer = soon(node.ask(Some(node.clients.of("jane")), "GET", path, &[])).await;
        assert_eq!(answer.status(), 200);
        followed.push(answer);
        written.push(node.world.shared.following.lock().unwrap().take().unwrap());
    }
    assert_eq!(node.get(None, "/healthz/ping").await, 401, "there is a place for strangers");
    let (status, headers, text) = node.known("GET", "/healthz/ping", &[]).await;
    assert_eq!(status, 503);
    assert!(text.starts_with("too many connections to this node are open"), "{text}");
    assert_eq!(headers["connection"], "close");
    assert_eq!(headers["retry-after"], "1");
    let told = async {
        loop {
            let conditions = node.world.ctx.progress.report("").conditions;
            let told = conditions.into_iter().find(|told| told.name == "connections of the test port");
            if told.is_some_and(|told| !told.ok && told.message.contains("2 are open, 2 of them of user")) {
                return;
            }
            // The port looks at its places with each connection.
            node.get(None, "/healthz/ping").await;
        }
    };
    soon(told).await;
    drop(followed.pop());
    has_a_place(&node).await;
}

#[tokio::test]
async fn strangers_who_say_nothing_keep_nobody_out_and_the_oldest_of_them_makes_room() {
    let node = Secured::start_within(Limits { strangers: 64, known: 64 }, |_| {}).await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(soon(TcpStream::connect(node.address)).await.unwrap());
    }
    for _ in 0..3 {
        let (status, _, _) = soon(node.known("GET", "/healthz/ping", &[])).await;
        assert_eq!(status, 200);
    }
    // An eighth of the places is an address's.
    let mut nothing = [0];
    assert_eq!(soon(silent[0].read(&mut nothing)).await.unwrap_or(0), 0, "the oldest was closed");
    let conditions = node.world.ctx.progress.report("").conditions;
    let told = conditions.iter().find(|told| told.name == "connections of the test port").unwrap();
    assert!(!told.ok && told.message.contains("by 127.0.0.1"), "{told:?}");
    // Whoever was let in stays, whoever comes.
    let mut known = node.connect("127.0.0.1", Some(node.clients.of("jane"))).await.unwrap();
    for round in 0..2 {
        let request = Request::get("/healthz/ping").header("host", "node").body(Empty::new()).unwrap();
        let answer = soon(known.send_request(request)).await.unwrap();
        assert_eq!(answer.status(), 200, "{round}");
        soon(answer.into_body().collect()).await.unwrap();
        for _ in 0..100 {
            silent.push(soon(TcpStream::connect(node.address)).await.unwrap());
        }
    }
}

#[tokio::test]
async fn a_stream_into_a_container_has_no_place_of_a_connection() {
    let node = Secured::start_within(Limits { strangers: 1, known: 1 }, |_| {}).await;
    node.world.running_pod("web");
    let said = [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1")];
    *node.world.shared.stream_head.lock().unwrap() = head(101, &said);
    let answer = node.ask(Some(node.clients.of("jane")), "POST", EXEC, &UPGRADE).await;
    assert_eq!(answer.status(), 101);
    let mut streams = TokioIo::new(soon(hyper::upgrade::on(answer)).await.unwrap());
    has_a_place(&node).await;
    soon(streams.write_all(b"the end")).await.unwrap();
    soon(streams.flush()).await.unwrap();
    let mut rest = Vec::new();
    soon(streams.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"the end");
}

#[tokio::test]
async fn a_stranger_who_is_refused_leaves_the_place_to_the_next_one() {
    let node = Secured::start_within(Limits { strangers: 1, known: 1 }, |_| {}).await;
    let mut stranger = node.connect("127.0.0.1", None).await.unwrap();
    let request = Request::get("/healthz/ping").header("host", "node").body(Empty::new()).unwrap();
    let answer = soon(stranger.send_request(request)).await.unwrap();
    assert_eq!(answer.status(), 401);
    assert_eq!(answer.headers()["connection"], "close");
    // The stranger's side of it is still there.
    let (status, headers, _) = soon(node.known("GET", "/healthz/ping", &[])).await;
    assert_eq!(status, 200);
    assert!(!headers.contains_key("connection"), "{headers:?}");
    drop(stranger);
}

#[tokio::test]
async fn what_cannot_be_streamed_is_answered_as_a_kubelet_does() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let shared = &node.world.shared;
    let none = "you must specify at least 1 of stdin, stdout, stderr";
    let odd_uid = "/attach/default/web/other/c?output=1";
    for (method, path, headers, status, text) in [
        ("POST", "/exec/default/web/c?command=id", &UPGRADE[..], 400, none),
        ("POST", "/exec/default/gone/c?output=1", &UPGRADE, 404, "pod does not exist"),
        ("GET", odd_uid, &UPGRADE, 404, "pod not found"),
        ("POST", EXEC, &[], 500, "Upgrade request required"),
        ("PUT", EXEC, &UPGRADE, 405, "405: Method Not Allowed"),
        ("GET", "/run/default/web/c?cmd=id", &[], 405, "405: Method Not Allowed"),
        (
            "GET",
            "/portForward/default/web",
            &[("connection", "upgrade"), ("upgrade", "websocket")],
            400,
            "query parameter \"port\" is required",
        ),
        ("GET", "/portForward/default/web?port=x", &UPGRADE, 400, "unable to parse \"x\" as a port"),
    ] {
        let (found, _, said) = node.known(method, path, headers).await;
        assert_eq!((found, said.as_str()), (status, text), "{method} {path}");
    }
    assert!(shared.connected.lock().unwrap().is_empty(), "the runtime was not asked");
    for (told, status, text) in [
        (error(Code::NotFound, "POD_NOT_FOUND", "x"), 404, "pod does not exist"),
        (error(Code::NotFound, "CONTAINER_NOT_FOUND", "x"), 500, "container not found (\"c\")"),
        (error(Code::ResourceExhausted, "TOO_MANY_EXECS", "64 are run"), 429, "64 are run"),
        (error(Code::NotFound, "RUNTIME_REFUSED", "no such"), 404, "no such"),
        (error(Code::Unknown, "RUNTIME_REFUSED", "odd"), 500, "odd"),
        (
            error(Code::Unavailable, "RUNTIME_UNAVAILABLE", "the container runtime does not answer"),
            503,
            "runtime-shim: the container runtime does not answer",
        ),
    ] {
        *shared.stream_error.lock().unwrap() = Some(told);
        let (found, headers, said) = node.known("POST", EXEC, &UPGRADE).await;
        assert_eq!((found, said.as_str()), (status, text));
        assert_eq!(headers.contains_key("retry-after"), status == 429);
    }
    *shared.stream_error.lock().unwrap() = None;
    for (answer, status, text) in
        [(403, 403, "no, not now"), (200, 500, "invalid upgrade response: status code 200")]
    {
        *shared.stream_head.lock().unwrap() = head(answer, &[("Content-Length", "3"), ("X-Why", "late")]);
        let (found, headers, said) = node.known("POST", EXEC, &UPGRADE).await;
        assert_eq!((found, said.as_str()), (status, text));
        assert_eq!(headers.contains_key("x-why"), answer == 403);
    }
}

#[tokio::test]
async fn a_command_is_run_and_its_output_is_the_answer() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let (status, headers, said) = node.known("POST", "/run/default/web/c?cmd=id+-u", &[]).await;
    assert_eq!((status, said.as_str()), (200, "out\nerr\n"));
    assert_eq!(headers["content-type"], "application/json");
    let (status, _, said) = node.known("POST", "/run/default/web/uid-of-web/c?cmd=false", &[]).await;
    assert_eq!((status, said.as_str()), (500, "command 'false' exited with 3: out\nerr\n"));
    assert_eq!(node.known("POST", "/run/default/none/c?cmd=id", &[]).await.0, 404);
}
