use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pb::review_token_response::Result as ReviewResult;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use super::*;

/// Paths and bodies of received requests.
type Posted = Arc<Mutex<Vec<(String, Value)>>>;

/// Starts an API server that sends these responses in order; later requests hang.
async fn server(folder: &Path, answers: Vec<(u16, Value)>) -> (Reviewer, Posted) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let posted = Posted::default();
    let (recorded, answers) = (Arc::clone(&posted), Arc::new(Mutex::new(VecDeque::from(answers))));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (recorded, answers) = (Arc::clone(&recorded), Arc::clone(&answers));
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                while let Some(posted) = request(&mut stream).await {
                    recorded.lock().unwrap().push(posted);
                    let next = answers.lock().unwrap().pop_front();
                    let Some((code, body)) = next else { return std::future::pending().await };
                    let body = body.to_string();
                    let head = format!(
                        "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                        body.len()
                    );
                    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
                }
            });
        }
    });
    let file = folder.join("kubeconfig");
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]});
    std::fs::write(&file, config.to_string()).unwrap();
    (Reviewer::new(KubeApi::new(file, "test"), &Metrics::new()), posted)
}

async fn request(stream: &mut BufReader<tokio::net::TcpStream>) -> Option<(String, Value)> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
    let path = line.split_whitespace().nth(1)?.to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await.ok()?;
        if header.trim().is_empty() {
            break;
        }
        if let Some(value) = header.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((path, serde_json::from_slice(&body).ok()?))
}

fn refusal(code: u16) -> (u16, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": "X", "message": "no"});
    (code, status)
}

fn jane() -> pb::User {
    let extra = [("scopes".to_owned(), pb::ExtraValues { values: vec!["a".into(), "b".into()] })];
    pb::User { name: "jane".into(), uid: "u1".into(), groups: vec!["ops".into()], extra: extra.into() }
}

#[tokio::test]
async fn a_token_review_returns_the_complete_user() {
    let folder = tempfile::tempdir().unwrap();
    let user = json!({"username": "jane", "uid": "u1", "groups": ["ops"], "extra": {"scopes": ["a", "b"]}});
    let answers = vec![
        (201, json!({"status": {"authenticated": true, "user": user}})),
        (201, json!({"status": {"authenticated": false, "error": "the keys cannot be fetched"}})),
        (201, json!({"status": {}})),
    ];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let mut results = Vec::new();
    for _ in 0..3 {
        results.push(reviewer.review_token("secret").await.unwrap().result.unwrap());
    }
    let rejected = |text: &str| ReviewResult::Rejected(text.to_owned());
    assert_eq!(results, [ReviewResult::User(jane()), rejected("the keys cannot be fetched"), rejected("")]);
    let (path, review) = posted.lock().unwrap()[0].clone();
    assert_eq!(path, "/apis/authentication.k8s.io/v1/tokenreviews");
    let spec = json!({"token": "secret"});
    assert_eq!(
        review,
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec})
    );
}

#[tokio::test]
async fn an_access_review_sends_the_complete_user_and_denied_wins_over_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let answers = vec![
        (201, json!({"status": {"allowed": true, "reason": "a role"}})),
        (201, json!({"status": {"allowed": false}})),
        (201, json!({"status": {"allowed": true, "denied": true}})),
    ];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let request = pb::ReviewAccessRequest {
        user: Some(jane()),
        verb: "get".into(),
        resource: "nodes".into(),
        subresource: "metrics".into(),
        name: "n1".into(),
    };
    for (allowed, reason) in [(true, "a role"), (false, ""), (false, "")] {
        let response = reviewer.review_access(&request).await.unwrap();
        assert_eq!((response.allowed, response.reason.as_str()), (allowed, reason));
    }
    let (path, review) = posted.lock().unwrap()[0].clone();
    assert_eq!(path, "/apis/authorization.k8s.io/v1/subjectaccessreviews");
    let attributes =
        json!({"verb": "get", "version": "v1", "resource": "nodes", "subresource": "metrics", "name": "n1"});
    let spec = json!({"resourceAttributes": attributes, "user": "jane", "uid": "u1", "groups": ["ops"],
        "extra": {"scopes": ["a", "b"]}});
    assert_eq!(review["spec"], spec);
}

#[tokio::test]
async fn a_review_is_retried_on_server_errors_and_not_on_a_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let answers = vec![refusal(500), refusal(429), (201, json!({"status": {"authenticated": true}}))];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let started = std::time::Instant::now();
    assert!(matches!(reviewer.review_token("t").await.unwrap().result, Some(ReviewResult::User(_))));
    assert!(started.elapsed() >= backoff(1, 0.0) + backoff(2, 0.0), "{:?}", started.elapsed());
    assert_eq!(posted.lock().unwrap().len(), 3);

    let folder = tempfile::tempdir().unwrap();
    let (reviewer, posted) = server(folder.path(), vec![refusal(403)]).await;
    assert_eq!(reviewer.review_token("t").await.unwrap_err().code(), Some(403));
    assert_eq!(posted.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn review_metrics_count_requests_by_status_code() {
    let folder = tempfile::tempdir().unwrap();
    let status = json!({"status": {"authenticated": true, "allowed": true}});
    let answers = vec![refusal(500), (201, status.clone()), refusal(403), (201, status)];
    let (mut reviewer, _) = server(folder.path(), answers).await;
    let metrics = Metrics::new();
    reviewer.metrics = ReviewMetrics::registered(&metrics);
    reviewer.review_token("t").await.unwrap();
    reviewer.review_token("t").await.unwrap_err();
    reviewer.review_access(&pb::ReviewAccessRequest::default()).await.unwrap();
    let unreachable = Reviewer { api: KubeApi::new(folder.path().join("none"), "test"), ..reviewer.clone() };
    unreachable.review_token("t").await.unwrap_err();
    let text = metrics.text();
    for (kind, code, count) in [
        ("authn", "500", 1),
        ("authn", "201", 1),
        ("authn", "403", 1),
        ("authn", "<error>", 1),
        ("authz", "201", 1),
    ] {
        for suffix in ["total", "duration_seconds_count"] {
            let line = format!("apiserver_delegated_{kind}_request_{suffix}{{code=\"{code}\"}} {count}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }
}

#[test]
fn review_backoff_grows_by_half_with_a_jitter_of_a_fifth() {
    let whole: Vec<u128> = (1..ATTEMPTS).map(|n| backoff(n, 0.0).as_millis()).collect();
    assert_eq!(whole, [500, 750, 1125, 1687]);
    assert_eq!(backoff(1, 1.0), Duration::from_millis(600));
}

#[test]
fn only_retryable_review_errors_are_retried() {
    let refused = |code, retry_after| KubeError::Refused {
        server: String::new(),
        what: String::new(),
        code,
        reason: String::new(),
        message: String::new(),
        retry_after,
    };
    for (error, retryable) in [
        (refused(401, 0), false),
        (refused(403, 0), false),
        (refused(409, 0), false),
        (refused(409, 1), true),
        (refused(429, 0), true),
        (refused(500, 0), true),
        (refused(503, 0), true),
        (KubeError::Kubeconfig { path: "k".into(), message: String::new() }, false),
        (
            KubeError::Unreachable {
                server: String::new(),
                what: String::new(),
                message: String::new(),
                retry_after: 0,
            },
            true,
        ),
    ] {
        assert_eq!(is_retryable(&error), retryable, "{error}");
    }
}
