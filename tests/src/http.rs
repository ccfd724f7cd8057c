//! A small HTTP client for the tests of node-api.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Time limit of one request.
const REQUEST: Duration = Duration::from_secs(20);

/// `GET url`: status, content type and body.
///
/// # Errors
/// No connection, or no whole answer within 20 s.
pub async fn get(url: &str) -> anyhow::Result<(u16, String, String)> {
    let answered = tokio::time::timeout(REQUEST, send_get(url)).await;
    answered.with_context(|| format!("{url} has not answered within {REQUEST:?}"))?.context(url.to_owned())
}

/// The body of a response with status 200.
///
/// # Errors
/// Those of [`get`], and any status but 200.
pub async fn get_ok(url: &str) -> anyhow::Result<String> {
    let (status, _, body) = get(url).await?;
    ensure!(status == 200, "{url}: {status} {body}");
    Ok(body)
}

async fn send_get(url: &str) -> anyhow::Result<(u16, String, String)> {
    let uri: http::Uri = url.parse()?;
    let authority = uri.authority().context("no host")?.to_string();
    let stream = TcpStream::connect(&authority).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let request = http::Request::get(path).header("host", authority).body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    let status = answer.status().as_u16();
    let kind = answer.headers().get("content-type").and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.to_owned();
    let body = answer.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok((status, kind, String::from_utf8(body.to_vec())?))
}
