//! A connection on which the streams of one command are open.

use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::frames::{Decoder, Event, Opener, SpdyError, data_head, ping};

/// From the connection to the last stream that is taken (runtime-and-resources.md §0.2).
pub const SETUP_WITHIN: Duration = Duration::from_secs(30);
/// Room for one read.
const READ: usize = 64 << 10;
/// With less room than this a read gets a new buffer.
const READ_AT_LEAST: usize = 8 << 10;
/// The longest piece of input in one frame: the other side holds a whole frame in memory.
const WRITE: usize = 32 << 10;

/// Why there are no streams.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The connection ended or broke.
    #[error("its streaming server has broken the connection")]
    Read(#[from] FrameError),
    /// The connection broke.
    #[error("its streaming server has broken the connection")]
    Write(#[source] io::Error),
    /// The server gives up a stream.
    #[error("its streaming server does not take the stream {0}")]
    Stream(&'static str),
    /// The server sends what it should not, yet.
    #[error("its streaming server sends data of a stream that it has not taken")]
    Early,
    /// It takes too long.
    #[error("its streaming server has not taken the streams within 30 s")]
    Slow,
}

/// Why no more frames come.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection is closed.
    #[error("it was closed")]
    Closed,
    /// The connection is broken.
    #[error("{0}")]
    Broken(io::Error),
    /// What comes is no SPDY.
    #[error("what comes is no SPDY/3.1")]
    NotSpdy(#[from] SpdyError),
}

/// Which streams a command has; the server waits for as many as were asked for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// It gets input.
    pub stdin: bool,
    /// Its output is wanted.
    pub stdout: bool,
    /// So is its other output; a terminal has none.
    pub stderr: bool,
    /// It has a terminal: one output, and a size.
    pub tty: bool,
}

impl Wanted {
    /// All that it writes.
    pub fn all(stdin: bool, tty: bool) -> Self {
        Self { stdin, stdout: true, stderr: true, tty }
    }
}

/// The numbers of the streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streams {
    /// On which the end is told.
    pub error: u32,
    /// Input.
    pub stdin: Option<u32>,
    /// Output.
    pub stdout: Option<u32>,
    /// The other output, unless there is a terminal.
    pub stderr: Option<u32>,
    /// The size of the terminal.
    pub resize: Option<u32>,
}

impl Streams {
    /// The streams by number, in the order in which they are opened.
    fn named(self) -> impl Iterator<Item = (u32, &'static str)> {
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
        // A client's streams are odd and rise in the order in which they are opened.
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
    /// What comes next. Cancel-safe: what was read stays.
    ///
    /// # Errors
    /// The connection has ended, or what comes is no SPDY.
    pub async fn next(&mut self) -> Result<Event, FrameError> {
        loop {
            if let Some(event) = self.decoder.next(&mut self.input)? {
                return Ok(event);
            }
            if self.input.capacity() - self.input.len() < READ_AT_LEAST {
                self.input.reserve(READ);
            }
            if self.socket.read_buf(&mut self.input).await.map_err(FrameError::Broken)? == 0 {
                return Err(FrameError::Closed);
            }
        }
    }
}

/// The writing half. Once a write has failed nothing is written any more: how the command ended may still be read.
#[derive(Debug)]
pub struct Writer<W> {
    socket: W,
    streams: Streams,
    tty: bool,
    input_ended: bool,
    broken: bool,
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Hands on input, as far as there is a stdin that has not ended. Returns when the runtime has room for more.
    pub async fn input(&mut self, bytes: Vec<u8>) {
        let Some(stream) = self.streams.stdin.filter(|_| !self.input_ended) else { return };
        let mut bytes = Bytes::from(bytes);
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(WRITE));
            self.data(stream, piece, false).await;
        }
    }

    /// Ends the input. A terminal's input has no end: what a person types is an end or not as the terminal is set, and
    /// containerd would end the command's output, too.
    pub async fn end_input(&mut self) {
        let Some(stream) = self.streams.stdin.filter(|_| !self.tty) else { return };
        if !std::mem::replace(&mut self.input_ended, true) {
            self.data(stream, Bytes::new(), true).await;
        }
    }

    /// Tells the size of the terminal in characters, if there is one; a size that cannot be is passed over.
    pub async fn resize(&mut self, width: u32, height: u32) {
        let fits = |length| (1..=u32::from(u16::MAX)).contains(&length);
        if let Some(stream) = self.streams.resize.filter(|_| fits(width) && fits(height)) {
            let size = format!("{{\"Width\":{width},\"Height\":{height}}}\n");
            self.data(stream, size.into(), false).await;
        }
    }

    /// Asks whether the other side is there; what a client asks with is odd.
    pub async fn ping(&mut self, id: u32) {
        debug_assert!(id % 2 == 1, "those of a client are odd");
        self.write(ping(id).as_slice()).await;
    }

    /// Answers a ping; what is the answer to one of ours needs none.
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
            // With TLS what was written may still be here.
            self.broken =
                self.socket.write_all_buf(&mut bytes).await.is_err() || self.socket.flush().await.is_err();
        }
    }
}

/// The streams of one command, all of them taken by the runtime.
#[derive(Debug)]
pub struct Session<R, W> {
    /// What comes.
    pub frames: Frames<R>,
    /// What goes.
    pub writer: Writer<W>,
    /// The numbers of the streams.
    pub streams: Streams,
}

/// Opens the streams on a connection that has changed to SPDY; `input` is what has been read of it since.
///
/// # Errors
/// The connection breaks, or the other side does not take the streams within [`SETUP_WITHIN`].
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
    let opened = timeout(SETUP_WITHIN, open_at_leisure(reader, writer, input, wanted)).await;
    opened.unwrap_or(Err(SetupError::Slow))
}

async fn open_at_leisure<R, W>(
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
    let opening: Vec<u8> =
        streams.named().flat_map(|(stream, name)| opener.open(stream, &[("streamtype", name)])).collect();
    writer.socket.write_all(&opening).await.map_err(SetupError::Write)?;
    writer.socket.flush().await.map_err(SetupError::Write)?;
    // The other side drops data of a stream that it has not taken yet, so all have to be taken first.
    let mut left: Vec<(u32, &str)> = streams.named().collect();
    while !left.is_empty() {
        match frames.next().await? {
            Event::Taken { stream } => left.retain(|(open, _)| *open != stream),
            Event::Reset { stream, .. } | Event::Ended { stream } => {
                if let Some((_, name)) = streams.named().find(|(known, _)| *known == stream) {
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
