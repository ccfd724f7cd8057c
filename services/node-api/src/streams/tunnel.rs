//! A port-forward in SPDY, carried by a WebSocket (node-and-api.md §8.5): its messages are the bytes of SPDY, which is not looked
//! at.

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use hyper::upgrade::OnUpgrade;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::CancellationToken;
use keelson_spdy::STREAMS_HEADER;
use pb::stream_start::What;

use super::pump::{LONGEST, heard, say};
use super::websocket::{self, FromClient, Handshake, ToClient};
use super::{Answered, Caller, told};

/// What the name of a tunnel begins with; the version of the streams follows.
const TUNNEL: &str = "SPDY/3.1+";
/// A frame of SPDY has no more than this beside its payload; a message is a piece of the stream, wherever it was cut.
const PIECE: usize = 32 << 10;

/// Whether a subprotocol is a tunnel.
pub(super) fn is_spoken(protocol: &str) -> bool {
    protocol.starts_with(TUNNEL)
}

/// Connects with the ports of a pod.
pub(super) async fn connect(
    caller: Caller<'_>,
    what: What,
    handshake: Handshake,
    mut request: Request,
) -> Result<Response, Response> {
    let client = hyper::upgrade::on(&mut request);
    let versions: Vec<&str> =
        handshake.protocols.iter().filter_map(|protocol| protocol.strip_prefix(TUNNEL)).collect();
    let answered = caller.connect_in_spdy(what, &versions).await?;
    let chosen = told(&answered.head, STREAMS_HEADER).unwrap_or_default();
    if !versions.contains(&chosen) {
        let text = format!("the container runtime answers with {chosen:?}, which was not asked for");
        return Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response());
    }
    let answer = handshake.answer(&format!("{TUNNEL}{chosen}"));
    tokio::spawn(run(caller.app.shutdown(), client, answered));
    Ok(answer)
}

async fn run(shutdown: CancellationToken, client: OnUpgrade, mut answered: Answered) {
    let Some((mut to_client, mut from_client)) = websocket::open(client).await else { return };
    // Cancel-safe: when one of them has ended, nothing of the others is needed any more.
    let is_there = tokio::select! {
        () = input(&mut from_client, &answered.to_runtime) => false,
        is_there = output(&mut answered.from_runtime, &mut to_client) => is_there,
        () = tokio::time::sleep(LONGEST) => true,
        () = shutdown.cancelled() => true,
    };
    if is_there {
        websocket::close(to_client, from_client).await;
    }
}

/// Hands on what the client says, until it has gone.
async fn input(from_client: &mut FromClient, to_runtime: &tokio::sync::mpsc::Sender<pb::StreamRequest>) {
    while let Some(bytes) = websocket::next(from_client).await {
        for piece in bytes.chunks(PIECE) {
            if !say(to_runtime, piece.to_vec()).await {
                // What it has said last is still to be read.
                return std::future::pending().await;
            }
        }
    }
}

/// Hands on what the runtime says, until that has ended; false: the client has gone.
async fn output(from_runtime: &mut tonic::Streaming<pb::StreamResponse>, to_client: &mut ToClient) -> bool {
    while let Some(bytes) = heard(from_runtime).await {
        if !websocket::send(to_client, bytes).await {
            return false;
        }
    }
    true
}
