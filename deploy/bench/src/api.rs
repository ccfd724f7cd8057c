//! The API of a server without TLS, over one connection.

use std::path::Path;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::Method;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

/// One connection to `kubectl proxy`.
pub struct Api {
    sender: SendRequest<Full<Bytes>>,
}

impl Api {
    /// Connects to the socket of a proxy.
    pub async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket).await.context("cannot connect to kubectl proxy")?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // It ends with the sender, or is broken, which the next request says.
        drop(tokio::spawn(connection));
        Ok(Self { sender })
    }

    /// Patches an object.
    pub async fn patch(&mut self, path: &str, patch: &Value) -> anyhow::Result<()> {
        let body = (patch.to_string(), "application/merge-patch+json");
        self.send(Method::PATCH, path, body).await.map(drop)
    }

    /// Deletes an object, or all of a list.
    pub async fn delete(&mut self, path: &str) -> anyhow::Result<()> {
        self.send(Method::DELETE, path, (String::new(), "application/json")).await.map(drop)
    }

    /// Reads an object or a list.
    pub async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        let body = self.send(Method::GET, path, (String::new(), "application/json")).await?;
        serde_json::from_slice(&body).with_context(|| format!("{path} is answered by what is no JSON"))
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        (body, kind): (String, &str),
    ) -> anyhow::Result<Bytes> {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", kind)
            .body(Full::from(body))?;
        // The answer before may have been read to its end a moment earlier than the connection knows of it.
        self.sender
            .ready()
            .await
            .with_context(|| format!("{path}: kubectl proxy has closed the connection"))?;
        let answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        ensure!(status.is_success(), "{path}: {status} {}", String::from_utf8_lossy(&body));
        Ok(body)
    }
}
