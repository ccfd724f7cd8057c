//! Against a server that refuses what a Node authorizer with `AuthorizeNodeWithSelectors` refuses: a pod that does not exist, or
//! is bound elsewhere, is 403 and not 404.

use std::collections::BTreeMap;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, Response};
use keelson_config::Config;
use keelson_kube_model::annotations;
use keelson_node_status_core::Ended;
use keelson_service_kit::CancellationToken;
use tokio::task::JoinHandle;

use super::writing::{AGAIN, TRIES};
use super::*;

/// Pods by `namespace/name`, and what was asked.
#[derive(Default)]
struct Stored {
    pods: BTreeMap<String, Value>,
    asked: Vec<String>,
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

/// What the server answers to a request for a pod of node n1.
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
        let (kept, told) = (Arc::clone(&stored), Arc::clone(&changed));
        let router = Router::new().fallback(move |request: Request<Body>| {
            let (kept, told) = (Arc::clone(&kept), Arc::clone(&told));
            async move {
                let (head, body) = request.into_parts();
                let body =
                    serde_json::from_slice(&to_bytes(body, 1 << 20).await.unwrap()).unwrap_or_default();
                let (code, answer) = {
                    let mut stored = kept.lock().unwrap();
                    stored.asked.push(format!("{} {}", head.method, head.uri.path()));
                    answer(&mut stored, &head.method, head.uri.path(), body)
                };
                told.notify_one();
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
        writer.registered("u", Value::Null);
        tokio::spawn(Arc::clone(&writer).run(ctx.clone()));
        (writer, ctx.shutdown)
    }

    /// Waits until requests have made this true.
    async fn until(&self, what: &str, good: impl Fn(&Stored) -> bool) {
        let seen = async {
            while !good(&self.stored.lock().unwrap()) {
                self.changed.notified().await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(60), seen).await.is_err() {
            panic!("{what}: {:?}", self.stored.lock().unwrap().asked);
        }
    }

    fn asked(&self, what: &str) -> usize {
        self.stored.lock().unwrap().asked.iter().filter(|asked| *asked == what).count()
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

fn report(name: &str, source: &str, phase: &str) -> PodReport {
    let pod = json!({
        "metadata": {"name": name, "namespace": "default", "annotations": {"kubernetes.io/config.hash": format!("uid-of-{name}")}},
        "spec": {"containers": []}, "status": {"phase": phase},
    });
    PodReport {
        uid: format!("uid-of-{name}"),
        namespace: "default".into(),
        name: name.into(),
        pod_json: pod.to_string().into_bytes().into(),
        source: source.into(),
        turned: false,
        ended: Ended::default(),
    }
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
async fn a_static_pod_gets_its_mirror_without_reading_a_pod_that_does_not_exist() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    writer.write_pod(&report("web", "file", "Pending")).await.unwrap();
    server
        .until("the mirror has its status", |s| Server::phase(s, "web").as_deref() == Some("Pending"))
        .await;
    let mirror = server.stored.lock().unwrap().pods["default/web"].clone();
    assert_eq!(mirror["metadata"]["annotations"][annotations::CONFIG_MIRROR], "uid-of-web");
    assert_eq!(server.asked("GET /api/v1/namespaces/default/pods/web"), 0);

    // A later report reads the mirror, which exists now, and makes no second one.
    writer.write_pod(&report("web", "file", "Running")).await.unwrap();
    server.until("the status is changed", |s| Server::phase(s, "web").as_deref() == Some("Running")).await;
    assert_eq!(server.asked("POST /api/v1/namespaces/default/pods"), 1);

    // Somebody deletes it.
    server.stored.lock().unwrap().pods.clear();
    writer.write_pod(&report("web", "file", "Running")).await.unwrap();
    server.until("there is one again", |s| Server::phase(s, "web").as_deref() == Some("Running")).await;
    writer.drop_pods(GonePods::One("uid-of-web".into())).await;
    server.until("it goes with its pod", |s| s.pods.is_empty()).await;
    // Its removal is asked for once more: there is nothing to remove, and nothing waits.
    writer.put(Job::Gone { uid: "uid-of-web".into(), name: PodFullName::new("web", "default") }, false);
    written(&writer).await;
    shutdown.cancel();
}

#[tokio::test]
async fn a_static_pod_that_is_updated_keeps_its_mirror_until_the_old_instance_has_gone() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    let of = |hash: &str, phase: &str| {
        let mut report = report("web", "file", phase);
        let mut pod: Value = serde_json::from_slice(&report.pod_json).unwrap();
        pod["metadata"]["annotations"]["kubernetes.io/config.hash"] = hash.into();
        report.pod_json = pod.to_string().into_bytes().into();
        report.uid = hash.into();
        report
    };
    let whose = |s: &Stored| {
        let pod = s.pods.get("default/web")?;
        Some(pod["metadata"]["annotations"][annotations::CONFIG_MIRROR].as_str()?.to_owned())
    };
    writer.write_pod(&of("old", "Running")).await.unwrap();
    server.until("there is a mirror", |s| Server::phase(s, "web").as_deref() == Some("Running")).await;
    writer.write_pod(&of("new", "Pending")).await.unwrap();
    written(&writer).await;
    // It still shows the old one, whose status may change.
    writer.write_pod(&of("old", "Pending")).await.unwrap();
    server
        .until("its new status is written", |s| Server::phase(s, "web").as_deref() == Some("Pending"))
        .await;
    assert_eq!(server.asked("DELETE /api/v1/namespaces/default/pods/web"), 0);
    assert_eq!(whose(&server.stored.lock().unwrap()).as_deref(), Some("old"));

    // The new one gets its mirror although its own status has not changed since.
    writer.drop_pods(GonePods::One("old".into())).await;
    server.until("the new one has its own", |s| whose(s).as_deref() == Some("new")).await;
    written(&writer).await;
    assert_eq!(whose(&server.stored.lock().unwrap()).as_deref(), Some("new"));
    shutdown.cancel();
}

#[tokio::test]
async fn a_static_pod_whose_name_another_nodes_pod_has_is_not_tried_for_ever() {
    let server = Server::start().await;
    server.bind("web", "n2");
    let (writer, shutdown) = server.writer();
    writer.write_pod(&report("web", "file", "Running")).await.unwrap();
    written(&writer).await;
    server.until("the server was asked", |s| s.asked.len() >= 2).await;
    assert_eq!(server.stored.lock().unwrap().pods["default/web"]["spec"]["nodeName"], "n2");
    shutdown.cancel();
}

#[tokio::test]
async fn reports_of_pods_that_are_gone_leave_the_queue_and_hold_up_no_other() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    for number in 0..255 {
        writer.write_pod(&report(&format!("gone-{number}"), API, "Failed")).await.unwrap();
    }
    server.bind("here", "n1");
    writer.write_pod(&report("here", API, "Running")).await.unwrap();
    server
        .until("the pod that is here is written", |s| Server::phase(s, "here").as_deref() == Some("Running"))
        .await;
    written(&writer).await;
    for number in 0..255 {
        assert_eq!(server.asked(&format!("GET /api/v1/namespaces/default/pods/gone-{number}")), 1);
    }
    shutdown.cancel();
}

#[tokio::test]
async fn a_pod_that_the_authorizer_has_not_seen_yet_is_tried_again_at_once() {
    let server = Server::start().await;
    let (writer, shutdown) = server.writer();
    // pod-config has it from its watch.
    writer.known().on_server.insert("uid-of-new".into(), PodFullName::new("new", "default"));
    writer.write_pod(&report("new", API, "Running")).await.unwrap();
    server.until("it was refused", |s| s.asked.len() == 1).await;
    server.bind("new", "n1");
    server.until("it is written", |s| Server::phase(s, "new").as_deref() == Some("Running")).await;
    shutdown.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_report_that_is_refused_each_time_is_dropped_while_others_are_written() {
    let config = Config { node_name: "n1".into(), ..Config::default() };
    let ctx = Context::detached(ServiceName::NodeStatus, config);
    let writer = KubernetesWriter::new(&ctx, &Settings::of("/none".into()));
    writer.registered("u", Value::Null);
    let refused = |code: u16| KubeError::Refused {
        server: "s".into(),
        what: "w".into(),
        code,
        reason: "Forbidden".into(),
        message: "no".into(),
        retry_after: 0,
    };
    let tries_of = async |code: u16, others: bool| {
        writer.write_pod(&report("web", API, "Running")).await.unwrap();
        let mut pause = AGAIN;
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
                writer.wrote();
            }
        }
        while writer.queue().take_at(Instant::now() + Duration::from_secs(600)).is_some() {}
        None
    };
    assert_eq!(tries_of(403, true).await, Some(TRIES));
    assert_eq!(tries_of(422, false).await, Some(TRIES), "it is refused for what it says");
    assert_eq!(tries_of(500, true).await, Some(TRIES));
    writer.known().last_write = None;
    assert_eq!(tries_of(403, false).await, None, "the server refuses all, which may pass");
}
