//! Exec and port forwarding over WebSocket, through the whole agent, with a real containerd.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::net::Ipv4Addr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::Empty;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use keelson_config::{Paths, ServiceName};
use keelson_spdy::frames::{Decoder, Event, Opener, data_head};
use keelson_testkit::{Agent, Scratch, WebSocket, websocket_headers};
use keelson_tests::{LIMIT, sleeper, until_ready};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const V5: &str = "v5.channel.k8s.io";

/// An agent with a pod that serves a page, and the credentials of a client.
struct TestNode {
    agent: Agent,
    operator: (CertificateDer<'static>, PrivateKeyDer<'static>),
    _scratch: Scratch,
}

impl TestNode {
    async fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let clients = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let authorities = scratch.path().join("clients.pem");
        std::fs::write(&authorities, clients.pem()).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "operator");
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &clients).unwrap().der().clone();
        let agent = Agent::builder(&scratch.path().join("n"))
            .fields(&json!({
                "authentication": {"x509": {"clientCAFile": authorities}},
                "authorization": {"mode": "AlwaysAllow"},
            }))
            .start()
            .await
            .unwrap();
        let serves = "echo a page >/scratch/page; exec busybox httpd -f -p 8080 -h /scratch";
        agent.write_manifest("web.yaml", &sleeper("web").replace("exec sleep 1000000", serves)).unwrap();
        until_ready(&agent, &["web"]).await.unwrap();
        let operator = (certificate, PrivateKeyDer::try_from(key.serialize_der()).unwrap());
        Self { agent, operator, _scratch: scratch }
    }

    /// Opens a WebSocket to a path of the pod.
    async fn open(&self, way: &str, rest: &str, protocols: &str) -> WebSocket<TokioIo<Upgraded>> {
        let spec = self.agent.spec();
        let shown = Paths::socket_below(&spec.run_dir, ServiceName::NodeApi).with_file_name("serving.crt");
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(shown).unwrap() {
            roots.add(certificate.unwrap()).unwrap();
        }
        let (certificate, key) = (self.operator.0.clone(), self.operator.1.clone_key());
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .unwrap();
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, spec.port)).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        let path = format!("/{way}/default/web-{}{rest}", spec.node_name);
        let request = http::Request::get(path).header("host", "node");
        let request =
            websocket_headers(protocols).iter().fold(request, |r, (name, value)| r.header(*name, *value));
        let answer =
            within_limit(sender.send_request(request.body(Empty::<Bytes>::new()).unwrap())).await.unwrap();
        assert_eq!(answer.status(), 101, "{}", self.agent.log_tail());
        WebSocket::over(TokioIo::new(within_limit(hyper::upgrade::on(answer)).await.unwrap())).await
    }

    /// Starts a command with input and output; `query` begins with `&`.
    async fn exec(&self, script: &str, query: &str) -> WebSocket<TokioIo<Upgraded>> {
        let script: String = script.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let rest =
            format!("/main?command=/bin/sh&command=-c&command={script}&input=1&output=1&error=1{query}");
        let mut socket = self.open("exec", &rest, &format!("v4.channel.k8s.io, {V5}")).await;
        assert_eq!(within_limit(socket.hear()).await.unwrap(), Some((1, vec![])), "the streams are there");
        socket
    }
}

async fn within_limit<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, what).await.expect("it has to come")
}

#[tokio::test]
async fn websocket_exec_has_separate_streams_end_of_input_and_exit_code() {
    let test_node = TestNode::new().await;
    let mut socket = test_node.exec("cat; echo err >&2; exit 3", "").await;
    let long = vec![b'x'; 300_000];
    for bytes in [&b"one "[..], &long] {
        within_limit(socket.say(0, bytes)).await.unwrap();
    }
    within_limit(socket.end(0)).await.unwrap();
    let result = within_limit(socket.rest()).await.unwrap();
    assert!(
        result.stdout == [b"one ", &long[..]].concat() && result.stderr == b"err\n",
        "{} bytes",
        result.stdout.len()
    );
    assert_eq!(result.exit_code(), Some(3), "{:?}", result.status);

    // A terminal, and its size.
    let mut socket = test_node.exec("while read line; do stty size; done; exit 5", "&tty=1").await;
    for (width, height) in [(80, 24), (132, 50)] {
        let size = json!({"Width": width, "Height": height}).to_string();
        within_limit(socket.say(4, size.as_bytes())).await.unwrap();
        let wanted = format!("{height} {width}");
        let mut received = String::new();
        // The runtime sets the size concurrently with the input, so a line may be read before.
        while !received.contains(&wanted) {
            within_limit(socket.say(0, b"\n")).await.unwrap();
            received.push_str(&within_limit(socket.until("\n")).await.unwrap());
        }
    }
    within_limit(socket.say(0, &[4])).await.unwrap();
    let result = within_limit(socket.rest()).await.unwrap();
    assert_eq!(result.exit_code(), Some(5), "{:?}", result.status);
    test_node.agent.end().unwrap();
}

#[tokio::test]
async fn websocket_port_forward_reaches_a_port_of_a_pod() {
    let test_node = TestNode::new().await;
    let mut socket = test_node.open("portForward", "", "SPDY/3.1+portforward.k8s.io").await;
    let mut opener = Opener::default();
    for (stream, kind) in [(1, "error"), (3, "data")] {
        let headers = [("streamtype", kind), ("port", "8080"), ("requestid", "0")];
        within_limit(socket.send(opener.open(stream, &headers))).await.unwrap();
    }
    let (mut decoder, mut input, mut taken, mut page) = (Decoder::default(), BytesMut::new(), 0, Vec::new());
    let asked = b"GET /page HTTP/1.0\r\n\r\n";
    while !String::from_utf8_lossy(&page).contains("a page") {
        while let Some(event) = decoder.next(&mut input).unwrap() {
            match event {
                Event::Taken { .. } => {
                    taken += 1;
                    if taken == 2 {
                        let frame = [&data_head(3, asked.len(), false)[..], asked].concat();
                        within_limit(socket.send(frame)).await.unwrap();
                    }
                }
                Event::Data { stream: 3, bytes } => page.extend_from_slice(&bytes),
                Event::Data { bytes, .. } => panic!("{}", String::from_utf8_lossy(&bytes)),
                Event::Ended { .. } | Event::Ping { .. } => {}
                other => panic!("{other:?} after {page:?}"),
            }
        }
        if !String::from_utf8_lossy(&page).contains("a page") {
            input.extend_from_slice(&within_limit(socket.next()).await.unwrap().expect("more comes"));
        }
    }
    assert!(
        page.starts_with(b"HTTP/1.0 200") || page.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&page)
    );
    test_node.agent.end().unwrap();
}
