//! An API server for tests, over plain HTTP, whose responses a test defines.

use std::path::Path;
use std::sync::{Arc, Mutex};

use keelson_kube_api::KubeApi;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A received request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordedRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) content_type: String,
    /// Null without a body.
    pub(crate) body: Value,
}

type Answers = Arc<Mutex<dyn FnMut(&RecordedRequest) -> Option<(u16, Value)> + Send>>;

/// A server on loopback; dropping it stops it.
pub(crate) struct FakeApi {
    pub(crate) api: KubeApi,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
    task: JoinHandle<()>,
}

impl FakeApi {
    /// Starts the server and writes its kubeconfig to `folder`. A request without a response hangs.
    pub(crate) async fn start(
        folder: &Path,
        answer: impl FnMut(&RecordedRequest) -> Option<(u16, Value)> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (recorded, answers) = (Arc::clone(&requests), Arc::new(Mutex::new(answer)) as Answers);
        let task = tokio::spawn(async move {
            // The connections end with this task.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&recorded), Arc::clone(&answers)));
            }
        });
        let file = folder.join("kubeconfig");
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        std::fs::write(&file, config.to_string()).unwrap();
        Self { api: KubeApi::new(file, "test"), requests, task }
    }

    /// The requests received so far.
    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, recorded: Arc<Mutex<Vec<RecordedRequest>>>, answers: Answers) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream).await {
        recorded.lock().unwrap().push(request.clone());
        let answer = (*answers.lock().unwrap())(&request);
        let Some((code, body)) = answer else { return std::future::pending().await };
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        // Fails if the client is gone.
        if stream.write_all(format!("{head}{body}").as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<RecordedRequest> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let (mut length, mut content_type) = (0, String::new());
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await.ok()?;
        let header = header.trim().to_lowercase();
        match header.split_once(':') {
            None => break,
            Some(("content-length", value)) => length = value.trim().parse().ok()?,
            Some(("content-type", value)) => value.trim().clone_into(&mut content_type),
            Some(_) => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some(RecordedRequest {
        method,
        path,
        content_type,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}

/// An error response of the API.
pub(crate) fn refusal(code: u16) -> (u16, Value) {
    let reason = if code == 404 { "NotFound" } else { "X" };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": "in its words"});
    (code, status)
}
