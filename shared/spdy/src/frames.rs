//! The frames of SPDY/3.1, as far as a client needs them that opens a few streams and moves bytes on them.
//!
//! Written from the protocol's draft 3.1. Three things are simpler here than a whole implementation would have them:
//!
//! - **Headers go out stored, not compressed.** A header block has to be part of one zlib stream that was begun with
//!   the protocol's dictionary. Deflate knows blocks that are stored as they are, so a valid stream needs no
//!   compressor, and of the dictionary only its checksum ([`ZLIB_BEGIN`]).
//! - **Headers that come in are passed over.** What the servers of container runtimes answer to a stream is that it is
//!   taken; their headers are empty. As none of them is ever read, the decompressor has no state to lose.
//! - **No windows.** The one implementation that container runtimes use neither keeps nor gives them: it sends until
//!   TCP holds it back, and so does this.

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
/// The longest payload of a control frame that is taken. Those that come are a few bytes long.
const LONGEST_CONTROL: usize = 64 << 10;
/// The longest payload of any frame: its length has 24 bits.
const LONGEST: usize = (1 << 24) - 1;
/// How the zlib stream of the headers begins: deflate with a window of 32 KiB, "a dictionary is set", and the Adler-32
/// of the dictionary of SPDY/3 (RFC 1950 §2.2).
const ZLIB_BEGIN: [u8; 6] = [0x78, 0x20, 0xe3, 0xc6, 0xa7, 0xc2];
/// A stored block of no bytes: what a reader has to meet before it hands out the block ahead of it.
const ZLIB_FLUSH: [u8; 5] = [0, 0, 0, 0xff, 0xff];

/// Bytes that are no SPDY/3.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// A control frame of another version; mostly, what comes is no SPDY at all.
    #[error("a control frame of version {0} instead of {VERSION}")]
    Version(u32),
    /// A control frame that is longer than any that is expected.
    #[error("a control frame of {0} bytes")]
    TooLong(usize),
    /// A control frame that is shorter than its kind needs.
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
    /// The frame that opens `stream`, which has to be odd and higher than all before, with these headers; their names have to
    /// be in lower case.
    pub fn open(&mut self, stream: u32, named: &[(&str, &str)]) -> Vec<u8> {
        let mut headers = length32(named.len()).to_be_bytes().to_vec();
        for text in named.iter().flat_map(|(name, value)| [name, value]) {
            headers.extend(length32(text.len()).to_be_bytes());
            headers.extend(text.as_bytes());
        }
        let mut payload = stream.to_be_bytes().to_vec();
        // Belongs to no other stream, has the highest priority, uses no certificate.
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

/// The bytes before `length` bytes of data; `last`: no more follow on this stream.
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

/// What the other side has said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It has taken a stream.
    Taken {
        /// Which.
        stream: u32,
    },
    /// Bytes of a stream; those of one frame may come in several pieces.
    Data {
        /// Which.
        stream: u32,
        /// At least one.
        bytes: Bytes,
    },
    /// It sends no more on a stream.
    Ended {
        /// Which.
        stream: u32,
    },
    /// It has given up a stream in both directions.
    Reset {
        /// Which.
        stream: u32,
        /// Why, as the protocol counts: 3 is refused, 5 cancelled.
        status: u32,
    },
    /// It wants an answer with the same number.
    Ping {
        /// Its number.
        id: u32,
    },
    /// It takes no more streams.
    GoAway,
}

/// Makes events of bytes.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The data frame in whose payload the input stands.
    data: Option<DataFrame>,
}

#[derive(Debug)]
struct DataFrame {
    stream: u32,
    left: usize,
    last: bool,
}

impl Decoder {
    /// Takes the next event from the beginning of `input`; `None` when it takes more bytes to know it.
    ///
    /// Of data nothing is left behind in `input`, and of a control frame at most 64 KiB, so it stays small if it is
    /// filled in small steps.
    ///
    /// # Errors
    /// What has come is no SPDY/3.1. Nothing sensible can follow.
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

    /// `None`: a frame that says nothing to a client of this kind.
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
