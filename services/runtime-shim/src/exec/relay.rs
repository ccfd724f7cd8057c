//! Between the caller and the command's streams, until the command has ended.

use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use keelson_proto::keelson::runtime::v1 as pb;
use keelson_proto::keelson::runtime::v1::exec_response::Item;
use keelson_runtime_shim_core::exec::{End, end_of};
use keelson_runtime_shim_core::spdy::Event;
use keelson_service_kit::status::chain;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::session::{FrameError, Frames, Session, Streams, Writer};
use super::{Answers, ExecError};

/// How long output may still come once the end is told. Runtimes tell it after all output.
const LAG: Duration = Duration::from_secs(10);
/// A status is at most so long; what is more is passed over.
const LONGEST_STATUS: usize = 64 << 10;
/// Pings that wait for an answer; one more gets none.
const PINGS: usize = 4;

/// Hands everything on both ways.
///
/// # Errors
/// The caller breaks the rules, the connection breaks, or the runtime tells something else than an exit code.
pub(super) async fn relay<M>(
    session: Session,
    container_id: &str,
    size: Option<pb::TerminalSize>,
    messages: &mut M,
    answers: &Answers,
) -> Result<(), ExecError>
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
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
async fn input<M>(messages: &mut M, mut writer: Writer, mut pings: mpsc::Receiver<u32>) -> ExecError
where
    M: Stream<Item = Result<pb::ExecRequest, Status>> + Unpin + Send,
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
                    Some(Item::Start(_)) => return ExecError::BadRequest("`start` has come a second time"),
                    // What a newer caller has and this version does not know.
                    Some(Item::CloseStdin(false)) | None => {}
                },
                Some(Err(status)) => return ExecError::Caller(status),
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
        self.stdout &= stream != streams.stdout;
        self.stderr &= Some(stream) != streams.stderr;
    }

    fn any(&self) -> bool {
        self.status || self.stdout || self.stderr
    }
}

/// Hands on what the command writes, and its end.
async fn output(
    mut frames: Frames,
    streams: Streams,
    pings: mpsc::Sender<u32>,
    answers: &Answers,
) -> Result<(), ExecError> {
    let mut open = Open { status: true, stdout: true, stderr: streams.stderr.is_some() };
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
                let item = if stream == streams.stdout {
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
) -> Result<(), ExecError> {
    let lost = |how: String| Err(ExecError::Lost { how });
    match (end_of(told), broke) {
        (End::Exited(code), _) => {
            answer(answers, Item::ExitCode(code)).await;
            Ok(())
        }
        (End::Failed(text), _) => Err(ExecError::Failed(text)),
        (End::Unclear(_), Some(failure)) if status_is_open => lost(chain(&failure)),
        (End::Unclear(text), _) if text.is_empty() => {
            lost("it has ended the streams without a word".to_owned())
        }
        (End::Unclear(text), _) => Err(ExecError::Unclear(text)),
    }
}
