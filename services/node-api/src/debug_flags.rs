//! `PUT /debug/flags/v`: changes the verbosity of the logs of all services (node-and-api.md §8.2).
//!
//! As in a kubelet, a service that is restarted has the configured verbosity again. It does not reach init, which
//! serves no requests from the network and refuses the call.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use futures_util::future::join_all;
use keelson_config::{ApiHandlers, ServiceName};
use keelson_proto::keelson::admin::v1::SetVerbosityRequest;
use keelson_proto::keelson::admin::v1::admin_client::AdminClient;
use keelson_service_kit::Peer;
use std::time::Duration;

use crate::App;
use crate::streams::{MaybeUser, authenticated};

/// How long each service may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Maximum length of a body; no number is longer.
const MAX_BODY_BYTES: usize = 1024;

/// The path, unless it is disabled.
pub(crate) fn router(handlers: ApiHandlers) -> Router<App> {
    if handlers.debug_flags {
        Router::new().route("/debug/flags/v", any(set_verbosity))
    } else {
        Router::new()
    }
}

async fn set_verbosity(
    State(app): State<App>,
    user: MaybeUser,
    request: Request,
) -> Result<Response, Response> {
    let user = authenticated(user, &request)?;
    if request.method() != Method::PUT {
        return Err(plain(StatusCode::NOT_ACCEPTABLE, "unsupported http method"));
    }
    let text = body_text(request.into_body()).await.map_err(|text| plain(StatusCode::BAD_REQUEST, &text))?;
    let verbosity = parse_verbosity(&text).map_err(|error| plain(StatusCode::BAD_REQUEST, &error))?;
    tracing::info!(
        event = "log_verbosity_requested",
        verbosity,
        user = user.name,
        "changing the log verbosity"
    );
    let calls = join_all(app.peers.iter().map(|peer| set_at(peer, verbosity))).await;
    let mut errors: Vec<String> = calls.into_iter().filter_map(Result::err).collect();
    if let Err(error) = app.ctx.set_log_verbosity(verbosity) {
        errors.push(format!("node-api: {error}"));
    }
    if errors.is_empty() {
        let text = format!("successfully set klog.logging.verbosity to {text}");
        return Ok(plain(StatusCode::OK, &text));
    }
    let text = format!("failed set klog.logging.verbosity {text} in: {}", errors.join("; "));
    Err(plain(StatusCode::SERVICE_UNAVAILABLE, &text))
}

/// A line of text, as the kubelet writes it on this path.
fn plain(status: StatusCode, text: &str) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/plain"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, format!("{text}\n")).into_response()
}

async fn body_text(body: Body) -> Result<String, String> {
    let bytes = to_bytes(body, MAX_BODY_BYTES).await;
    let bytes = bytes.map_err(|error| format!("error reading request body: {error}"))?;
    String::from_utf8(bytes.into()).map_err(|_| "error reading request body: it is not UTF-8".to_owned())
}

/// Parses a verbosity as Go's `strconv.ParseInt` does for 32 bits.
fn parse_verbosity(text: &str) -> Result<i32, String> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    text.parse::<i32>().map_err(|_| {
        let why = if is_number { "value out of range" } else { "invalid syntax" };
        format!("failed set klog.logging.verbosity {text}: strconv.ParseInt: parsing {text:?}: {why}")
    })
}

/// Sets the verbosity of one service; the error names it.
async fn set_at((name, peer): &(ServiceName, Peer), verbosity: i32) -> Result<(), String> {
    let mut request = tonic::Request::new(SetVerbosityRequest { verbosity });
    request.set_timeout(DEADLINE);
    let set = AdminClient::new(peer.channel()).set_verbosity(request).await;
    set.map(drop).map_err(|status| {
        let text = status.message();
        if text.contains(name.as_str()) { text.to_owned() } else { format!("{name}: {text}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbosity_is_parsed_as_by_the_kubelet() {
        for (text, expected) in
            [("0", 0), ("6", 6), ("+4", 4), ("-1", -1), ("007", 7), ("2147483647", i32::MAX)]
        {
            assert_eq!(parse_verbosity(text), Ok(expected));
        }
        for (text, why) in [
            ("", "invalid syntax"),
            ("x", "invalid syntax"),
            (" 4", "invalid syntax"),
            ("4\n", "invalid syntax"),
            ("1.5", "invalid syntax"),
            ("-", "invalid syntax"),
            ("2147483648", "value out of range"),
            ("99999999999999999999", "value out of range"),
        ] {
            let error = format!(
                "failed set klog.logging.verbosity {text}: strconv.ParseInt: parsing {text:?}: {why}"
            );
            assert_eq!(parse_verbosity(text), Err(error));
        }
    }
}
