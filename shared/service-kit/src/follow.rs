use std::future::Future;

use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use crate::backoff::Backoff;
use crate::progress::Progress;

/// What the reader of a `Watch…` RPC receives.
#[derive(Debug)]
pub enum Signal<T> {
    /// A stream has begun: a complete replay follows and ends with the `synced` message.
    Opened,
    /// The next message.
    Message(T),
    /// The stream broke. The data received so far stays in effect until the next replay.
    Lost(Status),
}

/// Reads a `Watch…` RPC until `shutdown`, and reconnects with jitter.
///
/// `peer` names the service in health and logs; `open` makes the call; `on` handles each signal in order.
pub async fn follow<T, Open, Call, On>(
    peer: &str,
    progress: &Progress,
    shutdown: &CancellationToken,
    mut open: Open,
    mut on: On,
) where
    Open: FnMut() -> Call,
    Call: Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    On: AsyncFnMut(Signal<T>),
{
    let mut backoff = Backoff::reconnect();
    while !shutdown.is_cancelled() {
        // Cancel-safe: a cancelled call or read leaves nothing behind, the next stream replays.
        let lost = tokio::select! {
            () = shutdown.cancelled() => return,
            status = read_one(&mut open, &mut on, &mut backoff, progress, peer) => status,
        };
        progress.condition(peer, Err(format!("no connection to {peer}, retrying: {}", lost.message())));
        on(Signal::Lost(lost)).await;
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(backoff.next_delay()) => {}
        }
    }
}

async fn read_one<T, Open, Call, On>(
    open: &mut Open,
    on: &mut On,
    backoff: &mut Backoff,
    progress: &Progress,
    peer: &str,
) -> Status
where
    Open: FnMut() -> Call,
    Call: Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    On: AsyncFnMut(Signal<T>),
{
    let mut stream = match open().await {
        Ok(response) => response.into_inner(),
        Err(status) => return status,
    };
    on(Signal::Opened).await;
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                backoff.reset();
                progress.condition(peer, Ok(()));
                on(Signal::Message(message)).await;
            }
            Ok(None) => return Status::unavailable("the stream ended"),
            Err(status) => return status,
        }
    }
}
