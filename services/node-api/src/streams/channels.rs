//! The streams of a command as channels of a WebSocket, `v5.channel.k8s.io`, and as SPDY towards the runtime (node-and-api.md
//! §8.4).
//!
//! The first byte of each message is its channel: 0 stdin, 1 stdout, 2 stderr, 3 the exit status as a Status, 4 the size of the
//! terminal. 255 followed by a channel closes that channel. The SPDY streams are opened before the WebSocket, so that errors
//! until then are HTTP responses.

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

use super::pump::{MAX_DURATION, forward_both_ways};
use super::websocket::{self, FromClient, Handshake, ToClient};
use super::{Connector, RuntimeStream, response_header};

/// The only version terminated here; older ones cannot close stdin.
const VERSION: &str = "v5.channel.k8s.io";
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// Closes the channel in its payload.
const CLOSE: u8 = 255;
/// How often the runtime is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// How long output may arrive after the status. Runtimes send the status after all output.
const OUTPUT_GRACE: Duration = Duration::from_secs(10);
/// How long the client may take to receive the status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
/// After this many bytes, further frames of the status are dropped.
const MAX_STATUS_BYTES: usize = 64 << 10;
/// The most bytes of an incomplete terminal size; more end the connection.
const MAX_SIZE_BYTES: usize = 1 << 10;
/// Bytes buffered in each direction between client and runtime.
const PIPE_BYTES: usize = 64 << 10;
/// Pings of the runtime that wait for their answer; further ones get none.
const MAX_QUEUED_PINGS: usize = 4;

type Runtime = Session<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

/// Whether a subprotocol is terminated here.
pub(super) fn is_supported(protocol: &str) -> bool {
    protocol == VERSION
}

/// Connects the client with a new command (exec) or the process of a container (attach).
pub(super) async fn connect(
    connector: Connector<'_>,
    what: What,
    wanted: Wanted,
    handshake: Handshake,
    mut request: Request,
) -> Result<Response, Response> {
    let client = hyper::upgrade::on(&mut request);
    let RuntimeStream { head, from_runtime, to_runtime } =
        connector.connect_in_spdy(what, &[STREAMS]).await?;
    let chosen = response_header(&head, STREAMS_HEADER).unwrap_or_default();
    let failed = |text: String| (StatusCode::INTERNAL_SERVER_ERROR, text).into_response();
    if chosen != STREAMS {
        return Err(failed(format!(
            "the container runtime selected the stream protocol {chosen:?} instead of {STREAMS}"
        )));
    }
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    keelson_service_kit::spawn("forward both ways", forward_both_ways(far, from_runtime, to_runtime));
    let (reader, writer) = tokio::io::split(near);
    let opened = session::open(reader, writer, BytesMut::new(), wanted).await;
    let session = opened.map_err(|error| failed(format!("the container runtime: {}", chain(&error))))?;
    keelson_service_kit::spawn("channels", run(connector.app.shutdown(), client, session));
    Ok(handshake.response(VERSION))
}

/// Forwards in both directions until the command ends or the client disconnects.
async fn run(shutdown: CancellationToken, client: OnUpgrade, session: Runtime) {
    let Some((mut to_client, mut from_client)) = websocket::open(client).await else { return };
    let Session { frames, writer, streams } = session;
    // An empty message on the lowest channel tells the client that the streams are open.
    let lowest =
        [(streams.stdout, STDOUT), (streams.stderr, STDERR)].into_iter().find(|(stream, _)| stream.is_some());
    if !send_on_channel(&mut to_client, lowest.map_or(ERROR, |(_, channel)| channel), &[]).await {
        return;
    }
    let (pings, to_answer) = mpsc::channel(MAX_QUEUED_PINGS);
    // Cancel-safe: when one arm ends, the state of the others is no longer needed.
    let is_connected = tokio::select! {
        is_connected = forward_output(frames, streams, pings, &mut to_client) => is_connected,
        () = forward_input(&mut from_client, writer, to_answer) => false,
        () = tokio::time::sleep(MAX_DURATION) => true,
        () = shutdown.cancelled() => true,
    };
    if is_connected {
        websocket::close(to_client, from_client).await;
    }
}

/// Sends a message on a channel; `false` if the client has disconnected.
async fn send_on_channel(to_client: &mut ToClient, channel: u8, bytes: &[u8]) -> bool {
    websocket::send(to_client, [&[channel], bytes].concat()).await
}

/// Forwards input and terminal sizes until the client disconnects or sends an invalid message, and pings the runtime.
async fn forward_input<W: AsyncWrite + Unpin>(
    from_client: &mut FromClient,
    mut writer: Writer<W>,
    mut pings: mpsc::Receiver<u32>,
) {
    let mut ticks = tokio::time::interval(PING_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let (mut ping_id, mut partial_size) = (1, Vec::new());
    loop {
        // Cancel-safe: messages that are not received here stay in the WebSocket or the channel.
        tokio::select! {
            message = websocket::next(from_client) => match message.as_deref() {
                Some([STDIN, bytes @ ..]) => writer.input(bytes.to_vec()).await,
                Some([CLOSE, STDIN]) => writer.end_input().await,
                Some([RESIZE, bytes @ ..]) => {
                    partial_size.extend_from_slice(bytes);
                    for (width, height) in take_complete_sizes(&mut partial_size) {
                        writer.resize(width, height).await;
                    }
                    if partial_size.len() > MAX_SIZE_BYTES {
                        return;
                    }
                }
                // Output channels, and their close: ignored.
                Some(_) => {}
                None => return,
            },
            Some(id) = pings.recv() => writer.pong(id).await,
            _ = ticks.tick() => {
                writer.ping(ping_id).await;
                ping_id = ping_id.wrapping_add(2);
            }
        }
    }
}

/// Removes the complete terminal sizes from `buffer` and returns them as (width, height).
fn take_complete_sizes(buffer: &mut Vec<u8>) -> Vec<(u32, u32)> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Size {
        width: u32,
        height: u32,
    }
    let mut all = serde_json::Deserializer::from_slice(buffer).into_iter::<Size>();
    let mut found = Vec::new();
    let mut complete = 0;
    while let Some(Ok(size)) = all.next() {
        found.push((size.width, size.height));
        complete = all.byte_offset();
    }
    buffer.drain(..complete);
    if buffer.iter().all(u8::is_ascii_whitespace) {
        buffer.clear();
    }
    found
}

/// Which streams of the runtime are still open.
#[derive(Debug)]
struct OpenStreams {
    status: bool,
    stdout: bool,
    stderr: bool,
}

impl OpenStreams {
    fn any(&self) -> bool {
        self.status || self.stdout || self.stderr
    }
}

/// Forwards the output of the command and its exit status; `false` if the client has disconnected.
async fn forward_output<R: AsyncRead + Unpin>(
    mut frames: Frames<R>,
    streams: Streams,
    pings: mpsc::Sender<u32>,
    to_client: &mut ToClient,
) -> bool {
    let mut open =
        OpenStreams { status: true, stdout: streams.stdout.is_some(), stderr: streams.stderr.is_some() };
    let (mut status, mut deadline, mut stream_error) = (Vec::new(), None, None);
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
                let channel = match stream {
                    stream if Some(stream) == streams.stdout => STDOUT,
                    stream if Some(stream) == streams.stderr => STDERR,
                    stream => {
                        if stream == streams.error && status.len() < MAX_STATUS_BYTES {
                            status.extend_from_slice(&bytes);
                        }
                        continue;
                    }
                };
                if !send_on_channel(to_client, channel, &bytes).await {
                    return false;
                }
            }
            Ok(Event::Ended { stream } | Event::Reset { stream, .. }) => {
                open.status &= stream != streams.error;
                open.stdout &= Some(stream) != streams.stdout;
                open.stderr &= Some(stream) != streams.stderr;
            }
            Ok(Event::Ping { id }) => {
                // If the queue is full, the runtime is not reading, so an answer would not reach it.
                let _ = pings.try_send(id);
            }
            Ok(Event::Taken { .. } | Event::GoAway) => {}
            Err(error) => {
                stream_error = Some(error);
                break;
            }
        }
        if !open.status {
            deadline.get_or_insert_with(|| Instant::now() + OUTPUT_GRACE);
        }
    }
    if status.is_empty() {
        let error = stream_error
            .map_or_else(|| "it was closed without a status".to_owned(), |error| error.to_string());
        status = unknown_exit_status(&error);
    }
    timeout(STATUS_TIMEOUT, send_on_channel(to_client, ERROR, &status)).await.unwrap_or(false)
}

/// The Status of a command whose exit status is not known.
fn unknown_exit_status(error: &str) -> Vec<u8> {
    let message = format!(
        "the connection to the container runtime was lost while the command ran ({error}): how it ended is not known, and it may \
         still run"
    );
    json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {message}"), "details": {"causes": [{"message": message}]},
    })
    .to_string()
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_sizes_are_parsed_once_complete() {
        let mut buffer = Vec::new();
        for (bytes, expected, left) in [
            (&br#"{"Width":80,"Height":24}"#[..], vec![(80, 24)], 0),
            (b"{\"Width\":1,\"Height\":2}\n{\"Width\":3,\"Height\":4}\n", vec![(1, 2), (3, 4)], 0),
            (br#"{"Width":5,"#, vec![], 11),
            (br#""Height":6}"#, vec![(5, 6)], 0),
            (b"odd", vec![], 3),
            (b"{}", vec![], 5),
        ] {
            buffer.extend_from_slice(bytes);
            assert_eq!(
                (take_complete_sizes(&mut buffer), buffer.len()),
                (expected, left),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
