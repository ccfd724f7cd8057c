//! A fake streaming server of a runtime, whose end of the streams a test controls.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// The response of a server that upgrades to SPDY.
pub(crate) const UPGRADED: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
     X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n";
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
pub(crate) const PING: u16 = 6;

/// Waits at most 20 s.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what).await.expect("nothing within 20 s")
}

/// A listening streaming server.
#[derive(Debug)]
pub(crate) struct StreamingServer {
    listener: TcpListener,
    pub url: String,
}

impl StreamingServer {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/exec/secret", listener.local_addr().unwrap());
        Self { listener, url }
    }

    /// Accepts a connection and sends `answer` as the response.
    pub(crate) async fn accept(&self, answer: &str) -> ServerEnd {
        let (mut socket, _) = soon(self.listener.accept()).await.unwrap();
        // As the servers of runtimes do; otherwise the last write would wait for an acknowledgement of the previous one.
        socket.set_nodelay(true).unwrap();
        let mut input = BytesMut::new();
        while !input.ends_with(b"\r\n\r\n") {
            assert!(soon(socket.read_buf(&mut input)).await.unwrap() > 0, "{input:?}");
        }
        let request = String::from_utf8(input.split().to_vec()).unwrap();
        assert!(request.starts_with("POST /exec/secret HTTP/1.1\r\n"), "{request}");
        for header in
            ["Connection: Upgrade", "Upgrade: SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io"]
        {
            assert!(request.contains(&format!("\r\n{header}\r\n")), "{request}");
        }
        socket.write_all(answer.as_bytes()).await.unwrap();
        ServerEnd { socket, input, streams: BTreeMap::new() }
    }

    /// Accepts a connection and the streams that the client opens on it.
    pub(crate) async fn command(&self, streams: usize) -> ServerEnd {
        let mut other = self.accept(UPGRADED).await;
        for _ in 0..streams {
            other.take_stream().await;
        }
        other
    }
}

/// A received frame.
#[derive(Debug)]
pub(crate) enum Frame {
    Control { kind: u16, payload: Bytes },
    Data { stream: u32, last: bool, payload: Bytes },
}

/// The server's end of a command's streams.
#[derive(Debug)]
pub(crate) struct ServerEnd {
    pub socket: TcpStream,
    input: BytesMut,
    /// Stream ids by stream name.
    pub streams: BTreeMap<String, u32>,
}

impl ServerEnd {
    /// The next frame; `None` if the connection has ended.
    pub(crate) async fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(mut head) = self.input.get(..8) {
                let first = head.get_u32();
                let flags = head.get_u8();
                let length = head.get_uint(3) as usize;
                if self.input.len() >= 8 + length {
                    self.input.advance(8);
                    let payload = self.input.split_to(length).freeze();
                    return Some(if first & 0x8000_0000 == 0 {
                        Frame::Data { stream: first, last: flags & 1 != 0, payload }
                    } else {
                        assert_eq!(first >> 16, 0x8003);
                        Frame::Control { kind: (first & 0xffff) as u16, payload }
                    });
                }
            }
            // A connection that is closed with unread data is reset.
            if soon(self.socket.read_buf(&mut self.input)).await.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    async fn take_stream(&mut self) {
        let Some(Frame::Control { kind: SYN_STREAM, mut payload }) = self.frame().await else {
            panic!("expected a new stream")
        };
        let stream = payload.get_u32();
        payload.advance(6);
        if self.streams.is_empty() {
            payload.advance(6);
        }
        // The header of a stored block, then the number of headers.
        payload.advance(5);
        assert_eq!(payload.get_u32(), 1);
        let mut text = || {
            let length = payload.get_u32() as usize;
            String::from_utf8(payload.split_to(length).to_vec()).unwrap()
        };
        assert_eq!(text(), "streamtype");
        self.streams.insert(text(), stream);
        self.control(SYN_REPLY, &[stream]).await;
    }

    /// Sends bytes on a stream.
    pub(crate) async fn send(&mut self, name: &str, bytes: &[u8], last: bool) {
        let mut frame = self.streams[name].to_be_bytes().to_vec();
        let length = u32::try_from(bytes.len()).unwrap() | if last { 1 << 24 } else { 0 };
        frame.extend(length.to_be_bytes());
        frame.extend(bytes);
        self.socket.write_all(&frame).await.unwrap();
    }

    /// Sends a control frame.
    pub(crate) async fn control(&mut self, kind: u16, payload: &[u32]) {
        let mut frame = (0x8003_0000 | u32::from(kind)).to_be_bytes().to_vec();
        frame.extend(u32::try_from(payload.len() * 4).unwrap().to_be_bytes());
        frame.extend(payload.iter().flat_map(|number| number.to_be_bytes()));
        self.socket.write_all(&frame).await.unwrap();
    }

    /// Resets a stream.
    pub(crate) async fn reset(&mut self, name: &str) {
        self.control(RST_STREAM, &[self.streams[name], 5]).await;
    }

    /// Sends the command's status, resets all streams and closes the connection, as container runtimes do.
    pub(crate) async fn end(mut self, status: &str) {
        self.send("error", status.as_bytes(), false).await;
        for name in self.streams.clone().into_keys() {
            self.reset(&name).await;
        }
    }

    /// The next bytes on a stream, and whether they are the last.
    pub(crate) async fn data(&mut self) -> (String, Bytes, bool) {
        let Some(Frame::Data { stream, last, payload }) = self.frame().await else { panic!("expected data") };
        let name = self.streams.iter().find(|(_, number)| **number == stream).unwrap().0;
        (name.clone(), payload, last)
    }
}
