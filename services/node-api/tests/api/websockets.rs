//! Streams over WebSocket that node-api terminates, with SPDY towards the runtime.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::sync::Arc;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::status::error;
use keelson_testkit::{CommandOutput, WebSocket, websocket_headers};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Code;

use crate::command::{Command, Observed};
use crate::fake::soon;
use crate::secured_node::{Secured, head};

const V5: &str = "v5.channel.k8s.io";
const ALL: &str = "/exec/default/web/c?command=cat&input=1&output=1&error=1";

/// A node whose runtime upgrades to SPDY with this stream protocol version.
async fn node(version: &str) -> Secured {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    node.world.answer_streams(spdy_head(version));
    node
}

fn spdy_head(version: &str) -> rt::StreamHead {
    head(101, &[("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", version)])
}

/// The same with a fake command that expects this many streams.
async fn with_command(streams: usize) -> (Secured, Arc<Command>) {
    let version = "v4.channel.k8s.io";
    let (node, command) = (node(version).await, Command::with_streams(streams));
    node.world.serve_streams(&spdy_head(version), &command);
    (node, command)
}

/// Opens a WebSocket; also returns the subprotocol that the node has selected.
async fn open(node: &Secured, path: &str, protocols: &str) -> (WebSocket<TokioIo<Upgraded>>, String) {
    let answer =
        node.request(Some(node.clients.sign("jane")), "GET", path, &websocket_headers(protocols)).await;
    assert_eq!(answer.status(), 101);
    let chosen = answer.headers()["sec-websocket-protocol"].to_str().unwrap().to_owned();
    assert_eq!(answer.headers()["upgrade"], "websocket");
    let upgraded = soon(hyper::upgrade::on(answer)).await.unwrap();
    (WebSocket::over(TokioIo::new(upgraded)).await, chosen)
}

async fn until(command: &Command, condition: impl FnMut(&Observed) -> bool) {
    soon(command.observed.subscribe().wait_for(condition)).await.unwrap();
}

#[tokio::test]
async fn v5_channels_carry_streams_stdin_close_and_exit_code() {
    let (node, command) = with_command(4).await;
    let (mut socket, chosen) = open(&node, ALL, "v4.channel.k8s.io, v5.channel.k8s.io").await;
    assert_eq!(chosen, V5);
    assert_eq!(soon(socket.hear()).await.unwrap(), Some((1, vec![])), "the streams are open");
    soon(socket.say(0, b"hello")).await.unwrap();
    soon(socket.until("hello")).await.unwrap();
    let long = vec![b'x'; 1 << 20];
    soon(socket.say(0, &long)).await.unwrap();
    soon(socket.end(0)).await.unwrap();
    let CommandOutput { stdout, stderr, status } = soon(socket.rest()).await.unwrap();
    assert!(stdout == long && stderr == b"bye", "{} bytes", stdout.len());
    assert_eq!(
        (&status["reason"], &status["details"]["causes"][0]["message"]),
        (&json!("NonZeroExitCode"), &json!("3"))
    );

    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin", "stdout", "stderr"]);
    until(&command, |observed| observed.disconnected && observed.answers == 1).await;
    let start = node.world.stream_starts().remove(0);
    let header = |name: &str| {
        let mut found = start.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        (found.next().map(|header| header.value.clone()), found.count())
    };
    assert_eq!((start.method.as_str(), header("upgrade").0.as_deref()), ("POST", Some("SPDY/3.1")));
    assert_eq!(header("x-stream-protocol-version"), (Some("v4.channel.k8s.io".to_owned()), 0));
    assert_eq!(header("sec-websocket-protocol"), (None, 0));
    let counted = "kubelet_websocket_streaming_requests_total{subresource=\"exec\"} 1";
    assert!(node.world.ctx.metrics.text().contains(counted), "{}", node.world.ctx.metrics.text());
}

#[tokio::test]
async fn terminal_forwards_its_size_and_has_no_stderr() {
    let (node, command) = with_command(4).await;
    let path = "/exec/default/web/uid-of-web/c?command=sh&input=1&output=1&error=1&tty=1";
    let (mut socket, _) = open(&node, path, V5).await;
    soon(socket.say(4, br#"{"Width":80,"#)).await.unwrap();
    soon(socket.say(4, br#""Height":24}"#)).await.unwrap();
    assert_eq!(soon(socket.until("\n")).await.unwrap(), "{\"Width\":80,\"Height\":24}\n");
    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin", "stdout", "resize"]);
    drop(socket);
    until(&command, |observed| observed.disconnected).await;
}

#[tokio::test]
async fn only_requested_streams_are_opened_and_the_lowest_is_announced_first() {
    for (query, opened, first) in [
        ("output=1", &["error", "stdout"][..], 1),
        ("error=1", &["error", "stderr"], 2),
        ("output=1&error=1", &["error", "stdout", "stderr"], 1),
    ] {
        let (node, command) = with_command(opened.len()).await;
        let (mut socket, _) = open(&node, &format!("/attach/default/web/c?{query}"), V5).await;
        assert_eq!(soon(socket.hear()).await.unwrap(), Some((first, vec![])), "{query}");
        let output = soon(socket.rest()).await.unwrap();
        assert_eq!(output.exit_code(), Some(0), "{query}: {output:?}");
        assert_eq!(*command.opened.lock().unwrap(), opened, "{query}");
        let counted = "kubelet_websocket_streaming_requests_total{subresource=\"attach\"} 1";
        assert!(node.world.ctx.metrics.text().contains(counted));
    }
    let (node, command) = with_command(2).await;
    let (mut socket, _) = open(&node, "/attach/default/web/c?input=1", V5).await;
    assert_eq!(
        soon(socket.hear()).await.unwrap(),
        Some((3, vec![])),
        "the status is the only output channel"
    );
    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin"]);
}

#[tokio::test]
async fn lost_runtime_connection_is_reported_as_an_internal_error() {
    let (node, _) = with_command(4).await;
    let (mut socket, _) = open(&node, ALL, V5).await;
    soon(socket.say(0, b"break")).await.unwrap();
    let output = soon(socket.rest()).await.unwrap();
    assert_eq!((output.exit_code(), &output.status["reason"]), (None, &json!("InternalError")));
    let text = output.status["message"].as_str().unwrap();
    assert!(text.starts_with("Internal error occurred: ") && text.contains("is not known"), "{text}");
}

#[tokio::test]
async fn runtime_is_pinged_every_five_seconds() {
    let (node, command) = with_command(4).await;
    let (_socket, _) = open(&node, ALL, V5).await;
    until(&command, |observed| observed.pings == 1).await;
}

#[tokio::test]
async fn errors_before_the_websocket_opens_are_http_responses() {
    let node = node("v4.channel.k8s.io").await;
    let world = &node.world;
    let gone = ALL.replace("web", "gone");
    for (path, status, text) in [
        (gone.as_str(), 404, "pod does not exist"),
        ("/exec/default/web/c?command=id", 400, "you must specify at least 1 of stdin, stdout, stderr"),
    ] {
        let (found, _, body) = node.request_as_jane("GET", path, &websocket_headers(V5)).await;
        assert_eq!((found, body.as_str()), (status, text), "{path}");
    }
    let mut without_key = websocket_headers(V5).to_vec();
    without_key.remove(3);
    assert_eq!(node.request_as_jane("GET", ALL, &without_key).await.0, 400);
    assert!(world.stream_starts().is_empty(), "the runtime was not asked");

    world.fail_streams(Some(error(Code::NotFound, "CONTAINER_NOT_FOUND", "x")));
    let (status, _, body) = node.request_as_jane("GET", ALL, &websocket_headers(V5)).await;
    assert_eq!((status, body.as_str()), (500, "container not found (\"c\")"));
    world.fail_streams(None);
    let other = [("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", "v3.channel.k8s.io")];
    for (answer, status, text) in [
        (head(403, &[]), 403, "no, not now"),
        (head(302, &[("Location", "/elsewhere")]), 500, "invalid upgrade response: status code 302"),
        (
            head(101, &[("Upgrade", "websocket")]),
            500,
            "the container runtime does not speak SPDY/3.1 for streams",
        ),
        (
            head(101, &other),
            500,
            "the container runtime selected the stream protocol \"v3.channel.k8s.io\" instead of v4.channel.k8s.io",
        ),
    ] {
        world.answer_streams(answer);
        let (found, _, body) = node.request_as_jane("GET", ALL, &websocket_headers(V5)).await;
        assert_eq!((found, body.as_str()), (status, text));
    }
}

#[tokio::test]
async fn older_websocket_subprotocols_are_forwarded_to_the_runtime() {
    let node = node("").await;
    node.world.answer_streams(head(
        101,
        &[
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Protocol", "v4.channel.k8s.io"),
        ],
    ));
    let offered = "v4.channel.k8s.io, channel.k8s.io";
    let answer = node.request(Some(node.clients.sign("jane")), "GET", ALL, &websocket_headers(offered)).await;
    assert_eq!(answer.status(), 101);
    let mut streams = TokioIo::new(soon(hyper::upgrade::on(answer)).await.unwrap());
    soon(streams.write_all(b"no frames: the end")).await.unwrap();
    soon(streams.flush()).await.unwrap();
    let mut back = Vec::new();
    soon(streams.read_to_end(&mut back)).await.unwrap();
    assert_eq!(back, b"no frames: the end");
    let start = node.world.stream_starts().remove(0);
    assert_eq!(start.method, "GET");
    let protocol = start.headers.iter().find(|header| header.name == "sec-websocket-protocol").unwrap();
    assert_eq!(protocol.value, offered);
    assert!(!node.world.ctx.metrics.text().contains("websocket_streaming_requests_total{"));
}

#[tokio::test]
async fn port_forward_tunnel_carries_spdy_to_the_runtime() {
    let node = node("portforward.k8s.io").await;
    let path = "/portForward/default/web";
    let (mut socket, chosen) =
        open(&node, path, "SPDY/3.1+v9.example.com, SPDY/3.1+portforward.k8s.io, v4.channel.k8s.io").await;
    assert_eq!(chosen, "SPDY/3.1+portforward.k8s.io");
    let long = vec![b'x'; 200_000];
    for bytes in [&b"one"[..], &long] {
        soon(socket.send(bytes.to_vec())).await.unwrap();
        let mut back = Vec::new();
        while back.len() < bytes.len() {
            back.extend(soon(socket.next()).await.unwrap().unwrap());
        }
        assert_eq!(back, bytes);
    }
    soon(socket.send(b"the end".to_vec())).await.unwrap();
    assert_eq!(soon(socket.next()).await.unwrap(), Some(b"the end".to_vec()));
    assert_eq!(soon(socket.next()).await.unwrap(), None, "a close frame");

    let start = node.world.stream_starts().remove(0);
    let forward = rt::StreamPortForward { ports: vec![] };
    assert_eq!(start.what, Some(rt::stream_start::What::PortForward(forward)));
    let versions = start.headers.iter().filter(|header| header.name == "X-Stream-Protocol-Version");
    let versions: Vec<&str> = versions.map(|header| header.value.as_str()).collect();
    assert_eq!((start.method.as_str(), versions), ("POST", vec!["v9.example.com", "portforward.k8s.io"]));
    let counted = "kubelet_websocket_streaming_requests_total{subresource=\"portforward\"} 1";
    assert!(node.world.ctx.metrics.text().contains(counted), "{}", node.world.ctx.metrics.text());

    node.world.answer_streams(head(403, &[]));
    let tunnel = websocket_headers("SPDY/3.1+portforward.k8s.io");
    let (status, _, body) = node.request_as_jane("GET", path, &tunnel).await;
    assert_eq!((status, body.as_str()), (403, "no, not now"));
    let (status, _, body) = node.request_as_jane("GET", path, &websocket_headers("a, b")).await;
    assert_eq!(
        (status, body.as_str()),
        (400, "query parameter \"port\" is required"),
        "neither a tunnel nor a port"
    );
}
