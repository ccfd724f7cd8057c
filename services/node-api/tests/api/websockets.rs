//! Streams over WebSocket that end in node-api, with SPDY behind them.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

use std::sync::Arc;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_service_kit::status::error;
use keelson_testkit::{Told, WebSocket, websocket_headers};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Code;

use crate::command::{Command, Seen};
use crate::fake::soon;
use crate::secured::{Secured, head};

const V5: &str = "v5.channel.k8s.io";
const ALL: &str = "/exec/default/web/c?command=cat&input=1&output=1&error=1";

/// A node whose runtime changes to SPDY with this version of the streams.
async fn node(version: &str) -> Secured {
    let node = Secured::start(false).await;
    node.world.running_pod("web");
    let said = [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", version)];
    *node.world.shared.stream_head.lock().unwrap() = head(101, &said);
    node
}

/// The same with a command at the end of so many streams.
async fn with_command(streams: usize) -> (Secured, Arc<Command>) {
    let (node, command) = (node("v4.channel.k8s.io").await, Command::with_streams(streams));
    *node.world.shared.command.lock().unwrap() = Some(Arc::clone(&command));
    (node, command)
}

/// Opens a WebSocket; with it the subprotocol that the node has chosen.
async fn open(node: &Secured, path: &str, protocols: &str) -> (WebSocket<TokioIo<Upgraded>>, String) {
    let answer = node.ask(Some(node.clients.of("jane")), "GET", path, &websocket_headers(protocols)).await;
    assert_eq!(answer.status(), 101);
    let chosen = answer.headers()["sec-websocket-protocol"].to_str().unwrap().to_owned();
    assert_eq!(answer.headers()["upgrade"], "websocket");
    let upgraded = soon(hyper::upgrade::on(answer)).await.unwrap();
    (WebSocket::over(TokioIo::new(upgraded)).await, chosen)
}

async fn until(command: &Command, is_so: impl FnMut(&Seen) -> bool) {
    soon(command.seen.subscribe().wait_for(is_so)).await.unwrap();
}

#[tokio::test]
async fn a_command_has_its_streams_in_channels_an_end_of_input_and_an_exit_code() {
    let (node, command) = with_command(4).await;
    let (mut socket, chosen) = open(&node, ALL, "v4.channel.k8s.io, v5.channel.k8s.io").await;
    assert_eq!(chosen, V5);
    assert_eq!(soon(socket.hear()).await.unwrap(), Some((1, vec![])), "the streams are there");
    soon(socket.say(0, b"hello")).await.unwrap();
    soon(socket.until("hello")).await.unwrap();
    let long = vec![b'x'; 1 << 20];
    soon(socket.say(0, &long)).await.unwrap();
    soon(socket.end(0)).await.unwrap();
    let Told { stdout, stderr, status } = soon(socket.rest()).await.unwrap();
    assert!(stdout == long && stderr == b"bye", "{} bytes", stdout.len());
    assert_eq!(
        (&status["reason"], &status["details"]["causes"][0]["message"]),
        (&json!("NonZeroExitCode"), &json!("3"))
    );

    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin", "stdout", "stderr"]);
    until(&command, |seen| seen.gone && seen.answers == 1).await;
    let asked = node.world.shared.connected.lock().unwrap().remove(0);
    let said = |name: &str| {
        let mut found = asked.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        (found.next().map(|header| header.value.clone()), found.count())
    };
    assert_eq!((asked.method.as_str(), said("upgrade").0.as_deref()), ("POST", Some("SPDY/3.1")));
    assert_eq!(said("x-stream-protocol-version"), (Some("v4.channel.k8s.io".to_owned()), 0));
    assert_eq!(said("sec-websocket-protocol"), (None, 0));
    let counted = "kubelet_websocket_streaming_requests_total{subresource=\"exec\"} 1";
    assert!(node.world.ctx.metrics.text().contains(counted), "{}", node.world.ctx.metrics.text());
}

#[tokio::test]
async fn a_terminal_has_a_size_and_one_output() {
    let (node, command) = with_command(4).await;
    let path = "/exec/default/web/uid-of-web/c?command=sh&input=1&output=1&error=1&tty=1";
    let (mut socket, _) = open(&node, path, V5).await;
    soon(socket.say(4, br#"{"Width":80,"#)).await.unwrap();
    soon(socket.say(4, br#""Height":24}"#)).await.unwrap();
    assert_eq!(soon(socket.until("\n")).await.unwrap(), "{\"Width\":80,\"Height\":24}\n");
    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin", "stdout", "resize"]);
    drop(socket);
    until(&command, |seen| seen.gone).await;
}

#[tokio::test]
async fn only_what_is_asked_for_is_opened_and_the_lowest_of_it_is_heard_first() {
    for (query, opened, first) in [
        ("output=1", &["error", "stdout"][..], 1),
        ("error=1", &["error", "stderr"], 2),
        ("output=1&error=1", &["error", "stdout", "stderr"], 1),
    ] {
        let (node, command) = with_command(opened.len()).await;
        let (mut socket, _) = open(&node, &format!("/attach/default/web/c?{query}"), V5).await;
        assert_eq!(soon(socket.hear()).await.unwrap(), Some((first, vec![])), "{query}");
        let told = soon(socket.rest()).await.unwrap();
        assert_eq!(told.exit_code(), Some(0), "{query}: {told:?}");
        assert_eq!(*command.opened.lock().unwrap(), opened, "{query}");
        let counted = "kubelet_websocket_streaming_requests_total{subresource=\"attach\"} 1";
        assert!(node.world.ctx.metrics.text().contains(counted));
    }
    let (node, command) = with_command(2).await;
    let (mut socket, _) = open(&node, "/attach/default/web/c?input=1", V5).await;
    assert_eq!(soon(socket.hear()).await.unwrap(), Some((3, vec![])), "nothing but the end is to be heard");
    assert_eq!(*command.opened.lock().unwrap(), ["error", "stdin"]);
}

#[tokio::test]
async fn a_runtime_that_breaks_off_is_no_end_of_the_command() {
    let (node, _) = with_command(4).await;
    let (mut socket, _) = open(&node, ALL, V5).await;
    soon(socket.say(0, b"break")).await.unwrap();
    let told = soon(socket.rest()).await.unwrap();
    assert_eq!((told.exit_code(), &told.status["reason"]), (None, &json!("InternalError")));
    let text = told.status["message"].as_str().unwrap();
    assert!(text.starts_with("Internal error occurred: ") && text.contains("is not known"), "{text}");
}

#[tokio::test]
async fn the_runtime_is_asked_every_five_seconds_whether_it_is_there() {
    let (node, command) = with_command(4).await;
    let (_socket, _) = open(&node, ALL, V5).await;
    until(&command, |seen| seen.pings == 1).await;
}

#[tokio::test]
async fn what_goes_wrong_before_is_an_answer_of_http() {
    let node = node("v4.channel.k8s.io").await;
    let shared = &node.world.shared;
    let gone = ALL.replace("web", "gone");
    for (path, status, text) in [
        (gone.as_str(), 404, "pod does not exist"),
        ("/exec/default/web/c?command=id", 400, "you must specify at least 1 of stdin, stdout, stderr"),
    ] {
        let (found, _, said) = node.known("GET", path, &websocket_headers(V5)).await;
        assert_eq!((found, said.as_str()), (status, text), "{path}");
    }
    let mut without_key = websocket_headers(V5).to_vec();
    without_key.remove(3);
    assert_eq!(node.known("GET", ALL, &without_key).await.0, 400);
    assert!(shared.connected.lock().unwrap().is_empty(), "the runtime was not asked");

    *shared.stream_error.lock().unwrap() = Some(error(Code::NotFound, "CONTAINER_NOT_FOUND", "x"));
    let (status, _, said) = node.known("GET", ALL, &websocket_headers(V5)).await;
    assert_eq!((status, said.as_str()), (500, "container not found (\"c\")"));
    *shared.stream_error.lock().unwrap() = None;
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
            "the container runtime answers with \"v3.channel.k8s.io\", not with v4.channel.k8s.io",
        ),
    ] {
        *shared.stream_head.lock().unwrap() = answer;
        let (found, _, said) = node.known("GET", ALL, &websocket_headers(V5)).await;
        assert_eq!((found, said.as_str()), (status, text));
    }
}

#[tokio::test]
async fn older_subprotocols_are_the_runtimes_and_pass_as_they_are() {
    let node = node("").await;
    *node.world.shared.stream_head.lock().unwrap() = head(
        101,
        &[
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Protocol", "v4.channel.k8s.io"),
        ],
    );
    let offered = "v4.channel.k8s.io, channel.k8s.io";
    let answer = node.ask(Some(node.clients.of("jane")), "GET", ALL, &websocket_headers(offered)).await;
    assert_eq!(answer.status(), 101);
    let mut streams = TokioIo::new(soon(hyper::upgrade::on(answer)).await.unwrap());
    soon(streams.write_all(b"no frames: the end")).await.unwrap();
    soon(streams.flush()).await.unwrap();
    let mut back = Vec::new();
    soon(streams.read_to_end(&mut back)).await.unwrap();
    assert_eq!(back, b"no frames: the end");
    let asked = node.world.shared.connected.lock().unwrap().remove(0);
    assert_eq!(asked.method, "GET");
    let protocol = asked.headers.iter().find(|header| header.name == "sec-websocket-protocol").unwrap();
    assert_eq!(protocol.value, offered);
    assert!(!node.world.ctx.metrics.text().contains("websocket_streaming_requests_total{"));
}

#[tokio::test]
async fn a_port_forward_in_a_tunnel_is_bytes_of_spdy_for_the_runtime() {
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
    assert_eq!(soon(socket.next()).await.unwrap(), None, "a good-bye");

    let asked = node.world.shared.connected.lock().unwrap().remove(0);
    let forward = rt::StreamPortForward { ports: vec![] };
    assert_eq!(asked.what, Some(rt::stream_start::What::PortForward(forward)));
    let versions = asked.headers.iter().filter(|header| header.name == "X-Stream-Protocol-Version");
    let versions: Vec<&str> = versions.map(|header| header.value.as_str()).collect();
    assert_eq!((asked.method.as_str(), versions), ("POST", vec!["v9.example.com", "portforward.k8s.io"]));
    let counted = "kubelet_websocket_streaming_requests_total{subresource=\"portforward\"} 1";
    assert!(node.world.ctx.metrics.text().contains(counted), "{}", node.world.ctx.metrics.text());

    *node.world.shared.stream_head.lock().unwrap() = head(403, &[]);
    let tunnel = websocket_headers("SPDY/3.1+portforward.k8s.io");
    let (status, _, said) = node.known("GET", path, &tunnel).await;
    assert_eq!((status, said.as_str()), (403, "no, not now"));
    let (status, _, said) = node.known("GET", path, &websocket_headers("a, b")).await;
    assert_eq!(
        (status, said.as_str()),
        (400, "query parameter \"port\" is required"),
        "no tunnel, and no port"
    );
}
