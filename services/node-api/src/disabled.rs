//! Paths that a setting has turned off (node-and-api.md §8.1, §8.2): 405, with a line that says so.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use keelson_config::ApiHandlers;

use crate::App;

/// What there is for debugging. `/debug/flags/v` is none of it: without debugging it is a path as unknown as any.
const DEBUGGING: [&str; 8] =
    ["run", "exec", "attach", "portForward", "containerLogs", "runningpods", "debug/pprof", "logs"];

/// All that is for debugging, on a port that has nothing of it.
pub(crate) fn debugging() -> Router<App> {
    DEBUGGING.into_iter().fold(Router::new(), |router, prefix| {
        below(router, &format!("/{prefix}"), "Debug endpoints are disabled.\n")
    })
}

/// What is turned off by itself where there is something for debugging.
pub(crate) fn of(handlers: ApiHandlers) -> Router<App> {
    let mut router = Router::new();
    if !handlers.system_log {
        router = below(router, "/logs", "logs endpoint is disabled.\n");
    }
    if !handlers.profiling {
        router = below(router, "/debug/pprof", "profiling endpoint is disabled.\n");
    }
    if !handlers.debug_flags {
        router = router.route("/debug/flags/v", any(async || off("flags endpoint is disabled.\n")));
    }
    router
}

/// The path itself and all that is below it.
fn below(router: Router<App>, path: &str, text: &'static str) -> Router<App> {
    ["", "/", "/{*rest}"].into_iter().fold(router, |router, end| {
        router.route(&format!("{path}{end}"), any(move || async move { off(text) }))
    })
}

fn off(text: &'static str) -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], text).into_response()
}
