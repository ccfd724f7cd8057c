//! WebSockets that end here (RFC 6455).

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Bytes, Message};

use super::has;
use super::pump::CHANGE_WITHIN;

/// The longest message that is taken: some clients send all their input in one.
const LONGEST: usize = 16 << 20;
/// Room for one read, and for what waits to be written.
const BUFFER: usize = 16 << 10;
/// How long a client may take to say good-bye.
const CLOSE_WITHIN: std::time::Duration = std::time::Duration::from_secs(2);

type Socket = WebSocketStream<TokioIo<Upgraded>>;
/// To the client.
pub(super) type ToClient = SplitSink<Socket, Message>;
/// From the client.
pub(super) type FromClient = SplitStream<Socket>;

/// A request for a WebSocket with a protocol that is spoken here.
#[derive(Debug)]
pub(super) struct Handshake {
    accept: String,
    /// Those of the client that are spoken, in its order; at least one.
    pub(super) protocols: Vec<String>,
}

impl Handshake {
    /// Reads a request; `None` where it is for no WebSocket, or one without a protocol that `is_spoken`: that is the runtime's.
    /// An answer for one that is wrong.
    #[allow(clippy::result_large_err, reason = "the other way is the usual one")]
    pub(super) fn of(request: &Request, is_spoken: fn(&str) -> bool) -> Option<Result<Self, Response>> {
        let headers = request.headers();
        let is_one = request.method() == Method::GET
            && has(headers, header::CONNECTION, "upgrade")
            && has(headers, header::UPGRADE, "websocket");
        let protocols: Vec<String> = offered(headers).into_iter().filter(|name| is_spoken(name)).collect();
        (is_one && !protocols.is_empty()).then(|| {
            let is_13 = headers.get(header::SEC_WEBSOCKET_VERSION).is_some_and(|version| version == "13");
            match headers.get(header::SEC_WEBSOCKET_KEY) {
                Some(key) if is_13 => Ok(Self { accept: derive_accept_key(key.as_bytes()), protocols }),
                _ => Err((
                    StatusCode::BAD_REQUEST,
                    [(header::SEC_WEBSOCKET_VERSION, "13")],
                    "a WebSocket needs the headers Sec-WebSocket-Version: 13 and Sec-WebSocket-Key",
                )
                    .into_response()),
            }
        })
    }

    /// The answer that changes to one of the protocols.
    pub(super) fn answer(&self, protocol: &str) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        for (name, value) in
            [(header::SEC_WEBSOCKET_ACCEPT, self.accept.as_str()), (header::SEC_WEBSOCKET_PROTOCOL, protocol)]
        {
            headers.extend(HeaderValue::from_str(value).ok().map(|value| (name, value)));
        }
        response
    }
}

/// The subprotocols that a client offers, in its order.
fn offered(headers: &HeaderMap) -> Vec<String> {
    let values =
        headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|name| name.trim().to_owned()).collect()
}

/// The WebSocket, once the client has its answer; `None` when it has gone before.
pub(super) async fn open(client: OnUpgrade) -> Option<(ToClient, FromClient)> {
    let Ok(Ok(upgraded)) = timeout(CHANGE_WITHIN, client).await else {
        tracing::debug!("a client has gone before its streams began");
        return None;
    };
    let limits = WebSocketConfig::default()
        .read_buffer_size(BUFFER)
        .write_buffer_size(BUFFER)
        .max_message_size(Some(LONGEST))
        .max_frame_size(Some(LONGEST));
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits));
    Some(socket.await.split())
}

/// The next message that says something; `None` when the client has gone, or says what no client of these protocols does.
pub(super) async fn next(from_client: &mut FromClient) -> Option<Bytes> {
    loop {
        match from_client.next().await?.ok()? {
            Message::Binary(bytes) => return Some(bytes),
            // Pings are answered below, and a close is too.
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            Message::Text(_) | Message::Close(_) => return None,
        }
    }
}

/// False: the client has gone.
pub(super) async fn send(to_client: &mut ToClient, bytes: impl Into<Bytes>) -> bool {
    to_client.send(Message::Binary(bytes.into())).await.is_ok()
}

/// Says good-bye, and waits for that of the client a little, so that what was sent arrives.
pub(super) async fn close(mut to_client: ToClient, mut from_client: FromClient) {
    let good_bye = CloseFrame { code: CloseCode::Normal, reason: "".into() };
    let closing = async {
        if to_client.send(Message::Close(Some(good_bye))).await.is_ok() {
            while let Some(Ok(_)) = from_client.next().await {}
        }
        let _ = to_client.close().await;
    };
    let _ = timeout(CLOSE_WITHIN, closing).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(method: &str, headers: &[(&str, &str)]) -> Request {
        let request = Request::builder().method(method);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(Body::empty()).unwrap()
    }

    #[test]
    fn a_websocket_ends_here_when_it_offers_what_is_spoken_and_is_else_the_runtimes() {
        let all = |protocols| {
            [
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "WebSocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", protocols),
            ]
        };
        let of = |request: &Request| Handshake::of(request, |name| name.starts_with('v'));
        let good = of(&asked("GET", &all("a, v2 ,v1"))).unwrap().unwrap();
        assert_eq!(good.protocols, ["v2", "v1"]);
        let answer = good.answer("v1");
        assert_eq!(answer.status(), 101);
        // RFC 6455 §1.3.
        assert_eq!(answer.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert_eq!(answer.headers()["sec-websocket-protocol"], "v1");
        assert!(of(&asked("GET", &all("a"))).is_none(), "none of its protocols");
        assert!(of(&asked("POST", &all("v1"))).is_none(), "a WebSocket begins with GET");
        for left_out in [0, 1] {
            let mut some = all("v1").to_vec();
            some.remove(left_out);
            assert!(of(&asked("GET", &some)).is_none(), "no WebSocket at all");
        }
        for left_out in [2, 3] {
            let mut some = all("v1").to_vec();
            some.remove(left_out);
            let refused = of(&asked("GET", &some)).unwrap().unwrap_err();
            assert_eq!(
                (refused.status(), &refused.headers()["sec-websocket-version"]),
                (StatusCode::BAD_REQUEST, &HeaderValue::from_static("13"))
            );
        }
    }
}
