//! Liveness, readiness and startup probes of real containers (pod-lifecycle.md §13).

#![allow(clippy::unwrap_used)] // A panic fails the test.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use keelson_config::ServiceName;
use keelson_testkit::process::Signal;
use keelson_testkit::{Agent, BUSYBOX_IMAGE, Scratch, eventually};
use keelson_tests::waits::until_one_ready;
use keelson_tests::{LIMIT, is_ready, pods, running, until_cause, until_event, until_no_cause, until_ready};
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Runs until SIGTERM.
const RUNS: &str = "trap 'exit 0' TERM; while true; do sleep 1; done";

fn sh(script: &str) -> Value {
    json!(["/bin/sh", "-c", script])
}

/// A probe each second.
fn probe(mut handler: Value, failures: u32) -> Value {
    handler["periodSeconds"] = 1.into();
    handler["timeoutSeconds"] = 5.into();
    handler["failureThreshold"] = failures.into();
    handler
}

fn exec(script: &str, failures: u32) -> Value {
    probe(json!({"exec": {"command": sh(script)}}), failures)
}

/// A pod with one container, `main`, with these fields, whose `/data` is `<dir>/<name>`.
fn write_pod(agent: &Agent, dir: &Path, name: &str, script: &str, fields: &Value) {
    let data = dir.join(name);
    std::fs::create_dir_all(&data).unwrap();
    let mut container = json!({
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": sh(script),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    });
    container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "containers": [container],
            "volumes": [{"name": "data", "hostPath": {"path": data, "type": "Directory"}}],
        },
    });
    // JSON is valid YAML.
    agent.write_manifest(&format!("{name}.yaml"), &pod.to_string()).unwrap();
}

async fn until_unready(agent: &Agent, name: &str) {
    let full = format!("{name}-{}", agent.spec().node_name);
    let unready = eventually(LIMIT, format!("{name} is not Ready"), async || {
        pods(agent).await.is_ok_and(|p| p.get(&full).is_some_and(|pod| !is_ready(pod)))
    });
    unready.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
}

async fn restart_count(agent: &Agent, name: &str) -> u64 {
    let full = format!("{name}-{}", agent.spec().node_name);
    let pods = pods(agent).await.unwrap_or_default();
    pods.get(&full).and_then(|p| p["status"]["containerStatuses"][0]["restartCount"].as_u64()).unwrap_or(0)
}

#[tokio::test]
async fn http_and_exec_readiness_probes_make_a_pod_ready_and_unready() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let http = json!({
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": probe(json!({"httpGet": {"path": "/ready", "port": "http"}}), 1),
    });
    write_pod(&agent, scratch.path(), "web", "exec httpd -f -p 8080 -h /data", &http);
    let command = json!({"readinessProbe": exec("[ -e /data/ready ] || { echo not yet; exit 1; }", 1)});
    write_pod(&agent, scratch.path(), "cmd", RUNS, &command);
    until_cause(&agent, "web", "container", "you", "HTTP probe failed with statuscode: 404").await.unwrap();
    until_cause(&agent, "cmd", "container", "you", "its readiness probe fails: not yet").await.unwrap();
    until_event(&agent, "Unhealthy", "Readiness probe failed: not yet").await.unwrap();
    let before = running(&agent).await.unwrap();
    for name in ["web", "cmd"] {
        let file = scratch.path().join(name).join("ready");
        until_unready(&agent, name).await;
        std::fs::write(&file, "").unwrap();
        until_one_ready(&agent, name).await;
        until_no_cause(&agent, name).await.unwrap();
        std::fs::remove_file(&file).unwrap();
        until_unready(&agent, name).await;
    }
    assert_eq!(running(&agent).await.unwrap(), before, "readiness restarts nothing");
    agent.end().unwrap();
}

/// Answers `/ready` and other paths over TLS, with an untrusted certificate; its task ends with the
/// test's runtime.
async fn serve_https(ready: Arc<AtomicU16>, others: Arc<AtomicU16>) -> u16 {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["elsewhere.example".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    let config =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
            .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // A client that gives up meanwhile tries again.
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut buffer = [0; 4096];
            let Ok(read) = stream.read(&mut buffer).await else { continue };
            let status = if buffer[..read].starts_with(b"GET /ready ") { &ready } else { &others };
            let status = status.load(Ordering::SeqCst);
            let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    port
}

#[tokio::test]
async fn https_readiness_and_liveness_probes_work_as_over_http() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let (ready, live) = (Arc::new(AtomicU16::new(503)), Arc::new(AtomicU16::new(200)));
    let port = serve_https(Arc::clone(&ready), Arc::clone(&live)).await;
    let get = |path: &str| {
        probe(json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": path, "scheme": "HTTPS"}}), 1)
    };
    let fields = json!({"readinessProbe": get("/ready"), "livenessProbe": get("/live")});
    write_pod(&agent, scratch.path(), "web", RUNS, &fields);
    until_cause(&agent, "web", "container", "you", "HTTP probe failed with statuscode: 503").await.unwrap();
    ready.store(200, Ordering::SeqCst);
    until_one_ready(&agent, "web").await;
    assert_eq!(restart_count(&agent, "web").await, 0);
    live.store(500, Ordering::SeqCst);
    until_event(&agent, "Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 500")
        .await
        .unwrap();
    let restarted = eventually(LIMIT, "it was restarted", async || restart_count(&agent, "web").await >= 1);
    restarted.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    live.store(200, Ordering::SeqCst);
    until_ready(&agent, &["web"]).await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn a_failing_liveness_probe_restarts_the_container() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let fields = json!({"livenessProbe": exec("[ ! -e /data/bad ] || { echo stuck; exit 1; }", 2)});
    write_pod(&agent, scratch.path(), "web", &format!("rm -f /data/bad; {RUNS}"), &fields);
    until_ready(&agent, &["web"]).await.unwrap();
    let before = running(&agent).await.unwrap();
    std::fs::write(scratch.path().join("web/bad"), "").unwrap();
    until_event(&agent, "Unhealthy", "Liveness probe failed: stuck").await.unwrap();
    until_event(&agent, "Killing", "Container main failed liveness probe, will be restarted").await.unwrap();
    let restarted =
        eventually(LIMIT, "it was restarted once", async || restart_count(&agent, "web").await == 1);
    restarted.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_ready(&agent, &["web"]).await.unwrap();
    assert_ne!(running(&agent).await.unwrap(), before);
    assert_eq!(restart_count(&agent, "web").await, 1);
    agent.end().unwrap();
}

#[tokio::test]
async fn liveness_and_readiness_probes_wait_for_the_startup_probe() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let fields = json!({
        "startupProbe": exec("[ -e /data/up ] || { echo warming up; exit 1; }", 100),
        "readinessProbe": exec("echo ready >> /data/log", 1),
        "livenessProbe": exec("echo alive >> /data/log", 1),
    });
    write_pod(&agent, scratch.path(), "web", RUNS, &fields);
    let text = "of 100): warming up";
    until_cause(&agent, "web", "container", "you", text).await.unwrap();
    until_event(&agent, "Unhealthy", "Startup probe failed: warming up").await.unwrap();
    until_unready(&agent, "web").await;
    let log = || std::fs::read_to_string(scratch.path().join("web/log")).unwrap_or_default();
    assert_eq!(log(), "");
    std::fs::write(scratch.path().join("web/up"), "").unwrap();
    until_ready(&agent, &["web"]).await.unwrap();
    let both =
        eventually(LIMIT, "both others run", async || log().contains("ready") && log().contains("alive"));
    both.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    until_no_cause(&agent, "web").await.unwrap();
    agent.end().unwrap();
}

#[tokio::test]
async fn killing_pod_sync_between_probes_restarts_nothing_and_flaps_no_status() {
    let scratch = Scratch::new().unwrap();
    let agent = Agent::builder(scratch.path()).start().await.unwrap();
    let fields = json!({
        "startupProbe": exec("[ ! -e /data/started ] && touch /data/started", 1),
        "readinessProbe": exec("true", 1),
        "livenessProbe": exec("echo alive >> /data/log", 1),
    });
    write_pod(&agent, scratch.path(), "web", RUNS, &fields);
    until_ready(&agent, &["web"]).await.unwrap();
    let (before, statuses) = (running(&agent).await.unwrap(), pods(&agent).await.unwrap());
    for _ in 0..3 {
        let process = agent.service(ServiceName::PodSync).unwrap();
        process.signal(Signal::KILL);
        let back = eventually(LIMIT, "pod-sync runs again", async || {
            agent.service(ServiceName::PodSync).is_some_and(|p| p != process)
        });
        back.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
        until_ready(&agent, &["web"]).await.unwrap();
        let lines =
            || std::fs::read_to_string(scratch.path().join("web/log")).unwrap_or_default().lines().count();
        let asked = lines();
        let goes_on = eventually(LIMIT, "its liveness is asked on", async || lines() > asked);
        goes_on.await.unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    }
    assert_eq!(running(&agent).await.unwrap(), before);
    for (name, pod) in pods(&agent).await.unwrap() {
        assert_eq!(pod["status"], statuses[&name]["status"], "{name}");
    }
    agent.end().unwrap();
}
