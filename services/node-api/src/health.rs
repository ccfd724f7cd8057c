//! `/healthz` and its checks.

use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use keelson_config::ServiceName;
use keelson_proto::keelson::admin::v1::GetProgressRequest;
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use tonic::Request;

use crate::{App, Slis};

/// How long pod-sync may take to answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// The name of a check and its result.
pub type Check<'a> = (&'a str, Result<(), String>);

type QueryPairs = Query<Vec<(String, String)>>;

/// `GET /healthz` of the kubelet API.
pub(crate) async fn all(State(app): State<App>, Query(query): QueryPairs) -> Response {
    let skipped = query.iter().any(|(key, value)| key == "exclude" && value == "syncloop");
    let sync_loop = if skipped { Ok(()) } else { sync_loop(&app).await };
    respond(&app.slis, &[("ping", Ok(())), ("log", Ok(())), ("syncloop", sync_loop)], &query)
}

/// `GET /healthz/<check>` of the kubelet API. As in a kubelet, it does not count in `/metrics/slis` (node-and-api.md §15.5).
pub(crate) async fn one(State(app): State<App>, Path(check): Path<String>) -> Response {
    match check.as_str() {
        "ping" | "log" => single(Ok(())),
        "syncloop" => single(sync_loop(&app).await),
        _ => crate::not_found().await.into_response(),
    }
}

/// `GET /healthz` of the health port.
pub(crate) async fn ping_all(State(slis): State<Slis>, Query(query): QueryPairs) -> Response {
    respond(&slis, &[("ping", Ok(()))], &query)
}

/// `GET /healthz/ping` of the health port.
pub(crate) async fn ping() -> Response {
    single(Ok(()))
}

/// Whether all loops of pod-sync are making progress.
async fn sync_loop(app: &App) -> Result<(), String> {
    let peer = app.peer(ServiceName::PodSync);
    let mut request = Request::new(GetProgressRequest {});
    request.set_timeout(DEADLINE);
    let progress = AdminClient::new(peer.channel())
        .get_progress(request)
        .await
        .map_err(|status| format!("pod-sync does not answer: {}", status.message()))?;
    match progress.get_ref().loops.iter().find(|l| l.silent_ms > l.stuck_after_ms) {
        None => Ok(()),
        Some(l) => {
            Err(format!("the loop {} of pod-sync has made no progress for {} s", l.name, l.silent_ms / 1000))
        }
    }
}

fn respond(slis: &Slis, checks: &[Check<'_>], query: &[(String, String)]) -> Response {
    let excluded: Vec<&str> =
        query.iter().filter(|(key, _)| key == "exclude").map(|(_, value)| value.as_str()).collect();
    let verbose = query.iter().any(|(key, _)| key == "verbose");
    slis.observe(checks, &excluded);
    for (name, result) in checks.iter().filter(|(name, _)| !excluded.contains(name)) {
        if let Err(reason) = result {
            tracing::warn!(check = name, error = reason, "a health check failed");
        }
    }
    let (healthy, body) = report(checks, &excluded, verbose);
    text(if healthy { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR }, body)
}

fn single(result: Result<(), String>) -> Response {
    match result {
        Ok(()) => text(StatusCode::OK, "ok".into()),
        Err(reason) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("internal server error: {reason}\n")),
    }
}

fn text(status: StatusCode, body: String) -> Response {
    let headers =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, body).into_response()
}

/// Whether all checks except the excluded ones pass, and the response body (node-and-api.md §8.3). The body of a failure is
/// always verbose, and its reason is only logged.
pub fn report(checks: &[Check<'_>], excluded: &[&str], verbose: bool) -> (bool, String) {
    let mut body = String::new();
    let mut healthy = true;
    for (name, result) in checks {
        let line = match result {
            _ if excluded.contains(name) => format!("[+]{name} excluded: ok\n"),
            Ok(()) => format!("[+]{name} ok\n"),
            Err(_) => {
                healthy = false;
                format!("[-]{name} failed: reason withheld\n")
            }
        };
        body.push_str(&line);
    }
    let known = |name: &&&str| checks.iter().any(|(check, _)| *check == **name);
    let mut unknown: Vec<String> =
        excluded.iter().filter(|name| !known(name)).map(|name| format!("{name:?}")).collect();
    unknown.dedup();
    if !unknown.is_empty() {
        let names = unknown.join(", ");
        body.push_str(&format!("warn: some health checks cannot be excluded: no matches for {names}\n"));
    }
    if !healthy {
        body.push_str("healthz check failed\n");
    } else if verbose {
        body.push_str("healthz check passed\n");
    } else {
        "ok".clone_into(&mut body);
    }
    (healthy, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn healthz_bodies_are_the_kubelets() {
        let good: &[Check<'_>] = &[("ping", Ok(())), ("syncloop", Ok(()))];
        let bad: &[Check<'_>] = &[("ping", Ok(())), ("syncloop", Err("stuck".into()))];
        let warn = "warn: some health checks cannot be excluded: no matches for \"x\"\n";
        let table = [
            (good, vec![], false, true, "ok".to_owned()),
            (good, vec![], true, true, "[+]ping ok\n[+]syncloop ok\nhealthz check passed\n".into()),
            (
                bad,
                vec![],
                false,
                false,
                "[+]ping ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n".into(),
            ),
            (bad, vec!["syncloop"], false, true, "ok".into()),
            (
                bad,
                vec!["syncloop", "x"],
                true,
                true,
                format!("[+]ping ok\n[+]syncloop excluded: ok\n{warn}healthz check passed\n"),
            ),
        ];
        for (checks, excluded, verbose, healthy, body) in table {
            assert_eq!(report(checks, &excluded, verbose), (healthy, body));
        }
    }
}
