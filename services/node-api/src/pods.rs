//! `/pods`: every pod of the node with its status.

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
use crate::failure::Failure;

/// How long pod-sync may take from one pod to the next.
const BETWEEN_PODS: Duration = Duration::from_secs(10);

const HEAD: &str = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":"#;

/// `GET /pods`: a PodList whose items are the bytes that pod-sync sent, one in memory at a time.
///
/// A stream that breaks on the way breaks the connection, so that no client takes half a list for a whole one.
pub(crate) async fn list(State(app): State<App>) -> Result<Response, Failure> {
    let mut documents = documents(&app).await?;
    let first = documents.try_next().await.map_err(failed)?;
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

/// The documents of pod-sync, each within a bound of the one before.
pub(crate) async fn documents(
    app: &App,
) -> Result<impl Stream<Item = Result<PodDocument, Status>> + Unpin + Send + use<>, Failure> {
    let peer = app.peer(ServiceName::PodSync);
    let response = PodSyncClient::new(peer.channel()).list_pods(ListPodsRequest {}).await.map_err(failed)?;
    Ok(Box::pin(stream::try_unfold(response.into_inner(), next)))
}

async fn next(
    mut documents: Streaming<PodDocument>,
) -> Result<Option<(PodDocument, Streaming<PodDocument>)>, Status> {
    match tokio::time::timeout(BETWEEN_PODS, documents.message()).await {
        Ok(next) => Ok(next?.map(|document| (document, documents))),
        Err(_) => Err(Status::deadline_exceeded("pod-sync has stopped in the middle of its list of pods")),
    }
}

/// A pod that was asked for by name.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) uid: String,
    pub(crate) pod_json: Bytes,
}

/// The pod of that name; one that has ended only when no other has the name.
pub(crate) async fn find(app: &App, namespace: &str, name: &str) -> Result<Option<Found>, Failure> {
    let mut documents = documents(app).await?;
    let mut ended = None;
    while let Some(document) = documents.try_next().await.map_err(failed)? {
        if document.namespace == namespace && document.name == name {
            let found = Found { uid: document.uid, pod_json: document.pod_json };
            if !document.finished {
                return Ok(Some(found));
            }
            ended = Some(found);
        }
    }
    Ok(ended)
}

pub(crate) fn failed(status: Status) -> Failure {
    Failure::of_peer("pod-sync", &status)
}
