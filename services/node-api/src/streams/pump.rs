//! Bytes between a client whose connection has changed its protocol, or who speaks for one, and runtime-shim.

use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_service_kit::CancellationToken;
use pb::stream_request::Item as Ask;
use pb::stream_response::Item as Told;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;

/// How long the client may take to have its 101.
pub(super) const CHANGE_WITHIN: Duration = Duration::from_secs(10);
/// No stream lives longer, whatever it carries (node-and-api.md §8.1).
pub(super) const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// Room for one read.
const READ: usize = 32 << 10;

/// Hands bytes on until either side has ended.
pub(super) async fn run(
    shutdown: CancellationToken,
    client: OnUpgrade,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
) {
    let Ok(Ok(upgraded)) = timeout(CHANGE_WITHIN, client).await else {
        tracing::debug!("a client has gone before its streams began");
        return;
    };
    // Cancel-safe: when one of them has ended, nothing of the others is needed any more.
    tokio::select! {
        () = both_ways(TokioIo::new(upgraded), from_runtime, to_runtime) => {}
        () = tokio::time::sleep(LONGEST) => {}
        () = shutdown.cancelled() => {}
    }
}

/// Hands bytes on until either side has ended; of the runtime's everything that it has sent.
pub(super) async fn both_ways(
    client: impl AsyncRead + AsyncWrite,
    from_runtime: Streaming<pb::StreamResponse>,
    to_runtime: mpsc::Sender<pb::StreamRequest>,
) {
    let (reader, writer) = tokio::io::split(client);
    // Cancel-safe: when one of them has ended, nothing of the other is needed any more.
    tokio::select! {
        () = from_client(reader, to_runtime) => {}
        () = to_client(from_runtime, writer) => {}
    }
}

/// Says to the runtime what the client says, until that has ended.
async fn from_client(mut reader: impl AsyncRead + Unpin, to_runtime: mpsc::Sender<pb::StreamRequest>) {
    let mut piece = vec![0; READ];
    loop {
        let count = match reader.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        if !say(&to_runtime, piece[..count].to_vec()).await {
            // What it has said last is still to be read.
            return std::future::pending().await;
        }
    }
}

/// False: the runtime hears no more.
pub(super) async fn say(to_runtime: &mpsc::Sender<pb::StreamRequest>, bytes: Vec<u8>) -> bool {
    to_runtime.send(pb::StreamRequest { item: Some(Ask::Data(bytes)) }).await.is_ok()
}

/// What the runtime says next; `None` at its end.
pub(super) async fn heard(from_runtime: &mut Streaming<pb::StreamResponse>) -> Option<Vec<u8>> {
    loop {
        match from_runtime.message().await {
            Ok(Some(pb::StreamResponse { item: Some(Told::Data(bytes)) })) => return Some(bytes),
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => {
                tracing::warn!(error = status.message(), "the streams of a pod broke");
                return None;
            }
        }
    }
}

async fn to_client(mut from_runtime: Streaming<pb::StreamResponse>, mut writer: impl AsyncWrite + Unpin) {
    while let Some(bytes) = heard(&mut from_runtime).await {
        if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
            return;
        }
    }
    // What was written is to arrive; a client that has gone does not need it.
    let _ = writer.shutdown().await;
}
