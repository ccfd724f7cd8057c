use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, pem::PemObject as _};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::json;

use super::*;
use crate::fake::{Answer, FakeApi};

fn encoded(pem: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(pem)
}

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn signed(&self, usage: ExtendedKeyUsagePurpose) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![usage];
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// A server that authenticates clients by certificates of this CA.
    fn server(&self) -> ServerConfig {
        let (certificate, key) = self.signed(ExtendedKeyUsagePurpose::ServerAuth);
        let mut roots = RootCertStore::empty();
        let ca = rustls::pki_types::CertificateDer::from_pem_slice(self.pem().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let chain = rustls::pki_types::CertificateDer::pem_slice_iter(certificate.as_bytes());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(clients.build().unwrap())
            .with_single_cert(
                chain.collect::<Result<_, _>>().unwrap(),
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config
    }
}

#[tokio::test]
async fn http2_client_uses_the_kubeconfig_certificate_and_reconnects_on_change() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let node = json!({"metadata": {"name": "n"}});
    let server = FakeApi::with_tls(authority.server(), move |_| Answer::json(&node)).await;
    let cluster = json!({"certificate-authority-data": encoded(&authority.pem())});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");

    let missing = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(missing.starts_with("invalid kubeconfig: ") && missing.contains("No such file"), "{missing}");

    let (stranger, key) = Authority::new().signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&stranger), "client-key-data": encoded(&key)});
    server.kubeconfig(folder.path(), &cluster, &user);
    let refused = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(refused.contains("does not answer nodes n"), "{refused}");

    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    server.kubeconfig(folder.path(), &cluster, &user);
    let found = api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert_eq!(found.name(), "n");
    assert_eq!(server.asked().last().unwrap().version, http::Version::HTTP_2);

    api.give_up_connection();
    assert_eq!(api.server(), server.url, "the address is still known");
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    // An invalid file changes nothing.
    std::fs::write(folder.path().join("kubeconfig"), "clusters: [").unwrap();
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
}

#[tokio::test]
async fn calls_are_answered_while_watches_use_every_stream_of_their_connection() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server = FakeApi::with_few_streams(authority.server(), 2, |asked| {
        let is_watch = asked.path.contains("watch=1");
        if is_watch { Answer::Open(Vec::new()) } else { Answer::json(&json!({"metadata": {"name": "n"}})) }
    })
    .await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let cluster = json!({"certificate-authority-data": encoded(&authority.pem())});
    let api = KubeApi::new(server.kubeconfig(folder.path(), &cluster, &user), "kubelet/test");
    let range = Range::all(Resource::NODE);
    let (_first, _) = api.watch(&range, "1").await.unwrap();
    let (_second, _) = api.watch(&range, "1").await.unwrap();
    let waits = tokio::spawn({
        let (api, range) = (api.clone(), range.clone());
        async move { api.watch(&range, "1").await.map(|_| ()) }
    });
    for _ in 0..10 {
        tokio::time::timeout(Duration::from_secs(20), api.get(Resource::NODE, None, "n"))
            .await
            .expect("a call waits for no watch")
            .unwrap();
    }
    assert!(!waits.is_finished());
    waits.abort();
}

#[tokio::test]
async fn server_certificate_of_another_ca_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::with_tls(Authority::new().server(), |_| Answer::Nothing).await;
    let cluster = json!({"certificate-authority-data": encoded(&Authority::new().pem())});
    let api = KubeApi::new(server.kubeconfig(folder.path(), &cluster, &json!({})), "kubelet/test");
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
}

#[tokio::test]
async fn writes_use_the_right_method_path_and_body() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.method.as_str() {
        "DELETE" => Answer::refusal(404, "NotFound", "gone"),
        "PUT" => Answer::refusal(409, "Conflict", "newer"),
        _ => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let api =
        KubeApi::new(server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"})), "kubelet/test");
    let object = json!({"metadata": {"name": "x"}});
    api.create(Resource::POD, Some("d"), &object).await.unwrap();
    assert!(api.replace(Resource::LEASE, Some("l"), &object).await.unwrap_err().is_conflict());
    api.patch(Resource::NODE, None, "x", Some("status"), (Patch::Strategic, &object)).await.unwrap();
    api.patch(Resource::NODE, None, "x", None, (Patch::Merge, &object)).await.unwrap();
    assert!(!api.delete(Resource::POD, Some("d"), "x", &json!({})).await.unwrap());
    let asked: Vec<String> = server
        .asked()
        .into_iter()
        .map(|asked| format!("{} {} {} {}", asked.method, asked.path, asked.content_type, asked.body))
        .collect();
    let body = object.to_string();
    assert_eq!(
        asked,
        [
            format!("POST /api/v1/namespaces/d/pods application/json {body}"),
            format!("PUT /apis/coordination.k8s.io/v1/namespaces/l/leases/x application/json {body}"),
            format!("PATCH /api/v1/nodes/x/status application/strategic-merge-patch+json {body}"),
            format!("PATCH /api/v1/nodes/x application/merge-patch+json {body}"),
            "DELETE /api/v1/namespaces/d/pods/x application/json {}".to_owned(),
        ]
    );
}

/// A proxy that requires a user name and a password, and the requests that it got.
async fn proxy() -> (String, Arc<Mutex<Vec<String>>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let kept = Arc::clone(&kept);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(client.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                kept.lock().unwrap().push(head.lines().next().unwrap().to_owned());
                if !head.to_lowercase().contains("proxy-authorization: basic amfuztpw") {
                    client.write_all(b"HTTP/1.1 407 Who?\r\n\r\n").await.unwrap();
                    return;
                }
                let target = head.split(' ').nth(1).unwrap().to_owned();
                let mut server = tokio::net::TcpStream::connect(target).await.unwrap();
                client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                // It ends when either side closes.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn kubeconfig_http_proxy_gets_a_connect_request() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let (address, asked) = proxy().await;
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});

    server.kubeconfig(folder.path(), &cluster(format!("http://{address}")), &user);
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("proxy"), "{error}");

    server.kubeconfig(folder.path(), &cluster(format!("http://jane:p@{address}")), &user);
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert_eq!(server.asked().last().unwrap().version, http::Version::HTTP_2);
    let line = format!("CONNECT {} HTTP/1.1", server.url.strip_prefix("https://").unwrap());
    let asked = asked.lock().unwrap().clone();
    assert!(asked.len() >= 2 && asked.iter().all(|first| *first == line), "{asked:?}");
}

/// A SOCKS proxy that requires the user `jane` with the password `p`, and the targets requested from it.
async fn socks_proxy() -> (String, Arc<Mutex<Vec<String>>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
    async fn bytes(client: &mut tokio::net::TcpStream, count: usize) -> Vec<u8> {
        let mut read = vec![0; count];
        client.read_exact(&mut read).await.unwrap();
        read
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let kept = Arc::clone(&kept);
            tokio::spawn(async move {
                // RFC 1928 and 1929.
                let methods = bytes(&mut client, 2).await[1];
                let methods = bytes(&mut client, methods.into()).await;
                if !methods.contains(&2) {
                    client.write_all(&[5, 0xff]).await.unwrap();
                    return;
                }
                client.write_all(&[5, 2]).await.unwrap();
                let name = bytes(&mut client, 2).await[1];
                let name = bytes(&mut client, name.into()).await;
                let password = client.read_u8().await.unwrap();
                let password = bytes(&mut client, password.into()).await;
                let is_known = (&*name, &*password) == (b"jane", b"p");
                client.write_all(&[1, u8::from(!is_known)]).await.unwrap();
                if !is_known {
                    return;
                }
                let host = match bytes(&mut client, 4).await[3] {
                    1 => std::net::Ipv4Addr::from(<[u8; 4]>::try_from(bytes(&mut client, 4).await).unwrap())
                        .to_string(),
                    _ => {
                        let length = client.read_u8().await.unwrap();
                        String::from_utf8(bytes(&mut client, length.into()).await).unwrap()
                    }
                };
                let port = client.read_u16().await.unwrap();
                kept.lock().unwrap().push(format!("{host}:{port}"));
                let mut server = tokio::net::TcpStream::connect((host, port)).await.unwrap();
                client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn socks_proxy_connects_and_resolves_names_itself() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (address, asked) = socks_proxy().await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});
    for refused in ["", "jane:q@"] {
        server.kubeconfig(folder.path(), &cluster(format!("socks5://{refused}{address}")), &user);
        let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
        assert!(error.contains("proxy"), "{error}");
    }
    for scheme in ["socks5", "socks5h"] {
        server.kubeconfig(folder.path(), &cluster(format!("{scheme}://jane:p@{address}")), &user);
        api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    }
    let target = server.url.strip_prefix("https://").unwrap();
    let asked = asked.lock().unwrap().clone();
    assert!(asked.len() >= 2 && asked.iter().all(|one| one == target), "{asked:?}");
}

/// Terminates TLS and forwards to a plain HTTP proxy.
async fn within_tls(mut config: ServerConfig, to: String) -> String {
    use tokio::io::copy_bidirectional;
    config.alpn_protocols.clear();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, to) = (acceptor.clone(), to.clone());
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let mut proxy = tokio::net::TcpStream::connect(to).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut proxy).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn https_proxy_needs_a_trusted_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (plain, asked) = proxy().await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});

    let address = within_tls(stranger.server(), plain.clone()).await;
    server.kubeconfig(folder.path(), &cluster(format!("https://jane:p@{address}")), &user);
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("the proxy") && error.contains("certificate"), "{error}");
    assert_eq!(asked.lock().unwrap().len(), 0);

    let address = within_tls(authority.server(), plain).await;
    server.kubeconfig(folder.path(), &cluster(format!("https://jane:p@{address}")), &user);
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert!(!asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn proxy_answers_are_not_server_answers_and_retry_after_always_counts() {
    const SORRY: &str = "<html>\n<h1>no such page</h1></html>";
    const BUSY: &str = "Too many requests, please try again later.";
    let status = |code, reason, seconds: u32| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "reason": reason, "message": "m", "details": {"retryAfterSeconds": seconds}});
        Answer::Whole(code, status.to_string())
    };
    type Case = (&'static str, u16, &'static str, u32, &'static str);
    let cases: [Case; 9] = [
        // Path, code (0: none), reason, seconds, a part of the text.
        ("status-404", 404, "NotFound", 0, "refuses"),
        ("unserved", 404, "", 0, "refuses"),
        ("page-404", 0, "", 0, "404 Not Found is no word of a Kubernetes API server"),
        ("page-503", 0, "", 7, "something answers in its place: \"<html> <h1>no such page</h1></html>\""),
        ("elsewhere", 0, "", 0, "302 Found"),
        ("busy", 429, "TooManyRequests", 3, BUSY),
        ("page-403", 403, "Forbidden", 0, "no such page"),
        ("status-503", 503, "ServiceUnavailable", 9, "refuses"),
        ("json-404", 0, "", 0, "404 Not Found"),
    ];
    let server = FakeApi::start(move |asked| match asked.path.rsplit('/').next().unwrap() {
        "status-404" => status(404, "NotFound", 0),
        "unserved" => status(404, "", 0),
        "page-404" => Answer::Page(404, SORRY, ""),
        "page-503" => Answer::Page(503, SORRY, "7"),
        "elsewhere" => Answer::Page(302, "", "Wed, 21 Oct 2026 07:28:00 GMT"),
        "busy" => Answer::Page(429, BUSY, " 3"),
        "page-403" => Answer::Page(403, SORRY, ""),
        "status-503" => status(503, "ServiceUnavailable", 9),
        "json-404" => Answer::Page(404, "{\"error\": \"no such route\"}", ""),
        other => unreachable!("{other}"),
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let api = KubeApi::new(server.kubeconfig(folder.path(), &json!({}), &json!({})), "kubelet/test");
    for (name, code, reason, seconds, part) in cases {
        let found = api.get(Resource::NODE, None, name).await;
        if name == "status-404" {
            assert!(found.unwrap().is_none());
            assert!(!api.delete(Resource::NODE, None, name, &json!({})).await.unwrap());
            continue;
        }
        let error = found.unwrap_err();
        assert_eq!((error.code().unwrap_or(0), error.retry_after()), (code, seconds), "{error}");
        assert!(!error.is_not_found() && error.to_string().contains(part), "{name}: {error}");
        if let KubeError::Refused { reason: actual, .. } = &error {
            assert_eq!(actual, reason, "{error}");
        }
        assert_eq!(error.is_retryable(), code == 0 || code == 429 || code >= 500, "{error}");
        api.delete(Resource::NODE, None, name, &json!({})).await.unwrap_err();
    }
}

#[tokio::test]
async fn rate_limit_applies_to_calls_and_watches_except_of_an_unlimited_copy() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.path.contains("watch=1") {
        true => Answer::Open(Vec::new()),
        false => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let host = server.url.strip_prefix("http://").unwrap().to_owned();
    let metrics = keelson_service_kit::Metrics::new();
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({}));
    let free = KubeApi::counted(kubeconfig, "kubelet/test", RestMetrics::registered(&metrics));
    let api = free.clone().limited(Limiter::new(10, 1));
    let begun = Instant::now();
    api.get(Resource::NODE, None, "x").await.unwrap();
    let _watch = api.watch(&Range::all(Resource::NODE), "1").await.unwrap();
    api.get(Resource::NODE, None, "x").await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
    for _ in 0..5 {
        free.get(Resource::NODE, None, "x").await.unwrap();
    }
    let text = metrics.text();
    let line = format!("rest_client_rate_limiter_duration_seconds_count{{verb=\"GET\",host=\"{host}\"}} 3\n");
    assert!(text.contains(&line), "{text}");
}

#[tokio::test]
async fn rest_client_requests_are_counted_by_code_method_and_host() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match (asked.method.as_str(), asked.path.contains("watch=1")) {
        ("PUT", _) => Answer::refusal(409, "Conflict", "newer"),
        ("DELETE", _) => Answer::Nothing,
        (_, true) => Answer::Open(Vec::new()),
        _ => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let host = server.url.strip_prefix("http://").unwrap().to_owned();
    let metrics = keelson_service_kit::Metrics::new();
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({}));
    let api = KubeApi::counted(kubeconfig, "kubelet/test", RestMetrics::registered(&metrics));
    let object = json!({"metadata": {"name": "x"}});
    api.get(Resource::NODE, None, "x").await.unwrap();
    api.get(Resource::NODE, None, "x").await.unwrap();
    api.replace(Resource::NODE, None, &object).await.unwrap_err();
    let hangs = api.delete(Resource::NODE, None, "x", &object);
    tokio::time::timeout(Duration::from_millis(200), hangs).await.unwrap_err();
    let range = Range { resource: Resource::NODE, namespace: None, fields: None };
    let _watch = api.watch(&range, "1").await.unwrap();
    drop(server);
    api.give_up_connection();
    api.create(Resource::NODE, None, &object).await.unwrap_err();

    let text = metrics.text();
    for (code, method, count) in
        [("200", "GET", 3), ("409", "PUT", 1), ("<error>", "DELETE", 1), ("<error>", "POST", 1)]
    {
        let line = format!(
            "rest_client_requests_total{{code=\"{code}\",method=\"{method}\",host=\"{host}\"}} {count}\n"
        );
        assert!(text.contains(&line), "{line}{text}");
    }
    for (family, verb, count) in [
        ("rest_client_request_duration_seconds", "GET", 2),
        ("rest_client_request_size_bytes", "PUT", 1),
        ("rest_client_response_size_bytes", "GET", 2),
    ] {
        let line = format!("{family}_count{{verb=\"{verb}\",host=\"{host}\"}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    let none = "rest_client_response_size_bytes_count{verb=\"PUT\"";
    assert!(!text.contains(none), "a refusal has no size: {text}");
}

#[tokio::test(start_paused = true)]
async fn hanging_server_times_out() {
    let call = std::future::pending::<Result<(), kube::Error>>();
    let error = within("https://a", "pods", call).await.unwrap_err().to_string();
    assert_eq!(error, "the API server https://a does not answer pods: not within 30 s");
}

#[tokio::test]
async fn missing_kubeconfig_is_awaited_and_a_removed_one_is_no_longer_used() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let path = folder.path().join("kubeconfig");
    let api = KubeApi::awaiting(path.clone(), "kubelet/test", RestMetrics::default(), "init writes it");
    let ask = || api.get(Resource::NODE, None, "n");
    for _ in 0..2 {
        let error = ask().await.unwrap_err();
        assert!(error.is_awaited(), "{error}");
        assert_eq!(error.to_string(), "the API server cannot be called yet: init writes it");
        server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"}));
        ask().await.unwrap().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

#[tokio::test]
async fn only_a_refused_exec_credential_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.path.contains("watch") {
        true => Answer::refusal(401, "Unauthorized", "Unauthorized"),
        false => Answer::refusal(403, "Forbidden", "no"),
    })
    .await;
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"}));
    let report = folder.path().join("refused-credential");
    let asked = async |path: &Path| {
        let api = KubeApi::new(path.to_owned(), "kubelet/test").reporting_refusals(report.clone());
        api.get(Resource::NODE, None, "n").await.unwrap_err();
        assert!(!report.exists(), "the server knows this node, and forbids something else");
        let range = Range::of_fields(Resource::NODE, "metadata.name=n".to_owned());
        assert!(api.watch(&range, "1").await.is_err());
    };
    asked(&kubeconfig).await;
    assert!(!report.exists(), "the token is from the kubeconfig itself");
    // As init writes it.
    let mut file: Value = serde_json::from_slice(&fs::read(&kubeconfig).unwrap()).unwrap();
    file["keelsonCredential"] = "17".into();
    fs::write(&kubeconfig, file.to_string()).unwrap();
    asked(&kubeconfig).await;
    assert_eq!(fs::read_to_string(&report).unwrap(), "17");
}
