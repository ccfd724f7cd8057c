//! Paths that a setting disables (node-and-api.md §8.1, §8.2): they answer 405 with an explanation.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use keelson_config::ApiHandlers;

use crate::App;

/// The debugging paths. `/debug/flags/v` is not among them: without debugging handlers it is an unknown path.
const DEBUGGING_PATHS: [&str; 8] =
    ["run", "exec", "attach", "portForward", "containerLogs", "runningpods", "debug/pprof", "logs"];

/// Disables all debugging paths.
pub(crate) fn all_debugging_paths() -> Router<App> {
    DEBUGGING_PATHS.into_iter().fold(Router::new(), |router, prefix| {
        add_prefix(router, &format!("/{prefix}"), "Debug endpoints are disabled.\n")
    })
}

/// Disables the debugging paths whose own switch is off.
pub(crate) fn individual_paths(handlers: ApiHandlers) -> Router<App> {
    let mut router = Router::new();
    if !handlers.system_log {
        router = add_prefix(router, "/logs", "logs endpoint is disabled.\n");
    }
    if !handlers.profiling {
        router = add_prefix(router, "/debug/pprof", "profiling endpoint is disabled.\n");
    }
    if !handlers.debug_flags {
        router =
            router.route("/debug/flags/v", any(async || disabled_response("flags endpoint is disabled.\n")));
    }
    router
}

/// Adds a path and all paths below it.
fn add_prefix(router: Router<App>, path: &str, text: &'static str) -> Router<App> {
    ["", "/", "/{*rest}"].into_iter().fold(router, |router, end| {
        router.route(&format!("{path}{end}"), any(move || async move { disabled_response(text) }))
    })
}

fn disabled_response(text: &'static str) -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], text).into_response()
}
