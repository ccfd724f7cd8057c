//! A connection on which the streams of one command are open.

use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::frames::{Decoder, Event, Opener, SpdyError, data_head, ping};

/// The time from the connection to the last accepted stream (runtime-and-resources.md §0.2).
pub const SETUP_WITHIN: Duration = Duration::from_secs(30);
/// The buffer size of one read.
const READ_BUFFER: usize = 64 << 10;
/// With less free space than this a read gets a new buffer.
const READ_AT_LEAST: usize = 8 << 10;
/// The most bytes of input in one frame: the other side holds a whole frame in memory.
const MAX_FRAME_DATA: usize = 32 << 10;

/// Why the streams could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The connection ended or broke.
    #[error("its streaming server has broken the connection")]
    Read(#[from] FrameError),
    /// The connection broke.
    #[error("its streaming server has broken the connection")]
    Write(#[source] io::Error),
    /// The server has reset or ended a stream.
    #[error("its streaming server does not take the stream {0}")]
    Stream(&'static str),
    /// The server has sent data of a stream before it accepted the stream.
    #[error("its streaming server sends data of a stream that it has not taken")]
    Early,
    /// The server did not accept the streams within [`SETUP_WITHIN`].
    #[error("its streaming server has not accepted the streams within 30 s")]
    Slow,
}

/// Why no more frames can be read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection is closed.
    #[error("it was closed")]
    Closed,
    /// The connection is broken.
    #[error("{0}")]
    Broken(io::Error),
    /// The bytes received are not SPDY.
    #[error("what comes is no SPDY/3.1")]
    NotSpdy(#[from] SpdyError),
}

/// The streams to open for a command; they must match the request, as the server waits for all of them.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The command gets input.
    pub stdin: bool,
    /// Its standard output is relayed.
    pub stdout: bool,
    /// Its standard error is relayed; ignored with a terminal.
    pub stderr: bool,
    /// It has a terminal: one output stream, and a size.
    pub tty: bool,
}

impl Wanted {
    /// All output.
    pub fn all(stdin: bool, tty: bool) -> Self {
        Self { stdin, stdout: true, stderr: true, tty }
    }
}

/// The stream ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streams {
    /// The status of the command.
    pub error: u32,
    /// Standard input.
    pub stdin: Option<u32>,
    /// Standard output.
    pub stdout: Option<u32>,
    /// Standard error, unless there is a terminal.
    pub stderr: Option<u32>,
    /// The size of the terminal.
    pub resize: Option<u32>,
}

impl Streams {
    /// Ids and names of the streams, in the order in which they are opened.
    fn ids_and_names(self) -> impl Iterator<Item = (u32, &'static str)> {
        let all = [
            (Some(self.error), "error"),
            (self.stdin, "stdin"),
            (self.stdout, "stdout"),
            (self.stderr, "stderr"),
            (self.resize, "resize"),
        ];
        all.into_iter().filter_map(|(stream, name)| Some((stream?, name)))
    }

    fn of(wanted: Wanted) -> Self {
        // A client's stream ids are odd and increase in the order in which they are opened.
        let mut next = 1;
        let mut number = || {
            next += 2;
            next - 2
        };
        Self {
            error: number(),
            stdin: wanted.stdin.then(&mut number),
            stdout: wanted.stdout.then(&mut number),
            stderr: (wanted.stderr && !wanted.tty).then(&mut number),
            resize: wanted.tty.then(&mut number),
        }
    }
}

/// The reading half.
#[derive(Debug)]
pub struct Frames<R> {
    socket: R,
    input: BytesMut,
    decoder: Decoder,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    /// The next event. Cancel-safe: bytes already read stay in the buffer.
    ///
    /// # Errors
    /// The connection has ended, or the bytes received are not SPDY.
    pub async fn next(&mut self) -> Result<Event, FrameError> {
        loop {
            if let Some(event) = self.decoder.next(&mut self.input)? {
                return Ok(event);
            }
            if self.input.capacity() - self.input.len() < READ_AT_LEAST {
                self.input.reserve(READ_BUFFER);
            }
            if self.socket.read_buf(&mut self.input).await.map_err(FrameError::Broken)? == 0 {
                return Err(FrameError::Closed);
            }
        }
    }
}

/// The writing half. After a failed write nothing more is written, without an error: the result may still be read.
#[derive(Debug)]
pub struct Writer<W> {
    socket: W,
    streams: Streams,
    tty: bool,
    input_ended: bool,
    broken: bool,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Sends input if there is a stdin that has not ended. Returns when the runtime has room for more.
    pub async fn input(&mut self, bytes: Vec<u8>) {
        let Some(stream) = self.streams.stdin.filter(|_| !self.input_ended) else { return };
        let mut bytes = Bytes::from(bytes);
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(MAX_FRAME_DATA));
            self.data(stream, piece, false).await;
        }
    }

    /// Ends the input. The input of a terminal has no end: whether a typed character means end of file depends on the terminal's
    /// settings, and containerd would end the command's output, too.
    pub async fn end_input(&mut self) {
        let Some(stream) = self.streams.stdin.filter(|_| !self.tty) else { return };
        if !std::mem::replace(&mut self.input_ended, true) {
            self.data(stream, Bytes::new(), true).await;
        }
    }

    /// Sends the size of the terminal in characters, if there is one; an invalid size is ignored.
    pub async fn resize(&mut self, width: u32, height: u32) {
        let fits = |length| (1..=u32::from(u16::MAX)).contains(&length);
        if let Some(stream) = self.streams.resize.filter(|_| fits(width) && fits(height)) {
            let size = format!("{{\"Width\":{width},\"Height\":{height}}}\n");
            self.data(stream, size.into(), false).await;
        }
    }

    /// Sends a ping; the ids of a client's pings are odd.
    pub async fn ping(&mut self, id: u32) {
        debug_assert!(id % 2 == 1, "those of a client are odd");
        self.write(ping(id).as_slice()).await;
    }

    /// Answers a ping of the server; an odd id is an answer to our own ping and needs none.
    pub async fn pong(&mut self, id: u32) {
        if id.is_multiple_of(2) {
            self.write(ping(id).as_slice()).await;
        }
    }

    async fn data(&mut self, stream: u32, bytes: Bytes, last: bool) {
        let head = data_head(stream, bytes.len(), last);
        self.write(Buf::chain(&head[..], bytes)).await;
    }

    async fn write(&mut self, mut bytes: impl Buf) {
        if !self.broken {
            // With TLS written bytes may still be buffered here.
            self.broken =
                self.socket.write_all_buf(&mut bytes).await.is_err() || self.socket.flush().await.is_err();
        }
    }
}

/// The open streams of one command, all of them accepted by the runtime.
#[derive(Debug)]
pub struct Session<R, W> {
    /// The reading half.
    pub frames: Frames<R>,
    /// The writing half.
    pub writer: Writer<W>,
    /// The stream ids.
    pub streams: Streams,
}

/// Opens the streams on a connection that is upgraded to SPDY; `input` holds the bytes read since the upgrade.
///
/// # Errors
/// The connection breaks, or the server does not accept the streams within [`SETUP_WITHIN`].
pub async fn open<R, W>(
    reader: R,
    writer: W,
    input: BytesMut,
    wanted: Wanted,
) -> Result<Session<R, W>, SetupError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let opened = timeout(SETUP_WITHIN, open_without_timeout(reader, writer, input, wanted)).await;
    opened.unwrap_or(Err(SetupError::Slow))
}

async fn open_without_timeout<R, W>(
    reader: R,
    writer: W,
    input: BytesMut,
    wanted: Wanted,
) -> Result<Session<R, W>, SetupError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let streams = Streams::of(wanted);
    let mut frames = Frames { socket: reader, input, decoder: Decoder::default() };
    let mut writer = Writer { socket: writer, streams, tty: wanted.tty, input_ended: false, broken: false };
    let mut opener = Opener::default();
    let opening: Vec<u8> = streams
        .ids_and_names()
        .flat_map(|(stream, name)| opener.open(stream, &[("streamtype", name)]))
        .collect();
    writer.socket.write_all(&opening).await.map_err(SetupError::Write)?;
    writer.socket.flush().await.map_err(SetupError::Write)?;
    // The server drops data of a stream that it has not accepted yet, so all must be accepted first.
    let mut pending: Vec<(u32, &str)> = streams.ids_and_names().collect();
    while !pending.is_empty() {
        match frames.next().await? {
            Event::Taken { stream } => pending.retain(|(open, _)| *open != stream),
            Event::Reset { stream, .. } | Event::Ended { stream } => {
                if let Some((_, name)) = streams.ids_and_names().find(|(known, _)| *known == stream) {
                    return Err(SetupError::Stream(name));
                }
            }
            Event::Data { .. } => return Err(SetupError::Early),
            Event::Ping { id } => writer.pong(id).await,
            Event::GoAway => return Err(SetupError::Read(FrameError::Closed)),
        }
    }
    Ok(Session { frames, writer, streams })
}
