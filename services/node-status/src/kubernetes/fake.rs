//! An API server for tests that has an answer for everything, and fails when it is told to.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, Response};
use keelson_kube_api::KubeApi;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// It has what it was asked for and has not failed at, in its order: the method and the body.
pub(super) struct Server {
    pub(super) api: KubeApi,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
    task: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Server {
    /// `fails` says which code a request is answered with, by its number.
    pub(super) async fn start(fails: impl Fn(usize) -> Option<u16> + Send + Sync + 'static) -> Self {
        Self::with_retry_after("0", fails).await
    }

    /// The same, which asks to be left alone for so many seconds when it fails.
    pub(super) async fn with_retry_after(
        seconds: &'static str,
        fails: impl Fn(usize) -> Option<u16> + Send + Sync + 'static,
    ) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (kept, fails) = (Arc::clone(&asked), Arc::new(fails));
        let count = Arc::new(Mutex::new(0));
        let router = Router::new().fallback(move |request: Request<Body>| {
            let (kept, fails, count) = (Arc::clone(&kept), Arc::clone(&fails), Arc::clone(&count));
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
                    kept.lock().unwrap().push((head.method.to_string(), object));
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
        Self { api: KubeApi::new(file, "test"), asked, task, _folder: folder }
    }

    pub(super) fn asked(&self) -> Vec<(String, Value)> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
