//! `POST /checkpoint`: an archive of a running container, written by the container runtime (node-and-api.md §8.2).

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use keelson_config::{ApiHandlers, ServiceName};
use keelson_proto::keelson::runtime::v1::CheckpointContainerRequest;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use keelson_service_kit::status::reason;
use serde_json::json;

use crate::App;
use crate::api_error::ApiError;
use crate::log_target::has_container;
use crate::pods::find;
use crate::streams::{MaybeUser, authenticated};

/// Maximum time for a checkpoint; runtime-shim has the same limit. It is far from what a gRPC deadline cannot express.
const LONGEST: Duration = Duration::from_secs(90 * 24 * 3600);
/// Time for runtime-shim in addition to that of the runtime: it looks up the container, and answers.
const MARGIN: Duration = Duration::from_secs(5);

/// The path, if the feature gate is on.
pub(crate) fn router(handlers: ApiHandlers) -> Router<App> {
    if handlers.checkpoint {
        Router::new().route("/checkpoint/{namespace}/{pod}/{container}", post(checkpoint))
    } else {
        Router::new()
    }
}

async fn checkpoint(
    State(app): State<App>,
    user: MaybeUser,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    Query(pairs): Query<Vec<(String, String)>>,
    request: Request,
) -> Result<Response, Response> {
    let user = authenticated(user, &request)?;
    let not_found = |text: String| ApiError::new(StatusCode::NOT_FOUND, text).into_response();
    let found = find(&app, &namespace, &pod).await.map_err(ApiError::into_response)?;
    let found = found.ok_or_else(|| not_found("pod does not exist".to_owned()))?;
    if !has_container(&found.pod_json, &container) {
        return Err(not_found(format!("container {container} does not exist")));
    }
    // As in a kubelet, an unparsable timeout is 404.
    let timeout_seconds =
        timeout(&pairs).ok_or_else(|| not_found("cannot parse value of timeout parameter".to_owned()))?;
    tracing::info!(user = user.name, namespace, pod, container, "checkpointing a container");
    let message = CheckpointContainerRequest {
        pod_uid: found.uid,
        namespace: namespace.clone(),
        name: pod.clone(),
        container: container.clone(),
        timeout_seconds,
    };
    let peer = app.peer(ServiceName::RuntimeShim);
    let runtime = Duration::from_millis(app.ctx.live.now().runtime.request_timeout_ms);
    let mut request = tonic::Request::new(message);
    request.set_timeout(deadline(timeout_seconds, runtime));
    match RuntimeClient::new(peer.channel()).checkpoint_container(request).await {
        Ok(written) => {
            let body = json!({"items": [written.into_inner().path]}).to_string();
            Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
        }
        // The service has answered: the kubelet's text.
        Err(status) if reason(&status).is_some() => {
            let text =
                format!("checkpointing of {namespace}/{pod}/{container} failed ({})", status.message());
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
        Err(status) => Err(ApiError::from_peer("runtime-shim", &status).into_response()),
    }
}

/// How long runtime-shim may take: the timeout in the request or `runtimeRequestTimeout`, whichever is longer, and
/// [`MARGIN`].
fn deadline(timeout_seconds: i64, runtime: Duration) -> Duration {
    let timeout = Duration::from_secs(u64::try_from(timeout_seconds).unwrap_or(0));
    timeout.max(runtime).min(LONGEST) + MARGIN
}

/// The last `timeout` counts; 0 without one; `None` if it is no number.
fn timeout(pairs: &[(String, String)]) -> Option<i64> {
    let last = pairs.iter().rev().find(|(key, _)| key == "timeout");
    last.map_or(Some(0), |(_, value)| value.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_may_take_the_longer_timeout_up_to_a_maximum() {
        let runtime = Duration::from_secs(120);
        for (timeout, seconds) in
            [(0, 125), (-1, 125), (120, 125), (300, 305), (7_776_001, 7_776_005), (i64::MAX, 7_776_005)]
        {
            assert_eq!(deadline(timeout, runtime), Duration::from_secs(seconds), "{timeout}");
            // Must not panic, as it does for durations that a gRPC deadline cannot express.
            tonic::Request::new(()).set_timeout(deadline(timeout, runtime));
        }
    }
}
