//! `POST /run`: a command whose whole output is the answer (node-and-api.md §8.6).

use axum::extract::{Path, Query, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use keelson_config::ServiceName;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::runtime_client::RuntimeClient;
use pb::exec_response::Item as Told;

use super::{Pairs, Target, Who, find, known, refusal};
use crate::App;

/// The longest output that is gathered; the rest is left out.
const LONGEST: usize = 16 << 20;

/// Runs `cmd`, cut at its spaces, without input and terminal; 500 when it fails or ends with another code than 0.
pub(super) async fn run(
    State(app): State<App>,
    who: Who,
    Path(target): Path<Target>,
    Query(pairs): Pairs,
    request: Request,
) -> Result<Response, Response> {
    let user = known(who, &request, &[Method::POST])?;
    let pod = find(&app, &target).await.map_err(axum::response::IntoResponse::into_response)?;
    let line = pairs.into_iter().find(|(key, _)| key == "cmd").map(|(_, value)| value).unwrap_or_default();
    tracing::info!(
        user = user.name,
        namespace = target.namespace,
        pod = target.pod,
        container = target.container,
        "runs a command"
    );
    let start = pb::ExecStart {
        pod_uid: pod.uid,
        container: target.container.clone(),
        command: line.split(' ').map(ToOwned::to_owned).collect(),
        ..pb::ExecStart::default()
    };
    let ask = pb::ExecRequest { item: Some(pb::exec_request::Item::Start(start)) };
    let refused = |status| refusal(&target.container, &status);
    let peer = app.peer(ServiceName::RuntimeShim);
    let answer = RuntimeClient::new(peer.channel()).exec(stream::iter([ask])).await;
    let mut answers = answer.map_err(refused)?.into_inner();
    let (mut output, mut code) = (Vec::new(), None);
    while let Some(message) = answers.message().await.map_err(refused)? {
        match message.item {
            Some(Told::Stdout(bytes) | Told::Stderr(bytes)) => {
                let room = LONGEST.saturating_sub(output.len());
                output.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Some(Told::ExitCode(ended)) => code = Some(ended),
            Some(Told::Started(_)) | None => {}
        }
    }
    match code {
        // It is no JSON, whatever a kubelet calls it.
        Some(0) => Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response()),
        Some(code) => {
            let text = format!("command '{line}' exited with {code}: {}", String::from_utf8_lossy(&output));
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
        None => {
            let text = "how the command ended is not known, and it may still run";
            Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response())
        }
    }
}
