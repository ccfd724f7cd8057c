//! An API server for tests that answers what a test says, over plain HTTP.

use std::path::Path;
use std::sync::{Arc, Mutex};

use keelson_kube_api::KubeApi;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What was asked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) content_type: String,
    /// Null where there is none.
    pub(crate) body: Value,
}

type Answers = Arc<Mutex<dyn FnMut(&Asked) -> Option<(u16, Value)> + Send>>;

/// A server on loopback; it goes away when this is dropped.
pub(crate) struct FakeApi {
    pub(crate) api: KubeApi,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
}

impl FakeApi {
    /// Its kubeconfig is written into `folder`. A request without an answer waits for ever.
    pub(crate) async fn start(
        folder: &Path,
        answer: impl FnMut(&Asked) -> Option<(u16, Value)> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (kept, answers) = (Arc::clone(&asked), Arc::new(Mutex::new(answer)) as Answers);
        let task = tokio::spawn(async move {
            // They end with this task.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&kept), Arc::clone(&answers)));
            }
        });
        let file = folder.join("kubeconfig");
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
        std::fs::write(&file, config.to_string()).unwrap();
        Self { api: KubeApi::new(file, "test"), asked, task }
    }

    /// The requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, kept: Arc<Mutex<Vec<Asked>>>, answers: Answers) {
    let mut stream = BufReader::new(stream);
    while let Some(asked) = request(&mut stream).await {
        kept.lock().unwrap().push(asked.clone());
        let answer = (*answers.lock().unwrap())(&asked);
        let Some((code, body)) = answer else { return std::future::pending().await };
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        // It fails when the other side goes away.
        if stream.write_all(format!("{head}{body}").as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn request(stream: &mut BufReader<TcpStream>) -> Option<Asked> {
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
    Some(Asked { method, path, content_type, body: serde_json::from_slice(&body).unwrap_or_default() })
}

/// A refusal as the API has it.
pub(crate) fn refusal(code: u16) -> (u16, Value) {
    let reason = if code == 404 { "NotFound" } else { "X" };
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": "in its words"});
    (code, status)
}
