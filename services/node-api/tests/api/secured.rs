//! The kubelet API over TLS: authentication by certificates, connection limits, and the ways into a container.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::path::Path;

use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use keelson_config::ServiceName;
use keelson_node_api::connection_limits::ConnectionLimits;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::status::error;
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

use crate::fake::soon;
use crate::secured_node::{Authority, Secured, head};

const UPGRADE: [(&str, &str); 2] = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
const EXEC: &str = "/exec/default/web/c?command=cat&command=a%20b&input=1&output=1&error=1";

#[tokio::test]
async fn client_certificate_of_a_trusted_authority_is_required() {
    let node = Secured::start(false).await;
    for path in ["/healthz/ping", "/pods", "/metrics", "/exec/default/web/c", "/nothing"] {
        assert_eq!(node.get(None, path).await, 401, "{path}: without a certificate");
        let foreign = Authority::new("clients").sign("jane");
        assert_eq!(node.get(Some(foreign), path).await, 401, "{path}: of another authority");
    }
    assert_eq!(node.get(Some(node.clients.sign("jane")), "/healthz/ping").await, 200);
    assert_eq!(node.get(Some(node.clients.sign("jane")), "/nothing").await, 404);
    assert_eq!(
        node.get(Some(node.clients.sign("")), "/healthz/ping").await,
        401,
        "a certificate without a name"
    );
    assert!(node.world.ctx.metrics.text().contains("path=\"healthz\""), "refused requests are counted, too");
}

/// A certificate of X.509 version 1, as `openssl x509 -req` without extensions creates it. The key is for this test alone.
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
async fn refused_client_certificates_are_counted_by_reason() {
    let node = Secured::start(false).await;
    let version_1 = || {
        let certificate = CertificateDer::from_pem_slice(VERSION_1.as_bytes()).unwrap();
        (certificate, PrivateKeyDer::from_pem_slice(VERSION_1.as_bytes()).unwrap())
    };
    let kinds = [
        ("unknown_issuer", Authority::new("others").sign("jane")),
        ("signature", Authority::new("clients").sign("jane")),
        ("no_name", node.clients.sign("")),
        (
            "expired",
            node.clients.sign_with("jane", &[], |params| params.not_after = date_time_ymd(2001, 1, 1)),
        ),
        (
            "not_valid_yet",
            node.clients.sign_with("jane", &[], |params| params.not_before = date_time_ymd(2999, 1, 1)),
        ),
        (
            "purpose",
            node.clients.sign_with("jane", &[], |params| {
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
    assert_eq!(node.get(Some(node.clients.sign("jane")), "/healthz/ping").await, 200);

    // A certificate of version 1 fails the handshake, which the client notices with its first request.
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
async fn without_client_authorities_certificates_are_ignored() {
    for anonymous in [false, true] {
        let node = Secured::start_with(|api| {
            let tls = api.tls.as_mut().unwrap();
            (tls.client_ca_file, tls.anonymous) = (None, anonymous);
        });
        let node = node.await;
        let expected = if anonymous { 200 } else { 401 };
        assert_eq!(node.get(None, "/healthz/ping").await, expected);
        assert_eq!(
            node.get(Some(node.clients.sign("jane")), "/healthz/ping").await,
            expected,
            "the certificate is ignored"
        );
    }
}

#[tokio::test]
async fn self_signed_certificate_names_the_node_and_its_addresses() {
    let node = Secured::start(false).await;
    for name in ["n1", "localhost", "127.0.0.1"] {
        assert!(node.connect(name, None).await.is_ok(), "{name}");
    }
    assert!(node.connect("elsewhere", None).await.is_err());
    let file = node.world.ctx.config.paths.state(ServiceName::NodeApi).join("serving.pem");
    assert!(Path::new(&file).exists());
}

#[tokio::test]
async fn client_with_a_wrong_certificate_is_not_anonymous() {
    let node = Secured::start(true).await;
    assert_eq!(node.get(None, "/healthz/ping").await, 200);
    assert_eq!(node.get(Some(Authority::new("x").sign("jane")), "/healthz/ping").await, 401);
}

#[tokio::test]
async fn upgraded_stream_forwards_bytes_in_both_directions() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let upgrade_headers = [
        ("Connection", "Upgrade"),
        ("Upgrade", "SPDY/3.1"),
        ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
    ];
    node.world.answer_streams(head(101, &upgrade_headers));
    let headers =
        [&UPGRADE[..], &[("X-Stream-Protocol-Version", "v4.channel.k8s.io"), ("Authorization", "Bearer x")]]
            .concat();
    let answer = node.request(Some(node.clients.sign("jane")), "POST", EXEC, &headers).await;
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

    let start = node.world.stream_starts().remove(0);
    assert_eq!(
        (start.pod_uid.as_str(), start.namespace.as_str(), start.method.as_str()),
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
    assert_eq!(start.what, Some(rt::stream_start::What::Exec(exec)));
    assert!(
        start.headers.iter().any(|h| h.name == "upgrade" && h.value == "SPDY/3.1"),
        "{:?}",
        start.headers
    );
}

/// Waits until an authorized connection gets a slot again.
async fn wait_for_slot(node: &Secured) {
    let requests = async {
        while node.get(Some(node.clients.sign("jane")), "/healthz/ping").await != 200 {
            tokio::task::yield_now().await;
        }
    };
    soon(requests).await;
}

#[tokio::test]
async fn followed_logs_leave_unauthorized_slots_free_and_excess_is_503() {
    let node = Secured::start_within(ConnectionLimits { unauthorized: 1, authorized: 2 }, |_| {}).await;
    node.world.running_pod("web");
    let mut followed = Vec::new();
    for _ in 0..2 {
        let path = "/containerLogs/default/web/c?follow=true";
        let answer = soon(node.request(Some(node.clients.sign("jane")), "GET", path, &[])).await;
        assert_eq!(answer.status(), 200);
        followed.push(answer);
    }
    assert_eq!(node.world.runtime.read_logs.open_streams(), 2);
    assert_eq!(node.get(None, "/healthz/ping").await, 401, "an unauthorized slot is free");
    let (status, headers, text) = node.request_as_jane("GET", "/healthz/ping", &[]).await;
    assert_eq!(status, 503);
    assert!(text.starts_with("too many connections to this node are open"), "{text}");
    assert_eq!(headers["connection"], "close");
    assert_eq!(headers["retry-after"], "1");
    let reported = async {
        loop {
            let conditions = node.world.ctx.progress.report("").conditions;
            let found = conditions.into_iter().find(|found| found.name == "connections of the test port");
            if found.is_some_and(|found| !found.ok && found.message.contains("2 are open, 2 of them by user"))
            {
                return;
            }
            // The port updates the condition with each connection.
            node.get(None, "/healthz/ping").await;
        }
    };
    soon(reported).await;
    drop(followed.pop());
    wait_for_slot(&node).await;
}

#[tokio::test]
async fn idle_unauthorized_connections_are_displaced_oldest_first() {
    let node = Secured::start_within(ConnectionLimits { unauthorized: 64, authorized: 64 }, |_| {}).await;
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(soon(TcpStream::connect(node.address)).await.unwrap());
    }
    for _ in 0..3 {
        let (status, _, _) = soon(node.request_as_jane("GET", "/healthz/ping", &[])).await;
        assert_eq!(status, 200);
    }
    // An address may have an eighth of the slots.
    let mut buffer = [0];
    assert_eq!(soon(idle[0].read(&mut buffer)).await.unwrap_or(0), 0, "the oldest was closed");
    let conditions = node.world.ctx.progress.report("").conditions;
    let condition = conditions.iter().find(|found| found.name == "connections of the test port").unwrap();
    assert!(!condition.ok && condition.message.contains("by 127.0.0.1"), "{condition:?}");
    // New connections do not displace an authorized one.
    let mut authorized = node.connect("127.0.0.1", Some(node.clients.sign("jane"))).await.unwrap();
    for round in 0..2 {
        let request = Request::get("/healthz/ping").header("host", "node").body(Empty::new()).unwrap();
        let answer = soon(authorized.send_request(request)).await.unwrap();
        assert_eq!(answer.status(), 200, "{round}");
        soon(answer.into_body().collect()).await.unwrap();
        for _ in 0..100 {
            idle.push(soon(TcpStream::connect(node.address)).await.unwrap());
        }
    }
}

#[tokio::test]
async fn upgraded_stream_frees_its_connection_slot() {
    let node = Secured::start_within(ConnectionLimits { unauthorized: 1, authorized: 1 }, |_| {}).await;
    node.world.running_pod("web");
    let upgrade_headers = [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1")];
    node.world.answer_streams(head(101, &upgrade_headers));
    let answer = node.request(Some(node.clients.sign("jane")), "POST", EXEC, &UPGRADE).await;
    assert_eq!(answer.status(), 101);
    let mut streams = TokioIo::new(soon(hyper::upgrade::on(answer)).await.unwrap());
    wait_for_slot(&node).await;
    soon(streams.write_all(b"the end")).await.unwrap();
    soon(streams.flush()).await.unwrap();
    let mut rest = Vec::new();
    soon(streams.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"the end");
}

#[tokio::test]
async fn refused_connection_is_closed_and_frees_its_slot() {
    let node = Secured::start_within(ConnectionLimits { unauthorized: 1, authorized: 1 }, |_| {}).await;
    let mut refused = node.connect("127.0.0.1", None).await.unwrap();
    let request = Request::get("/healthz/ping").header("host", "node").body(Empty::new()).unwrap();
    let answer = soon(refused.send_request(request)).await.unwrap();
    assert_eq!(answer.status(), 401);
    assert_eq!(answer.headers()["connection"], "close");
    // The client's side of the connection is still open.
    let (status, headers, _) = soon(node.request_as_jane("GET", "/healthz/ping", &[])).await;
    assert_eq!(status, 200);
    assert!(!headers.contains_key("connection"), "{headers:?}");
    drop(refused);
}

#[tokio::test]
async fn stream_errors_are_answered_as_by_the_kubelet() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let world = &node.world;
    let no_stream = "you must specify at least 1 of stdin, stdout, stderr";
    let other_uid = "/attach/default/web/other/c?output=1";
    for (method, path, headers, status, text) in [
        ("POST", "/exec/default/web/c?command=id", &UPGRADE[..], 400, no_stream),
        ("POST", "/exec/default/gone/c?output=1", &UPGRADE, 404, "pod does not exist"),
        ("GET", other_uid, &UPGRADE, 404, "pod not found"),
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
        let (found, _, body) = node.request_as_jane(method, path, headers).await;
        assert_eq!((found, body.as_str()), (status, text), "{method} {path}");
    }
    assert!(world.stream_starts().is_empty(), "the runtime was not asked");
    for (error, status, text) in [
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
        world.fail_streams(Some(error));
        let (found, headers, body) = node.request_as_jane("POST", EXEC, &UPGRADE).await;
        assert_eq!((found, body.as_str()), (status, text));
        assert_eq!(headers.contains_key("retry-after"), status == 429);
    }
    world.fail_streams(None);
    for (answer, status, text) in
        [(403, 403, "no, not now"), (200, 500, "invalid upgrade response: status code 200")]
    {
        world.answer_streams(head(answer, &[("Content-Length", "3"), ("X-Why", "late")]));
        let (found, headers, body) = node.request_as_jane("POST", EXEC, &UPGRADE).await;
        assert_eq!((found, body.as_str()), (status, text));
        assert_eq!(headers.contains_key("x-why"), answer == 403);
    }
}

#[tokio::test]
async fn run_executes_a_command_and_returns_its_output() {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let (status, headers, body) = node.request_as_jane("POST", "/run/default/web/c?cmd=id+-u", &[]).await;
    assert_eq!((status, body.as_str()), (200, "out\nerr\n"));
    assert_eq!(headers["content-type"], "application/json");
    let (status, _, body) =
        node.request_as_jane("POST", "/run/default/web/uid-of-web/c?cmd=false", &[]).await;
    assert_eq!((status, body.as_str()), (500, "command 'false' exited with 3: out\nerr\n"));
    assert_eq!(node.request_as_jane("POST", "/run/default/none/c?cmd=id", &[]).await.0, 404);
}
