//! An API server for tests that answers every request, and fails where the test wants it.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, Response};
use keelson_kube_api::KubeApi;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Records the requests that it answered with success, in order: method and body.
pub(super) struct Server {
    pub(super) api: KubeApi,
    requests: Arc<Mutex<Vec<(String, Value)>>>,
    task: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Server {
    /// `fails` returns the code with which the request of this number is answered.
    pub(super) async fn start(fails: impl Fn(usize) -> Option<u16> + Send + Sync + 'static) -> Self {
        Self::with_retry_after("0", fails).await
    }

    /// The same, with this many seconds as `Retry-After` of failures.
    pub(super) async fn with_retry_after(
        seconds: &'static str,
        fails: impl Fn(usize) -> Option<u16> + Send + Sync + 'static,
    ) -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, fails) = (Arc::clone(&requests), Arc::new(fails));
        let count = Arc::new(Mutex::new(0));
        let router = Router::new().fallback(move |request: Request<Body>| {
            let (log, fails, count) = (Arc::clone(&log), Arc::clone(&fails), Arc::clone(&count));
            async move {
                let number = {
                    let mut count = count.lock().unwrap();
                    *count += 1;
                    *count - 1
                };
                let (head, body) = request.into_parts();
                let object: Value =
                    serde_json::from_slice(&to_bytes(body, 1 << 20).await.unwrap()).unwrap_or_default();
                let code = fails(number).unwrap_or(200);
                let answer = json!({"kind": "Status", "code": code, "reason": "X", "message": "m"});
                if code == 200 {
                    log.lock().unwrap().push((head.method.to_string(), object));
                }
                let answered = Response::builder().status(code).header("retry-after", seconds);
                answered.body(Body::from(answer.to_string())).unwrap()
            }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubeconfig");
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        std::fs::write(&file, config.to_string()).unwrap();
        Self { api: KubeApi::new(file, "test"), requests, task, _folder: folder }
    }

    pub(super) fn requests(&self) -> Vec<(String, Value)> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
