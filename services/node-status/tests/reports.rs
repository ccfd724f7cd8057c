//! node-status with an API server that asks it to wait.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

mod fake;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, Response};
use keelson_config::{ControlPlane, Kubernetes, ServiceName};
use keelson_proto::keelson::node_status::v1 as pb;
use keelson_proto::keelson::node_status::v1::node_status_client::NodeStatusClient;
use keelson_service_kit::{Context, Peer};
use serde_json::{Value, json};

use fake::{FakePeers, eventually, pod_document};

const PODS: &str = "/api/v1/pods";
const POD: &str = "/api/v1/namespaces/default/pods/web";

/// An API server that has the Node and a pod.
#[derive(Clone, Default)]
struct Api {
    /// Requests for pods are answered with `Retry-After: 1`.
    is_busy: Arc<AtomicBool>,
    /// Method and path of the answered requests.
    answered: Arc<Mutex<Vec<String>>>,
}

impl Api {
    /// Serves it; returns its kubeconfig.
    async fn serve(&self) -> Value {
        let own = self.clone();
        let router = Router::new().fallback(move |request| {
            let own = own.clone();
            async move { own.respond(request).await }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]})
    }

    async fn respond(&self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let (method, path) = (head.method, head.uri.path().to_owned());
        let body: Value = serde_json::from_slice(&to_bytes(body, 1 << 20).await.unwrap()).unwrap_or_default();
        if path.contains("/pods") && self.is_busy.load(Ordering::Relaxed) {
            let status =
                json!({"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "busy"});
            let busy = Response::builder().status(429).header("retry-after", "1");
            return busy.body(Body::from(status.to_string())).unwrap();
        }
        let answer = if path == PODS {
            json!({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []})
        } else if path.starts_with(POD) {
            json!({"metadata": {"namespace": "default", "name": "web", "uid": "u1"}, "status": {}})
        } else if method == Method::POST || method == Method::PUT {
            body
        } else {
            json!({"metadata": {"name": "n1", "uid": "n"}, "status": {}})
        };
        self.answered.lock().unwrap().push(format!("{method} {path}"));
        Response::new(Body::from(answer.to_string()))
    }

    fn has_answered(&self, what: &str) -> bool {
        self.answered.lock().unwrap().iter().any(|answered| answered == what)
    }
}

async fn state(ctx: &Context) -> pb::GetReportStateResponse {
    let peer = Peer::service(&ctx.config.paths.run_dir, ServiceName::NodeStatus);
    let mut client = NodeStatusClient::new(peer.channel());
    client.get_report_state(pb::GetReportStateRequest {}).await.unwrap().into_inner()
}

#[tokio::test]
async fn report_state_has_queued_reports_and_the_retry_after_time() {
    let api = Api::default();
    api.is_busy.store(true, Ordering::Relaxed);
    let peers = FakePeers::start().await;
    peers.machine();
    peers.runtime(true, "");
    let mut document = pod_document("u1", "Running", true, 1);
    document.source = "api".into();
    peers.pods.set("u1".into(), document);
    let mut config = (*peers.context(ServiceName::NodeStatus).config).clone();
    let kubeconfig = config.paths.state_dir.join("kubeconfig");
    std::fs::create_dir_all(&config.paths.state_dir).unwrap();
    std::fs::write(&kubeconfig, api.serve().await.to_string()).unwrap();
    config.control_plane = ControlPlane::Kubernetes(Kubernetes::of(kubeconfig));
    let ctx = Context::detached(ServiceName::NodeStatus, config);
    fake::serve(&ctx, keelson_node_status::build_with_init(ctx.clone(), false).await.unwrap());

    // The pod, and the removal of stale mirror pods.
    let waiting = eventually(async || {
        let state = state(&ctx).await;
        (state.queued >= 2 && state.throttled_seconds >= 2.0).then_some(state)
    })
    .await;
    assert_eq!(waiting.control_plane, "kubernetes");
    assert!(waiting.oldest_age_ms >= 1000, "{waiting:?}");
    let text = ctx.metrics.text();
    let throttled =
        text.lines().find_map(|line| line.strip_prefix("keelson_node_status_throttled_seconds_total "));
    assert!(throttled.unwrap().parse::<f64>().unwrap() >= 2.0, "{text}");
    // The Node does not wait for pods.
    eventually(async || api.has_answered("PATCH /api/v1/nodes/n1/status").then_some(())).await;

    api.is_busy.store(false, Ordering::Relaxed);
    eventually(async || (state(&ctx).await.queued == 0).then_some(())).await;
    let patched = format!("PATCH {POD}/status");
    eventually(async || api.has_answered(&patched).then_some(())).await;
    ctx.shutdown.cancel();
}
