//! Logs of the node and the log verbosity over the kubelet API, through the whole agent.

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use keelson_config::{Paths, ServiceName};
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, Scratch, eventually, lines_with_event};
use keelson_tests::{LIMIT, restarts};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// An agent with TLS, and the credentials of a client.
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
        fs::write(&authorities, clients.pem()).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "operator");
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &clients).unwrap().der().clone();
        let agent = Agent::builder(&scratch.path().join("n"))
            .fields(&json!({
                "authentication": {"x509": {"clientCAFile": authorities}},
                "authorization": {"mode": "AlwaysAllow"},
                "enableSystemLogQuery": true,
            }))
            .start()
            .await
            .unwrap();
        let operator = (certificate, PrivateKeyDer::try_from(key.serialize_der()).unwrap());
        Self { agent, operator, _scratch: scratch }
    }

    /// Sends a request with the operator's certificate: the status and text of the response.
    async fn request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
        let spec = self.agent.spec();
        let serving = Paths::socket_below(&spec.run_dir, ServiceName::NodeApi).with_file_name("serving.crt");
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(serving)? {
            roots.add(certificate?)?;
        }
        let (certificate, key) = (self.operator.0.clone(), self.operator.1.clone_key());
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, spec.port)).await?;
        let name = ServerName::try_from("127.0.0.1")?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = http::Request::builder().method(method).uri(path).header("host", "node");
        let request = request.body(Full::new(Bytes::from(body.to_owned())))?;
        let (head, body) = tokio::time::timeout(LIMIT, sender.send_request(request)).await??.into_parts();
        let text = tokio::time::timeout(LIMIT, body.collect()).await??.to_bytes();
        Ok((head.status.as_u16(), String::from_utf8(text.to_vec())?))
    }

    async fn get(&self, path: &str) -> (u16, String) {
        self.request("GET", path, "").await.unwrap_or_else(|e| panic!("{e:#}\n{}", self.agent.log_tail()))
    }
}

/// A folder below /var/log, removed with everything in it.
struct LogFolder(PathBuf);

impl LogFolder {
    fn new() -> Self {
        let path = PathBuf::from(format!("/var/log/keelson-test-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn name(&self) -> &str {
        self.0.file_name().unwrap().to_str().unwrap()
    }
}

impl Drop for LogFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn node_logs_are_served_and_links_out_of_var_log_are_not_followed() {
    let node = TestNode::new().await;
    let folder = LogFolder::new();
    fs::write(folder.0.join("a.log"), "one\n").unwrap();
    symlink("/etc/passwd", folder.0.join("absolute")).unwrap();
    symlink("../../../etc/passwd", folder.0.join("relative")).unwrap();
    symlink(folder.0.join("a.log"), folder.0.join("inside")).unwrap();
    let name = folder.name();
    let file = format!("/logs/{name}/a.log");
    assert_eq!(node.get(&file).await, (200, "one\n".to_owned()));
    assert_eq!(node.get(&format!("/logs/{name}/inside")).await, (200, "one\n".to_owned()));
    let (status, page) = node.get(&format!("/logs/{name}/")).await;
    assert!(status == 200 && page.contains("<a href=\"a.log\">a.log</a>"), "{status} {page}");
    for link in ["absolute", "relative"] {
        let answer = node.get(&format!("/logs/{name}/{link}")).await;
        assert_eq!(answer, (403, "403 Forbidden\n".to_owned()), "{link}");
    }
    assert_eq!(node.get(&format!("/logs/{name}/%2e%2e/%2e%2e/etc/passwd")).await.0, 400);
    let unknown = node.get("/logs/?query=no-such-service-anywhere").await;
    assert_eq!(unknown, (200, "\nlog not found for no-such-service-anywhere\n".to_owned()));
    assert_eq!(node.get("/logs/?query=a%3Breboot").await.0, 406);

    // A reader that is killed is started again, and serves the same.
    assert!(node.agent.service(ServiceName::RuntimeShim).unwrap().signal(Signal::KILL));
    let again = eventually(LIMIT, "the file is served again", async || {
        node.request("GET", &file, "").await.is_ok_and(|answer| answer == (200, "one\n".to_owned()))
    });
    again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", node.agent.log_tail()));
    node.agent.end().unwrap();
}

#[tokio::test]
async fn log_verbosity_is_set_in_every_service_and_reset_by_a_restart() {
    let node = TestNode::new().await;
    let put = |text: &'static str| node.request("PUT", "/debug/flags/v", text);
    let all_set = eventually(LIMIT, "every service takes the verbosity", async || {
        put("4").await.is_ok_and(|(status, _)| status == 200)
    });
    all_set.await.unwrap_or_else(|e| panic!("{e:#}\n{}", node.agent.log_tail()));
    let log = node.agent.log();
    let changed = lines_with_event(&log, "log_verbosity_set");
    assert!(changed.len() >= 7 && changed.iter().all(|line| line.contains("verbosity=4")), "{changed:#?}");
    assert_eq!(put("loud").await.unwrap().0, 400);
    assert!(node.agent.service(ServiceName::RuntimeShim).unwrap().signal(Signal::KILL));
    let again = eventually(LIMIT, "runtime-shim is started again and answers", async || {
        let restarted = restarts(&node.agent).await.is_ok_and(|all| all.contains_key("runtime-shim"));
        restarted && put("0").await.is_ok_and(|(status, _)| status == 200)
    });
    again.await.unwrap_or_else(|e| panic!("{e:#}\n{}", node.agent.log_tail()));
    let log = node.agent.log();
    let changes = lines_with_event(&log, "log_verbosity_set");
    // A line has the pid of its process after its date and time.
    let pid = node.agent.service_pid(ServiceName::RuntimeShim).unwrap().to_string();
    let first = changes.iter().find(|line| line.split_whitespace().nth(2) == Some(pid.as_str()));
    let had_configured_level = first.is_some_and(|line| line.contains("previous=\"info\""));
    assert!(had_configured_level, "the restarted runtime-shim ({pid}): {changes:#?}");
    node.agent.end().unwrap();
}
