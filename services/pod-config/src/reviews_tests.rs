use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex};

use pb::review_token_response::Result as Told;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use super::*;

/// A path and an object that was posted there.
type Posted = Arc<Mutex<Vec<(String, Value)>>>;

/// An API server that gives each request the next answer, and says nothing more when there is none.
async fn server(folder: &Path, answers: Vec<(u16, Value)>) -> (Reviewer, Posted) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let posted = Posted::default();
    let (kept, answers) = (Arc::clone(&posted), Arc::new(Mutex::new(VecDeque::from(answers))));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (kept, answers) = (Arc::clone(&kept), Arc::clone(&answers));
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                while let Some(asked) = request(&mut stream).await {
                    kept.lock().unwrap().push(asked);
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
async fn a_token_is_reviewed_and_its_user_told_whole() {
    let folder = tempfile::tempdir().unwrap();
    let user = json!({"username": "jane", "uid": "u1", "groups": ["ops"], "extra": {"scopes": ["a", "b"]}});
    let answers = vec![
        (201, json!({"status": {"authenticated": true, "user": user}})),
        (201, json!({"status": {"authenticated": false, "error": "the keys cannot be fetched"}})),
        (201, json!({"status": {}})),
    ];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let mut told = Vec::new();
    for _ in 0..3 {
        told.push(reviewer.token("secret").await.unwrap().result.unwrap());
    }
    let rejected = |text: &str| Told::Rejected(text.to_owned());
    assert_eq!(told, [Told::User(jane()), rejected("the keys cannot be fetched"), rejected("")]);
    let (path, review) = posted.lock().unwrap()[0].clone();
    assert_eq!(path, "/apis/authentication.k8s.io/v1/tokenreviews");
    let spec = json!({"token": "secret"});
    assert_eq!(
        review,
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec})
    );
}

#[tokio::test]
async fn access_is_reviewed_for_the_user_as_it_is_and_a_contradiction_is_a_no() {
    let folder = tempfile::tempdir().unwrap();
    let answers = vec![
        (201, json!({"status": {"allowed": true, "reason": "a role"}})),
        (201, json!({"status": {"allowed": false}})),
        (201, json!({"status": {"allowed": true, "denied": true}})),
    ];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let asked = pb::ReviewAccessRequest {
        user: Some(jane()),
        verb: "get".into(),
        resource: "nodes".into(),
        subresource: "metrics".into(),
        name: "n1".into(),
    };
    for (allowed, reason) in [(true, "a role"), (false, ""), (false, "")] {
        let told = reviewer.access(&asked).await.unwrap();
        assert_eq!((told.allowed, told.reason.as_str()), (allowed, reason));
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
async fn trouble_of_the_server_is_asked_through_and_a_refusal_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let answers = vec![refusal(500), refusal(429), (201, json!({"status": {"authenticated": true}}))];
    let (reviewer, posted) = server(folder.path(), answers).await;
    let begun = std::time::Instant::now();
    assert!(matches!(reviewer.token("t").await.unwrap().result, Some(Told::User(_))));
    assert!(begun.elapsed() >= pause(1, 0.0) + pause(2, 0.0), "{:?}", begun.elapsed());
    assert_eq!(posted.lock().unwrap().len(), 3);

    let folder = tempfile::tempdir().unwrap();
    let (reviewer, posted) = server(folder.path(), vec![refusal(403)]).await;
    assert_eq!(reviewer.token("t").await.unwrap_err().code(), Some(403));
    assert_eq!(posted.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn each_question_counts_with_what_was_said_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let status = json!({"status": {"authenticated": true, "allowed": true}});
    let answers = vec![refusal(500), (201, status.clone()), refusal(403), (201, status)];
    let (mut reviewer, _) = server(folder.path(), answers).await;
    let metrics = Metrics::new();
    reviewer.metrics = ReviewMetrics::registered(&metrics);
    reviewer.token("t").await.unwrap();
    reviewer.token("t").await.unwrap_err();
    reviewer.access(&pb::ReviewAccessRequest::default()).await.unwrap();
    let nobody = Reviewer { api: KubeApi::new(folder.path().join("none"), "test"), ..reviewer.clone() };
    nobody.token("t").await.unwrap_err();
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
fn pauses_grow_by_half_and_a_fifth_of_each_is_random() {
    let whole: Vec<u128> = (1..ATTEMPTS).map(|n| pause(n, 0.0).as_millis()).collect();
    assert_eq!(whole, [500, 750, 1125, 1687]);
    assert_eq!(pause(1, 1.0), Duration::from_millis(600));
}

#[test]
fn what_stays_a_no_is_not_asked_again() {
    let refused = |code, retry_after| KubeError::Refused {
        server: String::new(),
        what: String::new(),
        code,
        reason: String::new(),
        message: String::new(),
        retry_after,
    };
    for (error, again) in [
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
        assert_eq!(may_be_answered_later(&error), again, "{error}");
    }
}
