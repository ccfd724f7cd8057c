//! Calls: requests, errors, the rate limit, metrics.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::calls::{Patch, within};
use crate::connect::KubeApi;
use crate::error::KubeError;
use crate::fake::{Answer, FakeApi};
use crate::limit::Limiter;
use crate::metrics::RestMetrics;
use crate::resource::{Range, Resource};

#[tokio::test]
async fn writes_use_the_right_method_path_and_body() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.method.as_str() {
        "DELETE" => Answer::refusal(404, "NotFound", "gone"),
        "PUT" => Answer::refusal(409, "Conflict", "newer"),
        _ => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let api =
        KubeApi::new(server.kubeconfig(folder.path(), &json!({}), &json!({"token": "t"})), "kubelet/test");
    let object = json!({"metadata": {"name": "x"}});
    api.create(Resource::POD, Some("d"), &object).await.unwrap();
    assert!(api.replace(Resource::LEASE, Some("l"), &object).await.unwrap_err().is_conflict());
    api.patch(Resource::NODE, None, "x", Some("status"), (Patch::Strategic, &object)).await.unwrap();
    api.patch(Resource::NODE, None, "x", None, (Patch::Merge, &object)).await.unwrap();
    assert!(!api.delete(Resource::POD, Some("d"), "x", &json!({})).await.unwrap());
    let asked: Vec<String> = server
        .asked()
        .into_iter()
        .map(|asked| format!("{} {} {} {}", asked.method, asked.path, asked.content_type, asked.body))
        .collect();
    let body = object.to_string();
    assert_eq!(
        asked,
        [
            format!("POST /api/v1/namespaces/d/pods application/json {body}"),
            format!("PUT /apis/coordination.k8s.io/v1/namespaces/l/leases/x application/json {body}"),
            format!("PATCH /api/v1/nodes/x/status application/strategic-merge-patch+json {body}"),
            format!("PATCH /api/v1/nodes/x application/merge-patch+json {body}"),
            "DELETE /api/v1/namespaces/d/pods/x application/json {}".to_owned(),
        ]
    );
}

#[tokio::test]
async fn proxy_answers_are_not_server_answers_and_retry_after_always_counts() {
    const SORRY: &str = "<html>\n<h1>no such page</h1></html>";
    const BUSY: &str = "Too many requests, please try again later.";
    let status = |code, reason, seconds: u32| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
            "reason": reason, "message": "m", "details": {"retryAfterSeconds": seconds}});
        Answer::Whole(code, status.to_string())
    };
    type Case = (&'static str, u16, &'static str, u32, &'static str);
    let cases: [Case; 9] = [
        // Path, code (0: none), reason, seconds, a part of the text.
        ("status-404", 404, "NotFound", 0, "refuses"),
        ("unserved", 404, "", 0, "refuses"),
        ("page-404", 0, "", 0, "404 Not Found is no word of a Kubernetes API server"),
        ("page-503", 0, "", 7, "something answers in its place: \"<html> <h1>no such page</h1></html>\""),
        ("elsewhere", 0, "", 0, "302 Found"),
        ("busy", 429, "TooManyRequests", 3, BUSY),
        ("page-403", 403, "Forbidden", 0, "no such page"),
        ("status-503", 503, "ServiceUnavailable", 9, "refuses"),
        ("json-404", 0, "", 0, "404 Not Found"),
    ];
    let server = FakeApi::start(move |asked| match asked.path.rsplit('/').next().unwrap() {
        "status-404" => status(404, "NotFound", 0),
        "unserved" => status(404, "", 0),
        "page-404" => Answer::Page(404, SORRY, ""),
        "page-503" => Answer::Page(503, SORRY, "7"),
        "elsewhere" => Answer::Page(302, "", "Wed, 21 Oct 2026 07:28:00 GMT"),
        "busy" => Answer::Page(429, BUSY, " 3"),
        "page-403" => Answer::Page(403, SORRY, ""),
        "status-503" => status(503, "ServiceUnavailable", 9),
        "json-404" => Answer::Page(404, "{\"error\": \"no such route\"}", ""),
        other => unreachable!("{other}"),
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let api = KubeApi::new(server.kubeconfig(folder.path(), &json!({}), &json!({})), "kubelet/test");
    for (name, code, reason, seconds, part) in cases {
        let found = api.get(Resource::NODE, None, name).await;
        if name == "status-404" {
            assert!(found.unwrap().is_none());
            assert!(!api.delete(Resource::NODE, None, name, &json!({})).await.unwrap());
            continue;
        }
        let error = found.unwrap_err();
        assert_eq!((error.code().unwrap_or(0), error.retry_after()), (code, seconds), "{error}");
        assert!(!error.is_not_found() && error.to_string().contains(part), "{name}: {error}");
        if let KubeError::Refused { reason: actual, .. } = &error {
            assert_eq!(actual, reason, "{error}");
        }
        assert_eq!(error.is_retryable(), code == 0 || code == 429 || code >= 500, "{error}");
        api.delete(Resource::NODE, None, name, &json!({})).await.unwrap_err();
    }
}

#[tokio::test]
async fn rate_limit_applies_to_calls_and_watches_except_of_an_unlimited_copy() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match asked.path.contains("watch=1") {
        true => Answer::Open(Vec::new()),
        false => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let host = server.url.strip_prefix("http://").unwrap().to_owned();
    let metrics = keelson_service_kit::Metrics::new();
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({}));
    let free = KubeApi::counted(kubeconfig, "kubelet/test", RestMetrics::registered(&metrics));
    let api = free.clone().limited(Limiter::new(10, 1));
    let begun = Instant::now();
    api.get(Resource::NODE, None, "x").await.unwrap();
    let _watch = api.watch(&Range::all(Resource::NODE), "1").await.unwrap();
    api.get(Resource::NODE, None, "x").await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
    for _ in 0..5 {
        free.get(Resource::NODE, None, "x").await.unwrap();
    }
    let text = metrics.text();
    let line = format!("rest_client_rate_limiter_duration_seconds_count{{verb=\"GET\",host=\"{host}\"}} 3\n");
    assert!(text.contains(&line), "{text}");
}

#[tokio::test]
async fn rest_client_requests_are_counted_by_code_method_and_host() {
    let folder = tempfile::tempdir().unwrap();
    let server = FakeApi::start(|asked| match (asked.method.as_str(), asked.path.contains("watch=1")) {
        ("PUT", _) => Answer::refusal(409, "Conflict", "newer"),
        ("DELETE", _) => Answer::Nothing,
        (_, true) => Answer::Open(Vec::new()),
        _ => Answer::json(&json!({"metadata": {"name": "x"}})),
    })
    .await;
    let host = server.url.strip_prefix("http://").unwrap().to_owned();
    let metrics = keelson_service_kit::Metrics::new();
    let kubeconfig = server.kubeconfig(folder.path(), &json!({}), &json!({}));
    let api = KubeApi::counted(kubeconfig, "kubelet/test", RestMetrics::registered(&metrics));
    let object = json!({"metadata": {"name": "x"}});
    api.get(Resource::NODE, None, "x").await.unwrap();
    api.get(Resource::NODE, None, "x").await.unwrap();
    api.replace(Resource::NODE, None, &object).await.unwrap_err();
    let hangs = api.delete(Resource::NODE, None, "x", &object);
    tokio::time::timeout(Duration::from_millis(200), hangs).await.unwrap_err();
    let range = Range { resource: Resource::NODE, namespace: None, fields: None };
    let _watch = api.watch(&range, "1").await.unwrap();
    drop(server);
    api.give_up_connection();
    api.create(Resource::NODE, None, &object).await.unwrap_err();

    let text = metrics.text();
    for (code, method, count) in
        [("200", "GET", 3), ("409", "PUT", 1), ("<error>", "DELETE", 1), ("<error>", "POST", 1)]
    {
        let line = format!(
            "rest_client_requests_total{{code=\"{code}\",method=\"{method}\",host=\"{host}\"}} {count}\n"
        );
        assert!(text.contains(&line), "{line}{text}");
    }
    for (family, verb, count) in [
        ("rest_client_request_duration_seconds", "GET", 2),
        ("rest_client_request_size_bytes", "PUT", 1),
        ("rest_client_response_size_bytes", "GET", 2),
    ] {
        let line = format!("{family}_count{{verb=\"{verb}\",host=\"{host}\"}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
    let none = "rest_client_response_size_bytes_count{verb=\"PUT\"";
    assert!(!text.contains(none), "a refusal has no size: {text}");
}

#[tokio::test(start_paused = true)]
async fn hanging_server_times_out() {
    let call = std::future::pending::<Result<(), kube::Error>>();
    let error = within("https://a", "pods", call).await.unwrap_err().to_string();
    assert_eq!(error, "the API server https://a does not answer pods: not within 30 s");
}
