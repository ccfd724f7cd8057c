//! Relays between the caller and the command's streams until the command has ended.

use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::exec_response::Item;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::end::{End, end_of};
use crate::frames::Event;
use crate::session::{FrameError, Frames, Session, Streams, Writer};

/// How long output may still arrive after the status. Runtimes send the status after all output.
const OUTPUT_GRACE: Duration = Duration::from_secs(10);
/// The most bytes of a status; the rest is ignored.
const MAX_STATUS: usize = 64 << 10;
/// The most pings that wait for an answer; further ones are dropped.
const MAX_PENDING_PINGS: usize = 4;

/// Sends responses to the caller. The channel is short: a slow caller slows the command down instead of using memory.
pub type Answers = mpsc::Sender<Result<pb::ExecResponse, Status>>;

/// Why there is no exit code after the streams were opened.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The caller has sent an invalid message.
    #[error("{0}")]
    BadRequest(&'static str),
    /// The caller's stream cannot be read, or the caller has disconnected.
    #[error("the caller's stream has broken: {}", .0.message())]
    Caller(Status),
    /// The connection has ended before the command's status arrived.
    #[error(
        "the connection to the container runtime was lost while the command ran ({how}): how it ended is not known, \
         and it may still run"
    )]
    Lost {
        /// How the connection ended.
        how: String,
    },
    /// The runtime could not run the command; its message.
    #[error("{0}")]
    Failed(String),
    /// The runtime's status cannot be parsed.
    #[error("the container runtime tells of the command's end what is not understood: {0:?}")]
    Unclear(String),
}

/// Relays in both directions until the command has ended.
///
/// # Errors
/// The caller sends an invalid message, the connection breaks, or the runtime reports something other than an exit code.
pub async fn relay<M, R, W>(
    session: Session<R, W>,
    container_id: &str,
    size: Option<pb::TerminalSize>,
    messages: &mut M,
    answers: &Answers,
) -> Result<(), RelayError>
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Session { frames, mut writer, streams } = session;
    if let Some(size) = size {
        writer.resize(size.width, size.height).await;
    }
    let started = pb::ExecStarted { container_id: container_id.to_owned() };
    if !answer(answers, Item::Started(started)).await {
        return Ok(());
    }
    let (pings, to_answer) = mpsc::channel(MAX_PENDING_PINGS);
    // Cancel-safe: the first to end decides, and the state of the other is not needed any more.
    tokio::select! {
        end = output(frames, streams, pings, answers) => end,
        failure = input(messages, writer, to_answer) => Err(failure),
    }
}

/// Sends a response. False: the caller has disconnected.
async fn answer(answers: &Answers, item: Item) -> bool {
    answers.send(Ok(pb::ExecResponse { item: Some(item) })).await.is_ok()
}

/// Handles the caller's messages; returns only when one is invalid or the caller has disconnected.
async fn input<M, W>(messages: &mut M, mut writer: Writer<W>, mut pings: mpsc::Receiver<u32>) -> RelayError
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
    W: AsyncWrite + Unpin,
{
    use pb::exec_request::Item;
    let mut more = true;
    loop {
        // Cancel-safe: what is not taken here stays in the stream or the channel.
        tokio::select! {
            message = messages.next(), if more => match message {
                Some(Ok(message)) => match message.item {
                    Some(Item::Stdin(bytes)) => writer.input(bytes).await,
                    Some(Item::CloseStdin(true)) => writer.end_input().await,
                    Some(Item::Resize(size)) => writer.resize(size.width, size.height).await,
                    Some(Item::Start(_)) => return RelayError::BadRequest("`start` has come a second time"),
                    // A message of a newer caller that this version does not know.
                    Some(Item::CloseStdin(false)) | None => {}
                },
                Some(Err(status)) => return RelayError::Caller(status),
                None => {
                    more = false;
                    writer.end_input().await;
                }
            },
            Some(id) = pings.recv() => writer.pong(id).await,
            // Both have ended: only output is left.
            else => return std::future::pending().await,
        }
    }
}

/// The streams on which the runtime may still send.
#[derive(Debug)]
struct OpenStreams {
    status: bool,
    stdout: bool,
    stderr: bool,
}

impl OpenStreams {
    fn close(&mut self, streams: Streams, stream: u32) {
        self.status &= stream != streams.error;
        self.stdout &= Some(stream) != streams.stdout;
        self.stderr &= Some(stream) != streams.stderr;
    }

    fn any(&self) -> bool {
        self.status || self.stdout || self.stderr
    }
}

/// Relays the command's output and its result.
async fn output<R: AsyncRead + Unpin>(
    mut frames: Frames<R>,
    streams: Streams,
    pings: mpsc::Sender<u32>,
    answers: &Answers,
) -> Result<(), RelayError> {
    let mut open =
        OpenStreams { status: true, stdout: streams.stdout.is_some(), stderr: streams.stderr.is_some() };
    let (mut error_stream, mut deadline, mut broken_by) = (Vec::new(), None, None);
    while open.any() {
        let event = match deadline {
            None => frames.next().await,
            Some(deadline) => match timeout_at(deadline, frames.next()).await {
                Ok(event) => event,
                Err(_) => break,
            },
        };
        match event {
            Ok(Event::Data { stream, bytes }) => {
                let item = if Some(stream) == streams.stdout {
                    Item::Stdout(bytes.into())
                } else if Some(stream) == streams.stderr {
                    Item::Stderr(bytes.into())
                } else {
                    if stream == streams.error && error_stream.len() < MAX_STATUS {
                        error_stream.extend_from_slice(&bytes);
                    }
                    continue;
                };
                if !answer(answers, item).await {
                    return Ok(());
                }
            }
            Ok(Event::Ended { stream } | Event::Reset { stream, .. }) => open.close(streams, stream),
            Ok(Event::Ping { id }) => {
                // If the queue is full, the runtime reads nothing from us, so an answer would not reach it either.
                let _ = pings.try_send(id);
            }
            Ok(Event::Taken { .. } | Event::GoAway) => {}
            Err(failure) => {
                broken_by = Some(failure);
                break;
            }
        }
        if !open.status {
            deadline.get_or_insert_with(|| Instant::now() + OUTPUT_GRACE);
        }
    }
    send_result(&error_stream, open.status, broken_by, answers).await
}

/// Sends the command's result to the caller.
async fn send_result(
    error_stream: &[u8],
    status_is_open: bool,
    broken_by: Option<FrameError>,
    answers: &Answers,
) -> Result<(), RelayError> {
    let lost = |how: String| Err(RelayError::Lost { how });
    match (end_of(error_stream), broken_by) {
        (End::Exited(code), _) => {
            answer(answers, Item::ExitCode(code)).await;
            Ok(())
        }
        (End::Failed(text), _) => Err(RelayError::Failed(text)),
        (End::Unclear(_), Some(failure)) if status_is_open => lost(with_cause(&failure)),
        (End::Unclear(text), _) if text.is_empty() => {
            lost("it has ended the streams without a word".to_owned())
        }
        (End::Unclear(text), _) => Err(RelayError::Unclear(text)),
    }
}

fn with_cause(failure: &FrameError) -> String {
    match failure {
        FrameError::NotSpdy(cause) => format!("{failure}: {cause}"),
        FrameError::Closed | FrameError::Broken(_) => failure.to_string(),
    }
}
