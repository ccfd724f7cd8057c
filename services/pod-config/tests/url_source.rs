//! Manifests that stand at a URL, seen through the API of the real binary.

#![allow(clippy::unwrap_used)] // A test fails where it stands.

mod common;

use std::fs;

use common::web::Web;
use common::{Node, Service, image, pod};
use keelson_config::{ServiceName, UrlHeaders};
use keelson_proto::keelson::pod_config::v1::Source;
use keelson_proto::keelson::pod_config::v1::watch_pods_response::Item;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;

/// A node whose manifests stand at `/` of `web` and nowhere else.
fn node_of(web: &Web) -> Node {
    let mut node = Node::new();
    node.config.sources.static_pod_path = None;
    node.config.sources.static_pod_url = Some(format!("{}/", web.url));
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
async fn pods_come_change_and_go_as_the_url_says() {
    let web = Web::start();
    web.has(&pod("web", "one"));
    let node = node_of(&web);
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
    assert_eq!(first.origin, format!("{}/", web.url));
    let json = String::from_utf8(first.pod_json.to_vec()).unwrap();
    assert!(json.contains("\"kubernetes.io/config.source\":\"http\""), "{json}");
    assert!(!json.contains("NoExecute"), "{json}");

    web.has(&list(&[pod("web", "two"), pod("other", "i")]));
    assert_eq!(watch.gone().await, first.uid);
    let mut names = [watch.pod().await.name, watch.pod().await.name];
    names.sort();
    assert_eq!(names, ["other-n1", "web-n1"]);

    web.has(NO_PODS);
    watch.gone().await;
    watch.gone().await;
    assert!(service.problems().await.is_empty(), "that is an answer");
}

#[tokio::test]
async fn whatever_goes_wrong_is_told_once_and_ends_no_pod() {
    let web = Web::start();
    web.has(&pod("web", "one"));
    let node = node_of(&web);
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (before, _) = watch.replay().await;

    let too_long = "#".repeat(10 << 20);
    for (head, body, told) in [
        ("503 Service Unavailable", pod("web", "two"), "503 Service Unavailable"),
        ("404 Not Found", String::new(), "404 Not Found"),
        ("302 Found", String::new(), "302 Found"),
        ("302 Found\r\nlocation: /", String::new(), "elsewhere more than 10 times"),
        ("302 Found\r\nlocation: file:///etc/passwd", String::new(), "neither http nor https"),
        ("200 OK", "kind: [".to_owned(), "not valid YAML"),
        ("200 OK", "<html>".to_owned(), "this is no object"),
        ("200 OK", list(&[pod("web", "two"), pod("bad", "'bad image '")]), "spec.containers[0].image"),
        ("200 OK", too_long, "limit of 10 MiB"),
    ] {
        web.say("/", head, &body);
        service.wait_for_log("its last good version goes on");
        // The error of before is asked for once more at most while the answer changes.
        web.is_asked(4);
        let source = source(&service).await;
        assert!(source.problems[0].message.contains(told), "{told}: {source:?}");
        assert_eq!(source.problems[0].kept_pods, ["default/web-n1"]);
        assert_eq!((source.pods, source.ready), (1, true));
        assert_eq!(service.count_log(told), 1, "{told}");
        let health = service.condition("static-pod-url").await.unwrap();
        assert!(!health.ok && health.message.contains("get sources"), "{health:?}");
    }
    web.hangs_up();
    service.wait_for_log("there is no answer");

    web.has(&pod("web", "one"));
    service.wait_for_log("has no problem any more");
    assert!(service.condition("static-pod-url").await.unwrap().ok);
    assert_eq!(service.watch().await.replay().await.0, before, "nothing came of it");
}

#[tokio::test]
async fn an_empty_answer_takes_the_pods_when_it_comes_twice() {
    let web = Web::start();
    web.has(&pod("web", "one"));
    let node = node_of(&web);
    let mut service = node.start();
    let mut watch = service.watch().await;
    let (pods, _) = watch.replay().await;
    web.has("");
    service.wait_for_log("if the next one is as well");
    assert_eq!(watch.gone().await, pods[0].uid);
    service.wait_for_log("the answer is empty; write an empty PodList");
    assert_eq!(source(&service).await.pods, 0);

    // Where nothing is known it says at once that there is nothing.
    let fresh = node_of(&web);
    let service = fresh.start();
    let (pods, ready) = service.watch().await.replay().await;
    assert!(pods.is_empty() && ready.contains(&"http".to_owned()), "{ready:?}");
    assert_eq!(source(&service).await.problems.len(), 1);
}

#[tokio::test]
async fn after_sigkill_the_last_good_answer_goes_on_until_there_is_another() {
    let web = Web::start();
    web.has(&pod("web", "one"));
    let mut node = node_of(&web);
    let mut service = node.start();
    let (before, _) = service.watch().await.replay().await;
    // A row for the answer and one for its pod.
    service.wait_for_rows(2);
    service.kill();

    for answer in [None, Some("kind: [")] {
        match answer {
            None => web.hangs_up(),
            Some(text) => web.has(text),
        }
        node.config.sources.http_check_ms = 3_600_000;
        let mut service = node.start();
        service.wait_for_log("its last good version goes on");
        let mut watch = service.watch().await;
        assert_eq!(watch.pod().await, before[0], "{answer:?}");
        let source = source(&service).await;
        assert_eq!((source.ready, source.pods), (false, 1), "{answer:?}");
        service.kill();
    }
    node.config.sources.http_check_ms = 100;
    web.hangs_up();
    let mut service = node.start();
    service.wait_for_log("its last good version goes on");
    let mut watch = service.watch().await;
    assert_eq!(watch.pod().await, before[0]);
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "manifest"));
    web.has(&pod("web", "one"));
    assert!(matches!(watch.next().await, Item::SourceReady(ready) if ready.source == "http"));
    assert!(matches!(watch.next().await, Item::Synced(_)), "and no pod went or came");

    service.kill();
    node.config.sources.static_pod_url = None;
    let mut service = node.start();
    assert!(service.watch().await.replay().await.0.is_empty(), "a URL that is not configured has no pods");
    service.wait_for_rows(2);
}

#[tokio::test]
async fn headers_are_sent_to_the_url_and_not_to_where_it_leads() {
    let (web, other) = (Web::start(), Web::start());
    let location = |to: &str| format!("302 Found\r\nlocation: {to}");
    web.say("/", &location("/near"), "");
    web.say("/near", &location(&format!("{}/far", other.url)), "");
    other.say("/far", &location(&format!("{}/back", web.url)), "");
    web.say("/back", "200 OK", &pod("web", "one"));
    let node = node_of(&web);
    let folder = node.config.paths.credentials(ServiceName::PodConfig);
    fs::create_dir_all(&folder).unwrap();
    let headers = [("Authorization", "Bearer hidden-word"), ("X-A", "1"), ("X-A", "2"), ("Host", "evil")];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
    fs::write(folder.join(UrlHeaders::COPY), UrlHeaders(headers.to_vec()).encode()).unwrap();
    let mut service = node.start();
    let (pods, _) = service.watch().await.replay().await;
    assert!(image(&pods[0]).contains("one"));
    for path in ["/", "/near"] {
        let asked = web.next();
        assert_eq!(asked.path, path);
        assert_eq!(asked.header("authorization"), ["Bearer hidden-word"]);
        assert_eq!(asked.header("x-a"), ["1", "2"]);
        assert!(asked.header("host")[0].starts_with("localhost:"), "{asked:?}");
    }
    for asked in [other.next(), web.next()] {
        assert!(asked.header("authorization").is_empty() && asked.header("x-a").is_empty(), "{asked:?}");
    }
    assert_eq!(service.count_log("hidden-word"), 0);
}

#[tokio::test]
async fn headers_that_are_handed_over_anew_are_sent_with_the_next_request() {
    let web = Web::start();
    web.has(&pod("web", "one"));
    let node = node_of(&web);
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
    assert_eq!(web.next().header("x-group"), ["one"]);
    hand("two");
    // The server is content with either, so no error brings it about.
    assert!((0..50).any(|_| web.next().header("x-group") == ["two"]));
}

#[tokio::test]
async fn the_machines_authorities_vouch_for_https() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let tls = ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .unwrap();
    let web = Web::with_tls(tls);
    web.has(&pod("web", "one"));
    let mut node = node_of(&web);
    let roots = node.path("roots.pem");
    node.environment.push(("SSL_CERT_FILE".into(), roots.clone()));
    let another = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(&roots, another.cert.pem()).unwrap();
    let mut service = node.start();
    service.wait_for_log("invalid peer certificate");
    assert!(!source(&service).await.ready);
    // What the machine trusts is read anew after an error.
    fs::write(&roots, own.cert.pem()).unwrap();
    assert_eq!(service.watch().await.replay().await.0.len(), 1);
}
