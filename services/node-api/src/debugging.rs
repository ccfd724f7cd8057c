//! `/exec`, `/attach`, `/portForward` and `/run`: the ways into a container.
//!
//! Whoever gets through one of them may do in the container what its user may, and mostly that is root. The kubelet
//! lets in whom it has authenticated and the control plane has authorized. Here nobody is authenticated yet, and
//! loopback is no substitute: every local user, and every process of a pod in the host's network, reaches it. So each
//! request is answered as one without an identity (node-and-api.md §7): 401, body `Unauthorized`, whatever its method,
//! parameters and pod. Nothing is asked of a neighbour, and this service has no right to run anything: `Runtime.Exec` is
//! for operators, and the addresses of the runtime's streams for root.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::any;

use crate::App;

/// The paths of node-and-api.md §8.2; anything else below them is unknown, as elsewhere.
const PATHS: [&str; 8] = [
    "/exec/{namespace}/{pod}/{container}",
    "/exec/{namespace}/{pod}/{uid}/{container}",
    "/attach/{namespace}/{pod}/{container}",
    "/attach/{namespace}/{pod}/{uid}/{container}",
    "/portForward/{namespace}/{pod}",
    "/portForward/{namespace}/{pod}/{uid}",
    "/run/{namespace}/{pod}/{container}",
    "/run/{namespace}/{pod}/{uid}/{container}",
];

pub(crate) fn router() -> Router<App> {
    PATHS.into_iter().fold(Router::new(), |router, path| router.route(path, any(nobody_is_known)))
}

/// Prefixes of the read-only port that lead to nothing, with the answer that says so (node-and-api.md §8.1).
pub(crate) fn disabled() -> Router<App> {
    let prefixes =
        ["run", "exec", "attach", "portForward", "containerLogs", "runningpods", "debug/pprof", "logs"];
    prefixes.into_iter().fold(Router::new(), |router, prefix| {
        let is_disabled =
            || any(async || (StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n"));
        router
            .route(&format!("/{prefix}/"), is_disabled())
            .route(&format!("/{prefix}/{{*rest}}"), is_disabled())
    })
}

async fn nobody_is_known(request: axum::extract::Request) -> (StatusCode, &'static str) {
    tracing::warn!(
        path = request.uri().path(),
        method = %request.method(),
        "refused a way into a container: requests are not authenticated yet; `keelson exec` is for operators"
    );
    (StatusCode::UNAUTHORIZED, "Unauthorized")
}
