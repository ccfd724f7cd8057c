//! `/logs/`: files of the node and queries of the logs of its services.

#![allow(clippy::unwrap_used)] // A panic fails the test.

use std::io::Read as _;

use flate2::read::GzDecoder;
use http::Request;
use http_body_util::{BodyExt as _, Empty};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_testkit::fakes::StreamAnswer;
use rt::read_node_logs_request::What;
use rt::read_node_logs_response::Item;
use tonic::Code;

use crate::fake::{World, get, peer_error, soon};
use crate::secured_node::Secured;

fn message(item: Item) -> rt::ReadNodeLogsResponse {
    rt::ReadNodeLogsResponse { item: Some(item) }
}

fn data(text: &str) -> rt::ReadNodeLogsResponse {
    message(Item::Data(text.as_bytes().to_vec()))
}

fn file(offset: u64, length: u64, size_bytes: u64) -> rt::ReadNodeLogsResponse {
    message(Item::File(rt::NodeLogFile { size_bytes, modified_unix_seconds: 1_767_225_600, offset, length }))
}

fn folder(names: &[(&str, bool)]) -> rt::ReadNodeLogsResponse {
    let entry = |(name, is_folder): &(&str, bool)| rt::NodeLogEntry {
        name: name.as_bytes().to_vec(),
        is_folder: *is_folder,
    };
    message(Item::Folder(rt::NodeLogFolder { entries: names.iter().map(entry).collect() }))
}

/// A node with queries, whose runtime-shim answers with these messages.
async fn node(answer: Vec<rt::ReadNodeLogsResponse>) -> Secured {
    let node = Secured::start_with(|api| api.handlers.system_log_query = true).await;
    node.world.runtime.read_node_logs.list(answer);
    node
}

fn last_request(node: &Secured) -> rt::ReadNodeLogsRequest {
    node.world.runtime.read_node_logs.requests().last().unwrap()
}

#[tokio::test]
async fn log_file_is_served_with_its_size_and_time_and_a_part_of_it_by_range() {
    let node = node(vec![file(0, 10, 10), data("01234"), data("56789")]).await;
    let (status, headers, text) = node.request_as_jane("GET", "/logs/pods/a%20b/0.log", &[]).await;
    assert_eq!((status, text.as_str()), (200, "0123456789"));
    assert_eq!(last_request(&node).what, Some(What::Path(b"pods/a b/0.log".to_vec())));
    for (name, value) in [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", "10"),
        ("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("accept-ranges", "bytes"),
        ("x-content-type-options", "nosniff"),
    ] {
        assert_eq!(headers[name], value, "{name}");
    }
    let known = [("if-modified-since", "Thu, 01 Jan 2026 00:00:00 GMT")];
    assert_eq!(node.request_as_jane("GET", "/logs/x", &known).await.0, 304);

    node.world.runtime.read_node_logs.list([file(2, 3, 10), data("234")]);
    let (status, headers, text) = node.request_as_jane("GET", "/logs/x", &[("range", "bytes=2-4")]).await;
    assert_eq!(
        (status, text.as_str(), &headers["content-range"]),
        (206, "234", &"bytes 2-4/10".parse().unwrap())
    );
    assert_eq!(last_request(&node).range, Some(rt::ByteRange { first: Some(2), last: Some(4) }));
    node.world.runtime.read_node_logs.list([file(0, 0, 0)]);
    for range in ["bytes=0-", "bytes=-5", "bytes=3-4"] {
        let (status, headers, text) = node.request_as_jane("GET", "/logs/x", &[("range", range)]).await;
        assert_eq!((status, text.as_str(), headers.get("content-range")), (200, "", None), "empty: {range}");
    }
    let (status, ..) = node.request_as_jane("GET", "/logs/x", &[("range", "bytes=4-2")]).await;
    assert_eq!(status, 416);
    node.world.runtime.read_node_logs.fail(peer_error(Code::OutOfRange, "the range is outside of the file"));
    let (status, ..) = node.request_as_jane("GET", "/logs/x", &[("range", "bytes=99-")]).await;
    assert_eq!(status, 416);
}

#[tokio::test]
async fn folder_of_logs_is_a_page_of_links() {
    let node = node(vec![folder(&[("a", true), ("b<c", false)]), folder(&[("d", false)])]).await;
    let page = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n\
                <a href=\"a/\">a/</a>\n<a href=\"b%3Cc\">b&lt;c</a>\n<a href=\"d\">d</a>\n</pre>\n";
    for (path, requested) in [("/logs/", &b""[..]), ("/logs/pods/", b"pods/")] {
        let (status, headers, text) = node.request_as_jane("GET", path, &[]).await;
        assert_eq!((status, text.as_str()), (200, page), "{path}");
        assert_eq!(headers["content-type"], "text/html; charset=utf-8");
        assert_eq!(last_request(&node).what, Some(What::Path(requested.to_vec())));
    }
    for (path, location) in [("/logs", "logs/"), ("/logs/pods", "./pods/"), ("/logs/pods/a%20b", "./a%20b/")]
    {
        let (status, headers, _) = node.request_as_jane("GET", path, &[]).await;
        assert_eq!((status, headers["location"].to_str().unwrap()), (301, location), "{path}");
    }
}

#[tokio::test]
async fn no_spelling_of_dot_dot_reaches_runtime_shim() {
    let node = node(vec![file(0, 0, 0)]).await;
    for path in [
        "/logs/../etc/passwd",
        "/logs/..",
        "/logs/%2e%2e/etc/passwd",
        "/logs/a/%2E%2E/%2e./b",
        "/logs/a%2f..%2f..%2fetc%2fpasswd",
        "/logs/a%00b",
        "/logs/a%zz",
    ] {
        let (status, _, text) = node.request_as_jane("GET", path, &[]).await;
        assert_eq!(status, 400, "{path}: {text}");
    }
    assert_eq!(node.world.runtime.read_node_logs.requests().len(), 0);
    node.request_as_jane("GET", "/logs//etc/passwd", &[]).await;
    assert_eq!(last_request(&node).what, Some(What::Path(b"etc/passwd".to_vec())), "it is below the folder");
}

#[tokio::test]
async fn errors_of_log_files_have_the_texts_of_a_file_server() {
    let node = node(Vec::new()).await;
    for (code, status, text) in [
        (Code::NotFound, 404, "404 page not found\n"),
        (Code::PermissionDenied, 403, "403 Forbidden\n"),
        (Code::ResourceExhausted, 503, "runtime-shim: why"),
        (Code::Internal, 500, "runtime-shim: why"),
    ] {
        node.world.runtime.read_node_logs.fail(peer_error(code, "why"));
        let answer = node.request_as_jane("GET", "/logs/x", &[]).await;
        assert_eq!((answer.0, answer.2.as_str()), (status, text), "{code:?}");
    }
    node.world.runtime.read_node_logs.list([file(0, 1, 1), data("x")]);
    assert_eq!(node.request_as_jane("GET", "/logs/file/", &[]).await.0, 404, "a file is no folder");
    for method in ["POST", "PUT", "DELETE"] {
        assert_eq!(node.request_as_jane(method, "/logs/x", &[]).await.0, 405, "{method}");
    }
}

#[tokio::test]
async fn interrupted_log_file_aborts_the_connection() {
    let node = node(Vec::new()).await;
    let broken = || {
        let answer = StreamAnswer::items([file(0, 10, 10), data("0123")]);
        Ok(answer.then_fail(peer_error(Code::Aborted, "it has become shorter")))
    };
    node.world.runtime.read_node_logs.answer_with(move |_| broken());
    let mut sender = node.connect("127.0.0.1", Some(node.clients.sign("jane"))).await.unwrap();
    let request = Request::builder().uri("/logs/x").header("host", "node").body(Empty::new()).unwrap();
    let body = async { sender.send_request(request).await?.into_body().collect().await };
    assert!(soon(body).await.is_err());
}

#[tokio::test]
async fn query_reads_the_logs_of_services() {
    let node = node(vec![data("one\n"), data("two\n")]).await;
    let query = "query=kubelet&query=ssh&tailLines=5&boot=-1&pattern=a%7Cb&sinceTime=1970-01-01T00:00:09Z";
    let (status, headers, text) = node.request_as_jane("GET", &format!("/logs/?{query}"), &[]).await;
    assert_eq!((status, text.as_str()), (200, "one\ntwo\n"));
    assert_eq!(headers["content-type"], "text/plain;charset=UTF-8");
    assert_eq!(headers["x-content-type-options"], "nosniff");
    let expected = rt::NodeLogQuery {
        services: vec!["kubelet".into(), "ssh".into()],
        since_unix_seconds: Some(9),
        tail_lines: Some(5),
        boot: Some(-1),
        pattern: "a|b".into(),
        ..Default::default()
    };
    assert_eq!(last_request(&node).what, Some(What::Query(expected)));

    let pair = Some(node.clients.sign("jane"));
    let reply = node.request(pair, "GET", "/logs/?query=kubelet", &[("accept-encoding", "gzip")]).await;
    assert_eq!(reply.headers()["content-encoding"], "gzip");
    let bytes = soon(reply.into_body().collect()).await.unwrap().to_bytes();
    let mut text = String::new();
    GzDecoder::new(&bytes[..]).read_to_string(&mut text).unwrap();
    assert_eq!(text, "one\ntwo\n");
    let both = [("accept-encoding", "gzip, deflate")];
    let (_, headers, _) = node.request_as_jane("GET", "/logs/?query=kubelet", &both).await;
    assert!(!headers.contains_key("content-encoding"), "only exactly gzip counts");
}

#[tokio::test]
async fn query_with_a_slash_selects_a_file() {
    let node = node(vec![file(0, 4, 4), data("line")]).await;
    let (status, _, text) = node.request_as_jane("GET", "/logs/?query=/pods/0.log", &[]).await;
    assert_eq!((status, text.as_str()), (200, "line"));
    assert_eq!(last_request(&node).what, Some(What::Path(b"pods/0.log".to_vec())));
    for code in [Code::NotFound, Code::PermissionDenied] {
        node.world.runtime.read_node_logs.fail(peer_error(code, "no"));
        let (status, _, text) = node.request_as_jane("GET", "/logs/?query=/../../etc/passwd", &[]).await;
        assert_eq!(status, 406, "{text}");
        assert!(text.starts_with("query: Invalid value: [\"/../../etc/passwd\"]: "), "{text}");
    }
}

#[tokio::test]
async fn invalid_query_is_refused_before_runtime_shim_is_asked() {
    let node = node(Vec::new()).await;
    for (path, status, part) in [
        ("/logs/?query=", 400, "query cannot be empty"),
        ("/logs/?query=kubelet&tailLines=x", 400, "tailLines: Invalid value: \"x\""),
        ("/logs/?query=kubelet&sinceTime=now", 400, "invalid time format"),
        ("/logs/?query=a%3Breboot", 406, "input contains unsupported characters"),
        ("/logs/?query=%24(id)", 406, "input contains unsupported characters"),
        ("/logs/?query=kubelet&query=/a", 406, "cannot specify a file and service"),
        ("/logs/?tailLines=5", 406, "cannot be empty with options"),
        ("/logs/syslog?query=kubelet", 406, "path not allowed in query mode"),
    ] {
        let answer = node.request_as_jane("GET", path, &[]).await;
        assert!(answer.0 == status && answer.2.contains(part), "{path}: {answer:?}");
    }
    assert_eq!(node.world.runtime.read_node_logs.requests().len(), 0);
}

#[tokio::test]
async fn without_enable_system_log_query_a_query_is_ignored() {
    let node = Secured::start(false).await;
    node.world.runtime.read_node_logs.list([folder(&[])]);
    for query in ["query=kubelet", "query=", "tailLines=x"] {
        let (status, headers, _) = node.request_as_jane("GET", &format!("/logs/?{query}"), &[]).await;
        assert_eq!((status, &headers["content-type"]), (200, &"text/html; charset=utf-8".parse().unwrap()));
    }
    assert_eq!(last_request(&node).what, Some(What::Path(Vec::new())));
}

#[tokio::test]
async fn without_tls_nobody_reads_the_logs_of_the_node() {
    let world = World::start().await;
    let api = world.api().await;
    for path in ["/logs", "/logs/", "/logs/syslog", "/logs/?query=kubelet"] {
        assert_eq!(get(api, path).await.status, 401, "{path}");
    }
    assert_eq!(world.runtime.read_node_logs.requests().len(), 0);
}
