//! Access to the kubelet API of a cluster's node: the API server authenticates and authorizes clients, and is a client itself.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use keelson_config::{Paths, ServiceName};
use keelson_testkit::{AgentSpec, Scratch, eventually};
use keelson_tests::cluster::{Cluster, LIMIT, NAMESPACE, sleeper};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The agent delegates authentication and authorization to the API server, and listens on an address that it can reach.
fn asks_the_server(spec: &mut AgentSpec) {
    let fields = json!({
        "authentication": {"x509": {"clientCAFile": "../k/ca.crt"}, "webhook": {"enabled": true, "cacheTTL": "5m"}},
        "authorization": {"mode": "Webhook"},
        "address": "0.0.0.0",
    });
    spec.kubelet.extend(fields.as_object().unwrap().clone());
}

/// `GET` of a path of the node's own API over TLS, with or without a token: status and body.
async fn ask(cluster: &Cluster, token: Option<&str>, path: &str) -> anyhow::Result<(u16, String)> {
    let spec = cluster.agent.spec();
    let socket = Paths::socket_below(&spec.run_dir, ServiceName::NodeApi);
    let mut roots = RootCertStore::empty();
    for shown in CertificateDer::pem_file_iter(socket.with_file_name("serving.crt"))? {
        roots.add(shown?)?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, spec.port)).await?;
    let stream =
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("127.0.0.1")?, stream).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request = http::Request::get(path).header("host", "node");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let answer = sender.send_request(request.body(Empty::<Bytes>::new())?);
    let answer = tokio::time::timeout(Duration::from_secs(30), answer).await??;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await?.to_bytes();
    Ok((status, String::from_utf8(body.to_vec())?))
}

/// The token of a service account that may read node metrics.
fn scraper(cluster: &Cluster, scratch: &Scratch) -> String {
    let rbac = "rbac.authorization.k8s.io";
    let account = json!({"kind": "ServiceAccount", "name": "scraper", "namespace": NAMESPACE});
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "scraper", "namespace": NAMESPACE}},
        {
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": "scraper"},
            "rules": [{"apiGroups": [""], "resources": ["nodes/metrics"], "verbs": ["get"]}],
        },
        {
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "scraper"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "scraper"}, "subjects": [account],
        },
    ]});
    cluster.server.apply(&objects).unwrap();
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let file = scratch.path().join("token-request.json");
    std::fs::write(&file, request.to_string()).unwrap();
    let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/scraper/token");
    let made = cluster.kubectl(&["create", "--raw", &path, "-f", file.to_str().unwrap()]);
    let made: Value = serde_json::from_str(&made).unwrap();
    made["status"]["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn the_api_server_reaches_the_kubelet_api_and_authorizes_other_clients() {
    let scratch = Scratch::new().unwrap();
    let mut cluster = Cluster::start(&scratch, asks_the_server).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    cluster.until("its log is read", || cluster.kubectl(&["logs", "web"]).contains("hello from web")).await;
    assert_eq!(cluster.kubectl(&["exec", "web", "--", "echo", "inside"]).trim(), "inside");

    let token = scraper(&cluster, &scratch);
    let known = Some(token.as_str());
    let metrics = ask(&cluster, known, "/metrics").await.unwrap();
    assert!(metrics.0 == 200 && metrics.1.contains("keelson_service_up"), "{metrics:?}");
    let forbidden = |parts: &str| {
        let user = format!("system:serviceaccount:{NAMESPACE}:scraper");
        (403, format!("Forbidden (user={user}, verb=get, resource=nodes, subresource(s)=[{parts}])"))
    };
    let exec = format!("/exec/{NAMESPACE}/web/main?command=id");
    assert_eq!(ask(&cluster, known, "/logs/").await.unwrap(), forbidden("log"));
    assert_eq!(ask(&cluster, known, &exec).await.unwrap(), forbidden("proxy"));
    let nobody = (401, "Unauthorized".to_owned());
    for path in ["/metrics", "/healthz", "/nothing", &exec] {
        assert_eq!(ask(&cluster, None, path).await.unwrap(), nobody, "{path}");
        assert_eq!(ask(&cluster, Some("wrong"), path).await.unwrap(), nobody, "{path}");
    }

    // The API server is unavailable: cached decisions hold, and nothing hangs.
    cluster.server.kill();
    let begun = Instant::now();
    assert_eq!(ask(&cluster, known, "/metrics").await.unwrap().0, 200);
    let unsure = ask(&cluster, known, "/stats/summary").await.unwrap();
    let user = format!("system:serviceaccount:{NAMESPACE}:scraper");
    let text = format!("Authorization error (user={user}, verb=get, resource=nodes, subresource=stats)");
    assert_eq!(unsure, (500, text));
    assert_eq!(ask(&cluster, Some("other"), "/metrics").await.unwrap(), nobody);
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    cluster.server.restart().unwrap();
    eventually(LIMIT, "the server is asked again", async || {
        ask(&cluster, known, "/stats/summary").await.is_ok_and(|answer| answer == forbidden("stats"))
    })
    .await
    .unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.agent.log_tail()));
    cluster.agent.end().unwrap();
}

/// No client CA; the configuration file leaves the rest to its defaults.
fn knows_no_certificates(spec: &mut AgentSpec) {
    let fields = json!({"authentication": {"anonymous": {"enabled": true}}, "address": "0.0.0.0"});
    spec.kubelet.extend(fields.as_object().unwrap().clone());
}

#[tokio::test]
#[ignore = "an API server is built the first time, which takes minutes; cargo xtask test --long runs it"]
async fn without_a_client_ca_tokens_and_anonymous_requests_are_authorized() {
    let scratch = Scratch::new().unwrap();
    let cluster = Cluster::start(&scratch, knows_no_certificates).await;
    cluster.run(&sleeper("web"));
    cluster.until("the pod is Ready", || cluster.is_ready("web")).await;
    let token = scraper(&cluster, &scratch);
    let metrics = ask(&cluster, Some(&token), "/metrics").await.unwrap();
    assert!(metrics.0 == 200 && metrics.1.contains("keelson_service_up"), "{metrics:?}");
    assert_eq!(ask(&cluster, Some("wrong"), "/metrics").await.unwrap(), (401, "Unauthorized".to_owned()));
    // The API server's client certificate is not checked, so it is anonymous and works until anonymous access is forbidden.
    let text = "Forbidden (user=system:anonymous, verb=get, resource=nodes, subresource(s)=[proxy])";
    let logs = format!("/containerLogs/{NAMESPACE}/web/main");
    assert_eq!(ask(&cluster, None, &logs).await.unwrap(), (403, text.to_owned()));
    let rbac = "rbac.authorization.k8s.io";
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": "readers"},
            "rules": [{"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}],
        },
        {
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "readers"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "readers"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "system:anonymous"}],
        },
    ]});
    cluster.server.apply(&objects).unwrap();
    let is_read = || {
        let output = cluster.server.kubectl(&["-n", NAMESPACE, "logs", "web"]).unwrap();
        String::from_utf8_lossy(&output.stdout).contains("hello from web")
    };
    // A denial is cached for half a minute.
    cluster.until("its log is read", is_read).await;
    cluster.agent.end().unwrap();
}
