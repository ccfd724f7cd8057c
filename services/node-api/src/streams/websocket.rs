//! WebSockets that are terminated here (RFC 6455).

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

use super::has_word;
use super::pump::UPGRADE_TIMEOUT;

/// The longest accepted message: some clients send all their input in one.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// The read buffer and the write buffer.
const BUFFER_BYTES: usize = 16 << 10;
/// How long a client may take to answer a close frame.
const CLOSE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

type Socket = WebSocketStream<TokioIo<Upgraded>>;
/// To the client.
pub(super) type ToClient = SplitSink<Socket, Message>;
/// From the client.
pub(super) type FromClient = SplitStream<Socket>;

/// A request for a WebSocket with a supported subprotocol.
#[derive(Debug)]
pub(super) struct Handshake {
    accept: String,
    /// The supported subprotocols that the client offers, in its order; at least one.
    pub(super) protocols: Vec<String>,
}

impl Handshake {
    /// Parses a request; `None` if it is not for a WebSocket with a subprotocol that `is_supported`: the runtime handles it then.
    /// The error is the response to an invalid handshake.
    #[allow(clippy::result_large_err, reason = "`Ok` is the usual case")]
    pub(super) fn parse(request: &Request, is_supported: fn(&str) -> bool) -> Option<Result<Self, Response>> {
        let headers = request.headers();
        let is_websocket = request.method() == Method::GET
            && has_word(headers, header::CONNECTION, "upgrade")
            && has_word(headers, header::UPGRADE, "websocket");
        let protocols: Vec<String> = offered(headers).into_iter().filter(|name| is_supported(name)).collect();
        (is_websocket && !protocols.is_empty()).then(|| {
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

    /// The 101 response that selects one of the subprotocols.
    pub(super) fn response(&self, protocol: &str) -> Response {
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

/// The WebSocket, once the client has received the 101 response; `None` if it has disconnected.
pub(super) async fn open(client: OnUpgrade) -> Option<(ToClient, FromClient)> {
    let Ok(Ok(upgraded)) = timeout(UPGRADE_TIMEOUT, client).await else {
        tracing::debug!("a client disconnected before its stream was open");
        return None;
    };
    let limits = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(BUFFER_BYTES)
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits));
    Some(socket.await.split())
}

/// The next binary message; `None` when the client has disconnected, closed the WebSocket or sent a text message.
pub(super) async fn next(from_client: &mut FromClient) -> Option<Bytes> {
    loop {
        match from_client.next().await?.ok()? {
            Message::Binary(bytes) => return Some(bytes),
            // The library answers pings and close frames.
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            Message::Text(_) | Message::Close(_) => return None,
        }
    }
}

/// Sends a binary message; `false` if the client has disconnected.
pub(super) async fn send(to_client: &mut ToClient, bytes: impl Into<Bytes>) -> bool {
    to_client.send(Message::Binary(bytes.into())).await.is_ok()
}

/// Closes the WebSocket and waits for the client's close frame, so that everything sent before arrives.
pub(super) async fn close(mut to_client: ToClient, mut from_client: FromClient) {
    let frame = CloseFrame { code: CloseCode::Normal, reason: "".into() };
    let closing = async {
        if to_client.send(Message::Close(Some(frame))).await.is_ok() {
            while let Some(Ok(_)) = from_client.next().await {}
        }
        let _ = to_client.close().await;
    };
    let _ = timeout(CLOSE_TIMEOUT, closing).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, headers: &[(&str, &str)]) -> Request {
        let request = Request::builder().method(method);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(Body::empty()).unwrap()
    }

    #[test]
    fn websocket_with_a_supported_subprotocol_is_terminated_here() {
        let all = |protocols| {
            [
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "WebSocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", protocols),
            ]
        };
        let parse = |request: &Request| Handshake::parse(request, |name| name.starts_with('v'));
        let good = parse(&request("GET", &all("a, v2 ,v1"))).unwrap().unwrap();
        assert_eq!(good.protocols, ["v2", "v1"]);
        let response = good.response("v1");
        assert_eq!(response.status(), 101);
        // RFC 6455 §1.3.
        assert_eq!(response.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        assert_eq!(response.headers()["sec-websocket-protocol"], "v1");
        assert!(parse(&request("GET", &all("a"))).is_none(), "none of its subprotocols is supported");
        assert!(parse(&request("POST", &all("v1"))).is_none(), "a WebSocket begins with GET");
        for missing in [0, 1] {
            let mut some = all("v1").to_vec();
            some.remove(missing);
            assert!(parse(&request("GET", &some)).is_none(), "not a WebSocket request");
        }
        for missing in [2, 3] {
            let mut some = all("v1").to_vec();
            some.remove(missing);
            let refused = parse(&request("GET", &some)).unwrap().unwrap_err();
            assert_eq!(
                (refused.status(), &refused.headers()["sec-websocket-version"]),
                (StatusCode::BAD_REQUEST, &HeaderValue::from_static("13"))
            );
        }
    }
}
