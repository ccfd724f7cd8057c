//! The streams of a command as channels of a WebSocket, `v5.channel.k8s.io`, and as SPDY towards the runtime (node-and-api.md §8.4).
//!
//! The first byte of each message is its channel: 0 input, 1 and 2 output, 3 the end as a Status, 4 the size of the terminal. 255
//! and a channel end that one. The streams of SPDY are open before the WebSocket is: what goes wrong until then is an answer of
//! HTTP.

use std::time::Duration;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use bytes::BytesMut;
use hyper::upgrade::OnUpgrade;
use keelson_proto::keelson::runtime::v1::stream_start::What;
use keelson_service_kit::CancellationToken;
use keelson_service_kit::status::chain;
use keelson_spdy::frames::Event;
use keelson_spdy::session::{self, Frames, Session, Streams, Wanted, Writer};
use keelson_spdy::{STREAMS, STREAMS_HEADER};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, timeout, timeout_at};

use super::pump::{LONGEST, both_ways};
use super::websocket::{self, FromClient, Handshake, ToClient};
use super::{Answered, Caller, told};

/// The only version that ends here; older ones do not tell the end of the input.
const VERSION: &str = "v5.channel.k8s.io";
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The channel that ends the one that it names.
const CLOSE: u8 = 255;
/// How often the runtime is asked whether it is there.
const PING_EVERY: Duration = Duration::from_secs(5);
/// How long output may still come once the end is told. Runtimes tell it after all output.
const LAG: Duration = Duration::from_secs(10);
/// How long the client may take to have the end.
const STATUS_WITHIN: Duration = Duration::from_secs(10);
/// A status is at most so long; what is more is passed over.
const LONGEST_STATUS: usize = 64 << 10;
/// What stands of the size of a terminal before it is whole is no longer.
const LONGEST_SIZE: usize = 1 << 10;
/// Bytes on the way to the runtime or from it.
const ON_THE_WAY: usize = 64 << 10;
/// Pings that wait for an answer; one more gets none.
const PINGS: usize = 4;

type Runtime = Session<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// Whether a subprotocol is the one that ends here.
pub(super) fn is_spoken(protocol: &str) -> bool {
    protocol == VERSION
}

/// Connects with a command, or with the process of a container.
pub(super) async fn connect(
    caller: Caller<'_>,
    what: What,
    wanted: Wanted,
    handshake: Handshake,
    mut request: Request,
) -> Result<Response, Response> {
    let client = hyper::upgrade::on(&mut request);
    let Answered { head, from_runtime, to_runtime } = caller.connect_in_spdy(what, &[STREAMS]).await?;
    let chosen = told(&head, STREAMS_HEADER).unwrap_or_default();
    let failed = |text: String| (StatusCode::INTERNAL_SERVER_ERROR, text).into_response();
    if chosen != STREAMS {
        return Err(failed(format!("the container runtime answers with {chosen:?}, not with {STREAMS}")));
    }
    let (near, far) = tokio::io::duplex(ON_THE_WAY);
    tokio::spawn(both_ways(far, from_runtime, to_runtime));
    let (reader, writer) = tokio::io::split(near);
    let opened = session::open(reader, writer, BytesMut::new(), wanted).await;
    let session = opened.map_err(|error| failed(format!("the container runtime: {}", chain(&error))))?;
    tokio::spawn(run(caller.app.shutdown(), client, session));
    Ok(handshake.answer(VERSION))
}

/// Hands everything on both ways, until the command has ended or the client has gone.
async fn run(shutdown: CancellationToken, client: OnUpgrade, session: Runtime) {
    let Some((mut to_client, mut from_client)) = websocket::open(client).await else { return };
    let Session { frames, writer, streams } = session;
    // It tells clients that the streams are there.
    let lowest =
        [(streams.stdout, STDOUT), (streams.stderr, STDERR)].into_iter().find(|(stream, _)| stream.is_some());
    if !say(&mut to_client, lowest.map_or(ERROR, |(_, channel)| channel), &[]).await {
        return;
    }
    let (pings, to_answer) = mpsc::channel(PINGS);
    // Cancel-safe: the one that ends decides, and of the other nothing is needed any more.
    let is_there = tokio::select! {
        is_there = output(frames, streams, pings, &mut to_client) => is_there,
        () = input(&mut from_client, writer, to_answer) => false,
        () = tokio::time::sleep(LONGEST) => true,
        () = shutdown.cancelled() => true,
    };
    if is_there {
        websocket::close(to_client, from_client).await;
    }
}

/// Says something on a channel; false: the client has gone.
async fn say(to_client: &mut ToClient, channel: u8, bytes: &[u8]) -> bool {
    websocket::send(to_client, [&[channel], bytes].concat()).await
}

/// Does what the client says, until it has gone or says what cannot be.
async fn input<W: AsyncWrite + Unpin>(
    from_client: &mut FromClient,
    mut writer: Writer<W>,
    mut pings: mpsc::Receiver<u32>,
) {
    let mut ticks = tokio::time::interval(PING_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let (mut own, mut size) = (1, Vec::new());
    loop {
        // Cancel-safe: what is not taken here stays in the WebSocket or the channel.
        tokio::select! {
            message = websocket::next(from_client) => match message.as_deref() {
                Some([STDIN, bytes @ ..]) => writer.input(bytes.to_vec()).await,
                Some([CLOSE, STDIN]) => writer.end_input().await,
                Some([RESIZE, bytes @ ..]) => {
                    size.extend_from_slice(bytes);
                    for (width, height) in sizes(&mut size) {
                        writer.resize(width, height).await;
                    }
                    if size.len() > LONGEST_SIZE {
                        return;
                    }
                }
                // Channels that are the client's to hear, and the end of those: nothing is to be done.
                Some(_) => {}
                None => return,
            },
            Some(id) = pings.recv() => writer.pong(id).await,
            _ = ticks.tick() => {
                writer.ping(own).await;
                own = own.wrapping_add(2);
            }
        }
    }
}

/// Takes the sizes that are whole out of what has come.
fn sizes(come: &mut Vec<u8>) -> Vec<(u32, u32)> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Size {
        width: u32,
        height: u32,
    }
    let mut all = serde_json::Deserializer::from_slice(come).into_iter::<Size>();
    let mut found = Vec::new();
    let mut whole = 0;
    while let Some(Ok(size)) = all.next() {
        found.push((size.width, size.height));
        whole = all.byte_offset();
    }
    come.drain(..whole);
    if come.iter().all(u8::is_ascii_whitespace) {
        come.clear();
    }
    found
}

/// What the runtime has still to tell.
#[derive(Debug)]
struct Open {
    status: bool,
    stdout: bool,
    stderr: bool,
}

impl Open {
    fn any(&self) -> bool {
        self.status || self.stdout || self.stderr
    }
}

/// Hands on what the command writes, and how it ended; false: the client has gone.
async fn output<R: AsyncRead + Unpin>(
    mut frames: Frames<R>,
    streams: Streams,
    pings: mpsc::Sender<u32>,
    to_client: &mut ToClient,
) -> bool {
    let mut open = Open { status: true, stdout: streams.stdout.is_some(), stderr: streams.stderr.is_some() };
    let (mut status, mut until, mut broke) = (Vec::new(), None, None);
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
                let channel = match stream {
                    stream if Some(stream) == streams.stdout => STDOUT,
                    stream if Some(stream) == streams.stderr => STDERR,
                    stream => {
                        if stream == streams.error && status.len() < LONGEST_STATUS {
                            status.extend_from_slice(&bytes);
                        }
                        continue;
                    }
                };
                if !say(to_client, channel, &bytes).await {
                    return false;
                }
            }
            Ok(Event::Ended { stream } | Event::Reset { stream, .. }) => {
                open.status &= stream != streams.error;
                open.stdout &= Some(stream) != streams.stdout;
                open.stderr &= Some(stream) != streams.stderr;
            }
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
    if status.is_empty() {
        let how =
            broke.map_or_else(|| "it was ended without a word".to_owned(), |failure| failure.to_string());
        status = unknown_end(&how);
    }
    timeout(STATUS_WITHIN, say(to_client, ERROR, &status)).await.unwrap_or(false)
}

/// The Status of a command of which nobody has said how it ended.
fn unknown_end(how: &str) -> Vec<u8> {
    let why = format!(
        "the connection to the container runtime was lost while the command ran ({how}): how it ended is not known, and it may \
         still run"
    );
    json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {why}"), "details": {"causes": [{"message": why}]},
    })
    .to_string()
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_taken_when_they_are_whole() {
        let mut come = Vec::new();
        for (bytes, expected, left) in [
            (&br#"{"Width":80,"Height":24}"#[..], vec![(80, 24)], 0),
            (b"{\"Width\":1,\"Height\":2}\n{\"Width\":3,\"Height\":4}\n", vec![(1, 2), (3, 4)], 0),
            (br#"{"Width":5,"#, vec![], 11),
            (br#""Height":6}"#, vec![(5, 6)], 0),
            (b"odd", vec![], 3),
            (b"{}", vec![], 5),
        ] {
            come.extend_from_slice(bytes);
            assert_eq!(
                (sizes(&mut come), come.len()),
                (expected, left),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
