//! `POST /run`: runs a command and responds with its output (node-and-api.md §8.6).

use axum::extract::{Path, Query, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use pb::exec_response::Item as ResponseItem;

use super::{MaybeUser, QueryPairs, Target, error_response, find, require_user};
use crate::App;

/// Output beyond this many bytes is dropped.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// Runs `cmd`, split at spaces, without stdin and terminal; 500 if it fails or its exit code is not 0.
pub(super) async fn run(
    State(app): State<App>,
    user: MaybeUser,
    Path(target): Path<Target>,
    Query(pairs): QueryPairs,
    request: Request,
) -> Result<Response, Response> {
    let user = require_user(user, &request, &[Method::POST])?;
    let pod = find(&app, &target).await.map_err(axum::response::IntoResponse::into_response)?;
    let line = pairs.into_iter().find(|(key, _)| key == "cmd").map(|(_, value)| value).unwrap_or_default();
    tracing::info!(
        user = user.name,
        namespace = target.namespace,
        pod = target.pod,
        container = target.container,
        "running a command in a container"
    );
    let start = pb::ExecStart {
        pod_uid: pod.uid,
        container: target.container.clone(),
        command: line.split(' ').map(ToOwned::to_owned).collect(),
        ..pb::ExecStart::default()
    };
    let request = pb::ExecRequest { item: Some(pb::exec_request::Item::Start(start)) };
    let error = |status| error_response(&target.container, &status);
    let peer = app.peer(ServiceName::RuntimeShim);
    let response = RuntimeClient::new(peer.channel()).exec(stream::iter([request])).await;
    let mut messages = response.map_err(error)?.into_inner();
    let (mut output, mut code) = (Vec::new(), None);
    while let Some(message) = messages.message().await.map_err(error)? {
        match message.item {
            Some(ResponseItem::Stdout(bytes) | ResponseItem::Stderr(bytes)) => {
                let room = MAX_OUTPUT_BYTES.saturating_sub(output.len());
                output.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Some(ResponseItem::ExitCode(exit_code)) => code = Some(exit_code),
            Some(ResponseItem::Started(_)) | None => {}
        }
    }
    match code {
        // The content type of the kubelet, although the output is not JSON.
        Some(0) => Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response()),
        Some(code) => {
            let text = format!("command '{line}' exited with {code}: {}", String::from_utf8_lossy(&output));
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
        None => {
            let text = "the exit code of the command is not known, and it may still run";
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
    }
}
