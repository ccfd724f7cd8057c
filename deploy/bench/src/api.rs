//! A client of the Kubernetes API over one connection to `kubectl proxy`.

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
    /// Connects to the proxy's socket.
    pub async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket).await.context("cannot connect to kubectl proxy")?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // The task ends when the sender is dropped. If the connection fails, the next request returns an error.
        drop(tokio::spawn(connection));
        Ok(Self { sender })
    }

    /// Patches an object.
    pub async fn patch(&mut self, path: &str, patch: &Value) -> anyhow::Result<()> {
        let body = (patch.to_string(), "application/merge-patch+json");
        self.send(Method::PATCH, path, body).await.map(drop)
    }

    /// Deletes an object or all objects of a list.
    pub async fn delete(&mut self, path: &str) -> anyhow::Result<()> {
        self.send(Method::DELETE, path, (String::new(), "application/json")).await.map(drop)
    }

    /// Reads an object or a list.
    pub async fn get(&mut self, path: &str) -> anyhow::Result<Value> {
        let body = self.send(Method::GET, path, (String::new(), "application/json")).await?;
        serde_json::from_slice(&body).with_context(|| format!("the response to GET {path} is not JSON"))
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
        // After the end of a response body, the connection needs a moment to become ready for the next request.
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
