//! The handlers of probes and lifecycle hooks, against small servers on loopback.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::sync::Arc;

use keelson_config::{Config, ServiceName};
use keelson_kube_model::Pod;
use keelson_pod_sync::effects::Effects;
use keelson_pod_sync::effects::hooks::{self, Subject};
use keelson_pod_sync::effects::probe_handlers::{Call, Outcome, run};
use keelson_pod_sync_core::probe::{ProbeKind, ProbeTimes};
use keelson_service_kit::Context;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

fn effects() -> Arc<Effects> {
    let mut config = Config::default();
    // Nothing listens there.
    config.paths.run_dir = "/nonexistent/keelson".into();
    Effects::new(Context::detached(ServiceName::PodSync, config), None)
}

fn pod(fields: &Value) -> Arc<Pod> {
    let mut container = json!({"name": "main", "image": "i:1"});
    container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let meta = json!({"name": "web", "namespace": "default", "uid": "u"});
    Arc::new(serde_json::from_value(json!({"metadata": meta, "spec": {"containers": [container]}})).unwrap())
}

/// The outcome of a readiness probe of a pod at this address with a port named `web`.
async fn outcome_at(address: &str, port: u16, probe: Value) -> Outcome {
    let pod = pod(&json!({"readinessProbe": probe, "ports": [{"name": "web", "containerPort": port}]}));
    let times = ProbeTimes::of(pod.spec.containers[0].readiness_probe.as_deref().unwrap());
    let call = Call {
        early: false,
        pod,
        container: "main".into(),
        kind: ProbeKind::Readiness,
        id: "c1".into(),
        times,
        address: address.into(),
    };
    run(&effects(), &call, &|_| ()).await
}

async fn outcome(port: u16, probe: Value) -> Outcome {
    outcome_at("127.0.0.1", port, probe).await
}

async fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A server that answers every request with this status line and headers; its task ends with the test's runtime.
async fn http(head: &'static str) -> u16 {
    let (listener, port) = listen().await;
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).await;
            let _ =
                stream.write_all(format!("HTTP/1.1 {head}\r\nContent-Length: 2\r\n\r\nhi").as_bytes()).await;
        }
    });
    port
}

#[tokio::test]
async fn http_probes_succeed_with_200_to_399_and_resolve_named_ports() {
    let get = || json!({"httpGet": {"path": "/", "port": "web"}});
    assert_eq!(outcome(http("204 No Content").await, get()).await, Outcome::Success);
    let port = http("200 OK").await;
    for named in [json!(port), json!(port.to_string())] {
        assert_eq!(outcome(1, json!({"httpGet": {"port": named}})).await, Outcome::Success);
    }
    let own_host = json!({"httpGet": {"port": port, "host": "localhost"}});
    assert_eq!(outcome_at("", 1, own_host).await, Outcome::Success);
    let failed = outcome(http("404 Not Found").await, get()).await;
    assert_eq!(failed, Outcome::Failure("HTTP probe failed with statuscode: 404".into()));
    let https = outcome(http("200 OK").await, json!({"httpGet": {"port": "web", "scheme": "HTTPS"}})).await;
    assert!(
        matches!(&https, Outcome::Failure(text) if text.ends_with("speaks HTTP without TLS")),
        "{https:?}"
    );
    let redirected = outcome(http("302 Found\r\nLocation: http://elsewhere.example/").await, get()).await;
    assert_eq!(redirected, Outcome::Warning("Probe terminated redirects, Response body: hi".into()));
}

#[tokio::test]
async fn an_invalid_probe_is_an_error_that_names_the_cause() {
    let error = |outcome: Outcome| match outcome {
        Outcome::Error(text) => text,
        other => panic!("{other:?}"),
    };
    let unnamed = error(outcome(1, json!({"httpGet": {"port": "none"}})).await);
    assert!(unnamed.contains("has no port \"none\""), "{unnamed}");
    for probe in [json!({"tcpSocket": {"port": 1}}), json!({"grpc": {"port": 1}})] {
        assert_eq!(error(outcome_at("", 1, probe).await), "the pod has no address yet");
    }
    let unavailable = outcome(1, json!({"exec": {"command": ["true"]}})).await;
    assert!(matches!(unavailable, Outcome::Unavailable(_)), "{unavailable:?}");
}

#[tokio::test]
async fn tcp_probes_need_a_connection() {
    let (listener, port) = listen().await;
    let probe = || json!({"tcpSocket": {"port": "web"}});
    assert_eq!(outcome(port, probe()).await, Outcome::Success);
    drop(listener);
    let refused = outcome(port, probe()).await;
    assert!(matches!(&refused, Outcome::Failure(text) if text.contains("refused")), "{refused:?}");
}

#[tokio::test]
async fn grpc_probes_distinguish_serving_not_serving_and_no_health_service() {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("up", tonic_health::ServingStatus::Serving).await;
    reporter.set_service_status("down", tonic_health::ServingStatus::NotServing).await;
    let (listener, port) = listen().await;
    let server = Server::builder().add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let (listener, bare) = listen().await;
    let server = Server::builder().add_routes(tonic::service::Routes::default());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let ask = async |port: u16, service: &str| {
        let probe = json!({"grpc": {"port": port, "service": service}, "timeoutSeconds": 5});
        match outcome(1, probe).await {
            Outcome::Failure(text) => text,
            other => format!("{other:?}"),
        }
    };
    assert_eq!(ask(port, "up").await, "Success");
    assert_eq!(ask(port, "down").await, "service unhealthy (responded with \"NOT_SERVING\")");
    assert!(ask(port, "unknown").await.starts_with("error: health rpc probe failed: "));
    let none = ask(bare, "").await;
    assert!(none.starts_with("error: this server does not implement the grpc health protocol"), "{none}");
    let (listener, closed) = listen().await;
    drop(listener);
    let refused = ask(closed, "").await;
    assert!(
        refused.starts_with("error: failed to connect service") && refused.contains("refused"),
        "{refused}"
    );
    // It accepts and never answers.
    let (_listener, silent) = listen().await;
    let probe = json!({"grpc": {"port": silent}, "timeoutSeconds": 1});
    let silence = outcome(1, probe).await;
    assert!(matches!(&silence, Outcome::Failure(text) if text.starts_with("timeout: ")), "{silence:?}");
}

#[tokio::test]
async fn a_broken_grpc_probe_connection_gives_the_same_message_each_time() {
    // At once, after the first bytes, and with bytes that are not HTTP/2.
    for kind in 0..3 {
        let (listener, port) = listen().await;
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut seen = [0; 8];
                if kind > 0 {
                    let _ = client.read(&mut seen).await;
                }
                if kind == 2 {
                    let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
                }
            }
        });
        for _ in 0..20 {
            let probe = json!({"grpc": {"port": port}, "timeoutSeconds": 5});
            let outcome = outcome(1, probe).await;
            let text = "error: health rpc probe failed: the connection broke before the answer";
            assert!(matches!(&outcome, Outcome::Failure(message) if message == text), "{kind}: {outcome:?}");
        }
    }
}

#[tokio::test]
async fn http_hooks_accept_any_status_and_unsupported_kinds_are_errors() {
    let pod = pod(&json!({}));
    let subject = Subject { pod: &pod, container: &pod.spec.containers[0], id: "c1" };
    let bound = std::time::Duration::from_secs(20);
    let run = async |hook: Value| {
        let hook = serde_json::from_value(hook).unwrap();
        hooks::run(&effects(), &subject, &hook, bound).await
    };
    let port = http("500 Internal Server Error").await;
    run(json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/bye"}})).await.unwrap();
    let (listener, closed) = listen().await;
    drop(listener);
    let text = run(json!({"httpGet": {"host": "127.0.0.1", "port": closed}})).await.unwrap_err();
    assert!(text.contains("refused"), "{text}");
    let text = run(json!({"httpGet": {"port": closed}})).await.unwrap_err();
    assert_eq!(text, "the pod has no address yet");
    assert!(run(json!({"tcpSocket": {"port": 1}})).await.unwrap_err().starts_with("tcpSocket"));
}

#[tokio::test]
async fn https_hooks_fall_back_to_http_without_sending_credentials() {
    let (listener, port) = listen().await;
    let (heard, mut requests) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).await.unwrap();
            heard.send(String::from_utf8_lossy(&buffer[..read]).into_owned()).unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
        }
    });
    let effects = effects();
    let pod = pod(&json!({}));
    let subject = Subject { pod: &pod, container: &pod.spec.containers[0], id: "c1" };
    let headers = json!([{"name": "authorization", "value": "Bearer x"}, {"name": "X-Other", "value": "y"}]);
    let hook = json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/bye", "scheme": "HTTPS",
        "httpHeaders": headers}});
    let hook = serde_json::from_value(hook).unwrap();
    hooks::run(&effects, &subject, &hook, std::time::Duration::from_secs(20)).await.unwrap();
    assert!(!requests.recv().await.unwrap().contains("Bearer"), "encrypted, or not there at all");
    let second = requests.recv().await.unwrap();
    assert!(second.starts_with("GET /bye HTTP/1.1\r\n") && second.contains("X-Other: y"), "{second}");
    assert!(!second.to_lowercase().contains("authorization"), "{second}");
    let metrics = effects.context.metrics.text();
    assert!(metrics.contains("kubelet_lifecycle_handler_http_fallbacks_total 1"), "{metrics}");
}
