//! A fake command behind SPDY/3.1 streams, as a container runtime serves them.

#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use bytes::{Buf as _, Bytes, BytesMut};
use keelson_proto::keelson::runtime::v1 as rt;
use keelson_testkit::fakes::Conversation;
use rt::stream_request::Item as RequestItem;
use rt::stream_response::Item as ResponseItem;
use serde_json::json;
use tokio::sync::watch;
use tonic::Status;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const PING: u16 = 6;
/// The ID of the ping that this side sends.
const OWN_PING: u32 = 2;

/// Echoes stdin and terminal sizes to stdout. When stdin is closed, it writes `bye` to stderr and exits with code 3; without
/// stdin it succeeds at once. The input `break` breaks the connection.
#[derive(Debug)]
pub struct Command {
    /// How many streams are expected.
    expected: usize,
    /// The names of the streams in the order in which they were opened.
    pub opened: Mutex<Vec<String>>,
    pub observed: watch::Sender<Observed>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// Pings received.
    pub pings: u32,
    /// Answers to the ping of this side.
    pub answers: u32,
    /// The other side has disconnected.
    pub disconnected: bool,
}

/// Both directions of a stream into a pod.
pub type StreamConversation = Conversation<rt::StreamRequest, rt::StreamResponse>;

/// Sends a response on the stream.
pub async fn send(stream: &StreamConversation, item: ResponseItem) {
    stream.send(rt::StreamResponse { item: Some(item) }).await;
}

struct Frame {
    /// `None`: data.
    kind: Option<u16>,
    stream: u32,
    last: bool,
    payload: Bytes,
}

fn control(kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&[0x80, 3], &kind.to_be_bytes()[..], &length, payload].concat()
}

fn data(stream: u32, payload: &[u8], last: bool) -> Vec<u8> {
    let mut length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    length[0] = u8::from(last);
    [&stream.to_be_bytes()[..], &length, payload].concat()
}

impl Command {
    pub fn with_streams(expected: usize) -> Arc<Self> {
        Arc::new(Self { expected, opened: Mutex::default(), observed: watch::Sender::default() })
    }

    fn stream(&self, name: &str) -> Option<u32> {
        let at = self.opened.lock().unwrap().iter().position(|opened| opened == name)?;
        Some(u32::try_from(at).unwrap() * 2 + 1)
    }

    /// Serves the frames after `head`.
    pub async fn run(
        self: Arc<Self>,
        mut stream: StreamConversation,
        head: rt::StreamHead,
    ) -> Result<(), Status> {
        // The start, which was checked.
        stream.next().await;
        send(&stream, ResponseItem::Head(head)).await;
        let mut input = BytesMut::new();
        let mut first = true;
        while let Some(frame) = next_frame(&mut stream, &mut input).await {
            let answer = match frame.kind {
                Some(SYN_STREAM) => self.open(&frame.payload, std::mem::take(&mut first)),
                Some(PING) if frame.payload[..] == OWN_PING.to_be_bytes() => {
                    self.observed.send_modify(|observed| observed.answers += 1);
                    Vec::new()
                }
                Some(PING) => {
                    self.observed.send_modify(|observed| observed.pings += 1);
                    control(PING, &frame.payload)
                }
                None if Some(frame.stream) == self.stream("stdin") && &frame.payload[..] == b"break" => {
                    return Ok(());
                }
                None if Some(frame.stream) == self.stream("stdin") => {
                    let mut answer = data(self.stream("stdout").unwrap(), &frame.payload, false);
                    if frame.last {
                        answer.extend(self.end(Some(3)));
                    }
                    answer
                }
                None if Some(frame.stream) == self.stream("resize") => {
                    data(self.stream("stdout").unwrap(), &frame.payload, false)
                }
                _ => Vec::new(),
            };
            if !answer.is_empty() {
                send(&stream, ResponseItem::Data(answer)).await;
            }
        }
        self.observed.send_modify(|observed| observed.disconnected = true);
        Ok(())
    }

    /// Accepts a stream.
    fn open(&self, payload: &[u8], first: bool) -> Vec<u8> {
        // After stream ID, priority, slot and, in the first frame, the zlib header, there is one stored block.
        let mut block = &payload[10 + if first { 6 } else { 0 }..];
        assert_eq!(block.get_u8(), 0);
        let length = usize::from(block.get_u16_le());
        block.advance(2);
        let mut headers = &block[..length];
        assert_eq!(headers.get_u32(), 1);
        let mut text = || {
            let length = usize::try_from(headers.get_u32()).unwrap();
            String::from_utf8(headers.copy_to_bytes(length).to_vec()).unwrap()
        };
        assert_eq!(text(), "streamtype");
        let name = text();
        let count = {
            let mut opened = self.opened.lock().unwrap();
            opened.push(name);
            opened.len()
        };
        let mut answer = control(SYN_REPLY, &payload[..4]);
        if count == self.expected {
            answer.extend(control(PING, &OWN_PING.to_be_bytes()));
            if self.stream("stdin").is_none() {
                answer.extend(self.end(None));
            }
        }
        answer
    }

    /// The last frames, with an exit code or success.
    fn end(&self, code: Option<i32>) -> Vec<u8> {
        let status = match code {
            None => json!({"metadata": {}, "status": "Success"}),
            Some(code) => json!({
                "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                "message": format!("command terminated with non-zero exit code: {code}"),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            }),
        };
        let mut all = Vec::new();
        for (name, bytes) in
            [("stdout", &b""[..]), ("stderr", b"bye"), ("error", status.to_string().as_bytes())]
        {
            all.extend(self.stream(name).map(|stream| data(stream, bytes, true)).unwrap_or_default());
        }
        all
    }
}

/// The next frame; `None` when the other side has disconnected.
async fn next_frame(stream: &mut StreamConversation, input: &mut BytesMut) -> Option<Frame> {
    loop {
        if input.len() >= 8 {
            let mut head = &input[..8];
            let (first, flags) = (head.get_u32(), head.get_u8());
            let length = usize::try_from(head.get_uint(3)).unwrap();
            if input.len() >= 8 + length {
                input.advance(8);
                let payload = input.split_to(length).freeze();
                let kind = (first >> 31 == 1).then_some(u16::try_from(first & 0xffff).unwrap());
                return Some(Frame { kind, stream: first, last: flags & 1 == 1, payload });
            }
        }
        match stream.next().await?.item? {
            RequestItem::Data(bytes) => input.extend_from_slice(&bytes),
            RequestItem::Start(_) => panic!("`start` a second time"),
        }
    }
}
