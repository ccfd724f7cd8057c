//! The gRPC side: reads `Sync` streams, sends requests to the manager, waits for pods.

use std::convert::Infallible;
use std::fmt::Display;
use std::time::Duration;

use keelson_config::ServiceName;
use keelson_desired_set::{Desire, StreamId};
use keelson_proto::keelson::common::v1 as common;
use keelson_service_kit::status::error;
use keelson_service_kit::{CancellationToken, Context, Progress};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::pods::Command;

/// How long a call waits until the desired set contains its pod.
pub const DESIRED_TIMEOUT: Duration = Duration::from_secs(5);

/// One message of a `Sync` stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item<D, E> {
    /// A pod of the set, or the error if its message is invalid.
    Pod(Result<D, E>),
    /// The sender no longer knows this UID.
    Dropped(String),
    /// The set is complete.
    Complete(common::SetComplete),
}

/// Sends commands from the gRPC side of a callee to its manager.
#[derive(Debug)]
pub struct ManagerHandle<D, V, A = Infallible> {
    service: ServiceName,
    commands: mpsc::Sender<Command<D, V, A>>,
    progress: Progress,
    shutdown: CancellationToken,
}

/// The acknowledgements of a `Sync` stream.
pub type Acks = ReceiverStream<Result<common::SyncAck, Status>>;

impl<D, V, A> ManagerHandle<D, V, A>
where
    D: Desire + Send + 'static,
    V: Send + Sync + 'static,
    A: Send + 'static,
{
    /// A handle for the service of `ctx`.
    pub fn new(ctx: &Context, commands: mpsc::Sender<Command<D, V, A>>) -> Self {
        let (progress, shutdown) = (ctx.progress.clone(), ctx.shutdown.clone());
        Self { service: ctx.service, commands, progress, shutdown }
    }

    /// Sends the command that `command` builds around the reply channel, and waits for the reply.
    ///
    /// # Errors
    /// UNAVAILABLE: the manager has ended.
    pub async fn request<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command<D, V, A>,
    ) -> Result<T, Status> {
        request(self.service, &self.commands, command).await
    }

    /// Subscribes to the view of a pod.
    ///
    /// # Errors
    /// UNAVAILABLE: the manager has ended.
    pub async fn watch(&self, uid: &str) -> Result<watch::Receiver<V>, Status> {
        self.request(|reply| Command::Watch { uid: uid.to_owned(), reply }).await
    }

    /// Serves a `Sync` stream until it ends, a later one takes over, or the service stops. `item` converts a message
    /// and returns `None` for an empty one. An invalid pod is reported as the condition `sync`.
    ///
    /// # Errors
    /// UNAVAILABLE: the manager has ended.
    pub async fn sync<M, E>(
        &self,
        messages: Streaming<M>,
        item: fn(M) -> Option<Item<D, E>>,
    ) -> Result<Acks, Status>
    where
        M: Send + 'static,
        E: Display + Send + 'static,
    {
        let taken_over = CancellationToken::new();
        let open = |reply| Command::Open { taken_over: taken_over.clone(), reply };
        let stream = self.request(open).await?;
        let (acks, receiver) = mpsc::channel(4);
        let reader = Reader {
            service: self.service,
            commands: self.commands.clone(),
            progress: self.progress.clone(),
            stream,
            acks: acks.clone(),
        };
        let (service, shutdown) = (self.service, self.shutdown.clone());
        keelson_service_kit::spawn("sync stream", async move {
            // Cancel-safe: an abandoned stream is replaced by a whole new set.
            let end = tokio::select! {
                end = reader.read(messages, item) => end,
                () = taken_over.cancelled() => Err(error(
                    Code::Aborted,
                    "SYNC_TAKEN_OVER",
                    "a later Sync stream has begun; this one is ignored",
                )),
                () = shutdown.cancelled() => Err(stopping(service)),
            };
            if let Err(status) = end {
                let _ = acks.try_send(Err(status));
            }
        });
        Ok(ReceiverStream::new(receiver))
    }
}

fn stopping(service: ServiceName) -> Status {
    error(Code::Unavailable, "STOPPING", format!("{service} is stopping"))
}

async fn request<D, V, A, T>(
    service: ServiceName,
    commands: &mpsc::Sender<Command<D, V, A>>,
    command: impl FnOnce(oneshot::Sender<T>) -> Command<D, V, A>,
) -> Result<T, Status> {
    let (reply, answer) = oneshot::channel();
    commands.send(command(reply)).await.map_err(|_| stopping(service))?;
    answer.await.map_err(|_| stopping(service))
}

/// Reads one `Sync` stream.
struct Reader<D, V, A> {
    service: ServiceName,
    commands: mpsc::Sender<Command<D, V, A>>,
    progress: Progress,
    stream: StreamId,
    acks: mpsc::Sender<Result<common::SyncAck, Status>>,
}

impl<D, V, A> Reader<D, V, A> {
    async fn read<M, E: Display>(
        self,
        mut messages: Streaming<M>,
        item: fn(M) -> Option<Item<D, E>>,
    ) -> Result<(), Status> {
        let stream = self.stream;
        self.progress.condition("sync", Ok(()));
        let send = |command| async { self.commands.send(command).await.map_err(|_| stopping(self.service)) };
        while let Some(message) = messages.message().await? {
            match item(message) {
                Some(Item::Pod(Ok(desire))) => send(Command::Insert { stream, desire }).await?,
                // One invalid pod must not block all others.
                Some(Item::Pod(Err(problem))) => self
                    .progress
                    .condition("sync", Err(format!("the desired set contains an invalid pod: {problem}"))),
                Some(Item::Dropped(uid)) => send(Command::Remove { stream, uid }).await?,
                Some(Item::Complete(set)) => {
                    let sources_ready = set.sources_ready;
                    let complete = |reply| Command::Complete { stream, sources_ready, reply };
                    request(self.service, &self.commands, complete).await?;
                    let _ = self.acks.send(Ok(common::SyncAck { epoch: set.epoch })).await;
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// Waits until `done` holds for the view of a pod, at most until `until`. Returns false on timeout, and also when the
/// slot is removed, which happens only when the pod is cleaned up and no longer desired.
pub async fn wait_until<V>(
    view: &mut watch::Receiver<V>,
    until: Instant,
    done: impl FnMut(&V) -> bool,
) -> bool {
    timeout_at(until, view.wait_for(done)).await.is_ok()
}

/// The error for a pod revision that the desired set does not contain within [`DESIRED_TIMEOUT`].
pub fn not_desired_error(uid: &str, revision: u64) -> Status {
    let text = format!("pod {uid} revision {revision} is not in the set that pod-sync has sent");
    error(Code::NotFound, "POD_NOT_NAMED", text)
}
