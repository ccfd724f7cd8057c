//! A port-forward over SPDY, tunnelled through a WebSocket (node-and-api.md §8.5). Its messages contain the bytes of SPDY, which
//! are not parsed.

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use hyper::upgrade::OnUpgrade;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::CancellationToken;
use keelson_spdy::STREAMS_HEADER;
use pb::stream_start::What;

use super::pump::{MAX_DURATION, next_from_runtime, send_to_runtime};
use super::websocket::{self, FromClient, Handshake, ToClient};
use super::{Connector, RuntimeStream, response_header};

/// The prefix of a tunnel's subprotocol; the stream protocol version follows.
const TUNNEL_PREFIX: &str = "SPDY/3.1+";
/// Messages to the runtime have at most this many bytes; they may split SPDY frames anywhere.
const MAX_MESSAGE_BYTES: usize = 32 << 10;

/// Whether a subprotocol is a tunnel.
pub(super) fn is_supported(protocol: &str) -> bool {
    protocol.starts_with(TUNNEL_PREFIX)
}

/// Connects the client with the ports of a pod.
pub(super) async fn connect(
    connector: Connector<'_>,
    what: What,
    handshake: Handshake,
    mut request: Request,
) -> Result<Response, Response> {
    let client = hyper::upgrade::on(&mut request);
    let versions: Vec<&str> =
        handshake.protocols.iter().filter_map(|protocol| protocol.strip_prefix(TUNNEL_PREFIX)).collect();
    let stream = connector.connect_in_spdy(what, &versions).await?;
    let chosen = response_header(&stream.head, STREAMS_HEADER).unwrap_or_default();
    if !versions.contains(&chosen) {
        let text =
            format!("the container runtime selected the stream protocol {chosen:?}, which was not requested");
        return Err((StatusCode::INTERNAL_SERVER_ERROR, text).into_response());
    }
    let response = handshake.response(&format!("{TUNNEL_PREFIX}{chosen}"));
    keelson_service_kit::spawn("tunnel", run(connector.app.shutdown(), client, stream));
    Ok(response)
}

async fn run(shutdown: CancellationToken, client: OnUpgrade, mut stream: RuntimeStream) {
    let Some((mut to_client, mut from_client)) = websocket::open(client).await else { return };
    // Cancel-safe: when one arm ends, the state of the others is no longer needed.
    let is_connected = tokio::select! {
        () = forward_input(&mut from_client, &stream.to_runtime) => false,
        is_connected = forward_output(&mut stream.from_runtime, &mut to_client) => is_connected,
        () = tokio::time::sleep(MAX_DURATION) => true,
        () = shutdown.cancelled() => true,
    };
    if is_connected {
        websocket::close(to_client, from_client).await;
    }
}

/// Forwards the client's bytes until it disconnects.
async fn forward_input(
    from_client: &mut FromClient,
    to_runtime: &tokio::sync::mpsc::Sender<pb::StreamRequest>,
) {
    while let Some(bytes) = websocket::next(from_client).await {
        for piece in bytes.chunks(MAX_MESSAGE_BYTES) {
            if !send_to_runtime(to_runtime, piece.to_vec()).await {
                // The runtime takes no more input, but its last output is still to be forwarded.
                return std::future::pending().await;
            }
        }
    }
}

/// Forwards the runtime's bytes until its stream ends; `false` if the client has disconnected.
async fn forward_output(
    from_runtime: &mut tonic::Streaming<pb::StreamResponse>,
    to_client: &mut ToClient,
) -> bool {
    while let Some(bytes) = next_from_runtime(from_runtime).await {
        if !websocket::send(to_client, bytes).await {
            return false;
        }
    }
    true
}
