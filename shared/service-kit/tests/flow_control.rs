//! A stream whose receiver does not read does not block other streams of its connection.

#![allow(clippy::unwrap_used)] // A panic is how a test fails.
#![allow(clippy::disallowed_methods, reason = "a test awaits its tasks or ends with them")]

use std::convert::Infallible;
use std::time::Duration;

use axum::routing::post;
use bytes::Bytes;
use futures_util::stream;
use http::Request;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use keelson_config::Config;
use keelson_service_kit::server::{CallerPolicy, StackLayer, serve};
use keelson_service_kit::{CancellationToken, Metrics, PeerChannel, connect_unix};
use tonic::body::Body;
use tonic::service::Routes;
use tower::{Service as _, ServiceExt as _};

const PIECE: usize = 64 << 10;

/// An endless stream of zeroes.
fn endless() -> impl http_body::Body<Data = Bytes, Error = Infallible> {
    StreamBody::new(stream::repeat_with(|| Ok(Frame::data(Bytes::from_static(&[0; PIECE])))))
}

/// A service that never reads what `/test/Swallow` sends, sends without an end at `/test/Flood`, and answers at `/test/Answer`.
fn routes() -> Routes {
    let router = axum::Router::new()
        .route(
            "/test/Swallow",
            post(async |request: axum::extract::Request| {
                // The response headers are sent, and the request stays unread until the caller disconnects.
                let (_, body) = request.into_parts();
                let kept = stream::once(async move {
                    std::future::pending::<()>().await;
                    drop(body);
                    Ok::<_, Infallible>(Bytes::new())
                });
                axum::body::Body::from_stream(kept)
            }),
        )
        .route("/test/Flood", post(async || axum::body::Body::new(endless())))
        .route(
            "/test/Answer",
            post(async |request: axum::extract::Request| {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                format!("{} bytes have come", body.len())
            }),
        );
    Routes::from(router)
}

async fn call(channel: &PeerChannel, path: &str, body: Body) -> http::Response<Body> {
    let mut channel = channel.clone();
    let request = Request::post(format!("http://localhost{path}")).body(body).unwrap();
    channel.ready().await.unwrap().call(request).await.unwrap()
}

/// Makes a call with a body and checks the response.
async fn is_answered(channel: &PeerChannel, after: &str) {
    let body = Body::new(http_body_util::Full::new(Bytes::from_static(&[1; 1000])));
    let answered =
        async { call(channel, "/test/Answer", body).await.into_body().collect().await.unwrap().to_bytes() };
    let text = tokio::time::timeout(Duration::from_secs(10), answered).await;
    assert_eq!(&text.unwrap_or_else(|_| panic!("held up by {after}"))[..], b"1000 bytes have come");
}

#[tokio::test]
async fn unread_streams_do_not_block_other_calls() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let stop = CancellationToken::new();
    let stack = StackLayer::new(CallerPolicy::new(&Config::default()), Metrics::new());
    let (tell, bound) = tokio::sync::oneshot::channel();
    let server = tokio::spawn({
        let (socket, stop) = (socket.clone(), stop.clone());
        async move { serve(&socket, routes(), stack, stop, || tell.send(()).unwrap()).await }
    });
    bound.await.unwrap();
    let channel = connect_unix("api", &socket);
    let mut held = Vec::new();
    for n in 1..=20 {
        held.push(call(&channel, "/test/Swallow", Body::new(endless())).await);
        is_answered(&channel, &format!("{n} requests that are not read")).await;
    }
    for n in 1..=20 {
        let mut answer = call(&channel, "/test/Flood", Body::empty()).await;
        answer.body_mut().frame().await.unwrap().unwrap();
        held.push(answer);
        is_answered(&channel, &format!("{n} answers that are not read")).await;
    }
    // The number of concurrently open calls is not limited.
    for _ in 0..300 {
        held.push(call(&channel, "/test/Swallow", Body::empty()).await);
    }
    is_answered(&channel, "340 open calls").await;
    drop(held);
    stop.cancel();
    server.await.unwrap().unwrap();
}
