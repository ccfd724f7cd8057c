//! Forwards bytes between an upgraded connection and runtime-shim.

use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::CancellationToken;
use pb::stream_request::Item as RequestItem;
use pb::stream_response::Item as ResponseItem;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;

/// How long the client may take to receive the 101 response.
pub(super) const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a stream may last (node-and-api.md §8.1).
pub(super) const MAX_DURATION: Duration = Duration::from_secs(4 * 3600);
/// The buffer of one read.
const READ_BYTES: usize = 32 << 10;

/// Forwards bytes until either side closes the stream.
pub(super) async fn run(
    shutdown: CancellationToken,
    client: OnUpgrade,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
) {
    let Ok(Ok(upgraded)) = timeout(UPGRADE_TIMEOUT, client).await else {
        tracing::debug!("a client disconnected before its stream was open");
        return;
    };
    // Cancel-safe: when one arm ends, the state of the others is no longer needed.
    tokio::select! {
        () = forward_both_ways(TokioIo::new(upgraded), from_runtime, to_runtime) => {}
        () = tokio::time::sleep(MAX_DURATION) => {}
        () = shutdown.cancelled() => {}
    }
}

/// Forwards bytes until either side closes the stream; everything that the runtime has sent reaches the client.
pub(super) async fn forward_both_ways(
    client: impl AsyncRead + AsyncWrite,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
) {
    let (reader, writer) = tokio::io::split(client);
    // Cancel-safe: when one arm ends, the state of the other is no longer needed.
    tokio::select! {
        () = forward_from_client(reader, to_runtime) => {}
        () = forward_to_client(from_runtime, writer) => {}
    }
}

/// Forwards the client's bytes until it closes its side.
async fn forward_from_client(
    mut reader: impl AsyncRead + Unpin,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
) {
    let mut piece = vec![0; READ_BYTES];
    loop {
        let count = match reader.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        if !send_to_runtime(&to_runtime, piece[..count].to_vec()).await {
            // The runtime takes no more input, but its last output is still to be forwarded.
            return std::future::pending().await;
        }
    }
}

/// Sends bytes to the runtime; `false` if it takes no more.
pub(super) async fn send_to_runtime(to_runtime: &mpsc::Sender<pb::StreamRequest>, bytes: Vec<u8>) -> bool {
    to_runtime.send(pb::StreamRequest { item: Some(RequestItem::Data(bytes)) }).await.is_ok()
}

/// The next bytes from the runtime; `None` when its stream has ended.
pub(super) async fn next_from_runtime(from_runtime: &mut Streaming<pb::StreamResponse>) -> Option<Vec<u8>> {
    loop {
        match from_runtime.message().await {
            Ok(Some(pb::StreamResponse { item: Some(ResponseItem::Data(bytes)) })) => return Some(bytes),
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => {
                tracing::warn!(error = status.message(), "a stream from runtime-shim broke");
                return None;
            }
        }
    }
}

async fn forward_to_client(
    mut from_runtime: Streaming<pb::StreamResponse>,
    mut writer: impl AsyncWrite + Unpin,
) {
    while let Some(bytes) = next_from_runtime(&mut from_runtime).await {
        if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
    // Flushes what was written; an error means that the client has disconnected.
    let _ = writer.shutdown().await;
}
