//! Manifests at a URL, through the API of the real binary.

#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod common;

use std::fs;

use common::http_server::HttpServer;
use common::{Node, Service, image, pod};
use keelson_config::{ServiceName, UrlHeaders};
use keelson_proto::keelson::pod_config::v1::Source;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;

/// A node whose manifests are only at `/` of `server`.
fn node_with_url(server: &HttpServer) -> Node {
    let mut node = Node::new();
    node.config.sources.static_pod_path = None;
    node.config.sources.static_pod_url = Some(format!("{}/", server.url));
    node.config.sources.http_check_ms = 100;
    node
}

fn list(pods: &[String]) -> String {
    let documents: Vec<String> =
        pods.iter().map(|pod| format!("- {}", pod.trim_end().replace('\n', "\n  "))).collect();
    format!("apiVersion: v1\nkind: PodList\nitems:\n{}\n", documents.join("\n"))
}

const NO_PODS: &str = r#"{"apiVersion":"v1","kind":"PodList","items":null}"#;

async fn source(service: &Service) -> Source {
    service.sources().await.into_iter().find(|source| source.name == "http").unwrap()
}

#[tokio::test]
async fn url_pods_are_added_changed_and_removed() {
    let server = HttpServer::start();
    server.serve_manifest(&pod("web", "one"));
    let node = node_with_url(&server);
    let service = node.start();
    let mut watch = service.watch().await;
    let (pods, mut ready) = watch.replay().await;
    ready.sort();
    assert_eq!(ready, ["http", "manifest"]);
    let first = &pods[0];
    assert_eq!(
        (first.namespace.as_str(), first.name.as_str(), first.source.as_str()),
        ("default", "web-n1", "http")
    );
    assert_eq!(first.origin, format!("{}/", server.url));
    let json = String::from_utf8(first.pod_json.to_vec()).unwrap();
    assert!(json.contains("\"kubernetes.io/config.source\":\"http\""), "{json}");
    assert!(!json.contains("NoExecute"), "{json}");

    server.serve_manifest(&list(&[pod("web", "two"), pod("other", "i")]));
    assert_eq!(watch.removed_uid().await, first.uid);
    let mut names = [watch.pod().await.name, watch.pod().await.name];
    names.sort();
    assert_eq!(names, ["other-n1", "web-n1"]);

    server.serve_manifest(NO_PODS);
    watch.removed_uid().await;
    watch.removed_uid().await;
    assert!(service.problems().await.is_empty(), "an empty list is a valid response");
}

#[tokio::test]
async fn url_errors_are_reported_once_and_remove_no_pods() {
    let server = HttpServer::start();
    server.serve_manifest(&pod("web", "one"));
    let node = node_with_url(&server);
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (before, _) = watch.replay().await;

    let too_long = "#".repeat(10 << 20);
    for (head, body, expected) in [
        ("503 Service Unavailable", pod("web", "two"), "503 Service Unavailable"),
        ("404 Not Found", String::new(), "404 Not Found"),
        ("302 Found", String::new(), "302 Found"),
        ("302 Found\r\nlocation: /", String::new(), "redirects more than 10 times"),
        ("302 Found\r\nlocation: file:///etc/passwd", String::new(), "neither http nor https"),
        ("200 OK", "kind: [".to_owned(), "not valid YAML"),
        ("200 OK", "<html>".to_owned(), "not an object"),
        ("200 OK", list(&[pod("web", "two"), pod("bad", "'bad image '")]), "spec.containers[0].image"),
        ("200 OK", too_long, "limit of 10 MiB"),
    ] {
        server.respond("/", head, &body);
        let line = service.wait_for_event("manifest_error");
        assert!(line.contains("its last good version stays in effect"), "{line}");
        // While the response changes, the previous error is reported at most once more.
        server.wait_for_requests(4);
        let source = source(&service).await;
        assert!(source.problems[0].message.contains(expected), "{expected}: {source:?}");
        assert_eq!(source.problems[0].kept_pods, ["default/web-n1"]);
        assert_eq!((source.pods, source.ready), (1, true));
        assert_eq!(service.count_log(expected), 1, "{expected}");
        let health = service.condition("static-pod-url").await.unwrap();
        assert!(!health.ok && health.message.contains("get sources"), "{health:?}");
    }
    server.close_connections();
    service.wait_for_log("the request failed");

    server.serve_manifest(&pod("web", "one"));
    service.wait_for_event("manifest_fixed");
    assert!(service.condition("static-pod-url").await.unwrap().ok);
    assert_eq!(service.watch().await.replay().await.0, before, "no pods have changed");
}

#[tokio::test]
async fn an_empty_url_response_removes_the_pods_when_it_comes_twice() {
    let server = HttpServer::start();
    server.serve_manifest(&pod("web", "one"));
    let node = node_with_url(&server);
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    server.serve_manifest("");
    service.wait_for_log("if the next one is empty too");
    assert_eq!(watch.removed_uid().await, pods[0].uid);
    service.wait_for_log("the response is empty; return an empty PodList");
    assert_eq!(source(&service).await.pods, 0);

    // Without known pods an empty response settles the source at once.
    let fresh = node_with_url(&server);
    let service = fresh.start();
    let (pods, ready) = service.watch().await.replay().await;
    assert!(pods.is_empty() && ready.contains(&"http".to_owned()), "{ready:?}");
    assert_eq!(source(&service).await.problems.len(), 1);
}

#[tokio::test]
async fn after_sigkill_the_last_good_url_response_stays_until_the_next() {
    let server = HttpServer::start();
    server.serve_manifest(&pod("web", "one"));
    let mut node = node_with_url(&server);
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    // One row for the response and one for its pod.
    service.wait_for_rows(2);
    service.kill();

    for answer in [None, Some("kind: [")] {
        match answer {
            None => server.close_connections(),
            Some(text) => server.serve_manifest(text),
        }
        node.config.sources.http_check_ms = 3_600_000;
        let mut service = node.start();
        let line = service.wait_for_event("manifest_error");
        assert!(line.contains("its last good version stays in effect"), "{line}");
        let mut watch = service.watch().await;
        assert_eq!(watch.pod().await, before[0], "{answer:?}");
        let source = source(&service).await;
        assert_eq!((source.ready, source.pods), (false, 1), "{answer:?}");
        service.kill();
    }
    node.config.sources.http_check_ms = 100;
    server.close_connections();
    let mut service = node.start();
    let line = service.wait_for_event("manifest_error");
    assert!(line.contains("its last good version stays in effect"), "{line}");
    let mut watch = service.watch().await;
    assert_eq!(watch.pod().await, before[0]);
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "manifest"));
    server.serve_manifest(&pod("web", "one"));
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "http"));
    assert!(matches!(watch.next().await, Item::Synced(_)), "and no pod was removed or added");

    service.kill();
    node.config.sources.static_pod_url = None;
    let mut service = node.start();
    assert!(service.watch().await.replay().await.0.is_empty(), "a URL that is not configured has no pods");
    service.wait_for_rows(2);
}

#[tokio::test]
async fn url_headers_are_sent_to_the_url_but_not_to_redirect_targets() {
    let (server, other) = (HttpServer::start(), HttpServer::start());
    let location = |to: &str| format!("302 Found\r\nlocation: {to}");
    server.respond("/", &location("/near"), "");
    server.respond("/near", &location(&format!("{}/far", other.url)), "");
    other.respond("/far", &location(&format!("{}/back", server.url)), "");
    server.respond("/back", "200 OK", &pod("web", "one"));
    let node = node_with_url(&server);
    let folder = node.config.paths.credentials(ServiceName::PodConfig);
    fs::create_dir_all(&folder).unwrap();
    let headers = [("Authorization", "Bearer hidden-word"), ("X-A", "1"), ("X-A", "2"), ("Host", "evil")];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
    fs::write(folder.join(UrlHeaders::COPY), UrlHeaders(headers.to_vec()).encode()).unwrap();
    let mut service = node.start();
    let (pods, _) = service.watch().await.replay().await;
    assert!(image(&pods[0]).contains("one"));
    for path in ["/", "/near"] {
        let request = server.next();
        assert_eq!(request.path, path);
        assert_eq!(request.header("authorization"), ["Bearer hidden-word"]);
        assert_eq!(request.header("x-a"), ["1", "2"]);
        assert!(request.header("host")[0].starts_with("localhost:"), "{request:?}");
    }
    for request in [other.next(), server.next()] {
        assert!(
            request.header("authorization").is_empty() && request.header("x-a").is_empty(),
            "{request:?}"
        );
    }
    assert_eq!(service.count_log("hidden-word"), 0);
}

#[tokio::test]
async fn changed_url_headers_are_sent_with_the_next_request() {
    let server = HttpServer::start();
    server.serve_manifest(&pod("web", "one"));
    let node = node_with_url(&server);
    let folder = node.config.paths.credentials(ServiceName::PodConfig);
    fs::create_dir_all(&folder).unwrap();
    let hand = |value: &str| {
        let headers = UrlHeaders(vec![("X-Group".to_owned(), value.to_owned())]);
        fs::write(folder.join("new"), headers.encode()).unwrap();
        fs::rename(folder.join("new"), folder.join(UrlHeaders::COPY)).unwrap();
    };
    hand("one");
    let service = node.start();
    service.watch().await.replay().await;
    assert_eq!(server.next().header("x-group"), ["one"]);
    hand("two");
    // The server accepts both values, so no error triggers the change.
    assert!((0..50).any(|_| server.next().header("x-group") == ["two"]));
}

#[tokio::test]
async fn https_urls_are_verified_with_the_system_certificate_authorities() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let tls = ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .unwrap();
    let server = HttpServer::with_tls(tls);
    server.serve_manifest(&pod("web", "one"));
    let mut node = node_with_url(&server);
    let roots = node.path("roots.pem");
    node.environment.push(("SSL_CERT_FILE".into(), roots.clone()));
    let another = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(&roots, another.cert.pem()).unwrap();
    let mut service = node.start();
    service.wait_for_log("invalid peer certificate");
    assert!(!source(&service).await.ready);
    // The certificate authorities are read again after an error.
    fs::write(&roots, own.cert.pem()).unwrap();
    assert_eq!(service.watch().await.replay().await.0.len(), 1);
}
