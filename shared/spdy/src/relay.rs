//! Between the caller and the command's streams, until the command has ended.

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

/// How long output may still come once the end is told. Runtimes tell it after all output.
const LAG: Duration = Duration::from_secs(10);
/// A status is at most so long; what is more is passed over.
const LONGEST_STATUS: usize = 64 << 10;
/// Pings that wait for an answer; one more gets none.
const PINGS: usize = 4;

/// Where answers go. Few, so that the command waits for a slow caller and not memory.
pub type Answers = mpsc::Sender<Result<pb::ExecResponse, Status>>;

/// Why there is no exit code, once the streams are open.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The caller says something that cannot be.
    #[error("{0}")]
    BadRequest(&'static str),
    /// What the caller has sent cannot be read, or it has gone.
    #[error("the caller's stream has broken: {}", .0.message())]
    Caller(Status),
    /// The connection has ended, and nobody has said how the command did.
    #[error(
        "the connection to the container runtime was lost while the command ran ({how}): how it ended is not known, \
         and it may still run"
    )]
    Lost {
        /// What was seen of it.
        how: String,
    },
    /// The runtime could not run the command; its own words.
    #[error("{0}")]
    Failed(String),
    /// The runtime has said how it ended, in a way that is not understood.
    #[error("the container runtime tells of the command's end what is not understood: {0:?}")]
    Unclear(String),
}

/// Hands everything on both ways.
///
/// # Errors
/// The caller breaks the rules, the connection breaks, or the runtime tells something else than an exit code.
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
    let (pings, to_answer) = mpsc::channel(PINGS);
    // Cancel-safe: the one that ends decides, and of the other nothing is needed any more.
    tokio::select! {
        end = output(frames, streams, pings, answers) => end,
        failure = input(messages, writer, to_answer) => Err(failure),
    }
}

/// False: the caller has gone.
async fn answer(answers: &Answers, item: Item) -> bool {
    answers.send(Ok(pb::ExecResponse { item: Some(item) })).await.is_ok()
}

/// Does what the caller says, for ever; returns when it breaks the rules or has gone.
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
                    // What a newer caller has and this version does not know.
                    Some(Item::CloseStdin(false)) | None => {}
                },
                Some(Err(status)) => return RelayError::Caller(status),
                None => {
                    more = false;
                    writer.end_input().await;
                }
            },
            Some(id) = pings.recv() => writer.pong(id).await,
            // Both have ended: what is left to do is to read.
            else => return std::future::pending().await,
        }
    }
}

/// What the runtime has still to tell.
#[derive(Debug)]
struct Open {
    status: bool,
    stdout: bool,
    stderr: bool,
}

impl Open {
    fn close(&mut self, streams: Streams, stream: u32) {
        self.status &= stream != streams.error;
        self.stdout &= Some(stream) != streams.stdout;
        self.stderr &= Some(stream) != streams.stderr;
    }

    fn any(&self) -> bool {
        self.status || self.stdout || self.stderr
    }
}

/// Hands on what the command writes, and its end.
async fn output<R: AsyncRead + Unpin>(
    mut frames: Frames<R>,
    streams: Streams,
    pings: mpsc::Sender<u32>,
    answers: &Answers,
) -> Result<(), RelayError> {
    let mut open = Open { status: true, stdout: streams.stdout.is_some(), stderr: streams.stderr.is_some() };
    let (mut told, mut until, mut broke) = (Vec::new(), None, None);
    while open.any() {
        let event = match until {
            None => frames.next().await,
            Some(until) => match timeout_at(until, frames.next()).await {
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
                    if stream == streams.error && told.len() < LONGEST_STATUS {
                        told.extend_from_slice(&bytes);
                    }
                    continue;
                };
                if !answer(answers, item).await {
                    return Ok(());
                }
            }
            Ok(Event::Ended { stream } | Event::Reset { stream, .. }) => open.close(streams, stream),
            Ok(Event::Ping { id }) => {
                // One that finds no room: the runtime takes nothing of ours, so an answer would not reach it either.
                let _ = pings.try_send(id);
            }
            Ok(Event::Taken { .. } | Event::GoAway) => {}
            Err(failure) => {
                broke = Some(failure);
                break;
            }
        }
        if !open.status {
            until.get_or_insert_with(|| Instant::now() + LAG);
        }
    }
    end(&told, open.status, broke, answers).await
}

/// Tells the caller how the command ended.
async fn end(
    told: &[u8],
    status_is_open: bool,
    broke: Option<FrameError>,
    answers: &Answers,
) -> Result<(), RelayError> {
    let lost = |how: String| Err(RelayError::Lost { how });
    match (end_of(told), broke) {
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
