//! The frames of SPDY/3.1 that a client needs to open a few streams and send and receive bytes.
//!
//! Written from the protocol's draft 3.1. Three things are simpler than in a full implementation:
//!
//! - **Headers go out stored, not compressed.** A header block has to be part of one zlib stream that was begun with
//!   the protocol's dictionary. Deflate knows blocks that are stored as they are, so a valid stream needs no
//!   compressor, and of the dictionary only its checksum ([`ZLIB_BEGIN`]).
//! - **Incoming headers are ignored.** The servers of container runtimes only accept a stream, with empty headers. As
//!   no header is ever read, the decompressor has no state to lose.
//! - **No windows.** The one implementation that container runtimes use has no flow-control windows: it sends until
//!   TCP blocks, and so does this.

use bytes::{Buf as _, Bytes, BytesMut};

/// The version in every control frame.
const VERSION: u32 = 3;
/// The first bit of a control frame.
const CONTROL: u32 = 1 << 31;
const FIN: u8 = 1;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
/// Bytes before the payload of every frame.
const HEAD: usize = 8;
/// The longest accepted payload of a control frame. Real ones have a few bytes.
const LONGEST_CONTROL: usize = 64 << 10;
/// The longest payload of any frame: its length has 24 bits.
const LONGEST: usize = (1 << 24) - 1;
/// How the zlib stream of the headers begins: deflate with a window of 32 KiB, "a dictionary is set", and the Adler-32
/// of the dictionary of SPDY/3 (RFC 1950 §2.2).
const ZLIB_BEGIN: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
/// An empty stored block: a reader must reach it before it returns the block ahead of it.
const ZLIB_FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];

/// The bytes received are not valid SPDY/3.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// A control frame of another version; usually the peer does not use SPDY at all.
    #[error("a control frame of version {0} instead of {VERSION}")]
    Version(u32),
    /// A control frame longer than the accepted maximum.
    #[error("a control frame of {0} bytes")]
    TooLong(usize),
    /// A control frame too short for its kind.
    #[error("a control frame of kind {kind} with only {length} bytes")]
    TooShort {
        /// Its kind.
        kind: u16,
        /// Its length.
        length: usize,
    },
    /// Data on stream 0, which does not exist.
    #[error("data of no stream")]
    NoStream,
}

/// Opens streams. The headers of one connection are one zlib stream, hence the state.
#[derive(Debug, Default)]
pub struct Opener {
    begun: bool,
}

impl Opener {
    /// The frame that opens `stream` with `header_fields`. The id must be odd and higher than all before; header names must be in
    /// lower case.
    pub fn open(&mut self, stream: u32, header_fields: &[(&str, &str)]) -> Vec<u8> {
        let mut headers = length32(header_fields.len()).to_be_bytes().to_vec();
        for text in header_fields.iter().flat_map(|(name, value)| [name, value]) {
            headers.extend(length32(text.len()).to_be_bytes());
            headers.extend(text.as_bytes());
        }
        let mut payload = stream.to_be_bytes().to_vec();
        // No associated stream, the highest priority, no certificate slot.
        payload.extend([0; 6]);
        if !std::mem::replace(&mut self.begun, true) {
            payload.extend(ZLIB_BEGIN);
        }
        let length = u16::try_from(headers.len()).expect("the headers of a stream are far below 64 KiB");
        payload.push(0);
        payload.extend(length.to_le_bytes());
        payload.extend((!length).to_le_bytes());
        payload.extend(headers);
        payload.extend(ZLIB_FLUSH);
        control(SYN_STREAM, &payload)
    }
}

/// The header of a data frame with `length` bytes; `last`: no more data follows on this stream.
pub fn data_head(stream: u32, length: usize, last: bool) -> [u8; HEAD] {
    debug_assert!(length <= LONGEST, "data is cut into frames before");
    head(stream, if last { FIN } else { 0 }, length)
}

/// A ping, and the answer to one.
pub fn ping(id: u32) -> Vec<u8> {
    control(PING, &id.to_be_bytes())
}

fn control(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = head(CONTROL | (VERSION << 16) | u32::from(kind), 0, payload.len()).to_vec();
    frame.extend(payload);
    frame
}

fn head(first: u32, flags: u8, length: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&first.to_be_bytes());
    head[4..].copy_from_slice(&((u32::from(flags) << 24) | length32(length)).to_be_bytes());
    head
}

fn length32(length: usize) -> u32 {
    u32::try_from(length).expect("nothing here is longer than a frame")
}

/// An event from the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It has accepted a stream.
    Taken {
        /// The stream id.
        stream: u32,
    },
    /// Bytes of a stream; those of one frame may come in several pieces.
    Data {
        /// The stream id.
        stream: u32,
        /// At least one.
        bytes: Bytes,
    },
    /// It sends no more data on a stream.
    Ended {
        /// The stream id.
        stream: u32,
    },
    /// It has reset a stream, in both directions.
    Reset {
        /// The stream id.
        stream: u32,
        /// The status code of the protocol: 3 is refused, 5 cancelled.
        status: u32,
    },
    /// A ping: it expects an answer with the same id.
    Ping {
        /// The id.
        id: u32,
    },
    /// It accepts no more streams.
    GoAway,
}

/// Decodes bytes into events.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The data frame whose payload is being read.
    data: Option<DataFrame>,
}

#[derive(Debug)]
struct DataFrame {
    stream: u32,
    left: usize,
    last: bool,
}

impl Decoder {
    /// Takes the next event from the beginning of `input`; `None` when more bytes are needed.
    ///
    /// Data is never left in `input`, and at most 64 KiB of a control frame are, so it stays small if it is filled in small
    /// steps.
    ///
    /// # Errors
    /// The bytes are not SPDY/3.1. The connection cannot be used any more.
    pub fn next(&mut self, input: &mut BytesMut) -> Result<Option<Event>, SpdyError> {
        loop {
            if let Some(frame) = &mut self.data {
                let stream = frame.stream;
                if frame.left == 0 {
                    let last = frame.last;
                    self.data = None;
                    if last {
                        return Ok(Some(Event::Ended { stream }));
                    }
                    continue;
                }
                if input.is_empty() {
                    return Ok(None);
                }
                let bytes = input.split_to(frame.left.min(input.len())).freeze();
                frame.left -= bytes.len();
                return Ok(Some(Event::Data { stream, bytes }));
            }
            let Some(head) = Head::of(input) else { return Ok(None) };
            if head.first & CONTROL == 0 {
                if head.first == 0 {
                    return Err(SpdyError::NoStream);
                }
                input.advance(HEAD);
                let last = head.flags & FIN != 0;
                self.data = Some(DataFrame { stream: head.first, left: head.length, last });
                continue;
            }
            let kind = head.control_kind()?;
            if input.len() < HEAD + head.length {
                return Ok(None);
            }
            input.advance(HEAD);
            let payload = input.split_to(head.length).freeze();
            if let Some(event) = self.control(kind, head.flags & FIN != 0, payload)? {
                return Ok(Some(event));
            }
        }
    }

    /// Decodes a control frame; `None` for one that this client ignores.
    fn control(&mut self, kind: u16, last: bool, mut payload: Bytes) -> Result<Option<Event>, SpdyError> {
        let length = payload.len();
        let mut number = || {
            if payload.len() < 4 { Err(SpdyError::TooShort { kind, length }) } else { Ok(payload.get_u32()) }
        };
        Ok(match kind {
            SYN_REPLY => {
                let stream = number()?;
                self.data = last.then_some(DataFrame { stream, left: 0, last });
                Some(Event::Taken { stream })
            }
            RST_STREAM => Some(Event::Reset { stream: number()?, status: number()? }),
            PING => Some(Event::Ping { id: number()? }),
            GOAWAY => Some(Event::GoAway),
            HEADERS if last => Some(Event::Ended { stream: number()? }),
            _ => None,
        })
    }
}

#[derive(Debug, Clone, Copy)]
struct Head {
    first: u32,
    flags: u8,
    length: usize,
}

impl Head {
    fn of(input: &BytesMut) -> Option<Self> {
        let mut head = input.get(..HEAD)?;
        let first = head.get_u32();
        let flags = head.get_u8();
        let length = usize::try_from(head.get_uint(3)).ok()?;
        Some(Self { first, flags, length })
    }

    fn control_kind(self) -> Result<u16, SpdyError> {
        let version = (self.first & !CONTROL) >> 16;
        if version != VERSION {
            return Err(SpdyError::Version(version));
        }
        if self.length > LONGEST_CONTROL {
            return Err(SpdyError::TooLong(self.length));
        }
        let [_, _, high, low] = self.first.to_be_bytes();
        Ok(u16::from_be_bytes([high, low]))
    }
}

#[cfg(test)]
mod tests;
