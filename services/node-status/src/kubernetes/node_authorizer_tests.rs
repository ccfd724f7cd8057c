//! Tests against a server that refuses what a Node authorizer with `AuthorizeNodeWithSelectors` refuses: a pod that does not
//! exist, or is bound elsewhere, is 403 and not 404.

use std::collections::BTreeMap;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, Response};
use keelson_config::Config;
use keelson_kube_model::annotations;
use keelson_node_status_core::PodDocument;
use keelson_service_kit::CancellationToken;
use tokio::task::JoinHandle;

use super::write_loop::{RETRY_PAUSE, TRIES};
use super::*;

/// Pods by `namespace/name`, and the requests.
#[derive(Default)]
struct Stored {
    pods: BTreeMap<String, Value>,
    requests: Vec<String>,
}

struct Server {
    stored: Arc<Mutex<Stored>>,
    kubeconfig: std::path::PathBuf,
    changed: Arc<Notify>,
    task: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

fn status(code: u16, reason: &str, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}))
}

/// The server's answer to a request for a pod of node n1.
fn answer(stored: &mut Stored, method: &Method, path: &str, body: Value) -> (u16, Value) {
    let parts: Vec<&str> = path.trim_start_matches("/api/v1/namespaces/").split('/').collect();
    let (namespace, name) = (parts[0], parts.get(2).copied());
    let Some(name) = name else {
        let name = body["metadata"]["name"].as_str().unwrap().to_owned();
        let key = format!("{namespace}/{name}");
        if stored.pods.contains_key(&key) {
            return status(409, "AlreadyExists", &format!("pods {name:?} already exists"));
        }
        let mut pod = body;
        pod["metadata"]["uid"] = format!("uid-of-{name}").into();
        pod["metadata"]["namespace"] = namespace.into();
        pod["spec"]["nodeName"] = "n1".into();
        stored.pods.insert(key, pod.clone());
        return (201, pod);
    };
    let key = format!("{namespace}/{name}");
    let is_related = stored.pods.get(&key).is_some_and(|pod| pod["spec"]["nodeName"] == "n1");
    match (method.as_str(), is_related) {
        ("GET", true) => (200, stored.pods[&key].clone()),
        ("GET", false) => status(
            403,
            "Forbidden",
            &format!(
                "pods {name:?} is forbidden: User \"system:node:n1\" cannot get resource \"pods\" in API group \"\" in the \
                 namespace {namespace:?}: no relationship found between node 'n1' and this object"
            ),
        ),
        ("PATCH", true) => {
            let pod = stored.pods.get_mut(&key).unwrap();
            pod["status"] = body["status"].clone();
            (200, pod.clone())
        }
        ("DELETE", true) => (200, stored.pods.remove(&key).unwrap()),
        _ => status(404, "NotFound", &format!("pods {name:?} not found")),
    }
}

impl Server {
    async fn start() -> Self {
        let (stored, changed) = (Arc::new(Mutex::new(Stored::default())), Arc::new(Notify::new()));
        let (shared, notify) = (Arc::clone(&stored), Arc::clone(&changed));
        let router = Router::new().fallback(move |request: Request<Body>| {
            let (shared, notify) = (Arc::clone(&shared), Arc::clone(&notify));
            async move {
                let (head, body) = request.into_parts();
                let body =
                    serde_json::from_slice(&to_bytes(body, 1 << 20).await.unwrap()).unwrap_or_default();
                let (code, answer) = {
                    let mut stored = shared.lock().unwrap();
                    stored.requests.push(format!("{} {}", head.method, head.uri.path()));
                    answer(&mut stored, &head.method, head.uri.path(), body)
                };
                notify.notify_one();
                Response::builder().status(code).body(Body::from(answer.to_string())).unwrap()
            }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        Self { stored, kubeconfig, changed, task, _folder: folder }
    }

    /// A writer whose Node is registered; its loop runs.
    fn writer(&self) -> (Arc<KubernetesWriter>, CancellationToken) {
        let config = Config { node_name: "n1".into(), ..Config::default() };
        let ctx = Context::detached(ServiceName::NodeStatus, config);
        let writer = KubernetesWriter::new(&ctx, &Settings::of(self.kubeconfig.clone()));
        writer.set_registered("u", Value::Null);
        tokio::spawn(Arc::clone(&writer).run(ctx.clone()));
        (writer, ctx.shutdown)
    }

    /// Waits until requests have made `good` true.
    async fn until(&self, what: &str, good: impl Fn(&Stored) -> bool) {
        let seen = async {
            while !good(&self.stored.lock().unwrap()) {
                self.changed.notified().await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(60), seen).await.is_err() {
            panic!("{what}: {:?}", self.stored.lock().unwrap().requests);
        }
    }

    fn requests(&self, what: &str) -> usize {
        self.stored.lock().unwrap().requests.iter().filter(|request| *request == what).count()
    }

    fn bind(&self, name: &str, node: &str) {
        let pod = json!({"metadata": {"name": name, "uid": format!("uid-of-{name}"), "namespace": "default"},
            "spec": {"nodeName": node}, "status": {"phase": "Pending"}});
        self.stored.lock().unwrap().pods.insert(format!("default/{name}"), pod);
    }

    fn phase(stored: &Stored, name: &str) -> Option<String> {
        let pod = stored.pods.get(&format!("default/{name}"))?;
        pod["status"]["phase"].as_str().map(ToOwned::to_owned)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn report(name: &str, source: &str, phase: &str) -> PodUpdate {
    report_of(name, &format!("uid-of-{name}"), source, phase)
}

/// The report of a pod whose hash is its UID.
fn report_of(name: &str, uid: &str, source: &str, phase: &str) -> PodUpdate {
    let pod = json!({
        "metadata": {"name": name, "namespace": "default", "annotations": {"kubernetes.io/config.hash": uid}},
        "spec": {"containers": []}, "status": {"phase": phase},
    });
    let json = pod.to_string();
    let pod_json = json.as_bytes();
    let document =
        PodDocument { uid, namespace: "default", name, source, pod_json, ..PodDocument::default() };
    PodUpdate { urgent: false, ..PodUpdate::first(&document, source != API).unwrap() }
}

/// Waits until nothing is queued and nothing is being written.
async fn written(writer: &KubernetesWriter) {
    let empty = async {
        while writer.state().queued > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), empty).await.expect("the queue empties");
}

#[tokio::test]
async fn a_mirror_pod_is_created_without_reading_a_missing_pod() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    writer.write_pod(report("web", "file", "Pending")).await.unwrap();
    server
        .until("the mirror has its status", |s| Server::phase(s, "web").as_deref() == Some("Pending"))
        .await;
    let mirror = server.stored.lock().unwrap().pods["default/web"].clone();
    assert_eq!(mirror["metadata"]["annotations"][annotations::CONFIG_MIRROR], "uid-of-web");
    assert_eq!(server.requests("GET /api/v1/namespaces/default/pods/web"), 0);

    // A later report reads the mirror pod, which exists now, and creates no second one.
    writer.write_pod(report("web", "file", "Running")).await.unwrap();
    server.until("the status is changed", |s| Server::phase(s, "web").as_deref() == Some("Running")).await;
    assert_eq!(server.requests("POST /api/v1/namespaces/default/pods"), 1);

    // Another client deletes it.
    server.stored.lock().unwrap().pods.clear();
    writer.write_pod(report("web", "file", "Running")).await.unwrap();
    server
        .until("the mirror pod exists again", |s| Server::phase(s, "web").as_deref() == Some("Running"))
        .await;
    writer.drop_pods(GonePods::One("uid-of-web".into())).await;
    server.until("the mirror pod is deleted with its pod", |s| s.pods.is_empty()).await;
    // A second removal finds nothing to remove, and nothing waits.
    writer.put(Job::RemovePod { uid: "uid-of-web".into(), name: PodFullName::new("web", "default") }, false);
    written(&writer).await;
    shutdown.cancel();
}

#[tokio::test]
async fn an_updated_static_pod_keeps_its_mirror_pod_until_the_old_one_is_gone() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    let of = |hash: &str, phase: &str| report_of("web", hash, "file", phase);
    let whose = |s: &Stored| {
        let pod = s.pods.get("default/web")?;
        Some(pod["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str()?.to_owned())
    };
    writer.write_pod(of("old", "Running")).await.unwrap();
    server.until("there is a mirror", |s| Server::phase(s, "web").as_deref() == Some("Running")).await;
    writer.write_pod(of("new", "Pending")).await.unwrap();
    written(&writer).await;
    // The mirror pod is still that of the old instance, whose status may change.
    writer.write_pod(of("old", "Pending")).await.unwrap();
    server
        .until("the new status is written", |s| Server::phase(s, "web").as_deref() == Some("Pending"))
        .await;
    assert_eq!(server.requests("DELETE /api/v1/namespaces/default/pods/web"), 0);
    assert_eq!(whose(&server.stored.lock().unwrap()).as_deref(), Some("old"));

    // The new instance gets its mirror pod although its own status has not changed since.
    writer.drop_pods(GonePods::One("old".into())).await;
    server.until("the new pod has its own mirror pod", |s| whose(s).as_deref() == Some("new")).await;
    written(&writer).await;
    assert_eq!(whose(&server.stored.lock().unwrap()).as_deref(), Some("new"));
    shutdown.cancel();
}

#[tokio::test]
async fn a_static_pod_with_the_name_of_another_nodes_pod_is_not_retried() {
    let server = Server::start().await;
    server.bind("web", "n2");
    let (writer, shutdown) = server.writer();
    writer.write_pod(report("web", "file", "Running")).await.unwrap();
    written(&writer).await;
    server.until("the server was asked", |s| s.requests.len() >= 2).await;
    assert_eq!(server.stored.lock().unwrap().pods["default/web"]["spec"]["nodeName"], "n2");
    shutdown.cancel();
}

#[tokio::test]
async fn reports_of_deleted_pods_leave_the_queue_and_delay_no_other() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    for number in 0..255 {
        writer.write_pod(report(&format!("gone-{number}"), API, "Failed")).await.unwrap();
    }
    server.bind("here", "n1");
    writer.write_pod(report("here", API, "Running")).await.unwrap();
    server
        .until("the pod that is here is written", |s| Server::phase(s, "here").as_deref() == Some("Running"))
        .await;
    written(&writer).await;
    for number in 0..255 {
        assert_eq!(server.requests(&format!("GET /api/v1/namespaces/default/pods/gone-{number}")), 1);
    }
    shutdown.cancel();
}

#[tokio::test]
async fn a_pod_unknown_to_the_node_authorizer_is_retried_at_once() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    // pod-config has it from its watch.
    writer.cache().on_server.insert("uid-of-new".into(), PodFullName::new("new", "default"));
    writer.write_pod(report("new", API, "Running")).await.unwrap();
    server.until("it was refused", |s| s.requests.len() == 1).await;
    server.bind("new", "n1");
    server.until("it is written", |s| Server::phase(s, "new").as_deref() == Some("Running")).await;
    shutdown.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_report_refused_on_every_try_is_dropped_while_others_succeed() {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    let ctx = Context::detached(ServiceName::NodeStatus, config);
    let writer = KubernetesWriter::new(&ctx, &Settings::of("/none".into()));
    writer.set_registered("u", Value::Null);
    let refused = |code: u16| KubeError::Refused {
        server: "s".into(),
        what: "w".into(),
        code,
        reason: "Forbidden".into(),
        message: "no".into(),
        retry_after: 0,
    };
    let tries_of = async |code: u16, others: bool| {
        writer.write_pod(report("web", API, "Running")).await.unwrap();
        let mut pause = RETRY_PAUSE;
        for tries in 1..=30 {
            let due = writer.queue().due().unwrap_or_else(Instant::now);
            tokio::time::sleep_until(due).await;
            let pending = writer.queue().begin_at(Instant::now()).unwrap();
            writer.finish(pending, Err(refused(code)), false, &mut pause);
            if writer.queue().len() == 0 {
                return Some(tries);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            if others {
                writer.record_write();
            }
        }
        while writer.queue().take_at(Instant::now() + Duration::from_secs(600)).is_some() {}
        None
    };
    assert_eq!(tries_of(403, true).await, Some(TRIES));
    assert_eq!(tries_of(422, false).await, Some(TRIES), "its content is refused");
    assert_eq!(tries_of(500, true).await, Some(TRIES));
    writer.cache().last_write = None;
    assert_eq!(tries_of(403, false).await, None, "the server refuses all, which may pass");
}
