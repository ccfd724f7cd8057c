//! A client of the streams of a container over WebSocket (RFC 6455), as browsers and `kubectl` have it: channels of
//! `v5.channel.k8s.io`, and the bytes in a tunnel.

use anyhow::{Context as _, bail};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

/// The channel that ends the one that it names.
const CLOSE: u8 = 255;

/// The output of a command on its channels, and its final Status.
#[derive(Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// On channel 1.
    pub stdout: Vec<u8>,
    /// On channel 2.
    pub stderr: Vec<u8>,
    /// On channel 3.
    pub status: Value,
}

impl CommandOutput {
    /// The exit code in the Status.
    pub fn exit_code(&self) -> Option<i32> {
        if self.status["status"] == "Success" {
            return Some(0);
        }
        let causes = self.status["details"]["causes"].as_array()?;
        causes.iter().find(|cause| cause["reason"] == "ExitCode")?["message"].as_str()?.parse().ok()
    }
}

/// The client's end.
#[derive(Debug)]
pub struct WebSocket<S>(WebSocketStream<S>);

/// The headers of a request for a WebSocket with these subprotocols, with commas between them.
pub fn websocket_headers(protocols: &str) -> [(&str, &str); 5] {
    [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "a2VlbHNvbiBpcyBhIGtleQ=="),
        ("sec-websocket-protocol", protocols),
    ]
}

impl<S: AsyncRead + AsyncWrite + Unpin> WebSocket<S> {
    /// On a connection that the server has changed.
    pub async fn over(connection: S) -> Self {
        Self(WebSocketStream::from_raw_socket(connection, Role::Client, None).await)
    }

    /// Sends a message.
    pub async fn send(&mut self, bytes: Vec<u8>) -> anyhow::Result<()> {
        self.0.send(Message::Binary(bytes.into())).await.context("cannot send a message")
    }

    /// The next message; `None` when the server has said good-bye.
    pub async fn next(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            match self.0.next().await.transpose().context("the WebSocket broke")? {
                Some(Message::Binary(bytes)) => return Ok(Some(bytes.to_vec())),
                Some(Message::Close(_)) => return Ok(None),
                Some(Message::Text(text)) => bail!("a text: {text}"),
                Some(_) => {}
                None => bail!("the connection has ended without a good-bye"),
            }
        }
    }

    /// Says something on a channel.
    pub async fn say(&mut self, channel: u8, bytes: &[u8]) -> anyhow::Result<()> {
        self.send([&[channel], bytes].concat()).await
    }

    /// Ends a channel.
    pub async fn end(&mut self, channel: u8) -> anyhow::Result<()> {
        self.send(vec![CLOSE, channel]).await
    }

    /// The next message by its channel; `None` when the server has said good-bye.
    pub async fn hear(&mut self) -> anyhow::Result<Option<(u8, Vec<u8>)>> {
        let Some(message) = self.next().await? else { return Ok(None) };
        let (channel, bytes) = message.split_first().context("a message without a channel")?;
        Ok(Some((*channel, bytes.to_vec())))
    }

    /// Hears until its output contains `text`; what was heard on channel 1.
    pub async fn until(&mut self, text: &str) -> anyhow::Result<String> {
        let mut heard = String::new();
        while !heard.contains(text) {
            match self.hear().await? {
                Some((1, bytes)) => heard.push_str(&String::from_utf8_lossy(&bytes)),
                other => bail!("{text:?} has not come after {heard:?} but {other:?}"),
            }
        }
        Ok(heard)
    }

    /// Everything until the good-bye.
    pub async fn rest(mut self) -> anyhow::Result<CommandOutput> {
        let (mut stdout, mut stderr, mut status) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((channel, bytes)) = self.hear().await? {
            match channel {
                1 => stdout.extend(bytes),
                2 => stderr.extend(bytes),
                3 => status.extend(bytes),
                odd => bail!("a message on channel {odd}: {bytes:?}"),
            }
        }
        let status = serde_json::from_slice(&status)
            .with_context(|| format!("no status: {:?}", String::from_utf8_lossy(&status)))?;
        Ok(CommandOutput { stdout, stderr, status })
    }
}
