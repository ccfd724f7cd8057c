//! Bytes between a client whose connection has changed its protocol, and runtime-shim.

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
const CHANGE_WITHIN: Duration = Duration::from_secs(10);
/// No stream lives longer, whatever it carries (node-and-api.md §8.1).
const LONGEST: Duration = Duration::from_secs(4 * 3600);
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
    let (reader, writer) = tokio::io::split(TokioIo::new(upgraded));
    // Cancel-safe: when one of them has ended, nothing of the others is needed any more.
    tokio::select! {
        () = from_client(reader, to_runtime) => {}
        () = to_client(from_runtime, writer) => {}
        () = tokio::time::sleep(LONGEST) => {}
        () = shutdown.cancelled() => {}
    }
}

async fn from_client(mut reader: impl AsyncRead + Unpin, to_runtime: mpsc::Sender<pb::StreamRequest>) {
    let mut piece = vec![0; READ];
    loop {
        let count = match reader.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        let item = Some(Ask::Data(piece[..count].to_vec()));
        if to_runtime.send(pb::StreamRequest { item }).await.is_err() {
            return;
        }
    }
}

async fn to_client(mut from_runtime: Streaming<pb::StreamResponse>, mut writer: impl AsyncWrite + Unpin) {
    loop {
        match from_runtime.message().await {
            Ok(Some(pb::StreamResponse { item: Some(Told::Data(bytes)) })) => {
                if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
                    return;
                }
            }
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(status) => {
                tracing::warn!(error = status.message(), "the streams of a pod broke");
                break;
            }
        }
    }
    // What was written is to arrive; a client that has gone does not need it.
    let _ = writer.shutdown().await;
}
