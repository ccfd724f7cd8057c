//! `/pods`: all pods of the node with their status.

use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use keelson_config::ServiceName;
use keelson_proto::keelson::pod_sync::v1::pod_sync_client::PodSyncClient;
use keelson_proto::keelson::pod_sync::v1::{ListPodsRequest, PodDocument};
use tonic::{Status, Streaming};

use crate::App;
use crate::api_error::ApiError;

/// How long pod-sync may take for each pod of the list.
const POD_TIMEOUT: Duration = Duration::from_secs(10);

const HEAD: &str = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":"#;

/// `GET /pods`: a PodList with the unparsed documents of pod-sync, one in memory at a time.
///
/// If the stream from pod-sync breaks, the connection is aborted, so that no client takes a part of the list for all of it.
pub(crate) async fn list(State(app): State<App>) -> Result<Response, ApiError> {
    let mut documents = documents(&app).await?;
    let first = documents.try_next().await.map_err(pod_sync_error)?;
    let body = match first {
        None => Body::from(format!("{HEAD}null}}")),
        Some(first) => {
            let opening: [Result<Bytes, Status>; 2] =
                [Ok(Bytes::from_static(HEAD.as_bytes())), Ok(Bytes::from_static(b"["))];
            let rest = documents
                .map_ok(|next| stream::iter([Ok(Bytes::from_static(b",")), Ok(next.pod_json)]))
                .try_flatten();
            let closing = [Ok(Bytes::from_static(b"]}"))];
            let list = stream::iter(opening)
                .chain(stream::iter([Ok(first.pod_json)]))
                .chain(rest)
                .chain(stream::iter(closing));
            Body::from_stream(list)
        }
    };
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The documents of pod-sync, with a timeout for each.
pub(crate) async fn documents(
    app: &App,
) -> Result<impl Stream<Item = Result<PodDocument, Status>> + Unpin + Send + use<>, ApiError> {
    let peer = app.peer(ServiceName::PodSync);
    let response =
        PodSyncClient::new(peer.channel()).list_pods(ListPodsRequest {}).await.map_err(pod_sync_error)?;
    Ok(Box::pin(stream::try_unfold(response.into_inner(), next)))
}

async fn next(
    mut documents: Streaming<PodDocument>,
) -> Result<Option<(PodDocument, Streaming<PodDocument>)>, Status> {
    match tokio::time::timeout(POD_TIMEOUT, documents.message()).await {
        Ok(next) => Ok(next?.map(|document| (document, documents))),
        Err(_) => Err(Status::deadline_exceeded("pod-sync stopped in the middle of its list of pods")),
    }
}

/// A pod found by name.
#[derive(Debug)]
pub(crate) struct FoundPod {
    pub(crate) uid: String,
    pub(crate) pod_json: Bytes,
}

/// Finds a pod by name; a finished one only if no other pod has the name.
pub(crate) async fn find(app: &App, namespace: &str, name: &str) -> Result<Option<FoundPod>, ApiError> {
    let mut documents = documents(app).await?;
    let mut finished = None;
    while let Some(document) = documents.try_next().await.map_err(pod_sync_error)? {
        if document.namespace == namespace && document.name == name {
            let found = FoundPod { uid: document.uid, pod_json: document.pod_json };
            if !document.finished {
                return Ok(Some(found));
            }
            finished = Some(found);
        }
    }
    Ok(finished)
}

pub(crate) fn pod_sync_error(status: Status) -> ApiError {
    ApiError::from_peer("pod-sync", &status)
}
